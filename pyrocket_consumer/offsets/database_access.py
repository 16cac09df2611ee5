"""How `DatabaseOffsets` reaches a database: SQLAlchemy's engines and sessions, plain and asynchronous, and Django's.

The statements are written once, and compiled once for the database's dialect. What runs for each listener call is the
driver's own text: to have it built anew would cost as much as to execute it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    DateTime,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    bindparam,
    create_engine,
    delete,
    func,
    insert,
    literal_column,
    make_url,
    null,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection, Dialect, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool, StaticPool
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import ClauseElement
from sqlalchemy.util import await_only, greenlet_spawn

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.net.forks import renew_locks_in_children
from pyrocket_consumer.text import shown, shown_unless_secret

T = TypeVar("T")

LOCK_WAIT_S = 1
"""How long bookkeeping waits for a row that another session has locked: all queues wait for it."""

ANSWER_WITHIN_S = 60.0
"""How long bookkeeping waits for an asynchronous driver; others have time-outs of their own."""

DISPOSE_WITHIN_S = 5.0

CONNECT_WITHIN_S = 10
"""How long tools wait for a server that says nothing."""

LONGEST_KEY = 255

IDLE = 0
"""psycopg's TransactionStatus for a connection without a transaction."""

INBOX_STEP = 500
"""How many old rows of the inbox are deleted at a time."""

Verdict = Literal["again", "locked", "gone", "away", "broken", "theirs"]
"""What an error says: this transaction met another; one that lasts; there is no connection; the database cannot be used
now; an error of before has ended the transaction; it is the listener's own."""

_SQLSTATES: dict[str, Verdict] = {
    "40001": "again", "40P01": "again",  # serialization failure, deadlock
    "08": "gone", "53300": "gone", "57P": "gone",  # connection, too many of them, shutdown
    "53": "away",  # resources
    "40003": "away", "25006": "away", "25P03": "away",  # read-only: a standby after a fail-over
    "55P03": "locked", "25P02": "broken",
}  # fmt: skip

_MYSQL_CODES: dict[int, Verdict] = {
    **dict.fromkeys((1213, 1020), "again"),
    **dict.fromkeys((1205, 3572), "locked"),
    **dict.fromkeys(
        (0, 1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1290, 1792, 1836, 1927), "away"
    ),
    **dict.fromkeys((2002, 2003, 2006, 2012, 2013, 2055, 3159, 4031), "gone"),
}

_SQLITE_CODES: dict[int, Verdict] = {
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "again"),
    **dict.fromkeys(
        (
            sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ),
        "away",
    ),
    sqlite3.SQLITE_CANTOPEN: "gone",
}


class Answer(NamedTuple):
    """What a statement came to."""

    rows: Sequence[Sequence[Any]]
    changed: int


class Execute(Protocol):
    """Executes a statement, once for each of several sets of values."""

    def __call__(self, statement: Statement, values: Values | Sequence[Values] = ()) -> Answer: ...


Values = Mapping[str, object]


class Scope(Protocol):
    """A transaction that a listener runs in."""

    @property
    def execute(self) -> Execute:
        """What executes in it."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the listener gets besides its messages."""

    def begin(self) -> None:
        """The listener is about to be called: what it reads is of the transaction, too."""

    def ready(self) -> None:
        """Have everything executed that was asked for; the transaction must still be there.

        Raises:
            ConfigError: the listener has ended it.
        """

    def is_lost(self) -> bool:
        """Tell whether its connection is."""


# --- statements


class Statement:
    """SQL as the driver takes it, and in which form it takes values."""

    __slots__ = ("text", "_order")

    def __init__(self, text: str, order: Sequence[str] | None = None) -> None:
        """`order`: the names of its values, where the driver takes them by their place."""
        self.text = text
        self._order = order

    @classmethod
    def of(cls, clause: ClauseElement, dialect: Dialect) -> Statement:
        """Compile a clause."""
        compiled = clause.compile(dialect=dialect)
        order = getattr(compiled, "positiontup", None) if dialect.positional else None
        return cls(str(compiled), None if order is None else [name.removesuffix("_") for name in order])

    def bound(self, values: Values) -> Any:
        """Return `values` as the driver takes them."""
        if self._order is None:
            return {f"{name}_": value for name, value in values.items()}
        return tuple(values[name] for name in self._order)


