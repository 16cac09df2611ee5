"""Name servers, and the routes of topics and addresses of brokers that they report.

A client uses one name server until it fails, then the next. Routes are shared, refreshed, and kept while no name server
is reachable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from pyrocket_consumer.cluster.client import Client, read_body
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MASTER_ID, BrokerData, QueueData, TopicRoute
from pyrocket_consumer.protocol.bodies import ClusterInfo, decode_cluster_info, decode_route
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import GetClusterInfoHeader, GetRouteInfoHeader, Header
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger

log = logger("cluster")

T = TypeVar("T")

AddressTable = Mapping[str, Mapping[int, str]]
"""Broker name -> broker id -> address."""

OnChange = Callable[["TopicRoute | None", "frozenset[str]", "frozenset[str]"], None]
"""Called with a new or changed route, None for a forgotten one, and with the added and removed broker addresses."""

_NO_ADDRESSES: frozenset[str] = frozenset()
_MIN_GAP_S = 0.05
_ANY_TOPIC = "TBW102"

# This name server is starting, overloaded or shutting down. Another one may be available.
_UNAVAILABLE_CODES = frozenset({ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_BUSY, ResponseCode.GO_AWAY})


class NameServers:
    """The name servers of a cluster. All have the same routes, so any one suffices. Confined to the I/O thread."""

    def __init__(self, client: Client) -> None:
        self.addresses = client.config.name_servers
        self._client = client
        self._current = client.rng.randrange(len(self.addresses))  # so that clients spread over them

    def __str__(self) -> str:
        return ";".join(self.addresses)

    @property
    def current(self) -> str:
        """The address of the name server that is called first."""
        return self.addresses[self._current]

    async def check(self) -> None:
        """Return when a name server has responded.

        Raises:
            ConnectError: none responded, or a broker did; the text names every address and its reason.
            PermissionDenied: the name server refuses the access key.
        """
        try:
            await self.read(GetRouteInfoHeader(_ANY_TOPIC), lambda body: None)
        except BrokerError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise ConnectError(error.address, "it responds like a broker, not like a name server") from error
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                if isinstance(error, PermissionDenied):
                    raise
                raise ConnectError(error.address, f"it refuses the first request: {error}") from error
        except ConnectionLost as error:
            text = "it closes the connection at the first request; if it speaks TLS only, pass tls=True"
            raise ConnectError(error.address, text) from error
        except RequestTimeout as error:
            text = f"no response within {error.timeout_s:.3g} s: it is busy or failing, or another program is there"
            raise ConnectError(error.address, text) from error

    async def read(self, header: Header, decode: Callable[[bytes], T]) -> T:
        """Return `decode(body)` of the first name server whose response can be read.

        A name server 4.9 does not respond to a request that it does not know.

        Raises:
            ConnectError: no name server responded; the text names every address and its reason. With a single name
                server its own error is raised.
            BrokerError: the name server refused the request.
            ProtocolError: the only name server sent a response that cannot be read.
        """
        failures: dict[str, RocketError] = {}
        for step in range(len(self.addresses)):
            index = (self._current + step) % len(self.addresses)
            address = self.addresses[index]
            try:
                found = await read_body(decode, (await self._call_one(address, header)).body)
            except RocketError as error:
                if isinstance(error, BrokerError) and error.code not in _UNAVAILABLE_CODES:
                    self._use(index)
                    raise
                failures[address] = error
                log.debug("name_server=%s failed reason=%s", address, error)
            else:
                self._use(index)
                return found
        if len(failures) == 1:
            raise failures.popitem()[1]
        raise ConnectError(str(self), _reasons(failures))

    async def fetch_route(self, topic: str) -> TopicRoute:
        """Return the route of `topic`.

        Raises:
            RouteNotFound: the name server does not know the topic, or no broker that has it is up.
            ProtocolError, ConnectError, BrokerError: as for `read`.
        """
        try:
            return await self.read(GetRouteInfoHeader(topic), partial(decode_route, topic))
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                raise RouteNotFound(topic, error.address) from error
            raise

    async def cluster_info(self) -> ClusterInfo:
        """Return the brokers and clusters that a name server knows."""
        return await self.read(GetClusterInfoHeader(), decode_cluster_info)

    async def _call_one(self, address: str, header: Header) -> RemotingCommand:
        try:
            return await self._client.call(address, header)
        except ConnectionLost:  # name servers close idle connections, and all requests to them can be repeated
            return await self._client.call(address, header)

    def _use(self, index: int) -> None:
        if index != self._current:
            log.warning("name_server=%s failed, name_server=%s took over", self.current, self.addresses[index])
            self._current = index

    async def call_every(self, header: Header) -> list[RemotingCommand]:
        """Return the response of every name server, because name servers do not share changes.

        Raises:
            ConnectError: a name server did not respond or refused; the text names each that failed. The others have
                executed the request.
        """
        responses = await asyncio.gather(
            *(self._call_one(address, header) for address in self.addresses), return_exceptions=True
        )
        failures: dict[str, RocketError] = {}
        for address, response in zip(self.addresses, responses, strict=True):
            if isinstance(response, RocketError):
                failures[address] = response
            elif isinstance(response, BaseException):
                raise response
        if len(failures) == 1:
            raise failures.popitem()[1]
        if failures:
            raise ConnectError(";".join(failures), _reasons(failures))
        return [response for response in responses if isinstance(response, RemotingCommand)]


def _reasons(failures: dict[str, RocketError]) -> str:
    return "; ".join(
        f"{address}: {error.reason}" if isinstance(error, ConnectError) else str(error)
        for address, error in failures.items()
    )


class Routes:
    """The routes of the topics that a client uses. Any thread may read; all else is confined to the I/O thread."""

    def __init__(self, fetch: Callable[[str], Awaitable[TopicRoute]], on_change: OnChange) -> None:
        self._fetch_from_name_server = fetch
        self._on_change = on_change
        self._known: dict[str, TopicRoute] = {}  # ordered by the time of the last change; the latest counts most
        self._stale: set[str] = set()  # topics whose last refresh was refused
        self._fetching: dict[str, asyncio.Task[TopicRoute]] = {}
        self._requested_at: dict[str, float] = {}
        self.brokers: AddressTable = {}  # replaced, never mutated
        self.former: AddressTable = {}  # the last addresses of brokers in no route; also replaced, never mutated
        self.addresses: frozenset[str] = frozenset()
        self.lingering: Mapping[str, str] = {}
        """Address -> broker name, of brokers in no route whose address was not released."""

    @property
    def topics(self) -> list[str]:
        """The topics whose routes are known and refreshed."""
        return list(self._known)

    def known(self, topic: str) -> TopicRoute | None:
        """Return the known route of `topic`, None if it is unknown. Sends no request."""
        return self._known.get(topic)

    async def get(self, topic: str, *, refresh: bool = False, after: float | None = None) -> TopicRoute:
        """Return the route of `topic`; fetch it if it is not known, or if `refresh` is set.

        With `after`, fetch it unless it was requested after that time of the loop. Then wait a moment since the last
        request, so that thousands of refused messages do not send one request each.

        Concurrent callers share one request. A request that fails does not change the known route.
        """
        if after is not None:
            now = asyncio.get_running_loop().time()
            if (
                topic not in self._fetching
                and (wait_s := self._requested_at.get(topic, -_MIN_GAP_S) + _MIN_GAP_S - now) > 0
            ):
                await asyncio.sleep(wait_s)
            refresh = topic in self._fetching or self._requested_at.get(topic, after) <= after
        if not refresh and (route := self._known.get(topic)) is not None:
            return route
        task = self._fetching.get(topic)
        if task is None:
            loop = asyncio.get_running_loop()
            self._requested_at[topic] = loop.time()
            task = loop.create_task(self._fetch(topic))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._fetching[topic] = task
        return await asyncio.shield(task)

    async def _fetch(self, topic: str) -> TopicRoute:
        try:
            route = sort_route(await self._fetch_from_name_server(topic))
        finally:
            if is_wanted := self._fetching.get(topic) is asyncio.current_task():
                del self._fetching[topic]
                if topic not in self._known:
                    self._requested_at.pop(topic, None)
        if not is_wanted:  # the topic was forgotten during the request
            return route
        previous = self._known.get(topic)
        if route == previous:
            return previous
        if previous is not None:
            self._known = {other: known for other, known in self._known.items() if other != topic} | {topic: route}
            self._on_change(route, *self._update_brokers())
        else:
            self._known[topic] = route
            news = any(self.brokers.get(broker.broker_name) != broker.addresses for broker in route.brokers)
            self._on_change(route, *(self._update_brokers() if news else (_NO_ADDRESSES, _NO_ADDRESSES)))
        return route

    async def refresh(self) -> None:
        """Fetch every known route again, one after the other. A route that cannot be fetched stays.

        If no name server responds, stop, because each further route would take a whole timeout.
        """
        for topic in self.topics:
            if topic not in self._known:
                continue
            try:
                await self.get(topic, refresh=True)
            except (ConnectError, ConnectionLost, RequestTimeout) as error:
                log.warning("routes stay as they are known reason=%s", error)
                return
            except RocketError as error:
                log.log(logging.DEBUG if topic in self._stale else logging.WARNING, "route kept reason=%s", error)
                self._stale.add(topic)
            else:
                self._stale.discard(topic)

    def forget(self, topic: str) -> None:
        """Stop refreshing the route of `topic`, and forget brokers that only this route names."""
        self._fetching.pop(topic, None)
        if topic in self._known:
            self._known = {other: known for other, known in self._known.items() if other != topic}
            self._requested_at.pop(topic, None)
            self._on_change(None, *self._update_brokers())

    def release_address(self, address: str) -> None:
        """Forget the former address of a broker."""
        left = {
            name: {its_id: each for its_id, each in ids.items() if each != address} for name, ids in self.former.items()
        }
        self._keep_former(left)

    def _keep_former(self, former: AddressTable) -> None:
        self.former = {name: ids for name, ids in former.items() if ids}
        self.lingering = {
            address: name
            for name, ids in self.former.items()
            for address in ids.values()
            if address not in self.addresses
        }

    @property
    def all_addresses(self) -> frozenset[str]:
        """The addresses of all brokers in routes, and of lingering ones."""
        return self.addresses | self.lingering.keys() if self.lingering else self.addresses

    @property
    def all_brokers(self) -> AddressTable:
        """Broker name -> id -> address, from all known routes and of lingering brokers. Any thread may read it."""
        named, former = self.brokers, self.former
        if not former:
            return MappingProxyType(named)
        return {name: {**former.get(name, {}), **named.get(name, {})} for name in named.keys() | former.keys()}

    def names_at(self, address: str) -> list[str]:
        """Return the names of the brokers at `address`, in routes or lingering."""
        return [name for name, ids in self.all_brokers.items() if address in ids.values()]

    def _update_brokers(self) -> tuple[frozenset[str], frozenset[str]]:
        now = address_table(self._known.values())
        names = self.brokers.keys() | self.former.keys()
        gone = {
            name: {its_id: each for its_id, each in ids.items() if its_id not in now.get(name, {})}
            for name in names
            for ids in ({**self.former.get(name, {}), **self.brokers.get(name, {})},)
        }
        self.brokers = now
        before, self.addresses = (
            self.addresses,
            frozenset(address for ids in self.brokers.values() for address in ids.values()),
        )
        self._keep_former(gone)
        return self.addresses - before, before - self.addresses

    def masters(self) -> frozenset[str]:
        """Return the addresses of all known masters."""
        return frozenset(ids[MASTER_ID] for ids in self.brokers.values() if MASTER_ID in ids)

    def address(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> str | None:
        """Return the address of a broker with this id, or, unless `only_this`, that of the next best id.

        A broker that no route names keeps its last address until that is released.
        """
        address = choose_address(self.brokers.get(broker_name, {}), broker_id, only_this=only_this)
        return address or self.former.get(broker_name, {}).get(broker_id)


def choose_address(addresses: Mapping[int, str], broker_id: int, *, only_this: bool = False) -> str | None:
    """Return the address with `broker_id`. Without one, return that of the next id for a slave, else that of any id.

    Source: MQClientInstance.findBrokerAddressInSubscribe.
    """
    address = addresses.get(broker_id)
    if address is not None or only_this:
        return address
    if broker_id != MASTER_ID and (address := addresses.get(broker_id + 1)) is not None:
        return address
    return addresses[min(addresses)] if addresses else None


def address_table(routes: Iterable[TopicRoute]) -> dict[str, dict[int, str]]:
    """Return the addresses of all brokers in `routes`; if two routes differ, the later one counts."""
    return {broker.broker_name: dict(broker.addresses) for route in routes for broker in route.brokers}


def sort_route(route: TopicRoute) -> TopicRoute:
    """Return `route` with its parts sorted by broker name, so that equal routes compare as equal."""

    def by_name(part: QueueData | BrokerData) -> str:
        return part.broker_name

    queues, brokers = tuple(sorted(route.queues, key=by_name)), tuple(sorted(route.brokers, key=by_name))
    return replace(route, queues=queues, brokers=brokers)
