"""The broker moved us: the one door for corrections and for resets that brokers tell to pulls."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.pulling.pull_loop import Puller, witness
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.text import logger

log = logger("consumer")

DISBELIEF_TRIES = 5
DISBELIEF_PAUSE_S = 1.0

PATIENCE = 5
"""So often in a row a broker is followed at once that only says where to go on, and gives no message."""

LONGEST_PAUSE_S = 10.0
"""The longest pause before it is followed once more."""

CLOCKS_DIFFER_MS = 1000
"""How much the clocks of brokers and members may differ where it cannot be known."""


LOOK_HOLDS_S = 60.0
"""How long a look at the log of a queue in a database holds, if nothing was consumed since."""


class Corrections:
    """Follows brokers that say where a queue goes on. Confined to the I/O thread."""

    def __init__(self, group: MemberContext, assignments: Assignments, resets: Resets) -> None:
        self._context = group
        self._assignments = assignments
        self._resets = resets

    def moved(self, puller: Puller, asked: int, answer: PullResponse) -> None:
        """A pull at `asked` was answered with another place. The puller waits until that is decided."""
        puller.moves = 0 if puller.pulled else puller.moves + 1
        self._context.beside(partial(self._follow, puller, asked, answer), f"following the broker on {puller.queue}")

    def met_late(self, queue: MessageQueue, answer: PullResponse) -> None:
        """A pull that was given up has brought a reset: it is the only copy."""
        self._context.beside(partial(self._resets.met_mark, queue, answer, None), f"resetting {queue}")

    def reset_waits(self, queue: MessageQueue) -> None:
        """The broker ignores commits of `queue`, because it has a reset for the next pull."""
        assignment = self._assignments.get(queue)
        if assignment is not None:
            assignment.puller.ask_master()

    async def _follow(self, puller: Puller, asked: int, answer: PullResponse) -> None:
        """Obey; a broker that seems not to be ready is asked again first."""
        queue = puller.queue
        await self._rest(puller)
        if answer.offset_reset:
            await self._resets.met_mark(queue, answer, asked)
            return
        target = answer.next_offset
        if target < asked:
            # What lies before the end that it spoke of was there before; brokers up to 4.9.3 say 0 and mean that end.
            target = max(target, min(asked, answer.max_offset))
            target = await self._believed(puller, asked, target)
            if target == asked:
                puller.ask_again()
                return
        # What is cached lies before the correction, and the broker may have lost it: it is consumed first. An end of
        # the window now would pass it over.
        if not await self._finished(puller.window):
            return
        if target < asked and self._is_to_be_looked_at(puller.window, answer):
            why = f"the broker's log ends at {answer.max_offset}, before {asked}: it is looked at"
            await self._assignments.begin_again(queue, why)
            return
        facts = {"from": asked, "to": target, "min": answer.min_offset, "max": answer.max_offset}
        if await self._assignments.move(queue, target, puller.window, "correction"):
            tell = self._context.event
            tell(EventKind.OFFSET_CORRECTED, f"{asked} -> {target}", queue, facts, level=logging.WARNING)
            if target > asked:
                text = f"{asked} to {target - 1} are not at the broker any more"
                tell(EventKind.RANGE_SKIPPED, text, queue, facts, level=logging.WARNING)

    def _is_to_be_looked_at(self, window: ProcessQueue, answer: PullResponse) -> bool:
        """Tell whether the log may be another one; if it was looked at just now, it only ends sooner."""
        claim = window.claim
        if claim is None or not claim.has_last_message or claim.store.on_divergence != "stop":
            return False
        if claim.last is not None and answer.max_offset <= claim.last.offset:
            return True
        return claim.has_advanced or self._context.loop.time() - claim.log_checked_at > LOOK_HOLDS_S

    async def _rest(self, puller: Puller) -> None:
        """Wait before a broker is followed that sends us from place to place: each costs a durable write."""
        loop, excess = self._context.loop, min(puller.moves - PATIENCE, 16)
        until = loop.time() + (min(0.1 * 2**excess, LONGEST_PAUSE_S) if excess > 0 else 0)
        while loop.time() < until and not puller.window.dropped:  # noqa: ASYNC110 - an end tells nobody
            await asyncio.sleep(0.05)

    async def _believed(self, puller: Puller, asked: int, target: int) -> int:
        """Return where a correction backwards leads, after the broker was asked several times: it may be loading.

        A broker that does not answer confirms nothing. One whose range comes to hold our place has done with loading
        only if its log is the one we read; else what came there since the correction is new to us, and begins at the
        lowest end that it had.
        """
        window, queue, answers, corrected_at_ms = puller.window, puller.queue, 0, self._context.now_ms()
        broker = self._context.cluster.broker(queue.broker_name)
        while answers < DISBELIEF_TRIES and not window.dropped:
            await asyncio.sleep(DISBELIEF_PAUSE_S)
            try:
                highest, lowest = await broker.max_offset(queue), await broker.min_offset(queue)
                is_back = lowest <= asked <= highest and await self._is_same_log(puller, target, corrected_at_ms)
            except RocketError as error:
                text = f"a correction from {asked} to {target} waits for the queue's range: {error}"
                self._context.trouble(EventKind.BROKER_UNREACHABLE, text, queue)
                continue
            if is_back:
                log.info(
                    "group=%s queue=%s a correction from %d to %d is not followed: the range is %d to %d",
                    self._context.name,
                    queue,
                    asked,
                    target,
                    lowest,
                    highest,
                )
                return asked
            answers += 1
            target = max(lowest, min(target, highest))
        return target

    async def _is_same_log(self, puller: Puller, target: int, corrected_at_ms: int) -> bool:
        """Tell whether the broker has what it had when we read it.

        The last message we have read tells. Where there is none, what lies at the end that the broker spoke of does: it
        is older than the correction, or new.
        """
        last, group, queue = puller.last_read, self._context, puller.queue
        answer, messages = await group.cluster.broker(queue.broker_name).pull(
            queue,
            last[0] if last is not None else target,
            group=group.name,
            subscription=Subscription(queue.topic),
            max_messages=1,
        )
        if answer.offset_reset:  # told once, to whichever pull comes
            await self._resets.met_mark(queue, answer, None)
        if not messages:
            return False
        if last is not None:
            return witness(messages[0]) == last
        return messages[0].stored_at_ms < corrected_at_ms - CLOCKS_DIFFER_MS

    @staticmethod
    async def _finished(window: ProcessQueue) -> bool:
        """Wait until nothing of `window` is unfinished; False if its life ends before."""
        while not window.dropped and window.unfinished()[0]:  # noqa: ASYNC110 - acks tell nobody: it would cost each
            await asyncio.sleep(0.01)
        return not window.dropped
