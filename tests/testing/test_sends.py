"""Sends: stored messages, responses, and refused requests."""

from __future__ import annotations

import base64
import time

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import LockRequest, encode_lock_request
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.message import BatchItem, encode_batch, encode_properties
from pyrocket_consumer.testing import EmbeddedCluster
from tests.testing.brokers import broker_and_client, every_version
from tests.testing.raw_client import RawClient


def v2(topic: str, properties: str = "", queue_id: int = 0, **others: object) -> dict[str, object]:
    """Return the short field names of a send."""
    named = {"a": "P", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "f": 0, "g": 1, "h": 0, "i": properties}
    return {**named, **others}


@every_version
@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
def test_both_spellings_store_the_same(broker, client, version, code):
    properties = {"TAGS": "A", "KEYS": "k1 k2", "own": "väl=ue", "WAIT": "true", "UNIQ_KEY": "U1"}
    if code == RequestCode.SEND_MESSAGE:
        answer = client.produce("T", b"hello", properties=properties, queue_id=1, flag=7)
    else:
        fields = v2("T", encode_properties(properties), queue_id=1, h=7, g=1700000000000)
        answer = client.call(code, fields, b"hello")
    [message] = broker.messages("T")
    expected = {**properties, "CLUSTER": "DefaultCluster"}
    if version == "4.9.7":
        del expected["WAIT"]
    else:
        expected |= {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert (message.body, message.flag, message.properties) == (b"hello", 7, expected)
    assert message.born_at_ms == 1700000000000
    assert (message.born_host, message.store_host) == (client.address, broker.address)
    assert answer.fields == {
        "msgId": message.offset_message_id,
        "queueId": "1",
        "queueOffset": "0",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        **({} if version == "4.9.7" else {"transactionId": "U1"}),
    }


@every_version
def test_a_unique_key_is_made_by_newer_brokers(broker, client, version):
    answer = client.produce("T")
    key = broker.messages("T")[0].property("UNIQ_KEY")
    assert answer.fields.get("transactionId") == key
    assert (key is None) == (version == "4.9.7")


@every_version
def test_batches_are_split(broker, client, version):
    items = [BatchItem(b"one", {"UNIQ_KEY": "U1", "TAGS": "A"}), BatchItem(b"two", {"UNIQ_KEY": "U2"}, flag=9)]
    fields = v2("T", "UNIQ_KEY\x01UB\x02WAIT\x01true\x02", m=True)
    answer = client.call(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(items))
    messages = broker.messages("T")
    assert [(message.body, message.flag) for message in messages] == [(b"one", 0), (b"two", 9)]
    assert answer.fields["msgId"] == ",".join(message.offset_message_id for message in messages)
    keys = [message.property("UNIQ_KEY") for message in messages]
    assert keys == (["U1", "U2"] if version == "5.5.0" else ["UB", "UB"])
    added = {"4.9.7": {"CLUSTER", "WAIT"}, "5.5.0": set[str]()}.get(
        version, {"CLUSTER", "WAIT", "MSG_REGION", "TRACE_ON"}
    )
    assert messages[1].properties.keys() == {"UNIQ_KEY", *added}
    refused = client.call(RequestCode.SEND_BATCH_MESSAGE, v2("%RETRY%G", m=True), encode_batch(items))
    assert refused.code == 13


@every_version
def test_a_topic_is_made_on_demand(version: str) -> None:
    with (
        broker_and_client(version=version) as (broker, client),
        RawClient(broker.cluster.name_server) as to_name_server,
    ):
        assert client.produce("new", defaultTopicQueueNums=3, queue_id=-1).code == 0
        route = to_name_server.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "new"})
        assert b'"perm":6,"readQueueNums":3' in route.body
        assert client.produce("new2", defaultTopicQueueNums=100).code == 0
        route = to_name_server.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "new2"})
        assert b'"readQueueNums":8' in route.body
        assert client.produce("new3", defaultTopic="T").code == 17
        broker.update_config(autoCreateTopicEnable=False)
        refused = client.produce("new3")
        assert (refused.code, refused.fields["MSG_REGION"]) == (17, "DefaultRegion")


