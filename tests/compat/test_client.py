"""Code that was written for rocketmq-client-python sees the old behaviour, or a corrected one."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
import zlib
from contextlib import contextmanager, suppress
from ctypes import ArgumentError
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pyrocket_consumer import EventKind
from pyrocket_consumer.compat.rocketmq import client as client_module
from pyrocket_consumer.compat.rocketmq import ffi
from pyrocket_consumer.compat.rocketmq.client import (
    ConsumeStatus,
    Message,
    MessageModel,
    MessageProperty,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SendResult,
    SendStatus,
    TransactionMQProducer,
    TransactionStatus,
)
from pyrocket_consumer.compat.rocketmq.exceptions import (
    ConsumerException,
    NullPointerException,
    ProducerSendAsyncFailed,
    ProducerSendOnewayFailed,
    ProducerSendOrderlyFailed,
    ProducerSendSyncFailed,
    ProducerStartFailed,
    PushConsumerStartFailed,
    RocketMQException,
    ffi_check,
)
from pyrocket_consumer.testing import Gate, RequestCode, ResponseCode, rewrite
from tests.consuming import WAIT_S, until
from tests.for_each import for_each
from tests.interruptions import name_servers_held
from tests.producer.programs import in_a_thread, within

ROOT = Path(__file__).parents[2]
NOBODY = "127.0.0.1:1"


pytestmark = pytest.mark.cluster(delay_scale=0.01)
two_brokers_4_9 = pytest.mark.cluster(brokers=2, version="4.9.7")


@pytest.fixture
def cluster(embedded):
    return embedded


@pytest.fixture
def topic(cluster, request):
    name = f"t{zlib.crc32(request.node.nodeid.encode())}"
    cluster.create_topic(name, queues=2)
    return name


@pytest.fixture
def got():
    return queue.Queue()


@pytest.fixture
def producer(cluster):
    with client(Producer("p"), cluster) as producer:
        yield producer


@contextmanager
def client(made, cluster):
    made.set_name_server_address(cluster.name_server)
    with made as used:
        assert used is made
        yield used


@contextmanager
def consuming(cluster, topic, callback, expression="*", **options):
    consumer = PushConsumer(f"g-{topic}", **options)
    consumer.subscribe(topic, callback, expression)
    with client(consumer, cluster):
        yield consumer


@contextmanager
def hold_start(cluster, topic):
    """Hold a start until the end of this block, while one of its queues has a message."""
    gate = Gate()
    cluster.send(topic, b"x", broker_name="broker-a")
    cluster.broker("broker-b").on(RequestCode.QUERY_CONSUMER_OFFSET, gate, times=None)
    yield
    gate.open()


def consumed(cluster, topic):
    """Return the number of messages before the committed offsets."""
    return sum(cluster.committed(f"g-{topic}", topic).values())


def message(topic, body=b"body"):
    made = Message(topic)
    made.set_body(body)
    return made


def test_a_message_keeps_all_its_parts(cluster, topic, producer, got):
    with consuming(cluster, topic, got.put):
        sent = Message(topic.encode())
        sent.set_keys("k1 k2")
        sent.set_tags("größe".encode())
        sent.set_property("région", "値 ☃")
        sent.set_body(b"\0\xff\0 all of it\0")
        stored = producer.send_sync(sent)
        received = got.get(timeout=WAIT_S)
    assert isinstance(stored, SendResult)
    assert stored == (SendStatus.OK, received.id, received.queue_offset)
    assert (received.topic, received.body, bytes(received)) == (topic, b"\0\xff\0 all of it\0", received.body)
    assert (received.keys, received.tags) == (b"k1 k2", "größe".encode())
    assert received["région"] == received.get_property("région".encode()) == "値 ☃".encode()
    assert received[MessageProperty.KEYS] == b"k1 k2"
    assert (received.get_property("absent"), received.delay_time_level, received.reconsume_times) == (b"", 0, 0)
    assert 0 < received.born_timestamp <= received.store_timestamp + 1000
    assert (received.queue_id in (0, 1), received.prepared_transaction_offset) == (True, 0)
    assert received.store_size > len(received.body) and received.commit_log_offset >= 0
    assert repr(topic) in repr(received)


def test_text_is_utf_8_both_ways(cluster, topic, producer, got):
    with consuming(cluster, topic, got.put):
        producer.send_sync(message(topic, "Grüße, 世界"))
        received = got.get(timeout=WAIT_S)
    assert str(received) == "Grüße, 世界"
    assert (received.tags, received.keys) == (b"", b"")


def test_a_callback_may_set_attributes_of_the_message(cluster, topic, producer, got):
    def note(received):
        received.order = received.body.decode()
        got.put(received)

    with consuming(cluster, topic, note):
        producer.send_sync(message(topic, "o-1"))
        received = got.get(timeout=WAIT_S)
    assert received.order == "o-1"
    assert weakref.ref(received)() is received


@pytest.mark.parametrize("answer", [ConsumeStatus.CONSUME_SUCCESS, 0, False, None], ids=repr)
def test_a_callback_has_consumed_the_message(cluster, topic, answer, got):
    def callback(msg):
        got.put(msg.body)
        return answer

    with consuming(cluster, topic, callback):
        cluster.send(topic, b"one")
        assert got.get(timeout=WAIT_S) == b"one"
    assert consumed(cluster, topic) == 1
    assert got.empty()


@pytest.mark.parametrize("answer", [ConsumeStatus.RECONSUME_LATER, 1, True, "ok", 2, KeyError("no")], ids=repr)
@pytest.mark.parametrize("orderly", [False, True])
def test_a_callback_gets_the_message_again(cluster, topic, answer, orderly, got):
    def callback(msg):
        got.put(msg.reconsume_times)
        if msg.reconsume_times:
            return ConsumeStatus.CONSUME_SUCCESS
        if isinstance(answer, Exception):
            raise answer
        return answer

    with consuming(cluster, topic, callback, orderly=orderly):
        cluster.send(topic, b"one")
        assert [got.get(timeout=WAIT_S) for _ in range(2)] == [0, 1]


def test_a_wrong_result_of_a_callback_is_logged(cluster, topic, caplog):
    with consuming(cluster, topic, lambda msg: "fine"):
        cluster.send(topic, b"one")
        until(lambda: EventKind.LISTENER_RESULT_UNKNOWN.value in caplog.text or "'fine'" in caplog.text, "a log line")


def test_each_topic_has_its_own_callback(cluster, topic, got):
    other = f"{topic}-other"
    cluster.create_topic(other, queues=1)
    consumer = PushConsumer(f"g-{topic}")
    consumer.subscribe(topic, lambda msg: got.put(("one", msg.topic)))
    consumer.subscribe(other, lambda msg: got.put(("other", msg.topic)))
    with client(consumer, cluster):
        cluster.send(topic, b"x")
        cluster.send(other, b"x")
        assert {got.get(timeout=WAIT_S) for _ in range(2)} == {("one", topic), ("other", other)}


def test_a_topic_may_be_subscribed_to_after_the_start(cluster, topic, got):
    other = f"{topic}-other"
    cluster.create_topic(other, queues=1)
    with consuming(cluster, topic, got.put) as consumer:
        consumer.subscribe(other, lambda msg: got.put(msg.body), "")
        cluster.send(other, b"x", tags="a")
        assert got.get(timeout=WAIT_S) == b"x"


@pytest.mark.cluster(version="4.9.7")
def test_a_topic_may_be_subscribed_to_during_the_start(cluster, topic, got):
    cluster.create_topic(f"{topic}-other", queues=1)
    cluster.send(topic, b"x")
    consumer = PushConsumer(f"g-{topic}")
    consumer.subscribe(f"{topic}-other", print)
    consumer.set_name_server_address(cluster.name_server)
    with name_servers_held(cluster) as gate, in_a_thread(consumer.start):
        gate.wait_held(1)
        with in_a_thread(consumer.subscribe, topic, lambda msg: got.put(msg.body)) as subscribing:
            subscribing.join(0.1)
            gate.open()
    try:
        assert got.get(timeout=WAIT_S) == b"x"
    finally:
        consumer.shutdown()


def test_tags_select(cluster, topic, got):
    with consuming(cluster, topic, lambda msg: got.put(msg.tags), "a || c"):
        for tag in "abc":
            cluster.send(topic, tag.encode(), tags=tag)
        assert {got.get(timeout=WAIT_S) for _ in range(2)} == {b"a", b"c"}


def test_orderly_keeps_the_order_of_a_key(cluster, topic, got):
    with (
        consuming(cluster, topic, lambda msg: got.put(int(msg.body)), orderly=True),
        client(Producer("p", True), cluster) as producer,
    ):
        for number in range(20):
            producer.send_orderly_with_sharding_key(message(topic, str(number)), "key")
        assert [got.get(timeout=WAIT_S) for _ in range(20)] == list(range(20))


def test_broadcasting_gives_each_message_to_every_member(cluster, topic, tmp_path, monkeypatch, got):
    monkeypatch.setenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", str(tmp_path))
    options = {"message_model": MessageModel.BROADCASTING}
    with (
        consuming(cluster, topic, lambda msg: got.put(1), **options),
        consuming(cluster, topic, lambda msg: got.put(2), **options),
    ):
        cluster.send(topic, b"x")
        assert {got.get(timeout=WAIT_S) for _ in range(2)} == {1, 2}


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"before", marks=pytest.mark.cluster(version="4.9.7")),
        pytest.param(b"after", marks=pytest.mark.cluster(version="5.5.0")),
    ],
)
def test_a_new_group_starts_with_new_messages_if_it_can(cluster, topic, got, first):
    cluster.send(topic, b"before")
    with consuming(cluster, topic, got.put):
        cluster.send(topic, b"after")
        assert got.get(timeout=WAIT_S).body == first


def test_a_consumer_may_be_started_twice_and_again(cluster, topic, got):
    with consuming(cluster, topic, lambda msg: got.put(msg.body)) as consumer:
        consumer.start()
        cluster.send(topic, b"first")
        assert got.get(timeout=WAIT_S) == b"first"
        consumer.shutdown()
        consumer.shutdown()
        cluster.send(topic, b"second")
        consumer.start()
        assert got.get(timeout=WAIT_S) == b"second"
    assert got.empty()


class ShutsDown:
    """A callback that shuts its own consumer down, and then waits until it may end."""

    def __init__(self, topic):
        self.has_shut_down, self.may_end = threading.Event(), threading.Event()
        self.consumer = PushConsumer(f"g-{topic}")
        self.consumer.subscribe(topic, self)

    def __call__(self, msg):
        self.consumer.shutdown()
        self.has_shut_down.set()
        self.may_end.wait(WAIT_S)


def test_a_callback_may_shut_its_consumer_down(cluster, topic):
    callback = ShutsDown(topic)
    callback.may_end.set()
    with client(callback.consumer, cluster):
        cluster.send(topic, b"x")
        assert callback.has_shut_down.wait(WAIT_S)
        until(lambda: consumed(cluster, topic) == 1, "the offset")


def test_a_shutdown_after_one_in_a_callback_waits_for_the_close(cluster, topic):
    callback = ShutsDown(topic)
    with client(callback.consumer, cluster):
        cluster.send(topic, b"x")
        assert callback.has_shut_down.wait(WAIT_S)
        callback.may_end.set()
    assert consumed(cluster, topic) == 1


def test_a_start_during_a_waiting_shutdown_makes_a_new_consumer(cluster, topic, got):
    may_end = threading.Event()

    def callback(msg):
        got.put(msg.body)
        if msg.body == b"long":
            may_end.wait(WAIT_S)

    consumer = PushConsumer(f"g-{topic}")
    consumer.subscribe(topic, callback)
    with client(consumer, cluster):
        cluster.send(topic, b"long")
        assert got.get(timeout=WAIT_S) == b"long"
        with in_a_thread(consumer.shutdown) as shutting_down:
            until(lambda: repr(consumer).endswith(" not running>"), "the shutdown")
            consumer.start()
            assert shutting_down.is_alive()
            may_end.set()
        cluster.send(topic, b"more")
        while got.get(timeout=WAIT_S) != b"more":
            pass
    assert consumed(cluster, topic) == 2


@two_brokers_4_9
def test_a_callback_may_shut_down_a_starting_consumer(cluster, topic):
    callback = ShutsDown(topic)
    with hold_start(cluster, topic), client(callback.consumer, cluster):
        assert callback.has_shut_down.wait(WAIT_S)
        callback.may_end.set()
    assert consumed(cluster, topic) == 1


def test_a_producer_shut_down_during_its_start_does_not_send(cluster, topic):
    producer = Producer("p")
    producer.set_name_server_address(cluster.name_server)
    with name_servers_held(cluster) as gate, in_a_thread(producer.start):
        gate.wait_held(1)
        producer.shutdown()
        gate.open()
    with pytest.raises(ProducerSendSyncFailed, match=r"not started; call start\(\)"):
        producer.send_sync(message(topic))
    producer.start()
    producer.shutdown()


def test_two_clients_of_a_group_live_in_one_process(cluster, topic, got):
    with (
        consuming(cluster, topic, lambda msg: got.put(msg.body)),
        consuming(cluster, topic, lambda msg: got.put(msg.body)),
        client(Producer("p"), cluster) as one,
        client(Producer("p"), cluster) as two,
    ):
        one.send_sync(message(topic, b"1"))
        two.send_oneway(message(topic, b"2"))
        assert {got.get(timeout=WAIT_S) for _ in range(2)} == {b"1", b"2"}


def test_a_producer_can_be_started_again(cluster, topic):
    producer = Producer("p")
    with client(producer, cluster):
        producer.start()
        producer.send_sync(message(topic))
    producer.start()
    assert producer.send_sync(message(topic)).status == SendStatus.OK
    producer.shutdown()
    producer.shutdown()


@pytest.mark.cluster(auto_create_topics=True)
def test_a_new_topic_is_created_by_the_first_message(producer):
    assert producer.send_sync(message("new")).status == SendStatus.OK


def test_delay_level_and_property_names_of_rocketmq(cluster, topic, producer, got):
    with consuming(cluster, topic, got.put):
        sent = message(topic)
        sent.set_property("KEYS", "k")
        sent.set_property(b"TAGS", b"t")
        sent.set_delay_time_level(1)
        producer.send_sync(sent)
        received = got.get(timeout=WAIT_S)
    assert (received.keys, received.tags, received.delay_time_level) == (b"k", b"t", 1)


@pytest.mark.cluster(account=("ak", "sk-of-it"))
def test_an_account_signs_and_is_not_shown(cluster, topic, got):
    consumer, producer = PushConsumer("g"), Producer("p")
    consumer.subscribe(topic, lambda msg: got.put(msg.body))
    for each in (consumer, producer):
        each.set_session_credentials("ak", b"sk-of-it", "ALIYUN")
        assert "sk-of-it" not in repr(each) + repr(vars(each))
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(each)
    with client(consumer, cluster), client(producer, cluster):
        producer.send_sync(message(topic, b"x"))
        assert got.get(timeout=WAIT_S) == b"x"


# --- transactions


def test_a_transaction_is_committed_with_what_its_function_sees(cluster, topic, got):
    seen = []

    def execute(msg, user_args):
        seen.append((str(msg), msg.keys, msg.id, msg["p"], user_args))
        return TransactionStatus.COMMIT

    producer = TransactionMQProducer("tp", lambda msg: TransactionStatus.UNKNOWN)
    with consuming(cluster, topic, got.put), client(producer, cluster):
        sent = message(topic, "ümsatz")
        sent.set_keys("k")
        sent.set_property("p", "v")
        given = {"any": object()}
        stored = producer.send_message_in_transaction(sent, execute, given)
        received = got.get(timeout=WAIT_S)
    assert seen == [("ümsatz", b"k", stored.msg_id, b"v", given)]
    assert (str(received), received.id) == ("ümsatz", stored.msg_id)


@pytest.mark.cluster(settings={"transactionTimeOut": 100, "transactionCheckInterval": 100})
@pytest.mark.parametrize("outcome", [KeyError("bug"), None, True, False, "commit", TransactionStatus.UNKNOWN], ids=repr)
def test_an_undecided_transaction_is_left_to_the_checker(cluster, topic, got, outcome):
    def decide(*arguments):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def check(msg):
        checked.append(msg.id)
        return decide() if len(checked) == 1 and outcome != TransactionStatus.UNKNOWN else TransactionStatus.COMMIT

    checked, producer = [], TransactionMQProducer("tp", check, None, 5000)
    with consuming(cluster, topic, lambda msg: got.put(msg.id)), client(producer, cluster):
        stored = producer.send_message_in_transaction(message(topic), decide)
        assert stored.status == SendStatus.OK
        assert got.get(timeout=WAIT_S) == stored.msg_id


def test_a_rollback_is_never_delivered(cluster, topic, got):
    producer = TransactionMQProducer("tp", lambda msg: TransactionStatus.COMMIT)
    with consuming(cluster, topic, lambda msg: got.put(msg.body)), client(producer, cluster):
        producer.send_message_in_transaction(message(topic, b"no"), lambda msg, args: TransactionStatus.ROLLBACK)
        producer.send_message_in_transaction(message(topic, b"yes"), lambda msg, args: 0)
        assert got.get(timeout=WAIT_S) == b"yes"
    assert got.empty()


# --- addresses of name servers


@contextmanager
def web_server(answer: bytes, status: int = 200):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, in_a_thread(server.serve_forever, 0.01):
        try:
            yield f"127.0.0.1:{server.server_port}/nsaddr"
        finally:
            server.shutdown()


@pytest.mark.live
@pytest.mark.parametrize("prefix", ["", "http://"])
def test_a_domain_returns_the_name_servers(cluster, topic, prefix):
    with web_server(f"{NOBODY};{cluster.name_server}\r\n".encode()) as url:
        producer = Producer("p")
        producer.set_name_server_domain(prefix + url)
        with producer:
            assert producer.send_sync(message(topic)).status == SendStatus.OK


@pytest.mark.live
@for_each(
    "answer, status, text",
    [(b"", 200, "names no name servers"), (b"host", 200, "host:port"), (b"", 404, "404"), (b"\xff", 200, "utf-8")],
)
def test_a_domain_without_name_servers_fails_the_start(answer, status, text):
    with web_server(answer, status) as url:
        producer = Producer("p")
        producer.set_name_server_domain(url)
        with pytest.raises(ProducerStartFailed, match=text):
            producer.start()


@contextmanager
def raw_server(parts, each_s):
    """A server that sends `parts` to each client, with a pause before each, and then keeps the connection open."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send_parts():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                for part in parts:
                    time.sleep(each_s)
                    connection.sendall(part)
                while connection.recv(4096):
                    pass

        with in_a_thread(send_parts):  # it ends when the client disconnects
            yield f"127.0.0.1:{server.getsockname()[1]}/nsaddr"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.live
