"""Decisions about the next attempt of a message: its queue, the brokers to avoid, and what a failed attempt means."""

from __future__ import annotations

import random
from collections.abc import Container
from enum import Enum
from functools import cached_property

from pyrocket_consumer.cluster.broker import DEGRADED_CODES
from pyrocket_consumer.errors import (
    BrokerError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.model import MASTER_ID, PERM_WRITE, MessageQueue, QueueData, TopicRoute
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.subscription import java_string_hash
from pyrocket_consumer.text import truncate
from pyrocket_consumer.transport.backoff import Backoff

_FIRST_AVOIDANCE_S = 1.0
_LONGEST_AVOIDANCE_S = 30.0
_MAX_DESCRIBED_BROKERS, _MAX_NAME_CHARS = 10, 127


class PublishQueues:
    """The writable queues of one topic, selected round-robin. Confined to the I/O thread.

    `route` is their route; another route needs another PublishQueues.
    """

    def __init__(self, route: TopicRoute, rng: random.Random) -> None:
        self.route = route
        self.queues = route.publish_queues()
        self.broker_count = len({queue.broker_name for queue in self.queues})
        self._known = frozenset(self.queues)
        # A random first queue spreads producers that start at the same time.
        self._next_index = rng.randrange(len(self.queues)) if self.queues else 0

    @cached_property
    def _with_master(self) -> frozenset[str]:
        return frozenset(broker.broker_name for broker in self.route.brokers if MASTER_ID in broker.addresses)

    def waits_for_master(self, data: QueueData) -> bool:
        """Return whether these queues are writable, but their broker has no master."""
        return bool(data.perm & PERM_WRITE and data.write_queues) and data.broker_name not in self._with_master

    @cached_property
    def any_waits_for_master(self) -> bool:
        """Whether any queues of the route are writable, but without a master."""
        return any(map(self.waits_for_master, self.route.queues))

    @cached_property
    def description(self) -> str:
        """The route as text for errors. It is cached, because thousands of messages may fail with it."""
        descriptions = [
            f"{truncate(data.broker_name, _MAX_NAME_CHARS)} with {data.write_queues} write queues, "
            f"{'' if data.perm & PERM_WRITE else 'no '}write permission (perm {data.perm}) and "
            f"{'a' if data.broker_name in self._with_master else 'no'} master"
            for data in self.route.queues[:_MAX_DESCRIBED_BROKERS]
        ]
        if more := len(self.route.queues) - len(descriptions):
            descriptions.append(f"{more} more brokers")
        return "; ".join(descriptions) or "no queues"

    def __contains__(self, queue: object) -> bool:
        return queue in self._known

    def next_queue(self, avoid: Container[str] = ()) -> MessageQueue | None:
        """Return the next queue whose broker is not in `avoid`, or None if all are."""
        count = len(self.queues)
        for step in range(count):
            queue = self.queues[(self._next_index + step) % count]
            if queue.broker_name not in avoid:
                self._next_index = (self._next_index + step + 1) % count
                return queue
        return None

    def queue_for_key(self, key: str) -> MessageQueue | None:
        """Return the queue of `key`, or None if the topic has no queues. It is the same while the queues are the same.

        Java producers select the same queue.

        Source: SelectMessageQueueByHash over String.hashCode, whose remainder has the sign of the hash.
        """
        return self.queues[abs(java_string_hash(key)) % len(self.queues)] if self.queues else None


class FailedBrokers:
    """Brokers that failed recently. Others are preferred for 1 s, and longer after each failure, up to 30 s.

    Confined to the I/O thread.
    """

    def __init__(self) -> None:
        self._failures: dict[str, Backoff] = {}

    def add_failure(self, broker_name: str, now: float) -> None:
        """Prefer other brokers for a while. Of thousands of simultaneous failures only the first counts."""
        backoff = self._failures.setdefault(broker_name, Backoff(_FIRST_AVOIDANCE_S, _LONGEST_AVOIDANCE_S))
        if now >= backoff.until:
            backoff.failed(now)

    def forget(self, broker_name: str) -> None:
        """Stop avoiding the broker."""
        if self._failures:
            self._failures.pop(broker_name, None)

    def avoided(self, now: float) -> set[str]:
        """Return the brokers to avoid at `now`."""
        if not self._failures:
            return set()
        return {name for name, backoff in self._failures.items() if backoff.until > now}


# --- failed attempts


class NoWritableQueue(RocketError):
    """The route has no writable queue for the message, and none is expected to return."""


class SendFailure(Enum):
    """The state of a message without acknowledgement, and what to do next."""

    RETRY = "not stored; the same broker may store it in a moment"
    RETRY_ELSEWHERE = "not stored; another broker may store it"
    UNKNOWN = "stored or not; sending it again may store a copy"
    PERMANENT = "not stored, and no broker will store it"


# Refusals before the message is stored, for a temporary reason or because the route is stale. Code 215 means 2.
# Source: DefaultMQProducer.retryResponseCodes; SendMessageProcessor.handlePutMessageResult.
_RETRY_CODES = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
_RETRY_ELSEWHERE_CODES = frozenset({ResponseCode.NO_BUYER_ID, ResponseCode.NOT_IN_CURRENT_UNIT})

_BROKER_TROUBLE_CODES = _RETRY_CODES - {ResponseCode.TOPIC_NOT_EXIST}

# Brokers use the same code for many reasons. Only the text distinguishes them.
_SLAVE_TEXT = "[REJECTREQUEST]"
_READ_ONLY_TEXT = "sending message is forbidden"
_NOT_STORED_TEXTS = ("[PC_SYNCHRONIZED]", "server is busy or broken")


def classify_failure(error: Exception) -> SendFailure:
    """Return the class of `error`, which came instead of an acknowledgement."""
    if isinstance(error, ConnectError):
        return SendFailure.RETRY
    if isinstance(error, (RequestTimeout, ConnectionLost)):
        return SendFailure.UNKNOWN
    if not isinstance(error, BrokerError):
        return SendFailure.PERMANENT
    if isinstance(error, PermissionDenied):
        return SendFailure.RETRY if _READ_ONLY_TEXT in error.remark else SendFailure.RETRY_ELSEWHERE
    if error.code in _RETRY_CODES or _is_queue_illegal(error):
        return SendFailure.RETRY
    if error.code in _RETRY_ELSEWHERE_CODES:
        return SendFailure.RETRY_ELSEWHERE
    if error.code == ResponseCode.SYSTEM_ERROR:
        return SendFailure.RETRY if any(text in error.remark for text in _NOT_STORED_TEXTS) else SendFailure.UNKNOWN
    return SendFailure.UNKNOWN if error.code in DEGRADED_CODES else SendFailure.PERMANENT


def _is_queue_illegal(error: BrokerError) -> bool:
    """Return whether the broker has no such queue. The code is 1 up to 5.1.4, and 29 from 5.3.2 on."""
    return "queueId[" in error.remark and "is illegal" in error.remark


def is_route_stale(error: Exception) -> bool:
    """Return whether the route may be stale: no broker is at the address, or the broker does not have the queue."""
    if not isinstance(error, BrokerError):
        return True
    if error.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL):
        return _SLAVE_TEXT in error.remark
    return classify_failure(error) is SendFailure.RETRY


def is_topic_missing(error: Exception | None) -> bool:
    """Return whether the broker reports that the topic does not exist."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST


def is_broker_in_trouble(error: Exception) -> bool:
    """Return whether the broker caused the error, and not the message, so that the next messages should avoid it."""
    return not isinstance(error, BrokerError) or error.code in _BROKER_TROUBLE_CODES
