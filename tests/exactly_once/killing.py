"""Members that write a ledger are killed with -9, frozen and woken at random. At the end it has each message once.

    python -m tests.exactly_once.killing --messages 200000 --version 5.5.0 --database postgresql

With `--way commit-after`, or `known-elsewhere`, the members commit like other clients: controls, which must fail.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from pyrocket_consumer import Producer
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.testing import EmbeddedCluster
from tests.databases import KINDS, SERVERS, Database, running
from tests.exactly_once.member import WAYS
from tests.real_brokers import NEWEST, RealCluster

Report = Callable[[str], object]

TOPIC, GROUP = "ledger-orders", "ledger-app"
MEMBERS = 3
BATCH = 50
"""The number of messages that are sent together."""
MOST_AHEAD = 2000
"""The number of messages that may wait, so that members always have some."""
SETTLE_S = 240.0
"""How long the last messages may take. The broker notices a killed member within two minutes."""


class Members:
    """Processes that are killed and frozen."""

    def __init__(self, way: str, url: str, name_server: str, topic: str, group: str, seed: int) -> None:
        self.killed = self.frozen = 0
        self._random = random.Random(seed)
        options = {
            "group": group,
            "name_server": name_server,
            "consume_from": "first",
            "listener_batch_size": 32,
            "rebalance_interval_s": 2.0,
            "heartbeat_interval_s": 2.0,
        }
        self._command = [sys.executable, "-m", "tests.exactly_once.member", way, url, topic, json.dumps(options)]
        self._running: list[subprocess.Popen[bytes]] = []
        self._asleep: list[tuple[float, subprocess.Popen[bytes]]] = []  # the end of the freeze, and the process

    def start(self) -> None:
        self._running.append(subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def disturb(self) -> None:
        """Kill one, freeze one, or let one join."""
        awake = [each for each in self._running if each not in [sleeper for _, sleeper in self._asleep]]
        kind = self._random.choice(("kill", "freeze", "join")) if self.killed else "kill"
        if kind == "kill" and awake:
            victim = self._random.choice(awake)
            self._running.remove(victim)
            self._end(victim)
            self.killed += 1
            self.start()
        elif kind == "freeze" and len(awake) > 1:
            victim = self._random.choice(awake)
            victim.send_signal(signal.SIGSTOP)
            self._asleep.append((time.monotonic() + self._random.uniform(0.5, 12), victim))
            self.frozen += 1
            self.start()  # it takes queues from frozen members
        elif kind == "join" and len(self._running) < 2 * MEMBERS:
            self.start()
        while len(self._running) > 2 * MEMBERS:
            self._end(self._running.pop(0))

    def wake(self, everybody: bool = False) -> None:
        """Wake the processes whose freeze has ended."""
        now = time.monotonic()
        for until, sleeper in list(self._asleep):
            if everybody or now >= until:
                self._asleep.remove((until, sleeper))
                with suppress(ProcessLookupError):
                    sleeper.send_signal(signal.SIGCONT)

    def _end(self, member: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            member.send_signal(signal.SIGCONT)
        member.kill()
        member.wait()

    def close(self) -> None:
        for member in self._running:
            self._end(member)


@contextmanager
def database_of(kind: str) -> Iterator[Database]:
    """Yield an empty database of a kind, and remove it afterwards."""
    with ExitStack() as stack:
        if kind in SERVERS:
            yield stack.enter_context(running(kind)).new_database()
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            yield Database(kind, make_url(f"sqlite:///{Path(directory)}/db"))


def run(
    cluster: Any,
    database: Database,
    messages: int,
    way: str = "exactly-once",
    every_s: float = 1.0,
    seed: int = 0,
    rate: float = 400.0,
    *,
    topic: str = TOPIC,
    group: str = GROUP,
    report: Report = lambda text: None,
) -> str:
    """Send messages, and disturb their consumers. Return the errors found at the end, "" without any."""
    engine = create_engine(database.url)
    ledger = Ledger(engine)
    DatabaseOffsets(engine).create_tables()
    with engine.begin() as connection:
        for table in ("ledger(body VARCHAR(32), queue_id INTEGER, queue_offset BIGINT)", "processed(body VARCHAR(32))"):
            connection.execute(text(f"CREATE TABLE IF NOT EXISTS {table}"))
            connection.execute(text(f"DELETE FROM {table.partition('(')[0]}"))
    cluster.create_topic(topic, queues=4)
    members = Members(way, database.url, cluster.name_server, topic, group, seed)
    began = time.monotonic()
    try:
        for _ in range(MEMBERS):
            members.start()
        _send_and_disturb(cluster, topic, members, messages, every_s, rate, ledger, report)
        members.wake(everybody=True)
        deadline = time.monotonic() + SETTLE_S
        while ledger.distinct() < messages and time.monotonic() < deadline and not ledger.repeats():
            time.sleep(0.2)
        time.sleep(2)  # duplicates would arrive now
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT body, queue_id, queue_offset FROM ledger")).all()
    finally:
        members.close()
        engine.dispose()
    positions, bodies = Counter((queue, offset) for _, queue, offset in rows), {body for body, _, _ in rows}
    twice = [position for position, count in positions.items() if count > 1]
    missing = [f"m{number}" for number in range(messages) if f"m{number}" not in bodies]
    report(
        f"{messages} messages, {members.killed} kills, {members.frozen} freezes in {time.monotonic() - began:.0f} s: "
        f"{len(rows)} effects, {len(missing)} missing, {len(twice)} twice"
    )
    return f"missing: {len(missing)} {missing[:3]}, twice: {len(twice)} {twice[:3]}" if missing or twice else ""


class Ledger:
    """Reads the ledger, if it can be read: a frozen member may have locked an SQLite file."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, int] = {}

    def booked(self) -> int:
        """Return the number of effects."""
        return self._count("SELECT COUNT(*) FROM ledger")

    def distinct(self) -> int:
        """Return the number of messages with an effect."""
        return self._count("SELECT COUNT(DISTINCT body) FROM ledger")

    def repeats(self) -> int:
        """Return the number of duplicate effects. If there are any, the run can end."""
        positions = "SELECT COUNT(*) FROM (SELECT DISTINCT queue_id, queue_offset FROM ledger) places"
        return self._count(f"SELECT COUNT(*) - ({positions}) FROM ledger")

    def _count(self, statement: str) -> int:
        try:
            with self._engine.connect() as connection:
                self._known[statement] = int(connection.execute(text(statement)).scalar_one())
        except OperationalError as error:
            if "locked" not in str(error.orig):
                raise
        return self._known.get(statement, 0)


