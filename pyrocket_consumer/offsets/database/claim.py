"""The claim of a member on a queue of a `DatabaseOffsets`, and the progress of the listener call that runs for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b, sha256

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.reset_format import is_valid_epoch
from pyrocket_consumer.text import safe_repr

MAX_KEY_CHARACTERS = 255
"""The length of the texts in the tables."""


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The last message that an advance counted. It shows whether the queue's log is still the same."""

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
    """The result of a listener's transaction that was rolled back. All its messages will be redelivered."""

    __slots__ = ("result", "retry_after_s")

    def __init__(self, result: object = None, retry_after_s: float | None = None) -> None:
        """Keep the listener's `result`.

        With `retry_after_s` the messages did not fail, and are redelivered after that time.
        """
        self.result = result
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return safe_repr(self.result)


class ClaimStore:
    """The store of a claim: a `DatabaseOffsets`."""

    on_divergence: str


class ClaimHolder:
    """The holder of a claim: a member. Any thread may call it, to notify it of events."""

    failed_result: object
    """The result of a listener that failed."""

    def is_success(self, result: object) -> bool:
        """Return whether a listener that returned `result` has consumed its messages."""
        raise NotImplementedError

    def on_claim_fenced(self, claim: Claim) -> None:
        """Another member has claimed the queue, or someone has reset it."""

    def on_outside_transaction(self, claim: Claim, offset: int) -> None:
        """A listener call has ended, and no transaction counts its messages from `offset` on."""

    def on_uncommitted(self, claim: Claim, row: StoredOffset) -> None:
        """A listener has called `advance` but not committed. Messages from the offset in `row` on are redelivered."""

    def on_duplicates(self, claim: Claim, messages: Sequence[Message]) -> None:
        """The listener did not get these messages, because the inbox has them already."""

    def on_store_wait(self, claim: Claim, why: str) -> None:
        """The queue's messages wait for the database."""


