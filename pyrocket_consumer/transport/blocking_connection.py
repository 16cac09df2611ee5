"""A connection its user waits on itself, in its own thread: for bulk reading, where bytes count more than calls."""

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
"""Gets the answer, and where its body is; or the error that took its place."""

EMPTY_SLICE = BufferSlice.whole(b"")
_MAX_OPAQUE = 0x7FFFFFFF
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BlockingConnection:
    """Requests to one server. Nothing happens but inside its methods, and none of them waits.

    Its user calls `receive()` whenever the socket may be read, `flush()` after requests, `expire()` past a deadline.
    Requests that the server sends are not answered.
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
        """Return the socket's descriptor, -1 if it is closed."""
        return self.socket.fileno()

    # --- requests

    @property
    def is_signing(self) -> bool:
        """Whether requests are signed: then a prepared frame cannot be sent."""
        return self._sign is not None

    def encode(self, command: RemotingCommand, opaque: int) -> bytes:
        """Return the frame of `command`, with its opaque, and signed if we sign."""
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
        """Take the frame `encode(opaque)` returns for the next `flush`; `on_response` is called exactly once, later.

        `now` is of the clock that `expire` will be asked with.
        """
        self._opaque = self._opaque + 1 if self._opaque < _MAX_OPAQUE else 1
        self._outgoing += encode(self._opaque)
        self._pending[self._opaque] = (on_response, now + timeout_s, what, timeout_s)

    def flush(self) -> None:
        """Send what the socket takes now. If the connection is lost, the callbacks are told."""
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
        """Whether there is something to flush."""
        return bool(self._outgoing)

    # --- answers

    def receive(self) -> bool:
        """Take what has come, and call back for each answer. Return whether there was anything.

        If the connection is lost, or what comes are no frames, the callbacks of all that wait are told.
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
        """Give back the room of every body handed out so far, but for those `wanted` still; these may be moved."""
        self._frames.release_except(wanted)

    @property
    def waiting(self) -> int:
        """How many requests wait for an answer."""
        return len(self._pending)

    @property
    def next_deadline(self) -> float | None:
        """When the first of the requests that wait is overdue; None if there are none."""
        return min((deadline for _, deadline, *_ in self._pending.values()), default=None)

    def expire(self, now: float) -> None:
        """Tell the callbacks of requests that are overdue."""
        for opaque in [opaque for opaque, (_, deadline, *_) in self._pending.items() if deadline <= now]:
            if entry := self._pending.pop(opaque, None):
                on_response, _, what, timeout_s = entry
                on_response(RequestTimeout(what, self.address, timeout_s), EMPTY_SLICE)

    # --- its end

    def is_reusable(self) -> bool:
        """Whether nothing is awaited and nothing has come, the end neither: it can be put aside and used again."""
        if self.closed or self._pending or self._outgoing:
            return False
        try:
            readable, _, broken = select.select([self.socket], [], [self.socket], 0)
        except (OSError, ValueError):
            return False
        return not readable and not broken

    def close(self, reason: str) -> None:
        """End the connection; those that wait get ConnectionLost."""
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


async def open_blocking_connection(
    loop: asyncio.AbstractEventLoop,
    address: str,
    *,
    timeout_s: float,
    resolve: Resolve = parse_address,
    tls: ssl.SSLContext | None = None,
    sign: Sign | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> BlockingConnection:
    """Return a connection to `address`, for whichever thread asked.

    Raises:
        ConnectError: nobody answers there within `timeout_s`.
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
            return BlockingConnection(await asyncio.shield(attempt), address, sign, max_frame_bytes)
        except asyncio.CancelledError:
            attempt.add_done_callback(_close_unwanted)
            raise


def _close_unwanted(attempt: asyncio.Future[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


class IdleConnections:
    """Direct connections that nobody uses now, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[BlockingConnection]] = {}
        self._closed = False

    def take(self, address: str) -> BlockingConnection | None:
        """Return one to `address` that still is connected, or None."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_reusable():
                return connection
            connection.close("ended while it was idle")

    def put(self, connection: BlockingConnection) -> None:
        """Keep `connection` for the next who needs one; it is closed if answers are still on their way."""
        with self._lock:
            if connection.is_reusable() and not self._closed:
                connection.release_except(())
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close("not needed any more")

    def close(self) -> None:
        """Close those that are idle now, and every one that is given back later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close("closed by us")
