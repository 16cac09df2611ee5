"""A connection matches responses to calls, and every call ends once and in time, whatever the server does."""

from __future__ import annotations

import asyncio
import struct

import pytest

from pyrocket_consumer.errors import ConnectionLost, ProtocolError, RequestTimeout, RocketError
from pyrocket_consumer.protocol.frame import MAX_FRAME_BYTES, RemotingCommand, encode_command
from pyrocket_consumer.transport.connection import MAX_OVERDUE
from tests.for_each import for_each
from tests.protocol.test_frame import BAD_FRAMES
from tests.transport.peer import Lost, answered, command, connected, until


def send(connection, on_response, timeout_s, **options):
    connection.send(lambda opaque: connection.encode(command(), opaque), on_response, timeout_s, **options)


async def test_a_call_returns_its_response_with_any_code_and_size(connection, peer):
    for code in (0, 1, 21, 999):
        await answered(connection, peer, code, b"body")
    for size in (5 * 1024 * 1024, 1, 0, 300_000, MAX_FRAME_BYTES - 1000, 7):
        await answered(connection, peer, body=b"z" * size)


async def test_many_calls_at_once_get_responses_in_any_order(connection, peer):
    responses = [connection.call(command(n=str(number)), 5) for number in range(500)]
    for each in reversed([await peer.next() for _ in responses]):
        peer.respond(each, body=each.fields["n"].encode())
    assert [(await response).body for response in responses] == [b"%d" % number for number in range(500)]
    assert connection.waiting == 0
    together = connection.call_many([command(n=str(number)) for number in range(2000)], 30)
    received = [await peer.next() for _ in range(2000)]
    peer.send(b"".join(encode_command(each.make_response(body=each.fields["n"].encode())) for each in received))
    peer.close()  # responses received before the end still reach their calls
    assert [each.body for each in await together] == [b"%d" % number for number in range(2000)]


@pytest.mark.live
async def test_requests_sent_together_each_get_a_response_or_error(connection, peer):
    responses = connection.call_many([command(n=str(number)) for number in range(3)], 5)
    received = [await peer.next() for _ in range(3)]
    peer.respond(received[2], body=b"third")
    peer.respond(received[0], 21, body=b"first")
    await until(lambda: connection.waiting == 1)
    peer.reset()
    first, second, third = await responses
    assert (first.code, first.body, third.body) == (21, b"first", b"third")
    assert isinstance(second, ConnectionLost) and "reset" in str(second).lower()
    assert all(isinstance(each, ConnectionLost) for each in await connection.call_many([command()] * 2, 5))
    assert await connection.call_many([], 5) == []


async def test_requests_sent_together_end_at_their_deadline(connection, peer):
    responses = connection.call_many([command(11), command(12)], 0.05)
    peer.respond(await peer.next(), body=b"in time")
    first, second = await responses
    assert (first.body, type(second)) == (b"in time", RequestTimeout)
    given_up = connection.call_many([command(), command()], 5)
    given_up.cancel()
    await peer.next()
    for _ in range(2):
        peer.respond(await peer.next())
    await until(lambda: connection.waiting == 0)


async def test_answers_nobody_waits_for_are_ignored(connection, peer):
    for stray in (0, -1, 12345, 2**31 - 1):
        peer.send(encode_command(RemotingCommand(0, flag=1, opaque=stray, body=b"stray")))
    first = connection.call(command(), 30)
    received = await peer.next()
    for body in (b"first", b"again"):
        peer.respond(received, body=body)
    await answered(connection, peer, body=b"second")
    assert (await first).body == b"first"


async def test_a_late_response_is_ignored_and_the_connection_stays(connection, peer):
    with pytest.raises(RequestTimeout, match="PULL_MESSAGE got no response from 127.0.0.1:.* within 0.05 s"):
        await connection.call(command(11), 0.05)
    peer.respond(await peer.next(), body=b"late")
    await answered(connection, peer, body=b"new")


async def test_a_late_response_is_passed_once_to_a_caller_that_wants_it(connection, peer):
    results: list[object] = []
    late: list[bytes] = []

    def on_late(response) -> None:
        late.append(response.body)

    for each in (on_late, None, on_late):
        send(connection, results.append, 0.02, on_late=each)
    received = [await peer.next() for _ in range(3)]
    await until(lambda: len(results) == 3)
    assert {type(each) for each in results} == {RequestTimeout}
    for each in (received[0], received[0], received[1]):
        peer.respond(each, body=b"late")
    await until(lambda: late)
    await answered(connection, peer, body=b"new")
    assert (late, len(results)) == ([b"late"], 3)


