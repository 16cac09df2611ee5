"""H01, H48: late responses and acks of an earlier period of a queue are ignored."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyrocket_consumer import Message
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message
from pyrocket_consumer.testing import answer
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, ours_and
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.members import HeldRequests, committed_values, faulty, give_time_to, send_reset_to_members, settle
from tests.hazards.naive import NaiveMember, Window
from tests.hazards.other_members import AnotherMember
from tests.resets import queue

ANSWERS = {"found": 0, "refused": 1, "no-new": 19, "no-matched": 20, "offset-moved": 21}


class BelievesLateAnswers(NaiveMember):
    """Java and Go: these branches do not check whether the window was dropped, and acks only raise the offset."""

    def on_pull_response(self, window: Window, answer: RemotingCommand) -> None:
        if not window.dropped or self.closing.is_set():
            super().on_pull_response(window, answer)
            return
        next_offset = int(answer.fields["nextBeginOffset"])
        if answer.code == 0:  # unlike Java and Go, this one consumes the messages of the response
            for message in decode_messages(answer.body, window.queue):
                self.tasks.put((self.windows[window.queue], message))
        elif answer.code == 21:
            self.offsets[window.queue] = next_offset
            self.windows[window.queue].dropped = True
        else:  # the old window was emptied, so it seems to have no unfinished message
            self.offsets[window.queue] = max(next_offset, self.offsets.get(window.queue, 0))

    def acked(self, window: Window, message: Message) -> None:
        before = self.offsets.get(window.queue, 0)
        super().acked(window, message)
        self.offsets[window.queue] = max(before, self.offsets[window.queue])


@pytest.mark.hazard("H01")
@pytest.mark.parametrize("what", ANSWERS)
@ours_and(NaiveMember, faulty(BelievesLateAnswers, "from before the reset"))
def test_the_response_to_a_pull_from_before_a_reset_is_ignored(embedded, broker, what, member):
    """Each period of a queue has its own window. A late response for an ended period reaches neither the store nor the
    pull loop, whatever it contains.

    Faulty: Java and Go follow "no new message", "no matched message" and corrections without a check whether the queue
    was dropped.
    """
    # A pull waits at 20. A reset to 5 arrives. The replay is at 10 when the broker responds to the pull.
    orders, times = Orders(embedded, messages=20), Counter[int]()
    held, go_on, end = HeldRequests(), threading.Event(), threading.Event()
    orders.on(RequestCode.PULL_MESSAGE, held, queueOffset=20)

    def judge(message: Message) -> None:
        times[message.queue_offset] += 1
        if times[message.queue_offset] == 2:
            (go_on if message.queue_offset < 10 else end).wait(30)

    with member(embedded, TOPIC, GROUP, RecordingListener(judge)) as consumer:
        consumer.seen.wait_for(20)
        held.wait()
        until(lambda: consumer.stored() == {QUEUE: 20}, "consumed")
        send_reset_to_members(broker, GROUP, {QUEUE: 5})
        consumer.seen.wait(lambda seen: len(seen.bodies) == 35)
        fields = {"nextBeginOffset": 30, "minOffset": 0, "maxOffset": 30, "suggestWhichBrokerId": 0}
        stray = encode_message(StoredMessage(topic=TOPIC, body=b"stray", queue_offset=20))
        held.answer(ANSWERS[what], None, fields, stray if what == "found" else b"")
        give_time_to(lambda: b"stray" in consumer.seen.bodies or (0, 30) in committed_values(broker, TOPIC), member)
        go_on.set()
        until(lambda: consumer.stored()[QUEUE] >= 10, "5 to 9 are consumed again")
        assert consumer.stored() == {QUEUE: 10}, f"{consumer.stored()} stored by a response from before the reset"
        end.set()
        until(lambda: consumer.stored() == {QUEUE: 20}, "all is consumed again")
        assert max(offset for _, offset in committed_values(broker, TOPIC)) == 20
        orders.fill(1, 20)
        consumer.seen.wait_for(21)
        again = Counter(numbered(21) + numbered(15, 5))
        assert Counter(consumer.seen.bodies) == again, "messages of a response from before the reset were consumed"
        assert not consumer.events.of("offset-corrected")
        assert len(consumer.events.of("offset-reset")) == 1


def test_a_late_response_with_a_reset_counts(orders):
    held = HeldRequests()
    orders.fill(10)
    orders.on(RequestCode.PULL_MESSAGE, held, queueOffset=10)
    with orders.consuming() as (consumer, seen):
        seen.wait_for(10)
        held.wait()
        assert consumer.reset_offsets(TOPIC, {QUEUE: 5}) == {QUEUE: 5}
        seen.wait(lambda seen: len(seen.bodies) == 15)
        orders.wait_committed(10)
        fields = {"nextBeginOffset": 8, "minOffset": 0, "maxOffset": 40, "suggestWhichBrokerId": 0}
        held.answer(21, "OFFSET_RESET", fields)
        orders.events.wait_for("offset-reset", 2)
        seen.wait(lambda seen: len(seen.bodies) == 17)
        orders.fill(3, 10)
        seen.wait_for(13)
    assert Counter(seen.bodies) == Counter(numbered(13) + numbered(5, 5) + numbered(2, 8))
    assert orders.events.of("offset-corrected") == []
    assert len(orders.events.of("offset-reset")) == 2
    assert orders.committed == {0: 13}


def test_resets_by_calls_take_turns(orders):
    orders.make(queues=2)
    orders.fill(20)
    queues = [queue(TOPIC, 0), queue(TOPIC, 1)]
    with orders.consuming() as (consumer, seen), ThreadPoolExecutor() as threads:
        seen.wait_for(20)

        def reset(target):
            return consumer.reset_offsets(TOPIC, dict.fromkeys(queues, target))

        for target in (9, 4, 7):
            assert reset(target) == dict.fromkeys(queues, target)
        assert len(list(threads.map(reset, [3] * 4))) == 4
        seen.wait(lambda seen: seen.counts[queues[0], 3] > 1 and seen.counts[queues[1], 9] > 1)
        orders.wait_committed(10, 10)
        orders.fill(4, 20)
        seen.wait_for(24)


def test_a_failed_message_from_before_a_reset_is_not_sent_back(orders):
    begun, release = threading.Event(), threading.Event()

    def judge(message):
        if message.body == b"m4" and not begun.is_set():
            begun.set()
            release.wait(WAIT_S)
            raise ValueError("this failure is too late")

    orders.fill(5)
    with orders.consuming(RecordingListener(judge)) as (consumer, seen):
        seen.wait_for(5)
        assert begun.wait(WAIT_S)
        consumer.reset_offsets(TOPIC, {QUEUE: 4})
        release.set()
        orders.events.wait_for("listener-failed")
        seen.wait(lambda seen: seen.bodies.count(b"m4") == 2)
        orders.wait_committed(5)
    assert Counter(seen.bodies) == Counter([*numbered(5), b"m4"])
    assert orders.events.of("message-sent-back") == []


def test_a_reset_that_is_not_acknowledged_waits_and_then_counts(orders):
    orders.fill(10)
    with orders.consuming() as (consumer, seen):
        seen.wait_for(10)
        orders.wait_committed(10)
        orders.on(RequestCode.UPDATE_CONSUMER_OFFSET, answer(1, "no"), times=3)
        assert consumer.reset_offsets(TOPIC, {QUEUE: 6}) == {QUEUE: 6}
        assert "6 is not acknowledged yet" in orders.events.wait_for("commit-failed").text
        seen.wait(lambda seen: len(seen.bodies) == 14)
    assert Counter(seen.bodies) == Counter(numbered(10) + numbered(4, 6))


class OnePeriodIsLikeAnother(NaiveMember):
    """Counts an acknowledgement for the queue, also if the message belongs to an earlier period."""

    def acked(self, window: Window, message: Message) -> None:
        now = self.windows.get(window.queue)
        if now is not None:
            super().acked(now, message)


@pytest.mark.hazard("H48")
@ours_and(NaiveMember, faulty(OnePeriodIsLikeAnother, "was committed by calls that began before"))
def test_an_acknowledgement_counts_for_its_own_period_only(embedded, member):
    """A result of a listener call is ignored if its queue was revoked and assigned again meanwhile.

    Faulty: Java's lite pull consumer commits results of an earlier ownership under the new one.
    """
    # The queue is given up and assigned again during the listener calls, which then get its messages a second time.
    orders, calls = Orders(embedded, messages=5), []
    first, second = threading.Event(), threading.Event()

    def judge(message: Message) -> None:
        calls.append(message)
        (first if len(calls) <= 5 else second).wait(WAIT_S)

    with member(embedded, TOPIC, GROUP, RecordingListener(judge), rebalance_interval_s=0.1) as consumer:
        consumer.seen.wait(lambda seen: len(seen.messages) == 5)
        other = AnotherMember(embedded, GROUP, consumer, TOPIC)
        other.take_queue()
        other.give_queue_back()
        consumer.seen.wait(lambda seen: len(seen.messages) == 10)
        first.set()
        settle()
        stored = orders.committed.get(0, 0)
        assert stored == 0, f"{stored} was committed by calls that began before the queue was given up"
        second.set()
        until(lambda: consumer.stored() == {QUEUE: 5}, "all is committed")
