"""One side of benchmarks/compare.py: measures the package that is installed for the interpreter that runs it.

    python -m benchmarks.compare_side

Each line of standard input is a task, a JSON object with the fields of `Task`. The program prints a line with the
result of each. The task `serve` runs the broker for all others, until standard input ends. All code here uses public
names of the package, and imports them inside functions. So the same program measures earlier and later commits.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.watch import Figures, Sample

BACKLOG, KEYED, MANY, PING, SENT = "backlog", "keyed", "many", "ping", "sent"
QUEUES, MANY_QUEUES, KEYS = 4, 1000, 1000
BACKLOG_MESSAGES, KEYED_MESSAGES = 400_000, 120_000
BODY = bytes(range(256)) * 4
TIMEOUT_S = 60.0
LISTS = {"pull_batch": 1024, "listener_batch": 32, "max_cached": 10_000, "max_span": 20_000}
LIFTED_LIMITS = {
    "maxTransferCountOnMessageInMemory": 4096,
    "maxTransferBytesOnMessageInMemory": 8 << 20,
}
PERSISTS = {  # durability -> queues -> operations of a sample
    "fsync": dict.fromkeys((16, 1024, 16384, 65536), 3000),
    "process": dict.fromkeys((16, 1024, 16384, 65536), 92_000),  # enough to fill several journals
    "checkpoint": {16: 1500, 1024: 800, 16384: 80, 65536: 25},
}


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a name of SUBJECTS, the cluster, and a fresh group."""

    subject: str
    name_server: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """One measurement, the meaning of its operation, and the estimated seconds of a sample.

    `needs`: "broker", "spark", which is the broker and Spark, or nothing.
    """

    what: str
    operation: str
    sample_s: float
    measure: Callable[[Task], Figures]
    needs: str = "broker"


def taken(before: Sample, operations: int) -> Figures:
    """Return the time and the CPU time of this process since `before`, for each of `operations`."""
    after = Sample.now(0)
    return {"operations": operations, "seconds": after.at_s - before.at_s, "cpu_s": after.cpu_s - before.cpu_s}


def consume(topic: str, messages: int, **options: Any) -> Callable[[Task], Figures]:
    """Return a function that consumes a backlog. Its first fifth and its last tenth do not count."""

    def measure(task: Task) -> Figures:
        from benchmarks import consume_side

        where = "pyrocket", "backlog", task.name_server, task.group, topic
        answer = consume_side.backlog(consume_side.Task(*where, total=messages, **options))
        return {"operations": answer["messages"], "seconds": answer["seconds"], "cpu_s": answer["cpu_s"]}

    return measure


def latency(task: Task) -> Figures:
    """Send one message after the other. The result is the median time from a send to the call of the listener."""
    from pyrocket_consumer import Producer, PushConsumer

    came, arrivals = threading.Semaphore(0), list[float]()

    def listener(message: Any) -> None:
        arrivals.append(time.perf_counter())
        came.release()

    def send(count: int) -> list[float]:
        waits = []
        for _ in range(count):
            began = time.perf_counter()
            producer.send(PING, BODY)
            if not came.acquire(timeout=TIMEOUT_S):
                raise TimeoutError(f"a message did not come within {TIMEOUT_S:g} s")
            waits.append(arrivals[-1] - began)
        return waits

    consumer = PushConsumer(task.group, name_server=task.name_server)
    consumer.subscribe(PING, listener)
    with Producer(f"{task.group}-sends", name_server=task.name_server) as producer, consumer:
        while not came.acquire(timeout=0.1):  # until it consumes; by then the messages of earlier samples have arrived
            producer.send(PING, BODY)
        while came.acquire(timeout=0.2):
            pass
        send(100)
        before = Sample.now(0)
        waits = send(2000)
        return taken(before, len(waits)) | {"seconds": statistics.median(waits) * len(waits)}


def produce(way: str, warm: int, total: int) -> Callable[[Task], Figures]:
    """Return a function that sends asynchronously, or one message after the other."""

    def measure(task: Task) -> Figures:
        from benchmarks import produce_side

        where = "pyrocket", way, task.name_server, task.group, SENT
        answer = produce_side.measured(produce_side.Task(*where, warm, total))
        return {"operations": total, "seconds": answer["seconds"], "cpu_s": answer["cpu_s"]}

    return measure


