"""Split a batch into requests: several messages of one topic in each, up to a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.message import BatchItem

MAX_BATCH_MESSAGES = 10_000
"""The largest number of messages in one request.

Brokers from 5.0 on count them in a signed 16-bit number. After a batch of 32,768 the next messages of the queue get
duplicate or negative offsets. They are never delivered (observed on 5.1.4, 5.3.3 and 5.5.0). The limit is lower,
because the response has 32 characters for each message.
"""

_ITEM_BYTES = 22  # of a batch item, without its body and properties


class BatchMessage(NamedTuple):
    """An encoded message of a batch, and the id that consumers will see."""

    item: BatchItem
    message_id: str


def split_batch(messages: Sequence[BatchMessage], max_bytes: int) -> Iterator[Sequence[BatchMessage]]:
    """Yield `messages` in as few parts as fit into requests of `max_bytes`.

    Raises:
        ConfigError: a message alone is larger than `max_bytes`.
    """
    first = size = 0
    for number, (item, _) in enumerate(messages):
        assert isinstance(item.properties, str)
        item_bytes = _ITEM_BYTES + len(item.body) + len(item.properties.encode())
        if item_bytes > max_bytes:
            raise ConfigError(
                f"message {number} of the batch, {len(item.body)} bytes, takes {item_bytes} of {max_bytes} bytes "
                "(max_message_bytes) in a batch; send it by itself"
            )
        if size + item_bytes > max_bytes or number - first == MAX_BATCH_MESSAGES:
            yield messages[first:number]
            first, size = number, 0
        size += item_bytes
    if first < len(messages):
        yield messages[first:]
