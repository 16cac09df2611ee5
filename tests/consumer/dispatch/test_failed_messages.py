"""H34, H35, H37, H43: failed messages are redelivered in time, and the offset never passes one of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pyrocket_consumer import ConsumeResult, Message, Retry
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, answer, close_connection, delay, drop, drop_answer, handle_and_close
from tests.consumer.orders import DEAD, GROUP, QUEUE, RETRY, TOPIC, Orders, ours_and
from tests.consuming import WAIT_S, RecordingListener, consuming, numbered, until
from tests.hazards.members import broadcasting, faulty, ours, settle
from tests.hazards.naive import NaiveMember, Window

SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)


def take_nothing(broker: Any, trouble: Any = answer(1, "no")) -> None:  # noqa: B008
    """Let the broker accept no message, neither a send-back nor a new one."""
    broker.on(SEND_BACK, trouble, times=None)
    for code in SENDS:
        broker.on(code, answer(1, "no"), times=None)


def fails_at_first(body: bytes, error: Callable[[], BaseException] = ValueError) -> RecordingListener:
    """Return a listener that raises once, for one message."""

    def judge(message: Message) -> None:
        if message.body == body and seen.bodies.count(body) == 1:
            raise error()

    seen = RecordingListener(judge)
    return seen


def attempts(cluster: Any) -> Counter[int]:
    """Return the number of messages of each attempt in the retry topic."""
    return Counter(message.reconsume_times for message in cluster.messages(RETRY))


# --- messages that cannot be sent back


class SendsBackBlindly(NaiveMember):
    """Sends failed messages back without checking the response."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        super().failed(window, message, error)
        self.acked(window, message)


@pytest.mark.hazard("H34")
@pytest.mark.parametrize("trouble", [answer(1, "no"), drop, close_connection], ids=["refused", "lost", "disconnected"])
@ours_and(NaiveMember, faulty(SendsBackBlindly, "committed past a message that failed"))
def test_a_message_that_cannot_be_sent_back_holds_the_offset(embedded, broker, trouble, member):
    """A failed message stays unfinished until the broker has accepted it. If the member dies, the next one gets it.

    Faulty: Go up to 2.1.2 and old C++ clients count it as consumed even if the broker refuses it.
    """
    orders = Orders(embedded, messages=20)

    def judge(message: Message) -> None:
        if message.body == b"m7":
            raise ValueError("not this one")

    take_nothing(broker, trouble)
    with member(embedded, TOPIC, GROUP, RecordingListener(judge), call_timeout_s=0.2) as consumer:
        consumer.seen.wait_for(20)
        broker.wait_for(SEND_BACK, 1, WAIT_S)
        until(lambda: consumer.stored().get(QUEUE, 0) >= 7, "committed up to it")
        settle()
        assert consumer.stored() == {QUEUE: 7}, "committed past a message that failed"
    assert orders.committed == {0: 7}, "committed past a message that failed"
    broker.clear_faults()
    with ours(embedded, TOPIC, GROUP) as again:
        again.seen.wait_for(13)
        assert b"m7" in again.seen.bodies


