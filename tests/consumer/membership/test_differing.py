"""Members of one group that subscribe to different things: brokers refuse their pulls in turn, and they say why."""

from __future__ import annotations

import time

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.testing import answer
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Events, Seen, until
from tests.resetting import fill


def member(cluster, topic, group, name, events) -> PushConsumer:
    consumer = PushConsumer(
        group, name_server=cluster.name_server, consume_from="first", instance_name=name, on_event=events
    )
    consumer.subscribe(topic, Seen())
    return consumer


def test_they_tell_once_who_differs_in_what(embedded, broker, topic, group):
    one, other = f"{topic}-one", f"{topic}-other"
    for each in (one, other):
        embedded.create_topic(each, queues=8)
    events, others = Events(), Events()
    with member(embedded, one, group, "one", events), member(embedded, other, group, "other", others):

        def both_have_told() -> bool:
            for each in (one, other):  # pulls that a broker holds are not refused: let them be answered
                embedded.send(each, b"x", count=8)
            return all(each.of("subscription-differs") for each in (events, others))

        until(both_have_told, "both tell")
        broker.forget_requests()
        ends = time.monotonic() + 3
        until(lambda: both_have_told() and time.monotonic() > ends, "a while")
        assert len(broker.requests(RequestCode.HEART_BEAT)) <= 12, "each of the two less than every half second"
    for told, ours, theirs in ((events, one, other), (others, other, one)):
        (event,) = told.of("subscription-differs")
        assert ours in event.facts["ours"]
        assert theirs in event.facts["at_the_broker"]
        (client_id,) = event.facts["others"]
        assert f"{ours} (*)" in event.text
        assert f"{client_id} to" in event.text


def test_a_broker_that_forgot_us_for_a_moment_is_told_at_once(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=4)
    events, seen = Events(), Seen()
    consumer = PushConsumer(group, name_server=embedded.name_server, consume_from="first", on_event=events)
    consumer.subscribe(topic, seen)
    refused = answer(24, "the consumer's subscription not exist")
    broker.on(RequestCode.PULL_MESSAGE, refused, times=6, when=lambda command: command.fields["topic"] == topic)
    with consumer:
        fill(embedded, topic, 20)
        seen.wait_for(20, timeout_s=10)
    assert not events.of("subscription-differs")