async def test_the_number_of_overdue_responses_is_limited(connection, peer):
    late: list[bytes] = []
    for _ in range(MAX_OVERDUE + 1):
        send(connection, lambda response: None, 0.001, on_late=lambda response: late.append(response.body))
    oldest, after, *_ = [await peer.next() for _ in range(MAX_OVERDUE + 1)]
    await until(lambda: connection.waiting == 0)
    peer.respond(oldest, body=b"oldest")
    peer.respond(after, body=b"next")
    await until(lambda: late)
    assert late == [b"next"]


async def test_without_responses_each_call_ends_at_its_own_deadline(connection):
    loop = asyncio.get_running_loop()
    began, ended = loop.time(), []

    async def call(timeout_s: float) -> None:
        with pytest.raises(RequestTimeout):
            await connection.call(command(), timeout_s)
        ended.append(timeout_s)
        assert -0.001 <= loop.time() - began - timeout_s < 0.5

    await asyncio.gather(*(call(timeout_s) for timeout_s in (0.4, 0.1, 0.3, 0.2, 0.001)))
    assert ended == sorted(ended)
    assert connection.waiting == 0
    assert not connection.closed, "whether that means anything is for others to judge"
    began, ended = loop.time(), []

    def again(response) -> None:  # this delays no other deadline
        send(connection, lambda response: None, 20)

    send(connection, again, 0.05)
    send(connection, lambda response: ended.append(loop.time() - began), 0.5)
    await until(lambda: ended)
    assert 0.5 <= ended[0] < 10


