"""A client's connection as a node sees it, whatever carries the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command

OnResponse = Callable[[RemotingCommand | None], None]
"""Called once with a client's answer, or None when none came in time or the connection ended."""


class Connection:
    """Carries answers to one client, and the node's own requests to it. Everything on the node's loop.

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
        self.diverted: dict[int, Callable[[RemotingCommand], None]] = {}  # by opaque: who takes the answer instead
        self._loop = loop
        self._opaques = count(1)
        self._waiting: dict[int, tuple[OnResponse, asyncio.TimerHandle]] = {}

    def respond(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Send the answer to `request`, unless that was one-way or a fault takes the answer."""
        if request.is_oneway or not self.open:
            return
        response.opaque = request.opaque
        if self.diverted and (take := self.diverted.pop(request.opaque, None)) is not None:
            take(response)
        else:
            self.write(encode_command(response, response.header_type))

    def oneway(self, command: RemotingCommand) -> None:
        """Send a request that wants no answer."""
        if self.open:
            command.opaque = next(self._opaques)
            self.write(encode_command(command))

    def call(self, command: RemotingCommand, timeout_s: float, on_response: OnResponse) -> None:
        """Send a request and have `on_response` called with the client's answer, or with None."""
        if not self.open:
            on_response(None)
            return
        opaque = command.opaque = next(self._opaques)
        timer = self._loop.call_later(timeout_s, self._settle, opaque, None)
        self._waiting[opaque] = on_response, timer
        self.write(encode_command(command))

    def receive_response(self, response: RemotingCommand) -> None:
        """Take a client's answer; one that nobody waits for is ignored, as late ones are."""
        self._settle(response.opaque, response)

    def _settle(self, opaque: int, response: RemotingCommand | None) -> None:
        if (waiting := self._waiting.pop(opaque, None)) is not None:
            on_response, timer = waiting
            timer.cancel()
            on_response(response)

    def lost(self) -> None:
        """Note that the connection ended: nothing is sent any more, and waiting calls end without an answer."""
        self.open = False
        self.diverted.clear()
        for opaque in list(self._waiting):
            self._settle(opaque, None)
