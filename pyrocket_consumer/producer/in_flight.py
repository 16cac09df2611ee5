"""Pass requests from user threads to the I/O thread, and limit how many are in flight."""

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
    """Limits the unfinished requests to `max_messages` and `max_bytes`.

    User threads call `put`. The I/O thread takes all queued requests with `take_all`, and calls `release` for each
    that has its result. Code under the one lock takes no other lock. It is a plain `Lock`, because a signal in a user
    thread may leave the lock of a Condition taken. The I/O thread would then wait for it; see `ThreadFuture`.
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
        """Queue `request`, and wait up to `timeout_s` until it fits. Return False if it did not fit in time.

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
        """Queue `request`. If it does not fit, return a waiter for the next change."""
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
            if is_first:  # one wake-up takes all requests that are queued before the I/O thread runs
                self._wake()
        except BaseException:
            if is_first:  # a signal may have interrupted _wake, and later requests do not call it
                self._wake()
            raise
        return None

    def _fits(self, size: int) -> bool:
        # A single message of any size fits, or it could never be sent.
        return not self._messages or (self._messages < self._max_messages and self._bytes + size <= self._max_bytes)

    def _add_waiter(self) -> ThreadFuture[None]:
        waiter: ThreadFuture[None] = ThreadFuture()
        self._waiters.append(waiter)
        return waiter

    def _wait(self, waiter: ThreadFuture[None], until: float | None) -> bool:
        """Wait for `waiter`. Return False if nothing changed by `until`."""
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
        """Return the requests queued since the last call."""
        with self._lock:
            taken, self._queued = self._queued, []
        return taken

    def release(self, request: SendRequest) -> None:
        """Free the capacity that `request` took, because it has its result."""
        with self._lock:
            self._messages -= 1
            self._bytes -= len(request.body)
            if self._waiters:
                self._wake_waiters()

    @property
    def messages(self) -> int:
        """The number of messages in flight."""
        with self._lock:
            return self._messages

    def close(self) -> None:
        """Accept no more messages. Threads that wait in `put` get ClientClosed."""
        with self._lock:
            self._closed = True
            self._wake_waiters()

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every message has its result. Return False if some have none within `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._messages:
                    return True
                waiter = self._add_waiter()
            if not self._wait(waiter, until):
                return False
