"""One range of a queue, from its begin to its end: what to ask for, what the answers mean, what to do about trouble.

Offsets are dense but for filters, so pulls ahead are guesses that are mostly right: where two overlap the second
answer's rows count from where the first one's end, and a hole between two is pulled before the second counts.
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
from pyrocket_consumer.cluster.broker import read_pull_answer
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.responses import read_error
from pyrocket_consumer.cluster.routes import choose_address
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    ConsumerClosed,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullAnswer, PullStatus
from pyrocket_consumer.protocol.codes import PullFlag, ResponseCode
from pyrocket_consumer.protocol.columns import PulledRecords
from pyrocket_consumer.protocol.command import PullMessageHeader, PullTemplate, request
from pyrocket_consumer.protocol.frame import Extent, RemotingCommand
from pyrocket_consumer.spark.data_loss import DataLoss
from pyrocket_consumer.spark.options import ReadOptions
from pyrocket_consumer.spark.ranges import QueueRange
from pyrocket_consumer.spark.retry_policy import WORTH_A_WARNING, Patience
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.blocking_connection import NOTHING, DirectConnection

log = logger("spark")

_AVOIDED_S = 30.0

_PULL_CODES = frozenset(status.value for status in PullStatus)
_REMOVING_REMARK = "MESSAGE_WAS_REMOVING"  # with NO_MATCHED_MESSAGE: what was asked for is being deleted
_GONE_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER})  # no such topic, no such queue
_BAD_QUEUE_REMARK = "] is illegal, topic:"  # brokers before 5.3.2


class ReadFailed(RocketError):
    """A range could not be read. The task fails; Spark may run it again."""

    def __init__(self, what: str, tries: int, reason: str) -> None:
        super().__init__(what, tries, reason)
        self.what, self.tries, self.reason = what, tries, reason

    def __str__(self) -> str:
        return f"reading {self.what} failed after {self.tries} {'try' if self.tries == 1 else 'tries'}: {self.reason}"


class Reader(Protocol):
    """What a range needs of the task that reads it. Everything happens in the task's thread but `connection`."""

    cluster: Cluster
    options: ReadOptions
    under_way: int
    """Pulls of all its ranges; each counts its own."""

    def now(self) -> float:
        """Return the time, in seconds, without that in which the task was busy elsewhere."""

    def has_room_ahead(self) -> bool:
        """Whether more may be asked for than what must come next."""

    def deliver(self, pulled: PulledRecords, rows: int) -> None:
        """Take the next messages of a range, at most `rows`."""

    def watch(self, connection: DirectConnection) -> None:
        """Receive from `connection` from now on."""

    def rest(self, puller: RangePuller) -> None:
        """Call `puller.wake()` from time to time, from when its `due` has come or its `finding` is done."""

    def finished(self, puller: RangePuller) -> None:
        """A range is read to its end."""

    def fail(self, error: RocketError) -> None:
        """Give up: the task gets the error."""

    async def connection(self, address: str) -> DirectConnection:
        """Return the task's connection to `address`; on the cluster's I/O thread."""


class _Pull:
    """One pull under way, or answered and waiting for its turn."""

    __slots__ = ("offset", "count", "broker_id", "answer", "body", "abandoned")

    def __init__(self, offset: int, count: int, broker_id: int) -> None:
        self.offset = offset
        self.count = count
        self.broker_id = broker_id
        self.answer: RemotingCommand | Exception | None = None
        self.body = NOTHING
        self.abandoned = False


