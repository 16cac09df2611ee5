"""The targets of the fuzzer: one for each decoder, and some that compare two decoders of the same format.

A target accepts any bytes. It returns if the decoder returns a value or raises a documented error. Any other error is a
finding.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import pyarrow as pa

from pyrocket_consumer.cluster.pull_core import read_pull_response
from pyrocket_consumer.errors import ConfigError, OffsetStoreError, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.local import journal
from pyrocket_consumer.offsets.local.directories import read_owner
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.offsets.local.recovery import recover
from pyrocket_consumer.protocol import bodies, fastjson, reset_format
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.columns import record_batches
from pyrocket_consumer.protocol.compression import Compression, compress, decompress
from pyrocket_consumer.protocol.frame import (
    FrameBuffer,
    RemotingCommand,
    ZeroCopyFrames,
    decode_command,
    encode_command,
)
from pyrocket_consumer.protocol.ids import parse_offset_message_id
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    BatchItem,
    StoredMessage,
    decode_batch,
    decode_messages,
    encode_batch,
    encode_message,
)
from pyrocket_consumer.protocol.properties import decode_properties
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.spark.offsets import decode_offset
from tests import golden
from tests.offsets.local.driving import encode_offsets
from tests.protocol import both
from tests.protocol.records import QUEUE, WORKED_RECORD, read_properties, read_records
from tests.protocol.test_columns import ALL, EVERY, ROW_BY_ROW_RECORDS, pulled, row, rows
from tests.protocol.test_command import HEADERS
from tests.protocol.test_frame import feed
from tests.protocol.test_fuzz_message import COMPRESSED_RECORDS, SMALL_BODIES, touch

READ_BYTES = 1 << 20
"""The most decompressed bytes that a target allows. Other tests cover the default limit of the decoders."""


@dataclass(frozen=True)
class Target:
    """A function that reads bytes, and real inputs to start with."""

    name: str
    read: Callable[[bytes], object]
    originals: Callable[[], Sequence[bytes]]


def accepting(read: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[bytes], None]:
    """Return a target's function: `read`, which may raise ProtocolError and `errors` with short texts."""

    def decode(data: bytes) -> None:
        try:
            read(data)
        except (ProtocolError, *errors) as error:
            text = str(error)
            most = 500 if isinstance(error, ProtocolError) else 1000
            assert len(text) < most, f"an error of {len(text)} characters"

    return decode


# --- initial inputs


@cache
def frames() -> list[bytes]:
    return sorted({frame[:3000] for version in golden.VERSIONS for frame in golden.frames(version).values()})


@cache
def json_bodies() -> list[bytes]:
    return sorted(
        {
            body[:8000]
            for version in (*golden.VERSIONS, "reset")
            for frame in golden.frames(version).values()
            if (body := decode_command(frame).body)[:1] in (b"{", b"[")
        }
    )


@cache
def records() -> list[bytes]:
    v6 = encode_message(StoredMessage("T", b"x", born_host="[::1]:1", store_host="[::1]:2", sys_flag=0x30))
    return [WORKED_RECORD, WORKED_RECORD * 50, v6, *COMPRESSED_RECORDS, *sorted(SMALL_BODIES)]


@cache
def batches() -> list[bytes]:
    return [encode_batch([BatchItem(b"x" * 20, {"KEYS": "k", "TAGS": "A"})] * count) for count in (1, 3, 40)]


@cache
def properties() -> list[bytes]:
    return [b"TAGS\x01A\x02KEYS\x01a b\x02UNIQ_KEY\x010A00\x02", b"a\x01b", b"", "ключ\x01знач\x02".encode()]


@cache
def packed_bodies() -> list[bytes]:
    """A byte that selects the compression, and the compressed bytes."""
    return [bytes([kind]) + body for kind in range(8) for body in (*batches(), b"abc" * 100)]


@cache
def compressed() -> list[bytes]:
    """Flags, and the bytes compressed as they specify."""
    return [flags.to_bytes(2) + body for body, flags in (compress(b"abc" * 100, kind) for kind in Compression)]


def checkpoint(*offsets: int) -> bytes:
    return encode_offsets(
        {MessageQueue("orders", "broker-a", number): offset for number, offset in enumerate(offsets)}, {}
    )


