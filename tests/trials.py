"""How many random trials a test makes: a twentieth by default, all in `make proof`, many more in a soak."""

from __future__ import annotations

import os
from collections import Counter

crash_points: Counter[str] = Counter()
"""How often a store was stopped in the middle of something, and what was found then compared: by kind."""


def factor() -> str:
    """Return what PYROCKET_TRIALS says: a factor."""
    return os.environ.get("PYROCKET_TRIALS", "0.05")


def trials(default: int) -> int:
    """Return `default` times PYROCKET_TRIALS, at least one."""
    if (times := float(factor())) < 0:
        raise ValueError("PYROCKET_TRIALS is negative")
    return max(1, int(default * times))
