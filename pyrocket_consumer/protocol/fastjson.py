"""The JSON of Java's fastjson, whose keys may be numbers or whole objects, which no other JSON reader accepts.

It also reads JSON with errors that name the wrong field, and converts flat dataclasses to JSON objects.
Source: fastjson 1.2.69, 1.2.83, fastjson2 2.0.43 to 2.0.59.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from itertools import chain
from typing import Any, TypeVar

import orjson

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue

MAX_DEPTH = 64
"""The deepest nesting of texts and values. RocketMQ needs at most ten levels."""

MAX_CHARACTERS = 64 * 1024 * 1024
MAX_VALUES = 1_000_000
"""The most values in one text. A list of 20,000 groups, which fills a frame of 16 MiB, has 600,000."""

_SMALL_CHARACTERS = 64 * 1024

_BYTE_ORDER_MARK = "\ufeff"
_STRING = r'"(?:[^"\\]|\\.)*+"'
_FLAT_OBJECT = rf'\{{(?:[^{{}}"]++|{_STRING})*+\}}'
_OBJECT = rf'\{{(?:[^{{}}"]++|{_STRING}|{_FLAT_OBJECT})*+\}}'
_WORD = r"[\w$.+-]++"
_BARE_KEY = re.compile(
    rf"(?P<key>-?[0-9]{{1,19}}|[A-Za-z_$][A-Za-z0-9_$]*+|{_OBJECT})(?=[ \t\r\n]*+:)"
    rf'|(?:[ \t\r\n,:\[\]}}]++|{_STRING}|{_WORD}(?![ \t\r\n]*+:))++|".*|{_WORD}',
    re.DOTALL,
)
"""Matches a key without quotes, or text up to the next such key or "{". Only keys have a group."""

_LENIENT = json.JSONDecoder(strict=False)  # accepts raw control characters in strings, as Java does


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Return the value of a JSON text. Keys that are numbers or objects become their text: "0", '{"topic":"T"}'.

    Whole numbers of up to 64 bits are exact. A byte order mark is skipped.

    Raises:
        ProtocolError: the text is not JSON, incomplete, followed by more text, nested too deep, or has more than
            MAX_VALUES.
    """
    if len(text) > MAX_CHARACTERS:
        raise ProtocolError(f"JSON text of {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if isinstance(text, memoryview):
        text = bytes(text)
    brackets = _count(text, "[") + _count(text, "{")
    if len(text) > _SMALL_CHARACTERS and (values := brackets + _count(text, ",")) > MAX_VALUES:
        raise ProtocolError(f"JSON text of {values} values; at most {MAX_VALUES} are read")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _loads_dialect(text)
    if brackets > MAX_DEPTH:
        _check_depth(value)
    return value


def _loads_dialect(text: bytes | bytearray | str) -> Any:
    """Read what only fastjson writes, and refuse the rest."""
    try:
        text = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"JSON text is not UTF-8: {error}") from error
    return loads_lenient(_BARE_KEY.sub(_quoted, text.removeprefix(_BYTE_ORDER_MARK)))


def loads_lenient(text: bytes | str) -> Any:
    """Return the value of JSON with Java's strings, which may have control characters or half of a surrogate pair.

    Raises:
        ProtocolError: the text is not JSON.
    """
    try:
        value = _LENIENT.decode(text if isinstance(text, str) else text.decode())
        standard = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return orjson.loads(standard.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error!s:.200}") from None
    except RecursionError:
        raise _too_deep() from None


def _quoted(found: re.Match[str]) -> str:
    return json.dumps(found["key"]) if found["key"] else found[0]


def _count(text: bytes | bytearray | str, sign: str) -> int:
    return text.count(sign) if isinstance(text, str) else text.count(sign.encode())


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = chain.from_iterable(
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))
        )
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ProtocolError:
    return ProtocolError(f"JSON nested deeper than {MAX_DEPTH} levels")


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON. A MessageQueue becomes an object, also as a key; int keys stay unquoted.

    Every Java client and server reads this. They do not read a JSON string in place of an object key.

    Raises:
        ProtocolError: `value` is nested too deep.
        TypeError: `value` contains an object that JSON cannot represent.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except orjson.JSONEncodeError:
        return b"".join(_pieces(value))


def _pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    if isinstance(value, MessageQueue):
        yield _queue_object(value)
    elif depth >= MAX_DEPTH and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        raise _too_deep()
    elif isinstance(value, Mapping):
        before = b"{"
        for key, item in value.items():
            yield before
            yield _key_text(key)
            yield b":"
            yield from _pieces(item, depth + 1)
            before = b","
        yield b"{}" if before == b"{" else b"}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        before = b"["
        for item in value:
            yield before
            yield from _pieces(item, depth + 1)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def _key_text(key: Any) -> bytes:
    if isinstance(key, MessageQueue):
        return _queue_object(key)
    if isinstance(key, (str, int)):
        return orjson.dumps(key)
    raise TypeError(f"a JSON key is text, a whole number or a MessageQueue, not {key!r}")


def _queue_object(queue: MessageQueue) -> bytes:
    return b'{"brokerName":%b,"queueId":%d,"topic":%b}' % (
        orjson.dumps(queue.broker_name),
        queue.queue_id,
        orjson.dumps(queue.topic),
    )


_R = TypeVar("_R")


class JsonObject:
    """A JSON object to read; `what` names the body in errors."""

    __slots__ = ("_fields", "_what")

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
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
    return JsonObject(loads(body), what)


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
        return dumps(value).decode() if isinstance(value, (bool, float)) else str(value)
    raise ProtocolError(f"{what}: {name} must be text, not {_short(value)}")


def read_queue(value: object, what: str) -> MessageQueue:
    """Read a queue from an object, or from a key, which is the text of an object."""
    if isinstance(value, str):
        value = loads(value)
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