def _value(name: str) -> Any:
    return bindparam(name + "_")  # SQLAlchemy has its own use for names that are those of columns


class Statements:
    """All that is ever executed, for one dialect."""

    def __init__(self, table: str, dialect: Dialect, *, with_inbox: bool) -> None:
        self.table = table
        self._dialect = dialect
        schema, _, name = table.rpartition(".")
        exact = mysql.VARCHAR(LONGEST_KEY, collation="utf8mb4_bin")  # names differ by case
        key_text = String(LONGEST_KEY).with_variant(exact, "mysql", "mariadb")
        options: dict[str, Any] = {"schema": schema or None, "mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
        options |= {"mariadb_engine": "InnoDB", "mariadb_charset": "utf8mb4"}
        self._offsets = offsets = Table(
            name,
            MetaData(),
            Column("consumer_group", key_text, primary_key=True),
            Column("topic", key_text, primary_key=True),
            Column("broker_name", key_text, primary_key=True),
            Column("queue_id", Integer, primary_key=True, autoincrement=False),
            Column("next_offset", BigInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            Column("reset_epoch", BigInteger, nullable=False),
            Column("owner", String(LONGEST_KEY)),
            Column("last_offset", BigInteger),
            Column("last_message_id", String(LONGEST_KEY)),
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
            UniqueConstraint("consumer_group", "at", "message_id"),  # an index that is made with the table
            **options,
        )
        self._with_inbox = with_inbox
        self._lookups: dict[int, Statement] = {}
        row = offsets.c
        key = (
            row.consumer_group == _value("group"),
            row.topic == _value("topic"),
            row.broker_name == _value("broker"),
            row.queue_id == _value("queue"),
        )
        shown_columns = (
            row.topic, row.broker_name, row.queue_id, row.next_offset, row.epoch, row.reset_epoch, row.owner,
            row.last_offset, row.last_message_id, row.last_store_time,
        )  # fmt: skip
        one: Any = literal_column("1")
        never = text("1 = 0")
        now = {"updated_at": func.current_timestamp()}
        unwitnessed = {"last_offset": null(), "last_message_id": null(), "last_store_time": null()}
        ours = (*key, row.epoch == _value("epoch"))
        self._look = self._made(select(*row).where(never))
        self.row = self._made(select(*shown_columns).where(*key))
        self.of_group = self._made(select(*shown_columns).where(row.consumer_group == _value("group")))
        self.claim = self._made(update(offsets).where(*key).values(epoch=row.epoch + one, owner=_value("owner"), **now))
        self.begin = self._made(
            insert(offsets).values(
                consumer_group=_value("group"),
                topic=_value("topic"),
                broker_name=_value("broker"),
                queue_id=_value("queue"),
                next_offset=_value("next"),
                epoch=_value("epoch"),
                reset_epoch=_value("reset_epoch"),
                owner=_value("owner"),
                **now,
            )
        )
        self.advance = self._made(
            update(offsets)
            .where(*ours, row.next_offset <= _value("first"))
            .values(
                next_offset=_value("next"),
                last_offset=_value("last_offset"),
                last_message_id=_value("message_id"),
                last_store_time=_value("store_time"),
                **now,
            )
        )
        self.persist = self._made(
            update(offsets).where(*ours, row.next_offset < _value("next")).values(next_offset=_value("next"), **now)
        )
        moved = {"next_offset": _value("next"), "reset_epoch": _value("reset_epoch"), "epoch": row.epoch + one}
        self.move = self._made(update(offsets).where(*ours).values(**moved, **unwitnessed, **now))
        self.reset = self._made(update(offsets).where(*key).values(**moved, **unwitnessed, **now))
        self.forget = self._made(delete(offsets).where(*key))
        self.marks = dialect.name != "postgresql"  # there it would cost two answers, and its driver tells
        self.mark, self.unmark = Statement("SAVEPOINT pyrocket_begun"), Statement("RELEASE SAVEPOINT pyrocket_begun")
        seen = inbox.c
        self.to_inbox = self._made(
            insert(inbox).values(consumer_group=_value("group"), message_id=_value("message_id"), at=_value("at"))
        )
        self.old_in_inbox = self._made(
            select(seen.message_id)
            .where(seen.consumer_group == _value("group"), seen.at < _value("before"))
            .order_by(seen.at)
            .suffix_with(f"LIMIT {INBOX_STEP}")
        )
        self.again_in_inbox = self._made(
            update(inbox)
            .where(seen.consumer_group == _value("group"), seen.message_id == _value("message_id"))
            .values(at=_value("at"))
        )
        self.from_inbox = self._made(
            delete(inbox).where(seen.consumer_group == _value("group"), seen.message_id == _value("message_id"))
        )
        self._look_at_inbox = self._made(select(*seen).where(never))

    def _made(self, clause: ClauseElement) -> Statement:
        return Statement.of(clause, self._dialect)

    def in_inbox(self, count: int) -> Statement:
        """Return what looks for so many ids, `id0` and on, and for when they were noted."""
        if count not in self._lookups:
            seen = self._inbox.c
            wanted = seen.message_id.in_([_value(f"id{number}") for number in range(count)])
            self._lookups[count] = self._made(
                select(seen.message_id, seen.at).where(seen.consumer_group == _value("group"), wanted)
            )
        return self._lookups[count]

    def ddl(self) -> list[str]:
        """Return the statements that make the tables."""
        tables = [self._offsets, self._inbox] if self._with_inbox else [self._offsets]
        makers = [CreateTable(table, if_not_exists=True) for table in tables]
        return [str(maker.compile(dialect=self._dialect)).strip() for maker in makers]

    def creations(self) -> list[Statement]:
        """Return the same to be executed."""
        return [Statement(text) for text in self.ddl()]

    def look(self, execute: Execute) -> None:
        """See that the tables are there, with all their columns."""
        execute(self._look)
        if self._with_inbox:
            execute(self._look_at_inbox)


def ddl(dialect: str, table: str, *, with_inbox: bool) -> list[str]:
    """Return the statements that make the tables, for "sqlite", "postgresql", "mysql" or "mariadb"."""
    return Statements(table, _DIALECTS[dialect](), with_inbox=with_inbox).ddl()


_DIALECTS: dict[str, Callable[..., Dialect]] = {
    "sqlite": sqlite.dialect, "postgresql": postgresql.dialect, "mysql": mysql.dialect, "mariadb": mysql.dialect,
}  # fmt: skip


# --- errors


def _driver_verdict(error: BaseException | None, dialect: str) -> Verdict | None:
    """Return what the driver's own error says, by its code."""
    if isinstance(error, sqlite3.Error):
        return _SQLITE_CODES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    code = error.args[0] if error is not None and error.args else None
    if dialect in ("mysql", "mariadb") and code in _MYSQL_CODES:  # their states say less: many errors share one
        return _MYSQL_CODES[code]
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(code, dict):
        state = code.get("C")  # pg8000
    if isinstance(state, str):
        return next((_SQLSTATES[state[:size]] for size in (5, 3, 2) if state[:size] in _SQLSTATES), "theirs")
    return "gone" if _is_disconnected(error) else None


def _is_disconnected(error: BaseException | None) -> bool:
    """Tell whether psycopg lost its connection, or got none: there is no SQLSTATE then."""
    return type(error).__name__ == "OperationalError" and type(error).__module__.startswith("psycopg")


def _refuse_to_end(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "the listener has called commit, rollback or close on the connection it was given: the transaction is ended by "
        "exactly_once, together with the offset. Raise (or return Retry()) to roll back; for a transaction of your own "
        "use advance()"
    )


def was_ended() -> NoReturn:
    """Raise what says so.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "the listener has ended the transaction it was given, which exactly_once ends, together with the offset, or "
        "has caught an error by which the database did (a deadlock, say); what it had committed is not undone"
    )


# --- databases


class Database:
    """What `DatabaseOffsets` needs of a database."""

    shown: str
    dialect: Dialect
    is_async = False
    arguments = 1
    """How many arguments a listener gets besides its messages."""

    def open(self) -> None:
        """Keep what `run` needs until `close`."""

    def run(self, work: Callable[[Execute], T]) -> T:
        """Do some statements in a transaction of their own. Any thread."""
        raise NotImplementedError

    def run_apart(self, work: Callable[[Execute], T]) -> T:
        """Do the same while the caller has a transaction of its own open."""
        return self.run(work)

    def transaction(self) -> AbstractContextManager[Scope]:
        """Begin a transaction for a listener; it is committed at the end, or rolled back by what is raised."""
        raise NotImplementedError

    def executor(self, given: Any) -> Execute:
        """Return what executes in a user's own transaction."""
        raise NotImplementedError

    def verdict(self, error: BaseException) -> Verdict:
        """Return what an error says."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what was opened besides what the user gave."""


class _SqlScope:
    """A transaction of SQLAlchemy's."""

    def __init__(self, connection: Connection, handle: Any, held: Any) -> None:
        """`held` is what the user's code holds, or what that goes by: its ends are not the user's to call."""
        self.execute = _executor(connection)
        self.arguments = (handle,)
        self._connection = connection
        self._held = held
        self._transaction = held.get_transaction()
        held.commit = held.rollback = held.close = _refuse_to_end

    def ready(self) -> None:
        if self._held.get_transaction() is not self._transaction or not self._transaction.is_active:
            was_ended()
        if isinstance(self._held, Session):
            self._held.flush()
        info = getattr(self._connection.connection.driver_connection, "info", None)
        if getattr(info, "transaction_status", None) == IDLE:  # of psycopg: ended by a statement, or beneath SQLAlchemy
            was_ended()

    def begin(self) -> None:
        driver = self._connection.connection.driver_connection
        if self._connection.dialect.name == "sqlite" and not getattr(driver, "in_transaction", True):
            self._connection.exec_driver_sql("BEGIN")  # its driver would only with the first change

    def is_lost(self) -> bool:
        if self._connection.closed or self._connection.invalidated:
            return True
        driver = self._connection.connection.driver_connection
        return bool(getattr(driver, "closed", False)) or getattr(driver, "open", True) is False

    def give_back(self) -> None:
        """The transaction has ended: whoever keeps the connection may end it."""
        del self._held.commit, self._held.rollback, self._held.close


def _executor(connection: Connection) -> Execute:
    def execute(statement: Statement, values: Values | Sequence[Values] = ()) -> Answer:
        if isinstance(values, Mapping):
            result = connection.exec_driver_sql(statement.text, statement.bound(values))
        elif values:
            result = connection.exec_driver_sql(statement.text, [statement.bound(each) for each in values])
        else:
            result = connection.exec_driver_sql(statement.text)
        return Answer(result.fetchall() if result.returns_rows else (), result.rowcount)

    return execute


class SqlDatabase(Database):
    """SQLAlchemy's `Engine`, or `sessionmaker`.

    Bookkeeping has connections of its own: listeners may have all of the engine's.
    """

    def __init__(self, engine: Engine, sessions: sessionmaker[Any] | None) -> None:
        _check_engine(engine, is_async=self.is_async)
        self.shown = _address(engine.url)
        self.dialect = engine.dialect
        self.engine = engine
        self._sessions = sessions
        self._pid = os.getpid()
        self.renew_locks()
        renew_locks_in_children(self)

    def renew_locks(self) -> None:
        """Have a lock that nobody holds, and no connections: in a forked child they are its parent's."""
        self._lock = threading.Lock()
        self._own: _OwnConnections | _OwnLoop | None = None
        self._users = 0
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.engine.dispose(close=False)

    def _new_own(self) -> _OwnConnections | _OwnLoop:
        return _OwnConnections(self.engine)

    def open(self) -> None:
        with self._lock:
            self._users += 1
            if self._own is None:
                self._own = self._new_own()

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            own, self._own = (self._own, None) if self._users <= 0 else (None, self._own)
        if own is not None:
            own.close()

    def run(self, work: Callable[[Execute], T]) -> T:
        with self._lock:
            own = self._own
        if own is not None:
            return own.run(work)
        own = self._new_own()
        try:
            return own.run(work)
        finally:
            own.close()

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        if self._sessions is None:
            with self.engine.connect() as connection, connection.begin():
                scope = _SqlScope(connection, connection, connection)
                try:
                    yield scope
                finally:
                    scope.give_back()
        else:
            with self._sessions() as session, session.begin():
                scope = _SqlScope(session.connection(), session, session)
                try:
                    yield scope
                finally:
                    scope.give_back()

    def executor(self, given: Any) -> Execute:
        if isinstance(given, Session):
            given.flush()
            return _executor(given.connection())
        if not isinstance(given, Connection):
            raise ConfigError(
                f"advance() needs the Connection or Session of your transaction, not {shown_unless_secret(given)}"
            )
        return _executor(given)

    def verdict(self, error: BaseException) -> Verdict:
        if isinstance(error, PoolTimeout):
            return "gone"
        if not isinstance(error, DBAPIError):
            return "theirs"
        return "gone" if error.connection_invalidated else _driver_verdict(error.orig, self.dialect.name) or "theirs"


class AsyncDatabase(SqlDatabase):
    """SQLAlchemy's `AsyncEngine`, or `async_sessionmaker`.

    Listeners' transactions run on their loop. Bookkeeping runs on a loop of its own, with connections of its own: those
    of the engine's pool belong to the loop that opened them.
    """

    is_async = True

    def __init__(self, engine: AsyncEngine, sessions: async_sessionmaker[Any] | None) -> None:
        super().__init__(engine.sync_engine, None)
        self._async_engine = engine
        self._async_sessions = sessions
        self._loop: asyncio.AbstractEventLoop | None = None  # that listeners run on

    def _new_own(self) -> _OwnConnections | _OwnLoop:
        return _OwnLoop(self.engine)

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        """To be entered within a greenlet of SQLAlchemy's."""
        self._check_loop()
        handle: Any
        held: Any
        if self._async_sessions is None:
            handle = self._async_engine.connect()
            await_only(handle.start())
            held = handle.sync_connection
        else:
            handle = self._async_sessions()
            held = handle.sync_session
        try:
            with held.begin():
                connection = held if isinstance(held, Connection) else held.connection()
                scope = _SqlScope(connection, handle, held)
                try:
                    yield scope
                finally:
                    scope.give_back()
        finally:
            await_only(handle.close())

    def _check_loop(self) -> None:
        """See that connections of a pool are used on one loop alone, as SQLAlchemy wants it.

        Raises:
            ConfigError: another loop that runs still has used them.
        """
        loop = asyncio.get_running_loop()
        other = self._loop if self._loop is not loop else None
        if other is not None and other.is_running() and not isinstance(self.engine.pool, NullPool):
            raise ConfigError(
                f"{self.shown} is used on two event loops, and its pool is of one: give each consumer an engine and a "
                "store of its own, or use AsyncPushConsumer on the application's loop"
            )
        self._loop = loop

    def executor(self, given: Any) -> Execute:
        if isinstance(given, AsyncSession):
            return super().executor(given.sync_session)
        if not isinstance(given, AsyncConnection):
            raise ConfigError(
                "advance() needs the AsyncConnection or AsyncSession of your transaction, not "
                f"{shown_unless_secret(given)}"
            )
        return super().executor(given.sync_connection)


class _OwnConnections:
    """Connections for bookkeeping, as the engine would make them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = _as_if(engine)

    def run(self, work: Callable[[Execute], T]) -> T:
        return _run_on(self._engine, work)

    def close(self) -> None:
        self._engine.dispose()


class _OwnLoop:
    """A loop on a thread of its own, and connections that belong to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = _as_if(engine)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="pyrocket-database", daemon=True).start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, work: Callable[[Execute], T]) -> T:
        running = asyncio.run_coroutine_threadsafe(greenlet_spawn(_run_on, self._engine, work), self._loop)
        try:
            result: T = running.result(ANSWER_WITHIN_S)
        except TimeoutError:
            running.cancel()
            raise TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s") from None
        return result

    def close(self) -> None:
        disposing = asyncio.run_coroutine_threadsafe(greenlet_spawn(self._engine.dispose), self._loop)
        try:
            disposing.result(DISPOSE_WITHIN_S)
        except TimeoutError:
            pass  # what it still waits for goes with it
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)


def _as_if(engine: Engine) -> Engine:
    """Return an engine with the same settings, and connections of its own."""
    return Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=engine.get_execution_options(),
        hide_parameters=engine.hide_parameters,
    )


def _run_on(engine: Engine, work: Callable[[Execute], T]) -> T:
    """Do `work` on an engine of our own."""
    with engine.connect() as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'")
        elif engine.dialect.name in ("mysql", "mariadb"):
            connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {LOCK_WAIT_S}")
        return work(_executor(connection))


class DjangoDatabase(Database):
    """A database of Django's settings. Each thread has its own connection, as everywhere in Django."""

    arguments = 0

    def __init__(self, alias: str) -> None:
        from django.core.exceptions import ImproperlyConfigured
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist

        try:
            vendor = connections[alias].vendor
        except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
            raise ConfigError(
                f"alias={shown(alias)} is no database of Django's settings ({error}); it must be one in DATABASES, "
                "and django.setup() must have been called"
            ) from error
        if vendor not in _DIALECTS:
            raise ConfigError(f"alias={alias!r} is a database of {vendor}; {_SUPPORTED}")
        self._alias = alias
        self._lock = threading.Lock()
        self._users = 0
        self._lent: set[Any] = set()  # connections of threads that listeners run on
        self._busy: set[Any] = set()  # those of them that a listener call has in hand
        self.shown = f"django:{alias}"
        self.dialect = _DIALECTS[vendor](paramstyle="format")

    @contextmanager
    def _scope(self) -> Generator[Scope]:
        from django.db import connections, transaction

        connection = connections[self._alias]
        # A CONN_MAX_AGE of 0 is for requests: a connection for each would cost more than what is done with it.
        if not connection.in_atomic_block and (connection.errors_occurred or connection.settings_dict["CONN_MAX_AGE"]):
            connection.close_if_unusable_or_obsolete()
        with transaction.atomic(using=self._alias, durable=True):
            yield _DjangoScope(connection)

    def run(self, work: Callable[[Execute], T]) -> T:
        with self._scope() as scope:
            return work(scope.execute)

    def run_apart(self, work: Callable[[Execute], T]) -> T:
        def run_here() -> T:
            from django.db import connections

            try:
                return self.run(work)
            finally:
                connections[self._alias].close()

        with ThreadPoolExecutor(1) as thread:  # a connection of its own
            return thread.submit(run_here).result()

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        from django.db import connections

        connection = connections[self._alias]
        with self._lock:
            if connection not in self._lent:
                connection.inc_thread_sharing()  # they are closed by whoever closes this
                self._lent.add(connection)
            self._busy.add(connection)
        try:
            with self._scope() as scope:
                yield scope
        finally:
            with self._lock:
                self._busy.discard(connection)
                is_last = self._users <= 0
                if is_last:
                    self._lent.discard(connection)
            if is_last:  # the consumer has not waited for its listener
                connection.close()

    def open(self) -> None:
        with self._lock:
            self._users += 1

    def executor(self, given: Any) -> Execute:
        from django.db import connections

        if given is not None:
            raise ConfigError(f"advance() takes None and the messages here, not {shown(given)}: the alias says where")
        connection = connections[self._alias]
        if not connection.in_atomic_block:
            raise ConfigError("advance() must be called within transaction.atomic(), with the effects it counts")
        return _DjangoScope(connection).execute

    def verdict(self, error: BaseException) -> Verdict:
        from django.db import Error, InterfaceError

        if not isinstance(error, Error):
            return "theirs"
        return _driver_verdict(error.__cause__, self.dialect.name) or (
            "gone" if isinstance(error, InterfaceError) else "theirs"
        )

    def close(self) -> None:
        from django.db import connections

        with self._lock:
            self._users -= 1
            idle = self._lent - self._busy if self._users <= 0 else set()
            self._lent -= idle
        for connection in (connections[self._alias], *idle):
            connection.close()


