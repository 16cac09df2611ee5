"""The topic `orders`, which the group `app` consumes, for most tests of whole consumers."""

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
    """The topic on a cluster; its consumers emit to `events`."""

    def __init__(self, cluster: EmbeddedCluster, queues: int = 1, messages: int = 0, **options: Any) -> None:
        self.cluster = cluster
        self.events = Events()
        self.make(queues, **options)
        self.fill(messages)

    @property
    def broker(self) -> EmbeddedBroker:
        return self.cluster.broker("broker-a")

    def make(self, queues: int, topic: str = TOPIC, **options: Any) -> str:
        """Create a topic, or add queues to this one."""
        self.cluster.create_topic(topic, queues=queues, **options)
        return topic

    def send(self, *body: Any, topic: str = TOPIC, **options: Any) -> None:
        self.cluster.send(topic, *body, **options)

    def fill(self, count: int, start: int = 0, **options: Any) -> None:
        """Send `count` messages: m0, m1, and so on."""
        if count:
            self.send(lambda number: b"m%d" % (start + number), count=count, **options)

    def consumer(self, listener: Callable[..., Any] | None = None, **options: Any) -> PushConsumer:
        """Create a consumer, which subscribes to this topic if there is a listener."""
        made = PushConsumer(GROUP, **{"name_server": self.cluster.name_server, "on_event": self.events, **options})
        if listener is not None:
            made.subscribe(TOPIC, listener)
        return made

    def consuming(
        self, listener: Callable[..., Any] | None = None, **options: Any
    ) -> AbstractContextManager[tuple[PushConsumer, Any]]:
        """Run a consumer with options for short tests; yield it and its listener."""
        return consuming(self.cluster, TOPIC, GROUP, listener, **{"on_event": self.events, **options})

    @property
    def committed(self) -> dict[int, int]:
        """The committed offsets of the queues at the broker."""
        return self.cluster.committed(GROUP, TOPIC)

    @property
    def dead(self) -> list[Any]:
        """The messages that were given up."""
        return self.cluster.messages(DEAD)

    def wait_committed(self, *offsets: int) -> None:
        """Wait until the broker has these offsets for the queues 0, 1 and so on."""
        until(lambda: self.committed == dict(enumerate(offsets)), f"committed {offsets}, not {self.committed}")

    def on(self, code: int, fault: Any, times: int | None = 1, **fields: object) -> None:
        """Set a fault for requests about the topic with these fields."""
        self.broker.on(code, fault, times=times, when=request_matcher(**fields))


def request_matcher(topic: str = TOPIC, **fields: object) -> Callable[[RemotingCommand], bool]:
    """Return a predicate for requests about a topic with these fields."""
    wanted = {"topic": topic, **{name: str(value) for name, value in fields.items()}}
    return lambda command: all(command.fields.get(name) == value for name, value in wanted.items())


def listener_of(kind: str, function: Callable[[Any], Any], blocks: bool = False) -> Callable[[Any], Any]:
    """Return a "plain" or "async" listener that calls `do`, outside of the loop because `do` may block."""

    async def listen(unit: Any) -> Any:
        return await asyncio.to_thread(function, unit) if blocks else function(unit)

    return listen if kind == "async" else function


def ours_and(*members: Any) -> pytest.MarkDecorator:
    """Parametrize a test with this library's member and with these members, most of them faulty."""
    return pytest.mark.parametrize("member", [ours, *members])
