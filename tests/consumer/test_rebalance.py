"""Rounds of rebalance against a group and routes that do what the test wants."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.consumer.rebalance import AGAIN_S, HANDOVER_S, SPACING_S, Plan, Rebalance, plan
from pyrocket_consumer.errors import BrokerError, ConfigError, ConnectError, RequestTimeout, RouteNotFound
from pyrocket_consumer.model import BrokerData, EventKind, MessageQueue, QueueData, TopicRoute
from tests.consumer.virtual_time import run

INTERVAL_S = 20.0


def queues(*ids: int, topic: str = "orders", broker: str = "a") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, queue_id) for queue_id in ids]


def route(count: int = 4, topic: str = "orders", brokers: tuple[str, ...] = ("a",)) -> TopicRoute:
    return TopicRoute(
        topic,
        tuple(QueueData(name, count, count) for name in brokers),
        tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in brokers),
    )


@pytest.mark.parametrize(
    ("held", "wanted", "drop", "add"),
    [
        ([], [], [], []),
        ([], [1, 0], [], [0, 1]),
        ([1, 0], [], [0, 1], []),
        ([0, 1], [1, 2], [0], [2]),
        ([3, 1, 2], [2, 1, 3], [], []),
        ([0], [1, 1], [0], [1]),
    ],
)
def test_a_plan_turns_what_is_held_into_what_is_wanted(held, wanted, drop, add):
    made = plan(queues(*held), queues(*wanted))
    assert made == Plan(tuple(queues(*drop)), tuple(queues(*add)))
    assert bool(made) == bool(drop or add)


class Group:
    """Stands for the member and its cluster: who is in the group, what is held, what happened in which order."""

    def __init__(self, allocation: Any = "average", broadcasting: bool = False) -> None:
        self.config = SimpleNamespace(
            allocation=allocation, broadcasting=broadcasting, rebalance_interval_s=INTERVAL_S, group="app"
        )
        self.group, self.client_id = "app", "me"
        self.cluster = self
        self.assignments = SimpleNamespace(
            held=self.held, end=self.end, begin=self.begin, topics=lambda: {queue.topic for queue in self.mine}
        )
        self.rng = SimpleNamespace(shuffle=lambda names: None)
        self.routes: dict[str, Any] = {"orders": route()}
        self.ids: Any = ["me"]
        self.ids_after_heartbeat: Any = None
        self.refuses: set[MessageQueue] = set()
        self.mine: set[MessageQueue] = set()
        self.happened: list[Any] = []
        self.told: list[tuple[EventKind, str]] = []
        self.asked: list[str] = []

    # the member

    @property
    def loop(self):
        return asyncio.get_running_loop()

    def topics(self):
        return list(self.routes)

    def event(self, kind, text, *others, **more):
        self.told.append((kind, text))

    trouble = event

    def queues_changed(self, changes):
        self.happened.append(("version", *sorted(changes)))

    # the cluster

    async def route(self, topic):
        found = self.routes[topic]
        if isinstance(found, Exception):
            raise found
        return found

    async def heartbeat(self):
        self.happened.append("heartbeat")
        if self.ids_after_heartbeat is not None:
            self.ids = self.ids_after_heartbeat

    def broker(self, name):
        return SimpleNamespace(consumer_ids=lambda group: self._ids(name))

    async def _ids(self, name):
        self.asked.append(name)
        found = self.ids[name] if isinstance(self.ids, dict) else self.ids
        if isinstance(found, Exception):
            raise found
        return list(found)

    # the assignments

    def held(self, topic):
        return [queue for queue in self.mine if queue.topic == topic]

    async def end(self, queue, why):
        self.happened.append(("end", queue.queue_id))
        self.mine.discard(queue)

    async def begin(self, queue):
        self.happened.append(("begin", queue.queue_id))
        if queue in self.refuses:
            return False
        self.mine.add(queue)
        return True

    # what tests do

    def rebalance(self) -> Rebalance:
        return Rebalance(self)  # type: ignore[arg-type]


def test_a_round_ends_then_tells_then_begins():
    async def scenario():
        group = Group()
        group.mine = set(queues(3, 7))
        group.ids = ["me"]
        group.routes["orders"] = route(4)
        assert await group.rebalance().round()
        assert group.happened[:3] == [("end", 7), ("version", "orders"), "heartbeat"]
        assert sorted(group.happened[3:]) == [("begin", 0), ("begin", 1), ("begin", 2)]
        assert group.mine == set(queues(0, 1, 2, 3))
        group.happened.clear()
        assert await group.rebalance().round()
        assert group.happened == [], "nothing to change: no new version, no heartbeat"

    run(scenario())


def test_members_share():
    async def scenario():
        group = Group()
        group.ids = ["before", "me", "you"]
        group.routes["orders"] = route(8)
        assert await group.rebalance().round()
        assert group.mine == set(queues(3, 4, 5))

    run(scenario())


def test_a_member_of_a_company_leaves_the_old_owners_time_to_store():
    async def scenario():
        group = Group()
        group.ids = ["me", "you"]
        group.mine = set(queues(1))
        began = group.loop.time()
        assert await group.rebalance().round()
        assert group.loop.time() == pytest.approx(began + HANDOVER_S, abs=0.01)
        assert group.happened == [("version", "orders"), "heartbeat", ("begin", 0)]

    run(scenario())


def test_what_is_another_s_by_now_is_given_up_while_queues_are_awaited():
    """Else its new owner, which waits as long as we do, begins before our last offset of it is stored."""

    async def scenario():
        group = Group()
        group.ids = ["me"]
        rebalance = group.rebalance()
        await rebalance.round()
        assert group.mine == set(queues(0, 1, 2, 3))
        group.ids = ["me", "you"]
        await rebalance.round()
        assert group.mine == set(queues(0, 1))
        group.mine = set(queues(1))  # the first is to come back, and waits for its owner
        began = group.loop.time()
        round_ = asyncio.create_task(rebalance.round())
        await asyncio.sleep(0.2)
        group.happened.clear()
        group.ids = ["me", "you", "zoe", "zora"]
        rebalance.soon()
        await asyncio.sleep(HANDOVER_S - 0.3)
        assert group.happened[0] == ("end", 1), "not only when the wait is over"
        assert await round_
        assert ("begin", 0) in group.happened
        assert group.loop.time() == pytest.approx(began + HANDOVER_S, abs=0.01), "nothing waits twice"
        assert group.mine == set(queues(0))

    run(scenario())


def test_each_queue_waits_for_its_own_second_only():
    async def scenario():
        group = Group()
        group.ids = ["me", "you"]
        rebalance = group.rebalance()
        began = group.loop.time()
        round_ = asyncio.create_task(rebalance.round())
        await asyncio.sleep(0.6)
        group.routes["payments"] = route(2, "payments")
        rebalance.soon()
        await asyncio.sleep(HANDOVER_S - 0.6 + 0.05)
        begun = [what for what in group.happened if what[0] == "begin"]
        assert begun == [("begin", 0), ("begin", 1)], "of the first topic"
        assert await round_
        assert group.loop.time() == pytest.approx(began + 0.6 + HANDOVER_S, abs=0.01)
        assert len(group.mine) == 3

    run(scenario())


def test_a_queue_that_was_given_up_between_rounds_is_waited_for_again():
    """After unsubscribing: somebody else may have it until we subscribe again."""

    async def scenario():
        group = Group()
        group.ids = ["me", "you"]
        rebalance = group.rebalance()
        await rebalance.round()
        assert group.mine == set(queues(0, 1))
        group.mine.clear()
        began = group.loop.time()
        assert await rebalance.round()
        assert group.mine == set(queues(0, 1))
        assert group.loop.time() == pytest.approx(began + HANDOVER_S, abs=0.01)

    run(scenario())


def test_a_queue_that_could_not_begin_has_waited_already():
    async def scenario():
        group = Group()
        group.ids = ["me", "you"]
        group.refuses = set(queues(1))
        rebalance = group.rebalance()
        assert not await rebalance.round()
        group.refuses = set()
        began = group.loop.time()
        assert await rebalance.round()
        assert group.loop.time() == pytest.approx(began, abs=0.01)
        assert group.mine == set(queues(0, 1))

    run(scenario())


def test_a_queue_that_is_not_ours_any_more_after_the_wait_does_not_begin():
    async def scenario():
        group = Group()
        group.ids = ["me", "you"]
        round_ = asyncio.create_task(group.rebalance().round())
        await asyncio.sleep(HANDOVER_S / 2)
        group.ids = ["me", "you", "zoe", "zora"]
        assert await round_
        assert group.mine == set(queues(0))
        assert ("begin", 1) not in group.happened

    run(scenario())


def test_a_broadcasting_member_takes_all_and_asks_nobody():
    async def scenario():
        group = Group(broadcasting=True)
        group.ids = AssertionError("asked")
        assert await group.rebalance().round()
        assert group.mine == set(queues(0, 1, 2, 3))

    run(scenario())


def test_what_could_not_begin_is_tried_again():
    async def scenario():
        group = Group()
        group.refuses = set(queues(2))
        rebalance = group.rebalance()
        assert not await rebalance.round()
        assert group.mine == set(queues(0, 1, 3))
        group.refuses.clear()
        assert await rebalance.round()
        assert group.mine == set(queues(0, 1, 2, 3))

    run(scenario())


TROUBLE = [
    BrokerError(1, "boom", "a:1"),
    BrokerError(2, "busy", "a:1"),
    RequestTimeout("GET_CONSUMER_LIST_BY_GROUP", "a:1", 3),
    ConnectError("a:1", "refused"),
]


@pytest.mark.parametrize("error", TROUBLE, ids=str)
def test_what_is_held_is_kept_while_the_members_are_not_known(error):
    async def scenario():
        group = Group()
        group.mine = set(queues(0, 1))
        group.ids = error
        assert not await group.rebalance().round()
        assert group.mine == set(queues(0, 1))
        assert group.happened == []
        assert str(error) in group.told[0][1]

    run(scenario())


@pytest.mark.parametrize("error", TROUBLE, ids=str)
def test_another_broker_of_the_topic_is_asked_when_one_fails(error):
    async def scenario():
        group = Group()
        group.routes["orders"] = route(2, brokers=("a", "b"))
        group.ids = {"a": error, "b": ["me"]}
        assert await group.rebalance().round()
        assert group.asked == ["a", "b"]
        assert len(group.mine) == 4
        assert group.told == []

    run(scenario())


@pytest.mark.parametrize("error", [RouteNotFound("orders", "ns:1"), ConnectError("ns:1", "refused")], ids=str)
def test_trouble_with_one_topic_leaves_it_alone_and_does_not_stop_the_others(error):
    async def scenario():
        group = Group()
        group.routes = {"orders": error, "payments": route(2, "payments")}
        group.mine = set(queues(0, 1))
        rebalance = group.rebalance()
        assert not await rebalance.round()
        assert not await rebalance.round()
        assert group.mine == set(queues(0, 1) + queues(0, 1, topic="payments"))
        assert len([text for kind, text in group.told if "orders" in text]) == (1 if "refused" not in str(error) else 2)

    run(scenario())


def test_a_member_the_broker_does_not_list_sends_a_heartbeat_and_asks_again():
    async def scenario():
        group = Group()
        group.ids, group.ids_after_heartbeat = ["you"], ["me", "you"]
        assert await group.rebalance().round()
        assert group.happened[0] == "heartbeat"
        assert group.mine == set(queues(0, 1))

    run(scenario())


def test_a_member_that_is_still_not_listed_holds_nothing_and_looks_again_soon():
    """Its queues are being taken by those who are listed; the next round must not wait for the timer."""

    async def scenario():
        group = Group()
        group.mine = set(queues(0, 1))
        group.ids = ["you"]
        rebalance = group.rebalance()
        assert not await rebalance.round()
        assert group.mine == set()

    run(scenario())


# --- strategies of the user's


def refusing(*arguments):
    raise ZeroDivisionError("in the strategy")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (refusing, "in the strategy"),
        (lambda *arguments: queues(99), "not a queue of the topic"),
        (lambda *arguments: ["broker-a:0"], "not a queue of the topic"),
        (lambda *arguments: [{"queue": 0}], "strategy"),
        (lambda *arguments: None, "strategy"),
        (lambda: None, "strategy"),
    ],
)
def test_a_strategy_that_fails_keeps_the_assignment_and_is_told_and_tried_again(strategy, words):
    async def scenario():
        group = Group(strategy)
        group.mine = set(queues(0, 1))
        rebalance = group.rebalance()
        assert not await rebalance.round()
        assert group.mine == set(queues(0, 1))
        assert words in group.told[0][1]
        assert "rebalance of orders failed, assignment kept" in group.told[0][1]

    asyncio.run(scenario())


def test_a_strategy_runs_where_it_may_take_its_time():
    names = []

    def slow(group, client_id, queues, members):
        names.append(threading.current_thread())
        return queues

    async def scenario():
        group = Group(slow)
        assert await group.rebalance().round()
        assert len(group.mine) == 4

    asyncio.run(scenario())
    assert names
    assert threading.current_thread() not in names


def test_an_unknown_strategy_is_refused_at_once():
    async def scenario():
        with pytest.raises(ConfigError, match="machine-room"):
            Group("machine-room").rebalance()

    run(scenario())


# --- when rounds are held


def test_rounds_come_by_the_timer_soon_after_a_request_and_quickly_while_unsettled():
    async def scenario():
        group = Group()
        rebalance, loop, rounds = group.rebalance(), asyncio.get_running_loop(), []

        async def ids(name):
            rounds.append(loop.time())
            return ["me"]

        group._ids = ids
        task = asyncio.create_task(rebalance.run())
        await asyncio.sleep(INTERVAL_S + 1)
        assert rounds == [INTERVAL_S]
        for _ in range(10):
            rebalance.soon()
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * SPACING_S)
        assert len(rounds) == 3, "the first at once, the other requests together after a pause"
        group.refuses = set(queues(0))
        group.mine.clear()
        del rounds[:]
        rebalance.soon()
        await asyncio.sleep(10)
        assert len(rounds) >= 10 / (AGAIN_S + SPACING_S) - 1
        group.refuses.clear()
        await asyncio.sleep(AGAIN_S + SPACING_S + 0.1)
        del rounds[:]
        await asyncio.sleep(INTERVAL_S - 2)
        assert rounds == []
        task.cancel()

    run(scenario())


def test_a_queue_that_was_not_there_at_first_is_new():
    async def scenario():
        group = Group()
        rebalance = group.rebalance()
        assert not rebalance.is_new(queues(0)[0]), "nothing is known of its topic"
        await rebalance.round()
        group.routes["orders"] = route(6)
        await rebalance.round()
        assert [rebalance.is_new(queue) for queue in queues(0, 3, 4, 5)] == [False, False, True, True]

    run(scenario())
