"""A client's view of one RocketMQ cluster: name servers, routes, brokers, its membership, and requests to it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.client import Client, ClusterState
from pyrocket_consumer.cluster.membership import BrokerLink, Membership
from pyrocket_consumer.cluster.routes import NameServers, Routes
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MASTER_ID, TopicRoute
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, request_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Connection
from pyrocket_consumer.transport.io_thread import IoThread

log = logger("cluster")

_REFRESH_GAP_S = 1.0  # between two refreshes of routes that lost connections cause

RequestHandler = Callable[[RemotingCommand, str], "Awaitable[RemotingCommand | None] | None"]
"""Handles a request of a broker (second argument: its address) and returns the response, None for no response.

A plain function is called at once, which suits frequent notifications. A coroutine function runs as a task. To refuse
a request, the handler raises a RocketError; the response then contains its text.
"""

OnRefused = Callable[[int, str, str], None]
"""Called for each refused request with its code, the address of the sender, and the reason."""

MAX_IN_FLIGHT = 64
"""How many requests with one code a broker may have in flight here. Its threads wait for at most 16 responses."""

MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""How many bytes a broker's requests in flight may hold. A single one may be as large as any request."""

_MAX_LOGGED = 100


class Cluster(Client):
    """The name servers and brokers of one cluster, and membership in it.

    `routes`, `broker` and `link` know the brokers, `membership` sends heartbeats, and `requests` handles what brokers
    send. `events` gets what its user may react to.
    """

    def __init__(
        self, config: ClientConfig, client_id: str, *, io: IoThread | None = None, rng: random.Random | None = None
    ) -> None:
        super().__init__(config, client_id, io=io, rng=rng)
        self.name_servers = NameServers(self)
        self.routes = Routes(self.name_servers.fetch_route, self._route_changed)
        self.membership = Membership(self, self.routes)
        self.requests = ServerRequests(lambda address: address in self.routes.all_addresses)
        self._refresh_wanted = asyncio.Event()

    async def start_on_loop(self) -> None:
        await super().start_on_loop()
        await self.name_servers.check()
        self.spawn(self._keep_routes_fresh(), "refresh routes")
        self.spawn(self.membership.keep(), "send heartbeats")

    # --- brokers

    def broker(self, broker_name: str) -> Broker:
        """Return the typed calls to one broker."""
        return Broker(self, self.routes, broker_name)

    def link(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> BrokerLink:
        """Return the way to the broker with this id or, unless `only_this`, to that with the next best id."""
        return BrokerLink(self.membership, broker_name, broker_id, only_this)

    def _gets_heartbeats(self, address: str) -> bool:
        return self.membership.gets_heartbeats(address)

    def _handle_request(
        self, command: RemotingCommand, connection: Connection
    ) -> Awaitable[RemotingCommand | None] | None:
        return self.requests.handle(command, connection)

    def _connection_lost(self, connection: Connection, reason: str) -> None:
        super()._connection_lost(connection, reason)
        address = connection.address
        if self.state is ClusterState.RUNNING and address in self.routes.all_addresses:
            self.membership.count_loss(address, reason)
            self._refresh_wanted.set()
            self.membership.register_soon(address)
            self.notify(self.events.broker_lost, address, reason)

    # --- routes

    def _route_changed(self, route: TopicRoute | None, added: frozenset[str], removed: frozenset[str]) -> None:
        self.membership.link_version += 1
        for address in removed:
            log.info("broker=%s is in no route any longer", address)
            self._release_if_unused(address)
        for address in added:
            self.membership.register_soon(address)
        if route is not None:
            self.notify(self.events.route_changed, route.topic, route)

    def _release_if_unused(self, address: str) -> None:
        """Disconnect from a broker that no route names, unless it is in use."""
        name = self.routes.lingering.get(address)
        if name is None or not self.events.uses_broker(name):
            self.routes.release_address(address)
            self.membership.forget(address)
            self.drop_connection(address, "no route names this broker any longer")

    async def _keep_routes_fresh(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.jittered(self.config.route_refresh_interval_s)):
                    await self._refresh_wanted.wait()
                await asyncio.sleep(_REFRESH_GAP_S * self.rng.random())
            except TimeoutError:
                pass
            self._refresh_wanted.clear()
            await self.routes.refresh()
            for address in list(self.routes.lingering):
                self._release_if_unused(address)
            await asyncio.sleep(min(_REFRESH_GAP_S, self.config.route_refresh_interval_s))


class ServerRequests:
    """Passes requests of servers to their handlers if they are allowed. Confined to the I/O thread.

    It reports each refused request. It also responds, unless the request is one-way or the server reads no responses.
    """

    def __init__(self, is_broker: Callable[[str], bool]) -> None:
        """`is_broker` returns whether an address is that of a broker whose topics or queues are in use."""
        self.on_refused: OnRefused = self._log_refused
        """Called for each refused request. By default, the first one of each kind is logged."""
        self._is_broker = is_broker
        self._handlers: dict[int, RequestHandler] = {}
        self._in_flight: Counter[tuple[str, int]] = Counter()  # by address and code
        self._in_flight_bytes: Counter[str] = Counter()  # by address
        self._logged: set[tuple[int, str]] = set()

    def on_request(self, code: RequestCode, handler: RequestHandler) -> None:
        """Handle requests of brokers with this `code` by `handler`."""
        self._handlers[code] = handler

    def handle(self, command: RemotingCommand, connection: Connection) -> Awaitable[RemotingCommand | None] | None:
        """Handle or refuse a request. Return an awaitable of the response, None if the request is finished."""
        code, address = command.code, connection.address
        if (refusal := self._check_refused(command, connection)) is not None:
            connection.respond(command, refusal)
            return None
        handler = self._handlers.get(code)
        if handler is None:
            remark = f" request type {code} not supported"
            connection.respond(command, command.make_response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))
            return None
        try:
            handling = handler(command, address)
        except Exception as error:
            connection.respond(command, self._failure_response(command, address, error))
            return None
        if handling is None:
            return None
        self._in_flight[address, code] += 1
        self._in_flight_bytes[address] += len(command.body)
        return self._run_handler(handling, command, address)

    def _check_refused(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        refusal_code, in_flight_bytes = ResponseCode.SYSTEM_BUSY, self._in_flight_bytes[connection.address]
        if not self._is_broker(connection.address):
            refusal_code, why = ResponseCode.SYSTEM_ERROR, "only brokers of the topics in use may send requests"
        elif command.skipped_body_bytes:
            refusal_code, why = ResponseCode.SYSTEM_ERROR, f"a body of {command.skipped_body_bytes} bytes is too large"
        elif self._in_flight[connection.address, command.code] >= MAX_IN_FLIGHT:
            why = f"{MAX_IN_FLIGHT} of them are in flight"
        elif in_flight_bytes and in_flight_bytes + len(command.body) > MAX_IN_FLIGHT_BYTES:
            why = f"requests in flight hold {in_flight_bytes} bytes"
        elif connection.is_backlogged and not command.is_oneway:
            why = "it does not read the responses"
        else:
            return None
        self.on_refused(command.code, connection.address, why)
        return command.make_response(refusal_code, f"{request_name(command.code)} is refused: {why}")

    async def _run_handler(
        self, handling: Awaitable[RemotingCommand | None], command: RemotingCommand, address: str
    ) -> RemotingCommand | None:
        try:
            return await handling
        except Exception as error:
            return self._failure_response(command, address, error)
        finally:
            self._in_flight[address, command.code] -= 1
            self._in_flight_bytes[address] -= len(command.body)

    def _failure_response(self, command: RemotingCommand, address: str, error: Exception) -> RemotingCommand:
        if isinstance(error, RocketError):
            self.on_refused(command.code, address, str(error))
            return command.make_response(ResponseCode.SYSTEM_ERROR, str(error))
        if self._is_first_of_kind(command.code, type(error).__name__):
            log.error("request=%s broker=%s failed", request_name(command.code), address, exc_info=error)
        return command.make_response(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")

    def _log_refused(self, code: int, address: str, why: str) -> None:
        if self._is_first_of_kind(code, address):
            log.warning("request=%s from=%s refused: %s", request_name(code), address, why)

    def _is_first_of_kind(self, code: int, of: str) -> bool:
        if (code, of) in self._logged or len(self._logged) >= _MAX_LOGGED:
            return False
        self._logged.add((code, of))
        return True
