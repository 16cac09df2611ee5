"""In a group of Java members and ours every queue has one owner, and no message is lost or consumed twice."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from tests.consumer.processes import member
from tests.consuming import consuming, numbered, until
from tests.interop.members import (
    JAVA_STRATEGIES,
    client_id,
    java_options,
    our_options,
    running_info,
    wait_for_members,
    wait_until_committed,
)


@pytest.mark.parametrize(
    ("kind", "strategy"), [*(("real", strategy) for strategy in JAVA_STRATEGIES), ("embedded", "average")]
)
def test_java_members_hold_the_queues_of_our_allocation(either_cluster, java, topic, group, strategy):
    either_cluster.create_topic(topic, queues=8)
    group_is = partial(wait_for_members, either_cluster, group, topic, strategy=strategy)

    def ours(name):
        return consuming(either_cluster, topic, group, allocation=strategy, **our_options(name))

    def javas(name):
        options = {"strategy": JAVA_STRATEGIES[strategy], **java_options(name)}
        return java.consumer(either_cluster.name_server, group, topic, **options)

    with ours("a"), javas("d"):
        with javas("b"), ours("c"):
            group_is("a", "b", "c", "d")
        group_is("a", "d")


def test_each_message_is_consumed_once_while_members_join_and_leave(real_cluster, java, topic, group):
    """Members join and leave between messages, and one is killed during a message."""
    real_cluster.create_topic(topic, queues=8)
    group_is, sent = partial(wait_for_members, real_cluster, group, topic), list[bytes]()

    def send(count=40, **where):
        for body in numbered(count, len(sent)):
            real_cluster.send(topic, body, **where)
            sent.append(body)

    def consumed():
        """Return the bodies that all members have consumed, as often as they were consumed."""
        killed = {body.encode(): times for body, times in victim.bodies.items()}
        javas = Counter(message.body for each in java_members for message in each.messages)
        return Counter(seen.bodies) + Counter(killed) + javas

    def each_is_consumed_and_committed():
        until(lambda: set(consumed()) == set(sent), "every message is consumed")
        until(lambda: sum(real_cluster.committed(group, topic).values()) == len(sent), "and committed")
        assert consumed() == Counter(sent)

    java_members = []
    with ExitStack() as stack:

        def java_joins():
            each = java.consumer(real_cluster.name_server, group, topic, **java_options("java"))
            java_members.append(stack.enter_context(each))
            return each

        # The killed member sorts last, so no queue leaves the Java member, whose commits are late.
        victim = stack.enter_context(member(real_cluster, topic, group, listener_s=0.05, **our_options("victim")))
        consumer, seen = stack.enter_context(consuming(real_cluster, topic, group, **our_options("ours")))
        first = java_joins()
        group_is("java", "ours", "victim")
        send()
        until(lambda: set(consumed()) == set(sent), "every message is consumed")
        wait_until_committed(real_cluster, group, first.client_id, topic, 15)  # 3 of 8 queues
        first.close()
        group_is("ours", "victim")
        each_is_consumed_and_committed()
        send()
        each_is_consumed_and_committed()
        java_joins()
        group_is("java", "ours", "victim")

        begun = len(victim.bodies)
        send(queue_id=7)
        victim.wait(lambda lines: len(victim.bodies) >= begun + 5)
        victim.send(signal.SIGKILL)
        victim.ended()
        group_is("java", "ours")
        until(lambda: set(consumed()) == set(sent), "nothing is lost with the member killed")
        in_hand = {line.removeprefix("begun ").encode() for line in victim.lines if line.startswith("begun ")}
        doubled = {body for body, times in consumed().items() if times > 1}
        assert doubled <= in_hand
        assert set(consumed().values()) <= {1, 2}

        send()
        until(lambda: set(consumed()) == set(sent), "every message is consumed")
        consumer.close()
        group_is("java")
        send()
        until(lambda: set(consumed()) == set(sent), "every message is consumed")
    assert sum(real_cluster.committed(group, topic).values()) == len(sent)
    assert {body for body, times in consumed().items() if times > 1} == doubled


def test_no_message_is_lost_while_members_join_and_leave_under_load(real_cluster, java, topic, group):
    """Queues move between members during messages. A message may be consumed twice, but none is skipped."""
    real_cluster.create_topic(topic, queues=8)
    group_is, sent = partial(wait_for_members, real_cluster, group, topic), list[bytes]()
    enough = threading.Event()

    def send():
        while not enough.is_set():
            (body,) = numbered(1, len(sent))
            real_cluster.send(topic, body)
            sent.append(body)

    def javas(name):
        return java.consumer(real_cluster.name_server, group, topic, **java_options(name))

    sender = threading.Thread(target=send)
    with consuming(real_cluster, topic, group, **our_options("b")) as (_, seen), javas("c") as first:
        sender.start()
        try:
            group_is("b", "c")
            with consuming(real_cluster, topic, group, **our_options("d")) as (_, late):
                group_is("b", "c", "d")
                with javas("a") as second:
                    group_is("a", "b", "c", "d")
                group_is("b", "c", "d")
            group_is("b", "c")
        finally:
            enough.set()
            sender.join()

        def consumed():
            javas = [message.body for each in (first, second) for message in each.messages]
            return {*seen.bodies, *late.bodies, *javas}

        until(lambda: consumed() == set(sent), "every message is consumed")


@pytest.mark.parametrize("kind", ["real", "embedded"])
def test_an_orderly_group_keeps_the_order_of_each_queue(either_cluster, java, topic, group, kind):
    """The broker's locks move from Java members to ours and back, and each queue keeps its order."""
    either_cluster.create_topic(topic, queues=8)
    group_is, sent = partial(wait_for_members, either_cluster, group, topic), 0

    def send(count=40):
        nonlocal sent
        for body in numbered(count, sent):
            either_cluster.send(topic, body)
        sent += count

    def consumed():
        javas = [(message.queue.queue_id, message.queue_offset) for message in java_member.messages]
        return [(message.queue.queue_id, message.queue_offset) for message in list(seen.messages)] + javas

    with java.consumer(either_cluster.name_server, group, topic, orderly=True, **java_options("b")) as java_member:
        group_is("b")
        send()
        java_member.wait_for_messages(40)
        with consuming(either_cluster, topic, group, orderly=True, **our_options("a")) as (_, seen):
            group_is("a", "b")
            send()
            until(lambda: len(set(consumed())) == sent, "every message is consumed")
            ours = running_info(either_cluster, group, client_id("a")).queues.items()
            assert {queue.queue_id for queue, progress in ours if queue.topic == topic and progress.locked} == {
                0,
                1,
                2,
                3,
            }
        group_is("b")
        send()
        until(lambda: len(set(consumed())) == sent, "every message is consumed")
    for messages in (seen.messages, java_member.messages):
        for queue_id in range(8):
            offsets = [message.queue_offset for message in messages if message.queue.queue_id == queue_id]
            assert offsets == sorted(offsets)
