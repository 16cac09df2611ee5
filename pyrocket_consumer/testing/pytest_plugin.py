"""The pytest plugin: the fixture `rocketmq_cluster`, a fresh embedded cluster for each test that takes it.

Options of `EmbeddedCluster` come from a mark: `@pytest.mark.rocketmq_cluster(brokers=2, version="4.9.7")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyrocket_consumer.testing import EmbeddedCluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rocketmq_cluster(**options): options of the EmbeddedCluster behind the fixture rocketmq_cluster"
    )


@pytest.fixture
def rocketmq_cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """A RocketMQ cluster in this process: give its `name_server` to consumers and producers. Fresh for each test."""
    from pyrocket_consumer.testing import EmbeddedCluster  # not before it is used: plugins load in every pytest run

    mark = request.node.get_closest_marker("rocketmq_cluster")
    with EmbeddedCluster(**(mark.kwargs if mark else {})) as cluster:
        yield cluster
