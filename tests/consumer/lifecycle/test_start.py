"""Starting a consumer: what it fails for, that nothing is left of a start that does, and where the next one begins."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from pyrocket_consumer import (
    AsyncPushConsumer,
    ConnectError,
    ConsumerClosed,
    ConsumerState,
    OffsetStoreLocked,
    PushConsumer,
)
from pyrocket_consumer.testing import Gate, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.processes import Child
from tests.consuming import WAIT_S, Events, Seen, until
from tests.resetting import fill

RUN = asyncio.run

CLUSTER = {"brokers": 2}


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pyrocket-")}


@pytest.fixture
def before():
    """The threads that were there before the test: some other may have left them."""
    return ours()


def nothing_is_left(embedded, before) -> None:
    """Fails unless threads and connections of all consumers end. Those of the cluster are called otherwise."""
    until(lambda: ours() <= before, "threads end")
    nodes = (*embedded.nodes, *embedded.name_server_nodes)
    until(lambda: not any(node.connections for node in nodes), "connections end")


def broadcasting(embedded, group, base, **options):
    return {
        "group": group,
        "name_server": embedded.name_server,
        "message_model": "broadcasting",
        "offset_store_dir": str(base),
        **options,
    }


# --- what fails, and what does not


@pytest.mark.parametrize("moment", ["before there is a member", "while it looks for its topics"])
@pytest.mark.parametrize("kind", [PushConsumer, AsyncPushConsumer])
def test_what_is_subscribed_to_while_it_starts_is_consumed(embedded, topic, names, group, kind, moment):
    other, seen, gate = names.topic(), Seen(), Gate()
    for each in (topic, other):
        embedded.create_topic(each, queues=1)
        embedded.send(each, each.encode())
    code = None if moment.startswith("before") else RequestCode.GET_ROUTEINFO_BY_TOPIC
    embedded.name_server_node.on(code, gate, times=None)
    consumer = kind(group, name_server=embedded.name_server, consume_from="first")

    async def subscribes_while_it_starts():
        await consumer.subscribe(topic, seen)
        starting = asyncio.ensure_future(consumer.start())
        await asyncio.to_thread(gate.wait_held, 1)
        await consumer.subscribe(other, seen)
        gate.open()
        await starting
        try:
            await asyncio.to_thread(until, lambda: set(seen.bodies) == {topic.encode(), other.encode()}, "both come")
        finally:
            await consumer.close()

    def subscribes_while_another_thread_starts():
        consumer.subscribe(topic, seen)
        starting = threading.Thread(target=consumer.start)
        starting.start()
        gate.wait_held(1)
        consumer.subscribe(other, seen)
        gate.open()
        starting.join()
        with consumer:
            until(lambda: set(seen.bodies) == {topic.encode(), other.encode()}, "both come")

    if kind is AsyncPushConsumer:
        asyncio.run(subscribes_while_it_starts())
    else:
        subscribes_while_another_thread_starts()


def test_one_silent_broker_of_two_fails_no_start(embedded, topic, group):
    for number in range(20):
        embedded.create_topic(f"{topic}-{number}", queues=1)
    embedded.broker("broker-b").on(RequestCode.HEART_BEAT, drop, times=None)
    embedded.broker("broker-b").on(RequestCode.QUERY_CONSUMER_OFFSET, drop, times=None)
    embedded.broker("broker-b").on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, drop, times=None)
    events, seen = Events(), Seen()
    consumer = PushConsumer(group, name_server=embedded.name_server, on_event=events)
    for number in range(20):
        consumer.subscribe(f"{topic}-{number}", seen)
    began = time.monotonic()
    with consumer:
        assert time.monotonic() - began < 5 + WAIT_S
        events.wait_for("broker-unreachable")
        for number in range(20):
            embedded.send(f"{topic}-{number}", b"m%d" % number, broker_name="broker-a")
        seen.wait_for(20)
        consumer.close(1)


def test_a_name_server_that_is_not_there_is_the_users_to_mend(embedded, before, group, tmp_path):
    options = broadcasting(embedded, group, tmp_path, name_server="127.0.0.1:1")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        PushConsumer(**options).start()
    nothing_is_left(embedded, before)
    with PushConsumer(**broadcasting(embedded, group, tmp_path)) as consumer:
        assert consumer.client_id.endswith("@DEFAULT")


async def test_a_consumer_starts_once(embedded, group):
    consumer = PushConsumer(group, name_server=embedded.name_server)
    with consumer, consumer:
        assert consumer.state is ConsumerState.RUNNING
        with pytest.raises(ConsumerClosed, match="cannot be started again"):
            consumer.start()
    with pytest.raises(ConsumerClosed, match="cannot be started again"), consumer:
        pass
    consumer.close()
    consumer = AsyncPushConsumer(group, name_server=embedded.name_server)
    async with consumer:
        pass
    with pytest.raises(ConsumerClosed, match="cannot be started again"):
        async with consumer:
            pass
# --- nothing is left


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(embedded, before, topic, group, tmp_path):
    embedded.create_topic(topic, queues=4)

    async def main():
        started = 0
        for step in range(1000):
            consumer = AsyncPushConsumer(**broadcasting(embedded, group, tmp_path))
            await consumer.subscribe(topic, print)
            starting = asyncio.create_task(consumer.start())
            await asyncio.sleep(step * 0.0002)
            starting.cancel()
            try:
                await starting
            except asyncio.CancelledError:
                assert consumer.state in (ConsumerState.CLOSED, ConsumerState.CREATED)
            else:
                assert consumer.client_id.endswith("@DEFAULT"), f"after {step} starts that were cancelled"
                started += 1
            await consumer.close()
            if started == 5:
                return
        raise AssertionError("no start came to its end")

    asyncio.run(main())
    nothing_is_left(embedded, before)


async def test_a_start_that_takes_too_long_for_its_caller(embedded, before, topic, group, tmp_path):
    name_server = embedded.name_server_nodes[0]
    name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    consumer = AsyncPushConsumer(**broadcasting(embedded, group, tmp_path))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consumer.start(), 0.2)
    name_server.clear_faults()
    async with consumer:  # nothing is left of it, and it may be tried again
        assert consumer.client_id.endswith("@DEFAULT")
    with pytest.raises(ConsumerClosed, match="cannot be started again"):
        await consumer.start()
    nothing_is_left(embedded, before)


def test_a_close_while_it_starts_ends_the_start(embedded, before, group):
    embedded.name_server_nodes[0].on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    consumer, errors = PushConsumer(group, name_server=embedded.name_server), []

    def start():
        try:
            consumer.start()
        except ConsumerClosed as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    until(ours, "it starts")
    consumer.close()
    starter.join(WAIT_S)
    assert len(errors) == 1
    assert consumer.state is ConsumerState.CLOSED
    nothing_is_left(embedded, before)


INTERRUPTED = """
import os, signal, sys, threading, time
from pyrocket_consumer import PushConsumer
name_server, topic, group, base = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
options = {"message_model": "broadcasting", "offset_store_dir": base}
started = step = 0
while started < 3:
    step += 1
    consumer = PushConsumer(group, name_server=name_server, **options)
    consumer.subscribe(topic, print)
    lines = 0

    def trace(frame, event, argument):
        global lines
        if "pyrocket_consumer" not in frame.f_code.co_filename:
            return None
        lines += 1
        if lines == step:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        consumer.start()
    except KeyboardInterrupt:
        sys.settrace(None)
    else:
        sys.settrace(None)
        started += 1
        assert consumer.client_id.endswith("@DEFAULT"), (step, consumer.client_id)
    consumer.close()
    deadline = time.monotonic() + 30
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("pyrocket-")]:
        assert time.monotonic() < deadline, (step, left)
        time.sleep(0.001)
