"""H13–H15, the local file: the offsets found after a kill, after a power failure, and while others write.

The faulty stores imitate Java, Go and older Java clients in a few lines. They write the same text as ours.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from pyrocket_consumer.errors import OffsetStoreCorrupt, ProtocolError
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, MemoryOffsetStore, OffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import consuming, numbered, until
from tests.hazards.members import faulty
from tests.offsets.local.disks import MemoryDisk, PowerCut, WatchedDisk
from tests.offsets.local.driving import ORDERS, encode_offsets, put

QUEUE, OTHER = ORDERS[:2]
MAIN, BACKUP = "/s/offsets.json", "/s/offsets.json.bak"

MakeStore = Callable[..., OffsetStore]
"""(disk, on_event=…) -> a store in /s of that disk, not loaded yet."""


class JavaStore(MemoryOffsetStore):
    """Java from 5.2 on: reads the file, merges memory into it, copies the file to the backup, writes it in place."""

    def __init__(self, disk: Disk, on_event: Callable[[ConsumerEvent], None] | None = None) -> None:
        super().__init__()
        self._disk = disk

    def load(self) -> None:
        for queue in self.clone_offset_table():
            super().remove_offset(queue)
        for queue, offset in self._read().items():
            self.update_offset(queue, offset)

    def read_offset(
        self, mq: MessageQueue, read_type: ReadOffsetType = ReadOffsetType.MEMORY_FIRST_THEN_STORE
    ) -> int | None:
        memory = self.clone_offset_table()
        return self._read().get(mq) if read_type is ReadOffsetType.READ_FROM_STORE or mq not in memory else memory[mq]

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        table, memory = self._read(), self.clone_offset_table()
        self._write(table | {mq: memory[mq] for mq in (memory if mqs is None else mqs) if mq in memory})

    def remove_offset(self, mq: MessageQueue) -> None:
        self.persist(mq)
        super().remove_offset(mq)

    def _read(self) -> dict[MessageQueue, int]:
        for path in (MAIN, BACKUP):
            with suppress(ProtocolError):
                if data := self._disk.read(path):
                    return decode_checkpoint(data)[0]
        return {}

    def _write(self, table: dict[MessageQueue, int]) -> None:
        before = self._disk.read(MAIN)
        if before is not None:
            self._put(BACKUP, before)
        self._put(MAIN, encode_offsets(table))

    def _put(self, path: str, data: bytes) -> None:
        file = self._disk.open(path, create=True)
        file.write_at(data, 0)
        file.close()


class GoStore(JavaStore):
    """Go: removes the file, then renames a new one to its name. It searches the backup under a wrong name."""

    def _read(self) -> dict[MessageQueue, int]:
        data = self._disk.read(MAIN)
        return decode_checkpoint(data)[0] if data else {}

    def _write(self, table: dict[MessageQueue, int]) -> None:
        self._put(MAIN + ".tmp", encode_offsets(table))
        self._disk.remove(MAIN)
        self._disk.replace(MAIN + ".tmp", MAIN)


class OldJavaStore(JavaStore):
    """Java up to 4.9.7 and 5.1: the file has only the queues held at the last tick of the timer."""

    def persist(self, mq: MessageQueue) -> None:
        pass

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        memory = self.clone_offset_table()
        held = list(memory if mqs is None else mqs)
        if held:
            self._write({mq: memory[mq] for mq in held if mq in memory})

    def remove_offset(self, mq: MessageQueue) -> None:
        pass


def ours(disk: Disk, **options: Any) -> LocalFileOffsetStore:
    return LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk, **options)


def ours_that_checkpoints(disk: Disk, **options: Any) -> LocalFileOffsetStore:
    return ours(disk, durability="checkpoint", **options)


OURS = [ours, ours_that_checkpoints]


class Session:
    """Uses a store until the process, or the machine, ends before file operation number `last`."""

    def __init__(self, make: MakeStore, disk: MemoryDisk, start: int, last: int) -> None:
        self.acknowledged, self.written, self.ended_at = start, start, "its end"
        self._last = last
        store = make(WatchedDisk(disk, self._cut))
        try:
            store.load()
            for offset in (start + 10, start + 20, start + 30):
                store.update_offset(QUEUE, offset)
                self.written = offset
                store.persist(QUEUE)
                self.acknowledged = offset
            store.close()
        except PowerCut:
            pass

    def _cut(self, count: int, operation: str, path: str) -> None:
        if count >= self._last:  # from now on no operation of the store reaches the disk
            if count == self._last:
                self.ended_at = f"{operation} {path}"
            raise PowerCut

    @property
    def was_cut(self) -> bool:
        return self.ended_at != "its end"


def check_found(make: MakeStore, disk: MemoryDisk, session: Session, how: str) -> int:
    """Return the offsets that the next process finds: those acknowledged, or those being written."""
    store = make(disk)
    store.load()
    found = store.read_offset(QUEUE, ReadOffsetType.MEMORY_FIRST_THEN_STORE)
    assert found in (session.acknowledged or None, session.written), (
        f"{how} before {session.ended_at}: found {found}, acknowledged {session.acknowledged}"
    )
    return found or 0


@pytest.mark.hazard("H13")
@pytest.mark.parametrize(
    "make",
    [
        *OURS,
        faulty(GoStore, "killed .*before replace .*found None"),
        faulty(JavaStore, "killed again before .*found None"),
    ],
)
def test_acknowledged_offsets_are_found_after_a_kill(make):
    """A restart finds each offset whose persist has returned, wherever this process and the next one were killed.

    The old file exists until the new one is complete, and an empty file never replaces it.

    Faulty: Go has no file for a moment, between remove and rename. Java, killed a second time, has copied the empty
    file of the first time over its good backup.
    """
    # Kill the process before each of its file operations, and the next process again.
    for first in itertools.count(1):
        disk = MemoryDisk()
        session = Session(make, disk, 0, first)
        found = check_found(make, disk.after_kill(), session, "killed")
        for second in itertools.count(1):
            disk_again = disk.after_kill()
            next_session = Session(make, disk_again, found, second)
            check_found(make, disk_again.after_kill(), next_session, "killed again")
            if not next_session.was_cut:
                break
        if not session.was_cut:
            return


@pytest.mark.hazard("H13")
@pytest.mark.parametrize(
    "make", [*OURS, *(faulty(store, "power failed before .*found None") for store in (JavaStore, GoStore))]
)
def test_power_may_fail_at_any_moment(make):
    """The store syncs file and directory before a persist returns, so acknowledged offsets survive a power failure.

    Faulty: Java, Go and C++ never sync.
    """
    for last in itertools.count(1):
        for seed in range(5):
            disk = MemoryDisk()
            session = Session(make, disk, 0, last)
            check_found(make, disk.after_power_loss(random.Random(seed)), session, "power failed")
        if not session.was_cut:
            return


BACKUPS = {"no backup": None, "empty": b"", "cut": b"{", "NULs": b"\0" * 200}

POLICIES = [partial(ours, on_unreadable=policy) for policy in ("raise", "backup", "start_over")]


@pytest.mark.hazard("H13")
@pytest.mark.parametrize(
    ("make", "backup"),
    [*itertools.product(POLICIES, BACKUPS), faulty(JavaStore, "found None, without an event", "no backup")],
)
def test_unreadable_files_emit_an_event_or_stop_the_start(make, backup):
    """If neither offsets.json nor its backup is readable, the consumer does not start.

    With `on_unreadable_store="start_over"` it starts with the journal only, emits an event, and keeps the unreadable
    file under another name.

    Faulty: Java silently starts without offsets if there is no backup, and Go if the file is empty.
    """
    disk, events = MemoryDisk(), []
    disk.put(MAIN, b"\0" * 200)
    disk.put(BACKUP, BACKUPS[backup])
    store = make(disk, on_event=events.append)
    try:
        store.load()
    except OffsetStoreCorrupt:
        assert disk.files()[MAIN] == b"\0" * 200, "the unreadable file must be kept"
        return
    kinds = [event.kind for event in events]
    assert EventKind.STORE_FALLBACK in kinds, f"found {store.read_offset(QUEUE)}, without an event"
    assert b"\0" * 200 in disk.files().values(), "the unreadable file must be kept under another name"


@pytest.mark.hazard("H13")
@pytest.mark.parametrize("make", [*OURS, faulty(GoStore, "None was read before replace")])
def test_a_read_during_a_write_returns_the_last_offset(make):
    """A read of the stored offset uses memory, never a file that is just being written.

    Faulty: Go reads the file, which is missing for a moment.
    """
    # Read the stored offset before each file operation of a persist.
    seen, watching = [], []

    def read(count: int, operation: str, path: str) -> None:
        if watching:
            watching.clear()  # ignore the reader's own file operations
            seen.append((operation, path, store.read_offset(QUEUE, ReadOffsetType.READ_FROM_STORE)))
            watching.append(True)

    store = make(WatchedDisk(MemoryDisk(), read))
    store.load()
    for offset in range(100, 105):
        put(store, QUEUE, offset)
        watching.append(True)
        for operation, path, found in seen:
            assert found in (offset - 1, offset), f"{found} was read before {operation} {path}, {offset - 1} was stored"
        seen.clear()
    watching.clear()
    store.close()


@pytest.mark.hazard("H14")
@pytest.mark.parametrize("make", [*OURS, faulty(JavaStore, "but 100 is stored")])
def test_a_correction_is_not_overwritten_by_the_timer(make):
    """A persisted correction stays, whatever another thread persists meanwhile.

    Writes run one after the other, and each takes the offsets when it starts.

    Faulty: Java from 5.2 on reads, changes and writes the file in several threads at once.
    """
    # While the timer persists all queues, another thread corrects an offset and gives up its queue.
    disk, corrector, armed = MemoryDisk(), threading.Thread(), []

    def correct() -> None:
        put(store, QUEUE, 40)
        store.remove_offset(QUEUE)

    def interfere(count: int, operation: str, path: str) -> None:
        nonlocal corrector
        if armed and operation in ("create", "write_at"):
            armed.clear()
            corrector = threading.Thread(target=correct)
            corrector.start()
            corrector.join(0.2)  # ours has to wait for the timer; a faulty store has finished by now

    store = make(WatchedDisk(disk, interfere))
    store.load()
    for number in range(5):
        store.update_offset(QUEUE, 100)
        store.update_offset(OTHER, 50 + number)
        armed.append(True)
        store.persist_all()
        corrector.join(10)
        assert not armed
        again = make(disk.after_kill())
        again.load()
        stored = again.read_offset(QUEUE, ReadOffsetType.MEMORY_FIRST_THEN_STORE)
        assert stored == 40, f"corrected to 40 and acknowledged, but {stored} is stored"
    store.close()


def a_stopped_brokers_queues_keep_their_offsets(cluster: EmbeddedCluster, names: Any, **store: Any) -> None:
    """Remove broker-b from the route for a while; its messages are consumed later, with and without a restart."""
    topic, group, absent = names.topic(), names.group(), cluster.broker("broker-b")
    options = {
        **store,
        "message_model": "broadcasting",
        "commit_interval_s": 0.05,
        "route_refresh_interval_s": 0.1,
        "rebalance_interval_s": 0.1,
    }
    cluster.create_topic(topic, queues=1)

    def send(broker_name: str, start: int, count: int = 5) -> list[bytes]:
        cluster.send(topic, lambda number: b"m%d" % (start + number), count=count, broker_name=broker_name)
        return numbered(count, start)

    def held(consumer: Any) -> set[str]:
        return {queue.broker_name for queue in consumer.progress()}

    with consuming(cluster, topic, group, **options) as (consumer, seen):
        sent = send("broker-a", 0) + send("broker-b", 5)
        seen.wait_for(10)
        cluster.call(lambda: cluster.unregister(absent))
        until(lambda: held(consumer) == {"broker-a"}, "its queue is given up")
        sent += send("broker-b", 10)
        cluster.call(lambda: cluster.register(absent))
        seen.wait_for(15)
        cluster.call(lambda: cluster.unregister(absent))
        until(lambda: held(consumer) == {"broker-a"}, "its queue is given up again")
        sent += send("broker-a", 15)
        seen.wait_for(20)
    with consuming(cluster, topic, group, **options) as (_, second):
        send("broker-a", 20, 1)
        second.wait_for(1)
    missed = send("broker-b", 21)
    cluster.call(lambda: cluster.register(absent))
    with consuming(cluster, topic, group, **{**options, "consume_from": "last"}) as (_, third):
        last = send("broker-b", 26, 1)
        third.wait(lambda seen: last[0] in seen.bodies)
    assert sorted(third.bodies) == sorted(missed + last), f"consumed {third.bodies}, sent {missed + last}"
    assert sorted(seen.bodies) == sorted(sent)


@pytest.mark.hazard("H15")
@pytest.mark.parametrize("faulty_store", [None, faulty(OldJavaStore, r"consumed \[b'm26'\]")])
def test_queues_of_a_stopped_broker_keep_their_offsets(names, tmp_path, faulty_store):
    """A persist changes only the queues that it names, and keeps all others in the file.

    So the queues of a broker that was down, for a while or during a restart, continue at their offsets.

    Faulty: Java up to 4.9.7 and 5.1 writes only the queues that it holds, so those of the broker begin at the end.
    """
    store = {"offset_store": faulty_store(MemoryDisk())} if faulty_store else {"offset_store_dir": tmp_path}
    with EmbeddedCluster(brokers=2, long_poll_tick_s=0.1) as cluster:
        a_stopped_brokers_queues_keep_their_offsets(cluster, names, **store)
