"""The queues that a member holds: how a queue begins, moves, and ends. Each of these is one step of the member."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from weakref import WeakValueDictionary

from pyrocket_consumer.cluster.namespace import unwrap
from pyrocket_consumer.consumer.assignment.divergence import DivergenceCheck
from pyrocket_consumer.consumer.assignment.locks import QueueLocks
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.events import describe_id, describe_key
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts, Totals
from pyrocket_consumer.consumer.dispatch.workers import Workers
from pyrocket_consumer.consumer.pulling.pull_host import MemberPullHost
from pyrocket_consumer.consumer.pulling.pull_loop import PullLoop
from pyrocket_consumer.consumer.window.memory_budget import MemoryBudget
from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.errors import DatabaseError, Fenced, OffsetStoreError, RocketError
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
from pyrocket_consumer.offsets.base import MAX_OFFSET
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.text import logger

log = logger("consumer")

REVOKE_GRACE_S = 1.0
"""How long the end of a queue waits for running listener calls."""

ORDERLY_REVOKE_GRACE_S = 20.0
"""The same for an orderly queue. Its next owner must not begin while a call runs, because the order would be lost."""


class ListenerCalls(Protocol):
    """The service that runs the listener calls of windows."""

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many listener calls are running (of `window`)."""

    def forget(self, window: ProcessQueue) -> None:
        """Forget a window that has ended."""

    def resume_calls(self, window: ProcessQueue) -> None:
        """Begin calls of the window again."""

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""


@dataclass(slots=True)
class Assignment:
    """One held queue: its window, its pull loop, and its start offset."""

    window: ProcessQueue
    pull_loop: PullLoop
    origin: str
    start_offset: int
    ended: bool = False


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


def _event_kind_of(error: RocketError) -> EventKind:
    return EventKind.STORE_UNREACHABLE if isinstance(error, DatabaseError) else EventKind.BROKER_UNREACHABLE


def _totals_of(assignment: Assignment) -> Totals:
    window, pull_loop = assignment.window, assignment.pull_loop
    return Totals(pull_loop.pulls, pull_loop.pull_time_s, pull_loop.pulled, window.finished)


