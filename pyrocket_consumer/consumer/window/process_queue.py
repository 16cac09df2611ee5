"""The window of unfinished messages of one assigned queue; its lower edge is the commit offset."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from pyrocket_consumer.consumer.window.memory_budget import MemoryBudget, PullWaiter, wake_all
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.protocol.accelerator import mark_done
from pyrocket_consumer.protocol.message import Message


class QueueState(Enum):
    """The states of a queue that this member holds."""

    ASSIGNED = "assigned"  # held; the member still reads its start offset
    PULLING = "pulling"  # messages are pulled and consumed
    DROPPED = "dropped"  # given up: no more messages are accepted, but acks still count
    FENCED = "fenced"  # the final offset is known, and later acks are ignored


class QueueEvent(Enum):
    """The events that change the state of a queue."""

    START = "start"
    DROP = "drop"
    FENCE = "fence"


TRANSITIONS = {
    (QueueState.ASSIGNED, QueueEvent.START): QueueState.PULLING,
    (QueueState.ASSIGNED, QueueEvent.DROP): QueueState.DROPPED,
    (QueueState.PULLING, QueueEvent.DROP): QueueState.DROPPED,
    (QueueState.DROPPED, QueueEvent.DROP): QueueState.DROPPED,  # rebalance and shutdown may both drop
    (QueueState.DROPPED, QueueEvent.FENCE): QueueState.FENCED,
    (QueueState.FENCED, QueueEvent.DROP): QueueState.FENCED,
    (QueueState.FENCED, QueueEvent.FENCE): QueueState.FENCED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How many messages, and what span of offsets, one queue may hold before pulling pauses.

    A `MemoryBudget` limits the bytes.
    """

    messages: int = 1000
    span: int = 2000


INITIAL_LISTENER_TIME_S = 0.001
"""The assumed duration of a listener call before the first measurement."""


class ProcessQueue:
    """The unfinished messages of one queue, for one period in which this member holds it.

    The I/O thread puts messages, and workers acknowledge them. A queue that is assigned again gets a new window;
    `epoch` distinguishes the periods. When the lower edge moves, the window calls `update_offset(queue,
    commit_offset)` under its lock, so that a fence and an update cannot interleave.
    """

    def __init__(
        self,
        queue: MessageQueue,
        epoch: int,
        limits: Limits,
        update_offset: Callable[[MessageQueue, int], None],
        wake: Callable[[ProcessQueue], None] = lambda window: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.queue = queue
        self.epoch = epoch
        self.limits = limits
        self.budget = budget or MemoryBudget()
        self.dropped = False
        self.claim: Claim | None = None  # of a queue whose offset is in a database
        self.listener_time_s = INITIAL_LISTENER_TIME_S
        self.last_consumed_at = 0.0
        self.locked_until = float("inf")  # only orderly clustering queues are locked
        self.clock = self.lock_clock = clock  # the lock's clock may also count while the machine sleeps
        self._update_offset = update_offset
        self._wake = wake
        self._lock = threading.Lock()
        self._state = QueueState.ASSIGNED
        self._window: deque[Message] = deque()
        self._next_offset: int | None = None
        self._count = 0
        self._bytes = 0
        self._waiting_for = 0  # the number of messages for which there is no space yet
        self._is_short_of_memory = False  # waits for bytes, which other windows may free
        self._finished = 0

    def __repr__(self) -> str:
        return f"ProcessQueue({self.queue}, epoch={self.epoch}, {self._state.value}, unfinished={self._count})"

    # --- states

    @property
    def state(self) -> QueueState:
        return self._state

    def _move(self, event: QueueEvent) -> None:
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise AssertionError(f"{self!r} cannot {event.value}") from None

    def start(self, offset: int) -> None:
        """Begin at `offset`; messages below it are not delivered."""
        with self._lock:
            self._move(QueueEvent.START)
            self._next_offset = offset

    def drop(self) -> None:
        """Accept no more messages and begin no more listener calls. Running calls may still acknowledge theirs."""
        with self._lock:
            self._move(QueueEvent.DROP)
            self.dropped = True
        self.stop_waiting()

    def fence(self) -> int | None:
        """End this period and return the final commit offset, or None if it never started."""
        with self._lock:
            self._move(QueueEvent.FENCE)
            final = self._edge()
            woken = self.budget.free(self._bytes)
            self._bytes = 0
        wake_all(woken)
        return final

    def may_consume(self) -> bool:
        """Return whether listener calls may begin, because this member holds the queue and its lock."""
        return not self.dropped and self.lock_clock() < self.locked_until

    # --- messages

    def put(self, messages: Sequence[Message], next_offset: int, size: int) -> bool:
        """Add `messages` in order of offset; the next response will begin at `next_offset`.

        `size` is the number of bytes that they keep in memory. An empty response moves the commit offset only while no
        message is unfinished. Return whether the messages were added; a dropped queue adds none.
        """
        with self._lock:
            if self._state is not QueueState.PULLING:
                return False
            self._next_offset = next_offset
            if messages:
                self._window.extend(messages)
                self._count += len(messages)
                self._bytes += size
                self.budget.add(size)
            elif not self._window:
                self._update_offset(self.queue, next_offset)
            return True

    def ack(self, messages: Iterable[Message], elapsed_s: float = 0.0, units: int = 0) -> None:
        """Count messages as consumed, in any order, each once. A fenced window ignores the call.

        `elapsed_s` for `units` listener calls updates the estimate that sets the size of the workers' chunks.
        """
        wake: list[PullWaiter] = []
        with self._lock:
            if self._state is QueueState.FENCED:
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
                edge = window[0].queue_offset if window else self._next_offset
                assert edge is not None
                self._update_offset(self.queue, edge)
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

    def _edge(self) -> int | None:
        return self._window[0].queue_offset if self._window else self._next_offset

    def commit_offset(self) -> int | None:
        """Return the offset of the oldest unfinished message, else the next offset to pull; None before the start."""
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
