"""The start and the end of a read: offsets or times, by name, as one value, or as JSON by topic, broker and queue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeGuard, TypeVar

from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.config import check_topic
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import safe_repr

T = TypeVar("T")

MAX_OFFSET = 2**63 - 1
INTEGER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")

_OPTION_NAMES = {
    "name_server": "nameServer",
    "allowed_addresses": "allowedAddresses",
    "sharding_key": "shardingKey",
    "delay_level": "delayLevel",
    "deliver_at": "deliverAt",
    "max_message_bytes": "maxMessageBytes",
    "auto_create_topic": "autoCreateTopic",
}  # the option or column of each Python argument
_ARGUMENT = re.compile(rf"(?<![\w'\"])({'|'.join(_OPTION_NAMES)})(?![\w'\"])")  # in quotes it is a value


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
        topic, broker, queue_id = queue.topic, queue.broker_name, queue.queue_id
        for key in ((topic, broker, queue_id), (topic, broker, None), (topic, None, None)):
            if (offset := self.offsets.get(key)) is not None:
                return offset
        return None

    def check(self, queues: Iterable[MessageQueue]) -> None:
        """Raise ConfigError unless each of `queues`, and no other queue, has a value."""
        queues = sorted(queues)
        if lacking := [queue for queue in queues if self.offset(queue) is None]:
            raise ConfigError(f"option {self.option} covers all queues to read or none; it lacks {join_first(lacking)}")
        known = {
            key
            for queue in queues
            for key in (
                (queue.topic, queue.broker_name, queue.queue_id),
                (queue.topic, queue.broker_name, None),
                (queue.topic, None, None),
            )
        }
        if unknown := [
            "/".join(str(part) for part in key if part is not None) for key in self.offsets if key not in known
        ]:
            raise ConfigError(
                f"option {self.option} names {join_first(sorted(unknown))}, which the query does not read; "
                f"it reads {join_first(queues)}"
            )


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The first message stored at this time, in milliseconds since 1970, or later."""

    timestamp_ms: int

    def of(self, topic: str) -> int | None:
        """Return the time for `topic`: the same for each."""
        return self.timestamp_ms


@dataclass(frozen=True, slots=True)
class StoredAtByTopic:
    """The first message stored at the time of its topic or later; given as JSON."""

    option: str
    timestamps_ms: Mapping[str, int]

    def of(self, topic: str) -> int | None:
        """Return the time for `topic`, None if it has none."""
        return self.timestamps_ms.get(topic)

    def check(self, topics: Iterable[str]) -> None:
        """Raise ConfigError unless each of `topics` has a time."""
        if lacking := sorted(set(topics) - self.timestamps_ms.keys()):
            raise ConfigError(
                f"option {self.option} needs a time for each topic to read, or one time for all; it lacks "
                f"{join_first(lacking)}"
            )

    def check_chosen(self, is_chosen: Callable[[str], bool]) -> None:
        """Raise ConfigError if one of the topics is not chosen to be read."""
        if unknown := sorted(topic for topic in self.timestamps_ms if not is_chosen(topic)):
            raise ConfigError(
                f"option {self.option} names {join_first(unknown)}, which no option chooses to read; remove it, or "
                "read it, too"
            )


Bound = NamedOffset | GivenOffsets | StoredAt | StoredAtByTopic
"""The start or the end of a read."""

TIME_BOUNDS = (StoredAt, StoredAtByTopic)
"""The bounds that are times."""


def check_times(start: Bound | None, end: Bound) -> None:
    """Raise ConfigError if reading would end, in some topic, at a time before it starts."""
    if not isinstance(start, TIME_BOUNDS) or not isinstance(end, TIME_BOUNDS):
        return
    by_topic = [bound.timestamps_ms for bound in (start, end) if isinstance(bound, StoredAtByTopic)]
    for topic in by_topic[0] if by_topic else ("",):
        from_ms, to_ms = start.of(topic), end.of(topic)
        if from_ms is not None and to_ms is not None and to_ms < from_ms:
            where = f" for {topic}" if topic else ""
            raise ConfigError(f"option endingTimestamp is before startingTimestamp{where}; exchange them")


def parse_bound(
    edge: str,
    offsets: str | None,
    at: str | None,
    namespace: str | None,
    allowed: tuple[NamedOffset, ...],
    group: str | None = None,
) -> Bound | None:
    """Return the "starting" or "ending" edge of a read, from the texts of both options. A time takes precedence.

    Raises:
        ConfigError: a text is wrong; the error has the option's name, its value, and the allowed values.
    """
    option = f"{edge}Offsets"
    bound: Bound | None = None
    if offsets is not None:
        word = offsets.strip().lower()
        word = {"first": "earliest", "last": "latest"}.get(word, word)  # the words of consumers and the shell
        names = ", ".join(repr(each.value) for each in allowed)
        if word in [each.value for each in allowed]:
            bound = NamedOffset(word)
        elif word.startswith("{"):
            bound = _given_offsets(option, offsets, namespace, EARLIEST if NamedOffset.EARLIEST in allowed else LATEST)
        else:
            raise ConfigError(
                f"option {option}={safe_repr(offsets)} is not allowed; choose {names} or JSON with offsets"
            )
        if bound is NamedOffset.GROUP and group is None:
            raise ConfigError(f"option {option}='group' needs consumerGroup; give the group to follow")
    option = f"{edge}Timestamp"
    if at is None:
        return bound
    if at.lstrip().startswith("{"):
        return StoredAtByTopic(option, _timestamps_ms(option, at, namespace))
    return StoredAt(_timestamp_ms(option, at))


