"""Orderly queues: the waiting messages, the order of repeated ones, their listeners, and one call at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import pytest

from pyrocket_consumer import MessageQueue, Suspend
from pyrocket_consumer.consumer.dispatch.ordered import HELD_UP_AFTER_S, OrderedService
from pyrocket_consumer.consumer.dispatch.workers import Chunk, Slot
from pyrocket_consumer.consumer.listener import ConsumeResult, Listener, Retry
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, drop, drop_answer
from tests.consumer.orders import GROUP, QUEUE, RETRY, TOPIC, listener_of, request_matcher
from tests.consumer.windows import window_of
from tests.consuming import QUICK, WAIT_S, Events, RecordingListener, consuming, numbered, until
from tests.order_by_key import KeyedListener
from tests.resets import fill
from tests.speed import cpu_at_most


class FakeWorkers:
    """Fake workers, which the test controls."""

    def __init__(self) -> None:
        self.slots = [Slot()]
        self.chunks: deque[Chunk] = deque()
        self.put = self.chunks.append
        self.stop = self.abandon = lambda: None
        self.waiting = lambda: len(self.chunks)

    def begin(self):
        """Let a worker take the next chunk and begin its first unit. Return its units."""
        (chunk,) = self.chunks
        if self.slots[0].chunk is not chunk:
            self.slots[0].chunk = chunk
            chunk.begun_at, chunk.current = chunk.window.clock(), chunk.todo.popleft()
        return [
            [each.queue_offset for each in unit] if isinstance(unit, list) else unit.queue_offset
            for unit in (chunk.current, *chunk.todo)
        ]

    async def finish(self, *results):
        """Give the worker these results, one for each unit."""
        self.begin()
        chunk = self.chunks.popleft()
        for number, result in enumerate(results):
            unit = chunk.todo.popleft() if number else chunk.current
            if result is None:
                chunk.done.extend(unit if isinstance(unit, list) else [unit])
            else:
                chunk.apply_result(unit, result)
        chunk.window.ack(chunk.take_consumed())
        self.slots[0].chunk = None
        chunk.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Serving:
    """The service of a window with `count` messages, and the results of these."""

    def __init__(self, count, *, auto_commit=True, max_attempts=None, pauses=()):
        self.fake_workers, self.given_up, self.held_up = FakeWorkers(), [], []
        self.pauses, self.tasks = list(pauses), []
        loop = asyncio.get_running_loop()
        context = SimpleNamespace(
            loop=loop,
            config=SimpleNamespace(auto_commit=auto_commit, most_attempts=max_attempts, order_by=None),
            call_soon=loop.call_soon_threadsafe,
            tasks=SimpleNamespace(begin=lambda work, what: self.tasks.append(loop.create_task(work))),
        )
        reports = SimpleNamespace(
            retries=SimpleNamespace(give_up=self._give_up),
            count_failed=lambda window, count: None,
            key_failed=lambda window, message, error: None,
            held_up=lambda window, why: self.held_up.append(window),
        )
        self.service = OrderedService(context, lambda is_async, reports: self.fake_workers, reports)
        self.begins(count)

    def begins(self, count):
        """Begin a period of the queue with `count` messages."""
        self.window, self.messages = window_of(count)
        self.window.listener_time_s = 1e-6

    def ends(self):
        """End the period, even if calls run."""
        self.window.drop()
        self.window.fence()
        self.service.forget(self.window)

    def dispatch(self, listener, start=0, end=None):
        self.service.dispatch(self.window, listener, self.messages[start:end])

    @property
    def turn(self):
        """The listener and the units of the next batch."""
        units = self.fake_workers.begin()
        return self.fake_workers.chunks[0].listener, units

    async def _give_up(self, window, message):
        self.given_up.append(message.queue_offset)
        pause = self.pauses.pop(0) if self.pauses else 0.0
        if isinstance(pause, Exception):
            raise pause
        return pause


def one(message):
    pass


def other(message):
    pass


async def test_messages_that_arrive_during_a_batch_follow_it():
    serving = Serving(5)
    listener = Listener.of(one)
    serving.dispatch(listener, 0, 2)
    serving.dispatch(listener, 2)
    assert serving.fake_workers.begin() == [0, 1]
    await serving.fake_workers.finish(None, None)
    assert serving.fake_workers.begin() == [2, 3, 4]
    assert serving.window.commit_offset() == 2


async def test_a_batch_has_messages_of_one_listener():
    serving = Serving(6)
    first, second = Listener.of(one), Listener.of(other)
    serving.window.lease.valid_until = 0
    for number, listener in enumerate([first, first, second, second, first, second]):
        serving.dispatch(listener, number, number + 1)
    serving.window.lease.valid_until = float("inf")
    serving.service.resume_calls(serving.window)
    turns = []
    while serving.fake_workers.chunks:
        turns.append(serving.turn)
        await serving.fake_workers.finish(*[None] * len(turns[-1][1]))
    assert turns == [(first, [0, 1]), (second, [2, 3]), (first, [4]), (second, [5])]
    assert serving.window.commit_offset() == 6


async def test_failed_messages_are_repeated_first_with_their_listener():
    serving, first, second = Serving(4), Listener.of(one), Listener.of(other)
    serving.dispatch(first, 0, 2)
    serving.dispatch(second, 2)
    await serving.fake_workers.finish(None, ConsumeResult.RETRY)
    assert not serving.fake_workers.chunks
    await asyncio.sleep(2)
    assert serving.turn == (first, [1])
    await serving.fake_workers.finish(None)
    assert serving.turn == (second, [2, 3])


async def test_a_rollback_brings_each_message_back_to_its_own_listener():
    serving, first, second = Serving(4, auto_commit=False), Listener.of(one, 2), Listener.of(other, 2)
    serving.dispatch(first, 0, 2)
    serving.dispatch(second, 2)
    await serving.fake_workers.finish(None)
    await serving.fake_workers.finish(ConsumeResult.ROLLBACK)
    await asyncio.sleep(2)
    assert serving.turn == (first, [[0, 1]])
    await serving.fake_workers.finish(None)
    assert serving.turn == (second, [[2, 3]])
    assert serving.window.commit_offset() == 0
    await serving.fake_workers.finish(ConsumeResult.COMMIT)
    assert serving.window.commit_offset() == 4


async def test_a_failed_part_of_a_list_is_repeated_with_all_after_it():
    serving = Serving(6)
    serving.dispatch(Listener.of(one, 3))
    await serving.fake_workers.finish(Retry(serving.messages[1:2]))
    await asyncio.sleep(2)
    assert serving.fake_workers.begin() == [[1, 2, 3], [4, 5]]
    assert serving.window.commit_offset() == 1


async def test_a_new_period_waits_for_the_call_of_the_former_one():
    serving = Serving(3)
    serving.dispatch(Listener.of(one))
    serving.fake_workers.begin()
    serving.ends()
    running, former = serving.service.running, serving.window
    serving.begins(3)
    serving.dispatch(Listener.of(one))
    assert len(serving.fake_workers.chunks) == 1
    assert (running(former), running(serving.window), running()) == (1, 1, 1), "its next owner waits for it, too"
    await asyncio.sleep(HELD_UP_AFTER_S - 1)
    assert serving.held_up == []
    await asyncio.sleep(2)
    assert serving.held_up == [serving.window]
    await serving.fake_workers.finish(None)
    assert serving.fake_workers.begin() == [0, 1, 2]
    assert running(serving.window) == 1


@pytest.mark.parametrize("result", [ConsumeResult.RETRY, ConsumeResult.SUCCESS])
async def test_a_new_period_does_not_repeat_messages_of_the_former_one(result):
    serving = Serving(2)
    serving.dispatch(Listener.of(one))
    serving.fake_workers.begin()
    serving.ends()
    serving.begins(2)
    serving.dispatch(Listener.of(one))
    await serving.fake_workers.finish(result)
    assert serving.fake_workers.begin() == [0, 1]
    assert serving.fake_workers.chunks[0].window is serving.window


async def test_messages_that_are_given_up_leave_the_lane():
    serving = Serving(3, max_attempts=0, pauses=[0.0, 3.0, 0.0])
    serving.dispatch(Listener.of(one, 2))
    await serving.fake_workers.finish(ConsumeResult.RETRY)
    await asyncio.sleep(0.1)
    assert (serving.given_up, serving.window.commit_offset()) == ([0, 1], 1)
    assert not serving.fake_workers.chunks, "the second waits"
    await asyncio.sleep(3)
    assert serving.fake_workers.begin() == [[1, 2]]
    await serving.fake_workers.finish(Retry(serving.messages[1:2]))
    await asyncio.sleep(0.1)
    assert serving.given_up == [0, 1, 1, 2], "later messages of its list have failed with it"
    assert serving.window.commit_offset() == 3


async def test_an_unexpected_error_of_giving_up_does_not_stop_the_lane():
    serving = Serving(1, max_attempts=0, pauses=[ZeroDivisionError()])
    serving.dispatch(Listener.of(one))
    await serving.fake_workers.finish(ConsumeResult.RETRY)
    await asyncio.sleep(2)
    assert serving.fake_workers.begin() == [0]
    assert isinstance(serving.tasks[0].exception(), ZeroDivisionError)


# --- whole consumers


async def test_the_end_of_one_queue_does_not_search_thousands_of_others():
    """Each of them is asked every few milliseconds while it ends."""
    serving, listener = Serving(0), Listener.of(one)
    opened = [window_of(1, MessageQueue("orders", "a", number)) for number in range(3000)]
    with cpu_at_most(1.0):
        for window, messages in opened:
            serving.service.dispatch(window, listener, messages)
        assert sum(serving.service.running(window) for window, _ in opened for _ in range(10)) == 30_000


class Held(RecordingListener):
    """A listener that keeps its first call until it is released, and counts the calls that run at once."""

    def __init__(self):
        super().__init__(self._hold)
        self.begun, self.released = threading.Event(), threading.Event()
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def _hold(self, message):
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        if not self.begun.is_set():
            self.begun.set()
            self.released.wait(60)
        with self._lock:
            self.running -= 1


@pytest.fixture
def held():
    listener = Held()
    yield listener
    listener.released.set()


@pytest.fixture(params=["clustering", "broadcasting"])
def model(request, tmp_path):
    """The options of orderly consumers of each model."""
    return {"message_model": request.param, "offset_store_dir": tmp_path, "orderly": True}


def own_queues(consumer):
    """Return how many queues of the topic a consumer holds."""
    return sum(queue.topic == TOPIC for queue in consumer.progress())


def locked(broker):
    """Return the ids of the topic's queues that the group has locked."""
    return [queue.queue_id for queue in broker.locks(GROUP) if queue.topic == TOPIC]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_after_a_reset_no_call_begins_while_an_earlier_one_runs(orders, held, kind, model):
    orders.fill(5)
    with orders.consuming(listener_of(kind, held, blocks=True), **model) as (consumer, _):
        assert held.begun.wait(30)
        consumer.reset_offsets(TOPIC, "earliest")
        until(lambda: any(each.unfinished == 5 for each in consumer.progress().values()), "the new period has them")
        assert "returns" in orders.events.wait_for("message-stuck").text, "the event reports that the queue waits"
        assert len(held.messages) == 1
        held.released.set()
        held.wait(lambda seen: len(seen.messages) == 6)
    assert held.bodies == [b"m0", *numbered(5)]
    assert held.most_running == 1


