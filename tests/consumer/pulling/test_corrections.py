"""Offsets that brokers correct and users reset: each counts once, and what comes from before counts for nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.testing import Exchange, Gate, answer
from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.message import StoredMessage, encode_message
from tests.consumer.orders import GROUP, QUEUE, TOPIC
from tests.consuming import WAIT_S, Events, Seen, consuming, numbered, until

QUICK = {"commit_interval_s": 0.05, "pull_hold_s": 0.5}


def fill(cluster, topic, count, start=0):
    cluster.send(topic, lambda number: b"m%d" % (start + number), count=count)


def moved(next_offset, low, high, remark="OFFSET_OVERFLOW_BADLY"):
    fields = {"nextBeginOffset": next_offset, "minOffset": low, "maxOffset": high, "suggestWhichBrokerId": 0}
    return answer(21, remark, {name: str(value) for name, value in fields.items()})


def of(topic):
    return lambda command: command.fields["topic"] == topic


# --- corrections


def test_messages_that_expired_are_skipped_and_told(orders, broker):
    orders.fill(10)
    broker.commit(GROUP, TOPIC, {0: 2})
    broker.delete_before(TOPIC, 0, 6)
    with orders.consuming(**QUICK) as (_, seen):
        seen.wait_for(4)
        corrected = orders.events.wait_for("offset-corrected")
        assert (corrected.facts["from"], corrected.facts["to"]) == (2, 6)
        assert "2 to 5" in orders.events.wait_for("range-skipped").text
    assert seen.bodies == numbered(4, 6)
    assert orders.committed == {0: 10}
    assert len(orders.events.of("offset-corrected")) == 1


def test_a_correction_while_consuming_takes_effect_once(orders, broker):

    def skip(exchange: Exchange) -> None:
        orders.fill(10, 10)  # before it is told: else offset 15 lies behind the queue's end for a while
        moved(15, 15, 20, "OFFSET_TOO_SMALL")(exchange)

    with orders.consuming(**QUICK) as (_, seen):
        orders.fill(10)
        seen.wait_for(10)
        broker.on(RequestCode.PULL_MESSAGE, skip, when=of(TOPIC))
        orders.events.wait_for("offset-corrected")
        seen.wait_for(15)
        orders.wait_committed(20)
    assert seen.bodies == numbered(10) + numbered(5, 15), "what the broker says it has no more is not waited for"


def test_what_is_cached_is_consumed_before_a_correction_is_followed(orders, broker):
    """Not even messages that nobody has begun are passed over; those the broker lost exist only here."""
    begun, release, held = threading.Event(), threading.Event(), Held()

    def judge(message):
        begun.set()
        release.wait(30)

    orders.fill(10)
    broker.on(RequestCode.PULL_MESSAGE, held, when=lambda each: of(TOPIC)(each) and each.fields["queueOffset"] == "10")
    seen = Seen(judge)
    options = {**QUICK, "consume_threads": 1, "shutdown_timeout_s": 1}
    try:
        with orders.consuming(seen, **options) as (consumer, _):
            assert begun.wait(WAIT_S)
            pull = held.wait()
            orders.fill(10, 10)
            broker.delete_before(TOPIC, 0, 15)
            pull.later(0, lambda: pull.handle(pull.answer))
            threading.Event().wait(0.2)
            assert orders.committed.get(0, 0) == 0
            assert orders.events.of("offset-corrected") == []
            release.set()
            seen.wait_for(10)
            fact = orders.events.wait_for("offset-corrected").facts
            assert (fact["from"], fact["to"]) == (10, 15)
            orders.wait_committed(20)
    finally:
        release.set()
    assert Counter(seen.bodies) == Counter(numbered(10) + numbered(5, 15))


def test_a_correction_backwards_is_believed_when_the_broker_keeps_to_it(orders, broker):
    """A broker that was restarted may say for a while that all its queues are empty: min = max = 0."""
    loading, silent, emptied = topics = [f"{GROUP}-{what}" for what in ("loading", "silent", "emptied")]
    seen, events = {TOPIC: Seen() for TOPIC in topics}, Events()
    orders.make(1, loading)
    with consuming(orders.cluster, loading, GROUP, seen[loading], **QUICK) as (consumer, _):
        for TOPIC in topics[1:]:
                    consumer.subscribe(TOPIC, seen[TOPIC])
        for TOPIC in topics:
            orders.fill(10)
            seen[TOPIC].wait_for(10)
            until(lambda topic=TOPIC: orders.committed == {0: 10}, "committed")
        for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
            broker.on(code, answer(0, fields={"offset": "0"}), when=of(loading))
        broker.on(RequestCode.GET_MAX_OFFSET, answer(2, "busy"), times=5, when=of(silent))
        for TOPIC in (loading, silent):
            broker.on(RequestCode.PULL_MESSAGE, moved(0, 0, 0), when=of(TOPIC))
        broker.truncate(emptied, 0, 0)

        broker.wait_for(RequestCode.GET_MAX_OFFSET, when=of(loading))
        orders.fill(10, 10, topic=loading)
        seen[loading].wait_for(20)
        corrected = events.wait_for("offset-corrected")
        assert (corrected.queue.topic, corrected.facts["from"], corrected.facts["to"]) == (emptied, 10, 0)
        orders.fill(3, 10, topic=emptied)
        seen[emptied].wait_for(13)
        broker.wait_for(RequestCode.GET_MAX_OFFSET, 6, when=of(silent))
        orders.fill(5, 10, topic=silent)
        seen[silent].wait_for(15)
    assert len(events.of("offset-corrected")) == 1, "the others were not corrected after all: silence confirms nothing"
    assert events.of("range-skipped") == []
    assert [orders.committed[0] for TOPIC in topics] == [20, 15, 3]
    for TOPIC, count in zip(topics, (20, 15, 13), strict=True):
        assert Counter(seen[TOPIC].bodies) == Counter(numbered(count))


@pytest.mark.parametrize("count", [4, 60], ids=["few", "more than were lost"])
def test_what_is_sent_while_a_correction_backwards_is_doubted_is_consumed(orders, broker, count):
    """The broker came back without its last messages: what has their places is new, and we have not read it."""
    events, asked = Events(), Gate()
    with orders.consuming(**QUICK) as (consumer, seen):
        orders.fill(100)
        seen.wait_for(100)
        orders.wait_committed(100)
        broker.on(RequestCode.GET_MAX_OFFSET, asked, times=None, when=of(TOPIC))
        broker.truncate(TOPIC, 0, 60)
        asked.wait_held()
        orders.fill(count, 100)
        asked.open()
        seen.wait_for(100 + count)
        facts = events.wait_for("offset-corrected").facts
        assert (facts["from"], facts["to"]) == (100, 60)
        orders.fill(1, 200)
        seen.wait_for(101 + count)
    assert Counter(seen.bodies) == Counter([*numbered(100 + count), b"m200"])
    assert events.of("range-skipped") == []


def test_a_broker_that_is_loading_is_not_followed_though_nothing_was_read_before(orders, broker):
    """A restarted member has only its stored offset; what lies at the end the broker spoke of is old."""
    long_ago_ms = int(time.time() * 1000) - 60_000
    orders.send(lambda number: b"m%d" % number, count=10, stored_at_ms=long_ago_ms)
    broker.commit(GROUP, TOPIC, {0: 10})
    broker.on(RequestCode.PULL_MESSAGE, moved(0, 0, 0), when=of(TOPIC))
    with orders.consuming(**QUICK) as (consumer, seen):
        broker.wait_for(RequestCode.GET_MAX_OFFSET, when=of(TOPIC))
        orders.fill(3, 10)
        seen.wait_for(3)
        orders.wait_committed(13)
    assert seen.bodies == numbered(3, 10)
    assert orders.events.of("offset-corrected") == []


# --- resets, and what comes late


class Held:
    """A fault that keeps pulls back, so that the test can answer them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.exchanges: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        with self._changed:
            self.exchanges.append(exchange)
            self._changed.notify_all()

    def wait(self) -> Exchange:
        with self._changed:
            assert self._changed.wait_for(lambda: self.exchanges, WAIT_S)
        return self.exchanges[0]


