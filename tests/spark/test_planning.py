"""The parts of queues that a batch reads, and the tasks that read them. Without Spark or brokers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.options import TaskSizes
from pyrocket_consumer.spark.stream_reader import spread
from pyrocket_consumer.spark.task_reader import plan_partitions
from tests.for_each import for_each
from tests.speed import cpu_at_most


def queue(number: int) -> MessageQueue:
    return MessageQueue("T", f"broker-{number % 3}", number)


def backlogs(*sizes: int) -> dict[MessageQueue, int]:
    return {queue(number): size for number, size in enumerate(sizes)}


def ranges(*sizes: int) -> list[QueueRange]:
    return [QueueRange(queue(number), 100, 100 + size) for number, size in enumerate(sizes)]


def planned_tasks(wanted: list[QueueRange], task_sizes: TaskSizes) -> list[tuple[QueueRange, ...]]:
    return [task.ranges for task in plan_partitions(wanted, task_sizes)]


def sizes(tasks: list[tuple[QueueRange, ...]]) -> list[int]:
    return [sum(map(len, task)) for task in tasks]


@for_each(
    "waiting, cap, shares",
    [
        ([5, 0, 3], 8, [5, None, 3]),
        ([600, 300, 100], 100, [60, 30, 10]),
        ([1_000_000, 1, 1], 10, [8, 1, 1]),
        ([9] * 20, 5, [1] * 20),
    ],
    ids=["what fits is read whole", "in proportion", "none is starved", "one of each if there are more"],
)
def test_a_cap_is_spread(waiting, cap, shares):
    assert spread(backlogs(*waiting), cap) == {queue(n): share for n, share in enumerate(shares) if share}


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 10**12))
def test_a_spread_is_fair(waiting, cap):
    wanted = {number: each for number, each in backlogs(*waiting).items() if each}
    shares = spread(backlogs(*waiting), cap)
    assert shares.keys() == wanted.keys()
    assert all(1 <= shares[each] <= wanted[each] for each in wanted)
    assert sum(shares.values()) == min(sum(wanted.values()), max(cap, len(wanted)))
    total = sum(wanted.values())
    assert all(share <= max(1, cap * wanted[each] / total + 1) for each, share in shares.items())


@for_each(
    "lengths, options, planned",
    [
        ([5000, 1000], {}, [5000, 1000]),  # a large queue is one task by itself
        ([300] * 7, {}, [1200, 900]),  # small ranges share a task
        ([300, 300], {"min_records": 0}, [300, 300]),
        ([2500], {"max_records": 1000}, [833, 833, 834]),
        ([9000, 1000], {"min_partitions": 10}, [1000] * 10),
        ([80], {"min_partitions": 8}, [10] * 8),  # before minRecordsPerPartition
        ([5000, 4000, 3000, 2000], {"max_partitions": 2}, [7000, 7000]),
        ([3], {"min_partitions": 10, "min_records": 0}, [1, 1, 1]),  # one offset each at least
        ([0, 0], {"min_partitions": 4}, []),
    ],
)
def test_tasks(lengths, options, planned):
    assert sizes(planned_tasks(ranges(*lengths), TaskSizes(**options))) == planned


def test_there_may_be_more_tasks_than_wanted_or_none():
    assert len(planned_tasks(ranges(*[700] * 4), TaskSizes(min_partitions=2))) >= 2
    assert planned_tasks([QueueRange(queue(0), 9, 3)], TaskSizes()) == []


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
    tasks = planned_tasks(wanted, task_sizes)
    assert planned_tasks(ranges(*lengths), task_sizes) == tasks
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


def test_ten_thousand_queues_are_planned_within_a_second():
    lengths = [(number * 7919) % 5000 + 1 for number in range(10_000)]
    with cpu_at_most(1):
        spread(backlogs(*lengths), 100_000)
        tasks = planned_tasks(ranges(*lengths), TaskSizes(max_partitions=64, min_partitions=32, max_records=2000))
    assert len(tasks) == 64
