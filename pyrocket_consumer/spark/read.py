"""What a task does: pull its ranges, several pulls of several queues at once, and yield them as record batches.

The pulling is on the I/O thread; what has come is handed to the task's thread in portions of a batch each. Offsets
are dense but for filters, so pulls ahead are guesses that are mostly right: where two overlap the second answer's
rows count from where the first one's end, and a hole between two is pulled before the second counts.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

import pyarrow as pa

from pyrocket_consumer.admin.masters import cluster_info
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.answers import refusal
from pyrocket_consumer.cluster.broker import read_pull_answer
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.routes import choose_address
from pyrocket_consumer.errors import (
    BrokerError,
    ConfigError,
    ConnectError,
    ConnectionLost,
    ConsumerClosed,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullAnswer, PullStatus
from pyrocket_consumer.net.connection import Connection
from pyrocket_consumer.spark.data_loss import DataLoss
from pyrocket_consumer.spark.options import ClientOptions, ReadOptions
from pyrocket_consumer.spark.ranges import QueueRange
from pyrocket_consumer.spark.worker import forget, kept
from pyrocket_consumer.wire.codes import PullFlag, ResponseCode
from pyrocket_consumer.wire.columns import PulledRecords, record_batches
from pyrocket_consumer.wire.command import PullMessageHeader, PullTemplate, request
from pyrocket_consumer.wire.frame import RemotingCommand

log = logging.getLogger("pyrocket_consumer.spark")

BATCH_ROWS = 2048
BATCH_BYTES = 4 * 1024 * 1024
"""Of records as they are stored. A batch has more only if a single answer has."""

MOST_HELD_BYTES = 32 * 1024 * 1024
"""Most that is pulled ahead of a task that writes slowly; what is under way counts by the size of the last answer."""

QUEUES_AT_ONCE = 16
"""So many queues of a task are pulled from at once; the others follow when these are done."""

_FIRST_ANSWER_BYTES = 1024 * 1024  # what a first answer is taken for, until one has come
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_AVOIDED_S = 30.0
_LOOK_EVERY_S = 5.0  # whether there still is somebody to wait for

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


def read_ranges(
    ranges: Sequence[QueueRange], columns: pa.Schema, options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of `ranges` as rows of `columns`: those of one queue in order, queues in any order.

    A range is finished when the broker says that its queue goes on at the range's end or behind it; offsets may be
    missing inside it, because of a filter for instance. To stop early, close the generator.

    Raises:
        DataLoss: messages are gone, and `options.fail_on_data_loss` says that this is an error.
        ReadFailed: a broker could not be reached, or refused, through all retries; or a record is damaged.
        ConfigError: a body is compressed in a way whose package is not installed here.
    """
    wanted = [each for each in ranges if len(each)]
    if not wanted:
        return
    reading = _Reading(_cluster(options.client), wanted, options)
    reading.begin()
    try:
        while pulled := reading.take():
            try:
                yield from record_batches(pulled, columns, options.selector.tags)
            except ProtocolError as error:
                places = ", ".join(str(QueueRange(each.queue, each.begin, each.end)) for each in pulled)
                raise ReadFailed(places, 1, f"a record is damaged: {error}") from error
    finally:
        reading.stop()


def _cluster(client: ClientOptions) -> Cluster:
    """Return this worker's connections to the cluster, made if there are none that work."""

    def make() -> Cluster:
        config = client.config()
        cluster = Cluster(config, make_client_id(config))
        cluster.start()
        return cluster

    tries = 0
    while True:
        try:
            cluster = kept(Cluster, client, make)
            cluster.check_usable()
            return cluster
        except ConfigError:
            raise
        except RocketError as error:
            forget(Cluster, client)
            tries += 1
            if tries > client.retries:
                raise ReadFailed(f"from {client.name_server}", tries, str(error)) from error
            log.warning("name servers not reached, will try again reason=%s", error)
            time.sleep(_pause_s(tries))


def _pause_s(failures: int) -> float:
    longest: float = min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S)
    return longest * (0.75 + random.random() / 4)


