"""H19, H20: masters that stop, slaves that take over or serve pulls, and offsets that become lower meanwhile."""

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
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, ours_and, request_matcher
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
    """Gives up its queues when a broker stops, and begins them again at the offsets of the new master."""

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
def test_a_held_queue_keeps_its_offset_over_a_failover(embedded, broker, slave, member):
    """While a member holds a queue, its offset counts. A new master with a lower offset gets the member's offset.

    Faulty: clients that begin their queues again at the new master's offsets.
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
def test_a_new_master_gets_the_offsets_that_the_old_one_acknowledged(embedded, broker, slave):
    """The consumer commits every offset again to a new master, also those of idle queues. So the next owner reads them
    there."""
    with ours(embedded, TOPIC, GROUP) as consumer:
        caught_up(Orders(embedded), consumer)
        slave.commit(GROUP, TOPIC, {0: 5})
        broker.kill()
        embedded.switch_master("broker-a")
        until(lambda: slave.committed(GROUP, TOPIC) == {0: 20}, "committed at the new master, without a message")


class EmitsNothing(NaiveMember):
    def emit(self, *about: object, **facts: object) -> None:
        pass


@pytest.mark.hazard("H19")
@ours_and(NaiveMember, faulty(EmitsNothing, "no offset-corrected"))
def test_a_new_master_that_has_lost_messages_is_followed(embedded, broker, slave, member):
    """If the new master's queue ends before the consumer's offset, the consumer continues at that end, with an
    event."""
    orders = Orders(embedded)
    with member(embedded, TOPIC, GROUP) as consumer:
        caught_up(orders, consumer, 15)
        until(lambda: slave.max_offset(TOPIC, 0) == 15, "the slave has them")
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


# --- an offset that became lower while the queue was not held


class BelievesTheBroker(NaiveMember):
    """Continues at the broker's offset, although the broker has acknowledged a higher one."""


class BelievesItself(NaiveMember):
    """Continues at its own last offset of the queue, whatever the broker has now."""

    def start_offset(self, queue: MessageQueue) -> int:
        consumed_offsets = [message.queue_offset for message in self.seen.messages if message.queue == queue]
        return max(consumed_offsets) + 1 if consumed_offsets else super().start_offset(queue)


def drop_connections(broker: EmbeddedBroker) -> None:
    """Close the connections of a broker, and wait until its members are registered again."""
    heartbeats = len(broker.requests(RequestCode.HEART_BEAT))
    broker.close_connections()
    until(lambda: len(broker.requests(RequestCode.HEART_BEAT)) > heartbeats, "another heartbeat")
    until(lambda: broker.cluster.members(GROUP), "the member is registered again")


def reset_at(broker: EmbeddedBroker) -> None:
    """Have the broker reset the members to the first message."""
    with closing(Peer(broker.address)) as peer:
        fields = {"topic": TOPIC, "group": GROUP, "timestamp": 0, "isForce": True}
        peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)


def given_up_and_assigned_again(
    cluster: Any, member: Any, *, was_away: bool, to: int = 5, is_reset: bool = False
) -> list[int]:
    """Give up a queue at 20, set its offset at the broker to 5, assign it again; return how often each message is seen.

    With `is_reset`, the members get a reset to 0, and the member that holds the queue meanwhile follows it.
    """
    orders = Orders(cluster)
    broker, other = orders.broker, queue(orders.make(1, "other"), 0)
    with member(cluster, TOPIC, GROUP) as consumer:
        caught_up(orders, consumer)
        consumer.subscribe("other", consumer.seen)  # so that it stays connected to the broker
        until(lambda: other in consumer.held(), "both held")
        consumer.unsubscribe(TOPIC)
        until(lambda: QUEUE not in consumer.held(), "given up")
        if was_away:
            drop_connections(broker)
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
def test_an_acknowledged_offset_survives_its_loss_at_the_broker(embedded, member):
    """A queue is assigned again, and the broker has a lower offset than it had acknowledged. If the connection ended
    within 30 s of the acknowledgement, the broker may not have written the offset. The queue then continues at the
    acknowledged offset. The event `offset-went-back` has both offsets.

    Faulty: clients that begin at the broker's offset.
    """
    times = given_up_and_assigned_again(embedded, member, was_away=True)
    assert not (again := sum(times) - 23), f"{again} messages were consumed again"


