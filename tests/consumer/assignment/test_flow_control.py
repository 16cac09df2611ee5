"""H37: how much a consumer holds while its listener is slow or stuck, and that it continues once there is space."""

from __future__ import annotations

import threading
import time

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, ours_and, request_matcher
from tests.consuming import WAIT_S, RecordingListener, until
from tests.hazards.members import faulty, give_time_to, ours
from tests.hazards.naive import NaiveMember

CLUSTER = {"record_limit": 100_000}
BATCH = 8
OPTIONS = {"pull_batch_size": BATCH, "pull_hold_s": 0.2, "shutdown_timeout_s": 1}


class Blocked(RecordingListener):
    """A listener whose calls wait until they are released, and then take `takes_s`."""

    def __init__(self, blocks=lambda message: True, takes_s=0) -> None:
        super().__init__(self._wait)
        self._blocks, self._takes_s, released = blocks, takes_s, threading.Event()
        self.let_go, self._released = released.set, released.wait

    def _wait(self, message) -> None:
        if self._blocks(message):
            self._released(60)
        time.sleep(self._takes_s)


def progress(consumer, topic=TOPIC):
    """Return the progress of a topic's queues."""
    return [each for queue, each in consumer.progress().items() if queue.topic == topic]


def cached(consumer, topic=TOPIC):
    return sum(each.cached_bytes for each in progress(consumer, topic))


def settled(consumer, topic=TOPIC):
    """Wait until pulling has stopped, and return the progress of the topic's queues."""
    last = None
    while last != (last := [(each.next_to_pull, each.unfinished) for each in progress(consumer, topic)]):
        time.sleep(0.3)
    return progress(consumer, topic)


@pytest.mark.parametrize("limit", [1, BATCH - 3, BATCH, BATCH + 1, 2 * BATCH - 1, 20, 100])
def test_pulling_stops_at_the_number_of_messages_and_continues(orders, limit):
    orders.make(queues=2)
    orders.send(b"x", count=600)
    with orders.consuming(Blocked(), max_cached_messages=limit, **OPTIONS) as (consumer, seen):
        least = max(1, limit - BATCH) - BATCH
        until(lambda: all(each.unfinished > least for each in progress(consumer)), "the limit is used")
        assert all(each.unfinished <= limit for each in settled(consumer))
        seen.let_go()
        seen.wait(lambda seen: len(seen.messages) >= 600)
        orders.wait_committed(300, 300)
    assert set(seen.counts.values()) == {1}


@pytest.mark.parametrize("prefix", ["", "INST%"], ids=["as it is subscribed to", "as brokers know it"])
@pytest.mark.parametrize(("option", "limit"), [("max_cached_messages", BATCH), ("max_cached_bytes", 1)])
def test_a_limit_for_one_topic_holds_under_a_namespace(orders, option, limit, prefix):
    known_as = orders.make(1, f"INST%{TOPIC}")
    orders.send(b"x", count=100, topic=known_as)
    options = {**OPTIONS, "namespace": "INST", "consume_threads": 1, option: {prefix + TOPIC: limit}}
    with orders.consuming(Blocked(), **options) as (consumer, seen):
        until(lambda: any(each.unfinished for each in progress(consumer, known_as)), "the first message arrived")
        (now,) = settled(consumer, known_as)
        assert now.unfinished <= BATCH
        seen.let_go()
        seen.wait(lambda seen: len(seen.messages) >= 100)


def sizes_of_pulls(broker, topic=TOPIC):
    """Return how many messages the pulls of a topic requested."""
    pulls = [each.command.fields for each in broker.requests(RequestCode.PULL_MESSAGE)]
    return {each["maxMsgNums"] for each in pulls if each["topic"] == topic}


def test_the_size_of_pulls_for_one_topic_holds_under_a_namespace(orders, broker):
    known_as = orders.make(1, f"INST%{TOPIC}")
    orders.send(b"x", count=10, topic=known_as)
    with orders.consuming(namespace="INST", pull_batch_size={TOPIC: 3}) as (_, seen):
        seen.wait(lambda seen: len(seen.messages) >= 10)
    assert sizes_of_pulls(broker, known_as) == {"3"}


