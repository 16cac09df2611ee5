"""A route change or a short outage of a broker loses no message, with default options."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue, PermissionDenied, RouteNotFound, SendError
from pyrocket_consumer.producer import OutgoingMessage, Producer, TransactionProducer, TransactionState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate, answer, drop, drop_answer, handle_and_close
from tests.consuming import numbered
from tests.for_each import for_each
from tests.producer.programs import within
from tests.real_brokers import wait_until
from tests.speed import cpu_at_most

SEND = RequestCode.SEND_MESSAGE_V2
BATCH = RequestCode.SEND_BATCH_MESSAGE
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
A = MessageQueue("orders", "broker-a", 0)

pinned = pytest.mark.parametrize("pin", [{}, {"sharding_key": "key"}, {"queue": A}], ids=["free", "key", "queue"])
by_release = pytest.mark.usefixtures("release")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.cluster(version=name)) for name in ("4.9.7", "5.5.0")])
def release():
    """The oldest and the newest brokers."""


@pytest.fixture
def queues():
    return 2


@pytest.fixture
def producer(embedded, queues):
    """A producer with the default options, which has sent to each queue of `orders`."""
    embedded.create_topic("orders", queues=queues)
    with Producer(name_server=embedded.name_server) as producer:
        for _ in range(queues * len(embedded.brokers)):
            producer.send("orders", b"first")
        embedded.name_server_node.forget_requests()
        yield producer


@contextmanager
def meanwhile(act: Any) -> Iterator[None]:
    """Run `act` on another thread after half a second."""
    timer = threading.Timer(0.5, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def send_all(producer, **pin):
    """Send fifty messages at once; return their bodies and their results."""
    bodies = numbered(50)
    return bodies, [future.result(20) for future in [producer.send_async("orders", body, **pin) for body in bodies]]


def stored(embedded):
    """Return the bodies of the messages stored on the masters, in the order of their queues."""
    return [message.body for message in embedded.messages("orders") if message.body != b"first"]


# --- the route changes


@pinned
@by_release
@pytest.mark.cluster(slaves=1)
def test_when_master_and_slave_change_roles_no_message_is_lost(embedded, producer, pin):
    embedded.switch_master("broker-a")
    with within(2):
        bodies, results = send_all(producer, **pin)
    assert sorted(stored(embedded)) == sorted(bodies)
    assert {each.attempts for each in results} == {1}
    assert len(embedded.name_server_node.requests(ROUTE)) <= 5  # one for all fifty, perhaps another


@pytest.mark.parametrize("pin", [{}, {"sharding_key": "key"}], ids=["free", "key"])
@by_release
@pytest.mark.parametrize("queues", [8])
def test_when_a_topic_gets_fewer_queues_no_message_is_lost(embedded, producer, pin):
    embedded.create_topic("orders", queues=2)
    bodies, results = send_all(producer, **pin)
    assert sorted(stored(embedded)) == sorted(bodies)
    assert {each.queue.queue_id for each in results} <= {0, 1}
    assert len(embedded.name_server_node.requests(ROUTE)) <= 5
    if pin:
        assert stored(embedded) == bodies


@pytest.mark.parametrize("queues", [8])
def test_a_removed_queue_is_reported_at_once(embedded, producer):
    embedded.create_topic("orders", queues=2)
    with within(10), pytest.raises(SendError, match="not in the route of the topic.*broker-a with 2 write queues"):
        producer.send("orders", b"x", queue=MessageQueue("orders", "broker-a", 7), timeout_s=30)


def make_anew_elsewhere(embedded):
    embedded.delete_topic("orders")
    embedded.create_topic("orders", queues=2, brokers=["broker-b"])


@pinned
@pytest.mark.cluster(brokers=2, auto_create_topics=False)
def test_a_topic_recreated_on_another_broker_is_found_there(embedded, producer, pin):
    make_anew_elsewhere(embedded)
    if "queue" in pin:
        pin = {"queue": MessageQueue("orders", "broker-b", 0)}
    bodies, results = send_all(producer, **pin)
    assert sorted(stored(embedded)) == sorted(bodies)
    assert {each.queue.broker_name for each in results} == {"broker-b"}
    if pin:
        assert stored(embedded) == bodies


@pytest.mark.cluster(brokers=2, auto_create_topics=False)
def test_all_keys_of_a_topic_recreated_elsewhere_are_found(embedded, producer):
    make_anew_elsewhere(embedded)
    sent = [producer.send_async("orders", b"x", sharding_key=f"key-{number}") for number in range(8)]
    assert {future.result(20).queue.broker_name for future in sent} == {"broker-b"}


def commit(message):
    return TransactionState.COMMIT


@by_release
@pytest.mark.cluster(slaves=1)
def test_batches_and_transactions_follow_the_route_too(embedded):
    half = OutgoingMessage(b"half", topic="orders")
    with TransactionProducer("app", check=commit, name_server=embedded.name_server) as producer:
        for act in (
            lambda: producer.send_batch("orders", [b"batch", b"batch too"]),
            lambda: producer.send_batch("orders", [b"keyed batch"], sharding_key="key"),
            lambda: producer.send_in_transaction(half, commit),
        ):
            producer.send("orders", b"first")
            embedded.switch_master("broker-a")
            act()
        wait_until(lambda: len(stored(embedded)) == 4, "all four")


def test_refusals_cause_few_route_requests(embedded, producer):
    embedded.broker("broker-a").on(SEND, answer(14, "disk full"), times=None)
    futures = [producer.send_async("orders", b"x", timeout_s=1) for _ in range(200)]
    for future in futures:
        with pytest.raises(SendError, match="disk full"):
            future.result(20)
    assert 1 <= len(embedded.name_server_node.requests(ROUTE)) <= 40


@pytest.mark.cluster(auto_create_topics=False)
def test_a_deleted_topic_is_reported_at_once(embedded, producer):
    embedded.delete_topic("orders")
    why = r"TOPIC_NOT_EXIST \(17\): .*; "  # from the broker, and only then from the name server
    with within(10):
        for pin in ({}, {"sharding_key": "key"}, {"queue": A}):
            match = f"{'' if pin else why}no route for topic 'orders'"
            with pytest.raises((SendError, RouteNotFound), match=match):
                producer.send("orders", b"x", timeout_s=30, **pin)


@pytest.mark.cluster(brokers=2)
def test_a_broker_outside_the_route_may_still_respond(embedded):
    """Name servers may forget a running broker. Messages sent to it are not sent elsewhere."""
    with Producer(name_server=embedded.name_server, route_refresh_interval_s=0.05) as producer:
        lost, gate = embedded.broker("broker-a"), Gate(answers=True)
        lost.on(SEND, gate, times=None, when=lambda request: request.body == b"held")
        held = [producer.send_async("orders", b"held", timeout_s=60, **pin) for pin in ({"queue": A}, {}, {}, {}, {})]
        gate.wait_held(2)
        embedded.call(lambda: embedded.unregister(lost))
        wait_until(
            lambda: {producer.send("orders", b"x").queue.broker_name for _ in range(8)} == {"broker-b"}, "a new route"
        )
        gate.open()
        assert {future.result(30).attempts for future in held} == {1}
        assert stored(embedded).count(b"held") == 5


# --- a broker is down


@pinned
@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("keep_route", [False, True])
def test_an_only_broker_may_restart_within_the_timeout(embedded, producer, pin, how, keep_route):
    broker = embedded.broker("broker-a")
    getattr(broker, how)(keep_route=keep_route)
    with meanwhile(broker.start):
        bodies, _ = send_all(producer, **pin)
    assert sorted(stored(embedded)) == sorted(bodies)
    if pin:
        assert stored(embedded) == bodies


def test_a_topic_to_create_waits_for_the_only_broker(embedded):
    with Producer(name_server=embedded.name_server, auto_create_topic=True) as producer:
        producer.send("another", b"first")  # created by the broker, as the next one will be
        broker = embedded.broker("broker-a")
        broker.stop()
        with meanwhile(broker.start):
            producer.send("new", b"x")
        assert [message.body for message in embedded.messages("new")] == [b"x"]


def test_a_one_way_message_waits_for_the_only_broker(embedded, producer):
    broker = embedded.broker("broker-a")
    broker.stop()
    with pytest.raises(SendError):
        producer.send("orders", b"not in time", timeout_s=0.1)  # now the producer has noticed
    with meanwhile(broker.start):
        producer.send_oneway("orders", b"x")
    wait_until(lambda: stored(embedded) == [b"x"], "the message")


@pinned
def test_a_message_refused_for_a_while_is_retried_until_stored(embedded, producer, pin):
    broker = embedded.broker("broker-a")
    broker.on(SEND, answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=None)
    with meanwhile(broker.clear_faults):
        assert producer.send("orders", b"x", **pin).attempts == 1
    assert stored(embedded) == [b"x"]


@pinned
def test_a_message_that_is_always_refused_fails_in_time(embedded, producer, pin):
    embedded.broker("broker-a").on(SEND, answer(2, "busy"), times=None)
    with within(10), pytest.raises(SendError, match=r"SYSTEM_BUSY \(2\): busy \(\d+ times\)") as raised:
        producer.send("orders", b"x", timeout_s=1, **pin)
    assert len(raised.value.attempts) <= 3


@pinned
@pytest.mark.parametrize("silent", [drop, drop_answer])
def test_after_a_silent_broker_the_next_messages_get_through(embedded, producer, pin, silent):
    broker = embedded.broker("broker-a")
    broker.on(None, silent, times=None)
    started = time.monotonic()
    with pytest.raises(SendError, match="no response"):
        producer.send("orders", b"x", timeout_s=0.5, **pin)
    assert 0.5 <= time.monotonic() - started < 10
    broker.clear_faults()
    assert producer.send("orders", b"y", timeout_s=30, **pin)


# --- the number of attempts


@pinned
def test_a_result_shows_that_a_copy_may_exist(embedded, producer, pin):
    assert producer.send("orders", b"once", **pin).attempts == 1
    embedded.broker("broker-a").on(SEND, handle_and_close)
    sent = producer.send("orders", b"twice", **pin)
    assert sent.attempts == 2
    copies = [message.message_id for message in embedded.messages("orders") if message.body == b"twice"]
    assert copies == [sent.message_id] * 2
    embedded.broker("broker-a").on(BATCH, handle_and_close)
    assert [each.attempts for each in producer.send_batch("orders", [b"x", b"y"], **pin)] == [2, 2]


@pinned
def test_with_one_attempt_no_message_reaches_a_store_twice(embedded, pin):
    broker = embedded.broker("broker-a")
    with Producer(name_server=embedded.name_server, send_attempts=1) as producer:
        producer.send("orders", b"first")
        broker.on(SEND, answer(2, "busy"), times=3)
        assert producer.send("orders", b"refused before", **pin).attempts == 1
        broker.on(SEND, handle_and_close)
        with pytest.raises(SendError, match="was lost") as raised:
            producer.send("orders", b"once", **pin)
        assert len(raised.value.attempts) == 1
        assert stored(embedded).count(b"once") == 1


@pytest.mark.cluster(account=("key", "secret"))
def test_a_missing_permission_is_reported_at_once(embedded):
    for wrong in ({"access_key": "key", "secret_key": "wrong"}, {}):
        producer = Producer(name_server=embedded.name_server, send_timeout_s=30, **wrong)
        with producer, pytest.raises(SendError) as raised:
            producer.send("orders", b"x")
        assert len(raised.value.attempts) == 1
        assert isinstance(raised.value.__cause__, PermissionDenied)
    with Producer(name_server=embedded.name_server, access_key="key", secret_key="secret") as producer:
        assert producer.send("orders", b"x")
        assert len(producer.send_batch("orders", [b"x", b"y"])) == 2


@pytest.mark.slow("routes of many megabytes")
@for_each(
    "names, perm",
    [
        ([f"broker-{number}" for number in range(4_000)], 4),  # more values would be read slowly, on purpose
        ([f"{number}" + "n" * 60_000 for number in range(50)], 4),
        ([f"{number}" + "n" * 60_000 for number in range(50)], 6),
    ],
    ids=["many", "long", "nobody there"],
)
def test_errors_of_messages_are_short_with_any_route(embedded, names, perm):
    queues = [
        {"brokerName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": perm, "topicSysFlag": 0} for name in names
    ]
    brokers = [{"cluster": "c", "brokerName": name, "brokerAddrs": {"0": "127.0.0.1:1"}} for name in names]
    body = json.dumps({"queueDatas": queues, "brokerDatas": brokers}).encode()
    embedded.name_server_node.on(ROUTE, answer(0, body=body), times=None)
    with Producer(name_server=embedded.name_server, send_timeout_s=2) as producer, cpu_at_most(1):
        futures = [producer.send_async("orders", b"x") for _ in range(50)]
        errors = [future.exception(30) for future in futures]
    embedded.name_server_node.clear_faults()
    assert {type(error) for error in errors} == {SendError}
    assert max(len(str(error)) for error in errors) < 40_000
