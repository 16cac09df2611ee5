"""Room for the packed bodies that listener calls unpack: a few bytes can hold 64 MiB, and many calls run at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES
from pyrocket_consumer.protocol.message import Bodies, Message, forget_body, holds_packed, least_room

LOOK_EVERY_S = 0.1
"""How often who waits for room looks whether it is wanted otherwise."""


PATIENCE_S = 0.5
"""So long a call that needs much room is passed by those that need little."""


class DecompressionBudget(Bodies):
    """What the listener calls that run may unpack together: `limit` bytes, and always what one of them needs.

    A call enters before it begins and leaves when it has returned; what its messages had unpacked is freed then. Sizes
    are guessed from the stored bytes as long as that is enough, and measured else, by one call at a time, which then
    waits for room. Any thread.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(max_bytes)
        self._limit = limit
        self._changed = threading.Condition(threading.Lock())
        self._used = 0
        self._waiting: deque[Entry] = deque()
        self._measuring = threading.Lock()  # it takes memory and time itself: one after the other
        self._is_taken = False
        self._parked: dict[object, deque[Callable[[], None]]] = {}
        self.unpacking = asyncio.Lock()
        """Held while a large inner batch is unpacked, until its messages count."""

    def entry(self, messages: Sequence[Message]) -> Entry | None:
        """Return what a listener call with `messages` needs to enter; None when it has none whose body is packed."""
        packed = [message for message in messages if holds_packed(message)]
        if not packed:
            return None
        entry = Entry(self, packed)
        entry.size = sum(least_room(message, measured=False) for message in packed)
        entry.count = len(messages)
        if len(packed) == 1 or entry.size <= self._limit:
            self._enter(entry)
            self.offer_turn()
        return entry

    # --- one call at a time finds out what it needs, and waits for room

    def turn_or(self, queue: object, again: Callable[[], None]) -> bool:
        """Return True if it is the caller's turn to measure and wait, until `pass_turn`; else `again` is called later.

        So calls that need much room occupy one worker while they wait, and the others are left to those that do not.
        Queues have their turns one after the other, whoever has more that waits.
        """
        with self._changed:
            if self._is_taken:
                self._parked.setdefault(queue, deque()).append(again)
                return False
            self._is_taken = True
            return True

    def pass_turn(self) -> None:
        """Have the next one try again."""
        with self._changed:
            self._is_taken = False
        self.offer_turn()

    def offer_turn(self) -> None:
        """Have one that waits for its turn try again, if it is nobody's: perhaps there is room without.

        Whoever tries again offers it to the next one in any case: it may not be wanted any more.
        """
        if not self._parked:
            return
        with self._changed:
            if self._is_taken or not self._parked:
                return
            queue, parked = next(iter(self._parked.items()))
            again = parked.popleft()
            del self._parked[queue]
            if parked:
                self._parked[queue] = parked  # the last one now
        again()

    def measure(self, entry: Entry, messages: Sequence[Message]) -> None:
        """Find out what `messages` need; of those that are too many for all the room there is, only the first enter."""
        with self._measuring:  # orderly queues have no turns
            self._measure_each(entry, messages)

    def _measure_each(self, entry: Entry, messages: Sequence[Message]) -> None:
        size = 0
        for place, message in enumerate(messages):
            more = least_room(message, measured=True) if holds_packed(message) else 0
            if place and size + more > self._limit:
                entry.count = place
                break
            size += more
        entry.size = size
        entry.messages = [message for message in messages[: entry.count] if holds_packed(message)]

    def _enter(self, entry: Entry) -> bool:
        with self._changed:
            return self._try(entry)

    def _try(self, entry: Entry) -> bool:
        first = self._waiting[0] if self._waiting else entry
        if first is not entry and (entry in self._waiting or time.monotonic() - first.waits_since > PATIENCE_S):
            return False  # those who need little may pass, but not for ever
        if self._used and self._used + entry.size > self._limit:
            return False
        self._admit(entry)
        return True

    def _admit(self, entry: Entry) -> None:
        self._used += entry.size
        entry.is_in = True
        if entry in self._waiting:
            self._waiting.remove(entry)
        self._changed.notify_all()  # the next in line may fit in as well

    def _wait(self, entry: Entry, seconds: float) -> bool:
        with self._changed:
            self._line_up(entry)
            return self._changed.wait_for(lambda: self._try(entry), seconds)

    def _look(self, entry: Entry) -> bool:
        with self._changed:
            self._line_up(entry)
            return self._try(entry)

    def _line_up(self, entry: Entry) -> None:
        if entry not in self._waiting:
            entry.waits_since = time.monotonic()
            self._waiting.append(entry)

    def _leave(self, entry: Entry) -> None:
        with self._changed:
            if entry.is_in:
                entry.is_in = False
                self._used -= entry.size
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._changed.notify_all()
        self.offer_turn()


class Entry:
    """One listener call's part of the room."""

    __slots__ = ("messages", "count", "size", "is_in", "waits_since", "_room")

    def __init__(self, room: DecompressionBudget, messages: list[Message]) -> None:
        self.messages = messages  # those that are packed
        self.count = 0  # so many of all messages of the call may be given to it at once
        self.size = 0
        self.is_in = False
        self.waits_since = 0.0
        self._room = room

    def wait(self, wanted: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until there is room, as long as it is `wanted`; returns whether the call may begin.

        It may after `timeout_s` in any case: a call that never returns must not keep others from theirs for ever.
        """
        until = time.monotonic() + timeout_s
        while not self.is_in and wanted():
            if self._room._wait(self, min(LOOK_EVERY_S, max(until - time.monotonic(), 0))):
                return True
            if time.monotonic() >= until:
                self._force()
        return self.is_in

    def look(self, is_late: bool = False) -> bool:
        """Tell whether there is room now; `is_late`: there shall be."""
        if not self.is_in and not self._room._look(self) and is_late:
            self._force()
        return self.is_in

    def _force(self) -> None:
        with self._room._changed:
            if not self.is_in:
                self._room._admit(self)

    def leave(self) -> None:
        """Free what the call's messages have unpacked; or wait no longer."""
        for message in self.messages:
            forget_body(message)
        self._room._leave(self)
