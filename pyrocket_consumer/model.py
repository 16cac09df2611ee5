"""Values that all parts share: queues, routes, subscriptions, pull responses and events; frozen, comparable, picklable.

The protocols of offset stores are here too, because the configuration, the stores and the consumer need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol, runtime_checkable

from pyrocket_consumer.text import escape_controls, truncate

RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"

PERM_READ = 4
PERM_WRITE = 2

MASTER_ID = 0


def retry_topic(group: str) -> str:
    """Return the topic from which the broker redelivers failed messages of `group`."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the topic that keeps messages `group` has given up."""
    return DLQ_PREFIX + group


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker: the unit of assignment, order and offset.

    All clients of a group must sort queues alike, or their allocations disagree. Source: MessageQueue.compareTo.
    """

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


class MessageModel(StrEnum):
    """How a group shares a topic: each message to one member, or to every member."""

    CLUSTERING = "clustering"
    BROADCASTING = "broadcasting"


@dataclass(frozen=True, slots=True)
class Subscription:
    """The messages of a topic that a group selects.

    `expression` is the text as the user gave it. `tags` is empty for "everything" and for SQL92. `version` is a time in
    milliseconds. It changes when the set of held queues changes, and only then.
    """

    topic: str
    expression: str = "*"
    tags: frozenset[str] = frozenset()
    expression_type: str = "TAG"
    version: int = 0


@dataclass(frozen=True, slots=True)
class QueueData:
    """How many queues a topic has on one broker, and what may be done with them."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int = PERM_READ | PERM_WRITE
    topic_sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of one broker name: id 0 is the master, others are its slaves."""

    cluster: str
    broker_name: str
    addresses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The brokers and queues of a topic, as a name server reports them."""

    topic: str
    queues: tuple[QueueData, ...] = ()
    brokers: tuple[BrokerData, ...] = ()
    order_conf: str | None = None

    def consume_queues(self) -> list[MessageQueue]:
        """Return the queues to read from, in the order every member of a group uses."""
        return sorted(
            MessageQueue(self.topic, data.broker_name, queue_id)
            for data in self.queues
            if data.perm & PERM_READ
            for queue_id in range(data.read_queues)
        )

    def publish_queues(self) -> list[MessageQueue]:
        """Return the queues to send to: writable ones whose broker has a master.

        For an ordered topic the name server may fix the list, so that keys keep their queues while a broker is down.
        Source: MQClientInstance.topicRouteData2TopicPublishInfo.
        """
        if self.order_conf:
            parts = (part.rpartition(":") for part in self.order_conf.split(";") if part)
            counts = [(name, int(count)) for name, _, count in parts if count.isdecimal()]
            return [MessageQueue(self.topic, name, queue_id) for name, count in counts for queue_id in range(count)]
        masters = {broker.broker_name for broker in self.brokers if MASTER_ID in broker.addresses}
        return [
            MessageQueue(self.topic, data.broker_name, queue_id)
            for data in sorted(self.queues, key=lambda data: data.broker_name)
            if data.perm & PERM_WRITE and data.broker_name in masters
            for queue_id in range(data.write_queues)
        ]


class PullStatus(Enum):
    """The result of a pull. Source: PullStatus, response codes 0, 19, 20, 21."""

    FOUND = 0
    NO_NEW_MESSAGE = 19
    NO_MATCHED_MESSAGE = 20
    OFFSET_MOVED = 21


@dataclass(frozen=True, slots=True)
class PullResponse:
    """The header of a pull response. Its body has the messages.

    `offset_reset` distinguishes a reset at the broker from an ordinary correction. Both have the status OFFSET_MOVED.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int = MASTER_ID
    offset_reset: bool = False


MAX_EVENT_CHARS = 3000
"""The largest number of characters in an event's text, because it quotes servers, listeners and files."""

MAX_FACT_CHARS = 500


