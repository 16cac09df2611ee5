"""How much does a second process of a group add, and a second task of Spark, on the cores of this machine?

Groups of one and of two consumers consume the same backlog of a real broker. One listener only counts, another reads
body and properties. Spark reads in one task and in two from a broker that serves from memory. One and two alternate in
every round. The report shows with each ratio the CPU share of consumers and broker. If both together use the whole
machine, a second process has no free core, and the machine limits the ratio.

Run: python -m benchmarks.cores --help
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_file, one_or_more
from benchmarks.consume import ROOT, Cluster, broker, log_progress
from benchmarks.consume_report import Results, cpu_us, rate
from benchmarks.consume_side import Task
from benchmarks.environment import environment, header
from benchmarks.plots import draw_rates, pyplot
from benchmarks.watch import Figures
from tests.real_brokers.jars import NEWEST

CASES = {
    "no-op": "consume, listener counts",
    "touched": "consume, body and properties read",
    "spark": "Spark, all 16 columns",
    "spark-two": "Spark, queueOffset and body",
}
FROM_SHARE, TO_SHARE = 0.2, 0.9
SAMPLE_EVERY_S = 0.02

Run = Callable[[], Figures]
Sample = tuple[float, int, float]
"""The time, the number of messages until then, and the CPU time until then."""


@dataclass(slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 5
    queues: int = 16
    messages: int = 1_000_000
    spark_messages: int = 1_600_000
    pull_batch: int = 32


QUICK = Settings(rounds=1, messages=200_000, spark_messages=400_000)


class CpuClock:
    """The CPU time of a server that this program started, and of the whole machine. A thread samples both."""

    def __init__(self, server: str) -> None:
        self._server = _child_running(server)
        self._of_server: list[tuple[float, float]] = []
        self._of_all: list[tuple[float, float]] = []
        self._done = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._take_samples)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _take_samples(self) -> None:
        tick_s, everything = 1 / os.sysconf("SC_CLK_TCK"), Path("/proc/stat")
        while not self._done.wait(SAMPLE_EVERY_S):
            now_s = time.perf_counter()
            if self._server is not None:
                _, _, rest = self._server.read_text().rpartition(")")
                self._of_server.append((now_s, sum(map(int, rest.split()[11:13])) * tick_s))
            if everything.exists():
                user, nice, system, _, _, interrupts, soft, *_ = everything.read_text().split(maxsplit=8)[1:]
                self._of_all.append((now_s, sum(map(int, (user, nice, system, interrupts, soft))) * tick_s))

    def between(self, begin_s: float, end_s: float) -> dict[str, float | None]:
        """Return the CPU times between two moments, or None for a broker that runs elsewhere."""
        found = {"broker_cpu_s": self._of_server, "machine_cpu_s": self._of_all}
        return {
            name: _at(end_s, samples) - _at(begin_s, samples) if samples else None for name, samples in found.items()
        }


def _child_running(program: str) -> Path | None:
    """Return /proc/PID/stat of the child whose command line names the program."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (entry / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid() and program in (entry / "cmdline").read_text():
                return entry / "stat"
        except OSError:
            continue  # it has ended
    return None


def _at(moment_s: float, samples: Sequence[tuple[float, float]]) -> float:
    """Return the value at a moment between two samples."""
    for (before_s, before), (after_s, after) in itertools.pairwise(samples):
        if moment_s <= after_s:
            return before + (after - before) * max(moment_s - before_s, 0.0) / (after_s - before_s)
    return samples[-1][1]


# --- consuming


def consume(cluster: Cluster, settings: Settings, results: Results, name: str) -> None:
    """One consumer of a group, and two."""
    topic = cluster.topic(settings.queues, settings.messages)
    listener = "touch" if name == "touched" else "no-op"

    def members(count: int) -> Run:
        return lambda: together(_member_tasks(cluster, settings, topic, listener, count))

    case = f"{CASES[name]}, {settings.queues} queues"
    take_turns(results, case, {"1 process": members(1), "2 processes": members(2)}, settings.rounds)


