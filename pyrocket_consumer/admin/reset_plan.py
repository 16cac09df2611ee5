"""What a reset would do: queues, targets, who is told how, and who cannot be reached. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from uuid import uuid4

from pyrocket_consumer.admin.groups import list_groups
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.each import for_each
from pyrocket_consumer.cluster.members import (
    Member,
    MemberReply,
    Reply,
    group_members,
    member_offsets,
    speak_to_all,
)
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.places import TOOLS_GROUP, To, check_to, first_and_last, offsets_at
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.config import Place, check_choice, check_group, check_range, check_topic
from pyrocket_consumer.errors import BrokerError, ConfigError, ConnectError, PermissionDenied, RocketError
from pyrocket_consumer.model import MASTER_ID, MessageModel, MessageQueue, TopicRoute
from pyrocket_consumer.wire.bodies import decode_java_properties
from pyrocket_consumer.wire.codes import version_name, version_ordinal
from pyrocket_consumer.wire.command import GetBrokerConfigHeader
from pyrocket_consumer.wire.reset_plan import MAX_QUEUE_ID, encode_status_question

if TYPE_CHECKING:
    from pyrocket_consumer.admin.reset import ResetProgress, ResetResult

_SERVER_SIDE_SETTING = "useServerSideResetOffset"
_SERVER_SIDE_SINCE = version_ordinal(5, 2, 0)
_JAVA_OBEYS = (
    range(version_ordinal(4, 9, 8), version_ordinal(5, 0, 0) - 1),
    range(version_ordinal(5, 2, 0), 1 << 30),
)
_TELLS_ZERO_SINCE = version_ordinal(5, 0, 0)
"""Before, a broker says 0 also of what was never committed."""

_BY_HAND = "stop it, edit its offsets.json, start it again"


class ResetWay(StrEnum):
    """How a reset goes its way."""

    MEMBERS = "members"
    BROKERS = "brokers"
    COMMITS = "commits"


_WAYS = {
    (ResetWay.MEMBERS, MessageModel.BROADCASTING): (
        "recorded at the brokers for members that are away, and told to each member that is online"
    ),
    (ResetWay.MEMBERS, MessageModel.CLUSTERING): "told to the members that hold the queues",
    (ResetWay.BROKERS, MessageModel.CLUSTERING): "by the brokers, for there are members of other clients",
    (ResetWay.COMMITS, MessageModel.CLUSTERING): "committed for the group, for nobody is online",
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

    `current` is None where it is not known, or nothing was consumed yet.
    """

    queue: MessageQueue
    member: str | None
    current: int | None
    target: int

    @property
    def replayed(self) -> int:
        """How many offsets come again."""
        return 0 if self.current is None else max(0, self.current - self.target)

    @property
    def skipped(self) -> int:
        """How many offsets will not be consumed."""
        return 0 if self.current is None else max(0, self.target - self.current)


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

    member: Member
    reply: MemberReply
    reachable: bool
    how: str

    @property
    def client_id(self) -> str:
        return self.member.client_id


Execute = Callable[["ResetPlan", "Callable[[ResetProgress], None] | None", bool, float], "ResetResult"]


