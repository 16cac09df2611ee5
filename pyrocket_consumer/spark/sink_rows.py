"""Rows of a DataFrame as messages: the columns that a sink takes, and the message of each row."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, repeat
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampType,
    VarcharType,
)

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer import RESERVED_PROPERTIES, OutgoingMessage
from pyrocket_consumer.producer.outgoing_message import TRANSIENT_PREFIX
from pyrocket_consumer.spark.options import SinkOptions, with_option_names
from pyrocket_consumer.text import logger

log = logger("spark")

QUERY_ID, BATCH_ID, PARTITION, ROW = "spark_query_id", "spark_batch_id", "spark_partition", "spark_row"
"""User properties of a message that together identify its row; see `dedupProperties`."""

_TEXT = (StringType, VarcharType, CharType)
_NUMBER = (ByteType, ShortType, IntegerType, LongType)

WRITE_COLUMNS = {
    "body": "string or binary",
    "topic": "string",
    "tags": "string",
    "keys": "string or array<string>",
    "shardingKey": "string",
    "brokerName": "string",
    "queueId": "int",
    "delayLevel": "int",
    "deliverAt": "timestamp",
    "properties": "map<string,string>",
    "flag": "int",
}
"""The columns that the sink takes, and their types."""

_IGNORED = frozenset(
    {
        "queueOffset",
        "msgId",
        "sysFlag",
        "reconsumeTimes",
        "bornTimestamp",
        "storeTimestamp",
        "bornHost",
        "storeHost",
    }
)  # columns of the read schema, so that a frame that was read can be written

_warned: set[str] = set()  # the properties that this worker has logged

_PART_ROWS = 1024  # limits the number of Python objects at a time


@dataclass(slots=True)
class SinkRow:
    """One row, ready for a producer. Rows of the same `lane` stay in order; None means no order."""

    number: int
    topic: str
    message: OutgoingMessage
    queue: MessageQueue | None
    sharding_key: str | None
    delay_level: int
    deliver_at: datetime | None
    lane: tuple[str, object] | None


def check_schema(schema: StructType, options: SinkOptions) -> None:
    """Check that rows of `schema` can be messages.

    Raises:
        ConfigError: a column is missing, is unknown, or has the wrong type.
    """
    names = schema.fieldNames()
    for name in names:
        if name not in WRITE_COLUMNS and name not in _IGNORED:
            near = difflib.get_close_matches(name.lower(), [known.lower() for known in WRITE_COLUMNS], 1)
            meant = next((f" (did you mean {known!r}?)" for known in WRITE_COLUMNS if near == [known.lower()]), "")
            raise ConfigError(
                f"the rocketmq sink has no column {name!r}{meant}; it takes {_takes()}; rename the column, or drop it"
            )
        if names.count(name) > 1:
            raise ConfigError(f"the frame has {names.count(name)} columns {name!r}; keep one of them")
    for field in schema.fields:
        if field.name in WRITE_COLUMNS and not _has_type(field.name, field.dataType):
            raise ConfigError(
                f"column {field.name!r} is {field.dataType.simpleString()}; the rocketmq sink takes "
                f"{WRITE_COLUMNS[field.name]}; cast it"
            )
    if "body" not in names:
        raise ConfigError(f"the rocketmq sink needs a column 'body' (string or binary); there are {', '.join(names)}")
    if options.topic is None and "topic" not in names:
        raise ConfigError("no topic to write to; set the option topic, or add a column 'topic'")
    for one, other in (("brokerName", "queueId"), ("queueId", "brokerName")):
        if one in names and other not in names:
            raise ConfigError(f"column {one!r} also needs {other!r}, because both name a queue; add it, or drop both")


def _takes() -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in WRITE_COLUMNS.items())


def _has_type(name: str, kind: DataType) -> bool:
    match name:
        case "body":
            return isinstance(kind, (*_TEXT, BinaryType))
        case "keys":
            return isinstance(kind, _TEXT) or (isinstance(kind, ArrayType) and isinstance(kind.elementType, _TEXT))
        case "properties":
            return isinstance(kind, MapType) and isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _TEXT)
        case "queueId" | "delayLevel" | "flag":
            return isinstance(kind, _NUMBER)
        case "deliverAt":
            return isinstance(kind, TimestampType)
        case _:
            return isinstance(kind, _TEXT)


class RowReader:
    """Makes SinkRows of the batches or rows of one task, in order. It adds `marks` to each row's properties.

    With marks, it adds each row's number in the task, too.
    """

    def __init__(self, schema: StructType, options: SinkOptions, partition: int, marks: Mapping[str, str]) -> None:
        names = schema.fieldNames()
        self._topic = options.topic
        unused = {"topic"} if options.topic is not None else set[str]()
        self._columns = {name: names.index(name) for name in WRITE_COLUMNS if name in names and name not in unused}
        self._partition = partition
        self._marks = dict(marks)
        self._number = 0

    def of_batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[SinkRow]:
        """Read Arrow batches."""
        for whole in batches:
            for first in range(0, whole.num_rows, _PART_ROWS):
                batch = whole.slice(first, _PART_ROWS)
                columns = {name: self._values(name, batch.column(index)) for name, index in self._columns.items()}
                yield from self._rows(columns, batch.num_rows)

    def of_rows(self, rows: Iterable[Row]) -> Iterator[SinkRow]:
        """Read Spark's rows, for releases that pass no Arrow batches."""
        rows = iter(rows)
        while part := list(islice(rows, _PART_ROWS)):
            values = list(zip(*part, strict=True))
            yield from self._rows({name: values[index] for name, index in self._columns.items()}, len(part))

    def _values(self, name: str, column: pa.Array) -> list[Any]:
        """Return a column's values.

        Raises:
            ConfigError: Python cannot represent one of them; the text names its row.
        """
        try:
            return _values(name, column)
        except (ValueError, OverflowError):
            for index in range(len(column)):
                try:
                    _values(name, column.slice(index, 1))
                except UnicodeDecodeError as error:
                    what = f"is not text in UTF-8: {error.object!r:.100}; decode it, or put it into the body"
                except (ValueError, OverflowError) as error:
                    what = f"is not a time in the years 1 to 9999 ({error}); filter such rows out before writing"
                else:
                    continue
                raise ConfigError(f"{self.describe_row(self._number + index)}: column {name!r} {what}") from None
            raise

    def _rows(self, columns: Mapping[str, Sequence[Any]], count: int) -> Iterator[SinkRow]:
        def values(name: str) -> Iterable[Any]:
            return columns.get(name) or repeat(None, count)

        topics = repeat(self._topic, count) if self._topic is not None else values("topic")
        for body, topic, tags, keys, sharding_key, broker_name, queue_id, delay_level, deliver_at, given, flag in zip(
            values("body"),
            topics,
            values("tags"),
            values("keys"),
            values("shardingKey"),
            values("brokerName"),
            values("queueId"),
            values("delayLevel"),
            values("deliverAt"),
            values("properties"),
            values("flag"),
            strict=True,
        ):
            number = self._number
            self._number = number + 1
            if body is None or topic is None:
                what = "topic" if topic is None else "body"
                raise ConfigError(f"{self.describe_row(number)}: {what} is null; filter such rows out before writing")
            queue = None
            if broker_name is not None or queue_id is not None:
                if broker_name is None or queue_id is None:
                    raise ConfigError(
                        f"{self.describe_row(number)}: brokerName is {broker_name!r} and queueId is {queue_id!r}; "
                        "give both for a queue of your choice, or neither"
                    )
                if sharding_key:
                    raise ConfigError(
                        f"{self.describe_row(number)}: brokerName with queueId, and shardingKey={sharding_key!r}, both "
                        "choose the queue; make one of them null, or drop its columns"
                    )
                queue = MessageQueue(topic, broker_name, queue_id)
            try:
                message = OutgoingMessage(
                    body if type(body) is bytes else _bytes(body),
                    tags or None,
                    () if not keys else keys.split() if isinstance(keys, str) else [key for key in keys if key],
                    self._properties(given, number),
                    flag or 0,
                )
            except ConfigError as error:
                raise ConfigError(self.describe_error(number, error)) from None
            pin = queue or sharding_key or None
            yield SinkRow(
                number,
                topic,
                message,
                queue,
                sharding_key or None,
                delay_level or 0,
                deliver_at if deliver_at is None or deliver_at.tzinfo is not None else deliver_at.astimezone(UTC),
                None if pin is None else (topic, pin),
            )

    def describe_row(self, number: int) -> str:
        """Return the name of a row for an error's text."""
        return f"row {number} of partition {self._partition}"

    def describe_error(self, number: int, error: BaseException) -> str:
        """Return an error's text with its row, and with Spark's names of columns and options."""
        return f"{self.describe_row(number)}: {with_option_names(str(error))}"

    def _properties(self, given: Any, number: int) -> Mapping[str, str] | None:
        """Return a row's properties, without those that RocketMQ writes itself or does not transport."""
        properties, reserved = {}, []
        if given:
            for name, value in given.items() if isinstance(given, dict) else given:
                if name in RESERVED_PROPERTIES or name.startswith(TRANSIENT_PREFIX):
                    reserved.append(name)
                elif value is not None and value != "":
                    properties[name] = value
        if reserved and not _warned.issuperset(reserved):
            _warn_once(reserved)
        if self._marks:
            properties.update(self._marks)
            properties[ROW] = str(number)
        return properties


def _warn_once(reserved: Iterable[str]) -> None:
    """Log that these properties are not written, unless a task of this worker has logged it."""
    kinds = {TRANSIENT_PREFIX + "…" if name.startswith(TRANSIENT_PREFIX) else name for name in reserved}
    if new := sorted(kinds - _warned):
        _warned.update(new)
        log.warning(
            "properties %s are not written, because they belong to RocketMQ; use the columns tags, keys and "
            "shardingKey, or properties with other names",
            ", ".join(new),
        )


def _bytes(body: str | bytearray | memoryview) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


def _values(name: str, column: pa.Array) -> list[Any]:
    """Return a column's values; times have a zone, independent of the session's."""
    if name == "body":
        column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    elif name == "deliverAt":
        column = column.cast(pa.timestamp("us", tz="UTC"))
    values: list[Any] = column.to_pylist()
    return values
