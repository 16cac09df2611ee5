"""Clients of an embedded cluster, which are closed at the end, and hooks that record their calls."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ConnectError, RequestTimeout
from pyrocket_consumer.model import TopicRoute
from pyrocket_consumer.protocol.bodies import ConsumerData
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from tests.consuming import LONG_TIMEOUT_S, WAIT_S


class RecordedCalls:
    """A hook that records its calls, in order."""

    def __init__(self) -> None:
        self._facts: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def __call__(self, *facts: Any) -> None:
        self._facts.put(facts)

    def next(self, timeout_s: float = WAIT_S) -> tuple[Any, ...]:
        """Return the arguments of the next call; fail without one within the time."""
        return self._facts.get(timeout=timeout_s)

    @property
    def is_empty(self) -> bool:
        """Whether all calls were read."""
        return self._facts.empty()


Connect = Callable[..., Cluster]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(embedded, **options)` starts a client. A failure of its background tasks fails the test."""
    clients: list[Cluster] = []
    failures: list[BaseException] = []

    def start(where: EmbeddedCluster | str, **options: Any) -> Cluster:
        address = where if isinstance(where, str) else where.name_server
        config = ClientConfig(
            name_server=address, **{"call_timeout_s": LONG_TIMEOUT_S, "connect_timeout_s": LONG_TIMEOUT_S, **options}
        )
        for _ in range(10):
            client = Cluster(config, make_client_id(config))
            client.events.client_failed = failures.append
            clients.append(client)
            try:
                client.start()
            except (ConnectError, RequestTimeout):  # a busy machine may miss a short deadline
                if config.call_timeout_s >= LONG_TIMEOUT_S:
                    raise
            else:
                return client
        raise AssertionError("no attempt to start was answered in time")

    yield start
    for client in clients:
        client.close()
    assert failures == []


@pytest.fixture
def cluster_of() -> Iterator[Callable[..., EmbeddedCluster]]:
    """`cluster_of(**options)` starts a cluster with a topic `orders` of four queues. Request it before `connect`."""
    with ExitStack() as clusters:

        def start(**options: Any) -> EmbeddedCluster:
            cluster = clusters.enter_context(EmbeddedCluster(**options))
            cluster.create_topic("orders", queues=4)
            return cluster

        yield start


@pytest.fixture
def embedded(cluster_of: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    """One broker."""
    return cluster_of()


@pytest.fixture
def broker(embedded: EmbeddedCluster) -> EmbeddedBroker:
    return embedded.broker("broker-a")


@pytest.fixture
def client(embedded: EmbeddedCluster, connect: Connect) -> Cluster:
    return connect(embedded)


def join(client: Cluster, *, consumer: str = "", producer: str = "", topic: str = "orders") -> int:
    """Make `client` a member that knows the route. Return the number of brokers that accepted its heartbeat."""

    async def work() -> int:
        if consumer:
            client.membership.add_consumer(consumer, consumer_of(consumer, topic))
        if producer:
            client.membership.add_producer(producer)
        await client.routes.get(topic)
        return await client.membership.heartbeat()

    return client.run(work(), 30)


def find_route(client: Cluster, topic: str = "orders", *, refresh: bool = False) -> TopicRoute:
    return client.run(client.routes.get(topic, refresh=refresh), 30)


def consumer_of(group: str, topic: str = "orders") -> Callable[[], ConsumerData]:
    """Return the data of a member of `group` for its heartbeats."""
    return lambda: ConsumerData(group, subscriptions=(parse_subscription(topic, "*", 1),))
