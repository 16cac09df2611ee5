"""H06, H07: corrections that must be stored, and a file that cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.errors import OffsetStoreError, ProtocolError, RocketError
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.directories import store_directory
from pyrocket_consumer.offsets.offsets_json import decode_checkpoint, encode_offsets
from pyrocket_consumer.offsets.recovery import recover
from tests.consuming import numbered, until
from tests.hazards.members import Kind, broadcasting, faulty, full_disk, ours, pulled_offsets, settle
from tests.hazards.naive import NaiveMember, Window
from tests.offsets.disks import WRITES, Failing, MemoryDisk, WatchedDisk
from tests.resetting import fill, queue

# --- H06


class CorrectsMemoryOnly(NaiveMember):
    """Java before 5.2: the queue is removed without being persisted, and added again with what the file says."""

    def on_correction(self, window: Window, target: int) -> None:
        with self.lock:
            window.dropped = True
            self.windows.pop(window.queue, None)
            self.offsets.pop(window.queue, None)
        self._rebalance_due.set()


def prepare_expired(cluster: Any, topic: str, group: str, stores: Path) -> dict[MessageQueue, int]:
    """Have a file whose offsets are all older than the oldest message; return where each queue should go on."""
    cluster.create_topic(topic, queues=2)
    fill(cluster, topic, 60)
    for queue_id in range(2):
        cluster.broker("broker-a").delete_before(topic, queue_id, 30)
    directory = store_directory(stores, "127.0.0.1@DEFAULT", group)
    directory.mkdir(parents=True)
    (directory / "offsets.json").write_bytes(encode_offsets({queue(topic, each): 5 for each in range(2)}))
    return {queue(topic, each): 30 for each in range(2)}


def wrong_pulls(broker: Any, topic: str) -> list[tuple[int, int]]:
    return sorted(each for each in pulled_offsets(broker, topic) if each[1] < 30)


def each_queue_is_corrected_once(cluster: Any, names: Any, member: Kind, stores: Path) -> None:
    """Everything the file says is older than the oldest message, and there is nothing to consume."""
    topic, group = names.topic(), names.group()
    expected, broker = prepare_expired(cluster, topic, group, stores), cluster.broker("broker-a")
    options = broadcasting(stores, commit_interval_s=3600, rebalance_interval_s=0.2)
    with member(cluster, topic, group, **options) as consumer:
        until(lambda: consumer.stored() == expected or len(wrong_pulls(broker, topic)) > 2, "the correction is stored")
        settle()
        wrong = wrong_pulls(broker, topic)
        assert wrong == [(0, 5), (1, 5)], f"wrong pulls go on after a correction: {wrong}"
        assert consumer.stored() == expected
        assert len(consumer.events.of("offset-corrected")) == 2
        assert not consumer.seen.messages
        fill(cluster, topic, 2, start=60)
        consumer.seen.wait_for(2)


@pytest.mark.hazard("H06")
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, faulty(CorrectsMemoryOnly, "wrong pulls go on after a correction")]
)
def test_every_offset_is_wrong_and_each_queue_is_corrected_once(
    embedded: Any, names: Any, tmp_path: Path, member: Any
) -> None:
    """A correction is in the file before the queue is pulled again, though no message was consumed; then it is over.

    Faulty: Java before 5.2 asks at the old place for ever, because it never writes the new one.
    """
    each_queue_is_corrected_once(embedded, names, member, tmp_path)


# --- H07


class ReadsTheFileAfterACorrection(NaiveMember):
    """Java from 5.2 on: a correction is persisted, removed from memory although that failed, and read from the file."""

    def on_correction(self, window: Window, target: int) -> None:
        with self.lock:
            window.dropped = True
            self.windows.pop(window.queue, None)
            self.offsets[window.queue] = target
        try:
            self.persist(window.queue)
        except OSError:
            pass
        self.offsets.pop(window.queue, None)
        self._rebalance_due.set()


class TellsNobody(NaiveMember):
    """Write errors are in the client's log, where nobody looks."""

    def tell(self, *about: object, **facts: object) -> None:
        pass


def a_correction_on_a_full_disk_is_followed_once(cluster: Any, names: Any, member: Kind, stores: Path) -> None:
    """The disk is full when the broker corrects an offset, and has room again later."""
    topic, group = names.topic(), names.group()
    place, broker = queue(topic, 0), cluster.broker("broker-a")
    cluster.create_topic(topic, queues=1)
    fill(cluster, topic, 10)
    with member(cluster, topic, group, **broadcasting(stores, rebalance_interval_s=0.2, pull_hold_s=0.1)) as consumer:
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored() == {place: 10}, "consumed")
        consumer.pause()
        settle()  # a pull may be on its way still
        until(lambda: not broker.held_pulls(topic), "no pull is held")
        with full_disk():
            fill(cluster, topic, 10, start=10)
            broker.delete_before(topic, 0, 15)
            broker.forget_requests()
            consumer.resume()
            until(lambda: len(consumer.seen.bodies) == 15 or len(pulled_offsets(broker, topic)) > 3, "consumed")
            settle()
            wrong = pulled_offsets(broker, topic).count((0, 10))
            assert wrong == 1, f"{wrong} corrections, one after the other"
            assert sorted(consumer.seen.bodies[10:]) == numbered(5, 15)
            assert consumer.stored() == {place: 10}, "the disk is full"
            assert consumer.events.of("store-unwritable"), "nobody was told that offsets are not stored"
        until(lambda: consumer.stored() == {place: 20}, "the next tick writes what memory has")


