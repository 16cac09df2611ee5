"""Closing a consumer from any place, with a short timeout, and twice. It stores the offsets of consumed messages."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pyrocket_consumer import ClientClosed, ConsumerState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, drop
from tests.consumer.lifecycle.programs import run
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import WAIT_S, RecordingListener, numbered, until

RUN = asyncio.run

AT_ONCE_S = 5.0
"""Far below what a close waits for listeners with default options; far above what it takes."""


class Closing(RecordingListener):
    """A listener that closes its consumer when it gets the last message, and continues for a moment."""

    def __call__(self, message):
        super().__call__(message)
        if message.body == b"last":
            began = time.monotonic()
            self.consumer.close()
            self.took_s, self.state_after = time.monotonic() - began, self.consumer.state
            time.sleep(0.1)


class Held:
    """A listener that stays in the call for one message until the test releases it."""

    def __init__(self, body: bytes) -> None:
        self.body, self.bodies = body, []
        self.begun, self.may_continue = threading.Event(), threading.Event()

    def __call__(self, message):
        self.bodies.append(message.body)
        if message.body == self.body:
            self.begun.set()
            self.may_continue.wait(WAIT_S)

    async def close_is_cancelled(self, consumer):
        """Close while that call runs, and stop waiting."""
        await asyncio.to_thread(self.begun.wait, WAIT_S)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consumer.close(), 0.3)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_listener_may_close_its_consumer(orders, is_async, orderly):
    seen = Closing()

    async def listen(message):
        seen(message)

    consumer = seen.consumer = orders.consumer(listen if is_async else seen, orderly=orderly).start()
    for body in (b"first", b"last"):
        orders.send(body)
    assert consumer.join(WAIT_S), "join returns"
    assert seen.took_s < AT_ONCE_S
    assert seen.state_after is ConsumerState.RUNNING, "the rest of the closing waits for the call"
    consumer.close()
    assert consumer.state is ConsumerState.CLOSED
    assert orders.committed == {0: 2}
    assert orders.members == []


def test_a_listener_that_closes_and_raises_gets_the_message_again(orders):
    def listen(message):
        consumer.close()
        raise ValueError("not consumed")

    consumer = orders.consumer(listen).start()
    orders.send(b"x")
    assert consumer.join(WAIT_S)
    with orders.consumer(again := RecordingListener()):
        again.wait_for(1)


def test_tasks_and_threads_of_a_listener_may_close(orders):
    """The close waits for a task of an `async def` listener, or for its thread, as for the listener itself."""
    took = []

    async def listen(message):
        began = time.monotonic()
        await asyncio.gather(asyncio.to_thread(consumer.close), asyncio.create_task(asyncio.sleep(0)))
        took.append(time.monotonic() - began)

    consumer = orders.consumer(listen).start()
    orders.send(b"x")
    assert consumer.join(WAIT_S)
    assert took[0] < AT_ONCE_S
    assert orders.committed == {0: 1}


async def test_an_async_listener_on_the_users_loop_may_close(orders):
    took = []

    async def listen(message):
        began = time.monotonic()
        await consumer.close()
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.1)

    consumer = await orders.begun(listen)
    orders.send(b"x")
    assert await consumer.join(WAIT_S)
    assert took[0] < AT_ONCE_S
    assert orders.committed == {0: 1}
    assert orders.members == []


def test_closing_from_on_event(orders):
    closed = threading.Event()

    def on_event(event):
        if event.kind == "listener-failed":
            consumer.close()
            closed.set()

    def listen(message):
        raise ValueError("tell")

    consumer = orders.consumer(listen, on_event=on_event).start()
    orders.send(b"x")
    assert closed.wait(WAIT_S)
    assert consumer.join(WAIT_S)
    assert consumer.state is ConsumerState.CLOSED


async def test_a_cancelled_close_has_stored_the_offsets(orders):
    orders.make(queues=2)
    consumer = await orders.begun(held := Held(b"m18"))
    orders.fill(20)
    while sum(queue.committed or 0 for queue in (await consumer.progress()).values()) < 19:
        await asyncio.sleep(0.01)
    await held.close_is_cancelled(consumer)
    assert orders.committed == {0: 9, 1: 10}, "stored while the call still runs"
    held.may_continue.set()
    await consumer.close()
    assert consumer.state is ConsumerState.CLOSED
    assert orders.committed == {0: 10, 1: 10}
    assert orders.members == []


async def test_a_close_cancelled_at_any_moment_continues(orders):
    orders.make(queues=2)
    cut_short = 0
    for step in range(20):
        consumer = await orders.begun(seen := RecordingListener())
        orders.fill(10, start=10 * step)
        await asyncio.to_thread(seen.wait_for, 10)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(step * 0.00025)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        cut_short += closing.cancelled()
        await consumer.close()
        assert sum(orders.committed.values()) == 10 * (step + 1), f"cancelled after {step / 4} ms"
        assert orders.members == []
    assert cut_short > 2, "some closes must be cancelled before their end"


async def test_a_cancelled_close_releases_the_offset_store(orders, tmp_path):
    """The next consumer of the same name continues at its offsets."""
    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "instance_name": "mine"}
    first = await orders.begun(held := Held(b"slow"), **options)
    orders.send(b"m0")
    orders.send(b"slow")
    await held.close_is_cancelled(first)
    held.may_continue.set()
    orders.send(b"meanwhile")
    await first.close()
    async with await orders.begun(held, **options):
        orders.send(b"last")
        await asyncio.to_thread(until, lambda: b"last" in held.bodies, "it continues")
    assert held.bodies == [b"m0", b"slow", b"meanwhile", b"last"]


async def test_a_close_waits_until_cancelled_calls_have_cleaned_up(orders):
    begun, undone = asyncio.Event(), []

    async def listen(message):
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)  # for example a rollback
            undone.append(message.body)

    consumer = await orders.begun(listen)
    orders.fill(1)
    await begun.wait()
    await consumer.close(0.1)
    assert undone == [b"m0"]


async def test_a_close_does_not_need_the_executor_of_the_users_loop(orders):
    """Listeners with `asyncio.to_thread` use all of its threads."""
    held = Held(b"x")

    async def listen(message):
        await asyncio.to_thread(held, message)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    consumer = await orders.begun(listen)
    try:
        orders.send(b"x")
        while not held.begun.is_set():
            await asyncio.sleep(0.01)
        await asyncio.wait_for(consumer.close(0.2), WAIT_S / 2)
        assert consumer.state is ConsumerState.CLOSED
    finally:
        held.may_continue.set()


def test_a_second_close_may_shorten_the_first(orders):
    consumer = orders.consumer(held := Held(b"x")).start()
    orders.send(b"x")
    assert held.begun.wait(WAIT_S)
    first = threading.Thread(target=consumer.close, args=(600,))
    first.start()
    began = time.monotonic()
    consumer.close(0.1)
    first.join(WAIT_S)
    assert not first.is_alive()
    assert time.monotonic() - began < WAIT_S
    held.may_continue.set()


def test_a_close_does_not_wait_for_a_subscribe(orders):
    """The queues of the topic will not begin, because rebalancing has ended."""
    orders.make(queues=1, topic="other")
    gate, subscribed = Gate(), threading.Event()

    def subscribe():
        with suppress(ClientClosed):
            consumer.subscribe("other", print)
        subscribed.set()

    with orders.consumer(print) as consumer:
        orders.cluster.broker("broker-a").on(RequestCode.HEART_BEAT, gate, times=None)
        threads = [threading.Thread(target=work) for work in (subscribe, consumer.close)]
        for thread in threads:
            thread.start()
            gate.wait_held(1)
            time.sleep(0.2)  # the close has begun
        gate.open()
        began = time.monotonic()
        for thread in threads:
            thread.join(WAIT_S)
        assert time.monotonic() - began < 2
        assert subscribed.is_set()


def test_a_close_ends_in_time_when_brokers_and_listeners_do_not(orders):
    orders.make(queues=4)
    hold, may_continue = threading.Event(), threading.Event()

    def listen(message):
        if hold.is_set():
            may_continue.wait(WAIT_S)

    consumer = orders.consumer(listen).start()
    orders.fill(8)
    until(lambda: sum(each.committed or 0 for each in consumer.progress().values()) == 8, "all are consumed")
    hold.set()
    orders.fill(4, start=8)
    for code in (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNREGISTER_CLIENT):
        orders.broker.on(code, drop, times=None)
    began = time.monotonic()
    consumer.close(1)
    assert time.monotonic() - began < 1 + 3 + 6
    may_continue.set()
    assert consumer.state is ConsumerState.CLOSED
    assert len(orders.events.of("commit-failed")) >= 4, "events report the offsets that it could not store"


BEGIN = """
model, base = rest

