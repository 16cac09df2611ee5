"""Every message of a topic in Parquet files, exactly once, whatever is killed in between.

python spark_files.py 127.0.0.1:9876 orders /data/orders
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


def files_in(directory: Path):
    """Return a function for foreachBatch: each batch becomes a directory of its own, there as a whole or not at all."""

    def write(batch: DataFrame, batch_id: int) -> None:
        done, new = directory / f"batch={batch_id}", directory / f"_new-{batch_id}"
        if done.exists():  # a batch that is repeated after a crash has the same messages
            return
        batch.write.mode("overwrite").parquet(str(new))
        new.rename(done)

    return write


def main(name_server: str, topic: str, directory: str, most_per_batch: str = "100000") -> None:
    spark = SparkSession.builder.appName("orders to files").getOrCreate()
    orders = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", most_per_batch)
        .load()
    )
    query = (
        orders.writeStream.foreachBatch(files_in(Path(directory, "files")))
        .option("checkpointLocation", str(Path(directory, "checkpoint")))
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
