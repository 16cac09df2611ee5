"""The strategies allocate as the Java client does. The expected values are worked examples of the Java classes."""

from __future__ import annotations

import pickle

import pytest

from pyrocket_consumer import ConsumerConfig, PushConsumer, in_machine_rooms
from pyrocket_consumer.consumer.membership.allocation import allocate, average, circle, consistent_hash
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from tests.for_each import for_each


def queues(count: int, broker: str = "broker-a") -> list[MessageQueue]:
    return [MessageQueue("TopicA", broker, number) for number in range(count)]


def shares(strategy, count: int, members: int) -> list[list[int]]:
    ids = [f"c{number}" for number in range(members)]
    return [[queue.queue_id for queue in allocate(strategy, "g", each, queues(count), ids)] for each in ids]


DEALT = [
    (average, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    (average, [[0], [1], []]),
    (average, [[0, 1], [2, 3], [4, 5], [6]]),
    (average, [[], []]),
    (average, [[0, 1, 2, 3]]),
    (circle, [[0, 3, 6], [1, 4, 7], [2, 5]]),
]


@for_each("strategy, expected", DEALT)
def test_average_and_circle(strategy, expected):
    assert shares(strategy, sum(map(len, expected)), len(expected)) == expected


def test_consistent_hash_owners():
    ids = ["10.0.0.1@4711#0", "10.0.0.2@4711#1"]
    wanted = {("broker-a", 0): 1, ("broker-a", 1): 0, ("broker-b", 0): 1}
    for (broker, queue_id), owner in wanted.items():
        queue = MessageQueue("TopicA", broker, queue_id)
        assert allocate(consistent_hash, "g", ids[owner], [queue], ids) == [queue]
        assert allocate(consistent_hash, "g", ids[1 - owner], [queue], ids) == []


@for_each("strategy", [average, circle, consistent_hash])
@for_each("members", [1, 2, 3, 7])
@for_each("count", [0, 1, 5, 16, 33])
def test_every_queue_has_exactly_one_owner(strategy, members, count):
    dealt = sorted(each for share in shares(strategy, count, members) for each in share)
    assert dealt == list(range(count))


def test_machine_rooms_take_only_their_queues():
    everything = queues(4, "room1@broker-a") + queues(3, "room2@broker-a") + queues(2, "broker-plain")
    strategy = in_machine_rooms("room1")
    mine = [allocate(strategy, "g", each, everything, ["a", "b"]) for each in ("a", "b")]
    assert [[queue.queue_id for queue in share] for share in mine] == [[0, 1], [2, 3]]
    assert {queue.broker_name for share in mine for queue in share} == {"room1@broker-a"}


def test_members_are_ordered_as_java_orders_text():
    ids = ["10.0.0.2@1", "10.0.0.10@1"]
    assert allocate(average, "g", "10.0.0.10@1", queues(2), ids) == queues(2)[:1]


def test_a_member_that_is_not_listed_gets_nothing():
    assert allocate(average, "g", "stranger", queues(4), ["a", "b"]) == []


def test_a_user_s_strategy_is_checked():
    greedy = MessageQueue("other", "broker-a", 0)
    with pytest.raises(ConfigError, match="other/broker-a/0"):
        allocate(lambda *given: [greedy], "g", "a", queues(2), ["a"])


@for_each("value", ["machine-room", "nonsense", 5, None, ["average"]])
def test_a_wrong_allocation_is_refused_before_the_start_with_the_allowed_ones(value):
    expected = r"allocation=.* use 'average', 'circle', 'hash', a function, or pyrocket_consumer\.in_machine_rooms\("
    with pytest.raises(ConfigError, match=expected):
        PushConsumer("g", name_server="127.0.0.1:9876", allocation=value)


@for_each("rooms", [(["room1", "room2"],), (5,), ("",), ("room1", None), ("room1@broker-a",)])
def test_machine_rooms_are_names(rooms):
    with pytest.raises(
        ConfigError, match=r"in_machine_rooms: .* is not allowed; .*in_machine_rooms\('room1', 'room2'\)"
    ):
        in_machine_rooms(*rooms)


def test_a_config_with_machine_rooms_is_pickled():
    config = ConsumerConfig(
        group="g", name_server="127.0.0.1:9876", allocation=in_machine_rooms("room2", "room1", "room2")
    )
    there = pickle.loads(pickle.dumps(config))
    assert there == config
    assert repr(there.allocation) == "in_machine_rooms('room1', 'room2')"
    everything = queues(2, "room1@broker-a") + queues(2, "room3@broker-a")
    assert allocate(there.allocation, "g", "a", everything, ["a"]) == everything[:2]