@pytest.mark.slow("the server that says nothing is waited for")
@pytest.mark.parametrize(
    ("parts", "each_s", "text"),
    [
        ([], 0, "timed out"),
        ([bytes([each]) for each in HEAD], 0.3, "timed out"),
        ([HEAD] + [b"1"] * 1000, 0.3, "timed out"),
        ([b"\xff\x1b\x00" * 5000 + b"\r\n"], 0, r"nsaddr: it did not return .*\\x1b.*… \(\d+ more characters\)"),
        ([HEAD.replace(b"200 OK", b"302 Found\r\nLocation: file:///etc/passwd")], 0, "it answers 302"),
        ([HEAD.replace(b"1000", b"13"), b"<html></html>"], 0, "nsaddr names no name servers.*'<html></html>'"),
    ],
    ids=["nothing", "head-by-bytes", "body-by-bytes", "no-http", "elsewhere", "html"],
)
def test_a_wrong_response_of_a_domain_fails_the_start_in_time(parts, each_s, text):
    with raw_server(parts, each_s) as url:
        producer = Producer("p")
        producer.set_name_server_domain(url)
        with within(8), pytest.raises(ProducerStartFailed, match=text) as caught:
            producer.start()
        assert len(str(caught.value)) < 600


def test_an_account_in_a_domain_is_refused_and_not_shown():
    producer = Producer("p")
    producer.set_name_server_domain("http://me:hidden@127.0.0.1:9/nsaddr")
    with pytest.raises(ProducerStartFailed, match="account") as caught:
        producer.start()
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


