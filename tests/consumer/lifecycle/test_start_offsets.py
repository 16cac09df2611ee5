"""A queue starts when its committed offset is known, and there: trouble is never taken for "none"."""

from __future__ import annotations

import pytest

from pyrocket_consumer import ConsumerState, PushConsumer
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
from tests.consuming import QUICK, Events, Seen, consuming, numbered, started, until
from tests.hazards.members import of

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
        embedded.create_topic(topic, queues=1)
        embedded.send(topic, lambda number: b"m%d" % number, count=10)
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
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, lambda number: b"m%d" % number, count=10)
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
        embedded.create_topic(topic, queues=2)
        embedded.send(topic, lambda number: b"m%d" % number, count=6)
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
            cluster.send(topic, lambda number: b"m%d" % number, count=100)
            seen.wait_for(100)
            consumer.unsubscribe(topic)
            until(lambda: cluster.committed(group, topic) == {0: 100}, "stored")
            until(lambda: not any(each.topic == topic for each in consumer.progress()), "given up")
            broker.kill()
            broker.lose_data()
            broker.start()
            cluster.send(topic, lambda number: b"m%d" % (100 + number), count=20)
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
        embedded.send(topic, lambda number: b"m%d" % number, count=4)
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
