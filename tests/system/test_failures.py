"""What must not fail and does: the consumer says so, its calls raise, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumerState, OffsetStoreError, PushConsumer, RocketError
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.testing import Gate, answer, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import QUICK, WAIT_S, Events, Seen, consuming, numbered, quick, until

OPTIONS = {"commit_interval_s": 0.05, "pull_hold_s": 0.2}


def fill(cluster, topic, count, start=0, **options):
    cluster.send(topic, lambda number: b"m%d" % (start + number), count=count, **options)


def consumer_of(cluster, group, **options):
    return PushConsumer(group, name_server=cluster.name_server, **{**QUICK, **OPTIONS, **options})


class Broken(MemoryOffsetStore):
    """A store of the user's that raises what no store should, in some of its methods, as soon as it is told to."""

    def __init__(self, methods: str, error: BaseException) -> None:
        super().__init__()
        self.breaks = False
        self.closed = threading.Event()
        self._methods, self._error = methods.split(), error

    def _check(self, method: str) -> None:
        if self.breaks and method in self._methods:
            raise self._error

    def load(self):
        self._check("load")
        super().load()

    def update_offset(self, mq, offset, increase_only=False):
        self._check("update_offset")
        super().update_offset(mq, offset, increase_only)

    def read_offset(self, mq, read_type):
        self._check("read_offset")
        return super().read_offset(mq, read_type)

    def persist_all(self, mqs=None):
        self._check("persist_all")
        super().persist_all(mqs)

    def remove_offset(self, mq):
        self._check("remove_offset")
        super().remove_offset(mq)

    def close(self):
        self.closed.set()
        self._check("close")


@pytest.mark.parametrize("method", ["update_offset", "persist_all", "read_offset"])
def test_a_store_that_fails_unforeseen_fails_the_consumer(embedded, topic, group, method):
    embedded.create_topic(topic, queues=1)
    store, events = Broken(method, ZeroDivisionError("in the store")), Events()
    seen = Seen()
    consumer = consumer_of(embedded, group, offset_store=store, on_event=events)
    consumer.subscribe(topic, seen)
    consumer.start()
    fill(embedded, topic, 1)
    seen.wait_for(1)
    joined = []

    def join():
        try:
            consumer.join(30)
        except RocketError as error:
            joined.append(error)

    waiter = threading.Thread(target=join)
    waiter.start()
    store.breaks = True
    if method == "read_offset":
        embedded.create_topic(topic, queues=2)  # the new queue's start offset is asked for
    else:
        fill(embedded, topic, 5, 1)
    failure = events.wait_for("consumer-failed")
    assert "in the store" in failure.text
    waiter.join(WAIT_S)
    assert len(joined) == 1
    assert consumer.state is ConsumerState.FAILED
    with pytest.raises(RocketError, match="in the store"):
        consumer.join()
    with pytest.raises(RocketError, match="in the store") as raised:
        consumer.close()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert consumer.state is ConsumerState.FAILED
    assert store.closed.is_set()
    assert embedded.members(group) == [], "it has left the group"
    consumer.close()


