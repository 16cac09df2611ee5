"""One member of a consumer group: wires its parts, starts them, ends them. Confined to the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from enum import Enum

from pyrocket_consumer.cluster import Cluster, ClusterEvents
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.locks import QueueLocks
from pyrocket_consumer.consumer.assignment.registration import ExpressionChecker
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits, consume_exception
from pyrocket_consumer.consumer.context.member_context import MemberContext, MemberEvents
from pyrocket_consumer.consumer.context.statistics import Counts, Statistics
from pyrocket_consumer.consumer.dispatch.concurrent import ConcurrentService, ConsumeService, WorkersFor
from pyrocket_consumer.consumer.dispatch.ordered import OrderedService
from pyrocket_consumer.consumer.dispatch.retry import ListenerReports, Retries
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.membership.broker_requests import BrokerRequests
from pyrocket_consumer.consumer.membership.foreign_members import ForeignMembers
from pyrocket_consumer.consumer.membership.rebalance import Rebalance
from pyrocket_consumer.consumer.resets.corrections import CorrectionFollower
from pyrocket_consumer.consumer.resets.records import ResetRecords
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.errors import PermissionDenied, RocketError, RouteNotFound
from pyrocket_consumer.model import (
    MASTER_ID,
    RETRY_PREFIX,
    ConsumerEvent,
    EventKind,
    MessageQueue,
    PullResponse,
    Subscription,
    TopicRoute,
)
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.text import logger

log = logger("consumer")

MAX_NAMES_SHOWN = 20
"""How many names of queues or topics one event lists."""

LAST_REQUESTS_S = 3.0
"""How long the shutdown of a member waits for brokers after the last listener call."""


FULL_COMMIT_EVERY_S = 60.0
"""How often the timer also commits offsets that have not changed."""

SLOW_STORE_S = 10.0
"""How long a commit may take before an event reports it. Requests to brokers have deadlines; other stores may hang."""


class ConsumerState(Enum):
    """The states of a consumer."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"
    FAILED = "failed"


