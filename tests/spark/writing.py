"""The sink as Spark's tasks use it, without Spark."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
from pyspark.sql import Row, types
from pyspark.sql.pandas.types import to_arrow_schema

from pyrocket_consumer.producer import Producer
from pyrocket_consumer.spark import executor_cache
from pyrocket_consumer.spark.options import SinkOptions
from pyrocket_consumer.spark.sink import BatchWriter, StreamRowWriter

TYPES: dict[str, types.DataType] = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "long": types.LongType(),
    "timestamp": types.TimestampType(),
    "timestamp_ntz": types.TimestampNTZType(),
    "array<string>": types.ArrayType(types.StringType()),
    "map<string,string>": types.MapType(types.StringType(), types.StringType()),
    "map<string,int>": types.MapType(types.StringType(), types.IntegerType()),
}


def columns(text: str) -> types.StructType:
    """Return the schema for a text in Spark's DDL, without a session."""
    named = (column.split() for column in text.split(", "))
    return types.StructType([types.StructField(name, TYPES[kind]) for name, kind in named])


class Sink:
    """A sink with its options; `write` makes the calls of Spark for a batch of one task."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, schema: str | types.StructType, *rows: tuple[Any, ...], kind: Any = BatchWriter) -> int:
        parsed = columns(schema) if isinstance(schema, str) else schema
        driver = kind(parsed, self.options)
        writer = pickle.loads(pickle.dumps(driver))
        if kind is StreamRowWriter:
            handed: Any = [Row(*parsed.fieldNames())(*row) for row in rows]
        else:
            handed = batches(parsed, rows)
        sent = pickle.loads(pickle.dumps(writer.write(iter(handed))))
        driver.commit([sent], *([] if kind is BatchWriter else [0]))
        return int(sent.rows)

    def close(self) -> None:
        def none() -> Producer:
            return Producer(name_server="127.0.0.1:1")

        executor_cache.get_or_create(Producer, self.options, none).close()
        executor_cache.discard(Producer, self.options)


def batches(schema: types.StructType, rows: Any, most: int = 10_000) -> list[pa.RecordBatch]:
    arrow = to_arrow_schema(schema, timezone="Europe/Berlin")
    found = []
    for first in range(0, len(rows), most):
        values = zip(*rows[first : first + most], strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(values, arrow, strict=True)]
        found.append(pa.RecordBatch.from_arrays(arrays, schema=arrow))
    return found
