"""The record of resets at each master: read before a queue begins and regularly, and written for other members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from uuid import UUID

from pyrocket_consumer.cluster.admin_relay import RelayStatus, RemoteMember, relay_to_all
from pyrocket_consumer.cluster.reset_record import MAX_EPOCH_ATTEMPTS, EpochTaken, GroupUnknown, ResetRecord
from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.errors import PermissionDenied, RocketError
from pyrocket_consumer.model import MASTER_ID, RETRY_PREFIX, EventKind, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
from pyrocket_consumer.protocol.command import ResetOffsetHeader
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan
from pyrocket_consumer.transport.backoff import Backoff

RECORD_RETRY_S = 5.0
"""The pause before a record that could not be read is read again."""

RECORD_PAUSES_S, MAX_RECORD_TRIES = (0.5, 30.0), 8
"""The first and the longest pause between the tries to write a record, and the number of tries."""


class TopicRecord:
    """The record of resets of one topic at one broker, as far as this member has read it."""

    def __init__(self, record: ResetRecord) -> None:
        self.record = record
        self.head: int | None = None  # as of the last read; an equal head means no new reset
        self.is_unread = False  # the last read has failed
        self.read_lock = asyncio.Lock()
        self.unrecorded: dict[MessageQueue, int] = {}  # targets followed, but neither recorded nor forwarded yet
        self.forward_lock = asyncio.Lock()


class ResetRecords:
    """Reads and writes the records of one group. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, commits: Commits, resets: Resets) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._resets = resets
        self._records: dict[tuple[str, str], TopicRecord] = {}  # by topic and broker name
        self._soon = asyncio.Event()

    # --- reading

    async def read_before_begin(self, queue: MessageQueue) -> None:
        """Read the record of the queue's topic at its broker before the first pull, unless it was read already.

        A broadcasting member follows it at once. For other groups, `HeldQueue` keeps the recorded reset, and the member
        follows it when it claims the queue.
        """
        if self._reads_records(queue.topic):
            record = self._record(queue.topic, queue.broker_name)
            if record.head is None and not record.is_unread:
                await self._read(record, first=True)

    def _reads_records(self, topic: str) -> bool:
        config = self._context.config
        keeps = config.broadcasting or isinstance(config.offset_store, DatabaseOffsets)
        return keeps and config.remote_reset == "accept" and not topic.startswith(RETRY_PREFIX)

    async def keep_reading(self) -> None:
        """Read every record regularly, and soon after a broker reconnects. Runs until cancelled."""
        context = self._context
        while True:
            interval_s = context.config.reset_record_interval_s * context.rng.uniform(0.9, 1.1)
            try:
                is_unread = any(record.is_unread for record in self._records.values())
                async with asyncio.timeout(min(interval_s, RECORD_RETRY_S) if is_unread else interval_s):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()
            await asyncio.gather(*map(self._read, self._readable_records()))

    def read_soon(self) -> None:
        """Read the records soon, because a broker has reconnected and may have recorded resets meanwhile."""
        self._soon.set()

    def _readable_records(self) -> list[TopicRecord]:
        records = []
        for topic in list(self._context.subscriptions):
            route = self._context.cluster.routes.known(topic) if self._reads_records(topic) else None
            for broker in route.brokers if route is not None else ():
                if MASTER_ID in broker.addresses and queue_ids(self._context, topic, broker.broker_name):
                    records.append(self._record(topic, broker.broker_name))
        return records

    def _record(self, topic: str, broker_name: str) -> TopicRecord:
        key, context = (topic, broker_name), self._context
        if key not in self._records:
            record = ResetRecord(
                context.cluster,
                context.name,
                topic,
                broker_name,
                now_ms=context.now_ms,
                on_invalid=self._resets.report_record_error,
            )
            self._records[key] = TopicRecord(record)
        return self._records[key]

    async def _read(self, record: TopicRecord, *, first: bool = False) -> None:
        """Follow the new resets of a record. Emit an event if the record cannot be read, and try again."""
        context, topic = self._context, record.record.topic
        async with record.read_lock:
            if first and (record.head is not None or record.is_unread):
                return  # the topic's queues begin at the same time, and one of them has read it for all
            try:
                await self._read_in_turn(record)
            except PermissionDenied as error:
                record.head = record.head or 0
                text = f"no permission to read the resets recorded for {topic}: {error}"
                context.emit_throttled(EventKind.BROKER_UNREACHABLE, text)
            except RocketError as error:
                record.is_unread = True
                text = f"the resets recorded for {topic} cannot be read: {error}"
                context.emit_throttled(EventKind.BROKER_UNREACHABLE, text)
            else:
                record.is_unread = False

    async def _read_in_turn(self, record: TopicRecord) -> None:
        topic, broker_name = record.record.topic, record.record.broker_name
        head = await record.record.head()
        if head is not None and head == (record.head or 0):
            record.head = head
            return

        def queue(queue_id: int) -> HeldQueue:
            return self._assignments.queue(MessageQueue(topic, broker_name, queue_id))

        found = await record.record.read(
            queue_ids(self._context, topic, broker_name), lambda queue_id: self._resets.epoch(queue(queue_id))
        )
        resets = {queue(queue_id): QueueReset(reset.target, reset.epoch) for queue_id, reset in found.items()}
        if not self._context.config.broadcasting:
            for held, reset in resets.items():
                held.resets.recorded = reset
        elif not self._commits.keeps_epochs and record.head is None:
            # At the first read, a reset that was followed before a restart looks like one that was missed. To follow
            # the same reset again at every start would be worse than to miss one.
            epochs = {held.commit: QueueReset(None, reset.epoch) for held, reset in resets.items()}
            await self._commits.apply_resets(epochs)
            self._resets.report_memory_only()
        elif resets:
            by_queue = {held.queue: reset for held, reset in resets.items()}
            await self._resets.follow(by_queue, "recorded while this member did not receive it", recorded=True)
        record.head = head or 0

    # --- writing and forwarding

    async def follow_and_forward(self, held: HeldQueue, target: int, how: str) -> None:
        """Follow a reset of a broadcasting group that only this member has received, and forward it to the others."""
        queue = held.queue
        record = self._record(queue.topic, queue.broker_name)
        epoch = max(self._context.now_ms(), self._resets.epoch(held) + 1, (record.head or 0) + 1)
        await self._resets.follow({queue: QueueReset(target, epoch)}, how)
        record.unrecorded[queue] = target
        await self._record_and_forward(record)

    async def _record_and_forward(self, record: TopicRecord) -> None:
        """Record resets that only this member has received, and forward them to the others, several at a time."""
        context = self._context
        async with record.forward_lock:
            targets, record.unrecorded = record.unrecorded, {}
            if not targets:
                return  # an earlier call has forwarded them
            epoch = await self._assign_epoch(targets, 0)
            backoff = Backoff(*RECORD_PAUSES_S)
            times_taken = 0
            failure = ""
            while True:
                try:
                    await record.record.write(epoch, {queue.queue_id: target for queue, target in targets.items()})
                    failure = ""
                    break
                except EpochTaken as error:
                    failure, times_taken = str(error), times_taken + 1
                    if times_taken == MAX_EPOCH_ATTEMPTS:
                        break
                    epoch = await self._assign_epoch(targets, error.head + 1)
                except RocketError as error:
                    failure, pause_s = str(error), backoff.failed()
                    is_final = context.closing or isinstance(error, (PermissionDenied, GroupUnknown))
                    if is_final or backoff.failures == MAX_RECORD_TRIES:
                        break
                    await asyncio.sleep(pause_s)
            plan = PlanBody(record.record.topic, epoch, targets)
            informed, _ = await self._forward_to_members(record.record.broker_name, plan)
        text = f"received by this member, forwarded to {informed or 'no other member'}"
        if failure:
            text += f"; not recorded for members that are down: {failure}"
        for queue, target in targets.items():
            facts = {"to": target, "epoch": epoch}
            level = logging.WARNING if failure else logging.INFO
            context.emit(EventKind.OFFSET_RESET, f"-> {target} ({text})", queue, facts, level=level)

    async def _assign_epoch(self, targets: Mapping[MessageQueue, int], at_least: int) -> int:
        """Return one epoch for resets that this member has followed, and store it as their epoch."""
        epoch = max(at_least, *(self._resets.epoch(self._assignments.queue(queue)) for queue in targets))
        await self._resets.follow({queue: QueueReset(None, epoch) for queue in targets}, "spread")
        return epoch

    async def forward(self, queue: MessageQueue, target: int) -> None:
        """Forward a reset in the response to a pull of a queue that this member no longer holds.

        A member of this library gets the plan. For other holders, request the reset from the broker once more.
        """
        context = self._context
        plan = PlanBody(queue.topic, context.now_ms(), {queue: target})
        informed, moved = await self._forward_to_members(queue.broker_name, plan)
        text = f"-> {target}, in the response to an old pull of this member; forwarded to {informed or 'no member'}"
        address = context.cluster.routes.address(queue.broker_name, only_this=True)
        if queue not in moved and address is not None:
            try:
                header = ResetOffsetHeader(queue.topic, context.name, -1, True, queue.queue_id, target)
                await context.cluster.call(address, header)
                text += ", and requested again from the broker"
            except RocketError as error:
                text += f", and the broker refused to repeat it: {error}"
        context.emit(EventKind.OFFSET_RESET, text, queue, {"to": target}, level=logging.WARNING)

    async def _forward_to_members(self, broker_name: str, plan: PlanBody) -> tuple[str, set[MessageQueue]]:
        """Forward a plan to every other member.

        Return the informed members, and the queues of a clustering group that they have moved.
        """
        context = self._context
        try:
            ids = await context.cluster.broker(broker_name).consumer_ids(context.name)
        except RocketError as error:
            return f"no other member, because the members are unknown: {error}", set()
        address = context.cluster.routes.address(broker_name, only_this=True)
        if address is None:
            return "no other member, because the broker has no master now", set()
        others = [RemoteMember(each, (address,)) for each in ids if each != context.client_id]
        reset_id = str(UUID(int=context.rng.getrandbits(128), version=4))
        replies = await relay_to_all(context.cluster, context.name, others, "reset", reset_id, encode_plan(plan))
        informed = ", ".join(
            client_id if reply.kind is RelayStatus.OURS else f"{client_id} (failed: {reply.reason or reply.kind})"
            for client_id, reply in sorted(replies.items())
        )
        return informed, {queue for reply in replies.values() for queue in reply.report.moved}


def queue_ids(context: MemberContext, topic: str, broker_name: str) -> range:
    """Return the ids of the queues of `topic` at a broker, as the known route has them."""
    route = context.cluster.routes.known(topic)
    for data in route.queues if route is not None else ():
        if data.broker_name == broker_name:
            return range(max(data.read_queues, data.write_queues))
    return range(0)
