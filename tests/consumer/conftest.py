"""An embedded cluster and names for each test of consumers, and a check that no thread is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from tests.consumer.orders import Orders
from tests.consuming import WAIT_S

OURS = "pyrocket-"  # the prefix of the names of this library's threads


@pytest.fixture
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """A cluster with the options in the module's CLUSTER. Retries come after a hundredth of the usual time."""
    options: dict[str, Any] = {"delay_scale": 0.01, "long_poll_tick_s": 0.1, **getattr(request.module, "CLUSTER", {})}
    with EmbeddedCluster(**options) as cluster:
        yield cluster


@pytest.fixture
def broker(embedded: EmbeddedCluster) -> EmbeddedBroker:
    return embedded.broker("broker-a")


@pytest.fixture
def orders(embedded: EmbeddedCluster) -> Orders:
    return Orders(embedded)


@pytest.fixture
def topic(names: Any) -> str:
    return str(names.topic())


@pytest.fixture
def group(names: Any) -> str:
    return str(names.group())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test did to it, a closed consumer's threads end."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith(OURS) and thread not in before]
    deadline = time.monotonic() + WAIT_S
    for thread in left:
        thread.join(max(0, deadline - time.monotonic()))
    assert not [thread for thread in left if thread.is_alive()]
