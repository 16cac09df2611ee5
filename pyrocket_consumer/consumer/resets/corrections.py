"""Moves queues when the response to a pull corrects or resets the offset."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue
from pyrocket_consumer.consumer.assignment.pull_loop import PullLoop
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.resets.records import ResetRecords
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue, PullResponse, Subscription
from pyrocket_consumer.protocol.message import identify
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.backoff import Backoff

log = logger("consumer")

MAX_CONFIRMATIONS = 5
"""How many times a broker must confirm a correction backwards before the consumer follows it."""

CONFIRMATION_PAUSE_S = 1.0
"""The pause before each confirmation."""

MAX_FAST_CORRECTIONS = 5
"""After more corrections in a row without a message, the pauses before the next correction grow."""

MAX_CORRECTION_PAUSE_S = 10.0
"""The longest pause before the consumer follows a correction."""

_CORRECTION_PAUSES = Backoff(0.2, MAX_CORRECTION_PAUSE_S, free=MAX_FAST_CORRECTIONS)

BROKER_CLOCK_SKEW_MS = 1000
"""The assumed difference between the clocks of brokers and members."""

LOG_CHECK_VALID_S = 60.0
"""How long a check of a claimed queue's log remains valid, if no message was consumed since."""


class CorrectionFollower:
    """Moves queues as brokers correct or reset their offsets. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, resets: Resets, records: ResetRecords) -> None:
        self._context = context
        self._assignments = assignments
        self._resets = resets
        self._records = records

    def on_offset_moved(self, queue: MessageQueue, pull_offset: int, response: PullResponse) -> None:
        """Follow the response to a pull at `pull_offset`, which has another offset. The pull loop waits meanwhile."""
        held = self._assignments.get(queue)
        if held is not None and (pull_loop := held.pulls) is not None:
            pull_loop.moves = 0 if pull_loop.pulled else pull_loop.moves + 1
            work = partial(self._follow, held, pull_loop, pull_offset, response)
            self._context.start_in_background(work, f"following the broker on {queue}")

    def on_late_reset(self, queue: MessageQueue, response: PullResponse) -> None:
        """Follow a reset in the response to an abandoned pull. The broker sends it only once."""
        self._context.start_in_background(partial(self._follow_reset, queue, response, None), f"resetting {queue}")

    def on_reset_waiting(self, queue: MessageQueue) -> None:
        """Pull from the master next, because it has a reset of `queue` and ignores commits until a pull fetches it."""
        held = self._assignments.get(queue)
        if held is not None and held.pulls is not None:
            held.pulls.pull_from_master_next()

    async def _follow(self, held: HeldQueue, pull_loop: PullLoop, pull_offset: int, response: PullResponse) -> None:
        """Follow a correction or reset; confirm a correction backwards first, because the broker may be loading."""
        queue = held.queue
        await self._pause_before_following(pull_loop)
        if response.offset_reset:
            await self._follow_reset(queue, response, pull_offset)
            return
        target = response.next_offset
        if target < pull_offset:
            # No message below the reported end is new, so do not move below it. Brokers up to 4.9.3 report 0 as the
            # next offset, and mean that end.
            target = max(target, min(pull_offset, response.max_offset))
            target = await self._confirm_target(pull_loop, pull_offset, target)
            if target == pull_offset:
                pull_loop.pull_again()
                return
        # Consume the cached messages first. They lie before the correction, and the broker may have lost them, so a new
        # window now would skip them.
        if not await self._wait_until_finished(pull_loop.window):
            return
        if target < pull_offset and self._needs_log_check(pull_loop.window, response):
            why = f"the broker's log ends at {response.max_offset}, before {pull_offset}, so it is checked first"
            await held.end_and_reassign(why)
            return
        facts = {"from": pull_offset, "to": target, "min": response.min_offset, "max": response.max_offset}
        if await held.move(target, "correction", expected=pull_loop.window):
            emit = self._context.emit
            emit(EventKind.OFFSET_CORRECTED, f"{pull_offset} -> {target}", queue, facts, level=logging.WARNING)
            if target > pull_offset:
                text = f"the broker no longer has messages {pull_offset} to {target - 1}"
                emit(EventKind.RANGE_SKIPPED, text, queue, facts, level=logging.WARNING)

    def _needs_log_check(self, window: ProcessQueue, response: PullResponse) -> bool:
        """Return whether the log may be another one. A log that was checked recently has only lost its end."""
        claim = window.claim
        if claim is None or not claim.has_last_message or claim.store.on_divergence != "stop":
            return False
        if claim.last is not None and response.max_offset <= claim.last.offset:
            return True
        return claim.has_advanced or self._context.loop.time() - claim.log_checked_at > LOG_CHECK_VALID_S

    async def _follow_reset(self, queue: MessageQueue, response: PullResponse, pull_offset: int | None) -> None:
        """Follow a reset in a response to a pull. The broker sends it once, to the pull that comes first.

        `pull_offset` is the offset of the pull, or None for an abandoned pull, whose reset is the only copy, too. In
        broadcasting, the reset is for every member, so this member forwards it to the others.
        """
        context, target = self._context, response.next_offset
        how = "from the response to an abandoned pull" if pull_offset is None else "made at the broker"
        held = self._assignments.queue(queue)
        if context.config.remote_reset == "refuse":
            await self._keep_offset(held)
        elif context.config.broadcasting and response.max_offset > 0 and not self._resets.is_repeated(queue, target):
            await self._records.follow_and_forward(held, target, how)
        elif await held.move(target, "reset"):
            self._resets.report_reset(queue, target, how, pull_offset)
        elif not context.config.broadcasting:
            held.commit.invalidate()
            if not context.closing:
                await self._records.forward(queue, target)

    async def _keep_offset(self, held: HeldQueue) -> None:
        if held.is_held and (offset := held.commit.current()) is not None:
            self._resets.report_refusal(f"a reset of {held.queue}")
            await held.move(offset, "reset refused", expected=held.window)

    async def _pause_before_following(self, pull_loop: PullLoop) -> None:
        """Pause if the broker moves the offset again and again, because each move costs a durable write."""
        loop = self._context.loop
        until = loop.time() + _CORRECTION_PAUSES.pause_s(pull_loop.moves)
        while loop.time() < until and not pull_loop.window.dropped:  # noqa: ASYNC110 - a dropped window notifies nobody
            await asyncio.sleep(0.05)

    async def _confirm_target(self, pull_loop: PullLoop, pull_offset: int, target: int) -> int:
        """Return the offset that a correction backwards leads to, after several requests for the queue's range.

        A broker that is loading may report a range that is too short, and a request without response confirms nothing.
        If the range includes `pull_offset` again, check that the log is still the same. If it is another log, its
        messages are new, so consume them from the lowest end that the broker reported.
        """
        window, queue, responses, corrected_at_ms = pull_loop.window, pull_loop.queue, 0, self._context.now_ms()
        broker = self._context.cluster.broker(queue.broker_name)
        while responses < MAX_CONFIRMATIONS and not window.dropped:
            await asyncio.sleep(CONFIRMATION_PAUSE_S)
            try:
                highest, lowest = await broker.max_offset(queue), await broker.min_offset(queue)
                is_back = lowest <= pull_offset <= highest and await self._is_same_log(
                    pull_loop, target, corrected_at_ms
                )
            except RocketError as error:
                text = f"a correction from {pull_offset} to {target} waits until the queue's range is known: {error}"
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
            responses += 1
            target = max(lowest, min(target, highest))
        return target

    async def _is_same_log(self, pull_loop: PullLoop, target: int, corrected_at_ms: int) -> bool:
        """Return whether the broker still has the log that was read.

        It has if the last message read is still there. If no message was read, the message at `target` must be older
        than the correction.
        """
        last, context, queue = pull_loop.last_read, self._context, pull_loop.queue
        response, messages = await context.cluster.broker(queue.broker_name).pull(
            queue,
            last[0] if last is not None else target,
            group=context.name,
            subscription=Subscription(queue.topic),
            max_messages=1,
        )
        if response.offset_reset:  # the broker sends it once, to the pull that comes first
            await self._follow_reset(queue, response, None)
        if not messages:
            return False
        if last is not None:
            return identify(messages[0]) == last
        return messages[0].stored_at_ms < corrected_at_ms - BROKER_CLOCK_SKEW_MS

    @staticmethod
    async def _wait_until_finished(window: ProcessQueue) -> bool:
        """Wait until all messages of `window` are finished. Return False if the window is dropped before."""
        while not window.dropped and window.unfinished()[0]:  # noqa: ASYNC110 - a notification would cost time in each ack
            await asyncio.sleep(0.01)
        return not window.dropped
