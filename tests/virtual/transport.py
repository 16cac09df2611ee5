"""Connections in memory: each direction is ordered, delayed, and split into random pieces."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

WHOLE = 0.9
"""How often written bytes arrive in one piece."""


class Transport(asyncio.Transport):
    """One end of a connection. The connecting code sets `peer` on both ends.

    Its network has a source of `random` numbers, a clock `time()`, and the `delay()` of the next bytes. `held_until()`
    is the time when a transport's bytes may leave: now, unless the network is partitioned.
    """

    peer: Any

    def __init__(self, network: Any, protocol: Any, ours: Any, theirs: Any, context: contextvars.Context) -> None:
        super().__init__({"sockname": ours, "peername": theirs, "socket": None})
        self.network, self.protocol, self.context = network, protocol, context
        self.gone = False
        self._closing = False
        self._arrives = 0.0

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function at this end, at a time."""
        raise NotImplementedError

    def is_closing(self) -> bool:
        return self._closing or self.gone

    def write(self, data: Any) -> None:
        if self.is_closing():
            return
        data = bytes(data)
        random = self.network.random
        while data:
            size = len(data) if random.random() < WHOLE else random.randint(1, len(data))
            self._send(self.peer.deliver, data[:size])
            data = data[size:]

    def _send(self, what: Callable[..., None], *arguments: Any) -> None:
        start = max(self.network.held_until(self), self.network.time())
        self._arrives = max(self._arrives + 1e-6, start + self.network.delay())  # timers of one instant have no order
        self.peer.at(self._arrives, what, *arguments)

    def deliver(self, data: bytes) -> None:
        """Pass received bytes to the protocol."""
        protocol = self.protocol
        if self.gone:
            return
        if not isinstance(protocol, asyncio.BufferedProtocol):
            protocol.data_received(data)
            return
        while data and not self.gone:
            room = protocol.get_buffer(len(data))
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            data = data[taken:]
            protocol.buffer_updated(taken)

    def close(self) -> None:
        if not self.is_closing():
            self._closing = True
            self._send(self.peer.lose, None)
            self.soon(self.lose, None)

    def soon(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function at this end in the next iteration of its loop."""
        raise NotImplementedError

    def lose(self, error: Exception | None) -> None:
        """Close this end of the connection."""
        if not self.gone:
            self.gone = True
            self.protocol.connection_lost(error)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0
