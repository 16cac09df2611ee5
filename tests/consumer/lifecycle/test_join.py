"""Waiting for a consumer's end: by whom, how long, and what signals do meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumerClosed, ConsumerState, PushConsumer
from pyrocket_consumer.consumer.end import End, Terminated, terminate, told_of_sigterm
from tests.consumer.processes import Child
from tests.consuming import WAIT_S, Events
from tests.resetting import fill

RUN = asyncio.run

BLOCKING = """
import os, signal, sys, threading, time
from pyrocket_consumer import PushConsumer
signal.signal(signal.SIGINT, signal.default_int_handler)
name_server, topic, group, way = sys.argv[1:]

def handle(message):
    os.write(1, message.body + bytes([10]))

def tell_when_joined():
    deadline = time.monotonic() + 30
    while sum(each.committed or 0 for each in consumer.progress().values()) < 20:
        assert time.monotonic() < deadline, consumer.progress()
        time.sleep(0.01)
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    os.write(1, b"ready\\n")

with PushConsumer(group, name_server=name_server, consume_from="first") as consumer:
    consumer.subscribe(topic, handle)
    threading.Thread(target=tell_when_joined, daemon=True).start()
    if way == "once":
        assert consumer.join() is False
    elif way == "until its end":
        while not consumer.join(0.2):
            pass
    elif way == "while it runs":
        while consumer.state.value == "running":
            consumer.join(0.2)
    elif way == "for ever":
        while True:
            consumer.join(0.2)
    print("joined", flush=True)
print("closed", flush=True)
"""

ON_A_LOOP = """
import asyncio, os, signal, sys
from pyrocket_consumer import AsyncPushConsumer
signal.signal(signal.SIGINT, signal.default_int_handler)
name_server, topic, group, way = sys.argv[1:]

async def handle(message):
    os.write(1, message.body + bytes([10]))

async def tell_when_joined(consumer):
    while sum(each.committed or 0 for each in (await consumer.progress()).values()) < 20:
        await asyncio.sleep(0.01)
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        await asyncio.sleep(0.01)
    os.write(1, b"ready\\n")

async def main():
    async with AsyncPushConsumer(group, name_server=name_server, consume_from="first") as consumer:
        await consumer.subscribe(topic, handle)
        telling = asyncio.create_task(tell_when_joined(consumer))
        if way == "once":
            assert await consumer.join() is False
        elif way == "twice at once":
            async with AsyncPushConsumer(group + "-other", name_server=name_server) as other:
                await other.subscribe(topic, handle)
                assert await asyncio.gather(consumer.join(), other.join()) == [False, False]
        elif way == "for ever":
            while True:
                await consumer.join(0.2)
        print("joined", flush=True)
    print("closed", flush=True)

