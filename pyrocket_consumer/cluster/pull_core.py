"""The pulls of one queue without I/O: responses in, results out.

`PullCore` decides where the next pull begins, which response comes next, what it means, and how long to pause. The
consumer, Spark's tasks and the shell send the requests, and handle the messages.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pyrocket_consumer.cluster.client import read_error
from pyrocket_consumer.errors import ConnectError, ConnectionLost, ProtocolError
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullResponse, PullStatus, Subscription
from pyrocket_consumer.protocol.accelerator import are_offsets_rising
from pyrocket_consumer.protocol.codes import PullFlag, RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import PullMessageHeader
from pyrocket_consumer.protocol.compression import BodyTooLarge
from pyrocket_consumer.protocol.frame import BufferSlice, RemotingCommand, prepare_header
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    BodyLimit,
    Message,
    decode_messages,
    inner_messages,
    mark_batch_unreadable,
)
from pyrocket_consumer.protocol.reset_format import MAX_RECORDED_OFFSET
from pyrocket_consumer.protocol.subscription import matches
from pyrocket_consumer.transport.backoff import Backoff

HOLD_TICK_S = 5.0
"""How often a broker checks held pulls. A response may arrive that much after the hold time."""

UNHELD_S = 0.5
"""If an empty response arrives sooner, the broker did not hold the pull. A held pull takes a second or more."""

UNHELD_LIMIT = 3
"""After more empty responses in a row to pulls that the broker did not hold, the pauses between pulls grow."""

MAX_FAST_BUSY_RESPONSES = 5
"""After more "busy" responses in a row, the pauses between pulls grow."""

MAX_STEP_PAUSE_S = 0.1
"""The longest pause of a queue that advances although no message matches the subscription."""

MAX_PAUSE_FACTOR = 10
"""The longest pause after invalid responses, in units of the retry delay."""

MAX_READ_AHEAD = 1024
"""How far the next offset of a pull response may be beyond its max offset, because brokers read the max offset first.

