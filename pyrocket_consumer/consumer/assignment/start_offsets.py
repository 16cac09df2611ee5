"""Where a queue begins, and whether its log is still the one consumed.

It begins at the stored offset, at the last one that this member knows, or at a first start. The log of a claimed queue
is checked by the last consumed message, which the database keeps.
"""

from __future__ import annotations

import logging
from datetime import datetime

from pyrocket_consumer.consumer.commits.commits import CommitRecord, Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue, Subscription
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.database.claim import Claim, id_of
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.backoff import Backoff

MAX_SHORT_CHECKS = 3
"""How many checks must find a log that ends too early. The broker may be loading, or be a slave that lags."""

FIRST_CHECK_PAUSE_S, MAX_CHECK_PAUSE_S = 1.0, 60.0
"""The pauses between two checks of a log that has changed."""


def log_checks() -> Backoff:
    """Return the count of the checks in a row that found another log of one queue, and their pauses."""
    return Backoff(FIRST_CHECK_PAUSE_S, MAX_CHECK_PAUSE_S, steady=MAX_SHORT_CHECKS)


class StartOffsets:
    """Finds the start offset of queues, and checks their logs. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, commits: Commits) -> None:
        self._context = context
        self._commits = commits

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
        if lost is not None and await self.is_same_log(lost):
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

    # --- the log of a claimed queue

    async def may_begin(self, claim: Claim, checks: Backoff) -> bool:
        """Return whether a queue may be consumed. Emit an event, once, if its log has changed.

        Raises:
            RocketError: the broker did not respond; try again later.
        """
        queue, context = claim.queue, self._context
        found, is_sure = await self._find_change(claim)
        if not found:
            checks.reset()
            claim.log_checked_at = context.loop.time()
            return True
        checks.failed(context.loop.time())
        if not is_sure and checks.failures < MAX_SHORT_CHECKS:
            return False
        stops = claim.store.on_divergence == "stop"
        if checks.failures == (1 if is_sure else MAX_SHORT_CHECKS) or not stops:
            last = claim.last
            assert last is not None
            facts = {"offset": last.offset, "expected": last.message_id, "stored_at_ms": last.stored_at_ms}
            remedy = (
                "the queue is not consumed; check its messages, and reset it to the offset to continue at"
                if stops
                else f"the queue continues at {claim.stored}"
            )
            text = f"the log is not the one that was consumed: {found}; {remedy}"
            context.emit(EventKind.LOG_DIVERGED, text, queue, facts, level=logging.ERROR)
        if not stops:
            checks.reset()
        return not stops

    async def is_same_log(self, claim: Claim) -> bool:
        """Return whether the log of a held queue still has the last consumed message, as far as that can be checked.

        Raises:
            RocketError: the broker did not respond; try again later.
        """
        found, _ = await self._find_change(claim)
        if not found:
            claim.log_checked_at = self._context.loop.time()
        return not found

    async def _find_change(self, claim: Claim) -> tuple[str, bool]:
        """Return a description of the change, "" if the log may be the same; and whether that is certain."""
        last, queue, context = claim.last, claim.queue, self._context
        if last is None:
            return "", True
        response, messages = await context.cluster.broker(queue.broker_name).pull(
            queue, last.offset, group=context.name, subscription=Subscription(queue.topic), max_messages=1
        )
        if response.offset_reset:
            context.member.late_reset(queue, response)
            return "", True
        if response.max_offset <= last.offset:
            return f"it ends at {response.max_offset}, and {last.offset} was the last consumed", False
        there = next((message for message in messages if message.queue_offset == last.offset), None)
        if there is None or (id_of(there), there.stored_at_ms) == (last.message_id, last.stored_at_ms):
            return "", True  # an expired message proves nothing
        return f"offset {last.offset} had message {last.message_id}, and now has {_describe(there)}", True


def _describe(message: Message) -> str:
    return f"{id_of(message)}, stored at {message.stored_at_ms} ms"
