"""Offsets at the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits, consume_exception, wait_for_all
from pyrocket_consumer.errors import BrokerError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import QueueReset


class BrokerCommits(Commits):
    """Offsets at the brokers: acknowledged commits, several at a time."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._first_commit_locks: dict[tuple[str, str], asyncio.Lock] = {}  # by broker and topic
        self._first_commit_errors: dict[tuple[str, str], RocketError] = {}  # the latest error of each
        self._tables: set[tuple[str, str]] = set()  # brokers and topics that have a table of this group
        self._in_flight: set[asyncio.Task[None]] = set()

    async def start_offset(self, record: CommitRecord) -> int | None:
        queue = record.queue
        offset = await self._cluster.broker(queue.broker_name).query_offset(self._group, queue)
        if offset is not None:
            record.offset = record.persisted = offset
            if record.last_known is None or offset >= record.last_known:  # `StartOffsets` decides about a lower one
                record.last_known = offset
            if offset > 0:  # brokers of 4.9 return 0 for a new queue without an offset
                self._tables.add((queue.broker_name, queue.topic))
        return offset

    async def overwrite(self, record: CommitRecord, offset: int) -> None:
        record.offset, record.persisted = offset, None
        await asyncio.shield(self._start_commit(record))

    async def apply_resets(self, resets: Mapping[CommitRecord, QueueReset]) -> None:
        moving = {record: reset.offset for record, reset in resets.items() if reset.offset is not None}
        await asyncio.gather(*(self.overwrite(record, offset) for record, offset in moving.items()))

    async def retry_resets(self, records: Collection[CommitRecord]) -> None:
        await asyncio.gather(*(asyncio.shield(self._start_commit(record)) for record in records))

    def by_store(self, records: Iterable[CommitRecord]) -> dict[str, list[CommitRecord]]:
        found: dict[str, list[CommitRecord]] = {}
        for record in records:
            found.setdefault(record.queue.broker_name, []).append(record)
        return found

    async def persist(
        self, records: Iterable[CommitRecord], *, until: float | None = None
    ) -> dict[MessageQueue, RocketError]:
        # Queues whose last commit got no response come last. If such a commit is a first one and gets none again, the
        # others do not have to wait for it.
        changed = [record for record in records if record.persisted != record.current()]
        commits = {record: self._start_commit(record) for record in sorted(changed, key=attrgetter("is_unanswered"))}
        began = asyncio.get_running_loop().time()
        await wait_for_all(commits.values(), until)
        failed: dict[MessageQueue, RocketError] = {}
        for record in changed:
            if not commits[record].done():
                waited_s = asyncio.get_running_loop().time() - began
                broker = f"broker {record.queue.broker_name!r}"
                failed[record.queue] = RequestTimeout("the commit", broker, waited_s)
            elif isinstance(error := commits[record].exception(), RocketError):
                failed[record.queue] = error
            elif error is not None:
                raise error
        return failed

    def _start_commit(self, record: CommitRecord) -> asyncio.Task[None]:
        # If a cancelled caller ended the commit, its lock would be free before the broker responds. The next commit
        # could start, and the broker could execute the older one last. So the commit continues without its caller.
        task = asyncio.get_running_loop().create_task(self._commit_newest(record))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(consume_exception)
        return task

    async def _commit_newest(self, record: CommitRecord) -> None:
        """Commit the newest offset, one commit of a queue at a time, because a broker may execute two in any order."""
        async with record.lock:
            offset = record.current()
            if offset is None or record.persisted == offset:
                return
            taken = await self._send(record, offset)
            if taken:
                record.last_known, record.may_be_lost = offset, False
                record.acked_at = asyncio.get_running_loop().time()
            else:
                self.context.member.reset_waiting(record.queue)
            if record.is_unanswered:  # the broker may execute the unanswered one last, so commit again
                record.is_unanswered = False
            elif taken:
                record.persisted = offset

    async def _send(self, record: CommitRecord, offset: int) -> bool:
        """Commit an offset. The first commit of a topic at a broker runs alone.

        Two concurrent first commits each create a table for the group, and the broker keeps one of the two. It
        acknowledges both commits and loses one. Seen on 4.9.7 and 5.3.3. Source: ConsumerOffsetManager.commitOffset.

        If a first commit gets no response, the commits that wait for it fail, too. Otherwise each of them would wait
        as long for the same broker, one after the other. A refused first commit does not fail the others.
        """
        table = (record.queue.broker_name, record.queue.topic)
        if table not in self._tables:
            before = self._first_commit_errors.get(table)
            async with self._first_commit_locks.setdefault(table, asyncio.Lock()):
                error = self._first_commit_errors.get(table)
                if table not in self._tables:
                    if error is not None and error is not before:
                        raise type(error)(*error.args) from error
                    return await self._send_first(table, record, offset)
        return await self._send_commit(record, offset)

    async def _send_first(self, table: tuple[str, str], record: CommitRecord, offset: int) -> bool:
        try:
            taken = await self._send_commit(record, offset)
        except BrokerError:
            raise
        except RocketError as error:
            self._first_commit_errors[table] = error
            raise
        self._tables.add(table)
        return taken

    async def _send_commit(self, record: CommitRecord, offset: int) -> bool:
        try:
            return await self._cluster.broker(record.queue.broker_name).commit_offset(self._group, record.queue, offset)
        except RocketError:
            record.is_unanswered = True
            raise

    def mark_unpersisted(self, records: Iterable[CommitRecord], broker_name: str | None = None) -> None:
        for record in records:
            if broker_name in (None, record.queue.broker_name):
                record.persisted = None
        if broker_name is not None:  # a restarted broker may have read its tables before this group had one
            self._tables = {table for table in self._tables if table[0] != broker_name}

    async def close(self, *, until: float | None = None) -> None:
        await wait_for_all(self._in_flight, until)