@dataclass(frozen=True)
class ResetPlan:
    """A reset that was thought through but not done. Print it, then `execute()` it.

    Names of topic and group are as the user knows them; those of a namespace are put in front where they go out.
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
    _execute: Execute | None = field(default=None, repr=False, compare=False)

    @property
    def wire_group(self) -> str:
        return wrap(self.namespace, self.group)

    @property
    def wire_topic(self) -> str:
        return wrap(self.namespace, self.topic)

    @property
    def wire_targets(self) -> dict[MessageQueue, int]:
        """Return queue -> target, as brokers name the queues."""
        return {
            MessageQueue(self.wire_topic, each.queue.broker_name, each.queue.queue_id): each.target
            for each in self.targets
        }

    @property
    def problems(self) -> list[str]:
        """What stands in the way: brokers that cannot be asked, members that cannot be reached."""
        found = [str(broker) for broker in self.brokers if broker.problem]
        return found + [f"{each.client_id}: {each.how}" for each in self.members if not each.reachable]

    @property
    def way_text(self) -> str:
        """How the reset will go, in a sentence."""
        return _WAYS[self.way, self.model]

    def execute(
        self,
        progress: Callable[[ResetProgress], None] | None = None,
        *,
        partial: bool = False,
        wait_s: float = 30.0,
    ) -> ResetResult:
        """Do it, and return when every member was verified or given up, after at most a minute.

        `progress` is called, on this thread, with each step. With `partial` the queues of brokers that cannot be asked
        are left out; otherwise nothing is moved then. For about `wait_s` seconds members that are not done are asked
        again, those of other clients watched (Java takes up to 25 s), and queues looked for that nobody holds during a
        rebalance.

        Raises:
            RocketError: it was not begun, or stopped before anything moved; a note says so.
        """
        if self._execute is None:
            raise ConfigError("this plan was not made by an Admin; call Admin.plan_reset")
        check_range("wait_s", wait_s, 0, 120)
        return self._execute(self, progress, partial, wait_s)

    def __str__(self) -> str:
        lines = [f"Reset of group {self.group} ({self.model}) on topic {self.topic}: {self.way_text}", ""]
        heads = ["queue", "current", "target", "replayed", "skipped"]
        rows: list[list[object]] = []
        notes = {each.queue: each for each in self.targets}
        for move in self.moves:
            target = notes[move.queue]
            note = f" (wanted {target.wanted}; it holds {target.min} to {target.max})" if target.clamped else ""
            current = "-" if move.current is None else move.current
            who = [move.member or "(offline members)"] if self.broadcasting else []
            rows.append([*who, place(move.queue), current, f"{move.target}{note}", move.replayed, move.skipped])
        lines += columns(["member", *heads] if self.broadcasting else heads, rows)
        lines += ["", "Brokers:", *(f"  {broker}" for broker in self.brokers)]
        lines += ["", "Members online:" if self.members else "Nobody of the group is online."]
        for each in self.members:
            lines.append(f"  {each.client_id} ({each.member.client}): {each.how}")
        if self.broadcasting:
            lines.append("Members that are offline follow at their next start.")
        return "\n".join(lines)

    @property
    def broadcasting(self) -> bool:
        return self.model is MessageModel.BROADCASTING


def place(queue: MessageQueue) -> str:
    """Return a queue's name without its topic."""
    return f"{queue.broker_name}/{queue.queue_id}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return lines in which the cells of a column stand below each other."""
    texts = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return ["  " + line.rstrip() for line in lines]


# --- making one


async def plan_reset(
    cluster: Cluster,
    group: str,
    topic: str,
    to: To,
    queues: Iterable[MessageQueue] | None,
    model: str | None,
) -> ResetPlan:
    """Find out what the reset would do."""
    namespace = cluster.config.namespace
    check_group(group)
    check_topic(topic)
    where = check_to(to)
    if model is not None:
        check_choice("model", model, [each.value for each in MessageModel])
    wire_group, wire_topic = wrap(namespace, group), wrap(namespace, topic)
    route = await cluster.route(wire_topic, refresh=True)
    chosen = _chosen(route, unwrap(namespace, topic), wire_topic, where, queues)
    brokers = await _brokers(cluster, route)
    usable = {broker.name: broker.address for broker in brokers if not broker.problem}
    found = await group_members(cluster, wire_group, usable)
    decided = MessageModel(model) if model is not None else None
    replies: dict[str, MemberReply] = {}
    if found.members:
        question = encode_status_question(wire_topic)
        replies = await speak_to_all(cluster, wire_group, found.members, "status", str(uuid4()), question)
        decided = decided or found.model or _reported_model(replies)
    else:
        await _check_group_exists(cluster, group)
    if decided is None:
        decided = await _recalled_model(cluster, wire_group, group, chosen, brokers)
    targets = await _targets(cluster, wire_group, [queue for queue in chosen if queue.broker_name in usable], where)
    all_queues = all(
        MessageQueue(wire_topic, data.broker_name, number) in chosen
        for data in route.queues
        for number in range(data.write_queues)
    )
    members = tuple(
        _member_plan(member, replies[member.client_id], decided, brokers, all_queues) for member in found.members
    )
    way = way_for(decided, members)
    if way is ResetWay.BROKERS:
        _check_brokers_can(brokers, all_queues, members)
    moves = await _moves(cluster, wire_group, wire_topic, decided, members, targets)

    def outward(queue: MessageQueue) -> MessageQueue:
        return MessageQueue(topic, queue.broker_name, queue.queue_id)

    return ResetPlan(
        group,
        topic,
        decided,
        way,
        tuple(QueueTarget(outward(t.queue), t.wanted, t.target, t.min, t.max) for t in targets),
        tuple(QueueMove(outward(move.queue), move.member, move.current, move.target) for move in moves),
        tuple(brokers),
        members,
        all_queues,
        namespace,
    )


