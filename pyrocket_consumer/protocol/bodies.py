"""Bodies of requests and responses: `encode_x(value) -> bytes` and `decode_x(bytes) -> value`.

Every decoder raises only ProtocolError for bytes that it cannot read. Like Java, it ignores unknown fields and accepts
numbers as text. Source: the *Body, *Data and *Info classes of remoting and common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import BrokerData, MessageQueue, QueueData, Subscription, TopicRoute
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.fastjson import (
    JsonObject,
    java_field,
    read_number,
    read_object,
    read_queue,
    read_record,
    read_text,
    write_record,
)
from pyrocket_consumer.protocol.subscription import TAG, tag_hash


def subscription_object(subscription: Subscription) -> dict[str, Any]:
    tags = sorted(subscription.tags)
    return {
        "classFilterMode": False,
        "codeSet": [tag_hash(tag) for tag in tags],
        "expressionType": subscription.expression_type,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": tags,
        "topic": subscription.topic,
    }


def read_subscription(found: JsonObject) -> Subscription:
    return Subscription(
        found.text("topic"),
        found.text("subString"),
        frozenset(found.texts("tagsSet")),
        found.text("expressionType", TAG),
        found.number("subVersion"),
    )


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group in a client's heartbeat."""

    group: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: tuple[Subscription, ...] = ()
    unit_mode: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatData:
    """The content of a heartbeat: a client, its consumer groups with their subscriptions, and its producer groups."""

    client_id: str
    consumers: tuple[ConsumerData, ...] = ()
    producers: tuple[str, ...] = ()


def encode_heartbeat(data: HeartbeatData) -> bytes:
    """Return the body of a full (not "V2") heartbeat, which every broker accepts. Source: HeartbeatData."""
    return fastjson.dumps(
        {
            "clientID": data.client_id,
            "consumerDataSet": [
                {
                    "consumeFromWhere": each.consume_from_where,
                    "consumeType": each.consume_type,
                    "groupName": each.group,
                    "messageModel": each.message_model,
                    "subscriptionDataSet": [subscription_object(one) for one in each.subscriptions],
                    "unitMode": each.unit_mode,
                }
                for each in data.consumers
            ],
            "producerDataSet": [{"groupName": group} for group in data.producers],
        }
    )


def decode_heartbeat(body: bytes) -> HeartbeatData:
    """Return the content of a heartbeat. Names of enum values stay unchanged."""
    found = read_object(body, "heartbeat")
    consumers = tuple(
        ConsumerData(
            each.text("groupName"),
            each.text("consumeType"),
            each.text("messageModel"),
            each.text("consumeFromWhere"),
            tuple(read_subscription(one) for one in each.objects("subscriptionDataSet")),
            each.boolean("unitMode"),
        )
        for each in found.objects("consumerDataSet")
    )
    producers = tuple(each.text("groupName") for each in found.objects("producerDataSet"))
    return HeartbeatData(found.text("clientID"), consumers, producers)


def encode_consumer_list(client_ids: Iterable[str]) -> bytes:
    """Return the body that lists a group's members."""
    return fastjson.dumps({"consumerIdList": list(client_ids)})


def decode_consumer_list(body: bytes) -> list[str]:
    """Return the client ids of a group's members, unordered. A client with two connections occurs twice."""
    return read_object(body, "consumer list").texts("consumerIdList")


@dataclass(frozen=True, slots=True)
class CheckClientConfig:
    """A subscription for a broker to check."""

    client_id: str
    group: str
    subscription: Subscription


def encode_check_client_config(check: CheckClientConfig) -> bytes:
    """Return the body. Source: CheckClientRequestBody."""
    subscription = subscription_object(check.subscription)
    return fastjson.dumps({"clientId": check.client_id, "group": check.group, "subscriptionData": subscription})