def test_limits_may_differ_by_topic(orders, broker):
    other = orders.make(1, "other")
    for each in (TOPIC, other):
        orders.send(b"x", count=400, topic=each)
    seen = Blocked()
    limits = {"max_cached_messages": {TOPIC: 10}, "max_cached_bytes": {other: 40_000}, "pull_batch_size": {other: 4}}
    with orders.consuming(seen, **{**OPTIONS, **limits}) as (consumer, _):
        consumer.subscribe(other, seen)
        seen.wait(lambda seen: {TOPIC, other} <= {message.topic for message in seen.messages})
        until(lambda: cached(consumer, other) >= 20_000, "full")
        (mine,), (theirs,) = settled(consumer), settled(consumer, other)
        assert mine.unfinished <= 10
        assert 10 < theirs.unfinished < 400
        assert theirs.cached_bytes <= 25_000, "a queue stops when it holds as many bytes as are left"
        seen.let_go()
        seen.wait(lambda seen: len(seen.messages) >= 800)
    assert sizes_of_pulls(broker) == {"10"}, "a pull requests no more than the queue may hold"
    assert sizes_of_pulls(broker, other) == {"4"}


# --- stuck messages


class ChecksTheBufferOnly(NaiveMember):
    """Continues to pull while few messages are unfinished, however far the commit offset stays behind."""


@pytest.mark.hazard("H37")
@ours_and(faulty(ChecksTheBufferOnly, "behind the stuck one would all be redelivered"))
def test_behind_a_stuck_message_only_so_much_is_pulled(embedded, member):
    """At most `max_span` offsets are pulled past the oldest unfinished message, which `progress()` names.

    Faulty: Java and Go measure only the buffer, so after one stuck message everything is redelivered.
    """
    orders = Orders(embedded)
    orders.send(count=1000)
    seen = Blocked(lambda message: message.queue_offset == 3)
    with member(embedded, TOPIC, GROUP, seen, max_span=100, pull_batch_size=BATCH) as consumer:
        seen.wait(lambda seen: len(seen.messages) >= 100)

        def ahead() -> int:
            return max(message.queue_offset for message in seen.messages) - 3

        give_time_to(lambda: ahead() >= 200, member)
        assert ahead() < 200, f"{ahead()} messages behind the stuck one would all be redelivered"
        until(lambda: consumer.stored() == {QUEUE: 3}, "committed up to the stuck one")
        if member is ours:
            (now,) = settled(consumer.consumer)
            assert 100 <= now.next_to_pull <= 104 + 3 * BATCH
            until(lambda: consumer.consumer.progress()[QUEUE].unfinished == 1, "all others are finished")
            stuck = next(message for message in seen.messages if message.queue_offset == 3)
            assert consumer.consumer.progress()[QUEUE].oldest_unfinished == stuck.message_id
        seen.let_go()
        seen.wait(lambda seen: len(seen.messages) >= 1000)
        until(lambda: consumer.stored() == {QUEUE: 1000}, "all is committed")
    assert set(seen.counts.values()) == {1}


@pytest.mark.parametrize("limit", [BATCH + 1, BATCH + 2, 2 * BATCH - 1, 100])
def test_a_stuck_message_stops_neither_its_queue_nor_others(orders, limit):
    """With this low limit, the queue has space for a few messages at a time."""
    orders.make(queues=2)
    orders.send(b"x", count=400)
    seen = Blocked(lambda message: message.queue_offset == 0)
    with orders.consuming(seen, max_cached_messages=limit, **OPTIONS) as (consumer, _):
        seen.wait(lambda seen: len(seen.messages) >= 400)
        until(lambda: {each.unfinished for each in progress(consumer)} == {1}, "only the stuck ones are unfinished")
        assert orders.committed in ({}, {0: 0, 1: 0})
        seen.let_go()


def test_a_queue_with_a_stuck_message_continues_when_memory_is_free(orders):
    """Other queues had used all memory."""
    other = orders.make(8, "other")
    stuck, blocked = Blocked(lambda message: message.body == b"stuck"), Blocked()
    with orders.consuming(stuck, max_cached_bytes=100_000, **OPTIONS) as (consumer, _):
        orders.send(b"stuck")
        stuck.wait(lambda seen: seen.messages)
        consumer.subscribe(other, blocked)
        orders.send(bytes(10_000), count=80, topic=other)
        until(lambda: cached(consumer, other) >= 100_000, "no memory is left")
        settled(consumer, other)
        orders.send(b"x", count=10)
        settled(consumer)
        blocked.let_go()
        blocked.wait(lambda seen: len(seen.messages) >= 80)
        stuck.wait(lambda seen: len(seen.messages) >= 11)
        stuck.let_go()


