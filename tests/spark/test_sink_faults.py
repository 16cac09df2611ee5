"""By default all rows are written while brokers restart, refuse requests, close connections or do not respond."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.spark.options import parse_sink
from pyrocket_consumer.testing import (
    EmbeddedCluster,
    Exchange,
    Gate,
    answer,
    close_connection,
    delay,
    drop,
    handle_and_close,
    reset_connection,
)
from tests.spark.spark_calls import set_fault_on_all_brokers
from tests.spark.writing import Sink

CLUSTER = {"auto_create_topics": False}
ORDERS = {"queues": 2, "count": 0}
SEND = RequestCode.SEND_MESSAGE_V2
ROWS = 1000
AWAY_S = 1.0  # longer than all attempts without a pause
LANES = {
    "any queue": ("body string", lambda number: ()),
    "sharding key": ("body string, shardingKey string", lambda number: (f"key-{number % 10}",)),
    "queue": ("body string, brokerName string, queueId int", lambda number: ("broker-a", number % 2)),
}


def task_of(sink: Sink, lanes: str, rows: int = ROWS) -> Future[int]:
    """Return a Spark task that writes rows, on its own thread."""
    schema, more = LANES[lanes]
    return ThreadPoolExecutor(1).submit(sink.write, schema, *[(str(number), *more(number)) for number in range(rows)])


def reached(cluster: EmbeddedCluster, row: int = ROWS // 2) -> threading.Event:
    """Return an event that is set when a row is about to be stored."""
    arrived = threading.Event()

    def pass_on(exchange: Exchange) -> None:
        arrived.set()
        exchange.handle(exchange.answer)

    set_fault_on_all_brokers(cluster, SEND, pass_on, times=None, when=lambda command: command.body == str(row).encode())
    return arrived


def halfway(cluster: EmbeddedCluster, sink: Sink, lanes: str) -> Future[int]:
    """Return a task that has written the first half of its rows."""
    arrived = reached(cluster)
    task = task_of(sink, lanes)
    assert arrived.wait(60)
    return task


def check(cluster: EmbeddedCluster, lanes: str, most_copies: int, rows: int = ROWS) -> None:
    """Check that all rows are stored, with few copies, and in order if they have lanes."""
    by_queue: dict[object, list[int]] = {}  # each at its first copy
    copies = 0
    for message in cluster.messages("orders"):
        queue = by_queue.setdefault(message.queue, [])
        if (row := int(message.body)) in queue:
            copies += 1
        else:
            queue.append(row)
    assert {row for queue in by_queue.values() for row in queue} == set(range(rows))
    if lanes != "any queue":
        for queue in by_queue.values():
            of_lane = [[row for row in queue if row % 10 == lane] for lane in range(10)]
            assert of_lane == [sorted(lane) for lane in of_lane]
    assert copies <= most_copies


BUSY = answer(2, "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while")
AWAY: dict[str, Callable[[Any], None]] = {
    "stop": lambda broker: broker.stop(),
    "stop unnoticed": lambda broker: broker.stop(keep_route=True),
    "kill": lambda broker: broker.kill(),
    "be busy": lambda broker: broker.on(SEND, BUSY, times=None),
}
SILENT: dict[str, Callable[[Any], None]] = {"be silent": lambda broker: broker.on(None, drop, times=None)}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("go_away", AWAY)
def test_a_task_survives_a_broker_that_is_down_for_a_while(embedded, sink, go_away, lanes):
    task, broker = halfway(embedded, sink(), lanes), embedded.broker("broker-a")
    AWAY[go_away](broker)
    time.sleep(AWAY_S)
    broker.clear_faults()
    if not broker.running:
        broker.start()
    assert task.result(100) == ROWS
    check(embedded, lanes, most_copies=256)  # the sends in flight when the connection closed


@pytest.mark.parametrize("lanes", LANES)
def test_a_task_survives_a_broker_that_hangs_for_a_while(embedded, sink, lanes):
    """It has received all requests, and continues with them."""
    task = halfway(embedded, sink(), lanes)
    embedded.broker("broker-a").on(None, gate := Gate(), times=None)
    time.sleep(AWAY_S)
    gate.open()
    assert task.result(100) == ROWS
    check(embedded, lanes, most_copies=0)


@pytest.mark.parametrize("lanes", LANES)
def test_a_task_survives_a_broker_that_does_not_respond(embedded, sink, lanes, caplog):
    """It loses the requests meanwhile, and the client sends them again on a new connection."""
    task = halfway(embedded, sink(sendTimeoutMs="60000", requestTimeoutMs="1500"), lanes)
    embedded.broker("broker-a").on(None, drop, times=None)
    assert embedded.wait_until(lambda: "connection lost" in caplog.text, 60)
    embedded.broker("broker-a").clear_faults()
    assert task.result(100) == ROWS
    check(embedded, lanes, most_copies=0)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("away", ["broker", "broker, unnoticed", "name server", "everything"])
def test_a_task_may_start_while_servers_are_down(embedded, sink, away, lanes):
    broker = embedded.broker("broker-a")
    if away != "name server":
        broker.stop(keep_route=away == "broker, unnoticed")
    if away in ("name server", "everything"):
        embedded.stop_name_server()
    task = task_of(sink(), lanes, rows=20)
    time.sleep(AWAY_S)
    assert not task.done()
    if not broker.running:
        broker.start()
    if away in ("name server", "everything"):
        embedded.start_name_server()
    assert task.result(100) == 20
    check(embedded, lanes, most_copies=0, rows=20)


def test_a_task_may_start_while_the_broker_of_its_queue_is_down():
    rows = [(str(number), f"broker-{'ab'[number % 2]}", 1) for number in range(300)]
    with EmbeddedCluster(brokers=2) as cluster, ThreadPoolExecutor() as pool:
        cluster.create_topic("orders", queues=2)
        cluster.broker("broker-b").stop()
        sink = Sink(parse_sink({"nameServer": cluster.name_server, "topic": "orders"}))
        task = pool.submit(sink.write, "body string, brokerName string, queueId int", *rows)
        time.sleep(AWAY_S)
        cluster.broker("broker-b").start()
        assert task.result(60) == 300
        sink.close()
        found = {broker.name: [int(each.body) for each in broker.messages("orders")] for broker in cluster.brokers}
        assert found == {"broker-a": [*range(0, 300, 2)], "broker-b": [*range(1, 300, 2)]}


def test_a_missing_queue_fails_the_task_soon(embedded, sink):
    began = time.monotonic()
    schema = "body string, brokerName string, queueId int"
    rows = [("x", "broker-a", 0)] * 200 + [("x", "broker-z", 0)] * 20 + [("x", "broker-a", 0)] * 200
    with pytest.raises(RocketError, match="row 200 of partition 0: .*broker-z/0 cannot be written"):
        sink(requestTimeoutMs="2000").write(schema, *rows)
    assert time.monotonic() - began < 60, "sendTimeoutMs is 120 s"


@pytest.mark.parametrize("fault", [drop, answer(2, "busy")])
def test_a_task_may_start_while_the_name_server_fails(embedded, sink, fault):
    (name_server,) = embedded.name_server_nodes
    name_server.on(None, fault, times=None)
    task = task_of(sink(requestTimeoutMs="1500"), "sharding key", rows=20)
    time.sleep(AWAY_S)
    name_server.clear_faults()
    assert task.result(100) == 20
    check(embedded, "sharding key", most_copies=0, rows=20)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("fault", [reset_connection, close_connection, handle_and_close, answer(2, "busy")])
def test_one_failing_row_duplicates_no_other(embedded, sink, fault, lanes):
    embedded.broker("broker-a").on(SEND, fault, times=2, when=lambda command: command.body == b"500")
    assert task_of(sink(), lanes).result(100) == ROWS
    check(embedded, lanes, most_copies=256)


@pytest.mark.parametrize("lanes", LANES)
def test_a_slow_broker_takes_all(embedded, sink, lanes):
    """Rows in order are sent one after the other, and together take longer than the timeout of one."""
    embedded.broker("broker-a").on(SEND, delay(0.05), times=None)
    assert task_of(sink(sendTimeoutMs="4000", requestTimeoutMs="3500"), lanes, rows=200).result(100) == 200
    check(embedded, lanes, most_copies=0, rows=200)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("go_away", {**AWAY, **SILENT})
def test_a_task_ends_when_the_time_is_over(embedded, sink, go_away, lanes):
    arrived = reached(embedded)
    for _ in range(5):  # a busy machine may stall for the second that a row has
        task = task_of(
            sink(sendTimeoutMs="1000", requestTimeoutMs="500"), lanes, rows=20_000
        )  # more than it has time for
        embedded.wait_until(lambda task=task: arrived.is_set() or task.done(), 60)
        if arrived.is_set():
            break
    assert arrived.is_set()
    {**AWAY, **SILENT}[go_away](embedded.broker("broker-a"))
    began = time.monotonic()
    with pytest.raises(RocketError, match=r"row \d+ of partition 0: .*orders"):
        task.result(100)
    assert time.monotonic() - began < 20


def test_a_missing_topic_fails_the_task_soon(embedded, sink, caplog):
    began = time.monotonic()
    with pytest.raises(RocketError, match="row 0 of partition 0: .*unknown.*autoCreateTopic=true"):
        sink(topic="unknown", requestTimeoutMs="2000").write("body string", *[("x",)] * 300)
    assert time.monotonic() - began < 60, "sendTimeoutMs is 120 s"
    (logged,) = [record.getMessage() for record in caplog.records if "the write waits" in record.getMessage()]
    assert "'unknown'" in logged


def test_a_topic_may_be_created_late(embedded, sink, caplog):
    task = task_of(sink(topic="late"), "sharding key", rows=300)
    assert embedded.wait_until(lambda: "the write waits" in caplog.text, 60)
    embedded.create_topic("late", queues=1)
    assert task.result(100) == 300
    of_lane = [number for each in embedded.messages("late") if (number := int(each.body)) % 10 == 7]
    assert of_lane == [*range(7, 300, 10)]
