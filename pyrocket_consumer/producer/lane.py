"""Lanes keep messages in order: one message of a lane is in flight at a time."""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyrocket_consumer.producer.send_request import LaneKey, SendRequest
from pyrocket_consumer.transport.connection import Connection


@dataclass(slots=True, eq=False)
class UnansweredRequest:
    """A request of a lane without a response. The broker may still store it, so no later message may overtake it."""

    connection: Connection
    received_before: int
    suspect_at: float  # when the connection counts as broken, if it has received nothing until then


@dataclass(slots=True, eq=False)
class Lane:
    """The messages for one queue, or with one sharding key, in their order. Confined to the I/O thread.

    `current` is the message in flight. If it times out while `unanswered` waits for a response, the lane still sends
    nothing else. A waiting message expires when it is older than its timeout and the lane has not moved for as long.
    So a burst may take longer than the timeout of one message. A message with a blocked caller expires at its deadline.
    """

    key: LaneKey
    moved_at: float
    waiting: deque[SendRequest] = field(default_factory=deque)
    current: SendRequest | None = None
    unanswered: UnansweredRequest | None = None
    is_unsure: bool = False  # the result of an earlier message is unknown
    timer: TimerHandle | None = None

    def expiry(self, request: SendRequest) -> float:
        """Return the time at which a message expires if the lane does not move before."""
        if request.is_blocking:
            return request.deadline
        return max(request.deadline, self.moved_at + request.timeout_s)

    def start_next(self, unfinished: set[SendRequest]) -> SendRequest | None:
        """Make the next message the current one, and return it. Return None if no message waits."""
        self.current = None
        while self.waiting and self.current is None:
            request = self.waiting.popleft()
            if request in unfinished:  # otherwise it has expired
                request.deadline = self.expiry(request)
                self.current = request
        return self.current

    def pop_expired(self, now: float) -> Iterator[SendRequest]:
        """Remove the waiting messages that have expired, and yield them."""
        over = [request for request in self.waiting if self.expiry(request) <= now]
        if over:
            gone = set(over)
            self.waiting = deque(request for request in self.waiting if request not in gone)
        yield from over
