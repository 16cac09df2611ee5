"""Workers and their chunks: any action of a listener leaves its messages consumed or failed, and work continues."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.consumer.dispatch.concurrent import ConcurrentService
from pyrocket_consumer.consumer.dispatch.workers import (
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    AsyncWorkers,
    Chunk,
    Slot,
    ThreadWorkers,
    Workers,
)
from pyrocket_consumer.consumer.listener import ConsumeResult, FailedMessage, Listener, Retry
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.io_thread import IoThread
from tests import consuming
from tests.consumer.orders import listener_of
from tests.consumer.windows import window_of
from tests.consuming import WAIT_S

until = partial(consuming.until, what="reached")


class Reports:
    """Records the reports of workers."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, int]] = []  # offset, delay level
        self.raised: list[BaseException] = []
        self.unknown: list[object] = []
        self.worker_failures: list[BaseException] = []

    def failed(self, window, failed):
        self.failures += [(message.queue_offset, delay_level) for message, delay_level in failed]

    def listener_raised(self, window, message, error):
        self.raised.append(error)

    def result_unknown(self, window, message, result):
        self.unknown.append(result)

    def worker_failed(self, error):
        self.worker_failures.append(error)


class Working:
    """Workers of one kind, with their reports and methods to give them work."""

    def __init__(self, workers: Workers, reports: Reports, io: IoThread) -> None:
        self.workers, self.reports, self.loop, self._io = workers, reports, io.loop, io

    def consume(self, function: Any, count: int, *, batch_size: int = 1, on_edge=lambda queue, offset: None):
        """Put `count` messages as one chunk, and return their window."""
        window, messages = window_of(count, on_edge=on_edge)
        units: list[Any] = messages
        if batch_size > 1:
            units = [messages[start : start + batch_size] for start in range(0, count, batch_size)]
        self.put_chunk(Chunk(window, Listener.of(function, batch_size), deque(units)))
        return window

    def put_chunk(self, chunk: Chunk) -> None:
        async def put() -> None:
            self.workers.put(chunk)

        self._io.run(put(), WAIT_S)

    def works(self) -> None:
        """Wait until some more messages are consumed."""
        after = [self.consume(self.as_kind(lambda message: None), 2) for _ in range(4)]
        until(lambda: all(window.finished == 2 for window in after))

    def as_kind(self, function: Callable[[Any], Any]) -> Any:
        """Return the listener as a plain or as an async function."""
        return listener_of("plain" if isinstance(self.workers, ThreadWorkers) else "async", function)

    @property
    def idle(self) -> bool:
        return self.workers.waiting() == 0 and all(slot.chunk is None for slot in self.workers.slots)


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread("test-io")
    thread.start()
    yield thread
    thread.stop()


@contextmanager
def working(workers: Workers, reports: Reports, io: IoThread) -> Iterator[Working]:
    yield Working(workers, reports, io)
    workers.stop()
    workers.abandon()
    until(lambda: not living("pyrocket-consume", "pyrocket-listener"))


@pytest.fixture
def threads(io: IoThread) -> Iterator[Working]:
    with working(ThreadWorkers(2, reports := Reports(), 900, io.loop), reports, io) as made:
        yield made


@pytest.fixture
def coroutines(io: IoThread) -> Iterator[Working]:
    with working(AsyncWorkers(2, reports := Reports(), 900), reports, io) as made:
        yield made


