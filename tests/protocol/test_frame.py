from __future__ import annotations

import gc
import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.frame import (
    BINARY_HEADER,
    JSON_HEADER,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    FrameBuffer,
    RemotingCommand,
    ZeroCopyFrames,
    decode_command,
    encode_command,
)
from tests import golden
from tests.for_each import for_each
from tests.speed import quick

JSON_REQUEST = bytes.fromhex("000000a20000009e") + (
    b'{"code":14,"extFields":{"queueId":"3","topic":"T","consumerGroup":"g"},"flag":0,"language":"PYTHON",'
    b'"opaque":7,"serializeTypeCurrentRPC":"JSON","version":401}'
)
JSON_RESPONSE = bytes.fromhex("0000007900000075") + (
    b'{"code":22,"flag":1,"language":"JAVA","opaque":7,"remark":"Not found","serializeTypeCurrentRPC":"JSON",'
    b'"version":479}'
)
BINARY_REQUEST = bytes.fromhex(
    "00000047 01000043 000e 03 0191 00000007 00000000 00000000 0000002e"
    "0007 71756575654964 00000001 33"
    "0005 746f706963 00000001 54"
    "000d 636f6e73756d657247726f7570 00000001 67"
)
BINARY_RESPONSE = bytes.fromhex(
    "00000028 01000024 0000 00 0191 00000007 00000001 00000000 0000000f 0006 6f6666736574 00000003 313030"
)
REQUEST = RemotingCommand(14, {"queueId": "3", "topic": "T", "consumerGroup": "g"}, opaque=7)
ANSWER = RemotingCommand(0, {"offset": "100"}, b"", 7, 1, None, "JAVA", 401)


@for_each(
    "frame, command",
    [
        (JSON_REQUEST, REQUEST),
        (JSON_RESPONSE, RemotingCommand(22, {}, b"", 7, 1, "Not found", "JAVA", 479)),
        (BINARY_REQUEST, replace(REQUEST, header_type=BINARY_HEADER)),
        (BINARY_RESPONSE, replace(ANSWER, header_type=BINARY_HEADER)),
    ],
    ids=["JSON request", "JSON response", "binary request", "binary response"],
)
def test_the_worked_examples_are_read_and_requests_written(frame, command):
    assert decode_command(frame) == command
    assert command.is_response or encode_command(command, command.header_type) == frame


def feed(buffer: FrameBuffer | ZeroCopyFrames, data: bytes, *pieces: int) -> list[Any]:
    """Feed bytes in pieces of these sizes, in turn. Return the commands, perhaps with slices of their bodies."""
    found, at, sizes = [], 0, cycle(pieces or [len(data)])
    while at < len(data):
        space = buffer.space()
        assert len(space) > 0
        piece = data[at : at + min(len(space), next(sizes))]
        space[: len(piece)] = piece
        found += buffer.read_commands(len(piece))
        at += len(piece)
    return found


READERS = (
    decode_command,
    lambda data: feed(FrameBuffer(), data),
    lambda data: feed(ZeroCopyFrames(), data),
    lambda data: feed(FrameBuffer(), data, 1),
    lambda data: feed(ZeroCopyFrames(), data, 1),
)


def frame_of(header: bytes, header_type: int = JSON_HEADER) -> bytes:
    return struct.pack(">II", 4 + len(header), header_type << 24 | len(header)) + header


def json_frame(**header: object) -> bytes:
    return frame_of(json.dumps(header).encode())


@for_each("entry", golden.index, ids=str)
def test_every_recorded_frame_matches_the_index(entry):
    command = decode_command(entry.frame())
    assert (command.code, command.opaque, command.flag) == (entry.code, entry.opaque, entry.flag)
    assert (command.language, command.version) == (entry.language, entry.header_version)
    assert command.is_response is entry.is_response
    assert (entry.remark or golden.Text("", None)).describes(command.remark or "")
    assert set(command.fields) == set(entry.fields)
    assert all(entry.fields[name].describes(value) for name, value in command.fields.items())
    assert len(command.body) == entry.body_bytes
    assert command.body.hex().startswith(entry.body_hex)
    assert not entry.body or entry.body.describes(command.body.decode())


