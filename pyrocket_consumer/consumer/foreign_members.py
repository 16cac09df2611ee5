"""Members of other clients in a group whose offsets are in a database: they would go by the broker's offsets."""

from __future__ import annotations

import asyncio
from uuid import UUID

from pyrocket_consumer.cluster.members import Reply, group_members, speak_to_all
from pyrocket_consumer.consumer.group import Group
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MASTER_ID
from pyrocket_consumer.offsets import DatabaseOffsets

ANSWER_WITHIN_S = 3.0
"""How long members have to answer that they are ours; those that are silent are let be."""


async def refuse_foreign_members(group: Group) -> None:
    """Look who is in the group.

    Raises:
        ConfigError: there is a member of another client; the text names it.
    """
    store = group.config.offset_store
    assert isinstance(store, DatabaseOffsets)
    if store.allow_foreign_members:
        return
    try:
        async with asyncio.timeout(2 * ANSWER_WITHIN_S):
            foreign = await _foreign_members(group)
    except (RocketError, TimeoutError):
        return  # who is there is not known: brokers that do not answer give no queue either
    if foreign:
        raise ConfigError(
            f"group {group.name!r} has members of another client, which go by the broker's offsets and not by "
            f"{store!r}: {', '.join(foreign)}; stop them, or use a group of your own; allow_foreign_members=True lets "
            "them be, and what they consume has its effect by their rules"
        )


async def _foreign_members(group: Group) -> list[str]:
    cluster = group.cluster
    brokers: dict[str, str] = {}
    for topic in group.subscriptions.topics():
        route = cluster.known_route(topic)
        for broker in route.brokers if route is not None else ():
            if (address := broker.addresses.get(MASTER_ID)) is not None:
                brokers[broker.broker_name] = address
    found = await group_members(cluster, group.name, brokers, failures={})
    others = [member for member in found.members if member.client_id != group.client_id]
    foreign = [f"{member.client_id} ({member.client})" for member in others if member.language not in ("", "PYTHON")]
    unknown = [member for member in others if member.language in ("", "PYTHON")]
    rid = str(UUID(int=group.rng.getrandbits(128), version=4))
    replies = await speak_to_all(cluster, group.name, unknown, "status", rid, b"", ANSWER_WITHIN_S)
    foreign += [name for name, reply in sorted(replies.items()) if reply.kind is Reply.FOREIGN]
    return sorted(foreign)
