"""The ways to reset members with offsets of their own: through records and notifications, and through placeholders."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from itertools import chain, repeat

from pyrocket_consumer.admin.resets.execution import POLL_S, ResetRun, moved_queues, new_epoch, not_moved_text
from pyrocket_consumer.admin.resets.plan import BrokerPlan, MemberPlan, ResetOutcome, ResetResult, ResetState
from pyrocket_consumer.cluster.admin_relay import RelayResult, RelayStatus, RemoteMember
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.reset_record import MAX_EPOCH_ATTEMPTS, EpochTaken, GroupUnknown, ResetRecord
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.command import UpdateConsumerOffsetHeader
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan, encode_status_request

STATUS_DELAYS_S = (2.0, 3.0, 5.0)
"""A member without a result is asked for its status after 2, 5 and 10 s, and every 5 s from then on."""

_RETRYABLE = frozenset({RelayStatus.SILENT, RelayStatus.FAILED})


class MembersReset:
    """Records the reset on every master, notifies every member, and asks each for its status until it has confirmed.

    A reset of a single member is not recorded.
    """

    def __init__(self, run: ResetRun) -> None:
        self._run = run
        self._is_recorded = run.plan.member is None
        broker_names = sorted({queue.broker_name for queue in run.targets})
        self._records = {
            name: ResetRecord(
                run.cluster, run.group, run.topic, name, on_invalid=functools.partial(run.report, "record", name)
            )
            for name in broker_names
        }

    async def move(self) -> ResetResult:
        """Reset all members that are online, and record the reset for the others."""
        run = self._run
        epoch, raced = await self._record()
        planned = {each.client_id: each for each in run.plan.members}
        try:
            present = await run.online()
        except RocketError as error:
            if self._is_recorded:
                error.add_note("The reset is recorded, so members follow it within a minute. It is safe to repeat.")
            raise
        online = {each.client_id: each for each in present if run.plan.member in (None, each.client_id)}
        outcomes = {client_id: self._gone_outcome(client_id) for client_id in planned.keys() - online.keys()}
        foreign = {each.client_id: each for each in planned.values() if each.reply.kind is RelayStatus.FOREIGN}
        at_foreign = asyncio.ensure_future(
            PlaceholderReset(run).move([each for client_id, each in foreign.items() if client_id in online])
        )
        try:
            capable = [member for client_id, member in online.items() if client_id not in foreign]
            outcomes |= await self._notify(capable, PlanBody(run.topic, epoch, run.targets))
            outcomes |= {outcome.subject: outcome for outcome in await at_foreign}
        finally:
            at_foreign.cancel()
        by_member = tuple(outcomes[client_id] for client_id in sorted(outcomes))
        return ResetResult(run.id, epoch, by_member, run.notes, tuple(raced))

    # --- record

    async def _record(self) -> tuple[int, list[MessageQueue]]:
        """Record the reset with an epoch above all known ones. Return it, and the queues with a newer reset."""
        run, known = self._run, list[int]()
        for name, record in self._records.items():
            try:
                known.append(await record.head() or 0)
            except RocketError as error:
                self._skip_broker(name, error)
        known += chain.from_iterable(member.reply.report.epochs.values() for member in run.plan.members)
        epoch = new_epoch(known)
        for times_left in reversed(range(MAX_EPOCH_ATTEMPTS if self._is_recorded else 0)):
            try:
                return epoch, await self._write(epoch)
            except EpochTaken as error:
                if not times_left:
                    raise
                run.report("record", run.topic, f"{error}; recorded again with a later epoch")
                epoch = error.head + 1
        return epoch, []

    def _skip_broker(self, broker_name: str, error: RocketError) -> None:
        if not self._run.partial:
            error.add_note(
                "No offset was moved. Members that start now may find the part that was recorded; it is safe to repeat."
            )
            raise error
        self._run.notes[broker_name] = f"skipped: {error}"
        self._run.report("record", broker_name, self._run.notes[broker_name])

    async def _write(self, epoch: int) -> list[MessageQueue]:
        run, raced = self._run, list[MessageQueue]()
        for name, record in self._records.items():
            if name in run.notes:
                continue
            targets = {queue.queue_id: to for queue, to in run.targets.items() if queue.broker_name == name}
            try:
                lost = await record.write(epoch, targets)
            except EpochTaken:
                raise
            except GroupUnknown as error:
                run.report("record", name, f"nothing to record: {error}")
            except RocketError as error:
                self._skip_broker(name, error)
            else:
                raced += [MessageQueue(run.plan.topic, name, queue_id) for queue_id in lost]
                run.report("record", name, f"queues recorded: {len(targets)}")
        return raced

    # --- notify and verify

    async def _notify(self, members: Sequence[RemoteMember], plan: PlanBody) -> dict[str, ResetOutcome]:
        """Notify members at the same time, then request the status of those that have not confirmed."""
        run, outcomes = self._run, dict[str, ResetOutcome]()
        waiting = {member.client_id: member for member in members}
        action, body = "reset", encode_plan(plan)
        for pause_s in chain(STATUS_DELAYS_S, repeat(STATUS_DELAYS_S[-1])):
            replies = await run.relay(waiting.values(), action, body)
            is_last = run.left_s < pause_s
            for client_id, reply in replies.items():
                outcome, processes = self._outcome_of(client_id, reply, plan), waiting[client_id].connections
                if outcome.state.is_done and processes > 1:
                    text = f"one of {processes} processes with this client id has moved"
                    outcome = ResetOutcome(client_id, ResetState.UNCONFIRMED, text)
                run.outcome(client_id, outcome.state, outcome.text)
                if is_last or outcome.state is not ResetState.PENDING and reply.kind not in _RETRYABLE:
                    outcomes[client_id] = outcome
                    del waiting[client_id]
            if not waiting:
                break
            await asyncio.sleep(pause_s)
            action, body = "status", encode_status_request(run.topic)
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


class PlaceholderReset:
    """Lets brokers notify members of other clients, through offsets that are committed for a moment only.

    A broker resets only committed offsets, and never above them. Members of a broadcasting group commit none.
    """

    def __init__(self, run: ResetRun) -> None:
        self._run = run
        self._targets = run.targets

    async def move(self, members: Sequence[MemberPlan]) -> list[ResetOutcome]:
        """Notify the members, and observe their offsets. The outcome of one that cannot be reset has the reason."""
        run, targets = self._run, self._targets
        outcomes = [
            run.outcome(each.client_id, ResetState.UNREACHED, each.how) for each in members if not each.reachable
        ]
        waiting = {each.client_id: each.member for each in members if each.reachable}
        if not waiting or run.notes:
            text = "a broker was skipped"
            return outcomes + [run.outcome(client_id, ResetState.UNREACHED, text) for client_id in waiting]
        before = await run.fetch_offsets(waiting.values())
        try:
            for broker in run.brokers.values():
                await self._reset_at(broker)
        except RocketError as error:
            text = f"its broker refused: {error}"
            return outcomes + [run.outcome(client_id, ResetState.UNCONFIRMED, text) for client_id in waiting]
        unmoved = {client_id: set(targets) for client_id in waiting}
        while waiting and run.left_s:
            await asyncio.sleep(POLL_S)
            for client_id, now in (await run.fetch_offsets(waiting.values())).items():
                unmoved[client_id] -= moved_queues(before[client_id], now, targets)
                if not unmoved[client_id]:
                    del waiting[client_id]
                    outcomes.append(run.outcome(client_id, ResetState.MOVED, "observed in its reported offsets"))
        for client_id in waiting:
            outcomes.append(run.outcome(client_id, ResetState.UNCONFIRMED, not_moved_text(unmoved[client_id])))
        return outcomes

    async def _reset_at(self, broker: BrokerPlan) -> None:
        """Commit the targets, have the broker send them to its members, and remove them."""
        run = self._run
        here = {queue: to for queue, to in self._targets.items() if queue.broker_name == broker.name}
        try:
            await run.commit_all(here)
            await run.send_table(broker.address)
        finally:  # restore -1, which lag displays and later clustering groups do not take for an offset

            async def undo(queue: MessageQueue) -> None:
                header = UpdateConsumerOffsetHeader(run.group, run.topic, queue.queue_id, -1, broker.name)
                await run.cluster.call(broker.address, header)

            await gather_limited(here, undo)
