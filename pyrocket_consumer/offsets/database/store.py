"""Offsets in the user's own database: a listener's effect and its offset commit in one transaction.

The owner of a queue has *claimed* it. The claim has a number, the epoch, and every statement that moves the offset
names that epoch. The next owner's claim has a higher epoch, so later statements of a former owner change nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from pyrocket_consumer.config import check_bool, check_choice
from pyrocket_consumer.errors import ConfigError, Fenced, OffsetStoreError
from pyrocket_consumer.offsets.database.claim import (
    Claim,
    LastMessage,
    RolledBack,
    claim_of_call,
    id_of,
    inbox_id_of,
    list_messages,
)
from pyrocket_consumer.offsets.database.rows import (
    MAX_ATTEMPTS,
    OffsetRows,
    describe_error,
    is_duplicate_key,
    retry_pauses,
)
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import safe_repr

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from pyrocket_consumer.offsets.database.sqlalchemy_access import ErrorKind, Scope
    from pyrocket_consumer.offsets.database.statements import Execute, Statements

_TABLE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,53}")


UNAVAILABLE_PAUSE_S = 1.0
"""How long a queue waits while the database is unavailable."""


class _RollBack(Exception):
    """Rolls back the transaction of a listener that wants its messages again."""

    def __init__(self, result: object) -> None:
        self.result = result


class _Conflict(Exception):
    """Rolls back a transaction whose rows another one has changed: some of its messages, or all, may be consumed."""

    def __init__(self) -> None:
        super().__init__(f"other transactions have changed its rows meanwhile, {MAX_ATTEMPTS} times")


class _Attempt:
    """The step that one attempt at a listener's transaction has reached. It decides who caused an error."""

    __slots__ = ("step", "is_lost")

    def __init__(self) -> None:
        self.step: Literal["bookkeeping", "listener", "commit"] = "bookkeeping"
        self.is_lost = False  # whether its connection is lost