@for_each("bad", BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_bytes_that_are_not_a_frame_end_connection_and_calls(bad):
    lost = Lost()
    async with connected(on_lost=lost) as (connection, peer):
        calls = [connection.call(command(), 30) for _ in range(3)]
        await peer.next()
        peer.send(bad)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(errors[0], ProtocolError)
        assert errors == [errors[0]] * 3
        assert connection.closed
        (reason,) = lost.reasons
        assert "bad frame" in reason
        await peer.rest()
        with pytest.raises(ConnectionLost, match="bad frame"):
            await connection.call(command(), 30)


@pytest.mark.parametrize("max_frame_bytes", [64 * 1024, 20 << 20])
async def test_frames_are_as_large_as_they_may_be(max_frame_bytes):
    async with connected(max_frame_bytes=max_frame_bytes) as (connection, peer):
        body = b"x" * (max_frame_bytes - 1000)
        call = connection.call(command(), 30)
        received = await peer.next()
        peer.send(encode_command(received.make_response(body=body), max_frame_bytes=max_frame_bytes))
        assert (await call).body == body
        with pytest.raises(ProtocolError, match=f"max_frame_bytes={max_frame_bytes}"):
            connection.call(RemotingCommand(10, body=b"x" * max_frame_bytes), 30)
        call = connection.call(command(), 30)
        await peer.next()
        peer.send(struct.pack(">II", max_frame_bytes, 10))
        with pytest.raises(ProtocolError, match=f"max_frame_bytes={max_frame_bytes}"):
            await call
        assert connection.closed


async def test_a_truncated_response_is_a_lost_connection():
    async with connected() as (_, peer):
        whole = len(encode_command(RemotingCommand(0, {"offset": "5"}, b"body", 1, 1)))
    for cut in range(whole):
        lost = Lost()
        async with connected(on_lost=lost) as (connection, peer):
            call = connection.call(command(), 30)
            received = await peer.next()
            peer.send(encode_command(received.make_response(0, None, {"offset": "5"}, b"body"))[:cut])
            peer.close()
            with pytest.raises(ConnectionLost, match="closed by the server"):
                await call
            assert len(lost.reasons) == 1


async def test_answers_may_come_byte_by_byte(connection, peer):
    calls = [connection.call(command(), 30) for _ in range(3)]
    received = [await peer.next() for _ in calls]
    for byte in b"".join(encode_command(each.make_response(body=b"x" * 40)) for each in received):
        peer.send(bytes([byte]))
        await asyncio.sleep(0)  # so that each byte arrives alone
    assert [(await call).body for call in calls] == [b"x" * 40] * 3


async def test_a_request_that_is_too_large_is_not_sent(connection, peer):
    with pytest.raises(ProtocolError, match="at most max_frame_bytes="):
        await connection.call(RemotingCommand(10, body=b"x" * MAX_FRAME_BYTES), 5)
    assert connection.waiting == 0
    call = connection.call(command(77), 30)
    received = await peer.next()
    assert received.code == 77
    peer.respond(received)
    await call


async def test_requests_made_before_closing_are_still_sent():
    lost = Lost()
    async with connected(on_lost=lost) as (connection, peer):
        call = connection.call(command(34), 30)
        connection.oneway(command(35))
        assert connection.waiting == 1, "a one-way request waits for nothing"
        connection.close("over")
        connection.close("again")
        with pytest.raises(ConnectionLost, match="over"):
            await call
        first, second = await peer.next(), await peer.next()
        assert [(each.code, each.is_oneway, each.is_response) for each in (first, second)] == [
            (34, False, False),
            (35, True, False),
        ]
        assert await peer.rest() == b""
        assert lost.reasons == ["over"]
        with pytest.raises(ConnectionLost, match="over"):
            await connection.call(command(), 30)
        with pytest.raises(ConnectionLost, match="over"):
            connection.oneway(command(15))


# --- send(), the fast variant


@pytest.mark.parametrize("end", ["response", "timeout", "lost", "closed", "garbage", "closed before"])
async def test_a_callback_is_called_exactly_once_however_the_call_ends(end, connection, peer):
    results: list[RemotingCommand | Exception] = []
    if end == "closed before":
        connection.close("over")
        send(connection, results.append, 0.05)
        assert results == [], "a caller is never called back before its call has returned"
    else:
        send(connection, results.append, 0.05 if end == "timeout" else 30)
        received = await peer.next()
        {
            "response": lambda: peer.respond(received),
            "timeout": lambda: None,
            "lost": peer.close,
            "closed": lambda: connection.close("over"),
            "garbage": lambda: peer.send(b"\xff" * 8),
        }[end]()
    await until(lambda: results)
    connection.close("over")
    await asyncio.sleep(0.1)
    expected = {"response": RemotingCommand, "timeout": RequestTimeout, "garbage": ProtocolError}
    assert [type(each) for each in results] == [expected.get(end, ConnectionLost)]


@pytest.mark.live
async def test_functions_that_callbacks_return_run_after_their_requests(connection, peer):
    """These responses arrive together."""
    order: list[str] = []

    def calling(name: str):
        def on_response(response):
            order.append(f"{name} answered")
            connection.oneway(command(100))
            return lambda: order.append(f"{name} delivered")

        return on_response

    for name in ("a", "b"):
        send(connection, calling(name), 5)
    received = [await peer.next(), await peer.next()]
    peer.send(b"".join(encode_command(each.make_response()) for each in received))
    await until(lambda: len(order) == 4)
    assert order == ["a answered", "b answered", "a delivered", "b delivered"]
    assert [(await peer.next()).code, (await peer.next()).code] == [100, 100]


async def test_a_callback_that_raises_harms_no_other():
    results: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: results.append(context))

    def bad(response):
        raise ZeroDivisionError("in a callback")

    async with connected() as (connection, peer):
        for on_response in (bad, lambda response: lambda: bad(response)):
            send(connection, on_response, 5)
        good = connection.call(command(), 30)
        received = [await peer.next() for _ in range(3)]
        peer.send(b"".join(encode_command(each.make_response()) for each in received))
        assert (await good).code == 0
        await until(lambda: len(results) == 2)
        assert not connection.closed
        send(connection, bad, 0.05)
        await until(lambda: len(results) == 3)
    assert {type(context["exception"]) for context in results} == {ZeroDivisionError}


# --- requests of the server


async def test_the_client_responds_to_requests_while_a_call_waits():
    handled: list[int] = []

    async def on_request(received, connection):
        handled.append(received.code)
        return received.make_response(3, f" request type {received.code} not supported")

    async with connected(on_request=on_request) as (connection, peer):
        call = connection.call(command(), 30)
        ours = await peer.next()
        peer.send(encode_command(RemotingCommand(40, flag=2, opaque=1)))  # one-way: no response
        peer.send(encode_command(RemotingCommand(65000, opaque=ours.opaque)))
        response = await peer.next()
        assert (response.code, response.opaque, response.is_response) == (3, ours.opaque, True)
        assert response.remark == " request type 65000 not supported"
        assert handled == [40, 65000]
        peer.respond(ours, body=b"mine")
        assert (await call).body == b"mine", "an equal opaque of the server's own request is no answer"


