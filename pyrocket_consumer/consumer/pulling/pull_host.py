"""What the pull loops need of their member: subscriptions, pauses, connections, and who takes what they bring."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.dispatch.delivery import Delivery
from pyrocket_consumer.consumer.pulling.pull_loop import Puller
from pyrocket_consumer.consumer.pulling.resubscribe import Refusals
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ConnectError, ProtocolError
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.connection import Connection


class Pulling:
    """The `PullHost` of every puller of a member. Confined to the I/O thread."""

    def __init__(self, group: MemberContext, delivery: Delivery) -> None:
        self.loop = group.loop
        self.group = group.name
        self.on_moved: Callable[[Puller, int, PullResponse], None] = lambda puller, asked, answer: None
        """Called when the broker moves the queue of a puller, which waits."""
        self.on_late_reset: Callable[[MessageQueue, PullResponse], None] = lambda queue, answer: None
        """Called when a pull that was given up has brought a reset."""
        self._context = group
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
        return self._context.subscriptions.subscription(topic)

    def connection_to(self, broker_name: str, broker_id: int) -> Connection | None:
        cluster = self._context.cluster
        address = cluster.address(broker_name, broker_id)
        return cluster.find_registered_connection(address) if address is not None else None

    async def connect_to(self, broker_name: str, broker_id: int) -> None:
        cluster = self._context.cluster
        address = cluster.address(broker_name, broker_id)
        if address is None:
            raise ConnectError(broker_name, "no route names an address of this broker now")
        await cluster.open_registered_connection(address)

    async def known_again(self, queue: MessageQueue) -> None:
        await self._refusals.known_again(queue)

    async def refresh_route(self, queue: MessageQueue) -> None:
        await self._context.cluster.route(queue.topic, refresh=True)
        self._context.rebalance_wanted.set()

    def keep_running(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self._context.tasks.keep_running(work, what)

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        self._delivery.deliver(window, messages)

    def offset_moved(self, puller: Puller, asked: int, answer: PullResponse) -> None:
        self.on_moved(puller, asked, answer)

    def late_reset(self, queue: MessageQueue, answer: PullResponse) -> None:
        self.on_late_reset(queue, answer)

    def pull_failed(self, queue: MessageQueue, error: Exception) -> None:
        kind = EventKind.ANSWER_REFUSED if isinstance(error, ProtocolError) else EventKind.BROKER_UNREACHABLE
        self._context.trouble(kind, f"pull failed, tried again: {error}", queue)
