"""H03, H04: resets of broadcasting groups: possible on every broker, and for every member."""

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
from tests.hazards.members import HeldRequests, Kind, Queues, faulty, filled, of, ours, wait_limit_s
from tests.hazards.naive import NaiveMember
from tests.real_brokers.remoting import Peer, Refused
from tests.resets import fill, queue

SINGLE = queue("S", 0)
OLD_BROKER = {"version": "4.9.7", "delay_scale": 0.01, "long_poll_tick_s": 0.1}


def ask_broker(cluster: Any, group: str, topic: str) -> None:
    """Reset a group to the beginning as old admin tools do: the broker is asked (222).

    Raises:
        Refused: it says no.
    """
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        peer.call(222, {"topic": topic, "group": group, "timestamp": 0, "isForce": True})


def ask_our_admin(cluster: Any, group: str, topic: str) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        assert admin.plan_reset(group, topic, "earliest").execute().verified


class NeedsTheBroker(NaiveMember):
    """Knows no way to be reset but to ask the broker for it."""

    def reset(self, topic: str, targets: Queues) -> None:
        ask_broker(self.cluster, self.group, topic)


def one_member_is_reset_alone(cluster: Any, names: Any, member: Kind, stores: Any) -> None:
    """Of two broadcasting members one goes back to 4, by its own call."""
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
    """`reset_offsets` moves one member, by itself and durably, whatever its broker can do.

    Faulty: clients whose only way leads through the broker; brokers before 5.2 refuse broadcasting groups.
    """
    with EmbeddedCluster(**OLD_BROKER) as old:
        one_member_is_reset_alone(old, names, member, stores)


@pytest.mark.hazard("H03")
def test_its_own_call_resets_a_member_on_every_broker(cluster, names, stores):
    one_member_is_reset_alone(cluster, names, ours, stores)


def a_group_with_an_uncommitted_queue_is_reset(cluster: Any, names: Any, reset: Any) -> None:
    """The group has consumed one queue; another is new, and was never committed."""
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
@pytest.mark.parametrize("ask", [ask_our_admin, faulty(ask_broker, "the group cannot be reset")])
def test_a_group_with_a_queue_nobody_committed_is_reset(names, ask):
    """Our `Admin` moves each queue by itself; one without an offset stops nothing.

    Faulty: a reset asked of a broker before 5.2 (222) ends at the first queue without an offset.
    """
    with EmbeddedCluster(**OLD_BROKER) as old:
        a_group_with_an_uncommitted_queue_is_reset(old, names, ask)


@pytest.mark.hazard("H03")
def test_a_queue_nobody_committed_is_reset_on_every_broker(cluster, names):
    a_group_with_an_uncommitted_queue_is_reset(cluster, names, ask_our_admin)


@pytest.mark.hazard("H04")
@pytest.mark.versions("5.3.3", "5.5.0")  # before, brokers refuse to reset such groups
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "of three members replayed")])
def test_a_reset_made_at_the_broker_reaches_every_member(cluster, names, stores, member):
    """A member that is told of a reset by the broker passes it on: it is recorded, and all members follow it.

    Faulty: all others; the one that the broker told obeys, and keeps it to itself.
    """
    # The broker tells one of three members, whoever pulls first. A fourth is away meanwhile: not of a real broker,
    # which may tell the pull that this one left behind.
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
        ask_broker(cluster, group, topic)
        fill(cluster, topic, 2, start=10)  # ends the pulls that are held

        def has_replayed(each: Any) -> bool:
            return {*each.seen.bodies} == {*numbered(12)} and all(each.seen.bodies.count(m) == 2 for m in numbered(10))

        with suppress(AssertionError):  # told apart below
            until(lambda: all(map(has_replayed, members)), "all replay", wait_limit_s(member))
        replayed = [each.client_id for each in members if has_replayed(each)]
        assert len(replayed) == 3, f"only {replayed} of three members replayed"
        if is_embedded:
            back = stack.enter_context(member(cluster, topic, group, instance_name="away", **stores))
            back.seen.wait(lambda seen: Counter(seen.bodies) >= Counter(numbered(12)))


class StoresResetsLater(NaiveMember):
    """Pulls at the target at once, and leaves storing it to the next tick of the timer."""

    def on_reset(self, targets: Queues) -> None:
        for place, target in targets.items():
            self.windows[place].dropped = True
            self.offsets[place] = target
            self.pull_at(place, target)


@pytest.mark.hazard("H04")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(StoresResetsLater, "the reset is lost")])
def test_a_reset_the_broker_told_is_durable_before_the_next_pull(embedded, broker, stores, member):
    """The target is in the file, synced, before anything is pulled there: a kill does not lose it.

    Faulty: a target that is in memory until the timer's next tick; the broker does not tell it again.
    """
    # The broker tells a reset once. Killed at the next pull, the member must go on at the target.
    held = HeldRequests()
    fill(embedded, "S", 10)
    with member(embedded, "S", "G", **stores) as consumer:  # so that the file has 10
        until(lambda: consumer.stored() == {SINGLE: 10}, "consumed")
    broker.on(RequestCode.PULL_MESSAGE, held, times=None, when=of("S", queueOffset=4))
    fields = {"nextBeginOffset": "4", "minOffset": "0", "maxOffset": "10", "suggestWhichBrokerId": "0"}
    broker.on(RequestCode.PULL_MESSAGE, answer(21, "OFFSET_RESET", fields), when=of("S", queueOffset=10))
    try:
        with member(embedded, "S", "G", commit_interval_s=60, **stores) as consumer:
            held.wait()
            found = consumer.stored()
            assert found == {SINGLE: 4}, f"a restart after a kill would find {found}: the reset is lost"
    finally:
        broker.clear_faults()