def persist(durability: Any, queues: int, count: int) -> Callable[[Task], Figures]:
    """Return a function that persists one offset after the other. Only a full journal causes a checkpoint."""

    def measure(task: Task) -> Figures:
        from pyrocket_consumer import MessageQueue
        from pyrocket_consumer.offsets import LocalFileOffsetStore

        names = [MessageQueue(f"topic-{number // 64}", "broker-a", number % 64) for number in range(queues)]
        with (
            tempfile.TemporaryDirectory(prefix="pyrocket-compare-") as directory,
            LocalFileOffsetStore(directory, durability, checkpoint_interval_s=86_400) as store,
        ):
            for queue in names:
                store.update_offset(queue, 0)
            store.persist_all(names)
            before = Sample.now(0)
            for number in range(count):
                queue = names[number % queues]
                store.update_offset(queue, 1_000_000_000 + number)
                store.persist(queue)
            return taken(before, count)

    return measure


def start(task: Task) -> Figures:
    """Start three consumers, one after the other, until all queues of each have started."""
    from pyrocket_consumer import PushConsumer

    starts, spent = 3, {"seconds": 0.0, "cpu_s": 0.0}
    for number in range(starts):
        begun, counted = threading.Event(), itertools.count(1)

        def on_event(event: Any, begun: threading.Event = begun, counted: Any = counted) -> None:
            if event.kind == "queue-assigned" and event.queue.topic == MANY and next(counted) == MANY_QUEUES:
                begun.set()

        consumer = PushConsumer(f"{task.group}-{number}", name_server=task.name_server, on_event=on_event)
        consumer.subscribe(MANY, lambda message: None)
        before = Sample.now(0)
        with consumer:
            if not begun.wait(TIMEOUT_S):
                raise TimeoutError(f"not all of {MANY_QUEUES} queues began within {TIMEOUT_S:g} s")
            answer = taken(before, starts)
        spent = {name: value + answer[name] for name, value in spent.items()}
    return {"operations": starts, **spent}


IMPORT = """
import time
began, cpu = time.perf_counter(), time.process_time()
from pyrocket_consumer import Admin, Message, Producer, PushConsumer
print(time.perf_counter() - began, time.process_time() - cpu)
"""


