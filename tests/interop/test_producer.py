"""Java's consumers read the messages of our producer, and both producers put a key into the same queue."""

from __future__ import annotations

import os

import pytest

from pyrocket_consumer.producer import OutgoingMessage, Producer


@pytest.fixture
def producer(real_cluster):
    with Producer(name_server=real_cluster.name_server) as producer:
        yield producer


def test_a_java_consumer_gets_messages_unchanged(real_cluster, java, topic, group, producer):
    real_cluster.create_topic(topic, queues=2)
    given = {"tags": "Tag ☃", "keys": ["k1", "ключ"], "properties": {"région": 'é&= "x"'}, "flag": -5}
    sent = [
        producer.send(topic, "привет\0".encode(), **given),
        producer.send_async(topic, b"asynchronous", **given).result(30),
        *producer.send_batch(topic, [OutgoingMessage(b"one", **given), OutgoingMessage(b"two", **given)]),
    ]
    with java.consumer(real_cluster.name_server, group, topic) as consumer:
        got = {message.message_id: message for message in consumer.wait_for_messages(4)}
    assert [got[each.message_id].body for each in sent] == ["привет\0".encode(), b"asynchronous", b"one", b"two"]
    for each in sent:
        message = got[each.message_id]
        assert (message.queue, message.queue_offset) == (each.queue, each.queue_offset)
        assert (message.tags, message.keys, message.flag) == ("Tag ☃", "k1 ключ", -5)
        assert message.properties["région"] == 'é&= "x"'


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd"])
def test_a_java_consumer_reads_compressed_bodies(real_cluster, java, topic, group, compression):
    real_cluster.create_topic(topic, queues=1)
    bodies = [b"abcdefghij" * 1000, bytes(range(256)) * 40 + os.urandom(1000)]
    with Producer(name_server=real_cluster.name_server, compression=compression) as producer:
        for body in bodies:
            producer.send(topic, body)
    with java.consumer(real_cluster.name_server, group, topic) as consumer:
        got = consumer.wait_for_messages(2)
    assert sorted(message.body for message in got) == sorted(bodies)
    assert all(message.sys_flag & 1 for message in real_cluster.messages(topic))


def test_java_and_our_producer_put_a_key_into_the_same_queue(real_cluster, java, topic, producer):
    real_cluster.create_topic(topic, queues=7)
    keys = ["o-1", "hello", "键", "polygenelubricants", "😀", "a" * 50, *(str(number) for number in range(10))]
    with java.producer(real_cluster.name_server) as java_producer:
        java_queues = [java_producer.send(topic, b"x", sharding_key=key)[0]["queueId"] for key in keys]
    assert [producer.send(topic, b"x", sharding_key=key).queue.queue_id for key in keys] == java_queues
    assert len(set(java_queues)) > 3
