"""Messages to listeners: workers, and chunks sized by the time listeners take.

What is handed to a worker is a chunk: the units of one answer (a unit is one listener call) that together take about
half a millisecond. So quick listeners cost few hand-overs, and slow ones keep their parallelism: a chunk of theirs is
one unit. A worker that gets stuck in its chunk has what it has not begun taken back and given to the others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

from pyrocket_consumer.consumer.listener import ConsumeContext, ConsumeResult, FailedMessage, Listener, find_failed
from pyrocket_consumer.consumer.window.decompression_budget import Reservation
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ClientClosed
from pyrocket_consumer.offsets.database.claim import RolledBack, claim_of_call
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import logger

log = logger("consumer")

T = TypeVar("T")

CHUNK_TIME_S = 0.0005
LARGEST_CHUNK = 32
STUCK_AFTER_S = 0.005

BUDGET_CHECK_EVERY_S = 0.01
"""How often a call of an `async def` listener looks whether there is room for what it may unpack."""

CANCELLED_TASKS_WAIT_S = 1.0
"""How long tasks that async listeners have left behind are waited for at the end."""

_calling: ContextVar[Workers | None] = ContextVar("pyrocket_calling", default=None)
"""Whose listener call this is. Set once in each worker; what a listener begins (tasks, `to_thread`) has it, too."""


class Chunk:
    """Units for one worker, of one queue. The worker takes from the left; what it has not begun can be taken back.

    So can what it has finished, while it is stuck: each message that failed is handed over by whoever takes it out.
    """

    __slots__ = (
        "window",
        "listener",
        "todo",
        "done",
        "failed",
        "begun_at",
        "current",
        "lane_batch",
        "is_long",
        "parts",
    )

    def __init__(self, window: ProcessQueue, listener: Listener, units: deque[list[Message]] | deque[Message]) -> None:
        self.window = window
        self.listener = listener
        self.todo: deque[Any] = units
        self.done: list[Message] = []
        self.failed: list[FailedMessage] = []
        self.begun_at = 0.0
        self.current: Any = None  # the unit whose listener call is running
        self.lane_batch: LaneBatch | None = None  # what an orderly queue has to say
        self.is_long = False  # may take long: what is consumed is acknowledged meanwhile
        self.parts = 0  # how often that was done


class LaneBatch(Protocol):
    """The part of a chunk that keeps the order of an orderly queue. Called by the worker that has the chunk."""

    @property
    def is_measured(self) -> bool:
        """Whether its calls are the listener's, by whose time work is handed over."""

    def may_continue(self) -> bool:
        """Tell whether the next listener call may begin."""

    def apply_result(self, unit: Any, result: object) -> tuple[bool, bool]:
        """Note the result of a call that did not simply succeed.

        Returns whether the turn goes on, and whether the result means something.
        """

    def take_consumed(self) -> list[Message]:
        """Return what now counts as consumed."""

    def end(self) -> None:
        """The worker is through."""


class ListenerReporter(Protocol):
    """What workers report besides acks; called on the worker's thread."""

    def failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        """Some messages are to be consumed again."""

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """A listener raised instead of returning."""

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        """A listener returned something that means nothing, for the first time something of that type."""

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

    def settle(self, chunk: Chunk) -> None:
        """Hand over what became of messages of a chunk whose worker is still in it; not for orderly queues."""

    def stop(self) -> None:
        """Begin no further chunk. What runs goes on; nothing waits for it here."""

    def abandon(self) -> None:
        """Wait for what still runs no longer; cancel it where that can be done."""

    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Call a listener where these workers call it, beside their work. Returns its result, or what it raised."""


class ConsumeService:
    """What hands messages to workers: plain and async ones, made when the first listener of their kind needs them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers_for: Callable[[bool], Workers]) -> None:
        """`workers_for` gets whether the workers are to await their listeners."""
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
        """Return the messages whose listener call was already running, at an earlier look, `timeout_s` ago."""
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
        """Tell whether the caller is a listener call of this consumer, or something that one began. Any thread.

        Who waits there until no call runs waits for itself.
        """
        return (calling := _calling.get()) is not None and calling in self.workers()

    async def call_once(
        self, listener: Listener, unit: Any, context: ConsumeContext
    ) -> tuple[object, BaseException | None]:
        """Call `listener` where it is always called, beside the work. Returns its result, or what it raised."""
        arguments = (unit, context) if listener.wants_context else (unit,)
        return await self._workers_of(listener).call_once(partial(listener.call, *arguments))

    def abandon(self) -> None:
        """Wait for listener calls no longer."""
        for workers in self.workers():
            workers.abandon()


