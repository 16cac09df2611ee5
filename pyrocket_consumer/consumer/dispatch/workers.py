"""Workers: threads and tasks that call listeners.

A unit is one listener call. A worker gets a chunk: units of one queue. It calls the listener with each, and then
acknowledges or reports all messages of the chunk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from pyrocket_consumer.consumer.dispatch.retry import ListenerReports
from pyrocket_consumer.consumer.listener import ConsumeContext, ConsumeResult, FailedMessage, Listener, find_failed
from pyrocket_consumer.consumer.window.decompression_budget import DecompressionBudget, Reservation
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ClientClosed
from pyrocket_consumer.offsets.database.claim import RolledBack, claim_of_call
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.io_thread import SerialExecutor

log = logger("consumer")

T = TypeVar("T")

CHUNK_TIME_S = 0.0005
"""The time that the listener calls of a chunk should take together."""

LARGEST_CHUNK = 32
"""The largest number of listener calls in a chunk."""

STUCK_AFTER_S = 0.005
"""After this time in one chunk a worker counts as stuck, and a waiting chunk gets another worker."""

BUDGET_CHECK_EVERY_S = 0.01
"""How often a waiting call checks whether memory for decompressed bodies is free, and whether it is still wanted."""

CANCELLED_TASKS_WAIT_S = 1.0
"""How long to wait at the end for tasks that async listeners have left running."""

calling: ContextVar[Workers | None] = ContextVar("pyrocket_calling", default=None)
"""The workers that run this listener call. Set once in each worker; tasks and `to_thread` of a listener inherit it."""


class Chunk:
    """Units of one queue for one worker. The worker takes units from the left, and others can withdraw the rest.

    If the worker is stuck, the I/O thread can acknowledge or report the messages that the worker has finished. The
    thread that takes a failed message out of `failed` reports it, so each message is reported once.
    """

    __slots__ = ("window", "listener", "todo", "done", "failed", "begun_at", "current", "is_long", "parts")

    is_ordered = False
    """Whether each call needs `may_continue`. Otherwise only the end of the window stops the chunk."""

    is_measured = True
    """Whether the calls are listener calls, whose time determines the size of chunks."""

    def __init__(self, window: ProcessQueue, listener: Listener, units: deque[list[Message]] | deque[Message]) -> None:
        self.window = window
        self.listener = listener
        self.todo: deque[Any] = units
        self.done: list[Message] = []
        self.failed: list[FailedMessage] = []
        self.begun_at = 0.0
        self.current: Any = None  # the unit of the running listener call
        self.is_long = False  # may take long, so consumed messages are acknowledged meanwhile
        self.parts = 0  # how often messages were acknowledged meanwhile

    # The worker that has the chunk calls these methods. Ordered chunks override them.

    def may_continue(self) -> bool:
        """Return whether the next listener call may begin."""
        return not self.window.dropped

    def apply_result(self, unit: Any, result: object) -> bool:
        """Sort the messages of a call that returned anything other than success. Return whether the result is known."""
        messages = messages_of(unit)
        bad, known = find_failed(result, messages)
        self.failed.extend(bad)
        again = {id(message) for message, _ in bad}
        self.done.extend(message for message in messages if id(message) not in again)
        return known

    def take_consumed(self) -> list[Message]:
        """Return the messages that are consumed now."""
        return self.done

    def end(self) -> None:
        """Handle the end of the chunk. Its worker has finished it, or has dropped it after a stop."""


class Slot:
    """The state of one worker: the chunk that it processes."""

    __slots__ = ("chunk", "seen", "seen_at")

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.seen: Any = None  # the unit at the last check for stuck calls
        self.seen_at = 0.0  # when a check saw this unit first


def messages_of(unit: Any) -> Sequence[Message]:
    """Return the messages of one listener call."""
    return unit if isinstance(unit, list) else (unit,)


def units_of(listener: Listener, messages: list[Message]) -> list[Any]:
    """Cut messages into listener calls: one each, or lists of at most `batch_size`."""
    size = listener.batch_size
    return messages if size == 1 else [messages[start : start + size] for start in range(0, len(messages), size)]


def units_per_chunk(window: ProcessQueue) -> int:
    """Return how many listener calls of a window take `CHUNK_TIME_S` together."""
    return min(max(int(CHUNK_TIME_S / window.listener_time_s), 1), LARGEST_CHUNK)


def pop_all(source: deque[T] | list[T]) -> list[T]:
    """Empty a deque or list from the right; return it in order. A worker may take from the left or add meanwhile."""
    taken: list[T] = []
    while True:
        try:
            taken.append(source.pop())
        except IndexError:
            return taken[::-1]


class Workers(ABC):
    """Threads or tasks that run chunks. `ThreadWorkers` and `AsyncWorkers` differ in how a worker waits."""

    def __init__(self, count: int, reports: ListenerReports, consume_timeout_s: float) -> None:
        self.slots = [Slot() for _ in range(count)]
        self._reports = reports
        self._consume_timeout_s = consume_timeout_s
        self._stopping = False
        # By the id of a listener, and the type of its result. The listener is kept, so that its id stays unique.
        self._reported: dict[tuple[int, type], Listener] = {}

    @abstractmethod
    def put(self, chunk: Chunk) -> None:
        """Hand a chunk to the workers."""

    @abstractmethod
    def waiting(self) -> int:
        """Return approximately how many chunks wait for a worker."""

    @abstractmethod
    def stop(self) -> None:
        """Begin no further chunk. Do not wait for running calls, which continue."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop waiting for running calls. Cancel those that can be cancelled."""

    @abstractmethod
    async def call_once(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Call a listener on a thread or loop of this kind, outside of chunks. Return its result or exception."""

    @abstractmethod
    def _requeue(self, chunk: Chunk) -> None:
        """Put a unit that waited for memory behind the chunks that have arrived meanwhile. Any thread."""

    @abstractmethod
    async def _wait_for_change(self, bodies: DecompressionBudget) -> None:
        """Wait until memory may be free, at most for `BUDGET_CHECK_EVERY_S`."""

    def report_finished(self, chunk: Chunk) -> None:
        """Acknowledge or report the finished messages of a chunk in progress; not for ordered queues. I/O thread."""
        try:
            chunk.window.ack(pop_all(chunk.done))
        except BaseException as error:
            self._reports.worker_failed(error)
        if failed := pop_all(chunk.failed):
            self._reports.failed(chunk.window, failed)

    # --- the work on one chunk

    async def _consume(self, chunk: Chunk, cancelling: Callable[[], int] | None = None) -> None:
        """Call the listener with each unit of a chunk, and acknowledge or report its messages.

        A thread runs this coroutine, too. There it never suspends, because nothing in it awaits. In a task,
        `cancelling` returns whether the task was cancelled.
        """
        chunk.begun_at = chunk.window.clock()
        window, listener, take, done = chunk.window, chunk.listener, chunk.todo.popleft, chunk.done
        call, context, is_async = listener.call, listener.wants_context, listener.is_async
        is_ordered, calls, bodies = chunk.is_ordered, 0, window.budget.bodies
        is_list = listener.batch_size > 1
        add = done.extend if is_list else done.append
        if (claim := window.claim) is not None:
            claim_of_call.set(claim)
        try:
            while chunk.may_continue() if is_ordered else not window.dropped:
                try:
                    unit = take()
                except IndexError:
                    break
                reservation = bodies.reserve(messages_of(unit)) if bodies.any_compressed else None
                if reservation is not None and not reservation.is_granted:
                    again = partial(self._requeue, Chunk(window, listener, deque((unit,))))
                    if not is_ordered and not bodies.acquire_or_defer(window, again):
                        continue
                    unit = await self._wait_for_memory(chunk, unit, reservation)
                    if unit is None:
                        break
                chunk.current = unit
                calls += 1
                given = unit[:] if is_list else unit  # a copy, because the listener may empty or sort the list
                if claim is not None:
                    claim.begin_call(messages_of(unit))
                try:
                    result = call(given, self._context(chunk, unit)) if context else call(given)
                    if is_async:
                        result = await result
                    if claim is not None:
                        result = claim.final_result(result)
                except BaseException as error:  # also SystemExit, which must not end a worker
                    self._listener_raised(chunk, unit, error)
                else:
                    if result is None or result is ConsumeResult.SUCCESS:
                        add(unit)
                        if chunk.is_long:
                            calls = self._finish_part(chunk, calls)
                    elif not chunk.apply_result(unit, result):
                        self._report_unknown(chunk, messages_of(unit)[0], result)
                finally:
                    if reservation is not None:
                        bodies.release(reservation)
                if cancelling is not None and cancelling():  # the next listener call must not get the cancellation
                    raise asyncio.CancelledError
        finally:
            bodies.retry_deferred()
            self._finish(chunk, calls)

    def _context(self, chunk: Chunk, unit: Any) -> ConsumeContext:
        first = messages_of(unit)[0]
        deadline = time.monotonic() + self._consume_timeout_s
        return ConsumeContext(chunk.window.queue, first.reconsume_times + 1, deadline)

    async def _wait_for_memory(self, chunk: Chunk, unit: Any, reservation: Reservation) -> Any:
        """Wait for memory for the bodies of a call. Return the part of `unit` that fits; the rest is the next unit.

        Return None if the call may not begin; then the unit is in the chunk again.
        """
        bodies = chunk.window.budget.bodies
        try:
            bodies.measure(reservation, messages_of(unit))
            if reservation.count < len(messages_of(unit)):
                chunk.todo.appendleft(unit[reservation.count :])
                unit = unit[: reservation.count]
            until = time.monotonic() + self._consume_timeout_s
            while not bodies.try_acquire(reservation, is_late=time.monotonic() >= until):
                if self._stopping or not chunk.may_continue():
                    return None
                await self._wait_for_change(bodies)
            return unit
        finally:
            if not reservation.is_granted:
                chunk.todo.appendleft(unit)
                bodies.release(reservation)
            if not chunk.is_ordered:
                bodies.release_measuring()

    def _report_unknown(self, chunk: Chunk, message: Message, result: object) -> None:
        """Report the first unknown result of each type from a listener. Later ones add no information."""
        if type(result) is RolledBack:
            result = result.result
        key = (id(chunk.listener), type(result))
        if key not in self._reported:
            self._reported[key] = chunk.listener
            self._reports.result_unknown(chunk.window, message, result)

    def _listener_raised(self, chunk: Chunk, unit: Any, error: BaseException) -> None:
        """Handle an exception of a listener."""
        if (claim := chunk.window.claim) is not None:
            claim.end_failed_call()
        chunk.apply_result(unit, ConsumeResult.RETRY)
        # Last, because a user's logging may raise, too.
        self._reports.listener_raised(chunk.window, messages_of(unit)[0], error)

    def _finish_part(self, chunk: Chunk, calls: int) -> int:
        """Acknowledge the consumed messages of a running chunk if it is time. Return the number of uncounted calls."""
        now = chunk.window.clock()
        if now - chunk.begun_at < CHUNK_TIME_S:
            return calls
        chunk.window.last_consumed_at = now
        chunk.window.ack(pop_all(chunk.done), now - chunk.begun_at, calls)
        chunk.begun_at = now
        chunk.parts += 1
        return 0

    def _finish(self, chunk: Chunk, calls: int) -> None:
        """Acknowledge or report all finished messages of a chunk. An error of the offset store delays none of them."""
        chunk.current = None
        chunk.window.last_consumed_at = now = chunk.window.clock()
        try:
            chunk.window.ack(chunk.take_consumed(), now - chunk.begun_at, calls if chunk.is_measured else 0)
        finally:
            if chunk.failed and (failed := pop_all(chunk.failed)):
                self._reports.failed(chunk.window, failed)
            chunk.end()


class ThreadWorkers(Workers):
    """`count` threads for plain listeners. Waking a thread costs more than many quick calls, so only a few are woken.

    The loop decides about wake-ups once per iteration, just before it releases the GIL to wait for the network. It
    wakes as many workers as can process the waiting chunks in the time of one chunk. The worker that fell asleep last
    is woken first, because its stack is warm. The estimate may be wrong, so one more worker is woken whenever a chunk
    has waited for `STUCK_AFTER_S`.
    """

    def __init__(
        self, count: int, reports: ListenerReports, consume_timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the threads. Call `put` on `loop` only."""
        super().__init__(count, reports, consume_timeout_s)
        self._loop = loop
        self._chunks: deque[Chunk] = deque()
        self._lock = threading.Lock()  # for `_asleep`; the innermost lock, held briefly
        self._asleep: list[threading.Lock] = []
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

    def _requeue(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
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

        def run() -> tuple[Any, BaseException | None]:
            calling.set(self)
            try:
                return call(), None
            except BaseException as error:  # it must not end the loop that gets the result
                return None, error

        thread = SerialExecutor("pyrocket-consume-once")
        running = self._loop.run_in_executor(thread, run)
        thread.shutdown()
        return await running

    def _work(self, slot: Slot) -> None:
        calling.set(self)
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
                    chunk.end()  # its messages stay unfinished, and the broker redelivers them
                else:
                    for _ in self._consume(chunk).__await__():
                        raise AssertionError("the work on a chunk must not suspend in a thread")
            except BaseException as error:
                self._reports.worker_failed(error)
            slot.chunk = None

    async def _wait_for_change(self, bodies: DecompressionBudget) -> None:
        bodies.wait_for_change(BUDGET_CHECK_EVERY_S)


class AsyncWorkers(Workers):
    """At most `count` concurrent calls of `async def` listeners, on the caller's `loop` or on a separate thread."""

    def __init__(
        self,
        count: int,
        reports: ListenerReports,
        consume_timeout_s: float,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(count, reports, consume_timeout_s)
        self._owns_loop = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the index of their slot
        self._missing_workers: list[int] = []  # slots whose worker was cancelled from outside
        self._arrived: deque[Chunk] = deque()
        self._abandoned = False
        self._loop_ended = False
        if self._owns_loop:
            threading.Thread(target=self._run_loop, name="pyrocket-listener", daemon=True).start()
        self._call_on_loop(self._begin)  # if the loop has ended, `put` reports it

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
            self._reports.worker_failed(ClientClosed(text))

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
            self._chunks.get_nowait().end()
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
            calling.set(self)
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
        calling.set(self)
        task = asyncio.current_task()
        assert task is not None
        while not self._stopping:
            chunk = await self._chunks.get()
            slot.chunk = chunk
            try:
                await self._consume(chunk, task.cancelling)
            except (asyncio.CancelledError, GeneratorExit):
                self._requeue_rest(chunk)
                raise
            except BaseException as error:
                self._reports.worker_failed(error)
            finally:
                slot.chunk = None

    def _requeue_rest(self, chunk: Chunk) -> None:
        """Give the units that a cancelled worker has not begun to another one. An ordered queue does so itself."""
        if not chunk.is_ordered and self._loop.is_running() and (rest := pop_all(chunk.todo)):
            self._chunks.put_nowait(Chunk(chunk.window, chunk.listener, deque(rest)))

    def _requeue(self, chunk: Chunk) -> None:
        self._call_on_loop(partial(self._chunks.put_nowait, chunk))

    async def _wait_for_change(self, bodies: DecompressionBudget) -> None:
        await asyncio.sleep(BUDGET_CHECK_EVERY_S)

    def _listener_raised(self, chunk: Chunk, unit: Any, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            if self._abandoned:
                raise error  # the message stays unfinished
            error = asyncio.CancelledError("the listener was cancelled")
        elif isinstance(error, GeneratorExit):  # of the listener, or because the interpreter closes this coroutine
            if self._loop.is_running():
                super()._listener_raised(chunk, unit, error)
            raise error
        super()._listener_raised(chunk, unit, error)
