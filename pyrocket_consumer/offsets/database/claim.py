"""Who has claimed a queue of a `DatabaseOffsets`, and what becomes of the listener call that runs for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.reset_format import is_valid_epoch
from pyrocket_consumer.text import safe_repr


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

    __slots__ = ("result", "retry_after_s")

    def __init__(self, result: object = None, retry_after_s: float | None = None) -> None:
        """`result` is the listener's. `retry_after_s`: it is no failure of theirs; they come again after so long."""
        self.result = result
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return safe_repr(self.result)


class ClaimStore(Protocol):
    """Where a claim is written: a `DatabaseOffsets`."""

    on_divergence: str


class ClaimHolder(Protocol):
    """Who has a claim, and hears what becomes of it. Any thread."""

    def on_outside_transaction(self, claim: Claim, offset: int) -> None:
        """A listener has returned, or raised, and nothing of its call counts the messages from `offset` on."""

    def on_duplicates(self, claim: Claim, messages: Sequence[Message]) -> None:
        """Messages that had their effect before, as the inbox says, are not given to the listener."""

    @property
    def failed_result(self) -> object:
        """What a listener returns that has failed."""

    def is_success(self, result: object) -> bool:
        """Tell whether a listener that returned this has consumed its messages."""

    def on_claim_fenced(self, claim: Claim) -> None:
        """Another member has claimed the queue since, or somebody has reset it."""

    def on_uncommitted(self, claim: Claim, row: StoredOffset) -> None:
        """A listener has called `advance`, and has not committed that: what it named comes again, from the row on."""

    def on_store_wait(self, claim: Claim, why: str) -> None:
        """The queue's messages wait for the database."""


