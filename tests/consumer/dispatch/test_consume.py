"""Workers and their chunks: whatever a listener does, its messages end up consumed or failed, and work goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyrocket_consumer.consumer.consume import (
    LARGEST_CHUNK,
    STUCK_AFTER_S,
    AsyncWorkers,
    Chunk,
    ConsumeService,
    Slot,
    ThreadWorkers,
    Workers,
)
from pyrocket_consumer.consumer.listener import ConsumeContext, ConsumeResult, Failed, Listener, Retry
from pyrocket_consumer.consumer.process_queue import ProcessQueue
from pyrocket_consumer.net.io_thread import IoThread
from pyrocket_consumer.wire.message import Message
from tests.consumer.windows import QUEUE, window_of

PATIENCE_S = 30.0


class Told:
    """What workers reported."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.failures: list[tuple[int, int]] = []  # offset, delay level
        self.raised: list[BaseException] = []
        self.unknown: list[object] = []
        self.worker_failures: list[BaseException] = []

    def failed(self, window, failed):
        with self._changed:
            self.failures += [(message.queue_offset, delay_level) for message, delay_level in failed]
            self._changed.notify_all()

    def listener_raised(self, window, message, error):
        self.raised.append(error)

    def result_unknown(self, window, message, result):
        self.unknown.append(result)

    def worker_failed(self, error):
        with self._changed:
            self.worker_failures.append(error)
            self._changed.notify_all()

    def wait(self, reached: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE_S)


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Working:
    """Workers, what they told, and a way to hand them work."""

    def __init__(self, workers: Workers, told: Told, io: IoThread) -> None:
        self.workers = workers
        self.told = told
        self._io = io

    def consume(self, function: Any, count: int, *, batch_size: int = 1, tell=lambda queue, offset: None):
        """Hand over `count` messages as one chunk; returns their window."""
        window, messages = window_of(count, tell=tell)
        self.put(window, function, messages, batch_size)
        return window

    def put(self, window: ProcessQueue, function: Any, messages: list[Message], batch_size: int = 1) -> Chunk:
        units: list[Any] = messages
        if batch_size > 1:
            units = [messages[start : start + batch_size] for start in range(0, len(messages), batch_size)]
        chunk = Chunk(window, Listener.of(function, batch_size), deque(units))
        self.hand_over(chunk)
        return chunk

    def hand_over(self, chunk: Chunk) -> None:
        async def put() -> None:
            self.workers.put(chunk)

        self._io.run(put(), PATIENCE_S)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._io.loop

    def run(self, work: Any) -> Any:
        return self._io.run(work, PATIENCE_S)

    @property
    def idle(self) -> bool:
        return self.workers.waiting() == 0 and all(slot.chunk is None for slot in self.workers.slots)


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread("test-io")
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def threads(io: IoThread) -> Iterator[Working]:
    told = Told()
    workers = ThreadWorkers(2, told, 900, io.loop)
    yield Working(workers, told, io)
    workers.stop()
    workers.abandon()
    until(lambda: not living("pyrocket-consume"))


@pytest.fixture
def coroutines(io: IoThread) -> Iterator[Working]:
    told = Told()
    workers = AsyncWorkers(2, told, 900)
    yield Working(workers, told, io)
    workers.stop()
    workers.abandon()
    until(lambda: not living("pyrocket-listener"))


