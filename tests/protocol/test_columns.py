import struct
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import accelerator, columns
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.columns import COLUMNS, ROW_BY_ROW_RECORDS, PulledRecords, record_batches
from pyrocket_consumer.protocol.compression import Compression, compress
from pyrocket_consumer.protocol.frame import BufferSlice, decode_command
from pyrocket_consumer.protocol.message import BatchItem, StoredMessage, decode_messages, encode_batch, encode_message
from pyrocket_consumer.protocol.subscription import parse_subscription
from tests import golden
from tests.for_each import for_each
from tests.protocol import both
from tests.protocol.records import (
    ODD_PROPERTIES,
    QUEUE,
    WORKED_RECORD,
    hosts,
    i32,
    i64,
    property_maps,
    times_ms,
    topics,
)
from tests.trials import trials

TYPES = {
    "queueId": pa.int32(),
    "queueOffset": pa.int64(),
    "body": pa.binary(),
    "properties": pa.map_(pa.string(), pa.string()),
    "flag": pa.int32(),
    "sysFlag": pa.int32(),
    "reconsumeTimes": pa.int32(),
    "bornTimestamp": pa.timestamp("us", "UTC"),
    "storeTimestamp": pa.timestamp("us", "UTC"),
}
ALL = pa.schema([(name, TYPES.get(name, pa.string())) for name in COLUMNS])
EVERY = (-(2**63), 2**63 - 1)
MANY = 2 * ROW_BY_ROW_RECORDS


def schema(*names):
    return pa.schema([ALL.field(name) for name in names])


def pulled(records, queue=QUEUE, begin=EVERY[0], end=EVERY[1]):
    return PulledRecords(queue, BufferSlice.whole(records), begin, end)


OTHERS = [both.copy(pure=True)] if accelerator.ACCELERATED else []
"""The copy that reads columns with numpy, if the package here uses the compiled part."""


def read_by(which, responses, wanted, tags=frozenset()):
    """Return the rows that a copy of the package reads, or the name and text of its error."""
    read = which.module("protocol.columns").record_batches
    return both.outcome(lambda: rows(pa.Table.from_batches(list(read(responses, wanted, tags)), wanted)))


def table(responses, wanted=ALL, tags=frozenset()):
    """Return the rows. All ways to read return the same rows or raise the same error."""

    def read():
        batches = list(record_batches(responses, wanted, tags))
        for batch in batches:
            batch.validate(full=True)
            assert batch.schema.equals(wanted)
            assert batch.num_rows
        return pa.Table.from_batches(batches, wanted)

    found = both.outcome(read)
    for other in OTHERS:
        assert read_by(other, responses, wanted, tags) == (rows(found) if isinstance(found, pa.Table) else found)
    return found if isinstance(found, pa.Table) else read()


def row(message):
    """Return a message of `decode_messages` as a row."""

    def time_of(name):
        try:
            return getattr(message, name)
        except ProtocolError:
            return None  # no date

    return {
        "topic": message.topic,
        "brokerName": message.queue.broker_name,
        "queueId": message.queue.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.message_id,
        "tags": message.tags,
        "keys": message.properties.get("KEYS"),
        "body": message.body,
        "properties": message.properties,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": time_of("born_at"),
        "storeTimestamp": time_of("stored_at"),
        "bornHost": message.born_host,
        "storeHost": message.store_host,
    }


def expected(responses, tags=frozenset()):
    return [
        row(message)
        for response in responses
        for message in decode_messages(bytes(response.records), response.queue)
        if response.begin <= message.queue_offset < response.end and (not tags or message.tags in tags)
    ]


def rows(found):
    names = found.schema.names
    return (
        [
            {name: dict(value) if name == "properties" else value for name, value in each.items()}
            for each in found.to_pylist()
        ]
        if "properties" in names
        else found.to_pylist()
    )


def assert_same(responses, tags=frozenset()):
    """The rows equal the messages, from separate bytes and from one buffer that later responses overwrite."""
    wanted = both.outcome(lambda: expected(responses, tags))
    refused = not isinstance(wanted, list)
    assert not refused or wanted[0] == "ProtocolError"
    for buffer, received in (bytearray(), responses), in_place(responses, 1), in_place(responses, -1):
        if refused:
            with pytest.raises(ProtocolError):
                table(received, ALL, tags)
        else:
            found = table(received, ALL, tags)
            buffer[:] = bytes(len(buffer))
            assert rows(found) == wanted


