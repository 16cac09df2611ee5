"""A real process on a real disk, killed with -9 before each of its file operations in turn."""

from __future__ import annotations

import os
import random
import shutil
import signal
from functools import partial
from itertools import count

import pytest

from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.disk import Disk
from tests.offsets.local.disks import WatchedDisk
from tests.offsets.local.driving import DURABILITIES, History, open_store, run_in_fork, step
from tests.trials import crash_points, trials


class SentHistory(History):
    """A history that also sends each note to the parent process."""

    def __init__(self, report):
        super().__init__()
        self._report = report

    def writing(self, queues):
        super().writing(queues)
        self._report(("writing", self._known(queues)))

    def acknowledged(self, queues):
        super().acknowledged(queues)
        self._report(("acknowledged", self._known(queues)))

    def _known(self, queues):
        return {queue: self.memory[queue] for queue in queues if queue in self.memory}


def live(directory, durability, seed, last, report):
    """Use the store; die before file operation number `last`."""

    def kill(number, operation, path):
        if number == last:
            report(
                ("killed", f"{operation} {'directory' if operation == 'sync_directory' else os.path.basename(path)}")
            )
            os.kill(os.getpid(), signal.SIGKILL)

    history, rng = SentHistory(report), random.Random(seed)
    clock = lambda: rng.random() * 1e6 if rng.random() < 0.1 else 0.0  # noqa: E731
    store = open_store(directory, durability, journal_bytes=4096, disk=WatchedDisk(Disk(), kill), clock=clock)
    history.memory = store.clone_offset_table()
    for _ in range(12):
        step(store, history, rng)
    history.writing(history.memory)
    store.close()
    history.acknowledged(history.memory)


def history_of(reports, start):
    """Return the history of a process that began with the offsets `start`."""
    history = History()
    history.restarted(start)
    for what, offsets in reports:
        if what != "killed":
            history.memory.update(offsets)
            getattr(history, what)(offsets)
    return history


@pytest.mark.slow("a process for each file operation")
@pytest.mark.hazard("H13")
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("seed", range(trials(1)))
@pytest.mark.live
def test_a_process_killed_before_any_file_operation(tmp_path, durability, seed):
    # Each process except the first works on a copy of the files that the first one has left.
    reports, code = run_in_fork(partial(live, tmp_path / "0", durability, seed + 1000, 0))
    assert code == 0
    start = {queue: values[-1] for queue, values in history_of(reports, {}).possible.items() if values[-1] is not None}
    killed_before = set()
    for number in count(1):
        store_directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "0", store_directory)
        reports, code = run_in_fork(partial(live, store_directory, durability, seed, number))
        assert code in (0, -signal.SIGKILL)
        crash_points["kills of a process"] += 1
        with LocalFileOffsetStore(store_directory) as store:  # the lock is free again
            assert history_of(reports, start).violations(store.clone_offset_table()) == [], reports[-1]
            assert store.found.source == "file"
        if code == 0:
            break
        killed_before.add(reports[-1][1])
    wanted = {
        "create offsets.json.new",
        "sync offsets.json.new",
        "link offsets.json.bak.new",
        "replace offsets.json.bak",
        "replace offsets.json",
        "sync_directory directory",
    }
    if durability != "checkpoint":
        wanted.add("write_at offsets.journal")
    if durability == "fsync":
        wanted.add("sync offsets.journal")
    assert killed_before >= wanted
