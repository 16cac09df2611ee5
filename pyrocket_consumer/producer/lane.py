"""Messages that must keep their order: one of them is under way at a time."""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyrocket_consumer.producer.send_request import LaneKey, SendRequest
from pyrocket_consumer.transport.connection import Connection


@dataclass(slots=True, eq=False)
class UnansweredRequest:
    """A request of a lane that has no answer: as long as it may be stored yet, nothing may overtake it."""

    connection: Connection
    received_before: int
    suspect_at: float  # when a connection that has said nothing since is no longer believed in


@dataclass(slots=True, eq=False)
class Lane:
    """The messages for one queue, or with one sharding key, in their order. Confined to the I/O thread.

    `current` is the one under way; when its time is over while `unanswered` waits for an answer, the lane stands still
    nevertheless. A message that waits is given up only when it is older than its timeout and the lane has not
    `moved` for as long, so that a burst may take longer than the timeout of one; one that a thread waits for ends
    with its own deadline.
    """

    key: LaneKey
    moved_at: float
    waiting: deque[SendRequest] = field(default_factory=deque)
    current: SendRequest | None = None
    unanswered: UnansweredRequest | None = None
    is_unsure: bool = False  # what became of a message before is not known
    timer: TimerHandle | None = None

    def expiry(self, request: SendRequest) -> float:
        """Return when a message is given up, if the lane does not move any more."""
        if request.is_blocking:
            return request.deadline
        return max(request.deadline, self.moved_at + request.timeout_s)

    def start_next(self, unfinished: set[SendRequest]) -> SendRequest | None:
        """Make the next message the current one; None if there is none."""
        self.current = None
        while self.waiting and self.current is None:
            request = self.waiting.popleft()
            if request in unfinished:  # else its time is over
                request.deadline = self.expiry(request)
                self.current = request
        return self.current

    def pop_expired(self, now: float) -> Iterator[SendRequest]:
        """Take out, one after the other, the waiting messages whose time is over."""
        over = [request for request in self.waiting if self.expiry(request) <= now]
        if over:
            gone = set(over)
            self.waiting = deque(request for request in self.waiting if request not in gone)
        yield from over
