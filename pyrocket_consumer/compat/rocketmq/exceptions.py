"""What calls raise: the old package's classes with this package's texts. `__cause__` is the error of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyrocket_consumer.compat.rocketmq.ffi import _CStatus

_T = TypeVar("_T", bound="type[RocketMQException]")
_EXCEPTION_MAP: dict[int, type[RocketMQException]] = {}


def _register(status_code: int) -> Callable[[_T], _T]:
    def register(cls: _T) -> _T:
        _EXCEPTION_MAP[status_code] = cls
        return cls

    return register


def ffi_check(status_code: int) -> None:
    """Raise the exception that stands for a status of the native library; return for OK.

    Nothing here calls it: it is for code that was written around the old one.
    """
    if status_code != _CStatus.OK:
        raise _EXCEPTION_MAP.get(status_code, RocketMQException)(f"status {int(status_code)}")


class RocketMQException(Exception):
    """Base of all that this package raises on purpose."""


@_register(_CStatus.NULL_POINTER)
class NullPointerException(RocketMQException):
    """Something is None, or 0, that must be there."""


@_register(_CStatus.MALLOC_FAILED)
class MallocFailed(RocketMQException):
    """The native library had no memory. Never raised here."""


class ProducerException(RocketMQException):
    """Base of what producers raise."""


@_register(_CStatus.PRODUCER_START_FAILED)
class ProducerStartFailed(ProducerException):
    """The producer could not be started."""


@_register(_CStatus.PRODUCER_SEND_SYNC_FAILED)
class ProducerSendSyncFailed(ProducerException):
    """The message was not stored, as far as is known."""


@_register(_CStatus.PRODUCER_SEND_ONEWAY_FAILED)
class ProducerSendOnewayFailed(ProducerException):
    """The message was not sent."""


@_register(_CStatus.PRODUCER_SEND_ORDERLY_FAILED)
class ProducerSendOrderlyFailed(ProducerException):
    """The message was not stored, as far as is known."""


class ProducerSendAsyncFailed(ProducerException):
    """A message sent asynchronously was not stored. Never raised here: the old package cannot send so, either."""

    def __init__(self, msg: str, error: int, file: str, line: int, type: str) -> None:  # noqa: A002
        super().__init__(msg)
        self.error = error
        self.file = file
        self.line = line
        self.type = type


class ConsumerException(RocketMQException):
    """Base of what consumers raise."""


@_register(_CStatus.PUSH_CONSUMER_START_FAILED)
class PushConsumerStartFailed(ConsumerException):
    """The consumer could not be started."""
