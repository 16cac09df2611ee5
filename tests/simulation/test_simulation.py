"""Simulated worlds: hundreds of seeds break no rule, each planted mistake is found, and a seed repeats its world.

The commands run more seeds: `python -m tests.simulation --seeds 0-999`.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.simulation import producing
from tests.simulation.every_await import CALLS
from tests.simulation.finding import ALL, STORE
from tests.simulation.plans import PLANS
from tests.simulation.running import simulate
from tests.trials import factor, trials

PRODUCING = "tests.simulation.producing"

WORLDS = [
    ("clustering", "0-59"),
    ("two-brokers", "0-29"),
    ("old-broker", "0-19"),
    ("orderly", "0-49"),
    ("broadcasting", "0-49"),
    ("moving", "0-29"),
    ("moving", "188"),  # a queue was given up only after its old owner had waited for others
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
    ("hand-overs", "0-14"),  # 2 and 6: a member with a long close kept its queues, and lowered commits
    ("failures", "0-9"),
    ("failed-members", "0-29"),  # 25: the same
    ("side-by-side", "0-19"),
    ("side-by-side-orderly", "0-9"),
    ("many-queues", "0-1"),
    ("exactly-once", "0-29"),  # 11: a call that ran while its queue was moved used the new claim
    ("exactly-once-resets", "0-19"),
    *(("by-key", f"{first}-{first + 99}") for first in range(0, 500, 100)),
    *(("by-asked-key", f"{first}-{first + 99}") for first in range(0, 500, 100)),
]


def is_right(*arguments, module="tests.simulation"):
    done = simulate(*arguments, module=module)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 wrong" in done.stdout
    assert done.stderr == "", "a dead process has logged something"


def some(seeds: str) -> str:
    """Return as many of the seeds as the factor of trials allows, perhaps none."""
    first, _, last = seeds.partition("-")
    count = round((int(last or first) + 1 - int(first)) * min(float(factor()), 1))
    return f"{first}-{int(first) + count - 1}" if count else ""


@pytest.mark.search
@pytest.mark.parametrize(("plan", "seeds"), [(plan, some(seeds)) for plan, seeds in WORLDS if some(seeds)])
def test_simulated_worlds_are_right(plan, seeds):
    is_right("--plan", plan, "--seeds", seeds)


@pytest.mark.search
@pytest.mark.parametrize("plan", [*producing.PLANS][: trials(len(producing.PLANS))])
def test_simulated_producers_are_right(plan):
    is_right("--plan", plan, "--seeds", f"0-{trials(2) - 1}", module=PRODUCING)


@pytest.mark.search
@pytest.mark.parametrize("call", CALLS[: trials(len(CALLS))])
def test_no_interference_with_a_call_does_harm(call):
    """No rule breaks at any step of a call at which its caller stops waiting, its broker falls silent, or it dies.

    All steps take most of an hour, in `make soak`. This test takes a sample.
    """
    is_right("--call", call, "--sample", str(trials(5)), module="tests.simulation.every_await")


def searched(plans):
    """Return the mistakes that these plans find."""
    names = [name for name, (_, plan, _) in ALL.items() if plan in plans]
    return names[: trials(len(names))]


@pytest.mark.search
@pytest.mark.parametrize("name", [*searched(PLANS), *searched(producing.PLANS)])
def test_a_search_finds_a_mistake(name):
    mistake, plan, wrong = ALL[name]
    module = "tests.simulation" if plan in PLANS else PRODUCING
    done = simulate("--plan", plan, "--seeds", "0-5", "--first-wrong", "--mistake", mistake, module=module)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert re.search(wrong, done.stdout), done.stdout
    assert f"repeat: python -m {module} --plan {plan} --seeds" in done.stdout


@pytest.mark.live
@pytest.mark.slow("lives through a world for each mistake, and the same without it")
def test_kept_seeds_find_each_mistake(subtests):
    done = simulate(module="tests.simulation.finding")
    for name, is_found in json.loads(done.stdout).items():
        with subtests.test(name):
            assert is_found, f"the kept seeds find it no longer: {STORE}\n{done.stderr[-2000:]}"
    assert done.returncode == 0


@pytest.mark.search
@pytest.mark.parametrize(
    ("module", "plan", "count"),
    [
        *(("tests.simulation", plan, 4) for plan in ("clustering", "orderly", "broadcasting", "exactly-once")),
        ("tests.simulation", "by-asked-key", 4),
        (PRODUCING, "all", 2),
    ],
)
def test_a_seed_repeats_its_world_exactly(module, plan, count):
    words = ("--plan", plan, "--seeds", f"3-{2 + trials(count)}", "--digest")
    once, again = (simulate(*words, module=module).stdout.splitlines()[:-1] for _ in range(2))
    assert once == again
    assert len(set(once)) == trials(count)
