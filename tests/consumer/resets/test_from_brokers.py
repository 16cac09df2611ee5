"""H29, H30: resets by brokers, in the response to a pull, and in a request to every member (220)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from pyrocket_consumer import ConsumerState, MessageQueue
from pyrocket_consumer.protocol.bodies import encode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedCluster, Gate, answer
from tests.consumer.commits.faults import PullsCarryCommits
from tests.consumer.orders import GROUP, QUEUE, TOPIC
from tests.consuming import WAIT_S, Events, RecordingListener, consuming, numbered, until
from tests.hazards.connection import Wire
from tests.hazards.members import (
    HeldRequests,
    Kind,
    Queues,
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
from tests.real_brokers.remoting import Peer
from tests.resets import caught_up, fill, held, queue, send_reset_to_members, wait_until_seen, wait_until_stored

PULL, COMMIT = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET
SINGLE = queue("S", 0)
MARK = {"nextBeginOffset": "4", "minOffset": "0", "maxOffset": "10", "suggestWhichBrokerId": "0"}
"""The response to a pull with a reset to 4."""


def reset_at_broker(cluster: Any, group: str, topic: str) -> None:
    """Reset a group to the beginning at the broker, as mqadmin and the dashboard do."""
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        peer.call(222, {"topic": topic, "group": group, "timestamp": 0, "isForce": True})


class CommitsWithThePull(PullsCarryCommits):
    """C++ sends the commit offset only with each pull, also with the pull whose response has the reset."""

    def persist(self, queue: Any) -> None:
        pass


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, faulty(CommitsWithThePull, "a kill would undo the reset, because .* 10} is stored")]
)
def test_a_reset_is_stored_before_the_first_pull_from_there(embedded, broker, member):
    """The consumer commits the target of a reset, and waits for the acknowledgement, before it pulls there. No pull
    contains a commit. So no crash undoes a reset that the consumer has received.

    A broker sends a reset in response to one pull. If that response is lost with its connection, the reset is lost, and
    no client can know. `mqadmin` and the dashboard then report success, but `Admin` waits for the members'
    confirmation.

    Faulty: C++ sends the old offset with the pull, and the broker stores it after it has sent the reset.
    """
    fill(embedded, "S", 10)
    held = HeldRequests()
    with member(embedded, "S", "G") as consumer:
        until(lambda: consumer.stored() == {SINGLE: 10}, "committed")
        consumer.pause()
        embedded.wait_until(lambda: broker.held_pulls("S") == 0, WAIT_S)
        reset_at_broker(embedded, "G", "S")
        broker.forget_requests()
        broker.on(PULL, held, when=request_matcher("S", queueOffset=0))
        consumer.resume()
        at_target = held.wait()  # where would the group continue if the process were killed now?
        kept = consumer.stored()
        assert kept == {SINGLE: 0}, f"a kill would undo the reset, because {kept} is stored"
        assert not any(offset for _, offset in committed_values(broker, "S")), "the old offset was committed"
        at_target.later(0, lambda: at_target.handle(at_target.answer))
        consumer.seen.wait(lambda seen: len(seen.bodies) == 20)
        until(lambda: consumer.stored() == {SINGLE: 10}, "committed again")
        assert Counter(consumer.seen.bodies) == Counter(numbered(10) * 2)
        assert committed_values(broker, "S") == sorted(committed_values(broker, "S")), "no lower one was committed"


class StaysAtTheSlave(NaiveMember):
    """Commits, gets "success" with a remark that a reset waits, and continues to pull at the suggested broker."""


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    "member", [ours, faulty(StaysAtTheSlave, "the group stays at 0 whatever it commits, and pulls further")]
)
def test_a_reset_reaches_a_consumer_that_reads_from_a_slave(member):
    """Only the master sends a reset, and ignores commits until then. If its response to a commit reports this, the next
    pull goes to the master, whatever broker was suggested.

    Faulty: clients that continue to pull from the slave, while the group's offset does not move.
    """
    with EmbeddedCluster(slaves=1, long_poll_tick_s=0.1) as cluster:
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        cluster.create_topic("S", queues=1)
        for each in (master, slave):
            each.suggest_broker(1)
        with member(cluster, "S", "G") as consumer:
            fill(cluster, "S", 10)
            consumer.seen.wait_for(10)
            slave.wait_for(PULL, timeout_s=WAIT_S, when=request_matcher("S", queueOffset=10))
            until(lambda: consumer.stored() == {SINGLE: 10}, "committed")
            reset_at_broker(cluster, "G", "S")
            fill(cluster, "S", 1, start=10)
            stays = "the group stays at 0 whatever it commits, and pulls further"
            until(lambda: len(consumer.seen.bodies) >= 21, stays, wait_limit_s(member))
            until(lambda: consumer.stored() == {SINGLE: 11}, "committed again")


class DropsLateAnswers(NaiveMember):
    """Drops the response to an earlier pull, whatever it contains."""

    def on_pull_response(self, window: Window, answer: RemotingCommand) -> None:
        if not window.dropped:
            super().on_pull_response(window, answer)


class WaitsNoLonger(NaiveMember):
    """Drops a response that arrives after the call has timed out."""

    pull_margin_s = 0.2


def a_late_reset_is_obeyed(cluster: Any, member: Kind, *, timed_out: bool, **options: Any) -> None:
    """The broker holds a pull at 10 until the member has given it up, and then responds with a reset to 4."""
    fill(cluster, "S", 10)
    broker, held = cluster.broker("broker-a"), HeldRequests()
    broker.on(PULL, held, when=request_matcher("S", queueOffset=10))
    with member(cluster, "S", "G", **options) as consumer:
        consumer.seen.wait_for(10)
        held.wait()
        consumed = 10
        if timed_out:
            broker.wait_for(PULL, 2, timeout_s=WAIT_S, when=request_matcher("S", queueOffset=10))
        else:
            consumer.reset("S", {SINGLE: 8})
            consumed += 2
            consumer.seen.wait(lambda seen: len(seen.bodies) == consumed)
        held.answer(21, "OFFSET_RESET", MARK)
        lost = "the reset is lost, because only that response had it"
        until(lambda: len(consumer.seen.bodies) == consumed + 6, lost, wait_limit_s(member))
        until(lambda: consumer.stored() == {SINGLE: 10}, "committed again")
        assert Counter(consumer.seen.bodies[consumed:]) == Counter(numbered(6, 4))
        if member is ours:
            assert "abandoned" in consumer.events.of("offset-reset")[-1].text


@pytest.mark.hazard("H29")
@pytest.mark.parametrize("member", [ours, faulty(DropsLateAnswers, "the reset is lost")])
def test_a_reset_in_the_response_to_an_abandoned_pull_is_followed(embedded, member):
    """The response to a pull that was abandoned, for example by another reset, changes nothing unless it has a reset.
    The broker sends a reset once, in response to the pull that comes first.

    Faulty: clients that drop every late response.
    """
    a_late_reset_is_obeyed(embedded, member, timed_out=False)


@pytest.mark.hazard("H29")
@pytest.mark.parametrize("member", [ours, faulty(WaitsNoLonger, "the reset is lost")])
def test_a_reset_in_the_response_to_a_timed_out_pull_is_followed(embedded, member):
    """The same applies to a response that arrives after its request has timed out, as long as the connection is open.

    Faulty: clients that forget the number of a request that has timed out.
    """
    options = {"pull_hold_s": 0.1, "call_timeout_s": 0.2} if member is ours else {}
    a_late_reset_is_obeyed(embedded, member, timed_out=True, **options)


def both_members_replay(cluster: Any, names: Any, member: Kind) -> None:
    """One of two members has consumed everything. The other has taken over half of the queues, and has consumed
    nothing. The broker still holds the first member's pulls of these queues."""
    topic, group = filled(cluster, names, queues=4, messages=40)
    seen = RecordingListener()
    old, everything = set(numbered(40)), {queue(topic, number): 10 for number in range(4)}
    options = {"pull_hold_s": 15.0}
    with member(cluster, topic, group, seen, instance_name="first", **options) as first:
        seen.wait_for(40)
        until(lambda: first.stored() == everything, "committed")
        with member(cluster, topic, group, seen, instance_name="second", **options) as second:
            until(lambda: len(first.held()) == len(second.held()) == 2, "two queues each")
            if isinstance(cluster, EmbeddedCluster):  # else they may not be held yet
                until(lambda: cluster.broker("broker-a").held_pulls(topic) == 6, "also the first member's old pulls")
            reset_at_broker(cluster, group, topic)
            fill(cluster, topic, 4, start=40)  # ends the held pulls

            def again() -> int:
                return sum(times > 1 for body, times in Counter(seen.bodies).items() if body in old)

            with suppress(AssertionError):  # checked below
                until(lambda: again() == 40, "all are consumed again", wait_limit_s(member))
            assert again() == 40, f"{again()} of 40 messages were consumed again"
            seen.wait_for(44)
            at_end = dict.fromkeys(everything, 11)
            until(lambda: {**first.stored(), **second.stored()} == at_end, "committed again")
            assert {times for body, times in Counter(seen.bodies).items() if body in old} == {2}
        if isinstance(cluster, EmbeddedCluster):
            assert any("in the response to an old pull" in each.text for each in first.events.of("offset-reset"))


