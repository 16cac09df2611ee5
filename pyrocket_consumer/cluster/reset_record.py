"""The record of a broadcasting group's resets at one master. Offline members read it at their next start.

A broker stores any offset that is committed for a group, whatever the queue id, and returns it. So these offsets form a
small register, which is as durable as the group's offsets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pyrocket_consumer.cluster.cluster import Cluster
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.errors import BrokerError, RocketError
from pyrocket_consumer.model import MessageQueue, retry_topic
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.reset_format import (
    MAX_RECORDED_OFFSET,
    RecordArea,
    is_valid_epoch,
    record_areas,
    topic_digest,
)

MAX_READS = 10
"""How often one call reads the epoch of a queue if it changes each time. Later calls read it again."""

MAX_EPOCH_ATTEMPTS = 20
"""How often a reset takes a new epoch because another reset took its epoch first."""

_NOT_FOUND_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST})


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """The target offset of a queue, and the epoch of the reset that set it."""

    target: int
    epoch: int


class GroupUnknown(RocketError):
    """The broker does not know the group. It never had a member there, so a record has no reader."""


class EpochTaken(RocketError):
    """Another admin has recorded a reset with this epoch or a higher one, so this one would not count as newer."""

    def __init__(self, head: int) -> None:
        super().__init__(head)
        self.head = head

    def __str__(self) -> str:
        return f"a reset with epoch {self.head} was recorded at the same time"


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _ignore_invalid(text: str) -> None:
    pass


class ResetRecord:
    """The record for one group and topic at one master. Confined to the I/O thread.

    Each client with the permission to commit for the group can write any number into it. A number that is not a valid
    epoch counts as no record. `on_invalid` reports it, and the next reset overwrites it.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topic: str,
        broker_name: str,
        *,
        now_ms: Callable[[], int] = _wall_ms,
        on_invalid: Callable[[str], None] = _ignore_invalid,
    ) -> None:
        self.topic, self.broker_name = topic, broker_name
        self._group = group
        self._broker = cluster.broker(broker_name)
        self._now_ms = now_ms
        self._on_invalid = on_invalid
        self._area: RecordArea | None = None

    async def head(self) -> int | None:
        """Return the highest recorded epoch, 0 without a record, None if the number there is not a valid epoch.

        It takes one small request, or two if there is a record.
        """
        area = self._area or await self._find_area()
        return await self._fetch_epoch(area.head, "as the newest of all") if area is not None else 0

    async def _fetch_epoch(self, slot: int, what: str) -> int | None:
        found = await self._fetch_slot(slot)
        if found and not is_valid_epoch(found, self._now_ms()):
            self._on_invalid(
                f"the record of resets of {self.topic} at {self.broker_name} has {found} {what}, which is not a time "
                "or is more than a day ahead. It is ignored, and the next reset overwrites it. Check who may commit "
                f"offsets for {self._group}, and the clocks"
            )
            return None
        return found

    async def read(
        self, queue_ids: Iterable[int], newer_than: Callable[[int], int] = lambda queue_id: 0
    ) -> dict[int, RecordedReset]:
        """Return the recorded reset of each queue whose epoch is above `newer_than(queue_id)`."""
        area = self._area or await self._find_area()
        if area is None:
            return {}

        async def one(queue_id: int) -> RecordedReset | None:
            what = f"for queue {queue_id}"
            epoch = await self._fetch_epoch(area.epoch(queue_id), what) or 0
            for _ in range(MAX_READS):
                if epoch <= newer_than(queue_id):
                    break
                target = await self._fetch_slot(area.target(queue_id))
                epoch_after = await self._fetch_epoch(area.epoch(queue_id), what) or 0
                if epoch_after == epoch:  # else another reset was being written, and the target may belong to either
                    return RecordedReset(target - 1, epoch) if 0 < target <= MAX_RECORDED_OFFSET else None
                epoch = epoch_after
            return None

        found = await gather_limited(queue_ids, one)
        return {queue_id: reset for queue_id, reset in found.items() if reset is not None}

    async def write(self, epoch: int, targets: Mapping[int, int]) -> list[int]:
        """Record targets by queue id; other queues keep their older record.

        Returns the queues for which another admin has recorded a newer reset at the same time. That one counts.

        Raises:
            GroupUnknown: the broker has never had a member of the group.
            EpochTaken: choose a higher epoch, and write again.
            BrokerError and others: the reset is not recorded, or only in part. Members check the head, which is
                written last; only members that read the whole record may find the part.
        """
        try:
            area = self._area or await self._find_area() or await self._claim_area()

            async def one(queue_id: int) -> None:
                await self._store_slot(area.target(queue_id), targets[queue_id] + 1)
                await self._store_slot(area.epoch(queue_id), epoch)

            await gather_limited(targets, one)
            # Read the head after all targets are written. Two admins may write at the same time with the same epoch.
            # Then one of them sees the other: it reads the other's head here, or the other's targets below.
            head = await self._fetch_epoch(area.head, "as the newest of all") or 0
            if head >= epoch:
                raise EpochTaken(head)
            await self._store_slot(area.head, epoch)
        except BrokerError as error:
            if error.code in _NOT_FOUND_CODES:
                raise GroupUnknown(
                    f"{self.broker_name} does not know group {self._group}, because no member was ever connected"
                ) from error
            raise
        found = await self.read(targets)
        # Two admins that both read an old head have written with the same epoch. A member follows each epoch once, so
        # the first to reach it would win. The admin that finds a target of the other takes a new epoch instead.
        if any(reset.epoch == epoch and reset.target != targets[queue_id] for queue_id, reset in found.items()):
            raise EpochTaken(epoch)
        return sorted(
            queue_id for queue_id, target in targets.items() if found.get(queue_id) != RecordedReset(target, epoch)
        )

    async def forget(self, queue_ids: Iterable[int]) -> None:
        """Remove the record. Offline members then continue at their stored offsets."""
        area = self._area or await self._find_area()
        if area is None:
            return

        async def one(queue_id: int) -> None:
            await self._store_slot(area.epoch(queue_id), 0)
            await self._store_slot(area.target(queue_id), 0)

        await self._store_slot(area.head, 0)
        await gather_limited(queue_ids, one)

    async def _find_area(self) -> RecordArea | None:
        """Return the topic's area, None if it has none. An area that was found never moves."""
        name = topic_digest(self.topic)
        for area in record_areas(self.topic):
            stored = await self._fetch_slot(area.name)
            if stored == name:
                self._area = area
                return area
            if not stored:
                return None
        return None

    async def _claim_area(self) -> RecordArea:
        """Take the first free area for the topic, unless another admin has taken one since the last read."""
        name, areas = topic_digest(self.topic), list(record_areas(self.topic))
        for area in areas:
            stored = await self._fetch_slot(area.name)
            if not stored:
                await self._store_slot(area.name, name)
            if stored in (0, name):
                self._area = area
                return area
        # Hash collisions do not fill all areas, so another client has. Overwrite the area that readers try first.
        self._on_invalid(
            f"all {len(areas)} areas at {self.broker_name} for resets of {self.topic} are taken, so the first one is "
            f"overwritten; check who may commit offsets for {self._group}"
        )
        await self._store_slot(areas[0].name, name)
        await self._store_slot(areas[0].head, 0)
        return areas[0]

    def _slot_queue(self, slot: int) -> MessageQueue:
        return MessageQueue(retry_topic(self._group), self.broker_name, slot)

    async def _fetch_slot(self, slot: int) -> int:
        """Return the number in a slot; 0 for an empty one, which brokers report in several ways."""
        try:
            found = await self._broker.query_offset(self._group, self._slot_queue(slot))
        except BrokerError as error:
            if error.code in _NOT_FOUND_CODES:
                return 0
            raise
        return found or 0

    async def _store_slot(self, slot: int, value: int) -> None:
        await self._broker.commit_offset(self._group, self._slot_queue(slot), value)
