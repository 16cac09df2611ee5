"""H16–H21: brokers that say something else about offsets than before, or nothing: what is believed, and how soon."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from pyrocket_consumer import EventKind, Message, MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster, Exchange, Fault, answer, close_connection, drop, garbage
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode
from pyrocket_consumer.wire.frame import RemotingCommand
from tests.consuming import WAIT_S, numbered, until
from tests.hazards.members import Kind, committed_values, faulty, filled, give_time_to, of, ours, pulled_offsets
from tests.hazards.naive import NaiveMember, Window
from tests.real_brokers.remoting import Peer
from tests.resetting import fill, queue

PULL = RequestCode.PULL_MESSAGE


def moved(next_offset: int, low: int, high: int, remark: str) -> Fault:
    fields = {"nextBeginOffset": next_offset, "minOffset": low, "maxOffset": high, "suggestWhichBrokerId": 0}
    return answer(21, remark, {name: str(value) for name, value in fields.items()})


class ObeysAtOnce(NaiveMember):
    """Every client but ours: where the broker says, there it goes."""

    def on_offset_moved(self, window: Window, answer: RemotingCommand) -> None:
        self.on_correction(window, int(answer.fields["nextBeginOffset"]))


class SaysNothing(NaiveMember):
    """Follows a correction, and tells nobody but its log."""

    def tell(self, kind: EventKind, text: str, queue: MessageQueue | None = None, **facts: object) -> None:
        pass


# --- H16


def a_stored_offset_beyond_the_end_is_told(cluster: Any, names: Any, member: Kind, patience_s: float = WAIT_S) -> None:
    """The topic was made anew: the group stands at 500, and 20 messages are there."""
    topic, group = filled(cluster, names, queues=1, messages=20)
    cluster.broker("broker-a").commit(group, topic, {0: 500})
    with member(cluster, topic, group) as consumer:
        until(lambda: consumer.stored() == {queue(topic, 0): 20}, "the correction is stored")
        fill(cluster, topic, 3, start=20)
        consumer.seen.wait_for(3)
        assert sorted(consumer.seen.bodies) == numbered(3, 20)
        facts = consumer.events.wait_for("offset-corrected", timeout_s=patience_s).facts
        assert (facts["from"], facts["to"]) == (500, 20)


@pytest.mark.hazard("H16")
@pytest.mark.parametrize(
    ("member", "options"), [(ours, {}), faulty(SaysNothing, "no offset-corrected", {"patience_s": 0.2})]
)
def test_an_offset_beyond_the_end_of_the_queue_is_told(embedded, names, member, options):
    """An offset beyond the end is followed to the end, with the event `offset-corrected` that has both numbers; reset
    the group if it shall have all of a topic that was made anew. An offset that such a topic has overtaken cannot be
    told from a right one: delete a group's offsets with its topic.

    Faulty: all others move on without a word but in a log.
    """
    a_stored_offset_beyond_the_end_is_told(embedded, names, member, **options)


# --- H17 and H18


def a_correction_to_zero_repeats_nothing(cluster: Any, names: Any, member: Kind) -> None:
    """The group stands one beyond the end, as after a failover, and the broker says 0, as those up to 4.9.3 do."""
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker = cluster.broker("broker-a")
    broker.commit(group, topic, {0: 11})
    broker.on(PULL, moved(0, 0, 10, "OFFSET_OVERFLOW_BADLY"), times=None, when=of(topic, queueOffset=11))
    with member(cluster, topic, group) as consumer:
        offsets = until(lambda: [each for _, each in pulled_offsets(broker, topic) if each != 11], "it goes on")
        assert offsets[0] == 10, f"went on at {offsets[0]}: everything is consumed again"
        broker.clear_faults(PULL)
        fill(cluster, topic, 3, start=10)
        consumer.seen.wait_for(3)
        assert sorted(consumer.seen.bodies) == numbered(3, 10)


@pytest.mark.hazard("H17")
@pytest.mark.parametrize("member", [ours, faulty(ObeysAtOnce, "went on at 0: everything is consumed again")])
def test_a_correction_to_zero_is_not_obeyed_blindly(embedded, names, member):
    """A correction backwards is followed only after the broker was asked five times, a second apart, where the queue
    begins and ends; then it goes to the nearest offset there is, never to 0 because the broker said so.

    Faulty: Java, Go and C++ obey at once, and consume days of messages again.
    """
    a_correction_to_zero_repeats_nothing(embedded, names, member)


def a_broker_that_is_loading_repeats_nothing(cluster: Any, names: Any, member: Kind) -> None:
    """For its first seconds a broker says of a queue that it is empty: min = max = 0."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    long_ago_ms = int(time.time() * 1000) - 60_000
    cluster.send(topic, lambda number: b"m%d" % number, count=10, stored_at_ms=long_ago_ms)
    broker = cluster.broker("broker-a")
    broker.commit(group, topic, {0: 7})
    broker.on(PULL, moved(0, 0, 0, "NO_MESSAGE_IN_QUEUE"), when=of(topic))
    for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
        broker.on(code, answer(0, fields={"offset": "0"}), when=of(topic))
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(3)
        assert sorted(consumer.seen.bodies) == numbered(3, 7), "consumed again from the beginning"
        until(lambda: consumer.stored() == {queue(topic, 0): 10}, "committed")
        assert min(offset for _, offset in committed_values(broker, topic)) >= 7
        assert not consumer.events.of("offset-corrected")


