"""Reading queues without being a member of a group: nothing is committed, and nobody's queues move."""

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

MOST_MESSAGES = 4096
"""Kept of all queues together while they are merged; at least one of each."""

_LARGEST_PULL = 32
_TRIES = 3
_FIRST_PAUSE_S, _PAUSE_S = 0.01, 1.0
_UNHELD_S = 0.5
_HOLD_S = 15.0


@dataclass(slots=True, eq=False)
class _Reading:
    """One queue: where it goes on, what was pulled and not taken, and whether there is more before its end."""

    queue: MessageQueue
    position: int
    end: int
    pulled: deque[Message] = field(default_factory=deque)
    vain: int = 0
    """Answers in a row that came at once, brought nothing, and led hardly anywhere."""

    @property
    def more(self) -> bool:
        return self.position < self.end


class Look:
    """Reads queues from `begins` on, up to `ends` in order of time, then as messages come. Confined to the I/O thread.

    `tell` gets what a user should know, in a sentence.
    """

    def __init__(
        self,
        cluster: Cluster,
        subscription: Subscription,
        begins: Mapping[MessageQueue, int],
        ends: Mapping[MessageQueue, int],
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._tell = tell
        self._readings = [_Reading(queue, begins[queue], ends[queue]) for queue in sorted(begins)]
        self._pull_size = max(1, min(_LARGEST_PULL, MOST_MESSAGES // max(1, len(self._readings))))
        self._arrived: asyncio.Queue[Message | RocketError] = asyncio.Queue(MOST_MESSAGES)
        self._told: set[str] = set()  # brokers that are away

    async def next_messages(self) -> list[Message]:
        """Return messages of those before the ends, the oldest first; none when all were returned.

        Raises:
            RocketError: a broker did not answer, or refused, several times.
        """
        while True:
            await gather_limited([each for each in self._readings if each.more and not each.pulled], self._fill)
            found = self._oldest()
            if found or not any(each.more for each in self._readings):
                return found

    def _oldest(self) -> list[Message]:
        """Take messages in the order they were stored, until that of a queue with more to come is not known."""
        found: list[Message] = []
        readings = [each for each in self._readings if each.pulled or each.more]
        while readings and all(each.pulled for each in readings):
            oldest = min(readings, key=lambda each: _age(each.pulled[0]))
            found.append(oldest.pulled.popleft())
            if not oldest.pulled and not oldest.more:
                readings.remove(oldest)
        return found

    async def _fill(self, reading: _Reading) -> None:
        """Pull once, and again while nothing comes for a reason that may pass."""
        for tries_left in reversed(range(_TRIES)):
            try:
                answer, messages = await self._pull(reading, 0)
                break
            except RocketError as error:
                if tries_left == 0 or (isinstance(error, BrokerError) and not error.retryable):
                    raise
                await asyncio.sleep(_PAUSE_S)
        if answer.status is PullStatus.NO_NEW_MESSAGE or answer.next_offset <= reading.position:
            reading.end = reading.position  # there is no more, whatever was said before
        else:
            reading.pulled.extend(each for each in messages if each.queue_offset < reading.end)
            reading.position = answer.next_offset

    async def _pull(self, reading: _Reading, hold_s: float) -> tuple[PullResponse, list[Message]]:
        if reading.vain > _TRIES:  # some brokers hold no pull, or lead from place to place
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** min(reading.vain - _TRIES, 10), _PAUSE_S))
        asked_at = self._cluster.loop.time()
        try:
            answer, messages = await self._cluster.broker(reading.queue.broker_name).pull(
                reading.queue,
                reading.position,
                group=TOOLS_GROUP,
                subscription=self._subscription,
                max_messages=self._pull_size,
                hold_s=hold_s,
            )
        except PermissionDenied as error:
            error.add_note(f"Who looks needs the right to subscribe with group {TOOLS_GROUP}; members with theirs.")
            raise
        if answer.status is PullStatus.OFFSET_MOVED and answer.next_offset != reading.position:
            self._tell(f"{reading.queue} has nothing at {reading.position}; going on at {answer.next_offset}")
        far = answer.status is PullStatus.NO_MATCHED_MESSAGE and answer.next_offset >= reading.position + _LARGEST_PULL
        was_held = self._cluster.loop.time() - asked_at > _UNHELD_S
        reading.vain = 0 if messages or far or was_held else reading.vain + 1
        return answer, messages

    # --- what comes

    def follow(self, new_queues: bool) -> None:
        """Begin to wait for messages; with `new_queues` also for those of queues that the topic gets."""
        for reading in self._readings:
            self._cluster.spawn(self._follow(reading), f"follow {reading.queue}")
        if new_queues:
            self._cluster.on_route_changed(self._follow_new)

    def _follow_new(self, topic: str, route: TopicRoute) -> None:
        if topic == self._subscription.topic:
            for queue in sorted(set(route.consume_queues()) - {each.queue for each in self._readings}):
                reading = _Reading(queue, 0, 0)
                self._readings.append(reading)
                self._cluster.spawn(self._follow(reading), f"follow {queue}")

    async def new_messages(self, within_s: float) -> list[Message]:
        """Return what has come since `follow`, waiting up to `within_s` seconds for the first.

        Raises:
            RocketError: a broker refuses.
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

    async def _follow(self, reading: _Reading) -> None:
        name = reading.queue.broker_name
        while True:
            try:
                answer, messages = await self._pull(reading, _HOLD_S)
            except RocketError as error:
                if isinstance(error, BrokerError) and not error.retryable:
                    await self._arrived.put(error)
                    return
                if name not in self._told:
                    self._told.add(name)
                    self._tell(f"{error}; trying again")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._told.discard(name)
            reading.position = answer.next_offset
            for message in messages:
                await self._arrived.put(message)


def _age(message: Message) -> tuple[int, int, MessageQueue]:
    """Messages of a millisecond are in the order of their broker's log."""
    return message.stored_at_ms, message.commit_log_offset, message.queue


def _message(arrived: Message | RocketError) -> Message:
    if isinstance(arrived, RocketError):
        raise arrived
    return arrived
