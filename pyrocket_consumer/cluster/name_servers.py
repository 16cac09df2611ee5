"""Questions to the name servers: one is asked until it fails, then the next."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Container
from typing import Protocol, TypeVar

from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import GetRouteInfoHeader, Header
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger

log = logger("cluster")

T = TypeVar("T")

_ANY_TOPIC = "TBW102"

# The name server itself is in trouble (starting, overloaded, going away): another one may not be.
_UNAVAILABLE_CODES = frozenset({ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_BUSY, ResponseCode.GO_AWAY})


class Call(Protocol):
    """One call to one address: `Cluster.call`."""

    async def __call__(
        self,
        address: str,
        header: Header,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        accept: Container[int] = (0,),
    ) -> RemotingCommand: ...


class NameServers:
    """The name servers of a cluster. They know the same, so any of them will do. Confined to the I/O thread."""

    def __init__(self, addresses: tuple[str, ...], call: Call, rng: random.Random) -> None:
        self.addresses = addresses
        self._call = call
        self._current = rng.randrange(len(addresses))  # so that clients spread over them

    def __str__(self) -> str:
        return ";".join(self.addresses)

    @property
    def current(self) -> str:
        """The address that is asked first."""
        return self.addresses[self._current]

    async def check(self) -> None:
        """Return when a name server has answered.

        Raises:
            ConnectError: none did, or what did is a broker; names every address and its reason.
            PermissionDenied: the access key is refused.
        """
        try:
            await self.call(GetRouteInfoHeader(_ANY_TOPIC))
        except BrokerError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise ConnectError(error.address, "it answers as a broker does, not as a name server") from error
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                if isinstance(error, PermissionDenied):
                    raise
                raise ConnectError(error.address, f"it refuses the first request: {error}") from error
        except ConnectionLost as error:
            text = "it closes the connection at the first request; if it speaks TLS only, pass tls=True"
            raise ConnectError(error.address, text) from error
        except RequestTimeout as error:
            text = f"no answer within {error.timeout_s:.3g} s: it is busy or not well, or something else listens there"
            raise ConnectError(error.address, text) from error

    async def call(
        self, header: Header, body: bytes = b"", *, timeout_s: float | None = None, accept: Container[int] = (0,)
    ) -> RemotingCommand:
        """Return the answer of the first name server that gives one. `timeout_s` is the time each of them has.

        A name server 4.9 gives no answer at all to a request it does not know.

        Raises:
            ConnectError: none answered; names every address and its reason. With one name server its own error.
            BrokerError: it said no.
        """
        return await self._call_first(lambda address: self._call_one(address, header, body, timeout_s, accept))

    async def read(self, header: Header, decode: Callable[[bytes], T]) -> T:
        """Return `decode(body)` of the first name server whose answer can be read: `call` for what has a body.

        Raises:
            ProtocolError: with one name server; what it answered cannot be read.
            ConnectError, BrokerError: as `call` does.
        """

        async def read_one(address: str) -> T:
            return await read_body(decode, (await self._call_one(address, header, b"", None, (0,))).body)

        return await self._call_first(read_one)

    async def _call_first(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Return what the first name server gives to `call(address)`, beginning with the one that did last."""
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

    async def _call_one(
        self, address: str, header: Header, body: bytes, timeout_s: float | None, accept: Container[int]
    ) -> RemotingCommand:
        try:
            return await self._call(address, header, body, timeout_s=timeout_s, accept=accept)
        except (
            ConnectionLost
        ):  # name servers drop idle connections, perhaps just now; all they are asked can be repeated
            return await self._call(address, header, body, timeout_s=timeout_s, accept=accept)

    def _use(self, index: int) -> None:
        if index != self._current:
            log.warning("name_server=%s failed, name_server=%s took over", self.current, self.addresses[index])
            self._current = index

    async def call_every(self, header: Header, body: bytes = b"") -> list[RemotingCommand]:
        """Return every name server's answer: what is told to one is not passed on to the others.

        Raises:
            ConnectError: one did not answer or said no; names each that failed. The others have done as asked.
        """
        responses = await asyncio.gather(
            *(self._call_one(address, header, body, None, (0,)) for address in self.addresses), return_exceptions=True
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
