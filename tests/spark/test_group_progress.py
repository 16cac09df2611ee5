"""The offsets that a query publishes for a group. On embedded brokers, without Spark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.spark.broker_offsets import BrokerOffsets
from pyrocket_consumer.spark.options import parse_source
from pyrocket_consumer.spark.progress import GroupProgress
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from tests.spark.spark_calls import FROM_FIRST, Checkpoint, running, stored_at

pytestmark = pytest.mark.live

Q0, Q1 = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1)


@pytest.fixture
def embedded() -> Iterator[EmbeddedCluster]:
    """A broker with two queues of 5 messages, and a known group. Without it, only the first pull would create one."""
    with EmbeddedCluster() as cluster:
        cluster.broker("broker-a").create_group("app")
        cluster.create_topic("orders", queues=2)
        cluster.send("orders", count=10)
        yield cluster


@contextmanager
def progress_of(cluster: EmbeddedCluster) -> Iterator[Callable[[dict[MessageQueue, int]], None]]:
    """Yield a function that publishes positions and waits for that. It checks the group each time."""
    with progress_every(cluster, 0) as progress:

        def publish(positions: dict[MessageQueue, int]) -> None:
            progress.publish(positions)
            progress.flush(30)

        yield publish


@contextmanager
def progress_every(cluster: EmbeddedCluster, check_interval_s: float) -> Iterator[GroupProgress]:
    options = parse_source({"nameServer": cluster.name_server, "subscribe": "orders"}, streaming=True)
    with closing(BrokerOffsets(options)) as broker_offsets:
        yield GroupProgress(broker_offsets.cluster, "app", check_interval_s=check_interval_s)


def reset(cluster: EmbeddedCluster) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.plan_reset("app", "orders", "earliest", model="clustering").execute()


def wait_until(cluster: EmbeddedCluster, offsets: dict[int, int]) -> None:
    cluster.wait_until(lambda: cluster.committed("app", "orders") == offsets, 30)


@pytest.mark.parametrize("release", ["4.0", "4.3"])
def test_the_group_follows_after_each_batch_and_when_idle(embedded, started_run, release):
    run = started_run(release=release, consumerGroup="app")
    assert run.batch() is None  # idle; the reader learns only now that the batch before is finished
    wait_until(embedded, {0: 5, 1: 5})
    embedded.send("orders", count=4)
    run.batch()
    run.batch()
    wait_until(embedded, {0: 7, 1: 7})


def test_the_group_stays_behind_unfinished_batches(embedded):
    with running(embedded, **FROM_FIRST, consumerGroup="app") as run:
        run.reader.latestOffset(run.reader.initialOffset(), None)
        run.reader._progress.flush(30)
        assert set(embedded.committed("app", "orders").values()) <= {0}
        assert embedded.broker("broker-a").requests(RequestCode.QUERY_CONSUMER_OFFSET)


def test_a_run_to_the_end_publishes_all_progress(embedded, started_run):
    run = started_run(trigger="available", consumerGroup="app")
    assert run.batch() is None
    assert embedded.committed("app", "orders") == {0: 5, 1: 5}


def test_a_finished_batch_is_published_at_a_restart(embedded, started_run):
    checkpoint = Checkpoint()
    started_run(checkpoint, trigger="once", consumerGroup="app").reader.stop()
    started_run(checkpoint, trigger="once", consumerGroup="app")
    wait_until(embedded, {0: 5, 1: 5})


def test_a_group_only_moves_forward(embedded):
    embedded.broker("broker-a").commit("app", "orders", {0: 4})
    with progress_of(embedded) as publish:
        publish({Q0: 3, Q1: 2})
    assert embedded.committed("app", "orders") == {0: 4, 1: 2}


def test_without_a_group_nothing_is_published(embedded, started_run):
    for options in ({}, {"consumerGroup": "app", "commitOffsets": False}):
        run = started_run(**options)
        run.batch()
        run.reader.commit({"version": 1, "queues": {}})
        run.reader.stop()  # it has published its progress by then
    assert embedded.broker("broker-a").requests(RequestCode.UPDATE_CONSUMER_OFFSET) == []


def test_publishing_delays_no_batch(embedded, started_run):
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.QUERY_CONSUMER_OFFSET, gate, times=None)
    run = started_run(consumerGroup="app")
    gate.wait_held(timeout_s=30)
    embedded.send("orders", count=4)
    assert len(run.batch()) == 4
    gate.open()


def test_offsets_of_a_batch_that_ends_while_others_are_published_follow_at_once(embedded):
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.QUERY_CONSUMER_OFFSET, gate)
    with progress_every(embedded, 3600) as progress:
        progress.publish({Q0: 1})
        gate.wait_held(timeout_s=30)
        progress.publish({Q0: 2, Q1: 1})
        progress.publish({Q0: 3, Q1: 1})
        gate.open()
        wait_until(embedded, {0: 3, 1: 1})
    assert len(embedded.broker("broker-a").requests(RequestCode.UPDATE_CONSUMER_OFFSET)) == 3


def test_a_query_that_goes_back_while_offsets_are_published_is_followed(embedded):
    with progress_every(embedded, 3600) as progress:
        progress.publish({Q0: 1})
        progress.flush(30)
        gate = Gate()
        embedded.broker("broker-a").on(RequestCode.QUERY_CONSUMER_OFFSET, gate)
        progress.publish({Q0: 3})
        gate.wait_held(timeout_s=30)
        progress.publish({Q0: 1})
        gate.open()
        progress.flush(30)
    assert embedded.committed("app", "orders")[0] == 1


def test_a_reset_of_the_group_is_logged_once_and_ignored(embedded, started_run, caplog):
    run = started_run(consumerGroup="app")
    run.batch()
    wait_until(embedded, {0: 5, 1: 5})
    reset(embedded)
    deadline = time.monotonic() + 30
    while "is not at the offsets of this query" not in caplog.text and time.monotonic() < deadline:
        embedded.send("orders", count=2)
        assert len(run.batch()) == 2  # new messages only, and not those after the group's offset
        run.reader._progress.flush(30)
    run.reader.stop()
    (warning,) = [each for each in caplog.messages if "group=app is not at the offsets of this query" in each]
    assert "orders/broker-a/0 at 0, was 5" in warning
    assert "it reads from its checkpoint" in warning


def test_a_reset_while_the_query_is_idle_is_noticed(embedded, caplog):
    with progress_of(embedded) as publish:
        publish({Q0: 5})
        embedded.broker("broker-a").commit("app", "orders", {0: 2})
        publish({Q0: 5})
    assert "orders/broker-a/0 at 2, was 5" in caplog.text
    assert embedded.committed("app", "orders")[0] == 5


def test_a_pending_reset_at_the_broker_is_logged(caplog):
    """From 5.1 on, a broker can keep a reset for the next pull of the group. Until then it ignores commits."""
    with stored_at(range(5), server_side_reset=True) as cluster, progress_of(cluster) as publish:
        cluster.broker("broker-a").create_group("app")
        publish({Q0: 3})
        reset(cluster)
        publish({Q0: 4})
    assert "group=app is not at the offsets of this query: orders/broker-a/0 at 0, was 3" in caplog.text
