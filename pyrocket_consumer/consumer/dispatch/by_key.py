"""Order by key: the messages of one key one at a time and in order of offset, those of other keys beside them.

Each key of a queue has a line. A chunk takes the first messages of several lines, and each line is with one worker at a
time: nothing else is begun of it until the worker has said what became of them. A line that fails pauses, and no other
does; its messages hold the window's edge meanwhile. What a worker that is stuck has not begun is taken back, and lines
of which it has nothing left in hand go to others.

The broker's locks and the end of a queue are as for `orderly`: a chunk looks at the lock before each call, and a queue
that begins anew waits until the calls of before have returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from hashlib import sha256
from typing import Any

from pyrocket_consumer.config import OrderBy
from pyrocket_consumer.consumer.dispatch.concurrent import (
    CHUNK_TIME_S,
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    Chunk,
    Service,
    Workers,
    messages_of,
    pop_all,
    units_of,
)
from pyrocket_consumer.consumer.dispatch.orderly import HELD_UP_AFTER_S, GiveUp
from pyrocket_consumer.consumer.listener import SUSPEND_S, ConsumeResult, Listener, suspension
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import safe_repr

LEAST_KNOWN = 64
"""So many keys of a queue are remembered without looking which of them have no messages any more."""

LONGEST_KEY = 128
"""Texts and bytes that are longer are known by a digest: a line takes little, whatever is sent."""

SHOWN_OF_LONG_KEYS = 80

SORTED_AT_ONCE = 256
"""Most messages that a worker asks `order_by` for the keys of, before they are given to listeners."""


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Keys of these types are shown without any code of users."""


