"""Messages that tests make: one to call a listener with, or many that are stored in a cluster without a producer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count as counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pyrocket_consumer.config import check_int
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import RETRY_PREFIX, MessageQueue
from pyrocket_consumer.protocol.ids import UniqueIds
from pyrocket_consumer.protocol.message import Message, PropertyName, StoredMessage, decode_messages, encode_message
from pyrocket_consumer.testing.config import DEFAULT_TOPIC, Release
from pyrocket_consumer.testing.intake import TIMERS
from pyrocket_consumer.testing.node import Clock, Refused
from pyrocket_consumer.testing.sends import REGION
from pyrocket_consumer.text import safe_repr

if TYPE_CHECKING:
    from pyrocket_consumer.testing.embedded_node import EmbeddedBroker

T = TypeVar("T")

DEFAULT_QUEUES = 4
BORN_HOST = "127.0.0.1:1"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEEDS_OWN_RECORD = {PropertyName.UNIQUE_KEY, PropertyName.DELAY, *TIMERS}

_ids = UniqueIds("127.0.0.1", os.getpid())


def message(
    topic: str = "test",
    body: bytes = b"-",
    *,
    tags: str | None = None,
    keys: Sequence[str] | str = (),
    properties: Mapping[str, str] | None = None,
    queue_offset: int = 0,
    queue: MessageQueue | None = None,
    reconsume_times: int = 0,
    message_id: str | None = None,
    born_at: datetime | None = None,
    stored_at: datetime | None = None,
    born_host: str = "127.0.0.1:1",
    store_host: str = "127.0.0.1:10911",
    flag: int = 0,
) -> Message:
    """Make a message as a listener gets it: `handle(message("orders", b"...", tags="paid"))`.

    The message is decoded from the bytes of a broker's response. By default it is in queue 0 of "broker-a", has a new
    id, was born now and stored at the same time. For a retried message, give a `queue` of the group's retry topic:
    `MessageQueue("%RETRY%orders-app", "broker-a", 0)`.

    Raises:
        ConfigError: a message cannot have one of the values; the text names it.
    """
    if not _check("topic", topic, str):
        raise ConfigError("topic is empty; give it a name")
    if queue is None:
        queue = MessageQueue(topic, "broker-a", 0)
    elif _check("queue", queue, MessageQueue).topic != topic and not queue.topic.startswith(RETRY_PREFIX):
        raise ConfigError(f"queue {queue} is not one of topic {topic!r}, and not one of a retry topic")
    for name, number, least, most in (
        ("queue_offset", queue_offset, 0, 2**63 - 1),
        ("flag", flag, -(2**31), 2**31 - 1),
        ("reconsume_times", reconsume_times, 0, 2**31 - 1),
    ):
        check_int(name, number, least, most)
    for name, host in (("born_host", born_host), ("store_host", store_host)):
        _check(name, host, str)
    written = make_properties(tags, keys or (), properties)
    if topic != queue.topic:
        written[PropertyName.RETRY_TOPIC] = topic
    written[PropertyName.UNIQUE_KEY] = _ids.next() if message_id is None else _check("message_id", message_id, str)
    born = datetime.now(UTC) if born_at is None else born_at
    record = encode_message(
        StoredMessage(
            topic=queue.topic,
            body=check_body(body),
            properties=written,
            queue_id=queue.queue_id,
            queue_offset=queue_offset,
            flag=flag,
            born_at_ms=_ms("born_at", born),
            born_host=born_host,
            stored_at_ms=_ms("stored_at", born if stored_at is None else stored_at),
            store_host=store_host,
            reconsume_times=reconsume_times,
        )
    )
    return decode_messages(record, queue)[0]


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
            config = broker.core.topics.for_send(topic, DEFAULT_TOPIC, DEFAULT_QUEUES)
            if config is not None:
                ids = range(config.write_queues) if queue_id is None else [queue_id]
                found += [_Target(broker, broker.core.queue(topic, its_id)) for its_id in ids]
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
        key = properties.get(PropertyName.UNIQUE_KEY) or core.ids.next()
        try:
            result = core.intake.put(self._message(target, body, {**properties, PropertyName.UNIQUE_KEY: key}, at_ms))
        except Refused as refused:
            raise ConfigError(f"no broker takes this message: {refused.remark}") from refused
        return Sent(target.queue, result.queue_offset, key, core.offset_message_id(result.commit_log_offset))

    def _fill(self, targets: list[_Target], body: bytes, properties: dict[str, str], at_ms: int | None) -> list[Sent]:
        """Store the same body many times, with one call for each queue."""
        numbers: dict[_Target, list[int]] = {}
        for number, target in enumerate(targets):
            numbers.setdefault(target, []).append(number)
        sent: dict[int, Sent] = {}
        for target, its_numbers in numbers.items():
            core = target.broker.core
            keys = [core.ids.next() for _ in its_numbers]
            results = core.intake.store_copies(self._message(target, body, properties, at_ms), keys)
            for number, key, (offset, commit_log_offset) in zip(its_numbers, keys, results, strict=True):
                sent[number] = Sent(target.queue, offset, key, core.offset_message_id(commit_log_offset))
        return [sent[number] for number in range(len(targets))]


def check_body(body: object) -> bytes:
    """Return a body as bytes.

    Raises:
        ConfigError: a message cannot have it.
    """
    if isinstance(body, str):
        raise ConfigError("body is text, and only you know its encoding: pass for example body.encode()")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise ConfigError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}")
    return bytes(body)


def make_properties(
    tags: str | None, keys: Iterable[str] | str, properties: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the properties of a message with these tags, keys and other properties.

    Raises:
        ConfigError: a message cannot have one of them.
    """
    made = {}
    if not isinstance(properties, Mapping | None):
        raise ConfigError(f"properties={safe_repr(properties)} is not allowed; give texts by name")
    for name, value in (properties or {}).items():
        made[_check("property", name, str)] = _check(f"property {name!r}", value, str)
    if tags is not None and _check("tags", tags, str):
        made[PropertyName.TAGS] = tags
    its_keys = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    for key in its_keys:
        _check("keys", key, str)
    if any(its_keys):
        made[PropertyName.KEYS] = " ".join(its_keys)
    return made


def _check(name: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}, not {type(value).__name__} ({safe_repr(value)})")
    return value


def _ms(name: str, at: datetime) -> int:
    if _check(name, at, datetime).tzinfo is None:
        raise ConfigError(f"{name}={at!r} has no time zone; use for example datetime.now(timezone.utc)")
    return (at - _EPOCH) // timedelta(milliseconds=1)
