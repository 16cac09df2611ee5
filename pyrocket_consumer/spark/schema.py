"""The columns of a read, and the selection that a user makes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyrocket_consumer.errors import ConfigError

_TYPES: dict[str, DataType] = {
    "topic": StringType(),
    "brokerName": StringType(),
    "queueId": IntegerType(),
    "queueOffset": LongType(),
    "msgId": StringType(),
    "tags": StringType(),
    "keys": StringType(),
    "body": BinaryType(),
    "properties": MapType(StringType(), StringType()),
    "flag": IntegerType(),
    "sysFlag": IntegerType(),
    "reconsumeTimes": IntegerType(),
    "bornTimestamp": TimestampType(),
    "storeTimestamp": TimestampType(),
    "bornHost": StringType(),
    "storeHost": StringType(),
}
# Spark before 4.2 has no such parameter, and timestamps are in UTC.
_IN_UTC: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
_MAY_BE_NULL = frozenset({"tags", "keys", "bornTimestamp", "storeTimestamp"})

READ_SCHEMA = StructType([StructField(name, kind) for name, kind in _TYPES.items()])
"""Every column, as `docs/spark.md` describes them."""


def project_schema(schema: StructType | None) -> StructType:
    """Return the columns to read: those of the user's `schema`, or all when it is None.

    Spark does not pass the columns that a query uses to a Python source. A user selects them with
    `.schema("queueOffset long, body binary")`; other columns then cost nothing.

    Raises:
        ConfigError: a column is unknown, is named twice, has another type, or is NOT NULL although it can be null.
    """
    if schema is None:
        return READ_SCHEMA
    if not schema.fields:
        raise ConfigError(f"the schema has no column; name at least one of {_columns()}")
    for field in schema.fields:
        wanted = _TYPES.get(field.name)
        if wanted is None:
            raise ConfigError(f"column {field.name!r} is unknown; there are {_columns()}")
        if schema.names.count(field.name) > 1:
            raise ConfigError(f"column {field.name!r} is named twice; name each column once")
        if not _same_type(field.dataType, wanted):
            raise ConfigError(
                f"column {field.name!r} is {wanted.simpleString()}, not {field.dataType.simpleString()}; "
                f"there are {_columns()}"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise ConfigError(f"column {field.name!r} is null for a message without one; remove NOT NULL")
    return schema


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return `schema` exactly as Spark compares it."""
    return to_arrow_schema(schema, **_IN_UTC)


def _same_type(given: DataType, wanted: DataType) -> bool:
    if isinstance(given, MapType) and isinstance(wanted, MapType):  # no value is null, so NOT NULL makes no difference
        return given.keyType == wanted.keyType and given.valueType == wanted.valueType
    return given == wanted


def _columns() -> str:
    return ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items())
