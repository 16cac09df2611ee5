"""The strategies that allocate queues to members: those of the Java client, with the same results."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import safe_repr

Strategy = Callable[[str, str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
"""(group, own client id, all queues sorted, all client ids sorted) -> own queues."""

VIRTUAL_NODES = 10


def average(group: str, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """Give each member one contiguous slice. Source: AllocateMessageQueueAveragely."""
    index, rest = members.index(client_id), len(queues) % len(members)
    size = 1 if len(queues) <= len(members) else len(queues) // len(members) + (index < rest)
    start = index * size if index < rest else index * size + rest
    return list(queues[start : start + size]) if start < len(queues) else []


def circle(group: str, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """Give members one queue each in rotation. Source: AllocateMessageQueueAveragelyByCircle."""
    return list(queues[members.index(client_id) :: len(members)])


def consistent_hash(
    group: str, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Keep most queues at their member when members join or leave. Source: AllocateMessageQueueConsistentHash."""
    ring = sorted((_ring_point(f"{member}-{node}"), member) for member in members for node in range(VIRTUAL_NODES))
    points = [point for point, _ in ring]

    def owner(queue: MessageQueue) -> str:
        text = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
        return ring[bisect.bisect_left(points, _ring_point(text)) % len(ring)][1]

    return [queue for queue in queues if owner(queue) == client_id]


def _ring_point(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4])


STRATEGIES: dict[str, Strategy] = {"average": average, "circle": circle, "hash": consistent_hash}


@dataclass(frozen=True)
class _InMachineRooms:
    """A strategy that can be pickled. Source: AllocateMessageQueueByMachineRoom."""

    rooms: frozenset[str]

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        eligible = [
            queue for queue in queues if len(parts := queue.broker_name.split("@")) == 2 and parts[0] in self.rooms
        ]
        index, (share, rest) = members.index(client_id), divmod(len(eligible), len(members))
        own = eligible[share * index : share * (index + 1)]
        return own + ([eligible[share * len(members) + index]] if index < rest else [])

    def __repr__(self) -> str:
        return f"in_machine_rooms({', '.join(map(repr, sorted(self.rooms)))})"


def in_machine_rooms(*rooms: str) -> Strategy:
    """Return a strategy for `allocation=` that takes queues only of brokers in these rooms, named `room@…`.

    Each name is an argument of its own: `in_machine_rooms("room1", "room2")`.

    Raises:
        ConfigError: there is no name, or one is not text, is empty, or has an @.
    """
    if not rooms:
        raise ConfigError("machine-room allocation needs the names of its rooms: allocation=in_machine_rooms('room1')")
    for room in rooms:
        if not isinstance(room, str) or not room or "@" in room:
            raise ConfigError(
                f"in_machine_rooms: {safe_repr(room)} is not allowed; pass the text before the @ in names of brokers, "
                "each as an argument: in_machine_rooms('room1', 'room2')"
            )
    return _InMachineRooms(frozenset(rooms))


def strategy_of(allocation: str | Strategy) -> Strategy:
    """Return the strategy of an option, which is checked: a name of a strategy, or the strategy."""
    return allocation if callable(allocation) else STRATEGIES[allocation]


def allocate(
    strategy: Strategy, group: str, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Return the queues of `client_id`. All members sort queues and ids alike; a member that is not listed gets none.

    Raises:
        ConfigError: the strategy raised, or returned something else than queues of the topic; correct the strategy.
    """
    ordered, ids = sorted(queues), sorted(set(members), key=_utf16)
    if not ordered or client_id not in ids:
        return []
    try:
        own = list(strategy(group, client_id, ordered, ids))
        strangers = set(own) - set(ordered)
    except BaseException as error:  # also SystemExit, which must not end the thread that calls the strategy
        raise ConfigError(f"the allocation strategy failed: {type(error).__name__}: {error}") from error
    if strangers:
        raise ConfigError(f"the allocation strategy returned {strangers.pop()}, which is not a queue of the topic")
    return own


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")  # as Java compares strings
