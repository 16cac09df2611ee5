"""Slow or silent brokers: starts, hand-overs and closes take only the necessary time, and report what failed."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumerState, MessageQueue, PushConsumer, sql
from pyrocket_consumer.errors import BrokerError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, delay, drop
from tests.consumer.orders import GROUP, TOPIC, Orders, request_matcher
from tests.consuming import RecordingListener, numbered, until

CLUSTER = {"brokers": 2, "long_poll_tick_s": 5.0, "settings": {"enablePropertyFilter": True}}


@pytest.fixture
def silent(embedded):
    """A broker that sends no response after `silence()`."""
    return embedded.broker("broker-b")


def silence(broker, *codes: RequestCode) -> None:
    for code in codes or RequestCode:
        broker.on(code, drop, times=None)


def seconds(work) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# --- start


def test_a_start_waits_seconds_only_for_a_silent_broker(orders, silent):
    """It consumes from the other brokers."""
    seen, consumer = RecordingListener(), orders.consumer(consume_from="first")
    for number in range(20):
        topic = orders.make(2, f"orders-{number}")
        orders.fill(8, topic=topic)
        consumer.subscribe(topic, seen)
    silence(silent)
    assert seconds(consumer.start) < 15
    with consumer:
        assert consumer.state is ConsumerState.RUNNING
        seen.wait(lambda seen: len(seen.messages) >= 20 * 4)
        orders.events.wait_for("broker-unreachable")
        silent.clear_faults()
        seen.wait(lambda seen: len(seen.messages) >= 20 * 8)
    assert set(seen.counts.values()) == {1}


def test_members_that_join_one_after_the_other_all_start(orders):
    """Hundreds of queues begin, and each member rebalances whenever another one joins."""
    orders.make(queues=250)
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        starts = []
        for number in range(4):
            consumer = orders.consumer(RecordingListener(), instance_name=f"number-{number}")
            starts.append(threads.submit(consumer.start))
            stack.callback(consumer.close)
            time.sleep(0.35)
        consumers = [start.result(60) for start in starts]

        def all_is_held() -> bool:
            held = [{queue for queue in each.progress() if queue.topic == TOPIC} for each in consumers]
            return len(set().union(*held)) == 500 and sum(map(len, held)) == 500

        until(all_is_held, "each queue has one owner")


def with_expression(orders) -> PushConsumer:
    consumer = orders.consumer(call_timeout_s=1)
    consumer.subscribe(TOPIC, RecordingListener(), sql("number > 3"))
    return consumer


@pytest.mark.parametrize("trouble", [drop, answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")], ids=["lost", "busy"])
def test_the_brokers_that_respond_check_an_sql_expression(orders, broker, silent, trouble):
    """The others check it before the first pull, because a pull with an invalid expression would return everything."""
    check = RequestCode.CHECK_CLIENT_CONFIG
    silent.forget_requests()
    broker.on(check, answer(0), times=None)  # embedded brokers do not evaluate any
    silent.on(check, trouble, times=3)
    silent.on(check, answer(0), times=None)
    with with_expression(orders):
        broker.wait_for(RequestCode.PULL_MESSAGE, when=request_matcher())
        (pull, *_) = silent.wait_for(RequestCode.PULL_MESSAGE, when=request_matcher())
        checks = silent.requests(check)
        assert len(checks) == 4
        assert checks[-1].at_s <= pull.at_s


def test_an_sql_expression_that_one_broker_refuses_is_an_error(orders, silent):
    """Although another broker does not respond."""
    silence(silent)
    with pytest.raises(BrokerError, match="SQL92"):
        with_expression(orders).start()


# --- close


@pytest.mark.parametrize("is_new", [True, False], ids=["a new group", "a group with offsets"])
def test_a_hundred_queues_close_quickly_at_a_slow_broker(embedded, broker, is_new):
    orders = Orders(embedded, 100, brokers=["broker-a"])
    orders.fill(100, broker_name="broker-a")
    if not is_new:
        broker.commit(GROUP, TOPIC, {0: 0, 1: 1})
    seen = RecordingListener()
    with orders.consumer(seen, consume_from="first") as consumer:
        seen.wait(lambda seen: len(seen.messages) >= 100 - (not is_new))
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, delay(0.05), times=None)
        assert seconds(consumer.close) < 2.5, "100 sequential responses of 50 ms take 5 s"
    assert sum(orders.committed.values()) == 100


@pytest.mark.parametrize("codes", [[RequestCode.UPDATE_CONSUMER_OFFSET], []], ids=["commits", "everything"])
def test_a_close_ends_in_time_and_reports_unstored_offsets(embedded, silent, codes):
    orders = Orders(embedded, 50, brokers=["broker-b"])
    orders.fill(50, broker_name="broker-b")
    seen = RecordingListener()
    consumer = orders.consumer(seen, consume_from="first").start()
    seen.wait_for(50)
    silence(silent, *codes)
    assert seconds(lambda: consumer.close(timeout_s=2)) < 10

    def reported_queues() -> set[MessageQueue | None]:
        return {event.queue for event in orders.events.of("commit-failed") if "final" in event.text}

    until(lambda: {message.queue for message in seen.messages} <= reported_queues(), "each is reported")
    assert consumer.state is ConsumerState.CLOSED


def test_a_silent_broker_keeps_no_local_store_open(orders, broker, tmp_path):
    """The next consumer of the process can open the store, because its lock was released."""
    seen, again = RecordingListener(), RecordingListener()
    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "call_timeout_s": 4.0}
    orders.send(b"first")
    first = orders.consumer(seen, consume_from="first", **options).start()
    seen.wait_for(1)
    broker.on(None, drop, times=None)
    first.close(0)
    broker.clear_faults()
    orders.send(b"second")
    with orders.consumer(again, consume_from="first", **options) as second:
        assert second.client_id == first.client_id
        again.wait_for(1)
    assert again.bodies == [b"second"]


# --- moving


@pytest.mark.parametrize("trouble", [drop, answer(1, "no")], ids=["lost", "refused"])
def test_a_reset_completes_although_its_caller_stopped_waiting(embedded, broker, trouble):
    """It completes when the broker is up again."""
    orders = Orders(embedded, brokers=["broker-a"])
    orders.fill(10, broker_name="broker-a")
    seen = RecordingListener()

    async def scenario() -> None:
        consumer = AsyncPushConsumer(GROUP, name_server=embedded.name_server, consume_from="first", call_timeout_s=0.5)
        await consumer.subscribe(TOPIC, seen)
        async with consumer:
            await asyncio.to_thread(seen.wait_for, 10)
            broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, trouble, times=None)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.reset_offsets(TOPIC, "earliest"), 1)
            broker.clear_faults()
            await asyncio.to_thread(seen.wait, lambda seen: len(seen.messages) >= 20)
            orders.fill(5, 10, broker_name="broker-a")
            await asyncio.to_thread(seen.wait_for, 15)
            assert consumer.state is ConsumerState.RUNNING

    asyncio.run(scenario())
    assert sorted(seen.bodies[:20]) == sorted(numbered(10) * 2)
