"""Waits of threads and coroutines for one event or result, which a signal may interrupt at any step.

A signal handler runs between any two steps of the main thread, and may raise there. The locks of `threading.Event` and
`concurrent.futures.Future` are held for several steps. A handler can then wait forever for the thread that it has
interrupted, and Ctrl-C can leave the lock taken. So here each waiter has a plain lock of its own, which is released in
one step. The thread that sets the event, usually the I/O thread, never waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Generic, TypeVar

T = TypeVar("T")

_SIGNAL_CHECK_S = 1.0
"""How long a wait sleeps at most. Python handles a signal that arrives just before a sleep only after that sleep."""
_RESOLVED = "the future has a result already"


class Latch:
    """A flag that is set once, by any thread or signal handler, and that any thread or coroutine can wait for."""

    _is_set = False

    def __init__(self) -> None:
        self._observers: dict[Callable[[], object], None] = {}

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and call all observers."""
        self._is_set = True
        if self._observers:
            self._notify()

    def add_observer(self, notify: Callable[[], object]) -> None:
        """Call `notify` once when the flag is set, or now if it is set already. It must not block or raise."""
        self._observers[notify] = None
        if self._is_set:  # checked after the observer was added, so that it is called by `set` or here
            self._notify()

    def _notify(self) -> None:
        for notify in list(self._observers):
            if self._observers.pop(notify, notify) is None:  # otherwise another thread calls it
                notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`; None waits without limit. Return whether the flag is set."""
        if self._is_set:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wake = threading.Lock()
        wake.acquire()
        self.add_observer(wake.release)
        try:
            while not self._is_set:
                left_s = _SIGNAL_CHECK_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    break
                wake.acquire(timeout=min(left_s, _SIGNAL_CHECK_S))
        finally:
            self._observers.pop(wake.release, None)
        return self._is_set

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """Do the same as `wait`, on an asyncio loop."""
        loop, is_set_event = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(is_set_event.set)
            except RuntimeError:
                pass  # the loop and its waiting task have ended

        self.add_observer(notify)
        try:
            if not self._is_set:
                async with asyncio.timeout(timeout_s):
                    await is_set_event.wait()
        except TimeoutError:
            pass
        finally:
            self._observers.pop(notify, None)
        return self._is_set


class ThreadFuture(Latch, Generic[T]):
    """The result or error of another thread's work."""

    _result: T | None = None
    _error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Set the result. A future has one result or error; a second one raises InvalidStateError."""
        if self._is_set:
            raise InvalidStateError(_RESOLVED)
        self._result = result
        self._is_set = True  # as `set` does
        if self._observers:
            self._notify()

    def set_exception(self, error: BaseException) -> None:
        """Set the error in place of a result."""
        if self._is_set:
            raise InvalidStateError(_RESOLVED)
        self._error = error
        self.set()

    @property
    def error(self) -> BaseException | None:
        """The error, or None if there is a result, or nothing yet."""
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, and return it, or raise the error. Raise TimeoutError after `timeout_s` seconds."""
        if not (self._is_set or self.wait(timeout_s)):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback refers to this frame, which would create a cycle
