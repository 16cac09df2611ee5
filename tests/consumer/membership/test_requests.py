"""Requests of servers to a consumer: which servers may send them, and their effects."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.bodies import decode_consumer_status, decode_running_info, encode_offset_table
from pyrocket_consumer.protocol.message import StoredMessage, encode_message
from pyrocket_consumer.testing import RequestCode
from tests.consuming import Events, RecordingListener, consuming, until
from tests.resets import caught_up, fill, held, wait_until_stored
from tests.server_requests import RequestSender, directly, stored

INFO, STATUS = RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
RESET, NOTICE = RequestCode.RESET_CONSUMER_CLIENT_OFFSET, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
CONSUME = RequestCode.CONSUME_MESSAGE_DIRECTLY
FIELDS = {
    RESET: {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"},
    STATUS: {"topic": "T", "group": "G"},
    INFO: {"consumerGroup": "G", "clientId": "any", "jstackEnable": "true"},
    CONSUME: directly("G"),
    NOTICE: {"consumerGroup": "G"},
    RequestCode.CHECK_TRANSACTION_STATE: {"tranStateTableOffset": "0", "commitLogOffset": "0"},
    65_000: {},
}
REFUSED = "request-refused"


@pytest.fixture
def sender(broker):
    return RequestSender(broker)


def body_of(code, embedded):
    return offsets(0) if code == RESET else stored(embedded.broker("broker-a"), "T")


def offsets(offset, *queue_ids):
    return encode_offset_table({MessageQueue("T", "broker-a", queue_id): offset for queue_id in queue_ids or [0]})


@contextmanager
def stored_consumer(embedded, count, queues=1, **options):
    """Run a consumer that has consumed and committed `count` messages; yield its listener and its events."""
    events = Events()
    with caught_up(embedded, "T", "G", count, queues=queues, on_event=events, **options) as (consumer, seen):
        wait_until_stored(consumer, "T", count)
        yield seen, events


def check_still_consuming(embedded, seen, count):
    """Send one more message after `count`; check that it is consumed, and none is consumed again."""
    fill(embedded, "T", 1, start=count)
    seen.wait_for(count + 1)
    assert len(seen.messages) == count + 1


# --- permitted servers


@pytest.mark.parametrize("code", FIELDS)
def test_a_name_server_may_send_no_request(embedded, code):
    with stored_consumer(embedded, 5) as (seen, events):
        answer = RequestSender(embedded.name_server_node).call(code, FIELDS[code], body_of(code, embedded))
        assert answer.code == 1
        assert "only brokers of the topics in use may send requests" in answer.remark
        refused = events.wait_for(REFUSED)
        assert refused.facts == {"code": code, "address": embedded.name_server}
        assert embedded.name_server in refused.text
        check_still_consuming(embedded, seen, 5)
        assert embedded.committed("G", "T") in ({0: 5}, {0: 6})
        assert events.of("offset-reset") == []


def test_a_name_server_gets_no_response_to_a_oneway_request(embedded):
    with stored_consumer(embedded, 5) as (seen, events):
        RequestSender(embedded.name_server_node).oneway(RESET, FIELDS[RESET], offsets(0))
        events.wait_for(REFUSED)
        check_still_consuming(embedded, seen, 5)


def test_refused_requests_are_reported_with_their_number(embedded):
    with stored_consumer(embedded, 1) as (seen, events):
        name_server = RequestSender(embedded.name_server_node)
        name_server.oneway(NOTICE, FIELDS[NOTICE], times=2000)
        check_still_consuming(embedded, seen, 1)

        def how_often() -> int:
            name_server.oneway(NOTICE, FIELDS[NOTICE])
            return sum(1 + event.facts.get("left_out", 0) for event in events.of(REFUSED))

        until(lambda: how_often() > 2000, "the event counts all of them")
        assert len(events.of(REFUSED)) < 50


# --- requests to consume a message


def directed(embedded, body=None, **fields):
    """Have the broker request that a message is consumed, the last of T unless there is a record."""
    broker = embedded.broker("broker-a")
    return RequestSender(broker).call(CONSUME, directly("G", **fields), stored(broker, "T") if body is None else body)


def outcome(answer):
    return fastjson.loads(answer.body)["consumeResult"]


def test_a_message_in_a_broker_s_request_is_consumed(embedded):
    fill(embedded, "T", 1, queues=1)
    seen, contexts = RecordingListener(), []

    def handle(message, context):
        seen(message)
        contexts.append(context)

    with consuming(embedded, "T", "G", handle):
        seen.wait_for(1)
        assert outcome(directed(embedded, brokerName="another")) == "CR_SUCCESS"
        assert contexts[1].queue == seen.messages[1].queue == MessageQueue("T", "broker-a", 0)


def retried(group, topic):
    """Return the record of a redelivered message."""
    return encode_message(StoredMessage(f"%RETRY%{group}", b"again", {"TAGS": "A", "RETRY_TOPIC": topic}))


def test_a_redelivered_message_goes_to_its_topic_s_listener(embedded):
    with stored_consumer(embedded, 1) as (seen, _):
        assert outcome(directed(embedded, retried("G", "T"))) == "CR_SUCCESS"
        assert [(message.topic, message.queue.topic) for message in seen.messages[1:]] == [("T", "%RETRY%G")]


def test_without_server_messages_no_message_of_a_request_is_consumed(embedded):
    with stored_consumer(embedded, 1, server_messages=False) as (seen, events):
        answer = directed(embedded)
        assert (answer.code, answer.remark) == (1, "this consumer has server_messages=False")
        assert "this consumer has server_messages=False" in events.wait_for(REFUSED).text
        check_still_consuming(embedded, seen, 1)


def test_a_message_that_no_listener_would_get_is_not_consumed(embedded, broker):
    embedded.create_topic("T", queues=1)
    embedded.create_topic("U", queues=1)
    embedded.send("T", b"first", tags="A")
    embedded.send("U", b"u", tags="A")
    events = Events()
    with consuming(embedded, "T", "G", selector="A || B", on_event=events) as (_, seen):
        seen.wait_for(1)
        embedded.send("T", b"of another tag", tags="C")
        record = stored(broker, "T")
        never = {
            "of another tag": record,
            "of another topic": stored(broker, "U"),
            "two": record + record,
            "none": b"",
            "damaged": record[:-3],
            "again, of no topic": encode_message(StoredMessage("%RETRY%G", b"x", {"TAGS": "A"})),
            "again, of the retry topic": retried("G", "%RETRY%G"),
            "again, of another topic": retried("G", "U"),
            "again, of another group": retried("H", "T"),
        }
        for number, (which, body) in enumerate(never.items(), 1):
            assert directed(embedded, body).code == 1, which
            events.wait_for(REFUSED, number)
        embedded.send("T", b"last", tags="B")
        seen.wait_for(2)
        assert seen.bodies == [b"first", b"last"]


def test_a_closing_consumer_consumes_no_message_of_a_request(embedded):
    fill(embedded, "T", 1, queues=1)
    began, go_on = threading.Event(), threading.Event()

    def handle(message):
        if not began.is_set():
            began.set()
            go_on.wait(60)

    with consuming(embedded, "T", "G", handle) as (consumer, _):
        began.wait(60)
        closing = threading.Thread(target=consumer.close)
        closing.start()
        until(lambda: directed(embedded).remark == "this consumer is closing", "it closes")
        go_on.set()
        closing.join(60)


def test_hanging_calls_for_messages_of_brokers_do_not_accumulate(embedded, broker, sender):
    fill(embedded, "T", 1, queues=1)
    events, go_on = Events(), threading.Event()
    judge = RecordingListener(lambda message: None if len(judge.messages) == 1 else go_on.wait(60) and None)
    with consuming(embedded, "T", "G", judge, consume_threads=3, on_event=events) as (_, seen):
        seen.wait_for(1)
        sender.oneway(CONSUME, directly("G"), stored(broker, "T"), times=50)
        assert "3 messages of brokers are being consumed already" in events.wait_for(REFUSED).text
        seen.wait(lambda _: len(seen.messages) == 4)
        assert directed(embedded).code == 1
        assert len([each for each in threading.enumerate() if each.name == "pyrocket-consume-once"]) == 3
        go_on.set()
        until(lambda: directed(embedded).code == 0, "the calls have ended, and another may begin")


# --- large requests


def test_a_request_too_large_is_refused_and_the_connection_kept(embedded, broker, sender):
    too_many = f"a body of {10 << 20} bytes is too large"
    with stored_consumer(embedded, 1) as (seen, events):
        connections = broker.connections
        answer = sender.call(INFO, FIELDS[INFO], bytes(10 << 20))
        assert (answer.code, answer.remark) == (1, f"GET_CONSUMER_RUNNING_INFO is refused: {too_many}")
        assert too_many in events.wait_for(REFUSED).text
        check_still_consuming(embedded, seen, 1)
        assert broker.connections == connections


def test_a_reset_of_a_thousand_queues_and_4_mib_are_followed(embedded, sender):
    with stored_consumer(embedded, 4, queues=2) as (seen, events):
        sender.oneway(RESET, FIELDS[RESET], offsets(1, 0, 1) + b" " * 214_000)  # the size of long queue names
        seen.wait(lambda _: len(seen.messages) == 6)
        assert outcome(directed(embedded, encode_message(StoredMessage("T", bytes(4 << 20))))) == "CR_SUCCESS"
        assert events.of(REFUSED) == []


@pytest.mark.live
@pytest.mark.parametrize("by", ["the broker", "an admin"])
def test_messages_do_not_wait_while_long_resets_are_read(embedded, sender, by):
    embedded.create_topic("T", queues=1)
    code, more = RESET, {}
    if by != "the broker":
        code, more = INFO, {"pyrocketOp": "reset", "pyrocketV": "1", "pyrocketId": "1"}
    slow = b'{"offsetTable":{' + b"0:1," * 120_000 + b"0:1}}"
    with consuming(embedded, "T", "G", on_event=(events := Events())) as (_, seen):
        sender.oneway(code, {**FIELDS[code], **more}, slow, times=5)
        fill(embedded, "T", 1)
        seen.wait_for(1)
        assert len(events.of("offset-reset")) < 5
        assert "cannot be read, and nothing moved" in events.wait_for("offset-reset").text


# --- status and running info


def test_running_info_has_each_of_many_queues(embedded, sender):
    embedded.create_topic("T", queues=120)
    with consuming(embedded, "T", "G") as (consumer, _):
        until(lambda: len(held(consumer, "T")) == 120, "all queues are held")
        info = decode_running_info(sender.call(INFO, FIELDS[INFO]).body).queues
        status = decode_consumer_status(sender.call(STATUS, FIELDS[STATUS]).body)
        assert [sum(queue.topic == "T" for queue in each) for each in (info, status)] == [120, 120]


@pytest.mark.live
def test_stacks_show_where_threads_are_and_no_values(embedded, sender):
    fill(embedded, "T", 1, queues=1)
    deep, go_on = threading.Event(), threading.Event()

    def handle(message, depth=300):
        secret = "of the program"  # the stack must not show this line
        if depth:
            return handle(message, depth - 1)
        deep.set()
        go_on.wait(60)
        return secret and None

    with consuming(embedded, "T", "G", handle):
        deep.wait(60)
        stacks = decode_running_info(sender.call(INFO, FIELDS[INFO]).body).jstack
        go_on.set()
    worker = next(each for each in stacks.split("\n\n") if each.startswith("pyrocket-consume-") and "handle" in each)
    lines = worker.splitlines()
    assert "in wait" in lines[1]
    assert any(line.endswith("in handle") and "test_requests.py:" in line for line in lines)
    assert len(lines) == 1 + 64
    assert "of the program" not in stacks
    assert "pyrocket-io" in stacks


@pytest.mark.live
@pytest.mark.parametrize(
    ("code", "more"),
    [(INFO, {}), (INFO, {"pyrocketOp": "status", "pyrocketV": "1", "pyrocketId": "1"}), (STATUS, {})],
    ids=["info", "our status", "status"],
)
def test_thousands_of_requests_are_answered_busy(embedded, sender, code, more):
    """Meanwhile the consumer consumes messages, and stores offsets."""
    question = {**FIELDS[code], **more}
    embedded.create_topic("T", queues=4)
    with consuming(embedded, "T", "G", on_event=(events := Events())) as (consumer, seen):
        answers = sender.call_each(code, 3000 * [question])
        first = next(answers)
        fill(embedded, "T", 20)
        seen.wait_for(20)
        wait_until_stored(consumer, "T", 20)
        codes = Counter([first.code, *(answer.code for answer in answers)])
        assert codes.keys() == {0, 2}
        assert codes[2] > codes[0]
        assert "64 of them are in flight" in events.wait_for(REFUSED).text
        assert sender.call(code, question).code == 0
        assert events.of("commit-failed") == []


@pytest.mark.parametrize("code", [NOTICE, RESET])
def test_thousands_of_notices_delay_nothing(embedded, broker, sender, code):
    with stored_consumer(embedded, 1) as (seen, _):
        sender.oneway(code, FIELDS[code], offsets(0, 77), times=20_000)
        broker.forget_requests()
        fill(embedded, "T", 5, start=1)
        seen.wait_for(6)
        assert len(broker.requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) < 100


def test_a_flood_of_notices_moves_queues_only_now_and_then(embedded, broker, sender):
    """Each makes the member fetch the members, and a broker that always names others would move queues without end."""
    with stored_consumer(embedded, 1, rebalance_interval_s=3600):
        broker.forget_requests()
        for _ in range(60):
            sender.oneway(NOTICE, FIELDS[NOTICE])
            time.sleep(0.2)
        assert 3 < len(broker.requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) < 18
