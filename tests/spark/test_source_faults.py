"""Brokers fail, report wrong offsets and restart. A stream never goes back, and its other queues continue."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy

import pytest

from pyrocket_consumer.cluster.offset_lookup import MAX_CONCURRENT_LOOKUPS
from pyrocket_consumer.errors import ConfigError, ConnectError, FlowControl, PermissionDenied, RequestTimeout
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.message import StoredMessage, encode_message
from pyrocket_consumer.spark.broker_offsets import BrokerOffsets
from pyrocket_consumer.spark.failures import DataLoss, NotReached
from pyrocket_consumer.spark.options import parse_source
from pyrocket_consumer.spark.task_reader import ReadFailed
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection, drop
from tests.spark.spark_calls import (
    FROM_FIRST,
    Checkpoint,
    CrashError,
    Row,
    Run,
    all_batches,
    data_source,
    first_checkpoint,
    flatten,
    read_batch,
    running,
    set_fault_on_all_brokers,
    start_offsets,
    stored_at,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

CLUSTER = {"brokers": 2}
ORDERS = {"queues": 1, "count": 20}
MAX, MIN = RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET
BUSY = answer(ResponseCode.SYSTEM_BUSY)
BY_DEFAULT = {"requestTimeoutMs": None, "retries": None}
SHRUNK = {"requestTimeoutMs": 1000, "failOnDataLoss": False}


def planned_offsets(checkpoint: Checkpoint) -> list[int]:
    return list(flatten(json.loads(checkpoint.ends[-1])).values())


def offsets_of(batch: list[Row]) -> list[int]:
    return [offset for _, offset in batch]


def brokers_of(batch: list[Row]) -> set[str]:
    return {queue.broker_name for queue, _ in batch}


def until_a_batch(run: Run, count: int) -> list[Row]:
    """Return the messages of batches until there are `count` of them."""
    found: list[Row] = []
    while len(found) < count:
        found += run.batch() or []
    return found


def test_the_queues_of_an_unreachable_broker_are_kept(embedded, started_run, caplog):
    run = started_run()
    embedded.send("orders", count=3, broker_name="broker-b")
    embedded.broker("broker-b").stop()
    embedded.send("orders", count=4, broker_name="broker-a")
    assert brokers_of(run.batch()) == {"broker-a"}
    assert planned_offsets(run.checkpoint) == [14, 10]
    assert run.batch() is None
    assert caplog.text.count("queues are unreachable: orders/broker-b/0") == 1
    embedded.broker("broker-b").start()
    assert brokers_of(until_a_batch(run, 3)) == {"broker-b"}
    assert planned_offsets(run.checkpoint) == [14, 13]


def test_a_restart_keeps_the_queues_of_an_unreachable_broker(embedded):
    checkpoint = first_checkpoint(embedded, **FROM_FIRST)
    embedded.broker("broker-b").stop()
    embedded.send("orders", count=4, broker_name="broker-a")
    with running(embedded, checkpoint, **FROM_FIRST) as run:
        assert len(run.batch()) == 4
        assert planned_offsets(checkpoint) == [14, 10]
        embedded.broker("broker-b").start()
        embedded.send("orders", count=2, broker_name="broker-b")
        run.reader._offsets.expire_discovery()
        assert len(until_a_batch(run, 2)) == 2


def test_a_silent_broker_does_not_delay_every_batch(embedded, started_run):
    run = started_run(requestTimeoutMs=300)
    embedded.broker("broker-b").on(MAX, drop, times=None)
    for _ in range(8):
        run.batch()
    # Attempts pause longer and longer, so not each of the eight snapshots makes one.
    assert len(embedded.broker("broker-b").requests(MAX)) < 8


def reads_on(embedded: EmbeddedCluster, run: Run, until: Callable[[], bool]) -> None:
    """Read the messages of the healthy broker, batch by batch, within the timeout of one request."""
    ends_at = time.monotonic() + 9  # a request has 10 s
    while not until():
        embedded.send("orders", count=1, broker_name="broker-a")
        assert len(run.batch()) == 1
        assert time.monotonic() < ends_at, "planning was held up"


def test_a_broker_that_becomes_silent_does_not_delay_the_others(embedded, started_run):
    run, broker, batches = started_run(**BY_DEFAULT), embedded.broker("broker-b"), iter(range(20))
    broker.on(None, drop, times=None)
    reads_on(embedded, run, until=lambda: next(batches) == 10)
    assert broker.requests(MAX)


def test_a_broker_that_restarts_silent_delays_no_batch(embedded, started_run):
    run, broker, batches = started_run(**BY_DEFAULT), embedded.broker("broker-b"), iter(range(20))
    broker.forget_requests()
    broker.on(MAX, close_connection, times=2)
    broker.on(None, drop, times=None)
    reads_on(embedded, run, until=lambda: len(broker.requests(MAX)) >= 3)
    reads_on(embedded, run, until=lambda: next(batches) == 3)


def test_progress_is_published_at_brokers_that_respond(embedded, started_run):
    run = started_run(consumerGroup="app", **BY_DEFAULT)
    embedded.broker("broker-b").on(None, drop, times=None)
    for number in (1, 2, 3):
        embedded.send("orders", count=1, broker_name="broker-a")
        assert len(run.batch()) == 1
        assert run.batch() is None
        embedded.wait_until(lambda: embedded.committed("app", "orders") == {0: 10 + number}, 9)  # noqa: B023


def test_silent_name_servers_delay_no_batch(embedded):
    (name_server,) = embedded.name_server_nodes
    options = parse_source({"nameServer": embedded.name_server, "subscribe": "orders"}, streaming=True)
    with closing(BrokerOffsets(options, discovery_interval_s=0)) as broker_offsets:
        known = broker_offsets.snapshot({}).ends
        name_server.on(None, drop, times=None)
        name_server.forget_requests()
        ends_at = time.monotonic() + 9  # a request has 10 s
        for number in range(1, 6):
            embedded.send("orders", count=1, broker_name="broker-a")
            assert sum(broker_offsets.snapshot(known).ends.values()) == 20 + number
            name_server.wait_for(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        assert time.monotonic() < ends_at


def test_without_a_name_server_the_known_queues_are_kept(embedded, started_run):
    run = started_run()
    embedded.stop_name_server()
    run.reader._offsets.expire_discovery()
    embedded.send("orders", count=4)
    assert len(run.batch()) == 4
    embedded.start_name_server()


def test_closed_connections_are_reopened(embedded, started_run):
    run = started_run()
    for broker in embedded.brokers:
        broker.close_connections()
    set_fault_on_all_brokers(embedded, MAX, close_connection)
    embedded.send("orders", count=4)
    assert len(until_a_batch(run, 4)) == 4


def test_start_offsets_are_requested_again_from_a_busy_broker(embedded):
    embedded.broker("broker-a").on(MIN, BUSY, times=1)
    embedded.broker("broker-b").on(MIN, close_connection, times=1)
    assert start_offsets(embedded, **FROM_FIRST) == {"orders/broker-a/0": 0, "orders/broker-b/0": 0}


def test_a_query_does_not_go_back_while_a_starting_broker_reports_0(embedded, started_run):
    run = started_run()
    embedded.broker("broker-a").on(MAX, answer(0, fields={"offset": "0"}), times=2)
    embedded.send("orders", count=2)
    assert len(run.batch()) == 2
    assert planned_offsets(run.checkpoint) == [11, 11]


def truncate(cluster: EmbeddedCluster) -> None:
    cluster.broker("broker-a").truncate("orders", 0, 4)


def recreate(cluster: EmbeddedCluster, count: int = 2) -> None:
    cluster.delete_topic("orders")
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", lambda number: b"new %d" % number, count=count)


@pytest.mark.parametrize(
    ("lose", "cap", "expected"),
    [
        (truncate, None, "orders/broker-a/0: wanted offsets from 10 on, available up to 4; .*failOnDataLoss"),
        (lambda c: c.delete_topic("orders"), 4, "orders/broker-a/0: wanted offsets from 2 up to 10, available nothing"),
        (recreate, None, "recreated"),
    ],
    ids=["it lost its tail", "it was deleted unread", "it was made anew"],
)
def test_a_queue_that_ends_too_early_is_data_loss(embedded, started_run, lose, cap, expected):
    run = started_run(requestTimeoutMs=1000, maxOffsetsPerTrigger=cap)
    lose(embedded)
    run.reader._offsets.expire_discovery()
    with pytest.raises(DataLoss, match=expected):
        run.batch()


def test_a_queue_that_lost_its_tail_may_continue_at_its_new_end(embedded, started_run, caplog):
    run = started_run(**SHRUNK)
    truncate(embedded)
    assert run.batch() == []  # an empty batch stores the new offset in the checkpoint
    assert planned_offsets(run.checkpoint) == [4, 10]
    assert run.batch() is None
    embedded.send("orders", count=3, broker_name="broker-b")
    assert len(run.batch()) == 3
    embedded.send("orders", count=8, broker_name="broker-a")
    assert offsets_of(run.batch()) == list(range(4, 12))
    assert caplog.text.count("wanted offsets from 10 on, available up to 4") == 1
    assert "continues at offset 4" in caplog.text


def test_messages_after_a_lost_tail_are_read(embedded, started_run):
    run = started_run(**SHRUNK)
    truncate(embedded)
    embedded.send("orders", count=3, broker_name="broker-a")
    assert offsets_of(run.batch()) == [4, 5, 6]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("release", ["4.0", "4.3"])
def test_a_recreated_topic_may_be_read_from_its_first_message(embedded, started_run, caplog, release, restarts):
    run = started_run(release=release, **SHRUNK)
    if restarts:
        run.reader.stop()
    recreate(embedded, 12)
    with running(embedded, run.checkpoint, release, **FROM_FIRST, **SHRUNK) as again:
        run = again if restarts else run
        run.reader._offsets.expire_discovery()
        assert offsets_of(run.batch()) == [*range(6)] * 2
        embedded.send("orders", count=12)
        assert offsets_of(run.batch()) == [*range(6, 12)] * 2
        assert run.batch() is None
    assert caplog.text.count("continues at offset 0") == 2


def test_a_group_follows_a_query_back_whose_messages_were_lost(embedded, started_run):
    run = started_run(consumerGroup="app", **SHRUNK)
    assert run.batch() is None
    embedded.wait_until(lambda: embedded.committed("app", "orders") == {0: 10}, 30)
    for broker in embedded.brokers:
        broker.lose_data(offsets=False)
    embedded.send("orders", count=8)
    run.batch()
    assert run.batch() is None
    embedded.wait_until(lambda: embedded.committed("app", "orders") == {0: 4}, 30)


def test_a_crash_after_a_loss_repeats_the_same_batch(embedded):
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, **FROM_FIRST, **SHRUNK) as run:
        run.batch()
        recreate(embedded, 8)
        run.reader._offsets.expire_discovery()
        with pytest.raises(CrashError):
            run.batch(crash=True)
    embedded.send("orders", count=2)
    with running(embedded, checkpoint, **FROM_FIRST, **SHRUNK) as run:
        assert [offsets_of(run.batch()) for _ in range(2)] == [[*range(4)] * 2, [4, 4]]


@pytest.mark.slow("waits for a broker in trouble")
def test_a_queue_recreated_while_its_broker_was_down_is_read(embedded, started_run):
    run, broker = started_run(**SHRUNK), embedded.broker("broker-a")
    broker.stop(keep_route=True)
    embedded.send("orders", count=2, broker_name="broker-b")
    assert len(run.batch()) == 2
    broker.lose_data()
    embedded.send("orders", count=5, broker_name="broker-a")
    embedded.send("orders", count=2, broker_name="broker-b")
    assert len(run.batch()) == 2
    broker.start()
    run.reader._offsets.expire_discovery()
    assert offsets_of(until_a_batch(run, 5)) == list(range(5))


def test_a_checkpoint_without_a_time_continues_at_the_first_message(embedded):
    """An older release stored no time, so read and new messages look alike. All are read, so that none is lost."""
    checkpoint = first_checkpoint(embedded, **FROM_FIRST, **SHRUNK)
    end = json.loads(checkpoint.ends[-1])
    assert end.pop("seen")
    checkpoint.ends[-1] = json.dumps(end)
    recreate(embedded, 8)
    with running(embedded, checkpoint, **FROM_FIRST, **SHRUNK) as run:
        assert offsets_of(run.batch()) == [*range(4)] * 2


def test_a_recreated_queue_may_grow_beyond_the_old_offset(embedded, started_run):
    run, broker = started_run(**SHRUNK | {"requestTimeoutMs": 20_000}), embedded.broker("broker-a")
    recreate(embedded, 8)
    run.reader._offsets.expire_discovery()
    broker.forget_requests()
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(run.batch)
        embedded.wait_until(lambda: len(broker.requests(MAX)) >= 2, 30)
        embedded.send("orders", count=20)
        found = batch.result(30)
    assert sorted(offset for queue, offset in found if queue.broker_name == "broker-a") == list(range(14))


def test_a_topic_deleted_after_it_was_read_keeps_its_offsets(embedded, started_run, caplog):
    embedded.create_topic("others", queues=1)
    run = started_run(subscribe="orders,others")
    embedded.delete_topic("others")
    embedded.delete_topic("orders")
    run.reader._offsets.expire_discovery()
    assert run.batch() is None
    assert run.batch() is None
    assert planned_offsets(run.checkpoint) == [10, 10, 0, 0]
    assert caplog.text.count("no route names it") == 4


@pytest.mark.parametrize(("word", "read"), [("skip", [0, *range(2, 10)]), ("raw", [*range(10)])])
def test_a_damaged_body_does_not_end_a_query_that_accepts_it(embedded, word, read):
    checkpoint = Checkpoint()
    for number in range(3):
        flag = SysFlag.COMPRESSED if number == 1 else 0
        record = encode_message(StoredMessage("orders", b"no zlib", queue_offset=number, sys_flag=flag))
        fields = {"nextBeginOffset": str(number + 1), "minOffset": "0", "maxOffset": "10"}
        set_fault_on_all_brokers(
            embedded,
            RequestCode.PULL_MESSAGE,
            answer(0, "FOUND", fields, record),
            times=None,
            when=lambda command, at=str(number): command.fields["queueOffset"] == at,
        )
    failed = pytest.raises(ReadFailed, match="at offset 1 failed after 1 try: its body cannot be decompressed")
    with running(embedded, checkpoint, **FROM_FIRST) as run, failed:
        run.batch()
    with running(embedded, checkpoint, damagedBodies=word, **FROM_FIRST) as run:
        assert sorted(offsets_of(run.batch())) == sorted(read * 2)


def test_a_broker_that_refuses_a_request_ends_the_query(embedded, started_run):
    run = started_run()
    embedded.broker("broker-a").on(MAX, answer(ResponseCode.NO_PERMISSION, "not you"), times=None)
    with pytest.raises(PermissionDenied, match="not you"):
        run.batch()


def test_commit_is_never_an_error(embedded, started_run):
    run = started_run(consumerGroup="app")
    set_fault_on_all_brokers(embedded, RequestCode.UPDATE_CONSUMER_OFFSET, close_connection, times=None)
    set_fault_on_all_brokers(embedded, RequestCode.QUERY_CONSUMER_OFFSET, answer(ResponseCode.SYSTEM_ERROR), times=None)
    run.reader.commit({"version": 1, "queues": {"orders": {"broker-a": {"0": 10}}}})
    run.reader.commit({"nonsense": True})
    embedded.send("orders", count=2)
    assert len(run.batch()) == 2


# --- runs to the end


@pytest.fixture
def read_once(embedded) -> Checkpoint:
    """A query that has read all messages, and 4 more messages at each broker."""
    checkpoint = first_checkpoint(embedded, **FROM_FIRST)
    embedded.send("orders", count=8)
    return checkpoint


def to_the_end(embedded: EmbeddedCluster, checkpoint: Checkpoint, **options: object) -> list[Row]:
    with running(embedded, checkpoint, trigger="available", **FROM_FIRST, **options) as run:
        return all_batches(run)


@pytest.mark.slow("waits for a broker in trouble")
@pytest.mark.parametrize("keep_route", [False, True])
def test_a_run_to_the_end_needs_all_brokers_by_default(embedded, read_once, keep_route, caplog):
    bears_it = deepcopy(read_once)
    embedded.broker("broker-b").stop(keep_route=keep_route)
    with pytest.raises(NotReached, match=r"not reached, in 0.6 s .*broker-b.* failOnUnreachable=false"):
        to_the_end(embedded, read_once, readTimeoutMs=600)
    left = 8 if read_once.finished == 1 else 4  # it may have read the messages of broker-a
    caplog.clear()
    assert len(to_the_end(embedded, bears_it, failOnUnreachable=False, readTimeoutMs=600)) == 4
    assert caplog.text.count("a run to the end would skip messages there") == 1
    embedded.broker("broker-b").start()
    assert [len(to_the_end(embedded, each)) for each in (read_once, bears_it)] == [left, 4]


def test_a_run_to_the_end_fails_without_any_broker(embedded, read_once):
    for broker in embedded.brokers:
        broker.stop()
    with pytest.raises(NotReached, match="orders/broker-a/0 .*, orders/broker-b/0 .*no route names it"):
        to_the_end(embedded, read_once, readTimeoutMs=600)


def test_a_run_to_the_end_waits_for_a_broker_that_restarts(embedded, read_once):
    broker, (name_server,) = embedded.broker("broker-b"), embedded.name_server_nodes
    broker.stop()
    options = {**FROM_FIRST, **BY_DEFAULT}
    with ThreadPoolExecutor() as pool, running(embedded, read_once, trigger="available", **options) as run:
        assert len(run.batch()) == 4
        name_server.forget_requests()
        rest = pool.submit(all_batches, run)
        embedded.wait_until(lambda: name_server.requests(RequestCode.GET_ROUTEINFO_BY_TOPIC) or rest.done(), 30)
        broker.start()
        assert len(rest.result(30)) == 4


@pytest.mark.slow("waits for a broker in trouble")
def test_a_run_to_the_end_fails_if_a_broker_stops(embedded, started_run, read_once):
    run = started_run(read_once, trigger="available", maxOffsetsPerTrigger=2, readTimeoutMs=600)
    embedded.broker("broker-b").stop(keep_route=True)
    with pytest.raises(NotReached, match="orders/broker-b/0"):
        all_batches(run)
    assert planned_offsets(read_once) == [14, 11]


def test_a_run_to_the_end_needs_no_topic_that_was_deleted(embedded):
    embedded.create_topic("others", queues=1)
    both = {"subscribePattern": "orders|others", "startingOffsets": "earliest"}
    checkpoint = first_checkpoint(embedded, **both)
    embedded.delete_topic("others")
    embedded.send("orders", count=2)
    with running(embedded, checkpoint, trigger="available", **both) as run:
        assert len(all_batches(run)) == 2


@pytest.mark.parametrize(
    "end",
    [lambda cluster: cluster.broker("broker-b").stop(keep_route=True), lambda cluster: cluster.stop_name_server()],
    ids=["one broker", "the name server"],
)
def test_a_new_query_needs_every_server_that_is_named(embedded, end):
    """Without all of them, it could not find the messages of later queues that were sent before it started."""
    end(embedded)
    with pytest.raises(ConnectError, match="cannot connect"):
        start_offsets(embedded)


# --- batches


def batch_of(cluster: EmbeddedCluster, **options: object) -> list[Row]:
    """Return the messages that a batch reads of the topic `orders`."""
    return read_batch(cluster, subscribe="orders", **options)


def offsets(a: int, b: int) -> str:
    """Return an option with the offsets of both brokers' queues."""
    return f'{{"orders": {{"broker-a": {{"0": {a}}}, "broker-b": {{"0": {b}}}}}}}'


