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
from math import isfinite
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
_MAX_ORJSON_VALUES = 50_000  # orjson holds the GIL for a whole text, so larger texts would block other threads
_MAX_INTEGER_CHARACTERS = 20  # a Java long has at most 19 digits and a sign; longer numbers are floats, as in orjson

_BYTE_ORDER_MARK = "\ufeff"
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_KEY = re.compile(r"([A-Za-z_$][A-Za-z0-9_$]*)[ \t\r\n]*:")
_NUMBER_KEY = re.compile(r"(-?[0-9]{1,19})[ \t\r\n]*:")
_QUEUE_KEY = re.compile(  # the usual object key, matched at once
    r'\{\s*"brokerName"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"queueId"\s*:\s*(-?[0-9]{1,10})\s*,'
    r'\s*"topic"\s*:\s*"([^"\\\x00-\x1f]*)"\s*\}[ \t\r\n]*:'
)
_STRING = json.JSONDecoder(strict=False)  # accepts raw control characters, as Java does
_CONSTANTS = {"true": True, "false": False, "null": None}


class ObjectKey(Mapping[str, Any]):
    """A JSON object used as a key: a hashable mapping."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, ObjectKey) else NotImplemented

    def __hash__(self) -> int:
        scalars = [pair for pair in self._fields.items() if isinstance(pair[1], (str, int, float))]
        return hash(frozenset(scalars))

    def __repr__(self) -> str:
        return f"ObjectKey({self._fields!r})"


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Return the value of a JSON text. Keys that are objects become ObjectKey, and unquoted numbers int.

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
    values = brackets + _count(text, ",") if len(text) > _SMALL_CHARACTERS else 0
    if values > MAX_VALUES:
        raise ProtocolError(f"JSON text of {values} values; at most {MAX_VALUES} are read")
    if values <= _MAX_ORJSON_VALUES:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # the reader below accepts what only fastjson writes, and refuses the rest
        else:
            if brackets > MAX_DEPTH:
                _check_depth(value)
            return value
    if not isinstance(text, str):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"JSON text is not UTF-8: {error}") from error
    return _Reader(text.removeprefix(_BYTE_ORDER_MARK)).document()


def loads_lenient(text: bytes) -> Any:
    """Return the value of JSON with Java's strings, which may have control characters or half of a surrogate pair.

    Keys must be strings, as in standard JSON, because `loads` is slower.

    Raises:
        ProtocolError: the text is not JSON.
    """
    try:
        standard = json.dumps(_STRING.decode(text.decode()), ensure_ascii=False, allow_nan=False)
        return orjson.loads(standard.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error!s:.200}") from None


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


class _Reader:
    """A recursive reader. Only `_object` differs from RFC 8259."""

    __slots__ = ("_index", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._index = 0

    def document(self) -> Any:
        value = self._value(0)
        self._skip_space()
        if self._index < len(self._text):
            raise self._error("more text follows the value")
        return value

    def _error(self, what: str) -> ProtocolError:
        near = self._text[self._index : self._index + 40]
        where = f"near {near!r}" if near else "at its end"
        return ProtocolError(f"not JSON at character {self._index}, {where}: {what}")

    def _skip_space(self) -> str:
        """Skip white space and return the next character, "" at the end."""
        text, index = self._text, self._index
        if index < len(text) and text[index] in " \t\r\n":
            found = _SPACE.match(text, index)
            assert found is not None
            self._index = index = found.end()
        return text[index : index + 1]

    def _skip_if(self, wanted: str) -> bool:
        if self._skip_space() == wanted:
            self._index += 1
            return True
        return False

    def _value(self, depth: int) -> Any:
        first = self._skip_space()
        if first == '"':
            return self._string()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        number = _NUMBER.match(self._text, self._index)
        if number:
            return self._number(number)
        for word, value in _CONSTANTS.items():
            if self._text.startswith(word, self._index):
                self._index += len(word)
                return value
        raise self._error("a value is wanted")

    def _number(self, found: re.Match[str]) -> int | float:
        text = found.group()
        value: int | float
        if len(text) <= _MAX_INTEGER_CHARACTERS and text.removeprefix("-").isdecimal():
            value = int(text)
        else:
            value = float(text)
            if not isfinite(value):
                raise self._error("a number is too large")
        self._index = found.end()
        return value

    def _string(self) -> str:
        value: str
        try:
            value, self._index = _STRING.raw_decode(self._text, self._index)
        except ValueError as error:
            raise self._error(f"a string is broken ({error})") from None
        if value.isascii():
            return value
        # Java strings may contain half of a surrogate pair. Replace it, because Python cannot encode it.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _array(self, depth: int) -> list[Any]:
        self._enter(depth)
        values: list[Any] = []
        if self._skip_if("]"):
            return values
        while True:
            values.append(self._value(depth + 1))
            if self._skip_if("]"):
                return values
            if not self._skip_if(","):
                raise self._error("',' or ']' is wanted")

    def _object(self, depth: int) -> dict[Any, Any]:
        self._enter(depth)
        values: dict[Any, Any] = {}
        if self._skip_if("}"):
            return values
        while True:
            key = self._key(depth)
            values[key] = self._value(depth + 1)
            if self._skip_if("}"):
                return values
            if not self._skip_if(","):
                raise self._error("',' or '}' is wanted")

    def _enter(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH} levels")
        self._index += 1

    def _key(self, depth: int) -> str | int | ObjectKey:
        """Read a key and the ':' after it."""
        first = self._skip_space()
        key: str | ObjectKey
        if first == "{":
            usual = _QUEUE_KEY.match(self._text, self._index)
            if usual:
                self._index = usual.end()
                broker_name, queue_id, topic = usual.groups()
                return ObjectKey({"brokerName": broker_name, "queueId": int(queue_id), "topic": topic})
            key = ObjectKey(self._object(depth + 1))
        elif first == '"':
            key = self._string()
        else:
            bare = _NUMBER_KEY.match(self._text, self._index)
            word = None if bare else _WORD_KEY.match(self._text, self._index)
            if bare:
                self._index = bare.end()
                return int(bare[1])
            if word:
                self._index = word.end()
                return word[1]
            raise self._error("a key is wanted")
        if not self._skip_if(":"):
            raise self._error("':' is wanted")
        return key


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON. MessageQueue and ObjectKey become objects, also as keys; int keys stay unquoted.

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
            yield _key_text(key, depth)
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


def _key_text(key: Any, depth: int) -> bytes:
    if isinstance(key, MessageQueue):
        return _queue_object(key)
    if isinstance(key, ObjectKey):
        return b"".join(_pieces(key, depth + 1))
    if isinstance(key, (str, int)):
        return orjson.dumps(key)
    raise TypeError(f"a JSON key is text, a whole number, a MessageQueue or an ObjectKey, not {key!r}")


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
    """Read a queue from an object, or from the text of an object, which some clients write as a key."""
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
