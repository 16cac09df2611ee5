"""Half messages."""

from __future__ import annotations

import pytest

from pyrocket_consumer.protocol.bodies import HeartbeatData, encode_heartbeat
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import decode_messages, parse_offset_message_id
from pyrocket_consumer.testing import EmbeddedBroker
from tests.testing.brokers import broker_and_client, every_version
from tests.testing.raw_client import RawClient

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0


def produce_half(client: RawClient) -> RemotingCommand:
    properties = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "U1", "TAGS": "A"}
    return client.produce("T", b"half", properties=properties, queue_id=1, sysFlag=4)


def ending(half: RemotingCommand, decision: int) -> dict[str, object]:
    """Return the fields of END_TRANSACTION."""
    return {
        "producerGroup": "P",
        "tranStateTableOffset": half.fields["queueOffset"],
        "commitOrRollback": decision,
        "commitLogOffset": parse_offset_message_id(half.fields["msgId"])[2],
        "fromTransactionCheck": False,
        "msgId": "U1",
    }


def end(broker: EmbeddedBroker, client: RawClient, half: RemotingCommand, decision: int) -> None:
    """Commit or roll back with a one-way request, as producers do."""
    count = len(broker.requests(RequestCode.END_TRANSACTION))
    client.post(RequestCode.END_TRANSACTION, ending(half, decision), oneway=True)
    broker.wait_for(RequestCode.END_TRANSACTION, count + 1)


@every_version
def test_only_a_committed_message_appears(broker, client, version):
    half = produce_half(client)
    assert broker.messages("T") == []
    [parked] = broker.messages(HALF)
    assert (parked.sys_flag, parked.property("REAL_TOPIC"), parked.property("REAL_QID")) == (0, "T", "1")
    end(broker, client, half, UNKNOWN)
    assert broker.messages("T") == []
    end(broker, client, half, COMMIT)
    [message] = broker.messages("T")
    assert (message.body, message.tags, message.queue.queue_id, message.sys_flag) == (b"half", "A", 1, 8)
    assert message.prepared_transaction_offset == parked.commit_log_offset
    assert message.born_at_ms == parked.born_at_ms
    assert (message.property("REAL_TOPIC") is None) == (version == "5.5.0")
    end(broker, client, produce_half(client), ROLLBACK)
    assert len(broker.messages("T")) == 1


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_the_broker_checks_an_undecided_transaction(version: str) -> None:
    settings = {"transactionTimeOut": 1, "transactionCheckInterval": 20, "transactionCheckMax": 3}
    with broker_and_client(version=version, settings=settings) as (broker, client):
        client.call(RequestCode.HEART_BEAT, body=encode_heartbeat(HeartbeatData("c1", producers=("P",))))
        half = produce_half(client)
        first, second = client.wait_received(RequestCode.CHECK_TRANSACTION_STATE, 2)[:2]
        assert first.is_oneway
        assert first.fields["tranStateTableOffset"] == half.fields["queueOffset"]
        assert (first.fields["msgId"], first.fields["bname"]) == ("U1", "broker-a")
        assert first.fields.get("topic") == (None if version == "4.9.7" else HALF)
        times = []
        for question in (first, second):
            [message] = decode_messages(question.body)
            assert (message.queue.topic, message.queue.queue_id, message.sys_flag) == ("T", 1, 0)
            times.append(message.property("TRANSACTION_CHECK_TIMES"))
        assert times == ["1", "2"]
        broker.cluster.wait_until(lambda: broker.max_offset("TRANS_CHECK_MAX_TIME_TOPIC", 0) == 1)
        assert broker.messages("T") == []


def test_transactions_can_be_rejected() -> None:
    with broker_and_client(settings={"rejectTransactionMessage": True}) as (_, client):
        assert produce_half(client).code == 16


@every_version
def test_the_end_of_a_transaction_may_be_refused(version: str) -> None:
    with broker_and_client(version=version, slaves=1) as (broker, client):
        right = ending(produce_half(client), COMMIT)
        for wrong, remark in (
            ({"commitLogOffset": 1 << 40}, "Find prepared transaction message failed"),
            ({"producerGroup": "Q"}, "The producer group wrong"),
            ({"tranStateTableOffset": 7}, "The transaction state table offset wrong"),
        ):
            refused = client.call(RequestCode.END_TRANSACTION, {**right, **wrong})
            assert (refused.code, refused.remark) == (1, remark)
        with RawClient(broker.cluster.broker("broker-a-1").address) as to_slave:
            assert to_slave.call(RequestCode.END_TRANSACTION, right).code == 11
        client.post(RequestCode.END_TRANSACTION, {**right, "commitOrRollback": UNKNOWN})
        assert client.is_silent()
        assert broker.messages("T") == []
        assert client.call(RequestCode.END_TRANSACTION, right).code == 0
        assert client.call(RequestCode.END_TRANSACTION, right).code == 0
        assert [message.body for message in broker.messages("T")] == [b"half", b"half"]
