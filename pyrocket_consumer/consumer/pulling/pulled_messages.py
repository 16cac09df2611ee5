"""The messages of a pull response: checked, and with their inner batches unpacked, large ones on another thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pyrocket_consumer.consumer.commits.serial_executor import SerialExecutor
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.accelerator import are_offsets_rising
from pyrocket_consumer.protocol.compression import BodyTooLarge
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    BodyLimit,
    Message,
    decode_messages,
    inner_messages,
    mark_batch_unreadable,
)
from pyrocket_consumer.protocol.subscription import matches

INLINE_UNPACK_BYTES = 128 * 1024
"""The inner batches of one response that the I/O thread unpacks have at most this size; another thread unpacks more."""

_MEMORY_OF_MESSAGE = 600  # in addition to its record


@dataclass(slots=True, eq=False)
class PulledMessages:
    """The wanted messages of a response, up to before `next_offset`. `rest` begins with the first large inner batch."""

    messages: list[Message]
    next_offset: int
    rest: list[Message] = field(default_factory=list)
    large_batches: list[Message] = field(default_factory=list)


def read_messages(
    body: bytes,
    queue: MessageQueue,
    offset: int,
    next_offset: int,
    subscription: Subscription | None,
    body_limit: BodyLimit,
) -> PulledMessages:
    """Return the messages in the response to a pull at `offset`, with small inner batches unpacked.

    Raises:
        ProtocolError: the body is damaged, or has messages that the pull did not request.
        ConfigError: the package for the compression of an inner batch is not installed.
    """
    large: list[Message] = []
    bytes_left = INLINE_UNPACK_BYTES

    def unpack(batch: Message) -> list[Message]:
        nonlocal bytes_left
        try:
            items = inner_messages(batch, bytes_left)
        except BodyTooLarge:
            large.append(batch)
            return [batch]
        except ProtocolError as error:  # reading the batch raises the error in the listener
            mark_batch_unreadable(batch, error, offset)
            return [batch]
        bytes_left -= sum(item.store_size for item in items)
        return items

    messages = decode_messages(body, queue, unpack, body_limit, MAX_RECORDS)
    if not are_offsets_rising(messages):  # the window's edge would move back and forth
        raise ProtocolError(f"pull of {queue} at {offset}: the messages of the response are out of order")
    if messages and not large and not any(offset <= each.queue_offset < next_offset for each in messages):
        raise ProtocolError(
            f"pull of {queue} at {offset}: the response has messages from {messages[0].queue_offset} to "
            f"{messages[-1].queue_offset}, but none from {offset} to its next offset {next_offset}"
        )
    rest: list[Message] = []
    if large:
        index = messages.index(large[0])
        messages, rest = messages[:index], messages[index:]
        next_offset = min(max(offset, rest[0].queue_offset), next_offset)
    if messages and (messages[0].queue_offset < offset or messages[-1].queue_offset >= next_offset):
        # an inner batch may begin before the pull's offset; the broker returns later messages again
        messages = [message for message in messages if offset <= message.queue_offset < next_offset]
    if subscription is not None and subscription.tags:
        messages = [message for message in messages if _is_wanted(subscription, message)]
        rest = [message for message in rest if message in large or _is_wanted(subscription, message)]
    return PulledMessages(messages, next_offset, rest, large)


def _is_wanted(subscription: Subscription, message: Message) -> bool:
    """Return whether a message has one of the tags. The broker compares only their hashes."""
    try:
        return matches(subscription, message.tags)
    except ProtocolError:
        return True  # do not skip a damaged record: reading it raises the error in the listener


async def unpack_in_thread(
    batch: Message, begin: int, end: int, subscription: Subscription | None
) -> tuple[list[Message], int]:
    """Return the wanted messages of a large inner batch from `begin` to before `end`, and the memory that they take.

    If the batch cannot be unpacked, return the batch itself; reading it raises the error in the listener.
    """
    thread = SerialExecutor("pyrocket-unpack")
    work = asyncio.get_running_loop().run_in_executor(thread, _unpack_range, batch, begin, end, subscription)
    thread.shutdown()
    return await work


def _unpack_range(batch: Message, begin: int, end: int, subscription: Subscription | None) -> tuple[list[Message], int]:
    try:
        items = inner_messages(batch)
    except ProtocolError as error:
        mark_batch_unreadable(batch, error, begin)
        return [batch], batch.store_size
    items = [item for item in items if begin <= item.queue_offset < end]
    if subscription is not None and subscription.tags:
        items = [item for item in items if _is_wanted(subscription, item)]
    return items, sum(item.store_size + _MEMORY_OF_MESSAGE for item in items)
