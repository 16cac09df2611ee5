"""Pauses between tries: how they grow, and when they begin again."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pyrocket_consumer.transport.backoff import Backoff

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("first_s", "longest_s", "options", "pauses"),
    [
        (0.1, 0.5, {}, [0.1, 0.2, 0.4, 0.5, 0.5]),
        (1.0, math.inf, {}, [1, 2, 4, 8, 16]),
        (3.0, 2.0, {}, [2, 2]),
        (0.2, 10.0, {"free": 3}, [0, 0, 0, 0.2, 0.4, 0.8]),
        (1.0, 60.0, {"steady": 3}, [1, 1, 1, 2, 4]),
        (1.0, 3.0, {"free": 1, "steady": 2}, [0, 1, 1, 2, 3, 3]),
        (1.0, 3.0, {"jitter": lambda: 0.0}, [0.5, 1, 1.5]),
        (1.0, 3.0, {"jitter": lambda: 0.5}, [0.75, 1.5, 2.25]),
    ],
    ids=["doubles", "unlimited", "first above longest", "free", "steady", "free then steady", "least", "middle"],
)
def test_pauses_grow(first_s: float, longest_s: float, options: dict[str, Any], pauses: list[float]) -> None:
    backoff = Backoff(first_s, longest_s, **options)
    assert [backoff.pause_s(failures) for failures in range(1, len(pauses) + 1)] == pytest.approx(pauses)
    assert backoff.failures == 0
    assert [backoff.failed() for _ in pauses] == pytest.approx(pauses)
    assert backoff.failures == len(pauses)
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.failed() == pytest.approx(pauses[0])


def test_pauses_differ_between_clients() -> None:
    pauses = {Backoff(1.0, 1.0, jitter=random.Random(seed).random).failed() for seed in range(10)}
    assert len(pauses) == 10 and all(0.5 <= pause_s < 1.0 for pause_s in pauses)


def test_a_free_try_takes_nothing_from_the_random_numbers() -> None:
    def jitter() -> float:
        raise AssertionError

    assert Backoff(1.0, 2.0, free=1, jitter=jitter).failed() == 0


def test_many_failures_keep_the_longest_pause() -> None:
    backoff = Backoff(0.1, 5.0)
    assert {backoff.failed() for _ in range(3000)} >= {0.1, 5.0}
    assert backoff.failed() == 5.0


def test_the_end_of_the_pause_is_known() -> None:
    backoff = Backoff(1.0, 8.0)
    assert backoff.until < -1e300
    backoff.failed(100.0)
    assert backoff.until == 101
    backoff.failed(101.5)
    assert backoff.until == 103.5
    backoff.reset()
    assert backoff.until < -1e300


@pytest.mark.parametrize(("later_s", "pause_s"), [(0, 2), (29.9, 2), (30, 1), (100, 1)])
def test_a_late_failure_begins_a_new_series(later_s: float, pause_s: float) -> None:
    backoff = Backoff(1.0, 8.0, reset_after_s=30.0)
    backoff.failed(10.0)  # its pause ends at 11
    assert backoff.failed(11.0 + later_s) == pause_s
