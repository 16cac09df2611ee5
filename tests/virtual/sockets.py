"""Blocking sockets of a world, for clients without an event loop."""

from __future__ import annotations

import contextvars
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.virtual.loop import Transport, network_of, resolved
from tests.virtual.scheduler import Scheduler, SimulatedThread


def connect(world: Scheduler, address: tuple[str, int], timeout_s: float | None) -> VirtualSocket:
    """Return a socket connected to a server of this world."""
    return VirtualSocket(world, (resolved(address[0]), address[1]), timeout_s)


class VirtualSocket(Transport):
    """The socket that `socket.create_connection()` returns inside a world. It handles received bytes at each read."""

    def __init__(self, world: Scheduler, address: tuple[str, int], timeout_s: float | None) -> None:
        network = network_of(world)
        super().__init__(network, self, self, None, address, contextvars.copy_context())  # type: ignore[arg-type]
        self._world = world
        self._timeout_s = timeout_s
        self._due: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._data = bytearray()
        self._is_at_end = False
        self._error: Exception | None = None
        self._reading: list[SimulatedThread] = []
        world.sleep(network.delay())
        network.join(self, address)

    # --- called for the other end

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._due.append((when, what, arguments))
        self._wake()

    def soon(self, what: Callable[..., None], *arguments: Any) -> None:
        what(*arguments)

    def connection_made(self, transport: Any) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        self._is_at_end, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        for thread in self._reading:
            self._world.wake(thread)

    # --- called by the user

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def setblocking(self, blocks: bool) -> None:
        self._timeout_s = None if blocks else 0.0

    def setsockopt(self, *option: Any) -> None:
        pass

    def getsockname(self) -> Any:
        return self.get_extra_info("sockname")

    def getpeername(self) -> Any:
        return self.get_extra_info("peername")

    def fileno(self) -> int:
        return -1

    def sendall(self, data: Any) -> None:
        self._take_due()
        if self.is_closing():
            raise BrokenPipeError(32, "Broken pipe") if self._error is None else self._error
        self.write(data)

    def send(self, data: Any) -> int:
        self.sendall(data)
        return len(data)

    def shutdown(self, how: int) -> None:
        if self.gone:
            raise OSError(107, "Transport endpoint is not connected")
        if how != socket.SHUT_RDWR:
            self.write_eof()
        self.close()

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._wait_for_data(self._timeout_s if not flags & socket.MSG_DONTWAIT else 0.0)
        data = bytes(self._data[:size])
        if not flags & socket.MSG_PEEK:
            del self._data[:size]
        return data

    def recv_into(self, space: Any) -> int:
        data = self.recv(len(space))
        space[: len(data)] = data
        return len(data)

    def _take_due(self) -> None:
        while self._due and self._due[0][0] <= self._world.now:
            _, what, arguments = self._due.popleft()
            self.run(what, arguments)

    def _wait_for_data(self, timeout_s: float | None) -> None:
        world = self._world
        deadline = None if timeout_s is None else world.now + timeout_s
        while True:
            self._take_due()
            if self._data:
                return
            if self._error is not None:
                raise self._error
            if self._is_at_end:
                return
            if deadline is not None and world.now >= deadline:
                raise BlockingIOError(11, "try again") if timeout_s == 0 else TimeoutError("timed out")
            soonest = [each for each in (deadline, self._due[0][0] if self._due else None) if each is not None]
            self._reading.append(world.me())
            try:
                world.wait(min(soonest, default=None))
            finally:
                self._reading.remove(world.me())

    def __enter__(self) -> VirtualSocket:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
