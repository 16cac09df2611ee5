"""How long does it take to persist an offset, compared with the limit of the disk and with the store of Java?

    python -m benchmarks.offset_persist [--quick] [--json FILE] [--plot PNG]

`disk` writes 4 KiB to a preallocated file and calls fdatasync, so no durable persist can be faster. `java` is the
LocalFileOffsetStore of the Java client of RocketMQ 5.5.0, which never syncs. The other sides are the three durabilities
of this package. They all run in blocks of a few operations, in random order, round after round. A flush takes 0.1 ms or
4 ms, depending on the idle state of the processor, so only ratios inside a round are meaningful. Each operation is also
timed alone, for p50 and p99.

The report then has the bytes per persist, the memory per queue, and the cost of an acknowledged message. It also has
the time to open a store killed with a full journal. Without Java and Maven, the report has a note instead of the side
`java`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import java_program
from benchmarks.arguments import new_file, one_or_more
from benchmarks.environment import environment, header
from benchmarks.plots import pyplot
from pyrocket_consumer.consumer.commits.commits import CommitRecord
from pyrocket_consumer.consumer.commits.store import StoreCommits
from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.disk import Disk, DiskFile
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message
from tests.real_brokers.jars import NEWEST, CannotRun, check_machine, java_tool

QUESTION = (__doc__ or "").partition("\n")[0]
DURABILITIES = ("fsync", "process", "checkpoint")
DISK, JAVA = "disk", "java"
SIDES = (DISK, *DURABILITIES, JAVA)
SLOW_US = 5_000  # slower sides get smaller blocks

# Targets: (side, other, threads) -> per number of queues, rate of the one ÷ rate of the other.
TARGETS = {
    ("fsync", DISK, 1): {16: 0.8, 256: 0.8, 4096: 0.8},
    ("fsync", DISK, 8): {16: 0.85, 256: 0.85, 4096: 0.85},
    ("fsync", JAVA, 1): {16: 1.3, 256: 2, 4096: 7, 65536: 30},
    ("fsync", JAVA, 8): {16: 2.5, 256: 3.5, 4096: 13, 65536: 30},
    ("process", JAVA, 1): {16: 25, 256: 40, 4096: 100, 65536: 1000},
}
# Costs: (name, up to this number of queues) -> at most.
LIMITS = {("bytes_per_persist", 4096): 32, ("memory_bytes_per_queue", 65536): 200, ("recovery_ms", 65536): 500}
ACK, ACK_LIMIT = "ack_us_per_message_chunks_of_32", 0.3


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of the measurement."""

    queues: tuple[int, ...] = (16, 256, 4096, 65536)
    threads: tuple[int, ...] = (1, 8)
    rounds: int = 40
    block: int = 10
    seconds: float = 60.0  # at most, for each combination of queues and threads
    persists: int = 150_000  # for bytes and CPU per persist


QUICK = Settings((16, 256, 4096), (1, 8), 15, 10, 5.0, 50_000)


