"""Which queues should be ours, asked again whenever the group or a route changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyrocket_consumer.consumer.allocation import allocate, strategy_of
from pyrocket_consumer.errors import RocketError, RouteNotFound
from pyrocket_consumer.model import MASTER_ID, EventKind, MessageQueue, TopicRoute

if TYPE_CHECKING:
    from pyrocket_consumer.consumer.member import GroupMember

log = logging.getLogger("pyrocket_consumer.consumer")

SPACING_S = 0.5
"""Least time between two rounds; notifications come in bursts."""

AGAIN_S = 1.0
"""When the last round left something undone."""

HANDOVER_S = 1.0
"""How long a queue's new owner leaves its old one to store the last offset; both hear of the change at once."""

_SOON_S = 0.001  # timers are not more exact


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round changes."""

    drop: tuple[MessageQueue, ...]
    add: tuple[MessageQueue, ...]

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)


def plan(held: Iterable[MessageQueue], wanted: Iterable[MessageQueue]) -> Plan:
    """Return what turns the queues held into the queues wanted."""
    have, want = set(held), set(wanted)
    return Plan(tuple(sorted(have - want)), tuple(sorted(want - have)))


class Rebalance:
    """Rounds of rebalance: every 20 s, soon after the group or a route changes, and until everything is in place."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._strategy = strategy_of(member.config.allocation)
        self._wanted = asyncio.Event()
        self._known: dict[str, frozenset[MessageQueue]] = {}
        self._no_route: set[str] = set()
        self._have_company = False  # the group has other members
        self._due: dict[MessageQueue, float] = {}  # when each of the queues that are to begin may do so

    def soon(self) -> None:
        """Ask for a round."""
        self._wanted.set()

    def is_new(self, queue: MessageQueue) -> bool:
        """Tell whether `queue` was added to its topic after this consumer first saw the topic."""
        known = self._known.get(queue.topic)
        return known is not None and queue not in known

    async def run(self) -> None:
        """Hold rounds until cancelled."""
        interval_s = self._member.config.rebalance_interval_s
        settled = True
        while True:
            try:
                async with asyncio.timeout(interval_s if settled else min(AGAIN_S, interval_s)):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            settled = await self.round()
            await asyncio.sleep(SPACING_S)

    async def round(self) -> bool:
        """Compare what we hold with what is ours, and change it. Returns whether nothing was left undone.

        While queues wait for their old owners, it goes on looking: what is another's by now is given up while that one
        waits for us.
        """
        known = set[MessageQueue]()
        while True:
            began = self._member.loop.time()
            settled, pause_s = await self._step(known)
            if not pause_s:
                return settled
            if await self._asked_within(pause_s):
                await asyncio.sleep(began + SPACING_S - self._member.loop.time())

    async def _asked_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            return False
        self._wanted.clear()
        return True

    async def _step(self, known: set[MessageQueue]) -> tuple[bool, float]:
        """Give up what is not ours, and begin what is and has waited.

        Returns whether nothing was left undone, and how long what is left has to wait, 0 if nothing is.
        `known`: the new queues that brokers have heard of.
        """
        member = self._member
        settled, plans = await self._plans()
        changes = {topic: change for topic, change in plans.items() if change}
        await asyncio.gather(
            *(member.assignments.end(queue, "revoked") for each in changes.values() for queue in each.drop)
        )
        news = {topic: change for topic, change in changes.items() if change.drop or not known.issuperset(change.add)}
        if news:
            member.queues_changed(news)
            # the heartbeat carries the new subscription version and has to be there before the first such pull
            await member.cluster.heartbeat()
        now = member.loop.time()
        at_last = now + (HANDOVER_S if self._have_company else 0.0)
        self._due = {queue: self._due.get(queue, at_last) for each in changes.values() for queue in each.add}
        known.update(self._due)
        ready = [queue for queue, due in self._due.items() if due <= now + _SOON_S]
        pauses = [due - now for due in self._due.values() if due > now + _SOON_S]
        begun = await asyncio.gather(*map(member.assignments.begin, ready))
        for queue, has_begun in zip(ready, begun, strict=True):
            if has_begun:
                del self._due[queue]  # it waits again, should it end and come back
        return settled and all(begun), min(pauses, default=0.0)

    async def _plans(self) -> tuple[bool, dict[str, Plan]]:
        """Return what is to be changed for each topic, and whether that is sure."""
        member = self._member
        settled = True
        plans: dict[str, Plan] = {}
        topics = member.topics()
        for topic in topics:
            try:
                wanted, is_sure = await self._allocation(topic)
            except RocketError as error:
                settled = False
                self._tell(topic, error)
                continue
            self._no_route.discard(topic)
            settled = settled and is_sure
            if wanted is not None:
                plans[topic] = plan(member.assignments.held(topic), wanted)
        for topic in member.assignments.topics() - set(topics):  # unsubscribed
            plans[topic] = plan(member.assignments.held(topic), ())
        return settled, plans

    def _tell(self, topic: str, error: RocketError) -> None:
        if isinstance(error, RouteNotFound):
            if topic not in self._no_route and not topic.startswith("%RETRY%"):
                self._member.event(
                    EventKind.BROKER_UNREACHABLE,
                    f"topic {topic} has no route yet; still looking",
                    level=logging.WARNING,
                )
            self._no_route.add(topic)
        else:
            self._member.trouble(EventKind.BROKER_UNREACHABLE, f"rebalance of {topic} failed, assignment kept: {error}")

    async def _allocation(self, topic: str) -> tuple[list[MessageQueue] | None, bool]:
        """Return our queues of `topic`, and whether to leave it at that until something changes.

        None when it cannot be told and everything stays as it is.
        """
        member = self._member
        route = await member.cluster.route(topic)
        queues = route.consume_queues()
        self._known.setdefault(topic, frozenset(queues))
        if member.config.broadcasting:
            return queues, True
        ids = await self._members(route)
        if ids is None:
            return None, True
        if member.client_id not in ids:
            # our heartbeat is not there (yet): the broker lets nobody pull for us, and others share our queues
            await member.cluster.heartbeat()
            ids = await self._members(route)
            if ids is None:
                return None, True
        self._have_company = len(ids) > 1
        arguments = (self._strategy, member.group, member.client_id, queues, ids)
        if callable(member.config.allocation):  # code of the user's
            return await asyncio.to_thread(allocate, *arguments), member.client_id in ids
        return allocate(*arguments), member.client_id in ids

    async def _members(self, route: TopicRoute) -> list[str] | None:
        """Return the group's members as one broker of the topic sees them; None if no broker can be asked."""
        member = self._member
        names = [broker.broker_name for broker in route.brokers if MASTER_ID in broker.addresses]
        names = names or [broker.broker_name for broker in route.brokers]
        member.rng.shuffle(names)
        error: RocketError | None = None
        for name in names:
            try:
                return await member.cluster.broker(name).consumer_ids(member.group)
            except RocketError as failure:
                error = failure
        if error is not None:
            raise error
        return None
