"""A producer with brokers that refuse, do not respond, or are stopped."""

from __future__ import annotations

import pickle
import time

import pytest

from pyrocket_consumer import (
    ConnectError,
    ConnectionLost,
    FlowControl,
    MessageQueue,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    RouteNotFound,
    SendError,
)
from pyrocket_consumer.cluster.client import read_error
from pyrocket_consumer.producer import SendStatus
from pyrocket_consumer.producer.attempts import SendFailure, classify_failure, is_route_stale
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import (
    answer,
    close_connection,
    cut_after,
    drop,
    handle_and_close,
    reset_connection,
    rewrite,
)
from tests.for_each import for_each
from tests.producer.programs import within
from tests.real_brokers import wait_until

SEND = RequestCode.SEND_MESSAGE_V2
QUEUE = "request queueId[7] is illegal, TopicConfig [topicName=orders, readQueueNums=2] Producer: /127.0.0.1:4711"
SLAVE = "[REJECTREQUEST]system busy, start flow control for a while"
READ_ONLY = "the broker[127.0.0.1:10911] sending message is forbidden"
BATCH = RequestCode.SEND_BATCH_MESSAGE
A, B = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-b", 0)


DEGRADED = {10: SendStatus.FLUSH_DISK_TIMEOUT, 11: SendStatus.SLAVE_NOT_AVAILABLE, 12: SendStatus.FLUSH_SLAVE_TIMEOUT}

pytestmark = pytest.mark.cluster(brokers=2)


def known(producer):
    """Fetch the route and connect, and use both brokers equally from here on."""
    for _ in range(4):
        producer.send("orders", b"first")
    return producer


@pytest.fixture
def producer(embedded, producing):
    return known(producing(embedded))


@pytest.fixture
def strict(embedded, producing):
    """A producer that does not accept a degraded store."""
    return known(producing(embedded, accept_degraded=False))


def with_code(code):
    def change(command):
        command.code = code
        return command

    return rewrite(change)


