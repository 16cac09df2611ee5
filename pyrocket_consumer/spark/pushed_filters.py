"""What a batch may leave out, by the filters that Spark pushes. Pure: no broker, no Spark.

Spark checks every filter itself, so what is kept here may be more than a filter says, and never less. A filter of which
nothing is known here leaves out nothing.
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
from pyrocket_consumer.spark.ranges import QueueRange

MAX_TAGS = 100
"""Of so many tags at most a broker is told: they travel with every pull."""

MAX_TAGS_LENGTH = 4096
"""So many characters they may have, all together."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What a broker takes for a tag as it stands: FilterAPI splits at "||", trims, and "*" is every message. U+FFFD may
# stand in a row for bytes that are no text, which a broker sees otherwise.
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
}  # columns in which all messages of a queue are alike


@dataclass(frozen=True, slots=True)
class Span:
    """The whole numbers from `low` to `high`, both of them, too; None is no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, other: Span) -> Span:
        """Return what is in both."""
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
    """What messages must be like to be read: in these ranges, in queues that pass these filters, with these tags.

    `tags` is None where any will do.
    """

    offsets: Span = Span()
    stored_ms: Span = Span()
    queue_filters: tuple[Any, ...] = field(default=())
    tags: frozenset[str] | None = None

    @property
    def match_nothing(self) -> bool:
        """Whether no message can be like that."""
        return self.offsets.is_empty or self.stored_ms.is_empty or self.tags == frozenset()

    def select(self, queue: MessageQueue) -> bool:
        """Tell whether `queue`, with its topic named as in rows, may have such messages."""
        return not self.match_nothing and all(_evaluate(each, queue) is not False for each in self.queue_filters)

    def narrow(self, whole: QueueRange) -> QueueRange:
        """Return the part of `whole` that the offsets allow; it may end before it begins."""
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
    """Return what `filters` leave, all of them together, and what of it brokers are asked for instead of `selector`."""
    offsets, stored_us, queue_filters, tags = Span(), Span(), list[object](), None
    for each in filters:
        column, kind = _column(each), type(each).__name__
        if column in _QUEUE_COLUMNS:
            queue_filters.append(each)
        elif column == "queueOffset" and (span := _span(kind, _values(each), _whole)) is not None:
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
    """Return the column that a filter is about."""
    path: tuple[str, ...] = getattr(getattr(each, "child", each), "attribute", ())
    return path[0] if len(path) == 1 else None


def _values(each: Any) -> Sequence[object]:
    """Return what a filter compares with. Null is left out: nothing equals it, or Spark would not compare."""
    value: Any = getattr(each, "value", None)
    return [one for one in (value if type(each).__name__ == "In" else (value,)) if one is not None]


def _evaluate(each: Any, queue: MessageQueue) -> bool | None:
    """Return what a filter says of all messages of `queue`, None if that is not known here."""
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
    """Return the least span with all that a filter lets through, None if that is not known here."""
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


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _microseconds(value: object) -> int | None:
    """Return a time as Spark counts it; None for one without a zone, and for anything else."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)


def _tags(kind: str, values: Sequence[object]) -> frozenset[str] | None:
    """Return the tags that a filter asks for, None if a broker cannot be asked for just these."""
    if kind not in ("EqualTo", "EqualNullSafe", "In") or not 0 < len(values) <= MAX_TAGS:
        return None
    plain = frozenset(value for value in values if isinstance(value, str) and _PLAIN_TAG.fullmatch(value))
    return plain if len(plain) == len(set(values)) and sum(map(len, plain)) <= MAX_TAGS_LENGTH else None
