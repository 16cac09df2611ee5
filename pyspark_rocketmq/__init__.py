"""Register `format("rocketmq")` in Spark, which searches for `DefaultSource` in every module named `pyspark_…`.

If one such module cannot be imported, Spark registers none of them. So this module imports nothing until Spark needs
`DefaultSource`. In an incomplete installation, that attribute is missing.
"""


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pyrocket_consumer.spark.data_source import RocketMQDataSource
    except ImportError as error:
        raise AttributeError(f"{__name__}.DefaultSource needs a package that is not installed: {error}") from error
    return RocketMQDataSource
