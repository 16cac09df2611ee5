"""The benchmarks run as their pages describe. These tests do not check speed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each

ROOT = Path(__file__).parents[1]


def ended(program, *arguments, timeout_s=60):
    command = [sys.executable, "-m", f"benchmarks.{program}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def run(program, *arguments):
    done = ended(program, *arguments, timeout_s=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def measured(tmp_path):
    """Run a program with `--json`, and return its output and its figures."""

    def run_it(program, *arguments, cluster=None):
        figures = tmp_path / "figures.json"
        where = [] if cluster is None else ["--name-server", cluster.name_server]
        return run(program, *arguments, *where, "--json", str(figures)), json.loads(figures.read_text())

    return run_it


@pytest.fixture
def cluster():
    with EmbeddedCluster(delay_scale=0.01) as embedded:
        yield embedded


PROGRAMS = [
    "consume",
    "produce",
    "order_by_key",
    "exactly_once",
    "offset_persist",
    "decode",
    "drop_in",
    "start_close",
    "spark_read",
    "spark_pushdown",
    "spark_write",
    "cores",
]
long = pytest.mark.slow("measures for half a minute and more", proof=True)
pytestmark = [pytest.mark.live, pytest.mark.slow("starts programs that measure")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_the_question_and_the_options(program):
    text = run(program, "--help")
    assert "?" in text
    assert "--json" in text


def test_offset_persist_measures_what_its_table_shows(measured, tmp_path):
    options = ["--no-java", "--rounds", "2", "--queues", "16", "--threads", "1"]
    printed, figures = measured("offset_persist", *options, "--directory", str(tmp_path))
    assert "fsync ÷ disk" in printed
    (case,) = figures["persist"]
    assert case["queues"] == 16
    assert set(case["us_per_persist"]) == {"disk", "fsync", "process", "checkpoint"}
    assert all(len(each["rounds"]) == 2 and min(each["rounds"]) > 0 for each in case["us_per_persist"].values())


@long
def test_start_close_measures_imports_starts_and_a_close(measured):
    _, figures = measured("start_close", "--quick")
    assert set(figures["import_ms"]) == {"asyncio and ssl", "the package", "PushConsumer", "Producer", "Admin"}
    assert min(figures["import_ms"].values()) > 0
    cases = figures["cases"]
    assert [(each["case"], each["queues"]) for each in cases] == [("start", 100), ("start", 500), ("close", 100)]
    assert all(len(each["seconds"]) == 1 and each["seconds"][0] > 0 for each in cases)


def test_decode_measures_every_way_and_each_step(measured):
    printed, found = measured("decode", "--rounds", "2")
    assert {each["way"] for each in found["results"]} >= {"eager", "lazy", "walk lengths"}
    assert {each["body_bytes"] for each in found["results"]} == {100, 1024, 10240}
    steps = [each["step"] for each in found["steps"]]
    assert steps == ["decode", "body", "five properties", "one property", "all", "ack"]
    accelerated = found["environment"]["accelerated"]
    for each in found["steps"]:
        assert set(each["ns"]) == ({"accelerated", "pure"} if accelerated else {"pure"})
        assert ("times_quicker" in each) == accelerated
        assert all(summary["median"] > 0 for summary in each["ns"].values())
    assert "five properties" in printed


@long
def test_drop_in_measures_the_facade_and_the_library_below(measured, cluster):
    printed, found = measured("drop_in", "--quick", "--sides", "facade,api", cluster=cluster)
    rounds = found["rounds"]
    assert set(rounds) == {"consume", "read", "send", "raising"}
    assert all(set(sides) == {"facade", "api"} for sides in rounds.values())
    assert {(each["raised"], each["redelivered"]) for (each,) in rounds["raising"].values()} == {(16, 16)}
    assert "consume: CPU ÷ api" in printed


@long
def test_consume_measures_the_chosen_sides(measured, cluster):
    options = ["--quick", "--cases", "one,touched,lists,lists-touched,sleep", "--sides", "pyrocket,pure,threads,before"]
    sizes = ["--queues", "4", "--messages", "60000", "--sleep-messages", "5000"]
    printed, found = measured("consume", *options, *sizes, "--before", str(ROOT), cluster=cluster)
    for case, sides in found["rounds"].items():
        assert set(sides) == {"pyrocket", "pure", "before"} | ({"threads"} if "sleeps" in case else set())
        assert all(answer["messages"] > 0 and answer["cpu_s"] >= 0 for (answer,) in sides.values())
        assert sides["pure"][0]["accelerated"] is False
    assert len(found["rounds"]) == 5
    wanted = {each["text"]: (each["wanted"], each["at_least"]) for each in found["targets"]}
    assert wanted["listener sleeps 1 ms, 16 queues: rate ÷ threads"] == (0.9, True)
    assert wanted["one by one, 4 queues: rate of pure ÷ before"] == (0.97, True)
    assert not any("java" in text for text in wanted)
    meanings = printed.partition("\nwhat a ratio means\n")[2]
    assert "÷ threads" in meanings
    assert "÷ java" not in meanings
    assert "accelerated" in printed.splitlines()[0] or "pure Python" in printed.splitlines()[0]


@long
def test_cores_measures_one_and_two_members_of_a_group(measured, cluster):
    options = ["--quick", "--cases", "no-op,touched", "--queues", "4", "--messages", "40000"]
    printed, found = measured("cores", *options, cluster=cluster)
    rounds = found["rounds"]
    assert len(rounds) == 2
    for sides in rounds.values():
        assert set(sides) == {"1 process", "2 processes"}
        assert all(answer["messages"] > 0 and answer["cpu_s"] > 0 for (answer,) in sides.values())
        assert all(answer["broker_cpu_s"] is None for (answer,) in sides.values())  # the broker runs elsewhere
    assert "2 ÷ 1" in printed


def test_spark_reads_and_compares_with_prepared_batches(tmp_path):
    pytest.importorskip("pyspark")
    from benchmarks.recorded_broker import recorded
    from benchmarks.spark_sources import ReadySource

    records = tmp_path / "records"
    records.write_bytes(b"".join(recorded(2048)))
    source = ReadySource({"records": str(records), "queues": "2", "messages": "3000"})
    reader = source.reader(source.schema())
    assert [[batch.num_rows for batch in reader.read(each)] for each in reader.partitions()] == 2 * [[2048, 952]]


def test_spark_pushdown_has_messages_of_the_reported_age():
    pytest.importorskip("pyspark")
    from benchmarks.spark_pushdown import timed_broker
    from benchmarks.timed_broker import FIRST_MS
    from pyrocket_consumer.spark.data_source import READ_SCHEMA, RocketMQDataSource
    from pyrocket_consumer.spark.executor_cache import close_all

    with timed_broker(1000, 1000) as address:
        options = {"nameserver": address, "subscribe": "orders-2", "startingtimestamp": str(FIRST_MS + 990_000)}
        reader = RocketMQDataSource(options).reader(READ_SCHEMA)
        rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        close_all()
    found = [(row["queueId"], row["queueOffset"], int(row["storeTimestamp"].timestamp() * 1000)) for row in rows]
    assert sorted(found) == [(queue, at, FIRST_MS + at * 1000) for queue in (0, 1) for at in range(990, 1000)]


@for_each(
    "options, expected",
    [
        (["--sides", "pyrocket,jvaa"], "no side is called jvaa"),
        (["--sides", "pure,before"], "needs --before"),
        (["--before", "/nowhere"], "'/nowhere' is no checkout"),
    ],
)
def test_consume_refuses_options_that_it_cannot_measure(options, expected):
    done = ended("consume", *options)
    assert (done.returncode, expected in done.stderr) == (2, True), done.stderr


def test_produce_measures_both_ways_of_sending(measured, cluster):
    options = ["--quick", "--sides", "pyrocket", "--warm", "100", "--messages", "3000", "--sync-messages", "300"]
    printed, found = measured("produce", *options, "--before", str(ROOT), cluster=cluster)
    rounds = found["rounds"]
    assert {case: set(sides) for case, sides in rounds.items()} == {case: {"pyrocket", "before"} for case in rounds}
    assert set(rounds) == {"async", "sync"}
    assert {answer["messages"] for (answer,) in rounds["async"].values()} == {3000}
    assert all(answer["seconds"] > 0 for sides in rounds.values() for (answer,) in sides.values())
    assert "rate ÷ before" in printed


@long
def test_order_by_key_measures_all_modes(measured, cluster):
    options = ["--quick", "--no-java", "--messages", "30000", "--sleep-messages", "3000", "--before", str(ROOT)]
    printed, found = measured("order_by_key", *options, cluster=cluster)
    rounds = found["rounds"]
    assert len(rounds) == 2
    sides = {"orderly", "order_by", "order_by a function", "concurrent", "orderly before"}
    assert all({side.partition(", ")[2] for side in case} == sides for case in rounds.values())
    assert all(answer["messages"] > 0 for case in rounds.values() for (answer,) in case.values())
    assert "order_by ÷ concurrent" in printed


def test_drop_in_reports_a_missing_native_library():
    if importlib.util.find_spec("rocketmq") is None:
        done = ended("drop_in", "--quick")
        assert (done.returncode, "pip install '.[native]'" in done.stderr) == (2, True)


@long
def test_exactly_once_measures_every_side(measured):
    _, found = measured("exactly_once", "--quick", "--databases", "sqlite")
    cases = found["cases"]
    assert [(each["batch"], each["queues"]) for each in cases] == [(1, 1), (1, 4), (64, 1), (64, 4)]
    assert all(min(rates) > 0 for each in cases for rates in each["per_second"].values())