@for_each("domain", ["file:///etc/passwd", "ftp://there/x", "http://", "http://["])
def test_a_domain_is_a_web_address(domain):
    consumer = PushConsumer("g")
    consumer.subscribe("t", print)
    consumer.set_name_server_domain(domain)
    with pytest.raises(PushConsumerStartFailed, match="domain"):
        consumer.start()


def test_an_endpoint_of_an_instance_has_its_namespace(cluster, got):
    name = "MQ_INST_17_Bx"
    cluster.create_topic(f"{name}%orders", queues=1)
    consumer, producer = PushConsumer("g"), Producer("p")
    consumer.subscribe("orders", got.put)
    for each in (consumer, producer):
        each.set_name_server_address(f"http://{name}.localhost:{cluster.name_server.rpartition(':')[2]}/")
        each._address = cluster.name_server  # its host name cannot be resolved here
    with consumer, producer:
        producer.send_sync(message("orders"))
        assert got.get(timeout=WAIT_S).topic == "orders"
    assert set(cluster.committed(f"{name}%g", f"{name}%orders").values()) == {1}


def test_a_topic_of_an_instance_is_received_as_it_is_named(cluster, topic, got):
    whole = f"MQ_INST_17_Bx%{topic}"
    cluster.create_topic(whole, queues=1)
    decided = []

    def decide(half, decided):
        decided.append(half.topic)
        return TransactionStatus.COMMIT

    producer = TransactionMQProducer("tp", lambda half: TransactionStatus.COMMIT)
    with consuming(cluster, whole, got.put), client(producer, cluster):
        producer.send_message_in_transaction(message(whole), decide, decided)
        assert got.get(timeout=WAIT_S).topic == whole
    assert decided == [whole]