@for_each(
    "code, remark, meant, new_route",
    [
        (17, "topic[orders] not exist, apply first please!", SendFailure.RETRY, True),
        (14, "service not available now.", SendFailure.RETRY, True),  # a slave of 4.9
        (2, SLAVE, SendFailure.RETRY, True),  # a slave of 5.x
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while", SendFailure.RETRY, False),
        (1, QUEUE, SendFailure.RETRY, True),  # 4.9.7, 5.1.4
        (29, QUEUE, SendFailure.RETRY, True),  # 5.3.3, 5.5.0
        (29, "The specified topic contains illegal characters", SendFailure.PERMANENT, False),
        (16, READ_ONLY, SendFailure.RETRY, True),
        (16, "User:app has no permission to access Topic:orders", SendFailure.RETRY_ELSEWHERE, False),  # ACL 2.0
        (
            1,
            "org.apache.rocketmq.acl.common.AclException: No accessKey is configured",
            SendFailure.RETRY_ELSEWHERE,
            False,
        ),
        (1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", SendFailure.RETRY, True),
        (1, "UNKNOWN_ERROR", SendFailure.UNKNOWN, False),
        (10, "", SendFailure.UNKNOWN, False),  # stored, but degraded stores do not count here
        (13, "the message is illegal", SendFailure.PERMANENT, False),
    ],
)
def test_errors_of_brokers_are_classified(code, remark, meant, new_route):
    error = read_error(RemotingCommand(code, {}, b"", 1, flag=1, remark=remark), "127.0.0.1:10911")
    assert (classify_failure(error), is_route_stale(error)) == (meant, new_route)


@pytest.mark.parametrize("code", [17, 14, 1, 2, 16, 204, 205, 215, 1500])
def test_a_refused_message_goes_to_another_broker(embedded, producer, code):
    refused_by, takes = embedded.brokers
    refused_by.on(SEND, answer(code, "not now"), times=None)
    assert {producer.send("orders", b"x").queue.broker_name for _ in range(4)} == {takes.name}


@pytest.mark.parametrize("code", [13, 29, 15, 3, 26])
def test_a_permanent_refusal_is_not_retried(embedded, producer, code):
    for broker in embedded.brokers:
        broker.forget_requests()
        broker.on(SEND, answer(code, "never"), times=None)
    with pytest.raises(SendError, match=rf"orders/broker-.*\({code}\): never") as raised:
        producer.send("orders", b"x")
    assert len(raised.value.attempts) == 1
    assert sum(len(broker.requests(SEND)) for broker in embedded.brokers) == 1


@pytest.mark.parametrize("fault", [close_connection, reset_connection, handle_and_close, cut_after(20)])
def test_after_a_lost_connection_another_broker_is_tried(embedded, producer, fault):
    failing = embedded.broker("broker-a")
    failing.forget_requests()
    failing.on(SEND, fault, times=1)
    for _ in range(4):
        sent = producer.send("orders", b"x")
        if failing.requests(SEND):
            break
    assert len(failing.requests(SEND)) == 1
    assert sent.queue.broker_name == "broker-b"


def test_without_a_response_another_broker_is_tried_in_time(embedded, producing):
    producer = known(producing(embedded, send_timeout_s=6))
    embedded.broker("broker-a").on(SEND, drop, times=None)
    with within(8):  # one message waits for a response, the next ones avoid the broker
        assert {producer.send("orders", b"x").queue.broker_name for _ in range(3)} == {"broker-b"}


def test_a_failed_broker_is_avoided_for_a_moment(embedded, producer):
    failing = embedded.broker("broker-a")
    for _ in range(3):
        failing.forget_requests()
        failing.on(SEND, answer(2, "busy"), times=1)
        started = time.monotonic()
        sent = {producer.send("orders", b"x").queue.broker_name for _ in range(10)}
        was_quick = time.monotonic() - started < 0.4  # the moment is a second
        sends = len(failing.requests(SEND))
        wait_until(lambda: producer.send("orders", b"x").queue.broker_name == "broker-a", "it is trusted again")
        if was_quick:
            break
    assert (sent, sends) == ({"broker-b"}, 1)


def test_simultaneous_refusals_are_one_failure_of_a_broker(embedded, producer):
    """With any number of refused messages, it is avoided for the same time, and no message is lost."""
    refuses, takes = embedded.brokers
    refuses.on(SEND, answer(14, "not now"), times=None)
    before = len(takes.messages("orders"))
    sent = [producer.send_async("orders", b"x") for _ in range(4000)]
    assert {future.result(60).queue.broker_name for future in sent} == {takes.name}
    assert len(takes.messages("orders")) == before + 4000
    refuses.clear_faults()
    wait_until(lambda: producer.send("orders", b"y").queue.broker_name == refuses.name, "it is trusted again", 10)


@pytest.mark.cluster(brokers=1)
def test_an_only_broker_is_retried_after_a_pause(embedded, producer):
    broker = embedded.broker("broker-a")
    broker.forget_requests()
    broker.on(SEND, answer(2, "busy"), times=2)
    assert producer.send("orders", b"x").queue.broker_name == "broker-a"
    first, second, third = (each.at_s for each in broker.requests(SEND))
    assert second - first >= 0.04
    assert third - second >= 0.09


@pytest.mark.cluster(brokers=1)
def test_the_error_lists_every_attempt(embedded, producer):
    broker = embedded.broker("broker-a")
    broker.on(SEND, answer(2, "busy one"))
    broker.on(SEND, close_connection)
    broker.on(SEND, answer(14, "disk full"), times=None)
    with pytest.raises(SendError) as raised:
        producer.send("orders", b"x", timeout_s=3)
    error = raised.value
    first, second, *repeated, last = error.attempts
    assert "SYSTEM_BUSY (2): busy one" in first
    assert "was lost" in second
    assert all("SERVICE_NOT_AVAILABLE (14): disk full (" in attempt for attempt in repeated)
    assert last == "gave up after 3 s"
    tried = (first, second, *repeated)
    assert all(attempt.startswith("orders/broker-a/") and broker.address in attempt for attempt in tried)
    assert all(attempt in str(error) for attempt in error.attempts)
    assert error.topic == "orders"
    assert pickle.loads(pickle.dumps(error)).attempts == error.attempts


@pytest.mark.cluster(brokers=1)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (answer(2, "busy"), FlowControl),
        (answer(16, "forbidden"), PermissionDenied),
        (close_connection, ConnectionLost),
        (drop, RequestTimeout),
        (answer(0, fields={"msgId": "x"}), ProtocolError),
    ],
)
def test_the_last_attempts_error_is_the_cause(embedded, producer, fault, cause):
    embedded.broker("broker-a").on(SEND, fault, times=None)
    errors = [producer.send_async("orders", b"x", timeout_s=seconds).exception(30) for seconds in (2.7, 2.9, 3)]
    causes = [error.__cause__ for error in errors if "no response from" not in error.attempts[-1] or fault is drop]
    assert causes, "the last attempt of each was on its way when its time was over"
    assert all(isinstance(each, cause) for each in causes)


@pytest.mark.cluster(brokers=1)
def test_attempts_are_counted(embedded, producing):
    producer = known(producing(embedded, send_attempts=2))
    broker = embedded.broker("broker-a")
    broker.forget_requests()
    broker.on(SEND, answer(1, "no"), times=None)
    with pytest.raises(SendError, match=r"SYSTEM_ERROR \(1\): no \(2 times\)"):
        producer.send("orders", b"x")
    assert len(broker.requests(SEND)) == 2


@pytest.mark.parametrize("pin", [{"queue": A}, {"sharding_key": "key"}])
def test_a_message_for_one_queue_is_retried_there_only(embedded, producer, pin):
    for broker in embedded.brokers:
        broker.forget_requests()
        broker.on(SEND, close_connection, times=None)
    with pytest.raises(SendError) as raised:
        producer.send("orders", b"x", **pin)
    assert sorted(len(broker.requests(SEND)) for broker in embedded.brokers) == [0, 3]
    assert len({attempt.partition(":")[0] for attempt in raised.value.attempts}) == 1


