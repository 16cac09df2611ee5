"""Rebalance rounds with a group and routes that the test controls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.consumer.membership import rebalance
from pyrocket_consumer.consumer.membership.rebalance import (
    HANDOVER_S,
    MIN_ROUND_INTERVAL_S,
    RETRY_ROUND_S,
    Rebalance,
)
from pyrocket_consumer.errors import BrokerError, ConnectError, RequestTimeout, RouteNotFound
from pyrocket_consumer.model import BrokerData, EventKind, MessageQueue, QueueData, TopicRoute

INTERVAL_S = 20.0


def queues(*ids: int, topic: str = "orders", broker: str = "a") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, queue_id) for queue_id in ids]


ALL, FIRST = set(queues(0, 1, 2, 3)), set(queues(0, 1))


def route(count: int = 4, topic: str = "orders", brokers: str = "a") -> TopicRoute:
    addresses = tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in brokers)
    return TopicRoute(topic, tuple(QueueData(name, count, count) for name in brokers), addresses)


class Group:
    """A fake group, cluster and queues: the members, the held queues, and what happened in which order."""

    def __init__(self, allocation: Any = "average", broadcasting: bool = False) -> None:
        options = {"rebalance_interval_s": INTERVAL_S, "group": "app"}
        self.config = SimpleNamespace(allocation=allocation, broadcasting=broadcasting, **options)
        self.name, self.client_id, self.closing = "app", "me", False
        self.subscriptions = self
        self.cluster = SimpleNamespace(routes=SimpleNamespace(get=self._route), membership=self, broker=self.broker)
        self.loop = asyncio.get_running_loop()
        self.tasks = Tasks(self.loop, self.report_unexpected)
        self.rebalance_wanted = asyncio.Event()
        self.rng = SimpleNamespace(shuffle=lambda names: None)
        self.routes: dict[str, Any] = {"orders": route()}
        self.ids: Any = ["me"]
        self.ids_after_heartbeat: Any = None
        self.heartbeat_s = 0.0
        self.refuses: set[MessageQueue] = set()
        self.begin_s: dict[MessageQueue, float] = {}
        self.mine: set[MessageQueue] = set()
        self.happened: list[Any] = []
        self.emitted: list[tuple[EventKind, str]] = []
        self.requested: list[str] = []

    def __iter__(self):
        return iter(self.routes)

    def renew(self, topics):
        self.happened.append(("version", *sorted(topics)))

    def emit(self, kind, text, *others, **more):
        self.emitted.append((kind, text))

    emit_throttled = emit

    def report_unexpected(self, what, error):
        raise AssertionError(what) from error

    def start_in_background(self, work, what):
        self.tasks.begin(work(), what)

    # the cluster

    async def _route(self, topic):
        found = self.routes[topic]
        if isinstance(found, Exception):
            raise found
        return found

    async def heartbeat(self):
        self.happened.append("heartbeat")
        await asyncio.sleep(self.heartbeat_s)
        if self.ids_after_heartbeat is not None:
            self.ids = self.ids_after_heartbeat

    def broker(self, name):
        return SimpleNamespace(consumer_ids=lambda group: self._ids(name))

    async def _ids(self, name):
        self.requested.append(name)
        found = self.ids[name] if isinstance(self.ids, dict) else self.ids
        if isinstance(found, Exception):
            raise found
        return list(found)

    # calls of tests

    def rebalance(self) -> Rebalance:
        return Rebalance(self, Queues(self), DoesNothing(), DoesNothing())  # type: ignore[arg-type]

    async def changes(self, wait_s: float = MIN_ROUND_INTERVAL_S, **state: Any) -> None:
        """Change the state, request a round, and let some time pass."""
        vars(self).update(state)
        self.rebalance_wanted.set()
        await asyncio.sleep(wait_s)

    @property
    def begun(self) -> list[int]:
        """The queues that have begun, in order."""
        return [what[1] for what in self.happened if what[0] == "begin"]


class Queues:
    """Fake assignments."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.queues: dict[MessageQueue, HeldQueue] = {}

    def known(self):
        return [self.queue(queue) for queue in {**self.queues, **dict.fromkeys(self.group.mine)}]

    def queue(self, queue):
        return self.queues.setdefault(queue, HeldQueue(self.group, queue))


