"""One member of a consumer group: wires its parts, starts them, ends them. Confined to the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.assignment.assignments import Assignments, QueueProgress
from pyrocket_consumer.consumer.assignment.locks import QueueLocks
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.commits.database import DatabaseCommits
from pyrocket_consumer.consumer.context.events import shown_id
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts, Statistics
from pyrocket_consumer.consumer.dispatch.by_key import KeyedService
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService, Outcome, Workers
from pyrocket_consumer.consumer.dispatch.delivery import Delivery
from pyrocket_consumer.consumer.dispatch.orderly import OrderlyService
from pyrocket_consumer.consumer.dispatch.reports import Outcomes
from pyrocket_consumer.consumer.dispatch.retry import GIVE_UP_AGAIN_S, Retries
from pyrocket_consumer.consumer.dispatch.stuck import StuckCalls
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.membership.broker_requests import BrokerRequests
from pyrocket_consumer.consumer.membership.foreign_members import ForeignMembers
from pyrocket_consumer.consumer.membership.rebalance import Rebalance
from pyrocket_consumer.consumer.pulling.expressions import Expressions
from pyrocket_consumer.consumer.pulling.pull_host import Pulling
from pyrocket_consumer.consumer.resets.corrections import Corrections
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.consumer.runtime.commit_timer import CommitTimer
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import DatabaseError, PermissionDenied, RocketError, RouteNotFound
from pyrocket_consumer.model import (
    MASTER_ID,
    RETRY_PREFIX,
    ConsumerEvent,
    EventKind,
    MessageQueue,
    Subscription,
    TopicRoute,
)
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import logger

log = logger("consumer")

MAX_NAMES_SHOWN = 20
"""How many names one sentence has at most."""

LAST_REQUESTS_S = 3.0
"""How long the end of a member waits for brokers, after its listener calls."""


class ConsumerState(Enum):
    """A consumer's life."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"
    FAILED = "failed"


