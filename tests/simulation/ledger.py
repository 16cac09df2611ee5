"""A database in a simulated world: real SQL, transactions that stay open while their listener waits, and a ledger."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.database.sqlalchemy_access import ErrorKind, Scope, SqlDatabase
from tests.simulation.world import CURRENT, Process, World

LedgerRow = tuple[str, MessageQueue, int, str | None]
"""An event, its queue, its offset, and the owner of the queue."""

_TABLES = """
CREATE TABLE ledger(id INTEGER PRIMARY KEY, what TEXT, topic TEXT, broker_name TEXT, queue_id INTEGER, queue_offset INTEGER,
    owner TEXT);
CREATE TRIGGER begun AFTER INSERT ON pyrocket_offsets BEGIN
    INSERT INTO ledger VALUES (NULL, 'moved', NEW.topic, NEW.broker_name, NEW.queue_id, NEW.next_offset, NEW.owner);
END;
CREATE TRIGGER moved AFTER UPDATE ON pyrocket_offsets WHEN NEW.epoch <> OLD.epoch AND NEW.next_offset <> OLD.next_offset
BEGIN
    INSERT INTO ledger VALUES (NULL, 'moved', NEW.topic, NEW.broker_name, NEW.queue_id, NEW.next_offset, NEW.owner);
END;
CREATE TRIGGER claimed AFTER UPDATE ON pyrocket_offsets WHEN NEW.owner IS NOT OLD.owner
BEGIN
    INSERT INTO ledger VALUES (NULL, 'claimed', NEW.topic, NEW.broker_name, NEW.queue_id, NEW.next_offset, NEW.owner);
END;
"""  # noqa: E501

_EFFECT = text("INSERT INTO ledger VALUES (NULL, 'effect', :topic, :broker, :queue, :offset, :owner)")


class Ledger:
    """The database's file, and its record of all commits."""

    def __init__(self, world: World) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pyrocket-world-")
        self.path = Path(self._directory.name) / "db"
        self._world = world
        self._open: dict[Process | None, list[Any]] = {}  # the sessions of each process, which end with it
        self.busy = 0  # how often a transaction met an open one
        self.lost_answers = 0.0  # the share of commits whose response is lost
        self.store().create_tables()
        with sqlite3.connect(self.path) as connection:
            connection.executescript(_TABLES)
        connection.close()

    def store(self) -> DatabaseOffsets:
        """Return a member's store in the database."""
        engine = create_engine(f"sqlite:///{self.path}", poolclass=NullPool, connect_args={"timeout": 0})

        @event.listens_for(engine, "connect")
        def connected(connection: Any, record: Any) -> None:
            connection.execute("PRAGMA synchronous=OFF")

        store = DatabaseOffsets(engine)
        store._database = _WorldDatabase(engine, self)  # the only difference from a user's store
        return store

    @contextmanager
    def held(self, session: Any) -> Generator[None]:
        """Register an open session, which ends with its process."""
        process = CURRENT.get()
        self._open.setdefault(process, []).append(session)
        try:
            yield
        finally:
            if session in self._open.get(process, ()):
                self._open[process].remove(session)

    def disconnect(self, process: Process) -> None:
        """Roll back the transactions of a dead process."""
        for session in self._open.pop(process, ()):
            session.connection().connection.dbapi_connection.rollback()

    def is_answer_lost(self) -> bool:
        """Return whether the response to a successful commit is lost."""
        return self.lost_answers > 0 and self._world.random.random() < self.lost_answers

    def rows(self) -> list[LedgerRow]:
        """Return effects, moves of offsets and changes of owners, in the order of their commits."""
        with sqlite3.connect(self.path) as connection:
            columns = "what, topic, broker_name, queue_id, queue_offset, owner"
            found = connection.execute(f"SELECT {columns} FROM ledger ORDER BY id")
            rows = [(what, MessageQueue(*names), offset, owner) for what, *names, offset, owner in found]
        connection.close()
        return rows

    def offsets(self) -> dict[MessageQueue, int]:
        """Return the offsets of the group."""
        return {row.queue: row.next_offset for row in self.store().offsets("app")}

    def close(self) -> None:
        self._directory.cleanup()


class _WorldDatabase(SqlDatabase):
    """Behaves like an asynchronous engine: listeners are awaited within their transaction, on the world's loop."""

    is_async = True

    def __init__(self, engine: Any, ledger: Ledger) -> None:
        super().__init__(engine, sessionmaker(engine))
        self._ledger = ledger

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        with super().transaction() as scope, self._ledger.held(scope.arguments[0]):
            yield scope
        if self._ledger.is_answer_lost():
            raise ConnectionError("the answer to a commit was lost")

    def classify_error(self, error: BaseException) -> ErrorKind:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", 0)  # an error of SQLAlchemy, or of the driver
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            self._ledger.busy += 1
            return "unavailable"  # the driver must not sleep in virtual time, so retry later
        return "unavailable" if isinstance(error, ConnectionError) else super().classify_error(error)


def effect_of(queue: MessageQueue, offset: int, owner: str) -> tuple[Any, dict[str, Any]]:
    """Return the statement that records one effect."""
    values = {"topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}
    return _EFFECT, {**values, "offset": offset, "owner": owner}
