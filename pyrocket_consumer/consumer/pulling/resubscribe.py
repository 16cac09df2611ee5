"""Brokers that refuse pulls because they do not know what we subscribe to: being known again, and why we were not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.consumer.context.member_context import Group
from pyrocket_consumer.errors import BrokerError, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, Subscription
from pyrocket_consumer.protocol.bodies import ConsumerConnection, decode_consumer_connection
from pyrocket_consumer.protocol.command import GetConsumerConnectionListHeader

FIRST_PAUSE_S = 0.05

LONGEST_PAUSE = 5
"""The longest pause, in units of `pull_retry_delay_s`."""

QUIET_S = 30.0
"""After so long without a refusal the next one is a first one again."""

SUSPICIOUS = 2
"""Refusals in a row after which members are compared: a broker that was started again needs one heartbeat."""


class Refusals:
    """Makes us known again, one heartbeat for all queues at a time, and later and later. Confined to the I/O thread.

    A broker goes by what the last heartbeat of a group said. If members subscribe to different topics, each heartbeat
    of one has pulls of the others refused: were they answered at once, it would never end.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._turn = asyncio.Lock()
        self._heartbeats = 0
        self._in_a_row = 0
        self._last_at = float("-inf")
        self._told = False

    async def known_again(self, queue: MessageQueue) -> None:
        """A pull of `queue` was refused: return when it may be tried again."""
        heartbeats = self._heartbeats
        async with self._turn:
            if self._heartbeats == heartbeats:  # else there was one since this pull was refused
                await self._heartbeat(queue)
                self._heartbeats += 1

    async def _heartbeat(self, queue: MessageQueue) -> None:
        group = self._group
        if group.loop.time() - self._last_at > QUIET_S:
            self._in_a_row, self._told = 0, False
        longest_s = LONGEST_PAUSE * group.config.pull_retry_delay_s
        await asyncio.sleep(min(FIRST_PAUSE_S * 2**self._in_a_row, longest_s))
        self._in_a_row = min(self._in_a_row + 1, 16)
        if self._in_a_row >= SUSPICIOUS and not self._told:
            await self._compare(queue)
        await group.cluster.heartbeat()
        self._last_at = group.loop.time()

    async def _compare(self, queue: MessageQueue) -> None:
        """Tell, once, in what the broker's view of the group differs from ours, and who else is in it."""
        group = self._group
        address = group.cluster.address(queue.broker_name)
        if address is None:
            return
        try:
            answer = await group.cluster.call(address, GetConsumerConnectionListHeader(group.name))
            found = await read_body(decode_consumer_connection, answer.body)
        except BrokerError:  # it knows no member of the group, or does not tell us
            return
        except RocketError as error:
            group.trouble(EventKind.BROKER_UNREACHABLE, f"why pulls are refused is not known: {error}", queue)
            return
        ours, theirs = _selectors(group.subscriptions.all()), _selectors(found.subscriptions)
        others = _others(found, group.client_id)
        if not others or ours == theirs:
            return
        self._told = True
        text = (
            f"members of the group subscribe to different things, and so brokers refuse pulls and pass messages over: "
            f"this one to {_shown(ours)}, {', '.join(others)} to {_shown(theirs)}; "
            "all members of a group must subscribe to the same topics with the same selectors, else use another group"
        )
        facts = {"ours": ours, "at_the_broker": theirs, "others": others}
        group.event(EventKind.SUBSCRIPTION_DIFFERS, text, queue, facts, level=logging.WARNING)


def _selectors(subscriptions: Iterable[Subscription]) -> dict[str, str]:
    return {each.topic: each.expression for each in sorted(subscriptions, key=lambda each: each.topic)}


def _others(found: ConsumerConnection, client_id: str) -> list[str]:
    return sorted({each.client_id for each in found.connections} - {client_id})


def _shown(selectors: dict[str, str]) -> str:
    return ", ".join(f"{topic} ({expression})" for topic, expression in selectors.items()) or "nothing"
