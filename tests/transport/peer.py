"""The peer of a connection, scripted byte by byte, so that it can also violate the protocol."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command
from pyrocket_consumer.transport.connection import Connection
from pyrocket_consumer.transport.connections import Connections

CERTIFICATE = Path(__file__).parents[1] / "cluster" / "localhost.pem"  # not secret: its key is in the same file


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting() -> ssl.SSLContext:
    """Return a context that accepts self-signed certificates without a host name, as brokers create them."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> RemotingCommand:
        """Return the next command from the client."""
        prefix = await self._reader.readexactly(4)
        return decode_command(prefix + await self._reader.readexactly(int.from_bytes(prefix)))

    async def rest(self) -> bytes:
        """Return all further bytes from the client until the connection ends; b"" if it was reset."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""

    def respond(self, command: RemotingCommand, code: int = 0, body: bytes = b"") -> None:
        self.send(encode_command(command.make_response(code, body=body)))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def continue_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Reset the connection (RST)."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._writer.transport.abort()


class Server:
    """Listens on a loopback port, and returns accepted connections in order."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.accepted = 0
        self._tls = tls
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._open: list[Peer] = []
        self._listener: asyncio.Server | None = None
        self.address = ""

    async def listen(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=self._tls, reuse_address=True)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        peer = Peer(reader, writer)
        self._open.append(peer)
        self._peers.put_nowait(peer)

    async def peer(self) -> Peer:
        """Return the next accepted connection."""
        return await self._peers.get()

    async def stop(self) -> None:
        """Refuse new connections, and close existing ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for peer in self._open:
            peer.close()
        self._open.clear()
        await asyncio.sleep(0)


async def nothing(command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
    """Ignore a request."""
    return None


class Lost:
    """The reported ends of connections."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[Connections]:
    """The connections of a client."""
    settings: dict[str, Any] = {"connect_timeout_s": 30.0, "on_request": nothing, **options}
    connections = Connections(asyncio.get_running_loop(), **settings)
    try:
        yield connections
    finally:
        await connections.close()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(tls)
    await server.listen()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Connection, Peer]]:
    """A connection and its peer."""
    async with serving() as server, client(**options) as connections:
        connection = await connections.get(server.address)
        yield connection, await server.peer()


async def until(reached: Callable[[], object]) -> None:
    """Run the loop until `reached()` is true. The deadline of the scenario ends a wait without success."""
    while not reached():
        await asyncio.sleep(0.001)


def command(code: int = 11, **fields: str) -> RemotingCommand:
    return RemotingCommand(code, fields)


async def answered(connection: Connection, peer: Peer, code: int = 0, body: bytes = b"") -> None:
    """Make a call, and check that it returns the response of `peer`."""
    call = connection.call(command(), 30)
    peer.respond(await peer.next(), code, body)
    response = await call
    assert (response.code, response.body) == (code, body)
