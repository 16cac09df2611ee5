"""The memory for bodies that listener calls decompress. A few bytes can become 64 MiB, in many calls at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES
from pyrocket_consumer.protocol.message import (
    BodyLimit,
    Message,
    decompressed_size_limit,
    drop_body,
    has_compressed_body,
)

FAIRNESS_S = 0.5
"""How long small reservations may overtake a large one that waits."""


@dataclass(slots=True, eq=False)
class Reservation:
    """The part of the budget that one listener call uses."""

    messages: list[Message]
    """Those with a compressed body."""
    count: int
    """How many of all its messages the call may get at once."""
    size: int
    is_granted: bool = False
    waiting_since: float = 0.0


class DecompressionBudget(BodyLimit):
    """The memory for the bodies that running listener calls decompress: `limit` bytes, or the need of one call.

    A call reserves memory before it begins. When it has returned, it drops its decompressed bodies and releases the
    reservation. The stored bytes give a first estimate. If the estimates exceed the limit, the calls measure their
    messages one at a time, and wait for memory. Any thread may use it.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(max_bytes)
        self._limit = limit
        self.changed = threading.Condition(threading.Lock())
        self._used = 0
        self._waiting: deque[Reservation] = deque()
        self._measuring = threading.Lock()  # measuring takes memory and time itself, so one call at a time measures
        self._is_measuring = False
        self._deferred: dict[object, deque[Callable[[], None]]] = {}
        self.unpack_lock = asyncio.Lock()
        """Held while a large inner batch is unpacked, until the window counts its messages."""

    def reserve(self, messages: Sequence[Message]) -> Reservation | None:
        """Return the reservation of a listener call with `messages`, or None if no body is compressed."""
        compressed = [message for message in messages if has_compressed_body(message)]
        if not compressed:
            return None
        size = sum(decompressed_size_limit(message, measured=False) for message in compressed)
        reservation = Reservation(compressed, len(messages), size)
        if len(compressed) == 1 or reservation.size <= self._limit:
            with self.changed:
                self._try_grant(reservation)
            self.retry_deferred()
        return reservation

    # --- one call at a time measures its messages, and waits for memory

    def acquire_or_defer(self, queue: object, again: Callable[[], None]) -> bool:
        """Return True if the caller may measure and wait, until `release_measuring`; else call `again` later.

        So only one worker waits for much memory, and the other workers are free for calls that need little. Queues
        measure in rotation, however many calls each has deferred.
        """
        with self.changed:
            if self._is_measuring:
                self._deferred.setdefault(queue, deque()).append(again)
                return False
            self._is_measuring = True
            return True

    def release_measuring(self) -> None:
        """Let the next deferred call measure."""
        with self.changed:
            self._is_measuring = False
        self.retry_deferred()

    def retry_deferred(self) -> None:
        """Let one deferred call try again if no call measures now, because there may be enough memory.

        Each call that tries again lets the next one try, even if its own messages are no longer wanted.
        """
        if not self._deferred:
            return
        with self.changed:
            if self._is_measuring or not self._deferred:
                return
            queue, deferred = next(iter(self._deferred.items()))
            again = deferred.popleft()
            del self._deferred[queue]
            if deferred:
                self._deferred[queue] = deferred  # now the last queue in the rotation
        again()

    def measure(self, reservation: Reservation, messages: Sequence[Message]) -> None:
        """Measure the decompressed size of `messages`. If it is above the limit, reserve only for the first of them."""
        size = 0
        with self._measuring:  # orderly queues do not call acquire_or_defer
            for index, message in enumerate(messages):
                more = decompressed_size_limit(message, measured=True) if has_compressed_body(message) else 0
                if index and size + more > self._limit:
                    reservation.count = index
                    break
                size += more
        reservation.size = size
        reservation.messages = [message for message in messages[: reservation.count] if has_compressed_body(message)]

    def try_acquire(self, reservation: Reservation, *, is_late: bool) -> bool:
        """Return whether a measured call may begin now. A late one may begin without free memory.

        So a call that never returns cannot block all others.
        """
        with self.changed:
            if reservation not in self._waiting:
                reservation.waiting_since = time.monotonic()
                self._waiting.append(reservation)
            return self._try_grant(reservation, is_late)

    def _try_grant(self, reservation: Reservation, is_late: bool = False) -> bool:
        first = self._waiting[0] if self._waiting else reservation
        must_wait = first is not reservation and (
            reservation in self._waiting or time.monotonic() - first.waiting_since > FAIRNESS_S
        )  # small reservations may overtake, but not without limit
        if not is_late and (must_wait or (self._used and self._used + reservation.size > self._limit)):
            return False
        self._used += reservation.size
        reservation.is_granted = True
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        self.changed.notify_all()  # the next waiting reservation may fit, too
        return True

    def wait_for_change(self, seconds: float) -> None:
        """Block the thread until memory may be free, at most for some seconds."""
        with self.changed:
            self.changed.wait(seconds)

    def release(self, reservation: Reservation) -> None:
        """Drop the decompressed bodies of a call, or stop waiting for memory."""
        for message in reservation.messages:
            drop_body(message)
        with self.changed:
            if reservation.is_granted:
                reservation.is_granted = False
                self._used -= reservation.size
            elif reservation in self._waiting:
                self._waiting.remove(reservation)
            self.changed.notify_all()
        self.retry_deferred()
