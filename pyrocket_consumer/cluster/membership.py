"""The brokers that know this client. Heartbeats register it, on the connection that a broker uses for its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pyrocket_consumer.cluster.client import Client, check_response
from pyrocket_consumer.cluster.routes import Routes
from pyrocket_consumer.errors import ConnectError, RocketError
from pyrocket_consumer.protocol.bodies import ConsumerData, HeartbeatData, encode_heartbeat
from pyrocket_consumer.protocol.command import HeartbeatHeader, UnregisterClientHeader, request
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.backoff import Backoff
from pyrocket_consumer.transport.connection import Connection

log = logger("cluster")

_FIRST_REGISTER_PAUSE_S = 0.1
_LONGEST_REGISTER_PAUSE_S = 5.0
_LOSS_WINDOW_S = 10.0  # losses of a connection at most this far from each other count as consecutive
_LOGGED_LOSSES = 3  # consecutive losses that are logged as warnings and cause an immediate heartbeat
_LOSS_PAUSES = Backoff(0.2, _LONGEST_REGISTER_PAUSE_S, free=_LOGGED_LOSSES)


class Membership:
    """The groups of a client, and the brokers that know them. Confined to the I/O thread after the start.

    A broker identifies a member by its connection. So a heartbeat must precede the first pull on a new connection.
    """

    def __init__(self, client: Client, routes: Routes) -> None:
        self.routes = routes
        self.versions: dict[str, int] = {}
        """The version number in each broker's responses to heartbeats, by address."""
        self.link_version = 0
        """A number that grows when a link may lead to another connection, or to none."""
        self._client = client
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}
        self._producers: set[str] = set()
        self._registered: dict[str, Connection] = {}  # address -> the connection of the last successful heartbeat
        self._registered_once: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._unreachable: set[str] = set()
        self._registering: set[str] = set()
        self._losses: dict[str, tuple[float, int]] = {}  # by address: the time of the last loss, consecutive losses

    # --- groups

    def add_consumer(self, group: str, data: Callable[[], ConsumerData]) -> None:
        """Include a consumer group in heartbeats; `data` returns its current subscriptions."""
        self._consumers[group] = data
        self.link_version += 1

    def add_producer(self, group: str) -> None:
        """Include a producer group in heartbeats."""
        self._producers.add(group)
        self.link_version += 1

    async def unregister(self, *, consumer_group: str | None = None, producer_group: str | None = None) -> None:
        """Unregister a group of this client at all brokers; pass exactly one of the two arguments.

        Heartbeats exclude the group from now on. This is best effort: a broker that does not respond removes the
        client when the connection ends. The request waits for a heartbeat in progress. Otherwise that could register
        the client again.
        """
        if consumer_group is not None:
            self._consumers.pop(consumer_group, None)
        if producer_group is not None:
            self._producers.discard(producer_group)
        brokers, connections = self.routes.all_addresses, self._client.open_connections().all()
        header = UnregisterClientHeader(self._client.client_id, producer_group, consumer_group)

        async def unregister_on(connection: Connection) -> None:
            async with self._locks.setdefault(connection.address, asyncio.Lock()):
                await self._call(connection, request(header))

        outcomes = await asyncio.gather(
            *(unregister_on(each) for each in connections if each.address in brokers), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, RocketError):
                log.debug("client_id=%s not unregistered everywhere reason=%s", self._client.client_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    # --- heartbeats

    @property
    def _has_groups(self) -> bool:
        return bool(self._consumers or self._producers)

    def _targets(self) -> frozenset[str]:
        """Return the addresses that should receive heartbeats: slaves must know consumers, but not producers."""
        return self.routes.all_addresses if self._consumers else self.routes.masters()

    def gets_heartbeats(self, address: str) -> bool:
        """Return whether the server at `address` receives heartbeats."""
        if self._consumers:
            return address in self.routes.addresses or address in self.routes.lingering
        return bool(self._producers) and address in self.routes.masters()

    async def keep(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(self._client.jittered(self._client.config.heartbeat_interval_s))
            await self.heartbeat()

    async def heartbeat(self) -> int:
        """Send a heartbeat to every known broker; only to masters if all groups are producer groups.

        Returns the number of brokers that responded. The others are logged and retried.
        """
        if not self._has_groups:
            return 0
        return sum(await asyncio.gather(*map(self._send_or_log, self._targets())))

    async def _send_or_log(self, address: str) -> bool:
        try:
            await self.heartbeat_broker(address)
        except RocketError as error:
            level = logging.DEBUG if address in self._unreachable else logging.WARNING
            log.log(level, "broker=%s had no heartbeat reason=%s", address, error)
            self._unreachable.add(address)
            return False
        if address in self._unreachable:
            self._unreachable.discard(address)
            log.warning("broker=%s has heartbeats again", address)
        return True

    async def heartbeat_broker(self, address: str, *, only_if_new: bool = False) -> Connection:
        """Send a heartbeat to one broker, and return the connection on which the response arrived.

        With `only_if_new`, send nothing on a registered connection. Heartbeats to one address are sent one after the
        other. Otherwise a broker could handle the older one last, and use its outdated subscriptions.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: no connection, or the broker did not accept it.
        """
        connection = await self._client.connection(address)
        async with self._locks.setdefault(address, asyncio.Lock()):
            if not self._has_groups or (only_if_new and self._is_registered(connection)):
                return connection
            response = await self._call(connection, request(HeartbeatHeader(), self._heartbeat_body()))
            self.versions[address] = response.version
            is_new = self._registered.get(address) is not connection
            reconnected = is_new and address in self._registered_once
            self._registered[address] = connection
            self._registered_once.add(address)
            self.link_version += is_new
        if reconnected:
            log.log(min(logging.INFO, self._loss_level(address)), "broker=%s is connected again", address)
            self._client.notify(self._client.events.broker_reconnected, address)
        return connection

    def _heartbeat_body(self) -> bytes:
        consumers = tuple(data() for data in self._consumers.values())
        return encode_heartbeat(HeartbeatData(self._client.client_id, consumers, tuple(sorted(self._producers))))

    async def _call(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        timeout_s = self._client.config.call_timeout_s
        return check_response(await self._client.call_or_close(connection, command, timeout_s), connection.address)

    # --- registered connections

    def _is_registered(self, connection: Connection) -> bool:
        """Return whether a heartbeat has succeeded on this connection, or the client needs none."""
        return not self._has_groups or self._registered.get(connection.address) is connection

    async def connect(self, address: str) -> Connection:
        """Return an open connection on which the broker has received a heartbeat, if this client sends any.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: no connection, or the heartbeat failed.
        """
        return await self.heartbeat_broker(address, only_if_new=True)

    def find_connection(self, address: str) -> Connection | None:
        """Return the connection that `connect` would return, None if it does not exist yet."""
        connection = self._client.find_connection(address)
        return connection if connection is not None and self._is_registered(connection) else None

    def register_soon(self, address: str) -> None:
        """Send a heartbeat to a new or reconnecting broker as soon as it is reachable, if it should receive any."""
        if address not in self._registering and self.gets_heartbeats(address):
            self._registering.add(address)
            self._client.spawn(self._register_until_known(address), f"send a heartbeat to {address}")

    async def _register_until_known(self, address: str) -> None:
        backoff = Backoff(_FIRST_REGISTER_PAUSE_S, _LONGEST_REGISTER_PAUSE_S, jitter=self._client.rng.random)
        losses = self._losses.get(address, (0.0, 0))[1]
        try:
            if losses > _LOGGED_LOSSES:  # it accepts connections and closes them
                await asyncio.sleep(_LOSS_PAUSES.pause_s(losses))
            while self.gets_heartbeats(address):
                try:
                    await self.connect(address)
                    return
                except RocketError as error:
                    log.debug("broker=%s not reached reason=%s", address, error)
                await asyncio.sleep(backoff.failed())
        finally:
            self._registering.discard(address)

    def count_loss(self, address: str, reason: str) -> None:
        """Count and log the loss of the connection to a broker."""
        now, (last_at, losses) = self._client.loop.time(), self._losses.get(address, (0.0, 0))
        self._losses[address] = now, losses + 1 if losses and now - last_at < _LOSS_WINDOW_S else 1
        log.log(self._loss_level(address), "broker=%s connection lost reason=%s", address, reason)

    def _loss_level(self, address: str) -> int:
        """Return the log level of a loss: DEBUG after the first ones of a broker that keeps closing connections."""
        losses = self._losses.get(address, (0.0, 0))[1]
        return logging.DEBUG if losses > _LOGGED_LOSSES else logging.WARNING

    def forget(self, address: str) -> None:
        """Forget the connection to a broker that no route names. If the broker returns, that counts as a reconnect."""
        self._registered.pop(address, None)
        self._locks.pop(address, None)
        self._unreachable.discard(address)
        self.versions.pop(address, None)
        self._losses.pop(address, None)
        self.link_version += 1


class BrokerLink:
    """The way to one broker: its address, and the connection on which it knows this client. For the I/O thread.

    Keep it as long as needed: it follows each change of routes, connections and heartbeats. While nothing changes,
    `connection` costs little, so read it before every request.
    """

    __slots__ = ("_connection", "_membership", "_only_this", "_version", "broker_id", "name")

    def __init__(self, membership: Membership, name: str, broker_id: int, only_this: bool) -> None:
        self.name = name
        self.broker_id = broker_id
        self._membership = membership
        self._only_this = only_this
        self._connection: Connection | None = None
        self._version = -1

    @property
    def address(self) -> str | None:
        """The broker's address. None if no route names one."""
        return self._membership.routes.address(self.name, self.broker_id, only_this=self._only_this)

    @property
    def connection(self) -> Connection | None:
        """The open connection on which the broker has received a heartbeat, if this client sends any; None without."""
        connection = self._connection
        if connection is None or connection.closed or self._version != self._membership.link_version:
            address = self.address
            connection = self._membership.find_connection(address) if address is not None else None
            self._connection, self._version = connection, self._membership.link_version
        return connection

    async def open(self) -> Connection:
        """Return `connection`. If necessary, connect and send a heartbeat.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: no connection, or the heartbeat failed.
        """
        if (address := self.address) is None:
            raise ConnectError(self.name, "no route names an address of this broker now")
        return await self._membership.connect(address)