def test_a_restarted_queue_is_handed_over_after_its_calls(orders):
    """The next owner waits for a call from before the restart, too."""
    freed, waiting = threading.Event(), Events()
    seen = KeyedListener(lambda message: freed.wait(WAIT_S) and None, key=lambda message: message.queue)
    orders.make(queues=2)
    for queue_id in (0, 1):
        orders.fill(2, queue_id=queue_id)
    with orders.consuming(seen, orderly=True) as (first, _):
        until(lambda: sum(seen.running.values()) == 2, "a call of each queue")
        first.reset_offsets(TOPIC, "earliest")
        with orders.consuming(seen, orderly=True, start_wait_s=0, on_event=waiting) as (second, _):
            assert "another member still has its lock" in waiting.wait_for("lock-lost").text
            freed.set()
            until(lambda: own_queues(first) == own_queues(second) == 1, "one queue each")
    assert not seen.overlaps


def test_a_short_call_that_outlives_its_period_is_not_reported(orders, held):
    orders.fill(2)
    with orders.consuming(held, orderly=True) as (consumer, _):
        assert held.begun.wait(30)
        consumer.reset_offsets(TOPIC, "earliest")
        held.released.set()
        held.wait(lambda seen: len(seen.messages) == 3)
    assert not orders.events.of("message-stuck")
    assert held.most_running == 1


