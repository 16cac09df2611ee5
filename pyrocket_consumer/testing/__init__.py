"""For tests: single messages, and a RocketMQ cluster inside the process with scriptable faults.

from pyrocket_consumer.testing import EmbeddedCluster, message
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
    from pyrocket_consumer.testing.cluster import EmbeddedCluster
    from pyrocket_consumer.testing.embedded_node import EmbeddedBroker, EmbeddedNameServer, EmbeddedNode
    from pyrocket_consumer.testing.faults import (
        Exchange,
        Fault,
        Gate,
        answer,
        close_connection,
        cut_after,
        delay,
        delay_request,
        drop,
        drop_answer,
        duplicate,
        garbage,
        handle_and_close,
        now_and_then,
        reset_connection,
        rewrite,
    )
    from pyrocket_consumer.testing.messages import Sent, message
    from pyrocket_consumer.testing.server import Recorded

__all__ = [
    "EmbeddedBroker",
    "EmbeddedCluster",
    "EmbeddedNameServer",
    "EmbeddedNode",
    "Exchange",
    "Fault",
    "Gate",
    "Recorded",
    "RequestCode",
    "ResponseCode",
    "Sent",
    "answer",
    "close_connection",
    "cut_after",
    "delay",
    "delay_request",
    "drop",
    "drop_answer",
    "duplicate",
    "garbage",
    "handle_and_close",
    "message",
    "now_and_then",
    "reset_connection",
    "rewrite",
]


_HOMES = ("protocol.codes", "testing.messages", "testing.faults", "testing.embedded_node", "testing.cluster")
"""Imported in this order until one has the name: the pytest plugin is loaded in every run of a user's tests."""


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"pyrocket_consumer.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
