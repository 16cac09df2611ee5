"""Offsets to their store, every few seconds."""

from __future__ import annotations

import asyncio

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.resets.resets import ResetFollower
from pyrocket_consumer.model import EventKind, MessageQueue

FULL_COMMIT_EVERY_S = 60.0
"""How often offsets are committed that have not changed."""

SLOW_STORE_S = 10.0
"""How long storing may take before it is told: brokers have a deadline, a disk or a store of the user's may hang."""


class CommitTimer:
    """Persists what was consumed of the queues held, every `commit_interval_s`. Confined to the I/O thread."""

    def __init__(
        self, context: MemberContext, assignments: Assignments, commits: Commits, resets: ResetFollower
    ) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._resets = resets

    async def run(self) -> None:
        """Persist until cancelled."""
        context = self._context
        full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
        rounds: dict[str, tuple[asyncio.Task[None], float]] = {}  # what is under way at each place, and since when
        while True:
            await asyncio.sleep(context.config.commit_interval_s)
            if context.loop.time() >= full_commit_at:
                # a former owner of a queue, cut off meanwhile, may have stored its old offset over ours
                self._commits.mark_unpersisted()
                full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
            for place, queues in self._commits.by_store(self._assignments.all()).items():
                name, now = place or "the store", context.loop.time()
                if place not in rounds or rounds[place][0].done():  # a broker that is slow to answer delays no other
                    rounds[place] = context.tasks.begin(self._persist(queues), f"committing to {name}"), now
                elif queues and (pending_s := now - rounds[place][1]) >= SLOW_STORE_S:
                    text = f"{name} has not stored offsets for {pending_s:.0f} s; the messages since then come again"
                    context.emit_throttled(EventKind.COMMIT_FAILED, f"{text} should this process end now", queues[0])
            await context.tasks.finish(self._resets.persist(), "storing resets")

    async def _persist(self, queues: list[MessageQueue]) -> None:
        """Store what was consumed of `queues` since the last time."""
        failed = await self._commits.persist(queues)
        for queue, error in failed.items():
            text = f"not stored, tried again in {self._context.config.commit_interval_s:g} s: {error}"
            self._context.emit_throttled(EventKind.COMMIT_FAILED, text, queue)
