"""H34, H35, H37, H41, H43: messages that fail, take too long, never end, or are not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pyrocket_consumer import Message, QueueProgress
from pyrocket_consumer.testing import Gate, answer, close_connection, drop
from pyrocket_consumer.testing.faults import Fault
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import WAIT_S, Seen, numbered, until
from tests.hazards.members import Kind, broadcasting, faulty, filled, give_time_to, ours, patience_s, settle
from tests.hazards.naive import NaiveMember, Window
from tests.resetting import queue

SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)


def fails_at_first(body: bytes, error: Callable[[], BaseException] = ValueError) -> Callable[[Message], None]:
    """Return a listener that raises for one message, the first time."""
    failed = []

    def listener(message: Message) -> None:
        if message.body == body and not failed:
            failed.append(message)
            raise error()

    return listener


# --- H34


class SendsBackBlindly(NaiveMember):
    """Has failed messages sent back without looking at the answer."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        super().failed(window, message, error)
        self.acked(window, message)


def a_failed_message_is_not_passed(
    cluster: Any,
    names: Any,
    member: Kind,
    trouble: Fault = answer(1, "no"),  # noqa: B008
) -> None:
    """Neither send-back nor the retry topic takes the message; then the process ends."""
    topic, group = filled(cluster, names, queues=1, messages=20)
    broker = cluster.broker("broker-a")

    def listener(message: Message) -> None:
        if message.body == b"m7":
            raise ValueError("not this one")

    broker.on(SEND_BACK, trouble, times=None, when=lambda command: command.fields["group"] == group)
    for code in SENDS:
        broker.on(code, answer(1, "no"), times=None)
    try:
        with member(cluster, topic, group, Seen(listener), call_timeout_s=0.2) as consumer:
            consumer.seen.wait_for(20)
            broker.wait_for(SEND_BACK, 1, WAIT_S, when=lambda command: command.fields["group"] == group)
            until(lambda: consumer.stored().get(queue(topic, 0), 0) >= 7, "committed up to it")
            settle()
            assert consumer.stored() == {queue(topic, 0): 7}, "committed past a message that failed"
    finally:
        broker.clear_faults()
    assert cluster.committed(group, topic) == {0: 7}, "committed past a message that failed"
    with ours(cluster, topic, group) as again:
        again.seen.wait_for(13)
        assert b"m7" in again.seen.bodies


@pytest.mark.hazard("H34")
@pytest.mark.parametrize(
    "trouble", [answer(1, "no"), drop, close_connection], ids=["refused", "unanswered", "disconnected"]
)
@pytest.mark.parametrize("member", [ours, faulty(SendsBackBlindly, "committed past a message that failed")])
def test_a_message_that_cannot_be_sent_back_is_not_committed_past(embedded, names, trouble, member):
    """A failed message stays unfinished until the broker has acknowledged that it takes it; the next member gets it.

    Faulty: Go up to 2.1.2 and old C++ clients count it as consumed whatever the broker says.
    """
    a_failed_message_is_not_passed(embedded, names, member, trouble)


class ForgetsWhatItCouldNotSendBack(NaiveMember):
    """Leaves a message that could not be sent back unfinished, and never tries it again."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        if message.body != b"m1":
            super().failed(window, message, error)


def it_is_tried_again_here(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = filled(cluster, names, queues=1, messages=3)
    broker = cluster.broker("broker-a")
    for code in (SEND_BACK, *SENDS):
        broker.on(code, answer(1, "no"), times=None)
    attempts = []
    listener = fails_at_first(b"m1")

    def count(message: Message) -> None:
        if message.body == b"m1":
            attempts.append(message.reconsume_times)
        listener(message)

    try:
        with member(cluster, topic, group, Seen(count)) as consumer:
            consumer.seen.wait_for(3)
            until(
                lambda: consumer.seen.bodies.count(b"m1") == 2,
                "tried again where it is",
                WAIT_S if member is ours else 1.0,
            )
            until(lambda: consumer.stored() == {queue(topic, 0): 3}, "all is committed")
            if member is ours:
                assert attempts == [0, 1]
    finally:
        broker.clear_faults()


@pytest.mark.hazard("H34")
@pytest.mark.parametrize("member", [ours, faulty(ForgetsWhatItCouldNotSendBack, "tried again where it is")])
def test_a_message_that_cannot_be_sent_back_is_tried_again_here(embedded, names, member):
    """After 5 s it is given to the listener again, as its second attempt, until it succeeds or can be sent back.

    Faulty: a client whose local retry is lost, so that the message holds the offset for ever.
    """
    it_is_tried_again_here(embedded, names, member)


# --- H35


class CleansUpWhatTakesTooLong(NaiveMember):
    """Sends a message back whose listener takes longer than `consume_timeout_s`, and counts it as done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sent_back: list[Message] = []

    def consume(self, window: Window, message: Message) -> None:
        cleaner = threading.Timer(self.options["consume_timeout_s"], self.clean, [window, message])
        cleaner.start()
        try:
            super().consume(window, message)
        finally:
            cleaner.cancel()

    def clean(self, window: Window, message: Message) -> None:
        self.failed(window, message, TimeoutError())

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        with self.lock:
            if message in self._sent_back:
                return
            self._sent_back.append(message)
        super().failed(window, message, error)