def in_place(responses, step):
    """Return a buffer with the responses, forwards or backwards with gaps between them, and the responses in it."""
    buffer, received = bytearray(b"\xff" * 7), []
    for response in responses[::step]:
        start = len(buffer)
        buffer += bytes(response.records) + b"\xff" * 9
        received.append(replace(response, records=BufferSlice(buffer, start, len(buffer) - 9)))
    return buffer, received[::step]


# ---- records to read

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
odd_properties = st.lists(st.sampled_from(["a", "TAGS", "KEYS", "UNIQ_KEY", "\x01", "\x02", "ключ", "\x00", "v"])).map(
    "".join
)
named = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "RETRY_TOPIC", "a"])
properties = st.one_of(
    odd_properties,
    property_maps,
    st.dictionaries(named, texts.filter(lambda text: text and not set(text) & {"\x01", "\x02"})),
    st.just("TAGS\x01A\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01" + "0" * 32),
)
plain_flags = st.sampled_from([0, 2, 4, 8, 12, 64, 128, 0x300])


def record(body, kind, **fields):
    """Return a record with a plain or compressed body, or an inner batch."""
    flags = fields.pop("flags")
    if kind == "batch":
        body, flags = encode_batch([BatchItem(body, {"KEYS": "k", "TAGS": "B"}, 7), BatchItem(b"")]), flags | 0xC0
    if kind in ("batch", "compressed"):
        body, packed = compress(body)
        flags |= packed
    return encode_message(StoredMessage(body=body, sys_flag=flags, **fields))


def records(*kinds):
    return st.builds(
        record,
        body=st.one_of(st.binary(max_size=80), st.just(b"\x00\x01\x02" * 9)),
        kind=st.sampled_from(kinds),
        flags=plain_flags,
        topic=topics,
        properties=properties,
        queue_id=i32,
        queue_offset=i64,
        commit_log_offset=i64,
        flag=i32,
        born_at_ms=st.one_of(times_ms, i64),
        born_host=hosts,
        stored_at_ms=times_ms,
        store_host=hosts,
        reconsume_times=i32,
        prepared_transaction_offset=i64,
    )


queues = st.builds(
    MessageQueue, st.sampled_from(["orders", "%RETRY%app"]), st.sampled_from(["broker-a", "b"]), st.integers(0, 3)
)


def responses(*kinds):
    response = st.builds(
        PulledRecords,
        queue=queues,
        records=st.lists(records(*kinds), max_size=4).map(b"".join).map(BufferSlice.whole),
        begin=st.one_of(st.just(EVERY[0]), i64),
        end=st.just(EVERY[1]),
    )
    return st.lists(response, min_size=1, max_size=4)


tag_sets = st.sampled_from([frozenset(), frozenset({"A", "B"})])


@pytest.mark.search
@pytest.mark.parametrize(
    ("times", "kinds", "examples"),
    [
        (1, "plain plain compressed batch", 60),
        (ROW_BY_ROW_RECORDS, "plain plain compressed", 120),
        (ROW_BY_ROW_RECORDS, "plain compressed batch", 20),
    ],
)
def test_records_of_any_kind_equal_messages(times, kinds, examples):
    @given(responses(*kinds.split()), tag_sets)
    @settings(max_examples=trials(examples), deadline=None)
    def are_same(responses, tags):
        assert_same(responses * times, tags)

    are_same()


@pytest.mark.search
@given(
    st.lists(records("plain", "compressed"), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 255)), min_size=1, max_size=3),
)
@settings(max_examples=trials(100), deadline=None)
def test_damaged_records_equal_messages_or_are_refused(parts, changes):
    damaged = bytearray(b"".join(parts))
    for index, value in changes:
        damaged[index % len(damaged)] = value
    assert_same([pulled(b"".join(parts) * ROW_BY_ROW_RECORDS), pulled(bytes(damaged))])


@for_each("repeated", [1, ROW_BY_ROW_RECORDS])
def test_records_of_real_brokers_are_the_same_in_columns(repeated):
    bodies = {decode_command(entry.frame()).body for entry in golden.index() if entry.records}
    for body in bodies:
        if len(body) < 5000:
            assert_same([pulled(body)] * repeated)


# ---- what is special


def simple(offset=0, **fields):
    return encode_message(StoredMessage(**{"topic": "orders", "body": b"b", "queue_offset": offset, **fields}))


