"""Concurrent dispatch: workers that call listeners, and chunks sized by the time that listeners take.

A unit is one listener call. A worker gets a chunk: units of one pull response that together take about half a
millisecond. So quick listeners cost few hand-overs. A chunk of a slow listener is one unit, so its calls run in
parallel. If a worker gets stuck in a chunk, the units that it has not begun go to other workers.
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
"""The time that the listener calls of a chunk should take together."""

LARGEST_CHUNK = 32
"""The largest number of listener calls in a chunk."""

STUCK_AFTER_S = 0.005
"""After this time in one chunk a worker counts as stuck, and a waiting chunk gets another worker."""

BUDGET_CHECK_EVERY_S = 0.01
"""How often a call of an `async def` listener checks whether memory for decompressed bodies is free."""

CANCELLED_TASKS_WAIT_S = 1.0
"""How long to wait at the end for tasks that async listeners have left running."""

_calling: ContextVar[Workers | None] = ContextVar("pyrocket_calling", default=None)
"""The workers that run this listener call. Set once in each worker; tasks and `to_thread` of a listener inherit it."""


class Chunk:
    """Units of one queue for one worker. The worker takes units from the left, and others can withdraw the rest.

    If the worker is stuck, the I/O thread can acknowledge or report the messages that the worker has finished. The
    thread that takes a failed message out of `failed` reports it, so each message is reported once.
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
        self.current: Any = None  # the unit of the running listener call
        self.lane_batch: LaneBatch | None = None  # for ordered queues
        self.is_long = False  # may take long, so consumed messages are acknowledged meanwhile
        self.parts = 0  # how often messages were acknowledged meanwhile


class LaneBatch(Protocol):
    """The part of a chunk that keeps the order within its lanes. The worker that has the chunk calls it."""

    @property
    def is_measured(self) -> bool:
        """Whether its calls are listener calls, whose time determines the size of chunks."""

    def may_continue(self) -> bool:
        """Return whether the next listener call may begin."""

    def apply_result(self, unit: Any, result: object) -> tuple[bool, bool]:
        """Apply the result of a call that returned anything other than success.

        Return whether the batch continues, and whether the result is a known one.
        """

    def take_consumed(self) -> list[Message]:
        """Return the messages that are consumed now."""

    def end(self) -> None:
        """End the batch, because the worker has finished its chunk."""


