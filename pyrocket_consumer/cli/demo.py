"""`pyrocket demo`: produce and consume while members are killed, and count the messages."""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrocket_consumer.cli.arguments import add_command, add_name_server, add_output, positive_number
from pyrocket_consumer.cli.streams import Interrupts, Progress, print_json, print_line, print_table
from pyrocket_consumer.errors import ConfigError, RocketError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pyrocket_consumer.protocol.message import Message

_EXAMPLES = """\
  pyrocket demo                                  # on an embedded cluster, without installing one
  pyrocket demo -n 127.0.0.1:9876                # on your cluster, which must create topics on demand
  pyrocket demo --messages 100000 -o json
"""

QUEUES = 4
WAIT_S = 60.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "demo",
        "produce and consume while members are killed, and count what was lost",
        _EXAMPLES,
        run,
    )
    add_name_server(command, "NAMESRV_ADDR, else an embedded cluster")
    add_output(command)
    command.add_argument("--messages", type=positive_number, default=6000, help="how many to send (default: 6000)")
    command.add_argument("--rate", type=positive_number, default=600, help="messages per second (default: 600)")


class RemoteMember:
    """A consumer in a process of its own."""

    def __init__(self, name: str, kind: str, topic: str, name_server: str, directory: Path) -> None:
        self.name = name
        self.kind = kind
        self.seen: Counter[bytes] = Counter()
        self.ready = threading.Event()
        self._command = [
            sys.executable,
            "-c",
            "import sys; from pyrocket_consumer.cli.demo import run_member; run_member(*sys.argv[1:])",
            f"{topic}-{kind}",
            kind,
            topic,
            name_server,
            str(directory),
        ]
        self._log = directory / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Start the process, the first time or again."""
        self.ready.clear()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with os.fdopen(os.dup(process.stdout.fileno()), "rb") as lines:
            for line in lines:
                if line == b"ready\n":
                    self.ready.set()
                elif line.endswith(b"\n"):
                    self.seen[line[:-1]] += 1

    def wait_until_ready(self) -> None:
        """Wait until the member consumes.

        Raises:
            RocketError: it did not start; the text has the end of its log.
        """
        if not self.ready.wait(WAIT_S):
            raise RocketError(f"member {self.name} did not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5)

    def close(self) -> None:
        """Let the member close its consumer, and wait for it."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(45)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# --- in the process of a member


def run_member(group: str, kind: str, topic: str, name_server: str, directory: str) -> None:
    """Consume until standard input ends: the parent process closes it, or ends."""
    from pyrocket_consumer.consumer import PushConsumer

    def close_at_end_of_input() -> None:
        sys.stdin.read()
        consumer.close()

    listener, options = _ledger_listener(directory) if kind == "ledger" else _printing_listener(kind, directory)
    with PushConsumer(
        group, name_server=name_server, consume_from="first", rebalance_interval_s=2, **options
    ) as consumer:
        consumer.subscribe(topic, listener)
        os.write(1, b"ready\n")
        threading.Thread(target=close_at_end_of_input, daemon=True).start()
        consumer.join()


def _printing_listener(model: str, directory: str) -> tuple[Callable[[Message], None], dict[str, Any]]:
    """Return a listener that prints the number in each message, and the options it needs.

    It prints before it returns, so the parent process knows every message that this process has acknowledged.
    """
    from pyrocket_consumer.model import MessageModel

    def print_number(message: Message) -> None:
        os.write(1, message.body + b"\n")

    return print_number, {"message_model": MessageModel(model), "offset_store_dir": directory, "commit_interval_s": 0.5}


def _ledger_listener(directory: str) -> tuple[Callable[[list[Message]], Any], dict[str, Any]]:
    """Return a listener that inserts the messages into the ledger, exactly once, and the options it needs."""
    from sqlalchemy import URL, create_engine, text

    from pyrocket_consumer.offsets import DatabaseOffsets

    offsets = DatabaseOffsets(create_engine(URL.create("sqlite", database=f"{directory}/ledger.db")))
    insert = text("INSERT INTO ledger(body) VALUES (:body)")

    def book(messages: list[Message], connection: Connection) -> None:
        connection.execute(insert, [{"body": message.body} for message in messages])

    return offsets.exactly_once(book), {"orderly": True, "listener_batch_size": 64, "offset_store": offsets}


