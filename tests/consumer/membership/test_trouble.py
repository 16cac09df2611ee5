"""Heartbeats, member lists, routes and name servers that fail: consuming goes on as far as it can, and recovers."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from pyrocket_consumer import ConsumerState, MessageQueue
from pyrocket_consumer.testing import Gate, answer, close_connection, drop, garbage
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Events, Seen, consuming, numbered, until
from tests.hazards.members import of
from tests.resetting import fill, held

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
CLUSTER = {"brokers": 2, "slaves": 1, "auto_create_topics": False}

QUICK = {
    "rebalance_interval_s": 0.1,
    "heartbeat_interval_s": 0.1,
    "route_refresh_interval_s": 0.1,
    "commit_interval_s": 0.05,
    "pull_hold_s": 0.5,
}
IMPATIENT = {**QUICK, "call_timeout_s": 0.3}


def members_of(*client_ids):
    return answer(0, body=json.dumps({"consumerIdList": list(client_ids)}).encode())


# --- heartbeats


@pytest.mark.parametrize("trouble", [drop, close_connection], ids=["lost", "closed"])
def test_heartbeats_that_fail_for_a_while_cost_nothing_but_time(embedded, broker, topic, group, trouble):
    embedded.create_topic(topic, queues=2, brokers=["broker-a"])
    with consuming(embedded, topic, group, **IMPATIENT) as (consumer, seen):
        fill(embedded, topic, 10)
        seen.wait_for(10)
        broker.forget_requests()
        broker.on(RequestCode.HEART_BEAT, trouble, times=6)
        broker.wait_for(RequestCode.HEART_BEAT, 4)
        fill(embedded, topic, 10, start=10)
        seen.wait_for(20)
        broker.wait_for(RequestCode.HEART_BEAT, 8)
        until(lambda: embedded.members(group), "it is known again")
        until(lambda: sum(embedded.committed(group, topic).values()) == 20, "everything is committed")
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(20))


def test_a_consumer_starts_although_no_heartbeat_is_answered(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=1, brokers=["broker-a"])
    embedded.send(topic, b"m0")
    broker.on(RequestCode.HEART_BEAT, drop, times=4)
    with consuming(embedded, topic, group, **IMPATIENT) as (consumer, seen):
        assert consumer.state is ConsumerState.RUNNING
        seen.wait_for(1)


# --- the list of members


@pytest.mark.parametrize("trouble", [answer(1, "boom"), drop], ids=["error", "lost"])
def test_an_assignment_is_kept_while_members_cannot_be_learned(embedded, broker, topic, group, trouble):
    embedded.create_topic(topic, queues=2, brokers=["broker-a"])
    events = Events()
    with consuming(embedded, topic, group, on_event=events, **IMPATIENT) as (consumer, seen):
        until(lambda: len(held(consumer, topic)) == 2, "both queues")
        ours = sorted(held(consumer, topic))
        broker.forget_requests()
        broker.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, trouble, times=None)
        broker.wait_for(RequestCode.GET_CONSUMER_LIST_BY_GROUP, 4)
        fill(embedded, topic, 10)
        seen.wait_for(10)
        assert sorted(held(consumer, topic)) == ours
        assert events.of("queue-revoked") == []
    assert Counter(seen.bodies) == Counter(numbered(10))


def test_a_member_not_listed_gives_queues_up_and_gets_them_back(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=2, brokers=["broker-a"])
    events = Events()
    options = {**QUICK, "rebalance_interval_s": 60}
    with consuming(embedded, topic, group, on_event=events, **options) as (consumer, seen):
        fill(embedded, topic, 10)
        seen.wait_for(10)
        broker.on(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            members_of("10.0.0.1@1#1", "10.0.0.2@2#2"),
            times=None,
            when=lambda command: command.fields["consumerGroup"] == group,
        )
        broker.close_connections()  # which makes the member look at its group again
        ours = {MessageQueue(topic, "broker-a", number) for number in (0, 1)}  # beside the retry topic's
        until(lambda: ours <= {event.queue for event in events.of("queue-revoked")}, "both queues are given up")
        broker.clear_faults()
        assert sum(embedded.committed(group, topic).values()) == 10, "their offsets were stored first"
        until(lambda: len(held(consumer, topic)) == 2, "they are taken back without waiting for the next round")
        fill(embedded, topic, 10, start=10)
        seen.wait_for(20)
    assert Counter(seen.bodies) == Counter(numbered(20))


# --- routes and name servers


def test_consuming_goes_on_while_the_name_server_is_away(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    with consuming(embedded, topic, group, **QUICK) as (consumer, seen):
        embedded.send(topic, b"m0", broker_name="broker-a")
        seen.wait_for(1)
        embedded.stop_name_server()
        try:
            fill(embedded, topic, 10, start=1)
            seen.wait_for(11)
            embedded.broker("broker-a").close_connections()
            fill(embedded, topic, 10, start=11)
            seen.wait_for(21)
            assert consumer.state is ConsumerState.RUNNING
        finally:
            embedded.start_name_server()
        late = f"{topic}-late"
        embedded.create_topic(late, queues=1)
        consumer.subscribe(late, second := Seen())
        embedded.send(late, b"m0")
        second.wait_for(1)
    assert Counter(seen.bodies) == Counter(numbered(21))


BAD_ROUTES = {
    "no JSON": answer(0, body=b"<html>"),
    "cut short": answer(0, body=b'{"brokerDatas":[{"brokerAddrs":{0:"127.0.0.1:1"'),
    "a list": answer(0, body=b"[1,2]"),
    "nothing": answer(0, body=b""),
    "wrong types": answer(0, body=b'{"brokerDatas":5,"queueDatas":"x"}'),
    "refused": answer(1, "starting"),
    "no such topic": answer(17, "not found"),
    "no frame": garbage(b"\xff" * 16),
    "closed": close_connection,
    "no broker": answer(0, body=b'{"brokerDatas":[],"queueDatas":[],"filterServerTable":{}}'),
}


def test_bad_routes_change_nothing_for_long(embedded, topic, group):
    embedded.create_topic(topic, queues=2)

    is_ours = of(topic)
    with consuming(embedded, topic, group, **QUICK) as (consumer, seen):
        node = embedded.name_server_node
        for what, trouble in BAD_ROUTES.items():
            node.forget_requests()
            node.on(ROUTE, trouble, when=is_ours)
            node.wait_for(ROUTE, when=is_ours)
            assert consumer.state is ConsumerState.RUNNING, what
        node.forget_requests()
        node.wait_for(ROUTE, 2, when=is_ours)
        fill(embedded, topic, 20)
        seen.wait_for(20)
        until(lambda: len(held(consumer, topic)) == 4, "the queues of both brokers")
    assert Counter(seen.bodies) == Counter(numbered(20))


def test_a_broker_leaves_the_route_and_comes_back(embedded, broker, topic, group):
    """Its address is forgotten while heartbeats and pulls are trying to reach it: they must survive that."""
    other = embedded.broker("broker-b")
    embedded.create_topic(topic, queues=2)
    with consuming(embedded, topic, group, **QUICK) as (consumer, seen):
        until(lambda: len(held(consumer, topic)) == 4, "the queues of both brokers")
        node = embedded.name_server_node
        node.on(ROUTE, answer(1, "not yet"), times=None)
        other.kill()
        embedded.broker("broker-b-1").kill()
        # attempts to connect grow rarer, so that one of them is waiting when the address is dropped
        broker.forget_requests()
        broker.wait_for(RequestCode.HEART_BEAT, 3)
        node.clear_faults()
        until(lambda: len(held(consumer, topic)) == 2, "the queues of the broker that is gone are given up")
        broker.forget_requests()
        broker.wait_for(RequestCode.HEART_BEAT, 3)  # they go on
        fill(embedded, topic, 10, broker_name="broker-a")
        seen.wait_for(10)
        other.start()
        embedded.broker("broker-b-1").start()
        until(lambda: len(held(consumer, topic)) == 4, "and taken back when it returns")
        fill(embedded, topic, 10, start=10, broker_name="broker-b")
        seen.wait_for(20)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(20))


# --- slaves


def test_a_slave_is_read_while_it_is_suggested(embedded, broker, topic, group):
    slave = embedded.broker("broker-a-1")
    embedded.create_topic(topic, queues=1, brokers=["broker-a"])
    with consuming(embedded, topic, group, **QUICK) as (_, seen):
        broker.suggest_broker(1)
        fill(embedded, topic, 40)
        slave.wait_for(RequestCode.PULL_MESSAGE, when=of(topic))
        seen.wait_for(40)
        broker.suggest_broker(0)
        broker.forget_requests()
        fill(embedded, topic, 40, start=40)
        seen.wait_for(80)
        broker.wait_for(RequestCode.PULL_MESSAGE, when=of(topic))
        until(lambda: embedded.committed(group, topic) == {0: 80}, "committed at the master")
    assert Counter(seen.bodies) == Counter(numbered(80))


def test_a_slave_that_is_behind_is_asked_now_and_then(embedded, broker, topic, group):
    slave = embedded.broker("broker-a-1")
    embedded.create_topic(topic, queues=1, brokers=["broker-a"])
    events = Events()
    with consuming(embedded, topic, group, on_event=events, **QUICK) as (_, seen):
        slave.pause_replication()
        try:
            fill(embedded, topic, 20)
            seen.wait_for(20)
            broker.kill()
            slave.forget_requests()
            slave.wait_for(RequestCode.PULL_MESSAGE, 3, when=of(topic))
            mark = len(slave.requests(RequestCode.PULL_MESSAGE))
            until(lambda: len(slave.requests(RequestCode.PULL_MESSAGE)) > mark + 5, "it is asked again now and then")
            pulls = [each.at_s for each in slave.requests(RequestCode.PULL_MESSAGE) if of(topic)(each.command)]
            assert len(pulls) < 30 + 15 * (pulls[-1] - pulls[0]), "a few times a second, not thousands"
            assert events.of("offset-corrected") == []
        finally:
            slave.resume_replication()
            broker.start()
        fill(embedded, topic, 20, start=20)
        seen.wait_for(40)
    assert Counter(seen.bodies) == Counter(numbered(40))


def test_a_topic_that_is_unsubscribed_is_asked_about_no_more(embedded, topic, group):
    """Nor when its route is just being asked for."""
    embedded.create_topic(topic, queues=1)
    others = [f"{topic}-{number}" for number in range(3)]
    name_server, gate = embedded.name_server_node, Gate()
    with consuming(embedded, topic, group, route_refresh_interval_s=0.1) as (consumer, _):
        for other in others:
            embedded.create_topic(other, queues=1)
            consumer.subscribe(other, Seen())
            if other == others[-1]:
                name_server.on(ROUTE, gate, when=of(others[-1]))
                gate.wait_held(1)
            consumer.unsubscribe(other)
        gate.open()
        time.sleep(1)  # what was being asked is answered
        name_server.forget_requests()
        name_server.wait_for(ROUTE, 4, when=of(topic))
        assert {each.command.fields["topic"] for each in name_server.requests(ROUTE)} & set(others) == set()


# --- members that subscribe to different things: brokers refuse their pulls in turn


def test_they_tell_once_who_differs_in_what(embedded, broker, topic, group):
    one, other = f"{topic}-one", f"{topic}-other"
    for each in (one, other):
        embedded.create_topic(each, queues=8)
    events, others = Events(), Events()
    with (
        consuming(embedded, one, group, instance_name="one", on_event=events),
        consuming(embedded, other, group, instance_name="other", on_event=others),
    ):

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
    events = Events()
    refused = answer(24, "the consumer's subscription not exist")
    broker.on(RequestCode.PULL_MESSAGE, refused, times=6, when=of(topic))
    options = {"on_event": events, "pull_retry_delay_s": 1.0, "rebalance_interval_s": 20.0}  # as by default
    with consuming(embedded, topic, group, **options) as (_, seen):
        fill(embedded, topic, 20)
        seen.wait_for(20, timeout_s=10)
    assert not events.of("subscription-differs")
