"""Members of a group whose offsets are in a database that go by other ones: they would consume all anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from uuid import UUID

from pyrocket_consumer.cluster.admin_relay import (
    MAX_CONCURRENT_RELAYS,
    RelayStatus,
    RemoteMember,
    fetch_group_members,
    relay_to_all,
)
from pyrocket_consumer.consumer.context.member_context import Group
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MASTER_ID, EventKind
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.text import escape_controls, join_truncated, logger, truncate

ANSWER_WITHIN_S = 3.0
"""How long brokers have to say who is there, and then members to answer that they are ours."""

START_AGAIN_AFTER_S = 0.5
"""A start that has not heard all looks once more, after so long; then it goes on, and the watch asks them again."""

LONGEST_PAUSE_S = 300.0
"""Between two words to a member that does not answer: each takes a thread of its broker's for ten seconds."""

MOST_ASKED = 200
"""Members that are asked in one look: brokers say how many there are."""

_MOST_NAMED = 10
_MAX_NAME_CHARS = 127

log = logger("consumer")


@dataclass(slots=True)
class _Unheard:
    """When to ask a member of which it is not known whose it is, and after what pause again."""

    ask_at: float
    pause_s: float = 0.0
    why: str = "not asked yet"


class ForeignMembers:
    """Looks who is in the group: other clients, and members of ours whose offsets are not in a database."""

    def __init__(self, group: Group, store: DatabaseOffsets) -> None:
        self._group = group
        self._store = store
        self._known: set[str] = set()  # who has its offsets in a database, or was told
        self._unheard: dict[str, _Unheard] = {}  # all others that are there, but for ourselves
        self._looking = asyncio.Lock()
        self._untold: dict[str, RocketError] = {}  # why brokers did not say who is there, at the last look

    async def refuse(self, *topics: str) -> None:
        """Look before anything is consumed, of `topics` too. Who is silent is no reason not to start, but is told.

        Raises:
            ConfigError: there is such a member; the text names it.
        """
        foreign = await self._look(topics)
        if not foreign and not topics and (self._unheard or self._untold):  # a start may take a moment
            await asyncio.sleep(START_AGAIN_AFTER_S)
            foreign = await self._look(topics)
        if foreign:
            raise ConfigError(
                f"group {self._group.name!r} has {len(foreign)} members of another client, or without this database, "
                f"which go by other offsets than those in {self._store!r}; stop them, or use a group of your own; "
                "allow_foreign_members=True lets them be, and what they consume has its effect by their rules: "
                f"{join_truncated(foreign, _MOST_NAMED)}"
            )
        if topics:  # who is silent was told, or is by the watch
            return
        silent = [f"{client_id} ({each.why})" for client_id, each in sorted(self._unheard.items())]
        silent += [f"all of {broker_name} ({why})" for broker_name, why in sorted(self._untold.items())]
        if silent:
            log.warning(
                "group=%s whether members have their offsets in a database is not known, they are asked again: %s",
                self._group.name,
                join_truncated(silent, _MOST_NAMED),
            )

    async def watch(self) -> None:
        """Tell of those that come later, or are heard later. Until cancelled."""
        while True:
            await asyncio.sleep(self._group.config.rebalance_interval_s)
            if foreign := await self._look():
                self._group.event(
                    EventKind.FOREIGN_MEMBER,
                    f"{len(foreign)} members go by other offsets than those in this database, stop them: what they "
                    "consume is consumed here, too, and what was consumed here may be there: "
                    f"{join_truncated(foreign, _MOST_NAMED)}",
                    facts={
                        "members": [escape_controls(truncate(name, _MAX_NAME_CHARS)) for name in foreign[:_MOST_NAMED]],
                        "count": len(foreign),
                    },
                    level=logging.ERROR,
                )

    async def _look(self, topics: Iterable[str] = ()) -> list[str]:
        """Return which members are foreign, among those of which that was not known at the last look."""
        async with self._looking:
            return await self._look_now(topics)

    async def _look_now(self, topics: Iterable[str]) -> list[str]:
        new = [member for member in await self._members(topics) if member.client_id not in self._known]
        foreign = {member.client_id: member.client for member in new if member.language not in ("", "PYTHON")}
        now, due = self._group.loop.time(), list[tuple[float, RemoteMember]]()
        for member in new:
            if member.client_id not in foreign:
                unheard = self._unheard.setdefault(member.client_id, _Unheard(now))
                due.append((unheard.ask_at, member))
        due.sort(key=itemgetter(0))  # so that each has its turn
        foreign |= await self._ask([member for ask_at, member in due if ask_at <= now][:MOST_ASKED])
        for client_id in foreign:
            self._is_known(client_id)
        return sorted(f"{client_id} ({what})" for client_id, what in foreign.items())

    async def _members(self, topics: Iterable[str]) -> Iterable[RemoteMember]:
        """Return who else is in the group, as far as brokers tell, and forget who is not there any more."""
        group, cluster = self._group, self._group.cluster
        brokers: dict[str, str] = {}
        for topic in {*group.subscriptions.topics(), *topics}:
            route = cluster.known_route(topic)
            for broker in route.brokers if route is not None else ():
                if (address := broker.addresses.get(MASTER_ID)) is not None:
                    brokers[broker.broker_name] = address
        self._untold = {}
        found = await fetch_group_members(cluster, group.name, brokers, self._untold, ANSWER_WITHIN_S)
        members = {member.client_id: member for member in found.members if member.client_id != group.client_id}
        if not self._untold:
            self._known &= members.keys()
            self._unheard = {client_id: each for client_id, each in self._unheard.items() if client_id in members}
        return members.values()

    async def _ask(self, members: list[RemoteMember]) -> dict[str, str]:
        """Return which of these say that they are foreign, and what they are; as many are asked as there is time for.

        Who does not say whose it is is asked again at the next look, and then after growing pauses.
        """
        group, foreign = self._group, dict[str, str]()
        rid = str(UUID(int=group.rng.getrandbits(128), version=4))
        deadline = group.loop.time() + ANSWER_WITHIN_S
        for start in range(0, len(members), MAX_CONCURRENT_RELAYS):
            if (left_s := deadline - group.loop.time()) <= 0:
                break
            some = members[start : start + MAX_CONCURRENT_RELAYS]
            for client_id, reply in (
                await relay_to_all(group.cluster, group.name, some, "status", rid, b"", left_s)
            ).items():
                if reply.kind is RelayStatus.OURS and reply.report.database == self._store.identity:
                    self._is_known(client_id)
                elif reply.kind is RelayStatus.OURS and reply.report.in_database:
                    foreign[client_id] = "its offsets are in another database, or table"
                elif reply.kind is RelayStatus.OURS:
                    foreign[client_id] = "its offsets are not in a database"
                elif reply.kind is RelayStatus.FOREIGN:
                    foreign[client_id] = "another client"
                else:
                    unheard = self._unheard[client_id]
                    unheard.why = reply.reason
                    unheard.ask_at = group.loop.time() + unheard.pause_s
                    unheard.pause_s = min(max(2 * unheard.pause_s, group.config.rebalance_interval_s), LONGEST_PAUSE_S)
        return foreign

    def _is_known(self, client_id: str) -> None:
        self._known.add(client_id)
        self._unheard.pop(client_id, None)
