"""A queue begins at its committed offset once that is known, or at an offset that is stored before the first pull."""

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
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, Gate, faults
from pyrocket_consumer.testing.faults import answer, drop
from tests.consumer.orders import GROUP, TOPIC, Orders, request_matcher
from tests.consumer.processes import Child
from tests.consuming import QUICK, RecordingListener, numbered, started, until
from tests.resets import fill, held

CLUSTER = {"long_poll_tick_s": 5.0}

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
    "answer lost": faults.drop_answer,
    "connection closed": faults.close_connection,
    "connection reset": faults.reset_connection,
    "garbage": faults.garbage(b"\0" * 40),
}


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_queue_waits_for_its_offset(embedded, broker, where):
    """One consumer reads one topic for each kind of fault, and starts none before the response."""
    troubled = {f"T-{number}": what for number, what in enumerate(TROUBLE)}
    for topic, what in troubled.items():
        fill(embedded, topic, 10, queues=1)
        broker.commit(GROUP, topic, {0: 7})
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, TROUBLE[what], when=request_matcher(topic))
    seen = {topic: RecordingListener() for topic in troubled}

    def make() -> PushConsumer:
        options = {**QUICK, **IMPATIENT, "consume_from": where}
        consumer = PushConsumer(GROUP, name_server=embedded.name_server, **options)
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
            until(lambda topic=topic: embedded.committed(GROUP, topic) == {0: 10}, "committed")
    for topic, what in troubled.items():
        queries = broker.wait_for(RequestCode.QUERY_CONSUMER_OFFSET, 2, when=request_matcher(topic))
        pulls = broker.wait_for(RequestCode.PULL_MESSAGE, when=request_matcher(topic))
        assert pulls[0].command.fields["queueOffset"] == "7", what
        assert pulls[0].at_s >= queries[1].at_s, f"{what}: no pull came before the response"


def unreachable(orders, text):
    """Return whether an event of an unreachable broker has this text."""
    return any(text in each.text for each in orders.events.of("broker-unreachable"))


def test_other_queues_do_not_wait_for_it(orders):
    orders.make(queues=2)
    orders.fill(10)
    orders.on(RequestCode.QUERY_CONSUMER_OFFSET, gate := Gate(), times=None, queueId=1)
    with orders.consuming(**IMPATIENT) as (_, seen):
        seen.wait_for(5)
        until(lambda: unreachable(orders, "is not known or not stored yet"), "it is reported")
        assert {message.queue.queue_id for message in seen.messages} == {0}
        orders.broker.clear_faults()
        gate.open()
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))


def test_a_failed_request_for_the_end_does_not_count_as_0(orders):
    """A new group begins at the end only after a successful GET_MAX_OFFSET."""
    orders.send(b"old", count=5)
    for what in ("refused", "never answered"):
        orders.on(RequestCode.GET_MAX_OFFSET, TROUBLE[what])
    with orders.consuming(consume_from="last", **IMPATIENT) as (_, seen):
        orders.broker.wait_for(RequestCode.PULL_MESSAGE, when=request_matcher(TOPIC))
        orders.send(b"m0")
        seen.wait_for(1)
    assert seen.bodies == numbered(1)


def test_all_messages_of_a_topic_created_later_are_consumed(embedded):
    """With default options, messages sent before the consumer knew the topic are consumed, too."""
    seen = RecordingListener()
    with PushConsumer(GROUP, name_server=embedded.name_server, rebalance_interval_s=0.2) as consumer:
        consumer.subscribe("later", seen)
        fill(embedded, "later", 6, queues=2)
        seen.wait_for(6)
        origins = {each.origin for queue, each in consumer.progress().items() if queue.topic == "later"}
        assert origins == {"queue added while consuming"}


def test_a_queue_that_lost_its_data_begins_at_the_first_message():
    """With default options, although the broker has lost the group's offset, because the group is not new."""
    with EmbeddedCluster() as cluster:
        orders, seen = Orders(cluster), RecordingListener()
        with orders.consumer(seen) as consumer:
            orders.fill(100)
            seen.wait_for(100)
            consumer.unsubscribe(TOPIC)
            orders.wait_committed(100)
            until(lambda: not held(consumer, TOPIC), "given up")
            orders.broker.kill()
            orders.broker.lose_data()
            orders.broker.start()
            orders.fill(20, 100)
            consumer.subscribe(TOPIC, seen)
            seen.wait_for(120)
        assert orders.events.wait_for("offset-forgotten").facts["offset"] == 100
    assert sorted(seen.bodies[100:]) == numbered(20, 100)


@pytest.mark.parametrize("code", [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_CONSUMER_LIST_BY_GROUP])
def test_a_start_waits_for_queues_that_could_not_begin_at_once(orders, code):
    """With default options, messages sent after `start()` are consumed, although a broker was busy first."""
    orders.make(queues=2)
    orders.broker.on(code, TROUBLE["busy"], times=2, when=lambda each: GROUP in each.fields["consumerGroup"])
    with orders.consumer(seen := RecordingListener()):
        orders.fill(4)
        seen.wait_for(4)


def test_an_event_names_queues_that_have_not_begun(orders):
    orders.make(queues=2)
    orders.on(RequestCode.QUERY_CONSUMER_OFFSET, TROUBLE["busy"], times=None, queueId=1)
    with orders.consumer(RecordingListener(), start_wait_s=0.5) as consumer:
        until(lambda: unreachable(orders, "not begun after 0.5 s"), "reported")
        assert unreachable(orders, "orders/broker-a/1")
        orders.broker.clear_faults()
        until(lambda: len(held(consumer, TOPIC)) == 2, "begun later")