class GroupMember(MemberEvents, ClusterEvents):
    """One member of a consumer group, with all its parts: it subscribes, rebalances, pulls, consumes and commits."""

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        commits: Commits,
        workers_for: WorkersFor,
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
        lock_clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.commits = commits
        self.state = ConsumerState.CREATED
        self.failure: BaseException | None = None
        self.on_stored: Callable[[], None] = lambda: None
        """Called when the offsets at the start of the shutdown are stored, as far as possible."""
        self.on_ended: Callable[[], None] = lambda: None
        """Called when the member has failed, and when it is closed."""
        self.context = context = MemberContext(config, cluster, rng, wall_clock, lock_clock)
        context.member = self
        commits.attach(context)
        counts = Counts()
        self.locks = QueueLocks(context) if self._needs_locks(config) else None
        self.retries = Retries(context, commits, counts)
        service = OrderedService if config.orderly else ConcurrentService
        self.service: ConsumeService = service(context, workers_for, ListenerReports(context, self.retries, counts))
        self.retries.deliver = self.service.deliver
        self.assignments = Assignments(context, commits, self.service, self.locks, counts)
        self.resets = Resets(context, self.assignments, commits)
        self._records = ResetRecords(context, self.assignments, commits, self.resets)
        self._corrections = CorrectionFollower(context, self.assignments, self.resets, self._records)
        self._expression_checker = ExpressionChecker(context)
        self._rebalance = Rebalance(context, self.assignments, self._records, self._expression_checker)
        self._statistics = Statistics(context.loop.time, self.assignments.totals, self.assignments.listener_times)
        self._requests = BrokerRequests(context, self.assignments, self.resets, self._statistics, self.service)
        self._foreign_members: ForeignMembers | None = None
        if isinstance(config.offset_store, DatabaseOffsets) and not config.offset_store.allow_foreign_members:
            self._foreign_members = ForeignMembers(context, config.offset_store)
        self._masters: dict[str, str] = {}  # by broker name
        self._ending: asyncio.Task[None] | None = None
        self._call_deadline = float("inf")

    # --- events of its parts

    def offset_moved(self, queue: MessageQueue, pull_offset: int, response: PullResponse) -> None:
        self._corrections.on_offset_moved(queue, pull_offset, response)

    def late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        self._corrections.on_late_reset(queue, response)

    def reset_waiting(self, queue: MessageQueue) -> None:
        self._corrections.on_reset_waiting(queue)

    def claim_lost(self, queue: MessageQueue, why: str) -> None:
        self.assignments.queue(queue).lose_claim(why)

    # --- its parts

    @staticmethod
    def _needs_locks(config: ConsumerConfig) -> bool:
        """Return whether brokers must lock queues. A claim excludes other members, except for foreign members."""
        if not config.orderly or config.broadcasting:
            return False
        store = config.offset_store
        return not isinstance(store, DatabaseOffsets) or store.allow_foreign_members

    # --- subscriptions

    async def subscribe(self, subscription: Subscription, listener: Listener) -> None:
        """Add a topic. While running, wait up to `start_wait_s` until its queues have begun, as a start does."""
        await self.context.tasks.finish(self._subscribe(subscription, listener), f"subscribing to {subscription.topic}")
        if self.state is ConsumerState.RUNNING:
            await self._wait_until_begun()

    async def _subscribe(self, subscription: Subscription, listener: Listener) -> None:
        context = self.context
        topic, foreign_members = subscription.topic, self._foreign_members
        if (
            foreign_members is not None
            and self.state is ConsumerState.RUNNING
            and context.subscriptions.get(topic) is None
        ):
            await self._fetch_route(topic)
            await foreign_members.check(topic)
        subscription = context.subscriptions.newer(subscription)
        if self.state is ConsumerState.RUNNING:
            await self._expression_checker.check(subscription)
        context.subscriptions.add(subscription, listener)
        if self.state is ConsumerState.RUNNING:
            await self._fetch_route(subscription.topic)
            await context.cluster.membership.heartbeat()

    async def unsubscribe(self, topic: str, *, wait: bool) -> None:
        """Remove a topic. Its queues end and store their offsets, as in a rebalance; with `wait`, wait for that."""
        step = self.context.tasks.begin(self._unsubscribe(topic), f"unsubscribing {topic}")
        if wait:
            await asyncio.shield(step)

    async def _unsubscribe(self, topic: str) -> None:
        self.context.subscriptions.pop(topic, None)
        if self.state is ConsumerState.RUNNING:
            await self.assignments.end(topic, "unsubscribed")
            await self.context.cluster.membership.heartbeat()
            if self.context.subscriptions.get(topic) is None:  # not subscribed again meanwhile
                self._rebalance.forget(topic)
                self.context.cluster.routes.forget(topic)

    # --- start and close

    async def start(self) -> None:
        """Register at the brokers, and wait until the queues of this member have begun.

        After `start_wait_s`, an event names the queues that have not begun; they begin later.

        Raises:
            BrokerError: a broker refuses a subscription or the credentials; correct them. No task is left running.
        """
        context, cluster = self.context, self.context.cluster
        cluster.membership.add_consumer(context.name, context.heartbeat_data)
        self._requests.begin()
        cluster.events = self
        await asyncio.gather(*map(self._fetch_route, context.subscriptions))
        await asyncio.gather(*map(self._expression_checker.check, context.subscriptions.all()))
        tasks = context.tasks
        if self._foreign_members is not None:
            await self._foreign_members.check()
            tasks.keep_running(self._foreign_members.watch(), "the watch over foreign members")
        self.state = ConsumerState.RUNNING
        tasks.keep_running(self._rebalance.run(), "the rebalance loop")
        tasks.keep_running(CommitTimer(context, self.assignments, self.commits, self.resets).run(), "the commit timer")
        if self.locks is not None:
            tasks.keep_running(self.assignments.keep_locks(self.locks), "keeping locks")
        if self.config.broadcasting and self.config.remote_reset == "accept":
            tasks.keep_running(self._records.keep_reading(), "reading recorded resets")
        tasks.keep_running(self.service.report_stuck(), "the watch over listeners")
        tasks.keep_running(self._statistics.sample(), "statistics")
        log.info(
            "group=%s started client_id=%s model=%s topics=%s",
            context.name,
            context.client_id,
            self.config.message_model,
            ",".join(context.subscriptions),
        )
        await self._wait_until_begun()

    async def _wait_until_begun(self) -> None:
        """Wait up to `start_wait_s` until all queues of this member have begun; emit an event that names the others."""
        context, wait_s = self.context, self.config.start_wait_s
        if waiting := await self._rebalance.wait_until_begun(wait_s):
            names = ", ".join(waiting[:MAX_NAMES_SHOWN]) + (
                f" and {len(waiting) - MAX_NAMES_SHOWN} more" if len(waiting) > MAX_NAMES_SHOWN else ""
            )
            text = f"not begun after {wait_s:g} s, trying again: {names}"
            context.emit(EventKind.BROKER_UNREACHABLE, text, facts={"waiting": len(waiting)}, level=logging.WARNING)

    async def _fetch_route(self, topic: str) -> None:
        context = self.context
        try:
            await context.cluster.routes.get(topic)
        except PermissionDenied:
            raise
        except RouteNotFound as error:
            self._rebalance.mark_missing(topic)
            if not topic.startswith(RETRY_PREFIX):
                context.emit(EventKind.BROKER_UNREACHABLE, f"{error}; trying again", level=logging.WARNING)
        except RocketError as error:
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, f"the route of {topic} is not known yet: {error}")

    async def close(self, timeout_s: float) -> None:
        """Shut down without losing messages. A second call waits for the same shutdown, and may shorten its timeout.

        If a caller is cancelled, the shutdown continues. It takes at most `timeout_s` and a few seconds, whatever
        brokers and listeners do.
        """
        await asyncio.shield(self.begin_close(timeout_s))

    def begin_close(self, timeout_s: float) -> asyncio.Task[None]:
        """Begin to shut down, or shorten the timeout of the shutdown. Return its task."""
        self._call_deadline = min(self._call_deadline, self.context.loop.time() + timeout_s)
        if self._ending is None:
            self._ending = self.context.loop.create_task(self._close(), name="pyrocket closing")
            self._ending.add_done_callback(consume_exception)
        return self._ending

    async def _close(self) -> None:
        """Stop pulling, store offsets, finish running calls, store, leave the group, close. An error skips no step."""
        context, loop, commits = self.context, self.context.loop, self.commits
        context.closing = True
        self.assignments.stop_pulling()
        self.service.stop()
        # Store the offsets now, because listener calls may take long, and the caller may stop waiting. The loops
        # continue meanwhile: they store offsets, renew locks, and hand over queues to new members.
        context.tasks.begin(self._store_early(), "storing offsets")
        while (self.service.running() or self.retries.in_flight) and loop.time() < self._call_deadline:  # noqa: ASYNC110 - counting would cost time in each call
            await asyncio.sleep(0.005)
        if running := self.service.running():
            context.emit(
                EventKind.MESSAGE_STUCK,
                f"{running} listener calls still run; their messages stay unfinished and will be redelivered",
                level=logging.WARNING,
            )
        await context.tasks.stop_loops()
        self.retries.cancel()
        # Keep the lock of a queue with a running call. Its next owner must not begin while it runs, and begins when
        # the lock expires.
        held = self.assignments.close()
        free = [each.queue for each in held if not self.service.running(each.window)]
        self.service.abandon()
        last_request_at = loop.time() + LAST_REQUESTS_S
        unstored = await self._store_last([each.commit for each in held], last_request_at)
        # Also keep the lock of an unstored queue, because the broker may execute its commit after the next owner's.
        free = [queue for queue in free if queue not in unstored]
        leaving = context.tasks.begin(self._leave(free), "leaving the group")
        await asyncio.wait([leaving], timeout=max(last_request_at - loop.time(), LAST_REQUESTS_S / 3))
        await context.tasks.drain(last_request_at)
        failure: Exception | None = None
        try:
            await commits.close(until=max(last_request_at, loop.time() + LAST_REQUESTS_S / 3))
        except Exception as error:  # of the user's store
            failure = error
        if self.state is not ConsumerState.FAILED:
            self.state = ConsumerState.CLOSED
        log.info("group=%s closed client_id=%s", context.name, context.client_id)
        context.events.close()
        self.on_ended()
        if failure is not None and self.failure is None:
            raise failure

    async def _store_early(self) -> None:
        """Store the offsets so far. `_store_last` stores, or reports, those that cannot be stored now."""
        try:
            records = [held.commit for held in self.assignments.all()]
            await self.commits.persist(records, until=self.context.loop.time() + LAST_REQUESTS_S)
        except Exception as error:  # of the user's store
            log.info("group=%s offsets not stored before listener calls end: %s", self.context.name, error)
        self.on_stored()

    async def _store_last(self, records: list[CommitRecord], until: float) -> Collection[MessageQueue]:
        """Store the last offsets of queues. Report and return the queues whose offsets could not be stored."""
        unstored: Mapping[MessageQueue, Exception]
        try:
            unstored = await self.commits.persist(records, until=until)
        except Exception as error:  # of the user's store
            unstored = dict.fromkeys((record.queue for record in records), error)
        if unstored:
            queue, reason = next(iter(unstored.items()))
            log.warning(
                "group=%s final offsets of %d queues not stored, messages may be redelivered; %s: %s",
                self.context.name,
                len(unstored),
                queue,
                reason,
            )
        for queue, reason in unstored.items():
            text = f"final offset not stored, messages may be redelivered: {reason}"
            self.context.events.emit(ConsumerEvent(EventKind.COMMIT_FAILED, text, queue))
        return unstored

    async def _leave(self, queues: list[MessageQueue]) -> None:
        """Unlock `queues` and unregister at the brokers, so that other members take the queues over at once."""
        context = self.context
        if self.locks is not None:
            await self.locks.release(queues)
        try:
            await context.cluster.membership.unregister(consumer_group=context.name)
        except RocketError as error:
            log.info("group=%s not unregistered everywhere: %s", context.name, error)

    def unexpected_error(self, what: str, error: BaseException) -> None:
        """Fail the member after an error of its own code: emit an event, and leave the queues to other members."""
        context = self.context
        log.error("group=%s failed: %s: %r", context.name, what, error, exc_info=error)
        if self.state in (ConsumerState.FAILED, ConsumerState.CLOSED) or context.closing:
            return
        self.state = ConsumerState.FAILED
        self.failure = error
        context.emit(EventKind.CONSUMER_FAILED, f"{what}: {error!r}", level=logging.ERROR)
        self.begin_close(self.config.shutdown_timeout_s)
        self.on_ended()

    # --- events of the cluster

    def uses_broker(self, broker_name: str) -> bool:
        return self.assignments.holds_queue_of(broker_name)

    def client_failed(self, error: BaseException) -> None:
        self.context.report_unexpected("a background task of the cluster ended", error)

    def address_refused(self, address: str, why: str) -> None:
        facts = {"address": address}
        self.context.emit(EventKind.ADDRESS_REFUSED, why, facts=facts, level=logging.WARNING)

    def route_changed(self, topic: str, route: TopicRoute) -> None:
        for broker in route.brokers:
            address = broker.addresses.get(MASTER_ID)
            if address is not None and self._masters.get(broker.broker_name) != address:
                self._masters[broker.broker_name] = address
                self._on_broker_gap(broker.broker_name)  # a former slave lacks the commits of the last seconds
        if self.context.subscriptions.get(topic) is not None:
            self.context.rebalance_wanted.set()

    def broker_lost(self, address: str, reason: str) -> None:
        for broker_name in self.context.cluster.routes.names_at(address):
            for record in self.assignments.records(broker_name):
                record.on_broker_lost(self.context.loop.time())  # it may have lost its latest commits, if it has died

    def broker_reconnected(self, address: str) -> None:
        for broker_name in self.context.cluster.routes.names_at(address):
            self._on_broker_gap(broker_name)
        self._records.read_soon()
        self.context.rebalance_wanted.set()

    def _on_broker_gap(self, broker_name: str) -> None:
        """Commit again, and check claimed logs, because a broker may have lost commits or its last messages."""
        self.commits.mark_unpersisted(self.assignments.records(), broker_name)
        self.assignments.recheck_logs(broker_name)


