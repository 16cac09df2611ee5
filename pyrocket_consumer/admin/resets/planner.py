"""Make the plan of a reset. It only reads: queues, targets, members, and the problems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.resets.plan import (
    BrokerPlan,
    MemberPlan,
    QueueMove,
    QueueTarget,
    ResetPlan,
    ResetWay,
    RetryStart,
    way_for,
)
from pyrocket_consumer.admin.resets.result import queue_name
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
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.cluster.offset_lookup import (
    TOOLS_GROUP,
    fetch_committed_offsets,
    fetch_first_and_last,
    fetch_offsets_at,
    nearest_available,
)
from pyrocket_consumer.cluster.reset_record import ResetRecord
from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.config import (
    OffsetSpec,
)
from pyrocket_consumer.errors import (
    BrokerError,
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
    namespace = cluster.config.namespace
    wire_group, wire_topic = wrap(namespace, group), wrap(namespace, topic)
    route = await cluster.routes.get(wire_topic, refresh=True)
    chosen = _choose_queues(route, unwrap(namespace, topic), wire_topic, where, wanted)
    stored, retry_route = dict[MessageQueue, int](), None
    if store is not None:
        rows = await asyncio.to_thread(store.offsets, wire_group)
        stored = {row.queue: row.next_offset for row in rows}
        retry_route = await _retry_route(cluster, wire_group, wire_topic, stored)
    brokers = await _fetch_brokers(cluster, [route] if retry_route is None else [route, retry_route])
    usable = {broker.name: broker.address for broker in brokers if not broker.problem}
    found = await fetch_group_members(cluster, wire_group, usable)
    decided = MessageModel(model) if model is not None else None
    replies: dict[str, RelayResult] = {}
    if found.members:
        question = encode_status_request(wire_topic)
        replies = await relay_to_all(cluster, wire_group, found.members, "status", str(uuid4()), question, wait_s)
        online = found.model or _reported_model(replies)
        if online is not None and decided not in (None, online):
            raise ConfigError(
                f"group {group!r} is {online}, not {decided}, as its online members report ({len(found.members)}); "
                "omit the model"
            )
        decided = decided or online
    elif store is None:
        await check_group_exists(cluster, group)
        if decided is MessageModel.CLUSTERING:
            await _check_not_recorded(cluster, wire_group, group, wire_topic, usable)
    if store is not None:
        _check_clustering(group, decided)
        decided = MessageModel.CLUSTERING
    if decided is None:
        decided = await _infer_model(cluster, wire_group, group, chosen, brokers)
    if member is not None:
        found = _only_member(found, member, decided)
    targets = await _fetch_targets(
        cluster, wire_group, [queue for queue in chosen if queue.broker_name in usable], where
    )
    all_queues = all(
        MessageQueue(wire_topic, data.broker_name, number) in chosen
        for data in route.queues
        for number in range(data.write_queues)
    )
    unsubscribed = _unsubscribed_text(found, wire_topic, group, namespace)
    has_row = bool(unsubscribed) or any(queue.topic == wire_topic for queue in stored)
    members = tuple(
        MemberPlan(each, replies[each.client_id], *_describe_claim(replies[each.client_id], has_row))
        if store is not None
        else _member_plan(
            each, replies[each.client_id], decided, brokers, all_queues, is_single_member=member is not None
        )
        for each in found.members
    )
    way = way_for(decided, members) if member is None else ResetWay.MEMBER
    if store is not None:
        way = ResetWay.STORE
    if way is ResetWay.BROKERS:
        _check_brokers_support(brokers, all_queues, members)
    if store is None:
        moves = await _plan_moves(cluster, wire_group, wire_topic, decided, members, targets, wait_s)
    else:
        moves = [QueueMove(each.queue, None, stored.get(each.queue), each.target) for each in targets]

    left = [] if retry_route is None else retry_route.consume_queues()
    retries = await _plan_retry_starts(
        cluster, wire_group, [queue for queue in left if queue not in stored and queue.broker_name in usable]
    )

    def public_queue(queue: MessageQueue, to: str = topic) -> MessageQueue:
        return MessageQueue(to, queue.broker_name, queue.queue_id)

    return ResetPlan(
        group,
        topic,
        decided,
        way,
        tuple(QueueTarget(public_queue(t.queue), t.wanted, t.target, t.min, t.max) for t in targets),
        tuple(QueueMove(public_queue(move.queue), move.member, move.current, move.target) for move in moves),
        tuple(brokers),
        members,
        all_queues,
        namespace,
        member,
        unsubscribed,
        store,
        tuple(
            RetryStart(public_queue(each.queue, retry_topic(group)), each.committed, each.target) for each in retries
        ),
    )


async def _retry_route(
    cluster: Cluster, wire_group: str, wire_topic: str, stored: Mapping[MessageQueue, int]
) -> TopicRoute | None:
    """Return the route of the retry topic of the group, if it has queues without a row in the database."""
    if wire_topic == retry_topic(wire_group):
        return None
    try:
        route = await cluster.routes.get(retry_topic(wire_group), refresh=True)
    except RouteNotFound:
        return None
    return route if any(queue not in stored for queue in route.consume_queues()) else None


async def _plan_retry_starts(cluster: Cluster, wire_group: str, queues: Sequence[MessageQueue]) -> list[RetryStart]:
    """Return the start of each queue of the retry topic that has no row in the database.

    Without a row such a queue would start with its first message. With the offset of the brokers, no message is
    consumed again, and none is lost.
    """
    committed = await fetch_committed_offsets(cluster, wire_group, queues)
    ends = await fetch_first_and_last(cluster, queues)

    def start(queue: MessageQueue) -> RetryStart:
        offset, (low, high) = committed[queue], ends[queue]
        return RetryStart(queue, offset, low if offset is None else nearest_available(offset, low, high))

    return [start(queue) for queue in sorted(queues)]


def _check_clustering(group: str, model: MessageModel | None) -> None:
    if model is MessageModel.BROADCASTING:
        raise ConfigError(f"group {group!r} is broadcasting, and a database has no offsets of such a group; omit store")


def _describe_claim(reply: RelayResult, has_row: bool) -> tuple[bool, str]:
    if reply.kind is RelayStatus.FOREIGN or (reply.kind is RelayStatus.OURS and not reply.report.in_database):
        return False, "uses the offsets of the broker, not those of the database"
    if not has_row:
        return False, "consumes the topic, but the database has no row of it; check its database and table"
    return True, "will detect the reset within seconds, and claim its queues again"


def _unsubscribed_text(found: GroupMembers, wire_topic: str, group: str, namespace: str | None) -> str:
    """Return a text if no online member subscribes to the topic, or "" if one does or it is unknown."""
    if not found.topics or wire_topic in found.topics:
        return ""
    topics = sorted(unwrap(namespace, name) for name in found.topics if not name.startswith(RETRY_PREFIX))
    return (
        f"no online member of {group} subscribes to {unwrap(namespace, wire_topic)} "
        f"(they subscribe to {join_truncated(topics) if topics else 'nothing'})"
    )


async def _check_not_recorded(
    cluster: Cluster, wire_group: str, group: str, wire_topic: str, brokers: Iterable[str]
) -> None:
    """Raise ConfigError if a reset is recorded for offline members, which would follow it instead of a commit."""
    for broker_name in brokers:
        try:
            recorded = await ResetRecord(cluster, wire_group, wire_topic, broker_name).head()
        except PermissionDenied:
            continue
        if recorded:
            topic = unwrap(cluster.config.namespace, wire_topic)
            raise ConfigError(
                f"group {group!r} is broadcasting: a reset of {topic} is recorded at {broker_name} for its members; "
                "pass model='broadcasting' (in the shell --model broadcasting). If it is a clustering group now, "
                "first remove the record with forget_reset (pyrocket offsets forget-reset)"
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


def _choose_queues(
    route: TopicRoute,
    topic: str,
    wire_topic: str,
    to: OffsetSpec | Mapping[MessageQueue, int],
    wanted: Sequence[MessageQueue] | None,
) -> list[MessageQueue]:
    """Return the queues to move, with the topic names of brokers."""
    there = route.consume_queues()
    if isinstance(to, Mapping):
        wanted = list(to) if wanted is None else [queue for queue in wanted if queue in to]
    if wanted is None:
        chosen = there
    else:
        chosen = []
        for queue in wanted:
            if queue.topic not in (topic, wire_topic):
                raise ConfigError(f"{queue} is not a queue of topic {topic}; name queues of this topic only")
            chosen.append(MessageQueue(wire_topic, queue.broker_name, queue.queue_id))
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
    return sorted(set(chosen))


async def _fetch_brokers(cluster: Cluster, routes: Sequence[TopicRoute]) -> list[BrokerPlan]:
    brokers = [broker for route in routes for broker in route.brokers]
    addresses = {broker.broker_name: broker.addresses.get(MASTER_ID) for broker in brokers}

    async def fetch(name: str) -> BrokerPlan:
        address = addresses.get(name)
        if address is None:
            return BrokerPlan(name, problem="it has no known master now")
        try:
            response = await cluster.call(address, GetBrokerConfigHeader())
        except PermissionDenied:
            return BrokerPlan(name, address, None, cluster.membership.versions.get(address) or 0)
        except BrokerError as error:
            return BrokerPlan(name, address, problem=str(error))
        except RocketError as error:
            return BrokerPlan(name, address, problem=str(error))
        setting = (await read_body(decode_java_properties, response.body)).get(_SERVER_SIDE_SETTING)
        if setting is None:  # brokers before 5.1 do not have it
            server_side = response.version >= _SERVER_SIDE_SINCE
        else:
            server_side = setting.lower() == "true"
        return BrokerPlan(name, address, server_side, response.version)

    names = {data.broker_name for route in routes for data in route.queues}
    return list((await gather_limited(sorted(names), fetch)).values())


def _reported_model(replies: Mapping[str, RelayResult]) -> MessageModel | None:
    models = {reply.report.message_model for reply in replies.values() if reply.report.message_model}
    return (
        MessageModel(models.pop()) if len(models) == 1 and models <= {model.value for model in MessageModel} else None
    )


async def _infer_model(
    cluster: Cluster, wire_group: str, group: str, queues: Sequence[MessageQueue], brokers: Sequence[BrokerPlan]
) -> MessageModel:
    """Infer the model of a group without online members from what brokers have.

    Only a clustering group commits offsets, and only a broadcasting group has recorded resets.

    Raises:
        ConfigError: brokers have neither.
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
                if found or (found == 0 and version >= _EXACT_ZERO_SINCE):
                    return MessageModel.CLUSTERING
        except ConnectError:
            continue
    raise ConfigError(
        f"no member of group {group!r} is online, and brokers have no offset of it for {topic}; "
        "pass model='clustering' or model='broadcasting' (in the shell --model)"
    )


