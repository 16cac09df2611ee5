"""Order by key: one message of a key at a time, in order of offset, and other keys in parallel.

Each key of a queue has a lane. A chunk takes the first messages of several lanes. Each lane belongs to one worker at a
time, and its next messages start only after that worker has reported the results. A lane that fails pauses alone; its
messages hold back the offset to commit meanwhile. If a worker is stuck, the messages that it has not begun are
withdrawn. Lanes that have no other message there go to other workers.

Broker locks and the end of a queue work as in `orderly`. A chunk checks the lock before each call. A queue that begins
again waits until the earlier calls have returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from hashlib import sha256
from typing import Any

from pyrocket_consumer.config import OrderBy
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService
from pyrocket_consumer.consumer.dispatch.orderly import HELD_UP_AFTER_S, GiveUp
from pyrocket_consumer.consumer.dispatch.workers import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    Chunk,
    Workers,
    messages_of,
    pop_all,
    units_of,
)
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, find_failed_tail
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import safe_repr

MIN_KNOWN_KEYS = 64
"""The number of lanes of a queue that are kept without a check for idle ones."""

MAX_KEY_CHARS = 128
"""Longer keys are replaced by a digest, so that a lane needs little memory for any key."""

LONG_KEY_SHOWN_CHARS = 80

MAX_KEY_LOOKUPS = 256
"""The largest number of messages whose keys a worker reads with `order_by` in one step."""


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""The repr of keys of these types runs no code of users."""


class KeyLane:
    """The waiting messages of one key in one queue. Only the I/O thread changes it."""

    __slots__ = ("_key", "_text", "waiting", "holder", "out_count")

    def __init__(self, key: Hashable, text: str | None = None) -> None:
        """Create an empty lane. `text` is given if the key itself must not be kept, or its repr must not be called."""
        self._key = key
        self._text = text
        self.waiting: deque[tuple[Listener, Message]] = deque()
        self.holder: object | None = None  # the batch that has its messages, its pause, or their DeadLetterSend
        self.out_count = 0  # the number of messages that its batch has and has not reported

    @property
    def text(self) -> str:
        """The key as text for events."""
        return safe_repr(self._key) if self._text is None else self._text

    @property
    def is_idle(self) -> bool:
        """Whether the lane has no unfinished messages."""
        return self.holder is None and not self.waiting

    def put_back(self, listener: Listener, messages: Iterable[Message]) -> None:
        """Add messages in order of offset, usually at the head."""
        entries = [(listener, message) for message in messages]
        if entries and self.waiting and self.waiting[0][1].queue_offset < entries[-1][1].queue_offset:
            self.waiting = deque(sorted([*entries, *self.waiting], key=_offset))
        else:
            self.waiting.extendleft(reversed(entries))

    def take(self, limit: int) -> list[Message]:
        """Remove the first messages of one listener, and return them. There must be some."""
        waiting = self.waiting
        listener, message = waiting.popleft()
        taken = [message]
        while waiting and len(taken) < limit and waiting[0][0] is listener:
            taken.append(waiting.popleft()[1])
        return taken

    def remove(self, gone: list[Message]) -> None:
        """Remove messages at any position."""
        ids = {id(message) for message in gone}
        self.waiting = deque(entry for entry in self.waiting if id(entry[1]) not in ids)


class KeylessLane(KeyLane):
    """The lane of one message whose key could not be read."""

    __slots__ = ()

    def __init__(self, error: BaseException) -> None:
        super().__init__(None, f"<no key: {safe_repr(error)}>")


def _offset(entry: tuple[Listener, Message]) -> int:
    return entry[1].queue_offset


