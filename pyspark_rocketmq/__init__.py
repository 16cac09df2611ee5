"""Makes `format("rocketmq")` known to Spark, which looks for `DefaultSource` in every module named `pyspark_…`.

If one such module cannot be imported, Spark registers none of them. So nothing is imported before it is asked for,
and what an incomplete installation lacks is an attribute that is not there.
"""


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pyrocket_consumer.spark.data_source import RocketMQDataSource
    except ImportError as error:
        raise AttributeError(f"{__name__}.DefaultSource needs what is not installed: {error}") from error
    return RocketMQDataSource