@pytest.mark.hazard("H18")
@pytest.mark.parametrize("member", [ours, faulty(ObeysAtOnce, "consumed again from the beginning")])
def test_a_broker_that_is_loading_is_waited_for(embedded, names, member):
    """A broker that was just started and says that a queue is empty is asked again, for up to five seconds; its queue
    goes on where it was, and nothing before is consumed again.

    Faulty: all others begin at 0.
    """
    a_broker_that_is_loading_repeats_nothing(embedded, names, member)


@pytest.mark.hazard("H18")
@pytest.mark.versions("4.9.7", "5.5.0")  # the others take as long, and say the same
def test_a_broker_that_was_killed_and_comes_back(cluster, names):
    """A member that pulls while its broker comes back from a kill consumes nothing again, and commits again what the
    broker has forgotten."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=2)
    with ours(cluster, topic, group) as consumer:
        fill(cluster, topic, 20)
        consumer.seen.wait_for(20)
        until(lambda: consumer.stored() == {queue(topic, 0): 10, queue(topic, 1): 10}, "committed")
        cluster.broker("broker-a").kill()
        cluster.broker("broker-a").start()
        fill(cluster, topic, 4, start=20)
        consumer.seen.wait_for(24, 90)
        until(lambda: consumer.stored() == {queue(topic, 0): 12, queue(topic, 1): 12}, "committed again", 60)
        assert Counter(consumer.seen.bodies) == Counter(numbered(24))
        assert not consumer.events.of("offset-corrected")


# --- H19


def reset_at_broker(cluster: Any, group: str, topic: str) -> None:
    """Have the broker tell the members to go back to the first message."""
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        fields = {"topic": topic, "group": group, "timestamp": 0, "isForce": True}
        peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)


class BeginsAgainAfterFailover(NaiveMember):
    """Gives its queues up when a broker goes, and takes them on again where the next one says."""

    def pull(self, window: Window) -> RemotingCommand:
        try:
            return super().pull(window)
        except OSError:
            with self.lock:
                window.dropped = True
                for table in (self.offsets, self.committed, self.windows):
                    table.pop(window.queue, None)
            self._rebalance_due.set()
            raise


def the_offset_survives_a_failover(member: Kind, names: Any) -> None:
    """The slave that takes over has an older offset: it copies those of the master every 10 s only."""
    topic, group = names.topic(), names.group()
    with EmbeddedCluster(slaves=1, slave_sync_s=3600, long_poll_tick_s=0.1) as cluster:
        cluster.create_topic(topic, queues=1)
        with member(cluster, topic, group) as consumer:
            fill(cluster, topic, 20)
            consumer.seen.wait_for(20)
            until(lambda: consumer.stored() == {queue(topic, 0): 20}, "committed")
            old, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
            slave.commit(group, topic, {0: 5})
            old.kill()
            assert cluster.switch_master("broker-a") is slave
            fill(cluster, topic, 3, start=20)
            consumer.seen.wait_for(23)
            again = len(consumer.seen.bodies) - 23
            assert not again, f"{again} messages were consumed again"
            until(lambda: slave.committed(group, topic) == {0: 23}, "committed at the new master")


@pytest.mark.hazard("H19")
@pytest.mark.parametrize("member", [ours, faulty(BeginsAgainAfterFailover, "messages were consumed again")])
def test_a_member_that_holds_a_queue_keeps_its_place_over_a_failover(names, member):
    """While a queue is held its offset is ours: a new master with an older one is not asked, and gets ours.

    Faulty: clients that take their queues on again, at what the new master says.
    """
    the_offset_survives_a_failover(member, names)


def an_idle_queue_is_committed_at_the_new_master(names: Any) -> None:
    topic, group = names.topic(), names.group()
    with EmbeddedCluster(slaves=1, slave_sync_s=3600, long_poll_tick_s=0.1) as cluster:
        cluster.create_topic(topic, queues=1)
        with ours(cluster, topic, group) as consumer:
            fill(cluster, topic, 20)
            consumer.seen.wait_for(20)
            until(lambda: consumer.stored() == {queue(topic, 0): 20}, "committed")
            slave = cluster.broker("broker-a-1")
            slave.commit(group, topic, {0: 5})
            cluster.broker("broker-a").kill()
            cluster.switch_master("broker-a")
            until(lambda: slave.committed(group, topic) == {0: 20}, "committed at the new master, without a message")


@pytest.mark.hazard("H19")
def test_what_the_old_master_acknowledged_is_committed_at_the_new_one(names):
    """A broker name with a new master gets every offset again, also those of queues where nothing happens: the next
    owner shall find them there."""
    an_idle_queue_is_committed_at_the_new_master(names)


def messages_lost_in_a_failover_are_told(member: Kind, names: Any, patience_s: float = WAIT_S) -> None:
    topic, group = names.topic(), names.group()
    with EmbeddedCluster(slaves=1, long_poll_tick_s=0.1) as cluster:
        cluster.create_topic(topic, queues=1)
        with member(cluster, topic, group) as consumer:
            fill(cluster, topic, 15)
            consumer.seen.wait_for(15)
            slave = cluster.broker("broker-a-1")
            slave.pause_replication()
            fill(cluster, topic, 5, start=15)
            consumer.seen.wait_for(20)
            cluster.broker("broker-a").kill()
            cluster.switch_master("broker-a")
            until(lambda: slave.committed(group, topic) == {0: 15}, "the correction is stored")
            fill(cluster, topic, 3, start=20)
            consumer.seen.wait_for(23)
            facts = consumer.events.wait_for("offset-corrected", timeout_s=patience_s).facts
            assert (facts["from"], facts["to"]) == (20, 15)
            assert Counter(consumer.seen.bodies) == Counter(numbered(23))


@pytest.mark.hazard("H19")
@pytest.mark.parametrize(
    ("member", "options"), [(ours, {}), faulty(SaysNothing, "no offset-corrected", {"patience_s": 0.2})]
)
def test_a_new_master_that_has_lost_messages_is_followed_and_told(names, member, options):
    """When the new master's queue ends before our offset, the consumer goes on at that end, with an event."""
    messages_lost_in_a_failover_are_told(member, names, **options)


