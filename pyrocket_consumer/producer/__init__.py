"""Sending messages."""

from pyrocket_consumer.producer.async_producer import AsyncProducer
from pyrocket_consumer.producer.outgoing_message import RESERVED_PROPERTIES, OutgoingMessage
from pyrocket_consumer.producer.producer import Producer, ProducerState
from pyrocket_consumer.producer.send_request import SendResult, SendStatus
from pyrocket_consumer.producer.transactions import TransactionProducer, TransactionResult, TransactionState

__all__ = [
    "RESERVED_PROPERTIES",
    "AsyncProducer",
    "OutgoingMessage",
    "Producer",
    "ProducerState",
    "SendResult",
    "SendStatus",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
]