class _Reading:
    """The reading of one task's ranges. `begin`, `take` and `stop` are the task's; the rest is the I/O thread's."""

    def __init__(self, cluster: Cluster, ranges: Sequence[QueueRange], options: ReadOptions) -> None:
        self.cluster = cluster
        self.options = options
        self._portions: SimpleQueue[list[PulledRecords] | BaseException] = SimpleQueue()
        self._waiting = deque(ranges)
        self._pullers: dict[_RangePuller, None] = {}
        self._gathered: list[PulledRecords] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._held_bytes = 0  # delivered, and not yet given back by the task
        self._answer_bytes = _FIRST_ANSWER_BYTES  # of the last answer
        self.under_way = 0  # pulls of all ranges
        self._task_bytes = 0  # of the portion the task has; the task's own
        self._stopped = False

    # --- the task's

    def begin(self) -> None:
        """Start to pull."""
        self.cluster.loop.call_soon_threadsafe(self._begin)

    def take(self) -> list[PulledRecords]:
        """Return what the next batch is to be made of, as soon as there is enough; nothing when all is read."""
        done, self._task_bytes = self._task_bytes, 0
        if done:
            self.cluster.loop.call_soon_threadsafe(self._given_back, done)
        while True:
            try:
                portion = self._portions.get(timeout=_LOOK_EVERY_S)
            except Empty:
                self.cluster.check_usable()  # else nothing comes any more: every pull has a deadline
                continue
            if isinstance(portion, BaseException):
                raise portion
            self._task_bytes = sum(len(each.records) for each in portion)
            return portion

    def stop(self) -> None:
        """Pull no more. What is under way is ignored when it comes."""
        try:
            self.cluster.loop.call_soon_threadsafe(self._stop)
        except (RuntimeError, ConsumerClosed):
            pass  # the I/O thread has ended

    # --- the I/O thread's

    def _begin(self) -> None:
        while self._waiting and len(self._pullers) < QUEUES_AT_ONCE and not self._stopped:
            puller = _RangePuller(self, self._waiting.popleft())
            self._pullers[puller] = None
            puller.pull()

    def _stop(self) -> None:
        self._stopped = True
        for puller in self._pullers:
            puller.stop()
        self._pullers.clear()
        self._gathered.clear()

    def _given_back(self, count: int) -> None:
        self._held_bytes -= count
        for puller in list(self._pullers):
            puller.pull()

    def has_room(self) -> bool:
        """Whether what must come next may be pulled."""
        return self._held_bytes < MOST_HELD_BYTES

    def has_room_ahead(self) -> bool:
        """Whether more may be pulled than what must come next."""
        return self._held_bytes + self.under_way * self._answer_bytes < MOST_HELD_BYTES

    def deliver(self, pulled: PulledRecords, rows: int) -> None:
        """Take the next messages of a range, at most `rows`."""
        size = self._answer_bytes = len(pulled.records)
        if self._gathered_rows + rows > BATCH_ROWS or self._gathered_bytes + size > BATCH_BYTES:
            self._hand_over()
        self._gathered.append(pulled)
        self._gathered_rows += rows
        self._gathered_bytes += size
        self._held_bytes += size
        if self._gathered_rows >= BATCH_ROWS or self._gathered_bytes >= BATCH_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._gathered:
            self._portions.put(self._gathered)
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0

    def finished(self, puller: _RangePuller) -> None:
        """A range is read to its end."""
        self._pullers.pop(puller, None)
        self._begin()
        if not self._pullers and not self._stopped:
            self._hand_over()
            self._portions.put([])

    def fail(self, error: BaseException) -> None:
        """Give up: the task gets the error."""
        if not self._stopped:
            self._stop()
            self._portions.put(error)


class _Pull:
    """One pull under way, or answered and waiting for its turn."""

    __slots__ = ("offset", "count", "broker_id", "answer", "abandoned")

    def __init__(self, offset: int, count: int, broker_id: int) -> None:
        self.offset = offset
        self.count = count
        self.broker_id = broker_id
        self.answer: RemotingCommand | Exception | None = None
        self.abandoned = False


