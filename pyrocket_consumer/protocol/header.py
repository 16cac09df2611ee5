"""The base of all header classes: it converts a frozen dataclass to the string map of a frame, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar, NamedTuple, Self

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.codes import RequestCode

_LONG_DIGITS = 20  # a Java long has at most 19 digits and a sign


class _Part(NamedTuple):
    """The encoding of one attribute."""

    attribute: str
    name: str  # the name of its field
    other_name: str | None  # the name of a second field with the same value
    parse: Callable[[str], str | int | bool] | None  # None: it is text
    absent: object  # the value for a missing field; MISSING if the field is required


def wire(name: str, other_name: str | None = None, *, default: Any = MISSING) -> Any:
    """Declare a field whose name is not its attribute's in camelCase; `other_name` is a second field of its value."""
    return field(default=default, metadata={"names": (name, other_name)})


def _number(text: str) -> int:
    if len(text) > _LONG_DIGITS or not (text.isdecimal() or (text[:1] == "-" and text[1:].isdecimal())):
        raise ValueError(text)
    number = int(text)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    return text.lower() == "true"  # like Boolean.parseBoolean, all other texts are false


_PARSERS: dict[str, Callable[[str], str | int | bool] | None] = {"str": None, "int": _number, "bool": _boolean}

_plans: dict[tuple[type[Header], bool], tuple[_Part, ...]] = {}


def _plan(header: type[Header], long_names: bool = False) -> tuple[_Part, ...]:
    """Return the encoding of each attribute of `header`, in the order of its constructor."""
    known = _plans.get((header, long_names))
    if known is not None:
        return known
    parts = []
    for each in fields(header):  # type: ignore[arg-type]  # every header is a dataclass
        kind, _, optional = str(each.type).partition(" | ")
        first, *others = each.name.split("_")
        name, other_name = "bname" if each.name == "broker_name" else first + "".join(map(str.capitalize, others)), None
        if "names" in each.metadata and not long_names:
            name, other_name = each.metadata["names"]
        parts.append(_Part(each.name, name, other_name, _PARSERS[kind], None if optional else each.default))
    return _plans.setdefault((header, long_names), tuple(parts))


class Header:
    """Base of all headers. It converts itself to the string map of a frame, and back."""

    __slots__ = ()

    CODE: ClassVar[RequestCode]

    # Defined once for all headers. If dataclasses generated them for each class, imports would take 50 % longer.

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    def _values(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_fields(self) -> dict[str, str]:
        """Return the fields as texts, without attributes that are None."""
        return self._write()

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """Return the header in `fields`; unknown fields are ignored.

        Raises:
            ProtocolError: a field is missing or is not a number; the text names it.
        """
        return cls._read(fields)

    def _write(self, long_names: bool = False) -> dict[str, str]:
        written: dict[str, str] = {}
        for attribute, name, other_name, parse, _ in _plan(type(self), long_names):
            value = getattr(self, attribute)
            if value is not None:
                text: str = value if parse is None else _text(value)
                written[name] = text
                if other_name is not None:
                    written[other_name] = text
        return written

    @classmethod
    def _read(cls, fields: Mapping[str, str], long_names: bool = False) -> Self:
        values: list[Any] = []
        for _, name, other_name, parse, absent in _plan(cls, long_names):
            text = fields.get(name)
            if text is None and other_name is not None:
                text = fields.get(other_name)
            if text is None:
                if absent is MISSING:
                    raise ProtocolError(f"{cls.__name__}: field {name} is missing")
                values.append(absent)
            elif parse is None:
                values.append(text)
            else:
                try:
                    values.append(parse(text))
                except ValueError:
                    raise ProtocolError(f"{cls.__name__}: field {name} is not a number: {text[:40]!r}") from None
        return cls(*values)


def _text(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
