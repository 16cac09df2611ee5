"""Many queues in one consumer: they begin quickly, share its memory, and none of them waits for ever."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.testing import Gate
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import until

QUEUES = 100
BODY = 6_000
PULL = 32 * (BODY + 300)  # bytes of an answer with default options, at most 300 of a message besides its body


class Slow:
    """A listener that waits until it is let go, then takes a millisecond; it keeps places only."""

    def __init__(self, blocks=lambda message: True) -> None:
        self.places: Counter[tuple[int, int]] = Counter()
        self._blocks = blocks
        self._go_on = threading.Event()

    def __call__(self, message) -> None:
        if self._blocks(message):
            self._go_on.wait(60)
        time.sleep(0.001)
        self.places[message.queue.queue_id, message.queue_offset] += 1

    def let_go(self) -> None:
        self._go_on.set()


def cached(consumer: PushConsumer) -> int:
    return sum(each.cached_bytes for each in consumer.progress().values())


def consumer_of(cluster, topic, group, listener, limit) -> PushConsumer:
    consumer = PushConsumer(
        group, name_server=cluster.name_server, consume_from="first", max_cached_bytes=limit, shutdown_timeout_s=1
    )
    consumer.subscribe(topic, listener)
    return consumer


@pytest.mark.live
def test_the_memory_of_all_queues_together_is_bounded_and_each_has_its_turn(embedded, topic, group):
    """A share of the limit would be far less than one pull brings."""
    limit = 1_000_000
    embedded.create_topic(topic, queues=QUEUES)
    embedded.send(topic, bytes(BODY), count=QUEUES * 32)
    slow = Slow()
    with consumer_of(embedded, topic, group, slow, limit) as consumer:
        try:
            until(lambda: cached(consumer) >= limit, "what there is room for is used")
            last = 0
            while last != (last := cached(consumer)):
                time.sleep(0.3)
            assert last <= limit + PULL
            slow.let_go()
            most = 0

            def all_is_consumed() -> bool:
                nonlocal most
                most = max(most, cached(consumer))
                return len(slow.places) == QUEUES * 32

            until(all_is_consumed, "each queue has its turn")
            assert most <= limit + 2 * PULL
        finally:
            slow.let_go()
    assert set(slow.places.values()) == {1}


def test_queues_that_are_stuck_stop_no_other_even_if_they_hold_all_there_is_room_for(embedded, topic, group):
    embedded.create_topic(topic, queues=QUEUES)
    embedded.send(topic, bytes(BODY), count=QUEUES * 8)
    slow = Slow(lambda message: message.queue.queue_id < 10 and message.queue_offset == 0)
    with consumer_of(embedded, topic, group, slow, 200_000) as consumer:
        try:
            until(lambda: len(slow.places) == QUEUES * 8 - 10, "all but those that are stuck")
            assert cached(consumer) <= 10 * PULL
            slow.let_go()
            until(lambda: len(slow.places) == QUEUES * 8, "and those")
        finally:
            slow.let_go()
    assert set(slow.places.values()) == {1}


def test_thousands_of_queues_do_not_ask_their_broker_all_at_once(embedded, broker, topic, group):
    """Else the last calls would wait so long for their turn at the broker that they time out, and are made again."""
    embedded.create_topic(topic, queues=300)
    embedded.send(topic, b"x", count=300)
    gate, slow = Gate(), Slow(lambda message: False)

    def is_ours(command) -> bool:
        return command.fields["topic"] == topic

    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, gate, times=None, when=is_ours)
    consumer = PushConsumer(group, name_server=embedded.name_server, consume_from="first", start_wait_s=0.5)
    consumer.subscribe(topic, slow)
    with consumer:
        assert len(gate.wait_held(200)) == 200
        gate.open()
        until(lambda: len(slow.places) == 300, "all have begun")
    asked = [each for each in broker.requests(RequestCode.QUERY_CONSUMER_OFFSET) if is_ours(each.command)]
    assert len(asked) == 300