async def _fetch_targets(
    cluster: Cluster, wire_group: str, queues: Sequence[MessageQueue], to: OffsetSpec | Mapping[MessageQueue, int]
) -> list[QueueTarget]:
    ends = await fetch_first_and_last(cluster, queues)
    if isinstance(to, Mapping):
        exact = {(queue.broker_name, queue.queue_id): offset for queue, offset in to.items()}
        wanted = {queue: exact[queue.broker_name, queue.queue_id] for queue in queues}
    else:
        wanted = await fetch_offsets_at(cluster, to, queues, groups=(TOOLS_GROUP, wire_group))
    return [
        QueueTarget(queue, wanted[queue], nearest_available(wanted[queue], low, high), low, high)
        for queue, (low, high) in ends.items()
    ]


def _member_plan(
    member: RemoteMember,
    reply: RelayResult,
    model: MessageModel,
    brokers: Sequence[BrokerPlan],
    all_queues: bool,
    is_single_member: bool,
) -> MemberPlan:
    reachable, how = _describe_reach(member, reply, model, brokers, all_queues)
    if is_single_member and reply.kind is RelayStatus.FOREIGN:
        reachable, how = False, f"{member.client} cannot be reset alone by any call; {_MANUAL_RESET}"
    if member.connections > 1:
        how += f"; {member.connections} processes share this client id, and only one of them can receive requests"
    return MemberPlan(member, reply, reachable, how)


