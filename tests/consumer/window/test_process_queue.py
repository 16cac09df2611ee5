"""The window of unfinished messages: its lower edge is the commit offset."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.consumer.window import process_queue
from pyrocket_consumer.consumer.window.process_queue import Limits, MemoryBudget, ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message, StoredMessage, decode_messages, encode_message
from tests.trials import trials

QUEUE = MessageQueue("orders", "broker-a", 0)


def messages(*offsets: int) -> list[Message]:
    stored = (StoredMessage(topic="orders", body=b"x", queue_id=0, queue_offset=offset) for offset in offsets)
    return decode_messages(b"".join(map(encode_message, stored)), QUEUE)


class Edges(list):
    """The offsets that the window gave to its store."""

    def __call__(self, queue: MessageQueue, offset: int) -> None:
        self.append(offset)


def started_window(
    offset: int, edges: Edges | None = None, budget: MemoryBudget | None = None, **limits: int
) -> ProcessQueue:
    return ProcessQueue(QUEUE, offset, Limits(**limits), on_edge=edges, budget=budget)


def put(window: ProcessQueue, *offsets: int) -> list[Message]:
    made = messages(*offsets)
    assert window.put(made, offsets[-1] + 1, 100 * len(offsets))
    return made


def test_after_a_drop_acks_count_and_after_the_fence_nothing():
    window = started_window(0, edges := Edges())
    first, second = put(window, 0, 1)
    window.drop()
    assert not window.put(messages(2), 3, 1)
    window.ack([first])
    assert window.fence() == 1
    window.ack([second])
    assert (window.commit_offset(), edges) == (1, [1])


def test_space_by_count_bytes_and_span():
    assert not filled(messages=2).may_pull(1)
    assert not filled(budget=MemoryBudget(400)).may_pull(1, 100), "it holds as many bytes as are left"
    assert filled(budget=MemoryBudget(401)).may_pull(1, 100)
    assert not filled(span=1).may_pull(1)
    assert filled().may_pull(1)
    assert started_window(0, messages=1).may_pull(32), "an empty window always has space"


def filled(budget: MemoryBudget | None = None, **limits: int) -> ProcessQueue:
    window = started_window(0, budget=budget, **limits)
    put(window, 0, 1)
    return window


def test_a_window_is_woken_once_when_it_has_space():
    woken: list[ProcessQueue] = []
    window = ProcessQueue(QUEUE, 0, Limits(messages=2), woken.append)
    first, second = put(window, 0, 1)
    assert not window.may_pull(1)
    window.ack([first])
    window.ack([second])
    assert woken == [window]


def test_done_messages_behind_a_stuck_one_count_as_memory():
    window = started_window(0, budget=MemoryBudget(600))
    made = put(window, 0, 1, 2)
    window.ack(made[1:])
    assert not window.may_pull(1, 100), "their bytes stay alive until the first is done"
    window.ack(made[:1])
    assert window.may_pull(1, 100)


# --- the bytes that windows share


class Sharing:
    """Windows that share a budget, and a list of the ones it woke."""

    def __init__(self, limit: int, count: int, budget: MemoryBudget | None = None) -> None:
        self.budget = budget or MemoryBudget(limit)
        self.woken: list[int] = []
        queues = (MessageQueue("orders", "a", number) for number in range(count))
        self.windows = [ProcessQueue(each, 0, Limits(), self.wake, budget=self.budget) for each in queues]

    def wake(self, window: ProcessQueue) -> None:
        self.woken.append(window.queue.queue_id)

    def asks(self, number: int, expected: int = 100) -> bool:
        return self.windows[number].may_pull(1, expected)

    def request_all(self, *numbers: int) -> list[bool]:
        return [self.asks(number) for number in numbers]

    def gets(self, number: int, size: int, expected: int = 100) -> Message:
        window = self.windows[number]
        (message,) = messages(offset := window.commit_offset() or 0)
        assert window.put([message], offset + 1, size)
        window.settle(expected)
        return message

    def takes(self, number: int, size: int, expected: int = 0) -> bool:
        """Return whether a response is accepted, without putting it."""
        window = self.windows[number]
        if taken := self.budget.accept(window, expected, size):
            window.settle(size, size)
        return taken

    def acks(self, number: int, message: Message) -> list[int]:
        """Acknowledge a message, and return the windows that this wakes."""
        self.woken.clear()
        self.windows[number].ack([message])
        return self.woken


def test_pulls_in_flight_count_and_windows_pull_in_order():
    sharing = Sharing(200, 4)
    assert sharing.request_all(0, 1, 2, 3) == [True, True, False, False]
    sharing.windows[0].settle(100)  # the response was empty
    assert sharing.woken == [2]
    assert sharing.request_all(0, 2) == [False, True], "a window that asks again comes last"
    sharing.windows[1].settle(100)
    sharing.windows[2].settle(100)
    assert sharing.woken == [2, 3, 0]


def test_a_grant_that_is_not_used_goes_to_the_next_window():
    sharing = Sharing(100, 4)
    assert sharing.request_all(0, 1, 2, 3) == [True, False, False, False]
    sharing.windows[2].drop()  # the others do not wait for it
    sharing.windows[0].settle(100)
    assert sharing.woken == [1]
    sharing.windows[1].stop_waiting()
    assert sharing.woken == [1, 3]
    sharing.windows[3].drop()
    assert sharing.asks(0)


def test_the_bytes_of_a_window_are_free_when_it_ends():
    sharing = Sharing(100, 2)
    assert sharing.asks(0)
    sharing.gets(0, 100)
    assert not sharing.asks(1)
    sharing.windows[0].drop()
    sharing.windows[0].fence()
    assert sharing.woken == [1]
    assert sharing.budget.held == 0


async def test_while_workers_are_idle_one_window_goes_beyond_the_limit():
    is_idle = False
    sharing = Sharing(100, 4, MemoryBudget(100, asyncio.get_running_loop(), lambda: is_idle))
    assert sharing.asks(0)
    stuck = sharing.gets(0, 500)
    assert sharing.request_all(1, 2, 3) == [False, False, False]
    await asyncio.sleep(1)
    assert sharing.woken == [], "the workers are busy"
    is_idle = True
    await asyncio.sleep(process_queue.OVER_LIMIT_EVERY_S / 2)
    assert sharing.woken == [1], "one at a time"
    assert sharing.asks(1)
    assert not sharing.takes(2, 70)
    assert sharing.takes(1, 70, 100)
    sharing.gets(1, 70, 0)
    await asyncio.sleep(process_queue.OVER_LIMIT_EVERY_S / 2)
    assert sharing.woken == [1, 2]
    sharing.windows[2].stop_waiting()
    await asyncio.sleep(process_queue.OVER_LIMIT_EVERY_S / 2)
    assert sharing.woken == [1, 2, 3]
    assert not sharing.asks(0)
    assert sharing.acks(0, stuck) == [0]


async def test_an_unanswered_pull_beyond_the_limit_delays_no_window():
    """The broker is silent, or holds the pull because the queue is empty."""
    sharing = Sharing(100, 4, MemoryBudget(100, asyncio.get_running_loop(), lambda: True))
    assert sharing.asks(0)
    sharing.gets(0, 500)
    assert sharing.request_all(1, 2, 3) == [False, False, False]
    await asyncio.sleep(process_queue.WAITING_CHECK_S * 1.5)
    assert sharing.asks(1)
    await asyncio.sleep(process_queue.OVER_LIMIT_EVERY_S * 1.5)
    assert sharing.woken == [1, 2]
    assert sharing.asks(2)
    assert sharing.takes(1, 70, 100)
    assert sharing.takes(2, 70, 100)
    await asyncio.sleep(1)
    assert sharing.woken == [1, 2, 3]


async def test_a_window_continues_when_others_have_freed_memory():
    """Its own message may be stuck, so none of its own acknowledgements wakes it."""
    sharing = Sharing(1000, 3, MemoryBudget(1000, asyncio.get_running_loop()))
    assert sharing.asks(0)
    sharing.gets(0, 100)
    assert sharing.asks(1)
    message = sharing.gets(1, 850)
    assert not sharing.asks(0), "50 are left"
    await asyncio.sleep(1)
    assert sharing.woken == []
    assert sharing.acks(1, message) == []
    await asyncio.sleep(1)
    assert sharing.woken == [0]
    assert sharing.asks(0)


async def test_a_window_with_space_but_without_memory_waits_for_bytes():
    woken: list[ProcessQueue] = []
    budget = MemoryBudget(1000, asyncio.get_running_loop())
    window = ProcessQueue(QUEUE, 0, Limits(messages=2), woken.append, budget=budget)
    _, second = put(window, 0, 1)
    assert not window.may_pull(1, 100), "two are there"
    budget.add(900)
    window.ack([second])
    assert woken == [window], "it asks, and now waits for bytes"
    assert not window.may_pull(1, 100)
    budget.free(900)
    await asyncio.sleep(1)
    assert woken == [window, window]


def test_a_window_does_not_overtake_empty_ones():
    sharing = Sharing(1000, 3)
    assert sharing.asks(0)
    first = sharing.gets(0, 100)
    assert sharing.asks(0), "900 are left"
    second = sharing.gets(0, 800)
    assert not sharing.asks(0), "100 are left"
    assert sharing.asks(1)
    assert not sharing.asks(2)
    assert sharing.acks(0, first) == [2], "it gets no memory while others wait"
    assert sharing.asks(2, 300)
    assert sharing.acks(0, second) == [0], "it holds nothing"


def test_an_unexpected_response_needs_memory():
    sharing = Sharing(100, 2)
    assert sharing.takes(1, 70)
    assert sharing.asks(0)
    message = sharing.gets(0, 100)
    assert not sharing.takes(1, 70)
    sharing.acks(0, message)
    assert sharing.budget.accept(sharing.windows[0], 0, 100)
    assert not sharing.takes(1, 70), "accepted bytes count before they are put"


@settings(max_examples=trials(600), deadline=None)
@given(st.integers(1, 2000), st.lists(st.integers(1, 300), min_size=1, max_size=8), st.randoms())
def test_all_is_consumed_within_the_limit(limit, sizes, random):
    """Windows pull five responses of unknown size each, while others acknowledge, in random order."""
    sharing = Sharing(limit, len(sizes))
    left = dict.fromkeys(range(len(sizes)), 5)
    requested, held, awake = {}, [], set(left)
    while left or requested or held:
        number = random.choice([*awake, *requested, *(-1 for _ in held)])
        if number == -1:
            held_by, message = held.pop(random.randrange(len(held)))
            awake.update(sharing.acks(held_by, message))
        elif number in requested:
            expected = requested.pop(number)
            window, size = sharing.windows[number], sizes[number]
            if sharing.budget.accept(window, expected, size):
                held.append((number, sharing.gets(number, size, 0)))
                window.settle(size, size)
                left[number] -= 1
            else:
                window.settle(expected)
            awake.add(number)
        else:
            awake.discard(number)
            if not left.get(number):
                left.pop(number, None)
                sharing.windows[number].stop_waiting()
            elif sharing.asks(number, expected := random.randint(1, 400)):
                requested[number] = expected
        awake.update(sharing.woken)
        sharing.woken.clear()
        assert sharing.budget.held <= limit + max(sizes)
        assert awake or requested or held or not left, "a window can continue"
    assert (sharing.budget.held, sharing.budget.reserve(sharing.windows[0], 0, 1)) == (0, True)


def test_the_estimate_of_listener_time_falls_slowly():
    window = started_window(0)
    first, second, _ = put(window, 0, 1, 2)
    window.ack([first], elapsed_s=0.1, units=1)
    assert window.listener_time_s > 0.05
    risen = window.listener_time_s
    window.ack([second], elapsed_s=0.0, units=1)
    assert risen * 0.75 < window.listener_time_s < risen


@settings(max_examples=trials(600), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_against_a_naive_model(answers, random):
    """After random responses and acks, the edge is the smallest offset that is not acknowledged. An ack counts once."""
    window = started_window(0, edges := Edges())
    waiting, next_offset, put_so_far = {}, 0, 0
    for count, gap in answers:
        offsets = [next_offset + number * (gap + 1) for number in range(count)]
        next_offset, put_so_far = offsets[-1] + 1, put_so_far + count
        waiting.update(zip(offsets, put(window, *offsets), strict=True))
        for offset in random.sample(sorted(waiting), random.randint(0, len(waiting))):
            message = waiting.pop(offset)
            window.ack([message])
            window.ack([message, message])
            assert window.commit_offset() == (min(waiting) if waiting else next_offset)
        assert (window.unfinished()[0], window.finished) == (len(waiting), put_so_far - len(waiting))
    assert edges == sorted(edges)
    window.ack(list(waiting.values()))
    assert window.unfinished()[:2] == (0, 0)


@pytest.mark.live
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
