"""Responses that are invalid, lead nowhere, are nested too deep, or are too large: the client continues with others."""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from pyrocket_consumer import ConfigError, ConsumerState, ProducerConfig, ProtocolError, PushConsumer
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.producer import Producer
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import EmbeddedCluster, Exchange, answer
from tests.consumer.orders import GROUP, TOPIC, Orders
from tests.consuming import Events, RecordingListener, until
from tests.for_each import for_each
from tests.hostile.attacks import Found, Moved, NothingAtOnce, ResetEndlessly, record
from tests.hostile.server import BROKER, MAX_OFFSET, Attack, HostileServer, pulled


@contextmanager
def attacked_by(attack, tmp_path, **options):
    """Run a consumer with default options between an honest broker and one that attacks."""
    seen, events = RecordingListener(), Events()
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=2)
        honest = cluster.brokers[0]
        with HostileServer(TOPIC, (honest.name, honest.address), honest_queues=2) as server:
            server.do(attack)
            options |= {"name_server": server.name_server, "consume_from": "first", "offset_store_dir": tmp_path}
            consumer = PushConsumer(GROUP, on_event=events, **options)
            consumer.subscribe(TOPIC, seen)
            with consumer:
                cluster.send(TOPIC, b"honest")
                yield consumer, server, seen, events
                cluster.send(TOPIC, b"honest to the end")
                seen.wait(lambda seen: {b"honest", b"honest to the end"} <= set(seen.bodies))
                assert consumer.state is ConsumerState.RUNNING


class Leads(Attack):
    """Responds to pulls with another offset, until the test stops it."""

    def __init__(self, to, code):
        self.to, self.code = to, code

    def respond(self, peer, command):
        is_pull = command.code == RequestCode.PULL_MESSAGE
        return pulled(command, self.code, nextBeginOffset=self.to) if is_pull else NotImplemented


CODES = [ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY]


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("to", [2**63 - 1, 2**63, 2**64, 10**30, -1, MAX_OFFSET + 100_000])
def test_an_offset_that_no_queue_has_is_not_followed(to, code, model, tmp_path):
    with attacked_by(Leads(to, code), tmp_path, message_model=model) as (consumer, server, _, events):
        event = events.wait_for(EventKind.ANSWER_REFUSED)
        assert event.queue.broker_name == BROKER
        pulls = server.requests[RequestCode.PULL_MESSAGE]
        server.do(Attack())
        until(lambda: server.requests[RequestCode.PULL_MESSAGE] > pulls, "the next pull")
        offsets = [each.next_to_pull for queue, each in consumer.progress().items() if queue.broker_name == BROKER]
        assert set(offsets) <= {0}
    assert all(offset <= MAX_OFFSET for offset in server.commits)


class OutOfOrder(Found):
    def records(self, offset, queue_id):
        record_offsets = (offset, offset + 7, offset + 3)
        return b"".join(record(field, b"x", topic=TOPIC, queue_id=queue_id) for field in record_offsets)


def test_messages_out_of_order_are_pulled_again(tmp_path):
    with attacked_by(OutOfOrder(), tmp_path) as (_, _, seen, events):
        assert "out of order" in events.wait_for(EventKind.ANSWER_REFUSED).text
        assert b"x" not in seen.bodies


@pytest.mark.parametrize("attack", [Moved, ResetEndlessly, NothingAtOnce])
def test_a_broker_that_moves_offsets_in_circles_delays_no_other(attack, tmp_path):
    with attacked_by(attack(), tmp_path) as (_, server, _, events):
        time.sleep(4)
        pulls = server.requests[RequestCode.PULL_MESSAGE]
        assert 4 < pulls < 150  # it was thousands
        assert len(events.all) < 250


# --- JSON that is nested too deep


def nested(depth: int, kind: str) -> bytes:
    return b"[" * depth + b"]" * depth if kind == "lists" else b'{"a":' * depth + b"1" + b"}" * depth


def deep_header(depth: int, kind: str, field: str):
    """Return a fault: a response whose header has one field of this depth."""

    def apply(exchange: Exchange) -> None:
        deep, opaque = nested(depth, kind), exchange.request.opaque
        texts = {
            "extFields": b'{"code":0,"flag":1,"opaque":%d,"extFields":{"a":%b}}' % (opaque, deep),
            "code": b'{"code":%b,"flag":1,"opaque":%d}' % (deep, opaque),
            "remark": b'{"code":0,"flag":1,"opaque":%d,"remark":%b}' % (opaque, deep),
        }
        header = texts[field]
        exchange.connection.write(struct.pack(">II", 4 + len(header), len(header)) + header)

    return apply