class BelievesTheBroker(NaiveMember):
    """Goes on where the broker says, also where it has acknowledged more."""


class BelievesItself(NaiveMember):
    """Goes on where it was when it last had the queue, whatever has become of the offset since."""

    def start_offset(self, queue: MessageQueue) -> int:
        places = [message.queue_offset for message in self.seen.messages if message.queue == queue]
        return max(places) + 1 if places else super().start_offset(queue)


def given_up_and_taken_back(
    cluster: Any, names: Any, member: Kind, *, was_away: bool, to: int = 5, told: bool = False
) -> Counter[int]:
    """A queue is given up at 20, its offset at the broker becomes 5, and it is taken back: how often is each seen?

    `told`: the members are told of a reset to 0, which the one that holds the queue meanwhile follows.
    """
    topic, group = filled(cluster, names, queues=1, messages=20)
    other, _ = filled(cluster, names, queues=1, messages=0)
    broker, place = cluster.broker("broker-a"), queue(topic, 0)
    with member(cluster, topic, group) as consumer:
        consumer.seen.wait_for(20)
        until(lambda: consumer.stored() == {place: 20}, "committed")
        consumer.subscribe(other, consumer.seen)  # so that it stays in touch with the broker
        until(lambda: queue(other, 0) in consumer.held(), "both held")
        consumer.unsubscribe(topic)
        until(lambda: place not in consumer.held(), "given up")
        if was_away:
            broker.close_connections()
            until(lambda: cluster.members(group), "the member is known again")
        if told:
            reset_at_broker(cluster, group, topic)
        broker.commit(group, topic, {0: to})
        consumer.subscribe(topic, consumer.seen)
        fill(cluster, topic, 3, start=20)
        consumer.seen.wait_for(23)
        until(lambda: consumer.stored()[place] == 23, "everything is committed")
        went_back = [dict(event.facts) for event in consumer.events.of("offset-went-back")]
        assert member is not ours or went_back == ([] if told else [{"stored": to, "known": 20}])
        return Counter(message.queue_offset for message in consumer.seen.messages)