def test_a_batch_reads_all_messages(embedded, caplog):
    assert len(batch_of(embedded, maxOffsetsPerTrigger=3)) == 20
    assert "maxOffsetsPerTrigger and minOffsetsPerTrigger are for streams" in caplog.text
    ends = '{"orders": {"broker-a": {"0": 5}, "broker-b": -1}}'
    found = batch_of(embedded, startingOffsets=offsets(2, 9), endingOffsets=ends)
    assert sorted((queue.broker_name[-1], offset) for queue, offset in found) == [
        ("a", 2),
        ("a", 3),
        ("a", 4),
        ("b", 9),
    ]


def test_a_batch_between_two_times():
    with stored_at((1000, 2000, 3000, 4000)) as cluster:
        assert offsets_of(batch_of(cluster, startingTimestamp=1500, endingTimestamp=4000)) == [1, 2]
        assert batch_of(cluster, startingTimestamp=2500, endingTimestamp=2600) == []
        assert batch_of(cluster, startingTimestamp=9000) == []


def test_a_batch_between_times_by_topic():
    with stored_at((1000, 2000, 3000, 4000), ("orders", "payments")) as cluster:
        start, end = '{"orders": 1500, "payments": "1970-01-01T00:00:03Z"}', '{"payments": 4000, "orders": 2000}'
        found = read_batch(cluster, subscribePattern="orders|pay.*", startingTimestamp=start, endingTimestamp=3500)
        assert sorted((queue.topic, at) for queue, at in found) == [("orders", 1), ("orders", 2), ("payments", 2)]
        found = read_batch(cluster, subscribe="orders,payments", startingTimestamp=start, endingTimestamp=end)
        assert [(queue.topic, at) for queue, at in found] == [("payments", 2)]
        with pytest.raises(ConfigError, match="needs a time for each topic to read.* lacks payments"):
            read_batch(cluster, subscribePattern="orders|pay.*", startingTimestamp='{"orders": 1500}')


