"""mqadmin resets our clustering group in both ways of brokers, and our members replay and commit again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from pyrocket_consumer import Admin
from pyrocket_consumer.admin import ResetState
from tests.consuming import Events, RecordingListener, consuming, numbered, until
from tests.interop.members import client_id, java_options, our_options
from tests.resets import fill, held, members, queue, wait_until_seen, wait_until_stored

QUEUES = 4


@contextmanager
def server_side(cluster, wanted):
    """Let the broker reset by its own marks, or by requests to the members."""
    broker = cluster.broker("broker-a")
    broker.update_config(useServerSideResetOffset=wanted)
    try:
        yield
    finally:
        broker.update_config(useServerSideResetOffset=not wanted)


def test_two_members_replay_from_a_time(real_cluster, mqadmin, topic, group):
    replay(real_cluster, mqadmin, topic, group)


@pytest.mark.versions("5.1.4", "5.3.3", "5.5.0")  # earlier releases know only one way
def test_two_members_replay_with_the_default_of_other_releases(real_cluster, mqadmin, topic, group):
    with server_side(real_cluster, real_cluster.version == "5.1.4"):
        replay(real_cluster, mqadmin, topic, group)


@pytest.mark.versions("4.9.7", "5.1.4")  # later releases use the letter for another option
def test_two_members_replay_after_the_request_for_cplusplus(real_cluster, mqadmin, topic, group):
    """With `-c` the broker sends its members a list, which Java members cannot read."""
    replay(real_cluster, mqadmin, topic, group, "-c")


@pytest.mark.versions("5.3.3", "5.5.0")
def test_one_queue_replays_from_an_offset(real_cluster, mqadmin, topic, group):
    real_cluster.create_topic(topic, queues=QUEUES)
    events, where = Events(), ("-b", real_cluster.broker("broker-a").address, "-q", "1", "-o", "7")
    with consuming(real_cluster, topic, group, on_event=events, pull_hold_s=1) as (_, seen):
        fill(real_cluster, topic, 40)
        seen.wait_for(40)
        wait_for_commits(real_cluster, group, topic, 10)
        assert "reset consumer offset to 7" in mqadmin(
            "resetOffsetByTime", "-g", group, "-t", topic, "-s", "now", *where
        )
        fill(real_cluster, topic, QUEUES, start=40)
        events.wait_for("offset-reset")
        seen.wait(lambda seen: len(seen.messages) >= 47)
        wait_for_commits(real_cluster, group, topic, 11)
    twice = {position for position, times in seen.counts.items() if times == 2}
    assert {queue.queue_id for queue, _ in twice} == {1}
    assert {7, 8, 9} <= {offset for _, offset in twice} <= {7, 8, 9, 10}


def replay(cluster, mqadmin, topic, group, *extra):
    cluster.create_topic(topic, queues=QUEUES)
    release = threading.Event()
    release.set()

    def wait_for_release(message):
        release.wait(60)

    seen, events = RecordingListener(wait_for_release), Events()
    options = {"on_event": events, "pull_hold_s": 1}
    with (
        consuming(cluster, topic, group, seen, **options) as (first, _),
        consuming(cluster, topic, group, seen, **options) as (second, _),
    ):
        until(lambda: len(held(first, topic)) == len(held(second, topic)) == 2, "two queues each")
        fill(cluster, topic, 20)
        seen.wait_for(20)
        between = 0.3 + max(message.stored_at_ms for message in seen.messages) / 1000
        until(lambda: time.time() > between, "a gap, because 4.9 uses the message nearest in time")
        fill(cluster, topic, 20, start=20)
        wait_for_commits(cluster, group, topic, 10)
        at = min(message.stored_at_ms for message in seen.messages if message.queue_offset == 5)
        release.clear()
        try:
            output = mqadmin("resetOffsetByTime", "-g", group, "-t", topic, "-s", str(at), *extra)
            assert rows(output) == {(str(queue_id), "5") for queue_id in range(QUEUES)}
            fill(
                cluster, topic, QUEUES, start=40
            )  # ends the pulls that the broker holds; otherwise they end up to 6 s later
            events.wait_for("offset-reset", QUEUES)
            wait_for_commits(cluster, group, topic, 5)
        finally:
            release.set()
        seen.wait(lambda seen: Counter(seen.bodies) >= Counter(numbered(44)) + Counter(numbered(20, 20)))
        wait_for_commits(cluster, group, topic, 11)
    again = Counter(seen.bodies) - Counter(numbered(44))
    assert set(numbered(20, 20)) <= set(again) <= set(numbered(24, 20))
    assert set(again.values()) == {1}
    assert cluster.committed(group, topic) == dict.fromkeys(range(QUEUES), 11)


def wait_for_commits(cluster, group, topic, offset):
    """Wait until the group has committed `offset` for each queue."""
    try:
        until(lambda: cluster.committed(group, topic) == dict.fromkeys(range(QUEUES), offset), "commits")
    except AssertionError as error:
        raise AssertionError(f"committed are {cluster.committed(group, topic)}, not {offset} each") from error


def rows(report):
    """Return queue ids and offsets of a reset's report."""
    lines = [line.split() for line in report.splitlines()]
    return {(line[1], line[2]) for line in lines if len(line) == 3 and line[0] == "broker-a"}


