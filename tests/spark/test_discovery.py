"""Spark finds the data source installed, registered, or shipped. Each test runs in its own process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.spark.conftest import ROOT, SETTINGS

SESSION = f"""
import os, sys
from pyspark.sql import SparkSession
from pyrocket_consumer.testing import EmbeddedCluster

def session(master):
    return SparkSession.builder.master(master).config(map={SETTINGS!r}).getOrCreate()

def reading(reader, cluster, form="rocketmq", **options):
    options = {{"nameServer": cluster.name_server, "subscribe": "orders", **options}}
    return reader.format(form).options(**options)

def filled(cluster):
    cluster.create_topic("orders", queues=2)
    cluster.send("orders", count=20)

def read_and_write(spark, cluster):
    frame = reading(spark.read, cluster).load()
    print("batch:", frame.count())
    to = {{"nameServer": cluster.name_server, "topic": "copies"}}
    cluster.create_topic("copies", queues=1)
    frame.select("body").write.format("rocketmq").options(**to).mode("append").save()
    print("written:", len(cluster.messages("copies")))
    stream = reading(spark.readStream, cluster, startingOffsets="earliest").load().select("body").writeStream
    query = stream.format("rocketmq").options(**to, checkpointLocation="checkpoint").trigger(availableNow=True).start()
    query.awaitTermination(120)
    print("streamed:", len(cluster.messages("copies")), query.exception())
"""

READ_AND_WRITTEN = "batch: 20\nwritten: 20\nstreamed: 40 None\n"
"""The output of a process that has read and written successfully."""

BLOCKED = """
import os, sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        blocked = name.split(".")[0] in os.environ["TEST_BLOCKED"].split()
        return None if blocked else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

if "TEST_BLOCKED" in os.environ:
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""A sitecustomize that hides modules, as if they were not installed."""


def run(code: str, environment: dict[str, str], path: Path, blocked: str = "") -> str:
    """Run Python in a process that finds modules in `path` first, and does not find those in `blocked`."""
    environment = {**environment, "PYTHONPATH": f"{path}:{ROOT}"}
    if blocked:
        environment["TEST_BLOCKED"] = blocked
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    return tmp_path


@pytest.mark.live
def test_the_module_that_spark_searches_imports_nothing(folder):
    code = """
        import sys
        before = set(sys.modules)
        import pyspark_rocketmq
        print(sorted(set(sys.modules) - before))
        assert pyspark_rocketmq.DefaultSource.name() == "rocketmq"
    """
    assert run(code, {}, folder).strip() == "['pyspark_rocketmq']"


@pytest.mark.live
@pytest.mark.parametrize("missing", ["pyarrow", "pyrocket_consumer", "orjson"])
def test_an_incomplete_installation_does_not_hide_other_sources(folder, missing):
    """Spark calls hasattr on every module, which only handles AttributeError."""
    code = """
        import pyspark_rocketmq
        assert not hasattr(pyspark_rocketmq, "DefaultSource")
        try:
            pyspark_rocketmq.DefaultSource
        except AttributeError as error:
            print(error)
    """
    output = run(code, {}, folder, blocked=missing)
    assert f"pyspark_rocketmq.DefaultSource needs a package that is not installed: No module named '{missing}" in output


@pytest.mark.live
@pytest.mark.parametrize(
    ("missing", "call"),
    [("pyarrow", "register(None)"), ("pyspark", "register(None, ship=True)"), ("pyspark", "LagListener")],
)
def test_a_missing_package_is_named_with_its_install_command(folder, missing, call):
    code = f"""
        import pyrocket_consumer.spark
        try:
            pyrocket_consumer.spark.{call}
        except pyrocket_consumer.ConfigError as error:
            print(error)
    """
    output = run(code, {}, folder, blocked=missing)
    assert output == f"{missing} is not installed for {sys.executable}: pip install 'pyrocket-consumer[spark]'\n"


@pytest.mark.timeout(280)
def test_it_can_be_registered_although_another_source_is_broken(folder, spark_environment):
    """Spark registers no source if one module fails. This also tests that crashing tasks return each message once."""
    (folder / "pyspark_broken.py").write_text("import not_installed")
    code = """
spark = session("local[2,3]")
with EmbeddedCluster() as cluster:
    filled(cluster)
    try:
        reading(spark.read, cluster).load()
    except Exception as error:
        print("not found:", "DATA_SOURCE_NOT_FOUND" in str(error) or "not_installed" in str(error))
    from pyrocket_consumer.spark import register
    register(spark)
    frame = reading(spark.read, cluster).load()
    print("registered:", frame.count())
    from tests.spark.recorded import RecordedSource, calls
    from pathlib import Path
    spark.dataSource.register(RecordedSource)
    rows = reading(spark.read, cluster, "recorded", path="calls", minPartitions=2).load().collect()
    print("rows:", len(rows), len({(row.queueId, row.queueOffset) for row in rows}))
    print("attempts:", sorted(calls(Path("calls"))))
spark.stop()
"""
    output = run(SESSION + code, spark_environment, folder)
    assert "not found: True" in output
    assert "registered: 20" in output
    assert "rows: 20 20" in output
    assert f"attempts: {[f'read: attempt {n}' for n in (0, 0, 1, 1, 2, 2)]}" in output


@pytest.mark.timeout(280)
def test_it_can_be_shipped_to_processes_without_it(folder, spark_environment):
    """It reads a batch, writes, and reads a stream, whose source runs in a process without --py-files."""
    code = """
os.environ["TEST_BLOCKED"] = "pyrocket_consumer pyspark_rocketmq"  # in all processes that Spark starts
spark = session("local[2]")
from pyrocket_consumer.spark import register
with EmbeddedCluster() as cluster:
    filled(cluster)
    try:
        reading(spark.read, cluster).load()
    except Exception as error:
        print("not found:", "DATA_SOURCE_NOT_FOUND" in str(error))
    register(spark, ship=True)
    read_and_write(spark, cluster)
spark.stop()
"""
    output = run(SESSION + code, spark_environment, folder)
    assert "not found: True" in output
    assert READ_AND_WRITTEN in output


@pytest.mark.spark_connect
@pytest.mark.timeout(280)
def test_it_is_found_on_a_server_of_spark_connect(folder, spark_environment):
    code = """
spark = session("local[2]")
assert "connect" in type(spark).__module__
with EmbeddedCluster() as cluster:
    filled(cluster)
    read_and_write(spark, cluster)
spark.stop()
"""
    connect = SESSION.replace("builder.master(master)", "builder.remote(master)")
    assert READ_AND_WRITTEN in run(connect + code, spark_environment, folder)