class Claim:
    """One period of owning a queue. Its statements name its epoch.

    A claim tracks the one listener call in progress. A listener that returns normally proves nothing, because a
    wrapper may have caught the error that rolled back its transaction.
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
        self.stored = row.next_offset  # the offset known to be committed
        self.promised = row.next_offset  # the offset committed if listeners have committed their own transactions
        self.highest_advance = row.next_offset  # the highest offset of any call of `advance`, committed or not
        self.last = row.last
        self.pending_last: LastMessage | None = None  # `last`, once the current transaction is committed
        self.may_be_committed = False  # a transaction has failed, but its commit may have succeeded
        self.lost = False
        self.in_transaction = False  # of `exactly_once`
        self._call_messages: Sequence[Message] = ()
        self._counted = 0  # how many messages of the call are in transactions that are or will be committed
        self._rolled_back: RolledBack | None = None  # overrides the listener's result
        self._refused_until = 0  # messages of the call before this index were refused, because earlier ones failed
        self._refused_because: RolledBack | None = None
        self._is_used = False  # the call has used the store
        self._uses_own_transaction = False  # the call has called `advance`
        self.has_advanced = False
        self.log_checked_at = float("-inf")  # when the log was last found to have the last message consumed

    def __repr__(self) -> str:
        return f"Claim({self.queue}, epoch={self.epoch}, stored={self.stored}{', lost' if self.lost else ''})"

    def copy(self) -> Claim:
        """Return a claim with the same numbers, which does not keep the messages of the last call in memory."""
        row = StoredOffset(self.queue, self.stored, self.epoch, self.reset_epoch, self.owner, self.last)
        return Claim(self.store, self.holder, self.group, row)

    @property
    def has_last_message(self) -> bool:
        """Whether the row names a consumed message to compare the log with."""
        return self.last is not None or self.has_advanced

    # --- the listener call

    def begin_call(self, messages: Sequence[Message]) -> None:
        """Start tracking a listener call with these messages."""
        self._call_messages, self._counted, self._rolled_back, self._refused_until = messages, 0, None, 0
        self._is_used = self._uses_own_transaction = self.in_transaction = False

    def final_result(self, result: object) -> object:
        """Return the result of the call, after its listener has returned `result`."""
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
        """Note that the listener has raised."""
        if not self._is_used and not self.has_advanced:
            self.holder.on_outside_transaction(self, self._call_messages[0].queue_offset)

    def find_messages(self, messages: Sequence[Message], what: str, *, behind: bool = False) -> int:
        """Return the index of the first of `messages` in the call, for `exactly_once` or `advance`.

        With `behind`, it may also follow messages that were rolled back.

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
        if not all(isinstance(message, Message) for message in messages):
            raise ConfigError(f"{what} was given {safe_repr(messages, 200)}; pass messages of the listener call")
        wanted = (messages[0].queue, messages[0].queue_offset)
        indexes = [index for index, each in enumerate(unit) if (each.queue, each.queue_offset) == wanted]
        if indexes and (indexes[0] <= self._counted or (behind and self._rolled_back is not None)):
            part = unit[indexes[0] : indexes[0] + len(messages)]
            if len(part) == len(messages) and all(
                (expected.queue, expected.queue_offset) == (given.queue, given.queue_offset)
                for expected, given in zip(part, messages, strict=True)
            ):
                return indexes[0]
        left = unit[self._counted] if self._counted < len(unit) else None
        raise ConfigError(
            f"{what} was given {len(messages)} messages, the first at {wanted[0]} offset {wanted[1]}; it must be given "
            "those of the listener call, in order and without gaps"
            + (f", from offset {left.queue_offset} of {left.queue} on" if left else ", which are all counted")
        )

    def count_messages(self, index: int, messages: int, *, in_own_transaction: bool) -> None:
        """Count `messages` messages from `index` on; with `in_own_transaction`, the listener commits them itself."""
        self._counted = max(self._counted, index + messages)
        self.has_advanced = True
        if in_own_transaction:
            self._uses_own_transaction = True
            self.highest_advance = max(self.highest_advance, self._call_messages[self._counted - 1].queue_offset + 1)

    def check_rolled_back(self, index: int, messages: int) -> RolledBack | None:
        """Return the rollback of an earlier transaction of this call, if `index` follows its messages.

        The `messages` messages from `index` on are then redelivered, too. The messages that were rolled back
        themselves may be tried once more.
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


def list_messages(given: Message | Iterable[Message], what: str) -> list[Message]:
    """Return the messages that `exactly_once` or `advance` was given.

    Raises:
        ConfigError: the list is empty.
    """
    if isinstance(given, Message) or not isinstance(given, Iterable):
        return [given]
    messages = list(given)
    if not messages:
        raise ConfigError(f"{what} was given no messages; pass those of the listener call")
    return messages


claim_of_call: ContextVar[Claim | None] = ContextVar("pyrocket_claim", default=None)
"""The claim of the listener call that runs in this context. Workers set it."""


def id_of(message: Message) -> str:
    """Return the id of a message for the table of offsets. Long, odd and damaged ids fit, too."""
    try:
        return _shorten_id(message.message_id)
    except ProtocolError:
        return _shorten_id(f"damaged:{message.queue}:{message.queue_offset}")


def inbox_id_of(message: Message) -> str | None:
    """Return an id that only copies of this message share, or None if there is no such id.

    The message id alone is not enough. A message forwarded to another topic may keep its id, and any producer can
    reuse a known id. Some clients give all messages of a batch the same id.
    """
    try:
        name, body = message.producer_id, message.body
    except ProtocolError:
        return None
    if name is None:
        return None
    proof = blake2b(f"{message.topic}\0{name}\0".encode(errors="surrogatepass") + body, digest_size=12).hexdigest()
    return _shorten_id(f"{name}/{proof}")


def _shorten_id(name: str) -> str:
    """Return a unique form of an id that every database can store and compare."""
    if len(name) <= MAX_KEY_CHARACTERS and name.isascii() and name.isprintable() and name == name.strip():
        return name
    return "sha256:" + sha256(name.encode(errors="surrogatepass")).hexdigest()
