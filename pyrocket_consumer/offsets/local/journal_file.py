"""The journal on the disk: appends one after the other, flushes that callers share."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from threading import Lock

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import QueueOffset
from pyrocket_consumer.offsets.local.disk import Disk, DiskFile, SyncedDirectory
from pyrocket_consumer.offsets.local.journal import (
    HEADER_BYTES,
    MAX_NAMES,
    MAX_RECORDS,
    RECORD_BYTES,
    FileIdentity,
    JournalHeader,
    encode_header,
    encode_names,
    encode_offset,
    encode_offsets,
    encode_record,
    encode_resets,
)
from pyrocket_consumer.offsets.local.recovery import JOURNAL_FILE
from pyrocket_consumer.text import logger

log = logger("offsets")

WARN_INTERVAL_S = 60.0


class JournaledOffset(QueueOffset):
    """A queue's offset with the number that the journal gives to its topic and broker name."""

    __slots__ = ("name_index",)

    def __init__(self, queue: MessageQueue, name_index: int) -> None:
        super().__init__(queue)
        self.name_index = name_index


class FlushWaiter:
    """A caller of `flush` that waits until a flush of another one reaches its write, or it has to flush itself."""

    __slots__ = ("count", "must_flush", "gate")

    def __init__(self, count: int) -> None:
        self.count = count
        self.must_flush = False
        self.gate = Lock()
        self.gate.acquire()