@every_version
def test_sends_that_brokers_refuse(broker, client, version):
    newer = version in ("5.3.3", "5.5.0")
    assert client.produce("bad name!").code == (29 if newer else 1)
    assert client.produce("T", queue_id=2).code == (29 if newer else 1)
    assert client.produce("T", b"").code == (0 if version == "4.9.7" else 1)
    assert client.produce("T", b"x" * (4 * 1024 * 1024 + 1)).code == 13
    assert client.produce("T", properties={"p": "x" * 32_767}).code == 13
    assert client.produce("t" * 128).code == 13
    assert client.produce("SCHEDULE_TOPIC_XXXX").code == 16
    broker.update_config(maxMessageSize=3)
    assert client.produce("T", b"four").code == 13


def test_brokers_ignore_the_write_permission_of_a_topic(broker, client):
    broker.update_config(brokerPermission=4)
    broker.cluster.create_topic("T", perm=4)
    assert client.produce("T").code == 0


@pytest.mark.parametrize(("version", "code"), [("4.9.7", 14), ("5.5.0", 2)])
def test_a_slave_refuses_sends(version: str, code: int) -> None:
    with EmbeddedCluster(version=version, slaves=1) as cluster:
        cluster.create_topic("T")
        with RawClient(cluster.broker("broker-a-1").address) as client:
            assert client.produce("T").code == code
            back = {"offset": 0, "group": "G", "delayLevel": 1}
            assert client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == (1 if version == "4.9.7" else 2)


@every_version
def test_a_delayed_message_appears_later(broker, client):
    answer = client.produce("T", b"later", properties={"DELAY": "1", "WAIT": "true"}, queue_id=1)
    assert client.produce("T", b"now", queue_id=1).fields["queueOffset"] == "0"
    assert answer.fields["queueOffset"] == "0"  # of the system topic
    broker.cluster.wait_until(lambda: broker.max_offset("T", 1) == 2)
    message = broker.messages("T", 1)[1]
    assert message.body == b"later"
    assert {name: message.property(name) for name in ("DELAY", "REAL_TOPIC", "REAL_QID", "WAIT")} == {
        "DELAY": "1",
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
        "WAIT": "true",
    }


def test_delays_are_kept_in_order_and_capped() -> None:
    with broker_and_client(delay_scale=0.02) as (broker, client):
        client.produce("T", b"5 s", properties={"DELAY": "2"})
        client.produce("T", b"1 s", properties={"DELAY": "1"})
        client.produce("T", b"2 h", properties={"DELAY": "99"})
        broker.cluster.wait_until(lambda: broker.max_offset("T", 0) == 2)
        assert [message.body for message in broker.messages("T", 0)] == [b"1 s", b"5 s"]
        assert broker.messages("SCHEDULE_TOPIC_XXXX", 17)[0].property("DELAY") == "18"


@every_version
def test_timers_came_with_5(broker, client, version):
    answer = client.produce("T", properties={"TIMER_DELAY_MS": "2000", "UNIQ_KEY": "U"})
    if version == "4.9.7":
        assert broker.max_offset("T", 0) == 1
        return
    assert broker.max_offset("T", 0) == 0
    broker.cluster.wait_until(lambda: broker.max_offset("T", 0) == 1)
    due = broker.messages("T")[0].property("TIMER_OUT_MS")
    handle = answer.fields.get("recallHandle")
    if version == "5.1.4":
        assert handle is None
    else:
        assert base64.urlsafe_b64decode(handle or "").decode().split(" ") == ["v1", "T", "broker-a", due, "U"]


@every_version
@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
def test_timers_beyond_three_days_are_refused(broker, client, version, name):
    remark = "timer message illegal, the delay time should not be bigger than the max delay 259200000ms"
    three_days_s = 3 * 24 * 3600
    unit = 1 if name == "TIMER_DELAY_SEC" else 1000
    now = round(time.time() * unit) if name == "TIMER_DELIVER_MS" else 0
    for value in (str(now + (three_days_s + 60) * unit), "soon"):
        refused = client.produce("T", properties={name: value})
        assert refused.code == (0 if version == "4.9.7" else 13)
        assert (remark in (refused.remark or "")) == (version != "4.9.7")
    assert client.produce("T", properties={name: str(now + (three_days_s - 60) * unit)}).code == 0
    assert broker.max_offset("T", 0) == (3 if version == "4.9.7" else 0)
    if version != "4.9.7":
        broker.update_config(timerMaxDelaySec=5)
        refused = client.produce("T", properties={name: str(now + 60 * unit)})
        assert (refused.code, "5000ms" in (refused.remark or "")) == (13, True)
        broker.update_config(timerWheelEnable=False)
        refused = client.produce("T", properties={name: str(now + 3 * unit)})
        assert (refused.code, "timerWheelEnable is false" in (refused.remark or "")) == (1, True)


