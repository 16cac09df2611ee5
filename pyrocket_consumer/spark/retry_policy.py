"""How long what failed is tried again: brokers and name servers restart, and a query is to outlive that."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

WARN_AFTER_FAILURES = 3
"""After so many failures in a row it is no trifle."""


class RetryPolicy:
    """Says after each failure of one thing how long to wait before the next try, with pauses that grow.

    It lasts for `time_s` seconds from the first failure in a row, and for `retries` failures, if that is a number.
    """

    def __init__(self, time_s: float, retries: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._time_s = time_s
        self._retries = retries
        self._clock = clock
        self._ends_at: float | None = None
        self.failures = 0

    def failed(self) -> float | None:
        """Return how long to wait before the next try; None if there is to be none."""
        now = self._clock()
        if self._ends_at is None:
            self._ends_at = now + self._time_s
        self.failures += 1
        if now >= self._ends_at or (self._retries is not None and self.failures > self._retries):
            return None
        pause_s: float = min(_FIRST_PAUSE_S * 2 ** min(self.failures - 1, 10), _LONGEST_PAUSE_S)
        return min(pause_s * (0.75 + random.random() / 4), self._ends_at - now)

    def reset(self) -> None:
        """Forget the failures."""
        self._ends_at, self.failures = None, 0