def late_answer(exchange: Exchange, what: str) -> None:
    fields = {"nextBeginOffset": "30", "minOffset": "0", "maxOffset": "40", "suggestWhichBrokerId": "0"}
    code, remark, body = {
        "found": (0, "FOUND", b"".join(record(offset) for offset in range(10, 30))),
        "no new": (19, "OFFSET_OVERFLOW_ONE", b""),
        "no matched": (20, "NO_MATCHED_MESSAGE", b""),
        "offset moved": (21, "OFFSET_OVERFLOW_BADLY", b""),
        "reset": (21, "OFFSET_RESET", b""),
        "refused": (1, "late", b""),
    }[what]
    if what == "reset":
        fields["nextBeginOffset"] = "8"
    said = exchange.request.answer(code, remark, fields, body)
    exchange.later(0, lambda: exchange.answer(said))


def record(offset: int) -> bytes:
    return encode_message(StoredMessage(topic="stray", body=b"stray", queue_offset=offset))


@pytest.mark.parametrize("what", ["found", "no new", "no matched", "offset moved", "refused", "reset"])
def test_the_answer_of_a_pull_from_before_a_reset_changes_nothing_unless_it_is_a_reset(orders, broker, what):
    queue, held, events = QUEUE, Held(), Events()
    orders.fill(10)
    broker.on(RequestCode.PULL_MESSAGE, held, when=lambda each: of(TOPIC)(each) and each.fields["queueOffset"] == "10")
    with orders.consuming(**QUICK) as (consumer, seen):
        seen.wait_for(10)
        held.wait()
        assert consumer.reset_offsets(TOPIC, {queue: 5}) == {queue: 5}
        seen.wait(lambda seen: len(seen.bodies) == 15)
        orders.wait_committed(10)
        late_answer(held.wait(), what)
        if what == "reset":
            events.wait_for("offset-reset", 2)
            seen.wait(lambda seen: len(seen.bodies) == 17)
        orders.fill(3, 10)
        seen.wait_for(13)
    again = numbered(5, 5) + (numbered(2, 8) if what == "reset" else [])
    assert Counter(seen.bodies) == Counter(numbered(13) + again)
    assert events.of("offset-corrected") == []
    assert len(events.of("offset-reset")) == (2 if what == "reset" else 1)
    assert orders.committed == {0: 13}


