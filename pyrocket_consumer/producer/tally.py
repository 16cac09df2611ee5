"""How the messages that are on their way at one moment end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from pyrocket_consumer.producer.callbacks import Waiting
from pyrocket_consumer.producer.sending import Sending


class Tally:
    """Counts how `sendings` end. Made and told on the I/O thread; any other may wait until all have ended.

    It stands between each of them and whoever waits for its result, so that only those pay for it that are counted.
    """

    def __init__(self, sendings: Collection[Sending]) -> None:
        self.messages = sum(len(sending.message_ids) for sending in sendings)
        self.last_deadline = max((sending.deadline for sending in sendings), default=0.0)
        self.ended = self.failed = 0
        self.reason: BaseException | None = None
        self._all_ended = threading.Event()
        for sending in sendings:
            sending.waiting = _Counted(sending.waiting, self, len(sending.message_ids))
        if not sendings:
            self._all_ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until each message has its result; False if some have not within `timeout_s`."""
        return self._all_ended.wait(max(timeout_s, 0))

    def end(self, messages: int, error: BaseException | None) -> None:
        """Count messages that have their result now."""
        self.ended += messages
        if error is not None:
            self.failed += messages
            self.reason = self.reason or error
        if self.ended == self.messages:
            self._all_ended.set()


class _Counted:
    """Passes the outcome of a send on, and then counts it."""

    __slots__ = ("_messages", "_tally", "_waiting")

    def __init__(self, waiting: Waiting, tally: Tally, messages: int) -> None:
        self._waiting = waiting
        self._tally = tally
        self._messages = messages

    def set_result(self, result: Any) -> None:
        self._waiting.set_result(result)
        self._tally.end(self._messages, None)

    def set_exception(self, error: BaseException) -> None:
        self._waiting.set_exception(error)
        self._tally.end(self._messages, error)
