"""Records as Arrow columns: the same values as those of `decode_messages`, without an object for each message.

Many records are read column by column, with the compiled part if there is one, else with numpy. Few records, and
damaged or unusual ones, are read row by row. All three ways return the same rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import RETRY_PREFIX, MessageQueue
from pyrocket_consumer.protocol import accelerator
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES, decompress
from pyrocket_consumer.protocol.frame import BufferSlice
from pyrocket_consumer.protocol.ids import decode_host
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    BodyLimit,
    Message,
    decode_messages,
    drop_body,
    inner_messages,
    is_inner_batch,
    keep_batch,
    stored_body,
)
from pyrocket_consumer.protocol.properties import PropertyName

MAX_BODY_BYTES_OF_BATCH = 16 * 1024 * 1024
"""The most bytes of decompressed bodies in a batch, because few compressed bytes can contain many."""

_MAX_ROWS = 8192
"""The most rows of a batch that is read row by row. Only inner batches contain more messages."""

ROW_BY_ROW_RECORDS = 40
"""Without the compiled part, fewer records are read row by row, because numpy's cost per call dominates. Measured."""

_LENGTH = struct.Struct(">I")
_MIN_RECORD_BYTES = 91
_MAGIC_V1, _MAGIC_V2 = 0xDAA320A7, 0xDAA320AB
_ITEM_END = b"\x02"
_UNPACK = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
_MAX_CELLS = 1 << 22  # rows times distinct property names in the table of items