def test_a_batch_that_ends_before_it_starts_is_refused(embedded):
    with pytest.raises(ValueError, match="orders/broker-a/0 would end at offset 2, before it starts at 4"):
        batch_of(embedded, startingOffsets=offsets(4, 2), endingOffsets=offsets(2, 2))


def test_a_batch_that_begins_with_expired_messages_is_data_loss(embedded, caplog):
    embedded.broker("broker-a").delete_before("orders", 0, 4)
    with pytest.raises(DataLoss, match="orders/broker-a/0: wanted offsets from 2 up to 10, available 4 up to 10"):
        batch_of(embedded, startingOffsets=offsets(2, 9))
    assert len(batch_of(embedded, failOnDataLoss=False, startingOffsets=offsets(2, 9))) == 7
    assert "wanted offsets from 2 up to 10" in caplog.text
    assert len(batch_of(embedded)) == 16  # no option named the expired messages


@pytest.mark.parametrize(("edge", "left"), [("startingOffsets", 1), ("endingOffsets", 19)])
def test_a_batch_beyond_the_end_is_data_loss(embedded, edge, left):
    options = {"requestTimeoutMs": 300, edge: offsets(12, 9)}
    with pytest.raises(DataLoss, match="orders/broker-a/0: .* the broker has no more"):
        batch_of(embedded, **options)
    assert len(batch_of(embedded, failOnDataLoss=False, **options)) == left