def decode_check_client_config(body: bytes) -> CheckClientConfig:
    """Return the subscription to check."""
    found = read_object(body, "check client config")
    subscription = read_subscription(JsonObject(found.table("subscriptionData"), "check client config"))
    return CheckClientConfig(found.text("clientId"), found.text("group"), subscription)


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection of a group's member, as the broker reports it."""

    client_id: str = ""
    client_addr: str = ""
    language: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerConnection:
    """The connections of a group, and the group's settings and subscriptions."""

    connections: tuple[Connection, ...] = ()
    consume_type: str = ""
    message_model: str = ""
    consume_from_where: str = ""
    subscriptions: tuple[Subscription, ...] = ()


def encode_consumer_connection(value: ConsumerConnection) -> bytes:
    """Return the body. Source: ConsumerConnection."""
    return fastjson.dumps(
        {
            "connectionSet": [write_record(each) for each in value.connections],
            "consumeFromWhere": value.consume_from_where,
            "consumeType": value.consume_type,
            "messageModel": value.message_model,
            "subscriptionTable": {each.topic: subscription_object(each) for each in value.subscriptions},
        }
    )


def decode_consumer_connection(body: bytes) -> ConsumerConnection:
    """Return the connections of a group."""
    found = read_object(body, "consumer connection")
    subscriptions = found.table("subscriptionTable").values()
    return ConsumerConnection(
        tuple(read_record(Connection, each, "connection") for each in found.objects("connectionSet")),
        found.text("consumeType"),
        found.text("messageModel"),
        found.text("consumeFromWhere"),
        tuple(read_subscription(JsonObject(each, "subscriptionTable")) for each in subscriptions),
    )


@dataclass(frozen=True, slots=True)
class LockRequest:
    """Queues that a client wants to lock or unlock."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


def encode_lock_request(lock: LockRequest) -> bytes:
    """Return the body of a lock or unlock request. Source: LockBatchRequestBody, UnlockBatchRequestBody."""
    return fastjson.dumps({"clientId": lock.client_id, "consumerGroup": lock.group, "mqSet": sorted(lock.queues)})


def decode_lock_request(body: bytes) -> LockRequest:
    """Return the queues to lock or unlock."""
    found = read_object(body, "lock request")
    return LockRequest(found.text("consumerGroup"), found.text("clientId"), frozenset(found.queues("mqSet")))


def encode_lock_response(queues: Iterable[MessageQueue]) -> bytes:
    """Return the body with the locked queues. Source: LockBatchResponseBody."""
    return fastjson.dumps({"lockOKMQSet": sorted(queues)})


def decode_lock_response(body: bytes) -> set[MessageQueue]:
    """Return the queues that are now locked for this client."""
    return set(read_object(body, "lock response").queues("lockOKMQSet"))


@dataclass(frozen=True, slots=True)
class AssignmentRequest:
    """The request to a 5.x broker to allocate the queues of a topic."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


@dataclass(frozen=True, slots=True)
class MessageQueueAssignment:
    """A queue that the broker allocated, and whether to pull or pop from it."""

    queue: MessageQueue
    mode: str = "PULL"


def decode_assignment_request(body: bytes) -> AssignmentRequest:
    """Return the request."""
    return read_record(AssignmentRequest, read_object(body, "assignment request"), "assignment request")


def encode_assignments(assignments: Iterable[MessageQueueAssignment] | None) -> bytes:
    """Return the body. None means that no assignment is possible, so the body has no list."""
    if assignments is None:
        return b"{}"
    listed = [{"messageQueue": each.queue, "mode": each.mode} for each in assignments]
    return fastjson.dumps({"messageQueueAssignments": listed})


def _offset(value: object, what: str) -> int:
    return read_number(value, "the offset of a queue", what)


