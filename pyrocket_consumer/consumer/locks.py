"""The broker's locks of orderly queues: taken before a queue begins, renewed, given back after its last commit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue

if TYPE_CHECKING:
    from pyrocket_consumer.consumer.member import GroupMember

RENEW_EVERY_S = 20.0
VALID_S = 30.0
"""How long we believe in a lock since its last confirmation; the broker keeps it for 60 s."""


class QueueLocks:
    """Which queues the brokers have locked for us, and until when we believe it. Confined to the I/O thread."""

    def __init__(self, member: GroupMember, renew_every_s: float = RENEW_EVERY_S, valid_s: float = VALID_S) -> None:
        self._member = member
        self._renew_every_s = renew_every_s
        self._valid_s = valid_s

    async def take(self, queue: MessageQueue) -> float | None:
        """Lock a queue; returns until when it is ours (by the loop's clock), None if another member has it."""
        asked_at = self._member.loop.time()  # the broker counts from when it answers: we never believe longer than it
        member = self._member
        granted = await member.cluster.broker(queue.broker_name).lock(member.group, [queue])
        return asked_at + self._valid_s if queue in granted else None

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues, after their last offsets are stored. A broker that cannot be told forgets in a minute."""
        member = self._member
        for broker_name, ours in _by_broker(queues).items():
            try:
                await member.cluster.broker(broker_name).unlock(member.group, ours)
            except RocketError as error:
                text = f"queues of {broker_name} stay locked for up to a minute: {error}"
                member.trouble(EventKind.BROKER_UNREACHABLE, text)

    async def keep(self) -> None:
        """Renew all locks until cancelled."""
        while True:
            await asyncio.sleep(self._renew_every_s)
            await asyncio.gather(*(self._renew(name, ours) for name, ours in self._held().items()))

    def _held(self) -> dict[str, list[MessageQueue]]:
        return _by_broker(self._member.assignments.all())

    async def _renew(self, broker_name: str, queues: list[MessageQueue]) -> None:
        member = self._member
        asked_at = member.loop.time()
        try:
            granted = await member.cluster.broker(broker_name).lock(member.group, queues)
        except RocketError as error:
            # listener calls stop by themselves when the last confirmation is too old
            member.trouble(EventKind.BROKER_UNREACHABLE, f"locks of {broker_name} are not renewed: {error}")
            return
        for queue in queues:
            assignment = member.assignments.get(queue)
            if assignment is None:
                continue
            if queue in granted:
                assignment.window.locked_until = asked_at + self._valid_s
                member.orderly_goes_on(assignment.window)
            else:
                await member.assignments.lose(queue)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return found
