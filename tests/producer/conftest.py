"""Producers that are closed at the end, and topics nobody else uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pyrocket_consumer.producer import Producer
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import PATIENT_S

StartProducer = Callable[..., Producer]


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def producing() -> Iterator[StartProducer]:
    """`producing(cluster, **options)` starts a producer."""
    with ExitStack() as open_producers:

        def start(cluster: Any, kind: type[Producer] = Producer, **options: Any) -> Producer:
            patient = {"send_timeout_s": PATIENT_S, "call_timeout_s": PATIENT_S, "connect_timeout_s": PATIENT_S}
            producer = kind(name_server=cluster.name_server, **{**patient, **options})
            return open_producers.enter_context(producer)

        yield start


@pytest.fixture
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """An embedded cluster with a topic `orders`, two queues on each broker; two brokers unless marked otherwise."""
    marker = request.node.get_closest_marker("cluster")
    with EmbeddedCluster(**{"brokers": 2, **(marker.kwargs if marker else {})}) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster
