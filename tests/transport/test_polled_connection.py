"""A blocking connection matches responses to requests, and each request ends exactly once."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pyrocket_consumer.errors import ConnectError, ConnectionLost, ProtocolError, RequestTimeout
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command
from pyrocket_consumer.transport.polled_connection import (
    IdleConnections,
    PolledConnection,
    open_polled_connection,
)

pytestmark = pytest.mark.live

WAIT_S = 30.0
TIMEOUT_S = 5.0


class BlockingPeer:
    """The server's end of a blocking connection."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = b""

    def next_request(self) -> RemotingCommand:
        """Return the next request."""
        while len(self._received) < 4 or len(self._received) < 4 + int.from_bytes(self._received[:4]):
            data = self.end.recv(1 << 16)
            assert data, "the connection ended"
            self._received += data
        size = 4 + int.from_bytes(self._received[:4])
        frame, self._received = self._received[:size], self._received[size:]
        return decode_command(frame)

    def respond(self, request: RemotingCommand, body: bytes = b"", code: int = 0) -> None:
        self.end.sendall(encode_command(request.make_response(code, body=body)))


@contextmanager
def connected() -> Iterator[tuple[PolledConnection, BlockingPeer]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(WAIT_S)
    connection = PolledConnection(ours, "broker:1")
    with theirs:
        yield connection, BlockingPeer(theirs)
        connection.close("the test is over")


class SentRequest:
    """A request, and its result."""

    def __init__(self, connection: PolledConnection, *, now: float = 0.0, timeout_s: float = TIMEOUT_S) -> None:
        self.responses: list[RemotingCommand | Exception] = []
        self.extents = []
        command = RemotingCommand(11, {"n": "1"})
        connection.send(lambda opaque: connection.encode(command, opaque), self._on_response, now, timeout_s)

    def _on_response(self, response, body):
        self.responses.append(response)
        self.extents.append(body)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(extent) for extent in self.extents]


def receive(connection: PolledConnection) -> None:
    """Wait for bytes, and read them."""
    assert select.select([connection.socket], [], [], WAIT_S)[0]
    assert connection.receive()


def receive_all(connection: PolledConnection) -> None:
    """Read responses until no request is pending."""
    while connection.waiting:
        receive(connection)


@pytest.fixture
def link() -> Iterator[tuple[PolledConnection, BlockingPeer]]:
    with connected() as both:
        yield both


@pytest.fixture
def connection(link: tuple[PolledConnection, BlockingPeer]) -> PolledConnection:
    return link[0]


@pytest.fixture
def server(link: tuple[PolledConnection, BlockingPeer]) -> BlockingPeer:
    return link[1]


def test_responses_match_their_requests_in_any_order(connection, server):
    first, second = SentRequest(connection), SentRequest(connection)
    assert connection.has_unsent
    connection.flush()
    assert not connection.has_unsent
    one, two = server.next_request(), server.next_request()
    server.respond(two, b"two")
    receive(connection)
    assert (first.bodies, second.bodies) == ([], [b"two"])
    # Ignored: a request of the broker, and a response without a request.
    server.end.sendall(encode_command(RemotingCommand(40, {}, opaque=one.opaque)))
    server.respond(RemotingCommand(11, {}, opaque=999), b"late")
    server.respond(one, b"one", code=21)
    receive_all(connection)
    assert (first.bodies, first.responses[0].code, second.bodies) == ([b"one"], 21, [b"two"])
    assert connection.waiting == 0


def test_a_request_without_a_response_ends_at_its_deadline(connection, server):
    soon, later = SentRequest(connection, now=100, timeout_s=1), SentRequest(connection, now=100, timeout_s=9)
    assert connection.next_deadline == 101
    connection.expire(100.9)
    assert soon.responses == []
    connection.expire(101)
    assert isinstance(soon.responses[0], RequestTimeout)
    assert str(soon.responses[0]) == "PULL_MESSAGE got no response from broker:1 within 1 s"
    assert later.responses == []
    assert connection.next_deadline == 109
    connection.flush()
    server.respond(server.next_request(), b"too late")
    server.respond(server.next_request(), b"in time")
    receive_all(connection)
    assert (len(soon.responses), later.bodies) == (1, [b"in time"])


