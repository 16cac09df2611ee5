"""Offsets in the user's own database: a listener's effect and the offset that says so commit in one transaction.

Who owns a queue has *claimed* it: the claim has a number, the epoch, and every statement that moves the offset names
it. The next owner's claim has a higher one, so that whatever a former owner still does changes nothing.
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
from pyrocket_consumer.offsets.base import check_epoch, check_offset, check_queue
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

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from pyrocket_consumer.offsets.database.errors import ErrorKind
    from pyrocket_consumer.offsets.database.sqlalchemy_access import Database
    from pyrocket_consumer.offsets.database.statements import Execute, Statements

T = TypeVar("T")

MAX_ATTEMPTS = 8
"""How often a transaction that met another one is tried, before its queue waits."""

FIRST_RETRY_PAUSE_S, LONGEST_RETRY_PAUSE_S = 0.005, 0.5
"""Pauses between these tries."""

UNAVAILABLE_PAUSE_S = 1.0
"""How long a queue waits when the database is away."""

NUMBER_LIMIT = 2**62
"""Above all numbers that a row can have; there are more above it, so that none is added to until it wraps round."""

OWNER_COLUMN = 6
"""The place of `owner` among the columns of a row."""

INBOX_CLEANUP_INTERVAL_S = 60.0
"""How often old rows are looked for."""

LONGEST_INBOX_CLEANUP_S = 1.0
"""How long they are deleted at a time, in small steps: more than can have come meanwhile."""

_TABLE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,53}")


class _RollBack(Exception):
    """Rolls back the transaction of a listener that wants its messages again."""

    def __init__(self, result: object) -> None:
        self.result = result


class _Conflict(Exception):
    """Rolls back a transaction that came too late, for some of its messages or for all: it is looked at."""

    def __init__(self) -> None:
        super().__init__(f"others have changed its rows meanwhile, {MAX_ATTEMPTS} times")


class RowLocked(DatabaseError):
    """Another session has locked the row of a queue, and keeps it so."""


class _Attempt:
    """How far one attempt at a listener's transaction has come: who is to blame for what it raises."""

    __slots__ = ("step", "is_lost")

    def __init__(self) -> None:
        self.step: Literal["bookkeeping", "listener", "commit"] = "bookkeeping"
        self.is_lost = False  # its connection


