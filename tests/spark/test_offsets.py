"""Offsets in Spark's checkpoint. No Spark, no broker."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import SourceOffset, decode_offset, encode_offset, ranges_between
from pyrocket_consumer.spark.ranges import QueueRange
from tests.for_each import for_each

A0, A1, B0 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("T", "b", 0)

QUEUES = st.builds(MessageQueue, st.sampled_from("TUV"), st.sampled_from("abc"), st.integers(0, 20))
PLACES = st.dictionaries(QUEUES, st.integers(0, 2**63 - 1))
OFFSETS = st.builds(SourceOffset, PLACES, PLACES, st.booleans())


def test_how_it_is_written():
    offset = SourceOffset({MessageQueue("T", "a", 10): 5, A1: 98, B0: 7, A0: 120}, {A0: 100})
    assert json.dumps(encode_offset(offset)) == (
        '{"version": 1, "queues": {"T": {"a": {"0": 120, "1": 98, "10": 5}, "b": {"0": 7}}}, '
        '"from": {"T": {"a": {"0": 100}}}}'
    )
    assert encode_offset(SourceOffset({A0: 1}, initial=True)) == {
        "version": 1,
        "queues": {"T": {"a": {"0": 1}}},
        "initial": True,
    }


@settings(deadline=None)
@given(OFFSETS)
def test_what_is_written_can_be_read(offset):
    text = json.dumps(encode_offset(offset))
    again = decode_offset(json.loads(text))
    assert again == offset
    assert json.dumps(encode_offset(again)) == text


@settings(deadline=None)
@given(PLACES)
def test_equal_offsets_are_written_alike(places):
    other_order = dict(reversed(places.items()))
    assert json.dumps(encode_offset(SourceOffset(places))) == json.dumps(encode_offset(SourceOffset(other_order)))


def test_when_brokers_were_asked_is_written_by_topic_and_broker():
    offset = SourceOffset({A0: 9, B0: 2}, seen_ms={("T", "b"): 7, ("T", "a"): 5})
    encoded = encode_offset(offset)
    assert encoded["seen"] == {"T": {"a": 5, "b": 7}}
    assert decode_offset(encoded) == offset
    with pytest.raises(ConfigError, match="'seen' of an offset in the checkpoint cannot be read"):
        decode_offset({**encoded, "seen": {"T": 5}})


def test_a_newer_version_is_refused_with_a_sentence():
    with pytest.raises(ConfigError, match="newer release of pyrocket-consumer: its offsets have version 2, .* up to 1"):
        decode_offset({"version": 2, "queues": {}})


@for_each("encoded", [{}, {"version": "1"}, {"version": 0}, [], None, {"partition": 3}])
def test_what_is_no_offset_is_refused(encoded):
    with pytest.raises(ConfigError, match="is no offset of this source; use another checkpoint"):
        decode_offset(encoded)


@for_each("queues", [5, {"T": 5}, {"T": {"a": 5}}, {"T": {"a": {"x": 5}}}, {"T": {"a": {"0": None}}}])
def test_damaged_queues_are_refused(queues):
    with pytest.raises(ConfigError, match="'queues' of an offset in the checkpoint cannot be read"):
        decode_offset({"version": 1, "queues": queues})


@for_each("at", [float("inf"), float("nan"), -5, 2**63, True, 1.7, "5", "9" * 5000])
@for_each("name", ["queues", "from", "seen"])
def test_what_is_no_offset_and_no_time_is_refused_in_a_line(name, at):
    brokers = {"a": at} if name == "seen" else {"a": {"0": at}}
    with pytest.raises(ConfigError, match=f"'{name}' of an offset in the checkpoint cannot be read") as refused:
        decode_offset({"version": 1, name: {"T": brokers}})
    assert len(str(refused.value)) < 1000


@for_each("queue_id", ["-1", str(2**31), "x" * 100_000, "9" * 5000])
def test_what_is_no_queue_is_refused_in_a_line(queue_id):
    with pytest.raises(ConfigError, match="'queues' of an offset in the checkpoint cannot be read") as refused:
        decode_offset({"version": 1, "queues": {"T": {"a": {queue_id: 5}}}})
    assert len(str(refused.value)) < 1000


def test_a_version_without_end_is_told_in_a_line():
    with pytest.raises(ConfigError, match="newer release") as refused:
        decode_offset({"version": 10**4000})
    assert len(str(refused.value)) < 1000


def test_a_batch_reads_from_the_offset_before():
    start, end = SourceOffset({A0: 5, A1: 7}), SourceOffset({A0: 9, A1: 7})
    assert ranges_between(start, end) == [QueueRange(A0, 5, 9)]


def test_the_first_batch_begins_where_it_began():
    end = SourceOffset({A0: 9, A1: 8}, {A0: 5, A1: 7})
    for place in (0, 6, 20):
        start = SourceOffset({A0: place, A1: place}, initial=True)
        assert ranges_between(start, end) == [QueueRange(A0, 5, 9), QueueRange(A1, 7, 8)]


def test_an_empty_first_batch_stays_empty():
    end = SourceOffset({A0: 9}, initial=True)
    assert ranges_between(SourceOffset({A0: 3}, initial=True), end) == []


def test_a_queue_that_appears_later_begins_where_it_was_found():
    start, end = SourceOffset({A0: 5}, {A0: 1}), SourceOffset({A0: 5, B0: 4}, {B0: 2})
    assert ranges_between(start, end) == [QueueRange(B0, 2, 4)]


def test_nothing_lies_between_an_offset_and_itself():
    """Before 4.2, Spark asks for this after a restart; the begin of new queues is not to be read again."""
    offset = SourceOffset({A0: 9}, {A0: 5})
    assert ranges_between(offset, offset) == []


def test_a_start_beyond_the_end_is_empty():
    assert ranges_between(SourceOffset({A0: 10}), SourceOffset({A0: 9})) == []


def test_offsets_of_two_queries_are_refused():
    with pytest.raises(ConfigError, match="does not say where T/b/0 begins"):
        ranges_between(SourceOffset({A0: 10}), SourceOffset({B0: 9}))
