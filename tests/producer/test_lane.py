"""Messages in a lane keep their order with any broker, and wait only as long as necessary."""

from __future__ import annotations

import time
from concurrent.futures import wait

import pytest

from pyrocket_consumer import MessageQueue, SendError
from pyrocket_consumer.producer import Producer
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, answer, close_connection, delay, delay_request, drop, handle_and_close
from tests.producer.programs import within
from tests.real_brokers import wait_until

SEND = RequestCode.SEND_MESSAGE_V2
A = MessageQueue("orders", "broker-a", 0)

pinned = pytest.mark.parametrize("pin", [{"sharding_key": "key"}, {"queue": A}], ids=["key", "queue"])


@pytest.fixture
def producer(embedded):
    """A producer with the default options."""
    with Producer(name_server=embedded.name_server) as producer:
        producer.send("orders", b"first", queue=A)
        yield producer


def stored(embedded):
    """Return the bodies of the stored messages, in the order of their queue."""
    return [message.body for message in embedded.messages("orders") if message.body != b"first"]


@pinned
def test_a_burst_takes_as_long_as_the_broker_needs(embedded, producer, pin):
    embedded.broker("broker-a").on(SEND, delay(0.005), times=None)
    bodies = [b"%d" % number for number in range(1000)]
    futures = [producer.send_async("orders", body, timeout_s=1, **pin) for body in bodies]  # 5 s at the least
    producer.flush()
    assert [future.exception(0) for future in futures if future.exception(0)] == []
    assert stored(embedded) == bodies


@pinned
def test_closing_waits_for_a_burst(embedded, pin):
    embedded.broker("broker-a").on(SEND, delay(0.005), times=None)
    with Producer(name_server=embedded.name_server, send_timeout_s=0.5) as producer:
        futures = [producer.send_async("orders", b"%d" % number, **pin) for number in range(300)]
    assert all(future.result(0) for future in futures)


def test_all_messages_of_a_blocked_lane_fail_in_one_timeout(embedded, producer):
    embedded.broker("broker-a").on(SEND, drop, times=None)
    with within(10):
        futures = [producer.send_async("orders", b"%d" % number, queue=A, timeout_s=1) for number in range(50)]
        producer.flush()
    reasons = [str(future.exception(0)) for future in futures]
    assert "no response from" in reasons[0]
    assert all("waited 1 s for messages before it" in reason for reason in reasons[1:])


def test_the_error_mentions_a_missing_connection(embedded, producer):
    """No one accepts or refuses the connection, like a host that drops packets."""
    embedded.name_server_node.on(None, drop, times=None)
    with pytest.raises(SendError, match="gave up after 0.5 s: neither a route nor a connection was available"):
        producer.send("unknown", b"x", sharding_key="key", timeout_s=0.5)


def test_lanes_blocked_together_continue_together(embedded):
    with Producer(name_server=embedded.name_server, call_timeout_s=0.3) as producer:
        keys = [f"k{number}" for number in range(20)]
        for key in keys:
            producer.send("orders", b"first", sharding_key=key)
        embedded.broker("broker-a").on(SEND, drop, times=20)
        lost = [producer.send_async("orders", b"lost", sharding_key=key, timeout_s=0.3) for key in keys]
        assert {type(future.exception(30)) for future in lost} == {SendError}
        futures = [producer.send_async("orders", b"next", sharding_key=key, timeout_s=20) for key in keys]
        assert {future.result(30).attempts for future in futures} == {1}


def test_a_send_that_waits_in_a_lane_returns_within_its_timeout(embedded, producer, gate):
    held = producer.send_async("orders", b"held", queue=A, timeout_s=60)
    gate.wait_held()
    with within(5), pytest.raises(SendError, match="waited 0.3 s for messages before it"):
        producer.send("orders", b"late", queue=A, timeout_s=0.3)
    last = producer.send_async("orders", b"last", queue=A, timeout_s=60)
    gate.open()
    assert held.result(30) and last.result(30)
    assert stored(embedded) == [b"held", b"last"]


def test_a_message_after_failed_ones_is_sent(embedded, producer):
    embedded.broker("broker-a").on(SEND, drop)
    failed = [
        producer.send_async("orders", b"%d" % number, sharding_key="key", timeout_s=timeout_s)
        for number, timeout_s in ((1, 2), (2, 0.2))  # the second deadline is before the first one
    ]
    later = producer.send_async("orders", b"3", sharding_key="key", timeout_s=30)
    assert {type(future.exception(30)) for future in failed} == {SendError}
    assert later.result(30).queue_offset == 0


@pinned
@pytest.mark.parametrize("late", [delay_request(1.5), delay(1.5)], ids=["request", "answer"])
def test_a_message_that_timed_out_is_not_overtaken_by_the_next(embedded, producer, pin, late):
    embedded.broker("broker-a").on(SEND, late)
    with pytest.raises(SendError, match="no response"):
        producer.send("orders", b"1", timeout_s=0.5, **pin)
    second = producer.send_async("orders", b"2", timeout_s=10, **pin)
    assert second.result(30)
    assert stored(embedded) == [b"1", b"2"]