def test_two_resets_in_a_row_end_at_the_second(orders, broker):
    orders.make(queues=2)
    orders.fill(20)
    queues = [MessageQueue(TOPIC, "broker-a", number) for number in (0, 1)]
    with orders.consuming(**QUICK) as (consumer, seen):
        seen.wait_for(20)
        outcomes = []

        def reset(target):
            outcomes.append(consumer.reset_offsets(TOPIC, dict.fromkeys(queues, target)))

        for target in (9, 4, 7):
            reset(target)
        assert [sorted(outcome.values()) for outcome in outcomes] == [[9, 9], [4, 4], [7, 7]]
        at_once = [threading.Thread(target=reset, args=(target,)) for target in (3, 3, 3, 3)]
        for thread in at_once:
            thread.start()
        for thread in at_once:
            thread.join(WAIT_S)
        assert len(outcomes) == 7
        seen.wait(lambda seen: seen.places[queues[0], 3] > 1 and seen.places[queues[1], 9] > 1)
        orders.wait_committed(10, 10)
        orders.fill(4, 20)
        seen.wait_for(24)


def test_the_late_acknowledgement_of_a_listener_from_before_a_reset_is_ignored(orders, broker):
    queue = QUEUE
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def judge(message):
        if message.body == b"m9" and not begun.is_set():
            begun.set()
            release.wait(30)
            ended.set()

    orders.fill(10)
    seen = Seen(judge)
    try:
        with orders.consuming(seen, **QUICK) as (consumer, _):
            seen.wait_for(10)
            assert begun.wait(WAIT_S)
            orders.wait_committed(9)
            consumer.pause([queue])
            assert consumer.reset_offsets(TOPIC, {queue: 2}) == {queue: 2}
            assert orders.committed == {0: 2}
            release.set()
            assert ended.wait(WAIT_S)
            threading.Event().wait(0.2)  # several commits
            assert orders.committed == {0: 2}, "its acknowledgement of 9 reached nothing"
            consumer.resume([queue])
            seen.wait(lambda seen: len(seen.bodies) == 18)
            orders.wait_committed(10)
    finally:
        release.set()
    assert Counter(seen.bodies) == Counter(numbered(10) + numbered(8, 2))


def test_a_failed_message_from_before_a_reset_is_not_sent_back(orders, broker):
    queue = QUEUE
    begun, release = threading.Event(), threading.Event()

    def judge(message):
        if message.body == b"m4" and not begun.is_set():
            begun.set()
            release.wait(WAIT_S)
            raise ValueError("too late to matter")

    orders.fill(5)
    seen = Seen(judge)
    try:
        with orders.consuming(seen, **QUICK) as (consumer, _):
            seen.wait_for(5)
            assert begun.wait(WAIT_S)
            consumer.reset_offsets(TOPIC, {queue: 4})
            release.set()
            orders.events.wait_for("listener-failed")
            seen.wait(lambda seen: seen.bodies.count(b"m4") == 2)
            orders.wait_committed(5)
    finally:
        release.set()
    assert Counter(seen.bodies) == Counter([*numbered(5), b"m4"])
    assert orders.events.of("message-sent-back") == []


def test_a_reset_the_broker_does_not_acknowledge_waits_and_then_counts(orders, broker):
    queue = QUEUE
    orders.fill(10)
    with orders.consuming(**QUICK) as (consumer, seen):
        seen.wait_for(10)
        orders.wait_committed(10)
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, answer(1, "no"), times=3, when=of(TOPIC))
        assert consumer.reset_offsets(TOPIC, {queue: 6}) == {queue: 6}
        assert "6 is not acknowledged yet" in orders.events.wait_for("commit-failed").text
        seen.wait(lambda seen: len(seen.bodies) == 14)
    assert Counter(seen.bodies) == Counter(numbered(10) + numbered(4, 6))
