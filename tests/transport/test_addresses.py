"""A client connects only to allowed addresses of routes, and an invalid address stops nothing."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from pyrocket_consumer import AddressRefused, Admin, AsyncProducer, ConnectError, Producer, RocketError, SendError
from pyrocket_consumer.protocol.bodies import decode_cluster_info, decode_route, encode_cluster_info, encode_route
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, rewrite
from pyrocket_consumer.text import MAX_LINE_CHARS
from pyrocket_consumer.transport.connections import Addresses
from tests.consuming import Events, consuming
from tests.for_each import for_each


@pytest.fixture
def cluster():
    with EmbeddedCluster(brokers=2) as embedded:
        embedded.create_topic("orders", queues=2)
        yield embedded


@pytest.fixture
def elsewhere():
    """A listener at an address that routes name; `accept` raises if there is no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def assert_no_connection(listening: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        listening.accept()


@contextmanager
def leading(cluster, broker_name: str, address: str):
    """Have the name server put a broker at `address` into routes."""

    def moving(decode, encode, brokers_of):
        def changed(response):
            if response.body:  # the topic exists
                found = decode(response.body)
                for broker in brokers_of(found):
                    if broker.broker_name == broker_name:
                        broker.addresses[0] = address
                response = replace(response, body=encode(found))
            return response

        return rewrite(changed)

    node = cluster.name_server_node
    route = moving(partial(decode_route, "any"), encode_route, lambda route: route.brokers)
    info = moving(decode_cluster_info, encode_cluster_info, lambda info: info.brokers.values())
    node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, times=None)
    node.on(RequestCode.GET_BROKER_CLUSTER_INFO, info, times=None)
    try:
        yield
    finally:
        node.clear_faults()


def send_20(cluster):
    for number in range(20):
        cluster.send("orders", b"%d" % number)


def wait_for_broker_b(cluster, seen):
    seen.wait(lambda seen: len(seen.messages) == len(cluster.broker("broker-b").messages("orders")))


def addresses_of(cluster) -> list[str]:
    return [broker.address for broker in cluster.brokers]


@pytest.mark.slow("waits for a start that is not allowed")
@pytest.mark.live
def test_a_consumer_connects_only_to_allowed_addresses_and_reports_others_once(cluster, elsewhere):
    send_20(cluster)
    events = Events()
    with (
        leading(cluster, "broker-a", address_of(elsewhere)),
        consuming(cluster, "orders", "g", allowed_addresses=addresses_of(cluster), on_event=events) as (consumer, seen),
    ):
        refused = events.wait_for("address-refused")
        wait_for_broker_b(cluster, seen)
        assert address_of(elsewhere) in refused.text and "allowed_addresses" in refused.text
        assert refused.facts == {"address": address_of(elsewhere)}
        events.wait_for("broker-unreachable")  # several attempts later
        assert len(events.of("address-refused")) == 1
        assert_no_connection(elsewhere)
        assert consumer.state.value == "running"


@pytest.mark.live
def test_a_consumer_continues_when_the_route_is_right_again(cluster, elsewhere):
    cluster.send("orders", b"one", broker_name="broker-a", queue_id=0)
    events = Events()
    options = {"allowed_addresses": addresses_of(cluster), "on_event": events, "start_wait_s": 0.1}
    with ExitStack() as running:
        with leading(cluster, "broker-a", address_of(elsewhere)):
            consumer = consuming(cluster, "orders", "g", route_refresh_interval_s=0.2, **options)
            _, seen = running.enter_context(consumer)
            events.wait_for("address-refused")
        seen.wait_for(1)


ABSURD = {
    "no port": "127.0.0.1",
    "a file": "file:///etc/passwd",
    "a large one": "a" * 1_000_000 + ":10911",
    "a port too large": "127.0.0.1:99999",
    "control characters": "\x1b[2J\n127.0.0.1:10911",
    "empty": "",
    "nobody there, IPv6": "[::1]:1",
    "a name that cannot be": "a..b:10911",
}

REAL = {"[::1]:1", "a..b:10911"}  # valid addresses without a server