JAVA_CHECKPOINT = (
    b'{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n'
    b'\t\t\t"topic":"orders"\n\t\t}:130\n\t}\n}'
)


def journal_of(main: bytes, backup: bytes, *frames_: bytes) -> bytes:
    header = journal.JournalHeader(7, 4096, journal.identity(main), journal.identity(backup))
    start = journal.encode_header(header).ljust(journal.HEADER_BYTES, b"\0")
    return (start + b"".join(frames_)).ljust(4096, b"\0")


def stored(main: bytes, backup: bytes, journal_: bytes) -> bytes:
    """Three files in one input."""
    return struct.pack(">HH", len(main), len(backup)) + main + backup + journal_


def separate(data: bytes) -> tuple[bytes, bytes, bytes]:
    main_size, backup_size = struct.unpack(">HH", data[:4].ljust(4, b"\0"))
    main, rest = data[4 : 4 + main_size], data[4 + main_size :]
    return main, rest[:backup_size], rest[backup_size:]


@cache
def stores() -> list[bytes]:
    old, new = checkpoint(1, 2), checkpoint(10, 20)
    frames_ = [
        journal.encode_names(7, 0, "orders", "broker-a"),
        *(journal.encode_offset(7, 0, 1, offset) for offset in (21, 30)),
        journal.encode_resets(7, [(0, 0, 5, 1000)]),
    ]
    return [
        stored(new, old, journal_of(new, old, *frames_)),
        stored(new, old, journal_of(old, b"", *frames_)),
        stored(JAVA_CHECKPOINT, new, journal_of(new, old, *frames_)),
        stored(b"", old, journal_of(new, old)),
    ]


# --- one target for each decoder


def streamed(data: bytes) -> None:
    """Split a stream into pieces, whose size is its first byte. Both readers find the same commands, or both fail."""
    step, stream = 1 + data[0] * 7 if data else 1, data[1:]

    def fed(buffer: FrameBuffer | ZeroCopyFrames) -> list[Any] | None:
        try:
            return feed(buffer, stream, step)
        except ProtocolError:
            return None

    copied, in_place = fed(FrameBuffer()), fed(ZeroCopyFrames())
    if isinstance(copied, list) and isinstance(in_place, list):
        assert [bytes(command.body) for command in copied] == [bytes(extent) for _, extent in in_place]
        assert [command.fields for command in copied] == [command.fields for command, _ in in_place]
    else:
        assert type(copied) is type(in_place), (copied, in_place)


def read_header(data: bytes) -> None:
    command = decode_command(data)
    for header in HEADERS:
        accepting(lambda data, header=header: header.from_fields(command.fields))(b"")
    again = decode_command(encode_command(command))
    assert again.fields == command.fields


def read_pull_header(data: bytes) -> None:
    """The header of a pull response; its fields are lines of name=value."""
    fields = dict(line.partition("=")[::2] for line in data.decode("utf-8", "replace").split("\n"))
    response = read_pull_response(RemotingCommand(0, fields), 42)
    assert 0 <= response.next_offset < 2**63


def read_route(data: bytes) -> None:
    bodies.decode_route("T", data).publish_queues()


def read_message(data: bytes) -> None:
    for queue in (QUEUE, None):
        for message in decode_messages(data, queue)[:200]:
            touch(message)
            touch(message.detach())


def read_packed(data: bytes) -> None:
    """A damaged inner batch in an intact compressed body."""
    how, plain = data[0] if data else 0, data[1:]
    flags = 0
    if how & 3:
        plain, flags = compress(plain, list(Compression)[(how & 3) - 1])
    if how & 4:
        flags |= SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
    record = encode_message(StoredMessage("T", plain, {"TAGS": "A"}, sys_flag=flags, queue_offset=5))
    for message in decode_messages(record, QUEUE)[:200]:
        touch(message)


def repaired(data: bytes) -> bytes:
    """Return a record with the right size, magic and body length. Otherwise most changes fail at its first bytes."""
    record = bytearray(data.ljust(91, b"\0"))
    record[:8] = struct.pack(">II", len(record), 0xDAA320AB if record[4] & 1 else 0xDAA320A7)
    sys_flag = struct.unpack_from(">i", record, 36)[0]
    length_at = 84 + (12 if sys_flag & 16 else 0) + (12 if sys_flag & 32 else 0)
    if length_at + 4 <= len(record):
        length = struct.unpack_from(">I", record, length_at)[0] % (len(record) - length_at)
        struct.pack_into(">I", record, length_at, length)
    return bytes(record)


