"""Results of listener calls other than acknowledgements: workers report them, and the I/O thread handles them."""

from __future__ import annotations

import logging

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
    """The `ListenerReporter` of all workers of a member. Any thread."""

    def __init__(self, context: MemberContext, retries: Retries, counts: Counts) -> None:
        self._context = context
        self._retries = retries
        self._counts = counts

    def failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        self._context.call_soon(self._failed, window, failed)

    def _failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        self._counts.failed(window.queue.topic, len(failed))
        if not self._context.closing:
            self._retries.add(window, failed)

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        facts = {"offset": message.queue_offset, "error": safe_repr(error), **key_facts(message)}
        self._context.emit(
            EventKind.LISTENER_FAILED,
            "the listener raised; the message has failed",
            window.queue,
            facts,
            level=logging.WARNING,
            error=error,
        )

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        if hasattr(type(result), "__await__"):  # of the type, because the value itself may raise
            remedy = "it is not awaited; subscribe with the `async def` function itself"
        elif result is ConsumeResult.COMMIT or result is ConsumeResult.ROLLBACK:
            remedy = "COMMIT and ROLLBACK are for orderly=True, auto_commit=False; return SUCCESS or None instead"
        else:
            remedy = "return None when a message is consumed, otherwise a ConsumeResult or Retry"
        self._context.emit(
            EventKind.LISTENER_RESULT_UNKNOWN,
            f"the listener returned {safe_repr(result)}, so its messages are redelivered (reported once): {remedy}",
            window.queue,
            {"offset": message.queue_offset},
            level=logging.WARNING,
        )

    def held_up(self, window: ProcessQueue, why: str) -> None:
        """Report that an ordered queue waits for its listener. The facts are of the oldest unfinished message."""
        oldest, facts = window.unfinished()[2], dict[str, object]()
        if oldest is not None:
            facts = {"offset": oldest.queue_offset, "message_id": describe_id(oldest), **key_facts(oldest)}
        self._context.emit(EventKind.MESSAGE_STUCK, why, window.queue, facts, level=logging.WARNING)

    def key_failed(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report that `order_by` failed for a message. Workers call this, because the error's repr runs user code."""
        facts = {"offset": message.queue_offset, "message_id": describe_id(message), "error": safe_repr(error)}
        self._context.emit(
            EventKind.LISTENER_FAILED,
            "order_by raised, or returned a value that cannot be a key. The message has failed and is retried alone "
            "(reported once); later messages of its key may overtake it",
            window.queue,
            facts,
            level=logging.WARNING,
            error=error,
        )

    def worker_failed(self, error: BaseException) -> None:
        self._context.call_soon(self._context.report_unexpected, "a worker failed", error)
