"""Compute the lag of a group, from shared offsets at the brokers or, in broadcasting, from those of each member."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, groupby

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.topics import NO_MASTER, BrokerMissing, list_topics, to_datetime
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import GroupMembers, RemoteMember, fetch_group_members, fetch_member_offsets
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.cluster.names import unwrap, wrap
from pyrocket_consumer.cluster.offset_lookup import fetch_committed_offsets, fetch_first_and_last, fetch_queues
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.errors import ClientClosed, PermissionDenied, RocketError
from pyrocket_consumer.model import MASTER_ID, MessageModel, MessageQueue, retry_topic
from pyrocket_consumer.offsets.database.claim import StoredOffset
from pyrocket_consumer.protocol.bodies import QueueConsumeStats, decode_consume_stats
from pyrocket_consumer.protocol.command import GetConsumeStatsHeader
from pyrocket_consumer.text import join_truncated

_OFFLINE = "(offline)"
"""The value of `QueueLag.member` for all offline members together."""


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The position of a group, or of one member of a broadcasting group, in a queue with offsets `min` to `max`.

    `committed` is the next offset to consume, or None without a commit. `consumed_at` is the store time of the message
    before it, or None if the broker does not report it.
    """

    queue: MessageQueue
    committed: int | None
    min: int
    max: int
    member: str | None = None
    consumed_at: datetime | None = None

    @property
    def is_above_end(self) -> bool:
        """Whether the committed offset is beyond the end of the queue, so that the lag is unknown."""
        return self.committed is not None and self.committed > self.max

    @property
    def lag(self) -> int:
        """The number of offsets left to consume, of those that the queue still has."""
        return max(0, self.max - max(self.committed or 0, self.min))


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The position of a group. `unreached` are members whose lag is unknown, with the reason.

    If no member is online, the rows have the offsets at the brokers, and `model` is None. Members of a broadcasting
    group keep their own offsets. If they are offline, the rows have only the target of the last reset. `not_known`
    describes queues without any information, or is empty.

    `missing` are the brokers whose queues have no rows, with the reason. Such a broker failed to respond, refused a
    request, has no master now, or is unknown to the name servers although it should exist.
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
        """Whether the lag of each member in every queue is known."""
        incomplete = self.unreached or self.not_known or self.missing
        return not incomplete and not any(row.is_above_end for row in self.rows)

    @property
    def is_known(self) -> bool:
        """Whether any position of the group is known."""
        return not self.not_known or any(row.committed is not None for row in self.rows)

    @property
    def total(self) -> int:
        """The lag of all queues; for a broadcasting group, that of the member furthest behind."""
        sums: dict[str | None, int] = {}
        for row in self.rows:
            sums[row.member] = sums.get(row.member, 0) + row.lag
        return max(sums.values(), default=0)


