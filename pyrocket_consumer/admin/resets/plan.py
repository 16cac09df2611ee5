"""The plan of a reset (queues, targets, the way for each member, problems), and its result, with their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pyrocket_consumer.cluster.admin_relay import RelayResult, RelayStatus, RemoteMember
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.config import check_bool, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageModel, MessageQueue, retry_topic
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.codes import version_name
from pyrocket_consumer.text import escape_controls


class ResetWay(StrEnum):
    """The way in which a reset moves offsets."""

    MEMBERS = "members"
    MEMBER = "member"
    BROKERS = "brokers"
    COMMITS = "commits"
    STORE = "store"


_WAYS = {
    (ResetWay.MEMBERS, MessageModel.BROADCASTING): (
        "will be recorded on the brokers for offline members, and sent to each online member"
    ),
    (ResetWay.MEMBER, MessageModel.BROADCASTING): "will be sent to this member only; nothing is recorded",
    (ResetWay.MEMBERS, MessageModel.CLUSTERING): "will be sent to the members that own the queues",
    (ResetWay.BROKERS, MessageModel.CLUSTERING): "will be made by the brokers, because not all members accept it",
    (ResetWay.COMMITS, MessageModel.CLUSTERING): "will be committed for the group, because no member is online",
    (ResetWay.STORE, MessageModel.CLUSTERING): ("will be set in the database; online members claim their queues again"),
}


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """The target of one queue. `wanted` differs from `target` if it is outside the range of the queue."""

    queue: MessageQueue
    wanted: int
    target: int
    min: int
    max: int

    @property
    def clamped(self) -> bool:
        return self.wanted != self.target


@dataclass(frozen=True, slots=True)
class QueueMove:
    """One line of a plan: a queue (of one member in broadcasting), and the effect of the reset on it.

    `current` is None if it is unknown or nothing was consumed. Then `replayed` and `skipped` are None, too.
    """

    queue: MessageQueue
    member: str | None
    current: int | None
    target: int

    @property
    def replayed(self) -> int | None:
        """The number of offsets to consume again."""
        return None if self.current is None else max(0, self.current - self.target)

    @property
    def skipped(self) -> int | None:
        """The number of offsets to skip."""
        return None if self.current is None else max(0, self.target - self.current)


@dataclass(frozen=True, slots=True)
class RetryStart:
    """The first offset in a queue of the retry topic without a row in the database of the group.

    `committed` is the offset at the brokers. If it is None, the group starts with the first message.
    """

    queue: MessageQueue
    committed: int | None
    target: int

    @property
    def text(self) -> str:
        """The reason, as text."""
        if self.committed is None:
            return "its first message"
        return "the offset at the brokers" + (f" ({self.committed})" if self.committed != self.target else "")

    def __str__(self) -> str:
        return f"{self.queue} will be set to {self.target}, {self.text}"


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """A master with queues of the topic. `server_side` means that it keeps resets as marks; None if unknown."""

    name: str
    address: str = ""
    server_side: bool | None = None
    version: int = 0
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        mode = {True: "resets are kept by the broker", False: "resets are sent to members", None: "mode unknown"}
        return f"{self.name} ({version_name(self.version)} at {self.address}): {mode[self.server_side]}"


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """An online member. `reachable` is whether the reset can reach it, `how` the way, or the reason why not."""

    member: RemoteMember
    reply: RelayResult
    reachable: bool
    how: str

    @property
    def client_id(self) -> str:
        return self.member.client_id

    @property
    def client(self) -> str:
        """The name of the client library, as text."""
        return "pyrocket_consumer" if self.reply.kind is RelayStatus.OURS else self.member.client


def plan_table(plan: ResetPlan) -> tuple[list[str], list[list[object]]]:
    """Return the heads and rows of a table with the moves of a plan."""
    rows: list[list[object]] = []
    clamped = {target.queue: target for target in plan.targets if target.clamped}
    for move in plan.moves:
        target = clamped.get(move.queue)
        note = f"wanted {target.wanted}; the queue holds {target.min} to {target.max}" if target else ""
        current, *amounts = ("?" if each is None else each for each in (move.current, move.replayed, move.skipped))
        who = [move.member or "(offline)"] if plan.broadcasting else []
        rows.append([*who, queue_name(move.queue), current, move.target, *amounts, note])
    return [*(["member"] if plan.broadcasting else []), "queue", "current", "target", "replayed", "skipped", ""], rows


NEEDS_BROKERS = frozenset({RelayStatus.FOREIGN, RelayStatus.FORBIDDEN})
"""Replies of members that only brokers can reset, because they accept no requests of this package or user."""


def way_for(replies: Iterable[RelayResult]) -> ResetWay:
    """Return the way to reset a clustering group with members of these replies.

    Only members of this package accept single queues and exact offsets with every broker. A member that does not
    respond now may recover soon, so it does not change the way for the others.
    """
    kinds = {reply.kind for reply in replies}
    if not kinds:
        return ResetWay.COMMITS
    return ResetWay.BROKERS if kinds & NEEDS_BROKERS else ResetWay.MEMBERS


Execute = Callable[["ResetPlan", "Callable[[ResetProgress], None] | None", bool, float], "ResetResult"]


@dataclass(frozen=True)
class ResetPlan:
    """A planned reset, which has changed nothing yet. Print it, then `execute()` it.

    Topic and group have the names that the user knows; requests add the namespace. `unsubscribed` is not empty if no
    online member subscribes to the topic; it lists their topics. With a `store`, `retries` are queues of the retry
    topic without a row in it, which the reset also sets.
    """

    group: str
    topic: str
    model: MessageModel
    way: ResetWay
    targets: tuple[QueueTarget, ...]
    moves: tuple[QueueMove, ...]
    brokers: tuple[BrokerPlan, ...]
    members: tuple[MemberPlan, ...]
    all_queues: bool
    namespace: str | None = None
    member: str | None = None
    unsubscribed: str = ""
    store: DatabaseOffsets | None = field(default=None, repr=False, compare=False)
    retries: tuple[RetryStart, ...] = ()
    _execute: Execute | None = field(default=None, repr=False, compare=False)

    @property
    def wire_group(self) -> str:
        """The name of the group at brokers, with its namespace."""
        return wrap(self.namespace, self.group)

    @property
    def wire_topic(self) -> str:
        """The name of the topic at brokers, with its namespace."""
        return wrap(self.namespace, self.topic)

    @property
    def wire_targets(self) -> dict[MessageQueue, int]:
        """Return queue -> target, with the topic names of brokers."""
        return {
            MessageQueue(self.wire_topic, each.queue.broker_name, each.queue.queue_id): each.target
            for each in self.targets
        }

    @property
    def wire_retries(self) -> dict[MessageQueue, RetryStart]:
        """Return queue -> its start, with the topic names of brokers."""
        topic = retry_topic(self.wire_group)
        return {MessageQueue(topic, each.queue.broker_name, each.queue.queue_id): each for each in self.retries}

    @property
    def problems(self) -> list[str]:
        """The problems of the plan: brokers that do not respond, members that cannot be reset."""
        found = [self.unsubscribed] if self.unsubscribed else []
        found += [str(broker) for broker in self.brokers if broker.problem]
        return found + [f"{each.client_id}: {each.how}" for each in self.members if not each.reachable]

    @property
    def way_text(self) -> str:
        """The way of the reset, as text."""
        return _WAYS[self.way, self.model]

    @property
    def subject(self) -> str:
        """The group, its model, and the selected member."""
        return f"group {self.group} ({self.model})" + (f" at {self.member} alone" if self.member is not None else "")

    @property
    def undo(self) -> dict[str | None, dict[MessageQueue, int]]:
        """Return the offsets that undo this reset: of the group (None) or, in broadcasting, of each member.

        Members of a broadcasting group have different offsets. Those of offline members are unknown, but
        `Admin.forget_reset` removes the record for them. Unknown offsets are omitted.
        """
        found: dict[str | None, dict[MessageQueue, int]] = {}
        for move in self.moves:
            if move.current not in (None, move.target):
                found.setdefault(move.member, {})[move.queue] = move.current
        return found

    def execute(
        self,
        progress: Callable[[ResetProgress], None] | None = None,
        *,
        partial: bool = False,
        unsubscribed: bool = False,
        wait_s: float = 30.0,
    ) -> ResetResult:
        """Execute the plan, and return when every member is verified, or after `wait_s` seconds.

        `progress` is called on this thread with each step. If brokers do not respond, `partial` omits their queues;
        without `partial` no offset moves.

        For up to `wait_s` seconds this asks unfinished members again, polls members of other clients, and waits for
        queues without an owner during a rebalance. Java members take up to 25 s. Each member has at least one second.

        A topic without any subscribed member needs `unsubscribed`. Its name is usually wrong, and a commit for it would
        remain as a lag that no member consumes.

        Raises:
            ConfigError: no online member subscribes to the topic. No offset has moved.
            RocketError: the reset did not start, or stopped before any offset moved, as a note states.
        """
        if self._execute is None:
            raise ConfigError("this plan was not made by an Admin; call Admin.plan_reset")
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress={progress!r} is not callable; pass a function of one ResetProgress")
        check_bool("partial", partial)
        check_bool("unsubscribed", unsubscribed)
        check_range("wait_s", wait_s, 0, 120)
        if self.unsubscribed and not unsubscribed:
            raise ConfigError(
                f"{self.unsubscribed}; check the topic's name. If it is correct, pass unsubscribed=True "
                "(in the shell --unsubscribed)"
            )
        return self._execute(self, progress, partial, wait_s)

    def __str__(self) -> str:
        lines = [f"Reset of {self.subject} in topic {self.topic}: {self.way_text}", "", *columns(*plan_table(self))]
        lines += ["", "Retries:", *(f"  {each}" for each in self.retries)] if self.retries else []
        lines += ["", "Brokers:", *(f"  {broker}" for broker in self.brokers)]
        lines += ["", "Members online:" if self.members else "No member of the group is online."]
        for each in self.members:
            lines.append(f"  {each.client_id} ({each.client}): {each.how}")
        if self.broadcasting and self.member is None:
            lines.append("Offline members will follow at their next start.")
        return "\n".join(map(escape_controls, lines))

    @property
    def broadcasting(self) -> bool:
        """Whether the group is broadcasting, so that every member keeps its own offsets."""
        return self.model is MessageModel.BROADCASTING


# --- the result


class ResetState(StrEnum):
    """The state of a reset at a member, or for a queue of a clustering group."""

    MOVED = "moved"
    ALREADY = "already"  # by the same reset or a newer one, earlier
    GONE = "gone"  # the member has left, and will find the record
    PENDING = "pending"  # it has started, and had not ended at the last status request
    UNCONFIRMED = "unconfirmed"  # the member was notified, but no effect was observed
    REFUSED = "refused"
    UNREACHED = "unreached"

    @property
    def is_done(self) -> bool:
        """Whether the reset is complete there."""
        return self in (ResetState.MOVED, ResetState.ALREADY, ResetState.GONE)


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """The outcome of the reset at one member (broadcasting), or for one queue (clustering)."""

    subject: str
    state: ResetState
    text: str = ""

    def __str__(self) -> str:
        return escape_controls(f"{self.subject}: {self.state}" + (f" ({self.text})" if self.text else ""))


@dataclass(frozen=True, slots=True)
class ResetProgress:
    """A step of a reset. `subject` is its broker, member or queue."""

    step: str
    subject: str
    text: str

    def __str__(self) -> str:
        return escape_controls(f"{self.step} {self.subject}: {self.text}")


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The result of a reset. Members know it by `id` and `epoch`."""

    id: str
    epoch: int
    outcomes: tuple[ResetOutcome, ...]
    brokers: Mapping[str, str]
    raced: tuple[MessageQueue, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether all online members have moved, and no other client reset the same queues meanwhile."""
        return not self.raced and all(outcome.state.is_done for outcome in self.outcomes)

    @property
    def heading(self) -> str:
        """The result in one line."""
        done = "verified" if self.outcomes else "recorded; no member is online to verify it"
        return f"Reset {self.id}: {done if self.verified else 'NOT verified'}"

    @property
    def unmoved(self) -> list[ResetOutcome]:
        """The outcomes of members or queues that have not moved, or did not confirm it."""
        return [outcome for outcome in self.outcomes if not outcome.state.is_done]

    def __str__(self) -> str:
        rows = [[outcome.subject, outcome.state, outcome.text] for outcome in self.outcomes]
        lines = [self.heading, *(columns(["who", "state", ""], rows) if rows else [])]
        lines += [f"  {name}: {text}" for name, text in sorted(self.brokers.items())]
        if self.raced:
            names = ", ".join(map(queue_name, self.raced))
            lines.append(f"  Another client reset {names} at the same time; its reset was later, and counts.")
        return "\n".join(map(escape_controls, lines))


def queue_name(queue: MessageQueue) -> str:
    """Return the name of a queue without its topic."""
    return f"{queue.broker_name}/{queue.queue_id}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    texts = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return ["  " + line.rstrip() for line in lines]
