"""The options of the data source, checked when `load()` or `save()` is called.

Executors get them as pickled settings. No repr shows a secret.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from enum import StrEnum
from ssl import SSLContext
from typing import Any, Self, TypeGuard, TypeVar

from pyrocket_consumer.cluster.names import unwrap, wrap
from pyrocket_consumer.config import (
    MAX_MESSAGE_BYTES,
    ClientConfig,
    check_group,
    check_secret,
    check_topic,
    parse_allowed_addresses,
    parse_name_servers,
    trusting,
)
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.subscription import ALL, SQL92, check_expression, parse_subscription
from pyrocket_consumer.spark.failures import RetryPolicy
from pyrocket_consumer.spark.offsets import EARLIEST, LATEST, Bound, GivenOffsets, NamedOffset, StoredAt
from pyrocket_consumer.text import safe_repr

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

DEFAULT_GROUP = "pyrocket-spark"
"""The group to pull with when the user names none; no offsets are committed for it."""

NAMES = (
    *("nameServer", "subscribe", "topic", "subscribePattern", "assign", "tags", "subExpression", "sqlFilter"),
    *("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp", "pushFilters"),
    *("consumerGroup", "commitOffsets", "failOnDataLoss", "failOnUnreachable", "damagedBodies", "maxBodyBytes"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxPartitions"),
    *("minRecordsPerPartition", "maxRecordsPerPartition", "pullBatchSize", "pullsInFlight", "requestTimeoutMs"),
    *("readTimeoutMs", "retries", "planningIntervalMs", "maxFrameBytes", "accessKey", "secretKey", "securityToken"),
    *("allowedAddresses", "namespace", "tls", "tlsCaFile", "sendTimeoutMs", "sendRetries", "maxInFlight"),
    *("maxMessageBytes", "autoCreateTopic", "acceptDegraded", "dedupProperties"),
)
"""Every option, in the order of the documentation, and as it writes them. Spark passes their names in lower case."""

_SPARK_OPTIONS = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode", "numpartitions"})
_MAX_OFFSET = 2**63 - 1
_MAX_INT = 2**31 - 1
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")
_UNITS_S = {
    **dict.fromkeys(("", "ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


_ARGUMENT = re.compile(
    r"(?<![\w'\"])(name_server|allowed_addresses|sharding_key|delay_level|deliver_at|max_message_bytes|auto_create_topic)"
    r"(?![\w'\"])"
)  # a Python argument that is an option or column, too; in quotes it is a value


class _RawOptions:
    """The options as Spark passes them; names match in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._names = sorted(options)
        self._values = {name.lower(): value for name, value in options.items()}

    def check_names(self) -> Self:
        """Raise ConfigError if there is an unknown option."""
        known = {name.lower(): name for name in NAMES}
        for name in self._names:
            lower = name.lower()
            if lower not in known and lower not in _SPARK_OPTIONS and not lower.startswith("spark."):
                near = get_close_matches(lower, known, n=1)
                hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(NAMES)}"
                raise ConfigError(f"option {name!r} is unknown; {hint}")
        return self

    def text(self, name: str) -> str | None:
        """Return the text of an option, None if it is not set.

        Raises:
            ConfigError: it is empty.
        """
        value = self._values.get(name.lower())
        if value is not None and not value.strip():
            raise ConfigError(f"option {name} is empty; give a value, or remove it")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        text = self.text(name)
        if text is None:
            return default
        value = int(text) if _INTEGER.fullmatch(text) else None
        if value is None or not low <= value <= high:
            span = f"of at least {low}" if high >= _MAX_INT else f"from {low} to {high}"
            raise ConfigError(f"option {name}={safe_repr(text)} is not allowed; give a whole number {span}")
        return value

    def milliseconds(self, name: str, default: int, low: int, high: int) -> float:
        return self.integer(name, default, low, high) / 1000

    def optional_integer(self, name: str, high: int = _MAX_OFFSET) -> int | None:
        return None if self.text(name) is None else self.integer(name, 1, 1, high)

    def boolean(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        word = text.strip().lower()
        if word not in ("true", "false"):
            raise ConfigError(f"option {name}={safe_repr(text)} is not allowed; give true or false")
        return word == "true"

    def choice(self, name: str, default: E) -> E:
        text, kind = self.text(name), type(default)
        try:
            return default if text is None else kind(text.strip().lower())
        except ValueError:
            raise ConfigError(f"option {name}={safe_repr(text)} is not allowed; give {', '.join(kind)}") from None

    def duration_s(self, name: str, default: float) -> float:
        text = self.text(name)
        if text is None:
            return default
        found = _DURATION.fullmatch(text.strip().lower())
        if found is None or found[2] not in _UNITS_S or len(found[1]) > 15:
            raise ConfigError(f"option {name}={safe_repr(text)} is not allowed; give a time like 500ms, 30s, 15m or 1h")
        return int(found[1]) * _UNITS_S[found[2]]


def _option(read: Callable[..., Any], name: str, *checks: Any, is_secret: bool = False) -> Any:
    """Return a dataclass field for the option `name`; `read` is a method of `_RawOptions`, called with `checks`."""

    def read_option(given: _RawOptions) -> Any:
        return read(given, name, *checks)

    metadata = {"name": name, "read": read_option}
    return field(default=read_option(_RawOptions({})), repr=not is_secret, metadata=metadata)


def _parsed(kind: type[T], given: _RawOptions, **others: Any) -> T:
    """Return `kind` with the value of each field that is an option, and `others`."""
    read = {each.name: each.metadata["read"](given) for each in fields(kind) if each.metadata}  # type: ignore[arg-type]
    return kind(**read, **others)


class DamagedBodies(StrEnum):
    """The treatment of a message whose body cannot be decompressed."""

    FAIL = "fail"
    SKIP = "skip"
    RAW = "raw"


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The addresses of the cluster, and the credentials."""

    name_server: str
    namespace: str | None = _option(_RawOptions.text, "namespace")
    access_key: str | None = _option(_RawOptions.text, "accessKey", is_secret=True)
    secret_key: str | None = _option(_RawOptions.text, "secretKey", is_secret=True)
    security_token: str | None = _option(_RawOptions.text, "securityToken", is_secret=True)
    tls: bool = _option(_RawOptions.boolean, "tls", False)
    tls_ca_file: str | None = _option(_RawOptions.text, "tlsCaFile")
    allowed_addresses: tuple[str, ...] | None = None
    request_timeout_s: float = _option(_RawOptions.milliseconds, "requestTimeoutMs", 10_000, 10, 600_000)
    max_frame_bytes: int = _option(_RawOptions.integer, "maxFrameBytes", 16 << 20, 64 << 10, 1 << 30)
    retries: int | None = _option(_RawOptions.optional_integer, "retries", 1000)

    def config(self) -> ClientConfig:
        """Return the settings of a client. Call this in the process that uses them: a TLS context cannot be pickled.

        Raises:
            ConfigError: the file of authorities is missing or cannot be read.
        """
        tls: bool | SSLContext = self.tls
        if self.tls and self.tls_ca_file is not None:
            tls = trusting(self.tls_ca_file, "option tlsCaFile=", ", here and on every executor")
        return ClientConfig(
            name_server=self.name_server,
            namespace=self.namespace,
            access_key=self.access_key,
            secret_key=self.secret_key,
            security_token=self.security_token,
            tls=tls,
            allowed_addresses=self.allowed_addresses,
            call_timeout_s=self.request_timeout_s,
            max_frame_bytes=self.max_frame_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The settings of a task that reads ranges."""

    client: ClientOptions
    group: str = DEFAULT_GROUP
    """The group to pull with, as brokers name it: within the namespace, if there is one."""
    selector: Subscription = field(default_factory=lambda: Subscription(""))
    """The filter for messages of any topic; the topic in it is empty."""
    pull_batch_size: int = _option(_RawOptions.integer, "pullBatchSize", 32, 1, 1024)
    pulls_in_flight: int = _option(_RawOptions.integer, "pullsInFlight", 16, 1, 1024)
    fail_on_data_loss: bool = _option(_RawOptions.boolean, "failOnDataLoss", True)
    read_timeout_s: float = _option(_RawOptions.milliseconds, "readTimeoutMs", 120_000, 10, 86_400_000)
    damaged_bodies: DamagedBodies = _option(_RawOptions.choice, "damagedBodies", DamagedBodies.FAIL)
    max_body_bytes: int = _option(_RawOptions.integer, "maxBodyBytes", 64 << 20, 1024, 1 << 30)

    def retry_policy(self, clock: Callable[[], float] = time.monotonic) -> RetryPolicy:
        """Return the policy for errors that may pass: no response, or a busy broker."""
        return RetryPolicy(self.read_timeout_s, self.client.retries, clock)

    def startup_grace(self, clock: Callable[[], float] = time.monotonic) -> RetryPolicy:
        """Return the policy for a broker that lacks expected data, as a broker that starts does for a while."""
        return RetryPolicy(min(self.client.request_timeout_s, self.read_timeout_s), None, clock)


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """The settings of a task that sends rows."""

    client: ClientOptions
    topic: str | None = None
    send_timeout_s: float = _option(_RawOptions.milliseconds, "sendTimeoutMs", 120_000, 10, 600_000)
    send_retries: int = _option(_RawOptions.integer, "sendRetries", 5, 1, 99)
    max_in_flight: int = _option(_RawOptions.integer, "maxInFlight", 256, 1, 1_000_000)
    max_message_bytes: int = _option(_RawOptions.integer, "maxMessageBytes", 4 << 20, 1, MAX_MESSAGE_BYTES)
    accept_degraded: bool = _option(_RawOptions.boolean, "acceptDegraded", False)
    auto_create_topic: bool = _option(_RawOptions.boolean, "autoCreateTopic", False)
    dedup_properties: bool = _option(_RawOptions.boolean, "dedupProperties", True)

    def retry_policy(self) -> RetryPolicy:
        """Return the policy for errors that may pass and that a send does not retry: no route, or no name server."""
        return RetryPolicy(self.send_timeout_s, self.client.retries)


@dataclass(frozen=True, kw_only=True)
class TaskSizes:
    """The number of tasks and the size of each. Sizes are numbers of offsets."""

    min_partitions: int | None = _option(_RawOptions.optional_integer, "minPartitions", _MAX_INT)
    max_partitions: int | None = _option(_RawOptions.optional_integer, "maxPartitions", _MAX_INT)
    min_records: int = _option(_RawOptions.integer, "minRecordsPerPartition", 1000, 0, _MAX_OFFSET)
    max_records: int | None = _option(_RawOptions.optional_integer, "maxRecordsPerPartition")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The settings of the driver, which finds queues and plans batches. Names are those that brokers use.

    One of `topics`, `pattern` and `assigned` is set.
    """

    read: ReadOptions
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[MessageQueue, ...] = ()
    start: Bound | None = None
    end: Bound = NamedOffset.LATEST
    commit_offsets: bool = False
    max_offsets: int | None = _option(_RawOptions.optional_integer, "maxOffsetsPerTrigger")
    min_offsets: int | None = _option(_RawOptions.optional_integer, "minOffsetsPerTrigger")
    max_delay_s: float = _option(_RawOptions.duration_s, "maxTriggerDelay", 900.0)
    tasks: TaskSizes = field(default_factory=TaskSizes)
    planning_interval_s: float = _option(_RawOptions.milliseconds, "planningIntervalMs", 100, 0, 86_400_000)
    fail_on_unreachable: bool = _option(_RawOptions.boolean, "failOnUnreachable", True)
    push_filters: bool = _option(_RawOptions.boolean, "pushFilters", False)

    @property
    def client(self) -> ClientOptions:
        return self.read.client

    def chooses(self, topic: str) -> bool:
        """Return whether the options choose at least one queue of `topic`."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, unwrap(self.client.namespace, topic)) is not None
        return topic in self.topics or any(queue.topic == topic for queue in self.assigned)


def parse_source(options: Mapping[str, str], streaming: bool | None) -> SourceOptions:
    """Return the parsed `options` for reading; None for `streaming` means not known yet.

    Raises:
        ConfigError: an option is missing, unknown or wrong; the text has its name, its value, and the allowed values.
    """
    given = _RawOptions(options).check_names()
    parsed = _source(given)
    if not (parsed.topics or parsed.assigned) and parsed.pattern is None:
        raise ConfigError("no topic to read: give one of the options subscribe, subscribePattern and assign")
    for bound in (parsed.start, parsed.end):
        if isinstance(bound, StoredAt):
            bound.check_chosen(parsed.chooses)
            bound.check([*parsed.topics, *(queue.topic for queue in parsed.assigned)])
    if streaming is True:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.text(name) is not None:
                raise ConfigError(f"option {name} is for batch reads; a stream has no end, so remove it")
        if parsed.push_filters:
            raise ConfigError("option pushFilters=true is for batch reads; streams get no filters, so remove it")
    if streaming is False:
        if parsed.start is NamedOffset.LATEST:
            raise ConfigError("option startingOffsets='latest' is for streams; a batch read would be empty")
        if isinstance(parsed.start, GivenOffsets) and LATEST in parsed.start.offsets.values():
            raise ConfigError("option startingOffsets has -1 (latest), which is for streams; give -2 (earliest)")
        _check_times(parsed.start, parsed.end)
    return parsed


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    """Return the parsed `options` for writing.

    Raises:
        ConfigError: an option is missing, unknown or wrong; the text has its name, its value, and the allowed values.
    """
    given = _RawOptions(options).check_names()
    topic = given.text("topic")
    return _parsed(
        SinkOptions,
        given,
        client=_client(given),
        topic=None if topic is None else _check_option(check_topic, "topic", topic.strip()),
    )


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigError if an option is wrong for reading and for writing."""
    given = _RawOptions(options).check_names()
    _source(given)
    parse_sink({name: value for name, value in options.items() if name.lower() != "topic"})


def _source(given: _RawOptions) -> SourceOptions:
    """Return the options for reading. They may be incomplete."""
    client = _client(given)
    group = given.text("consumerGroup")
    if group is not None:
        group = wrap(client.namespace, _check_option(check_group, "consumerGroup", group))
    commit = given.boolean("commitOffsets", group is not None)
    if commit and group is None:
        raise ConfigError("option commitOffsets=true needs a group to commit for; give consumerGroup")
    starts = NamedOffset.EARLIEST, NamedOffset.LATEST, NamedOffset.GROUP
    found = _parsed(
        SourceOptions,
        given,
        read=_parsed(
            ReadOptions,
            given,
            client=client,
            group=wrap(client.namespace, DEFAULT_GROUP) if group is None else group,
            selector=_selector(given),
        ),
        **_selection(given, client.namespace),
        start=_bound(given, "starting", client.namespace, starts, group),
        end=_bound(given, "ending", client.namespace, (NamedOffset.LATEST,), group) or NamedOffset.LATEST,
        commit_offsets=commit,
        tasks=_parsed(TaskSizes, given),
    )
    fewest, most = found.tasks.min_partitions, found.tasks.max_partitions
    if fewest is not None and most is not None and most < fewest:
        raise ConfigError(f"option maxPartitions={most} is below minPartitions={fewest}; exchange them")
    low, high = found.min_offsets, found.max_offsets
    if low is not None and high is not None and low > high:
        raise ConfigError(f"option minOffsetsPerTrigger={low} is above maxOffsetsPerTrigger={high}; exchange them")
    return found


def _check_times(start: Bound | None, end: Bound) -> None:
    """Raise ConfigError if reading would end, in some topic, at a time before it starts."""
    if not isinstance(start, StoredAt) or not isinstance(end, StoredAt):
        return
    for topic in start.topics or end.topics or ("",):
        from_ms, to_ms = start.of(topic), end.of(topic)
        if from_ms is not None and to_ms is not None and to_ms < from_ms:
            where = f" for {topic}" if topic else ""
            raise ConfigError(f"option endingTimestamp is before startingTimestamp{where}; exchange them")


def _bound(
    given: _RawOptions, edge: str, namespace: str | None, allowed: tuple[NamedOffset, ...], group: str | None
) -> Bound | None:
    """Return the "starting" or "ending" edge of a read. A time takes precedence."""
    option = f"{edge}Offsets"
    bound: Bound | None = None
    if (offsets := given.text(option)) is not None:
        word = offsets.strip().lower()
        word = {"first": "earliest", "last": "latest"}.get(word, word)  # the words of consumers and the shell
        if word in allowed:
            bound = NamedOffset(word)
        elif word.startswith("{"):
            bound = _given_offsets(option, offsets, namespace, EARLIEST if NamedOffset.EARLIEST in allowed else LATEST)
        else:
            names = ", ".join(repr(each.value) for each in allowed)
            raise ConfigError(
                f"option {option}={safe_repr(offsets)} is not allowed; choose {names} or JSON with offsets"
            )
        if bound is NamedOffset.GROUP and group is None:
            raise ConfigError(f"option {option}='group' needs consumerGroup; give the group to follow")
    option = f"{edge}Timestamp"
    if (at := given.text(option)) is None:
        return bound
    is_by_topic = at.lstrip().startswith("{")
    return StoredAt(option, _timestamps_ms(option, at, namespace) if is_by_topic else _timestamp_ms(option, at))


def _given_offsets(option: str, text: str, namespace: str | None, lowest: int) -> GivenOffsets:
    words = "-1 (latest) and -2 (earliest)" if lowest == EARLIEST else "-1 (latest)"
    allowed = f'give JSON like {{"orders": {{"broker-a": {{"0": 23}}}}}}, where {words} may replace an offset'
    offsets: dict[tuple[str, str | None, int | None], int] = {}

    def add(key: tuple[str, str | None, int | None], offset: object, only_named: bool) -> None:
        if not _is_integer(offset) or offset < lowest or (only_named and offset >= 0) or offset > _MAX_OFFSET:
            where = "/".join(str(part) for part in key if part is not None)
            raise ConfigError(f"option {option}: {safe_repr(offset)} for {where} is not allowed; {allowed}")
        offsets[key] = offset

    for topic, brokers in _json_object(option, text, allowed).items():
        name = wrap(namespace, _check_option(check_topic, option, topic))
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
    for topic, at in _json_object(option, text, allowed).items():
        name = wrap(namespace, _check_option(check_topic, option, topic))
        if not isinstance(at, str) and not _is_integer(at):
            raise ConfigError(f"option {option}: {safe_repr(at)} for {topic} is not allowed; {allowed}")
        found[name] = _timestamp_ms(option, str(at), f" for {topic}")
    if not found:
        raise ConfigError(f"option {option}={safe_repr(text)} names no topic; {allowed}")
    return found


def _timestamp_ms(option: str, text: str, where: str = "") -> int:
    allowed = "give ISO 8601 with a zone, like 2024-05-01T12:00:00+02:00, or milliseconds since 1970"
    if _INTEGER.fullmatch(text):
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
    if not 0 <= at_ms <= _MAX_OFFSET:
        raise ConfigError(f"option {option}={safe_repr(text)}{where} is out of range; {allowed}")
    return at_ms


def _client(given: _RawOptions) -> ClientOptions:
    name_server = given.text("nameServer")
    if name_server is None:
        raise ConfigError("option nameServer is missing; give host:port, several joined by ';'")
    addresses = _check_option(lambda text: ";".join(parse_name_servers(text)), "nameServer", name_server)
    allowed = given.text("allowedAddresses")
    for name in ("accessKey", "secretKey", "securityToken"):
        if (text := given.text(name)) is not None:
            check_secret(f"option {name}", text)
    found = _parsed(
        ClientOptions,
        given,
        name_server=addresses,
        allowed_addresses=None
        if allowed is None
        else _check_option(lambda text: parse_allowed_addresses(text.split(",")), "allowedAddresses", allowed),
    )
    if (found.access_key is None) != (found.secret_key is None):
        missing = "accessKey" if found.access_key is None else "secretKey"
        raise ConfigError(f"option {missing} is missing; accessKey and secretKey go together")
    if found.tls_ca_file is not None and not found.tls:
        raise ConfigError("option tlsCaFile has no effect without tls=true; give both")
    return found


def _selection(given: _RawOptions, namespace: str | None) -> dict[str, Any]:
    """Return the topics, the pattern or the queues to read, or none of them, as a field of SourceOptions."""
    names = ("subscribe", "topic", "subscribePattern", "assign")
    chosen = [name for name in names if given.text(name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"options {' and '.join(chosen)} exclude each other; give one of them")
    if not chosen:
        return {}
    name, text = chosen[0], given.text(chosen[0])
    assert text is not None
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(
                f"option subscribePattern={safe_repr(text)} is not a regular expression: {error}"
            ) from error
        return {"pattern": text}
    if name == "assign":
        return {"assigned": _assigned(text, namespace)}
    topics = [
        wrap(namespace, _check_option(check_topic, name, part.strip())) for part in text.split(",") if part.strip()
    ]
    if not topics:
        raise ConfigError(f"option {name}={safe_repr(text)} names no topic; give one, or several joined by ','")
    return {"topics": tuple(dict.fromkeys(topics))}


def _assigned(text: str, namespace: str | None) -> tuple[MessageQueue, ...]:
    allowed = 'give JSON like {"orders": {"broker-a": [0, 1]}}'
    queues = []
    for topic, brokers in _json_object("assign", text, allowed).items():
        name = wrap(namespace, _check_option(check_topic, "assign", topic))
        if not isinstance(brokers, dict):
            raise ConfigError(f"option assign: {safe_repr(brokers)} of topic {topic!r} is not allowed; {allowed}")
        for broker, ids in brokers.items():
            if not isinstance(ids, list) or not ids or not all(_is_integer(each) and each >= 0 for each in ids):
                raise ConfigError(f"option assign: {safe_repr(ids)} of broker {broker!r} is not allowed; {allowed}")
            queues += [MessageQueue(name, broker, each) for each in ids]
    if not queues:
        raise ConfigError(f"option assign={safe_repr(text)} names no queue; {allowed}")
    return tuple(sorted(set(queues)))


def _selector(given: _RawOptions) -> Subscription:
    if given.text("tags") is not None and given.text("subExpression") is not None:
        raise ConfigError("options tags and subExpression are the same; give one of them")
    name = "tags" if given.text("subExpression") is None else "subExpression"
    tags, sql = given.text(name), given.text("sqlFilter")
    if sql is None:
        return _check_option(lambda text: parse_subscription("", text), name, ALL if tags is None else tags)
    if tags is not None:
        raise ConfigError(f"options {name} and sqlFilter exclude each other; give one of them")
    _check_option(check_expression, "sqlFilter", sql)
    return Subscription("", sql, frozenset(), SQL92)


def _json_object(option: str, text: str, allowed: str) -> dict[str, Any]:
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


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_option(check: Callable[[str], T], option: str, value: str) -> T:
    """Return `check(value)`; its error names the option."""
    try:
        return check(value)
    except ConfigError as error:
        raise ConfigError(
            f"option {option}={safe_repr(value)} is not allowed: {with_option_names(str(error))}"
        ) from error


def with_option_names(text: str) -> str:
    """Return an error's text with the names of options and columns for arguments: `shardingKey` for `sharding_key`."""
    return _ARGUMENT.sub(lambda found: re.sub("_(.)", lambda after: after[1].upper(), found[0]), text)