_HEAD = np.dtype(
    [
        ("size", ">u4"),
        ("magic", ">u4"),
        ("crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("commit_log_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_at_ms", ">i8"),
    ]
)
_BORN_HOST, _STORED_AT, _STORE_HOST, _RECONSUME_TIMES, _BODY_LENGTH, _BODY = 48, 56, 64, 72, 84, 88  # with IPv4 hosts
_MORE_FOR_V6 = 12

# The range of datetime in milliseconds: the years 1 to 9999. Producers set born times, which may be any number.
_MIN_MS, _MAX_MS = -62_135_596_800_000, 253_402_300_799_999

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PulledRecords:
    """The body of a pull response, and the range of its messages to read: from offset `begin` to before `end`.

    `queue` is the queue that the rows name.
    """

    queue: MessageQueue
    records: BufferSlice
    begin: int
    end: int


Substitute = Callable[[MessageQueue, int, bytes, ProtocolError], bytes | None]
"""Returns a replacement for a body that cannot be decompressed, or None to skip the row.

Its arguments are the queue, the offset, the stored bytes, and the error.
"""


def _raise_unreadable(queue: MessageQueue, offset: int, stored: bytes, error: ProtocolError) -> bytes | None:
    raise ProtocolError(f"{queue} at offset {offset}: {error}") from error


def record_batches(
    pulled: Sequence[PulledRecords],
    columns: pa.Schema,
    tags: frozenset[str] = frozenset(),
    substitute: Substitute = _raise_unreadable,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages in `pulled` as rows of `columns`, in order. If there are `tags`, yield only messages with one.

    If records are in a bytearray, its last byte must not belong to a record, because this function writes to it. No
    batch refers to the records. It yields one batch, several if compressed bodies are very long, and none without
    messages. `columns` selects columns of the Spark source, see `COLUMNS`. A time outside the range of dates is null.
    A body of more than `max_body_bytes` is not decompressed.

    Raises:
        ProtocolError: a record or a body is damaged, and `substitute` raises; the text names its queue and offset.
        ConfigError: the package for the compression of a body is not installed; the text has the pip command.
    """
    rows: _Columnar | _Rows
    try:
        rows = _Compiled(pulled, accelerator.find_rows) if accelerator.find_rows is not None else _InNumpy(pulled)
        rows.filter_tags(tags)
        yield from rows.batches(columns, substitute, max_body_bytes)
    except _IrregularError:
        rows = _Rows(pulled, substitute, max_body_bytes)
        rows.filter_tags(tags)
        yield from rows.batches(columns)


class _IrregularError(Exception):
    """The records cannot be read by columns. It is raised before the first batch."""


# --- row by row


def _microseconds(milliseconds: int) -> int | None:
    return milliseconds * 1000 if _MIN_MS <= milliseconds <= _MAX_MS else None


_VALUES: dict[str, Callable[[Message], object]] = {
    "topic": lambda message: message.topic,
    "brokerName": lambda message: message.queue.broker_name,
    "queueId": lambda message: message.queue.queue_id,
    "queueOffset": lambda message: message.queue_offset,
    "msgId": lambda message: message.message_id,
    "tags": lambda message: message.tags,
    "keys": lambda message: message.property(PropertyName.KEYS),
    "body": lambda message: message.body,
    "properties": lambda message: list(message.properties.items()),
    "flag": lambda message: message.flag,
    "sysFlag": lambda message: message.sys_flag,
    "reconsumeTimes": lambda message: message.reconsume_times,
    "bornTimestamp": lambda message: _microseconds(message.born_at_ms),
    "storeTimestamp": lambda message: _microseconds(message.stored_at_ms),
    "bornHost": lambda message: message.born_host,
    "storeHost": lambda message: message.store_host,
}

COLUMNS = tuple(_VALUES)
"""The names of all columns, in the order of the Spark source."""


class _Rows:
    """Reads records row by row, with an object for each message: for irregular records, and for few."""

    def __init__(self, pulled: Sequence[PulledRecords], substitute: Substitute, max_body_bytes: int) -> None:
        self._instead = substitute
        self._bodies = BodyLimit(max_body_bytes)
        self._responses = [
            (response, decode_messages(bytes(response.records), response.queue, keep_batch, self._bodies, MAX_RECORDS))
            for response in pulled
        ]
        self._tags = frozenset[str]()

    def filter_tags(self, tags: frozenset[str]) -> None:
        self._tags = tags

    def batches(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        portion, size = list[Message](), 0
        for response, records in self._responses:
            for message in chain.from_iterable(map(self._messages_of, records)):
                if not response.begin <= message.queue_offset < response.end:
                    continue
                if self._tags and message.tags not in self._tags:
                    continue
                portion.append(message)
                size += message.store_size
                if len(portion) >= _MAX_ROWS or size >= MAX_BODY_BYTES_OF_BATCH:
                    yield from self._rows(portion, columns)
                    portion, size = [], 0
        yield from self._rows(portion, columns)

    def _messages_of(self, record: Message) -> Iterable[Message]:
        """Return the message of a record, or all messages of an inner batch."""
        if not is_inner_batch(record):
            return [record]
        try:
            return inner_messages(record)
        except ProtocolError as error:
            given = self._instead(record.queue, record.queue_offset, stored_body(record), error)
        return [] if given is None else [record]  # its body is the stored bytes

    def _rows(self, messages: list[Message], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        def body(message: Message) -> bytes | None:
            try:
                return message.body
            except ProtocolError as error:
                return self._instead(message.queue, message.queue_offset, stored_body(message), error)
            finally:
                drop_body(message)

        arrays = {
            field.name: pa.array([_VALUES[field.name](each) for each in messages], field.type)
            for field in columns
            if field.name != "body"
        }
        yield from _split_by_bytes(columns, arrays, len(messages), map(body, messages))


def _split_by_bytes(
    columns: pa.Schema, arrays: dict[str, pa.Array], count: int, bodies: Iterable[bytes | None]
) -> Iterator[pa.RecordBatch]:
    """Yield batches of `arrays` and `bodies` with a limited number of body bytes each. Skip rows whose body is None."""
    if "body" not in columns.names:
        if count:
            yield pa.RecordBatch.from_arrays([arrays[name] for name in columns.names], schema=columns)
        return
    kind, first = columns.field("body").type, 0
    for run in _runs(bodies):
        part = {name: array.slice(first, len(run)) for name, array in arrays.items()} | {"body": pa.array(run, kind)}
        batch = pa.RecordBatch.from_arrays([part[name] for name in columns.names], schema=columns)
        if None in run:
            batch = batch.filter(batch.column("body").is_valid())
        if batch.num_rows:
            yield batch
        first += len(run)


def _runs(bodies: Iterable[bytes | None]) -> Iterator[list[bytes | None]]:
    run, held = list[bytes | None](), 0
    for body in bodies:
        size = len(body) if body is not None else 0
        if run and held + size > MAX_BODY_BYTES_OF_BATCH:
            yield run
            run, held = [], 0
        run.append(body)
        held += size
    if run:
        yield run


# --- column by column


class _Columnar:
    """The common base of `_Compiled` and `_InNumpy`, which read records by columns."""

    _pulled: Sequence[PulledRecords]

    def filter_tags(self, tags: frozenset[str]) -> None:
        """Keep the rows with one of the tags; without tags, all. Raises _IrregularError if properties are damaged."""
        raise NotImplementedError

    def _count(self) -> int:
        raise NotImplementedError

    def _responses(self) -> Numbers:
        """Return the index of the response of each row."""
        raise NotImplementedError

    def _any_compressed(self) -> bool:
        raise NotImplementedError

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Return a column as this Arrow type. Raises _IrregularError."""
        raise NotImplementedError

    def _stored(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield the response's index, the offset, sysFlag and stored body of each row."""
        raise NotImplementedError

    def batches(self, columns: pa.Schema, substitute: Substitute, max_body_bytes: int) -> Iterator[pa.RecordBatch]:
        if not self._count():
            return
        compressed = "body" in columns.names and self._any_compressed()
        arrays = {
            field.name: (self._queue_column if field.name in _QUEUE_COLUMNS else self._column)(field.name, field.type)
            for field in columns
            if not compressed or field.name != "body"
        }
        if compressed:
            yield from _split_by_bytes(
                columns, arrays, self._count(), self._decompressed_bodies(substitute, max_body_bytes)
            )
        else:
            yield pa.RecordBatch.from_arrays([arrays[name] for name in columns.names], schema=columns)

    def _decompressed_bodies(self, substitute: Substitute, max_body_bytes: int) -> Iterator[bytes | None]:
        for response, offset, flag, stored in self._stored():
            try:
                body: bytes | None = decompress(stored, flag, max_body_bytes)
            except ProtocolError as error:
                body = substitute(self._pulled[response].queue, offset, stored, error)
            yield body

    # --- columns whose values are the same for all rows of a response

    def _queue_column(self, name: str, kind: pa.DataType) -> pa.Array:
        values = [_QUEUE_COLUMNS[name](each.queue) for each in self._pulled]
        if values.count(values[0]) == len(values):
            array = _repeated(values[0], kind, self._count())
        else:
            array = pa.array(values, kind).take(pa.array(self._responses()))
        return self._with_origins(array, kind) if name == "topic" else array

    def _with_origins(self, topics: pa.Array, kind: pa.DataType) -> pa.Array:
        """Return the topics to which the messages were sent; retried messages have it in a property."""
        is_retry = [each.queue.topic.startswith(RETRY_PREFIX) for each in self._pulled]
        if not any(is_retry):
            return topics
        origins = self._column(PropertyName.RETRY_TOPIC, kind)
        return pc.if_else(pa.array(np.array(is_retry)[self._responses()]), pc.coalesce(origins, topics), topics)


_QUEUE_COLUMNS: dict[str, Callable[[MessageQueue], object]] = {
    "topic": lambda queue: queue.topic,
    "brokerName": lambda queue: queue.broker_name,
    "queueId": lambda queue: queue.queue_id,
}


class _Compiled(_Columnar):
    """Reads records with the compiled part, which fills the Arrow buffers of each column."""

    def __init__(self, pulled: Sequence[PulledRecords], find_rows: accelerator.FindRows) -> None:
        """Find the rows. Raises _IrregularError if there is an inner batch or a damaged record."""
        self._pulled = pulled
        responses = tuple(
            (each.records.data, each.records.start, each.records.stop, each.begin, each.end) for each in pulled
        )
        found = find_rows(responses, MAX_RECORDS)
        if found is None:
            raise _IrregularError
        self._rows = found

    def filter_tags(self, tags: frozenset[str]) -> None:
        if tags and not self._rows.filter_tags(tuple(tag.encode() for tag in tags)):
            raise _IrregularError

    def _count(self) -> int:
        return self._rows.count

    def _responses(self) -> Numbers:
        return np.frombuffer(self._rows.responses, np.int32)

    def _any_compressed(self) -> bool:
        return self._rows.compressed

    def _stored(self) -> Iterator[tuple[int, int, int, bytes]]:
        numbers = ((name, np.int64 if name == "queueOffset" else np.int32) for name in ("queueOffset", "sysFlag"))
        parts = [np.frombuffer(self._buffers(name)[1], kind).tolist() for name, kind in numbers]
        bodies = self._column("body", pa.binary())
        for response, offset, flag, stored in zip(self._responses().tolist(), *parts, bodies, strict=True):
            yield response, offset, flag, stored.as_py()

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        if name == "properties":
            return self._maps(kind)
        buffers = self._buffers(name)
        if name in ("bornHost", "storeHost") and buffers[0] is not None:
            stored = _array(pa.binary(), self._count(), self._buffers(f"{name} as stored"))
            return _host_texts(stored, kind)
        return _array(kind, self._count(), buffers)

    def _buffers(self, name: str) -> Any:
        buffers = self._rows.column(name)
        if buffers is None:
            raise _IrregularError
        return buffers

    def _maps(self, kind: pa.DataType) -> pa.Array:
        firsts, names, values = self._buffers("properties")
        count = len(names[0]) // 4 - 1
        keys, items = _array(kind.key_type, count, (None, *names)), _array(kind.item_type, count, (None, *values))
        return pa.MapArray.from_arrays(_array(pa.int32(), self._count() + 1, (None, firsts)), keys, items, type=kind)


def _array(kind: pa.DataType, count: int, buffers: Sequence[bytes | None]) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [each if each is None else pa.py_buffer(each) for each in buffers])


def _host_texts(stored: pa.Array, kind: pa.DataType) -> pa.Array:
    encoded = stored.dictionary_encode()
    return pa.array([decode_host(host.as_py()) for host in encoded.dictionary], kind).take(encoded.indices)


class _InNumpy(_Columnar):
    """Reads records with numpy: the positions of all parts of all records, in one buffer with all responses."""

    def __init__(self, pulled: Sequence[PulledRecords]) -> None:
        """Find the rows. Raises _IrregularError if there are too few records, an inner batch, or a damaged record."""
        self._pulled = pulled
        self._data, extents = _join_slices([each.records for each in pulled])
        counts, starts = _record_starts(self._data, extents)
        if len(starts) < ROW_BY_ROW_RECORDS:
            raise _IrregularError
        self._bytes = np.frombuffer(self._data, np.uint8)
        self._starts = np.array(starts, np.int64)
        self._response = np.repeat(np.arange(len(pulled)), counts)
        self._head = self._read_at(self._starts, _HEAD)
        self._flags = self._head["sys_flag"].astype(np.int32)
        self._find_parts()
        offsets = self._head["queue_offset"]
        begins, ends = (np.array([getattr(each, name) for each in pulled], np.int64) for name in ("begin", "end"))
        self._filter((offsets >= begins[self._response]) & (offsets < ends[self._response]))

    def _find_parts(self) -> None:
        head, flags = self._head, self._flags
        is_v1 = head["magic"] == _MAGIC_V1
        if not (is_v1 | (head["magic"] == _MAGIC_V2)).all() or (flags & _UNPACK == _UNPACK).any():
            raise _IrregularError
        self._born_v6 = ((flags & SysFlag.BORN_HOST_V6) != 0) * _MORE_FOR_V6
        self._store_v6 = ((flags & SysFlag.STORE_HOST_V6) != 0) * _MORE_FOR_V6
        self._shift = self._born_v6 + self._store_v6
        self._ends = self._starts + head["size"]
        if (self._starts + self._shift + _MIN_RECORD_BYTES > self._ends).any():
            raise _IrregularError
        self._body = self._starts + self._shift + _BODY
        self._body_end = self._body + self._read_at(self._starts + self._shift + _BODY_LENGTH, np.dtype(">u4"))
        if (self._body_end + 3 > self._ends).any():
            raise _IrregularError
        self._is_v1 = is_v1

    def _read_at(self, offsets: Numbers, kind: np.dtype[Any]) -> Numbers:
        """Return the number at each offset, which must be within the data."""
        last = len(self._data) - kind.itemsize
        everywhere: Numbers = np.ndarray((last + 1,), kind, self._data, 0, (1,))
        return everywhere[offsets]

    def _filter(self, wanted: Numbers) -> None:
        if wanted.all():
            return
        for name in (
            "_starts",
            "_response",
            "_head",
            "_flags",
            "_born_v6",
            "_store_v6",
            "_shift",
            "_ends",
            "_body",
            "_body_end",
            "_is_v1",
        ):
            setattr(self, name, getattr(self, name)[wanted])
        self.__dict__.pop("_properties", None)

    def filter_tags(self, tags: frozenset[str]) -> None:
        if tags and len(self._starts):
            found = self._properties.column(PropertyName.TAGS, pa.binary())
            chosen = pc.is_in(found, value_set=pa.array([tag.encode() for tag in tags], pa.binary()))
            self._filter(chosen.to_numpy(zero_copy_only=False))

    def _count(self) -> int:
        return len(self._starts)

    def _responses(self) -> Numbers:
        return self._response

    def _any_compressed(self) -> bool:
        return bool((self._flags & SysFlag.COMPRESSED).any())

    def _stored(self) -> Iterator[tuple[int, int, int, bytes]]:
        parts = (self._response, self._head["queue_offset"], self._flags, self._body, self._body_end)
        for response, offset, flag, start, end in zip(*(each.tolist() for each in parts), strict=True):
            yield response, offset, flag, bytes(self._data[start:end])

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        return _MAKERS[name](self, kind)

    # --- columns; the argument is their Arrow type

    def queue_offset(self, kind: pa.DataType) -> pa.Array:
        return pa.array(self._head["queue_offset"].astype(np.int64), kind)

    def flag(self, kind: pa.DataType) -> pa.Array:
        return pa.array(self._head["flag"].astype(np.int32), kind)

    def sys_flag(self, kind: pa.DataType) -> pa.Array:
        return pa.array(self._flags, kind)

    def reconsume_times(self, kind: pa.DataType) -> pa.Array:
        times = self._read_at(self._starts + self._shift + _RECONSUME_TIMES, np.dtype(">i4"))
        return pa.array(times.astype(np.int32), kind)

    def born_at(self, kind: pa.DataType) -> pa.Array:
        return _timestamps(self._head["born_at_ms"].astype(np.int64), kind)

    def stored_at(self, kind: pa.DataType) -> pa.Array:
        times = self._read_at(self._starts + self._born_v6 + _STORED_AT, np.dtype(">i8"))
        return _timestamps(times.astype(np.int64), kind)

    def born_host(self, kind: pa.DataType) -> pa.Array:
        return self._hosts(self._starts + _BORN_HOST, self._born_v6, kind)

    def store_host(self, kind: pa.DataType) -> pa.Array:
        return self._hosts(self._starts + self._born_v6 + _STORE_HOST, self._store_v6, kind)

    def _hosts(self, offsets: Numbers, more: Numbers, kind: pa.DataType) -> pa.Array:
        if not more.any():
            distinct, which = np.unique(self._read_at(offsets, np.dtype(">u8")).astype(np.uint64), return_inverse=True)
            texts = [decode_host(host.to_bytes(8)) for host in distinct.tolist()]
            if len(texts) == 1:
                return _repeated(texts[0], kind, len(which))
            return pa.array(texts, kind).take(pa.array(which))
        return _host_texts(_slices(self._data, offsets, offsets + 8 + more, pa.binary()), kind)

    def body(self, kind: pa.DataType) -> pa.Array:
        return _slices(self._data, self._body, self._body_end, kind)

    def properties(self, kind: pa.DataType) -> pa.Array:
        return self._properties.maps(kind)

    def tags(self, kind: pa.DataType) -> pa.Array:
        return self._properties.column(PropertyName.TAGS, kind)

    def retry_topic(self, kind: pa.DataType) -> pa.Array:
        return self._properties.column(PropertyName.RETRY_TOPIC, kind)

    def keys(self, kind: pa.DataType) -> pa.Array:
        return self._properties.column(PropertyName.KEYS, kind)

    def message_id(self, kind: pa.DataType) -> pa.Array:
        found = self._properties.column(PropertyName.UNIQUE_KEY, kind)
        if not found.null_count:
            return found
        hosts = self._starts + self._born_v6 + _STORE_HOST
        offsets = zip(*(each.tolist() for each in (hosts, hosts + 8 + self._store_v6)), strict=True)
        stored = self._head["commit_log_offset"].astype(np.uint64).tolist()
        ids = [
            unique or f"{self._data[start:end].hex()}{offset:016x}".upper()
            for unique, (start, end), offset in zip(found.to_pylist(), offsets, stored, strict=True)
        ]
        return pa.array(ids, kind)

    @cached_property
    def _properties(self) -> _Properties:
        short = self._bytes[self._body_end]
        long = self._read_at(self._body_end, np.dtype(">u2")).astype(np.int64)
        starts = self._body_end + np.where(self._is_v1, short + np.int64(3), long + 4)
        if (starts > self._ends).any():
            raise _IrregularError
        if (starts + self._read_at(starts - 2, np.dtype(">u2")) != self._ends).any():
            raise _IrregularError
        return _Properties(self._data, starts, self._ends)


_MAKERS: dict[str, Callable[[_InNumpy, pa.DataType], pa.Array]] = {
    "RETRY_TOPIC": _InNumpy.retry_topic,
    "queueOffset": _InNumpy.queue_offset,
    "msgId": _InNumpy.message_id,
    "tags": _InNumpy.tags,
    "keys": _InNumpy.keys,
    "body": _InNumpy.body,
    "properties": _InNumpy.properties,
    "flag": _InNumpy.flag,
    "sysFlag": _InNumpy.sys_flag,
    "reconsumeTimes": _InNumpy.reconsume_times,
    "bornTimestamp": _InNumpy.born_at,
    "storeTimestamp": _InNumpy.stored_at,
    "bornHost": _InNumpy.born_host,
    "storeHost": _InNumpy.store_host,
}


class _Properties:
    """The items of all properties texts: the row of each, and the positions of its name and value."""

    def __init__(self, data: bytes | bytearray, starts: Numbers, ends: Numbers) -> None:
        """Find the items. Raises _IrregularError if a text is not UTF-8 or there are too many distinct names."""
        self._rows = len(starts)
        self._text, first_bytes = _join_texts(data, starts, ends)
        text = np.frombuffer(self._text, np.uint8)
        offsets = np.flatnonzero((text - np.uint8(1)) <= 1)  # of the two separators, 1 and 2
        kinds = text[offsets]
        if len(offsets) % 2 == 0 and (kinds[0::2] == 1).all() and (kinds[1::2] == 2).all():
            # Each item has one name and one value.
            self._name_ends, self._ends = offsets[0::2], offsets[1::2]
            self._starts = _following(self._ends)
        else:
            self._ends = offsets[kinds == 2]
            self._starts = _following(self._ends)
            self._name_ends = self._first_after(self._starts, offsets[kinds == 1])
        self._first = np.searchsorted(self._ends, first_bytes)  # the first item of each row, then the number of items
        self._filter((self._name_ends > self._starts) & (self._name_ends + 1 < self._ends))
        self._names: list[str] = []
        self._find_names()

    def _first_after(self, starts: Numbers, name_ends: Numbers) -> Numbers:
        """Return the end of the name in each item, or the end of the item if it has no name."""
        found: Numbers = np.append(name_ends, len(self._text))[np.searchsorted(name_ends, starts)]
        first: Numbers = np.minimum(found, self._ends)
        return first

    def _filter(self, wanted: Numbers) -> None:
        """Remove the items that are not in `wanted`."""
        if not wanted.all():
            self._starts, self._name_ends, self._ends = (
                each[wanted] for each in (self._starts, self._name_ends, self._ends)
            )
            self._first = np.concatenate((np.zeros(1, np.int64), np.cumsum(wanted)))[self._first]

    def _find_names(self) -> None:
        """Fill the table of items by row and name. If a row has items with the same name, keep the last."""
        keys = _slices(self._text, self._starts, self._name_ends, pa.string())
        same = self._same_names(keys)
        if same is not None:
            self._names = same
            self._items = np.arange(len(keys)).reshape(self._rows, len(same))
            self._keys = keys
            return
        encoded = keys.dictionary_encode()
        self._names = encoded.dictionary.to_pylist()
        count = len(self._names)
        if count * self._rows > _MAX_CELLS:
            raise _IrregularError
        cells = np.repeat(np.arange(self._rows), np.diff(self._first)) * count + encoded.indices.to_numpy()
        table = np.full(self._rows * count, -1)
        table[cells] = np.arange(len(keys))
        wanted = table[cells] == np.arange(len(keys))
        if not wanted.all():
            self._filter(wanted)
            keys = keys.filter(pa.array(wanted))
            table[cells[wanted]] = np.arange(len(keys))
        self._items = table.reshape(self._rows, count)
        self._keys = keys

    def _same_names(self, keys: pa.Array) -> list[str] | None:
        """Return the names if all rows have the same ones without duplicates, else None."""
        rows, items = self._rows, len(keys)
        count = items // rows
        if not count or items % rows or (np.diff(self._first) != count).any():
            return None
        lengths = (self._name_ends - self._starts).reshape(rows, count)
        if (lengths != lengths[0]).any():
            return None
        text = np.frombuffer(keys.buffers()[2], np.uint8, lengths.sum()).reshape(rows, -1)
        if (text != text[0]).any():
            return None
        names: list[str] = keys.slice(0, count).to_pylist()
        return names if len(set(names)) == count else None

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Return the property `name` of every row, null if it is absent."""
        if name not in self._names:
            return pa.nulls(self._rows, kind)
        items = self._items[:, self._names.index(name)]
        missing = items < 0
        if not missing.any():
            return _slices(self._text, self._name_ends[items] + 1, self._ends[items], kind)
        there = items[~missing]
        values = _slices(self._text, self._name_ends[there] + 1, self._ends[there], kind)
        return values.take(pa.array(np.cumsum(~missing) - 1, mask=missing))

    def maps(self, kind: pa.DataType) -> pa.Array:
        """Return the properties of every row."""
        values = _slices(self._text, self._name_ends + 1, self._ends, pa.string())
        return pa.MapArray.from_arrays(pa.array(self._first, pa.int32()), self._keys, values, type=kind)


def _join_slices(extents: Sequence[BufferSlice]) -> tuple[bytes | bytearray, Sequence[BufferSlice]]:
    """Return one buffer with all of `extents`, and their positions in it. Its last byte ends an item: see _join_texts.

    If one buffer has them all, in this order, it is used without a copy, because a copy costs more than reading them.
    """
    data = extents[0].data if extents else b""
    if (
        isinstance(data, bytearray)
        and all(each.data is data for each in extents)
        and all(one.stop <= other.start for one, other in pairwise(extents))
    ):
        data[-1:] = _ITEM_END
        return data, extents
    ends = list(accumulate(map(len, extents), initial=0))
    joined = b"".join([*map(bytes, extents), _ITEM_END])
    return joined, [BufferSlice(joined, *offsets) for offsets in pairwise(ends)]


def _record_starts(data: bytes | bytearray, extents: Sequence[BufferSlice]) -> tuple[list[int], list[int]]:
    """Return the number of records of each response, and the start of each record.

    Raises:
        _IrregularError: a response is not a sequence of records, or has more than a pull may request.
    """
    counts, starts = list[int](), list[int]()
    add, length_at = starts.append, _LENGTH.unpack_from
    for extent in extents:
        index, before = extent.start, len(starts)
        last = extent.stop - _MIN_RECORD_BYTES
        while index <= last:
            add(index)
            size = length_at(data, index)[0]
            if size < _MIN_RECORD_BYTES:
                raise _IrregularError
            index += size
        if index != extent.stop:
            raise _IrregularError
        counts.append(len(starts) - before)
        if counts[-1] > MAX_RECORDS:
            raise _IrregularError
    return counts, starts


def _repeated(value: object, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def _following(ends: Numbers) -> Numbers:
    """Return the starts of consecutive items, the first one at 0."""
    starts = np.empty_like(ends)
    starts[:1], starts[1:] = 0, ends[:-1] + 1
    return starts


def _join_texts(data: bytes | bytearray, starts: Numbers, ends: Numbers) -> tuple[bytes | pa.Buffer, Numbers]:
    """Return the properties texts joined, with a separator after each item, and the start of each row's text.

    The last start is the end of all texts. Brokers may omit the last separator of a text; the last byte of `data` is
    a separator, from which it is copied.

    Raises:
        _IrregularError: a text is not UTF-8.
    """
    rows, lengths = len(starts), ends - starts
    unended = (np.frombuffer(data, np.uint8)[ends - 1] != _ITEM_END[0]) & (lengths > 0)
    begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths + unended)))
    if not begins[-1]:
        return b"", begins
    offsets = np.empty(2 * rows + 2, np.int32)
    offsets[0:-2:2], offsets[1:-2:2] = starts, ends
    offsets[-2:] = len(data) - 1, len(data)
    parts = pa.BinaryArray.from_buffers(pa.binary(), 2 * rows + 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    index = np.arange(0, 2 * rows, 2)
    if unended.any():
        with_end = np.column_stack((index, np.full(rows, 2 * rows)))
        index = with_end[np.column_stack((np.ones(rows, bool), unended))]
    joined = parts.take(pa.array(index))
    text = joined.buffers()[2]
    if np.frombuffer(text, np.uint8).max() >= 0x80:
        try:
            joined.cast(pa.string())
        except pa.ArrowInvalid:
            raise _IrregularError from None
    return text, begins


def _slices(data: bytes | bytearray | pa.Buffer, starts: Numbers, ends: Numbers, kind: pa.DataType) -> pa.Array:
    """Return the bytes or text from each start to its end. They are in order, and do not overlap.

    Arrow copies them: from an array over all of `data`, whose rows are these parts and the gaps, it takes each second
    row.
    """
    rows = len(starts)
    if not rows:
        return pa.array([], kind)
    offsets = np.empty(2 * rows, np.int32)
    offsets[0::2], offsets[1::2] = starts, ends
    array = pa.Array.from_buffers(kind, 2 * rows - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return array.take(_every_other(rows))


@lru_cache(maxsize=16)
def _every_other(rows: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * rows - 1, 2, dtype=np.int32))


def _timestamps(milliseconds: Numbers, kind: pa.DataType) -> pa.Array:
    """Return microseconds since the epoch, null outside the range of dates."""
    odd = (milliseconds < _MIN_MS) | (milliseconds > _MAX_MS)
    return pa.array(np.where(odd, 0, milliseconds) * 1000, pa.int64(), mask=odd if odd.any() else None).cast(kind)
