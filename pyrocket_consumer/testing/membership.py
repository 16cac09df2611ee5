"""Requests about a group's members: heartbeats, lists of members, locks and assignments.

Source: ClientManageProcessor, ConsumerManageProcessor, QueryAssignmentProcessor.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.bodies import (
    ConsumerData,
    MessageQueueAssignment,
    decode_assignment_request,
    decode_check_client_config,
    decode_heartbeat,
    decode_lock_request,
    encode_assignments,
    encode_consumer_list,
    encode_lock_response,
)
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import (
    GetConsumerListByGroupHeader,
    NotifyConsumerIdsChangedHeader,
    UnregisterClientHeader,
    request,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.subscription import SQL92, TAG
from pyrocket_consumer.testing.broker_state import BrokerState, Refused, retry_topic
from pyrocket_consumer.testing.connection import Connection
from pyrocket_consumer.testing.handlers import Handlers
from pyrocket_consumer.testing.members import Member, OnlineGroup
from pyrocket_consumer.testing.pulls import sql_refusal


class Membership:
    """Keeps the members of one broker's groups, and notifies them of changes."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def handlers(self) -> Handlers:
        handlers: Handlers = {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_client_config,
        }
        if self._state.release.query_assignment:
            handlers[RequestCode.QUERY_ASSIGNMENT] = self.query_assignment
        return handlers

    # --- members

    def heartbeat(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        state = self._state
        if not command.body:
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: the heartbeat has no body")
        data = decode_heartbeat(command.body)
        raw = fastjson.loads(command.body)
        fingerprint = _number(raw.get("heartbeatFingerprint"))
        without_subscriptions = state.release.heartbeat_v2 and fingerprint != 0 and raw.get("withoutSub") is True
        now_s = state.clock.monotonic_s()
        changed_subscriptions = not data.consumers
        for consumer in data.consumers:
            member = Member(connection, data.client_id, command.language, command.version, now_s)
            changed_subscriptions |= self._join(consumer, member, fingerprint, without_subscriptions)
        for producers in data.producers:
            member = Member(connection, data.client_id, command.language, command.version, now_s)
            state.members.join_producers(producers, member)
        if not state.release.heartbeat_v2:
            return command.make_response()
        is_changed = "true" if changed_subscriptions or fingerprint == 0 else "false"
        return command.make_response(fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": is_changed})

    def _join(self, data: ConsumerData, member: Member, fingerprint: int, without_subscriptions: bool) -> bool:
        """Register one group of a heartbeat. Return whether its fingerprint is new to the broker."""
        state = self._state
        config = state.group(data.group)
        if config is None and state.release.skips_members_of_unknown_groups:
            return True
        if state.config.reject_pull_consumer_enable and data.consume_type == "CONSUME_ACTIVELY" and state.release.is_v5:
            return True
        if config is not None and not state.is_slave:
            state.topics.for_group(retry_topic(data.group), config.retry_queue_nums)
        group, is_new = state.members.join(data.group, member)
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        topics_changed = False if without_subscriptions else group.subscribe(data.subscriptions)
        if is_new or topics_changed:
            self.notify(group)
        known = fingerprint != 0 and group.fingerprint == fingerprint
        group.fingerprint = fingerprint
        return not known

    def unregister(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = UnregisterClientHeader.from_fields(command.fields)
        changed = self._state.members.leave(
            connection, consumers=header.consumer_group, producers=header.producer_group
        )
        self.notify_all(changed)
        return command.make_response()

    def lost(self, connection: Connection) -> None:
        """Remove a connection that ended, and notify the other members."""
        self.notify_all(self._state.members.lost(connection))

    def expire(self) -> None:
        """Close the connections without a recent heartbeat, as brokers do every ten seconds."""
        oldest = self._state.clock.monotonic_s() - self._state.config.channel_expired_timeout / 1000
        for connection in self._state.members.silent_since(oldest):
            self.lost(connection)
            connection.close(False)

    def notify_all(self, groups: Iterable[OnlineGroup]) -> None:
        for group in groups:
            self.notify(group)

    def notify(self, group: OnlineGroup) -> None:
        """Notify every connection of a group that its members or topics changed."""
        state, config = self._state, self._state.groups.get(group.name)
        if (
            not state.config.notify_consumer_ids_changed_enable
            or group.is_broadcasting
            and not (state.release.notifies_broadcasting_groups)
        ):
            return
        if config is not None and not config.notify_consumer_ids_changed_enable:
            return
        for connection in list(group.members):
            notice = request(NotifyConsumerIdsChangedHeader(group.name), oneway=True)
            notice.language, notice.version = "JAVA", state.release.ordinal
            connection.oneway(notice)

    def consumer_list(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        name = GetConsumerListByGroupHeader.from_fields(command.fields).consumer_group
        group = self._state.members.group(name)
        if group is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")
        return command.make_response(body=encode_consumer_list(group.client_ids()))

    # --- locks

    def lock(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        lock_request = decode_lock_request(command.body)
        held = self._state.locks.lock(lock_request.group, lock_request.client_id, lock_request.queues)
        return command.make_response(body=encode_lock_response(held))

    def unlock(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        unlock_request = decode_lock_request(command.body)
        self._state.locks.unlock(unlock_request.group, unlock_request.client_id, unlock_request.queues)
        return command.make_response()

    # --- subscriptions and assignments

    def check_client_config(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        if not command.body:
            if self._state.release.number >= (5, 3, 3):
                return command.make_response()
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: no subscription to check")
        subscription = decode_check_client_config(command.body).subscription
        if subscription.expression_type == TAG:
            return command.make_response()
        if subscription.expression_type == SQL92:
            raise Refused(ResponseCode.SYSTEM_ERROR, sql_refusal(self._state))
        raise Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"the expression type {subscription.expression_type} is unknown"
        )

    def query_assignment(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        assignment_request = decode_assignment_request(command.body)
        topic = self._state.topics.get(assignment_request.topic)
        queues = (
            []
            if topic is None
            else [
                MessageQueue(topic.name, self._state.config.broker_name, queue_id)
                for queue_id in range(topic.read_queues)
            ]
        )
        if assignment_request.message_model == "BROADCASTING":
            allocated: list[MessageQueue] | None = queues
        else:
            group = self._state.members.group(assignment_request.consumer_group)
            members = sorted(set(group.client_ids())) if group is not None else []
            allocated = _allocate(assignment_request.strategy_name, queues, members, assignment_request.client_id)
        assignments = None if allocated is None else [MessageQueueAssignment(queue) for queue in allocated]
        return command.make_response(body=encode_assignments(assignments))


def _allocate(
    strategy: str, queues: list[MessageQueue], members: list[str], client_id: str
) -> list[MessageQueue] | None:
    """Return a member's queues by a strategy that brokers know; None if no queue can be allocated."""
    if client_id not in members or not queues or strategy not in ("AVG", "AVG_BY_CIRCLE"):
        return None
    index, count = members.index(client_id), len(members)
    if strategy == "AVG_BY_CIRCLE":
        return queues[index::count]
    rest = len(queues) % count
    size = 1 if len(queues) <= count else len(queues) // count + (index < rest)
    start = index * size if index < rest else index * size + rest
    return queues[start : start + max(0, min(size, len(queues) - start))]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
