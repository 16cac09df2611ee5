"""The journal on the disk: appends one after the other, flushes that callers share."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from threading import Lock

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.disk import Disk, DiskFile
from pyrocket_consumer.offsets.journal import (
    HEADER_BYTES,
    MAX_PAIRS,
    MAX_RECORDS,
    FileIdentity,
    JournalHeader,
    encode_header,
    encode_names,
    encode_offset,
    encode_offsets,
    encode_record,
    encode_resets,
)
from pyrocket_consumer.offsets.recovery import JOURNAL_FILE
from pyrocket_consumer.offsets.store import QueueOffset

log = logging.getLogger(__name__)

WARN_INTERVAL_S = 60.0


class PairedOffset(QueueOffset):
    """A queue's offset with the number that the journal gives to its topic and broker name."""

    __slots__ = ("pair",)

    def __init__(self, queue: MessageQueue, pair: int) -> None:
        super().__init__(queue)
        self.pair = pair


class JournalFile:
    """Appends frames and flushes them. All but `flush` is called under the store's write lock.

    Writes are counted: the first `appended` of them are in the file or in a checkpoint, the first `durable` survive a
    power failure. A flush holds one of two sync locks, and not the write lock, so that others append meanwhile. Each
    sync lock has a file descriptor of its own, because Linux reports a failed write-back once per descriptor.
    """

    def __init__(self, disk: Disk, directory: str, size: int) -> None:
        self._disk = disk
        self._directory = directory
        self._size = size
        self._path = os.path.join(directory, JOURNAL_FILE)
        self._sync_locks = (Lock(), Lock())
        self._files: tuple[DiskFile, DiskFile] | None = None  # changed under both sync locks
        self._flush_failed = False  # set under a sync lock, cleared under both
        self._generation = 0
        self._position = 0
        self._warned_at = float("-inf")
        self._named: set[int] = set()  # the pairs that frames of this generation have defined

        self.appendable = False
        """The header on disk names the checkpoint on disk, so that a frame appended now will be found again."""
        self._count_lock = Lock()
        self.appended = 0
        self.durable = 0

    def open(self) -> None:
        """Use the file that is there from the next `begin` on."""
        self._open_files()

    def begin(self, checkpoint: FileIdentity, backup: FileIdentity) -> None:
        """Let a new generation follow `checkpoint`, which is durable and holds everything.

        The header is not flushed: it reaches the disk with the first frame that does. If it does not, the old one names
        another checkpoint than the one found, and the old frames are not applied.

        A generation is a random number. A counter would come again after a power failure that took the last header, and
        with it those frames of the lost generation that had got to the disk.
        """
        generation = secrets.randbits(64)
        header = encode_header(JournalHeader(generation, self._size, checkpoint, backup))
        if self._files is None:
            new = self._path + ".new"
            write_file(self._disk, new, header.ljust(self._size, b"\0"))
            self._disk.replace(new, self._path)
            self._disk.sync_directory(self._directory)
            self._open_files()
        else:
            if self._flush_failed:
                with self._sync_locks[0], self._sync_locks[1]:  # no flush is under way that could fail from here on
                    self._flush_failed = False
            self._files[0].write_at(header, 0)
        self._generation = generation
        self._position = HEADER_BYTES
        self._named.clear()
        self.appendable = True

    def frames(self, changed: Sequence[tuple[PairedOffset, int]]) -> bytes:
        """Return the frames that set each entry's offset, in one step; b"" if a checkpoint is called for."""
        generation = self._generation
        if len(changed) == 1:
            entry, offset = changed[0]
            frames = encode_offset(generation, entry.pair, entry.queue.queue_id, offset)
            unnamed = {} if entry.pair in self._named else {entry.pair: entry.queue}
        elif len(changed) <= MAX_RECORDS:
            records = [encode_record(entry.pair, entry.queue.queue_id, offset) for entry, offset in changed]
            frames = encode_offsets(generation, records)
            if len(frames) > self._size // 4:
                return b""
            unnamed = {entry.pair: entry.queue for entry, _ in changed if entry.pair not in self._named}
        else:
            return b""
        return self._with_names(frames, unnamed)

    def reset_frames(self, resets: Sequence[tuple[int, MessageQueue, int | None, int]]) -> bytes:
        """Return the frames that reset (pair, queue, offset, epoch) each, in one step; b"" as `frames` does."""
        if len(resets) > MAX_RECORDS:
            return b""
        records = [(pair, queue.queue_id, offset, epoch) for pair, queue, offset, epoch in resets]
        unnamed = {pair: queue for pair, queue, _, _ in resets if pair not in self._named}
        return self._with_names(encode_resets(self._generation, records), unnamed)

    def _with_names(self, frames: bytes, unnamed: Mapping[int, MessageQueue]) -> bytes:
        """Return `frames` after the definitions they need; b"" when they do not fit."""
        generation = self._generation
        if unnamed:
            if max(unnamed) >= MAX_PAIRS:
                return b""
            names = [encode_names(generation, pair, queue.topic, queue.broker_name) for pair, queue in unnamed.items()]
            frames = b"".join(names) + frames
        if self._position + len(frames) > self._size:
            return b""
        self._named.update(unnamed)
        return frames

    def append(self, frames: bytes, count: int) -> None:
        """Append `frames`, which complete the first `count` writes: they survive the process, not yet power loss."""
        assert self._files is not None
        try:
            self._files[0].write_at(frames, self._position)
        except OSError as error:
            self.appendable = False
            self._warn("written", error)
            raise
        self._position += len(frames)
        self.appended = count

    def flush(self, count: int) -> bool:
        """Return True when the first `count` writes are durable, False when only a checkpoint can make them so.

        Who gets a sync lock finds either that a flush begun after its write is done, or flushes everything appended by
        then. While one flush runs, a second takes half of the newcomers: taking turns makes larger groups than taking
        whichever lock is free.

        After a failed flush the kernel forgets which pages it could not write, and the next flush of the same
        descriptor succeeds: what was appended is lost for all we know. So a failure is noted before the lock is
        released, and nothing counts as flushed until a checkpoint, in new blocks, has made everything durable.
        """
        which = count % 2
        with self._sync_locks[which]:
            if self.durable < count and self._files is not None and not self._flush_failed:
                appended = self.appended  # read before the flush: it may miss what is appended while it runs
                try:
                    self._files[which].sync()
                except OSError as error:
                    self._flush_failed = True
                    self._warn("flushed", error)
                else:
                    self.reach(appended)
        return self.durable >= count

    def reach(self, count: int) -> None:
        """Count the first `count` writes as durable."""
        with self._count_lock:
            if self.durable < count:
                self.durable = count

    def close(self) -> None:
        """Give the file up; `begin` makes a new one."""
        with self._sync_locks[0], self._sync_locks[1]:
            files, self._files = self._files, None
            for file in files or ():
                file.close()
        self.appendable = False

    def _warn(self, what: str, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_INTERVAL_S:
            self._warned_at = now
            log.warning("offset journal cannot be %s, checkpoints stand in: file=%s error=%s", what, self._path, error)

    def _open_files(self) -> None:
        first = self._disk.open(self._path, create=False)
        try:
            second = self._disk.open(self._path, create=False)
        except OSError:
            first.close()
            raise
        with self._sync_locks[0], self._sync_locks[1]:
            self._files, self._flush_failed = (first, second), False


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
