"""What must not fail and does: the consumer says so, its calls raise, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import (
    Admin,
    AsyncPushConsumer,
    ConsumerState,
    MessageQueue,
    OffsetStoreError,
    ProtocolError,
    PushConsumer,
    RocketError,
)
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.testing import Gate, answer, drop, rewrite
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import QUICK, WAIT_S, Events, Seen, consuming, numbered, quick, until
from tests.resetting import fill

RUN = asyncio.run

OPTIONS = {"commit_interval_s": 0.05, "pull_hold_s": 0.2}


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


WANTS_TO_END = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
ALL = "update_offset read_offset persist_all"


@pytest.mark.parametrize(
    ("methods", "error"),
    [("update_offset", ZeroDivisionError), ("persist_all", ZeroDivisionError), (ALL, ZeroDivisionError)]
    + [(ALL, error) for error in WANTS_TO_END],
)
def test_a_store_that_fails_is_reported_and_asked_again(embedded, topic, group, methods, error):
    """Whatever it is asked for, on whatever thread, and whatever it raises, also what wants to end the process."""
    store, events, seen = Broken(methods, error("in the store")), Events(), Seen()
    with consuming(embedded, topic, group, seen, offset_store=store, on_event=events, **OPTIONS) as (consumer, _):
        store.breaks = True
        fill(embedded, topic, 5)
        seen.wait_for(5)
        assert f"{error.__name__}: in the store" in events.wait_for("commit-failed").text
        assert consumer.state is ConsumerState.RUNNING
        of(consumer, topic)
        store.breaks = False
        until(lambda: list(store.clone_offset_table(topic).values()) == [5], "noted")
        until(lambda: [each.persisted for each in of(consumer, topic).values()] == [5], "stored")
        store.breaks = True
        embedded.create_topic(topic, queues=2)
        told = "broker-unreachable" if methods == ALL else "store-unwritable"  # is its place unknown, or not stored?
        until(lambda: any("in the store" in each.text for each in events.of(told)), "it is told")
        store.breaks = False
        until(lambda: len(of(consumer, topic)) == 2, "the new queue has begun")
        assert consumer.state is ConsumerState.RUNNING


class RemembersResets(Broken):
    """It knows which resets were followed, in memory."""

    def __init__(self, methods: str, error: BaseException) -> None:
        super().__init__(methods, error)
        self.epochs: dict[MessageQueue, int] = {}

    def reset_epoch(self, mq):
        self._check("reset_epoch")
        return self.epochs.get(mq, 0)

    def persist_resets(self, resets):
        for queue, reset in resets.items():
            self.epochs[queue] = reset.epoch
            if reset.offset is not None:
                self.update_offset(queue, reset.offset)
        self._check("persist_resets")


@pytest.mark.parametrize("method", ["reset_epoch", "persist_resets"])
def test_a_store_that_fails_where_resets_are_followed(embedded, topic, group, method):
    """The member goes on, says so, and follows the reset when the store can tell."""
    store, events, seen = RemembersResets(method, ZeroDivisionError("in the store")), Events(), Seen()
    options = {"message_model": "broadcasting", "offset_store": store, "reset_record_interval_s": 1, **OPTIONS}
    fill(embedded, topic, 10)
    with (
        consuming(embedded, topic, group, seen, on_event=events, **options) as (consumer, _),
        Admin(name_server=embedded.name_server) as admin,
    ):
        seen.wait_for(10)
        until(lambda: list(store.clone_offset_table(topic).values()) == [10], "noted")
        store.breaks = True
        admin.plan_reset(group, topic, "earliest").execute(wait_s=1)
        assert consumer.state is ConsumerState.RUNNING
        store.breaks = False
        seen.wait(lambda seen: len(seen.messages) == 20)
        assert consumer.state is ConsumerState.RUNNING
    assert sorted(seen.bodies) == sorted(numbered(10) * 2)


@pytest.mark.parametrize("method", ["update_offset", "read_offset", "persist_all"])
def test_a_store_that_fails_once_delays_the_start_of_a_queue(embedded, topic, group, method):
    fill(embedded, topic, 3)
    store = Broken(method, ZeroDivisionError("in the store"))
    store.breaks = True
    events = Events()

    def mend(event):
        events(event)
        if "in the store" in event.text:
            store.breaks = False

    with consuming(embedded, topic, group, offset_store=store, on_event=mend, **OPTIONS) as (consumer, seen):
        seen.wait_for(3)
        assert consumer.state is ConsumerState.RUNNING


def of(consumer, topic):
    return {queue: each for queue, each in consumer.progress().items() if queue.topic == topic}


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_close(embedded, topic, group):
    store = Broken("close", OffsetStoreError("x"))
    store.breaks = True
    options = {**OPTIONS, "offset_store": store}
    with pytest.raises(KeyError, match="of the block's own"), consuming(embedded, topic, group, **options):
        raise KeyError("of the block's own")


@pytest.mark.parametrize("method", ["persist_all", "close"])
@pytest.mark.parametrize("error", [ZeroDivisionError("in the store"), OffsetStoreError("disk full")], ids=type)
def test_a_store_that_fails_at_the_end_does_not_stop_the_close(embedded, topic, group, method, error):
    store = Broken(method, error)
    consumer = consumer_of(embedded, group, offset_store=store, commit_interval_s=60)
    seen = Seen()
    consumer.subscribe(topic, seen)
    fill(embedded, topic, 1)
    consumer.start()
    seen.wait_for(1)
    store.breaks = True
    if method == "persist_all":
        consumer.close()  # told by an event: the messages come again
    else:
        with pytest.raises(OffsetStoreError, match=str(error)):
            consumer.close()
    assert store.closed.is_set()
    assert embedded.members(group) == [], "it has left the group"
    consumer.close()


def test_a_store_that_cannot_be_loaded_ends_the_start(embedded, topic, group):
    store = Broken("load", ZeroDivisionError("in the store"))
    store.breaks = True
    consumer = consumer_of(embedded, group, offset_store=store)
    consumer.subscribe(topic, Seen())
    with pytest.raises(ZeroDivisionError, match="in the store"):
        consumer.start()
    assert not store.closed.is_set()
    assert embedded.members(group) == []
    assert consumer.state in (ConsumerState.CREATED, ConsumerState.CLOSED)
    consumer.close()


async def test_an_asyncio_consumer_goes_on_when_its_store_fails(embedded, topic, group):
    fill(embedded, topic, 1)
    events, seen = Events(), Seen()

    async def listen(message):
        seen(message)

    store = Broken("read_offset", ZeroDivisionError("in the store"))
    store.breaks = True
    options = {**QUICK, **OPTIONS, "name_server": embedded.name_server, "on_event": events}
    consumer = AsyncPushConsumer(group, offset_store=store, **options)
    await consumer.subscribe(topic, listen)
    async with consumer:
        await asyncio.to_thread(events.wait_for, "broker-unreachable")
        assert seen.bodies == []
        store.breaks = False
        await asyncio.to_thread(seen.wait_for, 1)
    assert store.closed.is_set()
    assert embedded.members(group) == []


# --- strategies


def test_a_strategy_that_raises_at_the_start_is_tried_again(embedded, topic, group):
    fill(embedded, topic, 4, queues=2)
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


def test_a_strategy_that_hangs_is_reported_and_asked_again(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    goes_on, events = threading.Event(), Events()

    def strategy(group, client_id, queues, members):
        goes_on.wait(WAIT_S)
        return queues

    try:
        with consuming(embedded, topic, group, allocation=strategy, on_event=events, **OPTIONS) as (consumer, seen):
            assert "has not returned" in events.wait_for("broker-unreachable").text
            assert consumer.state is ConsumerState.RUNNING
            goes_on.set()
            fill(embedded, topic, 4)
            seen.wait_for(4)
    finally:
        goes_on.set()


@pytest.mark.parametrize("error", [ZeroDivisionError, *WANTS_TO_END])
def test_a_strategy_that_raises_later_keeps_what_is_held(embedded, topic, group, error):
    embedded.create_topic(topic, queues=2)
    wants, events = threading.Event(), Events()

    def strategy(group, client_id, queues, members):
        if wants.is_set():
            raise error("in the strategy")
        return queues

    options = {**OPTIONS, "allocation": strategy, "on_event": events, "rebalance_interval_s": 0.1}
    with consuming(embedded, topic, group, **options) as (consumer, seen):
        wants.set()
        assert f"{error.__name__}: in the strategy" in events.wait_for("broker-unreachable").text
        fill(embedded, topic, 4)
        seen.wait_for(4)
        embedded.create_topic(topic, queues=4)
        wants.clear()
        until(lambda: len(of(consumer, topic)) == 4, "the new ones, too")
        assert consumer.state is ConsumerState.RUNNING


# --- the end


def test_two_threads_that_close_at_once_both_wait_for_the_end(embedded, broker, topic, group):
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
    fill(embedded, topic, 10, queues=2)
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
def test_a_silent_broker_does_not_delay_the_end(
    embedded, broker, topic, group, silent, caplog
):
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
        assert "final offsets of 1 queues not stored" in caplog.text


def test_a_send_back_that_is_retried_does_not_delay_the_end(embedded, broker, topic, group):
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


# --- what fails all the same: a bug of ours, or code of the user's that wants to end the process


class Unbound:
    """As the proxies of web frameworks are outside of a request: it cannot even be asked for its class."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of request context")


