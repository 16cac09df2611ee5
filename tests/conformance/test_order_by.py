"""Order by key: one call of a key at a time, in order, several keys of a queue at once, through changes of owner."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from pyrocket_consumer import Producer, Suspend
from tests.by_key import ByKey, key_of
from tests.consumer.processes import member
from tests.consuming import WAIT_S, Events, consuming, until
from tests.resetting import held


def by_key(cluster, topic, group, seen, **options):
    return consuming(cluster, topic, group, seen, orderly=True, **{"order_by": "sharding_key", **options})


def send(cluster, topic, count, keys=4, first=0):
    """Send messages as a producer sends them: those of a key go to one queue."""
    with Producer(name_server=cluster.name_server) as producer:
        for number in range(first, first + count):
            key = f"m{number % keys}"
            producer.send(topic, f"{key}:{number}".encode(), sharding_key=key)


@pytest.mark.parametrize("order_by", ["sharding_key", key_of])
def test_keys_of_one_queue_run_beside_each_other(cluster, topic, group, order_by):
    cluster.create_topic(topic, queues=1)
    send(cluster, topic, 20)
    together = threading.Barrier(4, timeout=WAIT_S)
    seen = ByKey(lambda message: together.wait() < 0 or None)
    with by_key(cluster, topic, group, seen, order_by=order_by, consume_threads=4):
        seen.wait_for(20)
    seen.check()
    assert cluster.committed(group, topic) == {0: 20}


def test_a_key_that_never_succeeds_holds_up_no_other(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    send(cluster, topic, 12)
    events = Events()
    seen = ByKey(lambda message: Suspend(for_s=0.01) if message.body == b"m1:1" else None)
    with by_key(cluster, topic, group, seen, max_reconsume_times=2, on_event=events):
        seen.wait_for(12)
        assert events.wait_for("message-given-up").facts["key"] == "'m1'"
        with consuming(cluster, f"%DLQ%{group}", f"{group}-dead") as (_, dead):
            dead.wait_for(1)
    assert dead.bodies == [b"m1:1"]
    assert cluster.committed(group, topic) == {0: 12}


def test_order_is_kept_when_a_second_member_takes_queues(cluster, topic, group):
    cluster.create_topic(topic, queues=4)
    seen = ByKey(lambda message: time.sleep(0.002))
    stop, sent = threading.Event(), 0

    def go_on_sending():
        nonlocal sent
        while not stop.wait(0.02):
            send(cluster, topic, 16, keys=16, first=sent)
            sent += 16

    with by_key(cluster, topic, group, seen) as (first, _):
        sending = threading.Thread(target=go_on_sending)
        sending.start()
        try:
            seen.wait_for(40)
            with by_key(cluster, topic, group, seen) as (second, _):
                until(lambda: len(held(first, topic)) == len(held(second, topic)) == 2, "two queues each")
                seen.wait_for(len(set(seen.bodies)) + 80)
            until(lambda: len(held(first, topic)) == 4, "all queues again")
            seen.wait_for(len(set(seen.bodies)) + 40)
        finally:
            stop.set()
            sending.join()
        seen.wait_for(sent)
    seen.check()


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
@pytest.mark.cluster(lock_expiry_s=1.0)
def test_a_killed_member_leaves_its_keys_in_order(cluster, topic, group):
    cluster.create_topic(topic, queues=2)
    send(cluster, topic, 80)
    options = {"orderly": True, "order_by": "sharding_key"}
    with member(cluster, topic, group, listener_s=0.02, **options) as victim:
        victim.wait(lambda lines: len(victim.bodies) >= 10)
        victim.send(signal.SIGKILL)
        victim.ended()
    seen = ByKey()
    with by_key(cluster, topic, group, seen):
        everything = {f"m{number % 4}:{number}" for number in range(80)}
        seen.wait(lambda seen: {body.decode() for body in seen.bodies} | set(victim.bodies) >= everything, 90)
    seen.check()
    for key in range(4):
        finished = [int(body.partition(":")[2]) for body in victim.bodies if body.startswith(f"m{key}:")]
        first = next(int(body.partition(b":")[2]) for body in seen.bodies if body.startswith(b"m%d:" % key))
        assert first <= max(finished, default=key - 4) + 4, "nothing is passed over"
