"""Messages arrive unchanged, and results have their positions, on every kind of cluster."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import wait
from datetime import UTC, datetime, timedelta

import pytest

from pyrocket_consumer import MessageQueue, RouteNotFound, SendError
from pyrocket_consumer.producer import OutgoingMessage, SendStatus
from pyrocket_consumer.protocol.subscription import java_string_hash
from tests.producer.programs import in_threads
from tests.real_brokers import wait_until


def position(message):
    return message.queue, message.queue_offset, message.message_id, message.offset_message_id


def result_position(result):
    return result.queue, result.queue_offset, result.message_id, result.offset_message_id


def test_a_message_is_stored_as_it_was_given(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster)
    before_ms = int(time.time() * 1000)
    body, keys, properties = "привет\0".encode(), ("k1", "ключ-键-🔑"), {"région": 'é&= "x"\\', "b": "\n\t"}
    sent = producer.send(topic, body, tags="Tag ☃", keys=keys, properties=properties, flag=-5)
    (found,) = cluster.messages(topic)
    assert (found.body, found.tags, found.keys, found.flag) == (body, "Tag ☃", keys, -5)
    assert {name: found.property(name) for name in properties} == properties
    assert before_ms <= found.born_at_ms <= before_ms + 60_000
    assert found.reconsume_times == 0
    assert result_position(sent) == position(found)
    assert sent.status is SendStatus.OK


def test_messages_use_the_queues_round_robin(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster)
    sent = [producer.send(topic, b"x") for _ in range(12)]
    assert Counter(each.queue.queue_id for each in sent) == dict.fromkeys(range(4), 3)
    assert sorted(map(result_position, sent)) == sorted(map(position, cluster.messages(topic)))


def test_a_selected_queue_gets_the_message(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    queue = MessageQueue(topic, "broker-a", 2)
    assert [producing(cluster).send(topic, b"x", queue=queue).queue for _ in range(2)] == [queue, queue]


def test_a_sharding_key_keeps_messages_in_one_queue_and_in_order(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster)
    futures = [
        (key, producer.send_async(topic, f"{key}-{number:02}".encode(), sharding_key=key))
        for number in range(30)
        for key in ("o-1", "o-2", "polygenelubricants")
    ]
    for key, future in futures:
        assert future.result(30).queue.queue_id == abs(java_string_hash(key)) % 4
    stored = cluster.messages(topic)
    for key in ("o-1", "o-2", "polygenelubricants"):
        of_key = [message for message in stored if message.property("__SHARDINGKEY") == key]
        assert [message.body.decode() for message in of_key] == [f"{key}-{number:02}" for number in range(30)]


@pytest.mark.parametrize(("kind", "sys_flag"), [("zlib", 0x301), ("lz4", 0x101), ("zstd", 0x201)])
def test_large_bodies_are_compressed(cluster, topic, producing, kind, sys_flag):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, compression=kind, compress_above_bytes=1000)
    body = b"abcdefghij" * 100
    for each in (body, body[:-1]):
        producer.send(topic, each)
    large, small = cluster.messages(topic)
    assert (large.body, large.sys_flag & 0x701) == (body, sys_flag)
    assert large.store_size < 500
    assert (small.body, small.sys_flag & 0x701) == (body[:-1], 0)


def test_a_body_that_compression_would_enlarge_is_sent_unchanged(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    body = bytes(range(256))
    producing(cluster, compress_above_bytes=256).send(topic, body)
    (found,) = cluster.messages(topic)
    assert (found.body, found.sys_flag & 1) == (body, 0)


def test_the_largest_message_is_stored(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, compress_above_bytes=1 << 30, send_timeout_s=30)
    assert producer.send(topic, b"x" * (4 * 1024 * 1024)).queue_offset == 0


def test_messages_of_a_batch_are_ordinary_messages(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, compress_above_bytes=2)
    producer.send(topic, b"before")
    full = OutgoingMessage(b"full", tags="paid", keys=["k1", "k2"], properties={"région": "é"}, flag=7)
    results = producer.send_batch(topic, [b"plain", full, bytearray(b"third")])
    stored = cluster.messages(topic)[1:]
    assert [result_position(each) for each in results] == [position(each) for each in stored]
    assert [each.queue_offset for each in results] == [1, 2, 3]
    assert len({each.message_id for each in stored}) == 3
    plain, full, _ = stored
    assert [each.body for each in stored] == [b"plain", b"full", b"third"]
    assert (full.tags, full.keys, full.property("région"), full.flag) == ("paid", ("k1", "k2"), "é", 7)
    assert (plain.tags, plain.keys, plain.flag) == (None, (), 0)


def test_a_batch_too_large_for_one_request_uses_several(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster, max_message_bytes=2000)
    results = producer.send_batch(topic, [f"{number:0400}".encode() for number in range(20)])
    stored = {position(message): message.body for message in cluster.messages(topic)}
    assert [int(stored[result_position(each)]) for each in results] == list(range(20))
    assert len({each.queue for each in results}) == 4


@pytest.mark.parametrize("pin", ["queue", "sharding_key"])
def test_a_batch_for_one_queue_stays_together(cluster, topic, producing, pin):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster, max_message_bytes=2000)
    where = {"queue": MessageQueue(topic, "broker-a", 3)} if pin == "queue" else {"sharding_key": "key"}
    results = producer.send_batch(topic, [b"x" * 400] * 20, **where)
    assert len({each.queue for each in results}) == 1
    assert [each.queue_offset for each in results] == list(range(20))
    if pin == "sharding_key":
        assert {message.property("__SHARDINGKEY") for message in cluster.messages(topic)} == {"key"}


@pytest.mark.slow("sends 33 000 messages, more than brokers can count in one request")
def test_a_batch_of_more_than_brokers_can_count_harms_nothing(cluster, topic, producing):
    """With one request, brokers 5.x would give later messages duplicate offsets."""
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, send_timeout_s=60)
    results = producer.send_batch(topic, [b"x"] * 33_000)
    assert [each.queue_offset for each in results] == list(range(33_000))
    assert producer.send(topic, b"after").queue_offset == 33_000
    wait_until(lambda: cluster.broker("broker-a").max_offset(topic, 0) == 33_001, "max offset")


def test_an_empty_batch_sends_no_request(cluster, topic, producing):
    assert producing(cluster).send_batch(topic, []) == []


def test_concurrent_messages_each_have_a_position(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster, send_timeout_s=60)
    futures = [producer.send_async(topic, b"%d" % number) for number in range(3000)]
    wait(futures, timeout=60)
    positions = [result_position(future.result(0)) for future in futures]
    assert len(set(positions)) == 3000
    stored = {position(message): message.body for message in cluster.messages(topic)}
    assert [stored[each] for each in positions] == [b"%d" % number for number in range(3000)]


def test_threads_share_a_producer(cluster, topic, producing):
    cluster.create_topic(topic, queues=4)
    producer = producing(cluster, send_timeout_s=30)
    results = []

    def send_some():
        for _ in range(50):
            results.append(producer.send(topic, b"x"))

    with in_threads(send_some, 8):
        pass
    assert len({result_position(each) for each in results}) == 400
    assert len({each.message_id for each in results}) == 400


def test_one_way_messages_arrive(cluster, topic, producing):
    cluster.create_topic(topic, queues=2)
    producer = producing(cluster)
    for number in range(10):
        assert producer.send_oneway(topic, b"%d" % number, tags="t") is None
    wait_until(lambda: len(cluster.messages(topic)) == 10, "10 messages")
    assert sorted(message.body for message in cluster.messages(topic)) == [b"%d" % number for number in range(10)]


def test_a_delayed_message_arrives_later(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    sent = producing(cluster).send(topic, b"later", delay_level=1)
    assert cluster.messages(topic) == []
    wait_until(lambda: cluster.messages(topic), "the delayed message")
    (found,) = cluster.messages(topic)
    assert (found.body, found.message_id) == (b"later", sent.message_id)
    assert found.stored_at_ms - found.born_at_ms >= 900


def test_a_message_arrives_at_a_given_time_from_5_0_on(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster)
    at = datetime.fromtimestamp(time.time(), UTC) + timedelta(seconds=2)
    if cluster.version.startswith("4."):
        with pytest.raises(SendError, match="before 5.0 ignore deliver_at and deliver at once; use delay_level"):
            producer.send(topic, b"at two", deliver_at=at)
        assert cluster.messages(topic) == []
        return
    sent = producer.send(topic, b"at two", deliver_at=at)
    assert cluster.messages(topic) == []
    wait_until(lambda: cluster.messages(topic), "the message")
    (found,) = cluster.messages(topic)
    assert (found.body, found.message_id) == (b"at two", sent.message_id)
    assert found.stored_at >= at - timedelta(seconds=1)  # brokers round to a second


@pytest.mark.versions("5.1.4", "5.3.3", "5.5.0")
def test_a_message_cannot_be_delayed_for_more_than_three_days(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    at = datetime.fromtimestamp(time.time(), UTC) + timedelta(days=3, minutes=1)
    with pytest.raises(SendError, match=r"MESSAGE_ILLEGAL.*bigger than the max delay 259200000ms") as raised:
        producing(cluster).send(topic, b"in three days", deliver_at=at)
    assert len(raised.value.attempts) == 1


def test_a_topic_that_does_not_exist_is_an_error_with_a_remedy(cluster, topic, producing):
    producer = producing(cluster)
    for send in (
        lambda: producer.send(topic, b"x"),
        lambda: producer.send_oneway(topic, b"x"),
        lambda: producer.send_async(topic, b"x").result(10),
        lambda: producer.send_batch(topic, [b"x"]),
    ):
        with pytest.raises(RouteNotFound, match="create the topic"):
            send()
    cluster.create_topic(topic, queues=1)
    assert producer.send(topic, b"x").queue_offset == 0


def test_a_topic_is_created_by_the_broker_on_demand(cluster, topic, producing):
    producer = producing(cluster, auto_create_topic=True)
    results = [producer.send(topic, b"x") for _ in range(5)]
    assert {each.queue.broker_name for each in results} == {"broker-a"}
    wait_until(lambda: len(cluster.messages(topic)) == 5, "5 messages")


def test_the_error_mentions_a_topic_without_write_permission(cluster, topic, producing):
    cluster.create_topic(topic, queues=2, perm=4)
    producer = producing(cluster)
    with pytest.raises(SendError, match=r"no queue can be written; .*no write permission \(perm 4\)") as raised:
        producer.send(topic, b"x")
    assert len(raised.value.attempts) == 1
    queue = MessageQueue(topic, "broker-a", 0)
    with pytest.raises(SendError, match="cannot be written"):
        producer.send(topic, b"x", queue=queue)


def test_the_error_mentions_a_queue_that_does_not_exist(cluster, topic, producing):
    cluster.create_topic(topic, queues=2)
    producer = producing(cluster)
    producer.send(topic, b"x")
    for queue in (MessageQueue(topic, "broker-a", 2), MessageQueue(topic, "broker-z", 0)):
        with pytest.raises(SendError, match="not in the route of the topic.*broker-a with 2 write queues"):
            producer.send(topic, b"x", queue=queue)


def test_queues_added_later_are_used(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster)
    producer.send(topic, b"x")
    cluster.create_topic(topic, queues=3)
    queue = MessageQueue(topic, "broker-a", 2)
    assert producer.send(topic, b"x", queue=queue).queue == queue
    assert {producer.send(topic, b"x").queue.queue_id for _ in range(3)} == {0, 1, 2}


def test_queues_removed_later_lose_no_message(cluster, topic, producing):
    cluster.create_topic(topic, queues=8)
    producer = producing(cluster)
    assert {producer.send(topic, b"x").queue.queue_id for _ in range(8)} == set(range(8))
    cluster.create_topic(topic, queues=2)
    for pin in ({}, *({"sharding_key": f"o-{number}"} for number in range(8))):
        assert {producer.send(topic, b"x", **pin).queue.queue_id for _ in range(8)} <= {0, 1}


def test_a_message_can_be_sent_to_a_groups_retry_topic(cluster, names, producing):
    group = names.group()
    cluster.broker("broker-a").create_group(group)
    cluster.create_topic(f"%RETRY%{group}", queues=1)
    sent = producing(cluster).send(f"%RETRY%{group}", b"again")
    assert sent.queue == MessageQueue(f"%RETRY%{group}", "broker-a", 0)


@pytest.mark.cluster(brokers=2)
def test_when_a_broker_is_killed_messages_go_to_the_other(cluster, topic, producing):
    cluster.create_topic(topic, queues=2)
    producer = producing(cluster, send_timeout_s=10, route_refresh_interval_s=1)
    assert {producer.send(topic, b"x").queue.broker_name for _ in range(4)} == {"broker-a", "broker-b"}
    cluster.broker("broker-b").kill()
    sent = [producer.send(topic, b"y") for _ in range(10)]
    assert {each.queue.broker_name for each in sent} == {"broker-a"}
    cluster.broker("broker-b").start()
    wait_until(lambda: producer.send(topic, b"z").queue.broker_name == "broker-b", "it is used again", timeout_s=60)


@pytest.mark.cluster(brokers=2)
def test_a_sharding_key_does_not_move_to_another_broker(cluster, topic, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, send_timeout_s=2)
    keys = {producer.send(topic, b"x", sharding_key=key).queue.broker_name: key for key in "abcdefgh"}
    cluster.broker("broker-b").kill()
    try:
        with pytest.raises(SendError):
            producer.send(topic, b"x", queue=MessageQueue(topic, "broker-b", 0))
        assert producer.send(topic, b"x", queue=MessageQueue(topic, "broker-a", 0)).queue.broker_name == "broker-a"
    finally:
        cluster.broker("broker-b").start()
    assert set(keys) == {"broker-a", "broker-b"}