# --- refused arguments


def test_a_too_large_body_is_an_error_of_the_old_package(cluster, topic):
    large = message(topic, b"x" * 2001)
    producer, in_transaction = Producer("p"), TransactionMQProducer("p", lambda each: TransactionStatus.COMMIT)
    for each in (producer, in_transaction):
        each.set_name_server_address(cluster.name_server)
        each.set_max_message_size(2000)
    with producer, in_transaction:
        for send in (
            producer.send_sync,
            producer.send_oneway,
            lambda each: producer.send_orderly_with_sharding_key(each, "k"),
            lambda each: in_transaction.send_message_in_transaction(each, lambda *_: TransactionStatus.COMMIT),
        ):
            with pytest.raises(RocketMQException, match="2001 bytes is more than 2000;.* set_max_message_size"):
                send(large)
        producer.set_max_message_size(2001)
    with producer:
        assert producer.send_sync(large).status == SendStatus.OK


def test_clients_without_a_response_do_not_start():
    consumer, producer = PushConsumer("g"), Producer("p")
    consumer.subscribe("t", print)
    for each, error in ((consumer, PushConsumerStartFailed), (producer, ProducerStartFailed)):
        each.set_name_server_address(NOBODY)
        with pytest.raises(error, match=NOBODY) as caught:
            each.start()
        assert caught.value.__cause__ is not None
        each.shutdown()


