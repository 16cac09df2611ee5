"""Offsets in the user's own database: a listener's effect and its offset commit in one transaction.

The owner of a queue has *claimed* it. The claim has a number, the epoch, and every statement that moves the offset
names that epoch. The next owner's claim has a higher epoch, so later statements of a former owner change nothing.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from uuid import uuid4

from pyrocket_consumer.config import check_bool, check_choice, check_range
from pyrocket_consumer.errors import (
    ConfigError,
    DatabaseError,
    Fenced,
    OffsetStoreError,
    RocketError,
)
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import check_offset, check_queue
from pyrocket_consumer.offsets.database.claim import (
    Claim,
    ClaimHolder,
    LastMessage,
    RolledBack,
    StoredOffset,
    claim_of_call,
)
from pyrocket_consumer.offsets.database.message_ids import MAX_KEY_CHARACTERS, id_of, inbox_id_of
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import safe_repr
from pyrocket_consumer.transport.backoff import Backoff

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from pyrocket_consumer.offsets.database.errors import ErrorKind
    from pyrocket_consumer.offsets.database.sqlalchemy_access import Database
    from pyrocket_consumer.offsets.database.statements import Execute, Statements

T = TypeVar("T")

MAX_ATTEMPTS = 8
"""How often a transaction that conflicts with another one is tried, before its queue waits."""

FIRST_RETRY_PAUSE_S, LONGEST_RETRY_PAUSE_S = 0.005, 0.5
"""The pauses between these attempts."""

UNAVAILABLE_PAUSE_S = 1.0
"""How long a queue waits while the database is unavailable."""

NUMBER_LIMIT = 2**62
"""All numbers in a row must be below this. It is far below the type's maximum, so adding to one cannot overflow."""

OWNER_COLUMN = 6
"""The index of `owner` among the columns of a row."""

INBOX_CLEANUP_INTERVAL_S = 60.0
"""How often old rows of the inbox are deleted."""

LONGEST_INBOX_CLEANUP_S = 1.0
"""The longest deletion at a time, in small steps. It deletes more rows than can have been added meanwhile."""

_TABLE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,53}")


class _RollBack(Exception):
    """Rolls back the transaction of a listener that wants its messages again."""

    def __init__(self, result: object) -> None:
        self.result = result


class _Conflict(Exception):
    """Rolls back a transaction whose rows another one has changed: some of its messages, or all, may be consumed."""

    def __init__(self) -> None:
        super().__init__(f"other transactions have changed its rows meanwhile, {MAX_ATTEMPTS} times")


class RowLocked(DatabaseError):
    """Another session has locked the row of a queue for a long time."""


class _Attempt:
    """The step that one attempt at a listener's transaction has reached. It decides who caused an error."""

    __slots__ = ("step", "is_lost")

    def __init__(self) -> None:
        self.step: Literal["bookkeeping", "listener", "commit"] = "bookkeeping"
        self.is_lost = False  # whether its connection is lost


