"""On a full, read-only or broken disk the store emits events, works from memory, and recovers by itself."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from pyrocket_consumer.errors import OffsetStoreError, OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.for_each import for_each
from tests.offsets.local.disks import WRITES, FailureHook, MemoryDisk, WatchedDisk
from tests.offsets.local.driving import (
    DURABILITIES,
    MEMORY,
    ORDERS,
    QUEUE,
    encode_offsets,
    open_store,
    put,
    read_store,
    run_in_fork,
    update,
)

QUEUES = ORDERS[:4]
TABLE = [MessageQueue("orders", "broker-a", number) for number in range(200)]  # too many for the journal


class Bench:
    """A store on a memory disk that fails on request, and the store's events."""

    def __init__(self, durability="fsync", **options):
        self.memory_disk, self.failing, self.events, self.now = MemoryDisk(), FailureHook(), [], 0.0
        self.disk = WatchedDisk(self.memory_disk, self.failing)
        self.store = LocalFileOffsetStore(
            "/s",
            durability,
            journal_bytes=4096,
            disk=self.disk,
            on_event=self.events.append,
            clock=lambda: self.now,
            **options,
        )

    def fail(self, number, *operations):
        """Let these operations fail from now on, or all that write."""
        self.fail_when(number, lambda operation, path: operation in (operations or WRITES))

    def fail_when(self, number, when):
        self.failing.error, self.failing.when = number, when

    def heal(self):
        self.failing.error = None

    def after_a_kill(self):
        return self.memory_disk.recovered()

    def kinds(self):
        return [str(event.kind) for event in self.events]

    def persist(self, offset, queue=QUEUE):
        put(self.store, queue, offset)

    def refuses(self, persist, match=None):
        with pytest.raises(OffsetStoreUnwritable, match=match):
            persist()


@pytest.fixture
def new():
    """Return a bench with an open store without offsets."""
    bench = Bench()
    bench.store.load()
    return bench


@pytest.fixture
def bench(new):
    """Return a bench with a store that has offset 5 for four queues."""
    for queue in QUEUES:
        new.persist(5, queue)
    return new


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
    bench.fail(number)
    for offset in range(10, 15):
        bench.refuses(lambda offset=offset: bench.persist(offset), f"/s.*{remedy}")
        assert bench.store.read_offset(QUEUE, MEMORY) == bench.store.read_offset(QUEUE) == offset
    assert bench.kinds() == ["store-unwritable"]
    assert re.search(f"/s.*{remedy}.*kept in memory", bench.events[0].text)
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5)
    bench.heal()
    bench.store.persist_all(QUEUES)
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5) | {QUEUE: 14}
    assert bench.kinds() == ["store-unwritable", "store-recovered"]
    bench.store.close()


def test_an_offset_that_could_not_be_stored_is_not_forgotten(bench):
    bench.fail(errno.ENOSPC)
    bench.store.update_offset(QUEUE, 9)
    bench.refuses(lambda: bench.store.remove_offset(QUEUE))
    assert bench.store.read_offset(QUEUE) == 9
    bench.heal()
    bench.store.remove_offset(QUEUE)
    assert bench.store.read_offset(QUEUE, MEMORY) is None
    assert bench.after_a_kill()[QUEUE] == 9


def test_the_reminder_comes_once_a_minute(bench):
    bench.fail(errno.ENOSPC)
    for bench.now in range(300):
        bench.refuses(lambda: bench.persist(100 + bench.now))
    assert bench.kinds() == ["store-unwritable"] * 5


@pytest.mark.slow("fails each operation on files once")
@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_an_error_at_any_file_operation_loses_nothing(durability, has_links):
    """One operation fails, and later ones work. A restart after a later kill finds all acknowledged offsets."""
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

        def nothing_is_lost(stored, where, bench=bench):
            found = bench.after_a_kill()
            assert all(found.get(mq, -1) >= offset for mq, offset in stored.items()), where

        bench.fail_when(errno.EIO, fail_once)
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
                nothing_is_lost(stored, (broken, number))
                bench.store.persist_all()
                stored = bench.store.clone_offset_table()
            nothing_is_lost(stored, (broken, number))
        update(bench.store, QUEUES, 30)
        try:
            bench.store.close()
            stored = dict.fromkeys(QUEUES, 30)
        except OffsetStoreUnwritable:
            assert count >= broken
        nothing_is_lost(stored, broken)
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
    bench.fail_when(errno.EIO, lambda operation, path: operation == "sync" and path.endswith(".journal"))
    bench.persist(6)  # the journal's flush fails, so a checkpoint stores it
    assert bench.failing.failures == 1
    assert b":6" in bench.memory_disk.files()["/s/offsets.json"]
    bench.fail(errno.EIO, "sync")
    bench.refuses(lambda: bench.persist(7))
    bench.refuses(lambda: bench.store.persist(QUEUE))  # an unchanged value is not durable, either
    bench.refuses(lambda: bench.store.persist_all([]))
    bench.heal()
    bench.store.persist(QUEUE)
    assert bench.after_a_kill()[QUEUE] == 7
    bench.persist(8)
    assert bench.after_a_kill()[QUEUE] == 8


