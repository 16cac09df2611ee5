"""The timer that commits offsets every few seconds."""

from __future__ import annotations

import asyncio

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.model import EventKind

FULL_COMMIT_EVERY_S = 60.0
"""How often the timer also commits offsets that have not changed."""

SLOW_STORE_S = 10.0
"""How long a commit may take before an event reports it. Requests to brokers have deadlines; other stores may hang."""


class CommitTimer:
    """Commits the offsets of the held queues every `commit_interval_s`. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, commits: Commits, resets: Resets) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._resets = resets

    async def run(self) -> None:
        """Commit until cancelled."""
        context = self._context
        full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
        rounds: dict[str, tuple[asyncio.Task[None], float]] = {}  # the running commit of each store, and its start
        while True:
            await asyncio.sleep(context.config.commit_interval_s)
            if context.loop.time() >= full_commit_at:
                # a former owner that was cut off may have overwritten the offset of this member with its old one
                self._commits.mark_unpersisted(self._assignments.records())
                full_commit_at = context.loop.time() + FULL_COMMIT_EVERY_S
            records = [held.commit for held in self._assignments.all()]
            for store, of_store in self._commits.by_store(records).items():
                name, now = store or "the store", context.loop.time()
                if store not in rounds or rounds[store][0].done():  # a slow broker delays no other
                    rounds[store] = context.tasks.begin(self._persist(of_store), f"committing to {name}"), now
                elif of_store and (pending_s := now - rounds[store][1]) >= SLOW_STORE_S:
                    text = (
                        f"{name} has not stored offsets for {pending_s:.0f} s; "
                        "if this process ends now, the messages since then will be redelivered"
                    )
                    context.emit_throttled(EventKind.COMMIT_FAILED, text, of_store[0].queue)
            await context.tasks.finish(self._resets.persist(), "storing resets")

    async def _persist(self, records: list[CommitRecord]) -> None:
        """Store the offsets of queues that have changed since the last commit."""
        failed = await self._commits.persist(records)
        for queue, error in failed.items():
            text = f"not stored, next attempt in {self._context.config.commit_interval_s:g} s: {error}"
            self._context.emit_throttled(EventKind.COMMIT_FAILED, text, queue)
