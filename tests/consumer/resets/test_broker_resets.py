"""H29–H30: resets by way of the broker: marks that are told to the next pull, and orders to every member (220)."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedCluster, Gate
from pyrocket_consumer.wire.bodies import encode_offset_table
from pyrocket_consumer.wire.codes import CLIENT_VERSION, PullFlag, RequestCode
from pyrocket_consumer.wire.frame import ONEWAY_FLAG, RemotingCommand
from tests.consuming import WAIT_S, Seen, numbered, until
from tests.hazards.connection import Wire
from tests.hazards.members import (
    Held,
    Kind,
    Queues,
    committed_values,
    faulty,
    filled,
    give_time_to,
    of,
    ours,
    settle,
    tell_members,
)
from tests.hazards.naive import NaiveMember, Window
from tests.real_brokers.remoting import Peer
from tests.resetting import fill, queue

PULL, COMMIT = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET


def reset_at_broker(cluster: Any, group: str, topic: str) -> None:
    """Have the broker reset a group to the beginning, as mqadmin and the dashboard do."""
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        peer.call(222, {"topic": topic, "group": group, "timestamp": 0, "isForce": True})


def pause_until_nothing_is_pulled(broker: Any, topic: str, consumer: Any) -> None:
    consumer.pause()
    broker.cluster.wait_until(lambda: broker.held_pulls(topic) == 0, WAIT_S)


# --- H29: a reset that the broker tells to the next pull


class CommitsWithThePull(NaiveMember):
    """C++: the commit offset travels with each pull, also with the one that is told of the reset, and by no other way
    before the next pull."""

    def pull(self, window: Window) -> RemotingCommand:
        queue = window.queue
        fields = {
            "consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id,
            "queueOffset": window.next_offset, "maxMsgNums": 32, "sysFlag": int(PullFlag.SUSPEND | PullFlag.COMMIT),
            "commitOffset": self.offsets.get(queue, 0), "suspendTimeoutMillis": 500, "subVersion": self.sub_version,
            "expressionType": "TAG",
        }  # fmt: skip
        return self.wire(self.master(queue)).call(PULL, fields)

    def persist(self, queue: Any) -> None:
        pass


def a_reset_is_stored_before_it_is_pulled_from(cluster: Any, names: Any, member: Kind) -> None:
    """The pull at the target is kept back, and the process could be killed: where would the group go on?"""
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker, held = cluster.broker("broker-a"), Held()
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        pause_until_nothing_is_pulled(broker, topic, consumer)
        reset_at_broker(cluster, group, topic)
        broker.forget_requests()
        broker.on(PULL, held, when=of(topic, queueOffset=0))
        consumer.resume()
        at_target = held.wait()
        kept = consumer.stored()
        assert kept == {queue(topic, 0): 0}, f"a kill now would undo the reset: {kept} is stored"
        assert not any(offset for _, offset in committed_values(broker, topic)), "the offset of before was committed"
        at_target.later(0, lambda: at_target.handle(at_target.answer))
        consumer.seen.wait(lambda seen: len(seen.bodies) == 20)
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed again")
        assert Counter(consumer.seen.bodies) == Counter(numbered(10) * 2)


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    "member", [ours, faulty(CommitsWithThePull, "a kill now would undo the reset: .* 10} is stored")]
)
def test_a_reset_is_stored_before_the_first_pull_from_there(embedded, names, member):
    """The target of a reset is committed, and the commit acknowledged, before the queue is pulled from there; no pull
    carries a commit. So no crash undoes a reset once the consumer has heard of it.

    A broker tells a reset to one pull: if that answer is lost with its connection, the reset is lost, and no client
    can know. `mqadmin` and the dashboard then say it was done; our own `Admin` has the members confirm it.

    Faulty: C++ lets the pull carry the offset of before, which the broker stores after it has told of the reset.
    """
    a_reset_is_stored_before_it_is_pulled_from(embedded, names, member)


class StaysAtTheSlave(NaiveMember):
    """Commits, gets "success" whose remark says that a reset is waiting, and reads on where it was told to."""


def a_reset_reaches_whoever_reads_from_a_slave(names: Any, member: Kind, patience_s: float = WAIT_S) -> None:
    topic, group = names.topic(), names.group()
    with EmbeddedCluster(slaves=1, long_poll_tick_s=0.1) as cluster:
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        cluster.create_topic(topic, queues=1)
        for each in (master, slave):
            each.suggest_broker(1)
        with member(cluster, topic, group) as consumer:
            fill(cluster, topic, 10)
            consumer.seen.wait_for(10)
            slave.wait_for(PULL, timeout_s=WAIT_S, when=of(topic, queueOffset=10))
            until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
            reset_at_broker(cluster, group, topic)
            fill(cluster, topic, 1, start=10)
            try:
                consumer.seen.wait(lambda seen: len(seen.bodies) >= 21, patience_s)
            except AssertionError:
                stored = consumer.stored()[queue(topic, 0)]
                raise AssertionError(f"the group stands at {stored} whatever it commits, and reads on") from None
            until(lambda: consumer.stored() == {queue(topic, 0): 11}, "committed again")


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    ("member", "options"),
    [
        (ours, {}),
        faulty(StaysAtTheSlave, "the group stands at 0 whatever it commits, and reads on", {"patience_s": 2}),
    ],
)
def test_a_reset_reaches_a_consumer_that_reads_from_a_slave(names, member, options):
    """Only the master tells of a reset, and until then it ignores commits. When it says so, the next pull goes to the
    master, whatever broker was suggested.

    Faulty: clients that read on from the slave, while the group's offset stands still.
    """
    a_reset_reaches_whoever_reads_from_a_slave(names, member, **options)


class DropsLateAnswers(NaiveMember):
    """An answer to a pull of before is nobody's any more, whatever it says."""

    def on_pull_answer(self, window: Window, answer: RemotingCommand) -> None:
        if not window.dropped:
            super().on_pull_answer(window, answer)