class KeyLine:
    """The messages of one key, in one queue, that wait. Changed by the I/O thread only."""

    __slots__ = ("_key", "_text", "waiting", "holder", "out")

    def __init__(self, key: Hashable, text: str | None = None) -> None:
        """`text` shows a key that is not to be kept, or to be asked how it is shown."""
        self._key = key
        self._text = text
        self.waiting: deque[tuple[Listener, Message]] = deque()
        self.holder: object | None = None  # the turn that has messages of it, its pause, or their giving up
        self.out = 0  # how many messages its turn has, and has not said what became of

    @property
    def text(self) -> str:
        """The key as it is told."""
        return safe_repr(self._key) if self._text is None else self._text

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is known to be unfinished."""
        return self.holder is None and not self.waiting

    def put_back(self, listener: Listener, messages: Iterable[Message]) -> None:
        """Add messages where they belong, which is mostly before all others."""
        entries = [(listener, message) for message in messages]
        if entries and self.waiting and self.waiting[0][1].queue_offset < entries[-1][1].queue_offset:
            self.waiting = deque(sorted([*entries, *self.waiting], key=_offset))
        else:
            self.waiting.extendleft(reversed(entries))

    def take(self, most: int) -> list[Message]:
        """Remove the first messages, of one listener; there must be any."""
        waiting = self.waiting
        listener, message = waiting.popleft()
        taken = [message]
        while waiting and len(taken) < most and waiting[0][0] is listener:
            taken.append(waiting.popleft()[1])
        return taken

    def remove(self, gone: list[Message]) -> None:
        """Remove messages wherever they are."""
        ids = {id(message) for message in gone}
        self.waiting = deque(entry for entry in self.waiting if id(entry[1]) not in ids)


class KeylessLine(KeyLine):
    """A message whose key could not be told, alone."""

    __slots__ = ()

    def __init__(self, error: BaseException) -> None:
        super().__init__(None, f"<no key: {safe_repr(error)}>")


def _offset(entry: tuple[Listener, Message]) -> int:
    return entry[1].queue_offset


class QueueLines:
    """The lines of one window. Confined to the I/O thread, but for `known`: that is of whoever asks for keys."""

    __slots__ = (
        "window",
        "known",
        "prune_above",
        "ready",
        "paused",
        "arrived",
        "is_sorting",
        "waits_for_former",
        "look",
        "told",
    )

    def __init__(self, window: ProcessQueue) -> None:
        self.window = window
        self.known: dict[Hashable, KeyLine] = {}
        self.prune_above = LEAST_KNOWN
        self.ready: deque[KeyLine] = deque()  # those that wait for a worker
        self.paused: dict[KeyLine, asyncio.TimerHandle] = {}
        self.arrived: deque[tuple[Listener, Message]] = deque()  # whose keys are not known yet
        self.is_sorting = False
        self.waits_for_former = False
        self.look: asyncio.TimerHandle | None = None  # whether a key holds the queue up
        self.told = -1  # the last offset of which it was told that it holds up the queue

    def prune(self) -> None:
        """Forget keys of which there is nothing, now and then. Not while a message is between its key and its line."""
        known = self.known
        if len(known) > self.prune_above:
            for key in [key for key, line in known.items() if line.is_idle]:
                try:
                    del known[key]
                except BaseException:  # noqa: S110 - a key of a user's that cannot be hashed any more is kept
                    pass
            self.prune_above = max(LEAST_KNOWN, 2 * len(known))

    def rest(self) -> None:
        """Forget all keys if there is nothing of any, and there are many; none is asked for that. No turn is left."""
        if len(self.known) > LEAST_KNOWN and not (self.ready or self.paused or self.arrived or self.is_sorting):
            self.known.clear()
            self.prune_above = LEAST_KNOWN

    def line_of(self, key: Hashable) -> KeyLine:
        """Return the line of a key."""
        line = self.known.get(key)
        return self._first_of(key) if line is None else line

    def _first_of(self, key: Hashable) -> KeyLine:
        """Return the line of a key that is not known as it is."""
        known = self.known
        if (type(key) is str or type(key) is bytes) and len(key) > LONGEST_KEY:
            digest = _digest(key)
            line = known.get(digest)
            if line is None:
                text = f"{key[:SHOWN_OF_LONG_KEYS]!r}… ({len(key) - SHOWN_OF_LONG_KEYS} more characters)"
                line = known[digest] = KeyLine(None, text)
            return line
        line = known[key] = KeyLine(key) if type(key) in _PLAIN else KeyLine(None, safe_repr(key))
        return line

    def add(self, line: KeyLine, listener: Listener, message: Message) -> None:
        """Add a message to the end of its line."""
        message._key_lane = line
        waiting = line.waiting
        if waiting and waiting[-1][1].queue_offset > message.queue_offset:  # its key could not be told at first
            line.waiting = deque(sorted([*waiting, (listener, message)], key=_offset))
            return
        waiting.append((listener, message))
        if line.holder is None and len(waiting) == 1:
            self.ready.append(line)

    def put_back(self, listener: Listener, units: list[Any]) -> None:
        """Add units, in order, before what waits of their keys."""
        for unit in reversed(units):
            messages = messages_of(unit)
            messages[0]._key_lane.put_back(listener, messages)

    def release(self, line: KeyLine) -> None:
        """A line is with nobody any more."""
        line.holder, line.out = None, 0
        if line.waiting:
            self.ready.append(line)


def _digest(key: str | bytes) -> tuple[type, bytes]:
    """Return what a long key is known by; a text is none of bytes."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return type(key), sha256(data).digest()


class KeyTurn:
    """The next messages of some lines, while a worker has them."""

    __slots__ = ("lines", "chunk", "key_lines", "_service")

    is_measured = True

    def __init__(self, service: KeyedService, lines: QueueLines, chunk: Chunk) -> None:
        self.lines = lines
        self.chunk = chunk
        self.key_lines: list[KeyLine] = []
        self._service = service

    def is_held(self) -> bool:
        """Tell whether a call of the turn may be running, or be yet to come."""
        return any(line.holder is self for line in self.key_lines)

    def may_go_on(self) -> bool:
        return self.lines.window.may_consume() and not self._service.stopped

    def judge(self, unit: Any, result: object) -> tuple[bool, bool]:
        messages, chunk = messages_of(unit), self.chunk
        if result is ConsumeResult.COMMIT:
            chunk.done.extend(messages)
            return True, True
        left, suspend_s, known = suspension(result, messages)
        chunk.done.extend(messages[: len(messages) - len(left)])
        if left:
            # Nothing behind it may pass it. The I/O thread may be taking back from the right of `todo` meanwhile: each
            # unit is then with one of us, and goes back to its place in the line.
            line: KeyLine = messages[0]._key_lane
            rest: list[Any] = []
            others: list[Any] = []
            for each in pop_all(chunk.todo):
                (rest if messages_of(each)[0]._key_lane is line else others).append(each)
            chunk.todo.extend(others)
            self._service.post(partial(self._service.line_failed, self, line, left, rest, suspend_s))
        return True, known

    def committed(self) -> list[Message]:
        return pop_all(self.chunk.done)

    def end(self) -> None:
        self._service.post(partial(self._service.turn_ended, self))


