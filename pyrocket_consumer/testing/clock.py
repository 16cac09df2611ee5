"""The time of a node: the loop's time for timers, and a wall clock for timestamps. Both may be simulated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Clock:
    """The loop's timers and a wall clock. A node reads the time only here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall: Callable[[], float] = time.time) -> None:
        self.loop = loop
        self._wall = wall

    def now_ms(self) -> int:
        """Return the wall clock's milliseconds since 1970."""
        return int(self._wall() * 1000)

    def monotonic_s(self) -> float:
        """Return the loop's seconds, which never step back."""
        return self.loop.time()


class Timer:
    """Calls `action` every `interval_s()` seconds between start() and stop(). The interval may change in between."""

    def __init__(self, clock: Clock, interval_s: Callable[[], float], action: Callable[[], None]) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._handle = self._clock.loop.call_later(self._interval_s(), self._fire)

    def _fire(self) -> None:
        self._handle = self._clock.loop.call_later(self._interval_s(), self._fire)
        self._action()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
