"""The public consumers: a blocking one, and one for asyncio. Both are thin layers over one `GroupMember`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from pyrocket_consumer.cluster.client import NotCopied
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.cluster.offset_lookup import (
    To,
    check_to,
    fetch_first_and_last,
    fetch_offsets_at,
    nearest_available,
)
from pyrocket_consumer.config import (
    ConsumerConfig,
    ConsumerOptions,
    NameServers,
    check_config,
    check_queues,
    check_range,
    check_topic,
)
from pyrocket_consumer.consumer.assignment.held_queue import QueueProgress
from pyrocket_consumer.consumer.dispatch.retry import ListenerReports
from pyrocket_consumer.consumer.dispatch.workers import AsyncWorkers, ThreadWorkers, Workers
from pyrocket_consumer.consumer.lifecycle import (
    CLOSE_MARGIN_S,
    ConsumerLifecycle,
    Terminated,
    terminate,
    terminate_loop,
    unwatch_sigterm,
    watch_sigterm,
)
from pyrocket_consumer.consumer.listener import Listener, MessageListener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.errors import ClientClosed, ConfigError, RequestTimeout, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, Subscription
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.subscription import check_expression, parse_subscription
from pyrocket_consumer.text import safe_repr
from pyrocket_consumer.transport.io_thread import IoCall, Latch

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
"""The timeout of blocking calls that send requests to brokers."""

INTERRUPTED_WAIT_S = 3.0
"""How long an interrupted `start()` or `close()` still waits for offsets to be stored, or for its clean-up."""


class Sql(str):
    """An SQL92 expression, which `sql("price > 5")` creates."""


def sql(expression: str) -> Sql:
    """Select messages by their properties: `consumer.subscribe("orders", handle, sql("region = 'eu' AND price > 5"))`.

    The broker needs `enablePropertyFilter=true`. Without it, `start()` fails.

    Raises:
        ConfigError: the expression is not a text.
    """
    if not isinstance(expression, str):
        raise ConfigError(f"sql({safe_repr(expression)}) is not allowed; give a text, for example sql('price > 5')")
    return Sql(expression)


def _subscription(topic: str, selector: str) -> Subscription:
    check_topic(topic)
    if not isinstance(selector, str):
        raise ConfigError(f"selector={safe_repr(selector)} is not allowed; use '*', 'tagA || tagB' or sql('price > 5')")
    if isinstance(selector, Sql):
        if not selector.strip():
            raise ConfigError("the SQL92 expression is empty; give one like sql('price > 5'), or subscribe without it")
        check_expression(selector)
        return Subscription(topic, str(selector), expression_type="SQL92")
    return parse_subscription(topic, selector)


class _BaseConsumer(NotCopied):
    """The parts that the blocking and the asyncio consumer share."""

    def __init__(
        self,
        group: str | None = None,
        *,
        name_server: NameServers | None = None,
        config: ConsumerConfig | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Check the options. The consumer opens and connects nothing before the start.

        Args:
            group (–; 1–120 of a-zA-Z0-9_-%|): the consumer group
            config (–; a ConsumerConfig): all options in one, instead of single ones
            name_server (NAMESRV_ADDR; host:port, several joined by ;, or a list): the name servers to ask for routes;
                one that responds is enough
            message_model ("clustering"; "broadcasting"): give each message to one member, or to every member
            orderly (False): run one listener call of a queue at a time, in the order of offsets
            order_by (–; "sharding_key", a callable; orderly only): order by key instead. Messages of one key run one at
                a time, in the order of offsets, and other keys run at the same time. A callable takes a message and
                returns a hashable key; see docs/order.md
            consume_from ("last"; "first", an aware datetime or its text): where a group begins that has no offset for a
                queue
            consume_threads (20; 1–1000): the number of workers for plain listeners, and of concurrent calls for async
                def ones
            listener_batch_size (1; 1–1024): above 1 the listener takes a list of at most that many messages of one
                pull. An orderly queue fills the list from all its waiting messages
            pull_batch_size (32; 1–1024, or {topic: n}): the most messages of one pull. Brokers return at most 32, and
                256 KiB, by default
            max_cached_messages (1000; 1–1 000 000, or {topic: n}): the number of unfinished messages of a queue at
                which pulling pauses
            max_cached_bytes (100 MiB; bytes, or {topic: n}): the memory for unfinished messages of the whole consumer,
                or of a topic. A queue is pulled while it has fewer unfinished bytes than are free, or while it has none
                and its turn is next. Running listener calls decompress at most as many bytes again, or one body
            max_body_bytes (64 MiB; 1024–2³⁰, bytes): the largest body after decompression. A message with a larger one
                moves to %DLQ% at once
            max_span (2000; 1–65535): the largest distance between the oldest unfinished offset and the newest pulled
                one. It does not apply to orderly consumption, except with order_by
            commit_interval_s (5; 0.01–3600 s): the time between two commits of offsets
            rebalance_interval_s (20; 0.05–3600 s): the time between two checks of the assignment, if no member comes or
                goes
            max_reconsume_times (16; orderly: no limit; 0–2³¹−1): the number of failed retries after which a message
                moves to %DLQ%
            auto_commit (True; orderly only): with False only ConsumeResult.COMMIT commits, and ROLLBACK redelivers the
                messages since then. Commit well before max_cached_messages wait for it
            consume_timeout_s (900; 0.05–604 800 s): the time after which a running listener call is reported as stuck.
                Its message is sent back, unless the consumer is orderly or broadcasting
            start_wait_s (5; 0–600 s): how long start() waits for queues with slow brokers. Such queues begin later
            shutdown_timeout_s (20; 0–86400 s): how long close() waits for listener calls
            pull_hold_s (15; 0.05–300 s): how long a broker may hold a pull that finds no message
            pull_retry_delay_s (1; 0.001–300 s): the pause after a failed pull
            allocation ("average"; "circle", "hash", in_machine_rooms(…), a callable): the strategy that divides the
                queues. All members of a group must use the same one
            offset_store (by model; an OffsetStore, a DatabaseOffsets): where offsets are kept. The default is brokers
                for clustering, and the local file for broadcasting
            offset_store_dir (ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR, ~/.rocketmq_offsets; a directory): the parent
                directory of the local file, which is <dir>/<client id>/<group>/offsets.json
            durability ("fsync"; "fsync", "process", "checkpoint"): the events that a stored offset of the local file
                survives. With "fsync" and "checkpoint" it survives a power failure, and with "process" the end of the
                process. Java clients can read each offset of "checkpoint"
            on_unreadable_store ("backup"; "raise", "backup", "start_over"): the reaction to a damaged local file. With
                "backup" the store reads offsets.json.bak, and raises if that is damaged, too. With "start_over" it then
                begins with the journal only. With "raise" it raises at once
            remote_reset ("accept"; "accept", "refuse"): whether brokers, admins and other members may move the offsets
                of this member; see docs/resets.md
            reset_record_interval_s (60; 0.05–86400 s): broadcasting: the time between two checks for a recorded reset
                that did not reach this member
            server_messages (True): whether an admin may have a message consumed by a listener of this member, through a
                broker
            on_event (–; a callable): receives every ConsumerEvent, on a thread of its own; see docs/events.md
            client_ip (detected; printable text): the first part of the client id
            instance_name ("DEFAULT"; printable text): the second part of the client id; if you set it, give each
                process its own
            unit_name (–; printable text): the unit name, as in the Java client
            namespace (–; 1–127 of a-zA-Z0-9_-%|): the prefix of all topics and groups, as in the Java client
            access_key (–; text): the account that signs every request
            secret_key (–; text): the secret of the account; never shown, and not pickled
            security_token (–; text): the token of a temporary account
            tls (False; True, an ssl.SSLContext): encrypt connections; True verifies certificates with the authorities
                of the system
            allowed_addresses (–; host, host:port, network, or a list): the only brokers that the client connects to,
                and sends signed requests to; the default allows all
            call_timeout_s (3; 0.01–600 s): the deadline of a request
            connect_timeout_s (3; 0.01–600 s): the deadline of a connection attempt
            heartbeat_interval_s (30; 0.05–3600 s): the time between two heartbeats to a broker
            route_refresh_interval_s (30; 0.05–3600 s): the time between two requests for the routes of topics
            max_frame_bytes (16 MiB; 65536–2³⁰, bytes): the largest frame to send or receive. A server that sends a
                larger one loses its connection. Servers accept 16 MiB by default

        Raises:
            ConfigError: an option is unknown, or its value is not allowed; the text names the allowed values.
        """
        if config is not None:
            config = check_config(ConsumerConfig, config, name_server, options, group)
        else:
            if group is None:
                raise ConfigError("a consumer needs its group: PushConsumer('orders-app', …)")
            config = ConsumerConfig.from_options({"group": group, "name_server": name_server, **options})
        self.config = config
        self._subscriptions: dict[str, tuple[Subscription, Listener]] = {}
        self._lifecycle = ConsumerLifecycle(config, self._workers_for)
        self._own_loop: asyncio.AbstractEventLoop | None = (
            None  # runs `async def` listeners; None for a separate thread
        )
        self._async_workers: AsyncWorkers | None = None
        self._missed_subscription = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group={self.config.group!r}, state={self.state.value!r})"

    @property
    def state(self) -> ConsumerState:
        """The state of the consumer. If it is FAILED, `join` and `close` raise the cause."""
        return self._lifecycle.state

    @property
    def client_id(self) -> str | None:
        """The id of this member in its group, None before the start."""
        return self._lifecycle.cluster.client_id if self._lifecycle.cluster is not None else None

    def _check_subscription(
        self, topic: str, listener: MessageListener, selector: str
    ) -> tuple[Subscription, Listener]:
        store = getattr(listener, "offset_store", None)
        if isinstance(store, DatabaseOffsets) and store is not self.config.offset_store:
            raise ConfigError(
                f"the listener {getattr(listener, '__qualname__', '')} is one of {store!r}.exactly_once, and this "
                "consumer has other offsets; pass that store to the consumer as offset_store"
            )
        subscription = _subscription(wrap(self.config.namespace, topic), selector)
        return subscription, Listener.of(listener, self.config.listener_batch_size)

    @property
    def _is_open(self) -> bool:
        return self._lifecycle.has_begun and not self._lifecycle.closed.is_set()

    def _finish_start(self, lifecycle: ConsumerLifecycle, starting: IoCall[None]) -> None:
        """Raise the error of a start that has ended, or that has not ended in time."""
        if not starting.is_set():
            raise RequestTimeout("starting", "the I/O thread", lifecycle.start_timeout_s)
        try:
            starting.result()
        except ClientClosed:
            self._raise_failure()
            raise ClientClosed("the consumer was closed while it started") from None

    def _must_clean_up(self, lifecycle: ConsumerLifecycle, error: BaseException) -> bool:
        """Close after a failed start, unless the caller of `close()` does so. Return whether to wait for the end."""
        if isinstance(error, ClientClosed) and lifecycle.is_ending:
            return False
        lifecycle.close(0)
        return True

    def _start_failed(self, lifecycle: ConsumerLifecycle, error: BaseException) -> None:
        """Allow another `start()` after a failed one has cleaned up, unless a caller has closed the consumer."""
        if lifecycle.closed.is_set() and self._lifecycle is lifecycle and not isinstance(error, ClientClosed):
            self._lifecycle = ConsumerLifecycle(self.config, self._workers_for)

    def _check_unstarted(self) -> None:
        if self._lifecycle.has_begun:
            raise ClientClosed(f"{self!r} cannot be started again; make a new one")

    def _check_not_forked(self) -> None:
        if self._lifecycle.is_forked:
            raise ClientClosed("this consumer was started before a fork; make a new one in the child process")

    def _check_started(self) -> None:
        self._check_not_forked()
        if not self._lifecycle.has_begun:
            raise ClientClosed(f"{self!r} is not started; call start() before join(), or use `with`")
        if not self._subscriptions and not self._missed_subscription and self._lifecycle.member is not None:
            self._missed_subscription = True
            text = "no topic is subscribed to, so no message will arrive; call subscribe() first"
            self._lifecycle.member.context.emit(EventKind.NOTHING_SUBSCRIBED, text, level=logging.WARNING)

    def _running_member(self) -> GroupMember:
        member = self._lifecycle.member
        self._check_not_forked()
        self._raise_failure()
        if member is None or member.state is not ConsumerState.RUNNING:
            raise ClientClosed(f"{self!r} is not running; call start() first, and after close() create a new one")
        return member

    def _subscribable_member(self) -> GroupMember:
        """Return the member, even while it starts, because topics subscribed to meanwhile are consumed, too."""
        member = self._lifecycle.member
        if member is not None and member.state is ConsumerState.CREATED and not self._lifecycle.is_ending:
            return member
        return self._running_member()

    def _workers_for(self, is_async: bool, reports: ListenerReports) -> Workers:
        config = self.config
        if is_async:
            workers = AsyncWorkers(config.consume_threads, reports, config.consume_timeout_s, self._own_loop)
            self._async_workers = workers
            return workers
        return ThreadWorkers(config.consume_threads, reports, config.consume_timeout_s, self._lifecycle.loop)

    def _start_close(self, timeout_s: float | None) -> float | None:
        """Begin to close. Return how long to wait for the end, None if the caller would wait for itself."""
        wait_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        check_range("timeout_s", wait_s, 0, 86400)
        if self._lifecycle.is_forked or sys.is_finalizing():  # the parent owns everything, or all threads have stopped
            return None
        self._lifecycle.close(wait_s)
        return None if self._lifecycle.needs_caller else wait_s + CLOSE_MARGIN_S

    def _close_timeout(self, timeout_s: float) -> RequestTimeout:
        self._lifecycle.abandon()
        return RequestTimeout("closing", "the I/O thread", timeout_s)

    def _raise_failure(self) -> None:
        member = self._lifecycle.member
        if member is not None and member.failure is not None:
            raise RocketError(f"consumer {self.config.group!r} failed: {member.failure!r}") from member.failure

    def _on_sigterm(self, notify: Callable[[], None]) -> None:
        if not self._lifecycle.closed.is_set():
            watch_sigterm(self, notify)

    def _finish_close(self) -> None:
        """Raise, once, the failure of the consumer or the error of its close."""
        unwatch_sigterm(self)
        if self._lifecycle.take_failure():
            self._raise_failure()
        if (error := self._lifecycle.take_error()) is not None:
            raise error