class ListenerReporter(Protocol):
    """Receives the results of listener calls other than acknowledgements, on the worker's thread."""

    def failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        """Have failed messages consumed again."""

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report an exception of a listener."""

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        """Report the first unknown result of this type from a listener."""

    def worker_failed(self, error: BaseException) -> None:
        """Report an unexpected error outside of the listener: in the offset store, or in the worker itself."""


class Slot:
    """The state of one worker: the chunk that it processes."""

    __slots__ = ("chunk", "seen", "seen_at")

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.seen: Any = None  # the unit at the last check for stuck calls
        self.seen_at = 0.0  # when a check saw this unit first


class Workers(Protocol):
    """Threads or tasks that run chunks."""

    slots: list[Slot]

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk to the workers."""

    def waiting(self) -> int:
        """Return approximately how many chunks wait for a worker."""

    def report_finished(self, chunk: Chunk) -> None:
        """Acknowledge or report the finished messages of a chunk in progress; not for ordered queues."""

    def stop(self) -> None:
        """Begin no further chunk. Do not wait for running calls, which continue."""

    def abandon(self) -> None:
        """Stop waiting for running calls. Cancel those that can be cancelled."""

    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Call a listener on a thread or loop of this kind, outside of chunks. Return its result or exception."""


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
        return (calling := _calling.get()) is not None and calling in self.workers()

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


def messages_of(unit: Any) -> Sequence[Message]:
    """Return the messages of one listener call."""
    return unit if isinstance(unit, list) else (unit,)


def units_of(listener: Listener, messages: list[Message]) -> list[Any]:
    """Cut messages into listener calls: one each, or lists of at most `batch_size`."""
    size = listener.batch_size
    return messages if size == 1 else [messages[start : start + size] for start in range(0, len(messages), size)]


class _ChunkRunner:
    """The parts that sync and async workers share: the handling of the result of one listener call."""

    def __init__(self, reporter: ListenerReporter, consume_timeout_s: float) -> None:
        self.reporter = reporter
        self.consume_timeout_s = consume_timeout_s
        # By the id of a listener, and the type of its result. The listener is kept, so that its id stays unique.
        self._reported: dict[tuple[int, type], Listener] = {}

    def context(self, chunk: Chunk, unit: Any) -> ConsumeContext:
        first = messages_of(unit)[0]
        deadline = time.monotonic() + self.consume_timeout_s
        return ConsumeContext(chunk.window.queue, first.reconsume_times + 1, deadline)

    def split_to_fit(self, chunk: Chunk, unit: Any, reservation: Reservation) -> Any:
        """Return the part of `unit` that the reservation covers. The rest becomes the chunk's next unit."""
        if reservation.count < len(messages_of(unit)):
            chunk.todo.appendleft(unit[reservation.count :])
            return unit[: reservation.count]
        return unit

    def apply_result(self, chunk: Chunk, unit: Any, result: object) -> bool:
        """Sort the messages of a call that returned anything other than success. Return whether the chunk continues."""
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
        """Report the first unknown result of each type from a listener. Later ones add no information."""
        if type(result) is RolledBack:
            result = result.result
        key = (id(chunk.listener), type(result))
        if key not in self._reported:
            self._reported[key] = chunk.listener
            self.reporter.result_unknown(chunk.window, message, result)

    def note_raised(self, chunk: Chunk, unit: Any, error: BaseException) -> bool:
        """Handle an exception of a listener. Return whether the chunk continues."""
        messages = messages_of(unit)
        continues = True
        if (claim := chunk.window.claim) is not None:
            claim.end_failed_call()
        if chunk.lane_batch is not None:
            continues, _ = chunk.lane_batch.apply_result(unit, ConsumeResult.RETRY)
        else:
            chunk.failed.extend((message, 0) for message in messages)
        self.reporter.listener_raised(chunk.window, messages[0], error)  # last, because a user's logging may raise, too
        return continues

    def report_finished(self, chunk: Chunk) -> None:
        """Acknowledge or report the finished messages of a chunk that a worker still processes. I/O thread."""
        try:
            chunk.window.ack(pop_all(chunk.done))
        except BaseException as error:
            self.reporter.worker_failed(error)
        if failed := pop_all(chunk.failed):
            self.reporter.failed(chunk.window, failed)

    def finish_part(self, chunk: Chunk, calls: int) -> int:
        """Acknowledge the consumed messages of a running chunk if it is time. Return the number of uncounted calls."""
        now = chunk.window.clock()
        if now - chunk.begun_at < CHUNK_TIME_S:
            return calls
        chunk.window.last_consumed_at = now
        chunk.window.ack(pop_all(chunk.done), now - chunk.begun_at, calls)
        chunk.begun_at = now
        chunk.parts += 1
        return 0

    def finish(self, chunk: Chunk, calls: int) -> None:
        """Acknowledge or report all finished messages of a chunk. An error of the offset store delays none of them."""
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
        """Drop a chunk after work has stopped. Its messages stay unfinished, and the broker redelivers them."""
        if chunk.lane_batch is not None:
            chunk.lane_batch.end()