def test_a_slow_call_is_reported_and_continues(orders, held, model):
    orders.fill(2)
    with orders.consuming(held, consume_timeout_s=0.1, **model):
        assert orders.events.wait_for("message-stuck").facts["offset"] == 0
        held.released.set()
        held.wait_for(2)
    assert held.bodies == numbered(2)
    assert len(orders.events.of("message-stuck")) == 1
    assert not orders.cluster.messages(RETRY)


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("ends", [False, True], ids=["by the timer", "at close"])
@pytest.mark.parametrize("how", [{}, {"order_by": "sharding_key"}], ids=["by queue", "by key"])
def test_messages_before_a_call_that_hangs_are_committed(orders, held, kind, ends, how):
    """Earlier calls were quick, so a worker has many messages at once."""
    held.begun.set()  # the first call is not kept
    orders.fill(20)

    def hold_the_tenth(message):
        if message.queue_offset == 10:
            held.begun.clear()
        held(message)

    listener = listener_of(kind, hold_the_tenth, blocks=True)
    with orders.consuming(listener, orderly=True, **how) as (consumer, _):
        held.wait_for(11)
        if ends:
            consumer.close(timeout_s=0.2)
        else:
            orders.wait_committed(10)
        assert orders.committed == {0: 10}
        held.released.set()


