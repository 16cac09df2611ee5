"""Messages as rows in PostgreSQL, each once, whatever is killed in between: a row's key is where its message is.

python spark_postgres.py 127.0.0.1:9876 orders postgresql://app@127.0.0.1/app /data/checkpoint
"""

import sys
from collections.abc import Callable, Iterable

import psycopg
from pyspark.sql import DataFrame, Row, SparkSession, functions

TABLE = """
create table if not exists messages (
    topic text, broker_name text, queue_id integer, queue_offset bigint, tags text, body bytea,
    primary key (topic, broker_name, queue_id, queue_offset)
)
"""
COLUMNS = "topic", "brokerName", "queueId", "queueOffset", "tags", "body"


def rows_in(database: str) -> Callable[[DataFrame, int], None]:
    """Return a function for foreachBatch: it puts a batch into the table; what is there already stays as it is."""

    def write_part(rows: Iterable[Row]) -> None:
        with psycopg.connect(database) as connection, connection.cursor() as cursor:  # one transaction for each task
            cursor.execute("create temporary table new (like messages) on commit drop")
            with cursor.copy("copy new from stdin") as copy:
                for row in rows:
                    copy.write_row(row)
            cursor.execute("insert into messages select * from new on conflict do nothing")

    def write(batch: DataFrame, batch_id: int) -> None:
        tags = functions.translate("tags", "\0", "")  # PostgreSQL has no text with NUL in it
        batch.withColumn("tags", tags).select(*COLUMNS).foreachPartition(write_part)

    with psycopg.connect(database) as connection:
        connection.execute(TABLE)
    return write


def main(name_server: str, topic: str, database: str, checkpoint: str) -> None:
    spark = SparkSession.builder.appName("messages as rows").getOrCreate()
    messages = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    query = messages.writeStream.foreachBatch(rows_in(database)).option("checkpointLocation", checkpoint).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
