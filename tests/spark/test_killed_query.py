"""A streaming query that is killed repeatedly delivers every message into files exactly once.

Of its two brokers one is restarted, killed, slow and silent meanwhile; the query itself must not end of that. One kill
and 2 000 messages; `make proof` sends 10 000, and `make spark-soak` kills eight times and sends 80 000.
PYROCKET_SPARK_KILLS, PYROCKET_SPARK_MESSAGES and PYROCKET_SPARK_SEED say otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster, delay, drop
from tests.consuming import until
from tests.spark.test_foreach_batch import bodies_in
from tests.trials import trials

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "examples" / "spark_files.py"
KILLS = int(os.environ.get("PYROCKET_SPARK_KILLS", "1"))
MESSAGES = int(os.environ.get("PYROCKET_SPARK_MESSAGES", max(2000, trials(10_000))))
SEED = int(os.environ.get("PYROCKET_SPARK_SEED", "0")) or random.randrange(1, 1 << 32)
LIFE_S = 240.0  # time for a run to plan its first batch, on a slow machine


class Run:
    """One run of the program, in its own process group."""

    def __init__(self, name_server: str, directory: Path, most_per_batch: int, environment: dict[str, str]) -> None:
        self.log = directory / "log"
        arguments = [name_server, "orders", str(directory), str(most_per_batch)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def check(self) -> None:
        """Fail if the program has ended by itself."""
        assert self._process.poll() is None, self.log.read_text()[-4000:]

    def kill(self) -> None:
        """Send SIGKILL to the whole process group at once: the driver's Python, and Java."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def planned(directory: Path) -> int:
    """Return the number of batches that all runs have planned."""
    return sum(1 for path in (directory / "checkpoint" / "offsets").glob("*") if path.name.isdigit())


def delivered(directory: Path) -> int:
    files = (directory / "files").glob("batch=*/*.parquet")
    return sum(pq.ParquetFile(path).metadata.num_rows for path in files)


@contextmanager
def trouble(broker: EmbeddedBroker, rng: random.Random) -> Iterator[list[str]]:
    """Make `broker` unreachable, slow and silent in turns; yield the list of faults. At the end it is healthy."""
    ended, past = threading.Event(), list[str]()

    def go_on() -> None:
        while not ended.wait(rng.uniform(0.5, 3)):
            kind = rng.choice(("restarted", "killed", "slow", "silent"))
            if kind == "restarted":
                broker.stop()
            elif kind == "killed":
                broker.kill(keep_route=True)
            else:
                broker.on(None, delay(0.3) if kind == "slow" else drop, times=None)
            past.append(kind)
            ended.wait(rng.uniform(1, 6))
            broker.clear_faults()
            if kind in ("restarted", "killed"):
                broker.start()

    thread = threading.Thread(target=go_on, name="trouble")
    thread.start()
    try:
        yield past
    finally:
        ended.set()
        thread.join()


def settings(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Make the program's Spark a small one, by a file of settings, as an administrator does."""
    from tests.spark.conftest import SETTINGS

    conf = directory / "conf"
    conf.mkdir()
    given = {**SETTINGS, "spark.master": "local[2]", "spark.log.level": "WARN"}
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in given.items()))
    return {**environment, "SPARK_CONF_DIR": str(conf)}


@pytest.mark.timeout(600 + 180 * KILLS)
def test_a_killed_query_delivers_every_message_exactly_once(spark_environment: dict[str, str], tmp_path: Path) -> None:
    rng, began = random.Random(SEED), time.monotonic()
    environment = settings(spark_environment, tmp_path)
    most_per_batch = max(50, MESSAGES // (5 * KILLS + 1))
    print(f"seed {SEED}: {MESSAGES} messages, {KILLS} kills, at most {most_per_batch} offsets per batch")
    with (
        EmbeddedCluster(brokers=2, record_limit=0) as cluster,
        trouble(cluster.broker("broker-b"), random.Random(SEED + 1)) as past,
    ):
        cluster.create_topic("orders", queues=2)
        cluster.send("orders", lambda number: b"%d" % number, count=MESSAGES)
        for number in range(KILLS):
            before = planned(tmp_path)
            life = Run(cluster.name_server, tmp_path, most_per_batch, environment)

            def started_run(life: Run = life, before: int = before) -> bool:
                life.check()
                return planned(tmp_path) > before

            if number % 5 == 4:  # while it starts
                time.sleep(rng.uniform(0, 5))
            else:
                until(started_run, f"a batch begun in life {number + 1}; {life.log} tells why", LIFE_S)
                time.sleep(rng.uniform(0, 1.5))
            life.kill()
            print(
                f"{time.monotonic() - began:6.1f} s  kill {number + 1}: {planned(tmp_path)} batches begun, "
                f"{delivered(tmp_path)} messages in files"
            )
        killed_at = delivered(tmp_path)
        life = Run(cluster.name_server, tmp_path, most_per_batch, environment)
        try:

            def complete() -> bool:
                life.check()
                return delivered(tmp_path) >= MESSAGES

            until(complete, "all messages in the files", LIFE_S + MESSAGES / 200)
        finally:
            life.kill()
    bodies = bodies_in(tmp_path / "files")
    print(f"{time.monotonic() - began:6.1f} s  {len(bodies)} different messages, {bodies.total()} in all")
    print(f"one broker was {Counter(past)}")
    assert bodies.keys() == set(map(str, range(MESSAGES)))
    assert bodies.total() == MESSAGES
    assert killed_at < MESSAGES, "every message was there before the last kill; the test has shown too little"
