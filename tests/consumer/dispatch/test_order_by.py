"""Order by key: the behaviour of `order_by` for users, and the examples of docs/order.md."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine

from pyrocket_consumer import AsyncPushConsumer, ConfigError, ConsumeResult, PushConsumer, Retry, Suspend
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.consumer.orders import DEAD, GROUP, QUEUE, TOPIC, listener_of
from tests.consuming import QUICK, WAIT_S, Events, RecordingListener, consuming, until
from tests.order_by_key import KeyedListener, key_of
from tests.pages import DOCS, blocks, run_python


def send(orders, *keys, queue_id=0, first=0):
    """Send a message of each of these keys; its body is the key and a number."""
    for number, key in enumerate(keys, first):
        properties = {} if key is None else {"__SHARDINGKEY": key}
        orders.send(f"{key}:{number}".encode(), properties=properties, queue_id=queue_id)


def send_pairs(orders, times):
    """Send messages of two keys to each of two queues."""
    orders.make(queues=2)
    for queue_id in (0, 1):
        send(orders, *[f"{queue_id}-a", f"{queue_id}-b"] * times, queue_id=queue_id, first=10 * queue_id)


def some_keys(seed, keys, count):
    rng = random.Random(seed)
    return [f"k{rng.randrange(keys)}" for _ in range(count)]


def stored(orders):
    return orders.committed.get(0, 0)


BOTH = pytest.mark.parametrize("order_by", ["sharding_key", key_of])


def by_key(orders, listener, **options):
    return orders.consuming(listener, orderly=True, **{"order_by": "sharding_key", **options})


def holds(*keys, offsets=()):
    """Return a listener whose calls of these keys or offsets wait, and the event that releases them."""
    freed = threading.Event()

    def judge(message):
        if key_of(message) in keys or message.queue_offset in offsets:
            freed.wait(WAIT_S)

    return KeyedListener(judge), freed


def fails_once(result, *, every):
    """Return a listener that gives this result once for each such message, and the set of failed messages."""
    failed = set()

    def judge(message):
        if message.queue_offset % every == 0 and message.queue_offset not in failed:
            failed.add(message.queue_offset)
            return result

    return KeyedListener(judge), failed


def by_function(orders, seen, wrong, **options):
    """Consume with an `order_by` that does this for the key "bad". Return the number of its calls for each message."""
    key_calls = Counter()

    def order_by(message):
        key_calls[message.queue_offset] += 1
        return wrong(message) if key_of(message) == "bad" else key_of(message)

    return key_calls, by_key(orders, seen, order_by=order_by, **options)


@contextmanager
def dead_letter(orders):
    """Yield the messages in the dead-letter queue at the end."""
    with consuming(orders.cluster, DEAD, "dead") as (_, dead):
        dead.wait_for(1)
        yield dead.bodies


@BOTH
def test_async_listeners_of_different_keys_run_concurrently(orders, order_by):
    send(orders, *"abcd" * 3)
    seen = KeyedListener()

    async def scenario():
        together = asyncio.Barrier(4)

        async def handle(message):
            async with asyncio.timeout(WAIT_S):
                await together.wait()
            seen(message)

        options = {"orderly": True, "order_by": order_by, "consume_threads": 4, **QUICK}
        consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, **options)
        await consumer.subscribe(TOPIC, handle)
        async with consumer:
            await asyncio.to_thread(seen.wait_for, 12)

    asyncio.run(scenario())
    assert {key: seen.of(key) for key in "abcd"} == {"a": [0, 4, 8], "b": [1, 5, 9], "c": [2, 6, 10], "d": [3, 7, 11]}
    assert stored(orders) == 12


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
@BOTH
def test_each_key_in_order_one_call_at_a_time(orders, order_by, pause_s):
    send(orders, *some_keys(5, 12, 600))
    rng = random.Random(5)
    seen = KeyedListener(lambda message: time.sleep(rng.uniform(0, pause_s)) if pause_s else None)
    with by_key(orders, seen, order_by=order_by):
        seen.wait_for(600)
        orders.wait_committed(600)
    seen.check()
    assert set(seen.counts.values()) == {1}


def test_a_list_has_messages_of_one_key(orders):
    send(orders, *some_keys(6, 5, 300))
    seen, lists = KeyedListener(), []

    def handle(messages):
        lists.append(messages)
        for message in messages:
            seen(message)

    with by_key(orders, handle, listener_batch_size=8):
        seen.wait_for(300)
    seen.check()
    assert all(len(set(map(key_of, messages))) == 1 for messages in lists)
    assert 1 < max(map(len, lists)) <= 8


def test_a_failed_list_is_repeated_from_the_failure_on(orders):
    calls = []

    def handle(messages):
        calls.append([message.queue_offset for message in messages])
        if key_of(messages[0]) == "a" and 2 in calls[-1] and calls.count(calls[-1]) == 1:
            return Retry([message for message in messages if message.queue_offset == 2])

    send(orders, *"aaaab")
    with by_key(orders, handle, listener_batch_size=8):
        orders.wait_committed(5)
    of_a = [offset for call in calls if 4 not in call for offset in call]
    assert of_a in ([0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 2, 3, 2, 3], [0, 1, 2, 2, 3])


@pytest.mark.parametrize("result", [ValueError("not yet"), ConsumeResult.RETRY, Suspend(for_s=0.05)], ids=repr)
def test_a_failing_key_blocks_only_itself(orders, result):
    cured = threading.Event()

    def judge(message):
        if message.queue_offset == 1 and not cured.is_set():
            if isinstance(result, Exception):
                raise result
            return result

    send(orders, "a", "bad", *"abc" * 20, "bad")
    seen = KeyedListener(judge)
    with by_key(orders, seen) as (consumer, _):
        seen.wait(lambda seen: len(seen.of("a")) == 21 and len(seen.of("c")) == 20 and len(seen.of("bad")) >= 2)
        assert set(seen.of("bad")) == {1}, "later messages of its key wait"
        orders.wait_committed(1)
        assert consumer.progress()[QUEUE].oldest_key == "'bad'"
        if isinstance(result, Exception):
            assert orders.events.wait_for("listener-failed").facts["key"] == "'bad'"
        cured.set()
        orders.wait_committed(63)
    seen.check()
    assert seen.of("bad")[-1] == 62


def test_a_failure_in_a_chunk_stops_all_later_messages_of_its_key(orders):
    seen, failed = fails_once(Suspend(for_s=0.01), every=7)
    send(orders, *some_keys(7, 3, 300))
    with by_key(orders, seen):
        orders.wait_committed(300)
    seen.check()
    assert seen.counts.total() == 300 + len(failed)


def test_a_message_that_never_succeeds_is_given_up(orders):
    seen = KeyedListener(lambda message: Suspend(for_s=0.01) if message.queue_offset == 0 else None)
    send(orders, "bad", "good", "bad")
    with by_key(orders, seen, max_reconsume_times=2):
        seen.wait_for(3)
        assert orders.events.wait_for("message-given-up").facts["key"] == "'bad'"
        with dead_letter(orders) as dead:
            assert dead == [b"bad:0"]
        orders.wait_committed(3)
    assert seen.of("bad") == [0, 0, 0, 2]


def test_a_stuck_key_is_named_and_bounded_by_the_span(orders):
    seen, freed = holds("stuck")
    send(orders, "stuck", *"abcd" * 100)
    with by_key(orders, seen, max_span=100, consume_timeout_s=0.1) as (consumer, _):
        assert orders.events.wait_for("message-stuck").facts["key"] == "'stuck'"
        until(lambda: len(seen.messages) >= 100, "other keys continue")
        until(
            lambda: consumer.progress()[QUEUE].unfinished == 1, "all pulled messages except the stuck one are consumed"
        )
        now = consumer.progress()[QUEUE]
        assert (now.oldest_key, now.committed) == ("'stuck'", 0)
        assert now.next_to_pull < 100 + 4 * 32, "no more is pulled"
        freed.set()
        orders.wait_committed(401)
    seen.check()


@pytest.mark.parametrize("deed", ["fails", "hangs"])
def test_a_key_that_fills_the_cache_is_reported(orders, deed):
    cured = threading.Event()

    def judge(message):
        if key_of(message) == "bad" and deed == "hangs":
            cured.wait(WAIT_S)
        elif key_of(message) == "bad" and not cured.is_set():
            return Suspend(for_s=0.02)

    send(orders, "bad", *"abcd" * 100)
    with by_key(orders, KeyedListener(judge), max_span=50) as (consumer, _):
        event = orders.events.wait_for("message-stuck")
        oldest = consumer.progress()[QUEUE].oldest_unfinished
        cured.set()
        orders.wait_committed(401)
    assert f"the key 'bad' {deed} at offset 0" in event.text
    assert event.facts == {"offset": 0, "message_id": oldest, "key": "'bad'"}


@pytest.mark.parametrize("result", [Suspend(for_s=0.01), ConsumeResult.RETRY])
def test_temporary_failures_are_not_reported_as_stuck(orders, result):
    """Nor those of a backlog, which never fits into the cache at once."""
    seen, _ = fails_once(result, every=100)
    send(orders, *"abcd" * 100)
    with by_key(orders, seen, max_span=50):
        orders.wait_committed(400)
    assert not orders.events.of("message-stuck")


def test_an_oldest_message_without_a_key_is_reported_once(orders):
    send(orders, "bad", *"abcd" * 100)
    key_calls, consuming = by_function(orders, RecordingListener(), raising, max_span=50)
    with consuming:
        event = orders.events.wait_for("message-stuck")
        enough = key_calls[0] + 7
        until(lambda: key_calls[0] == enough, "its key is read once a second")
    assert event.facts["offset"] == 0
    assert "no such order" in event.facts["key"]
    assert len(orders.events.of("message-stuck")) == 1


def test_a_slow_call_holds_up_no_other_key_of_its_chunk(orders):
    """Chunks of a quick listener hold many keys. When one call hangs, all others continue, including earlier ones."""
    seen, freed = holds("slow")
    keys = [f"k{number}" for number in range(40)]
    with by_key(orders, seen):
        send(orders, *keys * 10)
        seen.wait_for(400)  # by now chunks are large
        send(orders, *keys[:20], "slow", *keys[20:], *keys * 3, "slow", first=400)
        seen.wait(lambda seen: all(len(seen.of(key)) == 14 for key in keys))
        assert len(seen.of("slow")) == 1
        assert stored(orders) <= 420
        freed.set()
        orders.wait_committed(562)
    seen.check()


def test_messages_without_a_key_share_one_lane(orders):
    send(orders, *[None, "a"] * 50)
    seen = KeyedListener(lambda message: time.sleep(0.001))
    with by_key(orders, seen):
        seen.wait_for(100)
    seen.check()
    assert seen.of("None") == list(range(0, 100, 2))


def test_a_function_is_asked_once_a_message_and_never_by_io(orders):
    key_calls, threads = Counter(), set()

    def order_by(message):
        key_calls[message.queue_offset] += 1
        threads.add(threading.current_thread().name.rstrip("0123456789"))
        return ("key", message.queue_offset % 5)

    send(orders, *"ab" * 100)
    with by_key(orders, RecordingListener(), order_by=order_by) as (_, seen):
        seen.wait_for(200)
    assert key_calls == Counter(range(200))
    assert threads == {"pyrocket-consume-"}


def raising(message):
    raise LookupError("no such order")


def leaving(message):
    raise SystemExit("a function that wants to go")


class Grudging:
    """A key that is hashable, but whose comparison raises."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise ValueError("not comparable")


