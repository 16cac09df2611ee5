"""How offsets reach brokers: recorded in memory, stored, and retried."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.commits.commits import CommitRecord
from pyrocket_consumer.consumer.commits.store import StoreCommits
from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.consumer.member import CommitTimer
from pyrocket_consumer.errors import BrokerError, ConnectionLost, RequestTimeout
from pyrocket_consumer.model import EventKind, MessageQueue
from pyrocket_consumer.offsets import MemoryOffsetStore
from tests.consumer.commits.ledger import Ledger

ONE, TWO, FAR = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 0)


class Brokers:
    """A fake cluster: it stores commits after `call_s`, or gives the prepared answers first."""

    def __init__(self) -> None:
        self.stored: dict[MessageQueue, int] = {}
        self.answers: list[Any] = []  # an exception, or False if a reset is pending at the broker
        self.commits: list[tuple[MessageQueue, int]] = []
        self.call_s = 0.01
        self.most_at_once, self._at_once = Counter[MessageQueue](), Counter[MessageQueue]()

    def broker(self, name: str) -> Any:
        async def query_offset(group, queue):
            assert (group, queue.broker_name) == ("app", name)
            await asyncio.sleep(self.call_s)
            if self.answers:
                raise self.answers.pop(0)
            return self.stored.get(queue)

        async def commit_offset(group, queue, offset):
            assert (group, queue.broker_name) == ("app", name)
            self.commits.append((queue, offset))
            self._at_once[queue] += 1
            self.most_at_once |= self._at_once
            answer = self.answers.pop(0) if self.answers else True
            try:
                await asyncio.sleep(self.call_s)
                if isinstance(answer, Exception):
                    raise answer
                if answer:
                    self.stored[queue] = offset
                return answer
            finally:
                self._at_once[queue] -= 1

        return SimpleNamespace(query_offset=query_offset, commit_offset=commit_offset)


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def commits(brokers: Brokers) -> Ledger:
    return Ledger(BrokerCommits(brokers, "app"))  # type: ignore[arg-type]


REFUSED, UNANSWERED = BrokerError(1, "no", "a:1"), RequestTimeout("UPDATE_CONSUMER_OFFSET", "a:1", 3)
TROUBLE = [REFUSED, BrokerError(2, "busy", "a:1"), UNANSWERED, ConnectionLost("a:1", "reset")]


@pytest.mark.parametrize("trouble", TROUBLE, ids=str)
async def test_an_offset_that_cannot_be_read_is_an_error_not_none(commits, brokers, trouble):
    assert await commits.start_offset(ONE) is None
    brokers.stored[ONE] = 7
    brokers.answers = [trouble]
    with pytest.raises(type(trouble)):
        await commits.start_offset(ONE)
    assert commits.current(ONE) is None
    assert await commits.start_offset(ONE) == 7
    assert (commits.current(ONE), commits.persisted(ONE)) == (7, 7)
    await commits.persist([ONE])
    assert brokers.commits == [], "the read offset counts as stored"


async def test_only_changed_offsets_are_stored(commits, brokers):
    for offset in (5, 3, 9, 8):
        commits.update(ONE, offset)
    commits.update(TWO, 1)
    for _ in range(2):
        assert await commits.persist([ONE, TWO, FAR]) == {}
        assert brokers.stored == {ONE: 9, TWO: 1}
        assert len(brokers.commits) == 2
    commits.update(TWO, 2)
    await commits.persist([ONE, TWO, FAR])
    assert brokers.commits[2:] == [(TWO, 2)]
    assert commits.table("orders") == {ONE: 9, TWO: 2}


@pytest.mark.parametrize("trouble", TROUBLE, ids=str)
async def test_offsets_that_could_not_be_stored_are_stored_next_time(commits, brokers, trouble):
    await commits.store_start(ONE, 1)
    commits.update(ONE, 5)
    commits.update(TWO, 6)
    brokers.answers = [trouble]
    assert await commits.persist([ONE, TWO]) == {ONE: trouble}
    assert (commits.persisted(ONE), commits.persisted(TWO)) == (1, 6)
    commits.update(ONE, 8)
    assert await commits.persist([ONE, TWO]) == {}
    assert brokers.stored == {ONE: 8, TWO: 6}


async def test_after_a_commit_without_an_answer_the_next_is_made_twice(commits, brokers):
    """The broker may execute the unanswered commit last, and then the older offset would stay."""
    commits.update(ONE, 5)
    brokers.answers = [UNANSWERED]
    await commits.persist([ONE])
    commits.update(ONE, 8)
    await commits.persist([ONE])
    brokers.stored[ONE] = 5  # now the broker executes the first one
    await commits.persist([ONE])
    assert brokers.stored[ONE] == 8
    made = len(brokers.commits)
    await commits.persist([ONE])
    assert len(brokers.commits) == made


async def test_a_commit_ignored_for_a_reset_is_not_taken_for_stored(commits, brokers):
    commits.update(ONE, 5)
    commits.update(TWO, 1)
    brokers.answers = [False]
    assert await commits.persist([ONE]) == {}
    assert commits.persisted(ONE) is None
    await commits.persist([ONE, TWO])
    assert brokers.stored == {ONE: 5, TWO: 1}
    assert commits.resets_waiting == [ONE], "one call for each ignored commit"


async def test_commits_of_a_queue_run_one_at_a_time_with_the_newest_value(commits, brokers):
    persists = []
    for offset, times in ((1, 1), (2, 2), (3, 0)):
        commits.update(ONE, offset)
        persists += [asyncio.ensure_future(commits.persist([ONE])) for _ in range(times)]
        await asyncio.sleep(0.001)
    await asyncio.gather(*persists)
    assert [offset for _, offset in brokers.commits] == [1, 3]
    assert brokers.most_at_once == {ONE: 1}


async def test_a_commit_that_nobody_waits_for_is_finished(commits, brokers):
    brokers.call_s = 1.0

    async def persist_and_give_up(offset):
        commits.update(ONE, offset)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(commits.persist([ONE]), 0.1)

    await persist_and_give_up(5)
    commits.update(ONE, 9)
    await commits.persist([ONE])
    assert [offset for _, offset in brokers.commits] == [5, 9]
    assert brokers.most_at_once == {ONE: 1}
    await persist_and_give_up(12)
    await commits.close()
    assert brokers.stored == {ONE: 12}, "the close waits for it"


async def test_a_reset_replaces_the_offset_in_memory_with_any_other(commits, brokers):
    commits.update(ONE, 50)
    await commits.persist([ONE])
    for target in (3, 3, 80):
        await commits.overwrite(ONE, target)
        assert (brokers.stored, commits.current(ONE)) == ({ONE: target}, target)
    brokers.answers = [REFUSED]
    with pytest.raises(BrokerError):
        await commits.overwrite(ONE, 5)
    assert await commits.persist([ONE]) == {}
    assert brokers.stored == {ONE: 5}


async def test_a_released_queue_is_stored_and_forgotten(commits, brokers):
    commits.update(ONE, 5)
    await commits.release(ONE)
    assert (brokers.stored, commits.current(ONE), commits.persisted(ONE)) == ({ONE: 5}, None, None)
    commits.update(ONE, 2)  # the queue returned and starts lower; nothing from the earlier period delays it
    await commits.persist([ONE])
    assert brokers.stored == {ONE: 2}
    commits.update(ONE, 3)
    brokers.answers = [REFUSED]
    with pytest.raises(BrokerError):
        await commits.release(ONE)
    assert commits.current(ONE) is None
    commits.update(ONE, 9)
    commits.forget(ONE)
    await commits.persist([ONE])
    assert brokers.stored == {ONE: 2}, "another member holds it already"


async def test_the_last_known_offset_of_a_queue_is_remembered(commits, brokers):
    assert commits.last_known(ONE) is None
    brokers.stored[ONE] = 7
    await commits.start_offset(ONE)
    commits.forget(ONE)
    assert commits.last_known(ONE) == 7
    commits.update(ONE, 9)
    brokers.answers = [BrokerError(1, "no", "a:1"), False]
    for known in (7, 7, 9):  # refused; ignored because of a pending reset; accepted
        await commits.persist([ONE])
        assert commits.last_known(ONE) == known
    await commits.release(ONE)
    assert (commits.current(ONE), commits.last_known(ONE)) == (None, 9)


def test_queues_are_grouped_by_broker_or_in_one_store(commits):
    assert commits.by_store([ONE, FAR, TWO]) == {"a": [ONE, TWO], "b": [FAR]}
    assert Ledger(StoreCommits(MemoryOffsetStore(), memory_first=True)).by_store([ONE, FAR]) == {"": [ONE, FAR]}


async def test_offsets_that_a_broker_may_have_lost_are_stored_again(commits, brokers):
    for queue in (ONE, FAR):
        commits.update(queue, 5)
    await commits.persist([ONE, FAR])
    brokers.stored.clear()
    commits.mark_unpersisted("b")
    await commits.persist([ONE, FAR])
    assert brokers.stored == {FAR: 5}
    commits.mark_unpersisted()
    await commits.persist([ONE, FAR])
    assert brokers.stored == {ONE: 5, FAR: 5}


# --- the first commits of a topic at a broker

MANY = [MessageQueue("orders", "a", number) for number in range(100)]


async def persist_many(commits: Ledger) -> dict[MessageQueue, Exception]:
    for queue in MANY:
        commits.update(queue, 7)
    return await commits.persist(MANY)


async def seconds(work: Awaitable[Any]) -> float:
    began = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("step", ["begin", "persist"])
async def test_the_first_commit_goes_alone_and_the_others_together(commits, brokers, step):
    brokers.call_s = 0.05
    if step == "begin":
        took = await seconds(asyncio.gather(*(commits.store_start(queue, 7) for queue in MANY)))
    else:
        took = await seconds(persist_many(commits))
    assert took == pytest.approx(0.1)
    assert brokers.stored == dict.fromkeys(MANY, 7)
    assert commits.persisted(MANY[0]) == 7


@pytest.mark.parametrize(("stored", "took_s"), [(1, 0.05), (0, 0.1)])
async def test_a_read_offset_above_0_proves_that_a_table_exists(commits, brokers, stored, took_s):
    """Brokers of 4.9 return 0 for a new queue without an offset."""
    brokers.stored[ONE] = stored
    await commits.start_offset(ONE)
    brokers.call_s = 0.05
    assert await seconds(persist_many(commits)) == pytest.approx(took_s)
    assert brokers.stored == dict.fromkeys(MANY, 7)


@pytest.mark.parametrize("trouble", TROUBLE[2:], ids=str)
async def test_an_unanswered_first_commit_fails_those_that_wait_for_it(commits, brokers, trouble):
    brokers.answers = [trouble]
    failed = await persist_many(commits)
    assert {queue: str(error) for queue, error in failed.items()} == dict.fromkeys(MANY, str(trouble))
    assert brokers.commits == [(MANY[0], 7)]
    assert await commits.persist(MANY) == {}
    assert brokers.commits[1][0] == MANY[1]
    assert brokers.stored == dict.fromkeys(MANY, 7)


async def test_a_refused_first_commit_fails_no_other(commits, brokers):
    brokers.answers = TROUBLE[:2]
    assert await persist_many(commits) == dict(zip(MANY, TROUBLE[:2], strict=False))
    assert brokers.stored == dict.fromkeys(MANY[2:], 7)


async def test_an_unacknowledged_commit_continues(commits, brokers):
    await commits.store_start(ONE, 1)
    commits.update(ONE, 5)
    commits.update(TWO, 6)
    brokers.call_s = 10
    until = asyncio.get_running_loop().time() + 2
    failed = await commits.persist([ONE, TWO], until=until)
    assert asyncio.get_running_loop().time() == pytest.approx(until)
    assert {queue: str(error) for queue, error in failed.items()} == dict.fromkeys(
        [ONE, TWO], "the commit got no response from broker 'a' within 2 s"
    )
    await commits.close(until=until)
    assert brokers.stored == {ONE: 1}
    await asyncio.sleep(10)
    assert brokers.stored == {ONE: 5, TWO: 6}


class Member:
    """A fake member with its commits. The commits to some stores hang until they are released."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks = Tasks(self.loop, lambda what, error: None)
        self.config = SimpleNamespace(commit_interval_s=5.0)
        self.lets_go = asyncio.Event()
        self.hangs: set[str] = set()
        self.stored: list[MessageQueue] = []
        self.emitted: list[tuple[float, EventKind, str]] = []

    def emit_throttled(self, kind: EventKind, text: str, queue: MessageQueue | None = None) -> None:
        self.emitted.append((self.loop.time(), kind, text))

    def all(self) -> list[Any]:
        return [SimpleNamespace(commit=CommitRecord(queue)) for queue in (ONE, FAR)]

    def records(self) -> list[CommitRecord]:
        return []

    def by_store(self, records: list[CommitRecord]) -> dict[str, list[CommitRecord]]:
        return {record.queue.broker_name: [record] for record in records}

    def mark_unpersisted(self, records: list[CommitRecord]) -> None:
        pass

    async def persist(self, records: Any = ()) -> dict[MessageQueue, Exception]:
        if any(record.queue.broker_name in self.hangs for record in records):
            await self.lets_go.wait()
        self.stored += [record.queue for record in records]
        return {}


async def test_a_slow_store_is_reported_and_delays_no_other():
    member = Member()
    member.hangs = {"b"}
    timer = asyncio.create_task(CommitTimer(member, member, member, member).run())  # type: ignore[arg-type]
    await asyncio.sleep(14)
    assert member.emitted == []
    await asyncio.sleep(7)
    ((at, kind, text),) = member.emitted[:1]
    assert (at, kind) == (15.0, EventKind.COMMIT_FAILED)
    assert "b has not stored offsets for 10 s" in text
    assert member.stored == [ONE] * 4
    member.lets_go.set()
    await asyncio.sleep(5)
    member.emitted.clear()
    await asyncio.sleep(50)
    assert member.emitted == [], "it commits again"
    assert member.stored.count(FAR) > 10
    timer.cancel()
