"""How many random trials a test makes: few by default, as many as PYROCKET_TRIALS says (a factor) in a soak."""

from __future__ import annotations

import os
from collections import Counter

FACTOR = os.environ.get("PYROCKET_TRIALS", "1")

crash_points: Counter[str] = Counter()
"""How often a store was stopped in the middle of something, and what was found then compared: by kind."""


def trials(default: int) -> int:
    """Return `default` times PYROCKET_TRIALS."""
    return int(default * float(FACTOR))
