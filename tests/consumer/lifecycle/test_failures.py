"""Unexpected failures: the consumer reports them, its calls raise, and no thread of it is left."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyrocket_consumer import Admin, ConsumerState, MessageQueue, OffsetStoreError, ProtocolError, RocketError
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, answer, drop, rewrite
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import QUICK, WAIT_S, Events, RecordingListener, numbered, until
from tests.speed import quick

RUN = asyncio.run

OPTIONS = {"commit_interval_s": 0.05, "pull_hold_s": 0.2}


class Broken(MemoryOffsetStore):
    """A store of the user whose methods raise unexpected errors, as soon as the test sets it."""

    def __init__(self, methods: str, error: BaseException, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.closed = threading.Event()
        self._methods, self._error = methods.split(), error

    def check(self, method: str) -> None:
        if self.breaks and method in self._methods:
            raise self._error

    def close(self):
        self.closed.set()
        self.check("close")


def checked(method):
    def call(self, *arguments, **options):
        self.check(method)
        return getattr(super(Broken, self), method)(*arguments, **options)

    return call


for each in ("load", "update_offset", "read_offset", "persist_all", "remove_offset"):
    setattr(Broken, each, checked(each))


WANTS_TO_END = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
ALL = "update_offset read_offset persist_all"


@pytest.mark.parametrize(
    ("methods", "error"),
    [("update_offset", ZeroDivisionError), ("persist_all", ZeroDivisionError)]
    + [(ALL, error) for error in (ZeroDivisionError, *WANTS_TO_END)],
)
def test_a_store_that_fails_is_reported_and_called_again(orders, methods, error):
    """In each method, on each thread, and with any error, also with one that would end the process."""
    store = Broken(methods, error("in the store"))
    with orders.consuming(offset_store=store, **OPTIONS) as (consumer, seen):
        store.breaks = True
        orders.fill(5)
        seen.wait_for(5)
        assert f"{error.__name__}: in the store" in orders.events.wait_for("commit-failed").text
        assert consumer.state is ConsumerState.RUNNING
        consumer.progress()
        store.breaks = False
        until(lambda: list(store.clone_offset_table(TOPIC).values()) == [5], "noted")
        until(lambda: [each.persisted for each in of(consumer)] == [5], "stored")
        store.breaks = True
        orders.make(queues=2)
        kind = "broker-unreachable" if methods == ALL else "store-unwritable"  # is the offset unknown, or not stored?
        until(lambda: any("in the store" in each.text for each in orders.events.of(kind)), "it is reported")
        store.breaks = False
        until(lambda: len(of(consumer)) == 2, "the new queue has begun")
        assert consumer.state is ConsumerState.RUNNING


class RemembersResets(Broken):
    """It remembers in memory which resets were followed."""

    def __init__(self, methods: str, error: BaseException) -> None:
        super().__init__(methods, error)
        self.epochs: dict[MessageQueue, int] = {}

    def reset_epoch(self, mq):
        self.check("reset_epoch")
        return self.epochs.get(mq, 0)

    def persist_resets(self, resets):
        for queue, reset in resets.items():
            self.epochs[queue] = reset.epoch
            if reset.offset is not None:
                self.update_offset(queue, reset.offset)
        self.check("persist_resets")


@pytest.mark.parametrize("method", ["reset_epoch", "persist_resets"])
def test_a_store_that_fails_where_resets_are_followed(orders, method):
    """The member continues, reports it, and follows the reset when the store works again."""
    store = RemembersResets(method, ZeroDivisionError("in the store"))
    options = {"message_model": "broadcasting", "offset_store": store, "reset_record_interval_s": 1, **OPTIONS}
    orders.fill(10)
    with orders.consuming(**options) as (consumer, seen), Admin(name_server=orders.cluster.name_server) as admin:
        seen.wait_for(10)
        until(lambda: list(store.clone_offset_table(TOPIC).values()) == [10], "noted")
        store.breaks = True
        admin.plan_reset(GROUP, TOPIC, "earliest").execute(wait_s=1)
        assert consumer.state is ConsumerState.RUNNING
        store.breaks = False
        seen.wait(lambda seen: len(seen.messages) == 20)
        assert consumer.state is ConsumerState.RUNNING
    assert sorted(seen.bodies) == sorted(numbered(10) * 2)


@pytest.mark.parametrize("method", ["update_offset", "read_offset", "persist_all"])
def test_a_store_that_fails_once_delays_the_start_of_a_queue(orders, method):
    orders.fill(3)
    store = Broken(method, ZeroDivisionError("in the store"), breaks=True)

    def mend(event):
        if "in the store" in event.text:
            store.breaks = False

    with orders.consuming(offset_store=store, on_event=mend, **OPTIONS) as (consumer, seen):
        seen.wait_for(3)
        assert consumer.state is ConsumerState.RUNNING


class Returning(MemoryOffsetStore):
    """A store of the user that returns `value` as each stored offset, as long as it is set."""

    value: object = None

    def read_offset(self, mq, *arguments):
        return super().read_offset(mq, *arguments) if self.value is None else self.value


@pytest.mark.parametrize("value", ["5", b"5", -1, 2.5, True, 2**63], ids=repr)
def test_a_store_that_returns_no_offset_is_reported_and_asked_again(orders, value):
    orders.fill(3)
    store = Returning()
    store.value = value
    with orders.consuming(offset_store=store, start_wait_s=0.1, **OPTIONS) as (consumer, seen):
        expected = f"Returning.read_offset returned {value!r} for orders/broker-a/0; correct it: it must return a whole"
        until(lambda: any(expected in each.text for each in orders.events.of("broker-unreachable")), "it is reported")
        store.value = None
        seen.wait_for(3)
        until(lambda: [each.persisted for each in of(consumer)] == [3], "stored")
        assert consumer.state is ConsumerState.RUNNING


def of(consumer):
    """Return the progress of each queue of the topic."""
    return [each for queue, each in consumer.progress().items() if queue.topic == TOPIC]


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_close(orders):
    store = Broken("close", OffsetStoreError("x"), breaks=True)
    with pytest.raises(KeyError, match="of the block's own"), orders.consuming(offset_store=store, **OPTIONS):
        raise KeyError("of the block's own")


@pytest.mark.parametrize("method", ["persist_all", "close"])
@pytest.mark.parametrize("error", [ZeroDivisionError("in the store"), OffsetStoreError("disk full")], ids=type)
def test_a_store_that_fails_at_the_end_does_not_stop_the_close(orders, method, error):
    store = Broken(method, error)
    orders.fill(1)
    consumer = begun(orders, seen := RecordingListener(), offset_store=store)
    seen.wait_for(1)
    store.breaks = True
    if method == "persist_all":
        consumer.close()  # an event reports that the messages will be redelivered
    else:
        with pytest.raises(OffsetStoreError, match=str(error)):
            consumer.close()
    assert store.closed.is_set()
    assert orders.members == [], "it has left the group"
    consumer.close()


def test_a_store_that_cannot_be_loaded_ends_the_start(orders):
    store = Broken("load", ZeroDivisionError("in the store"), breaks=True)
    consumer = orders.consumer(RecordingListener(), offset_store=store, **QUICK)
    with pytest.raises(ZeroDivisionError, match="in the store"):
        consumer.start()
    assert not store.closed.is_set()
    assert orders.members == []
    assert consumer.state in (ConsumerState.CREATED, ConsumerState.CLOSED)
    consumer.close()


async def test_an_asyncio_consumer_continues_when_its_store_fails(orders):
    orders.fill(1)
    seen, store = RecordingListener(), Broken("read_offset", ZeroDivisionError("in the store"), breaks=True)

    async def listen(message):
        seen(message)

    async with await orders.begun(listen, offset_store=store, on_event=orders.events, **{**QUICK, **OPTIONS}):
        await asyncio.to_thread(orders.events.wait_for, "broker-unreachable")
        assert seen.bodies == []
        store.breaks = False
        await asyncio.to_thread(seen.wait_for, 1)
    assert store.closed.is_set()
    assert orders.members == []


# --- strategies


def test_a_strategy_that_raises_at_the_start_is_tried_again(orders):
    orders.make(queues=2)
    orders.fill(4)
    calls = []

    def strategy(group, client_id, queues, members):
        calls.append(queues)
        if len(calls) < 4:
            raise ZeroDivisionError("in the strategy")
        return queues

    with orders.consuming(allocation=strategy, **OPTIONS) as (consumer, seen):
        assert consumer.state is ConsumerState.RUNNING
        assert "in the strategy" in orders.events.wait_for("broker-unreachable").text
        seen.wait_for(4)


def test_a_strategy_that_hangs_is_reported_and_called_again(orders):
    orders.make(queues=2)
    may_continue = threading.Event()

    def strategy(group, client_id, queues, members):
        may_continue.wait(WAIT_S)
        return queues

    try:
        with orders.consuming(allocation=strategy, **OPTIONS) as (consumer, seen):
            assert "has not returned" in orders.events.wait_for("broker-unreachable").text
            assert consumer.state is ConsumerState.RUNNING
            may_continue.set()
            orders.fill(4)
            seen.wait_for(4)
    finally:
        may_continue.set()


@pytest.mark.parametrize("error", [ZeroDivisionError, *WANTS_TO_END])
def test_a_strategy_that_raises_later_keeps_the_held_queues(orders, error):
    orders.make(queues=2)
    wants = threading.Event()

    def strategy(group, client_id, queues, members):
        if wants.is_set():
            raise error("in the strategy")
        return queues

    with orders.consuming(allocation=strategy, **{**OPTIONS, "rebalance_interval_s": 0.1}) as (consumer, seen):
        wants.set()
        assert f"{error.__name__}: in the strategy" in orders.events.wait_for("broker-unreachable").text
        orders.fill(4)
        seen.wait_for(4)
        orders.make(queues=4)
        wants.clear()
        until(lambda: len(of(consumer)) == 4, "the new queues, too")
        assert consumer.state is ConsumerState.RUNNING


# --- the end


def begun(orders, listener, **options):
    """Start a consumer that commits when it ends."""
    return orders.consumer(listener, **{**QUICK, **OPTIONS, "commit_interval_s": 60, **options}).start()


def test_threads_that_close_at_once_all_wait_for_the_end(orders):
    orders.fill(5)
    consumer, gate = begun(orders, seen := RecordingListener()), Gate()
    seen.wait_for(5)
    orders.broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None)
    with ThreadPoolExecutor() as pool:
        closing = [pool.submit(consumer.close) for _ in range(3)]
        gate.wait_held()
        time.sleep(0.1)
        assert not any(each.done() for each in closing), "the last offset is not stored yet"
        gate.open()
        assert [each.result(WAIT_S) for each in closing] == [None] * 3
    assert orders.committed == {0: 5}
    assert consumer.state is ConsumerState.CLOSED


def test_closing_while_queues_change_hands_stores_their_offsets(orders):
    """The queue has left the table of held queues, and its last commit is in flight."""
    orders.make(queues=2)
    orders.fill(10)
    consumer, gate = begun(orders, seen := RecordingListener()), Gate()
    seen.wait_for(10)
    orders.broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None)
    orders.make(queues=2, read_queues=1)  # one queue is to be given up
    gate.wait_held()
    closer = threading.Thread(target=consumer.close)
    closer.start()
    time.sleep(0.1)
    gate.open()
    closer.join(WAIT_S)
    assert orders.committed == {0: 5, 1: 5}


@pytest.mark.parametrize("silent", [RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNREGISTER_CLIENT])
def test_a_silent_broker_does_not_delay_the_end(orders, silent, caplog):
    orders.fill(5)
    consumer = begun(orders, seen := RecordingListener(), call_timeout_s=0.3)
    seen.wait_for(5)
    orders.broker.on(silent, drop, times=None)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        consumer.close()
    assert time.monotonic() - began < 20, "a close may take 30 s, and 15 s for its calls"
    if silent == RequestCode.UPDATE_CONSUMER_OFFSET:
        assert "final offsets of 1 queues not stored" in caplog.text


def test_a_send_back_that_is_retried_does_not_delay_the_end(orders):
    for code in (RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_MESSAGE):
        orders.broker.on(code, answer(1, "no"), times=None)
    orders.fill(3)

    def judge(message):
        if message.body == b"m1":
            raise ValueError

    def closing() -> float:
        with orders.consuming(RecordingListener(judge), on_event=(events := Events()), **OPTIONS) as (consumer, _):
            events.wait_for("send-back-failed")
            until(lambda: orders.committed == {0: 1}, "the other messages wait for it")
            began = time.monotonic()
            consumer.close()
            return time.monotonic() - began

    assert quick(2, closing), "the message waits for 5 s"
    orders.broker.clear_faults()
    with orders.consuming(**OPTIONS) as (_, again):
        again.wait_for(2)
    assert Counter(again.bodies) == Counter(numbered(2, 1))


# --- other failures: a bug of the library, or user code that tries to end the process


class Unbound:
    """An object like the proxies of web frameworks outside of a request, which do not even return their class."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of request context")


