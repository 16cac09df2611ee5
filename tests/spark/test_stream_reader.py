"""The reader of a stream keeps the rules of Spark's checkpoint. On embedded brokers, without Spark."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.spark.failures import DataLoss
from tests.spark.spark_calls import (
    FROM_FIRST,
    Checkpoint,
    CrashError,
    all_batches,
    flatten,
    planning_reader,
    rows,
    running,
)

pytestmark = pytest.mark.live

CLUSTER = {"brokers": 2}
ORDERS = {"queues": 2, "count": 20}
RELEASES = ("4.0", "4.3")
QUEUES = [MessageQueue("orders", broker, queue_id) for broker in ("broker-a", "broker-b") for queue_id in (0, 1)]


def all_of(queue_rows: Any, low: int, high: int) -> bool:
    return sorted(queue_rows) == [(queue, offset) for queue in QUEUES for offset in range(low, high)]


@pytest.mark.parametrize("release", RELEASES)
def test_batches_follow_each_other_without_gap_or_overlap(embedded, release):
    with running(embedded, release=release, **FROM_FIRST) as run:
        assert all_of(run.batch(), 0, 5)
        assert run.batch() is None
        embedded.send("orders", count=12)
        assert all_of(run.batch(), 5, 8)
        assert run.batch() is None


def test_a_stream_starts_at_the_end_by_default(embedded):
    with running(embedded, subscribe="orders") as run:
        assert run.batch() == []  # Spark runs the first batch, even without messages
        assert run.batch() is None
        embedded.send("orders", count=4)
        assert all_of(run.batch(), 5, 6)


def test_equal_calls_return_equal_offsets(embedded):
    with planning_reader(embedded) as reader:
        first = json.dumps(reader.initialOffset())
        embedded.send("orders", count=4)
        latest = reader.latestOffset(json.loads(first), reader.getDefaultReadLimit())
        assert json.dumps(reader.initialOffset()) == first
        assert flatten(latest, "from") == flatten(json.loads(first))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("first", "then", "low"), [("earliest", "latest", 0), ("latest", "earliest", 5)])
def test_a_crash_in_the_first_batch_reads_the_same_range_again(embedded, release, first, then, low):
    """The first batch may be empty. Changed options apply to new queries only."""
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, release, startingOffsets=first) as run, pytest.raises(CrashError):
        run.batch(crash=True)
    embedded.send("orders", count=8)
    with running(embedded, checkpoint, release, startingOffsets=then) as run:
        assert all_of(run.batch(), low, 5)
        assert all_of(run.batch(), 5, 7)


@pytest.mark.parametrize("release", RELEASES)
def test_a_crash_in_a_later_batch_reads_the_same_range_again(embedded, release):
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, release, **FROM_FIRST) as run:
        run.batch()
        embedded.send("orders", count=4)
        with pytest.raises(CrashError):
            run.batch(crash=True)
    embedded.send("orders", count=4)
    for _ in range(2):  # it may crash again
        with running(embedded, checkpoint, release, **FROM_FIRST) as run, pytest.raises(CrashError):
            run.batch(crash=True)
    with running(embedded, checkpoint, release, **FROM_FIRST) as run:
        assert all_of(run.batch(), 5, 6)
        assert all_of(run.batch(), 6, 7)


@pytest.mark.parametrize("release", RELEASES)
def test_a_restart_with_nothing_new_makes_no_batch(embedded, release):
    checkpoint = Checkpoint()
    for _ in range(3):
        with running(embedded, checkpoint, release, **FROM_FIRST) as run:
            run.batch()
            assert run.batch() is None
    assert len(checkpoint.ends) == 1


def test_a_checkpoint_of_a_newer_release_is_refused(embedded):
    newer = {"version": 2, "queues": {}}
    with planning_reader(embedded) as reader:
        for ask in (lambda: reader.latestOffset(newer, None), lambda: reader.partitions(newer, newer)):
            with pytest.raises(ConfigError, match="written by a newer release of pyrocket-consumer"):
                ask()
        reader.commit(newer)  # it only logs the error


# --- new and deleted queues


def test_a_new_queue_is_read_from_its_first_message(embedded):
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, subscribePattern="orders.*") as run:
        run.batch()
        embedded.create_topic("orders-2", queues=1)
        embedded.send("orders-2", count=7)
        run.reader._offsets.expire_discovery()  # it expires by itself after a few seconds
        with pytest.raises(CrashError):
            run.batch(crash=True)
        begins = run.planned_ends("from")
        assert (begins["orders-2/broker-a/0"], begins["orders-2/broker-b/0"]) == (0, 0)
    with running(embedded, checkpoint, subscribePattern="orders.*") as run:
        assert len(run.batch()) == 7
        assert run.batch() is None


def test_a_new_queue_without_messages_makes_no_batch(embedded, started_run):
    run = started_run(subscribe=None, subscribePattern="orders.*")
    embedded.create_topic("orders-2", queues=1)
    run.reader._offsets.expire_discovery()
    assert run.batch() is None


def test_a_topic_that_is_no_longer_chosen_keeps_its_offsets(embedded, caplog):
    embedded.create_topic("others", queues=1)
    embedded.send("others", count=4)
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, subscribe="orders,others", startingOffsets="earliest") as run:
        assert len(run.batch()) == 24
    embedded.send("others", count=4)
    embedded.send("orders", count=4)
    with running(embedded, checkpoint, subscribe="orders") as run:
        assert {queue.topic for queue, _ in run.batch()} == {"orders"}
        assert sum(offset for name, offset in run.planned_ends().items() if name.startswith("others")) == 4
    assert "the options no longer choose it" in caplog.text


# --- limits


def test_a_cap_is_spread_over_queues_in_proportion(embedded):
    embedded.send("orders", count=85, queue_id=0, broker_name="broker-a")  # 90, 5, 5, 5
    with running(embedded, **FROM_FIRST, maxOffsetsPerTrigger=21) as run:
        found = run.batch()
        assert [sum(queue == each for queue, _ in found) for each in QUEUES] == [18, 1, 1, 1]
        everything = list(found)
        for found in iter(run.batch, None):
            assert len(found) <= 21
            everything += found
    assert len(everything) == len(set(everything)) == 105


@pytest.mark.parametrize("release", RELEASES)
def test_a_cap_holds_on_every_release(embedded, release):
    with running(embedded, release=release, maxOffsetsPerTrigger=8, **FROM_FIRST) as run:
        assert [len(run.batch()) for _ in range(3)] == [8, 8, 4]


@pytest.mark.parametrize(("trigger", "least", "most"), [("once", 8, 8), ("once", 99, None), ("available", 1000, None)])
def test_once_and_to_the_end_wait_for_no_minimum(embedded, trigger, least, most):
    limits = {"minOffsetsPerTrigger": least, "maxOffsetsPerTrigger": most}
    with running(embedded, trigger=trigger, **FROM_FIRST, **limits) as run:
        assert all_of(run.batch(), 0, 5)
        assert run.batch() is None


def test_a_batch_waits_for_enough(embedded, started_run):
    run = started_run(minOffsetsPerTrigger=6, maxTriggerDelay="1h")
    embedded.send("orders", count=4)
    assert run.batch() is None
    embedded.send("orders", count=4)
    assert all_of(run.batch(), 5, 7)


def test_a_batch_waits_for_the_maximum_delay_at_most(embedded, started_run):
    run = started_run(startingOffsets="latest", minOffsetsPerTrigger=1000, maxTriggerDelay="200ms")
    embedded.send("orders", count=4)
    batches = iter(run.batch, object())
    assert all_of(next(found for found in batches if found is not None), 5, 6)


def test_with_an_old_spark_the_first_batch_waits_for_nothing(embedded):
    """There, a run of a single batch looks like any other."""
    with running(embedded, None, "4.0", minOffsetsPerTrigger=1000, maxTriggerDelay="1h", **FROM_FIRST) as run:
        assert all_of(run.batch(), 0, 5)
        embedded.send("orders", count=4)
        assert run.batch() is None


# --- AvailableNow


def test_a_run_to_the_end_ends_while_messages_still_arrive(embedded):
    options = {**FROM_FIRST, "maxOffsetsPerTrigger": 6}
    checkpoint, batches = Checkpoint(), []
    with running(embedded, checkpoint, trigger="available", **options) as run:
        for found in iter(run.batch, None):
            batches.append(found)
            embedded.send("orders", count=4)
        assert all_of([row for batch in batches for row in batch], 0, 5)
    with running(embedded, checkpoint, trigger="available", **options) as run:
        assert all_of(all_batches(run), 5, 5 + len(batches))


def test_a_run_to_the_end_leaves_later_queues_to_the_next(embedded):
    options = {"subscribePattern": "orders.*", "startingOffsets": "earliest"}
    checkpoint = Checkpoint()
    with running(embedded, checkpoint, trigger="available", **options) as run:
        embedded.create_topic("orders-2", queues=1)
        embedded.send("orders-2", count=3)
        run.reader.initialOffset()
        run.reader._offsets.expire_discovery()
        found = run.batch()
    assert {queue.topic for queue, _ in found} == {"orders"}


def test_a_run_to_the_end_ends_although_a_queue_shrank(embedded):
    options = {**FROM_FIRST, "maxOffsetsPerTrigger": 4, "failOnDataLoss": False}
    with running(embedded, trigger="available", **options) as run:
        found = list(run.batch())
        for broker in embedded.brokers:
            for queue_id in (0, 1):
                broker.truncate("orders", queue_id, 3)
        batches = islice(iter(run.batch, None), 10)
        found += [row for batch in batches for row in batch]
        assert run.batch() is None, "the run does not end"
    assert all_of(found, 0, 3)


# --- tasks


def test_tags_leave_gaps_and_nothing_is_missed(embedded):
    """Ranges start and end at messages that the broker skips."""
    embedded.create_topic("tagged", queues=1, brokers=["broker-a"])
    for number in range(40):
        embedded.send("tagged", tags="b" if number % 4 == 2 else "a", broker_name="broker-a")
    options = {**FROM_FIRST, "subscribe": "tagged", "tags": "b", "maxOffsetsPerTrigger": 5}
    with running(embedded, **options) as run:
        assert [offset for _, offset in all_batches(run)] == list(range(2, 40, 4))


def test_ranges_are_planned_as_the_options_say(embedded):
    with planning_reader(embedded, startingOffsets="earliest", minPartitions=8) as reader:
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        partitions = reader.partitions(start, end)
        assert reader.partitions(start, start) == [], "nothing between is nothing to do"
    assert len(partitions) == 8
    assert all_of(rows(reader, partitions), 0, 5)  # a reader needs no state of the planner


def test_the_reported_latest_offset_ignores_the_cap(started_run):
    run = started_run(maxOffsetsPerTrigger=4)
    assert list(flatten(run.reader.reportLatestOffset()).values()) == [5, 5, 5, 5]
    assert list(run.planned_ends().values()) == [1, 1, 1, 1]


def test_requests_keep_the_planning_interval(embedded, started_run):
    run, broker = started_run(planningIntervalMs=400), embedded.broker("broker-a")
    broker.forget_requests()
    assert run.batch() is None
    assert run.batch() is None
    requested_at = [each.at_s for each in broker.requests(RequestCode.GET_MAX_OFFSET)]
    assert len(requested_at) == 4  # two snapshots of two queues
    assert requested_at[2] - requested_at[1] >= 0.35


@pytest.mark.parametrize("fails", [True, False])
def test_expired_messages_are_data_loss(embedded, caplog, fails):
    expected = "orders/broker-a/1: wanted offsets from 0 up to 5, available from 3 on"
    with running(embedded, failOnDataLoss=fails, **FROM_FIRST) as run:
        run.reader.initialOffset()
        embedded.broker("broker-a").delete_before("orders", 1, 3)
        if fails:
            with pytest.raises(DataLoss, match=f"{expected}.*failOnDataLoss"):
                run.batch()
        else:
            found = run.batch()
            assert [offset for queue, offset in found if queue == QUEUES[1]] == [3, 4]
            assert len(found) == 17
            assert run.batch() is None
            assert caplog.text.count(expected) == 1
