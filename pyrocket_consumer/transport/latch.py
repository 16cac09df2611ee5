"""A one-shot flag for threads, coroutines and signal handlers, and the handling of SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

_SIGNAL_CHECK_S = 1.0
"""How long a wait sleeps at most. Python handles a signal that arrives just before a sleep only after that sleep."""


def _release(lock: threading.Lock) -> None:
    """Wake the waiter that holds `lock`, unless another call has woken it."""
    try:
        lock.release()
    except RuntimeError:
        pass


class Latch:
    """A flag that is set once, by any thread or signal handler, and that any thread or coroutine can wait for.

    A signal handler runs between any two steps of the main thread, and may raise there. `threading.Event` takes a lock
    in several steps. If a handler sets the event, the wait that it interrupted may hold the lock. If Ctrl-C ends a wait
    at the wrong moment, the lock stays locked. So each waiter has a plain lock, which `set` releases in one step.
    `SimpleQueue` is no alternative: its `get` waits forever if the deadline passes while it starts to wait.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag. Any thread and any signal handler may call this."""
        self._is_set = True
        for notify in list(self._waiting):  # a waiter that is added later sees the flag
            notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`; None waits without limit. Return whether the flag is set."""
        wake = threading.Lock()
        wake.acquire()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        notify = partial(_release, wake)
        self._waiting.append(notify)
        try:
            while not self._is_set:
                left = _SIGNAL_CHECK_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                wake.acquire(timeout=min(left, _SIGNAL_CHECK_S))
        finally:
            self._waiting.remove(notify)
        return self._is_set

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """Do the same as `wait`, on an asyncio loop."""
        loop, is_set_event = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(is_set_event.set)
            except RuntimeError:
                pass  # the loop and its waiting task have ended

        self._waiting.append(notify)
        try:
            if not self._is_set:
                async with asyncio.timeout(timeout_s):
                    await is_set_event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(notify)
        return self._is_set


class Terminated(SystemExit):
    """Raised in the main thread after SIGTERM, so that it cleans up as it does after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def terminate() -> None:
    """Raise Terminated in the main thread."""
    raise Terminated


_sigterm_callbacks: list[Callable[[], None]] = []


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for notify in list(_sigterm_callbacks):  # noqa: PERF101 - a callback may remove itself
        notify()


@contextmanager
def on_sigterm(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` in the main thread on SIGTERM within this context, unless the program has its own handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (_sigterm_callbacks or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return
    _sigterm_callbacks.append(notify)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _sigterm_callbacks.remove(notify)
        if not _sigterm_callbacks:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
