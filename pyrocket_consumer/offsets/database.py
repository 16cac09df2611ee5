"""Offsets in the user's own database: a listener's effect and the offset that says so commit in one transaction.

Who owns a queue has *claimed* it: the claim has a number, the epoch, and every statement that moves the offset names
it. The next owner's claim has a higher one, so that whatever a former owner still does changes nothing.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload
from uuid import uuid4

from pyrocket_consumer.config import check_bool, check_choice, check_range
from pyrocket_consumer.errors import (
    ConfigError,
    DatabaseError,
    Fenced,
    OffsetStoreError,
    ProtocolError,
    RocketError,
)
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.store import check_epoch, check_offset, check_queue
from pyrocket_consumer.text import shown
from pyrocket_consumer.wire.message import Message

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from pyrocket_consumer.offsets.database_access import Database, Execute, Statements

T = TypeVar("T")

MOST_TRIES = 8
"""How often a transaction that met another one is tried, before its queue waits."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Pauses between these tries."""

AWAY_PAUSE_S = 1.0
"""How long a queue waits when the database is away."""

LONGEST_KEY = 255

TIDY_EVERY_S = 60.0
"""How often old rows are looked for."""

_TABLE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The last message that an advance counted: it tells whether the log is still the one we read."""

    offset: int
    message_id: str
    stored_at_ms: int


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """One row of the table of offsets."""

    queue: MessageQueue
    next_offset: int
    epoch: int
    reset_epoch: int
    owner: str | None
    last: LastMessage | None


class RolledBack:
    """What a listener's transaction came to when it was rolled back: all its messages come again."""

    __slots__ = ("result", "postponed_s")

    def __init__(self, result: object = None, postponed_s: float | None = None) -> None:
        """`result` is the listener's. `postponed_s`: it is no failure of theirs; they come again after so long."""
        self.result = result
        self.postponed_s = postponed_s

    def __repr__(self) -> str:
        return shown(self.result)


class ClaimHolder(Protocol):
    """Who has a claim, and hears what becomes of it. Any thread."""

    def is_success(self, result: object) -> bool:
        """Tell whether a listener that returned this has consumed its messages."""

    def fenced(self, claim: Claim) -> None:
        """Another member has claimed the queue since, or somebody has reset it."""

    def waits(self, claim: Claim, why: str) -> None:
        """The queue's messages wait for the database."""


class Claim:
    """One period of owning a queue. What is done for it names its epoch."""

    __slots__ = ("store", "holder", "group", "queue", "epoch", "reset_epoch", "stored", "last", "unsure", "lost")

    def __init__(self, store: DatabaseOffsets, holder: ClaimHolder, group: str, row: StoredOffset) -> None:
        self.store = store
        self.holder = holder
        self.group = group
        self.queue = row.queue
        self.epoch = row.epoch
        self.reset_epoch = row.reset_epoch
        self.stored = row.next_offset  # what is known to be committed
        self.last = row.last
        self.unsure = False  # a transaction has failed: it may have been committed all the same
        self.lost = False

    def __repr__(self) -> str:
        return f"Claim({self.queue}, epoch={self.epoch}, stored={self.stored}{', lost' if self.lost else ''})"


claim_of_call: ContextVar[Claim | None] = ContextVar("pyrocket_claim", default=None)
"""By which claim the listener call that runs here has its messages. Set by workers."""


class _Undo(Exception):
    """Rolls back the transaction of a listener that wants its messages again."""

    def __init__(self, result: object) -> None:
        self.result = result