def test_a_consumer_without_a_subscription_does_not_start(cluster):
    consumer = PushConsumer("g")
    consumer.set_name_server_address(cluster.name_server)
    with pytest.raises(PushConsumerStartFailed, match="subscribe"):
        consumer.start()


@for_each("kind", [Producer, PushConsumer])
def test_without_a_name_server_the_error_names_the_call(kind, monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    made = kind("g")
    if isinstance(made, PushConsumer):
        made.subscribe("t", print)
    with pytest.raises(RocketMQException, match=r"set_name_server_address\('host:9876'\).*NAMESRV_ADDR"):
        made.start()


def test_the_environment_names_the_name_servers(cluster, topic, monkeypatch):
    monkeypatch.setenv("NAMESRV_ADDR", cluster.name_server)
    with Producer("p") as producer:
        assert producer.send_sync(message(topic)).status == SendStatus.OK


@for_each("group", ["", "a b", "x" * 300])
def test_a_group_that_is_not_allowed_is_an_error_of_the_start(cluster, group):
    consumer = PushConsumer(group)
    consumer.set_name_server_address(cluster.name_server)
    consumer.subscribe("t", print)
    with pytest.raises(PushConsumerStartFailed, match="group"):
        consumer.start()


def test_a_producer_that_is_not_started_does_not_send(cluster, topic):
    producer = Producer("p")
    producer.set_name_server_address(cluster.name_server)
    for when in ("before", "after"):
        for error, send in (
            (ProducerSendSyncFailed, producer.send_sync),
            (ProducerSendOnewayFailed, producer.send_oneway),
            (ProducerSendOrderlyFailed, lambda msg: producer.send_orderly_with_sharding_key(msg, "k")),
        ):
            with pytest.raises(error, match="not started"):
                send(message(topic))
        if when == "before":
            producer.start()
            producer.shutdown()


@for_each(
    "change, text",
    [
        (lambda msg: msg.set_body(""), "empty"),
        (lambda msg: msg.set_body(b"x" * (5 << 20)), "set_max_message_size"),
        (lambda msg: msg.set_property("UNIQ_KEY", "mine"), "reserved"),
        (lambda msg: msg.set_property("p", "a\x01b"), "separate"),
        (lambda msg: msg.set_property("DELAY", "soon"), "DELAY"),
        (lambda msg: msg.set_delay_time_level(99), "delay_level"),
        (lambda msg: msg.set_tags("a||b"), "tag"),
    ],
)
def test_a_message_that_is_not_allowed_is_not_sent(topic, producer, change, text):
    wrong = message(topic)
    change(wrong)
    with pytest.raises(ProducerSendSyncFailed, match=text):
        producer.send_sync(wrong)


@for_each("topic", ["no such topic", "", "SCHEDULE_TOPIC_XXXX"])
def test_a_topic_that_cannot_be_sent_to_is_not_sent_to(producer, topic):
    with pytest.raises(ProducerSendSyncFailed, match="topic"):
        producer.send_sync(message(topic))


@for_each("name", ["FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"])
def test_a_message_stored_less_safely_is_stored_once(cluster, topic, producer, name):
    fault, before = rewrite(lambda answer: replace(answer, code=ResponseCode[name])), len(cluster.messages(topic))
    cluster.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, fault, times=2)
    assert producer.send_sync(message(topic)).status is SendStatus[name]
    assert producer.send_orderly_with_sharding_key(message(topic), "k").status is SendStatus[name]
    assert len(cluster.messages(topic)) == before + 2


