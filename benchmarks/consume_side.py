"""One Python side of benchmarks/consume.py, in a process of its own: python -m benchmarks.consume_side TASK.

TASK is a JSON object with the fields of `Task`. The result is one JSON object on standard output. Private names of the
package are imported inside functions, because other commits may not have them.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import accelerated
from benchmarks.watch import SAMPLE_EVERY_S, Figures, Sample, Watch, memory_mb


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one side. `benchmarks/java/ConsumeBench.java` reads the same fields.

    `side`:

    * "raw": a loop that pulls and counts
    * "threads": threads that call the listener without a client
    * "java": the Java program
    * all others: consumers; the environment of "pure" disables the C extension

    `measure`:

    * "backlog": consume `total` messages, and measure the part between `from_share` and `to_share`
    * "latency": measure the messages of a steady flow over `seconds`, starting `settle_s` after the first one
    * "idle": measure a consumer without messages over `seconds`, after `settle_s`
    * "start": measure the time until the first message
    * "share": one of `members` of a group. It prints a line when it has its queues, starts to consume when it gets a
      line, and returns all its samples

    `listener`: "no-op" counts, "touch" reads body and properties, "sleep" sleeps 1 ms.

    `orderly`: in order of each queue. With `order_by`, "sharding_key" or "function", in order of each key; Java has no
    such mode.
    """

    side: str
    measure: str
    name_server: str
    group: str
    topic: str
    listener: str = "no-op"
    orderly: bool = False
    order_by: str = ""
    threads: int = 20
    pull_batch: int = 32
    listener_batch: int = 1
    max_cached: int = 1000
    max_span: int = 2000
    consume_from: str = "first"
    total: int = 0
    from_share: float = 0.2
    to_share: float = 0.9
    seconds: float = 0.0
    settle_s: float = 5.0
    timeout_s: float = 150.0
    broker_address: str = ""
    broker_name: str = ""
    queues: int = 0
    shut_down: bool = True
    members: int = 1


def raw(task: Task) -> Figures:
    """Measure the bare loop."""
    from benchmarks.raw_pull import raw_pull

    watch = Watch(task.total)
    where = task.broker_address, task.broker_name, task.group, task.topic, task.queues
    raw_pull(*where, task.pull_batch, task.total, watch.take_sample)
    return watch.warm_part(task.from_share, task.to_share)


def bare_threads(task: Task) -> Figures:
    """Measure threads that call the listener in a loop, which no client can beat."""
    counter, watch, done = Counter(), Watch(task.total), threading.Event()
    listener = counter.listener(task.listener, False)

    def work() -> None:
        while not done.is_set():
            listener(None)

    threads = [threading.Thread(target=work) for _ in range(task.threads)]
    for thread in threads:
        thread.start()
    while watch.take_sample(counter.value()).count < task.total:
        time.sleep(SAMPLE_EVERY_S)
    done.set()
    for thread in threads:
        thread.join()
    return watch.warm_part(task.from_share, task.to_share)


class Counter:
    """Counts the messages of listeners at the lowest possible cost."""

    def __init__(self) -> None:
        self._singles = itertools.count()  # next() of it is atomic
        self._reads = 0
        self._sizes: list[int] = []
        self._summed = self._summed_to = 0

    def value(self) -> int:
        """Return the number of messages so far. Only one thread may call it."""
        singles = next(self._singles) - self._reads
        self._reads += 1
        sizes = self._sizes[self._summed_to :]
        self._summed_to += len(sizes)
        self._summed += sum(sizes)
        return singles + self._summed

    def listener(self, kind: str, batch: bool) -> Callable[[Any], None]:
        """Return a listener of the kind in `Task.listener`, for lists if `batch`."""
        singles, add = self._singles, self._sizes.append

        def no_op(message: Any) -> None:
            next(singles)

        def no_op_list(messages: Any) -> None:
            add(len(messages))

        def touch(message: Any) -> None:
            message.body, message.properties  # noqa: B018
            next(singles)

        def touch_list(messages: Any) -> None:
            for message in messages:
                message.body, message.properties  # noqa: B018
            add(len(messages))

        def sleep(message: Any) -> None:
            time.sleep(0.001)
            next(singles)

        singly = {"no-op": no_op, "touch": touch, "sleep": sleep}
        return {"no-op": no_op_list, "touch": touch_list}[kind] if batch else singly[kind]


def sharding_key(message: Any) -> Any:
    """Return the same key as `order_by="sharding_key"`, as a function of a user would."""
    return message.property("__SHARDINGKEY")


def push_consumer(task: Task) -> Any:
    """Return the consumer of a task, before its start."""
    from pyrocket_consumer import PushConsumer

    by_key: dict[str, Any] = {}  # earlier releases do not have this option
    if task.order_by:
        by_key["order_by"] = sharding_key if task.order_by == "function" else task.order_by
    return PushConsumer(
        task.group,
        orderly=task.orderly,
        name_server=task.name_server,
        consume_from=task.consume_from,
        consume_threads=task.threads,
        pull_batch_size=task.pull_batch,
        listener_batch_size=task.listener_batch,
        max_cached_messages=task.max_cached,
        max_span=task.max_span,
        **by_key,
    )


