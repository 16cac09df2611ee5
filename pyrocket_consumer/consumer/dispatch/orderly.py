"""Orderly consumption: one listener call of a queue at a time, in order of offset.

A queue's messages wait in its line. One turn at a time is with a worker; what a turn could not finish goes back to the
head of the line, and the line pauses. In a clustering group a queue is ours only while the broker's lock is: a turn
looks at the lock before each call. A queue that begins anew (after a reset, say) has a new line, which waits until the
call of the former one has returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pyrocket_consumer.consumer.dispatch.concurrent import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    Chunk,
    Service,
    Workers,
    messages_of,
    units_of,
)
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, suspension
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import RolledBack
from pyrocket_consumer.protocol.message import Message

GiveUp = Callable[[ProcessQueue, Message], Awaitable[float]]
"""Sends a message to the dead letters; returns 0 once it is there, else after how many seconds to try again."""

Consumed = list[tuple[Listener, list[Message]]]
"""Messages in order, with the listener that each is for: those of a retry topic's queue are of several topics."""

HELD_UP_AFTER_S = 5.0
"""A line that has waited so long, for a call of before or for a COMMIT, is told."""


class Line:
    """The messages of one window that wait for their turn. Confined to the I/O thread, but for `uncommitted`."""

    __slots__ = ("window", "waiting", "pause", "uncommitted", "look")

    def __init__(self, window: ProcessQueue) -> None:
        self.window = window
        self.waiting: deque[tuple[Listener, deque[Message]]] = deque()  # those next to each other that are alike
        self.pause: asyncio.TimerHandle | None = None
        self.uncommitted: Consumed = []  # consumed, not yet committed by the listener; of the worker in turn
        self.look: asyncio.TimerHandle | None = None  # when what is uncommitted may be all there is room for

    def append(self, listener: Listener, messages: list[Message]) -> None:
        """Add messages to the end."""
        if self.waiting and self.waiting[-1][0] is listener:
            self.waiting[-1][1].extend(messages)
        elif messages:
            self.waiting.append((listener, deque(messages)))

    def put_back(self, listener: Listener, messages: list[Message]) -> None:
        """Add messages before the first."""
        if self.waiting and self.waiting[0][0] is listener:
            self.waiting[0][1].extendleft(reversed(messages))
        elif messages:
            self.waiting.appendleft((listener, deque(messages)))

    def take(self, most: int) -> tuple[Listener, deque[Any]]:
        """Remove the messages of the first calls, of one listener, as units; there must be any."""
        listener, messages = self.waiting[0]
        taken = [messages.popleft() for _ in range(min(most * listener.batch_size, len(messages)))]
        if not messages:
            self.waiting.popleft()
        return listener, deque(units_of(listener, taken))

    def remove(self, gone: list[Message]) -> None:
        """Remove messages wherever they are."""
        ids = {id(message) for message in gone}
        before, self.waiting = self.waiting, deque()
        for listener, messages in before:
            self.append(listener, [message for message in messages if id(message) not in ids])


class LineTurn:
    """The next units of a line, while a worker has them."""

    is_measured = True

    def __init__(self, service: OrderlyService, line: Line, chunk: Chunk, workers: Workers) -> None:
        self._workers = workers
        self.line = line
        self.chunk = chunk
        self.left: Consumed = []  # what comes again first, when the turn ended early
        self.failed = False  # their listener failed; else it rolled them back
        self.suspend_s = 0.0
        self._service = service
        self._final: list[Message] = []

    def may_go_on(self) -> bool:
        """Tell whether the next call may begin; other queues that wait for a worker come first, now and then."""
        if self.chunk.parts and self._workers.waiting():
            return False
        return self.line.window.may_consume() and not self._service.stopped

    def judge(self, unit: Any, result: object) -> tuple[bool, bool]:
        messages, listener, done = messages_of(unit), self.chunk.listener, self.chunk.done
        if result is ConsumeResult.COMMIT:
            self._final += [*(each for _, some in self.line.uncommitted for each in some), *done, *messages]
            self.line.uncommitted.clear()
            done.clear()
            return True, True
        if result is ConsumeResult.ROLLBACK and not self._service.auto_commit:
            self.left, self.suspend_s = [*self.line.uncommitted, (listener, [*done, *messages])], SUSPEND_S
            self.line.uncommitted.clear()
            done.clear()
            return False, True
        if type(result) is RolledBack:
            left, known = list(messages), True
            if (retry_after_s := result.retry_after_s) is not None:
                self.left, self.suspend_s = [(listener, left)], retry_after_s
                return False, True
            _, self.suspend_s, known = suspension(result.result, messages)
        else:
            left, self.suspend_s, known = suspension(result, messages)
        if (claim := self.line.window.claim) is not None:  # what was raised after the commit has undone nothing
            left = [message for message in left if message.queue_offset >= claim.stored]
        done.extend(messages[: len(messages) - len(left)])
        if left:
            self.left, self.failed = [(listener, left)], True
        return not left, known

    def committed(self) -> list[Message]:
        """Return what the turn has finished; without auto-commit, only what the listener committed."""
        if self._service.auto_commit:
            return self._final + self.chunk.done
        if self.chunk.done:
            self.line.uncommitted.append((self.chunk.listener, self.chunk.done))
        return self._final

    def end(self) -> None:
        self._service.turn_ended(self)


