"""What a queue's next owner begins with is what the last one has finished, however the queue is given up."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pyrocket_consumer import MessageQueue, PushConsumer
from pyrocket_consumer.testing import rewrite
from pyrocket_consumer.wire.bodies import decode_route, encode_route
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Events, Seen, consuming, until
from tests.resetting import fill

CLUSTER = {"brokers": 2}
COUNT = 100


def without(**parts: tuple[()]):
    """A fault: routes lack what is named."""

    def change(answer):
        if answer.body:
            answer.body = encode_route(replace(decode_route("any", answer.body), **parts))
        return answer

    return rewrite(change)


@pytest.mark.parametrize("then", ["it is there again", "the consumer closes"])
@pytest.mark.parametrize("trouble", ["one broker is missing", "no broker is named", "no queue is left"])
def test_a_route_without_brokers_for_a_moment_repeats_nothing(embedded, topic, group, trouble, then):
    """They are up, only the name server has lost sight of them: the last offsets are stored there all the same."""
    fill(embedded, topic, COUNT, queues=2)
    name_server = embedded.name_server_node
    seen, events = Seen(), Events()

    def start() -> PushConsumer:
        consumer = PushConsumer(
            group, name_server=embedded.name_server, consume_from="first", route_refresh_interval_s=0.2, on_event=events
        )
        consumer.subscribe(topic, seen)
        return consumer.start()

    consumer = start()
    try:
        seen.wait_for(COUNT)
        if trouble == "one broker is missing":
            embedded.unregister(embedded.broker("broker-b"))
            until(lambda: [each for each in events.of("queue-revoked") if each.queue.topic == topic], "given up")
        else:
            parts = {"brokers": ()} if trouble == "no broker is named" else {"brokers": (), "queues": ()}
            name_server.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, without(**parts), times=None)
            asked = len(name_server.requests(RequestCode.GET_ROUTEINFO_BY_TOPIC))
            name_server.wait_for(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked + 6)
        if then == "the consumer closes":
            consumer.close()
        name_server.clear_faults()
        name_server.register()
        if then == "the consumer closes":
            consumer = start()
        embedded.send(topic, lambda number: b"n%d" % number, count=COUNT)
        seen.wait_for(2 * COUNT)
    finally:
        consumer.close()
    assert set(seen.places.values()) == {1}
    assert not events.of("commit-failed")
    for name in ("broker-a", "broker-b"):
        assert sum(embedded.committed(group, topic, name).values()) == COUNT


@pytest.mark.parametrize("then", ["moves", "closes"])
def test_what_is_finished_beside_a_long_call_is_not_repeated(embedded, topic, group, then):
    embedded.create_topic(topic, queues=2, brokers=["broker-a"])
    go_on = threading.Event()

    def judge(message):
        if message.body == b"long":
            go_on.wait(60)

    first, second = Seen(judge), Seen()
    options = {"shutdown_timeout_s": 2, "commit_interval_s": 5}
    try:
        with consuming(embedded, topic, group, first, instance_name="first", **options) as (consumer, _):
            for queue_id in (0, 1):
                embedded.send(topic, b"m", count=1000, queue_id=queue_id, broker_name="broker-a")
                embedded.send(topic, b"long", queue_id=queue_id, broker_name="broker-a")
            first.wait(lambda seen: len(seen.messages) == 2002)
            if then == "closes":
                consumer.close()
            with consuming(embedded, topic, group, second, instance_name="second"):
                second.wait(lambda seen: b"long" in seen.bodies)
    finally:
        go_on.set()
    assert second.bodies.count(b"m") == 0


@pytest.mark.parametrize("explained", [True, False], ids=["the broker was away", "nothing explains it"])
def test_offsets_that_went_back_at_the_broker(embedded, topic, group, explained):
    """A broker that was away may have lost what it acknowledged; else somebody may have reset the group."""
    embedded.create_topic(topic, queues=1, brokers=["broker-a"])
    fill(embedded, topic, 20, broker_name="broker-a")
    queue = MessageQueue(topic, "broker-a", 0)
    broker, seen, events = embedded.broker("broker-a"), Seen(), Events()
    with consuming(embedded, topic, group, seen, on_event=events, commit_interval_s=0.1) as (consumer, _):
        seen.wait_for(20)
        until(lambda: embedded.committed(group, topic) == {0: 20}, "stored")
        until(lambda: MessageQueue(f"%RETRY%{group}", "broker-a", 0) in consumer.progress(), "bound to the broker")
        consumer.unsubscribe(topic)
        until(lambda: queue not in consumer.progress(), "given up")
        if explained:
            heartbeats = len(broker.requests(RequestCode.HEART_BEAT))
            broker.close_connections()
            until(lambda: len(broker.requests(RequestCode.HEART_BEAT)) > heartbeats, "known again")
        broker.commit(group, topic, {0: 5})
        consumer.subscribe(topic, seen)
        event = events.wait_for("offset-went-back")
        assert event.queue == queue
        assert dict(event.facts) == {"stored": 5, "known": 20}
        embedded.send(topic, lambda number: b"n%d" % number, count=5, broker_name="broker-a")
        seen.wait_for(25)
    assert len(seen.messages) == (25 if explained else 40)
