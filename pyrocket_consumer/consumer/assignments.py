"""The queues we hold: how one begins, is corrected or reset, and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyrocket_consumer.consumer.process_queue import Budget, Limits, ProcessQueue
from pyrocket_consumer.consumer.puller import Puller
from pyrocket_consumer.consumer.statistics import Totals
from pyrocket_consumer.errors import OffsetStoreError, RocketError
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue, PullAnswer

if TYPE_CHECKING:
    from pyrocket_consumer.consumer.member import GroupMember

log = logging.getLogger("pyrocket_consumer.consumer")

MAX_OFFSET = 2**63 - 1

GRACE_S = 1.0
"""How long a queue that is taken away waits for the listener calls that run."""

ORDERLY_GRACE_S = 20.0
"""The same for an orderly queue: if its next owner began meanwhile, the order would be lost."""

DISBELIEF_TRIES = 5
DISBELIEF_PAUSE_S = 1.0


@dataclass(slots=True)
class Assignment:
    """One queue we hold: its window, its pull loop, and where it began."""

    window: ProcessQueue
    puller: Puller | None = None
    origin: str = ""
    start_offset: int = -1
    ended: bool = False


def _counted(assignment: Assignment) -> Totals:
    window, puller = assignment.window, assignment.puller
    if puller is None:
        return Totals(finished=window.finished)
    return Totals(puller.pulls, puller.pull_time_s, puller.pulled, window.finished)


class Assignments:
    """Queues held, by queue. Confined to the I/O thread."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._held: dict[MessageQueue, Assignment] = {}
        self._epochs: dict[MessageQueue, int] = {}
        self._changing: dict[MessageQueue, asyncio.Lock] = {}
        self._leaving: set[MessageQueue] = set()
        self._budgets: dict[str, Budget] = {}  # by topic, or one for all
        self._past: dict[str, Totals] = {}  # of queues that have ended, and what is not counted by queue

    # --- what is held

    def get(self, queue: MessageQueue) -> Assignment | None:
        return self._held.get(queue)

    def all(self) -> dict[MessageQueue, Assignment]:
        """Return a copy of what is held."""
        return dict(self._held)

    def held(self, topic: str) -> list[MessageQueue]:
        return [queue for queue in self._held if queue.topic == topic]

    def topics(self) -> set[str]:
        return {queue.topic for queue in self._held}

    def totals(self) -> dict[str, Totals]:
        """Return what has happened to the messages of each topic since the start."""
        totals = {topic: replace(past) for topic, past in self._past.items()}
        for queue, assignment in self._held.items():
            if not assignment.ended:
                totals.setdefault(queue.topic, Totals()).add(_counted(assignment))
        return totals

    def count(self, topic: str, *, failed: int = 0, sent_back: int = 0) -> None:
        """Count messages whose listener failed, and those that were sent back or given up."""
        self._past.setdefault(topic, Totals()).add(Totals(failed=failed, sent_back=sent_back))

    def listener_time_s(self, topic: str) -> float:
        """Return how long listener calls of `topic` take at present, on average."""
        times = [each.window.listener_time_s for queue, each in self._held.items() if queue.topic == topic]
        return sum(times) / len(times) if times else 0.0

    def _lock(self, queue: MessageQueue) -> asyncio.Lock:
        return self._changing.setdefault(queue, asyncio.Lock())

    # --- a queue's life

    async def begin(self, queue: MessageQueue) -> bool:
        """Take `queue` on and start pulling. Returns False when its start offset cannot be told now."""
        member = self._member
        await member.resets.before_begin(queue)  # what was reset while we were away counts for its start offset
        async with self._lock(queue):
            if queue in self._held or queue.topic not in member.topics() or member.closing:
                return True
            locked_until = None
            try:
                if member.locks is not None:
                    locked_until = await member.locks.take(queue)  # before the offset is read: no owner commits after
                    if locked_until is None:
                        return False  # its last owner has it still
                offset, origin = await self._start_offset(queue)
            except RocketError as error:
                member.trouble(
                    EventKind.BROKER_UNREACHABLE, f"start offset of {queue} is not known yet: {error}", queue
                )
                return False
            assignment = self._open(queue, offset, origin, locked_until)
        member.event(
            EventKind.QUEUE_ASSIGNED, f"starts at {offset} ({origin})", queue, {"offset": offset, "origin": origin}
        )
        assert assignment.puller is not None
        assignment.puller.pull()
        return True

    def _open(
        self, queue: MessageQueue, offset: int, origin: str, locked_until: float | None = None
    ) -> Assignment:
        member, config = self._member, self._member.config
        epoch = self._epochs[queue] = self._epochs.get(queue, 0) + 1
        limits = Limits(
            config.for_topic("max_cached_messages", queue.topic),
            MAX_OFFSET if config.orderly else config.max_span,
        )
        budget = self._budget(queue.topic)
        window = ProcessQueue(
            queue, epoch, limits, member.commits.update, member.wake, self._member.loop.time, budget=budget
        )
        if locked_until is not None:
            window.locked_until = locked_until
        window.start(offset)
        batch = min(config.for_topic("pull_batch_size", queue.topic), limits.messages)
        puller = Puller(
            member,
            window,
            offset,
            batch=batch,
            hold_s=config.pull_hold_s,
            call_timeout_s=config.call_timeout_s,
            retry_delay_s=config.pull_retry_delay_s,
        )
        assignment = self._held[queue] = Assignment(window, puller, origin, offset)
        return assignment

    def _budget(self, topic: str) -> Budget:
        """Return what bounds the bytes of all queues held, or of those of `topic`."""
        config = self._member.config
        scope = "" if isinstance(config.max_cached_bytes, int) else topic
        if scope not in self._budgets:
            limit = config.for_topic("max_cached_bytes", topic)
            self._budgets[scope] = Budget(limit, self._member.loop, self._is_idle)
        return self._budgets[scope]

    def _is_idle(self) -> bool:
        """Tell whether some worker has nothing to do."""
        workers = self._member.service.workers()
        return not any(each.waiting() for each in workers) and any(
            slot.chunk is None for each in workers for slot in each.slots
        )

    async def end(self, queue: MessageQueue, why: str) -> None:
        """Give `queue` up: let what runs finish for a moment, store the final offset, forget it."""
        self._leaving.add(queue)
        async with self._lock(queue):
            self._leaving.discard(queue)
            assignment = self._held.get(queue)
            if assignment is None:
                return
            self._stop(assignment)
            await self._grace(assignment.window)
            is_running = self._member.service.running(assignment.window) > 0
            final = self._fence(assignment)
            try:
                await self._member.commits.release(queue)
                if self._member.locks is not None and not is_running:
                    await self._member.locks.release([queue])  # only now: the next owner must find this offset
            except RocketError as error:
                self._member.event(
                    EventKind.COMMIT_FAILED,
                    f"the final offset {final} could not be stored; messages will come again: {error}",
                    queue,
                    level=logging.WARNING,
                )
            del self._held[queue]  # only now: a close that comes in between stores what is held
        self._member.event(EventKind.QUEUE_REVOKED, f"{why} at {final}", queue, {"offset": final})

    async def lose(self, queue: MessageQueue) -> None:
        """The broker has given the queue's lock to another member: nothing more is consumed, and nothing committed."""
        member = self._member
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is None:
                return
            self._stop(assignment)
            final = self._fence(assignment)
            del self._held[queue]
            member.commits.forget(queue)
        member.event(
            EventKind.LOCK_LOST,
            f"another member has the lock; what was consumed up to {final} may come again",
            queue,
            level=logging.WARNING,
        )
        member.rebalance.soon()

    def _fence(self, assignment: Assignment) -> int | None:
        final = assignment.window.fence()
        self._member.service.forget(assignment.window)
        assignment.ended = True
        self._past.setdefault(assignment.window.queue.topic, Totals()).add(_counted(assignment))
        return final

    def _stop(self, assignment: Assignment) -> None:
        if assignment.puller is not None:
            assignment.puller.stop()
        assignment.window.drop()

    async def _grace(self, window: ProcessQueue) -> None:
        deadline = self._member.loop.time() + (ORDERLY_GRACE_S if self._member.config.orderly else GRACE_S)
        while self._member.service.running(window) and self._member.loop.time() < deadline:  # noqa: ASYNC110 - workers keep no count: it would cost each call
            await asyncio.sleep(0.005)

    def stop_pulling(self) -> None:
        """Pull nothing more; what is cached stays."""
        for assignment in self._held.values():
            if assignment.puller is not None:
                assignment.puller.stop()

    def fence_all(self) -> list[MessageQueue]:
        """End every queue's life: later acks are ignored. Returns the queues whose offset is to be stored."""
        for assignment in self._held.values():
            self._stop(assignment)
            self._fence(assignment)
        return list(self._held)

    # --- where to start

    async def _start_offset(self, queue: MessageQueue) -> tuple[int, str]:
        member = self._member
        stored = await member.commits.start_offset(queue)
        if stored is not None:
            return stored, "stored"
        broker = member.cluster.broker(queue.broker_name)
        known = member.commits.last_known(queue)
        if known is not None and known <= await broker.max_offset(queue):  # else the topic was made anew
            text = "the broker has no offset of this group any more; going on where this member last knew it to be"
            member.event(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": known}, level=logging.WARNING)
            return known, "last known by this member"
        if queue.topic.startswith(RETRY_PREFIX):
            return await broker.min_offset(queue), "retry topic"
        if member.rebalance.is_new(queue):
            return await broker.min_offset(queue), "queue added while we consume"
        where = member.config.consume_from
        if isinstance(where, datetime):
            return await self.offset_at(queue, int(where.timestamp() * 1000)), f"first start from {where.isoformat()}"
        if where == "first":
            return await broker.min_offset(queue), "first start from the first message"
        return await broker.max_offset(queue), "first start from the end"

    async def offset_at(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message of `queue` stored at or after the time."""
        member = self._member
        return await member.cluster.broker(queue.broker_name).search_offset(queue, timestamp_ms, group=member.group)

    # --- corrections and resets

    async def follow(self, puller: Puller, asked: int, answer: PullAnswer) -> None:
        """Obey a broker that moved the offset of a queue; one that seems not to be ready is asked again first."""
        member, queue = self._member, puller.queue
        if answer.offset_reset:
            await member.resets.met_mark(queue, answer, asked)
            return
        target = answer.next_offset
        if target < asked:
            target = await self._believed(puller.window, asked, target)
            if target == asked:
                puller.ask_again()
                return
        # What is cached lies before the correction, and the broker may have lost it: it is consumed first. An end of
        # the window now would pass it over.
        if not await self._finished(puller.window):
            return
        facts = {"from": asked, "to": target, "min": answer.min_offset, "max": answer.max_offset}
        if await self.move(queue, target, puller.window, "correction"):
            member.event(EventKind.OFFSET_CORRECTED, f"{asked} -> {target}", queue, facts, level=logging.WARNING)
            if target > asked:
                member.event(
                    EventKind.RANGE_SKIPPED,
                    f"{asked} to {target - 1} are not at the broker any more",
                    queue,
                    facts,
                    level=logging.WARNING,
                )

    async def _believed(self, window: ProcessQueue, asked: int, target: int) -> int:
        """Return where a correction backwards leads, after the broker was asked several times: it may be loading.

        A broker that does not answer confirms nothing.
        """
        queue, answers = window.queue, 0
        broker = self._member.cluster.broker(queue.broker_name)
        while answers < DISBELIEF_TRIES and not window.dropped:
            await asyncio.sleep(DISBELIEF_PAUSE_S)
            try:
                highest, lowest = await broker.max_offset(queue), await broker.min_offset(queue)
            except RocketError as error:
                text = f"a correction from {asked} to {target} waits for the queue's range: {error}"
                self._member.trouble(EventKind.BROKER_UNREACHABLE, text, queue)
                continue
            if lowest <= asked <= highest:
                log.info(
                    "queue=%s a correction from %d to %d is not followed: the range is %d to %d",
                    queue, asked, target, lowest, highest,
                )
                return asked
            answers += 1
            target = min(max(asked, lowest), highest)
        return target

    async def _finished(self, window: ProcessQueue) -> bool:
        """Wait until nothing of `window` is unfinished; False if its life ends before."""
        while not window.dropped and window.unfinished()[0]:  # noqa: ASYNC110 - acks tell nobody: it would cost each
            await asyncio.sleep(0.01)
        return not window.dropped

    async def move(
        self,
        queue: MessageQueue,
        target: int,
        expected: ProcessQueue | None,
        why: str,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Begin `queue` anew at `target`: fence, store durably, new epoch, pull. False if it is not ours (any more).

        `expected`: do nothing if the queue has another window by now. `unless`: nor if this holds when its turn comes.
        """
        async with self._lock(queue):
            assignment = self._held.get(queue)
            if assignment is None or (expected is not None and assignment.window is not expected) or unless():
                return False
            self.fence(queue)
            await self._store(queue, target)
            self.begin_anew(assignment, target, why)
        return True

    @asynccontextmanager
    async def kept_still(self, queues: Iterable[MessageQueue]) -> AsyncIterator[None]:
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

    def begin_anew(self, fenced: Assignment, target: int, why: str) -> None:
        """Begin the next period of a queue that was fenced, and is kept still since then."""
        queue = fenced.window.queue
        if self._held.get(queue) is fenced and not self._member.closing:
            fresh = self._open(queue, target, why, fenced.window.locked_until)
            assert fresh.puller is not None
            fresh.puller.pull()

    async def _store(self, queue: MessageQueue, target: int) -> None:
        """Store `target` durably. A broker is asked until it acknowledges; a full disk is told, memory goes on."""
        member, pause_s = self._member, 0.1
        while True:
            try:
                await member.commits.replace(queue, target)
                return
            except OffsetStoreError as error:
                member.event(EventKind.STORE_UNWRITABLE, f"going on from memory: {error}", queue, level=logging.ERROR)
                return
            except RocketError as error:
                member.trouble(EventKind.COMMIT_FAILED, f"moving to {target} is not acknowledged yet: {error}", queue)
                if member.closing or queue in self._leaving:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
