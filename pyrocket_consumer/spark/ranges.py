"""A part of a queue to read, which the planner assigns to tasks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pyrocket_consumer.model import MessageQueue

in_order = attrgetter("topic", "broker_name", "queue_id")
"""The key to sort queues by. It gives their natural order, and is much faster for thousands of queues."""


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of `queue` from offset `begin` up to, but not including, `end`."""

    queue: MessageQueue
    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def __str__(self) -> str:
        return f"{self.queue}[{self.begin}, {self.end})"