class DatabaseOffsets:
    """Keeps a group's offsets in your own database, so that they commit together with what your listener does there.

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
        """Check the arguments; nothing is connected to.

        Args:
            engine: a SQLAlchemy `Engine`, or a `sessionmaker` (listeners get a `Session`), or for `async def`
                listeners an `AsyncEngine` or `async_sessionmaker`
            table: the table of offsets, `name` or `schema.name`
            inbox_days (–; 0.01–3650): keep the ids of messages for so long, and leave out those that a producer has
                stored twice
            on_divergence ("stop"; "continue"): what to do with a queue whose log is not the one we read any more
            allow_foreign_members (False): work in a group that has members of other clients, which go by the broker's
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
        """Make one for the database of that alias in Django's settings.

        Listeners run within `transaction.atomic(alias)` and take the messages alone.

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
        """Make one for tools, by the database's address as SQLAlchemy has it.

        Raises:
            ConfigError: that is none, or its driver is not installed.
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
        """What tells this table from all others, once it is loaded: members of a group must have the same one."""

    def __repr__(self) -> str:
        return f"DatabaseOffsets({self._database.address!r}, table={self._sql.table!r})"

    # --- what users call

    def create_tables(self) -> None:
        """Make the tables that are missing; whoever may not do so has `pyrocket offsets ddl` print the statements.

        Raises:
            OffsetStoreError: the database cannot be reached, or refuses.
        """
        failure: Exception | None = None
        for statement in self._sql.creation_statements():
            try:
                self._database.run(lambda execute, one=statement: execute(one))  # type: ignore[misc]
            except Exception as error:
                failure = failure or error
        try:  # another process may have made them at the same time
            self._database.run(self._sql.check_tables)
        except Exception as error:
            raise OffsetStoreError(
                f"{self!r}: the tables cannot be made: {_describe_error(failure or error)}"
            ) from error

    def exactly_once(self, listener: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a listener that runs yours in a transaction, which commits its effect and the offset together.

        Yours takes what listeners take, and a second argument: the `Connection` or `Session` of the transaction (with
        Django, none). What it raises, or returns besides None and SUCCESS, rolls everything back: all messages of the
        call come again. It must neither commit nor roll back itself.

        Raises:
            ConfigError: it cannot be called like that; or it is `async def` and the engine is not, or the other way
                round.
        """
        _import_access().check_listener(listener, self._database)
        wrapped: Any = _import_access().wrap_listener(self._database, listener, self._consume)
        wrapped.offset_store = self  # for consumers, which must have the same one
        listening: Callable[[Any], Any] = wrapped
        return listening

    @overload
    def advance(self, connection: Connection | Session | None, messages: Message | Sequence[Message]) -> None: ...

    @overload
    def advance(
        self, connection: AsyncConnection | AsyncSession, messages: Message | Sequence[Message]
    ) -> Awaitable[None]: ...

    def advance(self, connection: Any, messages: Message | Sequence[Message]) -> Awaitable[None] | None:
        """Count `messages` as consumed, in a transaction of your own: the last statement before you commit it.

        To be called within the listener call that was given them, with all of them or the first ones. `connection` is
        that of your transaction: a `Connection` or `Session` (with asynchronous ones, await the call), None for Django.

        Raises:
            Fenced: another member has the queue now, or these messages were consumed before. Roll back, by letting it
                through: what is to come again comes again.
            ConfigError: it is not called within a listener call of a consumer that has this store.
        """
        claim = self._current_claim()
        given = [messages] if isinstance(messages, Message) else list(messages)
        if not given:
            raise ConfigError("advance() was given no messages; pass those that the listener was given")
        if self.has_inbox:
            raise ConfigError(
                "advance() does not look into the inbox: use exactly_once(listener), or make the store without "
                "inbox_days"
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
        row = self._database.run_separately(lambda execute: self._read_row(execute, claim.group, claim.queue))
        if row is None or row.epoch != claim.epoch:
            self._fence(claim)
        elif row.next_offset < claim.promised:
            claim.holder.on_uncommitted(claim, row)
        else:
            claim.stored = max(claim.stored, row.next_offset)
        raise Fenced(str(claim.queue))

    # --- a listener's transaction

    def _current_claim(self) -> Claim:
        """Return the claim of the listener call that runs here."""
        claim = claim_of_call.get()
        if claim is None or claim.store is not self:
            raise ConfigError(
                f"{self!r} was used outside of a listener call of its own: pass it to the consumer as offset_store, "
                "and call it within a listener, or a task or thread (asyncio.to_thread) that one has begun"
            )
        return claim

    def _consume(self, given: Any, call: Callable[..., Any], sleep: Callable[[float], None]) -> Any:
        """Consume the messages of a listener call in a transaction; one that met another is tried again."""
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
            claim.note_rollback(RolledBack(claim.holder.failed_result))  # also when somebody catches this
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
                might_be_committed, claim.may_be_committed = (
                    claim.may_be_committed,
                    True,
                )  # the commit may have been done, and its answer lost
                kind = self._classify_error(error, attempt)
                if kind == "listener" and might_be_committed:
                    kind = self._classify_unconfirmed(claim, messages)
                if kind == "listener":
                    raise
                if kind != "retry" or pause_s is None:
                    met = "transactions meet again and again; have them lock rows in one order: "
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
        """Return what an error says after a former attempt: it may have met that one, which was committed after all."""
        try:
            row = self._database.run_separately(lambda execute: self._read_row(execute, claim.group, claim.queue))
        except Exception:
            return "unavailable"
        if row is None or row.epoch != claim.epoch or row.next_offset > messages[0].queue_offset:
            return "retry"
        return "listener"

    def _classify_error(self, error: Exception, attempt: _Attempt) -> ErrorKind:
        """Return what an error says: only what the listener has done is its failure."""
        if isinstance(error, _Conflict):
            return "retry"
        if attempt.step != "listener" and isinstance(error, OSError):
            return "unavailable"  # some drivers raise what their connection met as it is
        kind = self._database.classify_error(error)
        if kind == "aborted":  # by an error that the listener has caught: PostgreSQL goes on with nothing
            return "listener"
        if attempt.step == "listener":
            if kind == "locked":  # by rows of its own; PostgreSQL waits unless it was told not to
                return "listener" if self._database.dialect.name == "postgresql" else "retry"
            if kind == "disconnected" and not attempt.is_lost:  # another database's
                return "listener"
        return "unavailable" if kind == "listener" and attempt.step == "bookkeeping" else kind

    def _consume_once(
        self, claim: Claim, messages: list[Message], call: Callable[..., Any], attempt: _Attempt, *, is_single: bool
    ) -> Sequence[Message]:
        """Do it once; returns the messages that were left out, because they had their effect before."""
        with self._database.transaction() as scope:
            left = self._unconsumed(scope.execute, claim, messages) if claim.may_be_committed else messages
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
        """See that the transaction is the one that was begun for the listener."""
        try:
            execute(self._sql.release_savepoint)
        except Exception as error:
            if self._database.classify_error(error) == "listener":
                _import_access().raise_transaction_ended()
            raise

    def _advance(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> int:
        """Execute the statement that advances; returns how many rows it has changed."""
        last = messages[-1]
        claim.pending_last = LastMessage(last.queue_offset, id_of(last), last.stored_at_ms)
        values = {
            **self._key(claim.group, claim.queue),
            "epoch": claim.epoch,
            "first": messages[0].queue_offset,
            "known": claim.promised,
            "next": last.queue_offset + 1,
            "last_offset": last.queue_offset,
            "message_id": claim.pending_last.message_id,
            "store_time": last.stored_at_ms,
        }
        return execute(self._sql.advance, values).changed

    def _unconsumed(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> list[Message]:
        """Return those of `messages` whose effects are not there yet, after a transaction of them has failed.

        Raises:
            Fenced: the queue is not ours any more.
        """
        row = self._read_row(execute, claim.group, claim.queue)
        if row is None or row.epoch != claim.epoch:
            raise Fenced(str(claim.queue))
        if row.next_offset < claim.promised:
            claim.holder.on_uncommitted(claim, row)
            raise Fenced(str(claim.queue))
        return [message for message in messages if message.queue_offset >= row.next_offset]

    @property
    def has_inbox(self) -> bool:
        """Whether messages are looked for in the inbox."""
        return self._inbox_days is not None

    def _exclude_duplicates(
        self, execute: Execute, claim: Claim, messages: Sequence[Message]
    ) -> tuple[list[Message], dict[str, bool]]:
        """Return those of `messages` that have had no effect yet, each once; and their ids, and if a row is there.

        What was noted before the queue was last reset does not count: it was reset to be consumed once more.
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
        """Note that messages are consumed."""
        at = max(int(time.time() * 1000), claim.reset_epoch + 1)
        try:
            for statement, is_there in ((self._sql.insert_inbox, False), (self._sql.update_inbox, True)):
                names = [name for name, each in notes.items() if each is is_there]
                if names:
                    execute(statement, [{"group": claim.group, "message_id": name, "at": at} for name in names])
        except Exception as error:
            if _is_duplicate_key(error):  # another queue has it, too, and was quicker
                raise _Conflict from error
            raise

    @staticmethod
    def _fence(claim: Claim) -> None:
        claim.lost = True
        claim.holder.on_claim_fenced(claim)

    # --- what a consumer calls, from a thread of its own; each in a transaction of its own

    def load(self) -> None:
        """See that the database can be reached, has the tables, and does undo what is rolled back.

        Raises:
            OffsetStoreError: it cannot, has not, or does not; the text says which, and what to do.
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
                f"{self!r} cannot be reached: {_describe_error(error)}; check the address and the account, and that the database "
                "is up"
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
                f"{self!r}: the table is missing, of another version, or may not be written: {_describe_error(error)}; call "
                "create_tables() once, or execute what `pyrocket offsets ddl` prints"
            ) from error
        if kept:
            raise OffsetStoreError(
                f"{self!r} keeps what is rolled back in {kept}, so that nothing can be exactly once: make the engine "
                "without isolation_level='AUTOCOMMIT', and the tables of MySQL with ENGINE=InnoDB"
            )

    def _read_identity(self) -> str:
        """Return what tells this table from all others, which the first who asks writes there."""
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
        return self._run_with_retries(work)  # another was quicker

    def _find_table_without_rollback(self) -> str:
        """Return the table in which a row that is rolled back is there still, "" if there is none."""
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
        """Make queues ours, whoever had them, in one transaction; those that the group has no row of are left out.

        A row that means nothing is an error of its queue alone.

        Raises:
            DatabaseError: the database could not be asked.
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
        """Make the first row of `queue`, and claim it.

        Raises:
            Fenced: another member has made the row just now.
            DatabaseError: the database could not be asked.
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
        """Advance to `offset` what a listener has no effect of: gaps in the queue, and messages given up.

        Raises:
            Fenced: the queue is not ours any more, or a listener has not committed what it has called `advance` for.
            DatabaseError: the database could not be asked.
        """
        promised = min(claim.promised, offset)

        def work(execute: Execute) -> StoredOffset | None:
            key = self._key(claim.group, claim.queue)
            if promised > claim.stored:
                row = self._read_row(execute, claim.group, claim.queue)
                if row is not None and row.epoch == claim.epoch and row.next_offset < promised:
                    claim.holder.on_uncommitted(claim, row)
                    raise Fenced(str(claim.queue))
            if execute(self._sql.persist, {**key, "epoch": claim.epoch, "next": offset}).changed:
                return None
            row = self._read_row(execute, claim.group, claim.queue)
            if row is None or row.epoch != claim.epoch:
                raise Fenced(str(claim.queue))
            return row

        row = self._run(work, f"storing {offset} of {claim.queue}")
        claim.stored = max(claim.stored, offset if row is None else row.next_offset)

    def fenced_among(self, group: str, claims: Iterable[Claim]) -> list[Claim]:
        """Return those of `claims` that are another's by now.

        Raises:
            DatabaseError: the database could not be asked.
        """

        def work(execute: Execute) -> dict[tuple[object, ...], object]:  # whatever others may have written there
            return {tuple(row[:3]): row[4] for row in execute(self._sql.select_group, {"group": group}).rows}

        epochs = self._run(work, f"looking at claims of {group}")
        names = ((claim, claim.queue) for claim in claims)
        return [
            claim
            for claim, queue in names
            if epochs.get((queue.topic, queue.broker_name, queue.queue_id)) != claim.epoch
        ]

    def move(self, claim: Claim, offset: int, reset_epoch: int | None = None) -> Claim:
        """Set the offset, whatever it was, and claim the queue anew: what runs for `claim` changes nothing any more.

        Raises:
            Fenced: the queue is not ours any more.
            DatabaseError: the database could not be asked. It may have been done all the same.
        """
        check_offset(claim.queue, offset)

        def work(execute: Execute) -> StoredOffset:
            key = self._key(claim.group, claim.queue)
            followed = claim.reset_epoch if reset_epoch is None else reset_epoch
            if self.has_inbox and reset_epoch is None and offset < claim.stored:  # for the inbox it is a reset, too
                followed = max(followed, int(time.time() * 1000))
            values = {**key, "epoch": claim.epoch, "next": offset, "reset_epoch": followed}
            changed = execute(self._sql.move, values).changed
            row = self._read_row(execute, claim.group, claim.queue)
            ours = (claim.epoch + 1, offset, claim.owner)
            if row is None or (not changed and (row.epoch, row.next_offset, row.owner) != ours):
                raise Fenced(str(claim.queue))  # but for a move of ours that was not answered
            return row

        return Claim(self, claim.holder, claim.group, self._run(work, f"moving {claim.queue} to {offset}"))

    def is_consumed(self, claim: Claim, offset: int) -> bool:
        """Tell whether a message that has failed has its effect: a listener may raise after its own commit.

        Raises:
            DatabaseError: the database could not be asked.
        """
        if claim.highest_advance > max(claim.stored, offset):

            def work(execute: Execute) -> StoredOffset | None:
                return self._read_row(execute, claim.group, claim.queue)

            row = self._run(work, f"looking at {claim.queue}")
            if row is not None and row.epoch == claim.epoch:
                claim.stored = max(claim.stored, row.next_offset)
        return offset < claim.stored

    def tidy(self, group: str) -> None:
        """Delete old rows of the group's inbox, or as many as can be in a moment, if it is time."""
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
                return  # there may be more: the next time is now
        self._inbox_due_at = time.monotonic() + INBOX_CLEANUP_INTERVAL_S

    def close(self) -> None:
        """Give up what was opened besides your engine, which stays yours to dispose of."""
        self._database.close()

    # --- what admins call

    def offsets(self, group: str, topic: str | None = None) -> list[StoredOffset]:
        """Return the rows of `group`, of one topic or of all.

        Raises:
            DatabaseError: the database could not be asked.
        """

        def work(execute: Execute) -> list[StoredOffset]:
            rows = execute(self._sql.select_group, {"group": group}).rows
            return [self._decode_row(row) for row in rows if topic in (None, row[0])]

        return sorted(self._run(work, f"reading the offsets of {group}"), key=lambda row: row.queue)

    def reset(self, group: str, targets: Mapping[MessageQueue, int], reset_epoch: int) -> None:
        """Move `group`, running or not, in one transaction. Members that hold the queues claim them anew.

        Raises:
            DatabaseError: the database could not be asked.
        """
        for queue, offset in targets.items():
            check_queue(queue)
            check_offset(queue, offset)
            check_epoch(queue, reset_epoch)

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
        """Return a row as what it means.

        Raises:
            DatabaseError: it means nothing; not every database looks at types, and not everybody at what he writes.
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
                f"{where} has {what}; numbers must be whole, from 0 to {NUMBER_LIMIT - 1}, and names text. Set the row "
                "right, or delete it if it is nobody's",
            )
        message = LastMessage(last[0], str(last[1] or ""), last[2]) if last[0] is not None else None
        return StoredOffset(MessageQueue(topic, broker_name, queue_id), next_offset, epoch, reset_epoch, owner, message)

    def _run(self, work: Callable[[Execute], T], what: str) -> T:
        """Do some statements in a transaction."""
        try:
            return self._run_with_retries(work)
        except RocketError:
            raise
        except Exception as error:
            kind = RowLocked if self._database.classify_error(error) == "locked" else DatabaseError
            raise kind(self._database.address, what, _describe_error(error)) from error

    def _run_with_retries(self, work: Callable[[Execute], T]) -> T:
        """Do some statements in a transaction; one that met another's is tried again."""
        for pause_s in retry_pauses():
            try:
                return self._database.run(work)
            except Exception as error:
                if pause_s is None or self._database.classify_error(error) != "retry":
                    raise
            time.sleep(pause_s)
        raise AssertionError("the last pause is None")


def retry_pauses() -> Iterable[float | None]:
    """Yield how long to wait before the next try, None when there is none left."""
    longest_s = FIRST_RETRY_PAUSE_S
    for _ in range(MAX_ATTEMPTS - 1):
        yield random.uniform(longest_s / 2, longest_s)
        longest_s = min(2 * longest_s, LONGEST_RETRY_PAUSE_S)
    yield None


def _is_duplicate_key(error: Exception) -> bool:
    """Tell whether a row could not be made because there is one; Django's errors have that name, too."""
    return type(error).__name__ == "IntegrityError"


def _describe_error(error: BaseException) -> str:
    """Return the first line of what a driver says."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def ddl(dialect: str, table: str = "pyrocket_offsets", *, with_inbox: bool = False) -> list[str]:
    """Return the statements that make the tables of offsets.

    Raises:
        ConfigError: there is no such dialect, `table` is no name, or SQLAlchemy is not installed.
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
            f"offsets in a database need SQLAlchemy 2, which is not there ({error}); pip install "
            "'pyrocket-consumer[sql]'"
        ) from error
    return sqlalchemy_access
