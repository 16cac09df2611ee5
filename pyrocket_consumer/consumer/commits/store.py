"""Offsets in an `OffsetStore`: a file, or a store written by the user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeVar

from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits, consume_exception, wait_for_all
from pyrocket_consumer.errors import OffsetStoreError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import OffsetStore, QueueReset, ReadOffsetType, ResetEpochs
from pyrocket_consumer.offsets.base import MAX_OFFSET
from pyrocket_consumer.text import safe_repr
from pyrocket_consumer.transport.io_thread import SerialExecutor

T = TypeVar("T")


class StoreCommits(Commits):
    """Offsets in an open `OffsetStore`. Its blocking calls run on one thread."""

    def __init__(self, store: OffsetStore, thread: SerialExecutor | None = None, *, memory_first: bool) -> None:
        """Use the store. `thread` has loaded it, and `close` ends the thread."""
        self._store = store
        self._memory_first = memory_first
        self._epoch_store = store if isinstance(store, ResetEpochs) else None
        self.keeps_epochs = self._epoch_store is not None
        self._starting: list[MessageQueue] = []  # the next sync stores the start offsets of these
        self._next_sync: asyncio.Task[None] | None = None
        self._sync_lock = asyncio.Lock()
        self._thread = thread or SerialExecutor("pyrocket-store")

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

    def edge_listener(self, record: CommitRecord) -> Callable[[MessageQueue, int], None]:
        return partial(self._update, record)

    def _update(self, record: CommitRecord, queue: MessageQueue, offset: int) -> None:
        try:
            self._store.update_offset(queue, offset, True)
        except BaseException:  # raised by a store of a user; the worker that acknowledges cannot handle it
            record.refused = offset

    def table(self, topic: str, records: Iterable[CommitRecord]) -> dict[MessageQueue, int]:
        return _call_store(self._store.clone_offset_table, topic)

    async def start_offset(self, record: CommitRecord) -> int | None:
        kind = ReadOffsetType.MEMORY_FIRST_THEN_STORE if self._memory_first else ReadOffsetType.READ_FROM_STORE
        offset = await self._run(self._store.read_offset, record.queue, kind)
        if offset is not None:
            self._check_number("read_offset", record.queue, offset, "None if it has no offset")
            self._replace(record, offset)
            record.persisted = offset
        return offset

    def _replace(self, record: CommitRecord, offset: int) -> None:
        _call_store(self._store.update_offset, record.queue, offset)
        record.offset, record.refused = offset, None

    async def store_start(self, record: CommitRecord, offset: int) -> None:
        self._replace(record, offset)
        self._starting.append(record.queue)
        if self._next_sync is None:
            self._next_sync = asyncio.get_running_loop().create_task(self._sync_starts())
            self._next_sync.add_done_callback(consume_exception)
        await asyncio.shield(self._next_sync)
        record.persisted = offset

    async def _sync_starts(self) -> None:
        async with self._sync_lock:  # queues that begin during a sync gather for the next one
            queues, self._starting, self._next_sync = self._starting, [], None
            await self._run(self._store.persist_all, queues)

    async def overwrite(self, record: CommitRecord, offset: int) -> None:
        self._replace(record, offset)
        await self._run(self._store.persist, record.queue)
        record.persisted = offset

    def reset_epoch(self, record: CommitRecord) -> int:
        if self._epoch_store is None:
            return record.reset_epoch
        epoch = _call_store(self._epoch_store.reset_epoch, record.queue)
        self._check_number("reset_epoch", record.queue, epoch, "0 if there was no reset")
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

    async def apply_resets(self, resets: Mapping[CommitRecord, QueueReset]) -> None:
        moving = {record: reset.offset for record, reset in resets.items() if reset.offset is not None}
        for record, offset in moving.items():
            record.offset, record.refused = offset, None
        if self._epoch_store is not None:
            await self._run(self._epoch_store.persist_resets, {record.queue: reset for record, reset in resets.items()})
        else:
            for record, reset in resets.items():
                record.reset_epoch = reset.epoch
            for record, offset in moving.items():
                _call_store(self._store.update_offset, record.queue, offset)
            await self._run(self._store.persist_all, [record.queue for record in moving])
        for record, offset in moving.items():
            record.persisted = offset

    async def retry_resets(self, records: Collection[CommitRecord]) -> None:
        await self._run(self._store.persist_all, [record.queue for record in records])

    async def persist(
        self, records: Iterable[CommitRecord], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        failed: dict[MessageQueue, RocketError] = {}
        changed: dict[CommitRecord, int] = {}
        for record in records:
            offset = record.current()
            if (refused := record.refused) is not None:
                try:
                    _call_store(self._store.update_offset, record.queue, refused, True)
                except RocketError as error:
                    failed[record.queue] = error
                    continue
                if record.refused == refused:
                    record.refused = None
            if offset is not None and record.persisted != offset:
                changed[record] = offset
        try:  # also without changes, because a checkpoint may be due
            await self._run_until(
                until, "storing offsets", self._store.persist_all, [record.queue for record in changed]
            )
        except RocketError as error:
            return failed | {record.queue: error for record in changed}
        for record, offset in changed.items():
            record.persisted = offset
        return failed

    async def release(self, record: CommitRecord) -> None:
        record.forget()
        await self._run(self._store.remove_offset, record.queue)

    async def close(self, *, until: float | None = None) -> None:
        try:
            await self._run_until(until, "closing", self._store.close)
        finally:
            self._thread.shutdown(wait=False)


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
