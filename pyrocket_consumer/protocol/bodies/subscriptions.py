"""A subscription as JSON, which several bodies contain."""

from __future__ import annotations

from typing import Any

from pyrocket_consumer.model import Subscription
from pyrocket_consumer.protocol.json_object import JsonObject
from pyrocket_consumer.protocol.subscription import TAG, tag_hash


def subscription_object(subscription: Subscription) -> dict[str, Any]:
    tags = sorted(subscription.tags)
    return {
        "classFilterMode": False,
        "codeSet": [tag_hash(tag) for tag in tags],
        "expressionType": subscription.expression_type,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": tags,
        "topic": subscription.topic,
    }


def read_subscription(found: JsonObject) -> Subscription:
    return Subscription(
        found.text("topic"),
        found.text("subString"),
        frozenset(found.texts("tagsSet")),
        found.text("expressionType", TAG),
        found.number("subVersion"),
    )