@for_each("entry", golden.reset_index, ids=str)
def test_every_recorded_frame_of_a_reset_matches_its_index(entry):
    command = decode_command(entry.frame())
    assert command.code == entry.code
    if entry.flag is not None:
        assert (command.flag, command.version, command.remark) == (entry.flag, entry.header_version, entry.remark)
    if entry.name == "307reset_admin_answer.bin":
        assert set(command.fields) == set(entry.fields)  # the index shows another run of this one
        return
    assert command.fields == entry.fields
    if entry.body_bytes is None:
        assert command.body.decode() == entry.body
    else:
        assert command.body.decode().startswith(entry.body)
        assert len(command.body) == entry.body_bytes


def test_the_index_lists_every_recorded_frame():
    text = {(entry.version, entry.name) for entry in golden.index()}
    assert text == {(version, name) for version in golden.VERSIONS for name in golden.frames(version)}
    assert {entry.name for entry in golden.reset_index()} == set(golden.frames("reset"))


@for_each("version", [*golden.VERSIONS, "reset"])
def test_frames_read_the_same_in_any_pieces_and_rewritten(version):
    frames = list(golden.frames(version).values())
    commands = [decode_command(frame) for frame in frames]
    for piece_bytes in (1, 7, 1000, 4096, 300_000):
        count = 40 if piece_bytes < 10 else len(frames)
        assert feed(FrameBuffer(), b"".join(frames[:count]), piece_bytes) == commands[:count]
    for command in commands:
        assert decode_command(encode_command(command)) == replace(command, header_type=JSON_HEADER)
        filled = {name: value for name, value in command.fields.items() if value}
        # A binary header cannot distinguish "empty" from "absent".
        expected = replace(command, header_type=BINARY_HEADER, fields=filled, remark=command.remark or None)
        assert decode_command(encode_command(command, BINARY_HEADER)) == expected


@pytest.mark.parametrize("version", golden.VERSIONS)
@for_each("piece_bytes", [7, 4096, 300_000])
def test_bodies_stay_in_place_until_they_are_released(version, piece_bytes):
    frames = list(golden.frames(version).values())
    frames, times = (frames[:40], 1) if piece_bytes < 10 else (frames, 40)
    stream, buffer, chance = b"".join(frames) * times, ZeroCopyFrames(), random.Random(piece_bytes)
    commands, wanted = {}, []
    for start in range(0, len(stream), piece_bytes):
        wanted += enumerate(feed(buffer, stream[start : start + piece_bytes]), len(commands) + len(wanted))
        if chance.random() < 0.3:  # some are read and released, others wait
            chance.shuffle(wanted)
            done = [wanted.pop() for _ in range(chance.randrange(len(wanted) + 1))]
            commands |= {number: replace(command, body=bytes(extent)) for number, (command, extent) in done}
            buffer.release_except(extent for _, (_, extent) in wanted)
    commands |= {number: replace(command, body=bytes(extent)) for number, (command, extent) in wanted}
    assert [commands[number] for number in range(len(commands))] == times * [decode_command(each) for each in frames]


def test_a_zero_copy_buffer_grows_and_shrinks_again():
    buffer = ZeroCopyFrames()
    command = RemotingCommand(11, {}, b"x" * (MAX_FRAME_BYTES - 200))
    ((found, extent), (after, _)) = feed(buffer, encode_command(command) + JSON_RESPONSE)
    assert (found.code, bytes(extent), after) == (11, command.body, decode_command(JSON_RESPONSE))
    assert len(buffer.data) > MAX_FRAME_BYTES
    buffer.release_except(())
    assert len(buffer.data) == ZeroCopyFrames.INITIAL_BYTES
    for _ in range(3):  # no bytes are received into its last byte
        space = buffer.space()
        buffer.data[-1] = 7
        space[:] = bytes(len(space))
        assert buffer.data[-1] == 7
        with pytest.raises(ProtocolError):
            buffer.read_commands(len(space))


def test_a_frame_of_the_largest_size_passes_and_no_larger():
    command = RemotingCommand(11, {}, b"x" * (MAX_FRAME_BYTES - 200))
    frame = encode_command(command)
    assert decode_command(frame) == command
    assert feed(FrameBuffer(), frame + JSON_RESPONSE)[0] == command
    with pytest.raises(ProtocolError, match="16777216"):
        encode_command(RemotingCommand(11, {}, b"x" * MAX_FRAME_BYTES))