def living(*names: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def service_of(loop: asyncio.AbstractEventLoop, workers: Any) -> ConcurrentService:
    """Return a service that has these workers only."""
    return ConcurrentService(SimpleNamespace(loop=loop), lambda is_async, reports: workers, Reports())


@pytest.fixture(params=["threads", "coroutines"])
def either(request) -> Working:
    return request.getfixturevalue(request.param)


# --- what listeners do


def test_unknown_results_are_reported_once_per_listener_and_type(either):
    results = [True, 1, False, 2, "x"]
    for _ in range(2):
        either.consume(either.as_kind(lambda message: results[message.queue_offset]), 5)
        until(lambda: either.idle)
    assert either.reports.unknown == [True, 1, "x", True, 1, "x"]


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("result", "again"),
    [
        (None, []),
        (ConsumeResult.SUCCESS, []),
        (ConsumeResult.RETRY, [(offset, 0) for offset in ALL]),
        (Retry(delay_level=5), [(offset, 5) for offset in ALL]),
        (ValueError(), [(offset, 0) for offset in ALL]),
    ],
)
def test_known_results_of_a_batch(either, result, again):
    def handle(messages):
        if isinstance(result, Exception):
            raise result
        return result

    window = either.consume(either.as_kind(handle), 4, batch_size=2)
    until(lambda: either.idle)
    assert either.reports.failures == again
    assert window.finished == 4 - len(again)
    assert either.reports.unknown == []
    assert either.reports.raised == ([result] * 2 if isinstance(result, Exception) else [])


@pytest.mark.parametrize("named", [lambda message: message, lambda message: message.detach()], ids=["it", "a copy"])
def test_one_bad_message_of_a_batch_is_redelivered_alone(either, named):
    """A listener may return detached copies in `Retry`. Their messages must not count as consumed."""
    window = either.consume(either.as_kind(lambda messages: Retry([named(messages[1])])), 6, batch_size=3)
    until(lambda: either.idle)
    assert either.reports.failures == [(1, 0), (4, 0)]
    assert (window.commit_offset(), window.finished) == (1, 4)


def test_an_ended_loop_is_not_kept_waiting_by_its_workers(io):
    """`asyncio.run` cancels every task at the end, and waits until it has ended."""
    reports, began = Reports(), threading.Event()
    window, messages = window_of(1)

    async def main():
        async def listen(message):
            began.set()
            await asyncio.sleep(3600)

        workers = AsyncWorkers(2, reports, 900, asyncio.get_running_loop())
        workers.put(Chunk(window, Listener.of(listen), deque(messages)))
        await asyncio.to_thread(began.wait, WAIT_S)
        return workers

    workers = asyncio.run(main())
    assert reports.failures == [(0, 0)]
    workers.put(Chunk(window, Listener.of(print), deque()))
    workers.stop()


def test_workers_recognize_their_calls_and_tasks_started_there(either):
    service, known = service_of(either.loop, either.workers), []

    def handle(message):
        known.append(service.is_own_call())
        known.append(asyncio.run(asyncio.to_thread(service.is_own_call)))

    async def listen(message):
        known.append(service.is_own_call())
        known.append(await asyncio.create_task(asyncio.to_thread(service.is_own_call)))

    listener = Listener.of(handle if isinstance(either.workers, ThreadWorkers) else listen)
    window, messages = window_of(1)
    either.loop.call_soon_threadsafe(service.dispatch, window, listener, messages)
    until(lambda: window.finished == 1)
    assert known == [True, True]
    assert not service.is_own_call()


def test_a_logging_that_raises_costs_no_message(either):
    """Code that reports a listener's error may be the user's, too, for example a log handler."""

    def raises(*what):
        raise OSError("the log is full")

    def handle(message):
        if message.queue_offset == 1:
            raise ValueError

    either.reports.listener_raised = raises
    window = either.consume(either.as_kind(handle), 4)
    until(lambda: either.reports.worker_failures)
    assert either.reports.failures == [(1, 0)]
    assert window.commit_offset() == 1
    either.works()


def test_tasks_of_async_listeners_end_with_their_loop(coroutines):
    ended = []

    async def continues():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def handle(message):
        asyncio.get_running_loop().create_task(continues())
        await asyncio.sleep(0)

    window = coroutines.consume(handle, 3)
    until(lambda: window.finished == 3)
    coroutines.workers.stop()
    until(lambda: not living("pyrocket-listener"))
    assert ended == [True, True, True]


def test_a_store_that_raises_inside_an_ack_ends_no_worker(either):
    """The window calls the offset store under its lock, and the store may be written by the user."""

    def on_edge(queue, offset):
        raise OSError("no space left")

    either.consume(either.as_kind(lambda message: None), 1, on_edge=on_edge)
    until(lambda: either.reports.worker_failures)
    assert isinstance(either.reports.worker_failures[0], OSError)
    either.works()


