"""Wait for earlier messages without closing."""

from __future__ import annotations

import queue

import pytest

from pyrocket_consumer.errors import RequestTimeout, SendError
from pyrocket_consumer.producer import Producer, ProducerState
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import Gate, answer, drop
from tests.for_each import for_each
from tests.producer.programs import in_a_thread, in_threads, within

SEND = RequestCode.SEND_MESSAGE_V2


def test_after_a_flush_each_message_has_its_result(embedded, producer):
    futures = [producer.send_async("orders", b"%d" % number) for number in range(500)]
    producer.flush()
    assert all(future.done() for future in futures)
    assert len(embedded.messages("orders")) == len({future.result(0).message_id for future in futures}) == 500
    producer.send("orders", b"more")


def test_a_flush_waits_only_for_earlier_messages(embedded, producing):
    gate, later = Gate(), Gate()
    for body, own in ((b"before", gate), (b"after", later)):
        embedded.broker("broker-a").on(SEND, own, times=None, when=lambda request, body=body: request.body == body)
    producer = producing(embedded, send_timeout_s=60)
    before = [producer.send_async("orders", b"before", sharding_key="a") for _ in range(3)]
    gate.wait_held(1)
    with in_a_thread(producer.flush) as flushing:
        flushing.join(0.2)
        assert flushing.is_alive()
        gate.open()
        after = producer.send_async("orders", b"after", sharding_key="b")
    assert [future.done() for future in (*before, after)] == [True, True, True, False]
    later.open()
    assert after.result(30)


def test_a_flush_that_times_out_reports_the_unfinished_messages(embedded, producing, gate):
    producer = producing(embedded, send_timeout_s=60)
    futures = [producer.send_async("orders", b"x") for _ in range(7)]
    gate.wait_held(7)
    with within(20), pytest.raises(RequestTimeout, match=r"7 of 7 messages .* within 0\.2 s"):
        producer.flush(timeout_s=0.2)
    gate.open()
    producer.flush(timeout_s=30)
    assert [future.result(0).queue_offset for future in futures]


def test_a_flush_ends_with_the_deadlines_of_the_messages(embedded, producing):
    producer = producing(embedded, send_timeout_s=0.3)
    embedded.broker("broker-a").on(SEND, drop, times=None)
    futures = [producer.send_async("orders", b"x") for _ in range(3)]
    producer.flush()
    for future in futures:
        with pytest.raises(SendError):
            future.result(0)


def test_a_refused_message_counts_as_finished(embedded, producer):
    embedded.broker("broker-a").on(SEND, answer(ResponseCode.MESSAGE_ILLEGAL, "too odd"))
    future = producer.send_async("orders", b"x")
    producer.flush()
    assert "too odd" in str(future.exception(0))


def test_a_flush_without_messages_returns_at_once(embedded):
    producer = Producer(name_server=embedded.name_server)
    producer.flush()
    assert producer.state is ProducerState.CREATED
    producer.send("orders", b"x")
    producer.flush(timeout_s=0.001)
    producer.close()
    producer.flush()


def test_a_callback_may_flush(producer):
    outcomes = queue.SimpleQueue()

    def send_another(_):
        future = producer.send_async("orders", b"second")
        producer.flush()
        outcomes.put(future.done())

    producer.send_async("orders", b"first").add_done_callback(send_another)
    assert outcomes.get(timeout=30)


def test_threads_may_flush_concurrently(embedded, producing, gate):
    producer = producing(embedded, send_timeout_s=60)
    futures = [producer.send_async("orders", b"x") for _ in range(5)]
    gate.wait_held(5)
    with in_threads(producer.flush, 4):
        gate.open()
    assert all(future.done() for future in futures)


@for_each("wrong", [0, -1, "3", True])
def test_a_wrong_timeout_is_refused(producer, wrong):
    with pytest.raises(ValueError, match="timeout_s"):
        producer.flush(timeout_s=wrong)


def test_closing_ends_a_flush(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=60)
    future = producer.send_async("orders", b"x")
    gate.wait_held(1)
    outcomes = []
    with in_a_thread(lambda: outcomes.append(producer.flush())):
        producer.close(timeout_s=0.2)
    assert outcomes == [None]
    assert isinstance(future.exception(0), SendError)
