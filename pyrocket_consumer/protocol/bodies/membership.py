"""Members of groups and their subscriptions: heartbeats, member lists, connections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyrocket_consumer.model import Subscription
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.bodies.subscriptions import read_subscription, subscription_object
from pyrocket_consumer.protocol.json_object import JsonObject, read_object, read_record, write_record


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group in a client's heartbeat."""

    group: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: tuple[Subscription, ...] = ()
    unit_mode: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatData:
    """The content of a heartbeat: a client, its consumer groups with their subscriptions, and its producer groups."""

    client_id: str
    consumers: tuple[ConsumerData, ...] = ()
    producers: tuple[str, ...] = ()


def encode_heartbeat(data: HeartbeatData) -> bytes:
    """Return the body of a full (not "V2") heartbeat, which every broker accepts. Source: HeartbeatData."""
    return fastjson.dumps(
        {
            "clientID": data.client_id,
            "consumerDataSet": [
                {
                    "consumeFromWhere": each.consume_from_where,
                    "consumeType": each.consume_type,
                    "groupName": each.group,
                    "messageModel": each.message_model,
                    "subscriptionDataSet": [subscription_object(one) for one in each.subscriptions],
                    "unitMode": each.unit_mode,
                }
                for each in data.consumers
            ],
            "producerDataSet": [{"groupName": group} for group in data.producers],
        }
    )


def decode_heartbeat(body: bytes) -> HeartbeatData:
    """Return the content of a heartbeat. Names of enum values stay unchanged."""
    found = read_object(body, "heartbeat")
    consumers = tuple(
        ConsumerData(
            each.text("groupName"),
            each.text("consumeType"),
            each.text("messageModel"),
            each.text("consumeFromWhere"),
            tuple(read_subscription(one) for one in each.objects("subscriptionDataSet")),
            each.boolean("unitMode"),
        )
        for each in found.objects("consumerDataSet")
    )
    producers = tuple(each.text("groupName") for each in found.objects("producerDataSet"))
    return HeartbeatData(found.text("clientID"), consumers, producers)


def encode_consumer_list(client_ids: Iterable[str]) -> bytes:
    """Return the body that lists a group's members."""
    return fastjson.dumps({"consumerIdList": list(client_ids)})


def decode_consumer_list(body: bytes) -> list[str]:
    """Return the client ids of a group's members, unordered. A client with two connections occurs twice."""
    return read_object(body, "consumer list").texts("consumerIdList")


@dataclass(frozen=True, slots=True)
class CheckClientConfig:
    """A subscription for a broker to check."""

    client_id: str
    group: str
    subscription: Subscription


def encode_check_client_config(check: CheckClientConfig) -> bytes:
    """Return the body. Source: CheckClientRequestBody."""
    subscription = subscription_object(check.subscription)
    return fastjson.dumps({"clientId": check.client_id, "group": check.group, "subscriptionData": subscription})


def decode_check_client_config(body: bytes) -> CheckClientConfig:
    """Return the subscription to check."""
    found = read_object(body, "check client config")
    subscription = read_subscription(JsonObject(found.table("subscriptionData"), "check client config"))
    return CheckClientConfig(found.text("clientId"), found.text("group"), subscription)


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection of a group's member, as the broker reports it."""

    client_id: str = ""
    client_addr: str = ""
    language: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerConnection:
    """The connections of a group, and the group's settings and subscriptions."""

    connections: tuple[Connection, ...] = ()
    consume_type: str = ""
    message_model: str = ""
    consume_from_where: str = ""
    subscriptions: tuple[Subscription, ...] = ()


def encode_consumer_connection(value: ConsumerConnection) -> bytes:
    """Return the body. Source: ConsumerConnection."""
    return fastjson.dumps(
        {
            "connectionSet": [write_record(each) for each in value.connections],
            "consumeFromWhere": value.consume_from_where,
            "consumeType": value.consume_type,
            "messageModel": value.message_model,
            "subscriptionTable": {each.topic: subscription_object(each) for each in value.subscriptions},
        }
    )


def decode_consumer_connection(body: bytes) -> ConsumerConnection:
    """Return the connections of a group."""
    found = read_object(body, "consumer connection")
    subscriptions = found.table("subscriptionTable").values()
    return ConsumerConnection(
        tuple(read_record(Connection, each, "connection") for each in found.objects("connectionSet")),
        found.text("consumeType"),
        found.text("messageModel"),
        found.text("consumeFromWhere"),
        tuple(read_subscription(JsonObject(each, "subscriptionTable")) for each in subscriptions),
    )