def test_a_oneway_send_fails_if_the_broker_is_unreachable(cluster, topic):
    with client(Producer("p", timeout=300), cluster) as producer:
        producer.send_sync(message(topic))
        cluster.broker("broker-a").stop()
        with pytest.raises(ProducerSendSyncFailed):
            producer.send_sync(message(topic))
        with pytest.raises(ProducerSendOnewayFailed, match="connect"):
            producer.send_oneway(message(topic))


SETTERS = {
    "set_keys": lambda value: Message("t").set_keys(value),
    "set_tags": lambda value: Message("t").set_tags(value),
    "set_body": lambda value: Message("t").set_body(value),
    "set_property name": lambda value: Message("t").set_property(value, "v"),
    "set_property value": lambda value: Message("t").set_property("n", value),
    "Message": Message,
    "Producer": Producer,
    "PushConsumer": PushConsumer,
    "subscribe topic": lambda value: PushConsumer("g").subscribe(value, print),
    "subscribe expression": lambda value: PushConsumer("g").subscribe("t", print, value),
    "name server": lambda value: Producer("p").set_name_server_address(value),
    "domain": lambda value: Producer("p").set_name_server_domain(value),
    "group": lambda value: PushConsumer("g").set_group(value),
    "instance": lambda value: PushConsumer("g").set_instance_name(value),
    "access_key": lambda value: Producer("p").set_session_credentials(value, "s", ""),
    "access_secret": lambda value: Producer("p").set_session_credentials("a", value, ""),
    "channel": lambda value: Producer("p").set_session_credentials("a", "s", value),
    "send_sync": lambda value: Producer("p").send_sync(value),
    "get_property": lambda value: ReceivedMessage(None).get_property(value),
}


async def coroutine(msg): ...


