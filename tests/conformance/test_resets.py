"""Resets of broadcasting and clustering groups by an admin, on unmodified brokers."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from pyrocket_consumer import Admin, ConfigError, PushConsumer
from pyrocket_consumer.admin import ResetState
from tests.consumer.processes import member
from tests.consuming import QUICK, Events, RecordingListener, consuming, until
from tests.resets import (
    caught_up,
    consumed_before,
    fill,
    held,
    members,
    queue,
    reset,
    wait_until_seen,
    wait_until_stored,
)

# --- broadcasting


@pytest.mark.hazard("H03")
def test_every_broadcasting_member_is_reset_and_verified(cluster, admin, topic, group, stores):
    fill(cluster, topic, 20, queues=2)
    with members(cluster, topic, group, "abc", **stores) as ours:
        for consumer, seen in ours:
            wait_until_seen(seen, 1, 20)
            wait_until_stored(consumer, topic, 20)
        plan = admin.plan_reset(group, topic, "earliest")
        assert not plan.problems
        assert [(move.member, move.queue.queue_id) for move in plan.moves] == [
            (consumer.client_id, queue_id) for consumer, _ in ours for queue_id in range(2)
        ]
        assert {(move.current, move.target, move.replayed, move.skipped) for move in plan.moves} == {(10, 0, 10, 0)}
        assert all(len(seen.messages) == 20 for _, seen in ours), "a plan moves nothing"
        result = plan.execute()
        assert result.verified, result
        assert {outcome.subject: outcome.state for outcome in result.outcomes} == {
            consumer.client_id: ResetState.MOVED for consumer, _ in ours
        }
        for _, seen in ours:
            wait_until_seen(seen, 2, 20)
        for consumer, _ in ours:
            wait_until_stored(consumer, topic, 20)
    assert cluster.committed(group, topic) == {}, "nothing is left where a clustering group's offsets are"


def test_a_member_offline_for_two_resets_follows_both_at_its_start(cluster, admin, topic, group, stores):
    with caught_up(cluster, topic, group, 30, queues=3, instance_name="away", **stores):
        pass
    with consuming(cluster, topic, group, instance_name="here", **stores) as (_, here):
        wait_until_seen(here, 1, 30)
        assert reset(admin, group, topic, {queue(topic, 0): 4, queue(topic, 1): 4}).verified
        assert reset(admin, group, topic, {queue(topic, 1): 7}).verified
        here.wait(lambda seen: len(seen.messages) == 30 + 6 + 6 + 3)
    with consuming(cluster, topic, group, instance_name="away", **stores) as (consumer, away):
        away.wait(lambda seen: len(seen.messages) == 6 + 3)
        assert sorted((message.queue.queue_id, message.queue_offset) for message in away.messages) == [
            *((0, offset) for offset in range(4, 10)),
            *((1, offset) for offset in range(7, 10)),
        ]
        wait_until_stored(consumer, topic, 30)
    with consuming(cluster, topic, group, instance_name="away", **stores) as (_, again):
        fill(cluster, topic, 3, start=30)
        again.wait_for(3)
    assert set(again.counts.values()) == {1}
    assert len(again.messages) == 3, "a reset is followed once"


def test_a_group_that_is_offline_is_reset_at_its_next_start(cluster, admin, topic, group, stores):
    consumed_before(cluster, topic, group, 10, queues=1, **stores)
    with pytest.raises(ConfigError, match="model="):
        admin.plan_reset(group, topic, "earliest")
    plan = admin.plan_reset(group, topic, {queue(topic, 0): 8}, model="broadcasting")
    assert plan.members == ()
    result = plan.execute()
    assert (result.verified, result.outcomes) == (True, ())
    assert admin.plan_reset(group, topic, "earliest").broadcasting, "the record tells what group it is"
    with consuming(cluster, topic, group, **stores) as (_, again):
        wait_until_seen(again, 1, 2)


def test_a_new_member_starts_by_its_own_rule(cluster, admin, topic, group, stores):
    with caught_up(cluster, topic, group, 5, queues=1, instance_name="old", **stores) as (_, old):
        assert reset(admin, group, topic, "earliest").verified
        wait_until_seen(old, 2, 5)
        options = {**stores, "consume_from": "last"}
        with consuming(cluster, topic, group, instance_name="new", **options) as (consumer, new):
            fill(cluster, topic, 1, start=5)
            new.wait_for(1)
            assert new.bodies == [b"m5"]
            assert consumer.progress()[queue(topic, 0)].start_offset == 5


def test_only_the_queues_named_move(cluster, admin, topic, group, stores):
    with caught_up(cluster, topic, group, 10, queues=2, **stores) as (consumer, seen):
        wait_until_stored(consumer, topic, 10)
        result = reset(admin, group, topic, "earliest", queues=[queue(topic, 1)])
        assert result.verified
        seen.wait(lambda seen: len(seen.messages) == 15)
        assert {message.queue.queue_id for message in seen.messages[10:]} == {1}


def test_a_silent_member_follows_when_it_recovers(real_cluster, topic, group, stores):
    """One member is stopped (SIGSTOP), and the broker waits 10 s for it. The others are not delayed."""
    cluster = real_cluster
    fill(cluster, topic, 5, queues=1)
    options = {**stores, "reset_record_interval_s": 0.5}
    with (
        consuming(cluster, topic, group, instance_name="well", **options) as (_, well),
        member(cluster, topic, group, instance_name="silent", **options) as silent,
        Admin(name_server=cluster.name_server) as admin,
    ):
        wait_until_seen(well, 1, 5)
        silent.wait(lambda lines: len(silent.bodies) == 5)
        plan = admin.plan_reset(group, topic, "earliest")
        silent.send(signal.SIGSTOP)
        moved = threading.Event()
        steps = []

        def progress(step):
            steps.append(step)
            if step.text == "moved":
                moved.set()
                well.wait(lambda seen: len(seen.messages) == 10)

        def wake():
            until(lambda: len(steps) >= 3, "asked once in vain")
            silent.send(signal.SIGCONT)

        waker = threading.Thread(target=wake)
        waker.start()
        try:
            result = plan.execute(progress)
        finally:
            silent.send(signal.SIGCONT)
            waker.join()
        assert moved.is_set()
        assert result.verified, result
        silent.wait(lambda lines: sorted(silent.bodies.values()) == [2] * 5)


@pytest.mark.live
def test_a_killed_member_has_both_queues_reset_or_neither(cluster, admin, topic, group, stores):
    """A member killed right after the confirmation starts at the target once, at its next start."""
    fill(cluster, topic, 10, queues=1)
    options = {**stores, "commit_interval_s": 60}
    with member(cluster, topic, group, listener_s=0.01, **options) as victim:
        victim.wait(lambda lines: len(victim.bodies) == 10)
        assert reset(admin, group, topic, {queue(topic, 0): 5}).verified
        victim.send(signal.SIGKILL)
        victim.ended()
    with consuming(cluster, topic, group, **stores) as (consumer, seen):
        wait_until_stored(consumer, topic, 10)
        assert min(message.queue_offset for message in seen.messages) == 5
    with consuming(cluster, topic, group, **stores) as (consumer, again):
        assert consumer.progress()[queue(topic, 0)].start_offset == 10


def test_two_concurrent_admins_agree_on_one_target_per_queue(cluster, topic, group, stores):
    fill(cluster, topic, 20, queues=2)
    with (
        consuming(cluster, topic, group, instance_name="a", **stores) as (first, _),
        consuming(cluster, topic, group, instance_name="b", **stores) as (second, _),
        Admin(name_server=cluster.name_server) as one,
        Admin(name_server=cluster.name_server) as other,
    ):
        first.pause()
        second.pause()
        plans = [
            admin.plan_reset(group, topic, dict.fromkeys([queue(topic, 0), queue(topic, 1)], target))
            for admin, target in ((one, 3), (other, 6))
        ]
        with ThreadPoolExecutor() as threads:
            results = list(threads.map(lambda plan: plan.execute(), plans))

        def ends():
            return [[each.start_offset for _, each in sorted(one.progress().items())] for one in (first, second)]

        until(lambda: ends()[0] == ends()[1], f"the members agree: {ends()}, {results[0]}, {results[1]}")
        assert set(ends()[0]) <= {3, 6}
        epochs = [result.epoch for result in results]
        assert epochs[0] != epochs[1] or any(result.raced for result in results)


# --- clustering


def test_a_clustering_group_is_reset_at_its_members(cluster, admin, topic, group):
    fill(cluster, topic, 40, queues=4)
    seen = RecordingListener()
    with members(cluster, topic, group, "ab", seen) as ((first, _), (second, _)):
        until(lambda: len(held(first, topic)) == len(held(second, topic)) == 2, "two queues each")
        wait_until_seen(seen, 1, 40)
        until(lambda: sum(cluster.committed(group, topic).values()) == 40, "committed")
        plan = admin.plan_reset(group, topic, {queue(topic, number): 2 + number for number in range(3)})
        assert [(move.target, move.replayed) for move in plan.moves] == [(2, 8), (3, 7), (4, 6)]
        result = plan.execute()
        assert result.verified, result
        seen.wait(lambda seen: len(seen.messages) == 40 + 21)
        until(lambda: sum(cluster.committed(group, topic).values()) == 40, "committed again")
    again = [(message.queue.queue_id, message.queue_offset) for message in seen.messages[40:]]
    assert sorted(again) == [(number, offset) for number in range(3) for offset in range(2 + number, 10)]


def test_a_clustering_group_without_online_members(cluster, admin, topic, group):
    consumed_before(cluster, topic, group, 10, queues=2)
    assert reset(admin, group, topic, "earliest", queues=[queue(topic, 1)]).verified
    assert cluster.committed(group, topic) == {0: 5, 1: 0}
    with consuming(cluster, topic, group) as (_, again):
        wait_until_seen(again, 1, 5)


def test_a_reset_to_a_time_starts_at_the_first_message_since(cluster, admin, topic, group):
    fill(cluster, topic, 5, queues=1)
    time.sleep(0.05)
    between = datetime.fromtimestamp(time.time(), UTC)
    time.sleep(0.05)
    fill(cluster, topic, 5, start=5)
    with consuming(cluster, topic, group) as (_, seen):
        wait_until_seen(seen, 1, 10)
        until(lambda: cluster.committed(group, topic) == {0: 10}, "committed")
        assert reset(admin, group, topic, between).verified
        seen.wait(lambda seen: len(seen.messages) == 15)
        assert sorted(message.queue_offset for message in seen.messages[10:]) == [5, 6, 7, 8, 9]
        in_future = admin.plan_reset(group, topic, datetime(2100, 1, 1, tzinfo=UTC))
        assert [target.target for target in in_future.targets] == [10]


def test_a_target_outside_the_queue_is_shown_with_the_nearest_offset(cluster, admin, topic, group):
    with caught_up(cluster, topic, group, 5, queues=1) as (_, seen):
        plan = admin.plan_reset(group, topic, {queue(topic, 0): 99})
        assert [(target.wanted, target.target, target.clamped) for target in plan.targets] == [(99, 5, True)]
        assert "wanted 99" in str(plan)
        assert plan.execute().verified
        fill(cluster, topic, 1, start=5)
        seen.wait_for(6)
    assert set(seen.counts.values()) == {1}


def test_a_clustering_member_that_joins_during_a_reset(cluster, admin, topic, group):
    fill(cluster, topic, 40, queues=4)
    seen = RecordingListener()
    with consuming(cluster, topic, group, seen, instance_name="a"):
        wait_until_seen(seen, 1, 40)
        until(lambda: sum(cluster.committed(group, topic).values()) == 40, "committed")
        plan = admin.plan_reset(group, topic, "earliest")
        joiner = PushConsumer(group, name_server=cluster.name_server, instance_name="b", **QUICK)
        joiner.subscribe(topic, seen)
        thread = threading.Thread(target=joiner.start)
        thread.start()
        try:
            result = plan.execute()
            assert result.verified, result
            seen.wait(lambda seen: len(seen.counts) == 40 and min(seen.counts.values()) >= 2)
        finally:
            thread.join()
            joiner.close()
        assert set(seen.counts.values()) >= {2}
        assert min(seen.counts.values()) == 2


@pytest.mark.hazard("H02")
def test_a_reset_during_a_long_listener_call(cluster, admin, topic, group):
    fill(cluster, topic, 3, queues=1)
    begun, go_on = threading.Event(), threading.Event()

    def judge(message):
        if message.queue_offset == 1 and not go_on.is_set():
            begun.set()
            go_on.wait(30)

    seen = RecordingListener(judge)
    with consuming(cluster, topic, group, seen, consume_threads=2) as (consumer, _):
        assert begun.wait(30)
        assert reset(admin, group, topic, "latest").verified
        until(lambda: cluster.committed(group, topic) == {0: 3}, "the target is committed")
        go_on.set()
        fill(cluster, topic, 1, start=3)
        seen.wait(lambda seen: b"m3" in seen.bodies)
        until(lambda: cluster.committed(group, topic) == {0: 4}, "and then what was consumed after it")


@pytest.mark.hazard("H30")
def test_a_paused_member_stays_paused(cluster, admin, topic, group):
    with caught_up(cluster, topic, group, 4, queues=1) as (consumer, seen):
        consumer.pause()
        assert reset(admin, group, topic, "earliest").verified
        assert consumer.progress()[queue(topic, 0)].paused
        assert len(seen.messages) == 4
        consumer.resume()
        wait_until_seen(seen, 2, 4)


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_a_member_that_refuses_is_reported_and_does_not_move(cluster, admin, topic, group, tmp_path, model):
    events = Events()
    options = {"message_model": model, "offset_store_dir": tmp_path, "remote_reset": "refuse", "on_event": events}
    with caught_up(cluster, topic, group, 4, queues=1, reset_record_interval_s=0.2, **options) as (consumer, seen):
        plan = admin.plan_reset(group, topic, "earliest")
        assert "remote_reset" in plan.problems[0]
        if model == "clustering":
            return  # other members would follow a commit; there is nothing more to check here
        result = plan.execute()
        assert not result.verified
        assert [outcome.state for outcome in result.outcomes] == [ResetState.REFUSED]
        events.wait_for("offset-reset")
        fill(cluster, topic, 1, start=4)
        seen.wait_for(5)
        assert set(seen.counts.values()) == {1}


def test_lag_of_a_clustering_group(cluster, admin, topic, group):
    with caught_up(cluster, topic, group, 10, queues=2) as (consumer, seen):
        until(lambda: sum(cluster.committed(group, topic).values()) == 10, "committed")
        consumer.pause()
        fill(cluster, topic, 4, start=10)
        until(lambda: admin.offsets(group, topic).total >= 2, "what came after the pause is behind")
        found = admin.lag(group)
        assert str(found.model) == "clustering"
        assert [consumer.client_id] == list(found.members)
        assert {row.queue.topic for row in found.rows} >= {topic}
        until(
            lambda: {row.max for row in admin.lag(group).rows if row.queue.topic == topic} == {7}, "the ends are shown"
        )


def test_lag_of_a_broadcasting_group_is_per_member(cluster, admin, topic, group, stores):
    fill(cluster, topic, 6, queues=1)
    with (
        consuming(cluster, topic, group, instance_name="ahead", **stores) as (ahead, seen),
        consuming(cluster, topic, group, instance_name="behind", **{**stores, "consume_from": "last"}) as (behind, _),
    ):
        wait_until_seen(seen, 1, 6)
        wait_until_stored(ahead, topic, 6)
        behind.pause()
        until(lambda: behind.progress()[queue(topic, 0)].paused, "paused")
        behind.reset_offsets(topic, {queue(topic, 0): 2})
        found = admin.offsets(group, topic)
        assert {row.member: (row.committed, row.max, row.lag) for row in found.rows} == {
            ahead.client_id: (6, 6, 0),
            behind.client_id: (2, 6, 4),
        }
        assert (found.total, found.unreached) == (4, {})
        assert {row.member for row in admin.lag(group).rows} == {ahead.client_id, behind.client_id}
