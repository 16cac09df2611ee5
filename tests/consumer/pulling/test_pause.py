"""Pausing and resuming: nothing comes meanwhile, and nothing is passed over."""

from __future__ import annotations

import asyncio
import time

import pytest

from pyrocket_consumer import ConfigError
from tests.consumer.orders import TOPIC
from tests.consuming import Seen, until

WRONG = [[1], ["orders"], "orders", [None], 7]


@pytest.mark.parametrize("only_some", [False, True])
def test_nothing_comes_while_all_or_some_queues_are_paused(orders, only_some):
    """Not even the answers of pulls that a broker holds already."""
    orders.make(queues=4)
    orders.send(lambda number: b"before%d" % number, count=4)
    with orders.consuming(rebalance_interval_s=20) as (consumer, seen):
        seen.wait_for(4)
        queues = [queue for queue in consumer.progress() if queue.topic == TOPIC]
        paused = [queue for queue in queues if queue.queue_id < 2 or not only_some]
        consumer.pause(paused if only_some else None)
        assert [queue for queue in queues if consumer.progress()[queue].paused] == paused
        for number in range(3):
            for queue_id in range(4):
                orders.send(b"q%d m%d" % (queue_id, number), queue_id=queue_id)
        if only_some:
            seen.wait(lambda seen: len(seen.bodies) == 4 + 2 * 3)
        time.sleep(0.5)  # for what must not come
        assert not [message for message in seen.messages[4:] if message.queue in paused]
        consumer.resume(paused if only_some else None)
        seen.wait_for(4 + 12)
        assert max(seen.places.values()) == 1
    assert orders.committed == dict.fromkeys(range(4), 4)


def test_pausing_and_resuming_again_and_again_loses_and_repeats_nothing(orders):
    orders.make(queues=2)
    with orders.consuming(Seen(lambda message: time.sleep(0.001)), max_span=64) as (consumer, seen):
        for number in range(40):
            orders.send(lambda count, number=number: b"m%d" % (number * 10 + count), count=10)
            consumer.pause()
            consumer.resume()
        seen.wait_for(400)
        until(lambda: sum(each.committed or 0 for each in consumer.progress().values()) == 400, "all count")
    assert max(seen.places.values()) == 1
    assert orders.committed == {0: 200, 1: 200}


@pytest.mark.parametrize("queues", WRONG)
def test_what_is_no_queue_is_refused(orders, queues):
    with orders.consumer() as consumer:
        for call in (consumer.pause, consumer.resume):
            with pytest.raises(ConfigError, match=r"queues=.*MessageQueues"):
                call(queues)

    async def main():
        async with Asyncorders.consumer() as consumer:
            for call in (consumer.pause, consumer.resume):
                with pytest.raises(ConfigError, match=r"queues=.*MessageQueues"):
                    await call(queues)

    asyncio.run(main())
