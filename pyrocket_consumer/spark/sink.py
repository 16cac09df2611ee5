"""Write a DataFrame, or a stream, to topics: at least once. A task ends when every send is acknowledged."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.config import ClientConfig, ProducerConfig
from pyrocket_consumer.errors import ConfigError, PermissionDenied, RequestTimeout, RocketError, RouteNotFound
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer import Producer, SendResult
from pyrocket_consumer.producer.attempts import NoWritableQueue
from pyrocket_consumer.producer.send_future import KeyedResultSink
from pyrocket_consumer.spark import executor_cache
from pyrocket_consumer.spark.failures import RetryPolicy
from pyrocket_consumer.spark.options import DEFAULT_GROUP, SinkOptions
from pyrocket_consumer.spark.sink_rows import BATCH_ID, PARTITION, QUERY_ID, RowReader, SinkRow, check_schema
from pyrocket_consumer.text import logger

DataSourceStreamArrowWriter: type | None = getattr(datasource, "DataSourceStreamArrowWriter", None)
"""None before PySpark 4.1, where streams can be written as rows only."""

log = logger("spark")

MAX_BYTES_IN_FLIGHT = 32 << 20
"""Most bytes of unacknowledged bodies in a task, in addition to the limit `maxInFlight`."""

_STREAM_QUERY, _STREAM_BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
_GRACE_S = 30.0  # the I/O thread enforces the deadlines; this long after one, assume that it has failed


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The result of a task: the number of acknowledged messages, and how many of them may be stored twice."""

    rows: int
    possible_duplicates: int = 0


def check_overwrite(overwrite: bool) -> None:
    """Raise ConfigError if `overwrite` is true."""
    if overwrite:
        raise ConfigError(
            'mode("overwrite") is not allowed, because the rocketmq sink never deletes messages; use mode("append")'
        )


