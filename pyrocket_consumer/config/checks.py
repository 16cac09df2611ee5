"""Checks of values that users pass: each returns the value in its usual form, or raises ConfigError with the remedy.

A `Check` at the end also has the allowed values as a text, for the documentation of an option.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from datetime import datetime
from ipaddress import ip_network
from ssl import SSLContext, create_default_context
from typing import Any, Literal, NamedTuple, NoReturn, Self, SupportsIndex

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import safe_repr

MAX_TOPIC_CHARACTERS = 127
MAX_GROUP_CHARACTERS = 120  # 255 before broker 5.5.0; its %RETRY% topic must stay within 127
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_NO_NAME_SERVER = "no name server: pass name_server='host:9876' (pyrocket: -n host:9876), or set NAMESRV_ADDR"
_HOST = re.compile(r"[\w.-]{1,255}")
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[\w.-]{1,255}):(?P<port>[0-9]{1,5})")

NameServers = str | Iterable[str]
"""`host:port`, several joined by `;`, or a list of them."""


def check_topic(topic: object) -> str:
    """Return `topic` if it is a legal topic name.

    Raises:
        ConfigError: it is not text, empty, too long (127) or has a character outside `%|a-zA-Z0-9_-`.
    """
    return check_name(topic, "topic", MAX_TOPIC_CHARACTERS)


def check_group(group: object) -> str:
    """Return `group` if it is a legal group name.

    Raises:
        ConfigError: it is not text, empty, too long (120), reserved, or has a character outside `%|a-zA-Z0-9_-`.
    """
    name = check_name(group, "group", MAX_GROUP_CHARACTERS)
    if name == "DEFAULT_CONSUMER":
        raise ConfigError("group 'DEFAULT_CONSUMER' is reserved by RocketMQ; choose a name of your own")
    return name


def check_name(name: object, what: str, longest: int) -> str:
    """Return `name` if it is a legal name of a topic, group or namespace.

    Raises:
        ConfigError: it is not text, empty, longer than `longest`, or has a character outside `%|a-zA-Z0-9_-`.
    """
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
    """Return the addresses that brokers may have: one or several hosts, `host:port`, or networks like `10.0.0.0/8`.

    Raises:
        ConfigError: there is no address, or one has another form.
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
        ConfigError: the name is empty, or the file is missing or not such a file.
    """
    if not ca_file:  # with an empty name, Python would trust the system's authorities
        raise ConfigError(f"{what}{ca_file!r} is empty; it must be a file of certificates in PEM{where}")
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
        ConfigError: it is neither, or one of them is not text or empty.
    """
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a name, or a list of names")
    return [str(each) for each in names]


def check_text(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is None or a text that is not empty."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a text, or omitted")


class Secret(str):
    """A text that no repr shows and no pickle takes along, wherever it is held; `str()` of it is the plain one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a config with access_key, secret_key or security_token is not pickled, because readers of the pickle "
            "would have the account. Pickle dataclasses.replace(config, access_key=None, secret_key=None, "
            "security_token=None), and hand over the account by itself; str(config.secret_key) is the plain text"
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def check_secret(name: str, value: object) -> Secret:
    """Return a part of an account. Its value shows in no error.

    Raises:
        ConfigError: it is not text, empty, or has characters that no key has.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name} is of type {type(value).__name__}; it must be a text, or omitted")
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
        ConfigError: it is not iterable, or has another kind of item.
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


_NOT_RUN_BY_A_CALL: Mapping[Callable[[object], bool], str] = {
    inspect.iscoroutinefunction: "is an async def",
    inspect.isasyncgenfunction: "has a yield",
    inspect.isgeneratorfunction: "has a yield",
}


def has_kind(function: Callable[..., Any], is_kind: Callable[[object], bool]) -> bool:
    """Return whether a function, or the `__call__` of an object, is of a kind."""
    return is_kind(function) or is_kind(getattr(function, "__call__", None))  # noqa: B004 - its own __call__


