"""Messages to listeners: workers, and chunks sized by the time listeners take.

What is handed to a worker is a chunk: the units of one answer (a unit is one listener call) that together take about
half a millisecond. So quick listeners cost few hand-overs, and slow ones keep their parallelism: a chunk of theirs is
one unit. A worker that gets stuck in its chunk has what it has not begun taken back and given to the others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pyrocket_consumer.consumer.listener import ConsumeContext, ConsumeResult, Failed, Listener, failed_messages
from pyrocket_consumer.consumer.process_queue import ProcessQueue
from pyrocket_consumer.wire.message import Message

log = logging.getLogger("pyrocket_consumer.consumer")

CHUNK_TIME_S = 0.0005
LARGEST_CHUNK = 32
STUCK_AFTER_S = 0.005


class Chunk:
    """Units for one worker, of one queue. The worker takes from the left; what it has not begun can be taken back."""

    __slots__ = ("window", "listener", "todo", "done", "begun_at", "current", "turn")

    def __init__(self, window: ProcessQueue, listener: Listener, units: deque[list[Message]] | deque[Message]) -> None:
        self.window = window
        self.listener = listener
        self.todo: deque[Any] = units
        self.done: list[Message] = []
        self.begun_at = 0.0
        self.current: Any = None  # the unit whose listener call is running
        self.turn: Turn | None = None  # what an orderly queue has to say


class Turn(Protocol):
    """The part of a chunk that keeps the order of an orderly queue. Called by the worker that has the chunk."""

    def may_go_on(self) -> bool:
        """Tell whether the next listener call may begin."""

    def judge(self, outcome: Outcome, unit: Any, result: object) -> bool:
        """Note the result of a call that did not simply succeed. Returns whether the turn goes on."""

    def committed(self) -> list[Message]:
        """Return what now counts as consumed."""

    def end(self) -> None:
        """The worker is through."""


class Outcome(Protocol):
    """What workers report besides acks; called on the worker's thread."""

    def failed(self, window: ProcessQueue, failed: list[Failed]) -> None:
        """Some messages are to be consumed again."""

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """A listener raised instead of returning."""

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        """A listener returned something that means nothing."""

    def worker_failed(self, error: BaseException) -> None:
        """What surrounds the listener failed, which must not be: the offset store, or something of ours."""


class Slot:
    """One worker's place: which chunk it has in hand."""

    __slots__ = ("chunk", "seen", "seen_at")

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.seen: Any = None  # the unit at the last look for stuck calls, and since when it is the same
        self.seen_at = 0.0


