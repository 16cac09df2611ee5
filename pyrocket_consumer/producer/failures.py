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


class NoQueue(RocketError):
    """The route has no queue that will do, and none is known to come back."""


class Verdict(Enum):
    """What became of a message that was not acknowledged, and what to do with it."""

    AGAIN = "not stored; the same broker may take it in a moment"
    ELSEWHERE = "not stored; another broker may take it"
    UNKNOWN = "stored or not; to send it again may make a copy"
    NEVER = "not stored, and no broker will take it"


# Refused before anything was stored, for a reason that passes or that a new route ends. 215 is 2 by another name.
# Source: DefaultMQProducer.retryResponseCodes; SendMessageProcessor.handlePutMessageResult.
_AGAIN = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
_ELSEWHERE = frozenset({ResponseCode.NO_BUYER_ID, ResponseCode.NOT_IN_CURRENT_UNIT})

_IN_TROUBLE = _AGAIN - {ResponseCode.TOPIC_NOT_EXIST}

# The same code stands for many reasons; only the text tells.
_SLAVE = "[REJECTREQUEST]"
_READ_ONLY = "sending message is forbidden"
_NOT_STORED = ("[PC_SYNCHRONIZED]", "server is busy or broken")


def verdict(error: Exception) -> Verdict:
    """Return what `error`, in the place of an acknowledgement, means."""
    if isinstance(error, ConnectError):
        return Verdict.AGAIN
    if isinstance(error, (RequestTimeout, ConnectionLost)):
        return Verdict.UNKNOWN
    if not isinstance(error, BrokerError):
        return Verdict.NEVER
    if isinstance(error, PermissionDenied):
        return Verdict.AGAIN if _READ_ONLY in error.remark else Verdict.ELSEWHERE
    if error.code in _AGAIN or _is_queue_illegal(error):
        return Verdict.AGAIN
    if error.code in _ELSEWHERE:
        return Verdict.ELSEWHERE
    if error.code == ResponseCode.SYSTEM_ERROR:
        return Verdict.AGAIN if any(text in error.remark for text in _NOT_STORED) else Verdict.UNKNOWN
    return Verdict.UNKNOWN if error.code in DEGRADED_CODES else Verdict.NEVER


def _is_queue_illegal(error: BrokerError) -> bool:
    """Tell whether the broker says that it has no such queue: 1 up to 5.1.4, 29 from 5.3.2 on."""
    return "queueId[" in error.remark and "is illegal" in error.remark


def asks_for_route(error: Exception) -> bool:
    """Tell whether the route may be old: nobody is there, or who is there does not have the queue (any more)."""
    if not isinstance(error, BrokerError):
        return True
    if error.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL):
        return _SLAVE in error.remark
    return verdict(error) is Verdict.AGAIN


def is_topic_missing(error: Exception | None) -> bool:
    """Tell whether the broker says that it has no such topic."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST


def is_broker_in_trouble(error: Exception) -> bool:
    """Tell whether the broker is the reason, and not the message, so that the next ones, too, do better elsewhere."""
    return not isinstance(error, BrokerError) or error.code in _IN_TROUBLE
