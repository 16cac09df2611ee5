"""Shared by the commands of simulations: their options, a loop over worlds, and starting them from tests.

Each command runs in its own process, because the order of sets of strings depends on PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str, module: str = "tests.simulation") -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # otherwise the process restarts itself
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def parse_options(parser: argparse.ArgumentParser, has_log: bool = True) -> argparse.Namespace:
    """Read the options. Restart the process if PYTHONHASHSEED is not 0."""
    if has_log:
        parser.add_argument("--log", action="store_true", help="show the client's log")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    logging.basicConfig(level=logging.DEBUG if has_log and options.log else logging.CRITICAL + 1)
    return options


def run_worlds(worlds: Iterable[tuple[str, str, Callable[[], object]]], first_wrong: bool = False) -> int:
    """Run worlds. Each has a group, the command that repeats it, and a function that raises if a rule is broken.

    Return the exit code. With `first_wrong`, continue with the next group after a wrong world.
    """
    began, wrong, count, given_up = time.monotonic(), 0, 0, set()
    for group, again, run_world in worlds:
        if group in given_up:
            continue
        count += 1
        try:
            run_world()
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {again.split(maxsplit=1)[1]}: {error}\n  repeat: python -m {again}", flush=True)
            if first_wrong:
                given_up.add(group)
    print(f"{count} worlds, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def main(
    module: str,
    doc: str | None,
    plans: Mapping[str, Any],
    mistakes: Mapping[str, Callable[[], None]],
    run_world: Callable[[int, Any], Any],
    check: Callable[[Any, Any], None],
) -> int:
    """Run the plans with some seeds."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--plan", choices=plans, action="append", help="default: each; repeatable")
    parser.add_argument("--first-wrong", action="store_true", help="continue with the next plan after a wrong world")
    parser.add_argument("--seeds", default="0-19", metavar="FIRST-LAST", help="or one seed")
    parser.add_argument("--mistake", choices=sorted(mistakes), help="plant a mistake, which the rules should find")
    parser.add_argument("--digest", action="store_true", help="print a digest of each world")
    options = parse_options(parser)
    if options.mistake:
        mistakes[options.mistake]()
    first, _, last = options.seeds.partition("-")

    def run(name: str, seed: int) -> None:
        happened = run_world(seed, plans[name])
        if options.digest:
            print(name, seed, happened.digest(), flush=True)
        check(happened, plans[name])

    return run_worlds(
        (
            (name, f"{module} --plan {name} --seeds {seed}", lambda name=name, seed=seed: run(name, seed))
            for name in options.plan or plans
            for seed in range(int(first), int(last or first) + 1)
        ),
        options.first_wrong,
    )
