"""The rows of a `DatabaseOffsets`: claims and offsets of members, and offsets for admins."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from pyrocket_consumer.config import check_range
from pyrocket_consumer.errors import ConfigError, DatabaseError, Fenced, OffsetStoreError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import check_offset, check_queue
from pyrocket_consumer.offsets.database.claim import (
    MAX_KEY_CHARACTERS,
    Claim,
    ClaimHolder,
    ClaimStore,
    LastMessage,
    StoredOffset,
)
from pyrocket_consumer.text import safe_repr
from pyrocket_consumer.transport.backoff import Backoff

if TYPE_CHECKING:
    from pyrocket_consumer.offsets.database.sqlalchemy_access import Database
    from pyrocket_consumer.offsets.database.statements import Execute, Statements

T = TypeVar("T")

MAX_ATTEMPTS = 8
"""How often a transaction that conflicts with another one is tried."""

FIRST_RETRY_PAUSE_S, LONGEST_RETRY_PAUSE_S = 0.005, 0.5
"""The pauses between these attempts."""

NUMBER_LIMIT = 2**62
"""All numbers in a row must be below this. It is far below the type's maximum, so adding to one cannot overflow."""

OWNER_COLUMN = 6
"""The index of `owner` among the columns of a row."""

INBOX_CLEANUP_INTERVAL_S = 60.0
"""How often old rows of the inbox are deleted."""

LONGEST_INBOX_CLEANUP_S = 1.0
"""The longest deletion at a time, in small steps. It deletes more rows than can have been added meanwhile."""


class RowLocked(DatabaseError):
    """Another session has locked the row of a queue for a long time."""


class _Undo(Exception):
    """Rolls back the probe of `load`."""


class OffsetRows(ClaimStore):
    """The tables of a store: methods for consumers, which call them from one thread, and for admins.

    Each call runs in a transaction of its own.
    """

    def __init__(self, database: Database, sql: Statements, inbox_days: float | None) -> None:
        if inbox_days is not None:
            check_range("inbox_days", inbox_days, 0.01, 3650)
        self._database = database
        self._sql = sql
        self._inbox_days = inbox_days
        self._inbox_due_at = 0.0
        self.identity = "not known yet"
        """The unique id of the table, once it is loaded. All members of a group must have the same one."""

    @property
    def has_inbox(self) -> bool:
        """Whether the store checks messages against the inbox."""
        return self._inbox_days is not None

    # --- for consumers

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
                f"{self!r} cannot be reached: {describe_error(error)}; check the address and the account, and that "
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
                    f"{self!r} cannot be used now: {describe_error(error)}; check that it is up"
                ) from error
            raise OffsetStoreError(
                f"{self!r}: the table is missing, of another version, or not writable: {describe_error(error)}; call "
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
            if not is_duplicate_key(error):
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
            raise _Undo

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
        except _Undo:
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
                if is_duplicate_key(error):
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
        values = {**self._key(claim.group, claim.queue), "epoch": claim.epoch, "known": stored, "next": offset}

        def work(execute: Execute) -> int:
            if promised > stored:
                self._read_own_row(execute, claim, stored, promised)
            if execute(self._sql.persist, values).changed:
                return offset
            return self._read_own_row(execute, claim, stored, 0).next_offset

        claim.stored = max(claim.stored, self._run(work, f"storing {offset} of {claim.queue}"))

    def fenced_among(self, group: str, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims whose queues another member has claimed meanwhile.

        Raises:
            DatabaseError: the statement could not be executed.
        """

        def work(execute: Execute) -> dict[tuple[object, ...], object]:  # objects, because rows may be invalid
            return {tuple(row[:3]): row[4] for row in execute(self._sql.select_group, {"group": group}).rows}

        epochs = self._run(work, f"checking claims of {group}")
        keys = ((claim, (claim.queue.topic, claim.queue.broker_name, claim.queue.queue_id)) for claim in claims)
        return [claim for claim, key in keys if epochs.get(key) != claim.epoch]

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
            row = self._run(
                lambda execute: self._read_row(execute, claim.group, claim.queue), f"checking {claim.queue}"
            )
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
        _check_names(group, topic)

        def work(execute: Execute) -> list[StoredOffset]:
            rows = execute(self._sql.select_group, {"group": group}).rows
            return [self._decode_row(row) for row in rows if topic in (None, row[0])]

        return sorted(self._run(work, f"reading the offsets of {group}"), key=lambda row: row.queue)

    def reset(self, group: str, targets: Mapping[MessageQueue, int], reset_epoch: int) -> None:
        """Move the offsets of `group` in one transaction, while members run or not. The owners claim the queues again.

        Raises:
            DatabaseError: the statement could not be executed.
        """
        _check_names(group)
        if not isinstance(targets, Mapping):
            raise ConfigError(
                f"targets={safe_repr(targets)} is not allowed; pass a mapping from MessageQueue to offset"
            )
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

    def _read_own_row(self, execute: Execute, claim: Claim, stored: int, promised: int) -> StoredOffset:
        """Read the row of a claim, whose listeners have committed up to `promised` if they keep to `advance`.

        Raises:
            Fenced: this member no longer has the queue, the database has lost commits up to `stored`, or a listener has
                called `advance` and not committed.
        """
        row = self._read_row(execute, claim.group, claim.queue)
        if row is None or row.epoch != claim.epoch or row.next_offset < stored:
            raise Fenced(str(claim.queue))
        if row.next_offset < promised:
            claim.holder.on_uncommitted(claim, row)
            raise Fenced(str(claim.queue))
        return row

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
            raise kind(self._database.address, what, describe_error(error)) from error

    def _run_with_retries(self, work: Callable[[Execute], T]) -> T:
        """Run `work` in a transaction; retry it after a conflict with another one."""
        pauses = retry_pauses()
        while True:
            try:
                return self._database.run(work)
            except Exception as error:
                if self._database.classify_error(error) != "retry" or (pause_s := next(pauses, None)) is None:
                    raise
            time.sleep(pause_s)


def _check_names(group: object, topic: object = None) -> None:
    if not isinstance(group, str):
        raise ConfigError(f"group={safe_repr(group)} is not allowed; pass the name of a consumer group")
    if topic is not None and not isinstance(topic, str):
        raise ConfigError(f"topic={safe_repr(topic)} is not allowed; pass the name of a topic, or None for all topics")


def retry_pauses() -> Iterator[float]:
    """Yield the pause before each next attempt."""
    backoff = Backoff(FIRST_RETRY_PAUSE_S, LONGEST_RETRY_PAUSE_S, jitter=random.random)
    return (backoff.failed() for _ in range(MAX_ATTEMPTS - 1))


def is_duplicate_key(error: Exception) -> bool:
    """Return whether a row already exists. Django's errors have the same name as SQLAlchemy's."""
    return type(error).__name__ == "IntegrityError"


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of a driver's error."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
