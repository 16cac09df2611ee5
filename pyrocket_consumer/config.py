"""Settings: frozen, checked once when made; picklable without an account. Secrets never show in a repr."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from datetime import datetime
from ipaddress import ip_network
from pathlib import Path
from ssl import SSLContext, create_default_context
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypedDict

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import ClaimedOffsets, ConsumerEvent, MessageModel, MessageQueue, OffsetStore
from pyrocket_consumer.text import safe_repr, safe_repr_unless_secret

DEFAULT_MAX_RECONSUME_TIMES = 16
MAX_TOPIC_CHARACTERS = 127
MAX_GROUP_CHARACTERS = 120  # 255 before broker 5.5.0; its %RETRY% topic must stay within 127
MAX_MESSAGE_BYTES = 16 * 1024 * 1024 - 128 * 1024  # a frame has 16 MiB
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_NO_NAME_SERVER = "no name server: pass name_server='host:9876' (pyrocket: -n host:9876), or set NAMESRV_ADDR"
_HOST = re.compile(r"[\w.-]{1,255}")
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[\w.-]{1,255}):(?P<port>[0-9]{1,5})")

Allocation = (
    Literal["average", "circle", "hash", "machine-room"]
    | Callable[[str, str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
)
"""A strategy's name, or a callable (group, own client id, all queues, all client ids) -> own queues."""

OrderBy = Literal["sharding_key"] | Callable[[Any], Hashable]
"""What tells the key of a message: its sharding key, or a function (message) -> key."""

NameServers = str | Iterable[str]
"""`host:port`, several joined by `;`, or a list of them."""


def check_topic(topic: object) -> str:
    """Return `topic` if it is a legal topic name.

    Raises:
        ConfigError: it is not text, empty, too long (127) or has a character outside `%|a-zA-Z0-9_-`.
    """
    return _check_name(topic, "topic", MAX_TOPIC_CHARACTERS)


def check_group(group: object) -> str:
    """Return `group` if it is a legal group name.

    Raises:
        ConfigError: it is not text, empty, too long (120), reserved, or has a character outside `%|a-zA-Z0-9_-`.
    """
    name = _check_name(group, "group", MAX_GROUP_CHARACTERS)
    if name == "DEFAULT_CONSUMER":
        raise ConfigError("group 'DEFAULT_CONSUMER' is reserved by RocketMQ; choose a name of your own")
    return name


MAX_PART_CHARACTERS = 255


def _is_part_of_client_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_PART_CHARACTERS and value.isprintable()


def _check_name(name: object, what: str, longest: int) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{what} must be text, not {type(name).__name__} ({safe_repr(name)})")
    if not name:
        raise ConfigError(f"{what} is empty; give it a name")
    if len(name) > longest:
        raise ConfigError(f"{what} {name[:40]!r}… has {len(name)} characters; at most {longest} are allowed")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r} has a character that is not allowed; use a-z A-Z 0-9 _ - % |")
    return name


def parse_name_servers(text: NameServers | None) -> tuple[str, ...]:
    """Return the addresses in `text` (`host:port`, several joined by `;`), or in NAMESRV_ADDR when it is None.

    Raises:
        ConfigError: none given, or one is not `host:port`.
    """
    if text is None:
        text = os.environ.get("NAMESRV_ADDR", "")
        if not text.strip():
            raise ConfigError(_NO_NAME_SERVER)
    parts = [text] if isinstance(text, str) else list(text) if isinstance(text, Iterable) else [text]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            f"name_server={safe_repr(text, 200)} is not allowed; it must be 'host:9876', or a list of such texts"
        )
    if isinstance(text, str):
        parts = text.replace(",", ";").split(";")
    addresses = tuple(part.strip() for part in parts if part.strip())
    if not addresses:
        raise ConfigError(_NO_NAME_SERVER)
    for address in addresses:
        parse_address(address, "name_server")
    return addresses


def parse_address(address: str, what: str = "address") -> tuple[str, int]:
    """Split `host:port` (IPv6 hosts in brackets).

    Raises:
        ConfigError: it is not of that form.
    """
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"]) < 65536:
        raise ConfigError(
            f"{what} {safe_repr(address, 200)} is not host:port with a port from 1 to 65535 "
            "(for example 127.0.0.1:9876)"
        )
    return found["host"].strip("[]"), int(found["port"])