def test_a_failed_write_does_not_count_with_a_later_one(bench):
    bench.fail(errno.ENOSPC)
    bench.refuses(lambda: bench.persist(9, QUEUES[0]))
    bench.fail(errno.ENOSPC, "create")
    with suppress(OffsetStoreUnwritable):
        bench.persist(9, QUEUES[1])
    for queue in QUEUES[:2]:
        with suppress(OffsetStoreUnwritable):
            bench.store.persist(queue)
            assert bench.after_a_kill()[queue] == 9
    bench.heal()
    bench.store.persist(QUEUES[2])
    assert [bench.after_a_kill()[queue] for queue in QUEUES[:2]] == [9, 9]


def test_a_flush_after_a_failed_one_acknowledges_nothing():
    """The first flush fails while two others wait, and on Linux the next one on the same descriptor succeeds.

    The checkpoint fails, too, so no caller may see its offset as durable.
    """
    flushed_by, outcomes = [], {}
    first_flushes, others_come = threading.Event(), threading.Event()

    def disk_hook(count, operation, path):
        name = threading.current_thread().name
        if operation == "create" and name in ("first", "second", "third"):
            raise OSError(errno.EIO, "broken")
        if operation == "sync" and path.endswith(".journal"):
            flushed_by.append(name)
            if name == "first":
                first_flushes.set()
                assert others_come.wait(30)
                time.sleep(0.05)  # they wait by now, or start to wait later; both have the same result
                raise OSError(errno.EIO, "broken")

    store = open_store(disk=WatchedDisk(MemoryDisk(), disk_hook))
    update(store, QUEUES, 1)
    store.persist_all()

    def persist(queue, name):
        store.update_offset(queue, 2)
        if name == "third":
            others_come.set()
        try:
            store.persist(queue)
            outcomes[name] = "durable"
        except OffsetStoreUnwritable:
            outcomes[name] = "refused"

    names = ("first", "second", "third")
    threads = [threading.Thread(target=persist, args=each, name=each[1]) for each in zip(QUEUES, names, strict=False)]
    threads[0].start()
    assert first_flushes.wait(30)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == dict.fromkeys(names, "refused")
    assert flushed_by == ["first"]
    store.persist_all()
    store.close()


@pytest.mark.parametrize("operation", ["write_at", "sync"])
def test_frames_of_an_interrupted_flush_are_written_again(bench, operation):
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
def test_a_failed_flush_fails_for_all_its_waiters(new):
    """Eight threads share flushes. One flush fails, and so does every checkpoint, so every `persist` must fail."""
    for queue in ORDERS:
        new.persist(1, queue)
    everyone_waits, text = threading.Barrier(8), []

    def first_sync_fails(operation, path):
        return (operation == "sync" and path.endswith(".journal")) or operation == "create"

    new.fail_when(errno.EIO, first_sync_fails)

    def work(queue):
        everyone_waits.wait()
        for offset in range(2, 20):
            with suppress(OffsetStoreUnwritable):
                new.persist(offset, queue)
                text.append((queue, offset))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, ORDERS, timeout=60))
    assert text == []
    new.heal()
    new.store.persist_all()
    assert new.after_a_kill() == dict.fromkeys(ORDERS, 19)


def test_a_full_disk_stops_checkpoints_but_not_the_journal(bench):
    bench.fail(errno.ENOSPC, "create")
    for offset in range(6, 20):
        bench.now += 1  # the checkpoint interval passes several times
        bench.persist(offset)
        assert bench.after_a_kill()[QUEUE] == offset
    assert bench.kinds() == ["store-unwritable"]
    bench.heal()
    bench.now += 10
    bench.persist(20)
    assert bench.kinds() == ["store-unwritable", "store-recovered"]


def test_a_failed_checkpoint_does_not_count_with_a_later_frame(new):
    """On a full disk a table is too large for the journal. A later, smaller frame must not make it count as durable."""
    update(new.store, TABLE, 5)
    new.store.persist_all()
    new.fail(errno.ENOSPC, "create")
    update(new.store, TABLE, 6)
    for persist in (new.store.persist_all, lambda: new.persist(7), new.store.persist_all):
        new.refuses(persist)
    assert new.after_a_kill() == dict.fromkeys(TABLE, 5)
    new.heal()
    new.store.persist(QUEUE)
    assert new.after_a_kill() == dict.fromkeys(TABLE, 6) | {QUEUE: 7}
    new.store.close()


