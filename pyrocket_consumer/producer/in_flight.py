"""The messages of a producer that have no result yet: how many there may be, and when the last one ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ClientClosed
from pyrocket_consumer.transport.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pyrocket_consumer.producer.send_request import SendRequest


class InFlightQueue:
    """Passes requests from user threads to the I/O thread, and limits the unfinished ones.

    User threads call `put`. The I/O thread takes the requests with `take_all`, and calls `release` for each that has
    its result. The lock is for user threads only. The I/O thread must not wait for it, because a signal may have
    interrupted its holder, whose handler waits for the I/O thread. So each side has counters of its own.
    """

    def __init__(self, max_messages: int, max_bytes: int, wake: Callable[[], None]) -> None:
        """`wake` has the I/O thread call `take_all`."""
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._wake = wake
        self._is_woken = False
        self._lock = threading.RLock()
        self._put_messages = self._put_bytes = 0
        self._released_messages = self._released_bytes = 0
        self._queued: deque[SendRequest] = deque()
        self._freed = Latch()  # replaced when it is set and a thread waits for it again
        self._is_closed = self._is_ended = False

    @property
    def messages(self) -> int:
        """The number of messages in flight."""
        return self._put_messages - self._released_messages

    def put(self, request: SendRequest, timeout_s: float) -> bool:
        """Queue `request`, and wait up to `timeout_s` until it fits. Return False if it did not fit in time.

        Raises:
            ClientClosed: the producer is closed.
        """
        if self.try_put(request):
            return True
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._freed.is_set():
                    self._freed = Latch()
                freed = self._freed
            if self.try_put(request):
                return True
            if not freed.wait(deadline - time.monotonic()):
                return False

    def try_put(self, request: SendRequest) -> bool:
        """Queue `request` if it fits. A single message of any size fits, or it could never be sent.

        Raises:
            ClientClosed: the producer is closed.
        """
        size = len(request.body)
        try:
            with self._lock:
                if self._is_closed:
                    raise ClientClosed("the producer is closed; make a new one")
                messages = self._put_messages - self._released_messages
                if messages and (
                    messages >= self._max_messages or self._put_bytes - self._released_bytes + size > self._max_bytes
                ):
                    return False
                self._put_messages += 1
                self._put_bytes += size
                self._queued.append(request)
            if not self._is_woken:  # one wake-up takes all requests that are queued before the I/O thread runs
                self._is_woken = True
                self._wake()
        except BaseException:  # after Ctrl-C the request may be queued, and no later one would wake the I/O thread
            self._is_woken = True
            self._wake()
            raise
        if self._is_ended:
            self.end()
        return True

    def take_all(self) -> list[SendRequest]:
        """Return the requests queued since the last call."""
        self._is_woken = False
        return [self._queued.popleft() for _ in range(len(self._queued))]

    def release(self, request: SendRequest) -> None:
        """Free the capacity that `request` took, because it has its result."""
        self._released_messages += 1
        self._released_bytes += len(request.body)
        self._freed.set()

    def close(self) -> None:
        """Accept no more messages. Threads that wait in `put` get ClientClosed."""
        with self._lock:
            self._is_closed = True
        self._freed.set()

    def end(self) -> None:
        """Fail the requests that arrived too late for the I/O thread to take them."""
        self._is_ended = True
        while self._queued:
            try:
                request = self._queued.popleft()
            except IndexError:
                return
            request.sink.set_exception(ClientClosed("the producer is closed; make a new one"))


class Flush(Latch):
    """Counts the results of the requests in flight at one moment, and is set after the last one.

    The I/O thread makes it and counts. Other threads wait, and read the numbers of messages.
    """

    def __init__(self, requests: Collection[SendRequest]) -> None:
        super().__init__()
        self._requests = set(requests)
        self.messages = self.pending = sum(len(request.message_ids) for request in requests)
        self.sent = self.failed = 0
        self.reason: BaseException | None = None  # of the first failure
        self.longest_timeout_s = max((request.timeout_s for request in requests), default=0.0)
        if not self._requests:
            self.set()

    def count(self, request: SendRequest, error: BaseException | None) -> None:
        """Count a result, if the request was in flight at that moment."""
        if request not in self._requests:
            return
        self._requests.remove(request)
        messages = len(request.message_ids)
        self.pending -= messages
        if error is None:
            self.sent += messages
        else:
            self.failed += messages
            self.reason = self.reason or error
        if not self._requests:
            self.set()
