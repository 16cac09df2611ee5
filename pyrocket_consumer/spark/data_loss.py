"""The error for messages that should be read and no longer exist."""

from __future__ import annotations

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.spark.ranges import QueueRange


class DataLoss(RocketError):
    """A range of a queue does not exist, or no longer does. With failOnDataLoss=false its text is a warning."""

    def __init__(self, wanted: QueueRange, available: str, reason: str) -> None:
        super().__init__(wanted, available, reason)
        self.wanted, self.available, self.reason = wanted, available, reason

    def __str__(self) -> str:
        begin, end = self.wanted.begin, self.wanted.end
        return (
            f"data loss in queue {self.wanted.queue}: wanted offsets from {begin} "
            f"{f'up to {end}' if end > begin else 'on'}, available {self.available}; {self.reason}. With the option "
            "failOnDataLoss=false a query continues with the remaining messages"
        )
