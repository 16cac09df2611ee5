"""What happened in a simulated world, and whether it was right."""

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
"""A reset by a member's own program so soon after a broker was away may be taken for a loss by another member, which
goes on where it was, and says so: a documented limit."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """A listener returned: the message was consumed, or failed."""

    at: float
    begun: float
    member: str
    body: bytes
    position: QueuePosition
    success: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """A reset of a queue was reported as done; asked for, if `target` is None."""

    at: float
    member: str
    queue: MessageQueue
    target: int | None


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A start or a close: from when, or by when it should have ended, to when it did, and how."""

    member: str
    due: float
    ended: float
    error: BaseException | None = None


class Wrong(AssertionError):
    """A rule was broken; the text says where."""


class History:
    """Everything the checker looks at: consumption and resets as they happen, the rest from the brokers' records."""

    def __init__(self, cluster: EmbeddedCluster, group: str, topic: str) -> None:
        self.cluster, self.group, self.topic = cluster, group, topic
        self.consumed: list[Consumed] = []
        self.resets: list[Reset] = []
        self.addresses: dict[str, str] = {}  # the client's end of a connection -> member
        self.corrections: list[tuple[float, MessageQueue, int]] = []  # when misplaced; where brokers will move it
        self.disturbed_at: list[float] = []  # from then on, a broker or a member may know less than it did
        self.starts: list[TimedCall] = []
        self.closes: list[TimedCall] = []
        self.left: list[tuple[float, str, str]] = []  # when, by whom, what: tasks and connections after a close
        self.settled_at = NEVER  # by then all should be done, without anybody ending or joining
        self.begins_at_the_end = False  # a group that is new does
        self.ledger_rows: list[
            tuple[str, MessageQueue, int, str | None]
        ] = []  # what a database has committed, see Ledger
        self.busy = 0  # how often one of its transactions waited for another
        self.stored: dict[MessageQueue, int] = {}  # where the database has the group at the end
        self.ends_at_start: dict[MessageQueue, int] = {}  # where queues ended when a start that took them on returned

    def digest(self) -> str:
        """Return a digest of all that happened, the same for the same seed."""
        events = [f"{each.at:.6f} {each.member} {each.position} {each.success}" for each in self.consumed]
        events += [f"{at:.6f} {queue} {offset}" for at, _, queue, offset in self.commits()]
        events += [f"{what} {queue} {offset}" for what, queue, offset, _ in self.ledger_rows]
        return hashlib.sha256("\n".join(events).encode()).hexdigest()[:16]

    # --- from the brokers

    def _bodies(self) -> dict[QueuePosition, bytes]:
        return {(message.queue, message.queue_offset): message.body for message in self.cluster.messages(self.topic)}

    def _requests(self, code: RequestCode) -> list[tuple[float, str, str, Any]]:
        """Return when, by which broker, from which connection a request came."""
        found = [(node.name, each) for node in self.cluster.brokers for each in node.requests(code)]
        return [(each.at_s, name, each.client, each.command) for name, each in found]

    def _of_queues(self, code: RequestCode, kind: Any) -> list[tuple[float, str, MessageQueue, Any]]:
        """Return the group's requests about queues: when, from which connection, queue, header."""
        found = []
        for at, _, client, request in self._requests(code):
            header = kind.from_fields(request.fields)
            if header.consumer_group == self.group:
                queue = MessageQueue(header.topic, header.broker_name or "", header.queue_id)
                found.append((at, client, queue, header))
        return sorted(found, key=lambda each: each[0])

    @cached_property
    def pulls(self) -> list[tuple[float, str, MessageQueue, int]]:
        """The pulls brokers received: when, from which connection, queue, offset. Read when all is over."""
        found = self._of_queues(RequestCode.PULL_MESSAGE, command.PullMessageHeader)
        return [(*pull, header.queue_offset) for *pull, header in found if header.topic == self.topic]

    def _first_pulled(self, member: str | None = None) -> dict[MessageQueue, int]:
        """Return where each queue was first pulled from: from there on all is owed to the group, or to a member."""
        first: dict[MessageQueue, int] = {}
        for _, client, queue, offset in self.pulls:
            if member is None or self.addresses.get(client) == member:
                first.setdefault(queue, offset)
        return first

    def commits(self) -> list[tuple[float, str, MessageQueue, int]]:
        """Return the commits brokers received: when, from which connection, queue, offset."""
        found = self._of_queues(RequestCode.UPDATE_CONSUMER_OFFSET, command.UpdateConsumerOffsetHeader)
        return [(*commit, header.commit_offset) for *commit, header in found if header.topic == self.topic]

    def _sent_back(self) -> list[tuple[float, bytes]]:
        """Return what was handed back for a retry, by send-back or as a message of the retry topic."""
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
        """Every commit: all below it, from the first pull on, was consumed, or handed back for a retry, before.

        Two that start at once may find different ends: where they begin is not judged, what they commit after it is.
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
        """After a reset its member commits only what it has consumed since."""
        commits = self.commits()
        for number, reset in enumerate(self.resets):
            if reset.target is None:
                continue
            later = [each for each in self.resets[number + 1 :] if each.queue == reset.queue]
            # The next one, if it is asked for before this one is done, commits its target before it is done itself.
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
        """In calm, before the end, every message owed was consumed; in the end all queues are committed to theirs."""
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
        """Broadcasting: what each member's listener saw, over all its lives, leaves nothing out that it owed."""
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
        """Where nothing failed, what a queue's last holder had done, with all before it, comes again only at once."""
        begun_at: dict[MessageQueue, list[float]] = defaultdict(list)
        for at, _, queue in self._begun():
            begun_at[queue].append(at)
        for queue, calls in self._by_queue().items():
            through: dict[int, float] = {}  # when the last holder was through with everything up to an offset
            for _, held in groupby(calls, lambda each: bisect(begun_at[each.position[0]], each.begun)):
                period = list(held)
                for each in period:
                    late_s = each.begun - through.get(each.position[1], each.begun)
                    if late_s > allowed_s:
                        what = f"t={each.begun:.3f} {each.body!r} at {each.position[1]} of {queue} came again at"
                        raise Wrong(f"{what} {each.member}, {late_s:.1f} s after its last holder was through with it")
                through, at, last_begun = {}, 0.0, period[-1].begun
                for each in sorted(period, key=lambda each: each.position[1]):
                    # what ended after the last call began, and took long, may have ended when its queue was gone
                    is_cut = each.at > last_begun and each.at - each.begun > GRACE_S
                    at = through[each.position[1]] = max(at, NEVER if is_cut else each.at)

    def _begun(self) -> list[tuple[float, str, MessageQueue]]:
        """Return when members, by connection, have asked where to begin a queue."""
        found = self._of_queues(RequestCode.QUERY_CONSUMER_OFFSET, command.QueryConsumerOffsetHeader)
        return [(at, client, queue) for at, client, queue, _ in found]

    def _by_queue(self) -> dict[MessageQueue, list[Consumed]]:
        found: dict[MessageQueue, list[Consumed]] = defaultdict(list)
        for each in sorted(self.consumed, key=lambda each: each.begun):
            found[each.position[0]].append(each)
        return found

    def check_former_owners_lower_no_commit(self) -> None:
        """A member lowers no commit of a queue after another one has begun it."""
        moves = [(at, 0, client, queue, 0) for at, client, queue in self._begun()]
        moves += [(at, 1, client, queue, offset) for at, client, queue, offset in self.commits()]
        holder: dict[MessageQueue, str] = {}
        edge: dict[MessageQueue, int] = defaultdict(int)
        for at, kind, client, queue, offset in sorted(moves, key=lambda move: move[:2]):
            if kind == 0:
                holder[queue] = client
            elif holder[queue] != client and offset < edge[queue]:
                who = self.addresses.get(client)
                raise Wrong(f"t={at:.3f} {who} committed {offset} of {queue} over its next holder's {edge[queue]}")
            else:
                edge[queue] = offset

    def check_failures_go_back_soon(self, allowed_s: float) -> None:
        """Where nobody is away, a failed message is handed back for its retry soon, whatever else its consumer does."""
        back: dict[bytes, list[float]] = defaultdict(list)
        for at, body in self._sent_back():
            back[body].append(at)
        for each in self.consumed:
            if not each.success and not any(each.at <= at <= each.at + allowed_s for at in back[each.body]):
                raise Wrong(f"t={each.at:.3f} {each.body!r} failed, and was not handed back within {allowed_s:g} s")

    def check_starts_and_closes_end(self, start_s: float, close_s: float) -> None:
        """A start does not fail and takes at most so long, a close so much longer than its time-out."""
        for start in self.starts:
            if start.error is not None or start.ended - start.due > start_s:
                took = f"t={start.ended:.3f} a start of {start.member} took {start.ended - start.due:.1f} s"
                raise Wrong(f"{took}: {start.error!r}" if start.error is not None else took)
        for close in self.closes:
            if close.ended - close.due > close_s:
                late_s = close.ended - close.due
                raise Wrong(f"t={close.ended:.3f} a close of {close.member} ended {late_s:.1f} s after its time-out")

    def check_nothing_is_left(self) -> None:
        """A member that has closed leaves no task and no connection."""
        for at, member, what in self.left:
            raise Wrong(f"t={at:.3f} {member} has closed and leaves {what}")

    def check_ledger(self) -> None:
        """Each effect is that of the next message of its queue, wherever the group was moved; and none is missing."""
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
        """When all have closed, the group has no members."""
        for broker in self.cluster.brokers:
            if left := broker.members(self.group):
                raise Wrong(f"{broker.name} still has {left} in the group")

    def check_unlocked_only_after_the_last_commit(self) -> None:
        """Orderly: after an unlock its sender commits that queue no more, until it has the lock again."""
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
        """Of a key in a queue one call runs at a time, and a message comes when the one before it was consumed.

        A member that has begun a queue goes through a key without leaving one out, however often it goes back. It
        keeps to that also if it was cut off for so long that another one had the queue's lock in between: what failed
        there it may have consumed before.
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
                raise Wrong(f"{what} began beside {other.body!r} at {other.member}, which ran until {other.at:.3f}")
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
        """After a correction the first pull from its target comes after the target was committed."""
        for misplaced_at, queue, target in self.corrections:
            stored = [at for at, _, each, offset in self.commits() if (each, offset) == (queue, target)]
            stored_at = min((at for at in stored if at > misplaced_at), default=NEVER)
            for at, client, pulled, offset in self.pulls:
                if misplaced_at < at < stored_at and (pulled, offset) == (queue, target):
                    who = self.addresses.get(client)
                    raise Wrong(f"t={at:.3f} {who} pulled {queue} from {target} without storing it")