class RangePuller:
    """Pulls one range from its begin to its end."""

    def __init__(self, reader: Reader, wanted: QueueRange) -> None:
        options, queue = reader.options, wanted.queue
        namespace = options.client.namespace
        self._reader = reader
        self._cluster = reader.cluster
        self._wanted = wanted
        self._queue = MessageQueue(wrap(namespace, queue.topic), queue.broker_name, queue.queue_id)
        self._shown = replace(queue, topic=unwrap(namespace, queue.topic))
        self._group = wrap(namespace, options.group)
        self._position = wanted.begin  # everything before it is delivered
        self._under_way: deque[_Pull] = deque()  # by offset
        filtered = bool(options.selector.tags) or options.selector.expression_type != "TAG"
        self._step = 0 if filtered else options.pull_batch_size  # how far the last pull went; 0: nobody knows
        self._templates: dict[int, PullTemplate] = {}
        self._connection: DirectConnection | None = None
        self._broker_id = MASTER_ID
        self._avoided: dict[int, float] = {}  # ids that failed, and until when suggestions of them are not followed
        self._patience = options.patience(reader.now)
        self._doubt = options.doubt(reader.now)  # while a broker that answers has not what there should be
        self._gaps = Patience(math.inf, None, reader.now)  # while there is nothing between one and the next
        self.due: float | None = None
        """When to try again, after a failure."""
        self.finding: concurrent.futures.Future[DirectConnection] | None = None
        """The connection to pull from, while it is looked for."""
        self._stopped = False

    # --- asking

    def pull(self) -> None:
        """Ask for what comes next, and for what probably comes after it."""
        under_way, step = self._under_way, self._step
        offset, place, unanswered = self._position, 0, 0  # no pull seems to cover the offset; its own is there in line
        while not self._stopped and not self.rests:
            while place < len(under_way) and (pull := under_way[place]).offset <= offset:
                if pull.offset + step > offset:
                    offset = pull.offset + step
                if pull.answer is None:
                    unanswered += 1
                place += 1
            if place and not (step and self._may_ask_ahead(offset, unanswered)):
                return  # but nothing goes on without the first
            if self._connection is None or self._connection.closed:
                self._connect()
                return
            self._ask(self._connection, offset, place)

    def _may_ask_ahead(self, offset: int, unanswered: int) -> bool:
        return (
            unanswered < self._reader.options.pulls_in_flight
            and offset < self._wanted.end
            and self._reader.has_room_ahead()
        )

    def _ask(self, connection: DirectConnection, offset: int, place: int) -> None:
        options = self._reader.options
        pull = _Pull(offset, min(options.pull_batch_size, self._wanted.end - offset), self._broker_id)
        self._reader.under_way += 1
        self._under_way.insert(place, pull)
        if connection.signs:
            command = request(self._header(pull))
            connection.send(
                lambda opaque: connection.encode(command, opaque),
                lambda answer, body: self._answered(pull, answer, body),
                self._reader.now(),
                options.client.request_timeout_s,
            )
            return
        template = self._templates.get(pull.count) or self._template(pull.count)
        connection.send(
            lambda opaque: template.encode(opaque, offset, PullFlag.SUBSCRIPTION),
            lambda answer, body: self._answered(pull, answer, body),
            self._reader.now(),
            options.client.request_timeout_s,
        )

    def _template(self, count: int) -> PullTemplate:
        selector, queue = self._reader.options.selector, self._queue
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

    def _header(self, pull: _Pull) -> PullMessageHeader:
        selector, queue = self._reader.options.selector, self._queue
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
    def rests(self) -> bool:
        return self.due is not None or self.finding is not None

    def _connect(self) -> None:
        self.finding = self._cluster.submit(self._find_connection())
        self._reader.rest(self)

    async def _find_connection(self) -> DirectConnection:
        try:
            async with asyncio.timeout(self._reader.options.client.request_timeout_s):
                return await self._reader.connection(await self._address())
        except TimeoutError:
            broker = f"broker {self._queue.broker_name!r}"
            raise ConnectError(broker, "not within the time for a request") from None

    def wake(self) -> None:
        """Go on, if that for which it rests is there."""
        if self.finding is not None and self.finding.done():
            finding, self.finding = self.finding, None
            try:
                self._connection = finding.result()
            except RocketError as error:
                self._failed(error)
                return
            except concurrent.futures.CancelledError:
                self._reader.fail(ConsumerClosed("the connections of this worker were closed; run the task again"))
                return
            self._reader.watch(self._connection)
            self._go_on()
        elif self.due is not None and self.due <= self._reader.now():
            self.due = None
            self._go_on()

    async def _address(self) -> str:
        name = self._queue.broker_name
        lost: RocketError | None = None
        if self._patience.failures or self._doubt.failures or name not in self._cluster.broker_addresses():
            try:
                await self._cluster.route(self._queue.topic, refresh=True)
            except RocketError as error:
                lost = error
        address = self._cluster.address(name, self._broker_id)
        if address is None and isinstance(lost, RouteNotFound):  # the broker itself knows whether the topic is deleted
            broker = (await cluster_info(self._cluster)).brokers.get(name)
            address = choose_address(broker.addresses, self._broker_id) if broker is not None else None
        if address is None:
            raise lost or ConnectError(f"broker {name!r}", "no known route names an address of it")
        return address

    # --- answers

    def held(self) -> Iterator[Extent]:
        """Yield the bodies of answers that have come, and whose turn has not."""
        return (pull.body for pull in self._under_way if pull.answer is not None)

    def _answered(self, pull: _Pull, answer: RemotingCommand | Exception, body: Extent) -> None:
        if not pull.abandoned:
            pull.answer, pull.body = answer, body
            self._go_on()

    def _go_on(self) -> None:
        """Take the answers whose turn has come, and ask for more."""
        under_way = self._under_way
        while under_way and under_way[0].answer is not None and under_way[0].offset <= self._position:
            if self.rests or self._stopped:
                return
            pull = under_way.popleft()
            self._reader.under_way -= 1
            assert pull.answer is not None
            self._take(pull, pull.answer)
        self.pull()

    def _take(self, pull: _Pull, answer: RemotingCommand | Exception) -> None:
        if isinstance(answer, Exception):
            self._failed(answer)
            return
        if answer.code not in _PULL_CODES:
            self._failed(read_error(answer, self._where()))
            return
        try:
            header = read_pull_answer(answer, pull.offset)
        except ProtocolError as error:
            self._failed(error)
            return
        self._follow(header.suggested_broker_id)
        if header.status is PullStatus.FOUND:
            self._found(pull, header)
        elif header.next_offset > pull.offset and header.status is PullStatus.NO_MATCHED_MESSAGE:
            if answer.remark == _REMOVING_REMARK:
                self._lost(min(header.next_offset, self._wanted.end), header)
            else:
                self._moved(pull, header.next_offset)
        elif header.offset_reset:
            log.warning("queue=%s was reset for group=%s; the query goes on where it is", self._shown, self._group)
            if pull.offset == self._position:
                self._again_or_fail("the broker told of a reset, which does not concern a query")
        elif pull.offset < self._position:
            pass  # where it was asked is behind us, and it found nothing further on
        elif header.status is PullStatus.OFFSET_MOVED and header.min_offset > self._position:
            self._lost(min(header.min_offset, self._wanted.end), header)
        elif pull.broker_id != MASTER_ID or header.status is PullStatus.NO_MATCHED_MESSAGE:
            self._broker_id, self._connection = MASTER_ID, None  # a replica that is behind, or cannot tell
            self._again_or_fail(f"{self._where()} has nothing at {self._position}, and is no master")
        else:
            self._missing(header)

    def _found(self, pull: _Pull, header: PullAnswer) -> None:
        if header.next_offset <= pull.offset or not pull.body:
            self._failed(ProtocolError(f"pull of {self._queue} at {pull.offset} was answered {header}: no way on"))
            return
        if header.next_offset > self._position:
            end = min(header.next_offset, self._wanted.end)
            rows = min(end - self._position, pull.count)
            self._gaps.renew()
            self._reader.deliver(PulledRecords(self._shown, pull.body, self._position, end), rows)
        self._moved(pull, header.next_offset)

    def _moved(self, pull: _Pull, next_offset: int) -> None:
        """Everything up to `next_offset` is delivered."""
        self._renew()
        if pull.count == self._reader.options.pull_batch_size:
            self._step = next_offset - pull.offset
        self._position = max(self._position, next_offset)
        if self._position >= self._wanted.end:
            self.stop()
            self._reader.finished(self)

    def _follow(self, broker_id: int) -> None:
        """Pull from the broker that the answer suggests, if it is known."""
        if broker_id == self._broker_id or self._avoided.get(broker_id, 0) > self._reader.now():
            return
        if self._cluster.address(self._queue.broker_name, broker_id, only_this=True) is not None:
            self._broker_id, self._connection = broker_id, None

    def _where(self) -> str:
        return self._connection.address if self._connection is not None else self._queue.broker_name

    # --- trouble

    def _failed(self, error: Exception) -> None:
        """Try again, at a replica if there is one; or give up."""
        if isinstance(error, RequestTimeout) and self._patience.failures and self._connection is not None:
            self._connection.close("pulls were not answered")  # it may be dead without a word
        is_gone, may_pass = _says_it_is_gone(error), _is_worth_a_retry(error)
        if not is_gone:
            self._doubt.renew()
        if may_pass and self._again(str(error), self._doubt if is_gone else self._patience):
            self._try_next_address()
        elif is_gone:
            self._lost(self._wanted.end, None)
        else:
            self._fail(str(error), self._patience.failures + (not may_pass))

    def _fail(self, reason: str, tries: int) -> None:
        self._reader.fail(ReadFailed(str(self._wanted), tries, reason))

    def _renew(self) -> None:
        self._patience.renew()
        self._doubt.renew()

    def _try_next_address(self) -> None:
        self._avoided[self._broker_id] = self._reader.now() + _AVOIDED_S
        ids = sorted(self._cluster.broker_addresses().get(self._queue.broker_name, {}))
        later = [each for each in ids if each > self._broker_id]
        self._broker_id = later[0] if later else MASTER_ID
        self._connection = None

    def _again(self, reason: str, patience: Patience) -> bool:
        """Ask again for what is not here yet, after a pause; what was answered out of turn stays. False: no more."""
        if (pause_s := patience.failed()) is None:
            return False
        level = logging.WARNING if patience.failures == WORTH_A_WARNING else logging.DEBUG
        log.log(level, "range=%s will be pulled again at %d reason=%s", self._wanted, self._position, reason)
        found = [pull for pull in self._under_way if pull.answer is not None and _is_found(pull.answer)]
        self._abandon()
        self._under_way.extend(found)
        self._reader.under_way += len(found)
        self.due = self._reader.now() + pause_s
        self._reader.rest(self)
        return True

    def _again_or_fail(self, reason: str) -> None:
        if not self._again(reason, self._patience):
            self._fail(reason, self._patience.failures)

    def _missing(self, header: PullAnswer) -> None:
        """The queue ends before the range does: a broker that has just started may not know better yet."""
        reason = f"{self._where()} has offsets [{header.min_offset}, {header.max_offset}) only"
        self._connection = None  # the route may have changed, too
        if not self._again(reason, self._doubt):
            self._lost(self._wanted.end, header)

    def _lost(self, until: int, header: PullAnswer | None) -> None:
        available = f"{header.min_offset} up to {header.max_offset}" if header is not None else "nothing"
        reason = f"offsets {self._position} up to {until} are gone" if header is not None else "the queue is gone"
        loss = DataLoss(self._wanted, available, reason)
        if self._reader.options.fail_on_data_loss:
            self._reader.fail(loss)
            return
        log.warning("skipped: %s", loss)
        self._renew()
        self._position = until
        pause_s = self._gaps.failed()
        if until >= self._wanted.end:
            self.stop()
            self._reader.finished(self)
        elif pause_s is not None and self._gaps.failures > 1:  # a broker may lead from one to the next without end
            self.due = self._reader.now() + pause_s
            self._reader.rest(self)

    def stop(self) -> None:
        """Pull no more."""
        self._stopped = True
        self._abandon()
        self.due = None
        if self.finding is not None:
            self.finding.cancel()
            self.finding = None

    def _abandon(self) -> None:
        """Wait no longer for what is under way."""
        for pull in self._under_way:
            pull.abandoned = True
        self._reader.under_way -= len(self._under_way)
        self._under_way.clear()


def _is_found(answer: RemotingCommand | Exception) -> bool:
    return isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS


def _is_worth_a_retry(error: Exception) -> bool:
    if isinstance(error, BrokerError):
        return error.retryable
    return isinstance(error, (ConnectError, ConnectionLost, RequestTimeout, RouteNotFound, ProtocolError))


def _says_it_is_gone(error: Exception) -> bool:
    """Tell whether the broker itself says so. A name server that knows no route may just have lost the broker."""
    if not isinstance(error, BrokerError):
        return False
    return error.code in _GONE_CODES or (error.code == ResponseCode.SYSTEM_ERROR and _BAD_QUEUE_REMARK in error.remark)
