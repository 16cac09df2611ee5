"""Heartbeats, member lists, routes and name servers that fail: consuming continues if possible, and recovers."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from pyrocket_consumer import ConsumerState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, answer, close_connection, drop, garbage
from tests.consumer.orders import GROUP, TOPIC, Orders, request_matcher
from tests.consuming import Events, RecordingListener, consuming, numbered, until
from tests.hazards.other_members import members_of
from tests.resets import held

BEAT, MEMBERS, PULL = RequestCode.HEART_BEAT, RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.PULL_MESSAGE
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
CLUSTER = {"brokers": 2, "slaves": 1, "auto_create_topics": False}
ONE_BROKER = {"brokers": ["broker-a"]}

OFTEN = ("rebalance_interval_s", "heartbeat_interval_s", "route_refresh_interval_s")
QUICK = {**dict.fromkeys(OFTEN, 0.1), "commit_interval_s": 0.05, "pull_hold_s": 0.5}
IMPATIENT = {**QUICK, "call_timeout_s": 0.3}


@pytest.fixture
def orders(embedded):
    """The topic, with two queues at broker-a."""
    return Orders(embedded, 2, **ONE_BROKER)


# --- heartbeats


@pytest.mark.parametrize("trouble", [drop, close_connection], ids=["lost", "closed"])
def test_heartbeats_that_fail_for_a_while_cost_only_time(orders, broker, trouble):
    with orders.consuming(**IMPATIENT) as (consumer, seen):
        orders.fill(10)
        seen.wait_for(10)
        broker.forget_requests()
        broker.on(BEAT, trouble, times=6)
        broker.wait_for(BEAT, 4)
        orders.fill(10, 10)
        seen.wait_for(20)
        broker.wait_for(BEAT, 8)
        until(lambda: orders.cluster.members(GROUP), "it is registered again")
        until(lambda: sum(orders.committed.values()) == 20, "everything is committed")
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(20))


def test_a_consumer_starts_although_no_heartbeat_is_answered(orders, broker):
    orders.fill(1)
    broker.on(BEAT, drop, times=4)
    with orders.consuming(**IMPATIENT) as (consumer, seen):
        assert consumer.state is ConsumerState.RUNNING
        seen.wait_for(1)


# --- the list of members


@pytest.mark.parametrize("trouble", [answer(1, "boom"), answer(2, "busy"), drop, close_connection])
def test_an_assignment_is_kept_while_members_are_unknown(orders, broker, trouble):
    with orders.consuming(**IMPATIENT) as (consumer, seen):
        until(lambda: len(held(consumer, TOPIC)) == 2, "both queues")
        ours = sorted(held(consumer, TOPIC))
        broker.forget_requests()
        broker.on(MEMBERS, trouble, times=None)
        broker.wait_for(MEMBERS, 4)
        orders.fill(10)
        seen.wait_for(10)
        assert sorted(held(consumer, TOPIC)) == ours
        assert orders.events.of("queue-revoked") == []
    assert Counter(seen.bodies) == Counter(numbered(10))


def test_a_member_not_listed_gives_queues_up_and_gets_them_back(orders, broker):
    with orders.consuming(**{**QUICK, "rebalance_interval_s": 60}) as (consumer, seen):
        orders.fill(10)
        seen.wait_for(10)
        ours = set(held(consumer, TOPIC))
        broker.on(MEMBERS, members_of("10.0.0.1@1#1", "10.0.0.2@2#2"), times=None)
        broker.close_connections()  # so that the member fetches the members of its group again
        until(lambda: ours <= {event.queue for event in orders.events.of("queue-revoked")}, "both queues are given up")
        broker.clear_faults()
        assert sum(orders.committed.values()) == 10, "their offsets were stored first"
        until(lambda: len(held(consumer, TOPIC)) == 2, "they are assigned again before the next regular round")
        orders.fill(10, 10)
        seen.wait_for(20)
    assert Counter(seen.bodies) == Counter(numbered(20))


# --- routes and name servers


def test_consuming_continues_while_the_name_server_is_down(orders, broker):
    with orders.consuming(**QUICK) as (consumer, seen):
        orders.fill(1)
        seen.wait_for(1)
        orders.cluster.stop_name_server()
        try:
            orders.fill(10, 1)
            seen.wait_for(11)
            broker.close_connections()
            orders.fill(10, 11)
            seen.wait_for(21)
            assert consumer.state is ConsumerState.RUNNING
        finally:
            orders.cluster.start_name_server()
        consumer.subscribe(late := orders.make(1, "late"), second := RecordingListener())
        orders.send(b"m0", topic=late)
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


def test_bad_routes_change_nothing_for_long(orders):
    orders.make(2)
    node = orders.cluster.name_server_node
    with orders.consuming(**QUICK) as (consumer, seen):
        for what, trouble in BAD_ROUTES.items():
            node.forget_requests()
            node.on(ROUTE, trouble, when=request_matcher())
            node.wait_for(ROUTE, when=request_matcher())
            assert consumer.state is ConsumerState.RUNNING, what
        node.forget_requests()
        node.wait_for(ROUTE, 2, when=request_matcher())
        orders.fill(20)
        seen.wait_for(20)
        until(lambda: len(held(consumer, TOPIC)) == 4, "the queues of both brokers")
    assert Counter(seen.bodies) == Counter(numbered(20))


def test_a_route_that_is_unknown_at_the_start_is_fetched_later(orders):
    orders.cluster.name_server_node.on(ROUTE, answer(1, "busy"), times=2, when=request_matcher())
    orders.fill(1)
    with orders.consuming(**QUICK) as (_, seen):
        assert "the route of orders is not known yet" in orders.events.wait_for("broker-unreachable").text
        seen.wait_for(1)


def test_no_route_is_requested_for_an_unsubscribed_topic(orders):
    """Not even if the consumer unsubscribes during the refresh of the routes."""
    node, gate = orders.cluster.name_server_node, Gate()
    orders.make(2, "other", **ONE_BROKER)
    with orders.consuming(**QUICK) as (consumer, seen):
        consumer.subscribe("other", seen)
        node.on(ROUTE, gate, when=request_matcher())
        gate.wait_held()
        consumer.unsubscribe("other")
        node.forget_requests()
        gate.open()
        node.wait_for(ROUTE, 3, when=request_matcher())
        assert not [each for each in node.requests(ROUTE) if request_matcher("other")(each.command)]
        orders.fill(10)
        seen.wait_for(10)


def test_a_broker_leaves_the_route_and_comes_back(orders, embedded, broker):
    """Its address is forgotten while heartbeats and pulls try to connect to it, and they must survive that."""
    other, slave, node = embedded.broker("broker-b"), embedded.broker("broker-b-1"), embedded.name_server_node
    orders.make(2)
    with orders.consuming(**QUICK) as (consumer, seen):
        until(lambda: len(held(consumer, TOPIC)) == 4, "the queues of both brokers")
        node.on(ROUTE, answer(1, "not yet"), times=None)
        other.kill()
        slave.kill()
        # the pauses between attempts to connect grow, so one attempt is waiting when the address is dropped
        broker.forget_requests()
        broker.wait_for(BEAT, 3)
        node.clear_faults()
        until(lambda: len(held(consumer, TOPIC)) == 2, "the queues of the broker that is gone are given up")
        broker.forget_requests()
        broker.wait_for(BEAT, 3)  # they continue
        orders.fill(10, broker_name="broker-a")
        seen.wait_for(10)
        other.start()
        slave.start()
        until(lambda: len(held(consumer, TOPIC)) == 4, "and assigned again when it returns")
        orders.fill(10, 10, broker_name="broker-b")
        seen.wait_for(20)
        assert consumer.state is ConsumerState.RUNNING
    assert Counter(seen.bodies) == Counter(numbered(20))


# --- slaves


@pytest.fixture
def slave(embedded):
    return embedded.broker("broker-a-1")


def test_a_slave_serves_pulls_while_it_is_suggested(embedded, broker, slave):
    orders = Orders(embedded, **ONE_BROKER)
    with orders.consuming(**QUICK) as (_, seen):
        broker.suggest_broker(1)
        orders.fill(40)
        slave.wait_for(PULL, when=request_matcher())
        seen.wait_for(40)
        broker.suggest_broker(0)
        broker.forget_requests()
        orders.fill(40, 40)
        seen.wait_for(80)
        broker.wait_for(PULL, when=request_matcher())
        until(lambda: orders.committed == {0: 80}, "committed at the master")
    assert Counter(seen.bodies) == Counter(numbered(80))


def test_a_slave_that_is_behind_is_pulled_now_and_then(embedded, broker, slave):
    orders = Orders(embedded, **ONE_BROKER)
    with orders.consuming(**QUICK) as (_, seen):
        slave.pause_replication()
        try:
            orders.fill(20)
            seen.wait_for(20)
            broker.kill()
            slave.forget_requests()
            slave.wait_for(PULL, 3, when=request_matcher())
            mark = len(slave.requests(PULL))
            until(lambda: len(slave.requests(PULL)) > mark + 5, "it is pulled again now and then")
            pulls = [each.at_s for each in slave.requests(PULL) if request_matcher()(each.command)]
            assert len(pulls) < 30 + 15 * (pulls[-1] - pulls[0]), "a few times a second, not thousands"
            assert orders.events.of("offset-corrected") == []
        finally:
            slave.resume_replication()
            broker.start()
        orders.fill(20, 20)
        seen.wait_for(40)
    assert Counter(seen.bodies) == Counter(numbered(40))


def test_the_route_of_an_unsubscribed_topic_is_not_refreshed(orders):
    """Also not if a request for its route is in flight."""
    others = [orders.make(1, f"others-{number}") for number in range(3)]
    name_server, gate = orders.cluster.name_server_node, Gate()
    with orders.consuming(route_refresh_interval_s=0.1) as (consumer, _):
        for other in others:
            consumer.subscribe(other, RecordingListener())
            if other == others[-1]:
                name_server.on(ROUTE, gate, when=request_matcher(other))
                gate.wait_held(1)
            consumer.unsubscribe(other)
        gate.open()
        time.sleep(1)  # the request in flight gets its response
        name_server.forget_requests()
        name_server.wait_for(ROUTE, 4, when=request_matcher())
        assert {each.command.fields["topic"] for each in name_server.requests(ROUTE)} & set(others) == set()


# --- members with different subscriptions, whose pulls brokers refuse in turn


def test_an_event_names_the_members_that_differ_and_how(orders, embedded, broker):
    one, other = orders.make(8, "one"), orders.make(8, "other")
    events, others = Events(), Events()
    with (
        consuming(embedded, one, GROUP, instance_name="one", on_event=events),
        consuming(embedded, other, GROUP, instance_name="other", on_event=others),
    ):

        def both_have_emitted() -> bool:
            for each in (one, other):  # brokers do not refuse held pulls, so end them with messages
                orders.send(b"x", count=8, topic=each)
            return all(each.of("subscription-differs") for each in (events, others))

        until(both_have_emitted, "both emit the event")
        broker.forget_requests()
        ends = time.monotonic() + 3
        until(lambda: both_have_emitted() and time.monotonic() > ends, "a while")
        assert len(broker.requests(BEAT)) <= 12, "each of the two sends fewer than one per half second"
    for recorded, ours, theirs in ((events, one, other), (others, other, one)):
        (event,) = recorded.of("subscription-differs")
        assert ours in event.facts["ours"]
        assert theirs in event.facts["at_the_broker"]
        (client_id,) = event.facts["others"]
        assert f"{ours} (*)" in event.text
        assert f"{client_id} to" in event.text


def test_a_broker_that_forgot_this_member_gets_a_heartbeat_at_once(orders, broker):
    orders.make(4)
    broker.on(PULL, answer(24, "the consumer's subscription not exist"), times=6, when=request_matcher())
    with orders.consuming(pull_retry_delay_s=1.0, rebalance_interval_s=20.0) as (_, seen):  # as by default
        orders.fill(20)
        seen.wait_for(20, timeout_s=10)
    assert not orders.events.of("subscription-differs")
