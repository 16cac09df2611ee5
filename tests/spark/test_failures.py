"""The pauses of retries, and their limits."""

from __future__ import annotations

import pytest

from pyrocket_consumer.spark.failures import RetryPolicy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses(retry_policy: RetryPolicy, clock: Clock) -> list[float]:
    found = []
    while (pause_s := retry_policy.failed()) is not None:
        found.append(pause_s)
        clock.now += pause_s
    return found


def test_pauses_grow_and_fill_the_time(clock):
    found = pauses(RetryPolicy(20, None, clock), clock)
    assert 0.05 < found[0] < found[2] < found[4] <= 2
    assert abs(sum(found) - 20) < 0.001


def test_the_time_begins_with_the_first_failure(clock):
    retry_policy = RetryPolicy(1, None, clock)
    clock.now += 50
    assert retry_policy.failed() is not None
    clock.now += 1
    assert retry_policy.failed() is None


def test_reset_makes_all_retries_available_again(clock):
    retry_policy = RetryPolicy(100, 3, clock)
    assert len(pauses(retry_policy, clock)) == 3
    retry_policy.reset()
    assert retry_policy.failures == 0
    assert len(pauses(retry_policy, clock)) == 3
