"""A queue's next owner begins behind the messages that the last owner has finished, however the queue ended."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.protocol.bodies import decode_route, encode_route
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import rewrite
from tests.consumer.orders import GROUP, TOPIC, Orders
from tests.consuming import RecordingListener, until

CLUSTER = {"brokers": 2}
COUNT = 100


def without(**parts: tuple[()]):
    """A fault: routes lack these parts."""

    def change(answer):
        if answer.body:
            answer.body = encode_route(replace(decode_route("any", answer.body), **parts))
        return answer

    return rewrite(change)


@pytest.mark.parametrize("then", ["it is there again", "the consumer closes"])
@pytest.mark.parametrize("trouble", ["one broker is missing", "no broker is named", "no queue is left"])
def test_a_route_without_brokers_for_a_moment_repeats_nothing(embedded, trouble, then):
    """The brokers are up, but the name server has lost them. The consumer stores its last offsets there anyway."""
    name_server, route = embedded.name_server_node, RequestCode.GET_ROUTEINFO_BY_TOPIC
    orders, seen = Orders(embedded, 2), RecordingListener()
    orders.fill(COUNT)

    def start() -> PushConsumer:
        return orders.consumer(seen, consume_from="first", route_refresh_interval_s=0.2).start()

    consumer = start()
    try:
        seen.wait_for(COUNT)
        if trouble == "one broker is missing":
            embedded.unregister(embedded.broker("broker-b"))
            until(lambda: [each for each in orders.events.of("queue-revoked") if each.queue.topic == TOPIC], "given up")
        else:
            parts = {"brokers": ()} if trouble == "no broker is named" else {"brokers": (), "queues": ()}
            name_server.on(route, without(**parts), times=None)
            name_server.wait_for(route, len(name_server.requests(route)) + 6)
        if then == "the consumer closes":
            consumer.close()
        name_server.clear_faults()
        name_server.register()
        if then == "the consumer closes":
            consumer = start()
        orders.fill(COUNT, COUNT)
        seen.wait_for(2 * COUNT)
    finally:
        consumer.close()
    assert set(seen.counts.values()) == {1}
    assert not orders.events.of("commit-failed")
    for name in ("broker-a", "broker-b"):
        assert sum(embedded.committed(GROUP, TOPIC, name).values()) == COUNT


@pytest.mark.parametrize("then", ["moves", "closes"])
def test_messages_finished_during_a_long_call_are_not_repeated(embedded, then):
    orders, go_on = Orders(embedded, 2, brokers=["broker-a"]), threading.Event()
    first, second = (
        RecordingListener(lambda message: None if message.body == b"m" else go_on.wait(60) and None),
        RecordingListener(),
    )
    try:
        with orders.consuming(first, instance_name="first", shutdown_timeout_s=2, commit_interval_s=5) as (consumer, _):
            for queue_id in (0, 1):
                orders.send(b"m", count=1000, queue_id=queue_id)
                orders.send(b"long", queue_id=queue_id)
            first.wait(lambda seen: len(seen.messages) == 2002)
            if then == "closes":
                consumer.close()
            with orders.consuming(second, instance_name="second"):
                second.wait(lambda seen: b"long" in seen.bodies)
    finally:
        go_on.set()
    assert second.bodies.count(b"m") == 0
