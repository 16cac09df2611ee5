from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import BrokerData, MessageQueue, QueueData, Subscription, TopicRoute
from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import RequestCode, version_ordinal
from pyrocket_consumer.protocol.fastjson import loads
from pyrocket_consumer.protocol.frame import decode_command
from pyrocket_consumer.protocol.subscription import parse_subscription
from tests import golden
from tests.for_each import for_each
from tests.trials import trials

QUEUE = MessageQueue("TopicA", "broker-a", 0)
OTHER_QUEUE = MessageQueue("TopicA", "broker-a", 1)
STANDARD_ROUTE = (
    '{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"},"brokerName":"broker-a",'
    '"cluster":"DefaultCluster","enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a",'
    '"perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
OLD_ROUTE = STANDARD_ROUTE.replace('"0":', "0:").replace('"1":', "1:")
ROUTE = TopicRoute(
    "TopicA",
    (QueueData("broker-a", 4, 4),),
    (BrokerData("DefaultCluster", "broker-a", {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}),),
)


def recorded(name: str, *, response: bool) -> list[tuple[str, bytes]]:
    """Return the version and body of each recorded frame with that name and a body. Each version must have some."""
    end = f"{name}-{'response' if response else 'request'}.bin"
    entries = [entry for entry in golden.index() if entry.name.split("-", 1)[1] == end and entry.body_bytes]
    missing = set(golden.VERSIONS) - {entry.version for entry in entries}
    assert not missing or (name, missing) == ("query-assignment", {"4.9.7"})  # it does not know that request
    return [(entry.version, decode_command(entry.frame()).body) for entry in entries]


def responses(name: str) -> list[tuple[str, bytes]]:
    return recorded(name, response=True)


def questions(name: str) -> list[bytes]:
    return [body for _, body in recorded(name, response=False)]


def plain(body: bytes, *extra: str) -> Any:
    """Return a body's value without the fields of newer senders, and without the order of a heartbeat's tags."""
    value = loads(body)
    for name in extra:
        value.pop(name, None)
    each: Any
    for each in (value, *value.get("consumerDataSet", ())):
        for subscription in each.get("subscriptionDataSet", each.get("subscriptionSet", ())):
            subscription.pop("namespace", None)
            for tags in ("codeSet", "tagsSet") if each is not value else ():
                subscription[tags].sort()
    return value


def reset_bodies(begin: str) -> list[bytes]:
    found = [decode_command(frame).body for name, frame in golden.frames("reset").items() if name.startswith(begin)]
    assert found
    return found


# --- routes


@for_each("body, standard", [(STANDARD_ROUTE, True), (OLD_ROUTE, False)])
def test_a_route_is_read_and_written_in_both_forms(body, standard):
    assert bodies.decode_route("TopicA", body.encode()) == ROUTE
    assert bodies.encode_route(ROUTE, standard, acting_master=False) == body.encode()


def test_recorded_routes():
    for version, body in responses("route"):
        route = bodies.decode_route("A_j2", body)
        (broker,) = route.brokers
        assert (broker.cluster, broker.broker_name, set(broker.addresses)) == ("DefaultCluster", "broker-a", {0})
        assert [(data.broker_name, data.perm) for data in route.queues] == [("broker-a", 6)]
        count = route.queues[0].read_queues
        assert route.consume_queues() == [MessageQueue("A_j2", "broker-a", queue_id) for queue_id in range(count)]
        standard = b'{"0":' in body
        acting_master = None if version == "4.9.7" else False
        assert bodies.encode_route(route, standard, acting_master) == body


def test_a_route_may_have_an_order_configuration_or_lack_fields():
    route = TopicRoute("T", (), (), "broker-a:4;broker-b:4")
    assert bodies.decode_route("T", bodies.encode_route(route)) == route
    for text in (b"{}", b'{"queueDatas":null,"brokerDatas":null,"filterServerTable":null,"new":[1]}'):
        assert bodies.decode_route("T", text) == TopicRoute("T")


def test_cluster_info():
    text = (
        '{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"broker-a",'
        '"cluster":"DefaultCluster","enableActingMaster":false}},"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
    )
    info = bodies.ClusterInfo(
        {"broker-a": BrokerData("DefaultCluster", "broker-a", {0: "10.0.0.1:10911"})}, {"DefaultCluster": ("broker-a",)}
    )
    assert bodies.decode_cluster_info(text.encode()) == info
    assert bodies.encode_cluster_info(info, acting_master=False) == text.encode()
    for version, body in responses("cluster-info"):
        known = bodies.decode_cluster_info(body)
        assert known.clusters == {"DefaultCluster": ("broker-a",)}
        assert bodies.encode_cluster_info(known, None if version == "4.9.7" else False) == body


# --- heartbeats and subscriptions


def test_a_heartbeat_has_the_format_of_java():
    text = (
        '{"clientID":"192.168.1.2@4711#123456789","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        '"consumeType":"CONSUME_PASSIVELY","groupName":"GID_demo","messageModel":"CLUSTERING","subscriptionDataSet":['
        '{"classFilterMode":false,"codeSet":[2598919,2598920],"expressionType":"TAG","subString":"TagA || TagB",'
        '"subVersion":1700000000000,"tagsSet":["TagA","TagB"],"topic":"TopicA"},{"classFilterMode":false,"codeSet":[],'
        '"expressionType":"TAG","subString":"*","subVersion":1700000000001,"tagsSet":[],"topic":"%RETRY%GID_demo"}],'
        '"unitMode":false}],"producerDataSet":[{"groupName":"PID_demo"}]}'
    )
    data = bodies.HeartbeatData(
        "192.168.1.2@4711#123456789",
        (
            bodies.ConsumerData(
                "GID_demo",
                subscriptions=(
                    parse_subscription("TopicA", "TagA || TagB", 1700000000000),
                    parse_subscription("%RETRY%GID_demo", "*", 1700000000001),
                ),
            ),
        ),
        ("PID_demo",),
    )
    assert bodies.encode_heartbeat(data) == text.encode()
    assert bodies.decode_heartbeat(text.encode()) == data


def test_recorded_heartbeats_are_the_same_when_encoded_again():
    for body in questions("heartbeat"):
        ours = bodies.encode_heartbeat(bodies.decode_heartbeat(body))
        assert plain(ours) == plain(body, "heartbeatFingerprint", "withoutSub")


def test_recorded_heartbeat_with_two_tags():
    for version in golden.VERSIONS:
        data = bodies.decode_heartbeat(decode_command(golden.frame(version, "05-heartbeat-request.bin")).body)
        by_topic = {each.topic: each for each in data.consumers[0].subscriptions}
        assert data.consumers[0].group == "A_jgtags"
        assert by_topic["A_j2"].tags == {"TagA", "TagB"}
        assert by_topic["%RETRY%A_jgtags"].tags == frozenset()


def test_the_smallest_heartbeat_a_broker_takes():
    group = b'{"groupName":"g","subscriptionDataSet":[{"topic":"T","subString":"*"}]}'
    (consumer,) = bodies.decode_heartbeat(b'{"clientID":"c","consumerDataSet":[' + group + b"]}").consumers
    assert consumer.subscriptions == (Subscription("T"),)
    assert bodies.decode_heartbeat(b"{}") == bodies.HeartbeatData("")


def test_consumer_lists():
    assert bodies.encode_consumer_list(["c1", "c2"]) == b'{"consumerIdList":["c1","c2"]}'
    for _, body in responses("consumer-list"):
        assert bodies.decode_consumer_list(body) == ["192.0.2.2@javaprobe"]
        assert bodies.encode_consumer_list(bodies.decode_consumer_list(body)) == body


def test_client_config_checks():
    for body in questions("check-client-config"):
        check = bodies.decode_check_client_config(body)
        assert check.subscription.expression_type == "SQL92"
        assert loads(bodies.encode_check_client_config(check)) == plain(body, "namespace")


def test_recorded_consumer_connections():
    for version, body in responses("consumer-connections"):
        value = bodies.decode_consumer_connection(body)
        (connection,) = value.connections
        assert (connection.client_id, connection.language) == ("192.0.2.2@javaprobe", "JAVA")
        assert connection.version == version_ordinal(*map(int, version.split(".")))
        assert {each.topic for each in value.subscriptions} == {"A_j2", "%RETRY%A_jg2"}
        assert (value.consume_type, value.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
        assert loads(bodies.encode_consumer_connection(value)) == loads(body)


# --- locks and assignments


def test_lock_requests_and_answers():
    request = bodies.LockRequest("g", "c", frozenset({OTHER_QUEUE, QUEUE}))
    assert bodies.encode_lock_request(request) == (
        b'{"clientId":"c","consumerGroup":"g","mqSet":[{"brokerName":"broker-a","queueId":0,"topic":"TopicA"},'
        b'{"brokerName":"broker-a","queueId":1,"topic":"TopicA"}]}'
    )
    assert bodies.decode_lock_request(bodies.encode_lock_request(request)) == request
    assert bodies.encode_lock_response([QUEUE]) == (
        b'{"lockOKMQSet":[{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}]}'
    )
    assert bodies.decode_lock_response(b'{"lockOKMQSet":[]}') == set()


def test_recorded_locks():
    for body in (*questions("lock"), *questions("unlock")):
        theirs = plain(body, "onlyThisBroker")
        theirs["mqSet"].sort(key=lambda queue: queue["queueId"])
        assert loads(bodies.encode_lock_request(bodies.decode_lock_request(body))) == theirs
    for _, body in responses("lock"):
        assert bodies.encode_lock_response(bodies.decode_lock_response(body)) == body
    for version in golden.VERSIONS:
        assert decode_lock(version, "c2") == {MessageQueue("A_gold", "broker-a", 1)}


def decode_lock(version: str, client_id: str) -> frozenset[MessageQueue]:
    """Return the queues that the broker locked for `client_id`, the last client to request them."""
    responses = {}
    for request, response in zip(golden.index(), golden.index()[1:], strict=False):
        if request.version == version and request.code == RequestCode.LOCK_BATCH_MQ and not request.is_response:
            lock_request = bodies.decode_lock_request(decode_command(request.frame()).body)
            responses[lock_request.client_id] = bodies.decode_lock_response(decode_command(response.frame()).body)
    return frozenset(responses[client_id])


def test_assignments():
    request = bodies.AssignmentRequest("TopicA", "g", "c")
    text = b'{"clientId":"c","consumerGroup":"g","messageModel":"CLUSTERING","strategyName":"AVG","topic":"TopicA"}'
    assert bodies.decode_assignment_request(text) == request
    queue = b'{"messageQueue":{"brokerName":"broker-a","queueId":0,"topic":"TopicA"},"mode":"PULL"}'
    response = b'{"messageQueueAssignments":[' + queue + b"]}"
    assert bodies.encode_assignments([bodies.MessageQueueAssignment(QUEUE)]) == response
    for _, body in responses("query-assignment"):
        assert bodies.encode_assignments(None) == body
    for body in questions("query-assignment"):
        assert bodies.decode_assignment_request(body).strategy_name == "AVG"


# --- offset tables

MAP_FORM = (
    '{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}:100,'
    '{"brokerName":"broker-a","queueId":1,"topic":"TopicA"}:0}}'
)
LIST_FORM = (
    '{"offsetTable":[{"brokerName":"broker-a","offset":100,"queueId":0,"topic":"TopicA"},'
    '{"brokerName":"broker-a","offset":0,"queueId":1,"topic":"TopicA"}]}'
)
PAIRS_FORM = (
    '{"offsetTable":[[{"topic":"TopicA","brokerName":"broker-a","queueId":0},100],'
    '[{"topic":"TopicA","brokerName":"broker-a","queueId":1},0]]}'
)
QUOTED_FORM = (
    '{"offsetTable":{"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":0,\\"topic\\":\\"TopicA\\"}":100,'
    '"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":1,\\"topic\\":\\"TopicA\\"}":0}}'
)
OFFSETS = {QUEUE: 100, OTHER_QUEUE: 0}


@for_each(
    "text, offsets",
    [
        *((text, OFFSETS) for text in (MAP_FORM, LIST_FORM, PAIRS_FORM, QUOTED_FORM)),
        *((text, {}) for text in ("", "{}", '{"offsetTable":{}}', '{"offsetTable":[]}', '{"offsetTable":null}')),
        ('{"offsetTable":{{"queueId":1,"topic":"T"}:5}}', {MessageQueue("T", "", 1): 5}),
    ],
)
def test_an_offset_table_is_read_in_every_form(text, offsets):
    assert bodies.decode_offset_table(text.encode()) == offsets
    assert bodies.encode_offset_table(OFFSETS) == MAP_FORM.encode()
    assert loads(bodies.encode_offset_table(OFFSETS, as_list=True)) == loads(LIST_FORM)


def list_of(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


ROUTES_OF_WRONG_SHAPE = [
    "[]",
    "null",
    '"x"',
    '{"queueDatas":{}}',
    '{"queueDatas":[5]}',
    '{"brokerDatas":[{"brokerAddrs":{"a":"x"}}]}',
    '{"queueDatas":[{"readQueueNums":"many"}]}',
    '{"queueDatas":[{"readQueueNums":2000000000}]}',
    '{"queueDatas":[{"writeQueueNums":-1}]}',
    '{"brokerDatas":[{"brokerAddrs":{"0":[]}}]}',
    '{"queueDatas":[{"brokerName":"a","readQueueNums":40000},{"brokerName":"b","readQueueNums":40000}]}',
    '{"queueDatas":[{"brokerName":"a","writeQueueNums":40000},{"brokerName":"a","writeQueueNums":40000}]}',
    '{"orderTopicConf":"a:2147483647"}',
    '{"orderTopicConf":"a:' + "9" * 5000 + '"}',
    '{"orderTopicConf":"a:40000;b:40000"}',
    '{"brokerDatas":' + list_of('{"brokerAddrs":{}}', 10_001) + "}",
    '{"brokerDatas":[{"brokerAddrs":{' + ",".join(f'"{each}":"a:1"' for each in range(10_001)) + "}}]}",
    '{"brokerDatas":[{"brokerName":{}}]}',
    '{"queueDatas":[{"perm":1.5}]}',
    '{"queueDatas":[{"perm":true}]}',
]
OFFSET_TABLES_OF_WRONG_SHAPE = [
    "[]",
    '{"offsetTable":5}',
    '{"offsetTable":{5:6}}',
    '{"offsetTable":{"x":6}}',
    '{"offsetTable":[5]}',
    '{"offsetTable":{{"queueId":1}:null}}',
    '{"offsetTable":{{"queueId":1}:"many"}}',
    '{"offsetTable":[[1,2]]}',
    '{"offsetTable":{{"queueId":[]}:1}}',
    '{"offsetTable":[[{},2,3]]}',
    '{"offsetTable":{{"queueId":1}:99999999999999999999}}',
]


@for_each("text", ROUTES_OF_WRONG_SHAPE)
def test_a_route_of_the_wrong_shape_is_refused(text):
    with pytest.raises(ProtocolError):
        bodies.decode_route("T", text.encode())


@for_each("text", OFFSET_TABLES_OF_WRONG_SHAPE)
def test_an_offset_table_of_the_wrong_shape_is_refused(text):
    with pytest.raises(ProtocolError):
        bodies.decode_offset_table(text.encode())


def test_recorded_resets():
    for body in (*reset_bodies("220_"), *reset_bodies("222resp_")):
        offsets = bodies.decode_offset_table(body)
        assert offsets == {MessageQueue("B_c1", "broker-a", 0): 0, MessageQueue("B_c1", "broker-a", 1): 0}
        assert loads(bodies.encode_offset_table(offsets, body.startswith(b'{"offsetTable":['))) == loads(body)


FIRST, SECOND = MessageQueue("A_j2", "broker-a", 0), MessageQueue("A_j2", "broker-a", 1)


def test_recorded_consumer_status():
    expected = {"4.9.7": {FIRST: 15, SECOND: 0}, "5.1.4": {FIRST: 16}, "5.3.3": {FIRST: 0}, "5.5.0": {FIRST: 16}}
    of_members = responses("status-from-client")
    assert all(bodies.decode_consumer_status(body) == expected[version] for version, body in of_members)
    for body in (*(body for _, body in of_members), *reset_bodies("221ans_")):
        assert bodies.encode_consumer_status(bodies.decode_consumer_status(body)) == body
    of_groups = [body for _, body in responses("consumer-status")]
    assert all(list(bodies.decode_consumer_status_table(body)) == ["192.0.2.2@javaprobe"] for body in of_groups)
    for body in (*of_groups, *reset_bodies("223resp_")):
        members = bodies.decode_consumer_status_table(body)
        assert bodies.encode_consumer_status_table(members) == body
        if b"@m3" in body:
            reported = {queue.queue_id: offset for queue, offset in members["127.0.0.1@m3"].items()}
            assert reported == {0: 7, 1: 8}


def test_recorded_consume_stats():
    of_queue = bodies.QueueConsumeStats
    expected = {
        "4.9.7": {},
        "5.1.4": {},
        "5.3.3": {FIRST: of_queue(16, 0, 0, 0), SECOND: of_queue(0, 0, 0, 0)},
        "5.5.0": {FIRST: of_queue(16, 16, 1795215264569, 16), SECOND: of_queue(0, 0, 0, 0)},
    }
    for version, body in responses("consume-stats"):
        stats = bodies.decode_consume_stats(body)
        assert stats.queues == expected[version]
        assert loads(bodies.encode_consume_stats(stats)) == loads(body)


def test_consume_stats_of_a_4_9_broker_have_no_pull_offset():
    text = (
        b'{"consumeTps":1.5,"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}:'
        b'{"brokerOffset":120,"consumerOffset":100,"lastTimestamp":1700000000000}}}'
    )
    stats = bodies.ConsumeStats({QUEUE: bodies.QueueConsumeStats(120, 100, 1700000000000)}, 1.5)
    assert bodies.decode_consume_stats(text) == stats
    assert bodies.encode_consume_stats(stats) == text


def test_recorded_topic_stats():
    for version, body in responses("topic-stats"):
        stats = bodies.decode_topic_stats(body)
        assert stats.queues[SECOND] == bodies.QueueStats(0, 0, 0)
        assert stats.queues[FIRST].max_offset > 0
        assert (stats.topic_put_tps is None) == (version in ("4.9.7", "5.1.4"))
        assert loads(bodies.encode_topic_stats(stats)) == loads(body)


# --- running info, direct consumption


def test_recorded_running_info():
    for body in (*(body for _, body in responses("running-info")), *reset_bodies("307ans_")):
        info = bodies.decode_running_info(body)
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info.subscriptions
        assert (info.jstack is None) == (b'"jstack"' not in body)
        assert plain(bodies.encode_running_info(info)) == plain(body, "mqPopTable", "userConsumerInfo")


def test_running_info_keeps_the_java_spelling():
    queues = {QUEUE: bodies.QueueRunningInfo(100, dropped=True)}
    info = bodies.RunningInfo(queues=queues, status={"T": bodies.TopicStatus()})
    text = bodies.encode_running_info(info)
    assert b'{{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}:{' in text
    assert b'"droped":true' in text
    assert b'"consumeOKTPS":0.0' in text
    assert bodies.decode_running_info(text) == info


def test_direct_consumption():
    text = b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"spentTimeMills":3}'
    assert bodies.encode_consume_directly_result(bodies.ConsumeDirectlyResult(spent_time_mills=3)) == text
    failed = bodies.ConsumeDirectlyResult("CR_THROW_EXCEPTION", True, False, 5, "ValueError: é")
    assert loads(bodies.encode_consume_directly_result(failed)) == {
        "autoCommit": False,
        "consumeResult": "CR_THROW_EXCEPTION",
        "order": True,
        "remark": "ValueError: é",
        "spentTimeMills": 5,
    }
    for _, body in responses("consume-directly"):
        assert loads(body).keys() == loads(text).keys()
        assert loads(body)["consumeResult"] == "CR_SUCCESS"


# --- administration


def test_subscription_groups():
    for body in questions("create-group"):
        config = bodies.decode_subscription_group(body)
        assert config == bodies.SubscriptionGroupConfig("A_goldGx")
        assert bodies.encode_subscription_group(config) == body
    assert bodies.decode_subscription_group(b'{"groupName":"g"}') == bodies.SubscriptionGroupConfig("g")
    newer = bodies.SubscriptionGroupConfig("g", consume_message_orderly=True, consume_timeout_minute=15)
    assert bodies.decode_subscription_group(bodies.encode_subscription_group(newer)) == newer


def test_lists_and_tables():
    for version, body in responses("topic-consume-by-who"):
        groups = loads(body)["groupList"]
        assert groups == ["A_jg2"] or version == "5.3.3"  # which names the topic as a group
        assert bodies.encode_group_list(groups) == body
    for _, body in responses("kv-list"):
        assert bodies.encode_kv_table({"k1": "v1"}) == body
    assert bodies.decode_topic_list(bodies.encode_topic_list(["t1", "t2"])) == ["t1", "t2"]
    assert bodies.decode_topic_list(b'{"brokerAddr":"x"}') == []


@for_each(
    "text, settings",
    [
        ("a=1\nb=2\n", {"a": "1", "b": "2"}),
        ("# one\n ! two\n\n  a = 1 \r\nb:2\rc 3", {"a": "1 ", "b": "2", "c": "3"}),
        ("a\\=b\\:c\\ d=x=y:z", {"a=b:c d": "x=y:z"}),
        ("a=one\\\n   two\\\n\\\nb=1", {"a": "onetwob=1"}),
        ("a=x\\\\\nb=y", {"a": "x\\", "b": "y"}),
        ("a=\\u00e9\\t\\n\\uD83D\\uDE00\\q", {"a": "é\t\n😀q"}),
        ("empty=\nnothing\n=x", {"empty": "", "nothing": "", "": "x"}),
        ("a=1\na=2", {"a": "2"}),
        ("", {}),
    ],
)
def test_properties_follow_the_rules_of_java(text, settings):
    assert bodies.decode_java_properties(text.encode()) == settings
    with pytest.raises(ProtocolError):
        bodies.decode_java_properties(text.encode() + b"\na=\xff")


@pytest.mark.search
@given(st.dictionaries(st.text(), st.text()))
@settings(max_examples=trials(300), deadline=None)
def test_properties_survive_both_ways(settings):
    assert bodies.decode_java_properties(bodies.encode_java_properties(settings)) == settings
