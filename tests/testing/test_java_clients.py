"""Unmodified Java clients work with the embedded cluster as they do with real brokers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from tests.real_brokers import JavaMachine
from tests.testing.raw_client import RawClient

pytestmark = pytest.mark.versions("4.9.7", "5.5.0")

QUEUES = {MessageQueue("orders", name, queue_id) for name in ("broker-a", "broker-b") for queue_id in (0, 1)}


@pytest.fixture
def embedded(real_version: str) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(brokers=2, version=real_version, delay_scale=0.01) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


def test_a_java_producer_and_two_members_of_a_group(embedded: EmbeddedCluster, java: JavaMachine) -> None:
    name_server = embedded.name_server
    with (
        java.producer(name_server) as producer,
        java.consumer(name_server, "app", "orders") as first,
    ):
        first.wait_for_queues("orders", 4)
        with java.consumer(name_server, "app", "orders") as second:
            assert first.wait_for_queues("orders", 2).isdisjoint(second.wait_for_queues("orders", 2))
            sent = producer.send("orders", b"hello", count=40, tags="paid", keys=["k1"], properties={"own": "x"})
            assert {each["status"] for each in sent} == {"SEND_OK"}
            assert {MessageQueue("orders", each["brokerName"], each["queueId"]) for each in sent} == QUEUES
            embedded.wait_until(lambda: len(first.messages) + len(second.messages) == 40, timeout_s=60)
            got = first.messages + second.messages
            assert Counter(message.message_id for message in got) == Counter(each["messageId"] for each in sent)
            assert {(message.tags, message.keys, message.properties["own"]) for message in got} == {("paid", "k1", "x")}
    committed = {
        (name, queue_id): offset
        for name in ("broker-a", "broker-b")
        for queue_id, offset in embedded.committed("app", "orders", name).items()
    }
    assert committed == {(queue.broker_name, queue.queue_id): 10 for queue in QUEUES}


def test_broadcasting_members_each_get_everything(embedded: EmbeddedCluster, java: JavaMachine) -> None:
    embedded.send("orders", count=20)
    options = {"broadcasting": True}
    with (
        java.consumer(embedded.name_server, "app", "orders", instanceName="one", **options) as first,
        java.consumer(embedded.name_server, "app", "orders", instanceName="two", **options) as second,
    ):
        for consumer in (first, second):
            found = consumer.wait_for_messages(20)
            assert Counter(message.queue for message in found) == dict.fromkeys(QUEUES, 5)
        assert embedded.members("app") == sorted([first.client_id, second.client_id])


def test_an_orderly_consumer_locks_its_queues(embedded: EmbeddedCluster, java: JavaMachine) -> None:
    embedded.send("orders", lambda number: b"%d" % number, count=10, queue_id=0, broker_name="broker-a")
    with java.consumer(embedded.name_server, "app", "orders", orderly=True) as consumer:
        found = consumer.wait_for_messages(10)
        assert [message.body for message in found] == [b"%d" % number for number in range(10)]
        locks = embedded.broker("broker-a").locks("app")
        assert locks[MessageQueue("orders", "broker-a", 0)] == consumer.client_id


def test_failed_messages_are_redelivered_and_delayed_ones_arrive_late(
    embedded: EmbeddedCluster, java: JavaMachine
) -> None:
    embedded.create_topic("%RETRY%app", queues=1)  # otherwise the client fetches its route again only after 30 s
    with (
        java.producer(embedded.name_server) as producer,
        java.consumer(embedded.name_server, "app", "orders", fail=2) as consumer,
    ):
        producer.send("orders", b"delayed", delay_level=3)
        found = consumer.wait_for_messages(3)
        assert [(message.reconsume_times, message.consumed) for message in found] == [(0, False), (1, False), (2, True)]
        assert {message.queue.topic for message in found} == {"orders"}


def test_mqadmin_sees_progress_and_resets_it(embedded: EmbeddedCluster, java: JavaMachine) -> None:
    embedded.send("orders", count=20)
    with java.consumer(embedded.name_server, "app", "orders", persistIntervalMs=100) as consumer:
        consumer.wait_for_messages(20)
        for broker in embedded.brokers:
            embedded.wait_until(lambda broker=broker: broker.committed("app", "orders") == {0: 5, 1: 5}, timeout_s=30)
        progress = java.mqadmin(embedded.name_server, "consumerProgress", "-g", "app")
        assert "Diff Total: 0" in progress
        status = java.mqadmin(embedded.name_server, "consumerStatus", "-g", "app")
        assert consumer.client_id in status
        java.mqadmin(embedded.name_server, "resetOffsetByTime", "-g", "app", "-t", "orders", "-s", "0")
        if java.version == "4.9.7":
            assert embedded.broker("broker-a").requests(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
        else:  # a held pull gets the mark when a message wakes it
            with RawClient(embedded.broker("broker-a").address) as client:
                assert client.query("app", "orders", 0).fields == {"offset": "0"}
            embedded.send("orders", count=4)
        consumer.wait_for_messages(40)
