"""One Spark session for all tests of this folder. Spark runs in a Java process, and in several Python processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from pyrocket_consumer.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]

DELTA = "PYROCKET_SPARK_DELTA"
"""The variable that names the Maven package of Delta for the installed release of Spark."""

NOT_BEGUN = "Python worker failed to connect back"
"""Spark's error when a Python process did not start within 10 s, as on a busy machine. No setting changes the limit."""

_left_out = pytest.StashKey[str]()

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # compile quickly: queries are short
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.pollingDelay": "10ms",
    "spark.sql.streaming.noDataProgressEventInterval": "100",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "false",
    "spark.python.worker.faulthandler.enabled": "false",
    "spark.python.authenticate.socketTimeout": "120s",  # machines may be busy
    "spark.log.level": "ERROR",
}
"""The settings of every session of the tests, also in other processes."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark_versions: runs on the oldest release of Spark, too (make spark-versions)")
    config.addinivalue_line("markers", "spark_connect: needs pyspark[connect] (make spark-connect)")
    config.addinivalue_line("markers", "spark_delta: needs Delta, made for some Sparks (make spark-versions)")
    if version("pyspark").startswith(("4.0.", "4.1.")):  # they leave the sockets of collect() to the collector
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


def _java_runs() -> bool:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
    try:
        return subprocess.run([str(java), "-version"], capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need Spark if there is no Java. With CI=true they must run."""
    with_spark = {item for item in items if {"spark", "spark_environment"} & set(getattr(item, "fixturenames", ()))}
    if not with_spark:
        return
    for item in with_spark:
        item.add_marker("real")
    if config.option.markexpr == "unit":
        return
    why = "" if _java_runs() else "there is no Java; `make system-packages` installs it"
    if why and os.environ.get("CI") == "true":
        raise pytest.UsageError(f"tests with Spark cannot run: {why}")
    lacking = {
        "spark_connect": "" if find_spec("grpc") is not None else "pyspark[connect] is not installed",
        "spark_delta": "" if DELTA in os.environ else f"{DELTA} does not name Delta's package",
    }
    reasons = {
        item: reason
        for item in with_spark
        for name, reason in lacking.items()
        if reason and item.get_closest_marker(name)
    }
    left_out = with_spark if why else reasons.keys()
    if not left_out:
        return
    config.stash[_left_out] = f"{len(left_out)} tests: {why or '; '.join(sorted(set(reasons.values())))}"
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(_left_out, ""):
        terminalreporter.write_sep("=", "SPARK WAS NOT (WHOLLY) TESTED", yellow=True, bold=True)
        terminalreporter.write_line(left_out)


@pytest.fixture
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """A cluster with the module's CLUSTER options, and a topic `orders` with the queues and messages of ORDERS."""
    with EmbeddedCluster(**getattr(request.module, "CLUSTER", {})) as cluster:
        if orders := getattr(request.module, "ORDERS", None):
            cluster.create_topic("orders", queues=orders["queues"])
            cluster.send("orders", lambda number: b"%d" % number, count=orders["count"])
        yield cluster


@pytest.fixture
def started_run(embedded: EmbeddedCluster) -> Iterator[Callable[..., Any]]:
    """`started_run(**options)` starts a query of `orders` at its first message, and runs the first batch of it."""
    from tests.spark.spark_calls import FROM_FIRST, running

    with ExitStack() as runs:

        def begin(*checkpoint: Any, **options: Any) -> Any:
            run = runs.enter_context(running(embedded, *checkpoint, **{**FROM_FIRST, **options}))
            run.batch()
            return run

        yield begin


@pytest.fixture
def sink(embedded: EmbeddedCluster) -> Iterator[Callable[..., Any]]:
    """`sink(**options)` makes a sink of `orders`; None removes an option. Its producer is closed at the end."""
    from pyrocket_consumer.spark.options import parse_sink
    from tests.spark.writing import Sink

    with ExitStack() as made:

        def make(**options: object) -> Any:
            given = {"nameServer": embedded.name_server, "topic": "orders", **options}
            texts = {name: str(value) for name, value in given.items() if value is not None}
            return made.enter_context(closing(Sink(parse_sink(texts))))

        yield make


@pytest.fixture(autouse=True)
def connections_end() -> Iterator[None]:
    """Close the connections that a worker keeps between tasks, so that no thread outlives its test."""
    yield
    if "pyrocket_consumer.spark.executor_cache" in sys.modules:
        sys.modules["pyrocket_consumer.spark.executor_cache"].close_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test again, at most twice, if Spark did not start a Python process in time."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(3):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if attempt == 2 or not any(each.failed and NOT_BEGUN in each.longreprtext for each in reports):
            break
        item._initrequest()  # type: ignore[attr-defined]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session")
def spark_environment() -> Iterator[dict[str, str]]:
    """The environment in which Spark finds this interpreter and these sources. This process uses it, too."""
    ours = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        yield dict(os.environ)


@pytest.fixture(scope="session")
def spark(spark_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two task threads. It finds the data source by itself, as in an installation."""
    from pyspark.sql import SparkSession

    settings: dict[str, Any] = {**SETTINGS, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    if DELTA in os.environ:
        settings |= {
            "spark.jars.packages": os.environ[DELTA],
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.databricks.delta.snapshotPartitions": "2",
        }
    builder = SparkSession.builder.master("local[2]").appName("pyrocket_consumer tests")
    session = builder.config(map=settings).getOrCreate()
    yield session
    session.stop()
