"""What a reset would do: queues, targets, who will be told how, and who cannot be reached. Values and their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pyrocket_consumer.admin.resets.result import ResetProgress, ResetResult, columns, queue_name
from pyrocket_consumer.cluster.admin_relay import RelayResult, RelayStatus, RemoteMember
from pyrocket_consumer.cluster.namespace import wrap
from pyrocket_consumer.config import check_bool, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageModel, MessageQueue, retry_topic
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.codes import version_name
from pyrocket_consumer.text import escape_controls


class ResetWay(StrEnum):
    """How a reset goes its way."""

    MEMBERS = "members"
    MEMBER = "member"
    BROKERS = "brokers"
    COMMITS = "commits"
    STORE = "store"


_WAYS = {
    (ResetWay.MEMBERS, MessageModel.BROADCASTING): (
        "will be recorded at the brokers for members that are away, and told to each member that is online"
    ),
    (ResetWay.MEMBER, MessageModel.BROADCASTING): "will be told to this member alone; nothing is recorded",
    (ResetWay.MEMBERS, MessageModel.CLUSTERING): "will be told to the members that hold the queues",
    (ResetWay.BROKERS, MessageModel.CLUSTERING): "will be made by the brokers, for not all members can be told",
    (ResetWay.COMMITS, MessageModel.CLUSTERING): "will be committed for the group, for nobody is online",
    (ResetWay.STORE, MessageModel.CLUSTERING): (
        "will be set in the database; members that are online claim their queues anew"
    ),
}


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """Where one queue shall go on. `wanted` differs from `target` when it lies outside of what the queue holds."""

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
    """One line of a plan: a queue, of one member in broadcasting, and what the reset means for it.

    `current` is None where it is not known, or nothing was consumed yet; so are `replayed` and `skipped` then.
    """

    queue: MessageQueue
    member: str | None
    current: int | None
    target: int

    @property
    def replayed(self) -> int | None:
        """How many offsets come again."""
        return None if self.current is None else max(0, self.current - self.target)

    @property
    def skipped(self) -> int | None:
        """How many offsets will not be consumed."""
        return None if self.current is None else max(0, self.target - self.current)


@dataclass(frozen=True, slots=True)
class RetryStart:
    """Where a group begins in a queue of its retry topic that its database has no row of: what failed comes from there.

    `committed` is what the brokers have; None when nothing is, and it begins with the first message.
    """

    queue: MessageQueue
    committed: int | None
    target: int

    @property
    def text(self) -> str:
        """Why there, for people."""
        if self.committed is None:
            return "its first message"
        return "where the brokers have it" + (f" ({self.committed})" if self.committed != self.target else "")

    def __str__(self) -> str:
        return f"{self.queue} will be set to {self.target}, {self.text}"


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """A master with queues of the topic. `server_side`: resets made by it are marks it keeps; None if not known."""

    name: str
    address: str = ""
    server_side: bool | None = None
    version: int = 0
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        mode = {True: "resets are kept by the broker", False: "resets are sent to members", None: "mode not known"}
        return f"{self.name} ({version_name(self.version)} at {self.address}): {mode[self.server_side]}"


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A member that is online. `reachable` tells whether the reset will get to it, `how` the way, or why not."""

    member: RemoteMember
    reply: RelayResult
    reachable: bool
    how: str

    @property
    def client_id(self) -> str:
        return self.member.client_id

    @property
    def client(self) -> str:
        """Which client it is, for people."""
        return "pyrocket_consumer" if self.reply.kind is RelayStatus.OURS else self.member.client


Execute = Callable[["ResetPlan", Callable[[ResetProgress], None] | None, bool, float], ResetResult]


