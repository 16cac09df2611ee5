"""Consumers, resets and their records for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pyrocket_consumer import Admin, MessageQueue, PushConsumer
from pyrocket_consumer.protocol.codes import CLIENT_VERSION, RequestCode
from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, RemotingCommand
from pyrocket_consumer.protocol.reset_format import record_areas, topic_digest
from pyrocket_consumer.testing import EmbeddedBroker
from tests.consuming import RecordingListener, consuming, numbered, until


def fill(cluster: Any, topic: str, count: int, start: int = 0, *, queues: int = 0, **where: Any) -> list[bytes]:
    """Send numbered messages, and return their bodies. With `queues`, create the topic first."""
    if queues:
        cluster.create_topic(topic, queues=queues)
    bodies = numbered(count, start)
    for body in bodies:
        cluster.send(topic, body, **where)
    return bodies


@contextmanager
def caught_up(
    cluster: Any, topic: str, group: str, count: int, *, queues: int = 0, **options: Any
) -> Iterator[tuple[PushConsumer, RecordingListener]]:
    """Fill a topic, and run a consumer that has received each message once."""
    fill(cluster, topic, count, queues=queues)
    with consuming(cluster, topic, group, **options) as (consumer, seen):
        wait_until_seen(seen, 1, count)
        yield consumer, seen


def queue(topic: str, queue_id: int, broker_name: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker_name, queue_id)


def seen_times(seen: RecordingListener, times: int, count: int) -> bool:
    """Return whether each of `count` messages was delivered `times` times."""
    return len(seen.counts) == count and set(seen.counts.values()) == {times}


def wait_until_seen(seen: RecordingListener, times: int, count: int) -> None:
    """Wait until each of `count` messages was delivered exactly `times` times."""
    seen.wait(lambda seen: len(seen.messages) >= times * count)
    assert seen_times(seen, times, count), seen.counts


def consumed_before(cluster: Any, topic: str, group: str, count: int, **options: Any) -> None:
    """Fill a topic, and let a consumer of the group consume all of it and leave."""
    with caught_up(cluster, topic, group, count, **options):
        pass
    until(lambda: cluster.members(group) == [], "it has left")


@contextmanager
def members(
    cluster: Any,
    topic: str,
    group: str,
    names: Iterable[str],
    listener: RecordingListener | None = None,
    **options: Any,
) -> Iterator[list[tuple[PushConsumer, RecordingListener]]]:
    """Run a consumer of each name."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(consuming(cluster, topic, group, listener, instance_name=name, **options))
            for name in names
        ]


def held(consumer: PushConsumer, topic: str) -> list[MessageQueue]:
    """Return the queues of `topic` that a consumer holds."""
    return [each for each in consumer.progress() if each.topic == topic]


def send_reset_to_members(broker: EmbeddedBroker, group: str, topic: str, body: bytes) -> None:
    """Send RESET_CONSUMER_CLIENT_OFFSET from an embedded broker to every member, with any body."""
    fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true"}
    code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    order = RemotingCommand(code, fields, body, flag=ONEWAY_FLAG, language="JAVA", version=CLIENT_VERSION)

    def send() -> None:
        for member in broker.core.members.group(group).members.values():
            member.connection.oneway(order)

    broker.cluster.call(send)


def wait_until_stored(consumer: PushConsumer, topic: str, total: int) -> None:
    """Wait until the sum of the member's stored offsets of `topic` is `total`."""

    def stored() -> int:
        return sum(each.persisted or 0 for queue, each in consumer.progress().items() if queue.topic == topic)

    until(lambda: stored() == total, f"{total} stored")


def reset(admin: Admin, group: str, topic: str, to: Any, **options: Any) -> Any:
    """Plan a reset and execute it."""
    return admin.plan_reset(group, topic, to, **options).execute()


def record(broker: EmbeddedBroker, epoch: int, targets: dict[int, int]) -> None:
    """Write the record of a reset of T for the group G, as an admin does."""
    area = next(record_areas("T"))
    slots = {area.name: topic_digest("T"), area.head: epoch}
    for queue_id, target in targets.items():
        slots |= {area.target(queue_id): target + 1, area.epoch(queue_id): epoch}
    broker.commit("G", "%RETRY%G", slots)