def test_a_timer_in_the_past_is_no_timer(broker, client):
    assert client.produce("T", properties={"TIMER_DELIVER_MS": "3"}).code == 0
    assert [message.property("TIMER_OUT_MS") for message in broker.messages("T", 0)] == [None]


def test_delayed_messages_of_the_cluster_itself_wait_as_well(broker):
    broker.cluster.send("T", count=2, properties={"TIMER_DELAY_SEC": "60"})
    assert broker.cluster.messages("T") == []
    with pytest.raises(ConfigError, match="max delay 259200000ms"):
        broker.cluster.send("T", properties={"TIMER_DELAY_SEC": "600000"})


def test_a_delay_level_goes_before_a_timer(broker, client):
    assert client.produce("T", properties={"DELAY": "1", "TIMER_DELAY_SEC": "3600"}).code == 0
    broker.cluster.wait_until(lambda: broker.max_offset("T", 0) == 1)


@every_version
def test_a_direct_send_to_a_retry_topic_becomes_a_dead_letter(broker, client, version):
    old = version == "4.9.7"

    def retry(times: int) -> None:
        client.produce(
            "%RETRY%G", properties={"RETRY_TOPIC": "T", "DELAY": "1"}, reconsumeTimes=times, maxReconsumeTimes=3
        )

    retry(2)
    broker.cluster.wait_until(lambda: broker.max_offset("%RETRY%G", 0) == 1)
    retry(3)
    retry(4)
    broker.cluster.wait_until(lambda: broker.max_offset("%DLQ%G", 0) == (2 if old else 1))
    broker.cluster.wait_until(lambda: broker.max_offset("%RETRY%G", 0) == (1 if old else 2))
    dead = broker.messages("%DLQ%G")[-1]
    assert (dead.reconsume_times, dead.property("DELAY")) == (4, "1" if old else "-1")

    lock = LockRequest("G", "c1", frozenset({MessageQueue("T", "broker-a", 0)}))
    client.call(RequestCode.LOCK_BATCH_MQ, body=encode_lock_request(lock))
    before = broker.max_offset("%DLQ%G", 0)
    retry(0)
    if not old:  # while the group holds a lock, for any count
        broker.cluster.wait_until(lambda: broker.max_offset("%DLQ%G", 0) == before + 1)
    client.call(RequestCode.UNLOCK_BATCH_MQ, body=encode_lock_request(lock))
    retry(0)
    broker.cluster.wait_until(lambda: broker.max_offset("%RETRY%G", 0) == 3)


def test_a_retry_topic_needs_its_group() -> None:
    with broker_and_client(auto_create_groups=False) as (_, client):
        assert client.produce("%RETRY%G").code == 26


def test_the_cluster_sends_by_itself() -> None:
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("T", queues=2)
        sent = cluster.send("T", b"same", count=8, tags="A", keys=["k1", "k2"], properties={"own": "x"})
        assert [(each.queue.broker_name, each.queue.queue_id, each.queue_offset) for each in sent[:5]] == [
            ("broker-a", 0, 0),
            ("broker-a", 1, 0),
            ("broker-b", 0, 0),
            ("broker-b", 1, 0),
            ("broker-a", 0, 1),
        ]
        messages = cluster.messages("T")
        assert {message.message_id for message in messages} == {each.message_id for each in sent}
        assert {message.offset_message_id for message in messages} == {each.offset_message_id for each in sent}
        assert {(message.tags, message.keys, message.property("own")) for message in messages} == {
            ("A", ("k1", "k2"), "x")
        }
        cluster.send("T", lambda number: b"%d" % number, count=3, queue_id=0, broker_name="broker-b")
        assert [message.body for message in cluster.broker("broker-b").messages("T", 0)][2:] == [b"0", b"1", b"2"]
