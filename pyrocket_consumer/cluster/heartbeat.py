"""Heartbeats: they register the client at every broker, on the connection that the broker uses for its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.protocol.bodies import ConsumerData, HeartbeatData, encode_heartbeat
from pyrocket_consumer.protocol.command import HeartbeatHeader, UnregisterClientHeader, request
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Connection

log = logger("cluster")


class Heartbeats:
    """The groups of a client and the brokers that know them. Confined to the I/O thread.

    A broker identifies a member by its connection. So a heartbeat must precede the first pull on a new connection.
    """

    def __init__(
        self,
        client_id: str,
        connect: Callable[[str], Awaitable[Connection]],
        call: Callable[[Connection, RemotingCommand], Awaitable[RemotingCommand]],
        on_reconnected: Callable[[str], None],
    ) -> None:
        self._client_id = client_id
        self._connect = connect
        self._call = call
        self._on_reconnected = on_reconnected
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}
        self._producers: set[str] = set()
        self._registered: dict[str, Connection] = {}  # address -> the connection of the last successful heartbeat
        self._registered_once: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._unreachable: set[str] = set()
        self.versions: dict[str, int] = {}
        self.version = 0
        """A number that grows when a registered connection may no longer count as registered."""

    def add_consumer(self, group: str, data: Callable[[], ConsumerData]) -> None:
        self._consumers[group] = data
        self.version += 1

    def remove_consumer(self, group: str) -> None:
        self._consumers.pop(group, None)

    def add_producer(self, group: str) -> None:
        self._producers.add(group)
        self.version += 1

    def remove_producer(self, group: str) -> None:
        self._producers.discard(group)

    @property
    def has_consumers(self) -> bool:
        """Whether there are consumer groups, which slaves must know, too."""
        return bool(self._consumers)

    @property
    def is_needed(self) -> bool:
        """Whether the client has any group."""
        return bool(self._consumers or self._producers)

    def is_registered(self, connection: Connection) -> bool:
        """Return whether a heartbeat has succeeded on this connection, or the client needs none."""
        return not self.is_needed or self._registered.get(connection.address) is connection

    async def send(self, address: str, *, only_if_new: bool = False) -> Connection:
        """Send a heartbeat to `address`, and return the connection on which the response arrived.

        With `only_if_new`, send nothing on a registered connection. Heartbeats to one address are sent one after the
        other. Otherwise a broker could handle the older one last, and use its outdated subscriptions.
        """
        connection = await self._connect(address)
        async with self._locks.setdefault(address, asyncio.Lock()):
            if not self.is_needed or (only_if_new and self.is_registered(connection)):
                return connection
            response = await self._call(connection, request(HeartbeatHeader(), self._body()))
            self.versions[address] = response.version
            is_new = self._registered.get(address) is not connection
            reconnected = is_new and address in self._registered_once
            self._registered[address] = connection
            self.version += is_new
            self._registered_once.add(address)
        if reconnected:
            self._on_reconnected(address)
        return connection

    def _body(self) -> bytes:
        consumers = tuple(data() for data in self._consumers.values())
        return encode_heartbeat(HeartbeatData(self._client_id, consumers, tuple(sorted(self._producers))))

    async def send_all(self, addresses: Iterable[str]) -> int:
        """Send a heartbeat to each of `addresses` concurrently, and return the number of responses."""
        if not self.is_needed:
            return 0
        return sum(await asyncio.gather(*(self._send_or_log(address) for address in addresses)))

    async def _send_or_log(self, address: str) -> bool:
        try:
            await self.send(address)
        except RocketError as error:
            level = logging.DEBUG if address in self._unreachable else logging.WARNING
            log.log(level, "broker=%s had no heartbeat reason=%s", address, error)
            self._unreachable.add(address)
            return False
        if address in self._unreachable:
            self._unreachable.discard(address)
            log.warning("broker=%s has heartbeats again", address)
        return True

    async def unregister(
        self, connections: Iterable[Connection], consumer_group: str | None, producer_group: str | None
    ) -> None:
        """Unregister a group on these connections. A broker that is not reached removes it when the connection ends.

        The request waits for a heartbeat in progress, and later heartbeats exclude the group. Otherwise a broker would
        register the client again.
        """
        if consumer_group is not None:
            self.remove_consumer(consumer_group)
        if producer_group is not None:
            self.remove_producer(producer_group)
        header = UnregisterClientHeader(self._client_id, producer_group, consumer_group)

        async def unregister_on(connection: Connection) -> None:
            async with self._locks.setdefault(connection.address, asyncio.Lock()):
                await self._call(connection, request(header))

        outcomes = await asyncio.gather(*map(unregister_on, connections), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, RocketError):
                log.debug("client_id=%s not unregistered everywhere reason=%s", self._client_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def forget(self, address: str) -> None:
        """Forget the connection to a broker that no route names. If the broker returns, that counts as a reconnect."""
        self._registered.pop(address, None)
        self.version += 1
        self._locks.pop(address, None)
        self._unreachable.discard(address)
        self.versions.pop(address, None)
