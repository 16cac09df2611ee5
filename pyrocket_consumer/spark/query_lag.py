"""The lag of a streaming query behind the end offsets of its queues."""

from __future__ import annotations

import ast
import json
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

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import logger

log = logger("spark")


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


def _queues(text: object) -> dict[MessageQueue, int]:
    """Return the offsets in a progress report, none if another source wrote it.

    PySpark 4.2 passes JSON, 4.0 and 4.1 the text of a Python dict, Spark Connect sometimes a dict.
    """
    offset = text
    if isinstance(text, str):
        try:
            offset = json.loads(text)
        except ValueError:
            try:
                offset = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return {}
    try:
        topics: Mapping[str, Any] = offset["queues"]  # type: ignore[index]
        return {
            MessageQueue(topic, broker, int(queue_id)): int(value)
            for topic, brokers in topics.items()
            for broker, queues in brokers.items()
            for queue_id, value in queues.items()
        }
    except (TypeError, KeyError, AttributeError, ValueError):
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
