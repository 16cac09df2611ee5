"""The code of the page about Spark runs unchanged, and the page names every option and column."""

from __future__ import annotations

import ast
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pyrocket_consumer.spark.data_source import PUSHES_FILTERS, READ_SCHEMA
from pyrocket_consumer.spark.options import NAMES
from pyrocket_consumer.spark.sink_rows import BATCH_ID, PARTITION, QUERY_ID, ROW, WRITE_COLUMNS
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import until
from tests.for_each import for_each

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
EXAMPLES = PAGE.parent / "examples"


@pytest.fixture
def orders() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as cluster:
        for topic in ("orders", "invoices", "counts"):
            cluster.create_topic(topic, queues=2)
        cluster.send("orders", lambda number: b"order %d" % number, count=20, tags="paid")
        yield cluster


class Reader:
    """Runs blocks of the page as a reader would, in a session, until queries have processed all messages."""

    def __init__(self, spark: Any, cluster: EmbeddedCluster, directory: Path) -> None:
        self._spark, self._cluster, self.directory = spark, cluster, directory
        self.database = ""

    def run(self, words: str) -> dict[str, Any]:
        """Run the only block with these words. A query runs until it is stopped."""
        (block,) = [block for block in BLOCKS if words in block]
        text = block.replace("127.0.0.1:9876", self._cluster.name_server).replace("/data", str(self.directory))
        text = text.replace("query.awaitTermination()", "query.processAllAvailable()")
        text = text.replace("postgresql://app@127.0.0.1/app", self.database)
        names: dict[str, Any] = {"spark": self._spark}
        exec(compile(text, str(PAGE), "exec"), names)
        return names


@pytest.fixture
def page(spark: Any, orders: EmbeddedCluster, tmp_path: Path) -> Iterator[Reader]:
    yield Reader(spark, orders, tmp_path)
    for query in spark.streams.active:
        query.stop()


def test_reading_a_batch(page, capfd):
    page.run("orders.selectExpr")
    assert "order 19" in capfd.readouterr().out


def test_a_stream_into_files(page, spark):
    page.run('format("parquet")')
    assert spark.read.parquet(str(page.directory / "orders")).count() == 20


def test_writing_a_batch(page, orders):
    page.run("invoices = ")
    found = orders.messages("invoices")
    assert sorted(m.body for m in found) == [b'{"id":"o-1","amount":120}', b'{"id":"o-2","amount":80}']
    assert {m.tags for m in found} == {"paid"}
    assert sorted(key for m in found for key in m.keys) == ["o-1", "o-2"]


def test_counts_by_window(page, orders, monkeypatch):
    hurried = [block.replace("10 seconds", "0 seconds").replace("1 minute", "1 second") for block in BLOCKS]
    monkeypatch.setattr(f"{__name__}.BLOCKS", hurried)
    query = page.run("withWatermark")["query"]

    def counted() -> bool:
        orders.send("orders", b"later", tags="later")
        query.processAllAvailable()
        return any(b'"tags":"paid","count":20' in message.body for message in orders.messages("counts"))

    until(counted, "the window of the first orders is closed")


def test_batches_into_files(page, spark):
    page.run("files_in")
    found = spark.read.parquet(str(page.directory / "files"))
    assert found.count() == 20 and "batch" in found.columns


def test_batches_into_a_database(page):
    page.run("count_tags")
    with sqlite3.connect(page.directory / "tags.db") as connection:
        assert connection.execute("select * from tags").fetchall() == [("paid", 20)]
    connection.close()


@pytest.mark.databases("postgresql")
def test_rows_into_postgresql(page, orders, database):
    orders.send("orders", b"odd", tags="of\0other\0words")
    url = database.url.replace("+psycopg", "")
    page.database = url
    page.run("foreachPartition")
    with psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from messages").fetchone() == (21,)
        assert connection.execute("select tags from messages where body = 'odd'").fetchone() == ("ofotherwords",)


def test_lag(page, capsys):
    names = page.run("LagListener")
    assert "0 offsets behind in 2 queues" in capsys.readouterr().out
    assert names["lag"](names["query"].lastProgress).total == 0


@pytest.mark.skipif(not PUSHES_FILTERS, reason="this release of PySpark pushes no filters")
def test_filters_that_are_pushed(page, spark, capsys):
    page.run("recent.count")
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert "20 paid in the last hour" in capsys.readouterr().out


def test_registering(page, spark):
    page.run("register(spark)")


def test_every_block_is_run_here():
    source = Path(__file__).read_text()
    words = re.findall(r"page\.run\((.+?)\)\n|page\.run\((.+?)\)\[", source)
    ran = [ast.literal_eval(one or other) for one, other in words]
    ran.append("txnAppId")  # run in test_delta.py, with another session
    assert all(any(each in block for each in ran) for block in BLOCKS)
    assert len(ran) == len(BLOCKS)


MARKS = (QUERY_ID, BATCH_ID, PARTITION, ROW)


@for_each("name", [*NAMES, *READ_SCHEMA.fieldNames(), *WRITE_COLUMNS, *MARKS])
def test_the_page_names(name):
    assert f"`{name}`" in TEXT


def test_options_are_listed_in_the_order_of_the_page():
    table = TEXT[TEXT.index("| option | default |") : TEXT.index("## Columns")]
    cells = [row.split("|")[1] for row in table.splitlines()[2:] if row]
    shown = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert list(dict.fromkeys(shown)) == list(NAMES)


def test_the_example_program_is_what_the_page_shows():
    program = (EXAMPLES / "spark_files.py").read_text()
    (block,) = [block for block in BLOCKS if "def files_in" in block]
    shown = block[block.index("def files_in") : block.index("query = ")].strip()
    code = [line for line in program.splitlines() if '"""Return a function for foreachBatch' not in line]
    lines = "\n".join(code)
    for part in filter(None, (part.strip() for part in shown.split("\n\n"))):
        compact = re.sub(r"\n+", "\n", lines)
        assert re.sub(r"\n+", "\n", part) in compact


@for_each("link", re.findall(r"\]\(([^)#]+)\)", TEXT))
def test_links_lead_somewhere(link):
    assert link.startswith("https://") or (PAGE.parent / link).exists()
