"""Plan and execute resets in a cluster with faults."""

from __future__ import annotations

import threading
import time

import pytest

from pyrocket_consumer import BrokerError, ConfigError, ConnectionLost, RocketError, RouteNotFound
from pyrocket_consumer.admin import Admin, ResetState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.reset_format import RecordArea, record_areas, topic_digest
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection
from tests.admin.conftest import administered
from tests.admin.foreign import ForeignMember
from tests.consuming import consuming, until
from tests.producer.programs import within
from tests.resets import (
    caught_up,
    consumed_before,
    fill,
    held,
    members,
    queue,
    record,
    reset,
    wait_until_seen,
    wait_until_stored,
)

RETRY = "%RETRY%G"


@pytest.fixture
def embedded(embedded):
    embedded.create_topic("T", queues=2)
    return embedded


def area() -> RecordArea:
    return next(record_areas("T"))


def states(outcomes):
    found = {outcome.subject: outcome.state for outcome in outcomes}
    assert len(found) == len(outcomes)
    return found


# --- arguments


def test_an_unknown_topic_is_an_error(admin):
    with pytest.raises(RouteNotFound, match="nowhere"):
        admin.plan_reset("G", "nowhere", "earliest")


def test_the_model_of_an_unknown_group_must_be_named(embedded, admin):
    embedded.broker("broker-a").create_group("G")
    with pytest.raises(ConfigError, match="model='clustering'"):
        admin.plan_reset("G", "T", "earliest")
    with pytest.raises(ConfigError, match="model='shared' is not allowed"):
        admin.plan_reset("G", "T", "earliest", model="shared")
    assert reset(admin, "G", "T", "latest", model="clustering").verified
    assert embedded.committed("G", "T") == {0: 0, 1: 0}


# --- the record


def test_a_clock_that_is_behind_does_not_matter(embedded, admin, stores):
    ahead = int(time.time() * 1000) + 10_000_000
    with caught_up(embedded, "T", "G", 10, **stores) as (_, seen):
        record(embedded.broker("broker-a"), ahead, {0: 5})
        result = reset(admin, "G", "T", "earliest")
        assert (result.verified, result.epoch) == (True, ahead + 1)
        seen.wait(lambda seen: len(seen.messages) >= 20)


def test_the_epochs_of_members_count_when_the_record_was_lost(embedded, admin, stores):
    ahead = int(time.time() * 1000) + 10_000_000
    record(embedded.broker("broker-a"), ahead, {0: 0, 1: 0})
    with caught_up(embedded, "T", "G", 10, **stores) as (consumer, seen):
        wait_until_stored(consumer, "T", 10)
    embedded.broker("broker-a").lose_data(messages=False)
    with consuming(embedded, "T", "G", instance_name="DEFAULT", **stores) as (_, seen):
        assert reset(admin, "G", "T", "earliest").verified
        wait_until_seen(seen, 1, 10)


def test_a_recorded_reset_is_followed_without_a_notification(embedded, stores):
    with caught_up(embedded, "T", "G", 10, reset_record_interval_s=0.1, **stores) as (_, seen):
        record(embedded.broker("broker-a"), 1000, {1: 2})
        seen.wait(lambda seen: len(seen.messages) == 13)
        embedded.broker("broker-a").forget_requests()
        embedded.broker("broker-a").wait_for(RequestCode.QUERY_CONSUMER_OFFSET, 4)
        queries = embedded.broker("broker-a").requests(RequestCode.QUERY_CONSUMER_OFFSET)
        queue_ids = {each.command.fields["queueId"] for each in queries}
        assert queue_ids == {str(area().head)}, "one small request while there is nothing new"


def test_a_record_is_read_after_the_broker_returns(embedded, stores):
    with caught_up(embedded, "T", "G", 10, **stores) as (_, seen):
        record(embedded.broker("broker-a"), 1000, {0: 0, 1: 0})
        embedded.broker("broker-a").close_connections()
        wait_until_seen(seen, 2, 10)


