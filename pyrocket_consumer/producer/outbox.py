"""The way of messages from user threads to the I/O thread: bounded, and cheap for one message."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ConsumerClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrocket_consumer.producer.sending import Sending


class Outbox:
    """Messages handed over and not finished yet; at most `max_messages` and `max_bytes` of them.

    User threads `put`, the I/O thread takes all there is in one turn, and tells when each is `finished`. The one lock
    is a leaf: nothing is called while it is held, and waiting for room gives it up.
    """

    def __init__(self, max_messages: int, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._wake = wake
        self._changed = threading.Condition(threading.Lock())
        self._waiting_for_change = 0
        self._messages = self._bytes = 0
        self._put: list[Sending] = []
        self._closed = False

    def put(self, sending: Sending, timeout_s: float) -> bool:
        """Hand `sending` over, waiting up to `timeout_s` for room; False when there was none.

        Raises:
            ConsumerClosed: the producer is closed.
        """
        size = len(sending.body)
        with self._changed:
            if not self._has_room(size) and not self._wait(lambda: self._closed or self._has_room(size), timeout_s):
                return False
            if self._closed:
                raise ConsumerClosed("the producer is closed; make a new one")
            self._messages += 1
            self._bytes += size
            self._put.append(sending)
            first = len(self._put) == 1
        if first:  # whoever follows before the I/O thread comes is taken in the same turn
            self._wake()
        return True

    def _has_room(self, size: int) -> bool:
        # One message is let in whatever its size, or it could never be sent.
        return not self._messages or (self._messages < self._max_messages and self._bytes + size <= self._max_bytes)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        self._waiting_for_change += 1
        try:
            return self._changed.wait_for(condition, timeout_s)
        finally:
            self._waiting_for_change -= 1

    def take_all(self) -> list[Sending]:
        """Return what was put since the last time."""
        with self._changed:
            taken, self._put = self._put, []
        return taken

    def finished(self, sending: Sending) -> None:
        """Make room: `sending` has its result."""
        with self._changed:
            self._messages -= 1
            self._bytes -= len(sending.body)
            if self._waiting_for_change:
                self._changed.notify_all()

    @property
    def messages(self) -> int:
        """How many messages are on their way."""
        with self._changed:
            return self._messages

    def close(self) -> None:
        """Take no more messages; whoever waits for room is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every message has its result; False if some have not within `timeout_s`."""
        with self._changed:
            return self._wait(lambda: not self._messages, timeout_s)