asyncio.run(main())
"""


def joined(embedded, topic, group, program, way, number):
    """Run `program`, send it a signal while it joins; returns the exit code, what it printed after, and its errors."""
    fill(embedded, topic, 20, queues=2)
    child = Child("-c", program, embedded.name_server, topic, group, way)
    child.wait_for_line("ready")
    child.send(number)
    code = child.ended()
    assert sum(child.bodies.values()) == 20
    assert embedded.committed(group, topic) == {0: 10, 1: 10}, "closed in order"
    assert embedded.members(group) == []
    return code, child.lines[child.lines.index("ready") + 1 :], child.errors


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_join_and_what_follows_closes(embedded, topic, group, number):
    assert joined(embedded, topic, group, BLOCKING, "once", number) == (0, ["joined", "closed"], [])


@pytest.mark.live
@pytest.mark.parametrize("way", ["until its end", "while it runs", "for ever"])
def test_a_loop_around_a_join_ends_with_sigterm(embedded, topic, group, way):
    assert joined(embedded, topic, group, BLOCKING, way, signal.SIGTERM) == (143, [], [])


@pytest.mark.live
@pytest.mark.parametrize("way", ["until its end", "while it runs", "for ever"])
def test_a_loop_around_a_join_ends_with_ctrl_c(embedded, topic, group, way):
    code, after, errors = joined(embedded, topic, group, BLOCKING, way, signal.SIGINT)
    assert (code, after, errors[-1]) == (-signal.SIGINT, [], "KeyboardInterrupt")


@pytest.mark.live
@pytest.mark.parametrize("way", ["once", "twice at once"])
def test_sigterm_ends_the_joins_of_a_loop(embedded, topic, group, way):
    assert joined(embedded, topic, group, ON_A_LOOP, way, signal.SIGTERM) == (0, ["joined", "closed"], [])


@pytest.mark.live
def test_a_loop_around_a_join_on_a_loop_ends_with_sigterm(embedded, topic, group):
    code, after, _ = joined(embedded, topic, group, ON_A_LOOP, "for ever", signal.SIGTERM)
    assert (code, after) == (143, [])


@pytest.mark.live
def test_ctrl_c_ends_a_join_on_a_loop_as_asyncio_has_it(embedded, topic, group):
    code, after, errors = joined(embedded, topic, group, ON_A_LOOP, "once", signal.SIGINT)
    assert (code, after, errors[-1]) == (-signal.SIGINT, [], "KeyboardInterrupt")


@pytest.mark.live
def test_a_handler_of_the_programs_own_is_left_alone(embedded, group):
    heard, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        with PushConsumer(group, name_server=embedded.name_server) as consumer:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            assert consumer.join(1) is False
        assert heard.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_join_says_whether_the_consumer_has_ended(embedded, group):
    with PushConsumer(group, name_server=embedded.name_server) as consumer:
        began = time.monotonic()
        assert consumer.join(0.05) is False
        assert time.monotonic() - began >= 0.05
        assert consumer.join(0) is False
        closer = threading.Timer(0.05, consumer.close)
        closer.start()
        assert consumer.join() is True
        assert consumer.join() is True
        closer.join()


def test_many_threads_join_and_all_see_the_end(embedded, group):
    ended = []
    with PushConsumer(group, name_server=embedded.name_server) as consumer:
        waiters = [threading.Thread(target=lambda: ended.append(consumer.join(WAIT_S))) for _ in range(10)]
        for waiter in waiters:
            waiter.start()
    for waiter in waiters:
        waiter.join(WAIT_S)
    assert ended == [True] * 10


async def test_five_hundred_joins_on_a_loop_leave_nothing(embedded, group):
    async with AsyncPushConsumer(group, name_server=embedded.name_server) as consumer:
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(500):
            assert await consumer.join(0) is False
        gc.collect()
        assert len(gc.get_objects()) - before < 1000
        waits = [asyncio.create_task(consumer.join()) for _ in range(10)]
        for wait in waits[:5]:
            await asyncio.sleep(0)
            wait.cancel()
        await asyncio.sleep(0)
    assert await asyncio.gather(*waits[5:]) == [True] * 5
    assert await consumer.join() is True
async def test_join_before_start_says_what_to_do(embedded, group):
    consumer = PushConsumer(group, name_server=embedded.name_server)
    with pytest.raises(ConsumerClosed, match=r"call start\(\) before join"):
        consumer.join(1)
    consumer.close()
    assert consumer.join() is True
    assert consumer.state is ConsumerState.CLOSED
    with pytest.raises(ConsumerClosed, match=r"call start\(\) before join"):
        await AsyncPushConsumer(group, name_server=embedded.name_server).join(1)
def test_who_joins_without_a_subscription_is_told_once(embedded, topic, group):
    events = Events()
    with PushConsumer(group, name_server=embedded.name_server, on_event=events) as consumer:
        for _ in range(3):
            consumer.join(0)
        assert "subscribe()" in events.wait_for("nothing-subscribed").text
        consumer.join(0.1)
    assert len(events.of("nothing-subscribed")) == 1
    events = Events()
    with PushConsumer(group, name_server=embedded.name_server, on_event=events) as consumer:
        consumer.subscribe(topic, print)
        consumer.join(0.1)
    assert events.of("nothing-subscribed") == []


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_at_any_step_of_a_join_close_works(number):
    """Not even one that comes between two instructions while the wait begins or ends."""
    child = Child("-m", "tests.consumer.lifecycle.joining", str(int(number)))
    try:
        child.wait_for_line("through")
        assert child.ended() == 0
    finally:
        child.process.kill()
    assert len(child.lines) > 20


def test_who_waits_on_a_loop_that_has_ended_disturbs_nobody():
    end = End()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(end.awaited())
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.close()  # the wait has not come to its end
    end.come()
    assert end.wait(0)


def test_sigterm_handlers_nest_and_are_restored():
    told = []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with told_of_sigterm(lambda: told.append("outer")):
        with told_of_sigterm(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert told == ["outer", "inner", "outer"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Terminated) as raised, told_of_sigterm(terminate):
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_change_no_handler():
    def wait():
        with told_of_sigterm(terminate):
            found.append(signal.getsignal(signal.SIGTERM))

    found = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(30)
    assert found == [signal.SIG_DFL]
