"""The behaviour that all offset stores share."""

from __future__ import annotations

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, MemoryOffsetStore, OffsetStore, ReadOffsetType
from tests.for_each import for_each
from tests.offsets.local.disks import MemoryDisk
from tests.offsets.local.driving import MEMORY, QUEUE, STORE, put

OTHER = MessageQueue("bills", "broker-a", 0)


@pytest.fixture(params=["memory", "file"])
def store(request):
    store = MemoryOffsetStore() if request.param == "memory" else LocalFileOffsetStore("/store", disk=MemoryDisk())
    assert isinstance(store, OffsetStore)
    store.load()
    yield store
    store.close()


def test_a_new_queue_has_no_offset(store):
    for kind in ReadOffsetType:
        assert store.read_offset(QUEUE, kind) is None
    store.persist(QUEUE)
    store.remove_offset(QUEUE)
    assert store.clone_offset_table() == {}


@for_each("kind", ["memory", "store", None, 0])
def test_a_wrong_read_type_is_refused(store, kind):
    store.update_offset(QUEUE, 5)
    with pytest.raises(ConfigError, match=f"read_type={kind!r} is not allowed; choose one of ReadOffsetType.READ_FROM"):
        store.read_offset(QUEUE, kind)


def test_an_update_is_in_the_store_when_persisted(store):
    store.update_offset(QUEUE, 5)
    assert store.read_offset(QUEUE, MEMORY) == store.read_offset(QUEUE) == 5
    assert store.read_offset(QUEUE, STORE) is None
    store.persist(QUEUE)
    assert store.read_offset(QUEUE, STORE) == 5


def test_increase_only_keeps_the_larger_value(store):
    updates = [(5, False, 5), (4, True, 5), (0, True, 5), (3, False, 3), (4, True, 4)]
    for offset, increase_only, expected in updates:
        store.update_offset(QUEUE, offset, increase_only=increase_only)
        assert store.read_offset(QUEUE, MEMORY) == expected
    store.update_offset(OTHER, 0, True)
    assert store.read_offset(OTHER, MEMORY) == 0


def test_removing_persists_first_and_the_value_is_found_again(store):
    store.update_offset(QUEUE, 7)
    store.remove_offset(QUEUE)
    assert store.read_offset(QUEUE, MEMORY) is None
    assert store.read_offset(QUEUE, ReadOffsetType.MEMORY_FIRST_THEN_STORE) == store.read_offset(QUEUE, MEMORY) == 7


def test_the_table_is_copied_by_topic_or_whole(store):
    store.update_offset(QUEUE, 1)
    store.update_offset(OTHER, 2)
    assert store.clone_offset_table("orders") == {QUEUE: 1}
    assert store.clone_offset_table() == store.clone_offset_table("") == {QUEUE: 1, OTHER: 2}
    store.clone_offset_table()[QUEUE] = 9
    assert store.read_offset(QUEUE) == 1


def test_a_persist_of_some_queues_does_not_change_others(store):
    put(store, QUEUE, 1)
    put(store, OTHER, 2)
    store.update_offset(QUEUE, 3)
    store.update_offset(OTHER, 4)
    store.persist_all([QUEUE])
    assert [store.read_offset(queue, STORE) for queue in (QUEUE, OTHER)] == [3, 2]
    assert store.read_offset(OTHER, MEMORY) == 4
    store.persist_all([])
    store.persist_all()
    assert store.read_offset(QUEUE, STORE) == 3


def test_an_invalid_offset_is_refused(store):
    for offset in (-1, 2**63, True, 1.0, "5", None):
        with pytest.raises(ConfigError, match="whole number from 0"):
            store.update_offset(QUEUE, offset)
        assert store.read_offset(QUEUE, MEMORY) is None, offset
    put(store, QUEUE, 2**63 - 1)
    assert store.read_offset(QUEUE, STORE) == 2**63 - 1


NO_NAMES = [("orders", None, 1), ("orders", "b", "1"), ("x" * 5000, "b", 1), ("\ud800", "b", 1), ("orders", "b", 2**31)]


@for_each("queue", ["orders", *(MessageQueue(*names) for names in NO_NAMES)])
def test_an_invalid_queue_is_refused(store, queue):
    with pytest.raises(ConfigError):
        store.update_offset(queue, 1)


WRONG_QUEUES = [[], {}, "orders", None, 5, MessageQueue("orders", [], 1), MessageQueue("orders", "b", "1")]


@for_each("queue", WRONG_QUEUES)
def test_every_call_refuses_a_wrong_queue(store, queue):
    calls = {
        "read_offset": lambda: store.read_offset(queue),
        "read_offset from memory": lambda: store.read_offset(queue, MEMORY),
        "read_offset from the store": lambda: store.read_offset(queue, STORE),
        "update_offset": lambda: store.update_offset(queue, 1),
        "update_offset upwards": lambda: store.update_offset(queue, 1, increase_only=True),
        "persist": lambda: store.persist(queue),
        "persist_all": lambda: store.persist_all([QUEUE, queue]),
        "remove_offset": lambda: store.remove_offset(queue),
    }
    if isinstance(store, LocalFileOffsetStore):
        calls["origin"] = lambda: store.origin(queue)
        calls["reset_epoch"] = lambda: store.reset_epoch(queue)
    store.update_offset(QUEUE, 5)
    for name, call in calls.items():
        with pytest.raises(ConfigError, match="MessageQueue|is not allowed"):
            call()
            pytest.fail(f"{name} has accepted it")
    assert store.clone_offset_table() == {QUEUE: 5}


@for_each("queues", [5, QUEUE, "orders"])
def test_a_wrong_list_of_queues_is_not_persisted(store, queues):
    store.update_offset(QUEUE, 5)
    with pytest.raises(ConfigError):
        store.persist_all(queues)
    assert store.read_offset(QUEUE, STORE) is None


def test_closing_twice_is_safe(store):
    store.close()
    store.close()
