"""What servers ask a consumer: who may, and what comes of it."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.testing import RequestCode
from pyrocket_consumer.wire import fastjson
from pyrocket_consumer.wire.bodies import decode_consumer_status, decode_running_info, encode_offset_table
from pyrocket_consumer.wire.message import StoredMessage, encode_message
from tests.asking import Asking, directly, stored
from tests.consuming import Events, Seen, consuming, until
from tests.resetting import caught_up, fill, held, wait_until_stored

ASKED = {
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"},
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: {"topic": "T", "group": "G"},
    RequestCode.GET_CONSUMER_RUNNING_INFO: {"consumerGroup": "G", "clientId": "any", "jstackEnable": "true"},
    RequestCode.CONSUME_MESSAGE_DIRECTLY: directly("G"),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: {"consumerGroup": "G"},
    RequestCode.CHECK_TRANSACTION_STATE: {"tranStateTableOffset": "0", "commitLogOffset": "0"},
    65_000: {},
}


@pytest.fixture
def asking(broker):
    return Asking(broker)


def body_of(code, embedded):
    if code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
        return encode_offset_table({MessageQueue("T", "broker-a", 0): 0})
    return stored(embedded.broker("broker-a"), "T")


# --- who may ask


@pytest.mark.parametrize("code", ASKED)
def test_a_name_server_may_ask_nothing(embedded, code):
    events = Events()
    with caught_up(embedded, "T", "G", 5, queues=1, on_event=events) as (consumer, seen):
        wait_until_stored(consumer, "T", 5)
        answer = Asking(embedded.name_server_node).ask(code, ASKED[code], body_of(code, embedded))
        assert answer.code == 1
        assert "only brokers of the topics in use may ask" in answer.remark
        told = events.wait_for("request-refused")
        assert told.facts == {"code": code, "address": embedded.name_server}
        assert embedded.name_server in told.text
        fill(embedded, "T", 1, start=5)
        seen.wait_for(6)
        assert len(seen.messages) == 6
        assert embedded.committed("G", "T") in ({0: 5}, {0: 6})
        assert events.of("offset-reset") == []


def test_a_name_server_gets_no_answer_to_what_wants_none(embedded):
    events = Events()
    with caught_up(embedded, "T", "G", 5, queues=1, on_event=events) as (consumer, seen):
        wait_until_stored(consumer, "T", 5)
        code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
        Asking(embedded.name_server_node).tell(code, ASKED[code], body_of(code, embedded))
        events.wait_for("request-refused")
        fill(embedded, "T", 1, start=5)
        seen.wait_for(6)
        assert len(seen.messages) == 6


def test_what_is_asked_in_vain_is_told_with_how_often(embedded):
    events = Events()
    with caught_up(embedded, "T", "G", 1, queues=1, on_event=events) as (_, seen):
        name_server, code = Asking(embedded.name_server_node), RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        name_server.tell(code, ASKED[code], times=2000)
        fill(embedded, "T", 1, start=1)
        seen.wait_for(2)

        def told() -> int:
            name_server.tell(code, ASKED[code])
            return sum(1 + event.facts.get("left_out", 0) for event in events.of("request-refused"))

        until(lambda: told() > 2000, "all that came together are told of")
        assert len(events.of("request-refused")) < 50


# --- consume this message


def directed(embedded, body=None, **fields):
    """Have the broker ask for a message to be consumed; the last of T, if no record is given."""
    broker = embedded.broker("broker-a")
    code = RequestCode.CONSUME_MESSAGE_DIRECTLY
    return Asking(broker).ask(code, directly("G", **fields), stored(broker, "T") if body is None else body)


def test_a_message_that_a_broker_passes_on_is_consumed(embedded):
    fill(embedded, "T", 1, queues=1)
    contexts = []

    def handle(message, context):
        seen(message)
        contexts.append(context)

    seen = Seen()
    with consuming(embedded, "T", "G", handle):
        seen.wait_for(1)
        answer = directed(embedded, brokerName="another")
        assert fastjson.loads(answer.body)["consumeResult"] == "CR_SUCCESS"
        assert contexts[1].queue == seen.messages[1].queue == MessageQueue("T", "broker-a", 0)


def retried(group, topic):
    """Return the record of a message that comes again."""
    return encode_message(StoredMessage(f"%RETRY%{group}", b"again", {"TAGS": "A", "RETRY_TOPIC": topic}))


def test_a_message_that_comes_again_goes_to_its_topics_listener(embedded):
    with caught_up(embedded, "T", "G", 1, queues=1) as (_, seen):
        assert fastjson.loads(directed(embedded, retried("G", "T")).body)["consumeResult"] == "CR_SUCCESS"
        assert [(message.topic, message.queue.topic) for message in seen.messages[1:]] == [("T", "%RETRY%G")]


def test_without_server_messages_nothing_passed_on_is_consumed(embedded):
    events = Events()
    with caught_up(embedded, "T", "G", 1, queues=1, server_messages=False, on_event=events) as (_, seen):
        answer = directed(embedded)
        assert (answer.code, answer.remark) == (1, "this consumer has server_messages=False")
        assert "this consumer has server_messages=False" in events.wait_for("request-refused").text
        fill(embedded, "T", 1, start=1)
        seen.wait_for(2)
        assert len(seen.messages) == 2


def test_what_its_listener_would_never_get_is_not_consumed(embedded, broker):
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
            events.wait_for("request-refused", number)
        embedded.send("T", b"last", tags="B")
        seen.wait_for(2)
        assert seen.bodies == [b"first", b"last"]


def test_a_consumer_that_closes_consumes_nothing_passed_on(embedded):
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


def test_calls_for_messages_of_brokers_that_hang_do_not_pile_up(embedded, broker, asking):
    fill(embedded, "T", 1, queues=1)
    events, go_on = Events(), threading.Event()

    def handle(message):
        seen(message)
        if len(seen.messages) > 1:
            go_on.wait(60)

    seen = Seen()
    with consuming(embedded, "T", "G", handle, consume_threads=3, on_event=events):
        seen.wait_for(1)
        record = stored(broker, "T")
        asking.tell(RequestCode.CONSUME_MESSAGE_DIRECTLY, directly("G"), record, times=50)
        told = events.wait_for("request-refused")
        assert "3 messages of brokers are being consumed already" in told.text
        seen.wait(lambda _: len(seen.messages) == 4)
        assert directed(embedded).code == 1
        assert len([each for each in threading.enumerate() if each.name == "pyrocket-consume-once"]) == 3
        go_on.set()
        until(lambda: directed(embedded).code == 0, "the calls have ended, and another may begin")


# --- how much


def test_a_request_too_large_is_refused_and_the_connection_kept(embedded, broker, asking):
    events = Events()
    with caught_up(embedded, "T", "G", 1, queues=1, on_event=events) as (_, seen):
        connections = broker.connections
        code = RequestCode.GET_CONSUMER_RUNNING_INFO
        answer = asking.ask(code, ASKED[code], bytes(10 << 20))
        assert (answer.code, answer.remark) == (
            1, f"GET_CONSUMER_RUNNING_INFO is not obeyed: {10 << 20} bytes are too many"
        )  # fmt: skip
        assert f"{10 << 20} bytes are too many" in events.wait_for("request-refused").text
        fill(embedded, "T", 1, start=1)
        seen.wait_for(2)
        assert broker.connections == connections


def test_a_reset_of_a_thousand_queues_and_4_mib_are_obeyed(embedded, asking):
    events = Events()
    with caught_up(embedded, "T", "G", 4, queues=2, on_event=events) as (consumer, seen):
        wait_until_stored(consumer, "T", 4)
        body = encode_offset_table({MessageQueue("T", "broker-a", number): 1 for number in range(2)})
        code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
        asking.tell(code, ASKED[code], body + b" " * 214_000)  # as many as queues with long names take
        seen.wait(lambda _: len(seen.messages) == 6)
        record = encode_message(StoredMessage("T", bytes(4 << 20)))
        assert fastjson.loads(directed(embedded, record).body)["consumeResult"] == "CR_SUCCESS"
        assert events.of("request-refused") == []


@pytest.mark.live
@pytest.mark.parametrize("by", ["the broker", "an admin of ours"])
def test_messages_do_not_wait_while_long_resets_are_read(embedded, broker, asking, by):
    embedded.create_topic("T", queues=1)
    events = Events()
    with consuming(embedded, "T", "G", on_event=events) as (_, seen):
        code, more = RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {}
        slow = b'{"offsetTable":{' + b"0:1," * 120_000 + b"0:1}}"
        if by != "the broker":
            code = RequestCode.GET_CONSUMER_RUNNING_INFO
            more = {"pyrocketOp": "reset", "pyrocketV": "1", "pyrocketId": "1"}
        asking.tell(code, {**ASKED[code], **more}, slow, times=5)
        fill(embedded, "T", 1)
        seen.wait_for(1)
        assert len(events.of("offset-reset")) < 5
        assert "cannot be read, nothing moved" in events.wait_for("offset-reset").text


# --- how it is


def test_of_many_queues_each_is_told(embedded, asking):
    embedded.create_topic("T", queues=120)
    with consuming(embedded, "T", "G") as (consumer, _):
        until(lambda: len(held(consumer, "T")) == 120, "all queues are held")
        for code, told in (
            (RequestCode.GET_CONSUMER_RUNNING_INFO, lambda body: decode_running_info(body).queues),
            (RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, decode_consumer_status),
        ):
            answer = asking.ask(code, ASKED[code])
            assert sum(queue.topic == "T" for queue in told(answer.body)) == 120


@pytest.mark.live
def test_stacks_tell_where_threads_are_and_no_more(embedded, asking):
    fill(embedded, "T", 1, queues=1)
    deep, go_on = threading.Event(), threading.Event()

    def handle(message, depth=300):
        secret = "of the program"  # a line that is nobody else's business
        if depth:
            return handle(message, depth - 1)
        deep.set()
        go_on.wait(60)
        return secret and None

    with consuming(embedded, "T", "G", handle):
        deep.wait(60)
        code = RequestCode.GET_CONSUMER_RUNNING_INFO
        stacks = decode_running_info(asking.ask(code, ASKED[code]).body).jstack
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
    [
        (RequestCode.GET_CONSUMER_RUNNING_INFO, {}),
        (RequestCode.GET_CONSUMER_RUNNING_INFO, {"pyrocketOp": "status", "pyrocketV": "1", "pyrocketId": "1"}),
        (RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {}),
    ],
    ids=["info", "our status", "status"],
)
def test_questions_in_their_thousands_are_answered_busy(embedded, asking, code, more):
    """And messages are consumed, and offsets stored, meanwhile."""
    question = {**ASKED[code], **more}
    embedded.create_topic("T", queues=4)
    events = Events()
    with consuming(embedded, "T", "G", on_event=events) as (consumer, seen):
        answers = asking.ask_each(code, 3000 * [question])
        first = next(answers)
        fill(embedded, "T", 20)
        seen.wait_for(20)
        wait_until_stored(consumer, "T", 20)
        codes = Counter([first.code, *(answer.code for answer in answers)])
        assert codes.keys() == {0, 2}
        assert codes[2] > codes[0]
        assert "64 of them are under way" in events.wait_for("request-refused").text
        assert asking.ask(code, question).code == 0
        assert events.of("commit-failed") == []


@pytest.mark.parametrize("code", [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, RequestCode.RESET_CONSUMER_CLIENT_OFFSET])
def test_notices_in_their_thousands_hold_up_nothing(embedded, broker, asking, code):
    with caught_up(embedded, "T", "G", 1, queues=1) as (_, seen):
        elsewhere = encode_offset_table({MessageQueue("T", "broker-a", 77): 0})
        asking.tell(code, ASKED[code], elsewhere, times=20_000)
        broker.forget_requests()
        fill(embedded, "T", 5, start=1)
        seen.wait_for(6)
        assert len(broker.requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) < 100


def test_a_flood_of_notices_moves_queues_now_and_then_only(embedded, broker, asking):
    """Each has the member ask who is there; a broker that always tells others would have queues move without end."""
    embedded.create_topic("notices", queues=1)
    with consuming(embedded, "notices", "notified", rebalance_interval_s=3600) as (_, seen):
        embedded.send("notices", b"first")
        seen.wait_for(1)
        broker.forget_requests()
        for _ in range(60):
            asking.tell(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "notified"})
            time.sleep(0.2)
        asked = len(broker.requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        assert 3 < asked < 18
