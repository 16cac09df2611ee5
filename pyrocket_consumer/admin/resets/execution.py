"""Execute a plan: what all ways of resetting share, and the ways for a group with shared offsets.

Such a group is reset through commits, owners or brokers, or in a database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from pyrocket_consumer.admin.resets.plan import (
    BrokerPlan,
    ResetOutcome,
    ResetPlan,
    ResetProgress,
    ResetResult,
    ResetState,
    ResetWay,
    queue_name,
    way_for,
)
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import (
    RelayResult,
    RelayStatus,
    RemoteMember,
    fetch_group_members,
    fetch_member_offsets,
    relay_to_all,
)
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.errors import BrokerError, ClientClosed, ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import decode_offset_table
from pyrocket_consumer.protocol.command import ResetOffsetHeader
from pyrocket_consumer.protocol.reset_format import PlanBody, encode_plan, encode_status_request, is_valid_epoch
from pyrocket_consumer.transport.backoff import Backoff

POLL_S = 0.5
"""The interval at which offsets of other clients are read. A replay that is faster is not observed."""

MAX_TABLE_ATTEMPTS = 5

T = TypeVar("T")
ProgressCallback = Callable[[ResetProgress], None]


class Reset:
    """One execution of a plan: its state, and the requests that all ways of resetting use. For the I/O thread.

    `notes` are the skipped brokers, with the reason. A way of resetting may add some; their queues are no `targets`.
    """

    def __init__(
        self, cluster: Cluster, plan: ResetPlan, report: ProgressCallback, partial: bool, wait_s: float
    ) -> None:
        self.cluster, self.plan, self.partial = cluster, plan, partial
        self.id = str(uuid4())
        self.group, self.topic = plan.wire_group, plan.wire_topic
        self.brokers = {broker.name: broker for broker in plan.brokers if not broker.problem}
        self.notes = {broker.name: broker.problem for broker in plan.brokers if broker.problem}
        self._targets = plan.wire_targets
        self._on_progress = report
        self._deadline = cluster.loop.time() + wait_s

    async def move(self) -> ResetResult:
        """Move the offsets, and verify that they have moved."""
        raise NotImplementedError

    @property
    def targets(self) -> dict[MessageQueue, int]:
        """The target of each queue, except those of skipped brokers."""
        return {queue: to for queue, to in self._targets.items() if queue.broker_name not in self.notes}

    @property
    def left_s(self) -> float:
        """The remaining seconds to wait for members."""
        return max(0.0, self._deadline - self.cluster.loop.time())

    # --- reports

    def report(self, step: str, subject: str, text: str) -> None:
        """Report a step to the user."""
        self._on_progress(ResetProgress(step, subject, text))

    def outcome(self, subject: str | MessageQueue, state: ResetState, text: str = "") -> ResetOutcome:
        """Report and return the outcome at a member or for a queue."""
        outcome = ResetOutcome(subject if isinstance(subject, str) else queue_name(subject), state, text)
        step = "member" if self.plan.broadcasting else "queue"
        self.report(step, outcome.subject, f"{state} ({text})" if text else str(state))
        return outcome

    def failed(self, queue: MessageQueue, error: RocketError) -> ResetOutcome:
        """Report and return the outcome of a failed request. Without a response, the broker may have moved the queue.

        Raises:
            ClientClosed: this client was closed, which is no state of a queue.
        """
        _raise_if_closed([error])
        was_refused = isinstance(error, (BrokerError, ConnectError))
        return self.outcome(queue, ResetState.UNREACHED if was_refused else ResetState.UNCONFIRMED, str(error))

    # --- members

    async def online(self, failures: dict[str, RocketError] | None = None) -> tuple[RemoteMember, ...]:
        """Return the members that are online now, from the brokers that are not skipped.

        With `failures`, a broker that fails raises nothing; its error is added there under its name.
        """
        brokers = {name: broker.address for name, broker in self.brokers.items() if name not in self.notes}
        found = await fetch_group_members(self.cluster, self.group, brokers, failures)
        _raise_if_closed((failures or {}).values())
        return found.members

    async def relay(self, members: Iterable[RemoteMember], action: str, body: bytes) -> dict[str, RelayResult]:
        """Send a request to members, within the remaining time."""
        return await relay_to_all(self.cluster, self.group, members, action, self.id, body, self.left_s)

    async def fetch_offsets(self, members: Iterable[RemoteMember]) -> dict[str, dict[MessageQueue, int]]:
        """Return the offsets that any clients report, by client id; those without a response have none."""

        async def fetch(member: RemoteMember) -> dict[MessageQueue, int]:
            try:
                return await fetch_member_offsets(self.cluster, self.group, member, self.topic, self.left_s)
            except RocketError:
                return {}

        return {member.client_id: table for member, table in (await gather_limited(members, fetch)).items()}

    # --- brokers

    async def commit(self, queue: MessageQueue, offset: int) -> bool:
        """Commit an offset for the group. Return False if the broker ignored it, because a reset waits there."""
        return await self.cluster.broker(queue.broker_name).commit_offset(self.group, queue, offset)

    async def commit_all(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit offsets for the group."""
        await _one_per_broker_first(offsets, lambda queue: self.commit(queue, offsets[queue]))

    async def send_table(self, address: str) -> dict[MessageQueue, int]:
        """Let a broker that keeps no resets send its members the committed offsets of all queues. Return them."""
        header = ResetOffsetHeader(self.topic, self.group, -1, False, -1)
        return await self.cluster.read(address, header, decode_offset_table)


