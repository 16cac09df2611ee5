"""The connections of a client, one per address."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pyrocket_consumer.config import parse_address
from pyrocket_consumer.errors import ClientClosed, ConnectError
from pyrocket_consumer.protocol.frame import MAX_FRAME_BYTES
from pyrocket_consumer.text import logger
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
