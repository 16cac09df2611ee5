"""Tells how many crashes a soak of the offset store has seen."""

from __future__ import annotations

import pytest

from tests.offsets.trials import FACTOR, crash_points


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FACTOR != "1":
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(crash_points.items()))
        terminalreporter.write_line(f"crash points of the offset store: {crash_points.total()} ({kinds})")
