"""A part of a queue to read: what the planner hands to tasks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pyrocket_consumer.model import MessageQueue

in_order = attrgetter("topic", "broker_name", "queue_id")
"""The key to sort queues by: in the order they have by themselves, and much quicker where there are thousands."""


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of `queue` from offset `begin` up to and without `end`."""

    queue: MessageQueue
    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def __str__(self) -> str:
        return f"{self.queue}[{self.begin}, {self.end})"
