"""Make the plan of a reset. It only reads: queues, targets, members, and the problems."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from uuid import uuid4

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.resets.plan import (
    NEEDS_BROKERS,
    BrokerPlan,
    MemberPlan,
    QueueMove,
    QueueTarget,
    ResetPlan,
    ResetWay,
    RetryStart,
    queue_name,
    way_for,
)
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import (
    MAX_CONCURRENT_RELAYS,
    GroupMembers,
    RelayResult,
    RelayStatus,
    RemoteMember,
    fetch_group_members,
    fetch_member_offsets,
    relay_to_all,
)
from pyrocket_consumer.cluster.client import read_body
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.cluster.names import unwrap, wrap
from pyrocket_consumer.cluster.offset_lookup import (
    TOOLS_GROUP,
    fetch_committed_offsets,
    fetch_first_and_last,
    fetch_offsets_at,
    nearest_available,
)
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.config import OffsetSpec
from pyrocket_consumer.errors import (
    ConfigError,
    ConnectError,
    PermissionDenied,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import (
    MASTER_ID,
    RETRY_PREFIX,
    MessageModel,
    MessageQueue,
    TopicRoute,
    retry_topic,
)
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.bodies import decode_java_properties
from pyrocket_consumer.protocol.codes import version_ordinal
from pyrocket_consumer.protocol.command import GetBrokerConfigHeader
from pyrocket_consumer.protocol.reset_format import MAX_RECORDED_QUEUE_ID, encode_status_request
from pyrocket_consumer.text import join_truncated

_SERVER_SIDE_SETTING = "useServerSideResetOffset"
_SERVER_SIDE_SINCE = version_ordinal(5, 2, 0)
_RESETTABLE_JAVA_VERSIONS = (
    range(version_ordinal(4, 9, 8), version_ordinal(5, 0, 0) - 1),
    range(version_ordinal(5, 2, 0), 1 << 30),
)
_EXACT_ZERO_SINCE = version_ordinal(5, 0, 0)
"""Older brokers also report 0 for a queue without a commit."""

_MANUAL_RESET = "stop it, edit its offsets.json, start it again"


async def plan_reset(
    cluster: Cluster,
    group: str,
    topic: str,
    where: OffsetSpec | Mapping[MessageQueue, int],
    wanted: Sequence[MessageQueue] | None,
    model: str | None,
    member: str | None,
    wait_s: float,
    store: DatabaseOffsets | None = None,
) -> ResetPlan:
    """Return the plan of a reset, with its effect on each queue."""
    planner = _Planner(cluster, group, topic, wait_s)
    await planner.find_queues(where, wanted)
    if store is not None:
        await planner.read_store(store)
    await planner.find_brokers()
    found, replies = await planner.find_members()
    decided = await planner.decide_model(MessageModel(model) if model is not None else None, found, replies)
    if member is not None:
        found = _only_member(found, member, decided)
    targets = await planner.fetch_targets(where)
    unsubscribed = planner.unsubscribed_text(found)
    way: _PlannedForGroup
    if store is not None:
        way = _PlannedInStore(planner, bool(unsubscribed))
    elif decided is MessageModel.BROADCASTING:
        way = _PlannedForMembers(planner, member)
    else:
        way = _PlannedForGroup(planner)
    members = tuple(
        MemberPlan(each, replies[each.client_id], *way.describe(each, replies[each.client_id]))
        for each in found.members
    )
    chosen_way = way.choose(members)
    moves = await way.moves(members, targets)
    retries = await planner.plan_retry_starts()

    def public_queue(queue: MessageQueue, to: str = topic) -> MessageQueue:
        return MessageQueue(to, queue.broker_name, queue.queue_id)

    return ResetPlan(
        group,
        topic,
        decided,
        chosen_way,
        tuple(replace(each, queue=public_queue(each.queue)) for each in targets),
        tuple(replace(each, queue=public_queue(each.queue)) for each in moves),
        tuple(planner.brokers),
        members,
        planner.all_queues,
        cluster.config.namespace,
        member,
        unsubscribed,
        store,
        tuple(replace(each, queue=public_queue(each.queue, retry_topic(group))) for each in retries),
    )


class _Planner:
    """Finds the facts of a plan, by requests that change nothing. `group` and `topic` are the names that the user gave.

    Queues have the topic names of brokers.
    """

    def __init__(self, cluster: Cluster, group: str, topic: str, wait_s: float) -> None:
        self.cluster, self.group, self.topic, self.wait_s = cluster, group, topic, wait_s
        namespace = cluster.config.namespace
        self.wire_group, self.wire_topic = wrap(namespace, group), wrap(namespace, topic)
        self.stored: dict[MessageQueue, int] | None = None
        """The offsets in the database of the group, None without one."""
        self.routes: list[TopicRoute] = []
        """The route of the topic, and that of the retry topic if it has queues without a row in the database."""
        self.chosen: list[MessageQueue] = []
        self.brokers: list[BrokerPlan] = []

    @property
    def _public_topic(self) -> str:
        return unwrap(self.cluster.config.namespace, self.topic)

    @property
    def usable(self) -> dict[str, str]:
        """The brokers without a problem, and their addresses."""
        return {broker.name: broker.address for broker in self.brokers if not broker.problem}

    @cached_property
    def all_queues(self) -> bool:
        """Whether all queues with new messages are chosen."""
        chosen = set(self.chosen)
        return all(
            MessageQueue(self.wire_topic, data.broker_name, number) in chosen
            for data in self.routes[0].queues
            for number in range(data.write_queues)
        )

    # --- queues

    async def find_queues(
        self, to: OffsetSpec | Mapping[MessageQueue, int], wanted: Sequence[MessageQueue] | None
    ) -> None:
        """Find the queues to move: all, or `wanted`.

        Raises:
            ConfigError: a queue does not exist, or none is chosen.
        """
        self.routes = [await self.cluster.routes.get(self.wire_topic, refresh=True)]
        topic, there = self._public_topic, self.routes[0].consume_queues()
        if isinstance(to, Mapping):
            wanted = list(to) if wanted is None else [queue for queue in wanted if queue in to]
        chosen = there
        if wanted is not None:
            chosen = []
            for queue in wanted:
                if queue.topic not in (topic, self.wire_topic):
                    raise ConfigError(f"{queue} is not a queue of topic {topic}; name queues of this topic only")
                chosen.append(MessageQueue(self.wire_topic, queue.broker_name, queue.queue_id))
            strangers = sorted(set(chosen) - set(there))
            if strangers:
                names = ", ".join(map(queue_name, there)) or "none"
                raise ConfigError(f"topic {topic} has no queue {queue_name(strangers[0])}; its queues: {names}")
        if not chosen:
            raise ConfigError(f"no queue of topic {topic} is selected; {len(there)} of its queues are readable")
        if max(queue.queue_id for queue in chosen) > MAX_RECORDED_QUEUE_ID:
            raise ConfigError(
                f"topic {topic} has queue ids above {MAX_RECORDED_QUEUE_ID}, which cannot be reset; name other queues"
            )
        self.chosen = sorted(set(chosen))

    async def fetch_targets(self, to: OffsetSpec | Mapping[MessageQueue, int]) -> list[QueueTarget]:
        """Return the target of each queue whose broker has no problem."""
        usable = self.usable
        queues = [queue for queue in self.chosen if queue.broker_name in usable]
        ends = await fetch_first_and_last(self.cluster, queues)
        if isinstance(to, Mapping):
            exact = {(queue.broker_name, queue.queue_id): offset for queue, offset in to.items()}
            wanted = {queue: exact[queue.broker_name, queue.queue_id] for queue in queues}
        else:
            wanted = await fetch_offsets_at(self.cluster, to, queues, groups=(TOOLS_GROUP, self.wire_group))
        return [
            QueueTarget(queue, wanted[queue], nearest_available(wanted[queue], low, high), low, high)
            for queue, (low, high) in ends.items()
        ]

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset that the group has committed."""
        return await self.cluster.broker(queue.broker_name).query_offset(self.wire_group, queue)

    async def read_store(self, store: DatabaseOffsets) -> None:
        """Read the offsets in the database, and find the retry topic if it has queues without a row there."""
        rows = await asyncio.to_thread(store.offsets, self.wire_group)
        self.stored = stored = {row.queue: row.next_offset for row in rows}
        if self.wire_topic != retry_topic(self.wire_group):
            with suppress(RouteNotFound):
                route = await self.cluster.routes.get(retry_topic(self.wire_group), refresh=True)
                if any(queue not in stored for queue in route.consume_queues()):
                    self.routes.append(route)

    async def plan_retry_starts(self) -> list[RetryStart]:
        """Return the start of each queue of the retry topic that has no row in the database.

        Without a row such a queue would start with its first message. With the offset of the brokers, no message is
        consumed again, and none is lost.
        """
        usable, stored = self.usable, self.stored or {}
        queues = sorted(
            queue
            for route in self.routes[1:]
            for queue in route.consume_queues()
            if queue not in stored and queue.broker_name in usable
        )
        committed = await fetch_committed_offsets(self.cluster, self.wire_group, queues)
        ends = await fetch_first_and_last(self.cluster, queues)

        def start(queue: MessageQueue) -> RetryStart:
            offset, (low, high) = committed[queue], ends[queue]
            return RetryStart(queue, offset, low if offset is None else nearest_available(offset, low, high))

        return [start(queue) for queue in queues]

    # --- brokers

    async def find_brokers(self) -> None:
        """Find the masters, and whether they keep resets."""
        brokers = [broker for route in self.routes for broker in route.brokers]
        addresses = {broker.broker_name: broker.addresses.get(MASTER_ID) for broker in brokers}
        names = {data.broker_name for route in self.routes for data in route.queues}
        found = await gather_limited(sorted(names), lambda name: self._fetch_broker(name, addresses.get(name)))
        self.brokers = list(found.values())

    async def _fetch_broker(self, name: str, address: str | None) -> BrokerPlan:
        if address is None:
            return BrokerPlan(name, problem="it has no known master now")
        try:
            response = await self.cluster.call(address, GetBrokerConfigHeader())
        except PermissionDenied:
            return BrokerPlan(name, address, None, self.cluster.membership.versions.get(address) or 0)
        except RocketError as error:
            return BrokerPlan(name, address, problem=str(error))
        setting = (await read_body(decode_java_properties, response.body)).get(_SERVER_SIDE_SETTING)
        if setting is None:  # brokers before 5.1 do not have it
            server_side = response.version >= _SERVER_SIDE_SINCE
        else:
            server_side = setting.lower() == "true"
        return BrokerPlan(name, address, server_side, response.version)

    # --- members and model

    async def find_members(self) -> tuple[GroupMembers, dict[str, RelayResult]]:
        """Return the members that are online, and the status that each reports."""
        found = await fetch_group_members(self.cluster, self.wire_group, self.usable)
        if not found.members:
            return found, {}
        question = encode_status_request(self.wire_topic)
        return found, await relay_to_all(
            self.cluster, self.wire_group, found.members, "status", str(uuid4()), question, self.wait_s
        )

    async def decide_model(
        self, model: MessageModel | None, found: GroupMembers, replies: Mapping[str, RelayResult]
    ) -> MessageModel:
        """Return the model: `model` if the members report no other, or the one that members or brokers show.

        Raises:
            ConfigError: the group is not `model`, no broker knows the group, or nothing shows its model.
        """
        if found.members:
            online = found.model or _reported_model(replies)
            if online is not None and model not in (None, online):
                raise ConfigError(
                    f"group {self.group!r} is {online}, not {model}, as its online members report "
                    f"({len(found.members)}); omit the model"
                )
            model = model or online
        elif self.stored is None:
            await check_group_exists(self.cluster, self.group)
            if model is MessageModel.CLUSTERING:
                await self._check_not_recorded()
        if self.stored is not None:
            if model is MessageModel.BROADCASTING:
                raise ConfigError(
                    f"group {self.group!r} is broadcasting, and a database has no offsets of such a group; omit store"
                )
            return MessageModel.CLUSTERING
        return model or await self._infer_model()

    async def _check_not_recorded(self) -> None:
        """Raise ConfigError if a reset is recorded for offline members, which would follow it instead of a commit."""
        for broker_name in self.usable:
            try:
                recorded = await ResetRecord(self.cluster, self.wire_group, self.wire_topic, broker_name).head()
            except PermissionDenied:
                continue
            if recorded:
                raise ConfigError(
                    f"group {self.group!r} is broadcasting: a reset of {self._public_topic} is recorded at "
                    f"{broker_name} for its members; pass model='broadcasting' (in the shell --model broadcasting). If "
                    "it is a clustering group now, first remove the record with forget_reset (pyrocket offsets "
                    "forget-reset)"
                )

    async def _infer_model(self) -> MessageModel:
        """Infer the model of a group without online members from what brokers have.

        Only a clustering group commits offsets, and only a broadcasting group has recorded resets.

        Raises:
            ConfigError: brokers have neither.
        """
        chosen = by_broker(self.chosen)
        for name, version in ((broker.name, broker.version) for broker in self.brokers if not broker.problem):
            try:
                if await ResetRecord(self.cluster, self.wire_group, self.wire_topic, name).head():
                    return MessageModel.BROADCASTING
                found = await gather_limited(chosen.get(name, ()), self.committed)
                if any(offset or (offset == 0 and version >= _EXACT_ZERO_SINCE) for offset in found.values()):
                    return MessageModel.CLUSTERING
            except ConnectError:
                continue
        raise ConfigError(
            f"no member of group {self.group!r} is online, and brokers have no offset of it for {self.wire_topic}; "
            "pass model='clustering' or model='broadcasting' (in the shell --model)"
        )

    def unsubscribed_text(self, found: GroupMembers) -> str:
        """Return a text if no online member subscribes to the topic, or "" if one does or it is unknown."""
        if not found.topics or self.wire_topic in found.topics:
            return ""
        namespace = self.cluster.config.namespace
        topics = sorted(unwrap(namespace, name) for name in found.topics if not name.startswith(RETRY_PREFIX))
        return (
            f"no online member of {self.group} subscribes to {self._public_topic} "
            f"(they subscribe to {join_truncated(topics) if topics else 'nothing'})"
        )


