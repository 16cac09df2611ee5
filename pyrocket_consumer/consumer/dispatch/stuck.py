"""Listener calls that take too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from pyrocket_consumer.consumer.context.events import describe_id, key_facts
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.dispatch.retry import Retries
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.protocol.message import Message


class RunningCalls(Protocol):
    """A service that runs listener calls."""

    def stuck(self, timeout_s: float, now: float) -> Sequence[tuple[ProcessQueue, Sequence[Message]]]:
        """Return the messages whose listener call was running at a check at least `timeout_s` ago."""


class StuckCalls:
    """Reports listener calls that have taken longer than `consume_timeout_s`, and sends their messages back.

    For orderly and broadcasting groups it only reports them.
    """

    def __init__(self, context: MemberContext, calls: RunningCalls, retries: Retries) -> None:
        self._context = context
        self._calls = calls
        self._retries = retries

    async def watch(self) -> None:
        """Check the running calls until cancelled."""
        context = self._context
        timeout_s = context.config.consume_timeout_s
        pause_s = min(max(timeout_s / 10, 0.01), 1.0)
        also = ", or order_by," if callable(context.config.order_by) else ""
        reported: set[int] = set()
        while True:
            await asyncio.sleep(pause_s)
            stuck = self._calls.stuck(timeout_s, context.loop.time())
            ids = {id(messages[0]) for _, messages in stuck}
            for window, messages in stuck:
                waiting = [message for message in messages if not message._done]
                if not waiting or id(messages[0]) in reported:
                    continue
                context.emit(
                    EventKind.MESSAGE_STUCK,
                    f"its listener{also} has run for more than {timeout_s:g} s",
                    window.queue,
                    {"offset": waiting[0].queue_offset, "message_id": describe_id(waiting[0]), **key_facts(waiting[0])},
                    level=logging.WARNING,
                )
                # An orderly queue keeps its message, because the order matters more.
                if not context.config.broadcasting and not context.config.orderly:
                    self._retries.add(window, [(message, 3) for message in waiting], running=True)
            reported = ids
