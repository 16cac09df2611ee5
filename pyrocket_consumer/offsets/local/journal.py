"""The bytes of offsets.journal: a header and frames, each either whole or not there.

    header  magic, version, crc | generation, journal_bytes, checkpoint bytes and crc, backup bytes and crc, crc
    frame   crc32 of the rest, seeded with the generation | marker | kind and count | records

The file is as long as it will ever be, and written with zeros, before the first frame: an append changes no
metadata, so one fdatasync is one wait. A checkpoint starts the next generation by one header write; the frames
behind it die because neither their marker nor their seed is the new generation's. The header says which
checkpoint (length, CRC) its frames come after, and which one was the backup then: beside others they are not applied.

A frame takes effect whole or, torn, not at all, so one `persist_all` is one step, and so is a reset with its epoch.
Records name a queue by the index of its (topic, broker name) pair, which a frame of the same generation has defined
before, and its queue id.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from pyrocket_consumer.errors import OffsetStoreError, ProtocolError
from pyrocket_consumer.model import MessageQueue

VERSION = 1
HEADER_BYTES = 512  # one sector: frames begin on the next, so no frame write can tear the header
MIN_JOURNAL_BYTES = 4096

# Kinds of frames.
OFFSETS = 1
NAMES = 2
RESETS = 3

MAX_NAMES = 0x10000
MAX_RECORDS = 0x3FFF  # kind and count share 16 bits

_MAGIC = b"PyRktOff"
_PREAMBLE = struct.Struct("<8sHHI")  # these 16 bytes stay as they are in every version to come
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
_SIZES = {OFFSETS: _RECORD.size, RESETS: _RESET.size}  # bytes per record; others count bytes


FileIdentity = tuple[int, int]
"""Length and CRC of a file."""


def identity(data: bytes) -> FileIdentity:
    """Return what tells a file's contents from others."""
    return len(data), crc32(data)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which generation of frames is alive (a random number), and which checkpoint it comes after."""

    generation: int
    journal_bytes: int
    checkpoint: FileIdentity
    backup: FileIdentity = (0, 0)

    def follows(self, checkpoint: bytes) -> bool:
        """Tell whether the frames were written after `checkpoint`, and not after an older or another one."""
        return self.checkpoint == identity(checkpoint)

    def contradicts(self, checkpoint: bytes, backup: bytes | None) -> bool:
        """Tell whether nobody can have written `checkpoint`, as it is.

        Whoever replaces one makes it the backup, Java clients too. While the backup is what it was, so must it be.
        """
        return self.backup == identity(backup or b"") and self.checkpoint not in (identity(checkpoint), self.backup)

    def follows_backup(self, backup: bytes) -> bool:
        """Tell whether the frames are newer than `backup`: it is what they follow, or was the backup of that.

        Where a checkpoint was to be renamed when the power failed, the backup may be newer than a header that
        did not get to the disk.
        """
        return identity(backup) in (self.checkpoint, self.backup)


@dataclass(slots=True)
class Replay:
    """What the frames of a journal say: the last offset and epoch of each queue, and how the reading went."""

    offsets: dict[MessageQueue, int] = field(default_factory=dict)
    epochs: dict[MessageQueue, int] = field(default_factory=dict)
    frames: int = 0
    end: int = HEADER_BYTES
    damaged_bytes: int = 0  # unreadable between readable frames: lost power, or a bad disk


def encode_header(header: JournalHeader) -> bytes:
    """Return the first bytes of a journal."""
    beginning = _PREAMBLE.pack(_MAGIC, VERSION, 0, crc32(_MAGIC + struct.pack("<HH", VERSION, 0)))
    fields = _FIELDS.pack(header.generation, header.journal_bytes, *header.checkpoint, *header.backup)
    return beginning + fields + _CRC.pack(crc32(beginning + fields))


def decode_header(journal: bytes) -> JournalHeader:
    """Return the header of a journal.

    Raises:
        ProtocolError: the bytes are damaged, or no journal.
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
            f"the journal has format {version}, this version of pyrocket-consumer reads up to {VERSION}; upgrade it, "
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
"""(pair, queue id, offset) -> the bytes of one record of `encode_offsets`."""


def encode_offsets(generation: int, records: Sequence[bytes]) -> bytes:
    """Return the frame that sets the offsets of up to MAX_RECORDS queues in one step."""
    frame = _HEAD.pack(_marker(generation), OFFSETS << 14 | len(records)) + b"".join(records)
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def encode_resets(generation: int, records: Sequence[tuple[int, int, int | None, int]]) -> bytes:
    """Return the frame that resets up to MAX_RECORDS queues in one step.

    Each record is (pair, queue id, offset, epoch); without an offset only the epoch is new.
    """
    head = _HEAD.pack(_marker(generation), RESETS << 14 | len(records))
    frame = head + b"".join(
        _RESET.pack(name_index, queue_id, _NO_OFFSET if offset is None else offset, epoch)
        for name_index, queue_id, offset, epoch in records
    )
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def encode_names(generation: int, name_index: int, topic: str, broker_name: str) -> bytes:
    """Return the frame that defines `name_index`; it must come before the first record that uses it."""
    topic_bytes, broker_bytes = topic.encode(), broker_name.encode()
    payload = _NAMES.pack(name_index, len(topic_bytes), len(broker_bytes)) + topic_bytes + broker_bytes
    frame = _HEAD.pack(_marker(generation), NAMES << 14 | len(payload)) + payload
    return _CRC.pack(crc32(frame, generation & 0xFFFFFFFF)) + frame


def replay(journal: bytes, header: JournalHeader) -> Replay:
    """Apply the frames of the header's generation in order.

    They end at the first place where no valid frame stands. If valid ones follow even so, what lies between was never
    acknowledged (power was lost while several were on their way) or the disk has damaged it: they are used, because
    they are newer, and `damaged_bytes` tells that something was skipped.
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
            kind, count = kind_and_count >> 14, kind_and_count & MAX_RECORDS
            end = at + _FRAME.size + count * _SIZES.get(kind, 1)
            valid = found == marker and end <= size and crc32(view[at + _CRC.size : end], seed) == crc
        if not valid:
            # `searching`: `at` is where a marker stands by chance, or a frame that is damaged itself.
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
                else:  # its definition is among what is damaged
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
    # Never 0, which is what an unused place holds, nor like the bytes of small numbers: looking for it must be quick.
    return generation * 0x9E37 & 0xFFFF | 0x8080
