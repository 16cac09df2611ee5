"""The source in a real Spark session, for behaviour that needs Spark."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import StreamingQueryException

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import until
from tests.for_each import for_each
from tests.spark import recorded
from tests.spark.spark_calls import flatten, with_options

CLUSTER = {"brokers": 2}
ORDERS = {"queues": 2, "count": 40}
RELEASE = tuple(map(int, pyspark.__version__.split(".")[:2]))


def reading(reader: Any, cluster: EmbeddedCluster, *, format: str = "rocketmq", **options: object) -> Any:  # noqa: A002
    """Return a DataFrameReader or DataStreamReader for the topic, set up as a user does."""
    return with_options(reader, cluster, **{"subscribe": "orders", "planningIntervalMs": 10, **options}).format(format)


class Query:
    """A streaming query that writes files, and its checkpoint. It can be restarted."""

    def __init__(self, spark: Any, folder: Path, cluster: EmbeddedCluster, **options: object) -> None:
        self.spark, self.cluster, self.options = spark, cluster, {"startingOffsets": "earliest", **options}
        self.checkpoint, self.output = folder / "checkpoint", folder / "output"

    def run(self, change: Callable[[Any], Any] = lambda frame: frame, **options: object) -> Any:
        """Read all messages, and stop; return the query."""
        query = self.start(change, {"availableNow": True}, **options)
        with contextlib.suppress(StreamingQueryException):  # the query has the same error
            query.awaitTermination(250)
        assert not query.isActive
        return query

    def catch_up(self, **options: object) -> None:
        """Read all messages. Before 4.2 a run is a single batch, which may be a repeated one."""
        for _ in range(1 if RELEASE >= (4, 2) else 2):
            assert self.run(**options).exception() is None

    def start(self, change: Any = lambda frame: frame, trigger: Any = None, **options: object) -> Any:
        stream = reading(self.spark.readStream, self.cluster, **{**self.options, **options}).load()
        writer = change(stream.select("brokerName", "queueId", "queueOffset", "body")).writeStream
        writer = writer.format("parquet").option("path", str(self.output))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def rows(self) -> list[tuple[str, int, int]]:
        found = self.spark.read.parquet(str(self.output)).collect()
        return sorted((row.brokerName, row.queueId, row.queueOffset) for row in found)

    def planned(self) -> list[dict[str, Any]]:
        """Return the end of each batch, as it is in the checkpoint."""
        numbers = sorted(int(path.name) for path in (self.checkpoint / "offsets").iterdir() if path.name.isdigit())
        texts = [(self.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1] for number in numbers]
        return [json.loads(text) for text in texts]

    def finished(self) -> int:
        folder = self.checkpoint / "commits"
        return sum(path.name.isdigit() for path in folder.iterdir()) if folder.exists() else 0


def each_once(high: int, low: int = 0) -> list[tuple[str, int, int]]:
    return [(b, q, offset) for b in ("broker-a", "broker-b") for q in (0, 1) for offset in range(low, high)]


def fail_in_read(frame: Any) -> Any:
    """Fail every task that has read a message."""
    from pyspark.sql import functions as f

    return frame.where(f.raise_error("the task crashed").isNull())


@pytest.mark.spark_versions
def test_a_crash_in_any_batch_is_repeated_exactly(spark, embedded, tmp_path):
    """Batch 0 and a later one crash while they read. The start of a new query would move meanwhile."""
    query = Query(spark, tmp_path, embedded)
    crashed = query.run(fail_in_read)
    assert "the task crashed" in str(crashed.exception())
    assert (len(query.planned()), query.finished()) == (1, 0)
    embedded.send("orders", count=8)
    query.catch_up(startingOffsets="latest")  # the options apply to new queries only
    assert query.rows() == each_once(12)
    assert flatten(query.planned()[0]) == dict.fromkeys(flatten(query.planned()[0]), 10)

    embedded.send("orders", count=4)
    batches = len(query.planned())
    assert query.run(fail_in_read).exception() is not None
    embedded.send("orders", count=4)
    query.catch_up()
    assert query.rows() == each_once(14)
    assert flatten(query.planned()[batches]) == dict.fromkeys(flatten(query.planned()[0]), 13)

    batches = len(query.planned())
    assert query.run().exception() is None
    assert len(query.planned()) == batches


@pytest.mark.spark_versions
def test_a_recreated_topic_is_read_completely(spark, embedded, tmp_path):
    query = Query(spark, tmp_path, embedded, failOnDataLoss="false", requestTimeoutMs=500)
    query.catch_up()
    assert query.rows() == each_once(10)
    embedded.delete_topic("orders")
    embedded.create_topic("orders", queues=2)
    embedded.send("orders", count=24)
    query.catch_up()
    embedded.send("orders", count=24)
    query.catch_up()
    assert query.rows() == sorted(each_once(10) + each_once(12))


@pytest.mark.spark_versions
def test_the_order_in_which_spark_calls(spark, embedded, tmp_path):
    """The reader depends on this order, and tests without Spark imitate it (tests/spark/spark_calls.py)."""
    spark.dataSource.register(recorded.RecordedSource)
    file = tmp_path / "calls"
    query = Query(spark, tmp_path, embedded, format="recorded", path=str(file))

    def run() -> list[str]:
        file.unlink(missing_ok=True)
        started = query.start(trigger={"processingTime": "100 milliseconds"})
        for _ in range(2):
            batches = query.finished()
            embedded.send("orders", count=4)
            until(lambda batches=batches: query.finished() > batches or started.exception(), "a batch is finished", 60)
        started.stop()
        assert started.exception() is None
        return recorded.calls(file)

    first, again = run(), run()
    if RELEASE < (4, 2):
        assert first[:3] == ["latestOffset", "initialOffset", "partitions"]
        assert again[0] == "partitions: none"
        later = ["latestOffset", "commit", "partitions"]
    else:
        assert first[:3] == ["initialOffset", "latestOffset", "reportLatestOffset"]
        assert first[3:5] == ["initialOffset", "partitions"]
        assert not again[0].startswith("initialOffset")
        later = ["latestOffset", "reportLatestOffset", "commit", "partitions"]
    working = [call for call in first[3:] if "nothing new" not in call]
    assert " ".join(later) in " ".join(working)


def test_a_run_to_the_end_ends_while_messages_arrive(spark, embedded, tmp_path):
    query = Query(spark, tmp_path, embedded, maxOffsetsPerTrigger=15)
    with ThreadPoolExecutor() as pool:
        task = pool.submit(query.run)
        while not task.done():
            embedded.send("orders", count=4)
            time.sleep(0.05)
    ended = task.result()
    assert ended.exception() is None
    assert len(query.planned()) >= 3
    high = flatten(query.planned()[-1])
    rows = query.rows()
    assert len(rows) == len(set(rows)) == sum(high.values())
    assert all(offset < high[f"orders/{broker}/{queue_id}"] for broker, queue_id, offset in rows)


@pytest.mark.spark_versions
def test_a_query_follows_new_messages_and_its_group_follows_it(spark, embedded, tmp_path):
    query = Query(spark, tmp_path, embedded, consumerGroup="app")
    started = query.start()

    def committed() -> set[int]:
        return {at for each in embedded.brokers for at in embedded.committed("app", "orders", each.name).values()}

    embedded.wait_until(lambda: committed() == {10}, 120)  # also of the last batch, when the query is idle
    embedded.send("orders", count=4)
    embedded.wait_until(lambda: committed() == {11}, 120)
    began = time.monotonic()
    started.stop()
    assert time.monotonic() - began < 30
    assert started.exception() is None
    assert query.rows() == each_once(11)
    source = started.recentProgress[-1]["sources"][0]
    assert "HUSH" not in json.dumps(started.recentProgress, default=str)
    assert source["endOffset"] is not None


def test_a_projection_reads_only_named_columns(spark, embedded):
    frame = reading(spark.read, embedded).schema("queueOffset long, body binary").load()
    assert frame.columns == ["queueOffset", "body"]
    assert sorted(int(bytes(row.body)) for row in frame.collect()) == list(range(40))
    wrong = reading(spark.read, embedded).schema("offset long").load()
    with pytest.raises(Exception, match="column 'offset' is unknown; there are topic string, brokerName string"):
        wrong.collect()


def test_a_table_is_the_same_for_all_actions(spark, embedded):
    frame = reading(spark.read, embedded).load()
    assert frame.count() == 40
    embedded.send("orders", count=4)
    assert frame.count() == 40
    assert reading(spark.read, embedded).load().count() == 44


def test_a_view_can_be_queried(spark, embedded):
    reading(spark.read, embedded).load().createOrReplaceTempView("orders_view")
    found = spark.sql("select brokerName, queueId, count(*) as n from orders_view group by all order by all").collect()
    assert [tuple(row) for row in found] == [(b, q, 10) for b in ("broker-a", "broker-b") for q in (0, 1)]
    spark.catalog.dropTempView("orders_view")


@for_each(
    "options, text",
    [
        ({"nameServer": None}, "nameServer is missing"),
        ({"subscribe": None}, "no topic to read: give one of the options subscribe, subscribePattern and assign"),
        ({"startingOffset": "latest"}, "option 'startingoffset' is unknown; did you mean startingOffsets?"),
        ({"commitOffsets": True}, "commitOffsets=true needs a group"),
    ],
)
def test_wrong_options_are_raised_by_load(spark, embedded, options, text):
    with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as refused:
        reading(spark.readStream, embedded, **options).load()
    assert text in str(refused.value)


def test_options_that_a_stream_cannot_have_are_raised_once(spark, embedded, tmp_path):
    ended = None
    with contextlib.suppress(Exception):  # awaitTermination raises it, too
        query = Query(spark, tmp_path, embedded, endingOffsets="latest")
        ended = query.start()
        ended.awaitTermination(60)
    assert ended is not None
    assert "endingOffsets is for batch reads" in str(ended.exception())
    assert "UnboundLocalError" not in str(ended.exception())


def test_plans_and_progress_show_no_secret(spark, tmp_path):
    secrets, shown = {"accessKey": "HUSH-access", "secretKey": "HUSH-secret"}, io.StringIO()
    with EmbeddedCluster(account=tuple(secrets.values())) as cluster, contextlib.redirect_stdout(shown):
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", count=3)
        frame = reading(spark.read, cluster, **secrets).load()
        assert frame.count() == 3
        for mode in ("extended", "formatted", "codegen", "cost"):
            frame.explain(mode=mode)
        query = Query(spark, tmp_path, cluster, **secrets)
        ended = query.run()
        ended.explain(extended=True)
        assert query.rows() == [("broker-a", 0, 0), ("broker-a", 0, 1), ("broker-a", 0, 2)]
    texts = shown.getvalue() + str(ended.recentProgress) + (tmp_path / "checkpoint/offsets/0").read_text()
    assert len(shown.getvalue()) > 1000
    assert "HUSH" not in texts
