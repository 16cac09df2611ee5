"""The rights that real brokers require for requests about a member: the tables of docs/security.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from pyrocket_consumer.model import MessageQueue, Subscription, dlq_topic, retry_topic
from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, request_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan
from tests.consuming import consuming, until
from tests.real_brokers.accounts import ACCOUNT, ACL_1, ACL_2, GROUP, TOPIC, USERS, create_users
from tests.real_brokers.cluster import CLUSTER
from tests.real_brokers.remoting import Peer

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
QUEUES = 2
REGISTER_BROKER, UNREGISTER_BROKER = 103, 104  # at name servers
ELSEWHERE: dict[str, object] = {
    "brokerName": "broker-of-a-stranger",
    "brokerAddr": "127.0.0.1:9",
    "clusterName": CLUSTER,
    "brokerId": 0,
}
STRANGER = "10.0.0.66@stranger"
DONE = "✓"

ACCOUNTS = {"no account": None, **{user.rights: user.account for user in USERS}, "admin": ACCOUNT}
"""The columns of the tables: the account that sends the request."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a client may send to a broker."""

    code: int
    what: str
    fields: dict[str, object]
    body: bytes = b""
    done: tuple[int, ...] = (ResponseCode.SUCCESS,)

    @property
    def title(self) -> str:
        name = "REGISTER_BROKER" if self.code == REGISTER_BROKER else request_name(self.code)
        return f"{self.what}: {name} ({self.code})"


