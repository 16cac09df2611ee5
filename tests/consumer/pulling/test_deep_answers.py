"""Servers whose JSON is nested deeper than anybody needs: what they say fails; who listens goes on with the others."""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from pyrocket_consumer import ConsumerState, PushConsumer
from pyrocket_consumer.testing import EmbeddedCluster, Exchange, answer
from tests.consuming import Seen, until


def nested(depth: int, kind: str) -> bytes:
    return b"[" * depth + b"]" * depth if kind == "lists" else b'{"a":' * depth + b"1" + b"}" * depth


def headed(header: bytes) -> bytes:
    return struct.pack(">II", 4 + len(header), len(header)) + header


def deep_header(depth: int, kind: str, place: str):
    """A fault: an answer whose header is as deep as that in one of its fields."""

    def apply(exchange: Exchange) -> None:
        deep, opaque = nested(depth, kind), exchange.request.opaque
        texts = {
            "extFields": b'{"code":0,"flag":1,"opaque":%d,"extFields":{"a":%b}}' % (opaque, deep),
            "code": b'{"code":%b,"flag":1,"opaque":%d}' % (deep, opaque),
            "remark": b'{"code":0,"flag":1,"opaque":%d,"remark":%b}' % (opaque, deep),
        }
        exchange.connection.write(headed(texts[place]))

    return apply


def deep_body(depth: int, kind: str):
    """A fault: the answer has a body as deep as that, where its tables should be."""
    deep = nested(depth, kind)
    names = [b'"%b":%b' % (name, deep) for name in (b"queueDatas", b"brokerDatas", b"consumerIdList", b"lockOKMQSet")]
    return answer(0, body=b"{%b}" % b",".join(names))


FAULTS = {
    f"{place} of {depth} {kind}": deep_header(depth, kind, place)
    for depth, kind in ((300, "lists"), (1000, "lists"), (1000, "objects"), (100_000, "lists"))
    for place in ("extFields", "code", "remark")
} | {f"body of {depth} lists": deep_body(depth, "lists") for depth in (300, 1000, 100_000)}


def consuming_by_default(cluster: EmbeddedCluster, seen: Seen) -> PushConsumer:
    consumer = PushConsumer("g", name_server=cluster.name_server, consume_from="first")
    consumer.subscribe("t", seen)
    return consumer.start()


def send(cluster: EmbeddedCluster, first: int, broker_name: str) -> None:
    cluster.send("t", lambda number: b"m%d" % (first + number), count=3, broker_name=broker_name)


@pytest.mark.parametrize("what", FAULTS)
def test_a_consumer_goes_on_with_the_name_server_that_answers_well(what):
    asked_first = []

    def judge(node):
        def apply(exchange: Exchange) -> None:
            asked_first.append(node)
            if asked_first[0] is node:
                FAULTS[what](exchange)
            else:
                exchange.handle(exchange.answer)

        return apply

    with EmbeddedCluster(name_servers=2) as cluster:
        cluster.create_topic("t")
        send(cluster, 0, "broker-a")
        for node in cluster.name_server_nodes:
            node.on(None, judge(node), times=None)
        seen = Seen()
        with consuming_by_default(cluster, seen) as consumer:
            seen.wait_for(3)
            assert consumer.state is ConsumerState.RUNNING
        assert len(set(map(id, asked_first))) == 2


@pytest.mark.parametrize("what", FAULTS)
def test_a_consumer_goes_on_with_the_broker_that_answers_well(what):
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("t")
        good, bad = (broker.name for broker in cluster.brokers)
        seen = Seen()
        with consuming_by_default(cluster, seen) as consumer:
            send(cluster, 0, good)
            send(cluster, 3, bad)
            seen.wait_for(6)
            asked: Counter[tuple[int, str | None, str | None]] = Counter()

            def apply(exchange: Exchange) -> None:
                request = exchange.request
                asked[request.code, request.fields.get("topic"), request.fields.get("queueId")] += 1
                FAULTS[what](exchange)

            cluster.broker(bad).on(None, apply, times=None)
            cluster.broker(bad).close_connections()
            until(lambda: max(asked.values(), default=0) >= 3, "something is asked again")
            send(cluster, 6, good)
            send(cluster, 9, bad)
            seen.wait_for(9)
            assert consumer.state is ConsumerState.RUNNING
            cluster.broker(bad).clear_faults()
            seen.wait_for(12)
            assert consumer.state is ConsumerState.RUNNING
