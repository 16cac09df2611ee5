"""`reset_offsets` refuses invalid arguments without moving a queue, and corrects offsets outside of a queue."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError, MessageQueue, RocketError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer
from tests.consuming import Events, consuming
from tests.resets import fill

HELD = MessageQueue("orders", "broker-a", 0)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
STRANGER = MessageQueue("orders", "broker-b", 7)


@pytest.fixture
def cluster():
    with EmbeddedCluster() as cluster:
        fill(cluster, "orders", 5, queues=1)
        yield cluster


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"to": "yesterday"}, "to='yesterday' is not allowed; use 'first' or 'earliest', 'last' or 'latest'"),
        ({"to": None}, "to=None is not allowed"),
        ({"to": 5}, "to=5 is not allowed"),
        ({"to": datetime(2026, 1, 1)}, "has no time zone"),
        ({"to": {HELD: -1}}, "offset -1 of orders/broker-a/0 is not allowed; it must be a whole number from 0"),
        ({"to": {HELD: 2**63}}, "offset 9223372036854775808 of"),
        ({"to": {HELD: True}}, "offset True of"),
        ({"to": {HELD: 1.5}}, "offset 1.5 of"),
        ({"to": {STRANGER: 1}}, "orders/broker-b/7 is not held by this member; it holds orders/broker-a/0"),
        ({"to": {HELD: 1, STRANGER: 1}}, "orders/broker-b/7 is not held"),
        ({"to": {"orders": 1}}, "to={'orders': …} is not allowed; the keys must be MessageQueues"),
        ({"to": "earliest", "queues": [STRANGER]}, "orders/broker-b/7 is not held"),
        ({"to": datetime(2026, 1, 1, tzinfo=UTC), "queues": [STRANGER]}, "orders/broker-b/7 is not held"),
        ({"to": "earliest", "topic": "others"}, "no queue of topic 'others' is held by this member"),
    ],
)
def test_a_wrong_argument_is_an_error_and_moves_nothing(cluster, names, arguments, reason):
    events = Events()
    with consuming(cluster, "orders", names.group(), on_event=events) as (consumer, seen):
        seen.wait_for(5)
        with pytest.raises(ConfigError, match=reason):
            consumer.reset_offsets(**{"topic": "orders", **arguments})
        assert consumer.progress()[HELD].next_to_pull == 5
    assert len(seen.messages) == 5
    assert events.of("offset-reset") == []


@pytest.mark.parametrize(
    ("to", "offset"),
    [("first", 0), ("earliest", 0), ("last", 5), ("latest", 5), (LONG_AGO, 0), ("2020-01-01T00:00:00Z", 0)],
)
def test_a_target_has_the_same_names_everywhere(cluster, names, to, offset):
    with consuming(cluster, "orders", names.group()) as (consumer, seen):
        seen.wait_for(5)
        assert consumer.reset_offsets("orders", to) == {HELD: offset}


def test_the_error_names_a_broker_whose_offsets_are_unknown(cluster, names):
    with consuming(cluster, "orders", names.group()) as (consumer, seen):
        seen.wait_for(5)
        cluster.broker("broker-a").on(RequestCode.GET_MIN_OFFSET, answer(1, "not well"))
        with pytest.raises(RocketError, match="first offsets are not known of 1 of 1 brokers: broker-a: .*not well"):
            consumer.reset_offsets("orders", "earliest")
        assert consumer.progress()[HELD].next_to_pull == 5


def test_an_offset_outside_of_the_queue_moves_to_the_nearest(cluster, names):
    events, group = Events(), names.group()
    cluster.broker("broker-a").delete_before("orders", 0, 2)
    with consuming(cluster, "orders", group, on_event=events) as (consumer, seen):
        seen.wait_for(3)
        assert consumer.reset_offsets("orders", {HELD: 1_000_000}) == {HELD: 5}
        assert cluster.committed(group, "orders") == {0: 5}
        cluster.send("orders", b"next")
        seen.wait_for(4)
        assert consumer.reset_offsets("orders", {HELD: 0}) == {HELD: 2}
        seen.wait(lambda seen: len(seen.messages) == 8)
    assert [event.facts["to"] for event in events.of("offset-reset")] == [5, 2]
    assert events.of("offset-corrected") == []
