"""How many rows per second does the sink write, compared with the same asynchronous sends outside Spark?

Both send the same messages with the same limit of unacknowledged sends to the same server, in shuffled rounds of one
run. The server repeats a recorded response, so that it is not the limit; `--name-server` measures with a real
cluster. Run: python -m benchmarks.spark_write --help
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_file, one_or_more
from benchmarks.environment import environment, header
from benchmarks.plots import pyplot
from pyrocket_consumer import Admin, Producer

ROOT = Path(__file__).parent.parent
BODY_BYTES = 1024
QUEUES = 8
WANTED = 0.8


def log_progress(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


@contextmanager
def replies(topic: str) -> Iterator[str]:
    """Run the server that repeats a recorded response. Yield the address of its name server."""
    command = [sys.executable, "-m", "benchmarks.send_replies", topic, str(QUEUES)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise RuntimeError("the server did not start")
        yield address
        server.stdin.close()


@contextmanager
def cluster(name_server: str | None, topic: str) -> Iterator[str]:
    if name_server is None:
        with replies(topic) as address:
            yield address
        return
    with Admin(name_server=name_server) as admin:
        admin.create_topic(topic, queues=QUEUES)
        try:
            yield name_server
        finally:
            admin.delete_topic(topic)


def send_outside(name_server: str, topic: str, rows: int, in_flight: int) -> float:
    """Send `rows` messages asynchronously, and wait for all responses. Return the seconds."""
    bodies = [b"%d" % number + b"x" * (BODY_BYTES - len(str(number))) for number in range(10_000)]
    with Producer(name_server=name_server, max_in_flight_messages=in_flight) as producer:
        producer.send(topic, bodies[0])
        began = time.perf_counter()
        under_way: deque[Future[Any]] = deque()
        for number in range(rows):
            if len(under_way) == in_flight:
                under_way.popleft().result()
            body = bodies[number % len(bodies)]  # separate objects, as those of rows
            under_way.append(producer.send_async(topic, body, tags="paid", keys=str(number)))
        for future in under_way:
            future.result()
        return time.perf_counter() - began


def outside(name_server: str, topic: str, rows: int, in_flight: int) -> float:
    """Send in a new process."""
    arguments = ["--outside", name_server, topic, str(rows), str(in_flight)]
    command = [sys.executable, "-m", "benchmarks.spark_write", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=True)
    return float(done.stdout)


class SparkSide:
    """A Spark session in this process; `write` saves a DataFrame."""

    def __init__(self, tasks: int) -> None:
        from pyspark.sql import SparkSession

        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.tasks = tasks
        self.session = (
            SparkSession.builder.master(f"local[{tasks}]")
            .appName("spark_write")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .getOrCreate()
        )

    def write(self, name_server: str, topic: str, rows: int, in_flight: int, marks: bool) -> float:
        """Save `rows` rows. Return the seconds of `save()`."""
        from pyspark.sql import functions as f

        frame = self.session.range(0, rows, 1, self.tasks).select(
            f.encode(f.repeat(f.lit("x"), BODY_BYTES), "UTF-8").alias("body"),
            f.lit("paid").alias("tags"),
            f.col("id").cast("string").alias("keys"),
        )
        began = time.perf_counter()
        (
            frame.write.format("rocketmq")
            .mode("append")
            .option("nameServer", name_server)
            .option("topic", topic)
            .option("maxInFlight", in_flight)
            .option("sendTimeoutMs", 30_000)
            .option("dedupProperties", marks)
            .save()
        )
        return time.perf_counter() - began


def plot(rates: dict[str, list[float]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 3))
    axes.boxplot(list(rates.values()), orientation="horizontal", tick_labels=list(rates))
    axes.set_xlim(left=0)
    axes.set_xlabel("messages per second, each round")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    if sys.argv[1:2] == ["--outside"]:
        name_server, topic, rows, in_flight = sys.argv[2:]
        print(send_outside(name_server, topic, int(rows), int(in_flight)))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_write", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of 30 000 rows")
    parser.add_argument("--rounds", type=one_or_more, help="rounds (default: 7)")
    parser.add_argument("--rows", type=int, help="rows of each round (default: 150000)")
    parser.add_argument("--in-flight", type=int, default=256, help="unacknowledged sends per task (default: 256)")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of Spark at once (default: 2)")
    parser.add_argument("--name-server", help="use this running cluster; the topic is removed again")
    parser.add_argument("--json", type=new_file, help="write every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing
    rounds = options.rounds or (2 if options.quick else 7)
    rows = options.rows or (30_000 if options.quick else 150_000)

    facts = environment()
    facts["pyspark"] = metadata.version("pyspark")
    topic = f"bench-{secrets.token_hex(4)}"
    log_progress("starting Spark")
    spark = SparkSide(options.tasks)
    rates: dict[str, list[float]] = {"async sends": [], "spark sink": [], "spark sink, no marks": []}
    with cluster(options.name_server, topic) as name_server:
        sides = {
            "async sends": lambda: outside(name_server, topic, rows, options.in_flight),
            "spark sink": lambda: spark.write(name_server, topic, rows, options.in_flight, True),
            "spark sink, no marks": lambda: spark.write(name_server, topic, rows, options.in_flight, False),
        }
        log_progress("warming up")
        spark.write(name_server, topic, rows // 2, options.in_flight, True)
        for number in range(rounds):
            for side in random.sample(list(sides), len(sides)):
                rate = rows / sides[side]()
                rates[side].append(rate)
                log_progress(f"round {number + 1} of {rounds}: {side} {rate:,.0f} messages/s")
        spark.session.stop()  # its workers have connections to the cluster

    print(header(facts) + f", PySpark {facts['pyspark']}")
    server = f"the cluster at {options.name_server}" if options.name_server else "a server that repeats one answer"
    print(
        f"{rows:,} messages of {BODY_BYTES} bytes with tag and key, "
        f"at most {options.in_flight} unacknowledged per task, {options.tasks} tasks, {rounds} rounds, {server}"
    )
    print(f"\n{'':<22} {'messages/s, median':>19} {'least':>9} {'most':>9} {'÷ async sends':>14}")
    ratios = {}
    for side, found in rates.items():
        # Inside each round, because other load of the machine slows both.
        ratios[side] = statistics.median(one / base for one, base in zip(found, rates["async sends"], strict=True))
        middle = statistics.median(found)
        print(f"{side:<22} {middle:>19,.0f} {min(found):>9,.0f} {max(found):>9,.0f} {ratios[side]:>14.2f}")
    met = ratios["spark sink"] >= WANTED
    print(f"\ntarget: spark sink ÷ async sends ≥ {WANTED}: {ratios['spark sink']:.2f}, {'met' if met else 'missed'}")
    if options.json:
        found_all = {"environment": facts, "rows": rows, "tasks": options.tasks, "rates": rates, "ratios": ratios}
        options.json.write_text(json.dumps(found_all, indent=1))
    if options.plot:
        plot(rates, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