@pytest.mark.parametrize("orderly", [False, True])
def test_a_result_that_cannot_be_inspected_fails_nothing(embedded, topic, group, orderly):
    events, strange = Events(), [Unbound()]
    options = {**OPTIONS, "on_event": events, "orderly": orderly}
    with consuming(embedded, topic, group, Seen(lambda _: strange.pop() if strange else None), **options) as (
        consumer,
        seen,
    ):
        fill(embedded, topic, 2)
        assert "come again" in events.wait_for("listener-result-unknown").text
        seen.wait(lambda seen: len(seen.messages) == 3)
        assert consumer.state is ConsumerState.RUNNING


@pytest.mark.parametrize("orderly", [False, True])
def test_a_damaged_record_with_a_slow_listener_fails_nothing(embedded, broker, topic, group, orderly):
    """Its id cannot be told; a call that takes too long and the progress are told all the same."""
    fill(embedded, topic, 1)
    events, goes_on, held = Events(), threading.Event(), threading.Event()

    def damaged(answer):
        at = answer.body.rindex(b"UNIQ_KEY")
        return dataclasses.replace(answer, body=answer.body[: at - 2] + b"\x7f\xff" + answer.body[at:])

    broker.on(RequestCode.PULL_MESSAGE, rewrite(lambda answer: damaged(answer) if answer.body else answer), times=1)

    def listen(message):
        held.set()
        with pytest.raises(ProtocolError):
            message.message_id  # noqa: B018 - it is damaged
        goes_on.wait(WAIT_S)

    options = {**OPTIONS, "on_event": events, "orderly": orderly, "consume_timeout_s": 0.1}
    with consuming(embedded, topic, group, listen, **options) as (consumer, _):
        assert held.wait(WAIT_S)
        assert "damaged" in next(iter(of(consumer, topic).values())).oldest_unfinished
        if not orderly:
            assert "damaged" in str(events.wait_for("message-stuck").facts["message_id"])
        goes_on.set()
        until(lambda: [each.committed for each in of(consumer, topic).values()] == [1], "consumed")
        assert consumer.state is ConsumerState.RUNNING


