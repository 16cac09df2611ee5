"""Windows that hold messages, for tests of the parts of a consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message, StoredMessage, decode_messages, encode_message

QUEUE = MessageQueue("orders", "a", 0)


def window_of(
    count: int = 1,
    queue: MessageQueue = QUEUE,
    *,
    first: int = 0,
    on_edge: Callable[[MessageQueue, int], None] | None = None,
    record: Callable[[int], dict[str, Any]] = lambda offset: {},
) -> tuple[ProcessQueue, list[Message]]:
    """Return a window that holds `count` messages, and these messages; `record` sets special values of each."""
    window = ProcessQueue(queue, first, Limits(), on_edge=on_edge)
    usual = {"topic": queue.topic, "body": b"x"}
    stored = [StoredMessage(**{**usual, "queue_offset": at, **record(at)}) for at in range(first, first + count)]
    data = b"".join(map(encode_message, stored))
    messages = decode_messages(data, queue)
    window.put(messages, first + count, len(data))
    return window, messages
