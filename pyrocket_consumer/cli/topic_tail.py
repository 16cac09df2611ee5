"""Read queues without joining a group. It commits nothing, and no member loses a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.offset_lookup import TOOLS_GROUP
from pyrocket_consumer.errors import BrokerError, PermissionDenied, RocketError
from pyrocket_consumer.model import MessageQueue, PullResponse, PullStatus, Subscription, TopicRoute
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.transport.backoff import Backoff

MAX_MESSAGES = 4096
"""Most messages to keep of all queues while they are merged; at least one of each."""

_LARGEST_PULL = 32
_TRIES = 3
_PAUSE_S = 1.0
_IDLE_PAUSES = Backoff(0.02, _PAUSE_S, free=_TRIES)
_UNHELD_S = 0.5
_HOLD_S = 15.0


@dataclass(slots=True, eq=False)
class _QueueCursor:
    """One queue: its next offset, its end offset, and the messages that were pulled and not yet returned."""

    queue: MessageQueue
    position: int
    end: int
    pulled: deque[Message] = field(default_factory=deque)
    empty_responses: int = 0
    """Immediate responses in a row that had no message and hardly advanced."""

    @property
    def has_more(self) -> bool:
        return self.position < self.end


class TopicTailer:
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
        self._cursors = [_QueueCursor(queue, begins[queue], ends[queue]) for queue in sorted(begins)]
        self._pull_size = max(1, min(_LARGEST_PULL, MAX_MESSAGES // max(1, len(self._cursors))))
        self._arrived: asyncio.Queue[Message | RocketError] = asyncio.Queue(MAX_MESSAGES)
        self._reported: set[str] = set()  # unreachable brokers

    async def next_messages(self) -> list[Message]:
        """Return the next messages before the ends, the oldest first; none if all were returned.

        Raises:
            RocketError: requests to a broker failed several times.
        """
        while True:
            await gather_limited([each for each in self._cursors if each.has_more and not each.pulled], self._fill)
            found = self._oldest()
            if found or not any(each.has_more for each in self._cursors):
                return found

    def _oldest(self) -> list[Message]:
        """Return messages in the order they were stored, until a queue that has more needs another pull."""
        found: list[Message] = []
        cursors = [each for each in self._cursors if each.pulled or each.has_more]
        while cursors and all(each.pulled for each in cursors):
            oldest = min(cursors, key=lambda each: _age(each.pulled[0]))
            found.append(oldest.pulled.popleft())
            if not oldest.pulled and not oldest.has_more:
                cursors.remove(oldest)
        return found

    async def _fill(self, cursor: _QueueCursor) -> None:
        """Pull once, and again after an error that may pass."""
        for tries_left in reversed(range(_TRIES)):
            try:
                response, messages = await self._pull(cursor, 0)
                break
            except RocketError as error:
                if tries_left == 0 or (isinstance(error, BrokerError) and not error.retryable):
                    raise
                await asyncio.sleep(_PAUSE_S)
        if response.status is PullStatus.NO_NEW_MESSAGE or response.next_offset <= cursor.position:
            cursor.end = cursor.position  # the queue has no more messages, so the reported end was wrong
        else:
            cursor.pulled.extend(each for each in messages if each.queue_offset < cursor.end)
            cursor.position = response.next_offset

    async def _pull(self, cursor: _QueueCursor, hold_s: float) -> tuple[PullResponse, list[Message]]:
        if cursor.empty_responses > _TRIES:  # some brokers hold no pull, or advance by a few offsets only
            await asyncio.sleep(_IDLE_PAUSES.pause_s(cursor.empty_responses))
        requested_at = self._cluster.loop.time()
        try:
            response, messages = await self._cluster.broker(cursor.queue.broker_name).pull(
                cursor.queue,
                cursor.position,
                group=TOOLS_GROUP,
                subscription=self._subscription,
                max_messages=self._pull_size,
                hold_s=hold_s,
            )
        except PermissionDenied as error:
            error.add_note(f"Without --group, the account needs the right to subscribe with group {TOOLS_GROUP}.")
            raise
        if response.status is PullStatus.OFFSET_MOVED and response.next_offset != cursor.position:
            self._report(f"{cursor.queue} has nothing at {cursor.position}; continuing at {response.next_offset}")
        far = (
            response.status is PullStatus.NO_MATCHED_MESSAGE and response.next_offset >= cursor.position + _LARGEST_PULL
        )
        was_held = self._cluster.loop.time() - requested_at > _UNHELD_S
        cursor.empty_responses = 0 if messages or far or was_held else cursor.empty_responses + 1
        return response, messages

    # --- new messages

    def follow(self, new_queues: bool) -> None:
        """Begin to wait for messages; with `new_queues` also in queues that the topic gets later."""
        for cursor in self._cursors:
            self._cluster.spawn(self._follow(cursor), f"follow {cursor.queue}")
        if new_queues:
            self._cluster.on_route_changed(self._follow_new)

    def _follow_new(self, topic: str, route: TopicRoute) -> None:
        if topic == self._subscription.topic:
            for queue in sorted(set(route.consume_queues()) - {each.queue for each in self._cursors}):
                cursor = _QueueCursor(queue, 0, 0)
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
        name = cursor.queue.broker_name
        while True:
            try:
                response, messages = await self._pull(cursor, _HOLD_S)
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
            cursor.position = response.next_offset
            for message in messages:
                await self._arrived.put(message)


def _age(message: Message) -> tuple[int, int, MessageQueue]:
    """Return the sort key of a message. Messages of the same millisecond stay in the order of their broker's log."""
    return message.stored_at_ms, message.commit_log_offset, message.queue


def _message(arrived: Message | RocketError) -> Message:
    if isinstance(arrived, RocketError):
        raise arrived
    return arrived
