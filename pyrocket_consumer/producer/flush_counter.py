"""Count the results of the messages that are in flight at one moment."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple

from pyrocket_consumer.producer.send_future import ResultSink
from pyrocket_consumer.producer.send_request import SendRequest
from pyrocket_consumer.transport.thread_future import ThreadFuture


class FlushResult(NamedTuple):
    """The numbers of messages sent, failed, and without result yet; `reason` is the error of the first failure."""

    sent: int
    failed: int
    pending: int
    reason: BaseException | None


class FlushCounter:
    """Counts the results of `requests`. The I/O thread makes and updates it; other threads wait until all have ended.

    It wraps the result sink of each request, so that requests that are not counted cost nothing.
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
        """Wait up to `timeout_s` until each message has its result, and return the counts."""
        waiter = ThreadFuture[None]()
        with self._lock:
            if not self._result.pending:
                return self._result
            self._waiters.append(waiter)
        waiter.wait(timeout_s)
        with self._lock:
            return self._result

    def add(self, messages: int, error: BaseException | None) -> None:
        """Count messages whose result has arrived."""
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
    """Passes the result of a send to its sink, then counts it."""

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
