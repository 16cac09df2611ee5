"""Execute a reset: record it, notify the members and verify; or move the offsets of a clustering group."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, TypeVar
from uuid import uuid4

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.resets.plan import BrokerPlan, MemberPlan, ResetPlan, ResetWay, way_for
from pyrocket_consumer.admin.resets.result import ResetOutcome, ResetProgress, ResetResult, ResetState, queue_name
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import (
    RelayResult,
    RelayStatus,
    RemoteMember,
    fetch_group_members,
    fetch_member_offsets,
    relay_to_all,
)
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.namespace import wrap
from pyrocket_consumer.cluster.reset_record import MAX_EPOCH_ATTEMPTS, EpochTaken, GroupUnknown, ResetRecord
from pyrocket_consumer.cluster.responses import read_body
from pyrocket_consumer.errors import BrokerError, ClientClosed, ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.database.claim import StoredOffset
from pyrocket_consumer.protocol.bodies import decode_offset_table
from pyrocket_consumer.protocol.command import ResetOffsetHeader, UpdateConsumerOffsetHeader
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan, encode_status_request, is_valid_epoch
from pyrocket_consumer.transport.backoff import Backoff

STATUS_DELAYS_S = (2.0, 3.0, 5.0)
"""A member without a result is asked for its status after 2, 5 and 10 s, and every 5 s from then on."""

POLL_S = 0.5
"""The interval at which offsets of other clients are read. A replay that is faster is not observed."""

MAX_TABLE_ATTEMPTS = 5

_RETRYABLE = frozenset({RelayStatus.SILENT, RelayStatus.FAILED})


T = TypeVar("T")
ProgressCallback = Callable[[ResetProgress], None]


async def execute_plan(
    cluster: Cluster, plan: ResetPlan, report: ProgressCallback, partial: bool, wait_s: float
) -> ResetResult:
    """Execute a plan."""
    problems = [broker for broker in plan.brokers if broker.problem]
    if problems and not partial:
        raise RocketError(
            f"{problems[0]}; no offset was moved. Its queues cannot be reset now. Try again later, or reset the others "
            "with partial=True (in the shell --partial)"
        )
    run = _ResetExecution(cluster, plan, report, wait_s)
    if plan.store is not None:
        return await run.in_store(plan.store)
    if plan.broadcasting:
        return await run.broadcasting(partial)
    return await run.clustering()


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


class _ResetExecution:
    """One execution of a plan. Confined to the I/O thread."""

    def __init__(self, cluster: Cluster, plan: ResetPlan, report: ProgressCallback, wait_s: float) -> None:
        self._cluster = cluster
        self._plan = plan
        self._on_progress = report
        self._deadline = cluster.loop.time() + wait_s
        self._id = str(uuid4())
        self._group, self._topic = plan.wire_group, plan.wire_topic
        self._targets = plan.wire_targets
        self._brokers = {broker.name: broker for broker in plan.brokers if not broker.problem}
        self._notes = {broker.name: broker.problem for broker in plan.brokers if broker.problem}

    def _report(self, step: str, subject: str, text: str) -> None:
        self._on_progress(ResetProgress(step, subject, text))

    @property
    def _left_s(self) -> float:
        """The remaining seconds to wait for members."""
        return max(0.0, self._deadline - self._cluster.loop.time())

    def _report_outcome(self, outcome: ResetOutcome) -> ResetOutcome:
        step = "member" if self._plan.broadcasting else "queue"
        self._report(step, outcome.subject, f"{outcome.state}" + (f" ({outcome.text})" if outcome.text else ""))
        return outcome

    def _targets_at(self, broker_name: str) -> dict[int, int]:
        return {queue.queue_id: to for queue, to in self._targets.items() if queue.broker_name == broker_name}

    async def _online(self, failures: dict[str, RocketError] | None = None) -> tuple[RemoteMember, ...]:
        """Return the members that are online now, from the brokers that are not skipped.

        With `failures`, a broker that fails raises nothing; its error is added there under its name.
        """
        brokers = {name: broker.address for name, broker in self._brokers.items() if name not in self._notes}
        found = await fetch_group_members(self._cluster, self._group, brokers, failures)
        _raise_if_closed((failures or {}).values())
        return found.members

    async def _for_each_queue(
        self, queues: Iterable[MessageQueue], work: Callable[[MessageQueue], Coroutine[Any, Any, ResetOutcome]]
    ) -> list[ResetOutcome]:
        """Return the outcome of `work` for each queue. An error is the outcome of its queue, and hides no other."""

        async def attempt(queue: MessageQueue) -> ResetOutcome:
            try:
                return self._report_outcome(await work(queue))
            except RocketError as error:
                _raise_if_closed([error])
                return self._report_outcome(_failed_outcome(queue, error))

        return list((await _one_per_broker_first(queues, attempt)).values())

    # --- broadcasting: record, notify, verify

    async def broadcasting(self, partial: bool) -> ResetResult:
        """Record the reset on every master, notify every member, and request their status until each has confirmed."""
        records = {
            name: ResetRecord(
                self._cluster,
                self._group,
                self._topic,
                name,
                on_invalid=functools.partial(self._report, "record", name),
            )
            for name in sorted(self._brokers)
            if self._targets_at(name)
        }
        epoch = await self._epoch(records, partial)
        for times_left in reversed(range(MAX_EPOCH_ATTEMPTS)):
            try:
                raced = await self._write(records, epoch, partial) if self._plan.member is None else []
                break
            except EpochTaken as error:
                if not times_left:
                    raise
                self._report("record", self._topic, f"{error}; recorded again with a later epoch")
                epoch = error.head + 1
        targets = {queue: to for queue, to in self._targets.items() if queue.broker_name not in self._notes}
        plan = PlanBody(self._topic, epoch, targets)
        planned = {each.client_id: each for each in self._plan.members}
        try:
            present = await self._online()
        except RocketError as error:
            if self._plan.member is None:
                error.add_note("The reset is recorded, so members follow it within a minute. It is safe to repeat.")
            raise
        online = {member.client_id: member for member in present if self._plan.member in (None, member.client_id)}
        outcomes = {client_id: self._gone_outcome(client_id) for client_id in planned.keys() - online.keys()}
        foreign = [each for each in planned.values() if each.reply.kind is RelayStatus.FOREIGN]
        capable = [
            member for client_id, member in online.items() if client_id not in {each.client_id for each in foreign}
        ]
        at_foreign = asyncio.ensure_future(
            self._reset_foreign([each for each in foreign if each.client_id in online], targets)
        )
        try:
            outcomes |= await self._reset_members(capable, plan)
            outcomes |= {outcome.subject: outcome for outcome in await at_foreign}
        finally:
            at_foreign.cancel()
        return ResetResult(
            self._id, epoch, tuple(outcomes[client_id] for client_id in sorted(outcomes)), self._notes, tuple(raced)
        )

    async def _epoch(self, records: Mapping[str, ResetRecord], partial: bool) -> int:
        """Return an epoch above all known ones, even if the local clock is behind."""
        highest = 0
        for name, record in list(records.items()):
            try:
                highest = max(highest, await record.head() or 0)
            except RocketError as error:
                self._skip_broker(name, error, partial)
        now_ms = int(time.time() * 1000)
        for member in self._plan.members:
            reported = member.reply.report.epochs.values()
            highest = max(highest, *(epoch for epoch in reported if is_valid_epoch(epoch, now_ms)), 0)
        return max(now_ms, highest + 1)

    def _skip_broker(self, broker_name: str, error: RocketError, partial: bool) -> None:
        if not partial:
            error.add_note(
                "No offset was moved. Members that start now may find the part that was recorded; it is safe to repeat."
            )
            raise error
        self._notes[broker_name] = f"skipped: {error}"
        self._report("record", broker_name, self._notes[broker_name])

    async def _write(self, records: Mapping[str, ResetRecord], epoch: int, partial: bool) -> list[MessageQueue]:
        raced: list[MessageQueue] = []
        for name, record in records.items():
            if name in self._notes:
                continue
            try:
                lost = await record.write(epoch, self._targets_at(name))
            except EpochTaken:
                raise
            except GroupUnknown as error:
                self._report("record", name, f"nothing to record: {error}")
            except RocketError as error:
                self._skip_broker(name, error, partial)
            else:
                raced += [MessageQueue(self._plan.topic, name, queue_id) for queue_id in lost]
                self._report("record", name, f"queues recorded: {len(self._targets_at(name))}")
        return raced

    async def _reset_members(self, members: Sequence[RemoteMember], plan: PlanBody) -> dict[str, ResetOutcome]:
        """Notify members at the same time, then request the status of those that have not confirmed."""
        outcomes: dict[str, ResetOutcome] = {}
        processes = {member.client_id: member.connections for member in members}
        waiting = {member.client_id: member for member in members}

        def record_replies(replies: Mapping[str, RelayResult], last: bool) -> None:
            for client_id, reply in replies.items():
                outcome = self._outcome_of(client_id, reply, plan)
                if outcome.state.is_done and processes[client_id] > 1:
                    text = f"one of {processes[client_id]} processes with this client id has moved"
                    outcome = ResetOutcome(client_id, ResetState.UNCONFIRMED, text)
                if last or outcome.state is not ResetState.PENDING and reply.kind not in _RETRYABLE:
                    outcomes[client_id] = self._report_outcome(outcome)
                    del waiting[client_id]
                else:
                    self._report_outcome(outcome)

        action, body = "reset", encode_plan(plan)
        for pause_s in chain(STATUS_DELAYS_S, repeat(STATUS_DELAYS_S[-1])):
            requested = list(waiting.values())
            replies = await relay_to_all(self._cluster, self._group, requested, action, self._id, body, self._left_s)
            record_replies(replies, last=self._left_s < pause_s)
            if not waiting:
                break
            await asyncio.sleep(pause_s)
            action, body = "status", encode_status_request(self._topic)
        return outcomes

    def _outcome_of(self, client_id: str, reply: RelayResult, plan: PlanBody) -> ResetOutcome:
        """Return the outcome that a reply shows. Reported epochs are exact, while offsets move on."""
        if reply.kind is RelayStatus.OURS:
            epochs = reply.report.epochs
            if reply.state == "refused":
                return ResetOutcome(client_id, ResetState.REFUSED, reply.reason)
            if all(epochs.get(queue, 0) >= plan.epoch for queue in plan.targets):
                state = ResetState.ALREADY if reply.state == "already" else ResetState.MOVED
                return ResetOutcome(client_id, state)
            return ResetOutcome(client_id, ResetState.PENDING, reply.reason or "not stored yet")
        recorded = "recorded, " if self._plan.member is None else ""
        if reply.kind is RelayStatus.GONE:
            return self._gone_outcome(client_id)
        if reply.kind is RelayStatus.FORBIDDEN:
            text = f"{recorded}unconfirmed: this account may not send requests to members"
            return ResetOutcome(client_id, ResetState.UNCONFIRMED, text)
        if reply.kind is RelayStatus.FOREIGN:
            return ResetOutcome(client_id, ResetState.UNREACHED, "it is another client")
        but = "recorded, but " if recorded else ""
        return ResetOutcome(client_id, ResetState.UNREACHED, f"{but}it does not respond: {reply.reason}")

    def _gone_outcome(self, client_id: str) -> ResetOutcome:
        """Return the outcome of a member that has left. It finds the record, if there is one."""
        if self._plan.member is not None:
            return ResetOutcome(client_id, ResetState.UNREACHED, "it has left, and nothing is recorded for it")
        return ResetOutcome(client_id, ResetState.GONE, "it has left; it follows at its next start")

    # --- broadcasting: members of other clients

    async def _reset_foreign(
        self, members: Sequence[MemberPlan], targets: Mapping[MessageQueue, int]
    ) -> list[ResetOutcome]:
        """Let brokers notify members of other clients, through offsets that are committed for a moment only."""
        outcomes = [
            self._report_outcome(ResetOutcome(each.client_id, ResetState.UNREACHED, each.how))
            for each in members
            if not each.reachable
        ]
        reachable = [each for each in members if each.reachable]
        if not reachable or self._notes:
            return outcomes + [
                self._report_outcome(ResetOutcome(each.client_id, ResetState.UNREACHED, "a broker was skipped"))
                for each in reachable
            ]
        offsets = await gather_limited([each.member for each in reachable], self._fetch_offsets)
        before = {member.client_id: table for member, table in offsets.items()}
        try:
            for broker in self._brokers.values():
                await self._reset_through_placeholders(broker, targets)
        except RocketError as error:
            return outcomes + [
                self._report_outcome(
                    ResetOutcome(each.client_id, ResetState.UNCONFIRMED, f"its broker refused: {error}")
                )
                for each in reachable
            ]
        waiting = {each.client_id: each.member for each in reachable}
        unmoved = {client_id: set(targets) for client_id in waiting}
        while waiting and self._left_s:
            await asyncio.sleep(POLL_S)
            for member, now in (await gather_limited(list(waiting.values()), self._fetch_offsets)).items():
                client_id = member.client_id
                unmoved[client_id] -= _moved_queues(before[client_id], now, targets)
                if not unmoved[client_id]:
                    del waiting[client_id]
                    moved = ResetOutcome(client_id, ResetState.MOVED, "observed in its reported offsets")
                    outcomes.append(self._report_outcome(moved))
        return outcomes + [
            self._report_outcome(ResetOutcome(client_id, ResetState.UNCONFIRMED, _not_moved_text(unmoved[client_id])))
            for client_id in waiting
        ]

    async def _fetch_offsets(self, member: RemoteMember) -> dict[MessageQueue, int]:
        try:
            return await fetch_member_offsets(self._cluster, self._group, member, self._topic, self._left_s)
        except RocketError:
            return {}

    async def _reset_through_placeholders(self, broker: BrokerPlan, targets: Mapping[MessageQueue, int]) -> None:
        """Commit the targets for a moment, because a broker resets only committed offsets, and never above them."""
        here = [queue for queue in targets if queue.broker_name == broker.name]
        cluster = self._cluster
        try:
            await self._commit_all({queue: targets[queue] for queue in here})
            await cluster.call(broker.address, ResetOffsetHeader(self._topic, self._group, -1, False, -1))
        finally:  # restore -1, which lag displays and later clustering groups do not take for an offset

            async def undo(queue: MessageQueue) -> None:
                header = UpdateConsumerOffsetHeader(self._group, self._topic, queue.queue_id, -1, broker.name)
                await cluster.call(broker.address, header)

            await gather_limited(here, undo)

    # --- a group whose offsets are in a database

    async def in_store(self, store: DatabaseOffsets) -> ResetResult:
        """Set the offsets in the database, read them again, and verify that online members claim the queues again.

        A member that consumes the topic without a claim uses another database. Then the reset is not confirmed.
        """
        plan, before = self._plan, await asyncio.to_thread(store.offsets, self._group)
        now_ms = int(time.time() * 1000)
        epoch = max(now_ms, *(row.reset_epoch + 1 for row in before if is_valid_epoch(row.reset_epoch, now_ms)), 1)
        targets = {queue: to for queue, to in self._targets.items() if queue.broker_name not in self._notes}
        begun = {row.queue for row in before}  # perhaps after the plan was made
        retries = {queue: each for queue, each in plan.wire_retries.items() if queue not in begun}
        starts = {queue: each.target for queue, each in retries.items()}
        await asyncio.to_thread(store.reset, self._group, {**targets, **starts}, epoch)
        rows = await asyncio.to_thread(store.offsets, self._group)
        at_reset = {row.queue: row for row in rows if row.reset_epoch == epoch}
        self._report("store", repr(store), f"queues set: {len(at_reset)}")
        claimed: dict[MessageQueue, str] = {}
        while awaited := set() if plan.unsubscribed else await self._awaited():
            for row in await asyncio.to_thread(store.offsets, self._group, self._topic):
                if row.queue in at_reset and row.epoch > at_reset[row.queue].epoch and row.owner:
                    claimed[row.queue] = row.owner
            if not self._left_s or claimed.keys() >= targets.keys() & at_reset.keys():
                break
            await asyncio.sleep(POLL_S)
        had = {row.queue: row.owner for row in before if row.owner in awaited}
        outcomes = [
            self._report_outcome(_store_outcome(queue, at_reset, claimed, had, awaited)) for queue in sorted(targets)
        ]
        outcomes += [
            self._report_outcome(ResetOutcome(str(each.queue), ResetState.MOVED, f"in the database, {each.text}"))
            for each in retries.values()
        ]
        try:
            if not awaited:  # otherwise members commit them
                await self._commit_all({queue: to for queue, to in targets.items() if queue not in claimed})
        except RocketError as error:  # for this group, the offsets at brokers are for information only
            self._report("broker", self._topic, f"not committed: {error}")
        return ResetResult(self._id, epoch, tuple(outcomes), self._notes)

    async def _awaited(self) -> set[str]:
        """Return the members that should claim queues again. If a broker fails, those of the plan may still run."""
        failures: dict[str, RocketError] = {}
        online = {member.client_id for member in await self._online(failures)}
        return online | {each.client_id for each in self._plan.members if failures}

    # --- clustering

    async def clustering(self) -> ResetResult:
        """Move the queues of the group, in the way that the online members allow."""
        plan = self._plan
        online = await self._online()
        planned = {each.client_id: each for each in plan.members}
        unknown = [member for member in online if member.client_id not in planned]
        if unknown:
            question = encode_status_request(self._topic)
            replies = await relay_to_all(
                self._cluster, self._group, unknown, "status", self._id, question, self._left_s
            )
            planned |= {member.client_id: MemberPlan(member, replies[member.client_id], True, "") for member in unknown}
        members = [replace(planned[member.client_id], member=member) for member in online]
        way = way_for(plan.model, members)
        if way is ResetWay.BROKERS and plan.way is not ResetWay.BROKERS and not plan.all_queues:
            raise RocketError("a member of another client has joined after the plan was made; plan again")
        if way is ResetWay.MEMBERS:
            outcomes = await self._reset_through_owners()
        elif way is ResetWay.COMMITS:
            outcomes = await self._commit()
        else:
            outcomes = await self._reset_through_brokers(members)
        return ResetResult(self._id, 0, tuple(outcomes), self._notes)

    async def _reset_through_owners(self) -> list[ResetOutcome]:
        """Notify the members repeatedly, until the owner of each queue has moved it."""
        outcomes: list[ResetOutcome] = []
        left, backoff = dict(self._targets), Backoff(0.1, 2.0)
        refusals, silent = dict[str, str](), dict[str, str]()
        while left:
            failures: dict[str, RocketError] = {}
            online = await self._online(failures)
            if not online and not failures:
                break
            body = encode_plan(PlanBody(self._topic, max(1, int(time.time() * 1000)), left))
            replies = await relay_to_all(self._cluster, self._group, online, "reset", self._id, body, self._left_s)
            refusals, silent = {}, {name: str(error) for name, error in failures.items()}
            for client_id, reply in sorted(replies.items()):
                if reply.kind in (RelayStatus.FOREIGN, RelayStatus.FORBIDDEN) or reply.state == "refused":
                    refusals[client_id] = reply.reason or reply.kind
                elif reply.kind is not RelayStatus.OURS:
                    silent[client_id] = reply.reason or reply.kind
                for queue, target in reply.report.moved.items():
                    if left.get(queue) == target:
                        del left[queue]
                        moved = ResetOutcome(queue_name(queue), ResetState.MOVED, f"by {client_id}")
                        outcomes.append(self._report_outcome(moved))
            if left and not self._left_s:
                break
            if left:
                await asyncio.sleep(backoff.failed())
        if left and not refusals and not silent:
            outcomes += await self._commit(left)  # no member owns them, or will
        elif left and not refusals:
            outcomes += await self._commit_for_next_owner(left, silent)
        else:
            why = "; ".join(f"{client_id}: {reason}" for client_id, reason in sorted(refusals.items()))
            outcomes += [
                self._report_outcome(
                    ResetOutcome(queue_name(queue), ResetState.UNREACHED, f"no member has moved it ({why})")
                )
                for queue in left
            ]
        return sorted(outcomes, key=lambda outcome: outcome.subject)

    async def _commit_for_next_owner(
        self, targets: Mapping[MessageQueue, int], silent: Mapping[str, str]
    ) -> list[ResetOutcome]:
        """Commit the targets for the next owner. The current owners do not respond, and may still commit."""
        why = "; ".join(f"{client_id}: {reason}" for client_id, reason in sorted(silent.items()))

        async def leave(queue: MessageQueue) -> ResetOutcome:
            if self._brokers[queue.broker_name].server_side:
                await self._reset_at_broker(queue, targets[queue])
            else:
                await self._cluster.broker(queue.broker_name).commit_offset(self._group, queue, targets[queue])
            text = f"committed for the group, but its owner did not confirm it ({why})"
            return ResetOutcome(queue_name(queue), ResetState.UNCONFIRMED, text)

        return await self._for_each_queue(sorted(targets), leave)

    async def _commit(self, targets: Mapping[MessageQueue, int] | None = None) -> list[ResetOutcome]:
        """Commit the targets for a group without online members."""
        wanted = self._targets if targets is None else targets

        async def commit(queue: MessageQueue) -> ResetOutcome:
            broker, target = self._cluster.broker(queue.broker_name), wanted[queue]
            if not await broker.commit_offset(self._group, queue, target):
                # An earlier reset waits for the next pull of the group. Until then no commit counts, so replace it.
                await self._reset_at_broker(queue, target)
            now = await broker.query_offset(self._group, queue, set_zero_if_not_found=False)
            if now == target:
                return ResetOutcome(queue_name(queue), ResetState.MOVED, "committed")
            return ResetOutcome(queue_name(queue), ResetState.UNCONFIRMED, f"the broker has {now}")

        return await self._for_each_queue(sorted(wanted), commit)

    async def _commit_all(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit offsets for the group."""

        async def commit(queue: MessageQueue) -> None:
            await self._cluster.broker(queue.broker_name).commit_offset(self._group, queue, offsets[queue])

        await _one_per_broker_first(sorted(offsets), commit)

    async def _reset_at_broker(self, queue: MessageQueue, target: int) -> None:
        """Let a broker that keeps resets mark one queue."""
        header = ResetOffsetHeader(self._topic, self._group, -1, True, queue.queue_id, target)
        await self._cluster.call(self._brokers[queue.broker_name].address, header)

    async def _reset_through_brokers(self, members: Iterable[MemberPlan]) -> list[ResetOutcome]:
        """Let the brokers reset the group, and poll until each queue was observed at its target or after it."""
        before: dict[MessageQueue, int] = {}
        for queue in self._targets:
            now = await self._cluster.broker(queue.broker_name).query_offset(
                self._group, queue, set_zero_if_not_found=False
            )
            before[queue] = now or 0
        online = [each.member for each in members]
        resets_before = await self._fetch_reset_counts(online)
        failed: dict[MessageQueue, RocketError] = {}

        async def mark(queue: MessageQueue) -> None:
            try:
                await self._reset_at_broker(queue, self._targets[queue])
            except RocketError as error:
                failed[queue] = error

        for broker in self._brokers.values():
            queues = [queue for queue in self._targets if queue.broker_name == broker.name]
            if broker.server_side:
                await gather_limited(queues, mark)
            elif queues:
                try:
                    await self._send_table(broker, queues)
                except RocketError as error:
                    failed |= dict.fromkeys(queues, error)
            self._report("broker", broker.name, f"queues to reset: {len(queues)}")
        _raise_if_closed(failed.values())
        outcomes: dict[MessageQueue, ResetOutcome] = {
            queue: ResetOutcome(queue_name(queue), ResetState.ALREADY, "it was there before")
            for queue, target in self._targets.items()
            if before[queue] == target
        }
        outcomes |= {queue: self._report_outcome(_failed_outcome(queue, error)) for queue, error in failed.items()}
        while len(outcomes) < len(self._targets) and self._left_s:
            await asyncio.sleep(POLL_S)
            for queue, text in (await self._find_moved(online, resets_before, before)).items():
                if queue not in outcomes:
                    outcomes[queue] = self._report_outcome(ResetOutcome(queue_name(queue), ResetState.MOVED, text))
        for queue in self._targets.keys() - outcomes.keys():
            outcomes[queue] = self._report_outcome(
                ResetOutcome(queue_name(queue), ResetState.UNCONFIRMED, _not_moved_text([queue]))
            )
        return [outcomes[queue] for queue in sorted(outcomes)]

    async def _fetch_reset_counts(self, members: Sequence[RemoteMember]) -> dict[str, RelayResult]:
        """Request the number of resets of each queue, and their targets, from members of this package."""
        question = encode_status_request(self._topic)
        return await relay_to_all(self._cluster, self._group, members, "status", self._id, question, self._left_s)

    async def _find_moved(
        self,
        members: Sequence[RemoteMember],
        resets_before: Mapping[str, RelayResult],
        before: Mapping[MessageQueue, int],
    ) -> dict[MessageQueue, str]:
        """Return the queues that a member has moved, with the evidence.

        Members of this package report each reset. The offsets of other clients show it only during the replay. Offsets
        at the brokers prove nothing, because this reset has committed the targets there.
        """
        moved: dict[MessageQueue, str] = {}
        package_members = [member for member in members if resets_before[member.client_id].kind is RelayStatus.OURS]
        for client_id, reply in (await self._fetch_reset_counts(package_members)).items():
            counts, counts_before = reply.report.reset_counts, resets_before[client_id].report.reset_counts
            for queue, target in self._targets.items():
                again = counts.get(queue, 0) > counts_before.get(queue, 0)
                if again and reply.report.resets.get(queue) == target:
                    moved[queue] = f"by {client_id}"
        others = [member for member in members if member not in package_members]
        for member, table in (await gather_limited(others, self._fetch_offsets)).items():
            for queue in _moved_queues(before, table, self._targets):
                moved[queue] = f"{member.client_id} is at {table[queue]}"
        return moved

    async def _send_table(self, broker: BrokerPlan, queues: Sequence[MessageQueue]) -> None:
        """Let a broker that keeps no resets send exact targets to its members.

        It sends the committed offset, or the end if that is lower. A member may commit meanwhile, and the broker would
        send that offset instead of the target. So this checks the sent offsets, and repeats the request.
        """
        for _ in range(MAX_TABLE_ATTEMPTS):
            await self._commit_all({queue: self._targets[queue] for queue in queues})
            response = await self._cluster.call(
                broker.address, ResetOffsetHeader(self._topic, self._group, -1, False, -1)
            )
            sent = await read_body(decode_offset_table, response.body)
            if all(sent.get(queue) == self._targets[queue] for queue in queues):
                return
            self._report("broker", broker.name, "a member committed at the same time; repeated")


