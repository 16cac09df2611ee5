"""Send requests: content, prepared frame, attempts and result. Also lanes, which keep their order, and flushes."""

from __future__ import annotations

import struct
from asyncio import TimerHandle
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

import orjson

from pyrocket_consumer.errors import SendError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer.send_future import ResultSink
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import SendMessageHeader, SendMessageResponseHeader
from pyrocket_consumer.protocol.frame import MAX_HEADER_BYTES, ONEWAY_FLAG, RemotingCommand, prepare_header
from pyrocket_consumer.text import truncate
from pyrocket_consumer.transport.connection import Connection
from pyrocket_consumer.transport.io_thread import Latch

LaneKey = tuple[str, MessageQueue | str]
"""Messages with the same key stay in order: the topic, and the queue or the sharding key."""

_MAX_FAILURES, _MAX_FAILURE_LENGTH = 16, 2000


class SendStatus(Enum):
    """How safely a message is stored. With every status it is stored, and will be delivered.

    Source: SendStatus; the values are response codes.
    """

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """The position of one stored message.

    `message_id` is the id that consumers see (UNIQ_KEY); the producer makes it. `offset_message_id` identifies the
    broker and the position in its commit log. A delayed or transactional message waits in an internal queue of the
    broker; then `queue_offset` is its offset there, not the one of its delivery. `transaction_id` comes from the
    broker: the message id, or None from brokers before 5.0.

    `attempts` counts the attempts that stored the message, or may have. If it is above 1, a copy with the same
    `message_id` may exist. Refused attempts do not count.
    """

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str
    status: SendStatus = SendStatus.OK
    transaction_id: str | None = None
    attempts: int = 1


_PREFIX = struct.Struct(">II")  # of a frame: the bytes that follow, and those of the header


class SendTemplate:
    """A prepared send request to one queue; only the message changes. It has the fields of SendMessageHeader."""

    __slots__ = ("_code", "_fields", "_header")

    def __init__(self, group: str, topic: str, queue_id: int, broker_name: str | None, is_batch: bool = False) -> None:
        self._code = int(RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2)
        self._fields = SendMessageHeader(
            group, topic, queue_id=queue_id, batch=is_batch, broker_name=broker_name
        ).to_fields()
        fixed = {name: value for name, value in self._fields.items() if name not in ("f", "g", "h", "i")}
        self._header = prepare_header(self._code, fixed, b',"f":"%d","g":"%d","h":"%d"%b')

    def request(
        self, body: bytes, properties: str, sys_flag: int, flag: int, born_at_ms: int, is_oneway: bool = False
    ) -> RemotingCommand:
        """Return the request that stores one message or one batch; `properties` is a text, "" without any."""
        fields = self._fields.copy()
        fields["f"], fields["g"], fields["h"] = str(sys_flag), str(born_at_ms), str(flag)
        if properties:
            fields["i"] = properties
        return RemotingCommand(self._code, fields, body, flag=ONEWAY_FLAG if is_oneway else 0)

    def encode(
        self, opaque: int, body: bytes, properties: str, sys_flag: int, flag: int, born_at_ms: int, max_frame_bytes: int
    ) -> bytes | None:
        """Return the whole frame of `request`, None if it cannot be sent; `encode_command` then raises the reason."""
        try:
            item = b',"i":%b' % orjson.dumps(properties) if properties else b""
        except orjson.JSONEncodeError:
            return None
        header = self._header % (sys_flag, born_at_ms, flag, item, opaque)
        header_bytes, body_bytes = len(header), len(body)
        if header_bytes > MAX_HEADER_BYTES or _PREFIX.size + header_bytes + body_bytes > max_frame_bytes:
            return None
        return _PREFIX.pack(4 + header_bytes + body_bytes, header_bytes) + header + body


_STATUSES = {status.value: status for status in SendStatus}