class KeyLanes:
    """The lanes of one window. Confined to the I/O thread, except `by_key`, which the worker that reads keys uses."""

    __slots__ = (
        "window",
        "by_key",
        "prune_above",
        "ready",
        "paused",
        "arrived",
        "is_finding_keys",
        "waits_for_former_calls",
        "check_timer",
        "reported_offset",
    )

    def __init__(self, window: ProcessQueue) -> None:
        self.window = window
        self.by_key: dict[Hashable, KeyLane] = {}
        self.prune_above = MIN_KNOWN_KEYS
        self.ready: deque[KeyLane] = deque()  # they wait for a worker
        self.paused: dict[KeyLane, asyncio.TimerHandle] = {}
        self.arrived: deque[tuple[Listener, Message]] = deque()  # messages whose keys were not read yet
        self.is_finding_keys = False
        self.waits_for_former_calls = False
        self.check_timer: asyncio.TimerHandle | None = None  # checks whether a key holds up the queue
        self.reported_offset = -1  # the last offset that was reported to hold up the queue

    def prune(self) -> None:
        """Remove idle lanes from time to time. Do not call it while a message is between its key and its lane."""
        known = self.by_key
        if len(known) > self.prune_above:
            for key in [key for key, lane in known.items() if lane.is_idle]:
                try:
                    del known[key]
                except BaseException:  # noqa: S110 - keep a key that is no longer hashable
                    pass
            self.prune_above = max(MIN_KNOWN_KEYS, 2 * len(known))

    def clear_if_idle(self) -> None:
        """Remove all lanes if they are many and all idle, without calling code of keys. No batch may exist."""
        if len(self.by_key) > MIN_KNOWN_KEYS and not (
            self.ready or self.paused or self.arrived or self.is_finding_keys
        ):
            self.by_key.clear()
            self.prune_above = MIN_KNOWN_KEYS

    def lane_of(self, key: Hashable) -> KeyLane:
        """Return the lane of a key."""
        lane = self.by_key.get(key)
        return self._find_or_add(key) if lane is None else lane

    def _find_or_add(self, key: Hashable) -> KeyLane:
        """Return the lane of a key that is not in `by_key` itself."""
        known = self.by_key
        if (type(key) is str or type(key) is bytes) and len(key) > MAX_KEY_CHARS:
            digest = _digest(key)
            lane = known.get(digest)
            if lane is None:
                text = f"{key[:LONG_KEY_SHOWN_CHARS]!r}… ({len(key) - LONG_KEY_SHOWN_CHARS} more characters)"
                lane = known[digest] = KeyLane(None, text)
            return lane
        lane = known[key] = KeyLane(key) if type(key) in _PLAIN else KeyLane(None, safe_repr(key))
        return lane

    def add(self, lane: KeyLane, listener: Listener, message: Message) -> None:
        """Add a message at the end of its lane."""
        message._key_lane = lane
        waiting = lane.waiting
        if waiting and waiting[-1][1].queue_offset > message.queue_offset:  # its key could not be read at first
            lane.waiting = deque(sorted([*waiting, (listener, message)], key=_offset))
            return
        waiting.append((listener, message))
        if lane.holder is None and len(waiting) == 1:
            self.ready.append(lane)

    def put_back(self, listener: Listener, units: list[Any]) -> None:
        """Add units, in order, before the waiting messages of their keys."""
        for unit in reversed(units):
            messages = messages_of(unit)
            messages[0]._key_lane.put_back(listener, messages)

    def release(self, lane: KeyLane) -> None:
        """Release a lane from its holder."""
        lane.holder, lane.out_count = None, 0
        if lane.waiting:
            self.ready.append(lane)


