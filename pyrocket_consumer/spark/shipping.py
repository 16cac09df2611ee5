"""Send this package to Spark processes that do not have it, inside the pickles that Spark sends anyway.

Spark's processes get the data source's class, and later readers and writers, as pickles. A pickle contains the whole
code of functions and classes that are made inside a function, and not their names only. So this module makes them
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
from pyspark.sql.types import StructType

import pyrocket_consumer

T = TypeVar("T")

_PACKAGE = pyrocket_consumer.__name__


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
