"""A cleanup job or a user removes or replaces files, the lock or the whole directory of a store in use."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from pyrocket_consumer.errors import OffsetStoreLocked
from pyrocket_consumer.offsets import LocalFileOffsetStore, QueueReset
from pyrocket_consumer.offsets.local.directories import read_owner
from pyrocket_consumer.offsets.local.disk import Disk
from tests.offsets.local.driving import DURABILITIES, ORDERS, QUEUE, leave_offsets, open_store, put, read_store, update
from tests.offsets.local.test_ownership import owner, persist

QUEUES = ORDERS[:3]
FILES = ["offsets.lock", "offsets.owner", "offsets.json", "offsets.json.bak", "offsets.journal"]


class Bench:
    """A store in use, with its own clock, and its events. Its three queues are at 5, and its journal has a 6."""

    def __init__(self, directory, durability="fsync"):
        self.now, self.events, self.directory = 0.0, [], directory
        options = {"clock": lambda: self.now, "on_event": self.events.append, "checkpoint_interval_s": 60}
        self.store = open_store(directory, durability, **options)
        update(self.store, QUEUES, 5)
        self.store.persist_all()
        self.persist(6, QUEUES[2])

    def persist(self, offset, queue=QUEUE):
        put(self.store, queue, offset)

    def kinds(self):
        return [str(event.kind) for event in self.events]

    def after_a_kill(self, tmp_path):
        """Return the offsets that a new process finds, and check that it finds no damage."""
        copy, events = tmp_path / f"copy-{time.monotonic_ns()}", []
        shutil.copytree(self.directory, copy)
        store = open_store(copy, on_event=events.append)
        assert events == []
        return store.clone_offset_table()


def with_offset(offset):
    """Return all stored offsets once QUEUE is at `offset`."""
    return {QUEUE: offset, QUEUES[1]: 5, QUEUES[2]: 6}


@pytest.mark.hazard("H12")
@pytest.mark.live
def test_the_old_owner_stops_after_its_lock_is_removed(tmp_path):
    """By default, an owner whose lock file was removed stops writing, and emits `store-taken`. It can load the store
    again when the other process has ended.
    """
    events = []
    store = open_store(tmp_path / "10.0.0.5@DEFAULT" / "g", on_event=events.append)
    put(store, QUEUE, 5)
    (store.directory / "offsets.lock").unlink()
    with owner(tmp_path) as (process, _, found):
        assert found == 5
        persist(process, 500)
        offset, deadline = 5, time.monotonic() + 30
        with pytest.raises(OffsetStoreLocked, match=f"taken by process {process.pid} .*offsets.lock had been removed"):
            while time.monotonic() < deadline:
                offset += 1
                put(store, QUEUE, offset)
                assert read_store(store.directory).offsets == {QUEUE: 500}
        for call in (store.load, store.persist_all, lambda: store.remove_offset(QUEUE), store.close):
            with pytest.raises(OffsetStoreLocked, match=f"process {process.pid}"):
                call()
        store.close()  # it is
        assert [str(event.kind) for event in events] == ["store-taken"]
        persist(process, 501)
        assert read_owner(Disk(), str(store.directory)).pid == process.pid
        with pytest.raises(OffsetStoreLocked, match="in use by"):
            store.load()
    with store:
        assert store.read_offset(QUEUE) == 501


@pytest.mark.parametrize("durability", DURABILITIES)
def test_an_old_owner_does_no_damage_before_it_notices(tmp_path, durability):
    """Both owners have the same files for a moment. Frames of the old owner must not reach the new owner's files."""
    first = Bench(tmp_path / "s", durability)
    (tmp_path / "s" / "offsets.lock").unlink()
    with LocalFileOffsetStore(tmp_path / "s", "fsync") as second:
        for offset in range(400, 501):
            put(second, QUEUE, offset)
        for offset in range(300, 310):
            if durability != "checkpoint":  # "checkpoint" notices at once
                first.persist(offset, QUEUES[1])
        assert first.after_a_kill(tmp_path) == with_offset(500)
        first.now += 1
        with pytest.raises(OffsetStoreLocked, match="this process"):
            first.persist(7)
        first.store.closes_within(30)
        assert read_owner(Disk(), str(tmp_path / "s")).closes_by is None
        assert first.after_a_kill(tmp_path) == with_offset(500)
    with pytest.raises(OffsetStoreLocked):  # the other owner has ended, but its offsets are newer
        first.persist(7)
    with pytest.raises(OffsetStoreLocked):
        first.store.close()
    with first.store:
        assert first.store.clone_offset_table() == with_offset(500)
    assert first.kinds() == ["store-taken"]