def living(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture(params=["threads", "coroutines"])
def either(request) -> Working:
    return request.getfixturevalue(request.param)


def as_kind(function: Callable[[Any], Any], working: Working) -> Any:
    """The listener as a plain or as an async function."""
    if isinstance(working.workers, ThreadWorkers):
        return function

    async def listen(unit):
        return function(unit)

    return listen


# --- what listeners do


class Unspeakable(Exception):
    def __repr__(self):
        raise ZeroDivisionError

    __str__ = __repr__


class Nonsense:
    def __repr__(self):
        raise ZeroDivisionError

    def __eq__(self, other):
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError(), StopIteration(),
     StopAsyncIteration(), MemoryError(), Unspeakable()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_listener_raises_only_its_message_failed(either, error):
    def handle(message):
        if message.queue_offset == 1:
            raise error

    window = either.consume(as_kind(handle, either), 3)
    either.told.wait(lambda: either.told.failures)
    assert either.told.failures == [(1, 0)]
    assert len(either.told.raised) == 1
    until(lambda: window.finished == 2)  # of a worker whose task is taken apart another does the rest
    assert window.commit_offset() == 1
    after = either.consume(as_kind(lambda message: None, either), 5)
    until(lambda: after.finished == 5)
    assert either.told.worker_failures == []


@pytest.mark.parametrize("result", [True, False, 0, 1, "ok", b"", [], {}, object(), Nonsense(), ConsumeResult, Retry],
                         ids=lambda result: type(result).__name__)
def test_a_result_that_means_nothing_is_told_and_counts_as_retry(either, result):
    window = either.consume(as_kind(lambda message: result, either), 2)
    either.told.wait(lambda: len(either.told.failures) == 2)
    assert either.told.failures == [(0, 0), (1, 0)]
    assert [each is result for each in either.told.unknown] == [True], "the second says nothing new"
    assert window.finished == 0


def test_wrong_results_are_told_once_a_listener_and_type(either):
    results = [True, 1, False, 2, "x"]

    def listener():
        return as_kind(lambda message: results[message.queue_offset], either)

    for _ in range(2):
        window = either.consume(listener(), 5)
        until(lambda window=window: either.idle)
    assert either.told.unknown == [True, 1, "x", True, 1, "x"]


def test_a_coroutine_that_is_returned_means_nothing(threads):
    async def handle(message):
        pass

    made = []
    window = threads.consume(lambda message: made.append(handle(message)) or made[-1], 1)
    threads.told.wait(lambda: threads.told.failures)
    made[0].close()
    assert window.finished == 0


@pytest.mark.parametrize(
    ("result", "again"),
    [(None, []), (ConsumeResult.SUCCESS, []), (ConsumeResult.RETRY, [(0, 0), (1, 0), (2, 0), (3, 0)]),
     (Retry(delay_level=5), [(0, 5), (1, 5), (2, 5), (3, 5)])],
)
def test_known_results_of_a_batch(either, result, again):
    window = either.consume(as_kind(lambda messages: result, either), 4, batch_size=4)
    until(lambda: either.idle)
    assert either.told.failures == again
    assert window.finished == 4 - len(again)
    assert either.told.unknown == []


@pytest.mark.parametrize("named", [lambda message: message, lambda message: message.detach()], ids=["it", "a copy"])
def test_one_bad_message_of_a_batch_comes_again_alone(either, named):
    """A listener may keep detached copies; one it asks for again must not count as consumed."""
    window = either.consume(as_kind(lambda messages: Retry([named(messages[1])]), either), 6, batch_size=3)
    until(lambda: either.idle)
    assert either.told.failures == [(1, 0), (4, 0)]
    assert (window.commit_offset(), window.finished) == (1, 4)


def test_a_batch_whose_listener_raises_fails_as_a_whole(either):
    def handle(messages):
        raise ValueError

    window = either.consume(as_kind(handle, either), 5, batch_size=2)
    either.told.wait(lambda: len(either.told.failures) == 5)
    assert window.finished == 0
    assert len(either.told.raised) == 3


def test_an_async_listener_that_is_cancelled_from_within_failed(coroutines):
    async def handle(message):
        if message.queue_offset == 0:
            inner = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    window = coroutines.consume(handle, 2)
    coroutines.told.wait(lambda: coroutines.told.failures)
    assert coroutines.told.failures == [(0, 0)]
    assert window.finished == 1


def cancels_itself_and_waits():
    asyncio.current_task().cancel()
    return asyncio.sleep(3600)


async def cancels_itself_and_returns():
    asyncio.current_task().cancel()


async def is_cancelled_when_it_has_returned():
    task = asyncio.current_task()
    asyncio.get_running_loop().call_later(0.01, task.cancel)


async def leaves_the_loop():
    async def exits():
        raise SystemExit(3)

    await asyncio.gather(exits())


async def stops_the_loop():
    asyncio.get_running_loop().stop()


async def ends_its_generator():
    raise GeneratorExit


@pytest.mark.parametrize(
    "deed",
    [cancels_itself_and_waits, cancels_itself_and_returns, is_cancelled_when_it_has_returned, leaves_the_loop,
     stops_the_loop, ends_its_generator],
    ids=lambda deed: deed.__name__,
)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_async_workers_outlive_whatever_listeners_do(coroutines, deed):
    async def handle(message):
        if message.queue_offset == 0:
            await deed()

    windows = [coroutines.consume(handle, 2) for _ in range(6)]
    until(lambda: sum(window.finished for window in windows) + len(coroutines.told.failures) == 12)
    assert {offset for offset, _ in coroutines.told.failures} <= {0}, "only the one that did it may come again"
    after = coroutines.consume(handle, 5)
    until(lambda: after.finished + len(coroutines.told.failures) >= 4 and coroutines.idle)
    assert coroutines.told.worker_failures == []


def test_a_listener_cannot_close_the_loop_of_async_workers(coroutines):
    async def handle(message):
        asyncio.get_running_loop().close()

    coroutines.consume(handle, 1)
    coroutines.told.wait(lambda: coroutines.told.failures)
    window = coroutines.consume(as_kind(lambda message: None, coroutines), 3)
    until(lambda: window.finished == 3)


def test_an_ended_loop_is_not_kept_waiting_by_its_workers(io):
    """Whoever runs asyncio cancels every task at the end, and waits until it is gone."""
    told, began = Told(), threading.Event()
    window, messages = window_of(1)

    async def main():
        async def listen(message):
            began.set()
            await asyncio.sleep(3600)

        workers = AsyncWorkers(2, told, 900, asyncio.get_running_loop())
        workers.put(Chunk(window, Listener.of(listen), deque(messages)))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        return workers

    workers = asyncio.run(main())
    assert told.failures == [(0, 0)]
    workers.put(Chunk(window, Listener.of(print), deque()))
    workers.stop()


def test_workers_know_their_own_calls_and_what_those_have_begun(either):
    service = ConsumeService(either.loop, lambda is_async: either.workers)
    known = []

    def handle(message):
        known.append(service.is_own_call())
        known.append(asyncio.run(asyncio.to_thread(service.is_own_call)))

    async def listen(message):
        known.append(service.is_own_call())
        known.append(await asyncio.create_task(asyncio.to_thread(service.is_own_call)))

    listener = handle if isinstance(either.workers, ThreadWorkers) else listen
    window, messages = window_of(1)
    either.loop.call_soon_threadsafe(service.dispatch, window, Listener.of(listener), messages)
    until(lambda: window.finished == 1)
    assert known == [True, True]
    assert not service.is_own_call()


class Quit(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError("x"), SystemExit(1), Quit(), KeyboardInterrupt()], ids=repr)
def test_one_call_beside_the_work_runs_where_the_others_do(either, error):
    service = ConsumeService(either.loop, lambda is_async: either.workers)
    names = []

    def handle(message):
        names.append(threading.current_thread().name)
        if error is not None:
            raise error
        return 5

    _, (message,) = window_of(1)
    listener = Listener.of(as_kind(handle, either))
    context = ConsumeContext(QUEUE, 1, 0.0)
    assert either.run(service.call_once(listener, message, context)) == (None if error else 5, error)
    own = "pyrocket-consume-once" if isinstance(either.workers, ThreadWorkers) else "pyrocket-listener"
    assert names == [own]


