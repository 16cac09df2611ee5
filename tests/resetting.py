"""What tests of resets share."""

from __future__ import annotations

from typing import Any

from pyrocket_consumer import Admin, MessageQueue, PushConsumer
from tests.consuming import Seen, numbered, until


def fill(cluster: Any, topic: str, count: int, start: int = 0) -> None:
    for body in numbered(count, start):
        cluster.send(topic, body)


def queue(topic: str, queue_id: int, broker_name: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker_name, queue_id)


def seen_times(seen: Seen, times: int, count: int) -> bool:
    """Whether each of `count` places was seen `times` times."""
    return len(seen.places) == count and set(seen.places.values()) == {times}


def wait_until_seen(seen: Seen, times: int, count: int) -> None:
    """Wait until each of `count` places was seen exactly `times` times."""
    seen.wait(lambda seen: len(seen.messages) >= times * count)
    assert seen_times(seen, times, count), seen.places


def wait_until_stored(consumer: PushConsumer, topic: str, total: int) -> None:
    """Wait until what the member has stored of `topic` sums up to `total`."""

    def stored() -> int:
        return sum(each.persisted or 0 for queue, each in consumer.progress().items() if queue.topic == topic)

    until(lambda: stored() == total, f"{total} stored")


def reset(admin: Admin, group: str, topic: str, to: Any, **options: Any) -> Any:
    """Plan a reset and do it."""
    return admin.plan_reset(group, topic, to, **options).execute()