@for_each("max_frame_bytes", [64 * 1024, 1 << 20, 20 << 20])
def test_the_largest_frame_is_configurable(max_frame_bytes):
    command = RemotingCommand(11, {}, b"x" * (max_frame_bytes - 2000))
    frame = encode_command(command, max_frame_bytes=max_frame_bytes)
    assert feed(FrameBuffer(max_frame_bytes), frame) == [command]
    ((_, extent),) = feed(ZeroCopyFrames(max_frame_bytes), frame)
    assert len(extent) == len(command.body)
    with pytest.raises(ProtocolError, match=f"at most max_frame_bytes={max_frame_bytes} are sent"):
        encode_command(replace(command, body=b"x" * max_frame_bytes), max_frame_bytes=max_frame_bytes)
    larger = struct.pack(">II", max_frame_bytes - 3, 10)
    for buffer in (FrameBuffer(max_frame_bytes), ZeroCopyFrames(max_frame_bytes)):
        buffer.space()[: len(larger)] = larger
        with pytest.raises(ProtocolError, match=f"max_frame_bytes={max_frame_bytes}"):
            buffer.read_commands(len(larger))


BAD_FRAMES = {
    "longer than 16 MiB": struct.pack(">iI", MAX_FRAME_BYTES - 3, 10),
    "as long as can be": struct.pack(">iI", 2**31 - 1, 2**24 - 1),
    "4 GiB": b"\xff" * 8,
    "length 0": struct.pack(">iI", 0, 0),
    "negative length": struct.pack(">iI", -1, 0),
    "no room for a header length": struct.pack(">iI", 3, 0),
    "header longer than the frame": struct.pack(">iI", 10, 7) + b"{}    ",
    "unknown header type": frame_of(b'{"code":0,"flag":1}', 2),
    "another unknown header type": frame_of(b'{"code":0,"flag":1}', 7),
    "negative header type": frame_of(b'{"code":0,"flag":1}', 0xFF),
    "no header": frame_of(b""),
    "header is not JSON": frame_of(b"abc"),
    "header is not text": frame_of(b"\xff\xfe\x00\x01"),
    "header with a key of Java": frame_of(b'{code:0,"flag":1}'),
    "header cut short": frame_of(b'{"code":0,"flag":1'),
    "header is not an object": frame_of(b"[0]"),
    "header without a code": frame_of(b'{"flag":1,"opaque":1}'),
    "header of wrong types": frame_of(b'{"code":"0","flag":1,"opaque":1}'),
    "header nested without end": frame_of(b'{"code":0,"extFields":' + b"[" * 5000),
    "binary header cut short": frame_of(b"\x00\x00\x01", BINARY_HEADER),
    "binary remark beyond the header": frame_of(struct.pack(">hBhiii", 0, 0, 0, 1, 1, 2**31 - 1), BINARY_HEADER),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46" + b"\x00" * 20,
}


