"""Plan how much of each queue a batch reads, and which task reads it. Pure functions, without brokers or Spark."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.options import TaskSizes


def spread(backlogs: Mapping[MessageQueue, int], cap: int) -> dict[MessageQueue, int]:
    """Return the number of offsets to read of each queue: `cap` in all, in proportion to its backlog.

    A queue with a backlog gets at least 1, so that none waits forever. With more queues than `cap`, each gets 1.
    """
    waiting = {queue: backlog for queue, backlog in backlogs.items() if backlog > 0}
    left, total = cap, sum(waiting.values())
    if total <= cap:
        return waiting
    shares: dict[MessageQueue, int] = {}
    for queue, backlog in sorted(waiting.items(), key=lambda each: (each[1], each[0])):  # the smallest first
        if left * backlog >= total:
            break
        shares[queue] = 1
        left, total = left - 1, total - backlog
    others = [queue for queue in waiting if queue not in shares]
    for queue in others:
        shares[queue] = left * waiting[queue] // total
    rest = left - sum(shares[queue] for queue in others)
    if rest > 0:
        for queue in sorted(others, key=lambda queue: (-(left * waiting[queue] % total), queue))[:rest]:
            shares[queue] += 1
    return shares


def plan_tasks(ranges: Iterable[QueueRange], sizes: TaskSizes) -> list[tuple[QueueRange, ...]]:
    """Return the ranges of each task: every offset of `ranges` once, in few tasks of sufficient size."""
    wanted = [each for each in ranges if len(each) > 0]
    parts, smallest = [_parts(each, sizes) for each in wanted], sizes.min_records
    if sizes.max_records is not None:
        smallest = min(smallest, sizes.max_records // 2)  # or the parts of a split range would share a task
    if sizes.min_partitions is not None and wanted:
        total, fewest = sum(map(len, wanted)), sizes.min_partitions
        if sum(parts) < fewest:
            fair = ((2 * len(each) * fewest + total) // (2 * total) for each in wanted)  # by size, rounded
            parts = [max(pair) for pair in zip(parts, fair, strict=True)]
        smallest = min(smallest, total // (2 * fewest))
    pieces = [piece for each, count in zip(wanted, parts, strict=True) for piece in _split(each, count)]
    return _merge(_pack(pieces, smallest), sizes.max_partitions)


def _parts(whole: QueueRange, sizes: TaskSizes) -> int:
    return 1 if sizes.max_records is None else -(-len(whole) // sizes.max_records)


def _split(whole: QueueRange, parts: int) -> list[QueueRange]:
    """Return `parts` ranges of about the same size; fewer if there are fewer offsets."""
    size, parts = len(whole), min(parts, len(whole))
    edges = [whole.begin + size * index // parts for index in range(parts + 1)]
    return [QueueRange(whole.queue, begin, end) for begin, end in pairwise(edges)]


def _pack(pieces: Iterable[QueueRange], smallest: int) -> list[tuple[QueueRange, ...]]:
    """Let neighbours with fewer than `smallest` offsets share a task until it has at least that many."""
    tasks = list[tuple[QueueRange, ...]]()
    shared, size = list[QueueRange](), 0
    for piece in pieces:
        if len(piece) >= smallest:
            tasks.append((piece,))
            continue
        shared.append(piece)
        size += len(piece)
        if size >= smallest:
            tasks.append(tuple(shared))
            shared, size = [], 0
    if shared:
        tasks.append(tuple(shared))
    return tasks


def _merge(tasks: list[tuple[QueueRange, ...]], limit: int | None) -> list[tuple[QueueRange, ...]]:
    """Join tasks until at most `limit` are left: the largest first, each to the smallest so far."""
    if limit is None or len(tasks) <= limit:
        return tasks
    sized = sorted(((sum(map(len, task)), task) for task in tasks), key=lambda each: (-each[0], each[1]))
    bins = [(0, index, list[QueueRange]()) for index in range(limit)]
    for size, task in sized:
        bin_size, index, ranges = bins[0]
        ranges.extend(task)
        heapq.heapreplace(bins, (bin_size + size, index, ranges))
    return [tuple(sorted(ranges)) for _, _, ranges in sorted(bins, key=lambda each: each[1])]
