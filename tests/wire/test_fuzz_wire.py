"""Any bytes give a value or ProtocolError: no other error, no hang, no memory that only a claimed length asks for."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.wire import bodies, fastjson
from pyrocket_consumer.wire import command as headers
from pyrocket_consumer.wire.frame import FrameBuffer, InPlaceFrames, RemotingCommand, decode_command, encode_command
from tests import golden
from tests.trials import trials

Decoder = Callable[[bytes], object]

BODY_DECODERS: dict[str, Decoder] = {
    name: decoder
    for name, decoder in vars(bodies).items()
    if name.startswith("decode_") and name != "decode_route"
} | {"decode_route": lambda body: bodies.decode_route("T", body)}

HEADERS = [
    value
    for value in vars(headers).values()
    if isinstance(value, type) and issubclass(value, headers.Header) and value is not headers.Header
]

FRAMES = sorted({frame[:3000] for version in golden.VERSIONS for frame in golden.frames(version).values()})
BODIES = sorted(
    {
        body
        for version in (*golden.VERSIONS, "reset")
        for frame in golden.frames(version).values()
        if (body := decode_command(frame).body)[:1] in (b"{", b"[")
    }
)

FUZZ = settings(max_examples=trials(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def value_or_protocol_error(decode: Decoder, data: bytes) -> None:
    told = ""
    try:
        decode(data)
    except ProtocolError as error:
        told = str(error)
    assert len(told) < 500


@st.composite
def damaged(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Return one of `originals` with some bytes changed, taken out or put in."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0 if data:
                data[place] = draw(st.integers(0, 255))
            case 1:
                del data[place : place + draw(st.integers(1, 20))]
            case 2:
                data[place:place] = draw(st.binary(max_size=8) | st.sampled_from(TOKENS))
            case _:
                del data[place:]
    return bytes(data)


TOKENS = [
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"{{", b"null", b"-1", b"1e999", b"99999999999999999999",
    b"\\ud800", b"[]", b"{}", b'"x"', b"true", b"0.5", b"\x00", b"\xff",
]
JSON_LIKE = st.lists(
    st.sampled_from(
        [
            *TOKENS, b'"offsetTable"', b'"brokerName"', b'"queueId"', b'"topic"', b'"consumerTable"', b'"mqTable"',
            b'"messageQueueTable"', b'"queueDatas"', b'"brokerDatas"', b'"consumerDataSet"', b"0", b'"0"',
        ]
    ),
    max_size=40,
).map(b"".join)


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.search
@given(st.binary(max_size=300) | damaged(FRAMES))
@FUZZ
def test_any_frame(data):
    value_or_protocol_error(decode_command, data)


@pytest.mark.search
@given(header=st.binary(max_size=120) | JSON_LIKE, header_type=st.integers(0, 3), body=st.binary(max_size=20))
@FUZZ
def test_any_header_within_right_lengths(header, header_type, body):
    frame = struct.pack(">II", 4 + len(header) + len(body), header_type << 24 | len(header)) + header + body
    value_or_protocol_error(decode_command, frame)


@pytest.mark.search
@given(
    fixed=st.tuples(st.integers(-(2**15), 2**15 - 1), st.integers(0, 255), st.integers(-(2**31), 2**31 - 1)),
    lengths=st.tuples(*[st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 40)] * 2),
    rest=st.binary(max_size=60),
)
@FUZZ
def test_any_lengths_in_a_binary_header(fixed, lengths, rest):
    code, language, opaque = fixed
    header = struct.pack(">hBhiii", code, language, 401, opaque, 0, lengths[0]) + rest[:10]
    header += struct.pack(">i", lengths[1]) + rest[10:]
    frame = struct.pack(">II", 4 + len(header), 1 << 24 | len(header)) + header
    value_or_protocol_error(decode_command, frame)


@pytest.mark.search
@given(
    commands=st.lists(
        st.builds(
            RemotingCommand,
            st.integers(-(2**15), 2**15 - 1),
            st.dictionaries(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=50), max_size=5),
            st.binary(max_size=9000),
            st.integers(0, 2**31 - 1),
            st.integers(0, 3),
            st.none() | st.text(min_size=1, max_size=50),
        ),
        max_size=5,
    ),
    header_type=st.integers(0, 1),
    pieces=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
)
@FUZZ
def test_any_commands_in_any_pieces_come_out_whole(commands, header_type, pieces):
    stream = b"".join(encode_command(command, header_type) for command in commands)
    expected = [replace(command, header_type=header_type) for command in commands]
    assert fed(FrameBuffer(), stream, pieces) == expected
    in_place = fed(InPlaceFrames(), stream, pieces)
    assert [replace(command, body=bytes(extent)) for command, extent in in_place] == expected


@pytest.mark.search
@given(st.lists(st.binary(max_size=40) | damaged(FRAMES), max_size=4), st.lists(st.integers(1, 5000), min_size=1))
@FUZZ
@example([struct.pack(">iI", 16 * 1024 * 1024 - 4, 0)], [1])
@example([struct.pack(">iI", 2**31 - 1, 2**24 - 1)], [3])
def test_any_stream_in_any_pieces(parts, pieces):
    value_or_protocol_error(lambda stream: fed(FrameBuffer(), stream, pieces), b"".join(parts))
    value_or_protocol_error(lambda stream: fed(InPlaceFrames(), stream, pieces), b"".join(parts))


def fed(buffer: Any, stream: bytes, pieces: list[int]) -> list[Any]:
    commands = []
    place = turn = 0
    while place < len(stream):
        space = buffer.space()
        data = stream[place : place + min(pieces[turn % len(pieces)], len(space))]
        space[: len(data)] = data
        commands += buffer.received(len(data))
        place, turn = place + len(data), turn + 1
    return commands


# --- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.search
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.__name__)
@given(data=st.data())
@settings(max_examples=trials(30), deadline=None)
def test_any_fields(header, data):
    known = ["topic", "queueId", "offset", "a", "e", "consumerGroup", "clientID", *header_names(header)]
    values = st.text(max_size=30) | st.integers().map(str) | st.sampled_from(["", "-", "true", "9" * 5000, "١"])
    fields = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=5), values, max_size=12))
    value_or_protocol_error(lambda _: header.from_fields(fields), b"")


def header_names(header: type[headers.Header]) -> list[str]:
    try:
        header.from_fields({})
    except ProtocolError as error:
        return [str(error).split("field ")[1].split()[0]]
    return []


# --- JSON and bodies -------------------------------------------------------------------------------------------------


@pytest.mark.search
@given(st.binary(max_size=300) | JSON_LIKE | damaged(BODIES))
@settings(max_examples=trials(1500), deadline=None)
def test_any_json(data):
    value_or_protocol_error(fastjson.loads, data)


@pytest.mark.search
@pytest.mark.parametrize("name", BODY_DECODERS)
@given(data=st.binary(max_size=200) | JSON_LIKE | damaged(BODIES))
@settings(max_examples=trials(250), deadline=None)
def test_any_body(name, data):
    value_or_protocol_error(BODY_DECODERS[name], data)


WRONG = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    WRONG,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["topic", "queueId", "brokerName", "offset", "brokerAddrs", "subVersion", "tagsSet", "0"]),
        inner,
        max_size=3,
    ),
    max_leaves=10,
)


@pytest.mark.search
@pytest.mark.parametrize("name", BODY_DECODERS)
@given(data=st.data())
@settings(max_examples=trials(60), deadline=None)
def test_any_value_in_any_field_of_a_body(name, data):
    fields = [
        "offsetTable", "messageQueueTable", "consumerTable", "mqTable", "properties", "statusTable", "subscriptionSet",
        "queueDatas", "brokerDatas", "brokerAddrTable", "clusterAddrTable", "consumerDataSet", "producerDataSet",
        "mqSet", "lockOKMQSet", "messageQueueAssignments", "connectionSet", "subscriptionTable", "subscriptionData",
        "groupList", "topicList", "table", "consumerIdList", "clientID", "groupName", "consumeTps", "topicPutTps",
        "orderTopicConf",
    ]
    value = data.draw(st.dictionaries(st.sampled_from(fields), ANYTHING, max_size=4))
    try:
        body = fastjson.dumps(value)
    except TypeError:  # a whole number of more than 64 bits, which nobody can write
        return
    value_or_protocol_error(BODY_DECODERS[name], body)


HOSTILE = {
    "lists": b"[" * 500_000,
    "objects": b'{"a":' * 200_000,
    "object keys": b"{" * 500_000,
    "object keys with values": b"{{0:" * 200_000,
    "digits": b"1" * 1_000_000,
    "digits of a key": b"{" + b"1" * 1_000_000 + b":1}",
    "spaces": b"{0:" + b" " * 1_000_000,
    "an open string": b'{0:"' + b"a" * 1_000_000,
    "backslashes": b'{0:"' + b"\\" * 1_000_000,
    "commas": b"{0:[" + b"," * 1_000_000,
    "a key that nearly is a queue": b'{{"brokerName":"' + b"a" * 1_000_000 + b'","queueId":1,"topic":"',
    "spaces in a key": b'{{"brokerName"' + b" " * 1_000_000 + b"x",
    "a word": b"{" + b"a" * 1_000_000,
    "escaped line ends": b"a\\\n" * 300_000,
}


@pytest.mark.slow("reads megabytes of text")
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_costs_neither_time_nor_stack_nor_memory(data):
    begin = time.process_time()
    tracemalloc.start()
    try:
        value_or_protocol_error(fastjson.loads, data)
        value_or_protocol_error(bodies.decode_offset_table, data)
        value_or_protocol_error(bodies.decode_java_properties, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * len(data)
    assert time.process_time() - begin < 60  # quadratic time would be minutes
