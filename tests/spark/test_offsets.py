"""Offsets in Spark's checkpoint. No Spark, no broker."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import QueueRange, SourceOffset, decode_offset, encode_offset, ranges_between
from tests.for_each import for_each

A0, A1, B0 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("T", "b", 0)

QUEUES = st.builds(MessageQueue, st.sampled_from("TUV"), st.sampled_from("abc"), st.integers(0, 20))
PLACES = st.dictionaries(QUEUES, st.integers(0, 2**63 - 1))
OFFSETS = st.builds(SourceOffset, PLACES, PLACES, st.booleans())


def test_the_form_of_an_encoded_offset():
    offset = SourceOffset({MessageQueue("T", "a", 10): 5, A1: 98, B0: 7, A0: 120}, {A0: 100})
    assert json.dumps(encode_offset(offset)) == (
        '{"version": 1, "queues": {"T": {"a": {"0": 120, "1": 98, "10": 5}, "b": {"0": 7}}}, '
        '"from": {"T": {"a": {"0": 100}}}}'
    )
    initial = {"version": 1, "queues": {"T": {"a": {"0": 1}}}, "initial": True}
    assert encode_offset(SourceOffset({A0: 1}, initial=True)) == initial


@settings(deadline=None)
@given(OFFSETS)
def test_an_encoded_offset_can_be_decoded(offset):
    text = json.dumps(encode_offset(offset))
    again = decode_offset(json.loads(text))
    assert again == offset
    assert json.dumps(encode_offset(again)) == text
    reversed_offsets = SourceOffset(dict(reversed(offset.queues.items())))
    assert json.dumps(encode_offset(reversed_offsets)) == json.dumps(encode_offset(SourceOffset(offset.queues)))


def test_request_times_are_encoded_by_topic_and_broker():
    offset = SourceOffset({A0: 9, B0: 2}, seen_ms={("T", "b"): 7, ("T", "a"): 5})
    encoded = encode_offset(offset)
    assert encoded["seen"] == {"T": {"a": 5, "b": 7}}
    assert decode_offset(encoded) == offset


@for_each("version, expected", [(2, "2, .*newer release.* up to 1"), (10**4000, "")], ids=["2", "thousands of digits"])
def test_a_newer_version_is_refused(version, expected):
    newer = f"offsets of version {expected}"
    with pytest.raises(ConfigError, match=newer) as refused:
        decode_offset({"version": version, "queues": {}})
    assert len(str(refused.value)) < 1000


@for_each("encoded", [{}, {"version": "1"}, {"version": 0}, [], None, {"partition": 3}])
def test_a_foreign_offset_is_refused(encoded):
    with pytest.raises(ConfigError, match="is not an offset of this source; use another checkpoint"):
        decode_offset(encoded)


NO_OFFSETS = [float("inf"), float("nan"), -5, 2**63, True, 1.7, "5", "9" * 5000]
NO_QUEUES = ["-1", str(2**31), "x" * 100_000, "9" * 5000]


@for_each(
    "name, topics",
    [
        *[("queues", each) for each in (5, {"T": 5}, {"T": {"a": 5}})],
        *[("queues", {"T": {"a": {"0": None}}}), ("queues", {"T": {"a": {"x": 5}}}), ("seen", {"T": 5})],
        *[("queues", {"T": {"a": {queue_id: 5}}}) for queue_id in NO_QUEUES],
        *[(name, {"T": {"a": {"0": at}}}) for at in NO_OFFSETS for name in ("queues", "from")],
        *[("seen", {"T": {"a": at}}) for at in NO_OFFSETS],
    ],
)
def test_a_damaged_offset_is_refused_in_one_line(name, topics):
    with pytest.raises(ConfigError, match=f"'{name}' of an offset in the checkpoint cannot be read") as refused:
        decode_offset({"version": 1, name: topics})
    assert len(str(refused.value)) < 1000


OFFSET, FIRST = SourceOffset({A0: 9}, {A0: 5}), SourceOffset({A0: 9, A1: 8}, {A0: 5, A1: 7})
OF_FIRST = [QueueRange(A0, 5, 9), QueueRange(A1, 7, 8)]


@for_each(
    "start, end, ranges",
    [
        (SourceOffset({A0: 5, A1: 7}), SourceOffset({A0: 9, A1: 7}), [QueueRange(A0, 5, 9)]),
        *[
            (SourceOffset({A0: at, A1: at}, initial=True), FIRST, OF_FIRST) for at in (0, 6, 20)
        ],  # the start of the query
        (SourceOffset({A0: 3}, initial=True), SourceOffset({A0: 9}, initial=True), []),  # the first one stays empty
        (SourceOffset({A0: 5}, {A0: 1}), SourceOffset({A0: 5, B0: 4}, {B0: 2}), [QueueRange(B0, 2, 4)]),  # a new queue
        (OFFSET, OFFSET, []),  # Spark before 4.2 calls this after a restart, and must not read the first batch again
        (SourceOffset({A0: 10}), SourceOffset({A0: 9}), []),
    ],
)
def test_the_ranges_of_a_batch(start, end, ranges):
    assert ranges_between(start, end) == ranges


def test_offsets_of_two_queries_are_refused():
    with pytest.raises(ConfigError, match="has no start offset of T/b/0"):
        ranges_between(SourceOffset({A0: 10}), SourceOffset({B0: 9}))