class JournalFile:
    """Appends frames and flushes them. All but `flush` is called under the store's write lock.

    Writes are counted: the first `appended` of them are here or in a checkpoint, the first `durable` survive a power
    failure. What is appended is kept until a flush writes all of it at once: that is one write and one wait for any
    number of callers, who append more meanwhile. One flush runs at a time; those whose write it misses wait for the
    next one, which the first of them does for all.

    Locks, in this order: the sync lock is held while the file is written and flushed, or exchanged; the turn lock, a
    leaf, guards the counts, what is not written yet, and who waits.
    """

    def __init__(self, disk: Disk, names: SyncedDirectory, size: int) -> None:
        self._disk = disk
        self._synced_directory = names
        self._size = size
        self._path = os.path.join(names.directory, JOURNAL_FILE)
        self._sync_lock = Lock()
        self._file: DiskFile | None = None  # changed under the sync lock
        self._flush_failed = False  # changed under the sync lock
        self._generation = 0
        self._position = 0
        self._warned_at = float("-inf")
        self._defined: set[int] = set()  # the pairs that frames of this generation have defined

        self._counts_lock = Lock()
        self._unwritten: list[bytes] = []
        self._unwritten_position = 0
        self._flushing = False
        self._waiters: list[FlushWaiter] = []

        self.is_appendable = False
        """The header on disk names the checkpoint on disk, so that a frame appended now will be found again, and all
        that is counted as written is here or there: the store clears it while it writes.
        """
        self.appended = 0
        self.durable = 0

    def open(self) -> None:
        """Use the file that is there from the next `start_generation` on."""
        file = self._disk.open(self._path, create=False)
        with self._sync_lock:
            self._file, self._flush_failed = file, False

    def is_in_place(self) -> bool:
        """Tell whether what is appended can be found again: False when another file, or none, has the name."""
        return self._file is None or self._file.is_at(self._path)

    def start_generation(self, checkpoint: FileIdentity, backup: FileIdentity) -> None:
        """Let a new generation follow `checkpoint`, which is durable and holds everything.

        The header is not flushed: it reaches the disk with the first frame that does. If it does not, the old one names
        another checkpoint than the one found, and the old frames are not applied.

        A generation is a random number. A counter would come again after a power failure that took the last header, and
        with it those frames of the lost generation that had got to the disk.
        """
        generation = secrets.randbits(64)
        header = encode_header(JournalHeader(generation, self._size, checkpoint, backup))
        if self._file is None:
            new = self._path + ".new"
            write_file(self._disk, new, header.ljust(self._size, b"\0"))
            self._disk.replace(new, self._path)
            self._synced_directory.sync()
            self.open()
        else:
            with self._sync_lock:  # no flush is under way that could write frames of before, or fail, from here on
                with self._counts_lock:
                    self._unwritten = []
                self._flush_failed = False
                self._file.write_at(header, 0)
        self._generation = generation
        self._position = HEADER_BYTES
        self._defined.clear()
        self.is_appendable = True

    def encode_frames(self, changed: Sequence[JournaledOffset]) -> bytes:
        """Return the frames that store the offset of each entry in one step; b"" if a checkpoint is due."""
        generation = self._generation
        if len(changed) == 1:
            entry = changed[0]
            frames = encode_offset(generation, entry.name_index, entry.queue.queue_id, entry.stored or 0)
            undefined = {} if entry.name_index in self._defined else {entry.name_index: entry.queue}
        elif len(changed) <= min(MAX_RECORDS, self._size // 4 // RECORD_BYTES):
            record, named = encode_record, self._defined
            frames = encode_offsets(
                generation, [record(entry.name_index, entry.queue.queue_id, entry.stored) for entry in changed]
            )
            undefined = {entry.name_index: entry.queue for entry in changed if entry.name_index not in named}
        else:
            return b""
        return self._with_definitions(frames, undefined)

    def encode_reset_frames(self, resets: Sequence[tuple[int, MessageQueue, int | None, int]]) -> bytes:
        """Return the frames that reset (pair, queue, offset, epoch) each, in one step; b"" as `encode_frames` does."""
        if len(resets) > MAX_RECORDS:
            return b""
        records = [(name_index, queue.queue_id, offset, epoch) for name_index, queue, offset, epoch in resets]
        undefined = {name_index: queue for name_index, queue, _, _ in resets if name_index not in self._defined}
        return self._with_definitions(encode_resets(self._generation, records), undefined)

    def _with_definitions(self, frames: bytes, undefined: Mapping[int, MessageQueue]) -> bytes:
        """Return `frames` after the definitions they need; b"" when they do not fit."""
        generation = self._generation
        if undefined:
            if max(undefined) >= MAX_NAMES:
                return b""
            names = [
                encode_names(generation, name_index, queue.topic, queue.broker_name)
                for name_index, queue in undefined.items()
            ]
            frames = b"".join(names) + frames
        if self._position + len(frames) > self._size:
            return b""
        self._defined.update(undefined)
        return frames

    def append(self, frames: bytes, count: int) -> None:
        """Append `frames`, which complete the first `count` writes, to what the next flush writes."""
        with self._counts_lock:
            if not self._unwritten:
                self._unwritten_position = self._position
            self._unwritten.append(frames)
            self.appended = count
        self._position += len(frames)

    def write(self, frames: bytes, count: int) -> None:
        """Write `frames`, which complete the first `count` writes, and count those as durable without a flush.

        They survive the process, not power loss. In one life of the store all are appended, or all are written.
        """
        assert self._file is not None
        try:
            self._file.write_at(frames, self._position)
        except OSError as error:
            self._warn_unwritable(error)
            raise
        self._position += len(frames)
        self.mark_durable(count)

    def flush(self, count: int) -> bool:
        """Return True when the first `count` writes are durable, False when only a checkpoint can make them so.

        After a failed flush the kernel forgets which pages it could not write, and the next flush of the same
        descriptor succeeds: what was appended is lost for all we know. So a failure is noted before the next flush
        begins, and nothing counts as flushed until a checkpoint, in new blocks, has made everything durable.
        """
        waiter = None
        with self._counts_lock:
            if self.durable >= count or self._flush_failed:
                return self.durable >= count
            if self._flushing:
                waiter = FlushWaiter(count)
                self._waiters.append(waiter)
            else:
                self._flushing = True
        if waiter is None or self._wait_for_flush(waiter):
            reached = 0
            try:
                reached = self._flush()
            finally:
                self._finish_flush(reached)
        return self.durable >= count

    def _wait_for_flush(self, waiter: FlushWaiter) -> bool:
        """Wait for a flush by others. Returns whether the flush that is wanted has to be done here."""
        try:
            waiter.gate.acquire()
        except BaseException:  # from a signal's handler: nobody may wait for a flush that we do not do
            with self._counts_lock:
                is_waiting = waiter in self._waiters
                if is_waiting:
                    self._waiters.remove(waiter)
            if waiter.must_flush:
                self._finish_flush(0)
            raise
        return waiter.must_flush

    def _flush(self) -> int:
        """Write and flush what was appended by now; return how many writes are durable by that."""
        with self._sync_lock:
            if self._file is None or self._flush_failed:
                return 0
            with self._counts_lock:
                frames, self._unwritten = self._unwritten, []
                position, appended = self._unwritten_position, self.appended
            try:
                if frames:
                    self._file.write_at(b"".join(frames), position)
                self._file.sync()
            except BaseException as error:
                self._flush_failed = True
                if not isinstance(error, OSError):
                    raise
                self._warn_unwritable(error)
                return 0
            return appended

    def _finish_flush(self, reached: int) -> None:
        """Wake those whose writes are durable, now that the first `reached` are, and the one that flushes next."""
        with self._counts_lock:
            if self.durable < reached:
                self.durable = reached
            waiters, durable = self._waiters, self.durable
            if not waiters:
                self._flushing = False
            elif self._flush_failed:
                self._waiters, self._flushing = [], False  # a checkpoint has to help them all
            else:
                self._waiters = [waiter for waiter in waiters if waiter.count > durable]
                if self._waiters:
                    waiters = [waiter for waiter in waiters if waiter.count <= durable]
                    waiters.append(self._waiters.pop(0))
                    waiters[-1].must_flush = True
                else:
                    self._flushing = False
        for waiter in waiters:
            waiter.gate.release()

    def mark_durable(self, count: int) -> None:
        """Count the first `count` writes as appended and durable."""
        with self._counts_lock:
            if self.appended < count:
                self.appended = count
            if self.durable < count:
                self.durable = count

    def close(self) -> None:
        """Give the file up; `start_generation` makes a new one."""
        with self._sync_lock:
            file, self._file = self._file, None
            with self._counts_lock:
                self._unwritten = []
            if file is not None:
                file.close()
        self.is_appendable = False

    def _warn_unwritable(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_INTERVAL_S:
            self._warned_at = now
            log.warning("offset journal cannot be written, checkpoints stand in: file=%s error=%s", self._path, error)


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """Write a whole file and sync it; what a failure leaves is removed."""
    try:
        file = disk.open(path, create=True)
        try:
            file.write_at(data, 0)
            file.sync()
        finally:
            file.close()
    except OSError:
        try:
            disk.remove(path)
        except OSError:
            pass
        raise