def _describe_reach(
    member: RemoteMember, reply: RelayResult, model: MessageModel, brokers: Sequence[BrokerPlan], all_queues: bool
) -> tuple[bool, str]:
    broadcasting = model is MessageModel.BROADCASTING
    if reply.kind is RelayStatus.OURS:
        if reply.state == "refused":
            return False, f"refuses: {reply.reason}"
        return True, "will be notified and verified"
    if reply.kind is RelayStatus.FOREIGN:
        if broadcasting:
            return _describe_foreign_reach(member, brokers, all_queues)
        return True, "will be reset by its broker, and verified if it can be observed"
    if reply.kind is RelayStatus.FORBIDDEN:
        text = "this account may not send requests to members (RocketMQ requires Get on the group)"
        return False, f"{text}; it will follow the record within a minute, unconfirmed" if broadcasting else text
    follows = "it will follow the record" if broadcasting else "it will be notified again, and may move its queues"
    return False, f"{reply.reason or reply.kind}; if it is a member of this package, {follows} when it responds again"


def _describe_foreign_reach(member: RemoteMember, brokers: Sequence[BrokerPlan], all_queues: bool) -> tuple[bool, str]:
    if any(broker.server_side is not False for broker in brokers):
        return False, (
            f"{member.client} cannot be reset in broadcasting while the broker keeps resets "
            f"({_SERVER_SIDE_SETTING}=true, which an operator can change); {_MANUAL_RESET}"
        )
    java_obeys = member.language == "JAVA" and any(member.version in versions for versions in _RESETTABLE_JAVA_VERSIONS)
    if not java_obeys and member.language != "GO":
        return False, f"{member.client} cannot be reset in broadcasting by any call; {_MANUAL_RESET}"
    if not all_queues:
        return False, f"{member.client} can only be reset with all queues at once; name them all, or {_MANUAL_RESET}"
    return True, "will be notified by the broker, with offsets committed for a moment; observed after 12 to 25 s"


