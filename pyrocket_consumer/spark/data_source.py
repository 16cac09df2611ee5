"""The data source `rocketmq`, which makes readers and writers for Spark."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.spark import sink
from pyrocket_consumer.spark.options import check_options, parse_sink, parse_source
from pyrocket_consumer.spark.pyspark_names import PUSHES_FILTERS
from pyrocket_consumer.spark.schema import project_schema
from pyrocket_consumer.spark.source import BatchReader, FilteredBatchReader, RefusedStreamReader, StreamReader


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
        options = parse_sink(self.options)
        sink.check_schema(schema, options)
        return sink.batch_writer(schema, options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream. `overwrite` means output mode complete, whose results are all sent.

        Raises:
            ConfigError: the options or the columns are wrong.
        """
        options = parse_sink(self.options)
        sink.check_schema(schema, options)
        return sink.stream_writer(schema, options)
