"""The progress of a query: its lag, and its offsets, which are published as those of a group for people and tools."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.errors import ConfigError, ConnectError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import decode_offset, join_first
from pyrocket_consumer.text import logger

log = logger("spark")

_WARNING_INTERVAL_S = 60.0


class GroupProgress:
    """Publishes finished offsets as the offsets of a group: in the background, best effort, only forward.

    Another client may move the group meanwhile, most often with a reset. The query ignores that, and logs a warning.
    While there is nothing to publish, it checks the group every `check_interval_s` seconds.
    """

    def __init__(self, cluster: Cluster, group: str, *, check_interval_s: float = 10.0) -> None:
        self._cluster = cluster
        self._group = group
        self._check_interval_s = check_interval_s
        # All of these are used by the I/O thread alone.
        self._seen: dict[MessageQueue, int | None] = {}  # the brokers' offsets after the last request
        self._published: dict[MessageQueue, int] = {}
        self._latest: Mapping[MessageQueue, int] = {}
        self._waiting: dict[str, dict[MessageQueue, int]] = {}  # by broker, the offsets to publish next
        self._running: dict[str, asyncio.Task[None]] = {}  # by broker, so that none waits for another
        self._refused: frozenset[MessageQueue] = frozenset()
        self._checked_at = 0.0
        self._warned_at: dict[str, float] = {}

    def publish(self, positions: Mapping[MessageQueue, int]) -> None:
        """Publish `positions` in the background; return at once. Positions that still wait are replaced.

        Requests go to all brokers at once, but to one broker one after the other. Two first commits of a topic at the
        same time can make a broker lose one of them.
        """
        self._cluster.submit(self._publish(positions))

    def flush(self, timeout_s: float) -> None:
        """Wait until all positions are published, at most `timeout_s` seconds."""
        flushed = self._cluster.submit(self._flush())
        concurrent.futures.wait([flushed], timeout_s)
        flushed.cancel()

    async def _publish(self, positions: Mapping[MessageQueue, int]) -> None:
        now = time.monotonic()
        check_all = now - self._checked_at >= self._check_interval_s
        if check_all:
            self._checked_at = now
        elif positions == self._latest:
            return
        for queue in sorted(positions):
            if check_all or positions[queue] != self._latest.get(queue):
                self._waiting.setdefault(queue.broker_name, {})[queue] = positions[queue]
        self._latest = positions
        for name in self._waiting.keys() - self._running.keys():
            self._running[name] = asyncio.create_task(self._publish_at(name))

    async def _flush(self) -> None:
        while self._running:
            await asyncio.wait(self._running.values())

    async def _publish_at(self, name: str) -> None:
        try:
            while positions := self._waiting.pop(name, None):
                await self._publish_some(name, positions)
        finally:
            del self._running[name]

    async def _publish_some(self, name: str, positions: Mapping[MessageQueue, int]) -> None:
        moved = list[str]()
        for queue, position in positions.items():
            try:
                await self._publish_one(queue, position, moved)
            except RocketError as error:
                log.debug("group=%s queue=%s progress was not published reason=%s", self._group, queue, error)
                if isinstance(error, (ConnectError, RequestTimeout)):
                    break  # the other queues would fail in the same way
        self._published.update(positions)
        now = time.monotonic()
        if moved and now - self._warned_at.get(name, -_WARNING_INTERVAL_S) >= _WARNING_INTERVAL_S:
            self._warned_at[name] = now
            log.warning(
                "group=%s is not at the offsets of this query: %s. A reset, another consumer of the group, or a broker "
                "that lost commits moved it. The query is not moved, because it reads from its checkpoint. To read "
                "from other offsets, start a query with startingOffsets and a new checkpoint",
                self._group,
                join_first(moved),
            )

    async def _publish_one(self, queue: MessageQueue, position: int, moved: list[str]) -> None:
        broker = self._cluster.broker(queue.broker_name)
        stored = await broker.query_offset(self._group, queue)
        before = self._seen.get(queue, stored)
        taken = True
        goes_back = stored == before and position < self._published.get(queue, 0)  # the query went back after a loss
        if stored is None or stored < position or goes_back:
            taken = await broker.commit_offset(self._group, queue, position)
        if stored != before:
            moved.append(f"{queue} at {stored}, was {before}")
        elif not taken and queue not in self._refused:
            moved.append(f"{queue}, where a reset to {stored} is pending")
        self._refused = self._refused - {queue} if taken else self._refused | {queue}
        self._seen[queue] = position if taken and (stored is None or stored < position or goes_back) else stored


@dataclass(frozen=True, slots=True)
class Lag:
    """Offsets between the end of a batch and the end of each queue. With filters, fewer messages match."""

    max: int
    avg: float
    min: int
    queues: Mapping[MessageQueue, int]

    @property
    def total(self) -> int:
        """The sum over all queues."""
        return sum(self.queues.values())

    def __str__(self) -> str:
        return f"{self.total} offsets behind in {len(self.queues)} queues (max {self.max}, avg {self.avg:g})"


def lag(progress: Mapping[str, Any] | None) -> Lag | None:
    """Return the lag of a query at the end of a batch; `progress` is `query.lastProgress`, or a listener's.

    The result is None before the first batch, and for a query without a rocketmq source. With several such sources it
    includes all their queues. PySpark 4.0 and 4.1 do not take end offsets from a source. There the lag includes only
    the messages that `maxOffsetsPerTrigger` held back.
    """
    behind: dict[MessageQueue, int] = {}
    for source in (progress or {}).get("sources") or ():
        end, latest = _queues(source.get("endOffset")), _queues(source.get("latestOffset"))
        for queue in end.keys() & latest.keys():
            behind[queue] = max(0, latest[queue] - end[queue])
    if not behind:
        return None
    counts = behind.values()
    return Lag(max(counts), sum(counts) / len(counts), min(counts), dict(sorted(behind.items())))


def _queues(text: object) -> Mapping[MessageQueue, int]:
    """Return the offsets in a progress report, none if another source wrote it.

    PySpark 4.2 passes JSON, 4.0 and 4.1 the text of a Python dict, Spark Connect sometimes a dict.
    """
    offset: Any = text
    if isinstance(text, str):
        try:
            offset = json.loads(text)
        except ValueError:
            try:
                offset = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return {}
    try:
        return decode_offset(offset).queues
    except ConfigError:
        return {}


def _log(name: str, found: Lag) -> None:
    log.info("query=%s lag: %s", name, found)


class LagListener(StreamingQueryListener):
    """Calls `report(name, lag)` after each batch of a query that reads from rocketmq; by default it logs the lag.

        spark.streams.addListener(LagListener(lambda name, lag: gauge.set(lag.max)))

    `name` is the query's name, or its id. Spark calls the listener on its own thread, one event at a time. An exception
    of `report` is logged.
    """

    def __init__(self, report: Callable[[str, Lag], object] = _log) -> None:
        self._report = report

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report the lag after a batch."""
        progress = event.progress
        try:
            if (found := lag(progress)) is not None:
                self._report(str(progress.get("name") or progress.get("id")), found)
        except Exception:
            log.exception("the lag of a query could not be reported")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing, because nothing has changed."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing."""