class WaitsNoLonger(NaiveMember):
    """What comes after a call has timed out is thrown away with the call's number."""

    pull_margin_s = 0.2


def a_late_reset_is_obeyed(
    cluster: Any, names: Any, member: Kind, *, timed_out: bool, patience_s: float = WAIT_S, **options: Any
) -> None:
    """A pull at 10 is kept back until nobody waits for it; then it is answered with a reset to 4."""
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker, held = cluster.broker("broker-a"), Held()
    broker.on(PULL, held, when=of(topic, queueOffset=10))
    with member(cluster, topic, group, **options) as consumer:
        consumer.seen.wait_for(10)
        held.wait()
        consumed = 10
        if timed_out:
            broker.wait_for(PULL, 2, timeout_s=WAIT_S, when=of(topic, queueOffset=10))
        else:
            consumer.reset(topic, {queue(topic, 0): 8})
            consumed += 2
            consumer.seen.wait(lambda seen: len(seen.bodies) == consumed)
        held.answer(21, "OFFSET_RESET", {
            "nextBeginOffset": 4, "minOffset": 0, "maxOffset": 10, "suggestWhichBrokerId": 0
        })  # fmt: skip
        try:
            consumer.seen.wait(lambda seen: len(seen.bodies) == consumed + 6, patience_s)
        except AssertionError:
            raise AssertionError("the reset is lost: it was told to that pull only") from None
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed again")
        assert Counter(consumer.seen.bodies[consumed:]) == Counter(numbered(6, 4))


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    ("member", "options"), [(ours, {}), faulty(DropsLateAnswers, "the reset is lost", {"patience_s": 1})]
)
def test_a_reset_told_to_an_abandoned_pull_is_obeyed(embedded, names, member, options):
    """An answer to a pull that was abandoned (by another reset, for example) changes nothing, unless it tells of a
    reset: the broker tells that once, to whichever pull comes first.

    Faulty: clients that look at no late answer at all.
    """
    a_late_reset_is_obeyed(embedded, names, member, timed_out=False, **options)


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    ("member", "options"),
    [
        (ours, {"pull_hold_s": 0.1, "call_timeout_s": 0.2}),
        faulty(WaitsNoLonger, "the reset is lost", {"patience_s": 1}),
    ],
)
def test_a_reset_told_to_a_pull_that_has_timed_out_is_obeyed(embedded, names, member, options):
    """The same for an answer that comes after the call has timed out, as long as its connection lasts.

    Faulty: clients that forget the number of a call that has timed out.
    """
    a_late_reset_is_obeyed(embedded, names, member, timed_out=True, **options)