def _given_offsets(option: str, text: str, namespace: str | None, lowest: int) -> GivenOffsets:
    words = "-1 (latest) and -2 (earliest)" if lowest == EARLIEST else "-1 (latest)"
    allowed = f'give JSON like {{"orders": {{"broker-a": {{"0": 23}}}}}}, where {words} may replace an offset'
    offsets: dict[tuple[str, str | None, int | None], int] = {}

    def add(key: tuple[str, str | None, int | None], offset: object, only_named: bool) -> None:
        if not is_integer(offset) or offset < lowest or (only_named and offset >= 0) or offset > MAX_OFFSET:
            where = "/".join(str(part) for part in key if part is not None)
            raise ConfigError(f"option {option}: {safe_repr(offset)} for {where} is not allowed; {allowed}")
        offsets[key] = offset

    for topic, brokers in json_object(option, text, allowed).items():
        name = wrap(namespace, check_option(check_topic, option, topic))
        if not isinstance(brokers, dict):
            add((name, None, None), brokers, True)
            continue
        for broker, queues in brokers.items():
            if not isinstance(queues, dict):
                add((name, broker, None), queues, True)
                continue
            for queue_id, offset in queues.items():
                if not re.fullmatch("0|[1-9][0-9]{0,9}", queue_id):
                    wrong = safe_repr(queue_id)
                    raise ConfigError(f"option {option}: {wrong} of {topic}/{broker} is not a queue id; {allowed}")
                add((name, broker, int(queue_id)), offset, False)
    return GivenOffsets(option, offsets)


def _timestamps_ms(option: str, text: str, namespace: str | None) -> dict[str, int]:
    allowed = 'give one time, or JSON like {"orders": "2024-05-01T12:00:00+02:00", "payments": 1714557600000}'
    found = {}
    for topic, at in json_object(option, text, allowed).items():
        name = wrap(namespace, check_option(check_topic, option, topic))
        if not isinstance(at, str) and not is_integer(at):
            raise ConfigError(f"option {option}: {safe_repr(at)} for {topic} is not allowed; {allowed}")
        found[name] = _timestamp_ms(option, str(at), f" for {topic}")
    if not found:
        raise ConfigError(f"option {option}={safe_repr(text)} names no topic; {allowed}")
    return found


def _timestamp_ms(option: str, text: str, where: str = "") -> int:
    allowed = "give ISO 8601 with a zone, like 2024-05-01T12:00:00+02:00, or milliseconds since 1970"
    if INTEGER.fullmatch(text):
        at_ms = int(text)
    else:
        try:
            at = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise ConfigError(f"option {option}={safe_repr(text)}{where} is not a time; {allowed}") from error
        if at.tzinfo is None:
            raise ConfigError(f"option {option}={safe_repr(text)}{where} has no time zone; {allowed}")
        # It is rounded up, so that messages before the time are excluded.
        at_ms = -((datetime(1970, 1, 1, tzinfo=UTC) - at) // timedelta(milliseconds=1))
    if not 0 <= at_ms <= MAX_OFFSET:
        raise ConfigError(f"option {option}={safe_repr(text)}{where} is out of range; {allowed}")
    return at_ms


def json_object(option: str, text: str, allowed: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ConfigError(f"option {option} names {[name for name, _ in pairs]}, one of them twice; {allowed}")
        return found

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # a number with thousands of digits is a plain ValueError
        raise ConfigError(f"option {option}={safe_repr(text)} is not JSON: {error}; {allowed}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"option {option}={safe_repr(text)} is not a JSON object; {allowed}")
    return value


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_option(check: Callable[[str], T], option: str, value: str) -> T:
    """Return `check(value)`; its error names the option."""
    try:
        return check(value)
    except ConfigError as error:
        raise ConfigError(
            f"option {option}={safe_repr(value)} is not allowed: {with_option_names(str(error))}"
        ) from error


def with_option_names(text: str) -> str:
    """Return an error's text with the names of options and columns for arguments: `shardingKey` for `sharding_key`."""
    return _ARGUMENT.sub(lambda found: _OPTION_NAMES[found[0]], text)


def join_first(items: Iterable[object], most: int = 5) -> str:
    """Return the first few items as text, and the number of the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return (", ".join(map(str, items[:most])) or "none") + more
