"""A disk that is full, read-only or broken: told, survived from memory, and healed by itself."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pyrocket_consumer.errors import OffsetStoreError, OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.directories import read_store
from pyrocket_consumer.offsets.offsets_json import encode_offsets
from pyrocket_consumer.offsets.recovery import recover
from tests.for_each import for_each
from tests.offsets.disks import WRITES, Failing, MemoryDisk, WatchedDisk

MEMORY, STORE = ReadOffsetType.READ_FROM_MEMORY, ReadOffsetType.READ_FROM_STORE
QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(4)]
QUEUE = QUEUES[0]
ROOT = Path(__file__).parents[2]


class Bench:
    """A store on a memory disk that fails when told, and what it says."""

    def __init__(self, durability="fsync", **options):
        self.memory_disk, self.failing, self.events, self.now = MemoryDisk(), Failing(), [], 0.0
        self.disk = WatchedDisk(self.memory_disk, self.failing)
        self.store = LocalFileOffsetStore(
            "/s", durability, journal_bytes=4096, disk=self.disk, on_event=self.events.append,
            clock=lambda: self.now, **options,
        )  # fmt: skip

    def after_a_kill(self):
        files = self.memory_disk.files()
        main, backup, journal = (files.get("/s/offsets" + end) for end in (".json", ".json.bak", ".journal"))
        return recover(main, backup, journal).offsets

    def kinds(self):
        return [str(event.kind) for event in self.events]

    def persist(self, offset, queue=QUEUE):
        self.store.update_offset(queue, offset)
        self.store.persist(queue)


@pytest.fixture
def bench():
    bench = Bench()
    bench.store.load()
    for queue in QUEUES:
        bench.persist(5, queue)
    return bench


@pytest.mark.hazard("H07")
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "mount it writable"),
        (errno.EIO, "check the disk"),
        (errno.EACCES, "let this user write"),
        (errno.EDQUOT, "quota"),
        (errno.ENXIO, "check the directory"),
    ],
)
def test_an_unwritable_store_raises_and_keeps_memory(bench, number, remedy):
    bench.failing.error = number
    for offset in range(10, 15):
        with pytest.raises(OffsetStoreUnwritable, match=f"/s.*{remedy}.*kept in memory"):
            bench.persist(offset)
        assert bench.store.read_offset(QUEUE, MEMORY) == bench.store.read_offset(QUEUE) == offset
    assert bench.kinds() == ["store-unwritable"]
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5)
    bench.failing.error = None
    bench.store.persist_all(QUEUES)
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5) | {QUEUE: 14}
    assert bench.kinds() == ["store-unwritable", "store-recovered"]
    bench.store.close()


def test_an_offset_that_could_not_be_stored_is_not_forgotten(bench):
    bench.failing.error = errno.ENOSPC
    bench.store.update_offset(QUEUE, 9)
    with pytest.raises(OffsetStoreUnwritable):
        bench.store.remove_offset(QUEUE)
    assert bench.store.read_offset(QUEUE) == 9
    bench.failing.error = None
    bench.store.remove_offset(QUEUE)
    assert bench.store.read_offset(QUEUE, MEMORY) is None
    assert bench.after_a_kill()[QUEUE] == 9


def test_the_reminder_comes_once_a_minute(bench):
    bench.failing.error = errno.ENOSPC
    for bench.now in range(300):
        with pytest.raises(OffsetStoreUnwritable):
            bench.persist(100 + bench.now)
    assert bench.kinds() == ["store-unwritable"] * 5


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("durability", ["fsync", "process", "checkpoint"])
def test_an_error_at_any_file_operation_loses_nothing(durability, has_links):
    """One operation fails, later ones work: whatever was acknowledged is found after a kill at every later moment."""
    reached = set()
    for broken in range(1, 400):
        bench = Bench(durability)
        bench.memory_disk.has_links = has_links
        count = 0

        def fail_once(operation, path, broken=broken):
            nonlocal count
            count += operation in WRITES
            if operation in WRITES and count == broken:
                reached.add((operation, os.path.basename(path)))
                return True
            return False

        bench.failing.error, bench.failing.when = errno.EIO, fail_once
        try:
            bench.store.load()
        except OffsetStoreError:
            bench.store.load()
        stored = {}
        for number in range(24):
            bench.now += 0.6 * (number > 12)
            queue = QUEUES[number % 4]
            bench.store.update_offset(queue, number)
            try:
                if number % 5 == 4:
                    bench.store.persist_all()
                    stored = bench.store.clone_offset_table()
                else:
                    bench.store.persist(queue)
                    stored[queue] = number
            except OffsetStoreUnwritable:
                found = bench.after_a_kill()
                assert {mq: found.get(mq) for mq in stored if mq != queue}.items() <= stored.items() | found.items()
                assert all(found.get(mq, -1) >= offset for mq, offset in stored.items())
                bench.store.persist_all()
                stored = bench.store.clone_offset_table()
            found = bench.after_a_kill()
            assert all(found.get(mq, -1) >= offset for mq, offset in stored.items()), (broken, number)
        for queue in QUEUES:
            bench.store.update_offset(queue, 30)
        try:
            bench.store.close()
            stored = dict.fromkeys(QUEUES, 30)
        except OffsetStoreUnwritable:
            assert count >= broken
        found = bench.after_a_kill()
        assert all(found.get(mq, -1) >= offset for mq, offset in stored.items()), broken
        if count < broken:
            break
    else:
        pytest.fail("operations without end")
    names = {name for _, name in reached}
    assert {"offsets.json.new", "offsets.json", "offsets.json.bak", "offsets.json.bak.new"} <= names
    assert ("replace", "offsets.json") in reached
    if durability == "fsync":
        assert ("sync", "offsets.journal") in reached


def test_after_a_failed_flush_only_a_checkpoint_counts(bench):
    """The kernel reports a failed write-back once; the next flush of the same file 'succeeds'."""
    bench.failing.when = lambda operation, path: operation == "sync" and path.endswith(".journal")
    bench.failing.error = errno.EIO
    bench.persist(6)  # the journal's flush fails, a checkpoint has it
    assert bench.failing.failures == 1
    files = bench.memory_disk.files()
    assert b":6" in files["/s/offsets.json"]
    bench.failing.when = lambda operation, path: operation == "sync"
    with pytest.raises(OffsetStoreUnwritable):
        bench.persist(7)
    with pytest.raises(OffsetStoreUnwritable):  # an unchanged value is not durable either
        bench.store.persist(QUEUE)
    with pytest.raises(OffsetStoreUnwritable):
        bench.store.persist_all([])
    bench.failing.error = None
    bench.store.persist(QUEUE)
    assert bench.after_a_kill()[QUEUE] == 7
    bench.persist(8)
    assert bench.after_a_kill()[QUEUE] == 8


def test_a_failed_write_does_not_count_with_a_later_one(bench):
    bench.failing.error = errno.ENOSPC
    with pytest.raises(OffsetStoreUnwritable):
        bench.persist(9, QUEUES[0])
    bench.failing.when = lambda operation, path: operation == "create"
    try:
        bench.persist(9, QUEUES[1])
    except OffsetStoreUnwritable:
        pass
    for queue in QUEUES[:2]:
        try:
            bench.store.persist(queue)
        except OffsetStoreUnwritable:
            continue
        assert bench.after_a_kill()[queue] == 9
    bench.failing.error = None
    bench.store.persist(QUEUES[2])
    assert [bench.after_a_kill()[queue] for queue in QUEUES[:2]] == [9, 9]


def test_a_flush_after_a_failed_one_acknowledges_nothing():
    """The first flush fails while two others wait; the next on the same descriptor would be told by Linux that all is
    well. The checkpoint fails, too: nobody may be told that anything is durable."""
    names, outcomes = [], {}
    first_flushes, others_come = threading.Event(), threading.Event()

    def disk_hook(count, operation, path):
        name = threading.current_thread().name
        if operation == "create" and name in ("first", "second", "third"):
            raise OSError(errno.EIO, "broken")
        if operation == "sync" and path.endswith(".journal"):
            names.append(name)
            if name == "first":
                first_flushes.set()
                assert others_come.wait(30)
                time.sleep(0.05)  # they wait by now, or come later: the outcome is the same
                raise OSError(errno.EIO, "broken")

    store = LocalFileOffsetStore("/s", disk=WatchedDisk(MemoryDisk(), disk_hook))
    store.load()
    for queue in QUEUES:
        store.update_offset(queue, 1)
    store.persist_all()

    def persist(queue):
        name = threading.current_thread().name
        store.update_offset(queue, 2)
        if name == "third":
            others_come.set()
        try:
            store.persist(queue)
            outcomes[name] = "durable"
        except OffsetStoreUnwritable:
            outcomes[name] = "refused"

    first, *others = (
        threading.Thread(target=persist, args=(queue,), name=name)
        for queue, name in zip(QUEUES, ("first", "second", "third"), strict=False)
    )
    first.start()
    assert first_flushes.wait(30)
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(30)
    assert outcomes == dict.fromkeys(("first", "second", "third"), "refused")
    assert names == ["first"]
    store.persist_all()
    store.close()


@pytest.mark.parametrize("operation", ["write_at", "sync"])
def test_what_an_interrupted_flush_carried_is_written_again(bench, operation):
    interrupts = [KeyboardInterrupt]

    def interrupt(count, what, path):
        if interrupts and what == operation and path.endswith(".journal"):
            raise interrupts.pop()

    bench.disk._hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.persist(6)
    bench.persist(7, QUEUES[1])
    assert bench.after_a_kill()[QUEUES[1]] == 7
    bench.store.persist(QUEUE)
    assert bench.after_a_kill()[QUEUE] == 6
    bench.persist(8)
    assert bench.after_a_kill()[QUEUE] == 8
    bench.store.close()


@pytest.mark.live
def test_a_failed_flush_fails_for_everyone_who_waited_for_it():
    """Eight threads share flushes; one flush fails and so does every checkpoint: nobody may be told it is durable."""
    bench = Bench()
    bench.store.load()
    queues = [MessageQueue("orders", "broker-a", number) for number in range(8)]
    for queue in queues:
        bench.persist(1, queue)
    everyone_waits, told = threading.Barrier(8), []

    def first_sync_fails(operation, path):
        return (operation == "sync" and path.endswith(".journal")) or operation == "create"

    bench.failing.when, bench.failing.error = first_sync_fails, errno.EIO

    def work(queue):
        everyone_waits.wait()
        for offset in range(2, 20):
            try:
                bench.persist(offset, queue)
                told.append((queue, offset))
            except OffsetStoreUnwritable:
                pass

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == []
    bench.failing.error = None
    bench.store.persist_all()
    assert bench.after_a_kill() == dict.fromkeys(queues, 19)


def test_a_full_disk_stops_checkpoints_but_not_the_journal(bench):
    bench.failing.when = lambda operation, path: operation == "create"
    bench.failing.error = errno.ENOSPC
    for offset in range(6, 20):
        bench.now += 1  # the checkpoint interval passes several times
        bench.persist(offset)
        assert bench.after_a_kill()[QUEUE] == offset
    assert bench.kinds() == ["store-unwritable"]
    bench.failing.error = None
    bench.now += 10
    bench.persist(20)
    assert bench.kinds() == ["store-unwritable", "store-recovered"]


def test_a_failed_checkpoint_does_not_count_with_a_later_frame():
    """A table too large for the journal, on a full disk; what the journal has room for must not count in its place."""
    bench = Bench()
    bench.store.load()
    table = [MessageQueue("orders", "broker-a", number) for number in range(200)]
    for queue in table:
        bench.store.update_offset(queue, 5)
    bench.store.persist_all()
    bench.failing.when = lambda operation, path: operation == "create"
    bench.failing.error = errno.ENOSPC
    for queue in table:
        bench.store.update_offset(queue, 6)
    for persist in (bench.store.persist_all, lambda: bench.persist(7), bench.store.persist_all):
        with pytest.raises(OffsetStoreUnwritable):
            persist()
    assert bench.after_a_kill() == dict.fromkeys(table, 5)
    bench.failing.error = None
    bench.store.persist(QUEUE)
    assert bench.after_a_kill() == dict.fromkeys(table, 6) | {QUEUE: 7}
    bench.store.close()


def test_a_store_on_a_full_disk_starts_and_works_from_memory():
    full = Bench()
    full.memory_disk.put("/s/offsets.json", encode_offsets({QUEUE: 5}))
    full.failing.error = errno.ENOSPC
    full.failing.when = lambda operation, path: operation in WRITES and operation != "make_directories"
    full.store.load()
    assert full.store.read_offset(QUEUE) == 5
    with pytest.raises(OffsetStoreUnwritable):
        full.persist(6)
    full.failing.error = None
    full.store.persist_all()
    full.store.close()


@for_each(
    "number, remedy",
    [
        (errno.EROFS, "mount it writable"), (errno.EACCES, "let this user write"), (errno.ENXIO, "check the directory"),
        (errno.ENOLCK, "this file system lacks what a store needs, locks above all: use a local one"),
        (errno.ENOTSUP, "this file system lacks what a store needs, locks above all: use a local one"),
        (errno.ENOSYS, "this file system lacks what a store needs, locks above all: use a local one"),
        (errno.EMFILE, "raise the limit on open files"), (errno.ENAMETOOLONG, "use shorter names"),
        (errno.ESTALE, "mount it again"), (errno.ENOSPC, "free some space"), (errno.EDQUOT, "raise the quota"),
    ],
)
@for_each("operation", ["make_directories", "lock"])
def test_a_store_that_cannot_be_opened_gives_the_remedy(number, remedy, operation):
    bench = Bench()
    bench.failing.error, bench.failing.when = number, lambda called, path: called == operation
    with pytest.raises(OffsetStoreUnwritable) as refused:
        bench.store.load()
    told = str(refused.value)
    assert told.startswith(f"offset store /s cannot be opened: {os.strerror(number)}; {remedy}"), told
    assert told.endswith("or choose another directory. Nothing was started"), told
    assert "memory" not in told, told
    bench.failing.error = None
    bench.store.load()
    bench.persist(5)
    bench.store.close()


@pytest.mark.hazard("H07")
def test_a_directory_that_cannot_be_made_fails_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "store", tmp_path / "file" / "client" / "group"):
        with pytest.raises(OffsetStoreUnwritable, match=f"{directory} .*; a file is where a directory should be"):
            LocalFileOffsetStore(directory).load()


def test_closing_an_unwritable_store_says_so_and_frees_it(bench):
    bench.failing.error = errno.ENOSPC
    bench.store.update_offset(QUEUE, 9)
    with pytest.raises(OffsetStoreUnwritable, match="/s before it was closed: .*free some space.* come again"):
        bench.store.close()
    bench.failing.error = None
    bench.store.load()
    assert bench.store.read_offset(QUEUE) == 5
    bench.store.close()
    assert bench.after_a_kill()[QUEUE] == 5


def no_new_files(operation, path):
    """What a full disk refuses: the journal has its room already."""
    return operation == "create"


@pytest.mark.parametrize("waits_s", [0, 60])
@pytest.mark.parametrize("persisted", [True, False])
@pytest.mark.parametrize("durability", ["fsync", "process"])
def test_closing_on_a_full_disk_uses_the_journal(durability, persisted, waits_s):
    bench = Bench(durability)
    bench.store.load()
    bench.persist(5)
    bench.failing.error, bench.failing.when = errno.ENOSPC, no_new_files
    bench.store.update_offset(QUEUE, 6)
    bench.store.update_offset(QUEUES[1], 7)
    if persisted:
        bench.store.persist_all()
    bench.now += waits_s
    bench.store.close()
    assert bench.after_a_kill() == {QUEUE: 6, QUEUES[1]: 7}
    assert bench.kinds() == ["store-unwritable"]
    told = bench.events[0].text
    assert "/s" in told and "free some space" in told and "Nothing is lost" in told and "memory" not in told, told
    bench.failing.error = None
    with bench.store:
        assert bench.store.clone_offset_table() == {QUEUE: 6, QUEUES[1]: 7}
    assert bench.memory_disk.files()["/s/offsets.json"] == encode_offsets({QUEUE: 6, QUEUES[1]: 7})
    assert bench.kinds() == ["store-unwritable", "store-recovered"]


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("refused", ["create", "replace", "sync_directory"])
def test_power_may_fail_after_a_close_without_checkpoint(bench, refused, has_links):
    bench.memory_disk.has_links = has_links
    bench.failing.error, bench.failing.when = errno.EIO, lambda operation, path: operation == refused
    bench.store.update_offset(QUEUE, 6)
    bench.store.close()
    assert bench.failing.failures == 1 + (refused == "replace" and has_links)  # the backup's is tried twice
    for seed in range(50):
        store = LocalFileOffsetStore("/s", disk=bench.memory_disk.after_power_loss(random.Random(seed)))
        store.load()
        assert store.clone_offset_table() == dict.fromkeys(QUEUES, 5) | {QUEUE: 6}


def test_closing_on_a_full_disk_without_room_in_the_journal(bench):
    bench.failing.error, bench.failing.when = errno.ENOSPC, no_new_files
    for number in range(200):
        bench.store.update_offset(MessageQueue("orders", "broker-a", number), 6)
    with pytest.raises(OffsetStoreUnwritable, match="not all offsets could be written to /s .*free some space"):
        bench.store.close()
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5)


@pytest.mark.parametrize("removed", [["offsets.lock"], ["offsets.json", "offsets.json.bak", "offsets.journal"]])
def test_closing_counts_on_nothing_that_is_removed_meanwhile(bench, removed):
    def remove_and_fail(operation, path):
        if operation == "sync" and path.endswith(".journal"):
            for name in removed:
                bench.memory_disk.remove(f"/s/{name}")
        return operation in ("create", "lock")

    bench.failing.error, bench.failing.when = errno.ENOSPC, remove_and_fail
    bench.store.update_offset(QUEUE, 6)
    with pytest.raises(OffsetStoreUnwritable, match="not all offsets could be written"):
        bench.store.close()
    assert all("Nothing is lost" not in event.text for event in bench.events)


@for_each("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@for_each("durability", ["fsync", "process", "checkpoint"])
def test_a_file_system_without_directory_sync_is_used(number, durability):
    bench = Bench(durability)
    bench.failing.error, bench.failing.when = number, lambda operation, path: operation == "sync_directory"
    for offset in range(1, 4):
        with bench.store:
            bench.now += 10
            bench.persist(offset)
            assert bench.after_a_kill() == {QUEUE: offset}
            bench.persist(offset + 100)
            assert bench.after_a_kill() == {QUEUE: offset + 100}
    assert bench.failing.failures >= 3
    assert bench.kinds() == ["store-unsynced"]
    assert "cannot sync directories" in bench.events[0].text


@pytest.mark.parametrize("operation", ["sync", "write_at", "replace"])
def test_an_error_of_a_file_is_not_taken_for_one_of_directories(operation):
    bench = Bench()
    bench.store.load()
    bench.failing.error, bench.failing.when = errno.EINVAL, lambda called, path: called == operation
    with pytest.raises(OffsetStoreUnwritable):
        bench.persist(9)
    assert bench.kinds() == ["store-unwritable"]


def test_a_disk_that_breaks_while_names_are_synced_is_an_error():
    bench = Bench()
    bench.store.load()
    bench.failing.error, bench.failing.when = errno.EIO, lambda operation, path: operation == "sync_directory"
    bench.store.update_offset(QUEUE, 9)
    with pytest.raises(OffsetStoreUnwritable, match="check the disk"):
        bench.store.close()
    assert bench.kinds() == ["store-unwritable"]


def test_a_listener_of_events_may_use_the_store_and_may_fail():
    seen = []

    def on_event(event):
        seen.append(store.read_offset(QUEUE))
        store.update_offset(QUEUES[1], 77)
        raise RuntimeError("of the user")

    failing = Failing()
    store = LocalFileOffsetStore("/s", disk=WatchedDisk(MemoryDisk(), failing), on_event=on_event)
    store.load()
    store.update_offset(QUEUE, 9)
    failing.error = errno.ENOSPC
    with pytest.raises(OffsetStoreUnwritable):
        store.persist(QUEUE)
    assert seen == [9]


WITH_LIMITS = """
import os, resource, sys
from pyrocket_consumer.errors import OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
queues = [MessageQueue("orders", "broker-a", number) for number in range(400)]

