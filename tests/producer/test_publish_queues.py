"""Selection of the next queue, and avoided brokers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pyrocket_consumer.model import BrokerData, MessageQueue, QueueData, TopicRoute
from pyrocket_consumer.producer.attempts import FailedBrokers, PublishQueues
from tests.for_each import for_each


def queues_of(*brokers, count=2, perm=6):
    return PublishQueues(
        TopicRoute(
            "orders",
            tuple(QueueData(name, count, count, perm) for name in brokers),
            tuple(BrokerData("c", name, {0: f"{name}:1"}) for name in brokers),
        ),
        random.Random(1),
    )


def test_queues_are_selected_round_robin():
    queues = queues_of("a", "b")
    taken = [queues.next_queue() for _ in range(8)]
    assert Counter(taken) == dict.fromkeys(queues.queues, 2)
    assert taken[:4] == taken[4:]


def test_producers_that_start_together_begin_at_different_queues():
    route = queues_of("a", "b", count=50).route
    assert len({PublishQueues(route, random.Random(seed)).next_queue() for seed in range(20)}) > 5


def test_queues_of_avoided_brokers_are_skipped():
    queues = queues_of("a", "b")
    assert {queues.next_queue({"a"}).broker_name for _ in range(6)} == {"b"}
    assert queues.next_queue({"a", "b"}) is None


@pytest.mark.parametrize("broken", ["perm", "no queues"])
def test_a_topic_that_cannot_be_written_has_no_queue(broken):
    queues = queues_of("a", perm=4) if broken == "perm" else queues_of()
    assert queues.next_queue() is None
    assert queues.queue_for_key("key") is None
    assert MessageQueue("orders", "a", 0) not in queues


def test_the_name_server_may_fix_the_queues_of_an_ordered_topic():
    route = TopicRoute("orders", queues_of("b").route.queues, order_conf="b:1;a:2;")
    taken = [MessageQueue("orders", "b", 0), MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)]
    assert PublishQueues(route, random.Random(1)).queues == taken


# Results of String.hashCode in Java. The last is Integer.MIN_VALUE; Java cannot represent its absolute value.
@for_each(
    "key, java_hash",
    [("hello", 99162322), ("o-1", 108115), ("键", 38190), ("TagA", 2598919), ("polygenelubricants", -2147483648)],
)
@for_each("count", [1, 3, 4, 7])
def test_a_sharding_key_goes_to_the_queue_that_java_chooses(key, java_hash, count):
    queues = queues_of("a", count=count)
    remainder = java_hash - int(java_hash / count) * count  # Java's %: it has the sign of the hash
    assert queues.queue_for_key(key) == MessageQueue("orders", "a", abs(remainder))


def test_a_broker_that_fails_again_is_avoided_for_longer():
    failed = FailedBrokers()
    failed.add_failure("a", now=100.0)
    assert failed.avoided(100.9) == {"a"}
    assert failed.avoided(101.1) == set()
    failed.add_failure("a", now=102.0)
    assert failed.avoided(103.9) == {"a"}
    for _ in range(20):
        failed.add_failure("a", now=103.0)  # it is avoided already: no other broker was available
    assert failed.avoided(104.1) == set()
    for again in range(2000):
        failed.add_failure("a", now=200.0 + 100 * again)
    assert failed.avoided(200_129.8) == {"a"}
    assert failed.avoided(200_130.1) == set()


def test_a_response_ends_the_avoidance_of_a_broker():
    failed = FailedBrokers()
    for name in ("a", "b"):
        failed.add_failure(name, now=100.0)
    failed.forget("a")
    assert failed.avoided(100.0) == {"b"}