class CleansUpTwice(CleansUpWhatTakesTooLong):
    """When the listener fails in the end, sends the message back once more."""

    failed = NaiveMember.failed


def what_takes_too_long_is_sent_back_once(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = filled(cluster, names, queues=1, messages=3)
    broker, release, answers = cluster.broker("broker-a"), threading.Event(), Gate(answers=True)

    def is_ours(command: Any) -> bool:
        return bool(command.fields["group"] == group)

    def listener(message: Message) -> None:
        if message.body == b"m1" and message.reconsume_times == 0:
            release.wait(WAIT_S)
            raise ValueError("after all")

    broker.on(SEND_BACK, answers, times=None, when=is_ours)
    options = {"consume_timeout_s": 0.2, "call_timeout_s": WAIT_S}
    with member(cluster, topic, group, Seen(listener), **options) as consumer:
        try:
            answers.wait_held(1, WAIT_S)
            release.set()
            settle()  # the listener fails while the broker's answer is on its way
            answers.open()
            consumer.seen.wait(lambda seen: seen.bodies.count(b"m1") >= 2)
            settle()
            stuck = next(message for message in consumer.seen.messages if message.body == b"m1")
            places = [each.command.fields["offset"] for each in broker.requests(SEND_BACK) if is_ours(each.command)]
            sent_back = places.count(str(stuck.commit_log_offset))  # a busy machine may be too slow with others, too
            assert sent_back == 1, f"sent back {sent_back} times"
            assert consumer.seen.bodies.count(b"m1") == 2
            until(lambda: consumer.stored() == {queue(topic, 0): 3}, "all is committed")
        finally:
            release.set()
            answers.open()


@pytest.mark.hazard("H35")
@pytest.mark.parametrize("member", [ours, faulty(CleansUpTwice, "sent back 2 times")])
def test_a_message_that_takes_too_long_and_then_fails_is_sent_back_once(embedded, names, member):
    """After consume_timeout_s a message is sent back and told as stuck; what its listener returns later counts no more.

    Faulty: Java before 5.1 and Go send it back again when the listener fails.
    """
    what_takes_too_long_is_sent_back_once(embedded, names, member)


# --- H37


class LooksAtTheBufferOnly(NaiveMember):
    """Pulls on while few messages are unfinished, however far the commit offset stays behind."""


def a_stuck_message_bounds_what_is_pulled(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    cluster.send(topic, count=1000)
    release = threading.Event()

    def listener(message: Message) -> None:
        if message.queue_offset == 3:
            release.wait(WAIT_S)

    with member(cluster, topic, group, Seen(listener), max_span=100, pull_batch_size=8) as consumer:
        try:
            consumer.seen.wait(lambda seen: len(seen.messages) >= 100)

            def ahead() -> int:
                return max(message.queue_offset for message in consumer.seen.messages) - 3

            give_time_to(lambda: ahead() >= 200, member)
            assert ahead() < 200, f"{ahead()} messages behind the stuck one would all come again"
            until(lambda: consumer.stored() == {queue(topic, 0): 3}, "committed up to the stuck one")
            if member is ours:

                def progress() -> QueueProgress:
                    (found,) = [each for mq, each in consumer.consumer.progress().items() if mq.topic == topic]
                    return found

                until(lambda: progress().unfinished == 1, "all others are finished")
                stuck = next(message for message in consumer.seen.messages if message.queue_offset == 3)
                assert progress().oldest_unfinished == stuck.message_id
            release.set()
            consumer.seen.wait(lambda seen: len(seen.messages) >= 1000)
            until(lambda: consumer.stored() == {queue(topic, 0): 1000}, "all is committed")
        finally:
            release.set()


@pytest.mark.hazard("H37")
@pytest.mark.parametrize("member", [ours, faulty(LooksAtTheBufferOnly, "behind the stuck one would all come again")])
def test_behind_a_stuck_message_only_so_much_is_pulled(embedded, names, member):
    """At most max_span offsets are pulled past the oldest unfinished message, which progress() names.

    Faulty: Java and Go measure what is in the buffer: one stuck message, and everything after it comes again.
    """
    a_stuck_message_bounds_what_is_pulled(embedded, names, member)


class LosesTheWorkersMessage(NaiveMember):
    """When a worker ends, what it was doing is neither finished nor tried again."""

    def consume(self, window: Window, message: Message) -> None:
        try:
            super().consume(window, message)
        except SystemExit:
            pass


def no_exception_loses_a_message(cluster: Any, names: Any, member: Kind, error: type[BaseException]) -> None:
    topic, group = filled(cluster, names, queues=1, messages=5)
    with member(cluster, topic, group, Seen(fails_at_first(b"m1", error))) as consumer:
        consumer.seen.wait_for(5)
        until(lambda: consumer.stored() == {queue(topic, 0): 5}, "nothing holds the offset", patience_s(member))
        consumer.seen.wait(lambda seen: seen.bodies.count(b"m1") == 2)


@pytest.mark.hazard("H37")
@pytest.mark.parametrize(
    ("member", "error"),
    [
        (ours, SystemExit),
        (ours, KeyboardInterrupt),
        faulty(LosesTheWorkersMessage, "nothing holds the offset", SystemExit),
    ],
)
def test_a_listener_that_ends_its_thread_costs_no_message(embedded, names, member, error):
    """Whatever a listener raises, SystemExit and KeyboardInterrupt too, its message comes again and the rest goes on.

    Faulty: a worker that dies with its message, which then holds the offset for ever.
    """
    no_exception_loses_a_message(embedded, names, member, error)


# --- H41

WANTED, UNWANTED = "AaAa", "BBBB"
"""Two tags with one hash: brokers take them for the same."""


class FiltersWithoutMoving(NaiveMember):
    """Passes over what the subscription does not want, and commits only what a listener had."""

    def on_found(self, window: Window, messages: list[Message], next_offset: int) -> None:
        wanted = [message for message in messages if message.tags in (None, WANTED)]
        if wanted:
            super().on_found(window, wanted, next_offset)
        else:
            window.next_offset = next_offset


def filtered_messages_move_the_offset(cluster: Any, names: Any, member: Kind) -> None:
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    cluster.send(topic, tags=UNWANTED, count=100)
    with member(cluster, topic, group, selector=WANTED, pull_hold_s=WAIT_S) as consumer:
        try:
            until(
                lambda: consumer.stored() == {queue(topic, 0): 100},
                "what nobody wants is committed past",
                patience_s(member),
            )
        except AssertionError as error:
            progress = consumer.consumer.progress() if member is ours else consumer.held()
            told = list(map(str, consumer.events.all))
            raise AssertionError(f"{error}: {consumer.stored()} {progress} {told}") from None
        cluster.send(topic, b"wanted", tags=WANTED)
        consumer.seen.wait_for(1)
        assert consumer.seen.bodies == [b"wanted"]
        until(lambda: consumer.stored() == {queue(topic, 0): 101}, "committed")


@pytest.mark.hazard("H41")
@pytest.mark.parametrize("member", [ours, faulty(FiltersWithoutMoving, "what nobody wants is committed past")])
def test_messages_that_only_the_client_can_filter_out_are_committed_past(cluster, names, member):
    """What the broker sends because of its tag's hash, and the subscription does not want, moves the commit offset.

    Faulty: Java moves only where it pulls next; after a restart the same messages are scanned again.
    """
    filtered_messages_move_the_offset(cluster, names, member)


# --- H43


class KeepsFailedMessages(NaiveMember):
    """Broadcasting: takes only messages that succeeded out of the window."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        pass


def a_failed_broadcast_is_told_and_passed(cluster: Any, names: Any, member: Kind, directory: Any) -> None:
    topic, group = filled(cluster, names, queues=1, messages=10)
    with member(cluster, topic, group, Seen(fails_at_first(b"m5")), **broadcasting(directory)) as consumer:
        consumer.seen.wait_for(10)
        until(
            lambda: consumer.stored() == {queue(topic, 0): 10},
            "the failed message does not hold the offset",
            patience_s(member),
        )
        assert [each.queue for each in consumer.events.of("message-given-up")] == [queue(topic, 0)]
    assert consumer.seen.bodies.count(b"m5") == 1
    assert sorted(consumer.seen.bodies) == numbered(10)


@pytest.mark.hazard("H43")
@pytest.mark.parametrize("member", [ours, faulty(KeepsFailedMessages, "the failed message does not hold the offset")])
def test_a_message_that_fails_in_a_broadcasting_group_is_told_and_passed(embedded, names, tmp_path, member):
    """A broadcasting group has no retry: a failed message is told as given up, and the offset goes on.

    Faulty: Go keeps it in its window for ever, which pins the offset and, in the end, stops the queue.
    """
    a_failed_broadcast_is_told_and_passed(embedded, names, member, tmp_path)


@pytest.mark.hazard("H34")
@pytest.mark.parametrize("check", [a_failed_message_is_not_passed, it_is_tried_again_here])
def test_the_naive_member_is_right_to_send_back(embedded, names, check):
    """What the faulty ones are made of passes: it is the fault that the check finds."""
    check(embedded, names, NaiveMember)


@pytest.mark.hazard("H35")
def test_the_naive_member_is_right_about_time(embedded, names):
    """It needs to know a time limit first."""
    what_takes_too_long_is_sent_back_once(embedded, names, CleansUpWhatTakesTooLong)


@pytest.mark.hazard("H43")
def test_the_naive_member_is_right_to_go_on(embedded, names, tmp_path):
    a_failed_broadcast_is_told_and_passed(embedded, names, NaiveMember, tmp_path)
