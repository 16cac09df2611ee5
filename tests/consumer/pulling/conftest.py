"""The topic `orders`."""

from __future__ import annotations

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consumer.orders import Orders


@pytest.fixture
def orders(embedded: EmbeddedCluster) -> Orders:
    return Orders(embedded)
