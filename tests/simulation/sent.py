"""The messages of a simulated producer and those that brokers stored, and rules that compare them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer import SendResult
from tests.simulation.history import Wrong

GRACE_S = 0.5
"""How late after its deadline a message may fail."""


@dataclass(eq=False)
class Stream:
    """Messages that one program sends in the same way. They keep their order if they share a queue or a key."""

    name: str
    queue: MessageQueue | None = None
    sharding_key: str | None = None
    is_waited_for: bool = False  # the program waits for each result before it sends the next message
    batch: int = 0  # messages of each batch; 0 for single ones
    is_oneway: bool = False

    @property
    def is_lane(self) -> bool:
        return self.queue is not None or self.sharding_key is not None


@dataclass(eq=False)
class SentMessage:
    """A message or a batch passed to a producer, and its result."""

    number: int  # of the first message; the others of a batch follow
    messages: int
    stream: Stream
    at: float
    timeout_s: float
    ended: float | None = None
    results: list[SendResult] = field(default_factory=list)
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"message {self.number} ({self.stream.name}, given at {self.at:.3f})"


class Waiter:
    """Notes the result of a message, then wakes the program that waits for it."""

    def __init__(self, given: SentMessage, clock: Callable[[], float], then: Callable[[], None]) -> None:
        self._given, self._clock, self._then = given, clock, then

    def set_result(self, result: Any) -> None:
        self._end()
        if result is not None:
            self._given.results = result if isinstance(result, list) else [result]

    def set_exception(self, error: BaseException) -> None:
        self._end()
        self._given.error = error

    def _end(self) -> None:
        if self._given.ended is not None:
            raise Wrong(f"{self._given} has two results")
        self._given.ended = self._clock()
        self._then()


class Stored(NamedTuple):
    """One copy of a message at a broker."""

    at: float
    position: tuple[MessageQueue, int]


class SendLog:
    """All sent messages, and the rules. Times are virtual."""

    def __init__(self) -> None:
        self.given: list[SentMessage] = []
        self.stored: list[tuple[int, Stored]] = []  # in the order of the brokers' writes
        self.changes: list[tuple[float, str]] = []  # when the name servers knew of a change, and the change
        self.left: list[str] = []  # tasks and connections of the producer after its close
        self.close_took_s = 0.0
        self.ended_at = 0.0

    def digest(self) -> str:
        """Return a digest of all events, which is the same for the same seed."""
        events = [f"{each.number} {each.ended} {each.results} {each.error}" for each in self.given]
        events += [f"{number} {stored}" for number, stored in self.stored]
        return hashlib.sha256("\n".join(events).encode()).hexdigest()[:16]

    def _stores(self) -> dict[int, list[Stored]]:
        found: dict[int, list[Stored]] = defaultdict(list)
        for number, stored in self.stored:
            found[number].append(stored)
        return found

    def _given_of(self) -> dict[int, SentMessage]:
        return {given.number + index: given for given in self.given for index in range(given.messages)}

    # --- the rules

    def check_everything_ended(self) -> None:
        """Check that each message has its result in time, counted from its predecessor's result if in a lane."""
        lanes: dict[Stream, float] = {}
        stores = self._stores()
        late = [  # messages stored after they had failed; their responses let the lane continue
            (given.stream, stored.at)
            for given in self.given
            if given.error is not None and given.stream.is_lane
            for stored in stores[given.number]
            if given.ended is not None and stored.at > given.ended
        ]
        for given in sorted(self.given, key=lambda each: (each.ended or float("inf"), each.number)):
            if given.ended is None:
                raise Wrong(f"{given} has no result")
            since = given.at
            if given.stream.is_lane:
                if not given.stream.is_waited_for:
                    moved = [at for stream, at in late if stream is given.stream and at <= given.ended]
                    since = max(since, lanes.get(given.stream, 0.0), *moved)
                lanes[given.stream] = given.ended
            if given.ended > since + given.timeout_s + GRACE_S:
                raise Wrong(f"{given}: its result came {given.ended - since:.3f} s later, of {given.timeout_s:g} s")

    def check_errors_are_documented(self) -> None:
        """Check that each failed message has a documented error."""
        for given in self.given:
            if given.error is not None and not isinstance(given.error, RocketError):
                raise Wrong(f"{given}: {given.error!r}") from given.error

    def check_nothing_acknowledged_is_missing(self) -> None:
        """Check that each acknowledged message is stored at the reported offset."""
        stores = self._stores()
        for given in self.given:
            for index, result in enumerate(given.results):
                position = (result.queue, result.queue_offset)
                if position not in [stored.position for stored in stores[given.number + index]]:
                    raise Wrong(
                        f"{given}: not stored at {position}, as it was acknowledged, but {stores[given.number + index]}"
                    )

    def check_copies_are_reported(self, send_attempts: int) -> None:
        """Check that each result reports whether copies may exist, and that there are no more copies than attempts."""
        stores = self._stores()
        for given in self.given:
            copies = max(len(stores[given.number + index]) for index in range(given.messages))
            if copies > send_attempts:
                raise Wrong(f"{given}: {copies} copies with send_attempts={send_attempts}")
            for result in given.results:
                if not copies <= result.attempts <= send_attempts:
                    raise Wrong(f"{given}: {copies} copies, and SendResult.attempts={result.attempts}")

    def check_order(self) -> None:
        """Check that messages of a lane are stored in their order: A A B is allowed, but B A and A B A are not."""
        given_of = self._given_of()
        latest: dict[Stream, int] = {}
        for number, stored in self.stored:
            given = given_of[number]
            if not given.stream.is_lane:
                continue
            if given.number < latest.get(given.stream, -1):
                raise Wrong(f"{given} was stored at {stored.at:.3f}, after message {latest[given.stream]}")
            latest[given.stream] = given.number

    def check_recovers(self, allowed_s: float) -> None:
        """Check that messages of each stream are stored again soon after the name servers know of a change."""
        given_of = self._given_of()
        stored_at: dict[Stream, list[float]] = defaultdict(list)
        first_at: dict[int, float] = {}
        for number, stored in self.stored:
            stored_at[given_of[number].stream].append(stored.at)
            first_at.setdefault(number, stored.at)
        for known_at, what in self.changes:
            for stream, times in stored_at.items():
                later = [given for given in self.given if given.stream is stream and given.at >= known_at - 1]
                due = [
                    given.at for given in later if first_at.get(given.number, known_at) >= known_at
                ]  # not stored before the change
                if stream.queue is not None or not due or due[0] > known_at + 1:
                    continue  # a chosen queue may no longer exist, or no message was sent
                first = min((at for at in times if at >= known_at), default=float("inf"))
                if first - known_at > allowed_s:
                    raise Wrong(f"{what} at {known_at:.3f}: {stream.name} was stored {first - known_at:.3f} s later")

    def check_only_chosen_queues_fail(self) -> None:
        """Check that only messages for a removed queue fail, in plans whose brokers are down only for a moment."""
        for given in self.given:
            if given.error is not None and given.stream.queue is None:
                raise Wrong(f"{given} failed: {given.error}") from given.error

    def check_works_in_the_end(self, from_s: float) -> None:
        """Check that all messages sent after the last fault are stored."""
        for given in self.given:
            if given.at >= from_s and given.error is not None:
                raise Wrong(f"{given} failed without a fault: {given.error}") from given.error

    def check_nothing_is_left(self, close_s: float) -> None:
        """Check that the close ended in time, and left neither tasks nor connections."""
        if self.left:
            raise Wrong(f"after its close the producer has {Counter(self.left)}")
        if self.close_took_s > close_s:
            raise Wrong(f"the close took {self.close_took_s:.3f} s")
