"""The example programs for foreachBatch store every message exactly once, although batches crash."""

from __future__ import annotations

import importlib.util
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from pyrocket_consumer.testing import EmbeddedCluster
from tests.spark.conftest import NOT_BEGUN
from tests.spark.spark_calls import FROM_FIRST, with_options

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MESSAGES = 300


@pytest.fixture
def orders() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=3)
        cluster.send("orders", lambda number: b"c%d %d" % (number % 7, number), count=MESSAGES)
        yield cluster


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Crash(Exception):
    """The end of a process, from a query's point of view."""


def crash(*ignored: Any) -> None:
    raise Crash


class Crashing:
    """Calls a function of foreachBatch. In some batches it crashes once instead of the call, and once after it."""

    def __init__(self, write: Callable[[Any, int], None], instead: dict[int, Any], after: set[int]) -> None:
        self._write, self._instead, self._after = write, instead, after
        self.began: list[int] = []

    def __call__(self, batch: Any, batch_id: int) -> None:
        self.began.append(batch_id)
        if batch_id in self._instead:
            self._instead.pop(batch_id)(batch, batch_id)
            crash()
        self._write(batch, batch_id)
        if batch_id in self._after:
            self._after.remove(batch_id)
            crash()


def run(spark: Any, cluster: EmbeddedCluster, directory: Path, write: Any) -> int:
    """Run a query until all messages are read, and restart it after each crash; return the number of crashes.

    On a busy machine Spark may end a query because its Python process started too late. That is no crash.
    """
    crashes = 0
    for _ in range(30):
        stream = with_options(spark.readStream, cluster, **FROM_FIRST, maxOffsetsPerTrigger="100").load().writeStream
        query = stream.foreachBatch(write).option("checkpointLocation", str(directory / "checkpoint")).start()
        try:
            query.processAllAvailable()
            return crashes
        except StreamingQueryException as error:
            if NOT_BEGUN not in str(error):
                crashes += 1
            elif "FOREACH_BATCH" in str(error):
                raise  # the batch has begun, and would count twice; pytest runs the test again
        finally:
            query.stop()
    raise AssertionError("the query never got through")


def bodies_in(directory: Path) -> Counter[str]:
    files = [pq.ParquetFile(path) for path in directory.glob("batch=*/*.parquet")]
    return Counter(body.decode() for file in files for body in file.read(["body"]).column("body").to_pylist())


def expected() -> Counter[str]:
    return Counter(f"c{number % 7} {number}" for number in range(MESSAGES))


def test_files_hold_every_message_once(spark, orders, tmp_path):
    """A killed process may have left files that it did not rename."""
    files = tmp_path / "files"
    half = lambda batch, batch_id: batch.limit(5).write.parquet(str(files / f"_new-{batch_id}"))  # noqa: E731
    crashing = Crashing(example("spark_files").files_in(files), {0: half, 1: crash}, {2})
    assert run(spark, orders, tmp_path, crashing) == 3
    assert len(crashing.began) > len(set(crashing.began))
    assert bodies_in(files) == expected()


@pytest.mark.databases("postgresql")
def test_postgresql_has_every_message_once(spark, orders, tmp_path, database):
    """A repeated batch may be new to the database, or some of its tasks may have committed."""
    url = database.url.replace("+psycopg", "")
    write = example("spark_postgres").rows_in(url)
    half = lambda batch, batch_id: write(batch.where("queueId = 1"), batch_id)  # noqa: E731
    crashing = Crashing(write, {0: half}, {2})
    assert run(spark, orders, tmp_path, crashing) == 2
    assert crashing.began.count(0) == crashing.began.count(2) == 2
    with psycopg.connect(url) as connection:
        bodies = Counter(body.decode() for (body,) in connection.execute("select body from messages"))
    assert bodies == expected()


def test_a_database_counts_every_message_once(spark, orders, tmp_path, monkeypatch):
    """A crash inside the transaction stores nothing. A crash before or after it has no effect."""
    module, path = example("spark_sqlite"), tmp_path / "sums.db"
    connect, crashed = sqlite3.connect, []

    class Connection(sqlite3.Connection):
        def executemany(self, *arguments: Any) -> Any:
            done = super().executemany(*arguments)
            if not crashed:
                crashed.append(1)
                crash()
            return done

    monkeypatch.setattr(module.sqlite3, "connect", lambda path: connect(path, factory=Connection))
    write = Crashing(module.sums_in(path), {1: crash}, {2})
    assert run(spark, orders, tmp_path, write) == 3
    with closing(connect(path)) as connection:
        sums = dict(connection.execute("select customer, amount from sums"))
        batches = [row[0] for row in connection.execute("select id from batches order by id")]
    assert sums == {f"c{customer}": sum(range(customer, MESSAGES, 7)) for customer in range(7)}
    assert batches == sorted(set(write.began))
