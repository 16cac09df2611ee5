"""The number of random trials of a test: a twentieth by default, all in `make proof`, many more in a soak."""

from __future__ import annotations

import os
from collections import Counter

crash_points: Counter[str] = Counter()
"""The number of checked crashes of a store, by kind of operation."""


USUAL = "0.05"


def factor() -> str:
    """Return the factor in PYROCKET_TRIALS."""
    return os.environ.get("PYROCKET_TRIALS", USUAL)


def trials(default: int) -> int:
    """Return `default` times PYROCKET_TRIALS, at least one."""
    if (times := float(factor())) < 0:
        raise ValueError("PYROCKET_TRIALS is negative")
    return max(1, int(default * times))
