"""The costs of tests: the marks `unit`, `live`, `real`, `search` and `slow`, virtual time, and limits.

A test without a mark is a unit test: it runs in virtual time, and anything that leaves it (a socket, a process) fails.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.speed import slowness
from tests.trials import USUAL, factor, trials
from tests.virtual import virtual_time
from tests.virtual.scheduler import Scheduler

COSTS = {
    "unit": "pure, or in virtual time: no socket, no process, no waiting",
    "live": "real threads, sockets, processes, signals or forks",
    "real": "real brokers, database servers or Spark",
    "search": "looks for mistakes at random; PYROCKET_TRIALS says how long",
}
LIMIT_S = float(os.environ.get("PYROCKET_LIMIT_S", "2"))
"""The most time of a test without `slow`, at the usual speed: CPU time, or waiting time while the machine was idle.

More random trials than usual may take longer.
"""

SEARCH_S = 300
"""A random search with the usual trials hangs if it takes longer; one with all trials may take ten times as long."""

FEWEST = 25
"""The fewest examples of a test with hypothesis."""

_PRESSURE = Path("/proc/pressure/cpu")
_taken = pytest.StashKey[float]()
_world = pytest.StashKey[Scheduler]()
_wrong = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-time", action="store_true", help="run unit tests with real threads and sockets, too")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in COSTS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    slow = f"slow(reason, proof=False): takes more than {LIMIT_S:g} s, and why; with proof=True only in `make proof`"
    config.addinivalue_line("markers", slow)
    config.addinivalue_line("markers", "virtual: takes hours, or means nothing, with --real-time, which leaves it out")
    try:
        _seed()
    except ValueError:
        raise pytest.UsageError(f"PYROCKET_SEED={os.environ['PYROCKET_SEED']}: give an integer") from None
    try:
        trials(1)
    except (ValueError, OverflowError):
        raise pytest.UsageError(f"PYROCKET_TRIALS={factor()}: give a factor, for example 0.05 or 1") from None


def _seed() -> int:
    return int(os.environ.get("PYROCKET_SEED", "0"))


def cost_of(item: pytest.Item) -> str:
    """Return the cost mark of a test, the most expensive one of several."""
    return next((cost for cost in ("search", "real", "live") if item.get_closest_marker(cost)), "unit")


def is_virtual(item: pytest.Item) -> bool:
    """Return whether a test runs in virtual time."""
    return cost_of(item) == "unit" and not item.config.getoption("--real-time")


@pytest.hookimpl(tryfirst=True)  # -m uses the marks that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        cost = cost_of(item)
        if cost == "unit":
            item.add_marker("unit")
        elif item.get_closest_marker("unit") is not None:
            item.stash[_wrong] = f"marked unit and {cost}; keep one"
        if cost == "search":
            item.add_marker(pytest.mark.timeout(SEARCH_S * max(1.0, 10 * float(factor()))))
        if any(not mark.args for mark in item.iter_markers("slow")):
            item.stash[_wrong] = 'marked slow without a reason; say why: slow("starts a server")'
    if deselected := [item for item in items if _is_deselected(item)]:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    if (hypothesis := sys.modules.get("hypothesis")) is not None:  # its import takes longer than most files of tests
        settings = hypothesis.settings
        settings.register_profile("trials", max_examples=max(FEWEST, trials(settings.default.max_examples)))
        settings.load_profile("trials")
        hypothesis.strategies.text().validate()  # in a new checkout the first text takes 2 s; no test should pay for it


def _is_deselected(item: pytest.Item) -> bool:
    if item.config.getoption("--real-time") and item.get_closest_marker("virtual") is not None:
        return True
    return float(factor()) < 1 and any(mark.kwargs.get("proof") for mark in item.iter_markers("slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if wrong := item.stash.get(_wrong, ""):  # a worker's usage error would be an internal error
        pytest.fail(wrong, pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a unit test with its fixtures in a world of its own, whose seed is the name of the test."""
    if not is_virtual(item):
        return (yield)
    seed = _seed() ^ zlib.crc32(item.nodeid.encode())
    with virtual_time(seed) as item.stash[_world]:
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)  # inside the capture of output and log
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """End a test's own fixtures in its world, and shared fixtures outside, where they began."""
    if (world := item.stash.get(_world, None)) is not None:
        try:
            item.session._setupstate.teardown_exact(item.parent)
        finally:
            world.leave()
    return (yield)


def _stalled_s() -> float:
    """Return how long processes have waited for a processor since the machine started."""
    try:
        return int(_PRESSURE.read_text().split("total=", 1)[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


def _real_wall() -> float:
    """Return a clock that virtual time does not replace."""
    return os.times().elapsed


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    wall_s, cpu_s, stalls_s = _real_wall(), time.process_time(), _stalled_s()
    try:
        result = yield
        if (world := item.stash.get(_world, None)) is not None and world.violations:
            pytest.fail(f"mark this test live; it left virtual time: {', '.join(set(world.violations))}")
        return result
    finally:
        waited_s = _real_wall() - wall_s - (_stalled_s() - stalls_s)
        item.stash[_taken] = max(time.process_time() - cpu_s, waited_s)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    taken_s = item.stash.get(_taken, 0.0)
    waits = cost_of(item) in ("real", "search") or (cost_of(item) == "unit" and item.config.getoption("--real-time"))
    may_be_slow = waits or item.get_closest_marker("slow") is not None or float(factor()) > float(USUAL)
    is_long = call.when == "call" and report.passed and taken_s > LIMIT_S and not may_be_slow
    if is_long and (usual_s := taken_s / slowness()) > LIMIT_S:
        report.outcome = "failed"
        text = "{:.1f} s, or {:.1f} s at the usual speed, more than {:g} s: make it quicker, or mark it slow(reason)"
        report.longrepr = text.format(taken_s, usual_s, LIMIT_S)
    return report
