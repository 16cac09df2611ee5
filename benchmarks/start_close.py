"""How long does it take to import a consumer, to start many queues, and to close with slow brokers?

    python -m benchmarks.start_close [--quick] [--json FILE] [--plot PNG]

An embedded broker runs in a process of its own. `start` is the time from `start()` until all queues have started. For
each queue the consumer fetches the offset, commits it, and waits for the response before the first pull. `close` is the
time to close a consumer with an offset to store for each queue, if all responses are `--answer-after` seconds late. The
report also has the time per queue, which would show work that grows with the square of their number. Imports run in new
processes, in turn with a process that imports nothing and one that imports asyncio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_file, one_or_more
from benchmarks.environment import environment, header
from benchmarks.plots import pyplot
from pyrocket_consumer import ConsumerEvent, Message, PushConsumer
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, delay

QUESTION = (__doc__ or "").partition("\n")[0]
TOPIC = "many"
TIMEOUT_S = 300.0
IMPORTS = {
    "nothing": "pass",
    "asyncio and ssl": "import asyncio, ssl",
    "the package": "import pyrocket_consumer",
    "PushConsumer": "from pyrocket_consumer import Message, PushConsumer",
    "Producer": "from pyrocket_consumer import Producer",
    "Admin": "from pyrocket_consumer import Admin",
}


def measure_imports(rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each import, without those of a process that imports nothing.

    All modules are compiled before, as after an installation by pip.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory(prefix="pyrocket-bench-") as compiled:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(rounds + 1):
            for name, code in IMPORTS.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], env=environment, check=True)
                if number:  # the first run compiles
                    milliseconds[name].append((time.perf_counter() - began) * 1e3)
    medians = {name: statistics.median(each) for name, each in milliseconds.items()}
    return {name: round(median - medians["nothing"], 1) for name, median in medians.items() if name != "nothing"}


def serve(queues: int, answer_after_s: float) -> None:
    """Run a broker with one message in each queue until standard input ends."""
    with EmbeddedCluster(record_limit=1) as cluster:
        cluster.create_topic(TOPIC, queues=queues)
        cluster.send(TOPIC, b"x", count=queues)
        if answer_after_s:
            cluster.broker("broker-a").on(RequestCode.UPDATE_CONSUMER_OFFSET, delay(answer_after_s), times=None)
        print(cluster.name_server, flush=True)
        sys.stdin.read()


@contextmanager
def broker(queues: int, answer_after_s: float = 0.0) -> Iterator[str]:
    """Run a broker in a process of its own. Yield its name server."""
    command = [sys.executable, "-m", "benchmarks.start_close", "--serve", f"{queues},{answer_after_s}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


class Counted:
    """Counts up to a number, and then wakes the waiting thread."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()
        self._all = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._all.set()

    def wait(self) -> None:
        if not self._all.wait(TIMEOUT_S):
            raise SystemExit(f"{self._left} are still missing after {TIMEOUT_S:g} s")


def start_s(queues: int) -> float:
    """Return the seconds until `queues` queues have started."""
    begun = Counted(queues)

    def on_event(event: ConsumerEvent) -> None:
        if event.kind == "queue-assigned" and event.queue is not None and event.queue.topic == TOPIC:
            begun()

    with broker(queues) as name_server:
        consumer = PushConsumer("start", name_server=name_server, on_event=on_event)
        consumer.subscribe(TOPIC, lambda message: None)
        began = time.perf_counter()
        with consumer:
            begun.wait()
            return time.perf_counter() - began


def close_s(queues: int, answer_after_s: float) -> float:
    """Return the seconds to close a consumer with an offset to store for each of `queues` queues."""
    consumed = Counted(queues)

    def listener(message: Message) -> None:
        consumed()

    with broker(queues, answer_after_s) as name_server:
        consumer = PushConsumer("close", name_server=name_server, consume_from="first", commit_interval_s=3600)
        consumer.subscribe(TOPIC, listener)
        with consumer:
            consumed.wait()
            began = time.perf_counter()
            consumer.close()
            return time.perf_counter() - began


def measure(numbers: list[int], close_queues: int, answer_after_s: float, rounds: int) -> list[dict[str, Any]]:
    """Return every case with the seconds of each round."""
    cases: list[dict[str, Any]] = [{"case": "start", "queues": number, "seconds": []} for number in numbers]
    cases.append({"case": "close", "queues": close_queues, "answer_after_s": answer_after_s, "seconds": []})
    for number in range(rounds):
        for case in cases:
            print(f"round {number + 1} of {rounds}: {case['case']} {case['queues']} queues", file=sys.stderr)
            queues = case["queues"]
            took_s = start_s(queues) if case["case"] == "start" else close_s(queues, answer_after_s)
            case["seconds"].append(round(took_s, 3))
    return cases


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of the starts over the number of queues, and those of the close."""
    figure, axes = pyplot().subplots(figsize=(7, 4))
    for kind, mark in (("start", "o-"), ("close", "s")):
        chosen = [case for case in cases if case["case"] == kind]
        medians = [statistics.median(case["seconds"]) for case in chosen]
        axes.plot([case["queues"] for case in chosen], medians, mark, label=kind)
    axes.set_xlabel("queues")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=QUESTION)
    arguments.add_argument("--quick", action="store_true", help="one round with few queues")
    arguments.add_argument("--queues", default="1000,2000,5000,10000", help="numbers of queues to start (%(default)s)")
    arguments.add_argument("--close", type=int, default=1000, metavar="QUEUES", help="queues to close (%(default)s)")
    arguments.add_argument("--answer-after", type=float, default=0.05, metavar="S", help="seconds (%(default)s)")
    arguments.add_argument("--rounds", type=one_or_more, default=3, help="(%(default)s)")
    arguments.add_argument("--json", type=new_file, metavar="FILE", help="write the results there too")
    arguments.add_argument("--plot", type=new_file, metavar="PNG", help="draw them; needs matplotlib")
    arguments.add_argument("--serve", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        queues, _, answer_after_s = options.serve.partition(",")
        serve(int(queues), float(answer_after_s))
        return
    if options.plot:
        pyplot()
    numbers = [100, 500] if options.quick else [int(number) for number in options.queues.split(",")]
    rounds, close_queues = (1, 100) if options.quick else (options.rounds, options.close)

    facts = environment()
    print(header(facts))
    imports = measure_imports(7)
    print("import, ms: " + ", ".join(f"{name} {ms:.0f}" for name, ms in imports.items()))
    cases = measure(numbers, close_queues, options.answer_after, rounds)
    print(f"{'case':>6} {'queues':>7} {'seconds':>9} {'worst':>7} {'ms per queue':>13}")
    for case in cases:
        median = statistics.median(case["seconds"])
        per_queue = 1000 * median / case["queues"]
        print(f"{case['case']:>6} {case['queues']:>7} {median:>9.2f} {max(case['seconds']):>7.2f} {per_queue:>13.2f}")
    if options.json:
        text = json.dumps({"question": QUESTION, "environment": facts, "import_ms": imports, "cases": cases}, indent=1)
        Path(options.json).write_text(text, encoding="utf-8")
    if options.plot:
        draw(cases, Path(options.plot))


if __name__ == "__main__":
    main()
