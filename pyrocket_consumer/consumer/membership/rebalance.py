"""The rebalance: it decides again which queues this member holds whenever the group or a route changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue
from pyrocket_consumer.consumer.assignment.registration import ExpressionChecker
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.membership.allocation import allocate, strategy_of
from pyrocket_consumer.consumer.resets.records import ResetRecords
from pyrocket_consumer.errors import ConfigError, RocketError, RouteNotFound
from pyrocket_consumer.model import MASTER_ID, RETRY_PREFIX, EventKind, MessageQueue, TopicRoute
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.io_thread import SerialExecutor

log = logger("consumer")

MIN_ROUND_INTERVAL_S = 0.5
"""The minimum time between two rounds, because notifications arrive in bursts."""

RETRY_ROUND_S = 1.0
"""The time until the next round if the last one could not do everything."""

HANDOVER_S = 1.0
"""How long a new owner waits while the old owner stores its last offset. Both learn of the change at the same time."""

HEARTBEAT_WAIT_S = 1.0
"""How long a round waits for the responses to a heartbeat. A broker without the heartbeat refuses pulls."""

BEGIN_LIMIT = 200
"""How many queues of one broker begin at a time. Thousands of requests at once would wait too long for responses."""

STRATEGY_TIMEOUT_S = 3.0
"""How long an allocation strategy of the user may take."""

_SOON_S = 0.001  # timers are not more exact


class Rebalance:
    """Rebalance rounds: every 20 s, soon after the group or a route changes, and until all queues have begun.

    A round only decides. Other tasks make the changes, so that a silent broker delays only its own queues. Confined to
    the I/O thread.
    """

    def __init__(
        self, context: MemberContext, assignments: Assignments, records: ResetRecords, expressions: ExpressionChecker
    ) -> None:
        self._context = context
        self._assignments = assignments
        self._records = records
        self._expression_checker = expressions
        self._strategy = strategy_of(context.config.allocation)
        self._known: dict[str, frozenset[MessageQueue]] = {}
        self._no_route: set[str] = set()
        self._has_others = False  # the group has other members
        self._announced: dict[str, frozenset[MessageQueue]] = {}  # the queues as of the last subscription version
        self._strategy_thread = SerialExecutor("pyrocket-allocation")
        self._strategy_lock = asyncio.Lock()
        self._hanging_call: asyncio.Future[list[MessageQueue]] | None = None
        self._begin_slots: dict[str, asyncio.Semaphore] = {}  # by broker name
        self._undecided: set[str] = set()  # topics whose allocation is unknown
        self._rounds_begun = 0
        self._rounds_ended = 0
        self._changed = asyncio.Event()  # a round has ended, or a queue has begun or failed to
        self._waiting: list[HeldQueue] = []  # queues that had not begun when all were read

    def is_new(self, queue: MessageQueue) -> bool:
        """Return whether `queue` was added to its topic after this consumer first knew the topic's route."""
        known = self._known.get(queue.topic)
        return known is not None and queue not in known

    async def run(self) -> None:
        """Hold rounds until cancelled."""
        wanted = self._context.rebalance_wanted
        try:
            while True:
                began = self._context.loop.time()
                wanted.clear()
                self._rounds_begun += 1
                pause_s = await self.round()
                self._rounds_ended = self._rounds_begun
                self._changed.set()
                try:
                    async with asyncio.timeout(pause_s):
                        await wanted.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(began + MIN_ROUND_INTERVAL_S - self._context.loop.time())
        finally:
            self._strategy_thread.shutdown()

    async def wait_until_begun(self, timeout_s: float) -> list[str]:
        """Wait until a round has ended and all queues have begun. Return the queues, or topics, that have not."""
        first = self._rounds_begun + 1  # a round that begins from now on
        self._context.rebalance_wanted.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self._rounds_ended < first or self._undecided or not self._have_all_begun():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        waiting = sorted(each.queue for each in self._assignments.known() if _waits_to_begin(each))
        return [*sorted(self._undecided), *map(str, waiting)]

    def _have_all_begun(self) -> bool:
        """Return whether no queue waits to begin. It reads all queues rarely, because many may begin one by one."""
        waiting = self._waiting
        while waiting and not _waits_to_begin(waiting[-1]):
            waiting.pop()
        if not waiting:
            waiting.extend(filter(_waits_to_begin, self._assignments.known()))
        return not waiting

    def forget(self, topic: str) -> None:
        """Forget `topic`, which is no longer subscribed to. If it is subscribed to again, it counts as new."""
        self._known.pop(topic, None)
        self._announced.pop(topic, None)
        self._no_route.discard(topic)

    def mark_missing(self, topic: str) -> None:
        """Note that no name server knows `topic`, so all its queues will be new and begin at their first messages."""
        self._known.setdefault(topic, frozenset())

    async def round(self) -> float:
        """Compare the held queues with the allocated ones, and start the changes. Return the time to the next round."""
        context = self._context
        settled, wanted = await self._wanted()
        due_at = context.loop.time() + (HANDOVER_S if self._has_others else 0.0)
        by_topic: dict[str, list[HeldQueue]] = {topic: [] for topic in wanted}
        for each in self._assignments.known():
            if each.queue.topic in by_topic:
                by_topic[each.queue.topic].append(each)
        for topic, known in by_topic.items():
            has = {each.queue for each in known if each.is_staying or each.beginning is not None}
            for queue in sorted(has - wanted[topic]):
                self._revoke(self._assignments.queue(queue))
            added = wanted[topic] - has
            for each in known:
                if each.queue not in added:
                    each.due_at = None
            for each in map(self._assignments.queue, sorted(added)):
                if each.due_at is None:
                    each.due_at = due_at
        changed_topics = [topic for topic, own in wanted.items() if self._announced.get(topic, frozenset()) != own]
        if changed_topics:
            self._announced.update((topic, wanted[topic]) for topic in changed_topics)
            context.subscriptions.renew(changed_topics)
            # the heartbeat has the new subscription version, and must arrive before the first pull with it
            await self._heartbeat()
        now = context.loop.time()
        for each in self._assignments.known():
            if each.due_at is not None and each.due_at <= now + _SOON_S:
                each.due_at = None
                self._begin(each)
        all_known, pause_s = self._assignments.known(), context.config.rebalance_interval_s
        if not settled or any(each.beginning for each in all_known):
            pause_s = min(pause_s, RETRY_ROUND_S)
        return min([pause_s, *(each.due_at - now for each in all_known if each.due_at is not None)])

    async def _heartbeat(self) -> None:
        heartbeat = self._context.tasks.begin(self._context.cluster.membership.heartbeat(), "a heartbeat")
        await asyncio.wait([heartbeat], timeout=HEARTBEAT_WAIT_S)

    def _revoke(self, held: HeldQueue) -> None:
        held.beginning = None  # a queue that is beginning stops by itself, unless it has just begun
        if held.is_held:
            self._context.start_in_background(partial(held.end, "revoked"), f"giving up {held.queue}")

    def _begin(self, held: HeldQueue) -> None:
        queue = held.queue
        slots = self._begin_slots.setdefault(queue.broker_name, asyncio.Semaphore(BEGIN_LIMIT))

        async def begin() -> bool:
            async with slots:
                return await begin_here()

        async def begin_here() -> bool:
            try:
                await self._expression_checker.check_queue(queue)
            except RocketError as error:
                self._context.emit_throttled(
                    EventKind.BROKER_UNREACHABLE, f"{queue} does not begin yet: {error}", queue
                )
                return False
            await self._records.read_before_begin(queue)  # follow resets made during an absence
            return await held.begin(is_new=self.is_new(queue), is_ours=lambda: held.beginning is task)

        def begun(done: asyncio.Task[bool]) -> None:
            if held.beginning is done:
                held.beginning = None
                if not done.cancelled() and done.exception() is None and not done.result():
                    held.due_at = self._context.loop.time() + RETRY_ROUND_S
            self._changed.set()

        task = held.beginning = self._context.tasks.begin(begin(), f"beginning {queue}")
        task.add_done_callback(begun)

    async def _wanted(self) -> tuple[bool, dict[str, frozenset[MessageQueue]]]:
        """Return whether every allocation is certain, and the queues allocated to this member, by topic."""
        topics = list(self._context.subscriptions)
        members = _Members(self._context)
        found = await asyncio.gather(*(self._allocation(topic, members) for topic in topics))
        if members.any_responded:
            self._has_others = members.has_others
        wanted = {topic: frozenset(own) for topic, (own, _) in zip(topics, found, strict=True) if own is not None}
        self._undecided = {
            topic for topic, (own, is_sure) in zip(topics, found, strict=True) if own is None and not is_sure
        } - self._no_route
        known = {each.queue.topic for each in self._assignments.known() if each.is_held or each.beginning is not None}
        gone = known - set(topics)
        return all(is_sure for _, is_sure in found), wanted | dict.fromkeys(gone, frozenset())

    async def _allocation(self, topic: str, members: _Members) -> tuple[list[MessageQueue] | None, bool]:
        """Return the queues of `topic` allocated to this member, and whether that is certain until something changes.

        The queues are None if they are unknown; then the member keeps those that it holds.
        """
        context = self._context
        try:
            route = await context.cluster.routes.get(topic)
            self._no_route.discard(topic)
            queues = route.consume_queues()
            self._known.setdefault(topic, frozenset(queues))
            if context.config.broadcasting:
                return queues, True
            ids = await members.fetch(route)
            if ids is None:
                return None, True
        except RocketError as error:
            self._report_error(topic, error)
            return None, False
        is_sure = context.client_id in ids
        arguments = (self._strategy, context.name, context.client_id, queues, ids)
        try:
            if callable(context.config.allocation):
                return await self._call_strategy(lambda: allocate(*arguments)), is_sure
            return allocate(*arguments), is_sure
        except RocketError as error:
            self._report_error(topic, error)
            return None, False

    async def _call_strategy(self, call: Callable[[], list[MessageQueue]]) -> list[MessageQueue]:
        """Call code of the user, which may take time. If it hangs, do not call it again until it returns."""
        async with self._strategy_lock:  # each topic's call may take the whole time
            if self._hanging_call is None or self._hanging_call.done():
                calling = self._context.loop.run_in_executor(self._strategy_thread, call)
                await asyncio.wait([calling], timeout=STRATEGY_TIMEOUT_S)
                if calling.done():
                    return calling.result()
                calling.add_done_callback(lambda done: done.exception())
                self._hanging_call = calling
        raise ConfigError(f"the allocation strategy has not returned within {STRATEGY_TIMEOUT_S:g} s")

    def _report_error(self, topic: str, error: RocketError) -> None:
        context = self._context
        if isinstance(error, RouteNotFound):
            if topic not in self._no_route and not topic.startswith(RETRY_PREFIX):
                text = f"topic {topic} has no route yet; trying again"
                context.emit(EventKind.BROKER_UNREACHABLE, text, level=logging.WARNING)
            self._no_route.add(topic)
            self.mark_missing(topic)
        else:
            context.emit_throttled(
                EventKind.BROKER_UNREACHABLE, f"rebalance of {topic} failed, assignment kept: {error}"
            )


