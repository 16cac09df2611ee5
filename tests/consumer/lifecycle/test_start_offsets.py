"""Where a queue begins: at its committed offset, when that is known, or where is stored before the first pull."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConsumerState, PushConsumer
from pyrocket_consumer.offsets import MemoryOffsetStore, ReadOffsetType
from pyrocket_consumer.testing import (
    EmbeddedCluster,
    Gate,
    answer,
    close_connection,
    drop,
    drop_answer,
    garbage,
    reset_connection,
)
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.processes import Child
from tests.consuming import QUICK, Events, Seen, consuming, numbered, started, until
from tests.hazards.members import of
from tests.resetting import fill

IMPATIENT = {"call_timeout_s": 0.3, "rebalance_interval_s": 0.1, "commit_interval_s": 0.05}

TROUBLE = {
    "refused": answer(1, "boom"),
    "busy": answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
    "flow control": answer(215, "slow down"),
    "no permission": answer(16, "not now"),
    "unknown code": answer(999),
    "no offset in the answer": answer(0),
    "an offset that is no number": answer(0, fields={"offset": "many"}),
    "never answered": drop,
    "answer lost": drop_answer,
    "connection closed": close_connection,
    "connection reset": reset_connection,
    "garbage": garbage(b"\0" * 40),
}


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_queue_waits_for_its_offset(embedded, broker, group, where):
    """One topic for each kind of trouble: all are read by one consumer, and none is started without its answer."""
    troubled = {f"{group}-{number}": what for number, what in enumerate(TROUBLE)}
    for topic, what in troubled.items():
        fill(embedded, topic, 10, queues=1)
        broker.commit(group, topic, {0: 7})
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, TROUBLE[what], when=of(topic))
    seen = {topic: Seen() for topic in troubled}

    def make() -> PushConsumer:
        options = {**QUICK, **IMPATIENT, "consume_from": where}
        consumer = PushConsumer(group, name_server=embedded.name_server, **options)
        for topic, listener in seen.items():
            consumer.subscribe(topic, listener)
        return consumer

    with started(make) as consumer:
        for topic, listener in seen.items():
            listener.wait_for(3)
            assert sorted(listener.bodies) == numbered(3, 7), troubled[topic]
        for queue, progress in consumer.progress().items():
            if queue.topic in troubled:
                assert (progress.origin, progress.start_offset) == ("stored", 7), troubled[queue.topic]
        assert consumer.state is ConsumerState.RUNNING
        for topic in troubled:
            until(lambda topic=topic: embedded.committed(group, topic) == {0: 10}, "committed")
    for topic, what in troubled.items():
        queries = broker.wait_for(RequestCode.QUERY_CONSUMER_OFFSET, 2, when=of(topic))
        pulls = broker.wait_for(RequestCode.PULL_MESSAGE, when=of(topic))
        assert pulls[0].command.fields["queueOffset"] == "7", what
        assert pulls[0].at_s >= queries[1].at_s, f"{what}: nothing was pulled before the answer"


def test_other_queues_do_not_wait_for_it(embedded, broker, topic, group):
    fill(embedded, topic, 10, queues=2)
    gate = Gate()

    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, gate, times=None, when=of(topic, queueId=1))
    events = Events()
    with consuming(embedded, topic, group, on_event=events, **IMPATIENT) as (_, seen):
        seen.wait_for(5)
        until(lambda: any("begins is not known" in each.text for each in events.of("broker-unreachable")), "it is told")
        assert {message.queue.queue_id for message in seen.messages} == {0}
        broker.clear_faults()
        gate.open()
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))


def test_where_the_end_is_has_to_be_answered_too(embedded, broker, topic, group):
    """A new group from the end: a failed GET_MAX_OFFSET is no 0."""
    embedded.send(topic, b"old", count=5)

    for what in ("refused", "never answered"):
        broker.on(RequestCode.GET_MAX_OFFSET, TROUBLE[what], when=of(topic))
    events = Events()
    with consuming(embedded, topic, group, consume_from="last", on_event=events, **IMPATIENT) as (_, seen):
        broker.wait_for(RequestCode.PULL_MESSAGE, when=of(topic))
        embedded.send(topic, b"m0")
        seen.wait_for(1)
    assert seen.bodies == numbered(1)


def test_of_a_topic_that_comes_later_everything_is_consumed(embedded, group):
    """With default options: what is sent before we have seen the topic is sent to us."""
    topic = "later"
    seen = Seen()
    with PushConsumer(group, name_server=embedded.name_server, rebalance_interval_s=0.2) as consumer:
        consumer.subscribe(topic, seen)
        fill(embedded, topic, 6, queues=2)
        seen.wait_for(6)
        assert {each.origin for queue, each in consumer.progress().items() if queue.topic == topic} == {
            "queue added while we consume"
        }


def test_a_queue_that_lost_its_data_begins_at_the_first_message(group):
    """With default options, and though the broker knows no offset of the group any more: the group is not new."""
    topic = "orders"
    with EmbeddedCluster() as cluster:
        cluster.create_topic(topic, queues=1)
        events, seen, broker = Events(), Seen(), cluster.broker("broker-a")
        with PushConsumer(group, name_server=cluster.name_server, on_event=events) as consumer:
            consumer.subscribe(topic, seen)
            fill(cluster, topic, 100)
            seen.wait_for(100)
            consumer.unsubscribe(topic)
            until(lambda: cluster.committed(group, topic) == {0: 100}, "stored")
            until(lambda: not any(each.topic == topic for each in consumer.progress()), "given up")
            broker.kill()
            broker.lose_data()
            broker.start()
            fill(cluster, topic, 20, 100)
            consumer.subscribe(topic, seen)
            seen.wait_for(120)
        assert events.wait_for("offset-forgotten").facts["offset"] == 100
    assert sorted(seen.bodies[100:]) == numbered(20, 100)


@pytest.mark.parametrize("code", [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_CONSUMER_LIST_BY_GROUP])
def test_a_start_waits_for_queues_that_could_not_begin_at_once(embedded, broker, topic, group, code):
    """With default options: what is sent after `start()` has returned is consumed, although a broker was busy first."""
    embedded.create_topic(topic, queues=2)
    broker.on(code, TROUBLE["busy"], times=2, when=lambda each: group in each.fields["consumerGroup"])
    seen = Seen()
    consumer = PushConsumer(group, name_server=embedded.name_server)
    consumer.subscribe(topic, seen)
    with consumer:
        fill(embedded, topic, 4)
        seen.wait_for(4)


def test_what_has_not_begun_when_a_start_ends_is_named(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=2)
    events = Events()
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, TROUBLE["busy"], times=None, when=of(topic, queueId=1))
    options = {"start_wait_s": 0.5, "on_event": events}
    consumer = PushConsumer(group, name_server=embedded.name_server, **options)
    consumer.subscribe(topic, Seen())
    with consumer:
        until(lambda: any("not begun after 0.5 s" in each.text for each in events.of("broker-unreachable")), "told")
        assert any(f"{topic}/broker-a/1" in each.text for each in events.of("broker-unreachable"))
        broker.clear_faults()
        until(lambda: len([queue for queue in consumer.progress() if queue.topic == topic]) == 2, "begun all the same")


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
        fill(embedded, topic, 10)
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
        fill(embedded, topic, 12)
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
        fill(embedded, topic, 10)
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
        fill(embedded, topic, 9, queues=3)
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
        fill(embedded, other, 10)
        first.wait_for(10)
    with running(embedded, other, group, second):
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


def test_a_topic_that_is_unsubscribed_and_subscribed_to_again(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    first, second = Unfinished(), Seen()
    with running(embedded, topic, group, first) as consumer:
        fill(embedded, topic, 10)
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
        fill(embedded, topic, 10)
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))


def test_no_pull_before_the_beginning_is_stored(embedded, broker, topic, group):
    gate, seen, is_ours = Gate(), Seen(), of(topic)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate, times=None, when=is_ours)
    with running(embedded, topic, group, seen, start_wait_s=0.3):
        gate.wait_held()
        fill(embedded, topic, 10)
        assert not [each for each in broker.requests(RequestCode.PULL_MESSAGE) if is_ours(each.command)]
        assert embedded.committed(group, topic) == {}
        gate.open()
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))