NUMBERS = {
    "timeout": lambda value: Producer("p", timeout=value),
    "max_message_size": lambda value: Producer("p").set_max_message_size(value),
    "compress_level": lambda value: Producer("p").set_compress_level(value),
    "threads": lambda value: PushConsumer("g").set_thread_count(value),
    "batch": lambda value: PushConsumer("g").set_message_batch_max_size(value),
    "delay": lambda value: Message("t").set_delay_time_level(value),
}
CALLS = {
    **SETTERS,
    **NUMBERS,
    "set_timeout": lambda value: Producer("p").set_timeout(value),
    "model": lambda value: PushConsumer("g", message_model=value),
    "callback": lambda value: PushConsumer("g").subscribe("t", value),
    "tags": lambda value: PushConsumer("g").subscribe("t", print, value),
}
TEXTS = [name for name in SETTERS if name not in ("set_body", "send_sync")]
NO_TEXTS = [1, 1.5, bytearray(b"x"), ["x"], object()]
NO_CALLBACKS = [None, "x", lambda: None, lambda a, b: None, coroutine, ReceivedMessage]
WRONG = [
    *[(name, value, ArgumentError, type(value).__name__) for name in SETTERS for value in NO_TEXTS],
    *[(name, None, NullPointerException, "") for name in SETTERS],
    *[(name, b"\xff", RocketMQException, "UTF-8") for name in TEXTS],
    *[(name, value, ArgumentError, "whole number, not") for name in NUMBERS for value in ("3", True, False)],
    *[("timeout", value, RocketMQException, "between|least|from|to") for value in (0, 10**9)],
    *[("threads", value, RocketMQException, "between|least|from|to") for value in (-1, 9999)],
    ("batch", -1, RocketMQException, "max_size=-1 is not allowed; use 1 or more"),
    ("max_message_size", -1, RocketMQException, "between|least|from|to"),
    *[
        ("set_timeout", value, RocketMQException, f"timeout={value} is not allowed.* 10 to 600000, in milliseconds")
        for value in (0, 9, 600_001)
    ],
    *[(name, 0, NullPointerException, "0") for name in ("threads", "batch")],
    *[("model", value, ArgumentError, "CLUSTERING") for value in (2, "x", None)],
    *[("callback", value, ConsumerException, "callback") for value in NO_CALLBACKS],
    *[("tags", value, ConsumerException, r"\|\|") for value in ("a | b", "a, b")],
]


@for_each("name, value, error, expected", WRONG)
def test_a_wrong_argument_is_refused(name, value, error, expected):
    with pytest.raises(error, match=expected or None):
        CALLS[name](value)


def test_the_error_of_an_asynchronous_send_is_pickled_and_copied():
    error = ProducerSendAsyncFailed("refused", 14, "client.cpp", 7, "MQClientException")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(other), other.args, vars(other)) == (ProducerSendAsyncFailed, ("refused",), vars(error))


def test_functions_are_checked_before_anything_is_sent(cluster, topic):
    with pytest.raises(ArgumentError, match="checker_callback"):
        TransactionMQProducer("tp", None)
    producer = TransactionMQProducer("tp", print)
    with client(producer, cluster), pytest.raises(ArgumentError, match="local_execute"):
        producer.send_message_in_transaction(message(topic), None)


# --- options without effect


def test_options_without_effect_are_logged_once(caplog):
    for _ in range(3):
        producer, consumer = Producer("p", compress_level=9), PushConsumer("g")
        consumer.set_message_batch_max_size(32)
        for each in (producer, consumer):
            each.set_message_trace(True)
            ffi.dll.SetProducerLogPath(
                each._handle, b"/tmp/logs"
            )  # applications call functions that have no method like this
            ffi.dll.SetPushConsumerLogFileNumAndSize(each._handle, 3, 100)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) <= 4


def test_a_batch_of_one_and_an_empty_instance_name_are_not_logged(caplog):
    consumer = PushConsumer("g")
    consumer.set_message_batch_max_size(1)
    consumer.set_instance_name("")
    assert caplog.records == []


def test_private_names_that_applications_use_exist():
    assert (client_module._to_bytes("ü"), client_module._to_bytes(b"x"), client_module._to_bytes(5)) == (
        "ü".encode(),
        b"x",
        5,
    )
    assert client_module.dll is ffi.dll


def test_the_log_level_is_that_of_the_logger():
    log = logging.getLogger("pyrocket_consumer")
    before = log.level
    try:
        ffi_check(ffi.dll.SetPushConsumerLogLevel(PushConsumer("g")._handle, ffi._CLogLevel.ERROR))
        assert log.level == logging.ERROR
        ffi_check(ffi.dll.SetProducerLogLevel(Producer("g")._handle, 4))
        assert log.level == logging.INFO
        for level in (0, ffi._CLogLevel.LEVEL_NUM, "INFO", []):
            with pytest.raises(ArgumentError, match="level=.* is not allowed; use 1, FATAL, to 6, TRACE"):
                ffi.dll.SetProducerLogLevel(Producer("g")._handle, level)
        assert log.level == logging.INFO
    finally:
        log.setLevel(before)
    with pytest.raises(AttributeError, match="no native library"):
        ffi.dll.CreateMessage(b"t")


# --- processes


BEGIN = """
    import os, sys, threading, time, warnings
    import pyrocket_consumer.compat
    pyrocket_consumer.compat.install()
    from rocketmq.client import *
    name_server, topic = sys.argv[1:]
    def consumer_with(callback):
        consumer = PushConsumer("g-" + topic)
        consumer.set_name_server_address(name_server)
        consumer.subscribe(topic, callback)
        return consumer
"""


