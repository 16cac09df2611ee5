"""Reports of workers and dispatchers about listeners: failures, unknown results, and calls that take too long."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pyrocket_consumer.consumer.context.events import describe_id, key_facts
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts
from pyrocket_consumer.consumer.dispatch.retry import Retries
from pyrocket_consumer.consumer.listener import ConsumeResult, FailedMessage
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import safe_repr


class ListenerReports:
    """Turns what happens in listener calls into events, statistics and retries. Any thread, except where stated."""

    def __init__(self, context: MemberContext, retries: Retries, counts: Counts) -> None:
        self._context = context
        self._counts = counts
        self.retries = retries

    def failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        """Have failed messages consumed again."""
        self._context.call_soon(self._failed, window, failed)

    def _failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        self.count_failed(window, len(failed))
        if not self._context.closing:
            self.retries.add(window, failed)

    def count_failed(self, window: ProcessQueue, count: int) -> None:
        """Count attempts whose listener failed. I/O thread."""
        self._counts.failed(window.queue.topic, count)

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report an exception of a listener."""
        facts = {"offset": message.queue_offset, "error": safe_repr(error), **key_facts(message)}
        text = "the listener raised; the message has failed"
        self._context.emit(EventKind.LISTENER_FAILED, text, window.queue, facts, level=logging.WARNING, error=error)

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        """Report the first unknown result of this type from a listener."""
        if hasattr(type(result), "__await__"):  # of the type, because the value itself may raise
            remedy = "it is not awaited; subscribe with the `async def` function itself"
        elif result is ConsumeResult.COMMIT or result is ConsumeResult.ROLLBACK:
            remedy = "COMMIT and ROLLBACK are for orderly=True, auto_commit=False; return SUCCESS or None instead"
        else:
            remedy = "return None when a message is consumed, otherwise a ConsumeResult or Retry"
        text = f"the listener returned {safe_repr(result)}, so its messages are redelivered (reported once): {remedy}"
        facts = {"offset": message.queue_offset}
        self._context.emit(EventKind.LISTENER_RESULT_UNKNOWN, text, window.queue, facts, level=logging.WARNING)

    def key_failed(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report that `order_by` failed for a message. Workers call this, because the error's repr runs user code."""
        facts = {"offset": message.queue_offset, "message_id": describe_id(message), "error": safe_repr(error)}
        text = (
            "order_by raised, or returned a value that cannot be a key. The message has failed and is retried alone "
            "(reported once); later messages of its key may overtake it"
        )
        self._context.emit(EventKind.LISTENER_FAILED, text, window.queue, facts, level=logging.WARNING, error=error)

    def stuck(self, window: ProcessQueue, messages: Sequence[Message]) -> None:
        """Report messages whose listener call takes too long, and send them back. I/O thread.

        An orderly queue keeps its messages, because the order matters more. A broadcasting group has no retry.
        """
        config = self._context.config
        also = ", or order_by," if callable(config.order_by) else ""
        self._stuck(window, messages[0], f"its listener{also} has run for more than {config.consume_timeout_s:g} s")
        if not config.broadcasting and not config.orderly:
            self.retries.add(window, [(message, 3) for message in messages], running=True)

    def held_up(self, window: ProcessQueue, why: str) -> None:
        """Report that an ordered queue waits for its listener. The facts are of the oldest unfinished message."""
        self._stuck(window, window.unfinished()[2], why)

    def _stuck(self, window: ProcessQueue, message: Message | None, why: str) -> None:
        facts = dict[str, object]()
        if message is not None:
            facts = {"offset": message.queue_offset, "message_id": describe_id(message), **key_facts(message)}
        self._context.emit(EventKind.MESSAGE_STUCK, why, window.queue, facts, level=logging.WARNING)

    def worker_failed(self, error: BaseException) -> None:
        """Report an unexpected error outside of the listener: in the offset store, or in the worker itself."""
        self._context.call_soon(self._context.report_unexpected, "a worker failed", error)
