"""The file offsets.journal: its bytes, a header and frames that are either complete or absent, and its writer.

    header  magic, version, crc | generation, journal_bytes, checkpoint bytes and crc, backup bytes and crc, crc
    frame   crc32 of the rest, seeded with the generation | marker | kind and count | records

The file has its final length, filled with zeros, before the first frame. An append changes no metadata, so it needs
only one fdatasync. A checkpoint starts the next generation by one header write. Older frames are then invalid,
because their marker and seed are not those of the new generation. The header names the checkpoint (length, CRC) that
its frames follow, and the backup at that time. With other files the frames are not applied.

A frame takes effect completely or, if torn, not at all. So one `persist_all` is one step, and so is a reset with its
epoch. A record names a queue by its queue id and the name index of its (topic, broker name). An earlier frame of the
same generation defines each name index.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from zlib import crc32

from pyrocket_consumer.errors import OffsetStoreError, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import QueueOffset
from pyrocket_consumer.offsets.local.disk import Disk, DiskFile, write_file
from pyrocket_consumer.offsets.local.offsets_json import entry_template
from pyrocket_consumer.text import logger

log = logger("offsets")

JOURNAL_FILE = "offsets.journal"
WARN_INTERVAL_S = 60.0

VERSION = 1
HEADER_BYTES = 512  # one sector; frames begin on the next one, so a frame write cannot tear the header
MIN_JOURNAL_BYTES = 4096

# Kinds of frames.
OFFSETS = 1
NAMES = 2
RESETS = 3

MAX_NAMES = 0x10000
MAX_JOURNAL_RECORDS = 0x3FFF  # kind and count share 16 bits

_MAGIC = b"PyRktOff"
_PREAMBLE = struct.Struct("<8sHHI")  # these 16 bytes must not change in later versions
_FIELDS = struct.Struct("<QIIIII")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<IHH")
_HEAD = struct.Struct("<HH")
_RECORD = struct.Struct("<Hiq")
RECORD_BYTES = _RECORD.size
_RESET = struct.Struct("<Hiqq")
_NO_OFFSET = -1  # in a reset: the queue's offset stays as it is
_SINGLE = struct.Struct("<HHHiq")
_ONE_OFFSET = OFFSETS << 14 | 1
_NAMES = struct.Struct("<HHH")
_SIZES = {OFFSETS: _RECORD.size, RESETS: _RESET.size}  # bytes per record; the other kinds count bytes


FileIdentity = tuple[int, int]
"""Length and CRC of a file."""


def identity(data: bytes) -> FileIdentity:
    """Return the length and CRC of a file's contents."""
    return len(data), crc32(data)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """The valid generation of frames (a random number), and the checkpoint that it follows."""

    generation: int
    journal_bytes: int
    checkpoint: FileIdentity
    backup: FileIdentity = (0, 0)

    def follows(self, checkpoint: bytes) -> bool:
        """Return whether the frames were written after exactly this checkpoint."""
        return self.checkpoint == identity(checkpoint)

    def contradicts(self, checkpoint: bytes, backup: bytes | None) -> bool:
        """Return whether `checkpoint` must be damaged, or edited by hand.

        Every client, also Java's, makes the old checkpoint the backup when it writes a new one. So while the backup
        is the one in the header, the checkpoint must be, too.
        """
        return self.backup == identity(backup or b"") and self.checkpoint not in (identity(checkpoint), self.backup)

    def follows_backup(self, backup: bytes) -> bool:
        """Return whether the frames are newer than `backup`: they follow it, or it was the backup at that time.

        If the power failed before a checkpoint was renamed, the backup may be newer than the header on disk.
        """
        return identity(backup) in (self.checkpoint, self.backup)


@dataclass(slots=True)
class Replay:
    """The last offset and epoch of each queue in a journal, and how many frames were readable."""

    offsets: dict[MessageQueue, int] = field(default_factory=dict)
    epochs: dict[MessageQueue, int] = field(default_factory=dict)
    frames: int = 0
    end: int = HEADER_BYTES
    damaged_bytes: int = 0  # unreadable bytes between readable frames, after a power failure or on a bad disk


def encode_header(header: JournalHeader) -> bytes:
    """Return the first bytes of a journal."""
    beginning = _PREAMBLE.pack(_MAGIC, VERSION, 0, crc32(_MAGIC + struct.pack("<HH", VERSION, 0)))
    fields = _FIELDS.pack(header.generation, header.journal_bytes, *header.checkpoint, *header.backup)
    return beginning + fields + _CRC.pack(crc32(beginning + fields))


