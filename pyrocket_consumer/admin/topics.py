"""Create, delete and list topics, find the offset ranges of their queues, and the masters for an admin call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.client import read_body
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.names import is_system, unwrap, wrap
from pyrocket_consumer.config import check_names, check_text
from pyrocket_consumer.errors import BrokerError, ConfigError, ConnectError, ProtocolError, RequestTimeout, RocketError
from pyrocket_consumer.model import DLQ_PREFIX, MASTER_ID, PERM_READ, PERM_WRITE, RETRY_PREFIX, MessageQueue, TopicRoute
from pyrocket_consumer.protocol.bodies import decode_route, decode_topic_list, decode_topic_stats
from pyrocket_consumer.protocol.codes import ResponseCode, version_name, version_ordinal
from pyrocket_consumer.protocol.command import (
    CreateTopicHeader,
    DeleteTopicHeader,
    DeleteTopicInNameServerHeader,
    GetAllTopicsHeader,
    GetBrokerConfigHeader,
    GetRouteInfoHeader,
    GetTopicStatsInfoHeader,
)
from pyrocket_consumer.protocol.reset_format import MAX_RECORDED_OFFSET
from pyrocket_consumer.text import escape_controls, join_truncated, safe_repr

T = TypeVar("T")

MAX_QUEUES = 10_000

_PERMISSIONS = {"rw": PERM_READ | PERM_WRITE, "r": PERM_READ, "w": PERM_WRITE}
_FIRST_ATTRIBUTES_VERSION = version_ordinal(5, 0, 0)
_SYSTEM_PREFIX = "RMQ_SYS_"  # releases of 5.x add more of them
_POLL_S = 0.02
_CHECK_AFTER_POLLS = 10
_ROUTE_TIMEOUT_S = 10.0


_MAX_DATETIME_MS = 253_402_300_799_000
"""The last second of the year 9999, the largest time of `datetime`."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets of a queue, from `min` up to but without `max`. `stored_at` is the time of its last message."""

    min: int
    max: int
    stored_at: datetime | None = None

    @property
    def count(self) -> int:
        """The number of offsets. With delayed or deleted messages, some offsets have no message."""
        return self.max - self.min


async def create_topic(
    cluster: Cluster,
    name: str,
    *,
    queues: int,
    perm: str,
    order: bool,
    attributes: Mapping[str, str],
    brokers: Collection[str] | None,
    cluster_name: str | None,
) -> None:
    """Create or change a topic on masters, and return when every name server has its route."""
    topic = wrap(cluster.config.namespace, name)
    bits = _PERMISSIONS[perm]
    text = ",".join(f"+{each}={value}" for each, value in attributes.items())  # source: AttributeParser
    targets = await find_masters(cluster, brokers, cluster_name)
    if text:
        await call_many(targets, lambda address: _check_attributes_known(cluster, address))
    header = CreateTopicHeader(
        topic, read_queue_nums=queues, write_queue_nums=queues, perm=bits, order=order, attributes=text or None
    )
    await call_many(targets, lambda address: cluster.call(address, header))

    def is_created(route: TopicRoute | None) -> bool:
        # A broker whose own permission is narrower shows fewer bits than requested.
        named = {
            data.broker_name
            for data in (route.queues if route else ())
            if (data.read_queues, data.write_queues) == (queues, queues) and not data.perm & ~bits
        }
        return named.issuperset(targets)

    async def check_queue_count() -> None:
        for broker, address in targets.items():
            count = await _queue_count(cluster, topic, address)
            if count not in (None, queues):
                raise RocketError(
                    f"topic {name!r} has {count} queues at {broker} now, not {queues}, because another client "
                    "changed it at the same time; agree on a number"
                )

    await _wait_routed(cluster, topic, is_created, check_queue_count)


async def _queue_count(cluster: Cluster, topic: str, address: str) -> int | None:
    """Return the number of queues on a broker, or None if the broker refuses to report it."""
    try:
        return len((await cluster.read(address, GetTopicStatsInfoHeader(topic), decode_topic_stats)).queues)
    except BrokerError:
        return None


