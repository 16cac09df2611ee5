"""A connection that its user polls in a thread of its own, for bulk reads of many bytes in few calls."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable

from pyrocket_consumer.config import parse_address
from pyrocket_consumer.errors import ConnectionLost, ProtocolError, RequestTimeout
from pyrocket_consumer.protocol.frame import (
    MAX_FRAME_BYTES,
    BufferSlice,
    RemotingCommand,
    ZeroCopyFrames,
    encode_command,
    frame_error,
)
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Sign
from pyrocket_consumer.transport.connections import Resolve, connect_errors
from pyrocket_consumer.transport.forks import close_in_children

log = logger("net")

OnBulkResponse = Callable[["RemotingCommand | Exception", BufferSlice], None]
"""Receives the response and a slice of its body, or the error in place of the response."""

EMPTY_SLICE = BufferSlice.whole(b"")
_MAX_OPAQUE = 0x7FFFFFFF
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PolledConnection:
    """Requests to one server, for a user that polls. It works only inside its methods, and no method blocks.

    Call `receive()` when the socket is readable, `flush()` after requests, and `expire()` after a deadline. It does
    not respond to requests that the server sends.
    """

    def __init__(
        self,
        connected: socket.socket,
        address: str,
        sign: Sign | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.socket = connected
        self.address = address
        self.closed = False
        self._sign = sign
        self._max_frame_bytes = max_frame_bytes
        self._frames = ZeroCopyFrames(max_frame_bytes)
        self._opaque = 0
        self._pending: dict[int, tuple[OnBulkResponse, float, str, float]] = {}
        self._outgoing = bytearray()
        close_in_children(self)

    def fileno(self) -> int:
        """Return the file descriptor of the socket, -1 if it is closed."""
        return self.socket.fileno()

    # --- requests

    @property
    def is_signing(self) -> bool:
        """Whether requests are signed, so that a prepared frame cannot be sent."""
        return self._sign is not None

    def encode(self, command: RemotingCommand, opaque: int) -> bytes:
        """Return the frame of `command` with this opaque, and with a signature if requests are signed."""
        command.opaque = opaque
        if self._sign is not None:
            self._sign(command)
        return encode_command(command, max_frame_bytes=self._max_frame_bytes)

    def send(
        self,
        encode: Callable[[int], bytes],
        on_response: OnBulkResponse,
        now: float,
        timeout_s: float,
        what: str = "PULL_MESSAGE",
    ) -> None:
        """Add the frame that `encode(opaque)` returns to the next `flush`. `on_response` is called exactly once, later.

        `now` is the time of the same clock as for `expire`.
        """
        self._opaque = self._opaque + 1 if self._opaque < _MAX_OPAQUE else 1
        self._outgoing += encode(self._opaque)
        self._pending[self._opaque] = (on_response, now + timeout_s, what, timeout_s)

    def flush(self) -> None:
        """Send as many bytes as the socket accepts now. If the connection is lost, all callbacks receive the error."""
        while self._outgoing and not self.closed:
            try:
                sent = self.socket.send(self._outgoing)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                self._end(ConnectionLost(self.address, error.strerror or str(error)))
                return
            del self._outgoing[:sent]

    @property
    def has_unsent(self) -> bool:
        """Whether there are bytes to flush."""
        return bool(self._outgoing)

    # --- responses

    def receive(self) -> bool:
        """Read received bytes, and call back for each response. Return whether there were any bytes.

        If the connection is lost, or the bytes are not frames, all pending callbacks receive the error.
        """
        if self.closed:
            return False
        try:
            count = self.socket.recv_into(self._frames.space())
        except _WOULD_BLOCK:
            return False
        except OSError as error:
            self._end(ConnectionLost(self.address, error.strerror or str(error)))
            return True
        if not count:
            self._end(ConnectionLost(self.address, "closed by the server"))
            return True
        try:
            found = self._frames.read_commands(count)
        except ProtocolError as damage:
            failure = frame_error(self.address, damage)
            log.error("connection=%s closed reason=%s", self.address, failure)
            self._end(failure)
            return True
        for command, body in found:
            entry = self._pending.pop(command.opaque, None) if command.is_response else None
            if entry is None:
                log.debug("connection=%s opaque=%d code=%d ignored", self.address, command.opaque, command.code)
            else:
                entry[0](command, body)
        return True

    def release_except(self, wanted: Iterable[BufferSlice]) -> None:
        """Reuse the memory of all bodies passed to callbacks so far, except those in `wanted`, which may be moved."""
        self._frames.release_except(wanted)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a response."""
        return len(self._pending)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of the pending requests; None without any."""
        return min((deadline for _, deadline, *_ in self._pending.values()), default=None)

    def expire(self, now: float) -> None:
        """Pass RequestTimeout to the callbacks of overdue requests."""
        for opaque in [opaque for opaque, (_, deadline, *_) in self._pending.items() if deadline <= now]:
            if entry := self._pending.pop(opaque, None):
                on_response, _, what, timeout_s = entry
                on_response(RequestTimeout(what, self.address, timeout_s), EMPTY_SLICE)

    # --- closing

    def is_reusable(self) -> bool:
        """Return whether the connection is open without pending requests or unread bytes, so that it can be reused."""
        if self.closed or self._pending or self._outgoing:
            return False
        try:
            readable, _, broken = select.select([self.socket], [], [self.socket], 0)
        except (OSError, ValueError):
            return False
        return not readable and not broken

    def close(self, reason: str) -> None:
        """Close the connection. Pending requests receive ConnectionLost."""
        self._end(ConnectionLost(self.address, reason))

    def _end(self, error: Exception) -> None:
        if self.closed:
            return
        self.closed = True
        self.socket.close()
        log.debug("connection=%s ended reason=%s", self.address, error)
        waiting, self._pending = self._pending, {}
        for on_response, *_ in waiting.values():
            on_response(error, EMPTY_SLICE)


async def open_polled_connection(
    loop: asyncio.AbstractEventLoop,
    address: str,
    *,
    timeout_s: float,
    resolve: Resolve = parse_address,
    tls: ssl.SSLContext | None = None,
    sign: Sign | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> PolledConnection:
    """Return a new connection to `address`, which any one thread may use.

    Raises:
        ConnectError: no server accepts the connection within `timeout_s`.
    """
    host, port = resolve(address)

    def connect() -> socket.socket:
        connected = socket.create_connection((host, port), timeout_s)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                connected = tls.wrap_socket(connected, server_hostname=host)
            connected.setblocking(False)
        except BaseException:
            connected.close()
            raise
        return connected

    attempt = loop.run_in_executor(None, connect)
    async with connect_errors(address, timeout_s, tls):
        try:
            return PolledConnection(await asyncio.shield(attempt), address, sign, max_frame_bytes)
        except asyncio.CancelledError:
            attempt.add_done_callback(_close_unwanted)
            raise


def _close_unwanted(attempt: asyncio.Future[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


class IdleConnections:
    """Open blocking connections that are not in use, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[PolledConnection]] = {}
        self._closed = False

    def take(self, address: str) -> PolledConnection | None:
        """Return a connection to `address` that is still open, or None."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_reusable():
                return connection
            connection.close("ended while it was idle")

    def put(self, connection: PolledConnection) -> None:
        """Keep `connection` for a later `take`. It is closed if it still has pending requests."""
        with self._lock:
            if connection.is_reusable() and not self._closed:
                connection.release_except(())
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close("no longer needed")

    def close(self) -> None:
        """Close all idle connections, and each connection that is returned later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close("closed by us")
