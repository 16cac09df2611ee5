"""Expressions of subscriptions. Source: FilterAPI, SubscriptionData, ExpressionMessageFilter."""

from __future__ import annotations

import re

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import Subscription
from pyrocket_consumer.text import safe_repr

ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"

_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # the characters that String.trim removes


_INTENDED_AS_SQL = re.compile(
    r"\s(=|==|<>|!=|<=?|>=?|&&|AND|NOT)\s|='|\bIN\s*\(|(?i:\bIS\s+(NOT\s+)?NULL\b|\bBETWEEN\s.*\sAND\s)"
)
_INTENDED_AS_LIST = re.compile(r"\s*\|\s*|\s*[,;]\s+|\s+OR\s+")


def parse_subscription(topic: str, expression: str | None = ALL, version: int = 0) -> Subscription:
    """Return the subscription to messages of `topic` whose tag is one of those in `expression` ("TagA || TagB").

    None, "" and "*" select every message.

    An expression that ends with "||" is used unchanged, even if its tags look like a mistake.

    Raises:
        ConfigError: the expression names no tag, such as "||". A broker would refuse it or deliver no message. Or one
            of its tags looks like a mistake, such as "a | b", because no message has such a tag. Or UTF-8 cannot
            encode it.
    """
    if expression is None or expression in ("", ALL):
        return Subscription(topic, ALL, frozenset(), TAG, version)
    check_expression(expression)
    tags = frozenset(tag for tag in (piece.strip(_JAVA_BLANKS) for piece in expression.split("||")) if tag)
    if not tags:
        raise ConfigError(
            f"expression {expression!r:.200} names no tag; use '*' for every message, or tags joined by '||'"
        )
    if not expression.rstrip(_JAVA_BLANKS).endswith("||"):
        _check_intended(expression, tags)
    return Subscription(topic, expression, tags, TAG, version)


def check_expression(expression: str) -> None:
    """Raise ConfigError for an expression of tags or SQL92 that UTF-8 cannot encode, so that no request can have it."""
    try:
        expression.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"expression {safe_repr(expression, 200)} has an unpaired surrogate at position {error.start}, which UTF-8 "
            "cannot encode; remove it, or give the text that was meant. Bytes that are not UTF-8 become surrogates, "
            "for example in sys.argv"
        ) from error


def _check_intended(expression: str, tags: frozenset[str]) -> None:
    """Raise ConfigError for a tag that was probably intended as a list of tags or as SQL."""
    for tag in sorted(tags):
        if _INTENDED_AS_SQL.search(tag):
            hint = "an SQL92 expression on properties has its own option: sql('…'), --sql, sqlFilter"
        elif _INTENDED_AS_LIST.search(tag):
            hint = f"tags are joined by '||': {' || '.join(_names(expression))!r:.200}"
        else:
            continue
        raise ConfigError(
            f"expression {expression!r:.200} selects messages with the single tag {tag!r:.100}, which is probably a "
            f"mistake; {hint}. If there are such tags, end it with '||': {expression + ' ||'!r:.200}"
        )


def _names(expression: str) -> list[str]:
    pieces = (_INTENDED_AS_LIST.split(each) for each in expression.split("||"))
    return [name.strip() for names in pieces for name in names if name.strip()]


def java_string_hash(text: str) -> int:
    """Return the String.hashCode of Java: a signed 32-bit number over UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def tag_hash(tag: str) -> int:
    """Return the hash by which brokers select a tag; different tags may have the same hash."""
    return java_string_hash(tag)


def matches(subscription: Subscription, tag: str | None) -> bool:
    """Return whether `subscription` selects a message with `tag`.

    A broker compares only hashes, so the consumer checks each message again. Only the broker evaluates SQL92.
    """
    if subscription.tags:
        return tag in subscription.tags
    return subscription.expression == ALL or subscription.expression_type != TAG
