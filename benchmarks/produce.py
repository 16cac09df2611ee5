"""How many messages per second does a Producer send to a real broker, and what does one cost?

The other side, in shuffled rounds of one run, is Java's DefaultMQProducer with the same number of messages in flight.
`--before` adds the producer of another checkout. `async` has up to 1 000 messages in flight and checks every
result; `sync` sends one after the other. Every side is a process of its own, and its first messages are for warm-up.
Ratios are computed inside a round. Run: python -m benchmarks.produce --help
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import java_program
from benchmarks.arguments import checkout, new_file, one_or_more
from benchmarks.consume import ROOT, Cluster, broker, log_progress, package_of
from benchmarks.consume_report import Results, cpu_us, peak_mb, rate, short
from benchmarks.environment import environment, header
from benchmarks.plots import draw_rates, pyplot
from benchmarks.produce_side import Task
from benchmarks.watch import Figures
from tests.real_brokers.jars import NEWEST, java_tool

CASES = ("async", "sync")
SIDES = ("pyrocket", "java", "before")
QUEUES = 4
LIMIT_S = 600
WARM = 120_000  # messages; with fewer, ratios to Java are not meaningful


@dataclass(slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 5
    warm: int = WARM
    messages: int = 200_000
    sync_messages: int = 30_000
    in_flight: int = 1000
    cases: tuple[str, ...] = CASES
    sides: tuple[str, ...] = ("pyrocket", "java")


QUICK = Settings(1, warm=3_000, messages=20_000, sync_messages=3_000)


def perform(task: Task, package: Path | None = None) -> Figures:
    """Run one task in a new process. `package` is a directory with another version of pyrocket_consumer.

    Raises:
        RuntimeError: the process failed; the text has its output.
    """
    if task.side == "java":
        return java_program.run("ProduceBench", NEWEST, asdict(task), timeout_s=LIMIT_S)
    where = os.pathsep.join(str(each) for each in (package, ROOT) if each is not None)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.produce_side", json.dumps(asdict(task))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": where},
    )
    if done.returncode:
        raise RuntimeError(f"{task.side} ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    answer: Figures = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(cluster: Cluster, settings: Settings, results: Results, before: Path | None) -> None:
    """Let all sides send once per round, in a new order each time."""
    topic = cluster.topic(QUEUES, 0, "produce")
    for case in settings.cases:
        total = settings.messages if case == "async" else settings.sync_messages
        rows = results.rounds.setdefault(case, {side: [] for side in settings.sides})
        for turn in range(settings.rounds):
            for side in random.sample(settings.sides, len(settings.sides)):
                where = (cluster.name_server, "bench-producer", topic)
                task = Task(side, case, *where, settings.warm, total, settings.in_flight)
                answer = perform(task, before if side == "before" else None)
                rows[side].append(answer)
                log_progress(f"{case}, round {turn + 1} of {settings.rounds}, {side}: {short(answer)}")
        results.aim(case, "rate", rate, "pyrocket", "java", at_least=1.2 if case == "async" else 0.9)
        if case == "async":
            results.aim(case, "CPU per message", cpu_us, "pyrocket", "java", at_most=1)


def table(results: Results) -> Iterator[str]:
    """Return the figures as lines."""
    for case, sides in results.rounds.items():
        others = [side for side in ("java", "before") if side in sides]
        ratio_heads = "".join(f" {'rate ÷ ' + other:>13} {'CPU ÷ ' + other:>13}" for other in others)
        yield ""
        yield f"{case:<10} {'k msg/s':>8} {'CPU, us':>8} {'MB peak':>8}{ratio_heads}"
        for side in sides:
            speed = results.median(case, side, rate) / 1000
            cost, megabytes = results.median(case, side, cpu_us), results.median(case, side, peak_mb)
            ratios = ""
            for other in others:
                for value in (rate, cpu_us):
                    ratio = "" if side == other else f"{results.ratio(case, side, other, value):.2f}"
                    ratios += f" {ratio:>13}"
            yield f"  {side:<8} {speed:>8.1f} {cost:>8.1f} {megabytes:>8.0f}{ratios}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.produce", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few messages")
    parser.add_argument("--cases", help=f"comma-separated, of {', '.join(CASES)} (default: both)")
    parser.add_argument("--sides", help="comma-separated, of pyrocket, java (default: both)")
    parser.add_argument(
        "--before", type=checkout, metavar="CHECKOUT", help="its producer is measured as the side `before`"
    )
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison (default: 5)")
    parser.add_argument("--warm", type=int, help=f"messages of each side that do not count (default: {WARM})")
    parser.add_argument("--messages", type=int, help="asynchronous sends that count (default: 200000)")
    parser.add_argument("--sync-messages", type=int, help="synchronous sends that count (default: 30000)")
    parser.add_argument("--in-flight", type=int, help="asynchronous sends in flight (default: 1000)")
    parser.add_argument("--name-server", help="use this running cluster instead of starting a broker")
    parser.add_argument("--json", type=new_file, help="write the figures of every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing

    settings = replace(QUICK) if options.quick else Settings()
    for name in ("rounds", "warm", "messages", "sync_messages", "in_flight"):
        setattr(settings, name, getattr(options, name) or getattr(settings, name))
    for name, known in (("cases", CASES), ("sides", SIDES[:2])):
        if given := getattr(options, name):
            setattr(settings, name, tuple(given.split(",")))
        if unknown := set(getattr(settings, name)) - set(known):
            parser.error(f"--{name} has no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.before:
        settings.sides += ("before",)

    facts = environment(java=java_tool("java") if "java" in settings.sides else None)
    results = Results()
    with broker(options.name_server, lifted=False) as cluster, package_of(options.before) as before:
        measure(cluster, settings, results, before)
    server = f"the cluster at {options.name_server}" if options.name_server else f"RocketMQ {NEWEST}"
    print(header(facts))
    print(
        f"{server}; 1 KB bodies with a tag, a key and a property, {QUEUES} queues, {settings.in_flight} asynchronous "
        f"sends in flight; rounds: {settings.rounds}, medians of them"
    )
    if settings.warm < WARM and "java" in settings.sides:
        print("So few messages are over before Java has compiled itself: ratios to it flatter us.")
    print(*table(results), sep="\n")
    print(f"\n{'target':<62} {'wanted':<9} {'measured':>9}")
    print(*results.targets, sep="\n")
    if options.json:
        found = {
            "environment": facts,
            "settings": {**asdict(settings), "before": str(options.before) if options.before else None},
            "rounds": results.rounds,
            "targets": [{**asdict(target), "met": target.met} for target in results.targets],
        }
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        bars = [
            (case, side, results.median(case, side, rate) / 1000)
            for case, sides in results.rounds.items()
            for side in sides
        ]
        draw_rates(bars, {"pyrocket": "tab:blue", "before": "tab:green", "java": "tab:orange"}, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