class Workers(Protocol):
    """Something that runs chunks."""

    slots: list[Slot]

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over."""

    def waiting(self) -> int:
        """Return how many chunks no worker has begun, about."""

    def stop(self) -> None:
        """Begin no further chunk. What runs goes on; nothing waits for it here."""

    def abandon(self) -> None:
        """Wait for what still runs no longer; cancel it where that can be done."""


def messages_of(unit: Any) -> Sequence[Message]:
    """Return the messages of one listener call."""
    return unit if isinstance(unit, list) else (unit,)


def units_of(listener: Listener, messages: list[Message]) -> list[Any]:
    """Cut messages into listener calls: one each, or lists of at most `batch_size`."""
    size = listener.batch_size
    return messages if size == 1 else [messages[start : start + size] for start in range(0, len(messages), size)]


class _Runner:
    """What sync and async workers share: the judgement of one listener call."""

    def __init__(self, outcome: Outcome, consume_timeout_s: float) -> None:
        self.outcome = outcome
        self.consume_timeout_s = consume_timeout_s

    def context(self, chunk: Chunk, unit: Any) -> ConsumeContext:
        first = messages_of(unit)[0]
        deadline = time.monotonic() + self.consume_timeout_s
        return ConsumeContext(chunk.window.queue, first.reconsume_times + 1, deadline)

    def judge(self, chunk: Chunk, unit: Any, result: object, failed: list[Failed]) -> bool:
        """Sort the messages of a call that did not simply succeed. Returns whether the chunk goes on."""
        if chunk.turn is not None:
            return chunk.turn.judge(self.outcome, unit, result)
        messages = messages_of(unit)
        bad, known = failed_messages(result, messages)
        if not known:
            self.outcome.result_unknown(chunk.window, messages[0], result)
        failed.extend(bad)
        again = {id(message) for message, _ in bad}
        chunk.done.extend(message for message in messages if id(message) not in again)
        return True

    def raised(self, chunk: Chunk, unit: Any, error: BaseException, failed: list[Failed]) -> bool:
        """Note that a listener raised. Returns whether the chunk goes on."""
        messages = messages_of(unit)
        self.outcome.listener_raised(chunk.window, messages[0], error)
        if chunk.turn is not None:
            return chunk.turn.judge(self.outcome, unit, ConsumeResult.RETRY)
        failed.extend((message, 0) for message in messages)
        return True

    def finish(self, chunk: Chunk, calls: int, failed: list[Failed]) -> None:
        chunk.current = None
        chunk.window.last_consumed_at = now = chunk.window.clock()
        done = chunk.done if chunk.turn is None else chunk.turn.committed()
        chunk.window.ack(done, now - chunk.begun_at, calls)
        if failed:
            self.outcome.failed(chunk.window, failed)
        if chunk.turn is not None:
            chunk.turn.end()

    def leave(self, chunk: Chunk) -> None:
        """Work has stopped: unfinished messages stay unfinished. They come again, to somebody else."""
        if chunk.turn is not None:
            chunk.turn.end()


class ThreadWorkers(_Runner):
    """`count` threads for plain listeners. To wake one costs more than many quick listener calls, so few are woken.

    What was put is looked at once per turn of the loop, just before the loop gives up the GIL to wait for the network.
    Then as many workers are awake as keep what waits from taking longer than a chunk should; the one that fell asleep
    last is woken first, because its stack is warm. Estimates err: whenever something has waited for `STUCK_AFTER_S`
    all the same, one more is woken.
    """

    def __init__(
        self, count: int, outcome: Outcome, consume_timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the threads. `put` is to be called on `loop`."""
        super().__init__(outcome, consume_timeout_s)
        self.slots = [Slot() for _ in range(count)]
        self._loop = loop
        self._chunks: deque[Chunk] = deque()
        self._lock = threading.Lock()  # of the list of those asleep; a leaf, held for a few steps
        self._asleep: list[threading.Lock] = []
        self._stopping = False
        self._wake_due = False  # from here on confined to the loop
        self._slowest_s = 0.0  # listener time of what was put since the last wake-up
        self._put_since = 0  # how many were put since the last look at what waits
        self._next_look: asyncio.TimerHandle | None = None
        for number, slot in enumerate(self.slots):
            threading.Thread(target=self._work, args=(slot,), name=f"pyrocket-consume-{number}", daemon=True).start()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._put_since += 1
        self._slowest_s = max(self._slowest_s, chunk.window.listener_time_s)
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon(self._wake_enough)

    def _wake_enough(self) -> None:
        waiting, slowest_s, self._slowest_s, self._wake_due = len(self._chunks), self._slowest_s, 0.0, False
        if waiting and self._wake(1 + int(2 * waiting * slowest_s / CHUNK_TIME_S)) and self._next_look is None:
            self._next_look = self._loop.call_later(STUCK_AFTER_S, self._look)

    def _look(self) -> None:
        waiting, self._next_look = len(self._chunks), None
        if waiting > self._put_since:  # the first in line was there at the last look, too
            self._wake(len(self.slots) - len(self._asleep) + 1)
        self._put_since = 0
        if waiting:
            self._next_look = self._loop.call_later(STUCK_AFTER_S, self._look)

    def _wake(self, wanted: int) -> bool:
        """See to it that `wanted` workers are awake. Returns whether any sleep on."""
        # A worker that finds nothing looks once more under this lock before it falls asleep. So either it sees what
        # was put before we came here, or we find it asleep: none sleeps in beside a chunk that nobody is woken for.
        with self._lock:
            while self._asleep and len(self.slots) - len(self._asleep) < wanted:
                self._asleep.pop().release()
            return bool(self._asleep)

    def waiting(self) -> int:
        return len(self._chunks)

    def stop(self) -> None:
        self._stopping = True
        self._wake(len(self.slots))

    def abandon(self) -> None:
        """A thread cannot be cancelled: what it runs finishes unheard, and its thread then ends."""

    def _work(self, slot: Slot) -> None:
        take, bell = self._chunks.popleft, threading.Lock()
        bell.acquire()
        while True:
            try:
                chunk = take()
            except IndexError:
                with self._lock:
                    if self._chunks:
                        continue
                    if self._stopping:
                        return
                    self._asleep.append(bell)
                bell.acquire()  # whoever wakes us releases it
                continue
            slot.chunk = chunk
            try:
                if self._stopping:
                    self.leave(chunk)
                else:
                    self._consume(chunk)
            except BaseException as error:
                self.outcome.worker_failed(error)
            slot.chunk = None

    def _consume(self, chunk: Chunk) -> None:
        chunk.begun_at = chunk.window.clock()
        window, listener, take, done = chunk.window, chunk.listener, chunk.todo.popleft, chunk.done
        call, context = listener.call, listener.wants_context
        add = done.extend if listener.batch_size > 1 else done.append
        turn, failed, calls = chunk.turn, list[Failed](), 0
        while not window.dropped and (turn is None or turn.may_go_on()):
            try:
                unit = take()
            except IndexError:
                break
            chunk.current = unit
            calls += 1
            try:
                result = call(unit, self.context(chunk, unit)) if context else call(unit)
            except BaseException as error:  # SystemExit of a listener must not end a worker
                if self.raised(chunk, unit, error, failed):
                    continue
                break
            if result is None or result is ConsumeResult.SUCCESS:
                add(unit)
            elif not self.judge(chunk, unit, result, failed):
                break
        self.finish(chunk, calls, failed)


