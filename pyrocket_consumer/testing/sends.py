"""Requests that store messages: sends, batches, and messages that consumers send back.

Source: SendMessageProcessor, AbstractSendMessageProcessor.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING

from pyrocket_consumer.model import DLQ_PREFIX, PERM_WRITE, RETRY_PREFIX, dlq_topic, retry_topic
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.command import ConsumerSendMsgBackHeader, SendMessageHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import (
    PropertyName,
    StoredMessage,
    decode_batch,
    decode_properties,
    encode_properties,
)
from pyrocket_consumer.protocol.properties import MAX_PROPERTIES_BYTES
from pyrocket_consumer.testing.config import LONGEST_TOPIC, TopicConfig, name_defect, refuses_sends
from pyrocket_consumer.testing.message_store import properties_of, read_record
from pyrocket_consumer.testing.node import Connection, Handlers, Refused

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


REGION = "DefaultRegion"
_RETRY_COUNTS_SINCE = 121  # clients before 3.4.9 do not send maxReconsumeTimes
_ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit 4194304, msg properties length limit 32KB."
)
_NOT_AVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: "  # english: allow (Java's text)
    "the broker's disk is full, messages are put to the slave, message store has been shut down, etc."
)


class Sends:
    """Stores the messages that clients send to one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def handlers(self) -> Handlers:
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
            RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back,
        }

    def send(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        """Store a message or a batch."""
        self._refuse_on_slave()
        short = command.code != RequestCode.SEND_MESSAGE
        read = SendMessageHeader.from_fields if short else SendMessageHeader.from_fields_v1
        header = read(command.fields)
        try:
            if command.code == RequestCode.SEND_BATCH_MESSAGE or header.batch:
                fields = self._send_batch(header, command, connection)
            else:
                fields = self._send_one(header, command, connection)
        except Refused as refused:
            refused.fields.update(MSG_REGION=REGION, TRACE_ON="true")
            raise
        return command.make_response(fields=fields | {"MSG_REGION": REGION, "TRACE_ON": "true"})

    def _refuse_on_slave(self) -> None:
        if self._broker.is_slave:
            if self._broker.release.slave_refuses_sends_as_busy:
                raise Refused(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
            raise Refused(ResponseCode.SERVICE_NOT_AVAILABLE, _NOT_AVAILABLE)

    def _target(self, header: SendMessageHeader, connection: Connection) -> tuple[TopicConfig, int]:
        """Return the topic and queue to store in. Refuse the sends that brokers refuse."""
        broker, release = self._broker, self._broker.release
        defect = name_defect("topic", header.topic, 1 << 30, release)
        if defect is not None:
            raise Refused(release.bad_topic_name, defect)
        if refuses_sends(header.topic):
            raise Refused(ResponseCode.NO_PERMISSION, f"Sending message to topic[{header.topic}] is forbidden.")
        topic = broker.topics.for_send(header.topic, header.default_topic, header.default_topic_queue_nums)
        if topic is None:
            remark = f"topic[{header.topic}] not exist, apply first please!{release.faq}"
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        if header.queue_id >= max(topic.write_queues, topic.read_queues):
            remark = f"request queueId[{header.queue_id}] is illegal, {topic} Producer: /{connection.address}"
            raise Refused(release.bad_queue_id, remark)
        if header.queue_id >= 0:
            return topic, header.queue_id
        return topic, broker.random.randrange(max(1, topic.write_queues))

    def _send_one(self, header: SendMessageHeader, command: RemotingCommand, connection: Connection) -> dict[str, str]:
        topic, queue_id = self._target(header, connection)
        broker, release, body = self._broker, self._broker.release, command.body
        if not body and release.refuses_empty_body:
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: the message has no body")
        properties = decode_properties(header.properties or "")
        name = topic.name
        if name.startswith(RETRY_PREFIX) and self._is_dead(header, command, name):
            name = dlq_topic(group_of(name))
            broker.topics.for_group(name, 1)
            queue_id = 0
            if release.retry_send_beyond_max:
                properties[PropertyName.DELAY] = "-1"
        self._refuse_illegal(name, len((header.properties or "").encode()), len(body))
        is_half = header.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_PREPARED
        if is_half and broker.config.reject_transaction_message:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{broker.address}] sending transaction message is forbidden",
            )
        properties = self._completed(properties)
        if is_half and release.is_v5 and PropertyName.UNIQUE_KEY in properties:
            properties[PropertyName.TRANSACTION_ID] = properties[PropertyName.UNIQUE_KEY]
        if not is_half and (out_ms := self._broker.intake.timer_out_ms(properties)) is not None:
            properties[PropertyName.TIMER_OUT_MS] = str(out_ms)
        result = self._broker.intake.put(self._message(header, connection, name, queue_id, body, properties))
        fields = {
            "msgId": broker.offset_message_id(result.commit_log_offset),
            "queueId": str(queue_id),
            "queueOffset": str(result.queue_offset),
        }
        fields.update(self._ids_for_response(name, properties))
        return fields

    def _ids_for_response(self, topic: str, properties: dict[str, str]) -> dict[str, str]:
        """Return the ids that 5.x adds to a response: the unique key, and the recall handle of a timer."""
        release, unique_key = self._broker.release, properties.get(PropertyName.UNIQUE_KEY)
        if not release.returns_transaction_id or not unique_key:
            return {}
        due_ms = properties.get(PropertyName.TIMER_OUT_MS)
        if due_ms is None or not release.recall_handle:
            return {"transactionId": unique_key}
        handle = f"v1 {topic} {self._broker.config.broker_name} {due_ms} {unique_key}"
        return {"transactionId": unique_key, "recallHandle": base64.urlsafe_b64encode(handle.encode()).decode()}

    def _send_batch(
        self, header: SendMessageHeader, command: RemotingCommand, connection: Connection
    ) -> dict[str, str]:
        topic, queue_id = self._target(header, connection)
        release = self._broker.release
        if topic.name.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {topic.name}")
        self._refuse_illegal(topic.name, len((header.properties or "").encode()), len(command.body))
        common = decode_properties(header.properties or "")
        added = dict(common)
        added[PropertyName.CLUSTER] = self._broker.config.broker_cluster_name
        if release.adds_own_properties:
            added.update({PropertyName.MESSAGE_REGION: REGION, PropertyName.TRACE_ON: "true"})
        messages = []
        for item in decode_batch(command.body):
            text = item.properties if isinstance(item.properties, str) else encode_properties(item.properties)
            if release.batch_properties_in_items:
                text += encode_properties(added)
            if text.endswith("\x02") and not release.ends_properties:
                text = text[:-1]
            messages.append(
                replace(self._message(header, connection, topic.name, queue_id, item.body, text), flag=item.flag)
            )
        if not messages:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL)
        results = self._broker.intake.store_all(messages)
        fields = {
            "msgId": ",".join(self._broker.offset_message_id(result.commit_log_offset) for result in results),
            "queueId": str(queue_id),
            "queueOffset": str(results[0].queue_offset),
        }
        unique_key = common.get(PropertyName.UNIQUE_KEY)
        if unique_key and release.returns_transaction_id:
            fields["transactionId"] = unique_key
        return fields

    def _is_dead(self, header: SendMessageHeader, command: RemotingCommand, topic: str) -> bool:
        """Return whether a direct send to a retry topic goes to the dead-letter topic instead."""
        broker, release, name = self._broker, self._broker.release, group_of(topic)
        group = broker.group_or_refuse(name, f"subscription group not exist, {name}")
        most = group.retry_max_times
        if command.version >= _RETRY_COUNTS_SINCE and header.max_reconsume_times is not None:
            most = header.max_reconsume_times
        times = header.reconsume_times or 0
        if release.retry_send_beyond_max:
            return times > most or release.locked_groups_retry_to_dlq and bool(broker.locks.held(name))
        return times >= most

    def _refuse_illegal(self, topic: str, properties_bytes: int, body_bytes: int) -> None:
        if len(topic) > LONGEST_TOPIC and not (
            self._broker.release.long_retry_topics and topic.startswith(RETRY_PREFIX)
        ):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the length of the topic is over {LONGEST_TOPIC}: {topic}")
        if properties_bytes > MAX_PROPERTIES_BYTES or body_bytes > self._broker.config.max_message_size:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL)

    def _completed(self, properties: dict[str, str]) -> dict[str, str]:
        """Add and remove the properties of a message that brokers add and remove."""
        release = self._broker.release
        properties[PropertyName.CLUSTER] = self._broker.config.broker_cluster_name
        if release.adds_own_properties:
            properties[PropertyName.MESSAGE_REGION] = REGION
            properties[PropertyName.TRACE_ON] = "true"
            if PropertyName.UNIQUE_KEY not in properties:
                properties[PropertyName.UNIQUE_KEY] = self._broker.ids.next()
        elif PropertyName.DELAY not in properties:
            properties.pop(PropertyName.WAIT, None)
        return properties

    def _message(
        self,
        header: SendMessageHeader,
        connection: Connection,
        topic: str,
        queue_id: int,
        body: bytes,
        properties: dict[str, str] | str,
    ) -> StoredMessage:
        return StoredMessage(
            topic=topic,
            body=body,
            properties=properties,
            queue_id=queue_id,
            flag=header.flag,
            sys_flag=header.sys_flag,
            born_at_ms=header.born_timestamp,
            born_host=connection.address,
            stored_at_ms=self._broker.clock.now_ms(),
            store_host=self._broker.address,
            reconsume_times=header.reconsume_times or 0,
        )

    def send_back(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        """Store a message for a later delivery, or in the dead-letter topic."""
        broker, release = self._broker, self._broker.release
        self._refuse_back_on_slave()
        header = ConsumerSendMsgBackHeader.from_fields(command.fields)
        group = broker.group_or_refuse(header.group, f"subscription group not exist, {header.group} ")
        if not broker.config.broker_permission & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the broker[{broker.address}] sending message is forbidden")
        if group.retry_queue_nums <= 0:
            return command.make_response()  # the message is lost, as at real brokers
        topic = broker.topics.for_group(retry_topic(header.group), group.retry_queue_nums)
        if not topic.perm & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden")
        found = broker.store.record_at(header.offset)
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
        if len(topic.name) > LONGEST_TOPIC and not release.long_retry_topics:
            raise Refused(ResponseCode.SYSTEM_ERROR, "MESSAGE_ILLEGAL")
        self._broker.intake.put(
            self._retried(read_record(found[1]), header, group.retry_max_times, topic, command.version)
        )
        return command.make_response()

    def _refuse_back_on_slave(self) -> None:
        if self._broker.is_slave:
            if self._broker.release.is_v5:
                raise Refused(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
            raise Refused(ResponseCode.SYSTEM_ERROR, "SERVICE_NOT_AVAILABLE")

    def _retried(
        self,
        original: StoredMessage,
        header: ConsumerSendMsgBackHeader,
        most: int,
        topic: TopicConfig,
        client_version: int,
    ) -> StoredMessage:
        """Return the message for the retry topic, or for the dead-letter topic."""
        broker = self._broker
        if client_version >= _RETRY_COUNTS_SINCE and header.max_reconsume_times is not None:
            most = header.max_reconsume_times
        name, queue_id = topic.name, broker.random.randrange(topic.write_queues)
        level = header.delay_level
        if original.reconsume_times >= most or level < 0:
            name, queue_id, level = dlq_topic(header.group), 0, 0
            broker.topics.for_group(name, 1)
        elif level == 0:
            level = 3 + original.reconsume_times
        properties = properties_of(original)
        properties.setdefault(PropertyName.RETRY_TOPIC, original.topic)
        properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, broker.offset_message_id(original.commit_log_offset))
        properties[PropertyName.WAIT] = "false"
        properties[PropertyName.DELAY] = str(level)
        return replace(
            original,
            topic=name,
            queue_id=queue_id,
            properties=properties,
            stored_at_ms=broker.clock.now_ms(),
            store_host=original.store_host if broker.release.retry_keeps_store_host else broker.address,
            reconsume_times=original.reconsume_times + 1,
            prepared_transaction_offset=0,
        )


def group_of(topic: str) -> str:
    """Return the group a retry or dead-letter topic belongs to."""
    return topic.removeprefix(RETRY_PREFIX).removeprefix(DLQ_PREFIX)
