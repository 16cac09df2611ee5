"""A client's view of one RocketMQ cluster: name servers, routes, brokers, and its membership."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.client import Client, ClusterState
from pyrocket_consumer.cluster.membership import BrokerLink, Membership
from pyrocket_consumer.cluster.routes import NameServers, Routes
from pyrocket_consumer.cluster.server_requests import ServerRequests
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import MASTER_ID, TopicRoute
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Connection
from pyrocket_consumer.transport.io_thread import IoThread

log = logger("cluster")

_REFRESH_GAP_S = 1.0  # between two refreshes of routes that lost connections cause


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
