"""Read the ranges of a task, with several pulls of several queues in flight, and yield them as record batches.

The task's thread pulls into one buffer for each broker, and makes columns from that buffer. Passing the bytes to
another thread would cost more than all of that. Responses that arrive meanwhile wait in the system's buffers. The
worker's I/O thread only finds brokers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.errors import ClientClosed, ConfigError, ProtocolError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.columns import PulledRecords, record_batches
from pyrocket_consumer.protocol.compression import BodyTooLarge
from pyrocket_consumer.spark.executor_cache import discard, get_or_create
from pyrocket_consumer.spark.options import DamagedBodies, ReadOptions
from pyrocket_consumer.spark.range_puller import RangePuller, ReadFailed
from pyrocket_consumer.spark.ranges import QueueRange
from pyrocket_consumer.spark.retry_policy import WARN_AFTER_FAILURES
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.polled_connection import IdleConnections, PolledConnection

log = logger("spark")

BATCH_ROWS = 2048
BATCH_BYTES = 4 * 1024 * 1024
"""The most bytes of stored records in a batch. It has more only if a single response has."""

MAX_AHEAD_BYTES = 32 * 1024 * 1024
"""Most bytes to pull ahead of the next messages, estimated by the size of the last response."""

MAX_CONCURRENT_QUEUES = 16
"""Most ranges of a task to pull at once; the others follow when these are read."""

_FIRST_RESPONSE_BYTES = 1024 * 1024  # the assumed size of a response until the first one
_MAX_BODIES_LOGGED = 5  # damaged bodies that the log names
_CONNECT_CHECK_INTERVAL_S = 0.02  # between checks for a new connection, while responses may arrive
_LONGEST_WAIT_S = 5.0
_READ_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


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
        self.cluster = cluster
        self.options = options
        self.in_flight = 0
        self._idle = get_or_create(IdleConnections, options.client, IdleConnections)
        self._attempts: dict[str, asyncio.Task[PolledConnection]] = {}  # used on the I/O thread only
        self._connections: dict[PolledConnection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._pending = deque(ranges)
        self._pullers: dict[RangePuller, None] = {}
        self._waiting_pullers: dict[RangePuller, None] = {}
        self._ready: deque[tuple[PulledRecords, int]] = deque()  # delivered, with most rows
        self._ready_rows = self._ready_bytes = 0
        self._response_bytes = _FIRST_RESPONSE_BYTES  # of the last response
        self._error: RocketError | None = None
        self._suspended_s = 0.0

    # --- the task's loop

    def portions(self) -> Iterator[list[PulledRecords]]:
        """Yield the records of each batch as soon as there are enough. The next one reuses their buffers."""
        self._start_ranges()
        while self._pullers or self._ready:
            while self._pullers and self._ready_rows < BATCH_ROWS and self._ready_bytes < BATCH_BYTES:
                self._poll_connections()
            suspended_at = time.monotonic()
            yield self._portion()
            self._suspended_s += time.monotonic() - suspended_at
            wanted = [pulled.records for pulled, _ in self._ready]
            for puller in self._pullers:
                wanted += puller.pending_bodies()
            for connection in self._connections:
                connection.release_except(wanted)
            self._expire()

    def _portion(self) -> list[PulledRecords]:
        portion, rows, size = list[PulledRecords](), 0, 0
        while self._ready:
            pulled, most = self._ready[0]
            rows, size = rows + most, size + len(pulled.records)
            if portion and (rows > BATCH_ROWS or size > BATCH_BYTES):
                break
            portion.append(pulled)
            self._ready.popleft()
            self._ready_rows -= most
            self._ready_bytes -= len(pulled.records)
        return portion

    def _poll_connections(self) -> None:
        """Send pending requests and read responses; wait a moment if none has arrived."""
        has_received = False
        for connection in list(self._connections):
            connection.flush()
            has_received |= connection.receive()
            connection.flush()  # the broker works while columns are made
        self._drop_closed()
        if not has_received:
            self._wait()
        if self._waiting_pullers:
            waiting, self._waiting_pullers = self._waiting_pullers, {}
            for puller in waiting:
                puller.wake()
                if puller.is_waiting:
                    self._waiting_pullers[puller] = None
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        """Wait until a response may have arrived, a connection is open, or a time is due."""
        if self._expire():
            return
        now = self.now()
        times = [puller.due for puller in self._waiting_pullers if puller.due is not None]
        times += [each.next_deadline for each in self._connections if each.next_deadline is not None]
        timeout_s = max(0.0, min([*(each - now for each in times), _LONGEST_WAIT_S]))
        connecting = [puller.connecting for puller in self._waiting_pullers if puller.connecting is not None]
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
        now = self.now()
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
        mine = list(self._connections)
        for connection in mine:
            self._idle.put(connection)
        try:
            self.cluster.loop.call_soon_threadsafe(self._stop_attempts, mine)
        except (RuntimeError, ClientClosed):
            pass  # the I/O thread has ended

    # --- PullerHost

    def _start_ranges(self) -> None:
        while self._pending and len(self._pullers) < MAX_CONCURRENT_QUEUES and self._error is None:
            puller = RangePuller(self, self._pending.popleft())
            self._pullers[puller] = None
            puller.pull()

    def now(self) -> float:
        return time.monotonic() - self._suspended_s

    def may_pull_ahead(self) -> bool:
        return self.in_flight * self._response_bytes < MAX_AHEAD_BYTES

    def deliver(self, pulled: PulledRecords, rows: int) -> None:
        self._response_bytes = len(pulled.records)
        self._ready.append((pulled, rows))
        self._ready_rows += rows
        self._ready_bytes += len(pulled.records)

    def watch(self, connection: PolledConnection) -> None:
        self._drop_closed()
        if connection not in self._connections and not connection.closed:
            self._connections[connection] = None
            self._selector.register(connection.socket, selectors.EVENT_READ)

    def _drop_closed(self) -> None:
        for connection in [each for each in self._connections if each.closed]:
            del self._connections[connection]
            self._selector.unregister(connection.socket)

    def wake_later(self, puller: RangePuller) -> None:
        self._waiting_pullers[puller] = None

    def finished(self, puller: RangePuller) -> None:
        self._pullers.pop(puller, None)
        self._start_ranges()

    def fail(self, error: RocketError) -> None:
        if self._error is None:
            self._error = error
            for puller in self._pullers:
                puller.stop()

    # --- on the I/O thread

    async def connection(self, address: str) -> PolledConnection:
        attempt = self._attempts.get(address)
        if attempt is None or (attempt.done() and ((found := _result(attempt)) is None or found.closed)):
            attempt = self._attempts[address] = self.cluster.loop.create_task(self._open(address))
        return await asyncio.shield(attempt)

    async def _open(self, address: str) -> PolledConnection:
        return self._idle.take(address) or await self.cluster.open_polled_connection(address)

    def _stop_attempts(self, known: Sequence[PolledConnection]) -> None:
        for attempt in self._attempts.values():
            if not attempt.done():
                attempt.cancel()
            elif (found := _result(attempt)) is not None and found not in known:
                self._idle.put(found)


def _result(attempt: asyncio.Task[PolledConnection]) -> PolledConnection | None:
    return None if attempt.cancelled() or attempt.exception() is not None else attempt.result()
