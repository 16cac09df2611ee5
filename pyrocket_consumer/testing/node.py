"""What name servers and brokers share: the clock, connections to clients, and the way of a request to its handler."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, cast

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import JSON_HEADER, FrameBuffer, RemotingCommand, encode_command
from pyrocket_consumer.testing.config import Release

if TYPE_CHECKING:
    from pyrocket_consumer.testing.server import Server


class Clock:
    """The loop's timers and a wall clock. A node reads the time only here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall: Callable[[], float] = time.time) -> None:
        self.loop = loop
        self._wall = wall

    def now_ms(self) -> int:
        """Return the wall clock's milliseconds since 1970."""
        return int(self._wall() * 1000)

    def monotonic_s(self) -> float:
        """Return the loop's seconds, which never step back."""
        return self.loop.time()


class Timer:
    """Calls `action` every `interval_s()` seconds between start() and stop(). The interval may change in between."""

    def __init__(self, clock: Clock, interval_s: Callable[[], float], action: Callable[[], None]) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._handle = self._clock.loop.call_later(self._interval_s(), self._fire)

    def _fire(self) -> None:
        self._handle = self._clock.loop.call_later(self._interval_s(), self._fire)
        self._action()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


OnResponse = Callable[[RemotingCommand | None], None]
"""Called once with a client's response, or with None after a timeout or the end of the connection."""


_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() sends RST at once and forgets what is unsent


class Connection(asyncio.BufferedProtocol):
    """One accepted connection: requests of a client, and the node's own requests to it. Everything runs on the loop."""

    address: str

    def __init__(self, server: Server) -> None:
        self.open = False
        self.diverted: dict[int, Callable[[RemotingCommand], None]] = {}  # by opaque, for faults
        self.last_active_s = 0.0
        self._server = server
        self._loop = server.clock.loop
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] | None = None  # collects the output of commands being handled, to send it together
        self._random = server.random_for_connection()  # chooses the order of requests
        self._opaques = count(1)
        self._waiting: dict[int, tuple[OnResponse, asyncio.TimerHandle]] = {}

    def respond(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Send the response to `request`, unless that was one-way or a fault takes the response."""
        if request.is_oneway or not self.open:
            return
        response.opaque = request.opaque
        if self.diverted and (take := self.diverted.pop(request.opaque, None)) is not None:
            take(response)
        else:
            self.write(encode_command(response, response.header_type))

    def oneway(self, command: RemotingCommand) -> None:
        """Send a request that needs no response."""
        if self.open:
            command.opaque = next(self._opaques)
            self.write(encode_command(command))

    def call(self, command: RemotingCommand, timeout_s: float, on_response: OnResponse) -> None:
        """Send a request. Call `on_response` with the client's response, or with None."""
        if not self.open:
            on_response(None)
            return
        opaque = command.opaque = next(self._opaques)
        timer = self._loop.call_later(timeout_s, self.resolve, opaque, None)
        self._waiting[opaque] = on_response, timer
        self.write(encode_command(command))

    def resolve(self, opaque: int, response: RemotingCommand | None) -> None:
        """End the call with this opaque with a client's response, or None. Ignore a late response."""
        if (waiting := self._waiting.pop(opaque, None)) is not None:
            on_response, timer = waiting
            timer.cancel()
            on_response(response)

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address, self.open = f"{peer[0]}:{peer[1]}", True
        self.last_active_s = self._loop.time()
        self._server.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self, None)
        self.open = False
        self.diverted.clear()
        for opaque in list(self._waiting):
            self.resolve(opaque, None)
        self._server.node.lost(self)
        self._server.changes.notify()

    def fileno(self) -> int:
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if sock is None else int(sock.fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active_s = self._loop.time()
        try:
            commands = self._frames.read_commands(nbytes)
        except ProtocolError:
            self.close(False)  # as real servers, which do not respond to bytes that are not frames
            return
        if self._server.side_by_side_s:
            self._handle_out_of_order(commands)
        else:
            self._received(commands)

    def _handle_out_of_order(self, commands: Iterable[RemotingCommand]) -> None:
        """Start requests one by one, in another order. Handle responses immediately."""
        for command in commands:
            if command.is_response:
                self._received([command])
            else:
                begin_s = self.last_active_s + self._random.uniform(0, self._server.side_by_side_s)
                self._loop.call_at(begin_s, self._received_if_open, command)

    def _received_if_open(self, command: RemotingCommand) -> None:
        # A request is lost with its connection. Real brokers execute it anyway. A heartbeat that they handle after
        # its member has left keeps its queues from the other members for two minutes.
        if self.open:
            self._received([command])

    def _received(self, commands: Iterable[RemotingCommand]) -> None:
        out: list[bytes] = []
        self._out = out
        try:
            for command in commands:
                if self._transport is None or self._transport.is_closing():
                    break  # a fault closed the connection, so later bytes never arrived
                self._server.received(self, command)
        finally:
            self._out = None
            if out and self.open:
                self._send(out[0] if len(out) == 1 else b"".join(out))

    def write(self, data: bytes) -> None:
        """Send bytes, without waiting."""
        if self._out is not None:
            self._out.append(data)
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            self.last_active_s = self._loop.time()

    def close(self, abrupt: bool) -> None:
        """End the connection. With `abrupt`, reset it."""
        transport = self._transport
        if transport is None:
            return
        if abrupt:
            if (sock := transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            transport.abort()
        elif not transport.is_closing():  # a second close() of a TLS transport makes abort() fail
            if self._out:  # responses before the close are still sent
                transport.write(b"".join(self._out))
                self._out.clear()
            transport.close()


class Refused(Exception):
    """A node responds to a request with an error: code, remark and, rarely, fields."""

    def __init__(self, code: int, remark: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(code, remark)
        self.code, self.remark, self.fields = code, remark, fields or {}

    def response(self, request: RemotingCommand) -> RemotingCommand:
        """Return the response that reports the refusal."""
        return request.make_response(self.code, self.remark, dict(self.fields))


Handler = Callable[[RemotingCommand, Connection], RemotingCommand | None]
"""Returns the response, or None if it follows later or never. Raises Refused, or ProtocolError for a bad request."""

Handlers = dict[int, Handler]
"""Handlers by request code."""


class Node:
    """A name server or a broker: requests in, responses out. It uses no sockets."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self._handlers: Handlers = {}

    def handle(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        """Return the response to a request; None if it follows later through `connection.respond`, or never."""
        handler = self._handlers.get(command.code)
        try:
            if handler is None:
                raise Refused(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported")
            self.check_account(command)
            response = handler(command, connection)
        except Refused as refused:
            response = refused.response(command)
        except (ProtocolError, ConfigError) as error:  # servers respond with the text of a Java exception here
            response = command.make_response(ResponseCode.SYSTEM_ERROR, str(error))
        if response is None:
            return None
        response.header_type = command.header_type if self.release.mirrors_header_type else JSON_HEADER
        return self.as_sender(response)

    def check_account(self, command: RemotingCommand) -> None:
        """Refuse a request of an account that may not send it. Name servers accept every request."""

    def as_sender(self, command: RemotingCommand) -> RemotingCommand:
        """Return a request or response with the language and version of this node."""
        command.language, command.version = "JAVA", self.release.ordinal
        return command

    def lost(self, connection: Connection) -> None:
        """Handle the end of a connection. A name server keeps no state of clients."""
