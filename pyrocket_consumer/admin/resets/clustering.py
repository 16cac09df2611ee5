"""The ways to reset a group with shared offsets: through commits, owners or brokers, or in a database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from pyrocket_consumer.admin.resets.execution import (
    POLL_S,
    ResetRun,
    moved_queues,
    new_epoch,
    not_moved_text,
    raise_if_closed,
)
from pyrocket_consumer.admin.resets.plan import (
    BrokerPlan,
    ResetOutcome,
    ResetResult,
    ResetState,
    ResetWay,
    queue_name,
    way_for,
)
from pyrocket_consumer.cluster.admin_relay import RelayResult, RelayStatus, RemoteMember
from pyrocket_consumer.cluster.client import read_body
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.bodies import decode_offset_table
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan
from pyrocket_consumer.transport.backoff import Backoff

MAX_TABLE_ATTEMPTS = 5


async def reset_clustering(run: ResetRun) -> ResetResult:
    """Move the queues of the group, in the way that the members allow which are online now."""
    plan, online = run.plan, await run.online()
    replies = {each.client_id: each.reply for each in plan.members}
    replies |= await run.relay_status([member for member in online if member.client_id not in replies])
    way = way_for(replies[member.client_id] for member in online)
    if way is ResetWay.BROKERS and plan.way is not ResetWay.BROKERS and not plan.all_queues:
        raise RocketError("a member of another client has joined after the plan was made; plan again")
    if way is ResetWay.MEMBERS:
        outcomes = await reset_through_owners(run)
    elif way is ResetWay.COMMITS:
        outcomes = await commit_targets(run, run.targets)
    else:
        outcomes = await BrokersReset(run, online).move()
    return ResetResult(run.id, 0, tuple(outcomes), run.notes)


# --- commits


async def commit_targets(run: ResetRun, targets: Mapping[MessageQueue, int]) -> list[ResetOutcome]:
    """Commit the targets for a group without online members."""

    async def commit(queue: MessageQueue) -> ResetOutcome:
        target = targets[queue]
        if not await run.commit(queue, target):
            # An earlier reset waits for the next pull of the group. Until then no commit counts, so replace it.
            await run.reset_at_broker(queue, target)
        now = await run.query(queue)
        if now == target:
            return run.outcome(queue, ResetState.MOVED, "committed")
        return run.outcome(queue, ResetState.UNCONFIRMED, f"the broker has {now}")

    return await run.for_each_queue(targets, commit)


# --- owners


async def reset_through_owners(run: ResetRun) -> list[ResetOutcome]:
    """Notify the members repeatedly, until the owner of each queue has moved it."""
    outcomes: list[ResetOutcome] = []
    left, backoff = run.targets, Backoff(0.1, 2.0)
    refusals, silent = dict[str, str](), dict[str, str]()
    while left:
        failures: dict[str, RocketError] = {}
        online = await run.online(failures)
        if not online and not failures:
            break
        body = encode_plan(PlanBody(run.topic, max(1, int(time.time() * 1000)), left))
        replies = await run.relay(online, "reset", body)
        refusals, silent = {}, {name: str(error) for name, error in failures.items()}
        for client_id, reply in sorted(replies.items()):
            if reply.kind in (RelayStatus.FOREIGN, RelayStatus.FORBIDDEN) or reply.state == "refused":
                refusals[client_id] = reply.reason or reply.kind
            elif reply.kind is not RelayStatus.OURS:
                silent[client_id] = reply.reason or reply.kind
            for queue, target in reply.report.moved.items():
                if left.get(queue) == target:
                    del left[queue]
                    outcomes.append(run.outcome(queue, ResetState.MOVED, f"by {client_id}"))
        if left and not run.left_s:
            break
        if left:
            await asyncio.sleep(backoff.failed())
    why = "; ".join(f"{client_id}: {reason}" for client_id, reason in sorted((refusals or silent).items()))
    if refusals:
        text = f"no member has moved it ({why})"
        outcomes += [run.outcome(queue, ResetState.UNREACHED, text) for queue in left]
    elif silent:
        outcomes += await _commit_for_next_owner(run, left, why)
    else:
        outcomes += await commit_targets(run, left)  # no member owns them, or will
    return sorted(outcomes, key=lambda outcome: outcome.subject)


async def _commit_for_next_owner(run: ResetRun, targets: Mapping[MessageQueue, int], why: str) -> list[ResetOutcome]:
    """Commit the targets for the next owner. The current owners do not respond, and may still commit."""

    async def leave(queue: MessageQueue) -> ResetOutcome:
        if run.brokers[queue.broker_name].server_side:
            await run.reset_at_broker(queue, targets[queue])
        else:
            await run.commit(queue, targets[queue])
        text = f"committed for the group, but its owner did not confirm it ({why})"
        return run.outcome(queue, ResetState.UNCONFIRMED, text)

    return await run.for_each_queue(targets, leave)


# --- brokers


class BrokersReset:
    """Lets the brokers reset the group, because not all of its members accept requests of this package."""

    def __init__(self, run: ResetRun, members: Sequence[RemoteMember]) -> None:
        self._run = run
        self._targets = run.targets
        self._members = members
        self._before: dict[MessageQueue, int] = {}
        self._resets_before: dict[str, RelayResult] = {}

    async def move(self) -> list[ResetOutcome]:
        """Reset at each broker, and poll until each queue was observed at its target or after it."""
        run, targets = self._run, self._targets
        for queue in targets:
            self._before[queue] = await run.query(queue) or 0
        self._resets_before = await run.relay_status(self._members)
        failed: dict[MessageQueue, RocketError] = {}
        for broker in run.brokers.values():
            queues = [queue for queue in targets if queue.broker_name == broker.name]
            failed |= await (self._mark(queues) if broker.server_side else self._send_table(broker, queues))
            run.report("broker", broker.name, f"queues to reset: {len(queues)}")
        raise_if_closed(failed.values())
        outcomes: dict[MessageQueue, ResetOutcome] = {
            queue: ResetOutcome(queue_name(queue), ResetState.ALREADY, "it was there before")
            for queue, target in targets.items()
            if self._before[queue] == target
        }
        outcomes |= {queue: run.failed(queue, error) for queue, error in failed.items()}
        while len(outcomes) < len(targets) and run.left_s:
            await asyncio.sleep(POLL_S)
            for queue, text in (await self._find_moved()).items():
                if queue not in outcomes:
                    outcomes[queue] = run.outcome(queue, ResetState.MOVED, text)
        for queue in targets.keys() - outcomes.keys():
            outcomes[queue] = run.outcome(queue, ResetState.UNCONFIRMED, not_moved_text([queue]))
        return [outcomes[queue] for queue in sorted(outcomes)]

    async def _mark(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, RocketError]:
        """Let a broker that keeps resets mark the queues. Return the errors."""
        failed: dict[MessageQueue, RocketError] = {}

        async def mark(queue: MessageQueue) -> None:
            try:
                await self._run.reset_at_broker(queue, self._targets[queue])
            except RocketError as error:
                failed[queue] = error

        await gather_limited(queues, mark)
        return failed

    async def _send_table(self, broker: BrokerPlan, queues: Sequence[MessageQueue]) -> dict[MessageQueue, RocketError]:
        """Let a broker that keeps no resets send exact targets to its members. Return the errors.

        It sends the committed offset, or the end if that is lower. A member may commit meanwhile, and the broker would
        send that offset instead of the target. So this checks the sent offsets, and repeats the request.
        """
        targets = {queue: self._targets[queue] for queue in queues}
        try:
            for _ in range(MAX_TABLE_ATTEMPTS if queues else 0):
                await self._run.commit_all(targets)
                response = await self._run.send_table(broker.address)
                sent = await read_body(decode_offset_table, response.body)
                if all(sent.get(queue) == target for queue, target in targets.items()):
                    break
                self._run.report("broker", broker.name, "a member committed at the same time; repeated")
        except RocketError as error:
            return dict.fromkeys(queues, error)
        return {}

    async def _find_moved(self) -> dict[MessageQueue, str]:
        """Return the queues that a member has moved, with the evidence.

        Members of this package report each reset. The offsets of other clients show it only during the replay. Offsets
        at the brokers prove nothing, because this reset has committed the targets there.
        """
        moved: dict[MessageQueue, str] = {}
        ours = [each for each in self._members if self._resets_before[each.client_id].kind is RelayStatus.OURS]
        for client_id, reply in (await self._run.relay_status(ours)).items():
            counts, counts_before = reply.report.reset_counts, self._resets_before[client_id].report.reset_counts
            for queue, target in self._targets.items():
                again = counts.get(queue, 0) > counts_before.get(queue, 0)
                if again and reply.report.resets.get(queue) == target:
                    moved[queue] = f"by {client_id}"
        others = [member for member in self._members if member not in ours]
        for client_id, table in (await self._run.fetch_offsets(others)).items():
            for queue in moved_queues(self._before, table, self._targets):
                moved[queue] = f"{client_id} is at {table[queue]}"
        return moved


# --- a database


class StoreReset:
    """Sets the offsets in the database of a group, and verifies that online members claim the queues again.

    A member that consumes the topic without a claim uses another database. Then the reset is not confirmed.
    """

    def __init__(self, run: ResetRun, store: DatabaseOffsets) -> None:
        self._run = run
        self._store = store

    async def move(self) -> ResetResult:
        """Set the offsets, read them again, and wait for the claims."""
        run, store, targets = self._run, self._store, self._run.targets
        before = await asyncio.to_thread(store.offsets, run.group)
        epoch = new_epoch(row.reset_epoch for row in before)
        begun = {row.queue for row in before}  # perhaps after the plan was made
        retries = {queue: each for queue, each in run.plan.wire_retries.items() if queue not in begun}
        starts = {queue: each.target for queue, each in retries.items()}
        await asyncio.to_thread(store.reset, run.group, {**targets, **starts}, epoch)
        rows = await asyncio.to_thread(store.offsets, run.group)
        claims = {row.queue: row.epoch for row in rows if row.reset_epoch == epoch}
        run.report("store", repr(store), f"queues set: {len(claims)}")
        awaited, claimed = await self._wait_for_claims(claims)
        had = {row.queue: row.owner for row in before if row.owner in awaited}
        outcomes: list[ResetOutcome] = []
        for queue in sorted(targets):
            state, text = ResetState.UNCONFIRMED, "another client reset it at the same time"
            if queue in claims and (queue in claimed or not awaited):
                state = ResetState.MOVED
                text = f"claimed again by {claimed[queue]}" if queue in claimed else "in the database"
            elif queue in claims and queue in had:  # once a minute, members check queues whose log had changed
                text = f"is set, but its owner {had[queue]} has not claimed it again yet; check it in a minute"
            elif queue in claims:
                text = "is set, but no online member has claimed it; check that they use this database and table"
            outcomes.append(run.outcome(queue, state, text))
        for start in retries.values():
            outcomes.append(run.outcome(str(start.queue), ResetState.MOVED, f"in the database, {start.text}"))
        try:
            if not awaited:  # otherwise members commit them
                await run.commit_all({queue: to for queue, to in targets.items() if queue not in claimed})
        except RocketError as error:  # for this group, the offsets at brokers are for information only
            run.report("broker", run.topic, f"not committed: {error}")
        return ResetResult(run.id, epoch, tuple(outcomes), run.notes)

    async def _wait_for_claims(self, claims: Mapping[MessageQueue, int]) -> tuple[set[str], dict[MessageQueue, str]]:
        """Return the members that should claim queues again, and the queues that were claimed after `claims`."""
        run, claimed = self._run, dict[MessageQueue, str]()
        while awaited := set() if run.plan.unsubscribed else await self._awaited():
            for row in await asyncio.to_thread(self._store.offsets, run.group, run.topic):
                if row.queue in claims and row.epoch > claims[row.queue] and row.owner:
                    claimed[row.queue] = row.owner
            if not run.left_s or claimed.keys() >= run.targets.keys() & claims.keys():
                break
            await asyncio.sleep(POLL_S)
        return awaited, claimed

    async def _awaited(self) -> set[str]:
        """Return the members that should claim queues again. If a broker fails, those of the plan may still run."""
        failures: dict[str, RocketError] = {}
        online = {member.client_id for member in await self._run.online(failures)}
        return online | {each.client_id for each in self._run.plan.members if failures}
