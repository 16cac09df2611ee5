"""Closing a consumer: from wherever one may want to, cut short, and twice. What is consumed is stored."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumerState, PushConsumer
from pyrocket_consumer.testing import drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.processes import Child
from tests.consuming import WAIT_S, Events, Seen, numbered, until
from tests.resetting import fill

RUN = asyncio.run

AT_ONCE_S = 5.0
"""Far below what a close waits for listeners with default options; far above what it takes."""


class Closing(Seen):
    """A listener that closes its consumer when it sees the last message, and goes on for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer: PushConsumer | None = None
        self.took_s: float | None = None
        self.state_after: ConsumerState | None = None

    def __call__(self, message):
        super().__call__(message)
        if message.body == b"last":
            began = time.monotonic()
            self.consumer.close()
            self.took_s, self.state_after = time.monotonic() - began, self.consumer.state
            time.sleep(0.1)


def started(cluster, group, topic, listener, **options):
    consumer = PushConsumer(group, name_server=cluster.name_server, **options)
    consumer.subscribe(topic, listener)
    return consumer.start()


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_listener_may_close_its_consumer(embedded, topic, group, is_async, orderly):
    seen = Closing()

    async def listen(message):
        seen(message)

    consumer = seen.consumer = started(embedded, group, topic, listen if is_async else seen, orderly=orderly)
    for body in (b"first", b"last"):
        embedded.send(topic, body)
    assert consumer.join(WAIT_S), "join sees the end"
    assert seen.took_s < AT_ONCE_S
    assert seen.state_after is ConsumerState.RUNNING, "the rest of the closing waits for the call"
    consumer.close()
    assert consumer.state is ConsumerState.CLOSED
    assert embedded.committed(group, topic) == {0: 2}
    assert embedded.members(group) == []


def test_who_closes_and_raises_gets_the_message_again(embedded, topic, group):
    def listen(message):
        consumer.close()
        raise ValueError("not consumed")

    consumer = started(embedded, group, topic, listen)
    embedded.send(topic, b"x")
    assert consumer.join(WAIT_S)
    again = Seen()
    with started(embedded, group, topic, again):
        again.wait_for(1)


def test_tasks_and_threads_of_a_listener_may_close(embedded, topic, group):
    """A task of an `async def` listener, or the thread it waits for, is waited for as the listener itself."""
    took = []

    async def listen(message):
        began = time.monotonic()
        await asyncio.gather(asyncio.to_thread(consumer.close), asyncio.create_task(asyncio.sleep(0)))
        took.append(time.monotonic() - began)

    consumer = started(embedded, group, topic, listen)
    embedded.send(topic, b"x")
    assert consumer.join(WAIT_S)
    assert took[0] < AT_ONCE_S
    assert embedded.committed(group, topic) == {0: 1}


async def test_an_async_listener_on_the_users_loop_may_close(embedded, topic, group):
    took = []

    async def listen(message):
        began = time.monotonic()
        await consumer.close()
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.1)

    consumer = AsyncPushConsumer(group, name_server=embedded.name_server)
    await consumer.subscribe(topic, listen)
    async with consumer:
        embedded.send(topic, b"x")
        assert await consumer.join(WAIT_S)
    assert took[0] < AT_ONCE_S
    assert embedded.committed(group, topic) == {0: 1}
    assert embedded.members(group) == []


def test_closing_from_on_event(embedded, topic, group):
    closed = threading.Event()

    def on_event(event):
        if event.kind == "listener-failed":
            consumer.close()
            closed.set()

    def listen(message):
        raise ValueError("tell")

    consumer = started(embedded, group, topic, listen, on_event=on_event)
    embedded.send(topic, b"x")
    assert closed.wait(WAIT_S)
    assert consumer.join(WAIT_S)
    assert consumer.state is ConsumerState.CLOSED


async def test_a_cancelled_close_has_stored_what_is_consumed(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    goes_on, held = threading.Event(), threading.Event()

    def listen(message):
        if message.queue_offset == 9 and message.queue.queue_id == 0:
            held.set()
            goes_on.wait(WAIT_S)

    consumer = AsyncPushConsumer(group, name_server=embedded.name_server)
    await consumer.subscribe(topic, listen)
    await consumer.start()
    fill(embedded, topic, 20)
    await asyncio.to_thread(held.wait, WAIT_S)
    while sum(queue.committed or 0 for queue in (await consumer.progress()).values()) < 19:
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consumer.close(), 0.3)
    assert embedded.committed(group, topic) == {0: 9, 1: 10}, "stored, and the call still runs"
    goes_on.set()
    await consumer.close()
    assert consumer.state is ConsumerState.CLOSED
    assert embedded.committed(group, topic) == {0: 10, 1: 10}
    assert embedded.members(group) == []


