"""Several name servers, some of them unreachable."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from pyrocket_consumer.errors import BrokerError, ConnectError, RequestTimeout, RouteNotFound
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import GetKvConfigHeader, Header, PutKvConfigHeader
from pyrocket_consumer.testing import answer, close_connection, drop, garbage, rewrite
from tests.cluster.conftest import RecordedCalls, find_route
from tests.speed import quick

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


@pytest.fixture
def three(cluster_of):
    """Three name servers, in one cluster with one broker."""
    return cluster_of(name_servers=3)


def requested_nodes(cluster, client, topic="orders"):
    """Return the name servers that a route request reaches now."""
    for node in cluster.name_server_nodes:
        node.forget_requests()
    find_route(client, topic, refresh=True)
    return [node for node in cluster.name_server_nodes if node.requests(ROUTE)]


def test_one_name_server_is_used_until_it_fails_then_the_next(three, connect):
    client = connect(three)
    (first,) = requested_nodes(three, client)
    assert [requested_nodes(three, client) for _ in range(5)] == [[first]] * 5
    with pytest.raises(RouteNotFound, match="'nowhere'"):  # a refusal is a response
        requested_nodes(three, client, "nowhere")
    assert sum(len(node.requests(ROUTE)) for node in three.name_server_nodes) == 1
    first.stop()
    (second,) = requested_nodes(three, client)
    first.start()
    assert requested_nodes(three, client) == [second] != [first]
    second.on(ROUTE, answer(2, "[REJECTREQUEST]system busy"), times=1)
    assert len(requested_nodes(three, client)) == 2


def test_one_name_server_suffices_and_all_failures_are_named(three, connect):
    down, silent, broken = three.name_server_nodes
    for node in (down, silent):
        node.stop()
    assert find_route(connect(three)).topic == "orders"
    silent.start()
    client = connect(three, call_timeout_s=2)
    silent.on(ROUTE, drop, times=None)
    broken.on(ROUTE, answer(1, "name server not ready"), times=None)
    with pytest.raises(ConnectError) as raised:
        find_route(client)
    for text in (*(node.address for node in three.name_server_nodes), "got no response", "name server not ready"):
        assert text in str(raised.value)


def test_a_silent_connection_is_closed_after_two_calls(embedded, connect):
    client = connect(embedded, call_timeout_s=1)
    name_server = embedded.name_server_node
    (before,) = name_server.connections
    name_server.on(ROUTE, drop, times=2)
    for _ in range(2):
        with pytest.raises(RequestTimeout):
            find_route(client)
    embedded.wait_until(lambda: before not in name_server.connections)
    assert find_route(client).topic == "orders"


def test_bytes_that_are_not_a_frame_do_not_stop_the_client(embedded, client):
    embedded.name_server_node.on(ROUTE, close_connection, times=1)  # the connection is opened again
    assert find_route(client).topic == "orders"
    embedded.name_server_node.on(ROUTE, garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"), times=1)
    with pytest.raises(Exception, match="frame"):
        find_route(client, refresh=True)
    assert find_route(client, refresh=True).topic == "orders"


class UnknownHeader(Header, code=9999):
    """A request that no server knows."""


def test_unknown_codes_are_answered_by_name_servers_from_5_0_on(cluster_of, connect):
    old, new = cluster_of(version="4.9.7"), cluster_of(version="5.5.0")
    client = connect(old)
    with pytest.raises(RequestTimeout, match="CODE_9999"):
        client.run(client.call(old.name_server, UnknownHeader(), timeout_s=0.2), 30)
    assert find_route(client).topic == "orders"
    assert len(old.name_server_node.connections) == 1
    client = connect(new)
    with pytest.raises(BrokerError) as raised:
        client.run(client.call(new.name_server, UnknownHeader()), 30)
    assert raised.value.code == 3


def test_changes_go_to_all_name_servers_or_the_error_names_one(three, connect):
    client = connect(three)
    nodes = first, second, third = three.name_server_nodes

    def put(value):
        return client.run(client.name_servers.call_every(PutKvConfigHeader("space", "key", value)), 30)

    def kept(node):
        return client.run(client.call(node.address, GetKvConfigHeader("space", "key")), 30).fields["value"]

    assert len(put("value")) == 3
    assert [kept(node) for node in nodes] == ["value"] * 3
    second.stop()
    with pytest.raises(ConnectError, match=second.address):
        put("another")
    assert kept(third) == "another"
    first.stop()
    with pytest.raises(ConnectError) as raised:
        put("value")
    assert {first.address, second.address} == set(raised.value.address.split(";"))


def test_routes_in_use_stay_fresh_and_outlive_name_servers(embedded, connect):
    client = connect(embedded, route_refresh_interval_s=0.05)
    calls = RecordedCalls()
    client.events.route_changed = calls
    route = find_route(client)
    assert calls.next() == ("orders", route)
    embedded.create_topic("orders", queues=6)
    topic, changed = calls.next()
    assert len(changed.consume_queues()) == 6
    embedded.stop_name_server()
    began = time.monotonic()
    assert find_route(client) == changed  # the known one, at once
    with pytest.raises(ConnectError):
        find_route(client, refresh=True)
    assert time.monotonic() - began < 20
    embedded.start_name_server(register=False)
    with pytest.raises(RouteNotFound):  # it knows nothing until brokers register
        find_route(client, refresh=True)
    assert client.routes.known("orders") == changed
    embedded.name_server_node.register()
    assert find_route(client, refresh=True) == changed
    assert calls.is_empty


def padded(body: bytes) -> bytes:
    """A body with an extra field that only the slow reader accepts, and that takes it long."""
    return b"{pad:[" + b"0," * 900_000 + b"0]," + body[1:]


@pytest.mark.slow("an answer of many megabytes")
@pytest.mark.live
def test_a_large_response_does_not_block_the_io_thread(embedded, client):
    embedded.name_server_node.on(ROUTE, rewrite(lambda answer: replace(answer, body=padded(answer.body))), times=None)

    async def longest_piece() -> float:
        """Return the longest CPU time of one step of the I/O thread while it fetches a route."""
        longest, last = 0.0, time.thread_time()
        requested_nodes = asyncio.ensure_future(client.routes.get("orders", refresh=True))
        while not requested_nodes.done():
            await asyncio.sleep(0)
            last, before = time.thread_time(), last
            longest = max(longest, last - before)
        assert len((await requested_nodes).queues) == 1
        return longest

    assert quick(0.05, lambda: client.run(longest_piece(), 60))


UNREADABLE = [b"", b"[]", b"{", b'{"queueDatas":5}', b"[" * 1000 + b"]" * 1000, b"{0:[" + b"0," * 2_000_000]


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: f"{len(body)} bytes")
def test_an_unreadable_response_makes_it_call_another(three, connect, body):
    client = connect(three)
    (first,) = requested_nodes(three, client)
    first.on(ROUTE, answer(0, body=body), times=None)
    assert find_route(client, refresh=True).topic == "orders"
    assert first not in requested_nodes(three, client)
    for node in three.name_server_nodes:
        node.on(ROUTE, answer(0, body=body), times=None)
    with pytest.raises(ConnectError) as failure:
        find_route(client, refresh=True)
    assert all(node.address in str(failure.value) for node in three.name_server_nodes)
    assert len(str(failure.value)) < 1000
