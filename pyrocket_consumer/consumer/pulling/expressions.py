"""SQL92 expressions: each broker looks at one before the first pull that uses it."""

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
"""What a broker answers that has not looked."""


class ExpressionChecker:
    """Has brokers look at expressions: a pull with one that a broker cannot use would bring everything.

    Confined to the I/O thread.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._checked: set[tuple[str, str, str]] = set()  # topic, expression, broker name

    async def check(self, subscription: Subscription) -> None:
        """Have the topic's brokers look at `subscription`; one that is away or busy is asked before its first pull.

        Raises:
            BrokerError: a broker does not take it; its text says why.
        """
        if subscription.expression_type == "TAG":
            return
        try:
            route = await self._context.cluster.route(subscription.topic)
        except RocketError:
            return  # its brokers are asked when they are known
        asked = (self._check_at(subscription, broker.broker_name) for broker in route.brokers)
        refused = [each for each in await asyncio.gather(*asked, return_exceptions=True) if each is not None]
        for error in refused:
            if not isinstance(error, RocketError) or (isinstance(error, BrokerError) and error.code not in RETRY_CODES):
                raise error

    async def check_queue(self, queue: MessageQueue) -> None:
        """Have the queue's broker look at the topic's expression, if it has not yet.

        Raises:
            RocketError: it has not, or does not take it; the queue must not begin.
        """
        subscription = self._context.subscriptions.subscription(queue.topic)
        if subscription is not None and subscription.expression_type != "TAG":
            await self._check_at(subscription, queue.broker_name)

    async def _check_at(self, subscription: Subscription, broker_name: str) -> None:
        key = (subscription.topic, subscription.expression, broker_name)
        if key in self._checked:
            return
        context = self._context
        address = context.cluster.address(broker_name)
        if address is None:
            raise ConnectError(broker_name, "no route names an address of this broker now")
        body = encode_check_client_config(CheckClientConfig(context.client_id, context.name, subscription))
        await context.cluster.call(address, CheckClientConfigHeader(), body)
        self._checked.add(key)
