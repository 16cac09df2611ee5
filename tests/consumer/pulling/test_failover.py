"""H19, H20: masters that go, slaves that take over or are read from, and offsets that went back meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from pyrocket_consumer import Message, MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedBroker, Exchange, Gate
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, of, ours_and
from tests.consuming import RecordingListener, numbered, until
from tests.hazards.members import faulty, give_time_to, ours, settle
from tests.hazards.naive import NaiveMember, Window
from tests.real_brokers.remoting import Peer
from tests.resets import queue

CLUSTER = {"slaves": 1, "slave_sync_s": 3600, "server_side_reset": False}
PULL = RequestCode.PULL_MESSAGE


@pytest.fixture
def slave(embedded):
    return embedded.broker("broker-a-1")


def caught_up(orders: Orders, consumer: Any, count: int = 20) -> None:
    orders.fill(count)
    consumer.seen.wait_for(count)
    until(lambda: consumer.stored() == {QUEUE: count}, "committed")


# --- the slave becomes the master


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


@pytest.mark.hazard("H19")
@ours_and(NaiveMember, faulty(BeginsAgainAfterFailover, "messages were consumed again"))
def test_who_holds_a_queue_keeps_its_place_over_a_failover(embedded, broker, slave, member):
    """While a queue is held its offset is ours: a new master with an older one is not asked, and gets ours.

    Faulty: clients that take their queues on again, at what the new master says.
    """
    orders = Orders(embedded)
    with member(embedded, TOPIC, GROUP) as consumer:
        caught_up(orders, consumer)
        slave.commit(GROUP, TOPIC, {0: 5})
        broker.kill()
        assert embedded.switch_master("broker-a") is slave
        orders.fill(3, 20)
        consumer.seen.wait_for(23)
        again = len(consumer.seen.bodies) - 23
        assert not again, f"{again} messages were consumed again"
        until(lambda: slave.committed(GROUP, TOPIC) == {0: 23}, "committed at the new master")


@pytest.mark.hazard("H19")
def test_what_the_old_master_acknowledged_the_new_one_gets(embedded, broker, slave):
    """A broker name with a new master gets every offset again, also those of queues where nothing happens: the next
    owner shall find them there."""
    with ours(embedded, TOPIC, GROUP) as consumer:
        caught_up(Orders(embedded), consumer)
        slave.commit(GROUP, TOPIC, {0: 5})
        broker.kill()
        embedded.switch_master("broker-a")
        until(lambda: slave.committed(GROUP, TOPIC) == {0: 20}, "committed at the new master, without a message")


class TellsNobody(NaiveMember):
    def emit(self, *about: object, **facts: object) -> None:
        pass


@pytest.mark.hazard("H19")
@ours_and(NaiveMember, faulty(TellsNobody, "no offset-corrected"))
def test_a_new_master_that_has_lost_messages_is_followed(embedded, broker, slave, member):
    """When the new master's queue ends before our offset, the consumer goes on at that end, with an event."""
    orders = Orders(embedded)
    with member(embedded, TOPIC, GROUP) as consumer:
        caught_up(orders, consumer, 15)
        slave.pause_replication()
        orders.fill(5, 15)
        consumer.seen.wait_for(20)
        broker.kill()
        embedded.switch_master("broker-a")
        until(lambda: slave.committed(GROUP, TOPIC) == {0: 15}, "the correction is stored")
        orders.fill(3, 20)
        consumer.seen.wait_for(23)
        facts = consumer.events.wait_for("offset-corrected").facts
        assert (facts["from"], facts["to"]) == (20, 15)
        assert Counter(consumer.seen.bodies) == Counter(numbered(23))


# --- an offset that went back while the queue was not held


class BelievesTheBroker(NaiveMember):
    """Goes on where the broker says, also where it has acknowledged more."""


class BelievesItself(NaiveMember):
    """Goes on where it was when it last had the queue, whatever has become of the offset since."""

    def start_offset(self, queue: MessageQueue) -> int:
        places = [message.queue_offset for message in self.seen.messages if message.queue == queue]
        return max(places) + 1 if places else super().start_offset(queue)