def requests(cluster: Any, topic: str, group: str, member: str) -> Iterator[Request]:
    """Return requests about the member `member`, its group and its topic. The last ones remove these."""
    sent = cluster.send(topic, b"an order")[0]
    queue = {"topic": topic, "queueId": 0}
    our_options = {"consumerGroup": group, "clientId": member}
    plan = PlanBody(topic, epoch=1, targets={MessageQueue(topic, "broker-a", 0): 0})
    theirs = frozenset(MessageQueue(topic, "broker-a", each) for each in range(QUEUES))
    consumers = (bodies.ConsumerData(group, subscriptions=(Subscription(topic),)),)
    sending: dict[str, object] = {
        "producerGroup": group,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": 1,
        "flag": 0,
        "properties": "",
        "reconsumeTimes": 0,
        "unitMode": False,
        "batch": False,
    }
    pull: dict[str, object] = {
        "maxMsgNums": 1,
        "queueOffset": 0,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    }

    code = RequestCode
    yield Request(code.GET_CONSUMER_LIST_BY_GROUP, "see its members", {"consumerGroup": group})
    yield Request(code.GET_CONSUMER_CONNECTION_LIST, "see its connections", {"consumerGroup": group})
    yield Request(code.QUERY_CONSUMER_OFFSET, "read its offset", {"consumerGroup": group, **queue})
    yield Request(code.GET_CONSUME_STATS, "read its lag", {"consumerGroup": group, "topic": topic})
    status = {"topic": topic, "group": group, "clientAddr": member}
    yield Request(code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, "ask a member for its offsets", status)
    yield Request(code.GET_CONSUMER_RUNNING_INFO, "ask a member how it does", {**our_options, "jstackEnable": True})
    order = {**our_options, "jstackEnable": False, "pyrocketOp": "reset", "pyrocketId": "1", "pyrocketV": 1}
    yield Request(code.GET_CONSUMER_RUNNING_INFO, "order a reset of this package", order, encode_plan(plan))
    directly = {**our_options, "msgId": sent.offset_message_id, "brokerName": "broker-a", "topic": topic}
    yield Request(code.CONSUME_MESSAGE_DIRECTLY, "have its listener called with a message", directly)
    reset = {"topic": topic, "group": group, "timestamp": -1, "isForce": True}
    yield Request(code.INVOKE_BROKER_TO_RESET_OFFSET, "reset it", reset)
    yield Request(code.UPDATE_CONSUMER_OFFSET, "write its offset", {"consumerGroup": group, **queue, "commitOffset": 1})
    slot = {"consumerGroup": group, "topic": retry_topic(group), "queueId": 2**30, "commitOffset": 1}
    yield Request(code.UPDATE_CONSUMER_OFFSET, "write a reset record of this package", slot)
    clone = {"srcGroup": "nobodys-group", "destGroup": group, "topic": topic, "offline": False}
    yield Request(code.CLONE_GROUP_OFFSET, "write another group's offsets over its own", clone)
    lock = bodies.encode_lock_request(bodies.LockRequest(group, STRANGER, theirs))
    yield Request(code.LOCK_BATCH_MQ, "lock its queues", {}, lock)
    unlock = bodies.encode_lock_request(bodies.LockRequest(group, member, theirs))
    yield Request(code.UNLOCK_BATCH_MQ, "unlock its queues", {}, unlock)
    off = {"clientID": member, "consumerGroup": group}
    yield Request(code.UNREGISTER_CLIENT, "sign a member's client id off", off)
    joined = bodies.encode_heartbeat(bodies.HeartbeatData(STRANGER, consumers))
    yield Request(code.HEART_BEAT, "join it, and take queues", {}, joined)
    pulled = (ResponseCode.SUCCESS, ResponseCode.PULL_OFFSET_MOVED)  # the second after a reset
    yield Request(code.PULL_MESSAGE, "read its messages", {"consumerGroup": group, **queue, **pull}, done=pulled)
    yield Request(code.VIEW_MESSAGE_BY_ID, "read a message by its id", {"offset": _log_offset(sent.offset_message_id)})
    yield Request(code.SEND_MESSAGE, "send to its topic", {**sending, "topic": topic}, b"-")
    yield Request(code.SEND_MESSAGE, "send to `%RETRY%group`", {**sending, "topic": retry_topic(group)}, b"-")
    yield Request(code.SEND_MESSAGE, "send to `%DLQ%group`", {**sending, "topic": dlq_topic(group)}, b"-")
    back = {"offset": _log_offset(sent.offset_message_id), "group": group, "delayLevel": 3, "originTopic": topic}
    yield Request(code.CONSUMER_SEND_MSG_BACK, "have it consume a message again", back)
    yield Request(code.GET_BROKER_CONFIG, "read the broker's settings", {})
    yield Request(code.UPDATE_BROKER_CONFIG, "change the broker's settings", {}, b"brokerPermission=6\n")
    group_settings = json.dumps({"groupName": group, "consumeEnable": True}).encode()
    yield Request(code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, "change its settings", {}, group_settings)
    topic_settings: dict[str, object] = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": QUEUES,
        "writeQueueNums": QUEUES,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }
    yield Request(code.UPDATE_AND_CREATE_TOPIC, "change its topic", topic_settings)
    yield registration(topic)
    yield Request(code.DELETE_SUBSCRIPTIONGROUP, "delete it", {"groupName": group, "cleanOffset": True})
    yield Request(code.DELETE_TOPIC_IN_BROKER, "delete its topic", {"topic": topic})


def registration(topic: str) -> Request:
    """Return the request with which a new broker registers itself and its topics at a name server."""
    settings = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    topics = {name: {"topicName": name, **settings} for name in (topic, str(ELSEWHERE["brokerName"]))}
    wrapper = {"dataVersion": {"counter": 1, "timestamp": 1}, "topicConfigTable": topics}
    body = json.dumps({"topicConfigSerializeWrapper": wrapper, "filterServerList": []}).encode()
    fields = {**ELSEWHERE, "haServerAddr": "127.0.0.1:9", "compressed": False, "bodyCrc32": crc32(body) & 0x7FFFFFFF}
    return Request(REGISTER_BROKER, "add a server to its topic's route, at the name server", fields, body)


def _log_offset(offset_message_id: str) -> int:
    """Return the offset of a message in the broker's log, which is the end of its id."""
    return int(offset_message_id[-16:], 16)