def _chosen(
    route: TopicRoute,
    topic: str,
    wire_topic: str,
    to: Place | Mapping[MessageQueue, int],
    queues: Iterable[MessageQueue] | None,
) -> list[MessageQueue]:
    """Return the queues to move, as brokers name them."""
    there = route.consume_queues()
    wanted = None if queues is None else list(queues)
    if isinstance(to, Mapping):
        wanted = list(to) if wanted is None else [queue for queue in wanted if queue in to]
    if wanted is None:
        chosen = there
    else:
        chosen = []
        for queue in wanted:
            if not isinstance(queue, MessageQueue) or queue.topic not in (topic, wire_topic):
                raise ConfigError(f"{queue} is not a queue of topic {topic}")
            chosen.append(MessageQueue(wire_topic, queue.broker_name, queue.queue_id))
        strangers = sorted(set(chosen) - set(there))
        if strangers:
            names = ", ".join(map(place, there)) or "none"
            raise ConfigError(f"topic {topic} has no queue {place(strangers[0])}; its queues: {names}")
    if not chosen:
        raise ConfigError(f"no queue of topic {topic} is chosen; it has {len(there)} that can be read")
    if max(queue.queue_id for queue in chosen) > MAX_QUEUE_ID:
        raise ConfigError(f"queue ids above {MAX_QUEUE_ID} cannot be reset")
    return sorted(set(chosen))


async def _brokers(cluster: Cluster, route: TopicRoute) -> list[BrokerPlan]:
    addresses = {broker.broker_name: broker.addresses.get(MASTER_ID) for broker in route.brokers}

    async def ask(name: str) -> BrokerPlan:
        address = addresses.get(name)
        if address is None:
            return BrokerPlan(name, problem="no master of it is known now")
        try:
            answer = await cluster.call(address, GetBrokerConfigHeader())
        except PermissionDenied:
            return BrokerPlan(name, address, None, cluster.broker_version(address) or 0)
        except BrokerError as error:
            return BrokerPlan(name, address, problem=str(error))
        except RocketError as error:
            return BrokerPlan(name, address, problem=str(error))
        setting = decode_java_properties(answer.body).get(_SERVER_SIDE_SETTING)
        if setting is None:  # it is absent before 5.1
            server_side = answer.version >= _SERVER_SIDE_SINCE
        else:
            server_side = setting.lower() == "true"
        return BrokerPlan(name, address, server_side, answer.version)

    return list((await for_each(sorted({data.broker_name for data in route.queues}), ask)).values())


async def _check_group_exists(cluster: Cluster, group: str) -> None:
    try:
        known = await list_groups(cluster, include_system=True)
    except PermissionDenied:
        return  # it cannot be told; brokers will
    if wrap(cluster.config.namespace, group) not in known:
        raise ConfigError(f"no broker knows group {group!r}; check its name (known: {', '.join(known[:20]) or 'none'})")


def _reported_model(replies: Mapping[str, MemberReply]) -> MessageModel | None:
    told = {reply.report.message_model for reply in replies.values() if reply.report.message_model}
    return MessageModel(told.pop()) if len(told) == 1 and told <= {model.value for model in MessageModel} else None


async def _recalled_model(
    cluster: Cluster, wire_group: str, group: str, queues: Sequence[MessageQueue], brokers: Sequence[BrokerPlan]
) -> MessageModel:
    """Guess by what the group has left behind: only a clustering group commits offsets, a broadcasting one is recorded.

    Raises:
        ConfigError: it cannot be told.
    """
    topic = queues[0].topic
    for broker_name, version in ((broker.name, broker.version) for broker in brokers if not broker.problem):
        try:
            if await ResetRecord(cluster, wire_group, topic, broker_name).head():
                return MessageModel.BROADCASTING
            for queue in queues:
                if queue.broker_name != broker_name:
                    continue
                found = await cluster.broker(broker_name).query_offset(wire_group, queue, set_zero_if_not_found=False)
                if found or (found == 0 and version >= _TELLS_ZERO_SINCE):
                    return MessageModel.CLUSTERING
        except ConnectError:
            continue
    raise ConfigError(
        f"nobody of group {group!r} is online, and nothing that it has committed for {topic} is found, so it cannot "
        "be told whether it is a clustering or a broadcasting group; say so with model='clustering' or 'broadcasting'"
    )


async def _targets(
    cluster: Cluster, wire_group: str, queues: Sequence[MessageQueue], to: Place | Mapping[MessageQueue, int]
) -> list[QueueTarget]:
    ends = await first_and_last(cluster, queues)
    if isinstance(to, Mapping):
        exact = {(queue.broker_name, queue.queue_id): offset for queue, offset in to.items()}
        wanted = {queue: exact[queue.broker_name, queue.queue_id] for queue in queues}
    else:
        wanted = await offsets_at(cluster, to, queues, groups=(TOOLS_GROUP, wire_group))
    return [
        QueueTarget(queue, wanted[queue], min(max(wanted[queue], low), max(low, high)), low, high)
        for queue, (low, high) in ends.items()
    ]


