"""H03, H04: resets of broadcasting groups work on every broker, and reach every member."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from pyrocket_consumer import Admin
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer
from tests.consuming import consuming, numbered, until
from tests.hazards.members import HeldRequests, Kind, Queues, faulty, filled, ours, request_matcher, wait_limit_s
from tests.hazards.naive import NaiveMember
from tests.real_brokers.remoting import Peer, Refused
from tests.resets import fill, queue

SINGLE = queue("S", 0)
OLD_BROKER = {"version": "4.9.7", "delay_scale": 0.01, "long_poll_tick_s": 0.1}


def reset_by_broker(cluster: Any, group: str, topic: str) -> None:
    """Reset a group to the beginning as old admin tools do, by a request to the broker (222).

    Raises:
        Refused: the broker refuses.
    """
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        peer.call(222, {"topic": topic, "group": group, "timestamp": 0, "isForce": True})


def reset_by_admin(cluster: Any, group: str, topic: str) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        assert admin.plan_reset(group, topic, "earliest").execute().verified


class NeedsTheBroker(NaiveMember):
    """Can be reset only by a request to the broker."""

    def reset(self, topic: str, targets: Queues) -> None:
        reset_by_broker(self.cluster, self.group, topic)


def one_member_is_reset_alone(cluster: Any, names: Any, member: Kind, stores: Any) -> None:
    """One of two broadcasting members moves back to 4, by its own call."""
    topic, group = filled(cluster, names, queues=1, messages=10)
    place = queue(topic, 0)
    with (
        member(cluster, topic, group, instance_name="a", **stores) as first,
        member(cluster, topic, group, instance_name="b", **stores) as second,
    ):
        for each in (first, second):
            until(lambda each=each: each.stored() == {place: 10}, "consumed")
        first.pause()
        try:
            first.reset(topic, {place: 4})
        except (RocketError, Refused) as error:
            raise AssertionError(f"a broadcasting member cannot be reset: {error}") from error
        until(lambda: first.stored() == {place: 4}, "its file has the target")
        first.resume()
        first.seen.wait(lambda seen: len(seen.messages) == 16)
        until(lambda: first.stored() == {place: 10}, "consumed again")
        assert len(second.seen.messages) == 10 and second.stored() == {place: 10}, "the other member was moved, too"


@pytest.mark.hazard("H03")
@pytest.mark.parametrize("member", [ours, faulty(NeedsTheBroker, "cannot be reset: .* not exist")])
def test_a_broadcasting_member_is_reset_by_its_own_call(names, stores, member):
    """`reset_offsets` moves one member, by itself and durably, whatever its broker supports.

    Faulty: clients that can be reset only by the broker, because brokers before 5.2 refuse broadcasting groups.
    """
    with EmbeddedCluster(**OLD_BROKER) as old:
        one_member_is_reset_alone(old, names, member, stores)


@pytest.mark.hazard("H03")
def test_its_own_call_resets_a_member_on_every_broker(cluster, names, stores):
    one_member_is_reset_alone(cluster, names, ours, stores)


def a_group_with_an_uncommitted_queue_is_reset(cluster: Any, names: Any, reset: Any) -> None:
    """The group has consumed one queue. Another queue is new, and has no committed offset."""
    topic, group = filled(cluster, names, queues=1, messages=6)
    with consuming(cluster, topic, group, rebalance_interval_s=60.0, pull_hold_s=1.0) as (_, seen):
        seen.wait_for(6)
        until(lambda: cluster.committed(group, topic) == {0: 6}, "consumed")
        cluster.create_topic(topic, queues=2)
        try:
            reset(cluster, group, topic)
        except Refused as refused:
            raise AssertionError(f"the group cannot be reset: {refused}") from refused
        seen.wait(lambda seen: len(seen.messages) == 12)


@pytest.mark.hazard("H03")
@pytest.mark.parametrize("reset_group", [reset_by_admin, faulty(reset_by_broker, "the group cannot be reset")])
def test_a_group_with_a_queue_nobody_committed_is_reset(names, reset_group):
    """`Admin` moves each queue separately, so a queue without an offset does not stop the others.

    Faulty: a broker before 5.2 that gets the request (222) stops at the first queue without an offset.
    """
    with EmbeddedCluster(**OLD_BROKER) as old:
        a_group_with_an_uncommitted_queue_is_reset(old, names, reset_group)


@pytest.mark.hazard("H03")
def test_a_queue_nobody_committed_is_reset_on_every_broker(cluster, names):
    a_group_with_an_uncommitted_queue_is_reset(cluster, names, reset_by_admin)


@pytest.mark.hazard("H04")
@pytest.mark.versions("5.3.3", "5.5.0")  # before, brokers refuse to reset such groups
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "of three members replayed")])
def test_a_reset_made_at_the_broker_reaches_every_member(cluster, names, stores, member):
    """A member that gets a reset from the broker records and forwards it, and all members follow it.

    Faulty: all others, because the member that gets the reset does not forward it.
    """
    # The broker sends the reset to one of three members, the first that pulls. A fourth member is down meanwhile. With
    # a real broker only three run, because the reset could be sent to a pull that the fourth has left behind.
    topic, group = filled(cluster, names, queues=2, messages=10)
    is_embedded = isinstance(cluster, EmbeddedCluster)
    if is_embedded:
        with member(cluster, topic, group, instance_name="away", **stores) as away:
            until(lambda: sum(away.stored().values()) == 10, "consumed")
    with ExitStack() as stack:
        members = [stack.enter_context(member(cluster, topic, group, instance_name=name, **stores)) for name in "abc"]
        for each in members:
            each.seen.wait_for(10)
            until(lambda each=each: sum(each.stored().values()) == 10, "consumed")
        reset_by_broker(cluster, group, topic)
        fill(cluster, topic, 2, start=10)  # ends the pulls that are held

        def has_replayed(each: Any) -> bool:
            return {*each.seen.bodies} == {*numbered(12)} and all(each.seen.bodies.count(m) == 2 for m in numbered(10))

        with suppress(AssertionError):  # checked below
            until(lambda: all(map(has_replayed, members)), "all replay", wait_limit_s(member))
        replayed = [each.client_id for each in members if has_replayed(each)]
        assert len(replayed) == 3, f"only {replayed} of three members replayed"
        if is_embedded:
            back = stack.enter_context(member(cluster, topic, group, instance_name="away", **stores))
            back.seen.wait(lambda seen: Counter(seen.bodies) >= Counter(numbered(12)))


class StoresResetsLater(NaiveMember):
    """Pulls at the target at once, and stores it only at the next commit of the timer."""

    def on_reset(self, targets: Queues) -> None:
        for place, target in targets.items():
            self.windows[place].dropped = True
            self.offsets[place] = target
            self.pull_at(place, target)


@pytest.mark.hazard("H04")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(StoresResetsLater, "the reset is lost")])
def test_a_reset_by_the_broker_is_durable_before_the_next_pull(embedded, broker, stores, member):
    """The target is synced to the file before the first pull there, so a kill does not lose it.

    Faulty: clients that keep the target in memory until the next commit, because the broker does not send it again.
    """
    # The broker sends a reset once. A member killed at the next pull must continue at the target offset.
    held = HeldRequests()
    fill(embedded, "S", 10)
    with member(embedded, "S", "G", **stores) as consumer:  # so that the file has 10
        until(lambda: consumer.stored() == {SINGLE: 10}, "consumed")
    broker.on(RequestCode.PULL_MESSAGE, held, times=None, when=request_matcher("S", queueOffset=4))
    fields = {"nextBeginOffset": "4", "minOffset": "0", "maxOffset": "10", "suggestWhichBrokerId": "0"}
    broker.on(RequestCode.PULL_MESSAGE, answer(21, "OFFSET_RESET", fields), when=request_matcher("S", queueOffset=10))
    try:
        with member(embedded, "S", "G", commit_interval_s=60, **stores) as consumer:
            held.wait()
            found = consumer.stored()
            assert found == {SINGLE: 4}, f"a restart after a kill would find {found}: the reset is lost"
    finally:
        broker.clear_faults()
