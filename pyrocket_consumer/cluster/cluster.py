"""The connection of one client to a RocketMQ cluster: name servers, routes, brokers, and its own membership."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random
import ssl
import sys
import warnings
from collections.abc import Callable, Collection, Container, Coroutine
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.heartbeat import Heartbeats
from pyrocket_consumer.cluster.membership import BrokerLink
from pyrocket_consumer.cluster.name_servers import NameServers
from pyrocket_consumer.cluster.responses import check_response, read_error
from pyrocket_consumer.cluster.routes import AddressTable, Routes
from pyrocket_consumer.cluster.server_requests import OnRefused, RequestHandler, ServerRequests
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import (
    BrokerError,
    ClientClosed,
    ConnectError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MASTER_ID, TopicRoute
from pyrocket_consumer.protocol.acl import sign
from pyrocket_consumer.protocol.bodies import ConsumerData, decode_route
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import GetRouteInfoHeader, Header, request
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.addresses import Addresses, OnAddressRefused
from pyrocket_consumer.transport.backoff import Backoff
from pyrocket_consumer.transport.connection import Connection, OnLateResponse, Sign
from pyrocket_consumer.transport.connections import MAYBE_PLAINTEXT, Connections
from pyrocket_consumer.transport.io_thread import IoThread
from pyrocket_consumer.transport.polled_connection import PolledConnection, open_polled_connection

log = logger("cluster")

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_REFRESH_GAP_S = 1.0  # between two refreshes of routes that lost connections cause
_FIRST_REGISTER_PAUSE_S = 0.1
_LONGEST_REGISTER_PAUSE_S = 5.0
_LOSS_WINDOW_S = 10.0  # losses of a connection at most this far from each other count as consecutive
_LOGGED_LOSSES = 3  # consecutive losses that are logged as warnings and cause an immediate heartbeat
_LOSS_PAUSES = Backoff(0.2, _LONGEST_REGISTER_PAUSE_S, free=_LOGGED_LOSSES)
_MAX_UNANSWERED = 2  # consecutive calls without a response, after which the connection is closed
_JITTER = 0.1  # of an interval, so that clients that start together do not send all later requests together


class ClusterState(Enum):
    """The states of a cluster. A closed one stays closed."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"


