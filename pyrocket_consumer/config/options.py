"""The options of all clients, each written once: its default, the check of its value, and its documentation.

`python -m tests.options --write` makes the `TypedDict`s, docstrings and the tables of docs/reference.md from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from ssl import SSLContext
from typing import Any, Literal, NamedTuple, Self, TypedDict, TypeVar

from pyrocket_consumer.config.checks import (
    MAX_TOPIC_CHARACTERS,
    Check,
    NameServers,
    check_choice,
    check_function,
    check_group,
    check_name,
    check_offset_spec,
    check_secret,
    flag,
    one_of,
    parse_allowed_addresses,
    parse_name_servers,
    per_topic,
    seconds,
    show_number,
    whole,
)
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import ClaimedOffsets, ConsumerEvent, MessageModel, MessageQueue, OffsetStore
from pyrocket_consumer.text import safe_repr, safe_repr_unless_secret

MIB = 1024 * 1024
DEFAULT_MAX_RECONSUME_TIMES = 16
MAX_MESSAGE_BYTES = 16 * MIB - 128 * 1024  # a frame has 16 MiB
MAX_PART_CHARACTERS = 255
_OPTION = "option"


class Option(NamedTuple):
    """The documentation of an option, in Markdown, and the check of its value."""

    purpose: str
    default: str
    allowed: str
    check: Check | None


def option(
    default: Any, purpose: str, check: Check | None = None, *, shown: str = "", allowed: str = "", secret: bool = False
) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: the value of an omitted option
        purpose: one or two plain sentences for the documentation, without a full stop at the end
        check: the allowed values; None if `__post_init__` checks them
        shown: the default as the documentation shows it, if it is not the value itself
        allowed: the allowed values as the documentation shows them, if `check` does not describe them
        secret: leave the value out of the config's repr
    """
    metadata = {
        _OPTION: Option(purpose, shown or _as_text(default), allowed or (check.allowed if check else ""), check)
    }
    return field(default=default, repr=not secret, metadata=metadata)


def option_of(of: Field[Any]) -> Option:
    """Return the option that a field was made for."""
    found = of.metadata[_OPTION]
    assert isinstance(found, Option)
    return found


def _as_text(default: object) -> str:
    if default is None:
        return "–"
    if isinstance(default, bool) or not isinstance(default, int | float):
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        return f"`{text}`"
    if default >= MIB and default % MIB == 0:
        return f"{default // MIB:g} MiB"
    return show_number(default)


def _check_part_of_client_id(name: str, value: object) -> None:
    if value is None and name != "instance_name":
        return
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PART_CHARACTERS or not value.isprintable():
        raise ConfigError(
            f"{name}={safe_repr(value)} is not allowed; it must be a text of 1 to {MAX_PART_CHARACTERS} printable "
            "characters, or omitted. It is part of the client id, which brokers and tools show"
        )


