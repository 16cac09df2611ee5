import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.wire.compression import Compression, compress, decompress
from pyrocket_consumer.wire.frame import decode_command
from pyrocket_consumer.wire.message import (
    BatchItem,
    Message,
    StoredMessage,
    decode_batch,
    decode_messages,
    encode_batch,
    encode_message,
)
from tests import golden
from tests.trials import trials
from tests.wire.records import QUEUE, WORKED_RECORD, property_maps, stored_messages

ATTRIBUTES = [name for name in dir(Message) if not name.startswith("_") and name not in ("property", "detach")]

REAL_BODIES = [decode_command(entry.frame()).body for entry in golden.index() if entry.records]
SMALL_BODIES = sorted({body for body in REAL_BODIES if len(body) < 5000}, key=len)
COMPRESSED_RECORDS = [
    encode_message(StoredMessage("T", body, {"TAGS": "A"}, sys_flag=flags | batch))
    for kind in Compression
    for batch, plain in [(0, b"abc" * 50), (0xC0, encode_batch([BatchItem(b"x" * 50, {"KEYS": "k"})] * 3))]
    for body, flags in [compress(plain, kind)]
]


def touch(message):
    """Read everything there is; only ProtocolError may come."""
    for name in (*ATTRIBUTES, "queue", "queue_offset", "sys_flag"):
        try:
            getattr(message, name)
        except ProtocolError:
            pass
    for name in ("TAGS", "nothing"):
        try:
            message.property(name)
        except ProtocolError:
            pass
    assert repr(message).startswith("<Message ")
    assert message.store_size <= 16 * 1024 * 1024


def decode_and_touch(data, queue=None):
    try:
        messages = decode_messages(data, queue)
    except ProtocolError:
        return
    for message in messages:
        touch(message)
        touch(message.detach())


def test_every_attribute_is_touched():
    assert {"topic", "body", "tags", "keys", "properties", "message_id", "born_at", "store_host"} <= set(ATTRIBUTES)
    decode_and_touch(WORKED_RECORD)


@pytest.mark.search
@given(st.binary(max_size=400))
@settings(max_examples=trials(300))
def test_any_bytes_give_messages_or_a_protocol_error(data):
    decode_and_touch(data)


@pytest.mark.search
@given(
    total=st.one_of(st.integers(0, 400), st.integers(0, 2**32 - 1)),
    magic=st.sampled_from([0xDAA320A7, 0xDAA320AB, 0xCBD43194]),
    head=st.binary(min_size=28, max_size=28),
    sys_flag=st.one_of(st.integers(0, 0x7FF), st.integers(-(2**31), 2**31 - 1)),
    middle=st.binary(min_size=44, max_size=68),
    body_length=st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1)),
    rest=st.binary(max_size=200),
)
@settings(max_examples=trials(300), suppress_health_check=[HealthCheck.too_slow])
def test_any_record_with_a_good_magic_is_read_or_refused(
    total, magic, head, sys_flag, middle, body_length, rest
):
    data = struct.pack(">II", total, magic) + head + struct.pack(">i", sys_flag) + middle
    data += struct.pack(">I", body_length) + rest
    decode_and_touch(data)
    decode_and_touch(struct.pack(">I", len(data)) + data[4:], QUEUE)


@pytest.mark.search
@given(
    data=st.one_of(st.sampled_from(SMALL_BODIES + COMPRESSED_RECORDS), stored_messages().map(encode_message)),
    changes=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 2**32)),
)
@settings(max_examples=trials(400), deadline=None)
def test_changed_and_cut_records_are_read_or_refused(data, changes, cut):
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    if cut is not None:
        del damaged[cut % len(damaged) :]
    decode_and_touch(bytes(damaged))


@pytest.mark.parametrize("record", [WORKED_RECORD, *COMPRESSED_RECORDS, SMALL_BODIES[-1][:600]], ids=len)
def test_a_record_cut_or_changed_anywhere_is_read_or_refused(record):
    chance = random.Random(len(record))
    for place in range(len(record)):
        decode_and_touch(record[:place])
        for value in (0, 0xFF, record[place] ^ 1 << chance.randrange(8)):
            decode_and_touch(record[:place] + bytes([value]) + record[place + 1 :])


@pytest.mark.search
@given(st.binary(max_size=200), st.integers(0, 0x7FF))
@settings(max_examples=trials(300))
def test_any_bytes_decompress_or_are_a_protocol_error(data, sys_flag):
    try:
        decompress(data, sys_flag, max_bytes=1 << 20)
    except ProtocolError:
        pass


def with_one_byte_changed(data, place, value):
    place %= len(data)
    return data[:place] + bytes([value]) + data[place + 1 :]


@pytest.mark.search
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            with_one_byte_changed,
            st.lists(st.builds(BatchItem, st.binary(max_size=20), property_maps), min_size=1).map(encode_batch),
            st.integers(0, 2**32),
            st.integers(0, 255),
        ),
    )
)
def test_any_bytes_are_a_batch_or_a_protocol_error(data):
    try:
        items = decode_batch(data)
    except ProtocolError:
        return
    assert sum(len(item.body) for item in items) <= len(data)
