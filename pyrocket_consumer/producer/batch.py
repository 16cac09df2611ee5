"""Batches: several messages of one topic in one request, cut where one request would be too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.message import BatchItem

MAX_BATCH_MESSAGES = 10_000
"""Most messages of one request.

Brokers from 5.0 on count them in 16 bits with a sign: after a batch of 32,768 the next messages of the queue get
offsets that exist already, or negative ones, and are never delivered (seen on 5.1.4, 5.3.3 and 5.5.0). The rest is
room, also for the answer, which has an id of 32 characters for each.
"""

_ITEM_BYTES = 22  # of a batch item, besides its body and properties


class BatchMessage(NamedTuple):
    """A message of a batch, ready to travel, and the id consumers will see."""

    item: BatchItem
    message_id: str


def split_batch(messages: Sequence[BatchMessage], max_bytes: int) -> Iterator[Sequence[BatchMessage]]:
    """Return `messages` in as few parts as fit into requests of `max_bytes`.

    Raises:
        ConfigError: a message fits into none.
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