class ListenerTransactions(OffsetRows):
    """Runs listeners in transactions that advance the offset, and advances it in transactions of users."""

    def _current_claim(self) -> Claim:
        """Return the claim of the listener call that runs in this context."""
        claim = claim_of_call.get()
        if claim is None or claim.store is not self:
            raise ConfigError(
                f"{self!r} was used outside of a listener call of its own. Pass it to the consumer as offset_store, "
                "and call it within a listener, or a task or thread (asyncio.to_thread) that a listener has started"
            )
        return claim

    def _consume(self, given: Any, call: Callable[..., Any], sleep: Callable[[float], None]) -> Any:
        """Consume the messages of a listener call in a transaction; retry it after a conflict with another one."""
        claim = self._current_claim()
        what = "a listener of exactly_once"
        messages = list_messages(given, what)
        index = claim.find_messages(messages, what, behind=True)
        if (before := claim.check_rolled_back(index, len(messages))) is not None:
            return before
        try:
            result = self._consume_with_retries(claim, messages, call, sleep, is_single=isinstance(given, Message))
        except BaseException:
            claim.note_rollback(RolledBack(claim.holder.failed_result))  # even if a wrapper catches this
            raise
        if result is not None:
            return claim.note_rollback(result)
        claim.count_messages(index, len(messages), in_own_transaction=False)
        return None

    def _consume_with_retries(
        self,
        claim: Claim,
        messages: list[Message],
        call: Callable[..., Any],
        sleep: Callable[[float], None],
        *,
        is_single: bool,
    ) -> RolledBack | None:
        pauses = retry_pauses()
        while True:
            attempt = _Attempt()
            try:
                duplicates = self._consume_once(claim, messages, call, attempt, is_single=is_single)
            except _RollBack as rollback:
                return RolledBack(rollback.result)
            except Fenced:
                self._fence(claim)
                return RolledBack(retry_after_s=UNAVAILABLE_PAUSE_S)
            except Exception as error:
                # The commit may have succeeded, and its response be lost.
                might_be_committed, claim.may_be_committed = claim.may_be_committed, True
                kind = self._classify_error(error, attempt)
                if kind == "listener" and might_be_committed:
                    kind = self._classify_unconfirmed(claim, messages)
                if kind == "listener":
                    raise
                pause_s = next(pauses, None) if kind == "retry" else None
                if pause_s is None:
                    met = "transactions conflict repeatedly; let them lock rows in one order: "
                    why = f"{met if kind == 'retry' else ''}{self._database.address}: {describe_error(error)}"
                    claim.holder.on_store_wait(claim, why)
                    return RolledBack(retry_after_s=UNAVAILABLE_PAUSE_S)
            except BaseException:
                claim.may_be_committed = True
                raise
            else:
                claim.stored, claim.last = max(claim.stored, messages[-1].queue_offset + 1), claim.pending_last
                claim.may_be_committed = False
                if duplicates:
                    claim.holder.on_duplicates(claim, duplicates)
                return None
            sleep(pause_s)

    def _classify_unconfirmed(self, claim: Claim, messages: Sequence[Message]) -> ErrorKind:
        """Return the kind of an error after an unconfirmed commit, which may have caused the error if it succeeded."""
        try:
            row = self._database.run_separately(lambda execute: self._read_row(execute, claim.group, claim.queue))
        except Exception:
            return "unavailable"
        if row is None or row.epoch != claim.epoch or row.next_offset > messages[0].queue_offset:
            return "retry"
        return "listener"

    def _classify_error(self, error: Exception, attempt: _Attempt) -> ErrorKind:
        """Return the kind of an error. Only errors that the listener has caused are its failure."""
        if isinstance(error, _Conflict):
            return "retry"
        if attempt.step != "listener" and isinstance(error, OSError):
            return "unavailable"  # some drivers raise the error of their socket
        kind = self._database.classify_error(error)
        if kind == "aborted":  # the listener has caught an error, after which PostgreSQL refuses all statements
            return "listener"
        if attempt.step == "listener":
            if kind == "locked":  # the listener's own rows; PostgreSQL raises this only with a lock_timeout or NOWAIT
                return "listener" if self._database.dialect.name == "postgresql" else "retry"
            if kind == "disconnected" and not attempt.is_lost:  # of another database
                return "listener"
        return "unavailable" if kind == "listener" and attempt.step == "bookkeeping" else kind

    def _consume_once(
        self, claim: Claim, messages: list[Message], call: Callable[..., Any], attempt: _Attempt, *, is_single: bool
    ) -> Sequence[Message]:
        """Consume messages in one transaction. Return the messages skipped, because they had their effect before."""
        stored = claim.stored
        with self._database.transaction() as scope:
            left = self._unconsumed(scope.execute, claim, messages, stored) if claim.may_be_committed else messages
            fresh, notes = (
                self._exclude_duplicates(scope.execute, claim, left) if left and self.has_inbox else (left, {})
            )
            if fresh:
                scope.begin()
                if self._sql.uses_savepoint:
                    scope.execute(self._sql.savepoint)
                attempt.step, claim.in_transaction = "listener", True
                try:
                    result = call(fresh[0] if is_single else list(fresh), *scope.arguments)
                    claim.in_transaction = False
                    if not claim.holder.is_success(result):
                        raise _RollBack(result)
                    scope.flush_and_check()
                    if self._sql.uses_savepoint:
                        self._release_savepoint(scope)
                except Exception:
                    attempt.is_lost = scope.is_lost()
                    raise
                finally:
                    claim.in_transaction = False
                attempt.step = "bookkeeping"
                if notes:
                    self._add_to_inbox(scope.execute, claim, notes)
            if left and not self._advance(scope.execute, claim, left):
                raise _Conflict
            attempt.step = "commit"
        return [message for message in left if message not in fresh] if len(fresh) < len(left) else ()

    def _release_savepoint(self, scope: Scope) -> None:
        """Check that the transaction is still the one that was begun for the listener."""
        try:
            scope.execute(self._sql.release_savepoint)
        except Exception as error:
            if self._database.classify_error(error) == "listener":
                scope.raise_ended()
            raise

    def _advance(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> int:
        """Execute the statement that advances the offset. Return how many rows it has changed."""
        last = messages[-1]
        claim.pending_last = LastMessage(last.queue_offset, id_of(last), last.stored_at_ms)
        values = {
            **self._key(claim.group, claim.queue),
            "epoch": claim.epoch,
            "first": messages[0].queue_offset,
            "known": max(claim.promised, claim.stored),
            "next": last.queue_offset + 1,
            "last_offset": last.queue_offset,
            "message_id": claim.pending_last.message_id,
            "store_time": last.stored_at_ms,
        }
        return execute(self._sql.advance, values).changed

    def _unconsumed(self, execute: Execute, claim: Claim, messages: Sequence[Message], stored: int) -> list[Message]:
        """Return the messages that have not had their effect yet, after an unconfirmed commit.

        `stored` was the offset known to be committed before this transaction.

        Raises:
            Fenced: this member no longer has the queue, or the database has lost commits.
        """
        row = self._read_own_row(execute, claim, stored, claim.promised)
        return [message for message in messages if message.queue_offset >= row.next_offset]

    def _advance_in(self, connection: Any, claim: Claim, messages: Sequence[Message], index: int) -> None:
        if self._advance(self._database.executor(connection), claim, messages):
            claim.count_messages(index, len(messages), in_own_transaction=True)
            return
        stored = claim.stored
        row = self._database.run_separately(lambda execute: self._read_row(execute, claim.group, claim.queue))
        if row is None or row.epoch != claim.epoch or row.next_offset < stored:
            self._fence(claim)
        elif row.next_offset < claim.promised:
            claim.holder.on_uncommitted(claim, row)
        else:
            claim.stored = max(claim.stored, row.next_offset)
        raise Fenced(str(claim.queue))

    def _exclude_duplicates(
        self, execute: Execute, claim: Claim, messages: Sequence[Message]
    ) -> tuple[list[Message], dict[str, bool]]:
        """Return the messages that have had no effect yet, each once, and for their ids whether the inbox has a row.

        Rows from before the queue's last reset do not count, because the reset replays their messages.
        """
        names = [inbox_id_of(message) for message in messages]
        ids = list(dict.fromkeys(name for name in names if name is not None))
        noted: dict[str, int] = {}
        if ids:
            values = {"group": claim.group} | {f"id{number}": each for number, each in enumerate(ids)}
            noted = {name: at for name, at in execute(self._sql.select_inbox(len(ids)), values).rows}  # noqa: C416
        fresh, notes = list[Message](), dict[str, bool]()
        for message, name in zip(messages, names, strict=True):
            if name is None:
                fresh.append(message)
            elif name not in notes and noted.get(name, -1) <= claim.reset_epoch:
                fresh.append(message)
                notes[name] = name in noted
        return fresh, notes

    def _add_to_inbox(self, execute: Execute, claim: Claim, notes: Mapping[str, bool]) -> None:
        """Add consumed messages to the inbox."""
        at = max(int(time.time() * 1000), claim.reset_epoch + 1)
        try:
            for statement, is_there in ((self._sql.insert_inbox, False), (self._sql.update_inbox, True)):
                names = [name for name, each in notes.items() if each is is_there]
                if names:
                    execute(statement, [{"group": claim.group, "message_id": name, "at": at} for name in names])
        except Exception as error:
            if is_duplicate_key(error):  # another queue inserted the same row first
                raise _Conflict from error
            raise

    @staticmethod
    def _fence(claim: Claim) -> None:
        claim.lost = True
        claim.holder.on_claim_fenced(claim)


class DatabaseOffsets(ListenerTransactions):
    """Keeps a group's offsets in your own database, so that they commit together with the effects of your listener.

        offsets = DatabaseOffsets(create_engine("postgresql+psycopg://app@db/app"))
        offsets.create_tables()

        def book(messages, connection):
            connection.execute(text("insert into ledger(order_id) values (:id)"), [...])

        with PushConsumer("billing", orderly=True, listener_batch_size=64, offset_store=offsets) as consumer:
            consumer.subscribe("orders", offsets.exactly_once(book))
            consumer.join()

    Needs `orderly=True` in a clustering group. SQLite, PostgreSQL, MySQL and MariaDB; the extra `sql` has SQLAlchemy.
    """

    def __init__(
        self,
        engine: Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[Any],
        table: str = "pyrocket_offsets",
        inbox_days: float | None = None,
        *,
        on_divergence: Literal["stop", "continue"] = "stop",
        allow_foreign_members: bool = False,
    ) -> None:
        """Check the arguments, without connecting to the database.

        Args:
            engine: a SQLAlchemy `Engine`, or a `sessionmaker` (listeners get a `Session`), or for `async def`
                listeners an `AsyncEngine` or `async_sessionmaker`
            table: the table of offsets, `name` or `schema.name`
            inbox_days (–; 0.01–3650): keep the ids of messages for that long, and skip messages that a producer has
                stored twice
            on_divergence ("stop"; "continue"): what to do with a queue whose log is no longer the one consumed before
            allow_foreign_members (False): work in a group that has members of other clients, which use the broker's
                offsets

        Raises:
            ConfigError: a value is not allowed, or SQLAlchemy is not installed.
        """
        database = _import_access().database_for(engine)
        super().__init__(database, _statements(table, database.dialect, with_inbox=inbox_days is not None), inbox_days)
        check_choice("on_divergence", on_divergence, ["stop", "continue"])
        check_bool("allow_foreign_members", allow_foreign_members)
        self.on_divergence = on_divergence
        self.allow_foreign_members = allow_foreign_members

    @classmethod
    def django(
        cls,
        alias: str = "default",
        table: str = "pyrocket_offsets",
        inbox_days: float | None = None,
        *,
        on_divergence: Literal["stop", "continue"] = "stop",
        allow_foreign_members: bool = False,
    ) -> DatabaseOffsets:
        """Return the offsets in the database of an alias in Django's settings.

        Listeners run within `transaction.atomic(alias)` and take only the messages.

        Raises:
            ConfigError: there is no such alias, or a value is not allowed.
        """
        _import_access()
        from pyrocket_consumer.offsets.database.django_access import database_for_alias

        database: Any = database_for_alias(alias)
        return cls(
            database,
            table,
            inbox_days,
            on_divergence=on_divergence,
            allow_foreign_members=allow_foreign_members,
        )

    @classmethod
    def at(cls, url: str, table: str = "pyrocket_offsets") -> DatabaseOffsets:
        """Return the offsets in a database, for tools; `url` is its address in SQLAlchemy's form.

        Raises:
            ConfigError: `url` is not an address of a database, or its driver is not installed.
        """
        return cls(_import_access().engine_for_url(url), table)

    @property
    def address(self) -> str:
        """The database's address, without its password."""
        return self._database.address

    def __repr__(self) -> str:
        return f"DatabaseOffsets({self._database.address!r}, table={self._sql.table!r})"

    # --- for users

    def create_tables(self) -> None:
        """Create the missing tables. An account without that right can run the output of `pyrocket offsets ddl`.

        Raises:
            OffsetStoreError: the database cannot be reached, or refuses the statements.
        """
        failure: Exception | None = None
        for statement in self._sql.creation():
            try:
                self._database.run(lambda execute, one=statement: execute(one))  # type: ignore[misc]
            except Exception as error:
                failure = failure or error
        try:  # another process may have created them at the same time
            self._database.run(self._sql.check_tables)
        except Exception as error:
            reason = describe_error(failure or error)
            raise OffsetStoreError(f"{self!r}: the tables cannot be created: {reason}") from error

    def exactly_once(self, listener: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a listener that runs yours in a transaction, which commits its effect and the offset together.

        Your listener takes the messages, and as second argument the `Connection` or `Session` of the transaction (with
        Django, only the messages). An exception, or a result other than None and SUCCESS, rolls everything back. All
        messages of the call are then redelivered. It must neither commit nor roll back itself.

        Raises:
            ConfigError: it cannot be called with these arguments, or only one of it and the engine is asynchronous.
        """
        _import_access().check_listener(listener, self._database)
        wrapped: Any = _import_access().wrap_listener(self._database, listener, self._consume)
        wrapped.offset_store = self  # a consumer checks that it has the same store
        listening: Callable[[Any], Any] = wrapped
        return listening

    @overload
    def advance(self, connection: Connection | Session | None, messages: Message | Sequence[Message]) -> None: ...

    @overload
    def advance(
        self, connection: AsyncConnection | AsyncSession, messages: Message | Sequence[Message]
    ) -> Awaitable[None]: ...

    def advance(self, connection: Any, messages: Message | Sequence[Message]) -> Awaitable[None] | None:
        """Count `messages` as consumed in your own transaction. Make this the last statement before you commit.

        Call it within the listener call that got the messages, with all of them or the first ones. `connection` is the
        `Connection` or `Session` of your transaction, or None for Django. Await the call if it is asynchronous.

        Raises:
            Fenced: another member has the queue now, or these messages were consumed before. Let the error pass, so
                that your transaction rolls back. Messages that are not consumed are redelivered.
            ConfigError: this is not a listener call of a consumer that has this store.
        """
        claim = self._current_claim()
        given = list_messages(messages, "advance()")
        if self.has_inbox:
            raise ConfigError(
                "advance() does not check the inbox; use exactly_once(listener), or create the store without inbox_days"
            )
        index = claim.find_messages(given, "advance()")
        if self._database.is_async:
            work: Awaitable[None] = _import_access().greenlet_spawn(self._advance_in, connection, claim, given, index)
            return work
        self._advance_in(connection, claim, given, index)
        return None


def ddl(dialect: str, table: str = "pyrocket_offsets", *, with_inbox: bool = False) -> list[str]:
    """Return the statements that create the tables of offsets.

    Raises:
        ConfigError: the dialect or the name of the table is not allowed, or SQLAlchemy is not installed.
    """
    check_choice("dialect", dialect, ["sqlite", "postgresql", "mysql", "mariadb"])
    statements = _statements(table, _import_access().DIALECTS[dialect](), with_inbox=with_inbox)
    return [statement.text for statement in statements.creation()]


def _statements(table: object, dialect: Any, *, with_inbox: bool) -> Statements:
    if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
        raise ConfigError(
            f"table={safe_repr(table)} is not allowed; it must be a name of up to 54 characters, or schema.name"
        )
    from pyrocket_consumer.offsets.database.statements import Statements

    return Statements(table, dialect, with_inbox=with_inbox)


def _import_access() -> Any:
    try:
        from pyrocket_consumer.offsets.database import sqlalchemy_access
    except ImportError as error:
        raise ConfigError(
            f"offsets in a database need SQLAlchemy 2, which is not installed ({error}); pip install "
            "'pyrocket-consumer[sql]'"
        ) from error
    return sqlalchemy_access