class _Sink:
    """The base of all writers. Made on the driver, pickled, and used in each task."""

    _is_stream = _takes_rows = False

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        check_schema(schema, options)
        self._schema = schema
        self._options = options
        self._write_id = str(uuid.uuid4())

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send a task's rows; return when every row is acknowledged."""
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        query, batch = self._write_id, "0"
        if self._is_stream and context is not None:
            query = context.getLocalProperty(_STREAM_QUERY) or query
            batch = context.getLocalProperty(_STREAM_BATCH) or batch
        marks = {QUERY_ID: query, BATCH_ID: batch, PARTITION: str(partition)} if self._options.dedup_properties else {}
        reader = RowReader(self._schema, self._options, partition, marks)
        rows = reader.of_rows(iterator) if self._takes_rows else reader.of_batches(iterator)
        return send_all(rows, reader, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log the result. Every message is stored already."""
        what = _name(batchId)
        log.debug("%s wrote rows=%d", what, _rows(messages))
        if again := sum(message.possible_duplicates for message in messages or () if isinstance(message, TaskResult)):
            log.warning(
                "%s sent rows=%d again after a missing or degraded response; each may have copies in the topic. Copies "
                "have the same spark_* properties if dedupProperties is true",
                what,
                again,
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log the failure. Sent rows stay stored. This never raises, because Spark would hide the cause."""
        log.warning("%s failed; rows=%d of successful tasks stay stored", _name(batchId), _rows(messages))


class BatchWriter(_Sink, DataSourceArrowWriter):
    """Writes a DataFrame. Rows that were sent before a failure stay sent: at least once."""


class StreamRowWriter(_Sink, DataSourceStreamWriter):
    """Writes micro-batches row by row, for PySpark 4.0."""

    _is_stream = _takes_rows = True


class StreamArrowWriter(_Sink, DataSourceStreamArrowWriter or DataSourceStreamWriter):  # type: ignore[misc]
    """Writes micro-batches, with PySpark 4.1 or newer."""

    _is_stream = True


StreamWriter = StreamRowWriter if DataSourceStreamArrowWriter is None else StreamArrowWriter
"""The writer of `df.writeStream`."""


def _name(batch_id: int | None) -> str:
    return "a write" if batch_id is None else f"batch={batch_id}"


def _rows(messages: Sequence[WriterCommitMessage | None]) -> int:
    return sum(message.rows for message in messages or () if isinstance(message, TaskResult))


def send_all(rows: Iterator[SinkRow], reader: RowReader, options: SinkOptions) -> TaskResult:
    """Send `rows`, and return when every one is acknowledged. Without rows, do not connect.

    Raises:
        RocketError: a row was not stored, or cannot be a message; the text names it. Sends in flight are abandoned.
    """
    first = next(rows, None)
    if first is None:
        return TaskResult(0)
    producer = _producer(options)
    sends = _Sends(producer, options, reader)
    try:
        sends.add(first)
        for row in rows:
            sends.add(row)
        sends.finish()
    except BaseException:
        # Spark runs the task again, on another worker or on this one. From then on this attempt must send nothing.
        executor_cache.discard(Producer, options)
        producer.close(0)
        raise
    return TaskResult(sends.acknowledged, sends.possible_duplicates)


def _producer(options: SinkOptions) -> Producer:
    """Return this worker's producer for `options`, started.

    Raises:
        RocketError: no name server responded within the send timeout, or it refuses this client.
    """
    producer = executor_cache.get_or_create(Producer, options, lambda: Producer(config=_config(options)))
    retry_policy = options.retry_policy()
    while True:
        try:
            producer.start()
            return producer
        except RocketError as error:
            is_transient = not isinstance(error, (ConfigError, PermissionDenied))
            if not is_transient or (pause_s := retry_policy.failed()) is None:
                executor_cache.discard(Producer, options)
                raise
            if retry_policy.failures == 1:
                _warn_waiting(options, error)
        time.sleep(pause_s)


def _warn_waiting(options: SinkOptions, error: BaseException) -> None:
    log.warning("the write waits for up to %g s reason=%s", options.send_timeout_s, error)


def _any_broker_is_up(options: SinkOptions) -> bool:
    """Return whether a name server knows a broker, because each broker has topics of RocketMQ's own."""
    try:
        with Admin(config=options.client.config()) as admin:
            return bool(admin.topics(include_system=True))
    except RocketError:
        return False


def _config(options: SinkOptions) -> ProducerConfig:
    client = options.client.config()
    settings = {field.name: getattr(client, field.name) for field in fields(ClientConfig)}
    # A connection closes after two heartbeats without a response, so that its rows are sent on another one.
    settings["heartbeat_interval_s"] = min(max(options.client.request_timeout_s, 0.05), client.heartbeat_interval_s)
    return ProducerConfig(
        **settings,
        group=DEFAULT_GROUP,
        send_timeout_s=options.send_timeout_s,
        send_attempts=options.send_retries + 1,
        max_in_flight_messages=options.max_in_flight,
        max_in_flight_bytes=1 << 40,  # _Sends counts them
        max_message_bytes=options.max_message_bytes,
        auto_create_topic=options.auto_create_topic,
        accept_degraded=options.accept_degraded,
    )


_Target = tuple[str, MessageQueue | None]  # a topic, and the queue in it if a row names one


class _Sends:
    """The sends of one task; at most `max_in_flight` rows are unacknowledged.

    Rows that must stay in order form a lane. A row of a lane is sent when the one before it is acknowledged. So no row
    overtakes a failed one, and each has the whole timeout.
    """

    def __init__(self, producer: Producer, options: SinkOptions, reader: RowReader) -> None:
        self._producer = producer
        self._options = options
        self._max_rows = options.max_in_flight
        self._longest_s = options.send_timeout_s + _GRACE_S
        self._reader = reader
        self._done: queue.SimpleQueue[tuple[SinkRow, SendResult | BaseException]] = queue.SimpleQueue()
        self._lanes: dict[tuple[str, object], deque[SinkRow]] = {}
        self._rows = self._bytes = 0
        self._route_waits: dict[_Target, tuple[float, RetryPolicy]] = {}  # when the wait began, and its policy
        self._waiting_for_route: dict[_Target, list[SinkRow]] = {}  # to send again
        self._retry_at = 0.0
        self.acknowledged = self.possible_duplicates = 0

    def add(self, row: SinkRow) -> None:
        """Send a row, now or after the one before it in its lane; wait first while the limits are reached."""
        size = len(row.message.body)
        while self._rows >= self._max_rows or (self._rows and self._bytes + size > MAX_BYTES_IN_FLIGHT):
            self._wait_for_result()
        self._rows += 1
        self._bytes += size
        if (lane := row.lane) is not None:
            if (waiting := self._lanes.get(lane)) is not None:
                waiting.append(row)
                return
            self._lanes[lane] = deque()
        self._send(row)

    def _send(self, row: SinkRow) -> None:
        try:
            self._producer.hand_over(
                row.topic,
                row.message,
                KeyedResultSink(self._done, row),
                queue=row.queue,
                sharding_key=row.sharding_key,
                delay_level=row.delay_level,
                deliver_at=row.deliver_at,
            )
        except ConfigError as error:
            raise ConfigError(self._reader.describe_error(row.number, error)) from None

    def _wait_for_result(self) -> None:
        row, result = self._next_result()
        if isinstance(result, BaseException):
            if not isinstance(result, RouteNotFound) and not isinstance(result.__cause__, NoWritableQueue):
                raise self._failure(row, result) from result
            self._wait_for_route(row, result)
            return
        self.possible_duplicates += result.attempts > 1
        self._rows -= 1
        self._bytes -= len(row.message.body)
        self.acknowledged += 1
        if self._route_waits:
            self._route_waits.pop((row.topic, row.queue), None)
        if (lane := row.lane) is not None:
            if waiting := self._lanes[lane]:
                self._send(waiting.popleft())
            else:
                del self._lanes[lane]

    def _next_result(self) -> tuple[SinkRow, SendResult | BaseException]:
        """Return a row and its result. Send rows without a route again when their pause is over."""
        while self._waiting_for_route:
            left_s = self._retry_at - time.monotonic()
            if left_s <= 0:
                again, self._waiting_for_route = self._waiting_for_route, {}
                for row in itertools.chain(*again.values()):
                    self._send(row)
                break
            with contextlib.suppress(queue.Empty):
                # A much shorter timeout may pass while `get` begins, and then SimpleQueue waits forever.
                return self._done.get(timeout=max(left_s, 0.05))
        try:
            return self._done.get(timeout=self._longest_s)
        except queue.Empty as empty:
            raise RequestTimeout("a send", "the I/O thread", self._longest_s) from empty

    def _wait_for_route(self, row: SinkRow, error: BaseException) -> None:
        """Send a row again later, because a producer does not wait for a topic or queue that it has never seen.

        A task may start while the brokers of the topic restart. If other brokers are up, the topic counts as missing
        after `requestTimeoutMs`.

        Raises:
            RocketError: the time to wait is over.
        """
        target = row.topic, row.queue
        if target not in self._waiting_for_route:
            now = time.monotonic()
            if target not in self._route_waits:
                self._route_waits[target] = now, self._options.retry_policy()
                _warn_waiting(self._options, error)
            since, retry_policy = self._route_waits[target]
            pause_s = retry_policy.failed()
            is_late = now - since >= self._options.client.request_timeout_s
            if pause_s is None or (is_late and _any_broker_is_up(self._options)):
                raise self._failure(row, error) from error
            self._retry_at = min(now + pause_s, self._retry_at if self._waiting_for_route else math.inf)
            self._waiting_for_route[target] = []
        self._waiting_for_route[target].append(row)

    def _failure(self, row: SinkRow, error: BaseException) -> RocketError:
        text = self._reader.describe_error(row.number, error)
        if isinstance(error, RouteNotFound):
            text += "; if brokers may create topics on demand, set the option autoCreateTopic=true"
        return ConfigError(text) if isinstance(error, ConfigError) else RocketError(text)

    def finish(self) -> None:
        """Wait until every row is acknowledged."""
        while self._rows:
            self._wait_for_result()
