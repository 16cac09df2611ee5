"""After a power failure at any moment a restart finds the acknowledged offsets, and no offset that was never written.

The disk is a model. Each sector of an unsynced write may survive or not, and unsynced renames survive in order up to
some point. Negative controls at the end show that the model is strict: without one part of the design, trials fail.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

import pytest

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local import journal as journal_format
from pyrocket_consumer.offsets.local.journal import HEADER_BYTES, JournalHeader, decode_header
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from tests.offsets.local.disks import MemoryDisk, PowerCut, WatchedDisk
from tests.offsets.local.driving import History, step
from tests.trials import crash_points, trials

Read = Callable[[MemoryDisk], dict[MessageQueue, int]]


class Trial:
    """One or several runs of a store on a disk that loses power during some file operation."""

    def __init__(self, seed: int, *, durability: str = "fsync", disk: MemoryDisk | None = None) -> None:
        self.rng, self.history = random.Random(seed), History()
        self.disk, self.durability = disk or MemoryDisk(), durability
        self.has_links = self.rng.random() < 0.8

    def live(self) -> None:
        """Use the store until the power fails."""
        last = self.rng.randint(
            1, self.rng.choice([15, 120])
        )  # short runs also cover the files that the previous run has left
        self.dead = False

        def cut(count: int, operation: str, path: str) -> None:
            # After the power failure no write reaches the disk, not even the store's clean-up.
            self.dead = self.dead or count >= last
            if self.dead:
                raise PowerCut

        self.disk.has_links = self.has_links
        clock = lambda: self.rng.random() * 1e6 if self.rng.random() < 0.05 else 0.0  # noqa: E731
        store = LocalFileOffsetStore(
            "/s", self.durability, journal_bytes=4096, disk=WatchedDisk(self.disk, cut), clock=clock
        )
        try:
            store.load()
            while True:
                step(store, self.history, self.rng)
                if self.rng.random() < 0.01:
                    self.history.writing(self.history.memory)
                    store.close()
                    self.history.acknowledged(self.history.memory)
                    store.load()
        except PowerCut:
            pass

    def restart(self, read: Read, *, kill: bool = False) -> list[str]:
        """Restart the machine, or only the process. Return the offsets found that are wrong."""
        crash_points["kills in the model" if kill else "power failures in the model"] += 1
        if kill:
            self.disk.free_locks()
        else:
            before, self.disk = self.disk, self.disk.after_power_loss(self.rng)
            self.disk.beginnings = before.beginnings
        try:
            found = read(self.disk)
        except RocketError as error:
            return [f"nothing could be read: {error}"]
        wrong = self.history.violations(found)
        (self.history.killed if kill else self.history.restarted)(found)
        return wrong


@pytest.mark.search
@pytest.mark.parametrize(
    ("durability", "kills", "count", "runs"),
    [
        ("fsync", 0.0, 400, 3),
        ("checkpoint", 0.0, 400, 3),
        ("fsync", 1.0, 150, 3),
        ("process", 1.0, 150, 3),
        ("checkpoint", 1.0, 150, 3),
        ("fsync", 0.6, 250, 6),
        ("checkpoint", 0.6, 250, 6),
    ],
)
def test_a_crash_loses_nothing_that_was_acknowledged(durability, kills, count, runs):
    """The power fails, or the process is killed, or the power fails after some kills.

    A restart finds unsynced writes of a killed process. They count as durable only after the next persist.
    """
    for seed in range(trials(count)):
        trial = Trial(seed, durability=durability)
        for run in range(runs):
            trial.live()
            kill = kills == 1 or (kills > 0 and trial.rng.random() < kills)
            assert trial.restart(MemoryDisk.recovered, kill=kill) == [], f"seed {seed}, life {run}, kill {kill}"


@pytest.mark.search
def test_process_durability_survives_power_loss_with_old_values():
    for seed in range(trials(200)):
        trial = Trial(seed, durability="process")
        written: dict[MessageQueue, set[int | None]] = {}
        remember = trial.history.writing

        def remembering(queues, remember=remember, written=written, trial=trial):
            queues = list(queues)
            for queue in queues:
                written.setdefault(queue, set()).add(trial.history.memory.get(queue))
            remember(queues)

        trial.history.writing = remembering
        trial.live()
        crash_points["power failures in the model"] += 1
        found = trial.disk.after_power_loss(trial.rng).recovered()
        assert all(offset in written[queue] for queue, offset in found.items()), f"seed {seed}"


@pytest.mark.search
def test_power_fails_while_threads_share_flushes():
    """A restart finds each offset that a thread has persisted. A short switch interval makes the threads interleave."""
    queues = [MessageQueue("orders", "broker-a", number) for number in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for seed in range(trials(25)):
            rng, disk, dead = random.Random(seed), MemoryDisk(), threading.Event()
            last = rng.randint(10, 150)

            def cut(count: int, operation: str, path: str) -> None:
                if operation == "sync":
                    time.sleep(0.0002)  # other threads append meanwhile
                if count >= last or dead.is_set():  # noqa: B023
                    dead.set()  # noqa: B023
                    raise PowerCut

            store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=WatchedDisk(disk, cut))
            store.load()
            tried, confirmed = [0] * len(queues), [0] * len(queues)

            def work(number: int) -> None:
                try:
                    while True:
                        tried[number] += 1  # noqa: B023
                        store.update_offset(queues[number], tried[number])  # noqa: B023
                        store.persist(queues[number])  # noqa: B023
                        confirmed[number] = tried[number]  # noqa: B023
                except PowerCut:
                    pass

            with ThreadPoolExecutor(len(queues)) as threads:
                list(threads.map(work, range(len(queues)), timeout=60))
            crash_points["power failures in the model"] += 1
            found = disk.after_power_loss(rng).recovered()
            for number, queue in enumerate(queues):
                assert confirmed[number] <= found.get(queue, 0) <= tried[number], f"seed {seed}"
    finally:
        sys.setswitchinterval(interval)


# Negative controls


def walk(
    journal: bytes, header: JournalHeader, valid: Callable[[bytes, int, int, int], bool]
) -> dict[MessageQueue, int]:
    """Read frames one after the other as long as `valid(journal, at, end, crc)`; no marker, no search."""
    offsets, names, at = {}, {}, HEADER_BYTES
    while at + 8 <= len(journal):
        crc, marker, word = journal_format._FRAME.unpack_from(journal, at)
        kind, count = word >> 14, word & 0x3FFF
        end = at + 8 + (count * 14 if kind == 1 else count)
        if not marker or kind not in (1, 2) or end > len(journal) or not valid(journal, at, end, crc):
            break
        if kind == 1:
            for start in range(at + 8, end, 14):
                pair, queue_id, offset = journal_format._RECORD.unpack_from(journal, start)
                if pair in names:
                    offsets[MessageQueue(*names[pair], queue_id)] = offset
        elif count >= 6:
            pair, first, second = journal_format._NAMES.unpack_from(journal, at + 8)
            text = journal[at + 14 : at + 14 + first + second]
            names[pair] = text[:first].decode("utf-8", "replace"), text[first:].decode("utf-8", "replace")
        at = end
    return offsets


def read_with(valid: Callable[[bytes, int, int, int, int], bool], *, any_generation: bool = False) -> Read:
    def read(disk: MemoryDisk) -> dict[MessageQueue, int]:
        files = disk.files()
        text, journal = files.get("/s/offsets.json"), files.get("/s/offsets.journal")
        offsets = {} if text is None else decode_checkpoint(text)[0]
        if journal is not None:
            header = decode_header(journal)
            generations = {header.generation}
            if any_generation:
                beginnings = [each.ljust(HEADER_BYTES, b"\0") for each in disk.beginnings if each[:8] == journal[:8]]
                generations |= {decode_header(each).generation for each in beginnings}
            if text is None or header.follows(text):
                check = lambda data, at, end, crc: any(valid(data, at, end, crc, each) for each in generations)  # noqa: E731
                offsets.update(walk(journal, header, check))
        return offsets

    return read


def checked(journal: bytes, at: int, end: int, crc: int, generation: int) -> bool:
    return crc32(journal[at + 4 : end], generation & 0xFFFFFFFF) == crc


def no_crc(journal: bytes, at: int, end: int, crc: int, generation: int) -> bool:
    return True


def failures(read: Read, count: int, **disk_options) -> int:
    failed = 0
    for seed in range(count):
        trial = Trial(seed, disk=MemoryDisk(**disk_options))
        trial.has_links = True
        trial.live()
        failed += bool(trial.restart(read))
    return failed


def test_the_reader_of_the_controls_is_correct():
    assert failures(read_with(checked), trials(200)) == 0


@pytest.mark.parametrize(
    ("read", "disk_options"),
    [
        (read_with(checked, any_generation=True), {}),
        (read_with(no_crc), {}),
        (MemoryDisk.recovered, {"lying_files": (".journal", ".journal.new")}),
        (MemoryDisk.recovered, {"lying_files": (".json.new",), "lying_directories": True}),
        (MemoryDisk.recovered, {"lying_directories": True}),
    ],
    ids=["no generation seed", "no crc", "ack before sync", "checkpoint not durable", "directory not synced"],
)
def test_without_one_part_of_the_design_offsets_are_lost(read, disk_options):
    assert failures(read, 200, **disk_options) > 0
