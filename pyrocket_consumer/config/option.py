"""One option of a config: its default, the check of its value, and its documentation.

`python -m tests.options --write` makes `keywords.py`, docstrings and the tables of docs/reference.md from the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, field
from typing import Any, NamedTuple

from pyrocket_consumer.config.checks import check_bool, check_choice, check_int, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.text import safe_repr

MIB = 1024 * 1024
_OPTION = "option"


class Check(NamedTuple):
    """The allowed values: as a text for the documentation, and as a function that raises ConfigError."""

    allowed: str
    apply: Callable[[str, Any], object]


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


def whole(low: int, high: int, unit: str = "") -> Check:
    """Allow whole numbers from `low` to `high`."""
    return Check(f"{_number(low)}–{_number(high)}{unit}", lambda name, value: check_int(name, value, low, high))


def seconds(low: float, high: float) -> Check:
    """Allow numbers of seconds from `low` to `high`."""
    return Check(f"{_number(low)}–{_number(high)} s", lambda name, value: check_range(name, value, low, high))


def flag(note: str = "") -> Check:
    """Allow True and False; `note` is a condition for the documentation."""
    return Check(note, check_bool)


def one_of(*choices: str) -> Check:
    """Allow these texts."""
    return Check(", ".join(f'`"{each}"`' for each in choices), lambda name, value: check_choice(name, value, choices))


def per_topic(low: int, high: int) -> Check:
    """Allow a whole number, or a mapping topic -> whole number."""

    def apply(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for topic, number in value.items():
                check_int(f"{name}[{safe_repr(topic)}]", number, low, high)
        else:
            check_int(name, value, low, high)
        if isinstance(value, Mapping) and not all(isinstance(topic, str) for topic in value):
            raise ConfigError(
                f"{name}={safe_repr(value)} is not allowed; it must be one number, or a number by topic name"
            )

    return Check(f"{_number(low)}–{_number(high)}, or `{{topic: n}}`", apply)


def _as_text(default: object) -> str:
    if default is None:
        return "–"
    if isinstance(default, bool) or not isinstance(default, int | float):
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        return f"`{text}`"
    if default >= MIB and default % MIB == 0:
        return f"{default // MIB:g} MiB"
    return _number(default)


def _number(number: float) -> str:
    if number == 2**31 - 1:
        return "2³¹−1"
    if isinstance(number, int) and number >= MIB and number & (number - 1) == 0:
        return f"2{str(number.bit_length() - 1).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"{number:g}" if number < 100_000 else f"{number:,}".replace(",", " ")
