"""Members of groups: heartbeats, lists of members, locks of queues and assignments.

Source: ConsumerManager, ProducerManager, ClientManageProcessor, RebalanceLockManager, QueryAssignmentProcessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyrocket_consumer.model import MessageQueue, Subscription, retry_topic
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
from pyrocket_consumer.testing.node import Connection, Handlers, Refused
from pyrocket_consumer.testing.pulls import sql_refusal

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


@dataclass(slots=True, eq=False)
class Member:
    """One connection of a group. The broker identifies members by connection, not by client id."""

    connection: Connection
    client_id: str
    language: str
    version: int
    last_seen_s: float


@dataclass(slots=True, eq=False)
class OnlineGroup:
    """A consumer group with at least one member. Its subscriptions belong to the group, not to a member."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    members: dict[Connection, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    fingerprint: int = 0

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model == "BROADCASTING"

    def client_ids(self) -> list[str]:
        return [member.client_id for member in self.members.values()]

    def find(self, client_id: str) -> Member | None:
        """Return the member with that id that sent a heartbeat last, or None."""
        found = [member for member in self.members.values() if member.client_id == client_id]
        return found[-1] if found else None

    def subscribe(self, subscriptions: Iterable[Subscription]) -> bool:
        """Store a heartbeat's subscriptions. Return whether the set of topics changed.

        Only a greater version replaces a topic's subscription. Topics missing from the heartbeat are removed.
        """
        by_topic = {subscription.topic: subscription for subscription in subscriptions}
        changed = by_topic.keys() != self.subscriptions.keys()
        for topic in self.subscriptions.keys() - by_topic.keys():
            del self.subscriptions[topic]
        for topic, subscription in by_topic.items():
            known = self.subscriptions.get(topic)
            if known is None or subscription.version > known.version:
                self.subscriptions[topic] = subscription
        return changed


class Members:
    """All groups online at one broker. Methods return the groups whose members or topics changed."""

    def __init__(self) -> None:
        self._groups: dict[str, OnlineGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}

    def group(self, name: str) -> OnlineGroup | None:
        """Return the group if it has a member online."""
        return self._groups.get(name)

    def groups(self) -> list[OnlineGroup]:
        return list(self._groups.values())

    def producers(self, group: str) -> list[Member]:
        return list(self._producers.get(group, {}).values())

    def join(self, name: str, member: Member) -> tuple[OnlineGroup, bool]:
        """Register or refresh a member. Return its group, and whether its connection is new to the group."""
        group = self._groups.setdefault(name, OnlineGroup(name))
        known = group.members.get(member.connection)
        group.members[member.connection] = member
        return group, known is None

    def join_producers(self, name: str, member: Member) -> None:
        self._producers.setdefault(name, {})[member.connection] = member

    def leave(self, connection: Connection, *, consumers: str | None, producers: str | None) -> list[OnlineGroup]:
        """Remove one connection from the named groups."""
        if producers is not None:
            self._drop_producer(producers, connection)
        return self._drop(consumers, connection) if consumers is not None else []

    def lost(self, connection: Connection) -> list[OnlineGroup]:
        """Remove a connection that ended from every group."""
        for producers in list(self._producers):
            self._drop_producer(producers, connection)
        return [group for name in list(self._groups) for group in self._drop(name, connection)]

    def silent_since(self, time_s: float) -> list[Connection]:
        """Return the connections whose last heartbeat is older than `time_s`."""
        tables = [group.members for group in self._groups.values()] + list(self._producers.values())
        silent = [member.connection for table in tables for member in table.values() if member.last_seen_s < time_s]
        return list(dict.fromkeys(silent))

    def clear(self) -> None:
        self._groups.clear()
        self._producers.clear()

    def _drop(self, name: str, connection: Connection) -> list[OnlineGroup]:
        group = self._groups.get(name)
        if group is None or group.members.pop(connection, None) is None:
            return []
        if not group.members:
            del self._groups[name]
        return [group]

    def _drop_producer(self, name: str, connection: Connection) -> None:
        producers = self._producers.get(name)
        if producers is not None and producers.pop(connection, None) is not None and not producers:
            del self._producers[name]


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_s: float