class ThreadWorkers(_ChunkRunner):
    """`count` threads for plain listeners. Waking a thread costs more than many quick calls, so only a few are woken.

    The loop decides about wake-ups once per iteration, just before it releases the GIL to wait for the network. It
    wakes as many workers as can process the waiting chunks in the time of one chunk. The worker that fell asleep last
    is woken first, because its stack is warm. The estimate may be wrong, so one more worker is woken whenever a chunk
    has waited for `STUCK_AFTER_S`.
    """

    def __init__(
        self, count: int, reporter: ListenerReporter, consume_timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the threads. Call `put` on `loop` only."""
        super().__init__(reporter, consume_timeout_s)
        self.slots = [Slot() for _ in range(count)]
        self._loop = loop
        self._chunks: deque[Chunk] = deque()
        self._lock = threading.Lock()  # for `_asleep`; the innermost lock, held briefly
        self._asleep: list[threading.Lock] = []
        self._stopping = False
        self._wake_due = False  # this and the following are confined to the loop
        self._slowest_s = 0.0  # the longest listener time of the chunks since the last wake-up
        self._put_since = 0  # chunks since the last check
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
        """Put a unit that waited for memory behind the chunks that have arrived meanwhile. Any thread."""
        self._chunks.append(Chunk(window, listener, deque((unit,))))
        self._wake(len(self.slots) - len(self._asleep) + 1)

    def _wake_enough(self) -> None:
        waiting, slowest_s, self._slowest_s, self._wake_due = len(self._chunks), self._slowest_s, 0.0, False
        if waiting and self._wake(1 + int(2 * waiting * slowest_s / CHUNK_TIME_S)) and self._next_check is None:
            self._next_check = self._loop.call_later(STUCK_AFTER_S, self._check_waiting)

    def _check_waiting(self) -> None:
        waiting, self._next_check = len(self._chunks), None
        if waiting > self._put_since:  # the first chunk was waiting at the last check, too
            self._wake(len(self.slots) - len(self._asleep) + 1)
        self._put_since = 0
        if waiting:
            self._next_check = self._loop.call_later(STUCK_AFTER_S, self._check_waiting)

    def _wake(self, wanted: int) -> bool:
        """Wake workers until `wanted` of them are awake. Return whether any worker still sleeps."""
        # A worker that finds no chunk checks once more under this lock before it sleeps. So it either sees the chunks
        # put before this call, or is in `_asleep` here. Without the lock, a chunk could wait while all workers sleep.
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
        """Do nothing, because a thread cannot be cancelled. The result of its call is ignored, and the thread ends."""

    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Call on a separate daemon thread."""
        outcome = self._loop.create_future()

        def run() -> None:
            _calling.set(self)
            result, raised = None, None
            try:
                result = call()
            except BaseException as error:  # it must end neither this thread nor the loop that gets the result
                raised = error
            try:
                self._loop.call_soon_threadsafe(resolve, result, raised)
            except RuntimeError:
                pass  # the loop has ended

        def resolve(result: Any, raised: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((result, raised))

        threading.Thread(target=run, name="pyrocket-consume-once", daemon=True).start()
        found: tuple[Any, BaseException | None] = await outcome
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
                bell.acquire()  # `_wake` releases it
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
                reservation = bodies.reserve(messages_of(unit)) if bodies.any_compressed else None
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
                given = unit[:] if is_list else unit  # a copy, because the listener may empty or sort the list
                if claim is not None:
                    claim.begin_call(messages_of(unit))
                try:
                    result = call(given, self.context(chunk, unit)) if context else call(given)
                    if claim is not None:
                        result = claim.final_result(result)
                except BaseException as error:  # also SystemExit, which must not end a worker
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
    """At most `count` concurrent calls of `async def` listeners, on the caller's `loop` or on a separate thread."""

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
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the index of their slot
        self._missing_workers: list[int] = []  # slots whose worker was cancelled from outside
        self._arrived: deque[Chunk] = deque()
        self._stopping = False
        self._abandoned = False
        self._loop_ended = False
        if self._owns_loop:
            threading.Thread(target=self._run_loop, name="pyrocket-listener", daemon=True).start()
        self._loop.call_soon_threadsafe(self._begin)

    def _run_loop(self) -> None:
        """Run the loop until its workers have ended. Exceptions of listeners' tasks do not end it."""
        asyncio.set_event_loop(self._loop)
        while not self._loop_ended:
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit and KeyboardInterrupt of a task stop `run_forever`, too
                log.error("a task that a listener began raised %r", error, exc_info=error)
        if left := asyncio.all_tasks(self._loop):  # tasks of listeners; as in asyncio.run, but with a timeout
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
        """Note that a worker was cancelled, by a listener in its task or because the loop ends.

        A new worker starts only when there is work, because the code that ends a loop waits until no task is left.
        """
        if not task.cancelled():
            task.exception()  # only a listener's GeneratorExit is possible, and it was reported
        if self._tasks.get(number) is task:
            del self._tasks[number]  # its exception keeps the listener's frames and open objects alive
        if not self._stopping:
            self._missing_workers.append(number)
            if not self._chunks.empty():
                self._start_missing_workers()

    def _start_missing_workers(self) -> None:
        while self._missing_workers and not self._stopping:
            self._start_worker(self._missing_workers.pop())

    def put(self, chunk: Chunk) -> None:
        self._arrived.append(chunk)
        is_due = len(self._arrived) == 1 or self._loop.is_closed()  # one wake-up serves all chunks put before it
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

    async def wait_ended(self) -> None:
        """Wait a limited time until cancelled calls have cleaned up, for example rolled back. Call it on their loop."""
        if tasks := list(self._tasks.values()):
            await asyncio.wait(tasks, timeout=CANCELLED_TASKS_WAIT_S)

    def _call_on_loop(self, work: Callable[[], None]) -> bool:
        """Run `work` on the loop. Return False if the loop has ended."""
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
        self._loop_ended = True
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
            except BaseException as error:  # it must not end the loop's task
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
                reservation = bodies.reserve(messages_of(unit)) if bodies.any_compressed else None
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
                given = unit[:] if is_list else unit  # a copy, because the listener may empty or sort the list
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
                except GeneratorExit as error:  # from the listener, or because the interpreter closes this coroutine
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
                if cancelling():  # this task was cancelled, and the next listener call must not get that
                    self._requeue_rest(chunk)
                    raise asyncio.CancelledError
        finally:
            bodies.retry_deferred()
            self.finish(chunk, calls)

    def _requeue(self, chunk: Chunk) -> None:
        """Put a unit that waited for memory behind the chunks that have arrived meanwhile. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:
            pass  # the loop has ended

    async def _wait_for_memory(self, chunk: Chunk, unit: Any, reservation: Reservation) -> bool:
        """Wait for memory for the bodies of a call. Return whether it may begin; if not, the unit goes back."""
        until, lane_batch = time.monotonic() + self.consume_timeout_s, chunk.lane_batch
        is_granted = False
        try:
            while not (is_granted := reservation.try_acquire(time.monotonic() >= until)):
                if self._stopping or chunk.window.dropped or not (lane_batch is None or lane_batch.may_continue()):
                    break
                await asyncio.sleep(BUDGET_CHECK_EVERY_S)
        except BaseException:  # cancelled, because the loop ends, or by a task of a listener
            chunk.todo.appendleft(unit)
            reservation.release()
            self._requeue_rest(chunk)
            raise
        if not is_granted:
            chunk.todo.appendleft(unit)
            reservation.release()
        return is_granted

    def _requeue_rest(self, chunk: Chunk) -> None:
        """Give the units that were not begun to another worker. The lane of an ordered queue does so itself."""
        if chunk.lane_batch is None and (rest := pop_all(chunk.todo)):
            self._chunks.put_nowait(Chunk(chunk.window, chunk.listener, deque(rest)))


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


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


def pop_all(source: deque[T] | list[T]) -> list[T]:
    """Empty a deque or list from the right; return it in order. A worker may take from the left or add meanwhile."""
    taken: list[T] = []
    while True:
        try:
            taken.append(source.pop())
        except IndexError:
            return taken[::-1]