class ClusteringReset(Reset):
    """Moves the queues of a group, in the way that the members allow which are online now."""

    async def move(self) -> ResetResult:
        """Choose the way, and move the queues.

        Raises:
            RocketError: the way of the plan is not possible any longer.
        """
        plan, online = self.plan, await self.online()
        replies = {each.client_id: each.reply for each in plan.members}
        replies |= await self._relay_status([member for member in online if member.client_id not in replies])
        way = way_for(replies[member.client_id] for member in online)
        if way is ResetWay.BROKERS and plan.way is not ResetWay.BROKERS and not plan.all_queues:
            raise RocketError("a member of another client has joined after the plan was made; plan again")
        if way is ResetWay.MEMBERS:
            outcomes = await self._move_through_owners()
        elif way is ResetWay.COMMITS:
            outcomes = await self._commit_targets(self.targets)
        else:
            outcomes = await self._move_through_brokers(online)
        return ResetResult(self.id, 0, tuple(outcomes), self.notes)

    async def _relay_status(self, members: Iterable[RemoteMember]) -> dict[str, RelayResult]:
        """Ask members for their offsets, epochs and resets in the topic."""
        return await self.relay(members, "status", encode_status_request(self.topic))

    async def _query(self, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group."""
        broker = self.cluster.broker(queue.broker_name)
        return await broker.query_offset(self.group, queue)

    async def _mark(self, queue: MessageQueue, target: int) -> None:
        """Let a broker that keeps resets mark one queue."""
        header = ResetOffsetHeader(self.topic, self.group, -1, True, queue.queue_id, target)
        await self.cluster.call(self.brokers[queue.broker_name].address, header)

    async def _for_each_queue(
        self, queues: Iterable[MessageQueue], work: Callable[[MessageQueue], Coroutine[Any, Any, ResetOutcome]]
    ) -> list[ResetOutcome]:
        """Return the outcome of `work` for each queue. An error is the outcome of its queue, and hides no other."""

        async def attempt(queue: MessageQueue) -> ResetOutcome:
            try:
                return await work(queue)
            except RocketError as error:
                return self.failed(queue, error)

        return list((await _one_per_broker_first(queues, attempt)).values())

    # --- commits

    async def _commit_targets(self, targets: Mapping[MessageQueue, int]) -> list[ResetOutcome]:
        """Commit the targets for a group without online members."""

        async def commit(queue: MessageQueue) -> ResetOutcome:
            target = targets[queue]
            if not await self.commit(queue, target):
                # An earlier reset waits for the next pull of the group. Until then no commit counts, so replace it.
                await self._mark(queue, target)
            now = await self._query(queue)
            if now == target:
                return self.outcome(queue, ResetState.MOVED, "committed")
            return self.outcome(queue, ResetState.UNCONFIRMED, f"the broker has {now}")

        return await self._for_each_queue(targets, commit)

    # --- owners

    async def _move_through_owners(self) -> list[ResetOutcome]:
        """Notify the members repeatedly, until the owner of each queue has moved it."""
        outcomes: list[ResetOutcome] = []
        left, backoff = self.targets, Backoff(0.1, 2.0)
        refusals, silent = dict[str, str](), dict[str, str]()
        while left:
            failures: dict[str, RocketError] = {}
            online = await self.online(failures)
            if not online and not failures:
                break
            body = encode_plan(PlanBody(self.topic, max(1, int(time.time() * 1000)), left))
            replies = await self.relay(online, "reset", body)
            refusals, silent = {}, {name: str(error) for name, error in failures.items()}
            for client_id, reply in sorted(replies.items()):
                if reply.kind in (RelayStatus.FOREIGN, RelayStatus.FORBIDDEN) or reply.state == "refused":
                    refusals[client_id] = reply.reason or reply.kind
                elif reply.kind is not RelayStatus.OURS:
                    silent[client_id] = reply.reason or reply.kind
                for queue, target in reply.report.moved.items():
                    if left.get(queue) == target:
                        del left[queue]
                        outcomes.append(self.outcome(queue, ResetState.MOVED, f"by {client_id}"))
            if left and not self.left_s:
                break
            if left:
                await asyncio.sleep(backoff.failed())
        why = "; ".join(f"{client_id}: {reason}" for client_id, reason in sorted((refusals or silent).items()))
        if refusals:
            text = f"no member has moved it ({why})"
            outcomes += [self.outcome(queue, ResetState.UNREACHED, text) for queue in left]
        elif silent:
            outcomes += await self._commit_for_next_owner(left, why)
        else:
            outcomes += await self._commit_targets(left)  # no member owns them, or will
        return sorted(outcomes, key=lambda outcome: outcome.subject)

    async def _commit_for_next_owner(self, targets: Mapping[MessageQueue, int], why: str) -> list[ResetOutcome]:
        """Commit the targets for the next owner. The current owners do not respond, and may still commit."""
        text = f"committed for the group, but its owner did not confirm it ({why})"

        async def leave(queue: MessageQueue) -> ResetOutcome:
            if self.brokers[queue.broker_name].server_side:
                await self._mark(queue, targets[queue])
            else:
                await self.commit(queue, targets[queue])
            return self.outcome(queue, ResetState.UNCONFIRMED, text)

        return await self._for_each_queue(targets, leave)

    # --- brokers

    async def _move_through_brokers(self, members: Sequence[RemoteMember]) -> list[ResetOutcome]:
        """Let the brokers reset the group, because not all of its members accept requests of this package.

        Poll until each queue was observed at its target or after it.
        """
        targets = self.targets
        before = {queue: offset or 0 for queue, offset in (await gather_limited(targets, self._query)).items()}
        resets_before = await self._relay_status(members)
        failed: dict[MessageQueue, RocketError] = {}
        at_broker = by_broker(targets)
        for broker in self.brokers.values():
            here = {queue: targets[queue] for queue in at_broker.get(broker.name, ())}
            failed |= await (self._mark_all(here) if broker.server_side else self._send_targets(broker, here))
            self.report("broker", broker.name, f"queues to reset: {len(here)}")
        _raise_if_closed(failed.values())
        outcomes: dict[MessageQueue, ResetOutcome] = {
            queue: ResetOutcome(queue_name(queue), ResetState.ALREADY, "it was there before")
            for queue, target in targets.items()
            if before[queue] == target
        }
        outcomes |= {queue: self.failed(queue, error) for queue, error in failed.items()}
        while len(outcomes) < len(targets) and self.left_s:
            await asyncio.sleep(POLL_S)
            for queue, text in (await self._find_moved(members, before, resets_before)).items():
                if queue not in outcomes:
                    outcomes[queue] = self.outcome(queue, ResetState.MOVED, text)
        for queue in targets.keys() - outcomes.keys():
            outcomes[queue] = self.outcome(queue, ResetState.UNCONFIRMED, not_moved_text([queue]))
        return [outcomes[queue] for queue in sorted(outcomes)]

    async def _mark_all(self, targets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketError]:
        """Let a broker that keeps resets mark the queues. Return the errors."""
        failed: dict[MessageQueue, RocketError] = {}

        async def mark(queue: MessageQueue) -> None:
            try:
                await self._mark(queue, targets[queue])
            except RocketError as error:
                failed[queue] = error

        await gather_limited(targets, mark)
        return failed

    async def _send_targets(
        self, broker: BrokerPlan, targets: Mapping[MessageQueue, int]
    ) -> dict[MessageQueue, RocketError]:
        """Let a broker that keeps no resets send exact targets to its members. Return the errors.

        It sends the committed offset, or the end if that is lower. A member may commit meanwhile, and the broker would
        send that offset instead of the target. So this checks the sent offsets, and repeats the request.
        """
        try:
            for _ in range(MAX_TABLE_ATTEMPTS if targets else 0):
                await self.commit_all(targets)
                sent = await self.send_table(broker.address)
                if all(sent.get(queue) == target for queue, target in targets.items()):
                    break
                self.report("broker", broker.name, "a member committed at the same time; repeated")
        except RocketError as error:
            return dict.fromkeys(targets, error)
        return {}

    async def _find_moved(
        self,
        members: Sequence[RemoteMember],
        before: Mapping[MessageQueue, int],
        resets_before: Mapping[str, RelayResult],
    ) -> dict[MessageQueue, str]:
        """Return the queues that a member has moved, with the evidence.

        Members of this package report each reset. The offsets of other clients show it only during the replay. Offsets
        at the brokers prove nothing, because this reset has committed the targets there.
        """
        moved: dict[MessageQueue, str] = {}
        ours = [each for each in members if resets_before[each.client_id].kind is RelayStatus.OURS]
        for client_id, reply in (await self._relay_status(ours)).items():
            counts, counts_before = reply.report.reset_counts, resets_before[client_id].report.reset_counts
            for queue, target in self.targets.items():
                again = counts.get(queue, 0) > counts_before.get(queue, 0)
                if again and reply.report.resets.get(queue) == target:
                    moved[queue] = f"by {client_id}"
        others = [member for member in members if member not in ours]
        for client_id, table in (await self.fetch_offsets(others)).items():
            for queue in moved_queues(before, table, self.targets):
                moved[queue] = f"{client_id} is at {table[queue]}"
        return moved


class StoreReset(Reset):
    """Sets the offsets in the database of a group, and verifies that online members claim the queues again.

    A member that consumes the topic without a claim uses another database. Then the reset is not confirmed.
    """

    async def move(self) -> ResetResult:
        """Set the offsets, read them again, and wait for the claims."""
        store, targets = self.plan.store, self.targets
        assert store is not None
        before = await asyncio.to_thread(store.offsets, self.group)
        epoch = new_epoch(row.reset_epoch for row in before)
        begun = {row.queue for row in before}  # perhaps after the plan was made
        retries = {queue: each for queue, each in self.plan.wire_retries.items() if queue not in begun}
        starts = {queue: each.target for queue, each in retries.items()}
        await asyncio.to_thread(store.reset, self.group, {**targets, **starts}, epoch)
        rows = await asyncio.to_thread(store.offsets, self.group)
        claims = {row.queue: row.epoch for row in rows if row.reset_epoch == epoch}
        self.report("store", repr(store), f"queues set: {len(claims)}")
        claimed: dict[MessageQueue, str] = {}
        while awaited := await self._awaited():
            for row in await asyncio.to_thread(store.offsets, self.group, self.topic):
                if row.queue in claims and row.epoch > claims[row.queue] and row.owner:
                    claimed[row.queue] = row.owner
            if not self.left_s or claimed.keys() >= targets.keys() & claims.keys():
                break
            await asyncio.sleep(POLL_S)
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
            outcomes.append(self.outcome(queue, state, text))
        for start in retries.values():
            outcomes.append(self.outcome(str(start.queue), ResetState.MOVED, f"in the database, {start.text}"))
        try:
            if not awaited:  # otherwise members commit them
                await self.commit_all({queue: to for queue, to in targets.items() if queue not in claimed})
        except RocketError as error:  # for this group, the offsets at brokers are for information only
            self.report("broker", self.topic, f"not committed: {error}")
        return ResetResult(self.id, epoch, tuple(outcomes), self.notes)

    async def _awaited(self) -> set[str]:
        """Return the members that should claim queues again. If a broker fails, those of the plan may still run."""
        if self.plan.unsubscribed:
            return set()
        failures: dict[str, RocketError] = {}
        online = {member.client_id for member in await self.online(failures)}
        return online | {each.client_id for each in self.plan.members if failures}


def _raise_if_closed(errors: Iterable[RocketError]) -> None:
    """Raise the error of a client that was closed, because that is no state of a queue or broker."""
    for error in errors:
        if isinstance(error, ClientClosed):
            raise error


def new_epoch(known: Iterable[int]) -> int:
    """Return an epoch above all known valid ones, even if the local clock is behind."""
    now_ms = int(time.time() * 1000)
    return max(now_ms, *(epoch + 1 for epoch in known if is_valid_epoch(epoch, now_ms)), 1)


def moved_queues(
    before: Mapping[MessageQueue, int], now: Mapping[MessageQueue, int], targets: Mapping[MessageQueue, int]
) -> set[MessageQueue]:
    """Return the queues whose offsets only the reset can explain."""
    moved = set()
    for queue, target in targets.items():
        was, offset = before.get(queue), now.get(queue)
        if offset is None:
            continue
        if was is None or target >= was:
            seen = offset >= target
        else:
            seen = target <= offset < was
        if seen:
            moved.add(queue)
    return moved


def not_moved_text(queues: Iterable[MessageQueue]) -> str:
    """Return the text of an outcome without any evidence of a move."""
    return f"notified, but not observed to move: {', '.join(map(queue_name, sorted(queues)))}"


async def _one_per_broker_first(
    queues: Iterable[MessageQueue], work: Callable[[MessageQueue], Coroutine[Any, Any, T]]
) -> dict[MessageQueue, T]:
    """Run `work` for each queue, and for one queue per broker before the others.

    If two concurrent commits are the first of a group in a topic, a broker may lose one.
    """
    at_broker = by_broker(sorted(queues)).values()
    first = await gather_limited([each[0] for each in at_broker], work)
    return first | await gather_limited([queue for each in at_broker for queue in each[1:]], work)
