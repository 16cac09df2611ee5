"""A clustering group, on the embedded cluster and on real brokers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumeContext, MessageQueue, Retry
from tests.consuming import QUICK, Events, RecordingListener, consuming, numbered, until
from tests.resets import fill, held


def test_every_message_is_seen_once_and_committed(cluster, topic, group):
    bodies = fill(cluster, topic, 100, queues=4)
    with consuming(cluster, topic, group) as (consumer, seen):
        seen.wait_for(100)
        late = fill(cluster, topic, 20, start=100)
        seen.wait_for(120)
    assert sorted(seen.bodies) == sorted(bodies + late)
    assert sum(cluster.committed(group, topic).values()) == 120


def test_a_message_has_its_metadata(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    body = bytes(range(256)) * 3
    cluster.send(topic, body, tags="paid", keys=["k1", "k2"], properties={"region": "eu", "ключ": "値 ☃"})
    with consuming(cluster, topic, group) as (_, seen):
        seen.wait_for(1)
    (message,) = seen.messages
    assert (message.topic, message.body, message.tags, message.keys) == (topic, body, "paid", ("k1", "k2"))
    assert message.properties["region"] == "eu"
    assert message.properties["ключ"] == "値 ☃"
    assert message.queue == MessageQueue(topic, "broker-a", 0)
    assert (message.queue_offset, message.reconsume_times) == (0, 0)
    assert abs(message.stored_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert message.store_host.startswith("127.0.0.1:")


def test_the_next_consumer_continues_where_the_last_one_ended(cluster, topic, group):
    first = fill(cluster, topic, 30, queues=2)
    with consuming(cluster, topic, group) as (_, seen):
        seen.wait_for(30)
    second = fill(cluster, topic, 30, start=30)
    with consuming(cluster, topic, group) as (_, again):
        again.wait_for(30)
    assert (Counter(seen.bodies), Counter(again.bodies)) == (Counter(first), Counter(second))


def test_two_members_share_the_queues_and_one_takes_over(cluster, topic, group):
    cluster.create_topic(topic, queues=4)
    seen = RecordingListener()
    with consuming(cluster, topic, group, seen) as (first, _):
        with consuming(cluster, topic, group, seen) as (second, _):
            until(lambda: len(held(first, topic)) == len(held(second, topic)) == 2, "two queues each")
            assert not set(held(first, topic)) & set(held(second, topic))
            fill(cluster, topic, 40)
            seen.wait_for(40)
        until(lambda: len(held(first, topic)) == 4, "the first member takes all")
        fill(cluster, topic, 40, start=40)
        seen.wait_for(80)
    assert Counter(seen.bodies) == Counter(numbered(80))


def test_tags_select(cluster, topic, group):
    cluster.create_topic(topic, queues=2)
    for number, tag in enumerate(["paid", "open", "late", None] * 5):
        cluster.send(topic, b"m%d" % number, tags=tag)
    with consuming(cluster, topic, group, selector="paid || late") as (consumer, seen):
        seen.wait_for(10)
        until(lambda: sum(cluster.committed(group, topic).values()) == 20, "unselected ones are passed over")
    assert {message.tags for message in seen.messages} == {"paid", "late"}


def test_a_failed_message_is_redelivered_and_not_lost(cluster, topic, group):

    seen = RecordingListener(
        lambda message: Retry(delay_level=1) if message.body == b"m3" and not message.reconsume_times else None
    )
    fill(cluster, topic, 6, queues=1)
    with consuming(cluster, topic, group, seen):
        seen.wait(lambda seen: len(seen.messages) == 7)
    (again,) = [message for message in seen.messages if message.reconsume_times]
    assert (again.topic, again.body, again.reconsume_times) == (topic, b"m3", 1)
    assert again.queue.topic == f"%RETRY%{group}"
    assert Counter(seen.bodies) == Counter([*numbered(6), b"m3"])
    assert cluster.committed(group, topic) == {0: 6}


def test_a_raising_listener_is_a_retry_even_for_base_exceptions(cluster, topic, group):
    events = Events()

    def judge(message):
        if message.body == b"m0":
            raise SystemExit("not here")

    fill(cluster, topic, 2, queues=1)
    seen = RecordingListener(judge)
    with consuming(cluster, topic, group, seen, on_event=events):
        seen.wait_for(2)
        events.wait_for("listener-failed")
        events.wait_for("message-sent-back")
        until(lambda: cluster.committed(group, topic).get(0) == 2, "the rest is committed")


@pytest.mark.parametrize(("level", "options", "attempts"), [(1, {"max_reconsume_times": 1}, 2), (-1, {}, 1)])
def test_a_message_without_attempts_left_is_a_dead_letter(cluster, topic, group, level, options, attempts):
    """After its last attempt, or at once if the listener requests it."""
    fill(cluster, topic, 1, queues=1)
    seen = RecordingListener(lambda message: Retry(delay_level=level))
    with (
        consuming(cluster, topic, group, seen, **options),
        consuming(cluster, f"%DLQ%{group}", f"{group}-dead") as (_, dead),
    ):
        dead.wait_for(1)
    assert (seen.bodies, dead.bodies) == ([b"m0"] * attempts, [b"m0"])


def test_a_batch_listener_gets_lists_and_may_fail_a_part(cluster, topic, group):
    fill(cluster, topic, 20, queues=1)
    sizes, expected, again = [], numbered(20), RecordingListener()

    def handle(messages):
        sizes.append(len(messages))
        if messages[0].reconsume_times == 0:
            expected.extend(message.body for message in messages[1:])
        for message in messages:
            again(message)
        if messages[0].reconsume_times == 0 and len(messages) > 1:
            return Retry(messages[1:], delay_level=1)

    with consuming(cluster, topic, group, handle, listener_batch_size=5):
        again.wait(lambda seen: Counter(seen.bodies) == Counter(expected))
    assert max(sizes) == 5


@pytest.mark.parametrize("size", [1, 4])
def test_async_listeners(cluster, topic, group, size):
    fill(cluster, topic, 30, queues=2)
    seen, threads = RecordingListener(), set()

    async def handle(unit):
        threads.add(threading.current_thread().name)
        for message in unit if isinstance(unit, list) else [unit]:
            seen(message)

    with consuming(cluster, topic, group, handle, listener_batch_size=size):
        seen.wait_for(30)
    assert threads == {"pyrocket-listener"}
    assert sum(cluster.committed(group, topic).values()) == 30


def test_an_asyncio_consumer_calls_listeners_on_the_callers_loop(cluster, topic, group):
    fill(cluster, topic, 30, queues=2)

    async def main():
        seen, enough = [], asyncio.Event()

        async def handle(message):
            assert asyncio.get_running_loop() is loop
            seen.append(message.body)
            if len(seen) == 30:
                enough.set()

        loop = asyncio.get_running_loop()
        async with AsyncPushConsumer(group, name_server=cluster.name_server, **QUICK) as consumer:
            await consumer.subscribe(topic, handle)
            async with asyncio.timeout(30):
                await enough.wait()
            async with asyncio.timeout(30):
                while any(each.unfinished for each in (await consumer.progress()).values()):
                    await asyncio.sleep(0.01)
        return seen

    assert Counter(asyncio.run(main())) == Counter(numbered(30))
    assert sum(cluster.committed(group, topic).values()) == 30


def test_the_context_has_queue_and_attempt(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    cluster.send(topic, b"m0")
    contexts, seen = [], RecordingListener()

    def handle(message, context: ConsumeContext):
        contexts.append(context)
        seen(message)
        if context.attempt == 1:
            return Retry(delay_level=1)

    with consuming(cluster, topic, group, handle):
        seen.wait(lambda seen: len(seen.bodies) == 2)
    assert [context.attempt for context in contexts] == [1, 2]
    assert contexts[0].queue == MessageQueue(topic, "broker-a", 0)


def test_pause_and_resume(cluster, topic, group):
    cluster.create_topic(topic, queues=2)
    with consuming(cluster, topic, group, pull_hold_s=1) as (consumer, seen):
        fill(cluster, topic, 10)
        seen.wait_for(10)
        consumer.pause()
        # pulls that the broker holds may still return 32 messages each; no pull follows
        cluster.send(topic, b"late", count=400)
        time.sleep(0.5)
        assert len(seen.messages) < 400
        consumer.resume()
        seen.wait(lambda seen: len(seen.messages) >= 410)
    assert set(seen.counts.values()) == {1}


def test_subscribe_and_unsubscribe_while_running(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    other = f"{topic}-other"
    cluster.create_topic(other, queues=1)
    fill(cluster, topic, 3)
    cluster.send(other, b"other")
    with consuming(cluster, topic, group) as (consumer, seen):
        seen.wait_for(3)
        second = RecordingListener()
        consumer.subscribe(other, second)
        second.wait_for(1)
        consumer.unsubscribe(topic)
        assert not held(consumer, topic)
        until(lambda: cluster.committed(group, topic) == {0: 3}, "the offset was stored")
        fill(cluster, topic, 1, start=3)
        cluster.send(other, b"other 2")
        second.wait_for(2)
    assert len(seen.bodies) == 3


def test_a_message_that_takes_too_long_is_reported_and_redelivered(cluster, topic, group):
    events, release = Events(), threading.Event()

    def judge(message):
        if message.body == b"m0" and message.reconsume_times == 0:
            release.wait(60)

    seen = RecordingListener(judge)
    fill(cluster, topic, 3, queues=1)
    try:
        with consuming(cluster, topic, group, seen, on_event=events, consume_timeout_s=0.5, shutdown_timeout_s=1):
            events.wait_for("message-stuck")
            until(lambda: cluster.committed(group, topic).get(0) == 3, "the stuck message holds nothing up")
            seen.wait(lambda seen: seen.bodies.count(b"m0") == 2, 60)
            release.set()
    finally:
        release.set()


def test_many_messages_on_many_queues_arrive_once_each(cluster, topic, group):
    cluster.create_topic(topic, queues=16)
    for _ in range(10):
        cluster.send(topic, b"bulk", count=500)
    with consuming(cluster, topic, group, commit_interval_s=1) as (_, seen):
        seen.wait(lambda seen: len(seen.messages) >= 5000)
    assert set(seen.counts.values()) == {1}
    assert sum(cluster.committed(group, topic).values()) == 5000


def test_unfinished_messages_are_never_committed(cluster, topic, group):
    fill(cluster, topic, 10, queues=1)
    release = threading.Event()

    def judge(message):
        if message.body == b"m2":
            release.wait(60)

    seen = RecordingListener(judge)
    try:
        with consuming(cluster, topic, group, seen, shutdown_timeout_s=0.5) as (consumer, _):
            seen.wait_for(10)
            until(lambda: cluster.committed(group, topic).get(0) == 2, "committed up to the unfinished one")
            consumer.close()
    finally:
        release.set()
    assert cluster.committed(group, topic) == {0: 2}
    with consuming(cluster, topic, group) as (_, again):
        again.wait_for(8)
    assert sorted(again.bodies) == sorted(numbered(8, 2))


def test_reset_in_process(cluster, topic, group):
    fill(cluster, topic, 20, queues=2)
    with consuming(cluster, topic, group) as (consumer, seen):
        seen.wait_for(20)
        moved = consumer.reset_offsets(topic, "earliest")
        assert sorted(moved.values()) == [0, 0]
        seen.wait(lambda seen: len(seen.messages) == 40)
        until(lambda: sum(cluster.committed(group, topic).values()) == 20, "committed again")
    assert set(seen.counts.values()) == {2}


def test_the_first_offsets_of_a_group_are_all_kept(cluster, names):
    """A broker acknowledges two concurrent first commits of a group, but may keep only one."""
    for _ in range(8):
        topic, group = names.topic(), names.group()
        cluster.create_topic(topic, queues=8)
        cluster.send(topic, b"-", count=16)
        with consuming(cluster, topic, group, commit_interval_s=60) as (_, seen):
            seen.wait(lambda seen: len(seen.messages) == 16)
        assert cluster.committed(group, topic) == dict.fromkeys(range(8), 2)
