"""SQL92 expressions: each broker checks an expression before the first pull that uses it."""

from __future__ import annotations

import asyncio

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.errors import BrokerError, ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.bodies import CheckClientConfig, encode_check_client_config
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import CheckClientConfigHeader

RETRY_CODES = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL, ResponseCode.GO_AWAY}
)
"""Codes of brokers that have not checked the expression; the same request may succeed later."""


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
