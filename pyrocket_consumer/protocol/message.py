"""Stored messages: the records in the body of a pull response, read lazily, and the batches that producers send.

Source: MessageDecoder, MessageExtEncoder, MessageSysFlag, MessageVersion.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pyrocket_consumer.errors import ConfigError, ProtocolError, RocketError
from pyrocket_consumer.model import RETRY_PREFIX, MessageQueue
from pyrocket_consumer.protocol.accelerator import Record, decode_records, make_record
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.compression import (
    MAX_BODY_BYTES,
    BodyTooLarge,
    Compression,
    compress,
    decompress,
    decompressed_size,
    max_decompressed_size,
)
from pyrocket_consumer.protocol.ids import (
    UniqueIds,
    decode_host,
    encode_host,
    offset_message_id,
    parse_offset_message_id,
)
from pyrocket_consumer.protocol.properties import (
    PropertyName,
    decode_properties,
    encode_properties,
    encoded_properties,
    find_property,
    first_property,
)
from pyrocket_consumer.protocol.record import MAGIC_V1, MIN_RECORD_BYTES, RECORD_HEAD

__all__ = [
    "BatchItem",
    "Compression",
    "Message",
    "PropertyName",
    "StoredMessage",
    "UniqueIds",
    "body_crc",
    "compress",
    "decode_batch",
    "decode_messages",
    "decode_properties",
    "decompress",
    "encode_batch",
    "encode_message",
    "encode_properties",
    "offset_message_id",
    "parse_offset_message_id",
]

_MAGIC_V2 = 0xDAA320AB  # of a record whose topic has its length in two bytes: topics longer than 127 bytes
_V1_BYTE = MAGIC_V1 & 0xFF

# The fields before the body, by the host bits of sysFlag: total size, magic, body CRC, queue id, flag, queue offset,
# commit log offset, sysFlag. Then born at, born host, stored at, store host, reconsume times, prepared transaction
# offset, body length.
_FIXED = {
    born_v6 | store_v6: struct.Struct(f">IIIiiqqiq{20 if born_v6 else 8}sq{20 if store_v6 else 8}siqI")
    for born_v6 in (0, SysFlag.BORN_HOST_V6)
    for store_v6 in (0, SysFlag.STORE_HOST_V6)
}
_LIMIT_INDEX = 15  # the index after these fields, which has the BodyLimit of a message with a compressed body
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_UNPACK = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
_PACKED = SysFlag.COMPRESSED | _UNPACK

_U16 = struct.Struct(">H")
_BATCH_ITEM = struct.Struct(">IIIiI")  # item size, magic 0, CRC 0, flag, body length

_LAST_OFFSET = 2**63 - 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


MAX_RECORDS = 1024
"""The most records of a pull response, which is also the most that a pull may request."""

_CHUNK_BYTES = 64 * 1024
"""The number of records is checked after this many bytes, because a check for each record is slower."""


class BodyLimit:
    """The limit of decompressed bodies: a body of more than `max_bytes` is too large."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_bytes = max_bytes
        self.any_compressed = False
        """Whether any message has had a compressed body so far."""


_DEFAULT_BODY_LIMIT = BodyLimit()

Unpack = Callable[["Message"], Iterable["Message"]]
"""Returns the messages that replace an inner batch."""