def test_a_queue_whose_call_outlives_the_close_stays_locked(orders, broker, held):
    """The next member gets it when the lock expires, because it must not begin while the call runs."""
    orders.make(queues=2)
    orders.fill(1, queue_id=0)
    with orders.consuming(held, orderly=True) as (consumer, _):
        assert held.begun.wait(30)
        consumer.close(timeout_s=0.2)
    assert locked(broker) == [0]
    with orders.consuming(orderly=True, rebalance_interval_s=0.2) as (other, seen):
        until(lambda: [queue.queue_id for queue in other.progress() if queue.topic == TOPIC] == [1], "the other queue")
        assert not seen.messages
        held.released.set()
        broker.expire_locks()
        seen.wait_for(1)


def test_a_queue_whose_last_commit_is_unanswered_stays_locked(orders, broker):
    """The broker may still execute it, and would overwrite a commit of the next owner."""
    orders.fill(3)
    with orders.consuming(orderly=True, call_timeout_s=1.0, commit_interval_s=60) as (_, seen):
        seen.wait_for(3)
        orders.on(RequestCode.UPDATE_CONSUMER_OFFSET, drop, times=None)
    assert locked(broker) == [0]
    assert len(broker.locks(GROUP)) == 1, "the others are free"


def test_a_lock_is_given_back_when_the_queue_cannot_begin(orders, broker):
    """Otherwise its next owner would wait for a minute."""
    orders.fill(1)
    orders.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(1, "no"), times=None)
    with orders.consuming(orderly=True) as (consumer, seen):
        broker.wait_for(RequestCode.QUERY_CONSUMER_OFFSET, when=request_matcher())
        until(lambda: not locked(broker), "unlocked")
        broker.clear_faults()
        seen.wait_for(1)