async def awaited(message):
    return key_of(message)


class Odd:
    """A key whose repr calls a function of the test, and which records the threads that call it."""

    def __init__(self, key, show, threads):
        self._key, self._show, self._threads = key, show, threads

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return self._key == other._key

    def __repr__(self):
        self._threads.append(threading.current_thread().name.rstrip("0123456789"))
        return self._show()


def reported_keys(orders, show):
    """Return the reported texts of a key that fails. Its repr runs on worker threads only."""
    threads = []

    def judge(message):
        if key_of(message) == "bad":
            raise ValueError("not this one")

    send(orders, "bad", *"abcd" * 10)
    options = {"order_by": lambda message: Odd(key_of(message), show, threads)}
    with by_key(orders, KeyedListener(judge), **options) as (consumer, _):
        keys = {orders.events.wait_for("listener-failed").facts["key"], consumer.progress()[QUEUE].oldest_key}
    assert set(threads) == {"pyrocket-consume-"}, "the I/O thread runs no code of users"
    assert len(threads) <= 5, "once for each key"
    return keys


SHOWN = [
    ("<\x1b]0;owned\x07\x1b[2J\nFORGED>", r"<\x1b]0;owned\x07\x1b[2J\nFORGED>"),
    ("k" * 1000, "k" * 80 + "… (920 more characters)"),
]


