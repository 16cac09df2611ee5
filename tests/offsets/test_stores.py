"""What every offset store does, and the broker's in particular."""

from __future__ import annotations

import threading

import pytest

from pyrocket_consumer.errors import ConfigError, RequestTimeout
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import (
    BrokerOffsetStore,
    LocalFileOffsetStore,
    MemoryOffsetStore,
    OffsetStore,
    ReadOffsetType,
)
from tests.offsets.disks import MemoryDisk

MEMORY, STORE, EITHER = (
    ReadOffsetType.READ_FROM_MEMORY,
    ReadOffsetType.READ_FROM_STORE,
    ReadOffsetType.MEMORY_FIRST_THEN_STORE,
)
QUEUE, OTHER = MessageQueue("orders", "broker-a", 0), MessageQueue("bills", "broker-a", 0)


class FakeGroupOffsets:
    """A broker's offsets of one group; `answers` is called before each commit."""

    def __init__(self) -> None:
        self.committed: dict[MessageQueue, int] = {}
        self.commits: list[tuple[MessageQueue, int]] = []
        self.before_commit = lambda mq: None
        self.failing: set[MessageQueue] = set()

    def query_offset(self, mq: MessageQueue) -> int | None:
        if mq in self.failing:
            raise RequestTimeout("QUERY_CONSUMER_OFFSET", "127.0.0.1:10911", 3)
        return self.committed.get(mq)

    def commit_offset(self, mq: MessageQueue, offset: int) -> None:
        self.before_commit(mq)
        if mq in self.failing:
            raise RequestTimeout("UPDATE_CONSUMER_OFFSET", "127.0.0.1:10911", 3)
        self.commits.append((mq, offset))
        self.committed[mq] = offset


@pytest.fixture
def broker():
    return FakeGroupOffsets()


@pytest.fixture(params=["memory", "file", "broker"])
def store(request, broker):
    if request.param == "memory":
        store = MemoryOffsetStore()
    elif request.param == "broker":
        store = BrokerOffsetStore(broker)
    else:
        store = LocalFileOffsetStore("/store", disk=MemoryDisk())
    assert isinstance(store, OffsetStore)
    store.load()
    yield store
    broker.failing.clear()
    store.close()


def test_a_queue_never_seen_has_no_offset(store):
    for kind in ReadOffsetType:
        assert store.read_offset(QUEUE, kind) is None
    store.persist(QUEUE)
    store.remove_offset(QUEUE)
    assert store.clone_offset_table() == {}


def test_an_update_is_in_memory_at_once_and_in_the_store_when_persisted(store):
    store.update_offset(QUEUE, 5)
    assert store.read_offset(QUEUE, MEMORY) == store.read_offset(QUEUE) == 5
    assert store.read_offset(QUEUE, STORE) is None
    store.persist(QUEUE)
    assert store.read_offset(QUEUE, STORE) == 5


def test_increase_only_keeps_the_larger_value_and_a_plain_update_sets_it(store):
    store.update_offset(QUEUE, 5)
    store.update_offset(QUEUE, 4, increase_only=True)
    store.update_offset(QUEUE, 0, True)
    assert store.read_offset(QUEUE, MEMORY) == 5
    store.update_offset(QUEUE, 3)
    assert store.read_offset(QUEUE, MEMORY) == 3
    store.update_offset(QUEUE, 4, True)
    assert store.read_offset(QUEUE, MEMORY) == 4
    store.update_offset(OTHER, 0, True)
    assert store.read_offset(OTHER, MEMORY) == 0


def test_removing_persists_first_and_the_value_is_found_again(store):
    store.update_offset(QUEUE, 7)
    store.remove_offset(QUEUE)
    assert store.read_offset(QUEUE, MEMORY) is None
    assert store.read_offset(QUEUE, EITHER) == 7
    assert store.read_offset(QUEUE, MEMORY) == 7


def test_the_table_is_copied_by_topic_or_whole(store):
    store.update_offset(QUEUE, 1)
    store.update_offset(OTHER, 2)
    assert store.clone_offset_table("orders") == {QUEUE: 1}
    assert store.clone_offset_table() == store.clone_offset_table("") == {QUEUE: 1, OTHER: 2}
    store.clone_offset_table()[QUEUE] = 9
    assert store.read_offset(QUEUE) == 1


def test_persisting_some_queues_leaves_the_others_alone(store):
    store.update_offset(QUEUE, 1)
    store.update_offset(OTHER, 2)
    store.persist_all([QUEUE, OTHER])
    store.update_offset(QUEUE, 3)
    store.update_offset(OTHER, 4)
    store.persist_all([QUEUE])
    assert store.read_offset(QUEUE, STORE) == 3
    if not isinstance(store, BrokerOffsetStore):  # reading from a broker replaces what memory holds
        assert store.read_offset(OTHER, STORE) == 2
        assert store.read_offset(OTHER, MEMORY) == 4
    store.persist_all([])
    store.persist_all()
    assert store.read_offset(QUEUE, STORE) == 3


