"""How much of each queue a batch reads, and which task reads what. No Spark, no broker."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.options import TaskSizes
from pyrocket_consumer.spark.planning import plan_tasks, spread
from pyrocket_consumer.spark.ranges import QueueRange


def queue(number: int) -> MessageQueue:
    return MessageQueue("T", f"broker-{number % 3}", number)


def backlogs(*sizes: int) -> dict[MessageQueue, int]:
    return {queue(number): size for number, size in enumerate(sizes)}


def ranges(*sizes: int) -> list[QueueRange]:
    return [QueueRange(queue(number), 100, 100 + size) for number, size in enumerate(sizes)]


def sizes(tasks: list[tuple[QueueRange, ...]]) -> list[int]:
    return [sum(map(len, task)) for task in tasks]


ONE_EACH = TaskSizes(min_records=0)


def test_what_fits_is_read_whole():
    assert spread(backlogs(5, 0, 3), 8) == {queue(0): 5, queue(2): 3}


def test_a_cap_is_spread_in_proportion():
    assert list(spread(backlogs(600, 300, 100), 100).values()) == [60, 30, 10]


def test_a_small_queue_is_not_starved():
    shares = spread(backlogs(1_000_000, 1, 1), 10)
    assert sorted(shares.values()) == [1, 1, 8]


def test_with_more_queues_than_the_cap_each_gets_one():
    assert spread(backlogs(*[9] * 20), 5) == dict.fromkeys(backlogs(*[9] * 20), 1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 10**12))
def test_a_spread_keeps_its_promises(waiting, cap):
    wanted = {number: each for number, each in backlogs(*waiting).items() if each}
    shares = spread(backlogs(*waiting), cap)
    assert shares.keys() == wanted.keys()
    assert all(1 <= shares[each] <= wanted[each] for each in wanted)
    assert sum(shares.values()) == min(sum(wanted.values()), max(cap, len(wanted)))
    total = sum(wanted.values())
    assert all(share <= max(1, cap * wanted[each] / total + 1) for each, share in shares.items())


def test_a_large_queue_is_one_task_unless_told_otherwise():
    assert sizes(plan_tasks(ranges(5000, 1000), TaskSizes())) == [5000, 1000]


def test_small_ranges_share_a_task():
    assert sizes(plan_tasks(ranges(*[300] * 7), TaskSizes())) == [1200, 900]
    assert sizes(plan_tasks(ranges(300, 300), ONE_EACH)) == [300, 300]


def test_large_ranges_are_split():
    assert sizes(plan_tasks(ranges(2500), TaskSizes(max_records=1000))) == [833, 833, 834]


def test_about_so_many_tasks_at_least():
    assert sizes(plan_tasks(ranges(9000, 1000), TaskSizes(min_partitions=10))) == [1000] * 10
    assert sizes(plan_tasks(ranges(80), TaskSizes(min_partitions=8))) == [10] * 8  # before minRecordsPerPartition
    assert len(plan_tasks(ranges(*[700] * 4), TaskSizes(min_partitions=2))) >= 2


def test_so_many_tasks_at_most_of_similar_size():
    tasks = plan_tasks(ranges(5000, 4000, 3000, 2000), TaskSizes(max_partitions=2))
    assert sizes(tasks) == [7000, 7000]


def test_more_tasks_than_offsets_are_not_made():
    assert sizes(plan_tasks(ranges(3), TaskSizes(min_partitions=10, min_records=0))) == [1, 1, 1]


def test_nothing_needs_no_task():
    assert plan_tasks(ranges(0, 0), TaskSizes(min_partitions=4)) == []
    assert plan_tasks([QueueRange(queue(0), 9, 3)], TaskSizes()) == []


SIZES = st.builds(
    TaskSizes,
    min_partitions=st.none() | st.integers(1, 30),
    max_partitions=st.none() | st.integers(30, 60),
    min_records=st.integers(0, 3000),
    max_records=st.none() | st.integers(1, 5000),
)


@pytest.mark.slow("plans many batches")
@settings(deadline=None)
@given(st.lists(st.integers(0, 4000), max_size=12), SIZES)
def test_tasks_hold_every_offset_once(lengths, task_sizes):
    wanted = ranges(*lengths)
    tasks = plan_tasks(wanted, task_sizes)
    pieces = sorted(piece for task in tasks for piece in task)
    assert all(len(piece) > 0 for piece in pieces)
    assert all(tasks)
    for each in wanted:
        of_queue = [piece for piece in pieces if piece.queue == each.queue]
        edges = [each.begin, *(piece.end for piece in of_queue)]
        assert [piece.begin for piece in of_queue] == edges[:-1]
        assert edges[-1] == each.end
    if task_sizes.max_partitions is not None:
        assert len(tasks) <= task_sizes.max_partitions
    if task_sizes.max_records is not None:
        assert all(len(piece) <= task_sizes.max_records for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4000), max_size=12), SIZES)
def test_a_plan_is_the_same_again(lengths, task_sizes):
    assert plan_tasks(ranges(*lengths), task_sizes) == plan_tasks(ranges(*lengths), task_sizes)


def test_ten_thousand_queues_are_planned_within_a_second():
    lengths = [(number * 7919) % 5000 + 1 for number in range(10_000)]
    began = time.process_time()  # what else the machine does must not count
    spread(backlogs(*lengths), 100_000)
    tasks = plan_tasks(ranges(*lengths), TaskSizes(max_partitions=64, min_partitions=32, max_records=2000))
    assert time.process_time() - began < 1
    assert len(tasks) == 64
