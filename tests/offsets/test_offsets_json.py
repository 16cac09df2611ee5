"""offsets.json is read whoever wrote it, and written as Java writes it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.offsets_json import decode_checkpoint, encode_offsets
from tests.for_each import for_each

TABLE = {MessageQueue("broadcast-test-topic", "broker-a", queue_id): 100 + queue_id for queue_id in (2, 1, 0)}

# What Java clients wrote: fastjson 1 (up to 5.3.x), fastjson 2 (from 5.4.0), and the compact text of network bodies.
FASTJSON_1 = (
    b'{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":2,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:102,'
    b'{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":1,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:101,'
    b'{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:100\n\t}\n}'
)
FASTJSON_2 = (
    b'{\n\t"offsetTable":{\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":2,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:102,'
    b'\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":1,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:101,'
    b'\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:100\n\t}\n}'
)
COMPACT = (
    b'{"offsetTable":{{"brokerName":"broker-a","queueId":2,"topic":"broadcast-test-topic"}:102,'
    b'{"brokerName":"broker-a","queueId":1,"topic":"broadcast-test-topic"}:101,'
    b'{"brokerName":"broker-a","queueId":0,"topic":"broadcast-test-topic"}:100}}'
)
GO = (
    b'{"offsetTable":{"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":2,\\"topic\\":\\"broadcast-test-topic\\"}":102,'
    b'"{\\"topic\\":\\"broadcast-test-topic\\",\\"brokerName\\":\\"broker-a\\",\\"queueId\\":1}":101,'
    b'"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":0,\\"topic\\":\\"broadcast-test-topic\\"}":100}}'
)


def test_the_golden_texts_are_the_ones_java_wrote():
    assert hashlib.sha1(FASTJSON_1).hexdigest() == "7f7bd5a107ba54fb156602eae970a828dcb96981"
    assert hashlib.sha1(FASTJSON_2).hexdigest() == "1c7454a2ebb2b249dcdeefaecedee627090dc0e0"


def test_what_we_write_is_byte_for_byte_what_java_writes():
    assert encode_offsets(TABLE) == FASTJSON_1
    assert encode_offsets({}) == b'{\n\t"offsetTable":{}\n}'


@for_each("count", [255, 256, 257, 1000])
def test_large_tables_are_one_entry_after_the_other(count):
    entries = ",".join(
        f'{{\n\t\t\t"brokerName":"broker-%d",\n\t\t\t"queueId":{number},\n\t\t\t"topic":"orders"\n\t\t}}:{number}'
        for number in range(count)
    )
    table = {MessageQueue("orders", "broker-%d", number): number for number in range(count)}
    assert encode_offsets(table).decode() == '{\n\t"offsetTable":{' + entries + "\n\t}\n}"


@for_each(
    "text",
    [
        FASTJSON_1,
        FASTJSON_2,
        COMPACT,
        GO,
        FASTJSON_1 + b"\n",
        b"\xef\xbb\xbf" + FASTJSON_1,
        b"\xef\xbb\xbf" + GO,
        FASTJSON_2.replace(b"\n", b"\r\n"),
        COMPACT.replace(b":", b" : ").replace(b",", b" , "),
        COMPACT.replace(b'"brokerName":"broker-a","queueId":1', b'"queueId":1,"x":[null],"brokerName":"broker-a"'),
        COMPACT[:-1] + b',"version":3}',
        COMPACT.replace(b"broker-a", b"\\u0062roker-a"),
    ],
    ids=[f"{number}" for number in range(12)],
)
def test_every_spelling_is_read(text):
    assert decode_checkpoint(text)[0] == TABLE


def test_no_broker_name_is_empty_and_a_negative_offset_none():
    text = b'{"offsetTable":{{"queueId":1,"topic":"t"}:5,{"brokerName":"b","queueId":1,"topic":"t"}:-1}}'
    assert decode_checkpoint(text)[0] == {MessageQueue("t", "", 1): 5}


@for_each("text", [FASTJSON_1, FASTJSON_2, COMPACT, GO, encode_offsets({})])
def test_a_text_cut_anywhere_is_damaged_never_shorter(text):
    for length in range(len(text)):
        with pytest.raises(ProtocolError):
            decode_checkpoint(text[:length])


@for_each(
    "text",
    [
        b"",
        b"null",
        b"{}",
        b"[]",
        b"\0" * 300,
        FASTJSON_1 + b"x",
        FASTJSON_1 + b"\0",
        FASTJSON_1 + FASTJSON_1,
        FASTJSON_1.replace(b":101", b":1.5"),
        FASTJSON_1.replace(b":101", b":9223372036854775808"),
        FASTJSON_1.replace(b":101", b":true"),
        FASTJSON_1.replace(b'"queueId":1', b'"queueId":-2'),
        FASTJSON_1.replace(b'"queueId":1', b'"queueId":2147483648'),
        FASTJSON_1.replace(b"broker-a", b"x" * 5000),
        FASTJSON_1.replace(b'"queueId":1', b'"queueId":"1"'),
        FASTJSON_1.replace(b'"topic":"broadcast-test-topic"', b'"topic":7'),
        b'{"offsetTable":[]}',
        b'{"offsetTable":{5:6}}',
        b'{"offsetTable":{"x":6}}',
        FASTJSON_1.decode().encode("utf-16"),
        b"\xff" + FASTJSON_1,
        b"22 serialization::archive 17 0 0 1",
    ],
)
def test_what_is_not_a_table_is_damaged_never_empty(text):
    with pytest.raises(ProtocolError):
        decode_checkpoint(text)


names = st.text(max_size=12).filter(lambda text: text.encode("utf-8", "replace").decode() == text)
queues = st.builds(MessageQueue, names, names, st.integers(-1, 2**31 - 1))


@pytest.mark.slow("writes and reads many tables")
@given(st.dictionaries(queues, st.integers(0, 2**63 - 1), max_size=8))
def test_any_table_comes_back_as_it_was(table):
    assert decode_checkpoint(encode_offsets(table))[0] == table


@given(
    st.dictionaries(queues, st.integers(0, 2**63 - 1), max_size=8),
    st.dictionaries(st.builds(MessageQueue, names, names, st.integers(0, 2**31 - 1)), st.integers(1, 2**63 - 1)),
)
def test_any_table_with_epochs_comes_back_as_it_was(table, epochs):
    assert decode_checkpoint(encode_offsets(table, epochs)) == (table, epochs)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(data):
    try:
        table = decode_checkpoint(data)[0]
    except ProtocolError:
        return
    assert b"offsetTable" in data or table  # only a table that is there may be empty


@given(st.data())
def test_a_changed_byte_is_refused_or_read_as_what_it_now_says(data):
    text = bytearray(data.draw(st.sampled_from([FASTJSON_1, FASTJSON_2, COMPACT, GO])))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        table = decode_checkpoint(bytes(text))[0]
    except ProtocolError:
        return
    assert all(type(offset) is int and offset >= 0 for offset in table.values())
