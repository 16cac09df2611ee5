"""Pull one range of a queue from its start to its end, and handle responses and errors.

Filters leave gaps between offsets, so the offset of a pull ahead is a guess, which is mostly right. If two responses
overlap, the rows of the second one count from the end of the first one. A gap between two responses is pulled before
the second one counts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.names import unwrap, wrap
from pyrocket_consumer.cluster.pull_core import Failed, PullCore, PullRequest, PullTemplate, pull_header
from pyrocket_consumer.cluster.routes import choose_address
from pyrocket_consumer.errors import (
    BrokerError,
    ClientClosed,
    ConnectError,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullResponse, PullStatus
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.columns import PulledRecords
from pyrocket_consumer.protocol.frame import BufferSlice, RemotingCommand
from pyrocket_consumer.spark.executor_cache import get_or_create
from pyrocket_consumer.spark.failures import WARN_AFTER_FAILURES, DataLoss, ReadFailed, RetryPolicy
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.options import ReadOptions
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.polled_connection import IdleConnections, PolledConnection

log = logger("spark")

MAX_AHEAD_BYTES = 32 * 1024 * 1024
"""Most bytes to pull ahead of the next messages, estimated by the size of the last response."""

_FIRST_RESPONSE_BYTES = 1024 * 1024  # the assumed size of a response until the first one
_AVOIDED_S = 30.0
_REMOVING_REMARK = "MESSAGE_WAS_REMOVING"  # with NO_MATCHED_MESSAGE: the broker is deleting these messages
_GONE_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER})  # no such topic, no such queue
_BAD_QUEUE_REMARK = "] is illegal, topic:"  # brokers before 5.3.2


class SharedPulls:
    """The pulls and messages of all ranges that a task reads. Used in the task's thread, except `connection`."""

    def __init__(self, cluster: Cluster, options: ReadOptions) -> None:
        self.cluster = cluster
        self.options = options
        self.in_flight = 0
        self.ready = deque[tuple[PulledRecords, int]]()  # delivered, with most rows
        self.ready_rows = self.ready_bytes = 0
        self.suspended_s = 0.0  # the time in which Spark suspended the task
        self._response_bytes = _FIRST_RESPONSE_BYTES  # of the last response
        self._idle = get_or_create(IdleConnections, options.client, IdleConnections)
        self._attempts: dict[str, asyncio.Task[PolledConnection]] = {}  # used on the I/O thread only

    def now(self) -> float:
        """Return the time in seconds, without the time in which Spark suspended the task."""
        return time.monotonic() - self.suspended_s

    def may_pull_ahead(self) -> bool:
        """Return whether a range may have more than its first pull in flight."""
        return self.in_flight * self._response_bytes < MAX_AHEAD_BYTES

    def deliver(self, pulled: PulledRecords, rows: int) -> None:
        """Add the next messages of a range, at most `rows` of them."""
        self._response_bytes = len(pulled.records)
        self.ready.append((pulled, rows))
        self.ready_rows += rows
        self.ready_bytes += len(pulled.records)

    def take(self, most_rows: int, most_bytes: int) -> list[PulledRecords]:
        """Return the next messages of any range, at least one response."""
        taken, rows, size = list[PulledRecords](), 0, 0
        while self.ready:
            pulled, most = self.ready[0]
            rows, size = rows + most, size + len(pulled.records)
            if taken and (rows > most_rows or size > most_bytes):
                break
            taken.append(pulled)
            self.ready.popleft()
            self.ready_rows -= most
            self.ready_bytes -= len(pulled.records)
        return taken

    def release(self, connections: Sequence[PolledConnection]) -> None:
        """Keep open connections for the worker's next task."""
        for connection in connections:
            self._idle.put(connection)
        try:
            self.cluster.loop.call_soon_threadsafe(self._stop_attempts, connections)
        except (RuntimeError, ClientClosed):
            pass  # the I/O thread has ended

    # --- on the I/O thread

    async def connection(self, address: str) -> PolledConnection:
        """Return the task's connection to `address`."""
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


