"""The entry of all messages into a broker: stored immediately, delayed, or kept as half messages until a commit.

Source: HookUtils, ScheduleMessageService, EndTransactionProcessor, TransactionalMessageServiceImpl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.command import CheckTransactionStateHeader, EndTransactionHeader, request
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import PropertyName, StoredMessage
from pyrocket_consumer.protocol.subscription import tag_hash
from pyrocket_consumer.testing.config import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from pyrocket_consumer.testing.message_store import (
    AppendResult,
    properties_of,
    properties_text,
    read_record,
    write_record,
)
from pyrocket_consumer.testing.node import Clock, Connection, Handlers, Refused

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


class Schedule:
    """Delivers each message when it is due. Delivers messages that were due during a stop at the next start."""

    def __init__(self, clock: Clock, deliver: Callable[[StoredMessage], None]) -> None:
        self._clock = clock
        self._deliver = deliver
        self._due: list[tuple[float, int, StoredMessage]] = []
        self._order = count()
        self._running = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def add(self, message: StoredMessage, delay_s: float) -> None:
        heappush(self._due, (self._clock.monotonic_s() + delay_s, next(self._order), message))
        self._arm()

    def start(self) -> None:
        self._running = True
        self._arm()

    def stop(self) -> None:
        self._running = False
        self._disarm()

    def take_over(self, other: Schedule) -> None:
        """Take the pending messages of another schedule."""
        for due_s, _, message in sorted(other._due, key=lambda due: due[:2]):
            heappush(self._due, (due_s, next(self._order), message))
        other.clear()
        self._arm()

    def clear(self) -> None:
        self._due.clear()
        self._disarm()

    def _arm(self) -> None:
        self._disarm()
        if self._running and self._due:
            self._timer = self._clock.loop.call_at(self._due[0][0], self._fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        # Add a millisecond, because a loop may call slightly early, and another timer for the rest is waste.
        now = self._clock.monotonic_s() + 0.001
        while self._due and self._due[0][0] <= now:
            self._deliver(heappop(self._due)[2])
        self._arm()


TIMERS = {PropertyName.TIMER_DELAY_SEC: 1000, PropertyName.TIMER_DELAY_MS: 1, PropertyName.TIMER_DELIVER_MS: 1}
"""The properties that make a timer, in the order in which brokers check them, and their units in milliseconds."""

_TIMER_PRECISION_MS = 1000  # brokers keep timers by the second; each fires at the end of its second


class Intake:
    """Stores messages of one broker, and wakes the pulls that wait for them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.schedule = Schedule(broker.clock, self._deliver)

    def put(self, message: StoredMessage) -> AppendResult:
        """Store a message and return its position, which is in a system topic for a delayed or half message."""
        properties = properties_of(message)
        if message.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_PREPARED:
            half = replace(message, sys_flag=message.sys_flag & ~SysFlag.TRANSACTION_MASK)
            return self.store(_in_system_topic(half, HALF_TOPIC, 0))
        level = _number(properties.get(PropertyName.DELAY))
        if level > 0:
            levels = self._broker.config.delay_levels_s()
            level = min(level, len(levels))
            message = replace(message, properties={**properties, PropertyName.DELAY: str(level)})
            result = self.store(_in_system_topic(message, SCHEDULE_TOPIC, level - 1))
            self._delay(message, levels[level - 1])
            return result
        out_ms = self.timer_out_ms(properties)
        if out_ms is not None:
            return self._put_timer(message, properties, out_ms)
        return self.store(message)

    def store_now(self, message: StoredMessage) -> None:
        """Store a message in its real queue, and ignore its delay properties."""
        self.store(replace(message, stored_at_ms=self._broker.clock.now_ms()))

    def _deliver(self, message: StoredMessage) -> None:
        self.store_now(message)
        self._broker.on_timer()

    def store(self, message: StoredMessage) -> AppendResult:
        """Store a message unchanged, and wake the pulls that match it."""
        result, tag_code = self._append(message)
        self._broker.pulls.arrived(message.topic, message.queue_id, tag_code)
        return result

    def store_all(self, messages: Iterable[StoredMessage]) -> list[AppendResult]:
        """Store messages together, then wake the pulls."""
        results: list[AppendResult] = []
        wake: dict[tuple[str, int, int], None] = {}
        for message in messages:
            result, tag_code = self._append(message)
            results.append(result)
            wake[message.topic, message.queue_id, tag_code] = None
        for arrived in wake:
            self._broker.pulls.arrived(*arrived)
        return results

    def store_copies(self, message: StoredMessage, unique_keys: Iterable[str]) -> list[AppendResult]:
        """Store the same message under several unique keys, as a fast way to fill queues."""
        placeholder = "0" * 32
        properties = {**properties_of(message), PropertyName.UNIQUE_KEY: placeholder}
        template = write_record(replace(message, properties=properties_text(properties, self._broker.release)))
        key_at = template.rindex(f"{PropertyName.UNIQUE_KEY}\x01{placeholder}".encode())
        key_at += len(PropertyName.UNIQUE_KEY) + 1
        tag_code, results = _tag_code(properties), []
        for key in unique_keys:
            record = bytearray(template)
            record[key_at : key_at + 32] = key.encode()
            results.append(
                self._broker.store.append(message.topic, message.queue_id, record, tag_code, message.stored_at_ms)
            )
        if results:
            self._broker.pulls.arrived(message.topic, message.queue_id, tag_code)
        return results

    def _append(self, message: StoredMessage) -> tuple[AppendResult, int]:
        tag_code = _tag_code(properties_of(message))
        text = properties_text(message.properties, self._broker.release)
        record = write_record(replace(message, properties=text))
        result = self._broker.store.append(message.topic, message.queue_id, record, tag_code, message.stored_at_ms)
        return result, tag_code

    def timer_out_ms(self, properties: dict[str, str]) -> int | None:
        """Return the time until which a message with timer properties waits; None if it does not, and on old releases.

        Raises:
            Refused: the time is further away than timerMaxDelaySec, or is not a number.
        Source: HookUtils.transformTimerMessage.
        """
        config, now_ms = self._broker.config, self._broker.clock.now_ms()
        if not self._broker.release.timers or _number(properties.get(PropertyName.DELAY)) > 0:
            return None
        if decided := properties.get(PropertyName.TIMER_OUT_MS):
            return int(decided)
        name = next((name for name in TIMERS if name in properties), None)
        if name is None:
            return None
        if not config.timer_wheel_enable:
            remark = "accurate timer message is not enabled, timerWheelEnable is false"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        most_ms = config.timer_max_delay_sec * 1000
        try:
            number = int(properties[name])
            due_ms = number if name == PropertyName.TIMER_DELIVER_MS else now_ms + number * TIMERS[name]
        except ValueError:
            due_ms = now_ms + most_ms + 1
        if due_ms - now_ms > most_ms:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "timer message illegal, the delay time should not be bigger than "  # english: allow (Java's text)
                f"the max delay {most_ms}ms; "
                "or if set del msg, the delay time should be bigger than the current time",
            )
        if due_ms <= now_ms:
            return None
        return (due_ms - 1) // _TIMER_PRECISION_MS * _TIMER_PRECISION_MS

    def _put_timer(self, message: StoredMessage, properties: dict[str, str], out_ms: int) -> AppendResult:
        now_ms = self._broker.clock.now_ms()
        properties = {**properties, PropertyName.TIMER_OUT_MS: str(out_ms), PropertyName.TIMER_ENQUEUE_MS: str(now_ms)}
        message = replace(message, properties=properties)
        result = self.store(_in_system_topic(message, TIMER_TOPIC, 0))
        self._delay(message, max(0, out_ms + _TIMER_PRECISION_MS - now_ms) / 1000)
        return result

    def _delay(self, message: StoredMessage, delay_s: float) -> None:
        delivered = replace(message, properties=_with_real_queue(message))
        self.schedule.add(delivered, delay_s * self._broker.timing.delay_scale)


