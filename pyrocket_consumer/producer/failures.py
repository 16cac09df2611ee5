"""What a failed attempt means: whether the message may be stored, and who may take it yet."""

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
    """The route has no queue that will do, and none is known to come back."""


class SendFailure(Enum):
    """What became of a message that was not acknowledged, and what to do with it."""

    RETRY = "not stored; the same broker may take it in a moment"
    RETRY_ELSEWHERE = "not stored; another broker may take it"
    UNKNOWN = "stored or not; to send it again may make a copy"
    PERMANENT = "not stored, and no broker will take it"


# Refused before anything was stored, for a reason that passes or that a new route ends. 215 is 2 by another name.
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

# The same code stands for many reasons; only the text tells.
_SLAVE_TEXT = "[REJECTREQUEST]"
_READ_ONLY_TEXT = "sending message is forbidden"
_NOT_STORED_TEXTS = ("[PC_SYNCHRONIZED]", "server is busy or broken")


def classify_failure(error: Exception) -> SendFailure:
    """Return what `error`, in the place of an acknowledgement, means."""
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
    """Tell whether the broker says that it has no such queue: 1 up to 5.1.4, 29 from 5.3.2 on."""
    return "queueId[" in error.remark and "is illegal" in error.remark


def is_route_stale(error: Exception) -> bool:
    """Tell whether the route may be old: nobody is there, or who is there does not have the queue (any more)."""
    if not isinstance(error, BrokerError):
        return True
    if error.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL):
        return _SLAVE_TEXT in error.remark
    return classify_failure(error) is SendFailure.RETRY


def is_topic_missing(error: Exception | None) -> bool:
    """Tell whether the broker says that it has no such topic."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST


def is_broker_in_trouble(error: Exception) -> bool:
    """Tell whether the broker is the reason, and not the message, so that the next ones, too, do better elsewhere."""
    return not isinstance(error, BrokerError) or error.code in _BROKER_TROUBLE_CODES
