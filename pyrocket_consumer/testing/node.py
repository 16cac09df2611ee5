"""What name servers and brokers share: the clock, connections to clients, and the way of a request to its handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import JSON_HEADER, RemotingCommand, encode_command
from pyrocket_consumer.testing.config import Release


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


class Connection:
    """Sends responses and the node's own requests to one client. Everything runs on the node's loop.

    `write` takes bytes and must not block; `close(abrupt)` ends the connection.
    """

    def __init__(
        self,
        address: str,
        loop: asyncio.AbstractEventLoop,
        write: Callable[[bytes], None],
        close: Callable[[bool], None],
    ) -> None:
        self.address = address
        self.write = write
        self.close = close
        self.open = True
        self.diverted: dict[int, Callable[[RemotingCommand], None]] = {}  # by opaque, for faults
        self._loop = loop
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
        timer = self._loop.call_later(timeout_s, self._resolve, opaque, None)
        self._waiting[opaque] = on_response, timer
        self.write(encode_command(command))

    def receive_response(self, response: RemotingCommand) -> None:
        """Resolve the call that waits for a client's response. Ignore a late response."""
        self._resolve(response.opaque, response)

    def _resolve(self, opaque: int, response: RemotingCommand | None) -> None:
        if (waiting := self._waiting.pop(opaque, None)) is not None:
            on_response, timer = waiting
            timer.cancel()
            on_response(response)

    def lost(self) -> None:
        """Mark the connection as ended: stop sending, and end waiting calls without a response."""
        self.open = False
        self.diverted.clear()
        for opaque in list(self._waiting):
            self._resolve(opaque, None)


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