def decode_header(journal: bytes) -> JournalHeader:
    """Return the header of a journal.

    Raises:
        ProtocolError: the bytes are damaged, or not a journal.
        OffsetStoreError: a newer version of this package wrote it; upgrade this one.
    """
    size = _PREAMBLE.size + _FIELDS.size
    if len(journal) < HEADER_BYTES:
        raise ProtocolError(f"it is cut short to {len(journal)} bytes")
    magic, version, _, crc = _PREAMBLE.unpack_from(journal)
    if magic != _MAGIC or crc != crc32(journal[: _PREAMBLE.size - _CRC.size]):
        raise ProtocolError("it does not begin like a journal of offsets")
    if version > VERSION:
        raise OffsetStoreError(
            f"the journal has format {version}, and this pyrocket-consumer reads up to {VERSION}; upgrade it, "
            "or close the store with the newer version and remove offsets.journal"
        )
    if _CRC.unpack_from(journal, size)[0] != crc32(journal[:size]):
        raise ProtocolError("its header is damaged")
    generation, journal_bytes, *files = _FIELDS.unpack_from(journal, _PREAMBLE.size)
    return JournalHeader(generation, journal_bytes, (files[0], files[1]), (files[2], files[3]))


def encode_offset(generation: int, name_index: int, queue_id: int, offset: int) -> bytes:
    """Return the frame that sets one queue's offset."""
    frame = _SINGLE.pack(_marker(generation), _ONE_OFFSET, name_index, queue_id, offset)
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


encode_record = _RECORD.pack
"""(name index, queue id, offset) -> the bytes of one record of `encode_offsets`."""


def encode_offsets(generation: int, records: Sequence[bytes]) -> bytes:
    """Return the frame that sets the offsets of up to MAX_JOURNAL_RECORDS queues in one step."""
    frame = _HEAD.pack(_marker(generation), OFFSETS << 14 | len(records)) + b"".join(records)
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def encode_resets(generation: int, records: Sequence[tuple[int, int, int | None, int]]) -> bytes:
    """Return the frame that resets up to MAX_JOURNAL_RECORDS queues in one step.

    Each record is (name index, queue id, offset, epoch). An offset of None sets only the epoch.
    """
    head = _HEAD.pack(_marker(generation), RESETS << 14 | len(records))
    frame = head + b"".join(
        _RESET.pack(name_index, queue_id, _NO_OFFSET if offset is None else offset, epoch)
        for name_index, queue_id, offset, epoch in records
    )
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def encode_names(generation: int, name_index: int, topic: str, broker_name: str) -> bytes:
    """Return the frame that defines `name_index`; it must precede the first record that uses it."""
    topic_bytes, broker_bytes = topic.encode(), broker_name.encode()
    payload = _NAMES.pack(name_index, len(topic_bytes), len(broker_bytes)) + topic_bytes + broker_bytes
    frame = _HEAD.pack(_marker(generation), NAMES << 14 | len(payload)) + payload
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def replay(journal: bytes, header: JournalHeader) -> Replay:
    """Apply the frames of the header's generation in order.

    The frames end at the first invalid one, unless valid frames follow it. Then the power failed while several frames
    were being written, so the invalid one was never acknowledged; or the disk has damaged it. The later frames are
    applied, because they are newer, and `damaged_bytes` counts the bytes skipped.
    """
    seed, marker = header.generation & 0xFFFFFFFF, _marker(header.generation)
    marker_bytes = struct.pack("<H", marker)
    view, size = memoryview(journal), len(journal)
    unpack, record = _FRAME.unpack_from, _RECORD.unpack_from
    names: dict[int, tuple[str, str]] = {}
    latest: dict[tuple[int, int], int] = {}
    epochs: dict[tuple[int, int], int] = {}
    result = Replay()
    at, searching = HEADER_BYTES, False
    while True:
        valid = False
        if at + _FRAME.size <= size:
            crc, found, kind_and_count = unpack(journal, at)
            kind, count = kind_and_count >> 14, kind_and_count & MAX_JOURNAL_RECORDS
            end = at + _FRAME.size + count * _SIZES.get(kind, 1)
            valid = found == marker and end <= size and crc32(view[at + _CRC.size : end], seed) == crc
        if not valid:
            # While `searching`, the marker at `at` may be a coincidence, or belong to a damaged frame.
            at = journal.find(marker_bytes, at + _CRC.size + 1) - _CRC.size
            if at < result.end:
                break
            searching = True
            continue
        if searching:
            result.damaged_bytes += at - result.end
            searching = False
        if kind == OFFSETS:
            for start in range(at + _FRAME.size, end, _RECORD.size):
                name_index, queue_id, offset = record(journal, start)
                if name_index in names:
                    latest[name_index, queue_id] = offset
                else:  # the frame that defines the name index is damaged
                    result.damaged_bytes += _RECORD.size
        elif kind == NAMES:
            name_index, topic_size, broker_size = _NAMES.unpack_from(journal, at + _FRAME.size)
            text = at + _FRAME.size + _NAMES.size
            topic, broker = view[text : text + topic_size], view[text + topic_size : text + topic_size + broker_size]
            names[name_index] = str(topic, "utf-8"), str(broker, "utf-8")
        elif kind == RESETS:
            for name_index, queue_id, offset, epoch in _RESET.iter_unpack(view[at + _FRAME.size : end]):
                if name_index in names:
                    epochs[name_index, queue_id] = epoch
                    if offset != _NO_OFFSET:
                        latest[name_index, queue_id] = offset
                else:
                    result.damaged_bytes += _RESET.size
        else:
            raise OffsetStoreError(
                f"the journal has frames of kind {kind}, unknown to this version of pyrocket-consumer; upgrade it"
            )
        result.frames += 1
        result.end = at = end
    result.offsets = {
        MessageQueue(*names[name_index], queue_id): offset for (name_index, queue_id), offset in latest.items()
    }
    result.epochs = {
        MessageQueue(*names[name_index], queue_id): epoch for (name_index, queue_id), epoch in epochs.items()
    }
    return result