@pytest.mark.parametrize("orderly", [False, True])
def test_a_result_that_cannot_be_inspected_fails_nothing(orders, orderly):
    strange = [Unbound()]
    judge = RecordingListener(lambda _: strange.pop() if strange else None)
    with orders.consuming(judge, orderly=orderly, **OPTIONS) as (consumer, seen):
        orders.fill(2)
        assert "are redelivered" in orders.events.wait_for("listener-result-unknown").text
        seen.wait(lambda seen: len(seen.messages) == 3)
        assert consumer.state is ConsumerState.RUNNING


@pytest.mark.parametrize("orderly", [False, True])
def test_a_damaged_record_with_a_slow_listener_fails_nothing(orders, orderly):
    """Its id cannot be read, but events still report a call that takes too long, and the progress."""
    orders.fill(1)
    may_continue, held = threading.Event(), threading.Event()

    def damaged(answer):
        if not answer.body:
            return answer
        at = answer.body.rindex(b"UNIQ_KEY")
        return dataclasses.replace(answer, body=answer.body[: at - 2] + b"\x7f\xff" + answer.body[at:])

    orders.broker.on(RequestCode.PULL_MESSAGE, rewrite(damaged), times=1)

    def listen(message):
        held.set()
        with pytest.raises(ProtocolError):
            message.message_id  # noqa: B018 - it is damaged
        may_continue.wait(WAIT_S)

    with orders.consuming(listen, orderly=orderly, consume_timeout_s=0.1, **OPTIONS) as (consumer, _):
        assert held.wait(WAIT_S)
        assert "damaged" in of(consumer)[0].oldest_unfinished
        if not orderly:
            assert "damaged" in str(orders.events.wait_for("message-stuck").facts["message_id"])
        may_continue.set()
        until(lambda: [each.committed for each in of(consumer)] == [1], "consumed")
        assert consumer.state is ConsumerState.RUNNING