def _member_plan(
    member: Member, reply: MemberReply, model: MessageModel, brokers: Sequence[BrokerPlan], all_queues: bool
) -> MemberPlan:
    reachable, how = _reach(member, reply, model, brokers, all_queues)
    if member.connections > 1:
        how += f"; {member.connections} processes share this client id, and only one of them can be spoken to"
    return MemberPlan(member, reply, reachable, how)


def _reach(
    member: Member, reply: MemberReply, model: MessageModel, brokers: Sequence[BrokerPlan], all_queues: bool
) -> tuple[bool, str]:
    broadcasting = model is MessageModel.BROADCASTING
    if reply.kind is Reply.OURS:
        if reply.state == "refused":
            return False, f"refuses: {reply.reason}"
        return True, "told, and verified"
    if reply.kind is Reply.FOREIGN:
        if broadcasting:
            return _reach_foreign_broadcasting(member, brokers, all_queues)
        return True, "reset by its broker; verified where it can be seen"
    if reply.kind is Reply.FORBIDDEN:
        text = "this account may not speak to members (RocketMQ wants Get on the group)"
        return False, f"{text}; it follows the record within a minute, unconfirmed" if broadcasting else text
    recorded = "; if it is one of ours, it follows the record when it is well again" if broadcasting else ""
    return False, f"{reply.reason or reply.kind}{recorded}"


def _reach_foreign_broadcasting(
    member: Member, brokers: Sequence[BrokerPlan], all_queues: bool
) -> tuple[bool, str]:
    if any(broker.server_side is not False for broker in brokers):
        return False, (
            f"{member.client} cannot be reset in broadcasting while the broker keeps resets "
            f"({_SERVER_SIDE_SETTING}=true, which an operator can change); {_BY_HAND}"
        )
    java_obeys = member.language == "JAVA" and any(member.version in versions for versions in _JAVA_OBEYS)
    if not java_obeys and member.language != "GO":
        return False, f"{member.client} cannot be reset in broadcasting by any call; {_BY_HAND}"
    if not all_queues:
        return False, f"{member.client} can only be reset with all queues at once; name them all, or {_BY_HAND}"
    return True, "told by the broker, with offsets committed for a moment; looked at after 12 to 25 s"


def way_for(model: MessageModel, members: Sequence[MemberPlan]) -> ResetWay:
    """Return how a reset goes: only our own members can be told single queues and exact offsets by every broker."""
    if model is MessageModel.BROADCASTING:
        return ResetWay.MEMBERS
    if not members:
        return ResetWay.COMMITS
    ours = all(each.reply.kind is Reply.OURS for each in members)
    return ResetWay.MEMBERS if ours else ResetWay.BROKERS


def _check_brokers_can(
    brokers: Sequence[BrokerPlan], all_queues: bool, members: Sequence[MemberPlan]
) -> None:
    """Raise ConfigError if a broker could only reset more queues than are named."""
    if all_queues:
        return
    cannot = [broker.name for broker in brokers if broker.server_side is not True and not broker.problem]
    if cannot:
        foreign = next(each.client_id for each in members if each.reply.kind is not Reply.OURS)
        raise ConfigError(
            f"{', '.join(cannot)} can reset only all queues of a topic at once, and member {foreign} cannot be told "
            "single ones; name all queues"
        )


async def _moves(
    cluster: Cluster,
    wire_group: str,
    wire_topic: str,
    model: MessageModel,
    members: Sequence[MemberPlan],
    targets: Sequence[QueueTarget],
) -> list[QueueMove]:
    if model is MessageModel.CLUSTERING:

        async def committed(target: QueueTarget) -> int | None:
            broker = cluster.broker(target.queue.broker_name)
            return await broker.query_offset(wire_group, target.queue, set_zero_if_not_found=False)

        found = await for_each(targets, committed)
        return [QueueMove(target.queue, None, found[target], target.target) for target in targets]
    if not members:
        return [QueueMove(target.queue, None, None, target.target) for target in targets]

    async def offsets(member: MemberPlan) -> Mapping[MessageQueue, int]:
        if member.reply.kind is Reply.OURS:
            return member.reply.report.offsets
        if member.reply.kind is Reply.FOREIGN:
            try:
                return await member_offsets(cluster, wire_group, member.member, wire_topic)
            except RocketError:
                return {}
        return {}

    tables = [await offsets(member) for member in members]
    return [
        QueueMove(target.queue, member.client_id, table.get(target.queue), target.target)
        for member, table in zip(members, tables, strict=True)
        for target in targets
    ]
