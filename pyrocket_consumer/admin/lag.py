"""How far a group is: what its members share at the brokers or, in broadcasting, what each of them has for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.masters import cluster_info
from pyrocket_consumer.admin.topics import list_topics, to_datetime
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import GroupMembers, RemoteMember, fetch_group_members, fetch_member_offsets
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.offset_lookup import fetch_committed_offsets, fetch_first_and_last
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.errors import ClientClosed, ConnectError, PermissionDenied, RocketError, RouteNotFound
from pyrocket_consumer.model import MASTER_ID, MessageModel, MessageQueue, retry_topic
from pyrocket_consumer.offsets.database.claim import StoredOffset
from pyrocket_consumer.protocol.bodies import QueueConsumeStats, decode_consume_stats
from pyrocket_consumer.protocol.command import GetConsumeStatsHeader

_ROUTES_AT_ONCE = 100


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

    `missing` are the brokers whose queues have no rows, with the reason: one that does not answer (every question),
    that refuses, that has no master now, or that no name server knows (any more), as far as it is known that there is
    one.
    """

    group: str
    model: MessageModel | None
    members: tuple[str, ...]
    rows: tuple[QueueLag, ...]
    unreached: Mapping[str, str] = field(default_factory=dict)
    not_known: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the lag of everybody in every queue is known."""
        incomplete = self.unreached or self.not_known or self.missing
        return not incomplete and not any(row.is_above_end for row in self.rows)

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


class _Survey:
    """The brokers that answer, address by name, and what is missing: brokers, with the reason, and queues.

    A broker that does not answer a question is missing from then on, and so is what it has told before.

    `seen` remembers, from one call to the next, where the queues of a topic were: a name server forgets a broker that
    was stopped, and then nobody else tells that there is more to consume.
    """

    def __init__(self, seen: dict[str, frozenset[MessageQueue]]) -> None:
        self.brokers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._registered: set[str] = set()
        self._seen = seen
        self._known: set[MessageQueue] = set()

    async def find_brokers(self, cluster: Cluster, group: str, expected: Collection[str]) -> GroupMembers:
        """Find out which brokers answer, and return who is online in the group there.

        Raises:
            RocketError: none does.
        """
        info = await cluster_info(cluster)
        self._registered = set(info.brokers)
        failures: dict[str, RocketError] = {}
        for name in sorted({*info.brokers, *expected}):
            address = info.brokers[name].addresses.get(MASTER_ID) if name in info.brokers else None
            if address is None:
                what = "knows no master of it now" if name in info.brokers else "does not know it"
                failures[name] = ConnectError(f"broker {name}", f"the name server {what}")
            else:
                self.brokers[name] = address
        found = await fetch_group_members(cluster, group, self.brokers, failures)
        self.mark_missing(failures)
        return found

    def mark_missing(self, failures: Mapping[str, RocketError]) -> None:
        """Go on without the brokers that did not answer a question, for these reasons.

        Raises:
            RocketError: no broker is left, or it is we who are closed.
        """
        for name, error in sorted(failures.items()):
            if isinstance(error, ClientClosed):
                raise error
            self.brokers.pop(name, None)
            self.missing[name] = str(error)
        if failures and not self.brokers:
            raise failures[min(failures)]

    async def queues(self, cluster: Cluster, topics: Collection[str]) -> dict[str, list[MessageQueue]]:
        """Return the queues of each topic that can be asked about; of one that does not exist none."""
        routed = await gather_limited(topics, lambda topic: _readable_queues(cluster, topic), limit=_ROUTES_AT_ONCE)
        for topic, queues in routed.items():
            gone = {queue for queue in self._seen.get(topic, frozenset()) if queue.broker_name not in self._registered}
            if queues or gone:
                self._seen[topic] = frozenset({*queues, *gone})
                self._known |= self._seen[topic]
            else:
                self._seen.pop(topic, None)  # brokers can name topics without end
        return {
            topic: [queue for queue in queues if queue.broker_name in self.brokers] for topic, queues in routed.items()
        }

    def missing_reasons(self, namespace: str | None, concerned: Collection[str] | None) -> dict[str, str]:
        """Return the brokers that are missing, with the reason and how many queues they are known to have.

        Those that are not `concerned` do not matter, if that is given.
        """
        reasons = {name: self.missing[name] for name in sorted(self.missing) if concerned is None or name in concerned}
        without = (queue for queue in self._known if queue.broker_name not in self.brokers)
        counts = Counter((queue.broker_name, unwrap(namespace, queue.topic)) for queue in without)
        for name in sorted({broker for broker, _ in counts}):
            had = ", ".join(f"{count} of {topic}" for (owner, topic), count in sorted(counts.items()) if owner == name)
            reasons[name] = f"{reasons.get(name, 'the name server does not know it any more')}; queues not shown: {had}"
        return reasons


async def group_lag(
    cluster: Cluster,
    group: str,
    topic: str | None,
    expected: Collection[str],
    seen: dict[str, frozenset[MessageQueue]],
    stored: Mapping[MessageQueue, StoredOffset],
) -> GroupLag:
    """Return where a group is, in all its topics or in one.

    `expected` brokers must be there; `seen` is for the next call. `stored` are the rows that a database has of the
    group, which proves that there is one; see `with_stored_offsets`.
    """
    namespace = cluster.config.namespace
    wire_group = wrap(namespace, group)
    if topic is not None:
        await cluster.route(wrap(namespace, topic), refresh=True)
    survey = _Survey(seen)
    found = await survey.find_brokers(cluster, wire_group, expected)
    concerned: set[str] | None = None
    if topic is not None:
        concerned = {queue.broker_name for queue in await _readable_queues(cluster, wrap(namespace, topic))} | {
            *expected
        }
    if not found.members and not stored:
        await check_group_exists(cluster, group, survey.brokers)
    unreached: dict[str, str] = {}
    wire_topic, model, not_known = topic and wrap(namespace, topic), found.model, ""
    if model is MessageModel.BROADCASTING:
        rows = await _rows_of_members(cluster, wire_group, wire_topic, found, unreached, survey)
    else:
        rows = await _rows_of_brokers(cluster, wire_group, wire_topic, survey, found.topics, stored)
        retry = retry_topic(wire_group)
        if not found.members and not stored and all(row.committed is None for row in rows if row.queue.topic != retry):
            # Who has committed nothing is no clustering group, or has never consumed.
            recorded, unrecorded = await _rows_of_records(cluster, wire_group, wire_topic, survey)
            not_known = f"nobody of {group} is online, and it has committed nothing"
            if recorded:
                rows, model = recorded, MessageModel.BROADCASTING
                names = ", ".join(sorted(str(_public_queue(namespace, queue)) for queue in unrecorded))
                not_known = names and f"nobody of {group} is online, and no reset tells of {names}"
    public_rows = tuple(
        QueueLag(
            _public_queue(namespace, row.queue),
            row.committed,
            row.min,
            row.max,
            row.member,
            row.consumed_at,
        )
        for row in sorted(rows, key=lambda row: (row.member or "", row.queue))
        if row.queue.broker_name in survey.brokers
    )
    members = tuple(member.client_id for member in found.members)
    return GroupLag(
        group, model, members, public_rows, unreached, not_known, survey.missing_reasons(namespace, concerned)
    )


def with_stored_offsets(
    found: GroupLag, stored: Mapping[MessageQueue, StoredOffset], namespace: str | None
) -> GroupLag:
    """Return the same with what a database has for committed."""
    public_stored = {_public_queue(namespace, queue): row for queue, row in stored.items()}
    rows = []
    for each in found.rows:
        row = public_stored.get(each.queue)
        consumed_at = to_datetime(row.last.stored_at_ms) if row is not None and row.last is not None else None
        rows.append(replace(each, committed=None if row is None else row.next_offset, consumed_at=consumed_at))
    return replace(found, rows=tuple(rows), model=MessageModel.CLUSTERING, not_known="")


def _public_queue(namespace: str | None, queue: MessageQueue) -> MessageQueue:
    return MessageQueue(unwrap(namespace, queue.topic), queue.broker_name, queue.queue_id)


async def _rows_of_brokers(
    cluster: Cluster,
    group: str,
    topic: str | None,
    survey: _Survey,
    subscribed: Collection[str],
    stored: Collection[MessageQueue],
) -> list[QueueLag]:
    """Return the rows of what is committed, and of what is there to consume though nothing is committed for it.

    A broker tells only of topics in which the group has committed something there.
    """
    failures: dict[str, RocketError] = {}
    stats: dict[MessageQueue, QueueConsumeStats] = {}

    async def fetch(name: str) -> None:
        try:
            response = await cluster.call(survey.brokers[name], GetConsumeStatsHeader(group, topic))
            reported = (await read_body(decode_consume_stats, response.body)).queues
            stats.update((queue, each) for queue, each in reported.items() if queue.broker_name == name)
        except RocketError as error:
            failures[name] = error

    await gather_limited(sorted(survey.brokers), fetch)
    survey.mark_missing(failures)
    known = {queue.topic for queue in chain(stats, stored)}
    topics = {topic} if topic else known | {*subscribed, retry_topic(group)}
    there = await survey.queues(cluster, topics)
    offsets: dict[MessageQueue, int | None] = {
        queue: facts.consumer_offset for queue, facts in stats.items() if there.get(queue.topic)
    }
    # Brokers report 0 for what was never committed, too.
    unsure = [queue for queue in {*offsets, *chain.from_iterable(there.values())} if not offsets.get(queue)]
    offsets |= await fetch_committed_offsets(cluster, group, unsure, failures)
    survey.mark_missing(failures)
    asked = [queue for queue in offsets if queue.broker_name in survey.brokers]
    ends = await fetch_first_and_last(cluster, asked, failures)  # asked after what is committed, which moves on
    survey.mark_missing(failures)
    rows = [
        QueueLag(
            queue, offsets[queue], low, high, None, to_datetime(stats[queue].last_timestamp) if queue in stats else None
        )
        for queue, (low, high) in ends.items()
    ]
    return [row for row in rows if row.queue in stats or row.queue in stored or row.committed or row.lag]


async def _readable_queues(cluster: Cluster, topic: str) -> list[MessageQueue]:
    """Return the queues of a topic that can be read, as they are now; none of one that does not exist."""
    try:
        return (await cluster.route(topic, refresh=True)).consume_queues()
    except RouteNotFound:
        return []


_OFFLINE = "(offline)"
"""In the place of a member, for all that are."""


async def _rows_of_records(
    cluster: Cluster, group: str, topic: str | None, survey: _Survey
) -> tuple[list[QueueLag], list[MessageQueue]]:
    """Return where resets have led members that are offline, and the queues of those topics that were never reset."""
    namespace = cluster.config.namespace
    try:
        names = await list_topics(cluster, include_system=False) if topic is None else []
    except PermissionDenied:
        names = []
    failures: dict[str, RocketError] = {}
    targets: dict[MessageQueue, int] = {}
    without: list[MessageQueue] = []
    wanted = [topic] if topic is not None else [wrap(namespace, each) for each in names]
    for name, queues in (await survey.queues(cluster, wanted)).items():
        found: dict[MessageQueue, int] = {}
        for broker_name in sorted({queue.broker_name for queue in queues} - failures.keys()):
            record = ResetRecord(cluster, group, name, broker_name)
            try:
                if await record.head():
                    resets = await record.read(queue.queue_id for queue in queues if queue.broker_name == broker_name)
                    found |= {MessageQueue(name, broker_name, number): each.target for number, each in resets.items()}
            except RocketError as error:
                failures[broker_name] = error
        targets |= found
        without += [queue for queue in queues if found and queue not in found]
    survey.mark_missing(failures)
    ends = await fetch_first_and_last(
        cluster, [queue for queue in targets if queue.broker_name in survey.brokers], failures
    )
    survey.mark_missing(failures)
    rows = [QueueLag(queue, targets[queue], *its_ends, _OFFLINE) for queue, its_ends in ends.items()]
    return rows, [queue for queue in without if queue.broker_name in survey.brokers]


async def _rows_of_members(
    cluster: Cluster,
    group: str,
    topic: str | None,
    found: GroupMembers,
    unreached: dict[str, str],
    survey: _Survey,
) -> list[QueueLag]:
    tables: dict[str, dict[MessageQueue, int]] = {}

    async def fetch(member: RemoteMember) -> None:
        try:
            tables[member.client_id] = await fetch_member_offsets(cluster, group, member, topic or "")
        except RocketError as error:
            unreached[member.client_id] = str(error)

    await gather_limited(found.members, fetch, limit=8)
    ends = await _fetch_ranges(cluster, {queue for table in tables.values() for queue in table}, survey)
    return [
        QueueLag(queue, offset, *ends[queue], client_id)
        for client_id, table in tables.items()
        for queue, offset in table.items()
        if queue in ends and topic in (None, queue.topic)
    ]


async def _fetch_ranges(
    cluster: Cluster, queues: Iterable[MessageQueue], survey: _Survey
) -> dict[MessageQueue, tuple[int, int]]:
    """Return min and max of those queues that exist: members remember topics that were deleted since."""
    asked = list(queues)
    there = await survey.queues(cluster, {queue.topic for queue in asked})
    failures: dict[str, RocketError] = {}
    ends = await fetch_first_and_last(
        cluster, [queue for queue in asked if there[queue.topic] and queue.broker_name in survey.brokers], failures
    )
    survey.mark_missing(failures)
    return ends