async def test_a_close_cancelled_at_any_moment_goes_on(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    expected, cut_short = 0, 0
    for step in range(20):
        seen = Seen()
        consumer = AsyncPushConsumer(group, name_server=embedded.name_server)
        await consumer.subscribe(topic, seen)
        await consumer.start()
        embedded.send(topic, lambda number, step=step: b"m%d" % (10 * step + number), count=10)
        await asyncio.to_thread(seen.wait_for, 10)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(step * 0.00025)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        cut_short += closing.cancelled()
        await consumer.close()
        expected += 10
        assert sum(embedded.committed(group, topic).values()) == expected, f"cancelled after {step / 4} ms"
        assert embedded.members(group) == []
    assert cut_short > 2, "else a close ended before each of these moments"


async def test_a_cancelled_close_gives_the_offset_store_back(embedded, topic, group, tmp_path):
    """The next consumer of the same name goes on where it ended."""
    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "instance_name": "mine"}
    begun, goes_on, bodies = threading.Event(), threading.Event(), []

    def listen(message):
        bodies.append(message.body)
        if message.body == b"slow":
            begun.set()
            goes_on.wait(WAIT_S)

    first = AsyncPushConsumer(group, name_server=embedded.name_server, **options)
    await first.subscribe(topic, listen)
    await first.start()
    embedded.send(topic, b"m0")
    embedded.send(topic, b"slow")
    await asyncio.to_thread(begun.wait, WAIT_S)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(first.close(), 0.3)
    goes_on.set()
    embedded.send(topic, b"meanwhile")
    await first.close()
    async with AsyncPushConsumer(group, name_server=embedded.name_server, **options) as second:
        await second.subscribe(topic, listen)
        embedded.send(topic, b"last")
        await asyncio.to_thread(until, lambda: b"last" in bodies, "it goes on")
    assert bodies == [b"m0", b"slow", b"meanwhile", b"last"]


async def test_a_close_does_not_need_the_executor_of_the_users_loop(embedded, topic, group):
    """Listeners that do their work with `asyncio.to_thread` have them all, and keep them."""
    goes_on, begun = threading.Event(), threading.Event()

    def work():
        begun.set()
        goes_on.wait(WAIT_S)

    async def listen(message):
        await asyncio.to_thread(work)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    consumer = AsyncPushConsumer(group, name_server=embedded.name_server)
    await consumer.subscribe(topic, listen)
    await consumer.start()
    try:
        embedded.send(topic, b"x")
        while not begun.is_set():
            await asyncio.sleep(0.01)
        await asyncio.wait_for(consumer.close(0.2), WAIT_S / 2)
        assert consumer.state is ConsumerState.CLOSED
    finally:
        goes_on.set()
def test_a_second_close_may_shorten_the_first(embedded, topic, group):
    goes_on, seen = threading.Event(), Seen(lambda message: goes_on.wait(WAIT_S) and None)
    consumer = started(embedded, group, topic, seen)
    embedded.send(topic, b"x")
    seen.wait_for(1)
    first = threading.Thread(target=consumer.close, args=(600,))
    first.start()
    began = time.monotonic()
    consumer.close(0.1)
    first.join(WAIT_S)
    assert not first.is_alive()
    assert time.monotonic() - began < WAIT_S
    goes_on.set()


def test_a_close_ends_in_time_when_brokers_and_listeners_do_not(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=4)
    events, hold, goes_on = Events(), threading.Event(), threading.Event()

    def listen(message):
        if hold.is_set():
            goes_on.wait(WAIT_S)

    consumer = started(embedded, group, topic, listen, on_event=events)
    fill(embedded, topic, 8)
    until(lambda: sum(each.committed or 0 for each in consumer.progress().values()) == 8, "all are consumed")
    hold.set()
    embedded.send(topic, lambda number: b"n%d" % number, count=4)
    for code in (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNREGISTER_CLIENT):
        broker.on(code, drop, times=None)
    began = time.monotonic()
    consumer.close(1)
    assert time.monotonic() - began < 1 + 3 + 6
    goes_on.set()
    assert consumer.state is ConsumerState.CLOSED
    assert len(events.of("commit-failed")) >= 4, "it says what it could not store"


AT_EXIT = """
import atexit
consumer = begin()
atexit.register(consumer.close)
consume_all(consumer)
"""

LOOKS = """
consumer = begin()
consume_all(consumer)
consumer.close()
"""