def _send_and_disturb(
    cluster: Any,
    topic: str,
    members: Members,
    messages: int,
    every_s: float,
    rate: float,
    ledger: Ledger,
    report: Report,
) -> None:
    sent = done = disturbed = 0  # disturbed: the number of bookings at the last disturbance
    began = time.monotonic()
    next_at, reported_at, log_checked_at = began + every_s, began, 0.0
    with Producer(name_server=cluster.name_server) as producer:
        while sent < messages or done < 0.9 * messages:
            now = time.monotonic()
            if now - log_checked_at > 0.1:
                log_checked_at, done = now, ledger.booked()
            if sent < messages and sent < (now - began) * rate and sent - done < MOST_AHEAD:
                bodies = [b"m%d" % number for number in range(sent, min(sent + BATCH, messages))]
                producer.send_batch(topic, bodies)
                sent += len(bodies)
            else:
                time.sleep(0.01)
            members.wake()
            if now >= next_at and done > disturbed:  # on a busy machine, members need longer to begin
                members.disturb()
                next_at, disturbed = now + every_s, done
            if now - reported_at > 10:
                reported_at = now
                if ledger.repeats():
                    return
                report(f"{sent} of {messages} sent, {done} booked, {members.killed} kills, {members.frozen} freezes")


def main() -> int:
    """Run it once, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.exactly_once.killing", description=__doc__)
    parser.add_argument("--messages", type=int, default=5000, help="(%(default)s)")
    parser.add_argument("--version", default=NEWEST, help="of the broker, or embedded (%(default)s)")
    parser.add_argument("--database", choices=KINDS, default="postgresql", help="(%(default)s)")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0], help="what members do (%(default)s)")
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two disturbances (%(default)s)")
    parser.add_argument("--rate", type=float, default=400.0, help="messages sent in a second (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = EmbeddedCluster() if given.version == "embedded" else RealCluster(given.version)
    with made as cluster, database_of(given.database) as database:
        counts = (given.messages, given.way, given.every, given.seed, given.rate)
        wrong = run(cluster, database, *counts, report=lambda text: print(text, flush=True))
    print(wrong or "the ledger has each message once")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
