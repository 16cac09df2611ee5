"""What a member reads, and which listener gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.model import Subscription, retry_topic


@dataclass(slots=True)
class Topic:
    """A topic subscribed to."""

    subscription: Subscription
    listener: Listener


class Subscriptions:
    """The topics of a member, the retry topic of its group among them. Each change has a newer version.

    Changed on the I/O thread only; read on any.
    """

    def __init__(self, own_retry_topic: str | None, now_ms: Callable[[], int]) -> None:
        self._own_retry_topic = own_retry_topic
        self._now_ms = now_ms
        self._topics: dict[str, Topic] = {}

    @classmethod
    def of_group(cls, group: str, *, broadcasting: bool, now_ms: Callable[[], int]) -> Subscriptions:
        """Return the subscriptions of a group's member: none yet. A broadcasting group has no retry topic."""
        return cls(None if broadcasting else retry_topic(group), now_ms)

    def topics(self) -> list[str]:
        """Return the topics to read, the retry topic among them."""
        return list(self._topics)

    def get(self, topic: str) -> Topic | None:
        """Return what is subscribed of `topic`."""
        return self._topics.get(topic)

    def subscription(self, topic: str) -> Subscription | None:
        """Return what the group wants of `topic` now."""
        found = self._topics.get(topic)
        return found.subscription if found is not None else None

    def all(self) -> list[Subscription]:
        """Return every subscription."""
        return [topic.subscription for topic in self._topics.values()]

    def newer(self, subscription: Subscription) -> Subscription:
        """Return `subscription` with a version that is newer than what its topic has now."""
        before = self._topics.get(subscription.topic)
        version = max(self._now_ms(), (before.subscription.version if before is not None else 0) + 1)
        return replace(subscription, version=version)

    def add(self, subscription: Subscription, listener: Listener) -> None:
        """Subscribe to a topic, in the place of what was subscribed of it."""
        self._topics[subscription.topic] = Topic(subscription, listener)
        own = self._own_retry_topic
        if own is not None and own not in self._topics:
            self._topics[own] = Topic(Subscription(own, version=subscription.version), listener)

    def remove(self, topic: str) -> None:
        """Read `topic` no longer."""
        self._topics.pop(topic, None)

    def renew(self, topics: Iterable[str]) -> None:
        """Give the subscriptions of `topics` a newer version: the set of their queues we hold changes."""
        for topic in topics:
            found = self._topics.get(topic)
            if found is not None:
                found.subscription = self.newer(found.subscription)
