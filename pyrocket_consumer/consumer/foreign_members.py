"""Members of a group whose offsets are in a database that go by the broker's offsets: they would consume all anew."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

from pyrocket_consumer.cluster.members import Reply, group_members, speak_to_all
from pyrocket_consumer.consumer.group import Group
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MASTER_ID, EventKind
from pyrocket_consumer.offsets import DatabaseOffsets

ANSWER_WITHIN_S = 3.0
"""How long members have to answer that they are ours; those that are silent are let be."""


class ForeignMembers:
    """Looks who is in the group: other clients, and members of ours whose offsets are not in a database."""

    def __init__(self, group: Group, store: DatabaseOffsets) -> None:
        self._group = group
        self._store = store
        self._known: frozenset[str] = frozenset()  # who was looked at, and is there still

    async def refuse(self) -> None:
        """Look once, before anything is consumed.

        Raises:
            ConfigError: there is such a member; the text names it.
        """
        if foreign := await self._look():
            raise ConfigError(
                f"group {self._group.name!r} has members of another client, or without a database, which go by the "
                f"broker's offsets and not by {self._store!r}: {', '.join(foreign)}; stop them, or use a group of your "
                "own; allow_foreign_members=True lets them be, and what they consume has its effect by their rules"
            )

    async def watch(self) -> None:
        """Tell of those that come later. Until cancelled."""
        while True:
            await asyncio.sleep(self._group.config.rebalance_interval_s)
            if foreign := await self._look():
                self._group.event(
                    EventKind.FOREIGN_MEMBER,
                    "members have come that go by the broker's offsets and not by the database: what they consume is "
                    f"consumed here, too, and what was consumed here may be there: {', '.join(foreign)}; stop them",
                    facts={"members": foreign},
                    level=logging.ERROR,
                )

    async def _look(self) -> list[str]:
        """Return which members are foreign, among those that were not there at the last look."""
        try:
            async with asyncio.timeout(2 * ANSWER_WITHIN_S):
                return await self._foreign_members()
        except (RocketError, TimeoutError):
            return []  # who is there is not known: brokers that do not answer give no queue either

    async def _foreign_members(self) -> list[str]:
        group, cluster = self._group, self._group.cluster
        brokers: dict[str, str] = {}
        for topic in group.subscriptions.topics():
            route = cluster.known_route(topic)
            for broker in route.brokers if route is not None else ():
                if (address := broker.addresses.get(MASTER_ID)) is not None:
                    brokers[broker.broker_name] = address
        found = await group_members(cluster, group.name, brokers, failures={})
        members = {member.client_id: member for member in found.members if member.client_id != group.client_id}
        new = [member for member in members.values() if member.client_id not in self._known]
        self._known = frozenset(members)
        foreign = [f"{member.client_id} ({member.client})" for member in new if member.language not in ("", "PYTHON")]
        unknown = [member for member in new if member.language in ("", "PYTHON")]
        rid = str(UUID(int=group.rng.getrandbits(128), version=4))
        replies = await speak_to_all(cluster, group.name, unknown, "status", rid, b"", ANSWER_WITHIN_S)
        for name, reply in replies.items():
            if reply.kind is Reply.FOREIGN:
                foreign.append(name)
            elif reply.kind is Reply.OURS and not reply.report.in_database:
                foreign.append(f"{name} (its offsets are not in a database)")
        return sorted(foreign)
