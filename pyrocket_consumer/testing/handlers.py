"""The interface of a node's parts: a table of handlers by request code."""

from __future__ import annotations

from collections.abc import Callable

from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.broker_state import Refused
from pyrocket_consumer.testing.connection import Connection

Handler = Callable[[RemotingCommand, Connection], RemotingCommand | None]
"""Returns the response, or None if it follows later or never. Raises Refused, or ProtocolError for a bad request."""

Handlers = dict[int, Handler]


def error_response(request: RemotingCommand, refused: Refused) -> RemotingCommand:
    """Return the response that reports a refusal."""
    return request.make_response(refused.code, refused.remark, dict(refused.fields))
