"""The pull loop of one queue. It uses callbacks, so that a response costs no task switch.

The loop sends the next pull before it decodes a response. While a queue has many messages left, the loop keeps several
pulls in flight, for the offset ranges that it expects next. It processes responses in order of offset, and discards
those of a wrong guess.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from pyrocket_consumer.cluster.broker import HOLD_TICK_S, RESET_REMARK, read_pull_response
from pyrocket_consumer.cluster.membership import BrokerLink
from pyrocket_consumer.cluster.responses import read_error
from pyrocket_consumer.consumer.commits.serial_executor import SerialExecutor
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ConfigError, ConnectError, ConnectionLost, ProtocolError, RocketError
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullResponse, PullStatus, Subscription
from pyrocket_consumer.protocol.accelerator import are_offsets_rising
from pyrocket_consumer.protocol.codes import PullFlag, ResponseCode
from pyrocket_consumer.protocol.command import PullMessageHeader, PullTemplate, request
from pyrocket_consumer.protocol.compression import BodyTooLarge
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    Message,
    decode_messages,
    inner_messages,
    mark_batch_unreadable,
)
from pyrocket_consumer.protocol.subscription import matches
from pyrocket_consumer.transport.backoff import Backoff
from pyrocket_consumer.transport.connection import Connection

DEFAULT_RESPONSE_BYTES = 1024
"""The bytes that a pull reserves before its queue's first response."""

INLINE_UNPACK_BYTES = 128 * 1024
"""The inner batches of one response that the I/O thread unpacks have at most this size; another thread unpacks more."""

DELIVERY_CHUNK = 256
"""How many messages of a large inner batch the loop delivers before other tasks run."""

UNPACK_CHECK_EVERY_S = 0.02
"""How often a large inner batch that waits for memory checks whether enough is free."""

READ_AHEAD = 4
"""How many pulls of one queue may be in flight. Measured: with 4 queues, 4 are a tenth faster than 2."""

UNHELD_S = 0.5
"""If an empty response arrives sooner, the broker did not hold the pull. A held pull takes a second or more."""

UNHELD_LIMIT = 3
"""After more empty responses in a row to pulls that the broker did not hold, the pauses between pulls grow."""

MAX_FAST_BUSY_RESPONSES = 5
"""After more "busy" responses in a row, the pauses between pulls grow."""

MAX_STEP_PAUSE_S = 0.1
"""The longest pause of a queue that advances although no message matches the subscription."""

MAX_PAUSE_FACTOR = 10
"""The longest pause after invalid responses, in units of `pull_retry_delay_s`."""

SUSPEND = int(PullFlag.SUSPEND)  # the broker may hold the request; commits are requests of their own

_NEEDS_HEARTBEAT = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)
_NEEDS_ROUTE = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER, 501})


