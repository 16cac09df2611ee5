"""Delayed messages. Source: ScheduleMessageService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from pyrocket_consumer.protocol.message import StoredMessage
from pyrocket_consumer.testing.clock import Clock


class Schedule:
    """Delivers each message when it is due. Delivers messages that were due during a stop at the next start."""

    def __init__(self, clock: Clock, deliver: Callable[[StoredMessage], None]) -> None:
        self._clock = clock
        self._deliver = deliver
        self._due: list[tuple[float, int, StoredMessage]] = []
        self._order = count()
        self._running = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def add(self, message: StoredMessage, delay_s: float) -> None:
        heappush(self._due, (self._clock.monotonic_s() + delay_s, next(self._order), message))
        self._arm()

    def start(self) -> None:
        self._running = True
        self._arm()

    def stop(self) -> None:
        self._running = False
        self._disarm()

    def take_over(self, other: Schedule) -> None:
        """Take the pending messages of another schedule."""
        for due_s, _, message in sorted(other._due, key=lambda due: due[:2]):
            heappush(self._due, (due_s, next(self._order), message))
        other.clear()
        self._arm()

    def clear(self) -> None:
        self._due.clear()
        self._disarm()

    def _arm(self) -> None:
        self._disarm()
        if self._running and self._due:
            self._timer = self._clock.loop.call_at(self._due[0][0], self._fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        # Add a millisecond, because a loop may call slightly early, and another timer for the rest is waste.
        now = self._clock.monotonic_s() + 0.001
        while self._due and self._due[0][0] <= now:
            self._deliver(heappop(self._due)[2])
        self._arm()