@for_each("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
@for_each("read", READERS)
def test_a_bad_frame_is_refused(frame, read):
    with pytest.raises(ProtocolError):
        read(frame)


def test_a_header_has_the_keys_of_json():
    with pytest.raises(ProtocolError, match="not JSON"):
        decode_command(BAD_FRAMES["header with a key of Java"])


def traced(work: Callable[[], object]) -> tuple[int, int]:
    """Return the memory that `work` still uses afterwards, and the most that it used."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_length_that_is_only_claimed_takes_no_memory():
    claim = struct.pack(">iI", MAX_FRAME_BYTES - 4, 100) + b" " * (70 * 4096 - 8)
    assert traced(lambda: feed(FrameBuffer(), claim, 4096))[1] < 2 * 1024 * 1024


@for_each("piece_bytes", [1_000, 65_536, 131_072])
def test_the_body_of_a_too_large_request_is_skipped(piece_bytes):
    rooms = set()

    class Watched(FrameBuffer):
        def space(self):
            space_left = super().space()
            rooms.add(len(space_left))
            return space_left

    small, large = RemotingCommand(40, flag=2), RemotingCommand(307, {"a": "b"}, bytes(10 << 20), opaque=5)
    data = b"".join(map(encode_command, (small, large, small, large, small)))
    commands = feed(Watched(largest_request=1 << 20), data, piece_bytes)
    of_small, of_large = (40, 0, b""), (307, 10 << 20, b"")
    assert [(each.code, each.skipped_body_bytes, each.body) for each in commands] == [
        of_small,
        of_large,
        of_small,
        of_large,
        of_small,
    ]
    assert (commands[1].fields, commands[1].opaque) == ({"a": "b"}, 5)
    assert max(rooms) == FrameBuffer.INITIAL_BYTES


@for_each(
    "command",
    [
        RemotingCommand(0, {}, bytes(10 << 20), flag=1),
        RemotingCommand(309, {}, bytes(10 << 20)),
        RemotingCommand(39, {}, bytes(10 << 20), flag=2),
        RemotingCommand(307, {}, bytes(1 << 20)),
    ],
    ids=["answer", "consume directly", "check", "not too large"],
)
@for_each("piece_bytes", [7_000, 65_536])
def test_requests_that_may_be_large_are_kept_despite_the_limit(command, piece_bytes):
    commands = feed(FrameBuffer(largest_request=1 << 20), encode_command(command) * 2, piece_bytes)
    assert [(each.body, each.skipped_body_bytes) for each in commands] == 2 * [(command.body, 0)]


@for_each("header_type", [0, 1])
def test_a_large_request_is_known_as_soon_as_its_header_is(header_type):
    data = encode_command(RemotingCommand(307, {"a": "b"}, bytes(2 << 20)), header_type)
    head = len(data) - (2 << 20)
    buffer = FrameBuffer(largest_request=1 << 20)
    assert feed(buffer, data[: head - 1], 1) == []
    [command] = feed(buffer, data[head - 1 : head])
    assert command.skipped_body_bytes == 2 << 20
    assert feed(buffer, data[head:] + encode_command(RemotingCommand(40)), 50_000)[0].code == 40


def test_the_memory_of_a_large_frame_is_freed():
    buffer = FrameBuffer()
    assert len(feed(buffer, encode_command(RemotingCommand(11, {}, b"x" * 8_000_000)))) == 1
    assert traced(buffer.space)[0] < 1024 * 1024
    assert len(buffer.space()) <= 4 * FrameBuffer.INITIAL_BYTES


@for_each(
    "header, fields",
    [
        (
            b'{"code":11,"extFields":{"a":1,"b":true,"c":null,"d":"x","e":1.5}}',
            {"a": "1", "b": "true", "d": "x", "e": "1.5"},
        ),
        (b'{"code":10,"extFields":{"i":"a\x01b\x02"}}', {"i": "a\x01b\x02"}),
        (b'{"code":10,"extFields":{"i":"a\\u0001b\\u0002"}}', {"i": "a\x01b\x02"}),
    ],
)
def test_fields_are_text_with_any_characters(header, fields):
    assert decode_command(frame_of(header)).fields == fields


def test_optional_fields_have_defaults():
    assert decode_command(json_frame(code=3)) == RemotingCommand(3, {}, b"", 0, 0, None, "OTHER", 0)
    assert decode_command(json_frame(code=1, remark="cut \ud83d")).remark == "cut �"
    response = RemotingCommand(221, opaque=99, flag=0).make_response(body=b"{}")
    assert (response.code, response.opaque, response.is_response, response.is_oneway) == (0, 99, True, False)
    assert RemotingCommand(40, flag=2).is_oneway


@for_each(
    "header",
    [
        {"code": "11"},
        {"code": 11, "opaque": None},
        {"code": 11, "flag": 1.5},
        {"code": 11, "extFields": []},
        {"code": 11, "remark": 5},
        {"code": 11, "language": 3},
        {"code": 11, "version": "401"},
    ],
    ids=str,
)
def test_a_header_with_a_field_of_the_wrong_type_is_refused(header):
    with pytest.raises(ProtocolError):
        decode_command(json_frame(**header))


def test_an_unknown_language_is_kept_and_its_code_is_other():
    assert decode_command(json_frame(code=3, language="COBOL")).language == "COBOL"
    assert decode_command(BINARY_REQUEST[:10] + b"\x63" + BINARY_REQUEST[11:]).language == "OTHER"


def test_a_binary_header_holds_no_empty_value_and_no_large_code():
    command = RemotingCommand(11, {"subscription": "", "topic": "T"})
    assert decode_command(encode_command(command, BINARY_HEADER)).fields == {"topic": "T"}
    with pytest.raises(ProtocolError, match="binary header"):
        encode_command(RemotingCommand(200050), BINARY_HEADER)


@for_each("depth", [100, 300, 1000, 1020, 5000, 100_000])
@for_each("kind", ["[|]", '{"a":|}'])
@for_each(
    "header",
    [
        '{"code":%s}',
        '{"code":0,"flag":%s}',
        '{"code":0,"remark":%s}',
        '{"code":0,"language":%s}',
        '{"code":0,"version":%s}',
        '{"code":0,"extFields":%s}',
        '{"code":0,"extFields":{"a":%s}}',
        '{code:0,"extFields":{"a":%s}}',
        '{"code":0,"other":%s}',
        "%s",
    ],
)
def test_a_header_nested_deep_is_a_command_or_a_protocol_error(header, kind, depth):
    begin, _, end = kind.partition("|")
    frame = frame_of((header % (begin * depth + "1" + end * depth)).encode())
    for decode in READERS[:3]:
        text = ""
        try:
            decode(frame)
        except ProtocolError as error:
            text = str(error)
        assert len(text) < 500


def sized_header(size: int) -> bytes:
    begin, end = b'{"code":0,"remark":"', b'"}'
    return frame_of(begin + b"x" * (size - len(begin) - len(end)) + end)


def test_a_header_has_at_most_1_mib():
    assert len(decode_command(sized_header(MAX_HEADER_BYTES)).remark or "") > 250_000
    for decode in READERS:
        with pytest.raises(ProtocolError, match="header of 1048577 bytes; at most 1048576"):
            decode(sized_header(MAX_HEADER_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most 1048576"):  # before any of its bytes arrive
        feed(FrameBuffer(), struct.pack(">II", 10_000_000, MAX_HEADER_BYTES + 1))
    for header_type in (0, BINARY_HEADER):
        with pytest.raises(ProtocolError, match="at most 1048576 are sent"):
            encode_command(RemotingCommand(10, {"properties": "x" * MAX_HEADER_BYTES}), header_type)
    longest = {"i": "\x01" * 32767, "a": "group"}
    assert decode_command(encode_command(RemotingCommand(310, longest))).fields == longest


@for_each("header_type", [JSON_HEADER, BINARY_HEADER])
def test_a_header_has_at_most_1024_fields(header_type):
    fields = {f"f{number}": "x" for number in range(1024)}
    assert decode_command(encode_command(RemotingCommand(10, fields), header_type)).fields == fields
    with pytest.raises(ProtocolError, match="1024"):
        decode_command(encode_command(RemotingCommand(10, fields | {"one": "more"}), header_type))
    entry = struct.pack(">h1si1s", 1, b"a", 1, b"x")  # those of the same name count each
    many, too_many = (
        frame_of(struct.pack(">hBhiiii", 10, 0, 0, 1, 0, 0, count * len(entry)) + count * entry, BINARY_HEADER)
        for count in (1024, 1025)
    )
    assert decode_command(many).fields == {"a": "x"}
    with pytest.raises(ProtocolError, match="1024"):
        decode_command(too_many)


DENSE = {
    "lists": '{"a":[%s0]}' % ("[]," * 20_000),
    "many lists": '{"a":[%s0]}' % ("[]," * 80_000),
    "numbers": '{"a":[%s0]}' % ("0," * 30_000),
    "objects": '{"a":[%s0]}' % ('{"a":{}},' * 6500),
    "many objects": '{"a":[%s0]}' % ('{"a":{}},' * 27_000),
    "digits": '{"a":%s}' % ("9" * 60_000),
    "escapes": '{"a":"%s"}' % ("\\u0041" * 10_000),
    "one name": '{%s"a":0}' % ('"a":0,' * 10_000),
    "many names": "{" + "".join(f'"{number}":0,' for number in range(22_000)) + '"a":0}',
}
JAVA = {"surrogate": "\\ud83d", "control": "\x01", "plain": ""}


@pytest.fixture
def quiet():
    """Exclude the other objects of this process from garbage collections, which would take longer."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@for_each("remark", JAVA)
@for_each("what", DENSE)
def test_the_largest_header_does_not_stop_the_thread(quiet, what, remark):
    data = f'{{"code":0,"remark":"{JAVA[remark]}","extFields":{DENSE[what]}}}'.encode()
    frame = frame_of(data)

    def measured() -> float:
        began = time.thread_time()
        try:
            decode_command(frame)
        except ProtocolError:
            pass
        return time.thread_time() - began

    assert len(data) <= MAX_HEADER_BYTES
    assert quick(0.05, measured)


def test_the_answer_to_a_large_batch_is_read():
    ids = ",".join(["7F00000100002A9F0000000000000000" + "0" * 24] * 10_000)
    command = RemotingCommand(0, {"msgId": ids, "queueId": "0", "queueOffset": "0"}, flag=1)
    assert decode_command(encode_command(command)).fields["msgId"] == ids
    header = b'{"code":0,"extFields":{"a":[' + b"[]," * 60_000 + b"0]}}"
    with pytest.raises(ProtocolError, match="more than 50000 values"):
        decode_command(frame_of(header))