def test_a_logging_that_raises_costs_no_message(either):
    """What tells of a listener's error is the user's, too."""

    def raises(window, message, error):
        raise OSError("the log is full")

    either.told.listener_raised = raises

    def handle(message):
        if message.queue_offset == 1:
            raise ValueError

    window = either.consume(as_kind(handle, either), 4)
    either.told.wait(lambda: either.told.worker_failures)
    assert either.told.failures == [(1, 0)]
    assert window.commit_offset() == 1
    after = either.consume(as_kind(lambda message: None, either), 2)
    until(lambda: after.finished == 2)


def test_tasks_of_async_listeners_end_with_their_loop(coroutines):
    ended = []

    async def goes_on():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def handle(message):
        asyncio.get_running_loop().create_task(goes_on())
        await asyncio.sleep(0)

    window = coroutines.consume(handle, 3)
    until(lambda: window.finished == 3)
    coroutines.workers.stop()
    until(lambda: not living("pyrocket-listener"))
    assert ended == [True, True, True]


def test_a_store_that_raises_inside_an_ack_ends_no_worker(either):
    """The offset store is called under the window's lock, and may be the user's."""

    def tell(queue, offset):
        raise OSError("no space left")

    either.consume(as_kind(lambda message: None, either), 1, tell=tell)
    either.told.wait(lambda: either.told.worker_failures)
    assert isinstance(either.told.worker_failures[0], OSError)
    for _ in range(4):
        window = either.consume(as_kind(lambda message: None, either), 1)
        until(lambda window=window: window.finished == 1)


def test_of_a_dropped_queue_what_runs_counts_and_nothing_begins(either):
    begun, release = threading.Event(), threading.Event()
    seen = []

    def handle(message):
        seen.append(message.queue_offset)
        begun.set()
        release.wait(PATIENCE_S)

    window = either.consume(as_kind(handle, either), 5)
    assert begun.wait(PATIENCE_S)
    window.drop()
    release.set()
    until(lambda: either.idle)
    assert (seen, window.finished, window.commit_offset()) == ([0], 1, 1)