@pytest.mark.hazard("H29")
@pytest.mark.parametrize("member", [ours, faulty(DropsLateAnswers, "[23]0 of 40 messages were consumed again")])
def test_a_member_that_has_just_taken_queues_over_is_reset_too(embedded, names, member):
    """If the response to a held pull of a queue's last owner has a reset, that member forwards it to the present owner.
    The present owner replays, although it has consumed no message of the queue yet.

    Faulty: clients that drop the response, so queues with a new owner are not reset. Java 5.5.0 members behave like
    this, too, whatever the cause.
    """
    both_members_replay(embedded, names, member)


@pytest.mark.hazard("H29")
def test_new_owners_are_reset_at_real_brokers(real_cluster, names):
    """The same with real brokers, which reset a group in the default way of their release."""
    both_members_replay(real_cluster, names, ours)


def test_a_hand_over_between_proxies_is_not_forwarded(embedded, broker, stores):
    with caught_up(embedded, "T", "G", 20, pull_hold_s=0.2, **stores) as (consumer, seen):
        broker.on(PULL, answer(21, "OFFSET_RESET", {**MARK, "maxOffset": "0"}), when=request_matcher("T", queueId=0))
        seen.wait(lambda seen: len(seen.messages) == 26)
        wait_until_stored(consumer, "T", 20)
        assert embedded.committed("G", "%RETRY%G") == {}


