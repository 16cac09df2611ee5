"""CONSUMER_SEND_MSG_BACK: retries and dead letters."""

from __future__ import annotations

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.testing import EmbeddedBroker
from tests.testing.brokers import every_version
from tests.testing.raw_client import RawClient


def send_back(client: RawClient, message: Message, level: int = 0, **others: object) -> RemotingCommand:
    fields = {"offset": message.commit_log_offset, "group": "G", "delayLevel": level, **others}
    return client.call(RequestCode.CONSUMER_SEND_MSG_BACK, fields)


def retried(broker: EmbeddedBroker, count: int = 1) -> Message:
    """Wait for the next message of the retry topic, and return it."""
    broker.cluster.wait_until(lambda: broker.max_offset("%RETRY%G", 0) == count)
    return broker.messages("%RETRY%G")[-1]


@every_version
def test_a_message_sent_back_is_redelivered(broker, client):
    first = {"TAGS": "A", "KEYS": "k", "UNIQ_KEY": "U1", "own": "x"}
    client.produce("T", b"hello", properties=first, queue_id=1, flag=7)
    [message] = broker.messages("T")
    assert send_back(client, message, 1, originMsgId="whatever", originTopic="T").code == 0
    again = retried(broker)
    assert (again.body, again.flag, again.reconsume_times, again.topic) == (b"hello", 7, 1, "T")
    assert (again.born_at_ms, again.born_host) == (message.born_at_ms, message.born_host)
    assert again.properties == {
        **message.properties,
        "RETRY_TOPIC": "T",
        "ORIGIN_MESSAGE_ID": message.offset_message_id,
        "DELAY": "1",
        "REAL_TOPIC": "%RETRY%G",
        "REAL_QID": "0",
        "WAIT": "false",
    }
    send_back(client, again, 1)
    third = retried(broker, 2)
    assert third.reconsume_times == 2
    assert third.property("ORIGIN_MESSAGE_ID") == message.offset_message_id
    assert third.property("RETRY_TOPIC") == "T"


def test_the_broker_picks_the_level(broker, client):
    client.produce("T")
    send_back(client, broker.messages("T")[0])
    again = retried(broker)
    assert again.property("DELAY") == "3"
    send_back(client, again)
    assert retried(broker, 2).property("DELAY") == "4"


@every_version
@pytest.mark.parametrize("others", [{"delayLevel": -1}, {"maxReconsumeTimes": 0}])
def test_dead_letters_are_stored_immediately(broker, client, others):
    client.produce("T")
    send_back(client, broker.messages("T")[0], **others)
    [dead] = broker.messages("%DLQ%G")
    assert (dead.reconsume_times, dead.property("DELAY"), dead.property("RETRY_TOPIC")) == (1, "0", "T")
    assert broker.max_offset("%RETRY%G", 0) == 0


def test_the_group_s_limit_counts_unless_the_request_has_one(broker, client):
    broker.create_group("G", retryMaxTimes=1)
    client.produce("T")
    send_back(client, broker.messages("T")[0], 1)
    again = retried(broker)
    send_back(client, again, 1, maxReconsumeTimes=5)
    send_back(client, again, 1)
    assert retried(broker, 2).reconsume_times == 2
    assert len(broker.messages("%DLQ%G")) == 1


def test_a_message_that_the_broker_does_not_find_is_refused(broker, client):
    for _ in range(3):
        client.produce("T")
    first, second, third = broker.messages("T")
    broker.delete_before("T", 0, 2)
    lost = send_back(client, second)
    assert (lost.code, lost.remark) == (1, f"look message by offset failed, {second.commit_log_offset}")
    for offset in (-1, 10**12, third.commit_log_offset + 1):
        fields = {"offset": offset, "group": "G", "delayLevel": 1}
        assert client.call(RequestCode.CONSUMER_SEND_MSG_BACK, fields).code == 1
    assert first.commit_log_offset == 0
    assert send_back(client, first, 1).code == 0  # offset 0 finds the oldest remaining message


def test_groups_without_retries_lose_the_message(broker, client):
    client.produce("T")
    [message] = broker.messages("T")
    broker.create_group("G", retryQueueNums=0)
    assert send_back(client, message).code == 0
    assert broker.max_offset("%RETRY%G", 0) == 0
    broker.update_config(autoCreateSubscriptionGroup=False)
    assert send_back(client, message, group="unknown").code == 26


@pytest.mark.parametrize(("version", "code"), [("4.9.7", 1), ("5.1.4", 0), ("5.5.0", 26)])
def test_long_groups(broker, client, code):
    group = "g" * 127
    client.produce("T")
    assert send_back(client, broker.messages("T")[0], 1, group=group).code == code
    if code == 0:
        broker.cluster.wait_until(lambda: broker.max_offset(f"%RETRY%{group}", 0) == 1)
        [message] = broker.messages(f"%RETRY%{group}")
        assert message.topic == "T"
