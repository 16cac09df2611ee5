"""Damaged records are read or refused. `tests/fuzz` damages them at random."""

import random

import pytest

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.compression import Compression, compress
from pyrocket_consumer.protocol.frame import decode_command
from pyrocket_consumer.protocol.message import (
    BatchItem,
    Message,
    StoredMessage,
    decode_messages,
    encode_batch,
    encode_message,
)
from tests import golden
from tests.protocol.records import WORKED_RECORD

ATTRIBUTES = [name for name in dir(Message) if not name.startswith("_") and name not in ("property", "detach")]

PULLED = [decode_command(entry.frame()).body for entry in golden.index() if entry.records]
SMALL_BODIES = sorted({body for body in PULLED if len(body) < 5000}, key=len)
COMPRESSED_RECORDS = [
    encode_message(StoredMessage("T", body, {"TAGS": "A", "KEYS": "k"}, sys_flag=flags | batch, queue_offset=7))
    for kind in Compression
    for batch, plain in [(0, b"abc" * 50), (0xC0, encode_batch([BatchItem(b"x" * 50, {"KEYS": "k"})] * 3))]
    for body, flags in [compress(plain, kind)]
]


def touch(message):
    """Read all attributes; they may raise only ProtocolError."""
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


def decode_and_touch(data):
    try:
        messages = decode_messages(data)
    except ProtocolError:
        return
    for message in messages:
        touch(message)
        touch(message.detach())


def test_every_attribute_is_touched():
    assert {"topic", "body", "tags", "keys", "properties", "message_id", "born_at", "store_host"} <= set(ATTRIBUTES)
    decode_and_touch(WORKED_RECORD)


@pytest.mark.parametrize("record", [WORKED_RECORD, *COMPRESSED_RECORDS, SMALL_BODIES[-1][:600]], ids=len)
def test_a_record_cut_or_changed_anywhere_is_read_or_refused(record):
    chance = random.Random(len(record))
    for index in range(len(record)):
        decode_and_touch(record[:index])
        for value in (0, 0xFF, record[index] ^ 1 << chance.randrange(8)):
            decode_and_touch(record[:index] + bytes([value]) + record[index + 1 :])