For one pull they scan 800 entries of the queue, or the requested number if that is more, at most 1024.
"""

RESET_REMARK = "OFFSET_RESET"
"""The remark that marks a corrected offset as a reset made at the broker."""

PULL_CODES = frozenset(status.value for status in PullStatus)
"""The codes of responses that `read_pull_response` reads."""

INLINE_UNPACK_BYTES = 128 * 1024
"""The inner batches of one response that the I/O thread unpacks have at most this size; another thread unpacks more."""

_MAX_LONG = (1 << 63) - 1


# --- requests and responses


def pull_header(
    group: str,
    queue: MessageQueue,
    offset: int,
    count: int,
    subscription: Subscription,
    *,
    hold_s: float = 0.0,
    is_registered: bool = False,
) -> PullMessageHeader:
    """Return the request for at most `count` messages, which a broker without any may hold for `hold_s`.

    With `is_registered`, the broker has the expression from heartbeats, and the request does not contain it. A pull
    never carries a commit: the pull that delivers a reset would commit the old offset over it.
    """
    return PullMessageHeader(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=(0 if is_registered else PullFlag.SUBSCRIPTION) | (PullFlag.SUSPEND if hold_s > 0 else 0),
        suspend_timeout_millis=round(hold_s * 1000),
        sub_version=subscription.version,
        subscription=None if is_registered else subscription.expression,
        expression_type=subscription.expression_type,
        broker_name=queue.broker_name,
    )


class PullTemplate:
    """A prepared pull request of one queue, in which only the offset and the opaque change.

    `fields` are those of a PullMessageHeader, which must not contain PullFlag.COMMIT.
    """

    __slots__ = ("_fields", "_header")

    _PREFIX: Final = struct.Struct(">II")  # as in every frame, here without a call

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = {name: value for name, value in fields.items() if name != "queueOffset"}
        self._header = prepare_header(RequestCode.PULL_MESSAGE, self._fields, b',"queueOffset":"%d"')

    def encode(self, queue_offset: int, opaque: int) -> bytes:
        """Return the whole frame of one pull."""
        header = self._header % (queue_offset, opaque)
        size = len(header)
        return self._PREFIX.pack(size + 4, size) + header

    def command(self, queue_offset: int) -> RemotingCommand:
        """Return one pull as a command, for a connection that signs requests."""
        return RemotingCommand(RequestCode.PULL_MESSAGE, {**self._fields, "queueOffset": str(queue_offset)})


def read_pull_response(response: RemotingCommand, requested_offset: int) -> PullResponse:
    """Return the header of the response to a pull at `requested_offset`. Its code must be one of PullStatus.

    It reads single fields instead of a header class, because that is faster and every pull needs it.

    Raises:
        ProtocolError: a field is missing or not a number, the offsets contradict each other, or the queue belongs to
            a static topic.
    """
    fields = response.fields
    if fields.get("offsetDelta", "0") != "0":
        raise ProtocolError("the queue belongs to a static topic (offsetDelta), which this client does not support")
    try:
        next_offset = int(fields["nextBeginOffset"])
        min_offset, max_offset = int(fields["minOffset"]), int(fields["maxOffset"])
        is_reset = response.code == ResponseCode.PULL_OFFSET_MOVED and response.remark == RESET_REMARK
        if not 0 <= next_offset <= _MAX_LONG or not -1 <= min_offset <= max_offset <= MAX_RECORDED_OFFSET:
            raise ValueError("offsets that a queue can have")
        if next_offset > max_offset and next_offset > _max_next_offset(
            response.code, requested_offset, max_offset, is_reset
        ):
            raise ProtocolError(f"pull response: next offset {next_offset} is beyond the queue's end, {max_offset}")
        return PullResponse(
            PullStatus(response.code),
            next_offset,
            min_offset,
            max_offset,
            int(fields.get("suggestWhichBrokerId", MASTER_ID)),
            is_reset,
        )
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            f"pull response lacks {error!s:.200} (code {response.code}, fields {fields!s:.200})"
        ) from error


def _max_next_offset(code: int, requested_offset: int, end: int, is_reset: bool) -> int:
    """Return the largest next offset that a pull response with the max offset `end` may have.

    Source: DefaultMessageStore.getMessage, which reads the max offset first, and messages only if there are any.
    """
    if is_reset and end == 0:  # such a response does not contain the max offset
        return MAX_RECORDED_OFFSET
    if code == ResponseCode.PULL_OFFSET_MOVED:
        return end
    return end + MAX_READ_AHEAD if requested_offset < end else requested_offset


def read_late_reset(response: RemotingCommand | Exception | None) -> PullResponse | None:
    """Return the reset in the response to an abandoned pull, which is its only copy. All other late responses are None.

    Raises:
        ProtocolError: it is a reset that cannot be read.
    """
    if not isinstance(response, RemotingCommand) or response.code != ResponseCode.PULL_OFFSET_MOVED:
        return None
    return read_pull_response(response, 0) if response.remark == RESET_REMARK else None


# --- results

_NO_BODY = BufferSlice.whole(b"")


class PullRequest:
    """One pull in flight, or one whose response waits until those to earlier pulls are processed."""

    __slots__ = ("abandoned", "arrived", "body", "broker_id", "count", "expected", "offset", "response", "sent_at")

    def __init__(self, offset: int, count: int, broker_id: int, sent_at: float) -> None:
        self.offset = offset
        self.count = count
        self.broker_id = broker_id
        self.sent_at = sent_at
        self.response: RemotingCommand | Exception | None = None
        self.body = _NO_BODY  # of a response that is read in place; others have it in `response.body`
        self.abandoned = False
        self.expected = 0  # bytes that the consumer's memory budget counts until the pull is settled
        self.arrived = 0  # bytes that the budget accepted, and that are not in the window yet

    @property
    def is_found(self) -> bool:
        """Whether the response has arrived and has messages."""
        return isinstance(self.response, RemotingCommand) and self.response.code == ResponseCode.SUCCESS


@dataclass(slots=True)
class Pulled:
    """The broker's answer. The body has the messages before `header.next_offset`, if the status is FOUND."""

    header: PullResponse
    response: RemotingCommand
    count: int
    """How many messages the response has at most; 0 without any. A response with few matches advances far."""


