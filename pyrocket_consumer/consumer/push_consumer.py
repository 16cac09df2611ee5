"""The consumer users write against: blocking, and for asyncio. Both are thin faces of one group member."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, Unpack

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.namespace import wrap
from pyrocket_consumer.cluster.places import To, check_to, offsets_at
from pyrocket_consumer.config import ConsumerConfig, ConsumerOptions, NameServers, check_topic
from pyrocket_consumer.consumer.assignments import QueueProgress
from pyrocket_consumer.consumer.commit import BrokerCommits, Commits, StoreCommits
from pyrocket_consumer.consumer.consume import AsyncWorkers, Outcome, ThreadWorkers, Workers
from pyrocket_consumer.consumer.listener import Listener, MessageListener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.errors import ConfigError, ConsumerClosed, RocketError
from pyrocket_consumer.model import ConsumerEvent, MessageQueue, Subscription
from pyrocket_consumer.offsets import LocalFileOffsetStore, OffsetStore
from pyrocket_consumer.wire.subscription import parse_subscription

log = logging.getLogger("pyrocket_consumer.consumer")

T = TypeVar("T")

START_TIMEOUT_S = 30.0


class Sql(str):
    """An SQL92 expression; `sql("price > 5")` makes one."""


def sql(expression: str) -> Sql:
    """Select messages by their properties: `consumer.subscribe("orders", handle, sql("region = 'eu' AND price > 5"))`.

    The broker needs `enablePropertyFilter=true`; one that has it not refuses at start.
    """
    return Sql(expression)


def _subscription(topic: str, selector: str) -> Subscription:
    check_topic(topic)
    if not isinstance(selector, str):
        raise ConfigError(f"selector={selector!r} is not allowed; use '*', 'tagA || tagB' or sql('price > 5')")
    if isinstance(selector, Sql):
        if not selector.strip():
            raise ConfigError("the SQL92 expression is empty")
        return Subscription(topic, str(selector), expression_type="SQL92")
    return parse_subscription(topic, selector)


class _End:
    """An end that can be waited for; once set it stays so.

    The handler of a signal runs between any two steps of the main thread, and may raise there. `threading.Event` takes
    a lock with several of them: to set it in a handler may find the lock taken by the very wait that was interrupted,
    and a wait that Ctrl-C ends at the wrong moment leaves it taken. A SimpleQueue is made for both.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Say that it has come. Any thread, and handlers of signals."""
        self._is_set = True
        self._bell.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait until it has come, for at most `timeout_s`; ask `is_set()` afterwards."""
        try:
            if not self._is_set:
                self._bell.get(timeout=timeout_s)
        except queue.Empty:
            pass
        finally:
            if self._is_set:
                self._bell.put(None)  # for others who wait


