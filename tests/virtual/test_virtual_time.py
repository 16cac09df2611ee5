"""Virtual time: threads in turn, one clock, connections in memory, and what cannot be simulated."""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.virtual import NotVirtual, Stuck, virtual_time
from tests.virtual.scheduler import current


def test_an_hour_passes_at_once():
    began, wall = time.monotonic(), time.time()
    time.sleep(3600)
    assert time.monotonic() - began == pytest.approx(3600, abs=0.01)
    assert time.time() - wall == pytest.approx(3600, abs=0.01)


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

    async def ask():
        reader, writer = await asyncio.open_connection(*address.get(timeout=5))
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    asyncio.run(ask())
    thread.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 40_000))


@pytest.mark.live
def test_a_seed_repeats_the_order_of_threads():
    def order(seed):
        seen = []

        def work(number):
            for _ in range(5):
                time.sleep(0)
                seen.append(number)

        with virtual_time(seed):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


@pytest.mark.live
def test_what_waits_for_ever_is_found():
    with virtual_time(), pytest.raises(Stuck, match="--- MainThread"):
        threading.Event().wait()


@pytest.mark.live
def test_what_waits_while_timers_go_on_is_found():
    def tick():
        while True:
            time.sleep(60)

    with virtual_time():
        threading.Thread(target=tick, daemon=True).start()
        with pytest.raises(Stuck, match="nothing can end this"):
            threading.Event().wait()


@pytest.mark.live
def test_threads_that_are_left_end_with_the_world():
    with virtual_time():
        threads = [threading.Thread(target=threading.Event().wait) for _ in range(3)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


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
    [lambda: subprocess.run([sys.executable, "-c", ""]), lambda: socket.getaddrinfo("example.invalid", 1)],
    ids=["process", "name"],
)
def test_what_leaves_the_world_is_refused(leave):
    with virtual_time() as world:
        with pytest.raises(NotVirtual, match="mark this test live"):
            leave()
        assert len(world.violations) == 1