def test_a_failed_consumer_leaves_its_with_block_with_the_reason(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    store, events = Broken("persist_all", ZeroDivisionError("in the store")), Events()
    fill(embedded, topic, 1)
    options = {**OPTIONS, "offset_store": store, "on_event": events}
    with pytest.raises(RocketError, match="in the store"), consuming(embedded, topic, group, **options) as (_, seen):
        seen.wait_for(1)
        store.breaks = True
        fill(embedded, topic, 1, 1)
        events.wait_for("consumer-failed")
    options["offset_store"] = store = Broken("close", OffsetStoreError("x"))
    store.breaks = True
    with pytest.raises(KeyError, match="of the block's own"), consuming(embedded, topic, group, **options):
        raise KeyError("of the block's own")


@pytest.mark.parametrize("method", ["persist_all", "close"])
@pytest.mark.parametrize("error", [ZeroDivisionError("in the store"), OffsetStoreError("disk full")], ids=type)
def test_a_store_that_fails_at_the_end_is_told_and_the_rest_is_done(embedded, topic, group, method, error):
    embedded.create_topic(topic, queues=1)
    store = Broken(method, error)
    consumer = consumer_of(embedded, group, offset_store=store, commit_interval_s=60)
    seen = Seen()
    consumer.subscribe(topic, seen)
    fill(embedded, topic, 1)
    consumer.start()
    seen.wait_for(1)
    store.breaks = True
    if isinstance(error, OffsetStoreError) and method == "persist_all":
        consumer.close()  # told by an event: the messages come again
    else:
        with pytest.raises(type(error), match=str(error)):
            consumer.close()
    assert store.closed.is_set()
    assert embedded.members(group) == [], "it has left the group"
    consumer.close()


@pytest.mark.parametrize(("methods", "opened"), [("load", False), ("read_offset", True), ("read_offset close", True)])
def test_a_store_that_fails_at_the_start_leaves_nothing_behind(embedded, topic, group, methods, opened):
    embedded.create_topic(topic, queues=1)
    store = Broken(methods, ZeroDivisionError("in the store"))
    store.breaks = True
    consumer = consumer_of(embedded, group, offset_store=store)
    consumer.subscribe(topic, Seen())
    with pytest.raises(ZeroDivisionError, match="in the store"):
        consumer.start()
    assert store.closed.is_set() is opened
    assert embedded.members(group) == []
    assert consumer.state in (ConsumerState.CREATED, ConsumerState.CLOSED)
    consumer.close()


def test_an_asyncio_consumer_whose_store_fails_says_so(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    options = {**QUICK, **OPTIONS, "name_server": embedded.name_server}

    async def listen(message):
        seen(message)

    async def start(store):
        consumer = AsyncPushConsumer(group, offset_store=store, **options)
        await consumer.subscribe(topic, listen)
        return await consumer.start()

    async def fail_at_the_start():
        store = Broken("read_offset close", ZeroDivisionError("in the store"))
        store.breaks = True
        with pytest.raises(ZeroDivisionError, match="in the store"):
            await start(store)
        assert store.closed.is_set()

    async def fail_later():
        store = Broken("persist_all", ZeroDivisionError("in the store"))
        consumer = await start(store)
        store.breaks = True
        fill(embedded, topic, 1)
        for _ in range(2):
            with pytest.raises(RocketError, match="in the store"):
                await consumer.join(WAIT_S)
        assert consumer.state is ConsumerState.FAILED
        with pytest.raises(RocketError, match="in the store"):
            await consumer.close()
        await consumer.close()

    seen = Seen()
    asyncio.run(fail_at_the_start())
    asyncio.run(fail_later())
    assert embedded.members(group) == []


# --- strategies


def test_a_strategy_that_raises_at_the_start_is_told_and_tried_again(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    fill(embedded, topic, 4)
    calls = []

    def strategy(group, client_id, queues, members):
        calls.append(queues)
        if len(calls) < 4:
            raise ZeroDivisionError("in the strategy")
        return queues

    events = Events()
    with consuming(embedded, topic, group, allocation=strategy, on_event=events, **OPTIONS) as (consumer, seen):
        assert consumer.state is ConsumerState.RUNNING
        assert "in the strategy" in events.wait_for("broker-unreachable").text
        seen.wait_for(4)


def test_a_strategy_that_raises_later_keeps_what_is_held(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    broken = threading.Event()

    def strategy(group, client_id, queues, members):
        if broken.is_set():
            raise ZeroDivisionError("in the strategy")
        return queues

    events = Events()
    options = {**OPTIONS, "rebalance_interval_s": 0.1}
    with consuming(embedded, topic, group, allocation=strategy, on_event=events, **options) as (consumer, seen):
        broken.set()
        assert "in the strategy" in events.wait_for("broker-unreachable").text
        fill(embedded, topic, 4)
        seen.wait_for(4)
        embedded.create_topic(topic, queues=4)
        broken.clear()
        until(lambda: len([queue for queue in consumer.progress() if queue.topic == topic]) == 4, "the new ones, too")
        assert consumer.state is ConsumerState.RUNNING


# --- the end


def test_two_threads_that_close_at_once_both_wait_for_the_end(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 5)
    consumer = consumer_of(embedded, group, commit_interval_s=60)
    seen, gate = Seen(), Gate()
    consumer.subscribe(topic, seen)
    consumer.start()
    seen.wait_for(5)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None)
    errors = []

    def close():
        try:
            consumer.close()
        except BaseException as error:
            errors.append(error)

    closers = [threading.Thread(target=close) for _ in range(3)]
    for closer in closers:
        closer.start()
    gate.wait_held()
    time.sleep(0.1)
    assert all(closer.is_alive() for closer in closers), "the last offset is not stored yet"
    gate.open()
    for closer in closers:
        closer.join(WAIT_S)
    assert errors == []
    assert embedded.committed(group, topic) == {0: 5}
    assert consumer.state is ConsumerState.CLOSED


def test_closing_while_queues_change_hands_stores_their_offsets(embedded, broker, topic, group):
    """The queue has left the table of those held, and its last offset is on its way."""
    embedded.create_topic(topic, queues=2)
    fill(embedded, topic, 10)
    consumer = consumer_of(embedded, group, commit_interval_s=60)
    seen, gate = Seen(), Gate()
    consumer.subscribe(topic, seen)
    consumer.start()
    seen.wait_for(10)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None)
    embedded.create_topic(topic, queues=2, read_queues=1)  # one queue is to be given up
    gate.wait_held()
    closer = threading.Thread(target=consumer.close)
    closer.start()
    time.sleep(0.1)
    gate.open()
    closer.join(WAIT_S)
    assert embedded.committed(group, topic) == {0: 5, 1: 5}


@pytest.mark.parametrize("silent", [RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNREGISTER_CLIENT])
def test_a_broker_that_says_nothing_does_not_keep_a_consumer_from_its_end(
    embedded, broker, topic, group, silent, caplog
):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 5)
    options = {**OPTIONS, "call_timeout_s": 0.3, "commit_interval_s": 60}
    with consuming(embedded, topic, group, **options) as (consumer, seen):
        seen.wait_for(5)
        broker.on(silent, drop, times=None)
        began = time.monotonic()
        with caplog.at_level(logging.WARNING):
            consumer.close()
        assert time.monotonic() - began < 20, "a close may take 30 s, and 15 s for its calls"
    if silent == RequestCode.UPDATE_CONSUMER_OFFSET:
        assert "final offset not stored" in caplog.text


def test_a_send_back_that_waits_to_be_tried_again_does_not_delay_the_end(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=1)
    for code in (RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_MESSAGE):
        broker.on(code, answer(1, "no"), times=None)
    fill(embedded, topic, 3)

    def judge(message):
        if message.body == b"m1":
            raise ValueError

    def closing() -> float:
        with consuming(embedded, topic, group, Seen(judge), on_event=(events := Events()), **OPTIONS) as (consumer, _):
            events.wait_for("send-back-failed")
            until(lambda: embedded.committed(group, topic) == {0: 1}, "the rest waits for it")
            began = time.monotonic()
            consumer.close()
            return time.monotonic() - began

    assert quick(2, closing), "the message rests for 5 s"
    broker.clear_faults()
    with consuming(embedded, topic, group, **OPTIONS) as (_, again):
        again.wait_for(2)
    assert Counter(again.bodies) == Counter(numbered(2, 1))
