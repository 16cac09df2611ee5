"""All statements of a `DatabaseOffsets`, compiled once for the dialect of a database.

Each listener call passes compiled text to the driver, because compiling a statement costs as much as executing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import ClauseElement

from pyrocket_consumer.offsets.database.claim import MAX_KEY_CHARACTERS

INBOX_DELETE_BATCH = 500
"""The number of old rows of the inbox that one statement deletes."""


class StatementResult(NamedTuple):
    """The rows that a statement returned, and how many rows it changed."""

    rows: Sequence[Sequence[Any]]
    changed: int


Values = Mapping[str, object]

Execute = Callable[..., StatementResult]
"""Executes a `Statement` with one set of `Values`, or once with each of several."""


class Statement:
    """SQL text for a driver, and the form in which that driver takes values."""

    __slots__ = ("text", "_order")

    def __init__(self, text: str, order: Sequence[str] | None = None) -> None:
        """Keep the text; `order` has the names of its values if the driver takes them by position."""
        self.text = text
        self._order = order

    def bind(self, values: Values | Sequence[Values]) -> Any:
        """Return one set of values as the driver takes it, a list of several sets, or None without values."""
        if not isinstance(values, Mapping):
            return [self.bind(each) for each in values] or None
        if self._order is None:
            return {f"{name}_": value for name, value in values.items()}
        return tuple(values[name] for name in self._order)

    def run_on(self, cursor: Any, values: Values | Sequence[Values] = ()) -> StatementResult:
        """Execute the statement on a driver's cursor."""
        bound = self.bind(values)
        if bound is None:
            cursor.execute(self.text)
        elif isinstance(bound, list):
            cursor.executemany(self.text, bound)
        else:
            cursor.execute(self.text, bound)
        return StatementResult(cursor.fetchall() if cursor.description else (), cursor.rowcount)


def _value(name: str) -> Any:
    return bindparam(name + "_")  # SQLAlchemy reserves the names of columns