class CommitTimer:
    """Commits the offsets of the held queues every `commit_interval_s`. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, commits: Commits, resets: Resets) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._resets = resets

    async def run(self) -> None:
        """Commit until cancelled."""
        context = self._context
        full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
        rounds: dict[str, tuple[asyncio.Task[None], float]] = {}  # the running commit of each store, and its start
        while True:
            await asyncio.sleep(context.config.commit_interval_s)
            if context.loop.time() >= full_commit_at:
                # a former owner that was cut off may have overwritten the offset of this member with its old one
                self._commits.mark_unpersisted(self._assignments.records())
                full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
            records = [held.commit for held in self._assignments.all()]
            for store, of_store in self._commits.by_store(records).items():
                name, now = store or "the store", context.loop.time()
                if store not in rounds or rounds[store][0].done():  # a slow broker delays no other
                    rounds[store] = context.tasks.begin(self._persist(of_store), f"committing to {name}"), now
                elif of_store and (pending_s := now - rounds[store][1]) >= SLOW_STORE_S:
                    text = (
                        f"{name} has not stored offsets for {pending_s:.0f} s; "
                        "if this process ends now, the messages since then will be redelivered"
                    )
                    context.emit_throttled(EventKind.COMMIT_FAILED, text, of_store[0].queue)
            await context.tasks.finish(self._resets.persist(), "storing resets")

    async def _persist(self, records: list[CommitRecord]) -> None:
        """Store the offsets of queues that have changed since the last commit."""
        failed = await self._commits.persist(records)
        for queue, error in failed.items():
            text = f"not stored, next attempt in {self._context.config.commit_interval_s:g} s: {error}"
            self._context.emit_throttled(EventKind.COMMIT_FAILED, text, queue)