def encode_offset_table(offsets: Mapping[MessageQueue, int], as_list: bool = False) -> bytes:
    """Return the body of a reset (220) or of the response to 222. `as_list` selects the format for C++ admins."""
    if as_list:
        listed = [
            {"brokerName": queue.broker_name, "offset": offset, "queueId": queue.queue_id, "topic": queue.topic}
            for queue, offset in offsets.items()
        ]
        return fastjson.dumps({"offsetTable": listed})
    return fastjson.dumps({"offsetTable": dict(offsets)})


def decode_offset_table(body: bytes) -> dict[MessageQueue, int]:
    """Return the offsets of a reset from a map, a list of objects, or a list of pairs; no offsets from an empty body.

    Source: ResetOffsetBody, ResetOffsetBodyForC.
    """
    if not body:
        return {}
    value = fastjson.loads(body)
    found = JsonObject(value, "offset table")
    if not isinstance(value.get("offsetTable"), list):
        return found.queue_table("offsetTable", _offset)
    offsets = {}
    for item in found.items("offsetTable"):
        if isinstance(item, list) and len(item) == 2:
            offsets[read_queue(item[0], "offset table")] = _offset(item[1], "offset table")
        else:
            offsets[read_queue(item, "offset table")] = JsonObject(item, "offset table").number("offset")
    return offsets


