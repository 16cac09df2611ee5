"""The pytest plugin: the fixture `rocketmq_cluster`, a new embedded cluster for each test that uses it.

A mark sets options of `EmbeddedCluster`: `@pytest.mark.rocketmq_cluster(brokers=2, version="4.9.7")`.
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
    """A RocketMQ cluster in this process, new for each test. Pass its `name_server` to consumers and producers."""
    from pyrocket_consumer.testing import EmbeddedCluster  # imported on use, because every pytest run loads plugins

    mark = request.node.get_closest_marker("rocketmq_cluster")
    with EmbeddedCluster(**(mark.kwargs if mark else {})) as cluster:
        yield cluster
