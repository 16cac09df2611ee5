"""Pausing and resuming: nothing comes meanwhile, and nothing is passed over."""

from __future__ import annotations

import asyncio
import time

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConfigError, PushConsumer
from tests.consuming import Seen, consuming, until

WRONG = [[1], ["orders"], "orders", [None], 7]


@pytest.mark.parametrize("only_some", [False, True])
def test_nothing_comes_while_all_or_some_queues_are_paused(embedded, topic, group, only_some):
    """Not even the answers of pulls that a broker holds already."""
    embedded.create_topic(topic, queues=4)
    embedded.send(topic, lambda number: b"before%d" % number, count=4)
    with consuming(embedded, topic, group, rebalance_interval_s=20) as (consumer, seen):
        seen.wait_for(4)
        queues = [queue for queue in consumer.progress() if queue.topic == topic]
        paused = [queue for queue in queues if queue.queue_id < 2 or not only_some]
        consumer.pause(paused if only_some else None)
        assert [queue for queue in queues if consumer.progress()[queue].paused] == paused
        for number in range(3):
            for queue_id in range(4):
                embedded.send(topic, b"q%d m%d" % (queue_id, number), queue_id=queue_id)
        if only_some:
            seen.wait(lambda seen: len(seen.bodies) == 4 + 2 * 3)
        time.sleep(0.5)  # for what must not come
        assert not [message for message in seen.messages[4:] if message.queue in paused]
        consumer.resume(paused if only_some else None)
        seen.wait_for(4 + 12)
        assert max(seen.places.values()) == 1
    assert embedded.committed(group, topic) == dict.fromkeys(range(4), 4)


def test_pausing_and_resuming_again_and_again_loses_and_repeats_nothing(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    with consuming(embedded, topic, group, Seen(lambda message: time.sleep(0.001)), max_span=64) as (consumer, seen):
        for number in range(40):
            embedded.send(topic, lambda count, number=number: b"m%d" % (number * 10 + count), count=10)
            consumer.pause()
            consumer.resume()
        seen.wait_for(400)
        until(lambda: sum(each.committed or 0 for each in consumer.progress().values()) == 400, "all count")
    assert max(seen.places.values()) == 1
    assert embedded.committed(group, topic) == {0: 200, 1: 200}


@pytest.mark.parametrize("queues", WRONG)
def test_what_is_no_queue_is_refused(embedded, group, queues):
    with PushConsumer(group, name_server=embedded.name_server) as consumer:
        for call in (consumer.pause, consumer.resume):
            with pytest.raises(ConfigError, match=r"queues=.*MessageQueues"):
                call(queues)

    async def main():
        async with AsyncPushConsumer(group, name_server=embedded.name_server) as consumer:
            for call in (consumer.pause, consumer.resume):
                with pytest.raises(ConfigError, match=r"queues=.*MessageQueues"):
                    await call(queues)

    asyncio.run(main())