def test_two_topics_in_one_area_both_fit(embedded, admin, stores):
    first, second, *_ = record_areas("T")
    embedded.broker("broker-a").create_group("G")
    embedded.broker("broker-a").commit("G", RETRY, {first.name: 12345, first.head: 99, first.target(0): 77})
    with caught_up(embedded, "T", "G", 10, **stores) as (_, seen):
        assert reset(admin, "G", "T", "earliest").verified
        wait_until_seen(seen, 2, 10)
    slots = embedded.committed("G", RETRY)
    assert (slots[second.name], slots[first.target(0)]) == (topic_digest("T"), 77)


def when_the_head_is_written(embedded, write) -> None:
    """Let another admin write, by `write(offset table)`, right after the head of the record."""

    def fault(exchange):
        exchange.handle(exchange.answer)
        write(embedded.broker("broker-a").core.offsets)

    embedded.broker("broker-a").on(
        RequestCode.UPDATE_CONSUMER_OFFSET, fault, when=lambda command: command.fields["queueId"] == str(area().head)
    )


def test_another_admin_who_was_faster_is_reported(embedded, admin, stores):
    def write(offsets):
        offsets.commit(RETRY, "G", area().target(1), 4)
        offsets.commit(RETRY, "G", area().epoch(1), (time.time_ns() // 1_000_000) + 3_600_000)

    with caught_up(embedded, "T", "G", 10, **stores):
        plan = admin.plan_reset("G", "T", "earliest")
        when_the_head_is_written(embedded, write)
        result = plan.execute()
        assert (result.verified, result.raced) == (False, (queue("T", 1),))
        assert "Another client" in str(result)


def test_two_admins_with_one_epoch_do_not_divide_the_members(embedded, admin, stores):
    """Members follow an epoch once. With one epoch for both resets, members would follow different ones."""
    with caught_up(embedded, "T", "G", 10, **stores) as (_, seen):
        plan = admin.plan_reset("G", "T", "earliest")
        when_the_head_is_written(embedded, lambda offsets: offsets.commit(RETRY, "G", area().target(1), 4))
        result = plan.execute()
        assert result.verified, result
        recorded = embedded.committed("G", RETRY)
        assert [recorded[area().target(queue_id)] for queue_id in (0, 1)] == [1, 1]
        assert recorded[area().epoch(1)] == recorded[area().head] == result.epoch
        wait_until_seen(seen, 2, 10)


@pytest.mark.parametrize("version", ["5.1.4", "5.5.0"])  # their refusals differ in text
def test_a_broker_without_the_group_needs_no_record(stores, version):
    with administered(brokers=2, version=version) as (cluster, admin):
        cluster.create_topic("T", queues=1, brokers=["broker-a"])
        with consuming(cluster, "T", "G", **stores) as (_, seen):
            cluster.send("T")
            seen.wait_for(1)
        until(lambda: cluster.members("G") == [], "it has left")
        cluster.create_topic("T", queues=1)
        steps = []
        result = admin.plan_reset("G", "T", "earliest", model="broadcasting").execute(steps.append)
        assert result.verified
        assert [step.text[:17] for step in steps if step.subject == "broker-b"] == ["nothing to record"]
        assert cluster.committed("G", RETRY, "broker-b") == {}


# --- brokers that are down


@pytest.mark.cluster(brokers=2)
def test_a_stopped_broker_prevents_a_reset_and_partial_continues(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (_, seen):
        plan = admin.plan_reset("G", "T", "earliest")
        embedded.broker("broker-b").stop()
        with pytest.raises(RocketError) as stopped:
            plan.execute()
        assert "No offset was moved" in stopped.value.__notes__[0]
        result = plan.execute(partial=True)
        assert not result.unmoved
        assert "broker-b" in result.brokers
        seen.wait(lambda seen: len(seen.messages) == 30)
        assert {message.queue.broker_name for message in seen.messages[20:]} == {"broker-a"}


@pytest.mark.cluster(brokers=2)
def test_a_broker_that_does_not_record_prevents_a_reset(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (_, seen):
        plan = admin.plan_reset("G", "T", "earliest")
        embedded.broker("broker-b").on(RequestCode.UPDATE_CONSUMER_OFFSET, answer(1, "disk full"))
        with pytest.raises(BrokerError, match="disk full"):
            plan.execute()
        assert len(seen.messages) == 20
        assert plan.execute().verified
        wait_until_seen(seen, 2, 20)


@pytest.mark.cluster(brokers=2)
def test_a_broker_known_to_be_down_is_in_the_plan(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (_, seen):
        embedded.broker("broker-b").on(RequestCode.GET_BROKER_CONFIG, answer(1, "not well"), times=None)
        plan = admin.plan_reset("G", "T", "earliest")
        assert "not well" in plan.problems[0]
        assert {target.queue.broker_name for target in plan.targets} == {"broker-a"}
        with pytest.raises(RocketError, match="no offset was moved"):
            plan.execute()
        assert not plan.execute(partial=True).unmoved


@pytest.mark.cluster(brokers=2)
def test_partial_resets_an_offline_group_despite_a_silent_broker(embedded, admin):
    fill(embedded, "T", 20)
    admin.create_group("G")
    embedded.broker("broker-a").commit("G", "T", {0: 5, 1: 5})
    embedded.broker("broker-b").on(None, close_connection, times=None)
    plan = admin.plan_reset("G", "T", "earliest")
    assert [problem.split(":")[0] for problem in plan.problems] == ["broker-b"]
    with pytest.raises(RocketError, match="no offset was moved"):
        plan.execute()
    assert not plan.execute(partial=True).unmoved
    assert embedded.committed("G", "T", "broker-a") == {0: 0, 1: 0}


@pytest.mark.cluster(brokers=2)
def test_a_silent_broker_may_be_the_one_that_knows_a_group(embedded, admin):
    embedded.broker("broker-b").on(None, close_connection, times=None)
    with pytest.raises(ConnectionLost):  # and no ConfigError about an unknown group
        admin.plan_reset("nosuch", "T", "earliest")


# --- members that cannot be reached


@pytest.mark.cluster(relay_timeout_s=1, status_timeout_s=1)
def test_a_silent_member_does_not_delay_the_others(embedded, admin, stores):
    fill(embedded, "T", 10)
    with (
        ForeignMember(embedded, "G", "T", {}, silent=True) as silent,
        members(embedded, "T", "G", "abc", **stores) as ours,
    ):
        for _, seen in ours:
            wait_until_seen(seen, 1, 10)
        plan = admin.plan_reset("G", "T", "earliest")
        assert [problem for problem in plan.problems if silent.client_id in problem]
        began, moved_at = time.monotonic(), []

        def progress(step):
            if step.text == "moved":
                moved_at.append(time.monotonic())

        result = plan.execute(progress, wait_s=2)
        assert moved_at[0] - began < 5
        for _, seen in ours:
            wait_until_seen(seen, 2, 10)
        assert not result.verified
        assert states(result.unmoved) == {silent.client_id: ResetState.UNREACHED}


@pytest.mark.parametrize("model", ["broadcasting", "clustering"])
def test_a_frozen_member_is_waited_for_until_the_timeout(embedded, admin, stores, model):
    fill(embedded, "T", 10)
    options = {**stores, "message_model": model}
    with (
        consuming(embedded, "T", "G", **options) as (_, seen),
        ForeignMember(embedded, "G", "T", {}, model=model.upper(), client_id="zzz@frozen", silent=True),
    ):
        wait_until_seen(seen, 1, 10)
        with within(8):  # a broker waits 10 s for such a member, each time
            assert not admin.plan_reset("G", "T", "earliest", wait_s=1).execute(wait_s=1).verified


def test_a_plan_shows_its_effect_and_the_clients(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 10, **stores) as (consumer, seen):
        text = str(admin.plan_reset("G", "T", "earliest"))
        assert text.startswith("Reset of group G (broadcasting) in topic T: "), "as in the shell"
        assert f"{consumer.client_id} (pyrocket_consumer): will be notified and verified" in text
        assert "will be recorded" in text
        assert "4.9.4" not in text


def test_members_without_permission_to_call_follow_the_record(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 10, reset_record_interval_s=0.3, **stores) as (consumer, seen):
        for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.GET_CONSUMER_CONNECTION_LIST):
            embedded.broker("broker-a").on(code, answer(16, "no permission"), times=None)
        plan = admin.plan_reset("G", "T", "earliest", model="broadcasting")
        assert "may not send requests" in plan.problems[0]
        result = plan.execute()
        assert states(result.outcomes) == {consumer.client_id: ResetState.UNCONFIRMED}
        assert not result.verified
        wait_until_seen(seen, 2, 10)


# --- one member of a broadcasting group


def test_one_member_is_moved_alone_and_nothing_is_recorded(embedded, admin, stores):
    fill(embedded, "T", 10)
    with members(embedded, "T", "G", ("one", "other"), **stores) as ((one, seen_by_one), (_, seen_by_other)):
        wait_until_seen(seen_by_one, 1, 10)
        wait_until_seen(seen_by_other, 1, 10)
        plan = admin.plan_reset("G", "T", "earliest", member=one.client_id)
        assert "will be sent to this member only" in str(plan)
        assert {move.member for move in plan.moves} == {one.client_id}
        result = plan.execute()
        assert (result.verified, states(result.outcomes)) == (True, {one.client_id: ResetState.MOVED})
        wait_until_seen(seen_by_one, 2, 10)
        assert reset(admin, "G", "T", {queue("T", 0): 3}).verified, "its epoch is above that of the one before"
        seen_by_one.wait(lambda seen: len(seen.messages) == 22)
        seen_by_other.wait(lambda seen: len(seen.messages) == 12)
    assert embedded.committed("G", RETRY)[area().head] == plan_epoch(embedded)


def plan_epoch(cluster) -> int:
    """Return the highest recorded epoch of a queue."""
    slots = cluster.committed("G", RETRY)
    return max(slots.get(area().epoch(number), 0) for number in (0, 1))


def test_a_member_that_cannot_be_reset_alone_is_reported(embedded, admin, stores):
    fill(embedded, "T", 10)
    with consuming(embedded, "T", "G", **stores) as (consumer, seen), ForeignMember(embedded, "G", "T", {}) as java:
        wait_until_seen(seen, 1, 10)
        with pytest.raises(ConfigError, match=f"no member 'nobody' .*; online: .*{consumer.client_id}"):
            admin.plan_reset("G", "T", "earliest", member="nobody")
        plan = admin.plan_reset("G", "T", "earliest", member=java.client_id)
        assert "cannot be reset alone" in plan.problems[0]
        assert [outcome.state for outcome in plan.execute(wait_s=1).outcomes] == [ResetState.UNREACHED]
        gone = admin.plan_reset("G", "T", "earliest", member=consumer.client_id)
    assert [outcome.state for outcome in gone.execute().outcomes] == [ResetState.UNREACHED]
    assert len(seen.messages) == 10
    assert embedded.committed("G", RETRY) == {}


def test_clustering_members_have_no_own_offsets(embedded, admin):
    refused = pytest.raises(ConfigError, match="share its offsets; omit it")
    with caught_up(embedded, "T", "G", 10) as (consumer, _), refused:
        admin.plan_reset("G", "T", "earliest", member=consumer.client_id)


# --- clustering members that do not respond, and groups of another model


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
@pytest.mark.parametrize("all_queues", [True, False], ids=["all-queues", "one-of-each"])
def test_responding_members_move_despite_a_frozen_one(version, all_queues):
    with (
        administered(version=version, relay_timeout_s=0.5) as (cluster, admin),
        caught_up(cluster, "T", "G", 40, queues=4, instance_name="ours") as (consumer, seen),
    ):
        until(lambda: cluster.committed("G", "T") == dict.fromkeys(range(4), 10), "committed")
        with ForeignMember(
            cluster, "G", "T", {}, model="CLUSTERING", client_id="zzz@frozen", language="PYTHON", silent=True
        ):
            until(lambda: len(held(consumer, "T")) == 2, "shared")
            ours = {each.queue_id for each in held(consumer, "T")}
            frozen = set(range(4)) - ours
            chosen = range(4) if all_queues else (min(ours), min(frozen))
            plan = admin.plan_reset("G", "T", {queue("T", number): 7 for number in chosen})
            assert "sent to the members that own the queues" in str(plan)
            assert "other client" not in str(plan)
            assert "zzz@frozen: it did not respond" in plan.problems[0]
            result = plan.execute(wait_s=2)
            assert states(result.outcomes) == {
                f"broker-a/{number}": ResetState.MOVED if number in ours else ResetState.UNCONFIRMED
                for number in chosen
            }
            assert "zzz@frozen: it did not respond" in result.unmoved[0].text
        seen.wait(lambda seen: len(seen.messages) == 40 + 3 * len(chosen))  # it has left its queues to us
        assert {position[1] for position, times in seen.counts.items() if times > 1} == {7, 8, 9}


def test_a_model_that_online_members_contradict_is_refused(embedded, admin):
    with consuming(embedded, "T", "G"):
        with pytest.raises(ConfigError, match="'G' is clustering, not broadcasting, as its online members report .1.;"):
            admin.plan_reset("G", "T", "earliest", model="broadcasting")
        assert admin.plan_reset("G", "T", "earliest", model="clustering").model == "clustering"
    assert embedded.committed("G", RETRY).keys() <= {0}, "nothing is recorded"


def test_no_commit_for_offline_members_that_follow_a_record(embedded, admin, stores):
    consumed_before(embedded, "T", "G", 10, **stores)
    recorded = reset(admin, "G", "T", "earliest", model="broadcasting")
    assert "recorded; no member is online to verify it" in str(recorded)
    with pytest.raises(ConfigError, match="'G' is broadcasting: a reset of T is recorded at broker-a"):
        admin.plan_reset("G", "T", "latest", model="clustering")
    assert embedded.committed("G", "T") == {}
    admin.forget_reset("G", "T")
    assert reset(admin, "G", "T", "latest", model="clustering").verified


def test_unknown_offsets_are_not_shown_as_none(embedded, admin, stores):
    consumed_before(embedded, "T", "G", 10, **stores)
    plan = admin.plan_reset("G", "T", "earliest", model="broadcasting")
    assert {(move.current, move.replayed, move.skipped) for move in plan.moves} == {(None, None, None)}
    assert [line.split()[-4:] for line in str(plan).splitlines() if "broker-a/" in line] == [["?", "0", "?", "?"]] * 2


@pytest.mark.parametrize("model", ["broadcasting", "clustering"])
def test_a_topic_without_members_is_reset_only_on_demand(embedded, admin, stores, model):
    fill(embedded, "U", 10, queues=2)
    with consuming(embedded, "T", "G", **{**stores, "message_model": model}):
        plan = admin.plan_reset("G", "U", "latest")
        assert plan.unsubscribed == "no online member of G subscribes to U (they subscribe to T)"
        assert plan.unsubscribed in plan.problems
        with pytest.raises(ConfigError, match=r"subscribes to U .* check the topic's name.*--unsubscribed"):
            plan.execute()
        assert (embedded.committed("G", "U"), embedded.committed("G", RETRY).keys() <= {0}) == ({}, True)
        result = plan.execute(unsubscribed=True, wait_s=1)
        assert result.outcomes
        assert embedded.committed("G", "U") == ({0: 5, 1: 5} if model == "clustering" else {})


# --- members of other clients


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_a_java_member_that_accepts_resets_moves_in_broadcasting(version, stores):
    with administered(version=version, server_side_reset=False) as (cluster, admin):
        fill(cluster, "T", 20, queues=2)
        ends = {queue("T", 0): 10, queue("T", 1): 10}
        with ForeignMember(cluster, "G", "T", ends) as java, consuming(cluster, "T", "G", **stores) as (_, seen):
            wait_until_seen(seen, 1, 20)
            targets = {queue("T", 0): 3, queue("T", 1): 7}
            plan = admin.plan_reset("G", "T", targets)
            assert {move.current for move in plan.moves if move.member == java.client_id} == {10}
            result = plan.execute()
            assert result.verified, result
            assert java.resets == [targets]
            seen.wait(lambda seen: len(seen.messages) == 20 + 7 + 3)
            assert cluster.committed("G", "T") == {0: -1, 1: -1}, "no offset is left"
        assert len(seen.messages) == 30, "the broker's word to our member was the same reset, and not another"


def test_a_java_member_that_cannot_be_reset_is_reported(stores):
    with administered(version="4.9.7") as (cluster, admin):
        fill(cluster, "T", 20, queues=2)
        with (
            ForeignMember(cluster, "G", "T", {}, version=(4, 9, 7)) as java,
            consuming(cluster, "T", "G", **stores) as (_, seen),
        ):
            wait_until_seen(seen, 1, 20)
            plan = admin.plan_reset("G", "T", "earliest")
            assert "JAVA 4.9.7 cannot be reset in broadcasting by any call; stop it" in plan.problems[0]
            result = plan.execute()
            assert states(result.unmoved) == {java.client_id: ResetState.UNREACHED}
            assert java.resets == []
            wait_until_seen(seen, 2, 20)


def test_a_java_member_needs_all_queues_or_another_broker():
    with administered(version="5.5.0") as (cluster, admin):
        cluster.create_topic("T", queues=2)
        with ForeignMember(cluster, "G", "T", {}):
            assert "useServerSideResetOffset=true" in admin.plan_reset("G", "T", "earliest").problems[0]
            cluster.broker("broker-a").update_config(useServerSideResetOffset=False)
            only = admin.plan_reset("G", "T", "earliest", [queue("T", 0)])
            assert "all queues at once" in only.problems[0]
            assert admin.plan_reset("G", "T", "earliest").problems == []


@pytest.mark.parametrize(("version", "server_side"), [("4.9.7", None), ("5.5.0", False), ("5.5.0", True)])
def test_a_group_with_a_java_member_is_reset_by_its_broker(version, server_side):
    with (
        administered(version=version, server_side_reset=server_side, long_poll_tick_s=0.2) as (cluster, admin),
        caught_up(cluster, "T", "G", 20, queues=2, instance_name="ours", pull_hold_s=0.3) as (consumer, seen),
    ):
        until(lambda: cluster.committed("G", "T") == {0: 10, 1: 10}, "committed")
        with ForeignMember(cluster, "G", "T", {}, model="CLUSTERING", client_id="zzz@java", obeys=False):
            # every member assigns a queue to it, but it consumes nothing
            until(lambda: len(held(consumer, "T")) == 1, "shared")
            (ours,) = held(consumer, "T")
            plan = admin.plan_reset("G", "T", {queue("T", 0): 4, queue("T", 1): 4})
            assert "by the brokers" in str(plan)
            result = plan.execute(wait_s=2)
            assert not result.verified, "the other one's queue was not seen to move"
            assert states(result.unmoved) == {f"broker-a/{1 - ours.queue_id}": ResetState.UNCONFIRMED}
            seen.wait(lambda seen: len(seen.messages) == 26)
            assert {message.queue for message in seen.messages[20:]} == {ours}


def test_an_old_broker_with_a_java_member_resets_only_all_queues():
    with administered(version="4.9.7") as (cluster, admin):
        cluster.create_topic("T", queues=2)
        refused = pytest.raises(ConfigError, match=r"broker-a can reset only all queues.*10.0.0.9@java")
        with ForeignMember(cluster, "G", "T", {}, model="CLUSTERING"), refused:
            admin.plan_reset("G", "T", {queue("T", 0): 0})


def test_a_mark_that_waits_is_replaced_when_nobody_is_online(embedded, admin):
    consumed_before(embedded, "T", "G", 10)
    embedded.call(lambda: embedded.broker("broker-a").core.offsets.mark("T", "G", 0, 1))
    assert reset(admin, "G", "T", {queue("T", 0): 3, queue("T", 1): 4}).verified
    with consuming(embedded, "T", "G") as (_, again):
        again.wait(lambda seen: len(seen.messages) >= 3)
        assert sorted(again.counts) == [(queue("T", 0), 3), (queue("T", 0), 4), (queue("T", 1), 4)]


# --- names, processes, permissions


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_a_namespace_is_added_to_requests_and_not_shown(model, tmp_path):
    with EmbeddedCluster() as cluster, Admin(name_server=cluster.name_server, namespace="shop") as admin:
        fill(cluster, "shop%T", 10, queues=2)
        options = {"message_model": model, "offset_store_dir": tmp_path, "namespace": "shop"}
        with consuming(cluster, "T", "G", **options) as (consumer, seen):
            seen.wait_for(10)
            plan = admin.plan_reset("G", "T", {queue("T", 1): 2})
            assert {move.queue for move in plan.moves} == {queue("T", 1)}
            assert "shop" not in str(plan)
            assert plan.execute().verified
            seen.wait(lambda seen: len(seen.messages) == 13)
            assert {row.queue.topic for row in admin.offsets("G", "T").rows} == {"T"}


def test_two_processes_that_share_a_client_id_are_reported(embedded, admin, stores):
    with (
        caught_up(embedded, "T", "G", 10, **stores) as (consumer, _),
        ForeignMember(embedded, "G", "T", {}, client_id=consumer.client_id, language="PYTHON"),
    ):
        plan = admin.plan_reset("G", "T", "earliest")
        (member,) = plan.members
        assert "2 processes share this client id" in member.how
        assert not plan.execute(wait_s=0).verified


def test_without_permission_offsets_of_held_queues_are_shown(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 10, **stores) as (consumer, seen):
        wait_until_stored(consumer, "T", 10)
        embedded.broker("broker-a").on(
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, answer(16, "no permission"), times=None
        )
        found = admin.offsets("G", "T")
        assert [(row.member, row.committed) for row in found.rows] == [(consumer.client_id, 5), (consumer.client_id, 5)]


def test_progress_runs_on_the_thread_of_the_caller_and_may_stop(embedded, admin, stores):
    with caught_up(embedded, "T", "G", 10, **stores) as (_, seen):
        plan = admin.plan_reset("G", "T", "earliest")
        threads = set()
        assert plan.execute(lambda step: threads.add(threading.current_thread())).verified
        assert threads == {threading.current_thread()}

        def stop(step):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            plan.execute(stop)


def test_lag_of_an_unknown_group(admin):
    with pytest.raises(ConfigError, match="no broker knows group 'nobody'"):
        admin.lag("nobody")
    with pytest.raises(RouteNotFound):
        admin.offsets("nobody", "nowhere")


def test_lag_of_an_offline_group_uses_its_committed_offsets(embedded, admin):
    consumed_before(embedded, "T", "G", 10)
    fill(embedded, "T", 4, start=10)
    embedded.broker("broker-a").delete_before("T", 0, 6)
    found = admin.offsets("G", "T")
    assert (found.model, found.members, found.total) == (None, (), 3)
    assert [(row.committed, row.min, row.max, row.lag) for row in found.rows] == [(5, 6, 7, 1), (5, 0, 7, 2)]
