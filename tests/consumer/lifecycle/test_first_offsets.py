"""H22–H24: the start offset of a queue that has no committed offset."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyrocket_consumer import ConfigError, MessageQueue, PushConsumer
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, Gate, answer
from tests.consuming import WAIT_S, numbered, until
from tests.hazards.connection import Refused
from tests.hazards.members import Kind, faulty, filled, ours, pulled_offsets, request_matcher
from tests.hazards.naive import NaiveMember
from tests.resets import fill, queue

PULL, SEARCH = RequestCode.PULL_MESSAGE, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP


# --- H22


class BeginsAtTheEnd(NaiveMember):
    """Begins every queue without an offset at its end, also a queue that was added while its topic is consumed."""

    def first_offset(self, queue: MessageQueue) -> int:
        return self.max_offset(queue) if queue.topic in self.subscriptions else self.min_offset(queue)


@pytest.mark.hazard("H22")
@pytest.mark.parametrize("member", [ours, faulty(BeginsAtTheEnd, "5 messages were skipped")])
def test_a_queue_that_is_added_begins_at_its_first_message(cluster, names, member):
    """`consume_from="last"` is for topics that are new to the group. A queue that is added later, also with a new
    broker, begins at its first message. The group consumed the topic when its messages were sent.

    Faulty: all others begin at the end of the queue, which they read up to 30 s later.
    """
    # A queue is added, and gets five messages before the consumer knows it.
    topic, group = filled(cluster, names, queues=1, messages=0)
    gate = Gate()
    with member(cluster, topic, group, consume_from="last") as consumer:
        until(lambda: consumer.held(), "it consumes")
        cluster.send(topic, b"first")
        consumer.seen.wait_for(1)
        if isinstance(cluster, EmbeddedCluster):
            cluster.name_server_node.on(
                RequestCode.GET_ROUTEINFO_BY_TOPIC, gate, times=None, when=request_matcher(topic)
            )
        cluster.create_topic(topic, queues=2)
        fill(cluster, topic, 5, queue_id=1)
        gate.open()
        until(lambda: queue(topic, 1) in consumer.held(), "it holds the queue")
        cluster.send(topic, b"m5", queue_id=1)
        until(lambda: consumer.stored().get(queue(topic, 1)) == 6, "committed")
        skipped = set(numbered(5)) - set(consumer.seen.bodies)
        assert not skipped, f"{len(skipped)} messages were skipped"


class TakesZeroForAnOffset(NaiveMember):
    """Sends the request of clients before 5.0, to which brokers respond 0 in place of "none" for a young topic."""

    def read_stored(self, queue: MessageQueue) -> int | None:
        fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
        try:
            answer = self.call(self.master(queue), RequestCode.QUERY_CONSUMER_OFFSET, fields)
        except Refused:
            return None
        return int(answer.fields["offset"])


@pytest.mark.hazard("H22")
@pytest.mark.parametrize("member", [ours, faulty(TakesZeroForAnOffset, "consumed 6 of 6 messages")])
def test_last_means_the_end_of_young_topics_too(cluster, names, member):
    """A new group with `consume_from="last"` begins at the end, also in a topic that still has its first message. The
    request asks the broker not to return 0 for "none". Brokers 4.9 return 0 anyway, so there such a group begins at the
    first message.

    Faulty: clients without this field in the request.
    """
    topic, group = filled(cluster, names, queues=1, messages=5)
    with member(cluster, topic, group, consume_from="last") as consumer:
        until(lambda: consumer.held(), "it consumes")
        fill(cluster, topic, 1, start=5)
        until(lambda: consumer.stored() == {queue(topic, 0): 6}, "all is committed")
        zero_rule = getattr(cluster, "version", "5") < "5"
        expected = numbered(6) if zero_rule else numbered(1, 5)
        assert sorted(consumer.seen.bodies) == expected, f"consumed {len(consumer.seen.bodies)} of 6 messages"


class ComputesItTwice(NaiveMember):
    """Computes the start offset in the rebalance and again before the first pull, as orderly Java and Go do."""

    def pull_at(self, queue: MessageQueue, offset: int) -> None:
        super().pull_at(queue, self.start_offset(queue))


@contextmanager
def run_in_background(manager: Any) -> Iterator[Any]:
    """Enter a context manager on another thread. The yielded function waits for it, and returns its value."""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(manager.__enter__)
        try:
            yield lambda: entering.result(WAIT_S)
        finally:
            entering.result(WAIT_S)
            manager.__exit__(None, None, None)


@pytest.mark.hazard("H22")
@pytest.mark.parametrize("member", [ours, faulty(ComputesItTwice, "pulled first at 10, so a message was skipped")])
def test_the_start_is_computed_once(embedded, names, member):
    """The start offset is computed once, and is the offset of the first pull, also for orderly consumers.

    Faulty: Java and Go compute it again before an orderly queue's first pull, and skip the messages between.
    """
    # A message arrives just after the queue's end was computed.
    topic, group, broker = names.topic(), names.group(), embedded.broker("broker-a")
    embedded.create_topic(topic, queues=2, read_queues=1)
    fill(embedded, topic, 18)
    gate = Gate(answers=True)
    broker.on(RequestCode.GET_MAX_OFFSET, gate, when=request_matcher(topic))
    with run_in_background(member(embedded, topic, group, consume_from="last", orderly=True)) as start:
        gate.wait_held(timeout_s=WAIT_S)
        embedded.send(topic, b"early", queue_id=0)
        gate.open()
        consumer = start()
        embedded.send(topic, b"later", queue_id=0)
        consumer.seen.wait(lambda seen: b"later" in seen.bodies)
        first = pulled_offsets(broker, topic)[0][1]
        assert first == 9, f"pulled first at {first}, so a message was skipped"
        assert consumer.seen.bodies == [b"early", b"later"]


# --- H23


class StartsAtATime(NaiveMember):
    """Begins at the offset that the broker returns for a time."""

    def first_offset(self, queue: MessageQueue) -> int:
        if queue.topic.startswith("%RETRY%"):
            return self.min_offset(queue)
        return self.search(queue, int(self.options["consume_from"].timestamp() * 1000))

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        fields = {"topic": queue.topic, "queueId": queue.queue_id, "timestamp": timestamp_ms}
        return int(self.call(self.master(queue), SEARCH, fields).fields["offset"])


class ReadsItInLocalTime(StartsAtATime):
    """Has the time as digits without a zone, and reads them as local time."""

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        text = datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y%m%d%H%M%S")
        local = datetime.strptime(text, "%Y%m%d%H%M%S").timestamp()
        return super().search(queue, int(local * 1000))


class TakesTheNearest(StartsAtATime):
    """Uses the response of brokers before 5.1.1, which is the nearest message."""


class TakesAnErrorForZero(StartsAtATime):
    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        try:
            return super().search(queue, timestamp_ms)
        except OSError:
            return 0


@contextmanager
def time_zone(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", name)
            time.tzset()
            yield
    finally:
        time.tzset()


@pytest.mark.hazard("H23")
@pytest.mark.parametrize("member", [ours, faulty(ReadsItInLocalTime, "-8 hours off in Asia/Shanghai")])
def test_a_time_has_a_zone(embedded, names, monkeypatch, member):
    """A start time must have a time zone, so it is the same instant wherever the program runs.

    Faulty: Java reads the digits in the machine's zone, Go in UTC.
    """
    with pytest.raises(ConfigError, match="no time zone"):
        PushConsumer("app", name_server=embedded.name_server, consume_from=datetime(2024, 5, 17, 10, 30))
    broker, instant = embedded.broker("broker-a"), datetime(2024, 5, 17, 10, 30, tzinfo=UTC)
    for zone in ("UTC", "Asia/Shanghai"):
        topic, group = filled(embedded, names, queues=1, messages=0)
        with time_zone(monkeypatch, zone), member(embedded, topic, group, consume_from=instant):
            [request, *_] = broker.wait_for(SEARCH, timeout_s=WAIT_S, when=request_matcher(topic))
            found = int(request.command.fields["timestamp"])
            assert found == 1715941800000, f"{(found - 1715941800000) / 3600000:g} hours off in {zone}"


def nothing_before_the_time_is_consumed(cluster: Any, names: Any, member: Kind) -> None:
    """All five messages are older than the start time of the group."""
    topic, group = filled(cluster, names, queues=1, messages=5)
    time.sleep(0.02)
    with member(cluster, topic, group, consume_from=datetime.fromtimestamp(time.time(), UTC)) as consumer:
        until(lambda: consumer.held(), "it consumes")
        fill(cluster, topic, 1, start=5)
        until(lambda: consumer.stored() == {queue(topic, 0): 6}, "all is committed")
        old = sorted(body for body in consumer.seen.bodies if body != b"m5")
        if getattr(cluster, "version", "5") < "5":
            assert old in ([], numbered(5)), "brokers 4.9 may return 0 for young topics, which means all messages"
        else:
            assert not old, f"{old} are older than the time"


@pytest.mark.hazard("H23")
def test_nothing_older_than_the_time_is_consumed(cluster, names):
    """The group begins at the first message stored at or after the time, or at the end of the queue."""
    nothing_before_the_time_is_consumed(cluster, names, ours)


@pytest.mark.hazard("H23")
@pytest.mark.parametrize("member", [ours, faulty(TakesTheNearest, r"\[b'm4'\] are older than the time")])
def test_the_nearest_message_does_not_count_as_the_first(names, member):
    """Brokers before 5.1.1 return the nearest message, so the client then reads messages until it finds the right one.

    Faulty: clients that use the response unchanged, and consume a message that is too old.
    """
    with EmbeddedCluster(version="5.0.0", long_poll_tick_s=0.1) as cluster:
        nothing_before_the_time_is_consumed(cluster, names, member)


@pytest.mark.hazard("H23")
@pytest.mark.parametrize("member", [ours, faulty(TakesAnErrorForZero, "began at 0 after a failed search")])
def test_a_search_that_fails_is_not_zero(embedded, names, member):
    """A queue waits until the broker returns the offset of the time."""
    topic, group = filled(embedded, names, queues=1, messages=5)
    broker = embedded.broker("broker-a")
    broker.on(SEARCH, answer(1, "index is loading"), times=2, when=request_matcher(topic))
    consume_from = datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=1)
    with member(embedded, topic, group, consume_from=consume_from, rebalance_interval_s=0.1):
        broker.wait_for(PULL, timeout_s=WAIT_S, when=request_matcher(topic))
        first = pulled_offsets(broker, topic)[0][1]
        assert first == 5, f"began at {first} after a failed search"


# --- H24


class RetriesFromTheEnd(StartsAtATime):
    """Begins the retry topic at its end if there is a start time."""

    def first_offset(self, queue: MessageQueue) -> int:
        return self.max_offset(queue) if queue.topic.startswith("%RETRY%") else super().first_offset(queue)


@pytest.mark.hazard("H24")
@pytest.mark.parametrize(
    ("member", "consume_from"),
    [
        *((ours, consume_from) for consume_from in ("time", "last", "first")),
        faulty(RetriesFromTheEnd, "only 0 of 3 retries were consumed", "time"),
    ],
)
def test_the_retry_topic_begins_at_its_first_message(cluster, names, member, consume_from):
    """Wherever a group begins, its retry topic begins at its first message, because its messages have failed in this
    group and must be redelivered. The subscription to it has no selector, whatever the selectors of other topics are.

    Faulty: Java and Go begin at its end if there is a start time.
    """
    # The retry topic has three messages, and the group has no committed offset.
    topic, group = filled(cluster, names, queues=1, messages=0)
    fill(cluster, retry := f"%RETRY%{group}", 3, queues=1)
    time.sleep(0.02)
    start = datetime.fromtimestamp(time.time(), UTC) if consume_from == "time" else consume_from
    with member(cluster, topic, group, consume_from=start, selector="paid") as consumer:
        try:
            consumer.seen.wait_for(3, 1 if member is RetriesFromTheEnd else WAIT_S)
        except AssertionError:
            raise AssertionError(f"only {len(consumer.seen.bodies)} of 3 retries were consumed") from None
        if isinstance(cluster, EmbeddedCluster):
            subscriptions = cluster.broker("broker-a").subscriptions(group)
            assert (subscriptions[retry].expression, subscriptions[topic].expression) == ("*", "paid")


@pytest.mark.hazard("H22", "H23", "H24")
def test_the_naive_member_is_right(embedded, names, monkeypatch):
    """The base class of the faulty members passes, so the checks find only the faults."""
    test_a_queue_that_is_added_begins_at_its_first_message(embedded, names, NaiveMember)
    test_last_means_the_end_of_young_topics_too(embedded, names, NaiveMember)
    test_the_start_is_computed_once(embedded, names, NaiveMember)
    test_a_time_has_a_zone(embedded, names, monkeypatch, StartsAtATime)
    nothing_before_the_time_is_consumed(embedded, names, StartsAtATime)
    test_a_search_that_fails_is_not_zero(embedded, names, StartsAtATime)
    test_the_retry_topic_begins_at_its_first_message(embedded, names, StartsAtATime, "time")
