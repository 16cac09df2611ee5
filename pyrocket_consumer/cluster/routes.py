"""Where topics live and where brokers are: asked once, shared, refreshed, and kept while name servers are away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from pyrocket_consumer.errors import ConnectError, ConnectionLost, RequestTimeout, RocketError
from pyrocket_consumer.model import MASTER_ID, BrokerData, QueueData, TopicRoute
from pyrocket_consumer.text import logger

log = logger("cluster")

AddressTable = Mapping[str, Mapping[int, str]]
"""Broker name -> broker id -> address."""

OnChange = Callable[["TopicRoute | None", "frozenset[str]", "frozenset[str]"], None]
"""Called with a route that is new or differs (None: one was forgotten), and the broker addresses that came and went."""

_NO_ADDRESSES: frozenset[str] = frozenset()
_MIN_GAP_S = 0.05


class Routes:
    """The routes of the topics a client has asked for. Any thread may read; the rest is confined to the I/O thread."""

    def __init__(self, fetch: Callable[[str], Awaitable[TopicRoute]], on_change: OnChange) -> None:
        self._fetch_from_name_server = fetch
        self._on_change = on_change
        self._known: dict[str, TopicRoute] = {}  # in the order they changed: the latest is the truest
        self._stale: set[str] = set()  # those whose last refresh was refused
        self._fetching: dict[str, asyncio.Task[TopicRoute]] = {}
        self._requested_at: dict[str, float] = {}
        self.brokers: AddressTable = {}  # replaced, never changed
        self.former: AddressTable = {}  # where brokers were that no route names now; the same
        self.addresses: frozenset[str] = frozenset()

    @property
    def topics(self) -> list[str]:
        """The topics whose routes are known, and kept fresh."""
        return list(self._known)

    def known(self, topic: str) -> TopicRoute | None:
        """Return what is known of `topic` without asking."""
        return self._known.get(topic)

    async def get(self, topic: str, *, refresh: bool = False, after: float | None = None) -> TopicRoute:
        """Return the route of `topic`; ask for it if it is not known, or if `refresh` is set.

        With `after`, ask unless it was asked for since that time of the loop; and not at once if it was a moment ago,
        so that thousands whose messages are refused one after the other do not ask one by one.

        Callers at the same time share one request. A request that fails leaves what is known as it is.
        """
        if after is not None:
            now = asyncio.get_running_loop().time()
            if (
                topic not in self._fetching
                and (wait_s := self._requested_at.get(topic, -_MIN_GAP_S) + _MIN_GAP_S - now) > 0
            ):
                await asyncio.sleep(wait_s)
            refresh = topic in self._fetching or self._requested_at.get(topic, after) <= after
        if not refresh and (route := self._known.get(topic)) is not None:
            return route
        task = self._fetching.get(topic)
        if task is None:
            loop = asyncio.get_running_loop()
            self._requested_at[topic] = loop.time()
            task = loop.create_task(self._fetch(topic))
            task.add_done_callback(_consume_exception)
            self._fetching[topic] = task
        return await asyncio.shield(task)

    async def _fetch(self, topic: str) -> TopicRoute:
        try:
            route = sort_route(await self._fetch_from_name_server(topic))
        finally:
            if is_wanted := self._fetching.get(topic) is asyncio.current_task():
                del self._fetching[topic]
                if topic not in self._known:
                    self._requested_at.pop(topic, None)
        if not is_wanted:  # the topic was forgotten meanwhile
            return route
        previous = self._known.get(topic)
        if route == previous:
            return previous
        if previous is not None:
            self._known = {other: known for other, known in self._known.items() if other != topic} | {topic: route}
            self._on_change(route, *self._update_brokers())
        else:
            self._known[topic] = route
            news = any(self.brokers.get(broker.broker_name) != broker.addresses for broker in route.brokers)
            self._on_change(route, *(self._update_brokers() if news else (_NO_ADDRESSES, _NO_ADDRESSES)))
        return route

    async def refresh(self) -> None:
        """Ask again for every known route, one after the other; those that cannot be had stay as they are.

        When no name server answers, the others are not asked about either: that would take a deadline each.
        """
        for topic in self.topics:
            if topic not in self._known:
                continue
            try:
                await self.get(topic, refresh=True)
            except (ConnectError, ConnectionLost, RequestTimeout) as error:
                log.warning("routes stay as they are known reason=%s", error)
                return
            except RocketError as error:
                log.log(logging.DEBUG if topic in self._stale else logging.WARNING, "route kept reason=%s", error)
                self._stale.add(topic)
            else:
                self._stale.discard(topic)

    def forget(self, topic: str) -> None:
        """Keep the route of `topic` fresh no longer; brokers that only it names are forgotten, too."""
        self._fetching.pop(topic, None)
        if topic in self._known:
            self._known = {other: known for other, known in self._known.items() if other != topic}
            self._requested_at.pop(topic, None)
            self._on_change(None, *self._update_brokers())

    def release_address(self, address: str) -> None:
        """Forget the former address of a broker."""
        left = {
            name: {its_id: each for its_id, each in ids.items() if each != address} for name, ids in self.former.items()
        }
        self.former = {name: ids for name, ids in left.items() if ids}

    def _update_brokers(self) -> tuple[frozenset[str], frozenset[str]]:
        now = address_table(self._known.values())
        names = self.brokers.keys() | self.former.keys()
        gone = {
            name: {its_id: each for its_id, each in ids.items() if its_id not in now.get(name, {})}
            for name in names
            for ids in ({**self.former.get(name, {}), **self.brokers.get(name, {})},)
        }
        self.former = {name: ids for name, ids in gone.items() if ids}
        self.brokers = now
        before, self.addresses = (
            self.addresses,
            frozenset(address for ids in self.brokers.values() for address in ids.values()),
        )
        return self.addresses - before, before - self.addresses

    def masters(self) -> frozenset[str]:
        """Return the addresses of all known masters."""
        return frozenset(ids[MASTER_ID] for ids in self.brokers.values() if MASTER_ID in ids)

    def address(self, broker_name: str, broker_id: int = MASTER_ID, *, only_this: bool = False) -> str | None:
        """Return where to reach a broker: at the id asked for, else, unless `only_this`, at the next best one.

        One that no route names any more is reached where it was, until that is let go.
        """
        address = choose_address(self.brokers.get(broker_name, {}), broker_id, only_this=only_this)
        return address or self.former.get(broker_name, {}).get(broker_id)


def choose_address(addresses: Mapping[int, str], broker_id: int, *, only_this: bool = False) -> str | None:
    """Return the address with `broker_id`; if it is a slave's and missing that of the next id; else any.

    Source: MQClientInstance.findBrokerAddressInSubscribe.
    """
    address = addresses.get(broker_id)
    if address is not None or only_this:
        return address
    if broker_id != MASTER_ID and (address := addresses.get(broker_id + 1)) is not None:
        return address
    return addresses[min(addresses)] if addresses else None


def address_table(routes: Iterable[TopicRoute]) -> dict[str, dict[int, str]]:
    """Return the addresses of all brokers in `routes`; where two differ, the later one counts."""
    return {broker.broker_name: dict(broker.addresses) for route in routes for broker in route.brokers}


def sort_route(route: TopicRoute) -> TopicRoute:
    """Return `route` with its parts sorted by broker name, so that equal routes compare as equal."""

    def by_name(part: QueueData | BrokerData) -> str:
        return part.broker_name

    queues, brokers = tuple(sorted(route.queues, key=by_name)), tuple(sorted(route.brokers, key=by_name))
    return replace(route, queues=queues, brokers=brokers)


def _consume_exception(task: asyncio.Task[TopicRoute]) -> None:
    """Take note of the outcome: when every caller has gone, nobody else does."""
    if not task.cancelled():
        task.exception()