def read_record(data: bytes) -> None:
    record = repaired(data)
    read_message(record)
    columns_as_messages(record)


def unpack(data: bytes) -> None:
    assert len(decompress(data[2:], int.from_bytes(data[:2]) & 0x7FF, READ_BYTES)) <= READ_BYTES


def read_batch(data: bytes) -> None:
    assert sum(len(item.body) for item in decode_batch(data)) <= len(data)


# --- targets that compare two decoders


def columns_as_messages(data: bytes) -> None:
    wanted: list[dict[str, Any]] | None
    try:
        wanted = [row(message) for message in decode_messages(data, QUEUE) if message.queue_offset < EVERY[1]]
    except ProtocolError:
        wanted = None
    try:
        found = rows(pa.Table.from_batches(list(record_batches([pulled(data)], ALL)), ALL))
    except ProtocolError:
        found = None
    assert found == wanted


def compiled_as_python(data: bytes) -> None:
    """The compiled part and the Python code read the same, or both refuse it."""
    compiled, in_python = both.copy(pure=False), both.copy(pure=True)
    assert both.core_of(compiled, data, MAX_RECORDS) == both.core_of(in_python, data, MAX_RECORDS)


def compiled_properties_as_python(data: bytes) -> None:
    """The same for an intact record with these bytes as properties."""
    text = data[:32_767]
    record = encode_message(StoredMessage("T", b""))[:-2] + len(text).to_bytes(2) + text
    compiled_as_python(len(record).to_bytes(4) + record[4:])


def compiled_columns_as_python(data: bytes) -> None:
    """The compiled part and the numpy code return the same columns, or both find the records irregular."""
    damaged = repaired(data) if data[-1:] > b"\x7f" else data
    tags = frozenset({"A"}) if len(data) % 4 == 0 else frozenset[str]()
    end = 42 if len(data) % 8 == 1 else EVERY[1]  # of the first response; numpy reads only many records
    responses = [pulled(WORKED_RECORD * ROW_BY_ROW_RECORDS, end=end), pulled(damaged)]

    def read(pure: bool) -> list[dict[str, Any]]:
        batches = both.copy(pure=pure).module("protocol.columns").record_batches(responses, ALL, tags)
        found: list[dict[str, Any]] = rows(
            pa.Table.from_batches(list(batches), ALL).slice(0 if tags else ROW_BY_ROW_RECORDS)
        )
        return found

    assert both.outcome(lambda: read(False)) == both.outcome(lambda: read(True))


def messages_as_records(data: bytes) -> None:
    """All records that a plain reader accepts become messages with the same values."""
    try:
        plain = read_records(data)
    except (AssertionError, UnicodeDecodeError):
        return
    if any(record.magic not in (0xDAA320A7, 0xDAA320AB) or record.sys_flag & 0xC0 == 0xC0 for record in plain):
        return
    for record, message in zip(plain, decode_messages(data), strict=True):
        assert (record.topic, record.queue_id, record.queue_offset) == (
            message.queue.topic,
            message.queue.queue_id,
            message.queue_offset,
        )
        assert read_properties(record.properties_text) == message.properties


def properties_as_read(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    assert decode_properties(text) == read_properties(text)
    assert decode_properties(data) == read_properties(text)


def json_as_read(data: bytes) -> None:
    """Standard JSON has the same value as in the standard library."""
    try:
        wanted = json.loads(data, parse_constant=lambda word: [][0])
    except (ValueError, RecursionError, IndexError):
        fastjson.loads(data)
        return
    if data[:1] in (b"\xef", b"\xff", b"\xfe") or b"\0" in data or not _is_plain(wanted):
        return
    assert fastjson.loads(data) == wanted


def _is_plain(value: object, depth: int = 0) -> bool:
    """Return whether all readers agree on a value: no half of a character, no number above 64 bits, not deep."""
    if depth > 50:
        return False
    if isinstance(value, dict):
        return all(_is_plain(each, depth + 1) for each in (*value, *value.values()))
    if isinstance(value, list):
        return all(_is_plain(each, depth + 1) for each in value)
    if isinstance(value, str):
        return value.isprintable() or not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, float) and (not isinstance(value, int) or -(2**63) <= value < 2**64)


