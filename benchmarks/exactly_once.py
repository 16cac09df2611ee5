"""How many messages per second reach SQLite and PostgreSQL if effects and offsets commit together?

    python -m benchmarks.exactly_once [--quick] [--json FILE] [--plot PNG]

The sides insert the same rows, in shuffled rounds of one run, each a process of its own with empty tables:

* `loop`: no messages; a loop inserts the rows in batches of the same size, and commits each
* `by hand`: the same, with a statement that updates one row of a table of offsets before each commit
* `offsets`: a consumer of one queue, or of four, whose listener is in a transaction of `DatabaseOffsets`
* `ids`: as `offsets`, but with offsets at the broker and a table of processed ids. Each message has a transaction with
  one row of that table and one effect, as in a listener that is called once per message

An embedded broker runs in a process of its own. Ratios are computed inside a round. PostgreSQL is started for the run,
with its default durability, on loopback.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text

from benchmarks.arguments import new_file, one_or_more
from benchmarks.environment import environment, header
from benchmarks.plots import draw_rates
from pyrocket_consumer import Message, PushConsumer
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.testing import EmbeddedCluster
from tests.databases import SERVERS, running

QUESTION = (__doc__ or "").partition("\n")[0]
TOPIC = "orders"
TIMEOUT_S = 300.0
WARM = 0.1  # of all messages arrive before the clock starts
SIDES = ("loop", "by hand", "offsets", "ids")
COMPARED = ("loop", "by hand", "ids")
QUEUES = (1, 4)
MAX_IDS = 4000
"""The number of messages for the side with a transaction per message."""
COLOURS = {"loop": "tab:gray", "by hand": "tab:cyan", "offsets": "tab:blue", "ids": "tab:orange"}
INSERT = text("INSERT INTO ledger VALUES (:queue, :id, :amount)")
UPDATE = text("UPDATE progress SET next = :next WHERE queue_id = :queue AND next <= :first")


def serve(messages: int, queues: int) -> None:
    """Run a broker with this number of messages until standard input ends."""
    with EmbeddedCluster(record_limit=1) as cluster:
        cluster.create_topic(TOPIC, queues=queues)
        cluster.send(TOPIC, b"x" * 100, count=messages)
        print(cluster.name_server, flush=True)
        sys.stdin.read()


@contextmanager
def broker(messages: int, queues: int) -> Iterator[str]:
    """Run a broker in a process of its own. Yield its name server."""
    command = [sys.executable, "-m", "benchmarks.exactly_once", "--serve", f"{messages},{queues}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


class Clock:
    """Counts messages, and measures the time from the end of the warm-up to the last message."""

    def __init__(self, messages: int) -> None:
        self._begin, self._end = int(messages * WARM), messages
        self._count = self._counted_from = 0
        self._began = 0.0
        self._lock = threading.Lock()
        self.rate = 0.0
        self.done = threading.Event()

    def add(self, count: int) -> None:
        """Count more committed messages."""
        with self._lock:
            self._count += count
            if not self._began and self._count >= self._begin:
                self._began, self._counted_from = time.perf_counter(), self._count
            if self._count >= self._end:
                self.rate = (self._count - self._counted_from) / (time.perf_counter() - self._began)
                self.done.set()


def row(message: Message) -> dict[str, int]:
    return {"queue": message.queue.queue_id, "id": message.queue_offset, "amount": len(message.body)}


def run_side(side: str, url: str, batch: int, messages: int, name_server: str) -> float:
    """Insert the rows. Return the number per second."""
    if side == "ids":
        messages = min(messages, MAX_IDS)
    engine, clock = create_engine(url), Clock(messages)
    offsets = DatabaseOffsets(engine)
    with engine.begin() as connection:
        for table in ("ledger", "processed", "pyrocket_offsets"):
            connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
        keys = "PRIMARY KEY(queue_id, id)"
        connection.execute(text(f"CREATE TABLE ledger(queue_id BIGINT, id BIGINT, amount BIGINT, {keys})"))
        connection.execute(text("CREATE TABLE processed(id VARCHAR(64) PRIMARY KEY)"))
    offsets.create_tables()
    if side in ("loop", "by hand"):
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS progress"))
            connection.execute(text("CREATE TABLE progress(queue_id BIGINT PRIMARY KEY, next BIGINT)"))
            connection.execute(text("INSERT INTO progress VALUES (0, 0)"))
        for start in range(0, messages, batch):
            rows = [{"queue": 0, "id": number, "amount": 100} for number in range(start, min(start + batch, messages))]
            with engine.begin() as connection:
                connection.execute(INSERT, rows)
                if side == "by hand":
                    connection.execute(UPDATE, {"queue": 0, "first": start, "next": start + len(rows)})
            clock.add(len(rows))
        return clock.rate

    def book(given: list[Message] | Message, connection: Connection) -> None:
        connection.execute(INSERT, [row(message) for message in (given if isinstance(given, list) else [given])])

    exactly_once = offsets.exactly_once(book)

    def with_offsets(given: list[Message] | Message) -> Any:
        result = exactly_once(given)
        clock.add(len(given) if isinstance(given, list) else 1)
        return result

    def with_ids(given: list[Message] | Message) -> None:
        for message in given if isinstance(given, list) else [given]:
            with engine.begin() as connection:
                known = text("SELECT 1 FROM processed WHERE id = :id")
                if not connection.execute(known, {"id": message.message_id}).all():
                    connection.execute(text("INSERT INTO processed VALUES (:id)"), {"id": message.message_id})
                    connection.execute(INSERT, row(message))
            clock.add(1)

    consumer = PushConsumer(
        f"{side}-{random.getrandbits(40):x}",
        name_server=name_server,
        orderly=True,
        consume_from="first",
        listener_batch_size=batch,
        pull_batch_size=256,
        max_cached_messages=2 * messages + 1000,
        offset_store=None if side == "ids" else offsets,
    )
    gate = threading.Event()
    consumer.subscribe(TOPIC, behind(gate, with_ids if side == "ids" else with_offsets))
    with consumer:
        while cached(consumer) < messages:
            time.sleep(0.05)
        gate.set()
        if not clock.done.wait(TIMEOUT_S):
            raise SystemExit(f"{side}: not all messages came within {TIMEOUT_S:g} s")
    return clock.rate


def behind(gate: threading.Event, listener: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a listener that waits in its first call until all messages are cached."""

    def call(given: Any) -> Any:
        gate.wait(TIMEOUT_S)
        return listener(given)

    return call