@pytest.mark.parametrize("batch", [1, 4])
def test_retried_messages_of_several_topics_go_each_to_its_own(orders, batch):
    """They share the queues of the retry topic. Orderly consumers get them from members that are not orderly."""
    topics = [orders.make(1, f"orders-{number}") for number in range(3)]
    orders.make(1, RETRY)
    for number in range(60):
        orders.send(b"m%d" % number, topic=RETRY, properties={"RETRY_TOPIC": topics[number % 3]})
    got, changed, failed = defaultdict(list), threading.Condition(), set()

    def listener(name):
        def handle(messages):
            messages = messages if isinstance(messages, list) else [messages]
            assert len({message.topic for message in messages}) == 1, "a call is of one topic"
            first = messages[0]
            if int(first.body[1:]) % 7 == 0 and first.body not in failed:
                failed.add(first.body)
                return Suspend(for_s=0.01)
            with changed:
                got[name] += messages
                changed.notify_all()

        return handle

    consumer = orders.consumer(**{**QUICK, "orderly": True, "listener_batch_size": batch})
    for each in topics:
        consumer.subscribe(each, listener(each))
    with consumer, changed:
        assert changed.wait_for(lambda: sum(map(len, got.values())) >= 60, 30)
    for number, each in enumerate(topics):
        assert [message.topic for message in got[each]] == 20 * [each]
        assert [message.body for message in got[each]] == numbered(60)[number::3]


def test_dead_letters_of_an_orderly_queue_have_growing_pauses(orders, broker):
    orders.fill(2)
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, drop_answer, times=3)
    seen = RecordingListener(lambda message: Suspend(for_s=0.01) if message.body == b"m0" else None)
    began = time.monotonic()
    with orders.consuming(seen, orderly=True, max_reconsume_times=1, call_timeout_s=0.3):
        seen.wait_for(2)
    assert time.monotonic() - began > 6, "a second, two, four"
    assert Counter(message.body for message in orders.dead) == {b"m0": 4}


def test_a_listener_that_commits_too_late_is_reported(orders):
    """With `auto_commit=False` and a full cache, no message can arrive until COMMIT."""
    orders.fill(300)
    commits = threading.Event()

    def judge(message):
        if commits.is_set() and message.queue_offset % 10 == 9:
            return ConsumeResult.COMMIT

    options = {"orderly": True, "auto_commit": False, "max_cached_messages": 64}
    with orders.consuming(RecordingListener(judge), **options) as (consumer, seen):
        event = orders.events.wait_for("message-stuck")
        assert event.queue == QUEUE
        assert "COMMIT" in event.text
        assert "max_cached_messages" in event.text
        assert len(seen.messages) < 100
        commits.set()
        consumer.reset_offsets(TOPIC, "earliest")
        seen.wait(lambda seen: b"m299" in seen.bodies)
        orders.wait_committed(300)
    assert len(orders.events.of("message-stuck")) == 1


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_lists_are_full_for_pulls_of_any_size(cluster, topic, group, kind):
    """By default, brokers answer a pull with at most 32 messages."""
    fill(cluster, topic, 200, queues=1)
    sizes, begun, released, seen = [], threading.Event(), threading.Event(), []

    def take(messages):
        begun.set()
        assert released.wait(60)
        sizes.append(len(messages))
        seen.extend(message.queue_offset for message in messages)

    listener = listener_of(kind, take, blocks=True)
    with consuming(cluster, topic, group, listener, orderly=True, listener_batch_size=64) as (consumer, _):
        assert begun.wait(30)
        until(lambda: sum(each.unfinished for each in consumer.progress().values()) == 200, "all wait")
        released.set()
        until(lambda: len(seen) == 200, "all consumed")
    assert seen == list(range(200))
    assert sizes[1:-1] == [64] * len(sizes[1:-1]), sizes
    assert len(sizes) <= 5
