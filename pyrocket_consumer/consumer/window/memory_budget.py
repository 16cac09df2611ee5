"""The limit on the bytes that all windows of a consumer hold together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pyrocket_consumer.consumer.window.decompression_budget import DecompressionBudget
from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES

WAITING_CHECK_S = 0.02
"""How often the budget checks the windows that wait to pull."""

OVER_LIMIT_EVERY_S = 0.1
"""The time between two pulls beyond the limit. The broker may hold the first one for long, or never respond."""


class PullWaiter:
    """A window that waits until it may pull."""

    granted: int | None = None
    """The bytes that the budget counts for a window that was woken and has not pulled yet."""

    is_over_limit = False
    """Whether the window pulls although the limit is reached."""

    def wake(self) -> None:
        """Pull, or withdraw."""
        raise NotImplementedError


class MemoryBudget:
    """The limit on the bytes that all windows of a consumer, or of one topic, hold together; it decides who may pull.

    A window that holds messages may pull while it holds fewer bytes than are left, so a stuck queue leaves memory for
    the others. When no bytes are left, empty windows pull first, in the order in which they began to wait. A pull in
    flight counts with its expected size. The pull loop drops a response that arrives when no memory is left, and pulls
    it again.

    All held messages may be stuck. So while `idle()` returns True, because workers have nothing to do, one window after
    the other may pull beyond the limit.

    Any thread may use it, but only the thread of `loop` may call `reserve`. A thread may acquire its lock while it
    holds the lock of a window, and acquires no other lock while it holds this one. Methods that free memory return the
    windows that may pull; the caller wakes them when it holds no lock.
    """

    def __init__(
        self,
        limit: int = 100 * 1024 * 1024,
        loop: asyncio.AbstractEventLoop | None = None,
        idle: Callable[[], bool] = lambda: False,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.bodies = DecompressionBudget(limit, max_body_bytes)
        """Bodies that listener calls decompress have a budget of the same size."""
        self._limit = limit
        self._loop = loop
        self._idle = idle
        self._lock = threading.Lock()
        self._held = 0
        self._expected = 0
        self._arrived = 0  # bytes of responses that no window has yet; part of _expected
        self._waiting: dict[PullWaiter, int] = {}  # empty windows in their order, with the bytes that they expect
        self._short_of_memory: dict[PullWaiter, int] = {}  # windows that hold more bytes than are left, and how many
        self._over_limit = 0  # how many windows pull although the limit is reached
        self._next_over_limit_at = 0.0
        self._next_check: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"MemoryBudget({self._held} of {self._limit} held, {self._expected} expected, {len(self._waiting)} waiting)"
        )

    @property
    def held(self) -> int:
        """How many bytes the windows hold."""
        return self._held

    def _left(self) -> int:
        return self._limit - self._held - self._expected

    def may_pull(self, held: int) -> bool:
        """Return whether to wake a window that holds `held` bytes and waits.

        An empty window is always woken, because `reserve` adds it to the waiting windows if it may not pull yet.
        """
        with self._lock:
            return not held or (held < self._left() and not self._waiting)

    def reserve(self, window: PullWaiter, held: int, expected: int, *, ahead: bool = False) -> bool:
        """Return whether `window`, which holds `held` bytes, may pull; count `expected` bytes until `settle`.

        Otherwise the budget wakes the window later, which must then pull or call `stop_waiting`. With `ahead` it is not
        woken, because it has other pulls in flight.
        """
        with self._lock:
            self._short_of_memory.pop(window, None)
            if window.granted is not None:
                self._expected -= window.granted
                window.granted = None
            elif self._waiting or held >= self._left():
                if not ahead:
                    (self._short_of_memory if held else self._waiting).setdefault(window, held or expected)
                    self._check_later()
                return False
            self._expected += expected
            return True

    def may_unpack(self, held: int) -> bool:
        """Return whether a window that holds `held` bytes may unpack an inner batch of unknown size."""
        return self._held < self._limit or (not held and self._idle())

    def accept(self, window: PullWaiter, expected: int, size: int) -> bool:
        """Return whether a response of `size` bytes is accepted; count its size in place of `expected` until `settle`.

        If no memory is left, the pull must be sent again later.
        """
        with self._lock:
            if self._held + self._arrived >= self._limit and not window.is_over_limit:
                return False
            self._expected += size - expected
            self._arrived += size
            return True

    def add(self, size: int) -> None:
        """Count bytes that a window has begun to hold."""
        with self._lock:
            self._held += size

    def free(self, size: int) -> list[PullWaiter]:
        """Count bytes that a window holds no longer."""
        with self._lock:
            self._held -= size
            return self._grant_waiting()

    def settle(self, window: PullWaiter, expected: int, arrived: int) -> list[PullWaiter]:
        """Stop counting a pull whose messages are in the window, or will not arrive. `arrived` bytes were accepted."""
        with self._lock:
            self._expected -= expected
            self._arrived -= arrived
            self._end_over_limit(window)
            return self._grant_waiting()

    def stop_waiting(self, window: PullWaiter) -> list[PullWaiter]:
        """Let another window pull in place of `window`, which does not pull now."""
        with self._lock:
            self._waiting.pop(window, None)
            self._short_of_memory.pop(window, None)
            if window.granted is not None:
                self._expected -= window.granted
                window.granted = None
                self._end_over_limit(window)
            return self._grant_waiting()

    def _end_over_limit(self, window: PullWaiter) -> None:
        self._over_limit -= window.is_over_limit
        window.is_over_limit = False

    def _grant_waiting(self) -> list[PullWaiter]:
        woken: list[PullWaiter] = []
        while self._waiting and self._left() > 0:
            woken.append(self._grant_next())
        return woken

    def _grant_next(self) -> PullWaiter:
        window = next(iter(self._waiting))
        window.granted = self._waiting.pop(window)
        self._expected += window.granted
        return window

    def _check_later(self) -> None:
        if self._next_check is None and self._loop is not None:
            self._next_check = self._loop.call_later(WAITING_CHECK_S, self._check_waiting)

    def _check_waiting(self) -> None:
        assert self._loop is not None
        is_idle, now = self._idle(), self._loop.time()
        with self._lock:
            self._next_check = None
            woken: list[PullWaiter] = []
            if not self._waiting:
                left = self._left()
                woken = [window for window, held in self._short_of_memory.items() if held < left] if left > 0 else []
                for window in woken:
                    del self._short_of_memory[window]
            elif is_idle and (not self._over_limit or now >= self._next_over_limit_at):
                woken = [window := self._grant_next()]
                if self._held >= self._limit:
                    self._over_limit += not window.is_over_limit
                    window.is_over_limit = True
                    self._next_over_limit_at = now + OVER_LIMIT_EVERY_S
            if self._waiting or self._short_of_memory:
                self._check_later()
        wake_all(woken)


def wake_all(windows: list[PullWaiter]) -> None:
    """Wake windows that may pull. The caller holds no lock."""
    for window in windows:
        window.wake()
