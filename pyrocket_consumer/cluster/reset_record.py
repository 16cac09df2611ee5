"""The record of a broadcasting group's resets at one master: what members that were away read at their next start.

A broker keeps any offset that is committed for a group, whatever the queue id, and gives it back: it is a small
register, as durable as the group's offsets are.
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
"""How often a queue's epoch is looked at that changes all the time; then it is left for the next time."""

MAX_EPOCH_ATTEMPTS = 20
"""How often a reset is dated anew because of another's: more than any admins who meet, less than for ever."""

_NOT_FOUND_CODES = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST})


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """Where a queue shall go on since the reset with this epoch."""

    target: int
    epoch: int


class GroupUnknown(RocketError):
    """The broker does not know the group: none of its members was ever there, so there is nobody to record for."""


class EpochTaken(RocketError):
    """Somebody has recorded a reset with this epoch or a higher one since we looked; ours would not count as newer."""

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

    Whoever may commit for the group can write into it, what he likes. What is no epoch counts as nothing, is told by
    `on_invalid`, and is written over by the next reset.
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
        """Return the highest epoch recorded, 0 when nothing is, None when what stands there is none.

        One small request, or two if there is a record.
        """
        area = self._area or await self._find_area()
        return await self._fetch_epoch(area.head, "as the newest of all") if area is not None else 0

    async def _fetch_epoch(self, slot: int, what: str) -> int | None:
        found = await self._fetch_slot(slot)
        if found and not is_valid_epoch(found, self._now_ms()):
            self._on_invalid(
                f"the record of resets of {self.topic} at {self.broker_name} has {found} {what}, which is no time, or "
                "more than a day ahead: it is ignored, and written over by the next reset; see who may commit offsets "
                f"for {self._group}, and the clocks"
            )
            return None
        return found

    async def read(
        self, queue_ids: Iterable[int], newer_than: Callable[[int], int] = lambda queue_id: 0
    ) -> dict[int, RecordedReset]:
        """Return what is recorded for the queues, of those whose epoch is above `newer_than(queue_id)`."""
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
                if epoch_after == epoch:  # else another reset was being written, and the target may be either's
                    return RecordedReset(target - 1, epoch) if 0 < target <= MAX_RECORDED_OFFSET else None
                epoch = epoch_after
            return None

        found = await gather_limited(queue_ids, one)
        return {queue_id: reset for queue_id, reset in found.items() if reset is not None}

    async def write(self, epoch: int, targets: Mapping[int, int]) -> list[int]:
        """Record targets by queue id; queues not named keep their older record.

        Returns the queues for which somebody else has recorded something newer at the same time: theirs counts.

        Raises:
            GroupUnknown: there is nobody to record for.
            EpochTaken: choose a higher one, and write again.
            BrokerError and others: it is not recorded, or only in part. Members read nothing of it before its head is
                written, which comes last; those that are due to read all may find the part.
        """
        try:
            area = self._area or await self._find_area() or await self._claim_area()

            async def one(queue_id: int) -> None:
                await self._store_slot(area.target(queue_id), targets[queue_id] + 1)
                await self._store_slot(area.epoch(queue_id), epoch)

            await gather_limited(targets, one)
            # The head is looked at after all is written. Of two who write at the same time with the same epoch, the one
            # who writes his last target later finds the other's head here, or the other finds these targets below.
            head = await self._fetch_epoch(area.head, "as the newest of all") or 0
            if head >= epoch:
                raise EpochTaken(head)
            await self._store_slot(area.head, epoch)
        except BrokerError as error:
            if error.code in _NOT_FOUND_CODES:
                raise GroupUnknown(
                    f"{self.broker_name} does not know group {self._group}: none of its members was ever there"
                ) from error
            raise
        found = await self.read(targets)
        # Two who both saw an old head have written with the same epoch. Members follow an epoch once, so it would be
        # that of whoever reached them first: whoever finds anything of the other's tells nobody, and dates it anew.
        if any(reset.epoch == epoch and reset.target != targets[queue_id] for queue_id, reset in found.items()):
            raise EpochTaken(epoch)
        return sorted(
            queue_id for queue_id, target in targets.items() if found.get(queue_id) != RecordedReset(target, epoch)
        )

    async def forget(self, queue_ids: Iterable[int]) -> None:
        """Remove the record. Members that were away go on where they ended."""
        area = self._area or await self._find_area()
        if area is None:
            return

        async def one(queue_id: int) -> None:
            await self._store_slot(area.epoch(queue_id), 0)
            await self._store_slot(area.target(queue_id), 0)

        await self._store_slot(area.head, 0)
        await gather_limited(queue_ids, one)

    async def _find_area(self) -> RecordArea | None:
        """Return the topic's area, None if it has none. It stays where it is once it was found."""
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
        """Take the first free area for the topic; another may have done so since we looked."""
        name, areas = topic_digest(self.topic), list(record_areas(self.topic))
        for area in areas:
            stored = await self._fetch_slot(area.name)
            if not stored:
                await self._store_slot(area.name, name)
            if stored in (0, name):
                self._area = area
                return area
        # By chance so many topics do not share their areas: somebody has filled them, and it is the first that counts.
        self._on_invalid(
            f"all {len(areas)} places at {self.broker_name} for resets of {self.topic} are taken: the first is written "
            f"over; see who may commit offsets for {self._group}"
        )
        await self._store_slot(areas[0].name, name)
        await self._store_slot(areas[0].head, 0)
        return areas[0]

    def _slot_queue(self, slot: int) -> MessageQueue:
        return MessageQueue(retry_topic(self._group), self.broker_name, slot)

    async def _fetch_slot(self, slot: int) -> int:
        """Return what a slot holds; 0 is nothing, which brokers say in several ways."""
        try:
            found = await self._broker.query_offset(self._group, self._slot_queue(slot), set_zero_if_not_found=False)
        except BrokerError as error:
            if error.code in _NOT_FOUND_CODES:
                return 0
            raise
        return found or 0

    async def _store_slot(self, slot: int, value: int) -> None:
        await self._broker.commit_offset(self._group, self._slot_queue(slot), value)