class _Survey:
    """The lag of one group, in all its topics or in one, from the brokers that respond (`brokers`: address by name).

    A broker that fails to respond once is `missing` from then on, with its earlier responses.

    `seen` keeps the queues of topics from one call to the next. A name server forgets a stopped broker, and then no
    other source shows that its queues have more to consume. `unreached` are members that do not respond.
    """

    def __init__(
        self, cluster: Cluster, group: str, topic: str | None, seen: dict[str, frozenset[MessageQueue]]
    ) -> None:
        self.brokers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.unreached: dict[str, str] = {}
        self._cluster = cluster
        self._namespace = cluster.config.namespace
        self._group = wrap(self._namespace, group)
        self._topic = topic and wrap(self._namespace, topic)
        self._registered: set[str] = set()
        self._seen = seen
        self._known: set[MessageQueue] = set()

    async def find_brokers(self, expected: Collection[str]) -> GroupMembers:
        """Find the brokers that respond, and return the online members of the group there.

        Raises:
            RocketError: no broker responds.
        """
        info = await self._cluster.name_servers.cluster_info()
        self._registered = set(info.brokers)
        known = join_truncated(sorted(info.brokers))
        failures: dict[str, RocketError] = {}
        for name in sorted({*info.brokers, *expected}):
            address = info.brokers[name].addresses.get(MASTER_ID) if name in info.brokers else None
            if address is None:
                unknown = f"no broker of that name is known; check the name, and that it runs (known: {known})"
                failures[name] = BrokerMissing(f"broker {name}", NO_MASTER if name in info.brokers else unknown)
            else:
                self.brokers[name] = address
        found = await fetch_group_members(self._cluster, self._group, self.brokers, failures)
        self._mark_missing(failures)
        return found

    def _mark_missing(self, failures: Mapping[str, RocketError]) -> None:
        """Continue without the brokers that failed, for these reasons.

        Raises:
            RocketError: no broker is left, or this client is closed.
        """
        for name, error in sorted(failures.items()):
            if isinstance(error, ClientClosed):
                raise error
            self.brokers.pop(name, None)
            self.missing[name] = error.reason if isinstance(error, BrokerMissing) else str(error)
        if failures and not self.brokers:
            raise failures[min(failures)]

    async def _queues(self, topics: Collection[str]) -> dict[str, list[MessageQueue]]:
        """Return the queues of each topic on responding brokers. A topic that does not exist has none."""
        routed = await fetch_queues(self._cluster, topics)
        for topic, queues in routed.items():
            gone = {queue for queue in self._seen.get(topic, frozenset()) if queue.broker_name not in self._registered}
            if queues or gone:
                self._seen[topic] = frozenset({*queues, *gone})
                self._known |= self._seen[topic]
            else:
                self._seen.pop(topic, None)  # the number of topic names from brokers is unlimited
        return {
            topic: [queue for queue in queues if queue.broker_name in self.brokers] for topic, queues in routed.items()
        }

    async def _ranges(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]:
        """Return the first and last offsets of the queues on responding brokers."""
        failures: dict[str, RocketError] = {}
        wanted = [queue for queue in queues if queue.broker_name in self.brokers]
        found = await fetch_first_and_last(self._cluster, wanted, failures)
        self._mark_missing(failures)
        return found

    def missing_reasons(self, concerned: Collection[str] | None) -> dict[str, str]:
        """Return the missing brokers, with the reason and the number of their known queues.

        If `concerned` is not None, the others are ignored.
        """
        reasons = {name: self.missing[name] for name in sorted(self.missing) if concerned is None or name in concerned}
        counts = Counter(
            (queue.broker_name, unwrap(self._namespace, queue.topic))
            for queue in self._known
            if queue.broker_name not in self.brokers
        )
        for name, group in groupby(sorted(counts.items()), key=lambda item: item[0][0]):
            had = ", ".join(f"{count} of {topic}" for (_, topic), count in group)
            reasons[name] = f"{reasons.get(name, 'the name server no longer knows it')}; queues not shown: {had}"
        return reasons

    # --- rows

    async def rows_of_brokers(self, subscribed: Collection[str], stored: Collection[MessageQueue]) -> list[QueueLag]:
        """Return the rows of queues with a committed offset, and of queues with messages but without a commit.

        A broker reports only topics in which the group has committed an offset there.
        """
        failures: dict[str, RocketError] = {}
        stats: dict[MessageQueue, QueueConsumeStats] = {}

        async def fetch(name: str) -> None:
            try:
                header = GetConsumeStatsHeader(self._group, self._topic)
                reported = (await self._cluster.read(self.brokers[name], header, decode_consume_stats)).queues
                stats.update((queue, each) for queue, each in reported.items() if queue.broker_name == name)
            except RocketError as error:
                failures[name] = error

        await gather_limited(sorted(self.brokers), fetch)
        self._mark_missing(failures)
        known = {queue.topic for queue in chain(stats, stored)}
        topics = {self._topic} if self._topic else known | {*subscribed, retry_topic(self._group)}
        there = await self._queues(topics)
        offsets: dict[MessageQueue, int | None] = {
            queue: facts.consumer_offset for queue, facts in stats.items() if there.get(queue.topic)
        }
        # Brokers also report 0 for a queue without a commit.
        unsure = [queue for queue in {*offsets, *chain.from_iterable(there.values())} if not offsets.get(queue)]
        offsets |= await fetch_committed_offsets(self._cluster, self._group, unsure, failures)
        self._mark_missing(failures)
        ends = await self._ranges(offsets)  # after the committed offsets, which move on
        times = {queue: to_datetime(each.last_timestamp) for queue, each in stats.items()}
        rows = [QueueLag(queue, offsets[queue], *its_ends, None, times.get(queue)) for queue, its_ends in ends.items()]
        return [row for row in rows if row.queue in stats or row.queue in stored or row.committed or row.lag]

    async def rows_of_records(self) -> tuple[list[QueueLag], list[MessageQueue]]:
        """Return rows with the recorded reset targets of offline members, and the queues without a reset."""
        try:
            names = await list_topics(self._cluster, include_system=False) if self._topic is None else []
        except PermissionDenied:
            names = []
        failures: dict[str, RocketError] = {}
        targets: dict[MessageQueue, int] = {}
        without: list[MessageQueue] = []
        wanted = [self._topic] if self._topic is not None else [wrap(self._namespace, each) for each in names]
        for name, queues in (await self._queues(wanted)).items():
            found: dict[MessageQueue, int] = {}
            for broker_name, here in sorted(by_broker(queues).items()):
                if broker_name in failures:
                    continue
                record = ResetRecord(self._cluster, self._group, name, broker_name)
                try:
                    if await record.head():
                        resets = await record.read(queue.queue_id for queue in here)
                        found |= {queue: resets[queue.queue_id].target for queue in here if queue.queue_id in resets}
                except RocketError as error:
                    failures[broker_name] = error
            targets |= found
            without += [queue for queue in queues if found and queue not in found]
        self._mark_missing(failures)
        ends = await self._ranges(targets)
        rows = [QueueLag(queue, targets[queue], *its_ends, _OFFLINE) for queue, its_ends in ends.items()]
        return rows, [queue for queue in without if queue.broker_name in self.brokers]

    async def rows_of_members(self, members: Collection[RemoteMember]) -> list[QueueLag]:
        """Return the rows of each member that responds."""
        tables: dict[str, dict[MessageQueue, int]] = {}
        group, topic = self._group, self._topic or ""

        async def fetch(member: RemoteMember) -> None:
            try:
                tables[member.client_id] = await fetch_member_offsets(self._cluster, group, member, topic)
            except RocketError as error:
                self.unreached[member.client_id] = str(error)

        await gather_limited(members, fetch, limit=8)
        queues = {queue for table in tables.values() for queue in table}
        there = await self._queues({queue.topic for queue in queues})
        ends = await self._ranges(queue for queue in queues if there[queue.topic])  # not of deleted topics
        return [
            QueueLag(queue, offset, *ends[queue], client_id)
            for client_id, table in tables.items()
            for queue, offset in table.items()
            if queue in ends and topic in ("", queue.topic)
        ]