def both_members_replay(cluster: Any, names: Any, member: Kind, patience_s: float = WAIT_S) -> None:
    """Of two members one has consumed everything; the other has taken half of the queues over, while the pulls of the
    first one for them are still held at the broker, and has consumed nothing."""
    topic, group = filled(cluster, names, queues=4, messages=40)
    seen = Seen()
    old, everything = set(numbered(40)), {queue(topic, number): 10 for number in range(4)}
    options = {"pull_hold_s": 15.0}
    with member(cluster, topic, group, seen, instance_name="first", **options) as first:
        seen.wait_for(40)
        until(lambda: first.stored() == everything, "committed")
        with member(cluster, topic, group, seen, instance_name="second", **options) as second:
            until(lambda: len(first.held()) == len(second.held()) == 2, "two queues each")
            reset_at_broker(cluster, group, topic)
            fill(cluster, topic, 4, start=40)  # ends the pulls that are held

            def replayed(seen: Seen) -> int:
                return sum(times > 1 for body, times in Counter(seen.bodies).items() if body in old)

            try:
                seen.wait(lambda seen: replayed(seen) == 40, patience_s)
            except AssertionError:
                raise AssertionError(f"{replayed(seen)} of 40 messages were consumed again") from None
            seen.wait_for(44)
            at_end = dict.fromkeys(everything, 11)
            until(lambda: {**first.stored(), **second.stored()} == at_end, "committed again")
            assert {times for body, times in Counter(seen.bodies).items() if body in old} == {2}


@pytest.mark.hazard("H29")
@pytest.mark.parametrize(
    ("member", "options"),
    [(ours, {}), faulty(DropsLateAnswers, "[23]0 of 40 messages were consumed again", {"patience_s": 3})],
)
def test_a_member_that_has_just_taken_queues_over_is_reset_too(embedded, names, member, options):
    """A reset that is told to a held pull of the queue's last owner is passed on to the member that has it now; that
    one replays although it has consumed nothing of the queue yet.

    Faulty: a client that throws the answer away; queues that have changed hands are then not reset. That is what is
    seen of Java 5.5.0 members, too, whatever the cause is there.
    """
    both_members_replay(embedded, names, member, **options)


@pytest.mark.hazard("H29")
def test_so_it_is_at_real_brokers(real_cluster, names):
    """The same at real brokers, in the way each release resets a group by default."""
    both_members_replay(real_cluster, names, ours)


# --- H30: an order to every member


class PausesEverything(NaiveMember):
    """Java and Go: the whole consumer is paused for ten seconds, then resumed."""

    def on_reset(self, targets: Queues) -> None:
        self.pause()
        self.closing.wait(10)
        super().on_reset(targets)
        self.resume()


class Resumes(NaiveMember):
    """The same, in less time."""

    def on_reset(self, targets: Queues) -> None:
        super().on_reset(targets)
        self.resume()


def other_topics_go_on(cluster: Any, names: Any, member: Kind, patience_s: float = WAIT_S) -> None:
    """The broker does not acknowledge the commit of one topic's target for a while; another topic has messages."""
    topic, other, group = names.topic(), names.topic("other"), names.group()
    broker, gate, others = cluster.broker("broker-a"), Gate(), Seen()
    for each in (topic, other):
        cluster.create_topic(each, queues=1)
    fill(cluster, topic, 10)
    with member(cluster, topic, group) as consumer:
        consumer.subscribe(other, others)
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored().get(queue(topic, 0)) == 10 and queue(other, 0) in consumer.held(), "both")
        broker.on(COMMIT, gate, times=None, when=of(topic))
        try:
            tell_members(broker, group, {queue(topic, 0): 2})
            until(
                lambda: (0, 2) in committed_values(broker, topic) or getattr(consumer, "paused", False),
                "the reset has begun",
            )
            fill(cluster, other, 5)
            try:
                others.wait_for(5, patience_s)
            except AssertionError:
                raise AssertionError("a reset of one topic holds up another") from None
        finally:
            broker.clear_faults()
            gate.open()
        consumer.seen.wait(lambda seen: len(seen.bodies) == 18)


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    ("member", "options"),
    [(ours, {}), faulty(PausesEverything, "a reset of one topic holds up another", {"patience_s": 1})],
)
def test_a_reset_of_one_topic_does_not_hold_up_another(embedded, names, member, options):
    """A reset fences the queues it names, and nothing else waits for it.

    Faulty: Java and Go pause the whole consumer for ten seconds.
    """
    other_topics_go_on(embedded, names, member, **options)


