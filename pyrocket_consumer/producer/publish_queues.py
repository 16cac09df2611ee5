"""Select the queue of a message, and avoid brokers that failed recently."""

from __future__ import annotations

import random
from collections.abc import Container
from functools import cached_property

from pyrocket_consumer.model import MASTER_ID, PERM_WRITE, MessageQueue, QueueData, TopicRoute
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
