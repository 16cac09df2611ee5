"""Brokers that fail, lie and come back, under a stream's reader: it never goes back, and the other queues go on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pyrocket_consumer.errors import ConfigError, ConnectError, FlowControl, PermissionDenied, RequestTimeout
from pyrocket_consumer.spark.data_loss import DataLoss
from pyrocket_consumer.spark.options import parse_source
from pyrocket_consumer.spark.positions import CALLS_AT_ONCE, Positions
from pyrocket_consumer.spark.read import ReadFailed
from pyrocket_consumer.spark.source import NotReached
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection, drop
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.wire.message import StoredMessage, encode_message
from tests.spark.asking import (
    Checkpoint,
    CrashError,
    Row,
    Run,
    all_batches,
    data_source,
    flat,
    planning,
    read_batch,
    running,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

CLUSTER = {"brokers": 2}
ORDERS = {"queues": 1, "count": 20}
MAX, MIN = RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET
BY_DEFAULT = {"requestTimeoutMs": None, "retries": None}
FROM_FIRST = {"subscribe": "orders", "startingOffsets": "earliest"}


def places(run) -> list[int]:
    return places_at(run.checkpoint)


def places_at(checkpoint: Checkpoint) -> list[int]:
    return list(flat(json.loads(checkpoint.ends[-1])).values())


def until_a_batch(run, count: int):
    """Return what batches read until there are `count` messages."""
    found = []
    while len(found) < count:
        found += run.batch() or []
    return found


def test_a_broker_that_is_away_keeps_its_queues(embedded, caplog):
    with caplog.at_level(logging.WARNING), running(embedded, **FROM_FIRST) as run:
        run.batch()
        embedded.send("orders", count=3, broker_name="broker-b")
        embedded.broker("broker-b").stop()
        embedded.send("orders", count=4, broker_name="broker-a")
        assert {queue.broker_name for queue, _ in run.batch()} == {"broker-a"}
        assert places(run) == [14, 10]
        assert run.batch() is None
        assert caplog.text.count("queues cannot be asked now: orders/broker-b/0") == 1
        embedded.broker("broker-b").start()
        assert {queue.broker_name for queue, _ in until_a_batch(run, 3)} == {"broker-b"}
        assert places(run) == [14, 13]


def test_a_restart_while_a_broker_is_away_keeps_its_queues(embedded):
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, **FROM_FIRST) as run:
        run.batch()
    embedded.broker("broker-b").stop()
    embedded.send("orders", count=4, broker_name="broker-a")
    with running(embedded, checkpoint, **FROM_FIRST) as run:
        assert len(run.batch()) == 4
        assert places(run) == [14, 10]
        embedded.broker("broker-b").start()
        embedded.send("orders", count=2, broker_name="broker-b")
        run.reader._asking.forget_discovery()
        assert len(until_a_batch(run, 2)) == 2


def test_a_broker_that_is_silent_does_not_hold_up_every_batch(embedded):
    with running(embedded, requestTimeoutMs=300, **FROM_FIRST) as run:
        run.batch()
        embedded.broker("broker-b").on(MAX, drop, times=None)
        for _ in range(8):
            run.batch()
        # It is tried again after pauses that grow, and not by each of the eight looks.
        assert len(embedded.broker("broker-b").requests(MAX)) < 8


def reads_on(embedded: EmbeddedCluster, run: Run, until: Callable[[], bool]) -> None:
    """Have the healthy broker's messages read, batch by batch, for as long as one request has time."""
    ends_at = time.monotonic() + 9  # a request has 10 s
    while not until():
        embedded.send("orders", count=1, broker_name="broker-a")
        assert len(run.batch()) == 1
        assert time.monotonic() < ends_at, "planning was held up"


def test_a_broker_that_falls_silent_does_not_hold_up_the_others(embedded):
    with running(embedded, **FROM_FIRST, **BY_DEFAULT) as run:
        run.batch()
        broker = embedded.broker("broker-b")
        broker.on(None, drop, times=None)
        batches = iter(range(20))
        reads_on(embedded, run, until=lambda: next(batches) == 10)
        assert broker.requests(MAX)