def encode_consumer_status(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Return a member's response to 221: its offsets. Source: GetConsumerStatusBody."""
    return fastjson.dumps({"consumerTable": {}, "messageQueueTable": dict(offsets)})


def decode_consumer_status(body: bytes) -> dict[MessageQueue, int]:
    """Return the offsets in a member's response to 221."""
    return read_object(body, "consumer status").queue_table("messageQueueTable", _offset)


def encode_consumer_status_table(members: Mapping[str, Mapping[MessageQueue, int]]) -> bytes:
    """Return a broker's response to 223: the offsets of each member that responded."""
    return fastjson.dumps({"consumerTable": dict(members), "messageQueueTable": {}})


def decode_consumer_status_table(body: bytes) -> dict[str, dict[MessageQueue, int]]:
    """Return the offsets of each member, by client id."""
    members = read_object(body, "consumer status").table("consumerTable")
    found = JsonObject(members, "consumer status")
    return {str(client_id): found.queue_table(client_id, _offset) for client_id in members}


@dataclass(frozen=True, slots=True)
class QueueConsumeStats:
    """The progress of a group in one queue. Only 5.x sends `pull_offset`."""

    broker_offset: int = 0
    consumer_offset: int = 0
    last_timestamp: int = 0
    pull_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """The progress of a group in its queues. An offset that was never committed is 0."""

    queues: Mapping[MessageQueue, QueueConsumeStats]
    consume_tps: float = 0.0


def encode_consume_stats(stats: ConsumeStats) -> bytes:
    """Return the body. Source: ConsumeStats, OffsetWrapper."""
    table = {queue: write_record(each) for queue, each in stats.queues.items()}
    return fastjson.dumps({"consumeTps": stats.consume_tps, "offsetTable": table})


def decode_consume_stats(body: bytes) -> ConsumeStats:
    """Return the progress of a group."""
    found = read_object(body, "consume stats")
    queues = found.queue_table("offsetTable", lambda value, what: read_record(QueueConsumeStats, value, what))
    return ConsumeStats(queues, found.float_number("consumeTps"))


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The range of messages in one queue."""

    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """The ranges of messages in a topic's queues. Only newer 5.x sends `topic_put_tps`."""

    queues: Mapping[MessageQueue, QueueStats]
    topic_put_tps: float | None = None


def encode_topic_stats(stats: TopicStats) -> bytes:
    """Return the body. Source: TopicStatsTable, TopicOffset."""
    value: dict[str, Any] = {"offsetTable": {queue: write_record(each) for queue, each in stats.queues.items()}}
    if stats.topic_put_tps is not None:
        value["topicPutTps"] = stats.topic_put_tps
    return fastjson.dumps(value)


def decode_topic_stats(body: bytes) -> TopicStats:
    """Return the ranges of messages in a topic's queues."""
    found = read_object(body, "topic stats")
    queues = found.queue_table("offsetTable", lambda value, what: read_record(QueueStats, value, what))
    return TopicStats(queues, found.float_number("topicPutTps") if found.has("topicPutTps") else None)


MAX_ROUTE_QUEUES = 1 << 16
"""The most queues of a topic in a route. A larger number means that the route is damaged."""

MAX_ADDRESSES = 10_000
"""The most broker addresses in a route."""


def decode_route(topic: str, body: bytes) -> TopicRoute:
    """Return the route of `topic`. Source: TopicRouteData."""
    found = read_object(body, "route")
    queues, all_read, all_write = [], 0, 0
    for each in found.objects("queueDatas"):
        read, write = each.number("readQueueNums"), each.number("writeQueueNums")
        all_read, all_write = all_read + read, all_write + write
        if min(read, write) < 0 or max(all_read, all_write) > MAX_ROUTE_QUEUES:
            raise ProtocolError(
                f"route: {read} queues to read and {write} to write; 0 to {MAX_ROUTE_QUEUES} are possible"
            )
        queues.append(QueueData(each.text("brokerName"), read, write, each.number("perm"), each.number("topicSysFlag")))
    brokers = _brokers(found.items("brokerDatas"), "route.brokerDatas")
    order_conf = found.optional_text("orderTopicConf")
    if order_conf is not None:
        _check_order(order_conf)
    return TopicRoute(topic, tuple(queues), tuple(brokers), order_conf)


def _check_order(order_conf: str) -> None:
    """Raise ProtocolError if the order configuration of a topic names too many queues."""
    counts = [count for _, _, count in (part.rpartition(":") for part in order_conf.split(";")) if count.isdecimal()]
    if max(map(len, counts), default=0) > 9 or sum(map(int, counts)) > MAX_ROUTE_QUEUES:
        raise ProtocolError(f"route: orderTopicConf names more than {MAX_ROUTE_QUEUES} queues: {order_conf!r:.200}")


def _brokers(items: Iterable[Any], what: str) -> Iterator[BrokerData]:
    left = MAX_ADDRESSES
    for item in items:
        found = JsonObject(item, what)
        left -= 1 + max(0, len(found.table("brokerAddrs")) - 1)
        if left < 0:
            raise ProtocolError(f"{what}: more than {MAX_ADDRESSES} addresses of brokers")
        yield _broker_data(found)


def encode_route(route: TopicRoute, standard_json: bool = True, acting_master: bool | None = None) -> bytes:
    """Return the body of a route. Without `standard_json`, broker ids are unquoted keys, as in old name servers.

    `acting_master` is the 5.x field enableActingMaster of every broker; None omits it, as 4.9 does.
    """
    value: dict[str, Any] = {
        "brokerDatas": [_broker_object(broker, standard_json, acting_master) for broker in route.brokers],
        "filterServerTable": {},
    }
    if route.order_conf is not None:
        value["orderTopicConf"] = route.order_conf
    value["queueDatas"] = [
        {
            "brokerName": data.broker_name,
            "perm": data.perm,
            "readQueueNums": data.read_queues,
            "topicSysFlag": data.topic_sys_flag,
            "writeQueueNums": data.write_queues,
        }
        for data in route.queues
    ]
    return fastjson.dumps(value)


def _broker_data(found: JsonObject) -> BrokerData:
    addresses = {
        read_number(broker_id, "a broker id", "brokerAddrs"): read_text(address, "an address", "brokerAddrs")
        for broker_id, address in found.table("brokerAddrs").items()
    }
    return BrokerData(found.text("cluster"), found.text("brokerName"), addresses)


def _broker_object(broker: BrokerData, standard_json: bool, acting_master: bool | None) -> dict[str, Any]:
    value: dict[str, Any] = {
        "brokerAddrs": {
            str(broker_id) if standard_json else broker_id: address for broker_id, address in broker.addresses.items()
        },
        "brokerName": broker.broker_name,
        "cluster": broker.cluster,
    }
    if acting_master is not None:
        value["enableActingMaster"] = acting_master
    return value


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """All brokers that a name server knows, by broker name, and the broker names of each cluster."""

    brokers: Mapping[str, BrokerData]
    clusters: Mapping[str, tuple[str, ...]]


def decode_cluster_info(body: bytes) -> ClusterInfo:
    """Return the brokers and clusters. Source: ClusterInfo."""
    found = read_object(body, "cluster info")
    table = found.table("brokerAddrTable")
    brokers = dict(zip(map(str, table), _brokers(table.values(), "brokerAddrTable"), strict=True))
    clusters = JsonObject(found.table("clusterAddrTable"), "clusterAddrTable")
    return ClusterInfo(brokers, {str(name): tuple(clusters.texts(name)) for name in found.table("clusterAddrTable")})


def encode_cluster_info(info: ClusterInfo, acting_master: bool | None = None) -> bytes:
    """Return the body. Its broker ids are always unquoted keys."""
    brokers = {name: _broker_object(broker, False, acting_master) for name, broker in info.brokers.items()}
    return fastjson.dumps({"brokerAddrTable": brokers, "clusterAddrTable": dict(info.clusters)})


@dataclass(frozen=True, slots=True)
class QueueRunningInfo:
    """The state of one process queue. Source: ProcessQueueInfo."""

    commit_offset: int = -1
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mib: int = java_field("cachedMsgSizeInMiB", 0)
    transaction_msg_min_offset: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_count: int = 0
    locked: bool = False
    try_unlock_times: int = 0
    last_lock_timestamp: int = 0
    dropped: bool = java_field("droped", False)
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """The consumption of a topic: times in milliseconds, rates per second. Source: ConsumeStatus."""

    pull_rt: float = java_field("pullRT", 0.0)
    pull_tps: float = java_field("pullTPS", 0.0)
    consume_rt: float = java_field("consumeRT", 0.0)
    consume_ok_tps: float = java_field("consumeOKTPS", 0.0)
    consume_failed_tps: float = java_field("consumeFailedTPS", 0.0)
    consume_failed_msgs: int = 0


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """The running info of a consumer. Admin tools need PROP_CONSUME_TYPE and PROP_CONSUMER_START_TIMESTAMP."""

    properties: Mapping[str, str] = field(default_factory=dict)
    subscriptions: tuple[Subscription, ...] = ()
    queues: Mapping[MessageQueue, QueueRunningInfo] = field(default_factory=dict)
    status: Mapping[str, TopicStatus] = field(default_factory=dict)
    jstack: str | None = None


def encode_running_info(info: RunningInfo) -> bytes:
    """Return the body. Source: ConsumerRunningInfo."""
    value: dict[str, Any] = {}
    if info.jstack is not None:
        value["jstack"] = info.jstack
    value["mqTable"] = {queue: write_record(each) for queue, each in info.queues.items()}
    value["properties"] = dict(info.properties)
    value["statusTable"] = {topic: write_record(each) for topic, each in info.status.items()}
    value["subscriptionSet"] = [subscription_object(each) for each in info.subscriptions]
    return fastjson.dumps(value)


def decode_running_info(body: bytes) -> RunningInfo:
    """Return the running info of a consumer."""
    found = read_object(body, "running info")
    return RunningInfo(
        found.text_table("properties"),
        tuple(read_subscription(each) for each in found.objects("subscriptionSet")),
        found.queue_table("mqTable", lambda value, what: read_record(QueueRunningInfo, value, what)),
        {
            str(topic): read_record(TopicStatus, each, "statusTable")
            for topic, each in found.table("statusTable").items()
        },
        found.optional_text("jstack"),
    )


@dataclass(frozen=True, slots=True)
class ConsumeDirectlyResult:
    """The result of a message consumed on demand: CR_SUCCESS, CR_LATER, CR_THROW_EXCEPTION …"""

    consume_result: str = "CR_SUCCESS"
    order: bool = False
    auto_commit: bool = True
    spent_time_mills: int = 0
    remark: str | None = None


def encode_consume_directly_result(result: ConsumeDirectlyResult) -> bytes:
    """Return the body. Source: ConsumeMessageDirectlyResult."""
    return fastjson.dumps(write_record(result))


@dataclass(frozen=True, slots=True)
class SubscriptionGroupConfig:
    """The settings of a consumer group at a broker. Those that are None are not sent, because 4.9 has fewer."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool | None = None
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    consume_timeout_minute: int | None = None
    group_sys_flag: int | None = None


def encode_subscription_group(config: SubscriptionGroupConfig) -> bytes:
    """Return the body. Source: SubscriptionGroupConfig."""
    return fastjson.dumps(write_record(config))


def decode_subscription_group(body: bytes) -> SubscriptionGroupConfig:
    """Return a group's settings. Missing ones have Java's defaults."""
    return read_record(SubscriptionGroupConfig, read_object(body, "subscription group"), "subscription group")


def decode_subscription_groups(body: bytes) -> dict[str, SubscriptionGroupConfig]:
    """Return all groups of a broker, by name. Source: SubscriptionGroupWrapper."""
    table = read_object(body, "subscription groups").table("subscriptionGroupTable")
    return {
        str(name): read_record(SubscriptionGroupConfig, value, "subscription group") for name, value in table.items()
    }


def encode_group_list(groups: Iterable[str]) -> bytes:
    """Return the body that lists consumer groups."""
    return fastjson.dumps({"groupList": list(groups)})


def encode_topic_list(topics: Iterable[str]) -> bytes:
    """Return the body that lists topics."""
    return fastjson.dumps({"topicList": list(topics)})


def decode_topic_list(body: bytes) -> list[str]:
    """Return topics."""
    return read_object(body, "topic list").texts("topicList")


def encode_kv_table(table: Mapping[str, str]) -> bytes:
    """Return the body with the keys of a namespace."""
    return fastjson.dumps({"table": dict(table)})


_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_PROPERTY = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)


def encode_java_properties(settings: Mapping[str, str]) -> bytes:
    """Return `key=value` lines that java.util.Properties can read."""
    lines = []
    for name, value in settings.items():
        escaped_value = _escape(value)
        if escaped_value.startswith(" "):
            escaped_value = "\\" + escaped_value
        lines.append(_escape(name, " :=#!") + "=" + escaped_value + "\n")
    return "".join(lines).encode()


def _escape(text: str, marked: str = "") -> str:
    text = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    text = text.replace("\f", "\\f")
    return "".join("\\" + each if each in marked else each for each in text) if marked else text


def decode_java_properties(body: bytes) -> dict[str, str]:
    r"""Return the settings in `key=value` lines: comments, `\` escapes and continued lines as in Java.

    Raises:
        ProtocolError: the text is not UTF-8.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"properties are not UTF-8: {error}") from error
    settings = {}
    lines = iter(re.split(r"\r\n|\r|\n", text))
    for line in lines:
        line = line.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        pieces = [line]
        while (
            len(pieces[-1]) - len(pieces[-1].rstrip("\\"))
        ) % 2:  # an odd number of backslashes at the end continues the line
            pieces[-1] = pieces[-1][:-1]
            pieces.append(next(lines, "").lstrip(" \t\f"))
        found = _PROPERTY.match("".join(pieces))
        assert found is not None  # it matches any text
        settings[_unescape(found[1])] = _unescape(found[2])
    return settings


def _unescape(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code, code)

    if "\\" not in text:
        return text
    joined = _ESCAPED.sub(plain, text)
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # \uD83D\uDE00 is one character