def test_accumulated_messages_are_skipped(real_cluster, mqadmin, topic, group):
    real_cluster.create_topic(topic, queues=QUEUES)
    release, events = threading.Event(), Events()

    def finish_two_of_each_queue(message):
        if message.queue_offset >= 2:
            release.wait(60)

    options = {"on_event": events, "pull_hold_s": 1, "consume_threads": 8}
    with consuming(real_cluster, topic, group, RecordingListener(finish_two_of_each_queue), **options) as (_, seen):
        try:
            fill(real_cluster, topic, 2 * QUEUES)
            wait_for_commits(real_cluster, group, topic, 2)
            fill(real_cluster, topic, 8 * QUEUES, start=2 * QUEUES)
            seen.wait_for(2 * QUEUES + 8)
            output = mqadmin("skipAccumulatedMessage", "-g", group, "-t", topic, "-f", "true")
            assert rows(output) == {(str(queue_id), "10") for queue_id in range(QUEUES)}
            events.wait_for("offset-reset", QUEUES)
            wait_for_commits(real_cluster, group, topic, 10)
        finally:
            release.set()
        fill(real_cluster, topic, QUEUES, start=40)
        until(lambda: set(numbered(QUEUES, 40)) <= set(seen.bodies), "new messages")
        wait_for_commits(real_cluster, group, topic, 11)
    in_hand = 8
    assert len(seen.messages) == 2 * QUEUES + in_hand + QUEUES


