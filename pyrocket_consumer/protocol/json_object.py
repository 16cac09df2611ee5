"""Reads JSON with errors that name the wrong field, and converts flat dataclasses to JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.fastjson import ObjectKey

_R = TypeVar("_R")


class JsonObject:
    """A JSON object to read; `what` names the body in errors."""

    __slots__ = ("_fields", "_what")

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, (dict, ObjectKey)):
            raise ProtocolError(f"{what}: an object is wanted, not {_short(value)}")
        self._fields: Mapping[Any, Any] = value
        self._what = what

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def number(self, name: str, default: int = 0) -> int:
        value = self._fields.get(name)
        return default if value is None else read_number(value, name, self._what)

    def float_number(self, name: str, default: float = 0.0) -> float:
        value = self._fields.get(name)
        if value is None:
            return default
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise self._type_error(name, "a number", value) from None

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._fields.get(name)
        if value is None:
            return default
        return value.lower() == "true" if isinstance(value, str) else bool(value)

    def text(self, name: str, default: str = "") -> str:
        value = self._fields.get(name)
        return default if value is None else read_text(value, name, self._what)

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def items(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._type_error(name, "a list", value)
        return value

    def table(self, name: str) -> Mapping[Any, Any]:
        value = self._fields.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._type_error(name, "an object", value)
        return value

    def texts(self, name: str) -> list[str]:
        return [read_text(item, name, self._what) for item in self.items(name)]

    def objects(self, name: str) -> list[JsonObject]:
        return [JsonObject(item, f"{self._what}.{name}") for item in self.items(name)]

    def queues(self, name: str) -> list[MessageQueue]:
        return [read_queue(item, f"{self._what}.{name}") for item in self.items(name)]

    def text_table(self, name: str) -> dict[str, str]:
        return {
            str(key): "" if value is None else read_text(value, str(key), self._what)
            for key, value in self.table(name).items()
        }

    def queue_table(self, name: str, read: Callable[[Any, str], _R]) -> dict[MessageQueue, _R]:
        """Return a map with queues as keys; `read(value, what)` reads its values."""
        what = f"{self._what}.{name}"
        return {read_queue(key, what): read(value, what) for key, value in self.table(name).items()}

    def _type_error(self, name: str, wanted: str, value: object) -> ProtocolError:
        return ProtocolError(f"{self._what}: {name} must be {wanted}, not {_short(value)}")


def read_object(body: bytes, what: str) -> JsonObject:
    return JsonObject(fastjson.loads(body), what)


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:60] if isinstance(value, (str, int, float)) else type(value).__name__


def read_number(value: object, name: str, what: str) -> int:
    if isinstance(value, str):
        digits = value.removeprefix("-")
        value = int(value) if len(digits) < 20 and digits.isdecimal() else value
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise ProtocolError(f"{what}: {name} must be a whole number of 64 bits, not {_short(value)}")
    return value


def read_text(value: object, name: str, what: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return fastjson.dumps(value).decode() if isinstance(value, (bool, float)) else str(value)
    raise ProtocolError(f"{what}: {name} must be text, not {_short(value)}")


def read_queue(value: object, what: str) -> MessageQueue:
    """Read a queue from an object, or from the text of an object, which some clients write as a key."""
    if isinstance(value, str):
        value = fastjson.loads(value)
    found = JsonObject(value, what)
    return MessageQueue(found.text("topic"), found.text("brokerName"), found.number("queueId"))


def java_field(name: str, default: Any) -> Any:
    """Declare a field whose name in JSON is not its attribute's name in camelCase."""
    return field(default=default, metadata={"name": name})


def _java_name(each: Any) -> str:
    first, *others = each.name.split("_")
    return str(each.metadata.get("name") or first + "".join(map(str.capitalize, others)))


def read_record(kind: Callable[..., _R], value: object, what: str) -> _R:
    """Read a flat dataclass. Its fields have defaults, which apply to missing values."""
    found = value if isinstance(value, JsonObject) else JsonObject(value, what)
    readers: dict[str, Callable[[str], Any]] = {
        "int": found.number,
        "float": found.float_number,
        "bool": found.boolean,
        "str": found.text,
    }
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]  # every kind is a dataclass
        name = _java_name(each)
        if found.has(name):
            values[each.name] = readers[str(each.type).partition(" | ")[0]](name)
    return kind(**values)


def write_record(record: Any) -> dict[str, Any]:
    found = {_java_name(each): getattr(record, each.name) for each in fields(record)}
    return {name: value for name, value in sorted(found.items()) if value is not None}
