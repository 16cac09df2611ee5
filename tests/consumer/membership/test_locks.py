"""The broker's locks of orderly queues, and how long we believe in them."""

from __future__ import annotations

import time

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.commit import BrokerCommits
from pyrocket_consumer.consumer.consume import ThreadWorkers
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.locks import VALID_S, since_boot
from pyrocket_consumer.consumer.member import GroupMember
from pyrocket_consumer.wire.subscription import parse_subscription
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import Seen


def test_a_machine_that_has_slept_does_not_trust_its_locks(orders):
    """Its monotonic clock stood still meanwhile. The broker's did not, and the queue may be another member's by now."""
    slept_s, seen = 0.0, Seen()
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
        slept_s = VALID_S + 1
        orders.send(b"after")
        time.sleep(0.5)  # for what must not come
        assert seen.bodies == [b"before"]
        slept_s = 0.0  # the lock is confirmed again
        orders.send(b"later")
        seen.wait_for(3)
        assert seen.bodies == [b"before", b"after", b"later"]
        cluster.run(member.close(5), 30)
    finally:
        cluster.close()


def test_the_clock_of_locks_never_lags_behind_the_other():
    boot, monotonic = since_boot(), time.monotonic()
    time.sleep(0.01)
    monotonic_later, boot_later = time.monotonic(), since_boot()  # in this order: a pause between two calls shows none
    assert boot_later - boot >= monotonic_later - monotonic - 0.005
