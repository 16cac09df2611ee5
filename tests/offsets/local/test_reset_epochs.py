"""A reset and its epoch are stored in one step. After any crash a restart finds both or neither."""

from __future__ import annotations

import errno
import random

import pytest

from pyrocket_consumer.errors import ConfigError, OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, QueueReset, ResetEpochs
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from tests.for_each import for_each
from tests.offsets.local.disks import FailureHook, MemoryDisk, PowerCut, WatchedDisk
from tests.offsets.local.driving import DURABILITIES, open_store, put
from tests.trials import crash_points, trials

QUEUES = [MessageQueue("orders%", "broker-a", number) for number in range(3)]
FIRST, SECOND, THIRD = QUEUES


@pytest.mark.parametrize("durability", DURABILITIES)
def test_epochs_and_offsets_are_found_again(tmp_path, durability):
    with LocalFileOffsetStore(tmp_path, durability) as store:
        assert isinstance(store, ResetEpochs)
        store.update_offset(FIRST, 50)
        store.update_offset(THIRD, 7)
        store.persist_all()
        store.persist_resets({FIRST: QueueReset(10, 1000), SECOND: QueueReset(None, 1000)})
        assert [store.reset_epoch(queue) for queue in QUEUES] == [1000, 1000, 0]
    for _ in range(2):  # from the file that the close has written, and once more
        with LocalFileOffsetStore(tmp_path, durability) as again:
            assert again.clone_offset_table() == {FIRST: 10, THIRD: 7}
            assert [again.reset_epoch(queue) for queue in QUEUES] == [1000, 1000, 0]
            again.persist_all()


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_killed_process_leaves_offset_and_epoch(durability):
    disk = MemoryDisk()
    store = open_store("/s", durability, disk=disk)
    store.persist_resets({FIRST: QueueReset(10, 1000)})
    put(store, FIRST, 12)
    disk.free_locks()
    with LocalFileOffsetStore("/s", durability, disk=disk) as again:
        assert (again.read_offset(FIRST), again.reset_epoch(FIRST)) == (12, 1000)


def test_epochs_do_not_change_the_offsets_that_java_reads(tmp_path):
    with LocalFileOffsetStore(tmp_path) as store:
        store.update_offset(FIRST, 3)
    plain = (tmp_path / "offsets.json").read_bytes()
    assert b"resetEpochs" not in plain
    with LocalFileOffsetStore(tmp_path) as store:
        store.persist_resets({FIRST: QueueReset(3, 1000)})
    text = (tmp_path / "offsets.json").read_bytes()
    assert text.startswith(plain.removesuffix(b"\n}"))
    assert decode_checkpoint(text) == ({FIRST: 3}, {FIRST: 1000})


@for_each("table", [b"7", b"{}", b'{"T":3}', b'{"T":{"b":{"x":1}}}', b'{"T":{"b":{"0":-1}}}', b"null"])
def test_an_entry_of_another_program_is_not_an_epoch(table):
    text = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5},"resetEpochs":%s}' % table
    assert decode_checkpoint(text) == ({MessageQueue("T", "b", 0): 5}, {})


def test_many_resets_fill_the_journal_and_then_a_checkpoint(tmp_path):
    with LocalFileOffsetStore(tmp_path, journal_bytes=4096, checkpoint_interval_s=3600) as store:
        for epoch in range(1, 300):
            store.persist_resets({queue: QueueReset(epoch, epoch) for queue in QUEUES})
    with LocalFileOffsetStore(tmp_path) as again:
        assert [again.reset_epoch(queue) for queue in QUEUES] == [299] * 3
        assert again.clone_offset_table() == dict.fromkeys(QUEUES, 299)


def test_an_invalid_offset_changes_nothing(tmp_path):
    with LocalFileOffsetStore(tmp_path) as store:
        with pytest.raises(ConfigError):
            store.persist_resets({FIRST: QueueReset(1, 1), SECOND: QueueReset(-1, 1)})
        assert (store.clone_offset_table(), store.reset_epoch(FIRST)) == ({}, 0)


def test_a_full_disk_is_reported_and_a_later_persist_stores_both():
    disk, failing = MemoryDisk(), FailureHook()
    store = open_store(disk=WatchedDisk(disk, failing))
    put(store, FIRST, 50)
    failing.error = errno.ENOSPC
    with pytest.raises(OffsetStoreUnwritable):
        store.persist_resets({FIRST: QueueReset(10, 1000)})
    assert (store.read_offset(FIRST), store.reset_epoch(FIRST)) == (10, 1000)  # memory has the new values
    failing.error = None
    store.persist(FIRST)
    disk.free_locks()
    with LocalFileOffsetStore("/s", disk=disk) as again:
        assert (again.read_offset(FIRST), again.reset_epoch(FIRST)) == (10, 1000)


@pytest.mark.search
@pytest.mark.parametrize("durability", ["fsync", "checkpoint"])
def test_power_may_fail_at_any_moment(durability):
    """An epoch that is found comes with the offset of its reset, or a later one. Acknowledged epochs are found."""
    for seed in range(trials(300)):
        rng, disk, epoch = random.Random(seed), MemoryDisk(), 0
        acknowledged: dict[MessageQueue, tuple[int, int]] = dict.fromkeys(QUEUES, (0, -1))  # epoch, progress
        for _ in range(2):
            last, dead = rng.randint(1, 80), False

            def cut(count: int, operation: str, path: str) -> None:
                nonlocal dead
                dead = dead or count >= last  # noqa: B023
                if dead:
                    raise PowerCut

            written = {queue: [acknowledged[queue]] for queue in QUEUES}
            try:
                store = open_store("/s", durability, journal_bytes=4096, disk=WatchedDisk(disk, cut), clock=rng.random)
                while True:
                    queues = rng.sample(QUEUES, rng.randint(1, 3))
                    if rng.random() < 0.4:
                        epoch += 1
                        for queue in queues:
                            written[queue].append((epoch, 0))
                        # Each offset encodes its epoch: 1000 * epoch + messages consumed since.
                        store.persist_resets({queue: QueueReset(1000 * epoch, epoch) for queue in queues})
                    else:
                        for queue in queues:
                            at_epoch, progress = written[queue][-1]
                            written[queue].append((at_epoch, progress + 1))
                            store.update_offset(queue, 1000 * at_epoch + progress + 1)
                        store.persist_all(queues)
                    for queue in queues:
                        acknowledged[queue] = written[queue][-1]
                        written[queue] = written[queue][-1:]
            except PowerCut:
                pass
            disk = disk.after_power_loss(rng)
            crash_points["power failures in the model"] += 1
            with LocalFileOffsetStore("/s", durability, disk=disk) as found:
                for queue in QUEUES:
                    offset, epoch = found.read_offset(queue), found.reset_epoch(queue)
                    pair = (epoch, -1 if offset is None else offset - 1000 * epoch)
                    assert pair in written[queue], f"seed {seed} {queue}: {pair} of {written[queue]}"
                    acknowledged[queue] = pair