def test_a_broker_that_comes_back_silent_holds_up_nobody(embedded):
    with running(embedded, **FROM_FIRST, **BY_DEFAULT) as run:
        run.batch()
        broker = embedded.broker("broker-b")
        broker.forget_requests()
        broker.on(MAX, close_connection, times=2)
        broker.on(None, drop, times=None)
        reads_on(embedded, run, until=lambda: len(broker.requests(MAX)) >= 3)
        for _ in range(3):
            embedded.send("orders", count=1, broker_name="broker-a")
            assert len(run.batch()) == 1


def test_progress_is_published_where_brokers_answer(embedded):
    with running(embedded, consumerGroup="app", **FROM_FIRST, **BY_DEFAULT) as run:
        run.batch()
        embedded.broker("broker-b").on(None, drop, times=None)
        for number in (1, 2, 3):
            embedded.send("orders", count=1, broker_name="broker-a")
            assert len(run.batch()) == 1
            assert run.batch() is None
            embedded.wait_until(lambda: embedded.committed("app", "orders") == {0: 10 + number}, 9)  # noqa: B023


def test_silent_name_servers_hold_up_nobody(embedded):
    (name_server,) = embedded.name_server_nodes
    options = parse_source({"nameServer": embedded.name_server, "subscribe": "orders"}, streaming=True)
    positions = Positions(options, discovery_interval_s=0)
    try:
        known = positions.look({}).ends
        name_server.on(None, drop, times=None)
        name_server.forget_requests()
        ends_at = time.monotonic() + 9  # a request has 10 s
        for number in range(1, 6):
            embedded.send("orders", count=1, broker_name="broker-a")
            assert sum(positions.look(known).ends.values()) == 20 + number
            name_server.wait_for(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        assert time.monotonic() < ends_at
    finally:
        positions.close()


def test_no_name_server_leaves_what_is_known(embedded):
    with running(embedded, **FROM_FIRST) as run:
        run.batch()
        embedded.stop_name_server()
        run.reader._asking.forget_discovery()
        embedded.send("orders", count=4)
        assert len(run.batch()) == 4
        embedded.start_name_server()


def test_connections_that_end_are_no_trouble(embedded):
    with running(embedded, **FROM_FIRST) as run:
        run.batch()
        for broker in embedded.brokers:
            broker.close_connections()
            broker.on(MAX, close_connection)
        embedded.send("orders", count=4)
        assert len(until_a_batch(run, 4)) == 4


def test_a_busy_broker_is_asked_again_for_where_to_begin(embedded):
    embedded.broker("broker-a").on(MIN, answer(ResponseCode.SYSTEM_BUSY), times=1)
    embedded.broker("broker-b").on(MIN, close_connection, times=1)
    with running(embedded, **FROM_FIRST) as run:
        assert len(run.batch()) == 20


def test_nothing_goes_back_while_a_broker_that_starts_answers_0(embedded):
    with running(embedded, **FROM_FIRST) as run:
        run.batch()
        embedded.broker("broker-a").on(MAX, answer(0, fields={"offset": "0"}), times=2)
        embedded.send("orders", count=2)
        assert len(run.batch()) == 2
        assert places(run) == [11, 11]


def test_a_queue_that_ends_too_early_for_long_is_data_loss(embedded):
    with running(embedded, requestTimeoutMs=1000, **FROM_FIRST) as run:
        run.batch()
        embedded.broker("broker-a").truncate("orders", 0, 4)
        with pytest.raises(
            DataLoss, match=r"orders/broker-a/0: wanted offsets from 10 on, available up to 4; .*failOnDataLoss"
        ):
            run.batch()


SHRUNK = {"requestTimeoutMs": 1000, "failOnDataLoss": False, **FROM_FIRST}


def test_a_queue_that_lost_its_tail_may_go_on_at_its_new_end(embedded, caplog):
    with caplog.at_level(logging.WARNING), running(embedded, **SHRUNK) as run:
        run.batch()
        embedded.broker("broker-a").truncate("orders", 0, 4)
        assert run.batch() == []  # so that the checkpoint knows
        assert places(run) == [4, 10]
        assert run.batch() is None
        embedded.send("orders", count=3, broker_name="broker-b")
        assert len(run.batch()) == 3
        embedded.send("orders", count=8, broker_name="broker-a")
        assert [offset for _, offset in run.batch()] == list(range(4, 12))
    assert caplog.text.count("wanted offsets from 10 on, available up to 4") == 1
    assert "goes on at offset 4" in caplog.text


def test_what_came_behind_a_lost_tail_is_read(embedded):
    with running(embedded, **SHRUNK) as run:
        run.batch()
        embedded.broker("broker-a").truncate("orders", 0, 4)
        embedded.send("orders", count=3, broker_name="broker-a")
        assert [offset for _, offset in run.batch()] == [4, 5, 6]


def made_anew(cluster: EmbeddedCluster, count: int) -> None:
    cluster.delete_topic("orders")
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", lambda number: b"new %d" % number, count=count)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("release", ["4.0", "4.3"])
def test_a_topic_made_anew_may_be_read_from_its_begin(embedded, caplog, release, restarts):
    checkpoint = Checkpoint()
    with caplog.at_level(logging.WARNING), ExitStack() as runs:
        run = runs.enter_context(running(embedded, checkpoint, release, **SHRUNK))
        run.batch()
        if restarts:
            runs.close()
        made_anew(embedded, 12)
        if restarts:
            run = runs.enter_context(running(embedded, checkpoint, release, **SHRUNK))
        run.reader._asking.forget_discovery()
        assert [offset for _, offset in run.batch()] == [*range(6), *range(6)]
        embedded.send("orders", count=12)
        assert [offset for _, offset in run.batch()] == [*range(6, 12), *range(6, 12)]
        assert run.batch() is None
    assert caplog.text.count("goes on at offset 0") == 2


def test_a_group_follows_a_query_back_whose_messages_were_lost(embedded):
    with running(embedded, consumerGroup="app", **SHRUNK) as run:
        run.batch()
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
    with running(embedded, checkpoint, **SHRUNK) as run:
        run.batch()
        made_anew(embedded, 8)
        run.reader._asking.forget_discovery()
        with pytest.raises(CrashError):
            run.batch(crash=True)
    embedded.send("orders", count=2)
    with running(embedded, checkpoint, **SHRUNK) as run:
        assert [offset for _, offset in run.batch()] == [*range(4), *range(4)]
        assert [offset for _, offset in run.batch()] == [4, 4]


@pytest.mark.slow("waits for a broker in trouble")
def test_a_queue_made_anew_while_its_broker_was_away_is_read(embedded):
    with running(embedded, **SHRUNK) as run:
        run.batch()
        broker = embedded.broker("broker-a")
        broker.stop(keep_route=True)
        embedded.send("orders", count=2, broker_name="broker-b")
        assert len(run.batch()) == 2
        broker.lose_data()
        embedded.send("orders", count=5, broker_name="broker-a")
        embedded.send("orders", count=2, broker_name="broker-b")
        assert len(run.batch()) == 2
        broker.start()
        run.reader._asking.forget_discovery()
        assert [offset for _, offset in until_a_batch(run, 5)] == list(range(5))


def test_a_checkpoint_without_a_time_goes_on_at_the_begin(embedded):
    """Of an older release: what was read and what is new cannot be told apart, and nothing is to be lost."""
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, **SHRUNK) as run:
        run.batch()
    end = json.loads(checkpoint.ends[-1])
    assert end.pop("seen")
    checkpoint.ends[-1] = json.dumps(end)
    made_anew(embedded, 8)
    with running(embedded, checkpoint, **SHRUNK) as run:
        assert [offset for _, offset in run.batch()] == [*range(4), *range(4)]