def _digest(key: str | bytes) -> tuple[type, bytes]:
    """Return the replacement of a long key. Text and bytes differ."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return type(key), sha256(data).digest()


class KeyLaneBatch:
    """The next messages of some lanes, while a worker has them."""

    __slots__ = ("lanes", "chunk", "held_lanes", "_service")

    is_measured = True

    def __init__(self, service: KeyedService, lanes: KeyLanes, chunk: Chunk) -> None:
        self.lanes = lanes
        self.chunk = chunk
        self.held_lanes: list[KeyLane] = []
        self._service = service

    def is_held(self) -> bool:
        """Return whether a call of the batch may be running, or may still begin."""
        return any(lane.holder is self for lane in self.held_lanes)

    def may_continue(self) -> bool:
        return self.lanes.window.may_consume() and not self._service.stopped

    def apply_result(self, unit: Any, result: object) -> tuple[bool, bool]:
        messages, chunk = messages_of(unit), self.chunk
        if result is ConsumeResult.COMMIT:
            chunk.done.extend(messages)
            return True, True
        left, suspend_s, known = find_failed_tail(result, messages)
        chunk.done.extend(messages[: len(messages) - len(left)])
        if left:
            # Later messages of the key must not overtake it. The I/O thread may withdraw units from the right of `todo`
            # meanwhile. Each unit is then with one of the two threads, and goes back to its position in the lane.
            lane: KeyLane = messages[0]._key_lane
            rest: list[Any] = []
            others: list[Any] = []
            for each in pop_all(chunk.todo):
                (rest if messages_of(each)[0]._key_lane is lane else others).append(each)
            chunk.todo.extend(others)
            self._service.post(partial(self._service.lane_failed, self, lane, left, rest, suspend_s))
        return True, known

    def take_consumed(self) -> list[Message]:
        return pop_all(self.chunk.done)

    def end(self) -> None:
        self._service.post(partial(self._service.batch_ended, self))


class KeyLookupBatch:
    """Messages whose keys a worker reads in one call. Its chunk's listener is `find_lanes`, which calls `order_by`."""

    is_measured = False

    def __init__(self, service: KeyedService, lanes: KeyLanes, order_by: Callable[[Message], Hashable]) -> None:
        self.lanes = lanes
        self.entries = [lanes.arrived.popleft() for _ in range(min(len(lanes.arrived), MAX_KEY_LOOKUPS))]
        self.lanes_found: list[KeyLane] = []
        self._service = service
        self._order_by = order_by
        is_async = self.entries[0][0].is_async
        listener = Listener(self._find_lanes_async if is_async else self.find_lanes, MAX_KEY_LOOKUPS, is_async, False)
        self.chunk = Chunk(lanes.window, listener, deque([[message for _, message in self.entries]]))
        self.chunk.lane_batch = self

    def find_lanes(self, messages: list[Message]) -> ConsumeResult:
        """Find the lanes of messages, or of the first of them. Report exceptions of `order_by` and its keys."""
        if not self.lanes_found:
            self.lanes.prune()
        for message in messages:
            if not self.may_continue():
                return ConsumeResult.RETRY
            self.chunk.current = message  # it is reported if the function does not return
            try:
                self.lanes_found.append(self._find_lane(message))
            except BaseException as error:  # also SystemExit, which must not end a worker
                self.lanes_found.append(KeylessLane(error))
                if message._extra_attempts == 0:
                    self._service.key_failed(self.lanes.window, message, error)
        return ConsumeResult.SUCCESS

    def _find_lane(self, message: Message) -> KeyLane:
        key = self._order_by(message)
        if hasattr(type(key), "__await__"):
            close = getattr(key, "close", None)
            if close is not None:
                close()
            raise TypeError("order_by returned an awaitable; it must be a plain function")
        return self.lanes.lane_of(key)

    async def _find_lanes_async(self, messages: list[Message]) -> ConsumeResult:
        return self.find_lanes(messages)

    def may_continue(self) -> bool:
        return self.lanes.window.may_consume() and not self._service.stopped

    def apply_result(self, unit: Any, result: object) -> tuple[bool, bool]:
        return False, True  # stop, because `lanes_found` must belong to the first entries, without a gap

    def take_consumed(self) -> list[Message]:
        return []

    def end(self) -> None:
        self._service.post(partial(self._service.keys_found, self))


class DeadLetterSend:
    """A lane whose first messages are being sent to the dead letters."""

    def __init__(self, lanes: KeyLanes, lane: KeyLane) -> None:
        self.lanes = lanes
        self._lane = lane

    def is_held(self) -> bool:
        """Return whether the send is still running."""
        return self._lane.holder is self


