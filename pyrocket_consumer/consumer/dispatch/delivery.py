"""Which listener gets a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyrocket_consumer.consumer.context.subscriptions import Subscriptions
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import RETRY_PREFIX
from pyrocket_consumer.protocol.message import Message


class MessageDispatcher(Protocol):
    """What hands messages to workers: all at once, or in the order of each queue."""

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Hand `messages` to the workers."""


class Delivery:
    """Gives messages that are in a window to their listeners. Confined to the I/O thread."""

    def __init__(self, subscriptions: Subscriptions, service: MessageDispatcher) -> None:
        self._subscriptions = subscriptions
        self._service = service
        self.on_unwanted: Callable[[ProcessQueue, Message], None] = lambda window, message: None
        """Gets retried messages of topics that are not subscribed to."""

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        """Hand `messages` over; nothing when their topic is not subscribed to any more: the queue ends soon."""
        topic = window.queue.topic
        found = self._subscriptions.get(topic)
        if found is None:
            return
        if not topic.startswith(RETRY_PREFIX):
            self._service.dispatch(window, found.listener, messages)
            return
        for message in messages:  # retried messages of several topics share a queue
            if (listener := self._listener(message, found.listener)) is not None:
                self._service.dispatch(window, listener, [message])
            else:
                self.on_unwanted(window, message)

    def _listener(self, message: Message, of_retry_topic: Listener) -> Listener | None:
        try:
            found = self._subscriptions.get(message.topic)
        except ProtocolError:  # a damaged record; its listener will meet the error
            return of_retry_topic
        return found.listener if found is not None else None
