"""A message made for a unit test equals a received one."""

from __future__ import annotations

import pickle
import struct
from datetime import UTC, datetime, timedelta

import pytest

from pyrocket_consumer import ConfigError, Message, MessageQueue, Producer
from pyrocket_consumer.testing import EmbeddedCluster, message
from tests.for_each import for_each

ATTRIBUTES = sorted(name for name, value in vars(Message).items() if isinstance(value, property))


def test_a_message_has_the_given_values():
    born, stored = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
    made = message(
        topic="orders",
        body=b"an order",
        tags="paid",
        keys=["o-1", "o-2"],
        properties={"region": "eu"},
        queue_offset=7,
        queue=MessageQueue("orders", "broker-b", 3),
        reconsume_times=2,
        born_at=born,
        stored_at=stored,
        message_id="some-id",
        flag=5,
        born_host="10.0.0.1:2",
        store_host="[2001:db8::1]:10911",
    )
    assert isinstance(made, Message)
    assert (made.topic, made.body, made.tags, made.keys) == ("orders", b"an order", "paid", ("o-1", "o-2"))
    assert (made.queue, made.queue_offset) == (MessageQueue("orders", "broker-b", 3), 7)
    assert (made.born_at, made.stored_at) == (born, stored)
    assert (made.born_at_ms, made.stored_at_ms) == (1767323045000, 1767323046000)
    assert (made.reconsume_times, made.flag, made.message_id) == (2, 5, "some-id")
    assert (made.born_host, made.store_host) == ("10.0.0.1:2", "[2001:db8::1]:10911")
    assert made.property("region") == "eu"
    assert made.properties["region"] == "eu"


def test_a_message_without_arguments_is_complete():
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    made = message()
    assert {name: getattr(made, name) for name in ATTRIBUTES}.keys() == set(ATTRIBUTES)
    assert before <= made.born_at == made.stored_at <= datetime.now(UTC)
    assert (made.tags, made.keys, made.queue_offset, made.reconsume_times) == (None, (), 0, 0)
    assert made.queue == MessageQueue(made.topic, "broker-a", 0)
    assert made.message_id != message().message_id


def test_it_can_be_detached_pickled_and_shown():
    made = message("orders", b"an order", tags="paid", queue_offset=7)
    for copy in (made.detach(), pickle.loads(pickle.dumps(made))):
        assert [getattr(copy, name) for name in ATTRIBUTES] == [getattr(made, name) for name in ATTRIBUTES]
        assert copy.queue_offset == 7
    assert "orders" in repr(made)
    assert "offset=7" in repr(made)


def test_a_retried_message_has_its_own_topic_and_the_retry_queue():
    again = message("orders", queue=MessageQueue("%RETRY%orders-app", "broker-a", 0), reconsume_times=1)
    assert again.topic == "orders"
    assert again.queue.topic == "%RETRY%orders-app"
    assert again.reconsume_times == 1


def test_a_message_equals_one_that_was_sent():
    with EmbeddedCluster() as cluster, Producer(name_server=cluster.name_server) as producer:
        cluster.create_topic("orders")
        sent = producer.send("orders", b"an order", tags="paid", keys=["o-1"], properties={"region": "eu"}, flag=3)
        (stored,) = cluster.messages("orders")
    made = message(
        "orders",
        b"an order",
        tags="paid",
        keys="o-1",
        properties={"region": "eu"},
        flag=3,
        queue=sent.queue,
        message_id=sent.message_id,
        born_at=stored.born_at,
        stored_at=stored.stored_at,
        born_host=stored.born_host,
        store_host=stored.store_host,
    )
    given_by_brokers = {"properties", "store_size"}
    for name in set(ATTRIBUTES) - given_by_brokers:
        assert getattr(made, name) == getattr(stored, name), name
    assert made.properties.items() <= stored.properties.items()


@for_each(
    "wrong, expected",
    [
        ({"body": "text"}, "body"),
        ({"body": 5}, "body"),
        ({"topic": ""}, "topic"),
        ({"topic": 5}, "topic"),
        ({"queue_offset": -1}, "queue_offset"),
        ({"queue_offset": 2**63}, "queue_offset"),
        ({"reconsume_times": "1"}, "reconsume_times"),
        ({"flag": 2**31}, "flag"),
        ({"queue": "orders/broker-a/0"}, "queue"),
        ({"topic": "orders", "queue": MessageQueue("invoices", "broker-a", 0)}, "invoices"),
        ({"born_at": datetime(2026, 1, 1)}, "born_at.*time zone"),
        ({"stored_at": 1767323045}, "stored_at"),
        ({"born_host": "here"}, "here"),
        ({"born_host": 5}, "born_host"),
        ({"store_host": None}, "store_host"),
        ({"properties": {"price": 5}}, "price"),
        ({"properties": {"a\x01b": "c"}}, "property"),
        ({"properties": 5}, "properties"),
        ({"keys": [1]}, "keys"),
        ({"keys": 5}, "keys"),
        ({"tags": 5}, "tags"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_remedy(wrong, expected):
    with pytest.raises(ConfigError, match=expected):
        message(**wrong)


def test_every_bytes_like_body_is_accepted():
    assert message(body=bytearray(b"x")).body == message(body=memoryview(b"x")).body == b"x"
    assert message(body=struct.pack(">I", 5)).body == b"\0\0\0\5"
    assert message(body=b"").body == b""