class _Behind(Exception):
    """Rolls back a transaction that came too late, for some of its messages or for all: it is looked at."""


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
        database = _access().of(engine)
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
        store = cls.__new__(cls)
        store._init(_access().django(alias), table, inbox_days, on_divergence, allow_foreign_members)
        return store

    @classmethod
    def at(cls, url: str, table: str = "pyrocket_offsets") -> DatabaseOffsets:
        """Make one for tools, by the database's address as SQLAlchemy has it.

        Raises:
            ConfigError: that is none, or its driver is not installed.
        """
        return cls(_access().engine_at(url), table)

    @property
    def address(self) -> str:
        """The database's address, without its password."""
        return self._database.shown

    def _init(
        self, database: Database, table: str, inbox_days: float | None, on_divergence: str, allow_foreign_members: bool
    ) -> None:
        _check_table(table)
        if inbox_days is not None:
            check_range("inbox_days", inbox_days, 0.01, 3650)
        check_choice("on_divergence", on_divergence, ["stop", "continue"])
        check_bool("allow_foreign_members", allow_foreign_members)
        self._database = database
        self._sql: Statements = _access().Statements(table, database.dialect, with_inbox=inbox_days is not None)
        self._inbox_days = inbox_days
        self._inbox_due_at = 0.0
        self.on_divergence = on_divergence
        self.allow_foreign_members = allow_foreign_members

    def __repr__(self) -> str:
        return f"DatabaseOffsets({self._database.shown!r}, table={self._sql.table!r})"

    # --- what users call

    def create_tables(self) -> None:
        """Make the tables that are missing; whoever may not do so has `pyrocket offsets ddl` print the statements.

        Raises:
            OffsetStoreError: the database cannot be reached, or refuses.
        """
        failure: Exception | None = None
        for statement in self._sql.creations():
            try:
                self._database.run(lambda execute, one=statement: execute(one))  # type: ignore[misc]
            except Exception as error:
                failure = failure or error
        try:  # another process may have made them at the same time
            self._database.run(self._sql.look)
        except Exception as error:
            raise OffsetStoreError(f"{self!r}: the tables cannot be made: {_said(failure or error)}") from error

    def exactly_once(self, listener: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a listener that runs yours in a transaction, which commits its effect and the offset together.

        Yours takes what listeners take, and a second argument: the `Connection` or `Session` of the transaction (with
        Django, none). What it raises, or returns besides None and SUCCESS, rolls everything back: all messages of the
        call come again. It must neither commit nor roll back itself.

        Raises:
            ConfigError: it cannot be called like that; or it is `async def` and the engine is not, or the other way
                round.
        """
        _access().check_listener(listener, self._database)
        wrapped: Callable[[Any], Any] = _access().as_listener(self._database, listener, self._consume)
        return wrapped

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
        claim = self._claim_here()
        given = [messages] if isinstance(messages, Message) else list(messages)
        if not given:
            raise ConfigError("advance() was given no messages; pass those that the listener was given")
        if self._database.is_async:
            work: Awaitable[None] = _access().spawned(self._advance_on, connection, claim, given)
            return work
        self._advance_on(connection, claim, given)
        return None

    def _advance_on(self, connection: Any, claim: Claim, messages: Sequence[Message]) -> None:
        if self._advance(self._database.executor(connection), claim, messages):
            return
        row = self._database.run_apart(lambda execute: self._row(execute, claim.group, claim.queue))
        if row is None or row.epoch != claim.epoch:
            self._lost(claim)
        else:
            claim.stored = max(claim.stored, row.next_offset)
        raise Fenced(str(claim.queue))

    # --- a listener's transaction

    def _claim_here(self) -> Claim:
        """Return the claim of the listener call that runs here."""
        claim = claim_of_call.get()
        if claim is None or claim.store is not self:
            raise ConfigError(
                f"{self!r} was used outside of a listener call of its own: pass it to the consumer as offset_store, "
                "and call it within a listener, or a task or thread (asyncio.to_thread) that one has begun"
            )
        return claim

    def _consume(self, given: Any, call: Callable[..., Any], rest: Callable[[float], None]) -> Any:
        """Consume the messages of a listener call in a transaction; one that met another is tried again."""
        claim = self._claim_here()
        messages = [given] if isinstance(given, Message) else list(given)
        for pause_s in pauses():
            try:
                self._consume_once(claim, messages, call, is_single=isinstance(given, Message))
            except _Undo as undone:
                return RolledBack(undone.result)
            except Fenced:
                self._lost(claim)
                return RolledBack(postponed_s=AWAY_PAUSE_S)
            except Exception as error:
                claim.unsure = True  # the commit may have been done, and its answer lost
                verdict = "again" if isinstance(error, _Behind) else self._database.verdict(error)
                if verdict == "theirs":
                    raise
                if verdict == "away" or pause_s is None:
                    claim.holder.waits(claim, f"{self._database.shown}: {_said(error)}")
                    return RolledBack(postponed_s=AWAY_PAUSE_S)
            except BaseException:
                claim.unsure = True
                raise
            else:
                claim.stored = max(claim.stored, messages[-1].queue_offset + 1)
                claim.unsure = False
                return None
            rest(pause_s)
        raise AssertionError("the last pause is None")

    def _consume_once(
        self, claim: Claim, messages: list[Message], call: Callable[..., Any], *, is_single: bool
    ) -> None:
        with self._database.transaction() as scope:
            left = self._unconsumed(scope.execute, claim, messages) if claim.unsure else messages
            fresh = self._not_in_inbox(scope.execute, claim, left) if left and self.has_inbox else left
            if fresh:
                result = call(fresh[0] if is_single else list(fresh), *scope.arguments)
                if not claim.holder.is_success(result):
                    raise _Undo(result)
                scope.ready()
                if self.has_inbox:
                    self._put_in_inbox(scope.execute, claim, fresh)
            if left and not self._advance(scope.execute, claim, left):
                raise _Behind

    def _advance(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> int:
        """Execute the statement that advances; returns how many rows it has changed."""
        last = messages[-1]
        values = {
            **self._key(claim.group, claim.queue),
            "epoch": claim.epoch,
            "first": messages[0].queue_offset,
            "next": last.queue_offset + 1,
            "last_offset": last.queue_offset,
            "message_id": id_of(last),
            "store_time": last.stored_at_ms,
        }
        return execute(self._sql.advance, values).changed

    def _unconsumed(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> list[Message]:
        """Return those of `messages` whose effects are not there yet, after a transaction of them has failed.

        Raises:
            Fenced: the queue is not ours any more.
        """
        row = self._row(execute, claim.group, claim.queue)
        if row is None or row.epoch != claim.epoch:
            raise Fenced(str(claim.queue))
        return [message for message in messages if message.queue_offset >= row.next_offset]

    @property
    def has_inbox(self) -> bool:
        """Whether messages are looked for in the inbox."""
        return self._inbox_days is not None

    def _not_in_inbox(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> list[Message]:
        """Return those of `messages` that have not been consumed before, each once."""
        firsts = {id_of(message): message for message in reversed(messages)}
        values = {"group": claim.group} | {f"id{number}": each for number, each in enumerate(firsts)}
        for (known,) in execute(self._sql.in_inbox(len(firsts)), values).rows:
            firsts.pop(known, None)
        return [message for message in messages if firsts.get(id_of(message)) is message]

    def _put_in_inbox(self, execute: Execute, claim: Claim, messages: Sequence[Message]) -> None:
        """Note that `messages` are consumed."""
        at = int(time.time() * 1000)
        rows = [{"group": claim.group, "message_id": id_of(message), "at": at} for message in messages]
        try:
            execute(self._sql.to_inbox, rows)
        except Exception as error:
            if type(error).__name__ == "IntegrityError":  # another queue has it, too, and was quicker
                raise _Behind from error
            raise

    @staticmethod
    def _lost(claim: Claim) -> None:
        claim.lost = True
        claim.holder.fenced(claim)

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
            self._database.run(self._sql.look)
            undoes = self._undoes()
        except Exception as error:
            if self._database.verdict(error) != "theirs":
                raise OffsetStoreError(
                    f"{self!r} cannot be reached: {_said(error)}; check the address, and that the database is up"
                ) from error
            raise OffsetStoreError(
                f"{self!r}: the table is missing, of another version, or may not be written: {_said(error)}; call "
                "create_tables() once, or execute what `pyrocket offsets ddl` prints"
            ) from error
        if not undoes:
            raise OffsetStoreError(
                f"{self!r} keeps what is rolled back, so that nothing can be exactly once: make the engine without "
                "isolation_level='AUTOCOMMIT', and the tables of MySQL with ENGINE=InnoDB"
            )

    def _undoes(self) -> bool:
        """Tell whether a row that is rolled back is gone."""
        queue = MessageQueue(f"probe-{uuid4().hex}", "", 0)
        key = self._key("", queue)

        def write(execute: Execute) -> None:
            execute(self._sql.begin, {**key, "next": 0, "epoch": 0, "reset_epoch": 0, "owner": None})
            raise _Undo(None)

        def read_and_forget(execute: Execute) -> bool:
            is_there = self._row(execute, "", queue) is not None
            if is_there:
                execute(self._sql.forget, key)
            return not is_there

        try:
            self._database.run(write)
        except _Undo:
            pass
        return self._database.run(read_and_forget)

    def claim(self, holder: ClaimHolder, group: str, queue: MessageQueue, owner: str) -> Claim | None:
        """Make `queue` ours, whoever had it; None if the group has no row of it.

        Raises:
            DatabaseError: the database could not be asked.
        """

        def work(execute: Execute) -> StoredOffset | None:
            key = self._key(group, queue)
            execute(self._sql.claim, {**key, "owner": owner[:LONGEST_KEY]})
            return self._row(execute, group, queue)

        row = self._do(work, f"claiming {queue}")
        return Claim(self, holder, group, row) if row is not None else None

    def begin(self, holder: ClaimHolder, group: str, queue: MessageQueue, owner: str, offset: int) -> Claim:
        """Make the first row of `queue`, and claim it.

        Raises:
            DatabaseError: the database could not be asked, or another member has made the row just now.
        """
        check_queue(queue)
        check_offset(queue, offset)

        def work(execute: Execute) -> StoredOffset | None:
            values = {"next": offset, "epoch": 1, "reset_epoch": 0, "owner": owner[:LONGEST_KEY]}
            execute(self._sql.begin, {**self._key(group, queue), **values})
            return self._row(execute, group, queue)

        row = self._do(work, f"beginning {queue} at {offset}")
        assert row is not None
        return Claim(self, holder, group, row)

    def persist(self, claim: Claim, offset: int) -> None:
        """Advance to `offset` what a listener has no effect of: gaps in the queue, and messages given up.

        Raises:
            Fenced: the queue is not ours any more.
            DatabaseError: the database could not be asked.
        """

        def work(execute: Execute) -> StoredOffset | None:
            key = self._key(claim.group, claim.queue)
            if execute(self._sql.persist, {**key, "epoch": claim.epoch, "next": offset}).changed:
                return None
            row = self._row(execute, claim.group, claim.queue)
            if row is None or row.epoch != claim.epoch:
                raise Fenced(str(claim.queue))
            return row

        row = self._do(work, f"storing {offset} of {claim.queue}")
        claim.stored = max(claim.stored, offset if row is None else row.next_offset)

    def fenced_among(self, group: str, claims: Iterable[Claim]) -> list[Claim]:
        """Return those of `claims` that are another's by now.

        Raises:
            DatabaseError: the database could not be asked.
        """
        epochs = {row.queue: row.epoch for row in self.offsets(group)}
        return [claim for claim in claims if epochs.get(claim.queue) != claim.epoch]

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
            values = {**key, "epoch": claim.epoch, "next": offset, "reset_epoch": followed}
            changed = execute(self._sql.move, values).changed
            row = self._row(execute, claim.group, claim.queue)
            if row is None or (not changed and (row.epoch, row.next_offset) != (claim.epoch + 1, offset)):
                raise Fenced(str(claim.queue))  # but for a move of ours that was not answered
            return row

        return Claim(self, claim.holder, claim.group, self._do(work, f"moving {claim.queue} to {offset}"))

    def tidy(self) -> None:
        """Delete some of the inbox's old rows, if it is time."""
        if self._inbox_days is None or time.monotonic() < self._inbox_due_at:
            return
        before = int((time.time() - self._inbox_days * 86400) * 1000)

        def work(execute: Execute) -> bool:
            old = execute(self._sql.old_in_inbox, {"before": before}).rows
            if old:
                execute(self._sql.from_inbox, [{"group": group, "message_id": name} for group, name in old])
            return bool(old)

        self._inbox_due_at = time.monotonic() + TIDY_EVERY_S
        if self._do(work, "tidying the inbox"):
            self._inbox_due_at = 0.0  # there may be more

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
            rows = execute(self._sql.of_group, {"group": group}).rows
            return [stored for row in rows if topic in (None, (stored := _stored(row)).queue.topic)]

        return sorted(self._do(work, f"reading the offsets of {group}"), key=lambda row: row.queue)

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

        self._do(work, f"resetting {group}")

    # --- statements

    @staticmethod
    def _key(group: str, queue: MessageQueue) -> dict[str, Any]:
        return {"group": group, "topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}

    def _row(self, execute: Execute, group: str, queue: MessageQueue) -> StoredOffset | None:
        rows = execute(self._sql.row, self._key(group, queue)).rows
        return _stored(rows[0]) if rows else None

    def _do(self, work: Callable[[Execute], T], what: str) -> T:
        """Do some statements in a transaction; one that met another's is tried again."""
        for pause_s in pauses():
            try:
                return self._database.run(work)
            except RocketError:
                raise
            except Exception as error:
                if self._database.verdict(error) != "again" or pause_s is None:
                    raise DatabaseError(self._database.shown, what, _said(error)) from error
            time.sleep(pause_s)
        raise AssertionError("the last pause is None")


def pauses() -> Iterable[float | None]:
    """Yield how long to wait before the next try, None when there is none left."""
    longest_s = FIRST_PAUSE_S
    for _ in range(MOST_TRIES - 1):
        yield random.uniform(longest_s / 2, longest_s)
        longest_s = min(2 * longest_s, LONGEST_PAUSE_S)
    yield None


def id_of(message: Message) -> str:
    """Return the id of a message as the tables have it: what any producer or damage has made of it fits in there."""
    try:
        name = message.message_id
    except ProtocolError:
        return f"damaged:{message.queue}:{message.queue_offset}"[:LONGEST_KEY]
    if len(name) <= LONGEST_KEY and name.isprintable() and name == name.strip():
        return name
    return "sha256:" + sha256(name.encode(errors="surrogatepass")).hexdigest()


def _stored(row: Sequence[Any]) -> StoredOffset:
    topic, broker_name, queue_id, next_offset, epoch, reset_epoch, owner, last_offset, message_id, store_time = row
    last = None if last_offset is None else LastMessage(last_offset, message_id or "", store_time or 0)
    return StoredOffset(MessageQueue(topic, broker_name, queue_id), next_offset, epoch, reset_epoch, owner, last)


def _said(error: BaseException) -> str:
    """Return the first line of what a driver says."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def ddl(dialect: str, table: str = "pyrocket_offsets", *, with_inbox: bool = False) -> list[str]:
    """Return the statements that make the tables of offsets.

    Raises:
        ConfigError: `table` is no name, or SQLAlchemy is not installed.
    """
    _check_table(table)
    statements: list[str] = _access().ddl(dialect, table, with_inbox=with_inbox)
    return statements


def _check_table(table: object) -> None:
    if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
        raise ConfigError(f"table={shown(table)} is not allowed; it must be a name, or schema.name")


def _access() -> Any:
    try:
        from pyrocket_consumer.offsets import database_access
    except ImportError as error:
        raise ConfigError(
            f"offsets in a database need SQLAlchemy 2, which is not there ({error}); pip install "
            "'pyrocket-consumer[sql]'"
        ) from error
    return database_access