class QueueLocks:
    """The locks of each group by queue. A lock belongs to a client id, not to a connection."""

    def __init__(self, now_s: Callable[[], float], expiry_s: float) -> None:
        self._now_s = now_s
        self.expiry_s = expiry_s
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock or renew the queues that are free, expired or the client's own; return the locked ones of `queues`."""
        now, held, locks = self._now_s(), set(), self._locks.setdefault(group, {})
        for queue in queues:
            lock = locks.get(queue)
            if lock is None or lock.client_id == client_id or self._expired(lock, now):
                locks[queue] = _Lock(client_id, now)
                held.add(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the client's locks of `queues`, and no other client's."""
        locks = self._locks.get(group, {})
        for queue in queues:
            lock = locks.get(queue)
            if lock is not None and lock.client_id == client_id:
                del locks[queue]

    def held(self, group: str) -> dict[MessageQueue, str]:
        """Return the unexpired locks of a group and their holders."""
        now = self._now_s()
        return {
            queue: lock.client_id for queue, lock in self._locks.get(group, {}).items() if not self._expired(lock, now)
        }

    def clear(self) -> None:
        """Remove all locks, as a restart does."""
        self._locks.clear()

    def _expired(self, lock: _Lock, now: float) -> bool:
        return now - lock.renewed_s > self.expiry_s


class Membership:
    """Keeps the members of one broker's groups, and notifies them of changes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def handlers(self) -> Handlers:
        handlers: Handlers = {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_client_config,
        }
        if self._broker.release.query_assignment:
            handlers[RequestCode.QUERY_ASSIGNMENT] = self.query_assignment
        return handlers

    # --- members

    def heartbeat(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        broker = self._broker
        if not command.body:
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: the heartbeat has no body")
        data = decode_heartbeat(command.body)
        raw = fastjson.loads(command.body)
        fingerprint = _number(raw.get("heartbeatFingerprint"))
        without_subscriptions = broker.release.heartbeat_v2 and fingerprint != 0 and raw.get("withoutSub") is True
        now_s = broker.clock.monotonic_s()
        changed_subscriptions = not data.consumers
        for consumer in data.consumers:
            member = Member(connection, data.client_id, command.language, command.version, now_s)
            changed_subscriptions |= self._join(consumer, member, fingerprint, without_subscriptions)
        for producers in data.producers:
            member = Member(connection, data.client_id, command.language, command.version, now_s)
            broker.members.join_producers(producers, member)
        if not broker.release.heartbeat_v2:
            return command.make_response()
        is_changed = "true" if changed_subscriptions or fingerprint == 0 else "false"
        return command.make_response(fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": is_changed})

    def _join(self, data: ConsumerData, member: Member, fingerprint: int, without_subscriptions: bool) -> bool:
        """Register one group of a heartbeat. Return whether its fingerprint is new to the broker."""
        broker = self._broker
        config = broker.group(data.group)
        if config is None and broker.release.skips_members_of_unknown_groups:
            return True
        if (
            broker.config.reject_pull_consumer_enable
            and data.consume_type == "CONSUME_ACTIVELY"
            and broker.release.is_v5
        ):
            return True
        if config is not None and not broker.is_slave:
            broker.topics.for_group(retry_topic(data.group), config.retry_queue_nums)
        group, is_new = broker.members.join(data.group, member)
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
        changed = self._broker.members.leave(
            connection, consumers=header.consumer_group, producers=header.producer_group
        )
        self.notify(*changed)
        return command.make_response()

    def lost(self, connection: Connection) -> None:
        """Remove a connection that ended, and notify the other members."""
        self.notify(*self._broker.members.lost(connection))

    def expire(self) -> None:
        """Close the connections without a recent heartbeat, as brokers do every ten seconds."""
        oldest = self._broker.clock.monotonic_s() - self._broker.config.channel_expired_timeout / 1000
        for connection in self._broker.members.silent_since(oldest):
            self.lost(connection)
            connection.close(False)

    def notify(self, *groups: OnlineGroup) -> None:
        """Notify every connection of these groups that the members or topics changed."""
        broker = self._broker
        for group in groups:
            config = broker.groups.get(group.name) or broker.config
            if group.is_broadcasting and not broker.release.notifies_broadcasting_groups:
                continue
            if broker.config.notify_consumer_ids_changed_enable and config.notify_consumer_ids_changed_enable:
                for connection in list(group.members):
                    notice = request(NotifyConsumerIdsChangedHeader(group.name), oneway=True)
                    connection.oneway(broker.as_sender(notice))

    def consumer_list(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        name = GetConsumerListByGroupHeader.from_fields(command.fields).consumer_group
        group = self._broker.members.group(name)
        if group is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")
        return command.make_response(body=encode_consumer_list(group.client_ids()))

    # --- locks

    def lock(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        lock_request = decode_lock_request(command.body)
        held = self._broker.locks.lock(lock_request.group, lock_request.client_id, lock_request.queues)
        return command.make_response(body=encode_lock_response(held))

    def unlock(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        unlock_request = decode_lock_request(command.body)
        self._broker.locks.unlock(unlock_request.group, unlock_request.client_id, unlock_request.queues)
        return command.make_response()

    # --- subscriptions and assignments

    def check_client_config(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        if not command.body:
            if self._broker.release.number >= (5, 3, 3):
                return command.make_response()
            raise Refused(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: no subscription to check")
        subscription = decode_check_client_config(command.body).subscription
        if subscription.expression_type == TAG:
            return command.make_response()
        if subscription.expression_type == SQL92:
            raise Refused(ResponseCode.SYSTEM_ERROR, sql_refusal(self._broker.config))
        raise Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"the expression type {subscription.expression_type} is unknown"
        )

    def query_assignment(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        assignment_request = decode_assignment_request(command.body)
        topic = self._broker.topics.get(assignment_request.topic)
        ids = range(topic.read_queues if topic is not None else 0)
        queues = [self._broker.queue(assignment_request.topic, queue_id) for queue_id in ids]
        if assignment_request.message_model == "BROADCASTING":
            allocated: list[MessageQueue] | None = queues
        else:
            group = self._broker.members.group(assignment_request.consumer_group)
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
