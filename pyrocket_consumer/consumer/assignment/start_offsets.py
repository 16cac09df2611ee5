"""Where a queue begins: at the stored offset, at the last one that this member knows, or at a first start."""

from __future__ import annotations

import logging
from datetime import datetime

from pyrocket_consumer.consumer.assignment.divergence import DivergenceCheck
from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets


class StartOffsets:
    """Finds the start offset of queues, and its origin. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, commits: Commits, divergence: DivergenceCheck) -> None:
        self._context = context
        self._commits = commits
        self._divergence = divergence

    async def find(self, record: CommitRecord, is_new: bool) -> tuple[int, str]:
        """Return the start offset of a queue, and its origin.

        Raises:
            RocketError: the broker or the store did not respond; try again later.
        """
        context, queue = self._context, record.queue
        # Find the first start now, so that messages sent while the database does not respond come after it.
        if isinstance(context.config.offset_store, DatabaseOffsets) and record.first_start is None:
            record.first_start = await self._first_start(queue, is_new)
        stored, known = await self._commits.start_offset(record), record.last_known
        broker = context.cluster.broker(queue.broker_name)
        if stored is not None:
            if known is None or stored >= known:
                return stored, "stored"
            return await self._resolve_older_offset(record, stored, known)
        if known is not None and known > await broker.max_offset(queue):
            text = f"the broker has lost this queue and the group's offset ({known}); beginning at its first message"
            self._report_forgotten(queue, known, text)
            return await broker.min_offset(queue), "the queue was recreated"
        if known is not None:
            text = "the broker has lost the offset of this group; continuing at the last offset that this member knows"
            self._report_forgotten(queue, known, text)
            return known, "last known by this member"
        lost = record.lost_claim
        if lost is not None and await self._divergence.is_same_log(lost):
            text = "the database has lost the row of this queue; continuing at the last offset that was stored there"
            self._report_forgotten(queue, lost.stored, text)
            return lost.stored, "last known by this member"
        # Keep the first start until it is stored, because the queue's end may advance while a broker stores it.
        if record.first_start is None:
            record.first_start = await self._first_start(queue, is_new)
        return record.first_start

    def _report_forgotten(self, queue: MessageQueue, offset: int, text: str) -> None:
        self._context.emit(EventKind.OFFSET_FORGOTTEN, text, queue, {"offset": offset}, level=logging.WARNING)

    async def _first_start(self, queue: MessageQueue, is_new: bool) -> tuple[int, str]:
        """Return the start offset of a queue that the group has never consumed, and its origin."""
        context, broker = self._context, self._context.cluster.broker(queue.broker_name)
        if queue.topic.startswith(RETRY_PREFIX):
            return await broker.min_offset(queue), "retry topic"
        if is_new:
            return await broker.min_offset(queue), "queue added while consuming"
        where = context.config.consume_from
        if isinstance(where, datetime):
            offset = await broker.search_offset(queue, int(where.timestamp() * 1000), group=context.name)
            return offset, f"first start from {where.isoformat()}"
        if where == "first":
            return await broker.min_offset(queue), "first start from the first message"
        return await broker.max_offset(queue), "first start from the end"

    async def _resolve_older_offset(self, record: CommitRecord, stored: int, known: int) -> tuple[int, str]:
        """Return the start offset when the broker has a lower offset than it had acknowledged to this member.

        A broker writes offsets to its disk every 5 s, and a slave copies them every 10 s. So a broker that was down, or
        is the new master, may have lost the offset. Otherwise a client has reset the group.
        """
        context, queue, facts = self._context, record.queue, {"stored": stored, "known": known}
        if record.may_be_lost and known <= await context.cluster.broker(queue.broker_name).max_offset(queue):
            text = f"the broker was down and has lost {stored} -> {known}; continuing at {known}, where this member was"
            context.emit(EventKind.OFFSET_WENT_BACK, text, queue, facts, level=logging.WARNING)
            return known, "last known by this member"
        text = f"the broker has {stored} and had acknowledged {known}, perhaps after a reset; continuing at {stored}"
        context.emit(EventKind.OFFSET_WENT_BACK, text, queue, facts, level=logging.WARNING)
        record.invalidate()
        return stored, "stored"