def test_an_empty_batch_has_one_empty_task(embedded, caplog):
    embedded.create_topic("empty", queues=2)
    reader = data_source(embedded, subscribe="empty").reader(None)
    assert [partition.ranges for partition in reader.partitions()] == [()]
    assert read_batch(embedded, subscribe="empty") == []
    assert read_batch(embedded, subscribePattern="no-such-.*") == []
    assert "no topic matches subscribePattern='no-such-.*'" in caplog.text


@pytest.mark.parametrize("leave", ["stop", "kill"])
def test_a_removed_broker_is_an_error_only_for_named_queues(embedded, leave, caplog):
    caplog.set_level(logging.INFO)
    assert len(batch_of(embedded)) == 20
    assert "found queues=2 of brokers=broker-a, broker-b" in caplog.text
    getattr(embedded.broker("broker-b"), leave)()
    caplog.clear()
    assert len(batch_of(embedded)) == 10
    assert "found queues=1 of brokers=broker-a\n" in caplog.text
    with pytest.raises(ConfigError, match="option assign names .*broker-b"):
        read_batch(embedded, assign='{"orders": {"broker-a": [0], "broker-b": [0]}}')
    with pytest.raises(ConfigError, match="option startingOffsets names .*broker-b"):
        batch_of(embedded, startingOffsets='{"orders": {"broker-a": -2, "broker-b": -2}}')


