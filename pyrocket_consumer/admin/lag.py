"""How far a group is: what its members share at the brokers or, in broadcasting, what each of them has for itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.masters import at_each, masters
from pyrocket_consumer.admin.topics import list_topics
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.each import for_each
from pyrocket_consumer.cluster.members import GroupMembers, Member, group_members, member_offsets
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.places import first_and_last
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.config import check_group, check_topic
from pyrocket_consumer.errors import PermissionDenied, RocketError, RouteNotFound
from pyrocket_consumer.model import MessageModel, MessageQueue, retry_topic
from pyrocket_consumer.wire.bodies import decode_consume_stats
from pyrocket_consumer.wire.command import GetConsumeStatsHeader


@dataclass(frozen=True, slots=True)
class QueueLag:
    """Where a group, or one member of a broadcasting group, is in a queue that holds `min` to `max`.

    `committed` is the next offset to consume, None when nothing was committed. `consumed_at` is when the last message
    before it was stored, where the broker tells.
    """

    queue: MessageQueue
    committed: int | None
    min: int
    max: int
    member: str | None = None
    consumed_at: datetime | None = None

    @property
    def is_above_end(self) -> bool:
        """Whether what is committed is no place in the queue: nothing comes from there, and the lag is not known."""
        return self.committed is not None and self.committed > self.max

    @property
    def lag(self) -> int:
        """How many offsets are left to consume, of those the queue still holds."""
        return max(0, self.max - max(self.committed or 0, self.min))


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Where a group is. `unreached` are the members that did not tell, with the reason: their lag is not known.

    When nobody is online, what is committed at the brokers is shown, and `model` is None. Members of a broadcasting
    group keep their offsets themselves: of those only the last reset is known, where it led. `not_known` says of what
    nothing is known at all; it is empty when there is nothing of the kind.
    """

    group: str
    model: MessageModel | None
    members: tuple[str, ...]
    rows: tuple[QueueLag, ...]
    unreached: Mapping[str, str] = field(default_factory=dict)
    not_known: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the lag of everybody is known."""
        return not self.unreached and not self.not_known and not any(row.is_above_end for row in self.rows)

    @property
    def is_known(self) -> bool:
        """Whether anything is known of where the group is."""
        return not self.not_known or any(row.committed is not None for row in self.rows)

    @property
    def total(self) -> int:
        """The lag of all queues; of a broadcasting group, of the member that is furthest behind."""
        sums: dict[str | None, int] = {}
        for row in self.rows:
            sums[row.member] = sums.get(row.member, 0) + row.lag
        return max(sums.values(), default=0)


async def group_lag(cluster: Cluster, group: str, topic: str | None = None) -> GroupLag:
    """Return where a group is, in all its topics or in one."""
    namespace = cluster.config.namespace
    check_group(group)
    wire_group = wrap(namespace, group)
    if topic is not None:
        check_topic(topic)
        route = await cluster.route(wrap(namespace, topic), refresh=True)
        brokers = {
            broker: address
            for broker in sorted({data.broker_name for data in route.queues})
            if (address := cluster.address(broker, only_this=True)) is not None
        }
    else:
        brokers = await masters(cluster)
    found = await group_members(cluster, wire_group, brokers)
    if not found.members:
        await check_group_exists(cluster, group)
    unreached: dict[str, str] = {}
    wire_topic, model, not_known = topic and wrap(namespace, topic), found.model, ""
    if model is MessageModel.BROADCASTING:
        rows = await _of_members(cluster, wire_group, wire_topic, found, unreached)
    else:
        rows = await _of_brokers(cluster, wire_group, wire_topic, brokers, found.topics)
        retry = retry_topic(wire_group)
        if not found.members and all(row.committed is None for row in rows if row.queue.topic != retry):
            # Who has committed nothing is no clustering group, or has never consumed.
            recorded, unrecorded = await _recorded(cluster, wire_group, wire_topic)
            not_known = f"nobody of {group} is online, and it has committed nothing"
            if recorded:
                rows, model = recorded, MessageModel.BROADCASTING
                names = ", ".join(sorted(str(_outward(namespace, queue)) for queue in unrecorded))
                not_known = names and f"nobody of {group} is online, and no reset tells of {names}"
    outward = tuple(
        QueueLag(
            _outward(namespace, row.queue), row.committed, row.min, row.max, row.member, row.consumed_at,
        )
        for row in sorted(rows, key=lambda row: (row.member or "", row.queue))
    )  # fmt: skip
    members = tuple(member.client_id for member in found.members)
    return GroupLag(group, model, members, outward, unreached, not_known)


def _outward(namespace: str | None, queue: MessageQueue) -> MessageQueue:
    return MessageQueue(unwrap(namespace, queue.topic), queue.broker_name, queue.queue_id)


async def _of_brokers(
    cluster: Cluster, group: str, topic: str | None, brokers: Mapping[str, str], subscribed: Collection[str]
) -> list[QueueLag]:
    """Return the rows of what is committed, and of what is there to consume though nothing is committed for it.

    A broker tells only of topics in which the group has committed something there.
    """
    answers = await at_each(brokers, lambda address: cluster.call(address, GetConsumeStatsHeader(group, topic)))
    stats = {
        queue: facts for answer in answers.values() for queue, facts in decode_consume_stats(answer.body).queues.items()
    }
    topics = {topic} if topic else {queue.topic for queue in stats} | {*subscribed, retry_topic(group)}
    there = await for_each(topics, lambda name: _queues(cluster, name))

    async def committed(queue: MessageQueue) -> int | None:
        if queue in stats and stats[queue].consumer_offset:
            return stats[queue].consumer_offset
        # Brokers report 0 for what was never committed, too.
        return await cluster.broker(queue.broker_name).query_offset(group, queue, set_zero_if_not_found=False)

    exist = {queue for queue in stats if there.get(queue.topic)}
    offsets = await for_each({*exist, *chain.from_iterable(there.values())}, committed)
    ends = await _ends(cluster, offsets)  # asked after what is committed, which moves on
    rows = [
        QueueLag(queue, offsets[queue], low, high, None, _time(stats[queue].last_timestamp) if queue in stats else None)
        for queue, (low, high) in ends.items()
    ]
    return [row for row in rows if row.queue in stats or row.committed or row.lag]


async def _queues(cluster: Cluster, topic: str) -> list[MessageQueue]:
    """Return the queues of a topic that can be read; none of one that does not exist."""
    try:
        return (await cluster.route(topic)).consume_queues()
    except RouteNotFound:
        return []


OFFLINE = "(offline)"
"""In the place of a member, for all that are."""


async def _recorded(
    cluster: Cluster, group: str, topic: str | None
) -> tuple[list[QueueLag], list[MessageQueue]]:
    """Return where resets have led members that are offline, and the queues of those topics that were never reset."""
    namespace = cluster.config.namespace
    try:
        names = await list_topics(cluster, include_system=False) if topic is None else []
    except PermissionDenied:
        names = []
    targets: dict[MessageQueue, int] = {}
    without: list[MessageQueue] = []
    for name in [topic] if topic is not None else [wrap(namespace, each) for each in names]:
        queues = await _queues(cluster, name)
        found: dict[MessageQueue, int] = {}
        for broker_name in sorted({queue.broker_name for queue in queues}):
            record = ResetRecord(cluster, group, name, broker_name)
            if await record.head():
                resets = await record.read(queue.queue_id for queue in queues if queue.broker_name == broker_name)
                found |= {MessageQueue(name, broker_name, number): each.target for number, each in resets.items()}
        targets |= found
        without += [queue for queue in queues if found and queue not in found]
    ends = await first_and_last(cluster, targets)
    return [QueueLag(queue, targets[queue], *its_ends, OFFLINE) for queue, its_ends in ends.items()], without


def _time(at_ms: int) -> datetime | None:
    return datetime.fromtimestamp(at_ms / 1000, UTC) if at_ms > 0 else None


async def _of_members(
    cluster: Cluster, group: str, topic: str | None, found: GroupMembers, unreached: dict[str, str]
) -> list[QueueLag]:
    tables: dict[str, dict[MessageQueue, int]] = {}

    async def ask(member: Member) -> None:
        try:
            tables[member.client_id] = await member_offsets(cluster, group, member, topic or "")
        except RocketError as error:
            unreached[member.client_id] = str(error)

    await for_each(found.members, ask, at_once=8)
    ends = await _ends(cluster, {queue for table in tables.values() for queue in table})
    return [
        QueueLag(queue, offset, *ends[queue], client_id)
        for client_id, table in tables.items()
        for queue, offset in table.items()
        if queue in ends and topic in (None, queue.topic)
    ]


async def _ends(cluster: Cluster, queues: Iterable[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]:
    """Return min and max of those queues that exist: members remember topics that were deleted since."""
    asked = list(queues)

    there = await for_each({queue.topic for queue in asked}, lambda topic: _queues(cluster, topic))
    return await first_and_last(cluster, [queue for queue in asked if there[queue.topic]])
