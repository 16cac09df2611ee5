"""The journal on the disk: appends one after the other, flushes that callers share."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from threading import Lock

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import QueueOffset
from pyrocket_consumer.offsets.local.disk import Disk, DiskFile, SyncedNames
from pyrocket_consumer.offsets.local.journal import (
    HEADER_BYTES,
    MAX_PAIRS,
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


class PairedOffset(QueueOffset):
    """A queue's offset with the number that the journal gives to its topic and broker name."""

    __slots__ = ("pair",)

    def __init__(self, queue: MessageQueue, pair: int) -> None:
        super().__init__(queue)
        self.pair = pair


class _Turn:
    """A caller of `flush` that waits until a flush of another one reaches its write, or it has to flush itself."""

    __slots__ = ("count", "flushes", "gate")

    def __init__(self, count: int) -> None:
        self.count = count
        self.flushes = False
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

    def __init__(self, disk: Disk, names: SyncedNames, size: int) -> None:
        self._disk = disk
        self._names = names
        self._size = size
        self._path = os.path.join(names.directory, JOURNAL_FILE)
        self._sync_lock = Lock()
        self._file: DiskFile | None = None  # changed under the sync lock
        self._flush_failed = False  # changed under the sync lock
        self._generation = 0
        self._position = 0
        self._warned_at = float("-inf")
        self._named: set[int] = set()  # the pairs that frames of this generation have defined

        self._turn_lock = Lock()
        self._unwritten: list[bytes] = []
        self._unwritten_at = 0
        self._flushing = False
        self._waiting: list[_Turn] = []

        self.appendable = False
        """The header on disk names the checkpoint on disk, so that a frame appended now will be found again, and all
        that is counted as written is here or there: the store clears it while it writes.
        """
        self.appended = 0
        self.durable = 0

    def open(self) -> None:
        """Use the file that is there from the next `begin` on."""
        file = self._disk.open(self._path, create=False)
        with self._sync_lock:
            self._file, self._flush_failed = file, False

    def is_there(self) -> bool:
        """Tell whether what is appended can be found again: False when another file, or none, has the name."""
        return self._file is None or self._file.is_at(self._path)

    def begin(self, checkpoint: FileIdentity, backup: FileIdentity) -> None:
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
            self._names.sync()
            self.open()
        else:
            with self._sync_lock:  # no flush is under way that could write frames of before, or fail, from here on
                with self._turn_lock:
                    self._unwritten = []
                self._flush_failed = False
                self._file.write_at(header, 0)
        self._generation = generation
        self._position = HEADER_BYTES
        self._named.clear()
        self.appendable = True

    def frames(self, changed: Sequence[PairedOffset]) -> bytes:
        """Return the frames that set the offset of each entry to what is stored, in one step; b"" if a checkpoint is
        called for.
        """
        generation = self._generation
        if len(changed) == 1:
            entry = changed[0]
            frames = encode_offset(generation, entry.pair, entry.queue.queue_id, entry.stored or 0)
            unnamed = {} if entry.pair in self._named else {entry.pair: entry.queue}
        elif len(changed) <= min(MAX_RECORDS, self._size // 4 // RECORD_BYTES):
            record, named = encode_record, self._named
            frames = encode_offsets(
                generation, [record(entry.pair, entry.queue.queue_id, entry.stored) for entry in changed]
            )
            unnamed = {entry.pair: entry.queue for entry in changed if entry.pair not in named}
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
        """Append `frames`, which complete the first `count` writes, to what the next flush writes."""
        with self._turn_lock:
            if not self._unwritten:
                self._unwritten_at = self._position
            self._unwritten.append(frames)
            self.appended = count
        self._position += len(frames)

    def write(self, frames: bytes, count: int) -> None:
        """Write `frames`, which complete the first `count` writes, and count them as durable without a flush: they
        survive the process, not power loss. In one life of the store all are appended, or all are written.
        """
        assert self._file is not None
        try:
            self._file.write_at(frames, self._position)
        except OSError as error:
            self._warn(error)
            raise
        self._position += len(frames)
        self.reach(count)

    def flush(self, count: int) -> bool:
        """Return True when the first `count` writes are durable, False when only a checkpoint can make them so.

        After a failed flush the kernel forgets which pages it could not write, and the next flush of the same
        descriptor succeeds: what was appended is lost for all we know. So a failure is noted before the next flush
        begins, and nothing counts as flushed until a checkpoint, in new blocks, has made everything durable.
        """
        turn = None
        with self._turn_lock:
            if self.durable >= count or self._flush_failed:
                return self.durable >= count
            if self._flushing:
                turn = _Turn(count)
                self._waiting.append(turn)
            else:
                self._flushing = True
        if turn is None or self._waited(turn):
            reached = 0
            try:
                reached = self._flush()
            finally:
                self._end_turn(reached)
        return self.durable >= count

    def _waited(self, turn: _Turn) -> bool:
        """Wait for a flush by others. Returns whether the flush that is wanted has to be done here."""
        try:
            turn.gate.acquire()
        except BaseException:  # from a signal's handler: nobody may wait for a flush that we do not do
            with self._turn_lock:
                waits = turn in self._waiting
                if waits:
                    self._waiting.remove(turn)
            if turn.flushes:
                self._end_turn(0)
            raise
        return turn.flushes

    def _flush(self) -> int:
        """Write and flush what was appended by now; return how many writes are durable by that."""
        with self._sync_lock:
            if self._file is None or self._flush_failed:
                return 0
            with self._turn_lock:
                frames, self._unwritten = self._unwritten, []
                position, appended = self._unwritten_at, self.appended
            try:
                if frames:
                    self._file.write_at(b"".join(frames), position)
                self._file.sync()
            except BaseException as error:
                self._flush_failed = True
                if not isinstance(error, OSError):
                    raise
                self._warn(error)
                return 0
            return appended

    def _end_turn(self, reached: int) -> None:
        """Wake those whose writes are durable, now that the first `reached` are, and the one that flushes next."""
        with self._turn_lock:
            if self.durable < reached:
                self.durable = reached
            turns, durable = self._waiting, self.durable
            if not turns:
                self._flushing = False
            elif self._flush_failed:
                self._waiting, self._flushing = [], False  # a checkpoint has to help them all
            else:
                self._waiting = [turn for turn in turns if turn.count > durable]
                if self._waiting:
                    turns = [turn for turn in turns if turn.count <= durable]
                    turns.append(self._waiting.pop(0))
                    turns[-1].flushes = True
                else:
                    self._flushing = False
        for turn in turns:
            turn.gate.release()

    def reach(self, count: int) -> None:
        """Count the first `count` writes as appended and durable."""
        with self._turn_lock:
            if self.appended < count:
                self.appended = count
            if self.durable < count:
                self.durable = count

    def close(self) -> None:
        """Give the file up; `begin` makes a new one."""
        with self._sync_lock:
            file, self._file = self._file, None
            with self._turn_lock:
                self._unwritten = []
            if file is not None:
                file.close()
        self.appendable = False

    def _warn(self, error: OSError) -> None:
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
