"""The exceptions: the old package's classes with this package's texts. `__cause__` is the error of this package."""

from __future__ import annotations

from typing import Any

from pyrocket_consumer.compat.rocketmq.ffi import _CStatus


class RocketMQException(Exception):
    """Base of all exceptions that this package raises on purpose."""


class NullPointerException(RocketMQException):
    """A required argument is None, or 0."""


class MallocFailed(RocketMQException):
    """The native library had no memory. Never raised here."""


class ProducerException(RocketMQException):
    """Base of the exceptions of producers."""


class ProducerStartFailed(ProducerException):
    """The producer could not be started."""


class ProducerSendSyncFailed(ProducerException):
    """The send failed; the message may be stored if the response was lost."""


class ProducerSendOnewayFailed(ProducerException):
    """The message was not sent."""


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


class PushConsumerStartFailed(ConsumerException):
    """The consumer could not be started."""


_EXCEPTIONS: dict[int, type[RocketMQException]] = {
    _CStatus.NULL_POINTER: NullPointerException,
    _CStatus.MALLOC_FAILED: MallocFailed,
    _CStatus.PRODUCER_START_FAILED: ProducerStartFailed,
    _CStatus.PRODUCER_SEND_SYNC_FAILED: ProducerSendSyncFailed,
    _CStatus.PRODUCER_SEND_ONEWAY_FAILED: ProducerSendOnewayFailed,
    _CStatus.PRODUCER_SEND_ORDERLY_FAILED: ProducerSendOrderlyFailed,
    _CStatus.PUSH_CONSUMER_START_FAILED: PushConsumerStartFailed,
}


def ffi_check(status_code: int) -> None:
    """Raise the exception for a status of the native library; return for OK.

    Nothing here calls it. It exists for code that called the old one.
    """
    if status_code != _CStatus.OK:
        raise _EXCEPTIONS.get(status_code, RocketMQException)(f"status {int(status_code)}")
