"""Listeners and event handlers that do what they should not: the consumer goes on, tells, and can be closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import (
    AsyncPushConsumer,
    BrokerError,
    ConfigError,
    ConsumerState,
    PushConsumer,
    Retry,
    RocketError,
    sql,
)
from tests.consuming import QUICK, WAIT_S, Events, Seen, consuming, numbered, until
from tests.for_each import for_each

OPTIONS = {"commit_interval_s": 0.05, "pull_hold_s": 0.2}


def fill(cluster, topic, count, start=0, **options):
    cluster.send(topic, lambda number: b"m%d" % (start + number), count=count, **options)


class Unspeakable(Exception):
    def __repr__(self):
        raise ZeroDivisionError

    __str__ = __repr__


def test_messages_whose_listener_raises_come_again_and_the_rest_is_committed(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    errors = {b"m1": KeyboardInterrupt(), b"m4": SystemExit(1), b"m7": Unspeakable(), b"m9": ValueError("x" * 100_000)}

    def judge(message):
        if message.reconsume_times == 0 and message.body in errors:
            raise errors[message.body]

    fill(embedded, topic, 20)
    seen, events = Seen(judge), Events()
    with consuming(embedded, topic, group, seen, on_event=events, **OPTIONS) as (consumer, _):
        seen.wait(lambda seen: len(seen.bodies) == 24)
        until(lambda: embedded.committed(group, topic) == {0: 10, 1: 10}, "committed")
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(20) + list(errors))
    assert len(events.of("listener-failed")) == len(events.of("message-sent-back")) == 4


class Unshowable:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("result", [Unshowable(), True, [], 0], ids=lambda result: type(result).__name__)
def test_a_result_that_means_nothing_is_told_and_its_message_comes_again(embedded, topic, group, result):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 3)
    seen = Seen(lambda message: result if message.body == b"m1" and message.reconsume_times == 0 else None)
    events = Events()
    with consuming(embedded, topic, group, seen, on_event=events, **OPTIONS):
        seen.wait(lambda seen: seen.bodies.count(b"m1") == 2)
        until(lambda: embedded.committed(group, topic) == {0: 3}, "committed")
    assert events.of("listener-result-unknown")[0].facts["offset"] == 1
    assert Counter(seen.bodies) == Counter([*numbered(3), b"m1"])


def test_one_bad_message_of_a_batch_comes_again_without_the_others(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 12)
    seen = Seen()

    def handle(messages):
        again = [each for each in messages if each.body == b"m5" and each.reconsume_times == 0]
        for message in messages:
            seen(message)
        return Retry([each.detach() for each in again]) if again else None

    with consuming(embedded, topic, group, handle, listener_batch_size=4, **OPTIONS):
        seen.wait(lambda seen: len(seen.bodies) == 13)
        until(lambda: embedded.committed(group, topic) == {0: 12}, "committed")
    assert Counter(seen.bodies) == Counter([*numbered(12), b"m5"])


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_listener_that_never_returns_holds_up_neither_others_nor_the_end(embedded, topic, group, kind):
    embedded.create_topic(topic, queues=2)
    fill(embedded, topic, 1, queue_id=0)
    release, seen = threading.Event(), Seen()

    def handle(message):
        seen(message)
        if message.body == b"m0":
            release.wait(60)
            raise RuntimeError("nobody hears this any more")

    async def listen(message):
        seen(message)
        if message.body == b"m0":
            await asyncio.sleep(3600)

    consumer = PushConsumer(group, name_server=embedded.name_server, **{**QUICK, **OPTIONS})
    consumer.subscribe(topic, handle if kind == "plain" else listen)
    try:
        with consumer:
            seen.wait_for(1)
            fill(embedded, topic, 20, 1, queue_id=0)
            fill(embedded, topic, 20, 21, queue_id=1)
            seen.wait_for(41)
            until(lambda: embedded.committed(group, topic).get(1) == 20, "the other queue is committed")
            began = time.monotonic()
            consumer.close(timeout_s=0.3)
            assert 0.2 < time.monotonic() - began < 20
        assert consumer.state is ConsumerState.CLOSED
        assert embedded.committed(group, topic).get(0, 0) == 0
        until(lambda: embedded.members(group) == [], "it has left the group")
        with consuming(embedded, topic, group, **OPTIONS) as (_, again):
            again.wait_for(21)
    finally:
        release.set()  # now it raises, with nobody there to hear it; the thread ends quietly all the same
    assert Counter(again.bodies) == Counter(numbered(21))


def test_messages_behind_a_stuck_call_go_to_other_workers(embedded, topic, group):
    """Quick listeners get many messages at once; when one call hangs, the others must not wait behind it."""
    embedded.create_topic(topic, queues=1)
    release = threading.Event()
    seen = Seen(lambda message: release.wait(60) if message.body == b"m140" else None)
    try:
        with consuming(embedded, topic, group, seen, **OPTIONS):
            fill(embedded, topic, 100)
            seen.wait_for(100)
            fill(embedded, topic, 200, 100)
            seen.wait_for(300)
            until(lambda: embedded.committed(group, topic) == {0: 140}, "the stuck one holds the offset")
            release.set()
            until(lambda: embedded.committed(group, topic) == {0: 300}, "committed")
    finally:
        release.set()
    assert Counter(seen.bodies) == Counter(numbered(300))


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_result_that_means_nothing_is_told_once(embedded, topic, group, kind, caplog):
    """Listeners that return True, or how many rows they wrote, do so each time."""
    embedded.create_topic(topic, queues=2)
    fill(embedded, topic, 50)
    seen, events = Seen(lambda message: True if message.reconsume_times == 0 else None), Events()

    async def listen(message):
        return seen(message)

    listener = seen if kind == "plain" else listen
    with consuming(embedded, topic, group, listener, on_event=events, **OPTIONS):
        seen.wait(lambda seen: len(seen.bodies) == 100)
    (event,) = events.of("listener-result-unknown")
    assert "True" in event.text
    assert "None" in event.text, "what to return instead"
    assert caplog.text.count("listener-result-unknown") == 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_plain_listener_that_returns_a_coroutine_learns_what_to_do(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 3)

    async def listen(message):
        pass

    events = Events()
    with consuming(embedded, topic, group, lambda message: listen(message), on_event=events, **OPTIONS):
        assert "async def" in events.wait_for("listener-result-unknown").text


@pytest.mark.parametrize("when", ["while it runs", "afterwards"])
def test_async_listeners_that_cancel_their_task_leave_as_many_workers(embedded, topic, group, when):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 20)

    async def listen(message):
        task = asyncio.current_task()
        seen(message)
        if message.reconsume_times == 0 and message.body != b"last":
            if when == "while it runs":
                task.cancel()
            else:
                asyncio.get_running_loop().call_later(0.01, task.cancel)
            await asyncio.sleep(0)

    seen, events = Seen(), Events()
    with consuming(embedded, topic, group, listen, consume_threads=2, on_event=events, **OPTIONS) as (consumer, _):
        seen.wait(lambda _: len(set(seen.bodies)) == 20)
        until(lambda: embedded.committed(group, topic) == {0: 20}, "committed")
        embedded.send(topic, b"last")
        seen.wait(lambda _: b"last" in seen.bodies)
        assert consumer.state is ConsumerState.RUNNING
    if when == "while it runs":
        assert len(events.of("listener-failed")) == 20


def test_an_async_listener_whose_task_leaves_the_loop_stops_nothing(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 10)

    async def leave():
        raise SystemExit(3)

    async def listen(message):
        seen(message)
        if message.reconsume_times == 0:
            await asyncio.gather(leave())

    seen = Seen()
    with consuming(embedded, topic, group, listen, **OPTIONS):
        seen.wait(lambda _: len(seen.bodies) == 20)
        until(lambda: embedded.committed(group, topic) == {0: 10}, "committed")


def test_an_async_listener_may_be_cancelled_from_within(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 3)
    seen = Seen()

    async def listen(message):
        seen(message)
        if message.body == b"m1" and message.reconsume_times == 0:
            raise asyncio.CancelledError

    with consuming(embedded, topic, group, listen, **OPTIONS):
        seen.wait(lambda _: seen.bodies.count(b"m1") == 2)
        until(lambda: embedded.committed(group, topic) == {0: 3}, "committed")


# --- on_event


def test_an_event_handler_that_raises_is_called_again(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    told = []

    def on_event(event):
        told.append(event)
        raise (SystemExit, ValueError)[len(told) % 2]

    fill(embedded, topic, 3)
    with consuming(embedded, topic, group, on_event=on_event, **OPTIONS) as (consumer, seen):
        seen.wait_for(3)
        consumer.reset_offsets(topic, "earliest")
        until(lambda: {str(event.kind) for event in told} >= {"queue-assigned", "offset-reset"}, "both were told")
        assert consumer.state is ConsumerState.RUNNING


def test_an_event_handler_that_never_returns_stops_nothing(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    release = threading.Event()
    fill(embedded, topic, 3)
    try:
        with consuming(embedded, topic, group, on_event=lambda event: release.wait(60), **OPTIONS) as (consumer, seen):
            seen.wait_for(3)
            began = time.monotonic()
            consumer.close()
            assert time.monotonic() - began < 20
        assert embedded.committed(group, topic) == {0: 3}
    finally:
        release.set()


def test_an_event_handler_may_close_the_consumer(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    closed = threading.Event()

    def on_event(event):
        if event.kind == "offset-reset":
            consumer.close()
            closed.set()

    consumer = PushConsumer(group, name_server=embedded.name_server, **{**QUICK, **OPTIONS}, on_event=on_event)
    seen = Seen()
    consumer.subscribe(topic, seen)
    fill(embedded, topic, 1)
    with consumer:
        seen.wait_for(1)
        with contextlib.suppress(RocketError):  # the end may cut the call short
            consumer.reset_offsets(topic, "earliest")
        assert closed.wait(WAIT_S)
        consumer.join(WAIT_S)
    assert consumer.state is ConsumerState.CLOSED


# --- subscribing while running


@for_each(
    "wrong_topic, listener, selector",
    [
        (None, print, "*"), (5, print, "*"), (b"orders", print, "*"), ("", print, "*"), ("a b", print, "*"),
        ("orders", None, "*"), ("orders", "print", "*"), ("orders", lambda: None, "*"), ("orders", dict, "*"),
        ("orders", print, None), ("orders", print, 7), ("orders", print, b"*"), ("orders", print, "||"),
        ("orders", print, sql(" ")),
    ],
)
def test_what_cannot_be_subscribed_to_changes_nothing(lasting, wrong_topic, listener, selector):
    consumer, cluster, topic, seen = lasting
    with pytest.raises(ConfigError):
        consumer.subscribe(wrong_topic, listener, selector)
    before = len(seen.messages)
    cluster.send(topic, b"x")
    seen.wait(lambda seen: len(seen.messages) == before + 1)
    assert consumer.state is ConsumerState.RUNNING


@pytest.fixture
def lasting(embedded):
    embedded.create_topic("lasting", queues=1)
    with consuming(embedded, "lasting", "lasting-group", **OPTIONS) as (consumer, seen):
        embedded.send("lasting", b"x")
        seen.wait_for(1)
        yield consumer, embedded, "lasting", seen


def test_an_expression_the_broker_refuses_leaves_the_subscription_as_it_was(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    new = f"{topic}-new"
    embedded.create_topic(new, queues=1)
    events = Events()
    with consuming(embedded, topic, group, on_event=events, **OPTIONS) as (consumer, seen):
        for each in (topic, new):
            with pytest.raises(BrokerError, match="SQL92"):
                consumer.subscribe(each, Seen(), sql("price > 5"))
        fill(embedded, topic, 3)
        seen.wait_for(3)
        embedded.send(new, b"not for us")
        consumer.subscribe(other := f"{topic}-other", Seen())  # after which the group is looked at
        until(lambda: other in embedded.broker("broker-a").subscriptions(group), "the brokers know of the last one")
        subscriptions = embedded.broker("broker-a").subscriptions(group)
        assert subscriptions[topic].expression_type == "TAG"
        assert new not in subscriptions
        assert new not in {queue.topic for queue in consumer.progress()}


@pytest.mark.parametrize("orderly", [False, True], ids=["any order", "orderly"])
@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "asyncio"])
def test_a_listener_that_unsubscribes_its_topic_waits_for_nothing(embedded, topic, group, orderly, is_async):
    """It would wait for itself; its message counts when it returns."""
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"m")
    took_s = []
    options = {"name_server": embedded.name_server, "consume_from": "first", "orderly": orderly}

    def given_up(consumer_progress):
        return not [queue for queue in consumer_progress if queue.topic == topic]

    def blocking():
        def handle(message):
            began = time.monotonic()
            consumer.unsubscribe(topic)
            took_s.append(time.monotonic() - began)

        consumer = PushConsumer(group, **options)
        consumer.subscribe(topic, handle)
        with consumer:
            until(lambda: took_s and given_up(consumer.progress()), "given up")

    async def asynchronous():
        async def handle(message):
            began = time.monotonic()
            await consumer.unsubscribe(topic)
            took_s.append(time.monotonic() - began)

        consumer = AsyncPushConsumer(group, **options)
        await consumer.subscribe(topic, handle)
        async with consumer:
            async with asyncio.timeout(WAIT_S):
                while not took_s or not given_up(await consumer.progress()):
                    await asyncio.sleep(0.01)

    asyncio.run(asynchronous()) if is_async else blocking()
    assert max(took_s) < 0.8, took_s
    assert embedded.committed(group, topic) == {0: 1}
