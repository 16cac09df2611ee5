"""Whether a queue's log is still the one we read: the last message that was consumed tells, where it is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.offsets.database.claim import Claim
from pyrocket_consumer.offsets.database.message_ids import id_of
from pyrocket_consumer.protocol.message import Message

SHORT_LOOKS = 3
"""So often a log must end before our offset until that is believed: a broker may be loading, or an old slave."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two looks at a log that has changed."""


class Divergence:
    """Looks at the logs of queues that begin. Confined to the I/O thread."""

    def __init__(self, group: MemberContext, met_reset: Callable[[MessageQueue, PullResponse], None]) -> None:
        """`met_reset` hears of a reset that a look has brought: a broker tells it once."""
        self._context = group
        self._met_reset = met_reset
        self._looks: dict[MessageQueue, tuple[int, float]] = {}  # how many found a change; the next one

    def is_paused(self, queue: MessageQueue) -> bool:
        """Tell whether it is too early to look once more at the log of `queue`."""
        return self._context.loop.time() < self._looks.get(queue, (0, 0.0))[1]

    async def may_begin(self, claim: Claim) -> bool:
        """Tell whether a queue may be consumed; that its log has changed is told once.

        Raises:
            RocketError: its broker did not answer.
        """
        queue, group = claim.queue, self._context
        found, is_sure = await self._found(claim)
        if not found:
            self._looks.pop(queue, None)
            claim.log_checked_at = group.loop.time()
            return True
        looks = self._looks.get(queue, (0, 0.0))[0] + 1
        pause_s = FIRST_PAUSE_S if looks < SHORT_LOOKS else min(2.0 ** (looks - SHORT_LOOKS), LONGEST_PAUSE_S)
        self._looks[queue] = looks, group.loop.time() + pause_s
        if not is_sure and looks < SHORT_LOOKS:
            return False
        stops = claim.store.on_divergence == "stop"
        if looks == (1 if is_sure else SHORT_LOOKS) or not stops:
            last = claim.last
            assert last is not None
            facts = {"offset": last.offset, "expected": last.message_id, "stored_at_ms": last.stored_at_ms}
            remedy = (
                "it is not consumed; look at what is there, and reset it to where it shall go on"
                if stops
                else f"it goes on at {claim.stored}"
            )
            text = f"the log is not the one that was consumed: {found}; {remedy}"
            group.event(EventKind.LOG_DIVERGED, text, queue, facts, level=logging.ERROR)
        if not stops:
            del self._looks[queue]
        return not stops

    async def is_same(self, claim: Claim) -> bool:
        """Tell whether the log of a queue that is held has the last message consumed, or that proves nothing.

        Raises:
            RocketError: its broker did not answer.
        """
        found, _ = await self._found(claim)
        if not found:
            claim.log_checked_at = self._context.loop.time()
        return not found

    async def _found(self, claim: Claim) -> tuple[str, bool]:
        """Return what is there instead of the last message consumed, "" if that may still be; and if it is sure."""
        last, queue, group = claim.last, claim.queue, self._context
        if last is None:
            return "", True
        answer, messages = await group.cluster.broker(queue.broker_name).pull(
            queue, last.offset, group=group.name, subscription=Subscription(queue.topic), max_messages=1
        )
        if answer.offset_reset:
            self._met_reset(queue, answer)
            return "", True
        if answer.max_offset <= last.offset:
            return f"it ends at {answer.max_offset}, and {last.offset} was the last consumed", False
        there = next((message for message in messages if message.queue_offset == last.offset), None)
        if there is None or (id_of(there), there.stored_at_ms) == (last.message_id, last.stored_at_ms):
            return "", True  # what has expired proves nothing
        return f"at {last.offset} was {last.message_id}, and is {_shown(there)}", True


def _shown(message: Message) -> str:
    return f"{id_of(message)}, stored at {message.stored_at_ms} ms"
