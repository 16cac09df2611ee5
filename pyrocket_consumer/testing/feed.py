"""Messages that a test stores in an embedded cluster without a producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter
from typing import NamedTuple

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import PropertyName, StoredMessage
from pyrocket_consumer.testing.arguments import check_int
from pyrocket_consumer.testing.broker_state import Refused
from pyrocket_consumer.testing.clock import Clock
from pyrocket_consumer.testing.config import DEFAULT_TOPIC
from pyrocket_consumer.testing.embedded_node import EmbeddedBroker
from pyrocket_consumer.testing.intake import TIMERS
from pyrocket_consumer.testing.release import Release
from pyrocket_consumer.testing.sends import REGION

DEFAULT_QUEUES = 4
BORN_HOST = "127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Sent:
    """A message stored by `EmbeddedCluster.send`. For a delayed one, `queue_offset` is in the system topic."""

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str


class _Target(NamedTuple):
    """The broker and queue that store a message."""

    broker: EmbeddedBroker
    queue: MessageQueue


_NEEDS_OWN_RECORD = {PropertyName.UNIQUE_KEY, PropertyName.DELAY, *TIMERS}


class Feed:
    """Stores messages like sends of a producer, in one queue after the other. Runs on the cluster's thread."""

    def __init__(self, clock: Clock, release: Release, cluster_name: str) -> None:
        self._clock = clock
        self._release = release
        self._cluster_name = cluster_name
        self._round_robin: dict[str, counter[int]] = {}

    def send(
        self,
        brokers: Sequence[EmbeddedBroker],
        topic: str,
        body: bytes | Callable[[int], bytes],
        count: int,
        properties: dict[str, str],
        queue_id: int | None,
        stored_at_ms: int | None,
    ) -> list[Sent]:
        """Store `count` messages at `brokers` and wake the pulls that wait for them.

        Raises:
            ConfigError: the topic does not exist and may not be created.
        """
        targets = self._choose_targets(brokers, topic, queue_id, count)
        alike = not callable(body) and count > 1
        if alike and not properties.keys() & _NEEDS_OWN_RECORD:
            assert isinstance(body, bytes)
            return self._fill(targets, body, properties, stored_at_ms)
        bodies = body if callable(body) else lambda number: body
        return [
            self._put(target, check_body(bodies(number)), properties, stored_at_ms)
            for number, target in enumerate(targets)
        ]

    def _choose_targets(
        self, brokers: Sequence[EmbeddedBroker], topic: str, queue_id: int | None, count: int
    ) -> list[_Target]:
        """Return the target of each of `count` messages."""
        found = []
        for broker in brokers:
            config = broker.core.state.topics.for_send(topic, DEFAULT_TOPIC, DEFAULT_QUEUES)
            if config is not None:
                ids = range(config.write_queues) if queue_id is None else [queue_id]
                found += [_Target(broker, MessageQueue(topic, broker.name, its_id)) for its_id in ids]
        if not found:
            raise ConfigError(f"topic {topic!r} does not exist and may not be created on demand; call create_topic")
        round_robin = self._round_robin.setdefault(topic, counter())
        return [found[next(round_robin) % len(found)] for _ in range(count)]

    def _message(self, target: _Target, body: bytes, properties: dict[str, str], at_ms: int | None) -> StoredMessage:
        now_ms = self._clock.now_ms() if at_ms is None else at_ms
        complete = {**properties, PropertyName.CLUSTER: self._cluster_name}
        if self._release.adds_own_properties:
            complete.update(
                {PropertyName.MESSAGE_REGION: REGION, PropertyName.TRACE_ON: "true", PropertyName.WAIT: "true"}
            )
        return StoredMessage(
            topic=target.queue.topic,
            body=body,
            properties=complete,
            queue_id=target.queue.queue_id,
            born_at_ms=now_ms,
            born_host=BORN_HOST,
            stored_at_ms=now_ms,
            store_host=target.broker.address,
        )

    def _put(self, target: _Target, body: bytes, properties: dict[str, str], at_ms: int | None) -> Sent:
        core = target.broker.core
        key = properties.get(PropertyName.UNIQUE_KEY) or core.state.ids.next()
        try:
            result = core.intake.put(self._message(target, body, {**properties, PropertyName.UNIQUE_KEY: key}, at_ms))
        except Refused as refused:
            raise ConfigError(f"no broker takes this message: {refused.remark}") from refused
        return Sent(target.queue, result.queue_offset, key, core.state.offset_message_id(result.commit_log_offset))

    def _fill(self, targets: list[_Target], body: bytes, properties: dict[str, str], at_ms: int | None) -> list[Sent]:
        """Store the same body many times, with one call for each queue."""
        numbers: dict[_Target, list[int]] = {}
        for number, target in enumerate(targets):
            numbers.setdefault(target, []).append(number)
        sent: dict[int, Sent] = {}
        for target, its_numbers in numbers.items():
            core = target.broker.core
            keys = [core.state.ids.next() for _ in its_numbers]
            results = core.intake.store_copies(self._message(target, body, properties, at_ms), keys)
            for number, key, (offset, commit_log_offset) in zip(its_numbers, keys, results, strict=True):
                sent[number] = Sent(target.queue, offset, key, core.state.offset_message_id(commit_log_offset))
        return [sent[number] for number in range(len(targets))]


def check_body(body: object) -> bytes:
    """Return `body` if a message can have it.

    Raises:
        ConfigError: `body` is not bytes.
    """
    if not isinstance(body, bytes):
        raise ConfigError(f"body={body!r:.80} is not allowed; give bytes (a text's are text.encode())")
    return body


def make_properties(
    tags: str | None, keys: Iterable[str], properties: Mapping[str, str] | None, delay_level: int
) -> dict[str, str]:
    """Return the properties of a message with these tags, keys, properties and delay level.

    Raises:
        ConfigError: a message cannot have one of them.
    """
    if tags is not None and not isinstance(tags, str):
        raise ConfigError(f"tags={tags!r} is not allowed; give one tag, a text")
    its_keys = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    if not all(isinstance(key, str) for key in its_keys):
        raise ConfigError(f"keys={keys!r} is not allowed; give a list of texts")
    if not isinstance(properties, Mapping | None) or not all(
        isinstance(part, str) for item in (properties or {}).items() for part in item
    ):
        raise ConfigError(f"properties={properties!r} is not allowed; give texts by name")
    check_int("delay_level", delay_level, 0, 2**31 - 1)
    wanted = dict(properties or {})
    if tags:
        wanted[PropertyName.TAGS] = tags
    if any(its_keys):
        wanted[PropertyName.KEYS] = " ".join(its_keys)
    if delay_level:
        wanted[PropertyName.DELAY] = str(delay_level)
    return wanted