def begin(suffix=""):
    options = {"message_model": model, "consume_from": "first", "offset_store_dir": base}
    consumer = PushConsumer(group + suffix, name_server=name_server, **options)
    consumer.subscribe(topic, handle)
    return consumer.start()

def consume_all(consumer):
    wait_until(lambda: consumed(consumer.progress()) >= 20, consumer.progress)
"""

AT_EXIT = (
    BEGIN
    + """
import atexit
consumer = begin()
atexit.register(consumer.close)
consume_all(consumer)
"""
)

LOOKS = (
    BEGIN
    + """
consumer = begin()
consume_all(consumer)
consumer.close()
"""
)

BEFORE_THE_END = (
    BEGIN
    + """
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
)


@pytest.mark.live
@pytest.mark.slow("starts four interpreters")
def test_offsets_are_stored_in_every_way_of_closing(orders, tmp_path):
    def closes(program, model="clustering", times=1):
        """Run a program that consumes 20 messages with `count` consumers, and closes each in its own way."""
        child = run(orders.cluster, program, model, tmp_path)
        assert child.ended() == 0, child.errors
        assert child.errors == []
        assert sorted(child.lines) == sorted(times * [body.decode() for body in numbered(20)])

    orders.make(queues=2)
    orders.fill(20)
    closes(BEFORE_THE_END, times=4)
    closes(AT_EXIT)
    for each in (GROUP + suffix for suffix in ("", "-handler", "-handler-in-join", "-del", "-with")):
        assert orders.cluster.committed(each, TOPIC) == {0: 10, 1: 10}, each
        until(lambda each=each: orders.cluster.members(each) == [], "it has left, or its connections have ended")
    closes(AT_EXIT, "broadcasting")
    closes(LOOKS, "broadcasting", times=0)
    orders.wait_left()