class Unfinished(RecordingListener):
    """A listener whose calls return only when the test releases them."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        super().__init__(lambda message: self._go_on.wait(60))

    def let_go(self) -> None:
        self._go_on.set()


@contextmanager
def running(orders, listener, **options):
    with orders.consumer(listener, shutdown_timeout_s=0.2, **options) as consumer:
        try:
            yield consumer
        finally:
            if isinstance(listener, Unfinished):
                consumer.close()
                listener.let_go()


def next_gets(orders, count, **options):
    """Check that the next consumer gets the unfinished messages of the last one, and no others."""
    with running(orders, seen := RecordingListener(), **options):
        seen.wait_for(count)
    assert sorted(seen.bodies) == sorted(numbered(count))


def from_now() -> dict[str, datetime]:
    time.sleep(0.01)  # earlier messages are older
    return {"consume_from": datetime.now(UTC)}


STARTS = {"last": dict, "a time": from_now}


@pytest.mark.parametrize("where", STARTS)
@pytest.mark.parametrize("model", ["clustering", "broadcasting", "a user's store"])
def test_the_next_consumer_gets_the_messages_a_closed_one_left(orders, tmp_path, where, model):
    orders.make(queues=4)
    orders.send(b"old", count=8)
    options = again = {"offset_store_dir": tmp_path, "message_model": model} if model == "broadcasting" else {}
    if model == "a user's store":
        options = {"offset_store": (store := Lasting())}
    with running(orders, first := Unfinished(), **STARTS[where](), **options):
        orders.fill(10)
        first.wait_for(10)
    if model == "a user's store":
        again = {"offset_store": Lasting(store)}
    next_gets(orders, 10, **STARTS[where](), **again)


class Lasting(MemoryOffsetStore):
    """Keeps the persisted offsets for the next store of its class."""

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
def test_unfinished_messages_go_to_the_next_owner(orders, where):
    orders.make(queues=4)
    first, second = Unfinished(), RecordingListener()
    with running(orders, first, **STARTS[where](), instance_name="first"):
        orders.fill(12)
        first.wait_for(12)
        with running(orders, second, **STARTS[where](), instance_name="second"):
            second.wait_for(6)
            assert len({message.queue for message in second.messages}) == 2


@pytest.mark.live
@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_the_next_member_gets_the_messages_of_a_killed_one(orders, tmp_path, model):
    orders.make(queues=2)
    orders.send(b"old", count=4)
    store = {"message_model": model, "offset_store_dir": str(tmp_path), "client_ip": "127.0.0.1", "instance_name": "it"}
    options = {"group": GROUP, "name_server": orders.cluster.name_server, "listener_s": 60, **store}
    child = Child("-m", "tests.consumer.member", TOPIC, json.dumps(options))
    try:
        orders.cluster.wait_until(lambda: orders.broker.held_pulls(TOPIC) == 2)
        orders.fill(10)
        child.wait(lambda lines: len([line for line in lines if line.startswith("begun")]) == 10)
    finally:
        child.send(signal.SIGKILL)
        child.ended()
    next_gets(orders, 10, **store)


def test_a_queue_that_is_added_while_consuming(orders):
    with running(orders, first := Unfinished(), route_refresh_interval_s=0.2):
        orders.make(queues=3)
        orders.fill(9)
        first.wait_for(9)
    next_gets(orders, 9)


def test_a_topic_that_is_subscribed_to_while_consuming(orders):
    orders.make(queues=2)
    orders.send(b"old", topic=orders.make(queues=2, topic="other"), count=4)
    with running(orders, first := Unfinished()) as consumer:
        consumer.subscribe("other", first)
        until(lambda: [each.queue.topic for each in orders.events.of("queue-assigned")].count("other") == 2, "held")
        orders.fill(10, topic="other")
        first.wait_for(10)
    consumer = orders.consumer(shutdown_timeout_s=0.2)
    consumer.subscribe("other", second := RecordingListener())
    with consumer:
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


def test_a_topic_that_is_unsubscribed_and_subscribed_to_again(orders):
    orders.make(queues=2)
    first, second = Unfinished(), RecordingListener()
    with running(orders, first) as consumer:
        orders.fill(10)
        first.wait_for(10)
        consumer.unsubscribe(TOPIC)
        consumer.subscribe(TOPIC, second)
        second.wait_for(10)
    assert sorted(second.bodies) == sorted(numbered(10))


@pytest.mark.parametrize("trouble", [answer(1, "no"), drop], ids=["refused", "lost"])
def test_a_start_offset_that_is_stored_again_does_not_move(orders, trouble):
    """Messages sent meanwhile are consumed."""
    orders.make(queues=2)
    orders.send(b"old", count=4)
    orders.on(RequestCode.UPDATE_CONSUMER_OFFSET, trouble, times=4)
    with running(orders, seen := RecordingListener(), call_timeout_s=0.5, start_wait_s=0.1):
        orders.broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET, when=request_matcher(TOPIC))
        orders.fill(10)
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))


def test_no_pull_before_the_start_offset_is_stored(orders):
    orders.on(RequestCode.UPDATE_CONSUMER_OFFSET, gate := Gate(), times=None)
    with running(orders, seen := RecordingListener(), start_wait_s=0.3):
        gate.wait_held()
        orders.fill(10)
        assert not [
            each for each in orders.broker.requests(RequestCode.PULL_MESSAGE) if request_matcher(TOPIC)(each.command)
        ]
        assert orders.committed == {}
        gate.open()
        seen.wait_for(10)
    assert sorted(seen.bodies) == sorted(numbered(10))
