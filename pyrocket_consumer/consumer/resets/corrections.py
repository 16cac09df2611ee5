"""The broker moved us: the one door for corrections and for resets that brokers tell to pulls."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.pulling.pull_loop import PullLoop, identify
from pyrocket_consumer.consumer.resets.resets import ResetFollower
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.text import logger

log = logger("consumer")

MAX_CONFIRMATIONS = 5
CONFIRMATION_PAUSE_S = 1.0

MAX_FAST_CORRECTIONS = 5
"""So often in a row a broker is followed at once that only says where to go on, and gives no message."""

MAX_CORRECTION_PAUSE_S = 10.0
"""The longest pause before it is followed once more."""

CLOCK_SKEW_MS = 1000
"""How much the clocks of brokers and members may differ where it cannot be known."""


LOG_CHECK_VALID_S = 60.0
"""How long a look at the log of a queue in a database holds, if nothing was consumed since."""


class CorrectionFollower:
    """Follows brokers that say where a queue goes on. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, resets: ResetFollower) -> None:
        self._context = context
        self._assignments = assignments
        self._resets = resets

    def on_offset_moved(self, pull_loop: PullLoop, pull_offset: int, response: PullResponse) -> None:
        """A pull at `pull_offset` was answered with another place. The puller waits until that is decided."""
        pull_loop.moves = 0 if pull_loop.pulled else pull_loop.moves + 1
        self._context.start_in_background(
            partial(self._follow, pull_loop, pull_offset, response), f"following the broker on {pull_loop.queue}"
        )

    def on_late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        """A pull that was given up has brought a reset: it is the only copy."""
        self._context.start_in_background(
            partial(self._resets.on_pull_reset, queue, response, None), f"resetting {queue}"
        )

    def on_reset_waiting(self, queue: MessageQueue) -> None:
        """The broker ignores commits of `queue`, because it has a reset for the next pull."""
        assignment = self._assignments.get(queue)
        if assignment is not None:
            assignment.pull_loop.pull_from_master_next()

    async def _follow(self, pull_loop: PullLoop, pull_offset: int, response: PullResponse) -> None:
        """Obey; a broker that seems not to be ready is asked again first."""
        queue = pull_loop.queue
        await self._pause_before_following(pull_loop)
        if response.offset_reset:
            await self._resets.on_pull_reset(queue, response, pull_offset)
            return
        target = response.next_offset
        if target < pull_offset:
            # What lies before the end that it spoke of was there before; brokers up to 4.9.3 say 0 and mean that end.
            target = max(target, min(pull_offset, response.max_offset))
            target = await self._confirm_target(pull_loop, pull_offset, target)
            if target == pull_offset:
                pull_loop.pull_again()
                return
        # What is cached lies before the correction, and the broker may have lost it: it is consumed first. An end of
        # the window now would pass it over.
        if not await self._wait_until_finished(pull_loop.window):
            return
        if target < pull_offset and self._needs_log_check(pull_loop.window, response):
            why = f"the broker's log ends at {response.max_offset}, before {pull_offset}: it is looked at"
            await self._assignments.end_and_reassign(queue, why)
            return
        facts = {"from": pull_offset, "to": target, "min": response.min_offset, "max": response.max_offset}
        if await self._assignments.move(queue, target, pull_loop.window, "correction"):
            tell = self._context.emit
            tell(EventKind.OFFSET_CORRECTED, f"{pull_offset} -> {target}", queue, facts, level=logging.WARNING)
            if target > pull_offset:
                text = f"{pull_offset} to {target - 1} are not at the broker any more"
                tell(EventKind.RANGE_SKIPPED, text, queue, facts, level=logging.WARNING)

    def _needs_log_check(self, window: ProcessQueue, response: PullResponse) -> bool:
        """Tell whether the log may be another one; if it was looked at just now, it only ends sooner."""
        claim = window.claim
        if claim is None or not claim.has_last_message or claim.store.on_divergence != "stop":
            return False
        if claim.last is not None and response.max_offset <= claim.last.offset:
            return True
        return claim.has_advanced or self._context.loop.time() - claim.log_checked_at > LOG_CHECK_VALID_S

    async def _pause_before_following(self, pull_loop: PullLoop) -> None:
        """Wait before a broker is followed that sends us from place to place: each costs a durable write."""
        loop, excess = self._context.loop, min(pull_loop.moves - MAX_FAST_CORRECTIONS, 16)
        until = loop.time() + (min(0.1 * 2**excess, MAX_CORRECTION_PAUSE_S) if excess > 0 else 0)
        while loop.time() < until and not pull_loop.window.dropped:  # noqa: ASYNC110 - an end tells nobody
            await asyncio.sleep(0.05)

    async def _confirm_target(self, pull_loop: PullLoop, pull_offset: int, target: int) -> int:
        """Return where a correction backwards leads, after the broker was asked several times: it may be loading.

        A broker that does not answer confirms nothing. One whose range comes to hold our place has done with loading
        only if its log is the one we read; else what came there since the correction is new to us, and begins at the
        lowest end that it had.
        """
        window, queue, answers, corrected_at_ms = pull_loop.window, pull_loop.queue, 0, self._context.now_ms()
        broker = self._context.cluster.broker(queue.broker_name)
        while answers < MAX_CONFIRMATIONS and not window.dropped:
            await asyncio.sleep(CONFIRMATION_PAUSE_S)
            try:
                highest, lowest = await broker.max_offset(queue), await broker.min_offset(queue)
                is_back = lowest <= pull_offset <= highest and await self._is_same_log(
                    pull_loop, target, corrected_at_ms
                )
            except RocketError as error:
                text = f"a correction from {pull_offset} to {target} waits for the queue's range: {error}"
                self._context.emit_throttled(EventKind.BROKER_UNREACHABLE, text, queue)
                continue
            if is_back:
                log.info(
                    "group=%s queue=%s a correction from %d to %d is not followed: the range is %d to %d",
                    self._context.name,
                    queue,
                    pull_offset,
                    target,
                    lowest,
                    highest,
                )
                return pull_offset
            answers += 1
            target = max(lowest, min(target, highest))
        return target

    async def _is_same_log(self, pull_loop: PullLoop, target: int, corrected_at_ms: int) -> bool:
        """Tell whether the broker has what it had when we read it.

        The last message we have read tells. Where there is none, what lies at the end that the broker spoke of does: it
        is older than the correction, or new.
        """
        last, context, queue = pull_loop.last_read, self._context, pull_loop.queue
        response, messages = await context.cluster.broker(queue.broker_name).pull(
            queue,
            last[0] if last is not None else target,
            group=context.name,
            subscription=Subscription(queue.topic),
            max_messages=1,
        )
        if response.offset_reset:  # told once, to whichever pull comes
            await self._resets.on_pull_reset(queue, response, None)
        if not messages:
            return False
        if last is not None:
            return identify(messages[0]) == last
        return messages[0].stored_at_ms < corrected_at_ms - CLOCK_SKEW_MS

    @staticmethod
    async def _wait_until_finished(window: ProcessQueue) -> bool:
        """Wait until nothing of `window` is unfinished; False if its life ends before."""
        while not window.dropped and window.unfinished()[0]:  # noqa: ASYNC110 - acks tell nobody: it would cost each
            await asyncio.sleep(0.01)
        return not window.dropped