def paused_stays_paused(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker = cluster.broker("broker-a")
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        consumer.pause()
        tell_members(broker, group, {queue(topic, 0): 2})
        consumer.events.wait_for("offset-reset")
        give_time_to(lambda: len(consumer.seen.bodies) > 10, member)
        more = len(consumer.seen.bodies) - 10
        assert not more, f"{more} messages were consumed although the consumer was paused"
        consumer.resume()
        consumer.seen.wait(lambda seen: len(seen.bodies) == 18)


@pytest.mark.hazard("H30")
@pytest.mark.parametrize("member", [ours, faulty(Resumes, "consumed although the consumer was paused")])
def test_a_paused_consumer_stays_paused(embedded, names, member):
    """A reset moves the queues of a consumer that the application has paused, and leaves it paused.

    Faulty: Java resumes the consumer after every reset.
    """
    paused_stays_paused(embedded, names, member)


class LeavesAGhost(NaiveMember):
    """Takes the queue out of its table without telling the pull loop, which lives on beside the new one."""

    def on_reset(self, targets: Queues) -> None:
        for each in targets:
            if each in self.windows:
                self.offsets[each] = targets[each]
                self.pull_at(each, targets[each])


def one_pull_loop_is_left(cluster: Any, names: Any, member: Kind) -> None:
    """A queue is just being added, its offset asked for, when a reset of all queues comes."""
    topic, group = filled(cluster, names, queues=1, messages=5)
    broker, gate = cluster.broker("broker-a"), Gate()
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(5)
        until(lambda: consumer.stored() == {queue(topic, 0): 5}, "committed")
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, gate, when=of(topic, queueId=1))
        cluster.create_topic(topic, queues=2)
        gate.wait_held(timeout_s=WAIT_S)
        tell_members(broker, group, {queue(topic, 0): 3, queue(topic, 1): 0})
        consumer.events.wait_for("offset-reset") if member is ours else settle()
        gate.open()
        until(lambda: len(consumer.held()) == 2, "both queues")
        consumer.seen.wait(lambda seen: len(seen.bodies) >= 7)
        for number in range(4):
            cluster.send(topic, b"after-%d" % number, queue_id=number % 2)
        consumer.seen.wait_for(9)

        def twice() -> list[bytes]:
            return [body for body, times in Counter(consumer.seen.bodies).items() if times > 1 and b"after" in body]

        give_time_to(twice, member)
        assert not twice(), f"{len(twice())} messages were consumed twice: two pull loops are at work"
        until(lambda: broker.held_pulls(topic) == 2, "one pull for each queue")


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    "member", [ours, faulty(LeavesAGhost, "messages were consumed twice: two pull loops are at work")]
)
def test_one_pull_loop_is_left_for_each_queue(embedded, names, member):
    """Rebalance and resets change a queue one after the other, and a new period of a queue begins when the one before
    has ended: there is never a second pull loop.

    Faulty: in Java and Go a reset during a rebalance leaves the old pull request at work beside the new one.
    """
    one_pull_loop_is_left(embedded, names, member)


def spellings(topic: str) -> dict[str, bytes]:
    """Return a reset of two queues to 2 and 4 as brokers write it for clients in one language and another."""
    targets = {queue(topic, 0): 2, queue(topic, 1): 4}
    keys = [b'{"topic":"%s","brokerName":"broker-a","queueId":%d}' % (topic.encode(), number) for number in (0, 1)]
    quoted = [key.replace(b'"', b'\\"') for key in keys]
    return {
        "map": encode_offset_table(targets),
        "list": encode_offset_table(targets, as_list=True),
        "pairs": b'{"offsetTable":[[%s,2],[%s,4]]}' % tuple(keys),
        "quoted": b'{"offsetTable":{"%s":2,"%s":4}}' % tuple(quoted),
    }


SPELLINGS = ("map", "list", "pairs", "quoted")


class KnowsTheMapOnly(NaiveMember):
    """Java: a reset that was asked for by a tool in another language comes as a list, and is ignored."""

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        if request.code != RequestCode.RESET_CONSUMER_CLIENT_OFFSET or b'"offsetTable":{{' in request.body:
            super().on_request(wire, request)


def tell_in_these_words(broker: Any, group: str, topic: str, body: bytes) -> None:
    fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true"}
    order = RemotingCommand(220, fields, body, flag=ONEWAY_FLAG, language="JAVA", version=CLIENT_VERSION)

    def send() -> None:
        for member in broker.core.state.members.group(group).members.values():
            member.connection.oneway(order)

    broker.cluster.call(send)


def every_spelling_is_obeyed(cluster: Any, names: Any, member: Kind, spelling: str, patience_s: float = WAIT_S) -> None:
    topic, group = filled(cluster, names, queues=2, messages=10)
    broker = cluster.broker("broker-a")
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(10)
        tell_in_these_words(broker, group, topic, spellings(topic)[spelling])
        try:
            consumer.seen.wait(lambda seen: len(seen.bodies) == 14, patience_s)
        except AssertionError:
            raise AssertionError(f"the {spelling} form was ignored") from None


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    ("member", "spelling", "options"),
    [
        *((ours, spelling, {}) for spelling in SPELLINGS),
        *(
            faulty(KnowsTheMapOnly, f"the {spelling} form was ignored", spelling, {"patience_s": 0.5})
            for spelling in SPELLINGS[1:]
        ),
    ],
)
def test_every_spelling_of_a_reset_is_obeyed(embedded, names, member, spelling, options):
    """Brokers write a reset in the form of the language it was asked for in; all are understood.

    Faulty: Java ignores lists and pairs, Go and C++ end at some of the others.
    """
    every_spelling_is_obeyed(embedded, names, member, spelling, **options)


class EndsAtWhatItCannotRead(NaiveMember):
    """Go (lists) and C++ (pairs): the process ends."""

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        try:
            super().on_request(wire, request)
        except Exception:
            self.kill()


def what_cannot_be_read_moves_nothing(
    cluster: Any, names: Any, member: Kind, bodies: list[bytes], patience_s: float = WAIT_S
) -> None:
    topic, group = filled(cluster, names, queues=1, messages=5)
    broker = cluster.broker("broker-a")
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(5)
        for number, body in enumerate(bodies, 1):
            tell_in_these_words(broker, group, topic, body)
            until(
                lambda number=number: (
                    len(consumer.events.of("offset-reset")) == number
                    or (member is EndsAtWhatItCannotRead and consumer.closed.is_set())
                ),
                "it has been read",
            )
            fill(cluster, topic, 1, start=4 + number)
            try:
                consumer.seen.wait_for(5 + number, patience_s)
            except AssertionError:
                raise AssertionError(f"{body!r}, which cannot be read, ended the consumer") from None
            told = consumer.events.wait_for("offset-reset", number)
            assert "cannot be read, nothing moved" in told.text
        assert sorted(consumer.seen.bodies) == sorted(numbered(5 + len(bodies)))


UNREADABLE = [b"{", b'{"offsetTable":7}', b'{"offsetTable":[[1]]}', b"\xff\xfe"]


@pytest.mark.hazard("H30")
@pytest.mark.parametrize(
    ("member", "orders", "options"),
    [
        (ours, UNREADABLE, {}),
        faulty(EndsAtWhatItCannotRead, "ended the consumer", UNREADABLE[:1], {"patience_s": 0.5}),
    ],
)
def test_an_order_that_cannot_be_read_moves_nothing_and_is_told(embedded, names, member, orders, options):
    """What cannot be read moves nothing, ends nothing, and is told by an event.

    Faulty: Go ends at the list form, C++ at pairs.
    """
    what_cannot_be_read_moves_nothing(embedded, names, member, orders, **options)


@pytest.mark.hazard("H29", "H30")
def test_the_naive_member_is_right(embedded, names):
    """What the faulty ones are made of passes: it is the fault that the checks find."""
    a_reset_is_stored_before_it_is_pulled_from(embedded, names, NaiveMember)
    other_topics_go_on(embedded, names, NaiveMember)
    paused_stays_paused(embedded, names, NaiveMember)
    one_pull_loop_is_left(embedded, names, NaiveMember)
    for spelling in SPELLINGS:
        every_spelling_is_obeyed(embedded, names, NaiveMember, spelling)
