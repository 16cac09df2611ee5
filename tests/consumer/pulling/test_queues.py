"""H36, H39, H47, H48: queues that come and go, and pulls that must not get lost."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from pyrocket_consumer import Message, MessageQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection, cut_after, garbage, rewrite
from pyrocket_consumer.testing.faults import Fault
from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.frame import RemotingCommand
from tests.consuming import WAIT_S, Seen, numbered, until
from tests.hazards.company import STRANGER, AnotherComes, DropsWithoutStoring, members_of
from tests.hazards.members import Kind, faulty, filled, of, ours, patience_s, settle
from tests.hazards.naive import NaiveMember, Window
from tests.resetting import fill, queue
from tests.simulation.scenario import TOPIC as SIMULATED
from tests.simulation.scenario import Member, Plan, Scenario

MEMBERS, PULL = RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.PULL_MESSAGE
NEVER_S = 3600.0


# --- H36


def with_body(data: bytes) -> Fault:
    return rewrite(lambda answer: dataclasses.replace(answer, body=data))


def with_fields(**changes: str) -> Fault:
    return rewrite(lambda answer: dataclasses.replace(answer, fields={**answer.fields, **changes}))


BAD_ANSWERS = {
    "connection closed": close_connection,
    "cut short": cut_after(200),
    "no frame": garbage(b"\xff" * 64),
    "no number": with_fields(nextBeginOffset="soon"),
    "no messages": with_body(b"\xa5" * 100),
    "a code nobody knows": answer(9999, "?"),
}
"""Trouble at each step from the answer to the next pull: connection, frame, header, decoding, meaning."""


class LosesItsPull(NaiveMember):
    """An exception on the way from an answer to the next pull ends both."""

    def _pull_loop(self, window: Window) -> None:
        with suppress(ProtocolError, ValueError, KeyError):
            super()._pull_loop(window)


def no_answer_ends_a_queue(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    fill(cluster, topic, len(BAD_ANSWERS))
    shown: list[str] = []

    def showing(what: str, trouble: Fault) -> Fault:
        return lambda exchange: (shown.append(what), trouble(exchange))[1]

    for number, (what, trouble) in enumerate(BAD_ANSWERS.items()):
        cluster.broker("broker-a").on(PULL, showing(what, trouble), when=of(topic, queueOffset=number))
    with member(cluster, topic, group, call_timeout_s=0.5, pull_batch_size=1) as consumer:
        for number, what in enumerate(BAD_ANSWERS):
            until(
                lambda number=number: len(consumer.seen.messages) > number,
                f"the queue goes on after: {what}",
                patience_s(member),
            )
        assert sorted(consumer.seen.bodies) == numbered(len(BAD_ANSWERS))
    assert shown == list(BAD_ANSWERS)


@pytest.mark.hazard("H36")
@pytest.mark.parametrize("member", [ours, faulty(LosesItsPull, "the queue goes on after: no")])
def test_no_answer_ends_the_pulling_of_a_queue(embedded, names, member):
    """Whatever is wrong with an answer, the next pull follows after pull_retry_delay_s; no timer has to notice.

    Faulty: clients that lose a queue's only pull to an exception, and wait 120 s (or for ever) until that is noticed.
    """
    no_answer_ends_a_queue(embedded, names, member)


class LongPause(Scenario):
    """A member that is paused for 200 s, in virtual time, while its listener works off what was pulled."""

    def __init__(self) -> None:
        slowly = Plan(members=1, queues=1, faults=(), failing=0, slow=1, slowest_s=55, calm_s=500)
        super().__init__(1, slowly)

    async def _trouble(self) -> None:
        self._sending = False
        (owner,) = self.members
        while not owner.running:
            await asyncio.sleep(1)
        self.cluster.send(SIMULATED, count=40)
        await asyncio.sleep(5)
        assert owner.member is not None
        owner.member.pause(None)
        self.world.create_task(self._beside(owner))
        await asyncio.sleep(200)
        owner.member.resume(None)

    async def _beside(self, owner: Member) -> None:
        """What else goes on meanwhile: nothing."""


class QueuesExpire(LongPause):
    """A queue whose last pull is 120 s ago is taken for lost: it is given up and begun again."""

    async def _beside(self, owner: Member) -> None:
        while True:
            await asyncio.sleep(20)
            assert owner.member is not None
            pulls = [each for each in self.cluster.broker("broker-a").requests(PULL) if of(SIMULATED)(each.command)]
            if self.world.now - pulls[-1].at_s > 120:
                for mq in owner.member.assignments.held(SIMULATED):
                    await self.world.run_as(owner.process, owner.member.assignments.end(mq, "expired"))
                    beginning = owner.member.assignments.begin(mq, is_new=False, is_ours=lambda: True)
                    await self.world.run_as(owner.process, beginning)
                return


def a_long_pause_repeats_nothing(scenario: LongPause) -> None:
    places = Counter(each.place for each in scenario.run().consumed)
    assert len(places) >= 40
    again = [place for place, times in places.items() if times > 1]
    assert not again, f"{len(again)} messages were consumed again"


@pytest.mark.hazard("H36")
@pytest.mark.parametrize("scenario", [LongPause, faulty(QueuesExpire, "messages were consumed again")])
def test_a_queue_that_is_paused_for_minutes_is_kept(scenario):
    """However long a queue is not pulled, because it is paused or full, it stays as it is.

    Faulty: Java gives up and takes back what was not pulled for 120 s; what it has in hand comes again.
    """
    a_long_pause_repeats_nothing(scenario())


# --- H39


class AnEmptyPlaceIsEmpty(DropsWithoutStoring):
    """Holds nothing when the list of members lacks it."""

    def allocate(self, topic: str) -> list[MessageQueue]:
        return super().allocate(topic) if self.client_id in self.members(topic) else []


LISTS = {"all but us": [STRANGER], "another one": [STRANGER, "us"], "several": [STRANGER, "0.0.0.0@1", "us"]}


def a_list_of_members_may_be_wrong(cluster: Any, names: Any, member: Kind, ids: list[str]) -> None:
    """For a while the broker does not name us, or names others that are not there."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=2)
    broker = cluster.broker("broker-a")
    options = {"commit_interval_s": NEVER_S, "rebalance_interval_s": 0.1}
    with member(cluster, topic, group, **options) as consumer:
        fill(cluster, topic, 10)
        consumer.seen.wait_for(10)
        until(lambda: consumer.held() == {queue(topic, 0): 5, queue(topic, 1): 5}, "consumed")
        listed = members_of(*(consumer.client_id if each == "us" else each for each in ids))

        def is_ours(command: RemotingCommand) -> bool:
            return command.fields["consumerGroup"] == group

        broker.forget_requests()
        broker.on(MEMBERS, listed, times=None, when=is_ours)
        broker.wait_for(MEMBERS, 8, WAIT_S, when=is_ours)  # some rounds, each for two topics
        until(lambda: isinstance(consumer, NaiveMember) or len(consumer.held()) < 2, "queues are given up")
        broker.clear_faults()
        until(lambda: len(consumer.held()) == 2, "they are taken back")
        fill(cluster, topic, 10, start=10)
        consumer.seen.wait_for(20)
        again = [body for body in set(consumer.seen.bodies) if consumer.seen.bodies.count(body) > 1]
        assert not again, f"{len(again)} messages were consumed again"