_PRINTABLE = Check("printable text", _check_part_of_client_id)


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """The options of every client: name servers, client id, account, TLS, deadlines; see `Admin`."""

    name_server: NameServers | None = option(
        None,
        "the name servers to ask for routes; one that responds is enough",
        shown="`NAMESRV_ADDR`",
        allowed="`host:port`, several joined by `;`, or a list",
    )
    client_ip: str | None = option(None, "the first part of the client id", _PRINTABLE, shown="detected")
    instance_name: str = option(
        "DEFAULT", "the second part of the client id; if you set it, give each process its own", _PRINTABLE
    )
    unit_name: str | None = option(None, "the unit name, as in the Java client", _PRINTABLE)
    namespace: str | None = option(
        None, "the prefix of all topics and groups, as in the Java client", allowed="1–127 of `a-zA-Z0-9_-%|`"
    )
    access_key: str | None = option(None, "the account that signs every request", allowed="text", secret=True)
    secret_key: str | None = option(
        None, "the secret of the account; never shown, and not pickled", allowed="text", secret=True
    )
    security_token: str | None = option(None, "the token of a temporary account", allowed="text", secret=True)
    tls: bool | SSLContext = option(
        False,
        "encrypt connections; `True` verifies certificates with the authorities of the system",
        allowed="`True`, an `ssl.SSLContext`",
    )
    allowed_addresses: str | Iterable[str] | None = option(
        None,
        "the only brokers that the client connects to, and sends signed requests to; the default allows all",
        allowed="host, `host:port`, network, or a list",
    )
    call_timeout_s: float = option(3.0, "the deadline of a request", seconds(0.01, 600))
    connect_timeout_s: float = option(3.0, "the deadline of a connection attempt", seconds(0.01, 600))
    heartbeat_interval_s: float = option(30.0, "the time between two heartbeats to a broker", seconds(0.05, 3600))
    route_refresh_interval_s: float = option(
        30.0, "the time between two requests for the routes of topics", seconds(0.05, 3600)
    )
    max_frame_bytes: int = option(
        16 * MIB,
        "the largest frame to send or receive. A server that sends a larger one loses its connection. Servers accept "
        "16 MiB by default",
        whole(64 * 1024, 1024 * MIB, ", bytes"),
    )

    def __post_init__(self) -> None:
        self._replace(name_server=parse_name_servers(self.name_server))
        for each in fields(self):
            if check := option_of(each).check:
                check.apply(each.name, getattr(self, each.name))
        if self.namespace is not None:
            check_name(self.namespace, "namespace", MAX_TOPIC_CHARACTERS)
        for name in ("access_key", "secret_key", "security_token"):
            if (value := getattr(self, name)) is not None:
                self._replace(**{name: check_secret(name, value)})
        if not isinstance(self.tls, bool | SSLContext):
            raise ConfigError(f"tls={safe_repr(self.tls)} is not allowed; it must be True, False or an ssl.SSLContext")
        if self.allowed_addresses is not None:
            self._replace(allowed_addresses=parse_allowed_addresses(self.allowed_addresses))
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("access_key and secret_key go together; one of them is missing")
        if self.security_token is not None and self.access_key is None:
            raise ConfigError("security_token goes with access_key and secret_key, which are missing")

    def _replace(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __copy__(self) -> Self:
        return self  # a config never changes

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The addresses of the name servers, checked."""
        assert isinstance(self.name_server, tuple)
        return self.name_server

    @property
    def brokers_allowed(self) -> tuple[str, ...] | None:
        """The addresses that brokers may have, checked; None allows all."""
        assert isinstance(self.allowed_addresses, tuple | None)
        return self.allowed_addresses

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make a config from keyword options.

        Raises:
            ConfigError: an option is unknown (the error names the nearest one), or its value is not allowed.
        """
        known = {each.name for each in fields(cls) if each.init}
        unknown = sorted(set(options) - known)
        if unknown:
            import difflib

            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {unknown[0]!r}{hint}")
        return cls(**options)


class ClientOptions(TypedDict, total=False):
    """The fields of `ClientConfig` as keyword arguments."""

    client_ip: str | None
    instance_name: str
    unit_name: str | None
    namespace: str | None
    access_key: str | None
    secret_key: str | None
    security_token: str | None
    tls: bool | SSLContext
    allowed_addresses: str | Iterable[str] | None
    call_timeout_s: float
    connect_timeout_s: float
    heartbeat_interval_s: float
    route_refresh_interval_s: float
    max_frame_bytes: int


C = TypeVar("C", bound=ClientConfig)


def check_config(
    kind: type[C], config: object, name_server: object, options: Mapping[str, Any], group: object = None
) -> C:
    """Return `config`, which replaces single options. `group` is None if the caller omitted it, or has none.

    Raises:
        ConfigError: it is of another kind, or a single option is given, too.
    """
    if not isinstance(config, kind):
        raise ConfigError(
            f"config={safe_repr_unless_secret(config)} is not allowed; it must be a {kind.__name__}, or None"
        )
    given = sorted(options) or ([] if name_server is None else ["name_server"])
    if given:
        raise ConfigError(f"config= is the whole configuration; put {given[0]!r} into it, or pass options only")
    own = getattr(config, "group", None)
    if group is not None and group != own:
        raise ConfigError(
            f"group={safe_repr(group)} is not allowed with config=, whose group is {own!r}; put it into the config, or "
            "leave it out"
        )
    return config


Allocation = (
    Literal["average", "circle", "hash"]
    | Callable[[str, str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
)
"""A strategy's name, or a callable (group, own client id, all queues, all client ids) -> own queues."""

OrderBy = Literal["sharding_key"] | Callable[[Any], Hashable]
"""The source of a message's key: its sharding key, or a function (message) -> key."""

PerTopic = int | Mapping[str, int]
"""One number for every topic, or a mapping topic -> number (others take the default)."""

_STORE_METHODS = [name for name in vars(OffsetStore) if inspect.isfunction(vars(OffsetStore)[name]) and name[0] != "_"]


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(ClientConfig):
    """The options of a push consumer; see `PushConsumer`."""

    group: str = option("", "the consumer group", shown="–", allowed="1–120 of `a-zA-Z0-9_-%|`")
    message_model: MessageModel | Literal["clustering", "broadcasting"] = option(
        MessageModel.CLUSTERING,
        "give each message to one member, or to every member",
        shown='`"clustering"`',
        allowed='`"broadcasting"`',
    )
    orderly: bool = option(False, "run one listener call of a queue at a time, in the order of offsets", flag())
    order_by: OrderBy | None = option(
        None,
        "order by key instead. Messages of one key run one at a time, in the order of offsets, and other keys run at "
        "the same time. A callable takes a message and returns a hashable key; see [order](order.md)",
        allowed='`"sharding_key"`, a callable; orderly only',
    )
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime = option(
        "last",
        "where a group begins that has no offset for a queue",
        allowed='`"first"`, an aware `datetime` or its text',
    )
    consume_threads: int = option(
        20, "the number of workers for plain listeners, and of concurrent calls for `async def` ones", whole(1, 1000)
    )
    listener_batch_size: int = option(
        1,
        "above 1 the listener takes a list of at most that many messages of one pull. An orderly queue fills the list "
        "from all its waiting messages",
        whole(1, 1024),
    )
    pull_batch_size: PerTopic = option(
        32, "the most messages of one pull. Brokers return at most 32, and 256 KiB, by default", per_topic(1, 1024)
    )
    max_cached_messages: PerTopic = option(
        1000, "the number of unfinished messages of a queue at which pulling pauses", per_topic(1, 1_000_000)
    )
    max_cached_bytes: PerTopic = option(
        100 * MIB,
        "the memory for unfinished messages of the whole consumer, or of a topic. A queue is pulled while it "
        "has fewer unfinished bytes than are free, or while it has none and its turn is next. Running listener calls "
        "decompress at most as many bytes again, or one body",
        per_topic(1, 1 << 40),
        allowed="bytes, or `{topic: n}`",
    )
    max_body_bytes: int = option(
        64 * MIB,
        "the largest body after decompression. A message with a larger one moves to `%DLQ%` at once",
        whole(1024, 1 << 30, ", bytes"),
    )
    max_span: int = option(
        2000,
        "the largest distance between the oldest unfinished offset and the newest pulled one. It does not apply to "
        "orderly consumption, except with `order_by`",
        whole(1, 65535),
    )
    commit_interval_s: float = option(5.0, "the time between two commits of offsets", seconds(0.01, 3600))
    rebalance_interval_s: float = option(
        20.0, "the time between two checks of the assignment, if no member comes or goes", seconds(0.05, 3600)
    )
    max_reconsume_times: int | None = option(
        None,
        "the number of failed retries after which a message moves to `%DLQ%`",
        shown="16; orderly: no limit",
        allowed="0–2³¹−1",
    )
    auto_commit: bool = option(
        True,
        "with `False` only `ConsumeResult.COMMIT` commits, and `ROLLBACK` redelivers the messages since then. Commit "
        "well before `max_cached_messages` wait for it",
        flag("orderly only"),
    )
    consume_timeout_s: float = option(
        900.0,
        "the time after which a running listener call is reported as stuck. Its message is sent back, unless the "
        "consumer is orderly or broadcasting",
        seconds(0.05, 7 * 86400),
    )
    start_wait_s: float = option(
        5.0, "how long `start()` waits for queues with slow brokers. Such queues begin later", seconds(0, 600)
    )
    shutdown_timeout_s: float = option(20.0, "how long `close()` waits for listener calls", seconds(0, 86400))
    pull_hold_s: float = option(15.0, "how long a broker may hold a pull that finds no message", seconds(0.05, 300))
    pull_retry_delay_s: float = option(1.0, "the pause after a failed pull", seconds(0.001, 300))
    allocation: Allocation = option(
        "average",
        "the strategy that divides the queues. All members of a group must use the same one",
        allowed='`"circle"`, `"hash"`, `in_machine_rooms(…)`, a callable',
    )
    offset_store: OffsetStore | ClaimedOffsets | None = option(
        None,
        "where offsets are kept. The default is brokers for clustering, and the local file for broadcasting",
        shown="by model",
        allowed="an `OffsetStore`, a `DatabaseOffsets`",
    )
    offset_store_dir: str | Path | None = option(
        None,
        "the parent directory of the local file, which is `<dir>/<client id>/<group>/offsets.json`",
        shown="`ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR`, `~/.rocketmq_offsets`",
        allowed="a directory",
    )
    durability: Literal["fsync", "process", "checkpoint"] = option(
        "fsync",
        'the events that a stored offset of the local file survives. With `"fsync"` and `"checkpoint"` it survives a '
        'power failure, and with `"process"` the end of the process. Java clients can read each offset of '
        '`"checkpoint"`',
        one_of("fsync", "process", "checkpoint"),
    )
    on_unreadable_store: Literal["raise", "backup", "start_over"] = option(
        "backup",
        'the reaction to a damaged local file. With `"backup"` the store reads `offsets.json.bak`, and raises if that '
        'is damaged, too. With `"start_over"` it then begins with the journal only. With `"raise"` it raises at once',
        one_of("raise", "backup", "start_over"),
    )
    remote_reset: Literal["accept", "refuse"] = option(
        "accept",
        "whether brokers, admins and other members may move the offsets of this member; see [resets](resets.md)",
        one_of("accept", "refuse"),
    )
    reset_record_interval_s: float = option(
        60.0,
        "broadcasting: the time between two checks for a recorded reset that did not reach this member",
        seconds(0.05, 86400),
    )
    server_messages: bool = option(
        True,
        "whether an admin may have a message consumed by a listener of this member, through a broker",
        flag(),
    )
    on_event: Callable[[ConsumerEvent], None] | None = option(
        None, "receives every `ConsumerEvent`, on a thread of its own; see [events](events.md)", allowed="a callable"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        try:
            self._replace(message_model=MessageModel(self.message_model))
        except ValueError:
            check_choice("message_model", self.message_model, [model.value for model in MessageModel])
        self._replace(consume_from=check_offset_spec("consume_from", self.consume_from))
        if self.max_reconsume_times is not None:
            whole(0, 2**31 - 1).apply("max_reconsume_times", self.max_reconsume_times)
        if not self.auto_commit and not self.orderly:
            raise ConfigError("auto_commit=False works with orderly=True only; leave it out, or consume orderly")
        self._check_order_by()
        if not callable(self.allocation) and self.allocation not in ("average", "circle", "hash"):
            raise ConfigError(
                f"allocation={safe_repr(self.allocation)} is not allowed; use 'average', 'circle', 'hash', a function, "
                "or pyrocket_consumer.in_machine_rooms('room1', 'room2') with the names of your rooms"
            )
        if callable(self.allocation):
            names = ("group", "client_id", "queues", "client_ids")
            check_function("allocation", self.allocation, *names, may_yield=True)
        self._check_offset_store()
        if self.on_event is not None:
            if not callable(self.on_event):
                raise ConfigError(
                    f"on_event={safe_repr(self.on_event)} is not callable; pass a function of one ConsumerEvent"
                )
            check_function("on_event", self.on_event, "event")

    def _check_order_by(self) -> None:
        key_of = self.order_by
        if key_of is None:
            return
        shown_by = f"order_by={safe_repr(key_of)}"
        if not callable(key_of) and not (isinstance(key_of, str) and key_of == "sharding_key"):
            raise ConfigError(
                f"{shown_by} is not allowed; use 'sharding_key', or a function that returns the key of a message"
            )
        if isinstance(key_of, type):
            raise ConfigError(
                f"{shown_by} is a class, whose objects are mostly all different keys; pass a function that returns the "
                "key of a message"
            )
        if callable(key_of):
            check_function("order_by", key_of, "message")
        if not self.orderly:
            raise ConfigError(f"{shown_by} works with orderly=True only; leave it out, or consume orderly")
        if not self.auto_commit:
            raise ConfigError(
                f"{shown_by} does not work with auto_commit=False, which commits what is consumed of a whole queue; "
                "leave one of them out"
            )

    def _check_claimed_offsets(self) -> None:
        store = safe_repr(self.offset_store)
        if self.order_by is not None:
            raise ConfigError(
                f"order_by={safe_repr(self.order_by)} does not work with offset_store={store}: its order is the "
                "queue's; leave order_by out, or keep offsets at the broker"
            )
        if self.broadcasting:
            raise ConfigError(
                f"offset_store={store} works in a clustering group only, where each queue has one owner; leave "
                "message_model out"
            )
        if not self.orderly or not self.auto_commit:
            raise ConfigError(
                f"offset_store={store} needs orderly=True, with auto_commit: one listener call of a queue at a time, "
                "whose transaction moves the offset"
            )

    def _check_offset_store(self) -> None:
        lacking = [name for name in _STORE_METHODS if not callable(getattr(self.offset_store, name, None))]
        if isinstance(self.offset_store, ClaimedOffsets):
            self._check_claimed_offsets()
        elif self.offset_store is not None and lacking:
            raise ConfigError(
                f"offset_store={safe_repr_unless_secret(self.offset_store)} is not allowed: it has no "
                f"{', '.join(lacking)}; see OffsetStore"
            )
        where = self.offset_store_dir
        if not isinstance(where, str | Path | None) or where == "" or "\0" in str(where):
            raise ConfigError(
                f"offset_store_dir={safe_repr(where, 200)} is not allowed; it must be the path of a directory"
            )

    def for_topic(self, name: str, topic: str) -> int:
        """Return option `name` (one of the per-topic ones) as it holds for `topic`."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            default = next(each.default for each in fields(self) if each.name == name)
            return int(value.get(topic, default))
        return int(value)

    @property
    def most_attempts(self) -> int | None:
        """How often a message may fail before it is given up: 16, or without limit when orderly, unless set."""
        if self.max_reconsume_times is None:
            return None if self.orderly else DEFAULT_MAX_RECONSUME_TIMES
        return self.max_reconsume_times

    @property
    def broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model is MessageModel.BROADCASTING


class ConsumerOptions(ClientOptions, total=False):
    """The fields of `ConsumerConfig` as keyword arguments."""

    message_model: MessageModel | Literal["clustering", "broadcasting"]
    orderly: bool
    order_by: OrderBy | None
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime
    consume_threads: int
    listener_batch_size: int
    pull_batch_size: PerTopic
    max_cached_messages: PerTopic
    max_cached_bytes: PerTopic
    max_body_bytes: int
    max_span: int
    commit_interval_s: float
    rebalance_interval_s: float
    max_reconsume_times: int | None
    auto_commit: bool
    consume_timeout_s: float
    start_wait_s: float
    shutdown_timeout_s: float
    pull_hold_s: float
    pull_retry_delay_s: float
    allocation: Allocation
    offset_store: OffsetStore | ClaimedOffsets | None
    offset_store_dir: str | Path | None
    durability: Literal["fsync", "process", "checkpoint"]
    on_unreadable_store: Literal["raise", "backup", "start_over"]
    remote_reset: Literal["accept", "refuse"]
    reset_record_interval_s: float
    server_messages: bool
    on_event: Callable[[ConsumerEvent], None] | None


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(ClientConfig):
    """The options of a producer; see `Producer`."""

    group: str = option("DEFAULT_PRODUCER", "the producer group", allowed="1–120 of `a-zA-Z0-9_-%|`")
    send_timeout_s: float = option(3.0, "the deadline of one send with all its attempts", seconds(0.01, 600))
    send_attempts: int = option(
        3,
        "how often a message may reach a broker. A refused attempt does not count. An attempt without a response "
        "counts, because the broker may have stored the message",
        whole(1, 100),
    )
    compress_above_bytes: int = option(
        4096, "bodies of at least this size are compressed", whole(1, 2**31 - 1), allowed="bytes"
    )
    compression: Literal["zlib", "lz4", "zstd"] = option(
        "zlib", "the compression; the others need the extra of the same name", one_of("zlib", "lz4", "zstd")
    )
    max_message_bytes: int = option(
        4 * MIB,
        "the largest body. The producer refuses larger ones",
        whole(1, MAX_MESSAGE_BYTES),
        allowed="bytes, up to 15.875 MiB",
    )
    max_in_flight_messages: int = option(
        4096, "the number of unfinished sends at which `send_async` waits", whole(1, 10_000_000), allowed="messages"
    )
    max_in_flight_bytes: int = option(
        64 * MIB, "the size of unfinished sends at which `send_async` waits", whole(1, 1 << 40), allowed="bytes"
    )
    auto_create_topic: bool = option(
        False, "send to a topic that does not exist yet, if brokers create topics on demand", flag()
    )
    accept_degraded: bool = option(
        True,
        'count "stored, but not flushed or replicated in time" as stored; `SendResult.status` shows it. With `False` '
        "the producer tries another broker, or raises `SendError`, and the message may be stored twice",
        flag(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)


class ProducerOptions(ClientOptions, total=False):
    """The fields of `ProducerConfig` as keyword arguments."""

    send_timeout_s: float
    send_attempts: int
    compress_above_bytes: int
    compression: Literal["zlib", "lz4", "zstd"]
    max_message_bytes: int
    max_in_flight_messages: int
    max_in_flight_bytes: int
    auto_create_topic: bool
    accept_degraded: bool
