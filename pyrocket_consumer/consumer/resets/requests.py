"""Requests to reset offsets: of brokers (220), and of admins and members, which brokers relay (307)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pyrocket_consumer.cluster.client import read_body
from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.tasks import Throttle
from pyrocket_consumer.consumer.resets.records import queue_ids
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.errors import ProtocolError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets, QueueReset
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
    encode_report,
    is_valid_epoch,
)
from pyrocket_consumer.text import logger

log = logger("consumer")

T = TypeVar("T")

REPLY_TIMEOUT_S = 5.0
"""After this time the reply is "pending". The broker waits 10 s for the reply."""

ROUTE_REFRESH_EVERY_S = 1.0
"""The minimum time between two route requests because of plans with unknown queues."""

_REASON_CHARACTERS = 300
_REFUSES = "this consumer has remote_reset='refuse'"


class ResetRequests:
    """Checks requests to reset offsets, and answers them. Confined to the I/O thread."""

    def __init__(self, context: MemberContext, assignments: Assignments, resets: Resets) -> None:
        self._context = context
        self._assignments = assignments
        self._resets = resets
        self._route_requested_at = float("-inf")
        self._decoding = Throttle(context.loop)

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
                self._resets.report_refusal(f"reset {reset_id}")
                return self._refusal(command, reset_id, _REFUSES)
            if header.operation == "reset":
                plan = await self.read(decode_plan, command.body)
                if why := await self._plan_error(plan):
                    self._resets.report_not_followed(f"reset {reset_id} is refused, and nothing moved: {why}")
                    return self._refusal(command, reset_id, why)
                return await self._follow_plan(command, reset_id, plan)
        except ProtocolError as error:
            self._resets.report_not_followed(f"the plan of reset {reset_id} cannot be read, and nothing moved: {error}")
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
        what, tasks = f"reset {reset_id}", self._context.tasks
        work: asyncio.Task[bool] | asyncio.Task[dict[MessageQueue, int]]
        if self._context.config.broadcasting:
            resets = {queue: QueueReset(target, plan.epoch) for queue, target in plan.targets.items()}
            work = tasks.begin(self._resets.follow(resets, what), what)
        else:
            work = tasks.begin(self._resets.move_held(plan.targets, what, reset_id), what)
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
        held = {each.queue for each in self._assignments.all()}
        ids = {name: queue_ids(self._context, topic, name) for name in {queue.broker_name for queue in queues}}
        return [queue for queue in queues if queue.queue_id not in ids[queue.broker_name] and queue not in held]

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
            held.queue: self._resets.epoch(held)
            for held in of_topic
            if (held.resets.is_followed or held.queue in is_holding) and not held.resets.is_unpersisted
        }
        offsets = self._assignments.offsets(topic)
        return ReportBody(
            topic,
            reset_id,
            {queue: epoch for queue, epoch in epochs.items() if epoch},
            {queue: offset for queue, offset in offsets.items() if offset <= MAX_RECORDED_OFFSET},
            {held.queue: held.resets.by_id[reset_id] for held in of_topic if reset_id in held.resets.by_id},
            {held.queue: held.resets.target for held in of_topic if held.resets.count},
            {held.queue: held.resets.count for held in of_topic if held.resets.count},
            str(self._context.config.message_model),
            store.identity if isinstance(store, DatabaseOffsets) else "",
        )

    async def on_broker_reset(self, topic: str, targets: Mapping[MessageQueue, int]) -> None:
        """Follow a broker's request to every member (220). A table with an invalid entry moves no queue."""
        context = self._context
        if why := self._table_error(topic, targets):
            if context.subscriptions.get(topic) is None:  # the topic may be subscribed to again
                self._resets.forget_last_known(targets)
            self._resets.report_not_followed(f"a reset of {topic} by a broker is refused, and nothing moved: {why}")
        elif context.config.broadcasting and targets and all(map(self._resets.is_repeated, targets, targets.values())):
            log.info("group=%s a reset of %s to the targets of the last one is not repeated", context.name, topic)
        else:
            await self._resets.move_held(targets, "requested by the broker")

    def _table_error(self, topic: str, targets: Mapping[MessageQueue, int]) -> str:
        is_held = any(each.queue.topic == topic for each in self._assignments.all())  # also while they are given up
        if self._context.subscriptions.get(topic) is None and not is_held:
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
