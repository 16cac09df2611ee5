"""The window of unfinished messages of one queue, whose lower edge is the commit offset. The memory of all windows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.consumer.window.decompression_budget import DecompressionBudget
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.protocol.accelerator import mark_done
from pyrocket_consumer.protocol.compression import MAX_BODY_BYTES
from pyrocket_consumer.protocol.message import Message

NEVER = float("inf")

WAITING_CHECK_S = 0.02
"""How often the budget checks the windows that wait to pull."""

OVER_LIMIT_EVERY_S = 0.1
"""The time between two pulls beyond the limit. The broker may hold the first one for long, or never respond."""


class MemoryBudget:
    """The limit on the bytes that all windows of a consumer, or of one topic, hold together; it decides who may pull.

    A window that holds messages may pull while it holds fewer bytes than are left, so a stuck queue leaves memory for
    the others. When no bytes are left, empty windows pull first, in the order in which they began to wait. A pull in
    flight counts with its expected size. The pull loop drops a response that arrives when no memory is left, and pulls
    it again.

    All held messages may be stuck. So while `idle()` returns True, because workers have nothing to do, one window after
    the other may pull beyond the limit.

    Any thread may use it, but only the thread of `loop` may call `reserve`. A thread may acquire its lock while it
    holds the lock of a window, and acquires no other lock while it holds this one. Methods that free memory return the
    windows that may pull; the caller wakes them when it holds no lock.
    """

    def __init__(
        self,
        limit: int = 100 * 1024 * 1024,
        loop: asyncio.AbstractEventLoop | None = None,
        idle: Callable[[], bool] = lambda: False,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.bodies = DecompressionBudget(limit, max_body_bytes)
        """Bodies that listener calls decompress have a budget of the same size."""
        self._limit = limit
        self._loop = loop
        self._idle = idle
        self._lock = threading.Lock()
        self.held = 0  # the bytes of all windows
        self._expected = 0
        self._arrived = 0  # bytes of responses that no window has yet; part of _expected
        self._waiting: dict[ProcessQueue, int] = {}  # empty windows in their order, with the bytes that they expect
        self._short_of_memory: dict[ProcessQueue, int] = {}  # windows that hold more bytes than are left, and how many
        self._over_limit = 0  # how many windows pull although the limit is reached
        self._next_over_limit_at = 0.0
        self._next_check: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"MemoryBudget({self.held} of {self._limit} held, {self._expected} expected, {len(self._waiting)} waiting)"
        )

    def _left(self) -> int:
        return self._limit - self.held - self._expected

    def may_pull(self, held: int) -> bool:
        """Return whether to wake a window that holds `held` bytes and waits.

        An empty window is always woken, because `reserve` adds it to the waiting windows if it may not pull yet.
        """
        with self._lock:
            return not held or (held < self._left() and not self._waiting)

    def reserve(self, window: ProcessQueue, held: int, expected: int, *, ahead: bool = False) -> bool:
        """Return whether `window`, which holds `held` bytes, may pull; count `expected` bytes until `settle`.

        Otherwise the budget wakes the window later, which must then pull or call `stop_waiting`. With `ahead` it is not
        woken, because it has other pulls in flight.
        """
        with self._lock:
            self._short_of_memory.pop(window, None)
            if window.granted is not None:
                self._expected -= window.granted
                window.granted = None
            elif self._waiting or held >= self._left():
                if not ahead:
                    (self._short_of_memory if held else self._waiting).setdefault(window, held or expected)
                    self._check_later()
                return False
            self._expected += expected
            return True

    def may_unpack(self, held: int) -> bool:
        """Return whether a window that holds `held` bytes may unpack an inner batch of unknown size."""
        return self.held < self._limit or (not held and self._idle())

    def accept(self, window: ProcessQueue, expected: int, size: int) -> bool:
        """Return whether a response of `size` bytes is accepted; count its size in place of `expected` until `settle`.

        If no memory is left, the pull must be sent again later.
        """
        with self._lock:
            if self.held + self._arrived >= self._limit and not window.is_over_limit:
                return False
            self._expected += size - expected
            self._arrived += size
            return True

    def add(self, size: int) -> None:
        """Count bytes that a window has begun to hold."""
        with self._lock:
            self.held += size

    def free(self, size: int) -> list[ProcessQueue]:
        """Count bytes that a window holds no longer."""
        with self._lock:
            self.held -= size
            return self._grant_waiting()

    def settle(self, window: ProcessQueue, expected: int, arrived: int) -> list[ProcessQueue]:
        """Stop counting a pull whose messages are in the window, or will not arrive. `arrived` bytes were accepted."""
        with self._lock:
            self._expected -= expected
            self._arrived -= arrived
            self._end_over_limit(window)
            return self._grant_waiting()

    def stop_waiting(self, window: ProcessQueue) -> list[ProcessQueue]:
        """Let another window pull in place of `window`, which does not pull now."""
        with self._lock:
            self._waiting.pop(window, None)
            self._short_of_memory.pop(window, None)
            if window.granted is not None:
                self._expected -= window.granted
                window.granted = None
                self._end_over_limit(window)
            return self._grant_waiting()

    def _end_over_limit(self, window: ProcessQueue) -> None:
        self._over_limit -= window.is_over_limit
        window.is_over_limit = False

    def _grant_waiting(self) -> list[ProcessQueue]:
        woken: list[ProcessQueue] = []
        while self._waiting and self._left() > 0:
            woken.append(self._grant_next())
        return woken

    def _grant_next(self) -> ProcessQueue:
        window = next(iter(self._waiting))
        window.granted = self._waiting.pop(window)
        self._expected += window.granted
        return window

    def _check_later(self) -> None:
        if self._next_check is None and self._loop is not None:
            self._next_check = self._loop.call_later(WAITING_CHECK_S, self._check_waiting)

    def _check_waiting(self) -> None:
        assert self._loop is not None
        is_idle, now = self._idle(), self._loop.time()
        with self._lock:
            self._next_check = None
            woken: list[ProcessQueue] = []
            if not self._waiting:
                left = self._left()
                woken = [window for window, held in self._short_of_memory.items() if held < left] if left > 0 else []
                for window in woken:
                    del self._short_of_memory[window]
            elif is_idle and (not self._over_limit or now >= self._next_over_limit_at):
                woken = [window := self._grant_next()]
                if self.held >= self._limit:
                    self._over_limit += not window.is_over_limit
                    window.is_over_limit = True
                    self._next_over_limit_at = now + OVER_LIMIT_EVERY_S
            if self._waiting or self._short_of_memory:
                self._check_later()
        wake_all(woken)


def wake_all(windows: list[ProcessQueue]) -> None:
    """Wake windows that may pull. The caller holds no lock."""
    for window in windows:
        window.wake()


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


class ProcessQueue:
    """The unfinished messages of one queue, from one start offset until the queue moves or ends.

    The I/O thread puts messages, and workers acknowledge them. A queue that moves or begins again gets a new window.
    `drop` ends the listener calls, and `fence` the acknowledgements.
    """

    def __init__(
        self,
        queue: MessageQueue,
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
        self.limits = limits
        self.budget = budget or MemoryBudget()
        self.lease = lease or Lease(clock)
        self.claim = self.lease.claim
        self.dropped = False  # no more messages, and no more listener calls; acks still count
        self.fenced = False  # the final offset is known, and later acks are ignored
        self.lanes: Any = None  # of an ordered queue: its messages that wait for a listener
        self.granted: int | None = None  # bytes that the budget counts since it woke this window, until it pulls
        self.is_over_limit = False  # pulls although the budget's limit is reached
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
        self.finished = 0  # the number of messages that were consumed

    def __repr__(self) -> str:
        state = "fenced" if self.fenced else "dropped" if self.dropped else "open"
        return f"ProcessQueue({self.queue}, {state}, unfinished={self._count})"

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
        wake: list[ProcessQueue] = []
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
            self.finished += finished
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

    def cached_range(self) -> tuple[int, int]:
        """Return the lowest and highest offset held, 0 and 0 when empty."""
        with self._lock:
            return (self._window[0].queue_offset, self._window[-1].queue_offset) if self._window else (0, 0)
