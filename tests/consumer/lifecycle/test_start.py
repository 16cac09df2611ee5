"""Starting a consumer: why it fails, that a failed start leaves nothing, and where the next one begins."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyrocket_consumer import (
    AsyncPushConsumer,
    ClientClosed,
    ConnectError,
    ConsumerState,
    OffsetStoreLocked,
)
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, drop
from tests.consumer.lifecycle.programs import run
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import WAIT_S, Events, RecordingListener, until

RUN = asyncio.run

CLUSTER = {"brokers": 2}


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pyrocket-")}


@pytest.fixture
def nothing_is_left(embedded):
    """Fails unless threads and connections of all consumers end. The threads of the cluster have other names."""
    before = ours()  # an earlier test may have left them

    def check() -> None:
        until(lambda: ours() <= before, "threads end")
        nodes = (*embedded.nodes, *embedded.name_server_nodes)
        until(lambda: not any(node.connections for node in nodes), "connections end")

    return check


@pytest.fixture
def stores(tmp_path):
    """Options of a member whose offsets are below this test's directory."""
    return {"message_model": "broadcasting", "offset_store_dir": str(tmp_path)}


# --- failures of a start


@pytest.mark.parametrize("moment", ["before there is a member", "while it looks for its topics"])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_topic_subscribed_to_during_a_start_is_consumed(orders, kind, moment):
    seen, gate = RecordingListener(), Gate()
    for each in (TOPIC, orders.make(queues=1, topic="other")):
        orders.send(each.encode(), topic=each)
    code = None if moment.startswith("before") else RequestCode.GET_ROUTEINFO_BY_TOPIC
    orders.cluster.name_server_node.on(code, gate, times=None)

    def both_come():
        until(lambda: set(seen.bodies) == {b"orders", b"other"}, "both arrive")

    async def subscribes_while_it_starts():
        consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, consume_from="first")
        await consumer.subscribe(TOPIC, seen)
        starting = asyncio.ensure_future(consumer.start())
        await asyncio.to_thread(gate.wait_held, 1)
        await consumer.subscribe("other", seen)
        gate.open()
        await starting
        async with consumer:
            await asyncio.to_thread(both_come)

    if kind == "asyncio":
        asyncio.run(subscribes_while_it_starts())
        return
    consumer = orders.consumer(seen, consume_from="first")
    starting = threading.Thread(target=consumer.start)
    starting.start()
    gate.wait_held(1)
    consumer.subscribe("other", seen)
    gate.open()
    starting.join()
    with consumer:
        both_come()


def test_one_silent_broker_of_two_fails_no_start(orders):
    topics = [orders.make(queues=1, topic=f"orders-{number}") for number in range(20)]
    for code in (RequestCode.HEART_BEAT, RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_CONSUMER_LIST_BY_GROUP):
        orders.cluster.broker("broker-b").on(code, drop, times=None)
    consumer, seen = orders.consumer(), RecordingListener()
    for each in topics:
        consumer.subscribe(each, seen)
    began = time.monotonic()
    with consumer:
        assert time.monotonic() - began < 5 + WAIT_S
        orders.events.wait_for("broker-unreachable")
        for each in topics:
            orders.send(each.encode(), topic=each, broker_name="broker-a")
        seen.wait_for(20)
        consumer.close(1)


def test_a_missing_name_server_is_an_error_for_the_user(orders, nothing_is_left, stores):
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        orders.consumer(name_server="127.0.0.1:1", **stores).start()
    nothing_is_left()
    with orders.consumer(**stores) as consumer:
        assert consumer.client_id.endswith("@DEFAULT")


async def test_a_consumer_starts_once(orders):
    consumer = orders.consumer()
    with consumer, consumer:
        assert consumer.state is ConsumerState.RUNNING
        with pytest.raises(ClientClosed, match="cannot be started again"):
            consumer.start()
    with pytest.raises(ClientClosed, match="cannot be started again"), consumer:
        pass
    consumer.close()
    consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server)
    async with consumer:
        pass
    with pytest.raises(ClientClosed, match="cannot be started again"):
        async with consumer:
            pass


# --- nothing is left


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(orders, nothing_is_left, stores):
    orders.make(queues=4)

    async def main():
        started = 0
        for step in range(1000):
            consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, **stores)
            await consumer.subscribe(TOPIC, print)
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
        raise AssertionError("no start succeeded")

    asyncio.run(main())
    nothing_is_left()


