"""The options of the data source, checked when `load()` or `save()` is called.

Executors get them as pickled settings. No repr shows a secret.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from enum import StrEnum
from ssl import SSLContext
from typing import Any, TypeGuard, TypeVar

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
from pyrocket_consumer.spark.planning import TaskSizes
from pyrocket_consumer.text import safe_repr

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

DEFAULT_GROUP = "pyrocket-spark"
"""The group to pull with when the user names none; no offsets are committed for it."""

EARLIEST = -2
LATEST = -1

NAMES = (
    "nameServer",
    "subscribe",
    "topic",
    "subscribePattern",
    "assign",
    "tags",
    "subExpression",
    "sqlFilter",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "consumerGroup",
    "commitOffsets",
    "failOnDataLoss",
    "failOnUnreachable",
    "damagedBodies",
    "maxBodyBytes",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxPartitions",
    "minRecordsPerPartition",
    "maxRecordsPerPartition",
    "pullBatchSize",
    "pullsInFlight",
    "requestTimeoutMs",
    "readTimeoutMs",
    "retries",
    "planningIntervalMs",
    "maxFrameBytes",
    "pushFilters",
    "accessKey",
    "secretKey",
    "securityToken",
    "namespace",
    "tls",
    "tlsCaFile",
    "allowedAddresses",
    "sendTimeoutMs",
    "sendRetries",
    "maxInFlight",
    "maxMessageBytes",
    "acceptDegraded",
    "autoCreateTopic",
    "dedupProperties",
)
"""Every option, as the documentation writes it. Spark passes their names in lower case."""

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


class DamagedBodies(StrEnum):
    """The treatment of a message whose body cannot be decompressed."""

    FAIL = "fail"
    SKIP = "skip"
    RAW = "raw"


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The addresses of the cluster, and the credentials."""

    name_server: str
    namespace: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    security_token: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca_file: str | None = None
    allowed_addresses: tuple[str, ...] | None = None
    request_timeout_s: float = 10.0
    max_frame_bytes: int = 16 << 20
    retries: int | None = None

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
    pull_batch_size: int = 32
    pulls_in_flight: int = 16
    fail_on_data_loss: bool = True
    read_timeout_s: float = 120.0
    damaged_bodies: DamagedBodies = DamagedBodies.FAIL
    max_body_bytes: int = 64 << 20

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
    send_timeout_s: float = 120.0
    send_retries: int = 5
    max_in_flight: int = 256
    max_message_bytes: int = 4 << 20
    accept_degraded: bool = False
    auto_create_topic: bool = False
    dedup_properties: bool = True

    def retry_policy(self, clock: Callable[[], float] = time.monotonic) -> RetryPolicy:
        """Return the policy for errors that may pass and that a send does not retry: no route, or no name server."""
        return RetryPolicy(self.send_timeout_s, self.client.retries, clock)


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
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_s: float = 900.0
    tasks: TaskSizes = field(default_factory=TaskSizes)
    planning_interval_s: float = 0.1
    fail_on_unreachable: bool = True
    push_filters: bool = False

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
    given = _RawOptions(options)
    parsed = _source(given)
    chosen = [name for name in ("subscribe", "topic", "subscribePattern", "assign") if given.text(name) is not None]
    if not chosen:
        raise ConfigError("no topic to read: give one of the options subscribe, subscribePattern and assign")
    for bound in (parsed.start, parsed.end):
        if isinstance(bound, StoredAtByTopic):
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