def messages_of(unit: Any) -> Sequence[Message]:
    """Return the messages of one listener call."""
    return unit if isinstance(unit, list) else (unit,)


def units_of(listener: Listener, messages: list[Message]) -> list[Any]:
    """Cut messages into listener calls: one each, or lists of at most `batch_size`."""
    size = listener.batch_size
    return messages if size == 1 else [messages[start : start + size] for start in range(0, len(messages), size)]


class _ChunkRunner:
    """What sync and async workers share: the judgement of one listener call."""

    def __init__(self, reporter: ListenerReporter, consume_timeout_s: float) -> None:
        self.reporter = reporter
        self.consume_timeout_s = consume_timeout_s
        self._reported: dict[
            tuple[int, type], Listener
        ] = {}  # results that mean nothing; kept, so that ids stay theirs

    def context(self, chunk: Chunk, unit: Any) -> ConsumeContext:
        first = messages_of(unit)[0]
        deadline = time.monotonic() + self.consume_timeout_s
        return ConsumeContext(chunk.window.queue, first.reconsume_times + 1, deadline)

    def split_to_fit(self, chunk: Chunk, unit: Any, reservation: Reservation) -> Any:
        """Return what of `unit` may be given to the listener at once; the rest is the chunk's next unit."""
        if reservation.count < len(messages_of(unit)):
            chunk.todo.appendleft(unit[reservation.count :])
            return unit[: reservation.count]
        return unit

    def apply_result(self, chunk: Chunk, unit: Any, result: object) -> bool:
        """Sort the messages of a call that did not simply succeed. Returns whether the chunk goes on."""
        messages = messages_of(unit)
        if chunk.lane_batch is not None:
            continues, known = chunk.lane_batch.apply_result(unit, result)
        else:
            bad, known = find_failed(result, messages)
            continues = True
            chunk.failed.extend(bad)
            again = {id(message) for message, _ in bad}
            chunk.done.extend(message for message in messages if id(message) not in again)
        if not known:
            self._report_unknown(chunk, messages[0], result)
        return continues

    def _report_unknown(self, chunk: Chunk, message: Message, result: object) -> None:
        """Tell of the first such result of a listener: the thousandth says nothing new."""
        if type(result) is RolledBack:
            result = result.result
        key = (id(chunk.listener), type(result))
        if key not in self._reported:
            self._reported[key] = chunk.listener
            self.reporter.result_unknown(chunk.window, message, result)

    def note_raised(self, chunk: Chunk, unit: Any, error: BaseException) -> bool:
        """Note that a listener raised. Returns whether the chunk goes on."""
        messages = messages_of(unit)
        continues = True
        if (claim := chunk.window.claim) is not None:
            claim.end_failed_call()
        if chunk.lane_batch is not None:
            continues, _ = chunk.lane_batch.apply_result(unit, ConsumeResult.RETRY)
        else:
            chunk.failed.extend((message, 0) for message in messages)
        self.reporter.listener_raised(chunk.window, messages[0], error)  # last: a user's logging may raise in turn
        return continues

    def settle(self, chunk: Chunk) -> None:
        """Hand over what became of messages of a chunk whose worker is still in it. Called on the I/O thread."""
        try:
            chunk.window.ack(pop_all(chunk.done))
        except BaseException as error:
            self.reporter.worker_failed(error)
        if failed := pop_all(chunk.failed):
            self.reporter.failed(chunk.window, failed)

    def finish_part(self, chunk: Chunk, calls: int) -> int:
        """Hand over what is consumed of a chunk that goes on, if it is time. Returns how many calls are uncounted."""
        now = chunk.window.clock()
        if now - chunk.begun_at < CHUNK_TIME_S:
            return calls
        chunk.window.last_consumed_at = now
        chunk.window.ack(pop_all(chunk.done), now - chunk.begun_at, calls)
        chunk.begun_at = now
        chunk.parts += 1
        return 0

    def finish(self, chunk: Chunk, calls: int) -> None:
        """Hand over what became of the chunk's messages. An error of the offset store keeps none of it back."""
        chunk.current = None
        chunk.window.last_consumed_at = now = chunk.window.clock()
        try:
            lane_batch = chunk.lane_batch
            done = chunk.done if lane_batch is None else lane_batch.take_consumed()
            chunk.window.ack(done, now - chunk.begun_at, calls if lane_batch is None or lane_batch.is_measured else 0)
        finally:
            if chunk.failed and (failed := pop_all(chunk.failed)):
                self.reporter.failed(chunk.window, failed)
            if chunk.lane_batch is not None:
                chunk.lane_batch.end()

    def drop(self, chunk: Chunk) -> None:
        """Work has stopped: unfinished messages stay unfinished. They come again, to somebody else."""
        if chunk.lane_batch is not None:
            chunk.lane_batch.end()


