"""Clients online: members of consumer groups, their subscriptions, and producers.

Source: ConsumerManager, ProducerManager.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyrocket_consumer.model import Subscription
from pyrocket_consumer.testing.connection import Connection


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
