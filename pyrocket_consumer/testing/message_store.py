"""A broker's messages: records, which are encoded once, in queues and a commit log.

Source: CommitLog, ConsumeQueue, DefaultMessageStore.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pyrocket_consumer.protocol.message import (
    StoredMessage,
    decode_messages,
    decode_properties,
    encode_message,
    encode_properties,
)
from pyrocket_consumer.testing.config import Release

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


_OFFSETS = struct.Struct(">qq")  # queue offset, commit log offset
_OFFSETS_AT = 20
_STORED_AT = struct.Struct(">q")

MAX_SCANNED = 800
"""Maximum number of index entries that one pull reads: 16,000 bytes. Source: DefaultMessageStore.getMessage."""


class AppendResult(NamedTuple):
    """The position of a stored message."""

    queue_offset: int
    commit_log_offset: int


class QueueLog:
    """The records of one queue from `min_offset` on."""

    __slots__ = ("min_offset", "records", "tag_codes", "stored_at_ms")

    def __init__(self, min_offset: int = 0) -> None:
        self.min_offset = min_offset
        self.records: list[bytes] = []
        self.tag_codes: list[int] = []
        self.stored_at_ms: list[int] = []

    @property
    def max_offset(self) -> int:
        """The offset of the next message."""
        return self.min_offset + len(self.records)

    def append(self, record: bytes, tag_code: int, stored_at_ms: int) -> None:
        self.records.append(record)
        self.tag_codes.append(tag_code)
        self.stored_at_ms.append(stored_at_ms)

    def read(
        self, offset: int, max_count: int, max_bytes: int, matches: Callable[[int], bool] | None
    ) -> tuple[list[bytes], int]:
        """Return the matching records from `offset` on, at least one if possible, and the next offset to read."""
        first = offset - self.min_offset
        if matches is None:  # the usual case, without a check of each record
            found = self.records[first : first + max(1, max_count)]
            size = sum(map(len, found))
            while size > max_bytes and len(found) > 1:
                size -= len(found.pop())
            return found, offset + len(found)
        found, size = [], 0
        for index in range(first, min(first + MAX_SCANNED, len(self.records))):
            record = self.records[index]
            if found and (len(found) >= max_count or size + len(record) > max_bytes):
                return found, self.min_offset + index
            if matches(self.tag_codes[index]):
                found.append(record)
                size += len(record)
        return found, min(offset + MAX_SCANNED, self.max_offset)

    def delete_before(self, offset: int) -> list[bytes]:
        """Drop the records before `offset`, and return them."""
        count = max(0, min(offset, self.max_offset) - self.min_offset)
        self.min_offset += count
        return self._drop(slice(0, count))

    def truncate(self, offset: int) -> list[bytes]:
        """Drop the records from `offset` on, and return them."""
        return self._drop(slice(max(0, offset - self.min_offset), None))

    def _drop(self, part: slice) -> list[bytes]:
        dropped = self.records[part]
        del self.records[part], self.tag_codes[part], self.stored_at_ms[part]
        return dropped

    def first_since(self, time_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, else the max offset."""
        return self.min_offset + bisect_left(self.stored_at_ms, time_ms)

    def last_until(self, time_ms: int) -> int:
        """Return the offset of the last message stored at or before a time, else the min offset."""
        return self.min_offset + max(0, bisect_right(self.stored_at_ms, time_ms) - 1)

    def nearest(self, time_ms: int) -> int:
        """Return the offset of the message stored nearest to a time, as releases before 5.1.1 do."""
        times = self.stored_at_ms
        index = bisect_left(times, time_ms)
        if (
            index == len(times)
            or index > 0
            and times[index] != time_ms
            and (time_ms - times[index - 1] <= times[index] - time_ms)
        ):
            index -= 1
        return self.min_offset + max(index, 0)


