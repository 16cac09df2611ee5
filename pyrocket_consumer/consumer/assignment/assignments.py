"""The queues we hold: how one begins, moves, and ends. Each of these is a step of the member's own."""

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
from pyrocket_consumer.consumer.dispatch.concurrent import Workers
from pyrocket_consumer.consumer.pulling.pull_host import MemberPullHost
from pyrocket_consumer.consumer.pulling.pull_loop import PullLoop
from pyrocket_consumer.consumer.window.memory_budget import MemoryBudget
from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.errors import DatabaseError, Fenced, OffsetStoreError, RocketError
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.text import logger

log = logger("consumer")

MAX_OFFSET = 2**63 - 1

REVOKE_GRACE_S = 1.0
"""How long a queue that is taken away waits for the listener calls that run."""

ORDERLY_REVOKE_GRACE_S = 20.0
"""The same for an orderly queue: if its next owner began meanwhile, the order would be lost."""


class ListenerCalls(Protocol):
    """What runs the listener calls of windows."""

    def running(self, window: ProcessQueue | None = None) -> int:
        """Return how many listener calls are running (of `window`)."""

    def forget(self, window: ProcessQueue) -> None:
        """The window's life has ended."""

    def resume_calls(self, window: ProcessQueue) -> None:
        """Calls of the window may begin again."""

    def workers(self) -> list[Workers]:
        """Return the kinds of workers in use."""


@dataclass(slots=True)
class Assignment:
    """One queue we hold: its window, its pull loop, and where it began."""

    window: ProcessQueue
    pull_loop: PullLoop
    origin: str
    start_offset: int
    ended: bool = False


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """Where one queue stands. Offsets are the next to consume; `broker_max` is the end at the last pull's answer.

    `oldest_key` is the key of the oldest unfinished message, with `order_by`: it holds the offset to commit.
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
        """How many offsets lie between what is committed and the broker's end."""
        return max(0, self.broker_max - (self.committed if self.committed is not None else self.start_offset))


def _event_kind_of(error: RocketError) -> EventKind:
    return EventKind.STORE_UNREACHABLE if isinstance(error, DatabaseError) else EventKind.BROKER_UNREACHABLE


def _totals_of(assignment: Assignment) -> Totals:
    window, pull_loop = assignment.window, assignment.pull_loop
    return Totals(pull_loop.pulls, pull_loop.pull_time_s, pull_loop.pulled, window.finished)


