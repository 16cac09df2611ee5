"""Selects the listener that gets a message."""

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
    """Hands messages to workers, concurrently or in order."""

    def dispatch(self, window: ProcessQueue, listener: Listener, messages: list[Message]) -> None:
        """Hand `messages` over."""


class Delivery:
    """Passes the messages of a window to the dispatcher of their listeners. Confined to the I/O thread."""

    def __init__(self, subscriptions: Subscriptions, service: MessageDispatcher) -> None:
        self._subscriptions = subscriptions
        self._service = service
        self.on_unwanted: Callable[[ProcessQueue, Message], None] = lambda window, message: None
        """Called for each retried message of a topic without a subscription."""

    def deliver(self, window: ProcessQueue, messages: list[Message]) -> None:
        """Dispatch `messages`. Do nothing if their topic has no subscription, because then the queue ends soon."""
        topic = window.queue.topic
        found = self._subscriptions.get(topic)
        if found is None:
            return
        if not topic.startswith(RETRY_PREFIX):
            self._service.dispatch(window, found.listener, messages)
            return
        for message in messages:  # a retry queue has messages of several topics
            if (listener := self._listener(message, found.listener)) is not None:
                self._service.dispatch(window, listener, [message])
            else:
                self.on_unwanted(window, message)

    def _listener(self, message: Message, of_retry_topic: Listener) -> Listener | None:
        try:
            found = self._subscriptions.get(message.topic)
        except ProtocolError:  # a damaged record; its listener gets the error when it reads the message
            return of_retry_topic
        return found.listener if found is not None else None
