"""For tests: a RocketMQ cluster inside the process, with scriptable faults. Not a production broker.

from pyrocket_consumer.testing import EmbeddedCluster
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from pyrocket_consumer.testing.feed import Sent
    from pyrocket_consumer.testing.recording import Recorded

_HOMES = {  # imported when first used: the pytest plugin is loaded in every run of a user's tests
    "cluster": ("EmbeddedCluster",),
    "embedded_node": ("EmbeddedBroker", "EmbeddedNameServer", "EmbeddedNode"),
    "faults": (
        "Exchange", "Fault", "Gate", "answer", "close_connection", "cut_after", "delay", "delay_request", "drop",
        "drop_answer", "duplicate", "garbage", "handle_and_close", "now_and_then", "reset_connection", "rewrite",
    ),
    "feed": ("Sent",),
    "recording": ("Recorded",),
}  # fmt: skip

__all__ = [
    "EmbeddedBroker",
    "EmbeddedCluster",
    "EmbeddedNameServer",
    "EmbeddedNode",
    "Exchange",
    "Fault",
    "Gate",
    "Recorded",
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
    "now_and_then",
    "reset_connection",
    "rewrite",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
