"""Routes of topics and addresses of brokers, as name servers send them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import BrokerData, QueueData, TopicRoute
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.json_object import JsonObject, read_number, read_object, read_text

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