class Message(Record):
    """One message of a queue, as its broker stored it. Attributes are decoded from the record on first use.

    `decode_messages` creates it. It is read-only, and equal only to itself. Access to a damaged part of the record
    raises ProtocolError. A message keeps the whole pull response in memory, so `detach()` one before you keep it for
    long. To read a single property, use `property(name)`.
    """

    __slots__ = ()

    @property
    def queue(self) -> MessageQueue:
        """The queue from which it was pulled. For a retried message that is a queue of the group's retry topic."""
        queue = self._queue
        if queue is None:  # not from a pull; the record does not contain the name of the broker
            queue = self._queue = MessageQueue(self._record_topic(), "", self._fields()[3])
        return queue

    @property
    def topic(self) -> str:
        """The topic to which it was sent; for a retried message the original one."""
        topic = self.queue.topic
        if topic.startswith(RETRY_PREFIX):
            return self.property(PropertyName.RETRY_TOPIC) or topic
        return topic

    def _unpack_body(self, stored: bytes) -> bytes:
        flag, limit = self.sys_flag, self._limit_or_error()
        if isinstance(limit, ProtocolError):
            raise _copy_error(limit)
        # The items of an inner batch have its sysFlag, but only the batch as a whole was compressed.
        if not flag & SysFlag.COMPRESSED or flag & _UNPACK == _UNPACK:
            return stored
        try:
            return decompress(stored, flag, limit.max_bytes)
        except BodyTooLarge as error:
            self._mark_unreadable(error)
            raise

    @property
    def is_too_large(self) -> bool:
        """Whether its body was read and is larger than `max_body_bytes`, so that it can never be read."""
        return isinstance(self._limit_or_error(), BodyTooLarge)

    @property
    def tags(self) -> str | None:
        """The tag, None without one."""
        return self.property(PropertyName.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The index keys."""
        keys = self.property(PropertyName.KEYS)
        return tuple(key for key in keys.split(" ") if key) if keys else ()

    @property
    def message_id(self) -> str:
        """The id that its producer gave it (UNIQ_KEY), else the offset message id.

        It is not unique. A message sent twice keeps it, and brokers 5.1 and 5.3 give all items of a Java batch the
        same one.
        """
        return self.property(PropertyName.UNIQUE_KEY) or self.offset_message_id

    @property
    def producer_id(self) -> str | None:
        """The id that its producer gave this message, None without one. Copies of a message sent twice have the same.

        Some brokers add the batch's id to the items of a batch. Then `message_id` is that of the batch.
        """
        start = self._properties_start()
        value = first_property(self._data[start : self._end], PropertyName.UNIQUE_KEY)
        return value.decode("utf-8", "replace") if value is not None else None

    @property
    def offset_message_id(self) -> str:
        """The id of its location: the broker's address and the offset in its commit log."""
        fields = self._fields()
        return f"{fields[11].hex()}{fields[6] & 0xFFFFFFFFFFFFFFFF:016x}".upper()

    @property
    def born_at(self) -> datetime:
        """When its producer sent it, by the producer's clock."""
        return _datetime(self._fields()[8])

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it, by the broker's clock."""
        return _datetime(self._fields()[10])

    @property
    def born_at_ms(self) -> int:
        """When its producer sent it, in milliseconds since the epoch."""
        born_at_ms: int = self._fields()[8]
        return born_at_ms

    @property
    def stored_at_ms(self) -> int:
        """When the broker stored it, in milliseconds since the epoch."""
        stored_at_ms: int = self._fields()[10]
        return stored_at_ms

    @property
    def born_host(self) -> str:
        """The producer's "ip:port", as seen by its broker."""
        return decode_host(self._fields()[9])

    @property
    def store_host(self) -> str:
        """The broker's own "ip:port"."""
        return decode_host(self._fields()[11])

    @property
    def reconsume_times(self) -> int:
        """The number of earlier failed attempts to consume it."""
        times: int = self._fields()[12]
        return times + self._extra_attempts

    @property
    def flag(self) -> int:
        """A number for the sender's own use."""
        flag: int = self._fields()[4]
        return flag

    @property
    def store_size(self) -> int:
        """The size of its record in bytes."""
        return self._end - self._start

    @property
    def body_crc(self) -> int:
        """CRC-32 of the body as stored, without the top bit; 0 for an item of an inner batch. It is not verified."""
        crc: int = self._fields()[2]
        return crc

    @property
    def commit_log_offset(self) -> int:
        """Its offset in the broker's commit log."""
        offset: int = self._fields()[6]
        return offset

    @property
    def prepared_transaction_offset(self) -> int:
        """The commit log offset of the half message of its transaction; 0 without one."""
        offset: int = self._fields()[13]
        return offset

    def detach(self) -> Message:
        """Return the message with a copy of its own bytes, so that the memory of the pull response can be freed."""
        if self._end - self._start == len(self._data):
            return self
        message = _message_at(self._data[self._start : self._end], 0, self._queue, self._body_limit())
        message._extra_attempts = self._extra_attempts
        return message

    def __reduce__(self) -> tuple[Any, ...]:
        max_bytes = self._body_limit().max_bytes
        return _restore_message, (self._data[self._start : self._end], self._queue, self._extra_attempts, max_bytes)

    def _limit_or_error(self) -> BodyLimit | ProtocolError:
        """Return the limit of the decompressed body, or the error if the body is known to be unreadable."""
        if not self.sys_flag & _PACKED:
            return _DEFAULT_BODY_LIMIT
        limit: BodyLimit | ProtocolError = self._fields()[_LIMIT_INDEX]
        return limit

    def _body_limit(self) -> BodyLimit:
        limit = self._limit_or_error()
        return _DEFAULT_BODY_LIMIT if isinstance(limit, ProtocolError) else limit

    def _mark_unreadable(self, error: ProtocolError) -> None:
        # Keep a copy, because the traceback of the raised error keeps its frames alive.
        self._fixed = (*self._fields()[:_LIMIT_INDEX], _copy_error(error))

    def __repr__(self) -> str:
        try:
            return f"<Message {self.topic} queue={self.queue} offset={self.queue_offset} bytes={self.store_size}>"
        except ProtocolError:
            return f"<Message damaged queue={self._queue} offset={self.queue_offset} bytes={self.store_size}>"

    def _fields(self) -> tuple[Any, ...]:
        fields = self._fixed
        if fields is None:
            fields = self._fixed = _FIXED[self.sys_flag & _HOSTS_V6].unpack_from(self._data, self._start)
        return fields

    def _record_topic(self) -> str:
        start = self._body_end + (1 if self._data[self._start + 7] == _V1_BYTE else 2)
        try:
            return self._data[start : self._properties_start() - 2].decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"record at {self._start}: its topic is not UTF-8") from error

    def _properties_start(self) -> int:
        """Return the start of the properties. They follow the topic and their length, and end with the record."""
        data, topic, end = self._data, self._body_end, self._end
        if data[self._start + 7] == _V1_BYTE:
            start = topic + data[topic] + 3
        else:
            start = topic + (data[topic] << 8 | data[topic + 1]) + 4
        if start > end or start + (data[start - 2] << 8 | data[start - 1]) != end:
            raise ProtocolError(f"record at {self._start}: topic and properties do not end where it does")
        return start

    def property_bytes(self, name: str) -> bytes | None:
        """Return the bytes of the property `name`, None if it is absent. Some clients do not write UTF-8."""
        return find_property(self._data, self._properties_start(), self._end, name)