class OrderlyService(Service):
    """Gives each queue's messages to the workers in order. Confined to the I/O thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers_for: Callable[[bool], Workers],
        *,
        auto_commit: bool,
        max_attempts: int | None,
        begin: Callable[[Coroutine[Any, Any, None], str], object],
        give_up: GiveUp,
        failed: Callable[[ProcessQueue, int], None] = lambda window, count: None,
        held_up: Callable[[ProcessQueue, str], None] = lambda window, why: None,
    ) -> None:
        """`begin` begins a task and keeps it; `held_up` hears of queues that wait for a listener, and why."""
        super().__init__(loop, workers_for)
        self.auto_commit = auto_commit
        self.stopped = False
        self._max_attempts = max_attempts
        self._begin = begin
        self._give_up = give_up
        self._failed = failed
        self._held_up = held_up
        self._lines: dict[MessageQueue, Line] = {}
        self._in_turn: dict[MessageQueue, Line] = {}  # whose messages are with a worker, or are being given up

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` to the end of their line."""
        line = self._lines.get(window.queue)
        if line is None or line.window is not window:
            line = self._lines[window.queue] = Line(window)
            if window.queue in self._in_turn:
                self._loop.call_later(HELD_UP_AFTER_S, self._tell_if_held_up, line, self._in_turn[window.queue])
        line.append(listener, messages)
        self._next(line)

    def _tell_if_held_up(self, line: Line, former: Line) -> None:
        queue = line.window.queue
        if self._in_turn.get(queue) is former and self._lines.get(queue) is line and not self.stopped:
            self._held_up(
                line.window,
                "a listener call from before the queue began anew still runs; the queue waits until it returns",
            )

    def _tell_if_uncommitted(self, line: Line) -> None:
        line.look = None
        is_idle = line.uncommitted and not line.waiting and line.window.queue not in self._in_turn
        if is_idle and self._line(line.window) is line and line.window.is_waiting_for_space and not self.stopped:
            count = sum(len(messages) for _, messages in line.uncommitted)
            self._held_up(
                line.window,
                f"the {count} messages the listener was given wait for its COMMIT, and there is room for no more; have "
                "it commit sooner, or raise max_cached_messages (or max_cached_bytes)",
            )

    def resume_calls(self, window: ProcessQueue) -> None:
        """The queue's lock is there again."""
        if (line := self._line(window)) is not None:
            self._next(line)

    def _line(self, window: ProcessQueue) -> Line | None:
        line = self._lines.get(window.queue)
        return line if line is not None and line.window is window else None

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended."""
        if (line := self._line(window)) is not None:
            del self._lines[window.queue]
            for timer in (line.pause, line.look):
                if timer is not None:
                    timer.cancel()

    def _next(self, line: Line) -> None:
        window = line.window
        if line.uncommitted and not line.waiting and line.look is None:
            line.look = self._loop.call_later(HELD_UP_AFTER_S, self._tell_if_uncommitted, line)
        if (
            window.queue in self._in_turn
            or line.pause is not None
            or not line.waiting
            or self.stopped
            or not window.may_consume()
        ):
            return
        is_quick = window.listener_time_s * LARGEST_CHUNK <= CHUNK_TIME_S
        quick_units = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), LARGEST_CHUNK)
        listener, units = line.take(LARGEST_CHUNK if self.auto_commit else quick_units)
        chunk = Chunk(window, listener, units)
        chunk.is_long = self.auto_commit and not is_quick
        workers = self._workers_of(listener)
        chunk.turn = LineTurn(self, line, chunk, workers)
        self._in_turn[window.queue] = line
        workers.put(chunk)

    def turn_ended(self, turn: LineTurn) -> None:
        """A worker is through with a turn. Called by workers."""
        try:
            self._loop.call_soon_threadsafe(self._ended, turn)
        except RuntimeError:
            pass  # the consumer has ended before its listener

    def _ended(self, turn: LineTurn) -> None:
        line, chunk = turn.line, turn.chunk
        rest = [message for unit in chunk.todo for message in messages_of(unit)]
        chunk.todo.clear()
        line.put_back(chunk.listener, rest)
        for listener, messages in reversed(turn.left):
            line.put_back(listener, messages)
        exhausted: list[Message] = []
        if turn.failed:
            failed = [message for _, messages in turn.left for message in messages]
            self._failed(line.window, len(failed))
            for message in failed:
                message._extra_attempts += 1
                is_last = self._max_attempts is not None and message.reconsume_times > self._max_attempts
                if is_last or message.is_too_large:
                    exhausted.append(message)
        if exhausted and not line.window.dropped:
            self._begin(self._dispose(line, exhausted), "giving messages up")
        else:
            self._release(line, turn.suspend_s)

    def _release(self, line: Line, pause_s: float) -> None:
        """End the turn of a line; the next one is its own after a pause, or that of the line that has followed it."""
        self._in_turn.pop(line.window.queue, None)
        present = self._lines.get(line.window.queue)
        if present is not line:
            if present is not None:
                self._next(present)
        elif pause_s > 0 and not self.stopped:
            line.pause = self._loop.call_later(pause_s, self._resume, line)
        else:
            self._next(line)

    def _resume(self, line: Line) -> None:
        line.pause = None
        self._next(line)

    async def _dispose(self, line: Line, exhausted: list[Message]) -> None:
        """Give messages up that have had their attempts; those that could not be sent stay at the head."""
        gone: list[Message] = []
        pause_s = 0.0
        try:
            for message in exhausted:
                if line.window.dropped or (pause_s := await self._give_up(line.window, message)):
                    break
                gone.append(message)
        finally:
            line.remove(gone)
            line.window.ack(gone)
            self._release(line, pause_s)

    # --- what both services do

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many turns are with workers (of `window`)."""
        return sum(window is None or line.window is window for line in self._in_turn.values())

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        for line in self._lines.values():
            if line.pause is not None:
                line.pause.cancel()
        for workers in self.workers():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    chunk.todo.clear()
