"""What scenarios share: one face for our consumer and for naive ones, and what they see of a broker.

A *scenario* takes `member`, which is `ours` or a class of naive members, and holds the assertions::

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
from pyrocket_consumer.offsets.local.directories import read_store, store_directory
from pyrocket_consumer.protocol.bodies import encode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import Exchange
from tests import resets
from tests.consuming import PATIENT_S, WAIT_S, Events, RecordingListener, started

QUICK: dict[str, Any] = {
    "client_ip": "127.0.0.1",
    "consume_from": "first",
    "commit_interval_s": 0.05,
    "pull_hold_s": 0.5,
    "pull_retry_delay_s": 0.1,
    "rebalance_interval_s": 0.5,
    "route_refresh_interval_s": 0.3,
    "call_timeout_s": PATIENT_S,
    "shutdown_timeout_s": 1.0,
}
"""Options that make a scenario short; both members have them unless told otherwise."""

Queues = Mapping[MessageQueue, int]


class Member(Protocol):
    """What a scenario may do with a consumer, ours or a naive one, and see of it."""

    seen: RecordingListener
    """The listener."""
    events: Events

    @property
    def client_id(self) -> str: ...

    def held(self) -> dict[MessageQueue, int | None]:
        """Return the queues it holds, retry topics left out, and the commit offset its memory has of each."""

    def stored(self) -> dict[MessageQueue, int]:
        """Return where each queue would go on if the process were killed now: what broker or file have."""

    def subscribe(self, topic: str, listener: Callable[[Message], Any], selector: str = "*") -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def reset(self, topic: str, targets: Queues) -> None:
        """Go on from other offsets: the member's own call, without any admin."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


Kind = Callable[..., contextlib.AbstractContextManager[Any]]
"""What a scenario gets: called with cluster, topic, group, listener and options it is a running `Member`."""


def faulty(kind: Any, caught: str | None = None, *more: Any) -> Any:
    """Return parameters of a test that must fail: a faulty kind, what the failed assertion says, and others."""
    error = pytest.RaisesExc(AssertionError, match=caught)
    expected = pytest.mark.xfail(raises=error, strict=True, reason="the fault must be caught")
    return pytest.param(kind, *more, marks=expected, id="-".join(map(_short, (kind, *more))))


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", value))


class OurMember:
    """Ours behind the face; `consumer` is the PushConsumer itself."""

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
    """Run our consumer; the arguments are those of `NaiveMember`."""
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
    """Make a topic and send messages to its queues in turn; returns its name and that of a group, which is new."""
    topic = names.topic()
    resets.fill(cluster, topic, messages, queues=queues)
    return topic, names.group()


def at_brokers(cluster: Any, group: str, queues: Any) -> dict[MessageQueue, int]:
    """Return what the brokers have of some queues of a group; those they have nothing of are left out."""
    found = {}
    for queue in queues:
        offset = cluster.committed(group, queue.topic, queue.broker_name).get(queue.queue_id)
        if offset is not None and not queue.topic.startswith("%RETRY%"):
            found[queue] = offset
    return found


def committed_values(broker: Any, topic: str) -> list[tuple[int, int]]:
    """Return every commit an embedded broker was asked for, in order: queue id and offset."""
    return _offsets_of(broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET), topic, "commitOffset")


def pulled_offsets(broker: Any, topic: str) -> list[tuple[int, int]]:
    """Return every pull an embedded broker was asked for, in order: queue id and offset."""
    return _offsets_of(broker.requests(RequestCode.PULL_MESSAGE), topic, "queueOffset")


def _offsets_of(requests: Any, topic: str, field: str) -> list[tuple[int, int]]:
    about = [each.command.fields for each in requests if each.command.fields["topic"] == topic]
    return [(int(fields["queueId"]), int(fields[field])) for fields in about]


def of(topic: str, **fields: object) -> Callable[[RemotingCommand], bool]:
    """Return what tells requests about `topic`, and with these fields, from others; for `on()` and `wait_for()`."""
    wanted = {"topic": topic, **{name: str(value) for name, value in fields.items()}}
    return lambda command: all(command.fields.get(name) == value for name, value in wanted.items())


def send_reset_to_members(broker: Any, group: str, targets: Queues) -> None:
    """Have an embedded broker send a reset (220) to every member of a group, as it does when an admin asks for one."""
    resets.send_reset_to_members(broker, group, next(iter(targets)).topic, encode_offset_table(targets))


def broadcasting(stores: Path, **options: object) -> dict[str, Any]:
    return {"message_model": "broadcasting", "offset_store_dir": stores, **options}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow, wherever it is: what a full disk is to this process. A limit that holds for root, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def settle() -> None:
    """Let what nobody can wait for come, such as a commit that must not be: several of our short intervals."""
    threading.Event().wait(0.25)


def give_time_to(wrong: Callable[[], object], member: Kind) -> None:
    """Let what must not be come: a moment for those that are right, and as long as a faulty variant may need."""
    deadline = time.monotonic() + (0.25 if _is_right(member) else 10.0)
    while not wrong() and time.monotonic() < deadline:
        time.sleep(0.02)


def wait_limit_s(member: Kind) -> float:
    """Return how long to wait for what a faulty variant never does."""
    return WAIT_S if _is_right(member) else 2.0


def _is_right(member: Kind) -> bool:
    return getattr(member, "__name__", "") in ("ours", "NaiveMember")


class HeldRequests:
    """A fault that keeps requests back, so that the test can answer them when and as it likes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.exchanges: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        with self._changed:
            self.exchanges.append(exchange)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> Exchange:
        """Return the `count`th request that was kept back."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.exchanges) >= count, WAIT_S), "no request was kept back"
        return self.exchanges[count - 1]

    def answer(
        self,
        code: int,
        remark: str | None = None,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        number: int = 1,
    ) -> None:
        """Answer the first request that was kept back, or another."""
        exchange = self.wait(number)
        texts = {name: str(value) for name, value in (fields or {}).items()}
        response = exchange.request.make_response(code, remark, texts, body)
        exchange.later(0, lambda: exchange.answer(response))
