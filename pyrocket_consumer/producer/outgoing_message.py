"""Messages to send. Arguments are checked at once, so that an error appears where the mistake was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeGuard

from pyrocket_consumer.config import check_int, check_topic
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.message import BatchItem
from pyrocket_consumer.protocol.properties import MAX_PROPERTIES_BYTES, PropertyName
from pyrocket_consumer.text import safe_repr

MAX_DELAY_LEVEL = 18
"""The last level of a broker's default table (2 h)."""

MAX_BATCH_MESSAGES = 10_000
"""The largest number of messages in one request.

Brokers from 5.0 on count them in a signed 16-bit number. After a batch of 32,768 the next messages of the queue get
duplicate or negative offsets. They are never delivered (observed on 5.1.4, 5.3.3 and 5.5.0). The limit is lower,
because the response has 32 characters for each message.
"""

_ITEM_BYTES = 22  # of a batch item, without its body and properties

_ARGUMENT_FOR = {
    PropertyName.TAGS: "tags",
    PropertyName.KEYS: "keys",
    PropertyName.DELAY: "delay_level",
    PropertyName.TIMER_DELIVER_MS: "deliver_at",
    PropertyName.SHARDING_KEY: "sharding_key",
}

# Properties that an application may set, although RocketMQ defines their names.
_SETTABLE_PROPERTIES = {PropertyName.CHECK_IMMUNITY_TIME_IN_SECONDS, PropertyName.TRACE_CONTEXT}

RESERVED_PROPERTIES = frozenset(
    value for name, value in vars(PropertyName).items() if name.isupper() and value not in _SETTABLE_PROPERTIES
)
"""Property names that a message to send may not have, because clients and brokers write them. A value would be lost, or
the broker would act on it. Remove these properties before you resend a consumed message.

Source: MessageConst."""

TRANSIENT_PREFIX = "__RMQ.TRANSIENT."
"""The prefix of property names that brokers use internally and never store. A message to send may not have one."""