class _DjangoScope:
    """A transaction of Django's."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, statement: Statement, values: Values | Sequence[Values] = ()) -> Answer:
        with self._connection.cursor() as cursor:
            if isinstance(values, Mapping):
                cursor.execute(statement.text, statement.bound(values))
            elif values:
                cursor.executemany(statement.text, [statement.bound(each) for each in values])
            else:
                cursor.execute(statement.text)
            return Answer(cursor.fetchall() if cursor.description else (), cursor.rowcount)

    def begin(self) -> None:
        pass

    def ready(self) -> None:
        if not self._connection.in_atomic_block or self._connection.needs_rollback:
            was_ended()

    def is_lost(self) -> bool:
        return self._connection.connection is None or self._connection.errors_occurred


_SUPPORTED = "it must be SQLite, PostgreSQL, MySQL or MariaDB"

_DRIVERS = {
    "sqlite": "sqlite:///file",
    "postgresql": "postgresql+psycopg://user@host/name (pip install 'psycopg[binary]')",
    "mysql": "mysql+pymysql://user@host/name (pip install PyMySQL)",
    "mariadb": "mariadb+pymysql://user@host/name (pip install PyMySQL)",
}


_SHOWN = {
    "application_name", "charset", "connect_timeout", "dbname", "host", "mode", "port", "sslmode", "timeout", "uri",
    "user",
}  # fmt: skip
"""Parts of an address's query that are shown: any other may be a secret."""