def test_only_the_parts_asked_for_are_read():
    found = table([pulled(WORKED_RECORD * MANY)], schema("body", "queueOffset"))
    assert found.column_names == ["body", "queueOffset"]
    assert found.to_pylist() == [{"body": b"hi", "queueOffset": 42}] * MANY
    damaged = simple(properties="TAGS\x01A").replace(struct.pack(">H", 6), struct.pack(">H", 9))
    assert table([pulled(damaged * MANY)], schema("queueOffset", "body")).num_rows == MANY
    with pytest.raises(ProtocolError):
        table([pulled(damaged * MANY)], schema("tags"))


def test_properties_that_are_not_utf8_equal_those_of_messages():
    records = simple(properties={"TAGS": "AAAA"}).replace(b"AAAA", b"A\xff\xe2A") * MANY
    assert table([pulled(records)], schema("tags"))["tags"].to_pylist() == ["A\ufffd\ufffdA"] * MANY
    assert_same([pulled(records)])


def numbered(count):
    return b"".join(simple(offset) for offset in range(count))


def test_only_offsets_of_the_range_become_rows():
    found = table([pulled(numbered(MANY), begin=5, end=40), pulled(numbered(MANY), begin=0, end=3)])
    assert found["queueOffset"].to_pylist() == [*range(5, 40), *range(3)]
    for response, tags in (
        (pulled(numbered(MANY), begin=MANY), ()),
        (pulled(b""), ()),
        (pulled(numbered(MANY)), {"A"}),
    ):
        assert list(record_batches([response], ALL, frozenset(tags))) == []


@for_each("count", [1, 7, 8, 9, ROW_BY_ROW_RECORDS, 1023, 1024])
def test_any_number_of_records_is_read(count):
    records = [simple(offset, properties={"TAGS": "A"} if offset % 3 else {}) for offset in range(count)]
    found = table([pulled(b"".join(records))])
    assert found["queueOffset"].to_pylist() == list(range(count))
    assert found["tags"].to_pylist() == ["A" if offset % 3 else None for offset in range(count)]


def test_more_records_than_a_pull_requests_are_refused():
    with pytest.raises(ProtocolError, match="more than 1024 records in [0-9]+ bytes, which no pull requests"):
        table([pulled(WORKED_RECORD * 1025)])


@for_each("count", [63, 64, 65, 257, 3000])
def test_records_with_very_many_properties_are_read(count):
    properties = {f"n{number}": str(number) for number in range(count)}
    found = table([pulled(simple(properties=properties) * MANY)], schema("properties"))
    assert rows(found) == [{"properties": properties}] * MANY


@pytest.mark.slow("reads many columns")
@for_each("text", ODD_PROPERTIES)
def test_properties_of_any_form_equal_those_of_messages(text):
    whole = simple()[:-2] + struct.pack(">H", len(text)) + text
    record = struct.pack(">I", len(whole)) + whole[4:]
    assert_same([pulled(record * MANY), pulled(simple(properties={"TAGS": "A"}) * MANY)])


@pytest.mark.search
def test_records_damaged_in_each_byte_equal_messages():
    whole = simple(properties={"TAGS": "A", "KEYS": "k"}) + simple(born_host="[::1]:1", properties={"TAGS": "é"})
    for index in range(len(whole)):
        for value in (b"\0", b"\xff"):
            responses = [pulled(simple() * ROW_BY_ROW_RECORDS), pulled(whole[:index] + value + whole[index + 1 :])]
            wanted = both.outcome(lambda responses=responses: expected(responses))
            if isinstance(wanted, list):
                assert rows(table(responses)) == wanted
            else:
                assert wanted[0] == "ProtocolError"
                with pytest.raises(ProtocolError):
                    table(responses)


def test_tags_with_equal_hashes_are_distinguished():
    tags = parse_subscription("orders", "AaAa || other").tags
    tagged = [simple(offset, properties={"TAGS": "BBBB" if offset % 3 else "AaAa"}) for offset in range(MANY)]
    found = table([pulled(b"".join(tagged))], schema("queueOffset", "tags"), tags)
    assert found["queueOffset"].to_pylist() == list(range(0, MANY, 3))
    assert set(found["tags"].to_pylist()) == {"AaAa"}


def test_the_last_property_of_one_name_counts():
    rest = "\x02TAGS\x01first\x02a\x01last\x02TAGS\x01second\x02TAGS\x01"
    records = [simple(properties=f"a\x01{number}{rest}") for number in range(MANY)]
    found = table([pulled(b"".join(records))], schema("tags", "properties"))
    assert rows(found) == [{"tags": "second", "properties": {"a": "last", "TAGS": "second"}}] * MANY


