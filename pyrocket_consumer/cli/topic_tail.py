"""Read queues without joining a group. It commits nothing, and no member loses a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pyrocket_consumer.cluster import Cluster, ClusterEvents
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.offset_lookup import TOOLS_GROUP
from pyrocket_consumer.cluster.pull_core import PullCore, PullRequest
from pyrocket_consumer.errors import BrokerError, PermissionDenied, RocketError
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullStatus, Subscription, TopicRoute
from pyrocket_consumer.protocol.message import Message

MAX_MESSAGES = 4096
"""Most messages to keep of all queues while they are merged; at least one of each."""

_LARGEST_PULL = 32
_TRIES = 3
_PAUSE_S = 1.0
_HOLD_S = 15.0


_Age = tuple[int, int, MessageQueue]


@dataclass(slots=True, eq=False)
class _QueueCursor:
    """One queue: its pulls, its end offset, and the messages that were pulled and not yet returned."""

    core: PullCore
    end: int
    pulled: deque[Message] = field(default_factory=deque)

    @property
    def has_more(self) -> bool:
        return self.core.next_offset < self.end


class TopicTailer(ClusterEvents):
    """Reads queues from `begins` up to `ends` in order of time, then new messages. Confined to the I/O thread.

    It calls `report` with a sentence for the user.
    """

    def __init__(
        self,
        cluster: Cluster,
        subscription: Subscription,
        begins: Mapping[MessageQueue, int],
        ends: Mapping[MessageQueue, int],
        report: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._report = report
        self._pull_size = max(1, min(_LARGEST_PULL, MAX_MESSAGES // max(1, len(begins))))
        self._cursors = [self._cursor(queue, begins[queue], ends[queue]) for queue in sorted(begins)]
        self._empty = [each for each in self._cursors if each.has_more]  # that need a pull before the next message
        self._oldest: list[tuple[_Age, _QueueCursor]] = []  # a heap of the others, by the age of their next message
        self._arrived: asyncio.Queue[Message | RocketError] = asyncio.Queue(MAX_MESSAGES)
        self._reported: set[str] = set()  # unreachable brokers

    def _cursor(self, queue: MessageQueue, begin: int, end: int) -> _QueueCursor:
        return _QueueCursor(PullCore(queue, begin, self._pull_size), end)

    async def next_messages(self) -> list[Message]:
        """Return the next messages before the ends, the oldest first; none if all were returned.

        Raises:
            RocketError: requests to a broker failed several times.
        """
        found: list[Message] = []
        while not found and (self._empty or self._oldest):
            await gather_limited(self._empty, self._fill)
            for cursor in self._empty:
                if cursor.pulled:
                    heappush(self._oldest, (_age(cursor.pulled[0]), cursor))
            self._empty = [each for each in self._empty if each.has_more and not each.pulled]
            while self._oldest and not self._empty:
                _, cursor = heappop(self._oldest)
                found.append(cursor.pulled.popleft())
                if cursor.pulled:
                    heappush(self._oldest, (_age(cursor.pulled[0]), cursor))
                elif cursor.has_more:
                    self._empty.append(cursor)
        return found

    async def _fill(self, cursor: _QueueCursor) -> None:
        """Pull once, and again after an error that may pass."""
        core, position = cursor.core, cursor.core.next_offset
        for tries_left in reversed(range(_TRIES)):
            try:
                status, messages = await self._pull(core, 0)
                break
            except RocketError as error:
                if tries_left == 0 or (isinstance(error, BrokerError) and not error.retryable):
                    raise
                await asyncio.sleep(_PAUSE_S)
        if status is PullStatus.NO_NEW_MESSAGE or core.next_offset <= position:
            cursor.end = core.next_offset = position  # there are no more messages, so the reported end was wrong
        cursor.pulled.extend(each for each in messages if each.queue_offset < cursor.end)

    async def _pull(self, core: PullCore, hold_s: float) -> tuple[PullStatus, list[Message]]:
        """Return the result of the next pull. Pause after it if the broker holds no pull, or hardly advances."""
        queue, pull = core.queue, PullRequest(core.next_offset, self._pull_size, MASTER_ID, self._cluster.loop.time())
        try:
            response, messages = await self._cluster.broker(queue.broker_name).pull(
                queue,
                pull.offset,
                group=TOOLS_GROUP,
                subscription=self._subscription,
                max_messages=self._pull_size,
                hold_s=hold_s,
            )
        except PermissionDenied as error:
            error.add_note(f"Without --group, the account needs the right to subscribe with group {TOOLS_GROUP}.")
            raise
        if response.status is PullStatus.OFFSET_MOVED and response.next_offset != pull.offset:
            self._report(f"{queue} has nothing at {pull.offset}; continuing at {response.next_offset}")
        pause_s = core.advance(pull, response, self._cluster.loop.time())
        if messages:
            core.progressed(True)
        elif pause_s:
            await asyncio.sleep(pause_s)
        return response.status, messages

    # --- new messages

    def follow(self, new_queues: bool) -> None:
        """Begin to wait for messages; with `new_queues` also in queues that the topic gets later."""
        for cursor in self._cursors:
            self._cluster.spawn(self._follow(cursor), f"follow {cursor.core.queue}")
        if new_queues:
            self._cluster.events = self

    def route_changed(self, topic: str, route: TopicRoute) -> None:
        """Follow the queues that the topic has now."""
        if topic == self._subscription.topic:
            for queue in sorted(set(route.consume_queues()) - {each.core.queue for each in self._cursors}):
                cursor = self._cursor(queue, 0, 0)
                self._cursors.append(cursor)
                self._cluster.spawn(self._follow(cursor), f"follow {queue}")

    async def new_messages(self, within_s: float) -> list[Message]:
        """Return new messages since `follow`; wait up to `within_s` seconds for the first.

        Raises:
            RocketError: a broker refuses the request.
        """
        found: list[Message] = []
        try:
            async with asyncio.timeout(within_s):
                found.append(_message(await self._arrived.get()))
        except TimeoutError:
            return found
        while not self._arrived.empty() and len(found) < _LARGEST_PULL:
            found.append(_message(self._arrived.get_nowait()))
        return found

    async def _follow(self, cursor: _QueueCursor) -> None:
        name = cursor.core.queue.broker_name
        while True:
            try:
                _, messages = await self._pull(cursor.core, _HOLD_S)
            except RocketError as error:
                if isinstance(error, BrokerError) and not error.retryable:
                    await self._arrived.put(error)
                    return
                if name not in self._reported:
                    self._reported.add(name)
                    self._report(f"{error}; trying again")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._reported.discard(name)
            for message in messages:
                await self._arrived.put(message)


def _age(message: Message) -> _Age:
    """Return the sort key of a message. Messages of the same millisecond stay in the order of their broker's log."""
    return message.stored_at_ms, message.commit_log_offset, message.queue


def _message(arrived: Message | RocketError) -> Message:
    if isinstance(arrived, RocketError):
        raise arrived
    return arrived