class HeldQueue:
    """A fake queue."""

    def __init__(self, group: Group, queue: MessageQueue) -> None:
        self.group, self.queue = group, queue
        self.due_at: float | None = None
        self.beginning: Any = None

    @property
    def is_held(self):
        return self.queue in self.group.mine

    is_staying = is_held

    async def end(self, why):
        self.group.happened.append(("end", self.queue.queue_id))
        self.group.mine.discard(self.queue)

    async def begin(self, *, is_new, is_ours):
        group, queue = self.group, self.queue
        group.happened.append(("begin", queue.queue_id))
        await asyncio.sleep(group.begin_s.get(queue, 0))
        if queue in group.refuses:
            return False
        if is_ours():
            group.mine.add(queue)
        return True


class DoesNothing:
    """Fake resets and expressions that do nothing."""

    async def check_queue(self, queue):
        pass

    async def read_before_begin(self, queue):
        pass


@asynccontextmanager
async def rebalancing(
    allocation: Any = "average", *, broadcasting: bool = False, wait_s: float = 0.1, **state: Any
) -> AsyncIterator[Group]:
    """Run rounds as a member does, with a group in this state. The first round has `wait_s` to finish."""
    group = Group(allocation, broadcasting)
    vars(group).update(state)
    group.rounds = group.rebalance()
    task = asyncio.create_task(group.rounds.run())
    if wait_s:
        await asyncio.sleep(wait_s)
    yield group
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_queues_of_others_end_and_own_queues_begin():
    async with rebalancing(mine=set(queues(3, 7))) as group:
        assert group.happened.index(("version", "orders")) < group.happened.index("heartbeat")
        assert ("end", 7) in group.happened[:3]
        assert sorted(group.happened[3:]) == [("begin", 0), ("begin", 1), ("begin", 2)]
        assert group.mine == ALL
        group.happened.clear()
        await asyncio.sleep(3 * INTERVAL_S)
        assert group.happened == [], "without a change there is no new version and no heartbeat"


async def test_old_owners_have_time_to_store():
    async with rebalancing(ids=["me", "you"], mine=set(queues(1)), wait_s=HANDOVER_S - 0.01) as group:
        assert group.happened == [("version", "orders"), "heartbeat"]
        await asyncio.sleep(0.02)
        assert group.happened == [("version", "orders"), "heartbeat", ("begin", 0)]


async def test_queues_of_others_are_given_up_while_new_ones_wait():
    """Otherwise the new owner, which waits equally long, begins before the last offset is stored."""
    async with rebalancing(wait_s=MIN_ROUND_INTERVAL_S) as group:
        assert group.mine == ALL
        await group.changes(ids=["me", "you"])
        assert group.mine == FIRST
        # the first queue is assigned again, and waits for its owner
        await group.changes(MIN_ROUND_INTERVAL_S + 0.01, mine=set(queues(1)), happened=[])
        await group.changes(MIN_ROUND_INTERVAL_S / 2, ids=["me", "you", "zoe", "zora"])
        assert ("end", 1) in group.happened, "it must not wait for the other queue"
        assert group.begun == []
        await asyncio.sleep(HANDOVER_S)
        assert group.begun == [0]
        assert group.mine == set(queues(0))


async def test_each_queue_waits_for_its_own_second_only():
    async with rebalancing(ids=["me", "you"], wait_s=0.6) as group:
        await group.changes(HANDOVER_S - 0.6 + 0.05, routes={**group.routes, "payments": route(2, "payments")})
        assert group.begun == [0, 1], "of the first topic"
        await asyncio.sleep(0.6)
        assert len(group.mine) == 3


async def test_a_queue_given_up_between_rounds_waits_again():
    """After an unsubscribe, another member may have it until this one subscribes again."""
    async with rebalancing(ids=["me", "you"], wait_s=HANDOVER_S + MIN_ROUND_INTERVAL_S) as group:
        assert group.mine == FIRST
        await group.changes(HANDOVER_S - 0.1, mine=set(), happened=[])
        assert group.begun == []
        await asyncio.sleep(0.2)
        assert group.mine == FIRST


async def test_a_queue_that_could_not_begin_is_tried_again():
    async with rebalancing(refuses=set(queues(2))) as group:
        assert group.mine == set(queues(0, 1, 3))
        await asyncio.sleep(RETRY_ROUND_S)
        assert group.begun.count(2) == 2
        group.refuses.clear()
        await asyncio.sleep(RETRY_ROUND_S)
        assert group.mine == ALL


