"""Resets by a broker, an admin, or another member: those that arrive now, and those recorded during an absence.

Brokers reset a clustering group. They cannot reset a broadcasting group, so this library has its own way. The admin
records the reset at each master and sends it to every member. Each reset has an epoch, and a member follows a reset
that is newer than its last one. It stores the epoch in the same durable write as the offset.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from uuid import UUID

from pyrocket_consumer.cluster.admin_relay import RelayStatus, RemoteMember, relay_to_all
from pyrocket_consumer.cluster.reset_record import MAX_EPOCH_ATTEMPTS, EpochTaken, GroupUnknown, ResetRecord
from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue, move_together
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.tasks import Throttle
from pyrocket_consumer.errors import PermissionDenied, ProtocolError, RocketError
from pyrocket_consumer.model import MASTER_ID, RETRY_PREFIX, EventKind, MessageQueue, PullResponse
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
from pyrocket_consumer.protocol.command import ResetOffsetHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.reset_format import (
    MAX_RECORDED_OFFSET,
    RELAY_VERSION,
    PlanBody,
    RelayHeader,
    RelayResponseHeader,
    ReportBody,
    decode_plan,
    decode_status_request,
    encode_plan,
    encode_report,
    is_valid_epoch,
)
from pyrocket_consumer.text import logger

log = logger("consumer")

T = TypeVar("T")

REPLY_TIMEOUT_S = 5.0
"""After this time the reply is "pending". The broker waits 10 s for the reply."""

SAME_RESET_WITHIN_S = 60.0
"""A second request with the same targets within this time is the same reset."""

ROUTE_REFRESH_EVERY_S = 1.0
"""The minimum time between two route requests because of plans with unknown queues."""

RECORD_RETRY_S = 5.0
"""The pause before a record that could not be read is read again."""

RECORD_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)

MAX_REMEMBERED_PLANS = 64
"""How many plans a clustering member remembers, to move each queue once per plan."""

_REASON_CHARACTERS = 300
_REFUSES = "this consumer has remote_reset='refuse'"


class TopicRecord:
    """The record of resets of one topic at one broker, as far as this member has read it."""

    def __init__(self, record: ResetRecord) -> None:
        self.record = record
        self.head: int | None = None  # as of the last read; an equal head means no new reset
        self.is_unread = False  # the last read has failed
        self.read_lock = asyncio.Lock()
        self.unrecorded: dict[MessageQueue, int] = {}  # targets followed, but neither recorded nor forwarded yet
        self.forward_lock = asyncio.Lock()


class ResetFollower:
    """Follows the resets of one group. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, commits: Commits) -> None:
        self._context = context
        self._assignments = assignments
        self._commits = commits
        self._records: dict[tuple[str, str], TopicRecord] = {}  # by topic and broker name
        self._read_soon = asyncio.Event()
        self._plans: dict[str, dict[MessageQueue, int]] = {}  # clustering: the queues that each plan has moved
        self._is_memory_only_reported = False
        self._route_requested_at = float("-inf")
        self._decoding = Throttle(context.loop)

    def report_reset(
        self, queue: MessageQueue, target: int, why: str, old_offset: int | None = None, epoch: int | None = None
    ) -> None:
        """Emit the event that a queue was reset."""
        resets = self._assignments.queue(queue).resets
        resets.count, resets.target = resets.count + 1, target
        facts: dict[str, object] = {"from": old_offset, "to": target, "epoch": epoch}
        known = {name: value for name, value in facts.items() if value is not None}
        self._context.emit(EventKind.OFFSET_RESET, f"-> {target} ({why})", queue, known, level=logging.WARNING)

    # --- requests of an admin or a member that a broker relays

    async def handle_relayed(self, command: RemotingCommand) -> RemotingCommand:
        """Return the response to a request for running info that contains a relayed request."""
        fields = command.fields
        reset_id = fields.get("pyrocketId") or "none"
        if fields.get("pyrocketV") != str(RELAY_VERSION):
            return self._refusal(command, reset_id, f"version {fields.get('pyrocketV')} of resets is unknown here")
        try:
            header = RelayHeader.from_fields(fields)
            refuses = self._context.config.remote_reset == "refuse"
            if header.operation == "status":
                topic = decode_status_request(command.body) if command.body else ""
                state, reason = ("refused", _REFUSES) if refuses else ("ok", None)
                return self._response(command, reset_id, state, self.report(topic, reset_id), reason)
            if header.operation == "reset" and refuses:
                self.report_refusal(f"reset {reset_id}")
                return self._refusal(command, reset_id, _REFUSES)
            if header.operation == "reset":
                plan = await self.read(decode_plan, command.body)
                if why := await self._plan_error(plan):
                    self._report_not_followed(f"reset {reset_id} is refused, and nothing moved: {why}")
                    return self._refusal(command, reset_id, why)
                return await self._follow_plan(command, reset_id, plan)
        except ProtocolError as error:
            self._report_not_followed(f"the plan of reset {reset_id} cannot be read, and nothing moved: {error}")
            return self._refusal(command, reset_id, str(error))
        return self._refusal(command, reset_id, f"operation {header.operation!r:.40} is unknown here")

    async def read(self, decode: Callable[[bytes], T], body: bytes) -> T:
        """Return the decoded `body`. Bodies are decoded one at a time, because a server may send many large ones.

        Raises:
            ProtocolError: the body is damaged; the server must send a valid one.
        """
        async with self._decoding:
            return await read_body(decode, body)

    async def _follow_plan(self, command: RemotingCommand, reset_id: str, plan: PlanBody) -> RemotingCommand:
        config, tasks = self._context.config, self._context.tasks
        work: asyncio.Task[bool]
        if config.broadcasting:
            resets = {queue: QueueReset(target, plan.epoch) for queue, target in plan.targets.items()}
            work = tasks.begin(self._follow_all(resets, f"reset {reset_id}"), f"reset {reset_id}")
        else:
            work = tasks.begin(self._move_held_once(reset_id, plan), f"reset {reset_id}")
        done, _ = await asyncio.wait([work], timeout=REPLY_TIMEOUT_S)
        if not done:
            return self._response(command, reset_id, "pending", self.report(plan.topic, reset_id))
        if (error := work.exception()) is not None:
            if not isinstance(error, RocketError):
                raise error
            return self._refusal(command, reset_id, str(error))
        known = [held for queue in plan.targets if (held := self._assignments.find(queue)) is not None]
        unstored = [held for held in known if held.resets.is_unpersisted]
        state = "pending" if unstored else "applied" if work.result() else "already"
        reason = (
            f"{len(unstored)} queues moved in memory only, because the store cannot be written" if unstored else None
        )
        return self._response(command, reset_id, state, self.report(plan.topic, reset_id), reason)

    async def _plan_error(self, plan: PlanBody) -> str:
        """Return why a plan is not valid for this member, or "". Brokers relay the requests of any client."""
        context = self._context
        now_ms = context.now_ms()
        if not is_valid_epoch(plan.epoch, now_ms):
            return f"its epoch {plan.epoch} is more than a day ahead of this consumer's clock, {now_ms}"
        if not context.config.broadcasting:
            return ""  # a clustering member ignores the queues that it does not hold
        if context.subscriptions.get(plan.topic) is None:
            return f"this consumer does not subscribe to {plan.topic}"
        if (
            self._unknown_queues(plan.topic, plan.targets)
            and context.loop.time() - self._route_requested_at > ROUTE_REFRESH_EVERY_S
        ):
            self._route_requested_at = context.loop.time()  # a queue may have been added just now
            try:
                await context.cluster.routes.get(plan.topic, refresh=True)
            except RocketError as error:
                log.info("group=%s the route of %s could not be fetched again: %s", context.name, plan.topic, error)
        unknown = self._unknown_queues(plan.topic, plan.targets)
        return f"there is no queue {unknown[0]}" if unknown else ""

    def _unknown_queues(self, topic: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that this member does not hold and the known route does not have."""
        held = set(self._assignments.held(topic))
        ids = {name: self._queue_ids(topic, name) for name in {queue.broker_name for queue in queues}}
        return [queue for queue in queues if queue.queue_id not in ids[queue.broker_name] and queue not in held]

    def report_refusal(self, what: str) -> None:
        """Emit the event that a reset is refused, because of remote_reset='refuse'."""
        self._report_not_followed(f"{what} refused: remote_reset='refuse'")

    def _report_not_followed(self, text: str) -> None:
        self._context.emit(EventKind.OFFSET_RESET, text, level=logging.WARNING)

    def _report_record_error(self, text: str) -> None:
        self._context.emit_throttled(EventKind.RECORD_IGNORED, text)

    def _epoch(self, held: HeldQueue) -> int:
        """Return the epoch of the newest reset that the queue has followed. An invalid epoch does not count."""
        epoch = self._commits.reset_epoch(held.commit)
        if not epoch or is_valid_epoch(epoch, self._context.now_ms()):
            return epoch
        self._report_record_error(
            f"the stored epoch {epoch} of {held.queue} is more than a day ahead of this clock, so it is ignored. "
            "The consumer may follow an earlier reset a second time"
        )
        return 0

    def _response(
        self, command: RemotingCommand, reset_id: str, state: str, report: ReportBody | None, reason: str | None = None
    ) -> RemotingCommand:
        header = RelayResponseHeader(state, reset_id, reason[:_REASON_CHARACTERS] if reason else None)
        return command.make_response(
            fields=header.to_fields(), body=encode_report(report) if report is not None else b""
        )

    def _refusal(self, command: RemotingCommand, reset_id: str, reason: str) -> RemotingCommand:
        return self._response(command, reset_id, "refused", None, reason)

    def report(self, topic: str, reset_id: str) -> ReportBody:
        """Return this member's report on a topic. It has the epochs of durable resets only."""
        store, of_topic = self._context.config.offset_store, self._assignments.known()
        of_topic = [held for held in of_topic if held.queue.topic == topic]
        is_holding = set(self._assignments.held(topic))
        epochs = {
            held.queue: self._epoch(held)
            for held in of_topic
            if (held.resets.is_followed or held.queue in is_holding) and not held.resets.is_unpersisted
        }
        offsets = self._assignments.offsets(topic)
        return ReportBody(
            topic,
            reset_id,
            {queue: epoch for queue, epoch in epochs.items() if epoch},
            {queue: offset for queue, offset in offsets.items() if offset <= MAX_RECORDED_OFFSET},
            dict(self._plans.get(reset_id, {})),
            {held.queue: held.resets.target for held in of_topic if held.resets.count},
            {held.queue: held.resets.count for held in of_topic if held.resets.count},
            str(self._context.config.message_model),
            store.identity if isinstance(store, DatabaseOffsets) else "",
        )

    # --- broadcasting: following

    async def _follow_all(self, resets: Mapping[MessageQueue, QueueReset], why: str, *, recorded: bool = False) -> bool:
        """Follow the resets that are newer than the last ones, in one durable step. Return whether any was newer."""
        return await self._context.tasks.finish(self._follow_newer(resets, why, recorded), f"following resets ({why})")

    async def _follow_newer(self, resets: Mapping[MessageQueue, QueueReset], why: str, recorded: bool) -> bool:
        """Do the work of `_follow_all`.

        As for every reset, the steps are: fence the queue, store the target, open a window with a new epoch, pull.
        Queues that this member does not hold yet get their target, too. A recorded reset does not move a queue that
        this member has never consumed, because `consume_from` decides where such a queue begins.
        """
        newer: dict[HeldQueue, QueueReset] = {}
        moving: dict[HeldQueue, int] = {}
        before: dict[HeldQueue, int | None] = {}
        async with self._assignments.lock_queues(resets) as locked:
            for held in locked:
                reset = resets[held.queue]
                if reset.epoch <= self._epoch(held):
                    continue
                never_consumed = recorded and not held.is_held and await self._commits.start_offset(held.commit) is None
                if not never_consumed and reset.offset is not None:
                    moving[held], before[held] = reset.offset, held.commit.current()
                newer[held] = QueueReset(moving.get(held), reset.epoch)
            if not newer:
                return False
            await move_together(moving, "reset", lambda: self._store(newer))
        for held, offset in moving.items():
            self.report_reset(held.queue, offset, why, before[held], newer[held].epoch)
        self._report_memory_only()
        return True

    async def _store(self, resets: Mapping[HeldQueue, QueueReset]) -> bool:
        """Store resets in one durable write. If that fails, continue from memory."""
        is_stored = True
        try:
            await self._commits.apply_resets({held.commit: reset for held, reset in resets.items()})
        except RocketError as error:
            self._context.emit(EventKind.STORE_UNWRITABLE, f"continuing from memory: {error}", level=logging.ERROR)
            is_stored = False
        for held, reset in resets.items():
            held.resets.is_followed, held.resets.is_unpersisted = True, not is_stored
            if reset.offset is not None:
                held.resets.followed_at, held.resets.followed_to = self._context.loop.time(), reset.offset
        return is_stored

    def _report_memory_only(self) -> None:
        if not self._is_memory_only_reported and not self._commits.keeps_epochs:
            self._is_memory_only_reported = True
            self._context.emit(
                EventKind.STORE_FALLBACK,
                "this offset store keeps no reset epochs (see offsets.ResetEpochs). They are in memory only, so this "
                "consumer will not follow resets that are made while it is down",
                level=logging.WARNING,
            )

    async def persist(self) -> None:
        """Try again to store the resets that are in memory only."""
        if unpersisted := [held for held in self._assignments.known() if held.resets.is_unpersisted]:
            try:
                await self._commits.retry_resets([held.commit for held in unpersisted])
            except RocketError as error:
                self._context.emit_throttled(EventKind.COMMIT_FAILED, f"resets are not stored yet: {error}")
            else:
                for held in unpersisted:
                    held.resets.is_unpersisted = False

    # --- the record of broadcasting groups, and of groups with offsets in a database

    async def read_record_before_begin(self, queue: MessageQueue) -> None:
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

    async def keep_reading_records(self) -> None:
        """Read every record regularly, and soon after a broker reconnects. Runs until cancelled."""
        context = self._context
        while True:
            interval_s = context.config.reset_record_interval_s * context.rng.uniform(0.9, 1.1)
            try:
                is_unread = any(record.is_unread for record in self._records.values())
                async with asyncio.timeout(min(interval_s, RECORD_RETRY_S) if is_unread else interval_s):
                    await self._read_soon.wait()
            except TimeoutError:
                pass
            self._read_soon.clear()
            await asyncio.gather(*map(self._read, self._readable_records()))

    def read_records_soon(self) -> None:
        """Read the records soon, because a broker has reconnected and may have recorded resets meanwhile."""
        self._read_soon.set()

    def _readable_records(self) -> list[TopicRecord]:
        records = []
        for topic in self._context.subscriptions.topics():
            route = self._context.cluster.routes.known(topic) if self._reads_records(topic) else None
            for broker in route.brokers if route is not None else ():
                if MASTER_ID in broker.addresses and self._queue_ids(topic, broker.broker_name):
                    records.append(self._record(topic, broker.broker_name))
        return records

    def _queue_ids(self, topic: str, broker_name: str) -> range:
        route = self._context.cluster.routes.known(topic)
        for data in route.queues if route is not None else ():
            if data.broker_name == broker_name:
                return range(max(data.read_queues, data.write_queues))
        return range(0)

    def _record(self, topic: str, broker_name: str) -> TopicRecord:
        key, context = (topic, broker_name), self._context
        if key not in self._records:
            record = ResetRecord(
                context.cluster,
                context.name,
                topic,
                broker_name,
                now_ms=context.now_ms,
                on_invalid=self._report_record_error,
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
            self._queue_ids(topic, broker_name), lambda queue_id: self._epoch(queue(queue_id))
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
            self._report_memory_only()
        elif resets:
            by_queue = {held.queue: reset for held, reset in resets.items()}
            await self._follow_all(by_queue, "recorded while this member did not receive it", recorded=True)
        record.head = head or 0

    # --- resets made by brokers

    async def on_broker_reset(self, topic: str, targets: Mapping[MessageQueue, int]) -> None:
        """Follow a broker's request to every member (220). A table with an invalid entry moves no queue."""
        context = self._context
        if why := self._table_error(topic, targets):
            if context.subscriptions.get(topic) is None:
                self._select_begun(targets)  # forgets the last known offsets, in case the topic is subscribed to again
            self._report_not_followed(f"a reset of {topic} by a broker is refused, and nothing moved: {why}")
        elif context.config.broadcasting and targets and all(map(self._is_repeated, targets, targets.values())):
            log.info("group=%s a reset of %s to the targets of the last one is not repeated", context.name, topic)
        else:
            await self.move_held(topic, targets, "requested by the broker")

    def _table_error(self, topic: str, targets: Mapping[MessageQueue, int]) -> str:
        if self._context.subscriptions.get(topic) is None and not self._assignments.held(topic):
            return f"this consumer does not subscribe to {topic}"
        for queue, target in targets.items():
            if queue.topic != topic:
                return f"it names {queue}"
            if not 0 <= target <= MAX_RECORDED_OFFSET:
                return f"{target} is no offset of {queue}"
        if self._context.cluster.routes.known(topic) is None:
            return ""  # the subscription is new, and the route is not known yet
        # The broker may have a queue that no route names yet. Refuse a table only if it has no known queue.
        unknown = self._unknown_queues(topic, targets)
        return f"there is no queue {unknown[0]}" if unknown and len(unknown) == len(targets) else ""

    async def move_held(self, topic: str, targets: Mapping[MessageQueue, int], why: str) -> dict[MessageQueue, int]:
        """Move the held queues of `topic` to their targets. Return the moved ones once their offsets are durable."""

        async def move(held: HeldQueue, target: int) -> tuple[MessageQueue, int] | None:
            if not await held.move(target, "reset"):
                held.commit.invalidate()  # if it is assigned later, it must begin at the reset's target
                return None
            self.report_reset(held.queue, target, why)
            return held.queue, target

        chosen = [(held, target) for held, target in self._select_begun(targets) if held.queue.topic == topic]
        moved = await asyncio.gather(*(move(held, target) for held, target in chosen))
        return dict(each for each in moved if each is not None)

    def _select_begun(self, targets: Mapping[MessageQueue, int]) -> list[tuple[HeldQueue, int]]:
        """Return the targets of queues that are held or just beginning. Forget the last known offsets of all others."""
        chosen = []
        for queue, target in targets.items():
            held = self._assignments.find(queue)
            if held is not None and held.is_begun:
                chosen.append((held, target))
            elif held is not None:
                held.commit.invalidate()
        return chosen

    def _is_repeated(self, queue: MessageQueue, target: int) -> bool:
        held = self._assignments.find(queue)
        if held is None or held.resets.followed_to != target:
            return False
        return self._context.loop.time() - held.resets.followed_at < SAME_RESET_WITHIN_S

    async def on_pull_reset(self, queue: MessageQueue, response: PullResponse, pull_offset: int | None) -> None:
        """Follow a reset in a response to a pull. The broker sends it once, to the pull that comes first.

        `pull_offset` is the offset of the pull, or None for an abandoned pull, whose reset is the only copy, too. In
        broadcasting, the reset is for every member, so this member forwards it to the others.
        """
        context, target = self._context, response.next_offset
        how = "from the response to an abandoned pull" if pull_offset is None else "made at the broker"
        held = self._assignments.queue(queue)
        if context.config.remote_reset == "refuse":
            await self._keep_offset(held)
        elif context.config.broadcasting and response.max_offset > 0 and not self._is_repeated(queue, target):
            record = self._record(queue.topic, queue.broker_name)
            epoch = max(context.now_ms(), self._epoch(held) + 1, (record.head or 0) + 1)
            await self._follow_all({queue: QueueReset(target, epoch)}, how)
            record.unrecorded[queue] = target
            await self._record_and_forward(record)
        elif await held.move(target, "reset"):
            self.report_reset(queue, target, how, pull_offset)
        elif not context.config.broadcasting:
            held.commit.invalidate()
            if not context.closing:
                await self._forward_reset(queue, target)

    async def _keep_offset(self, held: HeldQueue) -> None:
        if held.is_held and (offset := held.commit.current()) is not None:
            self.report_refusal(f"a reset of {held.queue}")
            await held.move(offset, "reset refused", expected=held.window)

    # --- forwarding to other members

    async def _record_and_forward(self, record: TopicRecord) -> None:
        """Record resets that only this member has received, and forward them to the others, several at a time."""
        context = self._context
        async with record.forward_lock:
            targets, record.unrecorded = record.unrecorded, {}
            if not targets:
                return  # an earlier call has forwarded them
            epoch = await self._assign_epoch(targets, 0)
            pauses = list(RECORD_PAUSES_S)
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
                    failure = str(error)
                    if not pauses or context.closing or isinstance(error, (PermissionDenied, GroupUnknown)):
                        break
                    await asyncio.sleep(pauses.pop(0))
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
        epoch = max(at_least, *(self._epoch(self._assignments.queue(queue)) for queue in targets))
        await self._follow_all({queue: QueueReset(None, epoch) for queue in targets}, "spread")
        return epoch

    async def _forward_reset(self, queue: MessageQueue, target: int) -> None:
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

    # --- clustering: the plan of an admin for the members that hold the queues

    async def _move_held_once(self, reset_id: str, plan: PlanBody) -> bool:
        """Move the queues of the plan that this member holds, each once per plan."""
        moved = self._plans.setdefault(reset_id, {})
        while len(self._plans) > MAX_REMEMBERED_PLANS:
            del self._plans[next(iter(self._plans))]

        async def move(held: HeldQueue, target: int) -> None:
            if await held.move(target, "reset", unless=lambda: held.queue in moved):
                moved[held.queue] = target
                self.report_reset(held.queue, target, f"reset {reset_id}")
            elif not held.is_held:
                held.commit.invalidate()

        before = len(moved)
        await asyncio.gather(*(move(held, target) for held, target in self._select_begun(plan.targets)))
        return len(moved) > before