def test_a_store_on_a_full_disk_starts_and_works_from_memory():
    full = Bench()
    full.memory_disk.put("/s/offsets.json", encode_offsets({QUEUE: 5}))
    full.fail(errno.ENOSPC, *(operation for operation in WRITES if operation != "make_directories"))
    full.store.load()
    assert full.store.read_offset(QUEUE) == 5
    full.refuses(lambda: full.persist(6))
    full.heal()
    full.store.persist_all()
    full.store.close()


LACKING = "this file system lacks locks, or another function of a store; use a local one"


@for_each(
    "number, remedy",
    [
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, "let this user write"),
        (errno.ENXIO, "check the directory"),
        (errno.ENOLCK, LACKING),
        (errno.ENOTSUP, LACKING),
        (errno.ENOSYS, LACKING),
        (errno.EMFILE, "raise the limit on open files"),
        (errno.ENAMETOOLONG, "use shorter names"),
        (errno.ESTALE, "mount it again"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "raise the quota"),
    ],
)
@for_each("operation", ["make_directories", "lock"])
def test_a_store_that_cannot_be_opened_gives_the_remedy(number, remedy, operation):
    bench = Bench()
    bench.fail(number, operation)
    with pytest.raises(OffsetStoreUnwritable) as refused:
        bench.store.load()
    text = str(refused.value)
    assert text.startswith(f"offset store /s cannot be opened: {os.strerror(number)}; {remedy}"), text
    assert text.endswith("or choose another directory. Nothing was started"), text
    assert "memory" not in text, text
    bench.heal()
    bench.store.load()
    bench.persist(5)
    bench.store.close()


@pytest.mark.hazard("H07")
def test_a_directory_that_cannot_be_made_fails_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "store", tmp_path / "file" / "client" / "group"):
        with pytest.raises(OffsetStoreUnwritable, match=f"{directory} .*; a file has the name of a directory"):
            LocalFileOffsetStore(directory).load()


def test_closing_an_unwritable_store_raises_and_releases_it(bench):
    bench.fail(errno.ENOSPC)
    bench.store.update_offset(QUEUE, 9)
    bench.refuses(bench.store.close, "/s before it was closed: .*free some space.* redelivered")
    bench.heal()
    bench.store.load()
    assert bench.store.read_offset(QUEUE) == 5
    bench.store.close()
    assert bench.after_a_kill()[QUEUE] == 5


@pytest.mark.parametrize("waits_s", [0, 60])
@pytest.mark.parametrize("persisted", [True, False])
@pytest.mark.parametrize("durability", ["fsync", "process"])
def test_closing_on_a_full_disk_uses_the_journal(durability, persisted, waits_s):
    bench = Bench(durability)
    bench.store.load()
    bench.persist(5)
    bench.fail(errno.ENOSPC, "create")  # a full disk refuses new files, but the journal has its space already
    bench.store.update_offset(QUEUE, 6)
    bench.store.update_offset(QUEUES[1], 7)
    if persisted:
        bench.store.persist_all()
    bench.now += waits_s
    bench.store.close()
    assert bench.after_a_kill() == {QUEUE: 6, QUEUES[1]: 7}
    assert bench.kinds() == ["store-unwritable"]
    text = bench.events[0].text
    assert "/s" in text and "free some space" in text and "Nothing is lost" in text and "memory" not in text, text
    bench.heal()
    with bench.store:
        assert bench.store.clone_offset_table() == {QUEUE: 6, QUEUES[1]: 7}
    assert bench.memory_disk.files()["/s/offsets.json"] == encode_offsets({QUEUE: 6, QUEUES[1]: 7})
    assert bench.kinds() == ["store-unwritable", "store-recovered"]


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("refused", ["create", "replace", "sync_directory"])
def test_power_may_fail_after_a_close_without_checkpoint(bench, refused, has_links):
    bench.memory_disk.has_links = has_links
    bench.fail(errno.EIO, refused)
    bench.store.update_offset(QUEUE, 6)
    bench.store.close()
    assert bench.failing.failures == 1 + (refused == "replace" and has_links)  # the rename to the backup is tried twice
    for seed in range(50):
        store = open_store(disk=bench.memory_disk.after_power_loss(random.Random(seed)))
        assert store.clone_offset_table() == dict.fromkeys(QUEUES, 5) | {QUEUE: 6}