def go_away(broker: EmbeddedBroker) -> None:
    """Close the connections of a broker, and wait until its members are known again."""
    heartbeats = len(broker.requests(RequestCode.HEART_BEAT))
    broker.close_connections()
    until(lambda: len(broker.requests(RequestCode.HEART_BEAT)) > heartbeats, "another heartbeat")
    until(lambda: broker.cluster.members(GROUP), "the member is known again")


def reset_at(broker: EmbeddedBroker) -> None:
    """Have the broker tell the members to go back to the first message."""
    with closing(Peer(broker.address)) as peer:
        fields = {"topic": TOPIC, "group": GROUP, "timestamp": 0, "isForce": True}
        peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)


def given_up_and_taken_back(
    cluster: Any, member: Any, *, was_away: bool, to: int = 5, is_reset: bool = False
) -> list[int]:
    """A queue is given up at 20, its offset at the broker becomes 5, and it is taken back: how often is each seen?

    `is_reset`: the members are told of a reset to 0, which the one that holds the queue meanwhile follows.
    """
    orders = Orders(cluster)
    broker, other = orders.broker, queue(orders.make(1, "other"), 0)
    with member(cluster, TOPIC, GROUP) as consumer:
        caught_up(orders, consumer)
        consumer.subscribe("other", consumer.seen)  # so that it stays in touch with the broker
        until(lambda: other in consumer.held(), "both held")
        consumer.unsubscribe(TOPIC)
        until(lambda: QUEUE not in consumer.held(), "given up")
        if was_away:
            go_away(broker)
        if is_reset:
            reset_at(broker)
        broker.commit(GROUP, TOPIC, {0: to})
        consumer.subscribe(TOPIC, consumer.seen)
        orders.fill(3, 20)
        consumer.seen.wait_for(23)
        until(lambda: consumer.stored()[QUEUE] == 23, "everything is committed")
        went_back = [(event.queue, dict(event.facts)) for event in consumer.events.of("offset-went-back")]
        assert member is not ours or went_back == ([] if is_reset else [(QUEUE, {"stored": to, "known": 20})])
        times = Counter(message.queue_offset for message in consumer.seen.messages)
    return [times[offset] for offset in range(23)]


@pytest.mark.hazard("H19")
@ours_and(faulty(BelievesTheBroker, "15 messages were consumed again"))
def test_an_acknowledged_offset_that_the_broker_lost_is_known(embedded, member):
    """A queue that comes back with an older offset than its broker had acknowledged goes on where it was, if the
    connection to the broker ended within 30 s of that acknowledgement: the broker may not have written it. The event
    `offset-went-back` has both numbers.

    Faulty: clients that begin where the broker says.
    """
    times = given_up_and_taken_back(embedded, member, was_away=True)
    assert not (again := sum(times) - 23), f"{again} messages were consumed again"


@pytest.mark.hazard("H19")
@ours_and(BelievesTheBroker, faulty(BelievesItself, "where the group was set to is passed over"))
def test_an_offset_that_went_back_without_a_reason_is_followed(embedded, member):
    """Where nothing explains an older offset somebody has set it: it is followed, with the same event.

    Faulty: clients that go on from what they once knew.
    """
    times = given_up_and_taken_back(embedded, member, was_away=False)
    assert times == 5 * [1] + 15 * [2] + 3 * [1], "where the group was set to is passed over"


@pytest.mark.hazard("H19")
@ours_and(faulty(BelievesItself, "the reset is passed over"))
def test_a_reset_heard_of_while_the_queue_is_not_held_counts(embedded, member):
    """A reset that a member hears of while it does not hold the queue makes it forget what it knew, also if the broker
    was away.

    Faulty: clients that go on from what they once knew.
    """
    times = given_up_and_taken_back(embedded, member, was_away=True, to=0, is_reset=True)
    assert times == 20 * [2] + 3 * [1], "the reset is passed over"


