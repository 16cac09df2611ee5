"""Which offsets a commit may overwrite, its result, and its time: H09, H31-H33, H38, H40, H44, H45."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing, suppress
from typing import Any

import pytest

from pyrocket_consumer import Message, MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedCluster, Gate, answer, drop
from tests.consumer.commits.faults import PullsCarryCommits
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.connection import Wire
from tests.hazards.members import (
    Kind,
    broadcasting,
    committed_values,
    faulty,
    filled,
    give_time_to,
    ours,
    request_matcher,
    settle,
    wait_limit_s,
)
from tests.hazards.naive import NaiveMember, Window
from tests.hazards.other_members import AnotherMember, DropsWithoutStoring
from tests.real_brokers.remoting import Peer
from tests.resets import fill, queue

CLUSTER = {"flush_offsets_s": 3600.0}
"""A broker that writes committed offsets to its disk when the test wants it."""

NEVER_S = 3600.0
COMMIT, PULL = RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.PULL_MESSAGE


class StoresWhatNoNewMessageSays(NaiveMember):
    """Stores the next offset of "no new message" although a listener has messages."""

    def on_nothing_found(self, window: Window, next_offset: int) -> None:
        super().on_nothing_found(window, next_offset)
        self.offsets[window.queue] = next_offset


@pytest.mark.hazard("H09")
@pytest.mark.parametrize(
    ("code", "options"),
    [(19, {}), (20, {}), (19, {"orderly": True}), (19, {"orderly": True, "auto_commit": False})],
    ids=["no-new", "no-matched", "orderly", "no-auto-commit"],
)
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, faulty(StoresWhatNoNewMessageSays, "was committed while the listener has all")]
)
def test_nothing_is_committed_past_messages_at_the_listener(embedded, broker, code, options, member):
    """The commit offset is the lowest unfinished offset. "No new message" moves it only in an empty window.
    The same applies to orderly consumers. Messages that their listener has not committed are unfinished.

    Faulty: Go stored the next offset of such a response at once; C++ had to fix that again for orderly consumers.
    """
    embedded.create_topic("T", queues=1)
    fill(embedded, "T", 10)
    at_end = request_matcher("T", queueOffset=10)
    nothing = answer(code, None, {"nextBeginOffset": "10", "minOffset": "0", "maxOffset": "10"})
    broker.on(PULL, nothing, times=2, when=at_end)
    first, others = threading.Event(), threading.Event()

    def listener(message: Message) -> None:
        (first if message.queue_offset < 3 else others).wait(30)

    def commits_while_blocked() -> list[int]:
        give_time_to(lambda: any(offset for _, offset in committed_values(broker, "T")), member)
        return [offset for _, offset in committed_values(broker, "T") if offset > 0]

    with member(embedded, "T", "G", RecordingListener(listener), **options) as consumer:
        try:
            consumer.seen.wait_for(1 if options.get("orderly") else 10)
            broker.wait_for(PULL, 3, when=at_end)
            assert not (past := commits_while_blocked()), f"{past} was committed while the listener has all messages"
            others.set()
            assert not (past := commits_while_blocked()), f"{past} was committed while the listener has 0, 1 and 2"
            first.set()
            if options.get("auto_commit", True):
                until(lambda: consumer.stored() == {queue("T", 0): 10}, "all messages are committed")
            else:
                consumer.seen.wait_for(10)
                assert not (past := commits_while_blocked()), f"{past} was committed, but not by the listener"
        finally:
            first.set()
            others.set()


class CommitsWhatHasNotChanged(NaiveMember):
    """Commits all offsets in memory at every tick."""

    def persist(self, mq: MessageQueue) -> None:
        self.committed.pop(mq, None)
        super().persist(mq)


OVERWRITING = (CommitsWhatHasNotChanged, PullsCarryCommits)


@pytest.mark.hazard("H31")
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, *(faulty(each, "an idle consumer has overwritten it") for each in OVERWRITING)]
)
def test_an_idle_consumer_commits_nothing_over_an_admin(cluster, names, member):
    """Only changed offsets are committed, and all of them once a minute, because brokers may have lost some.

    Faulty: Java, Go and C++ commit every held queue every 5 s, Java and Go with every pull, too.
    """
    topic, group = filled(cluster, names, queues=1, messages=10)
    with member(cluster, topic, group, pull_hold_s=0.1) as consumer:
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        cluster.broker("broker-a").commit(group, topic, {0: 4})
        settle()  # commits and pulls
        give_time_to(lambda: consumer.stored() != {queue(topic, 0): 4}, member)
        assert consumer.stored() == {queue(topic, 0): 4}, "an idle consumer has overwritten it"
        fill(cluster, topic, 1, start=10)
        until(lambda: consumer.stored() == {queue(topic, 0): 11}, "with progress the consumer commits again")


@pytest.mark.hazard("H32")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(PullsCarryCommits, "has overwritten the new owner")])
def test_a_pull_that_is_late_commits_nothing_over_the_next_owner(embedded, names, member):
    """Pulls carry no commits. After a queue ends, no request of its former owner stores an offset.

    Faulty: Java and Go let pulls carry the commit offset.
    """
    # A pull is in flight while the queue ends and its next owner continues.
    topic, group = filled(embedded, names, queues=1, messages=10)
    broker, late = embedded.broker("broker-a"), Gate()
    with member(embedded, topic, group, pull_hold_s=0.1) as consumer:
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        broker.on(PULL, late, times=None, when=request_matcher(topic))
        late.wait_held(1, WAIT_S)
        AnotherMember(embedded, group, consumer, topic).take_queue()
        broker.commit(group, topic, {0: 25})
        late.open()
        give_time_to(lambda: embedded.committed(group, topic) != {0: 25}, member)
        assert embedded.committed(group, topic) == {0: 25}, (
            "the old owner's pull has overwritten the new owner's commit"
        )


class CommitsOneWay(NaiveMember):
    """Commits without waiting for a response, and takes each sent offset for stored."""

    def commit(self, mq: MessageQueue, offset: int) -> None:
        fields = {"consumerGroup": self.group, "topic": mq.topic, "queueId": mq.queue_id, "commitOffset": offset}
        self.wire(self.master(mq)).oneway(COMMIT, fields)


@pytest.mark.hazard("H32")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(CommitsOneWay, "the broker has the last one")])
def test_a_slow_commit_is_not_overtaken_by_the_next(embedded, broker, member):
    """A queue has one commit at a time, which waits for the response to the one before, so the offset never goes back.

    Faulty: all other clients send commits one-way.
    """
    # The broker is slow with one commit, as its thread pools can be.
    embedded.create_topic("T", queues=1)
    slow = Gate()
    with member(embedded, "T", "G", call_timeout_s=WAIT_S) as consumer:
        fill(embedded, "T", 1)
        until(lambda: consumer.stored() == {queue("T", 0): 1}, "committed")
        broker.on(COMMIT, slow, when=request_matcher("T"))
        fill(embedded, "T", 9, start=1)
        slow.wait_held(1, WAIT_S)
        fill(embedded, "T", 10, start=10)
        consumer.seen.wait_for(20)
        give_time_to(lambda: (0, 20) in committed_values(broker, "T"), member)
        slow.open()
        give_time_to(lambda: consumer.stored() != {queue("T", 0): 20}, member)
        until(lambda: consumer.stored() == {queue("T", 0): 20}, "the broker has the last one", wait_limit_s(member))
        values = [offset for _, offset in committed_values(broker, "T")]
        assert values == sorted(values)


class NeverCommitsZero(NaiveMember):
    """Takes an offset of 0 for a missing one."""

    def commit(self, queue: MessageQueue, offset: int) -> None:
        if offset > 0:
            super().commit(queue, offset)


@pytest.mark.hazard("H32")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(NeverCommitsZero, "0 is stored")])
def test_an_offset_of_0_is_stored_as_any_other(cluster, names, member):
    """After a reset to 0 the broker has 0. A member that continues after a crash begins at the first message.

    Faulty: Java's and Go's pulls commit only offsets above 0, and an older value stays.
    """
    topic, group = filled(cluster, names, queues=1, messages=10)
    stop, release = threading.Event(), threading.Event()

    def listener(message: Message) -> None:
        if stop.is_set():
            release.wait(WAIT_S)

    with member(cluster, topic, group, RecordingListener(listener)) as consumer:
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        stop.set()
        try:
            consumer.reset(topic, {queue(topic, 0): 0})
            consumer.seen.wait(lambda seen: len(seen.messages) > 10)
            until(lambda: consumer.stored() == {queue(topic, 0): 0}, "0 is stored", wait_limit_s(member))
        finally:
            release.set()


@pytest.mark.hazard("H33")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(CommitsOneWay, "the lost offsets are committed again")])
def test_a_commit_that_is_lost_is_made_again(embedded, broker, member):
    """An offset counts as stored when the broker has acknowledged it. Until then the member commits it again.

    Faulty: a dirty flag that is cleared when a one-way commit is sent.
    """
    fill(embedded, "T", 10, queues=2)
    turns = itertools.cycle([True, False])
    broker.on(COMMIT, drop, times=None, when=lambda command: request_matcher("T")(command) and next(turns))
    with member(embedded, "T", "G", call_timeout_s=0.2) as consumer:
        consumer.seen.wait_for(10)
        all_stored = {queue("T", 0): 5, queue("T", 1): 5}
        until(lambda: consumer.stored() == all_stored, "the lost offsets are committed again", wait_limit_s(member))


@pytest.mark.hazard("H33")
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "the offsets that the broker lost are committed again")])
def test_commits_that_a_crashed_broker_forgot_are_made_again(cluster, names, member):
    """After a broker was down, the member commits all offsets there again, even without new messages.

    Faulty: a member that commits only changed offsets.
    """
    # The broker crashes before it has written the offsets to its disk.
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker = cluster.broker("broker-a")
    lose_commits = {"lose_commits": True} if isinstance(cluster, EmbeddedCluster) else {}
    with member(cluster, topic, group) as consumer:
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        time.sleep(0.5)  # the member knows it, too
        broker.kill(**lose_commits)
        broker.start()
        again = "the offsets that the broker lost are committed again"
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, again, 90 if member is ours else 2)
        fill(cluster, topic, 1, start=10)
        consumer.seen.wait_for(11, 90)


@pytest.mark.hazard("H33")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(CommitsOneWay, "first commits of a group at once")])
def test_the_first_commit_of_a_group_goes_alone(embedded, broker, member):
    """A group's first commit of a topic is acknowledged before others follow, because a broker that gets two keeps one.

    Faulty: one-way commits of all queues at once.
    """
    fill(embedded, "T", 16, queues=4)
    first = Gate()
    broker.on(COMMIT, first, times=None, when=request_matcher("T"))
    with member(embedded, "T", "G", call_timeout_s=WAIT_S) as consumer:
        try:
            first.wait_held(1, WAIT_S)
            give_time_to(lambda: len(first.wait_held(1)) > 1, member)
            at_once = len(first.wait_held(1))
            assert at_once == 1, f"{at_once} first commits of a group at once: the broker keeps one of them"
        finally:
            first.open()
        consumer.seen.wait_for(16)
        until(lambda: set(consumer.stored().values()) == {4}, "all messages are committed")


@pytest.mark.hazard("H38")
@pytest.mark.parametrize("kind", ["clustering", "orderly", "broadcasting"])
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(DropsWithoutStoring, "progress was forgotten")])
def test_unsubscribing_stores_what_was_consumed_and_unlocks(embedded, broker, tmp_path, kind, member):
    """When a topic is unsubscribed, its offsets are stored first, and its queues are unlocked after that.

    Faulty: Java drops such queues without persisting and unlocking.
    """
    options = {"clustering": {}, "orderly": {"orderly": True}, "broadcasting": broadcasting(tmp_path)}[kind]
    fill(embedded, "T", 20, queues=1)
    embedded.create_topic("other", queues=1)
    with member(embedded, "T", "G", commit_interval_s=NEVER_S, **options) as consumer:
        consumer.subscribe("other", lambda message: None)
        consumer.seen.wait_for(20)
        until(lambda: consumer.held().get(queue("T", 0)) == 20, "consumed")
        consumer.unsubscribe("T")
        until(lambda: queue("T", 0) not in consumer.held(), "given up")
        in_file = kind == "broadcasting"
        stored = consumer.stored().get(queue("T", 0)) if in_file else embedded.committed("G", "T").get(0)
        assert stored == 20, "progress was forgotten"
        locked = {each.topic for each in broker.locks("G")}
        assert "T" not in locked, "the queue is still locked"


class OneTimerForAll(NaiveMember):
    """Refreshes routes and persists in one thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"route_refresh_interval_s": NEVER_S})

    def persist_all(self) -> None:
        with suppress(OSError):
            for topic in list(self.subscriptions):
                self.call(self.options["name_server"], RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
        super().persist_all()


@pytest.mark.hazard("H40")
@pytest.mark.parametrize("member", [ours, faulty(OneTimerForAll, "commits continue while a name server is silent")])
def test_commits_continue_while_the_name_server_is_silent(embedded, member):
    """Commits, routes, heartbeats and locks wait only for their own responses.

    Faulty: Java's five periodic jobs share a thread, which a silent name server stops.
    """
    embedded.create_topic("T", queues=1)
    name_server, silent = embedded.name_server_node, Gate()
    options = {"route_refresh_interval_s": 0.05, "call_timeout_s": WAIT_S}
    with member(embedded, "T", "G", **options) as consumer:
        fill(embedded, "T", 5)
        until(lambda: consumer.stored() == {queue("T", 0): 5}, "committed")
        name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, silent, times=None)
        try:
            silent.wait_held(1, WAIT_S)
            fill(embedded, "T", 5, start=5)
            consumer.seen.wait_for(10)
            go_on = "commits continue while a name server is silent"
            until(lambda: consumer.stored() == {queue("T", 0): 10}, go_on, wait_limit_s(member))
        finally:
            silent.open()
            name_server.clear_faults()


