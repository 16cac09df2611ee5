"""The sink in a real Spark session, for behaviour that needs Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import numbered
from tests.for_each import for_each
from tests.spark.spark_calls import with_options

SEND = RequestCode.SEND_MESSAGE_V2
MARKS = ("spark_query_id", "spark_batch_id", "spark_partition", "spark_row")


def stream(spark: Any, cluster: Any, topic: str, **options: Any) -> Any:
    return with_options(spark.readStream, cluster, subscribe=topic, startingOffsets="earliest", **options).load()


def read(spark: Any, cluster: Any, topic: str) -> Any:
    return with_options(spark.read, cluster, subscribe=topic).load()


def copy(frame: Any, cluster: Any, topic: str, checkpoint: Path) -> Any:
    """Write all current rows of `frame` to a topic; return the ended query."""
    writer = with_options(frame.writeStream, cluster, topic=topic, checkpointLocation=str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def marks(message: Any) -> tuple[str, ...]:
    return tuple(message.properties[name] for name in MARKS)


@pytest.mark.versions("5.5.0", "4.9.7")
def test_messages_go_through_a_stream_and_are_read_back(spark, cluster, names, tmp_path):
    first, second = names.topic("first"), names.topic("second")
    for topic in (first, second):
        cluster.create_topic(topic, queues=2)
    for queue_id in range(2):
        cluster.send(
            first, b"order", count=20, tags="paid", keys=["k1", "k2"], properties={"region": "eu"}, queue_id=queue_id
        )
    orders = stream(spark, cluster, first, tags="paid || open").drop("brokerName", "queueId")
    query = copy(orders, cluster, second, tmp_path / "checkpoint")
    copied = read(spark, cluster, second)
    rows = copied.collect()
    assert [bytes(row["body"]) for row in rows] == [b"order"] * 40
    assert {(row["tags"], row["keys"], row["properties"]["region"]) for row in rows} == {("paid", "k1 k2", "eu")}
    marks = {tuple(row["properties"][name] for name in MARKS) for row in rows}
    assert len(marks) == 40
    assert {each[0] for each in marks} == {str(query.id)}
    copy(orders, cluster, second, tmp_path / "checkpoint")
    assert copied.count() == 40, "the query went on where it was: there was nothing new"


@pytest.mark.spark_versions
def test_a_batch_that_runs_again_marks_its_duplicates(spark, embedded, tmp_path):
    for topic in ("first", "second"):
        embedded.create_topic(topic, queues=2)
    embedded.send("first", lambda number: b"m%d" % number, count=30)
    orders = stream(spark, embedded, "first").select("body")
    copy(orders, embedded, "second", tmp_path)
    first_checkpoint = {marks(message): message.body for message in embedded.messages("second")}
    assert sorted(first_checkpoint.values()) == sorted(numbered(30))
    for name in ("0", ".0.crc"):
        (tmp_path / "commits" / name).unlink()  # as if the driver had died before the commit
    copy(orders, embedded, "second", tmp_path)
    again = embedded.messages("second")
    assert len(again) == 60
    assert {marks(message): message.body for message in again} == first_checkpoint


def batch(spark: Any, cluster: EmbeddedCluster, sql: str, mode: str = "append", **options: Any) -> None:
    with_options(spark.sql(sql).write, cluster, **options).mode(mode).save()


@for_each(
    "sql, options, text",
    [
        ("SELECT 'x' AS value", {"topic": "orders"}, "no column 'value'"),
        ("SELECT 'x' AS body", {}, "set the option topic"),
        ("SELECT 'x' AS body", {"topic": "orders", "mode": "overwrite"}, 'use mode("append")'),
        ("SELECT 'x' AS body", {"topic": "orders", "maxInFlight": "0"}, "maxInFlight='0'"),
        ("SELECT 'x' AS body", {"topic": "orders", "sendTimeout": "1"}, "did you mean sendTimeoutMs"),
        ("SELECT cast(null AS string) AS body", {"topic": "orders"}, "row 0 of partition 0: body is null"),
        ("SELECT 'x' AS body", {"topic": "no-such-topic", "sendTimeoutMs": "500"}, "autoCreateTopic=true"),
        ("SELECT 'x' AS body, 'a\\u0001' AS shardingKey", {"topic": "orders"}, "row 0 of partition 0: shardingKey"),
    ],
)
def test_wrong_writes_are_refused(spark, embedded, sql, options, text):
    embedded.create_topic("orders")
    with pytest.raises(PySparkException) as raised:
        batch(spark, embedded, sql, **options)
    assert text in str(raised.value)
    assert not embedded.messages("orders")


def test_a_batch_that_was_read_is_written_and_read_again(spark, embedded):
    for topic in ("first", "second"):
        embedded.create_topic(topic, queues=2)
    given = {"region": "eu", "empty": ""}
    embedded.send("first", b"x", count=4, tags="t", keys=["k1", "k2"], properties=given, queue_id=1)

    changed = "map_concat(properties, map('none', cast(null AS string), '__RMQ.TRANSIENT.a', 'b')) AS properties"
    frame = read(spark, embedded, "first").selectExpr("* except (topic, properties)", changed, "'' AS shardingKey")
    with_options(frame.write, embedded, topic="second").mode("append").save()
    rows = read(spark, embedded, "second").select("tags", "keys", "queueId", "body", "properties").collect()
    assert [(*row[:3], bytes(row["body"])) for row in rows] == [("t", "k1 k2", 1, b"x")] * 4
    assert [(row["properties"].get("region"), row["properties"].get("none")) for row in rows] == [("eu", None)] * 4


def test_a_query_ends_with_an_error_that_names_the_row(spark, embedded, tmp_path):
    embedded.create_topic("first")
    embedded.send("first", b"x")
    with pytest.raises(PySparkException) as raised:
        copy(stream(spark, embedded, "first").selectExpr("nullif(body, body) AS body"), embedded, "second", tmp_path)
    assert "body is null; filter such rows out" in str(raised.value)


def test_tasks_keep_their_connections(spark, embedded):
    embedded.create_topic("orders")
    broker = embedded.broker("broker-a")
    batch(spark, embedded, "SELECT 'x' AS body WHERE false", topic="orders")
    assert not broker.connections, "there are no rows"
    assert not broker.requests(SEND)
    for _ in range(6):
        batch(spark, embedded, "SELECT 'x' AS body", topic="orders")
    assert len(embedded.messages("orders")) == 6
    assert len(broker.connections) <= 2, "one for each worker process"


def test_a_thread_can_write_once_the_session_is_active_there(spark, embedded):
    embedded.create_topic("orders", queues=1)
    numbers, outcomes = spark.range(3).selectExpr("string(id) AS body"), []

    def write(prepare: Callable[[], object]) -> None:
        prepare()
        try:
            outcomes.append(with_options(numbers.write, embedded, topic="orders").mode("append").save())
        except Exception as error:  # an error of Spark, from Java
            outcomes.append("DATA_SOURCE_NOT_FOUND" in str(error))

    for prepare in (lambda: None, lambda: spark.createDataFrame([], "x int")):
        thread = threading.Thread(target=write, args=(prepare,))
        thread.start()
        thread.join(60)
    assert outcomes == [True, None], "what docs/spark.md says of threads is true no more"
    assert len(embedded.messages("orders")) == 3
