"""Orderly consumption: one listener call of a queue at a time, in order of offset.

A queue's messages wait in its line. One turn at a time is with a worker; what a turn could not finish goes back to the
head of the line, and the line pauses. In a clustering group a queue is ours only while the broker's lock is: a turn
looks at the lock before each call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pyrocket_consumer.consumer.consume import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    Chunk,
    Outcome,
    Workers,
    messages_of,
    units_of,
)
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, suspension
from pyrocket_consumer.consumer.process_queue import ProcessQueue
from pyrocket_consumer.wire.message import Message

GiveUp = Callable[[ProcessQueue, Message], Awaitable[bool]]
"""Sends a message to the dead letters; returns whether it is there."""


class Line:
    """The messages of one window that wait for their turn. Confined to the I/O thread, but for `uncommitted`."""

    __slots__ = ("window", "listener", "waiting", "busy", "pause", "uncommitted")

    def __init__(self, window: ProcessQueue, listener: Listener) -> None:
        self.window = window
        self.listener = listener
        self.waiting: deque[Any] = deque()
        self.busy = False
        self.pause: asyncio.TimerHandle | None = None
        self.uncommitted: list[Message] = []  # consumed, not yet committed by the listener; of the worker in turn


class LineTurn:
    """The next units of a line, while a worker has them."""

    def __init__(self, service: OrderlyService, line: Line, chunk: Chunk) -> None:
        self.line = line
        self.chunk = chunk
        self.left: list[Message] = []  # what comes again first, when the turn ended early
        self.failed = False  # their listener failed; else it rolled them back
        self.suspend_s = 0.0
        self._service = service
        self._final: list[Message] = []

    def may_go_on(self) -> bool:
        return self.line.window.may_consume() and not self._service.stopped

    def judge(self, outcome: Outcome, unit: Any, result: object) -> bool:
        messages, done, uncommitted = messages_of(unit), self.chunk.done, self.line.uncommitted
        if result is ConsumeResult.COMMIT:
            self._final += [*uncommitted, *done, *messages]
            uncommitted.clear()
            done.clear()
            return True
        if result is ConsumeResult.ROLLBACK and not self._service.auto_commit:
            self.left, self.suspend_s = [*uncommitted, *done, *messages], SUSPEND_S
            uncommitted.clear()
            done.clear()
            return False
        self.left, self.suspend_s, known = suspension(result, messages)
        if not known:
            outcome.result_unknown(self.line.window, messages[0], result)
        done.extend(messages[: len(messages) - len(self.left)])
        self.failed = bool(self.left)
        return not self.left

    def committed(self) -> list[Message]:
        """Return what the turn has finished; without auto-commit, only what the listener committed."""
        if self._service.auto_commit:
            return self._final + self.chunk.done
        self.line.uncommitted += self.chunk.done
        return self._final

    def end(self) -> None:
        self._service.turn_ended(self)


class OrderlyService:
    """Gives each queue's messages to the workers in order. Confined to the I/O thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers_for: Callable[[bool], Workers],
        *,
        auto_commit: bool,
        max_attempts: int | None,
        give_up: GiveUp,
        failed: Callable[[ProcessQueue, int], None] = lambda window, count: None,
    ) -> None:
        self.auto_commit = auto_commit
        self.stopped = False
        self._loop = loop
        self._workers_for = workers_for
        self._workers: dict[bool, Workers] = {}
        self._max_attempts = max_attempts
        self._give_up = give_up
        self._failed = failed
        self._lines: dict[ProcessQueue, Line] = {}
        self._disposals: set[asyncio.Task[None]] = set()

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` to the end of their line."""
        line = self._lines.get(window)
        if line is None:
            line = self._lines[window] = Line(window, listener)
        line.listener = listener
        line.waiting.extend(units_of(listener, messages))
        self._next(line)

    def go_on(self, window: ProcessQueue) -> None:
        """The queue's lock is there again."""
        if (line := self._lines.get(window)) is not None:
            self._next(line)

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended."""
        line = self._lines.pop(window, None)
        if line is not None and line.pause is not None:
            line.pause.cancel()

    def _next(self, line: Line) -> None:
        window = line.window
        if line.busy or line.pause is not None or not line.waiting or self.stopped or not window.may_consume():
            return
        size = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), LARGEST_CHUNK, len(line.waiting))
        line.busy = True
        chunk = Chunk(window, line.listener, deque(line.waiting.popleft() for _ in range(size)))
        chunk.turn = LineTurn(self, line, chunk)
        self._workers_of(line.listener).put(chunk)

    def _workers_of(self, listener: Listener) -> Workers:
        workers = self._workers.get(listener.is_async)
        if workers is None:
            workers = self._workers[listener.is_async] = self._workers_for(listener.is_async)
        return workers

    def turn_ended(self, turn: LineTurn) -> None:
        """A worker is through with a turn. Called by workers."""
        self._loop.call_soon_threadsafe(self._ended, turn)

    def _ended(self, turn: LineTurn) -> None:
        line, chunk, left = turn.line, turn.chunk, turn.left
        rest = list(chunk.todo)
        chunk.todo.clear()
        line.waiting.extendleft(reversed([*units_of(chunk.listener, left), *rest]))
        exhausted: list[Message] = []
        if turn.failed:
            self._failed(line.window, len(left))
            for message in left:
                message._extra_attempts += 1
                if self._max_attempts is not None and message.reconsume_times > self._max_attempts:
                    exhausted.append(message)
        if exhausted:
            task = self._loop.create_task(self._dispose(line, exhausted))
            self._disposals.add(task)
            task.add_done_callback(self._disposals.discard)
            return
        line.busy = False
        self._pause(line, turn.suspend_s)

    def _pause(self, line: Line, seconds: float) -> None:
        if seconds > 0 and not self.stopped and line.window in self._lines:
            line.pause = self._loop.call_later(seconds, self._resume, line)
        else:
            self._next(line)

    def _resume(self, line: Line) -> None:
        line.pause = None
        self._next(line)

    async def _dispose(self, line: Line, exhausted: list[Message]) -> None:
        """Give messages up that have had their attempts; those that could not be sent stay at the head."""
        gone = []
        for message in exhausted:
            if line.window.dropped or not await self._give_up(line.window, message):
                break
            gone.append(message)
        if gone:
            done = {id(message) for message in gone}
            waiting = [message for unit in line.waiting for message in messages_of(unit) if id(message) not in done]
            line.waiting = deque(units_of(line.listener, waiting))
            line.window.ack(gone)
        line.busy = False
        self._pause(line, 0.0 if len(gone) == len(exhausted) else 1.0)

    # --- what both services do

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""
        return list(self._workers.values())

    def stuck(self, timeout_s: float, now: float) -> list[tuple[ProcessQueue, list[Message]]]:
        """Nothing counts as stuck: to go on without the message would break the order."""
        return []

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many turns are with workers (of `window`)."""
        return sum(line.busy and (window is None or line.window is window) for line in self._lines.values())

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        for line in self._lines.values():
            if line.pause is not None:
                line.pause.cancel()
        for workers in self._workers.values():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    chunk.todo.clear()

    def abandon(self) -> None:
        """Wait for listener calls no longer."""
        for task in self._disposals:
            task.cancel()
        for workers in self._workers.values():
            workers.abandon()
