"""The options of every client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from ssl import SSLContext
from typing import Any, Self, TypeVar

from pyrocket_consumer.config.checks import (
    MAX_TOPIC_CHARACTERS,
    NameServers,
    check_name,
    check_secret,
    parse_allowed_addresses,
    parse_name_servers,
)
from pyrocket_consumer.config.option import MIB, Check, option, option_of, seconds, whole
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.text import safe_repr, safe_repr_unless_secret

MAX_PART_CHARACTERS = 255


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
