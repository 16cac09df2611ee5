"""One execution of a plan: the state and the requests that all ways of resetting use."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar
from uuid import uuid4

from pyrocket_consumer.admin.resets.plan import (
    ResetOutcome,
    ResetPlan,
    ResetProgress,
    ResetState,
    queue_name,
)
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.admin_relay import (
    RelayResult,
    RemoteMember,
    fetch_group_members,
    fetch_member_offsets,
    relay_to_all,
)
from pyrocket_consumer.cluster.gather import by_broker, gather_limited
from pyrocket_consumer.errors import BrokerError, ClientClosed, ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.command import ResetOffsetHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.reset_format import encode_status_request, is_valid_epoch

POLL_S = 0.5
"""The interval at which offsets of other clients are read. A replay that is faster is not observed."""

T = TypeVar("T")
ProgressCallback = Callable[[ResetProgress], None]


class ResetRun:
    """One execution of a plan. Confined to the I/O thread.

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
        raise_if_closed([error])
        was_refused = isinstance(error, (BrokerError, ConnectError))
        return self.outcome(queue, ResetState.UNREACHED if was_refused else ResetState.UNCONFIRMED, str(error))

    # --- members

    async def online(self, failures: dict[str, RocketError] | None = None) -> tuple[RemoteMember, ...]:
        """Return the members that are online now, from the brokers that are not skipped.

        With `failures`, a broker that fails raises nothing; its error is added there under its name.
        """
        brokers = {name: broker.address for name, broker in self.brokers.items() if name not in self.notes}
        found = await fetch_group_members(self.cluster, self.group, brokers, failures)
        raise_if_closed((failures or {}).values())
        return found.members

    async def relay(self, members: Iterable[RemoteMember], action: str, body: bytes) -> dict[str, RelayResult]:
        """Send a request to members, within the remaining time."""
        return await relay_to_all(self.cluster, self.group, members, action, self.id, body, self.left_s)

    async def relay_status(self, members: Iterable[RemoteMember]) -> dict[str, RelayResult]:
        """Ask members for their offsets, epochs and resets in the topic."""
        return await self.relay(members, "status", encode_status_request(self.topic))

    async def fetch_offsets(self, members: Iterable[RemoteMember]) -> dict[str, dict[MessageQueue, int]]:
        """Return the offsets that any clients report, by client id; those without a response have none."""

        async def fetch(member: RemoteMember) -> dict[MessageQueue, int]:
            try:
                return await fetch_member_offsets(self.cluster, self.group, member, self.topic, self.left_s)
            except RocketError:
                return {}

        return {member.client_id: table for member, table in (await gather_limited(members, fetch)).items()}

    # --- brokers

    async def for_each_queue(
        self, queues: Iterable[MessageQueue], work: Callable[[MessageQueue], Coroutine[Any, Any, ResetOutcome]]
    ) -> list[ResetOutcome]:
        """Return the outcome of `work` for each queue. An error is the outcome of its queue, and hides no other."""

        async def attempt(queue: MessageQueue) -> ResetOutcome:
            try:
                return await work(queue)
            except RocketError as error:
                return self.failed(queue, error)

        return list((await _one_per_broker_first(queues, attempt)).values())

    async def query(self, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group."""
        broker = self.cluster.broker(queue.broker_name)
        return await broker.query_offset(self.group, queue, set_zero_if_not_found=False)

    async def commit(self, queue: MessageQueue, offset: int) -> bool:
        """Commit an offset for the group. Return False if the broker ignored it, because a reset waits there."""
        return await self.cluster.broker(queue.broker_name).commit_offset(self.group, queue, offset)

    async def commit_all(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit offsets for the group."""
        await _one_per_broker_first(offsets, lambda queue: self.commit(queue, offsets[queue]))

    async def reset_at_broker(self, queue: MessageQueue, target: int) -> None:
        """Let a broker that keeps resets mark one queue."""
        header = ResetOffsetHeader(self.topic, self.group, -1, True, queue.queue_id, target)
        await self.cluster.call(self.brokers[queue.broker_name].address, header)

    async def send_table(self, address: str) -> RemotingCommand:
        """Let a broker that keeps no resets send its members the committed offsets of all queues."""
        return await self.cluster.call(address, ResetOffsetHeader(self.topic, self.group, -1, False, -1))


def raise_if_closed(errors: Iterable[RocketError]) -> None:
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
        if was is None or target == was:
            seen = offset >= target
        else:
            seen = target <= offset < was if target < was else offset >= target
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
