"""The offsets that a `to` argument selects, read from the brokers: for consumers, reset plans and the shell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.cluster import Cluster
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.config import OffsetSpec, check_offset_spec, check_queues
from pyrocket_consumer.errors import (
    ClientClosed,
    ConfigError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.reset_format import MAX_RECORDED_OFFSET

To = str | datetime | Mapping[MessageQueue, int]
"""`"first"` or `"earliest"`, `"last"` or `"latest"`, an aware datetime, or `{queue: offset}`."""

TOOLS_GROUP = "TOOLS_CONSUMER"
"""A group that every broker has, for clients that read messages without being members of a group."""

_FIRST, _LAST = "the first offsets are", "the last offsets are"

MAX_CONCURRENT_LOOKUPS = 64
"""Most requests in progress to one broker. Sent at once, they take less than half the time of single ones."""

_MAX_CONCURRENT_ROUTES = 100

_NO_RESPONSE = (ClientClosed, ConnectError, ConnectionLost, RequestTimeout)

V = TypeVar("V", int, int | None)

FetchOffsets = Callable[[Broker, Sequence[MessageQueue]], Awaitable[Mapping[MessageQueue, V | RocketError]]]
"""Requests an offset of each queue from its broker, which has them all. An error is the result of its queue."""


def check_to(to: object) -> OffsetSpec | dict[MessageQueue, int]:
    """Return the checked `to`: one OffsetSpec for every queue, or the offsets of some.

    Raises:
        ConfigError: it is not a value of `To`. The text names the value and the allowed ones.
    """
    if not isinstance(to, Mapping):
        return check_offset_spec("to", to, ", or {queue: offset}")
    if not to:
        raise ConfigError("to={} names no queue; give at least one, or for all queues 'earliest', 'latest' or a time")
    for queue, offset in to.items():
        if not isinstance(queue, MessageQueue):
            raise ConfigError(f"to={{{queue!r}: …}} is not allowed; the keys must be MessageQueues")
        check_queues("to", [queue])
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= MAX_RECORDED_OFFSET:
            raise ConfigError(
                f"offset {offset!r} of {queue} is not allowed; it must be a whole number from 0 to 2**63 - 2"
            )
    return dict(to)


async def fetch_queues(cluster: Cluster, topics: Iterable[str]) -> dict[str, list[MessageQueue]]:
    """Return the current readable queues of each topic. A topic that does not exist has none."""

    async def fetch(topic: str) -> list[MessageQueue]:
        try:
            return (await cluster.routes.get(topic, refresh=True)).consume_queues()
        except RouteNotFound:
            return []

    return await gather_limited(topics, fetch, _MAX_CONCURRENT_ROUTES)


async def fetch_offsets_at(
    cluster: Cluster, spec: OffsetSpec, queues: Iterable[MessageQueue], *, groups: Sequence[str]
) -> dict[MessageQueue, int]:
    """Return the offset that `spec` selects in each of `queues`, from all brokers concurrently.

    Brokers before 5.1.1 cannot search exactly by time. There this function pulls messages, with the first of `groups`
    that has the permission.

    Raises:
        RocketError: brokers did not respond; the text names each and its reason.
    """
    if spec == "first":
        return await _fetch_by_broker(cluster, queues, Broker.min_offsets, _FIRST)
    if spec == "last":
        return await _fetch_by_broker(cluster, queues, Broker.max_offsets, _LAST)
    at_ms = int(spec.timestamp() * 1000)

    async def search(broker: Broker, queue: MessageQueue) -> int | RocketError:
        denied: RocketError | None = None
        for group in groups:
            try:
                return await broker.search_offset(queue, at_ms, group=group)
            except PermissionDenied as error:
                denied = denied or error
            except RocketError as error:
                return error
        assert denied is not None, "`groups` is empty"
        return denied

    async def fetch(broker: Broker, batch: Sequence[MessageQueue]) -> Mapping[MessageQueue, int | RocketError]:
        return await gather_limited(batch, lambda queue: search(broker, queue))

    return await _fetch_by_broker(cluster, queues, fetch, f"the offsets at {spec.isoformat()} are")


async def fetch_first_and_last(
    cluster: Cluster, queues: Collection[MessageQueue], failures: dict[str, RocketError] | None = None
) -> dict[MessageQueue, tuple[int, int]]:
    """Return the offsets of the oldest and of the next message of each queue.

    With `failures`, a broker that fails raises nothing; its error is added to `failures` under its name.

    Raises:
        RocketError: as for `fetch_offsets_at`.
    """
    first, last = await asyncio.gather(
        _fetch_by_broker(cluster, queues, Broker.min_offsets, _FIRST, failures),
        _fetch_by_broker(cluster, queues, Broker.max_offsets, _LAST, failures),
    )
    return {queue: (first[queue], last[queue]) for queue in queues if queue in first and queue in last}


async def fetch_committed_offsets(
    cluster: Cluster, group: str, queues: Iterable[MessageQueue], failures: dict[str, RocketError] | None = None
) -> dict[MessageQueue, int | None]:
    """Return the offset that `group` has committed for each queue, None without one if the broker reports that.

    With `failures`, a broker that fails raises nothing; its error is added to `failures` under its name.

    Raises:
        RocketError: as for `fetch_offsets_at`.
    """
    return await _fetch_by_broker(cluster, queues, committed_by(group), "the committed offsets are", failures)


def committed_by(group: str) -> FetchOffsets[int | None]:
    """Return the function for `fetch_each` that requests the offsets that `group` has committed."""
    return lambda broker, queues: broker.query_offsets(group, queues)


def nearest_available(offset: int, first: int, last: int) -> int:
    """Return the offset nearest to `offset` that is in a queue with the messages from `first` to before `last`."""
    return min(max(offset, first), max(first, last))


async def fetch_each(
    broker: Broker, queues: Sequence[MessageQueue], fetch: FetchOffsets[V]
) -> dict[MessageQueue, V | RocketError]:
    """Return the result of `fetch` for each of the queues, which are all at `broker`, or the error of that queue.

    It passes many queues at a time. If the broker responds for none of them, the rest have the same error.
    """
    found: dict[MessageQueue, V | RocketError] = {}
    for begin in range(0, len(queues), MAX_CONCURRENT_LOOKUPS):
        batch = queues[begin : begin + MAX_CONCURRENT_LOOKUPS]
        try:
            responses = await fetch(broker, batch)
        except RocketError as error:
            responses = dict.fromkeys(batch, error)
        found |= responses
        if all(isinstance(each, _NO_RESPONSE) for each in responses.values()):
            return dict.fromkeys(queues, responses[batch[0]]) | found
    return found


async def _fetch_by_broker(
    cluster: Cluster,
    queues: Iterable[MessageQueue],
    fetch: FetchOffsets[V],
    what: str,
    failures: dict[str, RocketError] | None = None,
) -> dict[MessageQueue, V]:
    """Return the results of `fetch` from all brokers concurrently. `what` begins the text of its error."""
    at_broker = by_broker(queues)
    surveys = await asyncio.gather(*(fetch_each(cluster.broker(name), each, fetch) for name, each in at_broker.items()))
    found: dict[MessageQueue, V] = {}
    failed: dict[str, RocketError] = {}
    for name, responses in zip(at_broker, surveys, strict=True):
        for queue, offset in responses.items():
            if isinstance(offset, RocketError):
                failed.setdefault(name, offset)
            else:  # a broker returns -1 for a queue that it does not have yet
                found[queue] = offset if offset is None else max(0, offset)
    if failures is not None:
        failures.update(failed)
    elif failed:
        reasons = "; ".join(f"{name}: {error}" for name, error in sorted(failed.items()))
        raise RocketError(f"{what} not known of {len(failed)} of {len(at_broker)} brokers: {reasons}") from next(
            iter(failed.values())
        )
    return found
