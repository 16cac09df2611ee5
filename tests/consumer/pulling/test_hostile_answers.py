"""Answers to pulls that cannot be right, or that lead nowhere: beside a broker that keeps to the rules."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from pyrocket_consumer import ConsumerState, PushConsumer
from pyrocket_consumer.consumer.events import AT_ONCE, Floods
from pyrocket_consumer.model import EventKind, MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode
from tests.consuming import Events, Seen, until
from tests.hostile.attacks import Found, Moved, NothingAtOnce, ResetEndlessly, record
from tests.hostile.server import BROKER, MAX_OFFSET, Attack, HostileServer, pulled

TOPIC, GROUP = "t", "g"


@contextmanager
def beside(attack, tmp_path, **options):
    """A consumer with default options, between a broker of ours and one that attacks."""
    seen, told = Seen(), Events()
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=2)
        honest = cluster.brokers[0]
        with HostileServer(TOPIC, (honest.name, honest.address), honest_queues=2) as server:
            server.do(attack)
            consumer = PushConsumer(
                GROUP, name_server=server.name_server, consume_from="first", on_event=told, offset_store_dir=tmp_path,
                **options,
            )  # fmt: skip
            consumer.subscribe(TOPIC, seen)
            with consumer:
                cluster.send(TOPIC, b"honest")
                yield consumer, server, seen, told
                cluster.send(TOPIC, b"honest to the end")
                seen.wait(lambda seen: {b"honest", b"honest to the end"} <= set(seen.bodies))
                assert consumer.state is ConsumerState.RUNNING


class Leads(Attack):
    """Answers pulls with another place, until it is told to stop."""

    def __init__(self, to, code):
        self.to, self.code = to, code

    def answer(self, peer, command):
        if command.code != RequestCode.PULL_MESSAGE:
            return NotImplemented
        return pulled(command, self.code, nextBeginOffset=self.to)


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
@pytest.mark.parametrize(
    "code", [ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY]
)
@pytest.mark.parametrize("to", [2**63 - 1, 2**63, 2**64, 10**30, -1, MAX_OFFSET + 100_000])
def test_a_place_that_no_queue_has_is_not_followed(to, code, model, tmp_path):
    with beside(Leads(to, code), tmp_path, message_model=model) as (consumer, server, _, told):
        event = told.wait_for(EventKind.ANSWER_REFUSED)
        assert event.queue.broker_name == BROKER
        pulls = server.requests[RequestCode.PULL_MESSAGE]
        server.do(Attack())
        until(lambda: server.requests[RequestCode.PULL_MESSAGE] > pulls, "the next pull")
        offsets = [each.next_to_pull for queue, each in consumer.progress().items() if queue.broker_name == BROKER]
        assert set(offsets) <= {0}
    assert all(offset <= MAX_OFFSET for offset in server.commits)


class OutOfOrder(Found):
    def records(self, offset, queue_id):
        places = (offset, offset + 7, offset + 3)
        return b"".join(record(place, b"x", topic=TOPIC, queue_id=queue_id) for place in places)


def test_messages_in_no_order_of_offset_are_asked_for_again(tmp_path):
    with beside(OutOfOrder(), tmp_path) as (_, _, seen, told):
        assert "out of order" in told.wait_for(EventKind.ANSWER_REFUSED).text
        assert b"x" not in seen.bodies


@pytest.mark.parametrize("attack", [Moved, ResetEndlessly, NothingAtOnce])
def test_a_broker_that_leads_from_place_to_place_takes_no_time_from_others(attack, tmp_path):
    with beside(attack(), tmp_path) as (_, server, _, told):
        time.sleep(4)
        pulls = server.requests[RequestCode.PULL_MESSAGE]
        assert 4 < pulls < 150  # it was thousands
        assert len(told.all) < 250


def test_of_a_flood_of_events_some_are_told_and_the_others_counted():
    now = [0.0]
    floods, queue = Floods(lambda: now[0]), MessageQueue("t", "b", 0)
    told = []
    for _ in range(10_000):
        now[0] += 0.01
        left_out = floods.admit(EventKind.OFFSET_CORRECTED, queue)
        if left_out is not None:
            told.append(left_out)
    assert AT_ONCE < len(told) < AT_ONCE + 12
    assert told[:AT_ONCE] == [0] * AT_ONCE
    assert 5_000 < sum(told) + len(told) <= 10_000
    assert floods.admit(EventKind.OFFSET_CORRECTED, MessageQueue("t", "b", 1)) == 0  # another queue
    now[0] += 300
    assert floods.admit(EventKind.OFFSET_CORRECTED, queue) == 10_000 - sum(told) - len(told)
    assert [floods.admit(EventKind.OFFSET_CORRECTED, queue) for _ in range(5)] == [0] * 5


def test_what_users_cause_is_told_each_time():
    floods = Floods(lambda: 0.0)
    assert {floods.admit(EventKind.MESSAGE_STUCK, None) for _ in range(10_000)} == {0}
