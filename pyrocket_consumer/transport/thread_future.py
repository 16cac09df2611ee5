"""What one thread waits for and another one tells."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadFuture(Generic[T]):
    """The result of what another thread does, or its error. One thread waits for it; an interrupt may end that.

    Ctrl-C may come between any two steps of a thread. In a `Condition`, and so in a `Future`, it can leave the lock
    taken for ever, and who tells the outcome, mostly the I/O thread, would wait for that lock. Here is no such lock.
    """

    __slots__ = ("_error", "_result", "_untold")

    def __init__(self) -> None:
        self._untold = threading.Lock()
        self._untold.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Tell the result; the outcome is told once."""
        self._result = result
        self._untold.release()

    def set_exception(self, error: BaseException) -> None:
        """Tell why there is none."""
        self._error = error
        self._untold.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the outcome is told; False if it is not within `timeout_s`."""
        if timeout_s is None:
            return self._untold.acquire()
        return self._untold.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX))

    def result(self) -> T:
        """Return the result that `wait` has waited for, or raise the error."""
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback would hold it, and it the error
