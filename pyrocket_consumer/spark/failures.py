"""Failures: how long and how often to retry, because a query must survive restarts of servers, and the errors then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.transport.backoff import Backoff

_PAUSES = Backoff(0.1, 2.0)

WARN_AFTER_FAILURES = 3
"""The number of failures in a row after which to log a warning."""


class RetryPolicy:
    """Gives the pause before each retry of one operation; pauses grow.

    It allows retries for `time_s` seconds from the first failure in a row, and at most `retries` of them unless None.
    """

    def __init__(self, time_s: float, retries: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._time_s = time_s
        self._retries = retries
        self._clock = clock
        self._deadline: float | None = None
        self.failures = 0

    def failed(self) -> float | None:
        """Count a failure. Return the seconds to wait before the next try; None if no try is left."""
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self._time_s
        self.failures += 1
        if now >= self._deadline or (self._retries is not None and self.failures > self._retries):
            return None
        return min(_PAUSES.pause_s(self.failures) * (0.75 + random.random() / 4), self._deadline - now)

    def reset(self) -> None:
        """Forget the failures."""
        self._deadline, self.failures = None, 0


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


class ReadFailed(RocketError):
    """A range could not be read. The task fails, and Spark may run it again."""

    def __init__(self, what: str, tries: int, reason: str) -> None:
        super().__init__(what, tries, reason)
        self.what, self.tries, self.reason = what, tries, reason

    def __str__(self) -> str:
        return f"reading {self.what} failed after {self.tries} {'try' if self.tries == 1 else 'tries'}: {self.reason}"


class NotReached(RocketError):
    """A run to the end cannot reach a server or a queue. With failOnUnreachable=false its text is a warning."""

    def __init__(self, what: str, time_s: float) -> None:
        super().__init__(what, time_s)
        self.what, self.time_s = what, time_s

    def __str__(self) -> str:
        return (
            f"not reached, in {self.time_s:g} s (readTimeoutMs): {self.what}; a run to the end would skip messages "
            "there. With the option failOnUnreachable=false it skips them, and the next run reads them"
        )