@pytest.mark.hazard("H19")
@ours_and(BelievesTheBroker, faulty(BelievesItself, "the new offset of the group is ignored"))
def test_a_lower_offset_without_a_lost_connection_is_followed(embedded, member):
    """If no lost connection explains a lower offset, a client has set it. The queue continues at it, with the same
    event.

    Faulty: clients that continue at the offset that they knew last.
    """
    times = given_up_and_assigned_again(embedded, member, was_away=False)
    assert times == 5 * [1] + 15 * [2] + 3 * [1], "the new offset of the group is ignored"


@pytest.mark.hazard("H19")
@ours_and(faulty(BelievesItself, "the reset is ignored"))
def test_a_reset_of_a_queue_that_is_not_held_counts(embedded, member):
    """A member that gets a reset of a queue that it does not hold forgets its last offset, also if the broker was down.

    Faulty: clients that continue at the offset that they knew last.
    """
    times = given_up_and_assigned_again(embedded, member, was_away=True, to=0, is_reset=True)
    assert times == 20 * [2] + 3 * [1], "the reset is ignored"


def test_a_reset_before_the_route_is_known_counts(embedded, broker):
    """The topic is subscribed to again, and the name server has not responded yet."""
    orders, gate = Orders(embedded), Gate()
    with orders.consuming() as (consumer, seen):
        orders.fill(20)
        seen.wait_for(20)
        orders.wait_committed(20)
        consumer.subscribe(orders.make(1, "other"), seen)
        consumer.unsubscribe(TOPIC)
        until(lambda: QUEUE not in consumer.progress(), "given up")
        drop_connections(broker)
        (name_server,) = embedded.name_server_nodes
        name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, gate, times=None, when=request_matcher())
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


# --- pulls from slaves


class StaysAtTheSlave(NaiveMember):
    """Follows the suggested broker only of responses with messages."""

    def on_pull_response(self, window: Window, answer: RemotingCommand) -> None:
        before = window.pull_from
        super().on_pull_response(window, answer)
        if answer.code != ResponseCode.SUCCESS:
            window.pull_from = before


def not_here(exchange: Exchange) -> None:
    """The response of a slave that has no message at the offset: keep the offset, and pull from the master."""
    offset = exchange.request.fields["queueOffset"]
    fields = {"nextBeginOffset": offset, "minOffset": "0", "maxOffset": "0", "suggestWhichBrokerId": "0"}
    exchange.answer(exchange.request.make_response(20, "OFFSET_TOO_SMALL", fields))


@pytest.mark.hazard("H20")
@ours_and(NaiveMember, faulty(StaysAtTheSlave, "pulls at the slave, none at the master"))
def test_a_slave_that_names_its_master_is_left(embedded, broker, slave, member):
    """The next pull goes to the broker that a response suggests, whatever the response is. A slave that has no message
    at the offset suggests its master, because slaves correct no offset.

    Faulty: Go up to 2.1.0 followed only the suggestions of responses with messages.
    """
    orders = Orders(embedded)
    with member(embedded, TOPIC, GROUP) as consumer:
        slave.on(PULL, not_here, times=None)
        broker.suggest_broker(1)
        orders.fill(1)
        consumer.seen.wait_for(1)
        slave.wait_for(PULL, when=request_matcher(queueOffset=1))
        orders.fill(1, 1)
        try:
            broker.wait_for(PULL, timeout_s=1, when=request_matcher(queueOffset=1))
        except TimeoutError:
            raise AssertionError(f"{len(slave.requests(PULL))} pulls at the slave, none at the master") from None
        consumer.seen.wait_for(2)


class CommitsToAnybody(NaiveMember):
    """Commits to any reachable broker of the name."""

    def commit(self, queue: MessageQueue, offset: int) -> None:
        try:
            super().commit(queue, offset)
        except OSError:
            fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
            self.call(self.master(queue, 1), RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": offset})


@pytest.mark.hazard("H20")
@ours_and(NaiveMember, faulty(CommitsToAnybody, "10 was committed to a slave"))
def test_commits_wait_for_the_master(embedded, broker, slave, member):
    """The consumer commits offsets only to a master, and waits until there is one, because a master overwrites its
    slave's offsets.

    Faulty: Java commits to any replica while the master is unknown, C++ to the lowest broker id.
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
