"""The messages that a batch may skip, by the filters that Spark pushes. Pure functions, without brokers or Spark.

Spark checks every filter itself. So a batch may read more messages than a filter selects, and never fewer. An unknown
filter skips none.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.subscription import TAG
from pyrocket_consumer.spark.offsets import QueueRange

MAX_TAGS = 100
"""Most tags to request from a broker, because every pull request carries them."""

MAX_TAGS_LENGTH = 4096
"""Most characters of these tags, all together."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A tag that a broker takes literally: FilterAPI splits at "||" and trims, and "*" selects every message. U+FFFD in a
# row may represent bytes that are not text, which a broker compares as bytes.
_PLAIN_TAG = re.compile(r"[^\s\x00-\x20|*\ufffd]+")

# Filters are known by the names of their classes, which PySpark 4.0 does not have.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
}
_QUEUE_COLUMNS: dict[str, Callable[[MessageQueue], int | str]] = {
    "topic": lambda queue: queue.topic,
    "brokerName": lambda queue: queue.broker_name,
    "queueId": lambda queue: queue.queue_id,
}  # columns that are equal for all messages of a queue


@dataclass(frozen=True, slots=True)
class Span:
    """The whole numbers from `low` to `high`, both included; None means no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, other: Span) -> Span:
        """Return the numbers in both."""
        lows = [each for each in (self.low, other.low) if each is not None]
        highs = [each for each in (self.high, other.high) if each is not None]
        return Span(max(lows, default=None), min(highs, default=None))

    @property
    def is_empty(self) -> bool:
        return self.low is not None and self.high is not None and self.low > self.high

    def __str__(self) -> str:
        return f"{'' if self.low is None else self.low}..{'' if self.high is None else self.high}"


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The messages to read: within these spans, in queues that pass these filters, with these tags.

    `tags` is None if any tag is allowed.
    """

    offsets: Span = Span()
    stored_ms: Span = Span()
    queue_filters: tuple[Any, ...] = field(default=())
    tags: frozenset[str] | None = None

    @property
    def match_nothing(self) -> bool:
        """Whether no message can match."""
        return self.offsets.is_empty or self.stored_ms.is_empty or self.tags == frozenset()

    def select(self, queue: MessageQueue) -> bool:
        """Return whether `queue`, with its topic named as in rows, may have such messages."""
        return not self.match_nothing and all(_evaluate(each, queue) is not False for each in self.queue_filters)

    def narrow(self, whole: QueueRange) -> QueueRange:
        """Return the part of `whole` within the offsets; its end may be below its start."""
        low, high = self.offsets.low, self.offsets.high
        begin = whole.begin if low is None else max(whole.begin, low)
        return replace(whole, begin=begin, end=whole.end if high is None else min(whole.end, high + 1))

    def __str__(self) -> str:
        parts = [
            f"{name}={span}"
            for name, span in (("queueOffset", self.offsets), ("storeTimestampMs", self.stored_ms))
            if span != Span()
        ]
        parts += [str(each) for each in self.queue_filters]
        if self.tags is not None:
            parts.append(f"tags={' || '.join(sorted(self.tags)) or 'none'}")
        return " ".join(parts) or "nothing"


def push_filters(filters: Iterable[object], selector: Subscription) -> tuple[PushedFilters, Subscription]:
    """Return the combined `filters`, and the subscription to request from brokers in place of `selector`."""
    offsets, stored_us, queue_filters, tags = Span(), Span(), list[object](), None
    for each in filters:
        column, kind = _column(each), type(each).__name__
        if column in _QUEUE_COLUMNS:
            queue_filters.append(each)
        elif column == "queueOffset" and (span := _span(kind, _values(each), _integer)) is not None:
            offsets = offsets.within(span)
        elif column == "storeTimestamp" and (span := _span(kind, _values(each), _microseconds)) is not None:
            stored_us = stored_us.within(span)
        elif column == "tags" and selector.expression_type == TAG and (found := _tags(kind, _values(each))) is not None:
            tags = found if tags is None else tags & found
    if tags is not None:
        tags = tags & selector.tags if selector.tags else tags
        if tags:
            selector = replace(selector, expression=" || ".join(sorted(tags)), tags=tags)
    low_us, high_us = stored_us.low, stored_us.high
    stored_ms = Span(None if low_us is None else -(-low_us // 1000), None if high_us is None else high_us // 1000)
    return PushedFilters(offsets, stored_ms, tuple(queue_filters), tags), selector


def _column(each: Any) -> str | None:
    """Return the column that a filter tests."""
    path: tuple[str, ...] = getattr(getattr(each, "child", each), "attribute", ())
    return path[0] if len(path) == 1 else None


def _values(each: Any) -> Sequence[object]:
    """Return the values that a filter compares with, without null. Nothing equals null, so Spark does not push it."""
    value: Any = getattr(each, "value", None)
    return [one for one in (value if type(each).__name__ == "In" else (value,)) if one is not None]


def _evaluate(each: Any, queue: MessageQueue) -> bool | None:
    """Return the result of a filter for all messages of `queue`, None if unknown."""
    kind, column = type(each).__name__, _column(each)
    if kind == "Not":
        result = _evaluate(each.child, queue)
        return None if result is None else not result
    actual, values = _QUEUE_COLUMNS[column](queue) if column is not None else None, _values(each)
    if not values or any(type(value) is not type(actual) for value in values):
        return None
    if kind == "In":
        return actual in values
    compared = _COMPARISONS.get(kind)
    return None if compared is None else compared(actual, values[0])


def _span(kind: str, values: Sequence[object], number: Callable[[object], int | None]) -> Span | None:
    """Return the smallest span of all numbers that pass a filter, None if unknown."""
    numbers = [found for value in values if (found := number(value)) is not None]
    if not numbers or len(numbers) < len(values):
        return None
    first = numbers[0]
    match kind:
        case "EqualTo" | "EqualNullSafe" | "In":
            return Span(min(numbers), max(numbers))
        case "GreaterThan":
            return Span(low=first + 1)
        case "GreaterThanOrEqual":
            return Span(low=first)
        case "LessThan":
            return Span(high=first - 1)
        case "LessThanOrEqual":
            return Span(high=first)
    return None


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _microseconds(value: object) -> int | None:
    """Return a time in Spark's unit; None for a time without a zone, and for other values."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)


def _tags(kind: str, values: Sequence[object]) -> frozenset[str] | None:
    """Return the tags that a filter selects, None if a broker cannot select exactly these."""
    if kind not in ("EqualTo", "EqualNullSafe", "In") or not 0 < len(values) <= MAX_TAGS:
        return None
    plain = frozenset(value for value in values if isinstance(value, str) and _PLAIN_TAG.fullmatch(value))
    return plain if len(plain) == len(set(values)) and sum(map(len, plain)) <= MAX_TAGS_LENGTH else None