# --- the end


def blocking(working: Working) -> tuple[Any, threading.Semaphore, threading.Event]:
    """Return a listener whose calls wait, what counts those that have begun, and what lets them go."""
    begun, release = threading.Semaphore(0), threading.Event()

    def handle(message):
        begun.release()
        release.wait(PATIENCE_S)

    async def listen(message):
        begun.release()
        while not release.is_set():
            await asyncio.sleep(0.001)

    return handle if isinstance(working.workers, ThreadWorkers) else listen, begun, release


def test_stopped_workers_begin_nothing_and_finish_what_runs(either):
    listener, begun, release = blocking(either)
    running = [either.consume(listener, 1) for _ in range(2)]
    waiting = either.consume(listener, 3)
    for _ in running:
        assert begun.acquire(timeout=PATIENCE_S)
    either.workers.stop()
    release.set()
    until(lambda: not living("pyrocket-consume") + living("pyrocket-listener"))
    assert [window.finished for window in running] == [1, 1]
    assert waiting.finished == 0
    assert not begun.acquire(blocking=False), "nothing else has begun"


def test_messages_of_abandoned_coroutines_stay_unfinished(coroutines):
    begun = threading.Event()

    async def handle(message):
        begun.set()
        await asyncio.sleep(3600)

    window = coroutines.consume(handle, 3)
    assert begun.wait(PATIENCE_S)
    coroutines.workers.stop()
    coroutines.workers.abandon()
    until(lambda: not living("pyrocket-listener"))
    assert window.finished == 0
    assert coroutines.told.failures == []


def test_a_thread_that_never_returns_is_left_alone_by_the_others(io):
    told, release = Told(), threading.Event()
    workers = ThreadWorkers(3, told, 900, io.loop)
    working = Working(workers, told, io)
    try:
        working.consume(lambda message: release.wait(PATIENCE_S), 1)
        others = [working.consume(lambda message: None, 4) for _ in range(10)]
        until(lambda: all(window.finished == 4 for window in others))
        workers.stop()
        workers.abandon()
        until(lambda: len(living("pyrocket-consume")) == 1)
    finally:
        release.set()
    until(lambda: not living("pyrocket-consume"))


class Emptied(deque):
    """Units that are taken back between a worker's look and its grasp."""

    def popleft(self):
        raise IndexError("pop from an empty deque")


def test_a_worker_survives_that_its_units_were_taken_back(either):
    window, messages = window_of(1)
    for _ in range(4):
        either.hand_over(Chunk(window, Listener.of(as_kind(lambda message: None, either)), Emptied(messages)))
    after = [either.consume(as_kind(lambda message: None, either), 2) for _ in range(4)]
    until(lambda: all(window.finished == 2 for window in after))


class Turn:
    """What an orderly queue has to say."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def may_go_on(self):
        return True

    def judge(self, unit, result):
        return True, True

    def committed(self):
        return []

    def end(self):
        self.ended.set()


def test_a_turn_that_no_worker_has_begun_ends_with_the_work(either):
    """Or its queue would count as running, and closing would wait for it in vain."""
    function, begun, release = blocking(either)
    window, messages = window_of(5)
    turns = []
    for message in messages:
        chunk = Chunk(window, Listener.of(function), deque([message]))
        chunk.turn = Turn()
        turns.append(chunk.turn)
        either.hand_over(chunk)
    assert begun.acquire(timeout=PATIENCE_S)
    assert begun.acquire(timeout=PATIENCE_S)
    either.workers.stop()
    release.set()
    assert all(turn.ended.wait(PATIENCE_S) for turn in turns)


# --- how work is cut and taken back


class Desk:
    """Stands for workers: the test plays them."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.chunks: deque[Chunk] = deque()
        self.failed: list[Failed] = []
        self.looks = 0

    def put(self, chunk):
        self.chunks.append(chunk)

    def hand_over(self, chunk):
        chunk.window.ack(chunk.done[:])
        chunk.done.clear()
        self.failed += chunk.failed
        chunk.failed.clear()

    def waiting(self):
        self.looks += 1
        return len(self.chunks)

    def stop(self):
        pass

    def abandon(self):
        pass

    def begin(self, worker: int, now: float) -> Chunk:
        """Have a worker take the next chunk and begin its first unit."""
        chunk = self.slots[worker].chunk = self.chunks.popleft()
        chunk.begun_at, chunk.current = now, chunk.todo.popleft()
        return chunk


