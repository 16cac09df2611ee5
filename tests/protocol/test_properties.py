import itertools
import time
import timeit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.properties import (
    PropertyName,
    decode_properties,
    encode_properties,
    encoded_properties,
    find_property,
)
from tests.for_each import for_each
from tests.protocol.records import property_maps, read_properties

# Few letters, so that separators meet in every way.
odd_texts = st.text("\x01\x02ab", max_size=30)


@given(property_maps)
@example({"TAGS": "TagA", "UNIQ_KEY": "0A00"})
def test_properties_are_read_without_the_last_separator(properties):
    text = encode_properties(properties)
    assert text == "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    assert decode_properties(text) == properties
    assert decode_properties(text.encode()) == properties
    assert decode_properties(text.removesuffix("\x02")) == properties


@for_each(
    "text, properties",
    [
        ("", {}),
        ("\x02", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x02\x02c\x01d", {"a": "b", "c": "d"}),
        ("a\x01\x02c\x01d", {"c": "d"}),  # an empty value
        ("\x01b\x02c\x01d", {"c": "d"}),  # an empty name
        ("nothing\x02c\x01d", {"c": "d"}),  # no separator
        ("a\x02b\x01\x01c\x02", {"b": "\x01c"}),  # as many separators of each kind, yet irregular
        ("a\x01b\x01c\x02", {"a": "b\x01c"}),
        ("a\x011\x02b\x01x\x02a\x012", {"a": "2", "b": "x"}),  # the last of a name counts
        ("a\x011\x02a\x01\x02", {"a": "1"}),  # unless it is empty
    ],
)
def test_irregular_texts_read_as_in_java(text, properties):
    assert decode_properties(text) == properties
    assert read_properties(text) == properties
    for name in ("a", "b", "c", "nothing", ""):
        assert found_as_text(text.encode(), 0, len(text), name) == properties.get(name)


@given(odd_texts)
def test_any_text_reads_as_in_java(text):
    assert decode_properties(text) == read_properties(text)


def found_as_text(data, start, end, name):
    found = find_property(data, start, end, name)
    return found.decode("utf-8", "replace") if found is not None else None


@given(
    before=st.binary(max_size=5),
    text=st.one_of(odd_texts.map(str.encode), st.binary(max_size=30)),
    after=st.binary(max_size=5),
    name=st.one_of(st.sampled_from(["a", "b", "ab", "", "\ufffd", "\ud800"]), odd_texts, st.text(max_size=3)),
)
def test_one_property_is_found_with_the_value_of_all_properties(before, text, after, name):
    data = before + text + after
    assert found_as_text(data, len(before), len(before) + len(text), name) == decode_properties(text).get(name)


def test_only_whole_names_are_found():
    text = b"X_TAGS\x01value\x02TAGSX\x01TAGS\x02TAGS\x01TagA\x02"
    for name, value in {"TAGS": b"TagA", "AGS": None, "TAG": None, "X_TAGS": b"value", "value": None}.items():
        assert find_property(text, 0, len(text), name) == value
    data = b"\x00\x02TAGS\x01TagA\x02"  # the bytes before the text do not belong to it
    assert find_property(data, 3, len(data), "TAGS") is None
    assert find_property(data, 2, len(data), "TAGS") == b"TagA"
    assert decode_properties(b"a\x01\xff\xfe\x02TAGS\x01TagA\x02") == {"a": "\ufffd\ufffd", "TAGS": "TagA"}
    assert find_property(b"\xff\x01b\x02", 0, 4, "\ufffd") == b"b"
    assert find_property(b"a\x01\xff\xfe\x02", 0, 5, "a") == b"\xff\xfe"


def test_properties_that_no_client_can_read_are_refused():
    for properties in [{"": "a"}, {"a\x01": "b"}, {"a": "b\x01"}, {"a\x02": "b"}, {"a": "b\x02"}]:
        with pytest.raises(ConfigError, match="separate properties"):
            encode_properties(properties)
    assert len(encoded_properties({"a": "x" * 32_764})) == 32_767
    with pytest.raises(ConfigError, match="32768 bytes of properties"):
        encoded_properties({"a": "x" * 32_765})
    with pytest.raises(ConfigError, match="surrogate"):
        encoded_properties({"a": "\ud800"})


def test_reserved_names_are_named_once():
    names = [value for name, value in vars(PropertyName).items() if name.isupper()]
    assert len(names) == len(set(names))
    assert {"KEYS", "TAGS", "UNIQ_KEY", "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "__SHARDINGKEY"} <= set(names)


EMPTY_AND_NOT = ["TAGS\x01", "TAGS\x01a", "TAGS\x01b\x01c", "TAGS\x01\x01", "XTAGS\x01x", "TAGS", "", "k\x01v"]


@for_each("count", [1, 2, 3, 4])
def test_empty_values_among_others_are_skipped(count):
    for items in itertools.product(EMPTY_AND_NOT, repeat=count):
        for end in ("", "\x02"):
            text = "\x02".join(items) + end
            data = b"TAGS\x01before\x02" + text.encode() + b"\x01after\x02TAGS\x01after\x02"
            found = found_as_text(data, 12, 12 + len(text), "TAGS")
            assert found == decode_properties(text).get("TAGS"), repr(text)


@for_each("text", [b"a\x01b\x02" * 8000 + b"TAGS\x01\x02", b"TAGS\x01\x02" * 5000], ids=["others", "empty"])
def test_an_empty_value_in_a_long_text_is_cheap(text):
    """The I/O thread searches for tags in 16 MiB of such texts at once."""

    def find():
        return find_property(text, 0, len(text), "TAGS")

    assert find() is None
    find_s, read_all_s = (
        min(timeit.repeat(work, timer=time.thread_time, number=1, repeat=15))
        for work in (find, lambda: decode_properties(text))
    )
    assert find_s < read_all_s * 0.6