def a_lost_offset_is_known_here(cluster: Any, names: Any, member: Kind) -> None:
    seen = given_up_and_taken_back(cluster, names, member, was_away=True)
    assert not (again := sum(seen.values()) - 23), f"{again} messages were consumed again"


def an_offset_that_somebody_has_set_counts(cluster: Any, names: Any, member: Kind) -> None:
    seen = given_up_and_taken_back(cluster, names, member, was_away=False)
    assert [seen[offset] for offset in (4, 5, 19, 20)] == [1, 2, 2, 1], "where the group was set to is passed over"


def a_reset_counts_though_the_broker_was_away(names: Any, member: Kind) -> None:
    with EmbeddedCluster(server_side_reset=False, long_poll_tick_s=0.1) as cluster:
        seen = given_up_and_taken_back(cluster, names, member, was_away=True, to=0, told=True)
    assert [seen[offset] for offset in (0, 19, 20)] == [2, 2, 1], "the reset is passed over"


@pytest.mark.hazard("H19")
@pytest.mark.parametrize("member", [ours, faulty(BelievesTheBroker, "15 messages were consumed again")])
def test_an_acknowledged_offset_that_the_broker_has_lost_is_known_here(embedded, names, member):
    """A queue that comes back with an older offset than its broker had acknowledged goes on where it was, if the
    connection to the broker ended within 30 s of that acknowledgement: the broker may not have written it. The event
    `offset-went-back` has both numbers.

    Faulty: clients that begin where the broker says.
    """
    a_lost_offset_is_known_here(embedded, names, member)


@pytest.mark.hazard("H19")
@pytest.mark.parametrize(
    "member", [ours, BelievesTheBroker, faulty(BelievesItself, "where the group was set to is passed over")]
)
def test_an_offset_that_went_back_though_the_broker_was_there_is_followed(embedded, names, member):
    """Where nothing explains an older offset somebody has set it: it is followed, with the same event.

    Faulty: clients that go on from what they once knew.
    """
    an_offset_that_somebody_has_set_counts(embedded, names, member)


