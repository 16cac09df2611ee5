"""Run simulated worlds: python -m tests.simulation --seeds 0-99; a seed repeats its world exactly."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from tests.simulation.mistakes import MISTAKES
from tests.simulation.plans import PLANS
from tests.simulation.scenario import Scenario, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=[*PLANS, "all"], action="append", help="default: all; repeatable")
    parser.add_argument("--first-wrong", action="store_true", help="go on with the next plan after a wrong world")
    parser.add_argument("--seeds", default="0-19", metavar="FIRST-LAST", help="or one seed")
    parser.add_argument("--mistake", choices=sorted(MISTAKES), help="put a mistake in, to see it found")
    parser.add_argument("--digest", action="store_true", help="print a digest of each history")
    parser.add_argument("--log", action="store_true", help="show the consumer's log")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text are walked in an order that depends on it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    logging.basicConfig(level=logging.DEBUG if options.log else logging.CRITICAL + 1)
    if options.mistake:
        MISTAKES[options.mistake]()
    first, _, last = options.seeds.partition("-")
    began, wrong, worlds = time.monotonic(), 0, 0
    for name in options.plan if options.plan and "all" not in options.plan else PLANS:
        for seed in range(int(first), int(last or first) + 1):
            worlds += 1
            wrong += not run(name, seed, options.digest)
            if wrong and options.first_wrong:
                break
    print(f"{worlds} worlds, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def run(name: str, seed: int, digest: bool) -> bool:
    plan = PLANS[name]
    try:
        history = Scenario(seed, plan).run()
        if digest:
            print(name, seed, history.digest())
        check(history, plan)
    except AssertionError as error:
        again = f"python -m tests.simulation --plan {name} --seeds {seed}"
        print(f"WRONG plan={name} seed={seed}: {error}\n  repeat: {again}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