async def test_a_queue_that_is_lost_during_the_wait_does_not_begin():
    async with rebalancing(ids=["me", "you"], wait_s=HANDOVER_S / 4) as group:
        await group.changes(2 * HANDOVER_S, ids=["me", "you", "zoe", "zora"])
        assert group.mine == set(queues(0))
        assert group.begun == [0]


async def test_a_queue_that_is_lost_while_it_begins_does_not_start():
    async with rebalancing(begin_s=dict.fromkeys(queues(2, 3), 5.0), wait_s=MIN_ROUND_INTERVAL_S) as group:
        await group.changes(10, ids=["me", "you"])
        assert group.mine == FIRST
        assert ("end", 2) not in group.happened, "this member never held it"


async def test_a_queue_that_begins_as_it_is_lost_is_given_up():
    """The round that loses it runs between its begin and the callback of that."""
    (late,) = queues(3)
    async with rebalancing(begin_s={late: 5.0}, wait_s=MIN_ROUND_INTERVAL_S) as group:
        group.mine.add(late)  # it has begun, and the callback has not run
        group.ids = ["me", "you"]
        await group.rounds.round()
        await asyncio.sleep(0.01)
        assert group.mine == FIRST


async def test_a_queue_that_takes_long_to_begin_delays_no_other():
    async with rebalancing(begin_s={queues(2)[0]: 60.0}) as group:
        assert group.mine == set(queues(0, 1, 3))
        await group.changes(RETRY_ROUND_S, routes={"orders": route(5)})
        assert group.mine == set(queues(0, 1, 3, 4))
        await asyncio.sleep(60)
        assert group.mine == set(queues(0, 1, 2, 3, 4))
        assert group.begun.count(2) == 1


async def test_a_heartbeat_without_a_response_delays_a_round_by_1_s():
    async with rebalancing(heartbeat_s=60.0, wait_s=rebalance.HEARTBEAT_WAIT_S + 0.1) as group:
        assert group.mine == ALL


async def test_a_broadcasting_member_takes_all_queues_without_a_request():
    async with rebalancing(broadcasting=True, ids=AssertionError("asked")) as group:
        assert group.mine == ALL


@pytest.mark.parametrize(("ids", "waits_s"), [(["me"], 0.0), (["me", "you"], HANDOVER_S)])
async def test_a_start_waits_for_the_queues_of_the_first_round(ids, waits_s):
    async with rebalancing(ids=ids, wait_s=0) as group:
        assert await group.rounds.wait_until_begun(5.0) == []
        assert group.loop.time() == pytest.approx(waits_s, abs=0.01)
        assert len(group.mine) == 4 / len(ids)


async def test_a_start_waits_for_no_broker_forever():
    async with rebalancing(begin_s={queues(2)[0]: 60.0}, wait_s=0) as group:
        assert await group.rounds.wait_until_begun(5.0) == ["orders/a/2"]
        assert group.loop.time() == pytest.approx(5.0, abs=0.01)


TROUBLE = [
    BrokerError(1, "boom", "a:1"),
    BrokerError(2, "busy", "a:1"),
    ConnectError("a:1", "refused"),
    RequestTimeout("GET_CONSUMER_LIST_BY_GROUP", "a:1", 3),
]


@pytest.mark.parametrize("error", TROUBLE, ids=str)
async def test_held_queues_are_kept_while_the_members_are_unknown(error):
    group = Group()
    group.mine, group.ids = set(FIRST), error
    assert await group.rebalance().round() == RETRY_ROUND_S
    assert (group.mine, group.happened) == (FIRST, [])
    assert str(error) in group.emitted[0][1]


@pytest.mark.parametrize("error", TROUBLE, ids=str)
async def test_another_broker_of_the_topic_is_asked_when_one_fails(error):
    async with rebalancing(routes={"orders": route(2, brokers="ab")}, ids={"a": error, "b": ["me"]}) as group:
        assert group.requested == ["a", "b"]
        assert len(group.mine) == 4
        assert group.emitted == []


@pytest.mark.parametrize("error", [RouteNotFound("orders", "ns:1"), ConnectError("ns:1", "refused")], ids=str)
async def test_an_error_of_one_topic_does_not_stop_the_others(error):
    routes = {"orders": error, "payments": route(2, "payments")}
    async with rebalancing(routes=routes, mine=set(FIRST), wait_s=1.5 * RETRY_ROUND_S) as group:
        assert group.mine == FIRST | set(queues(0, 1, topic="payments"))
        assert len([text for kind, text in group.emitted if "orders" in text]) == (2 if "refused" in str(error) else 1)


