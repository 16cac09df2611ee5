"""The result of a send."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pyrocket_consumer.model import MessageQueue


class SendStatus(Enum):
    """How safely a message is stored. With every status it is stored, and will be delivered.

    Source: SendStatus; the values are response codes.
    """

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """The position of one stored message.

    `message_id` is the id that consumers see (UNIQ_KEY); the producer makes it. `offset_message_id` identifies the
    broker and the position in its commit log. A delayed or transactional message waits in an internal queue of the
    broker; then `queue_offset` is its offset there, not the one of its delivery. `transaction_id` comes from the
    broker: the message id, or None from brokers before 5.0.

    `attempts` counts the attempts that stored the message, or may have. If it is above 1, a copy with the same
    `message_id` may exist. Refused attempts do not count.
    """

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str
    status: SendStatus = SendStatus.OK
    transaction_id: str | None = None
    attempts: int = 1
