"""Requests of admin tools to a broker: topics, groups, statistics, settings, messages, and relays to members.

Source: AdminBrokerProcessor, QueryMessageProcessor, Broker2Client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import bodies, fastjson
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, version_name
from pyrocket_consumer.protocol.command import (
    CloneGroupOffsetHeader,
    ConsumeMessageDirectlyHeader,
    CreateTopicHeader,
    DeleteTopicHeader,
    GetConsumerConnectionListHeader,
    GetConsumerRunningInfoHeader,
    GetConsumerStatusHeader,
    GetConsumeStatsHeader,
    GetTopicStatsInfoHeader,
    QueryMessageHeader,
    QueryTopicConsumeByWhoHeader,
    ResetOffsetHeader,
    ViewMessageHeader,
    request,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import PropertyName, decode_messages, parse_offset_message_id
from pyrocket_consumer.testing.config import LONGEST_TOPIC, TopicConfig, is_system_topic, name_defect
from pyrocket_consumer.testing.membership import Member
from pyrocket_consumer.testing.node import Connection, Handlers, Refused
from pyrocket_consumer.testing.offsets import search_offset

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


GET_TOPIC_CONFIG = 351

_RESETS_SINCE = 28
_RELAYS_SINCE = 62
_NOT_SET = "not set any response code"
_ATTRIBUTES = frozenset(("message.type", "queue.type", "cleanup.policy"))


class AdminRequests:
    """Handles the requests of admin tools at one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._config_changes = 0

    def handlers(self) -> Handlers:
        handlers: Handlers = {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.create_topic,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete_topic,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.create_group,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.CLONE_GROUP_OFFSET: self.clone_offsets,
            RequestCode.GET_BROKER_CONFIG: self.get_config,
            RequestCode.UPDATE_BROKER_CONFIG: self.update_config,
            RequestCode.VIEW_MESSAGE_BY_ID: self.view_message,
            RequestCode.QUERY_MESSAGE: self.query_message,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all_groups,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }
        if self._broker.release.is_v5:
            handlers[GET_TOPIC_CONFIG] = self.topic_config
        return handlers

    # --- topics and groups

    def create_topic(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        broker, release = self._broker, self._broker.release
        header = CreateTopicHeader.from_fields(command.fields)
        if broker.is_slave and not release.is_v5:
            raise Refused(ResponseCode.SYSTEM_ERROR, "Can't modify topic or subscription group from slave broker")
        if defect := name_defect("topic", header.topic, LONGEST_TOPIC, release):
            raise Refused(release.bad_topic_name, defect)
        if is_system_topic(header.topic):
            raise Refused(release.bad_topic_name, f"The topic[{header.topic}] is conflict with system topic.")
        if header.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG") or "topicFilterType" not in command.fields:
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: Name is null")
        attributes = _attributes(header.attributes or "") if release.is_v5 else {}
        broker.topics.put(
            TopicConfig(
                header.topic,
                header.read_queue_nums,
                header.write_queue_nums,
                header.perm,
                header.topic_sys_flag or 0,
                header.order and release.is_v5,
                header.topic_filter_type,
                attributes,
            )
        )
        return command.make_response(remark=_NOT_SET)

    def delete_topic(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = DeleteTopicHeader.from_fields(command.fields)
        if is_system_topic(header.topic):
            release = self._broker.release
            code = ResponseCode.INVALID_PARAMETER if release.number >= (5, 3, 3) else ResponseCode.SYSTEM_ERROR
            raise Refused(code, f"The topic[{header.topic}] is conflict with system topic.")
        self.drop_topic(header.topic)
        return command.make_response()

    def drop_topic(self, topic: str) -> None:
        """Delete a topic and its messages; from 5.0 on also the offsets of its groups."""
        self._broker.topics.delete(topic)
        self._broker.store.delete_topic(topic)
        if self._broker.release.deletes_offsets_with_topic:
            self._broker.offsets.remove(topic=topic)

    def create_group(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        group = bodies.decode_subscription_group(command.body)
        release = self._broker.release
        defect = name_defect("group", group.group_name, release.longest_group, release)
        if release.checks_group_names and defect:
            raise Refused(ResponseCode.INVALID_PARAMETER, defect)
        self._broker.groups[group.group_name] = group
        return command.make_response()

    def delete_group(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        try:
            name = command.fields["groupName"]
        except KeyError:
            raise ProtocolError("DeleteSubscriptionGroupHeader: field groupName is missing") from None
        self._broker.groups.pop(name, None)
        if command.fields.get(self._broker.release.clean_offset_field) == "true":
            self._broker.offsets.remove(group=name)
        return command.make_response()

    def clone_offsets(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = CloneGroupOffsetHeader.from_fields(command.fields)
        offsets = self._broker.offsets
        for topic in [header.topic] if header.topic else offsets.topics_of(header.src_group):
            for queue_id, offset in offsets.table(topic, header.src_group).items():
                offsets.commit(topic, header.dest_group, queue_id, offset)
        return command.make_response()

    def topic_config(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        name = command.fields.get("topic", "")
        topic = self._broker.topics.get(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        value = {
            "attributes": topic.attributes,
            "order": topic.order,
            "perm": topic.perm,
            "readQueueNums": topic.read_queues,
            "topicFilterType": topic.filter_type,
            "topicName": topic.name,
            "topicSysFlag": topic.sys_flag,
            "writeQueueNums": topic.write_queues,
        }
        return command.make_response(body=fastjson.dumps(value))

    def all_groups(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        table = {
            name: fastjson.loads(bodies.encode_subscription_group(group)) for name, group in self._broker.groups.items()
        }
        return command.make_response(
            body=fastjson.dumps({"dataVersion": self._data_version(), "subscriptionGroupTable": table})
        )

    # --- statistics

    def topic_stats(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        broker, release = self._broker, self._broker.release
        header = GetTopicStatsInfoHeader.from_fields(command.fields)
        topic = broker.topics.get(header.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        covered = topic.write_queues
        if release.topic_stats_cover_read_queues:
            covered = max(covered, topic.read_queues)
        queues = {}
        for queue_id in range(covered):
            queue = broker.store.queue(topic.name, queue_id)
            last = queue.stored_at_ms[-1] if queue is not None and queue.stored_at_ms else 0
            low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
            queues[self._broker.queue(topic.name, queue_id)] = bodies.QueueStats(low, high, last)
        tps = 0.0 if release.topic_stats_put_tps else None
        return command.make_response(body=bodies.encode_topic_stats(bodies.TopicStats(queues, tps)))

    def consume_stats(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetConsumeStatsHeader.from_fields(command.fields)
        group = header.consumer_group
        if header.topic:
            topics = [header.topic]
        elif header.topic_list and self._broker.release.number >= (5, 3, 2):
            topics = [topic for topic in header.topic_list.split(";") if topic]
        else:
            topics = sorted(self._broker.offsets.topics_of(group))
        online = self._broker.members.group(group)
        queues = {}
        for name in topics:
            topic = self._broker.topics.get(name)
            if topic is None or online is not None and name not in online.subscriptions:
                continue
            for queue_id in range(topic.read_queues):
                queues[self._broker.queue(name, queue_id)] = self._progress(name, group, queue_id)
        return command.make_response(body=bodies.encode_consume_stats(bodies.ConsumeStats(queues)))

    def _progress(self, topic: str, group: str, queue_id: int) -> bodies.QueueConsumeStats:
        broker = self._broker
        queue = broker.store.queue(topic, queue_id)
        consumed = max(0, broker.offsets.committed(topic, group, queue_id) or 0)
        last = 0
        if queue is not None and queue.min_offset <= consumed - 1 < queue.max_offset:
            last = queue.stored_at_ms[consumed - 1 - queue.min_offset]
        pulled = broker.offsets.last_pulled(topic, group, queue_id) if broker.release.returns_pull_offset else None
        return bodies.QueueConsumeStats(broker.store.max_offset(topic, queue_id), consumed, last, pulled)

    def consumer_connections(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        name = GetConsumerConnectionListHeader.from_fields(command.fields).consumer_group
        group = self._broker.members.group(name)
        if group is None:
            raise Refused(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        connections = tuple(
            bodies.Connection(member.client_id, member.connection.address, member.language, member.version)
            for member in group.members.values()
        )
        value = bodies.ConsumerConnection(
            connections,
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            tuple(group.subscriptions.values()),
        )
        return command.make_response(body=bodies.encode_consumer_connection(value))

    def groups_of_topic(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        topic = QueryTopicConsumeByWhoHeader.from_fields(command.fields).topic
        broker = self._broker
        online = [group.name for group in broker.members.groups() if topic in group.subscriptions]
        if broker.release.lists_topic_as_group and online:
            online = [topic]  # the defect of 5.3.3
        groups = sorted({*online, *broker.offsets.groups_of(topic)})
        return command.make_response(body=bodies.encode_group_list(groups))

    # --- settings

    def _data_version(self) -> dict[str, int]:
        version = {"counter": self._config_changes, "timestamp": self._broker.clock.now_ms()}
        return version | {"stateVersion": 0} if self._broker.release.is_v5 else version

    def get_config(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        settings = self._broker.config.properties(self._broker.release)
        version = fastjson.dumps(self._data_version()).decode()
        return command.make_response(fields={"version": version}, body=bodies.encode_java_properties(settings))

    def update_config(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        settings = bodies.decode_java_properties(command.body)
        forbidden = self._broker.release.black_list & settings.keys()
        if forbidden:
            remark = f"Can not update config in black list: {', '.join(sorted(forbidden))}"
            raise Refused(ResponseCode.NO_PERMISSION, remark)
        for name, value in settings.items():
            self._broker.config.update(name, value)
        self._config_changes += 1
        self._broker.on_topics_changed()
        return command.make_response()

    # --- single messages

    def view_message(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        offset = ViewMessageHeader.from_fields(command.fields).offset
        found = self._broker.store.record_at(offset)
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return command.make_response(body=found[1])

    def query_message(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = QueryMessageHeader.from_fields(command.fields)
        by_unique_key = command.fields.get("_UNIQUE_KEY_QUERY") == "true"
        found: list[bytes] = []
        for record, keys, unique_key, stored_at_ms in self._indexed(header.topic):
            wanted = unique_key == header.key if by_unique_key else header.key in (*keys, unique_key)
            if wanted and header.begin_timestamp <= stored_at_ms <= header.end_timestamp:
                found.append(record)
        last_at_ms, last_offset = self._last_indexed()
        if not found:
            fields = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
            raise Refused(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", fields)
        fields = {"indexLastUpdateTimestamp": str(last_at_ms), "indexLastUpdatePhyoffset": str(last_offset)}
        return command.make_response(fields=fields, body=b"".join(found[-header.max_num :]))

    def _indexed(self, topic: str) -> Iterator[tuple[bytes, tuple[str, ...], str | None, int]]:
        for _, its_topic, record in self._broker.store.records():
            if its_topic == topic:
                message = decode_messages(record)[0]
                yield record, message.keys, message.property(PropertyName.UNIQUE_KEY), message.stored_at_ms

    def _last_indexed(self) -> tuple[int, int]:
        return self._broker.clock.now_ms(), max((offset for offset, _, _ in self._broker.store.records()), default=0)

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
            response = command.make_response(remark=_NOT_SET, body=bodies.encode_consumer_status_table(found))
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
                    found[member.client_id] = bodies.decode_consumer_status(response.body)
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
            return command.make_response(body=bodies.encode_offset_table(targets))
        targets = self._reset_at_members(header, command.language)
        return command.make_response(remark=_NOT_SET, body=bodies.encode_offset_table(targets))

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
        body = bodies.encode_offset_table(targets, as_list=language == "CPP")
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


def _attributes(text: str) -> dict[str, str]:
    """Return the attributes that `+key=value,-key2` sets. Refuse names that brokers do not know."""
    attributes = {}
    for change in filter(None, text.split(",")):
        name, _, value = change[1:].partition("=")
        if change[0] not in "+-" or name not in _ATTRIBUTES:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"unsupported key: {name}")
        if change[0] == "+":
            attributes[name] = value
    return attributes
