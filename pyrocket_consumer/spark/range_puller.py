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
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from pyrocket_consumer.admin.masters import cluster_info
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.broker import read_pull_response
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.responses import read_error
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
from pyrocket_consumer.protocol.codes import PullFlag, ResponseCode
from pyrocket_consumer.protocol.columns import PulledRecords
from pyrocket_consumer.protocol.command import PullMessageHeader, PullTemplate, request
from pyrocket_consumer.protocol.frame import BufferSlice, RemotingCommand
from pyrocket_consumer.spark.data_loss import DataLoss
from pyrocket_consumer.spark.options import ReadOptions
from pyrocket_consumer.spark.ranges import QueueRange
from pyrocket_consumer.spark.retry_policy import WARN_AFTER_FAILURES, RetryPolicy
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.polled_connection import EMPTY_SLICE, PolledConnection

log = logger("spark")

_AVOIDED_S = 30.0

_PULL_CODES = frozenset(status.value for status in PullStatus)
_REMOVING_REMARK = "MESSAGE_WAS_REMOVING"  # with NO_MATCHED_MESSAGE: the broker is deleting these messages
_GONE_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER})  # no such topic, no such queue
_BAD_QUEUE_REMARK = "] is illegal, topic:"  # brokers before 5.3.2


class ReadFailed(RocketError):
    """A range could not be read. The task fails, and Spark may run it again."""

    def __init__(self, what: str, tries: int, reason: str) -> None:
        super().__init__(what, tries, reason)
        self.what, self.tries, self.reason = what, tries, reason

    def __str__(self) -> str:
        return f"reading {self.what} failed after {self.tries} {'try' if self.tries == 1 else 'tries'}: {self.reason}"


class PullerHost(Protocol):
    """The task that reads a range. Its methods run in the task's thread, except `connection`."""

    cluster: Cluster
    options: ReadOptions
    in_flight: int
    """The number of pulls of all its ranges; each range counts its own."""

    def now(self) -> float:
        """Return the time in seconds, without the time in which Spark suspended the task."""

    def may_pull_ahead(self) -> bool:
        """Return whether a range may have more than its first pull in flight."""

    def deliver(self, pulled: PulledRecords, rows: int) -> None:
        """Take the next messages of a range, at most `rows` of them."""

    def watch(self, connection: PolledConnection) -> None:
        """Begin to receive from `connection`."""

    def wake_later(self, puller: RangePuller) -> None:
        """Call `puller.wake()` regularly, once its `due` time has passed or its `connecting` is done."""

    def finished(self, puller: RangePuller) -> None:
        """Take note that a range was read to its end."""

    def fail(self, error: RocketError) -> None:
        """Stop, and raise the error in the task."""

    async def connection(self, address: str) -> PolledConnection:
        """Return the task's connection to `address`; on the cluster's I/O thread."""


class _PullRequest:
    """One pull in flight, or one with a response that waits for the pulls before it."""

    __slots__ = ("offset", "count", "broker_id", "response", "body", "abandoned")

    def __init__(self, offset: int, count: int, broker_id: int) -> None:
        self.offset = offset
        self.count = count
        self.broker_id = broker_id
        self.response: RemotingCommand | Exception | None = None
        self.body = EMPTY_SLICE
        self.abandoned = False