class PausesEverything(NaiveMember):
    """Java and Go pause the whole consumer for ten seconds."""

    def on_reset(self, targets: Queues) -> None:
        self.pause()
        self.closing.wait(10)
        super().on_reset(targets)
        self.resume()


class Resumes(NaiveMember):
    """The same, without the ten seconds."""

    def on_reset(self, targets: Queues) -> None:
        super().on_reset(targets)
        self.resume()


@pytest.mark.hazard("H30")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(PausesEverything, "a reset of one topic delays another")])
def test_a_reset_of_one_topic_does_not_delay_another(embedded, broker, member):
    """A reset fences the queues that it names, and no other queue waits for it.

    Faulty: Java and Go pause the whole consumer for ten seconds.
    """
    embedded.create_topic("other", queues=1)
    fill(embedded, "S", 10)
    gate, others = Gate(), RecordingListener()
    with member(embedded, "S", "G") as consumer:
        consumer.subscribe("other", others)
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored().get(SINGLE) == 10 and queue("other", 0) in consumer.held(), "both")
        broker.on(
            COMMIT, gate, times=None, when=request_matcher("S")
        )  # the broker delays the acknowledgement of the target
        try:
            send_reset_to_members(broker, "G", "S", encode_offset_table({SINGLE: 2}))
            until(lambda: (0, 2) in committed_values(broker, "S") or getattr(consumer, "paused", False), "it has begun")
            fill(embedded, "other", 5)
            until(lambda: len(others.bodies) == 5, "a reset of one topic delays another", wait_limit_s(member))
        finally:
            broker.clear_faults()
            gate.open()
        consumer.seen.wait(lambda seen: len(seen.bodies) == 18)


@pytest.mark.hazard("H30")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(Resumes, "consumed although the consumer was paused")])
def test_a_paused_consumer_stays_paused(embedded, broker, member):
    """A reset moves the queues of a paused consumer, and the consumer stays paused.

    Faulty: Java resumes the consumer after every reset.
    """
    fill(embedded, "S", 10)
    with member(embedded, "S", "G") as consumer:
        until(lambda: consumer.stored() == {SINGLE: 10}, "committed")
        consumer.pause()
        send_reset_to_members(broker, "G", "S", encode_offset_table({SINGLE: 2}))
        consumer.events.wait_for("offset-reset")
        give_time_to(lambda: len(consumer.seen.bodies) > 10, member)
        more = len(consumer.seen.bodies) - 10
        assert not more, f"{more} messages were consumed although the consumer was paused"
        consumer.resume()
        consumer.seen.wait(lambda seen: len(seen.bodies) == 18)