def _in_system_topic(message: StoredMessage, topic: str, queue_id: int) -> StoredMessage:
    """Return the message as a system topic stores it."""
    return replace(message, topic=topic, queue_id=queue_id, properties=_with_real_queue(message))


def _with_real_queue(message: StoredMessage) -> dict[str, str]:
    return {
        **properties_of(message),
        PropertyName.REAL_TOPIC: message.topic,
        PropertyName.REAL_QUEUE_ID: str(message.queue_id),
    }


def _tag_code(properties: dict[str, str]) -> int:
    tag = properties.get(PropertyName.TAGS)
    return tag_hash(tag) if tag else 0


def _number(text: str | None) -> int:
    try:
        return int(text) if text else 0
    except ValueError:
        return 0


# --- half messages


@dataclass(slots=True)
class _HalfMessage:
    """A half message without a commit or rollback."""

    commit_log_offset: int
    since_s: float
    checks: int = 0


class Transactions:
    """Commits, rolls back and checks the half messages of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._open: dict[int, _HalfMessage] = {}  # by offset in the half topic
        self._next_offset = 0

    def handlers(self) -> Handlers:
        return {RequestCode.END_TRANSACTION: self.end}

    def end(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        """Commit or roll back a half message. Any other value leaves it open, and gets no response.

        As at real brokers, only the record counts: a second commit of a half message stores it once more.
        """
        header = EndTransactionHeader.from_fields(command.fields)
        if self._broker.is_slave:
            raise Refused(ResponseCode.SLAVE_NOT_AVAILABLE, "")
        commits = header.commit_or_rollback == SysFlag.TRANSACTION_COMMIT
        if not commits and header.commit_or_rollback != SysFlag.TRANSACTION_ROLLBACK:
            return None
        half = self._half(header)
        if commits:
            self._commit(half)
        self._read_new()
        self._open.pop(half.queue_offset, None)
        return command.make_response()

    def _half(self, header: EndTransactionHeader) -> StoredMessage:
        """Return the half message of a request. Refuse a request whose fields do not match the record."""
        found = self._broker.store.record_at(header.commit_log_offset)
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, "Find prepared transaction message failed")
        half = read_record(found[1])
        if properties_of(half).get(PropertyName.PRODUCER_GROUP) != header.producer_group:
            raise Refused(ResponseCode.SYSTEM_ERROR, "The producer group wrong")
        if half.queue_offset != header.tran_state_table_offset:
            raise Refused(ResponseCode.SYSTEM_ERROR, "The transaction state table offset wrong")
        return half

    def _read_new(self) -> None:
        """Read the half messages stored since the last call."""
        queue = self._broker.store.queue(HALF_TOPIC, 0)
        if queue is None or queue.max_offset < self._next_offset:  # the store was lost
            self._next_offset = 0
            self._open.clear()
        if queue is None:
            return
        for offset in range(max(self._next_offset, queue.min_offset), queue.max_offset):
            half = read_record(queue.records[offset - queue.min_offset])
            self._open[offset] = _HalfMessage(half.commit_log_offset, self._broker.clock.monotonic_s())
        self._next_offset = queue.max_offset

    def take_over(self, other: Transactions) -> None:
        """Take the half messages of another broker whose master role this one takes."""
        other._read_new()
        self._open, self._next_offset = other._open, other._next_offset
        other._open, other._next_offset = {}, other._next_offset

    def _message(self, half: _HalfMessage) -> StoredMessage | None:
        found = self._broker.store.record_at(half.commit_log_offset)
        return _restored(read_record(found[1])) if found is not None else None

    def _commit(self, half: StoredMessage) -> None:
        message = _restored(half)
        properties = properties_of(message)
        if not self._broker.release.committed_keeps_real_topic:
            del properties[PropertyName.REAL_TOPIC], properties[PropertyName.REAL_QUEUE_ID]
        self._broker.intake.put(
            replace(
                message,
                properties=properties,
                sys_flag=message.sys_flag | SysFlag.TRANSACTION_COMMIT,
                prepared_transaction_offset=half.commit_log_offset,
                stored_at_ms=self._broker.clock.now_ms(),
            )
        )

    def check(self) -> None:
        """Check half messages older than transactionTimeOut at producers; give up after transactionCheckMax checks."""
        self._read_new()
        config, now_s = self._broker.config, self._broker.clock.monotonic_s()
        for offset, half in list(self._open.items()):
            message = self._message(half)
            if message is None:
                del self._open[offset]
                continue
            immunity = properties_of(message).get(PropertyName.CHECK_IMMUNITY_TIME_IN_SECONDS, "")
            timeout_s = float(immunity) if immunity.isdecimal() else config.transaction_time_out / 1000
            if now_s - half.since_s < timeout_s:
                continue
            if half.checks >= config.transaction_check_max:
                self._broker.intake.store_now(replace(message, topic=CHECKED_TOO_OFTEN_TOPIC, queue_id=0))
                del self._open[offset]
                continue
            half.checks += 1
            self._send_check(offset, half, message)

    def _send_check(self, offset: int, half: _HalfMessage, message: StoredMessage) -> None:
        broker = self._broker
        properties = {**properties_of(message), PropertyName.TRANSACTION_CHECK_TIMES: str(half.checks)}
        producers = broker.members.producers(properties.get(PropertyName.PRODUCER_GROUP, ""))
        if not producers:
            return
        text = properties_text(properties, broker.release)
        record = write_record(
            replace(message, properties=text, queue_offset=offset, commit_log_offset=half.commit_log_offset)
        )
        header = CheckTransactionStateHeader(
            tran_state_table_offset=offset,
            commit_log_offset=half.commit_log_offset,
            msg_id=properties.get(PropertyName.UNIQUE_KEY),
            transaction_id=properties.get(PropertyName.UNIQUE_KEY),
            offset_msg_id=broker.offset_message_id(half.commit_log_offset),
            topic=HALF_TOPIC if broker.release.is_v5 else None,
            broker_name=broker.config.broker_name,
        )
        check_request = broker.as_sender(request(header, bytes(record), oneway=True))
        broker.random.choice(producers).connection.oneway(check_request)


def _restored(half: StoredMessage) -> StoredMessage:
    """Return a half message with its real topic and queue."""
    properties = properties_of(half)
    return replace(
        half,
        topic=properties.get(PropertyName.REAL_TOPIC, half.topic),
        queue_id=int(properties.get(PropertyName.REAL_QUEUE_ID, "0")),
    )