class RangePuller:
    """Pulls one range from its begin to its end."""

    def __init__(self, host: PullerHost, wanted: QueueRange) -> None:
        options, queue = host.options, wanted.queue
        namespace = options.client.namespace
        self._host = host
        self._cluster = host.cluster
        self._wanted = wanted
        self._queue = MessageQueue(wrap(namespace, queue.topic), queue.broker_name, queue.queue_id)
        self._row_queue = replace(queue, topic=unwrap(namespace, queue.topic))
        self._group = wrap(namespace, options.group)
        self._next_offset = wanted.begin  # everything before it is delivered
        self._pulls: deque[_PullRequest] = deque()  # by offset
        filtered = bool(options.selector.tags) or options.selector.expression_type != "TAG"
        # The number of offsets that the last pull covered; 0 means unknown.
        self._pull_span = 0 if filtered else options.pull_batch_size
        self._templates: dict[int, PullTemplate] = {}
        self._connection: PolledConnection | None = None
        self._broker_id = MASTER_ID
        self._avoided: dict[int, float] = {}  # ids that failed, and until when suggestions of them are not followed
        self._retry_policy = options.retry_policy(host.now)
        self._startup_grace = options.startup_grace(host.now)  # while a broker lacks expected data
        self._gap_policy = RetryPolicy(math.inf, None, host.now)  # between gaps that follow each other
        self.due: float | None = None
        """When to try again, after a failure."""
        self.connecting: concurrent.futures.Future[PolledConnection] | None = None
        """The connection to pull from, until it is open."""
        self._stopped = False

    # --- requests

    def pull(self) -> None:
        """Pull the next messages, and ahead of them at the offsets that probably follow."""
        in_flight, span = self._pulls, self._pull_span
        offset, index, without_response = self._next_offset, 0, 0  # a pull of `offset` belongs at `index`
        while not self._stopped and not self.is_waiting:
            while index < len(in_flight) and (pull := in_flight[index]).offset <= offset:
                if pull.offset + span > offset:
                    offset = pull.offset + span
                if pull.response is None:
                    without_response += 1
                index += 1
            if index and not (span and self._may_pull_ahead(offset, without_response)):
                return  # the first pull is needed in any case
            if self._connection is None or self._connection.closed:
                self._connect()
                return
            self._send_pull(self._connection, offset, index)

    def _may_pull_ahead(self, offset: int, without_response: int) -> bool:
        return (
            without_response < self._host.options.pulls_in_flight
            and offset < self._wanted.end
            and self._host.may_pull_ahead()
        )

    def _send_pull(self, connection: PolledConnection, offset: int, index: int) -> None:
        options = self._host.options
        pull = _PullRequest(offset, min(options.pull_batch_size, self._wanted.end - offset), self._broker_id)
        self._host.in_flight += 1
        self._pulls.insert(index, pull)
        if connection.is_signing:
            command = request(self._header(pull))
            connection.send(
                lambda opaque: connection.encode(command, opaque),
                lambda response, body: self._on_response(pull, response, body),
                self._host.now(),
                options.client.request_timeout_s,
            )
            return
        template = self._templates.get(pull.count) or self._template(pull.count)
        connection.send(
            lambda opaque: template.encode(opaque, offset, PullFlag.SUBSCRIPTION),
            lambda response, body: self._on_response(pull, response, body),
            self._host.now(),
            options.client.request_timeout_s,
        )

    def _template(self, count: int) -> PullTemplate:
        selector, queue = self._host.options.selector, self._queue
        template = self._templates[count] = PullTemplate(
            self._group,
            queue.topic,
            queue.queue_id,
            count,
            0,
            selector.version,
            queue.broker_name,
            expression=selector.expression,
            expression_type=selector.expression_type,
        )
        return template

    def _header(self, pull: _PullRequest) -> PullMessageHeader:
        selector, queue = self._host.options.selector, self._queue
        return PullMessageHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=pull.offset,
            max_msg_nums=pull.count,
            sys_flag=PullFlag.SUBSCRIPTION,
            sub_version=selector.version,
            subscription=selector.expression,
            expression_type=selector.expression_type,
            broker_name=queue.broker_name,
        )

    # --- connecting

    @property
    def is_waiting(self) -> bool:
        return self.due is not None or self.connecting is not None

    def _connect(self) -> None:
        self.connecting = self._cluster.submit(self._open_connection())
        self._host.wake_later(self)

    async def _open_connection(self) -> PolledConnection:
        try:
            async with asyncio.timeout(self._host.options.client.request_timeout_s):
                return await self._host.connection(await self._address())
        except TimeoutError:
            broker = f"broker {self._queue.broker_name!r}"
            raise ConnectError(broker, "not within the request timeout") from None

    def wake(self) -> None:
        """Continue, if the connection is open or the pause has passed."""
        if self.connecting is not None and self.connecting.done():
            connecting, self.connecting = self.connecting, None
            try:
                self._connection = connecting.result()
            except RocketError as error:
                self._on_failure(error)
                return
            except concurrent.futures.CancelledError:
                self._host.fail(ClientClosed("the connections of this worker were closed; run the task again"))
                return
            self._host.watch(self._connection)
            self._process_responses()
        elif self.due is not None and self.due <= self._host.now():
            self.due = None
            self._process_responses()

    async def _address(self) -> str:
        name = self._queue.broker_name
        lost: RocketError | None = None
        if self._retry_policy.failures or self._startup_grace.failures or name not in self._cluster.broker_addresses():
            try:
                await self._cluster.route(self._queue.topic, refresh=True)
            except RocketError as error:
                lost = error
        address = self._cluster.address(name, self._broker_id)
        if address is None and isinstance(lost, RouteNotFound):  # its brokers know whether it is deleted
            broker = (await cluster_info(self._cluster)).brokers.get(name)
            address = choose_address(broker.addresses, self._broker_id) if broker is not None else None
        if address is None:
            raise lost or ConnectError(f"broker {name!r}", "no known route names an address of it")
        return address

    # --- responses

    def pending_bodies(self) -> Iterator[BufferSlice]:
        """Yield the bodies of responses that wait for the pulls before them."""
        return (pull.body for pull in self._pulls if pull.response is not None)

    def _on_response(self, pull: _PullRequest, response: RemotingCommand | Exception, body: BufferSlice) -> None:
        if not pull.abandoned:
            pull.response, pull.body = response, body
            self._process_responses()

    def _process_responses(self) -> None:
        """Process the responses that come next in order, and pull more."""
        in_flight = self._pulls
        while in_flight and in_flight[0].response is not None and in_flight[0].offset <= self._next_offset:
            if self.is_waiting or self._stopped:
                return
            pull = in_flight.popleft()
            self._host.in_flight -= 1
            assert pull.response is not None
            self._process_response(pull, pull.response)
        self.pull()

    def _process_response(self, pull: _PullRequest, response: RemotingCommand | Exception) -> None:
        if isinstance(response, Exception):
            self._on_failure(response)
            return
        if response.code not in _PULL_CODES:
            self._on_failure(read_error(response, self._address_text()))
            return
        try:
            header = read_pull_response(response, pull.offset)
        except ProtocolError as error:
            self._on_failure(error)
            return
        self._switch_broker(header.suggested_broker_id)
        if header.status is PullStatus.FOUND:
            self._on_found(pull, header)
        elif header.next_offset > pull.offset and header.status is PullStatus.NO_MATCHED_MESSAGE:
            if response.remark == _REMOVING_REMARK:
                self._skip_or_fail(min(header.next_offset, self._wanted.end), header)
            else:
                self._advance(pull, header.next_offset)
        elif header.offset_reset:
            log.warning("queue=%s was reset for group=%s; the query ignores the reset", self._row_queue, self._group)
            if pull.offset == self._next_offset:
                self._retry_or_fail("the broker reported a reset of the group, which a query ignores")
        elif pull.offset < self._next_offset:
            pass  # an outdated pull, which found no messages
        elif header.status is PullStatus.OFFSET_MOVED and header.min_offset > self._next_offset:
            self._skip_or_fail(min(header.min_offset, self._wanted.end), header)
        elif pull.broker_id != MASTER_ID or header.status is PullStatus.NO_MATCHED_MESSAGE:
            self._broker_id, self._connection = MASTER_ID, None  # the replica may be behind its master
            self._retry_or_fail(f"{self._address_text()}, a replica, has nothing at {self._next_offset}")
        else:
            self._on_too_short(header)

    def _on_found(self, pull: _PullRequest, header: PullResponse) -> None:
        if header.next_offset <= pull.offset or not pull.body:
            text = f"pull of {self._queue} at {pull.offset}: the response does not advance ({header})"
            self._on_failure(ProtocolError(text))
            return
        if header.next_offset > self._next_offset:
            end = min(header.next_offset, self._wanted.end)
            rows = min(end - self._next_offset, pull.count)
            self._gap_policy.reset()
            self._host.deliver(PulledRecords(self._row_queue, pull.body, self._next_offset, end), rows)
        self._advance(pull, header.next_offset)

    def _advance(self, pull: _PullRequest, next_offset: int) -> None:
        """Take note that all messages before `next_offset` are delivered."""
        self._reset_policies()
        if pull.count == self._host.options.pull_batch_size:
            self._pull_span = next_offset - pull.offset
        self._next_offset = max(self._next_offset, next_offset)
        if self._next_offset >= self._wanted.end:
            self.stop()
            self._host.finished(self)

    def _switch_broker(self, broker_id: int) -> None:
        """Pull from the broker that the response suggests, if the route has it."""
        if broker_id == self._broker_id or self._avoided.get(broker_id, 0) > self._host.now():
            return
        if self._cluster.address(self._queue.broker_name, broker_id, only_this=True) is not None:
            self._broker_id, self._connection = broker_id, None

    def _address_text(self) -> str:
        return self._connection.address if self._connection is not None else self._queue.broker_name

    # --- failures

    def _on_failure(self, error: Exception) -> None:
        """Retry, at a replica if there is one, or fail."""
        if isinstance(error, RequestTimeout) and self._retry_policy.failures and self._connection is not None:
            self._connection.close("pulls got no response")  # it may be broken without an error
        is_gone, is_transient = _reports_gone(error), _is_transient(error)
        if not is_gone:
            self._startup_grace.reset()
        if is_transient and self._retry(str(error), self._startup_grace if is_gone else self._retry_policy):
            self._try_next_address()
        elif is_gone:
            self._skip_or_fail(self._wanted.end, None)
        else:
            self._fail(str(error), self._retry_policy.failures + (not is_transient))

    def _fail(self, reason: str, tries: int) -> None:
        self._host.fail(ReadFailed(str(self._wanted), tries, reason))

    def _reset_policies(self) -> None:
        self._retry_policy.reset()
        self._startup_grace.reset()

    def _try_next_address(self) -> None:
        self._avoided[self._broker_id] = self._host.now() + _AVOIDED_S
        ids = sorted(self._cluster.broker_addresses().get(self._queue.broker_name, {}))
        later = [each for each in ids if each > self._broker_id]
        self._broker_id = later[0] if later else MASTER_ID
        self._connection = None

    def _retry(self, reason: str, retry_policy: RetryPolicy) -> bool:
        """Pull again after a pause, and keep responses with messages. Return False if no try is left."""
        if (pause_s := retry_policy.failed()) is None:
            return False
        level = logging.WARNING if retry_policy.failures == WARN_AFTER_FAILURES else logging.DEBUG
        log.log(level, "range=%s will be pulled again at %d reason=%s", self._wanted, self._next_offset, reason)
        found = [pull for pull in self._pulls if pull.response is not None and _is_found(pull.response)]
        self._abandon_pulls()
        self._pulls.extend(found)
        self._host.in_flight += len(found)
        self.due = self._host.now() + pause_s
        self._host.wake_later(self)
        return True

    def _retry_or_fail(self, reason: str) -> None:
        if not self._retry(reason, self._retry_policy):
            self._fail(reason, self._retry_policy.failures)

    def _on_too_short(self, header: PullResponse) -> None:
        """Retry if the queue ends before the range, because a broker that has just started reports wrong offsets."""
        reason = f"{self._address_text()} has offsets [{header.min_offset}, {header.max_offset}) only"
        self._connection = None  # the route may have changed, too
        if not self._retry(reason, self._startup_grace):
            self._skip_or_fail(self._wanted.end, header)

    def _skip_or_fail(self, until: int, header: PullResponse | None) -> None:
        available = f"{header.min_offset} up to {header.max_offset}" if header is not None else "nothing"
        reason = f"offsets {self._next_offset} up to {until} are gone" if header is not None else "the queue is gone"
        loss = DataLoss(self._wanted, available, reason)
        if self._host.options.fail_on_data_loss:
            self._host.fail(loss)
            return
        log.warning("skipped: %s", loss)
        self._reset_policies()
        self._next_offset = until
        pause_s = self._gap_policy.failed()
        if until >= self._wanted.end:
            self.stop()
            self._host.finished(self)
        elif pause_s is not None and self._gap_policy.failures > 1:  # or one gap after the other would be a busy loop
            self.due = self._host.now() + pause_s
            self._host.wake_later(self)

    def stop(self) -> None:
        """Pull no more."""
        self._stopped = True
        self._abandon_pulls()
        self.due = None
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None

    def _abandon_pulls(self) -> None:
        """Ignore the responses to the pulls in flight."""
        for pull in self._pulls:
            pull.abandoned = True
        self._host.in_flight -= len(self._pulls)
        self._pulls.clear()


def _is_found(response: RemotingCommand | Exception) -> bool:
    return isinstance(response, RemotingCommand) and response.code == ResponseCode.SUCCESS


def _is_transient(error: Exception) -> bool:
    if isinstance(error, BrokerError):
        return error.retryable
    return isinstance(error, (ConnectError, ConnectionLost, RequestTimeout, RouteNotFound, ProtocolError))


def _reports_gone(error: Exception) -> bool:
    """Return whether the broker itself reports that. A name server without a route may only have lost the broker."""
    if not isinstance(error, BrokerError):
        return False
    return error.code in _GONE_CODES or (error.code == ResponseCode.SYSTEM_ERROR and _BAD_QUEUE_REMARK in error.remark)