class LeavesAGhost(NaiveMember):
    """Removes the queue from its table without stopping the pull loop, which continues next to the new one."""

    def on_reset(self, targets: Queues) -> None:
        for each in targets:
            if each in self.windows:
                self.offsets[each] = targets[each]
                self.pull_at(each, targets[each])


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, faulty(LeavesAGhost, "messages were consumed twice by two pull loops")]
)
def test_one_pull_loop_is_left_for_each_queue(embedded, broker, member):
    """Rebalance and resets change a queue one after the other. A queue's new window begins only when the old one has
    ended, so there is never a second pull loop.

    Faulty: in Java and Go a reset during a rebalance leaves the old pull request running next to the new one.
    """
    fill(embedded, "S", 5)
    gate = Gate()
    with member(embedded, "S", "G") as consumer:
        until(lambda: consumer.stored() == {SINGLE: 5}, "committed")
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, gate, when=request_matcher("S", queueId=1))
        embedded.create_topic("S", queues=2)
        gate.wait_held(timeout_s=WAIT_S)  # the queue is beginning when a reset of all queues arrives
        send_reset_to_members(broker, "G", "S", encode_offset_table({SINGLE: 3, queue("S", 1): 0}))
        consumer.events.wait_for("offset-reset") if member is ours else settle()
        gate.open()
        until(lambda: len(consumer.held()) == 2, "both queues")
        consumer.seen.wait(lambda seen: len(seen.bodies) >= 7)
        for number in range(4):
            embedded.send("S", b"after-%d" % number, queue_id=number % 2)
        consumer.seen.wait_for(9)

        def twice() -> list[bytes]:
            return [body for body, times in Counter(consumer.seen.bodies).items() if times > 1 and b"after" in body]

        give_time_to(twice, member)
        assert not twice(), f"{len(twice())} messages were consumed twice by two pull loops"
        until(lambda: broker.held_pulls("S") == 2, "one pull for each queue")


TARGETS = {queue("T", 0): 2, queue("T", 1): 7}
SPELLINGS = {
    "map": encode_offset_table(TARGETS),
    "list": encode_offset_table(TARGETS, as_list=True),
    "pairs": b'{"offsetTable":[[{"topic":"T","brokerName":"broker-a","queueId":0},2],'
    b'[{"topic":"T","brokerName":"broker-a","queueId":1},7]]}',
    "quoted": b'{"offsetTable":{"{\\"topic\\":\\"T\\",\\"brokerName\\":\\"broker-a\\",\\"queueId\\":0}":2,'
    b'"{\\"topic\\":\\"T\\",\\"brokerName\\":\\"broker-a\\",\\"queueId\\":1}":7}}',
}
"""A reset of two queues as brokers write it for clients in different languages."""


class KnowsTheMapOnly(NaiveMember):
    """Java ignores the list form, which brokers use for a reset by a tool in another language."""

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        if request.code != RequestCode.RESET_CONSUMER_CLIENT_OFFSET or b'"offsetTable":{{' in request.body:
            super().on_request(wire, request)


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    ("member", "spelling", "model"),
    [
        *((ours, spelling, model) for spelling in SPELLINGS for model in ("clustering", "broadcasting")),
        *((NaiveMember, spelling, "clustering") for spelling in SPELLINGS),
        *(
            faulty(KnowsTheMapOnly, f"the {spelling} form was ignored", spelling, "clustering")
            for spelling in ("list", "pairs", "quoted")
        ),
    ],
)
def test_every_spelling_of_a_reset_is_followed(embedded, broker, tmp_path, member, spelling, model):
    """The consumer reads each form of a reset. Brokers use the form of the language of the requesting tool.

    Faulty: Java ignores lists and pairs; Go and C++ crash at some of the others.
    """
    fill(embedded, "T", 20)
    with member(embedded, "T", "G", message_model=model, offset_store_dir=tmp_path) as consumer:
        consumer.seen.wait_for(20)
        until(lambda: sum(consumer.stored().values()) == 20, "stored")
        send_reset_to_members(broker, "G", "T", SPELLINGS[spelling])
        ignored = f"the {spelling} form was ignored"
        until(lambda: len(consumer.seen.bodies) == 20 + 8 + 3, ignored, wait_limit_s(member))
        again = [(message.queue.queue_id, message.queue_offset) for message in consumer.seen.messages[20:]]
        assert sorted(again) == [*((0, offset) for offset in range(2, 10)), *((1, offset) for offset in range(7, 10))]
        until(lambda: sum(consumer.stored().values()) == 20, "stored again")


