"""The parts that offset stores share, and the store that keeps offsets in memory. `OffsetStore` is in `model`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from threading import Lock
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue, OffsetStore, ReadOffsetType
from pyrocket_consumer.text import safe_repr

MAX_OFFSET = 2**63 - 1
MAX_QUEUE_ID = 2**31 - 1
MAX_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class QueueReset:
    """The new offset of one queue, and the epoch of the reset. With `offset=None` the queue keeps its offset."""

    offset: int | None
    epoch: int


@runtime_checkable
class ResetEpochs(Protocol):
    """A store that also remembers which reset each queue has followed.

    With it, a member that was offline during a reset follows it at its next start, and no reset is followed twice.
    """

    def reset_epoch(self, mq: MessageQueue) -> int:
        """Return the epoch of the newest reset `mq` has followed, 0 if none. Never blocks."""

    def persist_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Set offsets and epochs in one step, and return when they are durable. A crash leaves all of them or none.

        Raises:
            RocketError: they are not durable. Memory has them, and a later persist of these queues tries again.
        """


@runtime_checkable
class Transferable(OffsetStore, Protocol):
    """A store that a process can take over from the process that it replaces."""

    def closes_within(self, seconds: float) -> None:
        """Announce to other processes that this store will close within `seconds`."""

    def try_load(self) -> bool:
        """Load the store and return True. Return False if its owner has announced that it will close soon."""


class QueueOffset:
    """The offset of one queue in memory, and the offset last written to the store."""

    __slots__ = ("offset", "queue", "stored")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.offset: int | None = None
        self.stored: int | None = None


Entry = TypeVar("Entry", bound=QueueOffset)


class OffsetTable(ABC, Generic[Entry]):
    """The memory half of a store: queues and their offsets, guarded by one leaf lock.

    The lock is held only for a dictionary access, and never across I/O, a callback or another lock. A caller may
    therefore hold the lock of a process queue when it calls `update_offset`.
    """

    def __init__(self) -> None:
        self._table_lock = Lock()
        self._entries: dict[MessageQueue, Entry] = {}

    def update_offset(self, mq: MessageQueue, offset: int, increase_only: bool = False) -> None:
        """Set the offset of `mq` in memory. With `increase_only`, ignore an offset below the current one.

        Raises:
            ConfigError: `offset` is not a whole number from 0 to 2**63 - 1.
        """
        if type(offset) is not int or not 0 <= offset <= MAX_OFFSET:  # inlined, because this runs for each chunk
            check_offset(mq, offset)
        lock = self._table_lock
        lock.acquire()  # a quarter faster than `with`
        try:
            entry = self._entries.get(mq)
            if entry is None:
                entry = self._add_entry(mq)
            if not increase_only or entry.offset is None or offset > entry.offset:
                entry.offset = offset
        except TypeError:
            check_queue(mq)
            raise
        finally:
            lock.release()

    def clone_offset_table(self, topic: str | None = None) -> dict[MessageQueue, int]:
        """Return a copy of the offsets in memory, of one topic or of all topics."""
        with self._table_lock:
            entries = list(self._entries.values())
        return {
            entry.queue: offset
            for entry in entries
            if (offset := entry.offset) is not None and (not topic or entry.queue.topic == topic)
        }

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def load(self) -> None:
        """Open the store."""

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    def _find_entry(self, mq: MessageQueue) -> Entry | None:
        """Return the entry of `mq`, None if memory has none.

        Raises:
            ConfigError: no kind of store can write `mq`.
        """
        try:
            entry = self._entries.get(mq)  # one look-up needs no lock
        except TypeError:  # it has no hash
            entry = None
        if entry is None:
            check_queue(mq)
        return entry

    def _entries_of(self, mqs: Iterable[MessageQueue] | None) -> list[Entry]:
        """Return the entries in memory of `mqs`, or of all queues.

        Raises:
            ConfigError: one of `mqs` is no queue, or cannot be written.
        """
        if mqs is not None and not isinstance(mqs, Iterable):
            raise ConfigError(f"mqs={safe_repr(mqs)} is not allowed; pass MessageQueues, or None for all queues")
        wanted = None if mqs is None else list(mqs)
        with self._table_lock:
            entries = self._entries
            # Hashing a queue costs more than the rest of this method. A caller that keeps its list of queues passes
            # the same objects each time, so identity shows that all entries are wanted.
            if wanted is None or (len(wanted) == len(entries) and all(map(is_, wanted, entries))):
                return list(entries.values())
        try:
            found = list(map(entries.get, wanted))
        except TypeError:  # one has no hash
            found = [None]
        if None in found:
            found = [self._find_entry(mq) for mq in wanted]
        return [entry for entry in found if entry is not None]

    def _add_entry(self, mq: MessageQueue) -> Entry:
        """Add the entry of a new queue. The caller holds the table lock."""
        check_queue(mq)
        entry = self._entries[mq] = self._new_entry(mq)
        return entry

    @abstractmethod
    def _new_entry(self, mq: MessageQueue) -> Entry:
        """Return a new entry for `mq`."""