def _copy_error(error: ProtocolError) -> ProtocolError:
    return type(error)(*error.args)


MessageIdentity = tuple[int, int, int]
"""The queue offset, the commit log offset and the store time: another message at the same offset differs in them."""


def identify(message: Message) -> MessageIdentity:
    """Return the values that distinguish `message` from another one at the same offset."""
    fields = message._fields()
    return message.queue_offset, fields[6], fields[10]


def stored_body(message: Message) -> bytes:
    """Return the body of a message as it is stored: compressed, if `sys_flag` has a compression."""
    return message._data[message._start + _FIXED[message.sys_flag & _HOSTS_V6].size : message._body_end]


def has_compressed_body(message: Message) -> bool:
    """Return whether the message's own body is compressed, so that reading it takes additional memory."""
    flag = message.sys_flag
    return bool(flag & SysFlag.COMPRESSED) and flag & _UNPACK != _UNPACK


def decompressed_size_limit(message: Message, *, measured: bool) -> int:
    """Return the most bytes that the decompressed body takes. `measured` returns the exact size, but decompresses it.

    For a body that cannot be decompressed it returns the limit.
    """
    max_bytes = message._body_limit().max_bytes
    if not measured:
        return min(max_bytes, max_decompressed_size(message._body_end - message._start, message.sys_flag))
    try:
        return decompressed_size(stored_body(message), message.sys_flag, max_bytes)
    except RocketError:
        return max_bytes


def drop_body(message: Message) -> None:
    """Free the decompressed body of a message. The next access decompresses it again."""
    message._body = None