def _member_tasks(cluster: Cluster, settings: Settings, topic: str, listener: str, count: int) -> list[Task]:
    task = cluster.task(
        "pyrocket", "share", topic, settings.queues, listener=listener, total=settings.messages // count, members=count
    )
    return [task] * count


def together(tasks: Sequence[Task]) -> Figures:
    """Start the members of a group at the same moment. Only the time in which all of them are warm counts.

    Raises:
        RuntimeError: a member failed; the text has its output.
    """
    command = [sys.executable, "-m", "benchmarks.consume_side"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([*command, json.dumps(asdict(task))], cwd=ROOT, text=True, **pipes) for task in tasks]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"a member ended before it began:\n{process.communicate()[1][-3000:]}")
        clock = CpuClock("BrokerStartup")
        with clock.running():
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            outputs = [process.communicate(timeout=tasks[0].timeout_s + 60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    samples: list[list[Sample]] = []
    for process, (output, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a member ended with {process.returncode}:\n{errors[-3000:]}")
        samples.append(json.loads(output.splitlines()[-1])["samples"])
    return common_part(samples, tasks[0].total, clock)


def common_part(samples: Sequence[Sequence[Sample]], total: int, clock: CpuClock) -> Figures:
    """Return the figures of all members, from when the last one is warm until the first one is nearly done.

    Raises:
        RuntimeError: no such period exists.
    """
    begin_s = max(next(at_s for at_s, count, _ in each if count >= FROM_SHARE * total) for each in samples)
    end_s = min(next(at_s for at_s, count, _ in each if count >= TO_SHARE * total) for each in samples)
    if end_s <= begin_s:
        raise RuntimeError(f"one member consumed {total} messages before the other was warm; use more messages")

    def grown(column: int) -> float:
        lines = [[(sample[0], float(sample[column])) for sample in each] for each in samples]
        return sum(_at(end_s, line) - _at(begin_s, line) for line in lines)

    return {
        "messages": round(grown(1)),
        "seconds": end_s - begin_s,
        "cpu_s": grown(2),
        **clock.between(begin_s, end_s),
    }


# --- Spark


def spark(settings: Settings, results: Results, names: Sequence[str], failed: list[str]) -> None:
    """One task and two, of the same session, which has two task threads."""
    from benchmarks import spark_read

    given = spark_read.Settings(
        queues=settings.queues, messages=settings.spark_messages, pull_batch=settings.pull_batch
    )
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory, "records")
        with spark_read.recorded_broker(given, records) as address, spark_read.session(2) as session:
            bench = spark_read.Bench(session, given, spark_read.Results(), address, records)
            schemas = {"spark": None, "spark-two": spark_read.TWO}

            def read(schema: str | None, tasks: int) -> Figures:
                clock = CpuClock("benchmarks.recorded_broker")
                count = given.messages // given.queues * given.queues
                bench.last_cpu_us.clear()
                with clock.running():
                    began = time.perf_counter()
                    bench.rate(
                        "rocketmq",
                        count,
                        schema,
                        nameServer=address,
                        subscribe=f"orders-{given.queues}",
                        pullBatchSize=given.pull_batch,
                        maxPartitions=tasks,
                    )
                    ended = time.perf_counter()
                cpu_s = bench.last_cpu_us[0] * count / 1e6
                return {
                    "messages": count,
                    "seconds": ended - began,
                    "cpu_s": cpu_s,
                    **clock.between(began, ended),
                }

            def tasks(schema: str | None, count: int) -> Run:
                return lambda: read(schema, count)

            for name in names:
                sides = {"1 task": tasks(schemas[name], 1), "2 tasks": tasks(schemas[name], 2)}
                case = f"{CASES[name]}, {given.queues} queues"
                with attempt(failed, name):
                    take_turns(results, case, sides, settings.rounds)


# --- around them


@contextmanager
def attempt(failed: list[str], name: str) -> Iterator[None]:
    """Record a failure, so that the figures of other cases are kept."""
    try:
        yield
    except Exception as error:
        failed.append(f"{name} failed: {error}")
        log_progress(failed[-1])


def take_turns(results: Results, case: str, sides: Mapping[str, Run], rounds: int) -> None:
    """Run each side once per round, in a new order each time. The first round is for warm-up."""
    rows = results.rounds.setdefault(case, {side: [] for side in sides})
    for turn in range(rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            answer = sides[side]()
            name = f"round {turn} of {rounds}" if turn else "warm-up"
            log_progress(f"{case}, {name}, {side}: {rate(answer) / 1000:.0f} k/s, {cpu_us(answer):.2f} us")
            if turn:
                rows[side].append(answer)


def table(results: Results, cores: int) -> Iterator[str]:
    """Return the figures as lines."""

    def percent(case: str, side: str, what: str) -> str:
        if any(answer[what] is None for answer in results.rounds[case][side]):
            return "?"
        value = results.median(case, side, lambda answer: 100 * answer[what] / answer["seconds"] / cores)
        return f"{value:.0f}"

    for case, sides in results.rounds.items():
        one, two = sides
        yield ""
        yield f"{case:<46} {'k msg/s':>8} {'CPU us':>7}   of all cores, %: {'ours':>5} {'broker':>7} {'everything':>11}"
        for side in sides:
            figures = results.median(case, side, rate) / 1000, results.median(case, side, cpu_us)
            ours, theirs, everything = (percent(case, side, f"{what}cpu_s") for what in ("", "broker_", "machine_"))
            yield f"  {side:<44} {figures[0]:>8.1f} {figures[1]:>7.2f} {ours:>24} {theirs:>7} {everything:>11}"
        ratios = results.ratio(case, two, one, rate), results.ratio(case, two, one, cpu_us)
        yield f"  {'2 ÷ 1':<44} {ratios[0]:>8.2f} {ratios[1]:>7.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of small backlogs")
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison (default: 5)")
    parser.add_argument("--queues", type=int, help="queues of the topic, an even number (default: 16)")
    parser.add_argument("--messages", type=int, help="size of the backlog that is consumed (default: 1000000)")
    parser.add_argument("--spark-messages", type=int, help="messages read by a query of Spark (default: 1600000)")
    parser.add_argument("--name-server", help="consume from this running cluster instead of starting a broker")
    parser.add_argument("--json", type=new_file, help="write the figures of every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    settings = QUICK if options.quick else Settings()
    for name in ("rounds", "queues", "messages", "spark_messages"):
        setattr(settings, name, getattr(options, name) or getattr(settings, name))
    if settings.queues % 2:
        parser.error(f"--queues {settings.queues} cannot be shared by two; give an even number")

    facts = environment()
    results, failed = Results(), list[str]()
    with attempt(failed, "consuming"):
        if consumed := [name for name in cases if not name.startswith("spark")]:
            with broker(options.name_server, lifted=True) as cluster:
                for name in consumed:
                    with attempt(failed, name):
                        consume(cluster, settings, results, name)
    with attempt(failed, "Spark"):
        if read := [name for name in cases if name.startswith("spark")]:
            spark(settings, results, read, failed)
    results.rounds = {case: sides for case, sides in results.rounds.items() if all(sides.values())}
    cores = int(facts["cores"])
    server = f"the cluster at {options.name_server}" if options.name_server else f"RocketMQ {NEWEST}, limits lifted"
    print(header(facts))
    print(f"{server}; for Spark a broker that answers from memory; 1 KB; rounds: {settings.rounds}, medians of them")
    print(*table(results, cores), sep="\n")
    print(
        "\n2 ÷ 1: rate, and CPU time per message, of two divided by those of one in the same round."
        f"\nNear 100 % for everything, all {cores} cores are busy. What is neither ours nor the broker's is in the way."
    )
    if options.json:
        found = {"environment": facts, "settings": asdict(settings), "rounds": results.rounds}
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        bars = [
            (case, side, results.median(case, side, rate) / 1000)
            for case, sides in results.rounds.items()
            for side in sides
        ]
        colours = dict(
            zip(("1 process", "1 task", "2 processes", "2 tasks"), 2 * ["tab:gray"] + 2 * ["tab:blue"], strict=True)
        )
        draw_rates(bars, colours, options.plot)
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
