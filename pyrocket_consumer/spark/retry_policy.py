"""How long and how often to retry, because a query must survive restarts of brokers and name servers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

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