@dataclass(frozen=True)
class ResetPlan:
    """A reset that was thought through but not done. Print it, then `execute()` it.

    Names of topic and group are as the user knows them; those of a namespace are put in front where they go out.
    `unsubscribed` says that no member that is online subscribes to the topic, and to what they do. With a `store`,
    `retries` are the queues of the retry topic that come along, for it has no row of them.
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
        """The group as brokers know it, with its namespace."""
        return wrap(self.namespace, self.group)

    @property
    def wire_topic(self) -> str:
        """The topic as brokers know it, with its namespace."""
        return wrap(self.namespace, self.topic)

    @property
    def wire_targets(self) -> dict[MessageQueue, int]:
        """Return queue -> target, as brokers name the queues."""
        return {
            MessageQueue(self.wire_topic, each.queue.broker_name, each.queue.queue_id): each.target
            for each in self.targets
        }

    @property
    def wire_retries(self) -> dict[MessageQueue, RetryStart]:
        """Return queue -> where it begins, as brokers name the queues."""
        topic = retry_topic(self.wire_group)
        return {MessageQueue(topic, each.queue.broker_name, each.queue.queue_id): each for each in self.retries}

    @property
    def problems(self) -> list[str]:
        """What stands in the way: brokers that cannot be asked, members that cannot be reached."""
        found = [self.unsubscribed] if self.unsubscribed else []
        found += [str(broker) for broker in self.brokers if broker.problem]
        return found + [f"{each.client_id}: {each.how}" for each in self.members if not each.reachable]

    @property
    def way_text(self) -> str:
        """How the reset will go, in a sentence."""
        return _WAYS[self.way, self.model]

    @property
    def subject(self) -> str:
        """What is reset, and what it is."""
        return f"group {self.group} ({self.model})" + (f" at {self.member} alone" if self.member is not None else "")

    @property
    def undo(self) -> dict[str | None, dict[MessageQueue, int]]:
        """Return what undoes this reset: where the group (None) goes back to, in broadcasting each member by itself.

        Members of a broadcasting group are at different places, and of those that are offline it is not known where:
        what is recorded for them can be forgotten. An offset that is not known is left out.
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
        """Do it, and return when every member was verified, or given up after `wait_s` seconds.

        `progress` is called, on this thread, with each step. With `partial` the queues of brokers that cannot be asked
        are left out; otherwise nothing is moved then. For at most `wait_s` seconds members that are not done are asked
        again, those of other clients watched (Java takes up to 25 s), and queues looked for that nobody holds during a
        rebalance. Each member has a second at least.

        A topic that no member subscribes to wants `unsubscribed`: as a rule its name is wrong, and what is committed
        for it would stay, as a lag that nobody consumes.

        Raises:
            ConfigError: no member that is online subscribes to the topic. Nothing has moved.
            RocketError: it was not begun, or stopped before anything moved; a note says so.
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
                f"{self.unsubscribed}; check the topic's name. If it is meant, say so with unsubscribed "
                "(in the shell --unsubscribed)"
            )
        return self._execute(self, progress, partial, wait_s)

    def __str__(self) -> str:
        lines = [f"Reset of {self.subject} on topic {self.topic}: {self.way_text}", ""]
        heads = ["queue", "current", "target", "replayed", "skipped"]
        rows: list[list[object]] = []
        notes = {each.queue: each for each in self.targets}
        for move in self.moves:
            target = notes[move.queue]
            note = f" (wanted {target.wanted}; it holds {target.min} to {target.max})" if target.clamped else ""
            current, *amounts = ("?" if each is None else each for each in (move.current, move.replayed, move.skipped))
            who = [move.member or "(offline members)"] if self.broadcasting else []
            rows.append([*who, queue_name(move.queue), current, f"{move.target}{note}", *amounts])
        lines += columns(["member", *heads] if self.broadcasting else heads, rows)
        lines += ["", "Retries:", *(f"  {each}" for each in self.retries)] if self.retries else []
        lines += ["", "Brokers:", *(f"  {broker}" for broker in self.brokers)]
        lines += ["", "Members online:" if self.members else "Nobody of the group is online."]
        for each in self.members:
            lines.append(f"  {each.client_id} ({each.client}): {each.how}")
        if self.broadcasting and self.member is None:
            lines.append("Members that are offline will follow at their next start.")
        return "\n".join(map(escape_controls, lines))

    @property
    def broadcasting(self) -> bool:
        """Whether every member of the group gets every message, and keeps its own offsets."""
        return self.model is MessageModel.BROADCASTING


def way_for(model: MessageModel, members: Sequence[MemberPlan]) -> ResetWay:
    """Return how a reset goes: only our own members can be told single queues and exact offsets by every broker.

    Who does not answer now may be well again in a moment, and is no reason to tell the others less exactly.
    """
    if model is MessageModel.BROADCASTING:
        return ResetWay.MEMBERS
    if not members:
        return ResetWay.COMMITS
    needs_brokers = any(each.reply.kind in (RelayStatus.FOREIGN, RelayStatus.FORBIDDEN) for each in members)
    return ResetWay.BROKERS if needs_brokers else ResetWay.MEMBERS
