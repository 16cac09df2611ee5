"""Requests of an admin to members through the broker: status, running info, consume directly, reset.

Source: Broker2Client, AdminBrokerProcessor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import decode_consumer_status, encode_consumer_status_table, encode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, version_name
from pyrocket_consumer.protocol.command import (
    ConsumeMessageDirectlyHeader,
    GetConsumerRunningInfoHeader,
    GetConsumerStatusHeader,
    ResetOffsetHeader,
    request,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import parse_offset_message_id
from pyrocket_consumer.testing.membership import Member
from pyrocket_consumer.testing.node import Connection, Handlers, Refused
from pyrocket_consumer.testing.offsets import search_offset

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


_RESETS_SINCE = 28
_RELAYS_SINCE = 62
_NOT_SET = "not set any response code"


class Relays:
    """Relays an admin's requests to the members of one broker's groups."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def handlers(self) -> Handlers:
        return {
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    # --- one member: 307, 309

    def running_info(self, command: RemotingCommand, connection: Connection) -> None:
        header = GetConsumerRunningInfoHeader.from_fields(command.fields)
        relayed = RemotingCommand(command.code, dict(command.fields), command.body)
        self._relay(command, connection, header.consumer_group, header.client_id, relayed)

    def consume_directly(self, command: RemotingCommand, connection: Connection) -> None:
        header = ConsumeMessageDirectlyHeader.from_fields(command.fields)
        try:
            commit_log_offset = parse_offset_message_id(header.msg_id or "")[2]
        except ProtocolError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{error}") from error
        found = self._broker.store.record_at(commit_log_offset)
        if found is None:
            remark = f"java.lang.NullPointerException: no message at {commit_log_offset}"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        fields = {**command.fields, "brokerName": self._broker.config.broker_name}
        if self._broker.release.is_v5:
            fields.update(topicSysFlag="0", groupSysFlag="0")
        relayed = RemotingCommand(command.code, fields, found[1])
        self._relay(command, connection, header.consumer_group, header.client_id or "", relayed)

    def _relay(
        self, command: RemotingCommand, connection: Connection, group: str, client_id: str, relayed: RemotingCommand
    ) -> None:
        online = self._broker.members.group(group)
        member = online.find(client_id) if online is not None else None
        if member is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        if member.version < _RELAYS_SINCE:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{client_id}> Version <{version_name(member.version)}> too low to finish, "
                "please upgrade it to V3_1_8_SNAPSHOT",
            )

        def on_response(response: RemotingCommand | None) -> None:
            if response is None:
                remark = f"consumer <{group}> <{client_id}> Timeout: {self._broker.timing.relay_timeout_s:g} s"
                response = self._broker.as_sender(command.make_response(ResponseCode.CONSUME_MSG_TIMEOUT, remark))
            connection.respond(command, response)  # the member's own code, remark, fields, language and body

        member.connection.call(self._broker.as_sender(relayed), self._broker.timing.relay_timeout_s, on_response)

    # --- every member: 223

    def status(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        header = GetConsumerStatusHeader.from_fields(command.fields)
        online = self._broker.members.group(header.group)
        if online is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"java.lang.NullPointerException: no consumer online in the group <{header.group}>",
            )
        queried = [member for member in online.members.values() if header.client_addr in (None, "", member.client_id)]
        for member in queried:
            if member.version < _RESETS_SINCE:
                remark = f"the client <{member.client_id}> is too old to report its status"
                raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        found: dict[str, dict[MessageQueue, int]] = {}

        def finish() -> None:
            response = command.make_response(remark=_NOT_SET, body=encode_consumer_status_table(found))
            connection.respond(command, self._broker.as_sender(response))

        self._request_each(queried, header, found, finish)
        return None

    def _request_each(
        self,
        members: list[Member],
        header: GetConsumerStatusHeader,
        found: dict[str, dict[MessageQueue, int]],
        finish: Callable[[], None],
    ) -> None:
        """Send the request to one member after the other, as brokers do. Each silent member costs its timeout."""
        if not members:
            finish()
            return
        member, *others = members

        def on_response(response: RemotingCommand | None) -> None:
            if response is not None and response.code == ResponseCode.SUCCESS and response.body:
                try:
                    found[member.client_id] = decode_consumer_status(response.body)
                except ProtocolError:
                    pass  # the response does not include a member with an unreadable body
            self._request_each(others, header, found, finish)

        status_request = RemotingCommand(
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": header.topic, "group": header.group}
        )
        member.connection.call(
            self._broker.as_sender(status_request), self._broker.timing.status_timeout_s, on_response
        )

    # --- resets: 222

    def reset(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = ResetOffsetHeader.from_fields(command.fields)
        if self._broker.release.has_server_side_reset and self._broker.config.use_server_side_reset_offset:
            targets = self._reset_at_broker(header)
            return command.make_response(body=encode_offset_table(targets))
        targets = self._reset_at_members(header, command.language)
        return command.make_response(remark=_NOT_SET, body=encode_offset_table(targets))

    def _reset_at_members(self, header: ResetOffsetHeader, language: str) -> dict[MessageQueue, int]:
        """Compute targets and send them to every member (220). Do not change committed offsets."""
        broker, release = self._broker, self._broker.release
        topic = broker.topics.get(header.topic)
        if topic is None:
            raise Refused(
                release.reset_unknown_topic,
                f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}",
            )
        targets: dict[MessageQueue, int] = {}
        for queue_id in range(topic.write_queues):
            committed = broker.offsets.committed(header.topic, header.group, queue_id)
            if committed is None or committed < 0:
                raise Refused(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{header.group}> not exist")
            if header.timestamp == -1:
                target = broker.store.max_offset(header.topic, queue_id)
            else:
                target = search_offset(broker, header.topic, queue_id, header.timestamp)
            if not header.is_force:
                target = min(target, committed)
            targets[self._broker.queue(header.topic, queue_id)] = max(0, target)
        online = broker.members.group(header.group)
        if online is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}",
            )
        for member in online.members.values():
            if member.version < _RESETS_SINCE:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"the client does not support this feature. version={version_name(member.version)}",
                )
        body = encode_offset_table(targets, as_list=language == "CPP")
        for member in list(online.members.values()):
            notice = request(
                ResetOffsetHeader(header.topic, header.group, header.timestamp, False, -1 if release.is_v5 else None),
                body,
                oneway=True,
                code=RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            )
            member.connection.oneway(self._broker.as_sender(notice))
        return targets

    def _reset_at_broker(self, header: ResetOffsetHeader) -> dict[MessageQueue, int]:
        """Store targets and mark their queues. The next pull of each queue gets OFFSET_RESET."""
        broker, release = self._broker, self._broker.release
        if broker.is_slave:
            raise Refused(ResponseCode.SYSTEM_ERROR, "can not reset offset in slave broker")
        topic = broker.topics.get(header.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        if header.group not in broker.groups:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.group} does not exist")
        targets = {
            queue_id: self._target(header, queue_id)
            for queue_id in (range(topic.read_queues) if header.queue_id in (None, -1) else [header.queue_id])
            if queue_id is not None
        }
        had_offsets = bool(broker.offsets.table(header.topic, header.group))
        for queue_id, target in targets.items():
            if release.reset_always_commits or had_offsets:
                broker.offsets.commit(header.topic, header.group, queue_id, target)
            broker.offsets.mark(header.topic, header.group, queue_id, target)
        return {self._broker.queue(header.topic, queue_id): target for queue_id, target in targets.items()}

    def _target(self, header: ResetOffsetHeader, queue_id: int) -> int:
        store = self._broker.store
        low, high = store.min_offset(header.topic, queue_id), store.max_offset(header.topic, queue_id)
        if header.queue_id not in (None, -1) and header.offset not in (None, -1):
            target = header.offset or 0
            if not low <= target <= high + 1:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR, f"Target offset {target} not in consume queue range [{low}-{high}]"
                )
            return target
        if header.timestamp < 0:
            return high
        return search_offset(self._broker, header.topic, queue_id, header.timestamp)
