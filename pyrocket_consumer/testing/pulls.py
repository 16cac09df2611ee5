"""PULL_MESSAGE: the records and the code of a response, or a held pull. Source: PullMessageProcessor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from pyrocket_consumer.model import PERM_READ, Subscription
from pyrocket_consumer.protocol.codes import PullFlag, RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import PullMessageHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.subscription import ALL, TAG, tag_hash
from pyrocket_consumer.testing.broker_state import BrokerState, Refused
from pyrocket_consumer.testing.connection import Connection
from pyrocket_consumer.testing.handlers import Handlers, error_response
from pyrocket_consumer.testing.long_poll import HeldPull, LongPoll, Matches

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
    """Responds to pulls at one broker, immediately or when a message arrives."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.long_poll = LongPoll(state.clock, self._tick_s, state.store.max_offset, self._wake)

    def handlers(self) -> Handlers:
        handlers: Handlers = {RequestCode.PULL_MESSAGE: self.pull}
        if self._state.release.lite_pull:
            handlers[RequestCode.LITE_PULL_MESSAGE] = self.lite_pull
        return handlers

    def arrived(self, topic: str, queue_id: int, tag_code: int) -> None:
        """Wake the pulls that match a message just stored."""
        if self._state.config.long_polling_enable:
            self.long_poll.arrived(topic, queue_id, tag_code)

    def _tick_s(self) -> float:
        tick_s, config = self._state.timing.long_poll_tick_s, self._state.config
        return tick_s if config.long_polling_enable else min(tick_s, config.short_polling_time_mills / 1000)

    def lite_pull(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        if not self._state.config.lite_pull_message_enable:
            remark = f"the broker[{self._state.address}] for lite pull consumer is forbidden"
            raise Refused(ResponseCode.NO_PERMISSION, remark)
        return self.pull(command, connection)

    def pull(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        pull = _read_fields(command.fields)
        matches = self._permit(pull, connection)
        response = self._evaluate(command, pull, matches)
        sys_flag = pull.sys_flag
        if response.code == ResponseCode.PULL_NOT_FOUND and sys_flag & PullFlag.SUSPEND:
            config = self._state.config
            hold_ms = pull.suspend_timeout_millis if config.long_polling_enable else config.short_polling_time_mills
            until_s = self._state.clock.monotonic_s() + hold_ms / 1000
            held = HeldPull(command, connection, pull.queue_offset, until_s, matches)
            self.long_poll.hold(pull.topic, pull.queue_id, held)
            hold = True
        else:
            hold = False
        if sys_flag & PullFlag.COMMIT and (not self._state.is_slave or self._state.release.slave_stores_commit_bit):
            self._state.offsets.commit(pull.topic, pull.consumer_group, pull.queue_id, pull.commit_offset)
        return None if hold else response

    def _wake(self, held: HeldPull) -> None:
        """Evaluate a held pull again with the current subscription. Do not hold it again, and do not commit."""
        pull = _read_fields(held.request.fields)
        try:
            response = self._evaluate(held.request, pull, self._permit(pull, held.connection))
        except Refused as refused:
            response = error_response(held.request, refused)
        response.language, response.version = "JAVA", self._state.release.ordinal
        held.connection.respond(held.request, response)

    def _permit(self, pull: _PullFields, connection: Connection) -> Matches | None:
        """Return the filter of an allowed pull. Refuse other pulls, with the checks in the order of brokers."""
        state, release = self._state, self._state.release
        if not state.config.broker_permission & PERM_READ:
            raise self._forbidden(1, f"the broker[{state.address}] pulling message is forbidden")
        if state.is_slave and not state.config.slave_read_enable and release.slave_refuses_pulls:
            raise Refused(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
        name = pull.consumer_group
        group = state.group_or_refuse(name, f"subscription group [{name}] does not exist, ")
        if not group.consume_enable:
            raise self._forbidden(2, f"subscription group no permission, {name}")
        topic = state.topics.get(pull.topic)
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
        state, faq = self._state, self._state.release.faq
        online = state.members.group(pull.consumer_group)
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
            raise Refused(ResponseCode.SYSTEM_ERROR, sql_refusal(self._state))
        if expression_type != TAG:
            return None  # brokers return everything
        return _expression_filter(expression)

    def _forbidden(self, kind: int, remark: str) -> Refused:
        fields = {"forbiddenType": str(kind)} if self._state.release.is_v5 else {}
        return Refused(ResponseCode.NO_PERMISSION, remark, fields)

    def _evaluate(self, command: RemotingCommand, pull: _PullFields, matches: Matches | None) -> RemotingCommand:
        """Return the response for the current state of the queue, by the table of all offsets that a pull can have."""
        state, release = self._state, self._state.release
        topic, queue_id, offset = pull.topic, pull.queue_id, pull.queue_offset
        queue = state.store.queue(topic, queue_id)
        low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
        body = b""
        mark = state.offsets.take_mark(topic, pull.consumer_group, queue_id)
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
            config = state.config
            count, size = config.max_transfer_count_on_message_in_memory, config.max_transfer_bytes_on_message_in_memory
            if state.on_disk:
                count, size = min(count, _DISK_COUNT), min(size, _DISK_BYTES)
            found, next_offset = queue.read(offset, min(pull.max_msg_nums, count), size, matches)
            status = "FOUND" if found else "NO_MATCHED_MESSAGE"
            body = found[0] if len(found) == 1 else b"".join(found)
        code = _CODES.get(status)
        if code is None:  # NO_MESSAGE_IN_QUEUE
            code = ResponseCode.PULL_OFFSET_MOVED if offset != 0 else ResponseCode.PULL_NOT_FOUND
        suggested = state.suggest_broker_id
        if state.is_slave and not state.config.offset_check_in_slave and status not in _INSIDE:
            next_offset = offset  # a slave leaves corrections to the master
            if code == ResponseCode.PULL_OFFSET_MOVED:
                code, suggested = ResponseCode.PULL_RETRY_IMMEDIATELY, 0
        state.offsets.pulled(topic, pull.consumer_group, queue_id, offset)
        fields = {
            "suggestWhichBrokerId": str(suggested),
            "nextBeginOffset": str(next_offset),
            "maxOffset": str(high),
            "minOffset": str(low),
        }
        if release.pull_returns_sys_flags:
            fields["groupSysFlag"] = fields["topicSysFlag"] = "0"
        return command.make_response(code, status, fields, body)


def sql_refusal(state: BrokerState) -> str:
    """Return the remark that refuses SQL92: brokers refuse it by default, and this one has no parser for it."""
    if state.config.enable_property_filter:
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
