"""The location of a reset's record among a broker's offsets, and the requests that inform members."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import reset_format
from pyrocket_consumer.protocol.frame import decode_command
from tests import golden
from tests.for_each import for_each

QUEUE = MessageQueue("T", "broker-a", 3)

topics = st.text(min_size=1, max_size=30)
queues = st.builds(
    MessageQueue, st.just("T"), st.text(min_size=1, max_size=9), st.integers(0, reset_format.MAX_RECORDED_QUEUE_ID)
)
tables = st.dictionaries(queues, st.integers(0, reset_format.MAX_RECORDED_OFFSET), max_size=20)


def test_where_things_are():
    first, second, *_ = reset_format.record_areas("orders")
    assert first.base == 0x40000000 + ((crc32(b"orders") & 0x3FFF) << 16)
    assert (first.target(0), first.epoch(0), first.target(7)) == (first.base, first.base + 1, first.base + 14)
    assert (first.name, first.head) == (first.base + 65534, first.base + 65535)
    assert second.base in (first.base + 65536, 0x40000000)


@given(topics)
def test_slots_are_distinct_and_none_is_a_real_queue(topic):
    areas = list(reset_format.record_areas(topic))
    assert len({area.base for area in areas}) == 8
    for area in areas:
        assert area.base >= 2**30
        assert area.head < 2**31
        assert area.epoch(reset_format.MAX_RECORDED_QUEUE_ID) < area.name < area.head
    assert 0 < reset_format.topic_digest(topic) < 2**63


@given(st.integers(1, 2**63 - 1), tables, tables)
def test_plans_and_reports_come_back(epoch, first, second):
    plan = reset_format.PlanBody("T", epoch, first)
    assert reset_format.decode_plan(reset_format.encode_plan(plan)) == plan
    report = reset_format.ReportBody("T", "id", first, second, second, first, second, "broadcasting", "a1b2")
    assert reset_format.decode_report(reset_format.encode_report(report)) == report
    assert reset_format.decode_report(b"") == reset_format.ReportBody("", ""), "a refusal may have no body"


def test_a_question_comes_back():
    assert reset_format.decode_status_request(reset_format.encode_status_request("T")) == "T"
    with pytest.raises(ProtocolError, match="the status request has 4097 bytes; at most 4096 are allowed"):
        reset_format.decode_status_request(reset_format.encode_status_request("T").ljust(4097))


def test_requests_of_the_first_implementation_are_read():
    request = decode_command(golden.frame("reset", "307reset_admin_request.bin"))
    assert reset_format.is_relay_request(request.fields)
    header = reset_format.RelayHeader.from_fields(request.fields)
    assert (header.operation, header.relay_version, header.client_id) == ("reset", 1, "10.0.0.3@DEFAULT")
    plan = reset_format.decode_plan(request.body)
    assert plan == reset_format.PlanBody("B_pr_16489", 1795216524784, {MessageQueue("B_pr_16489", "broker-a", 1): 33})
    response = decode_command(golden.frame("reset", "307reset_admin_answer.bin"))
    assert reset_format.is_relay_response(response.fields)
    assert reset_format.RelayResponseHeader.from_fields(response.fields).state == "applied"
    report = reset_format.decode_report(response.body)
    assert {queue.queue_id: offset for queue, offset in report.offsets.items()} == {0: 25, 1: 30}
    assert {queue.queue_id for queue in report.epochs} == {0}


@for_each(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"epoch":1,"targets":{}}',
        b'{"topic":"T","epoch":0,"targets":{}}',
        b'{"topic":"T","epoch":-5,"targets":{}}',
        b'{"topic":"T","epoch":9223372036854775808,"targets":{}}',
        b'{"topic":"T","epoch":1,"targets":[]}',
        b'{"topic":"T","epoch":1,"targets":{"b":3}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"x":1}}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"-1":1}}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"32001":1}}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"0":-1}}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"0":9223372036854775807}}}',
        b'{"topic":"T","epoch":1,"targets":{"b":{"0":true}}}',
        b'{"topic":"T","epoch":1,"targets":{"":{"0":1}}}',
        b" " * (reset_format.MAX_PLAN_BYTES + 1),
    ],
)
def test_an_invalid_plan_is_refused_as_a_whole(body):
    with pytest.raises(ProtocolError):
        reset_format.decode_plan(body)
