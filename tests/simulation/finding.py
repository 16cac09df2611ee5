"""Short worlds that find mistakes planted on purpose; `mistakes.json` keeps their seeds.

python -m tests.simulation.finding            replays them
python -m tests.simulation.finding --store    searches new seeds for mistakes that the old ones no longer find
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tests import planted_mistakes
from tests.simulation import plans, producing, scenario
from tests.simulation.mistakes import MISTAKES, PRODUCER_MISTAKES
from tests.simulation.running import parse_options

KEPT = Path(__file__).with_name("mistakes.json")
STORE = "python -m tests.simulation.finding --store"

OF_CONSUMERS = (
    ("late-ack", "resets", "was not consumed"),
    ("commit-on-no-new-message", "quiet", "was not consumed"),
    ("drop-without-persist", "moving", "was redelivered to"),
    ("correction-without-store", "corrections", "without storing it"),
    ("unlock-before-commit", "orderly", "after unlocking it"),
    ("start-not-stored", "defaults", "was not consumed"),
    ("start-not-stored", "own-offsets", "never saw"),
    ("cancelled-move", "cancelled-resets", "committed is|were never consumed"),
    ("chunk-that-keeps-a-failure", "failures", "was not sent back"),
    ("commit-after-the-grace", "hand-overs", "was redelivered to"),
    ("failed-member-stays", "failed-members", "were never consumed"),
)
OF_DATABASES = (
    ("commit-before-the-effect", "exactly-once", "has its effect when"),
    ("commit-after-the-listener", "exactly-once", "has its effect when"),
    ("known-elsewhere", "exactly-once", "has its effect when"),
    ("advance-first", "exactly-once", "transactions waited"),
    ("advance-without-the-epoch", "exactly-once", "has its effect"),
    ("claim-without-a-new-epoch", "exactly-once", "has its effect"),
    ("reset-that-leaves-the-epoch", "exactly-once-resets", "has its effect"),
    ("claim-that-moves-along", "exactly-once-resets", "has its effect"),
)
OF_KEYS = (
    ("two-workers-on-one-key", "by-key", "began during"),
    ("two-workers-on-one-key", "by-asked-key", "began during"),
    ("retry-behind-the-next", "by-key", "came after"),
    ("rest-of-a-key-continues", "by-asked-key", "came after"),
    ("unlock-while-a-key-runs", "by-key", "began during"),
)
OF_PRODUCERS = (
    ("attempts-not-reported", "brokers", "SendResult.attempts="),
    ("key-ignored", "brokers", "was stored at"),
    ("old-route-kept", "routes", "s later"),
    ("acknowledged-before-it-is-stored", "brokers", "as it was acknowledged"),
)
"""The mistakes, the plans that find them, and the text of the broken rule."""

ALL = {
    f"{mistake} in {plan}": (mistake, plan, wrong)
    for mistake, plan, wrong in OF_CONSUMERS + OF_DATABASES + OF_KEYS + OF_PRODUCERS
}


def run_world(mistake: str | None, plan: str, seed: int, times: dict[str, float]) -> str:
    """Run a world, with a planted mistake or without. Return the text of the broken rule, or ""."""
    if mistake is not None:
        (MISTAKES | PRODUCER_MISTAKES)[mistake]()
    try:
        if plan in plans.PLANS:
            how = replace(plans.PLANS[plan], **times)  # type: ignore[arg-type]
            scenario.check(scenario.Scenario(seed, how).run(), how)
        else:
            sending = replace(producing.PLANS[plan], **times)  # type: ignore[arg-type]
            producing.check(producing.ProducerScenario(seed, sending).run(), sending)
    except AssertionError as error:
        return f"seed {seed}: {error}"
    return ""


def finds(name: str, seed: int, times: dict[str, float]) -> bool:
    """Return whether a world breaks the expected rule with the mistake, and no rule without it."""
    mistake, plan, wrong = ALL[name]

    def broken_rule(with_mistake: str | None) -> str:
        return str(planted_mistakes.in_fork(partial(run_world, with_mistake, plan, seed, times)))

    return re.search(wrong, broken_rule(mistake)) is not None and not broken_rule(None)


def search(name: str) -> dict[str, Any]:
    """Return the shortest times with which some seeds find a mistake, and these seeds."""
    _, plan, _ = ALL[name]
    whole = plans.PLANS[plan] if plan in plans.PLANS else producing.PLANS[plan]
    for part in (0.1, 0.2, 0.3, 0.5, 1.0):
        times = {
            each: round(getattr(whole, each) * part, 1) for each in ("trouble_s", "calm_s") if hasattr(whole, each)
        }
        if seeds := [*islice((seed for seed in range(10) if finds(name, seed, times)), 2)]:
            return {"seeds": seeds, "times": times}
    return {}


def replay() -> dict[str, bool]:
    """Return for each mistake whether one of its kept seeds finds it."""
    kept = planted_mistakes.read(KEPT)
    return {
        name: name in kept and any(finds(name, seed, kept[name]["times"]) for seed in kept[name]["seeds"])
        for name in ALL
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="search seeds for mistakes without any, and store them")
    options = parse_options(parser, has_log=False)
    found = replay()
    if options.store:
        lost = [name for name, is_found in found.items() if not is_found]
        kept = planted_mistakes.read(KEPT)
        for name in lost:
            if world := search(name):
                kept[name] = world
                planted_mistakes.write(KEPT, {each: kept[each] for each in ALL if each in kept})
        found |= {name: name in kept for name in lost}
    print(json.dumps(found))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
