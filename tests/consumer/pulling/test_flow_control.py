"""How much a consumer holds while its listener is slow or stuck, and that it goes on as soon as there is room."""

from __future__ import annotations

import threading

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Seen, consuming, until

CLUSTER = {"record_limit": 100_000}
BATCH = 8
OPTIONS = {"pull_batch_size": BATCH, "commit_interval_s": 0.05, "pull_hold_s": 0.2, "shutdown_timeout_s": 1}


class Blocked(Seen):
    """A listener whose calls wait until they are let go."""

    def __init__(self, blocks=lambda message: True) -> None:
        super().__init__(self._wait)
        self._blocks = blocks
        self._release = threading.Event()

    def _wait(self, message) -> None:
        if self._blocks(message):
            self._release.wait(60)

    def let_go(self) -> None:
        self._release.set()


def of(consumer, topic):
    return {queue: each for queue, each in consumer.progress().items() if queue.topic == topic}


def settled(consumer, topic):
    """Wait until nothing more is pulled, and return where the topic's queues stand."""
    last = None
    while last != (last := [(each.next_to_pull, each.unfinished) for each in of(consumer, topic).values()]):
        threading.Event().wait(0.15)
    return of(consumer, topic)


@pytest.mark.parametrize("limit", [1, 5, BATCH, 20, 100])
def test_pulling_stops_at_the_number_of_messages_and_goes_on(embedded, topic, group, limit):
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, b"x", count=600)
    seen = Blocked()
    try:
        options = {**OPTIONS, "max_cached_messages": limit}
        with consuming(embedded, topic, group, seen, **options) as (consumer, _):
            until(
                lambda: all(max(1, limit - BATCH) < each.unfinished + BATCH for each in of(consumer, topic).values()),
                "what there is room for is used",
            )
            for progress in settled(consumer, topic).values():
                assert progress.unfinished <= limit
            seen.let_go()
            seen.wait(lambda seen: len(seen.messages) >= 600)
            until(lambda: embedded.committed(group, topic) == {0: 300, 1: 300}, "all is committed")
    finally:
        seen.let_go()
    assert set(seen.places.values()) == {1}


@pytest.mark.parametrize("prefix", ["", "INST%"], ids=["as it is subscribed to", "as brokers know it"])
@pytest.mark.parametrize(("option", "limit"), [("max_cached_messages", BATCH), ("max_cached_bytes", 1)])
def test_a_limit_for_one_topic_holds_under_a_namespace_too(embedded, topic, group, option, limit, prefix):
    known_as = f"INST%{topic}"
    embedded.create_topic(known_as, queues=1)
    embedded.send(known_as, b"x", count=100)
    seen = Blocked()
    options = {**OPTIONS, "namespace": "INST", "consume_threads": 1, option: {prefix + topic: limit}}
    try:
        with consuming(embedded, topic, group, seen, **options) as (consumer, _):
            until(lambda: any(each.unfinished for each in of(consumer, known_as).values()), "the first came")
            (progress,) = settled(consumer, known_as).values()
            assert progress.unfinished <= BATCH
            seen.let_go()
            seen.wait(lambda seen: len(seen.messages) >= 100)
    finally:
        seen.let_go()


def test_the_size_of_pulls_for_one_topic_holds_under_a_namespace_too(embedded, topic, group):
    known_as = f"INST%{topic}"
    embedded.create_topic(known_as, queues=1)
    embedded.send(known_as, b"x", count=10)
    options = {"namespace": "INST", "pull_batch_size": {topic: 3}}
    with consuming(embedded, topic, group, **options) as (_, seen):
        seen.wait(lambda seen: len(seen.messages) >= 10)
    (broker,) = embedded.brokers
    fields = [request.command.fields for request in broker.requests(RequestCode.PULL_MESSAGE)]
    assert {each["maxMsgNums"] for each in fields if each["topic"] == known_as} == {"3"}


def test_bytes_are_shared_by_the_queues(embedded, topic, group):
    embedded.create_topic(topic, queues=4)
    embedded.send(topic, bytes(10_000), count=400)
    seen = Blocked()
    try:
        options = {**OPTIONS, "max_cached_bytes": 1_000_000}
        with consuming(embedded, topic, group, seen, **options) as (consumer, _):
            until(lambda: all(each.cached_bytes > 0 for each in of(consumer, topic).values()), "each queue has some")
            together = sum(each.cached_bytes for each in settled(consumer, topic).values())
            assert 500_000 < together <= 1_000_000 + BATCH * 10_500, "an answer more than the limit"
            seen.let_go()
            seen.wait(lambda seen: len(seen.messages) >= 400)
            until(lambda: all(each.cached_bytes == 0 for each in of(consumer, topic).values()), "nothing is left")
    finally:
        seen.let_go()
    assert set(seen.places.values()) == {1}


def test_messages_behind_a_stuck_one_are_consumed_up_to_the_span(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"x", count=500)
    seen = Blocked(lambda message: message.queue_offset == 3)
    try:
        with consuming(embedded, topic, group, seen, max_span=100, **OPTIONS) as (consumer, _):
            seen.wait(lambda seen: len(seen.messages) >= 100)
            (progress,) = settled(consumer, topic).values()
            assert 100 <= progress.next_to_pull <= 104 + 3 * BATCH
            until(lambda: [each.unfinished for each in of(consumer, topic).values()] == [1], "all but the stuck one")
            until(lambda: embedded.committed(group, topic) == {0: 3}, "committed up to the stuck one")
            seen.let_go()
            seen.wait(lambda seen: len(seen.messages) >= 500)
            until(lambda: embedded.committed(group, topic) == {0: 500}, "all is committed")
    finally:
        seen.let_go()
    assert set(seen.places.values()) == {1}


