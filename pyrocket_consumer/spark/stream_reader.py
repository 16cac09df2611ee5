"""Read queues as a stream of batches: the driver plans ranges, and tasks read them.

The reader runs in its own process on the driver's machine. `read` runs on executors, on copies of the reader that have
no state of the planning. A batch depends on its offsets only, so it can be repeated exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.broker_offsets import BrokerOffsets, BrokerSnapshot, now_ms
from pyrocket_consumer.spark.failures import DataLoss, NotReached
from pyrocket_consumer.spark.offsets import (
    GivenOffsets,
    NamedOffset,
    QueueRange,
    SourceOffset,
    decode_offset,
    encode_offset,
    join_first,
    ranges_between,
)
from pyrocket_consumer.spark.options import SourceOptions
from pyrocket_consumer.spark.progress import GroupProgress
from pyrocket_consumer.spark.task_reader import plan_partitions, read_partition
from pyrocket_consumer.text import logger

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.0 and 4.1 have no read limits, and one batch per AvailableNow run

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may hold; a placeholder, as the classes below."""

        def __init__(self, *rows: int) -> None:
            pass

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """All messages."""

    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        """At least that many messages, else none."""

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most that many messages."""

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A reader that can stop at the end offsets that it found when it started."""


log = logger("spark")

