"""Access of `DatabaseOffsets` to a database: its errors, the interface, and SQLAlchemy's engines and sessions."""

from __future__ import annotations

import asyncio
import inspect
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn, TypeVar

from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.engine import Connection, Dialect, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool, StaticPool
from sqlalchemy.util import await_only, greenlet_spawn

from pyrocket_consumer.config.checks import has_kind
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets.database.statements import (
    DIALECTS,
    Execute,
    Statement,
    StatementResult,
    Values,
)
from pyrocket_consumer.text import safe_repr, safe_repr_unless_secret
from pyrocket_consumer.transport.forks import renew_locks_in_children
from pyrocket_consumer.transport.io_thread import IoThread

T = TypeVar("T")

LOCK_TIMEOUT_S = 1
"""How long bookkeeping waits for a row that another session has locked. All queues wait meanwhile."""

DRIVER_TIMEOUT_S = 60.0
"""How long bookkeeping waits for an asynchronous driver; other drivers have their own timeouts."""

DISPOSE_TIMEOUT_S = 5.0

CONNECT_TIMEOUT_S = 10
"""How long tools wait for a server that does not respond."""

SET_LOCK_TIMEOUT = {
    "postgresql": f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'",
    "mysql": f"SET SESSION innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}",
    "mariadb": f"SET SESSION innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}",
}

SUPPORTED = "it must be SQLite, PostgreSQL, MySQL or MariaDB"


# --- errors

ErrorKind = Literal["retry", "locked", "disconnected", "unavailable", "aborted", "listener"]
"""The kinds of errors:

* "retry": the transaction conflicts with another one
* "locked": another session keeps a row locked
* "disconnected": there is no connection
* "unavailable": the database cannot be used now
* "aborted": an earlier error has ended the transaction
* "listener": the listener caused the error
"""

_SQLSTATES: dict[str, ErrorKind] = {
    **dict.fromkeys(("40001", "40P01"), "retry"),  # serialization failure, deadlock
    **dict.fromkeys(("08", "53300", "57P"), "disconnected"),  # connection, too many of them, shutdown
    **dict.fromkeys(("53", "40003"), "unavailable"),  # resources
    **dict.fromkeys(("25006", "25P03"), "unavailable"),  # read-only: a standby after a failover
    "55P03": "locked",
    "25P02": "aborted",
}

_MYSQL_CODES: dict[int, ErrorKind] = {
    **dict.fromkeys((1213, 1020), "retry"),
    **dict.fromkeys((1205, 3572), "locked"),
    **dict.fromkeys(
        (0, 1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1290, 1792, 1836, 1927), "unavailable"
    ),
    **dict.fromkeys((2002, 2003, 2006, 2012, 2013, 2055, 3159, 4031), "disconnected"),
}

_SQLITE_CODES: dict[int, ErrorKind] = {
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "retry"),
    **dict.fromkeys(
        (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ),
        "unavailable",
    ),
    sqlite3.SQLITE_CANTOPEN: "disconnected",
}


def classify_driver_error(error: BaseException | None, dialect: str) -> ErrorKind | None:
    """Return the kind of a driver's error, by its code; None if it is unknown."""
    if isinstance(error, sqlite3.Error):
        return _SQLITE_CODES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    code = error.args[0] if error is not None and error.args else None
    # MySQL's own codes are more specific than the SQLSTATE, which many errors share.
    if dialect in ("mysql", "mariadb") and code in _MYSQL_CODES:
        return _MYSQL_CODES[code]
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(code, dict):
        state = code.get("C")  # pg8000
    if isinstance(state, str):
        return next((_SQLSTATES[state[:size]] for size in (5, 3, 2) if state[:size] in _SQLSTATES), "listener")
    return "disconnected" if _is_disconnected(error) else None


def is_file_replaced(error: BaseException | None, path: object) -> bool:
    """Return whether the error means that another file is at the path of a SQLite database now.

    Its connections can no longer write. While there is no file, keep them: a new one would create an empty file.
    """
    if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_DBMOVED:
        return False
    name = str(path)
    return os.path.exists(name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name)


def _is_disconnected(error: BaseException | None) -> bool:
    """Return whether psycopg lost its connection, or could not connect. Such an error has no SQLSTATE."""
    return type(error).__name__ == "OperationalError" and type(error).__module__.startswith("psycopg")


