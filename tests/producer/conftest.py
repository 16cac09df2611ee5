"""A cluster with a topic `orders`, and producers that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pyrocket_consumer.producer import Producer
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from tests.consuming import LONG_TIMEOUT_S

StartProducer = Callable[..., Producer]


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def producing() -> Iterator[StartProducer]:
    """`producing(cluster, **options)` starts a producer."""
    with ExitStack() as open_producers:

        def start(cluster: Any, kind: type[Producer] = Producer, **options: Any) -> Producer:
            timeouts = {
                "send_timeout_s": LONG_TIMEOUT_S,
                "call_timeout_s": LONG_TIMEOUT_S,
                "connect_timeout_s": LONG_TIMEOUT_S,
            }
            producer = kind(name_server=cluster.name_server, **{**timeouts, **options})
            return open_producers.enter_context(producer)

        yield start


@pytest.fixture
def embedded(embedded: EmbeddedCluster) -> EmbeddedCluster:
    embedded.create_topic("orders", queues=2)
    return embedded


@pytest.fixture
def producer(embedded: EmbeddedCluster, producing: StartProducer) -> Producer:
    return producing(embedded)


@pytest.fixture
def gate(embedded: EmbeddedCluster) -> Iterator[Gate]:
    """Sends wait here until it opens."""
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, gate, times=None)
    yield gate
    gate.open()
