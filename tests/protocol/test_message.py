import copy
import gc
import hashlib
import pickle
import re
import struct
import zlib
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.compat.rocketmq.client import ReceivedMessage
from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.compression import Compression, compress
from pyrocket_consumer.protocol.frame import decode_command
from pyrocket_consumer.protocol.message import (
    BatchItem,
    StoredMessage,
    body_crc,
    decode_batch,
    decode_messages,
    encode_batch,
    encode_message,
    encode_properties,
    offset_message_id,
)
from tests import golden
from tests.for_each import for_each
from tests.protocol.records import QUEUE, WORKED_RECORD, property_maps, read_properties, read_records, stored_messages

# ---- records of real brokers ----

RECORD_LINE = re.compile(
    r"q(?P<queue_id>\d+) queueOffset (?P<queue_offset>\d+) phys (?P<phys>\d+) size (?P<size>\d+) magic 0x\w+"
    r" flag (?P<flag>-?\d+) sysFlag (?P<sys_flag>\d+) born (?P<born_ms>\d+) (?P<born_host>\S+)"
    r" stored (?P<stored_ms>\d+) (?P<store_host>\S+) reconsume (?P<reconsume>\d+) preparedTx (?P<prepared>\d+)"
    r" crc (?P<crc>\d+) topic `(?P<topic>.*?)` stored body `(?P<body>.*?)` props `(?P<props>.*)`"
)
WITH_RECORDS = [entry for entry in golden.index() if entry.records]
PULLS_OF_J2 = [entry for entry in WITH_RECORDS if "topic `A_j2` " in entry.records[0] and len(entry.records) > 10]


def messages_of(entry, queue=None):
    return decode_messages(decode_command(entry.frame()).body, queue)


def decoded(stored, queue=None):
    (message,) = decode_messages(encode_message(stored), queue)
    return message


def shown(value):
    return f"<{len(value)} chars>" if len(value) > 120 else value


@for_each("entry", WITH_RECORDS, ids=str)
def test_a_message_of_a_real_broker_matches_the_index(entry):
    messages = messages_of(entry)
    records = read_records(decode_command(entry.frame()).body)
    for message, line, record in zip(messages, entry.records, records, strict=True):
        expected = RECORD_LINE.fullmatch(line)
        assert expected, line
        numbers = {
            "queue_id": message.queue.queue_id,
            "queue_offset": message.queue_offset,
            "phys": message.commit_log_offset,
            "size": message.store_size,
            "flag": message.flag,
            "sys_flag": message.sys_flag,
            "born_ms": message.born_at_ms,
            "stored_ms": message.stored_at_ms,
            "reconsume": message.reconsume_times,
            "prepared": message.prepared_transaction_offset,
            "crc": message.body_crc,
        }
        assert numbers == {name: int(expected[name]) for name in numbers}
        assert (message.born_host, message.store_host) == (expected["born_host"], expected["store_host"])
        assert message.queue.topic == expected["topic"]
        assert "; ".join(f"{name}={shown(value)}" for name, value in message.properties.items()) == expected["props"]
        if expected["body"].isalnum():
            assert message.body.hex() == expected["body"]
        else:
            digest = hashlib.sha256(record.stored_body).hexdigest()[:16]
            assert expected["body"] == f"{len(record.stored_body)} bytes sha256 {digest}"
        assert body_crc(record.stored_body) == message.body_crc


STORED_FIELDS = (
    "queue_id",
    "queue_offset",
    "commit_log_offset",
    "flag",
    "sys_flag",
    "born_at_ms",
    "born_host",
    "stored_at_ms",
    "store_host",
    "reconsume_times",
    "prepared_transaction_offset",
)


@for_each("entry", WITH_RECORDS, ids=str)
def test_a_record_of_a_real_broker_is_written_the_same(entry):
    for record in read_records(decode_command(entry.frame()).body):
        fields = {name: getattr(record, name) for name in STORED_FIELDS}
        stored = StoredMessage(record.topic, record.stored_body, record.properties_text, **fields)
        assert encode_message(stored) == record.data
        if len(set(re.findall("(?:^|\x02)([^\x01]*)", record.properties_text))) == record.properties_text.count("\x01"):
            properties = read_properties(record.properties_text)
            assert encode_properties(properties).rstrip("\x02") == record.properties_text.rstrip("\x02")


