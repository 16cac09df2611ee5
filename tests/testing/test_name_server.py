"""The name server: routes, clusters, settings."""

from __future__ import annotations

import pytest

from pyrocket_consumer.protocol import bodies, fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedCluster
from tests.testing.brokers import every_version
from tests.testing.raw_client import RawClient

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


def route(client: RawClient, topic: str = "T", version: int = 401, **fields: object) -> RemotingCommand:
    return client.call(ROUTE, {"topic": topic, **fields}, version=version)


@every_version
def test_routes_are_standard_json_when_asked_for(version: str) -> None:
    with EmbeddedCluster(version=version, slaves=1) as cluster, RawClient(cluster.name_server) as client:
        cluster.create_topic("T", queues=2)
        for answer, standard in (
            (route(client), True),
            (route(client, version=399), False),
            (route(client, version=399, acceptStandardJsonOnly=True), True),
        ):
            assert (b'{"0":"127' in answer.body, b'{0:"127' in answer.body) == (standard, not standard)
            assert (b"enableActingMaster" in answer.body) == (version != "4.9.7")
            found = bodies.decode_route("T", answer.body)
            assert [(data.broker_name, data.read_queues, data.perm) for data in found.queues] == [("broker-a", 2, 6)]
            assert found.brokers[0].addresses == {
                0: cluster.broker("broker-a").address,
                1: cluster.broker("broker-a-1").address,
            }
        unknown = route(client, "nowhere")
        assert unknown.code == 17
        assert (unknown.remark or "").startswith("No topic route info in name server for the topic: nowhere\nSee http")


@every_version
def test_an_unknown_code_is_answered_by_5_only(version: str) -> None:
    with EmbeddedCluster(version=version) as cluster, RawClient(cluster.name_server) as client:
        opaque = client.post(9999)
        if version == "4.9.7":
            assert client.is_silent()
        else:
            assert client.answer(opaque).code == 3
        assert route(client, "TBW102").code == 0
        with RawClient(cluster.broker("broker-a").address) as to_broker:
            assert to_broker.call(9999).code == 3
            assert to_broker.call(ROUTE, {"topic": "T"}).code == 3
            to_broker.post(9999, oneway=True)
            assert to_broker.is_silent()


def test_the_permission_of_a_broker_limits_that_of_a_topic() -> None:
    with EmbeddedCluster() as cluster, RawClient(cluster.name_server) as client:
        cluster.create_topic("T")
        cluster.broker("broker-a").update_config(brokerPermission=2)
        assert bodies.decode_route("T", route(client).body).queues[0].perm == 2
        cluster.broker("broker-a").update_config(brokerPermission=6)
        assert bodies.decode_route("T", route(client).body).queues[0].perm == 6


def test_a_deleted_topic_s_route_stays_until_it_is_deleted_here() -> None:
    with EmbeddedCluster() as cluster, RawClient(cluster.name_server) as client:
        cluster.create_topic("T")
        with RawClient(cluster.broker("broker-a").address) as to_broker:
            for topic in ("T", "never was"):
                assert to_broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}).code == 0
            assert to_broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "TBW102"}).code == 29
        assert route(client).code == 0
        assert client.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "T"}).code == 0
        assert route(client).code == 17
        cluster.create_topic("T")
        cluster.delete_topic("T")
        assert route(client).code == 17


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_clusters_and_topics(version: str) -> None:
    with EmbeddedCluster(brokers=2, version=version) as cluster, RawClient(cluster.name_server) as client:
        cluster.create_topic("T", brokers=["broker-b"])
        answer = client.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        assert b'{0:"127' in answer.body
        info = bodies.decode_cluster_info(answer.body)
        assert info.clusters == {"DefaultCluster": ("broker-a", "broker-b")}
        assert info.brokers["broker-b"].addresses == {0: cluster.broker("broker-b").address}
        topics = bodies.decode_topic_list(client.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)
        assert {"T", "TBW102"} <= set(topics)
        assert [data.broker_name for data in bodies.decode_route("T", route(client).body).queues] == ["broker-b"]


def test_settings_are_kept_by_namespace() -> None:
    with EmbeddedCluster() as cluster, RawClient(cluster.name_server) as client:

        def get(key: str) -> RemotingCommand:
            return client.call(RequestCode.GET_KV_CONFIG, {"namespace": "N", "key": key})

        listing = RequestCode.GET_KVLIST_BY_NAMESPACE
        assert client.call(listing, {"namespace": "N"}).code == 22
        client.call(RequestCode.PUT_KV_CONFIG, {"namespace": "N", "key": "k", "value": "wért"})
        assert get("k").fields == {"value": "wért"}
        assert (get("z").code, get("z").remark) == (22, "No config item, Namespace: N Key: z")
        assert fastjson.loads(client.call(listing, {"namespace": "N"}).body) == {"table": {"k": "wért"}}
        for _ in range(2):
            assert client.call(RequestCode.DELETE_KV_CONFIG, {"namespace": "N", "key": "k"}).code == 0
        assert client.call(listing, {"namespace": "N"}).body == b'{"table":{}}'


@pytest.mark.differs("registration")
def test_routes_come_and_go_with_brokers() -> None:
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("T")
        with RawClient(cluster.name_server) as client:
            cluster.broker("broker-a").kill()
            assert [data.broker_name for data in bodies.decode_route("T", route(client).body).queues] == ["broker-b"]
            cluster.broker("broker-b").stop()
            assert route(client).code == 17
            cluster.broker("broker-a").start()
            assert [data.broker_name for data in bodies.decode_route("T", route(client).body).queues] == ["broker-a"]
        address = cluster.name_server
        cluster.stop_name_server()
        with pytest.raises(ConnectionRefusedError):
            RawClient(address)
        cluster.start_name_server(register=False)
        assert cluster.name_server == address
        with RawClient(cluster.name_server) as client:
            assert route(client).code == 17
            cluster.name_server_node.register()
            assert route(client).code == 0


def test_all_name_servers_return_the_same_routes() -> None:
    with EmbeddedCluster(name_servers=2) as cluster:
        cluster.create_topic("T")
        first, second = cluster.name_server.split(";")
        with RawClient(first) as client, RawClient(second) as other:
            assert route(client).body == route(other).body