def test_a_queue_made_anew_may_grow_beyond_the_old_place(embedded):
    broker = embedded.broker("broker-a")
    with running(embedded, **SHRUNK | {"requestTimeoutMs": 20_000}) as run:
        run.batch()
        made_anew(embedded, 8)
        run.reader._asking.forget_discovery()
        broker.forget_requests()
        with ThreadPoolExecutor() as pool:
            batch = pool.submit(run.batch)
            embedded.wait_until(lambda: len(broker.requests(MAX)) >= 2, 30)
            embedded.send("orders", count=20)
            found = batch.result(30)
    assert sorted(offset for queue, offset in found if queue.broker_name == "broker-a") == list(range(14))


def test_a_topic_deleted_after_it_was_read_keeps_its_place(embedded, caplog):
    embedded.create_topic("others", queues=1)
    with (
        caplog.at_level(logging.WARNING),
        running(embedded, subscribe="orders,others", startingOffsets="earliest") as run,
    ):
        run.batch()
        embedded.delete_topic("others")
        embedded.delete_topic("orders")
        run.reader._asking.forget_discovery()
        assert run.batch() is None
        assert run.batch() is None
        assert places(run) == [10, 10, 0, 0]
    assert caplog.text.count("no route names it") == 4


def test_a_topic_deleted_with_unread_messages_is_data_loss(embedded):
    with running(embedded, requestTimeoutMs=1000, maxOffsetsPerTrigger=4, **FROM_FIRST) as run:
        run.batch()
        embedded.delete_topic("orders")
        run.reader._asking.forget_discovery()
        with pytest.raises(DataLoss, match=r"orders/broker-a/0: wanted offsets from 2 up to 10, available nothing"):
            run.batch()


