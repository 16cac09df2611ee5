"""The mark `hazard`, which is the source of docs/hazards.md."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hazard(*numbers): shows what we do about hazards of docs/hazards.md: 'H01'")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip faulty members on real brokers, because the tests on the embedded broker cover them."""
    left_out = [item for item in items if item.get_closest_marker("hazard") and _is_faulty_on_a_release(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_faulty_on_a_release(item: pytest.Item) -> bool:
    is_on_each = hasattr(item, "callspec") and "cluster_kind" in item.callspec.params
    return is_on_each and item.get_closest_marker("xfail") is not None and item.get_closest_marker("real") is not None
