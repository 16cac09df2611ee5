"""The running info of a consumer, and the result of a message that an admin had it consume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.bodies.subscriptions import read_subscription, subscription_object
from pyrocket_consumer.protocol.json_object import java_field, read_object, read_record, write_record


@dataclass(frozen=True, slots=True)
class QueueRunningInfo:
    """The state of one process queue. Source: ProcessQueueInfo."""

    commit_offset: int = -1
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mib: int = java_field("cachedMsgSizeInMiB", 0)
    transaction_msg_min_offset: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_count: int = 0
    locked: bool = False
    try_unlock_times: int = 0
    last_lock_timestamp: int = 0
    dropped: bool = java_field("droped", False)
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """The consumption of a topic: times in milliseconds, rates per second. Source: ConsumeStatus."""

    pull_rt: float = java_field("pullRT", 0.0)
    pull_tps: float = java_field("pullTPS", 0.0)
    consume_rt: float = java_field("consumeRT", 0.0)
    consume_ok_tps: float = java_field("consumeOKTPS", 0.0)
    consume_failed_tps: float = java_field("consumeFailedTPS", 0.0)
    consume_failed_msgs: int = 0


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """The running info of a consumer. Admin tools need PROP_CONSUME_TYPE and PROP_CONSUMER_START_TIMESTAMP."""

    properties: Mapping[str, str] = field(default_factory=dict)
    subscriptions: tuple[Subscription, ...] = ()
    queues: Mapping[MessageQueue, QueueRunningInfo] = field(default_factory=dict)
    status: Mapping[str, TopicStatus] = field(default_factory=dict)
    jstack: str | None = None


def encode_running_info(info: RunningInfo) -> bytes:
    """Return the body. Source: ConsumerRunningInfo."""
    value: dict[str, Any] = {}
    if info.jstack is not None:
        value["jstack"] = info.jstack
    value["mqTable"] = {queue: write_record(each) for queue, each in info.queues.items()}
    value["properties"] = dict(info.properties)
    value["statusTable"] = {topic: write_record(each) for topic, each in info.status.items()}
    value["subscriptionSet"] = [subscription_object(each) for each in info.subscriptions]
    return fastjson.dumps(value)


def decode_running_info(body: bytes) -> RunningInfo:
    """Return the running info of a consumer."""
    found = read_object(body, "running info")
    return RunningInfo(
        found.text_table("properties"),
        tuple(read_subscription(each) for each in found.objects("subscriptionSet")),
        found.queue_table("mqTable", lambda value, what: read_record(QueueRunningInfo, value, what)),
        {
            str(topic): read_record(TopicStatus, each, "statusTable")
            for topic, each in found.table("statusTable").items()
        },
        found.optional_text("jstack"),
    )


@dataclass(frozen=True, slots=True)
class ConsumeDirectlyResult:
    """The result of a message consumed on demand: CR_SUCCESS, CR_LATER, CR_THROW_EXCEPTION …"""

    consume_result: str = "CR_SUCCESS"
    order: bool = False
    auto_commit: bool = True
    spent_time_mills: int = 0
    remark: str | None = None


def encode_consume_directly_result(result: ConsumeDirectlyResult) -> bytes:
    """Return the body. Source: ConsumeMessageDirectlyResult."""
    return fastjson.dumps(write_record(result))