class Assignments:
    """The held queues of a member. Confined to the I/O thread, except for `wake`."""

    def __init__(
        self,
        context: MemberContext,
        commits: Commits,
        pull_host: MemberPullHost,
        calls: ListenerCalls,
        locks: QueueLocks | None,
        counts: Counts,
    ) -> None:
        self._context = context
        self._commits = commits
        self._pull_host = pull_host
        self._calls = calls
        self._locks = locks
        self._counts = counts
        self._held: dict[MessageQueue, Assignment] = {}
        self._epochs = itertools.count(1)
        self._queue_locks: WeakValueDictionary[MessageQueue, asyncio.Lock] = WeakValueDictionary()
        self._ending: set[MessageQueue] = set()
        self._log_checks: dict[MessageQueue, object] = {}  # the newest of each queue
        self._first_starts: dict[MessageQueue, tuple[int, str]] = {}  # offset and origin, perhaps not stored yet
        self._budgets: dict[str, MemoryBudget] = {}  # by topic, or one for all
        self._woken: deque[ProcessQueue] = deque()
        self._wake_due = False
        self._divergence_check = DivergenceCheck(
            context, lambda queue, response: pull_host.on_late_reset(queue, response)
        )
        commits.on_fenced = self._on_fenced
        context.cluster.keep_reachable(self._holds_queue_of)

    # --- the held queues

    def get(self, queue: MessageQueue) -> Assignment | None:
        return self._held.get(queue)

    def is_begun(self, queue: MessageQueue) -> bool:
        """Return whether `queue` is held, or is beginning, moving or ending now."""
        return queue in self._held or queue in self._queue_locks

    def all(self) -> dict[MessageQueue, Assignment]:
        """Return a copy of the table of held queues."""
        return dict(self._held)

    def windows(self) -> dict[MessageQueue, ProcessQueue]:
        """Return the windows of all held queues."""
        return {queue: assignment.window for queue, assignment in self._held.items()}

    def held(self, topic: str) -> list[MessageQueue]:
        """Return the held queues of `topic`, without those that are ending."""
        return [queue for queue in self._held if queue.topic == topic and queue not in self._ending]

    def _holds_queue_of(self, broker_name: str) -> bool:
        return any(queue.broker_name == broker_name for queue in self._held)

    def topics(self) -> set[str]:
        return {queue.topic for queue in self._held}

    def totals(self) -> dict[str, Totals]:
        """Return the statistics of each topic since the start."""
        totals = self._counts.past()
        for queue, assignment in self._held.items():
            if not assignment.ended:
                totals.setdefault(queue.topic, Totals()).add(_totals_of(assignment))
        return totals

    def listener_time_s(self, topic: str) -> float:
        """Return the present average duration of listener calls of `topic`."""
        times = [each.window.listener_time_s for queue, each in self._held.items() if queue.topic == topic]
        return sum(times) / len(times) if times else 0.0

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return the progress of each held queue."""
        table = {}
        for queue, assignment in sorted(self._held.items()):
            pull_loop = assignment.pull_loop
            unfinished, cached_bytes, oldest = assignment.window.unfinished()
            table[queue] = QueueProgress(
                committed=self._commits.current(queue),
                persisted=self._commits.persisted(queue),
                next_to_pull=pull_loop.next_offset,
                cached_bytes=cached_bytes,
                unfinished=unfinished,
                oldest_unfinished=describe_id(oldest) if oldest else None,
                broker_max=pull_loop.max_offset,
                origin=assignment.origin,
                start_offset=assignment.start_offset,
                paused=self._pull_host.paused(queue),
                last_error=pull_loop.last_error,
                oldest_key=describe_key(oldest) if oldest else None,
            )
        return table

    # --- pulling

    def pause_pulls(self) -> None:
        """Give up the pulls in flight of queues that are paused now."""
        for queue, assignment in self._held.items():
            if self._pull_host.paused(queue):
                assignment.pull_loop.pause()

    def pull_all(self) -> None:
        """Pull again from all queues after a pause."""
        for assignment in self._held.values():
            assignment.pull_loop.pull()

    def stop_pulling(self) -> None:
        """Stop all pulls; the cached messages stay."""
        for assignment in self._held.values():
            assignment.pull_loop.stop()

    def wake(self, window: ProcessQueue) -> None:
        """Pull again for a window that has space now. Workers call it."""
        self._woken.append(window)
        if not self._wake_due:  # one wake-up serves all windows added before it; an extra one does no harm
            self._wake_due = True
            self._context.call_soon(self._pull_woken)

    def _pull_woken(self) -> None:
        self._wake_due = False
        while self._woken:
            window = self._woken.popleft()
            assignment = self._held.get(window.queue)
            if assignment is not None and assignment.window is window:
                assignment.pull_loop.pull()

    # --- begin and end

    def _lock(self, queue: MessageQueue) -> asyncio.Lock:
        return self._queue_locks.setdefault(queue, asyncio.Lock())

    async def begin(
        self,
        queue: MessageQueue,
        *,
        is_new: bool,
        is_ours: Callable[[], bool],
        recorded: QueueReset | None = None,
    ) -> bool:
        """Begin to hold `queue`, and start pulling. Return False if its start offset cannot be read or stored now.

        Args:
            is_new: whether the queue was added to its topic while this consumer ran.
            is_ours: checked again before each step that cannot be undone.
            recorded: a reset that was recorded while no member had claimed the queue.
        """
        context = self._context

        def is_wanted() -> bool:
            return is_ours() and not context.closing and context.subscriptions.get(queue.topic) is not None

        async with self._lock(queue):
            if queue in self._held or not is_wanted():
                return True
            locked_until, storing = None, False
            try:
                if self._locks is not None:
                    # Lock before reading the offset, so that the former owner cannot commit after the read.
                    locked_until = await self._locks.acquire(queue)
                    if locked_until is None:
                        text = "another member still has its lock; the queue begins once the lock is free"
                        context.emit_throttled(EventKind.LOCK_LOST, text, queue)
                        return False
                if self._divergence_check.is_paused(queue) or self._commits.is_paused(queue):
                    await self._unlock(queue)
                    return False
                offset, origin = await self._start_offset(queue, is_new)
                claim = self._commits.claim_of(queue)
                if claim is not None and recorded is not None and recorded.epoch > claim.reset_epoch:
                    offset, origin = await self._follow_record(queue, recorded), "recorded reset"
                if claim is not None and not await self._divergence_check.may_begin(claim):
                    self._commits.forget(queue)
                    await self._unlock(queue)
                    return False
                if is_wanted() and (origin != "stored" or offset == 0):  # brokers of 4.9 return 0 for "no offset"
                    storing = True
                    await self._store_start(queue, offset)
                    if claim is None and recorded is not None and recorded.epoch > self._commits.reset_epoch(queue):
                        # the queue is new; store the epoch, so that no later owner follows this reset
                        await self._commits.apply_resets({queue: QueueReset(None, recorded.epoch)})
            except Fenced:  # another member began it first
                await self._unlock(queue)
                return False
            except RocketError as error:
                text = f"the start offset of {queue} is not known or not stored yet: {error}"
                context.emit_throttled(_event_kind_of(error), text, queue)
                if not storing:  # else keep the lock: the broker may still execute the commit, and another member
                    # that has begun by then would find its offset overwritten
                    await self._unlock(queue)
                return False
            self._first_starts.pop(queue, None)
            if not is_wanted():
                self._commits.forget(queue)
                await self._unlock(queue)
                return True
            assignment = self._open(queue, offset, origin, locked_until)
        context.emit(
            EventKind.QUEUE_ASSIGNED, f"starts at {offset} ({origin})", queue, {"offset": offset, "origin": origin}
        )
        assignment.pull_loop.pull()
        return True

    async def _follow_record(self, queue: MessageQueue, recorded: QueueReset) -> int:
        assert recorded.offset is not None
        await self._commits.apply_resets({queue: recorded})
        facts = {"to": recorded.offset, "epoch": recorded.epoch}
        text = f"-> {recorded.offset} (recorded while no member held the queue)"
        self._context.emit(EventKind.OFFSET_RESET, text, queue, facts, level=logging.WARNING)
        return recorded.offset

    async def _store_start(self, queue: MessageQueue, offset: int) -> None:
        """Store the start offset of `queue` durably before the first pull.

        Without a stored offset, a member that takes the queue over would begin at another offset, and nobody would
        consume the messages between the two.
        """
        try:
            await self._commits.store_start(queue, offset)
        except OffsetStoreError as error:
            text = f"continuing from memory: {error}"
            self._context.emit(EventKind.STORE_UNWRITABLE, text, queue, level=logging.ERROR)

    async def _unlock(self, queue: MessageQueue) -> None:
        if self._locks is not None:
            await self._locks.release([queue])

    def _open(self, queue: MessageQueue, offset: int, origin: str, locked_until: float | None = None) -> Assignment:
        config = self._context.config
        limits = Limits(
            self._topic_option("max_cached_messages", queue.topic),
            MAX_OFFSET if config.orderly and config.order_by is None else config.max_span,
        )
        window = ProcessQueue(
            queue,
            next(self._epochs),
            limits,
            self._commits.update,
            self.wake,
            self._context.loop.time,
            budget=self._budget(queue.topic),
        )
        window.claim = self._commits.claim_of(queue)
        if locked_until is not None:
            window.locked_until, window.lock_clock = locked_until, self._context.lock_clock
        window.start(offset)
        pull_loop = PullLoop(
            self._pull_host,
            window,
            offset,
            batch=min(self._topic_option("pull_batch_size", queue.topic), limits.messages),
            hold_s=config.pull_hold_s,
            call_timeout_s=config.call_timeout_s,
            retry_delay_s=config.pull_retry_delay_s,
        )
        assignment = self._held[queue] = Assignment(window, pull_loop, origin, offset)
        return assignment

    def _topic_option(self, option: str, topic: str) -> int:
        """Return a per-topic option. Brokers use the topic's full name; users may omit the namespace."""
        config = self._context.config
        given = getattr(config, option)
        is_named = isinstance(given, Mapping) and topic in given
        return config.for_topic(option, topic if is_named else unwrap(config.namespace, topic))

    def _budget(self, topic: str) -> MemoryBudget:
        """Return the memory budget of all held queues, or of those of `topic`."""
        config = self._context.config
        scope = "" if isinstance(config.max_cached_bytes, int) else topic
        if scope not in self._budgets:
            limit = self._topic_option("max_cached_bytes", topic)
            self._budgets[scope] = MemoryBudget(limit, self._context.loop, self._is_idle, config.max_body_bytes)
        return self._budgets[scope]

    def _is_idle(self) -> bool:
        """Return whether at least one worker has nothing to do."""
        workers = self._calls.workers()
        return not any(each.waiting() for each in workers) and any(
            slot.chunk is None for each in workers for slot in each.slots
        )

    async def end(self, queue: MessageQueue, why: str) -> None:
        """Give up `queue`: wait a moment for running calls, store the final offset, forget the queue."""
        if queue in self._held and queue not in self._ending:
            self._ending.add(queue)
            await self._context.tasks.finish(self._end(queue, why), f"giving up {queue}")

    async def _end(self, queue: MessageQueue, why: str) -> None:
        context = self._context
        try:
            async with self._lock(queue):
                assignment = self._held.get(queue)
                if assignment is None or assignment.ended:
                    return
                self._stop(assignment)
                # Store the finished messages before the wait, because the next owner may begin during it.
                await self._commits.persist([queue])
                await self._wait_for_calls(assignment)
                is_running = self._calls.running(assignment.window) > 0
                final = self._fence(assignment)
                try:
                    await self._commits.release(queue)
                    if self._locks is not None and not is_running:
                        await self._locks.release([queue])  # only now, so that the next owner reads this offset
                except RocketError as error:
                    context.emit(
                        EventKind.COMMIT_FAILED,
                        f"the final offset {final} could not be stored; messages will be redelivered: {error}",
                        queue,
                        level=logging.WARNING,
                    )
                del self._held[queue]  # only now, because a close meanwhile stores the offsets of held queues
        finally:
            self._ending.discard(queue)
        context.emit(EventKind.QUEUE_REVOKED, f"{why} at {final}", queue, {"offset": final})

    def recheck_log(self, broker_name: str) -> None:
        """Stop the listener calls of a broker's claimed queues until their logs are checked.

        The broker may have lost its last messages.
        """
        for queue, assignment in self._held.items():
            window = assignment.window
            if queue.broker_name == broker_name and window.claim is not None and not assignment.ended:
                self._log_checks[queue] = check = object()
                if self._locks is None:
                    window.locked_until = float("-inf")
                work = self._check_log_again(window, window.claim, check)
                self._context.tasks.begin(work, f"checking the log of {queue}")

    async def _check_log_again(self, window: ProcessQueue, claim: Claim, check: object) -> None:
        """Continue a queue whose log is still the one that was consumed; reassign a queue with another log."""
        queue, pause_s = window.queue, 0.1
        while self._log_checks.get(queue) is check and not window.dropped:
            try:
                is_same_log = await self._divergence_check.is_same_log(claim)
            except RocketError as error:
                text = f"the log could not be checked after the broker was down: {error}"
                self._context.emit_throttled(EventKind.BROKER_UNREACHABLE, text, queue)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
                continue
            if self._log_checks.get(queue) is not check or window.dropped:
                return
            del self._log_checks[queue]
            if not is_same_log:
                await self.end_and_reassign(queue, "its broker was down, and now has another log")
            elif self._locks is None:
                window.locked_until = float("inf")
                self._calls.resume_calls(window)

    async def end_and_reassign(self, queue: MessageQueue, why: str) -> None:
        """Give up `queue`, and request a rebalance. It begins the queue again, and checks its log before pulling."""
        await self.end(queue, why)
        self._context.rebalance_wanted.set()

    async def lose(self, window: ProcessQueue) -> None:
        """End a queue whose lock the broker has given to another member, without a commit."""
        queue = window.queue
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is None or assignment.window is not window or assignment.ended:
                return
            self._stop(assignment)
            final = self._fence(assignment)
            del self._held[queue]
            self._commits.forget(queue)
        self._context.emit(
            EventKind.LOCK_LOST,
            f"another member has the lock; messages up to {final} may be redelivered",
            queue,
            level=logging.WARNING,
        )
        self._context.rebalance_wanted.set()

    def _on_fenced(self, queue: MessageQueue, why: str) -> None:
        """End a queue that another member has claimed, or that was reset in the database."""
        assignment = self._held.get(queue)
        if assignment is not None and queue not in self._ending:
            work = self._end_fenced(queue, assignment.window, why)
            self._context.tasks.begin(work, f"ending {queue}, which was fenced")

    async def _end_fenced(self, queue: MessageQueue, window: ProcessQueue, why: str) -> None:
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is not None and assignment.window is window and not assignment.ended:
                self._stop(assignment)
                self._fence(assignment)
                self._forget_fenced(queue, why)

    def _forget_fenced(self, queue: MessageQueue, why: str) -> None:
        """Forget a queue that another member has claimed, after its window was fenced. The caller holds its lock."""
        del self._held[queue]
        self._commits.forget(queue)
        self._context.emit(
            EventKind.QUEUE_FENCED,
            f"{why}; uncommitted offsets are discarded",
            queue,
            level=logging.WARNING,
        )
        self._context.rebalance_wanted.set()

    def _fence(self, assignment: Assignment) -> int | None:
        final = assignment.window.fence()
        self._calls.forget(assignment.window)
        if not assignment.ended:
            assignment.ended = True
            self._counts.add(assignment.window.queue.topic, _totals_of(assignment))
        return final

    @staticmethod
    def _stop(assignment: Assignment) -> None:
        assignment.pull_loop.stop()
        assignment.window.drop()

    async def _wait_for_calls(self, assignment: Assignment) -> None:
        context, window = self._context, assignment.window
        deadline = context.loop.time() + (ORDERLY_REVOKE_GRACE_S if context.config.orderly else REVOKE_GRACE_S)
        while self._calls.running(window) and context.loop.time() < deadline and not assignment.ended:  # noqa: ASYNC110 - counting would cost time in each call
            await asyncio.sleep(0.005)

    def fence_all(self) -> list[MessageQueue]:
        """Fence every window, so that later acks are ignored. Return the queues whose offsets must be stored."""
        for assignment in self._held.values():
            self._stop(assignment)
            self._fence(assignment)
        return list(self._held)

    # --- where to start

    async def _start_offset(self, queue: MessageQueue, is_new: bool) -> tuple[int, str]:
        context, commits = self._context, self._commits
        # Find the first start now, so that messages sent while the database does not respond come after it.
        if isinstance(context.config.offset_store, DatabaseOffsets) and queue not in self._first_starts:
            self._first_starts[queue] = await self._first_start(queue, is_new)
        stored = await commits.start_offset(queue)
        broker = context.cluster.broker(queue.broker_name)
        known = commits.last_known(queue)
        if stored is not None:
            if known is None or stored >= known:
                return stored, "stored"
            return await self._resolve_older_offset(queue, stored, known)
        if known is not None and known > await broker.max_offset(queue):
            text = f"the broker has lost this queue and the group's offset ({known}); beginning at its first message"
            context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": known}, level=logging.WARNING)
            return await broker.min_offset(queue), "the queue was recreated"
        if known is not None:
            text = "the broker has lost the offset of this group; continuing at the last offset that this member knows"
            context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": known}, level=logging.WARNING)
            return known, "last known by this member"
        lost = commits.lost_claim(queue)
        if lost is not None and await self._divergence_check.is_same_log(lost):
            text = "the database has lost the row of this queue; continuing at the last offset that was stored there"
            context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": lost.stored}, level=logging.WARNING)
            return lost.stored, "last known by this member"
        # Keep the first start until it is stored, because the queue's end may advance while a broker stores it.
        if queue not in self._first_starts:
            self._first_starts[queue] = await self._first_start(queue, is_new)
        return self._first_starts[queue]

    async def _first_start(self, queue: MessageQueue, is_new: bool) -> tuple[int, str]:
        """Return the start offset of a queue that the group has never consumed, and its origin."""
        broker = self._context.cluster.broker(queue.broker_name)
        if queue.topic.startswith(RETRY_PREFIX):
            return await broker.min_offset(queue), "retry topic"
        if is_new:
            return await broker.min_offset(queue), "queue added while consuming"
        where = self._context.config.consume_from
        if isinstance(where, datetime):
            return await self.offset_at(queue, int(where.timestamp() * 1000)), f"first start from {where.isoformat()}"
        if where == "first":
            return await broker.min_offset(queue), "first start from the first message"
        return await broker.max_offset(queue), "first start from the end"

    async def _resolve_older_offset(self, queue: MessageQueue, stored: int, known: int) -> tuple[int, str]:
        """Return the start offset when the broker has a lower offset than it had acknowledged to this member.

        A broker writes offsets to its disk every 5 s, and a slave copies them every 10 s. So a broker that was down, or
        is the new master, may have lost the offset. Otherwise a client has reset the group.
        """
        context, facts = self._context, {"stored": stored, "known": known}
        may_be_lost = self._commits.may_have_lost(queue)
        if may_be_lost and known <= await context.cluster.broker(queue.broker_name).max_offset(queue):
            text = f"the broker was down and has lost {stored} -> {known}; continuing at {known}, where this member was"
            context.emit(EventKind.OFFSET_WENT_BACK, text, queue, facts, level=logging.WARNING)
            return known, "last known by this member"
        text = f"the broker has {stored} and had acknowledged {known}, perhaps after a reset; continuing at {stored}"
        context.emit(EventKind.OFFSET_WENT_BACK, text, queue, facts, level=logging.WARNING)
        self._commits.invalidate(queue)
        return stored, "stored"

    async def offset_at(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message of `queue` stored at or after the time."""
        context = self._context
        return await context.cluster.broker(queue.broker_name).search_offset(queue, timestamp_ms, group=context.name)

    # --- moving

    async def move(
        self,
        queue: MessageQueue,
        target: int,
        expected: ProcessQueue | None,
        why: str,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Move `queue` to `target`: fence its window, store the target durably, open a new window, pull.

        Return False if this member no longer holds the queue. Also return False, without a move, if the queue has
        another window than `expected`, or if `unless()` is true when the move begins.
        """
        work = self._move(queue, target, expected, why, unless)
        return await self._context.tasks.finish(work, f"moving {queue} to {target}")

    async def _move(
        self, queue: MessageQueue, target: int, expected: ProcessQueue | None, why: str, unless: Callable[[], bool]
    ) -> bool:
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is None or (expected is not None and assignment.window is not expected) or unless():
                return False
            self.fence(queue)
            try:
                is_stored = await self._store(queue, target)
            except Fenced:
                self._forget_fenced(queue, "another member has claimed it")
                return False
            self.begin_next(assignment, target, why)
        return is_stored

    @asynccontextmanager
    async def lock_queues(self, queues: Iterable[MessageQueue]) -> AsyncIterator[None]:
        """Hold the locks of `queues`, so that no other task begins, moves or ends one of them."""
        async with AsyncExitStack() as stack:
            for queue in sorted(queues):  # in one order, so that two tasks cannot wait for each other
                await stack.enter_async_context(self._lock(queue))
            yield

    def fence(self, queue: MessageQueue) -> Assignment | None:
        """Fence the window of `queue`, so that late acks and responses change nothing. The caller holds its lock."""
        assignment = self._held.get(queue)
        if assignment is not None:
            self._stop(assignment)
            self._fence(assignment)
        return assignment

    def begin_next(self, fenced: Assignment, target: int, why: str) -> None:
        """Open the next window of a queue that was fenced. The caller has held its lock since then."""
        queue = fenced.window.queue
        if self._held.get(queue) is fenced and not self._context.closing:
            locked_until = fenced.window.locked_until if self._locks is not None else None
            pull_loop = self._open(queue, target, why, locked_until).pull_loop
            pull_loop.moves = fenced.pull_loop.moves
            pull_loop.pull()

    async def _store(self, queue: MessageQueue, target: int) -> bool:
        """Store `target` durably.

        Try until the broker acknowledges. If the disk is full, emit an event and continue from memory. Return False if
        the queue was given up, or the consumer closed, before the target was stored.

        Raises:
            Fenced: another member has claimed the queue; forget it.
        """
        context, pause_s = self._context, 0.1
        while True:
            try:
                await self._commits.overwrite(queue, target)
                return True
            except OffsetStoreError as error:
                context.emit(EventKind.STORE_UNWRITABLE, f"continuing from memory: {error}", queue, level=logging.ERROR)
                return True
            except Fenced:
                raise
            except RocketError as error:
                context.emit_throttled(
                    EventKind.COMMIT_FAILED, f"moving to {target} is not acknowledged yet: {error}", queue
                )
                if context.closing or queue in self._ending:
                    return False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
