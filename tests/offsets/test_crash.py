"""A real process, killed with -9 before each of its file operations in turn, on a real disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.offsets.driving import QUEUES, History
from tests.trials import crash_points, trials

ROOT = Path(__file__).parents[2]


def lives(directory: Path, durability: str, seed: int) -> list[list[str]]:
    """Return what each life of the crashing process said; the last one was not killed."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.offsets.crashing", str(directory), durability, str(seed)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\nended\n")
    return [life.splitlines()[1:] for life in result.stdout.removesuffix("ended\n").split("life ")[1:]]


def listen(history: History, lines: list[str]) -> None:
    for line in lines:
        what, *pairs = line.split()
        if what in ("writing", "acknowledged"):
            offsets = {QUEUES[int(index)]: int(offset) for index, offset in (pair.split("=") for pair in pairs)}
            history.memory.update(offsets)
            (history.writing if what == "writing" else history.acknowledged)(offsets)


@pytest.mark.slow("a process for each file operation")
@pytest.mark.hazard("H13")
@pytest.mark.parametrize("durability", ["fsync", "process", "checkpoint"])
@pytest.mark.parametrize("seed", range(trials(1)))
@pytest.mark.live
def test_a_process_killed_before_any_file_operation(tmp_path, durability, seed):
    first, *others = lives(tmp_path, durability, seed)
    start = History()
    listen(start, first)
    crash_points["kills of a process"] += len(others)
    killed_before = set()
    for number, lines in enumerate(others, start=1):
        history = History()
        history.restarted({queue: values[-1] for queue, values in start.possible.items() if values[-1] is not None})
        listen(history, lines)
        with LocalFileOffsetStore(tmp_path / str(number)) as store:  # the lock is free again
            assert history.violations(store.clone_offset_table()) == [], lines[-1]
            assert store.found.source == "file"
        killed_before.add(lines[-1])
    wanted = ["create offsets.json.new", "sync offsets.json.new", "link offsets.json.bak.new",
              "replace offsets.json.bak", "replace offsets.json", "sync_directory directory"]  # fmt: skip
    if durability != "checkpoint":
        wanted.append("write_at offsets.journal")
    if durability == "fsync":
        wanted.append("sync offsets.journal")
    assert killed_before >= {f"killed {operation}" for operation in wanted}