class Statements:
    """All statements for one dialect."""

    def __init__(self, table: str, dialect: Dialect, *, with_inbox: bool) -> None:
        self.table = table
        self._dialect = dialect
        schema, _, name = table.rpartition(".")
        exact = mysql.VARCHAR(MAX_KEY_CHARACTERS, collation="utf8mb4_bin")  # names are case-sensitive
        key_text = String(MAX_KEY_CHARACTERS).with_variant(exact, "mysql", "mariadb")
        options: dict[str, Any] = {"schema": schema or None, "mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
        options |= {"mariadb_engine": "InnoDB", "mariadb_charset": "utf8mb4"}
        offsets = Table(
            name,
            MetaData(),
            Column("consumer_group", key_text, primary_key=True),
            Column("topic", key_text, primary_key=True),
            Column("broker_name", key_text, primary_key=True),
            Column("queue_id", Integer, primary_key=True, autoincrement=False),
            Column("next_offset", BigInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            Column("reset_epoch", BigInteger, nullable=False),
            Column("owner", String(MAX_KEY_CHARACTERS)),
            Column("last_offset", BigInteger),
            Column("last_message_id", String(MAX_KEY_CHARACTERS)),
            Column("last_store_time", BigInteger),
            Column("updated_at", DateTime, nullable=False),
            **options,
        )
        self._inbox = inbox = Table(
            "pyrocket_inbox" if name == "pyrocket_offsets" else f"{name}_inbox",
            MetaData(),
            Column("consumer_group", key_text, primary_key=True),
            Column("message_id", key_text, primary_key=True),
            Column("at", BigInteger, nullable=False),
            UniqueConstraint("consumer_group", "at", "message_id"),  # serves as an index for `select_old_inbox`
            **options,
        )
        self._tables = [offsets, inbox] if with_inbox else [offsets]
        self._lookups: dict[int, Statement] = {}
        row, compiled = offsets.c, self._compile
        keys = {"consumer_group": "group", "topic": "topic", "broker_name": "broker", "queue_id": "queue"}
        key = [row[column] == _value(name) for column, name in keys.items()]
        shown = [column for column in row if column.name not in ("consumer_group", "updated_at")]
        one: Any = literal_column("1")
        now = {"updated_at": func.current_timestamp()}
        no_last_message = {"last_offset": null(), "last_message_id": null(), "last_store_time": null()}
        own_row = (*key, row.epoch == _value("epoch"))
        self._checks = [compiled(select(*table.c).where(text("1 = 0"))) for table in self._tables]
        self.select_row = compiled(select(*shown).where(*key))
        self.select_group = compiled(select(*shown).where(row.consumer_group == _value("group")))
        self.claim = compiled(update(offsets).where(*key).values(epoch=row.epoch + one, owner=_value("owner"), **now))
        first = keys | {"next_offset": "next", "epoch": "epoch", "reset_epoch": "reset_epoch", "owner": "owner"}
        values = {column: _value(name) for column, name in first.items()}
        self.begin = compiled(insert(offsets).values(**values, **now))
        self.advance = compiled(
            update(offsets)
            .where(*own_row, row.next_offset <= _value("first"), row.next_offset >= _value("known"))
            .values(
                next_offset=_value("next"),
                last_offset=_value("last_offset"),
                last_message_id=_value("message_id"),
                last_store_time=_value("store_time"),
                **now,
            )
        )
        self.persist = compiled(
            update(offsets)
            .where(*own_row, row.next_offset < _value("next"), row.next_offset >= _value("known"))
            .values(next_offset=_value("next"), **now)
        )
        moved = {"next_offset": _value("next"), "reset_epoch": _value("reset_epoch"), "epoch": row.epoch + one}
        self.move = compiled(update(offsets).where(*own_row).values(**moved, **no_last_message, **now))
        self.reset = compiled(update(offsets).where(*key).values(**moved, **no_last_message, **now))
        self.delete_row = compiled(delete(offsets).where(*key))
        # With PostgreSQL a savepoint costs two more round trips, and psycopg reports the state of the transaction.
        self.uses_savepoint = dialect.name != "postgresql"
        self.savepoint = Statement("SAVEPOINT pyrocket_begun")
        self.release_savepoint = Statement("RELEASE SAVEPOINT pyrocket_begun")
        notes = inbox.c
        group, note = notes.consumer_group == _value("group"), notes.message_id == _value("message_id")
        self.insert_inbox = compiled(
            insert(inbox).values(consumer_group=_value("group"), message_id=_value("message_id"), at=_value("at"))
        )
        self.select_old_inbox = compiled(
            select(notes.message_id)
            .where(group, notes.at < _value("before"))
            .order_by(notes.at)
            .suffix_with(f"LIMIT {INBOX_DELETE_BATCH}")
        )
        self.update_inbox = compiled(update(inbox).where(group, note).values(at=_value("at")))
        self.delete_inbox = compiled(delete(inbox).where(group, note))

    def _compile(self, clause: ClauseElement) -> Statement:
        compiled = clause.compile(dialect=self._dialect)
        order = getattr(compiled, "positiontup", None) if self._dialect.positional else None
        return Statement(str(compiled), None if order is None else [name.removesuffix("_") for name in order])

    def select_inbox(self, count: int) -> Statement:
        """Return the statement that selects `count` ids, `id0` and on, with the time of each."""
        if count not in self._lookups:
            notes = self._inbox.c
            wanted = notes.message_id.in_([_value(f"id{number}") for number in range(count)])
            self._lookups[count] = self._compile(
                select(notes.message_id, notes.at).where(notes.consumer_group == _value("group"), wanted)
            )
        return self._lookups[count]

    def creation(self) -> list[Statement]:
        """Return the statements that create the tables."""
        makers = [CreateTable(table, if_not_exists=True) for table in self._tables]
        return [Statement(str(maker.compile(dialect=self._dialect)).strip()) for maker in makers]

    def check_tables(self, execute: Execute) -> None:
        """Check that the tables exist with all their columns; raise the driver's error if not."""
        for check in self._checks:
            execute(check)


DIALECTS: dict[str, Callable[..., Dialect]] = {
    "sqlite": sqlite.dialect,
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mysql.dialect,
}