def check_offset(mq: MessageQueue, offset: int, what: str = "offset") -> None:
    """Raise ConfigError unless `offset` is a valid offset, or a valid epoch if that is `what`."""
    if type(offset) is not int or not 0 <= offset <= MAX_OFFSET:
        raise ConfigError(f"{what} {safe_repr(offset)} of {mq} is not allowed; use a whole number from 0 to 2**63 - 1")


def check_read_type(read_type: object) -> None:
    """Raise ConfigError unless `read_type` is a ReadOffsetType."""
    if not isinstance(read_type, ReadOffsetType):
        names = ", ".join(map(str, ReadOffsetType))
        raise ConfigError(f"read_type={safe_repr(read_type)} is not allowed; choose one of {names}")


def check_queue(mq: MessageQueue) -> None:
    """Raise ConfigError unless every kind of store can write `mq`."""
    if not isinstance(mq, MessageQueue):
        raise ConfigError(
            f"{safe_repr(mq)} is a {type(mq).__name__}; pass a MessageQueue(topic, broker_name, queue_id)"
        )
    for name, text in (("topic", mq.topic), ("broker_name", mq.broker_name)):
        try:
            fits = len(text.encode()) <= MAX_NAME_BYTES
        except (AttributeError, UnicodeEncodeError):
            fits = False
        if not fits:
            raise ConfigError(f"{name}={safe_repr(text)} is not allowed; it must be Unicode text of at most 4096 bytes")
    if type(mq.queue_id) is not int or not -1 <= mq.queue_id <= MAX_QUEUE_ID:
        raise ConfigError(
            f"queue_id={safe_repr(mq.queue_id)} is not allowed; it must be a whole number from -1 to 2**31 - 1"
        )


class MemoryOffsetStore(OffsetTable[QueueOffset]):
    """Keeps offsets only while the object exists: for tests, and for consumers that start over each time."""

    def load(self) -> None:
        """Do nothing; memory needs no opening."""

    def read_offset(
        self, mq: MessageQueue, read_type: ReadOffsetType = ReadOffsetType.MEMORY_FIRST_THEN_STORE
    ) -> int | None:
        """Return the offset of `mq`, or None without one. The "store" holds the offsets last persisted."""
        check_read_type(read_type)
        entry = self._find_entry(mq)
        if entry is None:
            return None
        with self._table_lock:
            if read_type is ReadOffsetType.READ_FROM_MEMORY:
                return entry.offset
            if read_type is ReadOffsetType.READ_FROM_STORE:
                return entry.stored
            if entry.offset is None:
                entry.offset = entry.stored
            return entry.offset

    def persist(self, mq: MessageQueue) -> None:
        """Keep the offset of `mq` after `remove_offset`."""
        self.persist_all([mq])

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        """Keep the offsets of `mqs`, or of all queues, after `remove_offset`."""
        entries = self._entries_of(mqs)
        with self._table_lock:
            for entry in entries:
                if entry.offset is not None:
                    entry.stored = entry.offset

    def remove_offset(self, mq: MessageQueue) -> None:
        """Persist the offset of `mq` and remove it from memory."""
        entry = self._find_entry(mq)
        with self._table_lock:
            if entry is not None and entry.offset is not None:
                entry.stored, entry.offset = entry.offset, None

    def close(self) -> None:
        """Do nothing; memory needs no closing."""

    def _new_entry(self, mq: MessageQueue) -> QueueOffset:
        return QueueOffset(mq)
