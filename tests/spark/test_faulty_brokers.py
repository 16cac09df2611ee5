"""A streaming query from topic to topic loses no message while brokers are killed, restarted and slow.

By default there are three failures and 1 500 messages. `make proof` sends 3 000, and `make spark-soak` has twelve
failures and 60 000 messages. PYROCKET_SPARK_TROUBLES, PYROCKET_SPARK_MESSAGES and PYROCKET_SPARK_SEED change that.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer import Message
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster, Exchange, delay, handle_and_close
from tests.consuming import until
from tests.spark.spark_calls import with_options
from tests.trials import trials

SEND = RequestCode.SEND_MESSAGE_V2

FAILURES = int(os.environ.get("PYROCKET_SPARK_TROUBLES", "3"))
MESSAGES = int(os.environ.get("PYROCKET_SPARK_MESSAGES", max(1500, trials(3000))))
SEED = int(os.environ.get("PYROCKET_SPARK_SEED", "0")) or random.randrange(1, 1 << 32)
CONTINUES_WITHIN_S = 120.0  # after a failure, on a slow machine
MARKS = ("spark_query_id", "spark_batch_id", "spark_partition", "spark_row")


def killed(broker: EmbeddedBroker, rng: random.Random) -> None:
    stored = threading.Event()

    def store_and_end(exchange: Exchange) -> None:
        handle_and_close(exchange)
        stored.set()

    broker.on(SEND, store_and_end)  # the response is lost, so the client sends again, and the message is stored twice
    stored.wait(5)
    broker.kill()
    broker.clear_faults()
    time.sleep(rng.uniform(0.5, 4))
    broker.start()


def restarted(broker: EmbeddedBroker, rng: random.Random) -> None:
    broker.stop()
    time.sleep(rng.uniform(0.5, 4))
    broker.start()


def slow(broker: EmbeddedBroker, rng: random.Random) -> None:
    broker.on(None, delay(rng.uniform(0.1, 0.5)), times=None)
    time.sleep(rng.uniform(1, 4))
    broker.clear_faults()


@pytest.mark.timeout(300 + 60 * FAILURES + MESSAGES // 100)
def test_nothing_is_lost_on_the_way_from_a_topic_to_a_topic(spark: Any, tmp_path: Path) -> None:
    rng, began = random.Random(SEED), time.monotonic()
    most_per_batch = max(50, MESSAGES // (4 * FAILURES + 4))
    print(f"seed {SEED}: {MESSAGES} messages, {FAILURES} troubles, at most {most_per_batch} offsets per batch")
    with EmbeddedCluster(brokers=2, record_limit=0) as cluster:
        for topic in ("first", "second"):
            cluster.create_topic(topic, queues=2)
        remaining = MESSAGES

        def send_part(left: int) -> None:
            """Send one of the `left` parts of the messages that are not sent yet."""
            nonlocal remaining
            remaining -= len(cluster.send("first", count=remaining // left))

        def stored() -> int:
            return sum(broker.max_offset("second", queue_id) for broker in cluster.brokers for queue_id in range(2))

        query = start(spark, cluster, tmp_path, most_per_batch)

        def wait_until_above(count: int) -> None:
            def continues() -> bool:
                assert query.isActive, f"the query ended by itself: {query.exception()}"
                return stored() > count

            until(continues, f"more than {count} messages written", CONTINUES_WITHIN_S)

        try:
            for number in range(FAILURES):
                send_part(FAILURES + 1 - number)
                wait_until_above(stored())
                before, trouble, broker = stored(), [killed, restarted, slow][number % 3], rng.choice(cluster.brokers)
                trouble(broker, rng)
                print(f"{time.monotonic() - began:6.1f} s  {before} written, then {broker.name} was {trouble.__name__}")
            send_part(1)
            wait_until_above(MESSAGES - 1)
            query.processAllAvailable()
        finally:
            query.stop()
        check(cluster.messages("second"), began)


def start(spark: Any, cluster: EmbeddedCluster, directory: Path, most_per_batch: int) -> Any:
    """Start a query that writes each message of `first` to `second`; those of one queue stay in order."""
    orders = with_options(
        spark.readStream, cluster, subscribe="first", startingOffsets="earliest", maxOffsetsPerTrigger=most_per_batch
    ).load()
    whence = "concat(brokerName, '-', queueId)"
    rows = orders.selectExpr(f"concat({whence}, ' ', queueOffset) AS body", f"{whence} AS shardingKey")
    checkpoint = str(directory / "checkpoint")
    return with_options(rows.writeStream, cluster, topic="second", checkpointLocation=checkpoint).start()


def check(written: list[Message], began: float) -> None:
    """Check that each message is stored, that marks identify copies, and that the first copies are in order."""
    marks = {message.body: tuple(message.properties[name] for name in MARKS) for message in written}
    copies = Counter(message.body for message in written)
    print(f"{time.monotonic() - began:6.1f} s  {len(copies)} different messages, {copies.total()} in all")
    assert len(copies) == MESSAGES
    assert len(set(marks.values())) == MESSAGES
    for message in written:
        assert tuple(message.properties[name] for name in MARKS) == marks[message.body], "a copy with other marks"
    by_queue: dict[str, dict[int, int]] = {}
    for message in written:
        queue, offset = message.body.decode().split()
        offsets = by_queue.setdefault(queue, {})
        offsets[int(offset)] = min(message.stored_at_ms, offsets.get(int(offset), message.stored_at_ms))
    for offsets in by_queue.values():
        times = [offsets[offset] for offset in sorted(offsets)]
        assert times == sorted(times), "a later one was stored first"
