"""The fixtures of the system tests, and short times for every cluster here."""

from __future__ import annotations

import pytest

from tests.system.conftest import broker, embedded, group, module_cluster, no_thread_is_left, topic
from tests.trials import factor

__all__ = ["broker", "embedded", "group", "module_cluster", "no_thread_is_left", "topic"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Faulty members meet the embedded broker only; searches here cannot be made smaller, so a full run has them."""
    items[:] = [item for item in items if not (_is_here(item) and _is_left_out(item))]


def _is_here(item: pytest.Item) -> bool:
    return item.path.parent.name == "hazards"


def _is_left_out(item: pytest.Item) -> bool:
    if item.get_closest_marker("search") and float(factor()) < 1:
        return True
    kind = item.callspec.params.get("cluster_kind", "embedded") if hasattr(item, "callspec") else "embedded"
    return kind != "embedded" and item.get_closest_marker("xfail") is not None