class Limits(dict[str, int]):
    """A mapping of the user that raises, once the test sets it. The member needs it when a queue begins."""

    raises = False

    def get(self, *arguments):
        if self.raises:
            raise ZeroDivisionError("in the limits")
        return super().get(*arguments)


CAUSE = r"consumer 'app' failed: ZeroDivisionError\('in the limits'\)"


def test_a_start_that_fails_names_the_cause_and_may_be_tried_again(orders):
    orders.fill(1)
    limits = Limits()
    limits.raises = True
    consumer = orders.consumer(seen := RecordingListener(), max_cached_messages=limits, **{**QUICK, **OPTIONS})
    with pytest.raises(RocketError, match=CAUSE) as raised:
        consumer.start()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert orders.members == []
    limits.raises = False
    with consumer:
        seen.wait_for(1)


async def test_a_start_of_an_asyncio_consumer_that_fails_names_the_cause(orders):
    limits = Limits()
    limits.raises = True

    async def listen(message):
        pass

    with pytest.raises(RocketError, match=CAUSE) as raised:
        await orders.begun(listen, max_cached_messages=limits, **{**QUICK, **OPTIONS})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert orders.members == []


def test_calls_of_a_consumer_that_failed_raise_the_cause(orders):
    limits, other = Limits(), orders.make(1, "other")
    consumer = begun(orders, RecordingListener(), max_cached_messages=limits)
    limits.raises = True
    calls = {
        "subscribe": lambda: consumer.subscribe(other, RecordingListener()),
        "unsubscribe": lambda: consumer.unsubscribe(TOPIC),
        "pause": consumer.pause,
        "progress": consumer.progress,
        "reset_offsets": lambda: consumer.reset_offsets(TOPIC, "first"),
        "join": consumer.join,
        "close": consumer.close,
    }
    for name, call in calls.items():
        with pytest.raises(RocketError, match=CAUSE):
            call()
        assert consumer.state is ConsumerState.FAILED, name
    consumer.close()


