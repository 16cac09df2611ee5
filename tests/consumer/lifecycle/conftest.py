"""A topic with one queue, and a group; tests that are coroutines run on a loop of their own."""

from __future__ import annotations

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consumer.coroutines import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]


@pytest.fixture
def topic(embedded: EmbeddedCluster) -> str:
    embedded.create_topic("orders", queues=1)
    return "orders"


@pytest.fixture
def group() -> str:
    return "app"
