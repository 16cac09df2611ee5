"""Virtual time: threads in turn, one clock, connections in memory, and errors for all that it cannot simulate."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext

import pytest

from tests.for_each import for_each
from tests.virtual import NotVirtual, Stuck, coroutines, virtual_time
from tests.virtual.scheduler import current

pytestmark = pytest.mark.virtual


def run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@for_each("hours", [1, 72])
def test_hours_pass_in_one_sleep(hours):
    began, wall = time.monotonic(), time.time()
    time.sleep(hours * 3600)
    assert time.monotonic() - began == pytest.approx(hours * 3600, abs=0.01)
    assert time.time() - wall == pytest.approx(hours * 3600, abs=0.01)


def test_threads_wait_for_each_other():
    ready, done, order = threading.Event(), threading.Condition(), []

    def work():
        assert ready.wait(10)
        with done:
            order.append("worked")
            done.notify()

    thread = threading.Thread(target=work)
    thread.start()
    with done:
        time.sleep(1)
        ready.set()
        assert done.wait_for(lambda: order, 10)
    thread.join()
    assert not thread.is_alive()
    assert order == ["worked"]


def test_waiting_ends_at_its_deadline():
    lock, items = threading.Lock(), queue.SimpleQueue()
    lock.acquire()
    sleeper = threading.Thread(target=time.sleep, args=(100,))
    sleeper.start()
    began = time.monotonic()
    assert not lock.acquire(timeout=2)
    with pytest.raises(queue.Empty):
        items.get(timeout=3)
    assert not threading.Event().wait(4)
    sleeper.join(5)
    assert sleeper.is_alive()
    assert time.monotonic() - began == pytest.approx(14, abs=0.01)


def test_a_pool_of_threads_works():
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        assert list(pool.map(lambda seconds: time.sleep(seconds) or seconds, [3, 1, 2])) == [3, 1, 2]
    assert time.monotonic() - began == pytest.approx(3, abs=0.01)


def test_a_loop_without_waiting_lets_others_run():
    stop, lock, turns = threading.Event(), threading.Lock(), 0

    def spin():
        nonlocal turns
        while not stop.is_set():
            with lock:
                turns += 1

    thread = threading.Thread(target=spin)
    thread.start()
    time.sleep(0.01)
    stop.set()
    thread.join()
    assert turns > 100


LOOKS = {
    "sleep": lambda lock, thread: time.sleep(0),
    "clock": lambda lock, thread: time.monotonic(),
    "lock": lambda lock, thread: lock.acquire(blocking=False),
    "join": lambda lock, thread: thread.join(0),
    "is_alive": lambda lock, thread: thread.is_alive(),
}


@for_each("look", LOOKS.values(), ids=LOOKS)
def test_a_polling_thread_lets_others_run(look):
    lock, ended = threading.Lock(), []
    lock.acquire()
    thread = threading.Thread(target=lambda: (time.sleep(0.001), ended.append(True)))
    thread.start()
    while not ended:
        look(lock, thread)


def test_a_loop_that_never_waits_reaches_its_timeout():
    async def spin():
        async with asyncio.timeout(0.01):
            while True:
                await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        asyncio.run(spin())


@for_each("blocking, timeout", [(True, -5), (False, 1)])
def test_a_lock_refuses_what_a_real_one_refuses(blocking, timeout):
    with pytest.raises(ValueError):
        threading.Lock().acquire(blocking, timeout)


def test_loops_of_two_threads_talk_over_streams():
    address = queue.SimpleQueue()

    async def echo(reader, writer):
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def serve():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        address.put(server.sockets[0].getsockname())
        await asyncio.sleep(10)
        server.close()

    async def call():
        reader, writer = await asyncio.open_connection(*address.get(timeout=5))
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    asyncio.run(call())
    thread.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 40_000))


def test_a_server_serves_until_its_task_is_cancelled():
    async def main():
        async def greet(reader, writer):
            writer.write(b"hello")
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            serving = asyncio.create_task(server.serve_forever())
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b"hello"
            writer.close()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
        assert not server.is_serving()

    asyncio.run(main())


class Received(asyncio.Protocol):
    """Keeps received bytes, and then runs a function."""

    def __init__(self, then):
        self.data, self.is_lost, self._then = b"", False, then

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self.data += data
        self._then(self._transport)

    def connection_lost(self, error):
        self.is_lost = True


@for_each(
    "then",
    [lambda transport: transport.close(), lambda transport: (transport.pause_reading(), transport.close())],
    ids=["closes", "pauses and closes"],
)
def test_nothing_arrives_after_close(then):
    async def main():
        received = Received(then)
        server = await asyncio.get_running_loop().create_server(lambda: received, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for part in (b"a", b"b", b"c"):
            writer.write(part)
        time.sleep(1)  # noqa: ASYNC251  # all have arrived when the loop polls
        await asyncio.sleep(1)
        writer.close()
        server.close()
        return received

    received = asyncio.run(main())
    assert received.data == b"a"
    assert received.is_lost


def test_half_of_a_connection_cannot_be_closed():
    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Received(lambda transport: None), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(*address)
        assert not writer.can_write_eof()
        with socket.create_connection(address) as blocking, pytest.raises(NotVirtual, match="mark this test live"):
            blocking.shutdown(socket.SHUT_WR)
        writer.close()
        server.close()

    asyncio.run(main())


@pytest.mark.live
def test_a_seed_repeats_the_order_of_threads():
    def order(seed):
        seen = []

        def work(number):
            for _ in range(5):
                time.sleep(0)
                seen.append(number)

        with virtual_time(seed):
            run_all([threading.Thread(target=work, args=(number,)) for number in range(4)])
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


@pytest.mark.live
def test_an_endless_wait_is_found():
    def tick():
        while True:
            time.sleep(60)

    with virtual_time(), pytest.raises(Stuck, match="--- MainThread"):
        threading.Event().wait()
    with virtual_time():  # also while timers run
        threading.Thread(target=tick, daemon=True).start()
        with pytest.raises(Stuck, match="nothing can end this"):
            threading.Event().wait()


@pytest.mark.live
def test_remaining_threads_end_with_the_world():
    with virtual_time():
        threads = [threading.Thread(target=threading.Event().wait) for _ in range(3)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def raised(monkeypatch):
    """The exceptions that no thread caught."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))
    return errors


