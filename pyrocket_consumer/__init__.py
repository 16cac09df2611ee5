"""A push consumer for Apache RocketMQ with correct offsets, a producer, and admin functions.

from pyrocket_consumer import Message, PushConsumer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyrocket_consumer.config import ConsumerConfig, ProducerConfig
from pyrocket_consumer.errors import (
    AddressRefused,
    BrokerError,
    ClientClosed,
    ConfigError,
    ConnectError,
    ConnectionLost,
    ConsumerClosed,
    FlowControl,
    OffsetStoreCorrupt,
    OffsetStoreError,
    OffsetStoreLocked,
    OffsetStoreUnwritable,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
    SendError,
)
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageModel, MessageQueue

if TYPE_CHECKING:
    from pyrocket_consumer.admin import Admin
    from pyrocket_consumer.consumer import (
        AsyncPushConsumer,
        ConsumeContext,
        ConsumeResult,
        ConsumerState,
        ListenerResult,
        MessageListener,
        PushConsumer,
        QueueProgress,
        Retry,
        Suspend,
        in_machine_rooms,
        sql,
    )
    from pyrocket_consumer.producer import AsyncProducer, Producer, SendResult
    from pyrocket_consumer.protocol.accelerator import ACCELERATED
    from pyrocket_consumer.protocol.message import Message

__version__ = "0.1.0"

_HOMES = {  # these are imported at their first use, so that importing the package is quick
    "ACCELERATED": "pyrocket_consumer.protocol.accelerator",
    "Admin": "pyrocket_consumer.admin",
    "AsyncProducer": "pyrocket_consumer.producer",
    "AsyncPushConsumer": "pyrocket_consumer.consumer",
    "ConsumeContext": "pyrocket_consumer.consumer",
    "ConsumeResult": "pyrocket_consumer.consumer",
    "ConsumerState": "pyrocket_consumer.consumer",
    "ListenerResult": "pyrocket_consumer.consumer",
    "Message": "pyrocket_consumer.protocol.message",
    "MessageListener": "pyrocket_consumer.consumer",
    "Producer": "pyrocket_consumer.producer",
    "PushConsumer": "pyrocket_consumer.consumer",
    "QueueProgress": "pyrocket_consumer.consumer",
    "Retry": "pyrocket_consumer.consumer",
    "Suspend": "pyrocket_consumer.consumer",
    "SendResult": "pyrocket_consumer.producer",
    "in_machine_rooms": "pyrocket_consumer.consumer",
    "sql": "pyrocket_consumer.consumer",
}

__all__ = [
    "ACCELERATED",
    "AddressRefused",
    "Admin",
    "AsyncProducer",
    "AsyncPushConsumer",
    "BrokerError",
    "ClientClosed",
    "ConfigError",
    "ConnectError",
    "ConnectionLost",
    "ConsumeContext",
    "ConsumeResult",
    "ConsumerClosed",
    "ConsumerConfig",
    "ConsumerEvent",
    "ConsumerState",
    "EventKind",
    "FlowControl",
    "ListenerResult",
    "Message",
    "MessageListener",
    "MessageModel",
    "MessageQueue",
    "OffsetStoreCorrupt",
    "OffsetStoreError",
    "OffsetStoreLocked",
    "OffsetStoreUnwritable",
    "PermissionDenied",
    "Producer",
    "ProducerConfig",
    "ProtocolError",
    "PushConsumer",
    "QueueProgress",
    "RequestTimeout",
    "Retry",
    "RocketError",
    "RouteNotFound",
    "SendError",
    "SendResult",
    "Suspend",
    "__version__",
    "in_machine_rooms",
    "sql",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
