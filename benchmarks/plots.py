"""Draw figures into PNG files. This needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """Return pyplot of matplotlib, for files. End the program if it is missing, so call it before measuring."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_rates(bars: Sequence[tuple[str, str, float]], colours: Mapping[str, str], path: Path) -> None:
    """Draw (case, side, thousand messages per second) as bars. The first word of a side selects its colour."""
    figure, axes = pyplot().subplots(figsize=(9, 0.6 + 0.3 * len(bars)))
    axes.barh(
        [f"{case}: {side}" for case, side, _ in bars],
        [rate for *_, rate in bars],
        color=[colours[side.partition(",")[0]] for _, side, _ in bars],
    )
    axes.invert_yaxis()
    axes.set_xlabel("thousand messages per second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