@pytest.mark.parametrize("address", ABSURD.values(), ids=ABSURD)
def test_an_invalid_address_affects_that_broker_alone(cluster, address, caplog):
    caplog.set_level(logging.DEBUG)
    send_20(cluster)
    events = Events()
    with (
        leading(cluster, "broker-a", address),
        consuming(cluster, "orders", "g", on_event=events, start_wait_s=0.1) as (consumer, seen),
    ):
        wait_for_broker_b(cluster, seen)
        events.wait_for("address-refused" if address not in REAL else "broker-unreachable")
        assert consumer.state.value == "running"
    for record in caplog.records:
        assert record.name.startswith("asyncio") or len(record.getMessage()) < 2 * MAX_LINE_CHARS


@pytest.mark.slow("waits for a start that is not allowed")
@pytest.mark.live
def test_producer_and_admin_name_address_option_and_remedy(cluster, elsewhere):
    allowed = {"allowed_addresses": ["10.0.0.0/8", "broker-a:10911"]}
    with Producer(name_server=cluster.name_server, **allowed) as producer, pytest.raises(SendError) as raised:
        producer.send("orders", b"one")
    for refused in (addresses_of(cluster)[0], "allowed_addresses=['10.0.0.0/8', 'broker-a:10911']", "add it if"):
        assert refused in str(raised.value)

    async def send():
        async with AsyncProducer(name_server=cluster.name_server, allowed_addresses="10.0.0.0/8") as producer:
            await producer.send("orders", b"one")

    with pytest.raises(SendError, match="allowed_addresses"):
        asyncio.run(send())
    with (
        leading(cluster, "broker-a", address_of(elsewhere)),
        Admin(name_server=cluster.name_server, allowed_addresses=addresses_of(cluster)) as admin,
        pytest.raises(RocketError, match="allowed_addresses"),
    ):
        admin.create_topic("more")
    assert_no_connection(elsewhere)


@pytest.mark.parametrize("allowed", ["127.0.0.0/8", ["127.0.0.1"], ["localhost", "127.0.0.1/32"]])
def test_what_is_allowed_is_used_as_always(cluster, allowed):
    with Producer(name_server=cluster.name_server, allowed_addresses=allowed) as producer:
        producer.send("orders", b"one")
    with consuming(cluster, "orders", "g", allowed_addresses=allowed) as (_, seen):
        seen.wait_for(1)


@for_each(
    "allowed, address, may",
    [
        (["10.0.0.0/8"], "10.1.2.3:10911", True),
        (["10.0.0.0/8"], "11.1.2.3:10911", False),
        (["10.0.0.0/8"], "[::ffff:10.1.2.3]:10911", False),
        (["10.0.0.5"], "10.0.0.5:1", True),
        (["10.0.0.5:10911"], "10.0.0.5:10911", True),
        (["10.0.0.5:10911"], "10.0.0.5:10912", False),
        (["Broker-A"], "broker-a:10911", True),
        (["broker-a:10911"], "broker-a:10912", False),
        (["broker-a"], "broker-a.evil.example:10911", False),
        (["10.0.0.0/8"], "10.evil.example:10911", False),
        (["10.0.0.0/8"], "0xa000005:10911", False),
        (["2001:db8::/32"], "[2001:db8:0::1]:10911", True),
        (["[2001:db8::1]:10911"], "[2001:0db8:0::1]:10911", True),
        (["2001:db8::/32"], "[::1]:10911", False),
        (["10.0.0.0/8"], "192.0.2.1:9876", True),  # a name server
        (None, "anybody:1", True),
    ],
)
def test_hosts_places_and_networks(allowed, address, may):
    refused = []
    addresses = Addresses(["192.0.2.1:9876"], allowed, lambda address, why: refused.append(address))
    if may:
        assert addresses.resolve(address)[1] == int(address.rpartition(":")[2])
    for _ in range(0 if may else 2):
        with pytest.raises(AddressRefused) as raised:
            addresses.resolve(address)
        assert isinstance(raised.value, ConnectError)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert refused == ([] if may else [address])


def test_a_flood_of_addresses_is_reported_a_hundred_times():
    refused = []
    addresses = Addresses([], ["10.0.0.0/8"], lambda *facts: refused.append(facts))
    for port in range(1, 1000):
        with pytest.raises(AddressRefused):
            addresses.resolve(f"127.0.0.1:{port}")
    assert len(refused) == 100
