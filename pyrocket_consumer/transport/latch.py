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

_LONGEST_WAIT_S = 1.0
"""A signal that comes just before a thread begins to sleep does not wake it: Python looks at it after that."""


class End:
    """Something that comes once, and can be waited for before and after.

    The handler of a signal runs between any two steps of the main thread, and may raise there. `threading.Event` takes
    a lock with several of them: to set it in a handler may find the lock taken by the very wait that was interrupted,
    and a wait that Ctrl-C ends at the wrong moment leaves it taken. A SimpleQueue is made for both, and everybody who
    waits has one.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._waiting: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        """Whether it has come."""
        return self._has_come

    def come(self) -> None:
        """Say that it has come. Any thread, and handlers of signals."""
        self._has_come = True
        for tell in list(self._waiting):  # whoever adds itself after this sees that it has come
            tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`. Returns whether it has come."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        tell = partial(bell.put, None)
        self._waiting.append(tell)
        try:
            while not self._has_come:
                left = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    bell.get(timeout=min(left, _LONGEST_WAIT_S))
                except queue.Empty:
                    pass
        finally:
            self._waiting.remove(tell)
        return self._has_come

    async def awaited(self, timeout_s: float | None = None) -> bool:
        """Do what `wait` does, on an asyncio loop."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(has_come.set)
            except RuntimeError:
                pass  # the loop has ended, and with it whoever waited

        self._waiting.append(tell)
        try:
            if not self._has_come:
                async with asyncio.timeout(timeout_s):
                    await has_come.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(tell)
        return self._has_come


class Terminated(SystemExit):
    """SIGTERM has come, and the main thread leaves what it does in order, as it does after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def terminate() -> None:
    """Leave what the main thread does."""
    raise Terminated


_told_of_sigterm: list[Callable[[], None]] = []


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for tell in list(_told_of_sigterm):
        tell()


@contextmanager
def told_of_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Within this, SIGTERM calls `tell` in the main thread, unless the program has a handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (_told_of_sigterm or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return
    _told_of_sigterm.append(tell)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _told_of_sigterm.remove(tell)
        if not _told_of_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
