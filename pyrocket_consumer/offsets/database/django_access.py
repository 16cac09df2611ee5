"""Access of `DatabaseOffsets` to a database of Django's settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets.database.sqlalchemy_access import (
    SET_LOCK_TIMEOUT,
    SUPPORTED,
    Database,
    ErrorKind,
    Scope,
    classify_driver_error,
    is_file_replaced,
)
from pyrocket_consumer.offsets.database.statements import DIALECTS, Execute, Statement, StatementResult, Values
from pyrocket_consumer.text import safe_repr

T = TypeVar("T")


class DjangoDatabase(Database):
    """A database of Django's settings. Each thread has its own connection, as always in Django."""

    argument_count = 0

    def __init__(self, alias: str) -> None:
        from django.core.exceptions import ImproperlyConfigured
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist

        try:
            vendor = connections[alias].vendor
        except (ConnectionDoesNotExist, ImproperlyConfigured) as error:
            raise ConfigError(
                f"alias={safe_repr(alias)} is no database of Django's settings ({error}); it must be one in DATABASES, "
                "and django.setup() must have been called"
            ) from error
        if vendor not in DIALECTS:
            raise ConfigError(f"alias={alias!r} is a database of {vendor}; {SUPPORTED}")
        self._alias = alias
        self._lock = threading.Lock()
        self._users = 0
        self._shared: dict[Any, threading.Thread] = {}  # the connections of listener threads
        self._busy: set[Any] = set()  # the connections that a listener call uses now
        self.address = f"django:{alias}"
        self.dialect = DIALECTS[vendor](paramstyle="format")

    @contextmanager
    def _scope(self) -> Generator[Scope]:
        from django.db import connections, transaction

        connection = connections[self._alias]
        # A CONN_MAX_AGE of 0 is meant for web requests. A new connection for each call would cost more than the call.
        if not connection.in_atomic_block and (connection.errors_occurred or connection.settings_dict["CONN_MAX_AGE"]):
            connection.close_if_unusable_or_obsolete()
        try:
            with transaction.atomic(using=self._alias, durable=True):
                yield _DjangoScope(connection)
        except Exception as error:
            if is_file_replaced(error.__cause__, connection.settings_dict["NAME"]):
                connection.close()
            raise

    def run(self, work: Callable[[Execute], T]) -> T:
        set_timeout = SET_LOCK_TIMEOUT.get(self.dialect.name)
        with self._scope() as scope:
            if set_timeout is not None:
                scope.execute(Statement(set_timeout))
            result = work(scope.execute)
            if self.dialect.name == "mysql":  # the user's transactions use the same session
                scope.execute(Statement("SET SESSION innodb_lock_wait_timeout = DEFAULT"))
            return result

    def run_separately(self, work: Callable[[Execute], T]) -> T:
        def run_here() -> T:
            from django.db import connections

            try:
                return self.run(work)
            finally:
                connections[self._alias].close()

        with ThreadPoolExecutor(1) as thread:  # a new thread has its own connection
            return thread.submit(run_here).result()

    @contextmanager
    def transaction(self) -> Generator[Scope]:
        from django.db import connections

        connection = connections[self._alias]
        with self._lock:
            if connection not in self._shared:
                connection.inc_thread_sharing()  # another thread closes it in `close`
                self._shared[connection] = threading.current_thread()
            self._busy.add(connection)
        try:
            with self._scope() as scope:
                yield scope
        finally:
            with self._lock:
                self._busy.discard(connection)
                is_last = self._users == 0
                if is_last:
                    self._shared.pop(connection, None)
            if is_last:  # the consumer has closed before its listener returned
                connection.close()

    def open(self) -> None:
        with self._lock:
            self._users += 1

    def executor(self, given: Any) -> Execute:
        from django.db import connections

        if given is not None:
            raise ConfigError(
                f"with Django, advance() takes None and the messages, not {safe_repr(given)}, because the alias names "
                "the database"
            )
        connection = connections[self._alias]
        if not connection.in_atomic_block:
            raise ConfigError("advance() must be called within transaction.atomic(), with the effects it counts")
        return _executor(connection)

    def classify_error(self, error: BaseException) -> ErrorKind:
        from django.db import Error, InterfaceError

        if not isinstance(error, Error):
            return "listener"
        return classify_driver_error(error.__cause__, self.dialect.name) or (
            "disconnected" if isinstance(error, InterfaceError) else "listener"
        )

    def close(self) -> None:
        from django.db import connections

        with self._lock:
            self._users = max(0, self._users - 1)
            idle = [
                connection
                for connection, thread in self._shared.items()
                if connection not in self._busy and (self._users == 0 or not thread.is_alive())
            ]
            for connection in idle:
                del self._shared[connection]
        for connection in (connections[self._alias], *idle):
            connection.close()


def _executor(connection: Any) -> Execute:
    def execute(statement: Statement, values: Values | Sequence[Values] = ()) -> StatementResult:
        with connection.cursor() as cursor:
            return statement.run_on(cursor, values)

    return execute


class _DjangoScope(Scope):
    """A transaction of Django's."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.execute = _executor(connection)

    def flush_and_check(self) -> None:
        if not self._connection.in_atomic_block or self._connection.needs_rollback:
            self.raise_ended()
        self.check_driver(self._connection.connection)

    def is_lost(self) -> bool:
        return self._connection.connection is None or self._connection.errors_occurred


def database_for_alias(alias: str) -> Database:
    """Return the database of an alias in Django's settings.

    Raises:
        ConfigError: there is no such alias, or Django is not installed.
    """
    try:
        return DjangoDatabase(alias)
    except ImportError as error:
        raise ConfigError(
            f"DatabaseOffsets.django needs Django, which is not installed ({error}); pip install django"
        ) from error
