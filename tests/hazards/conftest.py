"""The fixtures of the system tests, and short times for every cluster here."""

from __future__ import annotations

import pytest

from tests.system.conftest import broker, embedded, group, module_cluster, no_thread_is_left, topic

__all__ = ["broker", "embedded", "group", "module_cluster", "no_thread_is_left", "topic"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Faulty members meet the embedded broker only."""
    items[:] = [item for item in items if not (_is_on_a_release(item) and item.get_closest_marker("xfail"))]


def _is_on_a_release(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("cluster_kind", "embedded") != "embedded"
