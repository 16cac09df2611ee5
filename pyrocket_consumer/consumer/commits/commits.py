"""How offsets reach their store: read at the start of a queue, persisted by a timer and at every drop.

`Commits` is the consumer's view of any offset store. Broker offsets travel over the consumer's own connections;
file work, and stores of the user's own, run on a thread of their own, so that neither a slow disk delays pulls and
heartbeats, nor those the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.consumer.commits.serial_executor import SerialExecutor
from pyrocket_consumer.errors import BrokerError, OffsetStoreError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import MemoryOffsetStore, OffsetStore, QueueReset, ReadOffsetType, ResetEpochs
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.text import logger

log = logger("consumer")

T = TypeVar("T")


class Commits(Protocol):
    """What a consumer does with an offset store. `update` and `current` are quick and may be called by any thread."""

    on_reset_waiting: Callable[[MessageQueue], None]
    """Called when a broker ignored a commit because it has a reset for the next pull of that queue."""

    on_fenced: Callable[[MessageQueue, str], None]
    """Called when another member has claimed the queue since."""

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        """Return by which claim the queue is ours, None where offsets are not claimed."""

    def update(self, queue: MessageQueue, offset: int) -> None:
        """Note that everything below `offset` is consumed. A lower one than noted before changes nothing."""

    def current(self, queue: MessageQueue) -> int | None:
        """Return what is noted in memory."""

    def table(self, topic: str) -> dict[MessageQueue, int]:
        """Return what is noted in memory for `topic`, for every topic when it is empty."""

    def persisted(self, queue: MessageQueue) -> int | None:
        """Return what is known to be stored."""

    def is_paused(self, queue: MessageQueue) -> bool:
        """Tell whether it is too early to ask once more where `queue` begins."""

    async def start_offset(self, queue: MessageQueue) -> int | None:
        """Return where to go on, None if this group has never consumed `queue`. An error is raised, never None."""

    def last_known(self, queue: MessageQueue) -> int | None:
        """Return what the broker last told or acknowledged of `queue`, also of one that was given up since."""

    def may_have_lost(self, queue: MessageQueue) -> bool:
        """Tell whether the broker may have lost what is last known: its connection ended soon after."""

    def invalidate(self, queue: MessageQueue) -> None:
        """Somebody has reset a queue we do not hold: where we last knew it to be means nothing any more."""

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        """Store where `queue` begins, durably, before its first pull. Many that begin together take little longer.

        Raises:
            RocketError: it is not known to be stored; it stays noted.
        """

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        """Store `offset`, whatever was noted, and return when it is durable."""

    @property
    def keeps_epochs(self) -> bool:
        """Whether the epochs of resets are stored, and not only in memory."""

    def reset_epoch(self, queue: MessageQueue) -> int:
        """Return the epoch of the newest reset the queue has followed, 0 if none."""

    async def apply_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Store offsets and epochs, and return when all are durable. Memory has them even if that fails."""

    async def retry_resets(self, queues: Iterable[MessageQueue]) -> None:
        """Return when what was set by `apply_resets` is durable."""

    def by_store(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        """Return `queues` by where they are stored: places that need not wait for each other."""

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        """Store what has changed, and return what could not be stored. It is tried again next time.

        What is not acknowledged at the loop's time `until` is returned, too (RequestTimeout); it goes on all the same.
        """

    async def release(self, queue: MessageQueue) -> None:
        """Store the queue's offset, and forget it."""

    def forget(self, queue: MessageQueue) -> None:
        """Forget the queue without storing anything: it belongs to another member already."""

    def broker_lost(self, broker_name: str) -> None:
        """The connection to a broker has ended unasked: it may have died, and with it what it acknowledged of late."""

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        """The broker (or any) may hold something else than it acknowledged: store everything again next time."""

    async def close(self, *, until: float | None = None) -> None:
        """Close the store; everything was persisted before. What is still under way at `until` is not waited for."""


FLUSHED_WITHIN_S = 30.0
"""What was acknowledged so long ago is written: brokers write every 5 s, their slaves ask every 10 s."""


class BrokerCommits:
    """Offsets at the brokers: acknowledged commits, several at a time. Confined to the I/O thread but for `update`."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue, str], None] = lambda queue, why: None
        self._cluster = cluster
        self._group = group
        self._memory = MemoryOffsetStore()
        self._persisted: dict[MessageQueue, int] = {}
        self._last_known: dict[MessageQueue, int] = {}
        self._maybe_lost: set[MessageQueue] = set()  # whose broker was lost soon after what is last known
        self._acked_at: dict[MessageQueue, float] = {}
        self._commit_locks: dict[MessageQueue, asyncio.Lock] = {}
        self._first_commit_locks: dict[tuple[str, str], asyncio.Lock] = {}  # by broker and topic
        self._first_commit_errors: dict[tuple[str, str], RocketError] = {}  # what became of the last one of each
        self._tables: set[tuple[str, str]] = set()  # brokers and topics that have a table of this group
        self._in_flight: set[asyncio.Task[None]] = set()
        self._unanswered_commits: set[MessageQueue] = set()  # whose last commit got no answer, or a refusal

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return None

    def update(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset, True)

    def current(self, queue: MessageQueue) -> int | None:
        return self._memory.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self._memory.clone_offset_table(topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        return self._persisted.get(queue)

    def is_paused(self, queue: MessageQueue) -> bool:
        return False

    async def start_offset(self, queue: MessageQueue) -> int | None:
        offset = await self._cluster.broker(queue.broker_name).query_offset(
            self._group, queue, set_zero_if_not_found=False
        )
        if offset is not None:
            self._memory.update_offset(queue, offset)
            self._persisted[queue] = offset
            if offset >= self._last_known.get(queue, 0):  # a lower one is judged by whoever begins the queue
                self._last_known[queue] = offset
            if offset > 0:  # brokers of 4.9 answer 0 for a young queue without any
                self._tables.add((queue.broker_name, queue.topic))
        return offset

    def last_known(self, queue: MessageQueue) -> int | None:
        return self._last_known.get(queue)

    def may_have_lost(self, queue: MessageQueue) -> bool:
        return queue in self._maybe_lost

    def invalidate(self, queue: MessageQueue) -> None:
        self._last_known.pop(queue, None)
        self._acked_at.pop(queue, None)
        self._maybe_lost.discard(queue)

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        await self.overwrite(queue, offset)

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        self._memory.update_offset(queue, offset)
        self._persisted.pop(queue, None)
        await self._commit(queue)

    @property
    def keeps_epochs(self) -> bool:
        return False

    def reset_epoch(self, queue: MessageQueue) -> int:
        return 0

    async def apply_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        moving = {queue: reset.offset for queue, reset in resets.items() if reset.offset is not None}
        await asyncio.gather(*(self.overwrite(queue, offset) for queue, offset in moving.items()))

    async def retry_resets(self, queues: Iterable[MessageQueue]) -> None:
        await asyncio.gather(*map(self._commit, queues))

    def by_store(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        found: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            found.setdefault(queue.broker_name, []).append(queue)
        return found

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        # What got no answer comes last: should it be a first commit, and get none again, the others wait for it no more
        changed = [queue for queue in queues if self._persisted.get(queue) != self.current(queue)]
        commits = {
            queue: self._start_commit(queue) for queue in sorted(changed, key=self._unanswered_commits.__contains__)
        }
        began = asyncio.get_running_loop().time()
        await wait_for_all(commits.values(), until)
        failed: dict[MessageQueue, RocketError] = {}
        for queue in changed:
            if not commits[queue].done():
                waited_s = asyncio.get_running_loop().time() - began
                failed[queue] = RequestTimeout("the commit", f"broker {queue.broker_name!r}", waited_s)
            elif isinstance(error := commits[queue].exception(), RocketError):
                failed[queue] = error
            elif error is not None:
                raise error
        return failed

    async def _commit(self, queue: MessageQueue) -> None:
        await asyncio.shield(self._start_commit(queue))

    def _start_commit(self, queue: MessageQueue) -> asyncio.Task[None]:
        # Whoever waits may be cancelled, the commit is not: while the broker has not answered it, it could still
        # execute it, after the next one.
        task = asyncio.get_running_loop().create_task(self._commit_newest(queue))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(consume_exception)
        return task

    async def _commit_newest(self, queue: MessageQueue) -> None:
        """Commit the newest value, one commit of a queue at a time: a broker may execute two in any order."""
        async with self._commit_locks.setdefault(queue, asyncio.Lock()):
            offset = self.current(queue)
            if offset is None or self._persisted.get(queue) == offset:
                return
            taken = await self._send(queue, offset)
            if taken:
                self._last_known[queue] = offset
                self._acked_at[queue] = asyncio.get_running_loop().time()
                self._maybe_lost.discard(queue)
            else:
                self.on_reset_waiting(queue)
            if queue in self._unanswered_commits:  # the one before may be executed after this one: once more next time
                self._unanswered_commits.discard(queue)
            elif taken:
                self._persisted[queue] = offset

    async def _send(self, queue: MessageQueue, offset: int) -> bool:
        """Commit; the first one of a topic at a broker goes alone.

        Two first ones at once each make a table for the group, and the broker keeps one of the two: it acknowledges
        both commits and forgets one. Seen on 4.9.7 and 5.3.3. Source: ConsumerOffsetManager.commitOffset.

        A first one that gets no answer fails those that wait for it as well: else they would, one after the other,
        wait as long for the same broker. One that is refused says nothing of the others.
        """
        table = (queue.broker_name, queue.topic)
        if table not in self._tables:
            before = self._first_commit_errors.get(table)
            async with self._first_commit_locks.setdefault(table, asyncio.Lock()):
                error = self._first_commit_errors.get(table)
                if table not in self._tables:
                    if error is not None and error is not before:
                        raise type(error)(*error.args) from error
                    return await self._send_first(table, queue, offset)
        return await self._send_commit(queue, offset)

    async def _send_first(self, table: tuple[str, str], queue: MessageQueue, offset: int) -> bool:
        try:
            taken = await self._send_commit(queue, offset)
        except BrokerError:
            raise
        except RocketError as error:
            self._first_commit_errors[table] = error
            raise
        self._tables.add(table)
        return taken

    async def _send_commit(self, queue: MessageQueue, offset: int) -> bool:
        try:
            return await self._cluster.broker(queue.broker_name).commit_offset(self._group, queue, offset)
        except RocketError:
            self._unanswered_commits.add(queue)
            raise

    async def release(self, queue: MessageQueue) -> None:
        failed = await self.persist([queue])
        self._memory.remove_offset(queue)
        self._persisted.pop(queue, None)
        self._commit_locks.pop(queue, None)
        for error in failed.values():
            raise error

    def forget(self, queue: MessageQueue) -> None:
        self._memory.remove_offset(queue)
        self._persisted.pop(queue, None)
        self._commit_locks.pop(queue, None)

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        for queue in [queue for queue in self._persisted if broker_name in (None, queue.broker_name)]:
            del self._persisted[queue]
        if broker_name is not None:  # it may have been started again, with a table it read before ours was there
            self._tables = {table for table in self._tables if table[0] != broker_name}

    def broker_lost(self, broker_name: str) -> None:
        since = asyncio.get_running_loop().time() - FLUSHED_WITHIN_S
        self._maybe_lost.update(
            queue
            for queue, at in self._acked_at.items()
            if queue.broker_name == broker_name and at > since and queue in self._last_known
        )

    async def close(self, *, until: float | None = None) -> None:
        await wait_for_all(self._in_flight, until)
        self._memory.close()


class StoreCommits:
    """Offsets in an `OffsetStore` that is open. Its blocking calls have one thread."""

    def __init__(self, store: OffsetStore, thread: SerialExecutor | None = None, *, memory_first: bool) -> None:
        """`thread` is where the store was loaded; it ends with `close`."""
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue, str], None] = lambda queue, why: None
        self._store = store
        self._memory_first = memory_first
        self._epoch_store = store if isinstance(store, ResetEpochs) else None
        self._epochs: dict[MessageQueue, int] = {}  # where the store keeps none
        self._persisted: dict[MessageQueue, int] = {}
        self._starting: dict[MessageQueue, None] = {}  # what the next sync of beginnings will store
        self._next_sync: asyncio.Task[None] | None = None
        self._sync_lock = asyncio.Lock()
        self._refused_updates: dict[
            MessageQueue, int
        ] = {}  # what the store did not take, to be noted before it persists
        self._thread = thread or SerialExecutor("pyrocket-store")

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return None

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _call_store, work, *arguments)

    async def _run_until(self, until: float | None, what: str, work: Callable[..., object], *arguments: object) -> None:
        """Do the work; at `until` it is waited for no longer, and goes on."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        doing = loop.run_in_executor(self._thread, _call_store, work, *arguments)
        doing.add_done_callback(consume_exception)
        await wait_for_all([doing], until)
        if not doing.done():
            raise RequestTimeout(what, "the offset store", loop.time() - began)
        doing.result()

    def update(self, queue: MessageQueue, offset: int) -> None:
        try:
            self._store.update_offset(queue, offset, True)
        except BaseException:  # of a store of the user's: whoever acknowledges is no one to tell
            self._refused_updates[queue] = offset

    def current(self, queue: MessageQueue) -> int | None:
        try:
            return self._store.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)
        except BaseException:  # of a store of the user's; its next persist tells
            return self._persisted.get(queue)

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return _call_store(self._store.clone_offset_table, topic)

    def persisted(self, queue: MessageQueue) -> int | None:
        return self._persisted.get(queue)

    def is_paused(self, queue: MessageQueue) -> bool:
        return False

    async def start_offset(self, queue: MessageQueue) -> int | None:
        kind = ReadOffsetType.MEMORY_FIRST_THEN_STORE if self._memory_first else ReadOffsetType.READ_FROM_STORE
        offset = await self._run(self._store.read_offset, queue, kind)
        if offset is not None:
            _call_store(self._store.update_offset, queue, offset)
            self._persisted[queue] = offset
        return offset

    def last_known(self, queue: MessageQueue) -> int | None:
        return None  # the store has what was stored; nobody else deletes from it

    def may_have_lost(self, queue: MessageQueue) -> bool:
        return False

    def invalidate(self, queue: MessageQueue) -> None:
        pass

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        _call_store(self._store.update_offset, queue, offset)
        self._starting[queue] = None
        if self._next_sync is None:
            self._next_sync = asyncio.get_running_loop().create_task(self._sync_starts())
            self._next_sync.add_done_callback(consume_exception)
        await asyncio.shield(self._next_sync)
        self._persisted[queue] = offset

    async def _sync_starts(self) -> None:
        async with self._sync_lock:  # while one is under way, those that begin meanwhile gather for the next
            queues, self._starting, self._next_sync = list(self._starting), {}, None
            await self._run(self._store.persist_all, queues)

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        _call_store(self._store.update_offset, queue, offset)
        await self._run(self._store.persist, queue)
        self._persisted[queue] = offset

    @property
    def keeps_epochs(self) -> bool:
        return self._epoch_store is not None

    def reset_epoch(self, queue: MessageQueue) -> int:
        store = self._epoch_store
        return _call_store(store.reset_epoch, queue) if store is not None else self._epochs.get(queue, 0)

    async def apply_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        moving = {queue: reset.offset for queue, reset in resets.items() if reset.offset is not None}
        if self._epoch_store is not None:
            await self._run(self._epoch_store.persist_resets, resets)
        else:
            self._epochs.update({queue: reset.epoch for queue, reset in resets.items()})
            for queue, offset in moving.items():
                _call_store(self._store.update_offset, queue, offset)
            await self._run(self._store.persist_all, list(moving))
        self._persisted.update(moving)

    async def retry_resets(self, queues: Iterable[MessageQueue]) -> None:
        await self._run(self._store.persist_all, list(queues))

    def by_store(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        return {"": list(queues)}

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        failed = self._retry_updates()
        changed = {
            queue: offset
            for queue in queues
            if (offset := self.current(queue)) is not None and self._persisted.get(queue) != offset
        }
        try:  # with none, too: a checkpoint may be due
            await self._run_until(until, "storing offsets", self._store.persist_all, list(changed))
        except RocketError as error:
            return failed | dict.fromkeys(changed, error)
        self._persisted.update(changed)
        return failed

    def _retry_updates(self) -> dict[MessageQueue, RocketError]:
        """Note what the store did not take before; return what it does not take now."""
        failed: dict[MessageQueue, RocketError] = {}
        for queue, offset in list(self._refused_updates.items()):
            try:
                _call_store(self._store.update_offset, queue, offset, True)
            except RocketError as error:
                failed[queue] = error
            else:
                if self._refused_updates.get(queue) == offset:
                    del self._refused_updates[queue]
        return failed

    async def release(self, queue: MessageQueue) -> None:
        await self._run(self._store.remove_offset, queue)
        self._persisted.pop(queue, None)

    def forget(self, queue: MessageQueue) -> None:
        self._persisted.pop(queue, None)  # a store has no way to forget unstored values; the next read replaces them

    def broker_lost(self, broker_name: str) -> None:
        pass

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        pass

    async def close(self, *, until: float | None = None) -> None:
        try:
            await self._run_until(until, "closing", self._store.close)
        finally:
            self._thread.shutdown(wait=False)


async def wait_for_all(tasks: Collection[asyncio.Future[Any]], until: float | None) -> None:
    """Wait until all are done, whatever became of them, or for the loop's time `until`. None of them is cancelled."""
    if tasks:
        timeout_s = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.wait(tasks, timeout=timeout_s)


def _call_store(work: Callable[..., T], *arguments: object) -> T:
    """Call a method of an offset store. What a store of the user's raises is an error of that call, and of no other.

    Raises:
        OffsetStoreError: it failed; the text says in what.
    """
    try:
        return work(*arguments)
    except RocketError:
        raise
    except BaseException as error:  # SystemExit, too, is no wish of the thread that asked
        what = getattr(work, "__qualname__", repr(work))
        raise OffsetStoreError(f"the offset store failed in {what}: {type(error).__name__}: {error}") from error


def consume_exception(task: asyncio.Future[Any]) -> None:
    """Take note of the outcome: who waited has been told, or has gone."""
    if not task.cancelled():
        task.exception()
