"""Heartbeats and their effects: members, subscriptions, notifications, locks."""

from __future__ import annotations

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import bodies, fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing.membership import QueueLocks
from tests.testing.brokers import broker_and_client, every_version
from tests.testing.raw_client import RawClient

NOTIFY = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


def members(client: RawClient, group: str = "G") -> list[str]:
    answer = client.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    return bodies.decode_consumer_list(answer.body) if answer.code == 0 else []


@every_version
def test_the_first_heartbeat(version: str) -> None:
    with (
        broker_and_client(version=version) as (broker, client),
        RawClient(broker.cluster.name_server) as to_name_server,
    ):
        nobody = client.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
        assert (nobody.code, nobody.remark) == (1, "no consumer for this group, G")
        answer = client.heartbeat("G", "T")
        assert answer.code == 0
        assert answer.fields == (
            {} if version == "4.9.7" else {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
        )
        assert members(client) == ["c1"]
        [notice] = client.wait_received(NOTIFY)
        assert (notice.fields, notice.is_oneway, notice.body) == ({"consumerGroup": "G"}, True, b"")
        assert to_name_server.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%G"}).code == 0
        client.heartbeat("G", "T")
        assert client.is_silent()


@every_version
def test_members_are_notified_of_a_join_and_a_leave(broker, client):
    client.heartbeat("G", "T")
    with RawClient(broker.address, "c2") as second:
        second.heartbeat("G", "T")
        assert sorted(members(client)) == ["c1", "c2"]
        client.wait_received(NOTIFY, 2)
        second.wait_received(NOTIFY, 1)
        second.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "G"})
        client.wait_received(NOTIFY, 3)
        assert members(client) == ["c1"]
        second.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "G"})
        second.heartbeat("G", "T")
        client.wait_received(NOTIFY, 4)
    client.wait_received(NOTIFY, 5)  # the connection ended
    assert members(client) == ["c1"]


def test_the_broker_knows_members_by_connection() -> None:
    with broker_and_client() as (broker, client), RawClient(broker.address, "c1") as twin:
        client.heartbeat("G", "T")
        twin.heartbeat("G", "T")
        assert members(client) == ["c1", "c1"]


@every_version
def test_notices_of_broadcasting_groups_ended_with_5_3_1(broker, client, version):
    client.heartbeat("G", "T", model="BROADCASTING")
    if version in ("4.9.7", "5.1.4"):
        client.wait_received(NOTIFY)
    else:
        assert client.is_silent()
    assert broker.core.topics.get("%RETRY%G") is not None


def test_notices_can_be_switched_off(broker, client):
    broker.create_group("G", notifyConsumerIdsChangedEnable=False)
    client.heartbeat("G", "T")
    assert client.is_silent()


def test_the_last_heartbeat_sets_the_subscriptions_of_a_group(broker, client, second):
    client.heartbeat("G", "T", expression="A", sub_version=5)
    second.heartbeat("G", "T", expression="B", sub_version=5)
    assert broker.subscriptions("G")["T"].expression == "A"  # only a greater version replaces
    second.heartbeat("G", "T", expression="B", sub_version=6)
    assert broker.subscriptions("G")["T"].expression == "B"
    client.heartbeat("G", "T", "U", expression="A", sub_version=5)
    assert broker.subscriptions("G").keys() == {"T", "U", "%RETRY%G"}
    second.heartbeat("G", "U", model="BROADCASTING")
    assert broker.subscriptions("G").keys() == {"U"}  # topics missing from the heartbeat are removed
    stats = client.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert bodies.decode_consumer_connection(stats.body).message_model == "BROADCASTING"


def test_an_empty_heartbeat_is_accepted_and_a_missing_body_is_not(client):
    assert client.call(RequestCode.HEART_BEAT, body=b"{}").code == 0
    assert client.call(RequestCode.HEART_BEAT).code == 1
    subscription = {"topic": "T", "subString": "*", "subVersion": 1}
    least = {"clientID": "c", "consumerDataSet": [{"groupName": "G", "subscriptionDataSet": [subscription]}]}
    assert client.call(RequestCode.HEART_BEAT, body=fastjson.dumps(least)).code == 0
    assert client.pull("T", 0, 0, sysFlag=0, subVersion=1).code == 19


@every_version
def test_heartbeats_without_subscriptions(broker, client, version):
    def beat(fingerprint: int, without: bool) -> str | None:
        subscriptions = [] if without else [{"topic": "T", "subString": "*", "subVersion": 1}]
        data = {
            "clientID": "c1",
            "heartbeatFingerprint": fingerprint,
            "withoutSub": without,
            "consumerDataSet": [{"groupName": "G", "subscriptionDataSet": subscriptions}],
        }
        return client.call(RequestCode.HEART_BEAT, body=fastjson.dumps(data)).fields.get("IS_SUB_CHANGE")

    changed = [beat(77, False), beat(77, False), beat(77, True)]
    kept = "T" in broker.subscriptions("G")
    if version == "4.9.7":
        assert (changed, kept) == ([None, None, None], False)
    else:
        assert (changed, kept) == (["true", "false", "false"], True)
    beat(0, True)  # with fingerprint 0 it is a full heartbeat without topics
    assert broker.subscriptions("G") == {}


