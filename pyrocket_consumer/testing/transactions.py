"""Half messages: commit, rollback, and checks at producers.

Source: EndTransactionProcessor, TransactionalMessageServiceImpl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.command import CheckTransactionStateHeader, EndTransactionHeader, request
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import PropertyName, StoredMessage
from pyrocket_consumer.testing.message_store import properties_of, properties_text, read_record, write_record
from pyrocket_consumer.testing.node import Connection, Handlers, Refused
from pyrocket_consumer.testing.topics import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


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
