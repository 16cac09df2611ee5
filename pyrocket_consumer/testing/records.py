"""Records of a broker's store: written once, and read again to send back, delay or commit the message."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from pyrocket_consumer.protocol.message import (
    StoredMessage,
    decode_messages,
    decode_properties,
    encode_message,
    encode_properties,
)
from pyrocket_consumer.testing.release import Release

_BODY_AT = 88  # both hosts are IPv4
_BODY_LENGTH = struct.Struct(">I")


def properties_text(properties: Mapping[str, str] | str, release: Release) -> str:
    """Return properties as a broker of `release` writes them; return a text unchanged."""
    if isinstance(properties, str):
        return properties
    text = encode_properties(properties)
    return text if release.ends_properties or not text else text[:-1]


def properties_of(message: StoredMessage) -> dict[str, str]:
    """Return a copy of a message's properties."""
    properties = message.properties
    return decode_properties(properties) if isinstance(properties, str) else dict(properties)


def write_record(message: StoredMessage) -> bytearray:
    """Return the record of `message`. The store fills in its offsets."""
    return bytearray(encode_message(message))


def read_record(record: bytes) -> StoredMessage:
    """Return the fields of a stored record, with the body as it was stored."""
    message = decode_messages(record)[0]
    (length,) = _BODY_LENGTH.unpack_from(record, _BODY_AT - _BODY_LENGTH.size)
    return StoredMessage(
        topic=message.queue.topic,
        body=record[_BODY_AT : _BODY_AT + length],
        properties=dict(message.properties),
        queue_id=message.queue.queue_id,
        queue_offset=message.queue_offset,
        commit_log_offset=message.commit_log_offset,
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_at_ms=message.born_at_ms,
        born_host=message.born_host,
        stored_at_ms=message.stored_at_ms,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
