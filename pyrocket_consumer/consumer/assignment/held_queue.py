"""One queue of a member: its state, and the steps that begin, move and end it.

Everything that a member knows about a queue is here, while it holds the queue and after that. The steps of one queue
run one after the other. Each runs to its end, also if its caller stops waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from pyrocket_consumer.consumer.assignment.locks import QueueLocks
from pyrocket_consumer.consumer.assignment.pull_loop import PullLoop
from pyrocket_consumer.consumer.assignment.start_offsets import StartOffsets, log_checks
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.events import describe_id, describe_key
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts, Totals
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService
from pyrocket_consumer.consumer.window.process_queue import NEVER, Lease, ProcessQueue
from pyrocket_consumer.errors import DatabaseError, Fenced, OffsetStoreError, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue
from pyrocket_consumer.offsets import QueueReset
from pyrocket_consumer.transport.backoff import Backoff

REVOKE_GRACE_S = 1.0
"""How long the end of a queue waits for running listener calls."""

ORDERLY_REVOKE_GRACE_S = 20.0
"""The same for an orderly queue. Its next owner must not begin while a call runs, because the order would be lost."""


_RETRY_S = 0.1, 2.0  # the first and the longest pause before a request is repeated


class QueueState(Enum):
    """The states of a queue, as one member sees it."""

    FREE = "free"  # not held
    STARTING = "starting"  # the start offset is read and stored
    CONSUMING = "consuming"  # messages are pulled and consumed
    CHECKING = "checking"  # listener calls wait until the log is checked, because its broker was down
    MOVING = "moving"  # the window is fenced, and the next offset is stored
    ENDING = "ending"  # given up: running calls may finish, and the final offset is stored


class QueueEvent(Enum):
    """The events that change the state of a queue."""

    BEGIN = "begin"
    OPEN = "open"
    CHECK = "check"
    CHECKED = "checked"
    MOVE = "move"
    END = "end"
    RELEASE = "release"


TRANSITIONS = {
    (QueueState.FREE, QueueEvent.BEGIN): QueueState.STARTING,
    (QueueState.STARTING, QueueEvent.OPEN): QueueState.CONSUMING,
    (QueueState.STARTING, QueueEvent.RELEASE): QueueState.FREE,
    (QueueState.CONSUMING, QueueEvent.CHECK): QueueState.CHECKING,
    (QueueState.CONSUMING, QueueEvent.MOVE): QueueState.MOVING,
    (QueueState.CONSUMING, QueueEvent.END): QueueState.ENDING,
    (QueueState.CONSUMING, QueueEvent.RELEASE): QueueState.FREE,
    (QueueState.CHECKING, QueueEvent.CHECK): QueueState.CHECKING,
    (QueueState.CHECKING, QueueEvent.CHECKED): QueueState.CONSUMING,
    (QueueState.CHECKING, QueueEvent.MOVE): QueueState.MOVING,
    (QueueState.CHECKING, QueueEvent.END): QueueState.ENDING,
    (QueueState.CHECKING, QueueEvent.RELEASE): QueueState.FREE,
    (QueueState.MOVING, QueueEvent.OPEN): QueueState.CONSUMING,
    (QueueState.MOVING, QueueEvent.MOVE): QueueState.MOVING,  # no window was opened, because the member closes
    (QueueState.MOVING, QueueEvent.END): QueueState.ENDING,
    (QueueState.MOVING, QueueEvent.RELEASE): QueueState.FREE,
    (QueueState.ENDING, QueueEvent.RELEASE): QueueState.FREE,
}
"""Any other event is a defect of this library, and fails the member."""

_NOT_HELD = (QueueState.FREE, QueueState.STARTING)


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of one queue. Offsets are those of the next message to consume.

    `broker_max` is the end of the queue in the response to the last pull. With `order_by`, `oldest_key` is the key of
    the oldest unfinished message, which holds back the offset to commit.
    """

    committed: int | None
    persisted: int | None
    next_to_pull: int
    cached_bytes: int
    unfinished: int
    oldest_unfinished: str | None
    broker_max: int
    origin: str
    start_offset: int
    paused: bool
    last_error: str
    oldest_key: str | None = None

    @property
    def lag(self) -> int:
        """The number of offsets from the committed one to the broker's end."""
        return max(0, self.broker_max - (self.committed if self.committed is not None else self.start_offset))


