"""What all parts of a member know: settings, cluster, subscriptions, events, tasks. It knows none of the parts."""

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
from pyrocket_consumer.consumer.context.subscriptions import Subscriptions
from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue
from pyrocket_consumer.protocol.bodies import ConsumerData
from pyrocket_consumer.text import logger

log = logger("consumer")

THROTTLE_S = 10.0
"""The same trouble is told once in this time."""


MAX_THROTTLED = 1000
"""How many troubles are remembered before half of them are forgotten."""


class MemberContext:
    """The consumer group as one of its members sees it."""

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
        self.subscriptions = Subscriptions.of_group(self.name, broadcasting=config.broadcasting, now_ms=self.now_ms)
        self.events = Events(config.on_event, self.name)
        self.tasks = Tasks(self.loop, self.report_unexpected)
        self.closing = False
        """The member is ending: no queue begins any more."""
        self.rebalance_wanted = asyncio.Event()
        """Set by whoever has a reason to look again at which queues are ours."""
        self.on_unexpected_error: Callable[[str, BaseException], None] = lambda what, error: None
        self.lock_clock = lock_clock or cluster.loop.time
        """Tells how old the broker's confirmation of a lock is, also when the machine slept meanwhile."""
        self._wall_clock = wall_clock
        self._limiter = EventLimiter(cluster.loop.time)
        self._emitted_at: dict[tuple[EventKind, str], float] = {}

    def now_ms(self) -> int:
        """Return the time of day."""
        return int(self._wall_clock() * 1000)

    def heartbeat_data(self) -> ConsumerData:
        """Return what heartbeats say of this group."""
        where = {"first": "CONSUME_FROM_FIRST_OFFSET", "last": "CONSUME_FROM_LAST_OFFSET"}
        return ConsumerData(
            self.name,
            message_model=str(self.config.message_model).upper(),
            consume_from_where=where.get(str(self.config.consume_from), "CONSUME_FROM_TIMESTAMP"),
            subscriptions=tuple(self.subscriptions.all()),
        )

    # --- telling the user

    def emit(
        self,
        kind: EventKind,
        text: str,
        queue: MessageQueue | None = None,
        facts: Mapping[str, object] | None = None,
        level: int = logging.INFO,
        error: BaseException | None = None,
    ) -> None:
        """Tell the user: one log line, one count, one event; of a flood some, with how many were not. Any thread."""
        left_out, facts = self._limiter.admit(kind, queue), facts or {}
        if left_out is None and kind in LIMITED_KINDS:
            self.events.count(kind)
            return
        if left_out and kind in LIMITED_KINDS:
            facts = {**facts, "left_out": left_out}
        event = ConsumerEvent(kind, text, queue, facts)
        if left_out is not None:
            more = f" ({left_out} like it are not in the log)" if left_out and kind not in LIMITED_KINDS else ""
            log.log(level, "group=%s %s%s", self.name, event, more, exc_info=error)
        self.events.emit(event)

    def emit_throttled(self, kind: EventKind, text: str, queue: MessageQueue | None = None) -> None:
        """Tell the user about something that is tried again, once in a while and not every time."""
        key = (kind, str(queue.broker_name if queue else text[:40]))
        now = self.loop.time()
        if now - self._emitted_at.get(key, -THROTTLE_S) < THROTTLE_S:
            log.debug("group=%s %s %s", self.name, kind, text)
            return
        if len(self._emitted_at) >= MAX_THROTTLED:  # names come from servers
            self._emitted_at = dict(list(self._emitted_at.items())[MAX_THROTTLED // 2 :])
        self._emitted_at[key] = now
        self.emit(kind, text, queue, level=logging.WARNING)

    def report_unexpected(self, what: str, error: BaseException) -> None:
        """Something of ours failed that must not: the member has failed."""
        self.on_unexpected_error(what, error)

    # --- work

    def start_in_background(self, work: Callable[[], Awaitable[object]], what: str) -> None:
        """Begin a step that nobody waits for: that it could not be done is told."""

        async def work_and_report() -> None:
            try:
                await work()
            except RocketError as error:
                self.emit_throttled(EventKind.BROKER_UNREACHABLE, f"{what}: {error}")

        self.tasks.begin(work_and_report(), what)

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have something done on the I/O thread, unless that has ended: a listener may outlive it. Any thread."""
        try:
            self.loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass
