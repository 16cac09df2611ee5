"""Resets of groups that ours share with Java members, and mqadmin's of broadcasting groups of ours."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from pyrocket_consumer import Admin
from pyrocket_consumer.admin import ResetState
from tests.consuming import consuming, until
from tests.interop.members import client_id, java_named, named
from tests.resetting import caught_up, fill, queue, wait_until_seen, wait_until_stored


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
        real_cluster.name_server, group, topic, persistIntervalMs=1000, **java_named("java"), **options
    ) as consumer:
        yield consumer


def test_a_java_member_that_cannot_be_reached_keeps_its_place(
    real_cluster, java, admin, topic, group, stores
):
    fill(real_cluster, topic, 20, queues=2)
    with (
        java_member(real_cluster, java, group, topic, broadcasting=True) as other,
        consuming(real_cluster, topic, group, **named("ours"), **stores) as (_, seen),
    ):
        other.wait_for_messages(20)
        wait_until_seen(seen, 1, 20)
        plan = admin.plan_reset(group, topic, "earliest")
        (problem,) = plan.problems
        assert problem.startswith(f"{client_id('java')}: JAVA {real_cluster.version} cannot be reset in broadcasting")
        result = plan.execute()
        assert {outcome.subject: outcome.state for outcome in result.outcomes} == {
            client_id("java"): ResetState.UNREACHED, client_id("ours"): ResetState.MOVED
        }  # fmt: skip
        assert not result.verified
        wait_until_seen(seen, 2, 20)
        fill(real_cluster, topic, 2, start=20)
        other.wait_for_messages(22)
        assert len(other.messages) == 22


@pytest.mark.versions("5.3.3", "5.5.0")
def test_a_java_member_that_obeys_is_reset_through_its_broker(real_cluster, java, admin, topic, group, stores):
    """Brokers of these releases keep resets; one that is told not to can tell Java members that obey (from 5.2 on)."""
    fill(real_cluster, topic, 20, queues=2)
    broker = real_cluster.broker("broker-a")
    broker.update_config(useServerSideResetOffset=False)
    try:
        with (
            java_member(real_cluster, java, group, topic, broadcasting=True, pause_s=0.1) as other,
            consuming(real_cluster, topic, group, **named("ours"), **stores) as (consumer, seen),
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
            assert len(seen.messages) == 32, "the broker's word to ours was the same reset"
        assert {*real_cluster.committed(group, topic).values()} <= {-1}, "no offset is left"
    finally:
        broker.update_config(useServerSideResetOffset=True)


def test_mqadmin_s_reset_of_a_broadcasting_group(real_cluster, java, topic, group, stores):
    """Brokers that keep resets tell one member for each queue; ours tell each other. The other brokers refuse."""
    fill(real_cluster, topic, 20, queues=2)
    options = {**stores, "pull_hold_s": 1}
    with (
        consuming(real_cluster, topic, group, **named("a"), **options) as (_, first),
        consuming(real_cluster, topic, group, **named("b"), **options) as (_, second),
        consuming(real_cluster, topic, group, **named("c"), **options) as (_, third),
    ):
        for seen in (first, second, third):
            wait_until_seen(seen, 1, 20)
        told = java.mqadmin(real_cluster.name_server, "resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        if real_cluster.version in ("4.9.7", "5.1.4"):
            assert "not exist" in told
            return
        for seen in (first, second, third):
            wait_until_seen(seen, 2, 20)


def test_a_clustering_group_with_a_java_member_replays_all(real_cluster, java, admin, topic, group):
    real_cluster.create_topic(topic, queues=4)
    with (
        java_member(real_cluster, java, group, topic, pause_s=0.02) as other,
        consuming(real_cluster, topic, group, **named("ours"), pull_hold_s=2) as (consumer, seen),
    ):
        until(lambda: len(real_cluster.members(group)) == 2, "both are online")
        until(lambda: len([each for each in consumer.progress() if each.topic == topic]) == 2, "ours has its share")
        other.wait_for_queues(topic, 2)
        fill(real_cluster, topic, 80)
        until(lambda: len(seen.messages) + len(other.messages) == 80, "all consumed")
        until(lambda: sum(real_cluster.committed(group, topic).values()) == 80, "and committed")
        plan = admin.plan_reset(group, topic, {queue(topic, number): 5 for number in range(4)})
        assert "by the brokers" in str(plan)
        done = threading.Event()

        def stir() -> None:
            """Messages end the pulls that the broker holds: a mark is met by the next one."""
            number = 80
            while not done.wait(1):
                real_cluster.send(topic, b"m%d" % number)
                number += 1

        stirring = threading.Thread(target=stir)
        stirring.start()
        try:
            result = plan.execute()
            assert all(outcome.state in (ResetState.MOVED, ResetState.UNCONFIRMED) for outcome in result.outcomes)
            until(lambda: replayed(seen.messages, 5, 20) == 30, "ours has replayed its queues")
            until(lambda: replayed(other.messages, 5, 20) == 30, "and Java its own")
        finally:
            done.set()
            stirring.join()
        moved_by_us = [outcome for outcome in result.outcomes if client_id("ours") in outcome.text]
        assert len(moved_by_us) == 2, result


@pytest.mark.hazard("H29E")
def test_a_member_replays_queues_it_has_just_taken_over(real_cluster, java, topic, group):
    with caught_up(real_cluster, topic, group, 40, queues=4, **named("a"), pull_hold_s=1) as (first, seen):
        until(lambda: sum(real_cluster.committed(group, topic).values()) == 40, "committed")
        with consuming(real_cluster, topic, group, **named("b"), pull_hold_s=1) as (second, taken):
            for consumer in (first, second):
                until(lambda: len([each for each in consumer.progress() if each.topic == topic]) == 2, "shared")  # noqa: B023
            java.mqadmin(real_cluster.name_server, "resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
            wait_until_seen(taken, 1, 20)
            seen.wait(lambda seen: len(seen.messages) == 60)
            until(lambda: sum(real_cluster.committed(group, topic).values()) == 40, "committed again")


def replayed(messages, low, high):
    """Return how many places of [low, high) were seen more than once."""
    places = [(message.queue, message.queue_offset) for message in list(messages)]
    return len({place for place in places if places.count(place) > 1 and low <= place[1] < high})