@pytest.mark.parametrize(("shows", "expected"), SHOWN)
def test_a_key_is_reported_as_one_short_line(orders, shows, expected):
    assert reported_keys(orders, lambda: shows) == {expected}


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_key_whose_repr_raises_is_reported_by_its_type(orders, error):
    def show():
        raise error("not shown")

    assert reported_keys(orders, show) == {"<Odd, whose repr raises>"}


def test_exceptions_of_order_by_are_not_formatted_by_the_io_thread(orders):
    threads = []

    class OddError(Exception):
        def __repr__(self):
            threads.append(threading.current_thread().name.rstrip("0123456789"))
            return "an odd one"

    def order_by(message):
        raise OddError

    send(orders, "bad")
    with by_key(orders, RecordingListener(), order_by=order_by) as (consumer, _):
        assert orders.events.wait_for("listener-failed").facts["error"] == "an odd one"
        until(lambda: consumer.progress()[QUEUE].oldest_key == "<no key: an odd one>", "it is reported")
    assert set(threads) == {"pyrocket-consume-"}


@pytest.mark.parametrize("order_by", ["sharding_key", key_of, lambda message: key_of(message).encode()])
def test_long_keys_differ_in_any_character(orders, order_by):
    together = threading.Barrier(3, timeout=WAIT_S)

    def judge(message):
        together.wait()
        if message.queue_offset == 8:
            raise ValueError("the last one")

    keys = ["k" * 5000 + end for end in "abc"]
    send(orders, *keys * 3)
    seen = KeyedListener(judge)
    with by_key(orders, seen, order_by=order_by, consume_threads=3):
        key = orders.events.wait_for("listener-failed").facts["key"]
    assert not seen.overlaps
    assert [seen.of(key) for key in keys] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert re.fullmatch(r"b?'k{80}'… \(4921 more characters\)", key)


