"""Orderly queues: one listener call at a time in every situation, and each message with the listener of its topic."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict

import pytest

from pyrocket_consumer import ConsumeResult, MessageQueue, PushConsumer, Suspend
from pyrocket_consumer.testing import answer, drop, drop_answer
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.orders import DEAD, GROUP, QUEUE, RETRY, TOPIC
from tests.consuming import QUICK, Events, Seen, consuming, numbered, until


def fill(cluster, topic, count, start=0, **options):
    for body in numbered(count, start):
        cluster.send(topic, body, **options)


class Held(Seen):
    """A listener that keeps its first call until it is released, and counts the calls that run at once."""

    def __init__(self):
        super().__init__()
        self.begun, self.released = threading.Event(), threading.Event()
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def __call__(self, message):
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        super().__call__(message)
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


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_after_a_reset_no_call_begins_before_the_one_that_runs_has_returned(orders, held, kind, model, tmp_path):
    orders.fill(5)

    async def listen(message):
        await asyncio.to_thread(held, message)

    listener = held if kind == "plain" else listen
    options = {"message_model": model, "orderly": True}
    if model == "broadcasting":
        options["offset_store_dir"] = tmp_path
    with orders.consuming(listener, **options) as (consumer, _):
        assert held.begun.wait(30)
        consumer.reset_offsets(TOPIC, "earliest")
        until(lambda: any(each.unfinished == 5 for each in consumer.progress().values()), "the new period has them")
        assert "returns" in orders.events.wait_for("message-stuck").text, "that the queue waits is told"
        assert len(held.messages) == 1
        held.released.set()
        held.wait(lambda seen: len(seen.messages) == 6)
    assert held.bodies == [b"m0", *numbered(5)]
    assert held.most_running == 1


def test_a_short_call_that_outlives_its_period_is_not_worth_a_word(orders, held):
    orders.fill(2)
    with orders.consuming(held, orderly=True) as (consumer, _):
        assert held.begun.wait(30)
        consumer.reset_offsets(TOPIC, "earliest")
        held.released.set()
        held.wait(lambda seen: len(seen.messages) == 3)
    assert not orders.events.of("message-stuck")
    assert held.most_running == 1


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_a_call_that_takes_too_long_is_told_and_goes_on(orders, held, model, tmp_path):
    orders.fill(2)
    options = {"orderly": True, "message_model": model, "consume_timeout_s": 0.1}
    if model == "broadcasting":
        options["offset_store_dir"] = tmp_path
    with orders.consuming(held, **options):
        assert orders.events.wait_for("message-stuck").facts["offset"] == 0
        held.released.set()
        held.wait_for(2)
    assert held.bodies == numbered(2)
    assert len(orders.events.of("message-stuck")) == 1
    assert not orders.cluster.messages(RETRY)


def test_a_queue_whose_call_outlives_the_close_stays_locked(orders, broker, held):
    """The next member gets it when the lock expires: it must not begin beside the call."""
    orders.make(queues=2)
    orders.fill(1, queue_id=0)
    consumer = orders.consumer(**{**QUICK, "orderly": True})
    consumer.subscribe(TOPIC, held)
    with consumer:
        assert held.begun.wait(30)
        consumer.close(timeout_s=0.2)
    assert [queue.queue_id for queue in broker.locks(GROUP) if queue.topic == TOPIC] == [0]
    with orders.consuming(orderly=True, rebalance_interval_s=0.2) as (other, seen):
        until(lambda: [queue.queue_id for queue in other.progress() if queue.topic == TOPIC] == [1], "the other queue")
        assert not seen.messages
        held.released.set()
        broker.expire_locks()
        seen.wait_for(1)


def test_a_lock_that_another_member_keeps_is_told_and_asked_for_again(orders, broker):
    orders.fill(1)
    broker.on(RequestCode.LOCK_BATCH_MQ, answer(0, body=b'{"lockOKMQSet":[]}'), times=None)
    options = {"orderly": True, "start_wait_s": 0.1}
    with orders.consuming(**options) as (consumer, seen):
        told = orders.events.wait_for("lock-lost")
        assert "another member has its lock" in told.text
        assert not consumer.progress()
        broker.clear_faults()
        seen.wait_for(1)


def test_a_queue_whose_last_commit_was_not_answered_stays_locked(orders, broker):
    """The broker may execute it yet: over what the next owner has committed, if there were one by then."""
    orders.fill(3)

    def ours(command):
        return command.fields["consumerGroup"] == GROUP and command.fields["topic"] == TOPIC

    options = {**QUICK, "orderly": True, "call_timeout_s": 1.0, "commit_interval_s": 60}
    consumer, seen = orders.consumer(**options), Seen()
    consumer.subscribe(TOPIC, seen)
    with consumer:
        seen.wait_for(3)
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, drop, times=None, when=ours)
    assert [queue.topic for queue in broker.locks(GROUP) if queue.topic == TOPIC] == [TOPIC]
    assert not [queue for queue in broker.locks(GROUP) if queue.topic != TOPIC], "the others are free"


def test_a_lock_is_given_back_when_the_queue_cannot_begin(orders, broker):
    """Or its next member would wait for a minute."""
    orders.fill(1)

    def ours(command):
        return command.fields["consumerGroup"] == GROUP and command.fields["topic"] == TOPIC

    def lock_is_free():
        return not [queue for queue in broker.locks(GROUP) if queue.topic == TOPIC]

    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(1, "no"), times=None, when=ours)
    with orders.consuming(orderly=True) as (consumer, seen):
        broker.wait_for(RequestCode.QUERY_CONSUMER_OFFSET, when=ours)
        until(lock_is_free, "given back")
        broker.clear_faults()
        seen.wait_for(1)


@pytest.mark.parametrize("batch", [1, 4])
def test_retried_messages_of_several_topics_go_to_their_own_listeners(orders, batch):
    """They share the queues of the retry TOPIC; orderly consumers get them from members that are not."""
    topics = [f"{TOPIC}-{number}" for number in range(3)]
    for each in topics:
        orders.make(1, each)
    retry = RETRY
    orders.make(1, retry)
    for number in range(60):
        orders.cluster.send(retry, b"m%d" % number, properties={"RETRY_TOPIC": topics[number % 3]})
    got, changed, failed = defaultdict(list), threading.Condition(), set()

    def listener(name):
        def handle(messages):
            messages = messages if isinstance(messages, list) else [messages]
            assert len({message.topic for message in messages}) == 1, "a call is of one TOPIC"
            first = messages[0]
            if int(first.body[1:]) % 7 == 0 and first.body not in failed:
                failed.add(first.body)
                return Suspend(for_s=0.01)
            with changed:
                got[name] += messages
                changed.notify_all()

        return handle

    consumer = PushConsumer(
        GROUP, name_server=orders.cluster.name_server, **{**QUICK, "orderly": True, "listener_batch_size": batch}
    )
    for each in topics:
        consumer.subscribe(each, listener(each))
    with consumer, changed:
        assert changed.wait_for(lambda: sum(map(len, got.values())) >= 60, 30)
    for number, each in enumerate(topics):
        assert [message.topic for message in got[each]] == 20 * [each]
        assert [message.body for message in got[each]] == numbered(60)[number::3]


def test_dead_letters_of_an_orderly_queue_are_sent_with_growing_pauses(orders, broker):
    orders.fill(2)
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, drop_answer, times=3)
    seen = Seen(lambda message: Suspend(for_s=0.01) if message.body == b"m0" else None)
    began = time.monotonic()
    with consuming(
        orders.cluster, TOPIC, GROUP, seen, orderly=True, max_reconsume_times=1, call_timeout_s=0.3
    ):
        seen.wait_for(2)
    assert time.monotonic() - began > 6, "a second, two, four"
    assert Counter(message.body for message in orders.cluster.messages(DEAD)) == {b"m0": 4}


def test_a_listener_that_commits_too_late_is_told_what_it_waits_for(orders):
    """With `auto_commit=False` and as many messages as there is room for, nothing more can come until COMMIT."""
    orders.fill(300)
    commits, events = threading.Event(), Events()

    def judge(message):
        if commits.is_set() and message.queue_offset % 10 == 9:
            return ConsumeResult.COMMIT

    options = {**QUICK, "orderly": True, "auto_commit": False, "max_cached_messages": 64}
    consumer, seen = orders.consumer(**options), Seen(judge)
    consumer.subscribe(TOPIC, seen)
    with consumer:
        event = events.wait_for("message-stuck")
        assert event.queue == QUEUE
        assert "COMMIT" in event.text
        assert "max_cached_messages" in event.text
        assert len(seen.messages) < 100
        commits.set()
        consumer.reset_offsets(TOPIC, "earliest")
        seen.wait(lambda seen: b"m299" in seen.bodies)
        orders.wait_committed(300)
    assert len(events.of("message-stuck")) == 1


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_lists_are_full_when_there_is_enough_whatever_a_pull_brings(cluster, topic, group, kind):
    """Brokers answer a pull with 32 messages unless told otherwise."""
    cluster.create_topic(topic, queues=1)
    fill(cluster, topic, 200)
    sizes, begun, released, seen = [], threading.Event(), threading.Event(), []

    def take(messages):
        begun.set()
        assert released.wait(60)
        sizes.append(len(messages))
        seen.extend(message.queue_offset for message in messages)

    async def take_async(messages):
        await asyncio.to_thread(take, messages)

    listener = take if kind == "plain" else take_async
    options = {"orderly": True, "listener_batch_size": 64}
    with consuming(cluster, topic, group, listener, **options) as (consumer, _):
        assert begun.wait(30)
        until(lambda: sum(each.unfinished for each in consumer.progress().values()) == 200, "all wait")
        released.set()
        until(lambda: len(seen) == 200, "all consumed")
    assert seen == list(range(200))
    assert sizes[1:-1] == [64] * len(sizes[1:-1]), sizes
    assert len(sizes) <= 5
