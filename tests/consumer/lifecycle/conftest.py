"""The topic `orders` with one queue, and programs with a consumer in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyrocket_consumer import AsyncPushConsumer
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consumer.orders import GROUP, TOPIC, Orders
from tests.consuming import until


class LifecycleOrders(Orders):
    """Orders whose consumers start and close."""

    async def begun(self, listener: Callable[..., Any], **options: Any) -> AsyncPushConsumer:
        """Start a consumer on the running loop."""
        consumer = AsyncPushConsumer(GROUP, **{"name_server": self.cluster.name_server, **options})
        await consumer.subscribe(TOPIC, listener)
        await consumer.start()
        return consumer

    @property
    def members(self) -> list[str]:
        """The members of the group."""
        return self.cluster.members(GROUP)

    def wait_left(self) -> None:
        """Wait until the group has no member, because all have left or their connections have ended."""
        until(lambda: self.members == [], "all have left")


@pytest.fixture
def orders(embedded: EmbeddedCluster) -> LifecycleOrders:
    return LifecycleOrders(embedded)


@pytest.fixture
def topic(embedded: EmbeddedCluster) -> str:
    embedded.create_topic(TOPIC, queues=1)
    return TOPIC


@pytest.fixture
def group() -> str:
    return GROUP