def queues_of(count: int) -> list[MessageQueue]:
    return [MessageQueue(f"topic-{n // 64}", "broker-a", n % 64) for n in range(count)]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of operations of each thread: the total time, and the time of each."""

    seconds: float
    each_ns: list[int]


Do = Callable[[int], Block]
"""A side, which does the given number of operations in each of its threads."""


class Team:
    """Threads that do the same work concurrently, several times, without a restart.

    `work` gets the index of its thread, the number of operations, and a list for the nanoseconds of each.
    """

    def __init__(self, size: int, work: Callable[[int, int, list[int]], None]) -> None:
        self._size, self._work, self._count = size, work, 0
        self._start, self._end = threading.Barrier(size + 1), threading.Barrier(size + 1)
        for number in range(size if size > 1 else 0):
            threading.Thread(target=self._run, args=(number,), daemon=True).start()

    def _run(self, number: int) -> None:
        while True:
            self._start.wait()
            if self._count < 0:
                return
            self._work(number, self._count, self._taken[number])
            self._end.wait()

    def do(self, count: int) -> Block:
        """Let each thread do `count` operations."""
        self._count = count
        self._taken: list[list[int]] = [[] for _ in range(self._size)]
        begin = time.perf_counter()
        if self._size == 1:
            self._work(0, count, self._taken[0])
        else:
            self._start.wait()
            self._end.wait()
        return Block(time.perf_counter() - begin, [ns for taken in self._taken for ns in taken])

    def dismiss(self) -> None:
        self._count = -1
        if self._size > 1:
            self._start.wait()


@contextmanager
def disk_side(directory: Path, threads: int) -> Iterator[Do]:
    """The physical limit: 4 KiB into a preallocated file, and fdatasync, from each thread."""
    path, blocks, block = directory / "disk", 256, os.urandom(4096)
    path.write_bytes(bytes(4096 * blocks))
    files = [os.open(path, os.O_RDWR) for _ in range(threads)]
    os.fsync(files[0])
    places = list(range(threads))

    def work(number: int, count: int, taken: list[int]) -> None:
        fd, clock = files[number], time.perf_counter_ns
        for _ in range(count):
            began = clock()
            os.pwrite(fd, block, places[number] % blocks * 4096)
            os.fdatasync(fd)
            taken.append(clock() - began)
            places[number] += threads

    team = Team(threads, work)
    yield team.do
    team.dismiss()
    for fd in files:
        os.close(fd)


@contextmanager
def store_side(directory: Path, durability: Any, count: int, threads: int) -> Iterator[Do]:
    """The store of this package: `update_offset` and `persist`, each thread with its own queues."""
    queues = queues_of(count)
    with LocalFileOffsetStore(directory / durability, durability) as store:
        for queue in queues:
            store.update_offset(queue, 0)
        store.persist_all()
        places, values = list(range(threads)), [10**9] * threads

        def work(number: int, operations: int, taken: list[int]) -> None:
            place, value, clock = places[number], values[number], time.perf_counter_ns
            for _ in range(operations):
                queue = queues[place % count]
                value += 1
                began = clock()
                store.update_offset(queue, value)
                store.persist(queue)
                taken.append(clock() - began)
                place += threads
            places[number], values[number] = place, value

        team = Team(threads, work)
        yield team.do
        team.dismiss()


class JavaSide:
    """A Java virtual machine with the store of the Java client. It reads one command per line."""

    def __init__(self, directory: Path) -> None:
        home = directory / "java"
        home.mkdir()
        self._process = subprocess.Popen(
            [
                java_tool("java"),
                f"-Duser.home={home}",
                f"-Drocketmq.client.localOffsetStoreDir={home}/offsets",
                "-cp",
                java_program.class_path("OffsetPersistBench", NEWEST),
                "OffsetPersistBench",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, line: str) -> Block:
        """Return the time of the command, and of each of its operations."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        while True:
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the Java side ended at {line!r}")
            words = answer.split()
            if words and all(word.isdigit() for word in words):  # not output of a library
                total, *each = map(int, words)
                return Block(total / 1e9, each)

    def open(self, count: int, threads: int) -> Do:
        self.run(f"open {count} {threads}")
        warm_until = time.perf_counter() + 4
        for _ in range(300):  # the compiler needs thousands of calls
            self.run("one 10")
            if time.perf_counter() > warm_until:
                break
        return lambda operations: self.run(f"one {operations}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(slots=True)
class Case:
    """Microseconds per operation of each side, round by round, for one number of queues and threads."""

    queues: int
    threads: int
    us: dict[str, list[float]] = field(default_factory=dict)
    each_us: dict[str, list[float]] = field(default_factory=dict)

    def latency(self, side: str, percent: int) -> float:
        """Return a percentile of the times of the operations of a side, in microseconds."""
        each = sorted(self.each_us[side])
        return each[min(len(each) - 1, len(each) * percent // 100)]

    def ratio(self, side: str, other: str) -> float | None:
        """Return the rate of `side` ÷ the rate of `other`: the median of the ratios of the rounds."""
        if side not in self.us or other not in self.us:
            return None
        return statistics.median(b / a for a, b in zip(self.us[side], self.us[other], strict=True))

    def summary(self) -> dict[str, Any]:
        return {
            "queues": self.queues,
            "threads": self.threads,
            "rounds": len(next(iter(self.us.values()))),
            "us_per_persist": {
                side: {"median": round(statistics.median(us), 2), "rounds": [round(each, 2) for each in us]}
                for side, us in self.us.items()
            },
            "latency_us": {
                side: {
                    "p50": round(self.latency(side, 50), 2),
                    "p99": round(self.latency(side, 99), 2),
                    "of": len(each),
                }
                for side, each in self.each_us.items()
            },
            "rate_ratios": {
                f"{side} / {other}": round(ratio, 3)
                for side in SIDES
                for other in (DISK, JAVA)
                if side != other and (ratio := self.ratio(side, other)) is not None
            },
        }


def measure(count: int, threads: int, settings: Settings, java: JavaSide | None, base: Path) -> Case:
    """Interleave all sides, in random order, round after round."""
    case = Case(count, threads)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        sides: dict[str, Do] = {DISK: stack.enter_context(disk_side(directory, threads))}
        for durability in DURABILITIES:
            sides[durability] = stack.enter_context(store_side(directory, durability, count, threads))
        if java is not None:
            sides[JAVA] = java.open(count, threads)
        blocks = {}
        for side, do in sides.items():
            do(1)  # flush pending work before the clock starts
            us = do(3).seconds / 3 * 1e6
            blocks[side] = max(2, settings.block // 4) if us > SLOW_US else settings.block * (5 if us < 50 else 1)
            case.us[side], case.each_us[side] = [], []
        until, order = time.perf_counter() + settings.seconds, list(sides)
        for number in range(settings.rounds):
            random.shuffle(order)
            for side in order:
                block = sides[side](blocks[side])
                case.us[side].append(block.seconds / blocks[side] / threads * 1e6)
                case.each_us[side] += [ns / 1e3 for ns in block.each_ns]
            progress(f"{count} queues, {threads} threads: round {number + 1} of {settings.rounds}")
            if time.perf_counter() > until and number >= 4:
                break
    return case


# -- bytes, CPU, recovery ----------------------------------------------------------------------------------------


class CountingDisk(Disk):
    """The local disk, which counts the bytes written and the flushes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.flushes = 0

    def open(self, path: str, *, create: bool) -> DiskFile:
        return _CountingFile(super().open(path, create=create), self)


class _CountingFile:
    def __init__(self, file: DiskFile, disk: CountingDisk) -> None:
        self._file, self._disk = file, disk

    def write_at(self, data: bytes, position: int) -> None:
        self._disk.bytes += len(data)
        self._file.write_at(data, position)

    def sync(self) -> None:
        self._disk.flushes += 1
        self._file.sync()

    def is_at(self, path: str) -> bool:
        return self._file.is_at(path)

    def close(self) -> None:
        self._file.close()


def measure_costs(count: int, settings: Settings, base: Path) -> dict[str, Any]:
    """Return bytes written (checkpoints included) and CPU per persist, flushes of eight threads, recovery, memory."""
    queues = queues_of(count)
    with tempfile.TemporaryDirectory(dir=base) as directory:
        disk = CountingDisk()
        store = LocalFileOffsetStore(Path(directory, "s"), "process", disk=disk)
        store.load()
        for queue in queues:
            store.update_offset(queue, 10**9)
        store.persist_all()
        disk.bytes, began, cpu = 0, time.perf_counter(), time.process_time()
        for n in range(settings.persists):
            queue = queues[n % count]
            store.update_offset(queue, 10**9 + n)
            store.persist(queue)
        cpu_us = (time.process_time() - cpu) / settings.persists * 1e6
        wall_us = (time.perf_counter() - began) / settings.persists * 1e6
        bytes_per_persist = disk.bytes / settings.persists
        store.close()

        # A nearly full journal, as a kill leaves it.
        store = LocalFileOffsetStore(Path(directory, "s"), "process", checkpoint_interval_s=86400)
        store.load()
        for n in range(46_000):
            queue = queues[n % count]
            store.update_offset(queue, 2 * 10**9 + n)
            store.persist(queue)
        shutil.copytree(Path(directory, "s"), Path(directory, "killed"))
        store.close()
        loads, loads_cpu, frames = [], [], 0
        for _ in range(5):
            store = LocalFileOffsetStore(Path(directory, "killed"))
            gc.collect()
            gc.freeze()  # a new process has no other objects to scan
            began, cpu = time.perf_counter(), time.process_time()
            store.load()
            loads.append((time.perf_counter() - began) * 1e3)
            loads_cpu.append((time.process_time() - cpu) * 1e3)
            gc.unfreeze()
            frames = store.found.journal_frames
            shutil.copytree(Path(directory, "killed"), Path(directory, "copy"))
            store.close()
            shutil.rmtree(Path(directory, "killed"))
            Path(directory, "copy").rename(Path(directory, "killed"))

        disk = CountingDisk()
        with LocalFileOffsetStore(Path(directory, "eight"), disk=disk) as store:
            for queue in queues:
                store.update_offset(queue, 0)
            store.persist_all()

            def work(number: int, operations: int, taken: list[int]) -> None:
                for n in range(operations):
                    queue = queues[(n * 8 + number) % count]
                    store.update_offset(queue, 10**9 + n * 8 + number)
                    store.persist(queue)

            disk.flushes, team = 0, Team(8, work)
            team.do(100)
            flushes = disk.flushes / 800
            team.dismiss()
    return {
        "queues": count,
        "bytes_per_persist": round(bytes_per_persist, 1),
        "cpu_us_per_persist": round(cpu_us, 2),
        "us_per_persist": round(wall_us, 2),
        "flushes_per_persist_8_threads": round(flushes, 2),
        "recovery_ms": round(statistics.median(loads), 1),
        "recovery_cpu_ms": round(statistics.median(loads_cpu), 1),
        "journal_frames": frames,
        "memory_bytes_per_queue": round(memory_per_queue(queues), 1),
    }


def memory_per_queue(queues: list[MessageQueue]) -> float:
    """Return the memory of the store per queue, without its key but with the offset."""
    tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as directory, LocalFileOffsetStore(directory, "process") as store:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for number, queue in enumerate(queues):
                store.update_offset(queue, 10**9 + number)
            store.persist_all()
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) / len(queues)
    finally:
        tracemalloc.stop()


def measure_bookkeeping(base: Path) -> dict[str, float]:
    """Return the CPU time for the commit offset of an acknowledged message, in microseconds.

    It includes the window and the store, with chunks as workers acknowledge them. Nothing is persisted.
    """
    queue, messages, result = MessageQueue("orders", "broker-a", 3), 960, {}
    record = StoredMessage(topic="orders", body=bytes(1024), queue_id=3)
    body = b"".join(encode_message(replace(record, queue_offset=offset)) for offset in range(messages))
    with tempfile.TemporaryDirectory(dir=base) as directory, LocalFileOffsetStore(directory) as store:
        update = StoreCommits(store, memory_first=True).edge_listener(CommitRecord(queue))
        for size in (32, 1):
            costs = []
            for _ in range(40):
                window = ProcessQueue(queue, 0, Limits(), on_edge=update)
                decoded = decode_messages(body, queue)
                window.put(decoded, messages, len(body))
                chunks = [decoded[at : at + size] for at in range(0, messages, size)]
                began = time.process_time()
                for chunk in chunks:
                    window.ack(chunk, 0.0001, size)
                costs.append((time.process_time() - began) / messages * 1e6)
            result[f"ack_us_per_message_chunks_of_{size}"] = round(statistics.median(costs), 3)
        costs = []
        for _ in range(40):
            began = time.process_time()
            for offset in range(messages):
                update(queue, offset)
            costs.append((time.process_time() - began) / messages * 1e6)
        result["update_offset_us_per_call"] = round(statistics.median(costs), 3)
    return result


def measure_all(count: int, java: JavaSide | None, base: Path, rounds: int) -> dict[str, Any]:
    """Return the time to persist the whole table at once."""
    queues, us = queues_of(count), {}
    with tempfile.TemporaryDirectory(dir=base) as directory, LocalFileOffsetStore(Path(directory, "s")) as store:
        values = iter(range(10**9, 2 * 10**9))

        def ours() -> float:
            begin = time.perf_counter()
            for queue, value in zip(queues, values, strict=False):  # with other values
                store.update_offset(queue, value)
            store.persist_all(queues)
            return time.perf_counter() - begin

        sides = {"fsync": ours}
        if java is not None:
            java.run(f"open {count} 1")
            sides[JAVA] = lambda: java.run("all 1").seconds
        for do in sides.values():
            for _ in range(20 if count < 5000 else 3):
                do()
        for _ in range(rounds):
            for side in random.sample(list(sides), len(sides)):
                us.setdefault(side, []).append(sides[side]() * 1e6)
    case = Case(count, 1, us)
    return {
        "queues": count,
        "us": {side: round(statistics.median(each), 1) for side, each in us.items()},
        "fsync / java": None if java is None else round(case.ratio("fsync", JAVA) or 0, 2),
    }


# -- output ------------------------------------------------------------------------------------------------------


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`, because a flush does nothing on tmpfs."""
    best, kind = "", "unknown"
    try:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, found, *_ = line.split()
            if str(path.resolve()).startswith(mount) and len(mount) >= len(best):
                best, kind = mount, found
    except OSError:
        pass
    return kind


def table(cases: list[Case]) -> Iterator[str]:
    yield f"{'queues':>7} {'threads':>7}  " + "".join(f"{side + ' us':>14}" for side in SIDES)
    for case in cases:
        cells = [f"{statistics.median(case.us[side]):>14.1f}" if side in case.us else f"{'–':>14}" for side in SIDES]
        yield f"{case.queues:>7} {case.threads:>7}  " + "".join(cells)
    yield ""
    yield f"{'queues':>7} {'threads':>7}  " + "".join(f"{side + ' p50/p99':>20}" for side in SIDES)
    for case in cases:
        cells = [
            f"{case.latency(side, 50):>11.0f}/{case.latency(side, 99):<8.0f}" if side in case.us else f"{'–':>20}"
            for side in SIDES
        ]
        yield f"{case.queues:>7} {case.threads:>7}  " + "".join(cells)
    yield ""
    yield f"{'queues':>7} {'threads':>7}  {'rate of':>10} ÷ rate of {'':<6}{'measured':>9}{'wanted':>8}"
    for case in cases:
        for (side, other, threads), wanted in TARGETS.items():
            ratio = case.ratio(side, other)
            if threads == case.threads and case.queues in wanted and ratio is not None:
                mark = "" if ratio >= wanted[case.queues] else "   missed"
                yield (
                    f"{case.queues:>7} {case.threads:>7}  {side:>10} ÷ {other:<14}{ratio:>9.2f}"
                    f"{wanted[case.queues]:>8g}{mark}"
                )


def limits(costs: list[dict[str, Any]], bookkeeping: dict[str, float]) -> Iterator[str]:
    """Yield the worst of each cost, with its target."""
    checks = [
        (name, limit, [each[name] for each in costs if each["queues"] <= queues])
        for (name, queues), limit in LIMITS.items()
    ]
    for name, limit, values in [*checks, (ACK, ACK_LIMIT, [bookkeeping[ACK]])]:
        if values:
            yield f"{name}: {max(values)}, wanted at most {limit}" + ("" if max(values) <= limit else "   missed")


def plot(cases: list[Case], path: str) -> None:
    """Draw time per persist over the number of queues, one panel per number of threads."""
    thread_counts = sorted({case.threads for case in cases})
    figure, panels = pyplot().subplots(1, len(thread_counts), figsize=(6 * len(thread_counts), 4.5), sharey=True)
    for panel, threads in zip(panels if len(thread_counts) > 1 else [panels], thread_counts, strict=True):
        for side in SIDES:
            points = [
                (case.queues, statistics.median(case.us[side]))
                for case in cases
                if case.threads == threads and side in case.us
            ]
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    label="disk: pwrite + fdatasync"
                    if side == DISK
                    else f"Java {NEWEST} (no sync)"
                    if side == JAVA
                    else side,
                )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{threads} thread{'s' if threads > 1 else ''}")
        panel.set_xlabel("queues in the store")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("µs per persist (median)")
    figure.axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=QUESTION)
    arguments.add_argument("--quick", action="store_true", help="within a minute: fewer rounds, no 65 536 queues")
    arguments.add_argument("--queues", type=int, nargs="+", help="numbers of queues (16 256 4096 65536)")
    arguments.add_argument("--threads", type=int, nargs="+", help="numbers of threads (1 8)")
    arguments.add_argument("--rounds", type=one_or_more, help="rounds per combination (40)")
    arguments.add_argument("--no-java", action="store_true", help="omit the side java")
    arguments.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    arguments.add_argument("--json", type=new_file, metavar="FILE", help="write the results there too")
    arguments.add_argument("--plot", type=new_file, metavar="PNG", help="draw them (needs matplotlib)")
    options = arguments.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing

    settings = asdict(QUICK if options.quick else Settings())
    for name in ("queues", "threads", "rounds"):
        if getattr(options, name):
            settings[name] = getattr(options, name)
    settings = Settings(**settings)

    java: JavaSide | None = None
    program = None
    if not options.no_java:
        try:
            check_machine()
            program = java_tool("java")
        except CannotRun as reason:
            print(f"without the Java side: {reason}")
    facts = environment(java=program) | {"file_system": file_system(options.directory)}
    print(header(facts) + f", {options.directory} on {facts['file_system']}")
    if facts["file_system"] in ("tmpfs", "ramfs"):
        print("a flush does nothing on this file system: choose another with --directory")
    cases, costs, whole_tables = [], [], []
    with tempfile.TemporaryDirectory(prefix="pyrocket-bench-", dir=options.directory) as name:
        base = Path(name)
        if program is not None:
            progress("starting Java")
            java = JavaSide(base)
        try:
            for count in settings.queues:
                for threads in settings.threads:
                    cases.append(measure(count, threads, settings, java, base))
                progress(f"{count} queues: whole table, bytes, recovery")
                whole_tables.append(measure_all(count, java, base, max(5, settings.rounds // 2)))
                costs.append(measure_costs(count, settings, base))
            bookkeeping = measure_bookkeeping(base)
        finally:
            if java is not None:
                java.close()
    progress("")
    print("\n".join(table(cases)))
    print(f"\n{'queues':>7}{'persist_all us':>16}{'java us':>12}{'rate ÷ java':>13}")
    for each in whole_tables:
        columns = "" if java is None else f"{each['us'][JAVA]:>12.0f}{each['fsync / java']:>13.2f}"
        print(f"{each['queues']:>7}{each['us']['fsync']:>16.0f}{columns}")
    titles = (
        "bytes/persist",
        "CPU us, process",
        "flushes/persist, 8",
        "recovery, ms",
        "its CPU, ms",
        "memory, B/queue",
    )
    print(f"\n{'queues':>7}" + "".join(f"{title:>20}" for title in titles))
    names = (
        "bytes_per_persist",
        "cpu_us_per_persist",
        "flushes_per_persist_8_threads",
        "recovery_ms",
        "recovery_cpu_ms",
        "memory_bytes_per_queue",
    )
    for each in costs:
        print(f"{each['queues']:>7}" + "".join(f"{each[name]:>20}" for name in names))
    print("\nacknowledging a message, CPU us: " + ", ".join(f"{name} {us}" for name, us in bookkeeping.items()))
    print("\n".join(limits(costs, bookkeeping)))
    if options.json:
        answer = {
            "question": QUESTION,
            "environment": facts,
            "settings": asdict(settings),
            "persist": [case.summary() for case in cases],
            "persist_all": whole_tables,
            "costs": costs,
            "bookkeeping": bookkeeping,
        }
        Path(options.json).write_text(json.dumps(answer, indent=1))
    if options.plot:
        plot(cases, options.plot)


if __name__ == "__main__":
    main()