def _only_member(found: GroupMembers, client_id: str, model: MessageModel) -> GroupMembers:
    """Return the one member to reset.

    Raises:
        ConfigError: the member is not online, or has no offsets of its own.
    """
    if model is MessageModel.CLUSTERING:
        raise ConfigError(
            f"member={client_id!r} cannot be reset alone, because members of a clustering group share its offsets; "
            "omit it"
        )
    one = tuple(member for member in found.members if member.client_id == client_id)
    if not one:
        online = ", ".join(member.client_id for member in found.members) or "none"
        raise ConfigError(f"no member {client_id!r} of the group is online; online: {online}")
    return replace(found, members=one)


def _reported_model(replies: Mapping[str, RelayResult]) -> MessageModel | None:
    models = {reply.report.message_model for reply in replies.values() if reply.report.message_model}
    return (
        MessageModel(models.pop()) if len(models) == 1 and models <= {model.value for model in MessageModel} else None
    )


# --- the ways of resetting


_NO_PERMISSION = "this account may not send requests to members (RocketMQ requires Get on the group)"


class _PlannedForGroup:
    """The effect of a reset on online members and on queues, for a group with offsets at the brokers."""

    forbidden = _NO_PERMISSION
    silent = "it will be notified again, and may move its queues"

    def __init__(self, planner: _Planner) -> None:
        self._planner = planner

    def describe(self, member: RemoteMember, reply: RelayResult) -> tuple[bool, str]:
        """Return whether the reset can reach a member, and how, or the reason why not."""
        is_reachable, how = False, f"refuses: {reply.reason}"
        if reply.kind is RelayStatus.FOREIGN:
            is_reachable, how = self.describe_foreign(member)
        elif reply.kind is RelayStatus.FORBIDDEN:
            how = self.forbidden
        elif reply.kind is not RelayStatus.OURS:
            why = reply.reason or reply.kind
            how = f"{why}; if it is a member of this package, {self.silent} when it responds again"
        elif reply.state != "refused":
            is_reachable, how = True, "will be notified and verified"
        if member.connections > 1:
            how += f"; {member.connections} processes share this client id, and only one of them can receive requests"
        return is_reachable, how

    def describe_foreign(self, member: RemoteMember) -> tuple[bool, str]:
        """Return the same for a client that accepts no requests of this package."""
        return True, "will be reset by its broker, and verified if it can be observed"

    def choose(self, members: Sequence[MemberPlan]) -> ResetWay:
        """Return the way.

        Raises:
            ConfigError: a broker cannot reset only the chosen queues.
        """
        way, brokers = way_for(each.reply for each in members), self._planner.brokers
        cannot = [broker.name for broker in brokers if broker.server_side is not True and not broker.problem]
        if way is ResetWay.BROKERS and cannot and not self._planner.all_queues:
            foreign = next(each.client_id for each in members if each.reply.kind in NEEDS_BROKERS)
            raise ConfigError(
                f"{', '.join(cannot)} can reset only all queues of a topic at once, and member {foreign} does not "
                "accept single ones; name all queues"
            )
        return way

    async def moves(self, members: Sequence[MemberPlan], targets: Sequence[QueueTarget]) -> list[QueueMove]:
        """Return the effect on each queue; for members with offsets of their own, at each of them."""
        found = await gather_limited([each.queue for each in targets], self._planner.committed)
        return [QueueMove(each.queue, None, found[each.queue], each.target) for each in targets]


