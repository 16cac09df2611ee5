"""Simulated worlds: hundreds of seeds are right, mistakes are each found, a seed repeats its world exactly."""

from __future__ import annotations

import json
import re

import pytest

from tests.simulation.finding import ALL, STORE
from tests.simulation.plans import PLANS
from tests.simulation.running import simulate
from tests.trials import factor, trials

WORLDS = [
    ("clustering", "0-59"),
    ("two-brokers", "0-29"),
    ("old-broker", "0-19"),
    ("orderly", "0-49"),
    ("broadcasting", "0-49"),
    ("moving", "0-29"),
    ("moving", "188"),  # a queue was given up only when its old owner had done waiting for others
    ("resets", "0-39"),
    ("quiet", "0-29"),
    ("corrections", "0-19"),
    ("peaceful", "0-4"),
    ("defaults", "0-29"),
    ("from-a-time", "0-9"),
    ("own-offsets", "0-19"),
    ("slow-brokers", "0-29"),
    ("calls", "0-29"),
    ("cancelled-resets", "0-9"),
    ("hand-overs", "0-14"),  # 2 and 6: a member that closes for long kept its queues, and set commits back
    ("failures", "0-9"),
    ("failed-members", "0-29"),  # 25: the same
    ("side-by-side", "0-19"),
    ("side-by-side-orderly", "0-9"),
    ("many-queues", "0-1"),
    ("exactly-once", "0-29"),  # 11: what ran while its queue was moved went by the new claim
    ("exactly-once-resets", "0-19"),
    *(("by-key", f"{first}-{first + 99}") for first in range(0, 500, 100)),
    *(("by-asked-key", f"{first}-{first + 99}") for first in range(0, 500, 100)),
]


def some(seeds: str) -> str:
    """Return as many of the seeds as there is time for; in `--quick` none of the plans that have few."""
    first, _, last = seeds.partition("-")
    count = round((int(last or first) + 1 - int(first)) * min(float(factor()), 1))
    return f"{first}-{int(first) + count - 1}" if count else ""


@pytest.mark.search
@pytest.mark.parametrize(("plan", "seeds"), [(plan, some(seeds)) for plan, seeds in WORLDS if some(seeds)])
def test_simulated_worlds_are_right(plan, seeds):
    done = simulate("--plan", plan, "--seeds", seeds)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 wrong" in done.stdout
    assert done.stderr == "", "the dead are heard of"


SEARCHED = [name for name, (_, plan, _) in ALL.items() if plan in PLANS]


@pytest.mark.search
@pytest.mark.parametrize("name", SEARCHED[: trials(len(SEARCHED))])
def test_a_search_finds_a_mistake(name):
    mistake, plan, wrong = ALL[name]
    done = simulate("--plan", plan, "--seeds", "0-5", "--first-wrong", "--mistake", mistake)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert re.search(wrong, done.stdout), done.stdout
    assert f"repeat: python -m tests.simulation --plan {plan} --seeds" in done.stdout


@pytest.mark.live
@pytest.mark.slow("lives through a world for each mistake, and the same without it")
def test_kept_seeds_find_each_mistake(subtests):
    done = simulate(module="tests.simulation.finding")
    for name, is_found in json.loads(done.stdout).items():
        with subtests.test(name):
            assert is_found, f"the kept seeds find it no longer: {STORE}\n{done.stderr[-2000:]}"
    assert done.returncode == 0


@pytest.mark.search
@pytest.mark.parametrize("plan", ["clustering", "orderly", "broadcasting", "exactly-once", "by-asked-key"])
def test_a_seed_repeats_its_world_exactly(plan):
    seeds = f"3-{2 + trials(4)}"
    once, again = (simulate("--plan", plan, "--seeds", seeds, "--digest").stdout.splitlines()[:-1] for _ in range(2))
    assert once == again
    assert len(set(once)) == trials(4)
