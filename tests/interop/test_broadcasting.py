"""Broadcasting with Java members: all get all messages, and each kind continues from the other's offsets.json."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.consumer.processes import member
from tests.consuming import consuming, numbered, until
from tests.interop.members import client_id, java_options, our_options, wait_until_committed
from tests.resets import fill

NAME = "shared"
"""The instance name that both kinds use in turn: their directory."""


@pytest.fixture
def offsets_directory(java, group):
    """Return the directory in which both kinds keep the offsets of the group."""
    return java.offsets_directory / client_id(NAME) / group


def ours(cluster, java, topic, group, **options):
    directory = {"message_model": "broadcasting", "offset_store_dir": java.offsets_directory}
    return consuming(cluster, topic, group, **directory, **{**our_options(NAME), **options})


def javas(cluster, java, topic, group, **options):
    return java.consumer(cluster.name_server, group, topic, broadcasting=True, **{**java_options(NAME), **options})


@pytest.mark.parametrize("kind", ["real", "embedded"])
def test_java_members_and_ours_see_every_message(either_cluster, java, topic, group, kind):
    fill(either_cluster, topic, 20, queues=4)
    with (
        ours(either_cluster, java, topic, group, **our_options("one")) as (_, first),
        ours(either_cluster, java, topic, group, **our_options("two")) as (_, second),
        javas(either_cluster, java, topic, group, **java_options("three")) as third,
    ):
        fill(either_cluster, topic, 20, start=20)
        first.wait_for(40)
        second.wait_for(40)
        third.wait_for_messages(40)
    java_bodies = [message.body for message in third.messages]
    assert Counter(first.bodies) == Counter(second.bodies) == Counter(java_bodies) == Counter(numbered(40))


def test_each_kind_continues_where_the_other_ended(real_cluster, java, topic, group, offsets_directory):
    """Java, ours, Java, ours: in one directory, each begins at the offsets where the previous one ended."""
    real_cluster.create_topic(topic, queues=4)
    ends = []
    for turn in range(4):
        fill(real_cluster, topic, 12, start=12 * turn)
        if turn % 2 == 0:
            with javas(real_cluster, java, topic, group) as each:
                each.wait_for_messages(12)
                wait_until_committed(real_cluster, group, each.client_id, topic, 12 * (turn + 1))
            bodies = [message.body for message in each.messages]
        else:
            with ours(real_cluster, java, topic, group) as (consumer, seen):
                assert consumer.client_id == client_id(NAME)
                assert {progress.origin for progress in consumer.progress().values()} == {"stored"}
                seen.wait_for(12)
            bodies = seen.bodies
        assert Counter(bodies) == Counter(numbered(12, 12 * turn))
        with LocalFileOffsetStore(offsets_directory) as store:
            ends.append(sorted(store.clone_offset_table(topic).values()))
    assert ends == [[3] * 4, [6] * 4, [9] * 4, [12] * 4]


def test_a_file_that_java_wrote_after_a_kill_counts(real_cluster, java, topic, group, offsets_directory):
    """Our member, killed with -9, leaves newer offsets in its journal than in offsets.json.

    Java continues from the file and rewrites it, so the journal no longer counts.
    """
    fill(real_cluster, topic, 10, queues=2)
    options = {
        "message_model": "broadcasting",
        "offset_store_dir": str(java.offsets_directory),
        "commit_interval_s": 0.05,
        **our_options(NAME),
    }
    with member(real_cluster, topic, group, **options) as victim:
        victim.wait(lambda lines: len(victim.bodies) == 10)
        fill(real_cluster, topic, 10, start=10)
        victim.wait(lambda lines: len(victim.bodies) == 20)
        victim.send(signal.SIGKILL)
        victim.ended()
    fill(real_cluster, topic, 10, start=20)
    with javas(real_cluster, java, topic, group) as each:
        until(lambda: set(numbered(10, 20)) <= {message.body for message in each.messages}, "the Java member's")
        wait_until_committed(real_cluster, group, each.client_id, topic, 30)
    fill(real_cluster, topic, 10, start=30)
    with ours(real_cluster, java, topic, group) as (_, seen):
        seen.wait_for(10)
    assert Counter(seen.bodies) == Counter(numbered(10, 30))


def test_java_does_not_change_our_other_files(real_cluster, java, topic, group, offsets_directory):
    fill(real_cluster, topic, 3, queues=1)
    with ours(real_cluster, java, topic, group) as (_, seen):
        seen.wait_for(3)
    before = {path.name for path in offsets_directory.iterdir()}
    with javas(real_cluster, java, topic, group) as each:
        fill(real_cluster, topic, 3, start=3)
        each.wait_for_messages(3)
    assert Counter(message.body for message in each.messages) == Counter(numbered(3, 3))
    assert before <= {path.name for path in offsets_directory.iterdir()} | {"offsets.lock"}
