"""The online members of a group, and requests to a single member."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from pyrocket_consumer.cluster.client import read_body
from pyrocket_consumer.cluster.cluster import Cluster
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.errors import BrokerError, PermissionDenied, ProtocolError, RocketError
from pyrocket_consumer.model import MessageModel, MessageQueue
from pyrocket_consumer.protocol.bodies import (
    decode_consumer_connection,
    decode_consumer_status_table,
    decode_running_info,
)
from pyrocket_consumer.protocol.codes import ResponseCode, version_name
from pyrocket_consumer.protocol.command import (
    GetConsumerConnectionListHeader,
    GetConsumerRunningInfoHeader,
    GetConsumerStatusHeader,
)
from pyrocket_consumer.protocol.reset_format import (
    RelayHeader,
    RelayResponseHeader,
    ReportBody,
    decode_report,
    is_relay_response,
)

RELAY_TIMEOUT_S = 12.0  # a broker waits 10 s for a member
MAX_CONCURRENT_RELAYS = 8  # each silent member occupies one of the broker's 16 threads for such calls
STATUS_TIMEOUT_S = 8.0  # a broker waits 5 s for a status
MIN_WAIT_S = 1.0  # for one response, even if less time is left for all


@asynccontextmanager
async def _within(left_s: float, failure: str) -> AsyncIterator[None]:
    """Limit the time of the block to `left_s` seconds, but not below `MIN_WAIT_S`.

    Raises:
        RocketError: it took longer; the text begins with `failure`.
    """
    left_s = max(MIN_WAIT_S, left_s)
    try:
        async with asyncio.timeout(left_s if left_s < math.inf else None):
            yield
    except TimeoutError as error:
        raise RocketError(f"{failure} within {left_s:.2g} s") from error


@dataclass(frozen=True, slots=True)
class RemoteMember:
    """One client that is online in a group, and the addresses of the brokers that know it.

    `language` is empty and `version` is 0 if the brokers do not report them. If `connections` is above 1, several
    processes use the same client id, and requests reach only one of them.
    """

    client_id: str
    addresses: tuple[str, ...] = ()
    language: str = ""
    version: int = 0
    connections: int = 1

    @property
    def client(self) -> str:
        """The client's language and version, as text for people."""
        if not self.language:
            return "unknown"
        if self.language == "PYTHON":
            return "PYTHON"  # a Python client sends the version of its protocol, not of its package
        return f"{self.language} {version_name(self.version).removeprefix('V').replace('_', '.')}"


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The online members of a group, the topics that they subscribe to, and their message model.

    `model` is None if no member is online or the brokers do not report it. `topics` may then be incomplete, too.
    """

    members: tuple[RemoteMember, ...]
    model: MessageModel | None
    topics: frozenset[str] = frozenset()


async def fetch_group_members(
    cluster: Cluster,
    group: str,
    brokers: Mapping[str, str],
    failures: dict[str, RocketError] | None = None,
    within_s: float = math.inf,
) -> GroupMembers:
    """Return the members of `group` that are online at these masters (broker name -> address).

    With `failures`, a broker that fails raises nothing; its error is added to `failures` under its name. `within_s`
    is the timeout for all brokers together, but each has at least `MIN_WAIT_S`.
    """
    deadline = cluster.loop.time() + within_s
    connections: dict[str, list[tuple[str, str, int]]] = {}
    counts: dict[str, int] = {}
    models: set[str] = set()
    topics: set[str] = set()

    async def fetch_from(broker_name: str) -> None:
        try:
            async with _within(deadline - cluster.loop.time(), f"{broker_name} did not send the members of {group}"):
                await read_from(broker_name)
        except RocketError as error:
            if failures is None:
                raise
            failures[broker_name] = error

    async def read_from(broker_name: str) -> None:
        accept = (ResponseCode.SUCCESS, ResponseCode.CONSUMER_NOT_ONLINE)
        try:
            response = await cluster.call(brokers[broker_name], GetConsumerConnectionListHeader(group), accept=accept)
        except PermissionDenied:  # the right to consume suffices to list the client ids
            for client_id in await cluster.broker(broker_name).consumer_ids(group):
                connections.setdefault(client_id, []).append((brokers[broker_name], "", 0))
            return
        if response.code == ResponseCode.CONSUMER_NOT_ONLINE:
            return
        found = await read_body(decode_consumer_connection, response.body)
        models.add(found.message_model.lower())
        topics.update(each.topic for each in found.subscriptions)
        here: dict[str, int] = {}
        for each in found.connections:
            here[each.client_id] = here.get(each.client_id, 0) + 1
            if here[each.client_id] == 1:
                facts = brokers[broker_name], each.language, each.version
                connections.setdefault(each.client_id, []).append(facts)
        for client_id, count in here.items():
            counts[client_id] = max(count, counts.get(client_id, 1))

    await gather_limited(sorted(brokers), fetch_from)
    members = tuple(
        RemoteMember(
            client_id,
            tuple(address for address, _, _ in sorted(known_at)),
            max(language for _, language, _ in known_at),
            max(version for _, _, version in known_at),
            counts.get(client_id, 1),
        )
        for client_id, known_at in sorted(connections.items())
    )
    known = [model for model in MessageModel if model.value in models]
    return GroupMembers(members, known[0] if len(known) == 1 else None, frozenset(topics))


class RelayStatus(StrEnum):
    """The outcome of a relayed request."""

    OURS = "ours"  # a client of this package responded
    FOREIGN = "foreign"  # a client that does not know relayed requests responded
    SILENT = "silent"  # the broker received no response from the member
    GONE = "gone"  # no broker knows the member
    FORBIDDEN = "forbidden"  # this client has no permission to send requests to members
    FAILED = "failed"  # the broker sent no usable response


@dataclass(frozen=True, slots=True)
class RelayResult:
    """The response of a member: its state and report if it is a client of this package, else the reason."""

    kind: RelayStatus
    state: str = ""
    reason: str = ""
    report: ReportBody = field(default_factory=lambda: ReportBody("", ""))


async def relay_request(
    cluster: Cluster,
    group: str,
    member: RemoteMember,
    operation: str,
    request_id: str,
    body: bytes,
    timeout_s: float | None = None,
) -> RelayResult:
    """Relay a request to a member through the first of its brokers that can, and return the result. Never raises."""
    reply = RelayResult(RelayStatus.GONE, reason="no broker knows it")
    for address in member.addresses:
        try:
            response = await cluster.call(
                address,
                RelayHeader(group, member.client_id, operation, request_id),
                body,
                timeout_s=timeout_s or RELAY_TIMEOUT_S,
            )
            if not is_relay_response(response.fields):
                return RelayResult(RelayStatus.FOREIGN)
            header = RelayResponseHeader.from_fields(response.fields)
            report = await read_body(decode_report, response.body)
            return RelayResult(RelayStatus.OURS, header.state, header.reason or "", report)
        except PermissionDenied as error:
            return RelayResult(RelayStatus.FORBIDDEN, reason=str(error))
        except ProtocolError as error:
            return RelayResult(RelayStatus.FAILED, reason=f"its response cannot be read: {error}")
        except BrokerError as error:
            if error.code == ResponseCode.CONSUME_MSG_TIMEOUT:
                return RelayResult(RelayStatus.SILENT, reason="it did not respond within 10 s")
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return RelayResult(RelayStatus.FOREIGN)
            kind = RelayStatus.GONE if "not online" in error.remark else RelayStatus.FAILED
            reply = RelayResult(kind, reason=str(error))
        except RocketError as error:
            reply = RelayResult(RelayStatus.FAILED, reason=str(error))
    return reply


async def relay_to_all(
    cluster: Cluster,
    group: str,
    members: Iterable[RemoteMember],
    operation: str,
    request_id: str,
    body: bytes,
    within_s: float = math.inf,
) -> dict[str, RelayResult]:
    """Relay a request to members concurrently, so that a silent member does not delay the others.

    `within_s` is the timeout for all members together, but each has at least `MIN_WAIT_S`.
    """
    by_id = {member.client_id: member for member in members}
    deadline = cluster.loop.time() + within_s

    async def relay_one(client_id: str) -> RelayResult:
        try:
            async with _within(deadline - cluster.loop.time(), "it did not respond"):
                return await relay_request(cluster, group, by_id[client_id], operation, request_id, body)
        except RocketError as error:
            return RelayResult(RelayStatus.SILENT, reason=str(error))

    return await gather_limited(by_id, relay_one, limit=MAX_CONCURRENT_RELAYS)


async def fetch_member_offsets(
    cluster: Cluster, group: str, member: RemoteMember, topic: str = "", within_s: float = math.inf
) -> dict[MessageQueue, int]:
    """Return the offsets that a member reports, in `topic` or, if that is empty, in all topics. Any client responds.

    Raises:
        RocketError: the member did not respond within `within_s` seconds or the timeout of its brokers, or this
            client has no permission to ask it.
    """
    async with _within(within_s, f"{member.client_id} did not respond"):
        return await _fetch_status_offsets(cluster, group, member, topic)


async def _fetch_status_offsets(
    cluster: Cluster, group: str, member: RemoteMember, topic: str
) -> dict[MessageQueue, int]:
    failure: RocketError | None = None
    for address in member.addresses:
        try:
            header = GetConsumerStatusHeader(topic, group, member.client_id)
            table = await cluster.read(address, header, decode_consumer_status_table, timeout_s=STATUS_TIMEOUT_S)
        except PermissionDenied:  # this needs a permission on the topic; the running info needs one on the group
            return await _fetch_running_info_offsets(cluster, address, group, member, topic)
        except RocketError as error:
            failure = error
            continue
        if member.client_id in table:
            return table[member.client_id]
        failure = RocketError(f"{member.client_id} did not report its offsets to broker {address}")
    raise failure or RocketError(f"{member.client_id} is no longer online")


async def _fetch_running_info_offsets(
    cluster: Cluster, address: str, group: str, member: RemoteMember, topic: str
) -> dict[MessageQueue, int]:
    """Return the offsets of the queues that a member holds, from its running info."""
    header = GetConsumerRunningInfoHeader(group, member.client_id)
    found = await cluster.read(address, header, decode_running_info, timeout_s=RELAY_TIMEOUT_S)
    return {
        queue: info.commit_offset
        for queue, info in found.queues.items()
        if info.commit_offset >= 0 and topic in ("", queue.topic)
    }