@pytest.mark.parametrize(
    ("call", "passed_s"),
    [
        (lambda store: store.close(), 0),
        (lambda store: store.persist_all(), 60),  # a checkpoint
        (lambda store: store.persist_resets({QUEUE: QueueReset(7, 1)}), 1),
        (lambda store: store.remove_offset(QUEUE), 1),
    ],
    ids=["close", "checkpoint", "resets", "remove"],
)
def test_every_write_checks_the_owner_of_the_store(tmp_path, call, passed_s):
    first = Bench(tmp_path / "s")
    (tmp_path / "s" / "offsets.lock").unlink()
    leave_offsets(tmp_path / "s", [QUEUE], 500)
    first.store.update_offset(QUEUE, 7)
    first.now += passed_s
    with pytest.raises(OffsetStoreLocked, match="this process"):
        call(first.store)
    assert read_store(tmp_path / "s").offsets == with_offset(500)
    assert first.kinds() == ["store-taken"]


@pytest.mark.parametrize("removed", [[name] for name in FILES] + [FILES, FILES[2:], None], ids=str)
@pytest.mark.parametrize("durability", DURABILITIES)
def test_removed_files_are_written_again(tmp_path, durability, removed):
    """A job removes old files, or someone runs `rm -rf`. No process has taken the store, so the owner keeps it."""
    bench = Bench(tmp_path / "s", durability)
    for again in range(3):
        if removed is None:
            shutil.rmtree(tmp_path / "s")
        else:
            for name in removed:
                (tmp_path / "s" / name).unlink(missing_ok=True)
        bench.now += 1
        for offset in (7 + again, 107 + again):
            bench.persist(offset)
            assert bench.after_a_kill(tmp_path) == with_offset(offset)
        with pytest.raises(OffsetStoreLocked, match="in use by"):
            LocalFileOffsetStore(tmp_path / "s").load()
    bench.store.close()
    assert read_store(tmp_path / "s").offsets == with_offset(109)
    harmless = ["offsets.owner", "offsets.json.bak"] + ["offsets.journal"] * (durability == "checkpoint")
    assert bench.kinds() == ([] if removed and removed[0] in harmless else ["store-removed"])


@pytest.mark.parametrize("how", ["close", "persist"])
def test_a_directory_removed_under_an_idle_store_comes_back(tmp_path, how):
    """This works with default options, and while no offset changes."""
    store = open_store(tmp_path / "s")
    put(store, QUEUE, 5)
    shutil.rmtree(tmp_path / "s")
    deadline = time.monotonic() + 30
    while how == "persist" and not (tmp_path / "s").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
        store.persist(QUEUE)
    if how == "close":
        store.close()
    assert read_store(tmp_path / "s").offsets == {QUEUE: 5}
    store.close()


@pytest.mark.parametrize("in_use", [True, False], ids=["in-use", "left"])
@pytest.mark.parametrize("how", ["renamed", "symlink"])
def test_another_store_with_the_same_path_is_not_changed(tmp_path, how, in_use):
    """A directory is renamed and replaced by another, or a symlink is changed to another target."""
    mine, others = tmp_path / "mine", tmp_path / "others"
    leave_offsets(others, [QUEUE], 777)  # the store of another application
    if how == "symlink":
        (tmp_path / "first").mkdir()
        mine.symlink_to("first")
    bench = Bench(mine)
    if how == "symlink":
        mine.unlink()
        mine.symlink_to("others")
    else:
        mine.rename(tmp_path / "kept")
        others.rename(mine)
    other = LocalFileOffsetStore(mine)
    if in_use:
        other.load()
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    bench.now += 60
    for offset in range(7, 10):
        with pytest.raises(OffsetStoreLocked, match=f"offset store {mine} was taken by this process"):
            bench.persist(offset)
    with pytest.raises(OffsetStoreLocked):
        bench.store.close()
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before
    assert bench.kinds() == ["store-taken"]
    other.close()
    assert read_store(mine).offsets == {QUEUE: 777}


def test_a_directory_that_returns_still_belongs_to_its_owner(tmp_path):
    """A volume is unmounted and mounted again. Meanwhile the offsets are in the directory below the mount point."""
    bench = Bench(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "away")
    bench.now += 1
    bench.persist(7)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "away").rename(tmp_path / "s")
    bench.now += 1
    bench.persist(8)
    assert bench.after_a_kill(tmp_path) == with_offset(8)
    bench.store.close()
    assert read_store(tmp_path / "s").offsets == with_offset(8)


def test_a_lock_is_on_the_current_file(tmp_path):
    """This holds even after the file was removed, or replaced by another of the same name, more than once."""
    disk, path = Disk(), str(tmp_path / "offsets.lock")
    first = disk.lock(path)
    assert (first.created_file, first.is_in_place(), disk.lock(path)) == (True, True, None)
    os.remove(path)
    assert not first.is_in_place()
    second = disk.lock(path)
    assert (second.created_file, second.is_in_place(), first.is_in_place(), disk.lock(path)) == (
        True,
        True,
        False,
        None,
    )
    os.replace(path, path + ".old")
    os.link(path + ".old", path)  # the same file has its name again
    assert second.is_in_place()
    first.release()
    assert disk.lock(path) is None
    second.release()
    second.release()
    third = disk.lock(path)
    assert (third.created_file, third.is_in_place(), second.is_in_place()) == (False, True, False)
    third.release()