def test_a_stopped_group_starts_at_the_target_of_its_reset(real_cluster, mqadmin, topic, group):
    fill(real_cluster, topic, 40, queues=QUEUES)
    with consuming(real_cluster, topic, group) as (_, seen):
        seen.wait_for(40)
    until(lambda: real_cluster.members(group) == [], "it is away")
    mqadmin("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    with consuming(real_cluster, topic, group) as (_, again):
        again.wait_for(40)
        wait_for_commits(real_cluster, group, topic, 10)
    assert Counter(again.bodies) == Counter(numbered(40))


# --- resets by our admin of groups with Java members, and of broadcasting groups


@pytest.fixture
def admin(real_cluster):
    with Admin(name_server=real_cluster.name_server) as admin:
        yield admin


@pytest.fixture
def stores(tmp_path):
    return {"message_model": "broadcasting", "offset_store_dir": tmp_path}


@contextmanager
def java_member(real_cluster, java, group, topic, **options):
    with java.consumer(
        real_cluster.name_server, group, topic, persistIntervalMs=1000, **java_options("java"), **options
    ) as consumer:
        yield consumer


def test_a_java_member_that_cannot_be_reset_keeps_its_offset(real_cluster, java, admin, topic, group, stores):
    fill(real_cluster, topic, 20, queues=2)
    with (
        java_member(real_cluster, java, group, topic, broadcasting=True) as other,
        consuming(real_cluster, topic, group, **our_options("ours"), **stores) as (_, seen),
    ):
        other.wait_for_messages(20)
        wait_until_seen(seen, 1, 20)
        plan = admin.plan_reset(group, topic, "earliest")
        (problem,) = plan.problems
        assert problem.startswith(f"{client_id('java')}: JAVA {real_cluster.version} cannot be reset in broadcasting")
        result = plan.execute()
        assert {outcome.subject: outcome.state for outcome in result.outcomes} == {
            client_id("java"): ResetState.UNREACHED,
            client_id("ours"): ResetState.MOVED,
        }
        assert not result.verified
        wait_until_seen(seen, 2, 20)
        fill(real_cluster, topic, 2, start=20)
        other.wait_for_messages(22)
        assert len(other.messages) == 22


@pytest.mark.versions("5.3.3", "5.5.0")
def test_a_java_member_is_reset_through_its_broker(real_cluster, java, admin, topic, group, stores):
    """Brokers of these releases keep resets. With another setting they send them to Java members (from 5.2 on)."""
    fill(real_cluster, topic, 20, queues=2)
    broker = real_cluster.broker("broker-a")
    broker.update_config(useServerSideResetOffset=False)
    try:
        with (
            java_member(real_cluster, java, group, topic, broadcasting=True, pause_s=0.1) as other,
            consuming(real_cluster, topic, group, **our_options("ours"), **stores) as (consumer, seen),
        ):
            other.wait_for_messages(20)
            wait_until_seen(seen, 1, 20)
            wait_until_stored(consumer, topic, 20)
            plan = admin.plan_reset(group, topic, {queue(topic, 0): 3, queue(topic, 1): 5})
            assert plan.problems == []
            result = plan.execute()
            assert result.verified, result
            seen.wait(lambda seen: len(seen.messages) == 20 + 7 + 5)
            other.wait_for_messages(20 + 7 + 5)
            wait_until_stored(consumer, topic, 20)
            assert len(seen.messages) == 32, "the broker's request to ours was the same reset"
        assert {*real_cluster.committed(group, topic).values()} <= {-1}, "no offset is left"
    finally:
        broker.update_config(useServerSideResetOffset=True)


def test_mqadmin_s_reset_of_a_broadcasting_group(real_cluster, java, topic, group, stores):
    """Brokers that keep resets notify one member per queue, and our members forward it. The other brokers refuse."""
    fill(real_cluster, topic, 20, queues=2)
    options = {**stores, "pull_hold_s": 1}
    with members(real_cluster, topic, group, "abc", **options) as ours:
        for _, seen in ours:
            wait_until_seen(seen, 1, 20)
        output = java.mqadmin(real_cluster.name_server, "resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        if real_cluster.version in ("4.9.7", "5.1.4"):
            assert "not exist" in output
            return
        for _, seen in ours:
            wait_until_seen(seen, 2, 20)


def test_a_clustering_group_with_a_java_member_replays_all(real_cluster, java, admin, topic, group):
    real_cluster.create_topic(topic, queues=4)
    with (
        java_member(real_cluster, java, group, topic, pause_s=0.02) as other,
        consuming(real_cluster, topic, group, **our_options("ours"), pull_hold_s=2) as (consumer, seen),
    ):
        until(lambda: len(real_cluster.members(group)) == 2, "both are online")
        until(lambda: len(held(consumer, topic)) == 2, "ours has its share")
        other.wait_for_queues(topic, 2)
        fill(real_cluster, topic, 80)
        until(lambda: len(seen.messages) + len(other.messages) == 80, "all consumed")
        until(lambda: sum(real_cluster.committed(group, topic).values()) == 80, "and committed")
        plan = admin.plan_reset(group, topic, {queue(topic, number): 5 for number in range(4)})
        assert "by the brokers" in str(plan)
        done = threading.Event()

        def send_messages() -> None:
            """Send messages, which end the pulls that the broker holds. The next pull then gets the reset mark."""
            number = 80
            while not done.wait(1):
                real_cluster.send(topic, b"m%d" % number)
                number += 1

        sending = threading.Thread(target=send_messages)
        sending.start()
        try:
            result = plan.execute()
            assert all(outcome.state in (ResetState.MOVED, ResetState.UNCONFIRMED) for outcome in result.outcomes)
            until(lambda: replayed(seen.messages, 5, 20) == 30, "ours has replayed its queues")
            until(lambda: replayed(other.messages, 5, 20) == 30, "and Java its own")
        finally:
            done.set()
            sending.join()
        moved_by_us = [outcome for outcome in result.outcomes if client_id("ours") in outcome.text]
        assert len(moved_by_us) == 2, result


def replayed(messages, low, high):
    """Return how many messages with an offset in [low, high) were seen more than once."""
    positions = [(message.queue, message.queue_offset) for message in list(messages)]
    return len({position for position in positions if positions.count(position) > 1 and low <= position[1] < high})
