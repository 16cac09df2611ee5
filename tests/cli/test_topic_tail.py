"""The reader of queues behind `pyrocket consume` without a group."""

from __future__ import annotations

import time

import pytest

from pyrocket_consumer.cli.topic_tail import TopicTailer
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import EmbeddedCluster, answer

FIRST = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def orders():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1, brokers=["broker-a"])
        yield cluster


@pytest.fixture
def client(orders):
    config = ClientConfig(name_server=orders.name_server, route_refresh_interval_s=0.05)
    cluster = Cluster(config, make_client_id(config))
    cluster.start()
    yield cluster
    cluster.close()


def seen(client, tailer, count):
    """Return queue and offset of the next `count` messages."""
    found = []
    while len(found) < count:
        found += client.run(tailer.new_messages(30), 60)
    return sorted((message.queue, message.queue_offset) for message in found)


def following(client, new_queues):
    async def follow():
        await client.routes.get("orders")
        tailer = TopicTailer(client, Subscription("orders"), {FIRST: 0}, {FIRST: 0}, lambda text: None)
        tailer.follow(new_queues)
        return tailer

    return client.run(follow(), 30)


@pytest.mark.parametrize("new_queues", [True, False])
def test_new_queues_of_a_topic_are_followed(orders, client, new_queues):
    tailer = following(client, new_queues)
    orders.create_topic("orders", queues=1, brokers=["broker-b"])
    orders.send("orders", count=4)
    everything = [(queue, offset) for queue in (FIRST, MessageQueue("orders", "broker-b", 0)) for offset in (0, 1)]
    assert seen(client, tailer, 4 if new_queues else 2) == (everything if new_queues else everything[:2])


@pytest.mark.parametrize(
    ("code", "step"),
    [(ResponseCode.PULL_NOT_FOUND, 0), (ResponseCode.PULL_OFFSET_MOVED, 1), (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)],
)
def test_pulls_from_a_broker_without_messages_become_slower(orders, client, code, step):
    def nothing(exchange):
        further = str(int(exchange.request.fields["queueOffset"]) + step)
        fields = {"nextBeginOffset": further, "minOffset": "0", "maxOffset": "100", "suggestWhichBrokerId": "0"}
        answer(code, fields=fields)(exchange)

    orders.send("orders", count=100)
    orders.broker("broker-a").on(RequestCode.PULL_MESSAGE, nothing, times=9)
    began = time.monotonic()
    tailer = following(client, False)
    assert seen(client, tailer, 1)
    assert time.monotonic() - began > 0.02 + 0.04 + 0.08 + 0.16 + 0.32


def test_messages_of_several_queues_are_in_the_order_of_store_times(orders, client):
    orders.create_topic("orders", queues=3)
    orders.send("orders", lambda number: b"%d" % number, count=300)

    async def read_all():
        queues = (await client.routes.get("orders")).consume_queues()
        ends = dict.fromkeys(queues, 50)
        tailer = TopicTailer(client, Subscription("orders"), dict.fromkeys(queues, 0), ends, lambda text: None)
        found = []
        while messages := await tailer.next_messages():
            found += messages
        return found

    found = client.run(read_all(), 60)
    assert len(found) == 300
    assert [message.stored_at_ms for message in found] == sorted(message.stored_at_ms for message in found)
    for broker in ("broker-a", "broker-b"):
        log_offsets = [message.commit_log_offset for message in found if message.queue.broker_name == broker]
        assert log_offsets == sorted(log_offsets)