def test_a_long_text_is_another_key_than_its_bytes(orders):
    together = threading.Barrier(2, timeout=WAIT_S)

    def order_by(message):
        return key_of(message) if message.queue_offset else key_of(message).encode()

    send(orders, "k" * 1000, "k" * 1000)
    with by_key(orders, lambda message: together.wait() < 0 or None, order_by=order_by):
        orders.wait_committed(2)


@pytest.mark.parametrize("order_by", ["sharding_key", lambda message: message.property("__SHARDINGKEY")])
@pytest.mark.parametrize("are_finished", [True, False])
def test_long_keys_take_no_more_memory_than_short_ones(orders, order_by, are_finished):
    freed = threading.Event()
    seen = RecordingListener(lambda message: None if are_finished else freed.wait(WAIT_S) and None)
    keys = (f"\N{ROCKET}{number:05}" + "y" * 25_000 for number in range(200))  # of 100 kB each in memory
    with by_key(orders, seen, order_by=order_by, consume_threads=2) as (consumer, _):
        tracemalloc.start()
        try:
            for number, key in enumerate(keys):
                orders.send(b"%d" % number, properties={"__SHARDINGKEY": key})
            if are_finished:
                seen.wait_for(200)
            unfinished = 0 if are_finished else 200
            until(lambda: consumer.progress()[QUEUE].unfinished == unfinished, "they are in their lanes")
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            freed.set()
    assert grown < 16_000_000, "the cluster and unfinished messages take 5 MB each; nothing keeps the 20 MB of all keys"


def test_keys_without_messages_are_forgotten_in_time(orders):
    alive = weakref.WeakSet()

    def order_by(message):
        alive.add(key := Odd(key_of(message), lambda: "", []))
        return key

    send(orders, *map(str, range(200)))
    with by_key(orders, RecordingListener(), order_by=order_by) as (_, seen):
        seen.wait_for(200)
        until(lambda: len(alive) < 100, "most lanes are removed")


def test_a_key_that_is_no_longer_hashable_stops_no_other(orders):
    """Lanes without messages are removed from time to time, and their keys are hashed again for that."""
    has_changed = threading.Event()

    class Changing(Odd):
        def __hash__(self):
            if has_changed.is_set() and self._key.startswith("old"):
                raise ValueError("changed")
            return super().__hash__()

    seen, freed = holds("old-stuck")
    send(orders, "old-stuck", *(f"old-{number}" for number in range(300)))
    with by_key(orders, seen, order_by=lambda message: Changing(key_of(message), lambda: "", [])):
        seen.wait_for(301)
        has_changed.set()
        send(orders, *(f"new-{number}" for number in range(300)), first=301)
        seen.wait_for(601)
        freed.set()
        orders.wait_committed(601)
    assert not orders.events.of("listener-failed")


