"""How offsets reach their store: read when a queue begins, persisted by a timer and when a queue ends.

`Commits` is the consumer's view of any offset store. Commits to brokers use the consumer's connections. File access and
offset stores of users run on a separate thread, so a slow disk does not delay pulls and heartbeats, and vice versa.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import QueueReset
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.transport.backoff import Backoff

FLUSHED_WITHIN_S = 30.0
"""The age at which an acknowledged offset is safe: brokers write every 5 s, and their slaves copy every 10 s."""


STABLE_CLAIM_S = 60.0
"""A queue that was held for this time is claimed again without a pause after another member has claimed it."""

FIRST_CLAIM_PAUSE_S, MAX_CLAIM_PAUSE_S = 1.0, 20.0
"""Pauses before the next claim of a queue that members keep taking from each other, or whose row is locked."""


class CommitRecord:
    """What a member knows about the offset of one queue. Parts of it outlive the time in which the queue is held.

    While a window runs, its lower edge is the offset to commit. Otherwise `offset` is.
    """

    __slots__ = (
        "queue",
        "window",
        "offset",
        "first_start",
        "persisted",
        "last_known",
        "acked_at",
        "may_be_lost",
        "is_unanswered",
        "lock",
        "refused",
        "reset_epoch",
        "claim",
        "claimed_at",
        "lost_claim",
        "lost_at",
        "claim_pauses",
        "published",
    )

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.window: ProcessQueue | None = None
        self.offset: int | None = None
        self.first_start: tuple[int, str] | None = None  # where a group begins that never consumed the queue, and why
        self.persisted: int | None = None  # the offset that is known to be stored
        # Of offsets at brokers:
        self.last_known: int | None = None  # what the broker last reported or acknowledged
        self.acked_at = float("-inf")
        self.may_be_lost = False  # the connection ended soon after the last known offset was acknowledged
        self.is_unanswered = False  # the last commit got no response, or an error
        self.lock = asyncio.Lock()  # one commit at a time
        # Of an offset store:
        self.refused: int | None = None  # an update that the store refused
        self.reset_epoch = 0  # if the store keeps none
        # Of offsets in a database:
        self.claim: Claim | None = None
        self.claimed_at = 0.0
        self.lost_claim: Claim | None = None  # the last one that was fenced, until the queue is claimed again
        self.lost_at = 0.0  # when the queue was last fenced, or could not be claimed
        self.claim_pauses = Backoff(FIRST_CLAIM_PAUSE_S, MAX_CLAIM_PAUSE_S, reset_after_s=STABLE_CLAIM_S)
        self.published: CommitRecord | None = None  # what brokers have, for tools

    def __repr__(self) -> str:
        return f"CommitRecord({self.queue}, current={self.current()}, persisted={self.persisted})"

    def current(self) -> int | None:
        """Return the offset to commit: everything below it is consumed. None before the queue begins."""
        return self.offset if self.window is None else self.window.commit_offset()

    def stored(self) -> int | None:
        """Return the offset that is known to be stored."""
        return self.claim.stored if self.claim is not None else self.persisted

    def on_broker_lost(self, now: float) -> None:
        """Note that the broker closed the connection. If it died, it may have lost its latest acknowledged commits."""
        if self.acked_at > now - FLUSHED_WITHIN_S and self.last_known is not None:
            self.may_be_lost = True

    def invalidate(self) -> None:
        """Forget the last known offset of a queue that another client has reset while this member did not hold it."""
        self.last_known, self.acked_at, self.may_be_lost, self.lost_claim = None, float("-inf"), False, None

    def forget(self) -> None:
        """Forget the offset of a queue that is not held any longer. The last known offset stays."""
        self.window = self.offset = self.persisted = self.refused = self.claim = None
        self.lock = asyncio.Lock()  # a commit in flight delays no commit after the queue has returned
        if self.published is not None:
            self.published.forget()


class Commits(ABC):
    """The operations of a consumer on any offset store. Confined to the I/O thread."""

    keeps_epochs = False
    """Whether the store keeps the epochs of resets. If not, they are in memory only."""

    context: MemberContext

    def attach(self, context: MemberContext) -> None:
        """Report events to the member with this context. Call it before the other methods."""
        self.context = context

    def edge_listener(self, record: CommitRecord) -> Callable[[MessageQueue, int], None] | None:
        """Return a function to call, on any thread, whenever the lower edge of the queue's window moves."""
        return None

    def table(self, topic: str, records: Iterable[CommitRecord]) -> dict[MessageQueue, int]:
        """Return the known offsets of the queues of `topic`, or of all queues if it is empty."""
        found = {record.queue: record.current() for record in records if topic in ("", record.queue.topic)}
        return {queue: offset for queue, offset in found.items() if offset is not None}

    def is_paused(self, record: CommitRecord) -> bool:
        """Return whether it is too early to read the start offset of the queue again."""
        return False

    @abstractmethod
    async def start_offset(self, record: CommitRecord) -> int | None:
        """Return the offset to continue at, None if this group never consumed the queue. A failure raises an error."""

    async def store_start(self, record: CommitRecord, offset: int) -> None:
        """Store the start offset of the queue durably, before its first pull. Many together take little longer.

        Raises:
            RocketError: the offset may not be stored. It stays in memory.
        """
        await self.overwrite(record, offset)

    @abstractmethod
    async def overwrite(self, record: CommitRecord, offset: int) -> None:
        """Store `offset` in place of the present one, and return when it is durable."""

    def reset_epoch(self, record: CommitRecord) -> int:
        """Return the epoch of the newest reset that was applied to the queue, 0 without one."""
        return 0

    @abstractmethod
    async def apply_resets(self, resets: Mapping[CommitRecord, QueueReset]) -> None:
        """Store the offsets and epochs of resets durably. Memory has them even if that fails."""

    @abstractmethod
    async def retry_resets(self, records: Collection[CommitRecord]) -> None:
        """Store again what `apply_resets` could not store, and return when it is durable."""

    def by_store(self, records: Iterable[CommitRecord]) -> dict[str, list[CommitRecord]]:
        """Return `records` grouped by the store that keeps them, because the stores need not wait for each other."""
        return {"": list(records)}

    @abstractmethod
    async def persist(
        self, records: Iterable[CommitRecord], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        """Store the changed offsets. Return the error of each queue that failed; the next call tries it again.

        A commit without an acknowledgement at the loop's time `until` is returned as a RequestTimeout, and continues.
        """

    async def release(self, record: CommitRecord) -> None:
        """Store the queue's offset, and forget it."""
        failed = await self.persist([record])
        self.forget(record)
        for error in failed.values():
            raise error

    def forget(self, record: CommitRecord) -> None:
        """Forget the queue without storing anything, because another member holds it already."""
        record.forget()

    def mark_unpersisted(self, records: Iterable[CommitRecord], broker_name: str | None = None) -> None:  # noqa: B027 - most stores lose nothing
        """Store these offsets again next time, because the broker (or any, if None) may have lost them."""

    @abstractmethod
    async def close(self, *, until: float | None = None) -> None:
        """Close the store, after everything was persisted. Do not wait beyond `until` for running commits."""


async def wait_for_all(tasks: Collection[asyncio.Future[Any]], until: float | None) -> None:
    """Wait until all tasks have ended, or until the loop's time `until`. Neither cancel them nor raise their errors."""
    if tasks:
        timeout_s = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.wait(tasks, timeout=timeout_s)


def consume_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, because its waiter has got it or has stopped waiting."""
    if not task.cancelled():
        task.exception()