def _address(url: URL) -> str:
    """Return the address of a database without passwords, wherever they are in it."""
    query = {name: value if name in _SHOWN else "***" for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _check_host(url: URL, what: str) -> None:
    if url.host is not None and "@" in url.host:  # what is before it is of the password
        raise ConfigError(f"{what} has an @ in its host; an @ in a password is written %40 there")


def _check_engine(engine: Engine, *, is_async: bool) -> None:
    _check_host(engine.url, "the address of engine")
    address, dialect = _address(engine.url), engine.dialect.name
    if dialect not in _DIALECTS:
        raise ConfigError(f"engine={address!r} is a database of {dialect}; {_SUPPORTED}")
    if engine.dialect.is_async and not is_async:
        raise ConfigError(
            f"engine={address!r} has an asynchronous driver; use create_async_engine, or a driver that is not"
        )
    database, mode = engine.url.database or ":memory:", engine.url.query.get("mode")
    if dialect == "sqlite" and (":memory:" in database or mode == "memory"):
        raise ConfigError(f"engine={address!r} is in memory, where threads have no transactions apart; use a file")
    if isinstance(engine.pool, StaticPool):
        raise ConfigError(
            f"engine={address!r} has a StaticPool: all threads have one connection there, and so one transaction, "
            "which each of them commits; make the engine without it"
        )


def of(given: object) -> Database:
    """Return the database of an engine or of a maker of sessions.

    Raises:
        ConfigError: it is neither, or one of a kind that is not supported.
    """
    if isinstance(given, Engine):
        return SqlDatabase(given, None)
    if isinstance(given, AsyncEngine):
        return AsyncDatabase(given, None)
    if isinstance(given, (sessionmaker, async_sessionmaker)):
        bind = given.kw.get("bind")
        if isinstance(given, sessionmaker) and isinstance(bind, Engine):
            return SqlDatabase(bind, given)
        if isinstance(given, async_sessionmaker) and isinstance(bind, AsyncEngine):
            return AsyncDatabase(bind, given)
        raise ConfigError(f"engine is a {type(given).__name__} without one; make it with one: sessionmaker(engine)")
    raise ConfigError(
        f"engine={shown_unless_secret(given)} is not allowed; it must be a SQLAlchemy Engine, AsyncEngine, "
        "sessionmaker or async_sessionmaker (create_engine(url) makes an Engine)"
    )


def engine_at(url: str) -> Engine | AsyncEngine:
    """Return an engine that keeps no connection open.

    Raises:
        ConfigError: `url` is no address, or its driver is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # its text would show a password
        raise ConfigError(
            "the database's address cannot be read; it must be one of SQLAlchemy's: postgresql+psycopg://user@host/name"
        ) from None
    _check_host(parsed, "the database's address")
    kind = parsed.get_backend_name()
    if kind not in _DRIVERS:
        raise ConfigError(f"{_address(parsed)} is a database of {kind}; {_SUPPORTED}: {', '.join(_DRIVERS.values())}")
    if kind == "sqlite" and parsed.database and not parsed.query and not os.path.exists(parsed.database):
        raise ConfigError(f"{_address(parsed)}: there is no such file; a member makes it, with create_tables()")
    try:
        dialect = parsed.get_dialect()
        options: dict[str, Any] = {"poolclass": NullPool}
        if dialect.driver in ("psycopg", "psycopg2") and "connect_timeout" not in parsed.query:
            options["connect_args"] = {"connect_timeout": CONNECT_WITHIN_S}  # others have one without being asked
        return (create_async_engine if dialect.is_async else create_engine)(parsed, **options)
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigError(
            f"{_address(parsed)} needs a driver that is not installed ({error}); for example {_DRIVERS[kind]}"
        ) from error
    except (ArgumentError, TypeError, ValueError):
        raise ConfigError(f"{_address(parsed)} has something in it that its driver does not take") from None


def django(alias: str) -> Database:
    """Return the database of an alias of Django's.

    Raises:
        ConfigError: there is none, or Django is not installed.
    """
    try:
        return DjangoDatabase(alias)
    except ImportError as error:
        raise ConfigError(
            f"DatabaseOffsets.django needs Django, which is not there ({error}); pip install django"
        ) from error


# --- listeners


def check_listener(listener: Any, database: Database) -> None:
    """Look at a listener before it is given a first message.

    Raises:
        ConfigError: it cannot be called as it will be.
    """
    if not callable(listener) or isinstance(listener, type):
        raise ConfigError(f"the listener must be a function, not {shown(listener)}")
    wanted = ("messages", "connection")[: 1 + database.arguments]
    try:
        inspect.signature(listener).bind(*wanted)
    except ValueError:
        pass  # some built-ins tell nothing of themselves
    except TypeError as error:
        raise ConfigError(
            f"the listener {_name(listener)} cannot be called with ({', '.join(wanted)}): {error}"
        ) from error
    if _is_coroutine_function(listener) and not database.is_async:
        raise ConfigError(
            f"the listener {_name(listener)} is async def, and {database.shown} is not asynchronous; use "
            "create_async_engine, or a plain function"
        )
    if database.is_async and not _is_coroutine_function(listener):
        raise ConfigError(
            f"the listener {_name(listener)} is a plain function, and {database.shown} is asynchronous; use "
            "create_engine, or an async def function"
        )


def _is_coroutine_function(listener: Any) -> bool:
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(
        getattr(listener, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def _name(listener: Any) -> str:
    return getattr(listener, "__qualname__", shown(listener))


def as_listener(database: Database, listener: Callable[..., Any], consume: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a listener of messages alone, plain or `async def`, for `consume`, which calls the user's.

    `consume` gets the messages, what calls the user's listener, and what sleeps.
    """
    if database.is_async:

        def call_and_await(*arguments: Any) -> Any:
            return await_only(listener(*arguments))

        def rest(pause_s: float) -> None:
            await_only(asyncio.sleep(pause_s))

        async def consume_async(messages: Any) -> Any:
            return await greenlet_spawn(consume, messages, call_and_await, rest)

        wrapped: Callable[[Any], Any] = consume_async
    else:

        def consume_here(messages: Any) -> Any:
            return consume(messages, listener, time.sleep)

        wrapped = consume_here
    wrapped.__name__ = getattr(listener, "__name__", wrapped.__name__)
    wrapped.__qualname__ = getattr(listener, "__qualname__", wrapped.__qualname__)
    wrapped.__doc__ = listener.__doc__
    return wrapped


def spawned(work: Callable[..., T], *arguments: Any) -> Coroutine[Any, Any, T]:
    """Return what does `work` where asynchronous connections can be used as if they were not."""
    return greenlet_spawn(work, *arguments)
