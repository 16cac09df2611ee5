"""How the messages that are on their way at one moment end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple

from pyrocket_consumer.producer.send_future import ResultSink
from pyrocket_consumer.producer.send_request import SendRequest
from pyrocket_consumer.transport.thread_future import ThreadFuture


class FlushResult(NamedTuple):
    """How many messages were sent, were not, and have no result yet; and why the first that was not sent was not."""

    sent: int
    failed: int
    pending: int
    reason: BaseException | None


class FlushCounter:
    """Counts how `requests` end. Made and told on the I/O thread; any other may wait until all have ended.

    It stands between each of them and whoever waits for its result, so that only those pay for it that are counted.
    """

    def __init__(self, requests: Collection[SendRequest]) -> None:
        self.messages = sum(len(request.message_ids) for request in requests)
        self.longest_timeout_s = max((request.timeout_s for request in requests), default=0.0)
        self._lock = threading.Lock()
        self._waiters: list[ThreadFuture[None]] = []
        self._result = FlushResult(0, 0, self.messages, None)
        for request in requests:
            request.sink = _CountingSink(request.sink, self, len(request.message_ids))

    def wait(self, timeout_s: float) -> FlushResult:
        """Wait until each message has its result, for up to `timeout_s`; return how they have ended."""
        waiter = ThreadFuture[None]()
        with self._lock:
            if not self._result.pending:
                return self._result
            self._waiters.append(waiter)
        waiter.wait(timeout_s)
        with self._lock:
            return self._result

    def add(self, messages: int, error: BaseException | None) -> None:
        """Count messages that have their result now."""
        with self._lock:
            sent, failed, pending, reason = self._result
            if error is None:
                self._result = FlushResult(sent + messages, failed, pending - messages, reason)
            else:
                self._result = FlushResult(sent, failed + messages, pending - messages, reason or error)
            if not self._result.pending:
                for waiter in self._waiters:
                    waiter.set_result(None)


class _CountingSink:
    """Passes the outcome of a send on, and then counts it."""

    __slots__ = ("_counter", "_messages", "_sink")

    def __init__(self, sink: ResultSink, counter: FlushCounter, messages: int) -> None:
        self._sink = sink
        self._counter = counter
        self._messages = messages

    def set_result(self, result: Any) -> None:
        try:
            self._sink.set_result(result)
        finally:
            self._counter.add(self._messages, None)

    def set_exception(self, error: BaseException) -> None:
        try:
            self._sink.set_exception(error)
        finally:
            self._counter.add(self._messages, error)
