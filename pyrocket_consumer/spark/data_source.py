"""The data source `rocketmq`: the columns of a read, the readers and writers for Spark, and a copy that travels.

Spark's processes get the data source's class, and later readers and writers, as pickles. A pickle contains the whole
code of functions and classes that are made inside a function, and not their names only. So `shipped_source` makes them
inside one. They carry the package's sources, and make them importable before anything else is unpickled.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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

import pyrocket_consumer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.spark import sink
from pyrocket_consumer.spark.batch_reader import BatchReader, FilteredBatchReader
from pyrocket_consumer.spark.options import check_options, parse_sink, parse_source
from pyrocket_consumer.spark.stream_reader import RefusedStreamReader, StreamReader

T = TypeVar("T")

_PACKAGE = pyrocket_consumer.__name__
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


# --- processes without this package


def shipped_source() -> type[DataSource]:
    """Return a data source like RocketMQDataSource that works in processes without this package."""
    install = _installer(zlib.compress(pickle.dumps(_sources())))

    def load(pickled: bytes) -> Any:
        install()
        kind, state = pickle.loads(pickled)  # noqa: S301  # Spark unpickles it anyway
        made = kind.__new__(kind)
        made.__dict__.update(state)
        return made

    def travelling(made: T) -> T:
        """Return `made`, changed so that its pickle can be loaded in any process."""
        kind = type(made)
        made.__class__ = type(
            kind.__name__,
            (kind,),
            {"__reduce__": lambda self: (load, (pickle.dumps((kind, self.__dict__)),)), "__module__": kind.__module__},
        )
        return made

    class ShippedSource(DataSource):
        def __init__(self, options: Mapping[str, str]) -> None:
            super().__init__(dict(options))
            self._source()

        def _source(self) -> DataSource:
            install()
            from pyrocket_consumer.spark.data_source import RocketMQDataSource

            return RocketMQDataSource(self.options)

        @classmethod
        def name(cls) -> str:
            return "rocketmq"

        def schema(self) -> StructType | str:
            return self._source().schema()

        def reader(self, schema: StructType) -> DataSourceReader:
            return travelling(self._source().reader(schema))

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            return travelling(self._source().streamReader(schema))

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            return travelling(self._source().writer(schema, overwrite))

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
            return travelling(self._source().streamWriter(schema, overwrite))

    return ShippedSource


def _sources() -> dict[str, tuple[bool, str]]:
    """Return, by module name, whether the module is a package, and its source text."""
    root = Path(pyrocket_consumer.__file__).parent
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = (_PACKAGE, *path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        sources[".".join(parts[:-1] if is_package else parts)] = (is_package, path.read_text())
    return sources


def _installer(packed: bytes) -> Callable[[], None]:
    """Return a function that makes the package importable in the calling process, unless it is installed there.

    It writes nothing to a disk, where another user could replace it.
    """
    package = _PACKAGE

    def install() -> None:
        import importlib.abc
        import importlib.util
        import pickle
        import sys
        import zlib

        if package in sys.modules or importlib.util.find_spec(package) is not None:
            return
        sources: dict[str, tuple[bool, str]] = pickle.loads(zlib.decompress(packed))  # noqa: S301

        class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
                if name not in sources:
                    return None
                return importlib.util.spec_from_loader(name, self, is_package=sources[name][0])

            def create_module(self, spec: Any) -> None:
                return None

            def exec_module(self, module: Any) -> None:
                name = module.__name__
                module.__file__ = f"<shipped>/{name.replace('.', '/')}.py"
                exec(compile(sources[name][1], module.__file__, "exec"), module.__dict__)  # noqa: S102

        sys.meta_path.append(Importer())

    return install
