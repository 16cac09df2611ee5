"""Membership: heartbeats, lost and returning brokers."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from pyrocket_consumer import BrokerError, ConnectError, ConnectionLost, PermissionDenied, RequestTimeout, RocketError
from pyrocket_consumer.protocol.bodies import decode_heartbeat
from pyrocket_consumer.protocol.codes import RequestCode, version_ordinal
from pyrocket_consumer.protocol.command import UnregisterClientHeader
from pyrocket_consumer.testing import Gate, answer, delay, drop
from tests.cluster.conftest import RecordedCalls, consumer_of, find_route, join
from tests.consuming import until

HEARTBEAT = RequestCode.HEART_BEAT
UNREGISTER = RequestCode.UNREGISTER_CLIENT


@pytest.fixture
def with_slaves(cluster_of):
    """Two brokers with a slave each."""
    return cluster_of(brokers=2, slaves=1)


@pytest.fixture
def two_brokers(cluster_of):
    return cluster_of(brokers=2)


def watch(client, *events):
    """Record events from now on."""
    calls = [RecordedCalls() for _ in events]
    for event, each in zip(events, calls, strict=True):
        setattr(client.events, event, each)
    return calls


def beat(client, broker):
    return client.run(client.membership.heartbeat_broker(broker.address), 30)


def nodes_with_heartbeat(cluster):
    return {(node.name, node.broker_id) for node in cluster.nodes if node.requests(HEARTBEAT)}


def test_a_consumer_is_known_to_slaves_and_a_producer_to_masters(with_slaves, connect):
    assert join(connect(with_slaves), producer="maker") == 2
    assert nodes_with_heartbeat(with_slaves) == {("broker-a", 0), ("broker-b", 0)}
    client = connect(with_slaves)
    assert join(client, consumer="app") == 4
    known = {node.name for node in with_slaves.nodes if node.members("app") == [client.client_id]}
    assert known == {"broker-a", "broker-b"}
    assert nodes_with_heartbeat(with_slaves) == {("broker-a", 0), ("broker-a", 1), ("broker-b", 0), ("broker-b", 1)}


def test_heartbeats_are_sent_regularly_but_not_without_groups(broker, embedded, connect):
    client = connect(embedded, heartbeat_interval_s=0.05)
    assert join(client) == 0
    address = client.routes.address("broker-a")
    connection = client.run(client.membership.connect(address), 30)
    assert client.membership.find_connection(address) is connection
    assert broker.requests(HEARTBEAT) == []
    join(client, consumer="app")
    broker.wait_for(HEARTBEAT, 4)


def test_a_heartbeat_contains_all_groups_and_requests_no_v2(broker, client):
    join(client, consumer="app", producer="maker")
    body = broker.requests(HEARTBEAT)[-1].command.body
    calls = decode_heartbeat(body)
    assert (calls.client_id, calls.producers) == (client.client_id, ("maker",))
    assert [consumer.group for consumer in calls.consumers] == ["app"]
    assert (json.loads(body).get("heartbeatFingerprint", 0), json.loads(body).get("withoutSub", False)) == (0, False)


@pytest.mark.parametrize("version", ["4.9.7", "5.1.4", "5.5.0"])
def test_a_heartbeats_response_contains_the_brokers_version(cluster_of, connect, version):
    cluster = cluster_of(version=version)
    client, address = connect(cluster), cluster.broker("broker-a").address
    assert client.membership.versions.get(address) is None
    join(client, consumer="app")
    assert client.membership.versions.get(address) == version_ordinal(*map(int, version.split(".")))


def test_a_heartbeat_to_one_broker_raises_its_error(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=1)
    join(client, consumer="app")
    refusal = answer(1, "CODE: 1 org.apache.rocketmq.acl.common.AclException: No accessKey is configured")
    for fault, error in ((drop, RequestTimeout), (refusal, PermissionDenied)):
        broker.on(HEARTBEAT, fault)
        with pytest.raises(error):
            beat(client, broker)
    broker.stop()
    with pytest.raises((ConnectionLost, ConnectError)):  # ConnectionLost if the client has not noticed yet
        beat(client, broker)


def test_a_registered_connection_has_had_one_heartbeat(client, broker):
    async def pullers(count):
        client.membership.add_consumer("app", consumer_of("app"))
        await client.routes.get("orders")
        assert client.membership.find_connection(broker.address) is None
        return await asyncio.gather(*(client.membership.connect(broker.address) for _ in range(count)))

    broker.on(HEARTBEAT, answer(16, "no permission"), times=None)
    with pytest.raises(PermissionDenied):
        client.run(pullers(1), 30)
    assert client.membership.find_connection(broker.address) is None
    broker.clear_faults()
    broker.forget_requests()
    broker.on(HEARTBEAT, delay(0.1))
    connections = client.run(pullers(8), 30)
    assert len(set(connections)) == 1
    assert client.membership.find_connection(broker.address) is connections[0]
    assert len(broker.requests(HEARTBEAT)) == 1
    assert broker.members("app") == [client.client_id]


def test_a_link_leads_to_the_master_if_there_is_one(with_slaves, connect):
    client, master = connect(with_slaves), with_slaves.broker("broker-a")
    assert join(client, consumer="app") == 4
    link = client.link("broker-a")
    assert link.connection is client.membership.find_connection(master.address) is link.connection
    for step, broker_id in ((master.kill, 1), (master.start, 0)):
        step()
        find_route(client, refresh=True)
        until(lambda: link.connection is not None, "a connection")
        addresses = client.routes.all_brokers["broker-a"]
        assert (link.address, link.connection.address) == (addresses[broker_id], addresses[broker_id])
    assert client.link("broker-a", 1).address == addresses[1]


def test_a_link_needs_an_open_connection_of_a_broker_in_a_route(two_brokers, connect):
    client = connect(two_brokers)
    assert join(client, consumer="app") == 2
    link = client.link("broker-b")
    first = link.connection
    client.run(to_coroutine(first.close, "by the test"), 30)
    assert link.connection is None
    assert client.run(link.open(), 30) is link.connection is not first
    leave_routes(two_brokers, client)
    assert (link.address, link.connection) == (None, None)
    with pytest.raises(ConnectError, match="no route names an address"):
        client.run(link.open(), 30)


def test_a_link_needs_a_heartbeat_from_the_first_group_on(client, broker):
    find_route(client)
    link, connection = client.link("broker-a"), client.run(client.connection(broker.address), 30)
    assert link.connection is connection
    client.run(to_coroutine(client.membership.add_producer, "maker"), 30)
    assert link.connection is None
    assert client.run(link.open(), 30) is link.connection is connection


async def to_coroutine(work, *arguments):
    work(*arguments)


def test_a_new_broker_gets_a_heartbeat_as_soon_as_a_route_names_it(two_brokers, connect):
    two_brokers.create_topic("few", brokers=["broker-a"])
    client = connect(two_brokers)
    assert join(client, consumer="app", topic="few") == 1
    two_brokers.create_topic("few", brokers=["broker-a", "broker-b"])
    find_route(client, "few", refresh=True)
    two_brokers.broker("broker-b").wait_for(HEARTBEAT)
    assert two_brokers.broker("broker-b").members("app") == [client.client_id]


def leave_routes(cluster, client):
    """Unregister a broker that keeps running, and return it."""
    removed = cluster.broker("broker-b")
    cluster.call(lambda: cluster.unregister(removed))
    find_route(client, refresh=True)
    return removed


def test_a_broker_that_no_route_names_is_disconnected(two_brokers, connect):
    client = connect(two_brokers)
    (lost,) = watch(client, "broker_lost")
    assert join(client, consumer="app") == 2
    removed = leave_routes(two_brokers, client)
    two_brokers.wait_until(lambda: not removed.connections)
    assert set(client.routes.all_brokers) == {"broker-a"}
    assert client.routes.address("broker-b") is None
    assert lost.is_empty


def test_a_broker_that_left_the_routes_is_kept_while_in_use(two_brokers, connect):
    client = connect(two_brokers, route_refresh_interval_s=0.1)
    in_use = ["broker-b"]
    client.events.uses_broker = in_use.__contains__
    assert join(client, consumer="app") == 2
    address = client.routes.address("broker-b")
    removed = leave_routes(two_brokers, client)
    assert client.routes.address("broker-b") == address
    assert client.run(client.membership.heartbeat(), 30) == 2
    assert removed.connections
    in_use.clear()
    two_brokers.wait_until(lambda: not removed.connections)
    assert client.routes.address("broker-b") is None


def test_a_lost_connection_refreshes_the_routes_at_once(two_brokers, connect):
    client = connect(two_brokers)  # the default route refresh is every 30 s
    (changed,) = watch(client, "route_changed")
    join(client, consumer="app")
    changed.next()
    two_brokers.broker("broker-b").kill()
    topic, route = changed.next()
    assert (topic, {queue.broker_name for queue in route.consume_queues()}) == ("orders", {"broker-a"})
    assert set(client.routes.all_brokers) == {"broker-a"}


@pytest.mark.parametrize("end", ["kill", "stop", "close_connections"])
def test_a_broker_that_returns_gets_a_heartbeat_and_is_reported(client, broker, end):
    lost, returned = watch(client, "broker_lost", "broker_reconnected")
    join(client, consumer="app")
    for _ in range(2):
        getattr(broker, end)()
        assert lost.next()[0] == broker.address
        if end != "close_connections":
            broker.start()
        assert returned.next() == (broker.address,)
        assert broker.members("app") == [client.client_id]
    assert client.membership.find_connection(broker.address) is not None


def test_a_broker_that_closes_each_connection_is_called_rarely(broker, client, caplog):
    def respond_and_close(exchange):
        exchange.answer(exchange.request.make_response(0))
        exchange.later(0.001, lambda: exchange.connection.close(False))

    client.membership.add_consumer("app", consumer_of("app"))
    broker.on(RequestCode.HEART_BEAT, respond_and_close, times=None)
    began = time.monotonic()
    find_route(client)
    broker.wait_for(
        RequestCode.HEART_BEAT, 8, timeout_s=600
    )  # a connection that ends during a response waits for the next
    assert time.monotonic() - began > 2
    assert len([each for each in caplog.records if "connection lost" in each.getMessage()]) < 8
    broker.clear_faults()
    broker.wait_for(RequestCode.HEART_BEAT, 9, timeout_s=600)


def test_calls_fail_when_the_broker_dies_and_succeed_later(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=30)
    join(client, consumer="app")
    queue = find_route(client).consume_queues()[0]
    broker.on(RequestCode.GET_MAX_OFFSET, drop)
    waiting = client.submit(client.broker("broker-a").max_offset(queue))
    broker.wait_for(RequestCode.GET_MAX_OFFSET)
    broker.kill()
    with pytest.raises(RocketError, match="lost"):
        waiting.result(30)
    broker.start()

    def works():
        try:
            return client.run(client.broker("broker-a").max_offset(queue), 30) == 0
        except ConnectError:  # of a shared attempt that began before the broker was back
            return False

    until(works, "a call that works")


def test_a_silent_broker_is_reconnected_after_two_heartbeats(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=1, heartbeat_interval_s=0.1)
    lost, returned = watch(client, "broker_lost", "broker_reconnected")
    join(client, consumer="app")
    broker.on(HEARTBEAT, drop, times=2)
    address, reason = lost.next()
    assert (address, "2 calls in a row" in reason) == (broker.address, True)
    assert returned.next() == (broker.address,)
    embedded.wait_until(lambda: broker.members("app") == [client.client_id])  # the old connection may end later


def test_slow_calls_end_no_connection_with_heartbeats(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=1)
    (lost,) = watch(client, "broker_lost")
    join(client, consumer="app")
    queue = find_route(client).consume_queues()[0]
    broker.on(RequestCode.GET_MAX_OFFSET, drop, times=3)
    for _ in range(3):
        with pytest.raises(RequestTimeout):
            client.run(client.broker("broker-a").max_offset(queue), 30)
    assert client.run(client.broker("broker-a").max_offset(queue), 30) == 0
    assert lost.is_empty


def test_a_silent_or_unreachable_broker_does_not_delay_others(with_slaves, connect):
    client = connect(with_slaves, call_timeout_s=1.5)
    with_slaves.broker("broker-b").on(HEARTBEAT, drop, times=None)
    assert join(client, consumer="app") == 3
    with_slaves.broker("broker-a").kill()
    with_slaves.broker("broker-b").on(UNREGISTER, drop)
    client.run(client.membership.unregister(consumer_group="app"), 10)


def test_leaving_a_group_is_known_at_once(with_slaves, connect):
    client = connect(with_slaves)
    join(client, consumer="app", producer="maker")
    assert with_slaves.members("app") == [client.client_id]
    client.run(client.membership.unregister(consumer_group="app"), 30)
    client.run(client.membership.unregister(producer_group="maker"), 30)
    assert with_slaves.members("app") == []
    for node in with_slaves.nodes:
        calls = [UnregisterClientHeader.from_fields(each.command.fields) for each in node.requests(UNREGISTER)]
        groups = [(each.consumer_group, each.producer_group) for each in calls]
        assert (calls[0].client_id, groups) == (client.client_id, [("app", None), (None, "maker")])


def test_a_heartbeat_in_flight_does_not_register_a_leaving_group_again(client, broker):
    join(client, consumer="app")
    gate = Gate()
    broker.on(HEARTBEAT, gate)
    heartbeat = client.submit(client.membership.heartbeat())
    gate.wait_held()
    leaving = client.submit(client.membership.unregister(consumer_group="app"))
    gate.open()
    leaving.result(30)
    assert heartbeat.result(30) == 1
    assert broker.members("app") == []
    assert client.run(client.membership.heartbeat(), 30) == 0


def test_a_refused_heartbeat_counts_as_a_response(embedded, broker, connect):
    client = connect(embedded, heartbeat_interval_s=0.05)
    broker.on(HEARTBEAT, answer(1, "not now"), times=3)
    assert join(client, consumer="app") == 0
    broker.wait_for(HEARTBEAT, 5)
    embedded.wait_until(lambda: embedded.members("app") == [client.client_id])
    with pytest.raises(BrokerError, match="not now"):
        broker.on(HEARTBEAT, answer(1, "not now"), times=1)
        beat(client, broker)
