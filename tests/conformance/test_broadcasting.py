"""In a broadcasting group every member receives all messages, and continues where it ended."""

from __future__ import annotations

from collections import Counter

from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.consuming import Events, RecordingListener, consuming, numbered
from tests.resets import fill, members


def test_every_member_sees_every_message(cluster, topic, group, stores):
    cluster.create_topic(topic, queues=4)
    with members(cluster, topic, group, ("one", "two"), **stores) as ((_, first), (_, second)):
        fill(cluster, topic, 40)
        first.wait_for(40)
        second.wait_for(40)
    assert Counter(first.bodies) == Counter(second.bodies) == Counter(numbered(40))


def test_a_restarted_member_continues_from_its_file(cluster, topic, group, stores, tmp_path):
    fill(cluster, topic, 20, queues=2)
    with consuming(cluster, topic, group, **stores) as (_, seen):
        seen.wait_for(20)
    (file,) = tmp_path.rglob("offsets.json")
    with LocalFileOffsetStore(file.parent) as store:
        assert sum(store.clone_offset_table(topic).values()) == 20
    fill(cluster, topic, 20, start=20)
    with consuming(cluster, topic, group, **stores) as (_, again):
        again.wait_for(20)
    assert Counter(again.bodies) == Counter(numbered(20, 20))


def test_a_failed_message_counts_as_consumed(cluster, topic, group, stores):
    fill(cluster, topic, 5, queues=1)

    def judge(message):
        if message.body == b"m1":
            raise ValueError("not this one")

    events = Events()
    with consuming(cluster, topic, group, RecordingListener(judge), on_event=events, **stores) as (_, seen):
        seen.wait_for(5)
        events.wait_for("message-given-up")
    with consuming(cluster, topic, group, **stores) as (_, again):
        fill(cluster, topic, 1, start=5)
        again.wait_for(1)
    assert again.bodies == [b"m5"]


def test_two_members_of_one_host_get_a_store_each(cluster, topic, group, stores, tmp_path):
    cluster.create_topic(topic, queues=1)
    with (
        consuming(cluster, topic, group, **stores) as (first, one),
        consuming(cluster, topic, group, **stores) as (second, two),
    ):
        assert first.client_id != second.client_id
        fill(cluster, topic, 5)
        one.wait_for(5)
        two.wait_for(5)
    assert len(list(tmp_path.rglob("offsets.json"))) == 2