def refuse_today(received):
    raise RocketError("not today")


@for_each(
    "response, remark",
    [
        (refuse_today, "not today"),
        (lambda received: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda received: received.make_response(body=b"x" * MAX_FRAME_BYTES), "at most"),
    ],
    ids=["an error of ours", "a bug", "too large"],
)
async def test_a_failed_request_gets_a_response_with_the_reason(response, remark):
    results: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: results.append(context))

    async def on_request(received, connection):
        return response(received)

    async with connected(on_request=on_request) as (_, peer):
        peer.send(encode_command(RemotingCommand(307, opaque=2)))
        answered = await peer.next()
        assert (answered.code, answered.opaque) == (1, 2)
        assert remark in answered.remark if remark == "at most" else answered.remark == remark
    assert ["GET_CONSUMER_RUNNING_INFO" in context["message"] for context in results] == [True] * ("Zero" in remark)


@pytest.mark.live
async def test_a_flood_of_requests_lets_other_tasks_run():
    """Even if many commands arrive together, only some are handled before other tasks run."""
    handled = []
    async with connected(on_request=lambda received, connection: handled.append(received)) as (connection, peer):
        call = connection.call(command(), 30)
        ours = await peer.next()
        peer.send(20_000 * encode_command(RemotingCommand(40, flag=2)))
        peer.respond(ours, body=b"behind them")
        most = 0
        while not call.done():
            before = len(handled)
            await asyncio.sleep(0)
            most = max(most, len(handled) - before)
        assert (await call).body == b"behind them"
        assert len(handled) == 20_000
        assert most <= 256


async def test_a_flood_of_unrequested_responses_ends_no_call(connection, peer):
    call = connection.call(command(), 30)
    ours = await peer.next()
    peer.send(20_000 * encode_command(RemotingCommand(0, opaque=ours.opaque + 1, flag=1)))
    peer.respond(ours, body=b"behind them")
    assert (await call).body == b"behind them"
    assert connection.waiting == 0


@pytest.mark.live
async def test_unread_responses_to_the_server_are_limited():
    handled = []

    def on_request(received, connection):
        handled.append(received)
        connection.respond(received, received.make_response(body=b"x" * 50_000))

    async with connected(on_request=on_request) as (connection, peer):
        peer.stop_reading()
        for number in range(2000):
            peer.send(encode_command(RemotingCommand(307, opaque=number)))
        await until(lambda: len(handled) == 2000)
        assert connection.is_backlogged
        peer.continue_reading()
        answered = 0
        while connection.is_backlogged:
            await peer.next()
            answered += 1
        peer.send(encode_command(RemotingCommand(307, opaque=2000)))
        while (await peer.next()).opaque < 2000:
            answered += 1
        assert 0 < answered * 50_000 < 30 * 1024 * 1024, "what sockets hold, and a little more"


# --- signing


async def test_requests_are_signed_last_and_responses_never():
    signed: list[int] = []

    def sign(request: RemotingCommand) -> None:
        signed.append(request.code)
        request.fields = {**request.fields, "Signature": f"of {sorted(request.fields)}"}

    async def on_request(received, connection):
        return received.make_response()

    async with connected(sign=sign, on_request=on_request) as (connection, peer):
        assert connection.is_signing
        call = connection.call(command(11, a="1"), 30)
        connection.oneway(command(15, b="2"))
        first, second = await peer.next(), await peer.next()
        assert first.fields == {"a": "1", "Signature": "of ['a']"}
        assert second.fields == {"b": "2", "Signature": "of ['b']"}
        peer.respond(first)
        await call
        peer.send(encode_command(RemotingCommand(307, opaque=9)))
        assert (await peer.next()).fields == {}
        assert signed == [11, 15]


# --- a server that reads slowly


@pytest.mark.live
@pytest.mark.parametrize("end", ["read", "reset"])
async def test_drain_waits_until_a_full_socket_is_read_or_reset(end, connection, peer):
    peer.stop_reading()
    for _ in range(8):
        connection.oneway(RemotingCommand(10, body=b"x" * (4 * 1024 * 1024)))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(connection.drain())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    if end == "read":
        peer.continue_reading()
        for _ in range(8):
            await peer.next()
    else:
        peer.reset()
    await waiting
    assert connection.closed is (end == "reset")
