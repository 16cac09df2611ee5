"""The queues of a member: those that it holds, and those that it knows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from pyrocket_consumer.cluster.names import unwrap
from pyrocket_consumer.consumer.assignment.held_queue import (
    HeldQueue,
    QueueParts,
    QueueProgress,
)
from pyrocket_consumer.consumer.assignment.locks import RENEW_EVERY_S, QueueLocks
from pyrocket_consumer.consumer.assignment.pull_loop import PullLoop
from pyrocket_consumer.consumer.assignment.registration import Resubscriber
from pyrocket_consumer.consumer.assignment.start_offsets import StartOffsets
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts, Totals
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService
from pyrocket_consumer.consumer.window.process_queue import Lease, Limits, MemoryBudget, ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import MAX_OFFSET


class Assignments:
    """The queues of a member. Confined to the I/O thread."""

    def __init__(
        self,
        context: MemberContext,
        commits: Commits,
        calls: ConsumeService,
        locks: QueueLocks | None,
        counts: Counts,
    ) -> None:
        self._context = context
        self._commits = commits
        self._resubscriber = Resubscriber(context)
        self._are_all_paused = False
        self._calls = calls
        self._locks = locks
        self._counts = counts
        self._parts = QueueParts(context, commits, calls, locks, counts, StartOffsets(context, commits), self._open)
        self._queues: dict[MessageQueue, HeldQueue] = {}
        self._limits: dict[str, tuple[Limits, int]] = {}
        self._budgets: dict[str, MemoryBudget] = {}  # by topic, or one for all
        self._woken: deque[HeldQueue] = deque()
        self._wake_due = False

    # --- the queues

    def queue(self, queue: MessageQueue) -> HeldQueue:
        """Return the state of `queue`, which may be new."""
        if (found := self._queues.get(queue)) is None:
            found = self._queues[queue] = HeldQueue(queue, self._parts)
        return found

    def find(self, queue: MessageQueue) -> HeldQueue | None:
        """Return the state of `queue`, None if nothing is known of it."""
        return self._queues.get(queue)

    def get(self, queue: MessageQueue) -> HeldQueue | None:
        """Return the state of `queue`, None if this member does not hold it."""
        found = self._queues.get(queue)
        return found if found is not None and found.is_held else None

    def known(self) -> list[HeldQueue]:
        """Return all queues that this member holds or has held, and those that it may hold soon."""
        return list(self._queues.values())

    def all(self) -> list[HeldQueue]:
        """Return the held queues."""
        return [each for each in self._queues.values() if each.is_held]

    def held(self, topic: str) -> list[MessageQueue]:
        """Return the held queues of `topic`, without those that are ending."""
        return [each.queue for each in self._queues.values() if each.queue.topic == topic and each.is_staying]

    def records(self, broker_name: str | None = None) -> list[CommitRecord]:
        """Return the commit records of all known queues, or of those of one broker."""
        return [each.commit for each in self._queues.values() if broker_name in (None, each.queue.broker_name)]

    def holds_queue_of(self, broker_name: str) -> bool:
        """Return whether a held queue is at this broker."""
        return any(each.queue.broker_name == broker_name and each.is_held for each in self._queues.values())

    @asynccontextmanager
    async def lock_queues(self, queues: Iterable[MessageQueue]) -> AsyncIterator[list[HeldQueue]]:
        """Hold the locks of `queues`, so that no other task begins, moves or ends one of them."""
        async with AsyncExitStack() as stack:
            locked = [self.queue(queue) for queue in sorted(queues)]  # in one order, so that two tasks cannot
            for each in locked:  # wait for each other
                await stack.enter_async_context(each.lock)
            yield locked

    # --- for tools

    def totals(self) -> dict[str, Totals]:
        """Return the statistics of each topic since the start."""
        totals = self._counts.past()
        for each in self.all():
            if each.window is not None and not each.window.fenced:
                totals.setdefault(each.queue.topic, Totals()).add(each.totals())
        return totals

    def listener_times(self) -> dict[str, float]:
        """Return the present average duration of the listener calls of each topic."""
        times: dict[str, list[float]] = {}
        for each in self.all():
            if each.window is not None:
                times.setdefault(each.queue.topic, []).append(each.window.listener_time_s)
        return {topic: sum(of_topic) / len(of_topic) for topic, of_topic in times.items()}

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        """Return the known offsets of `topic`."""
        return self._commits.table(topic, self.records())

    def progress(self) -> dict[MessageQueue, QueueProgress]:
        """Return the progress of each held queue."""
        held = sorted(self.all(), key=lambda each: each.queue)
        return {each.queue: each.progress() for each in held}

    # --- pulling

    def pause(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull no more from `queues`, or from all, and give up their pulls in flight."""
        self._are_all_paused = self._are_all_paused or queues is None
        for each in self.all() if queues is None else map(self.queue, queues):
            each.is_paused = each.is_paused or queues is not None
            if each.pulls is not None:
                each.pulls.pause()

    def resume(self, queues: Iterable[MessageQueue] | None) -> None:
        """Pull again from `queues`, or from all."""
        self._are_all_paused = self._are_all_paused and queues is not None
        for each in self.known() if queues is None else map(self.queue, queues):
            each.is_paused = False
            if each.pulls is not None and not self._are_all_paused:
                each.pulls.resume()

    def stop_pulling(self) -> None:
        """Stop all pulls; the cached messages stay."""
        for each in self.all():
            if each.pulls is not None:
                each.pulls.stop()

    def _wake(self, queue: HeldQueue) -> None:
        """Pull again for a window that has space now. Workers call it."""
        self._woken.append(queue)
        if not self._wake_due:  # one wake-up serves all windows added before it; an extra one does no harm
            self._wake_due = True
            self._context.call_soon(self._pull_woken)

    def _pull_woken(self) -> None:
        self._wake_due = False
        while self._woken:
            pulls = self._woken.popleft().pulls
            if pulls is not None:  # a loop that has stopped pulls no more
                pulls.pull()

    # --- windows

    def _open(self, held: HeldQueue, offset: int, lease: Lease) -> tuple[ProcessQueue, PullLoop]:
        queue = held.queue
        limits, batch = self._limits_of(queue.topic)
        window = ProcessQueue(
            queue,
            offset,
            limits,
            lambda window: self._wake(held),
            self._context.loop.time,
            on_edge=self._commits.edge_listener(held.commit),
            budget=self._budget(queue.topic),
            lease=lease,
        )
        pulls = PullLoop(self._context, self._calls.deliver, self._resubscriber, window, offset, batch)
        pulls.is_paused = held.is_paused or self._are_all_paused
        return window, pulls

    def _limits_of(self, topic: str) -> tuple[Limits, int]:
        """Return the limits of each queue of `topic`, and how many messages a pull asks for."""
        if topic not in self._limits:
            config = self._context.config
            span = MAX_OFFSET if config.orderly and config.order_by is None else config.max_span
            limits = Limits(self._topic_option("max_cached_messages", topic), span)
            self._limits[topic] = limits, min(self._topic_option("pull_batch_size", topic), limits.messages)
        return self._limits[topic]

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

    # --- locks and logs

    async def keep_locks(self, locks: QueueLocks) -> None:
        """Renew the locks of all held queues until cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            windows = [each.window for each in self.all() if each.window is not None]
            await locks.renew(windows, self._calls.resume_calls, self._lose_lock)

    async def _lose_lock(self, window: ProcessQueue) -> None:
        await self.queue(window.queue).lose_lock(window)

    def recheck_logs(self, broker_name: str) -> None:
        """Check the logs of a broker's claimed queues, because it may have lost its last messages."""
        for each in self.all():
            if each.queue.broker_name == broker_name:
                each.recheck_log()

    # --- the end

    async def end(self, topic: str, why: str) -> None:
        """Give up all queues of `topic`."""
        await asyncio.gather(*(self.queue(queue).end(why) for queue in self.held(topic)))

    def close(self) -> list[HeldQueue]:
        """Fence every window, so that later acks are ignored. Return the queues whose offsets must be stored."""
        held = self.all()
        for each in held:
            each.fence()
        return held
