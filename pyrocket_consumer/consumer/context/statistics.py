"""How fast a member pulls and consumes, for tools: rates over the last minute, from counters that never decrease."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyrocket_consumer.protocol.bodies import TopicStatus

SAMPLE_EVERY_S = 10.0
MINUTE = 6
HOUR = 360
"""The number of samples in a minute and in an hour."""


@dataclass(slots=True)
class Totals:
    """Counters of a topic's messages since the start.

    `pulls` counts pull responses with messages, and `failed` counts attempts whose listener failed. `finished` includes
    the `sent_back` messages, which were not consumed but sent back or given up.
    """

    pulls: int = 0
    pull_time_s: float = 0.0
    pulled: int = 0
    finished: int = 0
    failed: int = 0
    sent_back: int = 0

    def add(self, other: Totals) -> None:
        """Add the counts of `other`."""
        self.pulls += other.pulls
        self.pull_time_s += other.pull_time_s
        self.pulled += other.pulled
        self.finished += other.finished
        self.failed += other.failed
        self.sent_back += other.sent_back


_NOTHING = Totals()


class Counts:
    """Counters by topic: those of queues that have ended, and those that are not kept by queue."""

    def __init__(self) -> None:
        self._past: dict[str, Totals] = {}

    def add(self, topic: str, totals: Totals) -> None:
        """Add counts for messages of `topic`."""
        self._past.setdefault(topic, Totals()).add(totals)

    def failed(self, topic: str, count: int) -> None:
        """Count attempts whose listener failed."""
        self.add(topic, Totals(failed=count))

    def sent_back(self, topic: str, count: int) -> None:
        """Count messages that were sent back, or given up."""
        self.add(topic, Totals(sent_back=count))

    def past(self) -> dict[str, Totals]:
        """Return a copy of the counters by topic."""
        return {topic: replace(totals) for topic, totals in self._past.items()}


class Statistics:
    """Samples of all totals: one every 10 s, for an hour. Source: StatsItem. Confined to the I/O thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        totals: Callable[[], dict[str, Totals]],
        listener_times: Callable[[], dict[str, float]],
    ) -> None:
        self._clock = clock
        self._totals = totals
        self._listener_times = listener_times
        self._samples: deque[tuple[float, dict[str, Totals]]] = deque([(clock(), {})], HOUR + 1)

    async def sample(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._samples.append((self._clock(), self._totals()))

    def status(self) -> dict[str, TopicStatus]:
        """Return the figures for tools by topic: rates of the last minute, and failures of the last hour."""
        since, minute_ago = self._samples[max(0, len(self._samples) - MINUTE)]
        _, hour_ago = self._samples[0]
        span, listener_times = max(self._clock() - since, 0.001), self._listener_times()

        def status_of(topic: str, now: Totals) -> TopicStatus:
            before = minute_ago.get(topic, _NOTHING)
            pulls = now.pulls - before.pulls
            consumed = (now.finished - now.sent_back) - (before.finished - before.sent_back)
            return TopicStatus(
                pull_rt=1000 * (now.pull_time_s - before.pull_time_s) / pulls if pulls else 0.0,
                pull_tps=(now.pulled - before.pulled) / span,
                consume_rt=1000 * listener_times.get(topic, 0.0),
                consume_ok_tps=consumed / span,
                consume_failed_tps=(now.failed - before.failed) / span,
                consume_failed_msgs=now.failed - hour_ago.get(topic, _NOTHING).failed,
            )

        return {topic: status_of(topic, now) for topic, now in self._totals().items()}
