"""Foreign members: they do not use the group's offsets in the database, and would consume all messages again."""

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
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MASTER_ID, EventKind
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.text import escape_controls, join_truncated, logger, truncate
from pyrocket_consumer.transport.backoff import Backoff

MEMBER_STATUS_TIMEOUT_S = 3.0
"""How long brokers have to return the group's members, and then the members to report their offset stores."""

SECOND_CHECK_AFTER_S = 0.5
"""After this time a start repeats an incomplete check, once. Then it continues, and `watch` repeats the check."""

MAX_STATUS_PAUSE_S = 300.0
"""The longest pause between two requests to a silent member. Each request occupies a broker's thread for 10 s."""

MAX_MEMBERS_PER_CHECK = 200
"""How many members get a request in one check. A faulty broker could name any number of members."""

_MAX_NAMED = 10
_MAX_NAME_CHARS = 127

log = logger("consumer")


@dataclass(slots=True)
class _Unidentified:
    """A member whose client or offset store is unknown: the pauses between requests to it, and why it is unknown."""

    backoff: Backoff
    why: str = "no request sent yet"


class ForeignMembers:
    """Finds other clients in the group, and members of this library whose offsets are not in the database."""

    def __init__(self, context: MemberContext, store: DatabaseOffsets) -> None:
        self._context = context
        self._store = store
        self._known: set[str] = set()  # members with offsets in the database, and reported ones
        self._unidentified: dict[str, _Unidentified] = {}  # the other members except this one
        self._check_lock = asyncio.Lock()
        self._failed_brokers: dict[str, RocketError] = {}  # those that did not return the members

    async def check(self, *topics: str) -> None:
        """Find foreign members before this consumer consumes, for its topics and `topics`.

        Silent members do not prevent a start; a warning names them.

        Raises:
            ConfigError: the group has a foreign member; stop it, or use another group.
        """
        foreign = await self._find_foreign(topics)
        if not foreign and not topics and (self._unidentified or self._failed_brokers):  # a start may take a moment
            await asyncio.sleep(SECOND_CHECK_AFTER_S)
            foreign = await self._find_foreign(topics)
        if foreign:
            raise ConfigError(
                f"group {self._context.name!r} has {len(foreign)} members of another client, or without this database. "
                f"They do not use the offsets in {self._store!r}; stop them, or use another group. "
                "allow_foreign_members=True accepts them, and they follow their own rules: "
                f"{join_truncated(foreign, _MAX_NAMED)}"
            )
        if topics:  # silent members were reported at the start, or are by `watch`
            return
        silent = [f"{client_id} ({each.why})" for client_id, each in sorted(self._unidentified.items())]
        silent += [f"all of {broker_name} ({why})" for broker_name, why in sorted(self._failed_brokers.items())]
        if silent:
            log.warning(
                "group=%s the offset stores of some members are not known, requests are repeated: %s",
                self._context.name,
                join_truncated(silent, _MAX_NAMED),
            )

    async def watch(self) -> None:
        """Emit an event when a foreign member joins, or is found later. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._context.config.rebalance_interval_s)
            if foreign := await self._find_foreign():
                self._context.emit(
                    EventKind.FOREIGN_MEMBER,
                    f"{len(foreign)} members do not use the offsets in this database, so messages are consumed twice; "
                    f"stop them: {join_truncated(foreign, _MAX_NAMED)}",
                    facts={
                        "members": [escape_controls(truncate(name, _MAX_NAME_CHARS)) for name in foreign[:_MAX_NAMED]],
                        "count": len(foreign),
                    },
                    level=logging.ERROR,
                )

    async def _find_foreign(self, topics: Iterable[str] = ()) -> list[str]:
        """Return the foreign members among those that the last check did not know."""
        async with self._check_lock:
            return await self._find_foreign_now(topics)

    async def _find_foreign_now(self, topics: Iterable[str]) -> list[str]:
        new = [member for member in await self._members(topics) if member.client_id not in self._known]
        foreign = {member.client_id: member.client for member in new if member.language not in ("", "PYTHON")}
        now, due = self._context.loop.time(), list[tuple[float, RemoteMember]]()
        for member in new:
            if member.client_id not in foreign:
                if (member_state := self._unidentified.get(member.client_id)) is None:
                    backoff = Backoff(self._context.config.rebalance_interval_s, MAX_STATUS_PAUSE_S, free=1)
                    backoff.until = now
                    member_state = self._unidentified[member.client_id] = _Unidentified(backoff)
                due.append((member_state.backoff.until, member))
        due.sort(key=itemgetter(0))  # the longest waiting first
        foreign |= await self._request_status(
            [member for due_at, member in due if due_at <= now][:MAX_MEMBERS_PER_CHECK]
        )
        for client_id in foreign:
            self._mark_known(client_id)
        return sorted(f"{client_id} ({what})" for client_id, what in foreign.items())

    async def _members(self, topics: Iterable[str]) -> Iterable[RemoteMember]:
        """Return the other members that the brokers name, and forget members that have left."""
        context, cluster = self._context, self._context.cluster
        brokers: dict[str, str] = {}
        for topic in {*context.subscriptions, *topics}:
            route = cluster.routes.known(topic)
            for broker in route.brokers if route is not None else ():
                if (address := broker.addresses.get(MASTER_ID)) is not None:
                    brokers[broker.broker_name] = address
        self._failed_brokers = {}
        found = await fetch_group_members(cluster, context.name, brokers, self._failed_brokers, MEMBER_STATUS_TIMEOUT_S)
        members = {member.client_id: member for member in found.members if member.client_id != context.client_id}
        if not self._failed_brokers:
            self._known &= members.keys()
            self._unidentified = {
                client_id: each for client_id, each in self._unidentified.items() if client_id in members
            }
        return members.values()

    async def _request_status(self, members: list[RemoteMember]) -> dict[str, str]:
        """Request the status of members as far as the time allows; return the foreign ones, each with the reason.

        A silent member gets another request in the next check, and then after growing pauses.
        """
        context, foreign = self._context, dict[str, str]()
        request_id = str(UUID(int=context.rng.getrandbits(128), version=4))
        deadline = context.loop.time() + MEMBER_STATUS_TIMEOUT_S
        for start in range(0, len(members), MAX_CONCURRENT_RELAYS):
            if (left_s := deadline - context.loop.time()) <= 0:
                break
            some = members[start : start + MAX_CONCURRENT_RELAYS]
            for client_id, reply in (
                await relay_to_all(context.cluster, context.name, some, "status", request_id, b"", left_s)
            ).items():
                if reply.kind is RelayStatus.OURS and reply.report.database == self._store.identity:
                    self._mark_known(client_id)
                elif reply.kind is RelayStatus.OURS and reply.report.in_database:
                    foreign[client_id] = "its offsets are in another database, or table"
                elif reply.kind is RelayStatus.OURS:
                    foreign[client_id] = "its offsets are not in a database"
                elif reply.kind is RelayStatus.FOREIGN:
                    foreign[client_id] = "another client"
                else:
                    member_state = self._unidentified[client_id]
                    member_state.why = reply.reason
                    member_state.backoff.failed(context.loop.time())
        return foreign

    def _mark_known(self, client_id: str) -> None:
        self._known.add(client_id)
        self._unidentified.pop(client_id, None)