def decode_messages(
    data: bytes,
    queue: MessageQueue | None = None,
    unpack: Unpack | None = None,
    body_limit: BodyLimit = _DEFAULT_BODY_LIMIT,
    max_records: int | None = None,
) -> list[Message]:
    """Return the messages in the body of a pull response, in order; inner batches are unpacked.

    `queue` is the queue of the pull. Without it, each message has the queue of its record, without a broker name.
    `unpack` returns the messages of an inner batch; the default is `inner_messages`. `body_limit` limits decompressed
    bodies. `max_records` limits the number of records; the error may come a few hundred records later.

    Raises:
        ProtocolError: the bytes are not a sequence of records, or have too many. Damage inside a record raises only
            when that part is read.
        ConfigError: the package for the compression of an inner batch is not installed.
    """
    messages: list[Message] = []
    size = len(data)
    start, last = 0, size - MIN_RECORD_BYTES
    unpacked = extra = 0

    def decode_unusual(start: int) -> int:
        nonlocal unpacked, extra
        before = len(messages)
        end, unpacked = _decode_unusual(data, start, queue, messages, unpacked, unpack, body_limit)
        extra += len(messages) - before - 1
        return end

    while start <= last:
        until = last if max_records is None else min(last, start + _CHUNK_BYTES)
        start = decode_records(Message, messages, data, start, until, queue, decode_unusual)
        if max_records is not None and len(messages) - extra > max_records:
            raise ProtocolError(f"more than {max_records} records in {size} bytes, which no pull requests")
    if start != size:
        raise ProtocolError(f"{size - start} bytes at {start} are too few for a record")
    return messages


def decode_message(
    record: bytes, queue: MessageQueue | None = None, body_limit: BodyLimit = _DEFAULT_BODY_LIMIT
) -> Message:
    """Return the message of one record, as brokers send it to be viewed or consumed; see also `decode_messages`.

    Raises:
        ProtocolError: not one whole record, or an inner batch, which brokers do not send this way.
    """
    message = _message_at(record, 0, queue, body_limit)
    if message._end != len(record):
        raise ProtocolError(f"record of {message._end} bytes in a body of {len(record)}")
    if message.sys_flag & _UNPACK == _UNPACK:
        raise ProtocolError(f"the record at offset {message.queue_offset} is an inner batch, not a message")
    return message


def _decode_unusual(
    data: bytes,
    start: int,
    queue: MessageQueue | None,
    messages: list[Message],
    unpacked: int,
    unpack: Unpack | None,
    body_limit: BodyLimit,
) -> tuple[int, int]:
    """Add the messages of a record with IPv6 hosts, a long topic, a compressed body or an inner batch.

    Returns the end of the record, and the number of bytes unpacked so far.
    """
    message = _message_at(data, start, queue, body_limit)
    if message.sys_flag & _UNPACK != _UNPACK:
        messages.append(message)
        return message._end, unpacked
    if unpack is not None:
        messages += unpack(message)
        return message._end, unpacked
    try:
        items = inner_messages(message, body_limit.max_bytes - unpacked)
    except ProtocolError as error:
        raise ProtocolError(f"record at {start}, inner batch at offset {message.queue_offset}: {error}") from error
    messages += items
    return message._end, unpacked + sum(item.store_size for item in items)


def inner_messages(batch: Message, max_bytes: int | None = None) -> list[Message]:
    """Return the messages of an inner batch, each with a record of its own.

    Raises:
        BodyTooLarge: its records take more than `max_bytes` (default: the limit of a body), or it has more messages
            than a broker can count. This is a ProtocolError.
        ProtocolError: it is damaged.
        ConfigError: the package for its compression is not installed.
    """
    body_limit = batch._body_limit()
    max_bytes = body_limit.max_bytes if max_bytes is None else max_bytes
    items, size = list[Message](), 0
    for record in _unpack_records(batch, max_bytes):
        size += len(record)
        if size > max_bytes:  # a few bytes can contain millions of items
            raise BodyTooLarge(f"inner batches hold more than {body_limit.max_bytes} bytes of records")
        if len(items) == _MAX_INNER_MESSAGES:
            raise BodyTooLarge(f"an inner batch holds more than {_MAX_INNER_MESSAGES} messages")
        items.append(_message_at(record, 0, batch._queue, body_limit))
    return items