@pytest.mark.parametrize("how", ["closed", "reset", "by us", "no frame"])
def test_a_lost_connection_ends_every_request_once(how, connection, server):
    assert not connection.receive()
    connection.flush()
    assert connection.next_deadline is None
    connection.expire(1e9)  # no request is pending
    sent = [SentRequest(connection) for _ in range(3)]
    connection.flush()
    if how == "by us":
        connection.close("enough")
    elif how == "no frame":
        server.end.sendall(struct.pack(">iI", -1, 0))
        receive(connection)
    else:
        if how == "reset":
            server.next_request()
        server.end.close()  # unread requests make this a reset
        while not connection.closed:
            receive(connection)
    error = ProtocolError if how == "no frame" else ConnectionLost
    assert [[isinstance(response, error) for response in each.responses] for each in sent] == [[True]] * 3
    assert connection.closed
    assert not connection.receive()
    connection.flush()
    connection.close("again")


def test_requests_that_do_not_fit_the_socket_are_sent_later(connection, server):
    sent = [SentRequest(connection) for _ in range(20_000)]
    connection.flush()
    assert connection.has_unsent
    requests = []
    reader = threading.Thread(target=lambda: requests.extend(server.next_request() for _ in sent))
    reader.start()
    while connection.has_unsent:
        assert select.select([], [connection.socket], [], WAIT_S)[1]
        connection.flush()
    reader.join(WAIT_S)
    assert len({each.opaque for each in requests}) == 20_000


def test_bodies_stay_until_their_memory_is_released(connection, server):
    sent = []
    for number in range(50):
        sent.append(SentRequest(connection))
        connection.flush()
        server.respond(server.next_request(), b"%03d" % number * 10_000)
        receive_all(connection)
        if number % 10 == 9:
            connection.release_except(extent for each in sent[number - 3 :] for extent in each.extents)
            assert [each.bodies for each in sent[number - 3 :]] == [
                [b"%03d" % n * 10_000] for n in range(number - 3, number + 1)
            ]


# --- opening, and idle connections


@contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield f"127.0.0.1:{listener.getsockname()[1]}", listener


def opened(address: str) -> PolledConnection:
    async def opening() -> PolledConnection:
        return await open_polled_connection(asyncio.get_running_loop(), address, timeout_s=TIMEOUT_S)

    return asyncio.run(opening())


def test_an_unreachable_server_is_an_error_with_its_address():
    with listening() as (address, listener):
        listener.close()
        with pytest.raises(ConnectError, match=f"cannot connect to {address}: Connection refused"):
            opened(address)


def test_an_idle_connection_is_used_again_while_it_lives():
    idle = IdleConnections()
    with listening() as (address, listener):
        connection = opened(address)
        peer, _ = listener.accept()
        with peer:
            assert idle.take(address) is None
            idle.put(connection)
            assert idle.take("127.0.0.1:1") is None
            assert idle.take(address) is connection
            assert idle.take(address) is None
            idle.put(connection)
        select.select([connection.socket], [], [], WAIT_S)
        assert idle.take(address) is None
        assert connection.closed


def test_connections_returned_busy_or_late_are_closed():
    idle = IdleConnections()
    with connected() as (busy, _), connected() as (kept, _), connected() as (late, _):
        sent = SentRequest(busy)
        idle.put(busy)
        assert busy.closed
        assert isinstance(sent.responses[0], ConnectionLost)
        assert idle.take("broker:1") is None
        idle.put(kept)
        idle.close()
        assert kept.closed
        idle.put(late)
        assert late.closed