@lru_cache(4)
def _marker(generation: int) -> int:
    # Never 0, which fills unused space, nor similar to the bytes of small numbers, so that find() is fast.
    return generation * 0x9E37 & 0xFFFF | 0x8080


class QueueNames:
    """A topic and broker name: their number in the journal, and the text around a queue's numbers in offsets.json."""

    __slots__ = ("broker_name", "index", "template", "topic")

    def __init__(self, topic: str, broker_name: str, index: int) -> None:
        self.topic = topic
        self.broker_name = broker_name
        self.index = index
        self.template = entry_template(topic, broker_name)


class FileOffset(QueueOffset):
    """A queue's offset in memory, the one last passed to the disk (`stored`), and the epoch of its last reset.

    `origin` names the file where `load` found the offset.
    """

    __slots__ = ("epoch", "names", "origin")

    def __init__(self, queue: MessageQueue, names: QueueNames) -> None:
        # super().__init__() is too slow, because loading may create tens of thousands of entries.
        self.queue, self.names = queue, names
        self.offset: int | None = None
        self.stored: int | None = None
        self.origin: str | None = None
        self.epoch = 0


class JournalFile:
    """Appends frames and flushes them. Except for `flush`, callers hold the store's write lock.

    Writes are counted. The first `appended` of them are here or in a checkpoint, and the first `durable` of them
    survive a power failure. Appended frames stay in memory until a flush writes all of them at once. That is one
    write and one sync for any number of callers, which append more meanwhile. One flush runs at a time. Callers that
    append during a flush wait for the next one, which the first of them runs for all.

    Locks are taken in this order. The sync lock is held while the file is written and flushed, or exchanged. The
    counts lock, a leaf, guards the counts, the unwritten frames and the gates.
    """

    def __init__(self, disk: Disk, path: str, size: int, sync_directory: Callable[[], None]) -> None:
        self._disk = disk
        self._path = path
        self._size = size
        self._sync_directory = sync_directory
        self._sync_lock = Lock()
        self._file: DiskFile | None = None  # changed under the sync lock
        self._flush_failed = False  # changed under the sync lock
        self._generation = 0
        self._position = 0
        self._warned_at = float("-inf")
        self._defined: set[QueueNames] = set()  # those that frames of this generation define

        self._counts_lock = Lock()
        self._unwritten: list[bytes] = []
        self._flusher: Lock | None = None  # the gate of the caller that flushes, now or next
        self._waiting: dict[Lock, int] = {}  # the closed gates of callers that wait for it, and their counts

        self.is_appendable = False
        """Whether the next `load` would apply a frame appended now.

        It is true while the header on disk names the checkpoint on disk, and these two have every counted write. The
        writer of the store clears it while it writes.
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
            self._sync_directory()
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

    def encode_frames(self, changed: Sequence[FileOffset]) -> bytes:
        """Return the frames that set, in one step, the stored offset of each entry; b"" if they do not fit."""
        generation, defined = self._generation, self._defined
        if len(changed) == 1:
            entry = changed[0]
            frames = encode_offset(generation, entry.names.index, entry.queue.queue_id, entry.stored or 0)
            undefined = {} if entry.names in defined else {entry.names: None}
        elif len(changed) <= min(MAX_JOURNAL_RECORDS, self._size // 4 // RECORD_BYTES):
            frames = encode_offsets(
                generation, [encode_record(entry.names.index, entry.queue.queue_id, entry.stored) for entry in changed]
            )
            undefined = {entry.names: None for entry in changed if entry.names not in defined}
        else:
            return b""
        return self._with_definitions(frames, undefined)

    def encode_reset_frames(self, resets: Sequence[tuple[FileOffset, int | None]]) -> bytes:
        """Return the frames that set, in one step, these offsets and the epochs of entries; b"" if they do not fit."""
        if len(resets) > MAX_JOURNAL_RECORDS:
            return b""
        records = [(entry.names.index, entry.queue.queue_id, offset, entry.epoch) for entry, offset in resets]
        undefined = {entry.names: None for entry, _ in resets if entry.names not in self._defined}
        return self._with_definitions(encode_resets(self._generation, records), undefined)

    def _with_definitions(self, frames: bytes, undefined: Collection[QueueNames]) -> bytes:
        """Return `frames`, preceded by the definitions that they need; b"" if they do not fit."""
        if undefined:
            if any(names.index >= MAX_NAMES for names in undefined):
                return b""
            definitions = [
                encode_names(self._generation, names.index, names.topic, names.broker_name) for names in undefined
            ]
            frames = b"".join(definitions) + frames
        if self._position + len(frames) > self._size:
            return b""
        self._defined.update(undefined)
        return frames

    def append(self, frames: bytes, count: int) -> None:
        """Append `frames`, which complete the first `count` writes; the next flush writes them."""
        with self._counts_lock:
            self._unwritten.append(frames)
            self._position += len(frames)
            self.appended = count

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
        gate = Lock()
        with self._counts_lock:
            if self.durable >= count or self._flush_failed:
                return self.durable >= count
            if self._flusher is None:
                self._flusher = gate
            else:
                gate.acquire()
                self._waiting[gate] = count
        reached = 0
        try:
            if self._flusher is not gate:
                gate.acquire()  # until another caller has flushed this write, or leaves the next flush to this one
            if self._flusher is gate:
                reached = self._flush()
        finally:
            self._end_flush(gate, reached)
        return self.durable >= count

    def _end_flush(self, gate: Lock, reached: int) -> None:
        """Wake the callers whose writes are durable, now that the first `reached` are, and the next one to flush."""
        with self._counts_lock:
            waiting = self._waiting
            waiting.pop(gate, None)  # a signal handler has interrupted its caller
            if self._flusher is not gate:
                return
            if self.durable < reached:
                self.durable = reached
            if not waiting:
                self._flusher = None
                return
            woken = [each for each, count in waiting.items() if count <= self.durable or self._flush_failed]
            for each in woken:
                del waiting[each]
            self._flusher = next(iter(waiting), None)
            if self._flusher is not None:
                del waiting[self._flusher]
                woken.append(self._flusher)
        for each in woken:
            each.release()

    def _flush(self) -> int:
        """Write and flush all appended frames; return the number of durable writes."""
        with self._sync_lock:
            if self._file is None or self._flush_failed:
                return 0
            with self._counts_lock:
                frames, self._unwritten = b"".join(self._unwritten), []
                position, appended = self._position - len(frames), self.appended
            try:
                if frames:
                    self._file.write_at(frames, position)
                self._file.sync()
            except BaseException as error:
                self._flush_failed = True
                if not isinstance(error, OSError):
                    raise
                self._warn_unwritable(error)
                return 0
            return appended

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
