"""The reader of a stream on real brokers, and on embedded ones that must behave alike. Without Spark."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pyrocket_consumer.errors import ConfigError
from tests.spark.spark_calls import Checkpoint, all_batches, flatten, read_batch, running, start_offsets

pytestmark = [pytest.mark.live, pytest.mark.versions("5.5.0", "4.9.7")]


def send(cluster: Any, topic: str, count: int) -> None:
    """Send to two queues, and wait until the broker reports it, because real ones take a moment."""
    broker = cluster.broker("broker-a")

    def shown() -> int:
        return sum(broker.max_offset(topic, queue_id) for queue_id in (0, 1))

    wanted = shown() + count
    cluster.send(topic, count=count)
    cluster.wait_until(lambda: shown() == wanted, 30)


def test_batches_restarts_and_the_group(cluster, names):
    topic, group, checkpoint = names.topic(), names.group(), Checkpoint()
    cluster.create_topic(topic, queues=2)
    send(cluster, topic, 20)
    options = {"subscribe": topic, "startingOffsets": "earliest", "consumerGroup": group, "maxOffsetsPerTrigger": 7}
    found = []
    for _ in range(2):
        with running(cluster, checkpoint, trigger="available", **options) as run:
            found += all_batches(run)
        send(cluster, topic, 10)
        cluster.wait_until(lambda: cluster.committed(group, topic) == ends_of(checkpoint), 30)
    assert len(found) == len(set(found)) == 30
    assert sum(ends_of(checkpoint).values()) == 30
    assert len(read_batch(cluster, subscribe=topic, startingOffsets="group", consumerGroup=group)) == 10


def ends_of(checkpoint: Checkpoint) -> dict[int, int]:
    return {int(name.split("/")[2]): offset for name, offset in flatten(json.loads(checkpoint.ends[-1])).items()}


def test_a_query_starts_at_a_time(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=2)
    for _ in range(3):
        send(cluster, topic, 4)
        time.sleep(0.02)  # so that they differ in store time
    messages = cluster.messages(topic)
    times = sorted({message.stored_at_ms for message in messages})
    for at_ms in (0, times[0], times[len(times) // 2], times[-1], times[-1] + 1, times[-1] + 3_600_000):
        expected = {
            f"{topic}/broker-a/{queue_id}": min(
                (m.queue_offset for m in of_queue if m.stored_at_ms >= at_ms), default=len(of_queue)
            )
            for queue_id in (0, 1)
            if (of_queue := [m for m in messages if m.queue.queue_id == queue_id])
        }
        assert start_offsets(cluster, subscribe=topic, startingTimestamp=at_ms) == expected, f"at {at_ms} of {times}"


def test_tags_leave_gaps_and_nothing_is_missed(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=1)
    for number in range(24):
        cluster.send(topic, tags="b" if number % 4 == 2 else "a")
    cluster.wait_until(lambda: cluster.broker("broker-a").max_offset(topic, 0) == 24, 30)
    options = {"subscribe": topic, "tags": "b || c", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 5}
    with running(cluster, **options) as run:
        assert [offset for _, offset in all_batches(run)] == list(range(2, 24, 4))


def test_a_wrong_sql_filter_is_refused(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=1)
    with pytest.raises(ConfigError, match="sqlFilter=.* is refused by broker broker-a"):
        start_offsets(cluster, subscribe=topic, sqlFilter="colour = = 'red'")