def opened(directory, queues):
    events = []
    tell = lambda event: events.append(str(event.kind))
    store = LocalFileOffsetStore(directory, checkpoint_interval_s=0, on_event=tell)
    store.load()
    for queue in queues:
        store.update_offset(queue, 1)
    store.persist_all()
    return store, events

store, events = opened(sys.argv[1], queues[:10])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # offsets.json of 400 queues has 32 KB
refused = 0
for queue in queues:
    store.update_offset(queue, 2)
    try:
        store.persist(queue)
    except OffsetStoreUnwritable as error:
        assert "limit on file sizes" in str(error), error
        refused += 1
assert refused > 0 and events == ["store-unwritable"], (refused, events)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.persist_all()
assert events == ["store-unwritable", "store-recovered"], events
print("recovered")

store, events = opened(sys.argv[2], queues[:1])
highest = os.open(os.devnull, os.O_RDONLY)
os.close(highest)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    LocalFileOffsetStore(sys.argv[2] + "-another").load()
except OffsetStoreUnwritable as error:
    assert "raise the limit on open files" in str(error), error
    print("refused")
for offset in range(2, 5):
    store.update_offset(queues[0], offset)
    store.persist(queues[0])  # the journal is open
assert events == ["store-unwritable"], events
store.update_offset(queues[0], 5)
store.close()
print("closed")
"""


@pytest.mark.live
@pytest.mark.hazard("H07")
def test_real_limits_on_file_sizes_and_descriptors_are_survived(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", WITH_LIMITS, str(tmp_path / "sizes"), str(tmp_path / "descriptors")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.stdout == "recovered\nrefused\nclosed\n", result.stderr
    assert read_store(tmp_path / "sizes").offsets == {
        MessageQueue("orders", "broker-a", number): 2 for number in range(400)
    }
    assert read_store(tmp_path / "descriptors").offsets == {QUEUE: 5}
