"""One member of a consumer group: the core under the blocking and the asyncio face. Confined to the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.asked import Asked
from pyrocket_consumer.consumer.assignments import Assignments
from pyrocket_consumer.consumer.commit import Commits
from pyrocket_consumer.consumer.consume import ConsumeService, Workers
from pyrocket_consumer.consumer.events import Events, shown
from pyrocket_consumer.consumer.listener import Failed, Listener
from pyrocket_consumer.consumer.locks import QueueLocks
from pyrocket_consumer.consumer.orderly import OrderlyService
from pyrocket_consumer.consumer.process_queue import ProcessQueue
from pyrocket_consumer.consumer.puller import Puller
from pyrocket_consumer.consumer.rebalance import Plan, Rebalance
from pyrocket_consumer.consumer.reset import Resets
from pyrocket_consumer.consumer.retry import Retries
from pyrocket_consumer.consumer.statistics import Statistics
from pyrocket_consumer.errors import ConnectError, ProtocolError, RocketError, RouteNotFound
from pyrocket_consumer.model import (
    MASTER_ID,
    ConsumerEvent,
    EventKind,
    MessageQueue,
    PullAnswer,
    Subscription,
    TopicRoute,
    retry_topic,
)
from pyrocket_consumer.net.connection import Connection
from pyrocket_consumer.wire.bodies import CheckClientConfig, ConsumerData, encode_check_client_config
from pyrocket_consumer.wire.command import CheckClientConfigHeader
from pyrocket_consumer.wire.message import Message

log = logging.getLogger("pyrocket_consumer.consumer")

T = TypeVar("T")

COMMIT_EVERYTHING_S = 60.0
"""How often offsets are committed that have not changed."""

TROUBLE_EVERY_S = 10.0
"""The same trouble is told once in this time."""


class ConsumerState(Enum):
    """A consumer's life."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(slots=True)
class Topic:
    """A topic subscribed to."""

    subscription: Subscription
    listener: Listener


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """Where one queue stands. Offsets are the next to consume; `broker_max` is the end at the last pull's answer."""

    committed: int | None
    persisted: int | None
    next_to_pull: int
    cached: int
    cached_bytes: int
    unfinished: int
    oldest_unfinished: str | None
    broker_max: int
    origin: str
    start_offset: int
    paused: bool
    last_error: str

    @property
    def lag(self) -> int:
        """How many offsets lie between what is committed and the broker's end."""
        return max(0, self.broker_max - (self.committed if self.committed is not None else self.start_offset))


