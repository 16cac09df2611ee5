"""A consumer that has ended leaves no thread, no socket, no file and no task."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConnectError, PushConsumer
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import QUICK, WAIT_S, RecordingListener, consuming, until
from tests.transport.peer import server_tls, trusting

pytestmark = pytest.mark.live


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.slow("starts and closes a hundred consumers")
def test_a_hundred_consumers_one_after_the_other(embedded, topic, group):
    counts = []
    for number in range(100):
        if number % 20 == 0:
            counts.append(at_rest(embedded))
        embedded.send(topic, b"m%d" % number)
        kinds = [seen := RecordingListener(), consumed_by(seen)]
        with consuming(embedded, topic, group, kinds[number % 2], consume_threads=2, rebalance_interval_s=20):
            seen.wait_for(1)
        assert seen.bodies == [b"m%d" % number]
    assert embedded.committed(group, topic) == {0: 100}
    assert len(set(counts[1:])) == 1, f"open files and threads: {counts}"


def at_rest(cluster: EmbeddedCluster) -> tuple[int, int]:
    """Return the number of open files and threads, once both sides of closed consumers have ended."""

    def ended() -> bool:
        nodes = (*cluster.nodes, *cluster.name_server_nodes)
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("pyrocket-")]
        return not ours and not any(node.connections for node in nodes)

    gc.collect()
    until(ended, "threads and connections end")
    return open_files(), threading.active_count()


def consumed_by(seen):
    async def listen(message):
        seen(message)

    return listen


def test_starts_that_fail_leave_nothing(embedded, group):
    before = at_rest(embedded)
    for _ in range(20):
        with pytest.raises(ConnectError):
            PushConsumer(group, name_server="127.0.0.1:1", connect_timeout_s=0.5).start()
    assert at_rest(embedded) == before


@pytest.mark.slow("starts and closes many consumers")
def test_an_asyncio_consumer_leaves_no_task_on_the_callers_loop(embedded, topic, group):
    embedded.send(topic, b"x")

    async def main():
        ended = asyncio.Event()

        async def listen(message):
            ended.set()

        for _ in range(3):
            async with AsyncPushConsumer(group, name_server=embedded.name_server, **QUICK) as consumer:
                await consumer.subscribe(topic, listen)
                async with asyncio.timeout(WAIT_S):
                    await ended.wait()
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    before = at_rest(embedded)
    assert asyncio.run(main()) == set()
    assert at_rest(embedded) == before


def test_a_consumer_over_tls_with_signed_requests(group):
    with EmbeddedCluster(tls=server_tls(), account=("me", "secret"), delay_scale=0.01) as cluster:
        cluster.create_topic("orders", queues=2)
        before = at_rest(cluster)
        cluster.send("orders", lambda number: b"m%d" % number, count=200)
        options = {"tls": trusting(), "access_key": "me", "secret_key": "secret", "pull_batch_size": 8}
        failed = []

        def judge(message):
            if message.body == b"m50" and not failed:
                failed.append(message)
                raise ValueError("redeliver it")

        with consuming(cluster, "orders", group, RecordingListener(judge), **options) as (consumer, seen):
            seen.wait_for(200)
            seen.wait(lambda seen: len(seen.bodies) == 201)
            cluster.broker("broker-a").close_connections()
            cluster.send("orders", lambda number: b"m%d" % (200 + number), count=100)
            seen.wait_for(300)
            consumer.reset_offsets("orders", "latest")
        assert len(seen.bodies) == 301
        assert sum(cluster.committed(group, "orders").values()) == 300
        assert all(now <= then for now, then in zip(at_rest(cluster), before, strict=True))
