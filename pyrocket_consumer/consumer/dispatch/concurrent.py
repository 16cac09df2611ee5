"""The base of all dispatchers, and the concurrent one, which cuts pull responses into chunks for the workers.

A chunk has units of one pull response that together take about half a millisecond. So quick listeners cost few
hand-overs. A chunk of a slow listener is one unit, so its calls run in parallel. If a worker gets stuck in a chunk, the
units that it has not begun go to other workers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.dispatch.retry import ListenerReports
from pyrocket_consumer.consumer.dispatch.workers import (
    STUCK_AFTER_S,
    Chunk,
    Workers,
    calling,
    messages_of,
    pop_all,
    units_of,
    units_per_chunk,
)
from pyrocket_consumer.consumer.listener import ConsumeContext, Listener
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import RETRY_PREFIX
from pyrocket_consumer.protocol.message import Message

WorkersFor = Callable[[bool, ListenerReports], Workers]
"""Creates workers. Its first argument is whether they await their listeners."""


class ConsumeService(ABC):
    """Dispatches messages to plain and async workers. Workers are created for the first listener of their kind.

    Confined to the I/O thread, except where stated.
    """

    check_every_s = STUCK_AFTER_S
    """How often chunks are checked for stuck workers."""

    def __init__(self, context: MemberContext, workers_for: WorkersFor, reports: ListenerReports) -> None:
        self.stopped = False
        self._context = context
        self._loop = context.loop
        self._workers_for = workers_for
        self._reports = reports
        self._by_kind: dict[bool, Workers] = {}
        self._stuck_check: asyncio.TimerHandle | None = None
        self._quiet_checks = 0

    # --- messages

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        """Dispatch `messages` to the listeners of their topics.

        Do nothing if the queue's topic has no subscription, because then the queue ends soon.
        """
        topic, subscriptions = window.queue.topic, self._context.subscriptions
        found = subscriptions.get(topic)
        if found is None:
            return
        if not topic.startswith(RETRY_PREFIX):
            self.dispatch(window, found.listener, messages)
            return
        for message in messages:  # a retry queue has messages of several topics
            try:
                own = subscriptions.get(message.topic)
            except ProtocolError:  # a damaged record; a listener gets the error when it reads the message
                own = found
            if own is not None:
                self.dispatch(window, own.listener, [message])
            else:
                self._reports.retries.add_unwanted(window, message)

    @abstractmethod
    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Hand `messages` to the workers."""

    def resume_calls(self, window: ProcessQueue) -> None:  # noqa: B027 - only ordered queues wait for their lock
        """Continue a queue whose lock is held again."""

    def forget(self, window: ProcessQueue) -> None:  # noqa: B027 - chunks of free messages end by themselves
        """Forget a window that has ended."""

    # --- workers

    def _workers_of(self, listener: Listener) -> Workers:
        workers = self._by_kind.get(listener.is_async)
        if workers is None:
            workers = self._by_kind[listener.is_async] = self._workers_for(listener.is_async, self._reports)
        return workers

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""
        return list(self._by_kind.values())

    @abstractmethod
    def running(self, window: ProcessQueue | None = None) -> int:
        """Return the number of running listener calls (of `window`; in ordered queues also of earlier ones)."""

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

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        if self._stuck_check is not None:
            self._stuck_check.cancel()
            self._stuck_check = None
        for workers in self.workers():
            workers.stop()

    def abandon(self) -> None:
        """Stop waiting for listener calls."""
        for workers in self.workers():
            workers.abandon()

    # --- calls that take long

    def _start_stuck_checks(self) -> None:
        self._quiet_checks = 0
        if self._stuck_check is None:
            self._stuck_check = self._loop.call_later(self.check_every_s, self._check_stuck)

    def _check_stuck(self) -> None:
        """Relieve workers that are stuck in a call. Continue as long as a chunk is busy."""
        self._stuck_check = None
        now, busy = self._loop.time(), False
        for workers in self.workers():
            busy = busy or workers.waiting() > 0
            for slot in workers.slots:
                chunk = slot.chunk
                if chunk is None or not (chunk.todo or chunk.done or chunk.failed):
                    continue
                busy = True
                if chunk.begun_at and now - chunk.begun_at > STUCK_AFTER_S:
                    self._relieve(workers, chunk)
        self._quiet_checks = 0 if busy else self._quiet_checks + 1
        if self._quiet_checks < 3 and not self.stopped:  # a worker may be between taking a chunk and setting its slot
            self._stuck_check = self._loop.call_later(self.check_every_s, self._check_stuck)

    @abstractmethod
    def _relieve(self, workers: Workers, chunk: Chunk) -> None:
        """Withdraw the units that a stuck worker has not begun, and acknowledge its finished messages."""

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

    async def report_stuck(self) -> None:
        """Report listener calls that have taken longer than `consume_timeout_s`, each once. Run until cancelled."""
        timeout_s = self._context.config.consume_timeout_s
        reported: set[int] = set()
        while True:
            await asyncio.sleep(min(max(timeout_s / 10, 0.01), 1.0))
            stuck = self.stuck(timeout_s, self._loop.time())
            for window, messages in stuck:
                waiting = [message for message in messages if not message._done]
                if waiting and id(messages[0]) not in reported:
                    self._reports.stuck(window, waiting)
            reported = {id(messages[0]) for _, messages in stuck}


class ConcurrentService(ConsumeService):
    """Splits pull responses into chunks for the workers, and relieves slow workers."""

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        workers = self._workers_of(listener)
        units = units_of(listener, messages)
        size = units_per_chunk(window)
        if size >= len(units):
            workers.put(Chunk(window, listener, deque(units)))
        else:
            for start in range(0, len(units), size):
                workers.put(Chunk(window, listener, deque(units[start : start + size])))
        if size > 1:
            self._start_stuck_checks()

    def _relieve(self, workers: Workers, chunk: Chunk) -> None:
        for unit in pop_all(chunk.todo):
            workers.put(Chunk(chunk.window, chunk.listener, deque((unit,))))
        workers.report_finished(chunk)

    def running(self, window: ProcessQueue | None = None) -> int:
        return sum(
            1
            for workers in self.workers()
            for slot in workers.slots
            if (chunk := slot.chunk) is not None and (window is None or chunk.window is window)
        )

    def stop(self) -> None:
        super().stop()
        for workers in self.workers():
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    pop_all(chunk.todo)
                    workers.report_finished(chunk)