print("through after", step)
"""


@pytest.mark.live
def test_ctrl_c_at_any_line_of_a_start_leaves_nothing(embedded, before, topic, group, tmp_path):
    child = Child("-c", INTERRUPTED, embedded.name_server, topic, group, str(tmp_path))
    assert child.ended(240) == 0, child.errors[-10:]
    assert int(child.lines[-1].split()[-1]) > 10
    nothing_is_left(embedded, before)


HANGS = """
import sys, threading
from pyrocket_consumer import PushConsumer
from pyrocket_consumer.offsets import MemoryOffsetStore
name_server, topic, group, method = sys.argv[1:]

called = threading.Event()

def hang(*arguments):
    print("hangs", flush=True)
    called.set()
    threading.Event().wait()

store = MemoryOffsetStore()
setattr(store, method, hang)
consumer = PushConsumer(group, name_server=name_server, offset_store=store, consume_from="first")
consumer.subscribe(topic, print)
if method != "load":
    consumer.start()
    try:
        consumer.close(0.1)
    except Exception as error:
        print(type(error).__name__, flush=True)
else:
    threading.Thread(target=consumer.start, daemon=True).start()
    called.wait()
"""


@pytest.mark.live
@pytest.mark.slow("a close waits 10 s for a store that hangs")
def test_a_store_that_hangs_keeps_no_process_from_ending(embedded, topic, subtests):
    embedded.send(topic, b"x")
    began = time.monotonic()
    methods = ("load", "persist_all", "read_offset", "close")
    children = {each: Child("-c", HANGS, embedded.name_server, topic, each, each) for each in methods}
    for method, child in children.items():
        with subtests.test(method):
            child.ended(60)
            assert "hangs" in child.lines
            assert time.monotonic() - began < 40


# --- one process takes another's place


PROCESS = """
import os, signal, sys, threading, time
from pyrocket_consumer import PushConsumer
name_server, topic, group, base, pause_s, instance = sys.argv[1:]

