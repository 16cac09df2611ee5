"""Report how many crashes a soak test of the offset store has simulated."""

from __future__ import annotations

import pytest

from tests.consumer.conftest import broker, embedded, group, no_thread_is_left, topic
from tests.trials import crash_points, factor

__all__ = ["broker", "embedded", "group", "no_thread_is_left", "topic"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if float(factor()) > 1:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(crash_points.items()))
        terminalreporter.write_line(f"crash points of the offset store: {crash_points.total()} ({kinds})")