def _check_brokers_support(brokers: Sequence[BrokerPlan], all_queues: bool, members: Sequence[MemberPlan]) -> None:
    """Raise ConfigError if a broker cannot reset only the selected queues."""
    if all_queues:
        return
    cannot = [broker.name for broker in brokers if broker.server_side is not True and not broker.problem]
    if cannot:
        foreign = next(
            each.client_id for each in members if each.reply.kind in (RelayStatus.FOREIGN, RelayStatus.FORBIDDEN)
        )
        raise ConfigError(
            f"{', '.join(cannot)} can reset only all queues of a topic at once, and member {foreign} does not accept "
            "single ones; name all queues"
        )


async def _plan_moves(
    cluster: Cluster,
    wire_group: str,
    wire_topic: str,
    model: MessageModel,
    members: Sequence[MemberPlan],
    targets: Sequence[QueueTarget],
    wait_s: float,
) -> list[QueueMove]:
    if model is MessageModel.CLUSTERING:

        async def committed(target: QueueTarget) -> int | None:
            broker = cluster.broker(target.queue.broker_name)
            return await broker.query_offset(wire_group, target.queue, set_zero_if_not_found=False)

        found = await gather_limited(targets, committed)
        return [QueueMove(target.queue, None, found[target], target.target) for target in targets]
    if not members:
        return [QueueMove(target.queue, None, None, target.target) for target in targets]

    async def offsets(number: int) -> Mapping[MessageQueue, int]:
        member = members[number]
        if member.reply.kind is RelayStatus.OURS:
            return member.reply.report.offsets
        if member.reply.kind is RelayStatus.FOREIGN:
            try:
                return await fetch_member_offsets(cluster, wire_group, member.member, wire_topic, wait_s)
            except RocketError:
                return {}
        return {}

    tables = await gather_limited(range(len(members)), offsets, limit=MAX_CONCURRENT_RELAYS)
    return [
        QueueMove(target.queue, member.client_id, table.get(target.queue), target.target)
        for member, table in zip(members, tables.values(), strict=True)
        for target in targets
    ]
