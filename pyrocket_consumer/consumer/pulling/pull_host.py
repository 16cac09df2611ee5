"""The member's services for its pull loops: subscriptions, pauses, connections, and delivery."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from pyrocket_consumer.cluster.membership import BrokerLink
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.dispatch.delivery import Delivery
from pyrocket_consumer.consumer.pulling.pull_loop import PullLoop
from pyrocket_consumer.consumer.pulling.resubscribe import Resubscriber
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.protocol.message import Message


class MemberPullHost:
    """The `PullHost` of every pull loop of a member. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, delivery: Delivery) -> None:
        self.loop = context.loop
        self.group = context.name
        self._context = context
        self._delivery = delivery
        self._resubscriber = Resubscriber(context)
        self._paused: set[MessageQueue] = set()
        self._all_paused = False

    # --- pauses

    def pause(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull no more from `queues`, or from all."""
        if queues is None:
            self._all_paused = True
        else:
            self._paused.update(queues)

    def resume(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull again from `queues`, or from all."""
        if queues is None:
            self._all_paused = False
            self._paused.clear()
        else:
            self._paused.difference_update(queues)

    def paused(self, queue: MessageQueue) -> bool:
        return self._all_paused or queue in self._paused

    # --- the interface of pull loops

    def subscription(self, topic: str) -> Subscription | None:
        return self._context.subscriptions.subscription(topic)

    def link(self, broker_name: str, broker_id: int) -> BrokerLink:
        return self._context.cluster.link(broker_name, broker_id)

    async def wait_registered(self, queue: MessageQueue) -> None:
        await self._resubscriber.wait_registered(queue)

    async def refresh_route(self, queue: MessageQueue) -> None:
        await self._context.cluster.routes.get(queue.topic, refresh=True)
        self._context.rebalance_wanted.set()

    def keep_running(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self._context.tasks.keep_running(work, what)

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        self._delivery.deliver(window, messages)

    def offset_moved(self, pull_loop: PullLoop, pull_offset: int, response: PullResponse) -> None:
        self._context.member.offset_moved(pull_loop.queue, pull_offset, response)

    def late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        self._context.member.late_reset(queue, response)

    def pull_failed(self, queue: MessageQueue, error: Exception) -> None:
        kind = EventKind.ANSWER_REFUSED if isinstance(error, ProtocolError) else EventKind.BROKER_UNREACHABLE
        self._context.emit_throttled(kind, f"pull failed, tried again: {error}", queue)