def test_running_calls_of_a_dropped_queue_count_and_none_begins(either):
    listener, begun, release = blocking(either)
    window = either.consume(listener, 5)
    assert begun.acquire(timeout=WAIT_S)
    window.drop()
    release.set()
    until(lambda: either.idle)
    assert (window.finished, window.commit_offset()) == (1, 1)
    assert not begun.acquire(blocking=False)


# --- the end


def blocking(working: Working) -> tuple[Any, threading.Semaphore, threading.Event]:
    """Return a listener whose calls wait, a counter of its calls, and an event that releases them."""
    begun, release = threading.Semaphore(0), threading.Event()

    def handle(message):
        begun.release()
        release.wait(WAIT_S)

    async def listen(message):
        begun.release()
        while not release.is_set():
            await asyncio.sleep(0.001)

    return handle if isinstance(working.workers, ThreadWorkers) else listen, begun, release


def test_stopped_workers_finish_running_calls_and_begin_none(either):
    listener, begun, release = blocking(either)
    running, waiting = [either.consume(listener, 1) for _ in range(2)], either.consume(listener, 3)
    for _ in running:
        assert begun.acquire(timeout=WAIT_S)
    either.workers.stop()
    release.set()
    until(lambda: not living("pyrocket-consume", "pyrocket-listener"))
    assert [window.finished for window in (*running, waiting)] == [1, 1, 0]
    assert not begun.acquire(blocking=False), "nothing else has begun"


class Emptied(deque):
    """Units that are withdrawn after a worker has checked for them and before it takes one."""

    def popleft(self):
        raise IndexError("pop from an empty deque")


def test_a_worker_survives_the_withdrawal_of_its_units(either):
    window, messages = window_of(1)
    for _ in range(4):
        either.put_chunk(Chunk(window, Listener.of(either.as_kind(lambda message: None)), Emptied(messages)))
    either.works()


class EndingChunk(Chunk):
    """A chunk that notes its end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended = threading.Event()

    def end(self):
        self.ended.set()


def test_a_chunk_that_no_worker_has_begun_ends_at_a_stop(either):
    """Otherwise its queue would count as running, and a close would wait for it until its timeout."""
    function, begun, release = blocking(either)
    window, messages = window_of(5)
    chunks = [EndingChunk(window, Listener.of(function), deque([message])) for message in messages]
    for chunk in chunks:
        either.put_chunk(chunk)
    for _ in range(2):
        assert begun.acquire(timeout=WAIT_S)
    either.workers.stop()
    release.set()
    assert all(chunk.ended.wait(WAIT_S) for chunk in chunks)


# --- chunks and their withdrawal


class FakeWorkers:
    """Fake workers, which the test controls."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.chunks: deque[Chunk] = deque()
        self.failed: list[FailedMessage] = []
        self.checks = 0
        self.put = self.chunks.append
        self.stop = self.abandon = lambda: None

    def report_finished(self, chunk):
        chunk.window.ack(chunk.done[:])
        self.failed += chunk.failed
        chunk.done.clear()
        chunk.failed.clear()

    def waiting(self):
        self.checks += 1
        return len(self.chunks)

    def begin(self, worker: int, now: float) -> Chunk:
        """Let a worker take the next chunk and begin its first unit."""
        chunk = self.slots[worker].chunk = self.chunks.popleft()
        chunk.begun_at, chunk.current = now, chunk.todo.popleft()
        return chunk


def serving() -> tuple[ConcurrentService, FakeWorkers]:
    fake_workers = FakeWorkers(3)
    return service_of(asyncio.get_running_loop(), fake_workers), fake_workers


def handle(message):
    pass


def dispatched(count: int, time_s: float = 1e-6) -> tuple[ConcurrentService, FakeWorkers, ProcessQueue, list[Message]]:
    """Dispatch `count` messages to a listener that takes this long; as one chunk if it is quick."""
    (service, fake_workers), (window, messages) = serving(), window_of(count)
    window.listener_time_s = time_s
    service.dispatch(window, Listener.of(handle), messages)
    return service, fake_workers, window, messages


