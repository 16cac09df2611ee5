"""Checks by the last consumed message, which the store keeps, whether a queue's log is still the one consumed."""

from __future__ import annotations

import logging

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.model import EventKind, Subscription
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


class DivergenceCheck:
    """Checks the logs of queues that begin. Confined to the I/O thread."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context

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