class AsyncWorkers(_Runner):
    """At most `count` calls of `async def` listeners at once, on `loop` (the caller's, or a thread of our own)."""

    def __init__(
        self, count: int, outcome: Outcome, consume_timeout_s: float, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(outcome, consume_timeout_s)
        self.slots = [Slot() for _ in range(count)]
        self._own = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived: deque[Chunk] = deque()
        self._stopping = False
        if self._own:
            threading.Thread(target=self._run_loop, name="pyrocket-listener", daemon=True).start()
        self._loop.call_soon_threadsafe(self._begin)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _begin(self) -> None:
        self._tasks = [self._loop.create_task(self._work(slot)) for slot in self.slots]

    def put(self, chunk: Chunk) -> None:
        self._arrived.append(chunk)
        if len(self._arrived) == 1:  # one wake-up serves all that come before it
            self._loop.call_soon_threadsafe(self._take_arrived)

    def waiting(self) -> int:
        return self._chunks.qsize() + len(self._arrived)

    def _take_arrived(self) -> None:
        while True:
            try:
                self._chunks.put_nowait(self._arrived.popleft())
            except IndexError:
                return

    def stop(self) -> None:
        self._stopping = True
        self._on_loop(self._end_idle)

    def abandon(self) -> None:
        self._on_loop(self._end_all)

    def _on_loop(self, work: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            pass  # the loop has ended

    def _end_idle(self) -> None:
        self._take_arrived()
        while not self._chunks.empty():
            self.leave(self._chunks.get_nowait())
        for task, slot in zip(self._tasks, self.slots, strict=True):
            if slot.chunk is None:
                task.cancel()
        if self._own:
            asyncio.gather(*self._tasks, return_exceptions=True).add_done_callback(lambda done: self._loop.stop())

    def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self, slot: Slot) -> None:
        while not self._stopping:
            chunk = await self._chunks.get()
            slot.chunk = chunk
            try:
                await self._consume(chunk)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                self.outcome.worker_failed(error)
            finally:
                slot.chunk = None

    async def _consume(self, chunk: Chunk) -> None:
        chunk.begun_at = chunk.window.clock()
        listener, turn = chunk.listener, chunk.turn
        failed, calls, goes_on = list[Failed](), 0, True
        while goes_on and not chunk.window.dropped and (turn is None or turn.may_go_on()):
            try:
                unit = chunk.current = chunk.todo.popleft()
            except IndexError:
                break
            calls += 1
            try:
                call: Awaitable[object] = (
                    listener.call(unit, self.context(chunk, unit)) if listener.wants_context else listener.call(unit)
                )
                result = await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # we are being stopped; the messages stay unfinished
                goes_on = self.raised(chunk, unit, asyncio.CancelledError("the listener was cancelled"), failed)
            except BaseException as error:
                if isinstance(error, GeneratorExit) and not self._loop.is_running():
                    raise  # the loop was closed under us
                goes_on = self.raised(chunk, unit, error, failed)
            else:
                goes_on = self.judge(chunk, unit, result, failed)
        self.finish(chunk, calls, failed)


class ConsumeService:
    """Cuts answers into chunks for the workers, and looks after the slow ones. Confined to the I/O thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers_for: Callable[[bool], Workers]) -> None:
        self._loop = loop
        self._workers_for = workers_for
        self._workers: dict[bool, Workers] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._quiet_looks = 0

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""
        return list(self._workers.values())

    def _workers_of(self, listener: Listener) -> Workers:
        workers = self._workers.get(listener.is_async)
        if workers is None:
            workers = self._workers[listener.is_async] = self._workers_for(listener.is_async)
        return workers

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
        self._quiet_looks = 0
        if chunk > 1 and self._tick is None:
            self._tick = self._loop.call_later(STUCK_AFTER_S, self._take_back)

    def _take_back(self) -> None:
        """Give to others what workers stuck in a chunk have not begun; go on while anything divisible runs."""
        self._tick = None
        now = self._loop.time()
        busy = False
        for workers in self._workers.values():
            busy = busy or workers.waiting() > 0
            for slot in workers.slots:
                chunk = slot.chunk
                if chunk is None or not chunk.todo:
                    continue
                busy = True
                if chunk.begun_at and now - chunk.begun_at > STUCK_AFTER_S:
                    for unit in _pop_all(chunk.todo):
                        workers.put(Chunk(chunk.window, chunk.listener, deque((unit,))))
                    chunk.window.ack(chunk.done[:])  # what it has finished need not wait for the call that is stuck
        self._quiet_looks = 0 if busy else self._quiet_looks + 1
        if self._quiet_looks < 3:  # a worker may be between taking a chunk and showing it
            self._tick = self._loop.call_later(STUCK_AFTER_S, self._take_back)

    def stuck(self, timeout_s: float, now: float) -> list[tuple[ProcessQueue, Sequence[Message]]]:
        """Return the messages whose listener call was already running, at an earlier look, `timeout_s` ago."""
        found = []
        for workers in self._workers.values():
            for slot in workers.slots:
                chunk = slot.chunk
                unit = chunk.current if chunk is not None else None
                if unit is not slot.seen:
                    slot.seen, slot.seen_at = unit, now
                elif chunk is not None and unit is not None and now - slot.seen_at >= timeout_s:
                    found.append((chunk.window, messages_of(unit)))
        return found

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many listener calls are running (of `window`)."""
        return sum(
            1
            for workers in self._workers.values()
            for slot in workers.slots
            if (chunk := slot.chunk) is not None and (window is None or chunk.window is window)
        )

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended; its chunks end by themselves."""

    def go_on(self, window: ProcessQueue) -> None:
        """Nothing waits here: only orderly queues do."""

    def stop(self) -> None:
        """Begin no further listener call."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        for workers in self._workers.values():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    _pop_all(chunk.todo)

    def abandon(self) -> None:
        """Wait for listener calls no longer."""
        for workers in self._workers.values():
            workers.abandon()


def _pop_all(units: deque[Any]) -> list[Any]:
    """Empty `units` from the right, while its worker may take from the left; return them in order."""
    taken = []
    while True:
        try:
            taken.append(units.pop())
        except IndexError:
            return taken[::-1]
