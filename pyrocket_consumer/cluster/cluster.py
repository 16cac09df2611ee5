"""One client's view of a RocketMQ cluster: its name servers, routes, brokers, and its own membership."""

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
from pyrocket_consumer.cluster.name_servers import NameServers
from pyrocket_consumer.cluster.responses import check_response, read_error
from pyrocket_consumer.cluster.routes import AddressTable, Routes
from pyrocket_consumer.cluster.server_requests import OnRefused, RequestHandler, ServerRequests
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConsumerClosed,
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
from pyrocket_consumer.transport.blocking_connection import BlockingConnection, open_blocking_connection
from pyrocket_consumer.transport.connection import Connection, OnLateResponse, Sign
from pyrocket_consumer.transport.connections import MAYBE_PLAINTEXT, Connections
from pyrocket_consumer.transport.io_thread import IoThread

log = logger("cluster")

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_REFRESH_GAP_S = 1.0  # between two refreshes of routes that lost connections ask for
_FIRST_REGISTER_PAUSE_S = 0.1
_LONGEST_REGISTER_PAUSE_S = 5.0
_LOSS_WINDOW_S = 10.0  # between two connections lost in a row
_LOGGED_LOSSES = 3  # so many are told, and the broker is greeted at once
_MAX_UNANSWERED = 2  # calls in a row without an answer
_JITTER = 0.1  # of an interval, so that clients that start together do not ask together for ever