class PushConsumer(_BaseConsumer):
    """Receives the messages of a group. The listener of each topic runs on one of `consume_threads` threads.

        with PushConsumer("orders-app", name_server="127.0.0.1:9876") as consumer:
            consumer.subscribe("orders", handle)
            consumer.join()

    If the listener returns, the message is consumed. If it raises, the message is redelivered later.
    """

    def start(self) -> Self:
        """Start consuming. Return when the queues that the group assigns to this member have begun.

        Raises:
            ConnectError: no name server is reachable; the text names each. A failed start leaves nothing behind, so
                you may try again.
            OffsetStoreError: the offset store cannot be opened.
            ClientClosed: the consumer was started before, or is closed.
            RocketError: the consumer failed; the text has the cause.
        """
        self._check_unstarted()
        lifecycle = self._lifecycle
        try:
            starting = lifecycle.start(self._subscriptions)
            starting.wait(lifecycle.start_timeout_s)
            self._finish_start(lifecycle, starting)
        except BaseException as error:
            if self._must_clean_up(lifecycle, error):
                lifecycle.closed.wait(INTERRUPTED_WAIT_S)
                self._start_failed(lifecycle, error)
            raise
        return self

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        assert self._lifecycle.cluster is not None
        try:
            return self._lifecycle.cluster.run(work, timeout_s)
        except ClientClosed:
            self._raise_failure()
            raise

    def subscribe(self, topic: str, listener: MessageListener, selector: str = "*") -> None:
        """Call `listener` with the messages of `topic`, before or after `start()`.

        `listener` is a function, plain or `async def`, of one message, or of a list of messages if
        `listener_batch_size` is above 1. A required second parameter receives the `ConsumeContext`. If the listener
        returns, the messages are consumed. If it raises, or returns `ConsumeResult.RETRY`, `Retry` or `Suspend`, they
        are redelivered.

        `selector` is `"*"`, `"tagA || tagB"`, or `sql("price > 5")`. A topic has one listener, so a second call
        replaces the first. All members of a group must subscribe alike, because the broker keeps one subscription per
        group and topic.

        Raises:
            ConfigError: topic, selector or listener is not allowed; the text names the allowed values.
        """
        checked = self._check_subscription(topic, listener, selector)
        self._subscriptions[checked[0].topic] = checked
        if self._lifecycle.member is not None:
            self._run(self._subscribable_member().subscribe(*checked), CALL_TIMEOUT_S)
            self._raise_failure()

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving `topic`, and return when its running calls have ended and its offsets are stored.

        It waits a few seconds at most for running calls, as a rebalance does. Within a listener it returns at once, and
        the topic ends after the listener has returned.
        """
        name = wrap(self.config.namespace, check_topic(topic))
        self._subscriptions.pop(name, None)
        if self._lifecycle.member is not None:
            wait = not self._lifecycle.needs_caller
            self._run(self._subscribable_member().unsubscribe(name, wait=wait), CALL_TIMEOUT_S)

    def pause(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Stop pulling from `queues`, or from all. The consumer still delivers the messages that it has received.

        Raises:
            ConfigError: `queues` contains other values than `MessageQueue`s; use those of `progress()`.
        """
        member, chosen = self._running_member(), _queues(queues)
        self._run(_call(member.assignments.pause, chosen), 5.0)

    def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull again from `queues`, or from all."""
        member, chosen = self._running_member(), _queues(queues)
        self._run(_call(member.assignments.resume, chosen), 5.0)

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return the progress of each queue that this member holds."""
        return self._run(_call(self._running_member().assignments.progress), 5.0)

    def reset_offsets(
        self,
        topic: str,
        to: To,
        queues: Iterable[MessageQueue] | None = None,
    ) -> dict[MessageQueue, int]:
        """Continue `topic` at other offsets: `"earliest"`, `"latest"`, a time, or `{queue: offset}`.

        `"first"` is the same as `"earliest"`, and `"last"` as `"latest"`. A time is an aware datetime, or its text.

        Only queues that this member holds move; with `queues`, only those of them. Return the new offsets once they are
        durable. An offset outside of the queue's range becomes the nearest one within it.

        Raises:
            ConfigError: `to` has another value, or this member does not hold one of the queues. Nothing has moved.
        """
        member = self._running_member()
        chosen = _queues(queues)
        name = wrap(self.config.namespace, check_topic(topic))
        return self._run(_reset(member, name, to, chosen), CALL_TIMEOUT_S)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the consumer's end, or for `timeout_s`. Return whether it has ended.

        In the main thread, without a timeout, Ctrl-C and SIGTERM end the wait. The code after it, usually the end of a
        `with`, closes the consumer. With a timeout, Ctrl-C raises KeyboardInterrupt, and SIGTERM raises
        SystemExit(143), so that a loop around `join` ends. Between two calls of `join` SIGTERM does the same, until the
        consumer is closed. A SIGTERM handler of the program stays in place.

        Raises:
            RocketError: the consumer failed; the text has the cause.
            ClientClosed: the consumer is not started.
        """
        self._check_started()
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0, 86400)
        try:
            self._on_sigterm(terminate)
            self._lifecycle.ended.wait(timeout_s)
        except (KeyboardInterrupt, Terminated):
            if timeout_s is not None:
                raise
        self._raise_failure()
        return self._lifecycle.ended.is_set()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop pulling, store offsets, let listeners finish for up to `timeout_s`, store again, leave the group.

        It takes at most a few seconds longer than `timeout_s`. A second call waits for the same end. A listener may
        close its consumer. Then the call returns at once, and the close waits for the listener, whose message counts if
        it returns. If the wait is interrupted, for example by Ctrl-C, offsets are stored first, and the close continues
        in the background.

        Raises:
            RocketError: the consumer had failed before; the text has the cause.
        """
        wait_s = self._start_close(timeout_s)
        if wait_s is None:
            return
        try:
            is_closed = self._lifecycle.closed.wait(wait_s)
        except BaseException:
            self._lifecycle.stored.wait(INTERRUPTED_WAIT_S)
            raise
        if not is_closed:
            raise self._close_timeout(wait_s)
        self._finish_close()

    def __enter__(self) -> Self:
        return self if self._is_open else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except RocketError:
            if error is None:
                raise


