"""The journal's bytes: only complete frames of the current generation count."""

from __future__ import annotations

import struct
import time
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrocket_consumer.errors import OffsetStoreError, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.local.journal import (
    HEADER_BYTES,
    JournalHeader,
    decode_header,
    encode_header,
    encode_names,
    encode_offset,
    encode_offsets,
    encode_record,
    identity,
    replay,
)
from tests.offsets.local.driving import ORDERS, flip_bit
from tests.speed import quick

SIZE = 8192
HEADER = JournalHeader(7, SIZE, identity(b"checkpoint!"), identity(b"before it"))


def journal(*frames: bytes, header: JournalHeader = HEADER, before: bytes = b"") -> bytes:
    """Return a journal with `frames`, written over the bytes `before`."""
    data = bytearray(encode_header(header).ljust(SIZE, b"\0"))
    data[HEADER_BYTES : HEADER_BYTES + len(before)] = before
    body = b"".join(frames)
    data[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    return bytes(data)


def frames(generation: int, *offsets: int) -> list[bytes]:
    """Return a definition, and one frame per offset of queue 3."""
    written = [encode_offset(generation, 0, 3, offset) for offset in offsets]
    return [encode_names(generation, 0, "orders", "broker-a"), *written]


QUEUE = ORDERS[3]


def test_a_header_is_read_back_and_names_its_checkpoint():
    header = decode_header(encode_header(HEADER).ljust(HEADER_BYTES, b"\0"))
    assert header == HEADER
    assert header.follows(b"checkpoint!") and not header.follows(b"checkpoint?")
    assert header.follows_backup(b"before it") and header.follows_backup(b"checkpoint!")
    assert not header.follows_backup(b"a later one")


def test_the_last_frame_of_a_queue_wins():
    result = replay(journal(*frames(7, 10, 30, 20)), HEADER)
    assert (result.offsets, result.frames, result.damaged_bytes) == ({QUEUE: 20}, 4, 0)


def test_a_frame_of_many_queues_counts_whole_or_not_at_all():
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(50)]
    many = encode_offsets(7, [encode_record(0, queue.queue_id, 100 + queue.queue_id) for queue in queues])
    start = frames(7, 1)
    assert replay(journal(*start, many), HEADER).offsets == {queue: 100 + queue.queue_id for queue in queues}
    for torn in range(len(many)):
        assert replay(journal(*start, many[:torn], b"\xaa" * 8), HEADER).offsets == {QUEUE: 1}


def test_frames_of_an_older_generation_are_ignored():
    old = b"".join(frames(6, *range(1000, 1100)))
    assert replay(journal(before=old), HEADER).offsets == {}
    result = replay(journal(*frames(7, 5), before=old), HEADER)
    assert (result.offsets, result.damaged_bytes) == ({QUEUE: 5}, 0)


def test_frames_behind_an_unreadable_one_are_used():
    good, start, length = journal(*frames(7, 10, 20, 30)), len(b"".join(frames(7, 10))), len(encode_offset(7, 0, 3, 20))
    for byte in range(length):
        result = replay(flip_bit(good, HEADER_BYTES + start + byte, 6), HEADER)
        assert (result.offsets, result.damaged_bytes) == ({QUEUE: 30}, length)


def test_records_whose_names_are_damaged_are_skipped():
    result = replay(flip_bit(journal(*frames(7, 10, 20)), HEADER_BYTES + 9, 0), HEADER)
    assert result.offsets == {}
    assert result.damaged_bytes > 0


def test_every_damaged_header_is_refused():
    good = journal()
    flips = (flip_bit(good, byte, bit) for byte in range(48) for bit in range(8))
    for damaged in (*flips, *(good[:length] for length in range(HEADER_BYTES))):
        with pytest.raises(ProtocolError):
            decode_header(damaged)


def test_a_newer_format_is_reported():
    newer = bytearray(journal())
    struct.pack_into("<HH", newer, 8, 2, 0)
    struct.pack_into("<I", newer, 12, crc32(newer[:12]))
    with pytest.raises(OffsetStoreError, match="format 2.*upgrade"):
        decode_header(bytes(newer))


def test_a_frame_of_an_unknown_kind_is_a_newer_version():
    payload = struct.pack("<HH", struct.unpack_from("<H", encode_offset(7, 0, 0, 0), 4)[0], 0 << 14 | 4) + b"what"
    unknown = struct.pack("<I", crc32(payload, 7)) + payload
    with pytest.raises(OffsetStoreError, match="unknown to this version"):
        replay(journal(unknown), HEADER)


@given(st.binary(max_size=600))
def test_garbage_behind_the_header_is_ignored(garbage):
    assert replay(journal(garbage), HEADER).offsets == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)), max_size=40))
def test_frames_are_replayed_like_updates_of_a_dictionary(records):
    pairs = [("orders", "broker-a"), ("orders", "broker-b"), ("Zahlungen·", "broker-a"), ("", "")]
    names = [encode_names(7, index, *pair) for index, pair in enumerate(pairs)]
    written = [encode_offset(7, *record) for record in records]
    expected = {MessageQueue(*pairs[pair], queue_id): offset for pair, queue_id, offset in records}
    assert replay(journal(*names, *written), HEADER).offsets == expected


def test_a_full_journal_is_read_quickly():
    """The limit is loose, and catches only quadratic code; the benchmark measures."""
    header = JournalHeader(9, 1 << 20, identity(b""))
    body = encode_names(9, 0, "orders", "broker-a") + b"".join(encode_offset(9, 0, n % 256, n) for n in range(47_000))
    data = encode_header(header).ljust(HEADER_BYTES, b"\0") + body

    def reading() -> float:
        started = time.process_time()
        assert len(replay(data.ljust(1 << 20, b"\0"), header).offsets) == 256
        return time.process_time() - started

    assert quick(5, reading)