class ClusterState(Enum):
    """A cluster's life. There is no way back: a closed one stays closed."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"


class Cluster:
    """Calls to the name servers and brokers of one cluster, and membership in it.

    `async` methods, `add_…`, `remove_…`, `on_…` and `forget_topic` belong on the I/O thread (before `start()`: on any);
    `start`, `close`, `run` and `submit` on all other threads; `broker_addresses`, `address` and `broker` on any.

    With `io` the loop is shared and is neither started nor stopped here. Without, each cluster has an I/O thread.
    Time and sockets are reached through that loop only, and chance through `rng` only.
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
        self._losses: dict[str, tuple[float, int]] = {}  # by address: when the last was, and how many in a row
        self._refresh_wanted = asyncio.Event()

    # --- life

    def start(self, timeout_s: float | None = None) -> None:
        """Start, and return when a name server has answered: a wrong address is an error here, not later.

        Raises:
            ConnectError: no name server answers; names every address and its reason. Nothing is left running.
            ConsumerClosed: it was started before.
        """
        if self.state is not ClusterState.CREATED:
            raise ConsumerClosed(f"this client is {self.state.value} and starts only once; make a new one")
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
            raise ConnectError(str(self._name_servers), f"no answer within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise

    async def start_on_loop(self) -> None:
        """Do what `start` does, on the I/O loop; for one that is not a thread of its own."""
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
        """End every connection and background task. Calls that wait get an error. A second close does nothing.

        In a process forked after `start()` it does nothing at all: the connections are the parent's.
        """
        if self._io is None or self._pid is None or self._forked():
            self.state = ClusterState.CLOSED
            return
        if self.state is not ClusterState.CLOSED:
            try:
                self._io.run(self.close_on_loop(), timeout_s)
            except (RequestTimeout, ConsumerClosed) as error:
                log.error("client_id=%s was not closed in time reason=%s", self.client_id, error)
            self.state = ClusterState.CLOSED
        if self._owns_io:
            self._io.stop(timeout_s)

    def warn_unclosed(self, owner: object, close: Callable[[], object] | None = None) -> None:
        """Warn that `owner`, which is about to be collected, was not closed, and have it closed in the background.

        For finalizers. `close` (the cluster's own, by default) must not need `owner`. Nothing happens at the end of the
        process, which has waited for producers, and ends the rest.
        """
        if sys.is_finalizing() or self._forked():
            return
        if self.state is ClusterState.RUNNING and self._io is not None:
            self._io.run_in_background(close or self.close)
            warnings.warn(f"unclosed {owner!r}; call close(), or use `with`", ResourceWarning, 3, source=owner)

    async def close_on_loop(self) -> None:
        """Do what `close` does, on the I/O loop; for one that is not a thread of its own."""
        self.state = ClusterState.CLOSED
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connections is not None:
            await self._connections.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O loop; there is none before `start()`."""
        if self._io is None:
            raise ConsumerClosed("this client is not started; call start() first")
        return self._io.loop

    @property
    def is_signing(self) -> bool:
        """Whether requests are signed, so that a prepared frame cannot be sent as it is."""
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
            ConsumerClosed: the cluster is not running, is closed meanwhile, or belongs to the process this one was
                forked from.
        """
        try:
            return self._usable_io(coroutine).run(coroutine, timeout_s)
        except RocketError as error:  # whatever was made of a connection that was lost by that
            if self.state is ClusterState.CLOSED and not isinstance(error, ConsumerClosed):
                raise ConsumerClosed("the client was closed while the call waited") from error
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` on the I/O thread and return at once; the future gets its result.

        Raises:
            ConsumerClosed: as for `run`.
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
        """Raise ConsumerClosed unless the cluster is running, in this very process."""
        if self._forked():
            raise ConsumerClosed(
                f"this client belongs to process {self._pid}, and this is process {os.getpid()}, forked from it; "
                "make a new one after the fork"
            )
        if self.state is not ClusterState.RUNNING:
            raise ConsumerClosed(f"this client is {self.state.value}, not running; make a new one and start it")

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
        """Return the answer of the server at `address`. Connecting, if need be, counts towards `timeout_s`.

        `accept` are the codes that are no error; `code` replaces the header's request code. `on_late` gets an answer
        that comes after the timeout.

        Raises:
            BrokerError: it answered with another code; PermissionDenied and FlowControl are kinds of it.
            ConnectError: there is no connection. Nothing was sent.
            RequestTimeout, ConnectionLost: no answer came. It may have been done or not.
        """
        command = request(header, body, code=code)
        return await self._send(address, command, timeout_s or self.config.call_timeout_s, accept, on_late)

    async def call_many(
        self, address: str, commands: Collection[RemotingCommand]
    ) -> list[RemotingCommand | RocketError]:
        """Return the answers of the server at `address` to requests that are sent all at once, in their order.

        In the place of an answer is the error that `call` would raise. For thousands of small questions: it takes
        less than half the time of a `call` for each.

        Raises:
            ConnectError: there is no connection. Nothing was sent.
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
        """Return an open connection, and what it has left of `timeout_s`."""
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
        """Return the answer; close a connection on which several in a row did not come.

        What has become of a peer that fell silent is learned only by a new connection: the old one may wait for a
        quarter of an hour. To a broker that knows us heartbeats are the judge, for a busy one still answers those.
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
            connection.close(f"{_MAX_UNANSWERED} calls in a row were not answered")

    async def call_name_server(
        self, header: Header, body: bytes = b"", *, timeout_s: float | None = None, accept: Container[int] = (0,)
    ) -> RemotingCommand:
        """Return the answer of the first name server that gives one; each has `timeout_s`.

        Raises:
            ConnectError: none answered; names every address and its reason. With one name server its own error.
            BrokerError: it said no.
        """
        return await self._name_servers.call(header, body, timeout_s=timeout_s, accept=accept)

    async def read_from_name_server(self, header: Header, decode: Callable[[bytes], T]) -> T:
        """Return `decode(body)` of the first name server whose answer can be read.

        Raises:
            ProtocolError: there is one name server, and what it answered cannot be read.
            ConnectError, BrokerError: as `call_name_server` does.
        """
        return await self._name_servers.read(header, decode)

    async def call_every_name_server(self, header: Header, body: bytes = b"") -> list[RemotingCommand]:
        """Return every name server's answer: for changes, which name servers do not pass on to each other.

        Raises:
            ConnectError: one of them did not answer or said no; names each that failed.
        """
        return await self._name_servers.call_every(header, body)

    async def connection(self, address: str) -> Connection:
        """Return an open connection to `address`.

        Raises:
            ConnectError: there is none to be had.
        """
        return await self._running_connections().get(address)

    async def open_blocking_connection(self, address: str) -> BlockingConnection:
        """Return a new connection to `address`, which the caller waits on and closes itself, in a thread of its own.

        Raises:
            ConnectError: there is none to be had.
        """
        return await open_blocking_connection(
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
            raise ConsumerClosed(f"this client is {self.state.value}, not running; make a new one and start it")
        return self._connections

    def _sign(self, command: RemotingCommand) -> None:
        config = self.config
        assert config.access_key is not None
        assert config.secret_key is not None
        command.fields = sign(command.fields, command.body, config.access_key, config.secret_key, config.security_token)

    # --- routes and brokers

    async def route(self, topic: str, *, refresh: bool = False, after: float | None = None) -> TopicRoute:
        """Return where `topic` lives. It is asked for once, and kept fresh from then on.

        With `refresh` it is asked for now; with `after`, unless it was asked for since that time of the loop. If that
        fails it is an error here, but what was known stays known.

        Raises:
            RouteNotFound: no name server knows the topic, or no broker that has it is up.
            ConnectError, RequestTimeout: no name server answers.
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
        """Return what is known of `topic` without asking anybody."""
        return self._routes.known(topic)

    def forget_topic(self, topic: str) -> None:
        """Keep the route of `topic` fresh no longer; connections to brokers that only it names are closed."""
        self._routes.forget(topic)

    def broker_addresses(self) -> AddressTable:
        """Return broker name -> id -> address, from all routes known, and of brokers kept within reach."""
        named, former = self._routes.brokers, self._routes.former
        if not former:
            return MappingProxyType(named)
        return {name: {**former.get(name, {}), **named.get(name, {})} for name in named.keys() | former.keys()}

    def address(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> str | None:
        """Return where to reach a broker: at the id asked for, else, unless `only_this`, at the next best one."""
        return self._routes.address(broker_name, broker_id, only_this=only_this)

    def broker_name(self, address: str) -> str | None:
        """Return the name of the broker that is at `address`, None if no route names it."""
        return next((name for name, ids in self.broker_addresses().items() if address in ids.values()), None)

    def broker(self, broker_name: str) -> Broker:
        """Return the typed calls to one broker."""
        return Broker(self, broker_name)

    def on_route_changed(self, hook: Callable[[str, TopicRoute], None]) -> None:
        """Have `hook(topic, route)` called, on the I/O thread, when a route is new or differs."""
        self._route_hooks.append(hook)

    def _route_changed(self, route: TopicRoute | None, added: frozenset[str], removed: frozenset[str]) -> None:
        for address in added & self._lingering.keys():
            del self._lingering[address]
        former = {address: name for name, ids in self._routes.former.items() for address in ids.values()}
        for address in removed:
            log.info("broker=%s is named by no route any more", address)
            if address in former and self._in_use(former[address]):
                self._lingering[address] = former[address]
            else:
                self._release_address(address)
        for address in self._heartbeat_targets() & added:
            self._register_in_background(address)
        if route is not None:
            self._notify(self._route_hooks, route.topic, route)

    def on_address_refused(self, hook: OnAddressRefused) -> None:
        """Have `hook(address, why)` called, on the I/O thread, when a broker is not connected to for where it is."""
        self._refused_hooks.append(hook)

    def _address_refused(self, address: str, why: str) -> None:
        if not self._refused_hooks:
            log.warning("%s", why)
        self._notify(self._refused_hooks, address, why)

    def keep_reachable(self, in_use: Callable[[str], bool]) -> None:
        """Have brokers that no route names any more kept within reach while `in_use(broker_name)`.

        Name servers may lose sight of one that is up, and the last offsets of its queues are to be stored there.
        """
        self._in_use = in_use

    def _release_address(self, address: str) -> None:
        self._lingering.pop(address, None)
        self._routes.release_address(address)
        self._heartbeats.forget(address)
        self._losses.pop(address, None)
        if self._connections is not None:
            self._connections.drop(address, "no route names this broker any more")

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
        """Have heartbeats tell of a consumer group; `data` says what it subscribes to at that moment."""
        self._heartbeats.add_consumer(group, data)

    def remove_consumer(self, group: str) -> None:
        """Have heartbeats no longer tell of a consumer group; see also `unregister`."""
        self._heartbeats.remove_consumer(group)

    def add_producer(self, group: str) -> None:
        """Have heartbeats tell of a producer group."""
        self._heartbeats.add_producer(group)

    def remove_producer(self, group: str) -> None:
        """Have heartbeats no longer tell of a producer group; see also `unregister`."""
        self._heartbeats.remove_producer(group)

    async def heartbeat(self) -> int:
        """Send a heartbeat to every broker known (only to masters, if all groups are producers').

        Returns how many answered. The others are logged and tried again.
        """
        return await self._heartbeats.send_all(self._heartbeat_targets())

    async def heartbeat_broker(self, address: str) -> None:
        """Send a heartbeat to one broker.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: it did not take it.
        """
        await self._heartbeats.send(address)

    async def open_registered_connection(self, address: str) -> Connection:
        """Return an open connection on which the broker knows us: one that has had a heartbeat, if we send any.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: it could not be had.
        """
        return await self._heartbeats.send(address, only_if_new=True)

    def find_registered_connection(self, address: str) -> Connection | None:
        """Return the connection `open_registered_connection` would, if there is one right now."""
        connection = self._connections.peek(address) if self._connections is not None else None
        return connection if connection is not None and self._heartbeats.is_registered(connection) else None

    def broker_version(self, address: str) -> int | None:
        """Return the version number a broker answered heartbeats with, None before the first."""
        return self._heartbeats.versions.get(address)

    async def unregister(self, *, consumer_group: str | None = None, producer_group: str | None = None) -> None:
        """Have the brokers forget a group of ours at once; exactly one of the two.

        Heartbeats no longer tell of it. Best effort: a broker that does not answer finds out by itself, when the
        connection ends.
        """
        members = self._heartbeat_targets(every=True)
        connections = [each for each in self._running_connections().all() if each.address in members]
        await self._heartbeats.unregister(connections, consumer_group, producer_group)

    def _heartbeat_targets(self, *, every: bool = False) -> frozenset[str]:
        """Return the brokers that should know us."""
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
        """Have `hook(address, reason)` called, on the I/O thread, when the connection to a broker ends unasked."""
        self._lost_hooks.append(hook)

    def on_broker_reconnected(self, hook: Callable[[str], None]) -> None:
        """Have `hook(address)` called, on the I/O thread, when a broker has had a heartbeat on a new connection.

        It may have forgotten locks, members, and commits of the last seconds. Not called for the first connection.
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
        """Return how a loss is logged: of a broker that takes connections and ends them, the first ones are enough."""
        losses = self._losses.get(address, (0.0, 0))[1]
        return logging.DEBUG if losses > _LOGGED_LOSSES else logging.WARNING

    def _register_in_background(self, address: str) -> None:
        """Get a heartbeat to a broker that is new, or was lost, as soon as it can be had."""
        if self._heartbeats.is_needed and address not in self._registering:
            self._registering.add(address)
            self.spawn(self._register_until_known(address), f"greet {address}")

    async def _register_until_known(self, address: str) -> None:
        pause_s = _FIRST_REGISTER_PAUSE_S
        excess = min(self._losses.get(address, (0.0, 0))[1] - _LOGGED_LOSSES, 16)
        try:
            if excess > 0:  # it takes connections and ends them
                await asyncio.sleep(min(_FIRST_REGISTER_PAUSE_S * 2**excess, _LONGEST_REGISTER_PAUSE_S))
            while self._heartbeats.is_needed and address in self._heartbeat_targets():
                try:
                    await self.open_registered_connection(address)
                    return
                except RocketError as error:
                    log.debug("broker=%s not reached reason=%s", address, error)
                await asyncio.sleep(pause_s * (0.5 + self._random.random() / 2))
                pause_s = min(2 * pause_s, _LONGEST_REGISTER_PAUSE_S)
        finally:
            self._registering.discard(address)

    # --- requests of brokers

    def on_request(self, code: RequestCode, handler: RequestHandler) -> None:
        """Have a broker's requests with `code` handled by `handler`."""
        self._requests.on_request(code, handler)

    def on_request_refused(self, hook: OnRefused) -> None:
        """Have `hook(code, address, why)` called, on the I/O thread, for each request that is not obeyed."""
        self._requests.on_refused(hook)

    def _is_broker(self, address: str) -> bool:
        """Tell whether a broker that a route names, or whose queues are in use, is at `address`."""
        return address in self._routes.addresses or address in self._lingering

    # --- surprises

    def on_failure(self, hook: Callable[[BaseException], None]) -> None:
        """Have `hook(error)` called, on the I/O thread, when something ended by surprise. Nothing restarts it."""
        self._failure_hooks.append(hook)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the cluster is closed. An error is a failure of the client."""
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
        """Judge what the loop could not hand to anybody. Network trouble is reported where it matters; a bug is not.

        The exception handler of a loop that is this cluster's alone.
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
    """Return the context for connections to name servers and brokers, None for plain ones.

    True verifies certificate and host name against the system's authorities. Out of the box brokers present a
    self-signed certificate, new at every start, that no client can verify. To accept any, from anybody:

        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        PushConsumer(group, tls=context)
    """
    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context() if tls else None
