"""Resets that this member follows: for its held queues, or with an epoch that is newer than the last one.

Brokers reset a clustering group. They cannot reset a broadcasting group, so this library has its own way. The admin
records the reset at each master and sends it to every member. Each reset has an epoch, and a member follows a reset
that is newer than its last one. It stores the epoch in the same durable write as the offset.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue, move_together
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue
from pyrocket_consumer.offsets import QueueReset
from pyrocket_consumer.protocol.reset_format import is_valid_epoch

SAME_RESET_WITHIN_S = 60.0
"""A second request with the same targets within this time is the same reset."""

MAX_REMEMBERED_RESETS = 64
"""How many resets a queue remembers, to move once for each."""


class Resets:
    """Follows the resets of one group. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, commits: Commits) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._is_memory_only_reported = False

    # --- events

    def report_reset(
        self, queue: MessageQueue, target: int, why: str, old_offset: int | None = None, epoch: int | None = None
    ) -> None:
        """Emit the event that a queue was reset."""
        resets = self._assignments.queue(queue).resets
        resets.count, resets.target = resets.count + 1, target
        facts: dict[str, object] = {"from": old_offset, "to": target, "epoch": epoch}
        known = {name: value for name, value in facts.items() if value is not None}
        self._context.emit(EventKind.OFFSET_RESET, f"-> {target} ({why})", queue, known, level=logging.WARNING)

    def report_refusal(self, what: str) -> None:
        """Emit the event that a reset is refused, because of remote_reset='refuse'."""
        self.report_not_followed(f"{what} refused: remote_reset='refuse'")

    def report_not_followed(self, text: str) -> None:
        """Emit the event that a reset is not followed."""
        self._context.emit(EventKind.OFFSET_RESET, text, level=logging.WARNING)

    def report_record_error(self, text: str) -> None:
        """Emit the event that a number in a record or a store is no epoch."""
        self._context.emit_throttled(EventKind.RECORD_IGNORED, text)

    def epoch(self, held: HeldQueue) -> int:
        """Return the epoch of the newest reset that the queue has followed. An invalid epoch does not count."""
        epoch = self._commits.reset_epoch(held.commit)
        if not epoch or is_valid_epoch(epoch, self._context.now_ms()):
            return epoch
        self.report_record_error(
            f"the stored epoch {epoch} of {held.queue} is more than a day ahead of this clock, so it is ignored. "
            "The consumer may follow an earlier reset a second time"
        )
        return 0

    # --- resets with an epoch: broadcasting

    async def follow(self, resets: Mapping[MessageQueue, QueueReset], why: str, *, recorded: bool = False) -> bool:
        """Follow the resets that are newer than the last ones, in one durable step. Return whether any was newer."""
        return await self._context.tasks.finish(self._follow_newer(resets, why, recorded), f"following resets ({why})")

    async def _follow_newer(self, resets: Mapping[MessageQueue, QueueReset], why: str, recorded: bool) -> bool:
        """Do the work of `follow`.

        As for every reset, the steps are: fence the queue, store the target, open a window with a new epoch, pull.
        Queues that this member does not hold yet get their target, too. A recorded reset does not move a queue that
        this member has never consumed, because `consume_from` decides where such a queue begins.
        """
        newer: dict[HeldQueue, QueueReset] = {}
        moving: dict[HeldQueue, int] = {}
        before: dict[HeldQueue, int | None] = {}
        async with self._assignments.lock_queues(resets) as locked:
            for held in locked:
                reset = resets[held.queue]
                if reset.epoch <= self.epoch(held):
                    continue
                never_consumed = recorded and not held.is_held and await self._commits.start_offset(held.commit) is None
                if not never_consumed and reset.offset is not None:
                    moving[held], before[held] = reset.offset, held.commit.current()
                newer[held] = QueueReset(moving.get(held), reset.epoch)
            if not newer:
                return False
            await move_together(moving, "reset", lambda: self._store(newer))
        for held, offset in moving.items():
            self.report_reset(held.queue, offset, why, before[held], newer[held].epoch)
        self.report_memory_only()
        return True

    async def _store(self, resets: Mapping[HeldQueue, QueueReset]) -> bool:
        """Store resets in one durable write. If that fails, continue from memory."""
        is_stored = True
        try:
            await self._commits.apply_resets({held.commit: reset for held, reset in resets.items()})
        except RocketError as error:
            self._context.emit(EventKind.STORE_UNWRITABLE, f"continuing from memory: {error}", level=logging.ERROR)
            is_stored = False
        for held, reset in resets.items():
            held.resets.is_followed, held.resets.is_unpersisted = True, not is_stored
            if reset.offset is not None:
                held.resets.followed_at, held.resets.followed_to = self._context.loop.time(), reset.offset
        return is_stored

    def report_memory_only(self) -> None:
        """Emit the event, once, that the store keeps no epochs."""
        if not self._is_memory_only_reported and not self._commits.keeps_epochs:
            self._is_memory_only_reported = True
            self._context.emit(
                EventKind.STORE_FALLBACK,
                "this offset store keeps no reset epochs (see offsets.ResetEpochs). They are in memory only, so this "
                "consumer will not follow resets that are made while it is down",
                level=logging.WARNING,
            )

    async def persist(self) -> None:
        """Try again to store the resets that are in memory only."""
        if unpersisted := [held for held in self._assignments.known() if held.resets.is_unpersisted]:
            try:
                await self._commits.retry_resets([held.commit for held in unpersisted])
            except RocketError as error:
                self._context.emit_throttled(EventKind.COMMIT_FAILED, f"resets are not stored yet: {error}")
            else:
                for held in unpersisted:
                    held.resets.is_unpersisted = False

    # --- resets without an epoch: the queues that this member holds

    async def move_held(
        self, targets: Mapping[MessageQueue, int], why: str, reset_id: str | None = None
    ) -> dict[MessageQueue, int]:
        """Move the held queues to their targets. Return the moved ones once their offsets are durable.

        With `reset_id`, move each queue only once for this reset.
        """
        moved: dict[MessageQueue, int] = {}

        async def move(held: HeldQueue, target: int) -> None:
            past = held.resets.by_id
            if await held.move(target, "reset", unless=lambda: reset_id in past):
                moved[held.queue] = target
                if reset_id is not None:
                    past[reset_id] = target
                    while len(past) > MAX_REMEMBERED_RESETS:
                        del past[next(iter(past))]
                self.report_reset(held.queue, target, why)
            elif not held.is_held:
                held.commit.invalidate()  # if it is assigned later, it must begin at the reset's target

        known = [(held, target) for queue, target in targets.items() if (held := self._assignments.find(queue))]
        self.forget_last_known(targets)
        await asyncio.gather(*(move(held, target) for held, target in known if held.is_begun))
        return moved

    def forget_last_known(self, queues: Iterable[MessageQueue]) -> None:
        """Forget the last known offsets of queues that are reset and not held, because the reset's target counts."""
        for queue in queues:
            if (held := self._assignments.find(queue)) is not None and not held.is_begun:
                held.commit.invalidate()

    def is_repeated(self, queue: MessageQueue, target: int) -> bool:
        """Return whether the last reset with an epoch was recent, and to the same target."""
        held = self._assignments.find(queue)
        if held is None or held.resets.followed_to != target:
            return False
        return self._context.loop.time() - held.resets.followed_at < SAME_RESET_WITHIN_S
