"""How offsets reach their store: read at the start of a queue, persisted by a timer and at every drop.

`Commits` is the consumer's view of any offset store. Broker offsets travel over the consumer's own connections;
file work, and stores of the user's own, run on a thread of their own, so that neither a slow disk delays pulls and
heartbeats, nor those the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import MemoryOffsetStore, OffsetStore, QueueReset, ReadOffsetType, ResetEpochs

log = logging.getLogger("pyrocket_consumer.consumer")

T = TypeVar("T")


class Commits(Protocol):
    """What a consumer does with an offset store. `update` and `current` are quick and may be called by any thread."""

    on_reset_waiting: Callable[[MessageQueue], None]
    """Called when a broker ignored a commit because it has a reset for the next pull of that queue."""

    def update(self, queue: MessageQueue, offset: int) -> None:
        """Note that everything below `offset` is consumed. A lower one than noted before changes nothing."""

    def current(self, queue: MessageQueue) -> int | None:
        """Return what is noted in memory."""

    def table(self, topic: str) -> dict[MessageQueue, int]:
        """Return what is noted in memory for `topic`, for every topic when it is empty."""

    def persisted(self, queue: MessageQueue) -> int | None:
        """Return what is known to be stored."""

    async def start_offset(self, queue: MessageQueue) -> int | None:
        """Return where to go on, None if this group has never consumed `queue`. An error is raised, never None."""

    def last_known(self, queue: MessageQueue) -> int | None:
        """Return what the broker last told or acknowledged of `queue`, also of one that was given up since."""

    async def replace(self, queue: MessageQueue, offset: int) -> None:
        """Store `offset`, whatever was noted, and return when it is durable."""

    @property
    def keeps_epochs(self) -> bool:
        """Whether the epochs of resets are stored, and not only in memory."""

    def reset_epoch(self, queue: MessageQueue) -> int:
        """Return the epoch of the newest reset the queue has followed, 0 if none."""

    async def follow(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Store offsets and epochs, and return when all are durable. Memory has them even if that fails."""

    async def persist_again(self, queues: Iterable[MessageQueue]) -> None:
        """Return when what was set by `follow` is durable."""

    def places(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        """Return `queues` by where they are stored: places that need not wait for each other."""

    async def persist(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, RocketError]:
        """Store what has changed, and return what could not be stored. It is tried again next time."""

    async def release(self, queue: MessageQueue) -> None:
        """Store the queue's offset, and forget it."""

    def forget(self, queue: MessageQueue) -> None:
        """Forget the queue without storing anything: it belongs to another member already."""

    def doubt(self, broker_name: str | None = None) -> None:
        """The broker (or any) may hold something else than it acknowledged: store everything again next time."""

    async def close(self) -> None:
        """Close the store; everything was persisted before."""


class BrokerCommits:
    """Offsets at the brokers: acknowledged commits, several at a time. Confined to the I/O thread but for `update`."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self._cluster = cluster
        self._group = group
        self._memory = MemoryOffsetStore()
        self._persisted: dict[MessageQueue, int] = {}
        self._last_known: dict[MessageQueue, int] = {}
        self._in_turn: dict[MessageQueue, asyncio.Lock] = {}
        self._first: dict[tuple[str, str], asyncio.Lock] = {}  # by broker and topic
        self._tables: set[tuple[str, str]] = set()  # brokers and topics that have a table of this group
        self._under_way: set[asyncio.Task[None]] = set()
        self._unanswered: set[MessageQueue] = set()  # whose last commit got no answer, or a refusal

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset, True)

    def current(self, queue: MessageQueue) -> int | None:
        return self._memory.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self._memory.clone_offset_table(topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        return self._persisted.get(queue)

    async def start_offset(self, queue: MessageQueue) -> int | None:
        offset = await self._cluster.broker(queue.broker_name).query_offset(
            self._group, queue, set_zero_if_not_found=False
        )
        if offset is not None:
            self._memory.update_offset(queue, offset)
            self._persisted[queue] = self._last_known[queue] = offset
        return offset

    def last_known(self, queue: MessageQueue) -> int | None:
        return self._last_known.get(queue)

    async def replace(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset)
        self._persisted.pop(queue, None)
        await self._commit(queue)

    @property
    def keeps_epochs(self) -> bool:
        return False

    def reset_epoch(self, queue: MessageQueue) -> int:
        return 0

    async def follow(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        moving = {queue: reset.offset for queue, reset in resets.items() if reset.offset is not None}
        await asyncio.gather(*(self.replace(queue, offset) for queue, offset in moving.items()))

    async def persist_again(self, queues: Iterable[MessageQueue]) -> None:
        await asyncio.gather(*map(self._commit, queues))

    def places(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        found: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            found.setdefault(queue.broker_name, []).append(queue)
        return found

    async def persist(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, RocketError]:
        changed = [queue for queue in queues if self._persisted.get(queue) != self.current(queue)]
        outcomes = await asyncio.gather(*(self._commit(queue) for queue in changed), return_exceptions=True)
        failed: dict[MessageQueue, RocketError] = {}
        for queue, outcome in zip(changed, outcomes, strict=True):
            if isinstance(outcome, RocketError):
                failed[queue] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def _commit(self, queue: MessageQueue) -> None:
        # Whoever waits may be cancelled, the commit is not: while the broker has not answered it, it could still
        # execute it, after the next one.
        task = asyncio.get_running_loop().create_task(self._commit_in_turn(queue))
        self._under_way.add(task)
        task.add_done_callback(self._answered)
        await asyncio.shield(task)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # who waited has been told, or has gone

    async def _commit_in_turn(self, queue: MessageQueue) -> None:
        """Commit the newest value, one commit of a queue at a time: a broker may execute two in any order."""
        async with self._in_turn.setdefault(queue, asyncio.Lock()):
            offset = self.current(queue)
            if offset is None or self._persisted.get(queue) == offset:
                return
            try:
                taken = await self._send(queue, offset)
            except RocketError:
                self._unanswered.add(queue)
                raise
            if taken:
                self._last_known[queue] = offset
            else:
                self.on_reset_waiting(queue)
            if queue in self._unanswered:  # the one before may be executed after this one: once more next time
                self._unanswered.discard(queue)
            elif taken:
                self._persisted[queue] = offset

    async def _send(self, queue: MessageQueue, offset: int) -> bool:
        """Commit; the first one of a topic at a broker goes alone.

        Two first ones at once each make a table for the group, and the broker keeps one of the two: it acknowledges
        both commits and forgets one. Seen on 4.9.7 and 5.3.3. Source: ConsumerOffsetManager.commitOffset.
        """
        table = (queue.broker_name, queue.topic)
        broker = self._cluster.broker(queue.broker_name)
        if table in self._tables:
            return await broker.commit_offset(self._group, queue, offset)
        async with self._first.setdefault(table, asyncio.Lock()):
            taken = await broker.commit_offset(self._group, queue, offset)
            self._tables.add(table)
        return taken

    async def release(self, queue: MessageQueue) -> None:
        failed = await self.persist([queue])
        self._memory.remove_offset(queue)
        self._persisted.pop(queue, None)
        self._in_turn.pop(queue, None)
        for error in failed.values():
            raise error

    def forget(self, queue: MessageQueue) -> None:
        self._memory.remove_offset(queue)
        self._persisted.pop(queue, None)
        self._in_turn.pop(queue, None)

    def doubt(self, broker_name: str | None = None) -> None:
        for queue in [queue for queue in self._persisted if broker_name in (None, queue.broker_name)]:
            del self._persisted[queue]
        if broker_name is not None:  # it may have been started again, with a table it read before ours was there
            self._tables = {table for table in self._tables if table[0] != broker_name}

    async def close(self) -> None:
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._memory.close()


class StoreCommits:
    """Offsets in an `OffsetStore` that is open. Its blocking calls have one thread."""

    def __init__(self, store: OffsetStore, *, memory_first: bool) -> None:
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self._store = store
        self._memory_first = memory_first
        self._epoch_store = store if isinstance(store, ResetEpochs) else None
        self._epochs: dict[MessageQueue, int] = {}  # where the store keeps none
        self._persisted: dict[MessageQueue, int] = {}
        self._thread = ThreadPoolExecutor(1, "pyrocket-store")

    @property
    def store(self) -> OffsetStore:
        return self._store

    async def _do(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._store.update_offset(queue, offset, True)

    def current(self, queue: MessageQueue) -> int | None:
        return self._store.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self._store.clone_offset_table(topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        return self._persisted.get(queue)

    async def start_offset(self, queue: MessageQueue) -> int | None:
        kind = ReadOffsetType.MEMORY_FIRST_THEN_STORE if self._memory_first else ReadOffsetType.READ_FROM_STORE
        offset = await self._do(self._store.read_offset, queue, kind)
        if offset is not None:
            self._store.update_offset(queue, offset)
            self._persisted[queue] = offset
        return offset

    def last_known(self, queue: MessageQueue) -> int | None:
        return None  # the store has what was stored; nobody else deletes from it

    async def replace(self, queue: MessageQueue, offset: int) -> None:
        self._store.update_offset(queue, offset)
        await self._do(self._store.persist, queue)
        self._persisted[queue] = offset

    @property
    def keeps_epochs(self) -> bool:
        return self._epoch_store is not None

    def reset_epoch(self, queue: MessageQueue) -> int:
        store = self._epoch_store
        return store.reset_epoch(queue) if store is not None else self._epochs.get(queue, 0)

    async def follow(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        moving = {queue: reset.offset for queue, reset in resets.items() if reset.offset is not None}
        if self._epoch_store is not None:
            await self._do(self._epoch_store.persist_resets, resets)
        else:
            self._epochs.update({queue: reset.epoch for queue, reset in resets.items()})
            for queue, offset in moving.items():
                self._store.update_offset(queue, offset)
            await self._do(self._store.persist_all, list(moving))
        self._persisted.update(moving)

    async def persist_again(self, queues: Iterable[MessageQueue]) -> None:
        await self._do(self._store.persist_all, list(queues))

    def places(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        return {"": list(queues)}

    async def persist(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, RocketError]:
        changed = {
            queue: offset
            for queue in queues
            if (offset := self.current(queue)) is not None and self._persisted.get(queue) != offset
        }
        try:
            await self._do(self._store.persist_all, list(changed))  # with none, too: a checkpoint may be due
        except RocketError as error:
            return dict.fromkeys(changed, error)
        self._persisted.update(changed)
        return {}

    async def release(self, queue: MessageQueue) -> None:
        await self._do(self._store.remove_offset, queue)
        self._persisted.pop(queue, None)

    def forget(self, queue: MessageQueue) -> None:
        self._persisted.pop(queue, None)  # a store has no way to forget unstored values; the next read replaces them

    def doubt(self, broker_name: str | None = None) -> None:
        pass

    async def close(self) -> None:
        try:
            await self._do(self._store.close)
        finally:
            self._thread.shutdown(wait=False)
