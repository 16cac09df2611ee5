"""RocketMQ for PySpark: the data source `rocketmq`, and the lag of a query."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyrocket_consumer.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyrocket_consumer.spark.progress import Lag, LagListener, lag

__all__ = ["Lag", "LagListener", "lag", "register"]


def register(spark: SparkSession, *, ship: bool = False) -> None:
    """Register `format("rocketmq")` in a session. A newer session finds it by itself if this package is installed.

    With `ship`, Spark's other processes get a copy of this package. That includes the process that plans streams, which
    does not see `--py-files`. The dependencies (filelock, orjson, numpy, pyarrow) must be installed there. A process
    uses its installed package, if it has one, and not the copy.

    Raises:
        ConfigError: a required package is not installed; the text names the command that installs it.
    """
    module = _module("data_source")
    spark.dataSource.register(module.shipped_source() if ship else module.RocketMQDataSource)


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
    return getattr(_module("progress"), name)