WRONG = [lambda message: [key_of(message)], raising, leaving, lambda message: awaited(message)]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_message_without_a_key_blocks_only_itself(orders, wrong, kind):
    seen = KeyedListener()
    send(orders, "bad", *"ab" * 20, "bad")
    with by_function(orders, listener_of(kind, seen), wrong)[1] as (consumer, _):
        seen.wait_for(40)
        until(lambda: len(orders.events.of("listener-failed")) == 2, "each is reported")
        assert "no key" in str(consumer.progress()[QUEUE].oldest_key)
        assert stored(orders) == 0
    assert [event.facts["offset"] for event in orders.events.of("listener-failed")] == [0, 41], "once, not each time"
    assert not seen.of("bad")
    seen.check()


def test_a_key_that_cannot_be_compared_fails_its_message_only(orders):
    send(orders, "bad", "bad", *"ab" * 20)
    with by_function(orders, KeyedListener(), lambda message: Grudging())[1] as (_, seen):
        seen.wait_for(41)
        failed = orders.events.wait_for("listener-failed")
        assert failed.facts["offset"] == 1, "the first had nothing to be compared with"


def test_a_message_without_a_key_is_given_up_after_its_attempts(orders):
    send(orders, "a", "bad", "a")
    key_calls, consuming = by_function(orders, RecordingListener(), raising, max_reconsume_times=1)
    with consuming:
        orders.events.wait_for("message-given-up")
        orders.wait_committed(3)
        with dead_letter(orders) as dead:
            assert dead == [b"bad:1"]
    assert key_calls == {0: 1, 1: 2, 2: 1}


def test_a_message_whose_key_is_found_late_is_put_in_order(orders):
    key_calls, freed = Counter(), threading.Event()

    def order_by(message):
        key_calls[message.queue_offset] += 1
        if message.queue_offset == 1 and key_calls[1] == 1:
            raise LookupError("not yet")
        return key_of(message)

    def judge(message):
        if message.queue_offset == 0:
            freed.wait(WAIT_S)
        if key_of(message) == "b":
            freed.set()

    send(orders, *"aaaa")
    seen = KeyedListener(judge)
    with by_key(orders, seen, order_by=order_by):
        until(lambda: key_calls[1] == 2, "its key is read again")
        send(orders, "b", first=4)  # its key is read after the first one's
        seen.wait_for(5)
    assert seen.of("a") == [0, 1, 2, 3]
    assert not seen.overlaps


def test_messages_that_fail_meanwhile_are_repeated_after_it(orders):
    key_calls, failed = Counter(), set()

    def order_by(message):
        key_calls[message.queue_offset] += 1
        if message.queue_offset == 0 and key_calls[0] == 1:
            raise LookupError("not yet")
        return key_of(message)

    def judge(message):
        if message.queue_offset == 1 and not failed:
            failed.add(1)
            until(lambda: key_calls[0] == 2, "the key of the first is read again")
            time.sleep(0.1)
            return Suspend(for_s=0.01)

    send(orders, *"aa")
    seen = KeyedListener(judge)
    with by_key(orders, seen, order_by=order_by):
        orders.wait_committed(2)
    assert seen.of("a") == [1, 0, 1]


def own(consumer):
    return [queue for queue in consumer.progress() if queue.topic == TOPIC]


@BOTH
def test_a_queue_is_handed_over_when_its_calls_have_returned(orders, order_by):
    """The next owner begins no call of a key while one of the former owner runs."""
    seen, freed = holds(offsets=[0])
    send_pairs(orders, 3)
    with by_key(orders, seen, order_by=order_by) as (first, _):
        until(lambda: len(seen.of("0-b")) == len(seen.of("1-b")) == 3, "the other keys are consumed")
        with by_key(orders, seen, order_by=order_by, start_wait_s=0) as (second, _):
            assert "another member still has its lock" in orders.events.wait_for("lock-lost").text
            freed.set()
            until(lambda: len(own(first)) == len(own(second)) == 1, "one queue each")
            seen.wait(lambda seen: all(len(seen.of(key)) >= 3 for key in ("0-a", "1-a")))
    assert not seen.overlaps


def test_a_close_waits_for_running_calls_and_keeps_the_order(orders):
    begun, seen = threading.Event(), KeyedListener(lambda message: begun.set() or time.sleep(0.02))
    send(orders, *"abcd" * 100)
    with by_key(orders, seen, consume_threads=3):
        begun.wait(WAIT_S)
    first = list(seen.messages)
    assert len(first) < 400
    missing = set(range(400)) - {message.queue_offset for message in first}
    assert stored(orders) == min(missing), "the finished messages are committed"
    with by_key(orders, seen):
        seen.wait_for(400)
    assert not seen.overlaps
    for key in "abcd":
        again = [message.queue_offset for message in seen.messages[len(first) :] if key_of(message) == key]
        assert again == sorted(again)


