from __future__ import annotations

import hashlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.fastjson import MAX_DEPTH, MAX_VALUES, ObjectKey, dumps, loads
from tests.for_each import for_each
from tests.trials import trials


def key(queue_id: int, topic: str = "broadcast-test-topic") -> ObjectKey:
    return ObjectKey({"brokerName": "broker-a", "queueId": queue_id, "topic": topic})


FASTJSON_1_FILE = (
    '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":2,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}'
    ':102,{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":1,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:101,{\n\t\t\t'
    '"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:100\n\t}\n}'
)
FASTJSON_2_FILE = (
    '{\n\t"offsetTable":{\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":2,\n\t\t\t"topic":"broadcast-test-topic"'
    '\n\t\t}:102,\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":1,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}'
    ':101,\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"broadcast-test-topic"\n\t\t}:100'
    "\n\t}\n}"
)
COMPACT = (
    '{"offsetTable":{{"brokerName":"broker-a","queueId":2,"topic":"broadcast-test-topic"}:102,'
    '{"brokerName":"broker-a","queueId":1,"topic":"broadcast-test-topic"}:101}}'
)


@for_each(
    "text, digest",
    [
        (FASTJSON_1_FILE, "7f7bd5a107ba54fb156602eae970a828dcb96981"),
        (FASTJSON_2_FILE, "1c7454a2ebb2b249dcdeefaecedee627090dc0e0"),
    ],
)
def test_offset_files_of_both_eras_are_read(text, digest):
    assert hashlib.sha1(text.encode()).hexdigest() == digest, "it is what Java writes"
    for changed in (text, text + "\n", "\ufeff" + text, text.encode()):
        assert loads(changed) == {"offsetTable": {key(2): 102, key(1): 101, key(0): 100}}


@for_each(
    "text, value",
    [
        (COMPACT, {"offsetTable": {key(2): 102, key(1): 101}}),
        ('{\n\t"offsetTable":{}\n}', {"offsetTable": {}}),
        ('{0:"a",1:"b"}', {0: "a", 1: "b"}),
        ('{-1 : "a" }', {-1: "a"}),
        ('{offset:1,$ref:"x"}', {"offset": 1, "$ref": "x"}),
        ('{{"topic":"T","x":[1,{}],"queueId":5}:{}}', {ObjectKey({"topic": "T", "x": [1, {}], "queueId": 5}): {}}),
        ('{ { "topic" : "T" } : -7 }', {ObjectKey({"topic": "T"}): -7}),
        ('{"{\\"queueId\\":5}":100}', {'{"queueId":5}': 100}),
        ('{{"a":{{"b":1}:2}}:3}', {ObjectKey({"a": {ObjectKey({"b": 1}): 2}}): 3}),
        (
            '{{"brokerName":"b\\"x","queueId":0,"topic":"}:{"}:1}',
            {ObjectKey({"brokerName": 'b"x', "queueId": 0, "topic": "}:{"}): 1},
        ),
        ("{0:9223372036854775807,1:-9223372036854775808}", {0: 2**63 - 1, 1: -(2**63)}),
        ("{0:[true,false,null,1.5,-2e3,0.1]}", {0: [True, False, None, 1.5, -2000.0, 0.1]}),
        ('{0:"\\u0001\\u4e2d\\ud83d\\ude00\\n"}', {0: "\x01中😀\n"}),
        ('{0:"raw\x01\t"}', {0: "raw\x01\t"}),
        ('{0:"a\\ud83d"}', {0: "a�"}),
        ("null", None),
    ],
)
def test_what_fastjson_writes_is_read(text, value):
    assert loads(text) == value
    assert loads(text.encode()) == value


@for_each(
    "text",
    [
        "",
        " ",
        "\ufeff",
        "\0\0\0\0",
        "{",
        "[",
        "{0",
        "{0:",
        "{0:1",
        "{0:1,",
        "{0:1,}",
        "[1,]",
        "{0:[1,]}",
        "{0:1}}",
        "{0:1}x",
        "{0:1}{0:1}",
        '{0:"',
        '{0:"\\',
        '{0:"\\u12',
        "{0:tru}",
        "{0:nul",
        "{0:-}",
        "{0:1e999}",
        "{0:NaN}",
        "{{}:1",
        "{{}}",
        "{{},1}",
        "{{:1}",
        "{0 1}",
        "{[1]:2}",
        "{1.5:2}",
        "{'a':1}",
        "{12345678901234567890:1}",
        COMPACT[:-1],
        COMPACT[:-2],
        COMPACT[:60],
        COMPACT + "}",
        FASTJSON_1_FILE[:-1],
        FASTJSON_1_FILE + "\0",
    ],
)
def test_broken_text_is_refused(text):
    with pytest.raises(ProtocolError):
        loads(text)


def test_the_error_contains_the_position_and_the_reason():
    with pytest.raises(ProtocolError, match=r"at character 3, near 'tru}': a value is wanted"):
        loads("{0:tru}")
    with pytest.raises(ProtocolError, match="UTF-8"):
        loads(b'{0:"\xff"}')
    with pytest.raises(TypeError, match="a JSON key"):
        dumps({(1, 2): 3})


def deep(depth: int, piece: str) -> str:
    begin, _, end = piece.partition("|")
    return begin * depth + "1" + end * depth


