"""Simulated producers at brokers in trouble: a few seeds are right, mistakes are found, a seed repeats its world.

`python -m tests.simulation.producing --seeds 0-99` goes through more.
"""

from __future__ import annotations

import re

import pytest

from tests.simulation.finding import ALL
from tests.simulation.producing import PLANS
from tests.simulation.running import simulate
from tests.trials import trials

MODULE = "tests.simulation.producing"
SEARCHED = [name for name, (_, plan, _) in ALL.items() if plan in PLANS]


@pytest.mark.search
@pytest.mark.parametrize("plan", [*PLANS][: trials(len(PLANS))])
def test_simulated_producers_are_right(plan):
    done = simulate("--plan", plan, "--seeds", f"0-{trials(2) - 1}", module=MODULE)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 wrong" in done.stdout
    assert done.stderr == ""


@pytest.mark.search
@pytest.mark.parametrize("name", SEARCHED[: trials(len(SEARCHED))])
def test_a_search_finds_a_mistake(name):
    mistake, plan, wrong = ALL[name]
    done = simulate("--plan", plan, "--seeds", "0-5", "--first-wrong", "--mistake", mistake, module=MODULE)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert re.search(wrong, done.stdout), done.stdout
    assert f"repeat: python -m {MODULE} --plan {plan} --seeds" in done.stdout


@pytest.mark.search
def test_a_seed_repeats_its_world_exactly():
    seeds = f"3-{2 + trials(2)}"
    runs = [simulate("--plan", "all", "--seeds", seeds, "--digest", module=MODULE).stdout for _ in range(2)]
    once, again = ([line for line in run.splitlines() if line.startswith("all ")] for run in runs)
    assert once == again
    assert len(set(once)) == trials(2)
