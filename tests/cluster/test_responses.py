"""Decoding of responses."""

import asyncio
import threading

import pytest

from pyrocket_consumer.cluster.client import LARGE_BODY_BYTES, check_response, read_body
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.bodies import decode_lock_response
from pyrocket_consumer.protocol.frame import RemotingCommand
from tests.for_each import for_each


def test_an_accepted_code_is_no_error():
    response = RemotingCommand(22)
    assert check_response(response, "10.0.0.1:10911", accept=(0, 22)) is response


@for_each("size", [0, 1, LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1])
def test_only_a_large_body_is_read_by_another_thread(size):
    async def reader():
        return await read_body(lambda body: (len(body), threading.get_ident()), b"x" * size)

    length, thread = asyncio.run(reader())
    assert length == size
    assert (thread != threading.get_ident()) == (size > LARGE_BODY_BYTES)


@for_each("size", [1, LARGE_BODY_BYTES + 1])
def test_an_undecodable_body_raises_in_the_caller(size):
    with pytest.raises(ProtocolError, match="lock response"):
        asyncio.run(read_body(decode_lock_response, b"[%b]" % (b" " * size)))
