"""Commits of queues that have no windows: tests move the offsets themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.member_context import MemberEvents
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue


class Ledger(MemberEvents):
    """The `Commits` of a member, with a record for each queue. It counts ignored commits in `resets_waiting`."""

    def __init__(self, commits: Commits) -> None:
        self.commits = commits
        self.member = self
        self.records: dict[MessageQueue, CommitRecord] = {}
        self.resets_waiting: list[MessageQueue] = []
        commits.attach(self)  # type: ignore[arg-type]

    def reset_waiting(self, queue: MessageQueue) -> None:
        self.resets_waiting.append(queue)

    def record(self, queue: MessageQueue) -> CommitRecord:
        return self.records.setdefault(queue, CommitRecord(queue))

    def update(self, queue: MessageQueue, offset: int) -> None:
        """Move the edge of the queue's window, which never moves back."""
        record = self.record(queue)
        if offset > (-1 if record.offset is None else record.offset):
            record.offset = offset
            if (listener := self.commits.edge_listener(record)) is not None:
                listener(queue, offset)

    def current(self, queue: MessageQueue) -> int | None:
        return self.record(queue).current()

    def persisted(self, queue: MessageQueue) -> int | None:
        return self.record(queue).stored()

    def last_known(self, queue: MessageQueue) -> int | None:
        return self.record(queue).last_known

    def table(self, topic: str) -> dict[MessageQueue, int]:
        return self.commits.table(topic, self.records.values())

    async def start_offset(self, queue: MessageQueue) -> int | None:
        return await self.commits.start_offset(self.record(queue))

    async def store_start(self, queue: MessageQueue, offset: int) -> None:
        await self.commits.store_start(self.record(queue), offset)

    async def overwrite(self, queue: MessageQueue, offset: int) -> None:
        await self.commits.overwrite(self.record(queue), offset)

    async def persist(self, queues: Iterable[MessageQueue], **options: Any) -> dict[MessageQueue, RocketError]:
        return await self.commits.persist(list(map(self.record, queues)), **options)

    async def release(self, queue: MessageQueue) -> None:
        await self.commits.release(self.record(queue))

    def forget(self, queue: MessageQueue) -> None:
        self.commits.forget(self.record(queue))

    def mark_unpersisted(self, broker_name: str | None = None) -> None:
        self.commits.mark_unpersisted(self.records.values(), broker_name)

    def by_store(self, queues: Collection[MessageQueue]) -> dict[str, list[MessageQueue]]:
        found = self.commits.by_store(map(self.record, queues))
        return {store: [record.queue for record in records] for store, records in found.items()}

    async def close(self, **options: Any) -> None:
        await self.commits.close(**options)
