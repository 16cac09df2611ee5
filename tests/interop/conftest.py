"""Fixtures: a cluster of either kind, and `mqadmin`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedCluster


@pytest.fixture
def either_cluster(kind, real_version, request) -> Iterator[Any]:
    """Return a real cluster of the release under test, or the embedded one that behaves like it, by `kind`."""
    if kind == "real":
        yield request.getfixturevalue("real_cluster")
        return
    with EmbeddedCluster(version=real_version) as cluster:
        yield cluster


@pytest.fixture
def mqadmin(real_cluster, java):
    """Return a function that runs a command of mqadmin against the cluster and returns its output."""
    return lambda *arguments: java.mqadmin(real_cluster.name_server, *arguments)
