"""The data source `rocketmq`: what Spark asks for readers and writers."""

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

    Made anew for every query and, in a sink, every batch, so it does nothing but look at options. It does not show
    them: secrets are among them.

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
        """Return what comes after `format`."""
        return "rocketmq"

    def schema(self) -> StructType:
        """Return the columns to read when the user names none.

        Raises:
            ConfigError: the options do not say what to read.
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
            raise ConfigError("option pushFilters=true needs PySpark 4.1 or newer; leave it out, or install that")
        return FilteredBatchReader(options, project_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream; what is wrong with the options it says itself."""
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
        """Return the writer of a stream; `overwrite` tells of output mode complete, whose results are all sent.

        Raises:
            ConfigError: the options or the columns are wrong.
        """
        options = parse_sink(self.options)
        sink.check_schema(schema, options)
        return sink.stream_writer(schema, options)
