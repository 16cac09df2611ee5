"""What `reset_offsets` does not take, it says, and nothing moves; what lies outside of a queue is corrected."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError, MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import Events, consuming, numbered, until

HELD = MessageQueue("orders", "broker-a", 0)
STRANGER = MessageQueue("orders", "broker-b", 7)


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        for body in numbered(5):
            cluster.send("orders", body)
        yield cluster


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"to": "yesterday"}, "to='yesterday' is not allowed; use 'earliest', 'latest'"),
        ({"to": None}, "to=None is not allowed"),
        ({"to": 5}, "to=5 is not allowed"),
        ({"to": datetime(2026, 1, 1)}, "has no time zone"),
        ({"to": {HELD: -1}}, "offset -1 of orders/broker-a/0 is not allowed; it must be a whole number from 0"),
        ({"to": {HELD: 2**63}}, "offset 9223372036854775808 of"),
        ({"to": {HELD: True}}, "offset True of"),
        ({"to": {HELD: 1.5}}, "offset 1.5 of"),
        ({"to": {STRANGER: 1}}, "orders/broker-b/7 is not held by this member; it holds orders/broker-a/0"),
        ({"to": {HELD: 1, STRANGER: 1}}, "orders/broker-b/7 is not held"),
        ({"to": {"orders": 1}}, "orders is not held by this member"),
        ({"to": "earliest", "queues": [STRANGER]}, "orders/broker-b/7 is not held"),
        ({"to": datetime(2026, 1, 1, tzinfo=UTC), "queues": [STRANGER]}, "orders/broker-b/7 is not held"),
        ({"to": "earliest", "topic": "others"}, "no queue of topic 'others' is held by this member"),
    ],
)
def test_a_wrong_argument_is_told_and_nothing_moves(cluster, names, arguments, reason):
    events = Events()
    with consuming(cluster, "orders", names.group(), on_event=events) as (consumer, seen):
        seen.wait_for(5)
        with pytest.raises(ConfigError, match=reason):
            consumer.reset_offsets(**{"topic": "orders", **arguments})
        assert consumer.progress()[HELD].next_to_pull == 5
    assert len(seen.messages) == 5
    assert events.of("offset-reset") == []


def test_an_offset_behind_the_last_message_is_corrected_and_said(cluster, names):
    events, group = Events(), names.group()
    with consuming(cluster, "orders", group, on_event=events) as (consumer, seen):
        seen.wait_for(5)
        assert consumer.reset_offsets("orders", {HELD: 1_000_000}) == {HELD: 1_000_000}
        corrected = events.wait_for("offset-corrected")
        assert corrected.queue == HELD
        until(lambda: cluster.committed(group, "orders") == {0: 5}, "the correction is committed")
        cluster.send("orders", b"next")
        seen.wait_for(6)
