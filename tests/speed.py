"""Limits on time that mean the same on fast, slow and busy machines.

The same work takes up to twice the CPU time when the machine's other processors are busy, or on an older machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAMPLES = 9
USUAL_S = 0.008
"""The CPU time of one sample at the usual speed, that of a quiet machine with two cores."""

MAX_SLOWNESS = 3.0
"""A limit must still find quadratic work on a machine that is very slow."""


def _sample_s() -> float:
    began = time.thread_time()
    table: dict[str, int] = {}
    for number in range(40_000):
        name = f"{number % 1000}"
        table[name] = table.get(name, 0) + number
    return time.thread_time() - began


def slowness() -> float:
    """Return how many times slower than usual the machine is now: at least 1, at most `MAX_SLOWNESS`."""
    return min(max(1.0, max(_sample_s() for _ in range(SAMPLES)) / USUAL_S), MAX_SLOWNESS)


@contextmanager
def cpu_at_most(limit_s: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Fail a block that takes more CPU time than `limit_s` at the usual speed."""
    began = clock()
    yield
    taken_s = clock() - began
    if taken_s > limit_s:
        usual_s = taken_s / slowness()
        assert usual_s <= limit_s, f"took {taken_s:.2f} s of CPU time, {usual_s:.2f} s at the usual speed"


def quick(limit_s: float, measured: Callable[[], float]) -> bool:
    """Return whether the best of three attempts takes less than `limit_s` at the usual speed."""
    taken_s = []
    for _ in range(3):
        taken_s.append(measured())
        if taken_s[-1] < limit_s:
            return True
    return min(taken_s) / slowness() < limit_s
