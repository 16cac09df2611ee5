"""Settings of groups, and plain lists and tables of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.json_object import read_object, read_record, write_record


@dataclass(frozen=True, slots=True)
class SubscriptionGroupConfig:
    """The settings of a consumer group at a broker. Those that are None are not sent, because 4.9 has fewer."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool | None = None
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    consume_timeout_minute: int | None = None
    group_sys_flag: int | None = None


def encode_subscription_group(config: SubscriptionGroupConfig) -> bytes:
    """Return the body. Source: SubscriptionGroupConfig."""
    return fastjson.dumps(write_record(config))


def decode_subscription_group(body: bytes) -> SubscriptionGroupConfig:
    """Return a group's settings. Missing ones have Java's defaults."""
    return read_record(SubscriptionGroupConfig, read_object(body, "subscription group"), "subscription group")


def decode_subscription_groups(body: bytes) -> dict[str, SubscriptionGroupConfig]:
    """Return all groups of a broker, by name. Source: SubscriptionGroupWrapper."""
    table = read_object(body, "subscription groups").table("subscriptionGroupTable")
    return {
        str(name): read_record(SubscriptionGroupConfig, value, "subscription group") for name, value in table.items()
    }


def encode_group_list(groups: Iterable[str]) -> bytes:
    """Return the body that lists consumer groups."""
    return fastjson.dumps({"groupList": list(groups)})


def encode_topic_list(topics: Iterable[str]) -> bytes:
    """Return the body that lists topics."""
    return fastjson.dumps({"topicList": list(topics)})


def decode_topic_list(body: bytes) -> list[str]:
    """Return topics."""
    return read_object(body, "topic list").texts("topicList")


def encode_kv_table(table: Mapping[str, str]) -> bytes:
    """Return the body with the keys of a namespace."""
    return fastjson.dumps({"table": dict(table)})