class Cluster:
    """Calls to the name servers and brokers of one cluster, and membership in it.

    Call `async` methods, `add_…`, `remove_…`, `on_…` and `forget_topic` on the I/O thread; before `start()`, on any.
    Call `start`, `close`, `run` and `submit` on all other threads. `broker_addresses`, `address` and `broker` are
    thread-safe.

    With `io` the cluster uses that loop, and neither starts nor stops it. Without, it starts its own I/O thread. It
    reads the time and opens sockets only through the loop, and takes random numbers only from `rng`.
    """

    def __init__(
        self, config: ClientConfig, client_id: str, *, io: IoThread | None = None, rng: random.Random | None = None
    ) -> None:
        self.config = config
        self.client_id = client_id
        self.state = ClusterState.CREATED
        self._owns_io = io is None
        self._io = io
        self._random = rng or random.Random()
        self._tls = tls_context(config.tls)
        self._pid: int | None = None
        self._connections: Connections | None = None
        self._addresses = Addresses(config.name_servers, config.brokers_allowed, self._address_refused)
        self._name_servers = NameServers(config.name_servers, self.call, self._random)
        self._routes = Routes(self._fetch_route, self._route_changed)
        self._heartbeats = Heartbeats(client_id, self._connect_for_heartbeat, self._call_registered, self._reconnected)
        self._requests = ServerRequests(self._is_broker)
        self._route_hooks: list[Callable[[str, TopicRoute], None]] = []
        self._lost_hooks: list[Callable[[str, str], None]] = []
        self._reconnect_hooks: list[Callable[[str], None]] = []
        self._refused_hooks: list[OnAddressRefused] = []
        self._failure_hooks: list[Callable[[BaseException], None]] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._registering: set[str] = set()
        self._in_use: Callable[[str], bool] = lambda broker_name: False
        self._lingering: dict[str, str] = {}  # addresses that no route names, of brokers in use
        self._unanswered: dict[str, int] = {}
        self._losses: dict[str, tuple[float, int]] = {}  # by address: the time of the last loss, consecutive losses
        self._refresh_wanted = asyncio.Event()

    # --- life

    def start(self, timeout_s: float | None = None) -> None:
        """Start, and return when a name server has responded, so that a wrong address fails here and not later.

        Raises:
            ConnectError: no name server responds; the text names every address and its reason. Nothing keeps running.
            ClientClosed: it was started before.
        """
        if self.state is not ClusterState.CREATED:
            raise ClientClosed(f"this client is {self.state.value} and starts only once; make a new one")
        if self._io is None:
            self._io = IoThread()
            self._io.start()
        if timeout_s is None:
            timeout_s = len(self.config.name_servers) * (self.config.connect_timeout_s + self.config.call_timeout_s)
        self._pid = os.getpid()
        try:
            self._io.run(self.start_on_loop(), timeout_s)
        except RequestTimeout as error:
            self.close()
            raise ConnectError(str(self._name_servers), f"no response within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise

    async def start_on_loop(self) -> None:
        """Do the same as `start`, on an I/O loop that has no thread of its own."""
        self._pid = os.getpid()
        self._connections = Connections(
            self.loop,
            connect_timeout_s=self.config.connect_timeout_s,
            resolve=self._addresses.resolve,
            on_request=self._requests.handle,
            on_lost=self._connection_lost,
            tls=self._tls,
            sign=self._signer,
            max_frame_bytes=self.config.max_frame_bytes,
            rng=self._random,
        )
        if self._owns_io:
            self.loop.set_exception_handler(self.handle_loop_exception)
        self.state = ClusterState.RUNNING
        await self._name_servers.check()
        self.spawn(self._keep_routes_fresh(), "refresh routes")
        self.spawn(self._keep_membership(), "send heartbeats")

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Close every connection and cancel every background task. Pending calls raise an error.

        A second close does nothing. In a process forked after `start()` it has no effect, because the connections
        belong to the parent.
        """
        if self._io is None or self._pid is None or self._forked():
            self.state = ClusterState.CLOSED
            return
        if self.state is not ClusterState.CLOSED:
            try:
                self._io.run(self.close_on_loop(), timeout_s)
            except (RequestTimeout, ClientClosed) as error:
                log.error("client_id=%s was not closed in time reason=%s", self.client_id, error)
            self.state = ClusterState.CLOSED
        if self._owns_io:
            self._io.stop(timeout_s)

    def warn_unclosed(self, owner: object, close: Callable[[], object] | None = None) -> None:
        """Warn that `owner`, which is about to be garbage-collected, was not closed, and close it in the background.

        For finalizers. `close` (default: the cluster's own) must not refer to `owner`. At the end of the process it
        does nothing, because the interpreter has already flushed producers and stops all threads.
        """
        if sys.is_finalizing() or self._forked():
            return
        if self.state is ClusterState.RUNNING and self._io is not None:
            self._io.run_in_background(close or self.close)
            warnings.warn(f"unclosed {owner!r}; call close(), or use `with`", ResourceWarning, 3, source=owner)

    async def close_on_loop(self) -> None:
        """Do the same as `close`, on an I/O loop that has no thread of its own."""
        self.state = ClusterState.CLOSED
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connections is not None:
            await self._connections.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O loop. Raises ClientClosed before `start()`."""
        if self._io is None:
            raise ClientClosed("this client is not started; call start() first")
        return self._io.loop

    @property
    def is_signing(self) -> bool:
        """Whether requests are signed, so that a prepared frame cannot be sent unchanged."""
        return self.config.access_key is not None

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The name servers' addresses, as configured."""
        return self._name_servers.addresses

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run `coroutine` on the I/O thread, and return its result.

        Raises:
            RuntimeError: called on the I/O thread itself; await the coroutine there.
            RequestTimeout: not done within `timeout_s`.
            ClientClosed: the cluster is not running, was closed during the call, or belongs to the process from
                which this one was forked.
        """
        try:
            return self._usable_io(coroutine).run(coroutine, timeout_s)
        except RocketError as error:  # any error that a connection closed by close() caused
            if self.state is ClusterState.CLOSED and not isinstance(error, ClientClosed):
                raise ClientClosed("the client was closed while the call waited") from error
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` on the I/O thread and return at once; the future gets its result.

        Raises:
            ClientClosed: as for `run`.
        """
        return self._usable_io(coroutine).submit(coroutine)

    def _usable_io(self, coroutine: Coroutine[Any, Any, T]) -> IoThread:
        try:
            self.check_usable()
        except RocketError:
            coroutine.close()
            raise
        assert self._io is not None
        return self._io

    def check_usable(self) -> None:
        """Raise ClientClosed unless the cluster is running in this process."""
        if self._forked():
            raise ClientClosed(
                f"this client belongs to process {self._pid}, and this is process {os.getpid()}, forked from it; "
                "make a new one after the fork"
            )
        if self.state is not ClusterState.RUNNING:
            raise ClientClosed(f"this client is {self.state.value}, not running; make a new one and start it")

    def _forked(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    # --- calls

    async def call(
        self,
        address: str,
        header: Header,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        accept: Container[int] = (0,),
        code: int | None = None,
        on_late: OnLateResponse | None = None,
    ) -> RemotingCommand:
        """Return the response of the server at `address`. `timeout_s` includes the time to connect, if necessary.

        `accept` contains the response codes that are not errors; `code` replaces the header's request code. `on_late`
        receives a response that arrives after the timeout.

        Raises:
            BrokerError: the response has another code. PermissionDenied and FlowControl are subclasses.
            ConnectError: there is no connection. The request was not sent.
            RequestTimeout, ConnectionLost: no response arrived. The server may have executed the request.
        """
        command = request(header, body, code=code)
        return await self._send(address, command, timeout_s or self.config.call_timeout_s, accept, on_late)

    async def call_many(
        self, address: str, commands: Collection[RemotingCommand]
    ) -> list[RemotingCommand | RocketError]:
        """Send requests to the server at `address` all at once. Return the responses in the order of the requests.

        A failed request has the error that `call` would raise in place of its response. For thousands of small
        requests this takes less than half the time of one `call` each.

        Raises:
            ConnectError: there is no connection. No request was sent.
        """
        connection, timeout_s = await self._connect_within(address, self.config.call_timeout_s)
        responses = await connection.call_many(commands, timeout_s)
        if not self._is_heartbeat_target(address):
            if not all(isinstance(response, RequestTimeout) for response in responses):
                self._unanswered.pop(address, None)
            elif responses:
                self._count_unanswered(connection, len(responses))
        return [_to_result(response, address) for response in responses]

    async def _send(
        self,
        address: str,
        command: RemotingCommand,
        timeout_s: float,
        accept: Container[int],
        on_late: OnLateResponse | None = None,
    ) -> RemotingCommand:
        connection, timeout_s = await self._connect_within(address, timeout_s)
        call = connection.call if self._is_heartbeat_target(address) else partial(self._call_connection, connection)
        return check_response(await call(command, timeout_s, on_late), address, accept)

    async def _connect_within(self, address: str, timeout_s: float) -> tuple[Connection, float]:
        """Return an open connection, and the rest of `timeout_s`."""
        connection = self._running_connections().peek(address)
        if connection is not None:
            return connection, timeout_s
        deadline = self.loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._running_connections().get(address)
        except TimeoutError as error:
            hint = f" ({MAYBE_PLAINTEXT})" if self._tls is not None else ""
            raise ConnectError(address, f"no connection within {timeout_s:g} s{hint}") from error
        return connection, max(deadline - self.loop.time(), 0.001)

    def _is_heartbeat_target(self, address: str) -> bool:
        return self._heartbeats.is_needed and address in self._heartbeat_targets()

    async def _call_connection(
        self, connection: Connection, command: RemotingCommand, timeout_s: float, on_late: OnLateResponse | None = None
    ) -> RemotingCommand:
        """Return the response. Close the connection if several calls in a row have no response.

        Only a new connection shows whether a silent peer still exists; TCP may keep the old one for 15 minutes. For
        a broker that receives heartbeats only these count, because a busy broker still responds to them.
        """
        address = connection.address
        try:
            response = await connection.call(command, timeout_s, on_late)
        except RequestTimeout:
            self._count_unanswered(connection, 1)
            raise
        self._unanswered.pop(address, None)
        return response

    def _count_unanswered(self, connection: Connection, calls: int) -> None:
        address = connection.address
        self._unanswered[address] = self._unanswered.get(address, 0) + calls
        if self._unanswered[address] >= _MAX_UNANSWERED:
            connection.close(f"{_MAX_UNANSWERED} calls in a row got no response")

    async def call_name_server(
        self, header: Header, body: bytes = b"", *, timeout_s: float | None = None, accept: Container[int] = (0,)
    ) -> RemotingCommand:
        """Return the response of the first name server that sends one; `timeout_s` applies to each.

        Raises:
            ConnectError: no name server responded; the text names every address and its reason. With a single name
                server its own error is raised.
            BrokerError: the name server refused the request.
        """
        return await self._name_servers.call(header, body, timeout_s=timeout_s, accept=accept)

    async def read_from_name_server(self, header: Header, decode: Callable[[bytes], T]) -> T:
        """Return `decode(body)` of the first name server whose response can be read.

        Raises:
            ProtocolError: the only name server sent a response that cannot be read.
            ConnectError, BrokerError: as for `call_name_server`.
        """
        return await self._name_servers.read(header, decode)

    async def call_every_name_server(self, header: Header, body: bytes = b"") -> list[RemotingCommand]:
        """Return the response of every name server: for changes, because name servers do not share them.

        Raises:
            ConnectError: a name server did not respond or refused; the text names each that failed.
        """
        return await self._name_servers.call_every(header, body)

    async def connection(self, address: str) -> Connection:
        """Return an open connection to `address`.

        Raises:
            ConnectError: no connection can be opened.
        """
        return await self._running_connections().get(address)

    async def open_polled_connection(self, address: str) -> PolledConnection:
        """Return a new connection to `address`, which the caller uses in its own thread and must close.

        Raises:
            ConnectError: no connection can be opened.
        """
        return await open_polled_connection(
            self.loop,
            address,
            timeout_s=self.config.connect_timeout_s,
            resolve=self._addresses.resolve,
            tls=self._tls,
            sign=self._signer,
            max_frame_bytes=self.config.max_frame_bytes,
        )

    @property
    def _signer(self) -> Sign | None:
        return self._sign if self.config.access_key is not None else None

    def _running_connections(self) -> Connections:
        if self._connections is None or self.state is not ClusterState.RUNNING:
            raise ClientClosed(f"this client is {self.state.value}, not running; make a new one and start it")
        return self._connections

    def _sign(self, command: RemotingCommand) -> None:
        config = self.config
        assert config.access_key is not None
        assert config.secret_key is not None
        command.fields = sign(command.fields, command.body, config.access_key, config.secret_key, config.security_token)

    # --- routes and brokers

    async def route(self, topic: str, *, refresh: bool = False, after: float | None = None) -> TopicRoute:
        """Return the route of `topic`. The first call fetches it; from then on it is refreshed.

        With `refresh`, fetch it now. With `after`, fetch it unless it was requested after that time of the loop. If
        this fails, the call raises, but the known route stays.

        Raises:
            RouteNotFound: no name server knows the topic, or no broker that has it is up.
            ConnectError, RequestTimeout: no name server responds.
        """
        return await self._routes.get(topic, refresh=refresh, after=after)

    async def _fetch_route(self, topic: str) -> TopicRoute:
        try:
            return await self.read_from_name_server(GetRouteInfoHeader(topic), partial(decode_route, topic))
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                raise RouteNotFound(topic, error.address) from error
            raise

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return the known route of `topic`, None if it is unknown. Sends no request."""
        return self._routes.known(topic)

    def forget_topic(self, topic: str) -> None:
        """Stop refreshing the route of `topic`, and close connections to brokers that only this route names."""
        self._routes.forget(topic)

    def broker_addresses(self) -> AddressTable:
        """Return broker name -> id -> address, from all known routes and of brokers kept reachable."""
        named, former = self._routes.brokers, self._routes.former
        if not former:
            return MappingProxyType(named)
        return {name: {**former.get(name, {}), **named.get(name, {})} for name in named.keys() | former.keys()}

    def address(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> str | None:
        """Return the address of a broker with this id, or, unless `only_this`, that of the next best id."""
        return self._routes.address(broker_name, broker_id, only_this=only_this)

    def broker_name(self, address: str) -> str | None:
        """Return the name of the broker at `address`, None if no route names it."""
        return next((name for name, ids in self.broker_addresses().items() if address in ids.values()), None)

    def broker(self, broker_name: str) -> Broker:
        """Return the typed calls to one broker."""
        return Broker(self, broker_name)

    def link(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> BrokerLink:
        """Return the way to the broker with this id or, unless `only_this`, to that with the next best id."""
        return BrokerLink(self, broker_name, broker_id, only_this)

    @property
    def link_version(self) -> int:
        """A number that changes when a link may lead to another connection, or to none."""
        return self._heartbeats.version

    def on_route_changed(self, hook: Callable[[str, TopicRoute], None]) -> None:
        """Call `hook(topic, route)` on the I/O thread when a route is new or has changed."""
        self._route_hooks.append(hook)

    def _route_changed(self, route: TopicRoute | None, added: frozenset[str], removed: frozenset[str]) -> None:
        self._heartbeats.version += 1
        for address in added & self._lingering.keys():
            del self._lingering[address]
        former = {address: name for name, ids in self._routes.former.items() for address in ids.values()}
        for address in removed:
            log.info("broker=%s is in no route any longer", address)
            if address in former and self._in_use(former[address]):
                self._lingering[address] = former[address]
            else:
                self._release_address(address)
        for address in self._heartbeat_targets() & added:
            self._register_in_background(address)
        if route is not None:
            self._notify(self._route_hooks, route.topic, route)

    def on_address_refused(self, hook: OnAddressRefused) -> None:
        """Call `hook(address, why)` on the I/O thread when a broker's address is not allowed."""
        self._refused_hooks.append(hook)

    def _address_refused(self, address: str, why: str) -> None:
        if not self._refused_hooks:
            log.warning("%s", why)
        self._notify(self._refused_hooks, address, why)

    def keep_reachable(self, in_use: Callable[[str], bool]) -> None:
        """Keep the addresses of brokers that no route names while `in_use(broker_name)` is true.

        A name server may lose a broker that is still up, and the last offsets of its queues must be stored there.
        """
        self._in_use = in_use

    def _release_address(self, address: str) -> None:
        self._lingering.pop(address, None)
        self._routes.release_address(address)
        self._heartbeats.forget(address)
        self._losses.pop(address, None)
        if self._connections is not None:
            self._connections.drop(address, "no route names this broker any longer")

    async def _keep_routes_fresh(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._jittered(self.config.route_refresh_interval_s)):
                    await self._refresh_wanted.wait()
                await asyncio.sleep(_REFRESH_GAP_S * self._random.random())
            except TimeoutError:
                pass
            self._refresh_wanted.clear()
            await self._routes.refresh()
            for address in [address for address, name in self._lingering.items() if not self._in_use(name)]:
                self._release_address(address)
            await asyncio.sleep(min(_REFRESH_GAP_S, self.config.route_refresh_interval_s))

    def _jittered(self, interval_s: float) -> float:
        return interval_s * (1 + _JITTER * (2 * self._random.random() - 1))

    # --- membership

    def add_consumer(self, group: str, data: Callable[[], ConsumerData]) -> None:
        """Include a consumer group in heartbeats; `data` returns its current subscriptions."""
        self._heartbeats.add_consumer(group, data)

    def remove_consumer(self, group: str) -> None:
        """Exclude a consumer group from heartbeats; see also `unregister`."""
        self._heartbeats.remove_consumer(group)

    def add_producer(self, group: str) -> None:
        """Include a producer group in heartbeats."""
        self._heartbeats.add_producer(group)

    def remove_producer(self, group: str) -> None:
        """Exclude a producer group from heartbeats; see also `unregister`."""
        self._heartbeats.remove_producer(group)

    async def heartbeat(self) -> int:
        """Send a heartbeat to every known broker; only to masters if all groups are producer groups.

        Returns the number of brokers that responded. The others are logged and retried.
        """
        return await self._heartbeats.send_all(self._heartbeat_targets())

    async def heartbeat_broker(self, address: str) -> None:
        """Send a heartbeat to one broker.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: the broker did not accept it.
        """
        await self._heartbeats.send(address)

    async def open_registered_connection(self, address: str) -> Connection:
        """Return an open connection on which the broker has received a heartbeat, if this client sends any.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: no connection, or the heartbeat failed.
        """
        return await self._heartbeats.send(address, only_if_new=True)

    def find_registered_connection(self, address: str) -> Connection | None:
        """Return the connection that `open_registered_connection` would return, None if it does not exist yet."""
        connection = self._connections.peek(address) if self._connections is not None else None
        return connection if connection is not None and self._heartbeats.is_registered(connection) else None

    def broker_version(self, address: str) -> int | None:
        """Return the version number in a broker's responses to heartbeats, None before the first one."""
        return self._heartbeats.versions.get(address)

    async def unregister(self, *, consumer_group: str | None = None, producer_group: str | None = None) -> None:
        """Unregister a group of this client at all brokers; pass exactly one of the two arguments.

        Heartbeats exclude the group from now on. This is best effort: a broker that does not respond removes the
        client when the connection ends.
        """
        members = self._heartbeat_targets(every=True)
        connections = [each for each in self._running_connections().all() if each.address in members]
        await self._heartbeats.unregister(connections, consumer_group, producer_group)

    def _heartbeat_targets(self, *, every: bool = False) -> frozenset[str]:
        """Return the addresses of the brokers that should receive heartbeats."""
        if every or self._heartbeats.has_consumers:
            return self._routes.addresses | self._lingering.keys() if self._lingering else self._routes.addresses
        return self._routes.masters()

    async def _connect_for_heartbeat(self, address: str) -> Connection:
        return await self._running_connections().get(address)

    async def _call_registered(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        return check_response(
            await self._call_connection(connection, command, self.config.call_timeout_s), connection.address
        )

    async def _keep_membership(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(self.config.heartbeat_interval_s))
            await self.heartbeat()

    def on_broker_lost(self, hook: Callable[[str, str], None]) -> None:
        """Call `hook(address, reason)` on the I/O thread when the connection to a broker is lost."""
        self._lost_hooks.append(hook)

    def on_broker_reconnected(self, hook: Callable[[str], None]) -> None:
        """Call `hook(address)` on the I/O thread when a broker has received a heartbeat on a new connection.

        The broker may have lost locks, members, and commits of the last seconds. The first connection does not count.
        """
        self._reconnect_hooks.append(hook)

    def _connection_lost(self, connection: Connection, reason: str) -> None:
        address = connection.address
        self._unanswered.pop(address, None)
        if self.state is not ClusterState.RUNNING or address not in self._heartbeat_targets(every=True):
            return
        now, (last_at, losses) = self.loop.time(), self._losses.get(address, (0.0, 0))
        self._losses[address] = now, losses + 1 if losses and now - last_at < _LOSS_WINDOW_S else 1
        log.log(self._loss_level(address), "broker=%s connection lost reason=%s", address, reason)
        self._refresh_wanted.set()
        if address in self._heartbeat_targets():
            self._register_in_background(address)
        self._notify(self._lost_hooks, address, reason)

    def _reconnected(self, address: str) -> None:
        log.log(min(logging.INFO, self._loss_level(address)), "broker=%s is connected again", address)
        self._notify(self._reconnect_hooks, address)

    def _loss_level(self, address: str) -> int:
        """Return the log level of a loss: DEBUG after the first ones of a broker that keeps closing connections."""
        losses = self._losses.get(address, (0.0, 0))[1]
        return logging.DEBUG if losses > _LOGGED_LOSSES else logging.WARNING

    def _register_in_background(self, address: str) -> None:
        """Send a heartbeat to a new or reconnecting broker as soon as it is reachable."""
        if self._heartbeats.is_needed and address not in self._registering:
            self._registering.add(address)
            self.spawn(self._register_until_known(address), f"send a heartbeat to {address}")

    async def _register_until_known(self, address: str) -> None:
        backoff = Backoff(_FIRST_REGISTER_PAUSE_S, _LONGEST_REGISTER_PAUSE_S, jitter=self._random.random)
        losses = self._losses.get(address, (0.0, 0))[1]
        try:
            if losses > _LOGGED_LOSSES:  # it accepts connections and closes them
                await asyncio.sleep(_LOSS_PAUSES.pause_s(losses))
            while self._heartbeats.is_needed and address in self._heartbeat_targets():
                try:
                    await self.open_registered_connection(address)
                    return
                except RocketError as error:
                    log.debug("broker=%s not reached reason=%s", address, error)
                await asyncio.sleep(backoff.failed())
        finally:
            self._registering.discard(address)

    # --- requests of brokers

    def on_request(self, code: RequestCode, handler: RequestHandler) -> None:
        """Handle requests of brokers with this `code` by `handler`."""
        self._requests.on_request(code, handler)

    def on_request_refused(self, hook: OnRefused) -> None:
        """Call `hook(code, address, why)` on the I/O thread for each refused request."""
        self._requests.on_refused(hook)

    def _is_broker(self, address: str) -> bool:
        """Return whether `address` is that of a broker that a route names, or whose queues are in use."""
        return address in self._routes.addresses or address in self._lingering

    # --- unexpected errors

    def on_failure(self, hook: Callable[[BaseException], None]) -> None:
        """Call `hook(error)` on the I/O thread when a task ended or a hook raised unexpectedly. Nothing restarts it."""
        self._failure_hooks.append(hook)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the cluster is closed. An error counts as a client failure."""
        task = self.loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report_failure(f"background task {task.get_name()!r} ended", error)

    def _notify(self, hooks: list[Callable[..., None]], *facts: object) -> None:
        for hook in hooks:
            try:
                hook(*facts)
            except Exception as error:
                self._report_failure(f"hook {hook!r} raised", error)

    def handle_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception that nothing else handles: the exception handler of a loop that only this cluster uses.

        Network errors are logged at DEBUG, because the calls that they affect raise them. Others are client failures.
        """
        error = context.get("exception")
        if error is None or isinstance(error, (RocketError, OSError)):
            log.debug("loop: %s exception=%r", context.get("message"), error)
        else:
            self._report_failure(str(context.get("message")), error)

    def _report_failure(self, what: str, error: BaseException) -> None:
        log.error("client_id=%s failed: %s", self.client_id, what, exc_info=error)
        for hook in self._failure_hooks:
            hook(error)


def _to_result(response: RemotingCommand | Exception, address: str) -> RemotingCommand | RocketError:
    if isinstance(response, RemotingCommand):
        return response if response.code == ResponseCode.SUCCESS else read_error(response, address)
    if isinstance(response, RocketError):
        return response
    raise response


def tls_context(tls: bool | ssl.SSLContext) -> ssl.SSLContext | None:
    """Return the context for connections to name servers and brokers, None for connections without TLS.

    True verifies certificate and host name against the system's authorities. By default brokers present a self-signed
    certificate, new at every start, which no client can verify. To accept any certificate from any peer:

        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        PushConsumer(group, tls=context)
    """
    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context() if tls else None