class CommitsInTurn(NaiveMember):
    """Commits the queues one after the other."""


@pytest.mark.hazard("H40")
@pytest.mark.parametrize(
    "member", [ours, faulty(CommitsInTurn, "commits continue at one broker while another is silent")]
)
def test_commits_continue_while_another_broker_is_silent(member):
    """A broker that does not answer a commit delays no commit at other brokers.

    Faulty: commits that wait for each other in one thread.
    """
    silent = Gate()
    with EmbeddedCluster(brokers=2, long_poll_tick_s=0.1) as cluster:
        cluster.create_topic("T", queues=1)
        with member(cluster, "T", "G", call_timeout_s=WAIT_S) as consumer:
            fill(cluster, "T", 2)
            until(lambda: set(consumer.stored().values()) == {1}, "committed at both")
            cluster.broker("broker-a").on(COMMIT, silent, times=None, when=request_matcher("T"))
            try:
                cluster.send("T", b"-", broker_name="broker-a")
                silent.wait_held(1, WAIT_S)
                cluster.send("T", b"--", broker_name="broker-b")
                go_on = "commits continue at one broker while another is silent"
                until(lambda: consumer.stored()[queue("T", 0, "broker-b")] == 2, go_on, wait_limit_s(member))
            finally:
                silent.open()


