"""A reset that only some brokers complete. Its result has an outcome for every queue."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pyrocket_consumer import BrokerError
from pyrocket_consumer.admin import ResetState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, close_connection, drop
from tests.admin.conftest import administered
from tests.admin.foreign import ForeignMember
from tests.consuming import until
from tests.resets import caught_up, queue, wait_until_seen

TARGETS = {queue("T", number, name): 2 for name in ("broker-a", "broker-b") for number in (0, 1)}
ON_B = {"broker-b/0", "broker-b/1"}


def outcomes(result):
    """Return each state -> the queues with it."""
    found: dict[ResetState, set[str]] = {}
    for each in result.outcomes:
        found.setdefault(each.state, set()).add(each.subject)
    assert len(result.outcomes) == sum(map(len, found.values())) == 4, str(result)
    return found


def silence_members(cluster):
    """Let the group's member keep its queues, and respond to no request of an admin."""
    for broker in cluster.brokers:
        broker.on(RequestCode.GET_CONSUMER_RUNNING_INFO, drop, times=None)


@pytest.fixture
def two_brokers(request):
    """Return a way to run a cluster of two brokers of a version, with a topic and an admin."""
    with ExitStack() as stack:

        def run(**options):
            cluster, admin = stack.enter_context(
                administered(brokers=2, relay_timeout_s=0.5, status_timeout_s=0.5, **options)
            )
            cluster.create_topic("T", queues=2)
            return cluster, admin

        yield run


@pytest.mark.parametrize("fault", [answer(1, "disk full"), drop], ids=["refused", "silent"])
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_queues_without_an_owner_move_despite_a_broker_that_fails(two_brokers, version, fault):
    cluster, admin = two_brokers(version=version)
    admin.create_group("G")
    for broker in cluster.brokers:
        broker.commit("G", "T", {0: 5, 1: 5})
    plan = admin.plan_reset("G", "T", "earliest", model="clustering")
    cluster.broker("broker-b").on(RequestCode.UPDATE_CONSUMER_OFFSET, fault, times=None)
    steps = []
    result = plan.execute(steps.append)
    failed = ResetState.UNCONFIRMED if fault is drop else ResetState.UNREACHED
    assert outcomes(result) == {ResetState.MOVED: {"broker-a/0", "broker-a/1"}, failed: ON_B}
    assert not result.verified
    assert all(("no response" if fault is drop else "disk full") in each.text for each in result.unmoved), str(result)
    assert {step.subject for step in steps} == {"broker-a/0", "broker-a/1", *ON_B}
    assert cluster.committed("G", "T", "broker-a") == {0: 0, 1: 0}


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_queues_of_a_silent_member_have_outcomes_despite_a_broker_that_fails(two_brokers, version):
    cluster, admin = two_brokers(version=version)
    with caught_up(cluster, "T", "G", 40):
        until(lambda: all(cluster.committed("G", "T", each.name) for each in cluster.brokers), "committed")
        silence_members(cluster)
        plan = admin.plan_reset("G", "T", TARGETS, wait_s=1)
        for code in (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET):
            cluster.broker("broker-b").on(code, answer(1, "disk full"), times=None)
        result = plan.execute(wait_s=1)
        assert outcomes(result) == {ResetState.UNCONFIRMED: {"broker-a/0", "broker-a/1"}, ResetState.UNREACHED: ON_B}
        assert {each.subject for each in result.outcomes if "disk full" in each.text} == ON_B


@pytest.mark.parametrize(("version", "server_side"), [("4.9.7", None), ("5.5.0", True)])
def test_brokers_reset_their_queues_despite_one_that_fails(two_brokers, version, server_side):
    cluster, admin = two_brokers(version=version, server_side_reset=server_side)
    with caught_up(cluster, "T", "G", 40, instance_name="ours"):
        with ForeignMember(cluster, "G", "T", {}, model="CLUSTERING", client_id="zzz@java"):
            plan = admin.plan_reset("G", "T", TARGETS)
            assert plan.way == "brokers"
            cluster.broker("broker-b").on(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, answer(1, "disk full"), times=None)
            result = plan.execute(wait_s=2)
        assert outcomes(result)[ResetState.UNREACHED] == ON_B
        assert {each.subject for each in result.outcomes if "disk full" in each.text} == ON_B


def test_members_move_queues_despite_a_broker_that_does_not_list_them(two_brokers):
    cluster, admin = two_brokers()
    with caught_up(cluster, "T", "G", 40):
        plan = admin.plan_reset("G", "T", TARGETS)
        asked = []

        def fault(exchange):
            asked.append(exchange)
            if len(asked) == 1:
                exchange.handle(exchange.answer)
            else:
                close_connection(exchange)

        cluster.broker("broker-b").on(RequestCode.GET_CONSUMER_CONNECTION_LIST, fault, times=None)
        result = plan.execute()
        assert (result.verified, len(asked) > 1) == (True, True), str(result)


def test_a_recorded_reset_whose_members_cannot_be_listed_has_a_note(two_brokers, stores):
    cluster, admin = two_brokers()
    with caught_up(cluster, "T", "G", 40, reset_record_interval_s=0.5, **stores) as (_, seen):
        plan = admin.plan_reset("G", "T", "earliest")
        cluster.broker("broker-b").on(RequestCode.GET_CONSUMER_CONNECTION_LIST, answer(1, "not well"), times=None)
        with pytest.raises(BrokerError, match="not well") as raised:
            plan.execute()
        assert raised.value.__notes__ == [
            "The reset is recorded, so members follow it within a minute. It is safe to repeat."
        ]
        wait_until_seen(seen, 2, 40)
