"""Which queues there are, where they begin and end, and where a group is: what the driver asks brokers.

Brokers fail, restart and come back while a query runs for months. So whatever can be asked again is; and what a broker
that is away has, is left as it was known, while the others go on.
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
from typing import Any, TypeVar

from pyrocket_consumer.admin.masters import cluster_info
from pyrocket_consumer.admin.topics import list_topics
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.namespace import wrap
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
from pyrocket_consumer.spark.options import (
    EARLIEST,
    LATEST,
    TIME_BOUNDS,
    Bound,
    GivenOffsets,
    NamedOffset,
    SourceOptions,
    StoredAtByTopic,
    listed,
)
from pyrocket_consumer.spark.pushed_filters import Span
from pyrocket_consumer.spark.ranges import QueueRange, in_order
from pyrocket_consumer.spark.retry_policy import WARN_AFTER_FAILURES, RetryPolicy
from pyrocket_consumer.spark.straggler_poll import StragglerPoll
from pyrocket_consumer.text import logger

log = logger("spark")

T = TypeVar("T")
Q = TypeVar("Q")

FetchOffsets = Callable[[Broker, Sequence[MessageQueue]], Awaitable[dict[MessageQueue, int | RocketError]]]

MAX_CONCURRENT_CALLS = 64
"""Calls under way to one broker."""

CLOCK_SKEW_MS = 10_000
"""By so much the clocks of brokers that were masters of one queue may differ."""

_GROUP_SIZE = 32  # so many are sent and awaited as one: that takes less than half the time of as many single ones

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0  # between two attempts to reach a broker that is away
_AUTO_CREATE_TOPIC = "TBW102"  # what brokers that make topics on demand make them like
_DISCOVERY = ""  # among the names of brokers
_TRANSIENT = (ConnectError, ConnectionLost, RequestTimeout, RouteNotFound)


class _NoSuchTopic(RouteNotFound):
    """Brokers are up, and for a while none of them has had the topic."""


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """What the brokers said at one moment.

    `ends` has the end of each queue that answered, `begins` the oldest offset of those with something to read. `unreachable`
    are queues, known before, that cannot be asked now, and why; `gone` those of them whose broker is up and has them
    no more. `unresponsive` are the servers that should have answered, and did not. `requested_ms` is when each broker was asked.
    """

    begins: Mapping[MessageQueue, int]
    ends: Mapping[MessageQueue, int]
    unreachable: Mapping[MessageQueue, str]
    gone: frozenset[MessageQueue]
    unresponsive: frozenset[str]
    requested_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _QueueBounds:
    """Where the queues of one broker begin and end, and when it was asked."""

    requested_ms: int
    begins: Mapping[MessageQueue, int]
    ends: Mapping[MessageQueue, int]


@dataclass(slots=True)
class _UnreachableBroker:
    """A broker that did not answer: when to try again, and how long to wait if that fails, too."""

    until: float
    pause_s: float
    reason: str


class BrokerOffsets:
    """Asks the brokers. Blocking, for one thread; it connects with the first call.

    New queues are looked for at most every `discovery_interval_s` seconds.
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
        self._last_bounds: dict[str, _QueueBounds | None] = {}  # answers, by broker
        self._unreachable: dict[str, _UnreachableBroker] = {}
        self._filter_checked: set[str] = set()  # brokers that accept the SQL filter
        self._warned_of: set[str] = set()

    # --- life

    @property
    def cluster(self) -> Cluster:
        """The connected cluster.

        Raises:
            ConnectError: no name server answers, however long asked.
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
        """Return the queues there are to read, all of them.

        Where brokers make topics on demand, one of `subscribe` need not be there yet for a query that `follows`.

        Raises:
            ConfigError: a queue of `assign` does not exist, or a broker refuses the filter.
            RouteNotFound: a topic of `subscribe` does not exist.
            RocketError: nobody answers, however long asked.
        """
        startup_grace = self._options.read.startup_grace()
        return self.cluster.run(self._retry(lambda: self._discover(startup_grace, follows)), None)

    async def _discover(self, startup_grace: RetryPolicy, follows: bool) -> frozenset[MessageQueue]:
        named = list(await self._named_topics())
        outcomes = await asyncio.gather(
            *(self.cluster.route(topic, refresh=True) for topic in named), return_exceptions=True
        )
        existing = list[MessageQueue]()
        for topic, outcome in zip(named, outcomes, strict=True):
            if isinstance(outcome, RouteNotFound):
                if not await self._brokers_up():
                    startup_grace.reset()  # one that starts may have no topics for a moment, however long it was away
                    raise outcome
                if startup_grace.failed() is not None:
                    raise outcome
                if not (follows and topic in self._options.topics and await self._creates_topics()):
                    raise _NoSuchTopic(topic, outcome.name_servers)
                log.warning("topic=%s is not there yet; when it is made, it is read from its first message", topic)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                existing += outcome.consume_queues()
        if unknown := set(self._options.assigned).difference(existing):
            topics = {queue.topic for queue in unknown}
            others = [queue for queue in existing if queue.topic in topics]
            raise ConfigError(f"option assign names {listed(sorted(unknown))}; there are {listed(sorted(others))}")
        queues = frozenset(filter(self.selects, existing))
        await self._check_filter(queues)
        self._queues, self._discovered_at = queues, time.monotonic()
        return queues

    async def _creates_topics(self) -> bool:
        """Tell whether some broker makes topics on demand."""
        try:
            await self.cluster.route(_AUTO_CREATE_TOPIC, refresh=True)
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
        """Tell whether the options choose `queue`; after a restart they may be others than before."""
        options = self._options
        return queue in options.assigned if options.assigned else options.chooses(queue.topic)

    async def _rediscover(self, known: Iterable[MessageQueue]) -> None:
        """Find the queues that are there now, of those known and new ones; an error leaves what was found before.

        A topic that has no route any more has no queues: whether it was deleted or its brokers are away, who knows.
        """
        known = list(filter(self.selects, known))
        topics = {queue.topic for queue in known}
        found, gone = frozenset[MessageQueue](), frozenset[MessageQueue]()
        try:
            found = await self._find_queues(topics)
            if missing := frozenset(known) - found:
                gone = await self._whose_broker_is_up(missing)
            if gone:  # or their broker has only just come back
                found = await self._find_queues(topics)
            self._knows_queues = True
        except _TRANSIENT as error:
            log.log(
                logging.WARNING if self._knows_queues else logging.DEBUG, "queues stay as they are known: %s", error
            )
            self._knows_queues = False
            found, gone = self._queues or frozenset(known), frozenset()
        await self._check_filter(found)
        self._queues, self._gone, self._discovered_at = found, gone - found, time.monotonic()

    async def _find_queues(self, known_topics: Iterable[str]) -> frozenset[MessageQueue]:
        topics = {*await self._named_topics(), *known_topics}
        outcomes = await asyncio.gather(
            *(self.cluster.route(topic, refresh=True) for topic in topics), return_exceptions=True
        )
        found = set[MessageQueue]()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, RouteNotFound):
                    raise outcome
            else:
                found.update(filter(self.selects, outcome.consume_queues()))
        return frozenset(found)

    async def _check_filter(self, queues: Collection[MessageQueue]) -> None:
        """Have each broker look at the SQL filter: reads with a bad one would return everything."""
        selector = self._options.read.selector
        if selector.expression_type == TAG:
            return
        for broker, topic in {queue.broker_name: queue.topic for queue in sorted(queues)}.items():
            address = self.cluster.address(broker)
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

    # --- offsets, of a query that begins: all queues answer, or it is an error

    def begins(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset of the oldest message of each queue."""
        return self.cluster.run(self._fetch_offsets(queues, Broker.min_offsets), None) if queues else {}

    def ends(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset that the next message of each queue will have."""
        return self.cluster.run(self._fetch_offsets(queues, Broker.max_offsets), None) if queues else {}

    async def _fetch_offsets(self, queues: Collection[MessageQueue], fetch: FetchOffsets) -> dict[MessageQueue, int]:
        """Return what `fetch` gives for each queue, asking again what failed."""

        async def at(name: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
            broker = self.cluster.broker(name)
            return await _fetch_in_groups(queues, lambda some: _fetch_all(some, partial(fetch, broker), self._retry))

        found: dict[MessageQueue, int] = {}
        for responses in await asyncio.gather(*(at(name, each) for name, each in _by_broker(queues).items())):
            found |= responses
        return found

    def resolve(
        self, bound: Bound, queues: Collection[MessageQueue], chosen: Collection[MessageQueue] | None = None
    ) -> dict[MessageQueue, int]:
        """Return the offset of each queue at `bound`. Where the group has none it is the oldest message.

        `chosen` are all queues that the options choose, where `queues` are some of them.

        Raises:
            ConfigError: what is given by queue or topic is not given for those chosen.
        """
        chosen = queues if chosen is None else chosen
        if isinstance(bound, StoredAtByTopic):
            bound.check({queue.topic for queue in chosen})
        if isinstance(bound, TIME_BOUNDS):
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
        committed = self._fetch_each(queues, lambda queue: self._retry(lambda: self._fetch_committed(queue)))
        found = {queue: offset for queue, offset in committed.items() if offset is not None}
        return {**found, **self.begins([queue for queue in queues if queue not in found])}

    async def _search_offset(self, queue: MessageQueue, at_ms: int) -> int:
        broker = self.cluster.broker(queue.broker_name)
        return await broker.search_offset(queue, at_ms, group=self._options.read.group)

    def narrow_by_time(self, ranges: Collection[QueueRange], stored_ms: Span) -> dict[MessageQueue, QueueRange]:
        """Return of each range, one per queue, what has all its messages stored in `stored_ms`, and maybe more.

        Store times need not be in order where a queue's masters change; by `CLOCK_SKEW_MS` they may differ.
        """
        by_queue = {each.queue: each for each in ranges}
        return self._fetch_each(by_queue.keys(), lambda queue: self._narrow_by_time(by_queue[queue], stored_ms))

    async def _narrow_by_time(self, whole: QueueRange, stored_ms: Span) -> QueueRange:
        """Search the edges, and believe a broker only when messages show it: a wrong edge would lose some.

        It looks for a time beyond the skew: brokers stop at a message of just that time, and by the whole skew may
        others before it be later, or others behind it be earlier. One message of a wrong clock leads a search astray,
        so the next one and the last must say the same.
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
                log.warning("queue=%s is read whole on one side, its store times are out of order", queue)
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
            log.debug("queue=%s is read whole, it could not be searched by time reason=%s", queue, error)
            return whole
        return QueueRange(queue, begin, end)

    async def _fetch_stored_ms(self, queue: MessageQueue, offset: int) -> int | None:
        """Return when the message at `offset` was stored; None if there is none just there."""
        broker, subscription = self.cluster.broker(queue.broker_name), Subscription(queue.topic)
        group = self._options.read.group
        _, found = await broker.pull(queue, offset, group=group, subscription=subscription, max_messages=1)
        return found[0].stored_at_ms if found and found[0].queue_offset == offset else None

    async def _fetch_committed(self, queue: MessageQueue) -> int | None:
        broker = self.cluster.broker(queue.broker_name)
        return await broker.query_offset(self._options.read.group, queue, set_zero_if_not_found=False)

    def _fetch_each(
        self, queues: Collection[MessageQueue], fetch: Callable[[MessageQueue], Awaitable[T]]
    ) -> dict[MessageQueue, T]:
        """Return what `fetch` gives for each queue; some at a time at each broker."""
        return self.cluster.run(self._fetch_each_async(queues, fetch), None) if queues else {}

    async def _fetch_each_async(
        self, queues: Collection[MessageQueue], fetch: Callable[[MessageQueue], Awaitable[T]]
    ) -> dict[MessageQueue, T]:
        by_broker = (_gather_limited(each, fetch, MAX_CONCURRENT_CALLS) for each in _by_broker(queues).values())
        return {queue: response for responses in await asyncio.gather(*by_broker) for queue, response in responses}

    # --- offsets, of a query that runs: brokers may be away

    def stored_since(self, times_ms: Mapping[MessageQueue, int | None]) -> dict[MessageQueue, int]:
        """Return the offset of the first message stored at a time or later, or the oldest where no time is known.

        Queues that cannot be asked now are left out.
        """

        async def first_since(queue: MessageQueue) -> int | None:
            broker, at_ms = self.cluster.broker(queue.broker_name), times_ms[queue]
            try:
                if at_ms is None:
                    return await broker.min_offset(queue)
                return await self._search_offset(queue, at_ms)
            except (*_TRANSIENT, BrokerError) as error:
                log.debug("queue=%s time=%s could not be searched for reason=%s", queue, at_ms, error)
                return None

        offsets = self._fetch_each(times_ms.keys(), first_since)
        return {queue: offset for queue, offset in offsets.items() if offset is not None}

    def snapshot(self, known: Mapping[MessageQueue, int]) -> BrokerSnapshot:
        """Return where queues begin and end: those known, with the offset to read next, and new ones.

        Servers that do not answer do not hold up the others: they are asked beside, and so are name servers.

        Raises:
            RocketError: a broker refuses to say.
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
        for broker, each in _by_broker(queues).items():
            if broker not in self._unreachable or now >= self._unreachable[broker].until:
                requests[broker] = partial(self._fetch_bounds, broker, each, known)
        responses = await self._poll.poll(requests)
        self._last_bounds |= responses
        found = {broker: bounds for broker in requests if (bounds := self._last_bounds.get(broker)) is not None}
        begins: dict[MessageQueue, int] = {}
        ends: dict[MessageQueue, int] = {}
        for broker, bounds in found.items():
            begins.update(bounds.begins)
            for queue, end in bounds.ends.items():  # of one that is late, the last answer: more may be known since
                ends[queue] = end if broker in responses else max(end, known.get(queue, 0))
        return BrokerSnapshot(
            begins=begins,
            ends=ends,
            unreachable={queue: self._why_unreachable(queue) for queue in known if queue not in ends},
            gone=self._gone.intersection(known) - queues,
            unresponsive=frozenset(queue.broker_name for queue in queues if queue not in ends)
            | frozenset(() if self._knows_queues else self.cluster.name_servers),
            requested_ms={broker: bounds.requested_ms for broker, bounds in found.items()},
        )

    def _why_unreachable(self, queue: MessageQueue) -> str:
        if not self.selects(queue):
            return "the options do not choose it any more"
        unreachable = self._unreachable.get(queue.broker_name)
        if unreachable is not None:
            return unreachable.reason
        return "its broker has not answered yet" if queue in self._queues else "no route names it"

    async def _fetch_bounds(
        self, name: str, queues: list[MessageQueue], known: Mapping[MessageQueue, int]
    ) -> _QueueBounds | None:
        """Return begins and ends of queues of one broker, None if it is away: the first queue finds out.

        Where nothing is to be read the begin does not matter, and is not asked for.
        """
        requested_ms, broker = now_ms(), self.cluster.broker(name)
        begins: dict[MessageQueue, int] = {}

        async def some_ends(some: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
            ends = await _fetch_all(some, broker.max_offsets, _retry_once)
            unread = [queue for queue, end in ends.items() if queue not in known or end > known[queue]]
            begins.update(await _fetch_all(unread, broker.min_offsets, _retry_once))
            return ends

        try:
            ends = await some_ends(queues[:1])
            ends |= await _fetch_in_groups(queues[1:], some_ends)
        except (*_TRANSIENT, BrokerError) as error:
            if isinstance(error, BrokerError) and not (error.retryable or error.code == ResponseCode.TOPIC_NOT_EXIST):
                raise
            unreachable = self._unreachable.get(name)
            pause_s = _FIRST_PAUSE_S if unreachable is None else min(2 * unreachable.pause_s, _LONGEST_PAUSE_S)
            self._unreachable[name] = _UnreachableBroker(time.monotonic() + pause_s, pause_s, str(error))
            return None
        self._unreachable.pop(name, None)
        return _QueueBounds(requested_ms, begins, ends)

    async def _whose_broker_is_up(self, missing: Iterable[MessageQueue]) -> frozenset[MessageQueue]:
        """Return those of `missing` whose broker is up: it would have them if they were there."""
        up = await self._brokers_up()
        return frozenset(queue for queue in missing if queue.broker_name in up)

    async def _brokers_up(self) -> Collection[str]:
        try:
            return (await cluster_info(self.cluster)).brokers
        except RocketError as error:
            log.debug("brokers could not be listed reason=%s", error)
            return ()

    def expire_discovery(self) -> None:
        """Have the next look find queues anew, and try every broker."""
        self._discovered_at = None
        for unreachable in self._unreachable.values():
            unreachable.until = 0.0

    # --- asking again

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what `call()` gives; repeat it, with growing pauses, while it fails for a reason that may pass."""
        retry_policy = self._options.read.retry_policy()
        while True:
            try:
                return await call()
            except (*_TRANSIENT, BrokerError) as error:
                is_permanent = isinstance(error, _NoSuchTopic) or (
                    isinstance(error, BrokerError) and not error.retryable
                )
                if is_permanent or (pause_s := retry_policy.failed()) is None:
                    raise
                self._warn_retrying(error, retry_policy)
            await asyncio.sleep(pause_s)

    def _warn_retrying(self, error: RocketError, retry_policy: RetryPolicy) -> None:
        """Warn once of each reason to wait that does not pass at once."""
        if retry_policy.failures == WARN_AFTER_FAILURES and (text := str(error)) not in self._warned_of:
            self._warned_of.add(text)
            log.warning("asking again, for %g s at most: %s", self._options.read.read_timeout_s, text)


def now_ms() -> int:
    """Return the time in milliseconds since 1970, after the one in which we are."""
    return time.time_ns() // 1_000_000 + 1


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues, key=in_order):
        found.setdefault(queue.broker_name, []).append(queue)
    return found