@dataclass(eq=False)
class SendRequest:
    """A message, or a batch of them, between `send` and its result.

    `topic` is the name that brokers know, `shown_topic` the one of the user; they differ with a namespace.
    Attributes that change later are class attributes until then, because thousands of requests exist at a time.
    """

    topic: str
    shown_topic: str
    body: bytes
    properties: str
    message_ids: tuple[str, ...]
    sink: ResultSink
    timeout_s: float
    born_at_ms: int
    deadline: float = 0.0  # by the clock of the loop; set when it is submitted
    sys_flag: int = 0
    flag: int = 0
    is_batch: bool = False
    is_oneway: bool = False
    queue: MessageQueue | None = None
    sharding_key: str | None = None
    needs_timer: bool = False
    is_blocking: bool = True  # until the deadline; if False, the timeout pauses while the lane moves
    lane_key: LaneKey | None = field(init=False, default=None)  # None without order; set by SendDispatcher.dispatch
    possible_stores: int = field(init=False, default=0)  # attempts that stored it, or may have
    pauses: int = field(init=False, default=0)
    failed_brokers: frozenset[str] = field(init=False, default=frozenset())  # since the last pause
    wants_route_after: float | None = field(init=False, default=None)  # it needs a route fetched after this time
    last_error: Exception | None = field(init=False, default=None)
    _failures: dict[str, int] | None = field(init=False, default=None)

    def note(self, failure: str, error: Exception | None = None) -> None:
        """Record why an attempt failed. Repeated failures are counted, and only the latest ones are kept."""
        self.last_error = error or self.last_error
        if self._failures is None:
            self._failures = {}
        failure = truncate(failure, _MAX_FAILURE_LENGTH)  # a route can contain names of any length
        times = self._failures.pop(failure, 0)
        self._failures[failure] = times + 1
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    @property
    def attempts(self) -> tuple[str, ...]:
        """The failure of each attempt, the latest last."""
        failures = self._failures or {}
        return tuple(text if times == 1 else f"{text} ({times} times)" for text, times in failures.items())

    def to_command(self, template: SendTemplate) -> RemotingCommand:
        """Return the command that stores the messages in the queue of `template`."""
        return template.request(self.body, self.properties, self.sys_flag, self.flag, self.born_at_ms, self.is_oneway)

    def frame(self, template: SendTemplate, connection: Connection, opaque: int) -> bytes:
        """Return the frame of that command for `connection`.

        Raises:
            ProtocolError: the command is too large for a frame.
        """
        if not connection.is_signing:
            what = (self.body, self.properties, self.sys_flag, self.flag, self.born_at_ms)
            if (frame := template.encode(opaque, *what, connection.max_frame_bytes)) is not None:
                return frame
        return connection.encode(self.to_command(template), opaque)

    def results(self, queue: MessageQueue, response: RemotingCommand) -> SendResult | list[SendResult]:
        """Return where the broker of `queue` has stored the message; for a batch, where it has stored each one.

        Raises:
            ProtocolError: the response has no queue, offset or id.
        """
        fields = response.fields
        try:
            queue_id, offset, stored_ids = int(fields["queueId"]), int(fields["queueOffset"]), fields["msgId"]
        except (KeyError, ValueError):
            SendMessageResponseHeader.from_fields(fields)  # it is slower, and raises an error with the reason
            raise
        shown_queue, status = queue, _STATUSES[response.code]
        if queue_id != queue.queue_id or self.shown_topic != queue.topic:
            shown_queue = MessageQueue(self.shown_topic, queue.broker_name, queue_id)
        transaction_id = fields.get("transactionId")
        if not self.is_batch:
            return SendResult(
                shown_queue, offset, self.message_ids[0], stored_ids, status, transaction_id, self.possible_stores
            )
        offset_ids = stored_ids.split(",")
        if len(offset_ids) != len(self.message_ids):  # an inner batch (5.x) is one record, with one id
            offset_ids = offset_ids[:1] * len(self.message_ids)
        return [
            SendResult(
                shown_queue, offset + number, message_id, offset_id, status, transaction_id, self.possible_stores
            )
            for number, (message_id, offset_id) in enumerate(zip(self.message_ids, offset_ids, strict=True))
        ]

    def error(self, cause: BaseException | None) -> SendError:
        """Return the error that lists all attempts."""
        error = SendError(self.shown_topic, self.attempts)
        error.__cause__ = cause
        return error


@dataclass(slots=True, eq=False)
class UnansweredRequest:
    """A request of a lane without a response. The broker may still store it, so no later message may overtake it."""

    connection: Connection
    received_before: int
    suspect_at: float  # when the connection counts as broken, if it has received nothing until then


@dataclass(slots=True, eq=False)
class Lane:
    """The messages for one queue, or with one sharding key, in their order. Confined to the I/O thread.

    `current` is the message in flight. If it times out while `unanswered` waits for a response, the lane still sends
    nothing else. A waiting message expires when it is older than its timeout and the lane has not moved for as long.
    So a burst may take longer than the timeout of one message. A message with a blocked caller expires at its deadline.
    """

    key: LaneKey
    moved_at: float
    waiting: deque[SendRequest] = field(default_factory=deque)
    current: SendRequest | None = None
    unanswered: UnansweredRequest | None = None
    is_unsure: bool = False  # the result of an earlier message is unknown
    timer: TimerHandle | None = None

    def expiry(self, request: SendRequest) -> float:
        """Return the time at which a message expires if the lane does not move before."""
        if request.is_blocking:
            return request.deadline
        return max(request.deadline, self.moved_at + request.timeout_s)

    def start_next(self, unfinished: set[SendRequest]) -> SendRequest | None:
        """Make the next message the current one, and return it. Return None if no message waits."""
        self.current = None
        while self.waiting and self.current is None:
            request = self.waiting.popleft()
            if request in unfinished:  # otherwise it has expired
                request.deadline = self.expiry(request)
                self.current = request
        return self.current

    def pop_expired(self, now: float) -> Iterator[SendRequest]:
        """Remove the waiting messages that have expired, and yield them."""
        over = [request for request in self.waiting if self.expiry(request) <= now]
        if over:
            gone = set(over)
            self.waiting = deque(request for request in self.waiting if request not in gone)
        yield from over


class Flush(Latch):
    """Counts the results of the requests in flight at one moment, and is set after the last one.

    The I/O thread makes it and counts. Other threads wait, and read the numbers of messages.
    """

    def __init__(self, requests: Collection[SendRequest]) -> None:
        super().__init__()
        self._requests = set(requests)
        self.messages = self.pending = sum(len(request.message_ids) for request in requests)
        self.sent = self.failed = 0
        self.reason: BaseException | None = None  # of the first failure
        self.longest_timeout_s = max((request.timeout_s for request in requests), default=0.0)
        if not self._requests:
            self.set()

    def count(self, request: SendRequest, error: BaseException | None) -> None:
        """Count a result, if the request was in flight at that moment."""
        if request not in self._requests:
            return
        self._requests.remove(request)
        messages = len(request.message_ids)
        self.pending -= messages
        if error is None:
            self.sent += messages
        else:
            self.failed += messages
            self.reason = self.reason or error
        if not self._requests:
            self.set()
