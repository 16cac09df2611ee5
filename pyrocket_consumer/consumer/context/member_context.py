"""The context that all parts of a member share: settings, cluster, subscriptions, events, tasks.

It does not know the parts.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.context.events import LIMITED_KINDS, EventLimiter, Events
from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.consumer.listener import Subscriptions
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue, PullResponse, retry_topic
from pyrocket_consumer.protocol.bodies import ConsumerData
from pyrocket_consumer.text import logger

log = logger("consumer")

THROTTLE_S = 10.0
"""`emit_throttled` emits the same event once in this time."""


MAX_THROTTLED = 1000
"""The number of throttled events that are remembered. At this number the older half is forgotten."""


class MemberEvents:
    """What the parts of a member report to it. The member overrides all methods; here they do nothing."""

    def offset_moved(self, queue: MessageQueue, pull_offset: int, response: PullResponse) -> None:
        """Follow the response to a pull, which moves the queue. Its pull loop waits."""

    def late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        """Follow a reset in the response to a pull that nobody waits for. The broker sends it only once."""

    def reset_waiting(self, queue: MessageQueue) -> None:
        """Pull from the master next. It has ignored a commit, because the next pull of the queue gets a reset."""

    def claim_lost(self, queue: MessageQueue, why: str) -> None:
        """End a queue that another member has claimed, or that was reset in the database."""

    def unexpected_error(self, what: str, error: BaseException) -> None:
        """Fail, because of an error that must not happen."""


class MemberContext:
    """The consumer group as one of its members sees it, and the things that all parts of the member use."""

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
        lock_clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.name = config.group
        self.cluster = cluster
        self.loop = cluster.loop
        self.client_id = cluster.client_id
        self.rng = rng or random.Random()
        self.subscriptions = Subscriptions(None if config.broadcasting else retry_topic(self.name), self.now_ms)
        self.events = Events(config.on_event, self.name)
        self.tasks = Tasks(self.loop, self.report_unexpected)
        self.closing = False
        """True once the member closes. No queue begins after that."""
        self.rebalance_wanted = asyncio.Event()
        """Set by any part that has a reason for a new rebalance round."""
        self.member = MemberEvents()
        self.lock_clock = lock_clock or cluster.loop.time
        """Measures the age of a broker lock. It includes the time that the machine was suspended."""
        self._wall_clock = wall_clock
        self._limiter = EventLimiter(cluster.loop.time)
        self._emitted_at: dict[tuple[EventKind, str], float] = {}

    def now_ms(self) -> int:
        """Return the wall-clock time in milliseconds."""
        return int(self._wall_clock() * 1000)

    def heartbeat_data(self) -> ConsumerData:
        """Return the part of a heartbeat about this group."""
        where = {"first": "CONSUME_FROM_FIRST_OFFSET", "last": "CONSUME_FROM_LAST_OFFSET"}
        return ConsumerData(
            self.name,
            message_model=str(self.config.message_model).upper(),
            consume_from_where=where.get(str(self.config.consume_from), "CONSUME_FROM_TIMESTAMP"),
            subscriptions=tuple(self.subscriptions.all()),
        )

    # --- events

    def emit(
        self,
        kind: EventKind,
        text: str,
        queue: MessageQueue | None = None,
        facts: Mapping[str, object] | None = None,
        level: int = logging.INFO,
        error: BaseException | None = None,
    ) -> None:
        """Emit an event: count it, log it, and pass it to `on_event`. Any thread.

        Of a flood, only some are logged or passed on, with the number of the suppressed ones.
        """
        suppressed, facts = self._limiter.admit(kind, queue), facts or {}
        if suppressed is None and kind in LIMITED_KINDS:
            self.events.count(kind)
            return
        if suppressed and kind in LIMITED_KINDS:
            facts = {**facts, "left_out": suppressed}
        event = ConsumerEvent(kind, text, queue, facts)
        if suppressed is not None:
            more = (
                f" ({suppressed} similar events are not in the log)" if suppressed and kind not in LIMITED_KINDS else ""
            )
            log.log(level, "group=%s %s%s", self.name, event, more, exc_info=error)
        self.events.emit(event)

    def emit_throttled(self, kind: EventKind, text: str, queue: MessageQueue | None = None) -> None:
        """Emit a warning about an operation that is retried. Repetitions within `THROTTLE_S` go to the debug log."""
        key = (kind, str(queue.broker_name if queue else text[:40]))
        now = self.loop.time()
        if now - self._emitted_at.get(key, -THROTTLE_S) < THROTTLE_S:
            log.debug("group=%s %s %s", self.name, kind, text)
            return
        if len(self._emitted_at) >= MAX_THROTTLED:  # servers choose the names, so there is no limit otherwise
            self._emitted_at = dict(list(self._emitted_at.items())[MAX_THROTTLED // 2 :])
        self._emitted_at[key] = now
        self.emit(kind, text, queue, level=logging.WARNING)

    def report_unexpected(self, what: str, error: BaseException) -> None:
        """Report an error that must not happen. It fails the member."""
        self.member.unexpected_error(what, error)

    # --- background work

    def start_in_background(self, work: Callable[[], Awaitable[object]], what: str) -> None:
        """Begin a step that nobody waits for. A `RocketError` of it becomes an event."""

        async def work_and_report() -> None:
            try:
                await work()
            except RocketError as error:
                self.emit_throttled(EventKind.BROKER_UNREACHABLE, f"{what}: {error}")

        self.tasks.begin(work_and_report(), what)

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work` on the I/O thread. Do nothing if that has ended, because a listener may outlive it. Any thread."""
        try:
            self.loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass
