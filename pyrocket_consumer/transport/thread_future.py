"""A future whose waiting thread may be interrupted by a signal."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadFuture(Generic[T]):
    """The result or error of another thread's work. One thread waits for it, and a signal may interrupt the wait.

    Ctrl-C may interrupt a thread between any two steps. In a `Condition`, which a `Future` uses, it can leave the lock
    locked forever. Then the thread that sets the result, usually the I/O thread, would block. This class has no such
    lock.
    """

    __slots__ = ("_error", "_result", "_unset")

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Set the result. Call this or `set_exception` exactly once."""
        self._result = result
        self._unset.release()

    def set_exception(self, error: BaseException) -> None:
        """Set the error in place of a result."""
        self._error = error
        self._unset.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the result or error for at most `timeout_s`. Return whether it is set."""
        if timeout_s is None:
            return self._unset.acquire()
        return self._unset.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX))

    def result(self) -> T:
        """Return the result, or raise the error, after `wait` has returned True."""
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback refers to this frame, which would create a cycle