BIG = bytes(ord("a") + i % 10 + i // 1000 for i in range(6000))
ODD = {"user prop": "väl:ue = \"x\" \\ 'y'", "x2": "=,;: v"}
AS_SENT = [
    (b"hello", "TagA", ("k1", "k2"), 0, {}),
    ("юникод 你好 😀".encode(), "TagA", ("ключ-ключ", "键", "🔑"), 0, {}),
    (bytes.fromhex("0001020000ff8000"), None, (), 0, {}),
    (b"flagged", "TagB", (), 7, ODD),
    (b"long props", "TagLong", ("klong",), 0, {"big": "p" * 30_000}),
    (BIG, "TagZ", ("kz",), 0, {}),
    (b"batch-0", "TagBatch", ("kb0",), 0, {"i": "0"}),
    (b"batch-1", "TagBatch", ("kb1",), 0, {"i": "1"}),
    (b"batch-2", "TagBatch", ("kb2",), 0, {"i": "2"}),
    (b"oneway", "TagOne", ("ko",), 0, {}),
    (b"ordered", "TagO", ("ko2",), 0, {}),
    (b"delayed", "TagDelay", ("kd",), 0, {}),
]
AS_SENT_LATER = {
    "TagTimer": (b"timer", "TagTimer", ("kt",), 0, {}),
    "TagLZ4": (BIG, "TagLZ4", ("kLZ4",), 0, {}),
    "TagZSTD": (BIG, "TagZSTD", ("kZSTD",), 0, {}),
    "TagZLIB": (BIG, "TagZLIB", ("kZLIB",), 0, {}),
}


@for_each("entry", PULLS_OF_J2, ids=str)
def test_messages_of_a_java_producer_arrive_as_sent(entry):
    assert [entry.version for entry in PULLS_OF_J2] == list(golden.VERSIONS)
    assert hashlib.sha256(BIG).hexdigest() == "94d6357cde5587efe712b2a0820700d2ced0755f0fada8ab8df712c0221d86cb"
    messages = messages_of(entry, MessageQueue("A_j2", "broker-a", 0))
    assert [message.queue_offset for message in messages] == list(range(len(messages)))
    wanted = [*AS_SENT, *(AS_SENT_LATER[message.tags] for message in messages[len(AS_SENT) :])]
    for message, (*sent, properties) in zip(messages, wanted, strict=True):
        assert [message.body, message.tags, message.keys, message.flag] == sent
        for name in ("user prop", "x2", "big", "i"):
            assert message.property(name) == properties.get(name)
    later = {"TagLZ4", "TagZSTD", "TagZLIB"} | ({"TagTimer"} if entry.version != "4.9.7" else set())
    assert {message.tags for message in messages[len(AS_SENT) :]} == later


def test_messages_of_a_java_batch_have_different_offset_ids():
    batches = [messages_of(entry)[6:9] for entry in PULLS_OF_J2]
    assert [len({message.offset_message_id for message in batch}) for batch in batches] == [3, 3, 3, 3]
    # The second and third version add the batch's own key to every item, and the last one counts.
    assert [len({message.message_id for message in batch}) for batch in batches] == [3, 1, 1, 3]


@for_each("version", golden.VERSIONS)
def test_a_committed_message_names_the_half_message_it_came_from(version):
    found = [m for entry in WITH_RECORDS if entry.version == version for m in messages_of(entry)]
    half = next(m for m in found if m.topic == "RMQ_SYS_TRANS_HALF_TOPIC")
    committed = next(m for m in found if m.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT)
    assert half.property("REAL_TOPIC") == committed.topic == "A_gold"
    assert committed.prepared_transaction_offset == half.commit_log_offset
    assert committed.body == half.body == b"half-body"
    assert committed.property("TRAN_MSG") == "true"


def test_a_retried_message_has_its_first_topic_and_its_queue():
    retried = [m for e in WITH_RECORDS for m in messages_of(e) if m.queue.topic.startswith("%RETRY%")]
    assert {message.topic for message in retried} == {"A_gold", "A_j2"}
    assert {message.reconsume_times for message in retried} == {1}
    queue = MessageQueue("%RETRY%A_goldG", "broker-a", 0)
    (entry,) = (e for e in WITH_RECORDS if e.version == "4.9.7" and e.name.startswith("87-"))
    (message,) = messages_of(entry, queue)
    assert (message.topic, message.queue) == ("A_gold", queue)
    assert decoded(StoredMessage("%RETRY%g", b"")).topic == "%RETRY%g", "without a topic, its queue's"


def test_topics_longer_than_127_bytes_use_the_second_format():
    long_ones = [m for e in WITH_RECORDS for m in messages_of(e) if len(m.queue.topic) == 134]
    assert [(message.body, message.tags, message.topic) for message in long_ones] == 2 * [(b"gold-0", "TagA", "A_gold")]


# ---- one record ----


def test_the_worked_record_is_read():
    (message,) = decode_messages(WORKED_RECORD)
    assert message.queue == MessageQueue("T", "", 3)
    assert (message.topic, message.body, message.tags, message.keys) == ("T", b"hi", "TagA", ())
    assert message.properties == {"TAGS": "TagA", "UNIQ_KEY": "0A000009126718B4AAC200000000002A"}
    assert message.message_id == "0A000009126718B4AAC200000000002A"
    assert message.offset_message_id == "0A00000100002A9F0000000000001000"
    assert (message.queue_offset, message.commit_log_offset, message.store_size) == (42, 4096, 146)
    assert (message.born_host, message.store_host) == ("10.0.0.9:50000", "10.0.0.1:10911")
    assert (message.born_at_ms, message.stored_at_ms) == (1_700_000_000_000, 1_700_000_000_005)
    assert message.born_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert message.stored_at == datetime(2023, 11, 14, 22, 13, 20, 5000, tzinfo=UTC)
    assert message.stored_at.tzinfo is UTC
    assert message.body_crc == 0x58932AAC
    assert (message.flag, message.sys_flag, message.reconsume_times, message.prepared_transaction_offset) == (0,) * 4


def test_the_worked_record_is_written():
    properties = {"TAGS": "TagA", "UNIQ_KEY": "0A000009126718B4AAC200000000002A"}
    stored = StoredMessage(
        "T",
        b"hi",
        properties,
        queue_id=3,
        queue_offset=42,
        commit_log_offset=4096,
        born_at_ms=1_700_000_000_000,
        born_host="10.0.0.9:50000",
        stored_at_ms=1_700_000_000_005,
        store_host="10.0.0.1:10911",
    )
    assert encode_message(stored) == WORKED_RECORD


def assert_is(message, stored):
    """Compare every attribute of a message with the stored value."""
    assert (message.body, message.properties) == (stored.body, stored.properties)
    assert message.tags == stored.properties.get("TAGS")
    assert {name: message.property(name) for name in stored.properties} == stored.properties
    for name in set(STORED_FIELDS) - {"queue_id", "sys_flag"}:
        assert getattr(message, name) == getattr(stored, name), name
    hosts = ("[" in stored.born_host) * SysFlag.BORN_HOST_V6 | ("[" in stored.store_host) * SysFlag.STORE_HOST_V6
    assert message.sys_flag == stored.sys_flag | hosts
    assert message.body_crc == zlib.crc32(stored.body) & 0x7FFFFFFF
    store_ip, _, store_port = stored.store_host.rpartition(":")
    if stored.commit_log_offset >= 0:
        wanted = offset_message_id(store_ip.strip("[]"), int(store_port), stored.commit_log_offset)
        assert message.offset_message_id == wanted
    assert set(message.offset_message_id) <= set("0123456789ABCDEF")


@pytest.mark.search
@given(st.lists(stored_messages(), max_size=5))
@settings(deadline=None)
def test_what_is_stored_is_read(stored):
    data = b"".join(map(encode_message, stored))
    for message, original in zip(decode_messages(data, QUEUE), stored, strict=True):
        assert (message.queue is QUEUE, message.topic) == (True, "orders")
        assert_is(message, original)
    for message, original in zip(decode_messages(data), stored, strict=True):
        assert message.queue == MessageQueue(original.topic, "", original.queue_id)
        found = message.property(original.topic)  # before all are read
        assert found == original.properties.get(original.topic)
    for record, original in zip(read_records(data), stored, strict=True):
        assert record.magic == (0xDAA320A7 if len(original.topic) <= 127 else 0xDAA320AB)
        assert (record.topic, record.stored_body) == (original.topic, original.body)


@for_each("kind", list(Compression))
def test_a_compressed_body_is_read_decompressed(kind):
    body, flags = compress(b"x" * 5000, kind)
    message = decoded(StoredMessage("orders", body, sys_flag=flags))
    assert message.body == b"x" * 5000
    assert message.body is message.body  # once
    assert message.body_crc == body_crc(body)


def test_ids_and_hosts_of_ipv6_brokers():
    hosts = {"born_host": "[2001:db8::9]:5", "store_host": "[2001:db8::1]:10911"}
    message = decoded(StoredMessage("T", b"hi", commit_log_offset=4096, **hosts))
    assert message.message_id == message.offset_message_id == "20010DB800000000000000000000000100002A9F0000000000001000"
    assert (message.born_host, message.store_host) == ("[2001:db8::9]:5", "[2001:db8::1]:10911")


def test_a_record_without_body_and_properties_is_the_shortest():
    record = encode_message(StoredMessage("T", b""))
    (message,) = decode_messages(record)
    assert len(record) == 92
    assert (message.body, message.properties, message.tags, message.keys) == (b"", {}, None, ())
    assert message.message_id == message.offset_message_id
    assert decode_messages(b"") == []
    keyed = decoded(StoredMessage("T", b"", {"KEYS": " a  b\u00a0c d "}))
    assert keyed.keys == ("a", "b\u00a0c", "d"), "split at spaces only"


def test_a_property_that_is_not_utf8_is_there_as_it_was_sent():
    record = encode_message(StoredMessage("T", b"", {"place": "Gera!", "KEYS": "a"}))
    (message,) = decode_messages(record.replace(b"Gera!", "Köln!".encode("latin-1")))
    assert (message.property("place"), message.property_bytes("place")) == ("K\ufffdln!", b"K\xf6ln!")
    assert (message.property_bytes("KEYS"), message.property_bytes("other")) == (b"a", None)
    received = ReceivedMessage(message)
    assert (received["place"], received.keys, received["other"]) == (b"K\xf6ln!", b"a", b"")


def test_a_message_prints_its_location_and_not_its_content():
    (message,) = decode_messages(WORKED_RECORD, MessageQueue("T", "broker-a", 3))
    assert repr(message) == "<Message T queue=T/broker-a/3 offset=42 bytes=146>"
    record = bytearray(encode_message(StoredMessage("%RETRY%g", b"secret")))
    record[-1] += 1  # longer properties than there are
    (message,) = decode_messages(bytes(record))
    assert repr(message) == "<Message damaged queue=None offset=0 bytes=105>"


def test_a_detached_message_keeps_only_its_own_bytes():
    data = b"".join(encode_message(StoredMessage("T", bytes([n]) * 1000, queue_offset=n)) for n in range(32))
    message = decode_messages(data, QUEUE)[7]
    detached = message.detach()
    assert detached is not message
    assert (detached.queue_offset, detached.body, detached.queue) == (7, b"\x07" * 1000, QUEUE)
    held = [value for value in gc.get_referents(detached) if isinstance(value, bytes)]
    assert sum(map(len, held)) < 2200
    assert detached.detach() is detached
    data = WORKED_RECORD + encode_message(StoredMessage("T", b"x" * 100_000))
    assert len(pickle.dumps(decode_messages(data, QUEUE)[0])) < 500


@pytest.mark.search
@given(stored_messages())
def test_a_message_travels_to_another_process(stored):
    stored = replace(stored, sys_flag=stored.sys_flag & ~0xC0)
    data = encode_message(stored)
    for message in decode_messages(data + WORKED_RECORD, QUEUE)[:1] + decode_messages(data):
        copied = pickle.loads(pickle.dumps(message)), copy.copy(message), copy.deepcopy(message)
        for travelled in (*copied, copy.copy(message.detach())):
            assert travelled is not message
            assert_is(travelled, stored)
            assert travelled.queue == message.queue


def test_attempts_that_the_record_does_not_count_are_added():
    message = decode_messages(encode_message(StoredMessage("T", b"", reconsume_times=3)) * 2)[0]
    assert message._done is False
    message._extra_attempts += 2
    for each in (message, message.detach(), pickle.loads(pickle.dumps(message))):
        assert each.reconsume_times == 5


# ---- inner batches ----

TWO_ITEMS = bytes.fromhex(
    "0000002c 00000000 00000000 00000000 00000003 6f6e65 0013 554e49515f4b455901553102544147530141 02"
    "0000002c 00000000 00000000 00000000 00000003 74776f 0013 554e49515f4b455901553202544147530142 02"
)
ONE = BatchItem(b"one", {"UNIQ_KEY": "U1", "TAGS": "A"})
TWO = BatchItem(b"two", {"UNIQ_KEY": "U2", "TAGS": "B"})


def test_the_worked_batch_is_written_and_read():
    assert encode_batch([ONE, TWO]) == TWO_ITEMS
    assert decode_batch(TWO_ITEMS) == [ONE, TWO]
    minimal = bytes.fromhex("0000001c00000000000000000000000000000002686900046b017602")
    assert encode_batch([BatchItem(b"hi", {"k": "v"})]) == minimal
    assert encode_batch([BatchItem(b"hi", "k\x01v\x02")]) == minimal
    assert encode_batch([]) == b""


@pytest.mark.search
@given(st.lists(st.builds(BatchItem, st.binary(max_size=100), property_maps, st.integers(-(2**31), 2**31 - 1))))
def test_what_is_written_in_a_batch_is_read(items):
    assert decode_batch(encode_batch(items)) == items


@for_each("version", golden.VERSIONS)
def test_a_batch_of_a_java_producer_is_read_and_written(version):
    entries = [e for e in golden.index() if e.version == version and e.name.endswith("-send-batch-request.bin")]
    body = decode_command(entries[0].frame()).body
    items = decode_batch(body)
    assert [item.body for item in items] == [b"batch-0", b"batch-1", b"batch-2"]
    assert [item.properties["KEYS"] for item in items] == ["kb0", "kb1", "kb2"]
    if version in ("4.9.7", "5.1.4"):  # they write no separator after the last property
        items = [replace(item, properties=encode_properties(item.properties)[:-1]) for item in items]
    assert encode_batch(items) == body


def stored_batch(body=TWO_ITEMS, sys_flag=SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH):
    fields = {"queue_id": 3, "queue_offset": 42, "commit_log_offset": 4096, "flag": 1, "sys_flag": sys_flag}
    times = {"born_at_ms": 5, "stored_at_ms": 6, "reconsume_times": 7}
    return encode_message(StoredMessage("T", body, {"INNER_NUM": "2"}, **fields, **times))


@for_each("kind", [None, *Compression])
def test_an_inner_batch_is_unpacked_into_its_messages(kind):
    body, flags = compress(TWO_ITEMS, kind) if kind else (TWO_ITEMS, 0)
    flags |= SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
    data = WORKED_RECORD + stored_batch(body, flags) + WORKED_RECORD
    before, one, two, after = decode_messages(data, QUEUE)
    assert (before.body, after.body) == (b"hi", b"hi")
    found = [(each.queue_offset, each.body, each.properties, each.tags) for each in (one, two)]
    assert found == [(42, b"one", ONE.properties, "A"), (43, b"two", TWO.properties, "B")]
    for message in (one, two, pickle.loads(pickle.dumps(one)), one.detach()):
        assert message.queue is QUEUE or message.queue == QUEUE
        assert (message.flag, message.body_crc) == (0, 0)
        assert message.offset_message_id == "7F00000100002A9F0000000000001000"
        assert (message.born_at_ms, message.stored_at_ms, message.reconsume_times) == (5, 6, 7)
        assert message.sys_flag == flags
        assert message.body in (b"one", b"two")
    assert decode_messages(data)[1].queue == MessageQueue("T", "", 3)


def test_an_inner_batch_of_ipv6_and_a_long_topic_is_unpacked():
    stored = StoredMessage("t" * 200, TWO_ITEMS, sys_flag=0xC0, queue_offset=9, store_host="[2001:db8::1]:10911")
    one, two = decode_messages(encode_message(stored))
    assert (one.topic, one.body, two.queue_offset) == ("t" * 200, b"one", 10)
    assert two.store_host == "[2001:db8::1]:10911"
    with pytest.raises(ProtocolError, match="item 1 of the batch at offset 9223372036854775807"):
        decode_messages(encode_message(replace(stored, queue_offset=2**63 - 1)))


@for_each("sys_flag", [SysFlag.NEED_UNWRAP, SysFlag.INNER_BATCH])
def test_a_record_with_one_of_the_two_bits_is_not_unpacked(sys_flag):
    (message,) = decode_messages(stored_batch(sys_flag=sys_flag))
    assert (message.body, message.queue_offset) == (TWO_ITEMS, 42)


# ---- damage ----


@for_each(
    "change, problem",
    [
        (lambda r: r[:-1], "record at 0 of 145: size 146"),
        (lambda r: r + b"\0" * 50, "50 bytes at 146 are too few"),
        (lambda r: r + r[:90], "90 bytes at 146 are too few"),
        (lambda r: r[:4] + bytes.fromhex("cbd43194") + r[8:], "magic 0xcbd43194 is unknown"),
        (lambda r: r[:4] + bytes(4) + r[8:], "magic 0x00000000 is unknown"),
        (lambda r: b"\0\0\0\0" + r[4:], "size 0"),
        (lambda r: b"\xff\xff\xff\xff" + r[4:], "size 4294967295"),
        (lambda r: b"\0\0\0\x58" + r[4:], "size 88"),
        (lambda r: r[:84] + b"\xff\xff\xff\xff" + r[88:], "body of 4294967295 bytes"),
        (lambda r: r[:84] + b"\0\0\0\x38" + r[88:], "body of 56 bytes"),
        (lambda r: r[:39] + b"\x30" + r[40:], "record at 0 of 146"),  # as if its hosts were IPv6
    ],
)
def test_bytes_that_are_not_records_are_refused(change, problem):
    with pytest.raises(ProtocolError, match=problem):
        decode_messages(change(WORKED_RECORD))


@for_each(
    "change, broken",
    [
        (lambda r: r[:90] + b"\x7f" + r[91:], ["topic", "queue", "properties", "tags", "message_id"]),  # topic length
        (lambda r: r[:90] + b"\x02" + r[91:], ["topic", "properties", "tags"]),
        (lambda r: r[:91] + b"\xff" + r[92:], ["topic", "queue"]),  # not UTF-8
        (lambda r: r[:92] + b"\0\x33" + r[94:], ["properties", "tags", "keys"]),  # properties length
        (lambda r: r[:92] + b"\xff\xff" + r[94:], ["properties", "tags", "keys"]),
        (lambda r: r[:40] + b"\x7f" * 8 + r[48:], ["born_at"]),
        (lambda r: r[:56] + b"\x80" + r[57:], ["stored_at"]),
        (lambda r: r[:39] + b"\x01" + r[40:], ["body"]),  # as if it were compressed
    ],
)
def test_damage_inside_a_record_raises_on_access(change, broken):
    (message,) = decode_messages(change(WORKED_RECORD))
    assert message.queue_offset == 42
    for name in broken:
        with pytest.raises(ProtocolError):
            getattr(message, name)
    assert message.commit_log_offset == 4096


@for_each("body", [TWO_ITEMS[:-1], TWO_ITEMS + b"\0" * 10, b"\0" * 44, b"\xff" * 44, TWO_ITEMS[1:]])
def test_a_damaged_batch_is_refused(body):
    with pytest.raises(ProtocolError, match="batch item"):
        decode_batch(body)
    with pytest.raises(ProtocolError, match="batch item"):
        decode_messages(stored_batch(body))


def test_the_size_of_unpacked_inner_batches_is_limited():
    body, flags = compress(struct.pack(">IIIiIH", 22, 0, 0, 0, 0, 0) * 1000)
    # Every item becomes a record of its own, with the batch's topic.
    record = encode_message(StoredMessage("t" * 30_000, body, sys_flag=flags | 0xC0))
    assert len(decode_messages(record * 2)) == 2000
    with pytest.raises(ProtocolError, match="inner batches hold more than 67108864 bytes"):
        decode_messages(record * 3)


@for_each(
    "stored",
    [
        StoredMessage("t" * 32_768, b""),
        StoredMessage("T", b"", {"a": "\x01"}),
        StoredMessage("T", b"", {"a": "x" * 32_767}),
        StoredMessage("T", b"", store_host="broker-a:10911"),
    ],
)
def test_what_no_record_can_hold_is_refused(stored):
    with pytest.raises(ConfigError):
        encode_message(stored)


def test_the_items_of_a_batch_keep_their_ids():
    """Brokers 5.1 and 5.3 append the batch's properties to those of each item; the last of a name counts."""
    message = decoded(StoredMessage("orders", b"b", "TAGS\x01A\x02UNIQ_KEY\x01item\x02UNIQ_KEY\x01batch\x02"))
    assert (message.message_id, message.producer_id) == ("batch", "item")
    assert decoded(StoredMessage("orders", b"b", "MY_UNIQ_KEY\x01item\x02")).producer_id is None
