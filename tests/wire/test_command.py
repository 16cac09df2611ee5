from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.wire import command as headers
from pyrocket_consumer.wire.codes import PullFlag, RequestCode
from pyrocket_consumer.wire.command import (
    DeleteSubscriptionGroupHeader,
    GetRouteInfoHeader,
    Header,
    PullMessageHeader,
    PullTemplate,
    ResetOffsetHeader,
    SendMessageHeader,
    UpdateConsumerOffsetHeader,
    request,
)
from pyrocket_consumer.wire.frame import decode_command, encode_command
from tests import golden
from tests.for_each import for_each
from tests.trials import trials

HEADERS = [
    value
    for value in vars(headers).values()
    if isinstance(value, type) and issubclass(value, Header) and value is not Header
]
OF_REQUEST = {header.CODE: header for header in HEADERS if hasattr(header, "CODE")} | {
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: ResetOffsetHeader,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: headers.GetConsumerStatusHeader,
    RequestCode.SEND_BATCH_MESSAGE: SendMessageHeader,
    RequestCode.LITE_PULL_MESSAGE: PullMessageHeader,
}
OF_ANSWER = {
    RequestCode.SEND_MESSAGE_V2: headers.SendMessageResponseHeader,
    RequestCode.SEND_BATCH_MESSAGE: headers.SendMessageResponseHeader,
    RequestCode.QUERY_CONSUMER_OFFSET: headers.OffsetResponseHeader,
    RequestCode.GET_MAX_OFFSET: headers.OffsetResponseHeader,
    RequestCode.GET_MIN_OFFSET: headers.OffsetResponseHeader,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: headers.OffsetResponseHeader,
}
REQUESTS = [entry for entry in golden.index() if not entry.is_response and entry.code in OF_REQUEST]
ANSWERS = [
    (entry, before.code)
    for before, entry in zip(golden.index(), golden.index()[1:], strict=False)
    if entry.is_response and entry.code in (0, 19, 20, 21) and entry.fields and before.code in OF_ANSWER
]


@for_each("entry", REQUESTS, ids=str)
def test_every_recorded_request_header_survives_both_ways(entry):
    sent = decode_command(entry.frame()).fields
    assert OF_REQUEST[entry.code].from_fields(sent).to_fields() == sent


@for_each("entry, asked", ANSWERS, ids=lambda value: str(value))
def test_every_recorded_answer_header_survives_both_ways(entry, asked):
    sent = decode_command(entry.frame()).fields
    assert OF_ANSWER[asked].from_fields(sent).to_fields() == sent


def test_every_recorded_request_has_a_header_but_two():
    recorded = {entry.code for entry in golden.index() if not entry.is_response}
    assert recorded - set(OF_REQUEST) == {RequestCode.QUERY_ASSIGNMENT, 9999}


VALUES = {"str": st.text(), "int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans()}


@pytest.mark.search
@for_each("header", HEADERS)
def test_every_header_survives_both_ways(header):
    kinds = {field.name: str(field.type).partition(" | ") for field in fields(header)}

    @given(st.builds(header, **{name: VALUES[kind] | st.none() if or_none else VALUES[kind]
                                for name, (kind, or_none, _) in kinds.items()}))  # fmt: skip
    @settings(max_examples=trials(20), deadline=None)
    def survives(value):
        assert header.from_fields(value.to_fields()) == value

    survives()


def test_what_is_none_stays_out_and_what_is_absent_reads_as_none():
    assert GetRouteInfoHeader("T").to_fields() == {"topic": "T", "acceptStandardJsonOnly": "true"}
    assert GetRouteInfoHeader.from_fields({"topic": "T"}).accept_standard_json_only is None


def test_a_missing_field_is_named():
    with pytest.raises(ProtocolError, match="PullMessageHeader: field topic is missing"):
        PullMessageHeader.from_fields({"consumerGroup": "g"})


@for_each("text", ["", "x", "1_000", " 1", "1.0", "--1", "9" * 5000, str(2**63), "0x10", "-"])
def test_a_field_that_is_not_a_number_is_named(text):
    with pytest.raises(ProtocolError, match="field offset is not a number"):
        headers.OffsetResponseHeader.from_fields({"offset": text})


@for_each("text, number", [("0", 0), ("-1", -1), ("007", 7), (str(2**63 - 1), 2**63 - 1)])
def test_numbers_are_exact(text, number):
    assert headers.OffsetResponseHeader.from_fields({"offset": text}).offset == number


@for_each("text, value", [("true", True), ("TRUE", True), ("false", False), ("1", False)])
def test_truth_is_read_as_java_reads_it(text, value):
    fields = {"topic": "T", "acceptStandardJsonOnly": text}
    assert GetRouteInfoHeader.from_fields(fields).accept_standard_json_only is value


def test_a_send_has_short_names_and_long_ones():
    header = SendMessageHeader("P", "TopicA", queue_id=0, properties="WAIT\x01true\x02", broker_name="broker-a")
    assert header.to_fields() == {
        "a": "P", "b": "TopicA", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0",
        "i": "WAIT\x01true\x02", "j": "0", "k": "false", "m": "false", "n": "broker-a",
    }
    long_names = {
        "producerGroup": "P", "topic": "TopicA", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "queueId": "0",
        "sysFlag": "0", "bornTimestamp": "0", "flag": "0", "properties": "WAIT\x01true\x02", "reconsumeTimes": "0",
        "unitMode": "false", "batch": "false", "bname": "broker-a",
    }
    assert SendMessageHeader.from_fields_v1(long_names) == header


def test_deleting_a_group_writes_the_flag_under_both_names():
    assert DeleteSubscriptionGroupHeader("g", True).to_fields() == {
        "groupName": "g", "cleanOffset": "true", "removeOffset": "true"
    }
    for name in ("cleanOffset", "removeOffset"):
        assert DeleteSubscriptionGroupHeader.from_fields({"groupName": "g", name: "true"}).clean_offset


def test_a_request_takes_the_code_of_its_header_or_another():
    header = UpdateConsumerOffsetHeader("g", "T", 0, 5, "broker-a")
    oneway = request(header, opaque=3, oneway=True)
    assert (oneway.code, oneway.opaque, oneway.flag) == (15, 3, 2)
    assert oneway.fields == {
        "consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "5", "bname": "broker-a"
    }
    batch = request(SendMessageHeader("P", "T"), b"body", code=RequestCode.SEND_BATCH_MESSAGE)
    assert (batch.code, batch.body, batch.flag) == (320, b"body", 0)


NAMES = st.text() | st.sampled_from(["%RETRY%g", "%d%s%%", 'a"b\\', "\x01\x02", "%DLQ%%RETRY%x", "юникод 😀"])
LONGS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.search
@given(
    group=NAMES, topic=NAMES, broker_name=st.none() | NAMES, expression=st.none() | NAMES, expression_type=NAMES,
    numbers=st.tuples(LONGS, LONGS, LONGS, LONGS), offset=LONGS, sys_flag=st.integers(0, 31),
    opaque=st.integers(0, 2**31 - 1),
)
@settings(max_examples=trials(300), deadline=None)
def test_a_pull_template_writes_what_the_header_would(
    group, topic, broker_name, expression, expression_type, numbers, offset, sys_flag, opaque
):
    queue_id, max_messages, hold_ms, sub_version = numbers
    template = PullTemplate(
        group, topic, queue_id, max_messages, hold_ms, sub_version, broker_name, expression, expression_type
    )
    header = PullMessageHeader(
        group, topic, queue_id, offset, max_messages, sys_flag, 0, hold_ms, sub_version,
        expression, expression_type, broker_name=broker_name,
    )
    frame = template.encode(opaque, offset, sys_flag)
    assert decode_command(frame) == request(header, opaque=opaque)
    assert len(frame) == len(encode_command(request(header, opaque=opaque)))


def test_the_bits_of_a_pull():
    assert (PullFlag.COMMIT, PullFlag.SUSPEND, PullFlag.SUBSCRIPTION, PullFlag.CLASS_FILTER, PullFlag.LITE) == (
        1, 2, 4, 8, 16
    )