class MessageStore:
    """The queues of one broker and its commit log. A slave's store is fed by its master's."""

    def __init__(self) -> None:
        self.replicas: list[MessageStore] = []
        self._queues: dict[str, dict[int, QueueLog]] = {}
        self._by_commit_log_offset: dict[int, tuple[str, bytes]] = {}  # in the order of the log
        self._next_commit_log_offset = 0
        self._behind: list[tuple[str, int, AppendResult, bytes, int, int]] | None = None

    def queue(self, topic: str, queue_id: int) -> QueueLog | None:
        """Return a queue, or None if it never stored a message."""
        return self._queues.get(topic, {}).get(queue_id)

    def queue_ids(self, topic: str) -> list[int]:
        """Return the ids of the queues that ever stored a message."""
        return list(self._queues.get(topic, ()))

    def max_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queue(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queue(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    def append(self, topic: str, queue_id: int, record: bytearray, tag_code: int, stored_at_ms: int) -> AppendResult:
        """Store an encoded record, and write its offsets into it."""
        result = AppendResult(self.max_offset(topic, queue_id), self._next_commit_log_offset)
        _OFFSETS.pack_into(record, _OFFSETS_AT, *result)
        entry = (topic, queue_id, result, bytes(record), tag_code, stored_at_ms)
        self._take(*entry)
        for replica in self.replicas:
            if replica._behind is None:
                replica._take(*entry)
            else:
                replica._behind.append(entry)
        return result

    def _take(
        self, topic: str, queue_id: int, result: AppendResult, record: bytes, tag_code: int, stored_at_ms: int
    ) -> None:
        queues = self._queues.setdefault(topic, {})
        queue = queues.get(queue_id)
        if queue is None:
            queue = queues[queue_id] = QueueLog(result.queue_offset)
        queue.append(record, tag_code, stored_at_ms)
        self._by_commit_log_offset[result.commit_log_offset] = topic, record
        self._next_commit_log_offset = result.commit_log_offset + len(record)

    def pause_replication(self) -> None:
        """Stop taking the master's new records."""
        if self._behind is None:
            self._behind = []

    def resume_replication(self) -> None:
        """Take the records that the master stored meanwhile, and later ones."""
        behind, self._behind = self._behind or [], None
        for entry in behind:
            self._take(*entry)

    def promote(self) -> None:
        """Become the master's store. Records that were not replicated are lost."""
        self._behind = None

    def copy_from(self, other: MessageStore) -> None:
        """Copy another store, as a restarted slave does."""
        self.clear()
        self._behind = None
        for topic, queues in other._queues.items():
            for queue_id, queue in queues.items():
                mine = self._queues.setdefault(topic, {})[queue_id] = QueueLog(queue.min_offset)
                mine.records, mine.tag_codes = list(queue.records), list(queue.tag_codes)
                mine.stored_at_ms = list(queue.stored_at_ms)
        self._by_commit_log_offset = dict(other._by_commit_log_offset)
        self._next_commit_log_offset = other._next_commit_log_offset

    def record_at(self, commit_log_offset: int) -> tuple[str, bytes] | None:
        """Return the topic and record at an offset; None if it was deleted or never stored.

        Offset 0 finds the first record of the oldest file left, as on real brokers.
        """
        if commit_log_offset == 0 and self._by_commit_log_offset:
            return next(iter(self._by_commit_log_offset.values()))
        return self._by_commit_log_offset.get(commit_log_offset)

    def records(self) -> Iterator[tuple[int, str, bytes]]:
        """Yield the commit log's offsets, topics and records."""
        for offset, (topic, record) in self._by_commit_log_offset.items():
            yield offset, topic, record

    def delete_before(self, topic: str, queue_id: int, offset: int) -> None:
        """Delete a queue's older messages for good, so that its min offset becomes `offset`."""
        queue = self.queue(topic, queue_id)
        if queue is not None:
            self._forget(queue.delete_before(offset))

    def truncate(self, topic: str, queue_id: int, offset: int) -> None:
        """Lose a queue's newest messages, so that its max offset becomes `offset`."""
        queue = self.queue(topic, queue_id)
        if queue is not None:
            self._forget(queue.truncate(offset))

    def delete_topic(self, topic: str) -> None:
        for queue in self._queues.pop(topic, {}).values():
            self._forget(queue.records)

    def clear(self) -> None:
        """Remove all messages."""
        self._queues.clear()
        self._by_commit_log_offset.clear()
        self._next_commit_log_offset = 0

    def _forget(self, records: list[bytes]) -> None:
        for record in records:
            _, commit_log_offset = _OFFSETS.unpack_from(record, _OFFSETS_AT)
            self._by_commit_log_offset.pop(commit_log_offset, None)
