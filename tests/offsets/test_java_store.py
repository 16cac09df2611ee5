"""The Java client's own LocalFileOffsetStore and ours take turns on one directory."""

from __future__ import annotations

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, QueueReset
from tests.real_brokers import JavaOffsetStore

OURS = {
    MessageQueue("orders", "broker-a", 0): 5,
    MessageQueue("orders", "broker-a", 1): 2**40,
    MessageQueue("%RETRY%g", "broker-b", 0): 2**63 - 1,
}
FIRST = next(iter(OURS))


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("durability", ["fsync", "checkpoint"])
def test_java_reads_what_we_wrote_and_we_read_what_java_wrote(real_version, durability):
    with JavaOffsetStore(real_version, "g") as java:
        with LocalFileOffsetStore(java.path.parent, durability) as store:
            for queue, offset in OURS.items():
                store.update_offset(queue, offset)
            store.persist_all()
        java.load()
        assert java.clone_offset_table() == OURS

        java.update_offset(FIRST, 70)
        java.persist_all(list(OURS))
        with LocalFileOffsetStore(java.path.parent, durability, on_unreadable="raise") as store:
            assert store.found.source == "file"
            assert store.clone_offset_table() == OURS | {FIRST: 70}
            store.update_offset(FIRST, 71)
            store.persist_resets({FIRST: QueueReset(9, 1234)})  # epochs are in a table of their own
        java.load()
        assert java.clone_offset_table() == OURS | {FIRST: 9}


def test_java_sees_every_persist_with_checkpoint_durability(real_version):
    with (
        JavaOffsetStore(real_version, "g") as java,
        LocalFileOffsetStore(java.path.parent, "checkpoint") as store,
    ):
        for offset in range(100, 105):
            store.update_offset(FIRST, offset)
            store.persist(FIRST)
            assert java.read_offset(FIRST, "READ_FROM_STORE") == offset
