"""Checks of the arguments of an embedded cluster. Each raises ConfigError with the allowed values."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.testing.release import DEFAULT_RELEASE, Release
from pyrocket_consumer.testing.topics import LONGEST_TOPIC, name_defect
from pyrocket_consumer.text import safe_repr

_RELEASE = Release(DEFAULT_RELEASE)


def check_topic(topic: object) -> None:
    """Raise ConfigError unless `topic` is a name that brokers accept."""
    _check_name("topic", topic, LONGEST_TOPIC)


def check_group(group: object) -> None:
    """Raise ConfigError unless `group` is a name that brokers accept."""
    _check_name("group", group, _RELEASE.longest_group)


def _check_name(kind: str, name: object, longest: int) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{kind}={name!r} is not allowed; it must be a text")
    if defect := name_defect(kind, name, longest, _RELEASE):
        raise ConfigError(f"{kind}={name!r:.60} is not allowed: {defect} At most {longest} characters.")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a whole number from {low} to {high}")


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be True or False")


def check_account(value: object) -> tuple[str, str]:
    """Return an access key and its secret key. Errors never contain them."""
    parts = value if isinstance(value, tuple) else ()
    if len(parts) != 2 or not all(isinstance(part, str) and part.isascii() and part.isprintable() for part in parts):
        raise ConfigError("account must be a pair of texts, (access key, secret key), of printable ASCII")
    if not all(parts):
        raise ConfigError("account has an empty key; give an access key and a secret key")
    return parts[0], parts[1]


def check_tls(value: object) -> ssl.SSLContext:
    """Return `value` if it is an SSLContext."""
    if not isinstance(value, ssl.SSLContext):
        raise ConfigError(
            f"tls={safe_repr(value)} is not allowed; it must be an ssl.SSLContext with a certificate, or None"
        )
    return value


def check_names(name: str, value: object) -> list[str]:
    """Return the names in `value`: one, or an iterable of them."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{name}={safe_repr(value)} is not allowed; it must be a name, or a list of names")
    return [str(each) for each in names]