class _Face:
    """What the blocking and the asyncio consumer share."""

    def __init__(
        self,
        group: str | None = None,
        *,
        name_server: NameServers | None = None,
        config: ConsumerConfig | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Check the options; nothing is opened or connected before the start.

        Args:
            group (–; 1–120 of a-zA-Z0-9_-%|): the consumer group
            config (–; a ConsumerConfig): all options in one, instead of single ones
            name_server (NAMESRV_ADDR; host:port, several joined by ;, or a list): where to ask for routes; one that
                answers is enough
            message_model ("clustering"; "broadcasting"): each message to one member, or to every member
            orderly (False): one listener call of a queue at a time, in order of offset
            auto_commit (True; orderly only): False: only ConsumeResult.COMMIT commits; ROLLBACK brings back what came
                since
            consume_from ("last"; "first", an aware datetime or its text): where a group begins that has no offset
            consume_threads (20; 1–1000): workers for plain listeners; calls at once for async def ones
            listener_batch_size (1; 1–1024): above 1 the listener takes a list of at most so many
            pull_batch_size (32; 1–1024, or {topic: n}): most messages of one pull; brokers answer 32 and 256 KiB unless
                told otherwise
            max_cached_messages (1000; 1–1 000 000, or {topic: n}): unfinished messages of one queue at which pulling
                pauses
            max_cached_bytes (100 MiB; bytes, or {topic: n}): memory for unfinished messages of the whole consumer (of a
                topic); a queue is pulled while it holds less than is left, or nothing and its turn comes
            max_span (2000; 1–65535): distance between the oldest unfinished offset and the newest pulled (not when
                orderly)
            commit_interval_s (5; 0.01–3600 s): how often offsets are stored
            rebalance_interval_s (20; 0.05–3600 s): how often the assignment is looked at without cause
            max_reconsume_times (16; orderly: no limit; 0–2³¹−1): failures after which a message goes to %DLQ%
            consume_timeout_s (900; 0.05–604800 s): a listener call that takes longer is told, and its message sent back
                (not when orderly)
            start_wait_s (5; 0–600 s): how long start() waits for queues whose brokers are slow; they begin all the
                same, later
            shutdown_timeout_s (30; 0–86400 s): how long close() waits for listener calls
            pull_hold_s (15; 0.05–300 s): how long a broker may hold a pull that finds nothing
            pull_retry_delay_s (1; 0.001–300 s): pause after a pull that failed
            allocation ("average"; "circle", "hash", in_machine_rooms(…), a callable): which queues are whose; all
                members of a group must use the same
            offset_store (by model; an OffsetStore): brokers for clustering, the local file for broadcasting
            offset_store_dir (ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR, ~/.rocketmq_offsets; a directory): where the local
                file is: <dir>/<client id>/<group>/offsets.json
            durability ("fsync"; "process", "checkpoint"): a stored offset survives power loss; the end of the process;
                as the first, and Java can read every one
            on_unreadable_store ("backup"; "raise", "start_over"): what to do when the file is damaged
            remote_reset ("accept"; "refuse"): whether brokers, admins and other members may move this member's offsets;
                see docs/resets.md
            reset_record_interval_s (60; 0.05–86400 s): broadcasting: how often to look for a reset that was recorded
                while we could not be reached
            client_ip (detected): the first part of the client id
            instance_name ("DEFAULT"): the second; with a name of your own a second process of the same name is refused
            unit_name, namespace (–; text): as in Java
            access_key, secret_key, security_token (–): sign every request; never shown
            tls (False; True, an ssl.SSLContext): encrypt; True verifies against the system's authorities
            call_timeout_s, connect_timeout_s (3; 0.01–600 s): deadlines of calls
            heartbeat_interval_s, route_refresh_interval_s (30; 0.05–3600 s): how often brokers are told that we are
                there, and routes are asked for
            on_event (–; a callable): called with every ConsumerEvent, on a thread of its own

        Raises:
            ConfigError: an option is unknown, or its value is not allowed; the text says what is.
        """
        if config is not None:
            if options or name_server is not None or (group is not None and group != config.group):
                raise ConfigError("pass either config= or single options, not both")
        else:
            if group is None:
                raise ConfigError("a consumer needs its group: PushConsumer('orders-app', …)")
            config = ConsumerConfig.from_options({"group": group, "name_server": name_server, **options})
        assert isinstance(config, ConsumerConfig)
        self.config = config
        self._subscriptions: dict[str, tuple[Subscription, Listener]] = {}
        self._member: GroupMember | None = None
        self._cluster: Cluster | None = None
        self._ended = _End()
        self._pid = os.getpid()
        self._early_events: list[ConsumerEvent] = []
        self._final_state: ConsumerState | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group={self.config.group!r}, state={self.state.value!r})"

    @property
    def state(self) -> ConsumerState:
        """Where in its life the consumer is; FAILED means `join` and `close` raise why."""
        if self._final_state is not None:
            return self._final_state
        return self._member.state if self._member is not None else ConsumerState.CREATED

    @property
    def client_id(self) -> str | None:
        """The id under which the group knows this member, once started."""
        return self._cluster.client_id if self._cluster is not None else None

    def _checked(self, topic: str, listener: MessageListener, selector: str) -> tuple[Subscription, Listener]:
        subscription = _subscription(wrap(self.config.namespace, topic), selector)
        return subscription, Listener.of(listener, self.config.listener_batch_size)

    def _create(self, workers_for: Callable[[bool, Outcome], Workers]) -> GroupMember:
        """Open the offset store, connect, and return the member. Blocks, for at most a few deadlines."""
        if self._final_state is not None or self._member is not None:
            raise ConsumerClosed(f"{self!r} cannot be started again; make a new one")
        config = self.config
        if config.namespace:
            config = replace(config, group=wrap(config.namespace, config.group))
        client_id = make_client_id(config, config.broadcasting)
        store: OffsetStore | None = config.offset_store
        if store is not None and not isinstance(store, OffsetStore):
            raise ConfigError(f"offset_store={store!r} lacks methods of OffsetStore; see pyrocket_consumer.offsets")
        if store is not None:
            store.load()
        elif config.broadcasting:
            file_store = LocalFileOffsetStore.for_group(replace(config, on_event=self._tell), client_id)
            file_store.load()
            store, client_id = file_store, file_store.client_id
        cluster = Cluster(config, client_id)
        try:
            cluster.start()
        except BaseException:
            if store is not None:
                store.close()
            raise
        self._cluster = cluster
        commits: Commits = (
            BrokerCommits(cluster, config.group)
            if store is None
            else StoreCommits(store, memory_first=config.broadcasting)
        )
        member = self._member = GroupMember(config, cluster, commits, workers_for)
        member.on_ended = self._ended.set
        for event in self._early_events:
            member.tell(event)
        return member

    def _tell(self, event: ConsumerEvent) -> None:
        """Pass on what the store tells, which begins before there is a member."""
        if self._member is None:
            self._early_events.append(event)
        else:
            self._member.tell(event)

    def _running(self) -> GroupMember:
        if os.getpid() != self._pid:
            raise ConsumerClosed("this consumer was made before a fork; make a new one in the child process")
        if self._member is None or self._member.state is not ConsumerState.RUNNING:
            raise ConsumerClosed(f"{self!r} is not running")
        return self._member

    def _raise_failure(self) -> None:
        if self._member is not None and self._member.failure is not None:
            raise RocketError(
                f"consumer {self.config.group!r} failed: {self._member.failure!r}"
            ) from self._member.failure


class PushConsumer(_Face):
    """Receives the messages of a group: each goes to the listener of its topic, on one of `consume_threads` threads.

        with PushConsumer("orders-app", name_server="127.0.0.1:9876") as consumer:
            consumer.subscribe("orders", handle)
            consumer.join()

    A listener that returns has consumed the message; one that raises gets it again later.
    """

    def start(self) -> Self:
        """Start consuming; returns when the queues that are ours were taken on.

        Raises:
            ConnectError: no name server could be reached; its text names each.
            OffsetStoreError: the offset store cannot be opened.
            ConsumerClosed: started before.
        """
        member = self._create(self._workers_for)
        try:
            self._run(self._start(member), START_TIMEOUT_S)
        except BaseException:
            self._give_up(member)
            raise
        return self

    async def _start(self, member: GroupMember) -> None:
        for subscription, listener in self._subscriptions.values():
            await member.subscribe(subscription, listener)
        await member.start()

    def _give_up(self, member: GroupMember) -> None:
        try:
            self._run(member.close(0), 5.0)
        except Exception:  # the error that ended the start is the one to know
            log.info("consumer=%s not closed in order after its start failed", self.config.group, exc_info=True)
        assert self._cluster is not None
        self._cluster.close()
        self._final_state = ConsumerState.CLOSED
        self._ended.set()

    def _workers_for(self, is_async: bool, outcome: Outcome) -> Workers:
        config = self.config
        if is_async:
            return AsyncWorkers(config.consume_threads, outcome, config.consume_timeout_s)
        assert self._cluster is not None
        return ThreadWorkers(config.consume_threads, outcome, config.consume_timeout_s, self._cluster.loop)

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        assert self._cluster is not None
        return self._cluster.run(work, timeout_s)

    def subscribe(self, topic: str, listener: MessageListener, selector: str = "*") -> None:
        """Have `listener` called with the messages of `topic`; before or after `start()`.

        `listener`: a function, plain or `async def`, of one message; of a list of messages when `listener_batch_size`
        is above 1. A second parameter, if it needs one, receives the `ConsumeContext`. What it returned from is
        consumed; what it raises for comes again, as it does for `ConsumeResult.RETRY`, `Retry` and `Suspend`.

        `selector`: `"*"`, `"tagA || tagB"`, or `sql("price > 5")`. One listener per topic: a second call replaces it.
        All members of a group must subscribe alike: the broker keeps one subscription per group and topic.

        Raises:
            ConfigError: topic, selector or listener is not what it must be.
        """
        checked = self._checked(topic, listener, selector)
        self._subscriptions[checked[0].topic] = checked
        if self._member is not None:
            self._run(self._running().subscribe(*checked), START_TIMEOUT_S)

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving `topic`; its offsets are stored first."""
        name = wrap(self.config.namespace, topic)
        self._subscriptions.pop(name, None)
        if self._member is not None:
            self._run(self._running().unsubscribe(name), START_TIMEOUT_S)

    def pause(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull no more from `queues`, or from all; what is cached is still consumed."""
        member, chosen = self._running(), None if queues is None else list(queues)
        self._run(_on_loop(member.pause, chosen), 5.0)

    def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull again from `queues`, or from all."""
        member, chosen = self._running(), None if queues is None else list(queues)
        self._run(_on_loop(member.resume, chosen), 5.0)

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return where each queue this member holds stands."""
        return self._run(_on_loop(self._running().progress), 5.0)

    def reset_offsets(
        self,
        topic: str,
        to: To,
        queues: Iterable[MessageQueue] | None = None,
    ) -> dict[MessageQueue, int]:
        """Consume `topic` from another place: `"earliest"`, `"latest"`, a time, or `{queue: offset}`.

        `"first"` and `"last"` mean the same two; a time is an aware datetime, or its text.

        Only queues this member holds move (of them, only `queues` when given). Returns the new offsets, when durable.
        An offset its broker has no message for is followed by the broker's correction, with its event.

        Raises:
            ConfigError: `to` is none of these, or a queue named is not held by this member. Nothing has moved.
        """
        member = self._running()
        chosen = None if queues is None else list(queues)
        name = wrap(self.config.namespace, topic)
        return self._run(_reset(member, name, to, chosen), START_TIMEOUT_S)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until `close()`, Ctrl-C or SIGTERM (in the main thread), or for `timeout_s`.

        Raises:
            RocketError: the consumer failed; the text says why.
        """
        try:
            with _stop_on_sigterm(self._ended):
                self._wait(timeout_s)
        except KeyboardInterrupt:
            return
        self._raise_failure()

    def _wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended.is_set():
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            self._ended.wait(min(left, 3600.0))

    def close(self, timeout_s: float | None = None) -> None:
        """Stop pulling, let running listeners finish for up to `timeout_s`, store offsets, leave the group.

        Safe to call twice.

        Raises:
            RocketError: the consumer had failed before; the text says why.
        """
        if self._final_state is not None or self._member is None or os.getpid() != self._pid:
            self._final_state = self._final_state or ConsumerState.CLOSED
            self._ended.set()
            return
        wait_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        member, cluster = self._member, self._cluster
        assert cluster is not None
        try:
            self._run(member.close(wait_s), wait_s + 15.0)
        finally:
            self._final_state = member.state if member.state is ConsumerState.FAILED else ConsumerState.CLOSED
            cluster.close()
            self._ended.set()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self if self._member is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except RocketError:
            if error is None:
                raise


class AsyncPushConsumer(_Face):
    """`PushConsumer` for asyncio: `async def` listeners run on the caller's loop.

    async with AsyncPushConsumer("orders-app", name_server="127.0.0.1:9876") as consumer:
        await consumer.subscribe("orders", handle)
        await consumer.join()
    """

    async def start(self) -> Self:
        """Start consuming; see `PushConsumer.start`."""
        own = asyncio.get_running_loop()

        def workers_for(is_async: bool, outcome: Outcome) -> Workers:
            config = self.config
            if is_async:
                return AsyncWorkers(config.consume_threads, outcome, config.consume_timeout_s, own)
            assert self._cluster is not None
            return ThreadWorkers(config.consume_threads, outcome, config.consume_timeout_s, self._cluster.loop)

        member = await asyncio.to_thread(self._create, workers_for)

        async def begin() -> None:
            for subscription, listener in self._subscriptions.values():
                await member.subscribe(subscription, listener)
            await member.start()

        try:
            await self._run(begin())
        except BaseException:
            try:
                await self.close(0)
            except Exception:  # the error that ended the start is the one to know
                log.info("consumer=%s not closed in order after its start failed", self.config.group, exc_info=True)
            raise
        return self

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._cluster is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._cluster.loop))

    async def subscribe(self, topic: str, listener: MessageListener, selector: str = "*") -> None:
        """Have `listener` called with the messages of `topic`; see `PushConsumer.subscribe`."""
        checked = self._checked(topic, listener, selector)
        self._subscriptions[checked[0].topic] = checked
        if self._member is not None:
            await self._run(self._running().subscribe(*checked))

    async def unsubscribe(self, topic: str) -> None:
        """Stop receiving `topic`; its offsets are stored first."""
        name = wrap(self.config.namespace, topic)
        self._subscriptions.pop(name, None)
        if self._member is not None:
            await self._run(self._running().unsubscribe(name))

    async def pause(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull no more from `queues`, or from all."""
        await self._run(_on_loop(self._running().pause, None if queues is None else list(queues)))

    async def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull again from `queues`, or from all."""
        await self._run(_on_loop(self._running().resume, None if queues is None else list(queues)))

    async def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return where each queue this member holds stands."""
        return await self._run(_on_loop(self._running().progress))

    async def reset_offsets(
        self,
        topic: str,
        to: To,
        queues: Iterable[MessageQueue] | None = None,
    ) -> dict[MessageQueue, int]:
        """Consume `topic` from another place; see `PushConsumer.reset_offsets`."""
        chosen = None if queues is None else list(queues)
        return await self._run(_reset(self._running(), wrap(self.config.namespace, topic), to, chosen))

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait until `close()`, or for `timeout_s`. Raises RocketError when the consumer failed."""
        ended = asyncio.Event()
        own = asyncio.get_running_loop()
        if self._member is not None:
            before = self._member.on_ended

            def tell() -> None:
                before()
                own.call_soon_threadsafe(ended.set)

            self._member.on_ended = tell
        if not self._ended.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await ended.wait()
            except TimeoutError:
                pass
        self._raise_failure()

    async def close(self, timeout_s: float | None = None) -> None:
        """Stop in the order that loses nothing; see `PushConsumer.close`."""
        if self._final_state is not None or self._member is None or self._cluster is None:
            self._final_state = self._final_state or ConsumerState.CLOSED
            self._ended.set()
            return
        wait_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(wait_s + 15.0):
                await self._run(self._member.close(wait_s))
        finally:
            failed = self._member.state is ConsumerState.FAILED
            self._final_state = ConsumerState.FAILED if failed else ConsumerState.CLOSED
            await asyncio.to_thread(self._cluster.close)
            self._ended.set()
        self._raise_failure()

    async def __aenter__(self) -> Self:
        return self if self._member is not None else await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except RocketError:
            if error is None:
                raise


async def _on_loop(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


async def _reset(
    member: GroupMember, topic: str, to: To, queues: list[MessageQueue] | None
) -> dict[MessageQueue, int]:
    where = check_to(to)
    held = set(member.assignments.held(topic))
    if not held:
        topics = sorted(member.group.subscriptions.topics())
        raise ConfigError(f"no queue of topic {topic!r} is held by this member; it holds {topics}")
    exact = where if isinstance(where, dict) else {}
    strangers = {*(queues or ()), *exact} - held
    if strangers:
        shown = min(map(str, strangers))
        raise ConfigError(f"{shown} is not held by this member; it holds {', '.join(map(str, sorted(held)))}")
    chosen = held if queues is None else set(queues)
    if isinstance(where, dict):
        targets = {queue: offset for queue, offset in where.items() if queue in chosen}
    else:
        targets = await offsets_at(member.group.cluster, where, chosen, groups=(member.group.name,))
    return await member.reset(topic, targets)


@contextmanager
def _stop_on_sigterm(ended: _End) -> Iterator[None]:
    """While the main thread joins, SIGTERM ends the wait, so that `with` can close in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
