"""Orderly consumption: one listener call of a queue at a time, in order of offset.

The messages of a queue wait in its lane. A worker has one batch of the lane at a time. The messages that it could not
finish go back to the head of the lane, and the lane pauses. In a clustering group a member consumes a queue only while
it holds the broker's lock. So a batch checks the lock before each call. A queue that begins again, for example
after a reset, has a new lane. That one waits until the call of the former lane has returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService
from pyrocket_consumer.consumer.dispatch.workers import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    Chunk,
    Workers,
    messages_of,
    units_of,
)
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, find_failed_tail
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import RolledBack
from pyrocket_consumer.protocol.message import Message

GiveUp = Callable[[ProcessQueue, Message], Awaitable[float]]
"""Sends a message to the dead letters. Returns 0 once it is there, otherwise the seconds until the next attempt."""

Consumed = list[tuple[Listener, list[Message]]]
"""Messages in order, with their listeners. A retry queue has messages of several topics and listeners."""

HELD_UP_AFTER_S = 5.0
"""A lane that has waited this long, for an earlier call or for a COMMIT, is reported."""

ACK_EVERY_S = 1.0
"""How often the finished messages of running batches are acknowledged. Otherwise a call that hangs holds them back."""


class QueueLane:
    """The waiting messages of one window. Confined to the I/O thread, except `uncommitted`."""

    __slots__ = ("window", "waiting", "pause", "uncommitted", "check_timer")

    def __init__(self, window: ProcessQueue) -> None:
        self.window = window
        # Adjacent messages of one listener are one entry.
        self.waiting: deque[tuple[Listener, deque[Message]]] = deque()
        self.pause: asyncio.TimerHandle | None = None
        self.uncommitted: Consumed = []  # consumed, but not committed by the listener; used by the current worker
        self.check_timer: asyncio.TimerHandle | None = None  # reports uncommitted messages that fill the window

    def append(self, listener: Listener, messages: list[Message]) -> None:
        """Add messages at the end."""
        if self.waiting and self.waiting[-1][0] is listener:
            self.waiting[-1][1].extend(messages)
        elif messages:
            self.waiting.append((listener, deque(messages)))

    def put_back(self, listener: Listener, messages: list[Message]) -> None:
        """Add messages at the head."""
        if self.waiting and self.waiting[0][0] is listener:
            self.waiting[0][1].extendleft(reversed(messages))
        elif messages:
            self.waiting.appendleft((listener, deque(messages)))

    def take(self, limit: int) -> tuple[Listener, deque[Any]]:
        """Remove the first messages of one listener, for up to `limit` calls. Return units; there must be some."""
        listener, messages = self.waiting[0]
        taken = [messages.popleft() for _ in range(min(limit * listener.batch_size, len(messages)))]
        if not messages:
            self.waiting.popleft()
        return listener, deque(units_of(listener, taken))

    def remove(self, gone: list[Message]) -> None:
        """Remove messages at any position."""
        ids = {id(message) for message in gone}
        before, self.waiting = self.waiting, deque()
        for listener, messages in before:
            self.append(listener, [message for message in messages if id(message) not in ids])


class QueueLaneBatch:
    """The next units of a lane, while a worker has them."""

    is_measured = True

    def __init__(self, service: OrderlyService, lane: QueueLane, chunk: Chunk, workers: Workers) -> None:
        self._workers = workers
        self.lane = lane
        self.chunk = chunk
        self.left: Consumed = []  # to be consumed again first, if the batch ended early
        self.failed = False  # whether their listener failed; if not, it rolled them back
        self.suspend_s = 0.0
        self._service = service
        self._final: list[Message] = []

    def may_continue(self) -> bool:
        """Return whether the next call may begin. From time to time, other queues that wait for a worker go first."""
        if self.chunk.parts and self._workers.waiting():
            return False
        return self.lane.window.may_consume() and not self._service.stopped

    def apply_result(self, unit: Any, result: object) -> tuple[bool, bool]:
        messages, listener, done = messages_of(unit), self.chunk.listener, self.chunk.done
        if result is ConsumeResult.COMMIT:
            self._final += [*(each for _, some in self.lane.uncommitted for each in some), *done, *messages]
            self.lane.uncommitted.clear()
            done.clear()
            return True, True
        if result is ConsumeResult.ROLLBACK and not self._service.auto_commit:
            self.left, self.suspend_s = [*self.lane.uncommitted, (listener, [*done, *messages])], SUSPEND_S
            self.lane.uncommitted.clear()
            done.clear()
            return False, True
        if type(result) is RolledBack:
            left, known = list(messages), True
            if (retry_after_s := result.retry_after_s) is not None:
                self.left, self.suspend_s = [(listener, left)], retry_after_s
                return False, True
            _, self.suspend_s, known = find_failed_tail(result.result, messages)
        else:
            left, self.suspend_s, known = find_failed_tail(result, messages)
        if (claim := self.lane.window.claim) is not None:  # an exception after the commit undoes nothing
            left = [message for message in left if message.queue_offset >= claim.stored]
        done.extend(messages[: len(messages) - len(left)])
        if left:
            self.left, self.failed = [(listener, left)], True
        return not left, known

    def take_consumed(self) -> list[Message]:
        """Return the messages that the batch has finished; without auto-commit, those that the listener committed."""
        if self._service.auto_commit:
            return self._final + self.chunk.done
        if self.chunk.done:
            self.lane.uncommitted.append((self.chunk.listener, self.chunk.done))
        return self._final

    def end(self) -> None:
        self._service.batch_ended(self)


class OrderlyService(ConsumeService):
    """Dispatches each queue's messages to the workers in order. Confined to the I/O thread."""

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
        """Use `begin` to start a task, and `held_up` to report a queue that waits for a listener."""
        super().__init__(loop, workers_for)
        self.auto_commit = auto_commit
        self.stopped = False
        self._max_attempts = max_attempts
        self._begin = begin
        self._give_up = give_up
        self._failed = failed
        self._held_up = held_up
        self._lanes: dict[MessageQueue, QueueLane] = {}
        # The lanes with messages at a worker, or on the way to the dead letters.
        self._busy_lanes: dict[MessageQueue, QueueLane] = {}
        self._next_ack: asyncio.TimerHandle | None = None

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` at the end of their lane."""
        lane = self._lanes.get(window.queue)
        if lane is None or lane.window is not window:
            lane = self._lanes[window.queue] = QueueLane(window)
            if window.queue in self._busy_lanes:
                self._loop.call_later(HELD_UP_AFTER_S, self._report_if_held_up, lane, self._busy_lanes[window.queue])
        lane.append(listener, messages)
        self._dispatch_next(lane)

    def _report_if_held_up(self, lane: QueueLane, former: QueueLane) -> None:
        queue = lane.window.queue
        if self._busy_lanes.get(queue) is former and self._lanes.get(queue) is lane and not self.stopped:
            self._held_up(
                lane.window,
                "a listener call from before the queue restarted still runs; the queue waits until it returns",
            )

    def _report_if_uncommitted(self, lane: QueueLane) -> None:
        lane.check_timer = None
        is_idle = lane.uncommitted and not lane.waiting and lane.window.queue not in self._busy_lanes
        if is_idle and self._lane(lane.window) is lane and lane.window.is_waiting_for_space and not self.stopped:
            count = sum(len(messages) for _, messages in lane.uncommitted)
            self._held_up(
                lane.window,
                f"{count} messages wait for the listener's COMMIT, and the cache is full, so the queue is stalled; "
                "commit more often, or raise max_cached_messages (or max_cached_bytes)",
            )

    def resume_calls(self, window: ProcessQueue) -> None:
        """Continue a queue whose lock is held again."""
        if (lane := self._lane(window)) is not None:
            self._dispatch_next(lane)

    def _lane(self, window: ProcessQueue) -> QueueLane | None:
        lane = self._lanes.get(window.queue)
        return lane if lane is not None and lane.window is window else None

    def forget(self, window: ProcessQueue) -> None:
        """Remove the lane of a window that has ended."""
        if (lane := self._lane(window)) is not None:
            del self._lanes[window.queue]
            for timer in (lane.pause, lane.check_timer):
                if timer is not None:
                    timer.cancel()

    def _dispatch_next(self, lane: QueueLane) -> None:
        window = lane.window
        if lane.uncommitted and not lane.waiting and lane.check_timer is None:
            lane.check_timer = self._loop.call_later(HELD_UP_AFTER_S, self._report_if_uncommitted, lane)
        if (
            window.queue in self._busy_lanes
            or lane.pause is not None
            or not lane.waiting
            or self.stopped
            or not window.may_consume()
        ):
            return
        is_quick = window.listener_time_s * LARGEST_CHUNK <= CHUNK_TIME_S
        quick_units = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), LARGEST_CHUNK)
        listener, units = lane.take(LARGEST_CHUNK if self.auto_commit else quick_units)
        chunk = Chunk(window, listener, units)
        chunk.is_long = self.auto_commit and not is_quick
        workers = self._workers_of(listener)
        chunk.lane_batch = QueueLaneBatch(self, lane, chunk, workers)
        self._busy_lanes[window.queue] = lane
        workers.put(chunk)
        if self.auto_commit and self._next_ack is None:
            self._next_ack = self._loop.call_later(ACK_EVERY_S, self._ack_finished)

    def _ack_finished(self) -> None:
        """Acknowledge the finished messages of batches that are still running."""
        self._next_ack = None
        for workers in self.workers():
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None and chunk.done:
                    workers.report_finished(chunk)
        if self._busy_lanes and not self.stopped:
            self._next_ack = self._loop.call_later(ACK_EVERY_S, self._ack_finished)

    def batch_ended(self, lane_batch: QueueLaneBatch) -> None:
        """Handle the end of a batch. Workers call this."""
        try:
            self._loop.call_soon_threadsafe(self._handle_end, lane_batch)
        except RuntimeError:
            pass  # the consumer has ended before its listener

    def _handle_end(self, lane_batch: QueueLaneBatch) -> None:
        lane, chunk = lane_batch.lane, lane_batch.chunk
        rest = [message for unit in chunk.todo for message in messages_of(unit)]
        chunk.todo.clear()
        lane.put_back(chunk.listener, rest)
        for listener, messages in reversed(lane_batch.left):
            lane.put_back(listener, messages)
        exhausted: list[Message] = []
        if lane_batch.failed:
            failed = [message for _, messages in lane_batch.left for message in messages]
            self._failed(lane.window, len(failed))
            for message in failed:
                message._extra_attempts += 1
                is_last = self._max_attempts is not None and message.reconsume_times > self._max_attempts
                if is_last or message.is_too_large:
                    exhausted.append(message)
        if exhausted and not lane.window.dropped:
            self._begin(self._give_up_messages(lane, exhausted), "giving messages up")
        else:
            self._release(lane, lane_batch.suspend_s)

    def _release(self, lane: QueueLane, pause_s: float) -> None:
        """Release a lane. Continue it after a pause, or continue the lane that has replaced it."""
        self._busy_lanes.pop(lane.window.queue, None)
        present = self._lanes.get(lane.window.queue)
        if present is not lane:
            if present is not None:
                self._dispatch_next(present)
        elif pause_s > 0 and not self.stopped:
            lane.pause = self._loop.call_later(pause_s, self._resume, lane)
        else:
            self._dispatch_next(lane)

    def _resume(self, lane: QueueLane) -> None:
        lane.pause = None
        self._dispatch_next(lane)

    async def _give_up_messages(self, lane: QueueLane, exhausted: list[Message]) -> None:
        """Give up messages whose attempts are used up. Those that no broker accepts stay at the head of the lane."""
        gone: list[Message] = []
        pause_s = 0.0
        try:
            for message in exhausted:
                if lane.window.dropped or (pause_s := await self._give_up(lane.window, message)):
                    break
                gone.append(message)
        finally:
            lane.remove(gone)
            lane.window.ack(gone)
            self._release(lane, pause_s)

    # --- common to all services

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return the number of batches that workers have (of `window`)."""
        return sum(window is None or lane.window is window for lane in self._busy_lanes.values())

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        for lane in self._lanes.values():
            if lane.pause is not None:
                lane.pause.cancel()
        for workers in self.workers():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    chunk.todo.clear()
        if self._next_ack is not None:
            self._next_ack.cancel()
            self._ack_finished()