class EventKind(StrEnum):
    """The kinds of events that a consumer emits."""

    QUEUE_ASSIGNED = "queue-assigned"
    QUEUE_REVOKED = "queue-revoked"
    OFFSET_CORRECTED = "offset-corrected"
    OFFSET_RESET = "offset-reset"
    OFFSET_FORGOTTEN = "offset-forgotten"
    OFFSET_WENT_BACK = "offset-went-back"
    SUBSCRIPTION_DIFFERS = "subscription-differs"
    STORE_UNWRITABLE = "store-unwritable"
    STORE_UNREACHABLE = "store-unreachable"
    STORE_RECOVERED = "store-recovered"
    STORE_UNSYNCED = "store-unsynced"
    STORE_REMOVED = "store-removed"
    STORE_TAKEN = "store-taken"
    STORE_FALLBACK = "store-fallback"
    STORE_ORPHANED = "store-orphaned"
    STORE_SLOT = "store-slot"
    LOCK_LOST = "lock-lost"
    QUEUE_FENCED = "queue-fenced"
    LOG_DIVERGED = "log-diverged"
    FOREIGN_MEMBER = "foreign-member"
    OFFSET_APART = "offset-apart"
    MESSAGE_SENT_BACK = "message-sent-back"
    MESSAGE_GIVEN_UP = "message-given-up"
    MESSAGE_UNWANTED = "message-unwanted"
    MESSAGE_STUCK = "message-stuck"
    MESSAGE_TOO_LARGE = "message-too-large"
    MESSAGE_LEFT_OUT = "message-left-out"
    SEND_BACK_FAILED = "send-back-failed"
    LISTENER_RESULT_UNKNOWN = "listener-result-unknown"
    RANGE_SKIPPED = "range-skipped"
    BROKER_UNREACHABLE = "broker-unreachable"
    COMMIT_FAILED = "commit-failed"
    LISTENER_FAILED = "listener-failed"
    NOTHING_SUBSCRIBED = "nothing-subscribed"
    REQUEST_REFUSED = "request-refused"
    ANSWER_REFUSED = "answer-refused"
    RECORD_IGNORED = "record-ignored"
    ADDRESS_REFUSED = "address-refused"
    EVENTS_LEFT_OUT = "events-left-out"
    CONSUMER_FAILED = "consumer-failed"


@dataclass(frozen=True, slots=True)
class ConsumerEvent:
    """Something that a user should know: one sentence, the queue that it concerns, and facts."""

    kind: EventKind
    text: str
    queue: MessageQueue | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", escape_controls(truncate(self.text, MAX_EVENT_CHARS)))

    def __str__(self) -> str:
        facts = " ".join(f"{name}={truncate(str(value), MAX_FACT_CHARS)}" for name, value in self.facts.items())
        where = f" queue={self.queue}" if self.queue else ""
        return escape_controls(f"event={self.kind}{where} {self.text}" + (f" {facts}" if facts else ""))


class ReadOffsetType(Enum):
    """The copy of an offset to read: memory, the store, or the store if memory has none. Source: ReadOffsetType."""

    READ_FROM_MEMORY = "memory"
    READ_FROM_STORE = "store"
    MEMORY_FIRST_THEN_STORE = "memory-first"


@runtime_checkable
class OffsetStore(Protocol):
    """Keeps the commit offset of each queue: in memory at once, in the store when persisted.

    `update_offset`, READ_FROM_MEMORY and `clone_offset_table` never block, because the consumer calls them on hot paths
    and under other locks. All other methods may block on disk or network. Any thread may call every method.
    """

    def load(self) -> None:
        """Open the store and read its offsets. The consumer calls this once, before it persists anything."""

    def update_offset(self, mq: MessageQueue, offset: int, increase_only: bool = False) -> None:
        """Set the offset of `mq` in memory. With `increase_only`, ignore one that is below the present offset.

        Raises:
            ConfigError: `offset` is not a whole number from 0 to 2**63 - 1.
        """

    def read_offset(
        self, mq: MessageQueue, read_type: ReadOffsetType = ReadOffsetType.MEMORY_FIRST_THEN_STORE
    ) -> int | None:
        """Return the offset of `mq`, None if the store has no offset for it. A failure to read raises an error."""

    def persist(self, mq: MessageQueue) -> None:
        """Make the offset of `mq` in memory durable before returning. Do nothing if memory has none.

        Raises:
            RocketError: the offset is not durable. Memory keeps it, and a later call tries again.
        """

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        """Persist `mqs`, or all queues in memory. Do not change the stored offsets of other queues."""

    def remove_offset(self, mq: MessageQueue) -> None:
        """Persist the offset of `mq` and remove it from memory in one step, so that no newer offset is lost.

        Raises:
            RocketError: the offset is not durable, and is still in memory.
        """

    def clone_offset_table(self, topic: str | None = None) -> dict[MessageQueue, int]:
        """Return a copy of memory, of one topic or of all."""

    def close(self) -> None:
        """Persist all offsets in memory and close the store. A second call does nothing."""


@runtime_checkable
class ClaimedOffsets(Protocol):
    """A store of offsets and of the effects of listeners: `offsets.DatabaseOffsets`. Members claim queues in it."""

    def exactly_once(self, listener: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a listener whose effect and offset commit together."""

    def load(self) -> None:
        """Check that offsets can be stored. The consumer calls this once, before it claims a queue."""

    def close(self) -> None:
        """Close all that was opened."""
