"""With faults in the cluster no message is lost, no call hangs, and consumption continues automatically."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pyrocket_consumer import Admin, ClientClosed, ConnectError, ConsumerState, PushConsumer
from tests.consuming import QUICK, Events, RecordingListener, consuming, numbered, until
from tests.resets import fill


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Yield an address without a listener. The port is taken, so no other program can listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_wrong_address_is_an_error_that_names_it(topic, group, closed_port):
    consumer = PushConsumer(group, name_server=closed_port)
    consumer.subscribe(topic, RecordingListener())
    before = set(threading.enumerate())
    began = time.monotonic()
    with pytest.raises(ConnectError, match=closed_port):
        consumer.start()
    assert time.monotonic() - began < 15
    assert consumer.state is ConsumerState.CREATED, "it may be started again"
    until(lambda: set(threading.enumerate()) <= before, "no thread is left")


def test_one_of_two_name_servers_is_enough(cluster, topic, group, closed_port):
    fill(cluster, topic, 3, queues=1)
    servers = f"{closed_port};{cluster.name_server}"
    seen = RecordingListener()
    with PushConsumer(group, name_server=servers, **QUICK) as consumer:
        consumer.subscribe(topic, seen)
        seen.wait_for(3)


def test_a_topic_created_later_is_consumed(cluster, topic, group):
    events = Events()
    with consuming(cluster, topic, group, on_event=events) as (consumer, seen):
        event = events.wait_for("broker-unreachable")
        assert topic in event.text
        fill(cluster, topic, 6, queues=2)
        seen.wait_for(6)


def test_a_deleted_topic_does_not_end_the_consumer(cluster, topic, group):
    other = f"{topic}-other"
    cluster.create_topic(topic, queues=1)
    cluster.create_topic(other, queues=1)
    with consuming(cluster, topic, group) as (consumer, seen):
        second = RecordingListener()
        consumer.subscribe(other, second)
        fill(cluster, topic, 2)
        seen.wait_for(2)
        with Admin(name_server=cluster.name_server) as admin:
            admin.delete_topic(topic)
        cluster.send(other, b"still")
        second.wait_for(1)
        assert consumer.state is ConsumerState.RUNNING


@pytest.mark.cluster(brokers=2)
def test_queues_of_two_brokers(cluster, topic, group):
    fill(cluster, topic, 40, queues=2)
    with consuming(cluster, topic, group) as (consumer, seen):
        seen.wait_for(40)
        assert len([queue for queue in consumer.progress() if queue.topic == topic]) == 4
        cluster.broker("broker-b").kill()
        fill(cluster, topic, 10, start=40, broker_name="broker-a")
        seen.wait_for(50)
        cluster.broker("broker-b").start()
        fill(cluster, topic, 10, start=50, broker_name="broker-b")
        seen.wait_for(60, 90)
    assert set(seen.bodies) == set(numbered(60))


def test_a_stored_offset_beyond_the_end_is_corrected_and_reported(cluster, topic, group):
    fill(cluster, topic, 5, queues=1)
    with consuming(cluster, topic, group) as (_, seen):
        seen.wait_for(5)
    cluster.broker("broker-a").commit(group, topic, {0: 500})
    events = Events()
    with consuming(cluster, topic, group, on_event=events) as (_, again):
        event = events.wait_for("offset-corrected")
        assert (event.facts["from"], event.facts["to"]) == (500, 5)
        until(lambda: cluster.committed(group, topic) == {0: 5}, "the correction is stored")
        fill(cluster, topic, 3, start=5)
        again.wait_for(3)
    assert sorted(again.bodies) == numbered(3, 5)


def test_a_closed_consumer_stays_closed(cluster, topic, group):
    cluster.create_topic(topic, queues=1)
    before = set(threading.enumerate())
    with consuming(cluster, topic, group) as (consumer, _):
        pass
    consumer.close()
    assert consumer.state is ConsumerState.CLOSED
    for call in (consumer.start, consumer.progress, consumer.pause):
        with pytest.raises(ClientClosed):
            call()
    until(lambda: "pyrocket-io" not in {each.name for each in set(threading.enumerate()) - before}, "I/O has ended")
