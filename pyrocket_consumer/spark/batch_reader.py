"""Read queues as a table: the driver plans ranges, and tasks read them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyrocket_consumer.cluster.names import unwrap
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.broker_offsets import BrokerOffsets
from pyrocket_consumer.spark.failures import DataLoss
from pyrocket_consumer.spark.offsets import NamedOffset, QueueRange, StoredAt, in_order
from pyrocket_consumer.spark.options import SourceOptions
from pyrocket_consumer.spark.pushed_filters import PushedFilters, Span, push_filters
from pyrocket_consumer.spark.task_reader import RangesPartition, plan_partitions, read_partition
from pyrocket_consumer.text import logger

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

log = logger("spark")


class BatchReader(DataSourceReader):
    """Reads once. Planning fetches the end offsets, which apply to all actions on the DataFrame."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._pushed = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        """Return the partition of each task. An empty batch has one, because Spark would add another kind of its own.

        Raises:
            DataLoss: messages that the options name do not exist.
            ConfigError: the options name queues that do not exist, or end before they start.
            RocketError: no server responded in any attempt.
        """
        if self._options.max_offsets is not None or self._options.min_offsets is not None:
            log.warning("maxOffsetsPerTrigger and minOffsetsPerTrigger are for streams; a batch reads all messages")
        broker_offsets = BrokerOffsets(self._options)
        try:
            ranges = self._ranges(broker_offsets)
        finally:
            broker_offsets.close()
        return plan_partitions(ranges, self._options.tasks) or [RangesPartition(())]

    def _ranges(self, broker_offsets: BrokerOffsets) -> list[QueueRange]:
        chosen = broker_offsets.discover()
        if not chosen:
            log.warning("there is no queue to read: no topic matches subscribePattern=%r", self._options.pattern)
        brokers = sorted({queue.broker_name for queue in chosen})  # a broker that has left is in no route
        log.info("found queues=%d of brokers=%s", len(chosen), ", ".join(brokers) or "none")
        queues = chosen
        if self._pushed != PushedFilters():
            queues = frozenset(queue for queue in chosen if self._pushed.select(self._as_in_rows(queue)))
        start, end = self._options.start or NamedOffset.EARLIEST, self._options.end
        oldest = broker_offsets.begins(queues)  # fetched first, because it only grows
        starts = oldest if start is NamedOffset.EARLIEST else broker_offsets.resolve(start, queues, chosen)
        chosen_ends = None if end is NamedOffset.LATEST else broker_offsets.resolve(end, queues, chosen)
        ends = broker_offsets.ends(queues)
        too_short = [
            queue for queue in queues if max(starts[queue], chosen_ends[queue] if chosen_ends else 0) > ends[queue]
        ]
        ends |= self._ends_after_retries(too_short, starts, broker_offsets)
        stops = ends if chosen_ends is None else chosen_ends  # "latest" means the ends after these retries
        wanted = [QueueRange(queue, starts[queue], stops[queue]) for queue in sorted(queues, key=in_order)]
        if end is not NamedOffset.LATEST:
            wanted = [self._check_order(each) for each in wanted]
        wanted = self._apply_filters(wanted, oldest, ends, broker_offsets)
        return [self._clip(each, oldest[each.queue], ends[each.queue]) for each in wanted]

    def _ends_after_retries(
        self, queues: Sequence[MessageQueue], wanted: Mapping[MessageQueue, int], broker_offsets: BrokerOffsets
    ) -> dict[MessageQueue, int]:
        """Return the ends of queues that were too short, after retries, because a broker that starts reports 0."""
        ends: dict[MessageQueue, int] = {}
        startup_grace = self._options.read.startup_grace()
        while queues:
            ends |= broker_offsets.ends(queues)
            queues = [queue for queue in queues if ends[queue] < wanted[queue]]
            if not queues or (pause_s := startup_grace.failed()) is None:
                break
            time.sleep(pause_s)
        return ends

    def _check_order(self, wanted: QueueRange) -> QueueRange:
        queue, begin, stop = wanted.queue, wanted.begin, wanted.end
        if stop >= begin:
            return wanted
        if isinstance(self._options.start, StoredAt) and isinstance(self._options.end, StoredAt):
            return QueueRange(queue, begin, begin)  # nothing was stored in between
        raise ConfigError(f"{queue} would end at offset {stop}, before it starts at {begin}; see endingOffsets")

    def _apply_filters(
        self,
        wanted: list[QueueRange],
        oldest: Mapping[MessageQueue, int],
        ends: Mapping[MessageQueue, int],
        broker_offsets: BrokerOffsets,
    ) -> list[QueueRange]:
        """Return `wanted`, narrowed by the pushed filters. Empty ranges are dropped, so they cannot be data loss."""
        pushed = self._pushed
        if pushed == PushedFilters():
            return wanted
        left = [narrowed for each in wanted if len(narrowed := pushed.narrow(each)) or narrowed == each]
        if pushed.stored_ms != Span():
            available = {
                each.queue: QueueRange(each.queue, max(each.begin, oldest[each.queue]), min(each.end, ends[each.queue]))
                for each in left
            }
            found = broker_offsets.narrow_by_time([each for each in available.values() if len(each)], pushed.stored_ms)
            edged = {each.queue: _keep_open_edges(each, available[each.queue], found.get(each.queue)) for each in left}
            left = [each for queue, each in edged.items() if len(each) or not len(available[queue])]
        log.info("filters=%s leave offsets=%d of=%d", pushed, sum(map(len, left)), sum(map(len, wanted)))
        return left

    def _as_in_rows(self, queue: MessageQueue) -> MessageQueue:
        """Return `queue` as rows name it."""
        return replace(queue, topic=unwrap(self._options.client.namespace, queue.topic))

    def _clip(self, wanted: QueueRange, oldest: int, end: int) -> QueueRange:
        queue, begin, stop = wanted.queue, wanted.begin, wanted.end
        if begin < min(oldest, stop) or begin > end or stop > end:
            reason = "messages have expired" if begin < oldest else "the broker has no more"
            loss = DataLoss(wanted, f"{oldest} up to {end}", reason)
            if self._options.read.fail_on_data_loss:
                raise loss
            log.warning("%s", loss)
        begin = min(max(begin, oldest), end)
        return QueueRange(queue, begin, max(begin, min(stop, end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read, on an executor."""
        return read_partition(partition, self._schema, self._options.read)


class FilteredBatchReader(BatchReader):
    """Reads once, and skips messages that the filters of the query exclude. Used with pushFilters=true.

    It is a class of its own, because Spark refuses a reader with `pushFilters` if its own setting is off.
    """

    def pushFilters(self, filters: Iterable[Filter]) -> Iterable[Filter]:
        """Note the messages to skip, and return all filters, so that Spark applies them, too."""
        filters = list(filters)
        read = self._options.read
        self._pushed, selector = push_filters(filters, read.selector)
        self._options = replace(self._options, read=replace(read, selector=selector))
        return filters


def _keep_open_edges(wanted: QueueRange, available: QueueRange, narrowed: QueueRange | None) -> QueueRange:
    """Return `wanted` with each edge that `narrowed` moved. Only `available`, a part of it, can be read."""
    if narrowed is None:
        return wanted
    begin = narrowed.begin if narrowed.begin > available.begin else wanted.begin
    return QueueRange(wanted.queue, begin, narrowed.end if narrowed.end < available.end else wanted.end)
