"""Held pulls: when the broker holds them, wakes them, and responds."""

from __future__ import annotations

import time

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.message import decode_messages
from tests.for_each import for_each
from tests.testing.brokers import broker_and_client, every_version, pull_result
from tests.testing.raw_client import RawClient

HOLD = {"sysFlag": 6, "suspendTimeoutMillis": 15_000}
NO_TICK = {"long_poll_tick_s": 600.0}

pytestmark = pytest.mark.cluster(**NO_TICK)


def held(broker, client, offset=0, **options):
    """Post a pull, and return its opaque once the broker holds it."""
    before = broker.held_pulls()
    opaque = client.post_pull("T", 0, offset, **{**HOLD, **options})
    broker.cluster.wait_until(lambda: broker.held_pulls() == before + 1)
    return opaque


@every_version
def test_a_message_wakes_every_pull_of_its_queue_at_once(version):
    with broker_and_client(version=version, **NO_TICK) as (broker, client), RawClient(broker.address) as producer:
        first, second = client.post_pull("T", 0, 0, **HOLD), client.post_pull("T", 0, 0, **HOLD)
        other = client.post_pull("T", 1, 0, **HOLD)
        broker.cluster.wait_until(lambda: broker.held_pulls("T") == 3)
        producer.produce("T", b"hello")
        for opaque in (first, second):
            assert pull_result(client.answer(opaque)) == (0, "FOUND", 1, 0, 1)
        assert broker.held_pulls("T") == 1
        producer.produce("T", queue_id=1)
        assert client.answer(other).code == 0


def test_waking_takes_about_a_millisecond(broker, client):
    delays = []
    for offset in range(20):
        opaque = held(broker, client, offset)
        start = time.perf_counter()
        broker.cluster.send("T", queue_id=0)
        client.answer(opaque)
        delays.append(time.perf_counter() - start)
    assert min(delays) < 0.02  # a busy machine may delay most of them


@pytest.mark.cluster(long_poll_tick_s=0.2)
def test_an_empty_answer_comes_at_a_tick_after_the_timeout(client):
    start = time.monotonic()
    answer = client.pull("T", 0, 0, sysFlag=6, suspendTimeoutMillis=300)
    assert pull_result(answer) == (19, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert time.monotonic() - start >= 0.3


@for_each("timeout_ms", [0, -1])
def test_the_suspend_bit_alone_holds_to_the_next_tick(broker, client, timeout_ms):
    opaque = held(broker, client, suspendTimeoutMillis=timeout_ms)
    broker.tick()
    assert client.answer(opaque).code == 19
    assert client.pull("T", 0, 0, sysFlag=4, suspendTimeoutMillis=15_000).code == 19


def test_only_pulls_at_the_end_of_a_queue_are_held(broker, client):
    client.produce("T", properties={"TAGS": "A"})
    assert client.pull("T", 0, 9, **HOLD).code == 21
    assert client.pull("T", 0, -1, **HOLD).code == 21
    assert client.pull("T", 0, 0, subscription="B", **HOLD).code == 20
    assert broker.held_pulls() == 0


def test_a_message_that_no_pull_matches_wakes_none_before_the_next_tick(broker, client, other):
    opaque = held(broker, client, subscription="A")
    other.produce("T", properties={"TAGS": "B"})
    other.produce("T")
    assert broker.held_pulls() == 1
    broker.tick()
    assert pull_result(client.answer(opaque)) == (20, "NO_MATCHED_MESSAGE", 2, 0, 2)
    opaque = held(broker, client, 2, subscription="A")
    other.produce("T", properties={"TAGS": "A"})
    assert pull_result(client.answer(opaque)) == (0, "FOUND", 3, 0, 3)


def test_a_woken_pull_uses_the_current_subscription(broker, client):
    client.heartbeat("G", "T", expression="A", sub_version=1)
    opaque = held(broker, client, sysFlag=2, subscription=None, subVersion=1)
    client.heartbeat("G", "T", expression="A || B", sub_version=2)
    client.produce("T", properties={"TAGS": "B"})
    client.produce("T", properties={"TAGS": "A"})
    assert [message.tags for message in decode_messages(client.answer(opaque).body)] == ["B", "A"]


def test_a_held_pull_commits_on_arrival_and_only_then(broker, client):
    opaque = client.post_pull("T", 0, 0, **{**HOLD, "sysFlag": 7, "commitOffset": 0})
    broker.cluster.wait_until(lambda: broker.committed("G", "T") == {0: 0})
    client.commit("G", "T", 0, 5)
    client.produce("T")
    assert client.answer(opaque).code == 0
    assert broker.committed("G", "T") == {0: 5}


@pytest.mark.cluster(**NO_TICK, settings={"longPollingEnable": False, "shortPollingTimeMills": 100})
def test_without_long_polling_a_pull_waits_a_second_at_most(broker, client, other):
    opaque = held(broker, client)
    other.produce("T")  # does not wake the pull; the tick finds the message
    assert pull_result(client.answer(opaque)) == (0, "FOUND", 1, 0, 1)
    assert client.pull("T", 0, 1, **HOLD).code == 19


def test_a_deleted_topic_and_a_closed_connection_end_the_wait(broker, client):
    opaque = held(broker, client, suspendTimeoutMillis=0)
    with RawClient(broker.address) as leaving:
        held(broker, leaving)
    broker.cluster.wait_until(lambda: broker.held_pulls() == 1)
    client.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    broker.tick()
    assert client.answer(opaque).code == 17


def test_a_stopping_broker_answers_no_held_pull(broker, client):
    held(broker, client)
    broker.stop()
    assert client.wait_closed() == "closed"
