"""How the messages that are on their way at one moment end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple

from pyrocket_consumer.producer.send_future import Waiting
from pyrocket_consumer.producer.send_request import Sending
from pyrocket_consumer.transport.thread_future import Outcome


class Ended(NamedTuple):
    """How many messages were sent, were not, and have no result yet; and why the first that was not sent was not."""

    sent: int
    failed: int
    unanswered: int
    reason: BaseException | None


class Tally:
    """Counts how `sendings` end. Made and told on the I/O thread; any other may wait until all have ended.

    It stands between each of them and whoever waits for its result, so that only those pay for it that are counted.
    """

    def __init__(self, sendings: Collection[Sending]) -> None:
        self.messages = sum(len(sending.message_ids) for sending in sendings)
        self.longest_timeout_s = max((sending.timeout_s for sending in sendings), default=0.0)
        self._lock = threading.Lock()
        self._waiting: list[Outcome[None]] = []
        self._ended = Ended(0, 0, self.messages, None)
        for sending in sendings:
            sending.waiting = _Counted(sending.waiting, self, len(sending.message_ids))

    def wait(self, timeout_s: float) -> Ended:
        """Wait until each message has its result, for up to `timeout_s`; return how they have ended."""
        all_ended = Outcome[None]()
        with self._lock:
            if not self._ended.unanswered:
                return self._ended
            self._waiting.append(all_ended)
        all_ended.wait(timeout_s)
        with self._lock:
            return self._ended

    def end(self, messages: int, error: BaseException | None) -> None:
        """Count messages that have their result now."""
        with self._lock:
            sent, failed, unanswered, reason = self._ended
            if error is None:
                self._ended = Ended(sent + messages, failed, unanswered - messages, reason)
            else:
                self._ended = Ended(sent, failed + messages, unanswered - messages, reason or error)
            if not self._ended.unanswered:
                for all_ended in self._waiting:
                    all_ended.set_result(None)


class _Counted:
    """Passes the outcome of a send on, and then counts it."""

    __slots__ = ("_messages", "_tally", "_waiting")

    def __init__(self, waiting: Waiting, tally: Tally, messages: int) -> None:
        self._waiting = waiting
        self._tally = tally
        self._messages = messages

    def set_result(self, result: Any) -> None:
        try:
            self._waiting.set_result(result)
        finally:
            self._tally.end(self._messages, None)

    def set_exception(self, error: BaseException) -> None:
        try:
            self._waiting.set_exception(error)
        finally:
            self._tally.end(self._messages, error)
