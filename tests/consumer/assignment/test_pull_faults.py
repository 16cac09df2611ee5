"""H36, H41: pulls that are refused, garbled, cut, late or lost. Every message is seen once, and none is skipped."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from pyrocket_consumer import ConsumerState, Message
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command
from pyrocket_consumer.testing import answer, drop, drop_answer, duplicate, faults, garbage, rewrite
from tests.consumer.orders import GROUP, TOPIC, Orders, ours_and, request_matcher
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.members import faulty, ours
from tests.hazards.naive import NaiveMember, Window
from tests.resets import queue


def changed(**changes):
    """The response with some header fields replaced, or removed if they are None."""

    def change(answer: RemotingCommand) -> RemotingCommand:
        fields = {**answer.fields, **changes}
        return replace(answer, fields={name: text for name, text in fields.items() if text is not None})

    return rewrite(change)


def body(change):
    return rewrite(lambda answer: replace(answer, body=change(answer.body)))


def backwards(answer: RemotingCommand) -> RemotingCommand:
    next_offset = max(0, int(answer.fields["nextBeginOffset"]) - 20)
    return replace(answer, fields={**answer.fields, "nextBeginOffset": str(next_offset)})


def record_at(number: int, offset: int):
    """The messages, one of them with another offset if there are enough."""

    def change(data: bytes) -> bytes:
        records, start = [], 0
        while start < len(data):
            end = start + int.from_bytes(data[start : start + 4])
            records.append(data[start:end])
            start = end
        if number < len(records):
            one = records[number]
            records[number] = one[:20] + offset.to_bytes(8, signed=True) + one[28:]
        return b"".join(records)

    return body(change)


FAULTS = {
    **{
        f"next offset {name}": changed(nextBeginOffset=str(value))
        for name, value in {
            "of 64 bits": 2**63,
            "of 65 bits": 2**64,
            "of 100 digits": 10**99,
            "the last there is": 2**63 - 1,
            "far beyond the end": 5000,
        }.items()
    },
    **{
        name: answer(code, remark, {"nextBeginOffset": str(2**63 - 2), "minOffset": "0", "maxOffset": "10"})
        for name, code, remark in [
            ("nothing new, and a next offset beyond the end", 19, ""),
            ("none that match, and a next offset beyond the end", 20, ""),
            ("a correction beyond the end", 21, "OFFSET_OVERFLOW_BADLY"),
            ("a reset beyond the end", 21, "OFFSET_RESET"),
        ]
    },
    "an end of 64 bits": changed(maxOffset=str(2**63)),
    "a begin beyond the end": changed(minOffset="1000000"),
    "a begin far below zero": changed(minOffset=str(-(2**63))),
    "a message far behind the others": record_at(3, 2**62),
    "a message twice": record_at(1, 0),
    "a message at a negative offset": record_at(2, -5),
    "the first message far behind the others": record_at(0, 2**62),
    **{f"refused with {code}": answer(code, "not now") for code in (1, 2, 16, 17, 24, 25, 26, 215, 999)},
    "late": faults.delay(0.2),
    "answered twice": duplicate,
    "connection closed": faults.close_connection,
    "connection closed after it was handled": faults.handle_and_close,
    "connection reset": faults.reset_connection,
    "cut in the middle": faults.cut_after(300),
    "cut after the first byte": faults.cut_after(1),
    "no frame": garbage(b"\xff" * 64),
    "another protocol": garbage(b"HTTP/1.1 502 Bad Gateway\r\n\r\n"),
    "garbage for messages": body(lambda data: b"\xa5" * len(data)),
    "cut in a record": body(lambda data: data[: len(data) * 2 // 3]),
    "cut in the last record": body(lambda data: data[:-1]),
    "no messages": body(lambda data: b""),
    "one record twice as long as it is": body(lambda data: (2 * len(data)).to_bytes(4) + data[4:]),
    "next offset backwards": rewrite(backwards),
    "next offset negative": changed(nextBeginOffset="-1"),
    "next offset missing": changed(nextBeginOffset=None),
    "next offset no number": changed(nextBeginOffset="soon"),
    "all fields missing": rewrite(lambda answer: replace(answer, fields={})),
    "unknown fields": changed(topicSysFlag="7", novelty="yes"),
    "a broker id nobody has": changed(suggestWhichBrokerId="42"),
}


PULL = RequestCode.PULL_MESSAGE


class LosesItsPull(NaiveMember):
    """An exception between a response and the next pull ends both."""

    def _pull_loop(self, window: Window) -> None:
        with suppress(ProtocolError, ValueError, KeyError):
            super()._pull_loop(window)


@pytest.mark.hazard("H36")
@pytest.mark.parametrize(
    ("member", "what"),
    [
        *(pytest.param(ours, what, id=what) for what in FAULTS),
        *(faulty(LosesItsPull, "all of the first", what) for what in ("next offset no number", "next offset missing")),
    ],
)
def test_nothing_is_lost_or_repeated(embedded, member, what):
    """After any invalid response, the next pull follows within `pull_retry_delay_s`, without another timer.

    Faulty: clients that lose a queue's only pull to an exception, and notice that after 120 s, or never.
    """
    orders = Orders(embedded, messages=50)
    orders.on(PULL, FAULTS[what], times=2)
    with member(embedded, TOPIC, GROUP, pull_batch_size=8, pull_retry_delay_s=0.05, pull_hold_s=0.2) as consumer:
        seen = consumer.seen
        until(lambda: len(seen.messages) >= 50, "all of the first messages")
        orders.on(PULL, FAULTS[what], times=2)
        orders.fill(50, 50)
        seen.wait_for(100)
        orders.wait_committed(100)
        assert consumer.consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(100))


WANTED, UNWANTED = "AaAa", "BBBB"
"""Two tags with one hash, which brokers cannot distinguish."""


class FiltersWithoutMoving(NaiveMember):
    """Skips unwanted messages, and commits only offsets of messages that a listener had."""

    def on_found(self, window: Window, messages: list[Message], next_offset: int) -> None:
        wanted = [message for message in messages if message.tags in (None, WANTED)]
        if wanted:
            super().on_found(window, wanted, next_offset)
        else:
            window.next_offset = next_offset


@pytest.mark.hazard("H41")
@ours_and(faulty(FiltersWithoutMoving, "unwanted messages are committed past"))
def test_messages_that_the_client_filters_out_are_committed_past(cluster, topic, group, member):
    """The commit offset moves past messages whose tags have a selected hash, but are not selected.

    Faulty: Java moves only the offset of the next pull, so after a restart the broker scans the same messages again.
    """
    position = queue(topic, 0)
    cluster.create_topic(topic, queues=1)
    cluster.send(topic, tags=UNWANTED, count=100)
    with member(cluster, topic, group, selector=WANTED, pull_hold_s=WAIT_S) as consumer:
        until(lambda: consumer.stored() == {position: 100}, "unwanted messages are committed past")
        cluster.send(topic, b"wanted", tags=WANTED)
        consumer.seen.wait_for(1)
        assert consumer.seen.bodies == [b"wanted"]
        until(lambda: consumer.stored() == {position: 101}, "committed")


# --- invalid and missing responses


def test_a_broker_that_holds_no_pull_is_pulled_more_and_more_slowly(orders, broker):
    def nothing(exchange) -> None:
        here = exchange.request.fields["queueOffset"]
        fields = {"nextBeginOffset": here, "minOffset": "0", "maxOffset": here, "suggestWhichBrokerId": "0"}
        exchange.answer(exchange.request.make_response(19, "OFFSET_OVERFLOW_ONE", fields))

    orders.on(PULL, nothing, times=None)
    seen = RecordingListener()
    with orders.consumer(seen, consume_from="first"):
        broker.wait_for(PULL, when=request_matcher())
        began = time.monotonic()
        broker.wait_for(PULL, 14, when=request_matcher())
        assert time.monotonic() - began > 2
        orders.send(b"m0")
        broker.clear_faults()
        seen.wait_for(1)


def test_a_response_cut_at_every_byte(orders, broker):
    orders.send(b"m0")
    lengths: list[int] = []

    def measure(answer: RemotingCommand) -> RemotingCommand:
        lengths.append(len(encode_command(answer)))
        return answer

    orders.on(PULL, rewrite(measure))
    with orders.consuming(pull_retry_delay_s=0.001) as (consumer, seen):
        seen.wait_for(1)
        (whole,) = lengths
        for cut in range(whole):
            orders.on(PULL, faults.cut_after(cut))
        broker.close_connections()  # the held pull was sent before the faults
        orders.send(b"m1")
        seen.wait_for(2, 4 * WAIT_S)
        assert len(broker.requests(PULL)) > whole
        orders.wait_committed(2)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(2))


def test_pulls_without_a_response_are_repeated(orders, broker):
    """A pull times out after the time that the broker may hold it and the time of any call, at least 5 s. A later
    response is ignored."""
    ways = {TOPIC: drop, orders.make(1, "unanswered"): drop_answer, orders.make(1, "late"): faults.delay(7)}
    for each, fault in ways.items():
        broker.on(PULL, fault, when=request_matcher(each))
    with orders.consuming(pull_hold_s=0.1, call_timeout_s=1.0) as (consumer, seen):
        consumer.subscribe("unanswered", seen)
        consumer.subscribe("late", seen)
        for number, each in enumerate(ways):
            broker.wait_for(PULL, when=request_matcher(each))
            orders.send(b"m%d" % number, topic=each)
        seen.wait_for(3)
        reason = "PULL_MESSAGE got no response"
        until(lambda: any(reason in event.text for event in orders.events.of("broker-unreachable")), "it is reported")
        orders.send(b"m3", topic="late")
        seen.wait_for(4)
    assert Counter(seen.bodies) == Counter(numbered(4))


def test_queues_do_not_delay_each_other(orders, broker):
    orders.make(queues=4)
    orders.on(PULL, answer(1, "disk trouble"), times=None, queueId=2)
    began = time.monotonic()
    orders.fill(40)
    with orders.consuming() as (consumer, seen):
        seen.wait_for(30)
        until(lambda: "disk trouble" in consumer.progress()[queue(TOPIC, 2)].last_error, "the progress has the error")
        assert "disk trouble" in orders.events.wait_for("broker-unreachable").text
        broker.clear_faults()
        seen.wait_for(40)
    most = 1 + (time.monotonic() - began) // 10
    assert len(orders.events.of("broker-unreachable")) <= most, "the same error is reported every 10 s"
    assert Counter(seen.bodies) == Counter(numbered(40))


# --- random faults while pulls are in flight


def random_fault(rng: random.Random) -> faults.Fault:
    """Most responses are only late, each by its own time, so that they arrive in any order."""
    if rng.random() < 0.8:
        return rng.choice((faults.delay, faults.delay_request))(rng.random() * 0.02)
    part = rng.random()
    refused = answer(rng.choice((1, 2, 16, 24, 25, 26, 215, 999)), "now and then")
    cut, noise = body(lambda data: data[: int(len(data) * part)]), garbage(rng.randbytes(20))
    short, back = faults.cut_after(rng.randrange(400)), changed(nextBeginOffset="0")
    lost = (faults.close_connection, faults.handle_and_close, faults.reset_connection)
    return rng.choice([refused, duplicate, cut, short, noise, *lost, back])


@pytest.mark.parametrize("seed", range(30))
def test_every_message_is_seen_once(orders, seed):
    rng = random.Random(seed)
    queues, count = rng.randint(1, 3), 60 * rng.randint(1, 6)
    orders.make(queues)
    orders.send(b"x", count=count // 2)
    for _ in range(rng.randint(5, 60)):
        orders.on(PULL, random_fault(rng))
    options = {
        "pull_batch_size": rng.choice((1, 3, 8, 32)),
        "max_cached_messages": rng.choice((1, 10, 50, 1000)),
        "max_span": rng.choice((20, 2000)),
        "consume_threads": rng.choice((1, 4)),
        "listener_batch_size": rng.choice((1, 1, 5)),
        "call_timeout_s": 3.0,  # some garbage looks like the start of a frame; that connection gets no more responses
        "pull_retry_delay_s": 0.01,
        "pull_hold_s": 0.1,
        "commit_interval_s": 0.03,
        "rebalance_interval_s": 0.2,
    }
    seen = RecordingListener()

    def handle(unit):
        for message in unit if isinstance(unit, list) else [unit]:
            seen(message)

    with orders.consuming(handle, **options) as (consumer, _):
        orders.send(b"y", count=count - count // 2)
        seen.wait(lambda seen: len(seen.messages) >= count, 2 * WAIT_S)
        orders.wait_committed(*[count // queues] * queues)
        assert consumer.state is ConsumerState.RUNNING
    assert len(seen.messages) == count, [position for position, times in seen.counts.items() if times > 1]
    assert set(seen.counts.values()) == {1}
