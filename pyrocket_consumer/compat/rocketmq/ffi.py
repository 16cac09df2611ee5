"""The enums that the old package defines next to its native library. This package has no native library."""

from __future__ import annotations

import logging
from ctypes import ArgumentError
from enum import IntEnum
from typing import Any, SupportsInt

from pyrocket_consumer.text import PACKAGE_LOG, logger, safe_repr

__all__ = ["CtypesEnum", "MessageModel", "TraceModel", "dll"]

_log = logger("compat")

_warned: set[str] = set()


def _warn_once(what: str, text: str) -> None:
    """Log `text`, unless this process has logged a warning about `what`."""
    if what not in _warned:
        _warned.add(what)
        _log.warning("%s: %s", what, text)


class CtypesEnum(IntEnum):
    """A number of the native library."""

    @classmethod
    def from_param(cls, obj: SupportsInt) -> int:
        """Return `obj` as a number."""
        return int(obj)


class _CStatus(CtypesEnum):
    OK = 0
    NULL_POINTER = 1
    MALLOC_FAILED = 2
    PRODUCER_START_FAILED = 10
    PRODUCER_SEND_SYNC_FAILED = 11
    PRODUCER_SEND_ONEWAY_FAILED = 12
    PRODUCER_SEND_ORDERLY_FAILED = 13
    PRODUCER_SEND_ASYNC_FAILED = 14
    PUSH_CONSUMER_START_FAILED = 20
    NOT_SUPPORT_NOW = -1


class _CLogLevel(CtypesEnum):
    FATAL = 1
    ERROR = 2
    WARN = 3
    INFO = 4
    DEBUG = 5
    TRACE = 6
    LEVEL_NUM = 7


class MessageModel(CtypesEnum):
    """Whether every member gets each message, or one."""

    BROADCASTING = 0
    CLUSTERING = 1


class TraceModel(CtypesEnum):
    """Whether messages are traced."""

    OPEN = 0
    CLOSE = 1


_LEVELS: dict[int, int] = {
    _CLogLevel.FATAL: logging.CRITICAL,
    _CLogLevel.ERROR: logging.ERROR,
    _CLogLevel.WARN: logging.WARNING,
    _CLogLevel.INFO: logging.INFO,
    _CLogLevel.DEBUG: logging.DEBUG,
    _CLogLevel.TRACE: logging.DEBUG,
}


class _NoLibrary:
    """Replaces the native library. Applications call only its functions for the log."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no native library, so no {name}; use the classes of rocketmq.client")

    def SetPushConsumerLogPath(self, handle: object, path: object) -> int:  # noqa: N802
        _warn_once("log path", "log lines go to Python's logger 'pyrocket_consumer', not to a file")
        return _CStatus.OK

    def SetPushConsumerLogFileNumAndSize(self, handle: object, number: int, size: int) -> int:  # noqa: N802
        return self.SetPushConsumerLogPath(handle, None)

    def SetPushConsumerLogLevel(self, handle: object, level: int) -> int:  # noqa: N802
        if not isinstance(level, int) or level not in _LEVELS:
            raise ArgumentError(f"level={safe_repr(level)} is not allowed; use 1, FATAL, to 6, TRACE")
        PACKAGE_LOG.setLevel(_LEVELS[level])
        return _CStatus.OK

    SetProducerLogPath = SetPushConsumerLogPath
    SetProducerLogFileNumAndSize = SetPushConsumerLogFileNumAndSize
    SetProducerLogLevel = SetPushConsumerLogLevel


dll = _NoLibrary()
"""The replacement: six functions for the log configure Python's logger `pyrocket_consumer`; others do not exist."""