@pytest.mark.hazard("H39")
@pytest.mark.parametrize("which", LISTS)
@pytest.mark.parametrize("member", [ours, faulty(AnEmptyPlaceIsEmpty, "messages were consumed again")])
def test_a_wrong_list_of_members_repeats_nothing(embedded, names, which, member):
    """Queues that go because of a list of members, right or wrong, have their offsets stored first; none is repeated.

    Faulty: a member that is missing in a list drops everything as it is.
    """
    a_list_of_members_may_be_wrong(embedded, names, member, LISTS[which])


class LeavesAGhost(NaiveMember):
    """Says good-bye, but its threads go on: the next round of rebalance joins the group again."""

    def members(self, topic: str) -> list[str]:
        try:
            return super().members(topic)
        except OSError:
            return []

    def close(self) -> None:
        self.leave()

    def __exit__(self, *exc_info: object) -> None:
        super().close()


def a_closed_member_is_gone(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = filled(cluster, names, queues=1, messages=5)
    with member(cluster, topic, group, rebalance_interval_s=0.1) as consumer:
        consumer.seen.wait_for(5)
        consumer.close()
        with suppress(AssertionError):
            until(lambda: consumer.client_id in cluster.members(group), "a ghost", 1.0)
        assert consumer.client_id not in cluster.members(group), "a closed member is in the group again"


@pytest.mark.hazard("H39")
@pytest.mark.parametrize("member", [ours, faulty(LeavesAGhost, "a closed member is in the group again")])
def test_a_closed_member_leaves_no_ghost(cluster, names, member):
    """After close() nothing of a consumer goes on: no thread, no heartbeat, no commit.

    Faulty: Java before 4.9.1, closed just after its start, went on committing for days.
    """
    a_closed_member_is_gone(cluster, names, member)


# --- H47

LOGICAL = "__syslo__global__"
"""A broker name as logical queues have it."""


class TranslatesNames(MemoryOffsetStore):
    """Keeps offsets under the physical name that a logical one stands for."""

    def update_offset(self, mq: MessageQueue, offset: int, increase_only: bool = False) -> None:
        super().update_offset(dataclasses.replace(mq, broker_name=mq.broker_name.strip("_")), offset, increase_only)


def broker_names_are_kept(cluster: Any, names: Any, **options: Any) -> None:
    topic, group = filled(cluster, names, queues=2, messages=6)
    with ours(cluster, topic, group, message_model="broadcasting", **options) as consumer:
        consumer.seen.wait_for(6)
        store = options.get("offset_store")
        until(lambda: sum((store.clone_offset_table() if store else consumer.stored()).values()) == 6, "stored")
        kept = {each.broker_name for each in (store.clone_offset_table() if store else consumer.stored())}
        assert kept == {LOGICAL}, f"kept under {kept}"


@pytest.mark.hazard("H47")
@pytest.mark.parametrize("faulty_store", [None, faulty(TranslatesNames, "kept under")])
def test_offsets_are_kept_under_the_broker_name_as_it_is(names, tmp_path, faulty_store):
    """A broker name is a name, also one with the prefix of logical queues; nothing is translated on the way to a store.

    Faulty: a store that translates logical queues, and so depends on a mapping that may change.
    """
    store = {"offset_store": faulty_store()} if faulty_store else {"offset_store_dir": tmp_path}
    with EmbeddedCluster(brokers=[LOGICAL], long_poll_tick_s=0.1) as cluster:
        broker_names_are_kept(cluster, names, **store)


# --- H48


class OnePeriodIsLikeAnother(NaiveMember):
    """Counts an acknowledgement for the queue, whichever period of holding it the message belongs to."""

    def acked(self, window: Window, message: Message) -> None:
        now = self.windows.get(window.queue)
        if now is not None:
            super().acked(now, message)


def a_late_acknowledgement_counts_for_its_own_period_only(cluster: Any, names: Any, member: Kind) -> None:
    """The queue goes and comes back while its messages are with the listener, which has them a second time then."""
    topic, group = filled(cluster, names, queues=1, messages=5)
    first, second = threading.Event(), threading.Event()
    calls: list[Message] = []

    def listener(message: Message) -> None:
        calls.append(message)
        (first if len(calls) <= 5 else second).wait(WAIT_S)

    with member(cluster, topic, group, Seen(listener), rebalance_interval_s=0.1) as consumer:
        try:
            consumer.seen.wait(lambda seen: len(seen.messages) == 5)
            other = AnotherComes(cluster, group, consumer, topic)
            other.come()
            other.go()
            consumer.seen.wait(lambda seen: len(seen.messages) == 10)
            first.set()
            settle()
            stored = cluster.committed(group, topic).get(0, 0)
            assert stored == 0, f"{stored} was committed by calls that began before the queue was given up"
            second.set()
            until(lambda: consumer.stored() == {queue(topic, 0): 5}, "all is committed")
        finally:
            first.set()
            second.set()


@pytest.mark.hazard("H48")
@pytest.mark.parametrize("member", [ours, faulty(OnePeriodIsLikeAnother, "was committed by calls that began before")])
def test_an_acknowledgement_counts_for_its_own_period_only(embedded, names, member):
    """What a listener finishes after its queue was given up and taken back counts no more: the new period has its own.

    Faulty: Java's lite pull consumer commits results of an earlier ownership under the new one.
    """
    a_late_acknowledgement_counts_for_its_own_period_only(embedded, names, member)


@pytest.mark.hazard("H48")
@pytest.mark.parametrize("check", [a_closed_member_is_gone, a_late_acknowledgement_counts_for_its_own_period_only])
def test_the_naive_member_is_right_about_ends(embedded, names, check):
    """What the faulty ones are made of passes: it is the fault that the check finds."""
    check(embedded, names, NaiveMember)


@pytest.mark.hazard("H39")
def test_the_naive_member_is_right_about_lists(embedded, names):
    a_list_of_members_may_be_wrong(embedded, names, NaiveMember, LISTS["another one"])