def plain_checkpoint(text: bytes) -> dict[MessageQueue, int] | None:
    """Read offsets.json in its usual format, None if it has another format."""
    entry = rb'\{\s*"brokerName":"([^"\\]*)",\s*"queueId":(\d{1,9}),\s*"topic":"([^"\\]*)"\s*\}:(\d{1,18})'
    one = re.sub(rb"\((?!\?)", b"(?:", entry)
    whole = rb'\{\s*"offsetTable":\{(?:\s*' + one + rb"(?:\s*,\s*" + one + rb")*)?\s*\}\s*\}"
    if not re.fullmatch(whole, text) or not text.isascii():
        return None
    return {
        MessageQueue(topic.decode(), broker.decode(), int(queue_id)): int(offset)
        for broker, queue_id, topic, offset in re.findall(entry, text)
    }


def plain_journal(data: bytes) -> tuple[tuple[int, int], tuple[int, int], dict[MessageQueue, int]] | None:
    """Read a journal frame by frame: its checkpoint, its backup, and its offsets. None if it is damaged."""
    magic, version, _, crc, generation, _, *files, last = struct.unpack("<8sHHIQIIIIII", data[:48].ljust(48, b"\0"))
    if magic != b"PyRktOff" or version != 1 or crc != crc32(data[:12]) or last != crc32(data[:44]) or len(data) < 512:
        return None
    names: dict[int, tuple[str, str]] = {}
    offsets: dict[MessageQueue, int] = {}
    at = 512
    while at + 8 <= len(data):
        crc, marker, word = struct.unpack_from("<IHH", data, at)
        kind, count = word >> 14, word & 0x3FFF
        frame = data[at + 4 : at + 8 + count * {1: 14, 3: 22}.get(kind, 1)]
        if len(frame) != 4 + count * {1: 14, 3: 22}.get(kind, 1) or crc != crc32(frame, generation & 0xFFFFFFFF):
            break
        rest = frame[4:]
        if kind == 2:
            pair, topic, broker = struct.unpack_from("<HHH", rest)
            names[pair] = rest[6 : 6 + topic].decode(), rest[6 + topic : 6 + topic + broker].decode()
        records = {1: "<Hiq", 3: "<Hiqq"}.get(kind)
        for pair, queue_id, offset, *_ in struct.iter_unpack(records, rest) if records else ():
            if pair not in names:
                return None
            if kind == 1 or offset >= 0:
                offsets[MessageQueue(*names[pair], queue_id)] = offset
        at += 4 + len(frame)
    return None if any(data[at:]) else ((files[0], files[1]), (files[2], files[3]), offsets)


def store_as_read(data: bytes) -> None:
    """A store recovers the same from its files as a plain reader, if that accepts all of them."""
    main, backup, journal_ = separate(data)
    tables, frames_ = [plain_checkpoint(main), plain_checkpoint(backup)], plain_journal(journal_)
    try:
        found: dict[MessageQueue, int] | None = recover(main, backup, journal_ or None).offsets
    except OffsetStoreError:
        found = None
    if tables[0] is None or tables[1] is None or (journal_ and frames_ is None):
        return
    main_id, backup_id = ((len(each), crc32(each)) for each in (main, backup))
    if frames_ is None:
        assert found == tables[0]
    elif frames_[0] == main_id:
        assert found == tables[0] | frames_[2]
    elif frames_[1] == backup_id != frames_[0]:  # it was not replaced, so it is damaged
        assert found == tables[1] | frames_[2]
    else:
        assert found == tables[0]


BODY_DECODERS: dict[str, Callable[[bytes], object]] = {
    name.removeprefix("decode_"): decoder for name, decoder in vars(bodies).items() if name.startswith("decode_")
} | {"route": read_route}

PULL_ANSWERS = [
    b"nextBeginOffset=42\nminOffset=0\nmaxOffset=100\nsuggestWhichBrokerId=0",
    b"nextBeginOffset=0\nminOffset=0\nmaxOffset=0",
]
OWNERS = [b'{"pid": 1, "host": "x", "since": 1700000000.5, "closes_by": null}', b'{"pid": 1, "host": "x", "since": 0}']
SPARK_OFFSETS = [
    (
        b'{"version": 1, "queues": {"T": {"a": {"0": 5, "1": 98}}}, "from": {"T": {"a": {"0": 5}}}, "initial": true, '
        b'"seen": {"T": {"a": 1714557600000}}}'
    )
]
MESSAGE_IDS = [b"7F00000100002A9F0000000000000000"]


