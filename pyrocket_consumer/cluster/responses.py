"""The meaning of a response: success or which error, and its decoded body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import TypeVar

from pyrocket_consumer.errors import MOST_OF_A_REMARK, BrokerError, FlowControl, PermissionDenied
from pyrocket_consumer.protocol.codes import ResponseCode, response_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import truncate

T = TypeVar("T")

LARGE_BODY_BYTES = 16 * 1024
"""Larger bodies are decoded on another thread, because they would block the I/O thread for several milliseconds."""

_ACL_REMARK = "AclException"  # ACL 1.0 refuses with SYSTEM_ERROR; only the remark shows the reason

_BUSY_CODES = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL})


def check_response(response: RemotingCommand, address: str, accept: Container[int] = (0,)) -> RemotingCommand:
    """Return `response` if its code is in `accept`.

    Raises:
        BrokerError: it has another code; PermissionDenied or FlowControl if that is the reason.
    """
    if response.code in accept:
        return response
    raise read_error(response, address)


def read_error(response: RemotingCommand, address: str) -> BrokerError:
    """Return the error for a response whose code is not accepted."""
    code, remark = response.code, response.remark or ""
    kind = BrokerError
    if code == ResponseCode.NO_PERMISSION or (code == ResponseCode.SYSTEM_ERROR and _ACL_REMARK in remark):
        kind = PermissionDenied
    elif code in _BUSY_CODES:
        kind = FlowControl
    return kind(code, truncate(remark, MOST_OF_A_REMARK), address, response_name(code))


async def read_body(decode: Callable[[bytes], T], body: bytes) -> T:
    """Return `decode(body)`. A large body is decoded on another thread, so that it does not block the I/O thread.

    Raises:
        ProtocolError: the body cannot be decoded.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return decode(body)
    return await asyncio.get_running_loop().run_in_executor(None, decode, body)
