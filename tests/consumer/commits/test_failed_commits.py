"""Commits and send-backs that brokers refuse or never answer are retried and reported, and none is dropped."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from pyrocket_consumer import ConsumerState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, close_connection, drop, drop_answer
from tests.consuming import LONG_TIMEOUT_S, Events, RecordingListener, consuming, numbered, until
from tests.hazards.members import request_matcher
from tests.resets import fill, queue

OPTIONS = {"commit_interval_s": 0.05, "pull_hold_s": 0.2}
IMPATIENT = {**OPTIONS, "call_timeout_s": 0.2}


def fails_once(body):
    def judge(message):
        if message.body == body and message.reconsume_times == 0:
            raise ValueError("once")

    return judge


@pytest.mark.parametrize(
    "trouble", [answer(1, "no"), answer(2, "busy"), drop, close_connection], ids=["refused", "busy", "lost", "closed"]
)
def test_commits_are_retried_and_reported_at_intervals(embedded, broker, topic, group, trouble):
    fill(embedded, topic, 10, queues=2)
    events = Events()

    def is_ours(command):
        """Return whether a request commits consumed messages, as opposed to a start offset."""
        return command.fields["consumerGroup"] == group and command.fields["commitOffset"] != "0"

    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, trouble, times=None, when=is_ours)
    began = time.monotonic()
    with consuming(embedded, topic, group, on_event=events, **IMPATIENT) as (consumer, seen):
        seen.wait_for(10)
        broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET, 6, when=is_ours)
        assert embedded.committed(group, topic) == {0: 0, 1: 0}
        events.wait_for("commit-failed")
        failures = [event for event in events.of("commit-failed") if "final" not in event.text]
        assert len(failures) <= 1 + (time.monotonic() - began) // 10, "reported every 10 s"
        fill(embedded, topic, 10, 10)
        seen.wait_for(20)
        broker.clear_faults()
        until(lambda: embedded.committed(group, topic) == {0: 10, 1: 10}, "committed")
        assert consumer.state is ConsumerState.RUNNING
    assert set(seen.bodies) == set(numbered(20))
    if len(seen.bodies) > 20:  # a rebalance found this member missing while its connection was closed
        assert trouble is close_connection
        assert any("messages will be redelivered" in event.text for event in events.of("commit-failed"))


def test_a_commit_whose_answer_is_lost_is_made_again(embedded, broker, topic, group):
    fill(embedded, topic, 5, queues=1)
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, drop_answer, when=request_matcher(topic))
    with consuming(embedded, topic, group, **IMPATIENT) as (consumer, seen):
        seen.wait_for(5)
        broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET, 2, when=request_matcher(topic))
        until(lambda: consumer.progress()[queue(topic, 0)].persisted == 5, "known to be stored")


def test_a_busy_broker_is_asked_again_to_take_a_message_back(embedded, broker, topic, group):
    fill(embedded, topic, 3, queues=1)
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=2)
    with consuming(embedded, topic, group, RecordingListener(fails_once(b"m1")), **OPTIONS) as (_, seen):
        seen.wait(lambda seen: seen.bodies.count(b"m1") == 2)
        until(lambda: embedded.committed(group, topic) == {0: 3}, "committed")
    groups = [each.command.fields["group"] for each in broker.requests(RequestCode.CONSUMER_SEND_MSG_BACK)]
    assert groups.count(group) == 3
    assert Counter(seen.bodies) == Counter([*numbered(3), b"m1"])


@pytest.mark.parametrize("trouble", [answer(1, "no"), answer(999)], ids=["refused", "unknown"])
def test_a_refused_send_back_goes_to_the_retry_topic(embedded, broker, topic, group, trouble):
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"m0", tags="t", keys=["k"], properties={"own": "ä"})
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, trouble, times=3)
    with consuming(embedded, topic, group, RecordingListener(fails_once(b"m0")), **OPTIONS) as (_, seen):
        seen.wait(lambda seen: len(seen.bodies) == 2)
        until(lambda: embedded.committed(group, topic) == {0: 1}, "committed")
    first, again = seen.messages
    assert (again.topic, again.body, again.tags, again.keys) == (topic, b"m0", "t", ("k",))
    assert (again.queue.topic, again.reconsume_times) == (f"%RETRY%{group}", 1)
    assert again.properties["own"] == "ä"
    assert again.properties["ORIGIN_MESSAGE_ID"] == first.message_id


@pytest.mark.parametrize("trouble", [drop, close_connection], ids=["lost", "closed"])
def test_a_message_with_an_unanswered_send_back_is_repeated_here(embedded, broker, topic, group, trouble):
    """The broker may have the message, so sending it in another way would create copies."""
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"m0")
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, trouble, times=1)
    options = {**OPTIONS, "call_timeout_s": 1.5 if trouble is drop else LONG_TIMEOUT_S}
    with consuming(embedded, topic, group, RecordingListener(fails_once(b"m0")), **options) as (_, seen):
        seen.wait(lambda seen: len(seen.bodies) == 2)
        until(lambda: embedded.committed(group, topic) == {0: 1}, "committed")
    assert [(each.queue.topic, each.reconsume_times) for each in seen.messages] == [(topic, 1), (topic, 1)]
    assert embedded.messages(f"%RETRY%{group}") == []
