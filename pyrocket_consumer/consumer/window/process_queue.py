"""The window of unfinished messages of one assigned queue; its lower edge is the commit offset."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.consumer.window.memory_budget import MemoryBudget, PullWaiter, wake_all
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.protocol.accelerator import mark_done
from pyrocket_consumer.protocol.message import Message

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """How many messages, and what span of offsets, one queue may hold before pulling pauses.

    A `MemoryBudget` limits the bytes.
    """

    messages: int = 1000
    span: int = 2000


INITIAL_LISTENER_TIME_S = 0.001
"""The assumed duration of a listener call before the first measurement."""


class Lease:
    """The right to begin listener calls of a queue: a lock at its broker, a claim in a database, or none is needed.

    The I/O thread changes it, and workers read it before each call of an ordered queue.
    """

    __slots__ = ("clock", "valid_until", "claim", "is_suspended")

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, valid_until: float = NEVER, claim: Claim | None = None
    ) -> None:
        self.clock = clock  # it may also count while the machine sleeps
        self.valid_until = valid_until
        self.claim = claim
        self.is_suspended = False  # while the log of the queue is checked

    def is_valid(self) -> bool:
        """Return whether the next listener call may begin."""
        return self.clock() < self.valid_until and not self.is_suspended


class ProcessQueue(PullWaiter):
    """The unfinished messages of one queue, from one start offset until the queue moves or ends.

    The I/O thread puts messages, and workers acknowledge them. A queue that moves or begins again gets a new window;
    `epoch` distinguishes them. `drop` ends the listener calls, and `fence` the acknowledgements.
    """

    def __init__(
        self,
        queue: MessageQueue,
        epoch: int,
        offset: int,
        limits: Limits,
        wake: Callable[[ProcessQueue], None] = lambda window: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_edge: Callable[[MessageQueue, int], None] | None = None,
        budget: MemoryBudget | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Begin at `offset`; messages below it are not delivered.

        When the lower edge moves, the window calls `on_edge(queue, commit_offset)` under its lock, so that a fence and
        an update cannot interleave.
        """
        self.queue = queue
        self.epoch = epoch
        self.limits = limits
        self.budget = budget or MemoryBudget()
        self.lease = lease or Lease(clock)
        self.claim = self.lease.claim
        self.dropped = False  # no more messages, and no more listener calls; acks still count
        self.fenced = False  # the final offset is known, and later acks are ignored
        self.lanes: Any = None  # of an ordered queue: its messages that wait for a listener
        self.listener_time_s = INITIAL_LISTENER_TIME_S
        self.last_consumed_at = 0.0
        self.clock = clock
        self._on_edge = on_edge
        self._wake = wake
        self._lock = threading.Lock()
        self._window: deque[Message] = deque()
        self._next_offset = offset
        self._count = 0
        self._bytes = 0
        self._waiting_for = 0  # the number of messages for which there is no space yet
        self._is_short_of_memory = False  # waits for bytes, which other windows may free
        self._finished = 0

    def __repr__(self) -> str:
        state = "fenced" if self.fenced else "dropped" if self.dropped else "open"
        return f"ProcessQueue({self.queue}, epoch={self.epoch}, {state}, unfinished={self._count})"

    # --- the end

    def drop(self) -> None:
        """Accept no more messages and begin no more listener calls. Running calls may still acknowledge theirs."""
        with self._lock:
            self.dropped = True
        self.stop_waiting()

    def fence(self) -> int:
        """End this window and return the final commit offset."""
        with self._lock:
            self.dropped = self.fenced = True
            final = self._edge()
            woken = self.budget.free(self._bytes)
            self._bytes = 0
        wake_all(woken)
        return final

    def may_consume(self) -> bool:
        """Return whether listener calls may begin, because this member holds the queue and its lease."""
        return not self.dropped and self.lease.is_valid()

    # --- messages

    def put(self, messages: Sequence[Message], next_offset: int, size: int) -> bool:
        """Add `messages` in order of offset; the next response will begin at `next_offset`.

        `size` is the number of bytes that they keep in memory. An empty response moves the commit offset only while no
        message is unfinished. Return whether the messages were added; a dropped queue adds none.
        """
        with self._lock:
            if self.dropped:
                return False
            self._next_offset = next_offset
            if messages:
                self._window.extend(messages)
                self._count += len(messages)
                self._bytes += size
                self.budget.add(size)
            elif not self._window and self._on_edge is not None:
                self._on_edge(self.queue, next_offset)
            return True

    def ack(self, messages: Iterable[Message], elapsed_s: float = 0.0, units: int = 0) -> None:
        """Count messages as consumed, in any order, each once. A fenced window ignores the call.

        `elapsed_s` for `units` listener calls updates the estimate that sets the size of the workers' chunks.
        """
        wake: list[PullWaiter] = []
        with self._lock:
            if self.fenced:
                return
            if units:
                taken = elapsed_s / units
                mean = self.listener_time_s
                self.listener_time_s = mean + (taken - mean) * (0.5 if taken > mean else 0.2)
            finished = mark_done(messages)
            if not finished:
                return
            window = self._window
            self._count -= finished
            self._finished += finished
            if window[0]._done:
                held, popleft = len(window), window.popleft
                popleft()
                while window and window[0]._done:
                    popleft()
                freed = self._bytes * (held - len(window)) // held  # an average share; exact when the window is empty
                self._bytes -= freed
                wake = self.budget.free(freed)
                if self._on_edge is not None:
                    self._on_edge(self.queue, self._edge())
            if (
                self._waiting_for
                and self._has_space(self._waiting_for)
                and (not self._is_short_of_memory or self.budget.may_pull(self._bytes))
            ):
                self._waiting_for = 0
                wake.append(self)
        if wake:
            wake_all(wake)

    # --- offsets

    def _edge(self) -> int:
        return self._window[0].queue_offset if self._window else self._next_offset

    def commit_offset(self) -> int:
        """Return the offset of the oldest unfinished message, else the next offset to pull."""
        with self._lock:
            return self._edge()

    # --- space

    def _has_space(self, wanted: int) -> bool:
        limits, window = self.limits, self._window
        return not window or (
            self._count + wanted <= limits.messages and window[-1].queue_offset - window[0].queue_offset < limits.span
        )

    def may_pull(self, wanted: int, expected: int = 0) -> bool:
        """Return whether `wanted` more messages may be pulled. If not, call `wake` once when they may.

        An empty window may always pull, so a limit below one pull slows a queue down but never stops it. The budget
        counts `expected` bytes until `settle`; they are 0 if the broker may have no message.
        """
        with self._lock:
            has_space = self._has_space(wanted)
            if has_space and (not expected or self.budget.reserve(self, self._bytes, expected)):
                self._waiting_for = 0
                return True
            self._waiting_for = wanted
            self._is_short_of_memory = has_space
            return False

    def may_unpack(self, wanted: int) -> bool:
        """Return whether an inner batch of unknown size may be unpacked, because `wanted` messages and bytes fit."""
        with self._lock:
            return self._has_space(wanted) and self.budget.may_unpack(self._bytes)

    @property
    def is_waiting_for_space(self) -> bool:
        """Whether pulling has stopped because the window or the budget is full."""
        return self._waiting_for > 0

    def may_pull_ahead(self, wanted: int, offset: int, expected: int = 0) -> bool:
        """Return whether one more pull, at `offset`, keeps the `wanted` messages of all pulls within the limits.

        `expected` is as for `may_pull`.
        """
        with self._lock:
            return (
                self._has_space(wanted)
                and (not self._window or offset - self._window[0].queue_offset < self.limits.span)
                and self._count + wanted <= self.limits.messages
                and (not expected or self.budget.reserve(self, max(1, self._bytes), expected, ahead=True))
            )

    def settle(self, expected: int, arrived: int = 0) -> None:
        """Stop counting the `expected` bytes of a pull; `arrived` bytes of its response were accepted."""
        wake_all(self.budget.settle(self, expected, arrived))

    def stop_waiting(self) -> None:
        """Let other windows use the memory, because this one does not pull now."""
        wake_all(self.budget.stop_waiting(self))

    def wake(self) -> None:
        """Pull more messages."""
        self._wake(self)

    def unfinished(self) -> tuple[int, int, Message | None]:
        """Return how many messages are unfinished, their bytes, and the oldest of them."""
        with self._lock:
            return self._count, self._bytes, self._window[0] if self._window else None

    @property
    def finished(self) -> int:
        """How many messages were consumed through this window."""
        return self._finished

    def cached_range(self) -> tuple[int, int]:
        """Return the lowest and highest offset held, 0 and 0 when empty."""
        with self._lock:
            return (self._window[0].queue_offset, self._window[-1].queue_offset) if self._window else (0, 0)