async def _one_per_broker_first(
    queues: Iterable[MessageQueue], work: Callable[[MessageQueue], Coroutine[Any, Any, T]]
) -> dict[MessageQueue, T]:
    """Run `work` for each queue, and for one queue per broker before the others.

    If two concurrent commits are the first of a group in a topic, a broker may lose one.
    """
    everything = sorted(queues)
    first = {queue.broker_name: queue for queue in reversed(everything)}.values()
    others = [queue for queue in everything if queue not in first]
    return await gather_limited(first, work) | await gather_limited(others, work)


def _failed_outcome(queue: MessageQueue, error: RocketError) -> ResetOutcome:
    """Return the outcome of a queue whose request failed. Without a response, the broker may have moved it."""
    was_refused = isinstance(error, (BrokerError, ConnectError))
    return ResetOutcome(queue_name(queue), ResetState.UNREACHED if was_refused else ResetState.UNCONFIRMED, str(error))


def _raise_if_closed(errors: Iterable[RocketError]) -> None:
    """Raise the error of a client that was closed, because that is no state of a queue or broker."""
    for error in errors:
        if isinstance(error, ClientClosed):
            raise error


def _store_outcome(
    queue: MessageQueue,
    at_reset: Mapping[MessageQueue, StoredOffset],
    claimed: Mapping[MessageQueue, str],
    had: Mapping[MessageQueue, str | None],
    awaited: Collection[str],
) -> ResetOutcome:
    if queue not in at_reset:
        return ResetOutcome(queue_name(queue), ResetState.UNCONFIRMED, "another client reset it at the same time")
    if awaited and queue not in claimed:
        text = "is set, but no online member has claimed it; check that they use this database and table"
        if queue in had:  # once a minute, members check queues whose log had changed
            text = f"is set, but its owner {had[queue]} has not claimed it again yet; check it in a minute"
        return ResetOutcome(queue_name(queue), ResetState.UNCONFIRMED, text)
    text = f"claimed again by {claimed[queue]}" if queue in claimed else "in the database"
    return ResetOutcome(queue_name(queue), ResetState.MOVED, text)


def _moved_queues(
    before: Mapping[MessageQueue, int], now: Mapping[MessageQueue, int], targets: Mapping[MessageQueue, int]
) -> set[MessageQueue]:
    """Return the queues whose offsets only the reset can explain."""
    moved = set()
    for queue, target in targets.items():
        was, offset = before.get(queue), now.get(queue)
        if offset is None:
            continue
        if was is None or target == was:
            seen = offset >= target
        else:
            seen = target <= offset < was if target < was else offset >= target
        if seen:
            moved.add(queue)
    return moved


def _not_moved_text(queues: Iterable[MessageQueue]) -> str:
    return f"notified, but not observed to move: {', '.join(map(queue_name, sorted(queues)))}"
