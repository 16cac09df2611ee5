"""The way to reset a group whose members have offsets of their own: through records, notifications and placeholders."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from itertools import chain, repeat

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.resets.execution import (
    POLL_S,
    ProgressCallback,
    Reset,
    moved_queues,
    new_epoch,
    not_moved_text,
)
from pyrocket_consumer.admin.resets.plan import BrokerPlan, MemberPlan, ResetOutcome, ResetPlan, ResetResult, ResetState
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import RelayResult, RelayStatus, RemoteMember
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.cluster.reset_record import MAX_EPOCH_ATTEMPTS, EpochTaken, GroupUnknown, ResetRecord
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.command import UpdateConsumerOffsetHeader
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan, encode_status_request

STATUS_DELAYS_S = (2.0, 3.0, 5.0)
"""A member without a result is asked for its status after 2, 5 and 10 s, and every 5 s from then on."""

_RETRYABLE = frozenset({RelayStatus.SILENT, RelayStatus.FAILED})


class BroadcastingReset(Reset):
    """Records the reset on every master, notifies every member, and asks each for its status until it has confirmed.

    A reset of a single member is not recorded.
    """

    def __init__(
        self, cluster: Cluster, plan: ResetPlan, report: ProgressCallback, partial: bool, wait_s: float
    ) -> None:
        super().__init__(cluster, plan, report, partial, wait_s)
        self._is_recorded = plan.member is None
        self._records = {
            name: ResetRecord(
                cluster, self.group, self.topic, name, on_invalid=functools.partial(self.report, "record", name)
            )
            for name in by_broker(sorted(self.targets))
        }

    async def move(self) -> ResetResult:
        """Reset all members that are online, and record the reset for the others."""
        epoch, raced = await self._record()
        planned = {each.client_id: each for each in self.plan.members}
        try:
            present = await self.online()
        except RocketError as error:
            if self._is_recorded:
                error.add_note("The reset is recorded, so members follow it within a minute. It is safe to repeat.")
            raise
        online = {each.client_id: each for each in present if self.plan.member in (None, each.client_id)}
        outcomes = {client_id: self._gone_outcome(client_id) for client_id in planned.keys() - online.keys()}
        foreign = {each.client_id: each for each in planned.values() if each.reply.kind is RelayStatus.FOREIGN}
        at_foreign = asyncio.ensure_future(
            self._notify_through_brokers([each for client_id, each in foreign.items() if client_id in online])
        )
        try:
            capable = [member for client_id, member in online.items() if client_id not in foreign]
            outcomes |= await self._notify(capable, PlanBody(self.topic, epoch, self.targets))
            outcomes |= {outcome.subject: outcome for outcome in await at_foreign}
        finally:
            at_foreign.cancel()
        by_member = tuple(outcomes[client_id] for client_id in sorted(outcomes))
        return ResetResult(self.id, epoch, by_member, self.notes, tuple(raced))

    # --- record

    async def _record(self) -> tuple[int, list[MessageQueue]]:
        """Record the reset with an epoch above all known ones. Return it, and the queues with a newer reset."""
        known = list[int]()
        for name, record in self._records.items():
            try:
                known.append(await record.head() or 0)
            except RocketError as error:
                self._skip_broker(name, error)
        known += chain.from_iterable(member.reply.report.epochs.values() for member in self.plan.members)
        epoch = new_epoch(known)
        for times_left in reversed(range(MAX_EPOCH_ATTEMPTS if self._is_recorded else 0)):
            try:
                return epoch, await self._write(epoch)
            except EpochTaken as error:
                if not times_left:
                    raise
                self.report("record", self.topic, f"{error}; recorded again with a later epoch")
                epoch = error.head + 1
        return epoch, []

    def _skip_broker(self, broker_name: str, error: RocketError) -> None:
        if not self.partial:
            error.add_note(
                "No offset was moved. Members that start now may find the part that was recorded; it is safe to repeat."
            )
            raise error
        self.notes[broker_name] = f"skipped: {error}"
        self.report("record", broker_name, self.notes[broker_name])

    async def _write(self, epoch: int) -> list[MessageQueue]:
        raced = list[MessageQueue]()
        for name, record in self._records.items():
            if name in self.notes:
                continue
            targets = {queue.queue_id: to for queue, to in self.targets.items() if queue.broker_name == name}
            try:
                lost = await record.write(epoch, targets)
            except EpochTaken:
                raise
            except GroupUnknown as error:
                self.report("record", name, f"nothing to record: {error}")
            except RocketError as error:
                self._skip_broker(name, error)
            else:
                raced += [MessageQueue(self.plan.topic, name, queue_id) for queue_id in lost]
                self.report("record", name, f"queues recorded: {len(targets)}")
        return raced

    # --- notify and verify

    async def _notify(self, members: Sequence[RemoteMember], plan: PlanBody) -> dict[str, ResetOutcome]:
        """Notify members at the same time, then request the status of those that have not confirmed."""
        outcomes = dict[str, ResetOutcome]()
        waiting = {member.client_id: member for member in members}
        action, body = "reset", encode_plan(plan)
        for pause_s in chain(STATUS_DELAYS_S, repeat(STATUS_DELAYS_S[-1])):
            replies = await self.relay(waiting.values(), action, body)
            is_last = self.left_s < pause_s
            for client_id, reply in replies.items():
                outcome, processes = self._outcome_of(client_id, reply, plan), waiting[client_id].connections
                if outcome.state.is_done and processes > 1:
                    text = f"one of {processes} processes with this client id has moved"
                    outcome = ResetOutcome(client_id, ResetState.UNCONFIRMED, text)
                self.outcome(client_id, outcome.state, outcome.text)
                if is_last or outcome.state is not ResetState.PENDING and reply.kind not in _RETRYABLE:
                    outcomes[client_id] = outcome
                    del waiting[client_id]
            if not waiting:
                break
            await asyncio.sleep(pause_s)
            action, body = "status", encode_status_request(self.topic)
        return outcomes

    def _outcome_of(self, client_id: str, reply: RelayResult, plan: PlanBody) -> ResetOutcome:
        """Return the outcome that a reply shows. Reported epochs are exact, while offsets move on."""
        recorded, state, text = "recorded, " if self._is_recorded else "", ResetState.UNREACHED, ""
        if reply.kind is RelayStatus.OURS:
            epochs = reply.report.epochs
            if reply.state == "refused":
                state, text = ResetState.REFUSED, reply.reason
            elif any(epochs.get(queue, 0) < plan.epoch for queue in plan.targets):
                state, text = ResetState.PENDING, reply.reason or "not stored yet"
            else:
                state = ResetState.ALREADY if reply.state == "already" else ResetState.MOVED
        elif reply.kind is RelayStatus.GONE:
            return self._gone_outcome(client_id)
        elif reply.kind is RelayStatus.FORBIDDEN:
            state = ResetState.UNCONFIRMED
            text = f"{recorded}unconfirmed: this account may not send requests to members"
        elif reply.kind is RelayStatus.FOREIGN:
            text = "it is another client"
        else:
            text = f"{recorded and 'recorded, but '}it does not respond: {reply.reason}"
        return ResetOutcome(client_id, state, text)

    def _gone_outcome(self, client_id: str) -> ResetOutcome:
        """Return the outcome of a member that has left. It finds the record, if there is one."""
        if not self._is_recorded:
            return ResetOutcome(client_id, ResetState.UNREACHED, "it has left, and nothing is recorded for it")
        return ResetOutcome(client_id, ResetState.GONE, "it has left; it follows at its next start")

    # --- members of other clients

    async def _notify_through_brokers(self, members: Sequence[MemberPlan]) -> list[ResetOutcome]:
        """Let brokers notify members of other clients, through offsets that are committed for a moment only.

        A broker resets only committed offsets, and never above them. Members of a broadcasting group commit none.
        This observes the offsets of the members. The outcome of one that cannot be reset has the reason.
        """
        targets = self.targets
        outcomes = [
            self.outcome(each.client_id, ResetState.UNREACHED, each.how) for each in members if not each.reachable
        ]
        waiting = {each.client_id: each.member for each in members if each.reachable}
        if not waiting or self.notes:
            text = "a broker was skipped"
            return outcomes + [self.outcome(client_id, ResetState.UNREACHED, text) for client_id in waiting]
        before = await self.fetch_offsets(waiting.values())
        try:
            for broker in self.brokers.values():
                await self._reset_at(broker)
        except RocketError as error:
            text = f"its broker refused: {error}"
            return outcomes + [self.outcome(client_id, ResetState.UNCONFIRMED, text) for client_id in waiting]
        unmoved = {client_id: set(targets) for client_id in waiting}
        while waiting and self.left_s:
            await asyncio.sleep(POLL_S)
            for client_id, now in (await self.fetch_offsets(waiting.values())).items():
                unmoved[client_id] -= moved_queues(before[client_id], now, targets)
                if not unmoved[client_id]:
                    del waiting[client_id]
                    outcomes.append(self.outcome(client_id, ResetState.MOVED, "observed in its reported offsets"))
        for client_id in waiting:
            outcomes.append(self.outcome(client_id, ResetState.UNCONFIRMED, not_moved_text(unmoved[client_id])))
        return outcomes

    async def _reset_at(self, broker: BrokerPlan) -> None:
        """Commit the targets, have the broker send them to its members, and remove them."""
        here = {queue: to for queue, to in self.targets.items() if queue.broker_name == broker.name}
        try:
            await self.commit_all(here)
            await self.send_table(broker.address)
        finally:  # restore -1, which lag displays and later clustering groups do not take for an offset

            async def undo(queue: MessageQueue) -> None:
                header = UpdateConsumerOffsetHeader(self.group, self.topic, queue.queue_id, -1, broker.name)
                await self.cluster.call(broker.address, header)

            await gather_limited(here, undo)


async def forget_reset(cluster: Cluster, group: str, topic: str) -> bool:
    """Remove the resets recorded for a group and topic on every master. Return whether there was one."""
    namespace = cluster.config.namespace
    wire_group, wire_topic = wrap(namespace, group), wrap(namespace, topic)
    route = await cluster.routes.get(wire_topic, refresh=True)
    await check_group_exists(cluster, group)
    was_recorded = False
    for data in route.queues:
        record = ResetRecord(cluster, wire_group, wire_topic, data.broker_name)
        queue_ids = range(max(data.read_queues, data.write_queues))
        # The head is None if it is invalid, and 0 if a reset ended before it was written.
        was_recorded |= await record.head() != 0 or bool(await record.read(queue_ids))
        await record.forget(queue_ids)
    return was_recorded
