"""Offsets: the start and the end of a read, the JSON in Spark's checkpoint, and the ranges between two offsets.

    {"version": 1, "queues": {"orders": {"broker-a": {"0": 120, "1": 98}}},
     "from": {"orders": {"broker-a": {"0": 100, "1": 98}}},
     "seen": {"orders": {"broker-a": 1714557600000}}}

`queues` has the next offset to read of each queue. `from` has the start of each queue that the offset before does not
name, which is every queue in the first batch. It also has the queues that continue elsewhere after a loss of messages.
`seen` has the time of the last request to a broker, in milliseconds since 1970. No message stored later was read.

`"initial": true` marks the offset before the first batch. Spark may ask for it twice and get different values, so a
repeated batch must not depend on it. Spark compares offsets as text, so equal ones are written alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeVar

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue

T = TypeVar("T")

VERSION = 1

in_order = attrgetter("topic", "broker_name", "queue_id")
"""The key to sort queues by. It gives their natural order, and is much faster for thousands of queues."""


EARLIEST = -2
LATEST = -1


class NamedOffset(StrEnum):
    """Offsets that have a name."""

    EARLIEST = "earliest"
    LATEST = "latest"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class GivenOffsets:
    """Offsets given as JSON: by (topic, broker, queue id), where None means all brokers or queues."""

    option: str
    offsets: Mapping[tuple[str, str | None, int | None], int]

    def offset(self, queue: MessageQueue) -> int | None:
        """Return the value for `queue`: an offset, EARLIEST or LATEST; None without one."""
        return next((self.offsets[key] for key in _keys(queue) if key in self.offsets), None)

    def check(self, queues: Iterable[MessageQueue]) -> None:
        """Raise ConfigError unless each of `queues`, and no other queue, has a value."""
        queues = sorted(queues)
        if lacking := [queue for queue in queues if self.offset(queue) is None]:
            raise ConfigError(f"option {self.option} covers all queues to read or none; it lacks {join_first(lacking)}")
        known = {key for queue in queues for key in _keys(queue)}
        if unknown := ["/".join(str(part) for part in key if part is not None) for key in self.offsets.keys() - known]:
            raise ConfigError(
                f"option {self.option} names {join_first(sorted(unknown))}, which the query does not read; "
                f"it reads {join_first(queues)}"
            )


def _keys(queue: MessageQueue) -> tuple[tuple[str, str | None, int | None], ...]:
    topic, broker = queue.topic, queue.broker_name
    return (topic, broker, queue.queue_id), (topic, broker, None), (topic, None, None)


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The first message stored at a time or later: one time for all topics, or one for each.

    Times are in milliseconds since 1970.
    """

    option: str
    at_ms: int | Mapping[str, int]

    def of(self, topic: str) -> int | None:
        """Return the time for `topic`, None if it has none."""
        return self.at_ms if isinstance(self.at_ms, int) else self.at_ms.get(topic)

    @property
    def topics(self) -> Collection[str]:
        """The topics with times of their own."""
        return () if isinstance(self.at_ms, int) else self.at_ms.keys()

    def check(self, topics: Iterable[str]) -> None:
        """Raise ConfigError unless each of `topics` has a time."""
        if lacking := sorted(topic for topic in set(topics) if self.of(topic) is None):
            raise ConfigError(
                f"option {self.option} needs a time for each topic to read, or one time for all; it lacks "
                f"{join_first(lacking)}"
            )

    def check_chosen(self, is_chosen: Callable[[str], bool]) -> None:
        """Raise ConfigError if one of the topics is not chosen to be read."""
        if unknown := sorted(topic for topic in self.topics if not is_chosen(topic)):
            raise ConfigError(
                f"option {self.option} names {join_first(unknown)}, which no option chooses to read; remove it, or "
                "read it, too"
            )


Bound = NamedOffset | GivenOffsets | StoredAt
"""The start or the end of a read."""