class CrashesAtAnUnreadableReset(NaiveMember):
    """Crashes, as Go does at lists and C++ at pairs."""

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        try:
            super().on_request(wire, request)
        except Exception:
            self.kill()


@pytest.mark.hazard("H30")
@pytest.mark.parametrize("member", [ours, faulty(CrashesAtAnUnreadableReset, "ended the consumer")])
def test_a_reset_that_cannot_be_read_moves_nothing(embedded, broker, member):
    """The consumer ignores a reset that it cannot read, and emits an event.

    Faulty: Go crashes at the list form, C++ at pairs.
    """
    fill(embedded, "S", 5)
    with member(embedded, "S", "G") as consumer:
        consumer.seen.wait_for(5)

        def has_read(number: int) -> bool:
            has_ended = member is CrashesAtAnUnreadableReset and consumer.closed.is_set()
            return has_ended or len(consumer.events.of("offset-reset")) == number

        for number, body in enumerate((b"{", b'{"offsetTable":7}', b'{"offsetTable":[[1]]}', b"\xff\xfe"), 1):
            send_reset_to_members(broker, "G", "S", body)
            until(lambda number=number: has_read(number), "the consumer has read it")
            sent = fill(embedded, "S", 1, start=4 + number)
            ended = f"{body!r}, which cannot be read, ended the consumer"
            until(lambda sent=sent: sent[0] in consumer.seen.bodies, ended, wait_limit_s(member))
            assert "cannot be read, and nothing moved" in consumer.events.wait_for("offset-reset", number).text
        assert sorted(consumer.seen.bodies) == numbered(9)


@pytest.mark.parametrize("body", [b"", b'{"offsetTable":{}}', encode_offset_table({queue("T", 0): -5})])
def test_a_reset_without_queues_moves_nothing(embedded, broker, body):
    elsewhere = {queue("U", 0): 0, MessageQueue("T", "broker-z", 0): 0}
    with caught_up(embedded, "T", "G", 10) as (_, seen):
        for table in (body, encode_offset_table(elsewhere)):
            send_reset_to_members(broker, "G", "T", table)
        fill(embedded, "T", 2, start=10)
        wait_until_seen(seen, 1, 12)


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
@pytest.mark.parametrize(
    ("targets", "topic", "reason"),
    [
        ({queue("T", 0): 2, queue("T", 1): -5}, "T", "-5 is no offset of T/broker-a/1"),
        ({queue("T", 0): 2, queue("T", 1): 2**63 - 1}, "T", f"{2**63 - 1} is no offset"),
        ({queue("T", 0): 2, queue("T", 1): -(2**63)}, "T", f"{-(2**63)} is no offset"),
        ({queue("T", 0): 2, queue("U", 1): 3}, "T", "it names U/broker-a/1"),
        ({queue("U", 0): 2}, "U", "does not subscribe to U"),
        ({queue("T", number): 2 for number in range(7, 5000)}, "T", "there is no queue T/broker-a/7"),
    ],
)
def test_an_invalid_reset_table_moves_nothing(embedded, broker, tmp_path, model, targets, topic, reason):
    events = Events()
    options = {"message_model": model, "offset_store_dir": tmp_path, "on_event": events}
    with caught_up(embedded, "T", "G", 20, **options) as (consumer, seen):
        send_reset_to_members(broker, "G", topic, encode_offset_table(targets))
        text = events.wait_for("offset-reset").text
        assert reason in text and "nothing moved" in text
        assert consumer.state is ConsumerState.RUNNING
        right = {queue("T", 0): 8, queue("T", 7): 0}  # no route has queue 7 yet
        send_reset_to_members(broker, "G", "T", encode_offset_table(right))
        seen.wait(lambda seen: len(seen.messages) == 22)
        assert {message.queue_offset for message in seen.messages[20:]} == {8, 9}
        assert "-> 8" in events.wait_for("offset-reset", 2).text