@dataclass(slots=True)
class Failed:
    """There is no usable response: use the remedy, and pull again after `pause_s`."""

    error: Exception
    pause_s: float
    remedy: Literal["register", "refresh route"] | None = None


_REGISTER_CODES = frozenset(  # the broker needs a heartbeat, because it does not know the subscription
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)
_ROUTE_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER, 501})


# --- the core


class PullCore:
    """The offsets and the pulls in flight of one queue.

    Call `next_pull` and `sent` for each request, `next_result` after each response, and `advance` to accept a result.
    While a queue has many messages left, up to `read_ahead` pulls are in flight, for the offsets expected next. Results
    come in order of offset.

    Without `end`, the queue is read as it grows. Each pull ahead begins where the one before is expected to end, after
    two responses of the same length. If one ends elsewhere, abandon the rest.

    With `end`, the queue is read up to there, and one response is enough for a guess. If two responses overlap, take
    the second one from `next_offset` on. A gap between two is pulled before the second one counts.
    """

    def __init__(
        self,
        queue: MessageQueue,
        offset: int,
        batch: int,
        *,
        read_ahead: int = 1,
        end: int | None = None,
        step: int = 0,
        unheld_s: float = UNHELD_S,
        retry_delay_s: float = 1.0,
    ) -> None:
        self.queue = queue
        self.next_offset = offset
        self.min_offset = self.max_offset = 0
        self.broker_id = MASTER_ID
        self.server = queue.broker_name
        """The name or address of the broker in errors."""
        self.in_flight: deque[PullRequest] = deque()
        self.step = step
        """How far the next response probably advances the offset; 0 while that is unknown."""
        self._batch = batch
        self._read_ahead = read_ahead
        self._end = end
        self._last_step = 0
        self._is_end_known = False
        self._master_next = False
        self._unheld_s = unheld_s
        self._retry_delay_s = retry_delay_s
        self._idle = Backoff(0.01, retry_delay_s)  # counts empty responses to pulls that the broker did not hold
        self._unwanted = Backoff(0.01, min(MAX_STEP_PAUSE_S, retry_delay_s), free=UNHELD_LIMIT + read_ahead)
        self._damaged = Backoff(retry_delay_s, MAX_PAUSE_FACTOR * retry_delay_s)
        self._busy = Backoff(0.02, retry_delay_s, steady=MAX_FAST_BUSY_RESPONSES)

    # --- requests

    def next_pull(self) -> int | None:
        """Return where the next pull begins; None if enough are in flight."""
        in_flight, step = self.in_flight, self.step
        if not in_flight or in_flight[0].offset > self.next_offset:
            return self.next_offset
        if not step or len(in_flight) >= self._read_ahead:
            return None
        if self._end is None:
            offset = in_flight[-1].offset + step
            return offset if self.max_offset - offset >= 2 * step else None
        offset = self.next_offset
        for pull in in_flight:
            if pull.offset > offset:
                break
            if pull.offset + step > offset:  # as a call, `max` would take longer
                offset = pull.offset + step
        return offset if offset < self._end else None

    def may_be_empty(self, offset: int) -> bool:
        """Return whether a pull at `offset` probably waits for new messages."""
        return self._is_end_known and self.max_offset <= offset

    @property
    def next_broker_id(self) -> int:
        """The broker for the next pull."""
        return MASTER_ID if self._master_next else self.broker_id

    def pull_from_master_next(self) -> None:
        """Send one pull to the master, because it has a reset of this queue that a slave never returns."""
        self._master_next = True

    def sent(self, offset: int, now: float) -> PullRequest:
        """Note a pull at `offset`, and return it."""
        count = self._batch if self._end is None else min(self._batch, self._end - offset)
        pull = PullRequest(offset, count, MASTER_ID if self._master_next else self.broker_id, now)
        self._master_next = False
        in_flight = self.in_flight
        if not in_flight or in_flight[-1].offset <= offset:
            in_flight.append(pull)
        else:
            in_flight.insert(sum(each.offset <= offset for each in in_flight), pull)
        return pull

    # --- responses

    def next_result(self) -> tuple[PullRequest, Pulled | Failed] | None:
        """Return the pull whose response comes next, and the meaning of the response; None if it has not arrived."""
        if not self.in_flight:
            return None
        pull = self.in_flight[0]
        if pull.response is None or pull.offset > self.next_offset:
            return None
        self.in_flight.popleft()
        return pull, self._read(pull, pull.response)

    def _read(self, pull: PullRequest, response: RemotingCommand | Exception) -> Pulled | Failed:
        if isinstance(response, Exception):
            return self.fail(response)
        if response.code not in PULL_CODES:
            return self._refuse(response)
        try:
            header = read_pull_response(response, pull.offset)
        except ProtocolError as error:
            return self.fail(error)
        if header.status is PullStatus.OFFSET_MOVED:
            return Pulled(header, response, 0)
        self.min_offset, self.max_offset, self._is_end_known = header.min_offset, header.max_offset, True
        step = header.next_offset - pull.offset
        if header.status is not PullStatus.FOUND:
            count = 0
        elif response.body or pull.body:
            count = min(self._batch, step)
        else:
            step = 0
        if step < 0 or (step == 0 and header.status is PullStatus.FOUND):
            text = f"pull of {self.queue} at {pull.offset}: the response does not advance ({header})"
            return self.fail(ProtocolError(text))
        return Pulled(header, response, count)

    def advance(self, pull: PullRequest, header: PullResponse, now: float) -> float:
        """Continue at the response's next offset. Return the pause in seconds before the next pull, mostly 0."""
        step = header.next_offset - pull.offset
        if self._end is not None:
            if pull.count == self._batch:
                self.step = step
            self.next_offset = max(self.next_offset, header.next_offset)
            return 0.0
        is_found = header.status is PullStatus.FOUND
        self.step = step if step == self._last_step and is_found else 0
        self._last_step = step
        self.next_offset = header.next_offset
        idle = self._idle
        if step >= self._batch or now - pull.sent_at >= self._unheld_s:
            idle.failures = 0
            return 0.0
        pause_s = idle.failed()
        if is_found:
            # By now at least one of these responses was put, and a wanted message in it ended the count.
            return self._unwanted.pause_s(idle.failures)
        # A slave redirects to its master without advancing, repeatedly while the master is down. Other brokers that do
        # so are faulty.
        is_redirect = not step and header.status is PullStatus.NO_MATCHED_MESSAGE
        return pause_s if is_redirect or idle.failures > UNHELD_LIMIT else 0.0

    @property
    def is_guess_wrong(self) -> bool:
        """Whether the pulls in flight do not follow the last response. Then abandon them."""
        return bool(self.in_flight) and self.in_flight[0].offset != self.next_offset

    def progressed(self, has_messages: bool) -> None:
        """Note that a response was decoded, and whether any of its messages was wanted."""
        self._damaged.failures = self._busy.failures = 0
        if has_messages:
            self._idle.failures = 0

    def abandon(self, *, keep_found: bool = False) -> list[PullRequest]:
        """Give up the pulls in flight, and return them. With `keep_found`, keep those whose messages have arrived."""
        dropped, kept = list[PullRequest](), deque[PullRequest]()
        for pull in self.in_flight:
            (kept if keep_found and pull.is_found else dropped).append(pull)
        for pull in dropped:
            pull.abandoned = True
        self.in_flight = kept
        if self._end is None:
            self.step = self._last_step = 0
        return dropped

    # --- failures

    def fail(self, error: Exception) -> Failed:
        """Return the pause after an error. The next pull goes to the master."""
        self.broker_id = MASTER_ID
        pause_s = self._retry_delay_s
        if isinstance(error, (ConnectionLost, ConnectError)):
            pause_s = min(0.1, pause_s)
        elif isinstance(error, ProtocolError):
            pause_s = self._damaged.failed()
        return Failed(error, pause_s)

    def _refuse(self, response: RemotingCommand) -> Failed:
        error, code = read_error(response, self.server), response.code
        if code in _REGISTER_CODES:
            return Failed(error, 0.0, "register")
        pause_s = self._busy.failed() if code == ResponseCode.FLOW_CONTROL else self._retry_delay_s
        return Failed(error, pause_s, "refresh route" if code in _ROUTE_CODES else None)


