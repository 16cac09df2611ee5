"""Offsets by queue: resets, offsets of members, progress of groups, and ranges of topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.json_object import (
    JsonObject,
    read_number,
    read_object,
    read_queue,
    read_record,
    write_record,
)


def _offset(value: object, what: str) -> int:
    return read_number(value, "the offset of a queue", what)


def encode_offset_table(offsets: Mapping[MessageQueue, int], as_list: bool = False) -> bytes:
    """Return the body of a reset (220) or of the response to 222. `as_list` selects the format for C++ admins."""
    if as_list:
        listed = [
            {"brokerName": queue.broker_name, "offset": offset, "queueId": queue.queue_id, "topic": queue.topic}
            for queue, offset in offsets.items()
        ]
        return fastjson.dumps({"offsetTable": listed})
    return fastjson.dumps({"offsetTable": dict(offsets)})


def decode_offset_table(body: bytes) -> dict[MessageQueue, int]:
    """Return the offsets of a reset from a map, a list of objects, or a list of pairs; no offsets from an empty body.

    Source: ResetOffsetBody, ResetOffsetBodyForC.
    """
    if not body:
        return {}
    value = fastjson.loads(body)
    found = JsonObject(value, "offset table")
    if not isinstance(value.get("offsetTable"), list):
        return found.queue_table("offsetTable", _offset)
    offsets = {}
    for item in found.items("offsetTable"):
        if isinstance(item, list) and len(item) == 2:
            offsets[read_queue(item[0], "offset table")] = _offset(item[1], "offset table")
        else:
            offsets[read_queue(item, "offset table")] = JsonObject(item, "offset table").number("offset")
    return offsets


def encode_consumer_status(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Return a member's response to 221: its offsets. Source: GetConsumerStatusBody."""
    return fastjson.dumps({"consumerTable": {}, "messageQueueTable": dict(offsets)})


def decode_consumer_status(body: bytes) -> dict[MessageQueue, int]:
    """Return the offsets in a member's response to 221."""
    return read_object(body, "consumer status").queue_table("messageQueueTable", _offset)


def encode_consumer_status_table(members: Mapping[str, Mapping[MessageQueue, int]]) -> bytes:
    """Return a broker's response to 223: the offsets of each member that responded."""
    return fastjson.dumps({"consumerTable": dict(members), "messageQueueTable": {}})


def decode_consumer_status_table(body: bytes) -> dict[str, dict[MessageQueue, int]]:
    """Return the offsets of each member, by client id."""
    members = read_object(body, "consumer status").table("consumerTable")
    found = JsonObject(members, "consumer status")
    return {str(client_id): found.queue_table(client_id, _offset) for client_id in members}


@dataclass(frozen=True, slots=True)
class QueueConsumeStats:
    """The progress of a group in one queue. Only 5.x sends `pull_offset`."""

    broker_offset: int = 0
    consumer_offset: int = 0
    last_timestamp: int = 0
    pull_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """The progress of a group in its queues. An offset that was never committed is 0."""

    queues: Mapping[MessageQueue, QueueConsumeStats]
    consume_tps: float = 0.0


def encode_consume_stats(stats: ConsumeStats) -> bytes:
    """Return the body. Source: ConsumeStats, OffsetWrapper."""
    table = {queue: write_record(each) for queue, each in stats.queues.items()}
    return fastjson.dumps({"consumeTps": stats.consume_tps, "offsetTable": table})


def decode_consume_stats(body: bytes) -> ConsumeStats:
    """Return the progress of a group."""
    found = read_object(body, "consume stats")
    queues = found.queue_table("offsetTable", lambda value, what: read_record(QueueConsumeStats, value, what))
    return ConsumeStats(queues, found.float_number("consumeTps"))


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The range of messages in one queue."""

    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """The ranges of messages in a topic's queues. Only newer 5.x sends `topic_put_tps`."""

    queues: Mapping[MessageQueue, QueueStats]
    topic_put_tps: float | None = None


def encode_topic_stats(stats: TopicStats) -> bytes:
    """Return the body. Source: TopicStatsTable, TopicOffset."""
    value: dict[str, Any] = {"offsetTable": {queue: write_record(each) for queue, each in stats.queues.items()}}
    if stats.topic_put_tps is not None:
        value["topicPutTps"] = stats.topic_put_tps
    return fastjson.dumps(value)


def decode_topic_stats(body: bytes) -> TopicStats:
    """Return the ranges of messages in a topic's queues."""
    found = read_object(body, "topic stats")
    queues = found.queue_table("offsetTable", lambda value, what: read_record(QueueStats, value, what))
    return TopicStats(queues, found.float_number("topicPutTps") if found.has("topicPutTps") else None)
