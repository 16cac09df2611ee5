"""Consumers for tests, with a listener that records messages and waits for them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyrocket_consumer import ConnectError, ConsumerEvent, Message, MessageQueue, PushConsumer, RequestTimeout

WAIT_S = 30.0

LONG_TIMEOUT_S = 15.0
"""A timeout for calls that get a response, long enough for a busy machine and for a call during a close."""

QUICK = {
    "call_timeout_s": LONG_TIMEOUT_S,
    "connect_timeout_s": LONG_TIMEOUT_S,
    "consume_from": "first",
    "commit_interval_s": 0.2,
    "pull_retry_delay_s": 0.1,
    "rebalance_interval_s": 2.0,
    "route_refresh_interval_s": 1.0,
}
"""Options that make a test short."""


class RecordingListener:
    """A listener that records messages. `judge(message)` returns or raises its result."""

    def __init__(self, judge: Callable[[Message], Any] = lambda message: None) -> None:
        self._judge = judge
        self._changed = threading.Condition()
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> Any:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        return self._judge(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in list(self.messages)]

    @property
    def counts(self) -> Counter[tuple[MessageQueue, int]]:
        """The number of deliveries by queue and offset."""
        return Counter((message.queue, message.queue_offset) for message in list(self.messages))

    def wait(self, reached: Callable[[RecordingListener], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until `reached(self)` is true. The error has the recorded messages."""
        with self._changed:
            if not self._changed.wait_for(lambda: reached(self), timeout_s):
                raise AssertionError(f"after {timeout_s:g} s only {len(self.messages)} messages: {self.bodies[-20:]}")

    def wait_for(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Wait until the listener has received `count` different messages."""
        self.wait(lambda seen: len(set(seen.bodies)) >= count, timeout_s)


class Events:
    """An `on_event` that records events."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.all: list[ConsumerEvent] = []

    def __call__(self, event: ConsumerEvent) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def of(self, kind: str) -> list[ConsumerEvent]:
        return [event for event in list(self.all) if event.kind == kind]

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = WAIT_S) -> ConsumerEvent:
        """Wait for the `count`th event of a kind, and return it."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout_s):
                raise AssertionError(f"no {kind} (number {count}) among {[str(event) for event in self.all]}")
        return self.of(kind)[count - 1]


@contextmanager
def consuming(
    cluster: Any,
    topic: str,
    group: str,
    listener: Callable[..., Any] | None = None,
    selector: Any = "*",
    **options: Any,
) -> Iterator[tuple[PushConsumer, Any]]:
    """Run a consumer of `topic`; yields it and its listener."""
    seen = listener if listener is not None else RecordingListener()

    def make() -> PushConsumer:
        consumer = PushConsumer(group, name_server=cluster.name_server, **{**QUICK, **options})
        consumer.subscribe(topic, seen, selector)
        return consumer

    with started(make) as consumer:
        yield consumer, seen


def started(make: Callable[[], PushConsumer]) -> PushConsumer:
    """Start a consumer. Retry if its timeouts are so short that a busy machine may miss them."""
    for _ in range(10):
        consumer = make()
        try:
            return consumer.start()
        except (ConnectError, RequestTimeout):
            if consumer.config.call_timeout_s >= LONG_TIMEOUT_S:
                raise
    raise AssertionError("no attempt to start was answered in time")


def until(reached: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Poll until `reached()` is true, and return its value; for state that real brokers do not notify."""
    deadline = time.monotonic() + timeout_s
    while not (found := reached()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)
    return found


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Return bodies with consecutive numbers."""
    return [b"m%d" % number for number in range(start, start + count)]
