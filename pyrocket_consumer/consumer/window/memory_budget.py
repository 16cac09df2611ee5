"""The bytes that all windows of a consumer may hold together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from pyrocket_consumer.consumer.window.decompression_budget import DecompressionBudget
from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES

WAITING_CHECK_S = 0.02
"""How often windows that wait for their turn, or for more room than they had, are looked after."""

OVER_LIMIT_EVERY_S = 0.1
"""How long a pull beyond the limit is waited for before the next one: brokers may be silent, or hold it for long."""


class PullWaiter(Protocol):
    """A window that waits until it may pull."""

    def wake(self) -> None:
        """Pull, or withdraw."""


class MemoryBudget:
    """The bytes that all windows of a consumer (of a topic) may hold together, and whose turn it is to pull for more.

    A window that holds something may pull while it holds less than what is left, so that one queue that is stuck
    leaves room for others. When nothing is left, windows that hold nothing take turns as room is made, and those that
    hold something come after them. Pulls under way count with what is expected of them, and an answer that comes when
    there is no room is not taken.

    What is held may be stuck: then the next window goes beyond the limit, one after the other, as long as `idle()`
    tells that workers have nothing to do.

    Any thread may use it, `reserve` the one of `loop` only. Its lock is a leaf, and may be taken within a window's.
    Methods that make room return the windows whose turn it is; the caller wakes them when it holds no lock.
    """

    def __init__(
        self,
        limit: int = 100 * 1024 * 1024,
        loop: asyncio.AbstractEventLoop | None = None,
        idle: Callable[[], bool] = lambda: False,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.bodies = DecompressionBudget(limit, max_body_bytes)
        """As much again is for what listener calls unpack."""
        self._limit = limit
        self._loop = loop
        self._idle = idle
        self._lock = threading.Lock()
        self._held = 0
        self._expected = 0
        self._arrived = 0  # of what is expected, what is there and not yet in a window
        self._waiting: dict[PullWaiter, int] = {}  # windows that hold nothing, in turn, and what they expect
        self._granted: dict[PullWaiter, int] = {}  # those that were woken and have not pulled yet
        self._short_of_memory: dict[
            PullWaiter, int
        ] = {}  # windows that were to pull, and held so much: more than was left
        self._over_limit: set[PullWaiter] = set()  # these pull although as much as may be is held
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
        """Tell whether a window that holds `held` bytes may pull, or wait for its turn to do so."""
        with self._lock:
            return not held or (held < self._left() and not self._waiting)

    def reserve(self, window: PullWaiter, held: int, expected: int, *, ahead: bool = False) -> bool:
        """Tell whether `window`, which holds `held` bytes, may pull; `expected` bytes count until they are settled.

        If not, it is woken when its turn comes, or when there is more room; it may pull then, or must `withdraw`.
        `ahead`: it has other pulls under way, and need not be woken.
        """
        with self._lock:
            self._short_of_memory.pop(window, None)
            granted = self._granted.pop(window, None)
            if granted is not None:
                self._expected -= granted
            elif self._waiting or held >= self._left():
                if not ahead:
                    (self._short_of_memory if held else self._waiting).setdefault(window, held or expected)
                    self._check_later()
                return False
            self._expected += expected
            return True

    def may_unpack(self, held: int) -> bool:
        """Tell whether a window that holds `held` bytes may unpack an inner batch, whose size nobody knows before."""
        return self._held < self._limit or (not held and self._idle())

    def accept(self, window: PullWaiter, expected: int, size: int) -> bool:
        """Tell whether an answer of `size` bytes is taken; they then count as what was expected, until it is settled.

        If there is no room it has to be asked for again.
        """
        with self._lock:
            if self._held + self._arrived >= self._limit and window not in self._over_limit:
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
        """What was expected of a pull is in the window by now, or will not come; so many bytes had `arrived`."""
        with self._lock:
            self._expected -= expected
            self._arrived -= arrived
            self._over_limit.discard(window)
            return self._grant_waiting()

    def withdraw(self, window: PullWaiter) -> list[PullWaiter]:
        """`window` does not pull, although it waits for its turn or has it: the next one may."""
        with self._lock:
            self._waiting.pop(window, None)
            self._short_of_memory.pop(window, None)
            if (granted := self._granted.pop(window, None)) is not None:
                self._expected -= granted
                self._over_limit.discard(window)
            return self._grant_waiting()

    def _grant_waiting(self) -> list[PullWaiter]:
        woken: list[PullWaiter] = []
        while self._waiting and self._left() > 0:
            woken.append(self._grant_next())
        return woken

    def _grant_next(self) -> PullWaiter:
        window = next(iter(self._waiting))
        self._granted[window] = expected = self._waiting.pop(window)
        self._expected += expected
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
                    self._over_limit.add(window)
                    self._next_over_limit_at = now + OVER_LIMIT_EVERY_S
            if self._waiting or self._short_of_memory:
                self._check_later()
        wake_all(woken)


def wake_all(windows: list[PullWaiter]) -> None:
    """Wake windows whose turn it is; the caller holds no lock."""
    for window in windows:
        window.wake()
