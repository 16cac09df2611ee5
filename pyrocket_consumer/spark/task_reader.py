"""Plan the tasks of a batch, and read their ranges: with several pulls of several queues in flight, as record batches.

The task's thread pulls into one buffer for each broker, and makes columns from that buffer. Passing the bytes to
another thread would cost more than all of that. Responses that arrive meanwhile wait in the system's buffers. The
worker's I/O thread only finds brokers.
"""

from __future__ import annotations

import concurrent.futures
import heapq
import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.errors import ConfigError, ProtocolError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.columns import PulledRecords, record_batches
from pyrocket_consumer.protocol.compression import BodyTooLarge
from pyrocket_consumer.spark.executor_cache import discard, get_or_create
from pyrocket_consumer.spark.failures import WARN_AFTER_FAILURES, ReadFailed
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.options import DamagedBodies, ReadOptions, TaskSizes
from pyrocket_consumer.spark.range_puller import RangePuller, SharedPulls
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.polled_connection import PolledConnection

log = logger("spark")

BATCH_ROWS = 2048
BATCH_BYTES = 4 * 1024 * 1024
"""The most bytes of stored records in a batch. It has more only if a single response has."""

MAX_CONCURRENT_QUEUES = 16
"""Most ranges of a task to pull at once; the others follow when these are read."""

_MAX_BODIES_LOGGED = 5  # damaged bodies that the log names
_CONNECT_CHECK_INTERVAL_S = 0.02  # between checks for a new connection, while responses may arrive
_LONGEST_WAIT_S = 5.0
# Spark before 4.2 has no such parameter, and timestamps are in UTC.
_IN_UTC: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
_READ_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


class RangesPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: Sequence[QueueRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return f"RangesPartition({', '.join(map(str, self.ranges))})"


def plan_partitions(ranges: Iterable[QueueRange], sizes: TaskSizes) -> list[RangesPartition]:
    """Return the partition of each task: every offset of `ranges` once, in few tasks of sufficient size."""
    wanted, most, smallest = [each for each in ranges if len(each) > 0], sizes.max_records, sizes.min_records
    parts = [1 if most is None else -(-len(each) // most) for each in wanted]
    if most is not None:
        smallest = min(smallest, most // 2)  # or the parts of a split range would share a task
    if sizes.min_partitions is not None and wanted:
        total, fewest = sum(map(len, wanted)), sizes.min_partitions
        if sum(parts) < fewest:
            fair = ((2 * len(each) * fewest + total) // (2 * total) for each in wanted)  # by size, rounded
            parts = list(map(max, parts, fair))
        smallest = min(smallest, total // (2 * fewest))
    pieces = [piece for each, count in zip(wanted, parts, strict=True) for piece in _split(each, count)]
    return [RangesPartition(task) for task in _merge(_pack(pieces, smallest), sizes.max_partitions)]


def _split(whole: QueueRange, parts: int) -> list[QueueRange]:
    """Return `parts` ranges of about the same size; fewer if there are fewer offsets."""
    size, parts = len(whole), min(parts, len(whole))
    edges = [whole.begin + size * index // parts for index in range(parts + 1)]
    return [QueueRange(whole.queue, begin, end) for begin, end in pairwise(edges)]


def _pack(pieces: Iterable[QueueRange], smallest: int) -> list[tuple[QueueRange, ...]]:
    """Let neighbours with fewer than `smallest` offsets share a task until it has at least that many."""
    tasks = list[tuple[QueueRange, ...]]()
    shared, size = list[QueueRange](), 0
    for piece in pieces:
        if len(piece) >= smallest:
            tasks.append((piece,))
            continue
        shared.append(piece)
        size += len(piece)
        if size >= smallest:
            tasks.append(tuple(shared))
            shared, size = [], 0
    if shared:
        tasks.append(tuple(shared))
    return tasks


def _merge(tasks: list[tuple[QueueRange, ...]], limit: int | None) -> list[tuple[QueueRange, ...]]:
    """Join tasks until at most `limit` are left: the largest first, each to the smallest so far."""
    if limit is None or len(tasks) <= limit:
        return tasks
    sized = sorted(((sum(map(len, task)), task) for task in tasks), key=lambda each: (-each[0], each[1]))
    bins = [(0, index, list[QueueRange]()) for index in range(limit)]
    for size, task in sized:
        bin_size, index, ranges = bins[0]
        ranges.extend(task)
        heapq.heapreplace(bins, (bin_size + size, index, ranges))
    return [tuple(sorted(ranges)) for _, _, ranges in sorted(bins, key=lambda each: each[1])]


def read_partition(partition: InputPartition, schema: StructType, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a partition as rows of `schema`; see `read_ranges`."""
    assert isinstance(partition, RangesPartition)
    return read_ranges(partition.ranges, arrow_schema(schema), options)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return `schema` exactly as Spark compares it."""
    return to_arrow_schema(schema, **_IN_UTC)


def read_ranges(ranges: Sequence[QueueRange], columns: pa.Schema, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield the messages of `ranges` as rows of `columns`: those of one queue in order, queues in any order.

    A range is finished when the broker's next offset reaches its end. Offsets may be missing inside it, because of a
    filter for instance. To stop early, close the generator.

    Raises:
        DataLoss: messages are gone, and `options.fail_on_data_loss` is true.
        ReadFailed: all retries of a broker failed; or a record is damaged; or a body is, and `options.damaged_bodies`
            is "fail".
        ConfigError: the package that unpacks a body is not installed here.
    """
    wanted = [each for each in ranges if len(each)]
    if not wanted:
        return
    task_reader = _TaskReader(_cluster(options), wanted, options)
    damaged = _DamagedBodies(options.damaged_bodies)
    try:
        for pulled in task_reader.portions():
            try:
                yield from record_batches(
                    pulled, columns, options.selector.tags, damaged.replace_body, options.max_body_bytes
                )
            except ProtocolError as error:
                where = ", ".join(str(QueueRange(each.queue, each.begin, each.end)) for each in pulled)
                raise ReadFailed(where, 1, f"a record is damaged: {error}") from error
    finally:
        task_reader.stop()
        damaged.log_total()


class _DamagedBodies:
    """Handles bodies that cannot be decompressed. A task logs all of them in one line."""

    def __init__(self, what: DamagedBodies) -> None:
        self._what = what
        self._count = 0
        self._first = list[str]()

    def replace_body(self, queue: MessageQueue, offset: int, stored: bytes, error: ProtocolError) -> bytes | None:
        where = f"{queue} at offset {offset}"
        if self._what is DamagedBodies.FAIL:
            remedy = "the option damagedBodies=skip skips such messages, and raw returns their bodies as stored"
            if isinstance(error, BodyTooLarge):
                remedy = f"maxBodyBytes allows more, or {remedy}"
            raise ReadFailed(where, 1, f"its body cannot be decompressed: {error}; {remedy}") from error
        self._count += 1
        if len(self._first) < _MAX_BODIES_LOGGED:
            self._first.append(f"{where} ({error})")
        return stored if self._what is DamagedBodies.RAW else None

    def log_total(self) -> None:
        if self._count:
            done = "returned as stored" if self._what is DamagedBodies.RAW else "skipped"
            more = f" and {self._count - len(self._first)} more" if self._count > len(self._first) else ""
            log.warning("%d damaged bodies were %s: %s%s", self._count, done, ", ".join(self._first), more)


def _cluster(options: ReadOptions) -> Cluster:
    """Return this worker's connected cluster; make one if there is no usable one."""
    client, retry_policy = options.client, options.retry_policy()

    def make() -> Cluster:
        config = client.config()
        cluster = Cluster(config, make_client_id(config))
        cluster.start()
        return cluster

    while True:
        try:
            cluster = get_or_create(Cluster, client, make)
            cluster.check_usable()
            return cluster
        except ConfigError:
            raise
        except RocketError as error:
            discard(Cluster, client)
            if (pause_s := retry_policy.failed()) is None:
                raise ReadFailed(f"from {client.name_server}", retry_policy.failures, str(error)) from error
            if retry_policy.failures == WARN_AFTER_FAILURES:
                log.warning("no name server responded, retrying reason=%s", error)
            time.sleep(pause_s)


class _TaskReader:
    """Reads the ranges of one task."""

    def __init__(self, cluster: Cluster, ranges: Sequence[QueueRange], options: ReadOptions) -> None:
        self._shared = SharedPulls(cluster, options)
        self._connections: dict[PolledConnection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._pending = deque(ranges)
        self._pullers: list[RangePuller] = []

    def portions(self) -> Iterator[list[PulledRecords]]:
        """Yield the records of each batch as soon as there are enough. The next one reuses their buffers."""
        shared = self._shared
        self._start_ranges()
        while self._pullers or shared.ready:
            while self._pullers and shared.ready_rows < BATCH_ROWS and shared.ready_bytes < BATCH_BYTES:
                self._poll_connections()
            suspended_at = time.monotonic()
            yield shared.take(BATCH_ROWS, BATCH_BYTES)
            shared.suspended_s += time.monotonic() - suspended_at
            wanted = [pulled.records for pulled, _ in shared.ready]
            for puller in self._pullers:
                wanted += puller.pending_bodies()
            for connection in self._connections:
                connection.release_except(wanted)
            self._expire()

    def _start_ranges(self) -> None:
        """Replace the ranges that were read by others."""
        self._pullers = [each for each in self._pullers if not each.is_finished]
        while self._pending and len(self._pullers) < MAX_CONCURRENT_QUEUES:
            puller = RangePuller(self._shared, self._pending.popleft())
            self._pullers.append(puller)
            puller.pull()

    def _poll_connections(self) -> None:
        """Send pending requests and read responses; wait a moment if none has arrived."""
        has_received = False
        for connection in list(self._connections):
            connection.flush()
            if connection.receive():
                has_received = True
                self._start_ranges()
            connection.flush()  # the broker works while columns are made
        self._drop_closed()
        if not has_received:
            self._wait()
        for puller in self._pullers:
            if puller.is_waiting:
                puller.wake()
                if puller.connection is not None:
                    self._watch(puller.connection)
        for puller in self._pullers:
            if puller.error is not None:
                raise puller.error
        self._start_ranges()

    def _watch(self, connection: PolledConnection) -> None:
        """Begin to receive from `connection`."""
        self._drop_closed()
        if connection not in self._connections and not connection.closed:
            self._connections[connection] = None
            self._selector.register(connection.socket, selectors.EVENT_READ)

    def _drop_closed(self) -> None:
        for connection in [each for each in self._connections if each.closed]:
            del self._connections[connection]
            self._selector.unregister(connection.socket)

    def _wait(self) -> None:
        """Wait until a response may have arrived, a connection is open, or a time is due."""
        if self._expire():
            return
        now = self._shared.now()
        times = [puller.due for puller in self._pullers if puller.due is not None]
        times += [each.next_deadline for each in self._connections if each.next_deadline is not None]
        timeout_s = max(0.0, min([*(each - now for each in times), _LONGEST_WAIT_S]))
        connecting = [puller.connecting for puller in self._pullers if puller.connecting is not None]
        if any(connection.waiting for connection in self._connections):
            for connection in self._connections:
                self._selector.modify(connection.socket, _READ_WRITE if connection.has_unsent else selectors.EVENT_READ)
            self._selector.select(min(timeout_s, _CONNECT_CHECK_INTERVAL_S) if connecting else timeout_s)
        elif connecting:
            concurrent.futures.wait(connecting, timeout_s, concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(timeout_s)

    def _expire(self) -> bool:
        """Abandon overdue pulls; return whether there were any."""
        now = self._shared.now()
        late = [each for each in self._connections if each.next_deadline is not None and each.next_deadline <= now]
        for connection in late:
            connection.expire(now)
        return bool(late)

    def stop(self) -> None:
        """Stop pulling, and keep the connections for the worker's next task."""
        for puller in self._pullers:
            puller.stop()
        self._pullers.clear()
        self._selector.close()
        self._shared.release(list(self._connections))
