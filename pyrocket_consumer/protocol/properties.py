"""The properties text of a message: `name 01 value 02 name 01 value 02 …`. Source: MessageDecoder, MessageConst."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from pyrocket_consumer.errors import ConfigError

MAX_PROPERTIES_BYTES = 32_767

_NAME_END = "\x01"
_ITEM_END = "\x02"


class PropertyName:
    """Names that RocketMQ reserves. Source: MessageConst."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    WAIT = "WAIT"
    DELAY = "DELAY"
    RETRY_TOPIC = "RETRY_TOPIC"
    REAL_TOPIC = "REAL_TOPIC"
    REAL_QUEUE_ID = "REAL_QID"
    TRANSACTION_PREPARED = "TRAN_MSG"
    PRODUCER_GROUP = "PGROUP"
    MIN_OFFSET = "MIN_OFFSET"
    MAX_OFFSET = "MAX_OFFSET"
    BUYER_ID = "BUYER_ID"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    TRANSFER_FLAG = "TRANSFER_FLAG"
    CORRECTION_FLAG = "CORRECTION_FLAG"
    MQ2_FLAG = "MQ2_FLAG"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    MESSAGE_REGION = "MSG_REGION"
    TRACE_ON = "TRACE_ON"
    UNIQUE_KEY = "UNIQ_KEY"
    EXTEND_UNIQUE_INFO = "EXTEND_UNIQ_INFO"
    CONSUME_START_TIME = "CONSUME_START_TIME"
    INNER_NUM = "INNER_NUM"
    INNER_BASE = "INNER_BASE"
    DUPLICATION_INFO = "DUP_INFO"
    CHECK_IMMUNITY_TIME_IN_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
    TRANSACTION_ID = "__transactionId__"
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
    INSTANCE_ID = "INSTANCE_ID"
    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    ARRIVE_TIME = "ARRIVE_TIME"
    PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
    MESSAGE_TYPE = "MSG_TYPE"
    CLUSTER = "CLUSTER"
    POP_CK = "POP_CK"
    POP_CK_OFFSET = "POP_CK_OFFSET"
    FIRST_POP_TIME = "1ST_POP_TIME"
    SHARDING_KEY = "__SHARDINGKEY"
    FORWARD_QUEUE_ID = "PROPERTY_FORWARD_QUEUE_ID"
    REDIRECT = "REDIRECT"
    INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
    TRACE_CONTEXT = "TRACE_CONTEXT"
    TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
    TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
    TIMER_OUT_MS = "TIMER_OUT_MS"
    TIMER_DELETE_UNIQUE_KEY = "TIMER_DEL_UNIQKEY"
    TIMER_DELAY_LEVEL = "TIMER_DELAY_LEVEL"
    BORN_HOST = "__BORNHOST"
    BORN_TIMESTAMP = "BORN_TIMESTAMP"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
    CRC32 = "__CRC32#"


def encode_properties(properties: Mapping[str, str]) -> str:
    """Return the text of `properties`, as send requests, batch items and stored records contain it.

    Raises:
        ConfigError: a name or value contains one of the two separators, or a name is empty. An empty value is written,
            but readers ignore it, so do not send one.
    Source: MessageDecoder.messageProperties2String.
    """
    items = [f"{name}{_NAME_END}{value}{_ITEM_END}" for name, value in properties.items()]
    text = "".join(items)
    if not text.count(_NAME_END) == text.count(_ITEM_END) == len(items) or "" in properties:
        for name, item in zip(properties, items, strict=True):
            if not name or item.count(_NAME_END) != 1 or item.count(_ITEM_END) != 1:
                raise ConfigError(
                    f"property {name!r}: a name must not be empty, and neither name nor value may contain the "
                    "characters \\x01 and \\x02, which separate properties"
                )
    return text


def decode_properties(text: bytes | str) -> dict[str, str]:
    r"""Return the properties in `text`; a name that occurs twice has its last value.

    It raises nothing. It skips items without a name, a value or a separator; a second \x01 belongs to the value. Bytes
    that are not UTF-8 become U+FFFD. Source: MessageDecoder.string2messageProperties.
    """
    if not isinstance(text, str):
        text = text.decode("utf-8", "replace")
    properties = {}
    for item in text.split(_ITEM_END):  # measured: faster than matching both separators at once
        name, _, value = item.partition(_NAME_END)
        if name and value:
            properties[name] = value
    return properties


def first_property(data: bytes, name: str) -> bytes | None:
    """Return the first value of `name` in the text `data`, None if absent. All other functions use the last value."""
    wanted = name.encode()
    for item in data.split(b"\x02"):
        found, _, value = item.partition(b"\x01")
        if found == wanted and value:
            return value
    return None


def find_property(data: bytes, start: int, end: int, name: str) -> bytes | None:
    """Return the value of `name` in the properties text `data[start:end]`, None if absent, without reading the rest.

    It always returns the bytes of the value that `decode_properties` returns.
    """
    item_start = _item_start(name)
    if item_start is None:
        value_text = decode_properties(data[start:end]).get(name)
        return value_text.encode() if value_text is not None else None
    found = data.rfind(item_start, start, end)
    if found >= 0:
        value = found + len(item_start)
    elif data.startswith(item_start[1:], start, end):  # the first item has no separator before it
        value = start + len(item_start) - 1
    else:
        return None
    value_end = data.find(2, value, end)
    if value_end < 0:
        value_end = end
    if value_end == value:  # an empty value does not count; an earlier item of that name does
        item = _last_with_value(name).match(data, start, end) or _first_with_value(name).match(data, start, end)
        if item is None:
            return None
        value, value_end = item.span(1)
    return data[value:value_end]


@lru_cache(maxsize=256)
def _last_with_value(name: str) -> re.Pattern[bytes]:
    """Return a pattern that matches a text up to its last item `name` with a value, unless it is the first item."""
    return re.compile(rb"(?s:.*)\x02" + re.escape(name.encode()) + rb"\x01([^\x02]+)")


@lru_cache(maxsize=256)
def _first_with_value(name: str) -> re.Pattern[bytes]:
    """Return a pattern that matches a text whose first item is `name` with a value."""
    return re.compile(re.escape(name.encode()) + rb"\x01([^\x02]+)")


@lru_cache(maxsize=256)
def _item_start(name: str) -> bytes | None:
    """Return the bytes at the start of an item `name` after another item, None if the bytes are ambiguous."""
    if not isinstance(name, str):
        raise TypeError(f"a property's name is a str, not {type(name)!r}")
    if not name or _NAME_END in name or _ITEM_END in name or "\ufffd" in name:
        return None
    try:
        return b"\x02%b\x01" % name.encode()
    except UnicodeEncodeError:
        return None


def encoded_properties(properties: Mapping[str, str] | str) -> bytes:
    """Return the bytes of `properties`; text is used unchanged.

    Raises:
        ConfigError: more than 32,767 bytes; a broker refuses them. Make names and values shorter.
    """
    text = properties if isinstance(properties, str) else encode_properties(properties)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a property holds half of a surrogate pair, which UTF-8 cannot write: {error}") from error
    if len(encoded) > MAX_PROPERTIES_BYTES:
        raise ConfigError(f"{len(encoded)} bytes of properties; {MAX_PROPERTIES_BYTES} are allowed")
    return encoded
