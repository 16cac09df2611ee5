"""Brokers that refuse pulls because they do not know what we subscribe to: being known again, and why we were not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.errors import BrokerError, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, Subscription
from pyrocket_consumer.protocol.bodies import ConsumerConnection, decode_consumer_connection
from pyrocket_consumer.protocol.command import GetConsumerConnectionListHeader

FIRST_HEARTBEAT_PAUSE_S = 0.05

MAX_HEARTBEAT_PAUSE_FACTOR = 5
"""The longest pause, in units of `pull_retry_delay_s`."""

FORGET_REFUSALS_AFTER_S = 30.0
"""After so long without a refusal the next one is a first one again."""

COMPARE_AFTER_REFUSALS = 2
"""Refusals in a row after which members are compared: a broker that was started again needs one heartbeat."""


class Resubscriber:
    """Makes us known again, one heartbeat for all queues at a time, and later and later. Confined to the I/O thread.

    A broker goes by what the last heartbeat of a group said. If members subscribe to different topics, each heartbeat
    of one has pulls of the others refused: were they answered at once, it would never end.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._heartbeat_lock = asyncio.Lock()
        self._heartbeats = 0
        self._refusals_in_a_row = 0
        self._last_at = float("-inf")
        self._is_reported = False

    async def wait_registered(self, queue: MessageQueue) -> None:
        """A pull of `queue` was refused: return when it may be tried again."""
        heartbeats = self._heartbeats
        async with self._heartbeat_lock:
            if self._heartbeats == heartbeats:  # else there was one since this pull was refused
                await self._heartbeat(queue)
                self._heartbeats += 1

    async def _heartbeat(self, queue: MessageQueue) -> None:
        context = self._context
        if context.loop.time() - self._last_at > FORGET_REFUSALS_AFTER_S:
            self._refusals_in_a_row, self._is_reported = 0, False
        longest_s = MAX_HEARTBEAT_PAUSE_FACTOR * context.config.pull_retry_delay_s
        await asyncio.sleep(min(FIRST_HEARTBEAT_PAUSE_S * 2**self._refusals_in_a_row, longest_s))
        self._refusals_in_a_row = min(self._refusals_in_a_row + 1, 16)
        if self._refusals_in_a_row >= COMPARE_AFTER_REFUSALS and not self._is_reported:
            await self._compare(queue)
        await context.cluster.heartbeat()
        self._last_at = context.loop.time()

    async def _compare(self, queue: MessageQueue) -> None:
        """Tell, once, in what the broker's view of the group differs from ours, and who else is in it."""
        context = self._context
        address = context.cluster.address(queue.broker_name)
        if address is None:
            return
        try:
            answer = await context.cluster.call(address, GetConsumerConnectionListHeader(context.name))
            found = await read_body(decode_consumer_connection, answer.body)
        except BrokerError:  # it knows no member of the group, or does not tell us
            return
        except RocketError as error:
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, f"why pulls are refused is not known: {error}", queue)
            return
        ours, theirs = _selectors(context.subscriptions.all()), _selectors(found.subscriptions)
        others = _other_members(found, context.client_id)
        if not others or ours == theirs:
            return
        self._is_reported = True
        text = (
            f"members of the group subscribe to different things, and so brokers refuse pulls and pass messages over: "
            f"this one to {_describe(ours)}, {', '.join(others)} to {_describe(theirs)}; "
            "all members of a group must subscribe to the same topics with the same selectors, else use another group"
        )
        facts = {"ours": ours, "at_the_broker": theirs, "others": others}
        context.emit(EventKind.SUBSCRIPTION_DIFFERS, text, queue, facts, level=logging.WARNING)


def _selectors(subscriptions: Iterable[Subscription]) -> dict[str, str]:
    return {each.topic: each.expression for each in sorted(subscriptions, key=lambda each: each.topic)}


def _other_members(found: ConsumerConnection, client_id: str) -> list[str]:
    return sorted({each.client_id for each in found.connections} - {client_id})


def _describe(selectors: dict[str, str]) -> str:
    return ", ".join(f"{topic} ({expression})" for topic, expression in selectors.items()) or "nothing"