@every_version
def test_groups_that_brokers_do_not_create(version: str) -> None:
    with broker_and_client(version=version, auto_create_groups=False) as (broker, client):
        assert client.heartbeat("G", "T").code == 0
        assert members(client) == (["c1"] if version == "4.9.7" else [])
        assert broker.core.topics.get("%RETRY%G") is None
        assert client.pull("T", 0, 0, sysFlag=0).code == 26


def test_a_silent_member_expires_and_its_connection_is_closed() -> None:
    options = {"member_expiry_s": 0.3, "scan_interval_s": 0.1}
    with broker_and_client(**options) as (broker, client), RawClient(broker.address, "c2") as other:
        client.heartbeat("G", "T")
        other.heartbeat("G", "T")
        client.heartbeat("G", "T")
        broker.cluster.wait_until(lambda: broker.members("G") == [])
        assert other.wait_closed() in ("closed", "reset")


def test_a_producer_that_unregisters_is_no_producer(broker, client):
    beat = bodies.encode_heartbeat(bodies.HeartbeatData("c1", producers=("P",)))
    assert client.call(RequestCode.HEART_BEAT, body=beat).code == 0
    assert len(broker.core.members.producers("P")) == 1
    client.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "producerGroup": "P"})
    assert broker.core.members.producers("P") == []


# --- locks


def lock(client: RawClient, who: str, *queue_ids: int, code: int = RequestCode.LOCK_BATCH_MQ) -> set[int]:
    queues = frozenset(MessageQueue("T", "broker-a", queue_id) for queue_id in queue_ids)
    answer = client.call(code, body=bodies.encode_lock_request(bodies.LockRequest("G", who, queues)))
    return {queue.queue_id for queue in bodies.decode_lock_response(answer.body)} if answer.body else set()


def test_a_lock_belongs_to_a_client_id(broker, client, other):
    assert lock(client, "c1", 0, 1) == {0, 1}
    assert lock(client, "c2", 0, 2) == {2}
    assert lock(other, "c1", 0) == {0}  # another connection with the same id renews it
    lock(client, "c2", 0, code=RequestCode.UNLOCK_BATCH_MQ)
    assert lock(client, "c2", 0) == set()
    lock(other, "c1", 0, code=RequestCode.UNLOCK_BATCH_MQ)
    assert lock(client, "c2", 0) == {0}
    assert lock(client, "c2") == set()


def test_a_lock_outlives_its_owner_s_connection(broker, client):
    with RawClient(broker.address, "c2") as second:
        second.heartbeat("G", "T")
        assert lock(second, "c2", 0) == {0}
        second.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "G"})
    broker.cluster.wait_until(lambda: len(broker.connections) == 1)
    assert lock(client, "c1", 0) == set()
    assert broker.locks("G") == {MessageQueue("T", "broker-a", 0): "c2"}
    broker.expire_locks()
    assert lock(client, "c1", 0) == {0}


def test_a_lock_ends_sixty_seconds_after_it_was_renewed() -> None:
    now = [1000.0]
    locks = QueueLocks(lambda: now[0], expiry_s=60)
    queue = MessageQueue("T", "broker-a", 0)
    assert locks.lock("G", "c1", [queue]) == {queue}
    now[0] += 50
    assert locks.lock("G", "c1", [queue]) == {queue}
    now[0] += 59
    assert locks.lock("G", "c2", [queue]) == set()
    now[0] += 2
    assert locks.held("G") == {}
    assert locks.lock("G", "c2", [queue]) == {queue}


# --- other requests of clients


def test_check_client_config(broker, client):
    def check(kind: str) -> int:
        body = {
            "clientId": "c",
            "group": "G",
            "subscriptionData": {
                "topic": "T",
                "subString": "a",
                "expressionType": kind,
                "tagsSet": [],
                "subVersion": 1,
            },
        }
        return client.call(RequestCode.CHECK_CLIENT_CONFIG, body=fastjson.dumps(body)).code

    assert [check("TAG"), check("SQL92"), check("GROOVY")] == [0, 1, 23]
    assert client.call(RequestCode.CHECK_CLIENT_CONFIG).code == 0


@every_version
def test_query_assignment(version: str) -> None:
    with (
        broker_and_client(version=version, queues=8) as (broker, client),
        RawClient(broker.address, "c2") as second,
        RawClient(broker.address, "c3") as third,
    ):

        def assigned(client_id: str, strategy: str = "AVG", model: str = "CLUSTERING") -> list[int] | None:
            fields = {"topic": "T", "consumerGroup": "G", "clientId": client_id, "strategyName": strategy}
            body = fastjson.dumps({**fields, "messageModel": model})
            answer = client.call(RequestCode.QUERY_ASSIGNMENT, body=body)
            assert answer.code == (3 if version == "4.9.7" else 0)
            found = fastjson.loads(answer.body).get("messageQueueAssignments") if answer.code == 0 else None
            return None if found is None else [each["messageQueue"]["queueId"] for each in found]

        assert assigned("c1") is None
        for member in (client, second, third):
            member.heartbeat("G", "T")
        if version != "4.9.7":
            assert [assigned(each) for each in ("c1", "c2", "c3")] == [[0, 1, 2], [3, 4, 5], [6, 7]]
            assert assigned("c2", "AVG_BY_CIRCLE") == [1, 4, 7]
            assert assigned("c2", "MAGIC") is None
            assert assigned("stranger", model="BROADCASTING") == list(range(8))