@contextmanager
def run(script: str, cluster, topic, begin=BEGIN, **options):
    with subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(begin) + textwrap.dedent(script), cluster.name_server, topic],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.live
def test_the_end_of_the_process_stores_offsets(cluster, topic):
    script = """
    consumer_with(lambda msg: print(msg.body)).start()  # without a reference to it
    print("started")
    while True:
        time.sleep(3600)
    """
    with run(script, cluster, topic) as process:
        assert process.stdout.readline() == "started\n"
        cluster.send(topic, b"x")
        assert process.stdout.readline() == "b'x'\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert "KeyboardInterrupt" in errors
    assert consumed(cluster, topic) == 1


@pytest.mark.live
def test_the_end_of_the_process_waits_for_a_callback(cluster, topic):
    script = """
    is_shut_down = threading.Event()
    def callback(msg):
        consumer.shutdown()
        is_shut_down.set()
        time.sleep(0.5)
        print("consumed")
    consumer = consumer_with(callback)
    consumer.start()
    print("started")
    is_shut_down.wait()
    """
    with run(script, cluster, topic) as process:
        assert process.stdout.readline() == "started\n"
        cluster.send(topic, b"x")
        output, errors = process.communicate(timeout=WAIT_S)
    assert output == "consumed\n", errors
    assert consumed(cluster, topic) == 1


@pytest.mark.slow("starts processes")
@pytest.mark.live
@two_brokers_4_9
def test_the_end_of_the_process_during_a_start_stores_offsets(cluster, topic):
    script = """
    is_consumed = threading.Event()
    consumer = consumer_with(lambda msg: is_consumed.set())
    threading.Thread(target=consumer.start, daemon=True).start()
    is_consumed.wait()
    """
    with hold_start(cluster, topic), run(script, cluster, topic) as process:
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert consumed(cluster, topic) == 1


@pytest.mark.live
def test_options_set_after_the_start_apply_to_the_next_one(cluster, topic):
    script = """
    consumer = consumer_with(print)
    with consumer:
        consumer.set_group("other")
        consumer.set_name_server_domain("http://localhost:1/nsaddr")
        consumer.set_thread_count(2)
        consumer.set_session_credentials("access", "secret", "channel")
    """
    with run(script, cluster, topic) as process:
        _, errors = process.communicate(timeout=WAIT_S)
    settings = ["set_group", "set_name_server_domain", "set_thread_count", "set_session_credentials"]
    warning = "called after start(); it takes effect at the next start"
    assert errors.splitlines() == [f"{each}: {warning}" for each in settings]


@pytest.mark.slow("starts processes")
@pytest.mark.live
def test_a_forked_child_sends_and_consumes_by_itself(cluster, topic):
    script = """
    warnings.simplefilter("ignore")
    producer = Producer("p")
    producer.set_name_server_address(name_server)
    producer.start()
    consumer = consumer_with(lambda msg: print(os.getpid(), msg.body))
    consumer.start()
    def send(body):
        msg = Message(topic)
        msg.set_body(body)
        return producer.send_sync(msg).status
    child = os.fork()
    if not child:
        assert send("from the child") == 0
        consumer.shutdown()
        consumer.start()
        consumer.shutdown()
        producer.shutdown()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert send("from the parent") == 0
    sys.stdin.readline()
    consumer.shutdown()
    producer.shutdown()
    """
    with run(script, cluster, topic, stdin=subprocess.PIPE) as process:
        lines = {process.stdout.readline().split(" ", 1)[1] for _ in range(2)}
        _, errors = process.communicate("\n", timeout=WAIT_S)
    assert (lines, process.returncode) == ({"b'from the child'\n", "b'from the parent'\n"}, 0), errors


@pytest.mark.live
def test_rocketmq_is_importable_after_install_only(cluster, topic):
    script = """
    import sys
    import pyrocket_consumer.compat as compat
    assert "rocketmq" not in sys.modules
    compat.install()
    compat.install()
    import rocketmq.client, rocketmq.consts, rocketmq.exceptions, rocketmq.ffi, rocketmq.utils
    from rocketmq import client
    from pyrocket_consumer.compat.rocketmq.client import PushConsumer
    assert client.PushConsumer is PushConsumer is rocketmq.client.PushConsumer
    """
    with run(script, cluster, topic, begin="") as process:
        assert process.communicate(timeout=WAIT_S) == ("", "")


@pytest.mark.live
def test_install_does_not_replace_an_imported_package(cluster, topic, tmp_path):
    (tmp_path / "rocketmq").mkdir()
    (tmp_path / "rocketmq" / "__init__.py").write_text("")
    script = """
    import rocketmq
    import pyrocket_consumer.compat
    try:
        pyrocket_consumer.compat.install()
    except ValueError as error:
        print(error)
    """
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with run(script, cluster, topic, begin="", env=env) as process:
        expected, errors = process.communicate(timeout=WAIT_S)
    assert ("imported already" in expected, str(tmp_path) in expected, errors) == (True, True, "")
