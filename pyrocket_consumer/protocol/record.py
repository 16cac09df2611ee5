"""The work for every message: split a response into records, read body and properties, count finished messages.

Read this Python code first; it runs if the compiled part is missing. `_accelerator.c` has the same functions, and
`accelerator` chooses one of the two.
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
"""The magic number of a record whose topic has a length of one byte."""

MIN_RECORD_BYTES = 91

RECORD_HEAD = struct.Struct(">II12xq8xi44xI")
"""The fields read from every record: total size, magic, queue offset, sysFlag, body length. They are in the first 88
bytes, which all precede the body if both hosts are IPv4."""

_BODY = 88
_MORE_FOR_V6 = 12
_V1_BYTE = MAGIC_V1 & 0xFF
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_PACKED = SysFlag.COMPRESSED | SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
_UNUSUAL = _HOSTS_V6 | _PACKED


class Record:
    """A stored record: its position in a response, and its decoded parts. Users see the subclass `Message`."""

    # It has no __init__ and few slots, because creating records is most of a pull's cost. decode_records sets them all.
    __slots__ = (
        "queue_offset",  # its offset in its queue
        "sys_flag",  # see SysFlag
        "_data",  # the bytes of the response
        "_start",  # of this record in _data
        "_body_end",
        "_end",
        "_queue",
        "_fixed",  # the fields before the body, after their first use; for a compressed body always, with its BodyLimit
        "_body",
        "_properties",
        "_done",  # for the consumer: whether it has finished the message
        "_extra_attempts",  # for the consumer: attempts that the record does not count
        "_key_lane",  # for the consumer: the lane of its key; unset without order_by
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
        """The body as sent, decompressed; b"" for a message without a body.

        Raises:
            ProtocolError: the compressed bytes are damaged, or contain more than `max_body_bytes` (64 MiB).
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
        """All properties, including the reserved ones (see PropertyName). `property` is faster for a few of many."""
        properties = self._properties
        if properties is None:
            start = self._properties_start()
            properties = self._properties = decode_properties(self._data[start : self._end])
        return properties

    if TYPE_CHECKING:  # subclasses define these methods

        def _unpack_body(self, stored: bytes) -> bytes: ...

        def _properties_start(self) -> int: ...

    # Defined last, because it hides the builtin from here on.
    def property(self, name: str) -> str | None:
        """Return the property `name`, None if it is absent. Faster than `properties` for a few of many."""
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
    """Return a record of type `kind`, which is in `data` from `start` to `end`. The caller has checked that."""
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
    """Append a record of type `kind` to `records` for each that starts from `start` to `until`. Return the last end.

    At `until` there must be at least `MIN_RECORD_BYTES` bytes. `decode_unusual` handles records that are damaged, or
    have IPv6 hosts, a long topic, a compressed body or an inner batch. It receives the start of the record, appends
    its messages, and returns its end.
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
    """Return whether the offset of each record is above that of the previous one."""
    return all(one < other for one, other in pairwise([record.queue_offset for record in records]))


def mark_done(records: Iterable[Record]) -> int:
    """Mark records as done. Return how many were not done before. The caller must hold the window's lock."""
    finished = 0
    for record in records:
        if not record._done:
            record._done = True
            finished += 1
    return finished
