"""How much faster is the end of a topic read if the filter on `storeTimestamp` is pushed to the source?

The query reads the last hundredth of the rows, by their store time. The sides run it in shuffled rounds of one run and
one Spark session:

* `pushed`: with the option pushFilters
* `whole`: without it, so that Spark reads all rows and filters them
* `by hand`: with startingTimestamp, which needs no filter

Ratios are computed inside a round. The broker makes small messages when they are pulled, 32 at a time. Their store
times are spread over a day.

Run: python -m benchmarks.spark_pushdown --help
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata

from pyspark.sql import SparkSession

from benchmarks.arguments import new_file, one_or_more
from benchmarks.consume import log_progress
from benchmarks.consume_report import Target
from benchmarks.environment import environment, header
from benchmarks.spark_read import ROOT, session
from benchmarks.timed_broker import FIRST_MS
from tests.real_brokers.jars import java_tool

DAY_MS = 86_400_000
SHARE = 100  # the query reads the last of this number of parts


@contextmanager
def timed_broker(per_queue: int, step_ms: int) -> Iterator[str]:
    """Run the broker. Yield its address."""
    command = [sys.executable, "-m", "benchmarks.timed_broker", str(per_queue), str(step_ms)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def measure(
    spark: SparkSession, address: str, queues: int, per_queue: int, step_ms: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each side, by round."""
    from_ms = FIRST_MS + (per_queue - per_queue // SHARE) * step_ms
    wanted = queues * (per_queue // SHARE)

    def seconds(condition: str, **options: object) -> float:
        began = time.perf_counter()
        reader = spark.read.format("rocketmq").option("nameServer", address).option("subscribe", f"orders-{queues}")
        rows = reader.options(**{name: str(value) for name, value in options.items()}).load()
        found = rows.where(condition).count()
        taken = time.perf_counter() - began
        if found != wanted:
            raise AssertionError(f"{found} rows instead of {wanted}")
        return taken

    recent = f"storeTimestamp >= timestamp_millis({from_ms})"
    sides: dict[str, Callable[[], float]] = {
        "pushed": lambda: seconds(recent, pushFilters="true"),
        "whole": lambda: seconds(recent),
        "by hand": lambda: seconds("true", startingTimestamp=from_ms),
    }
    figures = {side: list[float]() for side in sides}
    for turn in range(rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            if turn == 0 and side == "whole":
                continue  # it warms up the same code as the others
            taken = sides[side]()
            log_progress(f"{f'round {turn} of {rounds}' if turn else 'warm-up'}, {side}: {taken:.3g} s")
            if turn:
                figures[side].append(taken)
    return figures


def ratio(figures: dict[str, list[float]], side: str, other: str) -> float:
    return statistics.median(theirs / ours for ours, theirs in zip(figures[side], figures[other], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_pushdown", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 000 000 rows, 1 round")
    parser.add_argument("--rows", type=int, help="rows in the topic (default: 10000000)")
    parser.add_argument("--rounds", type=one_or_more, help="rounds, after one to warm up (default: 3)")
    parser.add_argument("--queues", type=int, default=16, help="queues of the topic, each a task (default: 16)")
    parser.add_argument("--cores", type=int, default=2, help="tasks at once (default: 2)")
    parser.add_argument("--json", type=new_file, help="write every round's figures to this file")
    options = parser.parse_args()
    rows = options.rows or (1_000_000 if options.quick else 10_000_000)
    rounds = options.rounds or (1 if options.quick else 3)
    per_queue = rows // options.queues
    step_ms = max(1, DAY_MS // per_queue)

    facts = environment(java=java_tool("java"))
    facts |= {name: metadata.version(name) for name in ("pyspark", "pyarrow", "numpy")}
    with timed_broker(per_queue, step_ms) as address, session(options.cores) as spark:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        figures = measure(spark, address, options.queues, per_queue, step_ms, rounds)
    targets = [Target("whole ÷ pushed", 20, ratio(figures, "pushed", "whole"))]
    print(header(facts))
    print(
        f"PySpark {facts['pyspark']}, pyarrow {facts['pyarrow']}, local[{options.cores}]; the last of {SHARE} parts of "
        f"{per_queue * options.queues} rows in {options.queues} queues; rounds: {rounds}, medians of them"
    )
    print(f"\n{'side':<20} {'s':>9} {'min':>9} {'max':>9}")
    for side, seconds in figures.items():
        print(f"{side:<20} {statistics.median(seconds):>9.3g} {min(seconds):>9.3g} {max(seconds):>9.3g}")
    print(f"pushed ÷ by hand: {ratio(figures, 'by hand', 'pushed'):.2f}")
    print(f"\n{'target':<62} {'wanted':<9} {'measured':>9}")
    print(*targets, sep="\n")
    if options.json:
        found = {
            "environment": facts,
            "rows": per_queue * options.queues,
            "seconds": figures,
            "targets": [{**asdict(target), "met": target.met} for target in targets],
        }
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