# --- the interface


class Scope:
    """The transaction of a listener call."""

    arguments: tuple[Any, ...] = ()
    """The listener's arguments after its messages."""

    execute: Execute
    """Executes statements in the transaction."""

    def begin(self) -> None:
        """Begin the transaction in the database, before the listener reads anything."""

    def flush_and_check(self) -> None:
        """Execute all pending statements, and check that the transaction is still open.

        Raises:
            ConfigError: the listener has ended it.
        """

    def is_lost(self) -> bool:
        """Return whether the connection is lost."""
        raise NotImplementedError

    def check_driver(self, connection: Any) -> None:
        """Check that no statement, and no code below the database library, has ended psycopg's transaction.

        Raises:
            ConfigError: it was ended.
        """
        if getattr(getattr(connection, "info", None), "transaction_status", None) == 0:  # psycopg's IDLE
            self.raise_ended()

    @staticmethod
    def raise_ended() -> NoReturn:
        """Raise ConfigError, because the listener has ended the transaction."""
        raise ConfigError(
            "the listener has ended the transaction it was given, or has caught an error by which the database ended "
            "it (a deadlock, for example). Only exactly_once may end it, together with the offset. A commit is not "
            "undone"
        )


class Database:
    """The interface that `DatabaseOffsets` needs of a database."""

    address: str
    dialect: Dialect
    is_async = False
    argument_count = 1
    """The number of a listener's arguments after its messages."""

    def open(self) -> None:
        """Open the connections of `run`, and keep them until `close`."""

    def run(self, work: Callable[[Execute], T]) -> T:
        """Run `work` in a new transaction. Any thread may call this."""
        raise NotImplementedError

    def run_separately(self, work: Callable[[Execute], T]) -> T:
        """Run `work` in a new transaction while the caller has another one open."""
        return self.run(work)

    def transaction(self) -> AbstractContextManager[Scope]:
        """Begin a transaction for a listener. It is committed at the end, or rolled back by an exception."""
        raise NotImplementedError

    def executor(self, given: Any) -> Execute:
        """Return the function that executes statements in the user's own transaction."""
        raise NotImplementedError

    def classify_error(self, error: BaseException) -> ErrorKind:
        """Return the kind of an error."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections of `run`. The user's engine stays open."""


# --- SQLAlchemy


def _raise_must_not_end(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "the listener has called commit, rollback or close on the connection it was given. Only exactly_once may end "
        "the transaction, together with the offset. Raise (or return Retry()) to roll back, or use advance() in a "
        "transaction of your own"
    )


class _SqlScope(Scope):
    """A transaction of SQLAlchemy."""

    def __init__(self, handle: Any, sync_handle: Any) -> None:
        """Wrap a transaction. `handle` is the user's connection or session, and `sync_handle` its synchronous form.

        Until `guard` ends, commit, rollback and close of `sync_handle` raise an error.
        """
        self.arguments = (handle,)
        self._sync_handle = sync_handle
        self._connection = sync_handle.connection() if isinstance(sync_handle, Session) else sync_handle
        self.execute = _executor(self._connection)
        self._transaction = sync_handle.get_transaction()
        sync_handle.commit = sync_handle.rollback = sync_handle.close = _raise_must_not_end

    def flush_and_check(self) -> None:
        if self._sync_handle.get_transaction() is not self._transaction or not self._transaction.is_active:
            self.raise_ended()
        if isinstance(self._sync_handle, Session):
            self._sync_handle.flush()
        self.check_driver(self._connection.connection.driver_connection)

    def begin(self) -> None:
        driver = self._connection.connection.driver_connection
        if self._connection.dialect.name == "sqlite" and not getattr(driver, "in_transaction", True):
            self._connection.exec_driver_sql("BEGIN")  # the driver itself begins only with the first change

    def is_lost(self) -> bool:
        if self._connection.closed or self._connection.invalidated:
            return True
        driver = self._connection.connection.driver_connection
        return bool(getattr(driver, "closed", False)) or getattr(driver, "open", True) is False

    @contextmanager
    def guard(self) -> Generator[None]:
        """Restore commit, rollback and close at the end, and discard a connection that is of no use now."""
        try:
            with _discard_if_replaced(self._connection):
                yield
        finally:
            del self._sync_handle.commit, self._sync_handle.rollback, self._sync_handle.close