def cached(consumer: PushConsumer) -> int:
    """Return the number of waiting messages."""
    return sum(each.unfinished for queue, each in consumer.progress().items() if queue.topic == TOPIC)


def measure(kinds: list[str], batches: list[int], messages: dict[int, int], rounds: int) -> list[dict[str, Any]]:
    """Return every case with the rates of each round."""
    cases: list[dict[str, Any]] = [
        {
            "database": kind,
            "batch": batch,
            "queues": queues,
            "messages": messages[batch],
            "per_second": {side: [] for side in SIDES},
        }
        for kind in kinds
        for batch in batches
        for queues in QUEUES
    ]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        urls = {
            kind: stack.enter_context(running(kind)).new_database().url
            if kind in SERVERS
            else f"sqlite:///{directory}/db"
            for kind in kinds
        }
        backlogs = {(case["messages"], case["queues"]) for case in cases}
        servers = {backlog: stack.enter_context(broker(*backlog)) for backlog in sorted(backlogs)}
        for number in range(rounds):
            for case in cases:
                for side in random.sample(SIDES, len(SIDES)):
                    where = f"{case['database']}, batches of {case['batch']}, {case['queues']} queues"
                    print(f"round {number + 1} of {rounds}: {where}: {side}", file=sys.stderr)
                    server = servers[case["messages"], case["queues"]]
                    task = [side, urls[case["database"]], case["batch"], case["messages"], server]
                    command = [sys.executable, "-m", "benchmarks.exactly_once", "--side", json.dumps(task)]
                    rate = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    case["per_second"][side].append(round(rate))
    return cases


def ratio(case: dict[str, Any], over: str, under: str) -> float:
    """Return the median of the ratios of the rounds."""
    rates = case["per_second"]
    return statistics.median(a / b for a, b in zip(rates[over], rates[under], strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=QUESTION, epilog="example: python -m benchmarks.exactly_once --quick --databases sqlite"
    )
    arguments.add_argument("--quick", action="store_true", help="one round with few messages")
    arguments.add_argument("--databases", default="sqlite,postgresql", help="(%(default)s)")
    arguments.add_argument("--rounds", type=one_or_more, default=5, help="(%(default)s)")
    arguments.add_argument("--json", type=new_file, metavar="FILE", help="write the results there too")
    arguments.add_argument("--plot", type=new_file, metavar="PNG", help="draw them; needs matplotlib")
    arguments.add_argument("--serve", help=argparse.SUPPRESS)
    arguments.add_argument("--side", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        return serve(*map(int, options.serve.split(",")))
    if options.side:
        print(run_side(*json.loads(options.side)))
        return None
    facts = environment()
    print(header(facts))
    messages = {1: 300, 64: 6400} if options.quick else {1: 4000, 64: 64_000}
    cases = measure(options.databases.split(","), [1, 64], messages, 1 if options.quick else options.rounds)
    print("the last columns are offsets divided by another side")
    heads = ["database", "batch", "queues", *(f"{side}/s" for side in SIDES), *(f"÷ {side}" for side in COMPARED)]
    print("".join(f"{head:>12}" for head in heads))
    for case in cases:
        rates = [statistics.median(case["per_second"][side]) for side in SIDES]
        shown = [case["database"], case["batch"], case["queues"], *(f"{rate:,.0f}" for rate in rates)]
        shown += [f"{ratio(case, 'offsets', side):.2f}" for side in COMPARED]
        print("".join(f"{each:>12}" for each in shown))
    if options.json:
        Path(options.json).write_text(json.dumps({"question": QUESTION, **facts, "cases": cases}, indent=1) + "\n")
    if options.plot:
        draw_rates(
            [
                (f"{case['database']}, {case['batch']}, {case['queues']} queues", side, statistics.median(rates) / 1000)
                for case in cases
                for side, rates in case["per_second"].items()
            ],
            COLOURS,
            Path(options.plot),
        )
    return None


if __name__ == "__main__":
    main()
