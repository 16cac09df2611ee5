"""How much parallelism does order by key allow, compared with order by queue and with no order?

There are four queues, 1 000 keys and 20 threads. One listener sleeps 1 ms, another only counts. The sides run in
shuffled rounds of one run, each in a process of its own:

* the orderly mode of Java, and that of this package
* `order_by` with the sharding key, and with a function
* the concurrent mode of this package
* with `--before`, the orderly mode of another checkout, which this package must reach except for noise

Order by queue allows one call per queue at a time, order by key one call per thread. If the listener only sleeps, 20
threads and 4 queues allow a factor of 5 between them. The target of 15 for the orderly mode of Java is above that.
Run: python -m benchmarks.order_by_key --help
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import checkout, new_file, one_or_more
from benchmarks.consume import Cluster, broker, compete, log_progress, package_of
from benchmarks.consume_report import Results, Target, plot, rate, table
from benchmarks.consume_side import Task
from benchmarks.environment import environment, header
from benchmarks.plots import pyplot
from tests.real_brokers.jars import NEWEST, java_tool

SIDES: Mapping[str, Mapping[str, Any]] = {
    "java": {"side": "java", "orderly": True},
    "pyrocket, orderly": {"orderly": True},
    "pyrocket, order_by": {"orderly": True, "order_by": "sharding_key"},
    "pyrocket, order_by a function": {"orderly": True, "order_by": "function"},
    "pyrocket, concurrent": {},
}
BEFORE = "pyrocket, orderly before"
CASES = {"sleep": "listener sleeps 1 ms", "no-op": "listener counts"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 5
    queues: int = 4
    keys: int = 1000
    sleep_messages: int = 60_000
    messages: int = 400_000


def measure(
    cluster: Cluster, settings: Settings, results: Results, listener: str, java: bool, before: Path | None
) -> None:
    """Let all sides consume a backlog with this listener, and record the figures."""
    total = settings.sleep_messages if listener == "sleep" else settings.messages
    topic = cluster.topic(settings.queues, total, f"keys-{listener}", settings.keys)
    case = f"{CASES[listener]}, {settings.queues} queues, {settings.keys} keys"

    def task(options: Mapping[str, Any]) -> Callable[[], Task]:
        given = {"side": "pyrocket", "listener": listener, "total": total, **options}
        return lambda: cluster.task(given["side"], "backlog", topic, settings.queues, **_without_side(given))

    sides = {label: task(options) for label, options in SIDES.items() if java or label != "java"}
    packages = {}
    if before is not None:
        sides[BEFORE], packages[BEFORE] = task(SIDES["pyrocket, orderly"]), before
    compete(results, case, sides, settings.rounds, packages)
    goals = [("pyrocket, order_by", "pyrocket, concurrent", 0.8 if listener == "sleep" else 0.5)]
    if listener == "sleep" and java:
        goals.append(("pyrocket, order_by", "java", 15))
    if before is not None:
        goals.append(("pyrocket, orderly", BEFORE, 0.97))
    for ours, other, wanted in goals:
        name = other.partition(", ")[2] or "java, orderly"
        text = f"{CASES[listener]}: {ours.partition(', ')[2]} ÷ {name}"
        results.targets.append(Target(text, wanted, results.ratio(case, ours, other, rate)))


def _without_side(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "side"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order_by_key", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of small backlogs")
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison (default: 5)")
    parser.add_argument("--messages", type=int, help="size of the backlog for the fast listener (default: 400000)")
    parser.add_argument("--sleep-messages", type=int, help="the same for the one that sleeps (default: 60000)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of sleep, no-op (default: both)")
    parser.add_argument("--no-java", action="store_true", help="omit Java")
    parser.add_argument("--before", type=checkout, metavar="CHECKOUT", help="also measure its orderly mode")
    parser.add_argument("--name-server", help="use this running cluster instead of starting a broker")
    parser.add_argument("--json", type=new_file, help="write the figures of every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    base = Settings(1, sleep_messages=20_000, messages=100_000) if options.quick else Settings()
    settings = Settings(
        options.rounds or base.rounds,
        sleep_messages=options.sleep_messages or base.sleep_messages,
        messages=options.messages or base.messages,
    )
    java = not options.no_java
    facts = environment(java=java_tool("java")) if java else environment()
    results, failed = Results(), list[str]()
    with broker(options.name_server, lifted=True) as cluster, package_of(options.before) as before:
        for case in cases:
            try:
                measure(cluster, settings, results, case, java, before)
            except (RuntimeError, subprocess.SubprocessError) as error:
                failed.append(f"case {case} failed: {error}")
                log_progress(failed[-1])
    results.rounds = {case: sides for case, sides in results.rounds.items() if all(sides.values())}
    server = f"the cluster at {options.name_server}" if options.name_server else f"RocketMQ {NEWEST}, limits lifted"
    print(header(facts))
    print(f"{server}; 20 threads, 1 KB bodies with six properties; rounds: {settings.rounds}, medians of them")
    print(*table(results), sep="\n")
    print(f"\n{'target':<62} {'wanted':<9} {'measured':>9}")
    print(*results.targets, sep="\n")
    if options.json:
        found = {
            "environment": facts,
            "settings": asdict(settings),
            "rounds": results.rounds,
            "targets": [{**asdict(target), "met": target.met} for target in results.targets],
        }
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        plot(results, options.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