@pytest.mark.hazard("H02")
def test_of_several_resets_at_once_the_last_counts(embedded, broker):
    with caught_up(embedded, "T", "G", 20) as (consumer, seen):
        consumer.pause()
        for target in (0, 3, 8):
            send_reset_to_members(broker, "G", "T", encode_offset_table(dict.fromkeys(TARGETS, target)))
        until(lambda: {consumer.progress()[each].start_offset for each in TARGETS} == {8}, "the last target")
        consumer.resume()
        seen.wait(lambda seen: len(seen.messages) == 24)
        assert embedded.wait_until(lambda: embedded.committed("G", "T") == {0: 10, 1: 10})


@pytest.mark.virtual
def test_a_reset_of_a_queue_being_given_up_counts_afterwards(embedded, broker):
    """It counts more than the last offset that this member knows."""
    theirs, frees, seen = queue("T", 1), threading.Event(), []

    def listen(message):
        seen.append(message.queue_offset)
        if message.body == b"last" and not frees.is_set():
            assert frees.wait(4 * WAIT_S)

    options = {"orderly": True, "start_wait_s": 0.1, "on_event": (events := Events())}
    fill(embedded, "T", 9, queue_id=1)
    with consuming(embedded, "T", "G", listen, instance_name="first", **options) as (consumer, _):
        until(lambda: embedded.committed("G", "T").get(1) == 9, "committed")
        embedded.send("T", b"last", queue_id=1)
        until(lambda: len(seen) == 10, "the call begins")
        with consuming(embedded, "T", "G", instance_name="second", **options):
            time.sleep(10)
            assert theirs in consumer.progress(), "given up only after its call has returned, or has taken too long"
            broker.commit("G", "T", {1: 2})
            send_reset_to_members(broker, "G", "T", encode_offset_table({theirs: 2}))
            until(lambda: theirs not in consumer.progress(), "given up")
        until(lambda: theirs in consumer.progress(), "it is assigned again")
        frees.set()
        until(lambda: len(seen) == 18, "consumed again")
    assert seen == [*range(10), *range(2, 10)]
    assert not events.of("offset-went-back")


@pytest.mark.parametrize(("refuses", "end"), [(True, 10), (False, 0)], ids=["refused", "a hand-over of proxies"])
def test_a_reset_of_an_unsubscribed_topic_is_not_forwarded(embedded, broker, tmp_path, refuses, end):
    model = "clustering" if refuses else "broadcasting"
    options = {"message_model": model, "offset_store_dir": tmp_path, "remote_reset": "refuse" if refuses else "accept"}
    fill(embedded, "S", 10)
    broker.on(PULL, held := HeldRequests(), when=request_matcher("S", queueOffset=10))
    with consuming(embedded, "S", "G", on_event=(events := Events()), **options) as (consumer, seen):
        consumer.subscribe("T", seen)
        seen.wait_for(10)
        held.wait()
        consumer.unsubscribe("S")
        held.answer(21, "OFFSET_RESET", {**MARK, "maxOffset": end})
        time.sleep(1)
        assert not events.of("offset-reset")
        assert (0, 4) not in committed_values(broker, "S")
    assert len(seen.bodies) == 10


@pytest.mark.parametrize("how", ["unsubscribed", "revoked"])
def test_a_queue_that_is_given_up_is_reset(orders, how):
    """A running call delays the end of an orderly queue. A reset that arrives meanwhile is its final offset."""
    may_return, begun = threading.Event(), threading.Event()

    def slow(message: Any) -> None:
        if message.queue_offset == 3:
            begun.set()
            assert may_return.wait(WAIT_S)

    orders.fill(4)
    seen = RecordingListener(slow)
    body = encode_offset_table({QUEUE: 1})
    with orders.consuming(seen, orderly=True, instance_name="second") as (consumer, _):
        assert begun.wait(WAIT_S)
        other = orders.consumer(lambda message: None, orderly=True, instance_name="first")
        give_up = partial(consumer.unsubscribe, TOPIC) if how == "unsubscribed" else other.start
        ending = threading.Thread(target=give_up)
        ending.start()
        orders.wait_committed(3)
        send_reset_to_members(orders.broker, GROUP, TOPIC, body)
        orders.wait_committed(1)
        may_return.set()
        ending.join(WAIT_S)
        if how == "revoked":
            until(lambda: QUEUE in other.progress(), "it has begun")
            assert other.progress()[QUEUE].start_offset == 1
        until(lambda: not held(consumer, TOPIC), "given up")
        other.close()  # after that, `consumer` may have the queue again
        orders.wait_committed(1 if how == "unsubscribed" else 4)
