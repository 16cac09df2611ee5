"""The bytes of offsets.journal: a header and frames, each of them either complete or absent.

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

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from pyrocket_consumer.errors import OffsetStoreError, ProtocolError
from pyrocket_consumer.model import MessageQueue

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