def test_a_reset_heard_of_before_the_route_is_known_counts(embedded, broker):
    """The topic is subscribed to again, and the name server has not answered yet."""
    orders, gate = Orders(embedded), Gate()
    with orders.consuming() as (consumer, seen):
        orders.fill(20)
        seen.wait_for(20)
        orders.wait_committed(20)
        consumer.subscribe(orders.make(1, "other"), seen)
        consumer.unsubscribe(TOPIC)
        until(lambda: QUEUE not in consumer.progress(), "given up")
        go_away(broker)
        (name_server,) = embedded.name_server_nodes
        name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, gate, times=None, when=of())
        subscribing = threading.Thread(target=consumer.subscribe, args=(TOPIC, seen))
        subscribing.start()
        gate.wait_held()
        reset_at(broker)
        broker.commit(GROUP, TOPIC, {0: 0})
        settle()
        gate.open()
        subscribing.join()
        seen.wait(lambda seen: len(seen.messages) == 40)
    assert not orders.events.of("offset-went-back")


# --- slaves that are read from


class StaysAtTheSlave(NaiveMember):
    """Takes a suggested broker from answers with messages only."""

    def on_pull_response(self, window: Window, answer: RemotingCommand) -> None:
        before = window.pull_from
        super().on_pull_response(window, answer)
        if answer.code != ResponseCode.SUCCESS:
            window.pull_from = before


def not_here(exchange: Exchange) -> None:
    """What a slave answers where it has no message (any more): stay where you are, and ask the master."""
    offset = exchange.request.fields["queueOffset"]
    fields = {"nextBeginOffset": offset, "minOffset": "0", "maxOffset": "0", "suggestWhichBrokerId": "0"}
    exchange.answer(exchange.request.make_response(20, "OFFSET_TOO_SMALL", fields))


@pytest.mark.hazard("H20")
@ours_and(NaiveMember, faulty(StaysAtTheSlave, "pulls at the slave, none at the master"))
def test_a_slave_that_names_its_master_is_left(embedded, broker, slave, member):
    """The broker an answer suggests is asked next, whatever the answer is: also when a slave, which corrects no offset,
    sends us back to its master.

    Faulty: Go up to 2.1.0 followed the suggestion of answers with messages only.
    """
    orders = Orders(embedded)
    with member(embedded, TOPIC, GROUP) as consumer:
        slave.on(PULL, not_here, times=None)
        broker.suggest_broker(1)
        orders.fill(1)
        consumer.seen.wait_for(1)
        slave.wait_for(PULL, when=of(queueOffset=1))
        orders.fill(1, 1)
        try:
            broker.wait_for(PULL, timeout_s=1, when=of(queueOffset=1))
        except TimeoutError:
            raise AssertionError(f"{len(slave.requests(PULL))} pulls at the slave, none at the master") from None
        consumer.seen.wait_for(2)


class CommitsToAnybody(NaiveMember):
    """Commits to whatever broker of the name is there."""

    def commit(self, queue: MessageQueue, offset: int) -> None:
        try:
            super().commit(queue, offset)
        except OSError:
            fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
            self.call(self.master(queue, 1), RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": offset})


@pytest.mark.hazard("H20")
@ours_and(NaiveMember, faulty(CommitsToAnybody, "10 was committed to a slave"))
def test_commits_wait_for_the_master(embedded, broker, slave, member):
    """Offsets are committed to a master only, and kept until there is one: what a slave is told, its master overwrites.

    Faulty: Java commits to any replica while the master is unknown, C++ to the lowest broker id there is.
    """
    gate = threading.Event()
    Orders(embedded, messages=10)

    def judge(message: Message) -> None:
        gate.wait(30)

    with member(embedded, TOPIC, GROUP, RecordingListener(judge)) as consumer:
        consumer.seen.wait_for(10)
        broker.kill()
        gate.set()
        until(lambda: set(consumer.held().values()) == {10}, "all are consumed")
        give_time_to(lambda: slave.requests(RequestCode.UPDATE_CONSUMER_OFFSET), member)
        lost = slave.requests(RequestCode.UPDATE_CONSUMER_OFFSET)
        assert not lost, f"{lost[0].command.fields['commitOffset']} was committed to a slave"
        broker.start()
        until(lambda: broker.committed(GROUP, TOPIC) == {0: 10}, "committed when the master is back")