class KeyedService(ConsumeService):
    """Dispatches each key's messages to the workers in order. Confined to the I/O thread, except `post`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers_for: Callable[[bool], Workers],
        *,
        order_by: OrderBy,
        max_attempts: int | None,
        begin: Callable[[Coroutine[Any, Any, None], str], object],
        give_up: GiveUp,
        failed: Callable[[ProcessQueue, int], None] = lambda window, count: None,
        held_up: Callable[[ProcessQueue, str], None] = lambda window, why: None,
        key_failed: Callable[[ProcessQueue, Message, BaseException], None] = lambda window, message, error: None,
        worker_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Use the functions as `OrderlyService` does. Workers call `key_failed` if they cannot read a key."""
        super().__init__(loop, workers_for)
        self.stopped = False
        self._order_by: Callable[[Message], Hashable] | None = order_by if callable(order_by) else None
        self._max_attempts = max_attempts
        self._begin = begin
        self._give_up = give_up
        self._failed = failed
        self._held_up = held_up
        self.key_failed = key_failed
        self._worker_failed = worker_failed
        self._lanes: dict[MessageQueue, KeyLanes] = {}
        self._batches: dict[MessageQueue, set[KeyLaneBatch | DeadLetterSend]] = {}
        self._posted: deque[Callable[[], None]] = deque()  # by workers
        self._wake_due = False
        self._touched: dict[KeyLanes, None] = {}  # by posted work
        self._stuck_check: asyncio.TimerHandle | None = None
        self._quiet_checks = 0

    # --- new messages

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` at the ends of their lanes."""
        lanes = self._lanes.get(window.queue)
        if lanes is None or lanes.window is not window:
            lanes = self._add_lanes(window)
        if self._order_by is not None:
            lanes.arrived.extend((listener, message) for message in messages)
        else:
            lanes.prune()
            for message in messages:
                lanes.add(lanes.lane_of(sharding_key(message)), listener, message)
        self._dispatch_next(lanes)
        if lanes.check_timer is None and not self.stopped:
            lanes.check_timer = self._loop.call_later(HELD_UP_AFTER_S, self._report_if_stalled, lanes, None, 0)

    def _add_lanes(self, window: ProcessQueue) -> KeyLanes:
        lanes = self._lanes[window.queue] = KeyLanes(window)
        for lane_batch in list(self._batches.get(window.queue, ())):
            if isinstance(lane_batch, KeyLaneBatch):
                self._withdraw(lane_batch)  # unstarted messages must not hold up the new lanes
        if self._has_former_calls(lanes):
            lanes.waits_for_former_calls = True
            self._loop.call_later(HELD_UP_AFTER_S, self._report_if_held_up, lanes)
        return lanes

    def _has_former_calls(self, lanes: KeyLanes) -> bool:
        batches = self._batches.get(lanes.window.queue, ())
        return any(lane_batch.lanes is not lanes and lane_batch.is_held() for lane_batch in batches)

    def _report_if_held_up(self, lanes: KeyLanes) -> None:
        if lanes.waits_for_former_calls and self._lanes.get(lanes.window.queue) is lanes and not self.stopped:
            self._held_up(
                lanes.window,
                "a listener call from before the queue restarted still runs; the queue waits until it returns",
            )

    def _report_if_stalled(self, lanes: KeyLanes, former: Message | None, finished: int) -> None:
        """Report a key that keeps failing, or hangs, until the cache is full and no other key can continue.

        That is so if the oldest message is the same as at the last check, and no message was finished meanwhile.
        """
        window, lanes.check_timer = lanes.window, None
        oldest = window.unfinished()[2]
        if oldest is None:
            return
        lane = getattr(oldest, "_key_lane", None)
        is_stalled = (
            oldest is former and window.finished == finished and window.is_waiting_for_space and not lanes.ready
        )
        if is_stalled and lane is not None and lanes.reported_offset != oldest.queue_offset:
            lanes.reported_offset = oldest.queue_offset
            self._held_up(
                window,
                f"the key {lane.text} {'fails' if oldest._extra_attempts else 'hangs'} at offset "
                f"{oldest.queue_offset}, which holds back the offset to commit. The cache is full (max_span, "
                "max_cached_messages), so other keys wait, too",
            )
        lanes.check_timer = self._loop.call_later(
            HELD_UP_AFTER_S, self._report_if_stalled, lanes, oldest, window.finished
        )

    def resume_calls(self, window: ProcessQueue) -> None:
        """Continue a queue whose lock is held again."""
        lanes = self._lanes.get(window.queue)
        if lanes is not None and lanes.window is window:
            self._dispatch_next(lanes)

    def forget(self, window: ProcessQueue) -> None:
        """Remove the lanes of a window that has ended."""
        lanes = self._lanes.get(window.queue)
        if lanes is not None and lanes.window is window:
            del self._lanes[window.queue]
            _cancel_timers(lanes)

    # --- chunks for workers

    def _dispatch_next(self, lanes: KeyLanes, limit: int = LARGEST_CHUNK) -> None:
        """Hand over all messages that may begin."""
        if self.stopped or lanes.waits_for_former_calls or not lanes.window.may_consume():
            return
        if lanes.arrived and not lanes.is_finding_keys and self._order_by is not None:
            lanes.is_finding_keys = True
            lane_batch = KeyLookupBatch(self, lanes, self._order_by)
            self._workers_of(lane_batch.chunk.listener).put(lane_batch.chunk)
        while lanes.ready:
            self._put_chunk(lanes, limit)

    def _put_chunk(self, lanes: KeyLanes, limit: int) -> None:
        """Hand over a chunk of the lanes that have waited longest."""
        window, ready = lanes.window, lanes.ready
        listener = ready[0].waiting[0][0]
        free = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), limit)
        units: deque[Any] = deque()
        chunk = Chunk(window, listener, units)
        chunk.lane_batch = lane_batch = KeyLaneBatch(self, lanes, chunk)
        while ready and free > 0 and ready[0].waiting[0][0] is listener:
            lane = ready.popleft()
            lane.holder = lane_batch  # first, because a lane without a holder and messages may be removed
            taken = lane.take(free * listener.batch_size)
            lane.out_count = len(taken)
            new = units_of(listener, taken)
            units.extend(new)
            free -= len(new)
            lane_batch.held_lanes.append(lane)
        self._batches.setdefault(window.queue, set()).add(lane_batch)
        is_long = len(units) > 1
        self._workers_of(listener).put(chunk)
        if is_long:
            self._quiet_checks = 0
            if self._stuck_check is None:
                self._stuck_check = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def _withdraw_from_stuck(self) -> None:
        """Withdraw the other messages from workers that are stuck in a call. Continue as long as a chunk is busy."""
        self._stuck_check = None
        now, busy = self._loop.time(), False
        for workers in self.workers():
            busy = busy or workers.waiting() > 0
            for slot in workers.slots:
                chunk = slot.chunk
                lane_batch = chunk.lane_batch if chunk is not None else None
                if chunk is None or not isinstance(lane_batch, KeyLaneBatch) or not (chunk.todo or chunk.done):
                    continue
                busy = True
                if chunk.begun_at and now - chunk.begun_at > STUCK_AFTER_S:
                    self._withdraw(lane_batch)
                    self._dispatch_next(lane_batch.lanes, limit=1)  # the measured listener time is no longer valid
        self._quiet_checks = 0 if busy else self._quiet_checks + 1
        if self._quiet_checks < 3 and not self.stopped:  # a worker may be between taking a chunk and setting its slot
            self._stuck_check = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def _withdraw(self, lane_batch: KeyLaneBatch) -> None:
        """Withdraw the messages that a worker has not begun, and the finished ones. Release lanes that it has done."""
        lanes, chunk = lane_batch.lanes, lane_batch.chunk
        rest, done = pop_all(chunk.todo), pop_all(chunk.done)
        lanes.put_back(chunk.listener, rest)
        accounted = [message for unit in rest for message in messages_of(unit)] + done
        for message in accounted:
            lane: KeyLane = message._key_lane
            if lane.holder is lane_batch:
                lane.out_count -= 1
        try:
            lanes.window.ack(done)
        except BaseException as error:  # raised by the offset store
            self._worker_failed(error)
        for lane in lane_batch.held_lanes:
            if lane.holder is lane_batch and lane.out_count == 0:
                lanes.release(lane)

    # --- reports of workers

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the I/O thread. Any thread."""
        self._posted.append(work)
        # One wake-up serves all work appended before it. A thread that finds a wake-up due has appended before that.
        if not self._wake_due:
            self._wake_due = True
            try:
                self._loop.call_soon_threadsafe(self._run_posted)
            except RuntimeError:
                pass  # the consumer has ended before its listener

    def _run_posted(self) -> None:
        self._wake_due = False
        while self._posted:
            self._posted.popleft()()
        self._dispatch_touched()

    def _dispatch_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for lanes in touched:
            self._dispatch_next(lanes)
            if lanes.window.queue not in self._batches:
                lanes.clear_if_idle()

    def batch_ended(self, lane_batch: KeyLaneBatch) -> None:
        """Handle the end of a batch."""
        lanes = lane_batch.lanes
        if lane_batch.chunk.todo:
            lanes.put_back(lane_batch.chunk.listener, pop_all(lane_batch.chunk.todo))
        for lane in lane_batch.held_lanes:
            if lane.holder is lane_batch:
                lanes.release(lane)
        self._forget_batch(lane_batch)

    def _forget_batch(self, lane_batch: KeyLaneBatch | DeadLetterSend) -> None:
        queue = lane_batch.lanes.window.queue
        batches = self._batches[queue]
        batches.discard(lane_batch)
        if not batches:
            del self._batches[queue]
        present = self._lanes.get(queue)
        if present is not None:
            if present.waits_for_former_calls:
                present.waits_for_former_calls = self._has_former_calls(present)
            self._touched[present] = None

    def lane_failed(
        self, lane_batch: KeyLaneBatch, lane: KeyLane, left: list[Message], rest: list[Any], suspend_s: float
    ) -> None:
        """Put `left`, for which the listener failed, and then `rest` back at the head of the lane."""
        lanes = lane_batch.lanes
        lanes.put_back(lane_batch.chunk.listener, [*units_of(lane_batch.chunk.listener, left), *rest])
        self._fail(lanes, lane, left, suspend_s)

    def _fail(self, lanes: KeyLanes, lane: KeyLane, left: list[Message], suspend_s: float) -> None:
        """Pause a lane whose first messages have failed, or give these up if their attempts are used up."""
        self._failed(lanes.window, len(left))
        exhausted: list[Message] = []
        for message in left:
            message._extra_attempts += 1
            is_last = self._max_attempts is not None and message.reconsume_times > self._max_attempts
            if is_last or message.is_too_large:
                exhausted.append(message)
        lane.out_count = 0
        if exhausted and not lanes.window.dropped:
            lane.holder = giving_up = DeadLetterSend(lanes, lane)
            self._batches.setdefault(lanes.window.queue, set()).add(giving_up)
            self._begin(self._give_up_messages(giving_up, lane, exhausted), "giving messages up")
        else:
            self._pause(lanes, lane, suspend_s)

    def _pause(self, lanes: KeyLanes, lane: KeyLane, pause_s: float) -> None:
        if self._lanes.get(lanes.window.queue) is not lanes or self.stopped:
            lane.holder = None
            return
        lane.holder = lanes.paused[lane] = self._loop.call_later(pause_s, self._resume, lanes, lane)

    def _resume(self, lanes: KeyLanes, lane: KeyLane) -> None:
        del lanes.paused[lane]
        if isinstance(lane, KeylessLane):
            lane.holder = None
            lanes.arrived.extend(lane.waiting)
            lane.waiting.clear()
        else:
            lanes.release(lane)
        self._dispatch_next(lanes)

    async def _give_up_messages(self, giving_up: DeadLetterSend, lane: KeyLane, exhausted: list[Message]) -> None:
        """Give up messages whose attempts are used up. Those that no broker accepts stay at the head of the lane."""
        lanes, gone, pause_s = giving_up.lanes, list[Message](), 0.0
        try:
            for message in exhausted:
                if lanes.window.dropped or (pause_s := await self._give_up(lanes.window, message)):
                    break
                gone.append(message)
        finally:
            lane.remove(gone)
            lanes.window.ack(gone)
            if lane.waiting:
                self._pause(lanes, lane, pause_s)
            else:
                lane.holder = None
            self._forget_batch(giving_up)
            self._dispatch_touched()

    # --- keys

    def keys_found(self, lane_batch: KeyLookupBatch) -> None:
        """Put messages into their lanes after a worker has read their keys, or the first of them."""
        lanes, count = lane_batch.lanes, len(lane_batch.lanes_found)
        lanes.is_finding_keys = False
        for (listener, message), lane in zip(lane_batch.entries, lane_batch.lanes_found, strict=False):
            if isinstance(lane, KeylessLane):  # its key failed
                message._key_lane = lane
                lane.waiting.append((listener, message))
                self._fail(lanes, lane, [message], SUSPEND_S)
            else:
                lanes.add(lane, listener, message)
        lanes.arrived.extendleft(reversed(lane_batch.entries[count:]))
        self._touched[lanes] = None

    # --- common to all services

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return the number of batches that workers have (of the queue of `window`, including earlier periods).

        A restarted queue may have calls from before. Its next owner must wait for them, too.
        """
        count = 0
        for batches in [self._batches.get(window.queue, set())] if window is not None else self._batches.values():
            for lane_batch in batches:
                if lane_batch.lanes.window.dropped and isinstance(lane_batch, KeyLaneBatch):
                    self._withdraw(lane_batch)  # unstarted messages must not delay the caller
                count += lane_batch.is_held()
        return count

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        if self._stuck_check is not None:
            self._stuck_check.cancel()
            self._stuck_check = None
        for lanes in self._lanes.values():
            _cancel_timers(lanes)
        for workers in self.workers():
            workers.stop()
        for batches in self._batches.values():
            for lane_batch in batches:
                if isinstance(lane_batch, KeyLaneBatch):
                    self._withdraw(lane_batch)


def _cancel_timers(lanes: KeyLanes) -> None:
    if lanes.check_timer is not None:
        lanes.check_timer.cancel()
    for pause in lanes.paused.values():
        pause.cancel()
    lanes.paused.clear()


def sharding_key(message: Message) -> Hashable:
    """Return the key that the message was sent with, None without one. A damaged record has a unique key."""
    try:
        return message.property(PropertyName.SHARDING_KEY) or None
    except ProtocolError:
        return message.queue_offset