@pytest.mark.hazard("H19")
@pytest.mark.parametrize("member", [ours, faulty(BelievesItself, "the reset is passed over")])
def test_a_reset_heard_of_while_the_queue_is_not_held_counts_though_the_broker_was_away(names, member):
    """A reset that a member hears of while it does not hold the queue makes it forget what it knew.

    Faulty: clients that go on from what they once knew.
    """
    a_reset_counts_though_the_broker_was_away(names, member)


# --- H20


class StaysAtTheSlave(NaiveMember):
    """Takes a suggested broker from answers with messages only."""

    def on_pull_answer(self, window: Window, answer: RemotingCommand) -> None:
        before = window.pull_from
        super().on_pull_answer(window, answer)
        if answer.code != ResponseCode.SUCCESS:
            window.pull_from = before


class CommitsToAnybody(NaiveMember):
    """Commits to whatever broker of the name is there."""

    def commit(self, queue: MessageQueue, offset: int) -> None:
        try:
            super().commit(queue, offset)
        except OSError:
            fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
            self.call(self.master(queue, 1), RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": offset})


def not_here(exchange: Exchange) -> None:
    """What a slave answers where it has no message (any more): stay where you are, and ask the master."""
    offset = exchange.request.fields["queueOffset"]
    fields = {"nextBeginOffset": offset, "minOffset": "0", "maxOffset": "0", "suggestWhichBrokerId": "0"}
    exchange.answer(exchange.request.answer(20, "OFFSET_TOO_SMALL", fields))


def a_slave_that_says_so_is_left(member: Kind, names: Any, patience_s: float = WAIT_S) -> None:
    topic, group = names.topic(), names.group()
    with EmbeddedCluster(slaves=1, long_poll_tick_s=0.1) as cluster:
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        cluster.create_topic(topic, queues=1)
        with member(cluster, topic, group) as consumer:
            slave.on(PULL, not_here, times=None)
            master.suggest_broker(1)
            fill(cluster, topic, 1)
            consumer.seen.wait_for(1)
            slave.wait_for(PULL, when=of(topic, queueOffset=1))
            fill(cluster, topic, 1, start=1)
            try:
                master.wait_for(PULL, timeout_s=patience_s, when=of(topic, queueOffset=1))
            except TimeoutError:
                raise AssertionError(f"{len(slave.requests(PULL))} pulls at the slave, none at the master") from None
            consumer.seen.wait_for(2)


@pytest.mark.hazard("H20")
@pytest.mark.parametrize(
    ("member", "options"),
    [(ours, {}), faulty(StaysAtTheSlave, "pulls at the slave, none at the master", {"patience_s": 1})],
)
def test_a_slave_that_names_its_master_is_left(names, member, options):
    """The broker an answer suggests is asked next, whatever the answer is: also when a slave, which corrects no offset,
    sends us back to its master.

    Faulty: Go up to 2.1.0 followed the suggestion of answers with messages only.
    """
    a_slave_that_says_so_is_left(member, names, **options)


def nothing_is_committed_to_a_slave(member: Kind, names: Any) -> None:
    topic, group, gate = names.topic(), names.group(), threading.Event()
    with EmbeddedCluster(slaves=1, slave_sync_s=3600, long_poll_tick_s=0.1) as cluster:
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        cluster.create_topic(topic, queues=1)
        fill(cluster, topic, 10)

        def listener(message: Message) -> None:
            gate.wait(30)

        with member(cluster, topic, group, listener) as consumer:
            consumer.seen.wait_for(10)
            master.kill()
            gate.set()
            until(lambda: set(consumer.held().values()) == {10}, "all are consumed")
            give_time_to(lambda: slave.requests(RequestCode.UPDATE_CONSUMER_OFFSET), member)
            lost = slave.requests(RequestCode.UPDATE_CONSUMER_OFFSET)
            assert not lost, f"{lost[0].command.fields['commitOffset']} was committed to a slave"
            master.start()
            until(lambda: master.committed(group, topic) == {0: 10}, "committed when the master is back")


@pytest.mark.hazard("H20")
@pytest.mark.parametrize("member", [ours, faulty(CommitsToAnybody, "10 was committed to a slave")])
def test_commits_wait_for_the_master(names, member):
    """Offsets are committed to a master only, and kept until there is one: what a slave is told, its master overwrites.

    Faulty: Java commits to any replica while the master is unknown, C++ to the lowest broker id there is.
    """
    nothing_is_committed_to_a_slave(member, names)


# --- H21


class TakesErrorsForNone(NaiveMember):
    """Java up to 4.9 (answers with an error), C++ (silence, too): whatever goes wrong means "no offset"."""

    def read_stored(self, queue: MessageQueue) -> int | None:
        try:
            return super().read_stored(queue)
        except (OSError, ValueError, KeyError):
            return None


TROUBLE = {
    "system error": answer(1, "boom"),
    "busy": answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
    "message illegal": answer(13, "no"),
    "no answer": drop,
    "connection closed": close_connection,
    "no offset in the answer": answer(0),
    "garbage": garbage(b"\0" * 40),
}


def an_error_is_not_no_offset(cluster: Any, names: Any, member: Kind, what: str, stored: int | None) -> None:
    topic, group = filled(cluster, names, queues=1, messages=10)
    broker = cluster.broker("broker-a")
    if stored is not None:
        broker.commit(group, topic, {0: stored})
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, TROUBLE[what], times=2, when=of(topic))
    options: dict[str, Any] = {"consume_from": "last", "rebalance_interval_s": 0.1}
    if TROUBLE[what] is drop:
        options["call_timeout_s"] = 1.0  # only silence is to run into it
    with member(cluster, topic, group, **options) as consumer:
        broker.wait_for(PULL, timeout_s=WAIT_S, when=of(topic))
        fill(cluster, topic, 1, start=10)
        consumer.seen.wait(lambda seen: b"m10" in seen.bodies)
        asked = broker.requests(RequestCode.QUERY_CONSUMER_OFFSET)
        times = len([each for each in asked if each.command.fields["topic"] == topic])
        assert times == 3 or (TROUBLE[what] is drop and times > 3)  # on a busy machine an answer may be late, too
        first = 10 if stored is None else stored
        started = pulled_offsets(broker, topic)[0][1]
        assert started == first, f"began at {started} after {what}, {stored} was stored"
        until(lambda: consumer.stored() == {queue(topic, 0): 11}, "committed")
        assert min(offset for _, offset in committed_values(broker, topic)) >= first


