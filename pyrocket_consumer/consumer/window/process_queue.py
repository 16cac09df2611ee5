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
    """A queue's life with us."""

    ASSIGNED = "assigned"  # ours; its start offset is still being read
    PULLING = "pulling"  # messages come in and go out
    DROPPED = "dropped"  # no longer ours: nothing more is taken, acks still count
    FENCED = "fenced"  # the final offset is out: later acks are ignored


class QueueEvent(Enum):
    """What happens to a queue."""

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
    """How much one queue may hold before pulling pauses; bytes are bounded by a `MemoryBudget`."""

    messages: int = 1000
    span: int = 2000


INITIAL_LISTENER_TIME_S = 0.001
"""How long a listener is believed to take before it was measured."""


class ProcessQueue:
    """One period of holding one queue. The I/O thread puts, workers ack; a queue that comes back gets a new one.

    `epoch` tells the periods of one queue apart. `update_offset` takes (queue, commit offset) to the store whenever the
    lower edge moves, under this window's lock, so that a fence and an update cannot interleave.
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
        self.clock = self.lock_clock = clock  # that of the lock may go on while the machine sleeps
        self._update_offset = update_offset
        self._wake = wake
        self._lock = threading.Lock()
        self._state = QueueState.ASSIGNED
        self._window: deque[Message] = deque()
        self._next_offset: int | None = None
        self._count = 0
        self._bytes = 0
        self._waiting_for = 0
        self._is_short_of_memory = False  # waits for bytes, which others may free
        self._finished = 0

    def __repr__(self) -> str:
        return f"ProcessQueue({self.queue}, epoch={self.epoch}, {self._state.value}, unfinished={self._count})"

    # --- life

    @property
    def state(self) -> QueueState:
        return self._state

    def _move(self, event: QueueEvent) -> None:
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise AssertionError(f"{self!r} cannot {event.value}") from None

    def start(self, offset: int) -> None:
        """Begin at `offset`: nothing below it is ours to deliver."""
        with self._lock:
            self._move(QueueEvent.START)
            self._next_offset = offset

    def drop(self) -> None:
        """Take no more messages and begin no more listener calls. What runs may still finish and be acked."""
        with self._lock:
            self._move(QueueEvent.DROP)
            self.dropped = True
        self.withdraw()

    def fence(self) -> int | None:
        """End the queue's life and return its final commit offset, None if it never started."""
        with self._lock:
            self._move(QueueEvent.FENCE)
            final = self._edge()
            woken = self.budget.free(self._bytes)
            self._bytes = 0
        wake_all(woken)
        return final

    def may_consume(self) -> bool:
        """Tell whether listener calls may begin: the queue is ours, and so is its lock."""
        return not self.dropped and self.lock_clock() < self.locked_until

    # --- messages

    def put(self, messages: Sequence[Message], next_offset: int, size: int) -> bool:
        """Add `messages` in order of offset; `next_offset` is where the next answer will begin.

        `size` are the bytes that stay alive with them. An empty answer moves the commit offset only while nothing
        is unfinished. Returns whether the messages were taken: they are not once the queue is dropped.
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
        """Count messages as consumed, in any order; twice is once. Ignored once fenced.

        `elapsed_s` for `units` listener calls feeds the estimate by which work is handed over.
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
                freed = self._bytes * (held - len(window)) // held  # a fair share; exact when empty
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

    # --- what others ask

    def _edge(self) -> int | None:
        return self._window[0].queue_offset if self._window else self._next_offset

    def commit_offset(self) -> int | None:
        """Return the offset of the oldest unfinished message, or the next one to come; None before the start."""
        with self._lock:
            return self._edge()

    # --- room

    def _has_space(self, wanted: int) -> bool:
        limits, window = self.limits, self._window
        return not window or (
            self._count + wanted <= limits.messages and window[-1].queue_offset - window[0].queue_offset < limits.span
        )

    def may_pull(self, wanted: int, expected: int = 0) -> bool:
        """Tell whether `wanted` more messages may be asked for. If not, `wake` is called once when they may.

        An empty window always has room for them: a limit below one pull slows a queue down, but never stops it.
        `expected` bytes count from then on, until they are `settle`d; 0 when nothing is known to be there.
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
        """Tell whether messages may be added whose number is not known: there is room for `wanted`, and for bytes."""
        with self._lock:
            return self._has_space(wanted) and self.budget.may_unpack(self._bytes)

    @property
    def is_waiting_for_space(self) -> bool:
        """Whether nothing is asked for because there is no room."""
        return self._waiting_for > 0

    def may_pull_ahead(self, wanted: int, offset: int, expected: int = 0) -> bool:
        """Tell whether `wanted` messages asked for ahead, the last of them from `offset` on, stay within the limits.

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
        """What was `expected` of a pull was put, or will not come; so many bytes had `arrived`."""
        wake_all(self.budget.settle(self, expected, arrived))

    def withdraw(self) -> None:
        """Nothing is asked for now, although there may be room: others may use it."""
        wake_all(self.budget.withdraw(self))

    def wake(self) -> None:
        """Have more asked for."""
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
