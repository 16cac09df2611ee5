"""RocketMQ for PySpark: the data source `rocketmq`, and how far a query is behind."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyrocket_consumer.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyrocket_consumer.spark.query_lag import Lag, LagListener, lag

__all__ = ["Lag", "LagListener", "lag", "register"]


def register(spark: SparkSession, *, ship: bool = False) -> None:
    """Make `format("rocketmq")` known to a session. Where this package is installed, newer sessions know it already.

    With `ship` the package travels to Spark's other processes, also to the one that plans streams, which does not see
    `--py-files`. What it depends on (filelock, orjson, numpy, pyarrow) must be installed there. Where the package is
    installed, too, that one is used.

    Raises:
        ConfigError: a package that this needs is not installed; the text says how to install it.
    """
    source = _module("shipping").shipped_source() if ship else _module("data_source").RocketMQDataSource
    spark.dataSource.register(source)


def _module(name: str) -> Any:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed for {sys.executable}: pip install 'pyrocket-consumer[spark]'"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_module("query_lag"), name)
