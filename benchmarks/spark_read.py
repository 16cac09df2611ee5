"""How many messages per second does Spark read through the source `rocketmq`, and how much more could it take?

The other sides, in shuffled rounds of one run and one Spark session, are `ready` and `plain`. `ready` yields batches
made before, so it shows the limit of Spark. `plain` is the obvious source: row by row, one pull of a queue after the
other, a connection per task. All write into the sink `noop`. The broker serves from memory, so that it is not the
limit. The case `real` has a real broker, and a loop that only pulls. Ratios are computed inside a round.

Run: python -m benchmarks.spark_read --help
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.arguments import new_file, one_or_more
from benchmarks.consume import BROKER_JVM, BROKER_SETTINGS, Cluster, log_progress
from benchmarks.consume_report import Target
from benchmarks.environment import environment, header
from benchmarks.plots import draw_rates, pyplot
from benchmarks.raw_pull import raw_pull
from benchmarks.recorded_broker import FLOW
from benchmarks.spark_sources import CountingSource, PlainSource, ReadySource
from pyrocket_consumer.spark import register
from pyrocket_consumer.spark.batch_reader import BatchReader
from pyrocket_consumer.spark.data_source import READ_SCHEMA
from pyrocket_consumer.spark.options import parse_source
from tests.real_brokers.cluster import RealCluster
from tests.real_brokers.jars import NEWEST, java_tool

ROOT = Path(__file__).parent.parent
CASES = ("all", "columns", "real", "empty", "planning")
EIGHT = (
    "topic string, brokerName string, queueId int, queueOffset long, tags string, keys string, body binary, "
    "storeTimestamp timestamp"
)
TWO = "queueOffset long, body binary"
PLAIN_SHARE = 8  # it reads this many times fewer messages, or a round takes minutes
WARM_UP_BATCHES = 5


@dataclass(slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 5
    queues: int = 16
    messages: int = 1_600_000
    real_messages: int = 1_600_000
    pull_batch: int = 32
    micro_batches: int = 60
    planned_queues: int = 10_000
    cases: tuple[str, ...] = CASES
    tasks: int | None = None


QUICK = Settings(rounds=2, messages=800_000, real_messages=800_000, micro_batches=20)


@dataclass(slots=True)
class Results:
    """All figures: case -> side -> one figure per round, in thousands per second or the unit of the case.

    `cpu_us` has the CPU time per message of Spark and its workers, without the broker.
    """

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cpu_us: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def median(self, case: str, side: str) -> float:
        return statistics.median(self.figures[case][side])

    def ratio(self, case: str, side: str, other: str) -> float:
        """Return the median of the ratios of the rounds."""
        pairs = zip(self.figures[case][side], self.figures[case][other], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Bench:
    """The environment of a case."""

    spark: SparkSession
    settings: Settings
    results: Results
    address: str
    records: Path
    last_cpu_us: list[float] = field(default_factory=list)

    def compete(self, case: str, sides: Mapping[str, Callable[[], float]], unit: str = "k/s") -> None:
        """Run all sides once per round, in a new order each time. The first round is for warm-up."""
        rows = self.results.figures.setdefault(case, {side: [] for side in sides})
        costs = self.results.cpu_us.setdefault(case, {side: [] for side in sides})
        for turn in range(self.settings.rounds + 1):
            for side in random.sample(list(sides), len(sides)):
                self.last_cpu_us.clear()
                figure = sides[side]()
                name = f"round {turn} of {self.settings.rounds}" if turn else "warm-up"
                cost = "".join(f", {each:.2f} us of CPU per message" for each in self.last_cpu_us)
                log_progress(f"{case}, {name}, {side}: {figure:.4g} {unit}{cost}")
                if turn:
                    rows[side].append(figure)
                    costs[side] += self.last_cpu_us

    def rate(self, format_: str, count: int, schema: str | None, /, **options: object) -> float:
        """Return thousands of messages per second of a batch query into `noop`."""
        reader = self.spark.read.format(format_).options(**{name: str(value) for name, value in options.items()})
        frame = (reader.schema(schema) if schema else reader).load()
        began, before = time.perf_counter(), spark_cpu_s()
        frame.write.format("noop").mode("overwrite").save()
        taken = time.perf_counter() - began
        self.last_cpu_us.append((spark_cpu_s() - before) / count * 1e6)
        return count / taken / 1000


def task_options(settings: Settings) -> dict[str, int]:
    """Return the option that limits the number of tasks of a query."""
    return {} if settings.tasks is None else {"maxPartitions": settings.tasks}


def spark_cpu_s() -> float:
    """Return the CPU time of Spark: its Java process, and the Python workers below it."""
    parents, used = dict[int, int](), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                _, _, rest = entry.joinpath("stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended
            fields = rest.split()
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15]))  # with ended children
    java = {pid for pid in parents if parents[pid] == os.getpid() and "java" in Path(f"/proc/{pid}/comm").read_text()}
    ours, more = set[int](), java
    while more:
        ours |= more
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
    return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


# --- the cases


def all_columns(bench: Bench) -> None:
    """Every column, as in a query without a schema."""
    _compare_with_ready(bench, "all 16 columns", None, with_plain=True)


def columns(bench: Bench) -> None:
    """Only some columns."""
    _compare_with_ready(bench, "8 columns, no map", EIGHT, with_plain=False)
    _compare_with_ready(bench, "queueOffset and body", TWO, with_plain=False)


def _compare_with_ready(bench: Bench, case: str, schema: str | None, *, with_plain: bool) -> None:
    settings = bench.settings
    topic, queues, per_queue = f"orders-{settings.queues}", settings.queues, settings.messages // settings.queues
    few = per_queue // PLAIN_SHARE
    sides: dict[str, Callable[[], float]] = {
        "rocketmq": lambda: bench.rate(
            "rocketmq",
            per_queue * queues,
            schema,
            nameServer=bench.address,
            subscribe=topic,
            pullBatchSize=settings.pull_batch,
            **task_options(settings),
        ),
        "ready": lambda: bench.rate(
            "ready", per_queue * queues, schema, records=bench.records, queues=queues, messages=per_queue
        ),
    }
    if with_plain:
        sides["plain"] = lambda: bench.rate(
            "plain", few * queues, schema, nameServer=bench.address, topic=topic, queues=queues, messages=few
        )
    bench.compete(case, sides)
    bench.results.targets.append(Target(f"{case}: rate ÷ ready", 0.7, bench.results.ratio(case, "rocketmq", "ready")))
    if with_plain:
        bench.results.targets.append(Target(f"{case}: rate ÷ plain", 5, bench.results.ratio(case, "rocketmq", "plain")))


def real(bench: Bench) -> None:
    """A real broker with its default limits per pull, compared with a loop that only pulls."""
    settings, case = bench.settings, f"real broker {NEWEST}, {bench.settings.queues} queues"
    queues, messages = settings.queues, settings.real_messages
    log_progress(f"starting a name server and a broker, RocketMQ {NEWEST}")
    with RealCluster(settings=BROKER_SETTINGS, jvm_options=BROKER_JVM) as started:
        cluster = Cluster(started.name_server)
        topic = cluster.topic(queues, messages)

        def bare() -> float:
            began = time.perf_counter()
            where = cluster.broker_address, cluster.broker_name, "bench-raw", topic, queues
            raw_pull(*where, settings.pull_batch, messages, lambda count: None)
            return messages / (time.perf_counter() - began) / 1000

        def ours(schema: str | None) -> Callable[[], float]:
            return lambda: bench.rate(
                "rocketmq",
                messages,
                schema,
                nameServer=started.name_server,
                subscribe=topic,
                pullBatchSize=settings.pull_batch,
                **task_options(settings),
            )

        bench.compete(case, {"rocketmq": ours(None), "rocketmq, 2 columns": ours(TWO), "raw": bare})


def empty(bench: Bench) -> None:
    """Micro-batches with one message each, compared with a Python source that only counts."""
    case = "micro-batch of one row"

    def duration_ms(format_: str, **options: str) -> float:
        with tempfile.TemporaryDirectory() as checkpoint:
            frame = bench.spark.readStream.format(format_).options(**options).load()
            query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
            try:
                durations = dict[int, float]()
                while len(durations) < WARM_UP_BATCHES + bench.settings.micro_batches:
                    for progress in query.recentProgress:
                        if progress["numInputRows"]:
                            durations[progress["batchId"]] = progress["durationMs"]["triggerExecution"]
                    if error := query.exception():
                        raise error
                    time.sleep(0.2)
            finally:
                query.stop()
        return statistics.median(list(durations.values())[WARM_UP_BATCHES:])

    sides = {
        "rocketmq": lambda: duration_ms(
            "rocketmq",
            nameServer=bench.address,
            subscribe=f"{FLOW}1",
            startingOffsets="earliest",
            planningIntervalMs="0",
        ),
        "counting": lambda: duration_ms("counting"),
    }
    bench.compete(case, sides, "ms")
    bench.results.targets.append(
        Target(f"{case}: time ÷ counting", 1.5, bench.results.ratio(case, "rocketmq", "counting"), False)
    )


def planning(bench: Bench) -> None:
    """The work of the driver before the tasks start: find the queues, fetch their end offsets, make tasks."""
    queues = bench.settings.planned_queues
    options = {"nameserver": bench.address, "subscribe": f"orders-{queues}"}

    def plan() -> float:
        began = time.perf_counter()
        partitions = BatchReader(parse_source(options, streaming=False), READ_SCHEMA).partitions()
        taken = time.perf_counter() - began
        assert len(partitions) >= 1
        return taken

    bench.compete(f"planning of {queues:,} queues", {"rocketmq": plan}, "s")


MEASURES = dict(zip(CASES, (all_columns, columns, real, empty, planning), strict=True))


# --- setup


@contextmanager
def recorded_broker(settings: Settings, records: Path) -> Iterator[str]:
    """Run the broker that serves from memory. Yield its address."""
    log_progress("recording messages")
    per_queue = settings.messages // settings.queues
    arguments = [str(per_queue), str(settings.pull_batch), str(records)]
    command = [sys.executable, "-m", "benchmarks.recorded_broker", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)


@contextmanager
def session(cores: int) -> Iterator[SparkSession]:
    """Run Spark in this process and its children, with this interpreter."""
    log_progress("starting Spark")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "PYTHONPATH": path}
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{cores}]").appName("benchmarks.spark_read")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "FATAL",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        register(spark)
        for source in (ReadySource, PlainSource, CountingSource):
            spark.dataSource.register(source)
        yield spark
    finally:
        spark.stop()


def table(results: Results) -> Iterator[str]:
    """Return the figures as lines."""
    for case, sides in results.figures.items():
        yield ""
        is_rate = not case.startswith(("micro-batch", "planning"))
        unit = "k msg/s" if is_rate else "ms" if case.startswith("micro-batch") else "s"
        others = [side for side in sides if side in ("ready", "plain", "raw", "counting")]
        ratio_heads = "".join(f"   ÷ {other:<8}" for other in others)
        yield f"{case:<40} {unit:>9} {'min':>9} {'max':>9} {'CPU us':>7}{ratio_heads}".rstrip()
        for side, figures in sides.items():
            costs = results.cpu_us.get(case, {}).get(side)
            cpu = f"{statistics.median(costs):7.2f}" if costs else " " * 7
            ratio_cells = "".join(f"   {results.ratio(case, side, other):<10.2f}" for other in others)
            middle, low, high = statistics.median(figures), min(figures), max(figures)
            yield f"  {side:<38} {middle:>9.4g} {low:>9.4g} {high:>9.4g} {cpu}{ratio_cells}".rstrip()


def plot(results: Results, path: Path) -> None:
    """Draw messages per second of every side."""
    bars = [
        (case, side, results.median(case, side))
        for case, sides in results.figures.items()
        for side in sides
        if not case.startswith(("micro-batch", "planning"))
    ]
    colours = {"rocketmq": "tab:blue", "ready": "tab:gray", "raw": "tab:gray", "plain": "tab:orange"}
    draw_rates(bars, colours, path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_read", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds of small backlogs")
    parser.add_argument("--cases", help=f"comma-separated, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison, after one to warm up (5)")
    parser.add_argument("--messages", type=int, help="messages read by a query (default: 1600000)")
    parser.add_argument("--queues", type=int, help="queues of the topic, each a task (default: 16)")
    parser.add_argument("--pull-batch", type=int, help="messages per pull, requested and returned (default: 32)")
    parser.add_argument("--cores", type=int, default=2, help="tasks at once (default: 2)")
    parser.add_argument("--tasks", type=int, help="tasks of a query of this source (default: one per queue)")
    parser.add_argument("--pure", action="store_true", help="without the C extension: PYROCKET_PURE=1 in every worker")
    parser.add_argument("--json", type=new_file, help="write every round's figures to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing

    settings = replace(QUICK) if options.quick else Settings()
    for name in ("rounds", "messages", "queues", "pull_batch", "tasks"):
        setattr(settings, name, getattr(options, name) or getattr(settings, name))
    settings.cases = tuple(options.cases.split(",")) if options.cases else CASES
    if unknown := set(settings.cases) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")

    facts = environment(java=java_tool("java"))
    if options.pure:
        os.environ["PYROCKET_PURE"] = "1"  # for child processes, because this process has imported the package already
        facts["accelerated"] = False
    facts |= {name: metadata.version(name) for name in ("pyspark", "pyarrow", "numpy")}
    results, failed = Results(), list[str]()
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory, "records")
        with recorded_broker(settings, records) as address, session(options.cores) as spark:
            bench = Bench(spark, settings, results, address, records)
            for case in settings.cases:
                try:
                    MEASURES[case](bench)
                except Exception as error:
                    failed.append(f"case {case} failed: {error}")
                    log_progress(failed[-1])
    print(header(facts))
    print(
        f"PySpark {facts['pyspark']}, pyarrow {facts['pyarrow']}, numpy {facts['numpy']}, local[{options.cores}]; "
        f"the broker answers from memory, {settings.pull_batch} messages per pull; 1 KB bodies with seven properties; "
        f"rounds: {settings.rounds}, medians of them"
    )
    results.figures = {case: sides for case, sides in results.figures.items() if all(sides.values())}
    print(*table(results), sep="\n")
    print(f"\n{'target':<62} {'wanted':<9} {'measured':>9}")
    print(*results.targets, sep="\n")
    if options.json:
        found = {
            "environment": facts,
            "settings": asdict(settings),
            "figures": results.figures,
            "cpu_us": results.cpu_us,
            "targets": [{**asdict(target), "met": target.met} for target in results.targets],
        }
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        plot(results, options.plot)
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