def _executor(connection: Connection) -> Execute:
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):  # SQLAlchemy's layers cost more than a statement on a file
        return lambda statement, values=(): statement.run_on(driver.cursor(), values)

    def execute(statement: Statement, values: Values | Sequence[Values] = ()) -> StatementResult:
        result = connection.exec_driver_sql(statement.text, statement.bind(values))
        return StatementResult(result.fetchall() if result.returns_rows else (), result.rowcount)

    return execute


class SqlDatabase(Database):
    """SQLAlchemy's `Engine`, or `sessionmaker`.

    Bookkeeping has its own connections, because listeners may use all connections of the engine's pool.
    """

    def __init__(self, engine: Engine, sessions: sessionmaker[Any] | None) -> None:
        _check_engine(engine, is_async=self.is_async)
        self.address = _format_address(engine.url)
        self.dialect = engine.dialect
        self.engine = engine
        self._sessions = sessions
        self._pid = os.getpid()
        self.renew_locks()
        renew_locks_in_children(self)

    def renew_locks(self) -> None:
        """Create a new lock, and forget all connections. In a forked child, the old ones belong to the parent."""
        self._lock = threading.Lock()
        self._bookkeeping: _Bookkeeping | None = None
        self._users = 0
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.engine.dispose(close=False)

    def open(self) -> None:
        with self._lock:
            self._users += 1
            if self._bookkeeping is None:
                self._bookkeeping = _Bookkeeping(self.engine)

    def close(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users > 0:
                return
            bookkeeping, self._bookkeeping = self._bookkeeping, None
        if bookkeeping is not None:
            bookkeeping.close()

    def run(self, work: Callable[[Execute], T]) -> T:
        with self._lock:
            bookkeeping = self._bookkeeping
        if bookkeeping is not None:
            return bookkeeping.run(work)
        bookkeeping = _Bookkeeping(self.engine)
        try:
            return bookkeeping.run(work)
        finally:
            bookkeeping.close()

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        with (self._sessions or self.engine.connect)() as handle, handle.begin():
            scope = _SqlScope(handle, handle)
            with scope.guard():
                yield scope

    def executor(self, given: Any) -> Execute:
        if isinstance(given, Session):
            given.flush()
            return _executor(given.connection())
        if not isinstance(given, Connection):
            raise ConfigError(
                f"advance() needs the Connection or Session of your transaction, not {safe_repr_unless_secret(given)}"
            )
        return _executor(given)

    def classify_error(self, error: BaseException) -> ErrorKind:
        if isinstance(error, sqlite3.Error):
            return classify_driver_error(error, self.dialect.name) or "listener"
        if isinstance(error, PoolTimeout):
            return "disconnected"
        if not isinstance(error, DBAPIError):
            return "listener"
        return (
            "disconnected"
            if error.connection_invalidated
            else classify_driver_error(error.orig, self.dialect.name) or "listener"
        )


class AsyncDatabase(SqlDatabase):
    """SQLAlchemy's `AsyncEngine`, or `async_sessionmaker`.

    Listeners' transactions run on their loop. Bookkeeping has its own loop and its own connections, because the
    connections of the engine's pool belong to the loop that opened them.
    """

    is_async = True

    def __init__(self, engine: AsyncEngine, sessions: async_sessionmaker[Any] | None) -> None:
        super().__init__(engine.sync_engine, None)
        self._async_engine = engine
        self._async_sessions = sessions

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        """Begin a transaction for a listener. Enter this within a greenlet of SQLAlchemy."""
        handle: Any
        sync_handle: Any
        if self._async_sessions is None:
            handle = self._async_engine.connect()
            await_only(handle.start())
            sync_handle = handle.sync_connection
        else:
            handle = self._async_sessions()
            sync_handle = handle.sync_session
        try:
            with sync_handle.begin():
                scope = _SqlScope(handle, sync_handle)
                with scope.guard():
                    yield scope
        finally:
            await_only(handle.close())

    def executor(self, given: Any) -> Execute:
        if isinstance(given, AsyncSession):
            return super().executor(given.sync_session)
        if not isinstance(given, AsyncConnection):
            raise ConfigError(
                "advance() needs the AsyncConnection or AsyncSession of your transaction, not "
                f"{safe_repr_unless_secret(given)}"
            )
        return super().executor(given.sync_connection)


class _Bookkeeping:
    """The connections of bookkeeping, with the settings of the user's engine.

    Asynchronous ones belong to an event loop on a thread of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = _copy_engine(engine)
        self._thread = IoThread("pyrocket-database") if engine.dialect.is_async else None
        if self._thread is not None:
            self._thread.start()

    def run(self, work: Callable[[Execute], T]) -> T:
        result: T = self._call(DRIVER_TIMEOUT_S, _run_on, self._engine, work)
        return result

    def close(self) -> None:
        try:
            self._call(DISPOSE_TIMEOUT_S, self._engine.dispose)
        except TimeoutError:
            pass  # the loop stops, and with it the connections that are still busy
        finally:
            if self._thread is not None:
                self._thread.stop(0)

    def _call(self, timeout_s: float, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._thread is None:
            return work(*arguments)
        running = self._thread.submit(greenlet_spawn(work, *arguments))
        try:
            return running.result(timeout_s)
        except TimeoutError:
            running.cancel()
            raise TimeoutError(f"no response within {timeout_s:g} s") from None


def _copy_engine(engine: Engine) -> Engine:
    """Return an engine with the same settings and events, and its own connections."""
    copy = Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=engine.get_execution_options(),
        hide_parameters=engine.hide_parameters,
    )
    copy.dispatch = copy.dispatch._join(engine.dispatch)
    copy._has_events = engine._has_events
    return copy


@contextmanager
def _discard_if_replaced(connection: Connection) -> Generator[None]:
    """Discard the connection if an error shows that its SQLite file was replaced."""
    try:
        yield
    except Exception as error:
        if is_file_replaced(getattr(error, "orig", error), connection.engine.url.database):
            connection.invalidate()
        raise


def _run_on(engine: Engine, work: Callable[[Execute], T]) -> T:
    """Run `work` in a transaction of a bookkeeping engine."""
    with engine.connect() as connection, connection.begin(), _discard_if_replaced(connection):
        if engine.dialect.name in SET_LOCK_TIMEOUT:
            connection.exec_driver_sql(SET_LOCK_TIMEOUT[engine.dialect.name])
        return work(_executor(connection))


_DRIVERS = {
    "sqlite": "sqlite:///file",
    "postgresql": "postgresql+psycopg://user@host/name (pip install 'psycopg[binary]')",
    "mysql": "mysql+pymysql://user@host/name (pip install PyMySQL)",
    "mariadb": "mariadb+pymysql://user@host/name (pip install PyMySQL)",
}


_NOT_SECRET = {
    "application_name",
    "charset",
    "connect_timeout",
    "dbname",
    "host",
    "mode",
    "port",
    "sslmode",
    "timeout",
    "uri",
    "user",
}
"""The parameters of an address that error texts show. Any other parameter may be a secret."""


def _format_address(url: URL) -> str:
    """Return the address of a database without any password."""
    query = {name: value if name in _NOT_SECRET else "***" for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _check_host(url: URL, what: str) -> None:
    if url.host is not None and "@" in url.host:  # the part before it belongs to the password
        raise ConfigError(f"{what} has an @ in its host; an @ in a password is written %40 there")


def _check_engine(engine: Engine, *, is_async: bool) -> None:
    _check_host(engine.url, "the address of engine")
    address, dialect = _format_address(engine.url), engine.dialect.name
    if dialect not in DIALECTS:
        raise ConfigError(f"engine={address!r} is a database of {dialect}; {SUPPORTED}")
    if engine.dialect.is_async and not is_async:
        raise ConfigError(
            f"engine={address!r} has an asynchronous driver; use create_async_engine, or a synchronous driver"
        )
    database, mode = engine.url.database or ":memory:", engine.url.query.get("mode")
    if dialect == "sqlite" and (":memory:" in database or mode == "memory"):
        raise ConfigError(f"engine={address!r} is in memory, where threads share one transaction; use a file")
    if isinstance(engine.pool, StaticPool):
        raise ConfigError(
            f"engine={address!r} has a StaticPool, so all threads share one connection and one transaction, which each "
            "of them commits; make the engine without it"
        )


def database_for(given: object) -> Database:
    """Return the database of an engine or of a sessionmaker, or `given` itself if it is one.

    Raises:
        ConfigError: `given` is neither, or its database is not supported.
    """
    if isinstance(given, Database):
        return given
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
        raise ConfigError(
            f"engine is a {type(given).__name__} without an engine; make it with one: sessionmaker(engine)"
        )
    raise ConfigError(
        f"engine={safe_repr_unless_secret(given)} is not allowed; it must be a SQLAlchemy Engine, AsyncEngine, "
        "sessionmaker or async_sessionmaker (create_engine(url) makes an Engine)"
    )


def engine_for_url(url: str) -> Engine | AsyncEngine:
    """Return an engine that keeps no connection open.

    Raises:
        ConfigError: `url` is not an address of a database, or its driver is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the error's text could show a password
        raise ConfigError(
            "the database's address cannot be read; it must be one of SQLAlchemy's: postgresql+psycopg://user@host/name"
        ) from None
    _check_host(parsed, "the database's address")
    kind = parsed.get_backend_name()
    if kind not in _DRIVERS:
        raise ConfigError(
            f"{_format_address(parsed)} is a database of {kind}; {SUPPORTED}: {', '.join(_DRIVERS.values())}"
        )
    if kind == "sqlite" and parsed.database and not parsed.query and not os.path.exists(parsed.database):
        raise ConfigError(f"{_format_address(parsed)}: there is no such file; a member creates it with create_tables()")
    try:
        dialect = parsed.get_dialect()
        options: dict[str, Any] = {"poolclass": NullPool}
        if dialect.driver in ("psycopg", "psycopg2") and "connect_timeout" not in parsed.query:
            options["connect_args"] = {"connect_timeout": CONNECT_TIMEOUT_S}  # other drivers have a default
        return (create_async_engine if dialect.is_async else create_engine)(parsed, **options)
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigError(
            f"{_format_address(parsed)} needs a driver that is not installed ({error}); for example {_DRIVERS[kind]}"
        ) from error
    except (ArgumentError, TypeError, ValueError):
        raise ConfigError(f"{_format_address(parsed)} has a parameter that its driver does not accept") from None


# --- listeners


def check_listener(listener: Any, database: Database) -> None:
    """Check a listener before its first message.

    Raises:
        ConfigError: it cannot be called with its arguments, or only one of it and the database is asynchronous.
    """
    if not callable(listener) or isinstance(listener, type):
        raise ConfigError(f"the listener must be a function, not {safe_repr(listener)}")
    wanted = ("messages", "connection")[: 1 + database.argument_count]
    try:
        inspect.signature(listener).bind(*wanted)
    except ValueError:
        pass  # some built-in functions have no signature
    except TypeError as error:
        raise ConfigError(
            f"the listener {_name(listener)} cannot be called with ({', '.join(wanted)}): {error}"
        ) from error
    if has_kind(listener, inspect.iscoroutinefunction) and not database.is_async:
        raise ConfigError(
            f"the listener {_name(listener)} is async def, and {database.address} is not asynchronous; use "
            "create_async_engine, or a plain function"
        )
    if database.is_async and not has_kind(listener, inspect.iscoroutinefunction):
        raise ConfigError(
            f"the listener {_name(listener)} is a plain function, and {database.address} is asynchronous; use "
            "create_engine, or an async def function"
        )


def _name(listener: Any) -> str:
    return getattr(listener, "__qualname__", safe_repr(listener))


def wrap_listener(
    database: Database, listener: Callable[..., Any], consume: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Return a listener that takes only messages, plain or `async def`, and calls `consume`.

    `consume` gets the messages, a function that calls the user's listener, and a function that sleeps.
    """
    if database.is_async:

        def call_and_await(*arguments: Any) -> Any:
            return await_only(listener(*arguments))

        def sleep(pause_s: float) -> None:
            await_only(asyncio.sleep(pause_s))

        async def consume_async(messages: Any) -> Any:
            return await greenlet_spawn(consume, messages, call_and_await, sleep)

        wrapped: Callable[[Any], Any] = consume_async
    else:

        def consume_here(messages: Any) -> Any:
            return consume(messages, listener, time.sleep)

        wrapped = consume_here
    wrapped.__name__ = getattr(listener, "__name__", wrapped.__name__)
    wrapped.__qualname__ = getattr(listener, "__qualname__", wrapped.__qualname__)
    wrapped.__doc__ = listener.__doc__
    return wrapped