BEFORE_THE_END = """
import signal, threading

class Service:
    def __init__(self, consumer):
        self.consumer = consumer
    def __del__(self):
        self.consumer.close()

consumer = begin("-handler")
signal.signal(signal.SIGTERM, lambda *_: consumer.close())
consume_all(consumer)
os.kill(os.getpid(), signal.SIGTERM)
assert consumer.join(30)

consumer = begin("-handler-in-join")
consume_all(consumer)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
consumer.join()
assert consumer.state.value == "closed", consumer.state

consumer = begin("-del")
service = Service(consumer)
consume_all(consumer)
del service
assert consumer.join(30)

with begin("-with") as consumer:
    consume_all(consumer)
"""

CLOSES = """
import os, sys, time
from pyrocket_consumer import PushConsumer
name_server, topic, group, model, base = sys.argv[1:]

def handle(message):
    os.write(1, message.body + bytes([10]))

def begin(suffix=""):
    options = {"message_model": model, "consume_from": "first", "offset_store_dir": base}
    consumer = PushConsumer(group + suffix, name_server=name_server, **options)
    consumer.subscribe(topic, handle)
    return consumer.start()

def consume_all(consumer):
    deadline = time.monotonic() + 30
    while sum(each.committed or 0 for each in consumer.progress().values()) < 20:
        assert time.monotonic() < deadline, consumer.progress()
        time.sleep(0.01)
"""


def closes(embedded, topic, group, base, code, model="clustering", times=1):
    """Run a program that consumes 20 messages so many times, and closes in its own way."""
    child = Child("-c", CLOSES + code, embedded.name_server, topic, group, model, str(base))
    assert child.ended() == 0, child.errors
    assert child.errors == []
    assert sorted(child.lines) == sorted(times * [body.decode() for body in numbered(20)])


@pytest.mark.live
@pytest.mark.slow("starts four interpreters")
def test_however_it_is_closed_what_is_consumed_is_stored(embedded, topic, group, tmp_path):
    fill(embedded, topic, 20, queues=2)
    groups = [group + suffix for suffix in ("-handler", "-handler-in-join", "-del", "-with")]
    closes(embedded, topic, group, tmp_path, BEFORE_THE_END, times=4)
    closes(embedded, topic, group, tmp_path, AT_EXIT)
    for each in (group, *groups):
        assert embedded.committed(each, topic) == {0: 10, 1: 10}, each
        until(lambda each=each: embedded.members(each) == [], "it has left, or its connections have ended")
    closes(embedded, topic, group, tmp_path, AT_EXIT, "broadcasting")
    closes(embedded, topic, group, tmp_path, LOOKS, "broadcasting", times=0)
    until(lambda: embedded.members(group) == [], "it has left, or its connections have ended")


IMPATIENT = """
import signal, sys, threading, time
from pyrocket_consumer import PushConsumer
signal.signal(signal.SIGINT, signal.default_int_handler)
name_server, topic, group = sys.argv[1:]

def handle(message):
    print(message.body.decode() + "\\n", end="", flush=True)  # in one piece: threads print beside each other
    if message.body == b"m9":
        time.sleep(600)

consumer = PushConsumer(group, name_server=name_server, consume_from="first")
consumer.subscribe(topic, handle)
with consumer:
    try:
        print("ready", flush=True)
        consumer.join()
    finally:
        print("joined", flush=True)
"""


@pytest.mark.live
def test_ctrl_c_while_it_closes_has_stored_what_is_consumed(embedded, topic, group):
    fill(embedded, topic, 10)
    child = Child("-c", IMPATIENT, embedded.name_server, topic, group)
    child.wait_for_line("m9")
    child.wait(lambda lines: len(lines) == 11)
    child.send(signal.SIGINT)
    child.wait_for_line("joined")
    until(lambda: embedded.committed(group, topic) == {0: 9}, "stored at once, while the last call runs")
    for _ in range(3):  # the first may come before it waits for the listener; then it still does
        if child.process.poll() is None:
            child.send(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(6)
    assert child.process.poll() is not None, "it does not wait for 20 s"
    assert child.ended() != 0
    assert embedded.committed(group, topic) == {0: 9}


LAST = """
import os, sys, time
from pyrocket_consumer import PushConsumer
name_server, group = sys.argv[1:]

class Service:
    def __init__(self):
        self.consumer = PushConsumer(group, name_server=name_server).start()

    def __del__(self):
        began = time.monotonic()
        self.consumer.close()
        os.write(1, b"took %d s" % (time.monotonic() - began))

service = Service()
"""


@pytest.mark.live
def test_del_at_the_end_of_a_process_waits_for_no_thread(embedded, group):
    child = Child("-c", LAST, embedded.name_server, group)
    assert child.ended() == 0
    assert child.lines in (["took 0 s"], ["took 1 s"])
    until(lambda: embedded.members(group) == [], "its connections have ended")