def check_function(name: str, function: Callable[..., Any], *arguments: str, may_yield: bool = False) -> None:
    """Raise ConfigError for a function that can never work: it cannot take these arguments, or a call runs nothing."""
    shown = f"{name}={safe_repr(function)}"
    for is_kind, what in _NOT_RUN_BY_A_CALL.items():
        is_allowed = may_yield and is_kind is inspect.isgeneratorfunction
        if has_kind(function, is_kind) and not is_allowed:
            raise ConfigError(f"{shown} {what}; pass a plain function, because a call would not run this one")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-ins have no signature
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{shown} cannot be called: {error}; pass a function of ({', '.join(arguments)})") from error


OffsetSpec = Literal["first", "last"] | datetime
"""One offset in every queue: that of its first message, its end, or the first message stored at that time or later."""

_NAMED_SPECS: Mapping[str, Literal["first", "last"]] = {
    "first": "first",
    "earliest": "first",
    "last": "last",
    "latest": "last",
}


def check_offset_spec(name: str, value: object, or_else: str = "") -> OffsetSpec:
    """Return the OffsetSpec of `value`: "first" or "earliest", "last" or "latest", an aware datetime, or its text.

    `or_else` ends the list of allowed values in the error.

    Raises:
        ConfigError: it has another form.
    """
    at = value
    if isinstance(value, str):
        if value in _NAMED_SPECS:
            return _NAMED_SPECS[value]
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            at = None
    if not isinstance(at, datetime):
        raise ConfigError(
            f"{name}={safe_repr(value)} is not allowed; use 'first' or 'earliest', 'last' or 'latest', "
            f"{'' if or_else else 'or '}a time with its zone (an aware datetime, or text like 2026-11-21T08:00:00Z)"
            f"{or_else}"
        )
    if at.tzinfo is None:
        text = at.isoformat()  # of a date alone, too, which cannot have a zone
        remedy = f"write {text}Z, or {text}+01:00" if isinstance(value, str) else "give it one: tzinfo=timezone.utc"
        raise ConfigError(f"{name}={safe_repr(value)} has no time zone; {remedy}")
    if at.timestamp() < 0:
        raise ConfigError(f"{name}={safe_repr(value)} is before 1970; use 'first'")
    return at


class Check(NamedTuple):
    """The allowed values: as a text for the documentation, and as a function that raises ConfigError."""

    allowed: str
    apply: Callable[[str, Any], object]


def whole(low: int, high: int, unit: str = "") -> Check:
    """Allow whole numbers from `low` to `high`."""
    return Check(f"{show_number(low)}–{show_number(high)}{unit}", lambda name, value: check_int(name, value, low, high))


def seconds(low: float, high: float) -> Check:
    """Allow numbers of seconds from `low` to `high`."""
    return Check(f"{show_number(low)}–{show_number(high)} s", lambda name, value: check_range(name, value, low, high))


def flag(note: str = "") -> Check:
    """Allow True and False; `note` is a condition for the documentation."""
    return Check(note, check_bool)


def one_of(*choices: str) -> Check:
    """Allow these texts."""
    return Check(", ".join(f'`"{each}"`' for each in choices), lambda name, value: check_choice(name, value, choices))


def per_topic(low: int, high: int) -> Check:
    """Allow a whole number, or a mapping topic -> whole number."""

    def apply(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            check_int(name, value, low, high)
            return
        for topic, number in value.items():
            check_int(f"{name}[{safe_repr(topic)}]", number, low, high)
        if not all(isinstance(topic, str) for topic in value):
            raise ConfigError(
                f"{name}={safe_repr(value)} is not allowed; it must be one number, or a number by topic name"
            )

    return Check(f"{show_number(low)}–{show_number(high)}, or `{{topic: n}}`", apply)


def show_number(number: float) -> str:
    """Return a number as the documentation shows it."""
    if number == 2**31 - 1:
        return "2³¹−1"
    if isinstance(number, int) and number >= 1 << 20 and number & (number - 1) == 0:
        return f"2{str(number.bit_length() - 1).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"{number:g}" if number < 100_000 else f"{number:,}".replace(",", " ")
