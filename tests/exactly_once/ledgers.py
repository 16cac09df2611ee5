"""A table of effects, which must have each effect once, and the offsets in the same database."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from pyrocket_consumer import Message
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.databases import KINDS, Database

INSERT = text("INSERT INTO ledger(body, queue_id, queue_offset) VALUES (:body, :queue_id, :queue_offset)")

every_database = pytest.mark.databases(*KINDS)

EXACTLY_ONCE = {"orderly": True, "listener_batch_size": 8}

TOPIC, GROUP = "orders", "billing"
BODIES = [str(number) for number in range(100)]


class Ledger:
    """Effects in a database, and the offsets in the same one."""

    def __init__(self, database: Database, **options: Any) -> None:
        self.database = database
        self.engine: Engine = database.engine()
        with self.engine.begin() as connection:  # no constraint prevents a duplicate effect
            connection.execute(text("CREATE TABLE ledger(body VARCHAR(64), queue_id INTEGER, queue_offset BIGINT)"))
        self.offsets = DatabaseOffsets(self.engine, **options)
        self.offsets.create_tables()

    def book(self, messages: list[Message], connection: Connection) -> None:
        """A listener with an effect for each message."""
        connection.execute(INSERT, [row(message) for message in messages])

    def rows(self) -> list[tuple[str, int, int]]:
        """Return all effects, in order of queue and offset."""
        return [tuple(each) for each in self.query("SELECT * FROM ledger ORDER BY queue_id, queue_offset")]

    def bodies(self) -> Counter[str]:
        """Return the number of effects of each body."""
        return Counter(body for body, _, _ in self.rows())

    def query(self, statement: str, **values: Any) -> list[Any]:
        """Return the rows of a query."""
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), values))

    def execute(self, statement: str, **values: Any) -> None:
        """Execute a statement in a separate transaction."""
        with self.engine.begin() as connection:
            connection.execute(text(statement), values)

    def offset(self, group: str = GROUP, queue_id: int = 0, topic: str = TOPIC) -> int | None:
        """Return the stored offset of a queue."""
        found = [each for each in self.offsets.offsets(group, topic) if each.queue.queue_id == queue_id]
        return found[0].next_offset if found else None


def row(message: Message) -> dict[str, Any]:
    """Return the effect of a message."""
    return {"body": message.body.decode(), "queue_id": message.queue.queue_id, "queue_offset": message.queue_offset}


@contextmanager
def ledger_in(database: Database, **options: Any) -> Iterator[Ledger]:
    """A ledger in an empty database."""
    ledger = Ledger(database, **options)
    try:
        yield ledger
    finally:
        ledger.engine.dispose()


@contextmanager
def offsets_driven(ledger: Ledger, before: Callable[[str], None]) -> Iterator[DatabaseOffsets]:
    """The offsets of a ledger in SQLite, with a driver that calls `before` with each of their statements."""

    class Cursor(sqlite3.Cursor):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            before(statement)
            return super().execute(statement, *values)

    class Driver(sqlite3.Connection):
        def cursor(self, *_: Any) -> Cursor:
            return super().cursor(Cursor)

    engine = ledger.database.engine(connect_args={"factory": Driver})
    yield DatabaseOffsets(engine)
    engine.dispose()


def once(bodies: list[str]) -> Counter[str]:
    """Return the expected bodies of a ledger."""
    return Counter(dict.fromkeys(bodies, 1))