@dataclass(frozen=True, slots=True)
class QueueParts:
    """The parts of a member that the steps of a queue use."""

    context: MemberContext
    commits: Commits
    calls: ConsumeService
    locks: QueueLocks | None
    counts: Counts
    starts: StartOffsets
    open: Callable[[HeldQueue, int, Lease], tuple[ProcessQueue, PullLoop]]
    """Returns a window that begins at an offset, and its pull loop."""


class ResetHistory:
    """The resets of one queue that this member has followed, and the one that waits for its owner."""

    __slots__ = ("by_id", "count", "target", "followed_at", "followed_to", "is_followed", "is_unpersisted", "recorded")

    def __init__(self) -> None:
        self.by_id: dict[str, int] = {}  # the targets of plans for held queues
        self.count = 0
        self.target = -1  # of the last reset
        self.followed_at = float("-inf")  # when the last reset with an epoch was followed, and its target
        self.followed_to = -1
        self.is_followed = False  # at least one reset with an epoch was followed
        self.is_unpersisted = False  # the last one is in memory only
        self.recorded: QueueReset | None = None  # for the member that claims the queue


class HeldQueue:
    """A queue, and all that a member knows about it. Confined to the I/O thread, except for its window.

    `window` and `pulls` begin at the last start offset. They are None while the queue is not held.
    """

    def __init__(self, queue: MessageQueue, parts: QueueParts) -> None:
        self.queue = queue
        self.state = QueueState.FREE
        self.window: ProcessQueue | None = None
        self.pulls: PullLoop | None = None
        self.commit = CommitRecord(queue)
        self.resets = ResetHistory()
        self.log_checks = log_checks()
        self.origin = ""
        self.start_offset = 0
        self.is_paused = False  # by the user
        self.due_at: float | None = None  # when the rebalance may begin it
        self.beginning: asyncio.Task[bool] | None = None
        self.lock = asyncio.Lock()  # held during each step
        self._parts = parts
        self._check: object = None  # the newest check of its log

    def __repr__(self) -> str:
        return f"HeldQueue({self.queue}, {self.state.value}, {self.commit!r})"

    @property
    def is_held(self) -> bool:
        """Whether this member holds the queue. It does until the final offset is stored."""
        return self.state not in _NOT_HELD

    @property
    def is_staying(self) -> bool:
        """Whether this member holds the queue, and does not give it up."""
        return self.is_held and self.state is not QueueState.ENDING

    @property
    def is_begun(self) -> bool:
        """Whether the queue is held, or a step of it runs."""
        return self.state is not QueueState.FREE or self.lock.locked()

    @property
    def lease(self) -> Lease:
        """The right to begin listener calls."""
        assert self.window is not None
        return self.window.lease

    def _is(self, state: QueueState) -> bool:
        return self.state is state

    def _change(self, event: QueueEvent) -> None:
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise AssertionError(f"{self!r} cannot {event.value}") from None
        if self.state is QueueState.FREE:
            self.window = self.pulls = None  # their messages need memory

    # --- begin

    async def begin(self, *, is_new: bool, is_ours: Callable[[], bool]) -> bool:
        """Begin to hold the queue, and start pulling. Return False if that is not possible now.

        Args:
            is_new: whether the queue was added to its topic while this consumer ran.
            is_ours: checked again before each step that cannot be undone.
        """
        context = self._parts.context

        def is_wanted() -> bool:
            return is_ours() and not context.closing and context.subscriptions.get(self.queue.topic) is not None

        async with self.lock:
            if self.state is not QueueState.FREE or not is_wanted():
                return self.state is not QueueState.ENDING  # a call from before still runs; begin later
            self._change(QueueEvent.BEGIN)
            try:
                return await self._begin(is_new, is_wanted)
            finally:
                if self._is(QueueState.STARTING):
                    self._change(QueueEvent.RELEASE)

    async def _begin(self, is_new: bool, is_wanted: Callable[[], bool]) -> bool:
        context, commits, commit, queue = self._parts.context, self._parts.commits, self.commit, self.queue
        lease, storing = Lease(context.loop.time), False
        try:
            if self._parts.locks is not None:
                # Lock before reading the offset, so that the former owner cannot commit after the read.
                lock = await self._parts.locks.acquire(queue)
                if lock is None:
                    text = "another member still has its lock; the queue begins once the lock is free"
                    context.emit_throttled(EventKind.LOCK_LOST, text, queue)
                    return False
                lease = lock
            if context.loop.time() < self.log_checks.until or commits.is_paused(commit):
                await self._unlock()
                return False
            offset, origin = await self._parts.starts.find(commit, is_new)
            claim, recorded = commit.claim, self.resets.recorded
            if claim is not None and recorded is not None and recorded.epoch > claim.reset_epoch:
                offset, origin = await self._follow_record(recorded), "recorded reset"
            if commit.claim is not None and not await self._parts.starts.may_begin(commit.claim, self.log_checks):
                commits.forget(commit)
                await self._unlock()
                return False
            if is_wanted() and (origin != "stored" or offset == 0):  # brokers of 4.9 return 0 for "no offset"
                storing = True
                await self._store_start(offset)
                if claim is None and recorded is not None and recorded.epoch > commits.reset_epoch(commit):
                    # the queue is new; store the epoch, so that no later owner follows this reset
                    await commits.apply_resets({commit: QueueReset(None, recorded.epoch)})
        except Fenced:  # another member began it first
            await self._unlock()
            return False
        except RocketError as error:
            text = f"the start offset of {queue} is not known or not stored yet: {error}"
            is_database = isinstance(error, DatabaseError)
            kind = EventKind.STORE_UNREACHABLE if is_database else EventKind.BROKER_UNREACHABLE
            context.emit_throttled(kind, text, queue)
            if not storing:  # else keep the lock: the broker may still execute the commit, and another member
                # that has begun by then would find its offset overwritten
                await self._unlock()
            return False
        commit.first_start = None
        if not is_wanted():
            commits.forget(commit)
            await self._unlock()
            return True
        lease.claim = commit.claim
        self._open(offset, origin, lease)
        facts = {"offset": offset, "origin": origin}
        context.emit(EventKind.QUEUE_ASSIGNED, f"starts at {offset} ({origin})", queue, facts)
        self._pull()
        return True

    async def _follow_record(self, recorded: QueueReset) -> int:
        assert recorded.offset is not None
        await self._parts.commits.apply_resets({self.commit: recorded})
        facts = {"to": recorded.offset, "epoch": recorded.epoch}
        text = f"-> {recorded.offset} (recorded while no member held the queue)"
        self._parts.context.emit(EventKind.OFFSET_RESET, text, self.queue, facts, level=logging.WARNING)
        return recorded.offset

    async def _store_start(self, offset: int) -> None:
        """Store the start offset durably before the first pull.

        Without a stored offset, a member that takes the queue over would begin at another offset, and nobody would
        consume the messages between the two.
        """
        try:
            await self._parts.commits.store_start(self.commit, offset)
        except OffsetStoreError as error:
            self._report_memory_only(error)

    def _report_memory_only(self, error: OffsetStoreError) -> None:
        text = f"continuing from memory: {error}"
        self._parts.context.emit(EventKind.STORE_UNWRITABLE, text, self.queue, level=logging.ERROR)

    async def _unlock(self) -> None:
        if self._parts.locks is not None:
            await self._parts.locks.release([self.queue])

    def _open(self, offset: int, origin: str, lease: Lease) -> None:
        self.window, self.pulls = self._parts.open(self, offset, lease)
        self.commit.offset, self.commit.window = offset, self.window
        self.origin, self.start_offset = origin, offset
        self._change(QueueEvent.OPEN)

    def _pull(self) -> None:
        assert self.pulls is not None
        self.pulls.pull()

    # --- move

    async def move(
        self,
        target: int,
        reason: str,
        *,
        expected: ProcessQueue | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Move the queue to `target`, and return once the target is durable.

        Return False if this member no longer holds the queue. Also return False, without a move, if the queue has
        another window than `expected`, or if `unless()` is true when the move begins.
        """
        work = self._move(target, reason, expected, unless)
        return await self._parts.context.tasks.finish(work, f"moving {self.queue} to {target}")

    async def _move(self, target: int, reason: str, expected: ProcessQueue | None, unless: Callable[[], bool]) -> bool:
        async with self.lock:
            if not self.is_held or (expected is not None and self.window is not expected) or unless():
                return False
            try:
                return await move_together({self: target}, reason, lambda: self._store(target))
            except Fenced:
                self._release(EventKind.QUEUE_FENCED, f"another member has claimed it; {_DISCARDED}")
                return False

    async def _store(self, target: int) -> bool:
        """Store `target` durably.

        Try until the broker acknowledges. If the disk is full, emit an event and continue from memory. Return False if
        the queue was given up, or the consumer closed, before the target was stored.

        Raises:
            Fenced: another member has claimed the queue; release it.
        """
        context, backoff = self._parts.context, Backoff(*_RETRY_S)
        while True:
            try:
                await self._parts.commits.overwrite(self.commit, target)
                return True
            except OffsetStoreError as error:
                if context.closing:  # the store may be closed already, and no memory remains
                    return False
                self._report_memory_only(error)
                return True
            except Fenced:
                raise
            except RocketError as error:
                text = f"moving to {target} is not acknowledged yet: {error}"
                context.emit_throttled(EventKind.COMMIT_FAILED, text, self.queue)
                if context.closing or self.state is QueueState.ENDING:
                    return False
                await asyncio.sleep(backoff.failed())

    def fence_for_move(self) -> None:
        """Fence the window, so that late acks and responses change nothing. The caller holds the lock."""
        if self.state is not QueueState.ENDING:
            self._change(QueueEvent.MOVE)
        self.fence()

    def open_next(self, target: int, reason: str) -> None:
        """Open the next window after `fence_for_move`, unless the queue was given up meanwhile."""
        if self.state is not QueueState.MOVING or self._parts.context.closing:
            return
        assert self.pulls is not None
        valid_until = self.lease.valid_until if self._parts.locks is not None else NEVER
        lease, moves = Lease(self.lease.clock, valid_until, self.commit.claim), self.pulls.moves
        self._open(target, reason, lease)
        self.pulls.moves = moves
        self._pull()

    # --- end

    async def end(self, why: str) -> None:
        """Give up the queue: wait a moment for running calls, store the final offset, release the queue."""
        if self.is_staying:
            self._change(QueueEvent.END)
            await self._parts.context.tasks.finish(self._end(why), f"giving up {self.queue}")

    async def _end(self, why: str) -> None:
        context, commits, commit, window = self._parts.context, self._parts.commits, self.commit, self.window
        assert window is not None
        async with self.lock:
            if self.window is not window:  # another member has taken it; it may even have begun again here
                return
            self._stop()
            # Store the finished messages before the wait, because the next owner may begin during it.
            await commits.persist([commit])
        await self._wait_for_calls()
        async with self.lock:
            if self.window is not window:  # as above
                return
            is_running = self._parts.calls.running(window) > 0
            final = self.fence()
            try:
                await commits.release(commit)
                if not is_running:
                    await self._unlock()  # only now, so that the next owner reads this offset
            except RocketError as error:
                text = f"the final offset {final} could not be stored; messages will be redelivered: {error}"
                context.emit(EventKind.COMMIT_FAILED, text, self.queue, level=logging.WARNING)
            self._change(QueueEvent.RELEASE)  # only now, because a close meanwhile stores the offsets of held queues
        context.emit(EventKind.QUEUE_REVOKED, f"{why} at {final}", self.queue, {"offset": final})

    async def _wait_for_calls(self) -> None:
        context, window = self._parts.context, self.window
        assert window is not None
        deadline = context.loop.time() + (ORDERLY_REVOKE_GRACE_S if context.config.orderly else REVOKE_GRACE_S)
        while self._parts.calls.running(window) and context.loop.time() < deadline:
            if window.fenced and context.closing:
                break
            await asyncio.sleep(0.005)  # a notification would cost time in each call

    async def end_and_reassign(self, why: str) -> None:
        """Give up the queue, and request a rebalance. It begins the queue again, and checks its log before pulling."""
        await self.end(why)
        self._parts.context.rebalance_wanted.set()

    async def lose_lock(self, window: ProcessQueue) -> None:
        """End a queue whose lock the broker has given to another member, without a commit."""
        async with self.lock:
            if self.is_held and self.window is window:
                final = self.fence()
                text = f"another member has the lock; messages up to {final} may be redelivered"
                self._release(EventKind.LOCK_LOST, text)

    def lose_claim(self, why: str) -> None:
        """End a queue that another member has claimed, or that was reset in the database, without a commit."""
        if self.is_staying:
            work = self._lose_claim(self.window, why)
            self._parts.context.tasks.begin(work, f"ending {self.queue}, which was fenced")

    async def _lose_claim(self, window: ProcessQueue | None, why: str) -> None:
        async with self.lock:
            if self.is_held and self.window is window:
                self.fence()
                self._release(EventKind.QUEUE_FENCED, f"{why}; {_DISCARDED}")

    def _release(self, kind: EventKind, text: str) -> None:
        """Forget a queue that another member has, after its window was fenced. The caller holds the lock."""
        context = self._parts.context
        self._change(QueueEvent.RELEASE)
        self._parts.commits.forget(self.commit)
        context.emit(kind, text, self.queue, level=logging.WARNING)
        context.rebalance_wanted.set()

    def _stop(self) -> None:
        assert self.window is not None
        assert self.pulls is not None
        self._check = None
        self.pulls.stop()
        self.window.drop()

    def fence(self) -> int | None:
        """End the window: later acks change nothing. Return the offset to commit."""
        window = self.window
        assert window is not None
        self._stop()
        if not window.fenced:
            self._parts.counts.add(self.queue.topic, self.totals())
        final = window.fence()
        self._parts.calls.forget(window)
        if self.commit.window is window:
            self.commit.offset, self.commit.window = final, None
        return self.commit.offset

    # --- check of the log

    def recheck_log(self) -> None:
        """Stop the listener calls of a claimed queue until its log is checked.

        The broker was down, and may have lost its last messages.
        """
        window = self.window
        if self.state in (QueueState.CONSUMING, QueueState.CHECKING) and window is not None and window.claim:
            self._change(QueueEvent.CHECK)
            self._check = check = object()
            self.lease.is_suspended = True
            self._parts.context.tasks.begin(self._check_log(window, check), f"checking the log of {self.queue}")

    async def _check_log(self, window: ProcessQueue, check: object) -> None:
        """Continue a queue whose log is still the one that was consumed; reassign a queue with another log."""
        backoff = Backoff(*_RETRY_S)
        while self._is_newest(check):
            try:
                assert window.claim is not None
                is_same_log = await self._parts.starts.is_same_log(window.claim)
            except RocketError as error:
                text = f"the log could not be checked after the broker was down: {error}"
                self._parts.context.emit_throttled(EventKind.BROKER_UNREACHABLE, text, self.queue)
                await asyncio.sleep(backoff.failed())
                continue
            if not self._is_newest(check):
                return
            self._check = None
            if is_same_log:
                self._change(QueueEvent.CHECKED)
                self.lease.is_suspended = False
                self._parts.calls.resume_calls(window)
            else:
                await self.end_and_reassign("its broker was down, and now has another log")

    def _is_newest(self, check: object) -> bool:
        return self.state is QueueState.CHECKING and self._check is check

    # --- progress

    def totals(self) -> Totals:
        """Return the statistics of the present window."""
        assert self.window is not None
        assert self.pulls is not None
        return Totals(self.pulls.pulls, self.pulls.pull_time_s, self.pulls.pulled, self.window.finished)

    def progress(self) -> QueueProgress:
        """Return the progress of a held queue."""
        assert self.window is not None
        assert self.pulls is not None
        unfinished, cached_bytes, oldest = self.window.unfinished()
        return QueueProgress(
            committed=self.commit.current(),
            persisted=self.commit.stored(),
            next_to_pull=self.pulls.next_offset,
            cached_bytes=cached_bytes,
            unfinished=unfinished,
            oldest_unfinished=describe_id(oldest) if oldest else None,
            broker_max=self.pulls.max_offset,
            origin=self.origin,
            start_offset=self.start_offset,
            paused=self.pulls.is_paused,
            last_error=self.pulls.last_error,
            oldest_key=describe_key(oldest) if oldest else None,
        )


async def move_together(targets: Mapping[HeldQueue, int], reason: str, store: Callable[[], Awaitable[bool]]) -> bool:
    """Move queues in one durable step: fence their windows, `store()` the targets, open new windows, pull.

    Every correction and reset takes this way. The caller holds the locks of the queues. Those that this member does
    not hold are left as they are. Return the result of `store`.
    """
    held = [queue for queue in targets if queue.is_held]
    for queue in held:
        queue.fence_for_move()
    is_stored = await store()
    for queue in held:
        queue.open_next(targets[queue], reason)
    return is_stored


_DISCARDED = "uncommitted offsets are discarded"
