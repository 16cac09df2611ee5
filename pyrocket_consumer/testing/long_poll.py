"""Pulls that wait for messages. Source: PullRequestHoldService, NotifyMessageArrivingListener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.clock import Clock, Timer
from pyrocket_consumer.testing.connection import Connection

Matches = Callable[[int], bool]
"""Whether the pull's subscription matches a message with this tag hash."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """A pull that found no message. It waits for a message at `offset`, or for the first tick after `until_s`."""

    request: RemotingCommand
    connection: Connection
    offset: int
    until_s: float
    matches: Matches | None


class LongPoll:
    """Holds pulls until a matching message arrives or a tick finds them due; `wake` evaluates one again.

    A message wakes every held pull of its queue that matches it. If no pull matches, the next tick notices that the
    queue has grown, and evaluates the pulls again. The broker sends empty responses at ticks only.
    """

    def __init__(
        self,
        clock: Clock,
        tick_s: Callable[[], float],
        max_offset: Callable[[str, int], int],
        wake: Callable[[HeldPull], None],
    ) -> None:
        self._clock = clock
        self._max_offset = max_offset
        self._wake = wake
        self._held: dict[tuple[str, int], list[HeldPull]] = {}
        self._timer = Timer(clock, tick_s, self.tick)

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        """Drop the held pulls without a response."""
        self._timer.stop()
        self._held.clear()

    def hold(self, topic: str, queue_id: int, pull: HeldPull) -> None:
        self._held.setdefault((topic, queue_id), []).append(pull)

    def held(self, topic: str | None = None) -> int:
        """Return the number of held pulls of one topic, or of all."""
        return sum(len(pulls) for key, pulls in self._held.items() if topic in (None, key[0]))

    def arrived(self, topic: str, queue_id: int, tag_code: int) -> None:
        """Wake the pulls that match the message just stored."""
        pulls = self._held.get((topic, queue_id))
        if not pulls:
            return
        woken = [pull for pull in pulls if pull.matches is None or pull.matches(tag_code)]
        if woken:
            self._keep((topic, queue_id), [pull for pull in pulls if pull not in woken])
            for pull in woken:
                self._wake(pull)

    def tick(self) -> None:
        """Evaluate the pulls again that are due or have a message at their offset."""
        now = self._clock.monotonic_s()
        for key, pulls in list(self._held.items()):
            max_offset = self._max_offset(*key)
            due = [pull for pull in pulls if max_offset > pull.offset or now >= pull.until_s]
            if due:
                self._keep(key, [pull for pull in pulls if pull not in due])
                for pull in due:
                    self._wake(pull)

    def lost(self, connection: Connection) -> None:
        """Drop the pulls of a connection that ended."""
        for key, pulls in list(self._held.items()):
            if any(pull.connection is connection for pull in pulls):
                self._keep(key, [pull for pull in pulls if pull.connection is not connection])

    def _keep(self, key: tuple[str, int], pulls: list[HeldPull]) -> None:
        if pulls:
            self._held[key] = pulls
        else:
            self._held.pop(key, None)