def test_a_topic_that_is_made_anew_is_data_loss(embedded):
    with running(embedded, requestTimeoutMs=1000, **FROM_FIRST) as run:
        run.batch()
        embedded.delete_topic("orders")
        embedded.create_topic("orders", queues=1)
        embedded.send("orders", count=2)
        run.reader._asking.forget_discovery()
        with pytest.raises(DataLoss, match="made anew"):
            run.batch()


@pytest.mark.parametrize(("word", "read"), [("skip", [0, *range(2, 10)]), ("raw", [*range(10)])])
def test_a_damaged_body_ends_no_query_that_bears_it(embedded, word, read):
    checkpoint = Checkpoint()
    for broker in embedded.brokers:
        for number in range(3):
            flag = SysFlag.COMPRESSED if number == 1 else 0
            record = encode_message(StoredMessage("orders", b"no zlib", queue_offset=number, sys_flag=flag))
            fields = {"nextBeginOffset": str(number + 1), "minOffset": "0", "maxOffset": "10"}
            broker.on(
                RequestCode.PULL_MESSAGE, answer(0, "FOUND", fields, record), times=None,
                when=lambda command, at=str(number): command.fields["queueOffset"] == at,
            )  # fmt: skip
    failed = pytest.raises(ReadFailed, match="at offset 1 failed after 1 try: its body cannot be unpacked")
    with running(embedded, checkpoint, **FROM_FIRST) as run, failed:
        run.batch()
    with running(embedded, checkpoint, damagedBodies=word, **FROM_FIRST) as run:
        assert sorted(offset for _, offset in run.batch()) == sorted(read * 2)


def test_a_broker_that_refuses_to_say_ends_the_query(embedded):
    with running(embedded, **FROM_FIRST) as run:
        run.batch()
        embedded.broker("broker-a").on(MAX, answer(ResponseCode.NO_PERMISSION, "not you"), times=None)
        with pytest.raises(PermissionDenied, match="not you"):
            run.batch()


def test_commit_is_never_an_error(embedded):
    with running(embedded, consumerGroup="app", **FROM_FIRST) as run:
        run.batch()
        for broker in embedded.brokers:
            broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, close_connection, times=None)
            broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(ResponseCode.SYSTEM_ERROR), times=None)
        run.reader.commit({"version": 1, "queues": {"orders": {"broker-a": {"0": 10}}}})
        run.reader.commit({"nonsense": True})
        embedded.send("orders", count=2)
        assert len(run.batch()) == 2


@pytest.fixture
def read_once(embedded) -> Checkpoint:
    """A query that has read what there is, and 4 more messages at each broker."""
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, **FROM_FIRST) as run:
        run.batch()
    embedded.send("orders", count=8)
    return checkpoint


def to_the_end(embedded: EmbeddedCluster, checkpoint: Checkpoint, **options: object) -> list[Row]:
    with running(embedded, checkpoint, trigger="available", **FROM_FIRST, **options) as run:
        return all_batches(run)


@pytest.mark.slow("waits for a broker in trouble")
@pytest.mark.parametrize("keep_route", [False, True])
def test_a_run_to_the_end_fails_without_a_broker_it_knows(embedded, read_once, keep_route):
    embedded.broker("broker-b").stop(keep_route=keep_route)
    with pytest.raises(NotReached, match=r"not reached, in 0.6 s .*broker-b.* failOnUnreachable=false"):
        to_the_end(embedded, read_once, readTimeoutMs=600)
    embedded.broker("broker-b").start()
    read = read_once.finished
    found = to_the_end(embedded, read_once)
    assert len(found) == (8 if read == 1 else 4)  # it may have read what broker-a had