# --- bytes, which queues share


def test_bytes_are_shared_by_the_queues(orders):
    orders.make(queues=4)
    orders.send(bytes(10_000), count=400)
    with orders.consuming(Blocked(), max_cached_bytes=1_000_000, **OPTIONS) as (consumer, seen):
        until(lambda: all(each.cached_bytes > 0 for each in progress(consumer)), "each queue has some")
        settled(consumer)
        assert 500_000 < cached(consumer) <= 1_000_000 + BATCH * 10_500, "one response more than the limit"
        seen.let_go()
        seen.wait(lambda seen: len(seen.messages) >= 400)
        until(lambda: not cached(consumer), "no bytes are left")
    assert set(seen.counts.values()) == {1}


def test_empty_queues_delay_no_queue_with_messages(orders):
    """Queues that begin while the limit is reached pull one after the other, and brokers hold the pulls of empty
    ones."""
    orders.make(queues=8)
    other = orders.make(8, "other")
    orders.send(bytes(10_000), count=80)
    orders.send(b"x", queue_id=7, topic=other)
    blocked, seen = Blocked(), RecordingListener()
    options = {**OPTIONS, "max_cached_bytes": 100_000, "pull_hold_s": 60, "consume_threads": 100}
    with orders.consuming(blocked, **options) as (consumer, _):
        until(lambda: cached(consumer) >= 100_000, "no memory is left")
        settled(consumer)
        consumer.subscribe(other, seen)
        seen.wait_for(1)
        blocked.let_go()


BODY = 6_000
PULL = 32 * (BODY + 300)
"""The bytes of a response with default options; a message has at most 300 bytes in addition to its body."""


def test_the_memory_of_all_queues_is_bounded(orders):
    """An equal share of the limit would be far less than one response."""
    limit, count = 1_000_000, 100 * 32
    orders.make(queues=100)
    orders.send(bytes(BODY), count=count)
    slow = Blocked(takes_s=0.001)
    with orders.consumer(slow, consume_from="first", max_cached_bytes=limit) as consumer:
        until(lambda: cached(consumer) >= limit, "the limit is used")
        settled(consumer)
        assert cached(consumer) <= limit + PULL
        slow.let_go()
        most = 0
        while len(slow.messages) < count:
            most = max(most, cached(consumer))
            time.sleep(0.005)
        assert most <= limit + 2 * PULL
    assert set(slow.counts.values()) == {1}


def test_stuck_queues_stop_no_other_whatever_they_hold(orders):
    """The stuck queues hold all the memory."""
    orders.make(queues=100)
    orders.send(bytes(BODY), count=100 * 8)
    slow = Blocked(lambda message: message.queue.queue_id < 10 and message.queue_offset == 0, takes_s=0.001)
    with orders.consumer(slow, consume_from="first", max_cached_bytes=200_000) as consumer:
        slow.wait(lambda seen: len(seen.messages) == 100 * 8)
        until(lambda: sum(each.unfinished for each in progress(consumer)) == 10, "only the stuck ones are unfinished")
        assert cached(consumer) <= 10 * PULL
        slow.let_go()
    assert set(slow.counts.values()) == {1}


def test_hundreds_of_queues_do_not_begin_all_at_once(orders, broker):
    """Otherwise the last requests would wait at the broker until they time out, and would be repeated."""
    orders.make(queues=300)
    orders.send(b"x", count=300)
    gate, seen = Gate(), RecordingListener()
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, gate, times=None, when=request_matcher())
    with orders.consumer(seen, consume_from="first", start_wait_s=0.5):
        assert len(gate.wait_held(200, WAIT_S)) == 200
        gate.open()
        seen.wait(lambda seen: len(seen.messages) == 300)
    queries = [each for each in broker.requests(RequestCode.QUERY_CONSUMER_OFFSET) if request_matcher()(each.command)]
    assert len(queries) == 300
