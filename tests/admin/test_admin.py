"""Create, change, list and delete topics and groups, on every kind of cluster."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from pyrocket_consumer import BrokerError, ConfigError, MessageQueue, RouteNotFound, SendError
from pyrocket_consumer.admin import Admin, OffsetRange
from pyrocket_consumer.producer import Producer
from tests.real_brokers import wait_until


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def admin(cluster):
    with Admin(name_server=cluster.name_server) as admin:
        yield admin


@pytest.fixture
def producer(cluster):
    with Producer(name_server=cluster.name_server) as producer:
        yield producer


def test_a_created_topic_can_be_used_at_once(admin, producer, topic):
    admin.create_topic(topic, queues=3)
    sent = [producer.send(topic, b"x") for _ in range(6)]
    assert {each.queue for each in sent} == {MessageQueue(topic, "broker-a", each) for each in range(3)}
    assert topic in admin.topics()


def test_a_topic_has_eight_queues_by_default(admin, topic):
    admin.create_topic(topic)
    assert len(admin.topic_offsets(topic)) == 8


def test_creating_a_topic_again_changes_it(admin, producer, topic):
    admin.create_topic(topic, queues=2)
    admin.create_topic(topic, queues=2)
    admin.create_topic(topic, queues=4)
    assert len(admin.topic_offsets(topic)) == 4
    assert producer.send(topic, b"x", queue=MessageQueue(topic, "broker-a", 3))


def test_the_permission_of_a_topic_can_be_set(admin, producer, topic):
    admin.create_topic(topic, queues=1, perm="r")
    with pytest.raises(SendError, match="no write permission"):
        producer.send(topic, b"x")
    admin.create_topic(topic, queues=1, perm="rw")
    wait_until(lambda: _can_send(producer, topic), "the permission is visible")


def _can_send(producer, topic):
    try:
        return producer.send(topic, b"x", queue=MessageQueue(topic, "broker-a", 0))
    except SendError:
        return None


def test_topic_offsets_are_the_ranges_of_queues(admin, producer, topic):
    admin.create_topic(topic, queues=3)
    before = datetime.fromtimestamp(time.time() - 1, UTC)
    for _ in range(5):
        producer.send(topic, b"x", queue=MessageQueue(topic, "broker-a", 1))
    wait_until(lambda: admin.topic_offsets(topic)[MessageQueue(topic, "broker-a", 1)].max == 5, "5 messages")
    ranges = admin.topic_offsets(topic)
    assert list(ranges) == [MessageQueue(topic, "broker-a", each) for each in range(3)]
    filled = ranges[MessageQueue(topic, "broker-a", 1)]
    assert (filled.min, filled.max, filled.count) == (0, 5, 5)
    assert before <= filled.stored_at <= datetime.fromtimestamp(time.time() + 1, UTC)
    assert ranges[MessageQueue(topic, "broker-a", 0)] == OffsetRange(0, 0, None)


def test_a_deleted_topic_is_removed_everywhere(admin, producer, topic):
    admin.create_topic(topic, queues=1)
    producer.send(topic, b"x")
    admin.delete_topic(topic)
    assert topic not in admin.topics(include_system=True)
    with pytest.raises(RouteNotFound):
        admin.topic_offsets(topic)
    admin.delete_topic(topic)  # deleting it again is no error
    admin.create_topic(topic, queues=1)
    assert admin.topic_offsets(topic) == {MessageQueue(topic, "broker-a", 0): OffsetRange(0, 0, None)}


def test_system_topics_are_listed_only_on_request(cluster, admin, topic, names):
    group = names.group()
    admin.create_topic(topic, queues=1)
    cluster.create_topic(f"%RETRY%{group}", queues=1)
    shown = admin.topics()
    assert topic in shown
    assert shown == sorted(shown)
    hidden = set(admin.topics(include_system=True)) - set(shown)
    assert {"TBW102", "broker-a", "DefaultCluster", "SCHEDULE_TOPIC_XXXX", f"%RETRY%{group}"} <= hidden
    assert not [each for each in shown if each.upper().startswith(("RMQ_SYS", "%", "SELF_TEST", "OFFSET_MOVED"))]


def test_groups_are_created_listed_and_deleted(admin, names):
    first, second = sorted((names.group("a"), names.group("b")))
    admin.create_group(first)
    admin.create_group(second, retry_max_times=3, consume_broadcast_enable=False)
    shown = admin.groups()
    assert [each for each in shown if each in (first, second)] == [first, second]
    assert not [each for each in shown if each.startswith(("CID_", "TOOLS", "SELF_TEST", "FILTERSRV"))]
    assert set(admin.groups(include_system=True)) >= set(shown)
    admin.delete_group(first)
    admin.delete_group(first)  # deleting it again is no error
    assert [each for each in admin.groups() if each in (first, second)] == [second]


@pytest.mark.parametrize("remove_offsets", [False, True])
def test_offsets_of_a_deleted_group_are_removed_by_default(cluster, admin, topic, names, remove_offsets):
    group = names.group()
    admin.create_topic(topic, queues=1)
    admin.create_group(group)
    cluster.broker("broker-a").commit(group, topic, {0: 0})
    cluster.send(topic, count=3)
    cluster.broker("broker-a").commit(group, topic, {0: 3})
    admin.delete_group(group, remove_offsets=remove_offsets)
    assert cluster.committed(group, topic) == ({} if remove_offsets else {0: 3})
    assert f"%RETRY%{group}" not in admin.topics(include_system=True)


def test_dead_letters_of_a_deleted_group_stay_by_default(cluster, admin, names):
    group = names.group()
    admin.create_group(group)
    cluster.create_topic(f"%DLQ%{group}", queues=1)
    admin.delete_group(group)
    assert f"%DLQ%{group}" in admin.topics(include_system=True)
    admin.delete_group(group, remove_dead_letters=True)
    assert f"%DLQ%{group}" not in admin.topics(include_system=True)


def test_attributes_need_brokers_from_5_0_on(cluster, admin, topic):
    attributes = {"message.type": "FIFO"}
    if cluster.version.startswith("4."):
        with pytest.raises(ConfigError, match="V4_9_7, and brokers before 5.0 ignore attributes"):
            admin.create_topic(topic, queues=1, attributes=attributes)
        assert topic not in admin.topics()
        return
    admin.create_topic(topic, queues=1, attributes=attributes)
    assert topic in admin.topics()
    with pytest.raises(BrokerError, match="unsupported key"):
        admin.create_topic(topic, queues=1, attributes={"no.such": "x"})


@pytest.mark.cluster(brokers=2)
def test_a_topic_can_be_created_on_some_brokers_only(admin, producer, topic):
    admin.create_topic(topic, queues=2, brokers=["broker-b"])
    assert {each.broker_name for each in admin.topic_offsets(topic)} == {"broker-b"}
    admin.create_topic(topic, queues=2, cluster="DefaultCluster")
    assert {each.broker_name for each in admin.topic_offsets(topic)} == {"broker-a", "broker-b"}
    assert len({producer.send(topic, b"x").queue for _ in range(4)}) == 4
    with pytest.raises(ConfigError, match="there is no broker 'broker-z'; choose one of broker-a, broker-b"):
        admin.create_topic(topic, brokers=["broker-z"])
    with pytest.raises(ConfigError, match="there is no cluster 'other'; choose one of DefaultCluster"):
        admin.create_topic(topic, cluster="other")
    with pytest.raises(ConfigError, match="exclude each other"):
        admin.create_topic(topic, brokers=["broker-a"], cluster="DefaultCluster")