class GroupMember:
    """Subscribes, rebalances, pulls, consumes and commits for one group."""

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        commits: Commits,
        workers_for: Callable[[bool, Outcome], Workers],
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
        lock_clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.commits = commits
        self.state = ConsumerState.CREATED
        self.failure: BaseException | None = None
        self.on_stored: Callable[[], None] = lambda: None
        """Called when what was consumed before the end began is stored, as far as it can be."""
        self.on_ended: Callable[[], None] = lambda: None
        """Called when the member has failed, and when it is closed."""
        self.group = group = MemberContext(config, cluster, rng, wall_clock, lock_clock)
        group.on_unexpected_error = self._on_unexpected_error
        counts = Counts()
        self.locks = QueueLocks(group) if self._needs_locks(config) else None
        self.service = self._service(lambda is_async: workers_for(is_async, self._outcomes), counts)
        delivery = Delivery(group.subscriptions, self.service)
        self.retries = Retries(group, delivery, counts)
        delivery.on_unwanted = self.retries.add_unwanted
        self._outcomes = Outcomes(group, self.retries, counts)
        self._pulling = Pulling(group, delivery)
        self.assignments = Assignments(group, commits, self._pulling, self.service, self.locks, counts)
        self.resets = Resets(group, self.assignments, commits)
        if isinstance(commits, DatabaseCommits):
            commits.on_waiting = lambda queue, why: group.trouble(EventKind.STORE_UNREACHABLE, why, queue)
            commits.on_apart = lambda queue, why: group.event(EventKind.OFFSET_APART, why, queue, level=logging.WARNING)
            commits.on_left_out = self._report_duplicates
        corrections = Corrections(group, self.assignments, self.resets)
        self._pulling.on_moved = corrections.moved
        self._pulling.on_late_reset = corrections.met_late
        commits.on_reset_waiting = corrections.reset_waits
        self._expressions = Expressions(group)
        self._rebalance = Rebalance(group, self.assignments, self.resets, self._expressions)
        self._statistics = Statistics(group.loop.time, self.assignments.totals, self.assignments.listener_time_s)
        self._requests = BrokerRequests(group, self.assignments, commits, self.resets, self._statistics, self.service)
        self._foreign_members: ForeignMembers | None = None
        if isinstance(config.offset_store, DatabaseOffsets) and not config.offset_store.allow_foreign_members:
            self._foreign_members = ForeignMembers(group, config.offset_store)
        self._masters: dict[str, str] = {}  # by broker name
        self._ending: asyncio.Task[None] | None = None
        self._call_deadline = float("inf")

    async def _give_up_unless_consumed(self, window: ProcessQueue, message: Message) -> float:
        """Give up a message of an orderly queue, as `Retries` does; one that has its effect is consumed."""
        if window.claim is not None and isinstance(self.commits, DatabaseCommits):
            try:
                if await self.commits.is_consumed(window.claim, message.queue_offset):
                    return 0.0
            except DatabaseError as error:
                self.group.trouble(EventKind.STORE_UNREACHABLE, str(error), window.queue)
                return GIVE_UP_AGAIN_S
        return await self.retries.give_up(window, message)

    def _report_duplicates(self, queue: MessageQueue, messages: Sequence[Message]) -> None:
        text = f"{len(messages)} messages have had their effect: their producer has stored them twice"
        facts = {"offset": messages[0].queue_offset, "message_id": shown_id(messages[0])}
        self.group.event(EventKind.MESSAGE_LEFT_OUT, text, queue, facts)

    @staticmethod
    def _needs_locks(config: ConsumerConfig) -> bool:
        """Tell whether brokers keep others from a queue of ours; a claim does so by itself, but for foreign members."""
        if not config.orderly or config.broadcasting:
            return False
        store = config.offset_store
        return not isinstance(store, DatabaseOffsets) or store.allow_foreign_members

    def _service(
        self, workers_for: Callable[[bool], Workers], counts: Counts
    ) -> ConsumeService | OrderlyService | KeyedService:
        config, loop = self.config, self.group.loop
        if not config.orderly:
            return ConsumeService(loop, workers_for)
        if config.order_by is not None:
            return KeyedService(
                loop,
                workers_for,
                order_by=config.order_by,
                max_attempts=config.most_attempts,
                begin=self.group.tasks.begin,
                give_up=lambda window, message: self.retries.give_up(window, message),
                failed=lambda window, count: counts.failed(window.queue.topic, count),
                held_up=lambda window, why: self._outcomes.held_up(window, why),
                no_key=lambda window, message, error: self._outcomes.no_key(window, message, error),
                worker_failed=lambda error: self._outcomes.worker_failed(error),
            )
        return OrderlyService(
            loop,
            workers_for,
            auto_commit=config.auto_commit,
            max_attempts=config.most_attempts,
            begin=self.group.tasks.begin,
            give_up=self._give_up_unless_consumed,
            failed=lambda window, count: counts.failed(window.queue.topic, count),
            held_up=lambda window, why: self._outcomes.held_up(window, why),
        )

    # --- subscriptions

    async def subscribe(self, subscription: Subscription, listener: Listener) -> None:
        """Add a topic; while running, wait a moment until its queues have begun, as a start does."""
        await self.group.tasks.finish(self._subscribe(subscription, listener), f"subscribing to {subscription.topic}")

    async def _subscribe(self, subscription: Subscription, listener: Listener) -> None:
        group = self.group
        topic, foreign_members = subscription.topic, self._foreign_members
        if (
            foreign_members is not None
            and self.state is ConsumerState.RUNNING
            and group.subscriptions.get(topic) is None
        ):
            await self._fetch_route(topic)
            await foreign_members.refuse(topic)
        subscription = group.subscriptions.newer(subscription)
        if self.state is ConsumerState.RUNNING:
            await self._expressions.check(subscription)
        group.subscriptions.add(subscription, listener)
        if self.state is ConsumerState.RUNNING:
            await self._fetch_route(subscription.topic)
            await group.cluster.heartbeat()
            await self._wait_until_begun()

    async def unsubscribe(self, topic: str, *, wait: bool) -> None:
        """Remove a topic; its queues end as at any rebalance, their offsets stored. `wait` until they have."""
        step = self.group.tasks.begin(self._unsubscribe(topic), f"unsubscribing {topic}")
        if wait:
            await asyncio.shield(step)

    async def _unsubscribe(self, topic: str) -> None:
        self.group.subscriptions.remove(topic)
        if self.state is ConsumerState.RUNNING:
            ending = (self.assignments.end(queue, "unsubscribed") for queue in self.assignments.held(topic))
            await asyncio.gather(*ending)
            await self.group.cluster.heartbeat()
            if self.group.subscriptions.get(topic) is None:  # nobody subscribed again meanwhile
                self._rebalance.forget(topic)
                self.group.cluster.forget_topic(topic)

    # --- life

    async def start(self) -> None:
        """Become known to the brokers, and wait a moment until the queues that are ours have begun.

        What has not begun after `start_wait_s` is told, and goes on beside.

        Raises:
            BrokerError: a broker refuses what was subscribed to, or who we are. Nothing is left running then.
        """
        group, cluster = self.group, self.group.cluster
        cluster.add_consumer(group.name, group.heartbeat_data)
        self._requests.begin()
        cluster.on_route_changed(self._on_route_changed)
        cluster.on_address_refused(self._on_address_refused)
        cluster.on_broker_lost(lambda address, reason: self._for_brokers_at(address, self.commits.broker_lost))
        cluster.on_broker_reconnected(self._on_broker_reconnected)
        cluster.on_failure(lambda error: group.surprised("a background task of the cluster ended", error))
        await asyncio.gather(*map(self._fetch_route, group.subscriptions.topics()))
        await asyncio.gather(*map(self._expressions.check, group.subscriptions.all()))
        tasks = group.tasks
        if self._foreign_members is not None:
            await self._foreign_members.refuse()
            tasks.keep_running(self._foreign_members.watch(), "the watch over foreign members")
        self.state = ConsumerState.RUNNING
        tasks.keep_running(self._rebalance.run(), "the rebalance loop")
        tasks.keep_running(CommitTimer(group, self.assignments, self.commits, self.resets).run(), "the commit timer")
        if self.locks is not None:
            keeping = self.locks.keep(self.assignments.windows, self.service.go_on, self.assignments.lose)
            tasks.keep_running(keeping, "keeping locks")
        if self.config.broadcasting and self.config.remote_reset == "accept":
            tasks.keep_running(self.resets.read_regularly(), "reading recorded resets")
        tasks.keep_running(StuckCalls(group, self.service, self.retries).watch(), "the watch over listeners")
        tasks.keep_running(self._statistics.keep(), "statistics")
        log.info(
            "group=%s started client_id=%s model=%s topics=%s",
            group.name,
            group.client_id,
            self.config.message_model,
            ",".join(group.subscriptions.topics()),
        )
        await self._wait_until_begun()

    async def _wait_until_begun(self) -> None:
        """Wait a moment until all queues that are ours have begun, and tell which have not."""
        group, wait_s = self.group, self.config.start_wait_s
        if waiting := await self._rebalance.in_place(wait_s):
            names = ", ".join(waiting[:MAX_NAMES_SHOWN]) + (
                f" and {len(waiting) - MAX_NAMES_SHOWN} more" if len(waiting) > MAX_NAMES_SHOWN else ""
            )
            text = f"not begun after {wait_s:g} s, and tried again until they are: {names}"
            group.event(EventKind.BROKER_UNREACHABLE, text, facts={"waiting": len(waiting)}, level=logging.WARNING)

    async def _fetch_route(self, topic: str) -> None:
        group = self.group
        try:
            await group.cluster.route(topic)
        except PermissionDenied:
            raise
        except RouteNotFound as error:
            self._rebalance.is_missing(topic)
            if not topic.startswith(RETRY_PREFIX):
                group.event(EventKind.BROKER_UNREACHABLE, f"{error}; still looking", level=logging.WARNING)
        except RocketError as error:
            group.trouble(EventKind.BROKER_UNREACHABLE, f"the route of {topic} is not known yet: {error}")

    async def close(self, timeout_s: float) -> None:
        """End in the order that loses nothing. Whoever calls again waits for the same end, and may shorten it.

        Whoever waits may be cancelled; the end goes on. It comes within `timeout_s` and a few seconds, whatever
        brokers and listeners do.
        """
        self._call_deadline = min(self._call_deadline, self.group.loop.time() + timeout_s)
        if self._ending is None:
            self._ending = self.group.loop.create_task(self._close(), name="pyrocket closing")
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        """Stop pulling, store, finish what runs, store, leave, close. What fails on the way keeps none of it undone."""
        group, loop, commits = self.group, self.group.loop, self.commits
        group.closing = True
        self.assignments.stop_pulling()
        self.service.stop()
        # Listener calls may take long, and whoever waits for them may lose patience: what is consumed is stored now.
        # The loops go on meanwhile: offsets are stored, locks kept, and queues handed over to members that come.
        group.tasks.begin(self._store_early(), "storing offsets")
        while (self.service.running() or self.retries.under_way) and loop.time() < self._call_deadline:  # noqa: ASYNC110 - workers keep no count: it would cost each call
            await asyncio.sleep(0.005)
        if running := self.service.running():
            group.event(
                EventKind.MESSAGE_STUCK,
                f"{running} listener calls still run; their messages stay unfinished, and come again",
                level=logging.WARNING,
            )
        await group.tasks.stop_loops()
        self.retries.cancel()
        # The lock of a queue whose call runs on is left to expire: its next owner shall not begin beside that call.
        free = [queue for queue, window in self.assignments.windows().items() if not self.service.running(window)]
        queues = self.assignments.fence_all()
        self.service.abandon()
        last_request_at = loop.time() + LAST_REQUESTS_S
        unstored = await self._store_last(queues, last_request_at)
        free = [queue for queue in free if queue not in unstored]  # a broker may yet execute their commits
        leaving = group.tasks.begin(self._leave(free), "leaving the group")
        await asyncio.wait([leaving], timeout=max(last_request_at - loop.time(), LAST_REQUESTS_S / 3))
        await group.tasks.settle(last_request_at)
        failure: Exception | None = None
        try:
            await commits.close(until=max(last_request_at, loop.time() + LAST_REQUESTS_S / 3))
        except Exception as error:  # of a store of the user's
            failure = error
        if self.state is not ConsumerState.FAILED:
            self.state = ConsumerState.CLOSED
        log.info("group=%s closed client_id=%s", group.name, group.client_id)
        group.events.close()
        self.on_ended()
        if failure is not None and self.failure is None:
            raise failure

    async def _store_early(self) -> None:
        """Store what is consumed so far; what cannot be stored now is stored, or told, with the rest."""
        try:
            await self.commits.persist(self.assignments.all(), until=self.group.loop.time() + LAST_REQUESTS_S)
        except Exception as error:  # of a store of the user's
            log.info("group=%s offsets not stored before listener calls end: %s", self.group.name, error)
        self.on_stored()

    async def _store_last(self, queues: list[MessageQueue], until: float) -> Collection[MessageQueue]:
        """Store the last offsets of `queues`; tell and return which could not be."""
        unstored: Mapping[MessageQueue, Exception]
        try:
            unstored = await self.commits.persist(queues, until=until)
        except Exception as error:  # of a store of the user's
            unstored = dict.fromkeys(queues, error)
        if unstored:
            queue, reason = next(iter(unstored.items()))
            log.warning(
                "group=%s final offsets of %d queues not stored, messages may come again; of %s: %s",
                self.group.name,
                len(unstored),
                queue,
                reason,
            )
        for queue, reason in unstored.items():
            text = f"final offset not stored, messages may come again: {reason}"
            self.group.events.tell(ConsumerEvent(EventKind.COMMIT_FAILED, text, queue))
        return unstored

    async def _leave(self, queues: list[MessageQueue]) -> None:
        """Unlock `queues` and have the brokers forget us, so that others need not wait until they find out."""
        group = self.group
        if self.locks is not None:
            await self.locks.release(queues)
        try:
            await group.cluster.unregister(consumer_group=group.name)
        except RocketError as error:
            log.info("group=%s not unregistered everywhere: %s", group.name, error)

    def _on_unexpected_error(self, what: str, error: BaseException) -> None:
        """Something of ours failed that must not: the member has failed, says so, and leaves its queues to others."""
        group = self.group
        log.error("group=%s failed: %s: %r", group.name, what, error, exc_info=error)
        if self.state in (ConsumerState.FAILED, ConsumerState.CLOSED) or group.closing:
            return
        self.state = ConsumerState.FAILED
        self.failure = error
        group.event(EventKind.CONSUMER_FAILED, f"{what}: {error!r}", level=logging.ERROR)
        self._call_deadline = min(self._call_deadline, group.loop.time() + self.config.shutdown_timeout_s)
        if self._ending is None:
            self._ending = group.loop.create_task(self._close(), name="pyrocket closing")
            self._ending.add_done_callback(lambda ending: ending.cancelled() or ending.exception())
        self.on_ended()

    # --- what the cluster tells

    def _on_address_refused(self, address: str, why: str) -> None:
        facts = {"address": address}
        self.group.event(EventKind.ADDRESS_REFUSED, why, facts=facts, level=logging.WARNING)

    def _on_route_changed(self, topic: str, route: TopicRoute) -> None:
        for broker in route.brokers:
            address = broker.addresses.get(MASTER_ID)
            if address is not None and self._masters.get(broker.broker_name) != address:
                self._masters[broker.broker_name] = address
                self._on_broker_gap(broker.broker_name)  # one that was a slave lacks the commits of the last seconds
        if self.group.subscriptions.get(topic) is not None:
            self.group.rebalance_wanted.set()

    def _on_broker_reconnected(self, address: str) -> None:
        self._for_brokers_at(address, self._on_broker_gap)
        self.resets.look_again()
        self.group.rebalance_wanted.set()

    def _on_broker_gap(self, broker_name: str) -> None:
        """A broker may have lost something: commits, or what came last."""
        self.commits.doubt(broker_name)
        self.assignments.doubt(broker_name)

    def _for_brokers_at(self, address: str, action: Callable[[str], None]) -> None:
        for broker_name, addresses in self.group.cluster.broker_addresses().items():
            if address in addresses.values():
                action(broker_name)

    # --- what users ask

    def pause(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull no more from `queues`, or from all, and take nothing that is still on its way."""
        self._pulling.pause(queues)
        self.assignments.pause_pulls()

    def resume(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull again from `queues`, or from all."""
        self._pulling.resume(queues)
        self.assignments.pull_all()

    async def reset(self, topic: str, targets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Move the queues of `topic` we hold to their targets; returns those moved, when they are durable."""
        return await self.resets.move_held(topic, targets, "asked for by this program")

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return where each queue we hold stands."""
        return self.assignments.progress()

    def emit(self, event: ConsumerEvent) -> None:
        """Count an event of the offset store, and pass it to the user."""
        self.group.events.tell(event)
