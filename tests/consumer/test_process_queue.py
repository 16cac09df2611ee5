"""The window of unfinished messages: its lower edge is the commit offset."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.consumer.process_queue import TRANSITIONS, Limits, ProcessQueue, QueueEvent, QueueState
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.wire.message import Message, StoredMessage, decode_messages, encode_message

QUEUE = MessageQueue("orders", "broker-a", 0)


def messages(*offsets: int) -> list[Message]:
    data = b"".join(
        encode_message(StoredMessage(topic="orders", body=b"x", queue_id=0, queue_offset=offset)) for offset in offsets
    )
    return decode_messages(data, QUEUE)


class Told:
    """What the window said to its store."""

    def __init__(self) -> None:
        self.edges: list[int] = []

    def __call__(self, queue: MessageQueue, offset: int) -> None:
        self.edges.append(offset)


def started_window(offset: int, told: Told | None = None, **limits: int) -> ProcessQueue:
    window = ProcessQueue(QUEUE, 1, Limits(**limits), told or Told())
    window.start(offset)
    return window


def put(window: ProcessQueue, *offsets: int) -> list[Message]:
    made = messages(*offsets)
    assert window.put(made, offsets[-1] + 1, 100 * len(offsets))
    return made


def test_the_oldest_unfinished_message_holds_the_commit_offset():
    window = started_window(offset=100)
    first, second, third = put(window, 100, 101, 105)
    window.ack([third, second])
    assert window.commit_offset() == 100
    window.ack([first])
    assert window.commit_offset() == 106


def test_an_empty_answer_moves_the_edge_only_while_nothing_is_unfinished():
    told = Told()
    window = started_window(0, told)
    (message,) = put(window, 0)
    window.put([], 10, 0)
    assert (window.commit_offset(), told.edges) == (0, [])
    window.ack([message])
    assert (window.commit_offset(), told.edges) == (10, [10])


def test_an_ack_counts_once():
    window = started_window(0)
    first, second = put(window, 0, 1)
    window.ack([first])
    window.ack([first, first])
    assert window.unfinished()[0] == 1
    window.ack([second])
    assert window.unfinished()[:2] == (0, 0)
    assert window.finished == 2


def test_after_a_drop_acks_count_and_messages_do_not():
    window = started_window(0)
    first, _ = put(window, 0, 1)
    window.drop()
    assert not window.put(messages(2), 3, 1)
    window.ack([first])
    assert window.fence() == 1


def test_after_the_fence_nothing_counts():
    told = Told()
    window = started_window(0, told)
    first, second = put(window, 0, 1)
    window.drop()
    assert window.fence() == 0
    window.ack([first, second])
    assert (window.commit_offset(), told.edges) == (0, [])


def test_a_window_that_never_started_has_no_offset():
    window = ProcessQueue(QUEUE, 1, Limits(), Told())
    window.drop()
    assert window.fence() is None


@pytest.mark.parametrize("state", list(QueueState))
@pytest.mark.parametrize("event", list(QueueEvent))
def test_moves_outside_the_table_are_refused(state, event):
    window = ProcessQueue(QUEUE, 1, Limits(), Told())
    path = {
        QueueState.ASSIGNED: [],
        QueueState.PULLING: [lambda: window.start(0)],
        QueueState.DROPPED: [window.drop],
        QueueState.FENCED: [window.drop, window.fence],
    }[state]
    for step in path:
        step()
    assert window.state is state
    act = {QueueEvent.START: lambda: window.start(0), QueueEvent.DROP: window.drop, QueueEvent.FENCE: window.fence}
    if (state, event) in TRANSITIONS:
        act[event]()
        assert window.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match=event.value):
            act[event]()


def test_room_by_count_bytes_and_span():
    assert not filled(messages=2).room_for(1)
    assert not filled(bytes=200).room_for(1)
    assert not filled(span=1).room_for(1)
    assert filled().room_for(1)
    assert started_window(0, messages=1).room_for(32), "an empty window always has room"


def filled(**limits: int) -> ProcessQueue:
    window = started_window(0, **limits)
    put(window, 0, 1)
    return window


def test_room_made_is_told_once():
    woken: list[ProcessQueue] = []
    window = ProcessQueue(QUEUE, 1, Limits(messages=2), Told(), woken.append)
    window.start(0)
    first, second = put(window, 0, 1)
    assert not window.room_for(1)
    window.ack([first])
    window.ack([second])
    assert woken == [window]


def test_acknowledged_messages_behind_a_stuck_one_still_count_as_memory():
    window = started_window(0, bytes=300)
    made = put(window, 0, 1, 2)
    window.ack(made[1:])
    assert not window.room_for(1), "their bytes stay alive until the first is done"
    window.ack(made[:1])
    assert window.room_for(1)


def test_the_estimate_of_listener_time_rises_fast_and_falls_slowly():
    window = started_window(0)
    first, second, _ = put(window, 0, 1, 2)
    window.ack([first], elapsed_s=0.1, units=1)
    assert window.listener_time_s > 0.05
    risen = window.listener_time_s
    window.ack([second], elapsed_s=0.0, units=1)
    assert risen * 0.75 < window.listener_time_s < risen


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_against_a_naive_model(answers, random):
    """Random answers and acks in random order: the edge is the smallest offset not acknowledged."""
    told = Told()
    window = started_window(0, told)
    waiting: dict[int, Message] = {}
    next_offset = 0
    for count, gap in answers:
        offsets = [next_offset + number * (gap + 1) for number in range(count)]
        next_offset = offsets[-1] + 1
        for message in put(window, *offsets):
            waiting[message.queue_offset] = message
        for offset in random.sample(sorted(waiting), random.randint(0, len(waiting))):
            window.ack([waiting.pop(offset)])
            assert window.commit_offset() == (min(waiting) if waiting else next_offset)
        assert window.unfinished()[0] == len(waiting)
    assert told.edges == sorted(told.edges)


def test_two_threads_that_ack_the_same_messages_count_them_once():
    window = started_window(0)
    made = put(window, *range(2000))
    barrier = threading.Barrier(4)

    def ack() -> None:
        barrier.wait()
        for start in range(0, 2000, 7):
            window.ack(made[start : start + 7])

    threads = [threading.Thread(target=ack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (window.commit_offset(), window.unfinished()[0], window.finished) == (2000, 0, 2000)