async def test_a_member_that_is_not_listed_sends_a_heartbeat():
    async with rebalancing(ids=["you"], ids_after_heartbeat=["me", "you"], wait_s=HANDOVER_S + 0.1) as group:
        assert group.happened[0] == "heartbeat"
        assert group.mine == FIRST


async def test_a_broker_that_forgot_this_member_costs_no_other_queues():
    mine, ids = FIRST | set(queues(0, 1, broker="b")), {"a": ["you"], "b": ["me", "you"]}
    async with rebalancing(routes={"orders": route(2, brokers="ab")}, mine=mine, ids=ids) as group:
        assert len(group.mine) == 2


async def test_a_member_that_is_still_not_listed_tries_again_soon():
    """The listed members take its queues, so the next round must not wait for the timer."""
    async with rebalancing(mine=set(FIRST), ids=["you"]) as group:
        assert group.mine == set()
        requested = len(group.requested)
        await asyncio.sleep(RETRY_ROUND_S)
        assert len(group.requested) > requested


# --- strategies of the user


def refusing(*arguments):
    raise ZeroDivisionError("in the strategy")


STRATEGIES = [
    (refusing, "in the strategy"),
    (lambda *arguments: queues(99), "not a queue of the topic"),
    (lambda *arguments: ["broker-a:0"], "not a queue of the topic"),
    (lambda *arguments: [{"queue": 0}], "strategy"),
    (lambda *arguments: None, "strategy"),
    (lambda: None, "strategy"),
]


@pytest.mark.parametrize(("strategy", "words"), STRATEGIES)
def test_a_strategy_that_fails_keeps_the_assignment(strategy, words):
    async def scenario():
        async with rebalancing(strategy, mine=set(FIRST), wait_s=1.5 * RETRY_ROUND_S) as group:
            assert group.mine == FIRST
            assert len(group.emitted) == 2
            assert words in group.emitted[0][1]
            assert "rebalance of orders failed, assignment kept" in group.emitted[0][1]

    asyncio.run(scenario())


def test_a_strategy_runs_on_its_own_thread():
    """Each topic has the whole time, also if others run first."""
    topics, threads = ["orders", "payments", "returns"], set()

    def slow(group, client_id, queues, members):
        threads.add(threading.current_thread())
        time.sleep(rebalance.STRATEGY_TIMEOUT_S / 2.5)
        return queues

    async def scenario():
        routes = {topic: route(topic=topic) for topic in topics}
        async with rebalancing(slow, routes=routes, wait_s=3 * rebalance.STRATEGY_TIMEOUT_S / 2.5 + 0.1) as group:
            assert group.emitted == []
            assert {queue.topic for queue in group.mine} == set(topics)
            assert len(group.mine) == 12

    asyncio.run(scenario())
    assert threads
    assert threading.current_thread() not in threads


# --- when rounds are held


async def test_when_rounds_are_held():
    rounds = []

    async def ids(name):
        rounds.append(asyncio.get_running_loop().time())
        return ["me"]

    async with rebalancing(_ids=ids) as group:
        assert rounds == [0.0]
        await asyncio.sleep(RETRY_ROUND_S)  # its queues had not begun when the first round ended
        rounds.clear()
        await asyncio.sleep(INTERVAL_S)
        assert len(rounds) == 1
        rounds.clear()
        for _ in range(10):
            await group.changes(0.01)
        await asyncio.sleep(3 * MIN_ROUND_INTERVAL_S)
        assert len(rounds) <= 2, "the first at once, all other requests together after a pause"
        rounds.clear()
        await group.changes(10, refuses=set(queues(0)), mine=set())
        assert len(rounds) >= 10 / (RETRY_ROUND_S + MIN_ROUND_INTERVAL_S) - 1
        group.refuses.clear()
        await asyncio.sleep(2 * RETRY_ROUND_S + 0.1)
        rounds.clear()
        await asyncio.sleep(INTERVAL_S - 3)
        assert rounds == []


async def test_a_queue_that_did_not_exist_at_first_is_new():
    group = Group()
    rebalance = group.rebalance()
    assert not rebalance.is_new(queues(0)[0]), "its topic is not known yet"
    await rebalance.round()
    group.routes["orders"] = route(6)
    await rebalance.round()
    assert [rebalance.is_new(queue) for queue in queues(0, 3, 4, 5)] == [False, False, True, True]
