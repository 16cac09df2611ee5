"""Shared by scenarios: one interface for our consumer and for naive members, and views of a broker's requests.

A *scenario* takes `member`, which is `ours` or a class of naive members, and makes the assertions::

    def nothing_is_lost(embedded, names, member):
        with member(embedded, topic, group, listener) as consumer:
            consumer.seen.wait_for(10)
            assert consumer.stored() == {queue: 10}

    @pytest.mark.parametrize("member", [ours, faulty(ForgetsOffsets, "what the failed assertion says")])
    def test_h00_nothing_is_lost(embedded, names, member):
        nothing_is_lost(embedded, names, member)
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from pyrocket_consumer import Message, MessageQueue, PushConsumer
from pyrocket_consumer.offsets.local.directories import store_directory
from pyrocket_consumer.protocol.bodies import encode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import Exchange
from tests import resets
from tests.consuming import LONG_TIMEOUT_S, WAIT_S, Events, RecordingListener, started
from tests.offsets.local.driving import read_store

QUICK: dict[str, Any] = {
    "client_ip": "127.0.0.1",
    "consume_from": "first",
    "commit_interval_s": 0.05,
    "pull_hold_s": 0.5,
    "pull_retry_delay_s": 0.1,
    "rebalance_interval_s": 0.5,
    "route_refresh_interval_s": 0.3,
    "call_timeout_s": LONG_TIMEOUT_S,
    "shutdown_timeout_s": 1.0,
}
"""Options that make a scenario short. Both kinds of members have them, unless a test overrides them."""

Queues = Mapping[MessageQueue, int]


class Member(Protocol):
    """The interface of a consumer, ours or a naive one, for scenarios."""

    seen: RecordingListener
    """The listener."""
    events: Events

    @property
    def client_id(self) -> str: ...

    def held(self) -> dict[MessageQueue, int | None]:
        """Return the held queues, except those of retry topics, with their commit offsets in memory."""

    def stored(self) -> dict[MessageQueue, int]:
        """Return the stored offsets, at the broker or in the file, at which the queues would continue after a kill."""

    def subscribe(self, topic: str, listener: Callable[[Message], Any], selector: str = "*") -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def reset(self, topic: str, targets: Queues) -> None:
        """Continue at other offsets, by the member's own call and without an admin."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


Kind = Callable[..., contextlib.AbstractContextManager[Any]]
"""A callable that takes cluster, topic, group, listener and options, and returns a running `Member`."""


def faulty(kind: Any, caught: str | None = None, *more: Any) -> Any:
    """Return parameters with which a test must fail: a faulty kind, the text of the failed assertion, and others."""
    error = pytest.RaisesExc(AssertionError, match=caught)
    expected = pytest.mark.xfail(
        raises=error,
        strict=True,
        reason="the faulty member must fail; did its fault have no effect, or was it repaired before the assertion?",
    )
    return pytest.param(kind, *more, marks=expected, id="-".join(map(_short, (kind, *more))))


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", value))


class OurMember:
    """Our consumer with the interface of `Member`; `consumer` is the PushConsumer itself."""

    def __init__(self, cluster: Any, consumer: PushConsumer, seen: RecordingListener, events: Events) -> None:
        self._cluster, self.consumer = cluster, consumer
        self.seen, self.events = seen, events
        self.subscribe, self.unsubscribe, self.reset = consumer.subscribe, consumer.unsubscribe, consumer.reset_offsets
        self.pause, self.resume, self.close = consumer.pause, consumer.resume, consumer.close

    @property
    def client_id(self) -> str:
        return str(self.consumer.client_id)

    def held(self) -> dict[MessageQueue, int | None]:
        progress = self.consumer.progress().items()
        return {queue: each.committed for queue, each in progress if not queue.topic.startswith("%RETRY%")}

    def stored(self) -> dict[MessageQueue, int]:
        config = self.consumer.config
        if config.broadcasting:
            return dict(read_store(store_directory(config.offset_store_dir, self.client_id, config.group)).offsets)
        return at_brokers(self._cluster, config.group, self.consumer.progress())