class Assignments:
    """Queues held, by queue. Confined to the I/O thread, but for `wake`."""

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
        self._first_starts: dict[MessageQueue, tuple[int, str]] = {}  # found out, and not known to be stored yet
        self._budgets: dict[str, MemoryBudget] = {}  # by topic, or one for all
        self._woken: deque[ProcessQueue] = deque()
        self._wake_due = False
        self._divergence_check = DivergenceCheck(
            context, lambda queue, response: pull_host.on_late_reset(queue, response)
        )
        commits.on_fenced = self._on_fenced
        context.cluster.keep_reachable(self._holds_queue_of)

    # --- what is held

    def get(self, queue: MessageQueue) -> Assignment | None:
        return self._held.get(queue)

    def is_begun(self, queue: MessageQueue) -> bool:
        """Tell whether `queue` is held, or is just being begun, moved or ended."""
        return queue in self._held or queue in self._queue_locks

    def all(self) -> dict[MessageQueue, Assignment]:
        """Return a copy of what is held."""
        return dict(self._held)

    def windows(self) -> dict[MessageQueue, ProcessQueue]:
        """Return the windows of all queues held."""
        return {queue: assignment.window for queue, assignment in self._held.items()}

    def held(self, topic: str) -> list[MessageQueue]:
        """Return the queues of `topic` that are ours, and that we are not giving up."""
        return [queue for queue in self._held if queue.topic == topic and queue not in self._ending]

    def _holds_queue_of(self, broker_name: str) -> bool:
        return any(queue.broker_name == broker_name for queue in self._held)

    def topics(self) -> set[str]:
        return {queue.topic for queue in self._held}

    def totals(self) -> dict[str, Totals]:
        """Return what has happened to the messages of each topic since the start."""
        totals = self._counts.past()
        for queue, assignment in self._held.items():
            if not assignment.ended:
                totals.setdefault(queue.topic, Totals()).add(_totals_of(assignment))
        return totals

    def listener_time_s(self, topic: str) -> float:
        """Return how long listener calls of `topic` take at present, on average."""
        times = [each.window.listener_time_s for queue, each in self._held.items() if queue.topic == topic]
        return sum(times) / len(times) if times else 0.0

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return where each queue we hold stands."""
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
        """Have queues that are paused by now take nothing of what they have asked for."""
        for queue, assignment in self._held.items():
            if self._pull_host.paused(queue):
                assignment.pull_loop.pause()

    def pull_all(self) -> None:
        """Pull whatever there is room for: a pause is over."""
        for assignment in self._held.values():
            assignment.pull_loop.pull()

    def stop_pulling(self) -> None:
        """Pull nothing more; what is cached stays."""
        for assignment in self._held.values():
            assignment.pull_loop.stop()

    def wake(self, window: ProcessQueue) -> None:
        """Room was made in a window whose puller waits for it. Called by workers."""
        self._woken.append(window)
        if not self._wake_due:  # one wake-up serves all that come before it; two now and then do no harm
            self._wake_due = True
            self._context.call_soon(self._pull_woken)

    def _pull_woken(self) -> None:
        self._wake_due = False
        while self._woken:
            window = self._woken.popleft()
            assignment = self._held.get(window.queue)
            if assignment is not None and assignment.window is window:
                assignment.pull_loop.pull()

    # --- a queue's life

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
        """Take `queue` on and start pulling. Returns False when its start offset cannot be told or stored now.

        `is_new`: it was added to its topic while we consume. `is_ours` is asked again before each thing that could
        not be taken back. `recorded`: a reset that was made while nobody had claimed the queue.
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
                    locked_until = await self._locks.acquire(queue)  # before the offset is read: no owner commits after
                    if locked_until is None:
                        text = "another member has its lock still; it begins when that is given back, or expires"
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
                if is_wanted() and (origin != "stored" or offset == 0):  # brokers of 4.9 say 0 where they have none
                    storing = True
                    await self._store_start(queue, offset)
                    if claim is None and recorded is not None:  # its start rule holds, and later ones do not follow
                        await self._commits.apply_resets({queue: QueueReset(None, recorded.epoch)})
            except Fenced:  # another member was quicker to begin it
                await self._unlock(queue)
                return False
            except RocketError as error:
                text = f"where {queue} begins is not known or not stored yet: {error}"
                context.emit_throttled(_event_kind_of(error), text, queue)
                if not storing:  # else the broker may still execute it, and no other owner may have begun then
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
        text = f"-> {recorded.offset} (recorded while nobody had the queue)"
        self._context.emit(EventKind.OFFSET_RESET, text, queue, facts, level=logging.WARNING)
        return recorded.offset

    async def _store_start(self, queue: MessageQueue, offset: int) -> None:
        """Store where `queue` begins, durably, before one message of it is pulled.

        Until then, whoever takes the queue over would begin at a place of his own, and what lies between would never
        be consumed.
        """
        try:
            await self._commits.store_start(queue, offset)
        except OffsetStoreError as error:
            text = f"going on from memory: {error}"
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
        """Return a per-topic option for a topic as brokers know it; users name it with its namespace, or without."""
        config = self._context.config
        given = getattr(config, option)
        is_named = isinstance(given, Mapping) and topic in given
        return config.for_topic(option, topic if is_named else unwrap(config.namespace, topic))

    def _budget(self, topic: str) -> MemoryBudget:
        """Return what bounds the bytes of all queues held, or of those of `topic`."""
        config = self._context.config
        scope = "" if isinstance(config.max_cached_bytes, int) else topic
        if scope not in self._budgets:
            limit = self._topic_option("max_cached_bytes", topic)
            self._budgets[scope] = MemoryBudget(limit, self._context.loop, self._is_idle, config.max_body_bytes)
        return self._budgets[scope]

    def _is_idle(self) -> bool:
        """Tell whether some worker has nothing to do."""
        workers = self._calls.workers()
        return not any(each.waiting() for each in workers) and any(
            slot.chunk is None for each in workers for slot in each.slots
        )

    async def end(self, queue: MessageQueue, why: str) -> None:
        """Give `queue` up: let what runs finish for a moment, store the final offset, forget it."""
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
                # What is finished is stored before the wait for what is not: the next owner does not wait as long.
                await self._commits.persist([queue])
                await self._wait_for_calls(assignment)
                is_running = self._calls.running(assignment.window) > 0
                final = self._fence(assignment)
                try:
                    await self._commits.release(queue)
                    if self._locks is not None and not is_running:
                        await self._locks.release([queue])  # only now: the next owner must find this offset
                except RocketError as error:
                    context.emit(
                        EventKind.COMMIT_FAILED,
                        f"the final offset {final} could not be stored; messages will come again: {error}",
                        queue,
                        level=logging.WARNING,
                    )
                del self._held[queue]  # only now: a close that comes in between stores what is held
        finally:
            self._ending.discard(queue)
        context.emit(EventKind.QUEUE_REVOKED, f"{why} at {final}", queue, {"offset": final})

    def recheck_log(self, broker_name: str) -> None:
        """A broker may have lost what came last: its claimed queues go on when they were looked at."""
        for queue, assignment in self._held.items():
            window = assignment.window
            if queue.broker_name == broker_name and window.claim is not None and not assignment.ended:
                self._log_checks[queue] = check = object()
                if self._locks is None:
                    window.locked_until = float("-inf")
                self._context.tasks.begin(self._check_log_again(window, window.claim, check), f"looking at {queue}")

    async def _check_log_again(self, window: ProcessQueue, claim: Claim, check: object) -> None:
        """Have a queue go on whose log is the one that was consumed; another one is taken on as if it was new."""
        queue, pause_s = window.queue, 0.1
        while self._log_checks.get(queue) is check and not window.dropped:
            try:
                is_same_log = await self._divergence_check.is_same_log(claim)
            except RocketError as error:
                text = f"whether its log is still the one that was consumed is not known: {error}"
                self._context.emit_throttled(EventKind.BROKER_UNREACHABLE, text, queue)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
                continue
            if self._log_checks.get(queue) is not check or window.dropped:
                return
            del self._log_checks[queue]
            if not is_same_log:
                await self.end_and_reassign(queue, "its broker was away, and its log is another one")
            elif self._locks is None:
                window.locked_until = float("inf")
                self._calls.resume_calls(window)

    async def end_and_reassign(self, queue: MessageQueue, why: str) -> None:
        """Give `queue` up, and take it on as if it was new to us: its last message is looked at before the next one."""
        await self.end(queue, why)
        self._context.rebalance_wanted.set()

    async def lose(self, window: ProcessQueue) -> None:
        """The broker has given the queue's lock to another member: nothing more is consumed, and nothing committed."""
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
            f"another member has the lock; what was consumed up to {final} may come again",
            queue,
            level=logging.WARNING,
        )
        self._context.rebalance_wanted.set()

    def _on_fenced(self, queue: MessageQueue, why: str) -> None:
        """Another member has claimed `queue`, or it was reset in the database: nothing we do for it counts any more."""
        assignment = self._held.get(queue)
        if assignment is not None and queue not in self._ending:
            work = self._end_fenced(queue, assignment.window, why)
            self._context.tasks.begin(work, f"giving way at {queue}")

    async def _end_fenced(self, queue: MessageQueue, window: ProcessQueue, why: str) -> None:
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is not None and assignment.window is window and not assignment.ended:
                self._stop(assignment)
                self._fence(assignment)
                self._forget_fenced(queue, why)

    def _forget_fenced(self, queue: MessageQueue, why: str) -> None:
        """Forget a queue that was claimed by another, after its period has ended. The queue is kept still."""
        del self._held[queue]
        self._commits.forget(queue)
        self._context.emit(
            EventKind.QUEUE_FENCED,
            f"{why} by then never will be",
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
        while self._calls.running(window) and context.loop.time() < deadline and not assignment.ended:  # noqa: ASYNC110 - workers keep no count: it would cost each call
            await asyncio.sleep(0.005)

    def fence_all(self) -> list[MessageQueue]:
        """End every queue's life: later acks are ignored. Returns the queues whose offset is to be stored."""
        for assignment in self._held.values():
            self._stop(assignment)
            self._fence(assignment)
        return list(self._held)

    # --- where to start

    async def _start_offset(self, queue: MessageQueue, is_new: bool) -> tuple[int, str]:
        context, commits = self._context, self._commits
        # What is sent while a database does not answer comes after the start, too.
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
            text = f"the broker has lost this queue, and where the group was ({known}); beginning with what is there"
            context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": known}, level=logging.WARNING)
            return await broker.min_offset(queue), "the queue was made anew"
        if known is not None:
            text = "the broker has no offset of this group any more; going on where this member last knew it to be"
            context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": known}, level=logging.WARNING)
            return known, "last known by this member"
        # Until it is stored it stays what it was at first: the end may move on while the broker is asked to store it.
        if queue not in self._first_starts:
            self._first_starts[queue] = await self._first_start(queue, is_new)
        return self._first_starts[queue]

    async def _first_start(self, queue: MessageQueue, is_new: bool) -> tuple[int, str]:
        """Return where a queue begins that the group has never consumed."""
        broker = self._context.cluster.broker(queue.broker_name)
        if queue.topic.startswith(RETRY_PREFIX):
            return await broker.min_offset(queue), "retry topic"
        if is_new:
            return await broker.min_offset(queue), "queue added while we consume"
        where = self._context.config.consume_from
        if isinstance(where, datetime):
            return await self.offset_at(queue, int(where.timestamp() * 1000)), f"first start from {where.isoformat()}"
        if where == "first":
            return await broker.min_offset(queue), "first start from the first message"
        return await broker.max_offset(queue), "first start from the end"

    async def _resolve_older_offset(self, queue: MessageQueue, stored: int, known: int) -> tuple[int, str]:
        """Return where to go on when the broker has an older offset than it had acknowledged to this member.

        A broker writes offsets to its disk every 5 s, and a slave copies them every 10 s: one that was away, or is new
        as master, may have lost ours. If it was not, somebody has moved the group.
        """
        context, facts = self._context, {"stored": stored, "known": known}
        may_be_lost = self._commits.may_have_lost(queue)
        if may_be_lost and known <= await context.cluster.broker(queue.broker_name).max_offset(queue):
            text = f"the broker was away and has lost {stored} -> {known}; going on at {known}, where this member was"
            context.emit(EventKind.OFFSET_WENT_BACK, text, queue, facts, level=logging.WARNING)
            return known, "last known by this member"
        text = f"the broker has {stored} and had acknowledged {known}; somebody may have reset it: going on at {stored}"
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
        """Begin `queue` anew at `target`: fence, store durably, new epoch, pull. False if it is not ours any more.

        `expected`: do nothing if the queue has another window by now. `unless`: nor if this holds when its turn comes.
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
                self._forget_fenced(queue, "another member has claimed it; what of ours was not committed")
                return False
            self.begin_next(assignment, target, why)
        return is_stored

    @asynccontextmanager
    async def lock_queues(self, queues: Iterable[MessageQueue]) -> AsyncIterator[None]:
        """Within this, nobody else begins, moves or ends any of `queues`."""
        async with AsyncExitStack() as stack:
            for queue in sorted(queues):  # in one order, so that two who want the same do not wait for each other
                await stack.enter_async_context(self._lock(queue))
            yield

    def fence(self, queue: MessageQueue) -> Assignment | None:
        """End the present period of `queue`: late acks and answers change nothing. The queue is kept still."""
        assignment = self._held.get(queue)
        if assignment is not None:
            self._stop(assignment)
            self._fence(assignment)
        return assignment

    def begin_next(self, fenced: Assignment, target: int, why: str) -> None:
        """Begin the next period of a queue that was fenced, and is kept still since then."""
        queue = fenced.window.queue
        if self._held.get(queue) is fenced and not self._context.closing:
            locked_until = fenced.window.locked_until if self._locks is not None else None
            pull_loop = self._open(queue, target, why, locked_until).pull_loop
            pull_loop.moves = fenced.pull_loop.moves
            pull_loop.pull()

    async def _store(self, queue: MessageQueue, target: int) -> bool:
        """Store `target` durably. A broker is asked until it acknowledges; a full disk is told, memory goes on.

        Returns False if the queue was given up, or the consumer closed, before it was stored.

        Raises:
            Fenced: another member has claimed the queue.
        """
        context, pause_s = self._context, 0.1
        while True:
            try:
                await self._commits.overwrite(queue, target)
                return True
            except OffsetStoreError as error:
                context.emit(EventKind.STORE_UNWRITABLE, f"going on from memory: {error}", queue, level=logging.ERROR)
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