async def test_a_start_that_takes_too_long_for_its_caller(orders, nothing_is_left, stores):
    name_server = orders.cluster.name_server_node
    name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, **stores)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consumer.start(), 0.2)
    name_server.clear_faults()
    async with consumer:  # nothing is left of the start, and it may be tried again
        assert consumer.client_id.endswith("@DEFAULT")
    with pytest.raises(ClientClosed, match="cannot be started again"):
        await consumer.start()
    nothing_is_left()


def test_a_close_while_it_starts_ends_the_start(orders, nothing_is_left):
    orders.cluster.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    consumer = orders.consumer()
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(consumer.start)
        until(ours, "it starts")
        consumer.close()
        with pytest.raises(ClientClosed):
            starting.result(WAIT_S)
    assert consumer.state is ConsumerState.CLOSED
    nothing_is_left()


@pytest.mark.slow("a close waits 5 s for a store")
def test_a_store_that_hangs_is_closed_when_it_has_loaded(orders, nothing_is_left, caplog):
    """The close of its consumer does not wait until then."""
    store, loads, closed = MemoryOffsetStore(), threading.Event(), threading.Event()
    store.load, store.close = loads.wait, closed.set
    consumer = orders.consumer(offset_store=store)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(consumer.start)
        until(ours, "it starts")
        time.sleep(1)
        consumer.close()
        assert "has not closed within" in caplog.text
        with pytest.raises(ClientClosed):
            starting.result(WAIT_S)
        assert not closed.is_set()
        loads.set()
        assert closed.wait(WAIT_S)
    nothing_is_left()


INTERRUPTED = """
options = {"message_model": "broadcasting", "offset_store_dir": rest[0]}
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
    wait_until(lambda: not any(thread.name.startswith("pyrocket-") for thread in threading.enumerate()), lambda: step)
print("through after", step)
"""


@pytest.mark.live
def test_ctrl_c_at_any_line_of_a_start_leaves_nothing(orders, nothing_is_left, tmp_path):
    child = run(orders.cluster, INTERRUPTED, tmp_path)
    assert child.ended(240) == 0, child.errors[-10:]
    assert int(child.lines[-1].split()[-1]) > 10
    nothing_is_left()


STEPPED = """
import faulthandler, gc
from tests.stepping import at_each_moment, forget_unstarted_threads, interrupted_at
(handler,) = rest

def interrupt(moment):
    consumer = PushConsumer(group, name_server=name_server)
    consumer.subscribe(topic, handle)
    was_there = False

    def handled():
        nonlocal was_there
        was_there = True
        if handler == "Ctrl-C":
            raise KeyboardInterrupt
        consumer.close()

    faulthandler.dump_traceback_later(30, exit=True)  # if a call hangs
    try:
        interrupted_at(moment, consumer.start, handled)
    except (ClientClosed, KeyboardInterrupt, RuntimeError):
        pass
    consumer.close()
    return was_there

moments = at_each_moment(interrupt, stride=2)
faulthandler.cancel_dump_traceback_later()
forget_unstarted_threads()
gc.collect()
wait_until(lambda: not any(thread.name.startswith("pyrocket-") for thread in threading.enumerate()))
print("through after", moments)
"""


@pytest.mark.live
@pytest.mark.slow("interrupts a start at many moments")
@pytest.mark.parametrize("handler", ["Ctrl-C", "close"])
def test_a_signal_may_interrupt_a_start_at_any_moment(orders, nothing_is_left, handler):
    """Also between two instructions of the standard library. The handler and the start end soon."""
    child = run(orders.cluster, STEPPED, handler)  # a process of its own: Ctrl-C in a finalizer confuses Python 3.11
    assert child.ended(240) == 0, child.errors[-10:]
    assert int(child.lines[-1].split()[-1]) > 100
    nothing_is_left()