_FLUSH_S = 2.0


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads batch after batch.

    Spark plans with one instance per query run, and calls all its methods except `read`, one at a time. From 4.2 on,
    Spark passes the start of a batch to `latestOffset`. Before, the reader remembers it.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._broker_offsets: BrokerOffsets | None = None
        self._progress: GroupProgress | None = None
        self._initial: dict[str, Any] | None = None
        self._planned_end: dict[str, Any] | None = None
        self._ends: dict[MessageQueue, int] = {}  # of the last snapshot
        self._run_ends: dict[MessageQueue, int] | None = None  # where an AvailableNow run ends
        self._missing_from_run: set[MessageQueue] | None = None  # known before the run, and missing at its start
        self._retry_policy = options.read.retry_policy()  # of such a run
        self._planned_at: float | None = None
        self._waiting_since: float | None = None
        self._warned: dict[str, object] = {}

    # --- the calls of Spark, in this order

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much a batch may hold. With Trigger.Once Spark uses "all" instead."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fetch the current end offsets, where the run stops. Queues that are found later are for the next run.

        Raises:
            NotReached: a server did not respond in any attempt, and failOnUnreachable is true.
        """
        while True:
            self._offsets.expire_discovery()
            snapshot = self._offsets.snapshot({})
            self._run_ends = dict(snapshot.ends)
            if not snapshot.unresponsive:
                self._retry_policy.reset()
                return
            if (pause_s := self._retry_policy.failed()) is None:
                self._skip_or_fail(join_first(sorted(snapshot.unresponsive)))
                return
            time.sleep(pause_s)

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query starts. Every call returns the same, because Spark calls twice.

        Raises:
            ConfigError: the options name queues that do not exist.
            RocketError: no server responded in any attempt.
        """
        if self._initial is None:
            queues = self._offsets.discover(follows=True)
            if not queues and self._options.pattern is not None:
                log.warning("there is no queue yet: no topic matches subscribePattern=%r", self._options.pattern)
            start, at_ms = self._options.start or NamedOffset.LATEST, now_ms()
            offsets = self._offsets.resolve(start, queues)
            times_unknown = start is NamedOffset.GROUP or isinstance(start, GivenOffsets)
            seen_ms = {} if times_unknown else {(queue.topic, queue.broker_name): at_ms for queue in queues}
            self._initial = encode_offset(SourceOffset(offsets, initial=True, seen_ms=seen_ms))
        if self._planned_end is None:
            self._planned_end = self._initial
        return self._initial

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return where the next batch ends; `start` itself if there is nothing to read.

        Raises:
            DataLoss: messages from `start` on are lost.
            NotReached: a run to the end would skip known queues.
            RocketError: a broker refuses the request for end offsets.
        """
        remembers = start is None
        if start is None:
            start = self._planned_end if self._planned_end is not None else self.initialOffset()
        at = decode_offset(start)
        self._publish(at.queues)
        self._throttle()
        first = self._planned_at is None
        limited = not isinstance(limit, ReadAllAvailable)
        # Before 4.2 a run of a single batch looks like any other. So the first batch never waits, or it would not read.
        may_wait = limited and self._run_ends is None and not (remembers and first)
        while True:
            snapshot, restarts = self._check_losses(at)
            self._planned_at = time.monotonic()
            end = self._plan_end(at, snapshot, restarts, limited, may_wait)
            if end is not None or self._run_ends is None:
                self._retry_policy.reset()
                break
            awaited = self._unfinished(at, snapshot)
            if not awaited or (pause_s := self._retry_policy.failed()) is None:
                if self._progress is not None:
                    self._progress.flush(_FLUSH_S)  # the run is over, and with it this process
                if awaited:
                    self._skip_or_fail(join_first(awaited))
                break
            time.sleep(pause_s)
            self._offsets.expire_discovery()
        self._planned_end = start if end is None else encode_offset(end)
        return self._planned_end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end offsets of the last snapshot, without a limit. The lag is computed from them."""
        if self._planned_end is None:
            return None
        position = decode_offset(self._planned_end).queues
        return encode_offset(
            SourceOffset(
                {queue: max(end, self._ends.get(queue, 0)) for queue, end in {**self._ends, **position}.items()}
            )
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partition of each task of a batch. It sends no request, so a batch can be repeated exactly."""
        self._planned_end = end
        return plan_partitions(ranges_between(decode_offset(start), decode_offset(end)), self._options.tasks)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read, on an executor."""
        return read_partition(partition, self._schema, self._options.read)

    def commit(self, end: dict[str, Any]) -> None:
        """Publish the finished offsets. It never raises, because Spark would end the query."""
        try:
            self._publish(decode_offset(end).queues)
        except Exception as error:
            log.warning("progress was not published reason=%s", error)

    def stop(self) -> None:
        """Disconnect. Spark calls it after errors only; otherwise the process ends."""
        if self._broker_offsets is not None:
            self._broker_offsets.close()
            self._broker_offsets = self._progress = None

    # --- planning

    @property
    def _offsets(self) -> BrokerOffsets:
        if self._broker_offsets is None:
            self._broker_offsets = BrokerOffsets(self._options)
        return self._broker_offsets

    def _publish(self, finished: Mapping[MessageQueue, int]) -> None:
        if self._options.commit_offsets:
            if self._progress is None:
                self._progress = GroupProgress(self._offsets.cluster, self._options.read.group)
            self._progress.publish(finished)

    def _throttle(self) -> None:
        """Sleep until the planning interval has passed. An idle query would send a hundred requests a second."""
        if self._planned_at is not None:
            time.sleep(max(0.0, self._planned_at + self._options.planning_interval_s - time.monotonic()))

    def _plan_end(
        self,
        at: SourceOffset,
        snapshot: BrokerSnapshot,
        restarts: Mapping[MessageQueue, int],
        limited: bool,
        may_wait: bool,
    ) -> SourceOffset | None:
        """Return where the next batch ends; None if there is nothing to read, or not enough.

        A queue in `restarts`, which continues at another offset, is enough for a batch.
        """
        at = replace(at, queues={**at.queues, **restarts})
        ends = {queue: max(end, at.queues.get(queue, 0)) for queue, end in snapshot.ends.items()}
        if self._run_ends is not None:
            if self._missing_from_run is None:
                known = () if at.initial else filter(self._offsets.selects, at.queues)
                self._missing_from_run = set(known) - self._run_ends.keys()
            for queue in self._missing_from_run & snapshot.ends.keys():
                self._run_ends[queue] = snapshot.ends[queue]
                self._missing_from_run.remove(queue)
            for queue in self._run_ends.keys() & snapshot.ends.keys():
                self._run_ends[queue] = min(self._run_ends[queue], snapshot.ends[queue])
            ends = {
                queue: min(end, max(self._run_ends[queue], at.queues.get(queue, 0)))
                for queue, end in ends.items()
                if queue in self._run_ends
            }
        begins = {queue: max(at.queues.get(queue, 0), snapshot.begins.get(queue, 0)) for queue in ends}
        ends = {queue: max(end, begins[queue]) for queue, end in ends.items()}
        news = {queue: begins[queue] for queue in ends if queue not in at.queues or queue in restarts}
        unread = {queue: end - at.queues.get(queue, begins[queue]) for queue, end in ends.items()}
        if not any(unread.values()) and not restarts:
            self._waiting_since = None
            return None
        if may_wait and not restarts and self._is_below_minimum(sum(unread.values())):
            return None
        self._waiting_since = None
        if limited and self._options.max_offsets is not None:
            shares = spread({queue: end - begins[queue] for queue, end in ends.items()}, self._options.max_offsets)
            ends = {queue: begins[queue] + shares.get(queue, 0) for queue in ends}
        return SourceOffset(
            {**at.queues, **ends}, {**at.queues, **news} if at.initial else news, seen_ms=self._seen_ms(at, snapshot)
        )

    def _seen_ms(self, at: SourceOffset, snapshot: BrokerSnapshot) -> dict[tuple[str, str], int]:
        """Return the request time of each topic and broker, except for a broker that did not report all queues."""
        found = {(queue.topic, queue.broker_name): snapshot.requested_ms[queue.broker_name] for queue in snapshot.ends}
        for queue in snapshot.unreachable:
            found.pop((queue.topic, queue.broker_name), None)
        return {**at.seen_ms, **found}

    def _unfinished(self, at: SourceOffset, snapshot: BrokerSnapshot) -> list[str]:
        """Return the queues whose ends a run to the end still needs, each with the reason why it is unknown."""
        assert self._run_ends is not None and self._missing_from_run is not None
        unread = {queue for queue, end in self._run_ends.items() if end > at.queues.get(queue, 0)}
        queues = (unread | self._missing_from_run) - snapshot.ends.keys() - snapshot.gone
        return [
            f"{queue} ({snapshot.unreachable.get(queue, 'its broker does not respond')})" for queue in sorted(queues)
        ]

    def _skip_or_fail(self, what: str) -> None:
        error = NotReached(what, self._options.read.read_timeout_s)
        if self._options.fail_on_unreachable:
            raise error
        self._warn_once("skipped", True, f"{error}; this run does")

    def _is_below_minimum(self, unread: int) -> bool:
        """Return whether to wait for more messages, and note the time of the first such wait."""
        if self._options.min_offsets is None or unread >= self._options.min_offsets:
            return False
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._options.max_delay_s

    def _check_losses(self, at: SourceOffset) -> tuple[BrokerSnapshot, dict[MessageQueue, int]]:
        """Return a snapshot, and the offsets where queues continue after a loss.

        An apparent loss counts only if it lasts for the startup grace.

        Raises:
            DataLoss: messages are lost, and failOnDataLoss is true.
        """
        startup_grace = self._options.read.startup_grace()
        shorter_ms: dict[MessageQueue, int] = {}  # when a queue was first found shorter than before
        while True:
            snapshot = self._offsets.snapshot(at.queues)
            losses = self._find_losses(at, snapshot)
            for queue, end in snapshot.ends.items():
                if 0 < end < at.queues.get(queue, 0):
                    shorter_ms.setdefault(queue, now_ms())
            if not losses.keys() - self._warned.keys() or (pause_s := startup_grace.failed()) is None:
                break
            time.sleep(pause_s)
            self._offsets.expire_discovery()
        losses |= self._regrown(at, snapshot, shorter_ms) | self._find_expired(at, snapshot)
        if self._options.read.fail_on_data_loss:
            for loss in losses.values():
                raise loss
        restarts = self._restart_offsets(at, snapshot, losses)
        for key, loss in losses.items():
            offset = restarts.get(loss.wanted.queue)
            moved = "" if offset is None else f", and continues at offset {offset}"
            self._warn_once(key, (loss.wanted.begin, offset), f"{loss}; this query does{moved}")
        for key in [key for key in self._warned if key.startswith("lost") and key not in losses]:
            del self._warned[key]
        unreachable = sorted(snapshot.unreachable)
        self._warn_once(
            "unreachable",
            tuple(unreachable),
            unreachable and f"{_describe_unreachable(snapshot)}; they keep their offsets, and the others continue",
        )
        self._ends |= snapshot.ends
        return snapshot, restarts

    def _restart_offsets(
        self, at: SourceOffset, snapshot: BrokerSnapshot, losses: Mapping[str, DataLoss]
    ) -> dict[MessageQueue, int]:
        """Return where queues continue that became shorter: at the first message stored after the last request.

        A recreated queue continues at its first offset. A queue that lost its last messages continues at its new end,
        or at messages that were stored there since.
        """
        shorter = {f"lost {queue}": queue for queue in at.queues.keys() & snapshot.ends.keys()}
        lost = [shorter[key] for key in losses if key in shorter]
        times_ms = {queue: at.seen_ms.get((queue.topic, queue.broker_name)) for queue in lost}
        return {queue: min(offset, at.queues[queue]) for queue, offset in self._offsets.stored_since(times_ms).items()}

    def _regrown(
        self, at: SourceOffset, snapshot: BrokerSnapshot, shorter_ms: Mapping[MessageQueue, int]
    ) -> dict[str, DataLoss]:
        """Return the losses of queues that were shorter a moment ago, unless the old messages are there again."""
        grown = {queue: at_ms for queue, at_ms in shorter_ms.items() if snapshot.ends.get(queue, 0) >= at.queues[queue]}
        return {
            f"lost {queue}": DataLoss(
                QueueRange(queue, at.queues[queue], snapshot.ends[queue]),
                f"from {offset} up to {snapshot.ends[queue]}, stored since",
                "the queue ended before that: it was recreated, or its broker lost messages",
            )
            for queue, offset in self._offsets.stored_since(grown).items()
            if offset < at.queues[queue]
        }

    def _find_losses(self, at: SourceOffset, snapshot: BrokerSnapshot) -> dict[str, DataLoss]:
        """Return the losses in a snapshot: queues that end before the offset to read, or are gone while unread."""
        found = {}
        for queue, position in at.queues.items():
            seen = QueueRange(queue, position, max(position, self._ends.get(queue, 0)))
            end = snapshot.ends.get(queue)
            if end is not None and end < position:
                reason = "the queue ends before that: it was recreated, or its broker lost messages"
                found[f"lost {queue}"] = DataLoss(seen, f"up to {end}", reason)
            elif queue in snapshot.gone and seen.end > position:
                found[f"lost {queue}"] = DataLoss(seen, "nothing", "its broker is up and no longer has this queue")
        return found

    def _find_expired(self, at: SourceOffset, snapshot: BrokerSnapshot) -> dict[str, DataLoss]:
        return {
            f"lost expired {queue}": DataLoss(
                QueueRange(queue, position, snapshot.ends[queue]), f"from {begin} on", "older messages have expired"
            )
            for queue, begin in snapshot.begins.items()
            if (position := at.queues.get(queue, begin)) < begin
        }

    def _warn_once(self, key: str, fact: object, text: object) -> None:
        """Log `text` once for each fact; without `text`, forget the fact."""
        if self._warned.get(key) != fact and text:
            log.warning("%s", text)
        if text:
            self._warned[key] = fact
        else:
            self._warned.pop(key, None)


def _describe_unreachable(snapshot: BrokerSnapshot) -> str:
    queues = [f"{queue} ({reason})" for queue, reason in sorted(snapshot.unreachable.items())]
    return f"queues are unreachable: {join_first(queues)}"


def spread(backlogs: Mapping[MessageQueue, int], cap: int) -> dict[MessageQueue, int]:
    """Return the number of offsets to read of each queue: `cap` in all, in proportion to its backlog.

    A queue with a backlog gets at least 1, so that none waits forever. With more queues than `cap`, each gets 1.
    """
    waiting = {queue: backlog for queue, backlog in backlogs.items() if backlog > 0}
    left, total = cap, sum(waiting.values())
    if total <= cap:
        return waiting
    shares: dict[MessageQueue, int] = {}
    for queue, backlog in sorted(waiting.items(), key=lambda each: (each[1], each[0])):  # the smallest first
        if left * backlog >= total:
            break
        shares[queue] = 1
        left, total = left - 1, total - backlog
    others = [queue for queue in waiting if queue not in shares]
    for queue in others:
        shares[queue] = left * waiting[queue] // total
    rest = left - sum(shares[queue] for queue in others)
    if rest > 0:
        for queue in sorted(others, key=lambda queue: (-(left * waiting[queue] % total), queue))[:rest]:
            shares[queue] += 1
    return shares


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of the options at the first call, because Spark hides an earlier one behind its own error."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        raise self._error

    getDefaultReadLimit = initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815  # names of Spark
