"""The data source `rocketmq`: the columns of a read, and the readers and writers for Spark."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
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
from pyrocket_consumer.spark import sink
from pyrocket_consumer.spark.batch_reader import BatchReader, FilteredBatchReader
from pyrocket_consumer.spark.options import check_options, parse_sink, parse_source
from pyrocket_consumer.spark.stream_reader import RefusedStreamReader, StreamReader

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
_MAY_BE_NULL = frozenset({"tags", "keys", "bornTimestamp", "storeTimestamp"})

READ_SCHEMA = StructType([StructField(name, kind) for name, kind in _TYPES.items()])
"""Every column, as `docs/spark.md` describes them."""

PUSHES_FILTERS = hasattr(DataSourceReader, "pushFilters")
"""False before PySpark 4.1, where Spark does not pass filters to readers."""


class RocketMQDataSource(DataSource):
    """Reads and writes RocketMQ topics: `spark.readStream.format("rocketmq").option("subscribe", "orders")…`.

    Spark creates one for every query and, in a sink, for every batch. So it only checks options. Its repr does not show
    them, because they may hold secrets.

    Raises:
        ConfigError: an option is unknown or wrong.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        check_options(options)

    def __repr__(self) -> str:
        return "RocketMQDataSource()"

    @classmethod
    def name(cls) -> str:
        """Return the name to pass to `format`."""
        return "rocketmq"

    def schema(self) -> StructType:
        """Return the columns to read when the user names none.

        Raises:
            ConfigError: no option chooses topics or queues to read.
        """
        parse_source(self.options, streaming=None)
        return project_schema(None)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch.

        Raises:
            ConfigError: the options or the columns are wrong, or this release of PySpark pushes no filters.
        """
        options = parse_source(self.options, streaming=False)
        if not options.push_filters:
            return BatchReader(options, project_schema(schema))
        if not PUSHES_FILTERS:
            raise ConfigError("option pushFilters=true needs PySpark 4.1 or newer; remove it, or install that")
        return FilteredBatchReader(options, project_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream. With wrong options, its first call raises the error."""
        try:
            return StreamReader(parse_source(self.options, streaming=True), project_schema(schema))
        except ConfigError as error:
            return RefusedStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch.

        Raises:
            ConfigError: the options or the columns are wrong, or `overwrite` is true.
        """
        sink.check_overwrite(overwrite)
        return sink.BatchWriter(schema, parse_sink(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream. `overwrite` means output mode complete, whose results are all sent.

        Raises:
            ConfigError: the options or the columns are wrong.
        """
        writer: DataSourceStreamWriter = sink.StreamWriter(schema, parse_sink(self.options))
        return writer


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


def _same_type(given: DataType, wanted: DataType) -> bool:
    if isinstance(given, MapType) and isinstance(wanted, MapType):  # no value is null, so NOT NULL makes no difference
        return given.keyType == wanted.keyType and given.valueType == wanted.valueType
    return given == wanted


def _columns() -> str:
    return ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items())