@pytest.mark.hazard("H07")
@pytest.mark.parametrize(
    "member",
    [
        ours,
        NaiveMember,
        faulty(ReadsTheFileAfterACorrection, "corrections, one after the other"),
        faulty(TellsNobody, "nobody was told"),
    ],
)
def test_a_disk_that_is_full_while_an_offset_is_corrected(
    embedded: Any, names: Any, tmp_path: Path, member: Any
) -> None:
    """A correction that cannot be written is followed from memory, once; `store-unwritable` tells, and the next tick
    that succeeds writes it.

    Faulty: Java and Go read the old offset back from the file and are corrected again, for ever; none tells its user.
    """
    a_correction_on_a_full_disk_is_followed_once(embedded, names, member, tmp_path)


def an_impossible_directory_fails_the_start(cluster: Any, names: Any, member: Kind, stores: Path) -> None:
    """Where the directory should be made is a file."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    stores.parent.mkdir(exist_ok=True)
    stores.write_text("")
    failure = ""
    try:
        with member(cluster, topic, group, **broadcasting(stores / "store")):
            pass
    except (RocketError, OSError) as error:
        failure = str(error)
    assert str(stores) in failure, "it started, and can store nothing"
    assert "Nothing was started" in failure, f"the start failed, and this is said: {failure}"


class StartsWhateverTheDirectory(NaiveMember):
    """The directory is made at the first write, and what fails there is logged."""

    def read_file(self) -> dict[MessageQueue, int]:
        try:
            return super().read_file()
        except OSError:
            return {}


@pytest.mark.hazard("H07")
@pytest.mark.parametrize("member", [ours, faulty(StartsWhateverTheDirectory, "it started, and can store nothing")])
def test_a_directory_that_cannot_be_made_fails_the_start(
    embedded: Any, names: Any, tmp_path: Path, member: Any
) -> None:
    """A store that could never be written is found out at the start, which fails and names the directory.

    Faulty: a client that works all the same, and begins anew at each restart.
    """
    an_impossible_directory_fails_the_start(embedded, names, member, tmp_path / "stores")


QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(3)]


class OurFile:
    """Our store, behind what the check below needs."""

    def __init__(self, disk: Any) -> None:
        self._store = LocalFileOffsetStore("/s", "checkpoint", disk=disk)
        self._store.load()

    def write(self, offset: int) -> None:
        for each in QUEUES:
            self._store.update_offset(each, offset)
        self._store.persist_all()

    @staticmethod
    def found(files: dict[str, bytes]) -> dict[MessageQueue, int]:
        main, backup, journal = (files.get("/s/offsets" + end) for end in (".json", ".json.bak", ".journal"))
        return dict(recover(main, backup, journal).offsets)


class WritesInPlace:
    """Java from 5.1 on: what the file holds is copied over the backup, then the file is truncated and written."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def write(self, offset: int) -> None:
        before = self._disk.read("/s/offsets.json")
        if before is not None:
            self._disk.open("/s/offsets.json.bak", create=True).write_at(before, 0)
        self._disk.open("/s/offsets.json", create=True).write_at(encode_offsets(dict.fromkeys(QUEUES, offset)), 0)

    @staticmethod
    def found(files: dict[str, bytes]) -> dict[MessageQueue, int]:
        text = files.get("/s/offsets.json") or files.get("/s/offsets.json.bak")
        return decode_checkpoint(text)[0] if text else {}


def a_full_disk_leaves_the_old_file_whole(store: Any, operations: Sequence[str]) -> None:
    """The first, second, third … of these operations fails, and all after it, at the timer's next tick, too."""
    for number in range(1, 40):
        memory, failing = MemoryDisk(), Failing()
        done = 0

        def when(operation: str, path: str, number: int = number) -> bool:
            nonlocal done
            done += operation in operations
            return operation in operations and done >= number

        failing.when = when
        file = store(WatchedDisk(memory, failing))
        file.write(5)
        failing.error = errno.ENOSPC
        for offset in (6, 7):
            with suppress(OSError, OffsetStoreError):
                file.write(offset)
        try:
            found = store.found(memory.files())
        except (OffsetStoreError, ProtocolError) as error:
            raise AssertionError(f"full from operation {number} on, a restart finds {error}") from error
        assert set(found.values()) <= {5, 6, 7} and set(found) == set(QUEUES), (
            f"full from operation {number} on, a restart finds {found}"
        )
        if not failing.failures:
            assert number > 1, "the disk was never full"
            return
    raise AssertionError("more operations than this test counts")


@pytest.mark.hazard("H07")
@pytest.mark.parametrize(
    ("file", "operations"),
    [  # a file can be emptied on a full disk
        (OurFile, WRITES),
        (OurFile, ["write_at"]),
        (OurFile, ["write_at", "sync"]),
        faulty(WritesInPlace, "a restart finds", ["write_at"]),
    ],
)
def test_a_disk_that_gets_full_in_the_middle_of_a_write(file: Any, operations: list[str]) -> None:
    """A file is replaced as a whole or not at all: whichever operation fails, the one before is still there.

    Faulty: Java from 5.1 on writes into file and backup: one tick of its timer empties the file, the next the backup.
    """
    a_full_disk_leaves_the_old_file_whole(file, operations)
