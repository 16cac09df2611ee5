"""The name server: routes, clusters and key-value settings. Source: DefaultRequestProcessor, RouteInfoManager."""

from __future__ import annotations

from pyrocket_consumer.model import BrokerData, QueueData, TopicRoute
from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import (
    DeleteKvConfigHeader,
    DeleteTopicInNameServerHeader,
    GetKvConfigHeader,
    GetKvListHeader,
    GetRouteInfoHeader,
    PutKvConfigHeader,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.broker import Broker
from pyrocket_consumer.testing.config import Release
from pyrocket_consumer.testing.node import Connection, Node, Refused

_STANDARD_JSON_SINCE = 401


class NameServer(Node):
    """Stores the brokers of each topic, as they registered. Loses all routes when it stops."""

    def __init__(self, release: Release) -> None:
        super().__init__(release)
        self._brokers: dict[str, BrokerData] = {}
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._settings: dict[str, dict[str, str]] = {}
        self._handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self.route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.cluster_info,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topic_list,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.PUT_KV_CONFIG: self.put_setting,
            RequestCode.GET_KV_CONFIG: self.get_setting,
            RequestCode.DELETE_KV_CONFIG: self.delete_setting,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.settings,
        }

    # --- registration by brokers

    def register(self, broker: Broker) -> None:
        """Store a broker's address and, if it is a master, its topics.

        Topics that it no longer has stay until they are deleted here.
        """
        config, known = broker.config, self._brokers.get(broker.name)
        addresses = {number: at for number, at in known.addresses.items() if at != broker.address} if known else {}
        addresses[config.broker_id] = broker.address
        data = BrokerData(config.broker_cluster_name, broker.name, dict(sorted(addresses.items())))
        self._brokers[broker.name] = data
        for topic in () if broker.is_slave else broker.topics:
            perm = topic.perm if config.broker_permission == 6 else topic.perm & config.broker_permission
            queues = QueueData(broker.name, topic.read_queues, topic.write_queues, perm, topic.sys_flag)
            self._topics.setdefault(topic.name, {})[broker.name] = queues

    def unregister(self, broker_name: str, address: str) -> None:
        """Remove a stopped broker from all routes. With the last broker of a name, remove its topics, too."""
        known = self._brokers.get(broker_name)
        if known is None:
            return
        addresses = {its_id: its_address for its_id, its_address in known.addresses.items() if its_address != address}
        if addresses:
            self._brokers[broker_name] = BrokerData(known.cluster, broker_name, addresses)
            return
        del self._brokers[broker_name]
        for topic in list(self._topics):
            self._topics[topic].pop(broker_name, None)
            if not self._topics[topic]:
                del self._topics[topic]

    def forget(self) -> None:
        """Lose all routes, as a restart does. Settings stay on disk."""
        self._brokers.clear()
        self._topics.clear()

    def forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)

    def topic_route(self, topic: str) -> TopicRoute | None:
        """Return the route of a topic, or None if no broker has it."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        brokers = tuple(self._brokers[name] for name in sorted(queues) if name in self._brokers)
        return TopicRoute(topic, tuple(queues[name] for name in sorted(queues)), brokers)

    # --- requests of clients

    def handle(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        if command.code not in self._handlers and not self.release.name_server_refuses_unknown_code:
            return None
        return super().handle(command, connection)

    def route(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetRouteInfoHeader.from_fields(command.fields)
        route = self.topic_route(header.topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{self.release.faq}"
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        wants_standard = command.fields.get("acceptStandardJsonOnly", "").lower() == "true"
        standard = wants_standard or command.version >= _STANDARD_JSON_SINCE
        return command.make_response(body=bodies.encode_route(route, standard, self._acting_master()))

    def _acting_master(self) -> bool | None:
        return False if self.release.routes_have_acting_master else None

    def cluster_info(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        clusters: dict[str, tuple[str, ...]] = {}
        for broker in self._brokers.values():
            clusters[broker.cluster] = (*clusters.get(broker.cluster, ()), broker.broker_name)
        info = bodies.ClusterInfo(dict(self._brokers), clusters)
        return command.make_response(body=bodies.encode_cluster_info(info, self._acting_master()))

    def topic_list(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        return command.make_response(body=bodies.encode_topic_list(self._topics))

    def delete_topic(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        self.forget_topic(DeleteTopicInNameServerHeader.from_fields(command.fields).topic)
        return command.make_response()

    def put_setting(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = PutKvConfigHeader.from_fields(command.fields)
        self._settings.setdefault(header.namespace, {})[header.key] = header.value
        return command.make_response()

    def get_setting(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetKvConfigHeader.from_fields(command.fields)
        value = self._settings.get(header.namespace, {}).get(header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            raise Refused(ResponseCode.QUERY_NOT_FOUND, remark)
        return command.make_response(fields={"value": value})

    def delete_setting(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = DeleteKvConfigHeader.from_fields(command.fields)
        self._settings.get(header.namespace, {}).pop(header.key, None)
        return command.make_response()

    def settings(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        namespace = GetKvListHeader.from_fields(command.fields).namespace
        table = self._settings.get(namespace)
        if table is None:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return command.make_response(body=bodies.encode_kv_table(table))
