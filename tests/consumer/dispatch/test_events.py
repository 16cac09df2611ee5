"""Events reach `on_event` in order, however slow it is, and do not fill the memory meanwhile."""

from __future__ import annotations

import threading

import pytest

from pyrocket_consumer import ConsumeResult
from pyrocket_consumer.consumer.events import MOST_WAITING, Events
from pyrocket_consumer.model import ConsumerEvent, EventKind
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import Events as Told
from tests.consuming import consuming

WAIT_S = 30.0


def test_what_waits_for_a_slow_on_event_is_bounded_and_what_was_left_out_is_told():
    passed: list[ConsumerEvent] = []
    begun, goes_on, told = threading.Event(), threading.Event(), threading.Event()

    def on_event(event: ConsumerEvent) -> None:
        passed.append(event)
        begun.set()
        goes_on.wait(WAIT_S)
        if event.kind is EventKind.EVENTS_LEFT_OUT:
            told.set()

    events = Events(on_event)
    events.tell(ConsumerEvent(EventKind.LISTENER_FAILED, "0"))
    assert begun.wait(WAIT_S)
    for number in range(1, MOST_WAITING + 501):
        events.tell(ConsumerEvent(EventKind.LISTENER_FAILED, str(number)))
    goes_on.set()
    assert told.wait(WAIT_S)
    events.close()
    failed = [event.text for event in passed if event.kind is EventKind.LISTENER_FAILED]
    assert failed == [str(number) for number in range(len(failed))], "the first ones, in order"
    (left_out,) = [event for event in passed if event.kind is EventKind.EVENTS_LEFT_OUT]
    assert left_out.facts == {"count": 500}
    assert events.counts == {EventKind.LISTENER_FAILED: MOST_WAITING + 501}, "all are counted"


def test_an_on_event_that_raises_shows_its_traceback_once(caplog):
    done = threading.Event()

    def on_event(event: ConsumerEvent) -> None:
        if event.text == "2":
            done.set()
        else:
            raise ValueError(f"not {event.text}")

    events = Events(on_event)
    for number in range(3):
        events.tell(ConsumerEvent(EventKind.LISTENER_FAILED, str(number)))
    assert done.wait(WAIT_S)
    events.close()
    raised = [record for record in caplog.records if "on_event raised" in record.getMessage()]
    assert [bool(record.exc_info and record.exc_info[0]) for record in raised] == [True, False]
    assert "not 1" in raised[1].getMessage()


@pytest.mark.parametrize("result", [ConsumeResult.COMMIT, ConsumeResult.ROLLBACK])
def test_a_result_that_is_for_other_consumers_is_told_as_such(names, result):
    told = Told()
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.send("T", b"m")
        with consuming(cluster, "T", names.group(), lambda message: result, on_event=told):
            event = told.wait_for("listener-result-unknown")
    assert "COMMIT and ROLLBACK are for orderly=True, auto_commit=False" in event.text


def test_each_message_that_fails_is_an_event_and_not_each_a_traceback_in_the_log(names, tmp_path, caplog):
    def fails(message):
        raise ValueError("no")

    told, options = Told(), {"offset_store_dir": tmp_path, "message_model": "broadcasting", "consume_from": "first"}
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        for _ in range(500):
            cluster.send("T", b"m")
        with consuming(cluster, "T", names.group(), fails, on_event=told, **options):
            told.wait_for("message-given-up", count=500)
    for kind in ("listener-failed", "message-given-up"):
        logged = [record.getMessage() for record in caplog.records if f"event={kind}" in record.getMessage()]
        assert len(told.of(kind)) == 500
        assert 20 <= len(logged) < 40
