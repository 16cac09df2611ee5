"""Pulls that are refused, garbled, cut, late or lost: every message is seen once, and none is passed over."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest

from pyrocket_consumer import ConsumerState, MessageQueue
from pyrocket_consumer.testing import (
    answer,
    close_connection,
    cut_after,
    delay,
    drop,
    drop_answer,
    duplicate,
    garbage,
    handle_and_close,
    reset_connection,
    rewrite,
)
from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.frame import RemotingCommand, encode_command
from tests.consumer.orders import GROUP, QUEUE, TOPIC
from tests.consuming import WAIT_S, Events, Seen, consuming, numbered, until


def changed(**changes):
    """The answer, with some parts of its header replaced; those that are None are missing."""

    def change(answer: RemotingCommand) -> RemotingCommand:
        fields = {**answer.fields, **changes}
        return dataclasses.replace(answer, fields={name: text for name, text in fields.items() if text is not None})

    return rewrite(change)


def body(change):
    return rewrite(lambda answer: dataclasses.replace(answer, body=change(answer.body)))


def backwards(answer: RemotingCommand) -> RemotingCommand:
    fields = {**answer.fields, "nextBeginOffset": str(max(0, int(answer.fields["nextBeginOffset"]) - 20))}
    return dataclasses.replace(answer, fields=fields)


def record_at(number: int, offset: int):
    """The messages, one of them with another offset; or without that one, if there are fewer."""

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


IMPOSSIBLE = {
    **{f"next offset {name}": changed(nextBeginOffset=str(value)) for name, value in {
        "of 64 bits": 2**63, "of 65 bits": 2**64, "of 100 digits": 10**99, "the last there is": 2**63 - 1,
        "far beyond the end": 5000,
    }.items()},
    "nothing new, and a next offset beyond the end": answer(
        19, "", {"nextBeginOffset": "9223372036854775806", "minOffset": "0", "maxOffset": "10"}
    ),
    "none that match, and a next offset beyond the end": answer(
        20, "", {"nextBeginOffset": "9223372036854775806", "minOffset": "0", "maxOffset": "10"}
    ),
    "a correction beyond the end": answer(
        21, "OFFSET_OVERFLOW_BADLY", {"nextBeginOffset": "9223372036854775806", "minOffset": "0", "maxOffset": "10"}
    ),
    "a reset beyond the end": answer(
        21, "OFFSET_RESET", {"nextBeginOffset": "9223372036854775806", "minOffset": "0", "maxOffset": "10"}
    ),
    "an end of 64 bits": changed(maxOffset=str(2**63)),
    "a begin beyond the end": changed(minOffset="1000000"),
    "a begin far below zero": changed(minOffset=str(-(2**63))),
    "a message far behind the others": record_at(3, 2**62),
    "a message twice": record_at(1, 0),
    "a message at a negative offset": record_at(2, -5),
    "the first message far behind the others": record_at(0, 2**62),
}  # fmt: skip

FAULTS = {
    **IMPOSSIBLE,
    **{f"refused with {code}": answer(code, "not now") for code in (1, 2, 16, 17, 24, 25, 26, 215, 999)},
    "late": delay(0.2),
    "answered twice": duplicate,
    "connection closed": close_connection,
    "connection closed after it was handled": handle_and_close,
    "connection reset": reset_connection,
    "cut in the middle": cut_after(300),
    "cut after the first byte": cut_after(1),
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
    "all fields missing": rewrite(lambda answer: dataclasses.replace(answer, fields={})),
    "unknown fields": changed(topicSysFlag="7", novelty="yes"),
    "a broker id nobody has": changed(suggestWhichBrokerId="42"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_nothing_is_lost_or_repeated(orders, broker, what):

    def is_ours(command: RemotingCommand) -> bool:
        return command.fields["topic"] == TOPIC

    broker.on(RequestCode.PULL_MESSAGE, FAULTS[what], times=2, when=is_ours)
    orders.fill(50)
    options = {"pull_batch_size": 8, "pull_retry_delay_s": 0.05, "pull_hold_s": 0.2, "commit_interval_s": 0.05}
    with orders.consuming(**options) as (consumer, seen):
        seen.wait_for(50)
        broker.on(RequestCode.PULL_MESSAGE, FAULTS[what], times=2, when=is_ours)
        orders.send(lambda number: b"m%d" % (number + 50), count=50)
        seen.wait_for(100)
        orders.wait_committed(100)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(100))


@pytest.mark.parametrize(
    "what",
    [
        "next offset of 64 bits",
        "none that match, and a next offset beyond the end",
        "a correction beyond the end",
        "a message far behind the others",
        "the first message far behind the others",
    ],
)
def test_an_answer_that_cannot_be_right_is_told_once_and_nothing_of_it_is_taken(orders, broker, what):
    orders.fill(20)
    events, seen, others = Events(), Seen(), f"{TOPIC}-neighbour"
    orders.make(1, others)

    def is_ours(command: RemotingCommand) -> bool:
        return command.fields["topic"] == TOPIC

    broker.on(RequestCode.PULL_MESSAGE, IMPOSSIBLE[what], times=None, when=is_ours)
    consumer = orders.consumer(consume_from="first")
    consumer.subscribe(TOPIC, seen)
    consumer.subscribe(others, seen)
    with consumer:
        event = events.wait_for("answer-refused")
        assert event.queue == QUEUE
        broker.wait_for(RequestCode.PULL_MESSAGE, 2, when=is_ours)
        orders.cluster.send(others, b"neighbour")
        seen.wait_for(1)
        assert consumer.state is ConsumerState.RUNNING
        assert consumer.progress()[event.queue].committed in (0, None)
        assert seen.bodies == [b"neighbour"]
        broker.clear_faults()
        seen.wait_for(21)
    assert orders.committed == {0: 20}
    assert Counter(seen.bodies) == Counter([*numbered(20), b"neighbour"])


def test_a_broker_that_holds_no_pull_is_asked_less_and_less(orders, broker):

    def is_ours(command: RemotingCommand) -> bool:
        return command.fields["topic"] == TOPIC

    def nothing(exchange) -> None:
        here = exchange.request.fields["queueOffset"]
        fields = {"nextBeginOffset": here, "minOffset": "0", "maxOffset": here, "suggestWhichBrokerId": "0"}
        exchange.answer(exchange.request.answer(19, "OFFSET_OVERFLOW_ONE", fields))

    broker.on(RequestCode.PULL_MESSAGE, nothing, times=None, when=is_ours)
    seen = Seen()
    consumer = orders.consumer(consume_from="first")
    consumer.subscribe(TOPIC, seen)
    with consumer:
        broker.wait_for(RequestCode.PULL_MESSAGE, when=is_ours)
        began = time.monotonic()
        broker.wait_for(RequestCode.PULL_MESSAGE, 14, when=is_ours)
        assert time.monotonic() - began > 2
        orders.send(b"m0")
        broker.clear_faults()
        seen.wait_for(1)


def test_an_answer_cut_at_every_byte(orders, broker):
    orders.send(b"m0")
    lengths: list[int] = []

    def measure(answer: RemotingCommand) -> RemotingCommand:
        lengths.append(len(encode_command(answer)))
        return answer

    def is_ours(command: RemotingCommand) -> bool:
        return command.fields["topic"] == TOPIC

    broker.on(RequestCode.PULL_MESSAGE, rewrite(measure), when=is_ours)
    options = {"pull_retry_delay_s": 0.001, "commit_interval_s": 0.1}
    with orders.consuming(**options) as (consumer, seen):
        seen.wait_for(1)
        (whole,) = lengths
        for cut in range(whole):
            broker.on(RequestCode.PULL_MESSAGE, cut_after(cut), when=is_ours)
        broker.close_connections()  # the pull that is held came before the faults
        orders.send(b"m1")
        seen.wait_for(2, 4 * WAIT_S)
        assert len(broker.requests(RequestCode.PULL_MESSAGE)) > whole
        orders.wait_committed(2)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(2))


def test_pulls_whose_answers_never_come_are_asked_again_and_what_comes_too_late_is_ignored(orders, broker):
    """A pull is waited for as long as a broker may hold it, and as any call besides: at the least 5 s."""
    ways = {f"{GROUP}-{number}": fault for number, fault in enumerate((drop, drop_answer, delay(7)))}
    for each, fault in ways.items():
        orders.make(1, each)
        broker.on(RequestCode.PULL_MESSAGE, fault, when=lambda command, each=each: command.fields["topic"] == each)
    options = {"pull_hold_s": 0.1, "call_timeout_s": 1.0}
    with consuming(orders.cluster, f"{GROUP}-0", GROUP, **options) as (consumer, seen):
        for each in list(ways)[1:]:
            consumer.subscribe(each, seen)
        for number, each in enumerate(ways):
            broker.wait_for(RequestCode.PULL_MESSAGE, when=lambda command, each=each: command.fields["topic"] == each)
            orders.cluster.send(each, b"m%d" % number)
        seen.wait_for(3)
        told = "PULL_MESSAGE was not answered"
        until(lambda: any(told in event.text for event in orders.events.of("broker-unreachable")), "it is told")
        orders.cluster.send(f"{GROUP}-2", b"m3")
        seen.wait_for(4)
    assert Counter(seen.bodies) == Counter(numbered(4))


def test_several_queues_do_not_hold_each_other_up(orders, broker):
    orders.make(queues=4)

    def is_bad(command: RemotingCommand) -> bool:
        return (command.fields["topic"], command.fields["queueId"]) == (TOPIC, "2")

    broker.on(RequestCode.PULL_MESSAGE, answer(1, "disk trouble"), times=None, when=is_bad)
    events, began = Events(), time.monotonic()
    orders.fill(40)
    with orders.consuming() as (consumer, seen):
        seen.wait_for(30)
        queue = MessageQueue(TOPIC, "broker-a", 2)
        until(lambda: "disk trouble" in consumer.progress()[queue].last_error, "the progress tells it")
        assert "disk trouble" in events.wait_for("broker-unreachable").text
        broker.clear_faults()
        seen.wait_for(40)
    most = 1 + (time.monotonic() - began) // 10
    assert len(events.of("broker-unreachable")) <= most, "the same trouble is told every 10 s"
    assert Counter(seen.bodies) == Counter(numbered(40))
