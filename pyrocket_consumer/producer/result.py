"""Where a message went."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pyrocket_consumer.model import MessageQueue


class SendStatus(Enum):
    """How safely a message is stored. In every case it is stored, and will be delivered.

    Source: SendStatus; the values are response codes.
    """

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where one message is stored.

    `message_id` is the id consumers see (UNIQ_KEY), made by the producer; `offset_message_id` tells the broker and the
    place in its commit log. `queue_offset` of a delayed or transactional message is its place in the broker's own
    queue where it waits, not the one it is delivered at. `transaction_id` is what the broker answers: the message id,
    or None from brokers before 5.0. `attempts` is how often the message was handed to a broker that stored it, or may
    have: with more than 1 there may be a copy, under the same `message_id`. Attempts that were refused do not count.
    """

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str
    status: SendStatus = SendStatus.OK
    transaction_id: str | None = None
    attempts: int = 1