def handle(message):
    if message.body == b"slow":
        os.write(1, b"slow begun\\n")
        time.sleep(float(pause_s))
    os.write(1, message.body + bytes([10]))

def tell(event):
    if event.kind == "store-slot":
        os.write(1, b"told: " + str(event).encode() + bytes([10]))

options = {"message_model": "broadcasting", "offset_store_dir": base, "consume_from": "first", "on_event": tell}
consumer = PushConsumer(group, name_server=name_server, instance_name=instance, **options)
consumer.subscribe(topic, handle)
with consumer:
    os.write(1, b"started " + consumer.client_id.encode() + bytes([10]))
    consumer.join()
"""


def process(embedded, topic, group, base, pause_s=0.0, instance="DEFAULT"):
    child = Child("-c", PROCESS, embedded.name_server, topic, group, str(base), str(pause_s), instance)
    return child


def client_of(child):
    child.wait(lambda lines: any(line.startswith("started ") for line in lines))
    return next(line.split()[1] for line in child.lines if line.startswith("started "))


@pytest.mark.live
@pytest.mark.slow("one process waits for a call of another")
@pytest.mark.parametrize("instance", ["DEFAULT", "named"])
def test_a_process_goes_on_where_the_one_that_is_closing_ends(embedded, topic, group, tmp_path, instance):
    """The old one has a slow message in hand while the new one starts: it is waited for."""
    fill(embedded, topic, 1000, queues=2)
    old = process(embedded, topic, group, tmp_path, 2.0, instance)
    assert client_of(old).endswith("@" + instance)
    old.wait(lambda lines: sum(old.bodies.values()) == 1000)
    embedded.send(topic, b"slow")
    old.wait_for_line("slow begun")
    old.send(signal.SIGTERM)
    time.sleep(0.5)
    new = process(embedded, topic, group, tmp_path, 0.0, instance)
    try:
        assert client_of(new).endswith("@" + instance)
        assert "slow" in old.lines, "it was waited for"
        embedded.send(topic, lambda number: b"m-new%d" % number, count=10)
        new.wait(lambda lines: sum(new.bodies.values()) >= 10)
        assert sum(new.bodies.values()) == 10, "nothing is repeated"
        assert not [line for line in new.lines if line.startswith("told")]
        assert old.ended() == 0
    finally:
        for child in (old, new):
            child.process.kill()
            child.ended()


def test_who_gets_another_slot_is_told(embedded, topic, group, tmp_path):
    first_events, second_events = Events(), Events()
    first = PushConsumer(**broadcasting(embedded, group, tmp_path, on_event=first_events))
    second = PushConsumer(**broadcasting(embedded, group, tmp_path, on_event=second_events))
    with first, second:
        assert second.client_id == f"{first.client_id}-1"
        told = second_events.wait_for("store-slot")
        assert first.client_id in told.text
        assert "instance_name" in told.text
    assert first_events.of("store-slot") == []


def test_who_finds_its_slot_behind_one_in_use_is_told(embedded, topic, group, tmp_path):
    """Of processes that overlap, the one that ended first has left the first slot, and somebody begins with it."""
    first = PushConsumer(**broadcasting(embedded, group, tmp_path))
    second = PushConsumer(**broadcasting(embedded, group, tmp_path, commit_interval_s=0.05))
    seen, seen_by_second = Seen(), Seen()
    first.subscribe(topic, seen)
    second.subscribe(topic, seen_by_second)
    with first:
        second.start()
        embedded.send(topic, b"x")
        seen.wait_for(1)
        seen_by_second.wait_for(1)
    for directory, _, names in os.walk(tmp_path):
        if directory.endswith(f"@DEFAULT/{group}"):
            for name in names:
                os.utime(os.path.join(directory, name), (time.time() - 3600, time.time() - 3600))
    with second:
        embedded.send(topic, b"y")
        seen_by_second.wait_for(2)
        until(lambda: all(each.persisted == each.committed for each in second.progress().values()), "all is stored")
        events = Events()
        with PushConsumer(**broadcasting(embedded, group, tmp_path, on_event=events)) as third:
            assert third.client_id == first.client_id
            assert "was last written 36" in events.wait_for("store-slot").text
            assert second.client_id in events.wait_for("store-slot").text


def test_a_named_instance_that_runs_is_not_waited_for(embedded, group, tmp_path):
    options = broadcasting(embedded, group, tmp_path, instance_name="mine")
    with PushConsumer(**options):
        began = time.monotonic()
        with pytest.raises(OffsetStoreLocked, match="this process"):
            PushConsumer(**options).start()
        assert time.monotonic() - began < 5
    with PushConsumer(**options):
        pass
