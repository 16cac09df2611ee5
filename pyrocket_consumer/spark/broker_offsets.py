"""The driver's requests to brokers: which queues exist, their first and last offsets, and a group's offsets.

A query runs for months, and brokers fail and restart meanwhile. So requests are repeated while the error may pass. The
queues of an unreachable broker keep the offsets known so far, and the query continues with the other queues.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from pyrocket_consumer.admin.topics import list_topics
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.gather import StragglerPoll, by_broker, gather_at_brokers
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.cluster.offset_lookup import (
    MAX_CONCURRENT_LOOKUPS,
    FetchOffsets,
    committed_by,
    fetch_each,
    fetch_queues,
)
from pyrocket_consumer.errors import (
    BrokerError,
    ConfigError,
    ConnectError,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.bodies import CheckClientConfig, encode_check_client_config
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.command import CheckClientConfigHeader
from pyrocket_consumer.protocol.subscription import TAG
from pyrocket_consumer.spark.failures import WARN_AFTER_FAILURES, RetryPolicy
from pyrocket_consumer.spark.offsets import (
    EARLIEST,
    LATEST,
    Bound,
    GivenOffsets,
    NamedOffset,
    QueueRange,
    StoredAt,
    in_order,
    join_first,
)
from pyrocket_consumer.spark.options import SourceOptions
from pyrocket_consumer.spark.pushed_filters import Span
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.backoff import Backoff

log = logger("spark")

T = TypeVar("T")
V = TypeVar("V", int, int | None)

CLOCK_SKEW_MS = 10_000
"""The most by which the clocks of one queue's masters may differ."""

_FIRST_PAUSE_S = 0.1
_MAX_RECONNECT_PAUSE_S = 5.0  # between two attempts to reach an unreachable broker
_AUTO_CREATE_TOPIC = "TBW102"  # the template from which brokers create topics on demand
_DISCOVERY = ""  # the key of route discovery among the names of brokers
_TRANSIENT = (ConnectError, ConnectionLost, RequestTimeout, RouteNotFound)


class _NoSuchTopic(RouteNotFound):
    """Brokers are up, and none of them has had the topic for the whole startup grace."""


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """The offsets that the brokers reported at one moment.

    `ends` has the end offset of each queue whose broker responded. `begins` has the oldest offset of queues with unread
    messages. `unreachable` gives the reason for each known queue whose broker did not respond. `gone` are those of them
    whose broker is up and no longer has the queue. `unresponsive` names the servers that should have responded and did
    not. `requested_ms` has the time of the request to each broker.
    """

    begins: Mapping[MessageQueue, int]
    ends: Mapping[MessageQueue, int]
    unreachable: Mapping[MessageQueue, str]
    gone: frozenset[MessageQueue]
    unresponsive: frozenset[str]
    requested_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _QueueBounds:
    """The first and last offsets of one broker's queues, and the time of the request."""

    requested_ms: int
    begins: Mapping[MessageQueue, int]
    ends: Mapping[MessageQueue, int]