def test_a_consumer_whose_loop_has_ended_fails_and_leaves(embedded, topic, group):
    """`asyncio.run` has ended, and nobody has closed it."""
    embedded.create_topic(topic, queues=2)
    events, seen = Events(), asyncio.Event()

    async def listen(message):
        seen.set()

    async def main():
        consumer = AsyncPushConsumer(group, name_server=embedded.name_server, on_event=events, **{**QUICK, **OPTIONS})
        await consumer.subscribe(topic, listen)
        await consumer.start()
        fill(embedded, topic, 1)
        await asyncio.wait_for(seen.wait(), WAIT_S)
        return consumer

    consumer = asyncio.run(main())
    with consuming(embedded, topic, group, **OPTIONS) as (other, others):
        fill(embedded, topic, 2, 1)
        assert "close the consumer before" in events.wait_for("consumer-failed").text
        assert consumer.state is ConsumerState.FAILED
        until(lambda: embedded.members(group) == [other.client_id], "it has left")
        others.wait_for(2)
        assert set(others.bodies) == set(numbered(2, 1)), "what it has consumed is stored, and the rest is another's"

    async def ask():
        for _ in range(2):
            with pytest.raises(RocketError, match="the loop that async def listeners run on has ended"):
                await consumer.join(WAIT_S)
        with pytest.raises(RocketError, match="the loop that async def listeners run on has ended"):
            await consumer.close()
        await consumer.close()

    asyncio.run(ask())
    assert consumer.state is ConsumerState.FAILED


def test_messages_that_wait_do_not_hide_that_the_loop_ended(embedded, topic, group):
    events = Events()

    async def listen(message):
        pass

    async def begin():
        consumer = AsyncPushConsumer(group, name_server=embedded.name_server, on_event=events, **{**QUICK, **OPTIONS})
        await consumer.subscribe(topic, listen)
        await consumer.start()
        return consumer

    loop = asyncio.new_event_loop()
    consumer = loop.run_until_complete(begin())
    fill(embedded, topic, 1)
    until(lambda: any(each.unfinished for each in asyncio.run(consumer.progress()).values()), "pulled")
    loop.close()
    fill(embedded, topic, 2, 1)
    assert "close the consumer before" in events.wait_for("consumer-failed").text
    until(lambda: embedded.members(group) == [], "it has left")