def _check_times(start: Bound | None, end: Bound) -> None:
    """Raise ConfigError if reading would end, in some topic, at a time before it starts."""
    if not isinstance(start, TIME_BOUNDS) or not isinstance(end, TIME_BOUNDS):
        return
    by_topic = [bound.timestamps_ms for bound in (start, end) if isinstance(bound, StoredAtByTopic)]
    for topic in by_topic[0] if by_topic else ("",):
        from_ms, to_ms = start.of(topic), end.of(topic)
        if from_ms is not None and to_ms is not None and to_ms < from_ms:
            where = f" for {topic}" if topic else ""
            raise ConfigError(f"option endingTimestamp is before startingTimestamp{where}; exchange them")


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    """Return the parsed `options` for writing.

    Raises:
        ConfigError: an option is missing, unknown or wrong; the text has its name, its value, and the allowed values.
    """
    given = _RawOptions(options)
    topic = given.text("topic")
    return SinkOptions(
        client=_client(given),
        topic=None if topic is None else _check_option(check_topic, "topic", topic.strip()),
        send_timeout_s=given.integer("sendTimeoutMs", 120_000, 10, 600_000) / 1000,
        send_retries=given.integer("sendRetries", 5, 1, 99),
        max_in_flight=given.integer("maxInFlight", 256, 1, 1_000_000),
        max_message_bytes=given.integer("maxMessageBytes", 4 << 20, 1, MAX_MESSAGE_BYTES),
        accept_degraded=given.boolean("acceptDegraded", False),
        auto_create_topic=given.boolean("autoCreateTopic", False),
        dedup_properties=given.boolean("dedupProperties", True),
    )


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigError if an option is wrong for reading and for writing."""
    given = _RawOptions(options)
    _source(given)
    parse_sink({name: value for name, value in options.items() if name.lower() != "topic"})


def _source(given: _RawOptions) -> SourceOptions:
    """Return the options for reading. They may be incomplete."""
    client = _client(given)
    topics, pattern, assigned = _selection(given, client.namespace)
    group = given.text("consumerGroup")
    if group is not None:
        group = wrap(client.namespace, _check_option(check_group, "consumerGroup", group))
    commit = given.boolean("commitOffsets", group is not None)
    if commit and group is None:
        raise ConfigError("option commitOffsets=true needs a group to commit for; give consumerGroup")
    low, high = given.optional_integer("minOffsetsPerTrigger"), given.optional_integer("maxOffsetsPerTrigger")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"option minOffsetsPerTrigger={low} is above maxOffsetsPerTrigger={high}; exchange them")
    fewest, most = given.optional_integer("minPartitions", _MAX_INT), given.optional_integer("maxPartitions", _MAX_INT)
    if fewest is not None and most is not None and most < fewest:
        raise ConfigError(f"option maxPartitions={most} is below minPartitions={fewest}; exchange them")
    tasks = TaskSizes(
        min_partitions=fewest,
        max_partitions=most,
        min_records=given.integer("minRecordsPerPartition", 1000, 0, _MAX_OFFSET),
        max_records=given.optional_integer("maxRecordsPerPartition"),
    )
    return SourceOptions(
        read=ReadOptions(
            client=client,
            group=wrap(client.namespace, DEFAULT_GROUP) if group is None else group,
            selector=_selector(given),
            pull_batch_size=given.integer("pullBatchSize", 32, 1, 1024),
            pulls_in_flight=given.integer("pullsInFlight", 16, 1, 1024),
            fail_on_data_loss=given.boolean("failOnDataLoss", True),
            damaged_bodies=given.choice("damagedBodies", DamagedBodies.FAIL),
            max_body_bytes=given.integer("maxBodyBytes", 64 << 20, 1024, 1 << 30),
            read_timeout_s=given.integer("readTimeoutMs", 120_000, 10, 86_400_000) / 1000,
        ),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        start=_bound(
            given, "starting", client.namespace, (NamedOffset.EARLIEST, NamedOffset.LATEST, NamedOffset.GROUP), group
        ),
        end=_bound(given, "ending", client.namespace, (NamedOffset.LATEST,), group) or NamedOffset.LATEST,
        commit_offsets=commit,
        max_offsets=high,
        min_offsets=low,
        max_delay_s=given.duration_s("maxTriggerDelay", 900.0),
        tasks=tasks,
        planning_interval_s=given.integer("planningIntervalMs", 100, 0, 86_400_000) / 1000,
        fail_on_unreachable=given.boolean("failOnUnreachable", True),
        push_filters=given.boolean("pushFilters", False),
    )


def _client(given: _RawOptions) -> ClientOptions:
    name_server = given.text("nameServer")
    if name_server is None:
        raise ConfigError("option nameServer is missing; give host:port, several joined by ';'")
    addresses = _check_option(lambda text: ";".join(parse_name_servers(text)), "nameServer", name_server)
    access_key, secret_key = given.text("accessKey"), given.text("secretKey")
    for name in ("accessKey", "secretKey", "securityToken"):
        if (text := given.text(name)) is not None:
            check_secret(f"option {name}", text)
    if (access_key is None) != (secret_key is None):
        missing = "accessKey" if access_key is None else "secretKey"
        raise ConfigError(f"option {missing} is missing; accessKey and secretKey go together")
    tls, ca_file = given.boolean("tls", False), given.text("tlsCaFile")
    if ca_file is not None and not tls:
        raise ConfigError("option tlsCaFile has no effect without tls=true; give both")
    allowed = given.text("allowedAddresses")
    return ClientOptions(
        name_server=addresses,
        namespace=given.text("namespace"),
        access_key=access_key,
        secret_key=secret_key,
        security_token=given.text("securityToken"),
        tls=tls,
        tls_ca_file=ca_file,
        allowed_addresses=None if allowed is None else _check_option(_allowed_addresses, "allowedAddresses", allowed),
        request_timeout_s=given.integer("requestTimeoutMs", 10_000, 10, 600_000) / 1000,
        max_frame_bytes=given.integer("maxFrameBytes", 16 << 20, 64 << 10, 1 << 30),
        retries=given.optional_integer("retries", 1000),
    )


def _allowed_addresses(text: str) -> tuple[str, ...]:
    return parse_allowed_addresses(text.split(","))


def _selection(
    given: _RawOptions, namespace: str | None
) -> tuple[tuple[str, ...], str | None, tuple[MessageQueue, ...]]:
    """Return the topics, the pattern or the queues to read; at most one of the three is set."""
    names = ("subscribe", "topic", "subscribePattern", "assign")
    chosen = [name for name in names if given.text(name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"options {' and '.join(chosen)} exclude each other; give one of them")
    if not chosen:
        return (), None, ()
    name, text = chosen[0], given.text(chosen[0])
    assert text is not None
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(
                f"option subscribePattern={safe_repr(text)} is not a regular expression: {error}"
            ) from error
        return (), text, ()
    if name == "assign":
        return (), None, _assigned(text, namespace)
    topics = [
        wrap(namespace, _check_option(check_topic, name, part.strip())) for part in text.split(",") if part.strip()
    ]
    if not topics:
        raise ConfigError(f"option {name}={safe_repr(text)} names no topic; give one, or several joined by ','")
    return tuple(dict.fromkeys(topics)), None, ()


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
    if not sql.strip():
        raise ConfigError(f"option sqlFilter={sql!r} is empty; give an SQL92 expression on properties, or remove it")
    _check_option(check_expression, "sqlFilter", sql)
    return Subscription("", sql, frozenset(), SQL92)


def _bound(
    given: _RawOptions, edge: str, namespace: str | None, allowed: tuple[NamedOffset, ...], group: str | None
) -> Bound | None:
    """Return the start or the end of a read; a time takes precedence over offsets."""
    option, offsets = f"{edge}Offsets", given.text(f"{edge}Offsets")
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
    option, at = f"{edge}Timestamp", given.text(f"{edge}Timestamp")
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
    return _ARGUMENT.sub(lambda found: _OPTION_NAMES[found[0]], text)


def join_first(items: Iterable[object], most: int = 5) -> str:
    """Return the first few items as text, and the number of the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return (", ".join(map(str, items[:most])) or "none") + more


class _RawOptions:
    """The options as Spark passes them; names match in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in NAMES}
        for name in sorted(options):
            lower = name.lower()
            if lower not in known and lower not in _SPARK_OPTIONS and not lower.startswith("spark."):
                near = get_close_matches(lower, known, n=1)
                hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(NAMES)}"
                raise ConfigError(f"option {name!r} is unknown; {hint}")

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
