"""The prepared send request has the same frames as the equivalent command."""

from __future__ import annotations

import pytest

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.producer.send_request import SendTemplate
from pyrocket_consumer.protocol.frame import MAX_FRAME_BYTES, MAX_HEADER_BYTES, decode_command, encode_command
from tests.for_each import for_each

MESSAGES = {
    "plain": (b"x", "TAGS\x01paid\x02", 0, 0, 1_700_000_000_000),
    "numbers": (b"x" * 1024, "KEYS\x01a b\x02", 9, -(2**31), 1),
    "no properties": (b"x", "", 0, 7, 1_700_000_000_000),
    "any text": (b"\x00\xff%d", 'a\x01%s "q" \\ / \n \x7f ü \U0001f600\x02', 0, 0, 1),
}
QUEUES = {
    "plain": ("G", "orders", 3, "broker-a"),
    "a retry topic": ("G", "%RETRY%G%d", 0, "broker %s"),
    "any text": ('"G" ü', "or\\ders", 0, 'br"oker'),
    "no broker name": ("G", "orders", 0, None),
}


@for_each("message", MESSAGES)
@for_each("queue", QUEUES)
@for_each("is_batch", [False, True])
def test_a_prepared_frame_is_the_same_as_one_of_the_command(message, queue, is_batch):
    template = SendTemplate(*QUEUES[queue], is_batch)
    command = template.request(*MESSAGES[message])
    command.opaque = 0x7FFFFFFF
    frame = template.encode(command.opaque, *MESSAGES[message], MAX_FRAME_BYTES)
    assert decode_command(frame) == decode_command(encode_command(command))


@for_each(
    "properties, max_frame_bytes",
    [("a\x01\ud800\x02", MAX_FRAME_BYTES), ("a\x01b\x02", 1200), ("a" * MAX_HEADER_BYTES, MAX_FRAME_BYTES)],
    ids=["half of a surrogate pair", "frame too large", "header too large"],
)
def test_a_message_too_large_for_a_frame_has_none(properties, max_frame_bytes):
    template, message = SendTemplate("G", "orders", 0, "broker-a"), (b"x" * 1024, properties, 0, 0, 1)
    assert template.encode(1, *message, max_frame_bytes) is None
    with pytest.raises(ProtocolError):
        encode_command(template.request(*message), max_frame_bytes=max_frame_bytes)


def test_a_frame_may_have_the_largest_size():
    template, message = SendTemplate("G", "orders", 0, "broker-a"), (b"x" * 1024, "a\x01b\x02", 0, 0, 1)
    size = len(template.encode(1, *message, MAX_FRAME_BYTES))
    assert template.encode(1, *message, size) is not None
    assert template.encode(1, *message, size - 1) is None
