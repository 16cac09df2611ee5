"""Room for the packed bodies that listener calls unpack: a few bytes can hold 64 MiB, and many calls run at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES
from pyrocket_consumer.protocol.message import BodyLimit, Message, drop_body, has_compressed_body, unpacked_size_limit

WANTED_CHECK_S = 0.1
"""How often who waits for room looks whether it is wanted otherwise."""


FAIRNESS_S = 0.5
"""So long a call that needs much room is passed by those that need little."""


class DecompressionBudget(BodyLimit):
    """What the listener calls that run may unpack together: `limit` bytes, and always what one of them needs.

    A call enters before it begins and leaves when it has returned; what its messages had unpacked is freed then. Sizes
    are guessed from the stored bytes as long as that is enough, and measured else, by one call at a time, which then
    waits for room. Any thread.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(max_bytes)
        self._limit = limit
        self.changed = threading.Condition(threading.Lock())
        self._used = 0
        self._waiting: deque[Reservation] = deque()
        self._measuring = threading.Lock()  # it takes memory and time itself: one after the other
        self._is_measuring = False
        self._deferred: dict[object, deque[Callable[[], None]]] = {}
        self.unpack_lock = asyncio.Lock()
        """Held while a large inner batch is unpacked, until its messages count."""

    def reserve(self, messages: Sequence[Message]) -> Reservation | None:
        """Return what a listener call with `messages` needs to enter; None when it has none whose body is packed."""
        packed = [message for message in messages if has_compressed_body(message)]
        if not packed:
            return None
        reservation = Reservation(self, packed)
        reservation.size = sum(unpacked_size_limit(message, measured=False) for message in packed)
        reservation.count = len(messages)
        if len(packed) == 1 or reservation.size <= self._limit:
            self._try_acquire(reservation)
            self.retry_deferred()
        return reservation

    # --- one call at a time finds out what it needs, and waits for room

    def acquire_or_defer(self, queue: object, again: Callable[[], None]) -> bool:
        """Return True if it is the caller's turn to measure and wait, until `release_measuring`; else `again` is called later.

        So calls that need much room occupy one worker while they wait, and the others are left to those that do not.
        Queues have their turns one after the other, whoever has more that waits.
        """
        with self.changed:
            if self._is_measuring:
                self._deferred.setdefault(queue, deque()).append(again)
                return False
            self._is_measuring = True
            return True

    def release_measuring(self) -> None:
        """Have the next one try again."""
        with self.changed:
            self._is_measuring = False
        self.retry_deferred()

    def retry_deferred(self) -> None:
        """Have one that waits for its turn try again, if it is nobody's: perhaps there is room without.

        Whoever tries again offers it to the next one in any case: it may not be wanted any more.
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
                self._deferred[queue] = deferred  # the last one now
        again()

    def measure(self, reservation: Reservation, messages: Sequence[Message]) -> None:
        """Find out what `messages` need; of those that are too many for all the room there is, only the first enter."""
        with self._measuring:  # orderly queues have no turns
            self._measure_locked(reservation, messages)

    def _measure_locked(self, reservation: Reservation, messages: Sequence[Message]) -> None:
        size = 0
        for index, message in enumerate(messages):
            more = unpacked_size_limit(message, measured=True) if has_compressed_body(message) else 0
            if index and size + more > self._limit:
                reservation.count = index
                break
            size += more
        reservation.size = size
        reservation.messages = [message for message in messages[: reservation.count] if has_compressed_body(message)]

    def _try_acquire(self, reservation: Reservation) -> bool:
        with self.changed:
            return self._try_grant(reservation)

    def _try_grant(self, reservation: Reservation) -> bool:
        first = self._waiting[0] if self._waiting else reservation
        if first is not reservation and (
            reservation in self._waiting or time.monotonic() - first.waiting_since > FAIRNESS_S
        ):
            return False  # those who need little may pass, but not for ever
        if self._used and self._used + reservation.size > self._limit:
            return False
        self.grant(reservation)
        return True

    def grant(self, reservation: Reservation) -> None:
        self._used += reservation.size
        reservation.is_granted = True
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        self.changed.notify_all()  # the next in line may fit in as well

    def wait(self, reservation: Reservation, seconds: float) -> bool:
        with self.changed:
            self._enqueue(reservation)
            return self.changed.wait_for(lambda: self._try_grant(reservation), seconds)

    def queue_and_try(self, reservation: Reservation) -> bool:
        with self.changed:
            self._enqueue(reservation)
            return self._try_grant(reservation)

    def _enqueue(self, reservation: Reservation) -> None:
        if reservation not in self._waiting:
            reservation.waiting_since = time.monotonic()
            self._waiting.append(reservation)

    def release(self, reservation: Reservation) -> None:
        with self.changed:
            if reservation.is_granted:
                reservation.is_granted = False
                self._used -= reservation.size
            elif reservation in self._waiting:
                self._waiting.remove(reservation)
            self.changed.notify_all()
        self.retry_deferred()


class Reservation:
    """One listener call's part of the room."""

    __slots__ = ("messages", "count", "size", "is_granted", "waiting_since", "_budget")

    def __init__(self, budget: DecompressionBudget, messages: list[Message]) -> None:
        self.messages = messages  # those that are packed
        self.count = 0  # so many of all messages of the call may be given to it at once
        self.size = 0
        self.is_granted = False
        self.waiting_since = 0.0
        self._budget = budget

    def wait(self, wanted: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until there is room, as long as it is `wanted`; returns whether the call may begin.

        It may after `timeout_s` in any case: a call that never returns must not keep others from theirs for ever.
        """
        until = time.monotonic() + timeout_s
        while not self.is_granted and wanted():
            if self._budget.wait(self, min(WANTED_CHECK_S, max(until - time.monotonic(), 0))):
                return True
            if time.monotonic() >= until:
                self._grant_anyway()
        return self.is_granted

    def try_acquire(self, is_late: bool = False) -> bool:
        """Tell whether there is room now; `is_late`: there shall be."""
        if not self.is_granted and not self._budget.queue_and_try(self) and is_late:
            self._grant_anyway()
        return self.is_granted

    def _grant_anyway(self) -> None:
        with self._budget.changed:
            if not self.is_granted:
                self._budget.grant(self)

    def release(self) -> None:
        """Free what the call's messages have unpacked; or wait no longer."""
        for message in self.messages:
            drop_body(message)
        self._budget.release(self)