class ThreadWorkers(_ChunkRunner):
    """`count` threads for plain listeners. To wake one costs more than many quick listener calls, so few are woken.

    What was put is looked at once per turn of the loop, just before the loop gives up the GIL to wait for the network.
    Then as many workers are awake as keep what waits from taking longer than a chunk should; the one that fell asleep
    last is woken first, because its stack is warm. Estimates err: whenever something has waited for `STUCK_AFTER_S`
    all the same, one more is woken.
    """

    def __init__(
        self, count: int, reporter: ListenerReporter, consume_timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the threads. `put` is to be called on `loop`."""
        super().__init__(reporter, consume_timeout_s)
        self.slots = [Slot() for _ in range(count)]
        self._loop = loop
        self._chunks: deque[Chunk] = deque()
        self._lock = threading.Lock()  # of the list of those asleep; a leaf, held for a few steps
        self._asleep: list[threading.Lock] = []
        self._stopping = False
        self._wake_due = False  # from here on confined to the loop
        self._slowest_s = 0.0  # listener time of what was put since the last wake-up
        self._put_since = 0  # how many were put since the last look at what waits
        self._next_check: asyncio.TimerHandle | None = None
        for number, slot in enumerate(self.slots):
            threading.Thread(target=self._work, args=(slot,), name=f"pyrocket-consume-{number}", daemon=True).start()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._put_since += 1
        self._slowest_s = max(self._slowest_s, chunk.window.listener_time_s)
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon(self._wake_enough)

    def _requeue(self, window: ProcessQueue, listener: Listener, unit: Any) -> None:
        """Put what had to wait for room behind what has come meanwhile. Any thread."""
        self._chunks.append(Chunk(window, listener, deque((unit,))))
        self._wake(len(self.slots) - len(self._asleep) + 1)

    def _wake_enough(self) -> None:
        waiting, slowest_s, self._slowest_s, self._wake_due = len(self._chunks), self._slowest_s, 0.0, False
        if waiting and self._wake(1 + int(2 * waiting * slowest_s / CHUNK_TIME_S)) and self._next_check is None:
            self._next_check = self._loop.call_later(STUCK_AFTER_S, self._check_waiting)

    def _check_waiting(self) -> None:
        waiting, self._next_check = len(self._chunks), None
        if waiting > self._put_since:  # the first in line was there at the last look, too
            self._wake(len(self.slots) - len(self._asleep) + 1)
        self._put_since = 0
        if waiting:
            self._next_check = self._loop.call_later(STUCK_AFTER_S, self._check_waiting)

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

    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Call on a thread of its own, which keeps no process alive."""
        answer = self._loop.create_future()

        def run() -> None:
            _calling.set(self)
            result, raised = None, None
            try:
                result = call()
            except BaseException as error:  # it must not end the thread, nor the loop that hears of it
                raised = error
            try:
                self._loop.call_soon_threadsafe(resolve, result, raised)
            except RuntimeError:
                pass  # the loop has ended

        def resolve(result: Any, raised: BaseException | None) -> None:
            if not answer.done():
                answer.set_result((result, raised))

        threading.Thread(target=run, name="pyrocket-consume-once", daemon=True).start()
        found: tuple[Any, BaseException | None] = await answer
        return found

    def _work(self, slot: Slot) -> None:
        _calling.set(self)
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
                    self.drop(chunk)
                else:
                    self._consume(chunk)
            except BaseException as error:
                self.reporter.worker_failed(error)
            slot.chunk = None

    def _consume(self, chunk: Chunk) -> None:
        chunk.begun_at = chunk.window.clock()
        window, listener, take, done = chunk.window, chunk.listener, chunk.todo.popleft, chunk.done
        call, context = listener.call, listener.wants_context
        add = done.extend if listener.batch_size > 1 else done.append
        lane_batch, calls, bodies, is_list = chunk.lane_batch, 0, window.budget.bodies, listener.batch_size > 1
        if (claim := window.claim) is not None:
            claim_of_call.set(claim)

        def may_begin() -> bool:
            return not self._stopping and not window.dropped and (lane_batch is None or lane_batch.may_continue())

        try:
            while not window.dropped and (lane_batch is None or lane_batch.may_continue()):
                try:
                    unit = take()
                except IndexError:
                    break
                reservation = bodies.reserve(messages_of(unit)) if bodies.any_packed else None
                if reservation is not None and not reservation.is_granted:
                    if lane_batch is None and not bodies.acquire_or_defer(
                        window, partial(self._requeue, window, listener, unit)
                    ):
                        continue
                    try:
                        bodies.measure(reservation, messages_of(unit))
                        unit = self.split_to_fit(chunk, unit, reservation)
                        if not reservation.wait(may_begin, self.consume_timeout_s):
                            reservation.release()
                            chunk.todo.appendleft(unit)
                            break
                    finally:
                        if lane_batch is None:
                            bodies.release_measuring()
                chunk.current = unit
                calls += 1
                given = unit[:] if is_list else unit  # the list is the listener's to empty or sort
                if claim is not None:
                    claim.begin_call(messages_of(unit))
                try:
                    result = call(given, self.context(chunk, unit)) if context else call(given)
                    if claim is not None:
                        result = claim.final_result(result)
                except BaseException as error:  # SystemExit of a listener must not end a worker
                    if self.note_raised(chunk, unit, error):
                        continue
                    break
                finally:
                    if reservation is not None:
                        reservation.release()
                if result is None or result is ConsumeResult.SUCCESS:
                    add(unit)
                    if chunk.is_long:
                        calls = self.finish_part(chunk, calls)
                elif not self.apply_result(chunk, unit, result):
                    break
        finally:
            bodies.retry_deferred()
            self.finish(chunk, calls)


class AsyncWorkers(_ChunkRunner):
    """At most `count` calls of `async def` listeners at once, on `loop` (the caller's, or a thread of our own)."""

    def __init__(
        self,
        count: int,
        reporter: ListenerReporter,
        consume_timeout_s: float,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(reporter, consume_timeout_s)
        self.slots = [Slot() for _ in range(count)]
        self._owns_loop = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the number of their slot
        self._missing_workers: list[int] = []  # slots whose worker was cancelled by somebody else
        self._arrived: deque[Chunk] = deque()
        self._stopping = False
        self._abandoned = False
        self._ended = False
        if self._owns_loop:
            threading.Thread(target=self._run_loop, name="pyrocket-listener", daemon=True).start()
        self._loop.call_soon_threadsafe(self._begin)

    def _run_loop(self) -> None:
        """Run the loop until its workers have ended, whatever listeners do to it."""
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit and KeyboardInterrupt of a task leave the loop, too
                log.error("a task that a listener began raised %r", error, exc_info=error)
        if left := asyncio.all_tasks(self._loop):  # of listeners; as asyncio.run does, but nobody waits for ever
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=CANCELLED_TASKS_WAIT_S))
        self._loop.close()

    def _begin(self) -> None:
        for number in range(len(self.slots)):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        task = self._tasks[number] = self._loop.create_task(self._work(self.slots[number]))
        task.add_done_callback(partial(self._worker_ended, number))

    def _worker_ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Note that a worker was cancelled: by a listener, which ran in its task, or because the loop is to end.

        So another begins only when there is work: whoever ends a loop waits until no task is left.
        """
        if not task.cancelled():
            task.exception()  # at most a listener's GeneratorExit, which was told
        if self._tasks.get(number) is task:
            del self._tasks[number]  # what ended it has the frames of its listener, and all that is open there
        if not self._stopping:
            self._missing_workers.append(number)
            if not self._chunks.empty():
                self._start_missing_workers()

    def _start_missing_workers(self) -> None:
        while self._missing_workers and not self._stopping:
            self._start_worker(self._missing_workers.pop())

    def put(self, chunk: Chunk) -> None:
        self._arrived.append(chunk)
        is_due = len(self._arrived) == 1 or self._loop.is_closed()  # one wake-up serves all that come before it
        if is_due and not self._call_on_loop(self._take_arrived):
            text = "the loop that async def listeners run on has ended; close the consumer before it does"
            self.reporter.worker_failed(ClientClosed(text))

    def waiting(self) -> int:
        return self._chunks.qsize() + len(self._arrived)

    def _take_arrived(self) -> None:
        if self._missing_workers:
            self._start_missing_workers()
        while True:
            try:
                self._chunks.put_nowait(self._arrived.popleft())
            except IndexError:
                return

    def stop(self) -> None:
        self._stopping = True
        self._call_on_loop(self._cancel_idle)

    def abandon(self) -> None:
        self._call_on_loop(self._cancel_all)

    async def ended(self) -> None:
        """Wait a moment, on their loop, until calls that were cancelled have cleaned up: a rollback takes its time."""
        if tasks := list(self._tasks.values()):
            await asyncio.wait(tasks, timeout=CANCELLED_TASKS_WAIT_S)

    def _call_on_loop(self, work: Callable[[], None]) -> bool:
        """Have something done there. Returns False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            return False
        return True

    def _cancel_idle(self) -> None:
        self._take_arrived()
        while not self._chunks.empty():
            self.drop(self._chunks.get_nowait())
        for number, task in self._tasks.items():
            if self.slots[number].chunk is None:
                task.cancel()
        if self._owns_loop:
            asyncio.gather(*self._tasks.values(), return_exceptions=True).add_done_callback(self._end_loop)

    def _end_loop(self, done: object) -> None:
        self._ended = True
        self._loop.stop()

    def _cancel_all(self) -> None:
        self._abandoned = True
        for task in self._tasks.values():
            task.cancel()

    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        async def run() -> tuple[Any, BaseException | None]:
            _calling.set(self)
            try:
                return await call(), None
            except BaseException as error:  # it must not end the loop
                return None, error

        running = run()
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop))
        except RuntimeError as error:  # the loop has ended
            running.close()
            return None, error

    async def _work(self, slot: Slot) -> None:
        _calling.set(self)
        while not self._stopping:
            chunk = await self._chunks.get()
            slot.chunk = chunk
            try:
                await self._consume(chunk)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                self.reporter.worker_failed(error)
            finally:
                slot.chunk = None

    async def _consume(self, chunk: Chunk) -> None:
        chunk.begun_at = chunk.window.clock()
        listener, lane_batch, cancelling = chunk.listener, chunk.lane_batch, _this_task().cancelling
        add = chunk.done.extend if listener.batch_size > 1 else chunk.done.append
        calls, continues, bodies, is_list = 0, True, chunk.window.budget.bodies, listener.batch_size > 1
        if (claim := chunk.window.claim) is not None:
            claim_of_call.set(claim)
        try:
            while continues and not chunk.window.dropped and (lane_batch is None or lane_batch.may_continue()):
                try:
                    unit = chunk.todo.popleft()
                except IndexError:
                    break
                reservation = bodies.reserve(messages_of(unit)) if bodies.any_packed else None
                if reservation is not None and not reservation.is_granted:
                    again = partial(self._requeue, Chunk(chunk.window, listener, deque((unit,))))
                    if lane_batch is None and not bodies.acquire_or_defer(chunk.window, again):
                        continue
                    try:
                        bodies.measure(reservation, messages_of(unit))
                        unit = self.split_to_fit(chunk, unit, reservation)
                        if not await self._wait_for_memory(chunk, unit, reservation):
                            break
                    finally:
                        if lane_batch is None:
                            bodies.release_measuring()
                chunk.current = unit
                calls += 1
                given = unit[:] if is_list else unit  # the list is the listener's to empty or sort
                if claim is not None:
                    claim.begin_call(messages_of(unit))
                try:
                    call: Awaitable[object] = (
                        listener.call(given, self.context(chunk, unit))
                        if listener.wants_context
                        else listener.call(given)
                    )
                    result = await call
                    if claim is not None:
                        result = claim.final_result(result)
                except asyncio.CancelledError:
                    if self._abandoned:
                        raise  # the message stays unfinished
                    continues = self.note_raised(chunk, unit, asyncio.CancelledError("the listener was cancelled"))
                except GeneratorExit as error:  # of the listener, or of whoever takes this task apart
                    if self._loop.is_running():
                        self.note_raised(chunk, unit, error)
                        self._requeue_rest(chunk)
                    raise
                except BaseException as error:
                    continues = self.note_raised(chunk, unit, error)
                else:
                    if result is None or result is ConsumeResult.SUCCESS:
                        add(unit)
                        if chunk.is_long:
                            calls = self.finish_part(chunk, calls)
                    else:
                        continues = self.apply_result(chunk, unit, result)
                finally:
                    if reservation is not None:
                        reservation.release()
                if cancelling():  # this task: the next listener shall not pay for it
                    self._requeue_rest(chunk)
                    raise asyncio.CancelledError
        finally:
            bodies.retry_deferred()
            self.finish(chunk, calls)

    def _requeue(self, chunk: Chunk) -> None:
        """Put what had to wait for room behind what has come meanwhile. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:
            pass  # the loop has ended

    async def _wait_for_memory(self, chunk: Chunk, unit: Any, reservation: Reservation) -> bool:
        """Wait until there is room for what the call may unpack. Tells whether it may begin; else its unit is left."""
        until, lane_batch = time.monotonic() + self.consume_timeout_s, chunk.lane_batch
        is_granted = False
        try:
            while not (is_granted := reservation.try_acquire(time.monotonic() >= until)):
                if self._stopping or chunk.window.dropped or not (lane_batch is None or lane_batch.may_continue()):
                    break
                await asyncio.sleep(BUDGET_CHECK_EVERY_S)
        except BaseException:  # cancelled, by whoever ends the loop or by a task of a listener's
            chunk.todo.appendleft(unit)
            reservation.release()
            self._requeue_rest(chunk)
            raise
        if not is_granted:
            chunk.todo.appendleft(unit)
            reservation.release()
        return is_granted

    def _requeue_rest(self, chunk: Chunk) -> None:
        """Leave to another worker what is not begun; the line of an orderly queue sees to that itself."""
        if chunk.lane_batch is None and (rest := pop_all(chunk.todo)):
            self._chunks.put_nowait(Chunk(chunk.window, chunk.listener, deque(rest)))


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class ConcurrentService(ConsumeService):
    """Cuts answers into chunks for the workers, and looks after the slow ones. Confined to the I/O thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers_for: Callable[[bool], Workers]) -> None:
        super().__init__(loop, workers_for)
        self._tick: asyncio.TimerHandle | None = None
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
        if chunk > 1 and self._tick is None:
            self._tick = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def _withdraw_from_stuck(self) -> None:
        """Take from workers stuck in a chunk what need not wait for their call; go on while there is any such chunk."""
        self._tick = None
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
                    workers.settle(chunk)
        self._quiet_checks = 0 if busy else self._quiet_checks + 1
        if self._quiet_checks < 3:  # a worker may be between taking a chunk and showing it
            self._tick = self._loop.call_later(STUCK_AFTER_S, self._withdraw_from_stuck)

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many listener calls are running (of `window`)."""
        return sum(
            1
            for workers in self.workers()
            for slot in workers.slots
            if (chunk := slot.chunk) is not None and (window is None or chunk.window is window)
        )

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended; its chunks end by themselves."""

    def resume_calls(self, window: ProcessQueue) -> None:
        """Nothing waits here: only orderly queues do."""

    def stop(self) -> None:
        """Begin no further listener call."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        for workers in self.workers():
            workers.stop()
            for slot in workers.slots:
                if (chunk := slot.chunk) is not None:
                    pop_all(chunk.todo)
                    workers.settle(chunk)


def pop_all(source: deque[T] | list[T]) -> list[T]:
    """Empty a deque or list from the right, while its worker may take from the left or add; return it in order."""
    taken: list[T] = []
    while True:
        try:
            taken.append(source.pop())
        except IndexError:
            return taken[::-1]
