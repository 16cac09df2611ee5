"""Offsets in the user's database, as a consumer sees them: queues are claimed, and published to their brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.consumer.commit import BrokerCommits, look_at, wait_for_all
from pyrocket_consumer.consumer.listener import ConsumeResult
from pyrocket_consumer.consumer.user_thread import UserThread
from pyrocket_consumer.errors import DatabaseError, Fenced, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, MemoryOffsetStore, QueueReset, ReadOffsetType
from pyrocket_consumer.offsets.database import Claim

T = TypeVar("T")

CALL_S = 30.0
"""How long a call of the database's is waited for; none other is made until it has returned."""

LOOK_EVERY_S = 5.0
"""How often it is looked whether queues are ours still, so that a reset in the database reaches those that are idle."""

CALM_S = 60.0
"""A queue that was ours for so long is claimed anew at once, when another member has claimed it meanwhile."""

LONGEST_PAUSE_S = 20.0
"""The longest pause before it is, when members keep taking a queue from each other."""


class DatabaseCommits:
    """The `Commits` of a `DatabaseOffsets`. Its blocking calls have one thread; `update` and listeners have theirs.

    What listeners commit is there already. Persisted is what no listener has an effect of: gaps, and messages given up.
    """

    def __init__(self, store: DatabaseOffsets, thread: UserThread, cluster: Cluster, group: str) -> None:
        """`thread` is where the store was loaded; it ends with `close`."""
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue], None] = lambda queue: None
        self.on_waiting: Callable[[MessageQueue | None, str], None] = lambda queue, why: None
        """Called when messages of a queue, or what is to be tidied, wait for the database."""
        self._store = store
        self._thread = thread
        self._loop = cluster.loop
        self._group = group
        self._owner = cluster.client_id
        self._memory = MemoryOffsetStore()
        self._claims: dict[MessageQueue, Claim] = {}
        self._claimed_at: dict[MessageQueue, float] = {}
        self._pauses: dict[MessageQueue, tuple[float, float]] = {}  # how long, and until when
        self._look_at = 0.0
        self._hanging: asyncio.Future[Any] | None = None
        self._published = BrokerCommits(cluster, group)
        self._published.on_reset_waiting = lambda queue: self.on_reset_waiting(queue)
        self._publishing: asyncio.Task[object] | None = None

    # --- the holder of claims; any thread

    def is_success(self, result: object) -> bool:
        return result is None or result is ConsumeResult.SUCCESS or result is ConsumeResult.COMMIT

    def fenced(self, claim: Claim) -> None:
        self._soon(self._fenced, claim)

    def waits(self, claim: Claim, why: str) -> None:
        self._soon(self.on_waiting, claim.queue, why)

    def _soon(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass  # the consumer has ended before its listener

    def _fenced(self, claim: Claim) -> None:
        queue = claim.queue
        if self._claims.get(queue) is claim:
            now = self._loop.time()
            pause_s = 0.0
            if now - self._claimed_at[queue] < CALM_S:
                pause_s = min(2 * self._pauses.get(queue, (0.5, 0))[0], LONGEST_PAUSE_S)
            self._pauses[queue] = pause_s or 0.5, now + pause_s
            self.on_fenced(queue)

    # --- calls of the database

    async def _do(self, what: str, work: Callable[..., T], *arguments: object) -> T:
        self._check_returned(what)
        doing = self._loop.run_in_executor(self._thread, work, *arguments)
        await wait_for_all([doing], self._loop.time() + CALL_S)
        if not doing.done():
            doing.add_done_callback(look_at)
            self._hanging = doing
            raise RequestTimeout(what, repr(self._store), CALL_S)
        return doing.result()

    def _check_returned(self, what: str) -> None:
        if self._hanging is not None and not self._hanging.done():
            raise RequestTimeout(what, f"{self._store!r}, which has not returned from a call before", CALL_S)

    # --- commits

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return self._claims.get(queue)

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset, True)

    def current(self, queue: MessageQueue) -> int | None:
        return self._memory.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self._memory.clone_offset_table(topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        claim = self._claims.get(queue)
        return claim.stored if claim is not None else None

    async def start_offset(self, queue: MessageQueue) -> int | None:
        _, until = self._pauses.get(queue, (0.0, 0.0))
        if (wait_s := until - self._loop.time()) > 0:
            reason = f"another member has claimed it just now; claimed again in {wait_s:.1f} s"
            raise DatabaseError(repr(self._store), f"claiming {queue}", reason)
        self.forget(queue)
        claim = await self._do(f"claiming {queue}", self._store.claim, self, self._group, queue, self._owner)
        return None if claim is None else self._has(claim)

    def _has(self, claim: Claim) -> int:
        self._claims[claim.queue] = claim
        self._claimed_at[claim.queue] = self._loop.time()
        self._memory.update_offset(claim.queue, claim.stored)
        return claim.stored

    def last_known(self, queue: MessageQueue) -> int | None:
        return None  # the database has what was stored

    def may_have_lost(self, queue: MessageQueue) -> bool:
        return False

    def forget_last_known(self, queue: MessageQueue) -> None:
        pass

    async def begin_at(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self._claims:
            what, begin = f"beginning {queue} at {offset}", self._store.begin
            self._has(await self._do(what, begin, self, self._group, queue, self._owner, offset))

    async def replace(self, queue: MessageQueue, offset: int) -> None:
        await self._move(queue, offset, None)

    async def _move(self, queue: MessageQueue, offset: int, reset_epoch: int | None) -> None:
        claim = self._claims.get(queue)
        if claim is None:
            raise Fenced(str(queue))
        self._has(await self._do(f"moving {queue} to {offset}", self._store.move, claim, offset, reset_epoch))
        self._published.forget(queue)

    @property
    def keeps_epochs(self) -> bool:
        return True

    def reset_epoch(self, queue: MessageQueue) -> int:
        claim = self._claims.get(queue)
        return claim.reset_epoch if claim is not None else 0

    async def follow(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        for queue, reset in resets.items():
            claim = self._claims.get(queue)
            if claim is not None:  # whoever claims a queue follows by himself
                await self._move(queue, claim.stored if reset.offset is None else reset.offset, reset.epoch)

    async def persist_again(self, queues: Iterable[MessageQueue]) -> None:
        for error in (await self.persist(queues)).values():
            raise error

    def places(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        return {"": list(queues)}

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        ours = [queue for queue in queues if queue in self._claims]
        behind = {queue: offset for queue in ours if (offset := self._unstored(queue)) is not None}
        failed: dict[MessageQueue, RocketError] = {}
        if ours:
            persisting = self._loop.create_task(self._persist(behind))
            persisting.add_done_callback(look_at)
            await wait_for_all([persisting], until)
            if not persisting.done():
                return dict.fromkeys(behind, RequestTimeout("storing offsets", repr(self._store), CALL_S))
            failed = persisting.result()
        await self._publish(ours, until)
        return failed

    def _unstored(self, queue: MessageQueue) -> int | None:
        """Return what is consumed of `queue`, and not stored with the effect of it."""
        claim, offset = self._claims[queue], self.current(queue)
        return offset if offset is not None and offset > claim.stored and not claim.lost else None

    async def _persist(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketError]:
        failed: dict[MessageQueue, RocketError] = {}
        for queue, offset in offsets.items():
            if (claim := self._claims.get(queue)) is None:
                continue
            try:
                await self._do(f"storing {offset} of {queue}", self._store.persist, claim, offset)
            except Fenced:
                self._fenced(claim)
            except RocketError as error:
                failed[queue] = error
        try:
            await self._do("tidying the inbox", self._store.tidy)
            if self._loop.time() >= self._look_at:  # who has nothing to consume would not hear of it
                self._look_at = self._loop.time() + LOOK_EVERY_S
                claims = list(self._claims.values())
                for claim in await self._do("looking at claims", self._store.fenced_among, self._group, claims):
                    self._fenced(claim)
        except RocketError as error:
            self.on_waiting(None, str(error))
        return failed

    async def _publish(self, queues: Iterable[MessageQueue], until: float | None) -> None:
        """Tell brokers where we are, for whoever looks there. It is never read back: what fails is left."""
        for queue in queues:
            if (claim := self._claims.get(queue)) is not None and not claim.lost:
                self._published.update(queue, claim.stored)
        if self._publishing is None or self._publishing.done():
            self._publishing = self._loop.create_task(self._published.persist(list(queues)))
            self._publishing.add_done_callback(look_at)
        if until is not None:
            await wait_for_all([self._publishing], until)

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

    def doubt(self, broker_name: str | None = None) -> None:
        self._published.doubt(broker_name)

    async def close(self, *, until: float | None = None) -> None:
        try:
            closing = self._loop.run_in_executor(self._thread, self._store.close)
            closing.add_done_callback(look_at)
            await self._published.close(until=until)
            await wait_for_all([closing], until)
        finally:
            self._thread.shutdown(wait=False)
