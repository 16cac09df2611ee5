"""Subscriptions at brokers: expressions that they check first, and heartbeats after they have refused a pull."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.errors import BrokerError, ConnectError, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, Subscription
from pyrocket_consumer.protocol.bodies import (
    CheckClientConfig,
    decode_consumer_connection,
    encode_check_client_config,
)
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import CheckClientConfigHeader, GetConsumerConnectionListHeader
from pyrocket_consumer.transport.backoff import Backoff

RETRY_CODES = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL, ResponseCode.GO_AWAY}
)
"""Codes of brokers that have not checked the expression; the same request may succeed later."""

FIRST_HEARTBEAT_PAUSE_S = 0.05

MAX_HEARTBEAT_PAUSE_FACTOR = 5
"""The longest pause before a heartbeat, in units of `pull_retry_delay_s`."""

FORGET_REFUSALS_AFTER_S = 30.0
"""After this time without a refusal, the count starts again."""

COMPARE_AFTER_REFUSALS = 2
"""Refusals in a row after which the subscriptions are compared. A restarted broker needs only one heartbeat."""


class ExpressionChecker:
    """Asks brokers to check expressions, because a pull with an invalid expression would return every message.

    Confined to the I/O thread.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._checked: set[tuple[str, str, str]] = set()  # topic, expression, broker name

    async def check(self, subscription: Subscription) -> None:
        """Ask the topic's brokers to check `subscription`. Unreachable or busy brokers check it before the first pull.

        Raises:
            BrokerError: a broker refuses the expression; correct it as the broker's text describes.
        """
        if subscription.expression_type == "TAG":
            return
        try:
            route = await self._context.cluster.routes.get(subscription.topic)
        except RocketError:
            return  # check_queue asks the brokers later
        checks = (self._check_at(subscription, broker.broker_name) for broker in route.brokers)
        errors = [each for each in await asyncio.gather(*checks, return_exceptions=True) if each is not None]
        for error in errors:
            if not isinstance(error, RocketError) or (isinstance(error, BrokerError) and error.code not in RETRY_CODES):
                raise error

    async def check_queue(self, queue: MessageQueue) -> None:
        """Ask the queue's broker to check the topic's expression, if it has not done so yet.

        Raises:
            RocketError: the broker did not check it, or refuses it. The queue must not begin; try again later.
        """
        topic = self._context.subscriptions.get(queue.topic)
        if topic is not None and topic.subscription.expression_type != "TAG":
            await self._check_at(topic.subscription, queue.broker_name)

    async def _check_at(self, subscription: Subscription, broker_name: str) -> None:
        key = (subscription.topic, subscription.expression, broker_name)
        if key in self._checked:
            return
        context = self._context
        address = context.cluster.routes.address(broker_name)
        if address is None:
            raise ConnectError(broker_name, "no route names an address of this broker now")
        body = encode_check_client_config(CheckClientConfig(context.client_id, context.name, subscription))
        await context.cluster.call(address, CheckClientConfigHeader(), body)
        self._checked.add(key)


class Resubscriber:
    """Registers the member again, with one heartbeat for all queues and growing pauses. Confined to the I/O thread.

    A broker uses the subscriptions of the group's last heartbeat. If members subscribe to different topics, each
    heartbeat of one member makes the broker refuse the pulls of the others. Without pauses, they would send heartbeats
    in turn without end.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._heartbeat_lock = asyncio.Lock()
        self._heartbeats = 0
        longest_s = MAX_HEARTBEAT_PAUSE_FACTOR * context.config.pull_retry_delay_s
        self._backoff = Backoff(FIRST_HEARTBEAT_PAUSE_S, longest_s)
        self._last_at = float("-inf")
        self._is_reported = False

    async def wait_registered(self, queue: MessageQueue) -> None:
        """Return when `queue`, whose pull was refused, may be pulled again."""
        heartbeats = self._heartbeats
        async with self._heartbeat_lock:
            if self._heartbeats == heartbeats:  # otherwise one was sent after this refusal
                await self._heartbeat(queue)
                self._heartbeats += 1

    async def _heartbeat(self, queue: MessageQueue) -> None:
        context = self._context
        if context.loop.time() - self._last_at > FORGET_REFUSALS_AFTER_S:
            self._backoff.reset()
            self._is_reported = False
        await asyncio.sleep(self._backoff.failed())
        if self._backoff.failures >= COMPARE_AFTER_REFUSALS and not self._is_reported:
            await self._compare(queue)
        await context.cluster.membership.heartbeat()
        self._last_at = context.loop.time()

    async def _compare(self, queue: MessageQueue) -> None:
        """Emit an event, once, if the broker has other subscriptions of the group than this member; name the others."""
        context = self._context
        address = context.cluster.routes.address(queue.broker_name)
        if address is None:
            return
        try:
            header = GetConsumerConnectionListHeader(context.name)
            found = await context.cluster.read(address, header, decode_consumer_connection)
        except BrokerError:  # the broker knows no member of the group, or does not permit the request
            return
        except RocketError as error:
            context.emit_throttled(
                EventKind.BROKER_UNREACHABLE, f"the broker refuses pulls for an unknown reason: {error}", queue
            )
            return
        own, at_broker = _selectors(context.subscriptions.all()), _selectors(found.subscriptions)
        others = sorted({each.client_id for each in found.connections} - {context.client_id})
        if not others or own == at_broker:
            return
        self._is_reported = True
        text = (
            "members of the group have different subscriptions, so brokers refuse pulls and skip messages. "
            f"This one subscribes to {_describe(own)}, {', '.join(others)} to {_describe(at_broker)}. "
            "Give all members the same topics and selectors, or use another group"
        )
        facts = {"ours": own, "at_the_broker": at_broker, "others": others}
        context.emit(EventKind.SUBSCRIPTION_DIFFERS, text, queue, facts, level=logging.WARNING)


def _selectors(subscriptions: Iterable[Subscription]) -> dict[str, str]:
    return {each.topic: each.expression for each in sorted(subscriptions, key=lambda each: each.topic)}


def _describe(selectors: dict[str, str]) -> str:
    return ", ".join(f"{topic} ({expression})" for topic, expression in selectors.items()) or "nothing"
