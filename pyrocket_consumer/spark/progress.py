"""Tells the brokers how far a query is, in the name of a group: for people and tools, never for the query itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Iterable, Mapping

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.errors import ConnectError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.options import listed

log = logging.getLogger("pyrocket_consumer.spark")

_WARNING_INTERVAL_S = 60.0


class GroupProgress:
    """Publishes finished positions as the offsets of a group: in the background, best effort, only forward.

    Others may move the group meanwhile, most often with a reset. The query is not moved by that, which one warning
    says. While there is nothing to publish, the group is looked at every `check_interval_s` seconds.
    """

    def __init__(self, cluster: Cluster, group: str, *, check_interval_s: float = 10.0) -> None:
        self._cluster = cluster
        self._group = group
        self._check_interval_s = check_interval_s
        self._seen: dict[MessageQueue, int | None] = {}  # what the brokers had when we were done with them
        self._wanted: Mapping[MessageQueue, int] = {}
        self._published: Mapping[MessageQueue, int] = {}
        self._refused: frozenset[MessageQueue] = frozenset()
        self._checked_at = 0.0
        self._warned_at: float | None = None
        self._under_way: concurrent.futures.Future[None] | None = None

    def publish(self, positions: Mapping[MessageQueue, int]) -> None:
        """Have `positions` published; returns at once. Those given later replace these."""
        self._wanted = positions
        if self._under_way is not None and not self._under_way.done():
            return
        now = time.monotonic()
        check_all = now - self._checked_at >= self._check_interval_s
        if positions == self._published and not check_all:
            return
        if check_all:
            self._checked_at = now
        queues = [queue for queue in positions if check_all or positions[queue] != self._published.get(queue)]
        self._under_way = self._cluster.submit(self._publish(dict(positions), queues))

    def flush(self, timeout_s: float) -> None:
        """Wait until what is wanted is published, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._under_way is not None:
            try:
                self._under_way.result(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, concurrent.futures.CancelledError):
                return
            if self._published == self._wanted:
                return
            self._under_way = None
            self.publish(self._wanted)

    async def _publish(self, positions: Mapping[MessageQueue, int], queues: Iterable[MessageQueue]) -> None:
        """Publish at all brokers at once, and at each one topic after the other.

        Two first commits of a topic at the same time can make a broker forget one of them.
        """
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            by_broker.setdefault(queue.broker_name, []).append(queue)
        moved = list[str]()
        await asyncio.gather(*(self._publish_at(name, each, positions, moved) for name, each in by_broker.items()))
        self._published = positions
        now = time.monotonic()
        if moved and (self._warned_at is None or now - self._warned_at >= _WARNING_INTERVAL_S):
            self._warned_at = now
            log.warning(
                "group=%s is not where this query put it: %s. A reset, another consumer of the group, or a broker that "
                "lost commits did that. The query is not moved: its checkpoint alone decides what it reads. To read "
                "from another place, start a query with startingOffsets and a new checkpoint",
                self._group,
                listed(moved),
            )

    async def _publish_at(
        self, name: str, queues: list[MessageQueue], positions: Mapping[MessageQueue, int], moved: list[str]
    ) -> None:
        for queue in queues:
            try:
                await self._publish_one(queue, positions[queue], moved)
            except RocketError as error:
                log.debug("group=%s queue=%s progress was not published reason=%s", self._group, queue, error)
                if isinstance(error, (ConnectError, RequestTimeout)):
                    return  # it would be the same for the others

    async def _publish_one(self, queue: MessageQueue, position: int, moved: list[str]) -> None:
        broker = self._cluster.broker(queue.broker_name)
        stored = await broker.query_offset(self._group, queue, set_zero_if_not_found=False)
        before = self._seen.get(queue, stored)
        taken = True
        goes_back = stored == before and position < self._published.get(queue, 0)  # the query itself did, after a loss
        if stored is None or stored < position or goes_back:
            taken = await broker.commit_offset(self._group, queue, position)
        if stored != before:
            moved.append(f"{queue} at {stored}, was {before}")
        elif not taken and queue not in self._refused:
            moved.append(f"{queue}, where a reset to {stored} waits to be read")
        self._refused = self._refused - {queue} if taken else self._refused | {queue}
        self._seen[queue] = position if taken and (stored is None or stored < position or goes_back) else stored
