"""One side of benchmarks/produce.py, in a process of its own: python -m benchmarks.produce_side TASK.

TASK is a JSON object with the fields of `Task`. The result is one JSON object on standard output.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from benchmarks.watch import Figures, Sample, memory_mb
from pyrocket_consumer import Producer, SendResult


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one side: send `warm` messages that do not count, and then `total` messages that do.

    `measure`: "async" has up to `in_flight` messages in flight, and checks every result; "sync" sends one after the
    other. `side`: "pyrocket" or "java".
    """

    side: str
    measure: str
    name_server: str
    group: str
    topic: str
    warm: int
    total: int
    in_flight: int = 1000
    body_bytes: int = 1024
    timeout_s: int = 30  # of each message; no message fails on a busy machine


def one_by_one(producer: Producer, task: Task) -> Callable[[int], None]:
    """Return a function that sends the given number of messages, each after the result of the one before."""
    body = b"x" * task.body_bytes

    def send(count: int) -> None:
        for _ in range(count):
            producer.send(task.topic, body, keys="k", tags="paid", properties={"region": "eu"})

    return send


def asynchronously(producer: Producer, task: Task) -> Callable[[int], None]:
    """Return a function that sends the given number of messages concurrently, and waits for all results."""
    body = b"x" * task.body_bytes

    def send(count: int) -> None:
        sent = deque[Future[SendResult]]()
        for _ in range(count):
            sent.append(producer.send_async(task.topic, body, keys="k", tags="paid", properties={"region": "eu"}))
            while sent and sent[0].done():
                sent.popleft().result()
        while sent:
            sent.popleft().result()

    return send


def measured(task: Task) -> Figures:
    """Return the figures of the messages that count."""
    limits = {"max_in_flight_messages": task.in_flight, "send_timeout_s": task.timeout_s}
    with Producer(task.group, name_server=task.name_server, **limits) as producer:
        send = {"async": asynchronously, "sync": one_by_one}[task.measure](producer, task)
        send(task.warm)
        before = Sample.now(0)
        send(task.total)
        after = Sample.now(task.total)
    return {
        "messages": task.total,
        "seconds": after.at_s - before.at_s,
        "cpu_s": after.cpu_s - before.cpu_s,
        "switches": after.switches - before.switches,
        "rss_peak_mb": round(memory_mb("VmHWM"), 1),
    }


if __name__ == "__main__":
    print(json.dumps(measured(Task(**json.loads(sys.argv[1])))))