@pytest.mark.live
def test_threads_end_at_any_step_with_the_world(raised):
    def start_others():
        while True:
            threading.Thread(target=time.sleep, args=(0,)).start()

    def lock_and_unlock(lock):
        while True:
            with lock:
                pass

    before = threading.active_count()
    for seed in range(40):
        with virtual_time(seed):
            held = threading.Lock()
            held.acquire()
            for target in (start_others, lambda: lock_and_unlock(threading.Lock())):
                threading.Thread(target=target).start()
            for _ in range(3):
                threading.Thread(target=held.acquire, kwargs={"timeout": 0.001}).start()
            threading.Timer(0.0005, held.release).start()
            time.sleep(0.001)
    assert raised == []
    assert threading.active_count() == before


@pytest.mark.live
@pytest.mark.slow("waits for a thread that does not stop")
@pytest.mark.parametrize("never_waits", [False, True])
def test_a_signal_interrupts_the_waiting_thread(raised, never_waits):
    stop = []

    def work():
        while not stop:
            if not never_waits:
                time.sleep(0.001)

    def interrupt(number, frame):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptedError), virtual_time():
            threads = [threading.Thread(target=target) for target in (threading.Event().wait, work)]
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # a thread that never waits may block this one
            for thread in threads:
                thread.start()
            threading.Event().wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [thread.is_alive() for thread in threads] == [False, never_waits]
    stop.append(True)
    threads[1].join(5)
    assert raised == []


@pytest.mark.live
def test_a_loop_ends_with_its_world():
    with virtual_time():
        loop = asyncio.new_event_loop()
    with closing(loop), virtual_time(), pytest.raises(NotVirtual, match="fixture lives for one test"):
        loop.call_soon_threadsafe(print)
    with pytest.raises(NotVirtual, match="RUN = asyncio.run"):
        coroutines.run(asyncio.to_thread(time.sleep, 1))


@pytest.mark.live
def test_a_world_in_a_world_gives_the_outer_one_back():
    with virtual_time() as outer:
        with virtual_time():
            time.sleep(100)
        began = time.monotonic()
        time.sleep(100)
        assert time.monotonic() - began == pytest.approx(100, abs=0.01)
        assert current() is outer


@pytest.mark.live
@pytest.mark.parametrize("later", [nullcontext, virtual_time])
def test_locks_of_a_module_outlive_the_world(later, raised):
    """A module may be imported in a world."""
    with virtual_time():
        lock = threading.RLock()
    inside, most = 0, []

    def work():
        nonlocal inside
        for _ in range(20):
            with lock:
                inside += 1
                most.append(inside)
                time.sleep(0.0001)
                inside -= 1

    with later():
        run_all([threading.Thread(target=work) for _ in range(4)])
    assert raised == []
    assert most == [1] * 80


@pytest.mark.live
def test_outside_of_a_world_nothing_is_virtual():
    assert current() is None
    began = time.perf_counter()
    time.sleep(0.01)
    assert 0.01 <= time.perf_counter() - began < 1
    assert type(threading.Lock()).__module__ == "_thread"


@pytest.mark.live
@pytest.mark.parametrize(
    "leave",
    [
        lambda: subprocess.run([sys.executable, "-c", ""]),
        lambda: os.system("true"),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: socket.getaddrinfo("example.invalid", 1),
    ],
    ids=["process", "shell", "spawned process", "name"],
)
def test_what_leaves_the_world_is_refused(leave):
    with virtual_time() as world:
        with pytest.raises(NotVirtual, match="mark this test live"):
            leave()
        assert len(world.violations) == 1
