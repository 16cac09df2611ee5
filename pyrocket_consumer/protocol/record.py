"""What every message pays: cutting an answer into records, reading body and properties, counting what is finished.

This is the Python of it, which people read and which runs where nothing was compiled. `_accelerator.c` does the same;
`accelerator` says which of the two is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.properties import decode_properties, find_property

MAGIC_V1 = 0xDAA320A7
"""Of a record whose topic has its length in one byte."""

MIN_RECORD_BYTES = 91

RECORD_HEAD = struct.Struct(">II12xq8xi44xI")
"""What is needed of every record: total size, magic, queue offset, sysFlag, body length. It is read from the first 88
bytes, which are all before the body when both hosts are IPv4."""

_BODY = 88
_MORE_FOR_V6 = 12
_V1_BYTE = MAGIC_V1 & 0xFF
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_PACKED = SysFlag.COMPRESSED | SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
_UNUSUAL = _HOSTS_V6 | _PACKED


class Record:
    """A stored record: where it lies in an answer, and what was read of it. What users see of it is `Message`."""

    # Without __init__ and with few slots: making one is most of what a pull costs. decode_records sets them all.
    __slots__ = (
        "queue_offset",  # its place in its queue
        "sys_flag",  # see SysFlag
        "_data",  # the answer's bytes
        "_start",  # where this record starts, its body ends, and it ends
        "_body_end",
        "_end",
        "_queue",
        "_fixed",  # what stands before the body, once asked for; of a packed one from the start, and how to unpack it
        "_body",
        "_properties",
        "_done",  # for the consumer: it has finished with the message
        "_extra_attempts",  # for the consumer: attempts the record does not count
        "_key_lane",  # for the consumer, with order_by only: the line of its key; else it is not set
    )

    queue_offset: int
    sys_flag: int
    _data: bytes
    _start: int
    _body_end: int
    _end: int
    _queue: MessageQueue | None
    _fixed: tuple[Any, ...] | None
    _body: bytes | None
    _properties: dict[str, str] | None
    _done: bool
    _extra_attempts: int
    _key_lane: Any

    @property
    def body(self) -> bytes:
        """What was sent, decompressed; b"" when nothing was.

        Raises:
            ProtocolError: the compressed bytes are damaged, or hold more than `max_body_bytes` (64 MiB).
            ConfigError: the compression needs a package that is not installed; the text has the pip command.
        """
        body = self._body
        if body is None:
            flag = self.sys_flag
            start = self._start + _BODY
            if flag & _HOSTS_V6:
                start += _MORE_FOR_V6 if flag & _HOSTS_V6 != _HOSTS_V6 else 2 * _MORE_FOR_V6
            body = self._data[start : self._body_end]
            if flag & _PACKED:
                body = self._unpack_body(body)
            self._body = body
        return body

    @property
    def properties(self) -> dict[str, str]:
        """Every property, the reserved ones too (see PropertyName). `property` is quicker for a few of many."""
        properties = self._properties
        if properties is None:
            start = self._properties_start()
            properties = self._properties = decode_properties(self._data[start : self._end])
        return properties

    if TYPE_CHECKING:  # what kinds of records have to add

        def _unpack_body(self, stored: bytes) -> bytes: ...

        def _properties_start(self) -> int: ...

    # Last, because it hides the builtin from here on.
    def property(self, name: str) -> str | None:
        """Return the property `name`, None when it is absent. Quicker than `properties` for a few of many."""
        properties = self._properties
        if properties is not None:
            return properties.get(name)
        value = find_property(self._data, self._properties_start(), self._end, name)
        return value.decode("utf-8", "replace") if value is not None else None


R = TypeVar("R", bound=Record)


def make_record(
    kind: type[R],
    data: bytes,
    start: int,
    body_end: int,
    end: int,
    queue_offset: int,
    sys_flag: int,
    queue: MessageQueue | None,
    fixed: tuple[Any, ...] | None,
) -> R:
    """Return a `kind` of record that lies in `data` from `start` to `end`; whether it does was looked at."""
    record = kind()
    record.queue_offset, record.sys_flag = queue_offset, sys_flag
    record._data, record._start, record._body_end, record._end = data, start, body_end, end
    record._queue, record._fixed = queue, fixed
    record._body = record._properties = None
    record._done, record._extra_attempts = False, 0
    return record


def decode_records(
    kind: type[R],
    records: list[R],
    data: bytes,
    start: int,
    until: int,
    queue: MessageQueue | None,
    decode_unusual: Callable[[int], int],
) -> int:
    """Add a `kind` of record to `records` for each that starts from `start` to `until`; return where the last ends.

    At `until` there must be `MIN_RECORD_BYTES` bytes. What is damaged, or has IPv6 hosts, a long topic or a packed body,
    is left to `decode_unusual`: it takes where such a record starts, adds what stands for it, and returns where it ends.
    """
    add, read_head, size = records.append, RECORD_HEAD.unpack_from, len(data)
    while start <= until:
        total, magic, queue_offset, sys_flag, body_length = read_head(data, start)
        end, body_end = start + total, start + _BODY + body_length
        if magic == MAGIC_V1 and not sys_flag & _UNUSUAL and body_end + 3 <= end <= size:
            record = kind()
            record.queue_offset = queue_offset
            record.sys_flag = sys_flag
            record._data = data
            record._start = start
            record._body_end = body_end
            record._end = end
            record._queue = queue
            record._fixed = record._body = record._properties = None
            record._done = False
            record._extra_attempts = 0
            add(record)
            start = end
        else:
            start = decode_unusual(start)
    return start


def are_offsets_rising(records: Iterable[Record]) -> bool:
    """Tell whether the offset of each record is above that of the one before."""
    return all(one < other for one, other in pairwise([record.queue_offset for record in records]))


def mark_done(records: Iterable[Record]) -> int:
    """Note that records are consumed; return how many were not before. The window's lock is held."""
    finished = 0
    for record in records:
        if not record._done:
            record._done = True
            finished += 1
    return finished