def test_a_time_that_is_no_date_is_null():
    late = 253_402_300_800_000
    records = simple(born_at_ms=late, stored_at_ms=late - 1) + simple(born_at_ms=-(2**63), stored_at_ms=0)
    found = table([pulled(records * MANY)], schema("bornTimestamp", "storeTimestamp"))
    assert found["bornTimestamp"].null_count == 2 * MANY
    assert found["storeTimestamp"].to_pylist()[:2] == [
        datetime(9999, 12, 31, 23, 59, 59, 999000, UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
    ]


@pytest.mark.slow("unpacks many megabytes")
@for_each("kind", Compression)
@for_each("others", [0, MANY])
def test_very_large_decompressed_bodies_are_split_into_batches(kind, others):
    body, flags = compress(b"\x00" * 5_000_000, kind)
    records = simple() * others + simple(7, body=body, sys_flag=flags) * 7
    batches = list(record_batches([pulled(records)], schema("queueOffset", "body")))
    assert [batch.num_rows for batch in batches] == [others + 3, 3, 1]
    assert all(batch["body"].nbytes < columns.MAX_BODY_BYTES_OF_BATCH + 10_000 for batch in batches)
    assert [len(body) for batch in batches for body in batch["body"].to_pylist()] == [1] * others + [5_000_000] * 7


def test_a_body_whose_compression_is_damaged_is_a_protocol_error():
    record = simple(body=b"no zlib", sys_flag=SysFlag.COMPRESSED)
    for count in (1, MANY):
        with pytest.raises(ProtocolError, match=r"at offset \d+: zlib body of 7 bytes cannot be decompressed"):
            table([pulled(record * count)], schema("body"))
    assert table([pulled(record * MANY)], schema("sysFlag")).num_rows == MANY


def test_a_truncated_response_is_refused_even_if_the_next_has_the_rest():
    record = simple()
    halves = [pulled(record * MANY + record[:50]), pulled(record[50:] + record * MANY)]
    with pytest.raises(ProtocolError):
        table(halves)


# ---- the compiled part by itself


@pytest.fixture
def find_rows():
    return both.copy(pure=False).module("protocol.accelerator").find_rows


def test_the_compiled_part_reads_nothing_outside_the_bytes(find_rows):
    for start, stop in [(-1, 91), (0, 92), (50, 20), (0, 2**62), (-(2**62), 0)]:
        with pytest.raises(ValueError, match="no records from"):
            find_rows(((bytes(91), start, stop, *EVERY),), 1024)
    for responses in [[], None, (b"x",), ((),), (("text", 0, 0, 0, 0),), ((b"", 0, 0, 0),), ((b"", 0, 0, 2**63, 0),)]:
        with pytest.raises((TypeError, OverflowError)):
            find_rows(responses, 1024)


def test_the_compiled_part_refuses_invalid_columns_and_tags(find_rows):
    found = find_rows(((simple(), 0, len(simple()), *EVERY),), 1024)
    for name, error in [("nothing", KeyError), (b"body", TypeError), (None, TypeError), ("\ud800", UnicodeError)]:
        with pytest.raises(error):
            found.column(name)
    for tags in [["A"], ("A",), (None,), b"A"]:
        with pytest.raises(TypeError):
            found.filter_tags(tags)
    with pytest.raises(TypeError):
        type(found)()
    assert found.count == 1


def test_bytes_that_change_during_a_read_do_no_harm(find_rows):
    """If another thread changes the bytes, the values are wrong, but nothing crashes."""
    data = bytearray(simple(properties={"TAGS": "A", "KEYS": "k"}) * 50)
    found = find_rows(((data, 0, len(data), *EVERY),), 1024)
    assert len(found.column("properties")) == 3
    for value in (0xFF, 0):
        data[:] = bytes([value]) * len(data)
        for name in (*COLUMNS[3:], "RETRY_TOPIC"):
            found.column(name)
    with pytest.raises(BufferError):
        data.clear()
    del found
    data.clear()


@pytest.mark.live
@pytest.mark.slow("the memory of the process tells only of much that was read")
def test_columns_that_were_read_leak_no_memory():
    record = simple(body=b"x" * 2000, properties={f"name-{number}": "v" * 50 for number in range(20)})
    inputs = [record * 500, record * 500 + record[:-1], record * 499 + record[:-1] + b"\xff"]

    def read():
        for data in inputs:
            both.outcome(lambda data=data: list(record_batches([pulled(data)] * 2, ALL)))

    assert both.grown_kib(read, 5, 30) < 16 * 1024
