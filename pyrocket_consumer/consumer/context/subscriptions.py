"""The topics that a member reads, and the listener of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.model import Subscription, retry_topic


@dataclass(slots=True)
class Topic:
    """A subscribed topic."""

    subscription: Subscription
    listener: Listener


class Subscriptions(dict[str, Topic]):
    """The subscription and listener of each topic, including the retry topic of the group.

    Each change has a newer version. Only the I/O thread makes changes. Any thread reads.
    """

    def __init__(self, own_retry_topic: str | None, now_ms: Callable[[], int]) -> None:
        super().__init__()
        self._own_retry_topic = own_retry_topic
        self._now_ms = now_ms

    @classmethod
    def of_group(cls, group: str, *, broadcasting: bool, now_ms: Callable[[], int]) -> Subscriptions:
        """Return empty subscriptions for a member of `group`. A broadcasting group has no retry topic."""
        return cls(None if broadcasting else retry_topic(group), now_ms)

    def topics(self) -> list[str]:
        """Return the topics to read, the retry topic among them."""
        return list(self)

    def all(self) -> list[Subscription]:
        """Return every subscription."""
        return [topic.subscription for topic in self.values()]

    def newer(self, subscription: Subscription) -> Subscription:
        """Return `subscription` with a version that is newer than the present one of its topic."""
        before = self.get(subscription.topic)
        version = max(self._now_ms(), (before.subscription.version if before is not None else 0) + 1)
        return replace(subscription, version=version)

    def add(self, subscription: Subscription, listener: Listener) -> None:
        """Subscribe to a topic. This replaces an earlier subscription of it."""
        self[subscription.topic] = Topic(subscription, listener)
        own = self._own_retry_topic
        if own is not None and own not in self:
            self[own] = Topic(Subscription(own, version=subscription.version), listener)

    def remove(self, topic: str) -> None:
        """Remove the subscription of `topic`."""
        self.pop(topic, None)

    def renew(self, topics: Iterable[str]) -> None:
        """Give the subscriptions of `topics` a newer version, because the set of held queues changes."""
        for topic in topics:
            found = self.get(topic)
            if found is not None:
                found.subscription = self.newer(found.subscription)
