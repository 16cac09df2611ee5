"""How many random trials a test makes: few by default, as many as PYROCKET_TRIALS says (a factor) in a soak."""

from __future__ import annotations

import os


def trials(default: int) -> int:
    """Return `default` times PYROCKET_TRIALS."""
    return int(default * float(os.environ.get("PYROCKET_TRIALS", "1")))