def _waits_to_begin(held: HeldQueue) -> bool:
    return held.due_at is not None or held.beginning is not None


class _Members:
    """The members of the group as brokers report them; one request to each broker per round."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._fetches: dict[str, asyncio.Task[list[str]]] = {}
        self._heartbeat: asyncio.Task[int] | None = None
        self.any_responded = False
        self.has_others = False

    async def fetch(self, route: TopicRoute) -> list[str] | None:
        """Return the group's members as a broker of the topic reports them, or None if the topic has no broker.

        A broker that knows this member takes precedence. Otherwise a single broker that has missed the heartbeat would
        cost this member the queues of all others.
        """
        ids = await self._fetch_ids(route)
        if ids is not None and self._context.client_id not in ids:
            # the heartbeat has not arrived (yet), so the broker refuses pulls, and other members share the queues
            if self._heartbeat is None:
                self._heartbeat = self._context.tasks.begin(self._context.cluster.membership.heartbeat(), "a heartbeat")
                await asyncio.wait([self._heartbeat], timeout=HEARTBEAT_WAIT_S)
                self._fetches.clear()
            else:
                await asyncio.wait([self._heartbeat], timeout=HEARTBEAT_WAIT_S)
            ids = await self._fetch_ids(route)
        if ids is not None:
            self.any_responded = True
            self.has_others = self.has_others or len(ids) > 1
        return ids

    async def _fetch_ids(self, route: TopicRoute) -> list[str] | None:
        names = [broker.broker_name for broker in route.brokers if MASTER_ID in broker.addresses]
        names = names or [broker.broker_name for broker in route.brokers]
        self._context.rng.shuffle(names)
        error: RocketError | None = None
        ids_without_self: list[str] | None = None
        for name in sorted(names, key=self._has_failed):  # failed ones last, so that a round waits for one timeout only
            try:
                ids = list(await asyncio.shield(self._fetch_ids_from(name)))
            except RocketError as failure:
                error = failure
                continue
            if self._context.client_id in ids:
                return ids
            ids_without_self = ids_without_self or ids
        if ids_without_self is None and error is not None:
            raise error
        return ids_without_self

    def _fetch_ids_from(self, name: str) -> asyncio.Task[list[str]]:
        if name not in self._fetches:
            fetch = self._context.cluster.broker(name).consumer_ids(self._context.name)
            self._fetches[name] = self._context.tasks.begin(fetch, f"fetching the group's members from {name}")
        return self._fetches[name]

    def _has_failed(self, name: str) -> bool:
        task = self._fetches.get(name)
        return task is not None and task.done() and task.exception() is not None