def parse_allowed_addresses(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return what brokers' addresses may be: hosts, `host:port`, networks like `10.0.0.0/8`; one, or several.

    Raises:
        ConfigError: there is none, or one is none of these.
    """
    names = check_names("allowed_addresses", value)
    if not names:
        raise ConfigError("allowed_addresses is empty, so no broker could be reached; leave it out to allow any")
    return tuple(_allowed_address(name.strip()) for name in names)


def _allowed_address(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    reason = ""
    try:
        return str(ip_network(bare))
    except ValueError as error:
        if "/" in text:
            reason = f" ({error})"
    if _HOST.fullmatch(text) and not text.replace(".", "").isdigit():
        return text
    if not reason and _ADDRESS.fullmatch(text):
        parse_address(text, "allowed_addresses:")
        return text
    raise ConfigError(
        f"allowed_addresses: {safe_repr(text, 200)} is not allowed{reason}; give a host (broker-a, 10.0.0.5), "
        "host:port, or a network (10.0.0.0/8)"
    )


def trusting(ca_file: str, what: str, where: str = "") -> SSLContext:
    """Return a TLS context that trusts the authorities in `ca_file`. Errors name the option, `what`, and `where`.

    Raises:
        ConfigError: it is not there, or not such a file.
    """
    try:
        return create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"{what}{ca_file!r} cannot be used: {error.strerror or error}; "
            f"it must be a file of certificates in PEM{where}"
        ) from error


def check_range(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a number from {low:g} to {high:g}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a whole number from {low} to {high}")


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is True or False; any other one has a truth, too, and rarely the one meant."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be True or False")


def check_names(name: str, value: object) -> list[str]:
    """Return the names in `value`: one, or an iterable of them.

    Raises:
        ConfigError: it is neither, or one of them is no text or empty.
    """
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a name, or a list of names")
    return [str(each) for each in names]


def check_text(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is None or a text that is not empty."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a text, or left out")


class Secret(str):
    """A text that no repr shows and no pickle takes along, wherever it is held; `str()` of it is the plain one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a config with access_key, secret_key or security_token is not pickled: whoever reads that would have the "
            "account. Pickle dataclasses.replace(config, access_key=None, secret_key=None, security_token=None), and "
            "hand over the account by itself; str(config.secret_key) is the plain text"
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def check_secret(name: str, value: object) -> Secret:
    """Return a part of an account. Its value shows in no error.

    Raises:
        ConfigError: it is no text, empty, or has characters that no key has.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name} is of type {type(value).__name__}; it must be a text, or left out")
    if not value:
        raise ConfigError(f"{name} is empty; give it, or leave the account out")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ConfigError(
            f"{name} has a character that is not allowed (a line break at its end, perhaps); it must be printable "
            "ASCII without blanks around"
        )
    return Secret(value)


def check_queues(name: str, value: object) -> list[MessageQueue]:
    """Return the queues in an iterable of them.

    Raises:
        ConfigError: it is none, or has something else in it.
    """
    queues: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    for queue in queues:
        if not isinstance(queue, MessageQueue) or [type(part) for part in astuple(queue)] != [str, str, int]:
            raise ConfigError(
                f"{name}={safe_repr(value)} is not allowed; pass a list of MessageQueues, for example of some in "
                "progress()"
            )
    return queues


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; choose one of {', '.join(map(repr, allowed))}")


Place = Literal["first", "last"] | datetime
"""A place in every queue: its first message, its end, or the first message stored at that time or later."""

_PLACES: Mapping[str, Literal["first", "last"]] = {
    "first": "first",
    "earliest": "first",
    "last": "last",
    "latest": "last",
}


def check_place(name: str, value: object, or_else: str = "") -> Place:
    """Return the place `value` means: "first" (or "earliest"), "last" (or "latest"), an aware datetime, or its text.

    `or_else` ends the list of what is allowed, where there is more.

    Raises:
        ConfigError: it is none of these.
    """
    at = value
    if isinstance(value, str):
        if value in _PLACES:
            return _PLACES[value]
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            at = None
    if not isinstance(at, datetime):
        raise ConfigError(
            f"{name}={safe_repr(value)} is not allowed; use 'first' or 'earliest', 'last' or 'latest', "
            f"a time with its zone (an aware datetime, or text: 2026-11-21T08:00:00Z){or_else}"
        )
    if at.tzinfo is None:
        remedy = f"write {value}Z, or {value}+01:00" if isinstance(value, str) else "give it one: tzinfo=timezone.utc"
        raise ConfigError(f"{name}={safe_repr(value)} has no time zone; {remedy}")
    if at.timestamp() < 0:
        raise ConfigError(f"{name}={safe_repr(value)} is before 1970; use 'first'")
    return at


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """The options of every client: where the name servers are, who we are, how to prove it; see `Admin`."""

    name_server: NameServers | None = None
    client_ip: str | None = None
    instance_name: str = "DEFAULT"
    unit_name: str | None = None
    namespace: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    security_token: str | None = field(default=None, repr=False)
    tls: bool | SSLContext = False
    allowed_addresses: str | Iterable[str] | None = None
    call_timeout_s: float = 3.0
    connect_timeout_s: float = 3.0
    heartbeat_interval_s: float = 30.0
    route_refresh_interval_s: float = 30.0
    max_frame_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "name_server", parse_name_servers(self.name_server))
        for name in ("client_ip", "unit_name", "instance_name"):
            value = getattr(self, name)
            if (value is not None or name == "instance_name") and not _is_part_of_client_id(value):
                raise ConfigError(
                    f"{name}={safe_repr(value)} is not allowed; it must be a text of 1 to {MAX_PART_CHARACTERS} "
                    "printable characters, or left out: it is in the client id, which brokers and tools show"
                )
        if self.namespace is not None:
            _check_name(self.namespace, "namespace", MAX_TOPIC_CHARACTERS)
        for name in ("access_key", "secret_key", "security_token"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_secret(name, value))
        if not isinstance(self.tls, bool | SSLContext):
            raise ConfigError(f"tls={safe_repr(self.tls)} is not allowed; it must be True, False or an ssl.SSLContext")
        if self.allowed_addresses is not None:
            object.__setattr__(self, "allowed_addresses", parse_allowed_addresses(self.allowed_addresses))
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("access_key and secret_key go together; one of them is missing")
        if self.security_token is not None and self.access_key is None:
            raise ConfigError("security_token goes with access_key and secret_key, which are missing")
        for name in ("call_timeout_s", "connect_timeout_s"):
            check_range(name, getattr(self, name), 0.01, 600)
        for name in ("heartbeat_interval_s", "route_refresh_interval_s"):
            check_range(name, getattr(self, name), 0.05, 3600)
        check_int("max_frame_bytes", self.max_frame_bytes, 64 * 1024, 1024 * 1024 * 1024)

    def __copy__(self) -> Self:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The name servers' addresses, checked."""
        assert isinstance(self.name_server, tuple)
        return self.name_server

    @property
    def brokers_allowed(self) -> tuple[str, ...] | None:
        """What brokers' addresses may be, checked; None: any."""
        assert isinstance(self.allowed_addresses, tuple | None)
        return self.allowed_addresses

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make a config from keyword options.

        Raises:
            ConfigError: an option is unknown (with the nearest known names) or its value is not allowed.
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
    """The fields of `ClientConfig` as keyword arguments, for editors and type checkers."""

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


_STORE_METHODS = [name for name in vars(OffsetStore) if inspect.isfunction(vars(OffsetStore)[name]) and name[0] != "_"]

PerTopic = int | Mapping[str, int]
"""One number for every topic, or a mapping topic -> number (others take the default)."""


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(ClientConfig):
    """The options of a push consumer; see `PushConsumer`."""

    group: str = ""
    message_model: MessageModel | Literal["clustering", "broadcasting"] = MessageModel.CLUSTERING
    orderly: bool = False
    order_by: OrderBy | None = None
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime = "last"
    consume_threads: int = 20
    listener_batch_size: int = 1
    pull_batch_size: PerTopic = 32
    max_cached_messages: PerTopic = 1000
    max_cached_bytes: PerTopic = 100 * 1024 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    max_span: int = 2000
    commit_interval_s: float = 5.0
    rebalance_interval_s: float = 20.0
    max_reconsume_times: int | None = None
    auto_commit: bool = True
    consume_timeout_s: float = 900.0
    start_wait_s: float = 5.0
    shutdown_timeout_s: float = 20.0
    pull_hold_s: float = 15.0
    pull_retry_delay_s: float = 1.0
    allocation: Allocation = "average"
    offset_store: OffsetStore | ClaimedOffsets | None = None
    offset_store_dir: str | Path | None = None
    durability: Literal["fsync", "process", "checkpoint"] = "fsync"
    on_unreadable_store: Literal["raise", "backup", "start_over"] = "backup"
    remote_reset: Literal["accept", "refuse"] = "accept"
    reset_record_interval_s: float = 60.0
    server_messages: bool = True
    on_event: Callable[[ConsumerEvent], None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        try:
            object.__setattr__(self, "message_model", MessageModel(self.message_model))
        except ValueError:
            check_choice("message_model", self.message_model, [model.value for model in MessageModel])
        object.__setattr__(self, "consume_from", check_place("consume_from", self.consume_from))
        check_bool("orderly", self.orderly)
        check_bool("auto_commit", self.auto_commit)
        check_bool("server_messages", self.server_messages)
        check_int("consume_threads", self.consume_threads, 1, 1000)
        check_int("listener_batch_size", self.listener_batch_size, 1, 1024)
        self._check_per_topic("pull_batch_size", 1, 1024)
        self._check_per_topic("max_cached_messages", 1, 1_000_000)
        self._check_per_topic("max_cached_bytes", 1, 1 << 40)
        check_int("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        check_int("max_span", self.max_span, 1, 65535)
        check_range("commit_interval_s", self.commit_interval_s, 0.01, 3600)
        check_range("rebalance_interval_s", self.rebalance_interval_s, 0.05, 3600)
        if self.max_reconsume_times is not None:
            check_int("max_reconsume_times", self.max_reconsume_times, 0, 2**31 - 1)
        if not self.auto_commit and not self.orderly:
            raise ConfigError("auto_commit=False works with orderly=True only; leave it out, or consume orderly")
        self._check_order_by()
        check_range("consume_timeout_s", self.consume_timeout_s, 0.05, 7 * 86400)
        check_range("start_wait_s", self.start_wait_s, 0, 600)
        check_range("shutdown_timeout_s", self.shutdown_timeout_s, 0, 86400)
        check_range("pull_hold_s", self.pull_hold_s, 0.05, 300)
        check_range("pull_retry_delay_s", self.pull_retry_delay_s, 0.001, 300)
        if not callable(self.allocation):
            check_choice("allocation", self.allocation, ["average", "circle", "hash", "machine-room"])
        check_choice("durability", self.durability, ["fsync", "process", "checkpoint"])
        check_choice("on_unreadable_store", self.on_unreadable_store, ["raise", "backup", "start_over"])
        check_choice("remote_reset", self.remote_reset, ["accept", "refuse"])
        check_range("reset_record_interval_s", self.reset_record_interval_s, 0.05, 86400)
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
        if self.on_event is not None and not callable(self.on_event):
            raise ConfigError(
                f"on_event={safe_repr(self.on_event)} is not callable; pass a function of one ConsumerEvent"
            )

    def _check_order_by(self) -> None:
        key_of = self.order_by
        if key_of is None:
            return
        shown_by = f"order_by={safe_repr(key_of)}"
        call = getattr(key_of, "__call__", None)  # noqa: B004 - of an object it may be async
        if inspect.iscoroutinefunction(key_of) or inspect.iscoroutinefunction(call):
            raise ConfigError(f"{shown_by} is an async def; pass a plain function: a message's key is not waited for")
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
            try:
                inspect.signature(key_of).bind(None)
            except ValueError:
                pass  # some built-ins tell nothing of themselves
            except TypeError as error:
                raise ConfigError(f"{shown_by} cannot be called with a message: {error}") from error
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

    def _check_per_topic(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        for each in value.values() if isinstance(value, Mapping) else [value]:
            check_int(name, each, low, high)
        for topic in value if isinstance(value, Mapping) else ():
            if not isinstance(topic, str):
                raise ConfigError(
                    f"{name}={safe_repr(value)} is not allowed; it must be one number, or a number by topic name"
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
        """How often a message may fail before it is given up: 16, or for ever when orderly, unless set."""
        if self.max_reconsume_times is None:
            return None if self.orderly else DEFAULT_MAX_RECONSUME_TIMES
        return self.max_reconsume_times

    @property
    def broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model is MessageModel.BROADCASTING


class ConsumerOptions(ClientOptions, total=False):
    """The fields of `ConsumerConfig` as keyword arguments, for editors and type checkers."""

    message_model: MessageModel | Literal["clustering", "broadcasting"]
    orderly: bool
    order_by: OrderBy | None
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime  # editors offer the words
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

    group: str = "DEFAULT_PRODUCER"
    send_timeout_s: float = 3.0
    send_attempts: int = 3
    compress_above_bytes: int = 4096
    compression: Literal["zlib", "lz4", "zstd"] = "zlib"
    max_message_bytes: int = 4 * 1024 * 1024
    max_in_flight_messages: int = 4096
    max_in_flight_bytes: int = 64 * 1024 * 1024
    auto_create_topic: bool = False
    accept_degraded: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        check_range("send_timeout_s", self.send_timeout_s, 0.01, 600)
        check_int("send_attempts", self.send_attempts, 1, 100)
        check_int("compress_above_bytes", self.compress_above_bytes, 1, 2**31 - 1)
        check_choice("compression", self.compression, ["zlib", "lz4", "zstd"])
        check_int("max_message_bytes", self.max_message_bytes, 1, MAX_MESSAGE_BYTES)
        check_int("max_in_flight_messages", self.max_in_flight_messages, 1, 10_000_000)
        check_int("max_in_flight_bytes", self.max_in_flight_bytes, 1, 1 << 40)
        check_bool("auto_create_topic", self.auto_create_topic)
        check_bool("accept_degraded", self.accept_degraded)


class ProducerOptions(ClientOptions, total=False):
    """The fields of `ProducerConfig` as keyword arguments, for editors and type checkers."""

    send_timeout_s: float
    send_attempts: int
    compress_above_bytes: int
    compression: Literal["zlib", "lz4", "zstd"]
    max_message_bytes: int
    max_in_flight_messages: int
    max_in_flight_bytes: int
    auto_create_topic: bool
    accept_degraded: bool