class AsyncPushConsumer(_BaseConsumer):
    """`PushConsumer` for asyncio: `async def` listeners run on the caller's loop.

    async with AsyncPushConsumer("orders-app", name_server="127.0.0.1:9876") as consumer:
        await consumer.subscribe("orders", handle)
        await consumer.join()
    """

    async def start(self) -> Self:
        """Start consuming; see `PushConsumer.start`."""
        self._check_unstarted()
        lifecycle, self._own_loop = self._lifecycle, asyncio.get_running_loop()
        try:
            starting = lifecycle.start(self._subscriptions)
            await starting.wait_async(lifecycle.start_timeout_s)
            self._finish_start(lifecycle, starting)
        except BaseException as error:
            if self._must_clean_up(lifecycle, error):
                await _finish_shielded(lifecycle.closed.wait_async(INTERRUPTED_WAIT_S))
                self._start_failed(lifecycle, error)
            raise
        return self

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._lifecycle.cluster is not None
        try:
            return await self._lifecycle.cluster.run_async(work)
        except ClientClosed:
            self._raise_failure()
            raise ClientClosed("the consumer was closed while the call waited") from None

    async def subscribe(self, topic: str, listener: MessageListener, selector: str = "*") -> None:
        """Call `listener` with the messages of `topic`; see `PushConsumer.subscribe`."""
        checked = self._check_subscription(topic, listener, selector)
        self._subscriptions[checked[0].topic] = checked
        if self._lifecycle.member is not None:
            await self._run(self._subscribable_member().subscribe(*checked))
            self._raise_failure()

    async def unsubscribe(self, topic: str) -> None:
        """Stop receiving `topic`; see `PushConsumer.unsubscribe`."""
        name = wrap(self.config.namespace, check_topic(topic))
        self._subscriptions.pop(name, None)
        if self._lifecycle.member is not None:
            await self._run(self._subscribable_member().unsubscribe(name, wait=not self._lifecycle.needs_caller))

    async def pause(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Stop pulling from `queues`, or from all; see `PushConsumer.pause`."""
        await self._run(_call(self._running_member().assignments.pause, _queues(queues)))

    async def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Pull again from `queues`, or from all."""
        await self._run(_call(self._running_member().assignments.resume, _queues(queues)))

    async def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return the progress of each queue that this member holds."""
        return await self._run(_call(self._running_member().assignments.progress))

    async def reset_offsets(
        self,
        topic: str,
        to: To,
        queues: Iterable[MessageQueue] | None = None,
    ) -> dict[MessageQueue, int]:
        """Continue `topic` at other offsets; see `PushConsumer.reset_offsets`."""
        chosen = _queues(queues)
        return await self._run(
            _reset(self._running_member(), wrap(self.config.namespace, check_topic(topic)), to, chosen)
        )

    async def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the consumer's end, or for `timeout_s`. Return whether it has ended; see `PushConsumer.join`.

        SIGTERM ends the wait as there, if the loop runs in the main thread. Ctrl-C cancels, as usual in `asyncio.run`.
        """
        self._check_started()
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0, 86400)
        ended, terminated = self._lifecycle.ended, Latch()
        self._on_sigterm(terminated.set)
        waits = [asyncio.ensure_future(end.wait_async(timeout_s)) for end in (ended, terminated)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self._on_sigterm(partial(terminate_loop, asyncio.get_running_loop()))
        if terminated.is_set() and timeout_s is not None:
            terminate()
        self._raise_failure()
        return ended.is_set()

    async def close(self, timeout_s: float | None = None) -> None:
        """Shut down without losing messages; see `PushConsumer.close`."""
        wait_s = self._start_close(timeout_s)
        if wait_s is None:
            return
        try:
            is_closed = await self._lifecycle.closed.wait_async(wait_s)
        except BaseException:
            await _finish_shielded(self._lifecycle.stored.wait_async(INTERRUPTED_WAIT_S))
            raise
        if not is_closed:
            raise self._close_timeout(wait_s)
        if self._async_workers is not None:
            await self._async_workers.wait_ended()
        self._finish_close()

    async def __aenter__(self) -> Self:
        return self if self._is_open else await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except RocketError:
            if error is None:
                raise


async def _finish_shielded(work: Coroutine[Any, Any, object]) -> None:
    """Run a short coroutine to its end, even if the caller is cancelled meanwhile."""
    doing = asyncio.ensure_future(work)
    while not doing.done():
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError:
            pass


def _queues(given: object) -> list[MessageQueue] | None:
    """Return the named queues, None for all."""
    return None if given is None else check_queues("queues", given)


async def _call(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


async def _reset(member: GroupMember, topic: str, to: To, queues: list[MessageQueue] | None) -> dict[MessageQueue, int]:
    where = check_to(to)
    held = set(member.assignments.held(topic))
    if not held:
        topics = sorted(member.context.subscriptions)
        raise ConfigError(
            f"no queue of topic {topic!r} is held by this member, which subscribes to {', '.join(topics) or 'no topic'}"
        )
    exact = where if isinstance(where, dict) else {}
    strangers = {*(queues or ()), *exact} - held
    if strangers:
        stranger = min(map(str, strangers))
        raise ConfigError(f"{stranger} is not held by this member; it holds {', '.join(map(str, sorted(held)))}")
    chosen = held if queues is None else set(queues)
    if isinstance(where, dict):
        ends = await fetch_first_and_last(member.context.cluster, chosen & where.keys())
        targets = {queue: nearest_available(where[queue], *its_ends) for queue, its_ends in ends.items()}
    else:
        targets = await fetch_offsets_at(member.context.cluster, where, chosen, groups=(member.context.name,))
    return await member.resets.move_held(targets, "requested by this program")
