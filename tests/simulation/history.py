"""The events of a simulated world, and rules that check them."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import command
from pyrocket_consumer.protocol.bodies import decode_lock_request
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.testing import EmbeddedCluster

NEVER = float("inf")

QueuePosition = tuple[MessageQueue, int]
KeyLane = tuple[MessageQueue, str | None]

GRACE_S = 1.0
"""How long a queue that moves waits for its listener calls."""

TREATED_AS_LOSS_S = 30.0
"""A limit that the documentation states: another member may take a reset for a loss of offsets.

That can happen to a reset by a member's own program up to this time after a broker was down. The other member then
continues at its own offset, and emits an event."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """A listener call that has ended. The message was consumed, or failed."""

    at: float
    begun: float
    member: str
    body: bytes
    position: QueuePosition
    success: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """A reset of a queue: its request if `target` is None, else its reported result."""

    at: float
    member: str
    queue: MessageQueue
    target: int | None


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A start or a close: its start time or deadline, its end, and its error."""

    member: str
    due: float
    ended: float
    error: BaseException | None = None


class Wrong(AssertionError):
    """A broken rule. The text names the time and the queue."""


class History:
    """The events that the rules check. Members note messages and resets; the rest is from the brokers' records."""

    def __init__(self, cluster: EmbeddedCluster, group: str, topic: str) -> None:
        self.cluster, self.group, self.topic = cluster, group, topic
        self.consumed: list[Consumed] = []
        self.resets: list[Reset] = []
        self.addresses: dict[str, str] = {}  # the client's address of a connection -> member
        self.corrections: list[
            tuple[float, MessageQueue, int]
        ] = []  # when an offset was misplaced, and the target of the broker's correction
        self.disturbed_at: list[float] = []  # when a broker or a member may have lost data
        self.starts: list[TimedCall] = []
        self.closes: list[TimedCall] = []
        self.left: list[tuple[float, str, str]] = []  # time, member, and a task or connection left after its close
        self.settled_at = NEVER  # by then all messages should be consumed; members end only later
        self.begins_at_the_end = False  # whether a new group begins at the end
        self.ledger_rows: list[tuple[str, MessageQueue, int, str | None]] = []  # the commits of a database, see Ledger
        self.busy = 0  # how often one transaction of the database waited for another
        self.stored: dict[MessageQueue, int] = {}  # the group's offsets in the database at the end
        self.ends_at_start: dict[MessageQueue, int] = {}  # the ends of queues when the start that took them returned

    def digest(self) -> str:
        """Return a digest of all events, which is the same for the same seed."""
        events = [f"{each.at:.6f} {each.member} {each.position} {each.success}" for each in self.consumed]
        events += [f"{at:.6f} {queue} {offset}" for at, _, queue, offset in self.commits()]
        events += [f"{what} {queue} {offset}" for what, queue, offset, _ in self.ledger_rows]
        return hashlib.sha256("\n".join(events).encode()).hexdigest()[:16]

    # --- from the brokers

    def _bodies(self) -> dict[QueuePosition, bytes]:
        return {(message.queue, message.queue_offset): message.body for message in self.cluster.messages(self.topic)}

    def _requests(self, code: RequestCode) -> list[tuple[float, str, str, Any]]:
        """Return requests to brokers: time, broker, connection, command."""
        found = [(node.name, each) for node in self.cluster.brokers for each in node.requests(code)]
        return [(each.at_s, name, each.client, each.command) for name, each in found]

    def _of_queues(self, code: RequestCode, kind: Any) -> list[tuple[float, str, MessageQueue, Any]]:
        """Return the group's requests about queues: time, connection, queue, header."""
        found = []
        for at, _, client, request in self._requests(code):
            header = kind.from_fields(request.fields)
            if header.consumer_group == self.group:
                queue = MessageQueue(header.topic, header.broker_name or "", header.queue_id)
                found.append((at, client, queue, header))
        return sorted(found, key=lambda each: each[0])

    @cached_property
    def pulls(self) -> list[tuple[float, str, MessageQueue, int]]:
        """The pulls that brokers received: time, connection, queue, offset. Read this only at the end."""
        found = self._of_queues(RequestCode.PULL_MESSAGE, command.PullMessageHeader)
        return [(*pull, header.queue_offset) for *pull, header in found if header.topic == self.topic]

    def _first_pulled(self, member: str | None = None) -> dict[MessageQueue, int]:
        """Return the first pulled offset of each queue. The group, or the member, must get all messages from there."""
        first: dict[MessageQueue, int] = {}
        for _, client, queue, offset in self.pulls:
            if member is None or self.addresses.get(client) == member:
                first.setdefault(queue, offset)
        return first

    def commits(self) -> list[tuple[float, str, MessageQueue, int]]:
        """Return the commits that brokers received: time, connection, queue, offset."""
        found = self._of_queues(RequestCode.UPDATE_CONSUMER_OFFSET, command.UpdateConsumerOffsetHeader)
        return [(*commit, header.commit_offset) for *commit, header in found if header.topic == self.topic]

    def _sent_back(self) -> list[tuple[float, bytes]]:
        """Return the messages sent back for a retry, by a send-back request or to the retry topic."""
        places = {
            (message.queue.broker_name, message.commit_log_offset): message.body
            for topic in (self.topic, f"%RETRY%{self.group}")
            for message in self.cluster.messages(topic)
        }
        found = []
        for at, broker, _, request in self._requests(RequestCode.CONSUMER_SEND_MSG_BACK):
            header = command.ConsumerSendMsgBackHeader.from_fields(request.fields)
            if (position := (broker, header.offset)) in places:
                found.append((at, places[position]))
        for at, _, _, request in self._requests(RequestCode.SEND_MESSAGE_V2):
            if command.SendMessageHeader.from_fields(request.fields).topic.startswith("%RETRY%"):
                found.append((at, request.body))
        return found

    # --- the rules

    def check_no_message_is_skipped(self) -> None:
        """Check that each commit follows the consumption, or the send-back, of all messages below it.

        Two members that start at the same time may find different ends of a queue. The rule ignores where they begin,
        and checks only their later commits.
        """
        returned = [each for each in self.starts if each.error is None] if self.begins_at_the_end else []
        first = min((each.ended for each in returned), default=0.0)
        first_start_ended_at = max((each.ended for each in returned if each.due <= first), default=0.0)
        bodies = self._bodies()
        handled_at: dict[bytes, float] = {}
        for each in self.consumed:
            if each.success:
                handled_at[each.body] = min(each.at, handled_at.get(each.body, each.at))
        for at, body in self._sent_back():
            handled_at[body] = min(at, handled_at.get(body, at))
        edge = self._first_pulled()
        for at, client, queue, offset in self.commits():
            if at <= first_start_ended_at:
                continue
            for number in range(edge.setdefault(queue, 0), offset):
                body = bodies.get((queue, number))
                if body is not None and handled_at.get(body, NEVER) > at:
                    who = self.addresses.get(client, client)
                    what = f"{body!r} at {number} was not consumed"
                    raise Wrong(f"t={at:.3f} {who} committed {offset} of {queue}; {what}")
            edge[queue] = max(edge[queue], offset)

    def check_resets_are_kept(self) -> None:
        """Check that after a reset its member commits only messages consumed since."""
        commits = self.commits()
        for number, reset in enumerate(self.resets):
            if reset.target is None:
                continue
            later = [each for each in self.resets[number + 1 :] if each.queue == reset.queue]
            # If the next reset is requested before this one has finished, it commits its target before its own result.
            so_far = [each.target for each in self.resets[: number + 1] if each.queue == reset.queue]
            is_waiting = 2 * so_far.count(None) > len(so_far)
            targets = (each.target for each in later if each.target is not None)
            following = next(targets, None) if is_waiting else None
            may_be_lost = any(0 <= reset.at - at <= TREATED_AS_LOSS_S for at in self.disturbed_at)
            ends = [each.at for each in later] + [at for at in self.disturbed_at if at > reset.at]
            since = [each for each in self.consumed if each.position[0] == reset.queue and each.begun >= reset.at]
            again = {each.position[1]: each.at for each in reversed(since)}
            for at, client, queue, offset in commits:
                if queue != reset.queue or not reset.at < at < min(ends, default=NEVER):
                    continue
                missing = [position for position in range(reset.target, offset) if again.get(position, NEVER) > at]
                is_own = self.addresses.get(client) == reset.member
                if missing and (offset == following or (may_be_lost and not is_own)):
                    break
                if missing and is_own:
                    what = f"after its reset to {reset.target} at t={reset.at:.3f}; {missing[0]} was not consumed again"
                    raise Wrong(f"t={at:.3f} {reset.member} committed {offset} of {queue} {what}")

    def check_everything_was_consumed(self) -> None:
        """Check that all messages were consumed before `settled_at`, and that each queue is committed up to its end."""
        done = {each.body for each in self.consumed if each.success and each.at <= self.settled_at}
        bodies, first = self._bodies(), self._first_pulled()
        for queue, end in self.ends_at_start.items():
            if first.get(queue, end) > end:
                raise Wrong(f"{queue} ended at {end} when a start returned that took it on; begun at {first[queue]}")
        nobodys = {queue for queue, _ in bodies} - first.keys()
        if nobodys:
            raise Wrong(f"nobody ever pulled from {min(nobodys)} ({len(nobodys)} queues)")
        owed = {position: body for position, body in bodies.items() if position[1] >= first[position[0]]}
        missing = sorted(set(owed.values()) - done)
        if missing:
            places = [str(position) for position, body in owed.items() if body in missing[:3]]
            raise Wrong(f"{len(missing)} of {len(owed)} messages were never consumed: {missing[:3]} at {places}")
        ends: dict[MessageQueue, int] = defaultdict(int)
        for queue, offset in bodies:
            ends[queue] = max(ends[queue], offset + 1)
        for broker in self.cluster.brokers:
            committed = broker.committed(self.group, self.topic)
            for queue, end in ends.items():
                if queue.broker_name == broker.name and committed.get(queue.queue_id, 0) != end:
                    raise Wrong(f"{queue} ends at {end}, committed is {committed.get(queue.queue_id)}")

    def check_every_member_consumed_everything(self) -> None:
        """Check for broadcasting that each member, over all its restarts, has got every message."""
        bodies = self._bodies()
        for member in sorted(set(self.addresses.values())):
            first = self._first_pulled(member)
            owed = {body for (queue, offset), body in bodies.items() if offset >= first.get(queue, 1 << 63)}
            mine = (each for each in self.consumed if each.member == member and each.at <= self.settled_at)
            missing = owed - {each.body for each in mine}
            if missing:
                what = f"{len(missing)} of {len(owed)} messages: {sorted(missing)[:3]}"
                raise Wrong(f"member {member} never saw {what}")

    def check_queues_move_without_repeats(self, allowed_s: float) -> None:
        """Check without failures that a message which the last owner of a queue finished repeats only immediately.

        The owner must also have finished all messages before it.
        """
        begun_at: dict[MessageQueue, list[float]] = defaultdict(list)
        for at, _, queue in self._begun():
            begun_at[queue].append(at)
        for queue, calls in self._by_queue().items():
            through: dict[int, float] = {}  # when the last owner had finished all messages up to an offset
            for _, held in groupby(calls, lambda each: bisect(begun_at[each.position[0]], each.begun)):
                period = list(held)
                for each in period:
                    late_s = each.begun - through.get(each.position[1], each.begun)
                    if late_s > allowed_s:
                        what = f"t={each.begun:.3f} {each.body!r} at {each.position[1]} of {queue} was redelivered to"
                        raise Wrong(f"{what} {each.member}, {late_s:.1f} s after its last owner had finished it")
                through, at, last_begun = {}, 0.0, period[-1].begun
                for each in sorted(period, key=lambda each: each.position[1]):
                    # a long call that ended after the last call began may have ended without the queue
                    is_cut = each.at > last_begun and each.at - each.begun > GRACE_S
                    at = through[each.position[1]] = max(at, NEVER if is_cut else each.at)

    def _begun(self) -> list[tuple[float, str, MessageQueue]]:
        """Return when members, by connection, have requested the start offset of a queue."""
        found = self._of_queues(RequestCode.QUERY_CONSUMER_OFFSET, command.QueryConsumerOffsetHeader)
        return [(at, client, queue) for at, client, queue, _ in found]

    def _by_queue(self) -> dict[MessageQueue, list[Consumed]]:
        found: dict[MessageQueue, list[Consumed]] = defaultdict(list)
        for each in sorted(self.consumed, key=lambda each: each.begun):
            found[each.position[0]].append(each)
        return found

    def check_former_owners_lower_no_commit(self) -> None:
        """Check that no member lowers the commit of a queue after another one has begun it."""
        moves = [(at, 0, client, queue, 0) for at, client, queue in self._begun()]
        moves += [(at, 1, client, queue, offset) for at, client, queue, offset in self.commits()]
        holder: dict[MessageQueue, str] = {}
        edge: dict[MessageQueue, int] = defaultdict(int)
        for at, kind, client, queue, offset in sorted(moves, key=lambda move: move[:2]):
            if kind == 0:
                holder[queue] = client
            elif holder[queue] != client and offset < edge[queue]:
                who = self.addresses.get(client)
                raise Wrong(f"t={at:.3f} {who} committed {offset} of {queue} over its next owner's {edge[queue]}")
            else:
                edge[queue] = offset

    def check_failures_go_back_soon(self, allowed_s: float) -> None:
        """Check without faults that a failed message is sent back for its retry soon, whatever its consumer does."""
        back: dict[bytes, list[float]] = defaultdict(list)
        for at, body in self._sent_back():
            back[body].append(at)
        for each in self.consumed:
            if not each.success and not any(each.at <= at <= each.at + allowed_s for at in back[each.body]):
                raise Wrong(f"t={each.at:.3f} {each.body!r} failed, and was not sent back within {allowed_s:g} s")

    def check_starts_and_closes_end(self, start_s: float, close_s: float) -> None:
        """Check that each start succeeds within `start_s`, and each close within `close_s` after its timeout."""
        for start in self.starts:
            if start.error is not None or start.ended - start.due > start_s:
                took = f"t={start.ended:.3f} a start of {start.member} took {start.ended - start.due:.1f} s"
                raise Wrong(f"{took}: {start.error!r}" if start.error is not None else took)
        for close in self.closes:
            if close.ended - close.due > close_s:
                late_s = close.ended - close.due
                raise Wrong(f"t={close.ended:.3f} a close of {close.member} ended {late_s:.1f} s after its time-out")

    def check_nothing_is_left(self) -> None:
        """Check that a closed member leaves no task and no connection."""
        for at, member, what in self.left:
            raise Wrong(f"t={at:.3f} {member} has closed and leaves {what}")

    def check_ledger(self) -> None:
        """Check that each effect is that of the queue's next message, also after resets, and that none is missing."""
        places: dict[MessageQueue, int] = {}
        owners: dict[MessageQueue, str | None] = {}
        for what, queue, offset, owner in self.ledger_rows:
            if queue.topic != self.topic:
                continue
            if what == "effect" and places.get(queue) != offset:
                raise Wrong(f"{queue} {offset} has its effect when {places.get(queue)} was next")
            if what == "effect" and owners.get(queue) != owner:
                raise Wrong(f"{queue} {offset} has its effect from {owner}, when {owners.get(queue)} had claimed it")
            places[queue], owners[queue] = offset + (what == "effect"), owner
        if self.busy:
            raise Wrong(f"{self.busy} transactions waited for one whose listener had not returned")
        for broker in self.cluster.brokers:
            for message in self.cluster.messages(self.topic):
                queue = message.queue
                if queue.broker_name == broker.name and places.get(queue, 0) <= message.queue_offset:
                    raise Wrong(f"{queue} {message.queue_offset} has no effect; the group is at {places.get(queue)}")
        for queue, position in places.items():
            if self.stored.get(queue) != position:
                raise Wrong(f"{queue} is at {self.stored.get(queue)} in the table, and its effects are at {position}")

    def check_group_is_empty(self) -> None:
        """Check that the group has no members after all have closed."""
        for broker in self.cluster.brokers:
            if left := broker.members(self.group):
                raise Wrong(f"{broker.name} still has {left} in the group")

    def check_unlocked_only_after_the_last_commit(self) -> None:
        """Check for orderly members that after an unlock a member commits the queue only once it has the lock again."""
        moves: list[tuple[float, int, str, str, MessageQueue]] = []
        for code, kind in ((RequestCode.LOCK_BATCH_MQ, "lock"), (RequestCode.UNLOCK_BATCH_MQ, "unlock")):
            for at, _, client, request in self._requests(code):
                moves += [(at, 1, kind, client, queue) for queue in decode_lock_request(request.body).queues]
        moves += [(at, 2, "commit", client, queue) for at, client, queue, _ in self.commits()]
        unlocked: set[tuple[str, MessageQueue]] = set()
        for at, _, kind, client, queue in sorted(moves, key=lambda move: move[:2]):
            if kind == "unlock":
                unlocked.add((client, queue))
            elif kind == "lock":
                unlocked.discard((client, queue))
            elif (client, queue) in unlocked:
                raise Wrong(f"t={at:.3f} {self.addresses.get(client)} committed {queue} after unlocking it")

    def check_keys_are_in_order(self) -> None:
        """Check that one call of a key runs at a time, and starts after the previous message of the key is consumed.

        A member that has begun a queue skips no message of a key, however often it goes back. This holds even if it
        was cut off, and another member had the queue's lock meanwhile. A message that failed there may have been
        consumed here before.
        """
        key_of: dict[QueuePosition, KeyLane] = {}
        number_of: dict[QueuePosition, int] = {}
        counts: dict[KeyLane, int] = defaultdict(int)
        for message in self.cluster.messages(self.topic):  # by queue, in order of offset
            lane = (message.queue, message.property(PropertyName.SHARDING_KEY))
            position = (message.queue, message.queue_offset)
            key_of[position], number_of[position] = lane, counts[lane]
            counts[lane] += 1
        begun_at: dict[tuple[str | None, MessageQueue], list[float]] = defaultdict(list)
        for at, client, queue in self._begun():
            begun_at[self.addresses.get(client), queue].append(at)
        latest: dict[KeyLane, Consumed] = {}
        of_period: dict[tuple[KeyLane, str, int], Consumed] = {}
        consumed_at: dict[tuple[KeyLane, int], float] = {}
        for each in sorted(self.consumed, key=lambda each: each.begun):
            lane, number = key_of[each.position], number_of[each.position]
            what = (
                f"t={each.begun:.3f} {each.body!r} at {each.position[1]} of {lane[0]}, key {lane[1]}, at {each.member}"
            )
            other = latest.get(lane)
            if other is not None and other.at > each.begun:
                raise Wrong(f"{what} began during {other.body!r} at {other.member}, which ran until {other.at:.3f}")
            latest[lane] = each
            period = (lane, each.member, bisect(begun_at[each.member, each.position[0]], each.begun))
            before = of_period.get(period)
            of_period[period] = each
            if before is not None and number > number_of[before.position] + before.success:
                raise Wrong(f"{what} came after {before.body!r}, which failed, or is not the one before it")
            if number and consumed_at.get((lane, number - 1), NEVER) > each.begun:
                raise Wrong(f"{what} came before the one before it was consumed")
            if each.success:
                consumed_at.setdefault((lane, number), each.at)

    def check_corrections_are_stored_first(self) -> None:
        """Check that after a correction the target is committed before the first pull from it."""
        for misplaced_at, queue, target in self.corrections:
            stored = [at for at, _, each, offset in self.commits() if (each, offset) == (queue, target)]
            stored_at = min((at for at in stored if at > misplaced_at), default=NEVER)
            for at, client, pulled, offset in self.pulls:
                if misplaced_at < at < stored_at and (pulled, offset) == (queue, target):
                    who = self.addresses.get(client)
                    raise Wrong(f"t={at:.3f} {who} pulled {queue} from {target} without storing it")
