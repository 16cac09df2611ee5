"""Producers that are closed at the end, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pyrocket_consumer.producer import Producer
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import PATIENT_S

StartProducer = Callable[..., Producer]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


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


@pytest.fixture
def together() -> Callable[..., None]:
    """`together(work, 8)` does it on that many threads at once, and waits for them."""

    def run(work: Callable[[], object], count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    return run
