from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.cluster.pull_core import PullTemplate
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol import command as headers
from pyrocket_consumer.protocol.codes import PullFlag, RequestCode
from pyrocket_consumer.protocol.frame import decode_command, encode_command
from tests import golden
from tests.for_each import for_each
from tests.trials import trials

HEADERS = [
    value
    for value in vars(headers).values()
    if isinstance(value, type) and issubclass(value, headers.Header) and value is not headers.Header
]
OF_REQUEST = {header.CODE: header for header in HEADERS if hasattr(header, "CODE")} | {
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: headers.ResetOffsetHeader,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: headers.GetConsumerStatusHeader,
    RequestCode.SEND_BATCH_MESSAGE: headers.SendMessageHeader,
    RequestCode.LITE_PULL_MESSAGE: headers.PullMessageHeader,
}
OF_ANSWER = {
    RequestCode.SEND_MESSAGE_V2: headers.SendMessageResponseHeader,
    RequestCode.SEND_BATCH_MESSAGE: headers.SendMessageResponseHeader,
    RequestCode.QUERY_CONSUMER_OFFSET: headers.OffsetResponseHeader,
    RequestCode.GET_MAX_OFFSET: headers.OffsetResponseHeader,
    RequestCode.GET_MIN_OFFSET: headers.OffsetResponseHeader,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: headers.OffsetResponseHeader,
}
REQUESTS = [
    (entry, OF_REQUEST[entry.code]) for entry in golden.index() if not entry.is_response and entry.code in OF_REQUEST
]
ANSWERS = [
    (entry, OF_ANSWER[before.code])
    for before, entry in zip(golden.index(), golden.index()[1:], strict=False)
    if entry.is_response and entry.code in (0, 19, 20, 21) and entry.fields and before.code in OF_ANSWER
]


@for_each("entry, header", [*REQUESTS, *ANSWERS], ids=str)
def test_every_recorded_header_survives_both_ways(entry, header):
    sent = decode_command(entry.frame()).fields
    assert header.from_fields(sent).to_fields() == sent


def test_every_recorded_request_has_a_header_but_two():
    recorded = {entry.code for entry in golden.index() if not entry.is_response}
    assert recorded - set(OF_REQUEST) == {RequestCode.QUERY_ASSIGNMENT, 9999}


VALUES = {"str": st.text(), "int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans()}


@pytest.mark.search
@for_each("header", HEADERS)
def test_every_header_survives_both_ways(header):
    kinds = {field.name: str(field.type).partition(" | ") for field in fields(header)}

    @given(
        st.builds(
            header,
            **{
                name: VALUES[kind] | st.none() if or_none else VALUES[kind]
                for name, (kind, or_none, _) in kinds.items()
            },
        )
    )
    @settings(max_examples=trials(20), deadline=None)
    def survives(value):
        assert header.from_fields(value.to_fields()) == value

    survives()


def test_a_missing_field_is_named():
    with pytest.raises(ProtocolError, match="PullMessageHeader: field topic is missing"):
        headers.PullMessageHeader.from_fields({"consumerGroup": "g"})


def test_numbers_are_exact_and_invalid_ones_are_named():
    for text, number in (("0", 0), ("-1", -1), ("007", 7), (str(2**63 - 1), 2**63 - 1)):
        assert headers.OffsetResponseHeader.from_fields({"offset": text}).offset == number
    for text in ("", "x", "1_000", " 1", "1.0", "--1", "9" * 5000, str(2**63), "0x10", "-"):
        with pytest.raises(ProtocolError, match="field offset is not a number"):
            headers.OffsetResponseHeader.from_fields({"offset": text})


def test_booleans_are_read_as_in_java_and_none_is_not_sent():
    for text, value in (("true", True), ("TRUE", True), ("false", False), ("1", False)):
        fields = {"topic": "T", "acceptStandardJsonOnly": text}
        assert headers.GetRouteInfoHeader.from_fields(fields).accept_standard_json_only is value
    assert headers.GetRouteInfoHeader("T").to_fields() == {"topic": "T", "acceptStandardJsonOnly": "true"}
    assert headers.GetRouteInfoHeader.from_fields({"topic": "T"}).accept_standard_json_only is None


def test_a_send_has_short_names_and_long_ones():
    header = headers.SendMessageHeader("P", "TopicA", queue_id=0, properties="WAIT\x01true\x02", broker_name="broker-a")
    assert header.to_fields() == {
        "a": "P",
        "b": "TopicA",
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "0",
        "g": "0",
        "h": "0",
        "i": "WAIT\x01true\x02",
        "j": "0",
        "k": "false",
        "m": "false",
        "n": "broker-a",
    }
    long_names = {
        "producerGroup": "P",
        "topic": "TopicA",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": "0",
        "flag": "0",
        "properties": "WAIT\x01true\x02",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "batch": "false",
        "bname": "broker-a",
    }
    assert headers.SendMessageHeader.from_fields_v1(long_names) == header


def test_deleting_a_group_writes_the_flag_under_both_names():
    fields = {"groupName": "g", "cleanOffset": "true", "removeOffset": "true"}
    assert headers.DeleteSubscriptionGroupHeader("g", True).to_fields() == fields
    for name in ("cleanOffset", "removeOffset"):
        assert headers.DeleteSubscriptionGroupHeader.from_fields({"groupName": "g", name: "true"}).clean_offset


def test_a_request_takes_the_code_of_its_header_or_another():
    oneway = headers.request(headers.UpdateConsumerOffsetHeader("g", "T", 0, 5, "broker-a"), opaque=3, oneway=True)
    assert (oneway.code, oneway.opaque, oneway.flag) == (15, 3, 2)
    expected = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "5", "bname": "broker-a"}
    assert oneway.fields == expected
    batch = headers.request(headers.SendMessageHeader("P", "T"), b"body", code=RequestCode.SEND_BATCH_MESSAGE)
    assert (batch.code, batch.body, batch.flag) == (320, b"body", 0)
    bits = (PullFlag.COMMIT, PullFlag.SUSPEND, PullFlag.SUBSCRIPTION, PullFlag.CLASS_FILTER, PullFlag.LITE)
    assert bits == (1, 2, 4, 8, 16)


NAMES = st.text() | st.sampled_from(["%RETRY%g", "%d%s%%", 'a"b\\', "\x01\x02", "%DLQ%%RETRY%x", "юникод 😀"])
LONGS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.search
@given(
    names=st.tuples(NAMES, NAMES),
    numbers=st.tuples(LONGS, LONGS, LONGS, LONGS),
    offset=LONGS,
    broker_name=st.none() | NAMES,
    selector=st.tuples(st.none() | NAMES, NAMES),
    sys_flag=st.integers(0, 31),
    opaque=st.integers(0, 2**31 - 1),
)
@settings(max_examples=trials(300), deadline=None)
def test_a_pull_template_writes_what_the_header_would(names, numbers, offset, broker_name, selector, sys_flag, opaque):
    queue_id, most, *rest = numbers
    header = headers.PullMessageHeader(
        *names, queue_id, offset, most, sys_flag, 0, *rest, *selector, broker_name=broker_name
    )
    template = PullTemplate(header.to_fields())
    frame = template.encode(offset, opaque)
    assert decode_command(frame) == headers.request(header, opaque=opaque)
    assert template.command(offset) == headers.request(header)
    assert len(frame) == len(encode_command(headers.request(header, opaque=opaque)))
