"""Where a queue begins that nobody has consumed is stored before its first pull: whoever comes next begins there, too.

All with the default commit interval, and listeners that do not return: nothing is acknowledged.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.offsets import MemoryOffsetStore, ReadOffsetType
from pyrocket_consumer.testing import Gate, answer, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.processes import Child
from tests.consuming import Events, Seen, numbered, until
from tests.hazards.members import of

CLUSTER = {"long_poll_tick_s": 5.0}


class Unfinished(Seen):
    """A listener whose calls do not return before they are let go."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        super().__init__(lambda message: self._go_on.wait(60))

    def let_go(self) -> None:
        self._go_on.set()


@contextmanager
def running(cluster, topic, group, listener, **options):
    consumer = PushConsumer(group, **{"name_server": cluster.name_server, "shutdown_timeout_s": 0.2, **options})
    consumer.subscribe(topic, listener)
    with consumer:
        try:
            yield consumer
        finally:
            if isinstance(listener, Unfinished):
                consumer.close()
                listener.let_go()


def from_now() -> dict[str, datetime]:
    time.sleep(0.01)  # what was sent before is older
    return {"consume_from": datetime.now(UTC)}


STARTS = {"last": dict, "a time": from_now}


@pytest.mark.parametrize("where", STARTS)
@pytest.mark.parametrize("model", ["clustering", "broadcasting", "a store of one's own"])
def test_what_a_closed_consumer_left_comes_to_the_next(embedded, topic, group, tmp_path, where, model):
    embedded.create_topic(topic, queues=4)
    embedded.send(topic, b"old", count=8)
    options = {"offset_store_dir": tmp_path, "message_model": "broadcasting"} if model == "broadcasting" else {}
    if model == "a store of one's own":
        options = {"offset_store": (store := Lasting())}
    first, second = Unfinished(), Seen()
    with running(embedded, topic, group, first, **STARTS[where](), **options):
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
        first.wait_for(10)
    if model == "a store of one's own":
        options = {"offset_store": Lasting(store)}
    with running(embedded, topic, group, second, **STARTS[where](), **options):
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


class Lasting(MemoryOffsetStore):
    """Keeps what was persisted for the next one of its kind."""

    def __init__(self, before: Lasting | None = None) -> None:
        super().__init__()
        self.stored = dict(before.stored) if before is not None else {}

    def persist_all(self, mqs=None):
        super().persist_all(mqs)
        self.stored |= self.clone_offset_table()

    def read_offset(self, mq, read_type=ReadOffsetType.MEMORY_FIRST_THEN_STORE):
        in_memory = super().read_offset(mq, ReadOffsetType.READ_FROM_MEMORY)
        if read_type is ReadOffsetType.READ_FROM_MEMORY or in_memory is not None:
            return in_memory
        return self.stored.get(mq)


@pytest.mark.parametrize("where", STARTS)
def test_unfinished_messages_go_to_who_takes_the_queue(embedded, topic, group, where):
    embedded.create_topic(topic, queues=4)
    first, second = Unfinished(), Seen()
    with running(embedded, topic, group, first, **STARTS[where](), instance_name="first"):
        embedded.send(topic, lambda number: b"m%d" % number, count=12)
        first.wait_for(12)
        with running(embedded, topic, group, second, **STARTS[where](), instance_name="second"):
            second.wait_for(6)
            assert len({message.queue for message in second.messages}) == 2


@pytest.mark.live
@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_what_a_killed_member_had_in_hand_comes_to_the_next(embedded, broker, topic, group, tmp_path, model):
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, b"old", count=4)
    store = {"message_model": model, "offset_store_dir": str(tmp_path), "client_ip": "127.0.0.1", "instance_name": "it"}
    options = {"group": group, "name_server": embedded.name_server, "listener_s": 60, **store}
    child = Child("-m", "tests.consumer.member", topic, json.dumps(options))
    try:
        embedded.wait_until(lambda: broker.held_pulls(topic) == 2)
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
        child.wait(lambda lines: len([line for line in lines if line.startswith("begun")]) == 10)
    finally:
        child.send(signal.SIGKILL)
        child.ended()
    second = Seen()
    with running(embedded, topic, group, second, **store):
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


def test_a_queue_that_is_added_while_we_consume(embedded, topic, group):
    first, second, events = Unfinished(), Seen(), Events()
    with running(embedded, topic, group, first, route_refresh_interval_s=0.2, on_event=events):
        embedded.create_topic(topic, queues=3)
        embedded.send(topic, lambda number: b"m%d" % number, count=9)
        first.wait_for(9)
    with running(embedded, topic, group, second):
        second.wait_for(9)
    assert sorted(second.bodies) == sorted(numbered(9))


def test_a_topic_that_is_subscribed_to_while_we_consume(embedded, topic, group):
    other = f"{topic}-other"
    for each in (topic, other):
        embedded.create_topic(each, queues=2)
    embedded.send(other, b"old", count=4)
    first, second, events = Unfinished(), Seen(), Events()
    with running(embedded, topic, group, first, on_event=events) as consumer:
        consumer.subscribe(other, first)
        until(lambda: len([each for each in events.of("queue-assigned") if each.queue.topic == other]) == 2, "held")
        embedded.send(other, lambda number: b"m%d" % number, count=10)
        first.wait_for(10)
    with running(embedded, other, group, second):
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


def test_a_topic_that_is_unsubscribed_and_subscribed_to_again(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    first, second = Unfinished(), Seen()
    with running(embedded, topic, group, first) as consumer:
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
        first.wait_for(10)
        consumer.unsubscribe(topic)
        consumer.subscribe(topic, second)
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


@pytest.mark.parametrize("trouble", [answer(1, "no"), drop], ids=["refused", "lost"])
def test_a_beginning_that_has_to_be_stored_again_does_not_move(embedded, broker, topic, group, trouble):
    """What is sent meanwhile is consumed."""
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, b"old", count=4)

    is_ours = of(topic)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, trouble, times=4, when=is_ours)
    seen = Seen()
    with running(embedded, topic, group, seen, call_timeout_s=0.5, start_wait_s=0.1):
        broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET, when=is_ours)
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))


def test_no_pull_before_the_beginning_is_stored(embedded, broker, topic, group):
    gate, seen, is_ours = Gate(), Seen(), of(topic)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None, when=is_ours)
    with running(embedded, topic, group, seen, start_wait_s=0.3):
        gate.wait_held()
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
        assert not [each for each in broker.requests(RequestCode.PULL_MESSAGE) if is_ours(each.command)]
        assert embedded.committed(group, topic) == {}
        gate.open()
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))
