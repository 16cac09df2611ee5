"""Messages that must keep their order: one of them is under way at a time."""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyrocket_consumer.producer.send_request import LaneKey, Sending
from pyrocket_consumer.transport.connection import Connection


@dataclass(slots=True, eq=False)
class Held:
    """A request of a lane that has no answer: as long as it may be stored yet, nothing may overtake it."""

    connection: Connection
    heard_bytes: int
    suspect_at: float  # when a connection that has said nothing since is no longer believed in


@dataclass(slots=True, eq=False)
class Lane:
    """The messages for one queue, or with one sharding key, in their order. Confined to the I/O thread.

    `current` is the one under way; when its time is over while `held` waits for an answer, the lane stands still
    nevertheless. A message that waits is given up only when it is older than its timeout and the lane has not
    `moved` for as long, so that a burst may take longer than the timeout of one; one that a thread waits for ends
    with its own deadline.
    """

    key: LaneKey
    moved_at: float
    waiting: deque[Sending] = field(default_factory=deque)
    current: Sending | None = None
    held: Held | None = None
    is_unsure: bool = False  # what became of a message before is not known
    timer: TimerHandle | None = None

    def expiry(self, sending: Sending) -> float:
        """Return when a message is given up, if the lane does not move any more."""
        if sending.is_waited_for:
            return sending.deadline
        return max(sending.deadline, self.moved_at + sending.timeout_s)

    def next(self, unfinished: set[Sending]) -> Sending | None:
        """Make the next message the current one; None if there is none."""
        self.current = None
        while self.waiting and self.current is None:
            sending = self.waiting.popleft()
            if sending in unfinished:  # else its time is over
                sending.deadline = self.expiry(sending)
                self.current = sending
        return self.current

    def expired(self, now: float) -> Iterator[Sending]:
        """Take out, one after the other, the waiting messages whose time is over."""
        over = [sending for sending in self.waiting if self.expiry(sending) <= now]
        if over:
            gone = set(over)
            self.waiting = deque(sending for sending in self.waiting if sending not in gone)
        yield from over
