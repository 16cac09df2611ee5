"""Messages that failed, on their way back: at the broker once, at the right time, and never forgotten here."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest

from pyrocket_consumer import ConsumeResult, Retry
from pyrocket_consumer.testing import answer, close_connection, delay, drop_answer, handle_and_close
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import QUICK, Events, Seen, consuming, numbered, until

SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)
DEFAULTS = {**dict.fromkeys(QUICK), "consume_from": "first"}


def fill(cluster, topic, count, start=0, **options):
    cluster.send(topic, lambda number: b"m%d" % (start + number), count=count, **options)


def attempts(cluster, group):
    """How many messages the retry topic has of each attempt."""
    return Counter(message.reconsume_times for message in cluster.messages(f"%RETRY%{group}"))


def test_what_failed_comes_again_while_a_later_call_of_its_worker_hangs(embedded, topic, group):
    """Quick listeners get many messages at once; one that hangs must keep nothing but its own."""
    embedded.create_topic(topic, queues=1)
    release = threading.Event()

    def judge(message):
        if message.body == b"m463":
            release.wait(60)
        elif int(message.body[1:]) >= 100 and message.reconsume_times == 0:
            return Retry(delay_level=1)

    seen = Seen(judge)
    try:
        with consuming(embedded, topic, group, seen):
            fill(embedded, topic, 100)
            seen.wait_for(100)
            fill(embedded, topic, 600, 100)
            seen.wait(lambda seen: len(seen.messages) == 1299)
            release.set()
    finally:
        release.set()
    again = [body for body in numbered(600, 100) if body != b"m463"]
    assert Counter(seen.bodies) == Counter([*numbered(700), *again])


def test_lists_that_failed_come_again_while_a_later_call_of_their_worker_hangs(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    release, hanging, seen = threading.Event(), set(), Seen()

    def handle(messages):
        bodies = {message.body for message in messages}
        if b"m463" in bodies:
            hanging.update(bodies)
        for message in messages:
            seen(message)
        if b"m463" in bodies:
            release.wait(60)
        elif messages[0].reconsume_times == 0 and int(messages[0].body[1:]) >= 100:
            return Retry(delay_level=1)

    try:
        with consuming(embedded, topic, group, handle, listener_batch_size=2):
            fill(embedded, topic, 100)
            seen.wait_for(100)
            fill(embedded, topic, 600, 100)
            seen.wait(lambda seen: len(seen.messages) == 1300 - len(hanging))
            release.set()
    finally:
        release.set()
    again = [body for body in numbered(600, 100) if body not in hanging]
    assert Counter(seen.bodies) == Counter([*numbered(700), *again])


def test_a_broker_that_answers_late_makes_one_copy_of_each_attempt(embedded, broker, topic, group):
    """The answer comes after the deadline, and says that it was done."""
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 3)
    broker.on(SEND_BACK, delay(1.0), times=None)
    seen = Seen(lambda message: ConsumeResult.RETRY)
    options = {"call_timeout_s": 0.3, "max_reconsume_times": 4}
    with consuming(embedded, topic, group, seen, **options):
        seen.wait(lambda seen: sum(message.reconsume_times == 4 for message in seen.messages) >= 3)
        until(lambda: len(embedded.messages(f"%DLQ%{group}")) == 3, "given up")
        until(lambda: embedded.committed(group, topic) == {0: 3}, "the late answers count")
    assert attempts(embedded, group) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert len(embedded.messages(f"%DLQ%{group}")) == 3


@pytest.mark.parametrize("fault", [drop_answer, handle_and_close])
def test_send_backs_without_an_answer_make_no_more_copies_than_there_were_tries(
    embedded, broker, topic, group, fault
):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 1)
    broker.on(SEND_BACK, fault, times=None, when=lambda command: command.fields["group"] == group)
    seen, events = Seen(lambda message: ConsumeResult.RETRY), Events()
    with consuming(embedded, topic, group, seen, call_timeout_s=0.3, on_event=events):
        seen.wait(lambda seen: any(message.reconsume_times == 3 for message in seen.messages), 60)
        copies, asked = attempts(embedded, group), tries(broker, group)
        assert sum(copies.values()) == asked
        assert max(copies.values()) <= 3, "each attempt makes as many copies as it has tries, not four for each"
        assert events.of("send-back-failed")


def tries(broker, group):
    return len([each for each in broker.requests(SEND_BACK) if each.command.fields["group"] == group])


def test_a_message_that_fails_again_at_once_is_tried_again_all_the_same(embedded, broker, topic, group):
    """No broker takes it, and its second attempt fails as soon as it begins."""
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 100)
    for code in (SEND_BACK, *SENDS):
        broker.on(code, answer(1, "no"), times=None)

    def judge(message):
        return ConsumeResult.RETRY if message.reconsume_times < 2 else None

    seen = Seen(judge)
    with consuming(embedded, topic, group, seen):
        seen.wait(lambda seen: len(seen.messages) == 300)
        until(lambda: embedded.committed(group, topic) == {0: 100}, "all are finished")
    assert set(Counter(seen.bodies).values()) == {3}


def test_a_stuck_message_that_cannot_be_sent_back_has_one_call_at_a_time(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 1)
    broker.on(SEND_BACK, answer(1, "no"), times=None)
    for code in SENDS:
        broker.on(code, answer(1, "no"), times=None)
    release, events = threading.Event(), Events()
    seen = Seen(lambda message: release.wait(60) and None)
    try:
        with consuming(embedded, topic, group, seen, consume_timeout_s=0.1, on_event=events):
            until(lambda: tries(broker, group) == 2, "the second try, after five seconds")
            assert len(seen.messages) == 1
            release.set()
            until(lambda: embedded.committed(group, topic) == {0: 1}, "what the listener says at last counts")
    finally:
        release.set()
    assert len(seen.messages) == 1
    assert len(events.of("message-stuck")) == 1


def test_the_last_failure_is_told_as_such(embedded, topic, group, caplog):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 2)
    seen, events = Seen(lambda message: ConsumeResult.RETRY if message.body == b"m1" else None), Events()
    caplog.set_level(logging.WARNING, "pyrocket_consumer.consumer")
    with consuming(embedded, topic, group, seen, max_reconsume_times=2, on_event=events):
        event = events.wait_for("message-given-up")
        until(lambda: len(embedded.messages(f"%DLQ%{group}")) == 1, "it is there")
    assert seen.bodies.count(b"m1") == 3
    assert len(events.of("message-given-up")) == 1
    assert len(events.of("message-sent-back")) == 2
    assert event.facts["failures"] == 3
    assert event.facts["message_id"] == embedded.messages(f"%DLQ%{group}")[0].message_id
    assert f"%DLQ%{group}" in event.text
    assert [record.levelname for record in caplog.records if "message-given-up" in record.message] == ["WARNING"]


@pytest.mark.parametrize("refused", [False, True], ids=["send-back", "new message"])
def test_what_the_listener_gives_up_is_told_as_given_up(embedded, broker, topic, group, refused):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 1)
    if refused:
        broker.on(SEND_BACK, answer(1, "no"), times=None)
    seen, events = Seen(lambda message: Retry(delay_level=-1)), Events()
    with consuming(embedded, topic, group, seen, on_event=events):
        assert events.wait_for("message-given-up").facts["failures"] == 1
        until(lambda: embedded.committed(group, topic) == {0: 1}, "committed")
    assert not events.of("message-sent-back")
    assert len(embedded.messages(f"%DLQ%{group}")) == 1


def test_a_message_that_was_stored_less_safely_than_it_should_be_is_not_sent_again(embedded, broker, topic, group):
    """Brokers say this of a send-back as if it had failed."""
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 1)

    def late_disk(exchange):
        exchange.handle(lambda stored: exchange.answer(exchange.request.answer(1, "FLUSH_DISK_TIMEOUT")))

    broker.on(SEND_BACK, late_disk, times=None)
    seen = Seen(lambda message: ConsumeResult.RETRY if message.reconsume_times == 0 else None)
    with consuming(embedded, topic, group, seen):
        seen.wait(lambda seen: len(seen.messages) == 2)
        until(lambda: embedded.committed(group, topic) == {0: 1}, "committed")
    assert attempts(embedded, group) == {1: 1}


def test_retries_of_a_topic_nobody_reads_go_to_no_other_listener(embedded, broker, topic, group):
    """They are sent back again until they have had their attempts: nothing is lost, nothing waits for them."""
    embedded.create_topic(topic, queues=1)
    other = f"{topic}-other"
    embedded.create_topic(other, queues=1)
    fill(embedded, other, 20, 100)
    with consuming(embedded, other, group, Seen(lambda message: Retry(delay_level=3))) as (_, seen):
        seen.wait_for(20)
        until(lambda: embedded.committed(group, other) == {0: 20}, "sent back")
    fill(embedded, topic, 5)
    seen, events = Seen(), Events()

    def judge(message):
        return ConsumeResult.RETRY if message.reconsume_times == 0 else None

    seen = Seen(judge)
    with consuming(embedded, topic, group, seen, on_event=events, max_reconsume_times=3):
        seen.wait(lambda seen: len(seen.messages) == 10)
        until(lambda: len(embedded.messages(f"%DLQ%{group}")) == 20, "those are kept where somebody may look")
        until(
            lambda: embedded.committed(group, f"%RETRY%{group}") == ends(embedded, group), "and the retry topic goes on"
        )
    assert Counter(seen.bodies) == Counter(2 * numbered(5))
    told = [event for event in events.all if other in event.text]
    assert len(told) == 1, "once, not for each"
    assert "subscribe" in told[0].text


def ends(cluster, group):
    retry = f"%RETRY%{group}"
    broker = cluster.broker("broker-a")
    return {queue_id: broker.max_offset(retry, queue_id) for queue_id in cluster.committed(group, retry)}


def test_a_disconnected_send_back_loses_nothing(embedded, broker, topic, group):
    embedded.create_topic(topic, queues=1)
    fill(embedded, topic, 2)
    broker.on(SEND_BACK, close_connection)
    seen = Seen(lambda message: ConsumeResult.RETRY if message.body == b"m0" and not message.reconsume_times else None)
    with consuming(embedded, topic, group, seen):
        seen.wait(lambda seen: len(seen.messages) == 3)
        until(lambda: embedded.committed(group, topic) == {0: 2}, "committed")
