"""Order by key: one call per key at a time, in order, and keys of a queue concurrently, across owner changes."""

from __future__ import annotations

import signal
import threading

import pytest

from pyrocket_consumer import Suspend
from tests.consumer.processes import member
from tests.consuming import WAIT_S, Events, consuming
from tests.order_by_key import KeyedListener, key_of, send_keys


def by_key(cluster, topic, group, seen, **options):
    return consuming(cluster, topic, group, seen, orderly=True, **{"order_by": "sharding_key", **options})


@pytest.mark.parametrize("order_by", ["sharding_key", key_of])
def test_keys_of_one_queue_run_concurrently(cluster, topic, group, order_by):
    cluster.create_topic(topic, queues=1)
    send_keys(cluster, topic, 20)
    together = threading.Barrier(4, timeout=WAIT_S)
    seen = KeyedListener(lambda message: together.wait() < 0 or None)
    with by_key(cluster, topic, group, seen, order_by=order_by, consume_threads=4):
        seen.wait_for(20)
    seen.check()
    assert cluster.committed(group, topic) == {0: 20}


def test_a_key_that_never_succeeds_does_not_block_others(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    send_keys(cluster, topic, 12)
    events = Events()
    seen = KeyedListener(lambda message: Suspend(for_s=0.01) if message.body == b"m1:1" else None)
    with by_key(cluster, topic, group, seen, max_reconsume_times=2, on_event=events):
        seen.wait_for(12)
        assert events.wait_for("message-given-up").facts["key"] == "'m1'"
        with consuming(cluster, f"%DLQ%{group}", f"{group}-dead") as (_, dead):
            dead.wait_for(1)
    assert dead.bodies == [b"m1:1"]
    assert cluster.committed(group, topic) == {0: 12}


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
@pytest.mark.cluster(lock_expiry_s=1.0)
def test_a_killed_member_leaves_its_keys_in_order(cluster, topic, group):
    cluster.create_topic(topic, queues=2)
    send_keys(cluster, topic, 80)
    options = {"orderly": True, "order_by": "sharding_key"}
    with member(cluster, topic, group, listener_s=0.02, **options) as victim:
        victim.wait(lambda lines: len(victim.bodies) >= 10)
        victim.send(signal.SIGKILL)
        victim.ended()
    seen = KeyedListener()
    with by_key(cluster, topic, group, seen):
        everything = {f"m{number % 4}:{number}" for number in range(80)}
        seen.wait(lambda seen: {body.decode() for body in seen.bodies} | set(victim.bodies) >= everything, 90)
    seen.check()
    for key in range(4):
        finished = [int(body.partition(":")[2]) for body in victim.bodies if body.startswith(f"m{key}:")]
        first = next(int(body.partition(b":")[2]) for body in seen.bodies if body.startswith(b"m%d:" % key))
        assert first <= max(finished, default=key - 4) + 4, "nothing is passed over"