def test_a_run_to_the_end_does_not_end_well_without_any_broker(embedded, read_once):
    for broker in embedded.brokers:
        broker.stop()
    with pytest.raises(NotReached, match="orders/broker-a/0 .*, orders/broker-b/0 .*no route names it"):
        to_the_end(embedded, read_once, readTimeoutMs=600)


@pytest.mark.slow("waits for a broker in trouble")
@pytest.mark.parametrize("keep_route", [False, True])
def test_a_run_to_the_end_may_leave_out_who_is_not_reached(embedded, read_once, keep_route, caplog):
    embedded.broker("broker-b").stop(keep_route=keep_route)
    with caplog.at_level(logging.WARNING):
        assert len(to_the_end(embedded, read_once, failOnUnreachable=False, readTimeoutMs=600)) == 4
    assert caplog.text.count("a run to the end would leave out what is there") == 1
    embedded.broker("broker-b").start()
    assert len(to_the_end(embedded, read_once)) == 4


def test_a_run_to_the_end_waits_for_a_broker_that_restarts(embedded, read_once):
    broker = embedded.broker("broker-b")
    broker.stop()
    options = {**FROM_FIRST, **BY_DEFAULT}
    with ThreadPoolExecutor() as pool, running(embedded, read_once, trigger="available", **options) as run:
        assert len(run.batch()) == 4
        name_server = embedded.name_server_nodes[0]
        name_server.forget_requests()
        rest = pool.submit(all_batches, run)
        embedded.wait_until(lambda: name_server.requests(RequestCode.GET_ROUTEINFO_BY_TOPIC) or rest.done(), 30)
        broker.start()
        assert len(rest.result(30)) == 4


@pytest.mark.slow("waits for a broker in trouble")
def test_a_run_to_the_end_fails_when_a_broker_goes_away(embedded, read_once):
    options = {"maxOffsetsPerTrigger": 2, "readTimeoutMs": 600, **FROM_FIRST}
    with running(embedded, read_once, trigger="available", **options) as run:
        run.batch()
        embedded.broker("broker-b").stop(keep_route=True)
        with pytest.raises(NotReached, match="orders/broker-b/0"):
            all_batches(run)
    assert places_at(read_once) == [14, 11]


def test_a_run_to_the_end_needs_no_topic_that_was_deleted(embedded):
    embedded.create_topic("others", queues=1)
    checkpoint, both = Checkpoint(), {"subscribePattern": "orders|others", "startingOffsets": "earliest"}
    with running(embedded, checkpoint, **both) as run:
        run.batch()
    embedded.delete_topic("others")
    embedded.send("orders", count=2)
    with running(embedded, checkpoint, trigger="available", **both) as run:
        assert len(all_batches(run)) == 2


def test_a_new_query_needs_every_broker_that_is_named(embedded):
    """Else it could not tell, of the queues that come later, what was sent before it began."""
    embedded.broker("broker-b").stop(keep_route=True)
    with planning(embedded) as reader, pytest.raises(ConnectError, match="cannot connect"):
        reader.initialOffset()


def test_nobody_there_is_an_error_after_some_attempts(embedded):
    embedded.stop_name_server()
    with planning(embedded) as reader, pytest.raises(ConnectError):
        reader.initialOffset()


# --- batches


def test_a_batch_reads_what_there_is(embedded):
    assert len(read_batch(embedded, subscribe="orders")) == 20
    offsets = '{"orders": {"broker-a": {"0": 2}, "broker-b": {"0": 9}}}'
    ends = '{"orders": {"broker-a": {"0": 5}, "broker-b": -1}}'
    found = read_batch(embedded, subscribe="orders", startingOffsets=offsets, endingOffsets=ends)
    assert sorted((queue.broker_name, offset) for queue, offset in found) == [
        ("broker-a", 2), ("broker-a", 3), ("broker-a", 4), ("broker-b", 9),
    ]  # fmt: skip