@pytest.mark.parametrize(
    ("listener_time_s", "sizes"),
    [(1e-6, [32, 32, 32, 4]), (1e-4, [5] * 20), (2e-4, [2] * 50), (1e-3, [1] * 100), (10, [1] * 100)],
)
async def test_chunks_are_sized_by_the_time_the_listener_takes(listener_time_s, sizes):
    service, fake_workers, _, messages = dispatched(100, listener_time_s)
    assert [len(chunk.todo) for chunk in fake_workers.chunks] == sizes
    assert max(sizes) <= LARGEST_CHUNK
    assert [message for chunk in fake_workers.chunks for message in chunk.todo] == messages
    service.stop()


async def test_unstarted_units_of_a_stuck_worker_go_to_others():
    service, fake_workers, window, messages = dispatched(32)
    chunk = fake_workers.begin(0, asyncio.get_running_loop().time() + 0.001)
    chunk.done.append(chunk.current)
    chunk.current = chunk.todo.popleft()
    chunk.failed.append((messages[31], 7))
    await asyncio.sleep(STUCK_AFTER_S / 2)
    assert (window.finished, len(fake_workers.chunks)) == (0, 0)
    await asyncio.sleep(2 * STUCK_AFTER_S)
    assert [list(each.todo) for each in fake_workers.chunks] == [[message] for message in messages[2:]]
    assert (window.commit_offset(), window.finished) == (1, 1)
    assert fake_workers.failed == [(messages[31], 7)]
    assert not chunk.todo
    service.stop()


async def test_finished_messages_do_not_wait_for_the_end_of_their_chunk():
    """Then no unit remains that others could take."""
    service, fake_workers, window, messages = dispatched(2)
    chunk = fake_workers.begin(0, asyncio.get_running_loop().time() + 0.001)
    chunk.failed.append((chunk.current, 0))
    chunk.current = chunk.todo.popleft()
    await asyncio.sleep(10 * STUCK_AFTER_S)
    assert fake_workers.failed == [(messages[0], 0)]
    service.stop()


async def test_a_stop_hands_over_what_stuck_workers_have_finished():
    service, fake_workers, window, messages = dispatched(3)
    chunk = fake_workers.begin(0, asyncio.get_running_loop().time())
    chunk.done.append(chunk.current)
    chunk.current = chunk.todo.popleft()
    service.stop()
    assert (window.commit_offset(), window.finished) == (1, 1)
    assert not chunk.todo


async def test_the_check_for_stuck_workers_stops_when_nothing_waits():
    """A listener that never returns must not wake the I/O thread forever."""
    service, fake_workers, window, messages = dispatched(4)
    fake_workers.begin(0, asyncio.get_running_loop().time() + 0.001)
    await asyncio.sleep(0.1)
    for worker in (0, 1, 2):
        fake_workers.begin(worker, asyncio.get_running_loop().time())
    await asyncio.sleep(1)
    checks = fake_workers.checks
    await asyncio.sleep(10)
    assert fake_workers.checks == checks
    later, messages = window_of(8)
    later.listener_time_s = 1e-6
    service.dispatch(later, Listener.of(handle), messages)
    fake_workers.begin(1, asyncio.get_running_loop().time() + 0.001)
    await asyncio.sleep(0.1)
    assert len(fake_workers.chunks) == 7, "the check runs again for new work"
    service.stop()


async def test_a_call_is_stuck_when_it_was_seen_running_all_the_time():
    service, fake_workers = serving()
    window, messages = window_of(2)
    service.dispatch(window, Listener.of(handle), messages[:1])
    fake_workers.begin(0, 0.0)
    assert service.stuck(5, 100) == []
    assert service.stuck(5, 104.9) == []
    assert service.stuck(5, 105) == [(window, (messages[0],))]
    assert service.running() == service.running(window) == 1
    fake_workers.slots[0].chunk = None
    service.dispatch(window, Listener.of(handle), messages[1:])
    fake_workers.begin(0, 106)
    assert service.stuck(5, 106) == []
    service.stop()
