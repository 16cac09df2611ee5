"""Brokers that are slow or silent: starts, hand-overs and closes take no longer than need be, and say what is left."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pyrocket_consumer import ConsumerState, MessageQueue, PushConsumer, sql
from pyrocket_consumer.errors import BrokerError
from pyrocket_consumer.testing import answer, delay, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import Events, Seen, numbered, until

CLUSTER = {"brokers": 2, "long_poll_tick_s": 5.0, "settings": {"enablePropertyFilter": True}}


@pytest.fixture
def silent(embedded):
    """A broker that answers nothing, once `silence()` is called."""
    return embedded.broker("broker-b")


def silence(broker) -> None:
    for code in RequestCode:
        broker.on(code, drop, times=None)


def consumer_of(cluster, group, **options) -> PushConsumer:
    return PushConsumer(group, **{"name_server": cluster.name_server, "consume_from": "first", **options})


def seconds(work) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# --- start


def test_a_start_waits_a_few_seconds_for_a_silent_broker_and_consumes_from_the_others(orders, silent):
    topics = [f"{GROUP}-{number}" for number in range(20)]
    for TOPIC in topics:
        orders.make(queues=2)
        orders.fill(8)
    silence(silent)
    events, seen = Events(), Seen()
    consumer = consumer_of(orders.cluster, GROUP)
    for TOPIC in topics:
        consumer.subscribe(TOPIC, seen)
    took_s = seconds(consumer.start)
    try:
        assert took_s < 15
        assert consumer.state is ConsumerState.RUNNING
        seen.wait(lambda seen: len(seen.messages) >= 20 * 4)
        events.wait_for("broker-unreachable")
        silent.clear_faults()
        seen.wait(lambda seen: len(seen.messages) >= 20 * 8)
    finally:
        consumer.close()
    assert set(seen.places.values()) == {1}


def test_members_that_join_one_after_the_other_all_start(orders):
    """While brokers have hundreds of queues to be begun, and everybody looks again whenever another joins."""
    orders.make(queues=100)
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        starts = []
        for number in range(4):
            consumer = consumer_of(orders.cluster, GROUP, instance_name=f"number-{number}")
            consumer.subscribe(TOPIC, lambda message: None)
            starts.append(threads.submit(consumer.start))
            stack.callback(consumer.close)
            threading.Event().wait(0.35)
        consumers = [start.result(60) for start in starts]

        def all_is_held() -> bool:
            held = [{queue for queue in each.progress() if queue.topic == TOPIC} for each in consumers]
            return len(set().union(*held)) == 200 and sum(map(len, held)) == 200

        until(all_is_held, "each queue is held by one")


@pytest.mark.parametrize("trouble", [drop, answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")], ids=["lost", "busy"])
def test_an_sql_expression_is_judged_by_the_brokers_that_answer(orders, broker, silent, trouble):
    """The others look at it before they are first pulled from: a pull with a bad one would bring everything."""

    def of_topic(command) -> bool:
        return command.fields.get("topic") == TOPIC

    silent.forget_requests()
    broker.on(RequestCode.CHECK_CLIENT_CONFIG, answer(0), times=None)  # orders.cluster brokers do not evaluate any
    silent.on(RequestCode.CHECK_CLIENT_CONFIG, trouble, times=3)
    silent.on(RequestCode.CHECK_CLIENT_CONFIG, answer(0), times=None)
    consumer = consumer_of(orders.cluster, GROUP, call_timeout_s=1)
    consumer.subscribe(TOPIC, lambda message: None, sql("number > 3"))
    with consumer:
        broker.wait_for(RequestCode.PULL_MESSAGE, when=of_topic)
        (pull, *_) = silent.wait_for(RequestCode.PULL_MESSAGE, when=of_topic)
        checks = silent.requests(RequestCode.CHECK_CLIENT_CONFIG)
        assert len(checks) == 4
        assert checks[-1].at_s <= pull.at_s


def test_an_sql_expression_that_a_broker_refuses_is_an_error_although_another_does_not_answer(orders, silent):
    silence(silent)
    consumer = consumer_of(orders.cluster, GROUP, call_timeout_s=1)
    consumer.subscribe(TOPIC, lambda message: None, sql("number > 3"))
    with pytest.raises(BrokerError, match="SQL92"):
        consumer.start()


# --- close


@pytest.mark.parametrize("before", ["a new group", "a group with offsets"])
def test_a_hundred_queues_close_quickly_at_a_slow_broker(orders, broker, before):
    orders.cluster.create_topic(TOPIC, queues=100, brokers=["broker-a"])
    orders.send(b"x", count=100, broker_name="broker-a")
    if before == "a GROUP with offsets":
        broker.commit(GROUP, TOPIC, {0: 0, 1: 1})
    seen = Seen()
    consumer = consumer_of(orders.cluster, GROUP)
    consumer.subscribe(TOPIC, seen)
    with consumer:
        seen.wait(lambda seen: len(seen.messages) >= 100 - (before != "a new GROUP"))
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, delay(0.05), times=None)
        took_s = seconds(consumer.close)
    assert took_s < 2.5, "100 answers of 50 ms one after the other take 5 s"
    assert sum(orders.committed.values()) == 100


@pytest.mark.parametrize("codes", ["commits", "everything"])
def test_a_close_ends_in_time_whatever_brokers_do_and_says_what_is_not_stored(orders, silent, codes):
    orders.cluster.create_topic(TOPIC, queues=50, brokers=["broker-b"])
    orders.send(b"x", count=50, broker_name="broker-b")
    events, seen = Events(), Seen()
    consumer = consumer_of(orders.cluster, GROUP)
    consumer.subscribe(TOPIC, seen)
    consumer.start()
    seen.wait(lambda seen: len(seen.messages) >= 50)
    busy = {message.queue for message in seen.messages}
    if codes == "commits":
        silent.on(RequestCode.UPDATE_CONSUMER_OFFSET, drop, times=None)
    else:
        silence(silent)
    assert seconds(lambda: consumer.close(timeout_s=2)) < 10

    def told() -> set[MessageQueue | None]:
        return {event.queue for event in events.of("commit-failed") if "final" in event.text}

    until(lambda: busy <= told(), "each is told")
    assert consumer.state is ConsumerState.CLOSED


# --- moving


@pytest.mark.parametrize("trouble", [drop, answer(1, "no")], ids=["lost", "refused"])
def test_a_reset_whose_caller_lost_patience_is_made_when_the_broker_is_back(orders, broker, trouble):
    orders.cluster.create_topic(TOPIC, queues=1, brokers=["broker-a"])
    orders.send(lambda number: b"m%d" % number, count=10, broker_name="broker-a")
    seen = Seen()

    async def scenario() -> None:
        consumer = Asyncorders.consumer(consume_from="first", call_timeout_s=0.5)
        await consumer.subscribe(TOPIC, seen)
        async with consumer:
            await asyncio.to_thread(seen.wait_for, 10)
            broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, trouble, times=None)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.reset_offsets(TOPIC, "earliest"), 1)
            broker.clear_faults()
            await asyncio.to_thread(seen.wait, lambda seen: len(seen.messages) >= 20)
            orders.send(lambda number: b"n%d" % number, count=5, broker_name="broker-a")
            await asyncio.to_thread(seen.wait_for, 15)
            assert consumer.state is ConsumerState.RUNNING

    asyncio.run(scenario())
    assert sorted(seen.bodies[:20]) == sorted(numbered(10) * 2)
