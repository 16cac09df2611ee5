"""Ordered dispatch: one message of a queue, or of a key, at a time, in order of offset.

The messages of a queue wait in one lane, or with `order_by` in a lane for each key. A chunk takes the first messages of
a lane, or of several lanes of keys. Each lane belongs to one worker at a time, and its next messages begin only after
that worker has reported the results. A lane whose listener fails pauses alone; its messages hold back the offset to
commit meanwhile. If a worker is stuck, the messages that it has not begun are withdrawn, so that other keys continue.

In a clustering group a member consumes a queue only while it holds the broker's lock. So a chunk checks the lock before
each call. A queue that begins again, for example after a reset, waits until the earlier calls have returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService, WorkersFor
from pyrocket_consumer.consumer.dispatch.lanes import Entry, KeylessLane, Lane, Lanes, sharding_key
from pyrocket_consumer.consumer.dispatch.retry import ListenerReports
from pyrocket_consumer.consumer.dispatch.workers import (
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    Chunk,
    Workers,
    messages_of,
    pop_all,
    units_of,
    units_per_chunk,
)
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, find_failed_tail
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import RolledBack
from pyrocket_consumer.protocol.message import Message

HELD_UP_AFTER_S = 5.0
"""A queue that has waited this long for an earlier call, a COMMIT or a key is reported."""

ACK_EVERY_S = 1.0
"""How often the finished messages of long chunks are acknowledged. Otherwise a call that hangs holds them back."""

MAX_KEY_LOOKUPS = 256
"""The largest number of messages whose keys a worker reads with `order_by` in one step."""


class LaneChunk(Chunk):
    """The next messages of some lanes of a window, while a worker has them."""

    __slots__ = ("lanes", "held_lanes", "_service", "_workers", "_committed")

    is_ordered = True

    def __init__(
        self, service: OrderedService, lanes: Lanes, listener: Listener, units: deque[Any], workers: Workers
    ) -> None:
        super().__init__(lanes.window, listener, units)
        self.lanes = lanes
        self.held_lanes: list[Lane] = []
        self._service = service
        self._workers = workers
        self._committed: list[Message] = []  # by the listener, if it commits itself

    def lane_of(self, unit: Any) -> Lane:
        """Return the lane that a unit is from."""
        if len(self.held_lanes) == 1:
            return self.held_lanes[0]
        lane: Lane = messages_of(unit)[0]._key_lane
        return lane

    def is_held(self) -> bool:
        """Return whether a call of the chunk may be running, or may still begin."""
        return self.begun_at > 0 or any(lane.holder is self for lane in self.held_lanes)

    def put_back(self, units: list[Any]) -> None:
        """Put units, in order, before the waiting messages of their lanes. I/O thread."""
        for unit in reversed(units):
            self.lane_of(unit).insert(self._entries(messages_of(unit)))

    def _entries(self, messages: Sequence[Message]) -> list[Entry]:
        return [(self.listener, list(messages))] if messages else []

    # --- the worker calls these methods

    def may_continue(self) -> bool:
        """Return whether the next call may begin. From time to time, other queues that wait for a worker go first."""
        window = self.window
        if window.dropped or self._service.stopped or (self.parts and self._workers.waiting()):
            return False
        return window.lease.is_valid()

    def apply_result(self, unit: Any, result: object) -> bool:
        messages, auto_commit, uncommitted = messages_of(unit), self._service.auto_commit, self.lanes.uncommitted
        if result is ConsumeResult.COMMIT:
            self.done.extend(messages)
            if not auto_commit:
                self._committed += [*(each for _, some in uncommitted for each in some), *pop_all(self.done)]
                uncommitted.clear()
            return True
        failed: list[Message] = []
        is_known, pause_s = True, SUSPEND_S
        if result is ConsumeResult.ROLLBACK and not auto_commit:
            repeated = [*uncommitted, *self._entries([*pop_all(self.done), *messages])]
            uncommitted.clear()
        elif type(result) is RolledBack and result.retry_after_s is not None:
            repeated, pause_s = self._entries(messages), result.retry_after_s
        else:
            if type(result) is RolledBack:
                _, pause_s, is_known = find_failed_tail(result.result, messages)
                failed = list(messages)
            else:
                failed, pause_s, is_known = find_failed_tail(result, messages)
            if (claim := self.window.claim) is not None:  # an exception after the commit undoes nothing
                failed = [message for message in failed if message.queue_offset >= claim.stored]
            self.done.extend(messages[: len(messages) - len(failed)])
            if not failed:
                return is_known
            repeated = self._entries(failed)
        # Later messages of the lane must not overtake these. The I/O thread may withdraw units from the right of `todo`
        # meanwhile. Each unit is then with one of the two threads, and goes back to its position in the lane.
        lane, others = self.lane_of(unit), list[Any]()
        for each in pop_all(self.todo):
            if self.lane_of(each) is lane:
                repeated += self._entries(messages_of(each))
            else:
                others.append(each)
        self.todo.extend(others)
        if not auto_commit:  # now, because the next worker of the lane uses them, too
            uncommitted += self._entries(pop_all(self.done))
        self._service.post(partial(self._service.lane_stopped, self, lane, repeated, failed, pause_s))
        return is_known

    def take_consumed(self) -> list[Message]:
        if self._service.auto_commit:
            return self.done
        self.lanes.uncommitted += self._entries(pop_all(self.done))
        return self._committed

    def end(self) -> None:
        self._service.post(partial(self._service.chunk_ended, self))


class KeyLookup(Chunk):
    """Messages whose keys a worker reads in one call. The listener is `find_lanes`, which calls `order_by`."""

    __slots__ = ("lanes", "entries", "lanes_found", "_service", "_order_by")

    is_ordered = True
    is_measured = False

    def __init__(self, service: OrderedService, lanes: Lanes, order_by: Callable[[Message], Hashable]) -> None:
        self.lanes = lanes
        self.entries = [lanes.arrived.popleft() for _ in range(min(len(lanes.arrived), MAX_KEY_LOOKUPS))]
        self.lanes_found: list[Lane] = []
        self._service = service
        self._order_by = order_by
        listener = Listener(self.find_lanes, MAX_KEY_LOOKUPS, is_async=False, wants_context=False)
        super().__init__(lanes.window, listener, deque([[message for _, message in self.entries]]))

    def find_lanes(self, messages: list[Message]) -> None:
        """Find the lanes of messages, or of the first of them. Report exceptions of `order_by` and its keys."""
        if not self.lanes_found:
            self.lanes.prune()
        for message in messages:
            if not self.may_continue():
                self.todo.clear()  # `lanes_found` must belong to the first entries, without a gap
                return
            self.current = message  # it is reported if the function does not return
            try:
                self.lanes_found.append(self._find_lane(message))
            except BaseException as error:  # also SystemExit, which must not end a worker
                self.lanes_found.append(KeylessLane(error))
                if message._extra_attempts == 0:
                    self._service.key_failed(self.window, message, error)

    def _find_lane(self, message: Message) -> Lane:
        key = self._order_by(message)
        if hasattr(type(key), "__await__"):
            close = getattr(key, "close", None)
            if close is not None:
                close()
            raise TypeError("order_by returned an awaitable; it must be a plain function")
        return self.lanes.lane_of(key)

    def may_continue(self) -> bool:
        return self.window.may_consume() and not self._service.stopped

    def apply_result(self, unit: Any, result: object) -> bool:
        self.todo.clear()
        return True

    def take_consumed(self) -> list[Message]:
        return []

    def end(self) -> None:
        self._service.post(partial(self._service.keys_found, self))


class OrderedService(ConsumeService):
    """Dispatches each queue's or each key's messages to the workers in order. Any thread may call `post`."""

    def __init__(self, context: MemberContext, workers_for: WorkersFor, reports: ListenerReports) -> None:
        super().__init__(context, workers_for, reports)
        order_by = context.config.order_by
        self.auto_commit = context.config.auto_commit
        self.key_failed = reports.key_failed
        self.check_every_s = STUCK_AFTER_S if order_by is not None else ACK_EVERY_S
        self._is_by_key = order_by is not None
        self._order_by: Callable[[Message], Hashable] | None = order_by if callable(order_by) else None
        # No other key waits for the rest of the chunk, so it may be long, and is acknowledged in parts.
        self._has_long_chunks = order_by is None and self.auto_commit
        self._lanes: dict[MessageQueue, list[Lanes]] = {}  # of windows that have not ended, or that have calls
        self._posted: deque[Callable[[], None]] = deque()  # by workers
        self._wake_due = False
        self._touched: list[Lanes] = []  # by posted work

    # --- new messages

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` at the ends of their lanes."""
        lanes: Lanes = window.lanes or self._open(window)
        if not self._is_by_key:
            if messages:
                lanes.add_all(listener, messages)
        elif self._order_by is not None:
            lanes.arrived.extend((listener, message) for message in messages)
        else:
            lanes.prune()
            for message in messages:
                lanes.add(lanes.lane_of(sharding_key(message)), listener, message)
        self._dispatch_next(lanes)
        if lanes.check_timer is None and not self.stopped:
            lanes.check_timer = self._loop.call_later(HELD_UP_AFTER_S, self._check_progress, lanes, None, 0)

    def _open(self, window: ProcessQueue) -> Lanes:
        of_queue = self._lanes.setdefault(window.queue, [])
        for each in of_queue:
            for chunk in list(each.chunks):
                self._withdraw(chunk)  # unstarted messages must not hold up the new lanes
        lanes = window.lanes = Lanes(window, list(of_queue))
        of_queue.append(lanes)
        return lanes

    def resume_calls(self, window: ProcessQueue) -> None:
        if window.lanes is not None:
            self._dispatch_next(window.lanes)

    def forget(self, window: ProcessQueue) -> None:
        if window.lanes is not None:
            window.lanes.close()
            self._forget_if_idle(window.lanes)
            window.lanes = None

    def _forget_if_idle(self, lanes: Lanes) -> None:
        of_queue = self._lanes.get(lanes.window.queue, [])
        if lanes.is_closed and not lanes.chunks and not lanes.giving_up and lanes in of_queue:
            of_queue.remove(lanes)
            if not of_queue:
                del self._lanes[lanes.window.queue]

    def _check_progress(self, lanes: Lanes, former: Message | None, finished: int) -> None:
        """Report a queue that waits for its listener, once for each reason.

        Nothing can continue if the cache is full, and since the last check the oldest message is the same and no
        message was finished.
        """
        window, lanes.check_timer = lanes.window, None
        oldest = window.unfinished()[2]
        if oldest is None:
            return
        has_stopped = oldest is former and window.finished == finished and window.is_waiting_for_space
        if lanes.must_wait():
            why = "a listener call from before the queue restarted still runs; the queue waits until it returns"
        else:
            why = self._stall_reason(lanes, oldest) if has_stopped and not lanes.ready else ""
        reason = bool(lanes.former), oldest.queue_offset
        if why and lanes.reported != reason:
            lanes.reported = reason
            self._reports.held_up(window, why)
        lanes.check_timer = self._loop.call_later(HELD_UP_AFTER_S, self._check_progress, lanes, oldest, window.finished)

    def _stall_reason(self, lanes: Lanes, oldest: Message) -> str:
        """Return why a queue with a full cache does not continue, "" if no listener is the reason."""
        if self._is_by_key:
            lane: Lane | None = getattr(oldest, "_key_lane", None)
            deed = "fails" if oldest._extra_attempts else "hangs"
            return (
                f"the key {lane.text} {deed} at offset {oldest.queue_offset}, which holds back the offset to commit. "
                "The cache is full (max_span, max_cached_messages), so other keys wait, too"
                if lane is not None
                else ""
            )
        if not lanes.uncommitted or not lanes.lane_of(None).is_idle:
            return ""
        count = sum(len(messages) for _, messages in lanes.uncommitted)
        return (
            f"{count} messages wait for the listener's COMMIT, and the cache is full, so the queue is "
            "stalled; commit more often, or raise max_cached_messages (or max_cached_bytes)"
        )

    # --- chunks for workers

    def _dispatch_next(self, lanes: Lanes, limit: int = LARGEST_CHUNK) -> None:
        """Hand over all messages that may begin."""
        if self.stopped or not lanes.window.may_consume() or lanes.must_wait():
            return
        if lanes.arrived and not lanes.is_finding_keys and self._order_by is not None:
            lanes.is_finding_keys = True
            lookup = KeyLookup(self, lanes, self._order_by)
            self._workers_of(lookup.entries[0][0]).put(lookup)
        while lanes.ready:
            self._put_chunk(lanes, limit)

    def _put_chunk(self, lanes: Lanes, limit: int) -> None:
        """Hand over a chunk of the lanes that have waited longest."""
        ready, size = lanes.ready, units_per_chunk(lanes.window)
        listener = ready[0].waiting[0][0]
        free = LARGEST_CHUNK if self._has_long_chunks else min(size, limit)
        units: deque[Any] = deque()
        workers = self._workers_of(listener)
        chunk = LaneChunk(self, lanes, listener, units, workers)
        chunk.is_long = self._has_long_chunks and size < LARGEST_CHUNK
        while ready and free > 0 and ready[0].waiting[0][0] is listener:
            lane = ready.popleft()
            lane.holder = chunk  # first, because a lane without a holder and messages may be removed
            taken = lane.take(free * listener.batch_size)
            lane.out_count = len(taken)
            new = units_of(listener, taken)
            units.extend(new)
            free -= len(new)
            chunk.held_lanes.append(lane)
        lanes.chunks.add(chunk)
        may_get_stuck = len(units) > 1 and self.auto_commit
        workers.put(chunk)
        if may_get_stuck:
            self._start_stuck_checks()

    def _relieve(self, workers: Workers, chunk: Chunk) -> None:
        if isinstance(chunk, LaneChunk):
            self._withdraw(chunk)
            self._dispatch_next(chunk.lanes, limit=1)  # the measured listener time is no longer valid

    def _withdraw(self, chunk: LaneChunk) -> None:
        """Withdraw the messages that a worker has not begun, and the finished ones. Release lanes that it has done."""
        rest, done = pop_all(chunk.todo), pop_all(chunk.done) if self.auto_commit else []
        chunk.put_back(rest)
        for unit in (*rest, *done):
            lane = chunk.lane_of(unit)
            if lane.holder is chunk:
                lane.out_count -= len(messages_of(unit))
        try:
            chunk.window.ack(done)
        except BaseException as error:  # raised by the offset store
            self._reports.worker_failed(error)
        for lane in chunk.held_lanes:
            if lane.holder is chunk and lane.out_count == 0:
                chunk.lanes.release(lane)

    # --- reports of workers

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the I/O thread. Any thread."""
        self._posted.append(work)
        # One wake-up serves all work appended before it. A thread that finds a wake-up due has appended before that.
        if not self._wake_due:
            self._wake_due = True
            self._context.call_soon(self._run_posted)

    def _run_posted(self) -> None:
        self._wake_due = False
        while self._posted:
            self._posted.popleft()()
        self._dispatch_touched()

    def _touch(self, lanes: Lanes) -> None:
        if not lanes.is_touched:
            lanes.is_touched = True
            self._touched.append(lanes)

    def _dispatch_touched(self) -> None:
        touched, self._touched = self._touched, []
        for lanes in touched:
            lanes.is_touched = False
            self._dispatch_next(lanes)
            lanes.clear_if_idle()

    def chunk_ended(self, chunk: LaneChunk) -> None:
        """Handle the end of a chunk."""
        if chunk.todo:
            chunk.put_back(pop_all(chunk.todo))
        for lane in chunk.held_lanes:
            if lane.holder is chunk:
                chunk.lanes.release(lane)
        chunk.lanes.chunks.discard(chunk)
        self._call_ended(chunk.lanes)

    def _call_ended(self, lanes: Lanes) -> None:
        """Continue these lanes, and those that wait for their calls."""
        self._touch(lanes)
        if lanes.is_closed:
            self._forget_if_idle(lanes)
            for each in self._lanes.get(lanes.window.queue, ()):
                if lanes in each.former:
                    self._touch(each)

    def lane_stopped(
        self, chunk: LaneChunk, lane: Lane, repeated: list[Entry], failed: list[Message], pause_s: float
    ) -> None:
        """Put messages back at the head of a lane, and pause it. The listener may have `failed` for some of them."""
        lane.insert(repeated)
        self._pause_or_give_up(chunk.lanes, lane, failed, pause_s)

    def _pause_or_give_up(self, lanes: Lanes, lane: Lane, failed: list[Message], pause_s: float) -> None:
        """Pause a lane whose first messages have failed, or give these up if their attempts are used up."""
        exhausted: list[Message] = []
        most = self._context.config.most_attempts
        for message in failed:
            message._extra_attempts += 1
            if message.is_too_large or (most is not None and message.reconsume_times > most):
                exhausted.append(message)
        if failed:
            self._reports.count_failed(lanes.window, len(failed))
        lane.out_count = 0
        if exhausted and not lanes.window.dropped:
            lanes.giving_up.add(lane)
            lane.holder = lanes.giving_up
            self._context.tasks.begin(self._give_up(lanes, lane, exhausted), "giving messages up")
        else:
            self._pause(lanes, lane, pause_s)

    def _pause(self, lanes: Lanes, lane: Lane, pause_s: float) -> None:
        if lanes.is_closed or self.stopped:
            lane.holder = None
            return
        lane.holder = lanes.paused[lane] = self._loop.call_later(pause_s, self._resume, lanes, lane)

    def _resume(self, lanes: Lanes, lane: Lane) -> None:
        del lanes.paused[lane]
        if isinstance(lane, KeylessLane):
            lane.holder = None
            lanes.arrived.extend((listener, message) for listener, messages in lane.waiting for message in messages)
            lane.waiting.clear()
        else:
            lanes.release(lane)
        self._dispatch_next(lanes)

    async def _give_up(self, lanes: Lanes, lane: Lane, exhausted: list[Message]) -> None:
        """Give up messages whose attempts are used up. Those that no broker accepts stay at the head of the lane."""
        gone, pause_s = list[Message](), 0.0
        try:
            for message in exhausted:
                if lanes.window.dropped or (pause_s := await self._reports.retries.give_up(lanes.window, message)):
                    break
                gone.append(message)
        finally:
            lane.remove(gone)
            lanes.window.ack(gone)
            lanes.giving_up.discard(lane)
            if lane.waiting:
                self._pause(lanes, lane, pause_s)
            else:
                lane.holder = None
            self._call_ended(lanes)
            self._dispatch_touched()

    def keys_found(self, lookup: KeyLookup) -> None:
        """Put messages into their lanes after a worker has read their keys, or the first of them."""
        lanes, count = lookup.lanes, len(lookup.lanes_found)
        lanes.is_finding_keys = False
        for (listener, message), lane in zip(lookup.entries, lookup.lanes_found, strict=False):
            if isinstance(lane, KeylessLane):  # its key failed
                message._key_lane = lane
                lane.waiting.append((listener, [message]))
                self._pause_or_give_up(lanes, lane, [message], SUSPEND_S)
            else:
                lanes.add(lane, listener, message)
        lanes.arrived.extendleft(reversed(lookup.entries[count:]))
        self._touch(lanes)

    # --- the end

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return the number of chunks that workers have (of the queue of `window`, including earlier periods).

        A restarted queue may have calls from before. Its next owner must wait for them, too.
        """
        found = [*chain(*self._lanes.values())] if window is None else self._lanes.get(window.queue, [])
        for lanes in found:
            if lanes.window.dropped:
                for chunk in list(lanes.chunks):
                    self._withdraw(chunk)  # unstarted messages must not delay the caller
        return sum(lanes.calls() for lanes in found)

    def stop(self) -> None:
        super().stop()
        for lanes in chain(*self._lanes.values()):
            lanes.cancel_timers()
            for chunk in list(lanes.chunks):
                self._withdraw(chunk)
