"""Lines of orderly queues: what waits, what comes again first, and who gets it."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from pyrocket_consumer.consumer.consume import Chunk, Slot
from pyrocket_consumer.consumer.listener import ConsumeResult, Listener, Retry
from pyrocket_consumer.consumer.orderly import HELD_UP_AFTER_S, OrderlyService
from pyrocket_consumer.consumer.process_queue import Limits, ProcessQueue
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.wire.message import StoredMessage, decode_messages, encode_message

QUEUE = MessageQueue("orders", "a", 0)


class Desk:
    """Stands for workers: the test plays them."""

    def __init__(self) -> None:
        self.slots = [Slot()]
        self.chunks: deque[Chunk] = deque()

    def put(self, chunk):
        self.chunks.append(chunk)

    def stop(self):
        pass

    def abandon(self):
        pass

    def begin(self):
        """Have a worker take the next chunk; returns its units."""
        (chunk,) = self.chunks
        self.slots[0].chunk = chunk
        return [unit.queue_offset if not isinstance(unit, list) else [each.queue_offset for each in unit]
                for unit in chunk.todo]

    async def finish(self, *results):
        """Have the worker get these results, one of each unit."""
        chunk = self.chunks.popleft()
        for result in results:
            unit = chunk.todo.popleft()
            if result is None:
                chunk.done.extend(unit if isinstance(unit, list) else [unit])
            elif not chunk.turn.judge(unit, result)[0]:
                break
        chunk.window.ack(chunk.turn.committed())
        self.slots[0].chunk = None
        chunk.turn.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Serving:
    def __init__(self, *, auto_commit=True, max_attempts=None, pauses=()):
        self.desk, self.given_up, self.held_up = Desk(), [], []
        self.pauses, self.tasks = list(pauses), []
        loop = asyncio.get_running_loop()
        self.service = OrderlyService(
            loop,
            lambda is_async: self.desk,
            auto_commit=auto_commit,
            max_attempts=max_attempts,
            begin=lambda work, what: self.tasks.append(loop.create_task(work)),
            give_up=self._give_up,
            held_up=lambda window, why: self.held_up.append(window),
        )

    async def _give_up(self, window, message):
        self.given_up.append(message.queue_offset)
        pause = self.pauses.pop(0) if self.pauses else 0.0
        if isinstance(pause, Exception):
            raise pause
        return pause


def window_of(count, epoch=1):
    window = ProcessQueue(QUEUE, epoch, Limits(), lambda queue, offset: None)
    window.listener_time_s = 1e-6
    window.start(0)
    stored = [StoredMessage(topic="orders", body=b"", queue_offset=offset) for offset in range(count)]
    data = b"".join(map(encode_message, stored))
    messages = decode_messages(data, QUEUE)
    window.put(messages, count, len(data))
    return window, messages


def one(message):
    pass


def other(message):
    pass


async def test_what_comes_while_a_turn_runs_waits_and_follows():
    serving = Serving()
    window, messages = window_of(5)
    listener = Listener.of(one)
    serving.service.dispatch(window, listener, messages[:2])
    serving.service.dispatch(window, listener, messages[2:])
    assert serving.desk.begin() == [0, 1]
    await serving.desk.finish(None, None)
    assert serving.desk.begin() == [2, 3, 4]
    assert window.commit_offset() == 2


async def test_a_turn_has_one_listener_and_each_unit_its_own():
    serving = Serving()
    window, messages = window_of(6)
    first, second = Listener.of(one), Listener.of(other)
    window.locked_until = 0
    for message, listener in zip(messages, [first, first, second, second, first, second], strict=True):
        serving.service.dispatch(window, listener, [message])
    window.locked_until = float("inf")
    serving.service.go_on(window)
    turns = []
    while serving.desk.chunks:
        turns.append((serving.desk.chunks[0].listener is first, serving.desk.begin()))
        await serving.desk.finish(*[None] * len(turns[-1][1]))
    assert turns == [(True, [0, 1]), (False, [2, 3]), (True, [4]), (False, [5])]
    assert window.commit_offset() == 6


async def test_what_failed_comes_again_first_and_with_its_listener():
    serving = Serving()
    window, messages = window_of(4)
    first, second = Listener.of(one), Listener.of(other)
    serving.service.dispatch(window, first, messages[:2])
    serving.service.dispatch(window, second, messages[2:])
    await serving.desk.finish(None, ConsumeResult.RETRY)
    assert not serving.desk.chunks
    await asyncio.sleep(2)
    assert (serving.desk.begin(), serving.desk.chunks[0].listener) == ([1], first)
    await serving.desk.finish(None)
    assert (serving.desk.begin(), serving.desk.chunks[0].listener) == ([2, 3], second)


async def test_a_rollback_brings_each_message_back_to_its_own_listener():
    serving = Serving(auto_commit=False)
    window, messages = window_of(4)
    first, second = Listener.of(one, 2), Listener.of(other, 2)
    serving.service.dispatch(window, first, messages[:2])
    serving.service.dispatch(window, second, messages[2:])
    await serving.desk.finish(None)
    await serving.desk.finish(ConsumeResult.ROLLBACK)
    await asyncio.sleep(2)
    assert (serving.desk.begin(), serving.desk.chunks[0].listener) == ([[0, 1]], first)
    await serving.desk.finish(None)
    assert (serving.desk.begin(), serving.desk.chunks[0].listener) == ([[2, 3]], second)
    assert window.commit_offset() == 0
    await serving.desk.finish(ConsumeResult.COMMIT)
    assert window.commit_offset() == 4


async def test_a_part_of_a_list_that_failed_comes_again_with_what_follows():
    serving = Serving()
    window, messages = window_of(6)
    serving.service.dispatch(window, Listener.of(one, 3), messages)
    await serving.desk.finish(Retry(messages[1:2]))
    await asyncio.sleep(2)
    assert serving.desk.begin() == [[1, 2, 3], [4, 5]]
    assert window.commit_offset() == 1


async def test_a_new_period_waits_for_the_call_of_the_former_one():
    serving = Serving()
    window, messages = window_of(3)
    service, desk = serving.service, serving.desk
    service.dispatch(window, Listener.of(one), messages)
    desk.begin()
    window.drop()
    window.fence()
    service.forget(window)
    again, messages = window_of(3, epoch=2)
    service.dispatch(again, Listener.of(one), messages)
    assert len(desk.chunks) == 1
    assert (service.running(window), service.running(again), service.running()) == (1, 0, 1)
    await asyncio.sleep(HELD_UP_AFTER_S - 1)
    assert serving.held_up == []
    await asyncio.sleep(2)
    assert serving.held_up == [again]
    await desk.finish(None)
    assert desk.begin() == [0, 1, 2]
    assert service.running(again) == 1


@pytest.mark.parametrize("result", [ConsumeResult.RETRY, ConsumeResult.SUCCESS])
async def test_what_the_former_period_left_is_not_the_new_one_s(result):
    serving = Serving()
    window, messages = window_of(2)
    serving.service.dispatch(window, Listener.of(one), messages)
    window.drop()
    window.fence()
    serving.service.forget(window)
    again, messages = window_of(2, epoch=2)
    serving.service.dispatch(again, Listener.of(one), messages)
    await serving.desk.finish(result)
    assert serving.desk.begin() == [0, 1]
    assert serving.desk.chunks[0].window is again


async def test_messages_that_had_their_attempts_leave_the_line_when_they_are_given_up():
    serving = Serving(max_attempts=0, pauses=[0.0, 3.0, 0.0])
    window, messages = window_of(3)
    serving.service.dispatch(window, Listener.of(one, 2), messages)
    await serving.desk.finish(ConsumeResult.RETRY)
    await asyncio.sleep(0.1)
    assert (serving.given_up, window.commit_offset()) == ([0, 1], 1)
    assert not serving.desk.chunks, "the second waits"
    await asyncio.sleep(3)
    assert serving.desk.begin() == [[1, 2]]
    await serving.desk.finish(Retry(messages[1:2]))
    await asyncio.sleep(0.1)
    assert serving.given_up == [0, 1, 1, 2], "what follows in its list has failed with it"
    assert window.commit_offset() == 3


async def test_a_surprise_in_giving_up_does_not_stop_the_line():
    serving = Serving(max_attempts=0, pauses=[ZeroDivisionError()])
    window, messages = window_of(1)
    serving.service.dispatch(window, Listener.of(one), messages)
    await serving.desk.finish(ConsumeResult.RETRY)
    await asyncio.sleep(2)
    assert serving.desk.begin() == [0]
    assert isinstance(serving.tasks[0].exception(), ZeroDivisionError)
