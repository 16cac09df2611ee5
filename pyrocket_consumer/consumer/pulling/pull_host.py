"""What the pull loops need of their member: subscriptions, pauses, connections, and who takes what they bring."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pyrocket_consumer.consumer.context.member_context import Group
from pyrocket_consumer.consumer.dispatch.delivery import Delivery
from pyrocket_consumer.consumer.pulling.pull_loop import Puller
from pyrocket_consumer.consumer.pulling.resubscribe import Refusals
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ConnectError, ProtocolError
from pyrocket_consumer.model import EventKind, MessageQueue, PullAnswer, Subscription
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.connection import Connection


class Pulling:
    """The `PullHost` of every puller of a member. Confined to the I/O thread."""

    def __init__(self, group: Group, delivery: Delivery) -> None:
        self.loop = group.loop
        self.group = group.name
        self.on_moved: Callable[[Puller, int, PullAnswer], None] = lambda puller, asked, answer: None
        """Called when the broker moves the queue of a puller, which waits."""
        self.on_late_reset: Callable[[MessageQueue, PullAnswer], None] = lambda queue, answer: None
        """Called when a pull that was given up has brought a reset."""
        self._group = group
        self._delivery = delivery
        self._refusals = Refusals(group)
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
        """Let `queues`, or all, be pulled again."""
        if queues is None:
            self._all_paused = False
            self._paused.clear()
        else:
            self._paused.difference_update(queues)

    def paused(self, queue: MessageQueue) -> bool:
        return self._all_paused or queue in self._paused

    # --- what pullers ask and tell

    def subscription(self, topic: str) -> Subscription | None:
        return self._group.subscriptions.subscription(topic)

    def connection_to(self, broker_name: str, broker_id: int) -> Connection | None:
        cluster = self._group.cluster
        address = cluster.address(broker_name, broker_id)
        return cluster.peek_member(address) if address is not None else None

    async def connect_to(self, broker_name: str, broker_id: int) -> None:
        cluster = self._group.cluster
        address = cluster.address(broker_name, broker_id)
        if address is None:
            raise ConnectError(broker_name, "no route names an address of this broker now")
        await cluster.member_connection(address)

    async def known_again(self, queue: MessageQueue) -> None:
        await self._refusals.known_again(queue)

    async def refresh_route(self, queue: MessageQueue) -> None:
        await self._group.cluster.route(queue.topic, refresh=True)
        self._group.rebalance_wanted.set()

    def keep_running(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self._group.tasks.keep_running(work, what)

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        self._delivery.deliver(window, messages)

    def offset_moved(self, puller: Puller, asked: int, answer: PullAnswer) -> None:
        self.on_moved(puller, asked, answer)

    def late_reset(self, queue: MessageQueue, answer: PullAnswer) -> None:
        self.on_late_reset(queue, answer)

    def pull_failed(self, queue: MessageQueue, error: Exception) -> None:
        kind = EventKind.ANSWER_REFUSED if isinstance(error, ProtocolError) else EventKind.BROKER_UNREACHABLE
        self._group.trouble(kind, f"pull failed, tried again: {error}", queue)