class GroupMember:
    """Subscribes, rebalances, pulls, consumes and commits for one group."""

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        commits: Commits,
        workers_for: Callable[[bool, GroupMember], Workers],
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self.config = config
        self.cluster = cluster
        self.loop = cluster.loop
        self.group = config.group
        self.client_id = cluster.client_id
        self.commits = commits
        self.rng = rng or random.Random()
        self.state = ConsumerState.CREATED
        self.failure: BaseException | None = None
        self.closing = False
        self._ending: asyncio.Task[None] | None = None
        self.started_at_ms = 0
        self.on_ended: Callable[[], None] = lambda: None
        self.locks = QueueLocks(self) if config.orderly and not config.broadcasting else None
        self.service = self._service(lambda is_async: workers_for(is_async, self))
        self.assignments = Assignments(self)
        self.statistics = Statistics(self.loop.time, self.assignments.totals, self.assignments.listener_time_s)
        self.rebalance = Rebalance(self)
        self.retries = Retries(self)
        self.resets = Resets(self)
        self.events = Events(config.on_event)
        self._topics: dict[str, Topic] = {}
        self._paused: set[MessageQueue] = set()
        self._all_paused = False
        self._woken: deque[ProcessQueue] = deque()
        self._wake_due = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._passing: dict[asyncio.Task[Any], None] = {}
        self._told: dict[tuple[EventKind, str], float] = {}
        self._masters: dict[str, str] = {}  # by broker name
        commits.on_reset_waiting = self._reset_waiting
        self._asked = Asked(self)

    def _service(self, workers_for: Callable[[bool], Workers]) -> ConsumeService | OrderlyService:
        if not self.config.orderly:
            return ConsumeService(self.loop, workers_for)
        return OrderlyService(
            self.loop,
            workers_for,
            auto_commit=self.config.auto_commit,
            max_attempts=self.config.most_attempts,
            give_up=lambda window, message: self.retries.give_up(window, message),
            failed=lambda window, count: self.assignments.count(window.queue.topic, failed=count),
        )

    def orderly_goes_on(self, window: ProcessQueue) -> None:
        """A lock was confirmed: the queue's line may move."""
        self.service.go_on(window)

    # --- subscriptions

    def topics(self) -> list[str]:
        """Return the topics to read, the retry topic among them."""
        return list(self._topics)

    def topic(self, topic: str) -> Topic | None:
        return self._topics.get(topic)

    def subscription(self, topic: str) -> Subscription | None:
        found = self._topics.get(topic)
        return found.subscription if found is not None else None

    def subscriptions(self) -> list[Subscription]:
        return [topic.subscription for topic in self._topics.values()]

    async def subscribe(self, subscription: Subscription, listener: Listener) -> None:
        """Add a topic; while running, its queues come with the rebalance this starts."""
        topic = subscription.topic
        before = self._topics.get(topic)
        version = self._version(before.subscription.version if before else 0)
        subscription = replace(subscription, version=version)
        if self.state is ConsumerState.RUNNING:
            await self._check_expression(subscription)
        self._topics[topic] = Topic(subscription, listener)
        if not self.config.broadcasting:
            own_retry = retry_topic(self.group)
            if own_retry not in self._topics:
                self._topics[own_retry] = Topic(Subscription(own_retry, version=version), listener)
        if self.state is ConsumerState.RUNNING:
            await self._find_route(topic)
            await self.cluster.heartbeat()
            self.rebalance.soon()

    async def unsubscribe(self, topic: str) -> None:
        """Remove a topic; its queues end as at any rebalance, their offsets stored."""
        self._topics.pop(topic, None)
        if self.state is ConsumerState.RUNNING:
            await asyncio.gather(
                *(self.assignments.end(queue, "unsubscribed") for queue in self.assignments.held(topic))
            )
            await self.cluster.heartbeat()

    def now_ms(self) -> int:
        """Return the time of day."""
        return int(self._wall_clock() * 1000)

    def _version(self, before: int) -> int:
        return max(self.now_ms(), before + 1)

    def queues_changed(self, changes: Mapping[str, Plan]) -> None:
        """The set of queues held of these topics changes: their subscriptions get a new version."""
        for topic in changes:
            found = self._topics.get(topic)
            if found is not None:
                found.subscription = replace(found.subscription, version=self._version(found.subscription.version))

    def _listener(self, message: Message, topic: str) -> Listener:
        try:
            found = self._topics.get(message.topic)
        except ProtocolError:  # a damaged record; its listener will meet the error
            found = None
        return (found or self._topics[topic]).listener

    def heartbeat_data(self) -> ConsumerData:
        """Return what heartbeats say of this group."""
        where = {"first": "CONSUME_FROM_FIRST_OFFSET", "last": "CONSUME_FROM_LAST_OFFSET"}
        return ConsumerData(
            self.group,
            message_model=str(self.config.message_model).upper(),
            consume_from_where=where.get(str(self.config.consume_from), "CONSUME_FROM_TIMESTAMP"),
            subscriptions=tuple(self.subscriptions()),
        )

    # --- life

    async def start(self) -> None:
        """Become known to the brokers, take queues on.

        Raises:
            ConnectError and others: no name server answers. Nothing is left running then.
        """
        self.started_at_ms = self.now_ms()
        self.cluster.add_consumer(self.group, self.heartbeat_data)
        self._asked.answer_through(self.cluster)
        self.cluster.on_route_changed(self._route_changed)
        self.cluster.on_broker_reconnected(self._reconnected)
        self.cluster.on_failure(lambda error: self.surprised("a background task of the cluster ended", error))
        for topic in self.topics():
            await self._find_route(topic)
        for subscription in self.subscriptions():
            await self._check_expression(subscription)
        await self.cluster.heartbeat()
        self.state = ConsumerState.RUNNING
        if not await self.rebalance.round():
            self.rebalance.soon()
        self._background(self.rebalance.run(), "rebalance")
        self._background(self._commit_loop(), "commit")
        if self.locks is not None:
            self._background(self.locks.keep(), "locks")
        if self.config.broadcasting and self.config.remote_reset == "accept":
            self._background(self.resets.read_regularly(), "resets")
        self._background(self._watch_listeners(), "watch")
        self._background(self.statistics.keep(), "statistics")
        log.info(
            "consumer=%s started client_id=%s model=%s topics=%s",
            self.group,
            self.client_id,
            self.config.message_model,
            ",".join(self.topics()),
        )

    async def _find_route(self, topic: str) -> None:
        try:
            await self.cluster.route(topic)
        except RouteNotFound as error:
            if not topic.startswith("%RETRY%"):
                self.event(EventKind.BROKER_UNREACHABLE, f"{error}; still looking", level=logging.WARNING)

    async def _check_expression(self, subscription: Subscription) -> None:
        """Have a broker look at an SQL92 expression: pulls with a bad one would return everything."""
        if subscription.expression_type == "TAG":
            return
        try:
            route = await self.cluster.route(subscription.topic)
        except RouteNotFound:
            return
        body = encode_check_client_config(CheckClientConfig(self.client_id, self.group, subscription))
        for broker in route.brokers:
            address = self.cluster.address(broker.broker_name)
            if address is not None:
                await self.cluster.call(address, CheckClientConfigHeader(), body)

    def _background(self, work: Awaitable[None], name: str) -> None:
        async def guard() -> None:
            try:
                await work
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                self.surprised(f"the {name} task ended", error)

        self._tasks.append(self.loop.create_task(guard(), name=f"pyrocket-{name}"))

    def keep(self, task: asyncio.Task[T], what: str = "a reset") -> asyncio.Task[T]:
        """Keep hold of a task that somebody may or may not wait for; that it fails unforeseen is a surprise."""

        def ended(task: asyncio.Task[T]) -> None:
            self._passing.pop(task, None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, RocketError):
                self.surprised(what, error)

        self._passing[task] = None
        task.add_done_callback(ended)
        return task

    def _in_passing(self, work: Awaitable[Any], what: str) -> None:
        """Run something short beside the loops; that it fails is a surprise."""

        async def guard() -> None:
            try:
                await work
            except RocketError as error:
                self.trouble(EventKind.BROKER_UNREACHABLE, f"{what}: {error}")
            except Exception as error:
                self.surprised(what, error)

        task = self.loop.create_task(guard())
        self._passing[task] = None
        task.add_done_callback(lambda done: self._passing.pop(done, None))

    async def close(self, timeout_s: float) -> None:
        """End in the order that loses nothing; whoever calls again waits for the same end."""
        if self._ending is None:
            self.closing = True
            self._ending = self.loop.create_task(self._close(timeout_s))
        await asyncio.shield(self._ending)

    async def _close(self, timeout_s: float) -> None:
        """Stop pulling, finish what runs, store, unregister, close. What fails on the way keeps none of it undone."""
        failure: Exception | None = None
        deadline = self.loop.time() + timeout_s
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.assignments.stop_pulling()
        self.service.stop()
        while (self.service.running() or self.retries.under_way) and self.loop.time() < deadline:  # noqa: ASYNC110 - workers keep no count: it would cost each call
            await asyncio.sleep(0.005)
        if running := self.service.running():
            self.event(
                EventKind.MESSAGE_STUCK,
                f"{running} listener calls still run after {timeout_s:g} s; their messages stay unfinished",
                level=logging.WARNING,
            )
        self.retries.cancel()
        queues = self.assignments.fence_all()
        self.service.abandon()
        unstored: Mapping[MessageQueue, Exception]
        try:
            unstored = await self.commits.persist(queues)
        except Exception as error:  # of a store of the user's
            failure, unstored = error, dict.fromkeys(queues, error)
        for queue, reason in unstored.items():
            self.event(EventKind.COMMIT_FAILED, f"final offset not stored: {reason}", queue, level=logging.WARNING)
        if self.locks is not None:
            await self.locks.release(queues)
        try:
            await self.cluster.unregister(consumer_group=self.group)
        except RocketError as error:
            log.info("consumer=%s not unregistered everywhere: %s", self.group, error)
        for passing in self._passing:
            passing.cancel()
        try:
            await self.commits.close()
        except Exception as error:
            failure = failure or error
        if self.state is not ConsumerState.FAILED:
            self.state = ConsumerState.CLOSED
        log.info("consumer=%s closed", self.group)
        self.events.close()
        self.on_ended()
        if failure is not None and self.failure is None:
            raise failure

    def surprised(self, what: str, error: BaseException) -> None:
        """Something of ours failed that must not: the consumer has failed, and says so."""
        log.error("consumer=%s failed: %s: %r", self.group, what, error, exc_info=error)
        if self.state in (ConsumerState.FAILED, ConsumerState.CLOSED) or self.closing:
            return
        self.state = ConsumerState.FAILED
        self.failure = error
        self.assignments.stop_pulling()
        self.event(EventKind.CONSUMER_FAILED, f"{what}: {error!r}", level=logging.ERROR)
        self.on_ended()

    # --- loops

    async def _commit_loop(self) -> None:
        everything_at = self.loop.time() + COMMIT_EVERYTHING_S
        rounds: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(self.config.commit_interval_s)
            if self.loop.time() >= everything_at:
                # a former owner of a queue, cut off meanwhile, may have stored its old offset over ours
                self.commits.doubt()
                everything_at = self.loop.time() + COMMIT_EVERYTHING_S
            for place, queues in self.commits.places(self.assignments.all()).items():
                if place not in rounds or rounds[place].done():  # a broker that is slow to answer delays no other
                    rounds[place] = self.keep(self.loop.create_task(self._persist(queues)), "a commit")
            await self.resets.persist()

    async def _persist(self, queues: list[MessageQueue]) -> None:
        """Store what was consumed of `queues` since the last time."""
        failed = await self.commits.persist(queues)
        for queue, error in failed.items():
            self.trouble(
                EventKind.COMMIT_FAILED,
                f"not stored, tried again in {self.config.commit_interval_s:g} s: {error}",
                queue,
            )

    async def _watch_listeners(self) -> None:
        """Look for listener calls that have taken longer than `consume_timeout_s`."""
        timeout_s = self.config.consume_timeout_s
        pause_s = min(max(timeout_s / 10, 0.01), 1.0)
        told: set[int] = set()
        while True:
            await asyncio.sleep(pause_s)
            stuck = self.service.stuck(timeout_s, self.loop.time())
            ids = {id(messages[0]) for _, messages in stuck}
            for window, messages in stuck:
                waiting = [message for message in messages if not message._done]
                if not waiting or id(messages[0]) in told:
                    continue
                self.event(
                    EventKind.MESSAGE_STUCK,
                    f"its listener has run for more than {timeout_s:g} s",
                    window.queue,
                    {"offset": waiting[0].queue_offset, "message_id": waiting[0].message_id},
                    level=logging.WARNING,
                )
                if not self.config.broadcasting:
                    self.retries.add(window, [(message, 3) for message in waiting])
            told = ids

    # --- what pullers and workers tell

    def paused(self, queue: MessageQueue) -> bool:
        return self._all_paused or queue in self._paused

    def pause(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull no more from `queues`, or from all."""
        if queues is None:
            self._all_paused = True
        else:
            self._paused.update(queues)

    def resume(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull again from `queues`, or from all."""
        if queues is None:
            self._all_paused = False
            self._paused.clear()
        else:
            self._paused.difference_update(queues)
        for assignment in self.assignments.all().values():
            if assignment.puller is not None:
                assignment.puller.pull()

    def connection_to(self, broker_name: str, broker_id: int) -> Connection | None:
        address = self.cluster.address(broker_name, broker_id)
        return self.cluster.peek_member(address) if address is not None else None

    async def connect_to(self, broker_name: str, broker_id: int) -> None:
        address = self.cluster.address(broker_name, broker_id)
        if address is None:
            raise ConnectError(broker_name, "no route names an address of this broker now")
        await self.cluster.member_connection(address)

    async def refresh(self, topic: str, *, heartbeat: bool) -> None:
        if heartbeat:
            await self.cluster.heartbeat()
        else:
            await self.cluster.route(topic, refresh=True)
            self.rebalance.soon()

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        topic = window.queue.topic
        found = self._topics.get(topic)
        if found is None:
            return
        if not topic.startswith("%RETRY%"):
            self.service.dispatch(window, found.listener, messages)
            return
        for message in messages:  # retried messages of several topics share a queue
            self.service.dispatch(window, self._listener(message, topic), [message])

    def offset_moved(self, puller: Puller, asked: int, answer: PullAnswer) -> None:
        self._in_passing(self.assignments.follow(puller, asked, answer), f"following the broker on {puller.queue}")

    def late_reset(self, queue: MessageQueue, answer: PullAnswer) -> None:
        self._in_passing(self.resets.met_mark(queue, answer, None), f"resetting {queue}")

    def _reset_waiting(self, queue: MessageQueue) -> None:
        assignment = self.assignments.get(queue)
        if assignment is not None and assignment.puller is not None:
            assignment.puller.ask_master()

    def pull_failed(self, queue: MessageQueue, error: Exception) -> None:
        self.trouble(EventKind.BROKER_UNREACHABLE, f"pull failed, tried again: {error}", queue)

    def wake(self, window: ProcessQueue) -> None:
        """Room was made in a window whose puller waits for it. Called by workers."""
        self._woken.append(window)
        if not self._wake_due:  # one wake-up serves all that come before it; two now and then do no harm
            self._wake_due = True
            self._soon(self._pull_woken)

    def _pull_woken(self) -> None:
        self._wake_due = False
        while self._woken:
            window = self._woken.popleft()
            assignment = self.assignments.get(window.queue)
            if assignment is not None and assignment.window is window and assignment.puller is not None:
                assignment.puller.pull()

    def _soon(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have something done on the I/O thread; nothing once that has ended, for a listener may outlive it."""
        try:
            self.loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass

    def worker_failed(self, error: BaseException) -> None:
        self._soon(self.surprised, "a worker failed", error)

    def failed(self, window: ProcessQueue, failed: list[Failed]) -> None:
        self._soon(self._failed, window, failed)

    def _failed(self, window: ProcessQueue, failed: list[Failed]) -> None:
        self.assignments.count(window.queue.topic, failed=len(failed))
        if not self.closing:
            self.retries.add(window, failed)

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        log.warning(
            "queue=%s offset=%d the listener raised; the message comes again",
            window.queue,
            message.queue_offset,
            exc_info=error,
        )
        facts = {"offset": message.queue_offset, "error": shown(error)}
        self.tell(ConsumerEvent(EventKind.LISTENER_FAILED, "the message comes again", window.queue, facts))

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        self.event(
            EventKind.LISTENER_RESULT_UNKNOWN,
            f"the listener returned {shown(result)}, which counts as RETRY; return None, ConsumeResult or Retry",
            window.queue,
            {"offset": message.queue_offset},
            level=logging.WARNING,
        )

    # --- what the cluster tells

    def _route_changed(self, topic: str, route: TopicRoute) -> None:
        for broker in route.brokers:
            address = broker.addresses.get(MASTER_ID)
            if address is not None and self._masters.get(broker.broker_name) != address:
                self._masters[broker.broker_name] = address
                self.commits.doubt(broker.broker_name)  # one that was a slave lacks the commits of the last seconds
        if topic in self._topics:
            self.rebalance.soon()

    def _reconnected(self, address: str) -> None:
        for broker_name, addresses in self.cluster.broker_addresses().items():
            if address in addresses.values():
                self.commits.doubt(broker_name)
        self.resets.look_again()
        self.rebalance.soon()

    # --- resets

    async def reset(
        self, topic: str, targets: Mapping[MessageQueue, int], why: str = "asked for by this program"
    ) -> dict[MessageQueue, int]:
        """Move the queues of `topic` we hold to their targets; returns those moved, when they are durable."""

        async def move(queue: MessageQueue, target: int) -> tuple[MessageQueue, int] | None:
            if not await self.assignments.move(queue, target, None, "reset"):
                return None
            self.resets.moved(queue, target, why)
            return queue, target

        moved = await asyncio.gather(
            *(move(queue, target) for queue, target in targets.items() if queue.topic == topic and target >= 0)
        )
        return dict(each for each in moved if each is not None)

    # --- telling the user

    def event(
        self,
        kind: EventKind,
        text: str,
        queue: MessageQueue | None = None,
        facts: Mapping[str, object] | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Tell the user: one log line, one count, one event. Any thread."""
        event = ConsumerEvent(kind, text, queue, facts or {})
        log.log(level, "group=%s %s", self.group, event)
        self.tell(event)

    def tell(self, event: ConsumerEvent) -> None:
        """Count an event and pass it to the user."""
        self.events.tell(event)

    def trouble(self, kind: EventKind, text: str, queue: MessageQueue | None = None) -> None:
        """Tell the user about something that is tried again, once in a while and not every time."""
        key = (kind, str(queue.broker_name if queue else text[:40]))
        now = self.loop.time()
        if now - self._told.get(key, -TROUBLE_EVERY_S) < TROUBLE_EVERY_S:
            log.debug("group=%s %s %s", self.group, kind, text)
            return
        self._told[key] = now
        self.event(kind, text, queue, level=logging.WARNING)

    # --- progress

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return where each queue we hold stands."""
        table = {}
        for queue, assignment in sorted(self.assignments.all().items()):
            window, puller = assignment.window, assignment.puller
            unfinished, cached_bytes, oldest = window.unfinished()
            table[queue] = QueueProgress(
                committed=self.commits.current(queue),
                persisted=self.commits.persisted(queue),
                next_to_pull=puller.next_offset if puller else assignment.start_offset,
                cached=unfinished,
                cached_bytes=cached_bytes,
                unfinished=unfinished,
                oldest_unfinished=oldest.message_id if oldest else None,
                broker_max=puller.max_offset if puller else 0,
                origin=assignment.origin,
                start_offset=assignment.start_offset,
                paused=self.paused(queue),
                last_error=puller.last_error if puller else "",
            )
        return table
