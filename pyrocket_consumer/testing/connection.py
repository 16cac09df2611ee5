"""A client's connection on the side of a node, independent of the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command

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
