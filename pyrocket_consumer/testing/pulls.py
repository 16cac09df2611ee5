"""PULL_MESSAGE: the records and the code of a response, or a held pull.

Source: PullMessageProcessor, PullRequestHoldService, NotifyMessageArrivingListener.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from pyrocket_consumer.model import PERM_READ, Subscription
from pyrocket_consumer.protocol.codes import PullFlag, RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import PullMessageHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.subscription import ALL, TAG, tag_hash
from pyrocket_consumer.testing.config import BrokerConfig
from pyrocket_consumer.testing.node import Connection, Handlers, Refused, Timer

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


Matches = Callable[[int], bool]
"""Whether the pull's subscription matches a message with this tag hash."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """A pull that found no message. It waits for a message at `offset`, or for the first tick after `until_s`."""

    request: RemotingCommand
    connection: Connection
    offset: int
    until_s: float
    matches: Matches | None


_DISK_COUNT, _DISK_BYTES = 8, 64 * 1024  # caps of a pull whose messages are on disk only
_CODES = {
    "FOUND": ResponseCode.SUCCESS,
    "NO_MATCHED_MESSAGE": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "OFFSET_OVERFLOW_ONE": ResponseCode.PULL_NOT_FOUND,
    "OFFSET_OVERFLOW_BADLY": ResponseCode.PULL_OFFSET_MOVED,
    "OFFSET_TOO_SMALL": ResponseCode.PULL_OFFSET_MOVED,
    "OFFSET_RESET": ResponseCode.PULL_OFFSET_MOVED,
}

_INSIDE = ("FOUND", "NO_MATCHED_MESSAGE", "OFFSET_RESET")  # even a slave returns the next offset


