"""Any bytes return a value or raise ProtocolError: no other error, no hang, no memory for a merely claimed length.

`tests/fuzz` changes real bytes. These are made up: right where most changes would end the reading, or hostile.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol import bodies, fastjson
from pyrocket_consumer.protocol.command import Header
from pyrocket_consumer.protocol.frame import (
    FrameBuffer,
    RemotingCommand,
    ZeroCopyFrames,
    decode_command,
    encode_command,
)
from tests.fuzz.mutation import WORDS
from tests.fuzz.targets import BODY_DECODERS, accepting
from tests.protocol.test_command import HEADERS
from tests.protocol.test_frame import feed
from tests.trials import trials

FUZZ = settings(max_examples=trials(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])


NAMES = [
    b'"offsetTable"',
    b'"brokerName"',
    b'"queueId"',
    b'"topic"',
    b'"consumerTable"',
    b'"mqTable"',
    b'"queueDatas"',
    b'"messageQueueTable"',
    b'"brokerDatas"',
    b'"consumerDataSet"',
    b'"0"',
]
JSON_LIKE = st.lists(st.sampled_from([*WORDS, *NAMES]), max_size=40).map(b"".join)


# --- frames


@pytest.mark.search
@given(header=st.binary(max_size=120) | JSON_LIKE, header_type=st.integers(0, 3), body=st.binary(max_size=20))
@FUZZ
def test_any_header_within_right_lengths(header, header_type, body):
    frame = struct.pack(">II", 4 + len(header) + len(body), header_type << 24 | len(header)) + header + body
    accepting(decode_command)(frame)


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
    accepting(decode_command)(frame)


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
def test_commands_in_any_pieces_are_read_completely(commands, header_type, pieces):
    stream = b"".join(encode_command(command, header_type) for command in commands)
    expected = [replace(command, header_type=header_type) for command in commands]
    assert feed(FrameBuffer(), stream, *pieces) == expected
    in_place = feed(ZeroCopyFrames(), stream, *pieces)
    assert [replace(command, body=bytes(extent)) for command, extent in in_place] == expected


# --- headers


@pytest.mark.search
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.__name__)
@given(data=st.data())
@settings(max_examples=trials(30), deadline=None)
def test_any_fields(header, data):
    known = ["topic", "queueId", "offset", "a", "e", "consumerGroup", "clientID", *header_names(header)]
    values = st.text(max_size=30) | st.integers().map(str) | st.sampled_from(["", "-", "true", "9" * 5000, "١"])
    fields = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=5), values, max_size=12))
    accepting(lambda _: header.from_fields(fields))(b"")


def header_names(header: type[Header]) -> list[str]:
    try:
        header.from_fields({})
    except ProtocolError as error:
        return [str(error).split("field ")[1].split()[0]]
    return []


# --- JSON and bodies


WRONG = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(["topic", "queueId", "brokerName", "offset", "brokerAddrs", "subVersion", "tagsSet", "0"])
ANYTHING = st.recursive(
    WRONG, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=10
)


@pytest.mark.search
@given(st.binary(max_size=300) | JSON_LIKE)
@settings(max_examples=trials(1500), deadline=None)
def test_any_words_of_json(data):
    for decode in (fastjson.loads, *BODY_DECODERS.values()):
        accepting(decode)(data)


FIELDS = [
    "offsetTable",
    "messageQueueTable",
    "consumerTable",
    "mqTable",
    "properties",
    "statusTable",
    "subscriptionSet",
    "queueDatas",
    "brokerDatas",
    "brokerAddrTable",
    "clusterAddrTable",
    "consumerDataSet",
    "producerDataSet",
    "mqSet",
    "lockOKMQSet",
    "messageQueueAssignments",
    "connectionSet",
    "subscriptionTable",
    "subscriptionData",
    "groupList",
    "topicList",
    "table",
    "consumerIdList",
    "clientID",
    "groupName",
    "consumeTps",
    "topicPutTps",
    "orderTopicConf",
]


@pytest.mark.search
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
@settings(max_examples=trials(60 * len(BODY_DECODERS)), deadline=None)
def test_any_value_in_any_field_of_a_body(value):
    try:
        body = fastjson.dumps(value)
    except TypeError:  # orjson cannot write whole numbers of more than 64 bits
        return
    for decode in BODY_DECODERS.values():
        accepting(decode)(body)


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
def test_malicious_text_takes_little_time_stack_and_memory(data):
    begin = time.process_time()
    tracemalloc.start()
    try:
        for decode in (fastjson.loads, bodies.decode_offset_table, bodies.decode_java_properties):
            accepting(decode)(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * len(data)
    assert time.process_time() - begin < 60  # quadratic time would be minutes