async def group_lag(
    cluster: Cluster,
    group: str,
    topic: str | None,
    expected: Collection[str],
    seen: dict[str, frozenset[MessageQueue]],
    stored: Mapping[MessageQueue, StoredOffset] | None = None,
) -> GroupLag:
    """Return the position of a group, in all its topics or in one.

    `expected` brokers must exist; `seen` is for the next call. For a group with offsets in a database, `stored` are its
    rows, which also prove that the group exists.
    """
    namespace = cluster.config.namespace
    if topic is not None:
        await cluster.routes.get(wrap(namespace, topic), refresh=True)
    survey = _Survey(cluster, group, topic, seen)
    found = await survey.find_brokers(expected)
    concerned: set[str] | None = None
    if topic is not None:
        (queues,) = (await fetch_queues(cluster, [wrap(namespace, topic)])).values()
        concerned = {queue.broker_name for queue in queues} | {*expected}
    if not found.members and not stored:
        await check_group_exists(cluster, group, survey.brokers)
    model, not_known = found.model, ""
    if model is MessageModel.BROADCASTING:
        rows = await survey.rows_of_members(found.members)
    else:
        rows = await survey.rows_of_brokers(found.topics, stored or ())
        retry = retry_topic(wrap(namespace, group))
        if not found.members and not stored and all(row.committed is None for row in rows if row.queue.topic != retry):
            # A group without a commit is not a clustering group, or has never consumed.
            recorded, unrecorded = await survey.rows_of_records()
            not_known = f"no member of {group} is online, and it has committed nothing"
            if recorded:
                rows, model = recorded, MessageModel.BROADCASTING
                names = ", ".join(sorted(str(_public_queue(namespace, queue)) for queue in unrecorded))
                not_known = names and f"no member of {group} is online, and no reset of {names} is recorded"
    if stored is not None:
        rows, model, not_known = [_in_store(row, stored.get(row.queue)) for row in rows], MessageModel.CLUSTERING, ""
    public_rows = tuple(
        replace(row, queue=_public_queue(namespace, row.queue))
        for row in sorted(rows, key=lambda row: (row.member or "", row.queue))
        if row.queue.broker_name in survey.brokers
    )
    members = tuple(member.client_id for member in found.members)
    missing = survey.missing_reasons(concerned)
    return GroupLag(group, model, members, public_rows, survey.unreached, not_known, missing)


def _in_store(row: QueueLag, stored: StoredOffset | None) -> QueueLag:
    """Return `row` with the committed offset from a database."""
    if stored is None:
        return replace(row, committed=None, consumed_at=None)
    consumed_at = to_datetime(stored.last.stored_at_ms) if stored.last is not None else None
    return replace(row, committed=stored.next_offset, consumed_at=consumed_at)


def _public_queue(namespace: str | None, queue: MessageQueue) -> MessageQueue:
    return MessageQueue(unwrap(namespace, queue.topic), queue.broker_name, queue.queue_id)