def check_perm(perm: object) -> None:
    """Raise ConfigError if `perm` is not a permission of a topic."""
    if not isinstance(perm, str) or perm not in _PERMISSIONS:
        raise ConfigError(f"perm={safe_repr(perm)} is not allowed; choose one of {', '.join(map(repr, _PERMISSIONS))}")


def check_attributes(attributes: object) -> None:
    """Raise ConfigError if `attributes` are neither None nor valid attributes of a topic."""
    if not isinstance(attributes, Mapping | None):
        raise ConfigError(
            f'attributes={safe_repr(attributes)} is not allowed; it must be like {{"message.type": "FIFO"}}'
        )
    for name, value in (attributes or {}).items():
        for part in (name, value):
            if not isinstance(part, str) or not part or any(sign in part for sign in "+=,"):
                raise ConfigError(f"attribute {name!r}={safe_repr(value)} must be texts without '+', '=' and ','")


async def _check_attributes_known(cluster: Cluster, address: str) -> None:
    version = (await cluster.call(address, GetBrokerConfigHeader())).version
    if version < _FIRST_ATTRIBUTES_VERSION:
        raise ConfigError(
            f"{address} is {version_name(version)}, and brokers before 5.0 ignore attributes; remove them"
        )


async def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic on all brokers, and return when no name server has its route.

    A topic that does not exist is no error.
    """
    topic = wrap(cluster.config.namespace, name)
    await call_many(await find_masters(cluster), lambda address: cluster.call(address, DeleteTopicHeader(topic)))
    await cluster.name_servers.call_every(DeleteTopicInNameServerHeader(topic))
    cluster.routes.forget(topic)
    await _wait_routed(cluster, topic, lambda route: route is None)


async def _wait_routed(
    cluster: Cluster,
    topic: str,
    is_wanted: Callable[[TopicRoute | None], bool],
    verify: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Return when the route at every name server is as wanted. Brokers update name servers with a delay.

    Meanwhile `verify` is called from time to time. It raises an error if the route will never be as wanted.
    """
    for address in cluster.config.name_servers:
        polls = 0
        try:
            async with asyncio.timeout(_ROUTE_TIMEOUT_S):
                while True:
                    if is_wanted(await _route_at(cluster, address, topic)):
                        break
                    await asyncio.sleep(_POLL_S)
                    polls += 1
                    if verify is not None and polls % _CHECK_AFTER_POLLS == 0:
                        await verify()
        except TimeoutError as error:
            raise RequestTimeout(f"the new route of topic {topic!r}", address, _ROUTE_TIMEOUT_S) from error


async def _route_at(cluster: Cluster, name_server: str, topic: str) -> TopicRoute | None:
    response = await cluster.call(name_server, GetRouteInfoHeader(topic), accept=(0, ResponseCode.TOPIC_NOT_EXIST))
    return await read_body(partial(decode_route, topic), response.body) if response.code == 0 else None


async def list_topics(cluster: Cluster, *, include_system: bool) -> list[str]:
    """Return all topics, sorted."""
    found = await cluster.name_servers.read(GetAllTopicsHeader(), decode_topic_list)
    namespace = cluster.config.namespace
    if include_system:
        return sorted(found)
    info = await cluster.name_servers.cluster_info()
    # Brokers create topics with their own names, which users do not need.
    own = {*info.brokers, *info.clusters, *(f"{name}_REPLY_TOPIC" for name in info.clusters)}
    return sorted(
        unwrap(namespace, topic)
        for topic in found
        if topic not in own
        and not is_system(topic)
        and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX, _SYSTEM_PREFIX))
        and (not namespace or topic.startswith(f"{namespace}%"))
    )


