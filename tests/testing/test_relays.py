"""Requests of an admin to members through the broker."""

from __future__ import annotations

import time

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import decode_consumer_status_table, encode_consumer_status
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.message import decode_messages
from tests.testing.brokers import broker_and_client, every_version
from tests.testing.raw_client import RawClient

RUNNING_INFO = RequestCode.GET_CONSUMER_RUNNING_INFO


@every_version
def test_a_relay_changes_nothing(version: str) -> None:
    with broker_and_client(version=version) as (broker, admin), RawClient(broker.address) as member:
        member.heartbeat("G", "T")
        fields = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false", "own": "x"}
        opaque = admin.post(RUNNING_INFO, fields, b"a body")
        [received] = member.wait_received(RUNNING_INFO)
        assert (received.fields, received.body) == (fields, b"a body")
        member.reply(received, 0, b"\x00info", "remark", {"told": "y"})
        answer = admin.answer(opaque)
        assert (answer.code, answer.body, answer.remark, answer.fields, answer.language) == (
            0,
            b"\x00info",
            "remark",
            {"told": "y"},
            "PYTHON",
        )


def test_a_missing_or_silent_member() -> None:
    with broker_and_client(relay_timeout_s=0.2) as (broker, admin), RawClient(broker.address) as member:
        fields = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false"}
        absent = admin.call(RUNNING_INFO, fields)
        assert (absent.code, absent.remark) == (1, "The Consumer <G> <c1> not online")
        member.heartbeat("G", "T", version=61)
        assert "too low" in (admin.call(RUNNING_INFO, fields).remark or "")
        member.heartbeat("G", "T")
        start = time.monotonic()
        assert admin.call(RUNNING_INFO, fields).code == 207
        assert time.monotonic() - start >= 0.2
        [late] = member.wait_received(RUNNING_INFO)
        member.reply(late)  # ignored
    with broker_and_client(relay_timeout_s=600) as (broker, admin), RawClient(broker.address) as member:
        member.heartbeat("G", "T")
        opaque = admin.post(RUNNING_INFO, fields)
        member.wait_received(RUNNING_INFO)
        member.close()
        assert admin.answer(opaque).code == 207  # immediately, because no member is there


@every_version
def test_consume_directly_carries_the_stored_message(version: str) -> None:
    code = RequestCode.CONSUME_MESSAGE_DIRECTLY
    with broker_and_client(version=version) as (broker, admin), RawClient(broker.address) as member:
        member.heartbeat("G", "T")
        message_id = admin.produce("T", b"hello").fields["msgId"]
        opaque = admin.post(code, {"consumerGroup": "G", "clientId": "c1", "msgId": message_id, "topic": "T"})
        [received] = member.wait_received(code)
        assert decode_messages(received.body)[0].body == b"hello"
        added = {} if version == "4.9.7" else {"topicSysFlag": "0", "groupSysFlag": "0"}
        assert received.fields == {
            "consumerGroup": "G",
            "clientId": "c1",
            "msgId": message_id,
            "topic": "T",
            "brokerName": "broker-a",
            **added,
        }
        member.reply(received, body=b'{"consumeResult":"CR_SUCCESS"}')
        assert admin.answer(opaque).body == b'{"consumeResult":"CR_SUCCESS"}'
        for wrong in ("U1", message_id[:-1] + "7"):
            assert admin.call(code, {"consumerGroup": "G", "clientId": "c1", "msgId": wrong}).code == 1


def test_the_status_of_every_member() -> None:
    code, request_code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
    queue = MessageQueue("T", "broker-a", 0)
    with (
        broker_and_client(status_timeout_s=1.5) as (broker, admin),
        RawClient(broker.address) as first,
        RawClient(broker.address, "c2") as second,
    ):
        assert admin.call(code, {"topic": "T", "group": "G"}).code == 1
        first.heartbeat("G", "T")
        second.heartbeat("G", "T")
        opaque = admin.post(code, {"topic": "T", "group": "G", "clientAddr": ""})
        [received] = first.wait_received(request_code)
        assert received.fields == {"topic": "T", "group": "G"}
        first.reply(received, body=encode_consumer_status({queue: 16}))
        second.wait_received(request_code)  # it sends no response, so it is missing
        answer = admin.answer(opaque)
        assert (answer.remark, decode_consumer_status_table(answer.body)) == (
            "not set any response code",
            {"c1": {queue: 16}},
        )
        nobody = admin.call(code, {"topic": "T", "group": "G", "clientAddr": "c9"})
        assert (nobody.code, decode_consumer_status_table(nobody.body)) == (0, {})
        opaque = admin.post(code, {"topic": "T", "group": "G", "clientAddr": "c2"})
        second.reply(second.wait_received(request_code, 2)[1], body=b"not a body")
        assert decode_consumer_status_table(admin.answer(opaque).body) == {}
