"""How offsets reach their store: read when a queue begins, persisted by a timer and when a queue ends.

`Commits` is the consumer's view of any offset store. Commits to brokers use the consumer's connections. File access and
offset stores of users run on a separate thread, so a slow disk does not delay pulls and heartbeats, and vice versa.
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
from pyrocket_consumer.offsets.base import MAX_OFFSET
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.text import logger, safe_repr

log = logger("consumer")

T = TypeVar("T")


class Commits(Protocol):
    """The operations of a consumer on any offset store. Any thread may call `update` and `current`, which are quick."""

    on_reset_waiting: Callable[[MessageQueue], None]
    """Called when a broker ignored a commit because it has a reset for the next pull of that queue."""

    on_fenced: Callable[[MessageQueue, str], None]
    """Called when another member has claimed the queue."""

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        """Return the claim on the queue, None if this kind of store has no claims."""

    def lost_claim(self, queue: MessageQueue) -> Claim | None:
        """Return the last claim on a queue that was fenced and not claimed again, None if this store has no claims."""

    def update(self, queue: MessageQueue, offset: int) -> None:
        """Record in memory that everything below `offset` is consumed. Ignore an offset below the recorded one."""

    def current(self, queue: MessageQueue) -> int | None:
        """Return the offset in memory."""

    def table(self, topic: str) -> dict[MessageQueue, int]:
        """Return the offsets in memory of the queues of `topic`, or of all queues if it is empty."""

    def persisted(self, queue: MessageQueue) -> int | None:
        """Return the offset that is known to be stored."""

    def is_paused(self, queue: MessageQueue) -> bool:
        """Return whether it is too early to read the start offset of `queue` again."""

    async def start_offset(self, queue: MessageQueue) -> int | None:
        """Return the offset to continue at, None if this group never consumed `queue`. A failure raises an error."""

    def last_known(self, queue: MessageQueue) -> int | None:
        """Return the offset that the broker last reported or acknowledged, even if the queue has ended since."""

    def may_have_lost(self, queue: MessageQueue) -> bool:
        """Return whether the broker may have lost the last known offset, because its connection ended soon after."""

    def invalidate(self, queue: MessageQueue) -> None:
        """Forget the last known offset of a queue that another client has reset while this member did not hold it."""

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        """Store the start offset of `queue` durably, before its first pull. Many queues together take little longer.

        Raises:
            RocketError: the offset may not be stored. It stays in memory.
        """

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        """Store `offset` in place of the present one, and return when it is durable."""

    @property
    def keeps_epochs(self) -> bool:
        """Whether the store keeps the epochs of resets. If not, they are in memory only."""

    def reset_epoch(self, queue: MessageQueue) -> int:
        """Return the epoch of the newest reset that was applied to the queue, 0 without one."""

    async def apply_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Store the offsets and epochs of resets durably. Memory has them even if that fails."""

    async def retry_resets(self, queues: Iterable[MessageQueue]) -> None:
        """Store again what `apply_resets` could not store, and return when it is durable."""

    def by_store(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        """Return `queues` grouped by the store that keeps them, because the stores need not wait for each other."""

    async def persist(
        self, queues: Iterable[MessageQueue], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        """Store the changed offsets. Return the error of each queue that failed; the next call tries it again.

        A commit without an acknowledgement at the loop's time `until` is returned as a RequestTimeout, and continues.
        """

    async def release(self, queue: MessageQueue) -> None:
        """Store the queue's offset, and remove it from memory."""

    def forget(self, queue: MessageQueue) -> None:
        """Remove the queue from memory without storing anything, because another member holds it already."""

    def broker_lost(self, broker_name: str) -> None:
        """Note that a broker closed the connection. If it died, it may have lost its latest acknowledged commits."""

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        """Store everything again next time, because the broker (or any, if None) may have lost acknowledged offsets."""

    async def close(self, *, until: float | None = None) -> None:
        """Close the store, after everything was persisted. Do not wait beyond `until` for running commits."""


FLUSHED_WITHIN_S = 30.0
"""The age at which an acknowledged offset is safe: brokers write every 5 s, and their slaves copy every 10 s."""


class BrokerCommits:
    """Offsets at the brokers: acknowledged commits, several at a time. Only `update` may run outside the I/O thread."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue, str], None] = lambda queue, why: None
        self._cluster = cluster
        self._group = group
        self._memory = MemoryOffsetStore()
        self._persisted: dict[MessageQueue, int] = {}
        self._last_known: dict[MessageQueue, int] = {}
        self._maybe_lost: set[MessageQueue] = set()  # the connection ended soon after the last known offset
        self._acked_at: dict[MessageQueue, float] = {}
        self._commit_locks: dict[MessageQueue, asyncio.Lock] = {}
        self._first_commit_locks: dict[tuple[str, str], asyncio.Lock] = {}  # by broker and topic
        self._first_commit_errors: dict[tuple[str, str], RocketError] = {}  # the latest error of each
        self._tables: set[tuple[str, str]] = set()  # brokers and topics that have a table of this group
        self._in_flight: set[asyncio.Task[None]] = set()
        self._unanswered_commits: set[MessageQueue] = set()  # the last commit got no response, or an error

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return None

    def lost_claim(self, queue: MessageQueue) -> Claim | None:
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
            if offset >= self._last_known.get(queue, 0):  # `Assignments` decides about a lower one
                self._last_known[queue] = offset
            if offset > 0:  # brokers of 4.9 return 0 for a new queue without an offset
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
        # Queues whose last commit got no response come last. If such a commit is a first one and gets none again, the
        # others do not have to wait for it.
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
        # If a cancelled caller ended the commit, its lock would be free before the broker responds. The next commit
        # could start, and the broker could execute the older one last. So the commit continues without its caller.
        task = asyncio.get_running_loop().create_task(self._commit_newest(queue))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(consume_exception)
        return task

    async def _commit_newest(self, queue: MessageQueue) -> None:
        """Commit the newest offset, one commit of a queue at a time, because a broker may execute two in any order."""
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
            if queue in self._unanswered_commits:  # the broker may execute the unanswered one last, so commit again
                self._unanswered_commits.discard(queue)
            elif taken:
                self._persisted[queue] = offset

    async def _send(self, queue: MessageQueue, offset: int) -> bool:
        """Commit an offset. The first commit of a topic at a broker runs alone.

        Two concurrent first commits each create a table for the group, and the broker keeps one of the two. It
        acknowledges both commits and loses one. Seen on 4.9.7 and 5.3.3. Source: ConsumerOffsetManager.commitOffset.

        If a first commit gets no response, the commits that wait for it fail, too. Otherwise each of them would wait
        as long for the same broker, one after the other. A refused first commit does not fail the others.
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
        if broker_name is not None:  # a restarted broker may have read its tables before this group had one
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
    """Offsets in an open `OffsetStore`. Its blocking calls run on one thread."""

    def __init__(self, store: OffsetStore, thread: SerialExecutor | None = None, *, memory_first: bool) -> None:
        """Use the store. `thread` has loaded it, and `close` ends the thread."""
        self.on_reset_waiting: Callable[[MessageQueue], None] = lambda queue: None
        self.on_fenced: Callable[[MessageQueue, str], None] = lambda queue, why: None
        self._store = store
        self._memory_first = memory_first
        self._epoch_store = store if isinstance(store, ResetEpochs) else None
        self._epochs: dict[MessageQueue, int] = {}  # if the store keeps none
        self._persisted: dict[MessageQueue, int] = {}
        self._starting: dict[MessageQueue, None] = {}  # the next sync stores the start offsets of these
        self._next_sync: asyncio.Task[None] | None = None
        self._sync_lock = asyncio.Lock()
        # Updates that the store refused. The next persist tries them first.
        self._refused_updates: dict[MessageQueue, int] = {}
        self._thread = thread or SerialExecutor("pyrocket-store")

    def claim_of(self, queue: MessageQueue) -> Claim | None:
        return None

    def lost_claim(self, queue: MessageQueue) -> Claim | None:
        return None

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _call_store, work, *arguments)

    async def _run_until(self, until: float | None, what: str, work: Callable[..., object], *arguments: object) -> None:
        """Run `work` on the store's thread. After `until`, raise an error and let the work continue."""
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
        except BaseException:  # raised by a store of a user; the worker that acknowledges cannot handle it
            self._refused_updates[queue] = offset

    def current(self, queue: MessageQueue) -> int | None:
        try:
            return self._store.read_offset(queue, ReadOffsetType.READ_FROM_MEMORY)
        except BaseException:  # raised by a store of a user; its next persist reports the error
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
            self._check_number("read_offset", queue, offset, "None if it has no offset")
            _call_store(self._store.update_offset, queue, offset)
            self._persisted[queue] = offset
        return offset

    def last_known(self, queue: MessageQueue) -> int | None:
        return None  # the store keeps what was stored, and no other process deletes from it

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
        async with self._sync_lock:  # queues that begin during a sync gather for the next one
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
        if self._epoch_store is None:
            return self._epochs.get(queue, 0)
        epoch = _call_store(self._epoch_store.reset_epoch, queue)
        self._check_number("reset_epoch", queue, epoch, "0 if there was no reset")
        return epoch

    def _check_number(self, method: str, queue: MessageQueue, number: object, or_else: str) -> None:
        """Check what the store returned, because users write stores.

        Raises:
            OffsetStoreError: it is no offset and no epoch. The text names the store's class.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_OFFSET:
            raise OffsetStoreError(
                f"{type(self._store).__qualname__}.{method} returned {safe_repr(number)} for {queue}; correct it: it "
                f"must return a whole number from 0 to 2**63 - 1, or {or_else}"
            )

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
        try:  # also without changes, because a checkpoint may be due
            await self._run_until(until, "storing offsets", self._store.persist_all, list(changed))
        except RocketError as error:
            return failed | dict.fromkeys(changed, error)
        self._persisted.update(changed)
        return failed

    def _retry_updates(self) -> dict[MessageQueue, RocketError]:
        """Retry updates that the store refused before. Return the errors of those that it refuses again."""
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
        self._persisted.pop(queue, None)  # a store cannot drop an unstored offset; the next read replaces it

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
    """Wait until all tasks have ended, or until the loop's time `until`. Neither cancel them nor raise their errors."""
    if tasks:
        timeout_s = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.wait(tasks, timeout=timeout_s)


def _call_store(work: Callable[..., T], *arguments: object) -> T:
    """Call a method of an offset store. Any exception of a user's store becomes an error of this call only.

    Raises:
        OffsetStoreError: the store failed. The text names the method.
    """
    try:
        return work(*arguments)
    except RocketError:
        raise
    except BaseException as error:  # also SystemExit, because the calling thread does not want to exit
        what = getattr(work, "__qualname__", repr(work))
        raise OffsetStoreError(f"the offset store failed in {what}: {type(error).__name__}: {error}") from error


def consume_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, because its waiter has got it or has stopped waiting."""
    if not task.cancelled():
        task.exception()