class Claim:
    """One period of owning a queue. What is done for it names its epoch.

    It knows the listener call that runs, which is one at a time, and what is done of it: a listener's word that it has
    consumed its messages is not enough, for what stands between may have swallowed that their effect was rolled back.
    """

    __slots__ = (
        "store",
        "holder",
        "group",
        "queue",
        "owner",
        "epoch",
        "reset_epoch",
        "stored",
        "promised",
        "highest_advance",
        "last",
        "may_be_committed",
        "lost",
        "in_transaction",
        "_call_messages",
        "_counted",
        "_rolled_back",
        "_is_used",
        "_uses_own_transaction",
        "has_advanced",
        "log_checked_at",
        "pending_last",
        "_refused_until",
        "_refused_because",
    )

    def __init__(self, store: ClaimStore, holder: ClaimHolder, group: str, row: StoredOffset) -> None:
        self.store = store
        self.holder = holder
        self.group = group
        self.queue = row.queue
        self.owner = row.owner
        self.epoch = row.epoch
        self.reset_epoch = row.reset_epoch if is_valid_epoch(row.reset_epoch, int(time.time() * 1000)) else 0
        self.stored = row.next_offset  # what is known to be committed
        self.promised = row.next_offset  # what is, if listeners have committed their own transactions
        self.highest_advance = row.next_offset  # the highest that any call of `advance` has named, committed or not
        self.last = row.last
        self.pending_last: LastMessage | None = None  # once the transaction is committed that names it
        self.may_be_committed = False  # a transaction has failed: it may have been committed all the same
        self.lost = False
        self.in_transaction = False  # of `exactly_once`
        self._call_messages: Sequence[Message] = ()  # the messages of the call
        self._counted = 0  # so many of them are counted, by transactions that are committed or are to be
        self._rolled_back: RolledBack | None = None  # what the call has come to, whatever its listener says
        self._refused_until = 0  # up to this place messages were refused, because of some before them
        self._refused_because: RolledBack | None = None
        self._is_used = False  # the call has used the store
        self._uses_own_transaction = False  # and in transactions of its own
        self.has_advanced = False
        self.log_checked_at = float("-inf")  # when the log was seen to have the last message consumed

    def __repr__(self) -> str:
        return f"Claim({self.queue}, epoch={self.epoch}, stored={self.stored}{', lost' if self.lost else ''})"

    @property
    def has_last_message(self) -> bool:
        """Whether the row has a message that was consumed, to compare the log with."""
        return self.last is not None or self.has_advanced

    # --- the listener call

    def begin_call(self, messages: Sequence[Message]) -> None:
        """A listener is about to be called with these."""
        self._call_messages, self._counted, self._rolled_back, self._refused_until = messages, 0, None, 0
        self._is_used = self._uses_own_transaction = self.in_transaction = False

    def final_result(self, result: object) -> object:
        """Return what the call has come to, when its listener has returned this."""
        if self._rolled_back is not None:
            return self._rolled_back
        if self._refused_until > self._counted:
            return self._refused_because
        if self._uses_own_transaction and self._counted:
            self.promised = max(self.promised, self._call_messages[self._counted - 1].queue_offset + 1)
            self.last = self.pending_last
        if self._counted < len(self._call_messages) and self.holder.is_success(result):
            self.holder.on_outside_transaction(self, self._call_messages[self._counted].queue_offset)
        return result

    def end_failed_call(self) -> None:
        """The listener has raised."""
        if not self._is_used and not self.has_advanced:
            self.holder.on_outside_transaction(self, self._call_messages[0].queue_offset)

    def find_messages(self, messages: Sequence[Message], what: str, *, behind: bool = False) -> int:
        """Return which of the call's messages the first one is, for `exactly_once` or `advance`.

        `behind`: it may also be behind some that were rolled back.

        Raises:
            ConfigError: they are not the next ones of the call, or a transaction of `exactly_once` runs.
        """
        self._is_used, unit = True, self._call_messages
        if self.in_transaction:
            raise ConfigError(
                f"{what} was called within a listener of exactly_once, whose transaction counts its messages by "
                "itself; use one of the two"
            )
        if messages == unit:
            return 0
        wanted = (messages[0].queue, messages[0].queue_offset)
        indexes = [index for index, each in enumerate(unit) if (each.queue, each.queue_offset) == wanted]
        if indexes and (indexes[0] <= self._counted or (behind and self._rolled_back is not None)):
            part = unit[indexes[0] : indexes[0] + len(messages)]
            if len(part) == len(messages) and all(
                (ours.queue, ours.queue_offset) == (given.queue, given.queue_offset)
                for ours, given in zip(part, messages, strict=True)
            ):
                return indexes[0]
        left = unit[self._counted] if self._counted < len(unit) else None
        raise ConfigError(
            f"{what} was given {len(messages)} messages, the first at {wanted[0]} offset {wanted[1]}; it must be given "
            "those of the listener call, in order and without gaps"
            + (f", from offset {left.queue_offset} of {left.queue} on" if left else ", which are all counted")
        )

    def count_messages(self, index: int, messages: int, *, in_own_transaction: bool) -> None:
        """So many messages are counted, from that place on; `in_own_transaction`: in a transaction that is yet to be committed."""
        self._counted = max(self._counted, index + messages)
        self.has_advanced = True
        if in_own_transaction:
            self._uses_own_transaction = True
            self.highest_advance = max(self.highest_advance, self._call_messages[self._counted - 1].queue_offset + 1)

    def check_rolled_back(self, index: int, messages: int) -> RolledBack | None:
        """Return what a transaction of this call has come to, if it was before `index`: so many behind it come again.

        What was rolled back itself may be tried once more.
        """
        if index > self._counted and self._rolled_back is not None:
            self._refused_until, self._refused_because = max(self._refused_until, index + messages), self._rolled_back
            return self._rolled_back
        self._rolled_back = None
        return None

    def note_rollback(self, why: RolledBack) -> RolledBack:
        """Note that a transaction of this call was rolled back."""
        self._rolled_back = why
        return why


claim_of_call: ContextVar[Claim | None] = ContextVar("pyrocket_claim", default=None)
"""By which claim the listener call that runs here has its messages. Set by workers."""