@pytest.mark.hazard("H21")
@pytest.mark.parametrize("what", TROUBLE)
@pytest.mark.parametrize("member", [ours, faulty(TakesErrorsForNone)])
def test_trouble_with_the_stored_offset_is_not_taken_for_none(embedded, names, what, member):
    """A queue is pulled when its stored offset is known. Errors, silence and nonsense are asked again; only the
    broker's "not found" has `consume_from` decide.

    Faulty: Java up to 4.9 for answers with an error, C++ for everything.
    """
    an_error_is_not_no_offset(embedded, names, member, what, 7)


@pytest.mark.hazard("H21")
def test_not_found_after_trouble_is_none(embedded, names):
    """When the broker finally says that there is none, the rule for new groups applies."""
    an_error_is_not_no_offset(embedded, names, ours, "system error", None)


@pytest.mark.hazard("H16", "H21")
def test_the_naive_member_is_right(embedded, names):
    """What the faulty ones are made of passes: it is the fault that the checks find."""
    a_stored_offset_beyond_the_end_is_told(embedded, names, NaiveMember)
    the_offset_survives_a_failover(NaiveMember, names)
    messages_lost_in_a_failover_are_told(NaiveMember, names)
    a_slave_that_says_so_is_left(NaiveMember, names)
    nothing_is_committed_to_a_slave(NaiveMember, names)
    for what in ("system error", "no answer", "connection closed"):
        an_error_is_not_no_offset(embedded, names, NaiveMember, what, 7)
