"""Offsets in the user's database: the consumer claims queues there, and publishes their offsets to the brokers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.consumer.commits.commits import BrokerCommits, consume_exception, wait_for_all
from pyrocket_consumer.consumer.commits.serial_executor import SerialExecutor
from pyrocket_consumer.consumer.listener import ConsumeResult
from pyrocket_consumer.errors import DatabaseError, Fenced, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, MemoryOffsetStore, QueueReset, ReadOffsetType
from pyrocket_consumer.offsets.database.claim import Claim, StoredOffset
from pyrocket_consumer.offsets.database.store import RowLocked
from pyrocket_consumer.protocol.message import Message

T = TypeVar("T")

DATABASE_CALL_TIMEOUT_S = 30.0
"""How long to wait for a call of the database. No other call begins until it has returned."""

STORE_CHECK_EVERY_S = 5.0
"""How often to check the claims, so that a reset in the database reaches queues without messages, too."""

STABLE_CLAIM_S = 60.0
"""A queue that was held for this time is claimed again without a pause after another member has claimed it."""

LOST_CLAIM_S = 300.0
"""How long a lost claim is remembered after the last try to claim its queue again. Later it may be out of date."""

MAX_CLAIMED_TOGETHER = 500
"""The largest number of queues in one transaction that claims."""

FIRST_STORE_PAUSE_S, MAX_STORE_PAUSE_S = 1.0, 20.0
"""Pauses before the next claim of a queue that members keep taking from each other, or whose row is locked."""


class DatabaseCommits:
    """The `Commits` of a `DatabaseOffsets`. Blocking calls run on one thread; `update` and listeners run on others.

    Listeners commit their offsets themselves. `persist` stores only offsets without an effect: gaps, and messages that
    were given up.
    """

    def __init__(self, store: DatabaseOffsets, thread: SerialExecutor, cluster: Cluster, group: str) -> None:
        """Use the store. `thread` has loaded it, and `close` ends the thread."""
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue, str], None] = lambda queue, why: None
        self.on_not_atomic: Callable[[MessageQueue, str], None] = lambda queue, why: None
        """Called when a listener's effect and its offset do not commit together, although they could."""
        self.on_duplicate_messages: Callable[[MessageQueue, Sequence[Message]], None] = lambda queue, messages: None
        self.on_database_wait: Callable[[MessageQueue | None, str], None] = lambda queue, why: None
        """Called when messages of a queue wait for the database, or, without a queue, when the clean-up does."""
        self._store = store
        self._thread = thread
        self._loop = cluster.loop
        self._group = group
        self._owner = cluster.client_id
        self._memory = MemoryOffsetStore()
        self._claims: dict[MessageQueue, Claim] = {}
        self._claimed_at: dict[MessageQueue, float] = {}
        self._lost: dict[MessageQueue, tuple[Claim, float]] = {}  # fenced ones, and the time of the last try
        self._pauses: dict[MessageQueue, tuple[float, float]] = {}  # how long, and until when
        self._next_check_at = 0.0
        self._call_lock = asyncio.Lock()  # one call at a time, so that its timeout begins with it
        self._running_call: asyncio.Future[Any] | None = None
        self._call_deadline = 0.0
        self._reported_topics: set[str] = set()  # topics
        self._to_claim: dict[MessageQueue, asyncio.Future[Claim | None]] = {}
        self._claiming: asyncio.Task[None] | None = None
        self._published = BrokerCommits(cluster, group)
        self._published.on_reset_waiting = lambda queue: self.on_reset_waiting(queue)
        self._publishing: asyncio.Task[object] | None = None

    # --- methods of ClaimHolder; any thread

    @property
    def failed_result(self) -> object:
        return ConsumeResult.RETRY

    def is_success(self, result: object) -> bool:
        return result is None or result is ConsumeResult.SUCCESS or result is ConsumeResult.COMMIT

    def on_claim_fenced(self, claim: Claim) -> None:
        self._call_soon(self._lose_claim, claim)

    def on_store_wait(self, claim: Claim, why: str) -> None:
        self._call_soon(self.on_database_wait, claim.queue, why)

    def on_duplicates(self, claim: Claim, messages: Sequence[Message]) -> None:
        self._call_soon(self.on_duplicate_messages, claim.queue, messages)

    def on_uncommitted(self, claim: Claim, row: StoredOffset) -> None:
        self._call_soon(
            self.on_not_atomic,
            claim.queue,
            f"a listener called advance() up to offset {claim.promised}, but its transaction was not committed "
            f"(the row is at {row.next_offset}). Its messages are redelivered; commit before the listener returns, "
            "for example with engine.begin()",
        )
        self._call_soon(self._lose_claim, claim, "a listener did not commit its transaction")

    def on_outside_transaction(self, claim: Claim, offset: int) -> None:
        if claim.queue.topic not in self._reported_topics:
            self._reported_topics.add(claim.queue.topic)
            self._call_soon(
                self.on_not_atomic,
                claim.queue,
                f"the listener got offset {offset}, which neither exactly_once nor advance() has counted. Its effect "
                "and the offset do not commit together, so the effect may happen twice (reported once per topic); "
                f"subscribe with exactly_once(listener) of {self._store!r}",
            )

    def _call_soon(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass  # the consumer has ended before its listener

    def _lose_claim(
        self, claim: Claim, why: str = "another member has claimed it, it was reset, or its row was deleted"
    ) -> None:
        queue = claim.queue
        if self._claims.get(queue) is claim:
            self._lost[queue] = claim.copy(), self._loop.time()
            if self._loop.time() - self._claimed_at[queue] < STABLE_CLAIM_S:
                self._pause(queue)
            self.on_fenced(queue, why)

    def _pause(self, queue: MessageQueue) -> None:
        """Delay the next claim of a queue, each time longer if it is lost repeatedly."""
        now = self._loop.time()
        before_s, until = self._pauses.get(queue, (0.0, 0.0))
        pause_s = (
            min(2 * before_s, MAX_STORE_PAUSE_S) if before_s and now < until + STABLE_CLAIM_S else FIRST_STORE_PAUSE_S
        )
        self._pauses[queue] = pause_s, now + pause_s

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

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return self._claims.get(queue)

    def lost_claim(self, queue: MessageQueue) -> Claim | None:
        return self._lost[queue][0] if queue in self._lost else None

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset, True)

    def current(self, queue: MessageQueue) -> int | None:
        return self._memory.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self._memory.clone_offset_table(topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        claim = self._claims.get(queue)
        return claim.stored if claim is not None else None

    def is_paused(self, queue: MessageQueue) -> bool:
        return self._loop.time() < self._pauses.get(queue, (0.0, 0.0))[1]

    async def start_offset(self, queue: MessageQueue) -> int | None:
        self.forget(queue)
        now, (lost, tried_at) = self._loop.time(), self._lost.pop(queue, (None, 0.0))
        if lost is not None and now - tried_at < LOST_CLAIM_S:
            self._lost[queue] = lost, now
        claimed: asyncio.Future[Claim | None] = self._loop.create_future()
        self._to_claim[queue] = claimed
        if self._claiming is None or self._claiming.done():
            self._claiming = self._loop.create_task(self._claim_waiting())
            self._claiming.add_done_callback(consume_exception)
        claim = await claimed
        return None if claim is None else self._add_claim(claim)

    async def _claim_waiting(self) -> None:
        """Claim the waiting queues. Those that arrive during a claim are claimed together next, to save round trips."""
        while self._to_claim:
            waiting = dict(itertools.islice(self._to_claim.items(), MAX_CLAIMED_TOGETHER))
            for queue in waiting:
                del self._to_claim[queue]
            try:
                # If the row of one is locked, claim each queue by itself, because the others must not wait for it.
                if not await self._claim_together(waiting):
                    for queue, claimed in waiting.items():
                        if not await self._claim_together({queue: claimed}):
                            self._pause(queue)
            except Exception as error:  # unexpected; the waiters raise it
                for claimed in waiting.values():
                    if not claimed.done():
                        claimed.set_exception(error)
            finally:
                for claimed in waiting.values():
                    claimed.cancel()  # it is unresolved only if this task was cancelled

    async def _claim_together(self, waiting: Mapping[MessageQueue, asyncio.Future[Claim | None]]) -> bool:
        """Claim queues in one transaction, and resolve their futures. Return False if the row of one is locked."""
        found: Mapping[MessageQueue, Claim | RocketError]
        is_locked = False
        try:
            found = await self._run("claiming queues", self._store.claim, self, self._group, list(waiting), self._owner)
        except RowLocked as error:
            if len(waiting) > 1:
                return False
            found, is_locked = dict.fromkeys(waiting, error), True
        except RocketError as error:
            found = dict.fromkeys(waiting, error)
        for queue, claimed in waiting.items():
            claim = found.get(queue)
            if claimed.done():
                pass
            elif isinstance(claim, RocketError):
                claimed.set_exception(claim)
            else:
                claimed.set_result(claim)
        return not is_locked

    def _add_claim(self, claim: Claim) -> int:
        self._claims[claim.queue] = claim
        self._claimed_at[claim.queue] = self._loop.time()
        self._lost.pop(claim.queue, None)
        self._memory.update_offset(claim.queue, claim.stored)
        return claim.stored

    def last_known(self, queue: MessageQueue) -> int | None:
        return None  # a row counts, whatever its offset; see `lost_claim` about a missing row

    def may_have_lost(self, queue: MessageQueue) -> bool:
        return False

    def invalidate(self, queue: MessageQueue) -> None:
        self._lost.pop(queue, None)

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self._claims:
            what, begin, lost = f"beginning {queue} at {offset}", self._store.begin, self.lost_claim(queue)
            self._add_claim(await self._run(what, begin, self, self._group, queue, self._owner, offset))
            if lost is not None and lost.reset_epoch:
                await self._move(queue, offset, lost.reset_epoch)  # so that no later owner follows that reset again

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        await self._move(queue, offset, None)

    async def _move(self, queue: MessageQueue, offset: int, reset_epoch: int | None) -> None:
        claim = self._claims.get(queue)
        if claim is None:
            raise Fenced(str(queue))
        self._add_claim(await self._run(f"moving {queue} to {offset}", self._store.move, claim, offset, reset_epoch))
        self._published.forget(queue)

    @property
    def keeps_epochs(self) -> bool:
        return True

    def reset_epoch(self, queue: MessageQueue) -> int:
        claim = self._claims.get(queue)
        return claim.reset_epoch if claim is not None else 0

    async def apply_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        for queue, reset in resets.items():
            claim = self._claims.get(queue)
            if claim is not None:  # another owner applies the reset when it claims the queue
                await self._move(queue, claim.stored if reset.offset is None else reset.offset, reset.epoch)

    async def retry_resets(self, queues: Iterable[MessageQueue]) -> None:
        for error in (await self.persist(queues)).values():
            raise error

    def by_store(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        return {"": list(queues)}

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        claimed_queues = [queue for queue in queues if queue in self._claims]
        behind = {queue: offset for queue in claimed_queues if (offset := self._unstored(queue)) is not None}
        failed: dict[MessageQueue, RocketError] = {}
        if claimed_queues:
            persisting = self._loop.create_task(self._persist(behind))
            persisting.add_done_callback(consume_exception)
            await wait_for_all([persisting], until)
            if not persisting.done():
                return dict.fromkeys(behind, DatabaseError(repr(self._store), "storing offsets", "no response in time"))
            failed = persisting.result()
        await self._publish(claimed_queues, until)
        return failed

    def _unstored(self, queue: MessageQueue) -> int | None:
        """Return the offset below which `queue` is consumed, if it is above the stored one."""
        claim, offset = self._claims[queue], self.current(queue)
        return offset if offset is not None and offset > claim.stored and not claim.lost else None

    async def _persist(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketError]:
        failed: dict[MessageQueue, RocketError] = {}
        for queue, offset in offsets.items():
            if (claim := self._claims.get(queue)) is None:
                continue
            try:
                await self._run(f"storing {offset} of {queue}", self._store.persist, claim, offset)
            except Fenced:
                self._lose_claim(claim)
            except RocketError as error:
                failed[queue] = error
        try:
            await self._run("tidying the inbox", self._store.tidy, self._group)
            if self._loop.time() >= self._next_check_at:  # a queue without messages learns of a lost claim only here
                self._next_check_at = self._loop.time() + STORE_CHECK_EVERY_S
                claims = list(self._claims.values())
                for claim in await self._run("looking at claims", self._store.fenced_among, self._group, claims):
                    self._lose_claim(claim)
        except RocketError as error:
            self.on_database_wait(None, str(error))
        return failed

    async def _publish(self, queues: Iterable[MessageQueue], until: float | None) -> None:
        """Commit the offsets to the brokers, for tools. Ignore failures, because members read only the database."""
        for queue in queues:
            if (claim := self._claims.get(queue)) is not None and not claim.lost:
                self._published.update(queue, claim.stored)
        if self._publishing is None or self._publishing.done():
            self._publishing = self._loop.create_task(self._published.persist(list(queues)))
            self._publishing.add_done_callback(consume_exception)
        if until is not None:
            await wait_for_all([self._publishing], until)

    async def is_consumed(self, claim: Claim, offset: int) -> bool:
        """Return whether a message that is to be given up has its effect nevertheless.

        Raises:
            DatabaseError: the database did not respond; try again later.
        """
        if offset >= max(claim.highest_advance, claim.stored):
            return False
        return await self._run(f"looking at {claim.queue}", self._store.is_consumed, claim, offset)

    async def release(self, queue: MessageQueue) -> None:
        failed = await self.persist([queue])
        publishing = self._publishing
        if publishing is not None:
            await wait_for_all([publishing], self._loop.time() + 1.0)
        self.forget(queue)
        for error in failed.values():
            raise error

    def forget(self, queue: MessageQueue) -> None:
        self._claims.pop(queue, None)
        self._memory.remove_offset(queue)
        self._published.forget(queue)

    def broker_lost(self, broker_name: str) -> None:
        pass

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        self._published.mark_unpersisted(broker_name)

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