class RangePuller:
    """Pulls one range from its begin to its end."""

    def __init__(self, shared: SharedPulls, wanted: QueueRange) -> None:
        options, queue = shared.options, wanted.queue
        namespace = options.client.namespace
        self.connection: PolledConnection | None = None
        self.is_finished = False
        self.error: RocketError | None = None
        self.due: float | None = None
        """When to try again, after a failure."""
        self.connecting: concurrent.futures.Future[PolledConnection] | None = None
        """The connection to pull from, until it is open."""
        self._stopped = False
        self._shared = shared
        self._cluster = shared.cluster
        self._options = options
        self._wanted = wanted
        self._queue = MessageQueue(wrap(namespace, queue.topic), queue.broker_name, queue.queue_id)
        self._row_queue = replace(queue, topic=unwrap(namespace, queue.topic))
        self._group = wrap(namespace, options.group)
        filtered = bool(options.selector.tags) or options.selector.expression_type != "TAG"
        self._core = PullCore(
            self._queue,
            wanted.begin,
            options.pull_batch_size,
            read_ahead=options.pulls_in_flight,
            end=wanted.end,
            step=0 if filtered else options.pull_batch_size,
        )
        self._templates: dict[int, PullTemplate] = {}
        self._avoided: dict[int, float] = {}  # ids that failed, and until when suggestions of them are not followed
        self._retry_policy = options.retry_policy(shared.now)
        self._startup_grace = options.startup_grace(shared.now)  # while a broker lacks expected data
        self._gap_policy = RetryPolicy(math.inf, None, shared.now)  # between gaps that follow each other

    # --- requests

    def pull(self) -> None:
        """Pull the next messages, and ahead of them at the offsets that probably follow."""
        core = self._core
        while self._is_pulling and (offset := core.next_pull()) is not None:
            if offset > core.next_offset and not self._shared.may_pull_ahead():
                return
            if self.connection is None or self.connection.closed:
                self.connecting = self._cluster.submit(self._open_connection())
                return
            self._send_pull(self.connection, offset)

    @property
    def _is_pulling(self) -> bool:
        return not self._stopped and self.due is None and self.connecting is None

    def _send_pull(self, connection: PolledConnection, offset: int) -> None:
        now = self._shared.now()
        pull = self._core.sent(offset, now)
        self._shared.in_flight += 1
        if (template := self._templates.get(pull.count)) is None:
            header = pull_header(self._group, self._queue, 0, pull.count, self._options.selector)
            template = self._templates[pull.count] = PullTemplate(header.to_fields())
        connection.send(
            partial(connection.encode, template.command(offset))
            if connection.is_signing
            else partial(template.encode, offset),
            partial(self._on_response, pull),
            now,
            self._options.client.request_timeout_s,
        )

    # --- connecting

    @property
    def is_waiting(self) -> bool:
        """Whether `wake` continues: once the `due` time has passed, or `connecting` is done."""
        return self.due is not None or self.connecting is not None

    async def _open_connection(self) -> PolledConnection:
        try:
            async with asyncio.timeout(self._options.client.request_timeout_s):
                return await self._shared.connection(await self._address())
        except TimeoutError:
            broker = f"broker {self._queue.broker_name!r}"
            raise ConnectError(broker, "not within the request timeout") from None

    def wake(self) -> None:
        """Continue, if the connection is open or the pause has passed."""
        if self.connecting is not None and self.connecting.done():
            connecting, self.connecting = self.connecting, None
            try:
                self.connection = connecting.result()
            except RocketError as error:
                self._on_failure(error, self._core.broker_id)
                return
            except concurrent.futures.CancelledError:
                self._fail(ClientClosed("the connections of this worker were closed; run the task again"))
                return
            self._core.server = self.connection.address
            self._process_responses()
        elif self.due is not None and self.due <= self._shared.now():
            self.due = None
            self._process_responses()

    async def _address(self) -> str:
        name = self._queue.broker_name
        lost: RocketError | None = None
        if self._retry_policy.failures or self._startup_grace.failures or name not in self._cluster.routes.all_brokers:
            try:
                await self._cluster.routes.get(self._queue.topic, refresh=True)
            except RocketError as error:
                lost = error
        broker_id = self._core.broker_id
        address = self._cluster.routes.address(name, broker_id)
        if address is None and isinstance(lost, RouteNotFound):  # its brokers know whether it is deleted
            broker = (await self._cluster.name_servers.cluster_info()).brokers.get(name)
            address = choose_address(broker.addresses, broker_id) if broker is not None else None
        if address is None:
            raise lost or ConnectError(f"broker {name!r}", "no known route names an address of it")
        return address

    # --- responses

    def pending_bodies(self) -> Iterator[BufferSlice]:
        """Yield the bodies of responses that wait for the pulls before them."""
        return (pull.body for pull in self._core.in_flight if pull.response is not None)

    def _on_response(self, pull: PullRequest, response: RemotingCommand | Exception, body: BufferSlice) -> None:
        if not pull.abandoned:
            pull.response, pull.body = response, body
            self._process_responses()

    def _process_responses(self) -> None:
        """Process the responses that come next in order, and pull more."""
        while self._is_pulling and (found := self._core.next_result()) is not None:
            pull, result = found
            self._shared.in_flight -= 1
            if isinstance(result, Failed):
                self._on_failure(result.error, pull.broker_id)
                continue
            header = result.header
            self._switch_broker(header.suggested_broker_id)
            if result.count:
                self._on_found(pull, header)
            elif header.status is not PullStatus.NO_MATCHED_MESSAGE or header.next_offset <= pull.offset:
                self._on_nothing(pull, header)
            elif result.response.remark == _REMOVING_REMARK:
                self._skip_or_fail(min(header.next_offset, self._wanted.end), header)
            else:
                self._advance(pull, header)
        self.pull()

    def _on_found(self, pull: PullRequest, header: PullResponse) -> None:
        begin = self._core.next_offset
        if header.next_offset > begin:
            end = min(header.next_offset, self._wanted.end)
            self._gap_policy.reset()
            self._shared.deliver(PulledRecords(self._row_queue, pull.body, begin, end), min(end - begin, pull.count))
        self._advance(pull, header)

    def _advance(self, pull: PullRequest, header: PullResponse) -> None:
        """Take note that all messages before the response's next offset are delivered."""
        self._reset_policies()
        self._core.advance(pull, header, 0.0)
        self._finish_at_end()

    def _finish_at_end(self) -> None:
        if self._core.next_offset >= self._wanted.end:
            self.stop()
            self.is_finished = True

    def _on_nothing(self, pull: PullRequest, header: PullResponse) -> None:
        """Handle a response that has no message, and does not advance."""
        offset = self._core.next_offset
        if header.offset_reset:
            log.warning("queue=%s was reset for group=%s; the query ignores the reset", self._row_queue, self._group)
            if pull.offset == offset:
                self._retry_or_fail("the broker reported a reset of the group, which a query ignores")
        elif pull.offset < offset:
            pass  # an outdated pull, which found no messages
        elif header.status is PullStatus.OFFSET_MOVED and header.min_offset > offset:
            self._skip_or_fail(min(header.min_offset, self._wanted.end), header)
        elif pull.broker_id != MASTER_ID or header.status is PullStatus.NO_MATCHED_MESSAGE:
            self._pull_from(MASTER_ID)  # the replica may be behind its master
            self._retry_or_fail(f"{self._core.server}, a replica, has nothing at {offset}")
        else:  # a broker that has just started reports wrong offsets
            reason = f"{self._core.server} has offsets [{header.min_offset}, {header.max_offset}) only"
            self.connection = None  # the route may have changed, too
            if not self._retry(reason, self._startup_grace):
                self._skip_or_fail(self._wanted.end, header)

    def _pull_from(self, broker_id: int) -> None:
        self._core.broker_id, self.connection = broker_id, None

    def _switch_broker(self, broker_id: int) -> None:
        """Pull from the broker that the response suggests, if the route has it."""
        if broker_id == self._core.broker_id or self._avoided.get(broker_id, 0) > self._shared.now():
            return
        if self._cluster.routes.address(self._queue.broker_name, broker_id, only_this=True) is not None:
            self._pull_from(broker_id)

    # --- failures

    def _on_failure(self, error: Exception, broker_id: int) -> None:
        """Retry, at a replica of broker `broker_id` if there is one, or fail."""
        if isinstance(error, RequestTimeout) and self._retry_policy.failures and self.connection is not None:
            self.connection.close("pulls got no response")  # it may be broken without an error
        is_gone, is_transient = _reports_gone(error), _is_transient(error)
        if not is_gone:
            self._startup_grace.reset()
        if is_transient and self._retry(str(error), self._startup_grace if is_gone else self._retry_policy):
            self._avoided[broker_id] = self._shared.now() + _AVOIDED_S
            ids = sorted(self._cluster.routes.all_brokers.get(self._queue.broker_name, {}))
            self._pull_from(next((each for each in ids if each > broker_id), MASTER_ID))
        elif is_gone:
            self._skip_or_fail(self._wanted.end, None)
        else:
            self._fail(ReadFailed(str(self._wanted), self._retry_policy.failures + (not is_transient), str(error)))

    def _fail(self, error: RocketError) -> None:
        self.error = error
        self.stop()

    def _reset_policies(self) -> None:
        self._retry_policy.reset()
        self._startup_grace.reset()

    def _retry(self, reason: str, retry_policy: RetryPolicy) -> bool:
        """Pull again after a pause, and keep responses with messages. Return False if no try is left."""
        if (pause_s := retry_policy.failed()) is None:
            return False
        level = logging.WARNING if retry_policy.failures == WARN_AFTER_FAILURES else logging.DEBUG
        log.log(level, "range=%s will be pulled again at %d reason=%s", self._wanted, self._core.next_offset, reason)
        self._shared.in_flight -= len(self._core.abandon(keep_found=True))
        self.due = self._shared.now() + pause_s
        return True

    def _retry_or_fail(self, reason: str) -> None:
        if not self._retry(reason, self._retry_policy):
            self._fail(ReadFailed(str(self._wanted), self._retry_policy.failures, reason))

    def _skip_or_fail(self, until: int, header: PullResponse | None) -> None:
        available = f"{header.min_offset} up to {header.max_offset}" if header is not None else "nothing"
        offset = self._core.next_offset
        reason = f"offsets {offset} up to {until} are gone" if header is not None else "the queue is gone"
        loss = DataLoss(self._wanted, available, reason)
        if self._options.fail_on_data_loss:
            self._fail(loss)
            return
        log.warning("skipped: %s", loss)
        self._reset_policies()
        self._core.next_offset = until
        pause_s = self._gap_policy.failed()
        self._finish_at_end()
        if not self.is_finished and pause_s is not None and self._gap_policy.failures > 1:
            self.due = self._shared.now() + pause_s  # or one gap after the other would be a busy loop

    def stop(self) -> None:
        """Pull no more."""
        self._stopped = True
        self._shared.in_flight -= len(self._core.abandon())
        self.due = None
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None


def _is_transient(error: Exception) -> bool:
    if isinstance(error, BrokerError):
        return error.retryable
    return isinstance(error, (ConnectError, ConnectionLost, RequestTimeout, RouteNotFound, ProtocolError))


def _reports_gone(error: Exception) -> bool:
    """Return whether the broker itself reports that. A name server without a route may only have lost the broker."""
    if not isinstance(error, BrokerError):
        return False
    return error.code in _GONE_CODES or (error.code == ResponseCode.SYSTEM_ERROR and _BAD_QUEUE_REMARK in error.remark)
