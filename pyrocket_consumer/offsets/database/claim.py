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

    __slots__ = ("result", "postponed_s")

    def __init__(self, result: object = None, postponed_s: float | None = None) -> None:
        """`result` is the listener's. `postponed_s`: it is no failure of theirs; they come again after so long."""
        self.result = result
        self.postponed_s = postponed_s

    def __repr__(self) -> str:
        return safe_repr(self.result)


class ClaimStore(Protocol):
    """Where a claim is written: a `DatabaseOffsets`."""

    on_divergence: str


class ClaimHolder(Protocol):
    """Who has a claim, and hears what becomes of it. Any thread."""

    def apart(self, claim: Claim, offset: int) -> None:
        """A listener has returned, or raised, and nothing of its call counts the messages from `offset` on."""

    def left_out(self, claim: Claim, messages: Sequence[Message]) -> None:
        """Messages that had their effect before, as the inbox says, are not given to the listener."""

    @property
    def failure(self) -> object:
        """What a listener returns that has failed."""

    def is_success(self, result: object) -> bool:
        """Tell whether a listener that returned this has consumed its messages."""

    def fenced(self, claim: Claim) -> None:
        """Another member has claimed the queue since, or somebody has reset it."""

    def uncommitted(self, claim: Claim, row: StoredOffset) -> None:
        """A listener has called `advance`, and has not committed that: what it named comes again, from the row on."""

    def waits(self, claim: Claim, why: str) -> None:
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
        "tried",
        "last",
        "unsure",
        "lost",
        "in_transaction",
        "_unit",
        "_place",
        "_rolled_back",
        "_is_used",
        "_is_own",
        "has_advanced",
        "looked_at",
        "next_last",
        "_owed",
        "_owed_why",
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
        self.tried = row.next_offset  # the highest that any call of `advance` has named, committed or not
        self.last = row.last
        self.next_last: LastMessage | None = None  # once the transaction is committed that names it
        self.unsure = False  # a transaction has failed: it may have been committed all the same
        self.lost = False
        self.in_transaction = False  # of `exactly_once`
        self._unit: Sequence[Message] = ()  # the messages of the call
        self._place = 0  # so many of them are counted, by transactions that are committed or are to be
        self._rolled_back: RolledBack | None = None  # what the call has come to, whatever its listener says
        self._owed = 0  # up to this place messages were refused, because of some before them
        self._owed_why: RolledBack | None = None
        self._is_used = False  # the call has used the store
        self._is_own = False  # and in transactions of its own
        self.has_advanced = False
        self.looked_at = float("-inf")  # when the log was seen to have the last message consumed

    def __repr__(self) -> str:
        return f"Claim({self.queue}, epoch={self.epoch}, stored={self.stored}{', lost' if self.lost else ''})"

    @property
    def is_witnessed(self) -> bool:
        """Whether the row has a message that was consumed, to compare the log with."""
        return self.last is not None or self.has_advanced

    # --- the listener call

    def begin_call(self, messages: Sequence[Message]) -> None:
        """A listener is about to be called with these."""
        self._unit, self._place, self._rolled_back, self._owed = messages, 0, None, 0
        self._is_used = self._is_own = self.in_transaction = False

    def result_of(self, result: object) -> object:
        """Return what the call has come to, when its listener has returned this."""
        if self._rolled_back is not None:
            return self._rolled_back
        if self._owed > self._place:
            return self._owed_why
        if self._is_own and self._place:
            self.promised = max(self.promised, self._unit[self._place - 1].queue_offset + 1)
            self.last = self.next_last
        if self._place < len(self._unit) and self.holder.is_success(result):
            self.holder.apart(self, self._unit[self._place].queue_offset)
        return result

    def call_raised(self) -> None:
        """The listener has raised."""
        if not self._is_used and not self.has_advanced:
            self.holder.apart(self, self._unit[0].queue_offset)

    def use(self, messages: Sequence[Message], what: str, *, behind: bool = False) -> int:
        """Return which of the call's messages the first one is, for `exactly_once` or `advance`.

        `behind`: it may also be behind some that were rolled back.

        Raises:
            ConfigError: they are not the next ones of the call, or a transaction of `exactly_once` runs.
        """
        self._is_used, unit = True, self._unit
        if self.in_transaction:
            raise ConfigError(
                f"{what} was called within a listener of exactly_once, whose transaction counts its messages by "
                "itself; use one of the two"
            )
        if messages == unit:
            return 0
        wanted = (messages[0].queue, messages[0].queue_offset)
        places = [place for place, each in enumerate(unit) if (each.queue, each.queue_offset) == wanted]
        if places and (places[0] <= self._place or (behind and self._rolled_back is not None)):
            part = unit[places[0] : places[0] + len(messages)]
            if len(part) == len(messages) and all(
                (ours.queue, ours.queue_offset) == (given.queue, given.queue_offset)
                for ours, given in zip(part, messages, strict=True)
            ):
                return places[0]
        left = unit[self._place] if self._place < len(unit) else None
        raise ConfigError(
            f"{what} was given {len(messages)} messages, the first at {wanted[0]} offset {wanted[1]}; it must be given "
            "those of the listener call, in order and without gaps"
            + (f", from offset {left.queue_offset} of {left.queue} on" if left else ", which are all counted")
        )

    def count(self, place: int, messages: int, *, is_own: bool) -> None:
        """So many messages are counted, from that place on; `is_own`: in a transaction that is yet to be committed."""
        self._place = max(self._place, place + messages)
        self.has_advanced = True
        if is_own:
            self._is_own = True
            self.tried = max(self.tried, self._unit[self._place - 1].queue_offset + 1)

    def rolled_back(self, place: int, messages: int) -> RolledBack | None:
        """Return what a transaction of this call has come to, if it was before `place`: so many behind it come again.

        What was rolled back itself may be tried once more.
        """
        if place > self._place and self._rolled_back is not None:
            self._owed, self._owed_why = max(self._owed, place + messages), self._rolled_back
            return self._rolled_back
        self._rolled_back = None
        return None

    def roll_back(self, why: RolledBack) -> RolledBack:
        """Note that a transaction of this call was rolled back."""
        self._rolled_back = why
        return why


claim_of_call: ContextVar[Claim | None] = ContextVar("pyrocket_claim", default=None)
"""By which claim the listener call that runs here has its messages. Set by workers."""