def keep_batch(batch: Message) -> tuple[Message]:
    """Return an inner batch as one message whose body is the stored bytes."""
    return (batch,)


def is_inner_batch(record: Message) -> bool:
    """Return whether a message is an inner batch. Do not pass items of an unpacked batch, which have the same flag."""
    return record.sys_flag & _UNPACK == _UNPACK


def mark_batch_unreadable(batch: Message, error: ProtocolError, begin: int) -> None:
    """Make an inner batch one message whose body raises `error`. Its offset is at least `begin`."""
    batch._mark_unreadable(error)
    batch.queue_offset = max(batch.queue_offset, begin)


_MAX_INNER_MESSAGES = 2**15 - 1
"""Brokers count the messages of an inner batch in 16 bits. Source: BatchConsumeQueue."""


def _message_at(data: bytes, start: int, queue: MessageQueue | None, body_limit: BodyLimit) -> Message:
    """Return the message whose record, of any format, starts at `start`. An inner batch is one message."""
    try:
        total, magic, _, sys_flag, _ = RECORD_HEAD.unpack_from(data, start)
        fixed = _FIXED[sys_flag & _HOSTS_V6]
        fields = fixed.unpack_from(data, start)
    except struct.error:
        raise ProtocolError(f"{len(data) - start} bytes at {start} are too few for a record") from None
    if magic not in (MAGIC_V1, _MAGIC_V2):
        raise ProtocolError(f"record at {start}: magic {magic:#010x} is unknown; the response cannot be read further")
    end, body_end = start + total, start + fixed.size + fields[14]
    if not body_end + 3 <= end <= len(data):
        raise ProtocolError(f"record at {start} of {len(data)}: size {total}, body of {fields[14]} bytes")
    if sys_flag & _PACKED:
        body_limit.any_compressed = True
        fields = (*fields, body_limit)
    return make_record(Message, data, start, body_end, end, fields[5], sys_flag, queue, fields)


def _restore_message(record: bytes, queue: MessageQueue | None, extra_attempts: int, max_body_bytes: int) -> Message:
    """Return the message of a single record, for unpickling."""
    body_limit = _DEFAULT_BODY_LIMIT if max_body_bytes == MAX_BODY_BYTES else BodyLimit(max_body_bytes)
    message = _message_at(record, 0, queue, body_limit)
    message._extra_attempts = extra_attempts
    return message


def _unpack_records(batch: Message, max_bytes: int) -> Iterator[bytes]:
    """Yield a record for each item of an inner batch. It has its own offset, flag, body and properties.

    Source: MessageDecoder.decodeMessage(MessageExt, List).
    """
    fields = batch._fields()
    fixed = _FIXED[batch.sys_flag & _HOSTS_V6]
    topic = batch._data[batch._body_end : batch._properties_start() - 2]  # with its length
    body = batch._data[batch._start + fixed.size : batch._body_end]
    if batch.sys_flag & SysFlag.COMPRESSED:
        body = decompress(body, batch.sys_flag, max_bytes)
    for number, item in enumerate(_batch_items(body)):
        length = item.properties - item.body
        size = fixed.size + len(topic) + item.end - item.body
        if fields[5] + number > _LAST_OFFSET:
            raise ProtocolError(f"item {number} of the batch at offset {fields[5]}: there are no higher offsets")
        head = fixed.pack(size, fields[1], 0, fields[3], item.flag, fields[5] + number, *fields[6:14], length)
        yield b"".join((head, body[item.body : item.properties], topic, body[item.properties : item.end]))


@dataclass(frozen=True, slots=True)
class _ItemBounds:
    """The positions of a batch item's parts: the body, and the properties with their length."""

    flag: int
    body: int
    properties: int
    end: int


