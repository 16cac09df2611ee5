"""Connections by address: shared, reopened, refused, with TLS."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pyrocket_consumer.errors import ClientClosed, ConfigError, ConnectError, ConnectionLost, RocketError
from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command
from tests.for_each import for_each
from tests.transport.peer import Lost, Server, answered, client, server_tls, serving, trusting, until


@pytest.fixture
def away(runner):
    """An address without a server."""
    server = Server()
    runner.run(server.listen())
    runner.run(server.stop())
    yield server
    runner.run(server.stop())


async def test_callers_at_the_same_time_share_one_attempt():
    async with serving() as server, client() as connections:
        assert connections.peek(server.address) is None
        got = await asyncio.gather(*(connections.get(server.address) for _ in range(20)))
        assert len(set(map(id, got))) == 1
        assert connections.peek(server.address) is got[0]
        assert connections.all() == [got[0]]
        await server.peer()
        assert server.accepted == 1


async def test_a_cancelled_caller_leaves_the_attempt_to_the_others():
    async with serving() as server, client() as connections:
        first, second = (asyncio.ensure_future(connections.get(server.address)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert not (await second).closed
        with pytest.raises(asyncio.CancelledError):
            await first
    async with serving() as server, client() as connections:
        waiting = asyncio.ensure_future(connections.get(server.address))
        await asyncio.sleep(0)
        waiting.cancel()
        connections.drop(server.address, "no longer wanted")
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_lost_connection_is_reported_once_and_reopened():
    lost = Lost()
    async with serving() as server, client(on_lost=lost) as connections:
        first = await connections.get(server.address)
        (await server.peer()).close()
        await until(lambda: first.closed)
        assert lost.reasons == ["closed by the server"]
        assert connections.peek(server.address) is None
        assert connections.all() == []
        await answered(await connections.get(server.address), await server.peer())
        assert server.accepted == 2


async def test_attempts_back_off_and_succeed_when_the_server_returns(away):
    loop = asyncio.get_running_loop()
    async with client() as connections:
        pauses = []
        for _ in range(5):
            began = loop.time()
            with pytest.raises(ConnectError, match=away.address):
                await connections.get(away.address)
            pauses.append(loop.time() - began)
        assert pauses[0] < 0.05, "nothing speaks against the first attempt"
        assert pauses[4] > 0.35, "0.05 s, doubled with each failure, less a random half"
        assert sum(pauses) < 3
        await away.listen()
        assert not (await connections.get(away.address)).closed
        (await away.peer()).close()
        await until(lambda: connections.peek(away.address) is None)
        began = loop.time()
        await connections.get(away.address)
        assert loop.time() - began < 0.3, "failures of long ago are forgotten"


async def test_a_server_that_never_sends_frames_is_not_retried():
    async with serving() as server, client() as connections:

        async def garbage() -> None:
            while True:
                (await server.peer()).send(b"\xff" * 64)

        sending = asyncio.create_task(garbage())
        with pytest.raises(ConnectError, match=r"not retried for \d+ s after bad frame: frame of 4294967295 bytes"):
            for _ in range(100):
                connection = await connections.get(server.address)
                await until(lambda connection=connection: connection.closed)
        assert 4 <= server.accepted <= 6
        sending.cancel()


async def test_one_damaged_frame_causes_no_long_pause():
    async with serving() as server, client() as connections:
        connection = await connections.get(server.address)
        (await server.peer()).send(b"\xff" * 64)
        await until(lambda: connection.closed)
        await answered(await connections.get(server.address), await server.peer())


@for_each(
    "address, error",
    [
        ("127.0.0.1", ConfigError),
        ("127.0.0.1:0", ConfigError),
        (":9876", ConfigError),
        (f"{'x' * 64}.example:9876", ConnectError),
        ("a..b:9876", ConnectError),
    ],
)
async def test_an_invalid_address_is_an_error_that_names_it(address, error):
    async with client() as connections:
        with pytest.raises(error) as raised:
            await connections.get(address)
        assert address in str(raised.value)
        assert isinstance(raised.value, RocketError)
        assert error is ConfigError or "no host name" in str(raised.value)


async def test_dropping_an_address_fails_callers_that_connect(away):
    """The callers were not cancelled, so a CancelledError would silently end their loops."""
    async with client() as connections:
        for _ in range(4):
            with pytest.raises(ConnectError):
                await connections.get(away.address)
        waiting = [asyncio.ensure_future(connections.get(away.address)) for _ in range(3)]
        await asyncio.sleep(0.01)  # the client pauses before the next attempt
        connections.drop(away.address, "no route names it")
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ConnectError] * 3
        assert "no route names it" in str(outcomes[0])


async def test_a_dropped_connection_is_closed_with_its_calls():
    lost = Lost()
    async with serving() as server, client(on_lost=lost) as connections:
        connection = await connections.get(server.address)
        call = connection.call(RemotingCommand(11), 30)
        connections.drop(server.address, "no route names it")
        with pytest.raises(ConnectionLost, match="no route names it"):
            await call
        assert lost.reasons == ["no route names it"]
        assert (await connections.get(server.address)) is not connection


async def test_after_close_no_connection_is_or_can_be_opened():
    async with serving() as server, client() as connections:
        connection = await connections.get(server.address)
        peer = await server.peer()
        away = asyncio.ensure_future(connections.get("127.0.0.1:1"))
        await asyncio.sleep(0)
        await connections.close()
        assert connection.closed
        assert await peer.rest() == b""
        with pytest.raises((ClientClosed, ConnectError)):
            await away
        with pytest.raises(ClientClosed):
            await connections.get(server.address)


# --- TLS


@pytest.mark.live
async def test_calls_over_tls():
    async with serving(server_tls()) as server, client(tls=trusting()) as connections:
        connection = await connections.get(server.address)
        peer = await server.peer()
        calls = [connection.call(RemotingCommand(11), 30) for _ in range(50)]
        for _ in calls:
            peer.respond(await peer.next(), body=b"z" * 100_000)
        assert {(await call).body for call in calls} == {b"z" * 100_000}
        peer.close()
        await until(lambda: connection.closed)
        assert not (await connections.get(server.address)).closed


@pytest.mark.live
async def test_a_flood_over_tls_is_read_in_parts_and_completely():
    handled = []
    options = {"tls": trusting(), "on_request": lambda request, connection: handled.append(request)}
    async with serving(server_tls()) as server, client(**options) as connections:
        connection = await connections.get(server.address)
        peer = await server.peer()
        for _ in range(2):
            call = connection.call(RemotingCommand(11), 30)
            ours = await peer.next()
            peer.send(10_000 * encode_command(RemotingCommand(40, flag=2)))
            peer.respond(ours, body=b"behind them")
            assert (await call).body == b"behind them"
        assert len(handled) == 20_000


@pytest.mark.live
async def test_a_tls_handshake_without_response_fails_in_time():
    async with serving() as server, client(tls=trusting(), connect_timeout_s=0.1) as connections:
        with pytest.raises(ConnectError, match="no response within 0.1 s"):
            await connections.get(server.address)
    async with serving() as server, client(tls=trusting()) as connections:
        attempt = asyncio.ensure_future(connections.get(server.address))
        (await server.peer()).reset()
        with pytest.raises(ConnectError, match=server.address):
            await attempt


@pytest.mark.live
async def test_a_silent_server_does_not_keep_a_tls_connection_open(recwarn):
    """TLS sends an alert before it closes, but the peer may be gone."""
    async with serving(server_tls()) as server:
        async with client(tls=trusting()) as connections:
            connection = await connections.get(server.address)
            peer = await server.peer()
            peer.stop_reading()
            connection.oneway(RemotingCommand(15))
            await asyncio.sleep(0.01)
        assert connection.closed
        peer.reset()
    del connections, connection, peer, server
    await asyncio.sleep(0.01)
    gc.collect()
    assert [str(each.message) for each in recwarn] == []
