"""What a subscription's expression selects. Source: FilterAPI, SubscriptionData, ExpressionMessageFilter."""

from __future__ import annotations

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import Subscription

ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"

_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what String.trim takes off


def parse_subscription(topic: str, expression: str | None = ALL, version: int = 0) -> Subscription:
    """Return the subscription to messages of `topic` whose tag is one of those in `expression` ("TagA || TagB").

    None, "" and "*" select every message.

    Raises:
        ConfigError: the expression names no tag at all, like "||": a broker refuses it or never delivers anything.
    """
    if expression is None or expression in ("", ALL):
        return Subscription(topic, ALL, frozenset(), TAG, version)
    tags = frozenset(tag for tag in (piece.strip(_JAVA_BLANKS) for piece in expression.split("||")) if tag)
    if not tags:
        raise ConfigError(f"expression {expression!r} names no tag; use '*' for every message, or tags joined by '||'")
    return Subscription(topic, expression, tags, TAG, version)


def java_string_hash(text: str) -> int:
    """Return what String.hashCode gives in Java: a signed 32-bit number over UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def tag_hash(tag: str) -> int:
    """Return the number by which brokers select a tag; different tags may share one."""
    return java_string_hash(tag)


def matches(subscription: Subscription, tag: str | None) -> bool:
    """Tell whether a message with `tag` is wanted.

    A broker compares hashes only, so what it delivers must pass here again. SQL92 is the broker's business alone.
    """
    if subscription.tags:
        return tag in subscription.tags
    return subscription.expression == ALL or subscription.expression_type != TAG
