"""The push consumer: rebalance, pull, consume, commit."""

from pyrocket_consumer.consumer.assignment.held_queue import QueueProgress
from pyrocket_consumer.consumer.listener import (
    ConsumeContext,
    ConsumeResult,
    ListenerResult,
    MessageListener,
    Retry,
    Suspend,
)
from pyrocket_consumer.consumer.member import ConsumerState
from pyrocket_consumer.consumer.membership.allocation import in_machine_rooms
from pyrocket_consumer.consumer.push_consumer import AsyncPushConsumer, PushConsumer, sql

__all__ = [
    "AsyncPushConsumer",
    "ConsumeContext",
    "ConsumeResult",
    "ConsumerState",
    "ListenerResult",
    "MessageListener",
    "PushConsumer",
    "QueueProgress",
    "Retry",
    "Suspend",
    "in_machine_rooms",
    "sql",
]