@pytest.mark.parametrize("offset", [-1, 2**63, True, 1.0, "5", None])
def test_an_offset_that_is_none_is_refused(store, offset):
    with pytest.raises(ConfigError, match="whole number from 0"):
        store.update_offset(QUEUE, offset)
    assert store.read_offset(QUEUE, MEMORY) is None
    store.update_offset(QUEUE, 2**63 - 1)
    store.persist(QUEUE)
    assert store.read_offset(QUEUE, STORE) == 2**63 - 1


@pytest.mark.parametrize(
    "queue",
    [
        "orders",
        MessageQueue("orders", None, 1),
        MessageQueue("orders", "b", "1"),
        MessageQueue("x" * 5000, "b", 1),
        MessageQueue("\ud800", "b", 1),
        MessageQueue("orders", "b", 2**31),
    ],
)
def test_a_queue_that_is_none_is_refused(store, queue):
    with pytest.raises(ConfigError):
        store.update_offset(queue, 1)


def test_closing_twice_is_safe(store):
    store.close()
    store.close()


# -- the broker store --------------------------------------------------------------------------------------------


def test_a_broker_that_cannot_be_asked_is_an_error_not_no_offset(broker):
    store = BrokerOffsetStore(broker)
    broker.failing.add(QUEUE)
    with pytest.raises(RequestTimeout):
        store.read_offset(QUEUE, STORE)
    with pytest.raises(RequestTimeout):
        store.read_offset(QUEUE)
    assert store.read_offset(QUEUE, MEMORY) is None


def test_the_brokers_answer_replaces_memory(broker):
    store = BrokerOffsetStore(broker)
    store.update_offset(QUEUE, 100)
    broker.committed[QUEUE] = 40
    assert store.read_offset(QUEUE, EITHER) == 100
    assert store.read_offset(QUEUE, STORE) == 40
    assert store.read_offset(QUEUE, MEMORY) == 40


def test_the_timer_commits_only_what_changed_a_single_persist_always(broker):
    store = BrokerOffsetStore(broker)
    store.update_offset(QUEUE, 1)
    store.persist_all([QUEUE])
    store.persist_all([QUEUE])
    assert broker.commits == [(QUEUE, 1)]
    store.persist(QUEUE)
    assert broker.commits == [(QUEUE, 1)] * 2


def test_one_failing_commit_does_not_stop_the_others(broker):
    store = BrokerOffsetStore(broker)
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(4)]
    for queue in queues:
        store.update_offset(queue, 9)
    broker.failing = {queues[0], queues[2]}
    with pytest.raises(RequestTimeout) as raised:
        store.persist_all(queues)
    assert raised.value.__notes__ == ["2 commits failed"]
    assert broker.committed == {queues[1]: 9, queues[3]: 9}
    broker.failing = set()
    store.persist_all(queues)
    assert broker.committed == dict.fromkeys(queues, 9)
    assert len(broker.commits) == 4


def test_what_could_not_be_committed_stays_in_memory(broker):
    store = BrokerOffsetStore(broker)
    store.update_offset(QUEUE, 9)
    broker.failing.add(QUEUE)
    with pytest.raises(RequestTimeout):
        store.remove_offset(QUEUE)
    assert store.read_offset(QUEUE, MEMORY) == 9
    broker.failing.clear()
    store.remove_offset(QUEUE)
    assert (store.read_offset(QUEUE, MEMORY), broker.committed) == (None, {QUEUE: 9})


def test_an_update_while_a_commit_is_under_way_is_committed_too_before_the_queue_is_forgotten(broker):
    store = BrokerOffsetStore(broker)
    store.update_offset(QUEUE, 1)
    broker.before_commit = lambda mq: store.update_offset(QUEUE, 2) if not broker.commits else None
    store.remove_offset(QUEUE)
    assert broker.commits == [(QUEUE, 1), (QUEUE, 2)]
    assert store.read_offset(QUEUE, MEMORY) is None


def test_a_slow_commit_does_not_arrive_after_its_successor(broker):
    store = BrokerOffsetStore(broker)
    store.update_offset(QUEUE, 1)
    on_the_way, go_on = threading.Event(), threading.Event()

    def slow_once(mq):
        if not on_the_way.is_set():
            on_the_way.set()
            assert go_on.wait(30)

    broker.before_commit = slow_once
    slow = threading.Thread(target=store.persist_all)
    slow.start()
    assert on_the_way.wait(30)
    store.update_offset(QUEUE, 2)
    quick = threading.Thread(target=store.persist, args=(QUEUE,))
    quick.start()
    go_on.set()
    slow.join(30)
    quick.join(30)
    assert broker.commits == [(QUEUE, 1), (QUEUE, 2)]