def backlog(task: Task) -> Figures:
    """Measure a PushConsumer with a backlog."""
    counter, watch = Counter(), Watch(task.total)
    deadline = time.perf_counter() + task.timeout_s
    consumer = push_consumer(task)
    consumer.subscribe(task.topic, counter.listener(task.listener, task.listener_batch > 1))
    with consumer:
        while (sample := watch.take_sample(counter.value())).count < task.total:
            if sample.at_s > deadline:
                raise TimeoutError(f"only {sample.count} of {task.total} messages came within {task.timeout_s:g} s")
            time.sleep(SAMPLE_EVERY_S)
    return watch.warm_part(task.from_share, task.to_share)


def share(task: Task) -> Figures:
    """Measure one of the members of a group. Its share is `total` messages.

    Its listener blocks until the line arrives. So all members start at once, each with its queues.
    """
    counter, watch, released = Counter(), Watch(task.total), threading.Event()
    count = counter.listener(task.listener, task.listener_batch > 1)
    held = [released]  # the check of a list is cheaper than the check of an event

    def listener(messages: Any) -> None:
        if held:
            released.wait()
        count(messages)

    deadline = time.perf_counter() + task.timeout_s
    consumer = push_consumer(task)
    consumer.subscribe(task.topic, listener)
    try:
        with consumer:
            while sum(queue.topic == task.topic for queue in consumer.progress()) != task.queues // task.members:
                if time.perf_counter() > deadline:
                    raise TimeoutError(f"its queues are {sorted(consumer.progress())} after {task.timeout_s:g} s")
                time.sleep(SAMPLE_EVERY_S)
            print("ready", flush=True)
            sys.stdin.readline()
            held.clear()
            released.set()
            while (sample := watch.take_sample(counter.value())).count < task.total:
                if sample.at_s > deadline:
                    raise TimeoutError(f"only {sample.count} of {task.total} messages came")
                time.sleep(SAMPLE_EVERY_S)
    finally:
        released.set()  # close() waits for running calls
    return {"samples": [(sample.at_s, sample.count, sample.cpu_s) for sample in watch.samples]}


def latency(task: Task) -> Figures:
    """Measure the steady flow."""
    from benchmarks.broker_load import FLOW_BODY

    came = threading.Event()
    times: list[tuple[int, int]] = []  # nanoseconds since the epoch: sent, listener called

    def listener(message: Any) -> None:
        now_ns = time.time_ns()
        times.append((FLOW_BODY.unpack(message.body)[0], now_ns))
        came.set()

    consumer = push_consumer(task)
    consumer.subscribe(task.topic, listener)
    with consumer:
        if not came.wait(task.timeout_s):
            raise TimeoutError(f"no message came within {task.timeout_s:g} s")
        time.sleep(task.settle_s)
        begin_ns = time.time_ns()
        time.sleep(task.seconds)
        end_ns = time.time_ns()
        time.sleep(1)  # messages sent before the end may still be in flight
    taken = sorted(called - sent for sent, called in times if begin_ns <= sent < end_ns)
    return {
        "messages": len(taken),
        **{f"p{percent}_ms": taken[int(len(taken) * percent / 100)] / 1e6 for percent in (50, 99)},
    }


def idle(task: Task) -> Figures:
    """Measure a consumer without messages."""
    consumer = push_consumer(task)
    consumer.subscribe(task.topic, lambda message: None)
    with consumer:
        time.sleep(task.settle_s)
        before = Sample.now(0)
        time.sleep(task.seconds)
        after = Sample.now(0)
    return {
        "seconds": after.at_s - before.at_s,
        "cpu_s": after.cpu_s - before.cpu_s,
        "switches": after.switches - before.switches,
    }


def start(task: Task) -> Figures:
    """Measure the time from `PushConsumer(…)` to the first message, and separately the import."""
    began = time.perf_counter()
    import pyrocket_consumer.consumer  # noqa: F401

    imported = time.perf_counter()
    came = threading.Event()
    consumer = push_consumer(task)
    consumer.subscribe(task.topic, lambda message: came.set())
    with consumer:
        started = time.perf_counter()
        if not came.wait(task.timeout_s):
            raise TimeoutError(f"no message came within {task.timeout_s:g} s")
        first = time.perf_counter()
    return {"import_s": imported - began, "start_s": started - imported, "first_message_s": first - imported}


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    work_off = {"raw": raw, "threads": bare_threads}.get(task.side, backlog)
    measures = {"backlog": work_off, "latency": latency, "idle": idle, "start": start, "share": share}
    answer = measures[task.measure](task)
    memory = {"rss_mb": memory_mb("VmRSS"), "rss_peak_mb": memory_mb("VmHWM")}
    print(json.dumps({**answer, **memory, "accelerated": accelerated()}))


if __name__ == "__main__":
    main()
