"""Plots of the figures, as PNG files. They need matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files. Ends the program if there is none: ask before measuring."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_rates(bars: Sequence[tuple[str, str, float]], colours: Mapping[str, str], path: Path) -> None:
    """Draw (case, side, thousand messages per second) as bars. `colours` go by the side's first word."""
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