@for_each("piece", ["[|]", '{"a":|}', "{0:|}", "{{0:|}:2}", '[{"a":|}]'])
@for_each("change", [str, str.encode, lambda text: memoryview(text.encode())])
def test_every_reader_keeps_the_limit_of_nesting(piece, change):
    levels = piece.partition("|")[0].count("{") + piece.partition("|")[0].count("[")
    loads(change(deep(MAX_DEPTH // levels, piece)))
    for depth in (MAX_DEPTH // levels + 1, 500, 1000, 5000):
        with pytest.raises(ProtocolError, match="deeper than 64"):
            loads(change(deep(depth, piece)))


def test_the_depth_is_checked_in_every_branch():
    wide = json.dumps([{"a": [[], {}, number]} for number in range(1000)])
    loads(wide)
    with pytest.raises(ProtocolError, match="deeper than 64"):
        loads(wide[:-1] + "," + deep(70, "[|]") + "]")
    loads("{0:" + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")  # the largest depth
    for piece in ("[", "{0:", "{", '{"a":{0:', "{{0:"):
        with pytest.raises(ProtocolError):
            loads(piece * 200_000)


@for_each("change", [lambda value: [value], lambda value: {"a": value}, lambda value: {0: value}])
def test_too_deeply_nested_values_are_not_written(change):
    value = {0: 1}
    for _ in range(MAX_DEPTH - 1):
        value = change(value)
    assert loads(dumps(value)) == value
    for _ in range(1000):
        value = change(value)
    with pytest.raises(ProtocolError, match="deeper than 64"):
        dumps(value)


@for_each("text", ["[|]", "{0:[|]}"])
@for_each("value", ["0", "[]", '{"a":0}'])
def test_text_of_too_many_values_is_refused_at_once(text, value):
    many = text.replace("|", ",".join([value] * (MAX_VALUES + 1)))
    for each in (many, many.encode()):
        with pytest.raises(ProtocolError, match=f"values; at most {MAX_VALUES}"):
            loads(each)


@pytest.mark.slow("reads 100 000 values")
@for_each("value, most", [('{"a":[1,2.5]}', 100_000), ('"x"', 100_000), ('{{"queueId":1}:null}', 30_000)])
def test_text_is_read_alike_whatever_its_size(value, most):
    for count in (1, 5000, most * 2 // 5, most):
        assert loads("[" + ",".join([value] * count) + "]") == [loads(value)] * count


def test_object_keys_read_like_mappings_and_compare_by_content():
    one, other = key(1), ObjectKey({"topic": "broadcast-test-topic", "queueId": 1, "brokerName": "broker-a"})
    assert one == other
    assert hash(one) == hash(other)
    assert one != key(2)
    assert one != {"brokerName": "broker-a"}
    assert (one["topic"], one.get("missing"), len(one), list(one)) == (
        "broadcast-test-topic",
        None,
        3,
        ["brokerName", "queueId", "topic"],
    )


@for_each(
    "value, text",
    [
        ({"x": {MessageQueue("T", "b", 0): 5}}, '{"x":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}'),
        ({"offsetTable": {key(1, "T"): 5}}, '{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"T"}:5}}'),
        ({0: "a", 1: {}}, '{0:"a",1:{}}'),
        ({1: [], 2: [{3: None}], 4: True, 5: "é"}, '{1:[],2:[{3:null}],4:true,5:"é"}'),
        ({"a": [1, 2.5, "x"], "b": None}, '{"a":[1,2.5,"x"],"b":null}'),
        ([MessageQueue("%RETRY%g", 'b"', 0)], '[{"brokerName":"b\\"","queueId":0,"topic":"%RETRY%g"}]'),
    ],
)
def test_what_is_written_is_compact_with_raw_keys(value, text):
    assert dumps(value) == text.encode()


REALS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | REALS
OBJECT_KEYS = st.dictionaries(st.text(), SCALARS, max_size=3).map(ObjectKey)
KEYS = st.text() | st.integers(-(10**18), 10**18) | OBJECT_KEYS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)


@pytest.mark.search
@given(VALUES)
@settings(max_examples=trials(300), deadline=None)
def test_what_is_written_reads_the_same(value):
    assert loads(dumps(value)) == value


STANDARD = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=25)


@pytest.mark.search
@given(STANDARD, st.booleans())
@settings(max_examples=trials(300), deadline=None)
def test_standard_json_reads_as_in_the_standard_library(value, ascii_only):
    text = json.dumps({"x": value}, ensure_ascii=ascii_only)
    slow = "{0:" + text + "}"  # the non-standard key requires the slow reader
    assert loads(text) == json.loads(text)
    assert loads(slow) == {0: json.loads(text)}


@for_each(
    "text",
    [b"{1:" + b"~" * (16 << 20), b"{" + b"a " * (8 << 20), b"{" + b"a:" * (8 << 20)],
    ids=["word", "words", "keys"],
)
def test_a_large_text_that_is_not_json_is_refused_soon(text):
    """Another thread's heartbeats would wait for the interpreter meanwhile."""
    began = time.thread_time()
    with pytest.raises(ProtocolError):
        loads(text)
    assert time.thread_time() - began < 1