def test_a_stuck_message_stops_neither_its_queue_nor_others(embedded, topic, group):
    """With so low a limit as here the queue has room for a few at a time."""
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, b"x", count=400)
    seen = Blocked(lambda message: message.queue_offset == 0)
    try:
        with consuming(embedded, topic, group, seen, max_cached_messages=BATCH + 2, **OPTIONS) as (consumer, _):
            seen.wait(lambda seen: len(seen.messages) >= 400)
            until(lambda: {each.unfinished for each in of(consumer, topic).values()} == {1}, "all but the stuck ones")
            assert embedded.committed(group, topic) in ({}, {0: 0, 1: 0})
    finally:
        seen.let_go()


def test_a_queue_with_a_stuck_message_goes_on_when_other_queues_have_made_room(embedded, topic, group):
    other = f"{topic}-other"
    embedded.create_topic(topic, queues=1)
    embedded.create_topic(other, queues=8)
    stuck, blocked = Blocked(lambda message: message.body == b"stuck"), Blocked()
    options = {**OPTIONS, "max_cached_bytes": 100_000}
    try:
        with consuming(embedded, topic, group, stuck, **options) as (consumer, _):
            embedded.send(topic, b"stuck")
            stuck.wait(lambda seen: seen.messages)
            consumer.subscribe(other, blocked)
            embedded.send(other, bytes(10_000), count=80)
            until(lambda: sum(each.cached_bytes for each in of(consumer, other).values()) >= 100_000, "no room is left")
            settled(consumer, other)
            embedded.send(topic, b"x", count=10)
            settled(consumer, topic)
            blocked.let_go()
            blocked.wait(lambda seen: len(seen.messages) >= 80)
            stuck.wait(lambda seen: len(seen.messages) >= 11)
    finally:
        stuck.let_go()
        blocked.let_go()


def test_queues_without_messages_hold_up_none_while_as_much_as_may_be_is_held(embedded, topic, group):
    """Those that begin then are pulled one after the other, and brokers hold the pulls of the empty ones."""
    other = f"{topic}-other"
    embedded.create_topic(topic, queues=8)
    embedded.create_topic(other, queues=8)
    embedded.send(topic, bytes(10_000), count=80)
    embedded.send(other, b"x", queue_id=7)
    blocked, seen = Blocked(), Seen()
    options = {**OPTIONS, "max_cached_bytes": 100_000, "pull_hold_s": 60, "consume_threads": 100}
    try:
        with consuming(embedded, topic, group, blocked, **options) as (consumer, _):
            until(lambda: sum(each.cached_bytes for each in of(consumer, topic).values()) >= 100_000, "no room is left")
            settled(consumer, topic)
            consumer.subscribe(other, seen)
            seen.wait_for(1)
    finally:
        blocked.let_go()


def test_limits_may_differ_by_topic(embedded, topic, group):
    other = f"{topic}-other"
    for each in (topic, other):
        embedded.create_topic(each, queues=1)
        embedded.send(each, b"x", count=400)
    seen = Blocked()
    options = {
        **OPTIONS,
        "max_cached_messages": {topic: 10},
        "pull_batch_size": {other: 4},
        "max_cached_bytes": {other: 40_000},
    }
    try:
        with consuming(embedded, topic, group, seen, **options) as (consumer, _):
            consumer.subscribe(other, seen)
            seen.wait(lambda seen: {topic, other} <= {message.topic for message in seen.messages})
            until(lambda: [each.cached_bytes >= 20_000 for each in of(consumer, other).values()] == [True], "full")
            (mine,) = settled(consumer, topic).values()
            (theirs,) = settled(consumer, other).values()
            assert mine.unfinished <= 10
            assert 10 < theirs.unfinished < 400
            assert theirs.cached_bytes <= 25_000, "one queue takes no more when it holds as much as is left"
            seen.let_go()
            seen.wait(lambda seen: len(seen.messages) >= 800)
    finally:
        seen.let_go()
    sizes = {
        each: {
            request.command.fields["maxMsgNums"]
            for request in embedded.broker("broker-a").requests(RequestCode.PULL_MESSAGE)
            if request.command.fields["topic"] == each
        }
        for each in (topic, other)
    }
    assert sizes == {topic: {"10"}, other: {"4"}}, "no more is asked for than may be held"


def test_a_paused_queue_is_not_pulled_while_others_are(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    still = MessageQueue(topic, "broker-a", 1)
    with consuming(embedded, topic, group, **{**OPTIONS, "pull_hold_s": 60}) as (consumer, seen):
        embedded.wait_until(lambda: embedded.broker("broker-a").held_pulls(topic) == 2)
        consumer.pause([still])
        embedded.send(topic, b"x", count=51, queue_id=1)  # answers the pull that the broker holds
        embedded.send(topic, b"x", count=50, queue_id=0)
        seen.wait(lambda seen: len(seen.messages) >= 50)
        assert not [message for message in seen.messages if message.queue == still]
        assert consumer.progress()[still].paused
        consumer.resume([still])
        seen.wait(lambda seen: len(seen.messages) >= 101)
    assert set(seen.places.values()) == {1}
