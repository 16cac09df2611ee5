"""Requests of admin tools to a broker."""

from __future__ import annotations

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import bodies, fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import CreateTopicHeader, DeleteSubscriptionGroupHeader
from pyrocket_consumer.protocol.message import decode_messages
from tests.testing.brokers import broker_and_client, every_version
from tests.testing.raw_client import RawClient


@every_version
def test_topics_are_created_and_changed(version: str) -> None:
    bad = 29 if version in ("5.3.3", "5.5.0") else 1
    with (
        broker_and_client(version=version) as (broker, client),
        RawClient(broker.cluster.name_server) as to_name_server,
    ):
        for queues in (3, 5):
            assert client.call(CreateTopicHeader("new", read_queue_nums=queues, write_queue_nums=2)).code == 0
            route = to_name_server.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "new"})
            data = bodies.decode_route("new", route.body).queues[0]
            assert (data.read_queues, data.write_queues) == (queues, 2)
        assert client.call(CreateTopicHeader("bad name!")).code == bad
        assert client.call(CreateTopicHeader("TBW102")).code == bad
        fields = CreateTopicHeader("new", attributes="+message.type=FIFO").to_fields()
        assert client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0
        fields["attributes"] = "+colour=red"
        assert client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == (0 if version == "4.9.7" else 1)
        del fields["topicFilterType"]
        assert client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 1


@every_version
def test_groups_are_created_and_deleted(broker, client, version):
    body = b'{"groupName":"G","retryMaxTimes":2}'
    assert client.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body).code == 0
    broker.commit("G", "T", {0: 5})
    for clean in (False, True):
        assert client.call(DeleteSubscriptionGroupHeader("G", clean)).code == 0
        assert broker.committed("G", "T") == ({} if clean else {0: 5})
    for name in ("bad name!", "g" * 121):
        body = fastjson.dumps({"groupName": name})
        code = client.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body).code
        assert code == (29 if version == "5.5.0" else 0)


@every_version
def test_consume_stats(broker, client, version):
    def stats(**fields: object) -> dict[str, bodies.QueueConsumeStats]:
        answer = client.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "G", **fields})
        found = bodies.decode_consume_stats(answer.body).queues
        return {f"{queue.topic}/{queue.queue_id}": each for queue, each in found.items()}

    assert stats() == {}
    for number in range(4):
        broker.cluster.send("T", queue_id=0, stored_at_ms=1000 + number)
    broker.cluster.create_topic("U", queues=1)
    broker.commit("G", "T", {0: 3, 1: -1})
    broker.commit("G", "U", {0: 0})
    pulled = None if version == "4.9.7" else 0
    assert stats() == {
        "T/0": bodies.QueueConsumeStats(4, 3, 1002, pulled),
        "T/1": bodies.QueueConsumeStats(0, 0, 0, pulled),
        "U/0": bodies.QueueConsumeStats(0, 0, 0, pulled),
    }
    assert stats(topic="U").keys() == {"U/0"}
    client.heartbeat("G", "T")
    assert stats().keys() == {"T/0", "T/1"}  # the online group does not subscribe to U


@every_version
def test_topic_stats(broker, client, version):
    broker.cluster.create_topic("T", read_queues=3, write_queues=1)
    broker.cluster.send("T", count=2, queue_id=0)
    broker.delete_before("T", 0, 1)
    stats = bodies.decode_topic_stats(client.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"}).body)
    newer = version in ("5.3.3", "5.5.0")
    assert {queue.queue_id for queue in stats.queues} == ({0, 1, 2} if newer else {0})
    first = stats.queues[MessageQueue("T", "broker-a", 0)]
    assert (first.min_offset, first.max_offset, first.last_update_timestamp > 0) == (1, 2, True)
    assert (stats.topic_put_tps is not None) == newer
    assert client.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "nowhere"}).code == 17


@every_version
def test_who_is_connected_and_who_consumes(broker, client, version):
    nobody = client.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert (nobody.code, nobody.remark) == (206, "the consumer group[G] not online")
    client.heartbeat("G", "T", version=401)
    broker.commit("H", "T", {0: 1})
    answer = client.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    found = bodies.decode_consumer_connection(answer.body)
    assert found.connections == (bodies.Connection("c1", client.address, "PYTHON", 401),)
    assert {subscription.topic for subscription in found.subscriptions} == {"T", "%RETRY%G"}
    groups = client.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"})
    expected = {"H", "T"} if version == "5.3.3" else {"G", "H"}  # 5.3.3 names the topic for online groups
    assert set(fastjson.loads(groups.body)["groupList"]) == expected


@every_version
def test_settings(client, version):
    def settings() -> dict[str, str]:
        answer = client.call(RequestCode.GET_BROKER_CONFIG)
        assert "counter" in fastjson.loads(answer.fields["version"])
        return bodies.decode_java_properties(answer.body)

    mode = settings().get("useServerSideResetOffset")
    assert mode == {"4.9.7": None, "5.1.4": "false"}.get(version, "true")
    changed = client.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2\nnoSuchThing=1\nbrokerId=x\n")
    assert (changed.code, settings()["brokerPermission"], settings()["brokerId"]) == (0, "2", "0")
    refused = client.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"rocketmqHome=/tmp\nbrokerPermission=6\n")
    assert refused.code == (16 if version in ("5.3.3", "5.5.0") else 0)
    assert settings()["brokerPermission"] == ("2" if refused.code else "6")
    assert client.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"\xff\xfe").code == 1


def test_single_messages_are_found(broker, client):
    client.produce("T", b"one", properties={"KEYS": "k1 k2", "UNIQ_KEY": "U1"})
    client.produce("T", b"two", properties={"KEYS": "k2", "UNIQ_KEY": "U2"})
    one, two = broker.messages("T")
    view = client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": two.commit_log_offset})
    assert decode_messages(view.body)[0].body == b"two"
    missing = client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 7})
    assert (missing.code, missing.remark) == (1, "can not find message by the offset, 7")

    def query(key: str, **fields: object) -> list[bytes]:
        request_fields = {"topic": "T", "key": key, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": 2**62, **fields}
        answer = client.call(RequestCode.QUERY_MESSAGE, request_fields)
        if answer.code == 22:
            assert answer.fields == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        return [message.body for message in decode_messages(answer.body)]

    assert query("k2") == [b"one", b"two"]
    assert query("k1") == [b"one"]
    assert query("U2", _UNIQUE_KEY_QUERY=True) == [b"two"]
    assert query("k1", _UNIQUE_KEY_QUERY=True) == []
    assert query("k2", endTimestamp=one.stored_at_ms - 1) == []


@pytest.mark.differs("requests")
@every_version
def test_a_missing_message_gets_the_response_of_an_unknown_one(client):
    pop, reply, recall, make_user, query_static_topic = 200050, 324, 370, 3001, 513
    for code in (pop, reply, recall, make_user, query_static_topic):
        assert client.call(code, {"topic": "T", "group": "G"}).code == 3