def test_by_default_a_message_that_timed_out_is_not_overtaken(embedded, producer):
    embedded.broker("broker-a").on(SEND, delay_request(4))
    futures = [producer.send_async("orders", body, sharding_key="key") for body in (b"1", b"2")]
    assert {type(future.exception(30)) for future in futures} == {SendError}  # the second waited as long as the first
    assert producer.send("orders", b"3", sharding_key="key")
    assert stored(embedded) == [b"1", b"3"]


@pinned
@pytest.mark.parametrize("fault", [handle_and_close, close_connection, answer(2, "busy"), answer(14, "disk full")])
def test_a_retried_message_keeps_its_position(embedded, producer, pin, fault):
    embedded.broker("broker-a").on(SEND, fault, when=lambda request: request.body == b"3")
    bodies = [b"%d" % number for number in range(10)]
    results = [future.result(30) for future in [producer.send_async("orders", body, **pin) for body in bodies]]
    assert list(dict.fromkeys(stored(embedded))) == bodies
    copies = 2 if fault in (handle_and_close, close_connection) else 1
    assert [each.attempts for each in results] == [1, 1, 1, copies, 1, 1, 1, 1, 1, 1]
    assert len(stored(embedded)) == 10 + (fault is handle_and_close)


@pinned
def test_a_silent_connection_is_closed_and_its_message_retried(embedded, pin):
    with Producer(name_server=embedded.name_server, call_timeout_s=0.3, send_attempts=20) as producer:
        producer.send("orders", b"first", **pin)
        embedded.broker("broker-a").on(SEND, drop, times=2)
        with within(20):
            assert producer.send("orders", b"x", timeout_s=6, **pin).attempts == 3
        assert stored(embedded) == [b"x"]


@pinned
def test_without_a_response_the_connection_ends_before_the_next(embedded, pin):
    """The connection ends although it receives other data. Its request could be stored after the next message."""
    broker, began = embedded.broker("broker-a"), time.monotonic()

    def goes_with_its_connection(exchange):
        exchange.later(4, lambda: exchange.handle(exchange.answer) if exchange.connection.open else None)

    with Producer(name_server=embedded.name_server, call_timeout_s=0.5) as producer:
        producer.send("orders", b"first", **pin)
        broker.on(SEND, goes_with_its_connection, when=lambda request: request.body == b"1")
        first = producer.send_async("orders", b"1", timeout_s=1, **pin)
        second = producer.send_async("orders", b"2", timeout_s=20, **pin)
        while not second.done():
            assert producer.send("orders", b"first", sharding_key="another", timeout_s=20)
        assert second.result(0)
    assert isinstance(first.exception(0), SendError)
    wait_until(lambda: time.monotonic() > began + 5, "the first would have been handled")
    assert stored(embedded) == [b"2"]


@pinned
def test_a_permanent_failure_is_immediate_and_the_next_continues(embedded, producer, pin):
    embedded.broker("broker-a").on(SEND, answer(13, "illegal"), when=lambda request: request.body == b"bad")
    futures = [producer.send_async("orders", body, **pin) for body in (b"1", b"bad", b"2")]
    assert "illegal" in str(futures[1].exception(30))
    assert len(futures[1].exception(0).attempts) == 1
    assert futures[0].result(30).attempts == futures[2].result(30).attempts == 1
    assert stored(embedded) == [b"1", b"2"]


def test_close_ends_although_a_lane_waits(embedded, producer):
    embedded.broker("broker-a").on(SEND, drop)
    with pytest.raises(SendError):
        producer.send("orders", b"1", sharding_key="key", timeout_s=0.2)
    waiting = producer.send_async("orders", b"2", sharding_key="key", timeout_s=1)
    with within(10):
        producer.close()
    assert waiting.done()


@pinned
def test_a_broker_that_was_killed_is_waited_for_in_order(embedded, producer, pin):
    broker = embedded.broker("broker-a")
    broker.on(SEND, delay(0.01), times=None)
    bodies = [b"%03d" % number for number in range(200)]
    futures = [producer.send_async("orders", body, **pin) for body in bodies]
    wait_until(lambda: len(stored(embedded)) > 20, "some are stored")
    broker.kill()
    broker.start()
    assert all(future.result(30) for future in futures)
    assert list(dict.fromkeys(stored(embedded))) == bodies


def test_lanes_do_not_wait_for_each_other(embedded, producer):
    gate = Gate()
    embedded.broker("broker-a").on(SEND, gate, times=None, when=lambda request: request.body == b"held")
    held = producer.send_async("orders", b"held", sharding_key="a", timeout_s=60)
    gate.wait_held()
    assert producer.send("orders", b"x", sharding_key="b")
    assert producer.send("orders", b"x")
    gate.open()
    assert held.result(30)


def test_messages_are_serial_in_a_lane_and_concurrent_across_lanes(embedded, producing, gate):
    producer = producing(embedded, send_timeout_s=30)
    first = [producer.send_async("orders", b"a%d" % number, sharding_key="a") for number in range(5)]
    other = producer.send_async("orders", b"b", sharding_key="b")
    chosen = [producer.send_async("orders", b"c%d" % number, queue=A) for number in range(3)]
    assert sorted(request.body for request in gate.wait_held(3)) == [b"a0", b"b", b"c0"]
    gate.open()
    wait([*first, other, *chosen], timeout=30)
    for futures in (first, chosen):
        offsets = [future.result(0).queue_offset for future in futures]
        assert offsets == sorted(offsets)
