"""How long a busy machine makes programs wait."""

from __future__ import annotations

from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


def stalled_s() -> float:
    """Return for how long something has waited for a processor since the machine started."""
    try:
        return int(_PRESSURE.read_text().split("total=", 1)[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0
