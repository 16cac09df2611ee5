"""The broker's locks of orderly queues, and how long they count as held."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.assignment.locks import LOCK_VALID_S, since_boot
from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.dispatch.workers import ThreadWorkers
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.member import GroupMember
from pyrocket_consumer.protocol.bodies import LockRequest, encode_lock_request
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.testing import Gate
from tests.consumer.orders import GROUP, QUEUE, TOPIC
from tests.consuming import WAIT_S, RecordingListener
from tests.real_brokers.remoting import Peer


def test_a_machine_that_has_slept_does_not_trust_its_locks(orders):
    """Its monotonic clock stopped meanwhile. The broker's did not, so another member may have the queue by now."""
    slept_s, seen = 0.0, RecordingListener()
    options = {"name_server": orders.cluster.name_server, "orderly": True, "consume_from": "first"}
    config = ConsumerConfig(group=GROUP, **options)
    cluster = Cluster(config, "me")
    cluster.start()

    def workers(is_async, outcome):
        return ThreadWorkers(2, outcome, 900, cluster.loop)

    async def begin():
        commits, clock = BrokerCommits(cluster, GROUP), {"lock_clock": lambda: since_boot() + slept_s}
        member = GroupMember(config, cluster, commits, workers, **clock)
        await member.subscribe(parse_subscription(TOPIC, "*"), Listener.of(seen))
        await member.start()
        return member

    try:
        member = cluster.run(begin(), 30)
        orders.send(b"before")
        seen.wait_for(1)
        slept_s = LOCK_VALID_S + 1
        orders.send(b"after")
        time.sleep(0.5)  # no message may arrive in this time
        assert seen.bodies == [b"before"]
        slept_s = 0.0  # the lock is confirmed again
        orders.send(b"later")
        seen.wait_for(3)
        assert seen.bodies == [b"before", b"after", b"later"]
        cluster.run(member.close(5), 30)
    finally:
        cluster.close()


@pytest.fixture
def other(broker):
    """Another member: `other(code)` requests the lock of the queue, or releases it."""
    body = encode_lock_request(LockRequest(GROUP, "other", frozenset([QUEUE])))
    with closing(Peer(broker.address)) as peer:
        yield lambda code: peer.call(code, body=body)


@pytest.mark.virtual
def test_a_queue_whose_lock_another_member_has_is_given_up(orders, broker, other):
    """The messages of its running call are not committed, and are redelivered once the lock is free."""
    orders.fill(1)
    seen = RecordingListener(lambda message: time.sleep(25 * (message.body == b"m1")))
    with orders.consuming(seen, orderly=True) as (consumer, _):
        orders.wait_committed(1)
        orders.fill(1, start=1)
        broker.expire_locks()
        other(RequestCode.LOCK_BATCH_MQ)
        event = orders.events.wait_for("lock-lost")
        assert (event.queue, "up to 1 may be redelivered" in event.text) == (QUEUE, True)
        assert "still has its lock" in orders.events.wait_for("lock-lost", 2).text
        time.sleep(10)
        assert QUEUE not in consumer.progress()
        assert orders.committed == {0: 1}
        other(RequestCode.UNLOCK_BATCH_MQ)
        orders.wait_committed(2)
    assert seen.bodies == [b"m0", b"m1", b"m1"]


@pytest.mark.virtual
def test_a_lock_that_is_lost_during_a_reset_is_noticed_soon(orders, broker, other):
    """The next renewal finds it. This one concerns the window that the reset has ended."""
    orders.fill(1)
    with orders.consuming(orderly=True) as (consumer, _), ThreadPoolExecutor() as pool:
        orders.wait_committed(1)
        time.sleep(15)
        orders.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate := Gate())
        resetting = pool.submit(consumer.reset_offsets, TOPIC, "earliest")
        gate.wait_held()
        broker.expire_locks()
        other(RequestCode.LOCK_BATCH_MQ)
        time.sleep(8)  # the broker refuses its lock meanwhile
        gate.open()
        assert resetting.result(WAIT_S) == {QUEUE: 0}
        assert not orders.events.of("lock-lost")
        assert "may be redelivered" in orders.events.wait_for("lock-lost").text


def test_the_clock_of_locks_never_lags_behind_the_monotonic_one():
    boot, monotonic = since_boot(), time.monotonic()
    time.sleep(0.01)
    monotonic_later, boot_later = time.monotonic(), since_boot()  # in this order: a pause adds no lag
    assert boot_later - boot >= monotonic_later - monotonic - 0.005