async def _fetch_all(
    queues: Sequence[MessageQueue],
    fetch: Callable[[Sequence[MessageQueue]], Awaitable[dict[MessageQueue, int | RocketError]]],
    retry: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
) -> dict[MessageQueue, int]:
    """Return what `fetch` gives for each queue; only those that failed are asked again, as often as `retry` calls."""
    found: dict[MessageQueue, int] = {}

    async def fetch_rest() -> None:
        failed = list[RocketError]()
        for queue, response in (await fetch([queue for queue in queues if queue not in found])).items():
            if isinstance(response, RocketError):
                failed.append(response)
            else:
                found[queue] = response
        if failed:  # one that will not pass is told first
            raise next((error for error in failed if isinstance(error, BrokerError) and not error.retryable), failed[0])

    await retry(fetch_rest)
    return found


async def _retry_once(call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except (ConnectError, ConnectionLost):
        await call()  # the connection had ended since the last look


async def _fetch_in_groups(
    queues: Sequence[MessageQueue], fetch: Callable[[Sequence[MessageQueue]], Awaitable[dict[MessageQueue, int]]]
) -> dict[MessageQueue, int]:
    """Return what `fetch` gives for each queue of one broker, asking for several at once."""
    parts = [queues[first : first + _GROUP_SIZE] for first in range(0, len(queues), _GROUP_SIZE)]
    found: dict[MessageQueue, int] = {}
    for _, responses in await _gather_limited(parts, fetch, MAX_CONCURRENT_CALLS // _GROUP_SIZE):
        found |= responses
    return found


async def _gather_limited(requests: Iterable[Q], fetch: Callable[[Q], Awaitable[T]], limit: int) -> list[tuple[Q, T]]:
    """Return each question with what `fetch` gives, with so many under way that a broker bears it."""
    rest, responses = iter(requests), list[tuple[Q, T]]()

    async def work() -> None:
        for request in rest:
            responses.append((request, await fetch(request)))

    workers = [asyncio.create_task(work()) for _ in range(limit)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return responses
