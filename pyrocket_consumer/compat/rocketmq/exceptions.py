"""The exceptions: the old package's classes with this package's texts. `__cause__` is the error of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pyrocket_consumer.compat.rocketmq.ffi import _CStatus

_T = TypeVar("_T", bound="type[RocketMQException]")
_EXCEPTION_MAP: dict[int, type[RocketMQException]] = {}


def _register(status_code: int) -> Callable[[_T], _T]:
    def register(cls: _T) -> _T:
        _EXCEPTION_MAP[status_code] = cls
        return cls

    return register


def ffi_check(status_code: int) -> None:
    """Raise the exception for a status of the native library; return for OK.

    Nothing here calls it. It exists for code that called the old one.
    """
    if status_code != _CStatus.OK:
        raise _EXCEPTION_MAP.get(status_code, RocketMQException)(f"status {int(status_code)}")


class RocketMQException(Exception):
    """Base of all exceptions that this package raises on purpose."""


@_register(_CStatus.NULL_POINTER)
class NullPointerException(RocketMQException):
    """A required argument is None, or 0."""


@_register(_CStatus.MALLOC_FAILED)
class MallocFailed(RocketMQException):
    """The native library had no memory. Never raised here."""


class ProducerException(RocketMQException):
    """Base of the exceptions of producers."""


@_register(_CStatus.PRODUCER_START_FAILED)
class ProducerStartFailed(ProducerException):
    """The producer could not be started."""


@_register(_CStatus.PRODUCER_SEND_SYNC_FAILED)
class ProducerSendSyncFailed(ProducerException):
    """The send failed; the message may be stored if the response was lost."""


@_register(_CStatus.PRODUCER_SEND_ONEWAY_FAILED)
class ProducerSendOnewayFailed(ProducerException):
    """The message was not sent."""


@_register(_CStatus.PRODUCER_SEND_ORDERLY_FAILED)
class ProducerSendOrderlyFailed(ProducerException):
    """The send failed; the message may be stored if the response was lost."""


class ProducerSendAsyncFailed(ProducerException):
    """A message sent asynchronously was not stored. Never raised, because the old package has no such send either."""

    def __init__(self, msg: str, error: int, file: str, line: int, type: str) -> None:  # noqa: A002
        super().__init__(msg)
        self.error = error
        self.file = file
        self.line = line
        self.type = type

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.error, self.file, self.line, self.type)


class ConsumerException(RocketMQException):
    """Base of the exceptions of consumers."""


@_register(_CStatus.PUSH_CONSUMER_START_FAILED)
class PushConsumerStartFailed(ConsumerException):
    """The consumer could not be started."""
