"""A topic with one queue, and a group."""

from __future__ import annotations

import pytest

from pyrocket_consumer.testing import EmbeddedCluster


@pytest.fixture
def topic(embedded: EmbeddedCluster) -> str:
    embedded.create_topic("orders", queues=1)
    return "orders"


@pytest.fixture
def group() -> str:
    return "app"
