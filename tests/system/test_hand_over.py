"""What a queue's next owner begins with is what the last one has finished, however the queue is given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.testing import rewrite
from pyrocket_consumer.wire.bodies import decode_route, encode_route
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Events, Seen, until

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
def test_a_route_that_lacks_brokers_for_a_moment_has_nothing_repeated(embedded, topic, group, trouble, then):
    """They are up, only the name server has lost sight of them: the last offsets are stored there all the same."""
    embedded.create_topic(topic, queues=2)
    embedded.send(topic, lambda number: b"m%d" % number, count=COUNT)
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