class _PlannedForMembers(_PlannedForGroup):
    """A broadcasting group, whose members keep their own offsets; all of them, or the one with `client_id`."""

    forbidden = f"{_NO_PERMISSION}; it will follow the record within a minute, unconfirmed"
    silent = "it will follow the record"

    def __init__(self, planner: _Planner, client_id: str | None) -> None:
        super().__init__(planner)
        self._client_id = client_id

    def describe_foreign(self, member: RemoteMember) -> tuple[bool, str]:
        obeys = member.language == "GO" or (
            member.language == "JAVA" and any(member.version in each for each in _RESETTABLE_JAVA_VERSIONS)
        )
        if self._client_id is not None:
            problem = f"cannot be reset alone by any call; {_MANUAL_RESET}"
        elif any(broker.server_side is not False for broker in self._planner.brokers):
            problem = (
                "cannot be reset in broadcasting while the broker keeps resets "
                f"({_SERVER_SIDE_SETTING}=true, which an operator can change); {_MANUAL_RESET}"
            )
        elif not obeys:
            problem = f"cannot be reset in broadcasting by any call; {_MANUAL_RESET}"
        elif not self._planner.all_queues:
            problem = f"can only be reset with all queues at once; name them all, or {_MANUAL_RESET}"
        else:
            text = "will be notified by the broker, with offsets committed for a moment; observed after 12 to 25 s"
            return True, text
        return False, f"{member.client} {problem}"

    def choose(self, members: Sequence[MemberPlan]) -> ResetWay:
        return ResetWay.MEMBERS if self._client_id is None else ResetWay.MEMBER

    async def moves(self, members: Sequence[MemberPlan], targets: Sequence[QueueTarget]) -> list[QueueMove]:
        planner = self._planner
        if not members:
            return [QueueMove(target.queue, None, None, target.target) for target in targets]

        async def offsets(number: int) -> Mapping[MessageQueue, int]:
            member = members[number]
            if member.reply.kind is RelayStatus.FOREIGN:
                with suppress(RocketError):
                    return await fetch_member_offsets(
                        planner.cluster, planner.wire_group, member.member, planner.wire_topic, planner.wait_s
                    )
            return member.reply.report.offsets if member.reply.kind is RelayStatus.OURS else {}

        tables = await gather_limited(range(len(members)), offsets, limit=MAX_CONCURRENT_RELAYS)
        return [
            QueueMove(target.queue, member.client_id, table.get(target.queue), target.target)
            for member, table in zip(members, tables.values(), strict=True)
            for target in targets
        ]


class _PlannedInStore(_PlannedForGroup):
    """A group whose offsets are in a database."""

    def __init__(self, planner: _Planner, is_unsubscribed: bool) -> None:
        super().__init__(planner)
        self._stored = planner.stored or {}
        self._has_row = is_unsubscribed or any(queue.topic == planner.wire_topic for queue in self._stored)

    def describe(self, member: RemoteMember, reply: RelayResult) -> tuple[bool, str]:
        if reply.kind is RelayStatus.FOREIGN or (reply.kind is RelayStatus.OURS and not reply.report.in_database):
            return False, "uses the offsets of the broker, not those of the database"
        if not self._has_row:
            return False, "consumes the topic, but the database has no row of it; check its database and table"
        return True, "will detect the reset within seconds, and claim its queues again"

    def choose(self, members: Sequence[MemberPlan]) -> ResetWay:
        return ResetWay.STORE

    async def moves(self, members: Sequence[MemberPlan], targets: Sequence[QueueTarget]) -> list[QueueMove]:
        return [QueueMove(each.queue, None, self._stored.get(each.queue), each.target) for each in targets]