def test_a_restarted_queue_waits_for_earlier_calls(orders):
    seen, freed = holds(offsets=[0])
    send(orders, *"abab")
    with by_key(orders, seen) as (consumer, _):
        seen.wait_for(3)
        consumer.reset_offsets(TOPIC, {QUEUE: 0})
        until(lambda: len(consumer.progress()) and consumer.progress()[QUEUE].unfinished == 4, "it is pulled again")
        assert len(seen.messages) == 3
        freed.set()
        orders.wait_committed(4)
    assert not seen.overlaps


def test_a_restarted_queue_is_handed_over_after_its_calls(orders):
    (seen, freed), waiting = holds(offsets=[0]), Events()
    send_pairs(orders, 2)
    with by_key(orders, seen) as (first, _):
        seen.wait(lambda seen: len(seen.of("0-b")) == len(seen.of("1-b")) == 2)
        first.reset_offsets(TOPIC, "earliest")
        with by_key(orders, seen, start_wait_s=0, on_event=waiting) as (second, _):
            assert "another member still has its lock" in waiting.wait_for("lock-lost").text
            assert not own(second)
            freed.set()
            until(lambda: len(own(first)) == len(own(second)) == 1, "one queue each")
    assert not seen.overlaps


def test_orderly_broadcasting_has_keys_too(orders, tmp_path):
    send(orders, *"ab" * 20)
    with by_key(orders, KeyedListener(), message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        seen.wait_for(40)
    seen.check()


def a_key(message):
    return 1


NEVER_OPENED = "sqlite:///never-opened.db"
ORDERLY = {"order_by": a_key, "orderly": True}
REFUSED = [
    ({"order_by": "sharding_key"}, r"order_by='sharding_key' works with orderly=True only; leave it"),
    ({"order_by": a_key}, r"order_by=<function a_key .*works with orderly=True only"),
    (ORDERLY | {"auto_commit": False}, r"auto_commit=False.*leave one of them"),
    (ORDERLY | {"order_by": "key"}, r"order_by='key' is not allowed; use 'sharding_key', or a function"),
    (ORDERLY | {"order_by": 5}, r"order_by=5 is not allowed; use 'sharding_key', or a function"),
    (
        ORDERLY | {"offset_store": DatabaseOffsets(create_engine(NEVER_OPENED))},
        r"order_by=.*does not work with offset_store=.*its order is the queue's; leave order_by out",
    ),
    (ORDERLY | {"order_by": awaited}, r"order_by=.*is an async def; pass a plain function"),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
@pytest.mark.parametrize("face", [PushConsumer, AsyncPushConsumer])
def test_a_forbidden_option_is_refused_with_its_remedy(face, options, expected):
    with pytest.raises(ConfigError, match=expected):
        face(GROUP, name_server="127.0.0.1:9876", **options)


# --- the page


SHARDING, FUNCTION, WATCHING = blocks(DOCS / "order.md", "python")


@pytest.fixture
def customers(orders):
    """A cluster with twelve orders of each of five customers."""
    orders.make(queues=4)
    for number in range(60):
        customer = number % 5
        body = json.dumps({"customer": customer, "number": number}).encode()
        orders.send(body, properties={"__SHARDINGKEY": f"customer-{customer}"}, queue_id=customer % 4)
    return orders.cluster


def numbers_of(printed, customer):
    """Return the printed orders of a customer. Lines of several threads may be interleaved."""
    return [int(number) for number in re.findall(rf'"customer": {customer}, "number": (\d+)', printed)]


@pytest.mark.live
@pytest.mark.parametrize("block", [SHARDING, FUNCTION], ids=["sharding key", "function"])
def test_orders_of_a_customer_come_in_order(customers, tmp_path, block):
    printed = run_python(block, customers, tmp_path)
    found = [numbers_of(printed, customer) for customer in range(5)]
    assert any(found)
    assert all(numbers == sorted(set(numbers)) for numbers in found)


@pytest.mark.live
def test_a_key_that_fails_is_named(customers, tmp_path):
    quiet = "import logging; logging.disable()\n"
    first, *_ = run_python(quiet + WATCHING, customers, tmp_path).splitlines()
    assert first == "listener-failed orders/broker-a/3 0 'customer-3'"
