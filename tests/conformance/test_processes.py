"""Consumers in separate processes: signals and kills."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from pyrocket_consumer import ClientClosed
from tests.consumer.processes import member
from tests.consuming import RecordingListener, consuming, numbered, until
from tests.resets import fill


def texts(count, start=0):
    return {body.decode() for body in numbered(count, start)}


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_closes_a_consumer_cleanly(cluster, topic, group, number):
    fill(cluster, topic, 20, queues=2)
    with member(cluster, topic, group, commit_interval_s=60) as child:
        child.wait(lambda lines: len(child.bodies) == 20)
        child.send(number)
        assert child.ended() == 0, child.errors
    assert child.lines[-2:] == ["joined", "closed"]
    assert sum(cluster.committed(group, topic).values()) == 20, "the last offsets were stored"
    until(lambda: cluster.members(group) == [], "it has left the group")


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
def test_a_signal_waits_for_the_running_listener(cluster, topic, group):
    fill(cluster, topic, 1, queues=1)
    with member(cluster, topic, group, listener_s=1.0) as child:
        child.wait_for_line("begun m0")
        child.send(signal.SIGTERM)
        assert child.ended() == 0, child.errors
    assert "m0" in child.lines
    assert cluster.committed(group, topic) == {0: 1}


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
def test_a_member_killed_with_9_loses_nothing(cluster, topic, group):
    cluster.create_topic(topic, queues=4)
    with member(cluster, topic, group) as victim, consuming(cluster, topic, group) as (consumer, seen):
        until(lambda: len(cluster.members(group)) == 2, "two members")
        fill(cluster, topic, 100)
        until(lambda: len(victim.bodies) + len(set(seen.bodies)) >= 50, "both consume")
        victim.send(signal.SIGKILL)
        victim.ended()
        fill(cluster, topic, 100, start=100)
        everything = texts(200)
        until(lambda: set(victim.bodies) | {body.decode() for body in seen.bodies} >= everything, "nothing is lost", 60)


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
def test_a_killed_broadcasting_member_continues_from_its_file(cluster, topic, group, stores):
    fill(cluster, topic, 50, queues=2)
    with member(cluster, topic, group, **stores) as first:
        first.wait(lambda lines: len(first.bodies) == 50)
        first.send(signal.SIGKILL)
        first.ended()
    fill(cluster, topic, 50, start=50)
    with member(cluster, topic, group, **stores) as second:
        second.wait(lambda lines: texts(50, 50) <= set(second.bodies))
    assert set(first.bodies) | set(second.bodies) == texts(100)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_consumer_refuses_to_work_in_a_forked_child(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    with consuming(cluster, topic, group) as (consumer, seen):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child reports the result, and exits without running pytest
            try:
                consumer.progress()
                outcome = b"worked"
            except ClientClosed as error:
                outcome = str(error).encode()
            finally:
                os.write(write_end, outcome)
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            assert b"fork" in pipe.read()
        os.waitpid(pid, 0)
        fill(cluster, topic, 3)
        seen.wait_for(3)
    assert Counter(seen.bodies) == Counter(numbered(3))


def test_events_and_messages_of_many_starts_and_stops(cluster, topic, group):
    """A restart at any time repeats messages, but never skips one."""
    cluster.create_topic(topic, queues=2)
    everything = RecordingListener()
    for round_number in range(5):
        fill(cluster, topic, 20, start=20 * round_number)
        with consuming(cluster, topic, group, everything):
            everything.wait_for(20 * round_number + 10)
    with consuming(cluster, topic, group, everything):
        everything.wait_for(100)
    assert set(everything.bodies) == set(numbered(100))