# Source: TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET.
_BROKER_TOPICS = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to send in a batch or in a transaction.

    `tags` is one tag; `keys` are for searches; `flag` is a number for the application. Only a transaction
    needs `topic`; in a batch it is the topic of the batch.

    Raises:
        ConfigError: a value is not allowed; the text contains the value and the reason.
    """

    body: bytes
    tags: str | None = None
    keys: Sequence[str] | str = ()
    properties: Mapping[str, str] | None = None
    flag: int = 0
    topic: str | None = None

    def __post_init__(self) -> None:
        if type(self.body) is not bytes or not self.body:
            object.__setattr__(self, "body", check_body(self.body))
        if type(self.keys) is not tuple or self.keys:
            object.__setattr__(self, "keys", _check_keys(self.keys))
        if self.tags is not None:
            _check_tag(self.tags)
        if self.properties is not None:
            _check_properties(self.properties)
        check_int("flag", self.flag, -(2**31), 2**31 - 1)
        if self.topic is not None:
            check_send_topic(self.topic)

    def travelling_properties(self) -> dict[str, str]:
        """Return the properties as they are sent, with tag and keys."""
        written = dict(self.properties) if self.properties else {}
        if self.keys:
            written[PropertyName.KEYS] = " ".join(self.keys)
        if self.tags is not None:
            written[PropertyName.TAGS] = self.tags
        return written


class BatchMessage(NamedTuple):
    """An encoded message of a batch, and the id that consumers will see."""

    item: BatchItem
    message_id: str


def split_batch(messages: Sequence[BatchMessage], max_bytes: int) -> Iterator[Sequence[BatchMessage]]:
    """Yield `messages` in as few parts as fit into requests of `max_bytes`.

    Raises:
        ConfigError: a message alone is larger than `max_bytes`.
    """
    first = size = 0
    for number, (item, _) in enumerate(messages):
        assert isinstance(item.properties, str)
        item_bytes = _ITEM_BYTES + len(item.body) + len(item.properties.encode())
        if item_bytes > max_bytes:
            raise ConfigError(
                f"message {number} of the batch, {len(item.body)} bytes, takes {item_bytes} of {max_bytes} bytes "
                "(max_message_bytes) in a batch; send it by itself"
            )
        if size + item_bytes > max_bytes or number - first == MAX_BATCH_MESSAGES:
            yield messages[first:number]
            first, size = number, 0
        size += item_bytes
    if first < len(messages):
        yield messages[first:]


def check_send_topic(topic: object) -> str:
    """Return `topic` if messages may be sent to it.

    Raises:
        ConfigError: the name is not allowed, or the topic is internal to brokers.
    """
    name = check_topic(topic)
    if name in _BROKER_TOPICS:
        raise ConfigError(f"topic {name!r} belongs to the broker; send to a topic of your own")
    return name


def check_body(body: object) -> bytes:
    """Return `body` as bytes.

    Raises:
        ConfigError: the body is text, not bytes-like, or empty.
    """
    if isinstance(body, str):
        raise ConfigError("body is text, and only you know its encoding: pass for example body.encode()")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise ConfigError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}")
    whole = bytes(body)
    if not whole:
        raise ConfigError("body is empty, and brokers from 5.0 on refuse that; send at least one byte")
    return whole


def check_size(body_bytes: int, max_message_bytes: int) -> None:
    """Raise ConfigError if a body is larger than `max_message_bytes`."""
    if body_bytes > max_message_bytes:
        raise ConfigError(
            f"body of {body_bytes} bytes is more than max_message_bytes={max_message_bytes}; "
            "send it in parts, or raise that option and the broker's maxMessageSize"
        )


def check_delivery(delay_level: int, deliver_at: datetime | None) -> dict[str, str]:
    """Return the properties for a later delivery, or an empty dict for immediate delivery.

    Raises:
        ConfigError: the level is not 0 to 18, the time has no time zone, or both are set.
    """
    check_int("delay_level", delay_level, 0, MAX_DELAY_LEVEL)
    if deliver_at is None:
        return {PropertyName.DELAY: str(delay_level)} if delay_level else {}
    if delay_level:
        raise ConfigError("delay_level and deliver_at exclude each other; give one of them")
    if not isinstance(deliver_at, datetime):
        raise ConfigError(f"deliver_at must be a datetime with a time zone, not {type(deliver_at).__name__}")
    if deliver_at.tzinfo is None:
        raise ConfigError(
            f"deliver_at={deliver_at!r} has no time zone; use for example datetime.now(timezone.utc) + timedelta(…)"
        )
    return {PropertyName.TIMER_DELIVER_MS: str(round(deliver_at.timestamp() * 1000))}


def check_sharding_key(key: object) -> None:
    """Raise ConfigError if the key is not text, is empty, or contains a separator of properties."""
    if not _is_plain_word(key):
        _check_text("sharding_key", key)


def check_properties_size(text: str) -> None:
    """Raise ConfigError if the encoded properties are larger than a request allows."""
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_PROPERTIES_BYTES:
        raise ConfigError(
            f"properties take {size} bytes with names and separators; at most {MAX_PROPERTIES_BYTES} are allowed; "
            "put large values into the body"
        )


def _check_tag(tag: object) -> None:
    if _is_plain_word(tag) and "|" not in tag:
        return
    _check_text("tags", tag)
    assert isinstance(tag, str)
    if "||" in tag or tag != tag.strip():
        raise ConfigError(
            f"tags={tag!r} could not be subscribed to: a message has one tag, without '||' and spaces around it"
        )


def _check_keys(keys: object) -> tuple[str, ...]:
    if isinstance(keys, str):
        keys = (keys,)
    # The check against concrete types is much faster than the one against the abstract class.
    if not isinstance(keys, (tuple, list)) and (not isinstance(keys, Sequence) or isinstance(keys, (bytes, bytearray))):
        raise ConfigError(f"keys must be a text or a sequence of texts, not {type(keys).__name__}")
    for key in keys:
        if _is_plain_word(key):
            continue
        _check_text("a key", key)
        if key.split() != [key]:
            raise ConfigError(f"key {key!r} holds white space, which separates keys; replace it")
    return tuple(keys)


def _check_properties(properties: object) -> None:
    # The check against dict is much faster than the one against the abstract class.
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise ConfigError(f"properties must be a mapping of text to text, not {type(properties).__name__}")
    if _are_all_plain(properties):
        return
    for name, value in properties.items():
        _check_text("a property's name", name)
        if name in RESERVED_PROPERTIES or name.startswith(TRANSIENT_PREFIX):
            argument = _ARGUMENT_FOR.get(name)
            remedy = f"use the argument {argument}=" if argument else "choose another name"
            raise ConfigError(f"property name {name!r} is reserved by RocketMQ; {remedy}")
        _check_text(f"property {name!r}", value)


def _are_all_plain(properties: Mapping[object, object]) -> bool:
    """Return quickly whether all names and values are valid. False means that each must be checked."""
    texts = [*properties, *properties.values()]
    try:
        whole = "".join(texts)  # type: ignore[arg-type]
    except TypeError:
        return False
    return (
        all(texts)
        and whole.isascii()
        and whole.isprintable()  # the separators are not
        and TRANSIENT_PREFIX not in whole
        and RESERVED_PROPERTIES.isdisjoint(properties)
    )


def _is_plain_word(text: object) -> TypeGuard[str]:
    """Return quickly whether `text` is valid everywhere. False means that it must be checked in detail."""
    return type(text) is str and text.isascii() and text.isprintable() and text != "" and " " not in text


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be text, not {type(value).__name__} ({safe_repr(value)})")
    if not value:
        raise ConfigError(f"{what} is empty, and brokers would drop it; leave it out")
    if "\x01" in value or "\x02" in value:
        raise ConfigError(f"{what} holds \\x01 or \\x02, which separate properties in a request: {safe_repr(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{what} cannot be encoded in UTF-8: {safe_repr(value)}") from error
