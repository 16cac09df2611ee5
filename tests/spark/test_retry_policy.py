"""How long what failed is tried again."""

from __future__ import annotations

import pytest

from pyrocket_consumer.spark.retry_policy import Patience


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses(patience: Patience, clock: Clock) -> list[float]:
    found = []
    while (pause_s := patience.failed()) is not None:
        found.append(pause_s)
        clock.now += pause_s
    return found


def test_pauses_grow_and_fill_the_time(clock):
    found = pauses(Patience(20, None, clock), clock)
    assert 0.05 < found[0] < found[2] < found[4] <= 2
    assert abs(sum(found) - 20) < 0.001


def test_the_time_begins_with_the_first_failure(clock):
    patience = Patience(1, None, clock)
    clock.now += 50
    assert patience.failed() is not None
    clock.now += 1
    assert patience.failed() is None


def test_tries_may_be_fewer_and_are_counted_anew(clock):
    patience = Patience(100, 3, clock)
    assert len(pauses(patience, clock)) == 3
    patience.renew()
    assert patience.failures == 0
    assert len(pauses(patience, clock)) == 3