class BrokerOffsets:
    """Fetches offsets from brokers. Its methods block; use it in one thread. The first call connects.

    It searches for new queues at most every `discovery_interval_s` seconds.
    """

    def __init__(self, options: SourceOptions, *, discovery_interval_s: float = 5.0) -> None:
        self._options = options
        self._discovery_interval_s = discovery_interval_s
        self._cluster: Cluster | None = None
        self._queues: frozenset[MessageQueue] = frozenset()
        self._discovered_at: float | None = None
        self._knows_queues = True
        self._gone: frozenset[MessageQueue] = frozenset()
        self._poll = StragglerPoll[_QueueBounds | None]()
        self._last_bounds: dict[str, _QueueBounds | None] = {}  # the last responses, by broker
        self._unreachable: dict[str, tuple[Backoff, str]] = {}  # when to try a broker again, and why it is unreachable
        self._filter_checked: set[str] = set()  # brokers that accept the SQL filter
        self._warned_of: set[str] = set()

    # --- life

    @property
    def cluster(self) -> Cluster:
        """The connected cluster.

        Raises:
            ConnectError: no name server responded in any attempt.
        """
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster

    def _connect(self) -> Cluster:
        config = self._options.client.config()
        retry_policy = self._options.read.retry_policy()
        while True:
            cluster = Cluster(config, make_client_id(config))
            try:
                cluster.start()
                return cluster
            except _TRANSIENT as error:
                if (pause_s := retry_policy.failed()) is None:
                    raise
                self._warn_retrying(error, retry_policy)
            time.sleep(pause_s)

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        if self._cluster is not None:
            with suppress(RocketError):
                self._cluster.run(self._poll.stop(), self._options.client.request_timeout_s)
            self._cluster.close()
            self._cluster = None

    # --- queues

    def discover(self, *, follows: bool = False) -> frozenset[MessageQueue]:
        """Return all queues that the options choose.

        With `follows`, a topic of `subscribe` may be missing so far if brokers create topics on demand.

        Raises:
            ConfigError: a queue of `assign` does not exist, or a broker refuses the filter.
            RouteNotFound: a topic of `subscribe` does not exist.
            RocketError: no server responded in any attempt.
        """
        startup_grace = self._options.read.startup_grace()
        return self.cluster.run(self._retry(lambda: self._discover(startup_grace, follows)), None)

    async def _discover(self, startup_grace: RetryPolicy, follows: bool) -> frozenset[MessageQueue]:
        named = list(await self._named_topics())
        outcomes = await asyncio.gather(
            *(self.cluster.routes.get(topic, refresh=True) for topic in named), return_exceptions=True
        )
        existing = list[MessageQueue]()
        for topic, outcome in zip(named, outcomes, strict=True):
            if isinstance(outcome, RouteNotFound):
                if not await self._brokers_up():
                    startup_grace.reset()  # a broker that starts may have no topics for a moment
                    raise outcome
                if startup_grace.failed() is not None:
                    raise outcome
                if not (follows and topic in self._options.topics and await self._creates_topics()):
                    raise _NoSuchTopic(topic, outcome.name_servers)
                log.warning("topic=%s does not exist yet; once created, it is read from its first message", topic)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                existing += outcome.consume_queues()
        if unknown := set(self._options.assigned).difference(existing):
            topics = {queue.topic for queue in unknown}
            others = [queue for queue in existing if queue.topic in topics]
            raise ConfigError(
                f"option assign names {join_first(sorted(unknown))}; there are {join_first(sorted(others))}"
            )
        queues = frozenset(filter(self.selects, existing))
        await self._check_filter(queues)
        self._queues, self._discovered_at = queues, time.monotonic()
        return queues

    async def _creates_topics(self) -> bool:
        """Return whether a broker creates topics on demand."""
        try:
            await self.cluster.routes.get(_AUTO_CREATE_TOPIC, refresh=True)
        except RouteNotFound:
            return False
        return True

    async def _named_topics(self) -> Collection[str]:
        options = self._options
        if options.pattern is None:
            return options.topics or {queue.topic for queue in options.assigned}
        pattern, namespace = re.compile(options.pattern), options.client.namespace
        names = await list_topics(self.cluster, include_system=False)
        return [wrap(namespace, name) for name in names if pattern.fullmatch(name)]

    def selects(self, queue: MessageQueue) -> bool:
        """Return whether the options choose `queue`. A restart may have changed the options."""
        options = self._options
        return queue in options.assigned if options.assigned else options.chooses(queue.topic)

    async def _rediscover(self, known: Iterable[MessageQueue]) -> None:
        """Find the queues that exist now, known and new ones. An error leaves the set of queues as it was.

        A topic without a route has no queues. Its route does not show whether it was deleted or its brokers are down.
        """
        known = list(filter(self.selects, known))
        topics = {queue.topic for queue in known}
        found, gone = frozenset[MessageQueue](), frozenset[MessageQueue]()
        try:
            found = await self._find_queues(topics)
            if missing := frozenset(known) - found:
                up = await self._brokers_up()  # they would have the queues if these existed
                gone = frozenset(queue for queue in missing if queue.broker_name in up)
            if gone:  # or their broker has only just restarted
                found = await self._find_queues(topics)
            self._knows_queues = True
        except _TRANSIENT as error:
            log.log(logging.WARNING if self._knows_queues else logging.DEBUG, "the known queues are kept: %s", error)
            self._knows_queues = False
            found, gone = self._queues or frozenset(known), frozenset()
        await self._check_filter(found)
        self._queues, self._gone, self._discovered_at = found, gone - found, time.monotonic()

    async def _find_queues(self, known_topics: Iterable[str]) -> frozenset[MessageQueue]:
        found = await fetch_queues(self.cluster, {*await self._named_topics(), *known_topics})
        return frozenset(filter(self.selects, chain.from_iterable(found.values())))

    async def _check_filter(self, queues: Collection[MessageQueue]) -> None:
        """Have each broker check the SQL filter, because reads with a bad one would return everything."""
        selector = self._options.read.selector
        if selector.expression_type == TAG:
            return
        for broker, topic in {queue.broker_name: queue.topic for queue in sorted(queues)}.items():
            address = self.cluster.routes.address(broker)
            if broker in self._filter_checked or address is None:
                continue
            subscription = replace(selector, topic=topic)
            body = encode_check_client_config(
                CheckClientConfig(self.cluster.client_id, self._options.read.group, subscription)
            )
            try:
                await self.cluster.call(address, CheckClientConfigHeader(), body)
            except BrokerError as error:
                raise ConfigError(
                    f"option sqlFilter={selector.expression!r} is refused by broker {broker}: {error.remark}; correct "
                    "it, or have the broker filter with enablePropertyFilter=true in its configuration"
                ) from error
            except _TRANSIENT as error:
                log.debug("broker=%s could not check the filter reason=%s", broker, error)
                continue
            self._filter_checked.add(broker)

    # --- offsets for a query that starts: each queue must have one

    def begins(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset of the oldest message of each queue."""
        return self._fetch_offsets(queues, Broker.min_offsets)

    def ends(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the end offset of each queue, which its next message will have."""
        return self._fetch_offsets(queues, Broker.max_offsets)

    def _fetch_offsets(self, queues: Collection[MessageQueue], fetch: FetchOffsets[V]) -> dict[MessageQueue, V]:
        """Return the offset that `fetch` gives for each queue; retry those that failed."""

        async def fetch_all() -> dict[MessageQueue, V]:
            at_broker = by_broker(sorted(queues, key=in_order))
            found = await asyncio.gather(*(self._fetch_all(each, fetch, self._retry) for each in at_broker.values()))
            return {queue: offset for responses in found for queue, offset in responses.items()}

        return self.cluster.run(fetch_all(), None) if queues else {}

    async def _fetch_all(
        self,
        queues: Sequence[MessageQueue],
        fetch: FetchOffsets[V],
        retry: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> dict[MessageQueue, V]:
        """Return the result of `fetch` for each queue of a broker. Each call by `retry` fetches those that failed."""
        found: dict[MessageQueue, V] = {}

        async def fetch_rest() -> None:
            failed = list[RocketError]()
            rest = [queue for queue in queues if queue not in found]
            for queue, response in (await fetch_each(self.cluster.broker(rest[0].broker_name), rest, fetch)).items():
                if isinstance(response, RocketError):
                    failed.append(response)
                else:
                    found[queue] = response
            if failed:  # raise a permanent error first
                raise next(filter(_is_refusal, failed), failed[0])

        if queues:
            await retry(fetch_rest)
        return found

    def resolve(
        self, bound: Bound, queues: Collection[MessageQueue], chosen: Collection[MessageQueue] | None = None
    ) -> dict[MessageQueue, int]:
        """Return the offset of each queue at `bound`. A queue without an offset of the group starts at its oldest one.

        `chosen` are all queues that the options choose; `queues` may be some of them.

        Raises:
            ConfigError: the option gives offsets or times, but not for each of the chosen queues.
        """
        chosen = queues if chosen is None else chosen
        if isinstance(bound, StoredAt):
            bound.check(queue.topic for queue in chosen)
            times_ms = {queue: at_ms for queue in queues if (at_ms := bound.of(queue.topic)) is not None}
            return self._fetch_each(
                queues, lambda queue: self._retry(lambda: self._search_offset(queue, times_ms[queue]))
            )
        if isinstance(bound, GivenOffsets):
            bound.check(chosen)
            given = {queue: offset for queue in queues if (offset := bound.offset(queue)) is not None}
            oldest = self.begins([queue for queue, offset in given.items() if offset == EARLIEST])
            latest = self.ends([queue for queue, offset in given.items() if offset == LATEST])
            return {**given, **oldest, **latest}
        if bound is NamedOffset.EARLIEST:
            return self.begins(queues)
        if bound is NamedOffset.LATEST:
            return self.ends(queues)
        committed = self._fetch_offsets(queues, committed_by(self._options.read.group))
        found = {queue: offset for queue, offset in committed.items() if offset is not None}
        return {**found, **self.begins([queue for queue in queues if queue not in found])}

    async def _search_offset(self, queue: MessageQueue, at_ms: int) -> int:
        broker = self.cluster.broker(queue.broker_name)
        return await broker.search_offset(queue, at_ms, group=self._options.read.group)

    def narrow_by_time(self, ranges: Collection[QueueRange], stored_ms: Span) -> dict[MessageQueue, QueueRange]:
        """Return each range, one per queue, narrowed to all messages stored within `stored_ms`, and maybe more.

        Store times within a queue may be out of order by `CLOCK_SKEW_MS`, because its master may have changed.
        """
        by_queue = {each.queue: each for each in ranges}
        return self._fetch_each(by_queue.keys(), lambda queue: self._narrow_by_time(by_queue[queue], stored_ms))

    async def _narrow_by_time(self, whole: QueueRange, stored_ms: Span) -> QueueRange:
        """Search both edges. Accept an offset only if the messages there confirm it, or messages could be lost.

        The search has a margin of CLOCK_SKEW_MS, because store times within a queue may be out of order by that much.
        One message with a wrong clock misleads a search. So the neighbour and the last message must confirm it, too.
        """
        queue, begin, end = whole.queue, whole.begin, whole.end

        async def search(at_ms: int) -> int:
            return await self._retry(lambda: self._search_offset(queue, max(0, at_ms)))

        async def confirm(offsets: Sequence[int], is_outside: Callable[[int], bool]) -> bool:
            times_ms = [await self._retry(partial(self._fetch_stored_ms, queue, offset)) for offset in offsets]
            if times_ms[0] is None or not is_outside(times_ms[0]):
                return False
            agree = all(is_outside(each) for each in times_ms if each is not None)
            if not agree:
                log.warning("queue=%s is read to its edge on one side, its store times are out of order", queue)
            return agree

        try:
            if stored_ms.low is not None:
                low, offset = stored_ms.low, await search(stored_ms.low - CLOCK_SKEW_MS - 1)
                before = sorted({begin, max(begin, offset - 2), offset - 1}, reverse=True)
                if offset > begin and await confirm(before, lambda at_ms: at_ms < low):
                    begin = min(offset, end)
            if stored_ms.high is not None and begin < end:
                high, offset = stored_ms.high, await search(stored_ms.high + CLOCK_SKEW_MS + 1)
                behind = sorted({offset, min(offset + 1, end - 1), end - 1})
                if 0 <= offset < end and await confirm(behind, lambda at_ms: at_ms > high):
                    end = max(offset, begin)
        except (BrokerError, ProtocolError) as error:
            if isinstance(error, BrokerError) and error.retryable:
                raise
            log.debug("queue=%s is read completely, a search by time failed reason=%s", queue, error)
            return whole
        return QueueRange(queue, begin, end)

    async def _fetch_stored_ms(self, queue: MessageQueue, offset: int) -> int | None:
        """Return when the message at exactly `offset` was stored; None without such a message."""
        broker, subscription = self.cluster.broker(queue.broker_name), Subscription(queue.topic)
        group = self._options.read.group
        _, found = await broker.pull(queue, offset, group=group, subscription=subscription, max_messages=1)
        return found[0].stored_at_ms if found and found[0].queue_offset == offset else None

    def _fetch_each(
        self, queues: Collection[MessageQueue], fetch: Callable[[MessageQueue], Coroutine[Any, Any, T]]
    ) -> dict[MessageQueue, T]:
        """Return the result of `fetch` for each queue, with a limited number of calls to each broker."""
        if not queues:
            return {}
        return self.cluster.run(gather_at_brokers(sorted(queues, key=in_order), fetch, MAX_CONCURRENT_LOOKUPS), None)

    # --- offsets for a running query: brokers may be unreachable

    def stored_since(self, times_ms: Mapping[MessageQueue, int | None]) -> dict[MessageQueue, int]:
        """Return the offset of the first message stored at a time or later, or the oldest if no time is known.

        The result omits queues whose broker does not respond.
        """

        async def first_since(queue: MessageQueue) -> int | None:
            broker, at_ms = self.cluster.broker(queue.broker_name), times_ms[queue]
            try:
                if at_ms is None:
                    return await broker.min_offset(queue)
                return await self._search_offset(queue, at_ms)
            except (*_TRANSIENT, BrokerError) as error:
                log.debug("queue=%s time=%s search failed reason=%s", queue, at_ms, error)
                return None

        offsets = self._fetch_each(times_ms.keys(), first_since)
        return {queue: offset for queue, offset in offsets.items() if offset is not None}

    def snapshot(self, known: Mapping[MessageQueue, int]) -> BrokerSnapshot:
        """Return the first and last offsets of known and new queues. `known` has the next offset to read.

        A slow broker or name server does not delay the others; its response counts in a later snapshot.

        Raises:
            RocketError: a broker refuses the request.
        """
        return self.cluster.run(self._snapshot(known), None)

    async def _snapshot(self, known: Mapping[MessageQueue, int]) -> BrokerSnapshot:
        requests: dict[str, Callable[[], Coroutine[Any, Any, _QueueBounds | None]]] = {}
        now = time.monotonic()
        if self._discovered_at is None:
            await self._rediscover(known)
        elif now - self._discovered_at >= self._discovery_interval_s:
            requests[_DISCOVERY] = partial(self._rediscover, known)
        queues = self._queues
        for broker, each in by_broker(sorted(queues, key=in_order)).items():
            if broker not in self._unreachable or now >= self._unreachable[broker][0].until:
                requests[broker] = partial(self._fetch_bounds, broker, each, known)
        responses = await self._poll.poll(requests)
        self._last_bounds |= responses
        found = {broker: bounds for broker in requests if (bounds := self._last_bounds.get(broker)) is not None}
        begins: dict[MessageQueue, int] = {}
        ends: dict[MessageQueue, int] = {}
        for broker, bounds in found.items():
            begins.update(bounds.begins)
            for queue, end in bounds.ends.items():  # the last response of a late broker may be older than `known`
                ends[queue] = end if broker in responses else max(end, known.get(queue, 0))
        return BrokerSnapshot(
            begins=begins,
            ends=ends,
            unreachable={queue: self._why_unreachable(queue) for queue in known if queue not in ends},
            gone=self._gone.intersection(known) - queues,
            unresponsive=frozenset(queue.broker_name for queue in queues if queue not in ends)
            | frozenset(() if self._knows_queues else self.cluster.config.name_servers),
            requested_ms={broker: bounds.requested_ms for broker, bounds in found.items()},
        )

    def _why_unreachable(self, queue: MessageQueue) -> str:
        if not self.selects(queue):
            return "the options no longer choose it"
        if queue.broker_name in self._unreachable:
            return self._unreachable[queue.broker_name][1]
        return "its broker has not responded yet" if queue in self._queues else "no route names it"

    async def _fetch_bounds(
        self, name: str, queues: list[MessageQueue], known: Mapping[MessageQueue, int]
    ) -> _QueueBounds | None:
        """Return the bounds of one broker's queues, None if it is unreachable. The first queue alone tests that.

        A queue without unread messages needs no first offset, so none is requested.
        """
        requested_ms = now_ms()
        try:
            ends = await self._fetch_all(queues[:1], Broker.max_offsets, _retry_once)
            ends |= await self._fetch_all(queues[1:], Broker.max_offsets, _retry_once)
            unread = [queue for queue, end in ends.items() if queue not in known or end > known[queue]]
            begins = await self._fetch_all(unread, Broker.min_offsets, _retry_once)
        except (*_TRANSIENT, BrokerError) as error:
            if isinstance(error, BrokerError) and not (error.retryable or error.code == ResponseCode.TOPIC_NOT_EXIST):
                raise
            backoff, _ = self._unreachable.get(name) or (Backoff(_FIRST_PAUSE_S, _MAX_RECONNECT_PAUSE_S), "")
            backoff.failed(time.monotonic())
            self._unreachable[name] = backoff, str(error)
            return None
        self._unreachable.pop(name, None)
        return _QueueBounds(requested_ms, begins, ends)

    async def _brokers_up(self) -> Collection[str]:
        try:
            return (await self.cluster.name_servers.cluster_info()).brokers
        except RocketError as error:
            log.debug("brokers could not be listed reason=%s", error)
            return ()

    def expire_discovery(self) -> None:
        """Make the next snapshot discover queues again, and try every broker."""
        self._discovered_at = None
        for backoff, _ in self._unreachable.values():
            backoff.until = 0.0

    # --- retries

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call()`; repeat it, with growing pauses, while it fails for a reason that may pass."""
        retry_policy = self._options.read.retry_policy()
        while True:
            try:
                return await call()
            except (*_TRANSIENT, BrokerError) as error:
                if isinstance(error, _NoSuchTopic) or _is_refusal(error) or (pause_s := retry_policy.failed()) is None:
                    raise
                self._warn_retrying(error, retry_policy)
            await asyncio.sleep(pause_s)

    def _warn_retrying(self, error: RocketError, retry_policy: RetryPolicy) -> None:
        """Warn once of each error that lasts for several attempts."""
        if retry_policy.failures == WARN_AFTER_FAILURES and (text := str(error)) not in self._warned_of:
            self._warned_of.add(text)
            log.warning("retrying for at most %g s: %s", self._options.read.read_timeout_s, text)


def now_ms() -> int:
    """Return the next millisecond, counted since 1970."""
    return time.time_ns() // 1_000_000 + 1


def _is_refusal(error: RocketError) -> bool:
    """Return whether a broker refused the request, and would refuse it again."""
    return isinstance(error, BrokerError) and not error.retryable


async def _retry_once(call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except (ConnectError, ConnectionLost):
        await call()  # the connection had closed since the last snapshot
