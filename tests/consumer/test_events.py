"""Events reach `on_event` in order, however slow it is, and do not fill the memory meanwhile."""

from __future__ import annotations

import threading

from pyrocket_consumer.consumer.events import MOST_WAITING, Events
from pyrocket_consumer.model import ConsumerEvent, EventKind

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
