"""Classify failed attempts: whether the message may be stored, and which broker may still store it."""

from __future__ import annotations

from enum import Enum

from pyrocket_consumer.cluster.broker import DEGRADED_CODES
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.protocol.codes import ResponseCode


class NoWritableQueue(RocketError):
    """The route has no writable queue for the message, and none is expected to return."""


class SendFailure(Enum):
    """The state of a message without acknowledgement, and what to do next."""

    RETRY = "not stored; the same broker may store it in a moment"
    RETRY_ELSEWHERE = "not stored; another broker may store it"
    UNKNOWN = "stored or not; sending it again may store a copy"
    PERMANENT = "not stored, and no broker will store it"


# Refusals before the message is stored, for a temporary reason or because the route is stale. Code 215 means 2.
# Source: DefaultMQProducer.retryResponseCodes; SendMessageProcessor.handlePutMessageResult.
_RETRY_CODES = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
_RETRY_ELSEWHERE_CODES = frozenset({ResponseCode.NO_BUYER_ID, ResponseCode.NOT_IN_CURRENT_UNIT})

_BROKER_TROUBLE_CODES = _RETRY_CODES - {ResponseCode.TOPIC_NOT_EXIST}

# Brokers use the same code for many reasons. Only the text distinguishes them.
_SLAVE_TEXT = "[REJECTREQUEST]"
_READ_ONLY_TEXT = "sending message is forbidden"
_NOT_STORED_TEXTS = ("[PC_SYNCHRONIZED]", "server is busy or broken")


def classify_failure(error: Exception) -> SendFailure:
    """Return the class of `error`, which came instead of an acknowledgement."""
    if isinstance(error, ConnectError):
        return SendFailure.RETRY
    if isinstance(error, (RequestTimeout, ConnectionLost)):
        return SendFailure.UNKNOWN
    if not isinstance(error, BrokerError):
        return SendFailure.PERMANENT
    if isinstance(error, PermissionDenied):
        return SendFailure.RETRY if _READ_ONLY_TEXT in error.remark else SendFailure.RETRY_ELSEWHERE
    if error.code in _RETRY_CODES or _is_queue_illegal(error):
        return SendFailure.RETRY
    if error.code in _RETRY_ELSEWHERE_CODES:
        return SendFailure.RETRY_ELSEWHERE
    if error.code == ResponseCode.SYSTEM_ERROR:
        return SendFailure.RETRY if any(text in error.remark for text in _NOT_STORED_TEXTS) else SendFailure.UNKNOWN
    return SendFailure.UNKNOWN if error.code in DEGRADED_CODES else SendFailure.PERMANENT


def _is_queue_illegal(error: BrokerError) -> bool:
    """Return whether the broker has no such queue. The code is 1 up to 5.1.4, and 29 from 5.3.2 on."""
    return "queueId[" in error.remark and "is illegal" in error.remark


def is_route_stale(error: Exception) -> bool:
    """Return whether the route may be stale: no broker is at the address, or the broker does not have the queue."""
    if not isinstance(error, BrokerError):
        return True
    if error.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL):
        return _SLAVE_TEXT in error.remark
    return classify_failure(error) is SendFailure.RETRY


def is_topic_missing(error: Exception | None) -> bool:
    """Return whether the broker reports that the topic does not exist."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST


def is_broker_in_trouble(error: Exception) -> bool:
    """Return whether the broker caused the error, and not the message, so that the next messages should avoid it."""
    return not isinstance(error, BrokerError) or error.code in _BROKER_TROUBLE_CODES
