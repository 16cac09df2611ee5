"""A broker lets a member call its listener with one message, for a user of an admin tool."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConsumerState, Retry
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consumer.orders import GROUP, TOPIC, listener_of
from tests.consuming import QUICK, RecordingListener, until
from tests.real_brokers.remoting import Peer


def consume_directly(orders, consumer):
    """Ask the broker to let a member consume the last message, and return its response."""
    fields = {
        "consumerGroup": GROUP,
        "clientId": consumer.client_id,
        "topic": TOPIC,
        "brokerName": "broker-a",
        "msgId": orders.cluster.messages(TOPIC)[-1].offset_message_id,
    }
    with closing(Peer(orders.broker.address)) as peer:
        answer = peer.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)
    assert answer.code == 0, answer.remark
    return fastjson.loads(answer.body)


@pytest.mark.parametrize("orderly", [False, True])
def test_an_async_listener_runs_on_its_own_loop(orders, orderly):
    """Objects that it shares with its other calls, such as connections and locks, belong to that loop."""
    loops, seen = [], RecordingListener()

    async def listen(message):
        loops.append((asyncio.get_running_loop(), threading.current_thread().name))
        seen(message)

    with orders.consuming(listen, orderly=orderly) as (consumer, _):
        orders.send(b"x")
        seen.wait(lambda _: len(seen.messages) == 1)
        assert consume_directly(orders, consumer)["consumeResult"] == "CR_SUCCESS"
        assert len(seen.messages) == 2
        assert loops[0] == loops[1]


def test_an_async_consumer_runs_it_on_the_loop_of_its_user(orders):
    loops = []

    async def main():
        async def listen(message):
            loops.append(asyncio.get_running_loop())

        consumer = AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server, **QUICK)
        await consumer.subscribe(TOPIC, listen)
        async with consumer:
            orders.send(b"x")
            await asyncio.to_thread(until, lambda: loops, "it came")
            await asyncio.to_thread(consume_directly, orders, consumer)
        assert loops == 2 * [asyncio.get_running_loop()]

    asyncio.run(main())


class Quit(BaseException):
    pass


DEEDS = [ValueError("broken"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Quit(), Retry(), True]


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("deed", DEEDS, ids=repr)
def test_each_failure_of_a_listener_is_reported(orders, kind, deed):
    direct = threading.Event()

    def judge(message):
        if direct.is_set() and isinstance(deed, BaseException):
            raise deed
        return deed if direct.is_set() else None

    seen = RecordingListener(judge)
    with orders.consuming(listener_of(kind, seen)) as (consumer, _):
        orders.send(b"x")
        seen.wait_for(1)
        direct.set()
        result = consume_directly(orders, consumer)
        direct.clear()
        if isinstance(deed, BaseException):
            assert result["consumeResult"] == "CR_THROW_EXCEPTION"
            assert type(deed).__name__ in result["remark"]
        else:
            assert result["consumeResult"] == "CR_LATER"
        orders.send(b"y")
        seen.wait(lambda _: b"y" in seen.bodies)
        assert consumer.state is ConsumerState.RUNNING