def serving() -> tuple[ConsumeService, Desk]:
    desk = Desk(3)
    return ConsumeService(asyncio.get_running_loop(), lambda is_async: desk), desk


def handle(message):
    pass


def dispatched(count: int) -> tuple[ConsumeService, Desk, ProcessQueue, list[Message]]:
    """Hand out so many messages of a quick listener, as one chunk."""
    (service, desk), (window, messages) = serving(), window_of(count)
    window.listener_time_s = 1e-6
    service.dispatch(window, Listener.of(handle), messages)
    return service, desk, window, messages


@pytest.mark.parametrize(
    ("listener_time_s", "sizes"),
    [(1e-6, [32, 32, 32, 4]), (1e-4, [5] * 20), (2e-4, [2] * 50), (1e-3, [1] * 100), (10, [1] * 100)],
)
async def test_chunks_are_sized_by_the_time_the_listener_takes(listener_time_s, sizes):
    service, desk = serving()
    window, messages = window_of(100)
    window.listener_time_s = listener_time_s
    service.dispatch(window, Listener.of(handle), messages)
    assert [len(chunk.todo) for chunk in desk.chunks] == sizes
    assert max(sizes) <= LARGEST_CHUNK
    assert [message for chunk in desk.chunks for message in chunk.todo] == messages
    service.stop()


async def test_what_a_stuck_worker_has_not_begun_goes_to_others():
    service, desk, window, messages = dispatched(32)
    chunk = desk.begin(0, asyncio.get_running_loop().time() + 0.001)
    chunk.done.append(chunk.current)
    chunk.current = chunk.todo.popleft()
    chunk.failed.append((messages[31], 7))
    await asyncio.sleep(STUCK_AFTER_S / 2)
    assert (window.finished, len(desk.chunks)) == (0, 0)
    await asyncio.sleep(2 * STUCK_AFTER_S)
    assert [list(each.todo) for each in desk.chunks] == [[message] for message in messages[2:]]
    assert (window.commit_offset(), window.finished) == (1, 1)
    assert desk.failed == [(messages[31], 7)]
    assert not chunk.todo
    service.stop()


async def test_what_is_finished_does_not_wait_for_its_chunk_to_end():
    """There is nothing left then that could be given to others."""
    service, desk, window, messages = dispatched(2)
    chunk = desk.begin(0, asyncio.get_running_loop().time() + 0.001)
    chunk.failed.append((chunk.current, 0))
    chunk.current = chunk.todo.popleft()
    await asyncio.sleep(10 * STUCK_AFTER_S)
    assert desk.failed == [(messages[0], 0)]
    service.stop()


async def test_a_stop_hands_over_what_stuck_workers_have_finished():
    service, desk, window, messages = dispatched(3)
    chunk = desk.begin(0, asyncio.get_running_loop().time())
    chunk.done.append(chunk.current)
    chunk.current = chunk.todo.popleft()
    service.stop()
    assert (window.commit_offset(), window.finished) == (1, 1)
    assert not chunk.todo


async def test_nobody_looks_for_stuck_workers_when_nothing_waits():
    """A listener that never returns must not keep the I/O thread awake for ever."""
    service, desk, window, messages = dispatched(4)
    desk.begin(0, asyncio.get_running_loop().time() + 0.001)
    await asyncio.sleep(0.1)
    for worker in (0, 1, 2):
        desk.begin(worker, asyncio.get_running_loop().time())
    await asyncio.sleep(1)
    looks = desk.looks
    await asyncio.sleep(10)
    assert desk.looks == looks
    later, messages = window_of(8)
    later.listener_time_s = 1e-6
    service.dispatch(later, Listener.of(handle), messages)
    desk.begin(1, asyncio.get_running_loop().time() + 0.001)
    await asyncio.sleep(0.1)
    assert len(desk.chunks) == 7, "the next work is looked after again"
    service.stop()


async def test_a_call_is_stuck_when_it_was_seen_running_all_the_time():
    service, desk = serving()
    window, messages = window_of(2)
    service.dispatch(window, Listener.of(handle), messages[:1])
    desk.begin(0, 0.0)
    assert service.stuck(5, 100) == []
    assert service.stuck(5, 104.9) == []
    assert service.stuck(5, 105) == [(window, (messages[0],))]
    assert service.running() == service.running(window) == 1
    desk.slots[0].chunk = None
    service.dispatch(window, Listener.of(handle), messages[1:])
    desk.begin(0, 106)
    assert service.stuck(5, 106) == []
    service.stop()
