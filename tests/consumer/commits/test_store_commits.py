"""How offsets reach an `OffsetStore`, which may block: a file, or a store written by the user."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pyrocket_consumer.consumer.commits.commits import CommitRecord
from pyrocket_consumer.consumer.commits.store import StoreCommits
from pyrocket_consumer.errors import OffsetStoreError, RequestTimeout
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import MemoryOffsetStore, ReadOffsetType
from tests.consumer.commits.ledger import Ledger
from tests.for_each import for_each

RUN = asyncio.run  # with threads
ONE, TWO, FAR = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 0)
MANY = [MessageQueue("orders", "a", number) for number in range(100)]


class Store(MemoryOffsetStore):
    """A store that records the calling threads, and may be slow or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.threads: set[threading.Thread] = set()

    def _slow(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread())
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error

    def read_offset(self, mq, read_type=ReadOffsetType.MEMORY_FIRST_THEN_STORE):
        if read_type is not ReadOffsetType.READ_FROM_MEMORY:
            self._slow("read")
        return super().read_offset(mq, read_type)

    def persist(self, mq):
        self._slow("persist")
        super().persist_all([mq])

    def persist_all(self, mqs=None):
        self._slow("persist_all")
        super().persist_all(mqs)

    def remove_offset(self, mq):
        self._slow("remove")
        super().remove_offset(mq)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def commits(store: Store) -> Ledger:
    return Ledger(StoreCommits(store, memory_first=True))


def stored(store: Store, *queues: MessageQueue) -> list[int | None]:
    return [store.read_offset(queue, ReadOffsetType.READ_FROM_STORE) for queue in queues]


async def test_blocking_calls_have_a_thread_of_their_own(commits, store):
    store.gate.clear()
    commits.update(ONE, 5)
    waiting = asyncio.ensure_future(commits.persist([ONE]))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not waiting.done(), "the loop continues meanwhile"
    commits.update(ONE, 7)
    assert commits.current(ONE) == 7, "the memory can be read at any time"
    store.gate.set()
    assert await waiting == {}
    assert await commits.start_offset(ONE) == 7
    await commits.overwrite(ONE, 2)
    await commits.release(ONE)
    await commits.close()
    assert store.calls == ["persist_all", "read", "persist", "remove"]
    assert threading.current_thread() not in store.threads
    assert len(store.threads) == 1


async def test_a_store_is_asked_for_all_that_has_changed_at_once(commits, store):
    commits.update(ONE, 5)
    commits.update(TWO, 6)
    assert await commits.persist([ONE, TWO, FAR]) == {}
    assert store.calls == ["persist_all"]
    assert (commits.persisted(ONE), commits.persisted(TWO), commits.persisted(FAR)) == (5, 6, None)
    await commits.close()


async def test_an_offset_that_changes_during_a_commit_counts_as_changed(commits, store):
    store.gate.clear()
    commits.update(ONE, 5)
    waiting = asyncio.ensure_future(commits.persist([ONE]))
    await asyncio.sleep(0.01)
    commits.update(ONE, 9)
    store.gate.set()
    await waiting
    assert commits.persisted(ONE) == 5
    await commits.persist([ONE])
    assert stored(store, ONE) == [9]
    await commits.close()


async def test_a_store_that_cannot_write_is_asked_again(commits, store):
    commits.update(ONE, 5)
    commits.update(TWO, 6)
    store.error = OffsetStoreError("disk full")
    assert await commits.persist([ONE, TWO]) == {ONE: store.error, TWO: store.error}
    with pytest.raises(OffsetStoreError):
        await commits.overwrite(ONE, 1)
    store.error = ZeroDivisionError("of the store")  # any exception fails only that call
    failed = (await commits.persist([ONE]))[ONE]
    assert isinstance(failed, OffsetStoreError)
    assert "ZeroDivisionError: of the store" in str(failed)
    store.error = None
    assert await commits.persist([ONE, TWO]) == {}
    assert stored(store, ONE, TWO) == [1, 6]
    await commits.close()


@pytest.mark.parametrize(("memory_first", "expected"), [(True, 9), (False, 5)])
async def test_broadcasting_reads_memory_first_and_clustering_the_store(store, memory_first, expected):
    commits = Ledger(StoreCommits(store, memory_first=memory_first))
    commits.update(ONE, 5)
    await commits.persist([ONE])
    commits.update(ONE, 9)
    assert await commits.start_offset(ONE) == commits.current(ONE) == expected
    assert await commits.start_offset(TWO) is None
    await commits.close()


async def test_queues_that_begin_together_share_a_sync(commits, store):
    store.gate.clear()
    first = asyncio.gather(*(commits.store_start(queue, 7) for queue in MANY[:10]))
    while not store.calls:
        await asyncio.sleep(0.001)
    rest = asyncio.gather(*(commits.store_start(queue, 8) for queue in MANY[10:]))
    await asyncio.sleep(0)
    assert not first.done(), "a queue begins when its offset is durable"
    store.gate.set()
    await asyncio.gather(first, rest)
    assert store.calls == ["persist_all", "persist_all"]
    assert stored(store, MANY[9], MANY[99]) == [7, 8]
    assert (commits.persisted(MANY[9]), commits.persisted(MANY[99])) == (7, 8)
    await commits.close()


async def test_a_start_offset_that_cannot_be_stored_is_an_error(commits, store):
    store.error = OffsetStoreError("disk full")
    outcomes = await asyncio.gather(*(commits.store_start(each, 7) for each in (ONE, TWO)), return_exceptions=True)
    assert outcomes == [store.error, store.error]
    assert (commits.current(ONE), commits.persisted(ONE)) == (7, None)
    store.error = None
    await commits.store_start(ONE, 7)
    assert commits.persisted(ONE) == 7
    await commits.close()


async def test_a_store_that_hangs_is_not_waited_for_longer(commits, store):
    store.gate.clear()
    commits.update(ONE, 5)
    until = asyncio.get_running_loop().time() + 0.05
    failed = await commits.persist([ONE, TWO], until=until)
    assert failed.keys() == {ONE}
    assert str(failed[ONE]).startswith("storing offsets got no response from the offset store within")
    with pytest.raises(RequestTimeout, match="closing got no response from the offset store"):
        await commits.close(until=until)
    store.gate.set()


class WithEpochs(MemoryOffsetStore):
    """A store of the user that returns `epoch` for each queue."""

    epoch: object = 0

    def reset_epoch(self, mq):
        return self.epoch

    def persist_resets(self, resets):
        pass


@for_each("epoch", ["5", b"5", -1, True, None])
def test_a_wrong_epoch_names_the_store_and_the_remedy(epoch):
    store = WithEpochs()
    store.epoch = epoch
    with pytest.raises(OffsetStoreError, match=r"WithEpochs.reset_epoch returned .* 2\*\*63 - 1, or 0 if there was"):
        StoreCommits(store, memory_first=True).reset_epoch(CommitRecord(ONE))
