"""How far a group is: what its members share at the brokers or, in broadcasting, what each of them has for itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.masters import at_each, masters
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.each import for_each
from pyrocket_consumer.cluster.members import GroupMembers, Member, group_members, member_offsets
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.places import first_and_last
from pyrocket_consumer.config import check_group, check_topic
from pyrocket_consumer.errors import RocketError, RouteNotFound
from pyrocket_consumer.model import MessageModel, MessageQueue
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
    def lag(self) -> int:
        """How many offsets are left to consume, of those the queue still holds."""
        return max(0, self.max - max(self.committed or 0, self.min))


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Where a group is. `unreached` are the members that did not tell, with the reason: their lag is not known.

    `model` is None when nobody is online; what is committed at the brokers is shown then.
    """

    group: str
    model: MessageModel | None
    members: tuple[str, ...]
    rows: tuple[QueueLag, ...]
    unreached: Mapping[str, str] = field(default_factory=dict)

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
    if found.model is MessageModel.BROADCASTING:
        rows = await _of_members(cluster, wire_group, topic and wrap(namespace, topic), found, unreached)
    else:
        rows = await _of_brokers(cluster, wire_group, topic and wrap(namespace, topic), brokers)
    outward = tuple(
        QueueLag(
            MessageQueue(unwrap(namespace, row.queue.topic), row.queue.broker_name, row.queue.queue_id),
            row.committed, row.min, row.max, row.member, row.consumed_at,
        )
        for row in sorted(rows, key=lambda row: (row.member or "", row.queue))
    )  # fmt: skip
    return GroupLag(group, found.model, tuple(member.client_id for member in found.members), outward, unreached)


async def _of_brokers(
    cluster: Cluster, group: str, topic: str | None, brokers: Mapping[str, str]
) -> list[QueueLag]:
    answers = await at_each(brokers, lambda address: cluster.call(address, GetConsumeStatsHeader(group, topic)))
    stats = {
        queue: facts for answer in answers.values() for queue, facts in decode_consume_stats(answer.body).queues.items()
    }
    ends = await _ends(cluster, stats)

    async def committed(queue: MessageQueue) -> int | None:
        if stats[queue].consumer_offset:
            return stats[queue].consumer_offset
        # Brokers report 0 for what was never committed, too.
        return await cluster.broker(queue.broker_name).query_offset(group, queue, set_zero_if_not_found=False)

    offsets = await for_each(stats, committed)
    return [
        QueueLag(queue, offsets[queue], *ends[queue], None, _time(facts.last_timestamp))
        for queue, facts in stats.items()
        if queue in ends
    ]


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

    async def exists(topic: str) -> bool:
        try:
            await cluster.route(topic)
        except RouteNotFound:
            return False
        return True

    there = await for_each({queue.topic for queue in asked}, exists)
    return await first_and_last(cluster, [queue for queue in asked if there[queue.topic]])
