"""Single messages for unit tests of listeners."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import RETRY_PREFIX, MessageQueue
from pyrocket_consumer.protocol.ids import UniqueIds
from pyrocket_consumer.protocol.message import Message, PropertyName, StoredMessage, decode_messages, encode_message
from pyrocket_consumer.text import safe_repr

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

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
    _check("topic", topic, str)
    if not topic:
        raise ConfigError("topic is empty; give it a name")
    if queue is None:
        queue = MessageQueue(topic, "broker-a", 0)
    elif _check("queue", queue, MessageQueue).topic != topic and not queue.topic.startswith(RETRY_PREFIX):
        raise ConfigError(f"queue {queue} is not one of topic {topic!r}, and not one of a retry topic")
    born = datetime.now(UTC) if born_at is None else born_at
    record = encode_message(
        StoredMessage(
            topic=queue.topic,
            body=_body(body),
            properties=_written(topic, queue, tags, keys, properties, message_id),
            queue_id=queue.queue_id,
            queue_offset=_within("queue_offset", queue_offset, 0, 2**63 - 1),
            flag=_within("flag", flag, -(2**31), 2**31 - 1),
            born_at_ms=_ms("born_at", born),
            born_host=born_host,
            stored_at_ms=_ms("stored_at", born if stored_at is None else stored_at),
            store_host=store_host,
            reconsume_times=_within("reconsume_times", reconsume_times, 0, 2**31 - 1),
        )
    )
    return decode_messages(record, queue)[0]


def _body(body: object) -> bytes:
    if isinstance(body, str):
        raise ConfigError("body is text, and only you know its encoding: pass for example body.encode()")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise ConfigError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}")
    return bytes(body)


def _written(
    topic: str,
    queue: MessageQueue,
    tags: str | None,
    keys: Sequence[str] | str,
    properties: Mapping[str, str] | None,
    message_id: str | None,
) -> dict[str, str]:
    """Return all properties as a broker stores them."""
    written = {name: _check(f"property {name!r}", value, str) for name, value in (properties or {}).items()}
    if tags is not None:
        written[PropertyName.TAGS] = _check("tags", tags, str)
    if keys:
        chosen = [keys] if isinstance(keys, str) else keys
        written[PropertyName.KEYS] = " ".join(_check("keys", key, str) for key in chosen)
    if topic != queue.topic:
        written[PropertyName.RETRY_TOPIC] = topic
    written[PropertyName.UNIQUE_KEY] = _ids.next() if message_id is None else _check("message_id", message_id, str)
    return written


def _check(name: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}, not {type(value).__name__} ({safe_repr(value)})")
    return value


def _within(name: str, number: object, least: int, most: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ConfigError(f"{name}={number!r} is not allowed; it must be a whole number from {least} to {most}")
    return number


def _ms(name: str, at: datetime) -> int:
    if _check(name, at, datetime).tzinfo is None:
        raise ConfigError(f"{name}={at!r} has no time zone; use for example datetime.now(timezone.utc)")
    return (at - _EPOCH) // timedelta(milliseconds=1)