IMPATIENT = """
def handle(message):
    tell(message.body)
    if message.body == b"m9":
        time.sleep(600)

consumer = PushConsumer(group, name_server=name_server, consume_from="first")
consumer.subscribe(topic, handle)
with consumer:
    try:
        tell(b"ready")
        consumer.join()
    finally:
        tell(b"joined")
"""


@pytest.mark.live
def test_ctrl_c_during_a_close_has_stored_the_offsets(orders):
    orders.fill(10)
    child = run(orders.cluster, IMPATIENT)
    child.wait_for_line("m9")
    child.wait(lambda lines: len(lines) == 11)
    child.send(signal.SIGINT)
    child.wait_for_line("joined")
    until(lambda: orders.committed == {0: 9}, "stored at once, while the last call runs")
    for _ in range(3):  # after a signal before the wait for the listener, it still waits
        if child.process.poll() is None:
            child.send(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(6)
    assert child.process.poll() is not None, "it does not wait for 20 s"
    assert child.ended() != 0
    assert orders.committed == {0: 9}


LAST = """
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
def test_del_at_the_end_of_a_process_waits_for_no_thread(orders):
    child = run(orders.cluster, LAST)
    assert child.ended() == 0
    assert child.lines in (["took 0 s"], ["took 1 s"])
    orders.wait_left()
