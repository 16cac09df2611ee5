"""Offsets in the user's database: the consumer claims queues there, and publishes their offsets to the brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.commits.commits import (
    STABLE_CLAIM_S,
    CommitRecord,
    Commits,
    consume_exception,
    wait_for_all,
)
from pyrocket_consumer.consumer.context.events import describe_id
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.listener import ConsumeResult
from pyrocket_consumer.errors import DatabaseError, Fenced, RocketError
from pyrocket_consumer.model import EventKind, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
from pyrocket_consumer.offsets.database.claim import Claim, ClaimHolder, StoredOffset
from pyrocket_consumer.offsets.database.rows import RowLocked
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.io_thread import SerialExecutor

T = TypeVar("T")

DATABASE_CALL_TIMEOUT_S = 30.0
"""How long to wait for a call of the database. No other call begins until it has returned."""

STORE_CHECK_EVERY_S = 5.0
"""How often to check the claims, so that a reset in the database reaches queues without messages, too.

The inbox is tidied as often, not each time that one of thousands of queues ends.
"""

LOST_CLAIM_S = 300.0
"""How long a lost claim is remembered after the last try to claim its queue again. Later it may be out of date."""

MAX_CLAIMED_TOGETHER = 500
"""The largest number of queues in one transaction that claims."""


class DatabaseCommits(Commits, ClaimHolder):
    """The `Commits` of a `DatabaseOffsets`. Its blocking calls run on one thread.

    Listeners commit their offsets themselves. `persist` stores only offsets without an effect: gaps, and messages that
    were given up.
    """

    keeps_epochs = True
    failed_result = ConsumeResult.RETRY

    def __init__(self, store: DatabaseOffsets, thread: SerialExecutor, cluster: Cluster, group: str) -> None:
        """Use the store. `thread` has loaded it, and `close` ends the thread."""
        self._store = store
        self._thread = thread
        self._loop = cluster.loop
        self._group = group
        self._owner = cluster.client_id
        self._claimed: dict[MessageQueue, CommitRecord] = {}
        self._next_check_at = 0.0
        self._call_lock = asyncio.Lock()  # one call at a time, so that its timeout begins with it
        self._running_call: asyncio.Future[Any] | None = None
        self._call_deadline = 0.0
        self._reported_topics: set[str] = set()
        self._to_claim: list[tuple[CommitRecord, asyncio.Future[Claim | None]]] = []
        self._claiming: asyncio.Task[None] | None = None
        self._published = BrokerCommits(cluster, group)
        self._publishing: asyncio.Task[object] | None = None

    def attach(self, context: MemberContext) -> None:
        super().attach(context)
        self._published.attach(context)

    # --- methods of ClaimHolder; any thread

    def is_success(self, result: object) -> bool:
        return result is None or result is ConsumeResult.SUCCESS or result is ConsumeResult.COMMIT

    def on_claim_fenced(self, claim: Claim) -> None:
        self.context.call_soon(self._lose_claim, claim)

    def on_store_wait(self, claim: Claim, why: str) -> None:
        self.context.call_soon(self._report_wait, why, claim.queue)

    def on_duplicates(self, claim: Claim, messages: Sequence[Message]) -> None:
        text = f"{len(messages)} messages skipped, because their producer has stored them twice"
        facts = {"offset": messages[0].queue_offset, "message_id": describe_id(messages[0])}
        self.context.call_soon(self.context.emit, EventKind.MESSAGE_LEFT_OUT, text, claim.queue, facts)

    def on_uncommitted(self, claim: Claim, row: StoredOffset) -> None:
        text = (
            f"a listener called advance() up to offset {claim.promised}, but its transaction was not committed "
            f"(the row is at {row.next_offset}). Its messages are redelivered; commit before the listener returns, "
            "for example with engine.begin()"
        )
        self.context.call_soon(self.context.emit, EventKind.OFFSET_APART, text, claim.queue, {}, logging.WARNING)
        self.context.call_soon(self._lose_claim, claim, "a listener did not commit its transaction")

    def on_outside_transaction(self, claim: Claim, offset: int) -> None:
        if claim.queue.topic not in self._reported_topics:
            self._reported_topics.add(claim.queue.topic)
            text = (
                f"the listener got offset {offset}, which neither exactly_once nor advance() has counted. Its effect "
                "and the offset do not commit together, so the effect may happen twice (reported once per topic); "
                f"subscribe with exactly_once(listener) of {self._store!r}"
            )
            self.context.call_soon(self.context.emit, EventKind.OFFSET_APART, text, claim.queue, {}, logging.WARNING)

    def _report_wait(self, why: str, queue: MessageQueue | None = None) -> None:
        self.context.emit_throttled(EventKind.STORE_UNREACHABLE, why, queue)

    def _lose_claim(
        self, claim: Claim, why: str = "another member has claimed it, it was reset, or its row was deleted"
    ) -> None:
        record = self._claimed.get(claim.queue)
        if record is not None and record.claim is claim:
            record.lost_claim, record.lost_at = claim.copy(), self._loop.time()
            if self._loop.time() - record.claimed_at < STABLE_CLAIM_S:
                record.claim_pauses.failed(self._loop.time())  # longer pauses if it is lost repeatedly
            self.context.member.claim_lost(claim.queue, why)

    # --- calls of the database

    async def _run(self, what: str, work: Callable[..., T], *arguments: object) -> T:
        async with self._call_lock:
            if self._running_call is not None and not self._running_call.done():  # its caller was cancelled or gave up
                await wait_for_all([self._running_call], self._call_deadline)
                if not self._running_call.done():
                    raise DatabaseError(repr(self._store), what, "it has not returned from a call before")
            self._running_call = doing = self._loop.run_in_executor(self._thread, work, *arguments)
            doing.add_done_callback(consume_exception)
            self._call_deadline = self._loop.time() + DATABASE_CALL_TIMEOUT_S
            await wait_for_all([doing], self._call_deadline)
            if not doing.done():
                raise DatabaseError(repr(self._store), what, f"no response within {DATABASE_CALL_TIMEOUT_S:g} s")
            return doing.result()

    # --- commits

    def is_paused(self, record: CommitRecord) -> bool:
        return self._loop.time() < record.claim_pauses.until

    async def start_offset(self, record: CommitRecord) -> int | None:
        self.forget(record)
        now = self._loop.time()
        if record.lost_claim is not None:
            if now - record.lost_at < LOST_CLAIM_S:
                record.lost_at = now
            else:
                record.lost_claim = None
        claimed: asyncio.Future[Claim | None] = self._loop.create_future()
        self._to_claim.append((record, claimed))
        if self._claiming is None or self._claiming.done():
            self._claiming = self._loop.create_task(self._claim_waiting())
            self._claiming.add_done_callback(consume_exception)
        claim = await claimed
        return None if claim is None else self._add_claim(record, claim)

    async def _claim_waiting(self) -> None:
        """Claim the waiting queues. Those that arrive during a claim are claimed together next, to save round trips."""
        while self._to_claim:
            waiting = dict(self._to_claim[:MAX_CLAIMED_TOGETHER])
            del self._to_claim[:MAX_CLAIMED_TOGETHER]
            try:
                # If the row of one is locked, claim each queue by itself, because the others must not wait for it.
                if not await self._claim_together(waiting):
                    for record, claimed in waiting.items():
                        if not await self._claim_together({record: claimed}):
                            record.claim_pauses.failed(self._loop.time())
            except Exception as error:  # unexpected; the waiters raise it
                for claimed in waiting.values():
                    if not claimed.done():
                        claimed.set_exception(error)
            finally:
                for claimed in waiting.values():
                    claimed.cancel()  # it is unresolved only if this task was cancelled

    async def _claim_together(self, waiting: Mapping[CommitRecord, asyncio.Future[Claim | None]]) -> bool:
        """Claim queues in one transaction, and resolve their futures. Return False if the row of one is locked."""
        found: Mapping[MessageQueue, Claim | RocketError]
        queues = [record.queue for record in waiting]
        is_locked = False
        try:
            found = await self._run("claiming queues", self._store.claim, self, self._group, queues, self._owner)
        except RowLocked as error:
            if len(waiting) > 1:
                return False
            found, is_locked = dict.fromkeys(queues, error), True
        except RocketError as error:
            found = dict.fromkeys(queues, error)
        for record, claimed in waiting.items():
            claim = found.get(record.queue)
            if claimed.done():
                pass
            elif isinstance(claim, RocketError):
                claimed.set_exception(claim)
            else:
                claimed.set_result(claim)
        return not is_locked

    def _add_claim(self, record: CommitRecord, claim: Claim) -> int:
        self._claimed[record.queue] = record
        record.claim, record.claimed_at, record.lost_claim = claim, self._loop.time(), None
        record.offset = record.persisted = claim.stored
        return claim.stored

    async def store_start(self, record: CommitRecord, offset: int) -> None:
        if record.claim is None:
            what, begin, lost = f"beginning {record.queue} at {offset}", self._store.begin, record.lost_claim
            self._add_claim(record, await self._run(what, begin, self, self._group, record.queue, self._owner, offset))
            if lost is not None and lost.reset_epoch:
                await self._move(record, offset, lost.reset_epoch)  # so that no later owner follows that reset again

    async def overwrite(self, record: CommitRecord, offset: int) -> None:
        await self._move(record, offset, None)

    async def _move(self, record: CommitRecord, offset: int, reset_epoch: int | None) -> None:
        claim = record.claim
        if claim is None:
            raise Fenced(str(record.queue))
        what = f"moving {record.queue} to {offset}"
        self._add_claim(record, await self._run(what, self._store.move, claim, offset, reset_epoch))
        if record.published is not None:
            record.published.forget()

    def reset_epoch(self, record: CommitRecord) -> int:
        return record.claim.reset_epoch if record.claim is not None else 0

    async def apply_resets(self, resets: Mapping[CommitRecord, QueueReset]) -> None:
        for record, reset in resets.items():
            if record.claim is not None:  # another owner applies the reset when it claims the queue
                offset = record.claim.stored if reset.offset is None else reset.offset
                await self._move(record, offset, reset.epoch)

    async def retry_resets(self, records: Collection[CommitRecord]) -> None:
        for error in (await self.persist(records)).values():
            raise error

    async def persist(
        self, records: Iterable[CommitRecord], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        claimed = [record for record in records if record.claim is not None]
        behind = [record for record in claimed if _unstored(record) is not None]
        failed: dict[MessageQueue, RocketError] = {}
        if claimed:
            persisting = self._loop.create_task(self._persist(behind))
            persisting.add_done_callback(consume_exception)
            await wait_for_all([persisting], until)
            if not persisting.done():
                error = DatabaseError(repr(self._store), "storing offsets", "no response in time")
                return {record.queue: error for record in behind}
            failed = persisting.result()
        await self._publish(claimed, until)
        return failed

    async def _persist(self, records: Iterable[CommitRecord]) -> dict[MessageQueue, RocketError]:
        failed: dict[MessageQueue, RocketError] = {}
        for record in records:
            claim, offset = record.claim, _unstored(record)  # now: the queue may have moved while others were stored
            if claim is None or offset is None:
                continue
            try:
                await self._run(f"storing {offset} of {record.queue}", self._store.persist, claim, offset)
            except Fenced:
                self._lose_claim(claim)
            except RocketError as error:
                failed[record.queue] = error
        try:
            if self._loop.time() >= self._next_check_at:  # a queue without messages learns of a lost claim only here
                self._next_check_at = self._loop.time() + STORE_CHECK_EVERY_S
                await self._run("tidying the inbox", self._store.tidy, self._group)
                claims = [record.claim for record in self._claimed.values() if record.claim is not None]
                for claim in await self._run("looking at claims", self._store.fenced_among, self._group, claims):
                    self._lose_claim(claim)
        except RocketError as error:
            self._report_wait(str(error))
        return failed

    async def _publish(self, records: Iterable[CommitRecord], until: float | None) -> None:
        """Commit the offsets to the brokers, for tools. Ignore failures, because members read only the database.

        With `until`, return when they are committed, at that time at the latest. Without it, return at once, and do
        nothing while earlier offsets are sent.
        """
        publishing = []
        for record in records:
            if (claim := record.claim) is not None and not claim.lost:
                if record.published is None:
                    record.published = CommitRecord(record.queue)
                record.published.offset = max(record.published.offset or 0, claim.stored)
            if record.published is not None:
                publishing.append(record.published)
        if until is not None:
            await self._published.persist(publishing, until=until)
        elif self._publishing is None or self._publishing.done():
            self._publishing = self._loop.create_task(self._published.persist(publishing))
            self._publishing.add_done_callback(consume_exception)

    async def is_consumed(self, claim: Claim, offset: int) -> bool:
        """Return whether a message that is to be given up has its effect nevertheless.

        Raises:
            DatabaseError: the database did not respond; try again later.
        """
        if offset >= max(claim.highest_advance, claim.stored):
            return False
        return await self._run(f"looking at {claim.queue}", self._store.is_consumed, claim, offset)

    async def release(self, record: CommitRecord) -> None:
        failed = await self.persist([record])
        await self._publish([record], self._loop.time() + 1.0)
        self.forget(record)
        for error in failed.values():
            raise error

    def forget(self, record: CommitRecord) -> None:
        self._claimed.pop(record.queue, None)
        super().forget(record)

    def mark_unpersisted(self, records: Iterable[CommitRecord], broker_name: str | None = None) -> None:
        published = [record.published for record in records if record.published is not None]
        self._published.mark_unpersisted(published, broker_name)

    async def close(self, *, until: float | None = None) -> None:
        if self._claiming is not None:
            self._claiming.cancel()
        try:
            closing = self._loop.run_in_executor(self._thread, self._store.close)
            closing.add_done_callback(consume_exception)
            await self._published.close(until=until)
            await wait_for_all([closing], until)
        finally:
            self._thread.shutdown(wait=False)


def _unstored(record: CommitRecord) -> int | None:
    """Return the offset below which the queue is consumed, if it is above the stored one."""
    claim, offset = record.claim, record.current()
    return offset if claim is not None and offset is not None and offset > claim.stored and not claim.lost else None