async def test_calls_of_an_asyncio_consumer_that_failed_raise_the_cause(orders):
    limits, other = Limits(), orders.make(1, "other")

    async def listen(message):
        pass

    consumer = await orders.begun(listen, max_cached_messages=limits, **{**QUICK, **OPTIONS})
    limits.raises = True
    for call in (lambda: consumer.subscribe(other, listen), consumer.progress, consumer.join, consumer.close):
        with pytest.raises(RocketError, match=CAUSE):
            await call()
    assert consumer.state is ConsumerState.FAILED


def test_a_consumer_whose_loop_has_ended_fails_and_leaves(orders):
    """`asyncio.run` has ended, and the program has not closed the consumer."""
    orders.make(queues=2)
    events, seen = Events(), asyncio.Event()

    async def listen(message):
        seen.set()

    async def main():
        consumer = await orders.begun(listen, on_event=events, **{**QUICK, **OPTIONS})
        orders.fill(1)
        await asyncio.wait_for(seen.wait(), WAIT_S)
        return consumer

    consumer = asyncio.run(main())
    with orders.consuming(**OPTIONS) as (other, others):
        orders.fill(2, 1)
        assert "close the consumer before" in events.wait_for("consumer-failed").text
        assert consumer.state is ConsumerState.FAILED
        until(lambda: orders.members == [other.client_id], "it has left")
        others.wait_for(2)
        assert set(others.bodies) == set(numbered(2, 1)), "its offsets are stored, and another member has the rest"

    async def invoke():
        for call in (consumer.join, consumer.join, consumer.close):
            with pytest.raises(RocketError, match="the loop that async def listeners run on has ended"):
                await call(WAIT_S)
        await consumer.close()

    asyncio.run(invoke())
    assert consumer.state is ConsumerState.FAILED


def test_a_consumer_whose_loop_ended_before_its_first_message_fails(orders, caplog):
    async def listen(message):
        pass

    consumer = asyncio.run(orders.begun(listen, on_event=orders.events, **{**QUICK, **OPTIONS}))
    orders.fill(1)
    assert "close the consumer before" in orders.events.wait_for("consumer-failed").text
    orders.wait_left()
    assert consumer.state is ConsumerState.FAILED
    assert "Event loop is closed" not in caplog.text


def test_messages_that_wait_do_not_hide_that_the_loop_ended(orders):
    async def listen(message):
        pass

    loop = asyncio.new_event_loop()
    consumer = loop.run_until_complete(orders.begun(listen, on_event=orders.events, **{**QUICK, **OPTIONS}))
    orders.fill(1)
    until(lambda: any(each.unfinished for each in asyncio.run(consumer.progress()).values()), "pulled")
    loop.close()
    orders.fill(2, 1)
    assert "close the consumer before" in orders.events.wait_for("consumer-failed").text
    orders.wait_left()
