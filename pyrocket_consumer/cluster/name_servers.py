"""Requests to the name servers. A client uses one until it fails, then the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from pyrocket_consumer.cluster.client import Client
from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import TopicRoute
from pyrocket_consumer.protocol.bodies import decode_route
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import GetRouteInfoHeader, Header
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger

log = logger("cluster")

T = TypeVar("T")

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

        async def read_one(address: str) -> T:
            return await read_body(decode, (await self._call_one(address, header)).body)

        return await self._call_first(read_one)

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

    async def _call_first(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Return the result of `call(address)` for the first name server that responds, beginning with the current."""
        failures: dict[str, RocketError] = {}
        for step in range(len(self.addresses)):
            index = (self._current + step) % len(self.addresses)
            address = self.addresses[index]
            try:
                response = await call(address)
            except BrokerError as error:
                if error.code not in _UNAVAILABLE_CODES:
                    self._use(index)
                    raise
                failures[address] = error
            except RocketError as error:
                failures[address] = error
            else:
                self._use(index)
                return response
            log.debug("name_server=%s failed reason=%s", address, failures[address])
        if len(failures) == 1:
            raise failures.popitem()[1]
        raise ConnectError(str(self), _reasons(failures))

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
