"""An end that threads and coroutines wait for, whatever signals come meanwhile."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

_SIGNAL_CHECK_S = 1.0
"""A signal that comes just before a thread begins to sleep does not wake it: Python looks at it after that."""


class Latch:
    """Something that comes once, and can be waited for before and after.

    The handler of a signal runs between any two steps of the main thread, and may raise there. `threading.Event` takes
    a lock with several of them: to set it in a handler may find the lock taken by the very wait that was interrupted,
    and a wait that Ctrl-C ends at the wrong moment leaves it taken. A SimpleQueue is made for both, and everybody who
    waits has one.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Whether it has come."""
        return self._is_set

    def set(self) -> None:
        """Say that it has come. Any thread, and handlers of signals."""
        self._is_set = True
        for notify in list(self._waiting):  # whoever adds itself after this sees that it has come
            notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`. Returns whether it has come."""
        wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        notify = partial(wakes.put, None)
        self._waiting.append(notify)
        try:
            while not self._is_set:
                left = _SIGNAL_CHECK_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    wakes.get(timeout=min(left, _SIGNAL_CHECK_S))
                except queue.Empty:
                    pass
        finally:
            self._waiting.remove(notify)
        return self._is_set

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """Do what `wait` does, on an asyncio loop."""
        loop, is_set_event = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(is_set_event.set)
            except RuntimeError:
                pass  # the loop has ended, and with it whoever waited

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
    """SIGTERM has come, and the main thread leaves what it does in order, as it does after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def terminate() -> None:
    """Leave what the main thread does."""
    raise Terminated


_sigterm_callbacks: list[Callable[[], None]] = []


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for notify in list(_sigterm_callbacks):  # noqa: PERF101 - a callback may remove itself
        notify()


@contextmanager
def on_sigterm(notify: Callable[[], None]) -> Iterator[None]:
    """Within this, SIGTERM calls `notify` in the main thread, unless the program has a handler of its own."""
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
