"""An event loop of a world: timers on its clock, connections in its memory."""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import socket
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.virtual import transport
from tests.virtual.scheduler import STEP_S, NotVirtual, Scheduler

SLOWEST_S = 0.002
"""The longest delay of bytes in a connection."""
PAUSES = 0.25
"""How often a loop with further work lets another thread run first."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on a simulated thread. Loops of one world can connect to each other's servers."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__()
        self._world = world
        self._selector = self
        self._is_called = False
        self._waiting: Any = None
        self.network = network_of(world)

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Wait as a selector does, for a call from another thread or the next timer."""
        world = self._world
        world.now += STEP_S
        if self._is_called or timeout == 0:
            if world.random.random() < PAUSES:
                world.pause()
        elif timeout is None or timeout > 0:
            self._waiting = world.me()
            try:
                world.wait(None if timeout is None else world.now + timeout)
            finally:
                self._waiting = None
        self._is_called = False
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        if self._world.is_over:
            raise NotVirtual("this began in virtual time that is over; a unit test's fixture lives for one test")
        self._is_called = True
        if self._waiting is not None:
            self._world.wake(self._waiting)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, ssl: Any = None, **options: Any
    ) -> Any:
        if ssl is not None or host is None:
            raise NotVirtual("TLS, or a socket of one's own, in virtual time; mark this test live")
        return await self.network.connect(self, protocol_factory, (resolved(host), port))

    async def create_server(
        self,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        sock: Any = None,
        ssl: Any = None,
        **options: Any,
    ) -> Any:
        if ssl is not None:
            raise NotVirtual("TLS in virtual time; mark this test live")
        return self.network.listen(self, protocol_factory, sock.getsockname() if sock else (host, port), sock)

    def remove_reader(self, listening: Any) -> bool:
        """Accept no more connections on a listening socket; new ones wait."""
        return self.network.stop_accepting(listening)


def resolved(host: str) -> str:
    """Return the address of a host in a world: an address, or `localhost`."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if host == "localhost":
            return "127.0.0.1"
        host.encode("idna")  # like the real function, raise UnicodeError for an invalid name
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def network_of(world: Scheduler) -> Network:
    """Return the network of a world; the first call creates it."""
    if not hasattr(world, "network"):
        world.network = Network(world)  # type: ignore[attr-defined]
    return world.network  # type: ignore[attr-defined, no-any-return]


class Address:
    """A listening socket, which only knows its address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        pass


class Listener(asyncio.AbstractServer):
    """The server that `create_server` returns."""

    def __init__(self, network: Network, loop: VirtualLoop, factory: Any, address: tuple[str, int], sock: Any) -> None:
        self.loop, self.factory = loop, factory
        self.sockets = (sock if sock is not None else Address(address),)
        self.accepts = True
        self.backlog: list[Transport] = []
        self._network, self._address = network, address
        self.context = contextvars.copy_context()
        self._closed = loop.create_future()

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for sock in self.sockets:
            sock.close()
        for each in self.backlog:
            each.abort()
        if not self._closed.done() and not self.loop.is_closed():
            self._closed.set_result(None)

    def is_serving(self) -> bool:
        return self._network.listeners.get(self._address) is self

    async def wait_closed(self) -> None:
        pass

    async def serve_forever(self) -> None:
        try:
            await asyncio.shield(self._closed)
        finally:
            self.close()


class Network:
    """The listeners of a world, and the delay of bytes."""

    def __init__(self, world: Scheduler) -> None:
        self.world = world
        self.random = world.random
        self.listeners: dict[tuple[str, int], Listener] = {}
        self._ports = count(40_000)

    def listen(self, loop: VirtualLoop, factory: Any, address: tuple[str, int], sock: Any) -> Listener:
        host, port = address
        address = (resolved(host or "127.0.0.1"), port or next(self._ports))
        if address in self.listeners:
            raise OSError(98, f"{address} is in use")
        self.listeners[address] = Listener(self, loop, factory, address, sock)
        return self.listeners[address]

    def stop_accepting(self, sock: Any) -> bool:
        for listener in self.listeners.values():
            if sock in listener.sockets:
                listener.accepts = False
                return True
        return False

    async def connect(self, loop: VirtualLoop, factory: Any, address: tuple[str, int]) -> Any:
        await asyncio.sleep(self.delay())
        if address not in self.listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        near = Transport(self, loop, factory(), None, address, contextvars.copy_context())
        self.join(near, address)
        return near, near.protocol

    def join(self, near: Transport, address: tuple[str, int]) -> None:
        """Connect one end with the listener; without an accepting listener, it waits."""
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ours = ("127.0.0.1", next(self._ports))
        near._extra["sockname"] = ours  # type: ignore[attr-defined]
        served = listener.factory if listener.accepts else asyncio.Protocol
        far = Transport(self, listener.loop, served(), address, ours, listener.context)
        near.peer, far.peer = far, near
        if listener.accepts:
            far.soon(far.protocol.connection_made, far)
        else:
            listener.backlog.append(far)
        near.protocol.connection_made(near)

    def time(self) -> float:
        return self.world.now

    def delay(self) -> float:
        return self.random.uniform(0.0001, SLOWEST_S)

    def held_until(self, transport: Any) -> float:
        return self.world.now


class Transport(transport.Transport):
    """One end of a connection of a loop."""

    def __init__(
        self, network: Network, loop: VirtualLoop, protocol: Any, ours: Any, theirs: Any, context: contextvars.Context
    ) -> None:
        super().__init__(network, protocol, ours, theirs, context)
        self._loop = loop
        self._is_paused = False
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if not loop.is_closed():
            loop.call_at(when, self.run, what, arguments, context=self.context)
            loop._write_to_self()  # it may wait for a later timer

    def soon(self, what: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if not loop.is_closed():
            loop.call_at(self.network.time(), what, *arguments, context=self.context)
            loop._write_to_self()

    def run(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Run a call at this end. Bytes that arrive while reading is paused wait."""
        if self._is_paused or self._held:
            self._held.append((what, arguments))
        elif not self.gone:
            what(*arguments)

    def deliver(self, data: bytes) -> None:
        if not self._closing:
            super().deliver(data)

    def can_write_eof(self) -> bool:
        return False

    def write_eof(self) -> None:
        raise NotVirtual("half of a connection cannot be closed in virtual time; mark this test live")

    def abort(self) -> None:
        """Close both ends at once."""
        self._closing = True
        for end in (self, self.peer):
            end._is_paused = False
            end._held.clear()
        self.soon(self.lose, None)
        self.peer.soon(self.peer.lose, ConnectionResetError(104, "Connection reset by peer"))

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._read_on, context=self.context)

    def _read_on(self) -> None:
        """Deliver waiting bytes in order; bytes that arrive during this follow them."""
        while self._held and not self._is_paused and not self.gone:
            what, arguments = self._held.pop(0)
            what(*arguments)
