"""Show windowed counts: messages -> stream -> counts per window and tag -> topic -> table.

Everything runs on this host, on an embedded cluster unless you name a name server. The sink writes the counts to a
topic. The demo reads them back, and compares them with the messages that it sent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli.arguments import add_name_server, add_output, positive_number
from pyrocket_consumer.cli.streams import Progress, print_table
from pyrocket_consumer.consumer import PushConsumer
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.producer import Producer
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.spark import register
from pyrocket_consumer.spark.progress import lag
from pyrocket_consumer.spark.sink_rows import BATCH_ID, PARTITION, QUERY_ID, ROW

_EXAMPLES = """\
Examples:
  python -m pyrocket_consumer.spark.demo                        # on an embedded cluster
  python -m pyrocket_consumer.spark.demo -n 127.0.0.1:9876      # on your cluster; makes two topics and removes them
  python -m pyrocket_consumer.spark.demo --seconds 30 --rate 2000
"""

TAGS = ("paid", "open", "refunded")
END_TAG = "end"  # tag of the messages that close the last window
WINDOW_S = 2
MAX_LATENESS_S = 3  # how late a message may arrive and still count
QUEUES = 4
QUERY_TIMEOUT_S = 120.0


class Demo:
    """One run: a thread sends orders, a query counts them by window and tag."""

    def __init__(self, spark: SparkSession, name_server: str, options: argparse.Namespace, checkpoint: Path) -> None:
        self._spark, self._name_server, self._checkpoint = spark, name_server, checkpoint
        self._seconds, self._rate = options.seconds, options.rate
        self._print_progress = Progress(quiet=options.output == "json").print_line
        run = f"{os.getpid()}-{int(time.time())}"
        self._orders, self._counts = f"pyrocket-demo-orders-{run}", f"pyrocket-demo-counts-{run}"
        self._sent: Counter[str] = Counter()
        self._all_sent, self._stop = threading.Event(), threading.Event()
        self._table = Table()

    def run(self) -> dict[str, Any]:
        """Run the demo, and return the counts."""
        with Admin(name_server=self._name_server) as admin:
            for topic in (self._orders, self._counts):
                admin.create_topic(topic, queues=QUEUES)
            try:
                return self._run()
            finally:
                for topic in (self._orders, self._counts):
                    admin.delete_topic(topic)

    def _run(self) -> dict[str, Any]:
        self._print_progress("starting the query; its first batch takes some seconds")
        query = (
            self._windows()
            .writeStream.format("rocketmq")
            .option("nameServer", self._name_server)
            .option("topic", self._counts)
            .option("checkpointLocation", str(self._checkpoint))
            .queryName("counts")
            .start()
        )
        sending = threading.Thread(target=self._send, name="demo-producer", daemon=True)
        sending.start()
        try:
            with PushConsumer(f"{self._counts}-table", name_server=self._name_server, consume_from="first") as consumer:
                consumer.subscribe(self._counts, self._table)
                self._watch(query)
                self._stop.set()
                sending.join(10)
                query.processAllAvailable()  # stopping within a batch would log an error
        finally:
            self._stop.set()
            query.stop()
        return self._result()

    def _windows(self) -> DataFrame:
        """Return the stream of counts: a row for each window and tag, once no more message can count in it."""
        orders = (
            self._spark.readStream.format("rocketmq")
            .option("nameServer", self._name_server)
            .option("subscribe", self._orders)
            .option("startingOffsets", "earliest")
            .schema("tags string, bornTimestamp timestamp")  # the source reads only these columns
            .load()
        )
        counted = (
            orders.withWatermark("bornTimestamp", f"{MAX_LATENESS_S} seconds")
            .groupBy(f.window("bornTimestamp", f"{WINDOW_S} seconds").alias("window"), "tags")
            .count()
        )
        return counted.select(
            f.to_json(f.struct(f.col("window.start").alias("from"), "tags", "count")).alias("body"),
            "tags",
            f.col("tags").alias("shardingKey"),
        )

    def _send(self) -> None:
        with Producer(name_server=self._name_server) as producer:
            began, number = time.monotonic(), 0
            while not self._stop.is_set() and (elapsed := time.monotonic() - began) < self._seconds:
                while number < elapsed * self._rate:
                    (tag,) = random.choices(TAGS, (6, 3, 1))
                    producer.send(self._orders, b"an order", tags=tag)
                    self._sent[tag] += 1
                    number += 1
                time.sleep(0.01)
            self._all_sent.set()
            while not self._stop.wait(WINDOW_S + MAX_LATENESS_S):
                producer.send(self._orders, b"-", tags=END_TAG)  # its later time closes the windows before it

    def _watch(self, query: Any) -> None:
        """Print progress until every message is counted, or nothing has changed for two minutes."""
        state, since = None, time.monotonic()
        while (counted := self._table.total()) < sum(self._sent.values()) or not self._all_sent.is_set():
            if (error := query.exception()) is not None:
                raise RocketError(f"the query ended: {error}")
            progress = query.lastProgress
            behind = lag(progress)
            now = (sum(self._sent.values()), counted, progress["batchId"] if progress else None)
            if now != state:
                state, since = now, time.monotonic()
            elif time.monotonic() - since > QUERY_TIMEOUT_S:
                self._print_progress(f"nothing has moved for {QUERY_TIMEOUT_S:g} s")
                return
            stage = f"batch {now[2]}" if progress else query.status["message"].lower()
            self._print_progress(
                f"sent {now[0]:>6}   counted in closed windows {now[1]:>6}   "
                f"behind {behind.total if behind else '-':>5}   {stage}",
                is_transient=True,
            )
            time.sleep(0.25)

    def _result(self) -> dict[str, Any]:
        counted: Counter[str] = Counter()
        for row in self._table.rows():
            counted[row["tag"]] += row["count"]
        return {
            "windows": self._table.rows(),
            "repeated": self._table.repeated,
            "tags": [{"tag": tag, "sent": self._sent[tag], "counted": counted[tag]} for tag in TAGS],
        }


class Table:
    """A listener that collects the counts. The sink's marks identify duplicates, which count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, ...], dict[str, Any]] = {}
        self.repeated = 0

    def __call__(self, message: Message) -> None:
        if message.tags == END_TAG:
            return
        row = json.loads(message.body)
        key = tuple(message.properties[name] for name in (QUERY_ID, BATCH_ID, PARTITION, ROW))
        with self._lock:
            self.repeated += key in self._rows
            self._rows[key] = {"window": row["from"], "tag": row["tags"], "count": row["count"]}

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts so far, by window and tag."""
        with self._lock:
            return sorted(self._rows.values(), key=lambda row: (row["window"], row["tag"]))

    def total(self) -> int:
        """Return the number of messages counted so far."""
        return sum(row["count"] for row in self.rows())


def report(result: dict[str, Any], output: str) -> int:
    """Print the counts; return the exit code, 3 if they differ from the messages sent."""
    right = all(row["sent"] == row["counted"] for row in result["tags"])
    if output == "json":
        print(json.dumps(result, indent=2))
        return 0 if right else 3
    for title, heads, rows in (
        (f"Windows of {WINDOW_S} s, read from the topic they were written to", ("window", "tag", "count"), "windows"),
        ("All windows", ("tag", "sent", "counted"), "tags"),
    ):
        print_table(title, heads, [[row[head] for head in heads] for row in result[rows]])
    print("every message was counted once" if right else "counts are wrong: this must not happen, please report it")
    return 0 if right else 3


def session() -> SparkSession:
    """Return a small quiet session of Spark in this process."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master("local[2]").appName("pyrocket_consumer demo")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pyrocket_consumer.spark.demo",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_name_server(parser, "NAMESRV_ADDR, else an embedded cluster")
    add_output(parser)
    parser.add_argument("--seconds", type=positive_number, default=10, help="how long to send (default: 10)")
    parser.add_argument("--rate", type=positive_number, default=400, help="messages per second (default: 400)")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        name_server = options.name_server or os.environ.get("NAMESRV_ADDR")
        if not name_server:
            from pyrocket_consumer.testing import EmbeddedCluster

            name_server = stack.enter_context(EmbeddedCluster(long_poll_tick_s=0.5)).name_server
        checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyrocket-demo-")))
        spark = session()
        stack.callback(spark.stop)
        register(spark)
        result = Demo(spark, name_server, options, checkpoint).run()
    return report(result, options.output)


if __name__ == "__main__":
    sys.exit(main())
