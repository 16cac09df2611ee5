"""RocketMQ for PySpark: the data source `rocketmq`, and how far a query is behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyrocket_consumer.spark.query_lag import Lag, LagListener, lag

__all__ = ["Lag", "LagListener", "lag", "register"]


def register(spark: SparkSession, *, ship: bool = False) -> None:
    """Make `format("rocketmq")` known to a session. Where this package is installed, newer sessions know it already.

    With `ship` the package travels to Spark's other processes, also to the one that plans streams, which does not see
    `--py-files`. What it depends on (filelock, orjson, numpy, pyarrow) must be installed there. Where the package is
    installed, too, that one is used.
    """
    if ship:
        from pyrocket_consumer.spark.shipping import shipped_source

        spark.dataSource.register(shipped_source())
    else:
        from pyrocket_consumer.spark.data_source import RocketMQDataSource

        spark.dataSource.register(RocketMQDataSource)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyrocket_consumer.spark import query_lag

    return getattr(query_lag, name)