class DatabaseOffsets:
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
        self._init(database, table, inbox_days, on_divergence, allow_foreign_members)

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

        store = cls.__new__(cls)
        store._init(database_for_alias(alias), table, inbox_days, on_divergence, allow_foreign_members)
        return store

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

    def _init(
        self, database: Database, table: str, inbox_days: float | None, on_divergence: str, allow_foreign_members: bool
    ) -> None:
        _check_table(table)
        if inbox_days is not None:
            check_range("inbox_days", inbox_days, 0.01, 3650)
        check_choice("on_divergence", on_divergence, ["stop", "continue"])
        check_bool("allow_foreign_members", allow_foreign_members)
        self._database = database
        self._sql: Statements = database.statements(table, with_inbox=inbox_days is not None)
        self._inbox_days = inbox_days
        self._inbox_due_at = 0.0
        self.on_divergence = on_divergence
        self.allow_foreign_members = allow_foreign_members
        self.identity = "not known yet"
        """The unique id of the table, once it is loaded. All members of a group must have the same one."""

    def __repr__(self) -> str:
        return f"DatabaseOffsets({self._database.address!r}, table={self._sql.table!r})"

    # --- for users

    def create_tables(self) -> None:
        """Create the missing tables. An account without that right can run the output of `pyrocket offsets ddl`.

        Raises:
            OffsetStoreError: the database cannot be reached, or refuses the statements.
        """
        failure: Exception | None = None
        for statement in self._sql.creation_statements():
            try:
                self._database.run(lambda execute, one=statement: execute(one))  # type: ignore[misc]
            except Exception as error:
                failure = failure or error
        try:  # another process may have created them at the same time
            self._database.run(self._sql.check_tables)
        except Exception as error:
            reason = _describe_error(failure or error)
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
        given = [messages] if isinstance(messages, Message) else list(messages)
        if not given:
            raise ConfigError("advance() was given no messages; pass those that the listener was given")
        if self.has_inbox:
            raise ConfigError(
                "advance() does not check the inbox; use exactly_once(listener), or create the store without inbox_days"
            )
        index = claim.find_messages(given, "advance()")
        if self._database.is_async:
            work: Awaitable[None] = _import_access().run_in_greenlet(self._advance_in, connection, claim, given, index)
            return work
        self._advance_in(connection, claim, given, index)
        return None

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

    # --- a listener's transaction

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
        messages = [given] if isinstance(given, Message) else list(given)
        if not messages:
            raise ConfigError("a listener of exactly_once was given no messages; pass those of the listener call")
        index = claim.find_messages(messages, "a listener of exactly_once", behind=True)
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
        for pause_s in retry_pauses():
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
                if kind != "retry" or pause_s is None:
                    met = "transactions conflict repeatedly; let them lock rows in one order: "
                    why = f"{met if kind == 'retry' else ''}{self._database.address}: {_describe_error(error)}"
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
        raise AssertionError("the last pause is None")

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
                        self._release_savepoint(scope.execute)
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

    def _release_savepoint(self, execute: Execute) -> None:
        """Check that the transaction is still the one that was begun for the listener."""
        try:
            execute(self._sql.release_savepoint)
        except Exception as error:
            if self._database.classify_error(error) == "listener":
                _import_access().raise_transaction_ended()
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
        row = self._read_row(execute, claim.group, claim.queue)
        if row is None or row.epoch != claim.epoch or row.next_offset < stored:
            raise Fenced(str(claim.queue))
        if row.next_offset < claim.promised:
            claim.holder.on_uncommitted(claim, row)
            raise Fenced(str(claim.queue))
        return [message for message in messages if message.queue_offset >= row.next_offset]

    @property
    def has_inbox(self) -> bool:
        """Whether the store checks messages against the inbox."""
        return self._inbox_days is not None

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
            if _is_duplicate_key(error):  # another queue inserted the same row first
                raise _Conflict from error
            raise

    @staticmethod
    def _fence(claim: Claim) -> None:
        claim.lost = True
        claim.holder.on_claim_fenced(claim)

    # --- for consumers, which call these from one thread; each runs in a transaction of its own

    def load(self) -> None:
        """Check that the database can be reached, has the tables, and undoes a transaction that is rolled back.

        Raises:
            OffsetStoreError: one of the checks has failed; the text names it, and the remedy.
        """
        self._database.open()
        try:
            self._check()
        except BaseException:
            self._database.close()
            raise

    def _check(self) -> None:
        try:
            self._run_with_retries(lambda execute: None)
        except Exception as error:
            raise OffsetStoreError(
                f"{self!r} cannot be reached: {_describe_error(error)}; check the address and the account, and that "
                "the database is up"
            ) from error
        try:
            self._run_with_retries(self._sql.check_tables)
            kept = self._find_table_without_rollback()
            if not kept:
                self.identity = self._read_identity()
        except Exception as error:
            if self._database.classify_error(error) != "listener":
                raise OffsetStoreError(
                    f"{self!r} cannot be used now: {_describe_error(error)}; check that it is up"
                ) from error
            raise OffsetStoreError(
                f"{self!r}: the table is missing, of another version, or not writable: {_describe_error(error)}; call "
                "create_tables() once, or execute the output of `pyrocket offsets ddl`"
            ) from error
        if kept:
            raise OffsetStoreError(
                f"{self!r} keeps what is rolled back in {kept}, so messages would not be consumed exactly once. Create "
                "the engine without isolation_level='AUTOCOMMIT', and the tables of MySQL with ENGINE=InnoDB"
            )

    def _read_identity(self) -> str:
        """Return the unique id of the table. The first caller stores it there."""
        key = self._key("", MessageQueue("pyrocket", "", 0))

        def work(execute: Execute) -> str:
            if not (rows := execute(self._sql.select_row, key).rows):
                execute(self._sql.begin, {**key, "next": 0, "epoch": 0, "reset_epoch": 0, "owner": uuid4().hex})
                rows = execute(self._sql.select_row, key).rows
            return str(rows[0][OWNER_COLUMN])

        try:
            return self._run_with_retries(work)
        except Exception as error:
            if not _is_duplicate_key(error):
                raise
        return self._run_with_retries(work)  # another process stored it first

    def _find_table_without_rollback(self) -> str:
        """Return the name of a table that keeps a row after a rollback, or "" if there is no such table."""
        name = f"probe-{uuid4().hex}"
        key, note = self._key("", MessageQueue(name, "", 0)), {"group": "", "message_id": name}

        def write(execute: Execute) -> None:
            execute(self._sql.begin, {**key, "next": 0, "epoch": 0, "reset_epoch": 0, "owner": None})
            if self.has_inbox:
                execute(self._sql.insert_inbox, {**note, "at": 0})
            raise _RollBack(None)

        def read_and_forget(execute: Execute) -> str:
            kept = ""
            if execute(self._sql.select_row, key).rows:
                kept = self._sql.table
                execute(self._sql.delete_row, key)
            if self.has_inbox and execute(self._sql.select_inbox(1), {"group": "", "id0": name}).rows:
                kept = kept or "its inbox"
                execute(self._sql.delete_inbox, note)
            return kept

        try:
            self._run_with_retries(write)
        except _RollBack:
            pass
        return self._run_with_retries(read_and_forget)

    def claim(
        self, holder: ClaimHolder, group: str, queues: Sequence[MessageQueue], owner: str
    ) -> dict[MessageQueue, Claim | RocketError]:
        """Claim queues from their owners in one transaction. The result omits queues that have no row.

        An invalid row is an error of its queue only.

        Raises:
            DatabaseError: the statement could not be executed.
        """

        def work(execute: Execute) -> dict[MessageQueue, Claim | RocketError]:
            keys = [{**self._key(group, queue), "owner": owner[:MAX_KEY_CHARACTERS]} for queue in sorted(queues)]
            execute(self._sql.claim, keys)
            if len(queues) == 1:
                rows = execute(self._sql.select_row, self._key(group, queues[0])).rows
            else:
                rows = execute(self._sql.select_group, {"group": group}).rows
            found: dict[MessageQueue, Claim | RocketError] = {}
            for row in rows:
                queue = MessageQueue(*row[:3])
                if queue in wanted:
                    try:
                        found[queue] = Claim(self, holder, group, self._decode_row(row))
                    except RocketError as error:
                        found[queue] = error
            return found

        wanted = frozenset(queues)
        what = f"claiming {queues[0]}" if len(queues) == 1 else f"claiming {len(queues)} queues of {group}"
        return self._run(work, what)

    def begin(self, holder: ClaimHolder, group: str, queue: MessageQueue, owner: str, offset: int) -> Claim:
        """Insert the first row of `queue`, and claim it.

        Raises:
            Fenced: another member has inserted the row meanwhile.
            DatabaseError: the statement could not be executed.
        """
        check_queue(queue)
        check_offset(queue, offset)

        def work(execute: Execute) -> StoredOffset | None:
            values = {"next": offset, "epoch": 1, "reset_epoch": 0, "owner": owner[:MAX_KEY_CHARACTERS]}
            try:
                execute(self._sql.begin, {**self._key(group, queue), **values})
            except Exception as error:
                if _is_duplicate_key(error):
                    raise Fenced(str(queue)) from error
                raise
            return self._read_row(execute, group, queue)

        row = self._run(work, f"beginning {queue} at {offset}")
        assert row is not None
        return Claim(self, holder, group, row)

    def persist(self, claim: Claim, offset: int) -> None:
        """Advance to `offset` without a listener's effect: past gaps in the queue, and past messages given up.

        Raises:
            Fenced: this member no longer has the queue, the database has lost commits, or a listener has called
                `advance` and not committed.
            DatabaseError: the statement could not be executed.
        """
        promised, stored = min(claim.promised, offset), claim.stored

        def work(execute: Execute) -> StoredOffset | None:
            key = self._key(claim.group, claim.queue)
            if promised > claim.stored:
                row = self._read_row(execute, claim.group, claim.queue)
                if row is not None and row.epoch == claim.epoch and row.next_offset < promised:
                    claim.holder.on_uncommitted(claim, row)
                    raise Fenced(str(claim.queue))
            if execute(self._sql.persist, {**key, "epoch": claim.epoch, "known": stored, "next": offset}).changed:
                return None
            row = self._read_row(execute, claim.group, claim.queue)
            if row is None or row.epoch != claim.epoch or row.next_offset < stored:
                raise Fenced(str(claim.queue))
            return row

        row = self._run(work, f"storing {offset} of {claim.queue}")
        claim.stored = max(claim.stored, offset if row is None else row.next_offset)

    def fenced_among(self, group: str, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims whose queues another member has claimed meanwhile.

        Raises:
            DatabaseError: the statement could not be executed.
        """

        def work(execute: Execute) -> dict[tuple[object, ...], object]:  # objects, because rows may be invalid
            return {tuple(row[:3]): row[4] for row in execute(self._sql.select_group, {"group": group}).rows}

        epochs = self._run(work, f"checking claims of {group}")
        names = ((claim, claim.queue) for claim in claims)
        return [
            claim
            for claim, queue in names
            if epochs.get((queue.topic, queue.broker_name, queue.queue_id)) != claim.epoch
        ]

    def move(self, claim: Claim, offset: int, reset_epoch: int | None = None) -> Claim:
        """Set the offset and claim the queue again. Calls that still run for `claim` can then change nothing.

        Raises:
            Fenced: this member no longer has the queue.
            DatabaseError: the statement could not be executed, or its response was lost.
        """
        check_offset(claim.queue, offset)

        def work(execute: Execute) -> StoredOffset:
            key = self._key(claim.group, claim.queue)
            followed = claim.reset_epoch if reset_epoch is None else reset_epoch
            if self.has_inbox and reset_epoch is None and offset < claim.stored:  # for the inbox this is a reset, too
                followed = max(followed, int(time.time() * 1000))
            values = {**key, "epoch": claim.epoch, "next": offset, "reset_epoch": followed}
            changed = execute(self._sql.move, values).changed
            row = self._read_row(execute, claim.group, claim.queue)
            moved = (claim.epoch + 1, offset, claim.owner)
            if row is None or (not changed and (row.epoch, row.next_offset, row.owner) != moved):
                raise Fenced(str(claim.queue))  # no earlier attempt of this move has succeeded, either
            return row

        return Claim(self, claim.holder, claim.group, self._run(work, f"moving {claim.queue} to {offset}"))

    def is_consumed(self, claim: Claim, offset: int) -> bool:
        """Return whether a failed message has had its effect, because its listener may raise after its own commit.

        Raises:
            DatabaseError: the statement could not be executed.
        """
        if claim.highest_advance > max(claim.stored, offset):

            def work(execute: Execute) -> StoredOffset | None:
                return self._read_row(execute, claim.group, claim.queue)

            row = self._run(work, f"checking {claim.queue}")
            if row is not None and row.epoch == claim.epoch:
                claim.stored = max(claim.stored, row.next_offset)
        return offset < claim.stored

    def tidy(self, group: str) -> None:
        """Delete old rows of the group's inbox if it is time, for at most LONGEST_INBOX_CLEANUP_S."""
        if self._inbox_days is None or time.monotonic() < self._inbox_due_at:
            return
        before = int((time.time() - self._inbox_days * 86400) * 1000)

        def work(execute: Execute) -> bool:
            old = execute(self._sql.select_old_inbox, {"group": group, "before": before}).rows
            if old:
                execute(self._sql.delete_inbox, [{"group": group, "message_id": name} for (name,) in old])
            return bool(old)

        until = time.monotonic() + LONGEST_INBOX_CLEANUP_S
        while self._run(work, "tidying the inbox"):
            if time.monotonic() >= until:
                return  # there may be more, so the next call continues
        self._inbox_due_at = time.monotonic() + INBOX_CLEANUP_INTERVAL_S

    def close(self) -> None:
        """Close the connections that this store has opened. Your engine stays open."""
        self._database.close()

    # --- for admins

    def offsets(self, group: str, topic: str | None = None) -> list[StoredOffset]:
        """Return the rows of `group`, of one topic or of all topics.

        Raises:
            DatabaseError: the statement could not be executed.
        """

        def work(execute: Execute) -> list[StoredOffset]:
            rows = execute(self._sql.select_group, {"group": group}).rows
            return [self._decode_row(row) for row in rows if topic in (None, row[0])]

        return sorted(self._run(work, f"reading the offsets of {group}"), key=lambda row: row.queue)

    def reset(self, group: str, targets: Mapping[MessageQueue, int], reset_epoch: int) -> None:
        """Move the offsets of `group` in one transaction, while members run or not. The owners claim the queues again.

        Raises:
            DatabaseError: the statement could not be executed.
        """
        for queue, offset in targets.items():
            check_queue(queue)
            check_offset(queue, offset)
            check_offset(queue, reset_epoch, "epoch")

        def work(execute: Execute) -> None:
            for queue, offset in sorted(targets.items()):
                key = self._key(group, queue)
                moved = {**key, "next": offset, "reset_epoch": reset_epoch}
                if not execute(self._sql.reset, moved).changed:
                    execute(self._sql.begin, {**moved, "epoch": 1, "owner": None})

        self._run(work, f"resetting {group}")

    # --- statements

    @staticmethod
    def _key(group: str, queue: MessageQueue) -> dict[str, Any]:
        return {"group": group, "topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}

    def _read_row(self, execute: Execute, group: str, queue: MessageQueue) -> StoredOffset | None:
        rows = execute(self._sql.select_row, self._key(group, queue)).rows
        return self._decode_row(rows[0]) if rows else None

    def _decode_row(self, row: Sequence[Any]) -> StoredOffset:
        """Decode a row.

        Raises:
            DatabaseError: the row is invalid; some databases do not check types, and users may edit rows.
        """
        topic, broker_name, queue_id, next_offset, epoch, reset_epoch, owner, *last = row
        numbers = {"queue_id": queue_id, "next_offset": next_offset, "epoch": epoch, "reset_epoch": reset_epoch}
        if last[0] is not None:
            numbers |= {"last_offset": last[0], "last_store_time": last[2]}
        wrong = {name: each for name, each in numbers.items() if type(each) is not int or not 0 <= each < NUMBER_LIMIT}
        names = {"topic": topic, "broker_name": broker_name}
        wrong |= {name: each for name, each in names.items() if type(each) is not str}
        if wrong:
            where = f"the row of topic {safe_repr(topic)}, broker {safe_repr(broker_name)}, queue {safe_repr(queue_id)}"
            what = ", ".join(f"{name}={safe_repr(value)}" for name, value in wrong.items())
            raise DatabaseError(
                self._database.address,
                f"reading {self._sql.table}",
                f"{where} has {what}; numbers must be whole, from 0 to {NUMBER_LIMIT - 1}, and names text. Correct the "
                "row, or delete it if no group uses it",
            )
        message = LastMessage(last[0], str(last[1] or ""), last[2]) if last[0] is not None else None
        return StoredOffset(MessageQueue(topic, broker_name, queue_id), next_offset, epoch, reset_epoch, owner, message)

    def _run(self, work: Callable[[Execute], T], what: str) -> T:
        """Run `work` in a transaction; raise DatabaseError about `what` if it fails."""
        try:
            return self._run_with_retries(work)
        except RocketError:
            raise
        except Exception as error:
            kind = RowLocked if self._database.classify_error(error) == "locked" else DatabaseError
            raise kind(self._database.address, what, _describe_error(error)) from error

    def _run_with_retries(self, work: Callable[[Execute], T]) -> T:
        """Run `work` in a transaction; retry it after a conflict with another one."""
        for pause_s in retry_pauses():
            try:
                return self._database.run(work)
            except Exception as error:
                if pause_s is None or self._database.classify_error(error) != "retry":
                    raise
            time.sleep(pause_s)
        raise AssertionError("the last pause is None")


def retry_pauses() -> Iterable[float | None]:
    """Yield the pause before each next attempt, then None."""
    backoff = Backoff(FIRST_RETRY_PAUSE_S, LONGEST_RETRY_PAUSE_S, jitter=random.random)
    for _ in range(MAX_ATTEMPTS - 1):
        yield backoff.failed()
    yield None


def _is_duplicate_key(error: Exception) -> bool:
    """Return whether a row already exists. Django's errors have the same name as SQLAlchemy's."""
    return type(error).__name__ == "IntegrityError"


def _describe_error(error: BaseException) -> str:
    """Return the type and the first line of a driver's error."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def ddl(dialect: str, table: str = "pyrocket_offsets", *, with_inbox: bool = False) -> list[str]:
    """Return the statements that create the tables of offsets.

    Raises:
        ConfigError: the dialect or the name of the table is not allowed, or SQLAlchemy is not installed.
    """
    check_choice("dialect", dialect, ["sqlite", "postgresql", "mysql", "mariadb"])
    _check_table(table)
    _import_access()
    from pyrocket_consumer.offsets.database.statements import ddl as statements_of

    return statements_of(dialect, table, with_inbox=with_inbox)


def _check_table(table: object) -> None:
    if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
        raise ConfigError(
            f"table={safe_repr(table)} is not allowed; it must be a name of up to 54 characters, or schema.name"
        )


def _import_access() -> Any:
    try:
        from pyrocket_consumer.offsets.database import sqlalchemy_access
    except ImportError as error:
        raise ConfigError(
            f"offsets in a database need SQLAlchemy 2, which is not installed ({error}); pip install "
            "'pyrocket-consumer[sql]'"
        ) from error
    return sqlalchemy_access
