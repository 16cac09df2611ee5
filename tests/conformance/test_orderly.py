"""Orderly consumption: one listener call per queue at a time, in order, across failures and owner changes."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing

import pytest

from pyrocket_consumer import ConsumeResult, Suspend
from pyrocket_consumer.protocol.bodies import LockRequest, decode_lock_response, encode_lock_request
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consumer.processes import member
from tests.consuming import Events, RecordingListener, consuming, numbered, until
from tests.order_by_key import KeyedListener, send_keys
from tests.real_brokers.remoting import Peer
from tests.resets import fill, held, queue


class InOrder(KeyedListener):
    """A listener that detects overlapping calls of a queue, and records the order of each queue."""

    def __init__(self, judge=lambda message: None):
        super().__init__(judge, key=lambda message: message.queue)

    def assert_in_order(self, once=True):
        """No calls of a queue overlapped, and its messages arrived in order, with repetitions."""
        assert not self.overlaps
        for each in {message.queue for message in list(self.messages)}:
            assert self.of(each) == sorted(set(self.of(each)) if once else self.of(each))


def test_each_queue_in_order_one_call_at_a_time(cluster, topic, group):
    fill(cluster, topic, 200, queues=4)
    seen = InOrder(lambda message: time.sleep(0.001))
    with consuming(cluster, topic, group, seen, orderly=True):
        seen.wait_for(200)
    seen.assert_in_order()
    assert sum(cluster.committed(group, topic).values()) == 200


@pytest.mark.parametrize("how", ["raise", "suspend", "retry"])
def test_a_failure_holds_its_queue_and_is_redelivered_first(cluster, topic, group, how):
    fill(cluster, topic, 20, queues=2)
    failures = []

    def judge(message):
        if message.body == b"m6" and len(failures) < 2:
            failures.append(message.reconsume_times)
            if how == "raise":
                raise ValueError("not yet")
            return Suspend(for_s=0.05) if how == "suspend" else ConsumeResult.RETRY

    seen = InOrder(judge)
    with consuming(cluster, topic, group, seen, orderly=True):
        seen.wait(lambda seen: len(seen.messages) == 22)
    assert failures == [0, 1]
    seen.assert_in_order(once=False)
    assert sum(cluster.committed(group, topic).values()) == 20


def test_batches_in_order(cluster, topic, group):
    fill(cluster, topic, 30, queues=1)
    calls, seen = [], RecordingListener()

    def handle(messages):
        calls.append([message.queue_offset for message in messages])
        if len(calls) == 2:
            return Suspend(for_s=0.05)
        for message in messages:
            seen(message)

    with consuming(cluster, topic, group, handle, orderly=True, listener_batch_size=4):
        seen.wait_for(30)
    assert [message.queue_offset for message in seen.messages] == list(range(30))
    assert calls[1] == calls[2][: len(calls[1])]


KINDS = {"queues": (InOrder, {}), "keys": (KeyedListener, {"order_by": "sharding_key"})}


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_kept_when_a_second_member_takes_queues(cluster, topic, group, kind):
    cluster.create_topic(topic, queues=4)
    listener, options = KINDS[kind]
    seen, stop, sent = listener(lambda message: time.sleep(0.002)), threading.Event(), 0

    def go_on_sending():
        nonlocal sent
        while not stop.wait(0.02):
            send_keys(cluster, topic, 16, keys=16, first=sent)
            sent += 16

    with consuming(cluster, topic, group, seen, orderly=True, **options) as (first, _):
        sending = threading.Thread(target=go_on_sending)
        sending.start()
        try:
            seen.wait_for(40)
            with consuming(cluster, topic, group, seen, orderly=True, **options) as (second, _):
                until(lambda: len(held(first, topic)) == len(held(second, topic)) == 2, "two queues each")
                seen.wait_for(len(set(seen.bodies)) + 80)
            until(lambda: len(held(first, topic)) == 4, "all queues again")
            seen.wait_for(len(set(seen.bodies)) + 40)
        finally:
            stop.set()
            sending.join()
        seen.wait_for(sent)
    seen.check()
    if kind == "queues":
        seen.assert_in_order(once=False)


@pytest.mark.slow("starts and kills processes")
@pytest.mark.live
@pytest.mark.cluster(lock_expiry_s=1.0)
def test_a_killed_member_leaves_its_queues_in_order(cluster, topic, group):
    """The broker keeps the locks of a dead member for a minute, here for a second. Then the other member continues."""
    fill(cluster, topic, 40, queues=2)
    with member(cluster, topic, group, orderly=True, listener_s=0.02) as victim:
        victim.wait(lambda lines: len(victim.bodies) >= 10)
        victim.send(signal.SIGKILL)
        victim.ended()
    seen = InOrder()
    with consuming(cluster, topic, group, seen, orderly=True):
        seen.wait(lambda seen: {*seen.bodies, *(body.encode() for body in victim.bodies)} >= set(numbered(40)), 60)
    seen.assert_in_order()


def test_auto_commit_off_commits_what_the_listener_commits(cluster, topic, group):
    fill(cluster, topic, 10, queues=1)

    seen = InOrder(lambda message: ConsumeResult.COMMIT if message.body == b"m4" else ConsumeResult.SUCCESS)
    with consuming(cluster, topic, group, seen, orderly=True, auto_commit=False):
        seen.wait_for(10)
        until(lambda: cluster.committed(group, topic).get(0) == 5, "committed up to the commit")
    assert cluster.committed(group, topic) == {0: 5}
    with consuming(cluster, topic, group, orderly=True) as (_, again):
        again.wait_for(5)
    assert again.bodies == numbered(5, 5)


def test_a_rollback_redelivers_all_messages_since_the_commit(cluster, topic, group):
    fill(cluster, topic, 6, queues=1)
    rolled_back = []

    def judge(message):
        if message.body == b"m1":
            return ConsumeResult.COMMIT
        if message.body == b"m3" and not rolled_back:
            rolled_back.append(True)
            return ConsumeResult.ROLLBACK
        return ConsumeResult.COMMIT if message.body == b"m5" else None

    seen = InOrder(judge)
    with consuming(cluster, topic, group, seen, orderly=True, auto_commit=False):
        seen.wait(lambda seen: seen.bodies[-1:] == [b"m5"])
        until(lambda: cluster.committed(group, topic).get(0) == 6, "all committed in the end")
    assert seen.bodies == [b"m0", b"m1", b"m2", b"m3", b"m2", b"m3", b"m4", b"m5"]


def test_a_message_that_never_succeeds_becomes_a_dead_letter(cluster, topic, group):
    fill(cluster, topic, 3, queues=1)

    seen, events = InOrder(lambda message: Suspend(for_s=0.01) if message.body == b"m1" else None), Events()
    with consuming(cluster, topic, group, seen, orderly=True, max_reconsume_times=2, on_event=events):
        seen.wait_for(3)
        events.wait_for("message-given-up")
        with consuming(cluster, f"%DLQ%{group}", f"{group}-dead") as (_, dead):
            dead.wait_for(1)
    assert seen.bodies == [b"m0", b"m1", b"m1", b"m1", b"m2"]
    assert dead.bodies == [b"m1"]


def test_a_queue_that_another_member_has_locked_is_waited_for(cluster, topic, group):
    fill(cluster, topic, 3, queues=1)
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        locked = lock(peer, group, topic, "somebody-else")
        with consuming(cluster, topic, group, orderly=True) as (consumer, seen):
            assert not seen.messages
            assert not held(consumer, topic)
            lock(peer, group, topic, "somebody-else", RequestCode.UNLOCK_BATCH_MQ)
            seen.wait_for(3)
            assert lock(peer, group, topic, "somebody-else") == set(), "it is locked for us"
        assert lock(peer, group, topic, "somebody-else") == locked, "and unlocked when we have closed"


def lock(peer, group, topic, client_id, code=RequestCode.LOCK_BATCH_MQ):
    body = encode_lock_request(LockRequest(group, client_id, frozenset({queue(topic, 0)})))
    answer = peer.call(code, body=body).body
    return decode_lock_response(answer) if code == RequestCode.LOCK_BATCH_MQ else None