def test_closing_on_a_full_disk_with_a_full_journal(bench):
    bench.fail(errno.ENOSPC, "create")
    update(bench.store, TABLE, 6)
    bench.refuses(bench.store.close, "not all offsets could be written to /s .*free some space")
    assert bench.after_a_kill() == dict.fromkeys(QUEUES, 5)


@pytest.mark.parametrize("removed", [["offsets.lock"], ["offsets.json", "offsets.json.bak", "offsets.journal"]])
def test_closing_does_not_rely_on_files_removed_meanwhile(bench, removed):
    def remove_and_fail(operation, path):
        if operation == "sync" and path.endswith(".journal"):
            for name in removed:
                bench.memory_disk.remove(f"/s/{name}")
        return operation in ("create", "lock")

    bench.fail_when(errno.ENOSPC, remove_and_fail)
    bench.store.update_offset(QUEUE, 6)
    bench.refuses(bench.store.close, "not all offsets could be written")
    assert all("Nothing is lost" not in event.text for event in bench.events)


@for_each("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@for_each("durability", DURABILITIES)
def test_a_file_system_without_directory_sync_is_used(number, durability):
    bench = Bench(durability)
    bench.fail(number, "sync_directory")
    for offset in range(1, 4):
        with bench.store:
            bench.now += 10
            for stored in (offset, offset + 100):
                bench.persist(stored)
                assert bench.after_a_kill() == {QUEUE: stored}
    assert bench.failing.failures >= 3
    assert bench.kinds() == ["store-unsynced"]
    assert "cannot sync directories" in bench.events[0].text


@pytest.mark.parametrize("operation", ["sync", "write_at", "replace"])
def test_an_error_of_a_file_is_not_an_error_of_directories(new, operation):
    new.fail(errno.EINVAL, operation)
    new.refuses(lambda: new.persist(9))
    assert new.kinds() == ["store-unwritable"]


def test_a_disk_error_while_names_are_synced_is_an_error(new):
    new.fail(errno.EIO, "sync_directory")
    new.store.update_offset(QUEUE, 9)
    new.refuses(new.store.close, "check the disk")
    assert new.kinds() == ["store-unwritable"]


def test_a_listener_of_events_may_use_the_store_and_may_fail():
    seen = []

    def on_event(event):
        seen.append(store.read_offset(QUEUE))
        store.update_offset(QUEUES[1], 77)
        raise RuntimeError("of the user")

    failing = FailureHook()
    store = open_store(disk=WatchedDisk(MemoryDisk(), failing), on_event=on_event)
    failing.error = errno.ENOSPC
    with pytest.raises(OffsetStoreUnwritable):
        put(store, QUEUE, 9)
    assert seen == [9]


@pytest.mark.live
@pytest.mark.hazard("H07")
def test_real_limits_on_file_sizes_and_descriptors_are_survived(tmp_path):
    queues = [MessageQueue("orders", "broker-a", number) for number in range(400)]
    assert run_in_fork(partial(work_with_small_files, tmp_path / "sizes", queues)) == (["recovered"], 0)
    assert read_store(tmp_path / "sizes").offsets == dict.fromkeys(queues, 2)
    assert run_in_fork(partial(work_with_few_descriptors, tmp_path / "descriptors")) == (["refused", "closed"], 0)
    assert read_store(tmp_path / "descriptors").offsets == {QUEUE: 5}


def work_with_small_files(directory, queues, report):
    events, refused = [], []
    store = open_store(directory, checkpoint_interval_s=0, on_event=lambda event: events.append(str(event.kind)))
    update(store, queues[:10], 1)
    store.persist_all()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # offsets.json of 400 queues has 32 KB
    for queue in queues:
        try:
            put(store, queue, 2)
        except OffsetStoreUnwritable as error:
            refused.append(str(error))
    assert refused and all("limit on file sizes" in each for each in refused), refused
    assert events == ["store-unwritable"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.persist_all()
    assert events == ["store-unwritable", "store-recovered"], events
    report("recovered")


def work_with_few_descriptors(directory, report):
    events = []
    store = open_store(directory, checkpoint_interval_s=0, on_event=lambda event: events.append(str(event.kind)))
    put(store, QUEUE, 1)
    highest = os.open(os.devnull, os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(OffsetStoreUnwritable, match="raise the limit on open files"):
        LocalFileOffsetStore(f"{directory}-another").load()
    report("refused")
    for offset in range(2, 5):
        put(store, QUEUE, offset)  # the journal is open
    assert events == ["store-unwritable"], events
    store.update_offset(QUEUE, 5)
    store.close()
    report("closed")
