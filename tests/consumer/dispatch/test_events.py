"""Events reach `on_event` in order, even if it raises or is slow, and do not fill the memory meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pyrocket_consumer import ConsumeResult, ConsumerState, MessageQueue, RocketError
from pyrocket_consumer.consumer.context.events import EVENT_BURST, MAX_WAITING, EventLimiter, Events
from pyrocket_consumer.model import ConsumerEvent, EventKind
from tests.consumer.orders import QUEUE, TOPIC
from tests.consuming import WAIT_S, RecordingListener, until


def test_events_that_wait_for_a_slow_on_event_are_bounded():
    passed: list[ConsumerEvent] = []
    begun, may_continue, notified = threading.Event(), threading.Event(), threading.Event()

    def on_event(event: ConsumerEvent) -> None:
        passed.append(event)
        begun.set()
        may_continue.wait(WAIT_S)
        if event.kind is EventKind.EVENTS_LEFT_OUT:
            notified.set()

    events = Events(on_event)
    events.emit(ConsumerEvent(EventKind.LISTENER_FAILED, "0"))
    assert begun.wait(WAIT_S)
    for number in range(1, MAX_WAITING + 501):
        events.emit(ConsumerEvent(EventKind.LISTENER_FAILED, str(number)))
    may_continue.set()
    assert notified.wait(WAIT_S)
    events.close()
    failed = [event.text for event in passed if event.kind is EventKind.LISTENER_FAILED]
    assert failed == [str(number) for number in range(len(failed))], "the first ones, in order"
    (left_out,) = [event for event in passed if event.kind is EventKind.EVENTS_LEFT_OUT]
    assert left_out.facts == {"count": 500}
    assert events.counts == {EventKind.LISTENER_FAILED: MAX_WAITING + 501}, "all are counted"


def test_an_on_event_that_raises_shows_its_traceback_once(caplog):
    done = threading.Event()

    def on_event(event: ConsumerEvent) -> None:
        if event.text == "2":
            done.set()
        else:
            raise ValueError(f"not {event.text}")

    events = Events(on_event)
    for number in range(3):
        events.emit(ConsumerEvent(EventKind.LISTENER_FAILED, str(number)))
    assert done.wait(WAIT_S)
    events.close()
    raised = [record for record in caplog.records if "on_event raised" in record.getMessage()]
    assert [bool(record.exc_info and record.exc_info[0]) for record in raised] == [True, False]
    assert "not 1" in raised[1].getMessage()


@pytest.mark.parametrize("result", [ConsumeResult.COMMIT, ConsumeResult.ROLLBACK])
def test_a_result_for_other_consumers_is_reported_as_such(orders, result):
    orders.send(b"m")
    with orders.consuming(lambda message: result):
        event = orders.events.wait_for("listener-result-unknown")
    assert "COMMIT and ROLLBACK are for orderly=True, auto_commit=False" in event.text


def test_each_failure_is_an_event_and_few_a_traceback_in_the_log(orders, tmp_path, caplog):
    def fails(message):
        raise ValueError("no")

    orders.send(b"m", count=500)
    with orders.consuming(fails, offset_store_dir=tmp_path, message_model="broadcasting"):
        orders.events.wait_for("message-given-up", count=500)
    for kind in ("listener-failed", "message-given-up"):
        logged = [record.getMessage() for record in caplog.records if f"event={kind}" in record.getMessage()]
        assert len(orders.events.of(kind)) == 500
        assert 20 <= len(logged) < 40


# --- `on_event`


def test_an_on_event_that_raises_is_called_again(orders):
    events = []

    def on_event(event):
        events.append(event)
        raise (SystemExit, ValueError)[len(events) % 2]

    orders.fill(3)
    with orders.consuming(on_event=on_event) as (consumer, seen):
        seen.wait_for(3)
        consumer.reset_offsets(TOPIC, "earliest")
        until(
            lambda: {str(event.kind) for event in events} >= {"queue-assigned", "offset-reset"},
            "both events were emitted",
        )
        assert consumer.state is ConsumerState.RUNNING


def test_an_on_event_that_never_returns_stops_nothing(orders):
    release = threading.Event()
    orders.fill(3)
    with orders.consuming(on_event=lambda event: release.wait(60)) as (consumer, seen):
        seen.wait_for(3)
        began = time.monotonic()
        consumer.close()
        assert time.monotonic() - began < 20
    assert orders.committed == {0: 3}
    release.set()


def test_on_event_may_close_the_consumer(orders):
    closed, seen = threading.Event(), RecordingListener()

    def on_event(event):
        if event.kind == "offset-reset":
            consumer.close()
            closed.set()

    orders.fill(1)
    consumer = orders.consumer(seen, consume_from="first", on_event=on_event)
    with consumer:
        seen.wait_for(1)
        with contextlib.suppress(RocketError):  # the close may interrupt the call
            consumer.reset_offsets(TOPIC, "earliest")
        assert closed.wait(WAIT_S)
        consumer.join(WAIT_S)
    assert consumer.state is ConsumerState.CLOSED


# --- floods


def test_a_flood_of_events_is_partly_emitted_and_fully_counted():
    now = [0.0]
    floods, admitted = EventLimiter(lambda: now[0]), []
    for _ in range(10_000):
        now[0] += 0.01
        left_out = floods.admit(EventKind.OFFSET_CORRECTED, QUEUE)
        if left_out is not None:
            admitted.append(left_out)
    assert EVENT_BURST < len(admitted) < EVENT_BURST + 12
    assert admitted[:EVENT_BURST] == [0] * EVENT_BURST
    assert 5_000 < sum(admitted) + len(admitted) <= 10_000
    assert floods.admit(EventKind.OFFSET_CORRECTED, MessageQueue(TOPIC, "broker-a", 1)) == 0  # another queue
    now[0] += 300
    assert floods.admit(EventKind.OFFSET_CORRECTED, QUEUE) == 10_000 - sum(admitted) - len(admitted)
    assert [floods.admit(EventKind.OFFSET_CORRECTED, QUEUE) for _ in range(5)] == [0] * 5


def test_events_caused_by_users_are_emitted_each_time():
    floods = EventLimiter(lambda: 0.0)
    assert {floods.admit(EventKind.MESSAGE_STUCK, None) for _ in range(10_000)} == {0}
