"""The start offsets of a stream, and the queues that it reads. On embedded brokers, without Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pyrocket_consumer.errors import ConfigError, RouteNotFound
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.spark.stream_reader import RefusedStreamReader
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from tests.spark.spark_calls import data_source, read_batch, running, start_offsets, stored_at

CLUSTER = {"brokers": 2}
ORDERS = {"queues": 2, "count": 20}
SOON = {"requestTimeoutMs": 300, "retries": None}


def test_a_stream_starts_at_the_offsets_of_a_group(embedded):
    embedded.broker("broker-a").commit("app", "orders", {0: 3, 1: 0})
    embedded.broker("broker-b").commit("app", "orders", {1: 5})
    offsets = start_offsets(embedded, startingOffsets="group", consumerGroup="app")
    assert list(offsets.values()) == [3, 0, 0, 5]  # a queue without an offset of the group starts at its oldest message


def test_a_stream_starts_at_given_offsets(embedded):
    text = '{"orders": {"broker-a": {"0": 2, "1": -1}, "broker-b": -2}}'
    assert list(start_offsets(embedded, startingOffsets=text).values()) == [2, 5, 0, 0]


def test_given_offsets_must_cover_every_queue(embedded):
    lacks = "startingOffsets covers all queues .* lacks orders/broker-b/0, orders/broker-b/1"
    for given, reason in (("", lacks), (', "broker-b": -2, "broker-c": -2', "startingOffsets names orders/broker-c")):
        with pytest.raises(ConfigError, match=reason):
            start_offsets(embedded, startingOffsets=f'{{"orders": {{"broker-a": -2{given}}}}}')


@pytest.mark.parametrize("version", ["5.5.0", "4.9.7"])
def test_a_stream_starts_at_a_time(version):
    """Brokers before 5.1.1 return the nearest message, so the client checks store times."""
    with stored_at((1000, 2000, 2000, 5000), version=version) as cluster:
        offsets = {0: 0, 1000: 0, 1001: 1, 2001: 3, 4999: 3, 5001: 4}
        assert {at: start_offsets(cluster, startingTimestamp=at)["orders/broker-a/0"] for at in offsets} == offsets


def test_a_stream_starts_at_a_time_of_each_topic():
    with stored_at((1000, 2000, 3000), ("orders", "payments")) as cluster:
        times = '{"orders": 2000, "payments": "1970-01-01T00:00:09Z", "later": 5}'
        found = start_offsets(cluster, subscribe="orders,payments,later", startingTimestamp=times, **SOON)
        assert found == {"orders/broker-a/0": 1, "payments/broker-a/0": 3}


@pytest.mark.live
def test_only_assigned_queues_are_read(embedded):
    with running(embedded, assign='{"orders": {"broker-b": [1]}}', startingOffsets="earliest") as run:
        found = [(str(queue), offset) for queue, offset in run.batch()]
    assert found == [("orders/broker-b/1", offset) for offset in range(5)]


def test_an_assigned_queue_must_exist(embedded):
    there = "assign names orders/broker-b/2; there are orders/broker-a/0, .*orders/broker-b/1"
    with pytest.raises(ConfigError, match=there):
        start_offsets(embedded, assign='{"orders": {"broker-b": [1, 2]}}')


def test_a_topic_must_exist(embedded):
    """A broker that starts may have no topics for a moment. After that, a mistyped name is an error."""
    no_route = pytest.raises(RouteNotFound, match="no route for topic 'nowhere'")
    with EmbeddedCluster(auto_create_topics=False) as cluster, no_route:
        start_offsets(cluster, subscribe="nowhere", **SOON)
    with pytest.raises(RouteNotFound, match="no route for topic 'nowhere'"):
        read_batch(embedded, subscribe="nowhere")  # a batch fails even if brokers create topics on demand


@pytest.mark.live
def test_a_topic_created_on_demand_is_read_later(embedded, caplog):
    with running(embedded, subscribe="orders,later", **SOON) as run:
        assert run.batch() == []
        assert "topic=later does not exist yet" in caplog.text
        embedded.send("later", count=4)
        run.reader._offsets.expire_discovery()
        assert {(queue.topic, offset) for queue, offset in run.batch()} == {("later", 0)}


def test_a_stream_waits_for_a_topic_while_no_broker_is_up():
    """Its broker may start between the request for the topic and the one for the brokers."""
    gate = Gate()
    with EmbeddedCluster(auto_create_topics=False) as cluster, ThreadPoolExecutor(1) as pool:
        names = cluster.name_server_nodes[0]
        cluster.create_topic("orders", queues=1)
        cluster.broker("broker-a").stop()
        try:
            first = pool.submit(start_offsets, cluster, **SOON)
            names.wait_for(RequestCode.GET_ROUTEINFO_BY_TOPIC, count=8)
            assert not first.done()
            names.on(RequestCode.GET_BROKER_CLUSTER_INFO, gate)
            gate.wait_held()
            cluster.broker("broker-a").start()
            gate.open()
            assert "orders" in str(first.result(30))
        finally:
            gate.open()


def test_a_pattern_matches_whole_names_and_no_system_topics(embedded):
    for name in ("orders-2", "more-orders", "%RETRY%orders", "%DLQ%orders"):
        embedded.create_topic(name, queues=1)
    found = start_offsets(embedded, subscribePattern="orders.*|.*RETRY.*|.*DLQ.*|RMQ.*|rmq.*|SCHEDULE.*")
    assert {name.split("/")[0] for name in found} == {"orders", "orders-2"}


@pytest.mark.live
@pytest.mark.parametrize(
    "chosen", [{"subscribe": "mine"}, {"subscribePattern": "mi.."}, {"assign": '{"mine": {"broker-a": [0]}}'}]
)
def test_a_namespace_prefixes_names_at_brokers_only(embedded, chosen):
    for name in ("mine", "ns%mine", "other%mine"):
        embedded.create_topic(name, queues=1, brokers=["broker-a"])
    embedded.send("ns%mine", count=3, broker_name="broker-a")
    options = {"namespace": "ns", "startingOffsets": '{"mine": -2}', "consumerGroup": "app", **chosen}
    with running(embedded, **options) as run:
        found = run.batch()
        assert run.batch() is None
        assert run.planned_ends() == {"ns%mine/broker-a/0": 3}
        embedded.wait_until(lambda: embedded.committed("ns%app", "ns%mine") == {0: 3}, 30)
    assert [(queue.topic, offset) for queue, offset in found] == [("mine", 0), ("mine", 1), ("mine", 2)]


def test_the_broker_checks_an_sql_filter_first(embedded):
    refused = r"sqlFilter='a > 1' is refused by broker broker-\w: .*filter message by SQL92"
    with pytest.raises(ConfigError, match=refused):
        start_offsets(embedded, sqlFilter="a > 1")


def test_wrong_options_are_raised_at_the_first_call(embedded):
    """Spark adds a second error to an error of `streamReader()` itself."""
    for wrong, value in {"endingOffsets": "latest", "pushFilters": True}.items():
        reader = data_source(embedded, subscribe="orders", **{wrong: value}).streamReader(None)
        assert isinstance(reader, RefusedStreamReader)
        for ask in (reader.getDefaultReadLimit, reader.initialOffset, reader.latestOffset):
            with pytest.raises(ConfigError, match=f"{wrong}.* is for batch reads"):
                ask()
