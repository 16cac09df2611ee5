"""A cluster of one broker, and raw clients connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyrocket_consumer.testing import EmbeddedBroker
from tests.testing.brokers import VERSIONS, broker_with_topic
from tests.testing.raw_client import RawClient


@pytest.fixture
def version() -> str:
    """Return the newest release; tests about other releases replace this fixture."""
    return VERSIONS[-1]


@pytest.fixture
def broker(request: pytest.FixtureRequest, version: str) -> Iterator[EmbeddedBroker]:
    """A broker with the topic `T`; `@pytest.mark.cluster(**options)` sets options of its cluster."""
    marker = request.node.get_closest_marker("cluster")
    with broker_with_topic(**{"version": version, **(marker.kwargs if marker else {})}) as broker:
        yield broker


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[RawClient]:
    with RawClient(broker.address) as client:
        yield client


@pytest.fixture
def other(broker: EmbeddedBroker) -> Iterator[RawClient]:
    """Another connection with the same client id."""
    with RawClient(broker.address) as client:
        yield client


@pytest.fixture
def second(broker: EmbeddedBroker) -> Iterator[RawClient]:
    with RawClient(broker.address, "c2") as client:
        yield client