class _RangePuller:
    """Pulls one range from its begin to its end. Confined to the I/O thread."""

    def __init__(self, reading: _Reading, wanted: QueueRange) -> None:
        options, queue = reading.options, wanted.queue
        namespace = options.client.namespace
        self._reading = reading
        self._cluster = reading.cluster
        self._wanted = wanted
        self._queue = MessageQueue(wrap(namespace, queue.topic), queue.broker_name, queue.queue_id)
        self._shown = replace(queue, topic=unwrap(namespace, queue.topic))
        self._group = wrap(namespace, options.group)
        self._position = wanted.begin  # everything before it is delivered
        self._under_way: deque[_Pull] = deque()  # by offset
        filtered = bool(options.selector.tags) or options.selector.expression_type != "TAG"
        self._step = 0 if filtered else options.pull_batch_size  # how far the last pull went; 0: nobody knows
        self._templates: dict[int, PullTemplate] = {}
        self._connection: Connection | None = None
        self._broker_id = MASTER_ID
        self._avoided: dict[int, float] = {}  # ids that failed, and until when suggestions of them are not followed
        self._failures = 0  # in a row
        self._retry: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._stopped = False

    # --- asking

    def pull(self) -> None:
        """Ask for what comes next, and for what probably comes after it."""
        while not self._stopped and self._retry is None and self._connecting is None:
            offset = self._offset_to_ask()
            if offset is None:
                return
            if self._connection is None or self._connection.closed:
                self._connect()
                return
            self._ask(self._connection, offset)

    def _offset_to_ask(self) -> int | None:
        under_way = self._under_way
        if not under_way or under_way[0].offset > self._position:
            return self._position if self._reading.has_room() else None
        offset = under_way[-1].offset + self._step
        if not self._step or len(under_way) >= self._reading.options.pulls_in_flight or offset >= self._wanted.end:
            return None
        return offset if self._reading.has_room_ahead() else None

    def _ask(self, connection: Connection, offset: int) -> None:
        options = self._reading.options
        pull = _Pull(offset, min(options.pull_batch_size, self._wanted.end - offset), self._broker_id)
        self._reading.under_way += 1
        if offset == self._position:
            self._under_way.appendleft(pull)
        else:
            self._under_way.append(pull)
        if connection.signs:
            command = request(self._header(pull))
            connection.send(
                lambda opaque: connection.encode(command, opaque),
                lambda answer: self._answered(pull, answer),
                options.client.request_timeout_s,
            )
            return
        template = self._templates.get(pull.count) or self._template(pull.count)
        connection.send(
            lambda opaque: template.encode(opaque, offset, 0, PullFlag.SUBSCRIPTION),
            lambda answer: self._answered(pull, answer),
            options.client.request_timeout_s,
        )

    def _template(self, count: int) -> PullTemplate:
        selector, queue = self._reading.options.selector, self._queue
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
        selector, queue = self._reading.options.selector, self._queue
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

    def _connect(self) -> None:
        self._connecting = self._cluster.loop.create_task(self._find_broker())

    async def _find_broker(self) -> None:
        error: RocketError | None = None
        try:
            async with asyncio.timeout(self._reading.options.client.request_timeout_s):
                self._connection = await self._cluster.connection(await self._address())
        except RocketError as reason:
            error = reason
        except TimeoutError:
            error = ConnectError(f"broker {self._queue.broker_name!r}", "not within the time for a request")
        except Exception as bug:
            self._connecting = None
            self._reading.fail(bug)
            return
        self._connecting = None
        if error is not None:
            self._failed(error)
        else:
            self._go_on()

    async def _address(self) -> str:
        name = self._queue.broker_name
        lost: RocketError | None = None
        if self._failures or name not in self._cluster.broker_addresses():
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

    def _answered(self, pull: _Pull, answer: RemotingCommand | Exception) -> None:
        if not pull.abandoned:
            pull.answer = answer
            self._go_on()

    def _go_on(self) -> None:
        """Take the answers whose turn has come, and ask for more."""
        under_way = self._under_way
        while under_way and under_way[0].answer is not None and under_way[0].offset <= self._position:
            if self._retry is not None or self._connecting is not None or self._stopped:
                return
            pull = under_way.popleft()
            self._reading.under_way -= 1
            assert pull.answer is not None
            self._take(pull, pull.answer)
        self.pull()

    def _take(self, pull: _Pull, answer: RemotingCommand | Exception) -> None:
        if isinstance(answer, Exception):
            self._failed(answer)
            return
        if answer.code not in _PULL_CODES:
            self._failed(refusal(answer, self._where()))
            return
        try:
            header = read_pull_answer(answer)
        except ProtocolError as error:
            self._failed(error)
            return
        self._follow(header.suggested_broker_id)
        if header.status is PullStatus.FOUND:
            self._found(pull, header, answer.body)
        elif header.next_offset > pull.offset and header.status is PullStatus.NO_MATCHED_MESSAGE:
            if answer.remark == _REMOVING_REMARK:
                self._lost(min(header.next_offset, self._wanted.end), header)
            else:
                self._moved(pull, header.next_offset)
        elif header.offset_reset:
            log.warning("queue=%s was reset for group=%s; the query goes on where it is", self._shown, self._group)
            if pull.offset == self._position:
                self._again("the broker told of a reset, which does not concern a query")
        elif pull.offset < self._position:
            pass  # where it was asked is behind us, and it found nothing further on
        elif header.status is PullStatus.OFFSET_MOVED and header.min_offset > self._position:
            self._lost(min(header.min_offset, self._wanted.end), header)
        elif pull.broker_id != MASTER_ID or header.status is PullStatus.NO_MATCHED_MESSAGE:
            self._broker_id, self._connection = MASTER_ID, None  # a replica that is behind, or cannot tell
            self._again(f"{self._where()} has nothing at {self._position}, and is no master")
        else:
            self._missing(header)

    def _found(self, pull: _Pull, header: PullAnswer, body: bytes) -> None:
        if header.next_offset <= pull.offset or not body:
            self._failed(ProtocolError(f"pull of {self._queue} at {pull.offset} was answered {header}: no way on"))
            return
        if header.next_offset > self._position:
            end = min(header.next_offset, self._wanted.end)
            rows = min(end - self._position, pull.count)
            self._reading.deliver(PulledRecords(self._shown, body, self._position, end), rows)
        self._moved(pull, header.next_offset)

    def _moved(self, pull: _Pull, next_offset: int) -> None:
        """Everything up to `next_offset` is delivered."""
        self._failures = 0
        if pull.count == self._reading.options.pull_batch_size:
            self._step = next_offset - pull.offset
        self._position = max(self._position, next_offset)
        if self._position >= self._wanted.end:
            self.stop()
            self._reading.finished(self)

    def _follow(self, broker_id: int) -> None:
        """Pull from the broker that the answer suggests, if it is known."""
        if broker_id == self._broker_id or self._avoided.get(broker_id, 0) > self._cluster.loop.time():
            return
        if self._cluster.address(self._queue.broker_name, broker_id, only_this=True) is not None:
            self._broker_id, self._connection = broker_id, None

    def _where(self) -> str:
        return self._connection.address if self._connection is not None else self._queue.broker_name

    # --- trouble

    def _failed(self, error: Exception) -> None:
        """Try again, at a replica if there is one; or give up."""
        if not _is_worth_a_retry(error) or not self._may_retry():
            if _says_it_is_gone(error):
                self._lost(self._wanted.end, None)
            else:
                self._reading.fail(ReadFailed(str(self._wanted), self._failures + 1, str(error)))
            return
        if isinstance(error, RequestTimeout) and self._failures and self._connection is not None:
            self._connection.close("pulls were not answered")  # it may be dead without a word
        self._try_next_address()
        self._again(str(error))

    def _may_retry(self) -> bool:
        return self._failures < self._reading.options.client.retries

    def _try_next_address(self) -> None:
        self._avoided[self._broker_id] = self._cluster.loop.time() + _AVOIDED_S
        ids = sorted(self._cluster.broker_addresses().get(self._queue.broker_name, {}))
        later = [each for each in ids if each > self._broker_id]
        self._broker_id = later[0] if later else MASTER_ID
        self._connection = None

    def _again(self, reason: str) -> None:
        """Ask again for what is not here yet, after a pause; what was answered out of turn stays."""
        if not self._may_retry():
            self._reading.fail(ReadFailed(str(self._wanted), self._failures + 1, reason))
            return
        self._failures += 1
        log.debug("range=%s will be pulled again at %d reason=%s", self._wanted, self._position, reason)
        found = [pull for pull in self._under_way if pull.answer is not None and _is_found(pull.answer)]
        self._abandon()
        self._under_way.extend(found)
        self._reading.under_way += len(found)
        self._retry = self._cluster.loop.call_later(_pause_s(self._failures), self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._go_on()

    def _missing(self, header: PullAnswer) -> None:
        """The queue ends before the range does: a broker that has just started may not know better yet."""
        if self._may_retry():
            self._connection = None  # the route may have changed, too
            self._again(f"{self._where()} has offsets [{header.min_offset}, {header.max_offset}) only")
        else:
            self._lost(self._wanted.end, header)

    def _lost(self, until: int, header: PullAnswer | None) -> None:
        available = f"{header.min_offset} up to {header.max_offset}" if header is not None else "nothing"
        reason = f"offsets {self._position} up to {until} are gone" if header is not None else "the queue is gone"
        loss = DataLoss(self._wanted, available, reason)
        if self._reading.options.fail_on_data_loss:
            self._reading.fail(loss)
            return
        log.warning("skipped: %s", loss)
        self._failures = 0
        self._position = until
        if until >= self._wanted.end:
            self.stop()
            self._reading.finished(self)

    def stop(self) -> None:
        """Pull no more."""
        self._stopped = True
        self._abandon()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._connecting is not None:
            self._connecting.cancel()

    def _abandon(self) -> None:
        """Wait no longer for what is under way."""
        for pull in self._under_way:
            pull.abandoned = True
        self._reading.under_way -= len(self._under_way)
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