class ForgetsWhatItCouldNotSendBack(NaiveMember):
    """Leaves a message that could not be sent back unfinished, and never retries it."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        if message.body != b"m1":
            super().failed(window, message, error)


@pytest.mark.hazard("H34")
@ours_and(NaiveMember, faulty(ForgetsWhatItCouldNotSendBack, "retried at this member"))
def test_a_message_that_cannot_be_sent_back_is_repeated_here(embedded, broker, member):
    """After 5 s the listener gets it again, as its second attempt, until it succeeds or can be sent back.

    Faulty: a client whose local retry is lost, so that the message holds the offset forever.
    """
    Orders(embedded, messages=3)
    take_nothing(broker)
    fails, tries = fails_at_first(b"m1"), []

    def judge(message: Message) -> None:
        if message.body == b"m1":
            tries.append(message.reconsume_times)
        fails(message)

    with member(embedded, TOPIC, GROUP, RecordingListener(judge)) as consumer:
        until(lambda: consumer.seen.bodies.count(b"m1") == 2, "retried at this member")
        until(lambda: consumer.stored() == {QUEUE: 3}, "all messages are committed")
        assert tries == [0, 1] or member is not ours


@pytest.mark.parametrize("trouble", [answer(1, "no"), drop], ids=["refused", "lost"])
def test_a_message_that_fails_again_at_once_is_sent_back_again(orders, broker, trouble):
    """No broker accepts it, and its second attempt fails as soon as it begins."""
    orders.fill(100)
    take_nothing(broker, trouble)
    seen = RecordingListener(lambda message: ConsumeResult.RETRY if message.reconsume_times < 2 else None)
    with orders.consuming(seen, call_timeout_s=0.5):
        seen.wait(lambda seen: len(seen.messages) == 300, 2 * WAIT_S)
        orders.wait_committed(100)
    assert set(Counter(seen.bodies).values()) == {3}


def test_a_stuck_message_that_cannot_be_sent_back_has_one_call(orders, broker):
    orders.fill(1)
    take_nothing(broker)
    release = threading.Event()
    seen = RecordingListener(lambda message: release.wait(60) and None)
    with orders.consuming(seen, consume_timeout_s=0.1):
        until(lambda: len(broker.requests(SEND_BACK)) == 2, "the second try, after five seconds")
        assert len(seen.messages) == 1
        release.set()
        orders.wait_committed(1)
    assert len(seen.messages) == 1, "the last result of the listener counts"
    assert len(orders.events.of("message-stuck")) == 1


# --- copies


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


@pytest.mark.hazard("H35")
@ours_and(CleansUpWhatTakesTooLong, faulty(CleansUpTwice, "sent back 2 times"))
def test_a_message_that_is_slow_and_then_fails_is_sent_back_once(embedded, broker, member):
    """After `consume_timeout_s` a message is sent back and reported as stuck. A later result of the call is ignored.

    Faulty: Java before 5.1 and Go send it back again when the listener fails.
    """
    Orders(embedded, messages=3)
    release, answers = threading.Event(), Gate(answers=True)

    def judge(message: Message) -> None:
        if message.body == b"m1" and message.reconsume_times == 0:
            release.wait(WAIT_S)
            raise ValueError("after all")

    broker.on(SEND_BACK, answers, times=None)
    with member(
        embedded, TOPIC, GROUP, RecordingListener(judge), consume_timeout_s=0.2, call_timeout_s=WAIT_S
    ) as consumer:
        answers.wait_held(1, WAIT_S)
        release.set()
        settle()  # the listener fails while the broker's response is in flight
        answers.open()
        consumer.seen.wait(lambda seen: seen.bodies.count(b"m1") >= 2)
        settle()
        sent_back = len(broker.requests(SEND_BACK))
        assert sent_back == 1, f"sent back {sent_back} times"
        assert consumer.seen.bodies.count(b"m1") == 2
        until(lambda: consumer.stored() == {QUEUE: 3}, "all messages are committed")


def test_a_broker_that_answers_late_makes_one_copy_an_attempt(orders, broker):
    """The response arrives after the deadline, and confirms the send-back."""
    orders.fill(3)
    broker.on(SEND_BACK, delay(1.0), times=None)
    seen = RecordingListener(lambda message: ConsumeResult.RETRY)
    with orders.consuming(seen, call_timeout_s=0.3, max_reconsume_times=4):
        seen.wait(lambda seen: sum(message.reconsume_times == 4 for message in seen.messages) >= 3)
        until(lambda: len(orders.dead) == 3, "given up")
        orders.wait_committed(3)
    assert attempts(orders.cluster) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert len(orders.dead) == 3


@pytest.mark.parametrize("fault", [drop_answer, handle_and_close])
def test_each_unanswered_send_back_may_make_one_copy(orders, broker, fault):
    orders.fill(1)
    broker.on(SEND_BACK, fault, times=None)
    seen = RecordingListener(lambda message: ConsumeResult.RETRY)
    with orders.consuming(seen, call_timeout_s=0.3):
        seen.wait(lambda seen: any(message.reconsume_times == 3 for message in seen.messages), 60)
        copies, requests_before = attempts(orders.cluster), len(broker.requests(SEND_BACK))
        assert sum(copies.values()) == requests_before
        assert max(copies.values()) <= 3, "each attempt makes as many copies as it has tries, not four for each"
        assert orders.events.of("send-back-failed")


def test_messages_stored_less_safely_are_not_sent_again(orders, broker):
    """Brokers report such a send-back as if it had failed."""

    def late_disk(exchange):
        exchange.handle(lambda stored: exchange.answer(exchange.request.make_response(1, "FLUSH_DISK_TIMEOUT")))

    orders.fill(1)
    broker.on(SEND_BACK, late_disk, times=None)
    with orders.consuming(
        RecordingListener(lambda message: None if message.reconsume_times else ConsumeResult.RETRY)
    ) as (_, seen):
        seen.wait(lambda seen: len(seen.messages) == 2)
        orders.wait_committed(1)
    assert attempts(orders.cluster) == {1: 1}


# --- other calls while one hangs


@pytest.mark.parametrize("size", [1, 2], ids=["messages", "lists"])
def test_a_failed_message_is_redelivered_while_a_later_call_hangs(orders, size):
    """Quick listeners get many messages at once. A hanging call must keep only its own message."""
    release, hanging, seen = threading.Event(), set(), RecordingListener()

    def handle(unit):
        messages = unit if size > 1 else [unit]
        for message in messages:
            seen(message)
        if b"m463" in [message.body for message in messages]:
            hanging.update(message.body for message in messages)
            release.wait(60)
        elif messages[0].reconsume_times == 0 and int(messages[0].body[1:]) >= 100:
            return Retry(delay_level=1)

    with orders.consuming(handle, listener_batch_size=size):
        orders.fill(100)
        seen.wait_for(100)
        orders.fill(600, 100)
        seen.wait(lambda seen: len(seen.messages) == 1300 - len(hanging))
        until(lambda: orders.committed == {0: min(int(body[1:]) for body in hanging)}, "the stuck one holds the offset")
        release.set()
        orders.wait_committed(700)
    again = [body for body in numbered(600, 100) if body not in hanging]
    assert Counter(seen.bodies) == Counter([*numbered(700), *again])


class LosesTheWorkersMessage(NaiveMember):
    """When a worker ends, its current message is neither finished nor retried."""

    def consume(self, window: Window, message: Message) -> None:
        try:
            super().consume(window, message)
        except SystemExit:
            pass


@pytest.mark.hazard("H37")
@pytest.mark.parametrize(
    ("member", "error"),
    [
        (ours, SystemExit),
        (ours, KeyboardInterrupt),
        faulty(LosesTheWorkersMessage, "nothing holds the offset", SystemExit),
    ],
)
def test_a_listener_that_ends_its_thread_costs_no_message(embedded, member, error):
    """After any exception of a listener, even SystemExit or KeyboardInterrupt, its message is redelivered. The other
    messages continue.

    Faulty: a worker that dies with its message, which then holds the offset forever.
    """
    Orders(embedded, messages=5)
    with member(embedded, TOPIC, GROUP, fails_at_first(b"m1", error)) as consumer:
        consumer.seen.wait_for(5)
        until(lambda: consumer.stored() == {QUEUE: 5}, "nothing holds the offset")
        consumer.seen.wait(lambda seen: seen.bodies.count(b"m1") == 2)


# --- giving up


def test_the_last_failure_is_reported_as_such(orders, caplog):
    orders.fill(2)
    seen = RecordingListener(lambda message: ConsumeResult.RETRY if message.body == b"m1" else None)
    caplog.set_level(logging.WARNING, "pyrocket_consumer.consumer")
    with orders.consuming(seen, max_reconsume_times=2):
        event = orders.events.wait_for("message-given-up")
        (dead,) = until(lambda: orders.dead, "it is in the dead letters")
    assert seen.bodies.count(b"m1") == 3
    assert [len(orders.events.of(kind)) for kind in ("message-given-up", "message-sent-back")] == [1, 2]
    assert (event.facts["failures"], event.facts["message_id"]) == (3, dead.message_id)
    assert DEAD in event.text
    assert [record.levelname for record in caplog.records if "message-given-up" in record.message] == ["WARNING"]


@pytest.mark.parametrize("refused", [False, True], ids=["send-back", "new message"])
def test_a_message_that_the_listener_gives_up_is_reported_so(orders, broker, refused):
    orders.fill(1)
    if refused:
        broker.on(SEND_BACK, answer(1, "no"), times=None)
    with orders.consuming(RecordingListener(lambda message: Retry(delay_level=-1))):
        assert orders.events.wait_for("message-given-up").facts["failures"] == 1
        orders.wait_committed(1)
    assert not orders.events.of("message-sent-back")
    assert len(orders.dead) == 1


def test_retries_of_a_topic_nobody_reads_go_to_no_other(orders):
    """They are sent back until their attempts are used up. None is lost, and no message waits for them."""
    other = orders.make(1, "other")
    orders.fill(20, 100, topic=other)
    with consuming(orders.cluster, other, GROUP, RecordingListener(lambda message: Retry(delay_level=3))) as (_, seen):
        seen.wait_for(20)
        until(lambda: orders.cluster.committed(GROUP, other) == {0: 20}, "sent back")
    orders.fill(5)
    seen = RecordingListener(lambda message: ConsumeResult.RETRY if message.reconsume_times == 0 else None)

    def ends():
        return {each: orders.broker.max_offset(RETRY, each) for each in orders.cluster.committed(GROUP, RETRY)}

    with orders.consuming(seen, max_reconsume_times=3):
        seen.wait(lambda seen: len(seen.messages) == 10)
        until(lambda: len(orders.dead) == 20, "they are in the dead-letter queue")
        until(lambda: orders.cluster.committed(GROUP, RETRY) == ends(), "and the retry topic continues")
    assert Counter(seen.bodies) == Counter(2 * numbered(5))
    warnings = [event for event in orders.events.all if other in event.text]
    assert len(warnings) == 1, "one event, not one for each message"
    assert "subscribe" in warnings[0].text


class KeepsFailedMessages(NaiveMember):
    """Broadcasting: removes only successful messages from the window."""

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        pass


@pytest.mark.hazard("H43")
@ours_and(NaiveMember, faulty(KeepsFailedMessages, "the failed message does not hold the offset"))
def test_a_failure_in_a_broadcasting_group_is_reported_and_passed(embedded, tmp_path, member):
    """A broadcasting group has no retry. A failed message is reported as given up, and the offset passes it.

    Faulty: Go keeps it in its window forever, which holds the offset and later stops the queue.
    """
    orders = Orders(embedded, messages=10)
    with member(embedded, TOPIC, GROUP, fails_at_first(b"m5"), **broadcasting(tmp_path)) as consumer:
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored() == {QUEUE: 10}, "the failed message does not hold the offset")
        assert [each.queue for each in consumer.events.of("message-given-up")] == [QUEUE]
    assert not orders.broker.requests(SEND_BACK)
    assert sorted(consumer.seen.bodies) == numbered(10)