class PullHost(Protocol):
    """The services that a pull loop needs of its consumer."""

    loop: asyncio.AbstractEventLoop
    group: str

    def subscription(self, topic: str) -> Subscription | None:
        """Return the present subscription to `topic`, or None."""

    def paused(self, queue: MessageQueue) -> bool:
        """Return whether the user paused `queue`."""

    def link(self, broker_name: str, broker_id: int) -> BrokerLink:
        """Return the way to a broker, by its name and suggested id."""

    async def wait_registered(self, queue: MessageQueue) -> None:
        """Send heartbeats to a broker that does not know the subscription. Return once the loop may pull again."""

    async def refresh_route(self, queue: MessageQueue) -> None:
        """Fetch the route again."""

    def keep_running(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run `work` until the member ends. An error of it is unexpected, and fails the member."""

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        """Give messages of the window to their listener."""

    def offset_moved(self, pull_loop: PullLoop, pull_offset: int, response: PullResponse) -> None:
        """Follow the broker, which corrects or resets the queue's offset. The pull loop waits."""

    def late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        """Follow a reset in the response to an abandoned pull. The broker sends it only once."""

    def pull_failed(self, queue: MessageQueue, error: Exception) -> None:
        """Report a failed pull, which the loop sends again."""


MessageIdentity = tuple[int, int, int]
"""The queue offset, the commit log offset and the store time: another message at the same offset differs in them."""


def identify(message: Message) -> MessageIdentity:
    """Return the values that distinguish `message` from another one at the same offset."""
    return message.queue_offset, message.commit_log_offset, message.stored_at_ms


class PullRequest:
    """One pull in flight, or one whose response waits until those to earlier pulls are processed."""

    __slots__ = ("offset", "expected", "arrived", "sent_at", "response", "abandoned")

    def __init__(self, offset: int, expected: int, sent_at: float) -> None:
        self.offset = offset
        self.expected = expected  # bytes that count against the budget until the pull is settled
        self.arrived = 0  # bytes that were accepted and are not in the window yet
        self.sent_at = sent_at
        self.response: RemotingCommand | Exception | None = None
        self.abandoned = False


def _wanted(subscription: Subscription, message: Message) -> bool:
    """Return whether a message has one of the tags. The broker compares only their hashes."""
    try:
        return matches(subscription, message.tags)
    except ProtocolError:
        return True  # do not skip a damaged record: reading it raises the error in the listener


def _unpack_in_thread(
    batch: Message, begin: int, end: int, subscription: Subscription | None
) -> tuple[list[Message], int]:
    """Return the wanted messages of an inner batch from `begin` to before `end`, and the memory that they take.

    If the batch cannot be unpacked, return the batch itself; reading it raises the error in the listener.
    """
    try:
        items = inner_messages(batch)
    except ProtocolError as error:
        mark_batch_unreadable(batch, error, begin)
        return [batch], batch.store_size
    tags = subscription is not None and subscription.tags
    items = [
        item
        for item in items
        if begin <= item.queue_offset < end and (not tags or subscription is None or _wanted(subscription, item))
    ]
    return items, sum(item.store_size + _MEMORY_OF_MESSAGE for item in items)


_MEMORY_OF_MESSAGE = 600  # in addition to its record


def _run_all(deliveries: list[Callable[[], None]]) -> None:
    for delivery in deliveries:
        delivery()


_PULL_CODES = frozenset(status.value for status in PullStatus)


class PullLoop:
    """Keeps one window filled, from its start offset until `stop`. Confined to the I/O thread."""

    def __init__(
        self,
        host: PullHost,
        window: ProcessQueue,
        offset: int,
        *,
        batch: int,
        hold_s: float,
        call_timeout_s: float,
        retry_delay_s: float,
        read_ahead: int = READ_AHEAD,
    ) -> None:
        self.window = window
        self.queue = window.queue
        self.next_offset = offset
        self.max_offset = 0
        self.min_offset = 0
        self.last_pull_at = host.loop.time()
        self.last_error = ""
        self.pulls = 0  # pulls whose response had messages
        self.pull_time_s = 0.0  # the time between their requests and responses
        self.pulled = 0
        self.moves = 0  # responses in a row that moved the offset and had no message
        self.last_read: MessageIdentity | None = None  # shows later whether the broker's log is still the same
        self._host = host
        self._batch = batch
        self._hold_s = hold_s
        self._timeout_s = max(2 * hold_s, hold_s + HOLD_TICK_S + call_timeout_s)  # Java waits for twice its hold
        self._unheld_s = min(UNHELD_S, hold_s / 2)
        self._retry_delay_s = retry_delay_s
        self._idle_pauses = Backoff(0.01, retry_delay_s)
        self._step_pauses = Backoff(0.01, min(MAX_STEP_PAUSE_S, retry_delay_s), free=UNHELD_LIMIT + read_ahead)
        self._busy = Backoff(0.02, retry_delay_s, steady=MAX_FAST_BUSY_RESPONSES)
        self._damaged = Backoff(retry_delay_s, MAX_PAUSE_FACTOR * retry_delay_s)
        self._read_ahead = read_ahead
        self._link: BrokerLink | None = None
        self._broker_id = MASTER_ID
        self._master_next = False
        self._in_flight: deque[PullRequest] = deque()
        self._undelivered = 0
        self._usual_size = DEFAULT_RESPONSE_BYTES  # in bytes, of a response
        self._is_end_known = False
        self._undecodable_responses = 0  # responses that could not be decoded; later ones in flight are then not put
        self._step = 0  # how far the last responses advanced the offset, 0 while they differ
        self._last_step = 0
        self._empty_responses = 0  # empty responses in a row to pulls that the broker did not hold
        self._retry: asyncio.TimerHandle | None = None
        self._is_blocked = False  # waits for a connection, a heartbeat or the consumer's decision on an offset
        self._large_batches: list[Message] = []  # inner batches of the present response for another thread
        self._inline_bytes_left = 0  # bytes of it that the I/O thread may still unpack
        self._response_offset = offset  # the offset of its pull
        self._postponed: list[Callable[[], None]] | None = None  # deliveries that wait for its large batches
        self._stopped = False
        self._template: PullTemplate | None = None
        self._template_of: Subscription | None = None

    # --- requests

    def pull(self) -> None:
        """Send as many pulls as the window has space for. Called at the start, after responses, and by a wake-up."""
        if self._is_suspended() or self._host.paused(self.queue):
            self.window.stop_waiting()
            return
        while True:
            in_flight = self._in_flight
            expected = self._usual_size
            if not in_flight:
                offset = self.next_offset
                if self._is_end_known and self.max_offset <= offset:
                    expected = 0
                if self._undelivered:  # the space that they leave is unknown until they are put; _deliver pulls again
                    if not self.window.may_pull_ahead(self._batch + self._undelivered, offset, expected):
                        return
                elif not self.window.may_pull(self._batch, expected):
                    return
            else:
                if len(in_flight) >= self._read_ahead or not self._step:
                    return
                offset = in_flight[-1].offset + self._step
                if self.max_offset - offset < 2 * self._step:
                    return
                wanted = self._batch * (len(in_flight) + 1) + self._undelivered
                if not self.window.may_pull_ahead(wanted, offset, expected):
                    return
            subscription = self._host.subscription(self.queue.topic)
            if subscription is None:
                self.window.settle(expected)
                return  # unsubscribed; the next rebalance drops this queue
            broker_id = MASTER_ID if self._master_next else self._broker_id
            link = self._link
            if link is None or link.broker_id != broker_id:
                link = self._link = self._host.link(self.queue.broker_name, broker_id)
            connection = link.connection
            if connection is None:
                self.window.settle(expected)
                self._run_then_pull(link.open)
                return
            self._master_next = False
            self._send_pull(connection, offset, expected, subscription)

    def _is_suspended(self) -> bool:
        return self._stopped or self._is_blocked or self._retry is not None or self._postponed is not None

    def _send_pull(self, connection: Connection, offset: int, expected: int, subscription: Subscription) -> None:
        self.last_pull_at = self._host.loop.time()
        pull = PullRequest(offset, expected, self.last_pull_at)
        self._in_flight.append(pull)
        if connection.is_signing:
            command = request(self._header(offset, subscription))
            connection.send(
                lambda opaque: connection.encode(command, opaque),
                lambda response: self._on_response(pull, response),
                self._timeout_s,
                on_late=self._check_late_response,
            )
            return
        if self._template is None or self._template_of is not subscription:
            self._template, self._template_of = self._template_for(subscription), subscription
        template = self._template
        connection.send(
            lambda opaque: template.encode(opaque, offset, SUSPEND),
            lambda response: self._on_response(pull, response),
            self._timeout_s,
            on_late=self._check_late_response,
        )

    def _template_for(self, subscription: Subscription) -> PullTemplate:
        queue = self.queue
        return PullTemplate(
            self._host.group,
            queue.topic,
            queue.queue_id,
            self._batch,
            int(self._hold_s * 1000),
            subscription.version,
            queue.broker_name,
            expression_type=subscription.expression_type,
        )

    def _header(self, offset: int, subscription: Subscription) -> PullMessageHeader:
        queue = self.queue
        return PullMessageHeader(
            consumer_group=self._host.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=self._batch,
            sys_flag=SUSPEND,
            suspend_timeout_millis=int(self._hold_s * 1000),
            sub_version=subscription.version,
            expression_type=subscription.expression_type,
            broker_name=queue.broker_name,
        )

    def pull_from_master_next(self) -> None:
        """Send the next pull to the master, because it has a reset of this queue that a slave never returns."""
        self._master_next = True

    def pull_again(self) -> None:
        """Continue at the offset before the broker's correction, which the consumer does not follow."""
        self._is_blocked = False
        self.pull()

    # --- responses

    def _on_response(self, pull: PullRequest, response: RemotingCommand | Exception) -> Callable[[], None] | None:
        if pull.abandoned:
            self._check_late_response(response)
            return None
        pull.response = response
        return self._process_responses()

    def _process_responses(self) -> Callable[[], None] | None:
        """Process the responses that are next in order, send pulls, and return the delivery that follows."""
        deliveries: list[Callable[[], None]] = []
        in_flight = self._in_flight
        while in_flight and in_flight[0].response is not None and not self._is_suspended():
            head = in_flight.popleft()
            delivery = self._process_response(head)
            if delivery is not None:
                deliveries.append(delivery)
            else:
                self._settle(head)
        self.pull()
        if len(deliveries) <= 1:
            return deliveries[0] if deliveries else None
        return lambda: _run_all(deliveries)

    def _process_response(self, pull: PullRequest) -> Callable[[], None] | None:
        """Process the response to the oldest pull; return the delivery that follows the next pull."""
        response = pull.response
        if isinstance(response, Exception):
            self._on_failed(response)
            return None
        assert response is not None
        if response.code not in _PULL_CODES:
            self._on_refused(response)
            return None
        try:
            header = read_pull_response(response, pull.offset)
        except ProtocolError as error:
            self._on_failed(error)
            return None
        self._broker_id = header.suggested_broker_id
        self.last_error = ""
        if header.status is PullStatus.OFFSET_MOVED:
            self._abandon()
            self._is_blocked = True
            self._host.offset_moved(self, pull.offset, header)
            return None
        self.min_offset, self.max_offset, self._is_end_known = header.min_offset, header.max_offset, True
        next_offset = header.next_offset
        is_found = header.status is PullStatus.FOUND
        if next_offset < pull.offset or (is_found and (next_offset == pull.offset or not response.body)):
            text = f"pull of {self.queue} at {pull.offset}: the response does not advance ({header})"
            self._on_failed(ProtocolError(text))
            return None
        if is_found:
            self._usual_size = len(response.body)
            if not self.window.budget.accept(self.window, pull.expected, self._usual_size):
                self._abandon()  # the response is larger than expected; pull again when memory is free
                return None
            pull.expected = pull.arrived = self._usual_size
        step = next_offset - pull.offset
        self._step = step if step == self._last_step and is_found else 0
        self._last_step = step
        self.next_offset = next_offset
        if self._in_flight and self._in_flight[0].offset != next_offset:
            self._abandon()  # the guess was wrong
        undecodable = self._undecodable_responses
        waited_s = self._host.loop.time() - pull.sent_at
        is_idle = step < self._batch and waited_s < self._unheld_s
        self._empty_responses = self._empty_responses + 1 if is_idle else 0
        if is_found:
            # By now at least one of these responses was put, and `_put` ends the count if it had a wanted message.
            if self._empty_responses > UNHELD_LIMIT + self._read_ahead:
                self._pause(self._step_pauses.pause_s(self._empty_responses))
            count = min(step, self._batch)  # a response with few matches advances far
            self._undelivered += count
            self.pulls += 1
            self.pull_time_s += waited_s
            body = response.body
            return lambda: self._deliver(pull, body, next_offset, count, undecodable)
        # A slave redirects to its master without advancing, repeatedly while the master is down. Other brokers that do
        # so are faulty.
        if is_idle and (
            self._empty_responses > UNHELD_LIMIT or (not step and header.status is PullStatus.NO_MATCHED_MESSAGE)
        ):
            self._pause(self._idle_pauses.pause_s(self._empty_responses))
        return lambda: self._deliver(pull, b"", next_offset, 0, undecodable)

    def _deliver(self, pull: PullRequest, body: bytes, next_offset: int, count: int, undecodable: int) -> None:
        if self._postponed is not None:
            self._postponed.append(partial(self._deliver, pull, body, next_offset, count, undecodable))
            return
        self._undelivered -= count
        if not self._stopped and undecodable == self._undecodable_responses:
            rest = self._put(pull.offset, body, next_offset)
            if rest:
                self._postponed = []
                self._host.keep_running(self._put_rest(pull, rest, next_offset), f"unpacking messages of {self.queue}")
                return
        self._settle(pull)
        if not self._in_flight:
            self.pull()

    def _put(self, offset: int, body: bytes, next_offset: int) -> list[Message]:
        """Put the messages of a response into the window; return those from the first large inner batch on."""
        self._large_batches, self._inline_bytes_left, self._response_offset = [], INLINE_UNPACK_BYTES, offset
        bodies = self.window.budget.bodies
        try:
            messages = decode_messages(body, self.queue, self._unpack, bodies, MAX_RECORDS) if body else []
            if not are_offsets_rising(messages):  # the window's edge would move back and forth
                raise ProtocolError(f"pull of {self.queue} at {offset}: the messages of the response are out of order")
            if (
                messages
                and not self._large_batches
                and not any(offset <= each.queue_offset < next_offset for each in messages)
            ):
                raise ProtocolError(
                    f"pull of {self.queue} at {offset}: the response has messages from {messages[0].queue_offset} to "
                    f"{messages[-1].queue_offset}, but none from {offset} to its next offset {next_offset}"
                )
        except (ProtocolError, ConfigError) as error:  # damaged, or compressed with a codec that is not installed
            self.next_offset = offset  # no message of this response was put; pull them again
            self._undecodable_responses += 1
            self._abandon()
            self._on_failed(error)
            return []
        rest: list[Message] = []
        if self._large_batches:
            index = messages.index(self._large_batches[0])
            messages, rest = messages[:index], messages[index:]
            next_offset = min(max(offset, rest[0].queue_offset), next_offset)
        if messages and (messages[0].queue_offset < offset or messages[-1].queue_offset >= next_offset):
            # an inner batch may begin before the pull's offset; the broker returns later messages again
            messages = [message for message in messages if offset <= message.queue_offset < next_offset]
        subscription = self._host.subscription(self.queue.topic)
        if subscription is not None and subscription.tags:
            messages = [message for message in messages if _wanted(subscription, message)]
            rest = [message for message in rest if message in self._large_batches or _wanted(subscription, message)]
        self._damaged.failures = self._busy.failures = 0
        if self.window.put(messages, next_offset, len(body)) and messages:
            self.last_read = identify(messages[-1])
            self.pulled += len(messages)
            self._empty_responses = 0
            self._host.deliver(self.window, messages)
        return rest

    # --- inner batches

    def _unpack(self, batch: Message) -> list[Message]:
        """Return the messages of a small inner batch, or a large batch itself, which `_put_rest` unpacks."""
        try:
            items = inner_messages(batch, self._inline_bytes_left)
        except BodyTooLarge:
            self._large_batches.append(batch)
            return [batch]
        except ProtocolError as error:  # reading the batch raises the error in the listener
            mark_batch_unreadable(batch, error, self._response_offset)
            return [batch]
        self._inline_bytes_left -= sum(item.store_size for item in items)
        return items

    async def _put_rest(self, pull: PullRequest, rest: list[Message], next_offset: int) -> None:
        """Put messages one after the other, each inner batch when enough memory is free; then continue to pull."""
        large = self._large_batches
        try:
            for index, message in enumerate(rest):
                begin = max(pull.offset, message.queue_offset)
                end = min(rest[index + 1].queue_offset, next_offset) if index + 1 < len(rest) else next_offset
                if message in large:
                    await self._put_batch(message, pull.offset, end)
                elif begin == message.queue_offset < next_offset:
                    await self._put_unpacked([message], end, message.store_size)
                if self._stopped:
                    break
        except ConfigError as error:  # compressed with a codec that is not installed
            self.next_offset = begin  # the messages from here on were not put; pull them again
            self._undecodable_responses += 1
            self._abandon()
            self._on_failed(error)
        finally:
            postponed, self._postponed = self._postponed or [], None
            self._settle(pull)
            for delivery in postponed:
                delivery()
        delivery_left = self._process_responses()
        if delivery_left is not None:
            delivery_left()

    async def _put_batch(self, batch: Message, begin: int, end: int) -> None:
        """Unpack a large inner batch on another thread, one batch at a time, and put its messages."""
        window, loop = self.window, self._host.loop
        while not self._stopped:
            async with window.budget.bodies.unpack_lock:
                if window.may_unpack(self._batch):
                    subscription = self._host.subscription(self.queue.topic)
                    thread = SerialExecutor("pyrocket-unpack")
                    work = loop.run_in_executor(thread, _unpack_in_thread, batch, begin, end, subscription)
                    thread.shutdown()
                    items, size = await work
                    await self._put_unpacked(items, end, size)
                    return
            await asyncio.sleep(UNPACK_CHECK_EVERY_S)

    async def _put_unpacked(self, messages: list[Message], next_offset: int, size: int) -> None:
        if not self.window.put(messages, next_offset, size) or not messages:
            return
        self.last_read = identify(messages[-1])
        self.pulled += len(messages)
        self._empty_responses = 0
        for start in range(0, len(messages), DELIVERY_CHUNK):
            self._host.deliver(self.window, messages[start : start + DELIVERY_CHUNK])
            await asyncio.sleep(0)

    # --- the end of a response

    def _settle(self, pull: PullRequest) -> None:
        if pull.expected:
            self.window.settle(pull.expected, pull.arrived)

    # --- errors and pauses

    def _on_refused(self, response: RemotingCommand) -> None:
        error = read_error(response, self.queue.broker_name)
        self._report_error(error)
        self._abandon()
        if response.code in _NEEDS_HEARTBEAT:
            self._run_then_pull(partial(self._host.wait_registered, self.queue))
        elif response.code in _NEEDS_ROUTE:
            self._pause(self._retry_delay_s)
            self._run_then_pull(partial(self._host.refresh_route, self.queue))
        elif response.code == ResponseCode.FLOW_CONTROL:
            self._pause(self._busy.failed())
        else:
            self._pause(self._retry_delay_s)

    def _on_failed(self, error: Exception) -> None:
        self._report_error(error)
        self._abandon()
        self._broker_id = MASTER_ID
        if isinstance(error, (ConnectionLost, ConnectError)):
            self._pause(min(0.1, self._retry_delay_s))
        elif isinstance(error, ProtocolError):
            self._pause(self._damaged.failed())
        else:
            self._pause(self._retry_delay_s)

    def _report_error(self, error: Exception) -> None:
        self.last_error = str(error)
        self._host.pull_failed(self.queue, error)

    def _pause(self, seconds: float) -> None:
        if self._retry is None and not self._stopped:
            self._retry = self._host.loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._retry = None
        delivery = self._process_responses()  # a response may have arrived during the pause
        if delivery is not None:
            delivery()

    def _run_then_pull(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run work that takes time, then continue to pull."""
        self._is_blocked = True

        async def wait() -> None:
            try:
                await work()
            except RocketError as error:
                self._is_blocked = False
                self._on_failed(error)
            else:
                self._is_blocked = False
                delivery = self._process_responses()  # a response may have arrived during the work
                if delivery is not None:
                    delivery()

        self._host.keep_running(wait(), f"pulling {self.queue}")

    def _abandon(self) -> None:
        """Give up the pulls in flight. Their responses change nothing, except for a reset."""
        for pull in self._in_flight:
            pull.abandoned = True
            self._settle(pull)
            if pull.response is not None:  # it arrived before the response to an earlier pull
                self._check_late_response(pull.response)
        self._in_flight.clear()
        self._step = self._last_step = 0

    def _check_late_response(self, response: RemotingCommand | Exception) -> None:
        if not isinstance(response, RemotingCommand) or response.code != ResponseCode.PULL_OFFSET_MOVED:
            return
        if response.remark == RESET_REMARK:
            try:
                self._host.late_reset(self.queue, read_pull_response(response, 0))
            except ProtocolError as error:
                self._report_error(error)

    def pause(self) -> None:
        """Give up the pulls in flight; `pull` sends them again after the pause."""
        self._abandon()

    def stop(self) -> None:
        """Give up the pulls in flight, and send no more."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._abandon()