def _batch_items(data: bytes) -> Iterator[_ItemBounds]:
    start, size = 0, len(data)
    while start < size:
        if size - start < _BATCH_ITEM.size + 2:
            raise ProtocolError(f"{size - start} bytes at {start} are too few for a batch item")
        total, _, _, flag, length = _BATCH_ITEM.unpack_from(data, start)
        body, end = start + _BATCH_ITEM.size, start + total
        properties = body + length
        if not properties + 2 <= end <= size or properties + 2 + _U16.unpack_from(data, properties)[0] != end:
            raise ProtocolError(f"batch item at {start} of {size}: size {total}, body of {length} bytes")
        yield _ItemBounds(flag, body, properties, end)
        start = end


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of a batch, which has the topic, queue and times. Properties as text are used unchanged."""

    body: bytes
    properties: Mapping[str, str] | str = field(default_factory=dict)
    flag: int = 0


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Return the body of a batch request, which is also the format of an inner batch.

    Raises:
        ConfigError: properties cannot be encoded; see `encode_properties`.
    Source: MessageDecoder.encodeMessages.
    """
    parts: list[bytes] = []
    for item in items:
        properties = encoded_properties(item.properties)
        total = _BATCH_ITEM.size + len(item.body) + 2 + len(properties)
        parts += _BATCH_ITEM.pack(total, 0, 0, item.flag, len(item.body)), item.body
        parts += _U16.pack(len(properties)), properties
    return b"".join(parts)


def decode_batch(data: bytes) -> list[BatchItem]:
    """Return the messages in the body of a batch request.

    Raises:
        ProtocolError: not a sequence of batch items.
    Source: MessageDecoder.decodeMessages.
    """
    return [
        BatchItem(data[item.body : item.properties], decode_properties(data[item.properties + 2 : item.end]), item.flag)
        for item in _batch_items(data)
    ]


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Every field of a record. `body` is as stored: compressed if `sys_flag` has a compression.

    If `body_crc` is None, it is computed. Properties as text are used unchanged. `encode_message` sets the host bits of
    `sys_flag` from the hosts, and the format of the record from the length of the topic.
    """

    topic: str
    body: bytes
    properties: Mapping[str, str] | str = field(default_factory=dict)
    queue_id: int = 0
    queue_offset: int = 0
    commit_log_offset: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_at_ms: int = 0
    born_host: str = "127.0.0.1:0"
    stored_at_ms: int = 0
    store_host: str = "127.0.0.1:10911"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int | None = None


def encode_message(message: StoredMessage) -> bytes:
    """Return the record of `message`, as a broker stores it and sends it in pull responses.

    Raises:
        ConfigError: a host, topic or property does not fit into a record.
    Source: MessageExtEncoder.
    """
    topic, properties = message.topic.encode(), encoded_properties(message.properties)
    if len(topic) > 32_767:
        raise ConfigError(f"topic of {len(topic)} bytes; 32767 fit into a record")
    born_host, store_host = encode_host(message.born_host), encode_host(message.store_host)
    magic, topic_length = (MAGIC_V1, bytes([len(topic)])) if len(topic) <= 127 else (_MAGIC_V2, _U16.pack(len(topic)))
    hosts = len(born_host) // 20 * SysFlag.BORN_HOST_V6 | len(store_host) // 20 * SysFlag.STORE_HOST_V6
    tail = b"".join((message.body, topic_length, topic, _U16.pack(len(properties)), properties))
    fixed = _FIXED[hosts]
    return (
        fixed.pack(
            fixed.size + len(tail),
            magic,
            body_crc(message.body) if message.body_crc is None else message.body_crc,
            message.queue_id,
            message.flag,
            message.queue_offset,
            message.commit_log_offset,
            message.sys_flag & ~_HOSTS_V6 | hosts,
            message.born_at_ms,
            born_host,
            message.stored_at_ms,
            store_host,
            message.reconsume_times,
            message.prepared_transaction_offset,
            len(message.body),
        )
        + tail
    )


def body_crc(body: bytes) -> int:
    """Return the CRC that a broker stores for `body`. Pass the stored bytes: compressed, or a whole inner batch."""
    return zlib.crc32(body) & 0x7FFFFFFF


def _datetime(at_ms: int) -> datetime:
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError as error:
        raise ProtocolError(f"{at_ms} milliseconds since the epoch are no date") from error