@contextmanager
def ours(
    cluster: Any, topic: str, group: str, listener: Callable[[Message], Any] | None = None, **options: Any
) -> Iterator[OurMember]:
    """Run our consumer, with the arguments of `NaiveMember`."""
    seen = (
        listener
        if isinstance(listener, RecordingListener)
        else RecordingListener(*[] if listener is None else [listener])
    )
    events = options.get("on_event") or Events()
    selector = options.pop("selector", "*")

    def made() -> PushConsumer:
        consumer = PushConsumer(group, **{"name_server": cluster.name_server, **QUICK, "on_event": events, **options})
        consumer.subscribe(topic, seen, selector)
        return consumer

    with contextlib.closing(started(made)) as consumer:
        yield OurMember(cluster, consumer, seen, events)


def filled(cluster: Any, names: Any, *, queues: int, messages: int) -> tuple[str, str]:
    """Create a topic and send messages to its queues in turn. Return its name, and the name of a new group."""
    topic = names.topic()
    resets.fill(cluster, topic, messages, queues=queues)
    return topic, names.group()


def at_brokers(cluster: Any, group: str, queues: Any) -> dict[MessageQueue, int]:
    """Return the brokers' offsets of some queues of a group. Queues without offset are omitted."""
    found = {}
    for queue in queues:
        offset = cluster.committed(group, queue.topic, queue.broker_name).get(queue.queue_id)
        if offset is not None and not queue.topic.startswith("%RETRY%"):
            found[queue] = offset
    return found


def committed_values(broker: Any, topic: str) -> list[tuple[int, int]]:
    """Return the queue id and offset of each commit that an embedded broker has received, in order."""
    return _offsets_of(broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET), topic, "commitOffset")


def pulled_offsets(broker: Any, topic: str) -> list[tuple[int, int]]:
    """Return the queue id and offset of each pull that an embedded broker has received, in order."""
    return _offsets_of(broker.requests(RequestCode.PULL_MESSAGE), topic, "queueOffset")


def _offsets_of(requests: Any, topic: str, field: str) -> list[tuple[int, int]]:
    about = [each.command.fields for each in requests if each.command.fields["topic"] == topic]
    return [(int(fields["queueId"]), int(fields[field])) for fields in about]


def request_matcher(topic: str, **fields: object) -> Callable[[RemotingCommand], bool]:
    """Return a predicate for requests about `topic` with these fields, for `on()` and `wait_for()`."""
    wanted = {"topic": topic, **{name: str(value) for name, value in fields.items()}}
    return lambda command: all(command.fields.get(name) == value for name, value in wanted.items())


def send_reset_to_members(broker: Any, group: str, targets: Queues) -> None:
    """Let an embedded broker send a reset (220) to every member of a group, as it does for an admin."""
    resets.send_reset_to_members(broker, group, next(iter(targets)).topic, encode_offset_table(targets))


def broadcasting(stores: Path, **options: object) -> dict[str, Any]:
    return {"message_model": "broadcasting", "offset_store_dir": stores, **options}


@contextmanager
def full_disk() -> Iterator[None]:
    """Simulate a full disk by a limit of 0 on the size of files. The limit also holds for root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def settle() -> None:
    """Wait for several short intervals, so that a forbidden event, such as a wrong commit, has time to happen."""
    threading.Event().wait(0.25)


def give_time_to(wrong: Callable[[], object], member: Kind) -> None:
    """Wait for a forbidden event: a moment for a correct member, and as long as needed for a faulty one."""
    deadline = time.monotonic() + (0.25 if _is_right(member) else 10.0)
    while not wrong() and time.monotonic() < deadline:
        time.sleep(0.02)


def wait_limit_s(member: Kind) -> float:
    """Return how long to wait for an event, which a faulty member never causes."""
    return WAIT_S if _is_right(member) else 2.0


def _is_right(member: Kind) -> bool:
    return getattr(member, "__name__", "") in ("ours", "NaiveMember")


class HeldRequests:
    """A fault that holds requests, so that the test can respond to them later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.exchanges: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        with self._changed:
            self.exchanges.append(exchange)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> Exchange:
        """Return the `count`th held request."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.exchanges) >= count, WAIT_S), "no request was held"
        return self.exchanges[count - 1]

    def answer(
        self,
        code: int,
        remark: str | None = None,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        number: int = 1,
    ) -> None:
        """Respond to the held request with this number, the first by default."""
        exchange = self.wait(number)
        texts = {name: str(value) for name, value in (fields or {}).items()}
        response = exchange.request.make_response(code, remark, texts, body)
        exchange.later(0, lambda: exchange.answer(response))