def test_a_batch_between_two_times():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        for at_ms in (1000, 2000, 3000, 4000):
            cluster.send("orders", stored_at_ms=at_ms)
        found = read_batch(cluster, subscribe="orders", startingTimestamp=1500, endingTimestamp=4000)
        assert [offset for _, offset in found] == [1, 2]
        assert read_batch(cluster, subscribe="orders", startingTimestamp=2500, endingTimestamp=2600) == []
        assert read_batch(cluster, subscribe="orders", startingTimestamp=9000) == []


def test_a_batch_between_times_by_topic():
    with EmbeddedCluster() as cluster:
        for topic in ("orders", "payments"):
            cluster.create_topic(topic, queues=1)
            for at_ms in (1000, 2000, 3000, 4000):
                cluster.send(topic, stored_at_ms=at_ms)
        start, end = '{"orders": 1500, "payments": "1970-01-01T00:00:03Z"}', '{"payments": 4000, "orders": 2000}'
        found = read_batch(cluster, subscribePattern="orders|pay.*", startingTimestamp=start, endingTimestamp=3500)
        assert sorted((queue.topic, offset) for queue, offset in found) == [
            ("orders", 1), ("orders", 2), ("payments", 2),
        ]  # fmt: skip
        found = read_batch(cluster, subscribe="orders,payments", startingTimestamp=start, endingTimestamp=end)
        assert [(queue.topic, offset) for queue, offset in found] == [("payments", 2)]
        with pytest.raises(ConfigError, match="needs a time for each topic to read.* lacks payments"):
            read_batch(cluster, subscribePattern="orders|pay.*", startingTimestamp='{"orders": 1500}')


def test_a_batch_that_ends_before_it_starts_is_refused(embedded):
    low = '{"orders": {"broker-a": {"0": 2}, "broker-b": {"0": 2}}}'
    high = '{"orders": {"broker-a": {"0": 4}, "broker-b": {"0": 2}}}'
    with pytest.raises(ValueError, match="orders/broker-a/0 would end at offset 2, before it starts at 4"):
        read_batch(embedded, subscribe="orders", startingOffsets=high, endingOffsets=low)


def test_a_batch_that_begins_with_expired_messages_is_data_loss(embedded, caplog):
    embedded.broker("broker-a").delete_before("orders", 0, 4)
    offsets = '{"orders": {"broker-a": {"0": 2}, "broker-b": {"0": 9}}}'
    options = {"subscribe": "orders", "startingOffsets": offsets}
    with pytest.raises(DataLoss, match="orders/broker-a/0: wanted offsets from 2 up to 10, available 4 up to 10"):
        read_batch(embedded, **options)
    with caplog.at_level(logging.WARNING):
        assert len(read_batch(embedded, failOnDataLoss=False, **options)) == 7
    assert "wanted offsets from 2 up to 10" in caplog.text
    assert len(read_batch(embedded, subscribe="orders")) == 16  # what has expired was not asked for


@pytest.mark.parametrize("edge", ["startingOffsets", "endingOffsets"])
def test_a_batch_beyond_the_end_is_data_loss(embedded, edge):
    options = {
        "subscribe": "orders",
        "requestTimeoutMs": 300,
        edge: '{"orders": {"broker-a": {"0": 12}, "broker-b": {"0": 9}}}',
    }
    with pytest.raises(DataLoss, match="orders/broker-a/0: .* the broker has no more"):
        read_batch(embedded, **options)
    found = read_batch(embedded, failOnDataLoss=False, **options)
    assert len(found) == (1 if edge == "startingOffsets" else 19)


def test_a_batch_of_nothing_has_one_empty_task(embedded, caplog):
    embedded.create_topic("empty", queues=2)
    reader = data_source(embedded, subscribe="empty").reader(None)
    assert [partition.ranges for partition in reader.partitions()] == [()]
    assert read_batch(embedded, subscribe="empty") == []
    with caplog.at_level(logging.WARNING):
        assert read_batch(embedded, subscribePattern="no-such-.*") == []
    assert "no topic matches subscribePattern='no-such-.*'" in caplog.text


