"""The way of messages from user threads to the I/O thread: bounded, and cheap for one message."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ConsumerClosed
from pyrocket_consumer.transport.thread_future import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrocket_consumer.producer.send_request import Sending


class Outbox:
    """Messages handed over and not finished yet; at most `max_messages` and `max_bytes` of them.

    User threads `put`, the I/O thread takes all there is in one turn, and tells when each is `finished`. The one lock
    is a leaf: nothing is called while it is held. It is a plain one, for that of a Condition may stay taken when a user
    thread is interrupted, and the I/O thread would wait for it; see `Outcome`.
    """

    def __init__(self, max_messages: int, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting_for_change: list[Outcome[None]] = []
        self._messages = self._bytes = 0
        self._put: list[Sending] = []
        self._closed = False

    def put(self, sending: Sending, timeout_s: float) -> bool:
        """Hand `sending` over, waiting up to `timeout_s` for room; False when there was none.

        Raises:
            ConsumerClosed: the producer is closed.
        """
        until = None
        while (change := self._put_or_watch(sending)) is not None:
            until = time.monotonic() + timeout_s if until is None else until
            if not self._wait(change, until):
                return False
        return True

    def _put_or_watch(self, sending: Sending) -> Outcome[None] | None:
        """Hand `sending` over; if there is no room, return what tells the next change."""
        size, is_first = len(sending.body), False
        try:
            with self._lock:
                if self._closed:
                    raise ConsumerClosed("the producer is closed; make a new one")
                if not self._has_room(size):
                    return self._next_change()
                is_first = not self._put
                self._messages += 1
                self._bytes += size
                self._put.append(sending)
            if is_first:  # whoever follows before the I/O thread comes is taken in the same turn
                self._wake()
        except BaseException:
            if is_first:  # an interrupt, maybe before it was woken, and whoever follows does not wake it
                self._wake()
            raise
        return None

    def _has_room(self, size: int) -> bool:
        # One message is let in whatever its size, or it could never be sent.
        return not self._messages or (self._messages < self._max_messages and self._bytes + size <= self._max_bytes)

    def _next_change(self) -> Outcome[None]:
        change: Outcome[None] = Outcome()
        self._waiting_for_change.append(change)
        return change

    def _wait(self, change: Outcome[None], until: float | None) -> bool:
        """Wait for `change`; False if it does not come by `until`."""
        if change.wait(None if until is None else until - time.monotonic()):
            return True
        with self._lock:
            if change in self._waiting_for_change:
                self._waiting_for_change.remove(change)
        return False

    def _tell_change(self) -> None:
        waiting, self._waiting_for_change = self._waiting_for_change, []
        for change in waiting:
            change.set_result(None)

    def take_all(self) -> list[Sending]:
        """Return what was put since the last time."""
        with self._lock:
            taken, self._put = self._put, []
        return taken

    def finished(self, sending: Sending) -> None:
        """Make room: `sending` has its result."""
        with self._lock:
            self._messages -= 1
            self._bytes -= len(sending.body)
            if self._waiting_for_change:
                self._tell_change()

    @property
    def messages(self) -> int:
        """How many messages are on their way."""
        with self._lock:
            return self._messages

    def close(self) -> None:
        """Take no more messages; whoever waits for room is refused."""
        with self._lock:
            self._closed = True
            self._tell_change()

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every message has its result; False if some have not within `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._messages:
                    return True
                change = self._next_change()
            if not self._wait(change, until):
                return False
