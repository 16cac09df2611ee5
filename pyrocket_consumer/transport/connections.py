"""The connections of a client, one per address, and the addresses that it may use."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from pyrocket_consumer.config import parse_address
from pyrocket_consumer.errors import AddressRefused, ClientClosed, ConfigError, ConnectError
from pyrocket_consumer.protocol.frame import MAX_FRAME_BYTES
from pyrocket_consumer.text import logger, truncate
from pyrocket_consumer.transport.backoff import Backoff
from pyrocket_consumer.transport.connection import Connection, OnLost, OnRequest, Sign

log = logger("net")

MAYBE_PLAINTEXT = "if it speaks without TLS, leave tls out"
_TRUST = "to trust its authority pass tls=ssl.create_default_context(cafile=...)"

Resolve = Callable[[str], tuple[str, int]]
"""Returns host and port of an address, or raises AddressRefused."""

_FIRST_CONNECT_PAUSE_S = 0.1
_LONGEST_CONNECT_PAUSE_S = 1.0
_LONGEST_DAMAGED_PAUSE_S = 30.0  # while a server keeps sending data that are not frames


@dataclass(slots=True)
class _Target:
    """The state of one address: its connection, the attempt in progress, and the time of the next attempt."""

    connection: Connection | None = None
    attempt: asyncio.Task[Connection] | None = None
    failures: int = 0
    not_before: float = 0.0
    opened_at: float = 0.0
    damages: int = 0  # consecutive connections that soon ended because the server sent no frames
    damage: str = ""
    dropped: str = ""  # the reason for which drop() was called


class Connections:
    """Connections by address, opened on demand. Confined to the I/O thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        resolve: Resolve = parse_address,
        on_request: OnRequest,
        on_lost: OnLost = lambda connection, reason: None,
        tls: ssl.SSLContext | None = None,
        sign: Sign | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        rng: random.Random | None = None,
    ) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._resolve = resolve
        self._on_request = on_request
        self._on_lost = on_lost
        self._tls = tls
        self._sign = sign
        self._max_frame_bytes = max_frame_bytes
        jitter = (rng or random.Random()).random
        self._pauses = Backoff(_FIRST_CONNECT_PAUSE_S, _LONGEST_CONNECT_PAUSE_S, jitter=jitter)
        self._damaged_pauses = Backoff(_FIRST_CONNECT_PAUSE_S, _LONGEST_DAMAGED_PAUSE_S, jitter=jitter)
        self._targets: dict[str, _Target] = {}
        self._closed = False

    def peek(self, address: str) -> Connection | None:
        """Return the open connection to `address`, None without one."""
        target = self._targets.get(address)
        if target is None or target.connection is None or target.connection.closed:
            return None
        return target.connection

    def all(self) -> list[Connection]:
        """Return the open connections."""
        return [connection for address in self._targets if (connection := self.peek(address)) is not None]

    async def get(self, address: str) -> Connection:
        """Return the connection to `address`, and open it if necessary. Concurrent callers share one attempt.

        Raises:
            ConnectError: no server accepts a connection there, or the address was dropped during the attempt. After a
                failure the next attempt waits, up to 1 s after many. After repeated data that are not frames, an
                address is not retried for up to 30 s.
        """
        if (connection := self.peek(address)) is not None:
            return connection
        if self._closed:
            raise ClientClosed("the client is closed; make a new one")
        target = self._targets.setdefault(address, _Target())
        if target.attempt is None:
            pause_s = target.not_before - self._loop.time()
            if pause_s > _LONGEST_CONNECT_PAUSE_S:
                raise ConnectError(address, f"not retried for {pause_s:.0f} s after {target.damage}")
            target.attempt = self._loop.create_task(self._open(address, target))
            target.attempt.add_done_callback(lambda task: task.cancelled() or task.exception())
        attempt = target.attempt
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not attempt.cancelled() or (task is not None and task.cancelling()):
                raise
            # The attempt was cancelled, not the caller. A CancelledError would silently end the caller's loop.
            if self._closed:
                raise ClientClosed("the client is closed; make a new one") from None
            raise ConnectError(address, target.dropped) from None

    async def _open(self, address: str, target: _Target) -> Connection:
        try:
            pause = target.not_before - self._loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            target.opened_at = self._loop.time()
            connection = await self._connect(address)
            target.connection, target.failures = connection, 0
            log.debug("connection=%s opened", address)
            return connection
        except ConnectError:
            target.failures += 1
            target.not_before = self._loop.time() + self._pauses.pause_s(target.failures)
            raise
        finally:
            target.attempt = None

    async def _connect(self, address: str) -> Connection:
        host, port = self._resolve(address)
        async with connect_errors(address, self._connect_timeout_s, self._tls):
            _, connection = await self._loop.create_connection(
                lambda: Connection(
                    self._loop, address, self._on_request, self._handle_lost, self._sign, self._max_frame_bytes
                ),
                host,
                port,
                ssl=self._tls,
                server_hostname=host if self._tls else None,
            )
        return connection

    def _handle_lost(self, connection: Connection, reason: str) -> None:
        target = self._targets.get(connection.address)
        if target is not None and target.connection is connection:
            target.connection = None
        if target is not None and connection.is_damaged:
            now = self._loop.time()
            target.damages = target.damages + 1 if now - target.opened_at < 2 * _LONGEST_DAMAGED_PAUSE_S else 1
            target.not_before, target.damage = now + self._damaged_pauses.pause_s(target.damages), reason
        log.debug("connection=%s ended reason=%s", connection.address, reason)
        self._on_lost(connection, reason)

    def drop(self, address: str, reason: str) -> None:
        """Close the connection to `address` and forget the address."""
        target = self._targets.pop(address, None)
        if target is None:
            return
        target.dropped = reason
        if target.attempt is not None:
            target.attempt.cancel()
        if target.connection is not None:
            target.connection.close(reason)

    async def close(self) -> None:
        """Close every connection. Later calls of `get` raise."""
        self._closed = True
        connections = self.all()
        for address in list(self._targets):
            self.drop(address, "closed by us")
        for _ in range(2):  # the loop closes sockets in its next iteration, unless they have bytes to send
            await asyncio.sleep(0)
            for connection in connections:
                connection.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def connect_errors(address: str, timeout_s: float, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Limit an attempt to connect to `address` to `timeout_s`, and raise each failure as a ConnectError."""
    hint = f" ({MAYBE_PLAINTEXT})" if tls is not None else ""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ConnectError(address, f"no response within {timeout_s:g} s{hint}") from error
    except ssl.SSLCertVerificationError as error:
        raise ConnectError(address, f"TLS: {error}; {_TRUST}") from error
    except ssl.SSLError as error:
        raise ConnectError(address, f"TLS: {error}{hint}") from error
    except OSError as error:
        reason = error.strerror or str(error) or f"TLS: the server ended the handshake{hint}"
        raise ConnectError(address, reason) from error
    except UnicodeError as error:
        raise ConnectError(address, f"{address!r} has no host name: {error}") from error


OnAddressRefused = Callable[[str, str], None]
"""Called with a refused address and the reason, once for each of the first hundred addresses."""

_MAX_NOTIFIED = 100
_MAX_ADDRESS_CHARS = 280  # in texts; a host name has at most 253 characters, and a port five


class Addresses:
    """Checks each address before a client connects to it."""

    def __init__(
        self, name_servers: Iterable[str], allowed: Sequence[str] | None, on_refused: OnAddressRefused
    ) -> None:
        self._name_servers = frozenset(name_servers)
        self._allowed = allowed
        self._on_refused = on_refused
        self._notified: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        self._hosts: set[tuple[str, int | None]] = set()
        for each in allowed or ():
            try:
                self._networks.append(ip_network(each))
            except ValueError:
                host, port = parse_address(each) if ":" in each else (each, None)
                self._hosts.add((_normalize_host(host), port))

    def resolve(self, address: str) -> tuple[str, int]:
        """Return host and port of `address`.

        Raises:
            AddressRefused: it is not a valid address, or not one of `allowed_addresses`.
        """
        try:
            host, port = parse_address(address)
        except ConfigError:
            raise self._refusal(
                address, "it is not host:port with a port from 1 to 65535; find out who has put it into the route"
            ) from None
        if self._allowed is None or address in self._name_servers or self._is_allowed(host, port):
            return host, port
        raise self._refusal(
            address,
            f"allowed_addresses={list(self._allowed)!r:.300} has no such address; "
            "add it if a broker is there, else find out who has put it into the route",
        )

    def _is_allowed(self, host: str, port: int) -> bool:
        known = _normalize_host(host)
        if (known, None) in self._hosts or (known, port) in self._hosts:
            return True
        try:
            ip = ip_address(host)
        except ValueError:  # a host name: do not resolve it, because the next lookup may return another address
            return False
        return any(ip in network for network in self._networks)

    def _refusal(self, address: str, why: str) -> AddressRefused:
        error = AddressRefused(truncate(address, _MAX_ADDRESS_CHARS), why)
        if error.address not in self._notified and len(self._notified) < _MAX_NOTIFIED:
            self._notified.add(error.address)
            self._on_refused(error.address, str(error))
        return error


def _normalize_host(host: str) -> str:
    """Return a host in one spelling for comparisons: the canonical IP address, or the name in lower case."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower()