def test_a_batch_starts_at_the_offsets_of_a_group(embedded):
    embedded.broker("broker-a").commit("app", "orders", {0: 7})
    assert len(batch_of(embedded, startingOffsets="group", consumerGroup="app")) == 13
    assert embedded.committed("app", "orders") == {0: 7}  # a batch publishes no progress


def test_a_batch_waits_for_a_broker_that_answers_0(embedded):
    embedded.broker("broker-a").on(MAX, answer(0, fields={"offset": "0"}), times=3)
    assert len(batch_of(embedded, startingOffsets=offsets(2, 9))) == 9


@pytest.mark.slow("the pauses between tries grow")
def test_planning_survives_a_busy_broker(embedded):
    set_fault_on_all_brokers(embedded, MAX, BUSY, times=7)
    assert len(batch_of(embedded, **BY_DEFAULT)) == 20


def test_failures_beyond_the_read_timeout_are_an_error(embedded, caplog):
    embedded.broker("broker-b").on(MAX, answer(ResponseCode.SYSTEM_BUSY, "no time"), times=None)
    with pytest.raises(FlowControl, match="no time"):
        batch_of(embedded, readTimeoutMs=800, retries=None)
    assert caplog.text.count("retrying for at most 0.8 s") == 1


@pytest.mark.slow("the pauses between tries grow")
def test_a_stream_waits_for_a_broker_that_restarts():
    with stored_at(range(5)) as cluster:
        broker, (name_server,) = cluster.broker("broker-a"), cluster.name_server_nodes
        broker.stop()
        with ThreadPoolExecutor() as pool:
            begins = pool.submit(start_offsets, cluster, **FROM_FIRST, **BY_DEFAULT)
            route_request = RequestCode.GET_ROUTEINFO_BY_TOPIC
            cluster.wait_until(lambda: len(name_server.requests(route_request)) >= 7 or begins.done(), 30)
            broker.start()
            assert list(begins.result(30).values()) == [0]


def test_only_refused_queues_are_requested_again(embedded):
    embedded.create_topic("many", queues=100)
    embedded.send("many", count=200)
    broker = embedded.broker("broker-a")
    broker.on(MIN, BUSY, times=3)
    assert len(read_batch(embedded, subscribe="many", **BY_DEFAULT)) == 200
    assert (len(broker.requests(MIN)), len(broker.requests(MAX))) == (103, 100)


def test_a_silent_broker_gets_no_request_for_all_its_queues(embedded):
    embedded.create_topic("many", queues=300)
    broker = embedded.broker("broker-a")
    broker.on(MIN, drop, times=None)
    with pytest.raises(RequestTimeout):
        read_batch(embedded, subscribe="many", requestTimeoutMs=200, retries=1)
    assert len(broker.requests(MIN)) <= 2 * MAX_CONCURRENT_LOOKUPS