class SortTurn:
    """Messages whose keys a worker asks for, in one call. Its chunk's listener is `order_by`, or rather `ask`."""

    is_measured = False

    def __init__(self, service: KeyedService, lines: QueueLines, order_by: Callable[[Message], Hashable]) -> None:
        self.lines = lines
        self.entries = [lines.arrived.popleft() for _ in range(min(len(lines.arrived), SORTED_AT_ONCE))]
        self.found: list[KeyLine] = []
        self._service = service
        self._order_by = order_by
        is_async = self.entries[0][0].is_async
        listener = Listener(self._ask_async if is_async else self.ask, SORTED_AT_ONCE, is_async, False)
        self.chunk = Chunk(lines.window, listener, deque([[message for _, message in self.entries]]))
        self.chunk.turn = self

    def ask(self, messages: list[Message]) -> ConsumeResult:
        """Find the lines of messages, or of the first of them. What `order_by` and its keys raise is told."""
        if not self.found:
            self.lines.prune()
        for message in messages:
            if not self.may_go_on():
                return ConsumeResult.RETRY
            self.chunk.current = message  # which is told if the function does not return
            try:
                self.found.append(self._line_of(message))
            except BaseException as error:  # SystemExit of a user's function must not end a worker
                self.found.append(KeylessLine(error))
                if message._extra_attempts == 0:
                    self._service.no_key(self.lines.window, message, error)
        return ConsumeResult.SUCCESS

    def _line_of(self, message: Message) -> KeyLine:
        key = self._order_by(message)
        if hasattr(type(key), "__await__"):
            close = getattr(key, "close", None)
            if close is not None:
                close()
            raise TypeError("order_by returned something to await; it must be a plain function")
        return self.lines.line_of(key)

    async def _ask_async(self, messages: list[Message]) -> ConsumeResult:
        return self.ask(messages)

    def may_go_on(self) -> bool:
        return self.lines.window.may_consume() and not self._service.stopped

    def judge(self, unit: Any, result: object) -> tuple[bool, bool]:
        return False, True  # none is asked for behind one that was not: `found` is of the first entries

    def committed(self) -> list[Message]:
        return []

    def end(self) -> None:
        self._service.post(partial(self._service.sort_ended, self))


class GivingUp:
    """A line whose first messages are on their way to the dead letters."""

    def __init__(self, lines: QueueLines, line: KeyLine) -> None:
        self.lines = lines
        self._line = line

    def is_held(self) -> bool:
        """Tell whether it goes on still."""
        return self._line.holder is self