@pytest.mark.parametrize("leave", ["stop", "kill"])
def test_a_broker_that_left_is_missed_where_its_queues_are_named(embedded, leave, caplog):
    caplog.set_level(logging.INFO)
    assert len(read_batch(embedded, subscribe="orders")) == 20
    assert "found queues=2 of brokers=broker-a, broker-b" in caplog.text
    getattr(embedded.broker("broker-b"), leave)()
    caplog.clear()
    assert len(read_batch(embedded, subscribe="orders")) == 10
    assert "found queues=1 of brokers=broker-a\n" in caplog.text
    queues = '{"orders": {"broker-a": [0], "broker-b": [0]}}'
    with pytest.raises(ConfigError, match="option assign names .*broker-b"):
        read_batch(embedded, assign=queues)
    with pytest.raises(ConfigError, match="option startingOffsets names .*broker-b"):
        read_batch(embedded, subscribe="orders", startingOffsets='{"orders": {"broker-a": -2, "broker-b": -2}}')


def test_limits_of_streams_are_ignored_with_a_warning(embedded, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(read_batch(embedded, subscribe="orders", maxOffsetsPerTrigger=3)) == 20
    assert "maxOffsetsPerTrigger and minOffsetsPerTrigger are for streams" in caplog.text


def test_a_batch_from_where_a_group_is(embedded):
    embedded.broker("broker-a").commit("app", "orders", {0: 7})
    found = read_batch(embedded, subscribe="orders", startingOffsets="group", consumerGroup="app")
    assert len(found) == 13
    assert embedded.committed("app", "orders") == {0: 7}  # a batch has no progress


def test_a_batch_waits_for_a_broker_that_answers_0(embedded):
    offsets = '{"orders": {"broker-a": {"0": 2}, "broker-b": {"0": 9}}}'
    embedded.broker("broker-a").on(MAX, answer(0, fields={"offset": "0"}), times=3)
    assert len(read_batch(embedded, subscribe="orders", startingOffsets=offsets)) == 9


@pytest.mark.slow("the pauses between tries grow")
def test_planning_outlives_a_busy_broker(embedded):
    for broker in embedded.brokers:
        broker.on(MAX, answer(ResponseCode.SYSTEM_BUSY), times=7)
    assert len(read_batch(embedded, subscribe="orders", **BY_DEFAULT)) == 20


def test_trouble_beyond_the_patience_of_planning_is_an_error(embedded, caplog):
    embedded.broker("broker-b").on(MAX, answer(ResponseCode.SYSTEM_BUSY, "no time"), times=None)
    with caplog.at_level(logging.WARNING), pytest.raises(FlowControl, match="no time"):
        read_batch(embedded, subscribe="orders", readTimeoutMs=800, retries=None)
    assert caplog.text.count("asking again, for 0.8 s at most") == 1


@pytest.mark.slow("the pauses between tries grow")
def test_a_stream_waits_for_a_broker_that_restarts():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", count=5)
        broker, name_server = cluster.broker("broker-a"), cluster.name_server_nodes[0]
        broker.stop()
        with ThreadPoolExecutor() as pool, planning(cluster, **FROM_FIRST, **BY_DEFAULT) as reader:
            begins = pool.submit(reader.initialOffset)
            asked = RequestCode.GET_ROUTEINFO_BY_TOPIC
            cluster.wait_until(lambda: len(name_server.requests(asked)) >= 7 or begins.done(), 30)
            broker.start()
            assert list(flat(begins.result(30)).values()) == [0]


def test_only_queues_that_were_refused_are_asked_again(embedded):
    embedded.create_topic("many", queues=100)
    embedded.send("many", count=200)
    broker = embedded.broker("broker-a")
    broker.on(MIN, answer(ResponseCode.SYSTEM_BUSY), times=3)
    assert len(read_batch(embedded, subscribe="many", **BY_DEFAULT)) == 200
    assert (len(broker.requests(MIN)), len(broker.requests(MAX))) == (103, 100)


def test_a_silent_broker_is_not_asked_for_all_of_its_queues(embedded):
    embedded.create_topic("many", queues=300)
    broker = embedded.broker("broker-a")
    broker.on(MIN, drop, times=None)
    with pytest.raises(RequestTimeout):
        read_batch(embedded, subscribe="many", requestTimeoutMs=200, retries=1)
    assert len(broker.requests(MIN)) <= 2 * CALLS_AT_ONCE