# --- messages


@dataclass(slots=True, eq=False)
class PulledMessages:
    """The wanted messages of a response, up to before `next_offset`. `rest` begins with the first large inner batch."""

    messages: list[Message]
    next_offset: int
    rest: list[Message] = field(default_factory=list)
    large_batches: list[Message] = field(default_factory=list)


def read_messages(
    body: bytes,
    queue: MessageQueue,
    offset: int,
    next_offset: int,
    subscription: Subscription | None,
    body_limit: BodyLimit,
) -> PulledMessages:
    """Return the messages in the response to a pull at `offset`, with small inner batches unpacked.

    Raises:
        ProtocolError: the body is damaged, or has messages that the pull did not request.
        ConfigError: the package for the compression of an inner batch is not installed.
    """
    large: list[Message] = []
    bytes_left = INLINE_UNPACK_BYTES

    def unpack(batch: Message) -> list[Message]:
        nonlocal bytes_left
        try:
            items = inner_messages(batch, bytes_left)
        except BodyTooLarge:
            large.append(batch)
            return [batch]
        except ProtocolError as error:  # reading the batch raises the error in the listener
            mark_batch_unreadable(batch, error, offset)
            return [batch]
        bytes_left -= sum(item.store_size for item in items)
        return items

    messages = decode_messages(body, queue, unpack, body_limit, MAX_RECORDS)
    if not are_offsets_rising(messages):  # the window's edge would move back and forth
        raise ProtocolError(f"pull of {queue} at {offset}: the messages of the response are out of order")
    if messages and not large and not _has_one_between(messages, offset, next_offset):
        raise ProtocolError(
            f"pull of {queue} at {offset}: the response has messages from {messages[0].queue_offset} to "
            f"{messages[-1].queue_offset}, but none from {offset} to its next offset {next_offset}"
        )
    rest: list[Message] = []
    if large:
        index = messages.index(large[0])
        messages, rest = messages[:index], messages[index:]
        next_offset = min(max(offset, rest[0].queue_offset), next_offset)
    if messages and (messages[0].queue_offset < offset or messages[-1].queue_offset >= next_offset):
        # an inner batch may begin before the pull's offset; the broker returns later messages again
        messages = [message for message in messages if offset <= message.queue_offset < next_offset]
    if subscription is not None and subscription.tags:
        messages = [message for message in messages if is_wanted(subscription, message)]
        rest = [message for message in rest if message in large or is_wanted(subscription, message)]
    return PulledMessages(messages, next_offset, rest, large)


def _has_one_between(messages: list[Message], begin: int, end: int) -> bool:
    return begin <= messages[0].queue_offset < end or any(begin <= each.queue_offset < end for each in messages)


def is_wanted(subscription: Subscription, message: Message) -> bool:
    """Return whether a message has one of the tags. The broker compares only their hashes."""
    try:
        return matches(subscription, message.tags)
    except ProtocolError:
        return True  # do not skip a damaged record: reading it raises the error in the listener