class KeyedService(Service):
    """Gives each key's messages to the workers in order. Confined to the I/O thread, but for `post`."""

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
        no_key: Callable[[ProcessQueue, Message, BaseException], None] = lambda window, message, error: None,
        worker_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`no_key` hears from workers of messages whose key could not be told; others are as for `OrderlyService`."""
        super().__init__(loop, workers_for)
        self.stopped = False
        self._order_by: Callable[[Message], Hashable] | None = order_by if callable(order_by) else None
        self._max_attempts = max_attempts
        self._begin = begin
        self._give_up = give_up
        self._failed = failed
        self._held_up = held_up
        self.no_key = no_key
        self._worker_failed = worker_failed
        self._lines: dict[MessageQueue, QueueLines] = {}
        self._turns: dict[MessageQueue, set[KeyTurn | GivingUp]] = {}
        self._posted: deque[Callable[[], None]] = deque()  # by workers
        self._wake_due = False
        self._touched: dict[QueueLines, None] = {}  # by what was posted
        self._tick: asyncio.TimerHandle | None = None
        self._quiet_looks = 0

    # --- what comes

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Add `messages` to the ends of their lines."""
        lines = self._lines.get(window.queue)
        if lines is None or lines.window is not window:
            lines = self._begin_lines(window)
        if self._order_by is not None:
            lines.arrived.extend((listener, message) for message in messages)
        else:
            lines.prune()
            for message in messages:
                lines.add(lines.line_of(sharding_key(message)), listener, message)
        self._next(lines)
        if lines.look is None and not self.stopped:
            lines.look = self._loop.call_later(HELD_UP_AFTER_S, self._tell_if_it_stands, lines, None, 0)

    def _begin_lines(self, window: ProcessQueue) -> QueueLines:
        lines = self._lines[window.queue] = QueueLines(window)
        for turn in list(self._turns.get(window.queue, ())):
            if isinstance(turn, KeyTurn):
                self._take_back(turn)  # what no worker has begun holds up nobody
        if self._former_runs(lines):
            lines.waits_for_former = True
            self._loop.call_later(HELD_UP_AFTER_S, self._tell_if_held_up, lines)
        return lines

    def _former_runs(self, lines: QueueLines) -> bool:
        turns = self._turns.get(lines.window.queue, ())
        return any(turn.lines is not lines and turn.is_held() for turn in turns)

    def _tell_if_held_up(self, lines: QueueLines) -> None:
        if lines.waits_for_former and self._lines.get(lines.window.queue) is lines and not self.stopped:
            self._held_up(
                lines.window,
                "a listener call from before the queue began anew still runs; the queue waits until it returns",
            )

    def _tell_if_it_stands(self, lines: QueueLines, former: Message | None, finished: int) -> None:
        """Tell of a key that fails and fails, or hangs, until its queue has room for no more, and nothing else to do.

        It has not if since the last look the oldest message is the same, and not one was finished.
        """
        window, lines.look = lines.window, None
        oldest = window.unfinished()[2]
        if oldest is None:
            return
        line = getattr(oldest, "_key_lane", None)
        stands = oldest is former and window.finished == finished and window.is_waiting_for_space and not lines.ready
        if stands and line is not None and lines.told != oldest.queue_offset:
            lines.told = oldest.queue_offset
            self._held_up(
                window,
                f"the key {line.text} {'fails' if oldest._extra_attempts else 'hangs'} at offset "
                f"{oldest.queue_offset}, which holds the offset to commit, and there is room for no more (max_span, "
                "max_cached_messages): other keys wait for it, too, now",
            )
        lines.look = self._loop.call_later(HELD_UP_AFTER_S, self._tell_if_it_stands, lines, oldest, window.finished)

    def resume_calls(self, window: ProcessQueue) -> None:
        """The queue's lock is there again."""
        lines = self._lines.get(window.queue)
        if lines is not None and lines.window is window:
            self._next(lines)

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended."""
        lines = self._lines.get(window.queue)
        if lines is not None and lines.window is window:
            del self._lines[window.queue]
            _end_timers(lines)

    # --- what goes to workers

    def _next(self, lines: QueueLines, most: int = LARGEST_CHUNK) -> None:
        """Hand over all that may be begun."""
        if self.stopped or lines.waits_for_former or not lines.window.may_consume():
            return
        if lines.arrived and not lines.is_sorting and self._order_by is not None:
            lines.is_sorting = True
            turn = SortTurn(self, lines, self._order_by)
            self._workers_of(turn.chunk.listener).put(turn.chunk)
        while lines.ready:
            self._put(lines, most)

    def _put(self, lines: QueueLines, most: int) -> None:
        """Hand over a chunk of the lines that have waited longest."""
        window, ready = lines.window, lines.ready
        listener = ready[0].waiting[0][0]
        room = min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), most)
        units: deque[Any] = deque()
        chunk = Chunk(window, listener, units)
        chunk.turn = turn = KeyTurn(self, lines, chunk)
        while ready and room > 0 and ready[0].waiting[0][0] is listener:
            line = ready.popleft()
            line.holder = turn  # first: a line without a holder and without messages may be forgotten
            taken = line.take(room * listener.batch_size)
            line.out = len(taken)
            new = units_of(listener, taken)
            units.extend(new)
            room -= len(new)
            turn.key_lines.append(line)
        self._turns.setdefault(window.queue, set()).add(turn)
        is_long = len(units) > 1
        self._workers_of(listener).put(chunk)
        if is_long:
            self._quiet_looks = 0
            if self._tick is None:
                self._tick = self._loop.call_later(STUCK_AFTER_S, self._look)

    def _look(self) -> None:
        """Take from workers stuck in a chunk what need not wait for their call; go on while there is any such chunk."""
        self._tick = None
        now, busy = self._loop.time(), False
        for workers in self.workers():
            busy = busy or workers.waiting() > 0
            for slot in workers.slots:
                chunk = slot.chunk
                turn = chunk.turn if chunk is not None else None
                if chunk is None or not isinstance(turn, KeyTurn) or not (chunk.todo or chunk.done):
                    continue
                busy = True
                if chunk.begun_at and now - chunk.begun_at > STUCK_AFTER_S:
                    self._take_back(turn)
                    self._next(turn.lines, most=1)  # what is measured of the listener does not hold any more
        self._quiet_looks = 0 if busy else self._quiet_looks + 1
        if self._quiet_looks < 3 and not self.stopped:  # a worker may be between taking a chunk and showing it
            self._tick = self._loop.call_later(STUCK_AFTER_S, self._look)

    def _take_back(self, turn: KeyTurn) -> None:
        """Take what a worker has not begun, and what it has finished; lines of which it has no more are released."""
        lines, chunk = turn.lines, turn.chunk
        rest, done = pop_all(chunk.todo), pop_all(chunk.done)
        lines.put_back(chunk.listener, rest)
        accounted = [message for unit in rest for message in messages_of(unit)] + done
        for message in accounted:
            line: KeyLine = message._key_lane
            if line.holder is turn:
                line.out -= 1
        try:
            lines.window.ack(done)
        except BaseException as error:  # of the offset store
            self._worker_failed(error)
        for line in turn.key_lines:
            if line.holder is turn and line.out == 0:
                lines.release(line)

    # --- what workers say

    def post(self, work: Callable[[], None]) -> None:
        """Have something done on the I/O thread. Any thread."""
        self._posted.append(work)
        # One wake-up serves all that come before it. Whoever sees that one is due has appended before it is served.
        if not self._wake_due:
            self._wake_due = True
            try:
                self._loop.call_soon_threadsafe(self._do_posted)
            except RuntimeError:
                pass  # the consumer has ended before its listener

    def _do_posted(self) -> None:
        self._wake_due = False
        while self._posted:
            self._posted.popleft()()
        self._next_touched()

    def _next_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for lines in touched:
            self._next(lines)
            if lines.window.queue not in self._turns:
                lines.rest()

    def turn_ended(self, turn: KeyTurn) -> None:
        """A worker is through with a turn."""
        lines = turn.lines
        if turn.chunk.todo:
            lines.put_back(turn.chunk.listener, pop_all(turn.chunk.todo))
        for line in turn.key_lines:
            if line.holder is turn:
                lines.release(line)
        self._forget_turn(turn)

    def _forget_turn(self, turn: KeyTurn | GivingUp) -> None:
        queue = turn.lines.window.queue
        turns = self._turns[queue]
        turns.discard(turn)
        if not turns:
            del self._turns[queue]
        present = self._lines.get(queue)
        if present is not None:
            if present.waits_for_former:
                present.waits_for_former = self._former_runs(present)
            self._touched[present] = None

    def line_failed(self, turn: KeyTurn, line: KeyLine, left: list[Message], rest: list[Any], suspend_s: float) -> None:
        """The listener failed for `left`; they come again first, before the `rest` of the line that the turn had."""
        lines = turn.lines
        lines.put_back(turn.chunk.listener, [*units_of(turn.chunk.listener, left), *rest])
        self._fail(lines, line, left, suspend_s)

    def _fail(self, lines: QueueLines, line: KeyLine, left: list[Message], suspend_s: float) -> None:
        """Have a line pause whose first messages have failed, or give them up when they have had their attempts."""
        self._failed(lines.window, len(left))
        exhausted: list[Message] = []
        for message in left:
            message._extra_attempts += 1
            is_last = self._max_attempts is not None and message.reconsume_times > self._max_attempts
            if is_last or message.is_too_large:
                exhausted.append(message)
        line.out = 0
        if exhausted and not lines.window.dropped:
            line.holder = giving_up = GivingUp(lines, line)
            self._turns.setdefault(lines.window.queue, set()).add(giving_up)
            self._begin(self._dispose(giving_up, line, exhausted), "giving messages up")
        else:
            self._pause(lines, line, suspend_s)

    def _pause(self, lines: QueueLines, line: KeyLine, pause_s: float) -> None:
        if self._lines.get(lines.window.queue) is not lines or self.stopped:
            line.holder = None
            return
        line.holder = lines.paused[line] = self._loop.call_later(pause_s, self._resume, lines, line)

    def _resume(self, lines: QueueLines, line: KeyLine) -> None:
        del lines.paused[line]
        if isinstance(line, KeylessLine):
            line.holder = None
            lines.arrived.extend(line.waiting)
            line.waiting.clear()
        else:
            lines.release(line)
        self._next(lines)

    async def _dispose(self, giving_up: GivingUp, line: KeyLine, exhausted: list[Message]) -> None:
        """Give messages up that have had their attempts; those that could not be sent stay at the head."""
        lines, gone, pause_s = giving_up.lines, list[Message](), 0.0
        try:
            for message in exhausted:
                if lines.window.dropped or (pause_s := await self._give_up(lines.window, message)):
                    break
                gone.append(message)
        finally:
            line.remove(gone)
            lines.window.ack(gone)
            if line.waiting:
                self._pause(lines, line, pause_s)
            else:
                line.holder = None
            self._forget_turn(giving_up)
            self._next_touched()

    # --- keys

    def sort_ended(self, turn: SortTurn) -> None:
        """A worker has asked for the keys of messages, or of the first of them."""
        lines, count = turn.lines, len(turn.found)
        lines.is_sorting = False
        for (listener, message), line in zip(turn.entries, turn.found, strict=False):
            if isinstance(line, KeylessLine):  # it has failed
                message._key_lane = line
                line.waiting.append((listener, message))
                self._fail(lines, line, [message], SUSPEND_S)
            else:
                lines.add(line, listener, message)
        lines.arrived.extendleft(reversed(turn.entries[count:]))
        self._touched[lines] = None

    # --- what all services do

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many turns are with workers (of the queue of `window`, those of its former periods too).

        A queue that began anew may have calls of before: its next owner shall not begin beside them either.
        """
        count = 0
        for turns in [self._turns.get(window.queue, set())] if window is not None else self._turns.values():
            for turn in turns:
                if turn.lines.window.dropped and isinstance(turn, KeyTurn):
                    self._take_back(turn)  # what no worker has begun keeps nobody waiting
                count += turn.is_held()
        return count

    def stop(self) -> None:
        """Begin no further listener call."""
        self.stopped = True
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        for lines in self._lines.values():
            _end_timers(lines)
        for workers in self.workers():
            workers.stop()
        for turns in self._turns.values():
            for turn in turns:
                if isinstance(turn, KeyTurn):
                    self._take_back(turn)


def _end_timers(lines: QueueLines) -> None:
    if lines.look is not None:
        lines.look.cancel()
    for pause in lines.paused.values():
        pause.cancel()
    lines.paused.clear()


def sharding_key(message: Message) -> Hashable:
    """Return the key that the message was sent with, None without one; a damaged record is a key of its own."""
    try:
        return message.property(PropertyName.SHARDING_KEY) or None
    except ProtocolError:
        return message.queue_offset
