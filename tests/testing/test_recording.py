"""`wait_until`: it notices changes of any origin soon, and its error quotes the condition."""

from __future__ import annotations

import threading
import time

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.testing import EmbeddedCluster, RequestCode


def test_a_change_outside_the_cluster_ends_the_wait() -> None:
    happened = threading.Event()
    checks: list[bool] = []

    def check() -> bool:
        checks.append(happened.is_set())
        if len(checks) == 2:
            happened.set()  # outside the cluster
        return checks[-1]

    with EmbeddedCluster(long_poll_tick_s=600, scan_interval_s=600, flush_offsets_s=600) as cluster:
        assert cluster.wait_until(check, timeout_s=10)
    assert checks == [False, False, True]


def test_the_wait_ends_when_a_slow_listener_returns(rocketmq_cluster) -> None:
    rocketmq_cluster.create_topic("orders", queues=1)
    rocketmq_cluster.send("orders", b"first")
    returned_at: list[float] = []

    def listen(message: object) -> None:
        time.sleep(0.5)
        returned_at.append(time.monotonic())

    with PushConsumer("test", name_server=rocketmq_cluster.name_server, consume_from="first") as consumer:
        consumer.subscribe("orders", listen)
        rocketmq_cluster.wait_until(lambda: bool(returned_at))
        assert time.monotonic() - returned_at[0] < 2  # the next commit, which a node would notice, is 5 s away


def test_a_condition_is_checked_once_more_after_the_timeout(rocketmq_cluster) -> None:
    began: list[float] = []

    def slow() -> bool:
        began.append(time.monotonic())
        time.sleep(0.3)
        return len(began) == 2

    assert rocketmq_cluster.wait_until(slow, timeout_s=0.1)
    assert began[1] - began[0] >= 0.3


def test_a_condition_is_checked_once_without_any_timeout(rocketmq_cluster) -> None:
    checks: list[bool] = []
    with pytest.raises(TimeoutError):
        rocketmq_cluster.wait_until(lambda: checks.append(True), timeout_s=0)  # type: ignore[func-returns-value]
    assert len(checks) == 1


def test_the_error_quotes_the_condition(rocketmq_cluster) -> None:
    bodies: list[bytes] = []
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: test_recording\.py:\d+: .*lambda: bodies == \[b"):
        rocketmq_cluster.wait_until(lambda: bodies == [b"first"], timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: .*method-wrapper '__len__'"):
        rocketmq_cluster.wait_until(bodies.__len__, timeout_s=0.1)


def test_a_condition_that_raises_ends_the_wait(rocketmq_cluster) -> None:
    with pytest.raises(IndexError):
        rocketmq_cluster.wait_until(lambda: bool([][0]))


def test_an_invalid_condition_or_timeout_is_refused(rocketmq_cluster) -> None:
    async def later() -> bool:
        return True

    with pytest.raises(ConfigError, match=r"later.* returns a coroutine"):
        rocketmq_cluster.wait_until(later)
    with pytest.raises(ConfigError, match="False is not a condition; give a function"):
        rocketmq_cluster.wait_until(False)  # type: ignore[arg-type]
    for timeout_s in (-1, float("nan"), "5"):
        with pytest.raises(ConfigError, match="timeout_s"):
            rocketmq_cluster.wait_until(lambda: False, timeout_s=timeout_s)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout_s"):
            rocketmq_cluster.broker("broker-a").wait_for(RequestCode.PULL_MESSAGE, timeout_s=timeout_s)  # type: ignore[arg-type]