async def topic_offsets(cluster: Cluster, name: str) -> dict[MessageQueue, OffsetRange]:
    """Return the offset range of every queue of a topic."""
    topic = wrap(cluster.config.namespace, name)
    route = await cluster.routes.get(topic, refresh=True)
    addresses = {data.broker_name: cluster.routes.address(data.broker_name) for data in route.queues}
    tables = await call_many(
        {broker: address for broker, address in addresses.items() if address is not None},
        lambda address: cluster.read(address, GetTopicStatsInfoHeader(topic), decode_topic_stats),
    )
    ranges: dict[MessageQueue, OffsetRange] = {}
    for broker, table in tables.items():
        for queue, stats in table.queues.items():
            if (queue.topic, queue.broker_name) != (topic, broker):
                continue  # a broker knows only its own queues
            low, high = stats.min_offset, stats.max_offset
            if not 0 <= low <= high <= MAX_RECORDED_OFFSET:
                raise ProtocolError(f"{broker} reports an invalid range of {queue}: {low} to {high}")
            ranges[MessageQueue(name, queue.broker_name, queue.queue_id)] = OffsetRange(
                low, high, to_datetime(stats.last_update_timestamp)
            )
    return dict(sorted(ranges.items()))


def to_datetime(at_ms: int) -> datetime | None:
    """Return the time of a message, or None without a message, or if `datetime` cannot represent the time."""
    return datetime.fromtimestamp(at_ms / 1000, UTC) if 0 < at_ms <= _MAX_DATETIME_MS else None


# --- masters


class BrokerMissing(ConnectError):
    """The name server knows no master of a broker. So there is no address to check."""

    def __str__(self) -> str:
        return escape_controls(f"{self.address}: {self.reason}")


NO_MASTER = "the name server knows no master of it now; check that it runs"


def check_targets(brokers: Iterable[str] | None, cluster_name: str | None) -> list[str] | None:
    """Return the names of the selected brokers, or None for all, or for all of a cluster.

    Raises:
        ConfigError: a name is not allowed, or both arguments are set.
    """
    if brokers is not None and cluster_name is not None:
        raise ConfigError("brokers and cluster exclude each other; give one of them")
    check_text("cluster", cluster_name)
    named = None if brokers is None else check_names("brokers", brokers)
    if named == []:
        raise ConfigError(f"brokers={brokers!r} names no broker; pass None for all")
    return named


async def find_masters(
    cluster: Cluster, named: Collection[str] | None = None, cluster_name: str | None = None
) -> dict[str, str]:
    """Return broker name -> address of its master, for the named brokers, those of a cluster, or all.

    Raises:
        ConfigError: the broker or cluster does not exist.
        ConnectError: one of them has no master now.
    """
    info = await cluster.name_servers.cluster_info()
    if cluster_name is not None:
        if cluster_name not in info.clusters:
            raise ConfigError(
                f"there is no cluster {cluster_name!r}; choose one of {join_truncated(sorted(info.clusters))}"
            )
        named = list(info.clusters[cluster_name])
    names = sorted(info.brokers) if named is None else sorted(named)
    unknown = [name for name in names if name not in info.brokers]
    if unknown:
        raise ConfigError(f"there is no broker {unknown[0]!r}; choose one of {join_truncated(sorted(info.brokers))}")
    found = {name: info.brokers[name].addresses.get(MASTER_ID) for name in names}
    without = [name for name, address in found.items() if address is None]
    if without or not found:
        what = f"broker {join_truncated(without)}" if without else "the cluster"
        raise BrokerMissing(what, NO_MASTER)
    return {name: address for name, address in found.items() if address is not None}


async def call_many(brokers: Mapping[str, str], call: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Return broker name -> result of `call(address)`. All calls run at the same time.

    Raises:
        RocketError: the error of one broker; a note names the brokers where the call succeeded.
    """
    done: dict[str, T] = {}

    async def call_one(name: str) -> None:
        done[name] = await call(brokers[name])

    try:
        await gather_limited(brokers, call_one, limit=len(brokers))
    except RocketError as error:
        if done:
            error.add_note(f"done at {join_truncated(sorted(done))}; it is safe to repeat")
        raise
    return {name: done[name] for name in brokers}
