"""Routes and broker addresses, from scripted responses of a name server."""

import asyncio

import pytest

from pyrocket_consumer.cluster.routes import Routes, choose_address
from pyrocket_consumer.errors import ConnectError, RouteNotFound
from pyrocket_consumer.model import BrokerData, QueueData, TopicRoute
from tests.for_each import for_each


def route_of(topic, **brokers):
    """`route_of("T", a={0: "a:1"})`: one broker with four queues per keyword."""
    return TopicRoute(
        topic,
        tuple(QueueData(name, 4, 4) for name in brokers),
        tuple(BrokerData("DefaultCluster", name, addresses) for name, addresses in brokers.items()),
    )


class NameServer:
    """Returns scripted routes, or raises scripted errors, and counts requests."""

    def __init__(self, **routes):
        self.routes = routes
        self.requested = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, topic):
        self.requested.append(topic)
        await self.gate.wait()
        response = self.routes.get(topic, RouteNotFound(topic, "ns:9876"))
        if isinstance(response, Exception):
            raise response
        return response


class Watched(Routes):
    """Routes that record reported changes."""

    def __init__(self, name_server):
        self.changes = []
        super().__init__(name_server.ask, self.remember)

    def remember(self, route, added, removed):
        self.changes.append((route, set(added), set(removed)))


async def watched(**routes):
    """Return a name server, and its routes with each topic known."""
    name_server = NameServer(**routes)
    known = Watched(name_server)
    for topic in routes:
        await known.get(topic)
    return name_server, known


T_AT_A, U_AT_B = route_of("T", a={0: "a:1"}), route_of("U", b={0: "b:1"})


RUN = asyncio.run


async def test_a_route_is_fetched_once_and_kept():
    name_server, routes = await watched(T=T_AT_A)
    assert await routes.get("T") is await routes.get("T") is routes.known("T")
    assert name_server.requested == ["T"]


async def test_callers_at_once_share_one_request_and_its_failure():
    name_server = NameServer(T=T_AT_A)
    routes = Watched(name_server)
    name_server.gate.clear()
    callers = [asyncio.create_task(routes.get(topic)) for topic in ["T", "T", "T", "none", "none"]]
    await asyncio.sleep(0)
    callers[0].cancel()  # the other callers still get the route
    name_server.gate.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1] is outcomes[2] is routes.known("T")
    assert all(isinstance(outcome, RouteNotFound) for outcome in outcomes[3:])
    assert sorted(name_server.requested) == ["T", "none"]


@pytest.mark.live
async def test_callers_that_need_a_newer_route_share_requests():
    name_server, routes = await watched(T=T_AT_A)
    now = asyncio.get_running_loop().time
    before = now()
    name_server.routes["T"] = route_of("T", a={0: "a:2"})
    for _ in range(20):
        assert (await routes.get("T", after=before)).brokers[0].addresses == {0: "a:2"}
    assert len(name_server.requested) == 2
    began = now()
    for _ in range(3):  # each saw the route fail after the last request
        await routes.get("T", after=now())
    assert now() - began > 0.1
    assert len(name_server.requested) == 5
    wanted = now()
    await asyncio.gather(*(routes.get("T", after=wanted) for _ in range(20)))
    assert len(name_server.requested) == 6


async def test_the_route_of_an_unknown_topic_is_fetched_again():
    name_server, routes = await watched()
    with pytest.raises(RouteNotFound, match="'T'"):
        await routes.get("T")
    name_server.routes["T"] = T_AT_A
    assert (await routes.get("T")).topic == "T"


async def test_a_topic_that_is_gone_keeps_its_route():
    name_server, routes = await watched(T=T_AT_A, U=U_AT_B)
    name_server.routes = {"U": route_of("U", b={0: "b:2"})}
    routes.changes.clear()
    await routes.refresh()
    assert (routes.known("T"), routes.address("a")) == (T_AT_A, "a:1")
    assert routes.changes == [(route_of("U", b={0: "b:2"}), {"b:2"}, {"b:1"})]
    with pytest.raises(RouteNotFound):
        await routes.get("T", refresh=True)


async def test_routes_stay_while_no_name_server_responds():
    name_server, routes = await watched(T=T_AT_A, U=U_AT_B)
    before = list(routes.changes)
    name_server.requested.clear()
    name_server.routes = dict.fromkeys(["T", "U"], ConnectError("ns:9876", "refused"))
    await routes.refresh()
    assert (name_server.requested, routes.addresses, routes.changes) == (["T"], {"a:1", "b:1"}, before)
    with pytest.raises(ConnectError):
        await routes.get("U", refresh=True)


async def test_a_change_is_reported_once_and_another_order_is_no_change():
    first = route_of("T", a={0: "a:1"}, b={0: "b:1"})
    name_server, routes = await watched(T=first)
    name_server.routes["T"] = route_of("T", b={0: "b:1"}, a={0: "a:1"})
    assert await routes.get("T", refresh=True) == first
    name_server.routes["T"] = T_AT_A
    second = await routes.get("T", refresh=True)
    assert routes.changes == [(first, {"a:1", "b:1"}, set()), (second, set(), {"b:1"})]


async def test_an_address_stays_while_any_route_names_it():
    name_server, routes = await watched(T=route_of("T", a={0: "a:1"}, b={0: "b:1"}), U=U_AT_B)
    assert routes.changes[1] == (U_AT_B, set(), set())
    name_server.routes["T"] = T_AT_A
    await routes.get("T", refresh=True)
    assert routes.addresses == {"a:1", "b:1"}
    routes.forget("U")
    assert routes.addresses == {"a:1"}
    assert routes.changes[-1] == (None, set(), {"b:1"})
    assert routes.topics == ["T"]


async def test_where_routes_differ_the_latest_counts():
    name_server, routes = await watched(T=T_AT_A, U=route_of("U", a={0: "a:1"}))
    name_server.routes = {"T": route_of("T", a={0: "a:2"}), "U": RouteNotFound("U", "ns:9876")}
    for _ in range(2):
        await routes.refresh()
        assert (routes.address("a"), routes.addresses) == ("a:2", {"a:2"})


ADDRESSES = {0: "master", 2: "slave-2", 3: "slave-3"}


@for_each(
    "addresses, broker_id, only_this, chosen",
    [
        (ADDRESSES, 0, False, "master"),
        (ADDRESSES, 3, False, "slave-3"),
        (ADDRESSES, 1, False, "slave-2"),  # the next id
        (ADDRESSES, 4, False, "master"),
        (ADDRESSES, 1, True, None),
        ({2: "slave-2", 3: "slave-3"}, 0, False, "slave-2"),
        ({2: "slave-2"}, 0, True, None),
        ({}, 0, False, None),
    ],
)
def test_an_unreachable_broker_is_replaced_by_the_next_best(addresses, broker_id, only_this, chosen):
    assert choose_address(addresses, broker_id, only_this=only_this) == chosen