def deep_body(depth: int, kind: str):
    """Return a fault: a response whose body has this depth in place of its tables."""
    deep = nested(depth, kind)
    names = [b'"%b":%b' % (name, deep) for name in (b"queueDatas", b"brokerDatas", b"consumerIdList", b"lockOKMQSet")]
    return answer(0, body=b"{%b}" % b",".join(names))


FAULTS = {
    f"{field} of {depth} {kind}": deep_header(depth, kind, field)
    for depth, kind in ((300, "lists"), (1000, "lists"), (1000, "objects"), (100_000, "lists"))
    for field in ("extFields", "code", "remark")
} | {f"body of {depth} lists": deep_body(depth, "lists") for depth in (300, 1000, 100_000)}


@pytest.mark.parametrize("what", FAULTS)
def test_after_a_deep_response_another_name_server_is_asked(what):
    requested = []

    def judge(node):
        def apply(exchange: Exchange) -> None:
            requested.append(node)
            FAULTS[what](exchange) if requested[0] is node else exchange.handle(exchange.answer)

        return apply

    with EmbeddedCluster(name_servers=2) as cluster:
        orders, seen = Orders(cluster, messages=3), RecordingListener()
        for node in cluster.name_server_nodes:
            node.on(None, judge(node), times=None)
        with orders.consumer(seen, consume_from="first") as consumer:
            seen.wait_for(3)
            assert consumer.state is ConsumerState.RUNNING
        assert len(set(map(id, requested))) == 2


@pytest.mark.parametrize("what", FAULTS)
def test_deep_responses_of_a_broker_stop_no_other(what):
    with EmbeddedCluster(brokers=2) as cluster:
        orders, seen = Orders(cluster, queues=4), RecordingListener()
        (good, bad), requested = cluster.brokers, Counter()

        def apply(exchange: Exchange) -> None:
            request = exchange.request
            requested[request.code, request.fields.get("topic"), request.fields.get("queueId")] += 1
            FAULTS[what](exchange)

        with orders.consumer(seen, consume_from="first") as consumer:
            orders.fill(3, 0, broker_name=good.name)
            orders.fill(3, 3, broker_name=bad.name)
            seen.wait_for(6)
            bad.on(None, apply, times=None)
            bad.close_connections()
            until(lambda: max(requested.values(), default=0) >= 3, "a request is repeated")
            orders.fill(3, 6, broker_name=good.name)
            orders.fill(3, 9, broker_name=bad.name)
            seen.wait_for(9)
            assert consumer.state is ConsumerState.RUNNING
            bad.clear_faults()
            seen.wait_for(12)
            assert consumer.state is ConsumerState.RUNNING


# --- frames that are too large


@for_each("value", [0, 65535, 2**30 + 1, 1e6, True, "16777216", None])
def test_an_invalid_frame_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"max_frame_bytes=.* from 65536 to 1073741824"):
        ProducerConfig(name_server="127.0.0.1:1", max_frame_bytes=value)


def test_a_message_larger_than_a_frame_is_an_error(orders, caplog):
    with Producer(name_server=orders.cluster.name_server, max_frame_bytes=64 * 1024) as producer:
        producer.send(TOPIC, b"small")
        with pytest.raises(ProtocolError, match=r"frame of \d+ bytes; at most max_frame_bytes=65536 are sent"):
            producer.send(TOPIC, os.urandom(65536))
        assert producer.send(TOPIC, b"small").queue.topic == TOPIC
    assert "surprise" not in caplog.text


def test_a_response_larger_than_a_frame_is_reported():
    """The event names the option, and other queues continue."""
    with EmbeddedCluster(brokers=2) as cluster:
        orders = Orders(cluster)
        first, second = (broker.name for broker in cluster.brokers)
        orders.send(os.urandom(100_000), broker_name=first)
        orders.fill(3, broker_name=second)
        with orders.consuming(max_frame_bytes=64 * 1024) as (consumer, seen):
            seen.wait_for(3)
            assert "max_frame_bytes=65536" in str(orders.events.wait_for("answer-refused"))
            assert consumer.state is ConsumerState.RUNNING
        with orders.consuming(seen):
            seen.wait_for(4)