def tried(cluster: Any, topic: str, group: str, who: list[str], member: str = "no account") -> list[list[str]]:
    """Send each request with each account, while a member with the given rights consumes. Return the table's rows."""
    rows, account = list[list[str]](), ACCOUNTS[member]
    keys = {"access_key": account[0], "secret_key": account[1]} if account else {}
    cluster.create_topic(topic, queues=QUEUES)
    with consuming(cluster, topic, group, **keys) as (consumer, seen):
        for _ in range(QUEUES):
            cluster.send(topic, b"an order")
        seen.wait(lambda seen: len(seen.messages) == QUEUES)
        until(lambda: len(cluster.committed(group, topic)) == QUEUES, "committed")
        for request in requests(cluster, topic, group, consumer.client_id):
            server = cluster.name_server_node if request.code == REGISTER_BROKER else cluster.broker("broker-a")
            rows.append([request.title, *(cell(server.address, ACCOUNTS[name], request) for name in who)])
            if request.code == RequestCode.UNREGISTER_CLIENT:
                assert consumer.client_id in cluster.members(group), "a stranger must not remove a member"
    return rows


def cell(address: str, account: tuple[str, str] | None, request: Request) -> str:
    """Return a cell of the table: DONE, or the code with which brokers refuse the request."""
    with closing(Peer(address, account)) as peer:  # the groups that this connection joins end with it
        answer = until(lambda: unless_busy(peer, request), "an answer")
        if request.code == REGISTER_BROKER:
            clusters = peer.call(RequestCode.GET_BROKER_CLUSTER_INFO).body
            assert str(ELSEWHERE["brokerAddr"]).encode() in clusters
            peer.call(UNREGISTER_BROKER, ELSEWHERE)
    if answer.code == ResponseCode.NO_PERMISSION or "AclException" in (answer.remark or ""):
        return str(answer.code)
    assert answer.code in request.done, f"{request.title}: {answer.code} {answer.remark}"
    if "pyrocketOp" in request.fields:
        assert answer.fields["pyrocketState"] in ("applied", "already")
    if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        assert b"CR_SUCCESS" in answer.body
    return DONE


def unless_busy(peer: Peer, request: Request) -> RemotingCommand | None:
    answer = peer.call(request.code, request.fields, request.body, accept=range(10_000))
    return None if answer.code == ResponseCode.SYSTEM_BUSY else answer


def check_document(who: list[str], rows: list[list[str]]) -> None:
    """Compare rows with the table of the document."""
    lines = [["what is asked", *who], ["---"] * (len(who) + 1), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    assert table in DOCUMENT.read_text(), f"{DOCUMENT.name} should have\n{table}"


@pytest.mark.versions("4.9.7", "5.5.0")
def test_without_accounts_every_request_is_allowed(real_cluster, names):
    rows = tried(real_cluster, names.topic(), names.group(), ["no account"])
    assert {answer for _, answer in rows} == {DONE}


@pytest.mark.versions("4.9.7")
@pytest.mark.cluster(settings={"aclEnable": True}, account=ACCOUNT, home_files=ACL_1)
def test_with_acl_1(real_cluster):
    who = [name for name in ACCOUNTS if "GET" not in name]  # which it does not know
    check_document(who, tried(real_cluster, TOPIC, GROUP, who, member="SUB on both"))


@pytest.mark.versions("5.5.0")
@pytest.mark.cluster(settings=ACL_2, account=ACCOUNT)
def test_with_acl_2(real_cluster):
    broker, who = real_cluster.broker("broker-a"), list(ACCOUNTS)
    create_users(broker.peer)
    with closing(Peer(broker.address, ACCOUNTS["no rights"])) as peer:
        assert f'"password":"{ACCOUNT[1]}"'.encode() in peer.call(RequestCode.GET_BROKER_CONFIG).body
    check_document(who, tried(real_cluster, TOPIC, GROUP, who, member="SUB GET on both"))
