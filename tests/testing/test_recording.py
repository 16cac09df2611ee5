"""Tests that wait: what they wait for is seen soon, whoever did it, and an error says what it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.testing import EmbeddedCluster, RequestCode
from tests.testing.raw_client import RawClient


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as cluster:
        yield cluster


def test_what_happens_while_the_cluster_rests_is_seen() -> None:
    happened = threading.Event()
    looks: list[bool] = []

    def look() -> bool:
        looks.append(happened.is_set())
        if len(looks) == 2:
            happened.set()  # by nobody whom the cluster knows
        return looks[-1]

    with EmbeddedCluster(long_poll_tick_s=600, scan_interval_s=600, flush_offsets_s=600) as cluster:
        assert cluster.wait_until(look, timeout_s=10)
    assert looks == [False, False, True]


def test_a_slow_listener_is_heard_when_it_returns(cluster: EmbeddedCluster) -> None:
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", b"first")
    returned_at: list[float] = []

    def listen(message: object) -> None:
        time.sleep(0.5)
        returned_at.append(time.monotonic())

    with PushConsumer("test", name_server=cluster.name_server, consume_from="first") as consumer:
        consumer.subscribe("orders", listen)
        cluster.wait_until(lambda: bool(returned_at))
        assert time.monotonic() - returned_at[0] < 2  # the next commit, which a node would notice, is 5 s away


def test_a_condition_is_looked_at_once_more_at_the_end(cluster: EmbeddedCluster) -> None:
    began: list[float] = []

    def slow() -> bool:
        began.append(time.monotonic())
        time.sleep(0.3)
        return len(began) == 2

    assert cluster.wait_until(slow, timeout_s=0.1)
    assert began[1] - began[0] >= 0.3


def test_with_no_time_at_all_it_is_looked_at_once(cluster: EmbeddedCluster) -> None:
    looks: list[bool] = []
    with pytest.raises(TimeoutError):
        cluster.wait_until(lambda: looks.append(True), timeout_s=0)  # type: ignore[func-returns-value]
    assert len(looks) == 1


def test_the_error_says_what_was_waited_for(cluster: EmbeddedCluster) -> None:
    bodies: list[bytes] = []
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: test_recording\.py:\d+: .*lambda: bodies == \[b"):
        cluster.wait_until(lambda: bodies == [b"first"], timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: .*method-wrapper '__len__'"):
        cluster.wait_until(bodies.__len__, timeout_s=0.1)


def test_a_condition_that_raises_ends_the_wait(cluster: EmbeddedCluster) -> None:
    with pytest.raises(IndexError):
        cluster.wait_until(lambda: bool([][0]))


def test_what_cannot_be_waited_for_is_told(cluster: EmbeddedCluster) -> None:
    async def later() -> bool:
        return True

    with pytest.raises(ConfigError, match=r"later.* returns a coroutine"):
        cluster.wait_until(later)
    with pytest.raises(ConfigError, match="False is not a condition; give a function"):
        cluster.wait_until(False)  # type: ignore[arg-type]
    for timeout_s in (-1, float("nan"), "5"):
        with pytest.raises(ConfigError, match="timeout_s"):
            cluster.wait_until(lambda: False, timeout_s=timeout_s)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout_s"):
            cluster.broker("broker-a").wait_for(RequestCode.PULL_MESSAGE, timeout_s=timeout_s)  # type: ignore[arg-type]


def test_a_fault_whose_condition_raises_fails_the_test() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'topic'"), EmbeddedCluster() as cluster:
        cluster.broker("broker-a").on(None, lambda exchange: None, when=lambda request: bool(request.fields["topic"]))
        with RawClient(cluster.broker("broker-a").address) as client:
            client.post(RequestCode.GET_BROKER_CONFIG)
            assert client.wait_closed()
