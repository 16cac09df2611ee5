"""The kinds, results and actions of listeners: the consumer continues, reports errors, and can be closed."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import AsyncPushConsumer, BrokerError, ConfigError, ConsumerState, sql
from pyrocket_consumer.consumer.listener import ConsumeResult, Listener, Retry, find_failed
from tests.consumer.orders import GROUP, QUEUE, TOPIC, listener_of
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.for_each import for_each


def with_context(message, context):
    pass


async def awaited(message):
    pass


class Callable:
    def __call__(self, message):
        pass


class AsyncCallable:
    async def __call__(self, message, context):
        pass


def with_a_keyword(message, *, key):
    pass


def generator(message):
    yield


async def async_generator(message):
    yield


class CallableGenerator:
    def __call__(self, message):
        yield


NEVER_RUN = [with_a_keyword, generator, async_generator, CallableGenerator(), functools.partial(generator)]


@for_each(
    "function, is_async, wants_context",
    [
        (lambda message: None, False, False),
        (with_context, False, True),
        (lambda message, seen=(): None, False, False),
        (awaited, True, False),
        (Callable(), False, False),
        (AsyncCallable(), True, True),
        (print, False, False),
        (functools.partial(with_context, context=None), False, False),
        (functools.partial(with_a_keyword, key=None), False, False),
        (lambda message, *, key=None: None, False, False),
        ([].append, False, False),
    ],
)
def test_properties_of_a_listener_are_found(function, is_async, wants_context):
    listener = Listener.of(function)
    assert (listener.is_async, listener.wants_context) == (is_async, wants_context)


@for_each("wrong", [None, "handle", 5, Callable, lambda: None, lambda a, b, c: None, *NEVER_RUN])
def test_a_wrong_listener_is_refused_with_a_remedy(wrong):
    with pytest.raises(ConfigError, match="listener"):
        Listener.of(wrong)


def test_results():
    batch = [object(), object(), object()]
    every = [(message, 0) for message in batch]
    assert find_failed(None, batch) == find_failed(ConsumeResult.SUCCESS, batch) == ([], True)
    assert find_failed(ConsumeResult.RETRY, batch) == (every, True)
    assert find_failed(Retry(delay_level=3), batch) == ([(each, 3) for each in batch], True)
    assert find_failed(Retry(batch[1:]), batch) == (every[1:], True)
    for unknown in (Retry([object()]), Retry(["an id"]), Retry([batch[0], object()]), "ok", True):
        assert find_failed(unknown, batch) == (every, False), "an unknown message is named, so all have failed"


@for_each("level", [19, "3", 1.5, True])
def test_a_wrong_delay_level_is_refused(level):
    with pytest.raises(ConfigError, match="delay_level"):
        Retry(delay_level=level)


@for_each("messages", [None, 5])
def test_wrong_messages_are_refused(messages):
    with pytest.raises(ConfigError, match="messages=.* give a list of messages, or omit it"):
        Retry(messages)


@for_each("expression", [None, 5, b"price > 5"])
def test_an_sql_expression_that_is_not_text_is_refused(expression):
    with pytest.raises(ConfigError, match=r"sql\(.*\) is not allowed; give a text"):
        sql(expression)


# --- whole consumers


class Unspeakable(Exception):
    def __repr__(self):
        raise ZeroDivisionError

    __str__ = __repr__


class Nonsense:
    __hash__ = None

    def __repr__(self):
        raise ZeroDivisionError

    def __eq__(self, other):
        raise ZeroDivisionError


KINDS = pytest.mark.parametrize("kind", ["plain", "async"])
ERRORS = [
    ValueError("x" * 100_000),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    StopAsyncIteration(),
    MemoryError(),
    Unspeakable(),
]
RESULTS = [Unspeakable(), Nonsense(), object(), True, False, 0, 1, "ok", b"", [], {}, ConsumeResult, Retry]


@KINDS
def test_a_message_whose_listener_raised_is_redelivered(orders, kind):
    orders.make(queues=2)
    errors = dict(zip(numbered(len(ERRORS)), ERRORS, strict=True))

    def judge(message):
        if message.reconsume_times == 0 and message.body in errors:
            raise errors[message.body]

    orders.fill(20)
    with orders.consuming(listener_of(kind, seen := RecordingListener(judge))) as (consumer, _):
        seen.wait(lambda seen: len(seen.bodies) == 20 + len(ERRORS))
        orders.wait_committed(10, 10)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter([*numbered(20), *errors])
    assert len(orders.events.of("listener-failed")) == len(orders.events.of("message-sent-back")) == len(ERRORS)


@KINDS
@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_an_unknown_result_is_reported_once(orders, kind, result, caplog):
    """Listeners that return True, or a number of rows, do so each time."""
    orders.make(queues=2)
    orders.fill(50)
    seen = RecordingListener(lambda message: result if message.reconsume_times == 0 else None)
    with orders.consuming(listener_of(kind, seen)):
        seen.wait(lambda seen: len(seen.bodies) == 100)
        orders.wait_committed(25, 25)
    (event,) = orders.events.of("listener-result-unknown")
    assert "None" in event.text, "what to return instead"
    assert result is not True or "True" in event.text
    assert event.facts["offset"] in range(25)
    assert caplog.text.count("listener-result-unknown") == 1
    assert Counter(seen.bodies) == Counter(2 * numbered(50))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_plain_listener_that_returns_a_coroutine_learns_why(orders):
    orders.fill(3)
    with orders.consuming(lambda message: awaited(message)):
        assert "async def" in orders.events.wait_for("listener-result-unknown").text
        orders.events.wait_for("message-sent-back", 3)


@KINDS
def test_a_listener_that_never_returns_holds_up_nothing(orders, kind):
    orders.make(queues=2)
    orders.fill(1, queue_id=0)
    release, seen = threading.Event(), RecordingListener()

    def handle(message):
        seen(message)
        if message.body == b"m0":
            release.wait(60)
            raise RuntimeError("nobody hears this any more")

    async def listen(message):
        seen(message)
        if message.body == b"m0":
            await asyncio.sleep(3600)

    with orders.consuming(handle if kind == "plain" else listen) as (consumer, _):
        seen.wait_for(1)
        orders.fill(20, 1, queue_id=0)
        orders.fill(20, 21, queue_id=1)
        seen.wait_for(41)
        until(lambda: orders.committed.get(1) == 20, "the other queue is committed")
        began = time.monotonic()
        consumer.close(timeout_s=0.3)
        assert 0.2 < time.monotonic() - began < 20
    assert consumer.state is ConsumerState.CLOSED
    assert orders.committed.get(0, 0) == 0
    until(lambda: orders.cluster.members(GROUP) == [], "it has left the group")
    with orders.consuming() as (_, again):
        again.wait_for(21)
    release.set()  # now it raises after the close, and the thread still ends without an error
    assert Counter(again.bodies) == Counter(numbered(21))


def cancels_itself(waits):
    async def deed():
        asyncio.current_task().cancel()
        if waits is not None:
            await asyncio.sleep(waits)

    return deed


async def is_cancelled_when_it_has_returned():
    asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)


async def is_cancelled_from_within():
    inner = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner


async def leaves_the_loop():
    async def exits():
        raise SystemExit(3)

    await asyncio.gather(exits())


async def stops_the_loop():
    asyncio.get_running_loop().stop()


async def closes_the_loop():
    asyncio.get_running_loop().close()


async def ends_its_generator():
    raise GeneratorExit


FAIL = [
    cancels_itself(0),
    cancels_itself(3600),
    is_cancelled_from_within,
    leaves_the_loop,
    closes_the_loop,
    ends_its_generator,
]
PASS = [cancels_itself(None), is_cancelled_when_it_has_returned, stops_the_loop]


@pytest.mark.parametrize("deed", FAIL + PASS, ids=lambda deed: deed.__name__)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_async_workers_outlive_whatever_listeners_do(orders, deed):
    orders.fill(20)
    seen = RecordingListener()

    async def listen(message):
        seen(message)
        if message.reconsume_times == 0 and message.queue_offset % 2 == 0 and message.body != b"last":
            await deed()

    with orders.consuming(listen, consume_threads=2) as (consumer, _):
        seen.wait_for(20)
        orders.wait_committed(20)
        orders.send(b"last")
        seen.wait(lambda _: b"last" in seen.bodies)
        assert consumer.state is ConsumerState.RUNNING
    if deed in FAIL:
        assert len(orders.events.of("listener-failed")) == 10
    assert all(int(body[1:]) % 2 == 0 for body, times in Counter(seen.bodies).items() if times > 1)


CHANGES = {
    "emptied": list.clear,
    "cut": lambda messages: messages.__delitem__(slice(1, None)),
    "turned round": list.reverse,
}


ORDERS = [{}, {"orderly": True}, {"orderly": True, "order_by": "sharding_key"}]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@KINDS
@pytest.mark.parametrize("options", ORDERS, ids=["any", "queue", "key"])
def test_a_list_is_its_listener_s_own(orders, options, kind, change):
    """Changes that a listener makes to its list have no effect on the consumed messages."""
    orders.fill(20)
    seen = []

    def consume(messages):
        seen.extend(message.queue_offset for message in messages)
        change(messages)

    with orders.consuming(listener_of(kind, consume), listener_batch_size=8, **options):
        orders.wait_committed(20)
    assert sorted(seen) == list(range(20))


# --- subscribing while running


WRONG = [
    *((topic, print, "*") for topic in (None, 5, b"orders", "", "a b")),
    *(("orders", listener, "*") for listener in (None, "print", lambda: None, dict, *NEVER_RUN)),
    *(("orders", print, selector) for selector in (None, 7, b"*", "||", "a\udcff", sql(" "), sql("a = '\udcff'"))),
]


def test_a_failed_subscription_changes_nothing(orders, subtests):
    with orders.consuming() as (consumer, seen):
        for count, wrong in enumerate(WRONG, 1):
            with subtests.test(repr(wrong)):
                with pytest.raises(ConfigError):
                    consumer.subscribe(*wrong)
                orders.send(b"x")
                seen.wait(lambda seen, count=count: len(seen.messages) == count)
                assert consumer.state is ConsumerState.RUNNING


def test_an_expression_that_is_refused_changes_no_subscription(orders, broker):
    new, other = orders.make(1, "new"), orders.make(1, "other")
    with orders.consuming() as (consumer, seen):
        for each in (TOPIC, new):
            with pytest.raises(BrokerError, match="SQL92"):
                consumer.subscribe(each, RecordingListener(), sql("price > 5"))
        orders.fill(3)
        seen.wait_for(3)
        orders.send(b"not for us", topic=new)
        consumer.subscribe(other, RecordingListener())  # after that the group is checked
        until(lambda: other in broker.subscriptions(GROUP), "the brokers know the last subscription")
        subscriptions = broker.subscriptions(GROUP)
        assert subscriptions[TOPIC].expression_type == "TAG"
        assert new not in subscriptions
        assert new not in {queue.topic for queue in consumer.progress()}


@pytest.mark.parametrize("orderly", [False, True], ids=["any order", "orderly"])
@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "asyncio"])
def test_a_listener_that_unsubscribes_waits_for_nothing(orders, orderly, is_async):
    """A call that waited would wait for itself. Its message counts when it returns."""
    orders.send(b"m")
    took_s = []
    options = {"consume_from": "first", "orderly": orderly}

    def blocking():
        def handle(message):
            began = time.monotonic()
            consumer.unsubscribe(TOPIC)
            took_s.append(time.monotonic() - began)

        with (consumer := orders.consumer(handle, **options)):
            until(lambda: took_s and QUEUE not in consumer.progress(), "given up")

    async def asynchronous():
        async def handle(message):
            began = time.monotonic()
            await consumer.unsubscribe(TOPIC)
            took_s.append(time.monotonic() - began)

        consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, **options)
        await consumer.subscribe(TOPIC, handle)
        async with consumer, asyncio.timeout(WAIT_S):
            while not took_s or QUEUE in await consumer.progress():
                await asyncio.sleep(0.01)

    asyncio.run(asynchronous()) if is_async else blocking()
    assert max(took_s) < 0.8, took_s
    assert orders.committed == {0: 1}
