"""The brokers that know this client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ConnectError
from pyrocket_consumer.transport.connection import Connection

if TYPE_CHECKING:
    from pyrocket_consumer.cluster.cluster import Cluster


class BrokerLink:
    """The way to one broker: its address, and the connection on which it knows this client. For the I/O thread.

    Keep it as long as needed: it follows each change of routes, connections and heartbeats. While nothing changes,
    `connection` costs little, so read it before every request.
    """

    __slots__ = ("_cluster", "_connection", "_only_this", "_version", "broker_id", "name")

    def __init__(self, cluster: Cluster, name: str, broker_id: int, only_this: bool) -> None:
        self.name = name
        self.broker_id = broker_id
        self._cluster = cluster
        self._only_this = only_this
        self._connection: Connection | None = None
        self._version = -1

    @property
    def address(self) -> str | None:
        """The broker's address. None if no route names one."""
        return self._cluster.address(self.name, self.broker_id, only_this=self._only_this)

    @property
    def connection(self) -> Connection | None:
        """The open connection on which the broker has received a heartbeat, if this client sends any; None without."""
        connection = self._connection
        if connection is None or connection.closed or self._version != self._cluster.link_version:
            address = self.address
            connection = self._cluster.find_registered_connection(address) if address is not None else None
            self._connection, self._version = connection, self._cluster.link_version
        return connection

    async def open(self) -> Connection:
        """Return `connection`. If necessary, connect and send a heartbeat.

        Raises:
            BrokerError, ConnectError, ConnectionLost, RequestTimeout: no connection, or the heartbeat failed.
        """
        if (address := self.address) is None:
            raise ConnectError(self.name, "no route names an address of this broker now")
        return await self._cluster.open_registered_connection(address)
