"""Messages of Java producers at our consumer: they arrive unchanged, and selectors select the same messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pyrocket_consumer import BrokerError, Message, MessageQueue, Producer, sql
from tests.consuming import consuming, until

TEXT = "ключ 値 ☃ 😀 é&=%+"
LARGE = bytes(range(256)) * 40

COMPRESSED = 0x1
COMPRESSION = {"zlib": 0x300, "lz4": 0x100, "zstd": 0x200}
"""sysFlag: that a body is compressed, and how."""


def number_of(message: Message) -> int:
    """Return the queue and offset of a message, to sort by. Several threads get messages in any order."""
    return message.queue_offset


@pytest.fixture
def one_queue(real_cluster, topic):
    real_cluster.create_topic(topic, queues=1)
    return MessageQueue(topic, "broker-a", 0)


def test_the_properties_of_a_java_message(real_cluster, java, topic, group, one_queue):
    properties = {"region": "eu", "ключ": TEXT}
    with consuming(real_cluster, topic, group) as (_, seen), java.producer(real_cluster.name_server) as producer:
        (sent,) = producer.send(topic, LARGE[:3000], tags="paid", keys=["k1", "ключ"], properties=properties)
        producer.send(topic, TEXT.encode())
        seen.wait_for(2)
    full, plain = sorted(seen.messages, key=number_of)
    assert (full.topic, full.queue, full.queue_offset) == (topic, one_queue, 0)
    assert (full.body, full.tags, full.keys) == (LARGE[:3000], "paid", ("k1", "ключ"))
    assert properties.items() <= full.properties.items()
    assert (full.message_id, full.offset_message_id) == (sent["messageId"], sent["offsetMessageId"])
    assert abs(full.born_at - datetime.now(UTC)) < timedelta(minutes=2)
    assert (plain.body, plain.tags, plain.keys) == (TEXT.encode(), None, ())


@pytest.mark.parametrize("compression", COMPRESSION)
def test_compressed_java_messages(real_cluster, java, topic, group, one_queue, compression):
    options = {"compression": compression.upper(), "compressAbove": 1000}
    with (
        consuming(real_cluster, topic, group) as (_, seen),
        java.producer(real_cluster.name_server, **options) as producer,
    ):
        producer.send(topic, LARGE)
        seen.wait_for(1)
    assert seen.bodies == [LARGE]
    (stored,) = real_cluster.messages(topic)
    assert stored.sys_flag == COMPRESSED | COMPRESSION[compression]
    assert stored.store_size < len(LARGE)


def test_a_java_batch(real_cluster, java, topic, group, one_queue):
    with consuming(real_cluster, topic, group) as (_, seen), java.producer(real_cluster.name_server) as producer:
        (sent,) = producer.send(topic, b"one of a batch", count=5, batch=True, tags="paid", properties={"a": TEXT})
        seen.wait(lambda seen: len(seen.messages) == 5)
    messages = sorted(seen.messages, key=number_of)
    assert [message.queue_offset for message in messages] == list(range(5))
    assert {(message.body, message.tags, message.property("a")) for message in messages} == {
        (b"one of a batch", "paid", TEXT)
    }
    assert len({message.offset_message_id for message in messages}) == 5
    assert [message.offset_message_id for message in messages] == sent["offsetMessageId"].split(",")


@pytest.mark.differs("inner batches")
@pytest.mark.versions("5.1.4", "5.3.3", "5.5.0")
def test_a_java_batch_that_the_broker_stores_as_one_record(real_cluster, java, topic, group):
    """In a topic of batches one record holds them all, and our consumer splits it."""
    real_cluster.create_topic(topic, queues=1, attributes="+queue.type=BatchCQ")
    with consuming(real_cluster, topic, group) as (_, seen), java.producer(real_cluster.name_server) as producer:
        for number in range(3):
            producer.send(topic, b"batch %d" % number, count=5, batch=True, tags="paid", properties={"a": TEXT})
        seen.wait(lambda seen: len(seen.messages) == 15)
        until(lambda: real_cluster.committed(group, topic) == {0: 15}, "committed")
    assert sorted(message.queue_offset for message in seen.messages) == list(range(15))
    assert {(message.body, message.tags, message.property("a")) for message in seen.messages} == {
        (b"batch %d" % number, "paid", TEXT) for number in range(3)
    }


def test_delayed_messages(real_cluster, java, topic, group, names, one_queue):
    """Messages with a delay level, or with a delivery time if the release has that, look the same at both consumers."""
    name_server = real_cluster.name_server
    with (
        consuming(real_cluster, topic, group) as (_, seen),
        java.consumer(name_server, names.group("java"), topic) as java_member,
        java.producer(name_server) as java_producer,
        Producer(name_server=name_server) as producer,
    ):
        java_producer.send(topic, b"java", delay_level=1, tags="paid")
        producer.send(topic, b"ours", delay_level=1, tags="paid")
        expected = {b"java", b"ours"}
        if not real_cluster.version.startswith("4."):
            later_ms = int((datetime.now(UTC) + timedelta(seconds=2)).timestamp() * 1000)
            java_producer.send(topic, b"java, at a time", deliver_at_ms=later_ms, tags="paid")
            producer.send(topic, b"ours, at a time", deliver_at=datetime.now(UTC) + timedelta(seconds=2), tags="paid")
            expected |= {b"java, at a time", b"ours, at a time"}
        seen.wait_for(len(expected))
        java_messages = java_member.wait_for_messages(len(expected))
    assert set(seen.bodies) == {message.body for message in java_messages} == expected
    assert {(message.queue, message.tags) for message in [*seen.messages, *java_messages]} == {(one_queue, "paid")}
    assert min(message.stored_at - message.born_at for message in seen.messages) > timedelta(seconds=0.4)


@pytest.mark.differs("sql92")
def test_selectors_of_java_and_ours_select_the_same_messages(real_cluster, java, topic, names):
    """This covers tags with equal hash codes ("Aa" and "BB"), and an SQL92 expression."""
    real_cluster.create_topic(topic, queues=2)
    tags = ["Aa", "BB", "C", None] * 3
    for number, tag in enumerate(tags):
        properties = {"n": str(number), "region": "eu" if number % 2 else "us"}
        real_cluster.send(topic, b"m%d" % number, tags=tag, properties=properties)
    wanted = {b"m%d" % number for number, tag in enumerate(tags) if tag in ("Aa", "C")}
    above, expression = {b"m7", b"m9", b"m11"}, "n > 6 AND region = 'eu'"
    name_server, our_group, java_group = real_cluster.name_server, names.group("ours"), names.group("java")
    with (
        consuming(real_cluster, topic, our_group, selector="Aa || C") as (_, ours),
        consuming(real_cluster, topic, names.group("ours-sql"), selector=sql(expression)) as (_, ours_sql),
        java.consumer(name_server, java_group, topic, selector="Aa || C") as javas,
        java.consumer(name_server, names.group("java-sql"), topic, sql=expression) as javas_sql,
    ):
        ours.wait_for(len(wanted))
        ours_sql.wait_for(len(above))
        javas.wait_for_messages(len(wanted))
        javas_sql.wait_for_messages(len(above))
        until(
            lambda: sum(real_cluster.committed(our_group, topic).values()) == len(tags),
            "the other messages are skipped",
        )
    assert set(ours.bodies) == {message.body for message in javas.messages} == wanted
    assert set(ours_sql.bodies) == {message.body for message in javas_sql.messages} == above


def test_a_bad_sql92_expression_is_refused(real_cluster, topic, group):
    real_cluster.create_topic(topic, queues=1)
    with pytest.raises(BrokerError), consuming(real_cluster, topic, group, selector=sql("price >")):
        pass