def join_first(items: Iterable[object], most: int = 5) -> str:
    """Return the first few items as text, and the number of the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return (", ".join(map(str, items[:most])) or "none") + more


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of `queue` from offset `begin` up to, but not including, `end`."""

    queue: MessageQueue
    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def __str__(self) -> str:
        return f"{self.queue}[{self.begin}, {self.end})"


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """The next offset to read of each queue. `begins` has the start of queues that are new or continue elsewhere.

    `seen_ms` has a time by topic and broker name. No message stored there since that time was read.
    """

    queues: Mapping[MessageQueue, int]
    begins: Mapping[MessageQueue, int] = field(default_factory=dict)
    initial: bool = False
    seen_ms: Mapping[tuple[str, str], int] = field(default_factory=dict)


def encode_offset(offset: SourceOffset) -> dict[str, Any]:
    """Return `offset` in the form that Spark stores; equal offsets give the same text."""
    encoded: dict[str, Any] = {"version": VERSION, "queues": _nest(offset.queues)}
    if offset.begins:
        encoded["from"] = _nest(offset.begins)
    if offset.initial:
        encoded["initial"] = True
    for (topic, broker), at_ms in sorted(offset.seen_ms.items()):
        encoded.setdefault("seen", {}).setdefault(topic, {})[broker] = at_ms
    return encoded


def decode_offset(encoded: Mapping[str, Any]) -> SourceOffset:
    """Return the offset that `encode_offset` of this release or an older one has encoded.

    Raises:
        ConfigError: a newer release wrote it, or it is not an offset of this source.
    """
    version = encoded.get("version") if isinstance(encoded, Mapping) else None
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"the checkpoint has offsets of version {version!r:.20}, written by a newer release of pyrocket-consumer; "
            f"this release reads up to {VERSION}. Install the newer release again, or use another checkpoint"
        )
    if version != VERSION:
        raise ConfigError(f"{encoded!r:.200} in the checkpoint is not an offset of this source; use another checkpoint")
    return SourceOffset(
        _read(encoded, "queues", _flatten),
        _read(encoded, "from", _flatten),
        encoded.get("initial") is True,
        _read(encoded, "seen", _read_times),
    )


def ranges_between(start: SourceOffset, end: SourceOffset) -> list[QueueRange]:
    """Return the range of each queue that a batch from `start` to `end` reads.

    The first batch of a query depends on `end` alone. After a crash its `start` may be later than `end`, so a queue
    whose end is not above its start is skipped.

    Raises:
        ConfigError: a queue of `end` has no start, so the two offsets belong to different queries.
    """
    if start == end or end.initial:
        return []
    ranges = []
    for queue in sorted(end.queues, key=in_order):
        stop = end.queues[queue]
        begin = end.begins.get(queue, start.queues.get(queue))
        if begin is None:
            raise ConfigError(f"the checkpoint has no start offset of {queue}; use another checkpoint")
        if begin < stop:
            ranges.append(QueueRange(queue, begin, stop))
    return ranges


def _nest(offsets: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets, key=in_order):
        nested.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offsets[queue]
    return nested


def _read(encoded: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T:
    try:
        return read(encoded.get(name, {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} of an offset in the checkpoint cannot be read: {error!s:.200}; use another checkpoint"
        ) from None


def _read_times(topics: Any) -> dict[tuple[str, str], int]:
    return {
        (topic, broker): _check_number(at_ms) for topic, brokers in topics.items() for broker, at_ms in brokers.items()
    }


def _flatten(topics: Any) -> dict[MessageQueue, int]:
    return {
        MessageQueue(topic, broker, _check_queue_id(queue_id)): _check_number(offset)
        for topic, brokers in topics.items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }


def _check_number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a value that is not an offset or a time: a whole number from 0 to 2^63-1")
    return value


def _check_queue_id(text: str) -> int:
    if len(text) > 10 or not 0 <= (queue_id := int(text)) < 2**31:
        raise ValueError(f"{text!r:.50} is not a queue id, a number from 0 to 2^31-1")
    return queue_id
