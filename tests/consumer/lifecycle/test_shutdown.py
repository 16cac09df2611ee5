"""H25–H28: how consumers end, and how orderly queues get new owners."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import pytest

from pyrocket_consumer import Message, MessageQueue, Suspend
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.members import Kind, faulty, filled, give_time_to, ours, request_matcher, settle, wait_limit_s
from tests.hazards.naive import NaiveMember, Window
from tests.resets import queue
from tests.testing.raw_client import RawClient

PULL, COMMIT, UNLOCK = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNLOCK_BATCH_MQ
LEAVE, SEND_BACK = RequestCode.UNREGISTER_CLIENT, RequestCode.CONSUMER_SEND_MSG_BACK


# --- H25


class InterruptsListeners(NaiveMember):
    """Java interrupts listeners at once, and sends their unfinished messages back."""

    def finish_listeners(self) -> None:
        for window in list(self.windows.values()):
            for message in list(window.unfinished.values()):
                self.send_back(message)


class LeavesFirst(NaiveMember):
    """Unlocks its queues and leaves the group before it stores its offsets."""

    def close(self) -> None:
        if not self.closed.is_set():
            self.closing.set()
            self.finish_listeners()
            self.leave()
            self.persist_all()
            self._end()


@contextmanager
def failing_with(what: Callable[[], str]) -> Iterator[None]:
    """Give a wait that fails an error with this text."""
    try:
        yield
    except AssertionError:
        raise AssertionError(what()) from None


def sent_back(broker: Any, group: str) -> int:
    return sum(each.command.fields["group"] == group for each in broker.requests(SEND_BACK))


@contextmanager
def closing_unacknowledged(consumer: Any, broker: Any, topic: str) -> Iterator[None]:
    """Close `consumer`, which has consumed 10. The broker acknowledges its last commit only after the block."""
    gate = Gate()
    until(lambda: consumer.held() == {queue(topic, 0): 10}, "consumed")
    broker.forget_requests()
    broker.on(COMMIT, gate, times=None, when=request_matcher(topic))
    closer = threading.Thread(target=consumer.close)
    closer.start()
    try:
        gate.wait_held(timeout_s=WAIT_S)
        settle()
        yield
    finally:
        broker.clear_faults()
        gate.open()
        closer.join(WAIT_S)


@pytest.mark.hazard("H25")
@pytest.mark.parametrize("member", [ours, faulty(InterruptsListeners, "were sent back, and will be consumed twice")])
def test_close_waits_for_running_calls(embedded, names, member):
    """`close` waits up to `shutdown_timeout_s` for running listener calls, and commits the messages that they finish.

    Faulty: Java interrupts them and sends their messages back.
    """
    # 20 listener calls run when the consumer is closed
    topic, group = filled(embedded, names, queues=1, messages=20)
    broker, release = embedded.broker("broker-a"), threading.Event()
    options = {"consume_threads": 20, "shutdown_timeout_s": 20.0, "commit_interval_s": 60.0}
    with member(embedded, topic, group, lambda _: release.wait(WAIT_S) and None, **options) as consumer:
        closer = threading.Thread(target=consumer.close)
        try:
            consumer.seen.wait_for(20)
            closer.start()
            give_time_to(lambda: sent_back(broker, group) == 20, member)
        finally:
            release.set()
        closer.join(WAIT_S)
    assert sent_back(broker, group) == 0, f"{sent_back(broker, group)} were sent back, and will be consumed twice"
    assert embedded.committed(group, topic) == {0: 20}, "close did not wait for running calls"


@pytest.mark.hazard("H25")
@pytest.mark.parametrize("member", [ours, faulty(LeavesFirst, "it left before its last commit was acknowledged")])
def test_the_last_commit_comes_before_leaving_the_group(embedded, names, member):
    """The consumer leaves the group after its last commits are acknowledged, so the next owners of its queues read
    them.

    Faulty: Java and Go do not wait for the acknowledgement of the last commits, and Go leaves first.
    """
    topic, group = filled(embedded, names, queues=1, messages=10)
    broker = embedded.broker("broker-a")
    with (
        member(embedded, topic, group, commit_interval_s=60.0, call_timeout_s=20.0) as consumer,
        closing_unacknowledged(consumer, broker, topic),
    ):
        assert not broker.requests(LEAVE), "it left before its last commit was acknowledged"
    assert broker.requests(LEAVE)
    assert embedded.committed(group, topic) == {0: 10}


@pytest.mark.hazard("H25")
@pytest.mark.parametrize("member", [ours, faulty(InterruptsListeners, "1 were sent back, and will be consumed twice")])
def test_unfinished_messages_are_not_sent_back_or_committed(embedded, names, member):
    """A message whose call does not end in time stays unfinished, and the next owner of the queue gets it once.

    Faulty: Java also sends it back, so each restart makes a copy.
    """
    # One of the listener calls does not end within the timeout of the close.
    topic, group = filled(embedded, names, queues=1, messages=10)
    broker, release = embedded.broker("broker-a"), threading.Event()

    def listener(message: Message) -> None:
        if message.queue_offset == 9:
            release.wait(30)

    try:
        with member(embedded, topic, group, listener, consume_threads=20, shutdown_timeout_s=0.2) as consumer:
            consumer.seen.wait_for(10)
            until(lambda: consumer.stored() == {queue(topic, 0): 9}, "finished messages are committed")
    finally:
        release.set()
    settle()
    assert sent_back(broker, group) == 0, f"{sent_back(broker, group)} were sent back, and will be consumed twice"
    assert embedded.committed(group, topic) == {0: 9}, "an unfinished message was committed"
    with ours(embedded, topic, group) as next_one:
        next_one.seen.wait_for(1)
        assert next_one.seen.bodies == numbered(1, 9)


@pytest.mark.hazard("H25")
@pytest.mark.parametrize("member", [ours, faulty(LeavesFirst, "unlocked before its last offset was stored")])
def test_an_orderly_queue_is_unlocked_after_its_last_commit(embedded, names, member):
    """The lock of an orderly queue is released after its last offset is stored, so the next owner begins behind it.

    Faulty: Java and Go unlock first.
    """
    topic, group = filled(embedded, names, queues=1, messages=10)
    broker = embedded.broker("broker-a")
    options = {"orderly": True, "commit_interval_s": 60.0, "call_timeout_s": 20.0}
    with member(embedded, topic, group, **options) as consumer:
        consumer.seen.wait_for(10)
        with closing_unacknowledged(consumer, broker, topic):
            assert not broker.requests(UNLOCK), "unlocked before its last offset was stored"
        assert broker.requests(UNLOCK)
    assert embedded.committed(group, topic) == {0: 10}


# --- H26


class GivesUpInEachRound(NaiveMember):
    """Java and Go send the messages of a failed batch without attempts left to the dead letters. Then the whole batch
    is delivered again."""

    def consume_in_order(self, window: Window, message: Message) -> None:
        batch, rounds = [message], 0
        while len(batch) < 4:
            try:
                batch.append(window.tasks.get(timeout=0.3)[1])
            except Empty:
                break
        while not window.dropped and not self.closing.is_set():
            if self.seen._judge(batch) is None:
                for each in batch:
                    self.acked(window, each)
                return
            for each in batch:
                if each.reconsume_times + rounds >= self.options["max_reconsume_times"]:
                    self.send_back(each, delay_level=-1)
            rounds += 1
            self.closing.wait(0.05)


@pytest.mark.hazard("H26")
@pytest.mark.parametrize("member", [ours, faulty(GivesUpInEachRound, r"given up \d+ times")])
def test_each_message_of_a_batch_is_given_up_once(embedded, names, member):
    """A message without attempts left leaves its batch when the dead-letter topic has it. The other messages are
    redelivered without it.

    Faulty: Java and Go give it up again in each round.
    """
    # The first two of a batch of four have no attempts left, and the batch fails while the first is in it.
    topic, group, broker = names.topic(), names.group(), embedded.broker("broker-a")
    embedded.create_topic(topic, queues=1)
    with RawClient(broker.address) as producer:
        for number, body in enumerate(numbered(4)):
            producer.produce(topic, body, reconsumeTimes=3 if number < 2 else 0)

    def judge(unit: Any) -> Suspend | None:
        messages = unit if isinstance(unit, list) else [unit]
        return Suspend(for_s=0.02) if messages[0].queue_offset == 0 else None

    def dead() -> Counter[bytes]:
        return Counter(message.body for message in embedded.messages(f"%DLQ%{group}"))

    options = {"orderly": True, "listener_batch_size": 4, "max_reconsume_times": 3}
    with member(embedded, topic, group, RecordingListener(judge), **options) as consumer:
        until(lambda: len(dead()) >= 2, "two messages are given up")
        settle()
        assert set(dead().values()) == {1}, f"given up {max(dead().values())} times"
        assert set(dead()) == set(numbered(2))
        until(lambda: consumer.stored() == {queue(topic, 0): 4}, "all are finished")


class EndsWithTheException(NaiveMember):
    """A BaseException ends the task that consumes the queue, and the queue still counts as being consumed."""

    def consume_in_order(self, window: Window, message: Message) -> None:
        try:
            super().consume_in_order(window, message)
        except SystemExit:
            self.closing.wait()


@pytest.mark.hazard("H26")
@pytest.mark.parametrize(
    ("member", "error"),
    [(ours, SystemExit), (ours, KeyError), faulty(EndsWithTheException, "stuck behind b'm2'", SystemExit)],
)
def test_nothing_a_listener_raises_stops_an_orderly_queue(embedded, names, member, error):
    """Any exception of a listener is a failure of its message, which is redelivered first; then the queue continues.

    Faulty: in Java an exception at the wrong step leaves the queue marked as "being consumed" forever.
    """
    topic, group = filled(embedded, names, queues=1, messages=5)
    raised = threading.Event()

    def listener(message: Message) -> None:
        if message.queue_offset == 2 and not raised.is_set():
            raised.set()
            raise error

    with member(embedded, topic, group, listener, orderly=True) as consumer:
        with failing_with(lambda: f"stuck behind {consumer.seen.bodies[-1]!r}"):
            consumer.seen.wait_for(5, wait_limit_s(member))
        assert consumer.seen.bodies == [b"m0", b"m1", b"m2", b"m2", b"m3", b"m4"]
        until(lambda: consumer.stored() == {queue(topic, 0): 5}, "committed")


class UnlocksTooSoon(NaiveMember):
    """Java unlocks the queue, and the listener that still runs commits it afterwards."""

    def drop(self, queue: MessageQueue) -> None:
        window = self.windows[queue]
        self.unlock(queue)
        while window.unfinished:
            time.sleep(0.01)
        super().drop(queue)


def let_rounds_pass(cluster: Any, topic: str) -> None:
    """Wait until the consumer has fetched the route twice, and has followed it."""
    routes = cluster.name_server_node
    routes.forget_requests()
    routes.wait_for(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2, timeout_s=WAIT_S, when=request_matcher(topic))
    settle()
    settle()


@contextmanager
def a_listener_that_runs(cluster: Any, names: Any, member: Kind) -> Iterator[tuple[Any, str, str, threading.Event]]:
    """An orderly member that holds two queues. Its listener runs for queue 1 until the event is set."""
    topic, group = filled(cluster, names, queues=2, messages=0)
    begun, release = threading.Event(), threading.Event()

    def listener(message: Message) -> None:
        if message.body == b"slow":
            begun.set()
            release.wait(30)

    try:
        with member(cluster, topic, group, listener, orderly=True, rebalance_interval_s=0.2) as consumer:
            until(lambda: len(consumer.held()) == 2, "both queues")
            cluster.send(topic, b"slow", queue_id=1)
            assert begun.wait(30)
            yield consumer, topic, group, release
    finally:
        release.set()


@pytest.mark.hazard("H26")
@pytest.mark.parametrize("member", [ours, faulty(UnlocksTooSoon, "committed after it was unlocked")])
def test_no_commit_follows_the_unlock(embedded, names, member):
    """A revoked queue is fenced, then committed, then unlocked. No commit follows, whatever its listener does later.

    Faulty: Java unlocks between the listener's end and the commit.
    """
    # A queue of an orderly member is revoked while its listener runs.
    broker = embedded.broker("broker-a")
    with a_listener_that_runs(embedded, names, member) as (consumer, topic, group, release):
        broker.forget_requests()
        embedded.create_topic(topic, queues=2, read_queues=1)
        let_rounds_pass(embedded, topic)
        if member is UnlocksTooSoon:
            broker.wait_for(UNLOCK, timeout_s=WAIT_S)
        release.set()
        until(lambda: list(consumer.held()) == [queue(topic, 0)], "given up")
        requests = [each.command for each in broker.requests()]
        unlocked = next(index for index, each in enumerate(requests) if each.code == UNLOCK)
        is_ours = request_matcher(topic, queueId=1)
        commits = [index for index, each in enumerate(requests) if each.code == COMMIT and is_ours(each)]
        assert max(commits, default=-1) < unlocked, "committed after it was unlocked, over the next owner's offset"
        assert member is not ours or embedded.committed(group, topic).get(1) == 1, "the listener had time to finish"


# --- H27


class LocksInBroadcastingToo(NaiveMember):
    """Locks every orderly queue at its broker, which grants each lock to one member of the group."""

    def begin(self, queue: MessageQueue) -> None:
        if self.orderly:
            self.acquire(queue)
        super().begin(queue)


@pytest.mark.hazard("H27")
@pytest.mark.parametrize("member", [ours, faulty(LocksInBroadcastingToo, "the second member gets nothing")])
def test_orderly_broadcasting_takes_no_locks(cluster, names, tmp_path, member):
    """Each member of a broadcasting group consumes all queues, in order, and locks none at the broker.

    Faulty: Java up to 5.3.1, Go and C++: the second member waits for locks that the first one has.
    """
    topic, group = filled(cluster, names, queues=1, messages=10)
    options = {"orderly": True, "message_model": "broadcasting", "offset_store_dir": tmp_path}
    with (
        member(cluster, topic, group, instance_name="one", **options) as one,
        member(cluster, topic, group, instance_name="two", **options) as two,
    ):
        one.seen.wait_for(10)
        with failing_with(lambda: "the second member gets nothing"):
            two.seen.wait_for(10, wait_limit_s(member))
        assert one.seen.bodies == two.seen.bodies == numbered(10)
    if hasattr(cluster, "changes") and member is ours:
        assert not cluster.broker("broker-a").requests(RequestCode.LOCK_BATCH_MQ)


# --- H28


class KeepsWhatItCouldNotRemove(NaiveMember):
    """Java cannot remove the queue while a listener runs. The dropped queue stays in the table, and when it is assigned
    again, it is neither removed nor added."""

    def drop(self, queue: MessageQueue) -> None:
        window = self.windows[queue]
        if window.unfinished:
            window.dropped = True
        else:
            super().drop(queue)


@pytest.mark.hazard("H28")
@pytest.mark.parametrize("member", [ours, faulty(KeepsWhatItCouldNotRemove, "it is silent after the new assignment")])
def test_an_orderly_queue_that_is_assigned_again_is_pulled_at_once(embedded, names, member):
    """If a queue is revoked and assigned again, its first period ends when the listener has returned. A new period
    begins at once, and the queue is pulled within a second or two.

    Faulty: Java neither removes nor adds it, and it is silent for two minutes.
    """
    with a_listener_that_runs(embedded, names, member) as (consumer, topic, _, release):
        embedded.create_topic(topic, queues=2, read_queues=1)
        let_rounds_pass(embedded, topic)
        embedded.create_topic(topic, queues=2)
        let_rounds_pass(embedded, topic)
        release.set()
        embedded.send(topic, b"after", queue_id=1)
        with failing_with(lambda: "it is silent after the new assignment"):
            consumer.seen.wait(lambda seen: b"after" in seen.bodies, wait_limit_s(member))
        until(lambda: consumer.stored().get(queue(topic, 1)) == 2, "committed")
        assert consumer.seen.bodies.count(b"after") == 1


@pytest.mark.hazard("H25", "H26", "H27")
def test_the_naive_member_is_right(embedded, names, tmp_path):
    """The base class of the faulty members passes, so the checks find only the faults."""
    test_close_waits_for_running_calls(embedded, names, NaiveMember)
    test_the_last_commit_comes_before_leaving_the_group(embedded, names, NaiveMember)
    test_an_orderly_queue_is_unlocked_after_its_last_commit(embedded, names, NaiveMember)
    test_nothing_a_listener_raises_stops_an_orderly_queue(embedded, names, NaiveMember, KeyError)
    test_orderly_broadcasting_takes_no_locks(embedded, names, tmp_path, NaiveMember)