class _PullFields(NamedTuple):
    """The fields of a pull that the broker uses; a tuple for speed, because every pull makes one."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    suspend_timeout_millis: int
    sub_version: int
    subscription: str | None
    expression_type: str | None


class Pulls:
    """Responds to pulls at one broker, immediately or when a message arrives.

    A message wakes every held pull of its queue that matches it. If no pull matches, the next tick notices that the
    queue has grown, and evaluates the pulls again. The broker sends empty responses at ticks only.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._held: dict[tuple[str, int], list[HeldPull]] = {}
        self._timer = Timer(broker.clock, self._tick_s, self.tick)

    def handlers(self) -> Handlers:
        handlers: Handlers = {RequestCode.PULL_MESSAGE: self.pull}
        if self._broker.release.lite_pull:
            handlers[RequestCode.LITE_PULL_MESSAGE] = self.lite_pull
        return handlers

    def _tick_s(self) -> float:
        tick_s, config = self._broker.timing.long_poll_tick_s, self._broker.config
        return tick_s if config.long_polling_enable else min(tick_s, config.short_polling_time_mills / 1000)

    def lite_pull(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        if not self._broker.config.lite_pull_message_enable:
            remark = f"the broker[{self._broker.address}] for lite pull consumer is forbidden"
            raise Refused(ResponseCode.NO_PERMISSION, remark)
        return self.pull(command, connection)

    def pull(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        pull = _read_fields(command.fields)
        matches = self._permit(pull, connection)
        response = self._evaluate(command, pull, matches)
        is_held = response.code == ResponseCode.PULL_NOT_FOUND and bool(pull.sys_flag & PullFlag.SUSPEND)
        if is_held:
            config = self._broker.config
            hold_ms = pull.suspend_timeout_millis if config.long_polling_enable else config.short_polling_time_mills
            until_s = self._broker.clock.monotonic_s() + hold_ms / 1000
            held = HeldPull(command, connection, pull.queue_offset, until_s, matches)
            self._held.setdefault((pull.topic, pull.queue_id), []).append(held)
        if pull.sys_flag & PullFlag.COMMIT and (
            not self._broker.is_slave or self._broker.release.slave_stores_commit_bit
        ):
            self._broker.offsets.commit(pull.topic, pull.consumer_group, pull.queue_id, pull.commit_offset)
        return None if is_held else response

    # --- held pulls

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        """Drop the held pulls without a response."""
        self._timer.stop()
        self._held.clear()

    def held(self, topic: str | None = None) -> int:
        """Return the number of held pulls of one topic, or of all."""
        return sum(len(pulls) for key, pulls in self._held.items() if topic in (None, key[0]))

    def arrived(self, topic: str, queue_id: int, tag_code: int) -> None:
        """Wake the pulls that match the message just stored."""
        if self._broker.config.long_polling_enable and (topic, queue_id) in self._held:
            self._wake((topic, queue_id), lambda pull: pull.matches is None or pull.matches(tag_code))

    def tick(self) -> None:
        """Evaluate the pulls again that are due or have a message at their offset."""
        now_s = self._broker.clock.monotonic_s()
        for key in list(self._held):
            max_offset = self._broker.store.max_offset(*key)
            self._wake(key, partial(_is_due, max_offset, now_s))

    def lost(self, connection: Connection) -> None:
        """Drop the pulls of a connection that ended."""
        for key in list(self._held):
            self._take(key, lambda pull: pull.connection is connection)

    def _take(self, key: tuple[str, int], is_wanted: Callable[[HeldPull], bool]) -> list[HeldPull]:
        """Remove some of the held pulls of a queue, and return them."""
        pulls = self._held.pop(key, [])
        taken = [pull for pull in pulls if is_wanted(pull)]
        if len(taken) < len(pulls):
            self._held[key] = [pull for pull in pulls if pull not in taken]
        return taken

    def _wake(self, key: tuple[str, int], is_wanted: Callable[[HeldPull], bool]) -> None:
        """Evaluate held pulls again with the current subscription. Do not hold them again, and do not commit."""
        for held in self._take(key, is_wanted):
            pull = _read_fields(held.request.fields)
            try:
                response = self._evaluate(held.request, pull, self._permit(pull, held.connection))
            except Refused as refused:
                response = refused.response(held.request)
            held.connection.respond(held.request, self._broker.as_sender(response))

    # --- responses

    def _permit(self, pull: _PullFields, connection: Connection) -> Matches | None:
        """Return the filter of an allowed pull. Refuse other pulls, with the checks in the order of brokers."""
        broker, release = self._broker, self._broker.release
        if not broker.config.broker_permission & PERM_READ:
            raise self._forbidden(1, f"the broker[{broker.address}] pulling message is forbidden")
        if broker.is_slave and not broker.config.slave_read_enable and release.slave_refuses_pulls:
            raise Refused(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
        name = pull.consumer_group
        group = broker.group_or_refuse(name, f"subscription group [{name}] does not exist, ")
        if not group.consume_enable:
            raise self._forbidden(2, f"subscription group no permission, {name}")
        topic = broker.topics.get(pull.topic)
        if topic is None:
            remark = f"topic[{pull.topic}] not exist, apply first please! {release.faq}"
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        if not topic.perm & PERM_READ:
            raise self._forbidden(3, f"the topic[{pull.topic}] pulling message is forbidden")
        if not 0 <= pull.queue_id < topic.read_queues:
            raise Refused(
                release.bad_queue_id,
                f"queueId[{pull.queue_id}] is illegal, topic:[{pull.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queues}] consumer:[/{connection.address}]",
            )
        if pull.sys_flag & PullFlag.SUBSCRIPTION:
            return self._filter(pull.expression_type or TAG, pull.subscription or ALL)
        return self._subscribed(pull, group.consume_broadcast_enable)

    def _subscribed(self, pull: _PullFields, broadcast_enabled: bool) -> Matches | None:
        broker, faq = self._broker, self._broker.release.faq
        online = broker.members.group(pull.consumer_group)
        if online is None:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{faq}")
        if online.is_broadcasting and not broadcast_enabled:
            raise self._forbidden(4, f"the consumer group[{pull.consumer_group}] can not consume by broadcast way")
        subscription = online.subscriptions.get(pull.topic)
        if subscription is None:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{faq}")
        if subscription.version < pull.sub_version:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        return self._subscription_filter(subscription)

    def _subscription_filter(self, subscription: Subscription) -> Matches | None:
        if subscription.expression_type != TAG:
            return self._filter(subscription.expression_type, subscription.expression)
        return _tags_filter(subscription.expression, subscription.tags)

    def _filter(self, expression_type: str, expression: str) -> Matches | None:
        if expression_type == "SQL92":
            raise Refused(ResponseCode.SYSTEM_ERROR, sql_refusal(self._broker.config))
        if expression_type != TAG:
            return None  # brokers return everything
        return _expression_filter(expression)

    def _forbidden(self, kind: int, remark: str) -> Refused:
        fields = {"forbiddenType": str(kind)} if self._broker.release.is_v5 else {}
        return Refused(ResponseCode.NO_PERMISSION, remark, fields)

    def _evaluate(self, command: RemotingCommand, pull: _PullFields, matches: Matches | None) -> RemotingCommand:
        """Return the response for the current state of the queue, by the table of all offsets that a pull can have."""
        broker, release = self._broker, self._broker.release
        topic, queue_id, offset = pull.topic, pull.queue_id, pull.queue_offset
        queue = broker.store.queue(topic, queue_id)
        low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
        body = b""
        mark = broker.offsets.take_mark(topic, pull.consumer_group, queue_id)
        if mark is not None:
            status, next_offset = "OFFSET_RESET", mark
        elif high == 0 or queue is None:
            status, next_offset = "NO_MESSAGE_IN_QUEUE", 0
        elif offset < low:
            status, next_offset = "OFFSET_TOO_SMALL", low
        elif offset == high:
            status, next_offset = "OFFSET_OVERFLOW_ONE", offset
        elif offset > high:
            status, next_offset = "OFFSET_OVERFLOW_BADLY", high
        else:
            if pull.max_msg_nums < 0 and release.negative_pull_is_error:
                remark = f"java.lang.IllegalArgumentException: Illegal Capacity: {pull.max_msg_nums}"
                raise Refused(ResponseCode.SYSTEM_ERROR, remark)
            config = broker.config
            count, size = config.max_transfer_count_on_message_in_memory, config.max_transfer_bytes_on_message_in_memory
            if broker.on_disk:
                count, size = min(count, _DISK_COUNT), min(size, _DISK_BYTES)
            found, next_offset = queue.read(offset, min(pull.max_msg_nums, count), size, matches)
            status = "FOUND" if found else "NO_MATCHED_MESSAGE"
            body = found[0] if len(found) == 1 else b"".join(found)
        code = _CODES.get(status)
        if code is None:  # NO_MESSAGE_IN_QUEUE
            code = ResponseCode.PULL_OFFSET_MOVED if offset != 0 else ResponseCode.PULL_NOT_FOUND
        suggested = broker.suggest_broker_id
        if broker.is_slave and not broker.config.offset_check_in_slave and status not in _INSIDE:
            next_offset = offset  # a slave leaves corrections to the master
            if code == ResponseCode.PULL_OFFSET_MOVED:
                code, suggested = ResponseCode.PULL_RETRY_IMMEDIATELY, 0
        broker.offsets.pulled(topic, pull.consumer_group, queue_id, offset)
        fields = {
            "suggestWhichBrokerId": str(suggested),
            "nextBeginOffset": str(next_offset),
            "maxOffset": str(high),
            "minOffset": str(low),
        }
        if release.pull_returns_sys_flags:
            fields["groupSysFlag"] = fields["topicSysFlag"] = "0"
        return command.make_response(code, status, fields, body)


def _is_due(max_offset: int, now_s: float, pull: HeldPull) -> bool:
    return max_offset > pull.offset or now_s >= pull.until_s


def sql_refusal(config: BrokerConfig) -> str:
    """Return the remark that refuses SQL92: brokers refuse it by default, and this one has no parser for it."""
    if config.enable_property_filter:
        return "the embedded broker does not evaluate SQL92; use tags, or a real broker"
    return "The broker does not support consumer to filter message by SQL92"


def _read_fields(fields: Mapping[str, str]) -> _PullFields:
    try:  # faster than from_fields, which reports the wrong field
        return _PullFields(
            fields["consumerGroup"],
            fields["topic"],
            int(fields["queueId"]),
            int(fields["queueOffset"]),
            int(fields["maxMsgNums"]),
            int(fields["sysFlag"]),
            int(fields["commitOffset"]),
            int(fields["suspendTimeoutMillis"]),
            int(fields["subVersion"]),
            fields.get("subscription"),
            fields.get("expressionType"),
        )
    except (KeyError, ValueError):
        header = PullMessageHeader.from_fields(fields)
        return _PullFields(*(getattr(header, name) for name in _PullFields._fields))


@lru_cache(maxsize=1024)
def _tags_filter(expression: str, tags: frozenset[str]) -> Matches | None:
    return None if expression == ALL else frozenset(map(tag_hash, tags)).__contains__


@lru_cache(maxsize=1024)
def _expression_filter(expression: str) -> Matches | None:
    """Return the filter of an expression in a pull. Only separators are an error; only blanks match no message."""
    if expression == ALL:
        return None
    if not expression.replace("||", ""):
        raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed")
    blanks = "".join(map(chr, range(0x21)))
    tags = [tag for tag in (piece.strip(blanks) for piece in expression.split("||")) if tag]
    return frozenset(map(tag_hash, tags)).__contains__
