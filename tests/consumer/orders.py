"""The topic `orders`, which the group `app` consumes: what most tests of whole consumers begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue, PushConsumer
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from tests.consuming import Events, consuming, until
from tests.hazards.members import ours

TOPIC, GROUP = "orders", "app"
RETRY, DEAD = "%RETRY%app", "%DLQ%app"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)


class Orders:
    """The topic on a cluster; its consumers tell `events`."""

    def __init__(self, cluster: EmbeddedCluster, queues: int = 1, messages: int = 0, **options: Any) -> None:
        self.cluster = cluster
        self.events = Events()
        self.make(queues, **options)
        self.fill(messages)

    @property
    def broker(self) -> EmbeddedBroker:
        return self.cluster.broker("broker-a")

    def make(self, queues: int, topic: str = TOPIC, **options: Any) -> str:
        """Make a topic, or give this one more queues."""
        self.cluster.create_topic(topic, queues=queues, **options)
        return topic

    def send(self, *body: Any, topic: str = TOPIC, **options: Any) -> None:
        self.cluster.send(topic, *body, **options)

    def fill(self, count: int, start: int = 0, **options: Any) -> None:
        """Send so many messages: m0, m1, and so on."""
        if count:
            self.send(lambda number: b"m%d" % (start + number), count=count, **options)

    def consumer(self, listener: Callable[..., Any] | None = None, **options: Any) -> PushConsumer:
        """Make a consumer, of this topic if there is a listener."""
        made = PushConsumer(GROUP, **{"name_server": self.cluster.name_server, "on_event": self.events, **options})
        if listener is not None:
            made.subscribe(TOPIC, listener)
        return made

    def consuming(
        self, listener: Callable[..., Any] | None = None, **options: Any
    ) -> AbstractContextManager[tuple[PushConsumer, Any]]:
        """Run a consumer with options that make a test short; gives it and its listener."""
        return consuming(self.cluster, TOPIC, GROUP, listener, **{"on_event": self.events, **options})

    @property
    def committed(self) -> dict[int, int]:
        """What the broker has for each queue."""
        return self.cluster.committed(GROUP, TOPIC)

    @property
    def dead(self) -> list[Any]:
        """The messages that were given up."""
        return self.cluster.messages(DEAD)

    def wait_committed(self, *offsets: int) -> None:
        """Wait until the broker has these for the queues 0, 1 and so on."""
        until(lambda: self.committed == dict(enumerate(offsets)), f"committed {offsets}, not {self.committed}")

    def on(self, code: int, fault: Any, times: int | None = 1, **fields: object) -> None:
        """Have the broker treat requests about the topic, and with these fields, in another way."""
        self.broker.on(code, fault, times=times, when=of(**fields))


def of(topic: str = TOPIC, **fields: object) -> Callable[[RemotingCommand], bool]:
    """Return what tells requests about a topic, and with these fields, from others."""
    wanted = {"topic": topic, **{name: str(value) for name, value in fields.items()}}
    return lambda command: all(command.fields.get(name) == value for name, value in wanted.items())


def listener_of(kind: str, function: Callable[[Any], Any], blocks: bool = False) -> Callable[[Any], Any]:
    """Return a "plain" or "async" listener that does this; what blocks must not do so on the loop."""

    async def listen(unit: Any) -> Any:
        return await asyncio.to_thread(function, unit) if blocks else function(unit)

    return listen if kind == "async" else function


def ours_and(*members: Any) -> pytest.MarkDecorator:
    """Mark a test as one of our member and of these, most of them faulty."""
    return pytest.mark.parametrize("member", [ours, *members])
