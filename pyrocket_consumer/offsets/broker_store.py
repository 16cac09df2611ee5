"""Offsets kept by the brokers: what a clustering group uses."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Protocol

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue, ReadOffsetType
from pyrocket_consumer.offsets.store import OffsetTable, QueueOffset


class GroupOffsets(Protocol):
    """A group's offsets as the brokers keep them. Calls block; what the broker cannot say is an error, never None."""

    def query_offset(self, mq: MessageQueue) -> int | None:
        """Return the offset the broker holds, None when it has none."""

    def commit_offset(self, mq: MessageQueue, offset: int) -> None:
        """Return when the broker has acknowledged `offset`."""


class _BrokerOffset(QueueOffset):
    """`stored` is what the broker last acknowledged, or told; `calls` keeps the commits of one queue in order."""

    __slots__ = ("calls",)

    def __init__(self, queue: MessageQueue) -> None:
        super().__init__(queue)
        self.calls = Lock()


class BrokerOffsetStore(OffsetTable[_BrokerOffset]):
    """Keeps offsets at the brokers. A persist returns when the broker has acknowledged it.

    Commits of one queue go out one after the other, each with the newest value, so that a slow one cannot
    arrive after its successor and step the broker back.
    """

    def __init__(self, group_offsets: GroupOffsets) -> None:
        super().__init__()
        self._group_offsets = group_offsets

    def load(self) -> None:
        """Nothing to open: each queue is asked for when it is assigned."""

    def read_offset(
        self, mq: MessageQueue, read_type: ReadOffsetType = ReadOffsetType.MEMORY_FIRST_THEN_STORE
    ) -> int | None:
        """Return the offset of `mq`, None when there is none.

        What the broker answers also becomes the value in memory, larger or smaller: in a clustering group the
        broker's word is the truth, because another member may have owned the queue meanwhile.

        Raises:
            RocketError: the broker could not be asked. Never taken for "no offset".
        """
        with self._table_lock:
            entry = self._entries.get(mq)
            if entry is None:
                if read_type is ReadOffsetType.READ_FROM_MEMORY:
                    return None
                entry = self._add(mq)
            if read_type is not ReadOffsetType.READ_FROM_STORE and entry.offset is not None:
                return entry.offset
        if read_type is ReadOffsetType.READ_FROM_MEMORY:
            return None
        with entry.calls:
            offset = self._group_offsets.query_offset(mq)
            if offset is not None:
                with self._table_lock:
                    entry.offset = entry.stored = offset
        return offset

    def persist(self, mq: MessageQueue) -> None:
        """Commit the offset of `mq`, even if it is the one committed last.

        Raises:
            RocketError: the broker did not acknowledge it.
        """
        entry = self._entry(mq)
        if entry is not None:
            with entry.calls:
                self._commit(entry)

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        """Commit the offsets of `mqs` that changed since they were committed last.

        One failure does not stop the others.

        Raises:
            RocketError: the first failure, when all have been tried.
        """
        failures: list[RocketError] = []
        for entry in self._chosen(mqs):
            try:
                with entry.calls:
                    if entry.offset != entry.stored:
                        self._commit(entry)
            except RocketError as error:
                failures.append(error)
        if failures:
            failures[0].add_note(f"{len(failures)} commits failed")
            raise failures[0]

    def remove_offset(self, mq: MessageQueue) -> None:
        """Commit the offset of `mq` if it is not, and take it out of memory.

        Raises:
            RocketError: the broker did not acknowledge it; it is still in memory.
        """
        entry = self._entry(mq)
        if entry is None:
            return
        with entry.calls:
            while True:
                with self._table_lock:
                    if entry.offset is None or entry.offset == entry.stored:
                        entry.offset = None
                        return
                self._commit(entry)

    def close(self) -> None:
        """Nothing to give up. The consumer has persisted before: a commit after it left its group is a stranger's."""

    def _commit(self, entry: _BrokerOffset) -> None:
        """Commit what memory holds. `entry.calls` is held."""
        offset = entry.offset
        if offset is not None:
            self._group_offsets.commit_offset(entry.queue, offset)
            entry.stored = offset

    def _new_entry(self, mq: MessageQueue) -> _BrokerOffset:
        return _BrokerOffset(mq)
