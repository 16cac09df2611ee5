"""Concurrent dispatch: chunks sized by the time that listeners take.

A chunk has units of one pull response that together take about half a millisecond. So quick listeners cost few
hand-overs. A chunk of a slow listener is one unit, so its calls run in parallel. If a worker gets stuck in a chunk, the
units that it has not begun go to other workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyrocket_consumer.consumer.dispatch.workers import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    Chunk,
    Workers,
    calling,
    messages_of,
    pop_all,
    units_of,
)
from pyrocket_consumer.consumer.listener import ConsumeContext, Listener
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.protocol.message import Message


class ConsumeService:
    """Dispatches messages to plain and async workers. Workers are created for the first listener of their kind."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers_for: Callable[[bool], Workers]) -> None:
        """Use `workers_for` to create workers. Its argument is whether they await their listeners."""
        self._loop = loop
        self._workers_for = workers_for
        self._by_kind: dict[bool, Workers] = {}

    def _workers_of(self, listener: Listener) -> Workers:
        workers = self._by_kind.get(listener.is_async)
        if workers is None:
            workers = self._by_kind[listener.is_async] = self._workers_for(listener.is_async)
        return workers

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""
        return list(self._by_kind.values())

    def stuck(self, timeout_s: float, now: float) -> list[tuple[ProcessQueue, Sequence[Message]]]:
        """Return the messages whose listener call was running at a check at least `timeout_s` ago."""
        found = []
        for workers in self.workers():
            for slot in workers.slots:
                chunk = slot.chunk
                unit = chunk.current if chunk is not None else None
                if unit is not slot.seen:
                    slot.seen, slot.seen_at = unit, now
                elif chunk is not None and unit is not None and now - slot.seen_at >= timeout_s:
                    found.append((chunk.window, messages_of(unit)))
        return found

    def is_own_call(self) -> bool:
        """Return whether the caller is a listener call of this consumer, or was started by one. Any thread.

        Such a caller must not wait until no call runs, because it would wait for itself.
        """
        return (workers := calling.get()) is not None and workers in self.workers()

    async def call_once(
        self, listener: Listener, unit: Any, context: ConsumeContext
    ) -> tuple[object, BaseException | None]:
        """Call `listener` once, on the kind of worker that it always has. Return its result or exception."""
        arguments = (unit, context) if listener.wants_context else (unit,)
        return await self._workers_of(listener).call_once(partial(listener.call, *arguments))

    def abandon(self) -> None:
        """Stop waiting for listener calls."""
        for workers in self.workers():
            workers.abandon()


class ConcurrentService(ConsumeService):
    """Splits pull responses into chunks for the workers, and relieves slow workers. Confined to the I/O thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers_for: Callable[[bool], Workers]) -> None:
        super().__init__(loop, workers_for)
        self._stuck_check: asyncio.TimerHandle | None = None
        self._quiet_checks = 0

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Hand `messages` to the workers."""
        workers = self._workers_of(listener)
        units = units_of(listener, messages)
        chunk = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), LARGEST_CHUNK)
        if chunk >= len(units):
            workers.put(Chunk(window, listener, deque(units)))
        else:
            for start in range(0, len(units), chunk):
                workers.put(Chunk(window, listener, deque(units[start : start + chunk])))
        self._quiet_checks = 0
        if chunk > 1 and self._stuck_check is None:
            self._stuck_check = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def _withdraw_from_stuck(self) -> None:
        """Withdraw the other units from workers that are stuck in a call. Continue as long as a chunk is busy."""
        self._stuck_check = None
        now = self._loop.time()
        busy = False
        for workers in self.workers():
            busy = busy or workers.waiting() > 0
            for slot in workers.slots:
                chunk = slot.chunk
                if chunk is None or not (chunk.todo or chunk.done or chunk.failed):
                    continue
                busy = True
                if chunk.begun_at and now - chunk.begun_at > STUCK_AFTER_S:
                    for unit in pop_all(chunk.todo):
                        workers.put(Chunk(chunk.window, chunk.listener, deque((unit,))))
                    workers.report_finished(chunk)
        self._quiet_checks = 0 if busy else self._quiet_checks + 1
        if self._quiet_checks < 3:  # a worker may be between taking a chunk and setting its slot
            self._stuck_check = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return the number of running listener calls (of `window`)."""
        return sum(
            1
            for workers in self.workers()
            for slot in workers.slots
            if (chunk := slot.chunk) is not None and (window is None or chunk.window is window)
        )

    def forget(self, window: ProcessQueue) -> None:
        """Do nothing when a window ends, because its chunks end by themselves."""

    def resume_calls(self, window: ProcessQueue) -> None:
        """Do nothing, because only ordered queues wait for their lock."""

    def stop(self) -> None:
        """Begin no further listener call."""
        if self._stuck_check is not None:
            self._stuck_check.cancel()
            self._stuck_check = None
        for workers in self.workers():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    pop_all(chunk.todo)
                    workers.report_finished(chunk)