def import_(task: Task) -> Figures:
    """Import in ten new interpreters, one after the other. The start of an interpreter does not count."""
    times = []
    for _ in range(10):
        done = subprocess.run([sys.executable, "-P", "-c", IMPORT], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImportError(done.stderr.strip().splitlines()[-1])
        times.append([float(each) for each in done.stdout.split()])
    seconds, cpu_s = map(sum, zip(*times, strict=True))
    return {"operations": len(times), "seconds": seconds, "cpu_s": cpu_s}


def spark_read(task: Task) -> Figures:
    """Read two columns with two tasks. The CPU time is that of the Python processes of Spark, which run the package."""
    spark = session()

    def read() -> None:
        reader = spark.read.format("rocketmq").schema("queueOffset long, body binary")
        frame = reader.options(nameServer=task.name_server, subscribe=BACKLOG).load()
        frame.write.format("noop").mode("overwrite").save()

    read()  # Spark ends Python workers after a minute without work; imports of new workers must not count
    if not getattr(spark, "is_warm", False):  # the virtual machine compiles during its first queries
        read()
        spark.is_warm = True
    began, cpu_s = time.perf_counter(), spark_python_cpu_s()
    read()
    seconds = time.perf_counter() - began
    return {"operations": BACKLOG_MESSAGES, "seconds": seconds, "cpu_s": spark_python_cpu_s() - cpu_s}


opened = ExitStack()


@functools.cache
def session() -> Any:
    """Start Spark in this process and its children, with this interpreter. Later samples use it again."""
    from pyspark.sql import SparkSession

    from pyrocket_consumer.spark import register

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("benchmarks.compare")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "FATAL",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    opened.callback(spark.stop)
    register(spark)
    return spark


def spark_python_cpu_s() -> float:
    """Return the CPU time of the Python processes below the Java process of this one, including ended ones."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                before, _, after = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended
            fields = after.split()
            stats[int(entry.name)] = before.partition("(")[2], int(fields[1]), [int(each) for each in fields[11:15]]
    ours, more, ticks = set[int](), {os.getpid()}, 0
    while more:
        ours |= more
        more = {pid for pid, (_, parent, _) in stats.items() if parent in ours} - ours
    for pid in ours - {os.getpid()}:
        name, _, (user, system, ended_user, ended_system) = stats[pid]
        ticks += ended_user + ended_system + (0 if name == "java" else user + system)
    return ticks / os.sysconf("SC_CLK_TCK")


def describe(task: Task) -> Figures:
    """Return the facts about the package and the machine."""
    from benchmarks.environment import environment

    return environment()


async def serve(answers: TextIO) -> None:
    """Run the broker with all topics until standard input ends."""
    from pyrocket_consumer.testing import EmbeddedCluster

    cluster = EmbeddedCluster(loop=asyncio.get_running_loop(), record_limit=1, settings=LIFTED_LIMITS)
    await cluster.open()
    for topic, queues in ((BACKLOG, QUEUES), (KEYED, QUEUES), (MANY, MANY_QUEUES), (PING, 1), (SENT, QUEUES)):
        cluster.create_topic(topic, queues=queues)
    tags: dict[str, Any] = {"tags": "paid", "keys": ["order-1"]}
    cluster.send(BACKLOG, BODY, count=BACKLOG_MESSAGES, properties={"region": "eu"}, **tags)
    for number in range(KEYED_MESSAGES):
        key = {"__SHARDINGKEY": f"key-{number % KEYS}"}
        cluster.send(KEYED, BODY, properties=key, queue_id=number % KEYS % QUEUES, **tags)
    print(json.dumps({"name_server": cluster.name_server}), file=answers, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    cluster.shut()


SUBJECTS = {
    "consume": Subject("a listener that counts", "message", 1.6, consume(BACKLOG, BACKLOG_MESSAGES)),
    "consume-touched": Subject(
        "a listener that reads body and properties",
        "message",
        2.0,
        consume(BACKLOG, BACKLOG_MESSAGES, listener="touch"),
    ),
    "consume-lists": Subject(
        "a listener of lists of 32, pulls of 1024", "message", 1.3, consume(BACKLOG, BACKLOG_MESSAGES, **LISTS)
    ),
    "latency": Subject("from a send to the listener's call", "message", 2.5, latency),
    "produce-async": Subject("asynchronous sends", "message", 2.0, produce("async", 2000, 12_000)),
    "produce-sync": Subject("sends, one after the other", "message", 2.0, produce("sync", 300, 3000)),
    "order-by-key": Subject(
        "order by the sharding key",
        "message",
        1.6,
        consume(KEYED, KEYED_MESSAGES, orderly=True, order_by="sharding_key"),
    ),
    "order-by-function": Subject(
        "order by a function of the message",
        "message",
        1.6,
        consume(KEYED, KEYED_MESSAGES, orderly=True, order_by="function"),
    ),
    **{
        f"persist-{durability}-{queues}": Subject(
            f"persist an offset of {queues:,} queues, durability {durability!r}",
            "persist",
            1.5,
            persist(durability, queues, count),
            needs="",
        )
        for durability, counts in PERSISTS.items()
        for queues, count in counts.items()
    },
    "spark-read": Subject("Spark reads two columns", "message", 5.0, spark_read, "spark"),
    "start": Subject(f"a consumer begins {MANY_QUEUES:,} queues", "start", 2.0, start),
    "import": Subject("import PushConsumer, Producer, Admin", "import", 2.5, import_, needs=""),
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with results
    measures = {"describe": describe, **{name: subject.measure for name, subject in SUBJECTS.items()}}
    with opened:
        while line := sys.stdin.readline():
            task = Task(**json.loads(line))
            if task.subject == "serve":
                asyncio.run(serve(answers))
                return
            try:
                answer = measures[task.subject](task)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