HANGS = """
from pyrocket_consumer.offsets import MemoryOffsetStore

called = threading.Event()

def hang(*arguments):
    tell(b"hangs")
    called.set()
    threading.Event().wait()

store, (method,) = MemoryOffsetStore(), rest
setattr(store, method, hang)
consumer = PushConsumer(group, name_server=name_server, offset_store=store, consume_from="first")
consumer.subscribe(topic, handle)
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
def test_a_store_that_hangs_keeps_no_process_from_ending(orders, subtests):
    orders.send(b"x")
    began = time.monotonic()
    methods = ("load", "persist_all", "read_offset", "close")
    children = {each: run(orders.cluster, HANGS, each, group=each) for each in methods}
    for method, child in children.items():
        with subtests.test(method):
            child.ended(60)
            assert "hangs" in child.lines
            assert time.monotonic() - began < 40


# --- one process replaces another


PROCESS = """
base, pause_s, instance = rest

def listen(message):
    if message.body == b"slow":
        tell(b"slow begun")
        time.sleep(float(pause_s))
    handle(message)

def on_event(event):
    if event.kind == "store-slot":
        tell(b"told: " + str(event).encode())

options = {"message_model": "broadcasting", "offset_store_dir": base, "consume_from": "first", "on_event": on_event}
consumer = PushConsumer(group, name_server=name_server, instance_name=instance, **options)
consumer.subscribe(topic, listen)
with consumer:
    tell(b"started " + consumer.client_id.encode())
    consumer.join()
"""


def client_of(child):
    child.wait(lambda lines: any(line.startswith("started ") for line in lines))
    return next(line.split()[1] for line in child.lines if line.startswith("started "))


@pytest.mark.live
@pytest.mark.slow("one process waits for a call of another")
@pytest.mark.parametrize("instance", ["DEFAULT", "named"])
def test_a_process_continues_where_the_closing_one_ends(orders, tmp_path, instance):
    """The old process handles a slow message while the new one starts. The new one waits for it."""
    orders.make(queues=2)
    orders.fill(1000)
    old = run(orders.cluster, PROCESS, tmp_path, 2.0, instance)
    assert client_of(old).endswith("@" + instance)
    old.wait(lambda lines: sum(old.bodies.values()) == 1000)
    orders.send(b"slow")
    old.wait_for_line("slow begun")
    old.send(signal.SIGTERM)
    time.sleep(0.5)
    new = run(orders.cluster, PROCESS, tmp_path, 0.0, instance)
    try:
        assert client_of(new).endswith("@" + instance)
        assert "slow" in old.lines, "the new process waited for it"
        orders.fill(10, start=1000)
        new.wait(lambda lines: sum(new.bodies.values()) >= 10)
        assert sum(new.bodies.values()) == 10, "no message is repeated"
        assert not [line for line in new.lines if line.startswith("told")]
        assert old.ended() == 0
    finally:
        for child in (old, new):
            child.process.kill()
            child.ended()


def test_an_event_reports_another_slot(orders, stores):
    events = Events()
    with orders.consumer(**stores) as first, orders.consumer(on_event=events, **stores) as second:
        assert second.client_id == f"{first.client_id}-1"
        event = events.wait_for("store-slot")
        assert first.client_id in event.text
        assert "instance_name" in event.text
    assert orders.events.of("store-slot") == []


def test_an_event_reports_a_slot_behind_one_in_use(orders, tmp_path, stores):
    """When processes overlap, the one that ends first leaves the first slot, and another process begins with it."""
    seen, seen_by_second = RecordingListener(), RecordingListener()
    first, second = orders.consumer(seen, **stores), orders.consumer(seen_by_second, **stores, commit_interval_s=0.05)
    with first:
        second.start()
        orders.send(b"x")
        seen.wait_for(1)
        seen_by_second.wait_for(1)
    for path in tmp_path.rglob("*"):
        if path.parent.match(f"*@DEFAULT/{GROUP}"):
            os.utime(path, (time.time() - 3600, time.time() - 3600))
    with second:
        orders.send(b"y")
        seen_by_second.wait_for(2)
        until(lambda: all(each.persisted == each.committed for each in second.progress().values()), "all is stored")
        with orders.consumer(**stores, on_event=(events := Events())) as third:
            assert third.client_id == first.client_id
            assert "was last written 36" in events.wait_for("store-slot").text
            assert second.client_id in events.wait_for("store-slot").text


def test_a_named_instance_that_runs_is_not_waited_for(orders, stores):
    options = {**stores, "instance_name": "mine"}
    with orders.consumer(**options):
        began = time.monotonic()
        with pytest.raises(OffsetStoreLocked, match="this process"):
            orders.consumer(**options).start()
        assert time.monotonic() - began < 5
    with orders.consumer(**options):
        pass