class AnswersReadTheStore(NaiveMember):
    """Reads the store into its memory when a tool requests its offsets, as MEMORY_FIRST_THEN_STORE allows."""

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        if request.code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT):
            for mq in [each for each in self.known.get(self.options["asked_of"], ()) if not self.closing.is_set()]:
                with suppress(OSError):
                    self.offsets[mq] = self.read_stored(mq) or 0
        super().on_request(wire, request)


def commits_of_a_run(cluster: Any, names: Any, member: Kind, *, questions: bool) -> list[tuple[int, int]]:
    """Consume 5 messages twice, with a hand-over in between, and return the committed offsets."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    broker, ended = cluster.broker("broker-a"), threading.Event()

    def query(peer: Peer, client_id: str) -> None:
        status = {"topic": topic, "group": group, "clientAddr": client_id}
        running = {"consumerGroup": group, "clientId": client_id, "jstackEnable": False}
        peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, running, accept=range(300))
        peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, status, accept=range(300))

    def keep_querying(client_id: str) -> None:
        with closing(Peer(broker.address)) as peer:
            while not ended.wait(0.005):
                query(peer, client_id)

    options = {"commit_interval_s": NEVER_S, "rebalance_interval_s": 0.1}
    if member is not ours:
        options["asked_of"] = topic
    with member(cluster, topic, group, **options) as consumer, closing(Peer(broker.address)) as peer:
        querying = threading.Thread(target=keep_querying, args=[consumer.client_id])
        if questions:
            querying.start()
        try:
            other = AnotherMember(cluster, group, consumer, topic)
            for stage in range(2):
                fill(cluster, topic, 5, start=5 * stage)
                consumer.seen.wait_for(5 * (stage + 1))
                if not questions or member is not AnswersReadTheStore:
                    until(lambda stage=stage: consumer.held().get(queue(topic, 0)) == 5 * (stage + 1), "consumed")
                if questions:
                    query(peer, consumer.client_id)
                other.take_queue()
                other.give_queue_back()
        finally:
            ended.set()
            if questions:
                querying.join()
        assert sorted(consumer.seen.bodies) == numbered(10), "diagnostics caused redeliveries"
    return [
        (queue_id, offset) for queue_id, offset in committed_values(broker, topic) if offset
    ]  # the queue began at 0


@pytest.mark.hazard("H44")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(AnswersReadTheStore, "diagnostics caused")])
def test_diagnostics_change_no_offset(embedded, names, member):
    """A member answers requests for its offsets from memory. They change nothing, even during rebalances.

    Faulty: Java reads the store for the response, and overwrites the offsets in memory.
    """
    alone = commits_of_a_run(embedded, names, member, questions=False)
    assert alone == [(0, 5), (0, 10)]
    with_queries = commits_of_a_run(embedded, names, member, questions=True)
    assert with_queries == alone, "diagnostics caused other commits"


@pytest.mark.hazard("H45")
@pytest.mark.versions("5.1.4", "5.3.3", "5.5.0")  # older brokers return 0 for a missing offset
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "2 messages were skipped")])
def test_an_offset_deleted_at_the_broker_is_no_new_group(cluster, names, member):
    """If the broker has lost the offset of a queue, the consumer continues at the last known one, and emits an event.

    Faulty: all other clients start such a queue by consume_from, which skips new messages or repeats all.
    """
    # The group is deleted at the broker while its second member, which is stuck, holds a queue of the first one.
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=2)
    release = threading.Event()

    def delete_group() -> None:
        # the second field is that of 4.9 and older
        fields = {"groupName": group, "cleanOffset": True, "removeOffset": True}
        with closing(Peer(cluster.broker("broker-a").address)) as peer:
            peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, fields)
        assert cluster.committed(group, topic) == {}

    options = {"consume_from": "last", "rebalance_interval_s": 0.1}
    with member(cluster, topic, group, **options) as first:
        until(lambda: len(first.held()) == 2, "both queues")
        fill(cluster, topic, 10)
        until(lambda: first.stored() == {queue(topic, 0): 5, queue(topic, 1): 5}, "committed")
        stuck = RecordingListener(lambda message: release.wait(WAIT_S))
        with member(cluster, topic, group, stuck, consume_threads=1, shutdown_timeout_s=0.2, **options) as second:
            try:
                until(lambda: len(first.held()) == 1 and list(second.held().values()) == [5], "one each")
                (lost,) = second.held()
                settle()
                delete_group()
                fill(cluster, topic, 4, start=10)
                second.seen.wait_for(1)
                second.close()
            finally:
                release.set()
        until(lambda: lost in first.held(), "the queue is held again")
        cluster.send(topic, b"end", queue_id=lost.queue_id)
        first.seen.wait(lambda seen: b"end" in seen.bodies)
        all_stored = {lost: 8, queue(topic, 1 - lost.queue_id): 7}
        until(lambda: first.stored() == all_stored, "all messages are committed")
        assert not (passed := set(numbered(14)) - set(first.seen.bodies)), f"{len(passed)} messages were skipped"
        assert len(first.seen.bodies) == 15
        forgotten = [each for each in first.events.of("offset-forgotten") if each.queue == lost]
        assert [each.facts["offset"] for each in forgotten] == [5]