def read_tags(data: bytes) -> None:
    parse_subscription("T", data.decode("utf-8", "replace"))


def read_journal(data: bytes) -> None:
    journal.replay(data, journal.decode_header(data))


def read_spark_offset(data: bytes) -> None:
    """Offsets in a checkpoint, which Spark has already parsed as JSON."""
    try:
        encoded = json.loads(data)
    except (ValueError, RecursionError):
        return
    decode_offset(encoded)


class OwnerFile(Disk):
    """A disk whose files all have the same content."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, path: str) -> bytes | None:
        return self.data


def read_owner_file(data: bytes) -> None:
    owner = read_owner(OwnerFile(data), "")
    if owner is not None:
        assert owner.is_alive in (True, False)
        assert owner.is_closing in (True, False)
        assert len(str(owner)) < 3000


def of_the_compiled_part() -> list[Target]:
    return [
        Target("compiled-as-python", accepting(compiled_as_python), records),
        Target("compiled-record-as-python", accepting(lambda data: compiled_as_python(repaired(data))), records),
        Target("compiled-properties-as-python", accepting(compiled_properties_as_python), properties),
        Target("compiled-columns-as-python", accepting(compiled_columns_as_python), records),
    ]


def _made() -> list[Target]:
    plans = [
        b'{"topic":"T","epoch":1700000000000,"targets":{"broker-a":{"0":5,"1":7}}}',
        b'{"topic":"T","id":"x","epochs":{"b":{"0":1}},"offsets":{},"moved":{},"resets":{},"resetCounts":{},"messageModel":"BROADCASTING"}',
    ]
    return [
        Target("frame", accepting(decode_command), frames),
        Target("stream", accepting(streamed), lambda: [bytes([n]) + each for n in (0, 3, 255) for each in frames()]),
        Target("header", accepting(read_header), frames),
        Target("pull-answer", accepting(read_pull_header), lambda: PULL_ANSWERS),
        Target("json", accepting(fastjson.loads), json_bodies),
        *(Target(f"body-{name}", accepting(decoder), json_bodies) for name, decoder in sorted(BODY_DECODERS.items())),
        Target("reset-plan", accepting(reset_format.decode_plan), lambda: plans),
        Target("reset-report", accepting(reset_format.decode_report), lambda: plans),
        Target("reset-question", accepting(reset_format.decode_status_request), lambda: plans),
        Target("message", accepting(read_message), records),
        Target("record", accepting(read_record), records),
        Target("packed", accepting(read_packed), packed_bodies),
        Target("batch", accepting(read_batch), batches),
        Target("compressed", accepting(unpack), compressed),
        Target(
            "message-id", accepting(lambda data: parse_offset_message_id(data.decode("latin1"))), lambda: MESSAGE_IDS
        ),
        Target("tags", accepting(read_tags, ConfigError), lambda: [b"a || b", b"*"]),
        Target("checkpoint", accepting(decode_checkpoint), lambda: [checkpoint(1, 2, 3), JAVA_CHECKPOINT]),
        Target(
            "journal", accepting(read_journal, OffsetStoreError), lambda: [separate(store)[2] for store in stores()]
        ),
        Target("owner", accepting(read_owner_file), lambda: OWNERS),
        Target("spark-offset", accepting(read_spark_offset, ConfigError), lambda: SPARK_OFFSETS),
        Target("recovery", accepting(lambda data: recover(*separate(data)), OffsetStoreError), stores),
        Target("columns-as-messages", accepting(columns_as_messages), records),
        *(of_the_compiled_part() if find_spec("pyrocket_consumer.protocol._accelerator") else ()),
        Target("messages-as-records", accepting(messages_as_records), records),
        Target("properties-as-read", accepting(properties_as_read), properties),
        Target("json-as-read", accepting(json_as_read), json_bodies),
        Target("store-as-read", accepting(store_as_read), stores),
    ]


TARGETS: dict[str, Target] = {target.name: target for target in _made()}
