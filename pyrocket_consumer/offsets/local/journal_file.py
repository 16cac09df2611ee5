"""The journal on the disk. Appends run one after the other, and callers share flushes."""

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
    MAX_JOURNAL_RECORDS,
    MAX_NAMES,
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
    """A queue's offset, with the name index of its topic and broker name in the journal."""

    __slots__ = ("name_index",)

    def __init__(self, queue: MessageQueue, name_index: int) -> None:
        super().__init__(queue)
        self.name_index = name_index


class FlushWaiter:
    """A caller of `flush` that waits until another caller has flushed its write, or until it must flush itself."""

    __slots__ = ("count", "must_flush", "gate")

    def __init__(self, count: int) -> None:
        self.count = count
        self.must_flush = False
        self.gate = Lock()
        self.gate.acquire()


class JournalFile:
    """Appends frames and flushes them. Except for `flush`, callers hold the store's write lock.

    Writes are counted. The first `appended` of them are here or in a checkpoint, and the first `durable` of them
    survive a power failure. Appended frames stay in memory until a flush writes all of them at once. That is one
    write and one sync for any number of callers, which append more meanwhile. One flush runs at a time. Callers that
    append during a flush wait for the next one, which the first of them runs for all.

    Locks are taken in this order. The sync lock is held while the file is written and flushed, or exchanged. The
    counts lock, a leaf, guards the counts, the unwritten frames and the waiters.
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
        self._defined: set[int] = set()  # the name indexes that frames of this generation define

        self._counts_lock = Lock()
        self._unwritten: list[bytes] = []
        self._unwritten_position = 0
        self._flushing = False
        self._waiters: list[FlushWaiter] = []

        self.is_appendable = False
        """Whether the next `load` would apply a frame appended now.

        It is true while the header on disk names the checkpoint on disk, and these two have every counted write. The
        store clears it while it writes.
        """
        self.appended = 0
        self.durable = 0

    def open(self) -> None:
        """Open the existing file; the next `start_generation` uses it."""
        file = self._disk.open(self._path, create=False)
        with self._sync_lock:
            self._file, self._flush_failed = file, False

    def is_in_place(self) -> bool:
        """Return whether the open file still has its name, so that the next `load` finds its frames."""
        return self._file is None or self._file.is_at(self._path)

    def start_generation(self, checkpoint: FileIdentity, backup: FileIdentity) -> None:
        """Start a new generation after `checkpoint`, which is durable and has all offsets.

        The header is not flushed; it reaches the disk with the first flushed frame. Until then the old header names an
        older checkpoint, so `load` ignores the old frames.

        A generation is a random number. A counter could repeat after a power failure that lost the last header. Then
        frames of the lost generation that had reached the disk would count again.
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
            with self._sync_lock:  # no running flush can write older frames, or fail, from here on
                with self._counts_lock:
                    self._unwritten = []
                self._flush_failed = False
                self._file.write_at(header, 0)
        self._generation = generation
        self._position = HEADER_BYTES
        self._defined.clear()
        self.is_appendable = True

    def encode_frames(self, changed: Sequence[JournaledOffset]) -> bytes:
        """Return the frames that set, in one step, the stored offset of each entry; b"" if they do not fit."""
        generation = self._generation
        if len(changed) == 1:
            entry = changed[0]
            frames = encode_offset(generation, entry.name_index, entry.queue.queue_id, entry.stored or 0)
            undefined = {} if entry.name_index in self._defined else {entry.name_index: entry.queue}
        elif len(changed) <= min(MAX_JOURNAL_RECORDS, self._size // 4 // RECORD_BYTES):
            record, named = encode_record, self._defined
            frames = encode_offsets(
                generation, [record(entry.name_index, entry.queue.queue_id, entry.stored) for entry in changed]
            )
            undefined = {entry.name_index: entry.queue for entry in changed if entry.name_index not in named}
        else:
            return b""
        return self._with_definitions(frames, undefined)

    def encode_reset_frames(self, resets: Sequence[tuple[int, MessageQueue, int | None, int]]) -> bytes:
        """Return the frames of these resets (name index, queue, offset, epoch), in one step; b"" if they do not fit."""
        if len(resets) > MAX_JOURNAL_RECORDS:
            return b""
        records = [(name_index, queue.queue_id, offset, epoch) for name_index, queue, offset, epoch in resets]
        undefined = {name_index: queue for name_index, queue, _, _ in resets if name_index not in self._defined}
        return self._with_definitions(encode_resets(self._generation, records), undefined)

    def _with_definitions(self, frames: bytes, undefined: Mapping[int, MessageQueue]) -> bytes:
        """Return `frames`, preceded by the definitions that they need; b"" if they do not fit."""
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
        """Append `frames`, which complete the first `count` writes; the next flush writes them."""
        with self._counts_lock:
            if not self._unwritten:
                self._unwritten_position = self._position
            self._unwritten.append(frames)
            self.appended = count
        self._position += len(frames)

    def write(self, frames: bytes, count: int) -> None:
        """Write `frames`, which complete the first `count` writes, and count those as durable without a flush.

        They survive the end of the process, but not a power failure. A store uses either `append` or `write`.
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
        """Return True when the first `count` writes are durable, or False if only a checkpoint can make them durable.

        After a failed flush the kernel forgets which pages it could not write, and the next flush of the same
        descriptor succeeds. The appended frames may be lost then. So a failure is noted before the next flush begins.
        From then on no write counts as flushed until a checkpoint, in a new file, has made all of them durable.
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
        """Wait for a flush by another caller. Return whether this caller must run the next flush itself."""
        try:
            waiter.gate.acquire()
        except BaseException:  # from a signal handler; no other caller may wait for a flush that will not run
            with self._counts_lock:
                is_waiting = waiter in self._waiters
                if is_waiting:
                    self._waiters.remove(waiter)
            if waiter.must_flush:
                self._finish_flush(0)
            raise
        return waiter.must_flush

    def _flush(self) -> int:
        """Write and flush all appended frames; return the number of durable writes."""
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
        """Wake the waiters whose writes are durable, now that the first `reached` are, and the next one to flush."""
        with self._counts_lock:
            if self.durable < reached:
                self.durable = reached
            waiters, durable = self._waiters, self.durable
            if not waiters:
                self._flushing = False
            elif self._flush_failed:
                self._waiters, self._flushing = [], False  # they all need a checkpoint
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
        """Close the file; `start_generation` creates a new one."""
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
            log.warning("offset journal cannot be written, using checkpoints: file=%s error=%s", self._path, error)


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """Write a complete file and sync it. Remove a partial file after a failure."""
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