@pytest.mark.cluster(brokers=1)
@for_each("code, status", DEGRADED.items())
def test_a_degraded_store_counts_as_stored(embedded, producer, code, status):
    before = len(embedded.messages("orders"))
    embedded.broker("broker-a").on(SEND, with_code(code))
    assert producer.send("orders", b"x").status is status
    assert len(embedded.messages("orders")) == before + 1


@pytest.mark.parametrize("code", DEGRADED)
def test_a_rejected_degraded_store_goes_to_another_broker(embedded, strict, code):
    embedded.broker("broker-a").on(SEND, with_code(code), times=None)
    sent = [strict.send("orders", b"x") for _ in range(4)]
    assert {(each.queue.broker_name, each.status) for each in sent} == {("broker-b", SendStatus.OK)}


@for_each("pin", [{"queue": A}, {"sharding_key": "k"}])
def test_a_degraded_store_in_order_is_retried_on_its_queue(embedded, strict, pin):
    for broker in embedded.brokers:
        broker.on(SEND, with_code(12), times=None)
    with pytest.raises(SendError, match=r"FLUSH_SLAVE_TIMEOUT \(12\): .* \(3 times\)") as raised:
        strict.send("orders", b"x", **pin)
    assert len(raised.value.attempts) == 1


@pytest.mark.cluster(brokers=1)
def test_a_degraded_batch_is_retried(embedded, strict):
    embedded.broker("broker-a").on(BATCH, with_code(10))
    assert {each.status for each in strict.send_batch("orders", [b"x", b"y"])} == {SendStatus.OK}
    assert len(embedded.messages("orders")) == 4 + 2 + 2


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_stopped_broker_loses_no_message(embedded, producer, how):
    futures = [producer.send_async("orders", b"%d" % number) for number in range(200)]
    getattr(embedded.broker("broker-a"), how)()
    futures += [producer.send_async("orders", b"%d" % number) for number in range(200, 300)]
    assert all(future.result(30) for future in futures)
    assert {int(message.body) for message in embedded.messages("orders") if message.body != b"first"} == set(range(300))


def test_without_any_broker_the_error_is_raised_in_time(embedded, producer):
    for broker in embedded.brokers:
        broker.kill()
    with within(10), pytest.raises((SendError, RouteNotFound)):
        producer.send("orders", b"x", timeout_s=0.5)
    for broker in embedded.brokers:
        broker.start()
    assert producer.send("orders", b"x", timeout_s=30)


@pytest.mark.cluster(brokers=1)
def test_a_known_route_needs_no_name_server(embedded, producing):
    producer = known(producing(embedded, call_timeout_s=15, connect_timeout_s=15))
    embedded.stop_name_server()
    assert producer.send("orders", b"x")
    with pytest.raises(SendError) as raised:
        producer.send("other", b"x", timeout_s=1)
    assert isinstance(raised.value.__cause__, ConnectError)
    embedded.start_name_server()
    embedded.create_topic("other", queues=1)
    assert producer.send("other", b"x", timeout_s=30)


@pytest.mark.cluster(brokers=2, name_servers=2)
def test_another_name_server_takes_over(embedded, producing):
    producer = producing(embedded)
    for name_server, topic in zip(embedded.name_server_nodes, ("after-one", "after-two"), strict=True):
        name_server.stop()
        assert producer.send("orders", b"x", timeout_s=30)
        embedded.create_topic(topic, queues=1)
        name_server.start()
        assert producer.send(topic, b"x", timeout_s=30)


@pytest.mark.cluster(brokers=1)
def test_a_half_failed_batch_reports_the_stored_messages(embedded, producing):
    producer = known(producing(embedded, max_message_bytes=1000, send_attempts=1))
    broker = embedded.broker("broker-a")
    bodies = [b"%03d" % number + b"x" * 300 for number in range(10)]
    broker.on(BATCH, rewrite(lambda command: command), times=2)
    broker.on(BATCH, answer(13, "odd"))
    with pytest.raises(SendError, match="was not sent after the first 4, which are stored: .*odd") as raised:
        producer.send_batch("orders", bodies)
    assert raised.value.stored == 4
    assert {message.body for message in embedded.messages("orders")} == {b"first", *bodies[:4]}
    assert pickle.loads(pickle.dumps(raised.value)).stored == 4


@pytest.mark.cluster(brokers=1)
def test_a_one_way_message_that_cannot_be_sent_is_an_error(embedded, producer):
    embedded.broker("broker-a").kill()
    for send in (lambda: producer.send("orders", b"x", timeout_s=1), lambda: producer.send_oneway("orders", b"x")):
        with pytest.raises((SendError, RouteNotFound)):  # the second one, because the producer has noticed
            send()
