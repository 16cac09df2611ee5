"""Sums per customer in a database, exact whatever is killed in between: results and batch id are one transaction.

python spark_sqlite.py 127.0.0.1:9876 orders /data/orders
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

TABLES = """
create table if not exists batches (id integer primary key);
create table if not exists sums (customer text primary key, amount integer not null);
"""


def sums_in(database: Path):
    """Return a function for foreachBatch: it adds a batch to the sums, once, however often the batch is repeated."""

    def write(batch: DataFrame, batch_id: int) -> None:
        customer, amount = f.split(f.decode("body", "UTF-8"), " ")[0], f.split(f.decode("body", "UTF-8"), " ")[1]
        sums = batch.groupBy(customer.alias("customer")).agg(f.sum(amount.cast("long")).alias("amount"))
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(TABLES)
            with connection:  # one transaction: both, or none
                if connection.execute("insert or ignore into batches values (?)", (batch_id,)).rowcount:
                    connection.executemany(
                        "insert into sums values (?, ?) on conflict do update set amount = amount + excluded.amount",
                        [tuple(row) for row in sums.toLocalIterator()],
                    )

    return write


def main(name_server: str, topic: str, directory: str) -> None:
    spark = SparkSession.builder.appName("sums of orders").getOrCreate()
    orders = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    query = (
        orders.writeStream.foreachBatch(sums_in(Path(directory, "sums.db")))
        .option("checkpointLocation", str(Path(directory, "checkpoint")))
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