# --- the run


class Ledger:
    """A table in SQLite. A group inserts its messages in the transactions that advance its offsets."""

    def __init__(self, file: Path) -> None:
        """Create the file, with the group's table of offsets.

        Raises:
            ConfigError: SQLAlchemy is not installed.
        """
        from pyrocket_consumer.offsets.database.store import ddl

        statements = [*ddl("sqlite"), "CREATE TABLE ledger(body BLOB)"]
        self._file = file
        with closing(sqlite3.connect(file)) as connection:
            for statement in statements:
                connection.execute(statement)

    def booked(self) -> Counter[bytes]:
        """Return the number of rows of each body."""
        with closing(sqlite3.connect(self._file, timeout=WAIT_S)) as connection:
            return Counter(dict(connection.execute("SELECT body, COUNT(*) FROM ledger GROUP BY body").fetchall()))

    def compare_with(self, sent: set[bytes]) -> dict[str, Any]:
        """Return the differences to a ledger that has each body of `sent` once."""
        booked = self.booked()
        return {
            "sent": len(sent),
            "booked": booked.total(),
            "missing": len(sent - booked.keys()),
            "twice": sum(times > 1 for times in booked.values()),
            "equal": booked == Counter(sent),
        }


class Demo:
    """One run: members of several groups consume the messages of a producer. The first of each group is killed."""

    def __init__(self, name_server: str, messages: int, rate: int, directory: Path, quiet: bool) -> None:
        self._name_server, self._messages, self._rate = name_server, messages, rate
        self._directory = directory
        self._print_progress = Progress(quiet).print_line
        self._topic = f"pyrocket-demo-{os.getpid()}-{int(time.time())}"
        self._sent = 0
        self._ending = threading.Event()
        self._members: list[RemoteMember] = []
        self._ledger: Ledger | None = None

    def run(self) -> dict[str, Any]:
        """Run the demo, and return the counts."""
        from pyrocket_consumer.admin import Admin

        with Admin(name_server=self._name_server) as admin:
            admin.create_topic(self._topic, queues=QUEUES)
        sizes = {"clustering": 2, "broadcasting": 1}
        with suppress(ConfigError):  # without SQLAlchemy there is no ledger
            self._ledger = Ledger(self._directory / "ledger.db")
            sizes["ledger"] = 2
        producing = threading.Thread(target=self._produce, name="demo-producer")
        try:
            self._print_progress("starting members: " + ", ".join(f"{size} {kind}" for kind, size in sizes.items()))
            for kind, size in sizes.items():
                for number in range(1, size + 1):
                    member = RemoteMember(f"{kind}-{number}", kind, self._topic, self._name_server, self._directory)
                    self._members.append(member)
            for member in self._members:
                member.wait_until_ready()
            producing.start()
            self._watch_until(lambda: self._sent >= self._messages // 3)
            killed = [member for member in self._members if member.name.endswith("-1")]
            for victim in killed:
                self._print_progress(f"kill -9 {victim.name}")
                victim.kill()
            self._watch_until(lambda: self._sent >= self._messages // 2)
            for victim in killed:
                self._print_progress(f"starting {victim.name} again")
                victim.start()
            for victim in killed:
                victim.wait_until_ready()
            self._watch_until(lambda: not producing.is_alive())
            producing.join()
            self._watch_until(self._all_seen)
        finally:
            self._print_progress("closing")
            self._ending.set()
            if producing.ident is not None:
                producing.join()
            for member in self._members:
                member.close()
        return self._count()

    def _produce(self) -> None:
        from pyrocket_consumer.producer import Producer

        began = time.monotonic()
        with Producer(name_server=self._name_server) as producer:
            for number in range(self._messages):
                ahead = began + number / self._rate - time.monotonic()
                if self._ending.wait(max(0.0, ahead)):
                    return
                producer.send(self._topic, b"%d" % number)
                self._sent = number + 1

    def _seen(self, kind: str) -> Counter[bytes]:
        if kind == "ledger" and self._ledger is not None:
            return self._ledger.booked()
        seen: Counter[bytes] = Counter()
        for member in self._members:
            if member.kind == kind:
                seen.update(dict(member.seen))
        return seen

    def _progress(self) -> dict[str, int]:
        """Return the number of messages that each group has seen."""
        return {kind: len(self._seen(kind)) for kind in dict.fromkeys(member.kind for member in self._members)}

    def _all_seen(self) -> bool:
        return min(self._progress().values()) >= self._sent

    def _watch_until(self, reached: Callable[[], bool]) -> None:
        """Print progress until `reached()`, or until nothing has changed for a minute."""
        state, since = None, time.monotonic()
        while not reached():
            now = {"sent": self._sent, **self._progress()}
            if now != state:
                state, since = now, time.monotonic()
            elif time.monotonic() - since > WAIT_S:
                self._print_progress(f"nothing has moved for {WAIT_S:g} s")
                return
            self._print_progress("   ".join(f"{what} {count:>6}" for what, count in now.items()), is_transient=True)
            time.sleep(0.25)

    def _count(self) -> dict[str, Any]:
        sent = {b"%d" % number for number in range(self._sent)}
        rows = []
        for model in ("clustering", "broadcasting"):
            seen = self._seen(model)
            rows.append(
                {
                    "group": model,
                    "sent": len(sent),
                    "consumed": len(sent & seen.keys()),
                    "repeated": sum(seen.values()) - len(seen),
                    "lost": len(sent - seen.keys()),
                }
            )
        ledger = self._ledger.compare_with(sent) if self._ledger else None
        return {"groups": rows, "file": self._file(), "ledger": ledger}

    def _file(self) -> dict[str, Any]:
        """Read the broadcasting member's offsets back from its store, as another process would."""
        from pyrocket_consumer.offsets import LocalFileOffsetStore

        (found,) = {path.parent for path in self._directory.rglob("offsets.json")}
        with LocalFileOffsetStore(found) as store:
            table = store.clone_offset_table(self._topic)
        return {
            "path": str(found / "offsets.json"),
            "offsets": {str(queue): offset for queue, offset in sorted(table.items())},
            "sum": sum(table.values()),
        }


def run(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.enter_context(Interrupts())
        name_server = options.name_server or os.environ.get("NAMESRV_ADDR")
        if not name_server:
            from pyrocket_consumer.testing import EmbeddedCluster

            name_server = stack.enter_context(EmbeddedCluster()).name_server
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyrocket-demo-")))
        demo = Demo(name_server, options.messages, options.rate, directory, options.output == "json")
        result = demo.run()
    return report(result, options.output)


def report(result: dict[str, Any], output: str) -> int:
    """Print the counts; return the exit code, 3 if a message was lost, or an offset or the ledger is wrong."""
    lost = sum(row["lost"] for row in result["groups"])
    right = result["file"]["sum"] == result["groups"][1]["sent"]
    ledger = result["ledger"]
    if output == "json":
        print_json(result, indent=2)
    else:
        heads = ("group", "sent", "consumed", "repeated", "lost")
        print_table("What happened", heads, [[row[head] for head in heads] for row in result["groups"]])
        rows = [[queue, offset] for queue, offset in result["file"]["offsets"].items()]
        print_table("Offsets found in the broadcasting member's file", ("queue", "offset"), rows)
        print_line(
            "every message was consumed; the repeated ones had finished after the last commit of a killed member"
            if not lost
            else f"{lost} messages were lost; this must not happen, please report it"
        )
        report_ledger(ledger)
    return 0 if not lost and right and (ledger is None or ledger["equal"]) else 3


def report_ledger(ledger: dict[str, Any] | None) -> None:
    """Print the differences between the ledger and the messages sent; None means no ledger."""
    if ledger is None:
        print_line(
            "pip install 'pyrocket-consumer[sql]' shows a ledger in a database, too, with each message in it once"
        )
        return
    row = [ledger["sent"], ledger["booked"], ledger["missing"], ledger["twice"]]
    heads = ("sent", "in the ledger", "missing", "twice")
    print_table("A ledger in SQLite, written with DatabaseOffsets", heads, [row])
    print_line(
        "the ledger is equal to what was sent: each message is in it once, although a member was killed"
        if ledger["equal"]
        else "the ledger is not equal to what was sent: this must not happen, please report it"
    )
