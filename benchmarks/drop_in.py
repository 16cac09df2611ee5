"""How fast is a program written for rocketmq-client-python with the facade of this package?

The other sides, in shuffled rounds of one run, are the API of this package, and the native library of `rocketmq` 0.4.4.
That library needs a machine for which a wheel exists. Every side is a process of its own with the same callback and
number of threads. Its fresh group reads the same backlog from the first offset on.
Run: python -m benchmarks.drop_in --help
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata

from benchmarks.arguments import new_file, one_or_more
from benchmarks.consume import ROOT, Cluster, broker, log_progress
from benchmarks.consume_report import Results, Target, cpu_us, peak_mb, rate, short
from benchmarks.drop_in_side import Task
from benchmarks.environment import environment, header
from benchmarks.plots import draw_rates, pyplot
from benchmarks.watch import Figures
from pyrocket_consumer.protocol.codes import RequestCode
from tests.real_brokers.jars import NEWEST
from tests.real_brokers.remoting import Peer

NATIVE = "0.4.4"
SIDES = ("facade", "api", "native")
CASES = ("consume", "read", "send", "raising")
QUEUES = 8


@dataclass(slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 3
    messages: int = 300_000
    sends: int = 5_000
    raising: int = 64
    threads: int = 8
    cases: tuple[str, ...] = CASES
    sides: tuple[str, ...] = SIDES


QUICK = Settings(1, 100_000, 1_000, 16)


def perform(task: Task) -> Figures:
    """Run one task in a new process.

    Raises:
        RuntimeError: the process failed; the text has its output.
    """
    command = [sys.executable, "-m", "benchmarks.drop_in_side", json.dumps(asdict(task))]
    limit_s = task.timeout_s + task.wait_s + 60
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT)
    if done.returncode:
        output = f"{done.stdout[-1500:]}{done.stderr[-3000:]}"
        raise RuntimeError(f"{task.side} ended with {done.returncode}:\n{output}")
    answer: Figures = json.loads(done.stdout.splitlines()[-1])
    return answer


def from_the_first(cluster: Cluster, topic: str, queues: int) -> str:
    """Return a fresh group that starts at the first message. The native library has no option for that."""
    group, peer = f"bench-{secrets.token_hex(6)}", Peer(cluster.broker_address)
    body = json.dumps({"groupName": group}).encode()
    peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    for queue_id in range(queues):
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id, "commitOffset": 0}
        peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
    return group


def compete(results: Results, case: str, make: Callable[[str], Task], settings: Settings, rounds: int) -> None:
    """Run the task of each side once per round, in a new order each time."""
    rows = results.rounds.setdefault(case, {side: [] for side in settings.sides})
    for turn in range(rounds):
        for side in random.sample(settings.sides, len(settings.sides)):
            answer = perform(make(side))
            rows[side].append(answer)
            figure = f"{answer['redelivered']} of {answer['raised']} again" if case == "raising" else short(answer)
            log_progress(f"{case}, round {turn + 1} of {rounds}, {side}: {figure}")


def measure(cluster: Cluster, settings: Settings, results: Results) -> None:
    """Run all cases, and compare."""
    sizes = {"consume": settings.messages, "read": settings.messages, "send": 0, "raising": settings.raising}
    for case in settings.cases:
        # the native library fails all messages of a pull with one failure, so each message has its own queue
        queues = settings.raising if case == "raising" else QUEUES
        topic = cluster.topic(queues, sizes[case], case)

        def task(side: str, case: str = case, topic: str = topic, queues: int = queues) -> Task:
            if case == "send":
                return Task(side, "send", cluster.name_server, "bench-producer", topic, settings.sends)
            kind = "raising" if case == "raising" else "backlog"
            group = from_the_first(cluster, topic, queues)
            where = (cluster.name_server, group, topic, sizes[case])
            return Task(side, kind, *where, threads=settings.threads, reads=case == "read")

        compete(results, case, task, settings, 1 if case == "raising" else settings.rounds)
        results.targets += targets(results, case, settings)


def targets(results: Results, case: str, settings: Settings) -> Iterator[Target]:
    """Yield the targets of a case, with the measured values."""
    if case == "raising":
        (answer,) = results.rounds[case]["facade"]
        yield Target("raising: messages lost", 0, answer["raised"] - answer["redelivered"], at_least=False)
        return
    if "api" in settings.sides:
        yield Target(f"{case}: CPU ÷ api", 1.2, results.ratio(case, "facade", "api", cpu_us), at_least=False)
        yield Target(f"{case}: rate ÷ api", 0.83, results.ratio(case, "facade", "api", rate))
    if "native" in settings.sides and case != "send":
        yield Target(f"{case}: rate ÷ native", 5, results.ratio(case, "facade", "native", rate))
        yield Target(f"{case}: CPU ÷ native", 0.2, results.ratio(case, "facade", "native", cpu_us), at_least=False)


def table(results: Results) -> Iterator[str]:
    """Return the figures as lines."""
    for case, sides in results.rounds.items():
        yield ""
        if case == "raising":
            yield f"{case:<10} {'raised':>8} {'came again':>11} {'lost':>6}"
            for side, (answer, *_) in sides.items():
                raised, again = answer["raised"], answer["redelivered"]
                yield f"  {side:<8} {raised:>8} {again:>11} {raised - again:>6}"
            continue
        yield f"{case:<10} {'k msg/s':>8} {'CPU, us':>11} {'peak MB':>8}"
        for side, answers in sides.items():
            speed = results.median(case, side, rate) / 1000
            megabytes = statistics.median(map(peak_mb, answers))
            yield f"  {side:<8} {speed:>8.1f} {results.median(case, side, cpu_us):>11.2f} {megabytes:>8.0f}"


def has_native() -> bool:
    """Return whether the package with the native library is installed."""
    try:
        return metadata.version("rocketmq") == NATIVE
    except metadata.PackageNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drop_in", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of small backlogs")
    parser.add_argument("--cases", help=f"comma-separated, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--sides", help=f"comma-separated, of {', '.join(SIDES)} (default: all)")
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison (default: 3)")
    parser.add_argument("--messages", type=int, help="size of the backlog (default: 300000)")
    parser.add_argument("--threads", type=int, help="threads of every side (default: 8)")
    parser.add_argument("--name-server", help="use this running cluster instead of starting a broker")
    parser.add_argument("--json", type=new_file, help="write the figures of every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing

    settings = replace(QUICK) if options.quick else Settings()
    for name in ("rounds", "messages", "threads"):
        setattr(settings, name, getattr(options, name) or getattr(settings, name))
    for name, known in (("cases", CASES), ("sides", SIDES)):
        if given := getattr(options, name):
            setattr(settings, name, tuple(given.split(",")))
        if unknown := set(getattr(settings, name)) - set(known):
            parser.error(f"--{name} has no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if "facade" not in settings.sides:
        parser.error("--sides needs facade, which the others are compared with")
    if "native" in settings.sides and not has_native():
        parser.error(
            f"the native library is not here: pip install '.[native]' (x86-64 Linux only), which brings rocketmq "
            f"{NATIVE}; or leave it out with --sides facade,api"
        )

    facts = environment()
    results = Results()
    with broker(options.name_server, lifted=False) as cluster:
        measure(cluster, settings, results)
    print(header(facts))
    server = f"the cluster at {options.name_server}" if options.name_server else f"RocketMQ {NEWEST}, default limits"
    print(f"{server}; 1 KB bodies, {QUEUES} queues, {settings.threads} threads; medians of {settings.rounds} rounds")
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
        bars = [
            (case, side, results.median(case, side, rate) / 1000)
            for case, sides in results.rounds.items()
            if case != "raising"
            for side in sides
        ]
        draw_rates(bars, {"facade": "tab:blue", "api": "tab:green", "native": "tab:orange"}, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
