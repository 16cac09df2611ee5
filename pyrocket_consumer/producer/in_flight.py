"""The way of messages from user threads to the I/O thread: bounded, and cheap for one message."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ClientClosed
from pyrocket_consumer.transport.thread_future import ThreadFuture

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrocket_consumer.producer.send_request import SendRequest


class InFlightLimiter:
    """Messages handed over and not finished yet; at most `max_messages` and `max_bytes` of them.

    User threads `put`, the I/O thread takes all there is in one turn, and tells when each is `finished`. The one lock
    is a leaf: nothing is called while it is held. It is a plain one, for that of a Condition may stay taken when a user
    thread is interrupted, and the I/O thread would wait for it; see `ThreadFuture`.
    """

    def __init__(self, max_messages: int, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._waiters: list[ThreadFuture[None]] = []
        self._messages = self._bytes = 0
        self._queued: list[SendRequest] = []
        self._closed = False

    def put(self, request: SendRequest, timeout_s: float) -> bool:
        """Hand `request` over, waiting up to `timeout_s` for room; False when there was none.

        Raises:
            ClientClosed: the producer is closed.
        """
        until = None
        while (waiter := self._try_put(request)) is not None:
            until = time.monotonic() + timeout_s if until is None else until
            if not self._wait(waiter, until):
                return False
        return True

    def _try_put(self, request: SendRequest) -> ThreadFuture[None] | None:
        """Hand `request` over; if there is no room, return what tells the next change."""
        size, is_first = len(request.body), False
        try:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the producer is closed; make a new one")
                if not self._fits(size):
                    return self._add_waiter()
                is_first = not self._queued
                self._messages += 1
                self._bytes += size
                self._queued.append(request)
            if is_first:  # whoever follows before the I/O thread comes is taken in the same turn
                self._wake()
        except BaseException:
            if is_first:  # an interrupt, maybe before it was woken, and whoever follows does not wake it
                self._wake()
            raise
        return None

    def _fits(self, size: int) -> bool:
        # One message is let in whatever its size, or it could never be sent.
        return not self._messages or (self._messages < self._max_messages and self._bytes + size <= self._max_bytes)

    def _add_waiter(self) -> ThreadFuture[None]:
        waiter: ThreadFuture[None] = ThreadFuture()
        self._waiters.append(waiter)
        return waiter

    def _wait(self, waiter: ThreadFuture[None], until: float | None) -> bool:
        """Wait for `waiter`; False if it does not come by `until`."""
        if waiter.wait(None if until is None else until - time.monotonic()):
            return True
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return False

    def _wake_waiters(self) -> None:
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            waiter.set_result(None)

    def take_all(self) -> list[SendRequest]:
        """Return what was put since the last time."""
        with self._lock:
            taken, self._queued = self._queued, []
        return taken

    def release(self, request: SendRequest) -> None:
        """Make room: `request` has its result."""
        with self._lock:
            self._messages -= 1
            self._bytes -= len(request.body)
            if self._waiters:
                self._wake_waiters()

    @property
    def messages(self) -> int:
        """How many messages are on their way."""
        with self._lock:
            return self._messages

    def close(self) -> None:
        """Take no more messages; whoever waits for room is refused."""
        with self._lock:
            self._closed = True
            self._wake_waiters()

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every message has its result; False if some have not within `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._messages:
                    return True
                waiter = self._add_waiter()
            if not self._wait(waiter, until):
                return False
